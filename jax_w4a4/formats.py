"""Four-bit formats: codes, block scales, packing.

Every rounding here is done on fp32 bit patterns with integer arithmetic, comparisons against exact
products, or multiplication by a power of two, never by a cast to a narrow type. Casts are avoided
because a compiler may drop a round trip through a narrow type (excess precision), because casts to
float8_e4m3fn do not saturate, because casts to float8_e8m0fnu round to nearest, and because
casts of NaN to four bits differ between libraries. Results are therefore the same bits under
eager execution and `jit`, and on every backend.

fp32 subnormals count as (signed) zero on input and are never produced: backends disagree about
them (XLA's CPU backend flushes, its GPU backend does not), so the format functions flush
explicitly. `docs/numerics.md` is the written contract.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

_ABS_MASK = np.uint32(0x7FFF_FFFF)
_SIGN_MASK = np.uint32(0x8000_0000)
_INF_BITS = np.uint32(0x7F80_0000)
_NAN_BITS = np.uint32(0x7FC0_0000)
_MIN_NORMAL_BITS = np.uint32(0x0080_0000)

# Upper-magnitude neighbours of e2m1 meet at these points; a tie goes to the even code, so code i
# is left for code i + 1 at the threshold itself when i is odd and only above it when i is even.
_E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@dataclasses.dataclass(frozen=True)
class Format:
    """Static facts about one format.

    Attributes:
      name: public name.
      default_block: values of K that share one block scale, unless the caller chooses.
      blocks: block sizes that exist (None is the whole row).
      scale_dtypes: dtype names a block scale may have, the default first.
      dtype: JAX dtype of the logical four-bit values.
    """

    name: str
    default_block: int
    blocks: tuple[int | None, ...]
    scale_dtypes: tuple[str, ...]
    dtype: str


FORMATS: dict[str, Format] = {
    "nvfp4": Format("nvfp4", 16, (16,), ("float8_e4m3fn",), "float4_e2m1fn"),
    "mxfp4": Format("mxfp4", 32, (32,), ("float8_e8m0fnu",), "float4_e2m1fn"),
    "int4": Format("int4", 64, (32, 64, 128, None), ("float16", "bfloat16", "float32"), "int4"),
}

ACT_RULES = ("rceil", "floor")
SIGN_ORDERS = ("linear", "sorted")
PRECISIONS = (None, "fastest", "highest")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def get_format(name: str, who: str) -> Format:
    """Looks a format up; ValueError naming `who` and the known formats if there is none."""
    fmt = FORMATS.get(name) if isinstance(name, str) else None
    if fmt is None:
        known = ", ".join(repr(f) for f in FORMATS)
        raise ValueError(f"jax_w4a4.{who}: unknown format {name!r}; expected one of {known}")
    return fmt


def dtype_name(given: Any, allowed: tuple[str, ...], what: str) -> str:
    """Name of a dtype; TypeError beginning with `what` unless it is one of `allowed`."""
    try:
        name = jnp.dtype(given).name
    except TypeError:
        name = repr(given)
    if name not in allowed:
        raise TypeError(f"{what} is {name}; expected {' or '.join(allowed)}")
    return name


def check_block_size(fmt: Format, block_size: int | None, who: str) -> None:
    """ValueError unless `block_size` exists for the format."""
    if block_size not in fmt.blocks or isinstance(block_size, bool):
        known = " or ".join(f"{b} (whole row)" if b is None else str(b) for b in fmt.blocks)
        raise ValueError(
            f"jax_w4a4.{who}: block_size={block_size!r} does not exist for format "
            f"{fmt.name!r}; expected {known}"
        )


def padded_k(k: int, block_size: int | None) -> int:
    """K as stored: rounded up to whole blocks and to 32 values (16 bytes)."""
    unit = 32 if block_size is None else max(32, block_size)
    return -(-k // unit) * unit


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static description of one operator call. Hashable, holds no arrays.

    Attributes:
      format: "nvfp4", "mxfp4" or "int4".
      k: logical K.
      k_pad: stored K (`padded_k`).
      block_size: values per block scale; a whole-row scale has block_size == k_pad.
      scale_dtype: dtype name of the block scales of the weight and of the activation.
      act_unsigned: int4 activations are 0..15 instead of -8..7.
      act_rule: "rceil" or "floor", the mxfp4 activation scale rule.
      lora_smoothed: the low-rank branch reads x/smooth instead of x.
      lora_dtype: dtype name of lora_up, to which x @ lora_down is rounded.
      out_dtype: dtype name of the result.
      precision: None, "fastest" or "highest"; see `matmul`. What it permits is up to the kernel.
      sign_order: "linear" or "sorted", where the weight keeps the signs of its codes
        (`sort_signs`); activations are linear.
    """

    format: str
    k: int
    k_pad: int
    block_size: int
    scale_dtype: str
    act_unsigned: bool = False
    act_rule: str = "rceil"
    lora_smoothed: bool = False
    lora_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    precision: str | None = None
    sign_order: str = "linear"

    @property
    def blocks(self) -> int:
        """Block scales per row."""
        return self.k_pad // self.block_size

    def replace(self, **changes: Any) -> Spec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def ffi_attrs(self) -> dict[str, int]:
        """The attributes of the FFI call; dtypes are read off the buffers there."""
        return {
            "format": list(FORMATS).index(self.format),
            "k": self.k,
            "k_pad": self.k_pad,
            "block_size": self.block_size,
            "act_unsigned": int(self.act_unsigned),
            "act_rule": ACT_RULES.index(self.act_rule),
            "lora_smoothed": int(self.lora_smoothed),
        }


