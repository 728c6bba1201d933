"""An independent model of the operator: numpy only, tables and float64, no shared code.

It states the numerics contract a second time, in the most literal way available, so that a slip in
`jax_w4a4.formats` or in a kernel can't hide in its own mirror image. Scales are rounded by
searching tables of all representable values, codes by searching tables of all code values.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
BLOCKS = {"nvfp4": 16, "mxfp4": 32, "int4": 64}
SCALE_DTYPES = {"nvfp4": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu", "int4": "float16"}
TINY = np.float32(2.0**-126)


def dtype_of(name: str) -> np.dtype:
    """A numpy dtype by name, the ml_dtypes ones included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def flush(x: np.ndarray) -> np.ndarray:
    """fp32 with subnormals replaced by zero of the same sign."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


@functools.cache
def _values_of(dtype: np.dtype) -> np.ndarray:
    """All nonnegative finite values of a one- or two-byte float dtype, ascending by bit pattern."""
    bits = np.uint8 if dtype.itemsize == 1 else np.uint16
    count = 128 if dtype.itemsize == 1 else 32768
    values = np.arange(count, dtype=bits).view(dtype).astype(np.float64)
    return values[np.isfinite(values)]


def _nearest(magnitude: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest table entry, ties to the even index, ends saturating."""
    magnitude = np.minimum(np.asarray(magnitude, np.float64), table[-1])
    upper = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    below, above = magnitude - table[upper - 1], table[upper] - magnitude
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(take_upper, upper, upper - 1)


