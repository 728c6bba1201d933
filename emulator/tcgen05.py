"""tcgen05: allocation, scale factor copies, MMA, commit, loads and stores of tensor memory.

The tensor pipe of a CTA (cta_group::1) or of a pair executes cp, mma and commit in issue order;
with `strict_cp` only the documented orders hold, cp before mma and mma before mma.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from emulator import formats, tmem
from emulator.barriers import find
from emulator.compile import Node, address_getter, getter, node, predicated
from emulator.errors import OutOfBoundsError, ProtocolError, UnknownOpcodeError
from emulator.ptx import Instr, Mem, Reg, Vec
from emulator.races import Clocks
from emulator.tma import AsyncOp
from emulator.warp import Group, Warp
from emulator.wgmma import Pending

ALL = (0, 1, 2, 3)
_LAYOUT_SPAN = {0: 0, 2: 128, 4: 64, 6: 32}


def _group(ins: Instr) -> int:
    return 2 if ins.has("cta_group::2") else 1


def _ctas(w: Warp, group: int) -> list[Any]:
    """The CTAs that take part, leader first."""
    if group == 1:
        return [w.cta]
    if w.cluster.size % 2:
        raise ProtocolError("cta_group::2 in a cluster of odd size")
    first = w.cta.rank & ~1
    return [w.cluster.ctas[first], w.cluster.ctas[first + 1]]


def _tensor_clocks(cluster: Any, clocks: Clocks) -> Clocks:
    return clocks.for_tensor() if cluster.machine.options.strict_fence else clocks


class Pipe:
    """The asynchronous tcgen05 instructions of a CTA or pair, in issue order."""

    def __init__(self, cluster: Any, name: str):
        self.slot = cluster.slots.add(name)
        # Copies of scale factors are agents of their own where only documented orders hold.
        strict = cluster.machine.options.strict_cp
        self.copy_slot = cluster.slots.add(name + " (cp)") if strict else self.slot
        self.ops: list[_PipeOp] = []
        self.issued = 0
        self.clocks = Clocks(cluster.slots.capacity)


def _pipe(w: Warp, group: int) -> Pipe:
    pipes = w.cluster.pipes
    key = (group, w.cta.rank if group == 1 else w.cta.rank // 2)
    if key not in pipes:
        pipes[key] = Pipe(w.cluster, f"tensor pipe of {'pair' if group == 2 else 'cta'} {key[1]}")
    return pipes[key]


class _PipeOp(AsyncOp):
    is_copy = False

    def __init__(self, w: Warp, group: int, text: str):
        self.w = w
        self.cluster = w.cluster
        self.ctas = _ctas(w, group)
        for cta in self.ctas:
            cta.check_alive(text)
            tmem.of(cta).use_group(group)
        self.pipe = _pipe(w, group)
        self.pipe.issued += 1
        self.index = self.pipe.issued
        self.name = f"{text} {self.index} of {w.name}"
        self.clocks = w.clocks.copy()
        self.pipe.ops.append(self)
        self.slot = self.pipe.copy_slot if self.is_copy else self.pipe.slot
        w.cluster.launch_async(self)

    def touches(self, cta: Any) -> bool:
        return cta in self.ctas

    def ready(self) -> bool:
        ops = self.pipe.ops
        if self.is_copy and self.cluster.machine.options.strict_cp:
            return next(op for op in ops if op.is_copy) is self
        return ops[0] is self

    def step(self) -> None:
        if self.is_copy and self.cluster.machine.options.strict_cp:
            known = self.clocks
        else:
            known = self.pipe.clocks
            known.join(self.clocks)
            np.maximum(known.tensor, self.clocks.tensor, out=known.tensor)
        self.execute(known)
        self.pipe.clocks.join(known)
        self.pipe.clocks.learn(self.slot, self.index)
        self.pipe.clocks.tensor[self.slot] = self.index
        self.pipe.ops.remove(self)
        self.done = True
        self.cluster.changed()

    def execute(self, known: Clocks) -> None:
        raise NotImplementedError

    def read_shared(self, cta: Any, index: np.ndarray, known: Clocks) -> np.ndarray:
        """The words at these indices, through the async proxy."""
        memory = cta.memory
        cta.check_alive(self.name)
        if int(index.max()) * 4 + 4 > memory.limit or int(index.min()) < 256:
            raise OutOfBoundsError(f"{self.name} reads outside the shared memory of {cta.name}")
        self.cluster.detector.read(memory, index, known, self.slot, self.index, "async", self.name)
        return memory.words[index]

    def read_tmem(self, cta: Any, column: int, columns: int, known: Clocks) -> np.ndarray:
        memory = tmem.of(cta)
        known = _tensor_clocks(self.cluster, known)
        index = memory.index(column, columns, ALL, self.name)
        self.cluster.detector.read(
            memory, index, known, self.slot, self.index, "generic", self.name
        )
        return memory.data[:, column : column + columns]

    def write_tmem(self, cta: Any, column: int, value: np.ndarray, known: Clocks) -> None:
        memory = tmem.of(cta)
        known = _tensor_clocks(self.cluster, known)
        index = memory.index(column, value.shape[1], ALL, self.name)
        self.cluster.detector.write(
            memory, index, known, self.slot, self.index, "generic", self.name
        )
        memory.data[:, column : column + value.shape[1]] = value


# ---- operands in shared memory ----


@dataclasses.dataclass(frozen=True)
class SharedDescriptor:
    start: int
    leading: int
    stride: int
    span: int

    @classmethod
    def decode(cls, bits: int) -> SharedDescriptor:
        if bits >> 46 & 3 != 1:
            raise ProtocolError(f"shared memory descriptor {bits:#x} without version 1")
        if bits >> 49 & 15:
            raise UnknownOpcodeError("base offsets and the LBO mode of descriptors")
        span = _LAYOUT_SPAN.get(bits >> 61)
        if span is None:
            raise UnknownOpcodeError(f"layout type {bits >> 61} of a descriptor")
        return cls(
            (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, span
        )

    def k_major(self, rows: int) -> np.ndarray:
        """Words of 32 bytes of K of each row, (rows, 8)."""
        r, k = np.arange(rows)[:, None], np.arange(0, 32, 4)[None, :]
        if self.span:
            at = self.start + r // 8 * self.stride + r % 8 * self.span + k
            at ^= at >> 3 & (self.span - 16)
        else:
            at = self.start + r // 8 * self.stride + k // 16 * self.leading + r % 8 * 16 + k % 16
        return at >> 2


class _ScaleCopy(_PipeOp):
    """cp.32x128b.warpx4: 32 rows of 16 bytes to 32 lanes of four columns, in all quarters."""

    is_copy = True

    def __init__(self, w: Warp, group: int, column: int, descriptor: int):
        self.column = column
        self.descriptor = SharedDescriptor.decode(descriptor)
        if self.descriptor.span:
            raise UnknownOpcodeError("tcgen05.cp from a swizzled layout")
        super().__init__(w, group, "tcgen05.cp")

    def execute(self, known: Clocks) -> None:
        r, k = np.arange(32)[:, None], np.arange(0, 16, 4)[None, :]
        d = self.descriptor
        index = (d.start + r // 8 * d.stride + r % 8 * 16 + k) >> 2
        for cta in self.ctas:
            rows = self.read_shared(cta, index, known)
            self.write_tmem(cta, self.column, np.tile(rows, (4, 1)), known)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of MMA: what 32 bytes of K hold, and elements per block scale (0: none)."""

    name: str
    block: int = 0


