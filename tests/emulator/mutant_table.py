"""The table of seeded bugs in docs/emulator.md, made from mutants.py and mutants_sm100.py.

python tests/emulator/mutant_table.py           # prints it
python tests/emulator/mutant_table.py --write   # puts it into the document
"""

from __future__ import annotations

import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(pathlib.Path(__file__).resolve().parent)]

import mutants  # noqa: E402
import mutants_sm100  # noqa: E402

DOCUMENT = ROOT / "docs" / "emulator.md"
BEGIN = "<!-- mutants: python tests/emulator/mutant_table.py --write -->"
END = "<!-- end of mutants -->"
TABLES = (("sm_90a", mutants.MUTANTS), ("sm_100a", mutants_sm100.MUTANTS))
WORDS = {
    "DeadlockError": "deadlock",
    "RaceError": "race",
    "ProtocolError": "protocol",
    "UninitializedError": "uninitialized",
    "OutOfBoundsError": "bounds",
    "cells": "cells",
}


def where(mutant) -> str:
    """The files that the bug is in; the plan for a bug of the account."""
    files = dict.fromkeys(edit[0] for edit in mutant.edits if len(edit) == 3)
    return ", ".join(files) or ("the plan" if getattr(mutant, "attrs", None) else "test kernel")


def table() -> str:
    """Counts, then a line per bug in the order of the source."""
    every = [m for _, found in TABLES for m in found]
    kinds = collections.Counter(m.kind for m in every)
    lines = [
        f"{len(every)} bugs: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        + ". Noticed as: one of these, whichever the schedule brings first.",
        "",
        "| | bug | kind | in | noticed as |",
        "|---|---|---|---|---|",
    ]
    for arch, found in TABLES:
        for m in found:
            ways = ", ".join(WORDS[name] for name in m.caught)
            lines.append(f"| {arch} | {m.name} | {m.kind} | {where(m)} | {ways} |")
    return "\n".join(lines)


def stored(text: str) -> str:
    """The table in the document."""
    found = re.search(rf"{re.escape(BEGIN)}\n(.*?)\n{re.escape(END)}", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no {BEGIN} in {DOCUMENT}")
    return found[1]


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        text = DOCUMENT.read_text()
        old, new = (f"{BEGIN}\n{part}\n{END}" for part in (stored(text), table()))
        DOCUMENT.write_text(text.replace(old, new))
    else:
        print(table())


if __name__ == "__main__":
    main()