# ------------------------------------------------------------------------------------------------
# Bits
# ------------------------------------------------------------------------------------------------


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def flush(x: Array) -> Array:
    """fp32 with subnormals replaced by zero of the same sign."""
    bits = _bits(x)
    tiny = (bits & _ABS_MASK) < _MIN_NORMAL_BITS
    return _from_bits(jnp.where(tiny, bits & _SIGN_MASK, bits))


def to_f32(x: Array) -> Array:
    """Widens a float array to fp32, exactly, subnormal fp32 values flushed.

    bfloat16 is widened on its bits, so that a preceding rounding to bfloat16 in the same program
    can't be optimized away.
    """
    if x.dtype == jnp.bfloat16:
        x = _from_bits(lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16)
    elif x.dtype != jnp.float32:
        x = x.astype(jnp.float32)
    return flush(x)


def reciprocal(x: Array) -> Array:
    """1/x for fp32, rounded once; subnormal input and output count as zero."""
    return flush(1.0 / flush(x))


def _round_magnitude(bits: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """Rounds nonnegative finite fp32 (as bits) to a narrower float, to nearest, ties to even.

    Returns the narrow type's bit pattern as uint32. Overflow carries into the exponent as the
    narrow encoding would; callers clamp.
    """
    shift = 23 - mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    half_minus_one = (1 << (shift - 1)) - 1
    normal = (bits + half_minus_one + ((bits >> shift) & 1)) >> shift
    normal = normal - ((127 - bias) << mantissa_bits)
    if exponent_bits == 8:
        return jnp.where(bits < _MIN_NORMAL_BITS, jnp.uint32(0), normal)
    # Below the narrow type's smallest normal the spacing is constant: round in units of it.
    value = _from_bits(bits)
    subnormal = jnp.round(value * 2.0 ** (bias + mantissa_bits - 1)).astype(jnp.uint32)
    return jnp.where(value < 2.0 ** (1 - bias), subnormal, normal)


def round_to(x: Array, dtype: str) -> Array:
    """fp32 to float32, bfloat16 or float16: to nearest, ties to even, fp32 subnormals to zero.

    Overflow gives infinity and NaN stays NaN, as a cast would do, but the rounding can't be
    dropped by the compiler when the result is widened again.
    """
    dt = jnp.dtype(dtype)
    x = flush(x)
    if dt == jnp.float32:
        return x
    exponent_bits, mantissa_bits = {"bfloat16": (8, 7), "float16": (5, 10)}[dt.name]
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    bits = _bits(x)
    magnitude = bits & _ABS_MASK
    rounded = jnp.minimum(_round_magnitude(magnitude, exponent_bits, mantissa_bits), infinity)
    rounded = jnp.where(magnitude > _INF_BITS, infinity | (1 << (mantissa_bits - 1)), rounded)
    rounded = rounded | ((bits & _SIGN_MASK) >> 16)
    return lax.bitcast_convert_type(rounded.astype(jnp.uint16), dt)


# ------------------------------------------------------------------------------------------------
# Codes
# ------------------------------------------------------------------------------------------------


def pack(codes: Array) -> Array:
    """(..., K) uint8 codes below 16, K even, to (..., K/2) bytes, even k in the low nibble."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: Array) -> Array:
    """(..., K/2) bytes to (..., K) uint8 codes; inverse of `pack`."""
    pairs = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


# Where `sort_signs` moves the sign of nibble j of a 32-bit word, and by how many bits. Those of
# nibbles 0..3 then are the top bits of bytes 0..3, where byte permutes by the magnitudes leave
# their results, and those of nibbles 4..7 are four bits below.
_SIGN_MOVES = tuple(
    (4 * j + 3, 8 * j + 7) if j < 4 else (4 * j + 3, 8 * (j - 4) + 3) for j in range(8)
)


def scale_range(scales: Array) -> Array:
    """(..., N, 2) uint8: the largest and the least byte of each row of mxfp4 block scales.

    Args:
      scales: (..., N, K_pad/32) float8_e8m0fnu.
    """
    raw = lax.bitcast_convert_type(scales, jnp.uint8)
    return jnp.stack([jnp.max(raw, axis=-1), jnp.min(raw, axis=-1)], axis=-1)


def sort_signs(packed: Array) -> Array:
    """(..., bytes) of e2m1 codes with the signs of every eight of them permuted; see `_SIGN_MOVES`.

    The bytes are a multiple of four per row, as in every `Weight`; magnitudes stay where they are.
    """
    return _move_signs(packed, _SIGN_MOVES)


def unsort_signs(packed: Array) -> Array:
    """Inverse of `sort_signs`."""
    return _move_signs(packed, tuple((to, at) for at, to in _SIGN_MOVES))


@functools.partial(jax.jit, static_argnums=1)
def _move_signs(packed: Array, moves: tuple[tuple[int, int], ...]) -> Array:
    # Shifts, as a bitcast between widths can't be exported with a symbolic dimension.
    parts = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 4).astype(jnp.uint32)
    words = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24
    out = words & np.uint32(0x7777_7777)
    for at, to in moves:
        bit = words & np.uint32(1 << at)
        out = out | (bit << (to - at) if to > at else bit >> (at - to))
    split = jnp.stack([(out >> 8 * i).astype(jnp.uint8) for i in range(4)], axis=-1)
    return split.reshape(packed.shape)


def linear_codes(packed: Array, sign_order: str) -> Array:
    """Packed codes of either sign order in the public layout, even k in the low nibble."""
    return unsort_signs(packed) if sign_order == "sorted" else packed


def decode_e2m1(codes: Array) -> Array:
    """uint8 e2m1 codes 0..15 to fp32; code 8 is -0."""
    codes = codes.astype(jnp.uint32)
    magnitude = codes & 7
    # From magnitude 2 on the code is exponent and mantissa of a float whose bias is 1.
    bits = jnp.where(magnitude >= 2, (magnitude << 22) + (126 << 23), magnitude * 0x3F00_0000)
    return _from_bits(bits | ((codes & 8) << 28))


def decode_int4(codes: Array, unsigned: bool = False) -> Array:
    """uint8 nibbles 0..15 to fp32, as two's complement unless `unsigned`."""
    value = codes.astype(jnp.int32)
    if not unsigned:
        value = (value ^ 8) - 8
    return value.astype(jnp.float32)


def _count_thresholds(magnitude: Array, scale: Array | float, thresholds: tuple) -> Array:
    """How many thresholds * scale lie below `magnitude`; ties go to the even count.

    thresholds * scale must be exact in fp32: then the count equals rounding the fp32 quotient
    magnitude / scale, which lies on a threshold only if magnitude is that very product. The
    quotient itself is no option: XLA turns division by a broadcast into multiplication by a
    rounded reciprocal.
    """
    count = jnp.zeros(magnitude.shape, jnp.uint8)
    for i, threshold in enumerate(thresholds):
        above = magnitude >= threshold * scale if i % 2 else magnitude > threshold * scale
        count = count + above.astype(jnp.uint8)
    return count


def encode_e2m1(v: Array, scale: Array | float = 1.0) -> Array:
    """fp32 v / scale to uint8 e2m1 codes: nearest, ties to even, saturating at 6.

    scale has at most 21 significant bits. The sign bit is kept for values that round to zero, as
    the hardware conversion keeps it; NaN gives code 0 or 8.
    """
    bits = _bits(v)
    magnitude = _count_thresholds(_from_bits(bits & _ABS_MASK), scale, _E2M1_THRESHOLDS)
    return magnitude | ((bits >> 28) & 8).astype(jnp.uint8)


def _encode_int4(v: Array, scale: Array, unsigned: bool) -> Array:
    bits = _bits(v)
    thresholds = tuple(i + 0.5 for i in range(15 if unsigned else 8))
    count = _count_thresholds(_from_bits(bits & _ABS_MASK), scale, thresholds)
    if unsigned:
        return jnp.where(bits >> 31 == 1, jnp.uint8(0), count)
    return jnp.where(bits >> 31 == 1, -count, jnp.minimum(count, 7)) & 0xF


# ------------------------------------------------------------------------------------------------
# Block scales
# ------------------------------------------------------------------------------------------------


def decode_scale(scales: Array) -> Array:
    """Block scales of any scale dtype to fp32. e8m0 byte 0 (2^-127, subnormal) reads as zero."""
    if scales.dtype == jnp.float8_e8m0fnu:
        byte = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
        return _from_bits(jnp.where(byte == 255, _NAN_BITS, byte << 23))
    return to_f32(scales)


def _encode_e4m3(s: Array) -> Array:
    """fp32 in [0, 448] or NaN to e4m3 bytes, to nearest, ties to even."""
    bits = _bits(s)
    byte = _round_magnitude(bits, 4, 3)
    return jnp.where(bits > _INF_BITS, jnp.uint32(0x7F), byte).astype(jnp.uint8)


def encode_scale(s: Array, format: str) -> Array:
    """Nonnegative fp32 to the format's narrow scale: e4m3 to nearest (at most 448), e8m0 by its
    exponent (the mantissa is dropped)."""
    if format == "nvfp4":
        byte = _encode_e4m3(jnp.minimum(flush(s), 448.0))
    else:
        byte = (_bits(flush(s)) >> 23).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, jnp.dtype(FORMATS[format].scale_dtypes[0]))


