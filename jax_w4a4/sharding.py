"""The operator over a device mesh: what each mesh axis shards, and what each device computes.

Factors of the product: the leading dimensions of x (b0, b1, ...), K (k), N (n), the rank (r). Each
operand names the factor of each of its dimensions, so that one table yields the Shardy rule of auto
meshes, the operand shardings for the partitioner and the specs of `jax.shard_map`. The K/2 bytes
and K/block scales of K values share the factor k although their sizes differ.

Stacked weights have a factor e in front: the experts. In a batched product (`jax.vmap` over the
weight) x and y have it too. In a grouped product, whose rows are sorted by expert, y does not: a
device with some of the experts leaves the other rows zero, and one all-reduce adds them up; a
device with some of the rows cuts the group sizes to them and needs nothing else.

Sharded b or n needs no communication. Sharded k needs one all-reduce of fp32 partial sums: global
scales, channel scale and low-rank branch are linear in the partial sum and applied before it, the
bias is added once after it. Plans are solved for the shapes of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_w4a4.primitives import (
    Call,
    QuantizeCall,
    batched_local,
    grouped_local,
    matmul_local,
    quantize_local,
    warn_once,
)
from jax_w4a4.weight import Activation, Weight

Array = jax.Array
Axes = dict[str, tuple[str, ...]]  # factor -> the mesh axes that shard it
Context = tuple[tuple[str, int], ...]  # axes and sizes of the mesh set when the call was traced


# ------------------------------------------------------------------------------------------------
# Factors
# ------------------------------------------------------------------------------------------------


def _lead(x: Any, stacked: bool = False) -> str:
    """Factors of the leading dimensions of x, as a prefix; `stacked`: the first is the experts'."""
    factors = [f"b{i} " for i in range(len(x.shape) - 1)]
    if stacked:
        factors[0] = "e "
    return "".join(factors)


def _scale_factor(scales: Any) -> str:
    # A single scale per row can't be split along K.
    return "row" if scales.shape[-1] == 1 else "k"


def _name(tree: Any, **factors: str) -> Any:
    """A dataclass pytree with its present fields replaced by their factors."""
    return dataclasses.replace(
        tree, **{name: f for name, f in factors.items() if getattr(tree, name) is not None}
    )


def _x_factors(x: Any, stacked: bool = False) -> Any:
    """x with each leaf replaced by the factors of its dimensions, a string such as "b0 b1 k"."""
    lead = _lead(x, stacked)
    if not isinstance(x, Activation):
        return lead + "k"
    return _name(
        x,
        packed=lead + "k",
        scales=lead + _scale_factor(x.scales),
        global_scale="",
        lora_act=lead + "r",
    )


def _is_stacked(w: Weight) -> bool:
    return w.ndim > 2


def _w_factors(w: Weight) -> Weight:
    e = "e " if _is_stacked(w) else ""
    return _name(
        w,
        packed=e + "n k",
        scales=e + "n " + _scale_factor(w.scales),
        global_scale=e.strip(),
        act_global_scale=e.strip(),
        smooth=e + "k",
        lora_down=e + "k r",
        lora_up=e + "n r",
        channel_scale=e + "n",
        bias=e + "n",
        scale_range=e + "n extreme",
    )


def _matmul_factors(x: Any, w: Weight) -> tuple[Any, str]:
    """Factors of (x, w) and of y, for one weight or for a batch of weights."""
    stacked = _is_stacked(w)
    return (_x_factors(x, stacked), _w_factors(w)), _lead(x, stacked) + "n"


def _grouped_factors(x: Any, bounds: Any, w: Weight) -> tuple[Any, str]:
    """Factors of (x, bounds, w) and of y."""
    return (_x_factors(x), "bound", _w_factors(w)), "b0 n"


def _quantize_factors(
    call: QuantizeCall, x: Any, smooth: Any, global_scale: Any, lora_down: Any
) -> Any:
    """Factors of the operands and of (packed, scales, lora_act)."""
    lead = _lead(x)
    operands = (
        lead + "k",
        None if smooth is None else "k",
        None if global_scale is None else "",
        None if lora_down is None else "k r",
    )
    scales = lead + ("row" if call.spec.blocks == 1 else "k")
    return operands, (lead + "k", scales, None if lora_down is None else lead + "r")


def _spec(factors: str, axes: Axes) -> P:
    return P(*[axes.get(factor) or None for factor in factors.split()])


