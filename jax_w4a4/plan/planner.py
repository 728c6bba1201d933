"""Chooses tile, cluster, stages and LoRA staging within the shared-memory budget.

All byte counts come from :mod:`jax_w4a4.plan.budget`; this module searches and explains.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_w4a4.plan import budget, targets, tuning
from jax_w4a4.plan.budget import Config, Design, Problem, QuantizerPlan, Region, Row
from jax_w4a4.plan.targets import Target

__all__ = [
    "SYMBOLIC_M",
    "DoesNotFitError",
    "Plan",
    "Schedule",
    "record",
    "recording",
    "schedule",
    "solve",
]

SCHEMA = 5

# In order of preference; a kernel that cannot take a problem leaves it to the next.
_DEFAULT_KERNELS = {
    90: ("sm90_decode", "sm90_v2", "sm90_v1"),
    100: ("sm100_v2", "sm100_v1"),
    103: ("sm100_v2", "sm100_v1"),
}
_GROUPED_KERNELS = {90: "sm90_grouped"}
# What a caller of `solve` may fix instead of leaving it to the solver.
FORCIBLE = (
    "tile_m",
    "tile_n",
    "cluster",
    "main_stages",
    "lora_stages",
    "store_stages",
    "group_m",
    "promote_k",
    "quantizer",
    "down_ahead",
)

# Rows assumed where M is symbolic.
SYMBOLIC_M = 4096

# Loaded latency of one ring stage: fits 46.69 -> 32.13 us, the device times published for
# svdquant-kernels on a B200 when its main stages went from 2 to 4
# (90 K steps per CTA pair: (46.69 - 32.13) us / 90 = latency * (1/2 - 1/4)).
_LOAD_LATENCY_S = 650e-9

# sm90_v1: a wave costs the MMA of tile_m rows plus the expansion of the weight tile, which does
# not depend on tile_m and is put at this many rows' worth.
_EXPAND_ROWS = 32

# That a call of more rows is no decode goes without saying.
_FEW_ROWS = budget.DECODE_MOST_TOKENS
_V2_MOST_RANK = 256
# sm100_v2 is chosen from half of its smallest tile on; nothing is measured on such a chip.
_SM100_LEAST_M = 64
# 16 * 8 * 15 * K, the largest sum of weights times 16 and unsigned activations, is below 2^31.
_V2_MOST_INT4_K = 1 << 20

# sm90_v2: a K step of one tile takes _V2_COLUMN_S seconds for each of tile_m + _V2_FIXED_ROWS
# tokens; the fixed part is the expansion of the weights, which does not depend on tile_m. Fitted to
# an H200: bench/results/sm90_v2_tiles_h200.json and, for the other paths,
# sm90_v2_paths_h200.json, against which tests/test_planner.py checks every choice.
_V2_FIXED_ROWS = {
    "Mxfp4": 126,
    "Mxfp4Promoted": 200,
    "Nvfp4": 33,
    "Nvfp4Rounded": 375,
    "Int4Row": 30,
    "Int4Group64": 70,
    "Int4Group128": 130,
    "Int4Scaled": 128,
}
_V2_COLUMN_S = {
    "Mxfp4": 1.88e-9,
    "Mxfp4Promoted": 1.64e-9,
    "Nvfp4": 2.32e-9,
    "Nvfp4Rounded": 1.24e-9,
    "Int4Row": 2.36e-9,
    "Int4Group64": 5.48e-9,
    "Int4Group128": 3.08e-9,
    "Int4Scaled": 1.73e-9,
}
# Paths that take the constants of another, without measurements of their own.
_V2_FITTED_AS = {"Mxfp4Sorted": "Mxfp4"}
# Seconds per token of one step of 32 ranks, and of the epilogue that no MMA hides. Same data.
_V2_RANK_S = 1.3e-9
_V2_EPILOGUE_S = 5e-9
# Design.group_m of sm90_v2, same data: up to 6 % faster than one group of 22 when the chip runs
# hot, equal otherwise. sm100_v2 takes it over, unmeasured.

# sm90_decode: seconds of a call before and after its stream, and of two CTAs that meet; bytes per
# second of the chip and of one SM; seconds of a stage by the most rows of a CTA, and of each token
# in it; from the moment that a slot is free until it is full again. Fitted to
# bench/results/decode_tiles_h200.json.
_DECODE_FIXED_S = 5.0e-6
_DECODE_MEET_S = 1.1e-6
_DECODE_CHIP_BYTES_S = 4.0e12
_DECODE_SM_BYTES_S = 30e9
_DECODE_STEP_S = {32: (0.70e-6, 6e-9), 64: (0.46e-6, 5.7e-9), 128: (0.46e-6, 5.7e-9)}
_DECODE_REFILL_S = 1.9e-6
# Seconds of a stage with 96 or 128 tokens, by bytes of an activation and the most rows of a CTA.
# Set so that tiles rank as in bench/results/decode_128_tokens_h200.json, decode_96_tokens_h200.json
# and, those of 128 tokens and two bytes, in decode_128_kernels_h200.json.
_DECODE_MANY_STEP_S = {
    (1, 96): {64: 0.42e-6, 128: 0.72e-6},
    (1, 128): {64: 0.44e-6, 128: 0.85e-6},
    (2, 96): {64: 0.95e-6, 128: 1.3e-6},
    (2, 128): {64: 1.2e-6, 128: 1.65e-6},
}
# From which K on LoRA-down is faster in sm90_decode's launch, by tile_m (4096x4096, 128 tokens:
# 11.2 and 11.5 us; 32 tokens: 8.0 and 7.5).
_LEAST_AHEAD_K = {32: 6144, 64: 4096, 96: 4096, 128: 4096}

# The K at which three tiles of 128 tokens were measured.
_THREE_TILES_K = 4096

# FFI attribute names of the regions, in the order of Plan.ffi_attrs.
_FFI_REGIONS = (
    ("weight", "weight"),
    ("act", "activation"),
    ("weight_scale", "weight_scale"),
    ("act_scale", "activation_scale"),
    ("lora_up", "lora_up"),
    ("lora_act", "lora_act"),
    ("aux", "aux"),
    ("store", "store"),
    ("barriers", "barriers"),
)


class DoesNotFitError(ValueError):
    """No configuration fits the shared memory; the message holds the account of each."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the tiles of one gemm fall on the chip.

    Attributes:
      tiles_m, tiles_n: tiles along each side.
      groups: CTAs or CTA pairs that run at once, one CTA per SM.
      waves: rounds needed.
      last_fill: share of the groups busy in the last wave (0 when there are no tiles).
      fill: tiles over ``waves * groups``.
    """

    tiles_m: int
    tiles_n: int
    groups: int

    @property
    def tiles(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def waves(self) -> int:
        return -(-self.tiles // self.groups)

    @property
    def fill(self) -> float:
        return self.tiles / (self.waves * self.groups) if self.tiles else 0.0

    @property
    def last_fill(self) -> float:
        return (self.tiles - (self.waves - 1) * self.groups) / self.groups if self.tiles else 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Everything a launch needs, decided at trace time. Frozen, hashable, made of builtins.

    Attributes:
      schema: version of this record.
      kernel: ``"sm90_v1"``, ``"sm90_v2"``, ``"sm100_v1"``, ``"sm100_v2"``, or an account without
        a kernel
        (``"svdquant_v2"``).
      target, cc: architecture planned for.
      tile_m, tile_n, tile_k: tile of one group of ``cluster`` CTAs, and its K step.
      main_stages, lora_stages, store_stages: buffers of each ring; with a low-rank branch and
        ``lora_stages == 0`` LoRA is streamed through the main ring.
      threads: per CTA.
      smem_bytes: dynamic shared memory of the launch.
      group_m: m tiles that share one sweep over n; 0 where the hardware orders the tiles.
      promote_k: K elements that the tensor core adds up before the sums move on into fp32
        registers; 0 for all of K.
      regions: where each object lives.
      rows: the account, one row per resident object.
      reasons: why the planner stopped where it did, one sentence each.
      quantizer: launch of the activation quantizer.
      problem: what was planned.
    """

    schema: int
    kernel: str
    target: str
    cc: int
    tile_m: int
    tile_n: int
    tile_k: int
    cluster: int
    main_stages: int
    lora_stages: int
    store_stages: int
    threads: int
    smem_bytes: int
    group_m: int
    promote_k: int
    regions: tuple[Region, ...]
    rows: tuple[Row, ...]
    reasons: tuple[str, ...]
    quantizer: QuantizerPlan
    problem: Problem

    def __repr__(self) -> str:
        # Plans are printed inside jaxprs; the account is what explain() is for.
        return (
            f"Plan({self.kernel} {self.target} tile={self.tile_m}x{self.tile_n}x{self.tile_k} "
            f"cluster={self.cluster} "
            f"stages={self.main_stages}/{self.lora_stages}/{self.store_stages} "
            f"smem={self.smem_bytes})"
        )

    def region(self, name: str) -> Region:
        """The region called ``name`` (a name of ``targets.RESIDENT_OBJECTS``)."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(f"jax_w4a4.plan: no region {name!r} in {self!r}")

    def workspace(self, m: Any, kind: str) -> tuple[budget.Buffer, ...]:
        """Results that a call returns besides y; see :func:`budget.workspace`."""
        design = budget.DESIGNS[self.kernel]
        return budget.workspace(self.problem, design, self.quantizer, self.tile_m, m, kind)

    def ffi_attrs(self) -> dict[str, int]:
        """The integers the FFI handlers read, in declaration order of the C++ struct.

        ``bytes_*`` are per stage, ``off_*`` count from the start of dynamic shared memory.
        ``stage_bytes`` leads from one stage of the main ring to the next where its objects are
        interleaved, and from one stage of the activation to the next otherwise.

        Raises:
          NotImplementedError: the plan is an account without a kernel.
        """
        code = budget.DESIGNS[self.kernel].code
        if not code:
            raise NotImplementedError(
                f"jax_w4a4.plan: {self.kernel!r} is an account for comparison and has no kernel "
                "to launch; plan with kernel=None"
            )
        design = budget.DESIGNS[self.kernel]
        path = budget.v2_path(self.problem) if design.private_layout else None
        attrs = {
            "schema": self.schema,
            "kernel": code,
            "cc": self.cc,
            "tile_m": self.tile_m,
            "tile_n": self.tile_n,
            "tile_k": self.tile_k,
            "cluster": self.cluster,
            "main_stages": self.main_stages,
            "lora_stages": self.lora_stages,
            "store_stages": self.store_stages,
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "group_m": self.group_m,
            "path": path.code if path else 0,
            "promote_k": self.promote_k,
            "stage_bytes": self.region("activation").stride,
        }
        regions = [(key, self.region(name)) for key, name in _FFI_REGIONS]
        attrs.update({f"off_{key}": region.offset for key, region in regions})
        attrs.update({f"bytes_{key}": region.bytes_per_stage for key, region in regions})
        down = self.quantizer.down
        attrs.update(
            q_kernel=self.quantizer.kernel,
            q_rows=self.quantizer.rows,
            q_chunk_k=self.quantizer.chunk_k,
            q_threads=self.quantizer.threads,
            q_smem_bytes=self.quantizer.smem_bytes,
            q_warps=self.quantizer.warps,
            q_lane_chunks=self.quantizer.lane_chunks,
            down_cluster=down.cluster if down else 0,
            down_stages=down.stages if down else 0,
            down_smem_bytes=down.smem_bytes if down else 0,
            off_down_barriers=down.off_barriers if down else 0,
            down_ahead=down.ahead if down else 0,
            down_early=down.early if down else 0,
        )
        return attrs


_recorders: contextvars.ContextVar[tuple[list[Plan], ...]] = contextvars.ContextVar(
    "jax_w4a4_plan_recorders", default=()
)
_active: list[list[Plan]] = []
_active_lock = threading.Lock()


def record(plan: Plan) -> Plan:
    """Appends ``plan`` to the lists of all enclosing :func:`recording` blocks; returns it.

    Blocks are local to the context (thread, task) that opened them. A thread that Python did not
    start reports to every open block: some JAX versions partition a program on a compiler thread.
    """
    plans = _recorders.get()
    if not plans and isinstance(threading.current_thread(), threading._DummyThread):
        with _active_lock:
            plans = tuple(_active)
    for each in plans:
        each.append(plan)
    return plan


@contextlib.contextmanager
def recording() -> Iterator[list[Plan]]:
    """Collects the plans passed to :func:`record` inside the block, in order. Nests."""
    plans: list[Plan] = []
    token = _recorders.set((*_recorders.get(), plans))
    with _active_lock:
        _active.append(plans)
    try:
        yield plans
    finally:
        with _active_lock:
            # By identity: equal lists of two nested blocks must not be confused.
            _active[:] = [each for each in _active if each is not plans]
        _recorders.reset(token)


def group_rows(groups: int, m: int) -> tuple[int, int]:
    """(groups with rows, rows of each) that the planner assumes of ``m`` rows in ``groups``, as the
    sizes are on the device: as many as there are, and equal. One group of all without groups."""
    used = max(1, min(groups, m))
    return used, -(-m // used)


def schedule(
    m: int,
    n: int,
    tile_m: int,
    tile_n: int,
    cluster: int,
    target: Target,
    groups: int = 0,
    ctas: int = 1,
) -> Schedule:
    """Tiles and waves of an ``m`` by ``n`` output at ``ctas`` CTAs per SM."""
    used, rows = group_rows(groups, m)
    tiles_m = used * -(-rows // tile_m)
    return Schedule(tiles_m, -(-n // tile_n), max(1, ctas * target.sm_count // cluster))


def _schedule(design: Design, problem: Problem, config: Config | Plan, target: Target) -> Schedule:
    m = SYMBOLIC_M if problem.m is None else problem.m
    ctas = design.ctas_per_sm(config.tile_m)
    tile = (config.tile_m, config.tile_n, config.cluster)
    return schedule(m, problem.n, *tile, target, problem.groups, ctas)


def schedule_of(plan: Plan, target: Target) -> Schedule:
    """Tiles and waves of a plan's gemm."""
    return _schedule(budget.DESIGNS[plan.kernel], plan.problem, plan, target)


