"""``explain``: what a call of the operator was planned to do on a GPU, and why.

Times are computed from datasheet peaks, never measured; the text says so where it prints one.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_w4a4 import plan as planning
from jax_w4a4.plan import budget, planner, roofline, targets
from jax_w4a4.plan.budget import Design, Problem
from jax_w4a4.plan.planner import Plan, Schedule
from jax_w4a4.plan.roofline import Launch
from jax_w4a4.plan.targets import Target

__all__ = ["Call", "Explanation", "explain", "table"]

_PREFIX = "jax_w4a4_"
_FLOATS = ("float32", "bfloat16", "float16")
# The default first. As in formats.py, which needs JAX.
_SCALE_DTYPES = {
    "nvfp4": ("float8_e4m3fn",),
    "mxfp4": ("float8_e8m0fnu",),
    "int4": ("float16", "bfloat16", "float32"),
}
_BLOCK = {"nvfp4": 16, "mxfp4": 32, "int4": 64}


@dataclasses.dataclass(frozen=True)
class Call:
    """One distinct call of the operator in the explained function.

    Attributes:
      kind: ``"matmul"`` (quantizer and gemm), ``"gemm"``, ``"quantize"`` or ``"grouped"`` (matmul
        with a weight for each group of rows).
      count: how often it runs, None where the compiler hides it; the most it can run where
        ``conditional``.
      implementation: what the call asked for: None, ``"cuda"`` or ``"xla"``.
      problem: shapes and dtypes on one device.
      target: GPU the figures are for.
      plan: the plan, None where there is none.
      no_plan: why there is none.
      conditional: whether a branch of ``lax.cond`` or ``lax.switch`` holds it.
    """

    kind: str
    count: int | None
    implementation: str | None
    problem: Problem
    target: Target
    plan: Plan | None
    no_plan: str | None = None
    conditional: bool = False

    @property
    def m(self) -> int:
        """Rows the figures are for; a stand-in where M is symbolic."""
        return planner.SYMBOLIC_M if self.problem.m is None else self.problem.m

    @property
    def schedule(self) -> Schedule | None:
        """Tiles and waves of the gemm."""
        if self.plan is None or self.kind == "quantize":
            return None
        return planner.schedule_of(self.plan, self.target)

    @property
    def gemm(self) -> Launch | None:
        """Roofline of the gemm launch."""
        if self.plan is None or self.schedule is None:
            return None
        where = (self.plan.kernel, self.problem, self.m, self.target)
        return roofline.gemm(*where, self.schedule, self._ahead)

    @property
    def quantizer(self) -> Launch | None:
        """Roofline of the activation quantizer's launch."""
        if self.plan is None or self.kind == "gemm":
            return None
        private = self.plan.quantizer.kernel in (2, 5)
        where = (self.plan.kernel, self.problem, self.m, self.target)
        return roofline.quantizer(*where, private, self._ahead)

    @property
    def _ahead(self) -> int:
        """CTAs of the gemm's launch that have LoRA-down; none where lora_act is an operand."""
        down = self.plan.quantizer.down
        return 0 if self.kind != "matmul" or down is None else down.ahead

    @property
    def status(self) -> str:
        """What runs: the kernel, XLA operations, or nothing yet."""
        if self.plan is None:
            return f"runs as XLA operations, no kernel plan: {self.no_plan}"
        design = budget.DESIGNS[self.plan.kernel]
        name = f"kernel {self.plan.kernel}"
        if not design.code:
            return f"{name}: an account for comparison, no kernel of this project"
        if not design.runs(self.plan.lora_stages):
            return f"{name}: an account for comparison, the kernel streams the low-rank branch"
        built = _built_kernels()
        if design.name in built:
            where = "in this build"
        elif design.implemented:
            where = f"not in this build (it has: {', '.join(sorted(built)) or 'no kernel'})"
        else:
            where = "design only: no kernel in this build"
        if self.implementation == "xla":
            return f"runs as XLA operations (implementation='xla') instead of {name}, {where}"
        return f"{name}, {where}"

    def __str__(self) -> str:
        return "\n".join(_call_lines(self))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. ``str`` of it is the table for people.

    Attributes:
      calls: distinct calls in program order.
      notes: remarks on the whole function.
    """

    calls: tuple[Call, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.calls), *(f"note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for JSON."""
        return {
            "calls": [_call_dict(call) for call in self.calls],
            "notes": list(self.notes),
            "times": "computed, not measured",
        }