def _rule(operands: Any, results: Any) -> tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]:
    """Shardy's rule for trees of factors: the string and its keyword arguments, hashable."""
    ins, outs = jax.tree.leaves(operands), jax.tree.leaves(results)
    made = {factor for leaf in outs for factor in leaf.split()}
    # In order of appearance, which Shardy demands of its lists of factors.
    used = dict.fromkeys(factor for leaf in ins + outs for factor in leaf.split())
    whole = tuple(factor for factor in used if factor in ("r", "row", "bound", "extreme"))
    summed = tuple(factor for factor in used if factor not in made and factor not in whole)
    kinds = (("reduction_factors", summed), ("need_replication_factors", whole))
    return f"{', '.join(ins)} -> {', '.join(outs)}", tuple(kind for kind in kinds if kind[1])


# ------------------------------------------------------------------------------------------------
# Mesh axes of each factor
# ------------------------------------------------------------------------------------------------


def _axes_of(spec: P, factors: str) -> Axes:
    """Reads one operand's partition spec."""
    names = factors.split()
    entries = [*spec, *(None,) * (len(names) - len(spec))]
    return {
        name: () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for name, entry in zip(names, entries, strict=True)
    }


def _say(factor: str) -> str:
    return {"e": "the experts", "n": "N", "k": "K"}.get(factor, f"dimension {factor[1:]} of x")


def _why_whole_k(
    axes: tuple[str, ...], sizes: Mapping[str, int], k: int, k_pad: int, block: int
) -> str | None:
    """Why K can't be split over the mesh axes; None if it can."""
    parts = math.prod(sizes[axis] for axis in axes)
    over = f"K={k} can't be split over {parts} devices (mesh axes {', '.join(axes)})"
    if block == k_pad:
        return f"{over}: the one block scale of a row needs the maximum over all of K"
    unit = max(32, block)
    if k != k_pad or k % (parts * unit):
        return f"{over}: each part must be a multiple of {unit} (block size {block})"
    return None


def _settle(
    who: str,
    wanted: Axes,
    sizes: Mapping[str, int],
    k: tuple[int, int, int],
    *,
    result: Axes | None,
) -> Axes:
    """Gives every mesh axis to one factor.

    Args:
      who: public function, for messages.
      wanted: the axes each factor has on the operands.
      sizes: devices along each mesh axis.
      k: K, padded K and block size, to see whether K can be split.
      result: the axes of the result on an auto mesh, where they decide between two factors that
        want the same axis; otherwise leading dimensions win over n, and n over k, so that a weight
        sharded over the data axis is gathered. None on an explicit mesh, where two claims are an
        error.

    Raises:
      ValueError: two claims on an explicit mesh.
    """
    factors = [*(f for f in wanted if f.startswith("b")), *(f for f in "enk" if f in wanted)]
    owner: dict[str, str] = {}
    for factor in factors:
        for axis in wanted[factor]:
            held = owner.setdefault(axis, factor)
            if held == factor:
                continue
            if result is None:
                raise ValueError(
                    f"jax_w4a4.{who}: mesh axis {axis!r} shards both {_say(held)} and "
                    f"{_say(factor)}; reshard one of them first (jax.sharding.reshard)"
                )
            if axis in result.get(factor, ()):
                owner[axis] = factor
    settled = {
        factor: tuple(a for a in wanted[factor] if owner[a] == factor and sizes[a] > 1)
        for factor in factors
    }
    if settled["k"]:
        reason = _why_whole_k(settled["k"], sizes, *k)
        if reason is not None:
            warn_once(f"jax_w4a4.{who}: {reason}; every device gets the whole of K instead")
            settled["k"] = ()
    return settled


def _matmul_axes(
    x_spec: P, w_spec: P, x: Any, w: Weight, sizes: Mapping[str, int], result: P | None
) -> Axes:
    (of_x, of_w), out = _matmul_factors(x, w)
    return _product_axes("matmul", x_spec, w_spec, _codes(of_x), of_w, out, w, sizes, result)


def _grouped_axes(
    x_spec: P, w_spec: P, x: Any, w: Weight, sizes: Mapping[str, int], result: P | None
) -> Axes:
    """Axes for a grouped product, from the partition specs of x and of w.packed."""
    (of_x, _, of_w), out = _grouped_factors(x, None, w)
    return _product_axes("grouped_matmul", x_spec, w_spec, of_x, of_w, out, w, sizes, result)