def solve(
    problem: Problem, target: Target | str, *, kernel: str | None = None, **forced: int
) -> Plan:
    """Plans one gemm (and its activation quantizer) for ``target``.

    Args:
      problem: shapes and dtypes, per device.
      target: a :class:`~jax_w4a4.plan.targets.Target` or its name.
      kernel: a name in ``budget.DESIGNS``; None for the target's best that takes the problem,
        with the measured choices of :mod:`~jax_w4a4.plan.tuning` where it has any.
      **forced: any of tile_m, tile_n, cluster, main_stages, lora_stages, store_stages, group_m,
        promote_k, quantizer (1, 2 or 5, see :class:`~jax_w4a4.plan.budget.QuantizerPlan`),
        down_ahead (0, or 4 CTAs that divide K, see :class:`~jax_w4a4.plan.budget.DownPlan`), taken
        as given instead of chosen. Only a forced ``main_stages`` of a design without a kernel can
        be below 2.

    Raises:
      NotImplementedError: no kernel design covers this target or problem; names the way out.
      DoesNotFitError: a ValueError; nothing fits the target's shared memory, with the account of
        what was tried.
      ValueError: an unknown kernel, a kernel made for another target, a tile the design lacks.
      TypeError: an unknown forced choice.
    """
    unknown = set(forced) - set(FORCIBLE)
    if unknown:
        raise TypeError(
            f"jax_w4a4.plan: cannot force {', '.join(sorted(unknown))}; "
            f"expected any of {', '.join(FORCIBLE)}"
        )
    for name, value in forced.items():
        # The kernels take 32-bit integers.
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ValueError(
                f"jax_w4a4.plan: forced {name} is {value!r}; expected an integer from 0 to 2^31 - 1"
            )
    if kernel is not None and kernel not in tuple(budget.DESIGNS):
        raise ValueError(
            f"jax_w4a4.plan: unknown kernel {kernel!r}; expected one of {', '.join(budget.DESIGNS)}"
        )
    target = targets.get(target)
    tuned = tuning.lookup(problem, target.name) if kernel is None and not forced else None
    if tuned is not None:
        found = _solve(problem, target, tuned.kernel, tuned.choices)
        return dataclasses.replace(found, reasons=(f"tuned {tuned}", *found.reasons))
    return _solve(problem, target, kernel, tuple(sorted(forced.items())))


