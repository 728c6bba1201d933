"""`matmul` and `quantize_activation`: the public operator with its transformations.

Layers, outermost first: argument checks; one `jax.jit`, so that eager calls compile once per shape
and equal layers share one trace; `shard_map` where the mesh has explicit axes; `custom_vjp`
(straight-through gradients); `custom_vmap` (an unbatched weight folds the batch into M); the
partitioner's hook where mesh axes are auto; the primitives, planned for the shapes of one device.
`custom_vmap` can't be outside `custom_vjp` (no reverse mode), and neither can be inside the
partitioner's hook, which has no batching and no derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from jax_w4a4 import plan, sharding
from jax_w4a4.formats import FLOAT_DTYPES, PRECISIONS, dtype_name, reciprocal, to_f32, vary_alike
from jax_w4a4.primitives import (
    IMPLEMENTATIONS,
    KERNELS,
    Call,
    QuantizeCall,
    has_grouped_plan,
    short,
    warn_once,
)
from jax_w4a4.weight import Activation, Weight

Array = jax.Array


# ------------------------------------------------------------------------------------------------
# Public functions
# ------------------------------------------------------------------------------------------------


def matmul(
    x: Array | Activation,
    w: Weight,
    *,
    preferred_element_type: Any = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Array:
    """Multiplies a float activation by a four-bit weight, in four bits by four bits.

    y = channel_scale * (alpha * (q(x / smooth) . codes)) + (x @ lora_down) @ lora_up^T + bias,
    where q is the weight's format applied block by block along K and alpha the product of the
    global scales. Sums are fp32, cast once to the result's dtype. `docs/numerics.md` has every
    rounding; the low-rank branch is that of Li et al., "SVDQuant" (arXiv 2411.05007).

    Works under jit, vmap, grad, remat, scan, export and sharding. `jax.linearize` gives a function
    that can be transposed but not applied. Reverse mode is straight-through: the activation
    quantizer counts as the identity, so the gradient with respect to x goes through
    `w.effective()`. lora_up, lora_down, channel_scale and bias get gradients in their own dtypes;
    codes, block scales, global scales and smooth get zeros. There is no forward mode and no second
    derivative.

    Sharded leading dimensions of x and a sharded N need no communication, a sharded K one
    all-reduce. K is split only at multiples of max(32, block size); otherwise it is replicated,
    with a `FallbackWarning`. Under `jax.set_mesh` with auto axes, operands that were never placed
    are whole on every device, unless a sharding constraint says otherwise.

    Args:
      x: (..., K) float32, bfloat16 or float16; or the result of `quantize_activation`.
      w: weight of logical shape (N, K).
      preferred_element_type: dtype of the result, float32, bfloat16 or float16; default: of x.
      precision: what the product of the codes may or must be, as a permission to kernels; the
        reference ignores it. None: nvfp4 as exact as fp32 sums, int4 with each code times its block
        scale rounded to fp16, mxfp4 with sums as the FP8 tensor core makes them (about 13 bits per
        step). "fastest": nvfp4 may round each value times its block scale to e4m3, for FP8 speed.
        "highest": int4's products are exact, mxfp4 moves its sums to fp32 registers every 1024 of
        K. `docs/numerics.md` has the errors.
      implementation: "cuda" is the CUDA kernel or an error, "xla" the `jnp` reference on every
        platform. None is the kernel where there is one for platform, build and shape, otherwise
        the reference, with a `FallbackWarning` once per reason on a CUDA machine. A kernel's name
        ("sm90_v1", "sm90_v2", "sm90_decode", "sm100_v1", "sm100_v2") is that kernel or an error,
        for comparisons.

    Returns:
      (..., N).

    Raises:
      TypeError: a dtype or type that is not listed above.
      ValueError: shapes that don't fit together, x without dimensions, an activation quantized
        for another format, an unknown precision or implementation.
      NotImplementedError: implementation="cuda" where the kernel can't be had.
    """
    _check_weight(w, "matmul")
    if isinstance(x, Activation):
        _check_activation(x, w)
        default = x.dtype
    else:
        x = _check_x(x, w, "matmul")
        default = x.dtype.name
    out_dtype = _out_dtype(preferred_element_type, default, "matmul")
    requested = _requested(implementation, "matmul")
    call = Call(out_dtype, *requested, precision=_precision(precision, "matmul"))
    return w4a4_matmul(call, x, w)


def quantize_activation(x: Array, w: Weight, *, implementation: str | None = None) -> Activation:
    """Quantizes x as `matmul(x, w)` does, to share it between several weights.

    The result depends on x and on w's format, block size, smooth, act_global_scale and lora_down;
    weights that share these (the projections to queries, keys and values, say) can share it.

    Differentiable with respect to lora_down only. The codes have no gradient, so a gradient with
    respect to x would be wrong and is refused; `matmul(x, w)` has it.

    Args:
      x: (..., K) float32, bfloat16 or float16.
      w: weight of logical shape (N, K).
      implementation: as in `matmul`.

    Returns:
      An `Activation`, to be passed to `matmul` in place of x.

    Raises:
      TypeError, ValueError: as `matmul`.
      NotImplementedError: implementation="cuda" where the kernel can't be had, or differentiation
        with respect to x.
    """
    _check_weight(w, "quantize_activation")
    x = _check_x(x, w, "quantize_activation")
    dtype = x.dtype.name
    requested = _requested(implementation, "quantize_activation")
    packed, scales, lora_act = w4a4_quantize(
        # Weights whose codes differ in sign_order alone share an activation.
        QuantizeCall(w.spec(dtype).replace(sign_order="linear"), *requested),
        x,
        w.smooth,
        w.act_global_scale,
        w.lora_down,
    )
    return Activation(
        packed,
        scales,
        w.act_global_scale,
        lora_act,
        format=w.format,
        k=w.k,
        block_size=w.block_size,
        unsigned=w.act_unsigned,
        dtype=dtype,
    )


# ------------------------------------------------------------------------------------------------
# Checks
# ------------------------------------------------------------------------------------------------


def _check_weight(w: Any, who: str) -> None:
    if not isinstance(w, Weight):
        raise TypeError(
            f"jax_w4a4.{who}: w is {type(w).__name__}; expected a jax_w4a4.Weight "
            "(jax_w4a4.quantize makes one from a float array)"
        )
    w.validate(who)
    if w.ndim != 2:
        raise ValueError(
            f"jax_w4a4.{who}: the weight is stacked, its shape is {w.shape}; expected (N, K): "
            "use jax.vmap or jax.lax.scan, or index it with jax.tree.map"
        )


def _check_x(x: Any, w: Weight, who: str) -> Array:
    if not isinstance(x, jax.Array | np.ndarray | np.generic) and not hasattr(x, "__jax_array__"):
        raise TypeError(f"jax_w4a4.{who}: x is {type(x).__name__}; expected an array")
    # Before jnp.asarray, which narrows float64 silently where x64 is off.
    name = jnp.dtype(x.dtype).name if jnp.issubdtype(x.dtype, jnp.number) else str(x.dtype)
    if name not in FLOAT_DTYPES:
        advice = "; cast it with x.astype(jnp.float32)" if name == "float64" else ""
        raise TypeError(
            f"jax_w4a4.{who}: x has dtype {name}; expected {' or '.join(FLOAT_DTYPES)}{advice}"
        )
    if len(x.shape) == 0:
        raise ValueError(f"jax_w4a4.{who}: x is {short(x)}; expected (..., K) with K={w.k}")
    if x.shape[-1] != w.k:
        raise ValueError(
            f"jax_w4a4.{who}: x is {short(x)} and the weight has shape {w.shape}; expected the "
            f"last dimension of x to be K={w.k}"
        )
    return jnp.asarray(x)


def _check_activation(x: Activation, w: Weight) -> None:
    x.validate("matmul")
    for name, got, wanted in (
        ("format", x.format, w.format),
        ("k", x.k, w.k),
        ("block_size", x.block_size, w.block_size),
        ("unsigned", x.unsigned, w.act_unsigned),
        ("dtype of the block scales", jnp.dtype(x.scales.dtype).name, w.scales.dtype.name),
    ):
        if got != wanted:
            raise ValueError(
                f"jax_w4a4.matmul: the activation was quantized with {name} {got!r} and the "
                f"weight has {wanted!r}; quantize_activation(x, w) makes one that fits"
            )
    lora_act, lora_up = x.lora_act, w.lora_up
    have = None if lora_act is None else (jnp.dtype(lora_act.dtype).name, lora_act.shape[-1])
    need = None if lora_up is None else (jnp.dtype(lora_up.dtype).name, lora_up.shape[-1])
    if have != need:
        raise ValueError(
            f"jax_w4a4.matmul: the activation's lora_act has (dtype, rank) {have} and the weight's "
            f"lora_up {need}; quantize_activation(x, w) makes one that fits"
        )


def _out_dtype(preferred: Any, default: str, who: str) -> str:
    if preferred is None:
        return default
    return dtype_name(preferred, FLOAT_DTYPES, f"jax_w4a4.{who}: preferred_element_type")


def _precision(precision: Any, who: str) -> str | None:
    if not (precision is None or (isinstance(precision, str) and precision in PRECISIONS)):
        raise ValueError(
            f"jax_w4a4.{who}: precision={precision!r}; expected None, 'fastest' or 'highest'"
        )
    return precision


def _requested(
    implementation: str | None, who: str
) -> tuple[str | None, plan.Target | None, str | None]:
    """(implementation, what to plan for, kernel) of a call's `implementation`."""
    if implementation in KERNELS:
        return "cuda", _target("cuda"), implementation
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"jax_w4a4.{who}: implementation={implementation!r}; expected None, 'cuda', 'xla' or "
            f"a kernel ({', '.join(KERNELS)})"
        )
    return implementation, _target(implementation), None