def _product_axes(
    who: str,
    x_spec: P,
    w_spec: P,
    of_x: str,
    of_w: Weight,
    out: str,
    w: Weight,
    sizes: Mapping[str, int],
    result: P | None,
) -> Axes:
    wanted, wanted_w = _axes_of(x_spec, of_x), _axes_of(w_spec, of_w.packed)
    for factor in wanted.keys() & wanted_w.keys():
        mine, other = wanted[factor], wanted_w[factor]
        if result is None and mine and other and mine != other:
            verb = "are" if factor == "e" else "is"
            raise ValueError(
                f"jax_w4a4.{who}: {_say(factor)} {verb} sharded over {mine} in x and over {other} "
                "in the weight; reshard one of them first (jax.sharding.reshard)"
            )
        # What is whole on one side is cut locally, without communication, to follow the other.
        wanted_w[factor] = other or mine
    wanted.update(wanted_w)
    k = (w.k, w.k_pad, w.block_size or w.k_pad)
    return _settle(who, wanted, sizes, k, result=None if result is None else _axes_of(result, out))


def _quantize_axes(
    x_spec: P, call: QuantizeCall, x: Any, sizes: Mapping[str, int], auto: bool
) -> Axes:
    wanted = _axes_of(x_spec, _lead(x) + "k")
    k = (call.spec.k, call.spec.k_pad, call.spec.block_size)
    return _settle("quantize_activation", wanted, sizes, k, result={} if auto else None)


# ------------------------------------------------------------------------------------------------
# One device's share
# ------------------------------------------------------------------------------------------------


def _matmul_share(
    run: Callable[[Call, Any, Weight], Array],
    call: Call,
    k_axes: tuple[str, ...],
    x: Any,
    w: Weight,
) -> Array:
    """The product on one device; `run` multiplies, this adds what K sharding needs."""
    if not k_axes:
        return run(call, x, w)
    k = x.shape[-1]
    if isinstance(x, Activation):
        k = 2 * x.packed.shape[-1]
        lora_act = x.lora_act
        if lora_act is not None:
            # Complete on every device, so only one may add it.
            first = lax.axis_index(k_axes) == 0
            lora_act = jnp.where(first, lora_act, jnp.zeros_like(lora_act))
        x = dataclasses.replace(x, k=k, lora_act=lora_act)
    # The kernels of an fp32 result read linear codes.
    w_part = dataclasses.replace(w.linear(), k=k, bias=None)
    part = run(call.replace(out_dtype="float32"), x, w_part)
    y = lax.psum(part, k_axes)
    if w.bias is not None:
        where = (0, y.ndim - 1) if _is_stacked(w) else (y.ndim - 1,)
        y = y + lax.broadcast_in_dim(w.bias, y.shape, where)
    return y.astype(call.out_dtype)


def _grouped_share(
    run: Callable[[Call, Array, Array, Weight], Array],
    call: Call,
    axes: Axes,
    x: Array,
    bounds: Array,
    w: Weight,
) -> Array:
    """The grouped product on one device: its rows of the groups that it has."""
    m, groups, k = x.shape[0], w.shape[0], x.shape[1]
    if axes["b0"]:
        bounds = jnp.clip(bounds - lax.axis_index(axes["b0"]) * m, 0, m)
    if axes["e"]:
        first = lax.axis_index(axes["e"]) * groups
        bounds = lax.dynamic_slice_in_dim(bounds, first, groups + 1)
    summed = (*axes["e"], *axes["k"])
    if not axes["k"]:
        y = run(call, x, bounds, w)
        # Zeros on all devices but one: no rounding.
        return lax.psum(y, summed) if summed else y
    if w.bias is not None:
        first_k = lax.axis_index(axes["k"]) == 0
        w = dataclasses.replace(w, bias=jnp.where(first_k, w.bias, jnp.zeros_like(w.bias)))
    part = run(call.replace(out_dtype="float32"), x, bounds, dataclasses.replace(w, k=k))
    return lax.psum(part, summed).astype(call.out_dtype)


def _quantize_share(
    run: Callable[..., Any], call: QuantizeCall, k_axes: tuple[str, ...], x: Array, *operands: Any
) -> tuple[Array, Array, Array | None]:
    """The quantization on one device; K sharding sums the partial x @ lora_down in fp32."""
    if not k_axes:
        return run(call, x, *operands)
    k = x.shape[-1]
    part = call.spec.replace(k=k, k_pad=k, lora_dtype="float32")
    packed, scales, lora_act = run(call.replace(spec=part), x, *operands)
    if lora_act is not None:
        lora_act = lax.psum(lora_act, k_axes).astype(call.spec.lora_dtype)
    return packed, scales, lora_act


