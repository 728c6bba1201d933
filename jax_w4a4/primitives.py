"""The operator as four JAX primitives, and how each is compiled.

`jax_w4a4_matmul` is the whole call from float x (one FFI handler launches quantizer and gemm),
`jax_w4a4_quantize` and `jax_w4a4_gemm` are its halves for an activation that several weights share.
`jax_w4a4_grouped` is the whole call where groups of rows have weights of their own. Operands are
two-dimensional (those of the weights of `jax_w4a4_grouped` have a group axis in front), in the
order of the functions in `reference.py`; an absent operand has zero size. Parameters: `spec`
(formats.Spec), `plan` (plan.Plan, or None where no plan exists) and `implementation` (None, "cuda",
"xla").

Lowered for CUDA a primitive is one FFI call that carries the plan; everywhere else it is the
`jnp` reference, so it runs, exports and shards on any backend. `choose_lowering` decides.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla
from jax.sharding import PartitionSpec as P

from jax_w4a4 import _ffi, plan, reference, selftest
from jax_w4a4.formats import FLOAT_DTYPES, Spec
from jax_w4a4.weight import Activation, Weight

Array = jax.Array

FFI_TARGETS = {
    "jax_w4a4_quantize": "jax_w4a4.quantize.v3",
    "jax_w4a4_gemm": "jax_w4a4.gemm.v4",
    "jax_w4a4_matmul": "jax_w4a4.matmul.v4",
    "jax_w4a4_grouped": "jax_w4a4.grouped.v2",
}

DISABLE_JAX_EXPORT_CHECKS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(target) for target in FFI_TARGETS.values()
)
"""Pass as `jax.export.export(..., disabled_checks=...)` when exporting for CUDA. The process that
reads the artefact must import jax_w4a4; the target names carry the version of the attributes."""


def _register_for_export(cls: type) -> None:
    """Lets `jax.export` store functions that take or return the pytree."""
    static = [field for field in dataclasses.fields(cls) if field.kw_only]
    names = [field.name for field in static]
    # What a file from before a field has no value for.
    defaults = {f.name: f.default for f in static if f.default is not dataclasses.MISSING}
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jax_w4a4.{cls.__name__}",
        serialize_auxdata=lambda values: json.dumps(dict(zip(names, values, strict=True))).encode(),
        deserialize_auxdata=lambda blob: tuple(
            map((defaults | json.loads(blob)).__getitem__, names)
        ),
    )


_register_for_export(Weight)
_register_for_export(Activation)

IMPLEMENTATIONS = (None, "cuda", "xla")
# A kernel's name as the implementation asks for "cuda" and that kernel.
KERNELS = tuple(name for name, design in plan.budget.DESIGNS.items() if design.implemented)


class FallbackWarning(UserWarning):
    """The call works, but not the way it was laid out: the reference runs in place of a kernel,
    or a dimension is replicated that was sharded. Issued once per reason."""


_warned: set[str] = set()


def warn_once(reason: str) -> None:
    """Issues `FallbackWarning(reason)` unless this process has seen the same reason."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(reason, FallbackWarning, stacklevel=2)


# ------------------------------------------------------------------------------------------------
# What a call is lowered to
# ------------------------------------------------------------------------------------------------

_REBUILD = (
    "rebuild where nvcc is found (pip install --no-cache-dir --force-reinstall --no-deps), or with "
    "JAX_W4A4_PIP_CUDA=true to take nvcc from PyPI"
)