def _target(implementation: str | None) -> plan.Target | None:
    try:
        return plan.targets.current()
    except NotImplementedError as error:
        # A CUDA device without an entry in the targets table.
        if implementation == "cuda":
            raise
        if implementation is None:
            warn_once(str(error))
        return None


# ------------------------------------------------------------------------------------------------
# jit and explicit meshes
# ------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def w4a4_matmul(call: Call, x: Any, w: Weight) -> Array:
    return sharding.matmul_explicit(_matmul_straight_through, call, x, w)


@functools.partial(jax.jit, static_argnums=0)
def w4a4_quantize(call: QuantizeCall, *operands: Any) -> tuple[Array, Array, Array | None]:
    return sharding.quantize_explicit(_quantize_straight_through, call, *operands)


def _matmul_straight_through(call: Call, x: Any, w: Weight) -> Array:
    return _matmul_vjp(call, *vary_alike((x, w)))


def _quantize_straight_through(
    call: QuantizeCall, *operands: Any
) -> tuple[Array, Array, Array | None]:
    return _quantize_vjp(call, *vary_alike(operands))


# ------------------------------------------------------------------------------------------------
# Straight-through gradients
# ------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_vjp(call: Call, x: Any, w: Weight) -> Array:
    return _matmul_vmap(call, x, w)


