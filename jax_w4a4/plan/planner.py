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
from collections.abc import Callable, Iterator

from jax_w4a4.plan import budget, targets
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

SCHEMA = 1

_DEFAULT_KERNEL = {90: "sm90_v1", 100: "sm100_v2", 103: "sm100_v2"}
_FORCIBLE = ("tile_m", "tile_n", "cluster", "main_stages", "lora_stages", "store_stages")

# Rows assumed where M is symbolic.
SYMBOLIC_M = 4096

# Loaded latency of one ring stage: fits 46.69 -> 32.13 us, the device times published for
# svdquant-kernels on a B200 when its main stages went from 2 to 4
# (90 K steps per CTA pair: (46.69 - 32.13) us / 90 = latency * (1/2 - 1/4)).
_LOAD_LATENCY_S = 650e-9

# sm90_v1: a wave costs the MMA of tile_m rows plus the expansion of the weight tile, which does
# not depend on tile_m and is put at this many rows' worth.
_EXPAND_ROWS = 32

# FFI attribute names of the regions, in the order of Plan.ffi_attrs.
_FFI_REGIONS = (
    ("weight", "weight"),
    ("act", "activation"),
    ("weight_scale", "weight_scale"),
    ("act_scale", "activation_scale"),
    ("lora_up", "lora_up"),
    ("lora_act", "lora_act"),
    ("aux", "aux"),
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
      kernel: ``"sm90_v1"``, ``"sm100_v2"``, or an account without a kernel (``"svdquant_v2"``).
      target, cc: architecture planned for.
      tile_m, tile_n, tile_k: tile of one group of ``cluster`` CTAs, and its K step.
      main_stages, lora_stages, store_stages: buffers of each ring; with a low-rank branch and
        ``lora_stages == 0`` LoRA is streamed through the main ring.
      threads: per CTA.
      smem_bytes: dynamic shared memory of the launch.
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

    def ffi_attrs(self) -> dict[str, int]:
        """The integers the FFI handlers read, in declaration order of the C++ struct.

        ``bytes_*`` are per stage, ``off_*`` count from the start of dynamic shared memory.

        Raises:
          NotImplementedError: the plan is an account without a kernel.
        """
        code = budget.DESIGNS[self.kernel].code
        if not code:
            raise NotImplementedError(
                f"jax_w4a4.plan: {self.kernel!r} is an account for comparison and has no kernel "
                "to launch; plan with kernel=None"
            )
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
        }
        regions = [(key, self.region(name)) for key, name in _FFI_REGIONS]
        attrs.update({f"off_{key}": region.offset for key, region in regions})
        attrs.update({f"bytes_{key}": region.bytes_per_stage for key, region in regions})
        attrs.update(
            q_rows=self.quantizer.rows,
            q_chunk_k=self.quantizer.chunk_k,
            q_threads=self.quantizer.threads,
            q_smem_bytes=self.quantizer.smem_bytes,
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


def schedule(m: int, n: int, tile_m: int, tile_n: int, cluster: int, target: Target) -> Schedule:
    """Tiles and waves of an ``m`` by ``n`` output at one CTA per SM."""
    return Schedule(-(-m // tile_m), -(-n // tile_n), max(1, target.sm_count // cluster))


def solve(
    problem: Problem, target: Target | str, *, kernel: str | None = None, **forced: int
) -> Plan:
    """Plans one gemm (and its activation quantizer) for ``target``.

    Args:
      problem: shapes and dtypes, per device.
      target: a :class:`~jax_w4a4.plan.targets.Target` or its name.
      kernel: a name in ``budget.DESIGNS``; None for the target's own.
      **forced: any of tile_m, tile_n, cluster, main_stages, lora_stages, store_stages,
        taken as given instead of chosen. Only a forced ``main_stages`` can be below 2.

    Raises:
      NotImplementedError: no kernel design covers this target or problem; names the way out.
      DoesNotFitError: a ValueError; nothing fits the target's shared memory, with the account of
        what was tried.
      ValueError: an unknown kernel, a kernel made for another target, a tile the design lacks.
      TypeError: an unknown forced choice.
    """
    unknown = set(forced) - set(_FORCIBLE)
    if unknown:
        raise TypeError(
            f"jax_w4a4.plan: cannot force {', '.join(sorted(unknown))}; "
            f"expected any of {', '.join(_FORCIBLE)}"
        )
    for name, value in forced.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"jax_w4a4.plan: forced {name} is {value!r}; expected an integer >= 0")
    return _solve(problem, targets.get(target), kernel, tuple(sorted(forced.items())))


@functools.lru_cache(maxsize=4096)
def _solve(
    problem: Problem, target: Target, kernel: str | None, forced: tuple[tuple[str, int], ...]
) -> Plan:
    design = _design(problem, target, kernel)
    choice = dict(forced)
    found: list[_Candidate] = []
    refused: list[str] = []
    for tile_m, tile_n, cluster in _tiles(design, choice):
        for lora in _lora_choices(design, problem, choice):
            config = Config(tile_m, tile_n, design.tile_k, cluster, 0, lora, 0)
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
    found.sort(key=_Candidate.order)
    best = found[0].config
    rows, regions, smem = _place(design, problem, target, best)
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
        threads=design.threads,
        smem_bytes=smem,
        regions=regions,
        rows=rows,
        reasons=_reasons(design, problem, target, found, refused, choice),
        quantizer=budget.quantizer_v1(problem),
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


def _design(problem: Problem, target: Target, kernel: str | None) -> Design:
    way_out = "use implementation='xla'"
    name = kernel if kernel is not None else _DEFAULT_KERNEL.get(target.cc)
    if name is None:
        raise NotImplementedError(
            f"jax_w4a4.plan: no kernel design for {target.name} ({target.chip}) yet; {way_out}"
        )
    design = budget.DESIGNS.get(name)
    if design is None:
        raise ValueError(
            f"jax_w4a4.plan: unknown kernel {name!r}; expected one of {', '.join(budget.DESIGNS)}"
        )
    if target.cc not in design.ccs:
        raise ValueError(
            f"jax_w4a4.plan: kernel {name} is made for "
            f"{', '.join(f'sm_{cc}' for cc in sorted(design.ccs))}, not for {target.name}"
        )
    if design.name != "sm90_v1":
        if problem.format == "int4":
            raise NotImplementedError(
                f"jax_w4a4.plan: {design.name} has no int4 path ({target.name} has no 4-bit "
                f"integer MMA); {way_out}, or a weight in nvfp4 or mxfp4"
            )
        if problem.rank and budget.ITEMSIZE[problem.lora_dtype] != 2:
            raise NotImplementedError(
                f"jax_w4a4.plan: {design.name} takes lora_up in bfloat16 or float16, got "
                f"{problem.lora_dtype}; cast lora_up, or {way_out}"
            )
    return design


def _tiles(design: Design, forced: dict[str, int]) -> list[tuple[int, int, int]]:
    """The design's tiles that agree with what is forced."""
    keys = ("tile_m", "tile_n", "cluster")
    kept = [
        tile
        for tile in design.tiles
        if all(tile[i] == forced[key] for i, key in enumerate(keys) if key in forced)
    ]
    if not kept:
        asked = ", ".join(f"{key}={forced[key]}" for key in keys if key in forced)
        raise ValueError(
            f"jax_w4a4.plan: {design.name} has no tile with {asked}; its tiles (tile_m, tile_n, "
            f"cluster) are {', '.join(map(str, design.tiles))}"
        )
    return kept


def _lora_choices(design: Design, problem: Problem, forced: dict[str, int]) -> tuple[int, ...]:
    if problem.rank == 0:
        return (0,)
    asked = forced.get("lora_stages")
    if asked is None:
        return design.lora_choices
    if not design.persistent and asked not in design.lora_choices:
        raise ValueError(
            f"jax_w4a4.plan: {design.name} has {design.lora_choices[0]} LoRA stage at rank "
            f"{problem.rank}, got lora_stages={asked}"
        )
    return (asked,)


def _place(
    design: Design, problem: Problem, target: Target, config: Config
) -> tuple[tuple[Row, ...], tuple[Region, ...], int]:
    rows = design.rows(problem, target, config)
    regions, smem = budget.layout(rows, config.cluster, design.align)
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
    config = dataclasses.replace(config, store_stages=store)

    def smem(**changes: int) -> int:
        return _smem(design, problem, target, dataclasses.replace(config, **changes))

    most = design.max_main_stages
    if "main_stages" in forced:
        main = forced["main_stages"]
        if most is not None and main > most:
            return f"{main} main stages forced, {design.name} has at most {most}"
    else:
        main = 0
        while (most is None or main < most) and smem(main_stages=main + 1) <= target.smem_bytes:
            main += 1
    fixed = smem(main_stages=0)
    if ("main_stages" not in forced and main < 2) or smem(main_stages=main) > target.smem_bytes:
        stage = smem(main_stages=2) - smem(main_stages=1)
        wanted = max(main, 2)
        lora = f", {_count(config.lora_stages, 'dedicated LoRA stage')}" if problem.rank else ""
        return (
            f"tile {config.tile_m}x{config.tile_n} on {_ctas(config.cluster)}{lora}: {fixed} B "
            f"without the main ring and {stage} B per main stage, so {wanted} main stages need "
            f"{smem(main_stages=wanted)} of {target.smem_bytes} B"
        )
    config = dataclasses.replace(config, main_stages=main)
    if design.grow_store and "store_stages" not in forced:
        while smem(store_stages=store + 1) <= target.smem_bytes:
            store += 1
    return dataclasses.replace(config, store_stages=store)


def _cost(design: Design, problem: Problem, target: Target, config: Config) -> float:
    """What the planner minimises. Comparable only between configurations of one design."""
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
        _why_main(design, best, target, smem, forced),
        _why_lora(design, problem, found, forced),
        _why_store(design, best, target, smem, forced),
        *_why_accumulator(design, problem, target, best),
        *(f"refused {line}" for line in refused),
    )


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
    if problem.m is None and not design.persistent:
        return f"{name}: M is symbolic, the middle tile is taken"
    m = SYMBOLIC_M if problem.m is None else problem.m
    rows = f"{m} rows assumed for symbolic M" if problem.m is None else _count(m, "row")
    text = []
    for candidate in (found[0], other):
        c = candidate.config
        where = schedule(m, problem.n, c.tile_m, c.tile_n, c.cluster, target)
        cost = (
            f"{candidate.cost * 1e6:.1f} us computed"
            if design.persistent
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
    best: Config,
    target: Target,
    smem: Callable[..., int],
    forced: dict[str, int],
) -> str:
    name = _count(best.main_stages, "main stage")
    if "main_stages" in forced:
        return f"{name}: forced by the caller"
    if design.max_main_stages == best.main_stages:
        left = target.smem_bytes - smem()
        return f"{name}: the design double-buffers; {left} of {target.smem_bytes} B stay unused"
    store = forced.get("store_stages", design.min_store_stages)
    before = smem(store_stages=store)
    one_more = smem(store_stages=store, main_stages=best.main_stages + 1) - before
    return (
        f"{name}: one more needs {one_more} B and {target.smem_bytes - before} of "
        f"{target.smem_bytes} B are left beside {_count(store, 'store stage')}"
    )


def _why_lora(
    design: Design, problem: Problem, found: list[_Candidate], forced: dict[str, int]
) -> str:
    best = found[0].config
    if problem.rank == 0:
        return "no LoRA buffers: rank 0"
    if not design.persistent:
        return "LoRA operands lie over the main stages after the K loop and cost no bytes"
    name = _lora_name(problem, best)
    if "lora_stages" in forced:
        return f"{name}: forced by the caller"
    others = [c for c in found[1:] if c.config.tile() == best.tile()]
    if not others:
        return f"{name}: the only LoRA staging of this design that fits"
    return f"{name}: {found[0].cost * 1e6:.1f} us computed; " + ", ".join(
        f"{_lora_name(problem, c.config)} would leave "
        f"{_count(c.config.main_stages, 'main stage')} and take {c.cost * 1e6:.1f} us"
        for c in others
    )


def _lora_name(problem: Problem, config: Config) -> str:
    if config.lora_stages:
        return _count(config.lora_stages, "dedicated LoRA stage")
    return (
        f"LoRA streamed through the main ring ({_count(budget.lora_steps(problem), 'extra step')})"
    )


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
    one_more = smem(store_stages=best.store_stages + 1) - smem()
    return (
        f"{name}: at least {design.min_store_stages}, then what the main ring leaves; one more "
        f"needs {one_more} B and {target.smem_bytes - smem()} B are left"
    )


def _why_accumulator(
    design: Design, problem: Problem, target: Target, best: Config
) -> tuple[str, ...]:
    rows = design.rows(problem, target, best)
    row = next(row for row in rows if row.name == "accumulator")
    if row.memory != "tmem":
        return ()
    if row.stages > 1:
        return (f"two accumulators ({row.note}): the store of a tile hides under the next K loop",)
    return (f"one accumulator ({row.note}): the store of a tile is exposed",)
