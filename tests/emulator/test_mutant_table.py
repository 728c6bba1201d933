"""The document's table of seeded bugs is that of the sources, and long enough."""

import collections

import mutant_table
from absl.testing import absltest


class TableTest(absltest.TestCase):
    def test_document(self):
        found = mutant_table.stored(mutant_table.DOCUMENT.read_text())
        self.assertEqual(found, mutant_table.table(), "run mutant_table.py --write")

    def test_every_architecture_has_its_share(self):
        for arch, found in mutant_table.TABLES:
            kinds = collections.Counter(m.kind for m in found)
            self.assertGreaterEqual(len(found), 40, arch)
            self.assertGreaterEqual(kinds["protocol"], 15, arch)
            self.assertGreater(kinds["account"], 0, arch)
            self.assertGreater(kinds["cells"], 0, arch)

    def test_names_are_unique(self):
        for _, found in mutant_table.TABLES:
            self.assertLen({m.name for m in found}, len(found))

    def test_every_edit_has_its_place(self):
        """Most bugs are seeded by the slow suite only: a moved line must not disarm them."""
        for _, found in mutant_table.TABLES:
            for mutant in found:
                for edit in (e for e in mutant.edits if len(e) == 3):
                    source = (mutant_table.ROOT / "cuda" / edit[0]).read_text()
                    self.assertEqual(source.count(edit[1]), 1, f"{mutant.name}: {edit[:2]}")


if __name__ == "__main__":
    absltest.main()
