"""Warps: registers, divergence, and what a warp waits for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.errors import EmulationError, ProtocolError
from emulator.races import Clocks

FULL = np.ones(32, bool)
LANES = np.arange(32, dtype=np.uint32)


class Group:
    """Lanes of a warp at one instruction.

    Attributes:
      mask: the lanes, None for all 32.
      wait: None if it can run, else what tells whether it can again.
      why: what it waits for, for the deadlock report.
    """

    __slots__ = ("pc", "mask", "count", "wait", "why", "arrived", "polling")

    def __init__(self, pc: int, mask: np.ndarray | None, count: int):
        self.pc = pc
        self.mask = mask
        self.count = count
        self.wait: Callable[[], bool] | None = None
        self.why = ""
        self.arrived: Any = None
        self.polling = False

    def lanes(self) -> np.ndarray:
        return FULL if self.mask is None else self.mask

    def leader(self) -> int:
        return 0 if self.mask is None else int(self.mask.argmax())

    def block(self, wait: Callable[[], bool], why: str) -> None:
        self.wait = wait
        self.why = why


class Warp:
    """32 lanes that share registers' names and, where they agree, an instruction."""

    def __init__(self, cta: Any, index: int, code: Any, threads: int):
        self.cta = cta
        self.cluster = cta.cluster
        self.index = index
        self.code = code
        self.nodes = code.nodes
        self.R = list(code.initial_registers)
        live = min(32, threads - 32 * index)
        mask = None if live == 32 else np.arange(32) < live
        self.groups = [Group(0, mask, live)]
        self.live = live
        self.executed = 0
        self.local_pc: int | None = None  # inside a stretch, for messages
        self.priority = 0.0
        self.dependency_waited = False
        self.released: Clocks | None = None  # by the last release fence
        self.registers = cta.launch_registers
        self.S = special_registers(cta, index)
        self.Y = cta.symbols
        machine = self.cluster.machine
        self.name = f"cta {cta.rank} warp {index}" if self.cluster.size > 1 else f"warp {index}"
        self.slot = self.cluster.slots.add(self.name)
        self.clocks = Clocks(self.cluster.slots.capacity)
        self.clocks.seen[self.slot] = 1
        # wgmma: registers written since the last fence, and those that an MMA may still read.
        self.dirty = 0
        self.wgmma: Any = None
        self.bulk: Any = None
        self.copies: list[tuple] = []  # cp.async that nothing has waited for
        self.tmem: Any = None
        self.held: list[tuple[int, int]] = []  # tcgen05 accesses before the next fence
        # Of relaxed loads: what the last one found; by place in the code and lanes, what those did;
        # which of these there were since this warp has let others go on.
        self.look: tuple[Any, bool] | None = None
        self.looks: dict[tuple, tuple] = {}
        self.looked: set[tuple] = set()
        self.rng = machine.rng

    @property
    def memory(self) -> Any:
        return self.cta.memory

    def clock(self) -> int:
        return int(self.clocks.seen[self.slot])

    def nanoseconds(self) -> np.ndarray:
        """The time, of no meaning but that it goes on while everybody waits (scheduler.py)."""
        return np.full(32, self.cluster.nanoseconds, np.uint64)

    def release(self) -> Clocks:
        """What others may learn here: the clocks so far. Later accesses are newer."""
        out = self.clocks.copy()
        self.clocks.seen[self.slot] += 1
        return out

    def arrival(self, relaxed: bool) -> Clocks | None:
        """What an arrival tells others."""
        if relaxed and self.cluster.machine.options.strict_init:
            return self.released
        return self.release()

    def fence_async_proxy(self) -> None:
        np.copyto(self.clocks.fenced, self.clocks.seen)
        self.clocks.seen[self.slot] += 1

    def ready(self) -> bool:
        for g in self.groups:
            if g.wait is None or g.wait():
                return True
        return False

    def run(self, budget: int) -> None:
        """Executes up to `budget` nodes of one ready group, until it has to wait."""
        groups = self.groups
        if len(groups) == 1:
            g = groups[0]
        else:
            can = [g for g in groups if g.wait is None or g.wait()]
            rng = self.rng
            g = min(can, key=lambda g: g.pc) if rng.random() < 0.6 else rng.choice(can)
        g.wait = None
        nodes = self.nodes
        trace = self.cluster.trace
        pc = g.pc
        try:
            while budget:
                budget -= 1
                pc = g.pc
                nodes[pc](self, g)
                if trace is not None:
                    self._trace(g, pc)
                if g.wait is not None or not g.count:
                    break
                if len(groups) > 1 and self.merge(g):
                    break
        except EmulationError as error:
            if not getattr(error, "located", False):
                raise located(error, self, pc) from error
            raise
        except (TypeError, AttributeError) as error:
            if "Pending" in str(error):
                found = ProtocolError(
                    "the result of a wgmma or tcgen05.ld is used before the wait for it"
                )
                raise located(found, self, pc) from error
            raise
        if not g.count:
            groups.remove(g)

    def _trace(self, g: Group, pc: int) -> None:
        """One line for an instruction that others can see, and for each time it has to wait."""
        if pc in self.code.run_ends or pc >= len(self.code.kernel.instrs):
            return
        ins = self.code.kernel.instrs[pc]
        if ins.parts[0] == "bra":
            return
        lanes = "" if g.count in (0, 32) else f" lanes {lane_list(g.lanes())}"
        what = f"waits for {g.why}" if g.wait is not None and g.why else ins.text[:100]
        self.cluster.trace(f"{self.name}{lanes} line {ins.line}: {what}")

    def merge(self, g: Group) -> bool:
        """Joins groups that have met; true if `g` is no more."""
        for other in self.groups:
            if other is not g and other.pc == g.pc and other.arrived is None and g.arrived is None:
                mask = other.lanes() | g.lanes()
                other.mask = None if mask.all() else mask
                other.count += g.count
                other.wait = None
                g.count = 0
                return True
        return False

    def split(self, g: Group, target: int, lanes: np.ndarray, count: int) -> None:
        """`lanes` of g go to `target`, the rest stays."""
        rest = g.lanes() & ~lanes
        self.groups.append(Group(target, lanes, count))
        g.mask = rest
        g.count -= count
        new = self.groups[-1]
        for other in self.groups[:-1]:
            if other is not g and other.pc == target and other.arrived is None:
                mask = other.lanes() | lanes
                other.mask = None if mask.all() else mask
                other.count += count
                other.wait = None
                self.groups.remove(new)
                break

    def converged(self, g: Group) -> bool:
        return g.count == self.live

    def wait_converged(self, g: Group) -> bool:
        """For aligned instructions: true if g has to wait for the other live lanes."""
        if g.count == self.live:
            return False
        g.block(lambda: g.count == self.live, "the other lanes of an aligned instruction")
        return True

    def exit(self, g: Group) -> None:
        self.live -= g.count
        g.count = 0
        self.cluster.changed()
        if self.live == 0:
            self.cta.warp_exited(self)

    def where(self) -> list[str]:
        out = []
        for g in self.groups:
            ins = self.code.kernel.instrs[g.pc]
            lanes = "" if g.count == 32 else f" lanes {lane_list(g.lanes())}"
            why = f" waits for {g.why}" if g.wait is not None else ""
            out.append(f"{self.name}{lanes} line {ins.line}: {ins.text[:110]}{why}")
        return out