# ------------------------------------------------------------------------------------------------
# Auto meshes: the compiler's partitioner calls back with the shardings it found
# ------------------------------------------------------------------------------------------------


def _context() -> Context:
    return tuple(jax.sharding.get_abstract_mesh().shape.items())


def _placed(who: str, context: Context, mesh: Any, *args: Any) -> tuple[Any, ...]:
    """The mesh and the partition spec of each of `args`.

    JAX passes an empty mesh, and shardings that name no axes, where no array that enters or leaves
    the program has been placed on a mesh. Under `jax.set_mesh` that runs on all of its devices
    nevertheless, and a constraint or a shard_map by axis name may have sharded an operand.
    """
    known = [arg for arg in args if arg.sharding is not None]
    sizes = [size for _, size in context]
    if mesh.empty and context and known and known[0].sharding.num_devices == math.prod(sizes):
        # The keys come in the order of the program's devices, which is that of the mesh.
        devices = list(_parts(known[0].sharding, known[0]))
        mesh = Mesh(np.reshape(np.array(devices), sizes), tuple(axis for axis, _ in context))
    return mesh, *(_partition_spec(who, mesh, arg) for arg in args)


def _parts(sharding: Any, arg: Any) -> Any:
    """The part of each device, for an array of arg's dimensions whose sizes divide evenly."""
    return sharding.devices_indices_map((sharding.num_devices,) * len(arg.shape))


def _partition_spec(who: str, mesh: Any, arg: Any) -> P:
    sharding = arg.sharding
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    if sharding is None or sharding.is_fully_replicated:
        return P()
    spec = _named(sharding, mesh, arg)
    if spec is None:
        raise NotImplementedError(
            f"jax_w4a4.{who}: an operand or the result is sharded as {sharding}, which names no "
            "mesh axes; call it under jax.set_mesh, or place operands with jax.device_put(x, "
            "jax.sharding.NamedSharding(mesh, spec))"
        )
    return spec


def _named(sharding: Any, mesh: Any, arg: Any) -> P | None:
    """The spec that shards `arg` over `mesh` as `sharding` does, or None."""
    parts = _parts(sharding, arg)
    steps = {}  # where the part of the next device along an axis begins, in each dimension
    for at, axis in zip(np.eye(len(mesh.shape), dtype=int), mesh.shape, strict=True):
        if mesh.shape[axis] > 1:
            steps[axis] = [part.start or 0 for part in parts[mesh.devices[tuple(at)]]]
    if any(np.count_nonzero(step) > 1 for step in steps.values()):
        return None
    by_dim = [[axis for axis in steps if steps[axis][d]] for d in range(len(arg.shape))]
    # An axis with longer steps is outside of one with shorter steps.
    spec = P(*(tuple(sorted(axes, key=lambda a: -steps[a][d])) for d, axes in enumerate(by_dim)))
    same = bool(steps) and _parts(NamedSharding(mesh, spec), arg) == parts
    return spec if same else None


def _shardings(mesh: Any, factors: Any, axes: Axes) -> Any:
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _spec(leaf, axes)), factors)


def _codes(x: Any) -> Any:
    return x.packed if isinstance(x, Activation) else x


def _given_rule(
    call: Any, rule: Any, context: Context, mesh: Any, operand_types: Any, result_types: Any
) -> Any:
    text, kinds = rule
    return text, dict(kinds)


def _matmul_partition(
    call: Call, rule: Any, context: Context, mesh: Any, args: Any, result: Any
) -> Any:
    return _product_partition(matmul_local, call, context, mesh, args, result)


def _batched_partition(
    call: Call, rule: Any, context: Context, mesh: Any, args: Any, result: Any
) -> Any:
    return _product_partition(batched_local, call, context, mesh, args, result)


def _product_partition(
    run: Callable, call: Call, context: Context, mesh: Any, args: Any, result: Any
) -> Any:
    x, w = args
    mesh, x_spec, w_spec, y_spec = _placed("matmul", context, mesh, _codes(x), w.packed, result)
    axes = _matmul_axes(x_spec, w_spec, x, w, mesh.shape, y_spec)
    operands, out = _matmul_factors(x, w)
    share = functools.partial(_matmul_share, run, call, axes["k"])
    return mesh, share, _shardings(mesh, out, axes), _shardings(mesh, operands, axes)