def explain(
    f: Callable[..., Any] | Sequence[int],
    *args: Any,
    target: str | Target | None = None,
    **options: Any,
) -> Explanation:
    """Shows the kernel plans of a function, or of one bare shape.

    ``explain(f, *args, **kwargs)`` traces ``f`` (jitted or not; through scan, vmap, grad, custom
    derivatives, shard_map) without running it and reports every distinct call of the operator.
    Arguments may be ``jax.ShapeDtypeStruct``; what is no array is passed through as it is. Where
    the compiler partitions the program, it is compiled too, so that the plans are those of one
    device's shard. In a loop, ``count`` includes the trip count of scan but not that of while.
    Branches of cond and switch are alternatives: ``count`` is that of the branch with most calls.

    ``explain((M, K, N), rank=128, format="nvfp4", target="sm_100")`` needs no function, no GPU
    and no JAX. Options: ``rank`` (0), ``format`` ("nvfp4"), ``block_size`` (the format's; None
    for whole-row int4), ``dtype`` ("bfloat16", of x), ``out_dtype`` (that of x), ``lora_dtype``
    ("bfloat16"), ``scale_dtype`` (the format's), ``precision`` (None), ``groups`` (0: one weight;
    else weights of a grouped product), ``prepared`` (False; as of `Weight.prepare`), ``kernel``,
    and anything :func:`jax_w4a4.plan.solve` lets one force.

    Args:
      f: a callable or three integers M, K, N.
      *args, **options: arguments of the callable, or options of the shape.
      target: GPU to plan for; default :func:`jax_w4a4.plan.targets.current`, or what the
        function was traced for.

    Returns:
      An :class:`Explanation`.

    Raises:
      ValueError: the function does not contain the operator; a bad shape; nothing fits.
      TypeError: ``f`` is neither callable nor a shape, or does not take these arguments; an
        unknown option; a dtype that the operator does not have.
      NotImplementedError: a bare shape on a target without a kernel design.
    """
    if target is not None:
        target = targets.get(target)
    if callable(f):
        _check_call(f, args, options)
        return _explain_function(f, args, options, target)
    if args or not isinstance(f, Sequence) or isinstance(f, str):
        raise TypeError(
            "jax_w4a4.explain: expected a function and its arguments, or one shape (M, K, N); "
            f"got {type(f).__name__} and {len(args)} arguments"
        )
    return _explain_shape(f, target, **options)