def int4_cap(scale_dtype: str, unsigned: bool) -> float:
    """Largest int4 block scale: over a power of two above the largest code magnitude, so that
    code * scale stays finite."""
    wide = scale_dtype == "float32"
    largest = (2 - 2.0**-18) * 2.0**127 if wide else float(jnp.finfo(scale_dtype).max)
    return largest / (16 if unsigned else 8)


def block_scale(amax: Array, spec: Spec, unsigned: bool) -> Array:
    """Block maximum (fp32; NaN and Inf allowed) to the stored scale (scale dtype)."""
    nan = _bits(amax) > _INF_BITS
    if spec.format == "nvfp4":
        s = jnp.minimum(amax * (1.0 / 6.0), 448.0)
        byte = _encode_e4m3(jnp.where(nan, 0.0, s))
        byte = jnp.where(nan, jnp.uint8(0x7F), byte)
        return lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)
    if spec.format == "mxfp4":
        t = _bits(flush(amax * (1.0 / 6.0)))
        if spec.act_rule == "floor":
            byte = (_bits(amax) >> 23).astype(jnp.int32) - 2
        else:
            byte = ((t >> 23) + ((t & 0x7F_FFFF) != 0).astype(jnp.uint32)).astype(jnp.int32)
        byte = jnp.clip(byte, 1, 252)
        byte = jnp.where(t == 0, 0, byte)
        byte = jnp.where(nan, 255, byte).astype(jnp.uint8)
        return lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu)
    # A float32 scale gives up five bits to keep thresholds * scale exact.
    wide = spec.scale_dtype == "float32"
    s = jnp.minimum(amax * (1 / 15 if unsigned else 1 / 7), int4_cap(spec.scale_dtype, unsigned))
    if wide:
        s = _from_bits(_round_magnitude(_bits(s), 8, 18) << 5)
    return round_to(jnp.where(nan, jnp.nan, s), spec.scale_dtype)


