"""Tensor memory of a CTA: 128 lanes by 512 columns of 32 bits, and its allocator.

Shadow state is per quarter of the lanes and column: quarters are what a warp can reach.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.errors import OutOfBoundsError, ProtocolError

LANES, COLUMNS, QUARTERS = 128, 512, 4


class TensorMemory:
    """Data and flags, in the shape that races.Detector expects."""

    def __init__(self, cta: Any):
        self.cta = cta
        self.data = np.full((LANES, COLUMNS), 0x7FBADBAD, np.uint32)
        self.owner = np.zeros(COLUMNS, np.int32)
        size = QUARTERS * COLUMNS
        self.words = np.zeros(size, np.uint8)
        self.written = np.zeros(size, bool)
        self.writer = np.zeros(size, np.intp)
        self.clock = np.zeros(size, np.int32)
        self.last_read: dict[int, int] = {}  # clock slot -> the largest clock of readers
        self.readers: dict[int, np.ndarray] = {}
        self.barriers = None  # there are none
        self.allocations: dict[int, int] = {}  # first column -> columns
        self.relinquished = False
        self.group = 0  # cta_group of the kernel's tcgen05 instructions

    def where(self, word: int) -> str:
        return f"at tensor memory quarter {word // COLUMNS}, column {word % COLUMNS}"

    def use_group(self, group: int) -> None:
        if self.group not in (0, group):
            raise ProtocolError("a kernel mixes cta_group::1 and cta_group::2")
        self.group = group

    def index(self, first: int, columns: int, quarters: tuple[int, ...], what: str) -> np.ndarray:
        """Shadow words of a region, which must be allocated."""
        if first + columns > COLUMNS:
            raise OutOfBoundsError(f"{what} at columns {first}..{first + columns} of {COLUMNS}")
        missing = np.flatnonzero(self.owner[first : first + columns] == 0)
        if missing.size:
            raise OutOfBoundsError(f"{what} at column {first + int(missing[0])}: not allocated")
        base = np.asarray(quarters)[:, None] * COLUMNS
        return (base + np.arange(first, first + columns)).ravel()

    def free_places(self, columns: int) -> list[int]:
        return [
            first
            for first in range(0, COLUMNS, columns)
            if not self.owner[first : first + columns].any()
        ]

    def allocate(self, first: int, columns: int) -> None:
        self.owner[first : first + columns] = 1
        self.allocations[first] = columns

    def deallocate(self, first: int, columns: int) -> None:
        if self.allocations.get(first) != columns:
            raise ProtocolError(
                f"dealloc of {columns} columns at {first}; allocated are {self.allocations}"
            )
        del self.allocations[first]
        self.owner[first : first + columns] = 0

    def check_exit(self) -> None:
        if self.allocations:
            raise ProtocolError(f"{self.cta.name} exits with tensor memory {self.allocations}")


def of(cta: Any) -> TensorMemory:
    if cta.tmem is None:
        cta.tmem = TensorMemory(cta)
    return cta.tmem


def split(address: int) -> tuple[int, int]:
    """(lane, column) of a tensor memory address; bits 30 and 31 are the scale factor's."""
    lane, column = address >> 16 & 0x3FFF, address & 0xFFFF
    if lane >= LANES or column >= COLUMNS:
        raise OutOfBoundsError(f"tensor memory address {address:#x}")
    return lane, column