class _Mma(_PipeOp):
    def __init__(
        self, w: Warp, group: int, kind: Kind, d: int, a: int, b: int, idesc: int,
        scales: tuple[int, int], accumulate: bool,
    ):  # fmt: skip
        self.kind = kind
        lane, self.d = tmem.split(d)
        if lane:
            raise ProtocolError("the accumulator of an MMA must start at lane 0")
        self.a, self.b = SharedDescriptor.decode(a), SharedDescriptor.decode(b)
        self.scales = [tmem.split(s & 0x3FFFFFFF)[1] for s in scales] if kind.block else []
        self.accumulate = accumulate
        self.n = (idesc >> 17 & 63) << 3
        m = (idesc >> 24 & 31) << 4
        if m != 128 * group:
            raise UnknownOpcodeError(f"tcgen05.mma with M = {m} in cta_group::{group}")
        if self.n % (8 * group) or not 8 <= self.n <= 256:
            raise ProtocolError(f"tcgen05.mma with N = {self.n} in cta_group::{group}")
        if idesc >> 13 & 15 or idesc & 15:
            raise UnknownOpcodeError(f"negated, transposed or sparse operands: {idesc:#x}")
        self._formats(idesc)
        super().__init__(w, group, "tcgen05.mma")

    def _formats(self, idesc: int) -> None:
        a_format, b_format = idesc >> 7 & 7, idesc >> 10 & 7
        if self.kind.block:
            if (a_format, b_format) != (1, 1):
                raise ProtocolError(f"formats {a_format}, {b_format}: e2m1 is 1")
            if idesc >> 31:
                raise UnknownOpcodeError("K = 96 is not modelled")
            e8m0 = bool(idesc >> 23 & 1)
            if self.kind.block == 32 and not e8m0:
                raise ProtocolError("blocks of 32 take e8m0 scales, the descriptor says e4m3")
            self.scale_format = "ue8m0" if e8m0 else "ue4m3"
            self.ids = (idesc >> 29 & 3, idesc >> 4 & 3)
            for i in self.ids:
                if i not in ((0,) if self.kind.block == 16 else (0, 2)):
                    raise ProtocolError(f"scale factor id {i} with blocks of {self.kind.block}")
            self.operands = ("e2m1", "e2m1")
        else:
            if idesc >> 4 & 3 != 1:
                raise UnknownOpcodeError("accumulators other than fp32")
            names = {0: "f16", 1: "bf16"}
            if a_format not in names or b_format not in names:
                raise UnknownOpcodeError(f"kind::f16 with formats {a_format}, {b_format}")
            self.operands = (names[a_format], names[b_format])

    def execute(self, known: Clocks) -> None:
        n = self.n
        rows = n // len(self.ctas)
        parts = [
            self.read_shared(cta, self.b.k_major(rows), known).view(np.uint8) for cta in self.ctas
        ]
        b = formats.decode(np.concatenate(parts), self.operands[1])
        for cta in self.ctas:
            raw = self.read_shared(cta, self.a.k_major(128), known).view(np.uint8)
            a = formats.decode(raw, self.operands[0])
            scaled_b = b
            if self.kind.block:
                a = a * self._scale(cta, 0, 128, known)
                scaled_b = b * self._scale(cta, 1, n, known)
            out = a @ scaled_b.T
            if self.accumulate:
                out = out + self.read_tmem(cta, self.d, n, known).view(np.float32)
            self.write_tmem(cta, self.d, out.astype(np.float32).view(np.uint32), known)

    def _scale(self, cta: Any, which: int, rows: int, known: Clocks) -> np.ndarray:
        """(rows, 64) block scales: row r in lane r % 32 of column r / 32, a byte per block."""
        columns = (rows + 31) // 32
        cells = np.ascontiguousarray(self.read_tmem(cta, self.scales[which], columns, known))
        quarter = cells[:32]
        if not (cells.reshape(4, 32, columns) == quarter).all():
            raise ProtocolError("scale factors differ between the quarters of tensor memory")
        words = np.ascontiguousarray(quarter.T).reshape(-1)[:rows]
        first, count = self.ids[which], 64 // self.kind.block
        codes = words[:, None].view(np.uint8)[:, first : first + count]
        return np.repeat(formats.table(self.scale_format)[codes], self.kind.block, axis=1)


