"""PTX text to instructions. Registers get numbers, labels become instruction indices."""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Any

from emulator.errors import UnknownOpcodeError

# Storage of a register by declared type: what its numpy array holds.
STORAGE = {
    "pred": "bool",
    "b8": "uint8",
    "u8": "uint8",
    "s8": "uint8",
    "b16": "uint16",
    "u16": "uint16",
    "s16": "uint16",
    "f16": "uint16",
    "bf16": "uint16",
    "b32": "uint32",
    "u32": "uint32",
    "s32": "uint32",
    "f16x2": "uint32",
    "bf16x2": "uint32",
    "f32": "float32",
    "b64": "uint64",
    "u64": "uint64",
    "s64": "uint64",
    "f64": "float64",
}
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclasses.dataclass(frozen=True, slots=True)
class Reg:
    index: int
    storage: str
    name: str
    negated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Special:
    name: str  # without the percent sign


@dataclasses.dataclass(frozen=True, slots=True)
class Imm:
    value: int  # bits for a float literal
    is_float: int = 0  # 32 or 64 for 0f.. and 0d.. literals


@dataclasses.dataclass(frozen=True, slots=True)
class Sym:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Vec:
    items: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Mem:
    base: Any
    offset: int = 0
    coords: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    first: Any
    second: Any


SINK = Sym("_")


@dataclasses.dataclass(slots=True)
class Instr:
    pc: int
    op: str
    parts: tuple[str, ...]
    pred: Reg | None
    ops: tuple[Any, ...]
    line: int
    text: str

    def has(self, part: str) -> bool:
        return part in self.parts


@dataclasses.dataclass(slots=True)
class Param:
    name: str
    offset: int
    size: int


@dataclasses.dataclass(slots=True)
class Variable:
    """A module or function variable; `size` 0 for the extern dynamic shared array."""

    name: str
    space: str
    align: int
    size: int
    init: bytes | None
    offset: int = 0


@dataclasses.dataclass(slots=True)
class Kernel:
    name: str
    params: list[Param]
    param_bytes: int
    instrs: list[Instr]
    storages: list[str]
    reg_names: list[str]
    variables: dict[str, Variable]
    directives: dict[str, str]
    static_shared: int = 0

    def targets(self) -> set[int]:
        """Instructions that a branch may reach."""
        return {
            op.value
            for ins in self.instrs
            if ins.parts[0] == "bra"
            for op in ins.ops
            if isinstance(op, Imm)
        }


@dataclasses.dataclass(slots=True)
class Module:
    target: str
    kernels: dict[str, Kernel]

    def opcodes(self) -> set[str]:
        return {ins.op for kernel in self.kernels.values() for ins in kernel.instrs}


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(
    r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*((?:\.\w+[^{;]*)*)\{", re.S
)
_VAR = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s*)?\.(\w+)\s+([\w$]+)\s*"
    r"(?:\[(\d*)\])?\s*(?:=\s*(\{[^}]*\}|[\w.+-]+))?$",
    re.S,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^,]*?\s)?([\w$]+)(?:\[(\d+)\])?"
)
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)\s*")


def parse(text: str, only: str | None = None) -> Module:
    """Reads a PTX file, all of it or one kernel.

    Raises:
      UnknownOpcodeError: the file has something that the grammar here does not cover.
    """
    # Comments become blanks of the same height, so that line numbers stay.
    clean = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
    target = re.search(r"\.target\s+(\w+)", clean)
    module_vars: dict[str, Variable] = {}
    kernels: dict[str, Kernel] = {}
    at = 0
    while match := _ENTRY.search(clean, at):
        _module_variables(clean[at : match.start()], module_vars)
        end = _closing(clean, match.end() - 1)
        if only is None or match.group(1) == only:
            kernel = _Body(clean, match, end, module_vars).kernel()
            kernels[kernel.name] = kernel
        at = end + 1
    _module_variables(clean[at:], module_vars)
    return Module(target.group(1) if target else "", kernels)


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise UnknownOpcodeError("unbalanced braces in PTX")