def round_float(x: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 to a narrower float by table search; finite input within the narrow range."""
    x = flush(x)
    if dtype == "float32":
        return x
    dt = dtype_of(dtype)
    table = _values_of(dt)
    if dtype == "bfloat16":
        table = np.where(table < TINY, 0.0, table)
    index = _nearest(np.abs(x.astype(np.float64)), table)
    rounded = np.copysign(table[index], x)
    return np.where(np.isnan(x), np.nan, rounded).astype(np.float32).astype(dt)


def _block_scale(amax: np.float32, format: str, scale_dtype: str, unsigned: bool, rule: str):
    """Stored scale of one block as (numpy scalar of the scale dtype, fp32 value)."""
    dt = dtype_of(scale_dtype)
    byte_type = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dt.itemsize]
    if np.isnan(amax):
        nan = {"float8_e4m3fn": 0x7F, "float8_e8m0fnu": 0xFF, "float16": 0x7E00}
        nan |= {"bfloat16": 0x7FC0, "float32": 0x7FC00000}
        return byte_type(nan[scale_dtype]), np.float32(np.nan)
    if format == "nvfp4":
        t = min(np.float32(amax * np.float32(1 / 6)), np.float32(448))
        byte = _nearest(np.array(t), _values_of(dt))
        return byte_type(byte), np.float32(_values_of(dt)[byte])
    if format == "mxfp4":
        t = flush(np.float32(amax * np.float32(1 / 6)))
        if t == 0:
            return byte_type(0), np.float32(0)
        if np.isinf(amax):
            return byte_type(252), np.float32(2.0**125)
        if rule == "floor":
            exponent = int(np.floor(np.log2(np.float64(amax)))) - 2
            if np.ldexp(1.0, exponent + 2) > amax:
                exponent -= 1
        else:
            exponent = int(np.round(np.log2(np.float64(t))))
            while np.ldexp(1.0, exponent) < t:
                exponent += 1
            while np.ldexp(1.0, exponent - 1) >= t:
                exponent -= 1
        exponent = min(max(exponent, -126), 125)
        return byte_type(exponent + 127), np.float32(np.ldexp(1.0, exponent))
    # float32 scales have 19 significant bits, so their largest is (2 - 2^-18) * 2^127.
    largest = np.ldexp(2 - 2.0**-18, 127) if scale_dtype == "float32" else ml_dtypes.finfo(dt).max
    largest = float(largest) / (16 if unsigned else 8)
    t = min(np.float32(amax * np.float32(1 / (15 if unsigned else 7))), np.float32(largest))
    if scale_dtype == "float32":
        # 19 significant bits: mantissa in [0.5, 1) times 2^19 is an integer.
        mantissa, exponent = np.frexp(np.float64(flush(t)))
        s = np.float32(np.ldexp(np.rint(np.ldexp(mantissa, 19)), exponent - 19))
    else:
        s = round_float(np.array(t, np.float32), scale_dtype)
    return s.view(byte_type)[()], np.float32(s)


def quantize(
    v: np.ndarray,
    format: str,
    *,
    block_size: int | None = -1,
    scale_dtype: str | None = None,
    unsigned: bool = False,
    rule: str = "rceil",
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (rows, K_pad) uint8 and scale bit patterns (rows, blocks) of a 2-D fp32 array."""
    scale_dtype = scale_dtype or SCALE_DTYPES[format]
    block_size = BLOCKS[format] if block_size == -1 else block_size
    v = flush(v)
    unit = max(32, block_size or 32)
    k_pad = -(-v.shape[1] // unit) * unit
    v = np.pad(v, [(0, 0), (0, k_pad - v.shape[1])])
    block = block_size or k_pad
    codes = np.zeros(v.shape, np.uint8)
    scales = []
    with np.errstate(all="ignore"):
        for row in range(v.shape[0]):
            for start in range(0, k_pad, block):
                b = v[row, start : start + block]
                amax = np.float32(np.max(np.maximum(b, 0) if unsigned else np.abs(b)))
                bits, s = _block_scale(amax, format, scale_dtype, unsigned, rule)
                scales.append(bits)
                if np.isnan(s) or s == 0:
                    continue
                q = np.divide(b, s, dtype=np.float32)
                if format == "int4":
                    low, high = (0, 15) if unsigned else (-8, 7)
                    c = np.clip(np.rint(q), low, high).astype(np.int64) & 0xF
                else:
                    c = _nearest(np.abs(q), E2M1) + np.where(np.signbit(b), 8, 0)
                codes[row, start : start + block] = c
    return codes, np.array(scales).reshape(v.shape[0], -1)


def pack(codes: np.ndarray) -> np.ndarray:
    """(rows, K) codes to (rows, K/2) bytes, even k in the low nibble."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)


def linear(packed: np.ndarray) -> np.ndarray:
    """A prepared weight's bytes in the public order: of every eight codes, those at odd places hold
    the signs of the first four, those at even places the signs of the others."""
    codes = np.stack([packed % 16, packed // 16], axis=-1).reshape(-1, 8)
    signs = np.concatenate([codes[:, 1::2], codes[:, 0::2]], axis=1) & 8
    return pack(codes & 7 | signs).reshape(packed.shape)


def decode(packed: np.ndarray, scales: np.ndarray, format: str, unsigned=False) -> np.ndarray:
    """Packed bytes (rows, K_pad/2) and scales (any float dtype) to float64 values (rows, K_pad)."""
    packed = np.asarray(packed)
    codes = np.stack([packed % 16, packed // 16], axis=-1).reshape(packed.shape[0], -1)
    if format != "int4":
        table = np.concatenate([E2M1, -E2M1])
    else:
        table = np.arange(16.0)
        if not unsigned:
            table[8:] -= 16
    scales = np.asarray(scales)
    s = scales.astype(np.float64)
    if scales.dtype == ml_dtypes.float8_e8m0fnu:
        s = np.where(scales.view(np.uint8) == 0, 0.0, s)
    with np.errstate(all="ignore"):
        return table[codes] * np.repeat(s, codes.shape[1] // scales.shape[1], axis=1)


def rounded_nvfp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 values (rows, K_pad) of nvfp4 rounded to e4m3: `decode` divided by a power of two per
    row, taken to the nearest e4m3 (ties to even), multiplied back.

    The power makes the row's largest scale lie in (28, 56], so that six times it still fits.
    """
    values = decode(packed, scales, "nvfp4")
    largest = np.nanmax(np.abs(np.asarray(scales).astype(np.float64)), axis=1, initial=0)
    # 56 = 1.75 * 32 is the largest scale whose e4m3 byte is at most 0x66.
    power = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 56) / 56)))[:, None]
    with np.errstate(invalid="ignore"):
        table = _values_of(dtype_of("float8_e4m3fn"))
        quotient = values / power
        rounded = np.copysign(table[_nearest(np.abs(np.nan_to_num(quotient)), table)], quotient)
    return np.where(np.isnan(values), np.nan, rounded * power)


