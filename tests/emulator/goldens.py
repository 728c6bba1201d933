"""Golden bits of an H200: which cases there are, and what the file holds."""

from __future__ import annotations

import hashlib
import pathlib

import numpy as np

from emulator.product import Case

FILE = pathlib.Path(__file__).resolve().parent / "goldens_h200.npz"

CASES = (
    Case("mxfp4", 37, 72, 288, 0),
    Case("mxfp4", 40, 136, 416, 48, cluster=2),
    Case("mxfp4", 16, 24, 2080, 0, exact=True),
    Case("mxfp4", 16, 24, 2080, 32),
    Case("mxfp4", 37, 77, 160, 32, affine=False),
    Case("mxfp4", 40, 40, 640, 48, fused=True),
    Case("mxfp4", 33, 24, 1096, 128, fused=True, global_scale=True, rule="floor"),
    Case("nvfp4", 37, 72, 208, 0, global_scale=True),
    Case("nvfp4", 40, 136, 288, 48, cluster=2),
    Case("nvfp4", 16, 24, 1056, 32),
    Case("int4", 37, 72, 288, 0),
    Case("int4", 40, 136, 416, 48, cluster=2, act_unsigned=True),
)
RESULTS = ("y", "act", "token_scale", "rows", "lora_act")


def digest(arrays: dict[str, np.ndarray]) -> str:
    """Of a case's operands, which are made again from their seed and not stored."""
    out = hashlib.sha256()
    for name in sorted(arrays):
        out.update(name.encode() + arrays[name].tobytes())
    return out.hexdigest()