@functools.lru_cache(maxsize=4096)
def _solve(
    problem: Problem, target: Target, kernel: str | None, forced: tuple[tuple[str, int], ...]
) -> Plan:
    choice = dict(forced)
    design, why_design = _design(problem, target, kernel, choice)
    found: list[_Candidate] = []
    refused: list[str] = []
    for tile_m, tile_n, cluster in _tiles(design, problem, choice):
        for lora in _lora_choices(design, problem, choice):
            step = design.step(problem, tile_m, tile_n)
            config = Config(tile_m, tile_n, step, cluster, 0, lora, 0)
            fitted = _fit(design, problem, target, config, choice)
            if isinstance(fitted, str):
                refused.append(fitted)
            else:
                found.append(_Candidate(_cost(design, problem, target, fitted), fitted))
    if not found:
        raise DoesNotFitError(
            f"jax_w4a4.plan: nothing fits {target.smem_bytes} B of shared memory per CTA on "
            f"{target.name} for {design.name} at rank {problem.rank}, {problem.format}:\n  "
            + "\n  ".join(refused)
        )
    found.sort(key=lambda c: (not design.runs(c.config.lora_stages), *c.order()))
    best = found[0].config
    rows, regions, smem = _place(design, problem, target, best)
    group_m, why_group = _group_m(design, problem, best, choice)
    promote_k, why_path = _path(design, problem, choice)
    smem = max(smem, design.least_smem)
    quantizer = _quantizer(design, problem, target, best, choice)
    quantizer = _down_ahead(design, problem, target, best, smem, quantizer, choice)
    down = quantizer.down
    needed = max(quantizer.smem_bytes, down.smem_bytes if down else 0)
    if needed > target.smem_bytes:
        raise DoesNotFitError(
            f"jax_w4a4.plan: the activation quantizer needs {needed} of {target.smem_bytes} B of "
            f"shared memory per CTA on {target.name}"
        )
    return Plan(
        schema=SCHEMA,
        kernel=design.name,
        target=target.name,
        cc=target.cc,
        tile_m=best.tile_m,
        tile_n=best.tile_n,
        tile_k=best.tile_k,
        cluster=best.cluster,
        main_stages=best.main_stages,
        lora_stages=best.lora_stages,
        store_stages=best.store_stages,
        threads=design.threads_of(best.tile_m),
        smem_bytes=smem,
        group_m=group_m,
        promote_k=promote_k,
        regions=regions,
        rows=rows,
        reasons=(
            *why_design,
            *why_path,
            *_reasons(design, problem, target, found, refused, choice),
            *why_group,
        ),
        quantizer=quantizer,
        problem=problem,
    )


@dataclasses.dataclass(frozen=True)
class _Candidate:
    cost: float
    config: Config

    def order(self) -> tuple:
        """Cheapest first; then the larger tile, more main stages, fewer LoRA buffers."""
        c = self.config
        return (self.cost, -c.tile_m * c.tile_n, -c.main_stages, c.lora_stages)


def _way_out(problem: Problem, target: Target, kernel: str | None, forced: dict[str, int]) -> str:
    """What to do where a problem has no design: linear codes if those have one. For refusals only,
    as it looks for a design once more."""
    if problem.sign_order == "sorted":
        try:
            _design(dataclasses.replace(problem, sign_order="linear"), target, kernel, forced)
            return "use w.linear(), which undoes w.prepare(), or implementation='xla'"
        except (NotImplementedError, ValueError):
            pass
    return "use implementation='xla'"


def _design(
    problem: Problem, target: Target, kernel: str | None, forced: dict[str, int]
) -> tuple[Design, tuple[str, ...]]:
    """The design to plan with, and why not the target's first."""
    way_out = functools.partial(_way_out, problem, target, kernel, forced)
    if problem.groups:
        return _grouped_design(problem, target, kernel, way_out), ()
    if kernel is None:
        names = _DEFAULT_KERNELS.get(target.cc)
        if names is None:
            raise NotImplementedError(
                f"jax_w4a4.plan: no kernel design for {target.name} ({target.chip}) yet; "
                f"{way_out()}"
            )
        last, reasons = names[-1], []
        for name in names[:-1]:
            why = _WHY_NOT[name](problem, target, forced)
            if why is None:
                last = name
                break
            reasons.append((name, why))
        few = problem.m is not None and problem.m <= _FEW_ROWS
        told = [(name, why) for name, why in reasons if name != "sm90_decode" or few]
        design = budget.DESIGNS[last]
        if (lacks := _order_lacks(problem, design)) is not None:
            others = "".join(f", {name}: {why}" for name, why in told)
            raise NotImplementedError(
                f"jax_w4a4.plan: no kernel for {target.name} takes this: {design.name}: "
                f"{lacks}{others}; {way_out()}"
            )
        return design, tuple(f"kernel {last} instead of {n}: {w}" for n, w in told)
    design = budget.DESIGNS[kernel]
    if target.cc not in design.ccs:
        raise ValueError(
            f"jax_w4a4.plan: kernel {kernel} is made for "
            f"{', '.join(f'sm_{cc}' for cc in sorted(design.ccs))}, not for {target.name}"
        )
    return _checked(problem, design, target, way_out), ()


def _grouped_design(
    problem: Problem, target: Target, kernel: str | None, way_out: Callable[[], str]
) -> Design:
    """The design for rows sorted by group."""
    name = _GROUPED_KERNELS.get(target.cc)
    if name is None or kernel not in (None, name):
        raise NotImplementedError(
            f"jax_w4a4.plan: {kernel or target.name} has no kernel for groups of rows; {way_out()}"
        )
    design = budget.DESIGNS[name]
    path = budget.v2_path(problem)
    why = _v2_lacks(problem)
    if why is None and path is not None and not path.grouped_tiles:
        precision = f" with precision={problem.precision!r}" if problem.precision else ""
        why = f"{problem.format} in blocks of {problem.block_size}{precision} is not built for it"
    if why is None:
        quantizer = _token_quantizer(problem, target, None, 2)
        why = quantizer if isinstance(quantizer, str) else None
    if why is not None:
        raise NotImplementedError(
            f"jax_w4a4.plan: kernel {name} cannot take this: {why}; {way_out()}"
        )
    return design