class _Commit(_PipeOp):
    def __init__(self, w: Warp, group: int, barriers: list):
        self.barriers = barriers
        super().__init__(w, group, "tcgen05.commit")

    def touches(self, cta: Any) -> bool:
        return any(barrier.cta is cta for barrier in self.barriers)

    def execute(self, known: Clocks) -> None:
        told = known.copy()
        told.learn(self.pipe.slot, self.index - 1)
        told.learn(self.pipe.copy_slot, self.index - 1)
        for barrier in self.barriers:
            barrier.cta.check_alive(self.name)
            barrier.arrive(1, told)


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
        "ld": _ld,
        "st": _st,
        "wait::ld": _wait,
        "wait::st": _wait,
        "fence::before_thread_sync": _fence,
        "fence::after_thread_sync": _fence,
    }.get(ins.parts[1])
    if made is None:
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    return made(ins)


def _known(ins: Instr, *parts: str) -> None:
    for part in ins.parts[2:]:
        if part not in parts:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op}: .{part} is not modelled")


def _whole_warp(w: Warp, g: Group) -> None:
    if g.count != 32:
        raise ProtocolError("an aligned tcgen05 instruction in a warp with fewer lanes")


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
    _known(ins, "cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta", "b32")
    group = _group(ins)
    to, count = address_getter(ins.ops[0]), getter(ins.ops[1], "u32")

    def alloc(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        _whole_warp(w, g)
        ctas = _ctas(w, group)
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
    _known(ins, "cta_group::1", "cta_group::2", "sync", "aligned", "b32")
    group = _group(ins)
    address, count = getter(ins.ops[0], "u32"), getter(ins.ops[1], "u32")

    def dealloc(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        _whole_warp(w, g)
        ctas = _ctas(w, group)
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
            known = _tensor_clocks(w.cluster, w.clocks).copy()
            for clocks in state.clocks:
                known.join(_tensor_clocks(w.cluster, clocks))
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
    _known(ins, "cta_group::1", "cta_group::2", "sync", "aligned")

    def relinquish(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        w.executed += 1
        g.pc += 1
        tmem.of(w.cta).relinquished = True

    return relinquish


def _one_lane(w: Warp, g: Group, lanes_of: Any) -> int | None:
    """The one lane that issues; None if the predicate holds for no lane."""
    p = g.lanes() if lanes_of is None else lanes_of(w, g)
    active = np.arange(32) if p is None else np.flatnonzero(p)
    if len(active) > 1:
        raise ProtocolError(f"{len(active)} lanes issue a tcgen05 instruction meant for one")
    return int(active[0]) if len(active) else None


def _leader_only(w: Warp, group: int) -> None:
    if group == 2 and w.cta.rank % 2:
        raise ProtocolError("cta_group::2 issued by the odd CTA of a pair")


def _cp(ins: Instr) -> Node:
    _known(ins, "cta_group::1", "cta_group::2", "32x128b", "warpx4")
    group = _group(ins)
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
        _ScaleCopy(w, group, column, int(descriptor(w)[lane]))

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
    group = _group(ins)
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
        _Mma(
            w, group, kind, int(d(w)[lane]), int(a(w)[lane]), int(b(w)[lane]),
            int(idesc(w)[lane]), tuple(int(s(w)[lane]) for s in scales),
            bool(accumulate(w)[lane]),
        )  # fmt: skip

    return mma


def _commit(ins: Instr) -> Node:
    _known(ins, "cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster",
           "multicast::cluster", "b64")  # fmt: skip
    group = _group(ins)
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
        _Commit(w, group, barriers)

    return commit


class _TmemState:
    """A warp's loads and stores of tensor memory."""

    def __init__(self, w: Warp):
        self.load_slot = w.cluster.slots.add(f"tcgen05.ld of {w.name}")
        self.store_slot = w.cluster.slots.add(f"tcgen05.st of {w.name}")
        self.loads: list[_Load] = []
        self.stores: list[_Store] = []
        self.issued = 0


def _tmem_state(w: Warp) -> _TmemState:
    if w.tmem is None:
        w.tmem = _TmemState(w)
    return w.tmem


class _Access(AsyncOp):
    def __init__(self, w: Warp, address: int, columns: int, text: str):
        self.w = w
        self.name = f"{text} of {w.name}"
        state = _tmem_state(w)
        state.issued += 1
        self.clock = state.issued
        lane, self.column = tmem.split(address)
        quarter = w.index % 4
        if lane != 32 * quarter:
            raise ProtocolError(
                f"{text} of lanes {lane}.. by warp {w.index}, which reaches lanes {32 * quarter}.."
            )
        self.memory = tmem.of(w.cta)
        self.columns = columns
        self.index = self.memory.index(self.column, columns, (quarter,), text)
        self.rows = slice(32 * quarter, 32 * quarter + 32)
        self.clocks = w.clocks.copy()

    def touches(self, cta: Any) -> bool:
        return cta is self.w.cta


class _Load(_Access):
    def step(self) -> None:
        w = self.w
        clocks = _tensor_clocks(w.cluster, self.clocks)
        w.cluster.detector.read(
            self.memory, self.index, clocks, w.tmem.load_slot, self.clock, "generic", self.name
        )
        cells = self.memory.data[self.rows, self.column : self.column + self.columns]
        self.result = {w.index % 4: np.ascontiguousarray(cells.T)}
        self.done = True
        w.cluster.changed()


class _Store(_Access):
    def __init__(self, w: Warp, address: int, values: list[np.ndarray]):
        super().__init__(w, address, len(values), "tcgen05.st")
        self.values = values

    def step(self) -> None:
        w = self.w
        clocks = _tensor_clocks(w.cluster, self.clocks)
        w.cluster.detector.write(
            self.memory, self.index, clocks, w.tmem.store_slot, self.clock, "generic",
            self.name,
        )  # fmt: skip
        block = np.stack(self.values, axis=1)
        self.memory.data[self.rows, self.column : self.column + self.columns] = block
        self.done = True
        w.cluster.changed()


def _shape_columns(ins: Instr) -> int:
    _known(ins, "sync", "aligned", "32x32b", "b32", *(f"x{1 << i}" for i in range(8)))
    if not ins.has("32x32b"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    return next(int(p[1:]) for p in ins.parts if p[0] == "x" and p[1:].isdigit())


def _ld(ins: Instr) -> Node:
    columns = _shape_columns(ins)
    items = ins.ops[0].items if isinstance(ins.ops[0], Vec) else (ins.ops[0],)
    if len(items) != columns or not all(isinstance(i, Reg) for i in items):
        raise UnknownOpcodeError(f"line {ins.line}: {len(items)} registers for {columns} columns")
    address = getter(ins.ops[1].base, "u32")
    offset = ins.ops[1].offset

    def ld(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        _whole_warp(w, g)
        w.executed += 1
        g.pc += 1
        op = _Load(w, _uniform(address(w)) + offset, columns, "tcgen05.ld")
        if w.cluster.machine.options.strict_ld:
            w.tmem.loads.append(op)
            for i, reg in enumerate(items):
                w.R[reg.index] = Pending(op, i, np.dtype(reg.storage))
            w.cluster.launch_async(op)
        else:
            # Whatever uses the registers comes after the load.
            op.step()
            _accessed(w, w.tmem.load_slot, op.clock)
            for i, reg in enumerate(items):
                w.R[reg.index] = op.result[w.index % 4][i].view(reg.storage)

    return ld


def _uniform(value: np.ndarray) -> int:
    if (value != value[0]).any():
        raise ProtocolError("the address of a tcgen05 instruction differs between lanes")
    return int(value[0])


def _st(ins: Instr) -> Node:
    columns = _shape_columns(ins)
    items = ins.ops[1].items if isinstance(ins.ops[1], Vec) else (ins.ops[1],)
    if len(items) != columns:
        raise UnknownOpcodeError(f"line {ins.line}: {len(items)} registers for {columns} columns")
    readers = [getter(item, "b32") for item in items]
    address = getter(ins.ops[0].base, "u32")
    offset = ins.ops[0].offset

    def st(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        _whole_warp(w, g)
        w.executed += 1
        g.pc += 1
        op = _Store(w, _uniform(address(w)) + offset, [read(w) for read in readers])
        w.tmem.stores.append(op)
        w.cluster.launch_async(op)

    return st


def _wait(ins: Instr) -> Node:
    _known(ins, "sync", "aligned")
    return _wait_node(ins.parts[1] == "wait::ld")


def _wait_node(loads: bool) -> Node:
    def wait(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        state = _tmem_state(w)
        ops = state.loads if loads else state.stores

        def complete() -> bool:
            return all(op.done for op in ops)

        if not complete():
            g.block(complete, f"tcgen05.{'ld' if loads else 'st'}")
            return
        w.executed += 1
        g.pc += 1
        for op in ops:
            _accessed(w, state.load_slot if loads else state.store_slot, op.clock)
        if loads and ops:
            finished = set(map(id, ops))
            warp = w.index % 4
            for i, value in enumerate(w.R):
                if type(value) is Pending and id(value.op) in finished:
                    w.R[i] = value.op.result[warp][value.index].view(value.dtype)
        ops.clear()

    return wait


def _accessed(w: Warp, slot: int, clock: int) -> None:
    """A load or store is complete; others may learn of it after the next fence."""
    w.clocks.tensor[slot] = clock
    if w.cluster.machine.options.strict_fence:
        w.held.append((slot, clock))
    else:
        w.clocks.learn(slot, clock)


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
