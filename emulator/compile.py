"""A parsed kernel to executable nodes, one per instruction index that control can reach.

A stretch of local instructions (registers, parameters, global memory) becomes one Python function;
everything that other agents can see, relaxed accesses of global memory too, is a node of its own,
so that schedules can interleave there.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator import alu, formats, lanes, memory, ptx
from emulator.errors import EmulationError, TrapError, UnknownOpcodeError
from emulator.ptx import Imm, Instr, Reg
from emulator.warp import Group, Warp

Node = Callable[[Warp, Group], None]
Factory = Callable[[Instr], Node]
FACTORIES: dict[str, Factory] = {}


def node(*roots: str) -> Callable[[Factory], Factory]:
    """Registers a factory of nodes for instructions with these roots."""

    def register(f: Factory) -> Factory:
        for root in roots:
            FACTORIES[root] = f
        return f

    return register


def is_local(ins: Instr) -> bool:
    if ins.parts[0] in ("ld", "st"):
        space = ins.parts[1:]
        if ins.parts[0] == "st" and "param" in space:
            return True  # an argument of a call
        return "param" in space or "global" in space or "const" in space
    return ins.parts[0] in alu.EMITTERS


def is_relaxed(ins: Instr) -> bool:
    """An access of global memory that other CTAs look at meanwhile."""
    return ins.parts[0] in ("ld", "st") and ins.has("relaxed") and ins.has("gpu")


def getter(op: Any, kind: str) -> Callable[[Warp], np.ndarray]:
    """A function that reads an operand of a warp."""
    emitter = alu.Emitter(None, {}, False)  # type: ignore[arg-type]
    expr = emitter.src(op, kind)
    space = dict(_NAMESPACE) | emitter.consts
    return eval(f"lambda w: {expr}".replace("R[", "w.R[").replace('S["', 'w.S["')
                .replace('Y["', 'w.Y["'), space)  # fmt: skip


def address_getter(op: ptx.Mem) -> Callable[[Warp], np.ndarray]:
    emitter = alu.Emitter(None, {}, False)  # type: ignore[arg-type]
    expr = emitter.address(op)
    space = dict(_NAMESPACE) | emitter.consts
    return eval(f"lambda w: {expr}".replace("R[", "w.R[").replace('Y["', 'w.Y["'), space)


def setter(op: Any, dtype: str) -> Callable[[Warp, np.ndarray, Any], None]:
    """A function that writes an array of `dtype` to a register under a mask."""
    if op == ptx.SINK:
        return lambda w, value, mask: None
    if not isinstance(op, Reg):
        raise UnknownOpcodeError(f"destination {op} is not modelled")
    index, storage = op.index, np.dtype(op.storage)
    bit = 1 << index

    def write(w: Warp, value: np.ndarray, mask: Any) -> None:
        if value.dtype != storage:
            if value.dtype.itemsize == storage.itemsize:
                value = value.view(storage)
            else:
                value = value.astype(storage)
        w.dirty |= bit
        w.R[index] = value if mask is None else np.where(mask, value, w.R[index])

    return write


def predicated(ins: Instr) -> Callable[[Warp, Group], Any] | None:
    """The lanes of a group that execute, or None for an unconditional instruction.

    The function returns None for all 32 lanes and an array otherwise."""
    if ins.pred is None:
        return None
    index, negated = ins.pred.index, ins.pred.negated

    def lanes_of(w: Warp, g: Group) -> Any:
        p = w.R[index]
        if negated:
            p = ~p
        if g.mask is not None:
            p = p & g.mask
        return None if p.all() else p

    return lanes_of


def active_lanes(w: Warp, g: Group, lanes_of: Callable[[Warp, Group], Any] | None) -> Any:
    """Indices of the lanes of a group that execute; lanes_of is what predicated returned."""
    p = g.lanes() if lanes_of is None else lanes_of(w, g)
    return np.arange(32) if p is None else np.flatnonzero(p)


class Code:
    """A kernel, made executable when it is first launched or checked."""

    def __init__(self, kernel: ptx.Kernel):
        self.kernel = kernel
        self.consts: dict[str, Any] = {}
        self.run_ends: dict[int, int] = {}
        self.initial_registers = [_initial(s) for s in kernel.storages]
        self.has_wgmma = any(ins.parts[0] == "wgmma" for ins in kernel.instrs)

    @functools.cached_property
    def nodes(self) -> list[Node | None]:
        """What executes at each instruction that control can reach.

        Raises:
          UnknownOpcodeError: an instruction is not modelled.
        """
        nodes: list[Node | None] = [None] * (len(self.kernel.instrs) + 1)
        self._build(nodes)
        return nodes

    @functools.cached_property
    def holders(self) -> list[int]:
        """Registers that may hold a result which is not there yet: it arrives in some and is moved
        to others."""
        found = set()
        for ins in self.kernel.instrs:
            if ins.parts[0] in ("wgmma", "tcgen05", "mov") and ins.ops:
                first = ins.ops[0]
                items = first.items if isinstance(first, ptx.Vec) else (first,)
                found.update(item.index for item in items if isinstance(item, Reg))
        return sorted(found)

    def instruction_at(self, w: Warp, pc: int) -> Instr:
        at = w.local_pc
        if pc in self.run_ends and at is not None and pc <= at < self.run_ends[pc]:
            pc = at
        return self.kernel.instrs[min(pc, len(self.kernel.instrs) - 1)]

    def _build(self, nodes: list[Node | None]) -> None:
        instrs = self.kernel.instrs
        starts = self.kernel.targets()
        pc = 0
        while pc < len(instrs):
            ins = instrs[pc]
            if not is_local(ins):
                factory = FACTORIES.get(ins.parts[0])
                if factory is None:
                    raise UnknownOpcodeError(
                        f"{self.kernel.name} line {ins.line}: {ins.op} is not modelled"
                    )
                try:
                    nodes[pc] = factory(ins)
                except UnknownOpcodeError as error:
                    raise UnknownOpcodeError(f"{self.kernel.name}: {error}") from error
                pc += 1
                continue
            end = pc + 1
            if is_relaxed(ins):
                nodes[pc] = self._look(pc) if ins.parts[0] == "ld" else self._stretch(pc, end)
                pc = end
                continue
            while end < len(instrs) and end not in starts and is_local(instrs[end]):
                if is_relaxed(instrs[end]):
                    break
                end += 1
            nodes[pc] = self._stretch(pc, end)
            pc = end
        nodes[len(instrs)] = FACTORIES["ret"](
            Instr(len(instrs), "ret", ("ret",), None, (), 0, "end of the kernel")
        )

    def _stretch(self, start: int, end: int) -> Node:
        self.run_ends[start] = end
        full, writes = self._function(start, end, masked=False)
        write_bits = sum(1 << i for i in writes)
        made: list[Any] = []
        length = end - start
        tracked = self.has_wgmma

        def run(w: Warp, g: Group) -> None:
            if tracked:
                if w.dirty & write_bits != write_bits:
                    w.dirty |= write_bits
                if w.wgmma is not None and w.wgmma.reading & write_bits:
                    w.wgmma.check_overwrite(w, write_bits)
            if g.mask is None:
                full(w, w.R, w.S, w.Y)
            else:
                if not made:
                    made.append(self._function(start, end, masked=True)[0])
                made[0](w, w.R, w.S, w.Y, g.mask)
            w.executed += length
            g.pc = end

        return run

    def _look(self, pc: int) -> Node:
        """A relaxed load. Where it would find again what it has found it waits for a store, or
        until nobody else can run: a loop around it must not keep others from their store."""
        load = self._stretch(pc, pc + 1)
        address = address_getter(self.kernel.instrs[pc].ops[1])

        def run(w: Warp, g: Group) -> None:
            who, where, cluster = (pc, g.lanes().tobytes()), address(w).tobytes(), w.cluster
            last = w.looks.get(who)
            if last is not None and last[0] == where and who in w.looked and not g.polling:
                _, found, stores = last
                rounds = cluster.poll_rounds

                def again() -> bool:
                    g.polling = cluster.poll_rounds > rounds
                    return g.polling or found.stores != stores

                if found.stores == stores:
                    g.block(again, f"a store to {found.name}")
                    return
            if g.polling:
                w.looked.clear()  # once for all loads of a loop
                g.polling = False
            w.looked.add(who)
            w.look = None
            load(w, g)
            w.looks.pop(who, None)
            if w.look is not None:
                found, late = w.look
                if late:
                    cluster.progress += 1
                else:
                    w.looks[who] = where, found, found.stores

        return run

    def _function(self, start: int, end: int, masked: bool) -> tuple[Any, set[int]]:
        emitter = alu.Emitter(self.kernel, self.consts, masked)
        for ins in self.kernel.instrs[start:end]:
            emitter.begin(ins)
            try:
                alu.EMITTERS[ins.parts[0]](emitter, ins)
            except UnknownOpcodeError as error:
                raise UnknownOpcodeError(
                    f"{self.kernel.name} line {ins.line}: {ins.text[:120]}: {error}"
                ) from error
        name = f"<{self.kernel.name[-40:]}:{start}{'m' if masked else ''}>"
        args = "w, R, S, Y, m" if masked else "w, R, S, Y"
        body = "\n    ".join(emitter.lines) or "pass"
        source = f"def run({args}):\n    {body}\n"
        space = {**_NAMESPACE, **self.consts}
        exec(compile(source, name, "exec"), space)
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        return space["run"], emitter.writes


def _initial(storage: str) -> np.ndarray:
    if storage == "bool":
        out = np.zeros(32, bool)
    else:
        width = np.dtype(storage).itemsize
        out = np.full(32, 0xBAD0BAD0BAD0BAD0 >> (64 - 8 * width), f"uint{8 * width}").view(storage)
    out.flags.writeable = False
    return out


# ---- names that the generated functions use ----


def _ld_global(
    w: Warp, pc: int, address: np.ndarray, mask: Any, dtype: Any, count: int, relaxed: bool = False
) -> list:
    w.local_pc = pc
    if address.dtype != np.uint64:
        address = address.astype(np.uint64)
    return w.cluster.machine.memory.load(w, address, mask, dtype, count, relaxed)


def _st_global(
    w: Warp, pc: int, address: np.ndarray, mask: Any, values: tuple, relaxed: bool = False
) -> None:
    w.local_pc = pc
    w.cluster.machine.memory.store(w, address, mask, values, relaxed)


def _ld_param(w: Warp, pc: int, address: np.ndarray, mask: Any, dtype: Any, count: int) -> list:
    w.local_pc = pc
    return w.cluster.machine.parameters.load(address, mask, dtype, count)


def _to_generic(address: np.ndarray, space: str) -> np.ndarray:
    window = {"shared": memory.SHARED_WINDOW, "param": memory.PARAM_WINDOW, "global": 0, "const": 0}
    return address + address.dtype.type(window[space]) if window[space] else address


def _to_space(address: np.ndarray, space: str) -> np.ndarray:
    window = {"shared": memory.SHARED_WINDOW, "param": memory.PARAM_WINDOW, "global": 0, "const": 0}
    return address - address.dtype.type(window[space]) if window[space] else address


def _mapa(w: Warp, address: np.ndarray, rank: np.ndarray, mask: Any) -> np.ndarray:
    w.cluster.check_ranks(rank if mask is None else rank[mask])
    low = address & address.dtype.type(memory.OFFSET_MASK)
    return low | (rank.astype(address.dtype) << address.dtype.type(memory.RANK_SHIFT))


def _isspacep(address: np.ndarray, space: str) -> np.ndarray:
    shared = (address >= memory.SHARED_WINDOW) & (address < memory.SHARED_WINDOW + (1 << 40))
    return shared if space.startswith("shared") else ~shared


_NAMESPACE: dict[str, Any] = {
    **{name: getattr(np, name) for name in (
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16",
        "float32", "float64", "where", "maximum", "minimum",
    )},
    **{name: getattr(lanes, name) for name in (
        "ftz", "fma", "fma64", "round_bf16", "from_bf16", "round_f16", "pack16", "bf16x2", "f16x2",
        "fmin", "fmax", "minmax", "prmt", "permute", "lop3", "shl", "shr", "shf", "div", "rem",
        "mulhi", "bfe", "bfi", "popc", "bfind", "clz", "brev", "to_int", "compare", "encode_e2m1",
        "encode_e8m0",
    )},
    "bool": bool,
    "encode_fp8": formats.encode_fp8,
    "unpack_pair": formats.unpack_pair,
    "np": np,
    "np_add": np.add,
    "np_sub": np.subtract,
    "np_mul": np.multiply,
    "ld_global": _ld_global,
    "st_global": _st_global,
    "ld_param": _ld_param,
    "to_generic": _to_generic,
    "to_space": _to_space,
    "mapa": _mapa,
    "isspacep": _isspacep,
}  # fmt: skip


@node("bra")
def _bra(ins: Instr) -> Node:
    target, following = ins.ops[0].value, ins.pc + 1
    assert isinstance(ins.ops[0], Imm)
    if ins.pred is None:

        def jump(w: Warp, g: Group) -> None:
            w.executed += 1
            g.pc = target

        return jump
    index, negated = ins.pred.index, ins.pred.negated
    count_nonzero = np.count_nonzero

    def branch(w: Warp, g: Group) -> None:
        w.executed += 1
        p = w.R[index]
        if negated:
            p = ~p
        if g.mask is not None:
            p = p & g.mask
        taken = count_nonzero(p)
        if taken == g.count:
            g.pc = target
        elif not taken:
            g.pc = following
        else:
            g.pc = following
            w.split(g, target, p, taken)

    return branch


@node("ret", "exit")
def _ret(ins: Instr) -> Node:
    lanes_of = predicated(ins)

    def leave(w: Warp, g: Group) -> None:
        w.executed += 1
        if lanes_of is not None:
            p = lanes_of(w, g)
            p = g.lanes() if p is None else p
            count = int(np.count_nonzero(p))
            if count < g.count:
                if count:
                    w.live -= count
                    g.mask = g.lanes() & ~p
                    g.count -= count
                g.pc += 1
                w.cluster.changed()
                return
        w.exit(g)

    return leave


@node("trap", "brkpt", "call")
def _trap(ins: Instr) -> Node:
    """Calls are left of assertions and printf: none is expected to be reached."""
    lanes_of = predicated(ins)
    error = TrapError if ins.parts[0] == "trap" else EmulationError

    def trap(w: Warp, g: Group) -> None:
        if len(active_lanes(w, g, lanes_of)):
            raise error(f"the kernel reached {ins.text[:80]}")
        w.executed += 1
        g.pc += 1

    return trap
