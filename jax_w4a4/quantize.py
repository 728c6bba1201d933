"""`quantize`: from a float weight to a four-bit one with a low-rank branch, without data.

The weight is split into a low-rank part kept in 16 bits and a residual rounded to four bits, the
decomposition of SVDQuant (Li et al., arXiv 2411.05007). The low-rank part is refitted a few times
to what the rounded residual leaves over, as in LoftQ (Li et al., arXiv 2310.08659), and the best
round is kept. Smoothing follows SmoothQuant (Xiao et al., arXiv 2211.10438).
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_w4a4 import formats
from jax_w4a4.formats import Spec
from jax_w4a4.matmul import matmul
from jax_w4a4.weight import Weight, check_options, integer

Array = jax.Array

_WHO = "jax_w4a4.quantize"
# Columns of the subspace beyond the rank, and power iterations per round: with these the
# subspace found is as good as the exact singular vectors once a second round starts from it.
_OVERSAMPLE = 16
_POWER_ITERATIONS = 2
# A weight's scale need not follow the activation rule. These multiples of the block maximum are
# tried as well and the scale with the smallest squared error is kept. Multiples above 1 give up
# the coarse top of e2m1 (1.5 maps the maximum to 4 instead of 6); int4's uniform steps gain
# nothing from them. An e8m0 scale moves in factors of two, and its double is finer nowhere.
_CLIPS = {
    "nvfp4": (1.5, 1.4, 1.3, 1.2, 1.1, 0.9, 0.8, 0.7),
    "mxfp4": (0.5,),
    "int4": (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65),
}
# Least importance of an input channel, relative to the root mean square of all: calibration data
# that never used a channel don't prove that it is never used.
_LEAST_IMPORTANCE = 1 / 16
# Divisors whose reciprocal is a normal float32.
_RANGE = "within 2^-126 to 2^126"
_SMOOTH_LIMIT = 2.0**10
_SHIFT = 1e-5
_TINY = 1e-30


def quantize(
    w: Array,
    format: str = "nvfp4",
    *,
    rank: int = 32,
    block_size: int | Literal["default"] | None = "default",
    scale_dtype: Any = None,
    act_amax: Array | None = None,
    smooth: Array | None = None,
    smooth_alpha: float = 0.5,
    bias: Array | None = None,
    channel_scale: Array | None = None,
    iterations: int = 8,
    scale_search: bool = True,
    lora_dtype: Any = jnp.bfloat16,
    act_unsigned: bool = False,
    act_rule: str = "rceil",
    act_global_scale: Any = None,
    two_level: bool | None = None,
    lora_smoothed: bool = False,
) -> Weight:
    """Quantizes a weight to four bits plus a low-rank branch.

    Deterministic, and all on the device of `w`. May be traced: under `jit` and `vmap` (stacked
    weights) everything is checked but the values.

    Args:
      w: (N, K) float32, bfloat16 or float16 (float64 is narrowed first), output channels first as
        in `jax.nn.scaled_matmul`; a Flax kernel is its transpose.
      format: "nvfp4", "mxfp4" or "int4".
      rank: columns R of the low-rank branch, at most min(N, K); 0 for none.
      block_size: values of K per scale; only int4 has a choice: 32, 64 (default), 128, or None
        for one scale per row.
      scale_dtype: dtype of int4 scales: float16 (default), bfloat16 or float32.
      act_amax: (K,) largest |x| per input channel over calibration data. Turns smoothing on:
        smooth = act_amax^smooth_alpha / max|w|^(1 - smooth_alpha), scaled to geometric mean 1;
        and makes errors count in proportion to act_amax of their input channel.
      smooth: (K,) positive, the vector itself instead; x is divided by it, w multiplied.
      smooth_alpha: how much of the activation's range moves into the weight, 0 to 1.
      bias: (N,), stored as float32.
      channel_scale: (N,) nonzero factor of the quantized product, stored as float32; the codes
        then hold the residual divided by it.
      iterations: rounds of low-rank fit and rounding, at least 1; with rank 0 there is one.
      scale_search: choose each block scale among several by squared error; False takes the
        activation's rule (round-to-nearest).
      lora_dtype: bfloat16, float16 or float32.
      act_unsigned: x is nonnegative and quantized to 0..15 (int4 only).
      act_rule: "rceil" or "floor", the scale rule for mxfp4 activations.
      act_global_scale: scalar, divides activations before quantization (nvfp4: keeps block
        scales within e4m3's range; max|x / smooth| / 2688 uses all of it).
      two_level: nvfp4 only: global_scale = max|residual| / 2688, so that no block scale
        underflows. Default True for nvfp4; False leaves global_scale out.
      lora_smoothed: store the low-rank branch for x / smooth instead of x.

    Returns:
      A `Weight`.

    Raises:
      TypeError: a dtype or type is not one of the above.
      ValueError: a shape, format, rank or option is not one of the above, or (outside of a trace)
        an array holds NaN, Inf or values out of range: smooth, |channel_scale| and
        act_global_scale lie within 2^-126 to 2^126; w * smooth / channel_scale is not so small
        that all block scales are zero nor so large that they saturate.
    """
    fmt = formats.get_format(format, "quantize")
    w = _asarray("w", w)
    if not jnp.issubdtype(w.dtype, jnp.floating) or w.dtype.itemsize < 2:
        raise TypeError(f"{_WHO}: w is {_describe(w)}; expected float32, bfloat16 or float16")
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(
            f"{_WHO}: w is {_describe(w)}; expected a nonempty (N, K); use jax.vmap for "
            "stacked weights"
        )
    n, k = w.shape
    rank = integer(
        rank, f"{_WHO}: rank={rank!r}; expected 0 to min(N, K) = {min(n, k)}", 0, min(n, k)
    )
    iterations = integer(
        iterations, f"{_WHO}: iterations={iterations!r}; expected an integer of at least 1", 1
    )
    if not isinstance(smooth_alpha, numbers.Real):
        raise TypeError(f"{_WHO}: smooth_alpha={smooth_alpha!r}; expected a number")
    if not 0.0 <= smooth_alpha <= 1.0:
        raise ValueError(f"{_WHO}: smooth_alpha={smooth_alpha!r}; expected 0 to 1")
    if isinstance(block_size, str) and block_size == "default":
        block_size = fmt.default_block
    check_options(format, block_size, act_unsigned, act_rule, "quantize")
    block_size = block_size and int(block_size)
    for name, flag in (
        ("scale_search", scale_search),
        ("lora_smoothed", lora_smoothed),
        ("two_level", False if two_level is None else two_level),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"{_WHO}: {name}={flag!r}; expected a bool")
    if scale_dtype is None:
        scale_dtype = fmt.scale_dtypes[0]
    scale_dtype = formats.dtype_name(scale_dtype, fmt.scale_dtypes, f"{_WHO}: scale_dtype")
    lora_dtype = formats.dtype_name(lora_dtype, formats.FLOAT_DTYPES, f"{_WHO}: lora_dtype")
    if two_level and format != "nvfp4":
        raise ValueError(f"{_WHO}: two_level=True is for format 'nvfp4'; the format is {format!r}")
    if two_level is None:
        two_level = format == "nvfp4"

    w = w.astype(jnp.float32)
    _check_values("w", w, jnp.isfinite, "finite in float32")
    bias = _vector("bias", bias, n)
    _check_values("bias", bias, jnp.isfinite, "finite in float32")
    channel_scale = _vector("channel_scale", channel_scale, n)
    _check_values("channel_scale", channel_scale, _invertible, f"nonzero and {_RANGE}")
    smooth = _vector("smooth", smooth, k)
    _check_values("smooth", smooth, _positive, f"positive and {_RANGE}")
    act_amax = _vector("act_amax", act_amax, k)
    _check_values("act_amax", act_amax, _nonnegative, "finite in float32 and nonnegative")
    if act_amax is not None:
        if smooth is not None:
            raise ValueError(f"{_WHO}: got both smooth and act_amax; pass one of them")
        smooth = _smooth(w, act_amax, smooth_alpha)
    if act_global_scale is not None:
        act_global_scale = _vector("act_global_scale", act_global_scale, None)
        _check_values("act_global_scale", act_global_scale, _positive, f"positive and {_RANGE}")

    k_pad = formats.padded_k(k, block_size)
    spec = Spec(format, k, k_pad, block_size or k_pad, scale_dtype)
    fields = _decompose(
        w,
        act_amax,
        smooth,
        channel_scale,
        spec,
        rank,
        iterations,
        scale_search,
        two_level,
        lora_dtype,
        lora_smoothed,
    )
    _check_range(w, smooth, channel_scale, fields, spec, two_level)
    return Weight(
        **fields,
        act_global_scale=act_global_scale,
        smooth=smooth,
        channel_scale=channel_scale,
        bias=bias,
        format=format,
        k=k,
        block_size=block_size,
        lora_smoothed=lora_smoothed,
        act_unsigned=act_unsigned,
        act_rule=act_rule,
    )


def quantization_error(w: Array, weight: Weight, x: Array | None = None) -> Array:
    """Relative error of a quantized weight, in the Frobenius norm.

    Args:
      w: (N, K) the float weight.
      weight: its quantized form, (N, K).
      x: (M, K) activations. With them the error is that of the operator's output, activation
        quantization included; without them, that of the matrix `weight.effective()`.

    Returns:
      float32 scalar: norm(approximation - exact) / norm(exact), bias left out of both.
    """
    who = "quantization_error"
    if not isinstance(weight, Weight):
        raise TypeError(
            f"jax_w4a4.{who}: weight is {type(weight).__name__}; expected a jax_w4a4.Weight"
        )
    weight.validate(who)
    w = _asarray("w", w, f"jax_w4a4.{who}")
    if w.ndim != 2 or w.shape != weight.shape:
        raise ValueError(
            f"jax_w4a4.{who}: w is {_describe(w)}; expected the weight's shape {weight.shape}"
        )
    w = w.astype(jnp.float32)
    if x is None:
        return _matrix_error(w, weight)
    x = _asarray("x", x, f"jax_w4a4.{who}")
    if x.ndim != 2 or x.shape[1] != weight.k or x.dtype.name not in formats.FLOAT_DTYPES:
        raise ValueError(
            f"jax_w4a4.{who}: x is {_describe(x)}; expected (M, {weight.k}) float32, bfloat16 "
            "or float16"
        )
    return _output_error(w, weight, x)


# ------------------------------------------------------------------------------------------------
# Arguments
# ------------------------------------------------------------------------------------------------


def _describe(a: Array) -> str:
    return f"{a.dtype.name}[{','.join(str(d) for d in a.shape)}]"


def _asarray(name: str, a: Any, who: str = _WHO) -> Array:
    try:
        if a is None:
            raise TypeError
        with np.errstate(over="ignore"):  # float64 beyond float32: found by its infinities
            return jnp.asarray(a)
    except (TypeError, ValueError):
        raise TypeError(f"{who}: {name} is {type(a).__name__}; expected an array") from None


def _vector(name: str, a: Any, length: int | None) -> Array | None:
    """A float vector of that length (None: a scalar) as float32, None passed through."""
    if a is None:
        return None
    a = _asarray(name, a)
    shape = () if length is None else (length,)
    if a.shape != shape:
        raise ValueError(f"{_WHO}: {name} is {_describe(a)}; expected shape {shape} for this w")
    if not jnp.issubdtype(a.dtype, jnp.floating):
        raise TypeError(f"{_WHO}: {name} is {_describe(a)}; expected a float dtype")
    return a.astype(jnp.float32)


def _check_values(name: str, a: Array | None, ok: Callable[[Array], Array], expected: str) -> None:
    """ValueError if concrete values are not `ok`; traced ones can't be looked at."""
    if a is None or isinstance(a, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():
        bad = int(jnp.sum(~ok(a)))
    if bad:
        raise ValueError(f"{_WHO}: {bad} of {a.size} values of {name} are not {expected}")


def _invertible(a: Array) -> Array:
    return (jnp.abs(a) >= 2.0**-126) & (jnp.abs(a) <= 2.0**126)


def _positive(a: Array) -> Array:
    return _invertible(a) & (a > 0)


def _nonnegative(a: Array) -> Array:
    return jnp.isfinite(a) & (a >= 0)


@jax.jit
def _largest(w: Array, smooth: Array | None, channel_scale: Array | None) -> Array:
    """Largest magnitude of what `_decompose` starts from."""
    if smooth is not None:
        w = w * smooth[None, :]
    if channel_scale is not None:
        w = w * formats.reciprocal(channel_scale)[:, None]
    return jnp.max(jnp.abs(w))


def _check_range(
    w: Array,
    smooth: Array | None,
    channel_scale: Array | None,
    fields: dict[str, Array],
    spec: Spec,
    two_level: bool,
) -> None:
    """ValueError if something overflowed, saturated or was lost; traces can't be looked at."""
    if any(isinstance(a, jax.core.Tracer) for a in (w, smooth, channel_scale, fields["packed"])):
        return
    with jax.ensure_compile_time_eval():
        amax = float(_largest(w, smooth, channel_scale))
        scale = float(jnp.max(formats.decode_scale(fields["scales"])))
        lora = [fields[name] for name in ("lora_up", "lora_down") if name in fields]
        finite = all(bool(jnp.all(jnp.isfinite(formats.to_f32(a)))) for a in lora)
    if amax == float("inf"):
        raise ValueError(
            f"{_WHO}: w * smooth / channel_scale is beyond float32; give smooth and channel_scale "
            "nearer to 1"
        )
    if not finite:
        raise ValueError(
            f"{_WHO}: the low-rank factors are beyond {lora[0].dtype.name}; use another lora_dtype"
        )
    rescale = "multiply w by a power of two and divide the result by it"
    # Below `least` every block is lost, whatever was tried; at `most` scales stop growing.
    least, most, advice = 6 * 2.0**-126, float("inf"), rescale
    if spec.format == "nvfp4":
        if two_level:
            least = 2688 * 2.0**-126
        else:
            least, most, advice = 6 * 2.0**-10, 448.0, "use two_level=True"
    elif spec.format == "int4":
        most = formats.int4_cap(spec.scale_dtype, unsigned=False)
        if spec.scale_dtype == "float16":
            least, advice = 7 * 2.0**-25, "use scale_dtype='bfloat16' or 'float32'"
    if scale >= most:
        raise ValueError(
            f"{_WHO}: w is too large, its maximum is {amax:.3g}: {spec.scale_dtype} block scales "
            f"end at {most:.4g}; {advice}"
        )
    if scale == 0 and 0 < amax <= least:
        raise ValueError(
            f"{_WHO}: w is too small, its maximum is {amax:.3g}: all {spec.scale_dtype} block "
            f"scales are zero; {advice}"
        )


@jax.jit
def _smooth(w: Array, act_amax: Array, alpha: float) -> Array:
    """SmoothQuant's vector; channels that are zero on either side are left alone."""
    w_amax = jnp.max(jnp.abs(w), axis=0)
    used = (act_amax > 0) & (w_amax > 0)
    # In logarithms nothing overflows.
    log_act = jnp.log(jnp.where(used, act_amax, 1.0))
    log_w = jnp.log(jnp.where(used, w_amax, 1.0))
    log_s = alpha * log_act - (1 - alpha) * log_w
    mean = jnp.sum(jnp.where(used, log_s, 0.0)) / jnp.maximum(
        jnp.sum(used.astype(jnp.float32)), 1.0
    )
    s = jnp.clip(jnp.exp(log_s - mean), 1 / _SMOOTH_LIMIT, _SMOOTH_LIMIT)
    return jnp.where(used, s, 1.0)


# ------------------------------------------------------------------------------------------------
# The decomposition
# ------------------------------------------------------------------------------------------------


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@jax.jit
def _matrix_error(w: Array, weight: Weight) -> Array:
    return jnp.linalg.norm(weight.effective() - w) / jnp.linalg.norm(w)


@jax.jit
def _output_error(w: Array, weight: Weight, x: Array) -> Array:
    exact = _matmul(formats.to_f32(x), w.T)
    y = matmul(x, weight.replace(bias=None), preferred_element_type=jnp.float32)
    return jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)


def _orthonormal(y: Array) -> Array:
    """Orthonormal columns that span those of y (M, p), by Cholesky factors of Gram matrices.

    Almost all work is matrix products, and the only factorization is p x p. The shift lets the
    Gram matrix of (nearly) parallel columns be factored, at the price of columns that are a little
    skew; the second pass takes most of the skew out.
    """
    width = y.shape[1]
    # Parallel columns give the Gram matrix an eigenvalue of `width`, and rounding grows with it.
    shift = max(_SHIFT, 4e-7 * width) * jnp.eye(width, dtype=y.dtype)
    for _ in range(2):
        y = y * lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(y), axis=0), _TINY))[None, :]
        factor = jnp.linalg.cholesky(_matmul(y.T, y) + shift)
        y = lax.linalg.triangular_solve(factor, y, left_side=False, lower=True, transpose_a=True)
    return y


