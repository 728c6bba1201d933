"""Arithmetic on 32-lane arrays: what numpy lacks of the PTX instructions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

U32, S32, U64, S64, F32, F64 = np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64
Array = np.ndarray

# Arrays without dimensions: with a scalar, numpy takes twice the time for 32 lanes.
_ZERO, _ONE, _SIXTEEN = (np.array(value, U32) for value in (0, 1, 16))
_SIGN = np.array(0x80000000, U32)
_MAG = np.array(0x7FFFFFFF, U32)
_INF = np.array(0x7F800000, U32)
_LOW = np.array(0xFFFF, U32)
_HALF = np.array(0x7FFF, U32)
_count = np.count_nonzero


def ftz(x: Array) -> Array:
    """fp32 subnormals to zero of the same sign."""
    bits = x.view(U32)
    small = (bits & _INF) == _ZERO
    if not _count(small):
        return x
    return np.where(small, bits & _SIGN, bits).view(F32)


def fma(a: Array, b: Array, c: Array) -> Array:
    """fp32 fused multiply-add, rounded once: the sum is rounded to odd in fp64 first."""
    p = a.astype(F64) * b.astype(F64)
    c = c.astype(F64)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    inexact = error != 0
    if _count(inexact):
        inexact &= np.isfinite(s)
        toward_zero = np.where((error > 0) == (s > 0), s, np.nextafter(s, 0.0))
        odd = (toward_zero.view(U64) | U64(1)).view(F64)
        s = np.where(inexact, odd, s)
    return s.astype(F32)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """fp64, exactly and then rounded; infinities and NaN as numpy has them."""
    plain = a * b + c
    out = [
        float(Fraction(x) * Fraction(y) + Fraction(z)) if np.isfinite([x, y, z, p]).all() else p
        for x, y, z, p in zip(a.tolist(), b.tolist(), c.tolist(), plain.tolist(), strict=True)
    ]
    return np.array(out, F64)


def round_bf16(x: Array) -> Array:
    """fp32 to bf16 bits (uint16), to nearest even; NaN becomes 0x7FFF."""
    bits = x.view(U32)
    rounded = (bits + _HALF + ((bits >> _SIXTEEN) & _ONE)) >> _SIXTEEN
    nan = x != x
    if _count(nan):
        rounded = np.where(nan, _HALF, rounded)
    return rounded.astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """bf16 bits to fp32."""
    return (bits.astype(U32) << _SIXTEEN).view(F32)


def round_f16(x: Array) -> Array:
    bits = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FFF), bits) if nan.any() else bits


def lo16(x: Array) -> Array:
    return (x & _LOW).astype(np.uint16)


def hi16(x: Array) -> Array:
    return (x >> _SIXTEEN).astype(np.uint16)


def pack16(lo: Array, hi: Array) -> Array:
    return lo.astype(U32) | (hi.astype(U32) << _SIXTEEN)


def bf16x2(f, *operands: Array) -> Array:
    """Applies an fp32 function to both halves of bf16 pairs and rounds."""
    lo = round_bf16(f(*(from_bf16(lo16(x)) for x in operands)))
    hi = round_bf16(f(*(from_bf16(hi16(x)) for x in operands)))
    return pack16(lo, hi)


def f16x2(f, *operands: Array) -> Array:
    lo = round_f16(f(*(lo16(x).view(np.float16).astype(F32) for x in operands)))
    hi = round_f16(f(*(hi16(x).view(np.float16).astype(F32) for x in operands)))
    return pack16(lo, hi)


def fmin(a: Array, b: Array) -> Array:
    """A NaN loses; -0 is less than +0."""
    r = np.fmin(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero, (a.view(U32) | b.view(U32)).view(F32), r) if _count(zero) else r


def fmax(a: Array, b: Array) -> Array:
    r = np.fmax(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero, (a.view(U32) & b.view(U32)).view(F32), r) if _count(zero) else r


def minmax(a: Array, b: Array, largest: bool, nan: bool, xorsign: bool) -> Array:
    """min or max with the modifiers .NaN and .xorsign.abs."""
    sign = None
    if xorsign:
        sign = (a.view(U32) ^ b.view(U32)) & _SIGN
        a, b = np.abs(a), np.abs(b)
    r = fmax(a, b) if largest else fmin(a, b)
    if sign is not None:
        r = (r.view(U32) & _MAG | sign).view(F32)
    if nan:
        bad = np.isnan(a) | np.isnan(b)
        if bad.any():
            r = np.where(bad, U32(0x7FFFFFFF), r.view(U32)).view(F32)
    return r


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Byte permute, the default mode."""
    pool = np.empty((len(a), 2), U32)
    pool[:, 0] = a
    pool[:, 1] = b
    nibbles = (selector.reshape(-1, 1) >> _NIBBLE_SHIFTS) & _FIFTEEN
    places = (nibbles & _SEVEN).astype(np.intp)
    places += _EIGHTS[: len(a)]
    out = pool.view(np.uint8).reshape(-1)[places]  # eight bytes of a lane, little endian
    replicate = nibbles > _SEVEN
    if _count(replicate):
        out = np.where(replicate, np.where(out > 127, np.uint8(255), np.uint8(0)), out)
    return out.view(U32).reshape(-1)


