"""mma.sync: the warp-wide MMA on registers."""

from __future__ import annotations

import numpy as np

from emulator import formats
from emulator.compile import Node, getter, node, setter
from emulator.errors import UnknownOpcodeError
from emulator.ptx import Instr
from emulator.warp import Group, Warp

_OPS = {f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32": t for t in ("bf16", "f16")}


@node("mma")
def _mma(ins: Instr) -> Node:
    """Lane 4 g + q holds rows g, g + 8 of A and D, column g of B, pairs of k or n from 2 q."""
    kind = _OPS.get(ins.op)
    if kind is None or ins.pred is not None:
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    d_ops, a_ops, b_ops, c_ops = (op.items for op in ins.ops)
    a_of, b_of = ([getter(op, "b32") for op in ops] for ops in (a_ops, b_ops))
    c_of = [getter(op, "f32") for op in c_ops]
    d_set = [setter(op, "float32") for op in d_ops]

    def mma(w: Warp, g: Group) -> None:
        if w.wait_converged(g):
            return
        w.executed += 1
        g.pc += 1
        # Registers of A: k half, then row half.
        a = np.stack([read(w) for read in a_of]).reshape(2, 2, 8, 4).transpose(1, 2, 0, 3)
        b = np.stack([read(w) for read in b_of]).reshape(2, 8, 4).transpose(1, 0, 2)
        c = np.stack([read(w) for read in c_of]).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1)
        a = formats.decode(np.ascontiguousarray(a).view(np.uint8).reshape(16, 32), kind)
        b = formats.decode(np.ascontiguousarray(b).view(np.uint8).reshape(8, 32), kind)
        out = (a @ b.T + c.reshape(16, 8)).astype(np.float32)
        out = np.ascontiguousarray(out.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2)).reshape(4, 32)
        for write, value in zip(d_set, out, strict=True):
            write(w, value, g.mask)

    return mma