def split_blocks(v: Array, spec: Spec) -> Array:
    """fp32 (..., K) to (..., blocks, block_size): flushed, padded with zeros to spec.k_pad."""
    v = flush(v)
    pad = spec.k_pad - v.shape[-1]
    if pad:
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, pad)])
    return v.reshape(*v.shape[:-1], spec.blocks, spec.block_size)


def block_amax(v: Array, unsigned: bool) -> Array:
    """Largest magnitude over the last axis (`unsigned`: largest value, at least 0); NaN wins."""
    # Integer order of magnitudes is float order with every NaN on top.
    bits = _bits(v)
    magnitude = bits & _ABS_MASK
    if unsigned:
        counts = (bits < _SIGN_MASK) | (magnitude > _INF_BITS)
        magnitude = jnp.where(counts, magnitude, jnp.uint32(0))
    return _from_bits(jnp.max(magnitude, axis=-1))


def encode_blocks(v: Array, scales: Array, spec: Spec, unsigned: bool) -> Array:
    """Codes (uint8, shape of v) of `split_blocks` values under given scales (..., blocks).

    Every code of a block whose scale is zero or NaN is zero.
    """
    s = decode_scale(scales)[..., None]
    if spec.format == "nvfp4":
        codes = encode_e2m1(v, s)
    elif spec.format == "mxfp4":
        # 2^-e from the byte: exponents -126..125 mirror into 126..-125, all normal.
        codes = encode_e2m1(v * _from_bits((254 << 23) - _bits(s)))
    else:
        codes = _encode_int4(v, s, unsigned)
    return jnp.where(s > 0, codes, jnp.uint8(0))