def _checked(
    problem: Problem, design: Design, target: Target, way_out: Callable[[], str]
) -> Design:
    if (lacks := _order_lacks(problem, design)) is not None:
        raise NotImplementedError(
            f"jax_w4a4.plan: kernel {design.name} cannot take this problem: {lacks}; {way_out()}"
        )
    if design.name in ("sm90_v1", "sm100_v1"):
        return design
    if design.grouped:
        raise NotImplementedError(
            f"jax_w4a4.plan: kernel {design.name} takes a weight for each group of rows, not one; "
            "plan with kernel=None"
        )
    if design.private_layout:
        why = _decode_lacks(problem) if design.decode else _v2_lacks(problem)
        if why is not None:
            # Others read linear codes only.
            linear = problem.sign_order == "linear"
            other = "plan with kernel=None, which takes another kernel here, or " if linear else ""
            raise NotImplementedError(
                f"jax_w4a4.plan: kernel {design.name} cannot take this problem: {why}; "
                f"{other}{way_out()}"
            )
        return design
    if design.name == "sm100_v2":
        why = _sm100_lacks(problem)
        if why is not None:
            raise NotImplementedError(
                f"jax_w4a4.plan: kernel sm100_v2 cannot take this problem: {why}; plan with "
                f"kernel=None, which takes sm100_v1 here, or {way_out()}"
            )
        return design
    if problem.format == "int4":
        raise NotImplementedError(
            f"jax_w4a4.plan: {design.name} has no int4 path ({target.name} has no 4-bit "
            f"integer MMA); {way_out()}, or a weight in nvfp4 or mxfp4"
        )
    if problem.rank and budget.ITEMSIZE[problem.lora_dtype] != 2:
        raise NotImplementedError(
            f"jax_w4a4.plan: {design.name} takes lora_up in bfloat16 or float16, got "
            f"{problem.lora_dtype}; cast lora_up, or {way_out()}"
        )
    return design


def _order_lacks(problem: Problem, design: Design) -> str | None:
    """Why a design can't read the codes' sign order, None if it can."""
    if problem.n and problem.sign_order == "sorted" and not design.private_layout:
        return "it has no path for a prepared weight, whose signs are sorted"
    return None


def _v2_lacks(problem: Problem) -> str | None:
    """What sm90_v2 has no code for, None if it can run the problem."""
    path = budget.v2_path(problem)
    if path is None and problem.format == "mxfp4":
        return "a prepared weight with precision 'highest' is not built"
    if path is None:
        return f"int4 in blocks of {problem.block_size} with precision 'highest' is not built yet"
    if path.name == "Int4Row" and problem.k_pad > _V2_MOST_INT4_K:
        return f"K is {problem.k_pad}, int32 sums hold up to {_V2_MOST_INT4_K}"
    if problem.out_dtype != "bfloat16":
        return f"the result is {problem.out_dtype}, it stores bfloat16 only"
    if problem.rank and problem.lora_dtype != "bfloat16":
        return f"lora_up is {problem.lora_dtype}, its low-rank MMA takes bfloat16"
    if problem.rank % 16 or problem.rank > _V2_MOST_RANK:
        return f"rank {problem.rank} is not a multiple of 16 up to {_V2_MOST_RANK}"
    return None


def _sm100_lacks(problem: Problem) -> str | None:
    """What sm100_v2 has no code for, None if it can run the problem."""
    if problem.format == "int4":
        return "it has no int4 path, the chip has no 4-bit integer MMA"
    if budget.ITEMSIZE[problem.out_dtype] != 2:
        return f"the result is {problem.out_dtype}, it stores bfloat16 and float16"
    if problem.rank and budget.ITEMSIZE[problem.lora_dtype] != 2:
        return f"lora_up is {problem.lora_dtype}, its low-rank MMA takes bfloat16 and float16"
    if problem.rank % 8:
        return f"rank {problem.rank} is not a multiple of 8"
    return None


def _why_not_sm100(problem: Problem, target: Target, forced: dict[str, int]) -> str | None:
    """Why sm100_v2 is not chosen by itself, None if it is."""
    if problem.n == 0:
        return "an activation that is quantized on its own has the public layout"
    lacks = _sm100_lacks(problem)
    if lacks is not None:
        return lacks
    if problem.m is not None and problem.m < _SM100_LEAST_M:
        return f"{problem.m} rows, it is made for {_SM100_LEAST_M} and more"
    return None


def _decode_lacks(problem: Problem) -> str | None:
    """What sm90_decode has no code for, None if it can run the problem."""
    most = budget.DECODE_MOST_TOKENS
    if problem.m is None:
        return "M is symbolic"
    if not 1 <= problem.m <= most:
        return f"{problem.m} rows, it takes 1 to {most}"
    if problem.n == 0:
        return "N is 0"
    path = budget.v2_path(problem)
    if path is not None and path.name not in budget.DECODE_PATHS:
        return f"it has no path {path.name}"
    return _v2_lacks(problem)


def _why_not_decode(problem: Problem, target: Target, forced: dict[str, int]) -> str | None:
    """Why sm90_decode is not chosen by itself, None if it is."""
    lacks = _decode_lacks(problem)
    if lacks is not None:
        return lacks
    design = budget.DESIGNS["sm90_decode"]
    return _no_tile(design, problem, target, forced) or _too_many_rows(
        design, problem, target, forced
    )


def _too_many_rows(
    design: Design, problem: Problem, target: Target, forced: dict[str, int]
) -> str | None:
    """Why sm90_v2 is taken for more than 64 rows, None if it is not.

    One tile of 128 tokens is faster than sm90_v2 with mxfp4 however many waves there are, by 2 to
    5 % (bench/results/decode_128_kernels_h200.json), else in one wave: the models of both kernels
    have more up to 1.7 times slower. Two tiles are in one wave with mxfp4 (9 to 34 %) and nvfp4 (3
    to 14 %), up to rank 32: of more LoRA-down was not measured. Of int4 two tiles of 96 tokens are
    (24 to 40 %; bench/results/decode_96_tokens_h200.json), of 128 they are not (8192x8192 5 %
    faster, 4096x4096 5 % slower; bench/results/decode_token_tiles_h200.json). Three are with
    mxfp4 at K = 4096 where LoRA-down is in their launch (4096x4096, 257 and 384 rows: 22 and 19 %,
    bench/results/decode_three_tiles_h200.json); with LoRA-down in the quantizer's launch, in
    several waves, 384 and 512 rows took 6 and 15 % longer than sm90_v2.
    """
    if problem.m is None or problem.m <= 64:
        return None
    tile = budget.DECODE_TOKENS[-1]
    if problem.m <= tile and problem.format == "mxfp4":
        return None
    most = 3 if problem.format == "mxfp4" and problem.k_pad == _THREE_TILES_K else 2
    if problem.m > most * tile:
        return f"{problem.m} rows, more than {most} tiles of {tile} are not always faster"
    if problem.m > 2 * budget.DECODE_PAIR_TOKENS and problem.format == "int4":
        return f"{problem.m} rows of int4 in two tiles of {tile}, which are not always faster"
    if problem.m > tile and problem.rank > budget.DOWN_AHEAD_RANK:
        return f"{problem.m} rows in tiles of {tile} at rank {problem.rank}, not measured"
    fits = _fits(design, problem, target, _tiles(design, problem, forced), forced)
    best = min(
        (fit for fit in fits if not isinstance(fit, str)),
        key=functools.partial(_cost, design, problem, target),
        default=None,
    )
    if best is None:
        return None
    where = _schedule(design, problem, best, target)
    if where.waves > 1:
        return (
            f"{problem.m} rows of {problem.format} in {where.waves} waves, which was not measured"
        )
    loses = _ahead_loses(design, problem, target, best) if problem.rank else None
    if problem.m > 2 * tile and loses is not None:
        return f"{problem.m} rows with LoRA-down in the quantizer's launch: {loses}"
    return None