def _check_call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """TypeError unless ``f`` takes these arguments, as far as its signature tells."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"jax_w4a4.explain: {getattr(f, '__name__', f)!r}: {error}; options such as rank and "
            "format go with a shape (M, K, N)"
        ) from None


# ---- bare shapes ---------------------------------------------------------------------------------

_DEFAULT = object()


def _explain_shape(
    shape: Sequence[int],
    target: Target | None,
    *,
    rank: int = 0,
    format: str = "nvfp4",
    block_size: Any = _DEFAULT,
    dtype: str = "bfloat16",
    out_dtype: str | None = None,
    lora_dtype: str = "bfloat16",
    scale_dtype: str | None = None,
    precision: str | None = None,
    groups: int = 0,
    prepared: bool = False,
    kernel: str | None = None,
    **forced: int,
) -> Explanation:
    if len(shape) != 3 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(
            f"jax_w4a4.explain: shape is {tuple(shape)}; expected three positive integers M, K, N"
        )
    if format not in tuple(_BLOCK):
        raise ValueError(
            f"jax_w4a4.explain: unknown format {format!r}; expected one of {', '.join(_BLOCK)}"
        )
    dtype = _dtype("dtype", dtype, _FLOATS)
    out_dtype = dtype if out_dtype is None else _dtype("out_dtype", out_dtype, _FLOATS)
    lora_dtype = _dtype("lora_dtype", lora_dtype, _FLOATS)
    scale_dtypes = _SCALE_DTYPES[format]
    scale_dtype = _dtype("scale_dtype", scale_dtype or scale_dtypes[0], scale_dtypes)
    m, k, n = shape
    block = _BLOCK[format] if block_size is _DEFAULT else block_size
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(
            f"jax_w4a4.explain: block_size is {block!r}; expected a positive integer or None"
        )
    if format == "int4" and block not in (32, 64, 128, None):
        raise ValueError(
            f"jax_w4a4.explain: block_size is {block}; int4 has 32, 64, 128 or None (whole row)"
        )
    unit = max(32, block or 32)
    k_pad = -(-k // unit) * unit
    problem = Problem(
        m=m,
        n=n,
        k_pad=k_pad,
        rank=rank,
        format=format,
        block_size=block or k_pad,
        x_dtype=dtype,
        out_dtype=out_dtype,
        lora_dtype=lora_dtype,
        scale_dtype=scale_dtype,
        k=k,
        precision=precision,
        groups=groups,
        sign_order="sorted" if prepared and format == "mxfp4" else "linear",
    )
    if target is None:
        target = targets.current()
    solved = planning.solve(problem, target, kernel=kernel, **forced)
    kind = "grouped" if groups else "matmul"
    return Explanation((Call(kind, 1, None, problem, target, solved),))


def _dtype(name: str, given: Any, allowed: tuple[str, ...]) -> str:
    """Name of a dtype given by name, as NumPy's object or as a scalar type."""
    text = getattr(given, "__name__", str(given))
    if text not in allowed:
        raise TypeError(f"jax_w4a4.explain: {name} is {text}; expected {' or '.join(allowed)}")
    return text


# ---- functions -----------------------------------------------------------------------------------


@dataclasses.dataclass
class _Found:
    """An operator equation.

    Attributes:
      local: its shapes are already one device's.
      path: the conditionals round it, outermost first: (number of the conditional, branch).
    """

    kind: str
    count: int | None
    implementation: str | None
    problem: Problem
    plan: Plan | None
    local: bool
    path: tuple[tuple[int, int], ...] = ()


def _explain_function(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Target | None,
) -> Explanation:
    import jax

    leaves, tree = jax.tree.flatten((args, kwargs))
    # Scalar types such as numpy.float32 have these attributes as well.
    where = [
        i
        for i, leaf in enumerate(leaves)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)
    ]
    arrays = [leaves[i] for i in where]

    # A new function each time: JAX must trace and partition it again, and what is set on a jitted
    # f (in_shardings, static arguments) becomes visible as a call inside.
    def fresh(*arrays: Any) -> Any:
        given = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            given[i] = array
        args, kwargs = jax.tree.unflatten(tree, given)
        return f(*args, **kwargs)

    traced = jax.jit(fresh).trace(*arrays)
    found, shardings = _walk(traced.jaxpr)
    shardings += [getattr(leaf, "sharding", None) for leaf in arrays]
    if not found:
        raise ValueError(
            "jax_w4a4.explain: the function does not contain the operator: no jax_w4a4 primitive "
            f"in the jaxpr of {getattr(f, '__name__', f)!r}"
        )
    notes: list[str] = []
    devices = max((len(s.device_set) for s in shardings if _is_sharding(s)), default=1)
    if devices > 1 and not all(each.local for each in found):
        found = _per_device(traced, found, devices, notes)
    merged: dict[tuple, tuple[Call, list[_Found]]] = {}
    for each in found:
        call = _call(each, target)
        key = (call.kind, call.implementation, call.problem, call.plan)
        merged.setdefault(key, (call, []))[1].append(each)
    calls = tuple(
        dataclasses.replace(
            call,
            count=_most([(each.path, each.count) for each in alike]),
            conditional=any(each.path for each in alike),
        )
        for call, alike in merged.values()
    )
    if any(call.conditional for call in calls):
        notes.append(
            "branches of cond and switch are alternatives: a count is that of the branch with most "
            "of these calls, and calls of different branches do not add up"
        )
    return Explanation(calls, tuple(notes))


