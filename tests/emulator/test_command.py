"""`python -m emulator`: what a developer sees of a kernel, and how to repeat what failed."""

import contextlib
import io
from unittest import mock

import pytest
from absl.testing import absltest

from emulator import product, toolchain
from emulator.__main__ import main

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")
SMALL = ["--shape", "10x128x8", "--policy", "late"]


def run(*args):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main([*SMALL, *args])
    return status, out.getvalue()


class CommandTest(absltest.TestCase):
    def test_seeds(self):
        status, text = run("--seed", "3", "--seeds", "2")
        self.assertEqual(status, 0)
        self.assertEqual([line.split()[2] for line in text.splitlines()[1:]], ["3:", "4:"])
        self.assertIn("every cell right", text)

    def test_trace_tells_launches_and_copies_in_order(self):
        status, text = run("--trace")
        self.assertEqual(status, 0)
        launches = [line for line in text.splitlines() if line.startswith("  launch ")]
        self.assertLen(launches, 2)
        self.assertIn("repack", launches[0])
        self.assertRegex(
            launches[1], r"gemm.*: grid \(1, 1, 1\), 384 threads, clusters of 1, .*dep"
        )
        for what in ("issued: load of weight", "land at", "mbarrier", "wgmma", ": ret"):
            self.assertIn(what, text[text.index(launches[1]) :])

    def test_a_failure_says_how_to_repeat_it(self):
        with mock.patch.object(product, "check", side_effect=product.WrongCells("cells")):
            status, text = run("--seed", "7")
        self.assertEqual(status, 1)
        self.assertIn("WrongCells: cells", text)
        self.assertIn("repeat: --policy late --seed 7 --seeds 1 --trace", text)


if __name__ == "__main__":
    absltest.main()
