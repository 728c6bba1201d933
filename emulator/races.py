"""Data races in shared memory, by vector clocks.

Every agent has a slot: a warp, the wgmma queue of a warpgroup, the bulk stores of a warp, the
copies that signal one mbarrier. A warp knows two clocks per slot: `seen`, what is ordered before
its next access, and `fenced`, the part of it that the async proxy sees too. Generic writes enter
`fenced` at fence.proxy.async; what the async proxy wrote enters both. Synchronisation objects carry
both. The lanes of one warp are one agent: a missing __syncwarp is not seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.errors import ProtocolError, RaceError, UninitializedError

_count = np.count_nonzero


class Clocks:
    """The vector clocks of an agent or of a synchronisation object.

    `tensor` is what an agent's tcgen05 instructions see: it grows at tcgen05.fence only, and is not
    passed on.
    """

    __slots__ = ("seen", "fenced", "tensor")

    def __init__(self, slots: int):
        self.seen = np.zeros(slots, np.int32)
        self.fenced = np.zeros(slots, np.int32)
        self.tensor = np.zeros(slots, np.int32)

    def join(self, other: Clocks) -> None:
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def copy(self) -> Clocks:
        out = Clocks.__new__(Clocks)
        out.seen = self.seen.copy()
        out.fenced = self.fenced.copy()
        out.tensor = self.tensor.copy()
        return out

    def for_tensor(self) -> Clocks:
        """The clocks that count for tensor memory, as those of an agent."""
        out = Clocks.__new__(Clocks)
        out.seen = out.fenced = out.tensor = self.tensor
        return out

    def learn(self, slot: int, clock: int) -> None:
        """What an asynchronous operation did up to `clock` is visible, to both proxies."""
        if clock > self.seen[slot]:
            self.seen[slot] = clock
        if clock > self.fenced[slot]:
            self.fenced[slot] = clock


class Slots:
    """Numbers for agents. Slot 0 is nobody."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.names = ["nobody"]
        self.last_write: dict[int, str] = {}

    def add(self, name: str) -> int:
        if len(self.names) == self.capacity:
            raise AssertionError("emulator: too few clock slots")
        self.names.append(name)
        return len(self.names) - 1


class Detector:
    """Checks and records accesses; `words` is a slice or an index array of 4-byte words."""

    def __init__(self, slots: Slots, enabled: bool):
        self.slots = slots
        self.enabled = enabled

    def read(
        self, memory: Any, words: Any, clocks: Clocks, slot: int, clock: int, proxy: str, who: str
    ) -> None:
        written = memory.written[words]
        if _count(written) < written.size:
            raise UninitializedError(
                f"{who} reads what nothing has written, "
                f"{_where(memory, words, ~memory.written[words])}"
            )
        if not self.enabled:
            return
        known = clocks.seen if proxy == "generic" else clocks.fenced
        writers = memory.writer[words]
        bad = known[writers] < memory.clock[words]
        if _count(bad):
            self._report("reads", who, memory, words, writers, bad, clocks, proxy)
        row = memory.readers.get(slot)
        if row is None:
            row = memory.readers[slot] = np.zeros(memory.words.size, np.int32)
        row[words] = clock
        if clock > memory.last_read.get(slot, 0):
            memory.last_read[slot] = clock

    def write(
        self, memory: Any, words: Any, clocks: Clocks, slot: int, clock: int, proxy: str, who: str
    ) -> None:
        if memory.barriers is not None and _count(memory.barriers[words]):
            where = _where(memory, words, memory.barriers[words])
            raise ProtocolError(f"{who} overwrites an mbarrier, {where}")
        if self.enabled:
            known = clocks.seen if proxy == "generic" else clocks.fenced
            writers = memory.writer[words]
            bad = known[writers] < memory.clock[words]
            if _count(bad):
                self._report("overwrites", who, memory, words, writers, bad, clocks, proxy)
            for reader, last in memory.last_read.items():
                if last <= clocks.seen[reader] or reader == slot:
                    continue
                late = memory.readers[reader][words] > clocks.seen[reader]
                if _count(late):
                    raise RaceError(
                        f"{who} overwrites what {self.slots.names[reader]} may still read, "
                        f"{_where(memory, words, late)}"
                    )
            memory.writer[words] = slot
            memory.clock[words] = clock
        memory.written[words] = True

    def _report(self, verb, who, memory, words, writers, bad, clocks, proxy) -> None:
        first = int(np.flatnonzero(bad.ravel())[0])
        writer = int(writers.ravel()[first])
        clock = int(memory.clock[words].ravel()[first])
        unfenced = proxy != "generic" and clocks.seen[writer] >= clock
        why = "without fence.proxy.async" if unfenced else "without an order"
        raise RaceError(
            f"{who} {verb} what {self.slots.names[writer]} wrote {why}, "
            f"{_where(memory, words, bad)}"
        )


def _where(memory: Any, words: Any, bad: np.ndarray) -> str:
    if isinstance(words, slice):
        words = np.arange(words.start, words.stop)
    return memory.where(int(np.asarray(words).ravel()[np.flatnonzero(bad.ravel())[0]]))
