"""`grouped_matmul`: rows sorted by group, a weight for each group, as in a mixture of experts.

The layers are those of `matmul`: checks, one `jax.jit`, explicit meshes, straight-through
gradients, batching, auto meshes, the primitive. All below the checks take the rows at which groups
begin and end (`bounds`, one more than groups) instead of sizes, so that a device's share of rows or
groups is a matter of cutting them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_w4a4 import sharding
from jax_w4a4.formats import reciprocal, to_f32, vary_alike
from jax_w4a4.matmul import (
    _any,
    _check_x,
    _cotangent,
    _map_batched,
    _out_dtype,
    _precision,
    _requested,
)
from jax_w4a4.primitives import Call, short
from jax_w4a4.weight import Activation, Weight

Array = jax.Array


def grouped_matmul(
    x: Array,
    w: Weight,
    group_sizes: Array,
    *,
    preferred_element_type: Any = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Array:
    """Multiplies each group of rows by the weight of its group; `matmul` says what that computes.

    The first group_sizes[0] rows of x belong to weight 0, the next group_sizes[1] to weight 1 and
    so on, as in `jax.lax.ragged_dot`. Groups may be empty. Rows past the last group give zeros
    (without bias); sizes that reach past M are cut, negative ones count as 0. Smoothing, global
    scales, low-rank branch, channel scale and bias are those of the row's group.

    Works under jit, vmap (as a loop), grad, remat, scan, export and sharding. Gradients are those
    of `matmul`. A sharded N or sharded rows need no communication, a sharded K or sharded groups
    one all-reduce of the result.

    Args:
      x: (M, K) float32, bfloat16 or float16, rows sorted by group.
      w: stacked weight of logical shape (G, N, K): every array has a leading axis G.
        `jax.vmap(jax_w4a4.quantize)` makes one.
      group_sizes: (G,) integers, on the device: other sizes need no new compilation.
      preferred_element_type, precision, implementation: as in `matmul`; the one kernel is
        "sm90_grouped".

    Returns:
      (M, N).

    Raises:
      TypeError: a dtype or type that is not listed above.
      ValueError: shapes that don't fit together, an unknown precision or implementation.
      NotImplementedError: implementation="cuda" where the kernel can't be had.
    """
    who = "grouped_matmul"
    if not isinstance(w, Weight):
        raise TypeError(
            f"jax_w4a4.{who}: w is {type(w).__name__}; expected a stacked jax_w4a4.Weight "
            "(jax.vmap(jax_w4a4.quantize) makes one from a float array (G, N, K))"
        )
    w.validate(who)
    if w.ndim != 3:
        raise ValueError(f"jax_w4a4.{who}: the weight has shape {w.shape}; expected (G, N, K)")
    if isinstance(x, Activation):
        raise TypeError(
            f"jax_w4a4.{who}: x is a quantized Activation; expected an array (M, K), which every "
            "group quantizes with its own smoothing"
        )
    x = _check_x(x, w, who)
    if x.ndim != 2:
        raise ValueError(
            f"jax_w4a4.{who}: x is {short(x)}; expected (M, K) with K={w.k}, rows sorted by group"
        )
    sizes = _check_sizes(group_sizes, w.shape[0], who)
    call = Call(
        _out_dtype(preferred_element_type, x.dtype.name, who),
        *_requested(implementation, who),
        precision=_precision(precision, who),
    )
    return w4a4_grouped_matmul(call, x, sizes, w)


def _check_sizes(group_sizes: Any, groups: int, who: str) -> Array:
    known = isinstance(group_sizes, jax.Array | np.ndarray | np.generic)
    if not known and not hasattr(group_sizes, "__jax_array__"):
        raise TypeError(
            f"jax_w4a4.{who}: group_sizes is {type(group_sizes).__name__}; expected an integer "
            f"array ({groups},)"
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"jax_w4a4.{who}: group_sizes is {short(group_sizes)}; expected integers of shape "
            f"({groups},)"
        )
    if tuple(group_sizes.shape) != (groups,):
        raise ValueError(
            f"jax_w4a4.{who}: group_sizes is {short(group_sizes)} and the weight has {groups} "
            f"groups; expected shape ({groups},)"
        )
    if isinstance(group_sizes, np.ndarray) and group_sizes.dtype.itemsize > 4:
        # Where x64 is off, jnp.asarray would drop the upper bits.
        group_sizes = np.clip(group_sizes, 0, np.iinfo(np.int32).max).astype(np.int32)
    return jnp.asarray(group_sizes)


def group_bounds(group_sizes: Array, m: int) -> Array:
    """(G + 1,) int32 rows at which the groups begin and end; what reaches past M is cut."""
    if jnp.iinfo(group_sizes.dtype).bits < 32:
        group_sizes = group_sizes.astype(jnp.int32)  # may not hold M, to which they are cut
    sizes = jnp.clip(group_sizes, 0, m).astype(jnp.int32)
    if isinstance(m, int) and m * sizes.shape[0] < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes), m)
    else:
        # Cut at every step: all sizes together may leave 32 bits, two of them do not.
        most = jnp.asarray(m).astype(jnp.uint32)
        ends = lax.associative_scan(
            lambda a, b: jnp.minimum(a + b, most), sizes.astype(jnp.uint32)
        ).astype(jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])


@functools.partial(jax.jit, static_argnums=0)
def w4a4_grouped_matmul(call: Call, x: Array, group_sizes: Array, w: Weight) -> Array:
    bounds = group_bounds(sharding.whole(group_sizes), x.shape[0])
    return sharding.grouped_explicit(_straight_through, call, x, bounds, w)


def _straight_through(call: Call, x: Array, bounds: Array, w: Weight) -> Array:
    return _grouped_vjp(call, *vary_alike((x, bounds, w)))


# ------------------------------------------------------------------------------------------------
# Straight-through gradients
# ------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_vjp(call: Call, x: Array, bounds: Array, w: Weight) -> Array:
    return _grouped_vmap(call, x, bounds, w)


def _grouped_fwd(call: Call, x: Array, bounds: Array, w: Weight) -> tuple[Array, Any]:
    return _grouped_vmap(call, x, bounds, w), (x, bounds, w)


class _Groups:
    """Products and sums by group, in fp32, for rows [bounds[g], bounds[g + 1])."""

    def __init__(self, bounds: Array, m: int):
        self.first, self.sizes = bounds[0], bounds[1:] - bounds[:-1]
        rows = jnp.arange(m, dtype=jnp.int32)
        # Rows of no group have the number -1 or G.
        self.number = jnp.searchsorted(bounds, rows, side="right").astype(jnp.int32) - 1
        self.none = (rows < bounds[0]) | (rows >= bounds[-1])

    def take(self, per_group: Array) -> Array:
        """(M, ...) from (G, ...)."""
        return per_group[jnp.clip(self.number, 0, per_group.shape[0] - 1)]

    def sum(self, rows: Array) -> Array:
        """(G, ...) from (M, ...)."""
        groups = self.sizes.shape[0]
        number = jnp.where(self.none, groups, self.number)
        return jax.ops.segment_sum(rows, number, groups + 1)[:groups]

    def dot(self, rows: Array, per_group: Array, dtype: Any = jnp.float32) -> Array:
        """(M, C) times (G, C, D)."""
        # ragged_dot has its first group at row 0.
        lhs = jnp.roll(rows.astype(dtype), -self.first, 0)
        y = lax.ragged_dot(
            lhs, per_group.astype(dtype), self.sizes, preferred_element_type=jnp.float32
        )
        return jnp.where(self.none[:, None], 0.0, jnp.roll(y, self.first, 0))

    def outer(self, a: Array, b: Array) -> Array:
        """(G, C, D), sums of a[m, c] b[m, d] over each group's rows."""
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())),
            lhs_ragged_dimensions=[0],
            rhs_group_dimensions=[],
        )
        a, b = (jnp.roll(v, -self.first, 0) for v in (a, b))
        return lax.ragged_dot_general(a, b, self.sizes, numbers, preferred_element_type=jnp.float32)