def _most(counts: list[tuple[tuple[tuple[int, int], ...], int | None]]) -> int | None:
    """The largest number of calls over all ways through the conditionals of (path, count)."""
    total = 0
    branches: dict[int, dict[int, list]] = {}
    for path, count in counts:
        if count is None:
            return None
        if path:
            (number, branch), *rest = path
            branches.setdefault(number, {}).setdefault(branch, []).append((tuple(rest), count))
        else:
            total += count
    # No count is left that is None.
    return total + sum(max(map(_most, each.values())) for each in branches.values())


def _walk(jaxpr: Any) -> tuple[list[_Found], list[Any]]:
    """The operator's equations in program order, and every sharding met on the way."""
    from jax.extend.core import jaxprs_in_params

    found: list[_Found] = []
    shardings: list[Any] = []
    conditionals = itertools.count()

    def visit(jaxpr: Any, times: int, local: bool, path: tuple[tuple[int, int], ...]) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = eqn.primitive.name
            if name.startswith(_PREFIX):
                found.append(_equation(eqn, times, local, path))
                continue
            shardings.extend(_shardings_in(eqn.params))
            inner = times * eqn.params["length"] if name == "scan" else times
            # By visit, not by equation: a jaxpr that is called twice decides twice.
            number = next(conditionals) if name == "cond" else None
            for branch, sub in enumerate(jaxprs_in_params(eqn.params)):
                within = path if number is None else (*path, (number, branch))
                visit(sub, inner, local or name == "shard_map", within)

    visit(jaxpr, 1, False, ())
    return found, shardings


def _equation(eqn: Any, times: int, local: bool, path: tuple[tuple[int, int], ...]) -> _Found:
    params = eqn.params
    kind = eqn.primitive.name.removeprefix(_PREFIX)
    solved = params.get("plan")
    return _Found(
        kind=kind,
        count=times,
        implementation=params.get("implementation"),
        problem=solved.problem if solved is not None else _problem_of(kind, eqn),
        plan=solved,
        local=local,
        path=path,
    )


def _problem_of(kind: str, eqn: Any) -> Problem:
    """The problem of an equation without a plan, from its operands and its spec."""
    spec = eqn.params["spec"]
    avals = [var.aval for var in eqn.invars]
    m = avals[0].shape[0]
    if kind == "grouped":
        groups, n, rank = avals[5].shape[0], avals[5].shape[1], avals[4].shape[2]
    else:
        groups, n, rank = 0, 0 if kind == "quantize" else avals[4].shape[0], avals[3].shape[1]
    return Problem(
        m=m if isinstance(m, int) else None,
        n=n,
        k_pad=spec.k_pad,
        rank=rank,
        format=spec.format,
        block_size=spec.block_size,
        x_dtype=spec.out_dtype if kind == "gemm" else avals[0].dtype.name,
        out_dtype=spec.out_dtype,
        lora_dtype=spec.lora_dtype,
        scale_dtype=spec.scale_dtype,
        k=spec.k,
        lora_smoothed=spec.lora_smoothed,
        precision=spec.precision,
        groups=groups,
        sign_order=spec.sign_order,
    )


def _is_sharding(value: Any) -> bool:
    from jax.sharding import Mesh, NamedSharding, Sharding

    if isinstance(value, NamedSharding) and not isinstance(value.mesh, Mesh):
        return False  # an abstract mesh has no devices
    return isinstance(value, Sharding)