def _matmul_fwd(call: Call, x: Any, w: Weight) -> tuple[Array, tuple[Any, Weight]]:
    return _matmul_vmap(call, x, w), (x, w)


def _row(v: Array, ndim: int) -> Array:
    """A vector along the last of `ndim` dimensions."""
    return v.reshape((1,) * (ndim - 1) + v.shape)


def _dot(a: Array, b: Array, contract_b: int, dtype: Any = jnp.float32) -> Array:
    """(..., C) with a matrix whose dimension `contract_b` is C, in fp32 from `dtype` operands."""
    dims = (((a.ndim - 1,), (contract_b,)), ((), ()))
    return lax.dot_general(
        a.astype(dtype), b.astype(dtype), dims, preferred_element_type=jnp.float32
    )


def _outer(a: Array, b: Array) -> Array:
    """Sum over leading dimensions of a[..., i] b[..., j], in fp32."""
    lead = tuple(range(a.ndim - 1))
    return lax.dot_general(a, b, ((lead, lead), ((), ())), preferred_element_type=jnp.float32)


def _matmul_bwd(call: Call, residuals: tuple[Any, Weight], g: Array) -> tuple[Any, Weight]:
    x, w = residuals
    lead = tuple(range(g.ndim - 1))
    g = to_f32(g)
    d: dict[str, Array] = {}
    if w.bias is not None:
        d["bias"] = jnp.sum(g, axis=lead)
    if w.channel_scale is not None:
        # y depends on it through alpha * acc, which is the product without the other terms.
        # The kernels of an fp32 result read linear codes.
        bare = w.linear().replace(lora_down=None, lora_up=None, channel_scale=None, bias=None)
        bare_x = x.replace(lora_act=None) if isinstance(x, Activation) else x
        # In fp32, which the kernel that the call names may not store.
        product = _matmul_vmap(call.replace(out_dtype="float32", kernel=None), bare_x, bare)
        d["channel_scale"] = jnp.sum(g * product, axis=lead)
    back = _activation_bwd if isinstance(x, Activation) else _x_bwd
    return back(x, w, g, d), _cotangent(w, d)