def _fits(
    design: Design,
    problem: Problem,
    target: Target,
    tiles: Sequence[tuple[int, int, int]],
    forced: dict[str, int],
) -> list[Config | str]:
    """`_fit` of tiles without dedicated LoRA stages."""
    configs = [Config(*t[:2], design.step(problem, *t[:2]), t[2], 0, 0, 0) for t in tiles]
    return [_fit(design, problem, target, config, forced) for config in configs]


def _no_tile(
    design: Design, problem: Problem, target: Target, forced: dict[str, int]
) -> str | None:
    """Why no tile of a design will do, None if one does."""
    try:
        tiles = _tiles(design, problem, forced)
    except ValueError as error:
        return str(error).removeprefix("jax_w4a4.plan: ")
    if all(isinstance(fit, str) for fit in _fits(design, problem, target, tiles, {})):
        return f"no tile of it fits {target.smem_bytes} B of shared memory"
    return None


def _why_not_v2(problem: Problem, target: Target, forced: dict[str, int]) -> str | None:
    """Why sm90_v2 is not chosen by itself, None if it is.

    With few rows, where sm90_decode does not take them, it has no measurements of its own, but one
    wave of sm90_v1 takes 240 us at K = 3840 (bench_sm90_v1_h200.json) and one of sm90_v2 20 us.
    """
    if problem.n == 0:
        return "an activation that is quantized on its own has the public layout"
    lacks = _v2_lacks(problem)
    if lacks is not None:
        return lacks
    return _no_tile(budget.DESIGNS["sm90_v2"], problem, target, forced)


# Why a kernel is not chosen by itself; the first of _DEFAULT_KERNELS without a reason is.
_WHY_NOT = {
    "sm90_decode": _why_not_decode,
    "sm90_v2": _why_not_v2,
    "sm100_v2": _why_not_sm100,
}


def _quantizer(
    design: Design, problem: Problem, target: Target, best: Config, forced: dict[str, int]
) -> QuantizerPlan:
    """The activation quantizer's launch, with the reason where there is a choice."""
    asked = forced.get("quantizer")
    if asked not in (None, 1, 2, 5):
        raise ValueError(f"jax_w4a4.plan: forced quantizer is {asked}; expected 1, 2 or 5")
    if not design.private_layout:
        if asked in (2, 5):
            raise ValueError(
                f"jax_w4a4.plan: quantizer {asked} writes the layout of sm90_v2 and sm90_decode, "
                f"not of {design.name}"
            )
        # The gemms of v1 share a handler with their own quantizer.
        kernel = 4 if design.scale_atoms else 3 if problem.n == 0 else None
        if kernel is None or not design.code:
            return budget.quantizer_v1(problem)
        why = _token_quantizer(problem, target, best, kernel)
        if asked is None and isinstance(why, QuantizerPlan):
            return why
        if kernel == 3:
            return budget.quantizer_v1(problem)
        why = why if isinstance(why, str) else "forced by the caller"
        return dataclasses.replace(
            budget.quantizer_v1(problem),
            why=f"quantizer of the public layout, then a pass over the block scales: {why}",
        )
    if asked == 5 and not design.decode:
        raise ValueError("jax_w4a4.plan: quantizer 5 belongs to sm90_decode")
    kernel = asked if asked in (2, 5) else 5 if design.decode else 2
    found = _token_quantizer(problem, target, best, kernel)
    if isinstance(found, QuantizerPlan) and asked != 1:
        return found
    if design.grouped:
        raise ValueError(
            f"jax_w4a4.plan: {design.name} has quantizer 2 only, got quantizer={asked}"
        )
    if asked in (2, 5):
        raise ValueError(f"jax_w4a4.plan: quantizer {asked} cannot take this problem: {found}")
    why = "forced by the caller" if isinstance(found, QuantizerPlan) else found
    return dataclasses.replace(
        budget.quantizer_v1(problem),
        why=f"quantizer of the public layout, then a pass into the gemm's: {why}",
    )


def _token_quantizer(
    problem: Problem, target: Target, best: Config | None, kernel: int
) -> QuantizerPlan | str:
    """Launches of quantizer 2 to 5, or why there are none. `best`: the gemm's, for quantizer 5."""
    k = problem.k or problem.k_pad
    name = f"quantizer {kernel}"
    if k % 8:
        return f"{name} loads rows of whole 16 bytes, K is {k}"
    if kernel == 5:
        assert best is not None
        beside = budget.beside_decode(problem, best.tile_m, best.tile_n)
        plan = budget.decode_quantizer(problem, target.sm_count, beside)
    else:
        plan = budget.token_quantizer(problem, kernel)
    if plan is None:
        return f"{name} keeps a token in registers, K = {k} is too long"
    to = "to codes and block scales" if kernel in (3, 4) else "straight into the gemm's layout"
    text = f"{name}: one read of x, {to}, {plan.warps} warps hold a token in registers"
    if not problem.rank:
        return dataclasses.replace(plan, why=text)
    if problem.x_dtype != "bfloat16" or problem.lora_dtype != "bfloat16":
        return (
            f"LoRA-down beside {name} reads bfloat16, x is {problem.x_dtype} and lora_down "
            f"{problem.lora_dtype}"
        )
    if problem.lora_smoothed:
        return f"LoRA-down beside {name} reads x before smoothing"
    if target.cc >= 100:
        if problem.rank % 8:
            return f"LoRA-down beside {name} takes ranks that are a multiple of 8"
        cluster = 1
        down = budget.down_sm100(problem, target.smem_bytes)
    else:
        if problem.rank % 16 or problem.rank > _V2_MOST_RANK:
            return f"LoRA-down beside {name} takes ranks that are a multiple of 16 up to 256"
        if plan.down is not None:
            text += f"; LoRA-down in the same launch, K on {_ctas(plan.down.cluster)}"
            return dataclasses.replace(plan, why=text)
        cluster = _down_cluster(problem, target)
        down = budget.down_v2(problem, cluster, target.smem_bytes)
    text += (
        f"; LoRA-down beside it, {down.rows} tokens and K on {_ctas(cluster)}, "
        f"{_count(down.stages, 'stage')}"
    )
    return dataclasses.replace(plan, down=down, why=text)