def _low_rank(a: Array, basis: Array, rank: int) -> tuple[Array, Array, Array]:
    """Truncated singular value decomposition by subspace iteration (Halko et al., 0909.4061).

    Args:
      a: (N, K).
      basis: (K, p), p >= rank, where to start.
      rank: columns wanted.

    Returns:
      up (N, rank) and down (K, rank) with a ~ up @ down.T, the singular values split evenly
      between them, and the orthonormal basis (K, p) found, strongest direction first.
    """
    for _ in range(_POWER_ITERATIONS):
        basis = _orthonormal(_matmul(a.T, _orthonormal(_matmul(a, basis))))
    basis = _orthonormal(basis)
    image = _matmul(a, basis)
    squares, directions = jnp.linalg.eigh(_matmul(image.T, image))
    squares, directions = squares[::-1], directions[:, ::-1]
    root = jnp.sqrt(jnp.sqrt(jnp.maximum(squares[:rank], _TINY)))[None, :]
    up = _matmul(image, directions[:, :rank] / root)
    basis = _matmul(basis, directions)
    return up, basis[:, :rank] * root, basis


def _round_blocks(
    v: Array, importance: Array, spec: Spec, clips: tuple[float, ...]
) -> tuple[Array, Array, Array]:
    """Rounds (N, K) with the best scale per block: packed, scales, values (N, K).

    `importance` (1, K) multiplies errors; `clips` are the multiples of the block maximum to try.
    """
    v = formats.split_blocks(v, spec)
    importance = formats.split_blocks(importance, spec)
    amax = formats.block_amax(v, unsigned=False)
    unit = formats.reciprocal(jnp.where(amax == 0, 1.0, amax))[..., None]

    def values(codes: Array, scales: Array) -> Array:
        return formats.decode_codes(codes, spec.format) * formats.decode_scale(scales)[..., None]

    def try_clip(best: tuple[Array, Array], clip: Array) -> tuple[tuple[Array, Array], None]:
        scales, least = best
        tried = formats.block_scale(amax * clip, spec, unsigned=False)
        codes = formats.encode_blocks(v, tried, spec, unsigned=False)
        error = jnp.sum(jnp.square((values(codes, tried) - v) * unit * importance), axis=-1)
        worse = error >= least  # False for NaN, which must not be hidden by an older scale
        return (jnp.where(worse, scales, tried), jnp.where(worse, least, error)), None

    start = jnp.zeros(amax.shape, spec.scale_dtype), jnp.full(amax.shape, jnp.inf)
    (scales, _), _ = lax.scan(try_clip, start, jnp.asarray(clips, jnp.float32))
    codes = formats.encode_blocks(v, scales, spec, unsigned=False)
    rounded = values(codes, scales).reshape(v.shape[0], spec.k_pad)[:, : spec.k]
    return formats.join_blocks(codes), scales, rounded


