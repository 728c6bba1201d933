"""tcgen05 instructions: allocation, and issue of what the tensor pipe executes."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator import tmem
from emulator.barriers import find
from emulator.compile import Node, active_lanes, address_getter, getter, node, predicated
from emulator.errors import ProtocolError, UnknownOpcodeError
from emulator.ptx import Instr, Mem, Vec
from emulator.races import Clocks
from emulator.tensor_pipe import (
    ALL,
    Commit,
    Kind,
    Mma,
    ScaleCopy,
    ctas_of,
    group_of,
    known_parts,
    tensor_clocks,
    whole_warp,
)
from emulator.tmem_access import ld_node, st_node, wait_node
from emulator.warp import Group, Warp

# ---- instructions ----


@node("tcgen05")
def _tcgen05(ins: Instr) -> Node:
    made = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "cp": _cp,
        "mma": _mma,
        "commit": _commit,
        "ld": ld_node,
        "st": st_node,
        "wait::ld": wait_node,
        "wait::st": wait_node,
        "fence::before_thread_sync": _fence,
        "fence::after_thread_sync": _fence,
    }.get(ins.parts[1])
    if made is None:
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    return made(ins)


class _Rendezvous:
    """Both CTAs of a pair allocate or free together."""

    def __init__(self) -> None:
        self.arrived: dict[int, int] = {}  # rank -> columns
        self.done: set[int] = set()
        self.place = 0
        self.clocks: list[Clocks] = []


def _columns(w: Warp, g: Group, value: Any) -> int:
    columns = int(value(w)[g.leader()])
    if columns not in (32, 64, 128, 256, 512):
        raise ProtocolError(f"{columns} columns: expected a power of two from 32 to 512")
    return columns


def _alloc(ins: Instr) -> Node:
    known_parts(ins, "cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32")
    group = group_of(ins)
    to, count = address_getter(ins.ops[0]), getter(ins.ops[1], "u32")

    def alloc(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        whole_warp(w, g)
        ctas = ctas_of(w, group)
        memories = [tmem.of(cta) for cta in ctas]
        columns = _columns(w, g, count)
        state = w.cluster.allocating.setdefault(ctas[0].rank, _Rendezvous())
        rank = w.cta.rank
        if rank not in state.done:
            for memory in memories:
                memory.use_group(group)
                if memory.relinquished:
                    raise ProtocolError("alloc after relinquish_alloc_permit")
            state.arrived[rank] = columns
            if len(set(state.arrived.values())) > 1:
                raise ProtocolError("the CTAs of a pair allocate different numbers of columns")
            places = memories[0].free_places(columns)
            if len(state.arrived) < len(ctas) or not places:
                what = f"alloc of {columns} columns"
                g.block(
                    lambda: (
                        rank in state.done
                        or (
                            len(state.arrived) == len(ctas)
                            and bool(memories[0].free_places(columns))
                        )
                    ),
                    what if places else f"{what}, none are free",
                )
                w.cluster.changed()
                return
            state.place = w.rng.choice(places)
            for memory in memories:
                memory.allocate(state.place, columns)
            state.done = set(state.arrived)
            state.arrived = {}
            w.cluster.changed()
        state.done.discard(rank)
        w.executed += 1
        g.pc += 1
        _, offset = w.cluster.resolve(w, int(to(w)[g.leader()]), False, "tcgen05.alloc")
        w.memory.check(offset, offset + 4, "tcgen05.alloc")
        index = np.array([offset >> 2])
        w.cluster.detector.write(w.memory, index, w.clocks, w.slot, w.clock(), "generic", w.name)
        w.memory.words[offset >> 2] = state.place

    return alloc


def _dealloc(ins: Instr) -> Node:
    known_parts(ins, "cta_group::1", "cta_group::2", "sync", "aligned", "b32")
    group = group_of(ins)
    address, count = getter(ins.ops[0], "u32"), getter(ins.ops[1], "u32")

    def dealloc(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        whole_warp(w, g)
        ctas = ctas_of(w, group)
        columns = _columns(w, g, count)
        state = w.cluster.freeing.setdefault(ctas[0].rank, _Rendezvous())
        rank = w.cta.rank
        if rank not in state.done:
            state.arrived[rank] = columns
            state.clocks.append(w.clocks.copy())
            if len(state.arrived) < len(ctas):
                g.block(lambda: rank in state.done, "dealloc of the other CTA")
                w.cluster.changed()
                return
            _, column = tmem.split(int(address(w)[g.leader()]))
            known = tensor_clocks(w.cluster, w.clocks).copy()
            for clocks in state.clocks:
                known.join(tensor_clocks(w.cluster, clocks))
            state.clocks = []
            for cta in ctas:
                memory = tmem.of(cta)
                memory.use_group(group)
                index = memory.index(column, columns, ALL, "tcgen05.dealloc")
                _check_idle(w, known, memory, index)
                memory.deallocate(column, columns)
            state.done = set(state.arrived)
            state.arrived = {}
            w.cluster.changed()
        state.done.discard(rank)
        w.executed += 1
        g.pc += 1

    return dealloc


def _check_idle(w: Warp, known: Clocks, memory: tmem.TensorMemory, index: np.ndarray) -> None:
    """Everything that used the columns is ordered before the dealloc."""
    writers = memory.writer[index]
    late = known.seen[writers] < memory.clock[index]
    names = [w.cluster.slots.names[int(s)] for s in np.unique(writers[late])]
    for slot, row in memory.readers.items():
        if (row[index] > known.seen[slot]).any():
            names.append(w.cluster.slots.names[slot])
    if names:
        raise ProtocolError(f"dealloc of columns that {', '.join(names)} may still use")
    memory.written[index] = False


def _relinquish(ins: Instr) -> Node:
    known_parts(ins, "cta_group::1", "cta_group::2", "sync", "aligned")

    def relinquish(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        w.executed += 1
        g.pc += 1
        tmem.of(w.cta).relinquished = True

    return relinquish


def _one_lane(w: Warp, g: Group, lanes_of: Any) -> int | None:
    """The one lane that issues; None if the predicate holds for no lane."""
    active = active_lanes(w, g, lanes_of)
    if len(active) > 1:
        raise ProtocolError(f"{len(active)} lanes issue a tcgen05 instruction meant for one")
    return int(active[0]) if len(active) else None


def _leader_only(w: Warp, group: int) -> None:
    if group == 2 and w.cta.rank % 2:
        raise ProtocolError("cta_group::2 issued by the odd CTA of a pair")


def _cp(ins: Instr) -> Node:
    known_parts(ins, "cta_group::1", "cta_group::2", "32x128b", "warpx4")
    group = group_of(ins)
    if not ins.has("32x128b"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    to, descriptor = address_getter(ins.ops[0]), getter(ins.ops[1], "u64")
    lanes_of = predicated(ins)

    def cp(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        lane = _one_lane(w, g, lanes_of)
        if lane is None:
            return
        _leader_only(w, group)
        _, column = tmem.split(int(to(w)[lane]))
        ScaleCopy(w, group, column, int(descriptor(w)[lane]))

    return cp


_KINDS = {
    ("kind::f16",): Kind("f16"),
    ("kind::mxf4", "block_scale", "scale_vec::2X"): Kind("mxf4", 32),
    ("kind::mxf4", "block_scale", "block32"): Kind("mxf4", 32),
    ("kind::mxf4nvf4", "block_scale", "scale_vec::2X"): Kind("mxf4nvf4", 32),
    ("kind::mxf4nvf4", "block_scale", "block32"): Kind("mxf4nvf4", 32),
    ("kind::mxf4nvf4", "block_scale", "scale_vec::4X"): Kind("mxf4nvf4", 16),
    ("kind::mxf4nvf4", "block_scale", "block16"): Kind("mxf4nvf4", 16),
}


def _mma(ins: Instr) -> Node:
    group = group_of(ins)
    kind = _KINDS.get(tuple(p for p in ins.parts[2:] if not p.startswith("cta_group")))
    if kind is None or isinstance(ins.ops[1], Mem):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.text[:100]} is not modelled")
    # Without block scales a vector of disabled output lanes may come before the predicate.
    disabled = []
    if not kind.block and len(ins.ops) == 6 and isinstance(ins.ops[4], Vec):
        disabled = [getter(op, "u32") for op in ins.ops[4].items]
    if len(ins.ops) != (7 if kind.block else 6 if disabled else 5):
        raise UnknownOpcodeError(f"line {ins.line}: {len(ins.ops)} operands of {ins.op}")
    d = address_getter(ins.ops[0])
    a, b, idesc = (getter(op, k) for op, k in zip(ins.ops[1:4], ("u64", "u64", "u32"), strict=True))
    scales = [address_getter(op) for op in ins.ops[4:6]] if kind.block else []
    accumulate = getter(ins.ops[-1], "pred")
    lanes_of = predicated(ins)

    def mma(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        lane = _one_lane(w, g, lanes_of)
        if lane is None:
            return
        _leader_only(w, group)
        if any(int(lanes(w)[lane]) for lanes in disabled):
            raise UnknownOpcodeError("disabled output lanes are not modelled")
        Mma(
            w, group, kind, int(d(w)[lane]), int(a(w)[lane]), int(b(w)[lane]),
            int(idesc(w)[lane]), tuple(int(s(w)[lane]) for s in scales),
            bool(accumulate(w)[lane]),
        )  # fmt: skip

    return mma


def _commit(ins: Instr) -> Node:
    known_parts(ins, "cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster",
           "multicast::cluster", "b64")  # fmt: skip
    group = group_of(ins)
    address = address_getter(ins.ops[0])
    mask_of = getter(ins.ops[1], "u16") if ins.has("multicast::cluster") else None
    lanes_of = predicated(ins)

    def commit(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        lane = _one_lane(w, g, lanes_of)
        if lane is None:
            return
        _leader_only(w, group)
        barrier = find(w, int(address(w)[lane]), True)
        barriers = [barrier]
        if mask_of is not None:
            mask = int(mask_of(w)[lane])
            barriers = []
            for rank in range(16):
                if mask >> rank & 1:
                    cta = w.cluster.cta(w, rank, True, "commit")
                    base = rank << 24 | barrier.offset
                    barriers.append(find(w, base, True))
                    assert barriers[-1].cta is cta
        Commit(w, group, barriers)

    return commit


def _fence(ins: Instr) -> Node:
    before = ins.parts[1] == "fence::before_thread_sync"

    def fence(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        if before:
            for slot, clock in w.held:
                w.clocks.learn(slot, clock)
            w.held.clear()
        else:
            np.maximum(w.clocks.tensor, w.clocks.seen, out=w.clocks.tensor)

    return fence
