"""Operands that test one assumption of the kernels at a time, and what they have to give.

Each probe is built so that a wrong result has one cause: whatever it does not test is constant, so
that a fault there leaves it right. Every sum is exact in fp32 in any order and, but for the probe
of rounding, every result in bfloat16, so results are compared bit for bit.

NumPy only: the same probes run on a GPU (parts.py) and in an emulator of the kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jax_w4a4.formats import padded_k

# Magnitudes of the e2m1 codes 0..7; 8..15 are their negatives.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
K = 512  # a multiple of every kernel's step


@dataclasses.dataclass(frozen=True)
class Kind:
    """A format as a kernel multiplies it.

    Attributes:
      block: K elements per scale, None for the whole row.
    """

    format: str
    block: int | None
    precision: str | None = None

    def __str__(self) -> str:
        block = "" if self.format != "int4" else f" block {self.block or 'row'}"
        return f"{self.format}{block}{f' {self.precision}' if self.precision else ''}"

    @property
    def scale_dtype(self) -> str:
        return {"nvfp4": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu", "int4": "float16"}[self.format]

    def code(self, value: float) -> int:
        """The code of a value that both e2m1 and int4 have."""
        if self.format == "int4":
            return int(value) & 15
        return _E2M1.index(abs(value)) + (8 if value < 0 else 0)

    def value(self, code: int) -> float:
        if self.format == "int4":
            return float(code - 16 if code > 7 else code)
        return _E2M1[code & 7] * (-1 if code > 7 else 1)

    def values(self, codes: np.ndarray) -> np.ndarray:
        return np.array([self.value(c) for c in range(16)])[codes]

    def scales(self, exponents: np.ndarray) -> np.ndarray:
        """Bits of the scales 2^exponent."""
        e = np.asarray(exponents)
        if self.format == "nvfp4":
            return ((e + 7) << 3).astype(np.uint8)
        if self.format == "mxfp4":
            return (e + 127).astype(np.uint8)
        return ((e + 15) << 10).astype(np.uint16)


KINDS = (
    Kind("nvfp4", 16),
    Kind("nvfp4", 16, "fastest"),
    Kind("mxfp4", 32),
    Kind("mxfp4", 32, "highest"),
    Kind("int4", None),
    Kind("int4", 64),
    Kind("int4", 64, "highest"),
    Kind("int4", 128),
    Kind("int4", 128, "highest"),
    Kind("int4", 32),
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One gemm.

    Attributes:
      arrays: operands as bits, by name: packed, act_scale, weight, weight_scale, and where present
        lora_act, lora_up, channel_scale, bias, act_global_scale, weight_global_scale.
      want: (m, n) exact results.
    """

    kind: Kind
    m: int
    n: int
    k: int  # padded
    rank: int
    arrays: dict[str, np.ndarray]
    want: np.ndarray

    @property
    def block(self) -> int:
        return self.kind.block or self.k


def bf16(x: np.ndarray) -> np.ndarray:
    """Bits of finite values rounded to nearest bfloat16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b^T; where all rows are the same, which is so in big probes, one of them is multiplied."""
    rows = [f[:1] if (f == f[0]).all() else f for f in (a, b)]
    return np.broadcast_to(rows[0] @ rows[1].T, (len(a), len(b)))