def decode_codes(codes: Array, format: str, unsigned: bool = False) -> Array:
    """uint8 codes to fp32, exactly."""
    return decode_int4(codes, unsigned) if format == "int4" else decode_e2m1(codes)


def join_blocks(codes: Array) -> Array:
    """Codes (..., blocks, block_size) to packed bytes (..., K_pad/2)."""
    return pack(codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1]))


def quantize_blocks(v: Array, spec: Spec) -> tuple[Array, Array]:
    """Quantizes rows of fp32 activations block by block.

    Args:
      v: fp32 (..., K), K == spec.k; padded here with zeros to spec.k_pad.
      spec: format, block size, scale dtype, scale rule, signedness.

    Returns:
      packed: uint8 (..., K_pad/2).
      scales: (..., K_pad/block) of spec.scale_dtype.

    A block whose scale is zero has only zero codes. A block that holds a NaN has a NaN scale and
    zero codes. An infinity saturates: the largest scale and the largest code.
    """
    v = split_blocks(v, spec)
    scales = block_scale(block_amax(v, spec.act_unsigned), spec, spec.act_unsigned)
    return join_blocks(encode_blocks(v, scales, spec, spec.act_unsigned)), scales


def dequantize_blocks(
    packed: Array,
    scales: Array,
    format: str,
    block_size: int,
    *,
    unsigned: bool = False,
    sign_order: str = "linear",
) -> Array:
    """Codes times block scales as fp32 (..., K_pad), both exact, their product rounded once.

    Args:
      packed: uint8 (..., K_pad/2).
      scales: (..., K_pad/block_size), any scale dtype of the format.
      format: "nvfp4", "mxfp4" or "int4".
      block_size: values per scale (K_pad for a whole-row scale).
      unsigned: int4 codes are 0..15.
      sign_order: of the codes.
    """
    values = decode_codes(unpack(linear_codes(packed, sign_order)), format, unsigned)
    # Scales are spread, not values cut: an explicit mesh may shard K in the middle of a block.
    spread = jnp.broadcast_to(decode_scale(scales)[..., None], (*scales.shape, block_size))
    return values * spread.reshape(values.shape)


def vary_alike(tree: Any) -> Any:
    """Inside a shard_map: marks every array as varying over the axes that any of them varies over.

    JAX then sums the gradients of replicated operands over those axes.
    """
    varying = [jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)]
    axes = frozenset().union(*varying)
    if all(v == axes for v in varying):
        return tree

    def mark(leaf: Array) -> Array:
        missing = axes - jax.typeof(leaf).manual_axis_type.varying
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(mark, tree)
