"""Shared-memory accesses of warps: ld, st, stmatrix, ldmatrix, and exchanges between lanes."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator import barriers
from emulator.alu import DTYPES
from emulator.compile import Node, address_getter, getter, node, predicated, setter
from emulator.errors import EmulationError, OutOfBoundsError, ProtocolError, UnknownOpcodeError
from emulator.memory import RANK_SHIFT, SHARED_WINDOW
from emulator.ptx import Instr, Pair, Vec
from emulator.tma import AsyncOp
from emulator.warp import FULL, LANES, Group, Warp


def _space(ins: Instr) -> str | None:
    for part in ("shared", "shared::cta", "shared::cluster"):
        if ins.has(part):
            return part
    return None


def targets(w: Warp, address: np.ndarray, lanes: np.ndarray, size: int, remote: bool, what: str):
    """(cta, lane mask, offsets of these lanes) for each CTA that the lanes address."""
    active = (address if lanes is FULL else address[lanes]).astype(np.int64)
    if size > 1 and int(np.bitwise_or.reduce(active)) & (size - 1):
        raise OutOfBoundsError(f"misaligned {what} of {size} bytes")
    low, high = int(np.minimum.reduce(active)), int(np.maximum.reduce(active))
    rank = low >> RANK_SHIFT
    if rank == high >> RANK_SHIFT:
        cta = w.cluster.cta(w, rank, remote, what)
        base = rank << RANK_SHIFT
        cta.memory.check(low - base, high - base + size, what)
        return [(cta, lanes, active - base if base else active)]
    out = []
    for rank in np.unique(active >> RANK_SHIFT):
        mine = lanes & (address >> address.dtype.type(RANK_SHIFT) == rank)
        out += targets(w, address, mine, size, remote, what)
    return out


def _generic(address: np.ndarray, lanes: np.ndarray) -> tuple[bool, np.ndarray]:
    """Whether generic addresses are shared, and the addresses there."""
    shared = address >= np.uint64(SHARED_WINDOW)
    if shared[lanes].all():
        return True, (address - np.uint64(SHARED_WINDOW)).astype(np.uint32)
    if shared[lanes].any():
        raise UnknownOpcodeError("generic access to shared and global memory in one warp")
    return False, address


def word_index(offset: np.ndarray, size: int) -> np.ndarray:
    """Words that accesses of `size` bytes at `offset` touch."""
    words = offset >> _TWO
    if size <= 4:
        return words
    return (words[:, None] + _STEPS[size // 4]).ravel()


_TWO = np.array(2)
_STEPS = {count: np.arange(count) for count in (1, 2, 4)}


@node("ld", "st")
def _access(ins: Instr) -> Node:
    if ins.has("async"):
        return _store_async(ins)
    space = _space(ins)
    for part in ins.parts[1:-1]:
        if part not in ("shared", "shared::cta", "shared::cluster", "v2", "v4", "relaxed", "weak",
                        "volatile", "cta", "cluster", "acquire", "release"):  # fmt: skip
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    kind = ins.parts[-1]
    dtype = np.dtype(DTYPES[kind])
    load = ins.parts[0] == "ld"
    memory_op, value_op = (ins.ops[1], ins.ops[0]) if load else ins.ops
    items = value_op.items if isinstance(value_op, Vec) else (value_op,)
    count = len(items)
    size = dtype.itemsize * count
    address_of = address_getter(memory_op)
    remote = space == "shared::cluster"
    lanes_of = predicated(ins)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    item = dtype.itemsize
    if load:
        writers = [_widening(item, dtype) for item in items]
    else:
        readers = [getter(item, kind) for item in items]

    def access(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        mask = g.mask if lanes_of is None else lanes_of(w, g)
        lanes = FULL if mask is None else mask
        if mask is not None and not np.count_nonzero(mask):
            return
        address = address_of(w)
        if space is None:
            shared, address = _generic(address, lanes)
            if not shared:
                machine_memory = w.cluster.machine.memory
                if load:
                    values = machine_memory.load(w, address, mask, dtype, count)
                    for write, value in zip(writers, values, strict=True):
                        write(w, value, mask)
                else:
                    machine_memory.store(w, address, mask, tuple(r(w) for r in readers))
                return
        detector = w.cluster.detector
        for cta, part, offset in targets(w, address, lanes, size, remote, ins.op):
            memory = cta.memory
            words = word_index(offset, size)
            view = memory.data.view(unsigned)
            index = offset // item if item > 1 else offset
            who = w.name
            if load:
                detector.read(memory, words, w.clocks, w.slot, w.clock(), "generic", who)
                if part is not FULL:
                    at = np.full(32, index[0])
                    at[part] = index
                    index = at
                for i, write in enumerate(writers):
                    value = view[index + i if i else index].view(dtype)
                    write(w, value, mask if part is lanes else part)
            else:
                detector.write(memory, words, w.clocks, w.slot, w.clock(), "generic", who)
                for i, read in enumerate(readers):
                    value = read(w).view(unsigned)
                    view[index + i if i else index] = value if part is FULL else value[part]

    return access


class _RemoteStore(AsyncOp):
    """What lanes of one warp store asynchronously to one CTA, in two parts and any order."""

    def __init__(self, w: Warp, cta: Any, offset: np.ndarray, values: list, barrier: Any):
        self.name = f"st.async of {w.name}"
        self.w, self.cta, self.barrier = w, cta, barrier
        self.clocks = w.clocks.copy()
        w.cluster.copy_clocks[barrier.slot] += 1
        self.clock = w.cluster.copy_clocks[barrier.slot]
        lanes = list(range(len(offset)))
        w.rng.shuffle(lanes)
        half = w.rng.randrange(len(lanes))
        self.offset, self.values = offset, values
        self.parts = [part for part in (lanes[:half], lanes[half:]) if part]

    def touches(self, cta: Any) -> bool:
        return cta is self.cta

    def step(self) -> None:
        lanes = self.parts.pop()
        self.cta.check_alive(self.name)
        memory, cluster = self.cta.memory, self.w.cluster
        size = 4 * len(self.values)
        at = self.offset[lanes]
        slot = self.barrier.slot
        cluster.detector.write(
            memory, word_index(at, size), self.clocks, slot, self.clock, "generic", self.name
        )
        view = memory.data[: memory.data.size // 4 * 4].view(np.uint32)
        for i, value in enumerate(self.values):
            view[at // 4 + i] = value[lanes]
        self.barrier.copied(size * len(lanes), slot, self.clock)
        self.done = not self.parts


def _store_async(ins: Instr) -> Node:
    known = ("async", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4", "weak")
    kind = ins.parts[-1]
    if ins.parts[0] != "st" or kind not in ("b32", "u32", "s32", "f32"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    for part in ins.parts[1:-1]:
        if part not in known:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    memory_op, value_op, barrier_op = ins.ops
    items = value_op.items if isinstance(value_op, Vec) else (value_op,)
    address_of, barrier_of = address_getter(memory_op), address_getter(barrier_op)
    readers = [getter(item, kind) for item in items]
    lanes_of = predicated(ins)

    def store(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        mask = g.mask if lanes_of is None else lanes_of(w, g)
        lanes = FULL if mask is None else mask
        if mask is not None and not mask.any():
            return
        signals = barrier_of(w)
        values = [read(w).view(np.uint32) for read in readers]
        for cta, part, offset in targets(w, address_of(w), lanes, 4 * len(items), True, ins.op):
            for signal in np.unique(signals[part]):
                mine = signals[part] == signal
                barrier = barriers.find(w, int(signal), True)
                if barrier.cta is not cta:
                    raise ProtocolError(f"st.async to {cta.name} signals {barrier}")
                op = _RemoteStore(w, cta, offset[mine], [v[part][mine] for v in values], barrier)
                w.cluster.launch_async(op)

    return store


def _widening(item: Any, dtype: np.dtype):
    """A setter that sign- or zero-extends to the register."""
    write = setter(item, dtype.name)
    wide = np.dtype(item.storage) if hasattr(item, "storage") else dtype
    if wide.itemsize <= dtype.itemsize:
        return write
    kind = "int" if dtype.kind == "i" else "uint"
    target = np.dtype(f"{kind}{8 * wide.itemsize}")
    return lambda w, value, mask: write(w, value.astype(target).view(wide), mask)


# ---- matrices ----


@node("stmatrix", "ldmatrix")
def _matrix(ins: Instr) -> Node:
    for part in ins.parts[1:]:
        if part not in ("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared",
                        "shared::cta", "b16"):  # fmt: skip
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    store = ins.parts[0] == "stmatrix"
    count = next(int(p[1:]) for p in ins.parts if p in ("x1", "x2", "x4"))
    trans = ins.has("trans")
    memory_op, value_op = ins.ops if store else ins.ops[::-1]
    items = value_op.items if isinstance(value_op, Vec) else (value_op,)
    address_of = address_getter(memory_op)
    readers = [getter(item, "b32") for item in items] if store else []
    writers = [setter(item, "uint32") for item in items] if not store else []
    lanes = LANES < 8 * count

    def matrix(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        w.executed += 1
        g.pc += 1
        address = address_of(w)
        ((cta, _, offset),) = targets(w, address, lanes, 16, False, ins.op)
        memory = cta.memory
        rows = offset
        words = word_index(rows, 16)
        detector = w.cluster.detector
        # Row r of matrix i is at the address of lane 8 i + r: eight 16-bit elements.
        index = (rows[:, None] // 2 + np.arange(8)).reshape(count, 8, 8)
        if store:
            detector.write(memory, words, w.clocks, w.slot, w.clock(), "generic", w.name)
            for i, read in enumerate(readers):
                # Lane l holds elements 2 (l % 4), + 1 of row l / 4.
                tile = read(w).view(np.uint16).reshape(8, 8)
                memory.halves[index[i]] = tile.T if trans else tile
        else:
            detector.read(memory, words, w.clocks, w.slot, w.clock(), "generic", w.name)
            for i, write in enumerate(writers):
                tile = memory.halves[index[i]]
                tile = np.ascontiguousarray(tile.T if trans else tile)
                write(w, tile.reshape(64).view(np.uint32), None)

    return matrix


# ---- lanes ----


def _member_wait(w: Warp, g: Group, members: int) -> bool:
    """Waits until every live lane of the member mask is in this group."""
    alive = np.zeros(32, bool)
    for other in w.groups:
        alive |= other.lanes()
    wanted = alive & (members >> np.arange(32) & 1).astype(bool)
    if not (g.lanes() & ~((members >> np.arange(32)) & 1).astype(bool)).any():
        if not (wanted & ~g.lanes()).any():
            return False
        count = g.count
        g.block(lambda: g.count != count or len(w.groups) == 1, "the other lanes of its mask")
        return True
    raise ProtocolError(f"a lane outside the member mask {members:#x} executes the instruction")


@node("shfl")
def _shfl(ins: Instr) -> Node:
    mode = ins.parts[2]
    to, value, lane_op, clamp_op, mask_op = ins.ops
    pred = None
    if isinstance(to, Pair):
        to, pred = to.first, to.second
    kind = "b32"
    read = getter(value, kind)
    lane_of, clamp_of, mask_of = (getter(op, "u32") for op in (lane_op, clamp_op, mask_op))
    write = setter(to, "uint32")
    write_pred = setter(pred, "bool") if pred is not None else None

    def shfl(w: Warp, g: Group) -> None:
        if _member_wait(w, g, int(mask_of(w)[g.leader()])):
            return
        w.executed += 1
        g.pc += 1
        b = lane_of(w).astype(np.int64)
        c = clamp_of(w).astype(np.int64)
        segment, bound = c >> 8 & 31, c & 31
        lane = LANES.astype(np.int64)
        max_lane = (lane & segment) | (bound & ~segment)
        min_lane = lane & segment
        if mode == "bfly":
            source = lane ^ b
            ok = source <= max_lane
        elif mode == "up":
            source = lane - b
            ok = source >= max_lane
        elif mode == "down":
            source = lane + b
            ok = source <= max_lane
        else:
            source = min_lane | (b & ~segment)
            ok = source <= max_lane
        source = np.where(ok, source, lane)
        lanes = g.lanes()
        if (~lanes[source & 31] & lanes).any():
            raise EmulationError("shfl reads a lane that does not take part")
        write(w, read(w)[source & 31], g.mask)
        if write_pred is not None:
            write_pred(w, ok, g.mask)

    return shfl


@node("redux")
def _redux(ins: Instr) -> Node:
    how, kind = ins.parts[2], ins.parts[-1]
    read, mask_of = getter(ins.ops[1], kind), getter(ins.ops[2], "u32")
    write = setter(ins.ops[0], DTYPES[kind])
    reduce = {
        "max": np.max,
        "min": np.min,
        "add": lambda v: np.add.reduce(v, dtype=v.dtype),
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }.get(how)
    if reduce is None or kind == "f32":
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")

    def redux(w: Warp, g: Group) -> None:
        if _member_wait(w, g, int(mask_of(w)[g.leader()])):
            return
        w.executed += 1
        g.pc += 1
        value = read(w)
        write(w, np.full(32, reduce(value[g.lanes()]), value.dtype), g.mask)

    return redux


@node("vote", "activemask")
def _vote(ins: Instr) -> Node:
    if ins.parts[0] == "activemask":
        write = setter(ins.ops[0], "uint32")

        def active(w: Warp, g: Group) -> None:
            w.executed += 1
            g.pc += 1
            write(w, np.full(32, _bits(g.lanes()), np.uint32), g.mask)

        return active
    how = ins.parts[2]
    read, mask_of = getter(ins.ops[1], "pred"), getter(ins.ops[2], "u32")
    if how not in ("ballot", "any", "all", "uni"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    write = setter(ins.ops[0], "uint32" if how == "ballot" else "bool")

    def vote(w: Warp, g: Group) -> None:
        if _member_wait(w, g, int(mask_of(w)[g.leader()])):
            return
        w.executed += 1
        g.pc += 1
        p = read(w) & g.lanes()
        if how == "ballot":
            write(w, np.full(32, _bits(p), np.uint32), g.mask)
        else:
            n = int(np.count_nonzero(p))
            answer = {"any": n > 0, "all": n == g.count, "uni": n in (0, g.count)}[how]
            write(w, np.full(32, answer), g.mask)

    return vote


def _bits(mask: np.ndarray) -> int:
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


@node("elect")
def _elect(ins: Instr) -> Node:
    """The hardware may elect any lane; which one is a choice of the run's seed."""
    to = ins.ops[0]
    lane_set, pred_set = setter(to.first, "uint32"), setter(to.second, "bool")
    mask_of = getter(ins.ops[1], "u32")

    def elect(w: Warp, g: Group) -> None:
        if _member_wait(w, g, int(mask_of(w)[g.leader()])):
            return
        w.executed += 1
        g.pc += 1
        lanes = np.flatnonzero(g.lanes())
        machine = w.cluster.machine
        leader = lanes[machine.elected % len(lanes)] if machine.options.random_elect else lanes[0]
        pred_set(w, LANES == leader, g.mask)
        lane_set(w, np.full(32, leader, np.uint32), g.mask)

    return elect
