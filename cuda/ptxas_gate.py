"""Compiler launcher: runs nvcc and fails where the machine code is not what the kernels rely on.

ptxas reports serialized wgmma (C7510 and its neighbours), spills and stack frames as mere
information; for these kernels each is a defect. Everything else passes through.
"""

import re
import subprocess
import sys

DEFECTS = re.compile(
    r"\(C7(?:5[12]\d|6\d\d)\)|(?<!\d)[1-9]\d* bytes (?:stack frame|spill stores|spill loads)"
)


def defects(text: str) -> list[str]:
    """The lines of a compiler's output that name a defect."""
    return [line for line in text.splitlines() if DEFECTS.search(line)]


def main(command: list[str]) -> int:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = defects(done.stdout)
    # With -v ptxas tells of every kernel; a build log needs that only when something is wrong.
    quiet = done.returncode == 0 and not found
    lines = done.stdout.splitlines()
    for line in lines:
        if not quiet or not re.match(r"ptxas info|\s+\d+ bytes stack|\s*$", line):
            print(line, file=sys.stderr)
    if found and done.returncode == 0:
        print("ptxas_gate: serialized wgmma, spills or a stack frame:", file=sys.stderr)
        print("\n".join(found), file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