def _down_ahead(
    design: Design,
    problem: Problem,
    target: Target,
    best: Config,
    smem: int,
    quantizer: QuantizerPlan,
    forced: dict[str, int],
) -> QuantizerPlan:
    """``quantizer``, with LoRA-down left to CTAs of the gemm's launch where that is faster: then x
    does not wait for it, and what the quantizer leaves of the SMs is the gemm's."""
    asked = forced.get("down_ahead")
    if asked not in (None, 0, budget.DOWN_AHEAD_CTAS):
        raise ValueError(
            f"jax_w4a4.plan: forced down_ahead is {asked}; expected 0 or {budget.DOWN_AHEAD_CTAS}"
        )
    if asked == 0:
        return quantizer
    why = _ahead_lacks(design, problem, best, quantizer)
    down = None
    if why is None:
        # A CTA of the quantizer that does not lie beside the gemm's has an SM of its own.
        beside = budget.beside_decode(problem, best.tile_m, best.tile_n)
        early = max(0, target.sm_count - (0 if beside else problem.m or 1))
        threads = design.threads_of(best.tile_m)
        down = budget.down_ahead(problem, best.tile_m, threads, smem, early)
        why = "the gemm's shared memory is not enough" if down is None else None
    if why is None and asked is None:
        why = _ahead_loses(design, problem, target, best)
    if why is not None:
        if asked:
            raise ValueError(f"jax_w4a4.plan: down_ahead={asked} cannot take this problem: {why}")
        return quantizer
    head = quantizer.why.partition("; LoRA-down")[0]
    text = f"LoRA-down by {down.ahead} CTAs of the gemm's launch, ahead of the others"
    return dataclasses.replace(quantizer, down=down, why=f"{head}; {text}")


def _ahead_lacks(
    design: Design, problem: Problem, best: Config, quantizer: QuantizerPlan
) -> str | None:
    """Why LoRA-down can't be in the gemm's launch, None if it can."""
    if not design.decode or quantizer.kernel != 5:
        return "it is for sm90_decode behind quantizer 5"
    if not 0 < problem.rank <= budget.DOWN_AHEAD_RANK:
        return f"rank is {problem.rank}, it takes up to {budget.DOWN_AHEAD_RANK}"
    if best.tile_m < budget.DOWN_AHEAD_LEAST_TILE_M:
        return f"tile_m is {best.tile_m}, it takes {budget.DOWN_AHEAD_LEAST_TILE_M} and more"
    if problem.m is None or problem.m > budget.DECODE_MOST_TOKENS:
        return f"{problem.m} rows, it takes up to {budget.DECODE_MOST_TOKENS}"
    return None


