"""Address spaces: global allocations, a CTA's shared memory, kernel parameters.

Generic addresses: shared memory and parameters have windows of their own, the rest is global.
A shared address is rank << 24 | offset, for the CTA's own memory too, and the first 1 KiB of it
belongs to the system; both are facts of the hardware that kernels rely on.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from emulator.errors import OutOfBoundsError, ProtocolError, RaceError, UninitializedError

SHARED_WINDOW = 0x7F00_0000_0000
PARAM_WINDOW = 0x7E00_0000_0000
PARAM_BASE = 0x210
SHARED_RESERVED = 1024
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
GLOBAL_BASE = 0x7A00_0000_0000
_GUARD = 4096

U64 = np.uint64
_ALL_SET = {1: np.uint8(1), 2: np.uint16(0x101), 4: np.uint32(0x1010101), 8: U64(0x101010101010101)}
_NAMES = {
    np.dtype(name): name
    for name in (
        "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "uint64",
        "int64", "float64",
    )
}  # fmt: skip


class Allocation:
    """A piece of global memory.

    Attributes:
      initialized: one flag per byte, None when every byte is.
      pending: written by a launch that may still be running: no access before griddepcontrol.wait.
      writer: CTA that wrote each byte in the last launch that wrote any (0 nobody, else CTA + 1).
      launch: that launch.
      relaxed: what each byte's last store left of a `.relaxed.gpu` one, None without any.
      stores: how many of these there were.
    """

    def __init__(self, base: int, size: int, name: str):
        self.base = base
        self.size = size
        self.name = name
        padded = (size + 31) // 16 * 16
        self.data = np.zeros(padded, np.uint8)
        self.initialized: np.ndarray | None = np.zeros(padded, bool)
        self.pending = False
        self.read_only = False
        self.writer = np.zeros(padded, np.int32)
        self.launch: object = None
        self.relaxed: Relaxed | None = None
        self.stores = 0
        # The flags of a byte, of two, four, eight: all set is 1, 0x0101, ...
        self.flags = {
            size: self.initialized[: padded // size * size].view(f"uint{8 * size}")
            for size in (1, 2, 4, 8)
        }
        self.views = {
            name: self.data[: padded // dtype.itemsize * dtype.itemsize].view(dtype)
            for dtype, name in _NAMES.items()
        }

    def write_host(self, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        self.data[: raw.size] = raw
        if self.initialized is not None:
            self.initialized[: raw.size] = True

    @staticmethod
    def foreign(w: Any, writers: np.ndarray) -> np.ndarray:
        """Which of these writers are of other clusters: those of a launch have no order."""
        return (writers > 0) & ((writers - 1) // w.cluster.size != w.cluster.number)

    def check_writers(self, w: Any, writers: np.ndarray, verb: str) -> None:
        if not np.count_nonzero(writers):
            return
        foreign = self.foreign(w, writers)
        if foreign.any():
            other = int(writers[foreign][0]) - 1
            raise RaceError(f"cta {w.cta.number} {verb} what cta {other} wrote of {self.name}")


class Relaxed:
    """Bytes of an allocation that `.relaxed.gpu` stores of one launch wrote. CTAs without an order
    between them may read these with loads of the same kind, and find what was there before for a
    while."""

    def __init__(self, found: Allocation):
        self.stored = np.zeros(found.data.size, bool)
        self.before = found.data.copy()
        self.known = None if found.initialized is None else found.initialized.copy()
        self.seen: dict[object, np.ndarray] = {}  # by warp: words that it has seen the new value of

    def note(self, found: Allocation, places: np.ndarray, relaxed: bool) -> None:
        """Before a store to these bytes."""
        self.before[places] = found.data[places]
        self.stored[places] = relaxed
        if self.known is not None and found.initialized is not None:
            self.known[places] = found.initialized[places]

    def view(
        self, w: Any, found: Allocation, index: np.ndarray, lanes: np.ndarray
    ) -> tuple[np.ndarray, bool]:
        """What a load of the words `index` by `lanes` finds, and whether some of it is late."""
        machine = w.cluster.machine
        new, old = found.views["uint32"], self.before.view(np.uint32)
        writers, stored = found.writer[4 * index], self.stored[4 * index]
        found.check_writers(w, np.where(stored, 0, writers), "reads")
        foreign = stored & found.foreign(w, writers)
        seen = self.seen.setdefault(w, np.zeros(new.size, bool))
        late = np.array([machine.rng.random() < machine.options.spurious_wait for _ in index])
        late &= foreign & ~seen[index] & lanes
        seen[index[~late & lanes]] = True
        if self.known is not None and not self.known[4 * index[late]].all():
            raise UninitializedError(
                f"{found.name} may be read before anything was written, beside a store"
            )
        return np.where(late, old[index], new[index]), bool(late.any())


class GlobalMemory:
    """Allocations with gaps between them; an access touches exactly one."""

    def __init__(self) -> None:
        self.bases: list[int] = []
        self.allocations: list[Allocation] = []
        self.next = GLOBAL_BASE

    def allocate(self, size: int, name: str, align: int = 256) -> Allocation:
        base = (self.next + align - 1) // align * align
        made = Allocation(base, size, name)
        self.next = base + size + _GUARD
        self.bases.append(base)
        self.allocations.append(made)
        return made

    def find(self, address: int, end: int) -> Allocation:
        """The allocation that holds address..end."""
        i = bisect.bisect_right(self.bases, address) - 1
        if i >= 0:
            found = self.allocations[i]
            if end <= found.base + found.size:
                return found
            raise OutOfBoundsError(
                f"global access {address:#x}..{end:#x} ends {end - found.base - found.size} bytes "
                f"past {found.name} ({found.size} bytes)"
            )
        raise OutOfBoundsError(f"global access {address:#x}..{end:#x} is in no allocation")

    def _lanes(self, w: Any, address: np.ndarray, mask: Any, size: int):
        active = address if mask is None else address[mask]
        if not active.size:
            return None
        lo, hi = int(np.minimum.reduce(active)), int(np.maximum.reduce(active))
        if size > 1 and int(np.bitwise_or.reduce(active)) & (size - 1):
            raise OutOfBoundsError(f"misaligned global access of {size} bytes at {lo:#x}")
        return lo, hi, active

    def load(
        self,
        w: Any,
        address: np.ndarray,
        mask: Any,
        dtype: np.dtype,
        count: int,
        relaxed: bool = False,
    ) -> list:
        """`count` consecutive elements per lane, an array for each."""
        dtype = np.dtype(dtype)
        item = dtype.itemsize
        size = item * count
        lanes = self._lanes(w, address, mask, size)
        if lanes is None:
            return [np.zeros(32, dtype)] * count
        lo, hi, active = lanes
        try:
            found = self.find(lo, hi + size)
        except OutOfBoundsError:
            for a in active:  # lanes in different allocations, or the culprit
                self.find(int(a), int(a) + size)
            return self._load_scattered(w, address, mask, dtype, count, relaxed)
        if found.pending and not w.dependency_waited:
            raise ProtocolError(f"{found.name} is read before griddepcontrol.wait")
        offset = (address - U64(found.base)).astype(np.int64)
        if mask is not None:
            offset = np.where(mask, offset, lo - found.base)
        places = [offset // item if item > 1 else offset]
        for i in range(1, count):
            places.append(places[0] + i)
        if found.initialized is not None:
            flags, every = found.flags[item], _ALL_SET[item]
            for index in places:
                if np.count_nonzero(flags[index] == every) < 32:
                    raise UninitializedError(f"{found.name} is read where nothing was written")
        machine = w.cluster.machine
        if relaxed:
            w.look = found, False
        if found.launch is machine and machine.options.races:
            if relaxed and item == 4 and found.relaxed is not None:
                active = np.ones(32, bool) if mask is None else mask
                views = [found.relaxed.view(w, found, index, active) for index in places]
                w.look = found, any(late for _, late in views)
                return [words.view(dtype) for words, _ in views]
            found.check_writers(w, found.writer[offset], "reads")
        view = found.views[_NAMES[dtype]]
        return [view[index] for index in places]

    def _load_scattered(self, w, address, mask, dtype, count, relaxed):
        out = [np.zeros(32, dtype) for _ in range(count)]
        for lane in range(32):
            if mask is None or mask[lane]:
                one = np.zeros(32, bool)
                one[lane] = True
                for o, v in zip(
                    out, self.load(w, address, one, dtype, count, relaxed), strict=True
                ):
                    o[lane] = v[lane]
        return out

    def store(
        self, w: Any, address: np.ndarray, mask: Any, values: tuple, relaxed: bool = False
    ) -> None:
        item = values[0].dtype.itemsize
        size = item * len(values)
        lanes = self._lanes(w, address, mask, size)
        if lanes is None:
            return
        lo, hi, active = lanes
        try:
            found = self.find(lo, hi + size)
        except OutOfBoundsError:
            for a in active:
                self.find(int(a), int(a) + size)
            for lane in range(32):
                if mask is None or mask[lane]:
                    one = np.zeros(32, bool)
                    one[lane] = True
                    self.store(w, address, one, values, relaxed)
            return
        self.check_store(w, found)
        offset = (active - U64(found.base)).astype(np.int64)
        if w.cluster.machine.options.races:
            found.check_writers(w, found.writer[offset], "overwrites")
        if relaxed and found.relaxed is None:
            found.relaxed = Relaxed(found)
        if found.relaxed is not None:
            found.relaxed.note(found, (offset[:, None] + np.arange(size)).ravel(), relaxed)
        if relaxed:
            found.stores += 1
            w.cluster.changed()  # for those that look
        view = found.views[_NAMES[values[0].dtype]]
        flags, every = found.flags[item], _ALL_SET[item]
        writer = found.writer.reshape(-1, item)
        index = offset // item if item > 1 else offset
        for value in values:
            view[index] = value if mask is None else value[mask]
            writer[index] = w.cta.number + 1
            if found.initialized is not None:
                flags[index] = every
            index = index + 1

    def check_box(self, w: Any, found: Allocation, writers: np.ndarray) -> None:
        """The same for what the copy engine is about to write."""
        if w.cluster.machine.options.races:
            found.check_writers(w, writers, "overwrites")

    @staticmethod
    def check_store(w: Any, found: Allocation) -> None:
        if found.launch is not w.cluster.machine:
            found.launch = w.cluster.machine
            found.writer[:] = 0
            found.relaxed = None
        if found.read_only:
            raise ProtocolError(f"{found.name} is written, but it is an input")
        if found.pending and not w.dependency_waited:
            raise ProtocolError(f"{found.name} is written before griddepcontrol.wait")


class SharedMemory:
    """One CTA's shared memory with the flags and shadow clocks of every 4-byte word."""

    def __init__(self, size: int):
        self.limit = SHARED_RESERVED + size
        padded = (self.limit + 127) // 128 * 128
        self.data = np.full(padded, 0xCB, np.uint8)
        self.words = self.data.view(np.uint32)
        self.halves = self.data.view(np.uint16)
        self.written = np.zeros(padded // 4, bool)
        self.writer = np.zeros(padded // 4, np.intp)  # clock slot of the last write
        self.clock = np.zeros(padded // 4, np.int32)
        self.last_read: dict[int, int] = {}  # clock slot -> the largest clock of readers
        self.readers: dict[int, np.ndarray] = {}  # clock slot -> clock of its last read
        self.barriers: np.ndarray | None = None  # words of mbarriers, once there are any

    def hold_barrier(self, offset: int, held: bool) -> None:
        if self.barriers is None:
            self.barriers = np.zeros(self.words.size, bool)
        self.barriers[offset // 4 : offset // 4 + 2] = held

    def where(self, word: int) -> str:
        return f"at shared offset {4 * word:#x} (dynamic + {4 * word - SHARED_RESERVED})"

    def check(self, offset: int, end: int, what: str) -> None:
        if offset < SHARED_RESERVED or end > self.limit:
            raise OutOfBoundsError(
                f"{what} of shared memory {offset:#x}..{end:#x}; the CTA has "
                f"{SHARED_RESERVED:#x}..{self.limit:#x}"
            )


class Parameters:
    """The kernel's parameter bytes at PARAM_BASE."""

    def __init__(self, data: bytes):
        self.size = len(data)
        self.data = np.frombuffer(data.ljust((len(data) + 31) // 16 * 16, b"\0"), np.uint8)
        self.uniform: dict[tuple, list] = {}  # of all lanes at one address

    def load(self, address: np.ndarray, mask: Any, dtype: np.dtype, count: int) -> list:
        key = (address.tobytes(), dtype, count)
        found = self.uniform.get(key)
        if found is None:
            found = self._load(address, mask, dtype, count)
            if (address == address[0]).all() and (mask is None or mask.any()):
                self.uniform[key] = found
        return found

    def _load(self, address: np.ndarray, mask: Any, dtype: np.dtype, count: int) -> list:
        active = address if mask is None else address[mask]
        if not active.size:
            return [np.zeros(32, dtype)] * count
        item = np.dtype(dtype).itemsize
        first = int(active[0])
        if first >= PARAM_WINDOW:
            first -= PARAM_WINDOW
            address = address - U64(PARAM_WINDOW)
        offset = first - PARAM_BASE
        if offset < 0 or offset + item * count > self.size or offset % item:
            raise OutOfBoundsError(f"parameter access at byte {offset} of {self.size}")
        view = self.data[offset : offset + item * count].view(dtype)
        if (active == active[0]).all():
            return [np.full(32, v) for v in view]
        out = []
        for i in range(count):
            index = np.where(True if mask is None else mask, address, active[0])
            index = (index - U64(PARAM_BASE)).astype(np.int64) // item + i
            out.append(self.data[: self.data.size // item * item].view(dtype)[index])
        return out
