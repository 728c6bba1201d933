"""Warpgroup MMA: descriptors, fragments, the queue of a warpgroup, arithmetic.

The four warps of a warpgroup issue the same instructions; each becomes one operation of the group's
in-order queue and may execute at any time until a wait_group covers it. Until then its accumulators
are `Pending`: copying them is harmless (a compiler renames registers), using them is an error.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from emulator import formats
from emulator.compile import Node, getter, node
from emulator.errors import OutOfBoundsError, ProtocolError, UnknownOpcodeError
from emulator.ptx import Imm, Instr, Reg, Vec
from emulator.tma import AsyncOp
from emulator.warp import Group, Warp

# Fraction bits that survive the alignment of the products of one k-step, by operand type: the bits
# of an H200 (tests/emulator/goldens_h200.npz), but for f16, which is taken to be like bf16.
HOPPER_FRACTION_BITS = {"e4m3": 13, "e5m2": 13, "bf16": 25, "f16": 25}


class Pending:
    """An accumulator register of an MMA that may not have executed."""

    __slots__ = ("op", "index", "dtype")
    __array_ufunc__ = None

    def __init__(self, op: Any, index: int, dtype: Any):
        self.op, self.index, self.dtype = op, index, dtype

    def view(self, dtype: Any) -> Pending:
        return Pending(self.op, self.index, np.dtype(dtype))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Pending accumulator")


class Queue:
    """The MMAs of one warpgroup, in order."""

    def __init__(self, cta: Any, group: int):
        self.name = f"wgmma of {cta.name} warpgroup {group}"
        self.slot = cta.cluster.slots.add(self.name)
        self.ops: list[_Mma] = []
        self.executed = 0


class WarpState:
    """One warp's view of its warpgroup's queue."""

    def __init__(self, queue: Queue):
        self.queue = queue
        self.issued = 0
        self.committed: list[int] = []
        self.reading = 0
        self.in_flight: list[tuple[int, int]] = []  # (index, bits of A registers)
        self.unresolved = False

    def check_overwrite(self, w: Warp, bits: int) -> None:
        raise ProtocolError(
            "registers that a wgmma in flight reads are overwritten before its wait_group"
        )


def _state(w: Warp) -> WarpState:
    if w.wgmma is None:
        group = w.index // 4
        queues = w.cta.wgmma_queues
        if group not in queues:
            queues[group] = Queue(w.cta, group)
        w.wgmma = WarpState(queues[group])
    return w.wgmma


class _Mma(AsyncOp):
    def __init__(self, queue: Queue, index: int, shape: _Shape, w: Warp):
        self.queue, self.index, self.shape = queue, index, shape
        self.cta = w.cta
        self.cluster = w.cluster
        self.name = f"{queue.name}, MMA {index}"
        self.parts: dict[int, tuple] = {}
        self.clocks = w.clocks.copy()
        self.result: dict[int, np.ndarray] = {}
        self.superseded: set[int] = set()

    def ready(self) -> bool:
        return len(self.parts) == 4 and self.queue.executed == self.index

    def touches(self, cta: Any) -> bool:
        return cta is self.cta

    def join(self, w: Warp, part: tuple) -> None:
        if self.parts and part[0] != next(iter(self.parts.values()))[0]:
            raise ProtocolError("the warps of a warpgroup issue different wgmma descriptors")
        self.parts[w.index % 4] = part
        self.clocks.join(w.clocks)

    def step(self) -> None:
        shape = self.shape
        (a_desc, b_desc, scale_d), *_ = self.parts[0]
        memory = self.cta.memory
        if shape.a_registers:
            raw = np.concatenate([_fragment_rows(self.parts[i][2]) for i in range(4)])
        else:
            raw = self._operand(memory, a_desc, 64, shape.trans_a)
        a = formats.decode(raw, shape.a_type)
        b = formats.decode(self._operand(memory, b_desc, shape.n, shape.trans_b), shape.b_type)
        d = None
        if scale_d:
            d = np.concatenate([_accumulators(self.parts[i][1], i, shape) for i in range(4)])
        mode = self.cluster.machine.options.numerics
        out = multiply(a * shape.sign_a, b * shape.sign_b, d, shape, mode)
        for i in range(4):
            self.result[i] = _fragments(out[16 * i : 16 * i + 16])
        self.parts = {}
        self.queue.executed += 1
        self.queue.ops[self.index] = None  # type: ignore[call-overload]
        self.done = True
        self.cluster.changed()

    def _operand(self, memory: Any, descriptor: int, rows: int, trans: bool) -> np.ndarray:
        """(rows, 32 bytes) of the operand in shared memory."""
        words, halves = operand_index(descriptor, rows, trans)
        if int(words.max()) * 4 + 4 > memory.limit or int(words.min()) < 256:
            raise OutOfBoundsError(f"{self.name} reads outside shared memory")
        self.cluster.detector.read(
            memory, words, self.clocks, self.queue.slot, self.index + 1, "async", self.name
        )
        if trans:
            return np.ascontiguousarray(memory.halves[halves]).view(np.uint8)
        return memory.words[words].view(np.uint8)


@functools.lru_cache(maxsize=4096)
def operand_index(descriptor: int, rows: int, trans: bool) -> tuple[np.ndarray, Any]:
    """Where 32 bytes of K (16 elements if transposed) of each row lie: words, and 16-bit units."""
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 49 & 7:
        raise UnknownOpcodeError("matrix descriptors with a base offset are not modelled")
    span = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62]
    r = np.arange(rows)[:, None]
    if not trans:
        k = np.arange(0, 32, 4)[None, :]
        if span:
            at = start + r // 8 * stride + r % 8 * span + k
            at = _xor(at, span)
        else:
            at = start + r // 8 * stride + k // 16 * leading + r % 8 * 16 + k % 16
        return at >> 2, None
    if not span:
        raise UnknownOpcodeError("MN-major operands without a swizzle are not modelled")
    k = np.arange(16)[None, :]
    at = start + r * 2 // span * leading + k // 8 * stride + k % 8 * span + r * 2 % span
    at = _xor(at, span)
    return np.unique(at >> 2), at >> 1


def _xor(at: np.ndarray, span: int) -> np.ndarray:
    return at ^ (at >> 3 & (span - 16))


def _fragment_rows(regs: list[np.ndarray]) -> np.ndarray:
    """A fragments of a warp to (16, 32) bytes: register 2 h + r is row half r, K half h."""
    stacked = np.stack(regs).reshape(2, 2, 8, 4)
    return np.ascontiguousarray(stacked.transpose(1, 2, 0, 3)).view(np.uint8).reshape(16, 32)


def _accumulators(regs: list, warp: int, shape: _Shape) -> np.ndarray:
    """D fragments of a warp to (16, n)."""
    first = regs[0]
    if isinstance(first, Pending):
        source = first.op.result.get(warp)
        if source is None:
            raise AssertionError("an MMA executes before the one whose result it takes")
        same = all(
            isinstance(r, Pending) and r.op is first.op and r.index == i for i, r in enumerate(regs)
        )
        if same and len(regs) == len(source):
            stacked = source
        else:
            stacked = np.stack([_value(r, warp) for r in regs])
    else:
        stacked = np.stack([_value(r, warp) for r in regs])
    dtype = np.int32 if shape.d_type == "s32" else np.float32
    grid = stacked.view(dtype).reshape(shape.n // 8, 2, 2, 8, 4)
    return grid.transpose(1, 3, 0, 4, 2).reshape(16, shape.n)


def _value(r: Any, warp: int) -> np.ndarray:
    value = r.op.result[warp][r.index] if isinstance(r, Pending) else r
    return value.view(np.uint32)


def _fragments(rows: np.ndarray) -> np.ndarray:
    """(16, n) to (n / 2 registers, 32 lanes)."""
    n = rows.shape[1]
    grid = rows.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(grid).reshape(n // 2, 32)


def multiply(a: np.ndarray, b: np.ndarray, d: Any, shape: _Shape, mode: str) -> np.ndarray:
    """a b^T + d. float64 holds every sum of one k-step exactly enough to round once."""
    if shape.d_type == "s32":
        out = a @ b.T
        if d is not None:
            out = out + d
        return out.astype(np.int64).astype(np.int32)
    if mode == "hopper":
        return align_and_truncate(a, b, d, HOPPER_FRACTION_BITS[shape.a_type])
    out = a @ b.T
    if d is not None:
        out = out + d
    return out.astype(np.float32)


def align_and_truncate(a: np.ndarray, b: np.ndarray, d: Any, bits: int) -> np.ndarray:
    """One k-step on Hopper: products and accumulator aligned to the largest exponent, truncated."""
    products = a[:, None, :] * b[None, :, :]
    _, ea = np.frexp(a)
    _, eb = np.frexp(b)
    exponents = np.where(products == 0, -2000, (ea - 1)[:, None, :] + (eb - 1)[None, :, :])
    top = exponents.max(axis=2)
    if d is not None:
        _, ed = np.frexp(d.astype(np.float64))
        top = np.maximum(top, np.where(d == 0, -2000, ed - 1))
    quantum = np.exp2(np.where(top <= -2000, 0, top - bits).astype(np.float64))
    total = np.trunc(products / quantum[:, :, None]).sum(axis=2)
    if d is not None:
        total = total + np.trunc(d / quantum)
    out = total * quantum
    if bits < 23:
        fraction, exponent = np.frexp(out)
        out = np.ldexp(np.trunc(np.ldexp(fraction, bits + 1)), exponent - bits - 1)
    wide = out.astype(np.float32)
    over = np.abs(wide.astype(np.float64)) > np.abs(out)
    return np.where(over, np.nextafter(wide, np.float32(0)), wide)


class _Shape:
    """The static part of a wgmma.mma_async."""

    def __init__(self, ins: Instr):
        match = re.match(
            r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|s32)\.(\w+)\.(\w+)$", ins.op
        )
        if match is None:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
        n, k, self.d_type, self.a_type, self.b_type = match.groups()
        self.n, self.k = int(n), int(k)
        wide = self.a_type in ("bf16", "f16")
        if self.k != (16 if wide else 32) or self.n % 8 or not 8 <= self.n <= 256:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
        if self.d_type == "s32" and self.n % 16 and self.n not in (8, 24):
            raise UnknownOpcodeError(f"line {ins.line}: s8 wgmma has no n{self.n}")
        self.a_registers = isinstance(ins.ops[1], Vec)
        rest = [op.value for op in ins.ops[4:] if isinstance(op, Imm)]
        if len(rest) != len(ins.ops) - 4:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.text} is not modelled")
        self.sign_a, self.sign_b = (rest[0], rest[1]) if len(rest) >= 2 else (1, 1)
        trans = rest[2:]
        self.trans_a = bool(trans[0]) if len(trans) == 2 else False
        self.trans_b = bool(trans[-1]) if trans else False
        if (self.trans_a or self.trans_b) and not wide:
            raise UnknownOpcodeError(f"line {ins.line}: only 16-bit operands can be transposed")
        if len(ins.ops[0].items) != self.n // 2:
            raise UnknownOpcodeError(f"line {ins.line}: {len(ins.ops[0].items)} accumulators")


@node("wgmma")
def _wgmma(ins: Instr) -> Node:
    if ins.pred is not None:
        raise UnknownOpcodeError(f"line {ins.line}: a predicated {ins.op} is not modelled")
    what = ins.parts[1]
    if what == "fence":
        return _fence
    if what == "commit_group":
        return _commit
    if what == "wait_group":
        return _wait(ins)
    if what == "mma_async":
        return _mma(ins)
    raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")


def _fence(w: Warp, g: Group) -> None:
    if w.wait_converged(g):
        return
    w.executed += 1
    g.pc += 1
    w.dirty = 0


def _commit(w: Warp, g: Group) -> None:
    if w.wait_converged(g):
        return
    w.executed += 1
    g.pc += 1
    state = _state(w)
    state.committed.append(state.issued)


def _mma(ins: Instr) -> Node:
    shape = _Shape(ins)
    d_regs = ins.ops[0].items
    a_regs = ins.ops[1].items if shape.a_registers else ()
    if not all(isinstance(r, Reg) for r in (*d_regs, *a_regs)):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.text[:80]} is not modelled")
    d_index = [r.index for r in d_regs]
    a_index = [r.index for r in a_regs]
    d_storage = np.dtype(d_regs[0].storage)
    a_bits = sum(1 << i for i in a_index)
    d_bits = sum(1 << i for i in d_index)
    a_desc = None if shape.a_registers else getter(ins.ops[1], "u64")
    b_desc = getter(ins.ops[2], "u64")
    scale = getter(ins.ops[3], "pred")

    def mma(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        w.executed += 1
        g.pc += 1
        state = _state(w)
        queue = state.queue
        if w.dirty & (a_bits | d_bits):
            raise ProtocolError("registers of a wgmma were written since the last wgmma.fence")
        scale_d = _uniform(scale(w), "scale-d")
        key = (
            _uniform(a_desc(w), "descriptor") if a_desc else None,
            _uniform(b_desc(w), "descriptor"),
            scale_d,
        )
        R = w.R
        index = state.issued
        if index == len(queue.ops):
            queue.ops.append(_Mma(queue, index, shape, w))
        op = queue.ops[index]
        if op.shape is not shape:
            raise ProtocolError("the warps of a warpgroup issue different wgmma")
        inputs = [R[i] for i in d_index] if scale_d else []
        if inputs and isinstance(inputs[0], Pending):
            inputs[0].op.superseded.add(w.index % 4)
        op.join(w, (key, inputs, [R[i] for i in a_index]))
        for i, r in enumerate(d_index):
            R[r] = Pending(op, i, d_storage)
        state.issued += 1
        state.in_flight.append((index, a_bits))
        state.reading |= a_bits
        if len(op.parts) == 4:
            w.cluster.launch_async(op)

    return mma


def _uniform(value: np.ndarray, what: str) -> int:
    if (value != value[0]).any():
        raise ProtocolError(f"the {what} of a wgmma differs between lanes")
    return int(value[0])


def _wait(ins: Instr) -> Node:
    assert isinstance(ins.ops[0], Imm)
    keep = ins.ops[0].value

    def wait(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        state = _state(w)
        queue = state.queue
        closed = len(state.committed) - keep
        if closed > 0:
            target = state.committed[closed - 1]
            if queue.executed < target:
                g.block(
                    lambda: queue.executed >= target,
                    f"{queue.name}: {queue.executed} of {target} MMAs",
                )
                return
            del state.committed[:closed]
            w.clocks.learn(queue.slot, target)
            resolve = False
            state.in_flight = [f for f in state.in_flight if f[0] >= target]
            state.reading = 0
            for _, bits in state.in_flight:
                state.reading |= bits
            warp = w.index % 4
            if not state.in_flight or keep == 0:
                resolve = True
            if resolve:
                R = w.R
                for i in w.code.holders:
                    value = R[i]
                    if type(value) is Pending and value.op.index < target:
                        R[i] = value.op.result[warp][value.index].view(value.dtype)
        w.executed += 1
        g.pc += 1

    return wait