def _grouped_bwd(call: Call, residuals: Any, g: Array) -> tuple[Array, None, Weight]:
    x, bounds, w = residuals
    groups = _Groups(bounds, x.shape[0])
    g = jnp.where(groups.none[:, None], 0.0, to_f32(g))
    d: dict[str, Array] = {}
    if w.bias is not None:
        d["bias"] = groups.sum(g)
    if w.channel_scale is not None:
        # y depends on it through alpha * acc, which is the product without the other terms.
        bare = w.replace(lora_down=None, lora_up=None, channel_scale=None, bias=None)
        # In fp32, for which there is no kernel: whoever insists on one means the product itself.
        asked = None if call.implementation == "cuda" else call.implementation
        exact = call.replace(out_dtype="float32", implementation=asked, kernel=None)
        product = _grouped_vmap(exact, x, bounds, bare)
        d["channel_scale"] = groups.sum(g * product)
    return _x_bwd(groups, x, w, g, d), None, _cotangent(w, d)


def _x_bwd(groups: _Groups, x: Array, w: Weight, g: Array, d: dict[str, Array]) -> Array:
    """Cotangent of x; those of lora_up and lora_down go to d."""
    scaled = g if w.channel_scale is None else g * groups.take(w.channel_scale)
    # bf16 operands keep the tensor cores busy and lose nothing that a bf16 gradient would show.
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    d_smoothed = groups.dot(scaled, w.dequantize(), dtype)  # of x / smooth
    d_raw = None  # of x itself
    inverse = None if w.smooth is None else groups.take(reciprocal(w.smooth))
    if w.lora_up is not None and w.lora_down is not None:
        xl = to_f32(x)
        if w.lora_smoothed and inverse is not None:
            xl = xl * inverse
        up, down = to_f32(w.lora_up), to_f32(w.lora_down)
        g_rank = groups.dot(g, up)
        lora_act = groups.dot(xl, down).astype(w.lora_up.dtype)
        d["lora_up"] = groups.outer(g, to_f32(lora_act))
        d["lora_down"] = groups.outer(jnp.where(groups.none[:, None], 0.0, xl), g_rank)
        d_xl = groups.dot(g_rank, down.swapaxes(1, 2))
        if w.lora_smoothed:
            d_smoothed = d_smoothed + d_xl
        else:
            d_raw = d_xl
    dx = d_smoothed if inverse is None else d_smoothed * inverse
    return (dx if d_raw is None else dx + d_raw).astype(x.dtype)


_grouped_vjp.defvjp(_grouped_fwd, _grouped_bwd)


# ------------------------------------------------------------------------------------------------
# vmap
# ------------------------------------------------------------------------------------------------


@custom_vmap
def _grouped_vmap(call: Call, x: Array, bounds: Array, w: Weight) -> Array:
    return sharding.grouped_dispatch(call, x, bounds, w)


@_grouped_vmap.def_vmap
def _grouped_batch(axis_size: int, batched: Any, call: Call, *operands: Any) -> tuple[Array, bool]:
    """One product after the other: each has rows and groups of its own."""
    _, *flags = batched
    f = functools.partial(_grouped_vmap, call)
    assert _any(flags), flags
    return _map_batched(f, operands, tuple(flags)), True
