"""Loads and stores of tensor memory by warps, and the waits for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulator import tmem
from emulator.compile import Node, getter
from emulator.errors import ProtocolError, UnknownOpcodeError
from emulator.ptx import Instr, Reg, Vec
from emulator.tensor_pipe import known_parts, tensor_clocks, whole_warp
from emulator.tma import AsyncOp
from emulator.warp import Group, Warp
from emulator.wgmma import Pending


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
        clocks = tensor_clocks(w.cluster, self.clocks)
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
        clocks = tensor_clocks(w.cluster, self.clocks)
        w.cluster.detector.write(
            self.memory, self.index, clocks, w.tmem.store_slot, self.clock, "generic",
            self.name,
        )  # fmt: skip
        block = np.stack(self.values, axis=1)
        self.memory.data[self.rows, self.column : self.column + self.columns] = block
        self.done = True
        w.cluster.changed()


def _shape_columns(ins: Instr) -> int:
    known_parts(ins, "sync", "aligned", "32x32b", "b32", *(f"x{1 << i}" for i in range(8)))
    if not ins.has("32x32b"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    return next(int(p[1:]) for p in ins.parts if p[0] == "x" and p[1:].isdigit())


def ld_node(ins: Instr) -> Node:
    columns = _shape_columns(ins)
    items = ins.ops[0].items if isinstance(ins.ops[0], Vec) else (ins.ops[0],)
    if len(items) != columns or not all(isinstance(i, Reg) for i in items):
        raise UnknownOpcodeError(f"line {ins.line}: {len(items)} registers for {columns} columns")
    address = getter(ins.ops[1].base, "u32")
    offset = ins.ops[1].offset

    def ld(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        whole_warp(w, g)
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


def st_node(ins: Instr) -> Node:
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
        whole_warp(w, g)
        w.executed += 1
        g.pc += 1
        op = _Store(w, _uniform(address(w)) + offset, [read(w) for read in readers])
        w.tmem.stores.append(op)
        w.cluster.launch_async(op)

    return st


def wait_node(ins: Instr) -> Node:
    known_parts(ins, "sync", "aligned")
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
            R = w.R
            for i in w.code.holders:
                value = R[i]
                if type(value) is Pending and id(value.op) in finished:
                    R[i] = value.op.result[warp][value.index].view(value.dtype)
        ops.clear()

    return wait


def _accessed(w: Warp, slot: int, clock: int) -> None:
    """A load or store is complete; others may learn of it after the next fence."""
    w.clocks.tensor[slot] = clock
    if w.cluster.machine.options.strict_fence:
        w.held.append((slot, clock))
    else:
        w.clocks.learn(slot, clock)
