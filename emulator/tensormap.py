"""Tensor maps: what cuTensorMapEncodeTiled accepts, in an encoding of our own.

The hardware's bits are not documented and nothing but the copy engine reads them, so a map here is
the fields themselves, packed into the 128 bytes.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

from emulator.errors import ProtocolError

MAGIC = 0x50414D54
BYTES = 128
# CUtensorMapDataType -> bytes per element. 13 is 16U4_ALIGN8B, packed nibbles: bytes here, with
# coordinates counted in nibbles.
NIBBLES = 13
ELEMENT_BYTES = dict(enumerate((1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 1)))
# CUtensorMapSwizzle -> bytes of the span.
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}
_FORMAT = "<I8B4x6I4QQ5H2x"


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """Dimension 0 is the innermost, contiguous one."""

    address: int
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of dimensions 1..
    box: tuple[int, ...]
    swizzle: int  # bytes, 0 for none
    nibbles: bool = False  # coordinate 0 counts half bytes
    nan_fill: bool = False

    @property
    def box_bytes(self) -> int:
        total = self.element_bytes
        for side in self.box:
            total *= side
        return total


class Refused(ValueError):
    """The driver would return CUDA_ERROR_INVALID_VALUE."""


def encode(
    data_type: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    fill: int = 0,
) -> bytes:
    """The 128 bytes of a tiled map.

    Raises:
      Refused: the driver's documented conditions do not hold.
    """
    rank = len(dims)
    width = ELEMENT_BYTES.get(data_type)
    conditions = [
        (width is not None, f"data type {data_type}"),
        (1 <= rank <= 5, f"rank {rank}"),
        (interleave == 0, f"interleave {interleave}"),
        (swizzle in SWIZZLE_BYTES, f"swizzle {swizzle}"),
        (address % 16 == 0, f"address {address:#x} is no multiple of 16"),
        (all(0 < d <= 1 << 32 for d in dims), f"dims {dims}"),
        (all(0 < b <= 256 for b in box), f"box {box}"),
        (all(1 <= s <= 8 for s in element_strides), f"element strides {element_strides}"),
        (all(s % 16 == 0 and s < 1 << 40 for s in strides), f"strides {strides}"),
        (fill == 0 or data_type >= 6, "NaN fill of an integer type"),
        (l2_promotion in range(4), f"L2 promotion {l2_promotion}"),
    ]
    for good, what in conditions:
        if not good:
            raise Refused(what)
    if data_type == NIBBLES:
        if dims[0] % 2 or box[0] % 2:
            raise Refused(f"dims {dims} and box {box} of 4-bit elements")
        dims, box = [dims[0] // 2, *dims[1:]], [box[0] // 2, *box[1:]]
    inner = box[0] * width
    span = SWIZZLE_BYTES[swizzle]
    if inner % 16 or (span and inner > span):
        raise Refused(f"inner box of {inner} bytes with a swizzle of {span}")
    for i, stride in enumerate(strides):
        below = dims[i] * (width if i == 0 else strides[i - 1])
        if stride < below and i == 0:
            raise Refused(f"stride {stride} is smaller than a row of {below} bytes")
    if any(s != 1 for s in element_strides):
        raise Refused("element strides other than 1 are not modelled")
    pad = [0] * (5 - rank)
    raw = struct.pack(
        _FORMAT,
        MAGIC, data_type, rank, interleave, swizzle, l2_promotion, fill, 0, 0,
        *(d - 1 for d in dims), *pad, 0,
        *strides, *([0] * (4 - len(strides))),
        address, *box, *pad,
    )  # fmt: skip
    return raw.ljust(BYTES, b"\0")


def decode(raw: bytes) -> TensorMap:
    fields = struct.unpack(_FORMAT, raw[: struct.calcsize(_FORMAT)])
    magic, data_type, rank, _, swizzle, _, fill = fields[:7]
    if magic != MAGIC:
        raise ProtocolError("the copy engine is given something that is no tensor map")
    dims, strides = fields[9:14], fields[15:19]
    return TensorMap(
        fields[19],
        ELEMENT_BYTES[data_type],
        tuple(d + 1 for d in dims[:rank]),
        strides[: rank - 1],
        fields[20 : 20 + rank],
        SWIZZLE_BYTES[swizzle],
        data_type == NIBBLES,
        bool(fill),
    )