def _shardings_in(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if _is_sharding(item):
                yield item


def _per_device(traced: Any, found: list[_Found], devices: int, notes: list[str]) -> list[_Found]:
    """Replaces calls with global shapes by the plans that the partitioner solves."""
    with planning.recording() as plans:
        traced.lower().compile()
    if not plans:
        notes.append(
            f"the program is partitioned over {devices} devices but no per-device plan was "
            "reported; shapes are those of the whole program"
        )
        return found
    notes.append(f"plans are those of one of {devices} devices, as the compiler partitioned it")
    local = [each for each in found if each.local]
    whole = [each for each in found if not each.local]
    if len(plans) == len(whole) and all(
        _shard_of(p.problem, each.problem) for p, each in zip(plans, whole, strict=True)
    ):
        # The partitioner went through the calls in program order.
        return local + [
            dataclasses.replace(each, problem=p.problem, plan=p, local=True)
            for p, each in zip(plans, whole, strict=True)
        ]
    for p in dict.fromkeys(plans):
        alike = [each for each in whole if _shard_of(p.problem, each.problem)]
        kinds = {each.kind for each in alike} or {"matmul"}
        local.append(_Found(sorted(kinds)[0], None, None, p.problem, p, True))
    return local


def _shard_of(part: Problem, whole: Problem) -> bool:
    """Whether ``part`` can be one device's share of ``whole``; rows may be split unevenly."""
    return (
        (part.format, part.rank) == (whole.format, whole.rank)
        and (part.m is None or whole.m is None or part.m <= whole.m)
        and all(
            small == large or (0 < small < large and large % small == 0)
            for small, large in (
                (part.n, whole.n),
                (part.k_pad, whole.k_pad),
                (part.groups, whole.groups),
            )  # fmt: skip
        )
    )


def _call(each: _Found, target: Target | None) -> Call:
    """Keeps the plan of the trace, whose kernel the call may have named, unless another ``target``
    is asked for."""
    if each.plan is not None:
        current = targets.current()
        same = each.plan.target == current.name
        traced_for = current if same else targets.get(each.plan.target)
        if target in (None, traced_for):
            where = (each.problem, traced_for, each.plan)
            return Call(each.kind, each.count, each.implementation, *where)
    elif target is None:
        target = targets.current()
    try:
        solved, why = planning.solve(each.problem, target), None
    except (NotImplementedError, ValueError) as error:
        solved, why = None, str(error).removeprefix("jax_w4a4.plan: ")
    return Call(each.kind, each.count, each.implementation, each.problem, target, solved, why)


def _built_kernels() -> frozenset[str]:
    try:
        from jax_w4a4 import _ffi
    except ImportError:
        return frozenset()
    return frozenset(getattr(_ffi, "KERNELS", ()))


# ---- text ----------------------------------------------------------------------------------------


def _call_lines(call: Call) -> list[str]:
    p = call.problem
    m = f"M (symbolic, figures for {call.m})" if p.m is None else str(p.m)
    k = p.k_pad if p.k is None else p.k
    shape = f"{m} x {k}" if call.kind == "quantize" else f"{m} x {k} x {p.n}"
    groups = f", {p.groups} groups" if p.groups else ""
    padded = "" if k == p.k_pad else f", K padded to {p.k_pad} in all figures"
    block = "whole-row scales" if p.block_size == p.k_pad else f"block {p.block_size}"
    if call.count is None:
        times = ", several times"
    elif call.conditional:
        times = f", at most {call.count}x (in a branch)"
    else:
        times = "" if call.count == 1 else f", {call.count}x"
    lines = [
        f"{call.kind} {shape} ({'M x K' if call.kind == 'quantize' else 'M x K x N'}){groups}"
        f"{padded}, {p.format} {block}, rank {p.rank}, {p.x_dtype} -> {p.out_dtype}"
        f"{f', precision {p.precision}' if p.precision else ''}"
        f"{', prepared' if p.sign_order == 'sorted' else ''}{times}",
        f"{call.target.name} ({call.target.chip}): {call.status}",
    ]
    if call.plan is None:
        return lines
    if call.kind != "quantize":
        lines += ["", *_account_lines(call.plan, call.target), "", "why"]
        lines += [f"  - {reason}" for reason in (*call.plan.reasons, *_activation_reason(call))]
    lines.append("")
    if call.schedule is not None:
        lines.append(_wave_line(call.schedule, call.plan))
    if call.quantizer is not None:
        lines += _launch_lines(_quantizer_title(call.plan), call.quantizer, call.target)
    if call.gemm is not None:
        lines += _launch_lines(_gemm_title(call), call.gemm, call.target)
    return lines


def _activation_reason(call: Call) -> tuple[str, ...]:
    """Where the gemm's operand comes from, if its layout is its own."""
    if not budget.DESIGNS[call.plan.kernel].private_layout:
        return ()
    if call.kind == "gemm":
        return ("ready activation in the public layout: a pass into the gemm's comes first",)
    return (call.plan.quantizer.why,)


def _quantizer_title(plan: Plan) -> str:
    q = plan.quantizer
    if q.kernel == 1:
        design = budget.DESIGNS[plan.kernel]
        private = design.private_layout or design.scale_atoms
        to = ", then a pass into the gemm's layout" if private else ""
        return (
            f"quantizer{to} ({q.rows} rows per CTA, K in chunks of {q.chunk_k}, {q.threads} "
            f"threads, {q.smem_bytes} B shared memory)"
        )
    rows = "1 row" if q.rows == 1 else f"{q.rows} rows"
    to = " into the gemm's layout" if q.kernel in (2, 5) else ""
    title = f"quantizer{to} ({rows} per CTA of {q.threads} threads)"
    d = q.down
    if d is None:
        return title
    who = "CTA" if d.cluster == 1 else f"{d.cluster} CTAs"
    if d.ahead:
        return title
    if q.kernel == 5:
        ranks = budget.decode_down_ranks(q.warps)
        return f"{title} and LoRA-down ({d.rows} rows and {ranks} ranks per {who}) in one launch"
    return (
        f"{title} beside LoRA-down ({d.rows} rows per {who}, {d.stages} stages of 64 k, "
        f"{d.threads} threads, {d.smem_bytes} B shared memory)"
    )


def _gemm_title(call: Call) -> str:
    if not call._ahead:
        return "gemm"
    d = call.plan.quantizer.down
    return (
        f"gemm and LoRA-down ({d.ahead} CTAs ahead, {d.stages} stages of 64 k, {d.smem_bytes} B "
        "shared memory) in one launch"
    )


def _account_lines(plan: Plan, target: Target) -> list[str]:
    design: Design = budget.DESIGNS[plan.kernel]
    capacity = design.capacity(target, plan.tile_m)
    group = "one CTA" if plan.cluster == 1 else f"{plan.cluster} CTAs"
    streamed = "beside the main ring" if design.decode else "in the main ring"
    lora = "none" if plan.problem.rank == 0 else str(plan.lora_stages or streamed)
    lines = [
        f"tile {plan.tile_m}x{plan.tile_n}, K step {plan.tile_k}, on {group} of {plan.threads} "
        f"threads{', persistent' if design.persistent else ''}",
        f"stages: main {plan.main_stages}, LoRA {lora}, store {plan.store_stages}",
        "",
    ]
    mark = ("*", "") if plan.cluster == 1 else ("", "*")
    head = (
        "object",
        "memory",
        f"1 CTA{mark[0]}",
        f"pair{mark[1]}",
        "stages",
        "total B",
        "pair halves it",
        "lifetime",
        "beside K loop",
        "bytes of one stage",
    )
    body = [
        (
            row.name,
            row.memory,
            str(row.single),
            str(row.dual),
            str(row.stages),
            str(row.bytes(plan.cluster) * row.stages),
            "yes" if row.sliced else "no",
            row.lifetime,
            "yes" if row.overlaps_main else "no",
            row.note,
        )
        for row in plan.rows
    ]
    lines += table(head, body, right={2, 3, 4, 5})
    over = [
        row.name
        for row in plan.rows
        if not row.overlaps_main and row.stages and row.bytes(plan.cluster)
    ]
    lines.append(
        f"shared memory {plan.smem_bytes} of {capacity} B "
        f"({100 * plan.smem_bytes / capacity:.1f} %) per CTA"
        f"{', two of which share an SM' if design.ctas_per_sm(plan.tile_m) == 2 else ''}"
        + (f"; {' and '.join(over)} lie over the main stages" if over else "")
    )
    if target.multicast and not target.halved:
        shared = ", ".join(sorted(target.multicast))
        lines.append(
            f"on {target.name} a cluster halves no footprint of what its CTAs share, only L2 reads "
            f"of {shared}"
        )
    return lines


def table(head: tuple[str, ...], body: Sequence[tuple[str, ...]], right: set[int]) -> list[str]:
    """Lines of a text table; ``right`` holds the columns to align right."""
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]

    def line(cells: tuple[str, ...]) -> str:
        return "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return [line(head), "-" * len(line(head)), *(line(cells) for cells in body)]


