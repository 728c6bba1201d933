"""cp.async: 4 to 16 bytes per lane from global to shared memory, seen after cp.async.wait_all.

A copy lands when its thread waits for it, as late as it may: who reads earlier reads what nothing
has written.
"""

from __future__ import annotations

import numpy as np

from emulator import shared
from emulator.compile import Node, address_getter, getter, predicated
from emulator.errors import UnknownOpcodeError
from emulator.ptx import Imm, Instr
from emulator.warp import FULL, Group, Warp


def copy_or_wait(ins: Instr) -> Node:
    if ins.parts[2] == "wait_all":
        return _wait_all(ins)
    if ins.parts[2:] not in (("ca", "shared", "global"), ("cg", "shared", "global")):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    return _copy(ins)


def _copy(ins: Instr) -> Node:
    assert isinstance(ins.ops[2], Imm)
    size = ins.ops[2].value
    if size not in (4, 8, 16) or (ins.parts[2] == "cg" and size != 16):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} of {size} bytes")
    to_of, from_of = address_getter(ins.ops[0]), address_getter(ins.ops[1])
    bytes_of = getter(ins.ops[3], "u32") if len(ins.ops) > 3 else None
    lanes_of = predicated(ins)

    def copy(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        mask = g.mask if lanes_of is None else lanes_of(w, g)
        if mask is not None and not mask.any():
            return
        lanes = FULL if mask is None else mask
        wanted = np.full(32, size, np.uint32) if bytes_of is None else bytes_of(w)
        if not np.isin(wanted[lanes], (0, size)).all():
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} of a part of {size} bytes")
        w.copies.append((to_of(w).copy(), from_of(w).copy(), lanes.copy(), wanted.copy(), size))

    return copy


def _wait_all(ins: Instr) -> Node:
    if ins.pred is not None:
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} under a predicate is not modelled")

    def wait(w: Warp, g: Group) -> None:
        w.executed += 1
        g.pc += 1
        waiting = g.lanes()
        rest = []
        for to, source, lanes, wanted, size in w.copies:
            _land(w, to, source, lanes & waiting, wanted, size)
            if (lanes & ~waiting).any():
                rest.append((to, source, lanes & ~waiting, wanted, size))
        w.copies = rest

    return wait


def _land(w: Warp, to, source, lanes, wanted, size: int) -> None:
    if not lanes.any():
        return
    count = size // 4
    inside = lanes & (wanted > 0)
    values = w.cluster.machine.memory.load(w, source, inside, np.dtype(np.uint32), count)
    if lanes.all():
        lanes = FULL
    for cta, part, offset in shared.targets(w, to, lanes, size, False, "cp.async"):
        memory = cta.memory
        words = shared.word_index(offset, size)
        w.cluster.detector.write(
            memory, words, w.clocks, w.slot, w.clock(), "generic", f"cp.async of {w.name}"
        )
        for i, value in enumerate(values):
            memory.words[offset // 4 + i] = np.where(inside, value, 0)[part]
