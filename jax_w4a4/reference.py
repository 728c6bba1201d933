"""The operator in plain `jax.numpy`: definition, CPU implementation and yardstick of the kernels.

All functions take two-dimensional operands and mark an absent one by a zero size: smooth (0,),
global scales (0,) (present: (1,)), lora_down (K, 0), lora_act (M, 0), lora_up (N, 0),
channel_scale (0,), bias (0,). `grouped_matmul_ref` has a leading group axis on all of them but x.
They trace under `jit` with concrete or symbolic M and hold no constants larger than a scalar, so
they serve as lowering rules.

    xs    = x * (1 / smooth)
    q(v)  = block quantization of v = xs * (1 / act_global_scale)
    acc   = sum over blocks of sx * sw * (qx . qw)
    y     = channel_scale * (alpha * acc) + lora_act @ lora_up^T + bias
    lora_act = (x or xs) @ lora_down, rounded to lora_up's dtype

with alpha = global_scale * act_global_scale. Everything is fp32 with one final cast; the low-rank
branch after Li et al., "SVDQuant" (arXiv 2411.05007).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a4 import formats
from jax_w4a4.formats import Spec

Array = jax.Array


def _dot(a: Array, b: Array, contract_b: int) -> Array:
    """fp32 product of (M, K) with (K, N) (contract_b=0) or (N, K) (contract_b=1)."""
    return lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def quantize_activation_ref(
    x: Array, smooth: Array, act_global_scale: Array, lora_down: Array, spec: Spec
) -> tuple[Array, Array, Array]:
    """Smooths and quantizes x, and takes it through lora_down.

    Args:
      x: (M, K) float32, bfloat16 or float16.
      smooth: (K,) or (0,) float32, divides x.
      act_global_scale: (1,) or (0,) float32, divides the smoothed x before block quantization.
      lora_down: (K, R) float32, bfloat16 or float16; R may be 0.
      spec: static description of the call.

    Returns:
      packed: (M, K_pad/2) uint8.
      scales: (M, K_pad/block) of spec.scale_dtype.
      lora_act: (M, R) of spec.lora_dtype.
    """
    x = formats.to_f32(x)
    xs = x
    if smooth.shape[0]:
        xs = formats.flush(x * formats.reciprocal(smooth)[None, :])
    v = xs
    if act_global_scale.shape[0]:
        v = formats.flush(xs * formats.reciprocal(act_global_scale)[None, :])
    packed, scales = formats.quantize_blocks(v, spec)
    if lora_down.shape[1]:
        xl = xs if spec.lora_smoothed else x
        lora_act = formats.round_to(_dot(xl, formats.to_f32(lora_down), 0), spec.lora_dtype)
    else:
        lora_act = jnp.zeros((x.shape[0], 0), spec.lora_dtype)
    return packed, scales, lora_act


def gemm_ref(
    x_packed: Array,
    x_scales: Array,
    x_global_scale: Array,
    lora_act: Array,
    w_packed: Array,
    w_scales: Array,
    w_global_scale: Array,
    lora_up: Array,
    channel_scale: Array,
    bias: Array,
    spec: Spec,
) -> Array:
    """The product of quantized operands with low-rank branch, channel scale and bias.

    Args:
      x_packed: (M, K_pad/2) uint8.
      x_scales: (M, K_pad/block) of spec.scale_dtype.
      x_global_scale: (1,) or (0,) float32.
      lora_act: (M, R) of spec.lora_dtype.
      w_packed: (N, K_pad/2) uint8, signs in spec.sign_order.
      w_scales: (N, K_pad/block) of spec.scale_dtype.
      w_global_scale: (1,) or (0,) float32.
      lora_up: (N, R) of spec.lora_dtype.
      channel_scale: (N,) or (0,) float32.
      bias: (N,) or (0,) float32.
      spec: static description of the call.

    Returns:
      (M, N) of spec.out_dtype.
    """
    x = formats.dequantize_blocks(
        x_packed, x_scales, spec.format, spec.block_size, unsigned=spec.act_unsigned
    )
    w = formats.dequantize_blocks(
        w_packed, w_scales, spec.format, spec.block_size, sign_order=spec.sign_order
    )
    y = _dot(x, w, 1)
    if x_global_scale.shape[0] and w_global_scale.shape[0]:
        y = y * (x_global_scale * w_global_scale)[None, :]
    elif x_global_scale.shape[0]:
        y = y * x_global_scale[None, :]
    elif w_global_scale.shape[0]:
        y = y * w_global_scale[None, :]
    if channel_scale.shape[0]:
        y = y * channel_scale[None, :]
    if lora_up.shape[1]:
        y = y + _dot(formats.to_f32(lora_act), formats.to_f32(lora_up), 1)
    if bias.shape[0]:
        y = y + bias[None, :]
    return y.astype(spec.out_dtype)


def matmul_ref(
    x: Array,
    smooth: Array,
    x_global_scale: Array,
    lora_down: Array,
    w_packed: Array,
    w_scales: Array,
    w_global_scale: Array,
    lora_up: Array,
    channel_scale: Array,
    bias: Array,
    spec: Spec,
) -> tuple[Array, Array, Array, Array]:
    """`quantize_activation_ref` followed by `gemm_ref`.

    Returns:
      y, and the intermediate x_packed, x_scales, lora_act.
    """
    x_packed, x_scales, lora_act = quantize_activation_ref(
        x, smooth, x_global_scale, lora_down, spec
    )
    y = gemm_ref(
        x_packed,
        x_scales,
        x_global_scale,
        lora_act,
        w_packed,
        w_scales,
        w_global_scale,
        lora_up,
        channel_scale,
        bias,
        spec,
    )
    return y, x_packed, x_scales, lora_act


def grouped_matmul_ref(x: Array, bounds: Array, *weights: Array, spec: Spec) -> Array:
    """`matmul_ref` of the rows [bounds[g], bounds[g + 1]) with the weight of group g.

    Rows are taken a tile at a time, so the work follows the rows and groups that are there.

    Args:
      x: (M, K) float32, bfloat16 or float16.
      bounds: (G + 1,) int32, not decreasing, from 0 to M.
      *weights: operands of `matmul_ref` after x, each with a leading axis G.
      spec: static description of the call.

    Returns:
      (M, N) of spec.out_dtype; rows of no group are zeros.
    """
    m, n, groups = x.shape[0], weights[3].shape[1], bounds.shape[0] - 1
    tile = reference_tile(m, groups)
    sizes = bounds[1:] - bounds[:-1]
    ends = jnp.cumsum((sizes + (tile - 1)) // tile, dtype=jnp.int32)  # in tiles
    # A tile may begin at any row: one more of them behind, never read or stored as such.
    x = jnp.concatenate([x, jnp.zeros((tile, x.shape[1]), x.dtype)])

    y = jnp.zeros((m + tile, n), spec.out_dtype)
    ends, bounds, sizes, x, y, *weights = formats.vary_alike((ends, bounds, sizes, x, y, *weights))

    def one_tile(index: Array, y: Array) -> Array:
        group = jnp.searchsorted(ends, index, side="right")
        before = ends[group] - (sizes[group] + (tile - 1)) // tile
        first = bounds[group] + (index - before) * tile
        rows = lax.dynamic_slice_in_dim(x, first, tile)
        got = matmul_ref(rows, *(w[group] for w in weights), spec)[0]
        inside = jnp.arange(tile, dtype=jnp.int32) < bounds[group + 1] - first
        old = lax.dynamic_slice_in_dim(y, first, tile)
        new = jnp.where(inside[:, None], got, old)
        return lax.dynamic_update_slice_in_dim(y, new, first, 0)

    return lax.fori_loop(0, ends[-1], one_tile, y)[:m]


def reference_tile(m: int, groups: int) -> int:
    """Rows that `grouped_matmul_ref` takes at a time: about those of a group."""
    if not isinstance(m, int):
        return 128  # a symbolic dimension of jax.export
    return min(128, max(8, 1 << max(0, -(-m // max(1, groups)) - 1).bit_length()))