def _activation_bwd(x: Activation, w: Weight, g: Array, d: dict[str, Array]) -> Activation:
    """Cotangent of a shared activation, of which only lora_act has one; lora_up's goes to d."""
    lora_act = x.lora_act
    if lora_act is not None and w.lora_up is not None:
        d["lora_up"] = _outer(g, to_f32(lora_act))
        lora_act = _dot(g, to_f32(w.lora_up), 0).astype(lora_act.dtype)
    return x.replace(packed=None, scales=None, global_scale=None, lora_act=lora_act)


def _x_bwd(x: Array, w: Weight, g: Array, d: dict[str, Array]) -> Array:
    """Cotangent of x; those of lora_up and lora_down go to d."""
    scaled = g if w.channel_scale is None else g * _row(w.channel_scale, g.ndim)
    # bf16 operands keep the tensor cores busy and lose nothing that a bf16 gradient would show.
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    d_smoothed = _dot(scaled, w.dequantize(), 0, dtype)  # of x / smooth
    d_raw = None  # of x itself
    inverse = None if w.smooth is None else _row(reciprocal(w.smooth), x.ndim)
    if w.lora_up is not None and w.lora_down is not None:
        xl = _lora_input(x, w.smooth, w.lora_smoothed)
        up, down = to_f32(w.lora_up), to_f32(w.lora_down)
        g_rank = _dot(g, up, 0)
        d["lora_up"] = _outer(g, to_f32(_dot(xl, down, 0).astype(w.lora_up.dtype)))
        d["lora_down"] = _outer(xl, g_rank)
        d_xl = _dot(g_rank, down, 1)
        if w.lora_smoothed:
            d_smoothed = d_smoothed + d_xl
        else:
            d_raw = d_xl
    dx = d_smoothed if inverse is None else d_smoothed * inverse
    return (dx if d_raw is None else dx + d_raw).astype(x.dtype)


def _lora_input(x: Array, smooth: Array | None, lora_smoothed: bool) -> Array:
    """What lora_down multiplies: x or x / smooth, fp32."""
    if lora_smoothed and smooth is not None:
        return to_f32(x) * _row(reciprocal(smooth), x.ndim)
    return to_f32(x)


def _cotangent(w: Weight, d: dict[str, Array]) -> Weight:
    """A weight's cotangent: `d` in the dtypes of its leaves, None (zero) elsewhere."""
    fields: dict[str, Any] = {f.name: None for f in dataclasses.fields(w) if not f.kw_only}
    fields.update({name: v.astype(getattr(w, name).dtype) for name, v in d.items()})
    return w.replace(**fields)


_matmul_vjp.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantize_vjp(
    call: QuantizeCall,
    x: Array,
    smooth: Array | None,
    global_scale: Array | None,
    lora_down: Array | None,
) -> tuple[Array, Array, Array | None]:
    return _quantize_vmap(call, x, smooth, global_scale, lora_down)


def _quantize_fwd(call: QuantizeCall, x: Any, *rest: Any) -> tuple[Any, Any]:
    # With symbolic_zeros every leaf comes as a pair of its value and whether it is differentiated.
    if x.perturbed:
        raise NotImplementedError(
            "jax_w4a4.quantize_activation: no gradient with respect to x passes through shared "
            "codes; use matmul(x, w) for each weight where x is differentiated, or "
            "jax.lax.stop_gradient(x)"
        )
    operands = tuple(None if leaf is None else leaf.value for leaf in (x, *rest))
    return _quantize_vmap(call, *operands), operands