_NIBBLE_SHIFTS = np.array([0, 4, 8, 12], U32)
_SEVEN, _FIFTEEN = (np.array(value, U32) for value in (7, 15))
_EIGHTS = 8 * np.arange(32)[:, None]


def permute(a: Array, b: Array, places: Array) -> Array:
    """prmt with the same four places, below eight, in every lane."""
    pool = np.empty((len(a), 2), U32)
    pool[:, 0] = a
    pool[:, 1] = b
    return pool.view(np.uint8).take(places, axis=1).view(U32).ravel()


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    known = _LOP3.get(table)
    if known is not None:
        return known(a, b, c)
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            x = a if i & 4 else ~a
            y = b if i & 2 else ~b
            z = c if i & 1 else ~c
            out |= x & y & z
    return out


_LOP3 = {
    0xEA: lambda a, b, c: (a & b) | c,
    0xF8: lambda a, b, c: a | (b & c),
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
}


def shl(a: Array, n: Array) -> Array:
    bits = a.dtype.itemsize * 8
    big = n >= bits
    out = a << np.minimum(n, bits - 1).astype(a.dtype)
    return np.where(big, a.dtype.type(0), out) if big.any() else out


def shr(a: Array, n: Array) -> Array:
    """Logical for unsigned, arithmetic for signed arrays; amounts clamp."""
    bits = a.dtype.itemsize * 8
    out = a >> np.minimum(n, bits - 1).astype(a.dtype)
    big = n >= bits
    if a.dtype.kind == "u" and big.any():
        return np.where(big, a.dtype.type(0), out)
    return out


def shf(a: Array, b: Array, n: Array, left: bool, clamp: bool) -> Array:
    """Funnel shift of b:a."""
    amount = np.minimum(n, 32) if clamp else n & U32(31)
    whole = a.astype(U64) | (b.astype(U64) << U64(32))
    if left:
        return ((whole << amount.astype(U64)) >> U64(32)).astype(U32)
    return (whole >> amount.astype(U64)).astype(U32)


