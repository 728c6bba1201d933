"""Register-to-register instructions, as Python source.

Straight-line stretches of a kernel become Python functions (compile.py); here every opcode says
which expression of numpy arrays it is. A register holds an array that nobody changes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emulator import ptx
from emulator.errors import UnknownOpcodeError
from emulator.ptx import Imm, Instr, Mem, Pair, Reg, Special, Sym, Vec

DTYPES = {
    "pred": "bool",
    "b8": "uint8",
    "u8": "uint8",
    "s8": "int8",
    "b16": "uint16",
    "u16": "uint16",
    "s16": "int16",
    "f16": "uint16",
    "bf16": "uint16",
    "b32": "uint32",
    "u32": "uint32",
    "s32": "int32",
    "f16x2": "uint32",
    "bf16x2": "uint32",
    "f32": "float32",
    "b64": "uint64",
    "u64": "uint64",
    "s64": "int64",
    "f64": "float64",
}
WIDTH = {name: np.dtype(name).itemsize for name in set(DTYPES.values()) | {"float16"}}
SPECIALS = frozenset(
    [f"{name}.{axis}" for axis in "xyz" for name in (
        "tid", "ntid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid", "clusterid",
        "nclusterid",
    )]
    + ["laneid", "warpid", "nwarpid", "smid", "cluster_ctarank", "cluster_nctarank",
       "is_explicit_cluster", "lanemask_lt", "lanemask_eq", "dynamic_smem_size", "WARP_SZ",
       "clock", "clock64", "globaltimer", "globaltimer_lo"]
)  # fmt: skip
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
_WIDER = {"16": "32", "32": "64"}


class Emitter:
    """Collects the source of one straight-line stretch."""

    def __init__(self, kernel: ptx.Kernel, consts: dict[str, Any], masked: bool):
        self.kernel = kernel
        self.consts = consts
        self.masked = masked
        self.lines: list[str] = []
        self.writes: set[int] = set()
        self.mask = "None"
        self.is_move = False

    def begin(self, ins: Instr) -> None:
        self.mask = "m" if self.masked else "None"
        if ins.pred is not None:
            p = f"R[{ins.pred.index}]"
            p = f"~{p}" if ins.pred.negated else p
            self.lines.append(f"q = m & {p}" if self.masked else f"q = {p}")
            self.mask = "q"

    def const(self, value: int, dtype: str, is_float: int = 0) -> str:
        key = f"K_{dtype}_{value & (1 << 64) - 1:x}_{is_float}"
        if key not in self.consts:
            if is_float:
                bits = np.uint32(value) if is_float == 32 else np.uint64(value)
                number = bits.view(np.float32 if is_float == 32 else np.float64)
                array = np.full(32, number, dtype) if dtype.startswith("float") else None
                if array is None:
                    array = np.full(32, bits).astype(dtype)
            else:
                width = WIDTH[dtype] * 8
                if dtype == "bool":
                    array = np.full(32, bool(value))
                else:
                    array = np.full(32, value % (1 << width), _UNSIGNED[width // 8]).view(dtype)
            array.flags.writeable = False
            self.consts[key] = array
        return key

    def src(self, op: Any, kind: str) -> str:
        """The operand as an expression of the numpy type that `kind` names."""
        dtype = DTYPES.get(kind, kind)
        if isinstance(op, Reg):
            text = f"R[{op.index}]"
            if op.negated:
                return f"(~{text})"
            if op.storage == dtype:
                return text
            have, want = WIDTH[op.storage], WIDTH[dtype]
            if have == want:
                return f"{text}.view({dtype})"
            if have > want:
                return f"{text}.view({_UNSIGNED[have]}).astype({_UNSIGNED[want]}).view({dtype})"
            raise UnknownOpcodeError(f"operand {op.name} is narrower than .{kind}")
        if isinstance(op, Imm):
            return self.const(op.value, dtype, op.is_float)
        if isinstance(op, Special):
            if op.name not in SPECIALS:
                raise UnknownOpcodeError(f"special register %{op.name} is not modelled")
            if op.name.startswith("globaltimer"):
                return f"w.nanoseconds().astype({dtype})"
            return f'S["{op.name}"].astype({dtype})' if dtype != "uint32" else f'S["{op.name}"]'
        if isinstance(op, Sym):
            return f'Y["{op.name}"].astype({dtype})'
        if isinstance(op, Mem):  # symbol + offset as a number
            return f"({self.src(op.base, kind)} + {self.const(op.offset, dtype)})"
        raise UnknownOpcodeError(f"operand {op} is not modelled here")

    def address(self, mem: Mem) -> str:
        """An address expression, uint64 or uint32 as its base is."""
        base = mem.base
        if isinstance(base, Reg):
            kind = "u64" if WIDTH[base.storage] == 8 else "u32"
        else:
            kind = "u64"
        text = self.src(base, kind)
        if mem.offset:
            text = f"({text} + {self.const(mem.offset, DTYPES[kind])})"
        return text

    def dst(self, op: Any, expr: str, dtype: str) -> None:
        """Assigns under the current mask; `dtype` is the numpy type of `expr`."""
        if op == ptx.SINK:
            return
        if isinstance(op, Vec) or not isinstance(op, Reg):
            raise UnknownOpcodeError(f"destination {op} is not modelled")
        if dtype != op.storage:
            have, want = WIDTH[dtype], WIDTH[op.storage]
            if have == want:
                expr = f"({expr}).view({op.storage})"
            elif have < want:
                signed = dtype.replace("uint", "int") if dtype.startswith("int") else dtype
                wide = ("int" if dtype.startswith("int") else "uint") + str(8 * want)
                expr = f"({expr}).view({signed}).astype({wide}).view({op.storage})"
            else:
                raise UnknownOpcodeError(f"destination {op.name} is narrower than {dtype}")
        if self.mask == "None":
            self.lines.append(f"R[{op.index}] = {expr}")
        else:
            self.lines.append(f"R[{op.index}] = where({self.mask}, {expr}, R[{op.index}])")
        self.writes.add(op.index)


Emit = Callable[[Emitter, Instr], None]
EMITTERS: dict[str, Emit] = {}


def emits(*roots: str) -> Callable[[Emit], Emit]:
    def register(f: Emit) -> Emit:
        for root in roots:
            EMITTERS[root] = f
        return f

    return register


def check(ins: Instr, allowed: str) -> None:
    """Every modifier must be one that the emitter knows."""
    known = set(allowed.split())
    for part in ins.parts[1:]:
        if part not in known:
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op}: modifier .{part} is not modelled")


_INTS = "u16 s16 u32 s32 u64 s64 b16 b32 b64"


def _float(e: Emitter, ins: Instr, op: Any, kind: str) -> str:
    text = e.src(op, kind)
    return f"ftz({text})" if ins.has("ftz") and kind == "f32" else text


def _float_result(e: Emitter, ins: Instr, text: str, kind: str) -> None:
    if ins.has("sat"):
        text = f"np.clip(np.nan_to_num({text}, nan=0.0), 0, 1).astype(float32)"
    if ins.has("ftz") and kind == "f32":
        text = f"ftz({text})"
    e.dst(ins.ops[0], text, DTYPES[kind])


def _type(ins: Instr) -> str:
    return ins.parts[-1]


@emits("add", "sub", "mul", "div")
def _arithmetic(e: Emitter, ins: Instr) -> None:
    kind = _type(ins)
    symbol = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[ins.parts[0]]
    a, b = ins.ops[1:]
    if kind in ("f32", "f64"):
        check(ins, "rn ftz sat full approx f32 f64")
        x, y = _float(e, ins, a, kind), _float(e, ins, b, kind)
        _float_result(e, ins, f"{x} {symbol} {y}", kind)
    elif kind in ("bf16x2", "f16x2") and symbol in "+-*":
        check(ins, "rn bf16x2 f16x2")
        e.dst(
            ins.ops[0], f"{kind}(np_{ins.parts[0]}, {e.src(a, kind)}, {e.src(b, kind)})", "uint32"
        )
    elif ins.parts[0] == "mul":
        check(ins, f"lo hi wide {_INTS}")
        dtype = DTYPES[kind]
        x, y = e.src(a, kind), e.src(b, kind)
        if ins.has("wide"):
            wide = kind[0] + _WIDER[kind[1:]]
            e.dst(
                ins.ops[0],
                f"{x}.astype({DTYPES[wide]}) * {y}.astype({DTYPES[wide]})",
                DTYPES[wide],
            )
        elif ins.has("hi"):
            e.dst(ins.ops[0], f"mulhi({x}, {y})", dtype)
        else:
            e.dst(ins.ops[0], f"{x} * {y}", dtype)
    elif ins.parts[0] == "div":
        check(ins, _INTS)
        e.dst(ins.ops[0], f"div({e.src(a, kind)}, {e.src(b, kind)})", DTYPES[kind])
    else:
        check(ins, _INTS)
        unsigned = kind.replace("s", "u")
        e.dst(ins.ops[0], f"{e.src(a, unsigned)} {symbol} {e.src(b, unsigned)}", DTYPES[unsigned])


@emits("rem")
def _rem(e: Emitter, ins: Instr) -> None:
    check(ins, _INTS)
    kind = _type(ins)
    e.dst(ins.ops[0], f"rem({e.src(ins.ops[1], kind)}, {e.src(ins.ops[2], kind)})", DTYPES[kind])


@emits("mad")
def _mad(e: Emitter, ins: Instr) -> None:
    check(ins, f"lo wide {_INTS}")
    kind = _type(ins)
    a, b, c = ins.ops[1:]
    if ins.has("wide"):
        wide = kind[0] + _WIDER[kind[1:]]
        dtype = DTYPES[wide]
        x, y = e.src(a, kind), e.src(b, kind)
        expr = f"{x}.astype({dtype}) * {y}.astype({dtype}) + {e.src(c, wide)}"
        e.dst(ins.ops[0], expr, dtype)
    else:
        unsigned = kind.replace("s", "u")
        expr = f"{e.src(a, unsigned)} * {e.src(b, unsigned)} + {e.src(c, unsigned)}"
        e.dst(ins.ops[0], expr, DTYPES[unsigned])


@emits("fma")
def _fma(e: Emitter, ins: Instr) -> None:
    check(ins, "rn ftz sat f32 f64 bf16x2 f16x2")
    kind = _type(ins)
    if kind in ("bf16x2", "f16x2"):
        args = ", ".join(e.src(op, kind) for op in ins.ops[1:])
        e.dst(ins.ops[0], f"{kind}(fma, {args})", "uint32")
        return
    args = ", ".join(_float(e, ins, op, kind) for op in ins.ops[1:])
    name = "fma" if kind == "f32" else "fma64"
    _float_result(e, ins, f"{name}({args})", kind)


@emits("neg", "abs")
def _neg(e: Emitter, ins: Instr) -> None:
    check(ins, "ftz f32 f64 s16 s32 s64")
    kind = _type(ins)
    text = {"neg": "-{}", "abs": "np.abs({})"}[ins.parts[0]]
    _float_result(e, ins, text.format(_float(e, ins, ins.ops[1], kind)), kind)


@emits("copysign")
def _copysign(e: Emitter, ins: Instr) -> None:
    """The sign of the first source, the magnitude of the second."""
    check(ins, "f32")
    sign, value = (e.src(op, "f32") for op in ins.ops[1:])
    e.dst(ins.ops[0], f"np.copysign({value}, {sign})", "float32")


@emits("min", "max")
def _minmax(e: Emitter, ins: Instr) -> None:
    kind = _type(ins)
    largest = ins.parts[0] == "max"
    if kind == "f32":
        check(ins, "ftz NaN xorsign abs f32")
        args = ", ".join(_float(e, ins, op, kind) for op in ins.ops[1:3])
        if ins.has("NaN") or ins.has("xorsign"):
            text = f"minmax({args}, {largest}, {ins.has('NaN')}, {ins.has('xorsign')})"
        else:
            text = f"f{ins.parts[0]}({args})"
        _float_result(e, ins, text, kind)
        return
    if kind in ("bf16x2", "f16x2"):
        check(ins, "NaN xorsign abs bf16x2 f16x2")
        args = ", ".join(e.src(op, kind) for op in ins.ops[1:3])
        how = f"{largest}, {ins.has('NaN')}, {ins.has('xorsign')}"
        e.dst(ins.ops[0], f"{kind}(lambda a, b: minmax(a, b, {how}), {args})", "uint32")
        return
    name = "maximum" if largest else "minimum"
    if kind in ("u16x2", "s16x2"):
        check(ins, kind)
        half = "uint16" if kind == "u16x2" else "int16"
        halves = (f"{e.src(op, 'b32')}.view({half})" for op in ins.ops[1:3])
        e.dst(ins.ops[0], f"{name}({', '.join(halves)}).view(uint32)", "uint32")
        return
    check(ins, _INTS)
    args = ", ".join(e.src(op, kind) for op in ins.ops[1:])
    e.dst(ins.ops[0], f"{name}({args})", DTYPES[kind])


@emits("rcp", "sqrt", "rsqrt", "ex2", "lg2")
def _special(e: Emitter, ins: Instr) -> None:
    check(ins, "approx rn ftz f32")
    x = _float(e, ins, ins.ops[1], "f32")
    text = {
        "rcp": "float32(1) / {}",
        "sqrt": "np.sqrt({})",
        "rsqrt": "(1 / np.sqrt({}.astype(float64))).astype(float32)",
        "ex2": "np.exp2({})",
        "lg2": "np.log2({})",
    }[ins.parts[0]]
    _float_result(e, ins, text.format(x), "f32")


@emits("and", "or", "xor")
def _logic(e: Emitter, ins: Instr) -> None:
    check(ins, "pred b16 b32 b64")
    kind = _type(ins)
    symbol = {"and": "&", "or": "|", "xor": "^"}[ins.parts[0]]
    e.dst(ins.ops[0], f"{e.src(ins.ops[1], kind)} {symbol} {e.src(ins.ops[2], kind)}", DTYPES[kind])


@emits("not")
def _not(e: Emitter, ins: Instr) -> None:
    check(ins, "pred b16 b32 b64")
    kind = _type(ins)
    e.dst(ins.ops[0], f"~{e.src(ins.ops[1], kind)}", DTYPES[kind])


@emits("lop3")
def _lop3(e: Emitter, ins: Instr) -> None:
    check(ins, "b32")
    args = ", ".join(e.src(op, "b32") for op in ins.ops[1:4])
    e.dst(ins.ops[0], f"lop3({args}, {ins.ops[4].value})", "uint32")


@emits("shl", "shr")
def _shift(e: Emitter, ins: Instr) -> None:
    check(ins, _INTS)
    kind = _type(ins)
    a, n = ins.ops[1:]
    if isinstance(n, Imm) and 0 <= n.value < 8 * WIDTH[DTYPES[kind]]:
        symbol = "<<" if ins.parts[0] == "shl" else ">>"
        expr = f"{e.src(a, kind)} {symbol} {e.const(n.value, DTYPES[kind])}"
    else:
        expr = f"{ins.parts[0]}({e.src(a, kind)}, {e.src(n, 'u32')})"
    e.dst(ins.ops[0], expr, DTYPES[kind])


@emits("shf")
def _shf(e: Emitter, ins: Instr) -> None:
    check(ins, "l r wrap clamp b32")
    args = ", ".join(e.src(op, "b32") for op in ins.ops[1:4])
    e.dst(ins.ops[0], f"shf({args}, {ins.has('l')}, {ins.has('clamp')})", "uint32")


@emits("prmt")
def _prmt(e: Emitter, ins: Instr) -> None:
    check(ins, "b32")
    selector = ins.ops[3]
    places = [selector.value >> s & 15 for s in (0, 4, 8, 12)] if isinstance(selector, Imm) else [8]
    if max(places) < 8:
        key = f"P_{'_'.join(map(str, places))}"
        e.consts[key] = np.array(places)
        pair = ", ".join(e.src(op, "b32") for op in ins.ops[1:3])
        e.dst(ins.ops[0], f"permute({pair}, {key})", "uint32")
        return
    args = ", ".join(e.src(op, "b32") for op in ins.ops[1:4])
    e.dst(ins.ops[0], f"prmt({args})", "uint32")


@emits("bfe")
def _bfe(e: Emitter, ins: Instr) -> None:
    check(ins, "u32 s32")
    kind = _type(ins)
    rest = ", ".join(e.src(op, "u32") for op in ins.ops[2:4])
    e.dst(ins.ops[0], f"bfe({e.src(ins.ops[1], kind)}, {rest})", DTYPES[kind])


@emits("bfi")
def _bfi(e: Emitter, ins: Instr) -> None:
    check(ins, "b32 b64")
    kind = _type(ins)
    first = ", ".join(e.src(op, kind) for op in ins.ops[1:3])
    rest = ", ".join(e.src(op, "u32") for op in ins.ops[3:5])
    e.dst(ins.ops[0], f"bfi({first}, {rest})", DTYPES[kind])


@emits("popc", "clz", "bfind", "brev")
def _bits(e: Emitter, ins: Instr) -> None:
    check(ins, "b32 b64 u32 s32 u64 s64")
    kind = _type(ins)
    dtype = DTYPES[kind] if ins.parts[0] == "brev" else "uint32"
    e.dst(ins.ops[0], f"{ins.parts[0]}({e.src(ins.ops[1], kind)})", dtype)


@emits("selp")
def _selp(e: Emitter, ins: Instr) -> None:
    check(ins, "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
    kind = _type(ins)
    a, b, p = ins.ops[1:]
    expr = f"where({e.src(p, 'pred')}, {e.src(a, kind)}, {e.src(b, kind)})"
    e.dst(ins.ops[0], expr, DTYPES[kind])


@emits("setp")
def _setp(e: Emitter, ins: Instr) -> None:
    how, kind = ins.parts[1], _type(ins)
    allowed = f"{how} and or xor ftz f32 f64 f16 bf16 {_INTS}"
    check(ins, allowed)
    a, b = ins.ops[1:3]
    if kind in ("f32", "f64"):
        x, y = _float(e, ins, a, kind), _float(e, ins, b, kind)
        text = f"compare({x}, {y}, '{how}')"
    else:
        symbol = {
            "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
            "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
        }.get(how)  # fmt: skip
        if symbol is None or kind in ("f16", "bf16"):
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
        text = f"({e.src(a, kind)} {symbol} {e.src(b, kind)})"
    for part, bit in (("and", "&"), ("or", "|"), ("xor", "^")):
        if part in ins.parts[2:]:
            text = f"({text} {bit} {e.src(ins.ops[3], 'pred')})"
    first = ins.ops[0]
    if isinstance(first, Pair):
        e.lines.append(f"c = {text}")
        e.dst(first.first, "c", "bool")
        e.dst(first.second, "~c", "bool")
    else:
        e.dst(first, text, "bool")


@emits("mov")
def _mov(e: Emitter, ins: Instr) -> None:
    check(ins, "pred b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64")
    kind = _type(ins)
    to, source = ins.ops
    dtype = DTYPES[kind]
    if isinstance(to, Vec):  # unpack, low part first
        width = 8 * WIDTH[dtype] // len(to.items)
        e.lines.append(f"v = {e.src(source, kind)}")
        for i, item in enumerate(to.items):
            shifted = f"(v >> {e.const(width * i, dtype)})" if i else "v"
            e.dst(item, f"{shifted}.astype(uint{width})", f"uint{width}")
    elif isinstance(source, Vec):
        width = 8 * WIDTH[dtype] // len(source.items)
        parts = []
        for i, item in enumerate(source.items):
            text = f"{e.src(item, f'b{width}')}.astype({dtype})"
            parts.append(f"({text} << {e.const(width * i, dtype)})" if i else text)
        e.dst(to, " | ".join(parts), dtype)
    else:
        before = set(e.writes)
        e.dst(to, e.src(source, kind), dtype)
        e.is_move = True
        if isinstance(source, Reg):  # the values are those of another register
            e.writes = before


@emits("cvta", "isspacep")
def _cvta(e: Emitter, ins: Instr) -> None:
    check(ins, "to global shared param const local u64 u32")
    if ins.parts[0] == "isspacep":
        e.dst(ins.ops[0], f'isspacep({e.src(ins.ops[1], "u64")}, "{ins.parts[1]}")', "bool")
        return
    to_space = ins.has("to")
    space = ins.parts[2 if to_space else 1]
    kind = _type(ins)
    name = "to_space" if to_space else "to_generic"
    e.dst(ins.ops[0], f'{name}({e.src(ins.ops[1], kind)}, "{space}")', DTYPES[kind])


@emits("mapa")
def _mapa(e: Emitter, ins: Instr) -> None:
    check(ins, "shared::cluster u32 u64")
    kind = _type(ins)
    address, rank = e.src(ins.ops[1], kind), e.src(ins.ops[2], "u32")
    if isinstance(ins.ops[1], Sym):
        address = e.src(ins.ops[1], kind)
    e.dst(ins.ops[0], f"mapa(w, {address}, {rank}, {e.mask})", DTYPES[kind])


@emits("createpolicy")
def _createpolicy(e: Emitter, ins: Instr) -> None:
    e.dst(ins.ops[0], e.const(0, "uint64"), "uint64")


@emits("prefetch", "prefetchu", "membar", "nanosleep", "applypriority", "discard")
def _no_effect(e: Emitter, ins: Instr) -> None:
    """Hints, and fences among generic accesses: execution here is sequentially consistent."""


@emits("cvt")
def _cvt(e: Emitter, ins: Instr) -> None:
    modes = [p for p in ins.parts[1:] if p not in ("ftz", "sat", "satfinite", "relu")]
    rounding = [p for p in modes if p in ("rn", "rz", "rni", "rzi", "rmi", "rpi", "rp", "rm")]
    types = [p for p in modes if p not in rounding]
    if len(types) != 2 or len(rounding) > 1 or ins.has("relu"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    to, source = types
    mode = rounding[0] if rounding else ""
    if to in _PACKED:
        _cvt_packed(e, ins, to, source, mode)
        return
    a = ins.ops[1]
    if source in ("f16", "bf16"):
        x = e.src(a, "b16")
        if to == source:
            e.dst(ins.ops[0], x, "uint16")
            return
        x = f"from_bf16({x})" if source == "bf16" else f"{x}.view(float16).astype(float32)"
        source = "f32"
    else:
        x = e.src(a, source)
    if source == "f32" and ins.has("ftz"):
        x = f"ftz({x})"
    if source in ("f32", "f64") and to[0] in "us":
        saturating = f"to_int({x}, {DTYPES[to]}, '{mode}')"
        e.dst(ins.ops[0], saturating, DTYPES[to])
    elif source in ("f32", "f64") and to in ("f32", "f64"):
        if mode in ("rni", "rzi", "rmi", "rpi"):
            name = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[mode]
            x = f"np.{name}({x})"
        _float_result(e, ins, f"{x}.astype({DTYPES[to]})", to)
    elif to in ("f16", "bf16"):
        if mode not in ("rn", "") or ins.has("satfinite"):
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
        e.dst(ins.ops[0], f"round_{to}({x}.astype(float32))", "uint16")
    elif to in ("f32", "f64"):
        e.dst(ins.ops[0], f"{x}.astype({DTYPES[to]})", DTYPES[to])
    elif ins.has("sat"):
        low, high = (f"np.iinfo({DTYPES[to]}).{end}" for end in ("min", "max"))
        e.dst(ins.ops[0], f"np.clip({x}, {low}, {high}).astype({DTYPES[to]})", DTYPES[to])
    else:
        e.dst(ins.ops[0], f"{x}.astype({DTYPES[to]})", DTYPES[to])


_PACKED = {"bf16x2", "f16x2", "e2m1x2", "e4m3x2", "e5m2x2", "ue8m0x2"}


_UNPACKS = {
    ("f16x2", "e2m1x2"),
    ("f16x2", "e4m3x2"),
    ("f16x2", "e5m2x2"),
    ("bf16x2", "ue8m0x2"),
}


def _cvt_packed(e: Emitter, ins: Instr, to: str, source: str, mode: str) -> None:
    """Two fp32 to a pair, first source high; or a pair of small floats to 16 bits."""
    if (to, source) in _UNPACKS and len(ins.ops) == 2:
        width = "b8" if source == "e2m1x2" else "b16"
        x = e.src(ins.ops[1], width)
        e.dst(ins.ops[0], f"unpack_pair({x}, '{source[:-2]}', '{to[:-2]}')", "uint32")
        return
    if source != "f32" or len(ins.ops) != 3:
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    hi, lo = (e.src(op, "f32") for op in ins.ops[1:])
    if to in ("bf16x2", "f16x2"):
        if mode != "rn" or ins.has("satfinite"):
            raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
        name = "round_" + to[:-2]
        e.dst(ins.ops[0], f"pack16({name}({lo}), {name}({hi}))", "uint32")
        return
    if not ins.has("satfinite"):
        raise UnknownOpcodeError(f"line {ins.line}: {ins.op} is not modelled")
    if to == "e2m1x2":
        e.dst(ins.ops[0], f"encode_e2m1({lo}) | (encode_e2m1({hi}) << uint8(4))", "uint8")
        return
    if to == "ue8m0x2":
        up = mode == "rp"
        lo, hi = f"encode_e8m0({lo}, {up})", f"encode_e8m0({hi}, {up})"
    else:
        lo, hi = f"encode_fp8({lo}, '{to[:-2]}')", f"encode_fp8({hi}, '{to[:-2]}')"
    e.dst(ins.ops[0], f"{lo}.astype(uint16) | ({hi}.astype(uint16) << uint16(8))", "uint16")


def _relaxed(ins: Instr) -> str:
    """The argument of an access that CTAs may make without an order between them."""
    return ", True" if ins.has("relaxed") and ins.has("gpu") else ""


@emits("ld", "ldu")
def _ld(e: Emitter, ins: Instr) -> None:
    check(
        ins,
        "param global const nc v2 v4 v8 u8 s8 b8 u16 s16 b16 u32 s32 b32 f32 u64 s64 b64 f64 "
        "L1::no_allocate L1::evict_last L1::evict_first L2::128B L2::256B L2::cache_hint relaxed "
        "volatile gpu sys ca cg cs",
    )
    space = next((p for p in ins.parts if p in ("param", "global", "const")), None)
    kind = _type(ins)
    dtype = DTYPES[kind]
    to = ins.ops[0]
    items = to.items if isinstance(to, Vec) else (to,)
    address = e.address(ins.ops[1])
    if space == "param":
        load = f"ld_param(w, {ins.pc}, {address}, {e.mask}, {dtype}, {len(items)})"
    else:
        load = f"ld_global(w, {ins.pc}, {address}, {e.mask}, {dtype}, {len(items)}{_relaxed(ins)})"
    e.lines.append(f"v = {load}")
    for i, item in enumerate(items):
        e.dst(item, f"v[{i}]", dtype)


@emits("st")
def _st(e: Emitter, ins: Instr) -> None:
    if ins.has("param"):
        return  # an argument of a call, which is an error where it is reached
    check(
        ins,
        "global v2 v4 v8 u8 s8 b8 u16 s16 b16 u32 s32 b32 f32 u64 s64 b64 f64 "
        "L1::no_allocate relaxed volatile gpu sys wb cg cs wt",
    )
    kind = _type(ins)
    source = ins.ops[1]
    items = source.items if isinstance(source, Vec) else (source,)
    values = ", ".join(e.src(item, kind) for item in items)
    address = e.address(ins.ops[0])
    e.lines.append(f"st_global(w, {ins.pc}, {address}, {e.mask}, ({values},){_relaxed(ins)})")