def _ahead_loses(design: Design, problem: Problem, target: Target, best: Config) -> str | None:
    """Why LoRA-down in the gemm's launch is slower, None if it is not, as far as that was measured
    (docs/notes.md, "LoRA-down in the gemm's launch")."""
    least_k = _LEAST_AHEAD_K[best.tile_m]
    if problem.k_pad < least_k:
        return f"K is {problem.k_pad}, it is faster from {least_k} on"
    ctas = _schedule(design, problem, best, target).tiles * best.cluster
    assert problem.m is not None
    ahead = budget.down_ahead_ctas(problem.m)
    # In several rounds the launch ends because CTAs are dispatched in the order of their numbers,
    # which no documentation promises: taken where it was measured, without clusters.
    rounds = -(-ctas // target.sm_count) if best.cluster == 1 else 1
    if ctas + ahead > rounds * target.sm_count:
        return f"{ctas} CTAs leave no {ahead} of {target.sm_count} SMs"
    return None


def _down_cluster(problem: Problem, target: Target) -> int:
    """CTAs that divide K: as many as still run in one wave, each with 64 k or more.

    On an H200, R = 128, 72 tokens: 14.1 us at 4352x3840 with 2 CTAs against 25 with 4, 39.5 us at
    8192x8192 with 1 against 47 with 2.
    """
    m = SYMBOLIC_M if problem.m is None else problem.m
    used, rows = group_rows(problem.groups, m)
    tiles = max(1, used * -(-rows // 72))
    steps = -(-(problem.k or problem.k_pad) // 64)
    return max(c for c in (1, 2, 4, 8) if c == 1 or (tiles * c <= target.sm_count and c <= steps))


def _path(design: Design, problem: Problem, forced: dict[str, int]) -> tuple[int, tuple[str, ...]]:
    """K elements per promotion, and the reason for the main loop's path."""
    path = budget.v2_path(problem) if design.private_layout else None
    asked = forced.get("promote_k")
    if path is None or not path.promote_k:
        if asked:
            raise ValueError(
                f"jax_w4a4.plan: promote_k={asked} needs kernel sm90_v2 on mxfp4 with "
                "precision='highest'"
            )
        return 0, (path.why,) if path and path.why else ()
    if asked is not None and (asked < path.tile_k or asked % path.tile_k):
        raise ValueError(
            f"jax_w4a4.plan: promote_k={asked}; expected a positive multiple of {path.tile_k}"
        )
    promote_k = path.promote_k if asked is None else asked
    return promote_k, (path.why.format(promote_k=promote_k),)


def _group_m(
    design: Design, problem: Problem, best: Config, forced: dict[str, int]
) -> tuple[int, tuple[str, ...]]:
    """m tiles per sweep over n."""
    if not design.group_m:
        if "group_m" in forced:
            raise ValueError(f"jax_w4a4.plan: {design.name} has no group_m")
        return 0, ()
    if "group_m" in forced:
        return max(1, forced["group_m"]), ("group_m forced by the caller",)
    if problem.m is None:
        return design.group_m, ()
    tiles = max(1, -(-group_rows(problem.groups, problem.m)[1] // best.tile_m))
    groups = -(-tiles // design.group_m)
    return -(-tiles // groups), (
        f"{_count(groups, 'group')} of up to {_count(-(-tiles // groups), 'm tile')}: a group's "
        "activations stay in L2 while the weights pass by once",
    )


def _tiles(design: Design, problem: Problem, forced: dict[str, int]) -> list[tuple[int, int, int]]:
    """The design's tiles that agree with what is forced."""
    keys = ("tile_m", "tile_n", "cluster")
    kept = [
        tile
        for tile in design.tiles_of(problem)
        if all(tile[i] == forced[key] for i, key in enumerate(keys) if key in forced)
    ]
    if not kept:
        asked = ", ".join(f"{key}={forced[key]}" for key in keys if key in forced)
        raise ValueError(
            f"jax_w4a4.plan: {design.name} has no tile with {asked}; its tiles (tile_m, tile_n, "
            f"cluster) are {', '.join(map(str, design.tiles_of(problem)))}"
        )
    return kept


def _lora_choices(design: Design, problem: Problem, forced: dict[str, int]) -> tuple[int, ...]:
    asked = forced.get("lora_stages")
    if problem.rank == 0:
        if asked:
            raise ValueError(
                f"jax_w4a4.plan: lora_stages={asked} without a low-rank branch; expected rank > 0"
            )
        return (0,)
    if asked is None:
        return design.lora_choices
    if len(design.lora_choices) == 1 and design.code and asked not in design.lora_choices:
        raise ValueError(
            f"jax_w4a4.plan: {design.name} has {_count(design.lora_choices[0], 'LoRA stage')} at "
            f"rank {problem.rank}, got lora_stages={asked}"
        )
    return (asked,)


def _place(
    design: Design, problem: Problem, target: Target, config: Config
) -> tuple[tuple[Row, ...], tuple[Region, ...], int]:
    rows = design.rows(problem, target, config)
    regions, smem = budget.layout(rows, config.cluster, design.align, design.interleaved)
    return rows, regions, smem


def _smem(design: Design, problem: Problem, target: Target, config: Config) -> int:
    return _place(design, problem, target, config)[2]


def _fit(
    design: Design, problem: Problem, target: Target, config: Config, forced: dict[str, int]
) -> Config | str:
    """``config`` with as many main stages as fit, then store stages; or why it does not fit."""
    store = forced.get("store_stages", design.min_store_stages)
    if store and not design.min_store_stages:
        return f"{store} store stages forced, {design.name} stores from registers"
    if design.implemented and store < design.min_store_stages:
        return f"{store} store stages forced, {design.name} needs {design.min_store_stages} or more"
    if design.private_layout and store != design.min_store_stages:
        return f"{store} store stages forced, {design.name} has {design.min_store_stages}"
    config = dataclasses.replace(config, store_stages=store)

    def smem(**changes: int) -> int:
        return _smem(design, problem, target, dataclasses.replace(config, **changes))

    most = design.max_main_stages
    capacity = design.capacity(target, config.tile_m)
    capacity -= design.spare(problem, config.tile_m, config.tile_n)
    if "main_stages" in forced:
        main = forced["main_stages"]
        if most is not None and main > most:
            return f"{main} main stages forced, {design.name} has at most {most}"
        if design.implemented and main < 2:
            return f"{_count(main, 'main stage')} forced, {design.name} needs 2 or more"
    else:
        main = 0
        weight = budget.weight_stage_bytes(config)
        in_flight = design.most_weight_bytes
        while (
            (most is None or main < most)
            and (in_flight is None or main < 2 or (main + 1) * weight <= in_flight)
            and smem(main_stages=main + 1) <= capacity
        ):
            main += 1
    fixed = smem(main_stages=0)
    if ("main_stages" not in forced and main < 2) or smem(main_stages=main) > capacity:
        stage = smem(main_stages=2) - smem(main_stages=1)
        wanted = max(main, 2)
        lora = f", {_count(config.lora_stages, 'dedicated LoRA stage')}" if problem.rank else ""
        return (
            f"tile {config.tile_m}x{config.tile_n} on {_ctas(config.cluster)}{lora}: {fixed} B "
            f"without the main ring and {stage} B per main stage, so {wanted} main stages need "
            f"{smem(main_stages=wanted)} of {capacity} B"
        )
    config = dataclasses.replace(config, main_stages=main)
    if design.grow_store and "store_stages" not in forced:
        while smem(store_stages=store + 1) <= capacity:
            store += 1
    return dataclasses.replace(config, store_stages=store)


def _cost(design: Design, problem: Problem, target: Target, config: Config) -> float:
    """What the planner minimises. Comparable only between configurations of one design."""
    if design.decode:
        return _decode_seconds(problem, target, config)
    if design.private_layout:
        return _v2_seconds(design, problem, target, config)
    if not design.persistent:
        if problem.m is None:
            return abs(config.tile_m - 64)
        where = schedule(problem.m, problem.n, config.tile_m, config.tile_n, config.cluster, target)
        return where.waves * (config.tile_m + _EXPAND_ROWS)
    return _seconds(design, problem, target, config)


def _seconds(design: Design, problem: Problem, target: Target, config: Config) -> float:
    """Wave model of the persistent tcgen05 designs, floored by DRAM traffic.

    A step takes its MMA time plus the share of the load latency that ``main_stages`` buffers in
    flight leave exposed. A 64-rank LoRA step has the MMA time of a 256-element K step (a quarter
    of the FLOP at a quarter of the rate); streamed, it also pays the ring's latency. The store
    of a tile is hidden when a second accumulator exists.
    """
    m = SYMBOLIC_M if problem.m is None else problem.m
    where = schedule(m, problem.n, config.tile_m, config.tile_n, config.cluster, target)
    share = config.cluster / target.sm_count
    mma = budget.step_flops(config) / (target.peak_fp4 * share)
    exposed = _LOAD_LATENCY_S / config.main_stages if config.main_stages else math.inf
    k_steps = -(-problem.k_pad // config.tile_k)
    lora = budget.lora_steps(problem) if problem.rank else 0
    tile = k_steps * (mma + exposed)
    tile += lora * (mma if config.lora_stages else mma + exposed)
    if config.lora_stages == 1:
        tile += _LOAD_LATENCY_S  # nothing prefetches the next tile's LoRA operands
    accumulator = next(
        row for row in design.rows(problem, target, config) if row.name == "accumulator"
    )
    if accumulator.stages < 2:
        tile += budget.output_tile_bytes(problem, config) / (target.hbm_bytes_per_s * share)
    return max(
        where.waves * tile, budget.gemm_traffic(problem, m).total_bytes / target.hbm_bytes_per_s
    )


def _v2_seconds(design: Design, problem: Problem, target: Target, config: Config) -> float:
    """Wave model of sm90_v2, floored by DRAM traffic; constants and their source above.

    A step takes at least the share of the load latency that the ring leaves exposed. L2 traffic
    has no term: one CTA and a pair with half the activation reads measured the same.
    """
    m = SYMBOLIC_M if problem.m is None else problem.m
    where = _schedule(design, problem, config, target)
    path = budget.v2_path(problem)
    assert path is not None, problem
    fitted = _V2_FITTED_AS.get(path.name, path.name)
    columns = config.tile_m + _V2_FIXED_ROWS[fitted]
    exposed = _LOAD_LATENCY_S / config.main_stages if config.main_stages else math.inf
    step = max(columns * _V2_COLUMN_S[fitted], exposed)
    ranks = max(config.tile_m * _V2_RANK_S, exposed)
    tile = -(-problem.k_pad // config.tile_k) * step + config.tile_m * _V2_EPILOGUE_S
    if problem.rank:
        tile += budget.lora_steps(problem, 64) * ranks
    # CTAs of one SM share what the constants are rates of.
    tile *= min(design.ctas_per_sm(config.tile_m), max(1, -(-where.tiles // target.sm_count)))
    moved = budget.gemm_traffic(problem, m, private=True).total_bytes
    return max(where.waves * tile, moved / target.hbm_bytes_per_s)


def _decode_seconds(problem: Problem, target: Target, config: Config) -> float:
    """Model of sm90_decode: a wave takes the slowest of memory, an SM's share and the stages."""
    cluster = config.cluster
    where = _schedule(budget.DESIGNS["sm90_decode"], problem, config, target)
    # A weight tile's CTAs run at once, and one of them reads it from memory, the others from L2.
    reading = -(-min(where.tiles, where.groups) // max(1, where.tiles_m)) * cluster
    per_cta = budget.decode_cta_bytes(problem, config)
    stream = max(
        reading * per_cta / _DECODE_CHIP_BYTES_S,
        per_cta / _DECODE_SM_BYTES_S,
        budget.decode_steps(problem, config) * _decode_step_seconds(problem, config),
    )
    fixed = _DECODE_FIXED_S + (_DECODE_MEET_S if cluster > 1 else 0.0)
    return where.waves * (fixed + stream)


def _decode_step_seconds(problem: Problem, config: Config) -> float:
    """A stage: the work of the warpgroups, or its share of the time that fills a slot again."""
    rows = budget.decode_shape(config.tile_m, config.tile_n)[0]
    if config.tile_m > 64:
        path = budget.v2_path(problem)
        assert path is not None, problem
        seconds = _DECODE_MANY_STEP_S[path.act_bytes, config.tile_m][rows]
    else:
        step, token = _DECODE_STEP_S[rows]
        seconds = step + config.tile_m * token
        if rows == 32:  # fitted where a stage was 1024 long
            seconds *= config.tile_k / 1024
    return max(seconds, _DECODE_REFILL_S / max(config.main_stages, 1))


def _reasons(
    design: Design,
    problem: Problem,
    target: Target,
    found: list[_Candidate],
    refused: list[str],
    forced: dict[str, int],
) -> tuple[str, ...]:
    best = found[0].config

    def smem(**changes: int) -> int:
        return _smem(design, problem, target, dataclasses.replace(best, **changes))

    return (
        _why_tile(design, problem, target, found, forced),
        _why_main(design, problem, best, target, smem, forced),
        _why_lora(design, problem, target, found, forced),
        _why_store(design, best, target, smem, forced),
        *_why_accumulator(design, problem, target, best),
        *_why_stream(design, problem, found[0]),
        *(f"refused {line}" for line in _told(design, refused)),
    )


def _why_stream(design: Design, problem: Problem, best: _Candidate) -> tuple[str, ...]:
    """What a kernel that is bound by its weights is expected to read them with."""
    if not design.decode:
        return ()
    config = best.config
    moved = budget.decode_cta_bytes(problem, config) // config.tile_n * config.cluster * problem.n
    shares = "" if config.cluster == 1 else f"; {config.cluster} CTAs divide K"
    tiles = -(-(problem.m or 1) // config.tile_m)
    readers = f", read by each of {tiles} tiles of tokens, the first from memory"
    return (
        f"{moved / 1e6:.1f} MB of weights and scales{readers if tiles > 1 else ''}, "
        f"{moved / best.cost / 1e12:.2f} TB/s computed{shares}",
    )


def _told(design: Design, refused: list[str]) -> list[str]:
    """Refusals worth printing: the decode kernel has a tile for every eight rows."""
    if not design.decode or len(refused) < 2:
        return refused
    return [f"{_count(len(refused), 'tile')} that do not fit, {refused[0]}"]


def _ctas(cluster: int) -> str:
    return "one CTA" if cluster == 1 else f"{cluster} CTAs"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _why_tile(
    design: Design,
    problem: Problem,
    target: Target,
    found: list[_Candidate],
    forced: dict[str, int],
) -> str:
    best = found[0].config
    name = f"tile {best.tile_m}x{best.tile_n} on {_ctas(best.cluster)}"
    other = next((c for c in found if c.config.tile() != best.tile()), None)
    if other is None:
        given = {"tile_m", "tile_n", "cluster"} & set(forced)
        return f"{name}: {'forced by the caller' if given else 'the only tile that fits'}"
    if problem.m is None and design.name == "sm90_v1":
        return f"{name}: M is symbolic, the middle tile is taken"
    m = SYMBOLIC_M if problem.m is None else problem.m
    rows = f"{m} rows assumed for symbolic M" if problem.m is None else _count(m, "row")
    if problem.groups:
        used, each = group_rows(problem.groups, m)
        rows += f" in {_count(problem.groups, 'group')}, taken as {used} of {each}"
    text = []
    for candidate in (found[0], other):
        c = candidate.config
        where = _schedule(design, problem, c, target)
        cost = (
            f"{candidate.cost * 1e6:.1f} us computed"
            if design.name != "sm90_v1"
            else f"cost {candidate.cost:.0f} = waves * (tile_m + {_EXPAND_ROWS})"
        )
        text.append(
            f"{_count(where.tiles, 'tile')} in {_count(where.waves, 'wave')} of {where.groups}, "
            f"{cost}"
        )
    return (
        f"{name} for {rows}: {text[0]}; next best {other.config.tile_m}x{other.config.tile_n} on "
        f"{_ctas(other.config.cluster)}: {text[1]}"
    )


def _why_main(
    design: Design,
    problem: Problem,
    best: Config,
    target: Target,
    smem: Callable[..., int],
    forced: dict[str, int],
) -> str:
    name = _count(best.main_stages, "main stage")
    capacity = design.capacity(target, best.tile_m)
    if "main_stages" in forced:
        return f"{name}: forced by the caller"
    if design.max_main_stages == best.main_stages and design.grow_main:
        return f"{name}: the most that the kernel takes"
    if design.max_main_stages == best.main_stages:
        left = capacity - smem()
        return f"{name}: the design double-buffers; {left} of {capacity} B stay unused"
    if design.most_weight_bytes is not None:
        weight = budget.weight_stage_bytes(best)
        if (best.main_stages + 1) * weight > design.most_weight_bytes:
            return (
                f"{name}: {best.main_stages * weight} B of weights in flight per SM, more is slower"
            )
    capacity -= design.spare(problem, best.tile_m, best.tile_n)
    store = forced.get("store_stages", design.min_store_stages)
    before = smem(store_stages=store)
    one_more = smem(store_stages=store, main_stages=best.main_stages + 1) - before
    return (
        f"{name}: one more needs {one_more} B and {capacity - before} of "
        f"{capacity} B are left beside {_count(store, 'store stage')}"
    )


def _why_lora(
    design: Design,
    problem: Problem,
    target: Target,
    found: list[_Candidate],
    forced: dict[str, int],
) -> str:
    best = found[0].config
    if problem.rank == 0:
        return "no LoRA buffers: rank 0"
    if design.decode:
        row = next(r for r in design.rows(problem, target, best) if r.name == "lora_act")
        peer = "" if best.cluster == 1 else " with what the peer sends"
        beside = f"{row.bytes(best.cluster)} B{peer} beside the main ring"
        if budget.decode_alone(best.tile_m, best.tile_n):
            return f"low-rank product at the end, each warp of its own rows: {beside}"
        return f"low-rank product on warps of its own, from L2: {beside}"
    if not design.persistent:
        return "LoRA operands lie over the main stages after the K loop and cost no bytes"
    name = _lora_name(design, problem, best)
    if "lora_stages" in forced:
        return f"{name}: forced by the caller"
    others = [c for c in found[1:] if c.config.tile() == best.tile()]
    if len(design.lora_choices) == 1:
        return f"{name}: it costs no main stage"
    if not others:
        return f"{name}: the only LoRA staging of this design that fits"
    return f"{name}: {found[0].cost * 1e6:.1f} us computed; " + ", ".join(
        f"{_lora_name(design, problem, c.config)} would leave "
        f"{_count(c.config.main_stages, 'main stage')} and take {c.cost * 1e6:.1f} us"
        for c in others
    )


def _lora_name(design: Design, problem: Problem, config: Config) -> str:
    if config.lora_stages:
        return _count(config.lora_stages, "dedicated LoRA stage")
    steps = budget.lora_steps(problem, design.lora_row_bytes)
    return f"LoRA streamed through the main ring ({_count(steps, 'extra step')})"


def _why_store(
    design: Design,
    best: Config,
    target: Target,
    smem: Callable[..., int],
    forced: dict[str, int],
) -> str:
    if design.min_store_stages == 0:
        return "no store stages: results go straight from registers"
    name = _count(best.store_stages, "store stage")
    if "store_stages" in forced:
        return f"{name}: forced by the caller"
    if design.decode and budget.decode_alone(best.tile_m, best.tile_n):
        return "results go straight from registers: a warpgroup has all of K"
    if design.decode:
        return "sums of the warpgroups lie over the main ring and cost no bytes"
    if not design.grow_store:
        return f"{name}: a whole tile, stored while the next K loop runs"
    one_more = smem(store_stages=best.store_stages + 1) - smem()
    return (
        f"{name}: at least {design.min_store_stages}, then what the main ring leaves; one more "
        f"needs {one_more} B and {design.capacity(target, best.tile_m) - smem()} B are left"
    )


def _why_accumulator(
    design: Design, problem: Problem, target: Target, best: Config
) -> tuple[str, ...]:
    rows = design.rows(problem, target, best)
    row = next(row for row in rows if row.name == "accumulator")
    if row.memory != "tmem":
        return ()
    if row.stages > 1:
        return (
            f"{_count(row.stages, 'accumulator')} ({row.note}): the store of a tile hides under "
            "the next K loop",
        )
    return (f"one accumulator ({row.note}): the next K loop waits until it is in registers",)