def rounded_int4(packed: np.ndarray, scales: np.ndarray, unsigned=False) -> np.ndarray:
    """float64 values (rows, K_pad) of int4 on fp16 operands: scales divided by a power of two per
    row and taken to the nearest fp16, codes times them taken to the nearest fp16, multiplied back.

    The power makes the row's largest scale lie in [2048, 4096).
    """
    s = flush(np.asarray(scales).astype(np.float32)).astype(np.float64)
    largest = np.nanmax(np.abs(s), axis=1, initial=0)
    _, exponent = np.frexp(largest)
    power = np.exp2(np.maximum(exponent - 12.0, -126))[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        small = (s / power).astype(np.float16).astype(np.float64)
        values = decode(packed, small, "int4", unsigned).astype(np.float16).astype(np.float64)
    return values * power


@dataclasses.dataclass
class Operands:
    """What one call holds, in numpy; absent parts are None. Field names as in `Weight`."""

    packed: np.ndarray
    scales: np.ndarray
    format: str
    k: int
    global_scale: np.ndarray | None = None
    act_global_scale: np.ndarray | None = None
    smooth: np.ndarray | None = None
    lora_down: np.ndarray | None = None
    lora_up: np.ndarray | None = None
    channel_scale: np.ndarray | None = None
    bias: np.ndarray | None = None
    block_size: int | None = None
    lora_smoothed: bool = False
    act_unsigned: bool = False
    act_rule: str = "rceil"

    @classmethod
    def of(cls, weight) -> Operands:
        """The arrays of a `jax_w4a4.Weight`."""
        fields = {f.name: getattr(weight, f.name) for f in dataclasses.fields(cls)}
        arrays = {n: np.asarray(v) if hasattr(v, "shape") else v for n, v in fields.items()}
        if weight.sign_order == "sorted":
            arrays["packed"] = linear(arrays["packed"])
        return cls(**arrays)


def smoothed(x: np.ndarray, w: Operands) -> np.ndarray:
    """fp32 x times the fp32 reciprocal of smooth."""
    x = flush(np.asarray(x).astype(np.float32))
    with np.errstate(all="ignore"):
        return x if w.smooth is None else flush(x * flush(np.float32(1) / w.smooth))


def quantize_activation(x: np.ndarray, w: Operands) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """packed bytes, scales (scale dtype), and x @ lora_down in float64, unrounded (or None)."""
    xs = smoothed(x, w)
    v = xs
    with np.errstate(all="ignore"):
        if w.act_global_scale is not None:
            v = flush(xs * flush(np.float32(1) / np.float32(w.act_global_scale)))
    scale_dtype = np.asarray(w.scales).dtype.name
    codes, bits = quantize(
        v,
        w.format,
        block_size=w.block_size,
        scale_dtype=scale_dtype,
        unsigned=w.act_unsigned,
        rule=w.act_rule,
    )
    lora_act = None
    if w.lora_down is not None:
        xl = xs if w.lora_smoothed else flush(np.asarray(x).astype(np.float32))
        lora_act = xl.astype(np.float64) @ w.lora_down.astype(np.float64)
    return pack(codes), bits.view(dtype_of(scale_dtype)), lora_act


def operand_values(
    x_packed: np.ndarray, x_scales: np.ndarray, w: Operands, rounded: bool
) -> tuple[np.ndarray, np.ndarray]:
    """float64 values of both operands of the product; `rounded`: nvfp4 rounded to e4m3, int4 to
    fp16."""
    if rounded and w.format == "int4":
        x = rounded_int4(x_packed, x_scales, w.act_unsigned)
        return x, rounded_int4(w.packed, w.scales)
    if rounded:
        return rounded_nvfp4(x_packed, x_scales), rounded_nvfp4(w.packed, w.scales)
    x = decode(x_packed, x_scales, w.format, w.act_unsigned)
    return x, decode(w.packed, w.scales, w.format)


def gemm_f64(
    x_packed: np.ndarray,
    x_scales: np.ndarray,
    lora_act: np.ndarray | None,
    w: Operands,
    *,
    rounded: bool = False,
) -> np.ndarray:
    """The operator on given quantized operands, in float64, with no rounding at all."""
    x, weight = operand_values(x_packed, x_scales, w, rounded)
    y = x @ weight.T
    for scale in (w.global_scale, w.act_global_scale):
        if scale is not None:
            y = y * np.float64(scale)
    if w.channel_scale is not None:
        y = y * w.channel_scale.astype(np.float64)
    if w.lora_up is not None:
        y = y + np.asarray(lora_act).astype(np.float64) @ w.lora_up.astype(np.float64).T
    if w.bias is not None:
        y = y + w.bias.astype(np.float64)
    return y


def matmul_f64(x: np.ndarray, w: Operands) -> np.ndarray:
    """The whole operator in float64 but for the contract's rounding points, (M, K) to (M, N)."""
    packed, scales, lora_act = quantize_activation(x, w)
    if lora_act is not None:
        lora_act = lora_act.astype(np.float32).astype(w.lora_up.dtype)
    return gemm_f64(packed, scales, lora_act, w)