def _module_variables(text: str, out: dict[str, Variable]) -> None:
    for statement in text.split(";"):
        at = re.search(r"\.(shared|global|const)\b", statement)
        if at is None:
            continue
        head = re.search(
            r"((\.(visible|extern|weak|common)\s+)*\.(shared|global|const)\b.*)", statement, re.S
        )
        variable = _variable(head.group(1).strip())
        out[variable.name] = variable


def _variable(text: str) -> Variable:
    match = _VAR.match(text)
    if match is None:
        raise UnknownOpcodeError(f"unknown declaration: {text[:120]}")
    space, align, kind, name, count, init = match.groups()
    width = SIZES[re.sub(r"\D", "", kind)]
    size = width * (int(count) if count else (1 if count is None else 0))
    data = None
    if init:
        values = [int(v, 0) for v in init.strip("{}").split(",") if v.strip()]
        data = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in values)
        data = data.ljust(size, b"\0")
    return Variable(name, space, int(align or width), size, data)


class _Body:
    """One kernel's text to a Kernel."""

    def __init__(self, text: str, entry: re.Match, end: int, module_vars: dict[str, Variable]):
        self.name, params, directives = entry.groups()
        self.text = text
        self.start, self.end = entry.end(), end
        self.variables = {k: dataclasses.replace(v) for k, v in module_vars.items()}
        self.storages: list[str] = []
        self.names: list[str] = []
        self.scopes: list[dict[str, Reg]] = [{}]
        self.families: list[dict[str, str]] = [{}]
        self.scope_ids = [0]
        self.next_scope = 1
        self.labels: dict[tuple[int, str], int] = {}
        self.branch_scopes: dict[int, tuple[int, ...]] = {}
        self.instrs: list[Instr] = []
        self.params, self.param_bytes = self._params(params or "")
        self.directives = {
            m.group(1): m.group(2).strip()
            for m in re.finditer(r"\.(\w+)\s*([^.]*)", directives or "")
        }

    def _params(self, text: str) -> tuple[list[Param], int]:
        out, at = [], 0
        for align, kind, name, count in _PARAM.findall(text):
            width = SIZES[re.sub(r"\D", "", kind)]
            size = width * int(count) if count else width
            step = int(align or width)
            at = (at + step - 1) // step * step
            out.append(Param(name, at, size))
            at += size
        return out, at

    def kernel(self) -> Kernel:
        for line, statement in self._statements():
            self._statement(line, statement)
        for ins in self.instrs:
            if ins.parts[0] == "bra":
                ins.ops = (Imm(self._label(ins)),)
        at = 0
        for variable in sorted(self.variables.values(), key=lambda v: v.size == 0):
            if variable.space == "shared":
                at = (at + variable.align - 1) // variable.align * variable.align
                variable.offset = at
                at += variable.size
        return Kernel(
            self.name,
            self.params,
            self.param_bytes,
            self.instrs,
            self.storages,
            self.names,
            self.variables,
            self.directives,
            at,
        )

    def _label(self, ins: Instr) -> int:
        name = ins.ops[-1].name
        for scope in reversed(self.branch_scopes[ins.pc]):
            if (scope, name) in self.labels:
                return self.labels[scope, name]
        raise UnknownOpcodeError(f"{self.name} line {ins.line}: no label {name}")

    def _statements(self):
        """Statements, labels and scope braces with their lines."""
        text, at, end = self.text, self.start, self.end
        line = text.count("\n", 0, at) + 1
        while at < end:
            char = text[at]
            if char == "\n":
                line += 1
                at += 1
            elif char in " \t;":
                at += 1
            elif char in "{}":
                yield line, char
                at += 1
            elif match := _LABEL.match(text, at):
                yield line, match.group(1) + ":"
                line += match.group().count("\n")
                at = match.end()
            else:
                stop = text.index(";", at)
                statement = text[at:stop]
                yield line, " ".join(statement.split())
                line += statement.count("\n")
                at = stop + 1

    def _statement(self, line: int, text: str) -> None:
        if text == "{":
            self.scope_ids.append(self.next_scope)
            self.next_scope += 1
            self.scopes.append({})
            self.families.append({})
        elif text == "}":
            self.scopes.pop()
            self.families.pop()
            self.scope_ids.pop()
        elif text.endswith(":"):
            self.labels[self.scope_ids[-1], text[:-1]] = len(self.instrs)
        elif match := _REG.match(text):
            self._declare(*match.groups())
        elif text.startswith((".shared", ".local", ".extern")):
            variable = _variable(text)
            if variable.space == "local":
                raise UnknownOpcodeError(f"{self.name}: local memory is not modelled: {text}")
            self.variables[variable.name] = variable
        elif text.startswith("."):
            # .param: arguments of a call, which is an error where it is reached.
            if not text.startswith((".loc", ".pragma", ".file", ".section", ".param")):
                raise UnknownOpcodeError(f"{self.name} line {line}: unknown directive {text}")
        else:
            self._instruction(line, text)

    def _declare(self, kind: str, names: str) -> None:
        if kind not in STORAGE:
            raise UnknownOpcodeError(f"{self.name}: registers of type .{kind} are not modelled")
        for name in names.split(","):
            name = name.strip()
            if family := re.match(r"(%?[\w$]+)<\d+>", name):
                self.families[-1][family.group(1)] = STORAGE[kind]
            else:
                self._register(name, STORAGE[kind], self.scopes[-1])

    def _register(self, name: str, storage: str, scope: dict[str, Reg]) -> Reg:
        reg = Reg(len(self.storages), storage, name)
        self.storages.append(storage)
        self.names.append(name)
        scope[name] = reg
        return reg

    def _lookup(self, name: str) -> Reg | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        family = re.match(r"(%?[A-Za-z_$]+)\d+$", name)
        if family:
            for scope, families in zip(reversed(self.scopes), reversed(self.families), strict=True):
                if family.group(1) in families:
                    return self._register(name, families[family.group(1)], scope)
        return None

    def _instruction(self, line: int, text: str) -> None:
        match = re.match(r"(?:@(!?)(%?[\w$]+)\s+)?([\w.:]+)\s*(.*)$", text)
        if match is None:
            raise UnknownOpcodeError(f"{self.name} line {line}: cannot parse {text[:120]!r}")
        negated, guard, op, rest = match.groups()
        pred = None
        if guard:
            reg = self._lookup(guard)
            if reg is None:
                raise UnknownOpcodeError(f"{self.name} line {line}: unknown predicate {guard}")
            pred = dataclasses.replace(reg, negated=bool(negated))
        parts = tuple(op.split("."))
        if parts[0] == "bra":
            self.branch_scopes[len(self.instrs)] = tuple(self.scope_ids)
        ops = tuple(self._operand(part) for part in _split(rest))
        self.instrs.append(Instr(len(self.instrs), op, parts, pred, ops, line, text))

    def _operand(self, text: str) -> Any:
        text = text.strip()
        if text.startswith("{"):
            return Vec(tuple(self._operand(p) for p in _split(text[1:-1])))
        if text.startswith("["):
            items = _split(text[1:-1])
            base, offset = self._address(items[0])
            coords: list[Any] = []
            for item in items[1:]:
                op = self._operand(item)
                coords += op.items if isinstance(op, Vec) else [op]
            return Mem(base, offset, tuple(coords))
        if "|" in text:
            return Pair(*(self._operand(p) for p in text.split("|")))
        if text == "_":
            return SINK
        if text.startswith("!"):
            return dataclasses.replace(self._operand(text[1:]), negated=True)
        if re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
            return Imm(int(text.rstrip("U"), 0))
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Imm(int(text[2:], 16), 32)
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Imm(int(text[2:], 16), 64)
        if re.match(r"-?\d+\.\d+$", text):
            return Imm(struct.unpack("<I", struct.pack("<f", float(text)))[0], 32)
        reg = self._lookup(text)
        if reg is not None:
            return reg
        if text.startswith("%"):
            return Special(text[1:])
        if "+" in text:
            base, offset = self._address(text)
            return Mem(base, offset)
        return Sym(text)

    def _address(self, text: str) -> tuple[Any, int]:
        match = re.match(r"(.*?)\+(-?\d+|0x[0-9a-fA-F]+)$", text.strip())
        if match:
            return self._operand(match.group(1)), int(match.group(2), 0)
        return self._operand(text), 0


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    out, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            out.append(text[start:i])
            start = i + 1
    last = text[start:].strip()
    if last:
        out.append(last)
    return out
