"""Benchmarks: `python -m bench --help`, from the repository's root."""

import os
import pathlib
import sys

# `-m` puts the source tree first on sys.path, which has no compiled kernels: the installed package
# must win, or the reference is timed.
_root = str(pathlib.Path(__file__).resolve().parent.parent)
sys.path[:] = [p for p in sys.path if p not in ("", _root)] + [_root]

# Other libraries are timed in the same process and need memory of their own.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
