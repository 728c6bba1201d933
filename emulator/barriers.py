"""mbarriers, named barriers, the cluster barrier, fences, register budgets."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator.compile import Node, address_getter, getter, node, predicated, setter
from emulator.errors import ProtocolError, RaceError, UnknownOpcodeError
from emulator.ptx import SINK, Imm, Instr
from emulator.races import Clocks
from emulator.warp import Group, Warp

_TX_LIMIT = (1 << 20) - 1


class MBarrier:
    """Arrivals and bytes of the current phase, exactly as the hardware counts them."""

    def __init__(self, cta: Any, offset: int, count: int, w: Warp):
        self.cta = cta
        self.offset = offset
        self.count = count
        self.pending = count
        self.tx = 0
        self.phase = 0
        self.gather = Clocks(cta.cluster.slots.capacity)
        self.done = Clocks(cta.cluster.slots.capacity)
        self.init_warp = w
        self.init_clock = w.clock()
        self.fenced = False
        # Copies that signal this barrier have a clock slot together.
        self.slot = cta.cluster.copy_slot(cta, offset)

    def __str__(self) -> str:
        return (
            f"mbarrier at {self.cta.name} {self.offset:#x} (dynamic + {self.offset - 1024}): "
            f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.tx} bytes to go"
        )

    def arrive(self, count: int, clocks: Clocks | None) -> None:
        if clocks is not None:
            self.gather.join(clocks)
        if count > self.pending:
            raise ProtocolError(f"{count} arrivals on {self}")
        self.pending -= count
        self._complete()

    def expect(self, tx: int) -> None:
        self.tx += tx
        if abs(self.tx) > _TX_LIMIT:
            raise ProtocolError(f"transaction count out of range: {self}")

    def copied(self, tx: int, slot: int, clock: int) -> None:
        """Bytes of a copy have landed."""
        self.gather.learn(slot, clock)
        self.expect(-tx)
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.done.join(self.gather)
            self.gather = Clocks(self.done.seen.size)
        self.cta.cluster.changed()

    def check_visible(self, w: Warp) -> None:
        init = self.init_warp
        if w is not init and w.clocks.seen[init.slot] < self.init_clock:
            raise RaceError(f"{w.name} uses {self} without an order after its initialisation")


def find(w: Warp, address: int, cluster_space: bool) -> MBarrier:
    cta, offset = w.cluster.resolve(w, address, cluster_space, "mbarrier access")
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise ProtocolError(
            f"no mbarrier at {cta.name} {offset:#x} (dynamic + {offset - 1024}) was initialised"
        )
    barrier.check_visible(w)
    if cta is not w.cta and not barrier.fenced and w.cluster.machine.options.strict_init:
        raise ProtocolError(f"{barrier} is used from another CTA before fence.mbarrier_init")
    return barrier


def _scope(ins: Instr) -> bool:
    return ins.has("shared::cluster")


def _lanes(w: Warp, g: Group, lanes_of: Any) -> Any:
    if lanes_of is None:
        return np.flatnonzero(g.lanes())
    p = lanes_of(w, g)
    return range(32) if p is None else np.flatnonzero(p)


@node("mbarrier")
def _mbarrier(ins: Instr) -> Node:
    what = ins.parts[1]
    made = {
        "init": _init,
        "inval": _inval,
        "arrive": _arrive,
        "expect_tx": _expect_tx,
        "try_wait": _wait,
        "test_wait": _wait,
    }.get(what)
    if made is None:
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    return made(ins)


def _init(ins: Instr) -> Node:
    address, count = address_getter(ins.ops[0]), getter(ins.ops[1], "u32")
    lanes_of = predicated(ins)

    def init(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in _lanes(w, g, lanes_of):
            cta, offset = w.cluster.resolve(w, int(address(w)[lane]), False, "mbarrier.init")
            if offset % 8:
                raise ProtocolError(f"mbarrier at {offset:#x} is not 8-byte aligned")
            cta.memory.check(offset, offset + 8, "mbarrier.init")
            number = int(count(w)[lane])
            if not 0 < number < 1 << 20:
                raise ProtocolError(f"mbarrier with an arrival count of {number}")
            cta.mbarriers[offset] = MBarrier(cta, offset, number, w)
            cta.memory.hold_barrier(offset, True)
        w.clocks.seen[w.slot] += 1

    return init


def _inval(ins: Instr) -> Node:
    address = address_getter(ins.ops[0])
    lanes_of = predicated(ins)

    def inval(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in _lanes(w, g, lanes_of):
            barrier = find(w, int(address(w)[lane]), False)
            del barrier.cta.mbarriers[barrier.offset]
            barrier.cta.memory.hold_barrier(barrier.offset, False)

    return inval


def _arrive(ins: Instr) -> Node:
    expect = ins.has("expect_tx")
    for part in ins.parts[2:]:
        if part not in ("expect_tx", "shared::cta", "shared::cluster", "shared", "b64",
                        "release", "relaxed", "cta", "cluster", "noComplete"):  # fmt: skip
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    # mbarrier.arrive [addr], without a state, exists for the cluster scope only.
    ops = ins.ops if not hasattr(ins.ops[0], "coords") else (SINK, *ins.ops)
    address = address_getter(ops[1])
    amount = getter(ops[2], "u32") if len(ops) > 2 else None
    state = setter(ops[0], "uint64")
    lanes_of = predicated(ins)
    remote = _scope(ins)
    relaxed = ins.has("relaxed")

    def arrive(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        active = _lanes(w, g, lanes_of)
        if not len(active):
            return
        addresses = address(w)
        clocks = w.arrival(relaxed)
        value = np.zeros(32, np.uint64)
        for lane in active:
            barrier = find(w, int(addresses[lane]), remote)
            value[lane] = barrier.phase
            number = int(amount(w)[lane]) if amount else 1
            if expect:
                barrier.expect(number)
                number = 1
            barrier.arrive(number, clocks)
        state(w, value, g.mask)

    return arrive


def _expect_tx(ins: Instr) -> Node:
    address, amount = address_getter(ins.ops[0]), getter(ins.ops[1], "u32")
    lanes_of = predicated(ins)

    def expect_tx(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        for lane in _lanes(w, g, lanes_of):
            find(w, int(address(w)[lane]), _scope(ins)).expect(int(amount(w)[lane]))

    return expect_tx


def _wait(ins: Instr) -> Node:
    parity = ins.has("parity")
    for part in ins.parts[2:]:
        if part not in ("parity", "shared::cta", "shared", "b64", "acquire", "relaxed", "cta",
                        "cluster"):  # fmt: skip
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    if ins.pred is not None:
        raise UnknownOpcodeError(f"line {ins.line}: a predicated {ins.op} is not modelled")
    address, state = address_getter(ins.ops[1]), getter(ins.ops[2], "u32" if parity else "u64")
    result = setter(ins.ops[0], "bool")
    suspends = ins.parts[1] == "try_wait"
    yes, no = np.ones(32, bool), np.zeros(32, bool)

    def wait(w: Warp, g: Group) -> None:
        lane = g.leader()
        addresses, wanted = address(w), state(w)
        lanes = g.lanes()
        if (addresses[lanes] != addresses[lane]).any() or (wanted[lanes] != wanted[lane]).any():
            raise UnknownOpcodeError("lanes of a warp that wait for different mbarrier phases")
        barrier = find(w, int(addresses[lane]), False)
        want = int(wanted[lane])

        def done() -> bool:
            return (barrier.phase & 1) != want if parity else barrier.phase > want

        cluster = w.cluster
        if done():
            w.clocks.join(barrier.done)
            result(w, yes, g.mask)
        elif g.polling:
            # A suspended wait may always come back empty-handed.
            result(w, no, g.mask)
        elif not suspends or w.rng.random() < cluster.machine.options.spurious_wait:
            result(w, no, g.mask)
            g.polling = True
            w.executed += 1
            g.pc += 1
            if not suspends:
                g.block(lambda: True, "")
            return
        else:
            rounds = cluster.poll_rounds

            def again() -> bool:
                if done():
                    return True
                if cluster.poll_rounds > rounds:
                    g.polling = True
                    return True
                return False

            text = f"parity {want}" if parity else f"phase {want}"
            g.block(again, f"{text} of {barrier}")
            return
        g.polling = False
        w.executed += 1
        g.pc += 1

    return wait


# ---- barriers of threads ----


class NamedBarrier:
    def __init__(self, slots: int):
        self.expected = 0
        self.arrived = 0
        self.generation = 0
        self.gather = Clocks(slots)
        self.done = Clocks(slots)

    def arrive(self, w: Warp, threads: int, number: int, expected: int) -> None:
        if self.arrived and expected != self.expected:
            raise ProtocolError(
                f"barrier {number} is waited for by {expected} and by {self.expected} threads"
            )
        self.expected = expected
        self.arrived += threads
        self.gather.join(w.release())
        if self.arrived > expected:
            raise ProtocolError(f"{self.arrived} threads at barrier {number} for {expected}")
        if self.arrived == expected:
            self.arrived = 0
            self.generation += 1
            self.done.join(self.gather)
        w.cluster.changed()


@node("bar", "barrier")
def _bar(ins: Instr) -> Node:
    if ins.parts[1] == "cluster":
        return _cluster_barrier(ins)
    if ins.parts[1] == "warp":
        return _bar_warp(ins)
    parts = [p for p in ins.parts[1:] if p not in ("cta", "aligned")]
    if parts not in (["sync"], ["arrive"]) or ins.pred is not None:
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    sync = parts == ["sync"]
    aligned = ins.parts[0] == "bar" or ins.has("aligned")
    number = getter(ins.ops[0], "u32")
    count = getter(ins.ops[1], "u32") if len(ins.ops) > 1 else None

    def bar(w: Warp, g: Group) -> None:
        if g.arrived is not None:
            barrier, _ = g.arrived
            w.clocks.join(barrier.done)
            g.arrived = None
            g.pc += 1
            return
        if aligned and w.wait_converged(g):
            return
        w.executed += 1
        lane = g.leader()
        name = int(number(w)[lane])
        if name > 15:
            raise ProtocolError(f"named barrier {name}")
        expected = int(count(w)[lane]) if count else w.cluster.machine.threads
        barrier = w.cta.named_barrier(name)
        generation = barrier.generation
        # A warp counts as a whole.
        barrier.arrive(w, 32, name, expected)
        if not sync:
            g.pc += 1
        elif barrier.generation != generation:
            w.clocks.join(barrier.done)
            g.pc += 1
        else:
            g.arrived = (barrier, generation)
            g.block(
                lambda: barrier.generation != generation,
                f"barrier {name}: {barrier.arrived} of {expected} threads",
            )

    return bar


def _bits(g: Group) -> int:
    """The lanes of a group, lane 0 lowest."""
    if g.mask is None:
        return 0xFFFFFFFF
    return int.from_bytes(np.packbits(g.mask, bitorder="little").tobytes(), "little")


def _bar_warp(ins: Instr) -> Node:
    mask = getter(ins.ops[0], "u32")

    def sync(w: Warp, g: Group) -> None:
        if g.arrived == "go":
            g.arrived = None
            g.pc += 1
            return
        wanted = int(mask(w)[g.leader()])
        others = [o for o in w.groups if o.arrived == "warp"]
        if not any(o is not g and o.arrived != "warp" and _bits(o) & wanted for o in w.groups):
            w.executed += 1
            g.arrived = None
            g.pc += 1
            for other in others:
                other.arrived = "go"
            return
        if g.arrived is None:
            g.arrived = "warp"
        g.block(lambda: g.arrived == "go" or _may_pass(w, g), "bar.warp.sync")

    def _may_pass(w: Warp, g: Group) -> bool:
        # Lanes that have left since no longer count.
        wanted = int(mask(w)[g.leader()])
        return not any(
            other is not g and other.arrived != "warp" and _bits(other) & wanted
            for other in w.groups
        )

    return sync


class ClusterBarrier:
    """Threads that have left count as arrived, in every phase."""

    def __init__(self, cluster: Any):
        self.cluster = cluster
        self.total = cluster.size * cluster.machine.threads
        self.arrived = 0
        self.left = 0
        self.phase = 0
        self.gather = Clocks(cluster.slots.capacity)
        self.done = Clocks(cluster.slots.capacity)
        self.waiting: dict[Warp, int] = {}  # warp -> the phase it has arrived in

    def arrive(self, w: Warp, threads: int, clocks: Clocks | None) -> None:
        if w in self.waiting:
            raise ProtocolError("barrier.cluster.arrive twice without barrier.cluster.wait")
        self.waiting[w] = self.phase
        if clocks is not None:
            self.gather.join(clocks)
        self.arrived += threads
        self._complete()

    def leave(self, w: Warp, threads: int) -> None:
        self.left += threads
        if self.waiting.get(w) != self.phase:
            self.arrived += threads
        self._complete()

    def _complete(self) -> None:
        if self.arrived == self.total:
            self.phase += 1
            self.arrived = self.left
            self.done.join(self.gather)
        self.cluster.changed()


def _cluster_barrier(ins: Instr) -> Node:
    if ins.pred is not None:
        raise UnknownOpcodeError(f"line {ins.line}: a predicated {ins.op} is not modelled")
    relaxed = ins.has("relaxed")

    # The whole warp counts, so it has to be together also without .aligned.
    def arrive(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        w.executed += 1
        g.pc += 1
        w.cluster.barrier.arrive(w, w.cta.threads_of(w), w.arrival(relaxed))

    def wait(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        barrier = w.cluster.barrier
        phase = barrier.waiting.get(w)
        if phase is None:
            raise ProtocolError("barrier.cluster.wait without barrier.cluster.arrive")
        if barrier.phase > phase:
            del barrier.waiting[w]
            w.clocks.join(barrier.done)
            w.executed += 1
            g.pc += 1
            return
        g.block(
            lambda: barrier.phase > phase,
            f"the cluster barrier: {barrier.arrived} of {barrier.total} threads",
        )

    return arrive if ins.parts[2] == "arrive" else wait


# ---- fences, dependent launch, register budget ----


@node("fence")
def _fence(ins: Instr) -> Node:
    lanes_of = predicated(ins)
    rest = ins.parts[1:]

    def plain(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        w.released = w.release()

    def proxy(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        if lanes_of is None or len(_lanes(w, g, lanes_of)):
            w.fence_async_proxy()

    def init(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        if lanes_of is None or len(_lanes(w, g, lanes_of)):
            for barrier in w.cta.mbarriers.values():
                if barrier.init_warp is w:
                    barrier.fenced = True
            w.released = w.release()

    if rest[:2] == ("proxy", "async"):
        return proxy
    if rest[0] == "mbarrier_init":
        return init
    if rest[0] in ("acq_rel", "sc", "acquire", "release"):
        return plain
    raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")


@node("griddepcontrol")
def _griddepcontrol(ins: Instr) -> Node:
    waits = ins.has("wait")

    def control(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        if waits:
            w.dependency_waited = True

    return control


@node("setmaxnreg")
def _setmaxnreg(ins: Instr) -> Node:
    assert isinstance(ins.ops[0], Imm)
    wanted = ins.ops[0].value
    grows = ins.has("inc")

    def setmaxnreg(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        if wanted % 8 or not 24 <= wanted <= 256:
            raise ProtocolError(f"setmaxnreg to {wanted} registers")
        change = wanted - w.registers
        if grows and change < 0 or not grows and change > 0:
            raise ProtocolError(f"setmaxnreg from {w.registers} to {wanted} registers")
        if change * 32 > w.cta.free_registers:
            cta = w.cta
            g.block(
                lambda: change * 32 <= cta.free_registers,
                f"{32 * change} registers, {cta.free_registers} are free",
            )
            return
        w.executed += 1
        g.pc += 1
        w.cta.free_registers -= 32 * change
        w.registers = wanted
        w.cluster.changed()

    return setmaxnreg