def div(a: Array, b: Array) -> Array:
    """Integer division toward zero; by zero gives all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        q = a // safe
    else:
        q = (np.abs(a.astype(S64)) // np.abs(safe.astype(S64))) * (np.sign(a) * np.sign(safe))
        q = q.astype(a.dtype)
    return np.where(b == 0, a.dtype.type(-1 if a.dtype.kind == "i" else ~a.dtype.type(0)), q)


def rem(a: Array, b: Array) -> Array:
    return a - div(a, b) * b


def mulhi(a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if bits == 64:
        high = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
        return np.array(high, a.dtype)
    wide = S64 if a.dtype.kind == "i" else U64
    return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)


def bfe(a: Array, pos: Array, length: Array) -> Array:
    pos, length = pos & U32(0xFF), length & U32(0xFF)
    wide = shr(a.astype(S64 if a.dtype.kind == "i" else U64), pos)
    keep = np.minimum(length, 32)
    if a.dtype.kind == "i":
        up = (64 - keep).astype(S64)
        return np.where(keep == 0, 0, (wide << up) >> up).astype(a.dtype)
    mask = shl(np.ones_like(wide), keep) - U64(1)
    return (wide & mask).astype(a.dtype)


def bfi(a: Array, b: Array, pos: Array, length: Array) -> Array:
    """Inserts the low `length` bits of a into b at `pos`."""
    mask = (shl(np.ones(a.shape, U64), np.minimum(length & U32(0xFF), 64)) - U64(1)).astype(a.dtype)
    mask = shl(mask, pos & U32(0xFF))
    return (b & ~mask) | (shl(a, pos & U32(0xFF)) & mask)


def popc(a: Array) -> Array:
    return np.bitwise_count(a).astype(U32)


def bfind(a: Array) -> Array:
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a)
    wide = a.astype(U64)
    out = np.full(a.shape, U32(0xFFFFFFFF))
    for bit in range(a.dtype.itemsize * 8):
        out = np.where((wide >> U64(bit)) & U64(1) != 0, U32(bit), out)
    return out


def clz(a: Array) -> Array:
    top = bfind(a.view(U32) if a.dtype.itemsize == 4 else a.view(U64))
    return (U32(a.dtype.itemsize * 8 - 1) - top).astype(U32)


def brev(a: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1), axis=1)
    return np.ascontiguousarray(np.packbits(bits[:, ::-1], axis=1)[:, ::1]).view(a.dtype).ravel()


def to_int(x: Array, dtype: type, mode: str) -> Array:
    """Float to integer with saturation; NaN gives zero."""
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](
        x.astype(F64)
    )
    info = np.iinfo(dtype)
    clipped = np.clip(
        np.nan_to_num(rounded, nan=0.0, posinf=2.0**70, neginf=-(2.0**70)), info.min, info.max
    )
    return clipped.astype(dtype) if info.bits < 64 else np.array([int(v) for v in clipped], dtype)


def compare(a: Array, b: Array, how: str) -> Array:
    return _COMPARE[how](a, b)


def _unordered(f):
    return lambda a, b: f(a, b) | np.isnan(a) | np.isnan(b)


_COMPARE = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~_nan(a, b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "equ": _unordered(np.equal),
    "neu": np.not_equal,
    "ltu": _unordered(np.less),
    "leu": _unordered(np.less_equal),
    "gtu": _unordered(np.greater),
    "geu": _unordered(np.greater_equal),
    "num": lambda a, b: ~_nan(a, b),
    "nan": lambda a, b: _nan(a, b),
}


def _nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def encode_e2m1(x: Array) -> Array:
    """fp32 to e2m1 codes, to nearest even, saturating (cvt.rn.satfinite)."""
    mag = np.abs(np.nan_to_num(x.astype(F64), nan=6.0, posinf=6.0, neginf=6.0))
    bounds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    # A tie goes to the even code: up from odd codes, stays on even ones.
    code = np.searchsorted(bounds, mag, side="left")
    tie = np.isin(mag, bounds)
    code = code + (tie & (code % 2 == 1))
    return (code | np.where(np.signbit(x) & ~np.isnan(x), 8, 0)).astype(np.uint8)


def encode_e8m0(x: Array, up: bool) -> Array:
    """fp32 to ue8m0, rounding toward positive infinity or zero."""
    bits = np.abs(x).view(U32)
    exponent = (bits >> U32(23)) & U32(0xFF)
    rest = bits & U32(0x7FFFFF)
    # Subnormals: 2^-127 is the smallest code.
    above = np.where(exponent == 0, rest > U32(0x400000), rest != 0)
    out = exponent + (above & up).astype(U32)
    return np.minimum(np.where(np.isnan(x), U32(255), np.minimum(out, 254)), 255).astype(np.uint8)