def _wave_line(s: Schedule, plan: Plan) -> str:
    group = "CTAs" if plan.cluster == 1 else "CTA pairs"
    ctas = budget.DESIGNS[plan.kernel].ctas_per_sm(plan.tile_m)
    per_sm = "one CTA" if ctas == 1 else f"{ctas} CTAs"
    if not s.tiles:
        return "waves: no tiles"
    waves = f"{s.waves} wave{'' if s.waves == 1 else 's'}"
    return (
        f"waves: {s.tiles_m} x {s.tiles_n} = {s.tiles} tiles on {s.groups} {group} ({per_sm} per "
        f"SM) = {waves}, last {100 * s.last_fill:.0f} % full, {100 * s.fill:.0f} % overall"
    )


def _amount(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix: 25.8 MB, 1.05 us."""
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    scale, prefix = next((pair for pair in prefixes if value >= pair[0]), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{unit}"


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f} us" if us >= 10 else f"{us:.3g} us"


def _launch_lines(title: str, launch: Launch, target: Target) -> list[str]:
    traffic = launch.traffic
    flops = " + ".join(f"{what} {_amount(n, 'FLOP')}" for what, n in traffic.flops if n)
    moved = ", ".join(f"{what} {_amount(n, 'B')}" for what, n in traffic.bytes if n)
    times = [
        f"{what} {_us(seconds)} at {peak / 1e12:.0f} TFLOP/s {name}"
        for what, seconds, peak, name in launch.compute
    ]
    times.append(f"DRAM {_us(launch.dram_s)} at {target.hbm_bytes_per_s / 1e12:.1f} TB/s")
    bound = f"{_us(launch.roofline_s)}, bound by {launch.limit}"
    if launch.fill < 1.0:
        bound += f"; {_us(launch.filled_s)} with waves {100 * launch.fill:.0f} % filled"
    return [
        title,
        f"  work      {flops or 'no matrix product'}",
        f"  moves     {_amount(traffic.total_bytes, 'B')}: {moved}",
        f"  at peak   {'; '.join(times)}",
        f"  roofline  {bound} (computed, not measured)",
    ]


def _call_dict(call: Call) -> dict[str, Any]:
    def launch(one: Launch | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "flops": dict(one.traffic.flops),
            "bytes": dict(one.traffic.bytes),
            "compute_s": one.compute_s,
            "dram_s": one.dram_s,
            "roofline_s": one.roofline_s,
            "filled_s": one.filled_s,
            "limit": one.limit,
        }

    schedule = call.schedule
    return {
        "kind": call.kind,
        "count": call.count,
        "conditional": call.conditional,
        "implementation": call.implementation,
        "status": call.status,
        "target": call.target.name,
        "problem": dataclasses.asdict(call.problem),
        "plan": None if call.plan is None else dataclasses.asdict(call.plan),
        "schedule": schedule
        and {
            "tiles_m": schedule.tiles_m,
            "tiles_n": schedule.tiles_n,
            "groups": schedule.groups,
            "waves": schedule.waves,
            "fill": schedule.fill,
            "last_fill": schedule.last_fill,
        },
        "gemm": launch(call.gemm),
        "quantizer": launch(call.quantizer),
    }
