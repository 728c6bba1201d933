"""The tensor pipe: copies of scale factors, MMA and commit of tcgen05, in issue order.

A CTA (cta_group::1) or a pair has one. With `strict_cp` only the documented orders hold, cp before
mma and mma before mma.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from emulator import formats, tmem
from emulator.errors import OutOfBoundsError, ProtocolError, UnknownOpcodeError
from emulator.ptx import Instr
from emulator.races import Clocks
from emulator.tma import AsyncOp
from emulator.warp import Group, Warp

ALL = (0, 1, 2, 3)
_LAYOUT_SPAN = {0: 0, 2: 128, 4: 64, 6: 32}


def group_of(ins: Instr) -> int:
    return 2 if ins.has("cta_group::2") else 1


def ctas_of(w: Warp, group: int) -> list[Any]:
    """The CTAs that take part, leader first."""
    if group == 1:
        return [w.cta]
    if w.cluster.size % 2:
        raise ProtocolError("cta_group::2 in a cluster of odd size")
    first = w.cta.rank & ~1
    return [w.cluster.ctas[first], w.cluster.ctas[first + 1]]


def tensor_clocks(cluster: Any, clocks: Clocks) -> Clocks:
    return clocks.for_tensor() if cluster.machine.options.strict_fence else clocks


def known_parts(ins: Instr, *parts: str) -> None:
    for part in ins.parts[2:]:
        if part not in parts:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op}: .{part} is not modelled")


def whole_warp(w: Warp, g: Group) -> None:
    if g.count != 32:
        raise ProtocolError("an aligned tcgen05 instruction in a warp with fewer lanes")


class Pipe:
    """The asynchronous tcgen05 instructions of a CTA or pair, in issue order."""

    def __init__(self, cluster: Any, name: str):
        self.slot = cluster.slots.add(name)
        # Copies of scale factors are agents of their own where only documented orders hold.
        strict = cluster.machine.options.strict_cp
        self.copy_slot = cluster.slots.add(name + " (cp)") if strict else self.slot
        self.ops: list[PipeOp] = []
        self.issued = 0
        self.clocks = Clocks(cluster.slots.capacity)


def pipe_of(w: Warp, group: int) -> Pipe:
    pipes = w.cluster.pipes
    key = (group, w.cta.rank if group == 1 else w.cta.rank // 2)
    if key not in pipes:
        pipes[key] = Pipe(w.cluster, f"tensor pipe of {'pair' if group == 2 else 'cta'} {key[1]}")
    return pipes[key]


class PipeOp(AsyncOp):
    is_copy = False

    def __init__(self, w: Warp, group: int, text: str):
        self.w = w
        self.cluster = w.cluster
        self.ctas = ctas_of(w, group)
        for cta in self.ctas:
            cta.check_alive(text)
            tmem.of(cta).use_group(group)
        self.pipe = pipe_of(w, group)
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
        known = tensor_clocks(self.cluster, known)
        index = memory.index(column, columns, ALL, self.name)
        self.cluster.detector.read(
            memory, index, known, self.slot, self.index, "generic", self.name
        )
        return memory.data[:, column : column + columns]

    def write_tmem(self, cta: Any, column: int, value: np.ndarray, known: Clocks) -> None:
        memory = tmem.of(cta)
        known = tensor_clocks(self.cluster, known)
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


class ScaleCopy(PipeOp):
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


class Mma(PipeOp):
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


class Commit(PipeOp):
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
