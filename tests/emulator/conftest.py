"""The emulator is imported from the source tree, the package from where it is installed."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))


def pytest_collection_modifyitems(config, items):
    """Slow tests of this folder run when they are asked for: -m slow, -m matrix."""
    if any(mark in config.option.markexpr for mark in ("slow", "matrix")):
        return
    skip = pytest.mark.skip(reason="slow; run with -m slow")
    for item in items:
        if item.get_closest_marker("slow") and pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