def _quantize_partition(
    call: QuantizeCall, rule: Any, context: Context, mesh: Any, args: Any, result: Any
) -> Any:
    mesh, x_spec = _placed("quantize_activation", context, mesh, args[0])
    axes = _quantize_axes(x_spec, call, args[0], mesh.shape, auto=True)
    operands, out = _quantize_factors(call, *args)
    share = functools.partial(_quantize_share, quantize_local, call, axes["k"])
    return mesh, share, _shardings(mesh, out, axes), _shardings(mesh, operands, axes)


def _grouped_partition(
    call: Call, rule: Any, context: Context, mesh: Any, args: Any, result: Any
) -> Any:
    x, bounds, w = args
    mesh, x_spec, w_spec, y_spec = _placed("grouped_matmul", context, mesh, x, w.packed, result)
    axes = _grouped_axes(x_spec, w_spec, x, w, mesh.shape, y_spec)
    operands, out = _grouped_factors(x, bounds, w)
    share = functools.partial(_grouped_share, grouped_local, call, axes)
    return mesh, share, _shardings(mesh, out, axes), _shardings(mesh, operands, axes)


# Parameters without defaults: custom_partitioning turns a default into an operand.
@functools.partial(custom_partitioning, static_argnums=(0, 1, 2))
def _matmul_auto(call: Call, rule: Any, context: Context, x: Any, w: Any) -> Any:
    return matmul_local(call, x, w)


@functools.partial(custom_partitioning, static_argnums=(0, 1, 2))
def _quantize_auto(
    call: QuantizeCall,
    rule: Any,
    context: Context,
    x: Any,
    smooth: Any,
    global_scale: Any,
    lora_down: Any,
) -> Any:
    return quantize_local(call, x, smooth, global_scale, lora_down)


@functools.partial(custom_partitioning, static_argnums=(0, 1, 2))
def _batched_auto(call: Call, rule: Any, context: Context, x: Any, w: Any) -> Any:
    return batched_local(call, x, w)


@functools.partial(custom_partitioning, static_argnums=(0, 1, 2))
def _grouped_auto(call: Call, rule: Any, context: Context, x: Any, bounds: Any, w: Any) -> Any:
    return grouped_local(call, x, bounds, w)


_matmul_auto.def_partition(partition=_matmul_partition, sharding_rule=_given_rule)
_batched_auto.def_partition(partition=_batched_partition, sharding_rule=_given_rule)
_grouped_auto.def_partition(partition=_grouped_partition, sharding_rule=_given_rule)
_quantize_auto.def_partition(partition=_quantize_partition, sharding_rule=_given_rule)


def _inside_shard_map(who: str) -> bool:
    """True where shapes are those of one device. An explicit axis left here is owned by vmap."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not {AxisType.Manual, AxisType.Explicit} & set(mesh.axis_types):
        return False
    auto = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[name] > 1
    ]
    if auto:
        raise NotImplementedError(
            f"jax_w4a4.{who}: mesh axes {', '.join(auto)} are auto inside a shard_map over other "
            "axes, or on a mesh with explicit axes; name all axes in the shard_map, or make all "
            "axes of the mesh explicit or all auto"
        )
    return True


def matmul_dispatch(call: Call, x: Any, w: Weight) -> Array:
    """The product below differentiation and batching."""
    if _named_axes((x, w)):
        # vmap has put a dimension that is sharded over its own axis in front of x.
        return matmul_explicit(matmul_local, call, x, w)
    if _inside_shard_map("matmul"):
        return matmul_local(call, x, w)
    return _matmul_auto(call, _rule(*_matmul_factors(x, w)), _context(), x, w)


def batched_dispatch(call: Call, x: Any, w: Weight) -> Array:
    """x (G, ..., K) times a stacked weight (G, N, K), below differentiation and batching."""
    if _named_axes((x, w)):
        return matmul_explicit(batched_local, call, x, w)
    if _inside_shard_map("matmul"):
        return batched_local(call, x, w)
    return _batched_auto(call, _rule(*_matmul_factors(x, w)), _context(), x, w)


def grouped_dispatch(call: Call, x: Any, bounds: Any, w: Weight) -> Array:
    """The grouped product below differentiation and batching."""
    if _named_axes((x, bounds, w)):
        return grouped_explicit(grouped_local, call, x, bounds, w)
    if _inside_shard_map("grouped_matmul"):
        return grouped_local(call, x, bounds, w)
    rule = _rule(*_grouped_factors(x, bounds, w))
    return _grouped_auto(call, rule, _context(), x, bounds, w)


def quantize_dispatch(call: QuantizeCall, *operands: Any) -> tuple[Array, Array, Array | None]:
    """The quantization below differentiation and batching."""
    if _named_axes(operands):
        return quantize_explicit(quantize_local, call, *operands)
    if _inside_shard_map("quantize_activation"):
        return quantize_local(call, *operands)
    rule = _rule(*_quantize_factors(call, *operands))
    return _quantize_auto(call, rule, _context(), *operands)


# ------------------------------------------------------------------------------------------------
# Explicit meshes: shardings are part of the types
# ------------------------------------------------------------------------------------------------


def _named_axes(tree: Any) -> set[str]:
    """Explicit mesh axes that shard any of the arrays."""
    named: set[str] = set()
    for leaf in jax.tree.leaves(tree):
        for entry in jax.typeof(leaf).sharding.spec:
            named.update(() if entry is None else (entry,) if isinstance(entry, str) else entry)
    return named


def _explicit_mesh(tree: Any) -> Any:
    """The mesh with explicit axes that the arrays live on, or None."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree)]
    for mesh in meshes:
        if not mesh.empty:
            return mesh if AxisType.Explicit in mesh.axis_types else None
    return None