def lane_list(mask: np.ndarray) -> str:
    lanes = np.flatnonzero(mask)
    if len(lanes) == lanes[-1] - lanes[0] + 1:
        return f"{lanes[0]}..{lanes[-1]}"
    return ",".join(map(str, lanes))


def located(error: EmulationError, w: Warp, pc: int) -> EmulationError:
    """The same error with the place where it happened."""
    ins = w.code.instruction_at(w, pc)
    where = f"cluster {w.cluster.number} {w.name}, line {ins.line}: {ins.text[:160]}"
    new = type(error)(f"{error}\n  at {where}")
    new.located = True  # type: ignore[attr-defined]
    return new


def special_registers(cta: Any, warp: int) -> dict[str, np.ndarray]:
    machine = cta.cluster.machine
    return _special_registers(
        machine.block, machine.grid, machine.dynamic_shared, cta.cluster.size, cta.number, warp
    )


@functools.lru_cache(maxsize=4096)
def _special_registers(
    block: tuple[int, int, int], grid: tuple[int, int, int], dynamic_shared: int, cluster: int,
    number: int, warp: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    bx, by, bz = block
    linear = warp * 32 + LANES
    gx, gy, gz = grid
    rank = number % cluster
    values: dict[str, Any] = {
        "tid.x": linear % bx,
        "tid.y": linear // bx % by,
        "tid.z": linear // (bx * by),
        "ntid.x": bx,
        "ntid.y": by,
        "ntid.z": bz,
        "ctaid.x": number % gx,
        "ctaid.y": number // gx % gy,
        "ctaid.z": number // (gx * gy),
        "nctaid.x": gx,
        "nctaid.y": gy,
        "nctaid.z": gz,
        "laneid": LANES,
        "warpid": warp,
        "nwarpid": (bx * by * bz + 31) // 32,
        "smid": number,
        "cluster_ctarank": rank,
        "cluster_nctarank": cluster,
        "cluster_ctaid.x": rank,
        "cluster_ctaid.y": 0,
        "cluster_ctaid.z": 0,
        "cluster_nctaid.x": cluster,
        "cluster_nctaid.y": 1,
        "cluster_nctaid.z": 1,
        "clusterid.x": number % gx // cluster,
        "clusterid.y": number // gx % gy,
        "clusterid.z": number // (gx * gy),
        "nclusterid.x": gx // cluster,
        "nclusterid.y": gy,
        "nclusterid.z": gz,
        "is_explicit_cluster": 1,
        "lanemask_lt": (np.uint32(1) << LANES) - 1,
        "lanemask_eq": np.uint32(1) << LANES,
        "dynamic_smem_size": dynamic_shared,
        "WARP_SZ": 32,
    }
    values["clock"] = values["clock64"] = 0
    return {
        name: value.astype(np.uint32) if isinstance(value, np.ndarray) else _same(value)
        for name, value in values.items()
    }


@functools.lru_cache(maxsize=4096)
def _same(value: int) -> np.ndarray:
    array = np.full(32, value, np.uint32)
    array.flags.writeable = False
    return array
