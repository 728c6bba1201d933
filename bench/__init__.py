"""Benchmarks: `python -m bench --help`, from the repository's root."""

import pathlib
import sys

# `-m` puts the source tree first on sys.path, which has no compiled kernels: the installed package
# must win, or the reference is timed.
_root = str(pathlib.Path(__file__).resolve().parent.parent)
sys.path[:] = [p for p in sys.path if p not in ("", _root)] + [_root]