def choose_lowering(
    platform: str,
    implementation: str | None,
    *,
    has_cuda_backend: bool,
    has_cuda_build: bool,
    missing: str | None,
    who: str = "matmul",
) -> tuple[str, str | None]:
    """Decides between the FFI kernel and the reference for one call site.

    Args:
      platform: what the program is lowered for: "cuda", "cpu", ...
      implementation: what the caller asked for.
      has_cuda_backend: this process has a CUDA device, so it will run what it compiles. Without
        one the program is meant for another machine, whose build is not known here.
      has_cuda_build: this installation contains the kernels.
      missing: why there is no kernel for this call, None if there is one.
      who: public function, for messages.

    Returns:
      ("kernel" or "reference", the reason to warn about or None).

    Raises:
      NotImplementedError: implementation="cuda" and the kernel can't be had.
    """
    if implementation == "xla":
        return "reference", None
    if platform != "cuda":
        if implementation == "cuda":
            raise NotImplementedError(
                f"jax_w4a4.{who}: implementation='cuda' can't be compiled for platform "
                f"{platform!r}; use implementation=None (kernel on CUDA, XLA elsewhere) or 'xla', "
                "or lower for platform 'cuda'"
            )
        return "reference", None
    if missing is None and has_cuda_backend and not has_cuda_build:
        missing = f"jax_w4a4 was built without CUDA kernels; {_REBUILD}"
    if missing is None:
        return "kernel", None
    if implementation == "cuda":
        raise NotImplementedError(
            f"jax_w4a4.{who}: implementation='cuda' is not possible: {missing}; or use "
            "implementation='xla'"
        )
    return "reference", (
        f"jax_w4a4.{who}: the XLA reference runs in place of a CUDA kernel: {missing}; "
        "implementation='xla' asks for it without this warning"
    )


@functools.cache
def _cuda_capability() -> int | None:
    """Compute capability (ten times major plus minor) of the first local CUDA device, or None."""
    allowed = jax.config.jax_platforms
    if allowed and not {"cuda", "gpu"} & set(allowed.split(",")):
        return None
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    return int(str(device.compute_capability).replace(".", ""))


def _missing_kernel(found: plan.Plan, capability: int | None) -> str | None:
    """Why the plan can't be launched, None if nothing is known against it.

    Args:
      found: the plan of the call.
      capability: of this process's GPU; None where the program is meant for another machine.
    """
    design = plan.budget.DESIGNS[found.kernel]
    if not design.implemented or not design.runs(found.lora_stages):
        staged = f" with {found.lora_stages} LoRA stages" if found.problem.rank else ""
        return f"{found.kernel}{staged} is an account for comparison, it has no kernel"
    if capability is None:
        return None
    if found.cc != capability:
        return f"the plan was made for sm_{found.cc} and this process runs on sm_{capability}"
    if _ffi.has_cuda() and found.kernel not in _ffi.KERNELS:
        built = ", ".join(sorted(_ffi.KERNELS)) or "none"
        return f"kernel {found.kernel} is not in this build (it has: {built}); {_REBUILD}"
    archs = _ffi.build_info()["cuda_archs"]
    if archs and f"{capability}a" not in archs:
        built = ", ".join(archs)
        return f"this build has no machine code for sm_{capability}a (it has: {built}); {_REBUILD}"
    if design.unproven:
        return selftest.unproven(found.kernel)
    return None


# ------------------------------------------------------------------------------------------------
# Shapes
# ------------------------------------------------------------------------------------------------


def short(a: Any) -> str:
    """dtype and shape of an array, for messages."""
    return f"{a.dtype.name}[{','.join(map(str, a.shape))}]"


def _check(who: str, name: str, aval: Any, shape: Sequence[Any], dtypes: Sequence[str]) -> None:
    if aval.dtype.name not in dtypes:
        raise TypeError(
            f"jax_w4a4.{who}: {name} is {short(aval)}; expected dtype {' or '.join(dtypes)}"
        )
    if tuple(aval.shape) != tuple(shape):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"jax_w4a4.{who}: {name} is {short(aval)}; expected shape ({wanted})")


def _check_optional(who: str, name: str, aval: Any, size: int) -> None:
    """A float32 vector that is absent when it has no elements."""
    _check(who, name, aval, (size if aval.shape != (0,) else 0,), ("float32",))


def _check_rank2(who: str, name: str, aval: Any) -> None:
    if aval.ndim != 2:
        raise ValueError(f"jax_w4a4.{who}: {name} is {short(aval)}; expected two dimensions")


