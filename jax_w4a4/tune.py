"""`tune`: times every tile of the kernels for given shapes and keeps the fastest."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_w4a4 import _ffi, _timing, plan
from jax_w4a4.formats import PRECISIONS
from jax_w4a4.matmul import matmul
from jax_w4a4.plan.tuning import Tuned
from jax_w4a4.quantize import quantize
from jax_w4a4.weight import Weight, integer

Array = jax.Array


def tune(
    shapes: Sequence[tuple[int, int, int]],
    *,
    format: str = "nvfp4",
    rank: int = 32,
    dtype: Any = jnp.bfloat16,
    precision: str | None = None,
    prepared: bool = False,
    path: str | os.PathLike | None = None,
    rounds: int = 5,
    **options: Any,
) -> tuple[Tuned, ...]:
    """Times the tiles of the gemm for some shapes; from then on the planner takes the fastest.

    The tiles of the planner's kernel, and on sm_90 of 17 to 512 rows those of both kernels that
    these might be for. Nothing needs to be tuned: without it the planner chooses by its cost model.
    The result holds for exactly these shapes, per device (one device's shard of a sharded product).
    A saved file is read back by `jax_w4a4.plan.tuning.load(path)`, or at start from the path in the
    environment variable JAX_W4A4_TUNING.

    Args:
      shapes: (M, K, N) of x (M, K) and of the weight (N, K).
      format, rank: of the weight, which is random.
      dtype: of x.
      precision: as of `matmul`.
      prepared: tune for weights after `Weight.prepare()`, which have entries of their own.
      path: where to save the result as JSON.
      rounds: timed rounds per candidate, of which the median counts.
      **options: more keywords of `jax_w4a4.quantize`, `block_size` say.

    Returns:
      For each shape the choices found, with the measured microseconds.

    Raises:
      NotImplementedError: no GPU, a CPU package, or a kernel without a choice of tiles.
      ValueError, TypeError: as `quantize` and `matmul`.
    """
    shapes = _checked(shapes)
    rounds = integer(
        rounds, f"jax_w4a4.tune: rounds={rounds!r}; expected an integer of at least 1", 1
    )
    if precision not in PRECISIONS:
        raise ValueError(
            f"jax_w4a4.tune: precision={precision!r}; expected None, 'fastest' or 'highest'"
        )
    if not _ffi.has_cuda() or jax.default_backend() != "gpu":
        raise NotImplementedError(
            "jax_w4a4.tune: needs a GPU and a package with CUDA kernels; plans for another machine "
            "can be read with jax_w4a4.explain, tuning files loaded with "
            "jax_w4a4.plan.tuning.load"
        )
    device = jax.devices()[0].device_kind
    found = tuple(
        _tune_one(
            *_operands(shape, format, rank, dtype, options, prepared), precision, device, rounds
        )
        for shape in shapes
    )
    plan.tuning.add(found)
    if path is not None:
        plan.tuning.save(path, found)
    return found


def _checked(shapes: Any) -> list[tuple[int, int, int]]:
    if not isinstance(shapes, Sequence) or isinstance(shapes, str):
        raise TypeError(
            f"jax_w4a4.tune: shapes is {type(shapes).__name__}; expected a list of (M, K, N)"
        )
    checked = []
    for shape in shapes:
        wanted = f"jax_w4a4.tune: shape {shape!r}; expected (M, K, N), all positive"
        if not isinstance(shape, Sequence) or len(shape) != 3:
            raise ValueError(wanted)
        m, k, n = (integer(size, wanted, 1) for size in shape)
        checked.append((m, k, n))
    return checked


def _operands(
    shape: tuple[int, int, int],
    format: str,
    rank: int,
    dtype: Any,
    options: dict[str, Any],
    prepared: bool = False,
) -> tuple[list[Array], list[Weight]]:
    """Operand sets that together don't fit the L2 cache."""
    m, k, n = shape
    copies = _timing.copies_past_cache(n * k // 2 + jnp.dtype(dtype).itemsize * m * k, most=16)
    kx, kw = jax.random.split(jax.random.key(0))
    xs = [jax.random.normal(key, (m, k), dtype) for key in jax.random.split(kx, copies)]
    # One round of the fit, and copies of one weight: the kernels cannot tell.
    w = quantize(jax.random.normal(kw, (n, k)), format, rank=rank, iterations=1, **options)
    w = w.prepare() if prepared else w
    return xs, [jax.tree.map(jnp.copy, w) for _ in range(copies)]


def _tune_one(
    xs: list[Array], ws: list[Weight], precision: str | None, device: str, rounds: int
) -> Tuned:
    call = functools.partial(matmul, implementation="cuda", precision=precision)
    planned = _plan_of(call, xs[0], ws[0])
    sets = list(zip(xs, ws, strict=True))
    turns = _timing.turns_of(*xs[0].shape, ws[0].shape[0])

    def seconds(kernel: str, choices: dict[str, int]) -> float:
        entry = Tuned(planned.target, planned.problem, kernel, _pairs(choices), 0.0, 0.0, device)
        with plan.tuning.using([entry]):
            chain = _timing.jax_turns(call, sets, turns)
            return _timing.seconds_per_call(chain, rounds=rounds)

    return sweep(planned, seconds, device)


def _pairs(choices: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(choices.items()))


def _plan_of(call: Callable[..., Array], x: Array, w: Weight) -> plan.Plan:
    with plan.recording() as plans:
        jax.jit(call).trace(x, w)
    return plans[0]


# The planner switches between these by the number of rows. Up to 16, where the second was never
# near, and past 512, which the first does not take, one of them is timed.
_RIVALS = ("sm90_decode", "sm90_v2")
_RIVAL_ROWS = range(17, 513)


def kernels(planned: plan.Plan) -> list[str]:
    """The planner's kernel, and its rival where that takes the problem and might be faster."""
    names = [planned.kernel]
    if planned.kernel in _RIVALS and planned.problem.m in _RIVAL_ROWS:
        (rival,) = set(_RIVALS) - {planned.kernel}
        try:
            plan.solve(planned.problem, planned.target, kernel=rival)
        except (NotImplementedError, ValueError):
            return names
        names.append(rival)
    return names


def sweep(
    planned: plan.Plan, seconds: Callable[[str, dict[str, int]], float], device: str
) -> Tuned:
    """The fastest of the tiles that fit, of all `kernels`.

    Args:
      planned: the planner's own plan.
      seconds: times one call with the given kernel and choices.
      device: name of the device, for the record.

    Raises:
      NotImplementedError: there is one kernel, which has one tile.
    """
    own = {"tile_m": planned.tile_m, "tile_n": planned.tile_n, "cluster": planned.cluster}
    timed = [(seconds(planned.kernel, own), planned.kernel, own)]
    for kernel in kernels(planned):
        for tile_m, tile_n, cluster in plan.budget.DESIGNS[kernel].tiles_of(planned.problem):
            choices = {"tile_m": tile_m, "tile_n": tile_n, "cluster": cluster}
            if (kernel, choices) == (planned.kernel, own):
                continue
            try:
                plan.solve(planned.problem, planned.target, kernel=kernel, **choices)
            except plan.DoesNotFitError:
                continue
            timed.append((seconds(kernel, choices), kernel, choices))
    if len(timed) == 1:
        raise NotImplementedError(
            f"jax_w4a4.tune: kernel {planned.kernel} has one tile for this problem, there is "
            "nothing to choose"
        )
    best, kernel, choices = min(timed, key=lambda each: each[0])
    us = best * 1e6, timed[0][0] * 1e6
    return Tuned(planned.target, planned.problem, kernel, _pairs(choices), *us, device)