def _quantize_bwd(call: QuantizeCall, operands: Any, g: Any) -> tuple[None, None, None, Any]:
    x, smooth, _, lora_down = operands
    g_rank = g[2]
    if lora_down is None or isinstance(g_rank, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    xl = _lora_input(x, smooth, call.spec.lora_smoothed)
    return None, None, None, _outer(xl, to_f32(g_rank)).astype(lora_down.dtype)


_quantize_vjp.defvjp(_quantize_fwd, _quantize_bwd, symbolic_zeros=True)


# ------------------------------------------------------------------------------------------------
# vmap
# ------------------------------------------------------------------------------------------------


def _map_batched(f: Any, args: Any, batched: Any) -> Any:
    """`f(*args)` for each index of the batched leaves in turn; the others are not copied."""
    leaves, treedef = jax.tree.flatten(args)
    flags = jax.tree.leaves(batched)

    def one(slices: list[Array]) -> Any:
        rest = iter(slices)
        full = [next(rest) if b else leaf for leaf, b in zip(leaves, flags, strict=True)]
        return f(*jax.tree.unflatten(treedef, full))

    return lax.map(one, [leaf for leaf, b in zip(leaves, flags, strict=True) if b])


def _any(batched: Any) -> bool:
    return any(jax.tree.leaves(batched))


@custom_vmap
def _matmul_vmap(call: Call, x: Any, w: Weight) -> Array:
    return sharding.matmul_dispatch(call, x, w)


@_matmul_vmap.def_vmap
def _matmul_batch(
    axis_size: int, batched: Any, call: Call, x: Any, w: Weight
) -> tuple[Array, bool]:
    _, x_batched, w_batched = batched
    scalar_batched = isinstance(x, Activation) and _any(x_batched.global_scale)
    grouped = not isinstance(x, Activation) and w_batched.packed and w_batched.scales
    if grouped and has_grouped_plan(
        call, axis_size, x.shape[1:] if x_batched else x.shape, x.dtype, w
    ):
        y = _batched_vmap(
            call, _batch_all(axis_size, x, x_batched), _batch_all(axis_size, w, w_batched)
        )
    elif _any(w_batched) or scalar_batched:
        y = _map_batched(functools.partial(_matmul_vmap, call), (x, w), (x_batched, w_batched))
    else:
        # The batch is one more leading dimension of x.
        if isinstance(x, Activation):
            rows = x.replace(global_scale=None)
            flags = x_batched.replace(global_scale=None)
            x = _batch_all(axis_size, rows, flags).replace(global_scale=x.global_scale)
        y = _matmul_vmap(call, x, w)
    return y, True


def _batch_all(axis_size: int, tree: Any, batched: Any) -> Any:
    """Broadcasts the leaves that have no batch dimension."""
    return jax.tree.map(
        lambda leaf, b: leaf if b else jnp.broadcast_to(leaf[None], (axis_size, *leaf.shape)),
        tree,
        batched,
    )


@custom_vmap
def _batched_vmap(call: Call, x: Array, w: Weight) -> Array:
    """x (G, ..., K) times a stacked weight (G, N, K) as one grouped product."""
    return sharding.batched_dispatch(call, x, w)


@_batched_vmap.def_vmap
def _batched_batch(
    axis_size: int, batched: Any, call: Call, x: Array, w: Weight
) -> tuple[Array, bool]:
    _, x_batched, w_batched = batched
    if not _any(w_batched):
        # The batch is one more leading dimension of x.
        return jnp.moveaxis(_batched_vmap(call, jnp.moveaxis(x, 0, 1), w), 1, 0), True
    if not w_batched.packed:
        f = functools.partial(_batched_vmap, call)
        return _map_batched(f, (x, w), (x_batched, w_batched)), True
    # Both batches are one.
    whole = _batch_all(axis_size, (x, w), (x_batched, w_batched))
    groups = whole[0].shape[1]
    x, w = jax.tree.map(lambda leaf: leaf.reshape(axis_size * groups, *leaf.shape[2:]), whole)
    y = _batched_vmap(call, x, w)
    return y.reshape(axis_size, groups, *y.shape[1:]), True


@custom_vmap
def _quantize_vmap(
    call: QuantizeCall,
    x: Array,
    smooth: Array | None,
    global_scale: Array | None,
    lora_down: Array | None,
) -> tuple[Array, Array, Array | None]:
    return sharding.quantize_dispatch(call, x, smooth, global_scale, lora_down)


@_quantize_vmap.def_vmap
def _quantize_batch(
    axis_size: int, batched: Any, call: QuantizeCall, *operands: Any
) -> tuple[Any, Any]:
    _, *flags = batched
    if _any(flags[1:]):
        out = _map_batched(functools.partial(_quantize_vmap, call), operands, tuple(flags))
    else:
        out = _quantize_vmap(call, *operands)
    return out, jax.tree.map(lambda _: True, out)