def _importance(act_amax: Array | None, smooth: Array | None, k: int) -> Array:
    """(1, K) what an error in a column of w * smooth is multiplied by, root mean square near 1."""
    if act_amax is None:
        return jnp.ones((1, k), jnp.float32)
    # The maximum first, so that no square overflows.
    a = act_amax * formats.reciprocal(smooth)
    a = a * formats.reciprocal(jnp.maximum(jnp.max(a), _TINY))
    a = a * lax.rsqrt(jnp.maximum(jnp.mean(jnp.square(a)), _TINY))
    return jnp.maximum(a, _LEAST_IMPORTANCE)[None, :]


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8, 9, 10))
def _decompose(
    w: Array,
    act_amax: Array | None,
    smooth: Array | None,
    channel_scale: Array | None,
    spec: Spec,
    rank: int,
    iterations: int,
    scale_search: bool,
    two_level: bool,
    lora_dtype: str,
    lora_smoothed: bool,
) -> dict[str, Array]:
    """packed, scales, global_scale, lora_up and lora_down of a finite float32 (N, K) weight."""
    target = w if smooth is None else w * smooth[None, :]
    row_scale = jnp.float32(1) if channel_scale is None else channel_scale[:, None]
    inverse_row_scale = formats.reciprocal(row_scale)
    importance = _importance(act_amax, smooth, spec.k)
    clips = (1.0, *_CLIPS[spec.format]) if scale_search else (1.0,)

    def rounded(residual: Array) -> tuple[dict[str, Array], Array]:
        v = residual * inverse_row_scale
        fields = {}
        if two_level:
            # A zero residual, or one too small for a normal global scale, is left as it is.
            global_scale = jnp.max(jnp.abs(v)) * (1 / (6 * 448))
            global_scale = jnp.where(global_scale >= 2.0**-126, global_scale, 1.0)
            v = v * formats.reciprocal(global_scale)
            fields["global_scale"] = global_scale
        fields["packed"], fields["scales"], values = _round_blocks(v, importance, spec, clips)
        if two_level:
            values = values * global_scale
        return fields, values * row_scale

    if rank == 0:
        return rounded(target)[0]

    n, k = target.shape
    # Squares below are of numbers near 1, whatever the magnitude of the weight.
    amax = jnp.max(jnp.abs(target))
    amax = jnp.where(amax >= 2.0**-126, amax, 1.0)
    unit = formats.reciprocal(amax)

    def one_round(state):
        best, least, basis, values = state
        up, down, basis = _low_rank((target - values) * unit * importance, basis, rank)
        up, down = up * jnp.sqrt(amax), down * jnp.sqrt(amax) / importance.T
        up = formats.round_to(up, lora_dtype)
        # The residual is taken against the factors as stored, so that it absorbs their rounding.
        if smooth is None or lora_smoothed:
            down = formats.round_to(down, lora_dtype)
            down_smoothed = formats.to_f32(down)
        else:
            down = formats.round_to(down * formats.reciprocal(smooth)[:, None], lora_dtype)
            down_smoothed = formats.to_f32(down) * smooth[:, None]
        residual = target - _matmul(formats.to_f32(up), down_smoothed.T)
        fields, values = rounded(residual)
        fields.update(lora_up=up, lora_down=down)
        error = jnp.sum(jnp.square((residual - values) * unit * importance))
        # Negated so that a NaN (only possible under a trace) reaches the result.
        keep = ~(error >= least)
        best = jax.tree.map(lambda new, old: jnp.where(keep, new, old), fields, best)
        return best, jnp.where(keep, error, least), basis, values

    columns = min(rank + _OVERSAMPLE, n, k)
    basis = jax.random.normal(jax.random.key(0), (k, columns), jnp.float32)
    best = {
        "packed": jnp.zeros((n, spec.k_pad // 2), jnp.uint8),
        "scales": jnp.zeros((n, spec.blocks), spec.scale_dtype),
        "lora_up": jnp.zeros((n, rank), lora_dtype),
        "lora_down": jnp.zeros((k, rank), lora_dtype),
    }
    if two_level:
        best["global_scale"] = jnp.float32(1)
    state = (best, jnp.float32(jnp.inf), basis, jnp.zeros_like(target))
    return lax.fori_loop(0, iterations, lambda _, state: one_round(state), state)[0]