def _quantize_avals(who: str, spec: Spec, x, smooth, global_scale, lora_down) -> list[Any]:
    _check_rank2(who, "x", x)
    _check_rank2(who, "lora_down", lora_down)
    m = x.shape[0]
    _check(who, "x", x, (m, spec.k), FLOAT_DTYPES)
    _check_optional(who, "smooth", smooth, spec.k)
    _check_optional(who, "act_global_scale", global_scale, 1)
    _check(who, "lora_down", lora_down, (spec.k, lora_down.shape[1]), FLOAT_DTYPES)
    # update() keeps the marks of manual mesh axes on x; a fresh aval would drop them and
    # shard_map could no longer catch a wrong out_specs.
    return [
        x.update(shape=(m, spec.k_pad // 2), dtype=jnp.dtype("uint8"), weak_type=False),
        x.update(shape=(m, spec.blocks), dtype=jnp.dtype(spec.scale_dtype), weak_type=False),
        x.update(shape=(m, lora_down.shape[1]), dtype=jnp.dtype(spec.lora_dtype), weak_type=False),
    ]


def _gemm_avals(
    who: str,
    spec: Spec,
    xp,
    xs,
    x_gs,
    lora_act,
    wp,
    ws,
    w_gs,
    lora_up,
    channel_scale,
    bias,
    scale_range,
) -> list[Any]:
    for name, aval in (("activation", xp), ("packed", wp), ("lora_up", lora_up)):
        _check_rank2(who, name, aval)
    m, n, rank = xp.shape[0], wp.shape[0], lora_up.shape[1]
    for name, aval, rows in (("activation", xp, m), ("packed", wp, n)):
        _check(who, name, aval, (rows, spec.k_pad // 2), ("uint8",))
    for name, aval, rows in (("activation scales", xs, m), ("scales", ws, n)):
        _check(who, name, aval, (rows, spec.blocks), (spec.scale_dtype,))
    _check(who, "lora_act", lora_act, (m, rank), (spec.lora_dtype,))
    _check(who, "lora_up", lora_up, (n, rank), (spec.lora_dtype,))
    _check_optional(who, "act_global_scale", x_gs, 1)
    _check_optional(who, "global_scale", w_gs, 1)
    _check_optional(who, "channel_scale", channel_scale, n)
    _check_optional(who, "bias", bias, n)
    _check(who, "scale_range", scale_range, (n if scale_range.shape[0] else 0, 2), ("uint8",))
    return [xp.update(shape=(m, n), dtype=jnp.dtype(spec.out_dtype), weak_type=False)]


def _workspace_avals(like: Any, found: plan.Plan, kind: str) -> list[Any]:
    """Results after y, which carry what one launch leaves for the next; the plan says which."""

    def aval(buffer: Any) -> Any:
        whole = P(*[None] * len(buffer.shape))
        return like.update(
            shape=buffer.shape,
            dtype=jnp.dtype(buffer.dtype),
            weak_type=False,
            sharding=jax.sharding.NamedSharding(like.sharding.mesh, whole),
        )

    return [aval(buffer) for buffer in found.workspace(like.shape[0], kind)]


def _quantize_abstract(*avals, spec: Spec, **_):
    return _quantize_avals("quantize_activation", spec, *avals)


def _gemm_abstract(*avals, spec: Spec, plan, **_):
    (y,) = _gemm_avals("matmul", spec, *avals)
    return [y] if plan is None else [y, *_workspace_avals(avals[0], plan, "gemm")]


def _matmul_abstract(x, smooth, x_gs, lora_down, *weight, spec: Spec, plan, **_):
    xp, xs, lora_act = _quantize_avals("matmul", spec, x, smooth, x_gs, lora_down)
    (y,) = _gemm_avals("matmul", spec, xp, xs, x_gs, lora_act, *weight)
    if plan is None:
        return [y, xp, xs, lora_act]
    return [y, *_workspace_avals(x, plan, "matmul")]


def _grouped_abstract(x, bounds, *weight, spec: Spec, plan, **_):
    who = "grouped_matmul"
    groups = bounds.shape[0] - 1
    if bounds.ndim != 1 or groups < 1 or bounds.dtype.name != "int32":
        raise ValueError(f"jax_w4a4.{who}: bounds is {short(bounds)}; expected int32 [G + 1]")
    for aval in weight:
        if aval.ndim < 2 or aval.shape[0] != groups:
            raise ValueError(f"jax_w4a4.{who}: operand {short(aval)} of {groups} groups")
    smooth, x_gs, lora_down, *gemm = (
        jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype) for aval in weight
    )
    xp, xs, lora_act = _quantize_avals(who, spec, x, smooth, x_gs, lora_down)
    (y,) = _gemm_avals(who, spec, xp, xs, x_gs, lora_act, *gemm)
    return [y] if plan is None else [y, *_workspace_avals(x, plan, "grouped")]


# ------------------------------------------------------------------------------------------------
# Lowering
# ------------------------------------------------------------------------------------------------


def _define(name: str, who: str, abstract: Callable, reference_fn: Callable) -> Primitive:
    prim = Primitive(name)
    prim.multiple_results = True
    prim.def_abstract_eval(abstract)
    prim.def_impl(functools.partial(xla.apply_primitive, prim))

    def shared(*operands, spec):
        return reference_fn(*operands, spec)

    # Jitted, so that call sites of equal shapes share one traced and lowered function.
    shared.__name__ = shared.__qualname__ = f"{name}_reference"
    shared = jax.jit(shared, static_argnames="spec")

    def reference_rule(ctx, *operands, spec):
        def with_workspace(*operands):
            got = [*shared(*operands, spec=spec), *[None] * len(ctx.avals_out)]
            # A kernel's workspace that the reference does not have. Nobody reads it.
            return [
                r if r is not None and r.shape == aval.shape else jnp.zeros(aval.shape, aval.dtype)
                for r, aval in zip(got, ctx.avals_out, strict=False)
            ]

        return mlir.lower_fun(with_workspace, multiple_results=True)(ctx, *operands)

    def default_rule(ctx, *operands, spec, plan, implementation):
        choose_lowering(
            "/".join(ctx.module_context.platforms),
            implementation,
            has_cuda_backend=False,
            has_cuda_build=False,
            missing=None,
            who=who,
        )
        return reference_rule(ctx, *operands, spec=spec)

    def cuda_rule(ctx, *operands, spec, plan, implementation):
        if 0 in ctx.avals_out[0].shape:
            return reference_rule(ctx, *operands, spec=spec)  # nothing to launch
        capability = _cuda_capability()
        if plan is None:
            missing = _why_no_plan(prim, spec, ctx.avals_in)
        else:
            missing = _missing_kernel(plan, capability)
        chosen, reason = choose_lowering(
            "cuda",
            implementation,
            has_cuda_backend=capability is not None,
            has_cuda_build=_ffi.has_cuda(),
            missing=missing,
            who=who,
        )
        if reason is not None:
            warn_once(reason)
        if chosen == "reference":
            return reference_rule(ctx, *operands, spec=spec)
        rule = jax.ffi.ffi_lowering(FFI_TARGETS[name])
        return rule(ctx, *operands, plan=plan.ffi_attrs(), spec=spec.ffi_attrs())

    mlir.register_lowering(prim, default_rule)
    mlir.register_lowering(prim, cuda_rule, platform="cuda")
    return prim


quantize_p = _define(
    "jax_w4a4_quantize",
    "quantize_activation",
    _quantize_abstract,
    reference.quantize_activation_ref,
)
# The last operand, scale_range, says nothing that the scales do not: the reference doesn't read it.
gemm_p = _define(
    "jax_w4a4_gemm",
    "matmul",
    _gemm_abstract,
    lambda *ops: (reference.gemm_ref(*ops[:-2], ops[-1]),),
)
matmul_p = _define(
    "jax_w4a4_matmul",
    "matmul",
    _matmul_abstract,
    lambda *ops: reference.matmul_ref(*ops[:-2], ops[-1]),
)
grouped_p = _define(
    "jax_w4a4_grouped",
    "grouped_matmul",
    _grouped_abstract,
    lambda *ops: (reference.grouped_matmul_ref(*ops[:-2], spec=ops[-1]),),
)

_ffi.register()


# ------------------------------------------------------------------------------------------------
# Calls on one device
# ------------------------------------------------------------------------------------------------


def _short_target(target: plan.Target | None) -> str:
    return "no target" if target is None else target.name


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed about a product before its shapes are those of one device.

    Attributes:
      out_dtype: dtype name of the result.
      implementation: None, "cuda" or "xla".
      target: what to plan for; None where no plan is possible.
      kernel: the kernel to plan, None for the planner's choice.
      precision: None, "fastest" or "highest".
      tuning: version of the tuned choices that the planner reads.
    """

    out_dtype: str
    implementation: str | None
    target: plan.Target | None
    kernel: str | None = None
    precision: str | None = None
    tuning: int = dataclasses.field(default_factory=plan.tuning.version)

    def __repr__(self) -> str:
        # Printed inside jaxprs.
        return f"Call({self.out_dtype}, {self.implementation}, {_short_target(self.target)})"

    def replace(self, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class QuantizeCall:
    """What is fixed about a quantization, whose operands do not include the weight.

    Attributes:
      spec: of a product with the weight.
      implementation, target, kernel: as in `Call`.
    """

    spec: Spec
    implementation: str | None
    target: plan.Target | None
    kernel: str | None = None

    def __repr__(self) -> str:
        target = _short_target(self.target)
        return f"QuantizeCall({self.spec}, {self.implementation}, {target})"

    def replace(self, **changes: Any) -> QuantizeCall:
        return dataclasses.replace(self, **changes)


def _problem(spec: Spec, m: Any, n: int, rank: int, x_dtype: str, groups: int = 0) -> plan.Problem:
    return plan.Problem(
        m=m if isinstance(m, int) else None,  # a symbolic dimension of jax.export
        n=n,
        k_pad=spec.k_pad,
        rank=rank,
        format=spec.format,
        block_size=spec.block_size,
        x_dtype=x_dtype,
        out_dtype=spec.out_dtype,
        lora_dtype=spec.lora_dtype,
        scale_dtype=spec.scale_dtype,
        k=spec.k,
        lora_smoothed=spec.lora_smoothed,
        precision=spec.precision,
        groups=groups,
        sign_order=spec.sign_order,
    )


def _solve(call: Call | QuantizeCall, problem: plan.Problem) -> plan.Plan | None:
    """The plan for shapes of one device, recorded for `explain`; None if there is none and the
    caller does not insist on the kernel."""
    if call.target is None:
        return None
    try:
        return plan.record(plan.solve(problem, call.target, kernel=call.kernel))
    except (NotImplementedError, ValueError):
        if call.implementation == "cuda":
            raise
        return None


def _why_no_plan(prim: Primitive, spec: Spec, avals: Sequence[Any]) -> str:
    x, groups = avals[0], 0
    n = 0 if prim is quantize_p else avals[4].shape[0]
    rank = avals[3].shape[1]
    if prim is grouped_p:
        groups, n, rank = avals[1].shape[0] - 1, avals[5].shape[1], avals[4].shape[2]
    x_dtype = x.dtype.name if x.dtype.name in FLOAT_DTYPES else spec.out_dtype
    try:
        plan.solve(_problem(spec, x.shape[0], n, rank, x_dtype, groups), plan.targets.current())
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return "no launch plan was made for it"


def _vector(v: Array | None) -> Array:
    """An optional vector or scalar as the primitives take it."""
    return jnp.zeros((0,), jnp.float32) if v is None else v.reshape(-1)


def _matrix(v: Array | None, rows: Any, dtype: str) -> Array:
    """An optional low-rank matrix as the primitives take it."""
    return jnp.zeros((rows, 0), dtype) if v is None else v


def matmul_local(call: Call, x: Array | Activation, w: Weight) -> Array:
    """One device's product, leading dimensions of x folded into M."""
    spec = w.spec(call.out_dtype).replace(precision=call.precision)
    lead = x.shape[:-1]
    m, n = math.prod(lead), w.shape[0]
    weight = (
        w.packed,
        w.scales,
        _vector(w.global_scale),
        _matrix(w.lora_up, n, spec.lora_dtype),
        _vector(w.channel_scale),
        _vector(w.bias),
        jnp.zeros((0, 2), jnp.uint8) if w.scale_range is None else w.scale_range,
    )
    if isinstance(x, Activation):
        found = _solve(call, _problem(spec, m, n, w.rank, x.dtype))
        lora_act = None if x.lora_act is None else x.lora_act.reshape(m, w.rank)
        y, *_ = gemm_p.bind(
            x.packed.reshape(m, x.packed.shape[-1]),
            x.scales.reshape(m, x.scales.shape[-1]),
            _vector(x.global_scale),
            _matrix(lora_act, m, spec.lora_dtype),
            *weight,
            spec=spec,
            plan=found,
            implementation=call.implementation,
        )
    else:
        found = _solve(call, _problem(spec, m, n, w.rank, x.dtype.name))
        y, *_ = matmul_p.bind(
            x.reshape(m, w.k),
            _vector(w.smooth),
            _vector(w.act_global_scale),
            _matrix(w.lora_down, w.k, spec.lora_dtype),
            *weight,
            spec=spec,
            plan=found,
            implementation=call.implementation,
        )
    return y.reshape(*lead, n)


def quantize_local(
    call: QuantizeCall,
    x: Array,
    smooth: Array | None,
    global_scale: Array | None,
    lora_down: Array | None,
) -> tuple[Array, Array, Array | None]:
    """One device's quantization: packed, scales and lora_act with the leading dimensions of x."""
    spec = call.spec
    lead = x.shape[:-1]
    m = math.prod(lead)
    down = _matrix(lora_down, spec.k, spec.lora_dtype)
    # Planned without a gemm (n = 0): projections of different widths that share an activation
    # then make identical calls, which XLA merges.
    found = _solve(call, _problem(spec, m, 0, down.shape[1], x.dtype.name))
    packed, scales, lora_act = quantize_p.bind(
        x.reshape(m, spec.k),
        _vector(smooth),
        _vector(global_scale),
        down,
        spec=spec,
        plan=found,
        implementation=call.implementation,
    )
    out = [v.reshape(*lead, v.shape[-1]) for v in (packed, scales, lora_act)]
    return out[0], out[1], None if lora_down is None else out[2]


def _grouped_problem(call: Call, m: Any, x_dtype: str, w: Weight) -> plan.Problem:
    """The problem of a stacked weight."""
    spec = w.spec(call.out_dtype).replace(precision=call.precision)
    return _problem(spec, m, w.shape[1], w.rank, x_dtype, groups=w.shape[0])


def grouped_local(call: Call, x: Array, bounds: Array, w: Weight) -> Array:
    """One device's grouped product: rows [bounds[g], bounds[g + 1]) of x with the weight g.

    Args:
      x: (M, K).
      bounds: (G + 1,) int32, not decreasing, from 0 to M.
      w: stacked weight (G, N, K).
    """
    problem = _grouped_problem(call, x.shape[0], x.dtype.name, w)
    groups, n, _ = w.shape
    if groups == 0:
        return jnp.zeros((x.shape[0], n), call.out_dtype)
    spec = w.spec(call.out_dtype).replace(precision=call.precision)

    def vector(v: Array | None) -> Array:
        return jnp.zeros((groups, 0), jnp.float32) if v is None else v.reshape(groups, -1)

    def matrix(v: Array | None, rows: int) -> Array:
        return jnp.zeros((groups, rows, 0), spec.lora_dtype) if v is None else v

    y, *_ = grouped_p.bind(
        x,
        bounds,
        vector(w.smooth),
        vector(w.act_global_scale),
        matrix(w.lora_down, w.k),
        w.packed,
        w.scales,
        vector(w.global_scale),
        matrix(w.lora_up, n),
        vector(w.channel_scale),
        vector(w.bias),
        jnp.zeros((groups, 0, 2), jnp.uint8) if w.scale_range is None else w.scale_range,
        spec=spec,
        plan=_solve(call, problem),
        implementation=call.implementation,
    )
    return y


def batched_local(call: Call, x: Array, w: Weight) -> Array:
    """One device's products of x (G, ..., K) with a stacked weight (G, N, K): one grouped call.

    A loop where the share has no grouped kernel, such as parts under a sharded K, in fp32.
    """
    groups, *lead, k = x.shape
    if call.target is not None and not has_grouped_plan(call, groups, x.shape[1:], x.dtype, w):
        return lax.map(lambda operands: matmul_local(call, *operands), (x, w))
    rows = math.prod(lead)
    bounds = jnp.arange(groups + 1, dtype=jnp.int32) * rows
    y = grouped_local(call, x.reshape(groups * rows, k), bounds, w)
    return y.reshape(groups, *lead, y.shape[-1])


def has_grouped_plan(call: Call, groups: int, shape: Sequence[Any], dtype: Any, w: Weight) -> bool:
    """Whether there is a plan for `batched_local` on the chosen target.

    Args:
      shape, dtype: of what each of the groups multiplies.
      w: stacked weight.
    """
    if call.target is None or call.kernel is not None or call.implementation == "xla":
        return False
    m = groups * math.prod(shape[:-1])
    try:
        plan.solve(_grouped_problem(call, m, dtype.name, w), call.target)
    except (NotImplementedError, ValueError):
        return False
    return True