def call(
    kind: Kind,
    act: np.ndarray,
    weight: np.ndarray,
    *,
    act_exponents: np.ndarray | int = 0,
    weight_exponents: np.ndarray | int = 0,
    lora_act: np.ndarray | None = None,
    lora_up: np.ndarray | None = None,
    channel_scale: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    act_global: float | None = None,
    weight_global: float | None = None,
) -> Call:
    """A call from codes (rows, k), exponents of the scales (rows, blocks) and the other values."""
    (m, k), n = act.shape, weight.shape[0]
    blocks = k // (kind.block or k)
    arrays, factors = {}, []
    for name, scale_name, codes, exponents in (
        ("packed", "act_scale", act, act_exponents),
        ("weight", "weight_scale", weight, weight_exponents),
    ):
        e = np.broadcast_to(exponents, (codes.shape[0], blocks))
        arrays[name], arrays[scale_name] = pack(codes), kind.scales(e)
        factors.append(kind.values(codes) * np.repeat(np.exp2(e.astype(float)), k // blocks, 1))
    want = _product(*factors)
    for name, scalar in (("act_global_scale", act_global), ("weight_global_scale", weight_global)):
        if scalar is not None:
            arrays[name] = np.array([scalar], np.float32)
            want = want * scalar
    if channel_scale is not None:
        arrays["channel_scale"] = np.asarray(channel_scale, np.float32)
        want = want * channel_scale
    rank = 0
    if lora_act is not None and lora_up is not None:
        rank = lora_act.shape[1]
        arrays["lora_act"], arrays["lora_up"] = bf16(lora_act), bf16(lora_up)
        want = want + lora_act @ lora_up.T
    if bias is not None:
        arrays["bias"] = np.asarray(bias, np.float32)
        want = want + bias
    return Call(kind, m, n, k, rank, arrays, want)


# ------------------------------------------------------------------------------------------------
# The probes
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a probe is run on.

    Attributes:
      shapes: three pairs (M, N), the second with rows of y that are no multiple of 16 bytes.
      ring: K, M and N of the probe of many stages and tiles.
    """

    shapes: tuple[tuple[int, int], ...]
    ring: tuple[int, int, int]


_TAILS = ((37, 77), (1, 8))
SMALL = Sizes(((72, 136), *_TAILS), (64 * 2 * 7, 200, 264))
# For a GPU: more than one tile of every kernel and both halves of a pair's, several tiles per CTA.
LARGE = Sizes(((333, 392), *_TAILS), (64 * 2 * 37, 2050, 2056))
# For kernels made for few tokens.
FEW = Sizes(((13, 392), (101, 77), (1, 8)), (64 * 2 * 37, 16, 4104))

_DIGITS = (0.0, 1.0, 2.0, 4.0)  # both e2m1 and int4 have them


def _full(kind: Kind, rows: int, k: int, value: float) -> np.ndarray:
    return np.full((rows, k), kind.code(value), np.uint8)


def _coded(kind: Kind, rows: int, k: int, digit: np.ndarray) -> np.ndarray:
    """Rows of constant codes: the value _DIGITS[digit[row]]."""
    codes = np.array([kind.code(v) for v in _DIGITS], np.uint8)
    return np.repeat(codes[digit][:, None], k, axis=1)


def _digits(count: int) -> Iterator[np.ndarray]:
    """Base-4 digits of 0..count-1, lowest first."""
    index = np.arange(count)
    while True:
        yield index % 4
        index = index // 4
        if not index.any():
            return


def _store(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    for m, n in sizes.shapes:
        zero = np.zeros((m, K), np.uint8), np.zeros((n, K), np.uint8)
        yield call(kind, *zero, bias=np.arange(n) % 128)
        if n > 128:
            yield call(kind, *zero, bias=np.arange(n) // 128)


def _tokens(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    # Along K everything is constant; 2^-9 = 1 / K.
    for m, n in sizes.shapes[:2]:
        for digit in _digits(m):
            yield call(kind, _coded(kind, m, K, digit), _full(kind, n, K, 1),
                       act_exponents=-4, weight_exponents=-5)  # fmt: skip


def _rows(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    for m, n in sizes.shapes[:2]:
        for digit in _digits(n):
            yield call(kind, _full(kind, m, K, 1), _coded(kind, n, K, digit),
                       act_exponents=-4, weight_exponents=-5)  # fmt: skip


def _pairing(rng: np.random.Generator, k: int, unit: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Two vectors of zeros and ones, constant over `unit`, with an exact number of meetings."""
    while True:
        u, v = (np.repeat(rng.integers(0, 2, k // unit), unit) for _ in range(2))
        total = int(u @ v)
        if total and from_bf16(bf16(np.array(total))) == total:
            return u, v


def _ones(kind: Kind, rows: int, vector: np.ndarray) -> np.ndarray:
    return np.repeat((vector * kind.code(1)).astype(np.uint8)[None], rows, axis=0)


def _depth(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    rng = np.random.default_rng(0)
    for _ in range(4):
        u, v = _pairing(rng, K)
        m, n = sizes.shapes[0]
        yield call(kind, _ones(kind, m, u), _ones(kind, n, v))


def _codes(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    m, n, k = 8, 24, 256
    for code in range(16):
        every, one = np.uint8(code), {"act_exponents": -4, "weight_exponents": -4}
        yield call(kind, np.full((m, k), every), _full(kind, n, k, 1), **one)
        yield call(kind, _full(kind, m, k, 1), np.full((n, k), every), **one)


def _compensated(kind: Kind, rows: int, rng: np.random.Generator):
    """Codes with one value in each block and scales that make it 1, at random."""
    block = kind.block or K
    exponent = rng.integers(0, 3, (rows, K // block))
    at = np.arange(K // block) * block + rng.integers(0, block, (rows, K // block))
    codes = np.zeros((rows, K), np.uint8)
    coded = np.array([kind.code(2.0**e) for e in range(3)], np.uint8)
    np.put_along_axis(codes, at, coded[exponent], axis=1)
    return codes, -exponent


def _token_scales(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    rng = np.random.default_rng(1)
    m, n = sizes.shapes[0]
    for _ in range(2):
        codes, exponents = _compensated(kind, m, rng)
        yield call(kind, codes, _full(kind, n, K, 1), act_exponents=exponents)


def _weight_scales(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    rng = np.random.default_rng(2)
    m, n = sizes.shapes[0]
    for _ in range(2):
        codes, exponents = _compensated(kind, n, rng)
        yield call(kind, _full(kind, m, K, 1), codes, weight_exponents=exponents)


def _low_rank(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    rng = np.random.default_rng(3)
    m, n = sizes.shapes[0]
    act = np.zeros((m, K), np.uint8)
    act[:, :8] = kind.code(1)
    for rank in (64, 128):
        for _ in range(2):
            u, v = _pairing(rng, rank)
            yield call(
                kind, act, _full(kind, n, K, 1),
                lora_act=np.repeat(u[None].astype(float), m, 0),
                lora_up=np.repeat(v[None].astype(float), n, 0),
            )  # fmt: skip


def _epilogue(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    """The bias makes up for each row's channel scale, so that every cell is 5."""
    (m, n), rank = sizes.shapes[0], 64
    rng = np.random.default_rng(4)
    act = np.zeros((m, K), np.uint8)
    act[:, :3] = kind.code(1)  # the product is 3, alpha 2, the low-rank branch 7
    scale = rng.choice([-4.0, -1.0, 0.5, 2.0], n)
    up = np.zeros((n, rank))
    up[:, :7] = 1
    yield call(
        kind, act, _full(kind, n, K, 1), act_global=0.25, weight_global=8, channel_scale=scale,
        lora_act=np.ones((m, rank)), lora_up=up, bias=5 - 7 - scale * 6,
    )  # fmt: skip


def _rounding(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    m, n = 8, 24
    for total in (257, 259, 383, 511):  # ties, to even either way, and into the next binade
        for sign in (1, -1):
            act = np.zeros((m, K), np.uint8)
            act[:, :total] = kind.code(sign)
            yield call(kind, act, _full(kind, n, K, 1))


def _tails(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    unit = kind.block or 32
    for (m, n), k, rank in zip(sizes.shapes, (288, 160, 32), (48, 16, 0), strict=True):
        k = padded_k(k, unit if kind.block else None)
        if rank:
            lora = {"lora_act": np.ones((m, rank)), "lora_up": np.ones((n, rank))}
        else:
            lora = {}
        yield call(kind, _full(kind, m, k, 1), _full(kind, n, k, 1), **lora)


def _ring(kind: Kind, sizes: Sizes) -> Iterator[Call]:
    """Blocks of K that meet only their own, K no multiple of the stages, several tiles per CTA."""
    rng = np.random.default_rng(5)
    k, m, n = sizes.ring
    for _ in range(2):
        u, v = _pairing(rng, k, 64)
        yield call(kind, _ones(kind, m, u), _ones(kind, n, v))


@dataclasses.dataclass(frozen=True)
class Probe:
    """One assumption.

    Attributes:
      name: of the part.
      assumption: what holds if it passes.
      calls: builds the calls.
      index: what the results spell in digits, for messages; None where they are constants.
      base: of those digits.
    """

    name: str
    assumption: str
    calls: Callable[[Kind, Sizes], Iterator[Call]]
    index: str | None = None
    base: int = 4


PROBES = (
    Probe("store", "every cell is written once, with the bias of its column, also past the last "
          "whole tile and where rows of y are no multiple of 16 bytes", _store, "column", 128),
    Probe("tokens", "accumulator columns, fragments and stores keep the order of the tokens",
          _tokens, "token"),
    Probe("rows", "weight fragments and accumulator rows keep the order of the weight rows",
          _rows, "weight row"),
    Probe("depth", "both operands put the same k at the same place: swizzles, descriptors, the "
          "order of the expanded codes", _depth),
    Probe("codes", "each of the 16 codes of either operand has its value", _codes),
    Probe("token-scales", "a token's block scale meets its own token and block", _token_scales),
    Probe("weight-scales", "a weight's block scale meets its own row and block", _weight_scales),
    Probe("low-rank", "the low-rank MMA pairs the ranks and adds to the same accumulator",
          _low_rank),
    Probe("epilogue", "channel scale, global scales, low-rank branch and bias in the operator's "
          "order and of the right column", _epilogue),
    Probe("rounding", "results round to nearest bfloat16, ties to even", _rounding),
    Probe("tails", "copies past the end of K and of the ranks fill with zeros", _tails),
    Probe("ring", "a K block meets its own partner through many stages and several tiles per CTA",
          _ring),
)  # fmt: skip
BY_NAME = {probe.name: probe for probe in PROBES}


def mismatches(probe: Probe, calls: list[Call], results: list[np.ndarray]) -> list[str]:
    """What is wrong, in words; `results` are bf16 bits (m, n) of each call."""
    out = []
    for one, bits in zip(calls, results, strict=True):
        wrong = bits != bf16(one.want)
        # -0 and 0 are the same cell.
        wrong &= ~((one.want == 0) & (bits & 0x7FFF == 0))
        if wrong.any():
            row, column = (int(v[0]) for v in np.nonzero(wrong))
            out.append(
                f"{one.m}x{one.k}x{one.n} r{one.rank}: {np.count_nonzero(wrong)} of {wrong.size} "
                f"cells are wrong, first [{row}, {column}]: {from_bf16(bits)[row, column]:g} "
                f"instead of {one.want[row, column]:g}"
            )
    if out and probe.index:
        out += _spelled(probe, calls, results)
    return out


def _spelled(probe: Probe, calls: list[Call], results: list[np.ndarray]) -> list[str]:
    """Which index the digits of a cell spell, where they do."""
    digits = {v: i for i, v in enumerate(_DIGITS)} if probe.base == 4 else {
        float(v): v for v in range(probe.base)
    }  # fmt: skip
    out = []
    for shape in dict.fromkeys((c.m, c.n) for c in calls):
        members = [(c, r) for c, r in zip(calls, results, strict=True) if (c.m, c.n) == shape]
        found, want = np.zeros(shape, int), np.zeros(shape, int)
        for power, (one, bits) in enumerate(members):
            for into, values in ((found, from_bf16(bits)), (want, one.want)):
                digit = np.vectorize(lambda v: digits.get(float(v), -(10**6)))(values)
                into += digit * probe.base**power
        moved = (found != want) & (found >= 0)
        for row, column in zip(*(v[:3] for v in np.nonzero(moved)), strict=True):
            out.append(
                f"y[{row}, {column}] of {shape[0]}x{shape[1]} has the value of {probe.index} "
                f"{found[row, column]} instead of {want[row, column]}"
            )
    return out