def whole(v: Array) -> Array:
    """All of a small array on every device, also where explicit mesh axes shard it."""
    if not _named_axes(v):
        return v
    return jax.sharding.reshard(v, NamedSharding(jax.typeof(v).sharding.mesh, P()))


def _shard_map(mesh: Any, run: Callable, args: Any, factors: Any, out: Any, axes: Axes) -> Any:
    # The default, all axes, leaves out those over which an enclosing vmap maps.
    whole = set(mesh.axis_types) == {AxisType.Explicit}
    names = set() if whole else _named_axes(args)
    if not (whole or names):
        return run(*args)
    in_specs = jax.tree.map(lambda leaf: _spec(leaf, axes), factors)
    args = jax.tree.map(jax.sharding.reshard, args, _shardings(mesh, factors, axes))
    out_specs = jax.tree.map(lambda leaf: _spec(leaf, axes), out)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names)
    return mapped(*args)


def matmul_explicit(
    run: Callable[[Call, Any, Weight], Array], call: Call, x: Any, w: Weight
) -> Array:
    """`run(call, x, w)` on each device's share where the mesh has explicit axes, else as it is.

    Differentiation of `run` happens inside the shard_map, which sums the gradients of replicated
    operands over the mesh.
    """
    mesh = _explicit_mesh((x, w))
    if mesh is None:
        return run(call, x, w)
    x_spec, w_spec = jax.typeof(_codes(x)).sharding.spec, jax.typeof(w.packed).sharding.spec
    axes = _matmul_axes(x_spec, w_spec, x, w, mesh.shape, None)
    factors, out = _matmul_factors(x, w)
    share = functools.partial(_matmul_share, run, call, axes["k"])
    return _shard_map(mesh, share, (x, w), factors, out, axes)


def grouped_explicit(
    run: Callable[[Call, Array, Array, Weight], Array],
    call: Call,
    x: Array,
    bounds: Array,
    w: Weight,
) -> Array:
    """`run(call, x, bounds, w)` on each device's share where the mesh has explicit axes."""
    mesh = _explicit_mesh((x, bounds, w))
    if mesh is None:
        return run(call, x, bounds, w)
    x_spec, w_spec = jax.typeof(x).sharding.spec, jax.typeof(w.packed).sharding.spec
    axes = _grouped_axes(x_spec, w_spec, x, w, mesh.shape, None)
    factors, out = _grouped_factors(x, bounds, w)
    share = functools.partial(_grouped_share, run, call, axes)
    return _shard_map(mesh, share, (x, bounds, w), factors, out, axes)


def quantize_explicit(run: Callable[..., Any], call: QuantizeCall, *operands: Any) -> Any:
    """`run(call, *operands)` on each device's share where the mesh has explicit axes."""
    mesh = _explicit_mesh(operands)
    if mesh is None:
        return run(call, *operands)
    x = operands[0]
    axes = _quantize_axes(jax.typeof(x).sharding.spec, call, x, mesh.shape, auto=False)
    factors, out = _quantize_factors(call, *operands)
    share = functools.partial(_quantize_share, run, call, axes["k"])
    return _shard_map(mesh, share, operands, factors, out, axes)
