"""The parts of the self-test, and the process that runs them (one at a time, watched by runner.py).

A part returns what it did and what failed; `Session` runs the operator through the package's own
primitives and handlers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_w4a4 import _ffi, formats, plan, primitives, reference
from jax_w4a4.grouped import grouped_matmul
from jax_w4a4.selftest import probes, record
from jax_w4a4.selftest.probes import KINDS, PROBES, Call, Kind, Probe
from jax_w4a4.weight import Weight


class NoGpuError(RuntimeError):
    """There is nothing here to test."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel with a tile, or what the planner chooses where a side is 0; no kernel stands for the
    jnp reference."""

    kernel: str | None
    tile_m: int = 0
    tile_n: int = 0
    cluster: int = 1

    def __str__(self) -> str:
        if self.kernel is None:
            return "reference"
        tile = "x".join(str(side or "*") for side in (self.tile_m, self.tile_n))
        return f"{self.kernel} {tile} on {self.cluster} CTA"

    @property
    def few(self) -> bool:
        """Whether the kernel is made for few tokens."""
        return self.kernel is not None and plan.budget.DESIGNS[self.kernel].decode

    @property
    def sizes(self) -> probes.Sizes:
        if self.kernel is None:
            return probes.SMALL
        return probes.FEW if self.few else probes.LARGE


@functools.partial(
    jax.jit, static_argnames=("spec", "plan", "implementation"), donate_argnums=0, keep_unused=True
)
def _gemm(_, *operands, spec, plan, implementation):
    return primitives.gemm_p.bind(*operands, spec=spec, plan=plan, implementation=implementation)


@functools.partial(
    jax.jit, static_argnames=("spec", "plan", "implementation"), donate_argnums=0, keep_unused=True
)
def _matmul(_, *operands, spec, plan, implementation):
    return primitives.matmul_p.bind(*operands, spec=spec, plan=plan, implementation=implementation)


def _run(function: Callable, operands: list[Any], **static: Any) -> list[jax.Array]:
    """The results, in buffers that held NaN before: what a kernel leaves out shows."""
    bare = functools.partial(function.__wrapped__, None, **static)
    poisons = [
        jnp.asarray(np.full(int(np.prod(a.shape)) * a.dtype.itemsize, 255, np.uint8)
                    .view(a.dtype).reshape(a.shape))
        for a in jax.eval_shape(bare, *operands)
    ]  # fmt: skip
    return function(poisons, *operands, **static)


_NO_RANGE = np.zeros((0, 2), np.uint8)  # of block scales, which prepared weights carry
_VECTORS = ("act_global_scale", "weight_global_scale", "channel_scale", "bias")


class Session:
    """The operator on this machine.

    Attributes:
      target: what to plan for, None for the jnp reference.
    """

    def __init__(self, target: plan.Target | None):
        self.target = target

    @classmethod
    def here(cls) -> Session:
        """On the first CUDA device.

        Raises:
          NoGpuError: with what is missing.
        """
        if not _ffi.has_cuda():
            raise NoGpuError("this installation has no CUDA kernels (python -m jax_w4a4 info)")
        try:
            jax.local_devices(backend="cuda")
        except RuntimeError as error:
            raise NoGpuError(f"JAX has no CUDA device: {error}".split("\n")[0]) from None
        try:
            target = plan.targets.current()
        except NotImplementedError as error:
            raise NoGpuError(str(error)) from None
        session = cls(target)
        if not session.kernels():
            built = ", ".join(sorted(_ffi.KERNELS)) or "none"
            raise NoGpuError(f"this build has no kernel for {target.name} (it has: {built})")
        return session

    def kernels(self) -> list[str]:
        """Designs of this target that the build can launch, the newest first."""
        assert self.target is not None
        cc = self.target.cc
        return [
            name for name, design in reversed(list(plan.budget.DESIGNS.items()))
            if design.implemented and cc in design.ccs and name in _ffi.KERNELS
        ]  # fmt: skip

    def spec(self, kind: Kind, k: int, k_pad: int) -> formats.Spec:
        return formats.Spec(
            kind.format, k, k_pad, kind.block or k_pad, kind.scale_dtype, precision=kind.precision
        )

    def problem(self, kind: Kind, m: int, n: int, k: int, k_pad: int, rank: int) -> plan.Problem:
        half = "bfloat16"
        return plan.Problem(
            m, n, k_pad, rank, kind.format, kind.block or k_pad, half, half, half,
            kind.scale_dtype, k=k, precision=kind.precision,
        )  # fmt: skip

    def plan(self, variant: Variant, problem: plan.Problem) -> plan.Plan | None:
        if variant.kernel is None:
            return None
        names = {"tile_m": variant.tile_m, "tile_n": variant.tile_n, "cluster": variant.cluster}
        forced = {name: value for name, value in names.items() if value}
        return plan.solve(problem, self.target, kernel=variant.kernel, **forced)

    def variants(self, kind: Kind, clusters: Iterable[int] = (1, 2)) -> Iterator[Variant]:
        """Every kernel and tile that takes a format."""
        if self.target is None:
            if 1 in clusters:
                yield Variant(None)
            return
        for kernel in self.kernels():
            tiles = plan.budget.DESIGNS[kernel].tiles
            if Variant(kernel).few:
                # Its tiles follow from M and N.
                tiles = tuple((0, 0, cluster) for cluster in sorted({t[2] for t in tiles}))
            for tile in tiles:
                variant = Variant(kernel, *tile)
                m = 8 if variant.few else 72
                problem = self.problem(kind, m, 136, 2 * probes.K, 2 * probes.K, 64)
                if variant.cluster in clusters and self.takes(variant, problem):
                    yield variant

    def takes(self, variant: Variant, problem: plan.Problem) -> bool:
        """Whether the variant has a plan for a problem."""
        try:
            self.plan(variant, problem)
        except (NotImplementedError, ValueError):
            return False
        return True

    def calls(self, variant: Variant, calls: Iterable[Call]) -> Iterator[Call]:
        """Those that the variant takes."""
        for one in calls:
            if self.takes(variant, self.problem_of(one)):
                yield one

    def problem_of(self, call: Call) -> plan.Problem:
        return self.problem(call.kind, call.m, call.n, call.k, call.k, call.rank)

    def smallest(self, kind: Kind, cluster: int) -> list[Variant]:
        """Of each kernel the smallest tile."""
        found: dict[str | None, Variant] = {}
        for variant in self.variants(kind, (cluster,)):
            best = found.setdefault(variant.kernel, variant)
            if variant.tile_m * variant.tile_n < best.tile_m * best.tile_n:
                found[variant.kernel] = variant
        return list(found.values())

    def gemm(self, call: Call, variant: Variant) -> np.ndarray:
        """bf16 bits of y."""
        kind = call.kind
        spec = self.spec(kind, call.k, call.k)

        def array(name: str, dtype: str, shape: tuple[int, ...]) -> jax.Array:
            if name not in call.arrays:
                return jnp.zeros(shape, dtype)
            return jnp.asarray(call.arrays[name].view(getattr(ml_dtypes, dtype, dtype)))

        def vector(name: str) -> jax.Array:
            return array(name, "float32", (0,))

        operands = [
            array("packed", "uint8", ()),
            array("act_scale", kind.scale_dtype, ()),
            vector("act_global_scale"),
            array("lora_act", "bfloat16", (call.m, 0)),
            array("weight", "uint8", ()),
            array("weight_scale", kind.scale_dtype, ()),
            vector("weight_global_scale"),
            array("lora_up", "bfloat16", (call.n, 0)),
            vector("channel_scale"),
            vector("bias"),
            _NO_RANGE,
        ]
        y, *_ = _run(
            _gemm, operands, spec=spec, plan=self.plan(variant, self.problem_of(call)),
            implementation="cuda" if variant.kernel else "xla",
        )  # fmt: skip
        return np.asarray(y).view(np.uint16)


# ------------------------------------------------------------------------------------------------
# Parts
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What a part found.

    Attributes:
      checks: comparisons made.
      failures: what was wrong, one text each.
      facts: figures worth keeping.
    """

    checks: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, ok: bool, what: str) -> None:
        self.checks += 1
        if not ok:
            self.failures.append(what)


def preflight(session: Session) -> Outcome:
    """device, driver, build, one launch"""
    out = Outcome()
    device = jax.local_devices()[0]
    out.facts = {
        "gpu": device.device_kind,
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "sm_count": getattr(device, "core_count", None),
        "driver": record.driver_version(),
        "extension_sha256": record.extension_hash(),
        "jax": jax.__version__,
        "build": {k: v if isinstance(v, (str, bool)) else list(v or ())
                  for k, v in _ffi.build_info().items()},
    }  # fmt: skip
    if session.target is not None:
        out.facts["kernels"] = session.kernels()
        out.check(out.facts["driver"] is not None, "the driver's version cannot be read")
        archs = {arch.rstrip("af") for arch in _ffi.build_info()["cuda_archs"]}
        cc = str(session.target.cc)
        out.check(cc in archs, f"the build has machine code for {sorted(archs)}, not for {cc}")
    for variant in session.smallest(KINDS[0], 1):
        session.gemm(next(probes.BY_NAME["store"].calls(KINDS[0], variant.sizes)), variant)
        out.checks += 1
    return out


def probe(session: Session, which: Probe) -> Outcome:
    out = Outcome()
    for kind in KINDS:
        _probe(session, out, which, kind, session.smallest(kind, 1))
    return out


def _probe(session: Session, out: Outcome, which: Probe, kind: Kind, variants: list) -> None:
    for variant in variants:
        calls = list(session.calls(variant, which.calls(kind, variant.sizes)))
        results = [session.gemm(call, variant) for call in calls]
        wrong = probes.mismatches(which, calls, results)
        out.checks += len(calls)
        out.failures += [f"{kind}, {variant}: {text}" for text in wrong]


def pair(session: Session) -> Outcome:
    """two CTAs: multicast, cluster barriers, and what a pair divides"""
    out = Outcome()
    for kind in KINDS:
        for which in PROBES:
            _probe(session, out, which, kind, session.smallest(kind, 2))
    return out


def exact_call(kind: Kind, m: int, n: int, k: int, rank: int, seed: int) -> Call:
    """Small integers under powers of two: sums are exact in any order, in 13 bits as well."""
    rng = np.random.default_rng(seed)
    codes = np.array([kind.code(v) for v in (0, 0, 1, -1, 2, -2)], np.uint8)
    blocks = k // (kind.block or k)
    lora = {}
    if rank:
        lora = {"lora_act": rng.integers(-2, 3, (m, rank)).astype(float),
                "lora_up": rng.integers(-2, 3, (n, rank)).astype(float)}  # fmt: skip
    return probes.call(
        kind, codes[rng.integers(0, 6, (m, k))], codes[rng.integers(0, 6, (n, k))],
        act_exponents=rng.integers(0, 2, (m, blocks)),
        weight_exponents=rng.integers(-1, 1, (n, blocks)),
        channel_scale=rng.choice([-1.0, 0.5, 2.0], n),
        bias=rng.integers(-8, 9, n).astype(float), **lora,
    )  # fmt: skip


# M, N, K before padding, rank; the first for every tile. The last of EXACT_FEW has so many rows
# that a CTA takes 128 of them, and a warpgroup all of K.
EXACT = ((300, 600, 1056, 128), (1, 8, 32, 0), (70, 264, 416, 32), (257, 129, 608, 0))
EXACT_FEW = (
    (48, 600, 1056, 128), (1, 8, 32, 0), (13, 264, 416, 32), (64, 129, 608, 0),
    (101, 200, 1056, 48), (128, 8459, 672, 96),
)  # fmt: skip


def exact(session: Session) -> Outcome:
    """ragged sizes, ranks 0 to 128, every kernel and tile, bit for bit"""
    out = Outcome()
    for kind in KINDS:
        smallest = session.smallest(kind, 1) + session.smallest(kind, 2)
        for variant in session.variants(kind):
            shapes = EXACT_FEW if variant.few else EXACT
            calls = (
                exact_call(kind, m, n, formats.padded_k(k, kind.block), rank, k + rank)
                for m, n, k, rank in (shapes if variant in smallest else shapes[:1])
            )
            for one in session.calls(variant, calls):
                wrong = session.gemm(one, variant) != probes.bf16(one.want)
                out.check(
                    not wrong.any(),
                    f"{kind}, {variant}, {one.m}x{one.k}x{one.n} r{one.rank}: "
                    f"{np.count_nonzero(wrong)} of {wrong.size} cells are wrong",
                )
    return out


def _sum_loss(session: Session, kind: Kind, variant: Variant) -> float:
    """Part of the sum of all absolute terms that a result may be off by (docs/numerics.md)."""
    design = plan.budget.DESIGNS.get(variant.kernel or "")
    if design is None:
        return 2.0**-18
    if design.private_layout:
        path = plan.budget.v2_path(session.problem(kind, 1, 8, 128, 128, 0))
        return {"e5m2": 2.0**-11, "e4m3": 2.0**-10}.get(path.operand if path else "", 2.0**-15)
    # fp32 on the CUDA cores of Hopper; what tcgen05 keeps of 4-bit products is not published.
    return 2.0**-18 if 90 in design.ccs else 2.0**-11


def random(session: Session) -> Outcome:
    """random operands against float64, every cell within its bound"""
    out = Outcome()
    worst = 0.0
    for kind in KINDS:
        few = session.smallest(kind, 1) + session.smallest(kind, 2)
        for variant in few:
            one = random_call(
                kind, 13 if variant.few else 200, 264, formats.padded_k(1056, kind.block), 32
            )
            bound = np.abs(one.want) * 2.0**-8
            bound += _magnitude(one) * _sum_loss(session, kind, variant)
            got = probes.from_bf16(session.gemm(one, variant)).astype(float)
            ratio = np.nan_to_num(np.abs(got - one.want) / bound, nan=np.inf)
            worst = max(worst, float(ratio.max()))
            out.check(
                bool((ratio <= 1).all()),
                f"{kind}, {variant}: {np.count_nonzero(ratio > 1)} of {ratio.size} cells beyond "
                f"their bound, the worst {ratio.max():.3g} times",
            )
    out.facts["largest_error_over_bound"] = round(worst, 4)
    return out


def random_call(kind: Kind, m: int, n: int, k: int, rank: int) -> Call:
    rng = np.random.default_rng(rank + k)
    blocks = k // (kind.block or k)
    # nvfp4 "fastest" rounds values times scales; with one scale per row it rounds none.
    per_row = kind.precision == "fastest"

    def exponents(rows: int) -> np.ndarray:
        return rng.integers(-3, 4, (rows, 1 if per_row else blocks))

    return probes.call(
        kind, rng.integers(0, 16, (m, k), np.uint8), rng.integers(0, 16, (n, k), np.uint8),
        act_exponents=exponents(m), weight_exponents=exponents(n),
        lora_act=probes.from_bf16(probes.bf16(rng.standard_normal((m, rank)))).astype(float),
        lora_up=probes.from_bf16(probes.bf16(rng.standard_normal((n, rank)))).astype(float),
        channel_scale=rng.uniform(-1.5, 1.5, n).astype(np.float32).astype(float),
        bias=rng.standard_normal(n).astype(np.float32).astype(float),
    )  # fmt: skip


def _dtype(kind: Kind) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, kind.scale_dtype, kind.scale_dtype))


def _values(kind: Kind, packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    block = codes.shape[1] // scale.shape[1]
    return kind.values(codes) * np.repeat(scale.astype(float), block, 1)


def _magnitude(one: Call) -> np.ndarray:
    """The sum of the absolute terms of every cell."""
    a = one.arrays
    x, w = (
        np.abs(_values(one.kind, a[name], a[scale].view(_dtype(one.kind))))
        for name, scale in (("packed", "act_scale"), ("weight", "weight_scale"))
    )
    total = x @ w.T
    total *= np.abs(a["channel_scale"])
    total += np.abs(probes.from_bf16(a["lora_act"])) @ np.abs(probes.from_bf16(a["lora_up"])).T
    return total + np.abs(a["bias"])


def _whole(session: Session, kind: Kind, m: int, n: int, k: int, rank: int, seed: int = 0):
    """A function that runs the whole call from x and returns y; its operands; its spec."""
    rng = np.random.default_rng(seed)
    k_pad = formats.padded_k(k, kind.block)
    spec = session.spec(kind, k, k_pad)
    weight = exact_call(kind, 1, n, k_pad, 0, seed)
    bf = ml_dtypes.bfloat16
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-3, 4, (m, 1)))
    scale = weight.arrays["weight_scale"].view(_dtype(kind))
    operands = [
        jnp.asarray(x.astype(bf)),
        jnp.asarray(rng.uniform(0.5, 2, k).astype(np.float32)),
        jnp.zeros((0,), jnp.float32),
        jnp.asarray((rng.standard_normal((k, rank)) / np.sqrt(k)).astype(bf)),
        jnp.asarray(weight.arrays["weight"]),
        jnp.asarray(scale),
        jnp.zeros((0,), jnp.float32),
        jnp.asarray(rng.standard_normal((n, rank)).astype(bf)),
        jnp.asarray(rng.uniform(-1.5, 1.5, n).astype(np.float32)),
        jnp.asarray(rng.standard_normal(n).astype(np.float32)),
        jnp.asarray(_NO_RANGE),
    ]
    found = None
    if session.target is not None:
        problem = session.problem(kind, m, n, k, k_pad, rank)
        try:
            found = plan.solve(problem, session.target)
        except NotImplementedError:
            return None, operands, spec
    static = {"spec": spec, "plan": found, "implementation": "cuda" if found else "xla"}
    return (lambda: _run(_matmul, operands, **static)[0]), operands, spec


# M, K, rank for LoRA-down in sm90_decode's own launch, where CTAs wait for each other's sums; the
# last has two tiles of tokens, but for int4, which sm90_v2 takes.
DOWN_AHEAD = ((33, 4104, 32), (97, 8200, 16), (205, 8200, 32))
QUANTIZER = ((70, 416, 32), (300, 1032, 0), (257, 2048, 128), (5, 1032, 32), *DOWN_AHEAD)


def quantizer(session: Session) -> Outcome:
    """codes, scales and LoRA-down from x, and y from x, against the reference on the CPU"""
    out = Outcome()
    cpu = jax.local_devices(backend="cpu")[0]
    quantize = jax.jit(reference.quantize_activation_ref, static_argnames="spec")
    for kind in KINDS:
        for m, k, rank in QUANTIZER:
            # Those are of a kernel, and the reference takes long.
            if session.target is None and (m, k, rank) in DOWN_AHEAD:
                continue
            n = 264
            run, operands, spec = _whole(session, kind, m, n, k, rank, k)
            if run is None:
                continue
            where = f"{kind}, {m}x{k}x{n} r{rank}"
            xp, xs, la = map(np.asarray, quantize(*jax.device_put(operands[:4], cpu), spec=spec))
            found = None
            if session.target is not None:
                problem = session.problem(kind, m, 0, k, spec.k_pad, rank)
                found = plan.solve(problem, session.target)
            bind = functools.partial(
                primitives.quantize_p.bind, spec=spec, plan=found,
                implementation="cuda" if found else "xla",
            )  # fmt: skip
            codes, scales, down = map(np.asarray, jax.jit(bind)(*operands[:4]))
            out.check(codes.tobytes() == xp.tobytes(), f"{where}: codes differ")
            out.check(scales.tobytes() == xs.tobytes(), f"{where}: block scales differ")
            size = np.abs(np.asarray(operands[0], float)) @ np.abs(np.asarray(operands[3], float))
            la, down = la.astype(float), down.astype(float)
            near = np.abs(down - la) <= np.abs(la) * 2.0**-7 + size * 2.0**-16
            out.check(bool(near.all()), f"{where}: LoRA-down is off")
            want, bound = _whole_reference(kind, operands, spec, xp, xs, la)
            error = np.abs(np.asarray(run()).astype(float) - want)
            near = error <= bound
            out.check(
                bool(near.all()),
                f"{where}: {np.count_nonzero(~near)} of {near.size} cells of y from x are off",
            )
    return out


def _whole_reference(kind: Kind, operands: list, spec: formats.Spec, xp, xs, la):
    """float64 y of the quantized x, and what every cell may be off by."""

    x = _values(kind, xp, xs)
    w = _values(kind, *map(np.asarray, operands[4:6]))
    up, channel, bias = (np.asarray(v).astype(float) for v in operands[7:10])
    y = x @ w.T * channel + la @ up.T + bias
    size = np.abs(x) @ np.abs(w).T * np.abs(channel)
    # "fastest" rounds each factor of a product to three bits after the leading one.
    part = 2.0**-3 if kind.precision == "fastest" else 2.0**-10
    low_rank = np.abs(la) @ np.abs(up).T * 2.0**-7
    return y, np.abs(y) * 2.0**-8 + (size + np.abs(bias)) * part + low_rank


def grouped(session: Session) -> Outcome:
    """rows of a group meet its own weight; empty groups and rows past the last one"""
    out = Outcome()
    sizes, past, n, k, rank = (37, 0, 130, 5), 3, 264, 416, 32
    cpu = jax.local_devices(backend="cpu")[0]
    quantize = jax.jit(reference.quantize_activation_ref, static_argnames="spec")
    for kind in KINDS:
        m = sum(sizes) + past
        # Operands of each group as a call of its own; its plan does not matter.
        groups = [_whole(Session(None), kind, size, n, k, rank, i)[1:]
                  for i, size in enumerate(sizes)]  # fmt: skip
        spec = groups[0][1]
        if session.target is not None:
            problem = session.problem(kind, m, n, k, spec.k_pad, rank)
            problem = dataclasses.replace(problem, groups=len(sizes))
            if not session.takes(Variant("sm90_grouped", cluster=0), problem):
                continue
        names = ("smooth", "", "lora_down", "packed", "scales", "", "lora_up", "channel_scale")
        stacked = {
            name: jnp.stack([ops[i + 1] for ops, _ in groups])
            for i, name in enumerate((*names, "bias"))
            if name
        }
        w = Weight(
            stacked.pop("packed"), stacked.pop("scales"), format=kind.format, k=k,
            block_size=kind.block, **stacked,
        )  # fmt: skip
        x = jnp.concatenate([ops[0] for ops, _ in groups] + [jnp.ones((past, k), jnp.bfloat16)])
        run = functools.partial(
            grouped_matmul, precision=kind.precision,
            implementation="xla" if session.target is None else "cuda",
        )  # fmt: skip
        y = np.asarray(jax.jit(run)(x, w, jnp.array(sizes))).astype(float)
        out.check(not y[m - past :].any(), f"{kind}: rows past the last group are not zero")
        first = 0
        for i, (ops, _) in enumerate(groups):
            rows, first = y[first : first + sizes[i]], first + sizes[i]
            if not sizes[i]:
                continue
            codes, scales, la = map(np.asarray, quantize(*jax.device_put(ops[:4], cpu), spec=spec))
            want, bound = _whole_reference(kind, ops, spec, codes, scales, la.astype(float))
            wrong = np.count_nonzero(~(np.abs(rows - want) <= bound))
            out.check(not wrong, f"{kind}: {wrong} of {want.size} cells of group {i} are off")
    return out


REPEATS = 100


def _digest(y: jax.Array) -> str:
    return hashlib.sha256(np.asarray(y).tobytes()).hexdigest()


def _loops(session: Session) -> dict[str, Callable[[], jax.Array]]:
    """Whole calls that keep every SM busy, per format, and such of few tokens."""
    out = {}
    on_gpu = session.target is not None
    n, k = (2184, 1280) if on_gpu else (72, 160)
    for i, (kind, m) in enumerate(itertools.product(KINDS, (1100, 16) if on_gpu else (40,))):
        run, *_ = _whole(session, kind, m, n, k, 128 if i // 2 % 2 else 32, i)
        if run is not None:
            out[f"{kind}, {m} tokens"] = run
    ahead = itertools.product(KINDS, DOWN_AHEAD) if on_gpu else ()
    for i, (kind, (m, k, rank)) in enumerate(ahead):
        problem = session.problem(kind, m, n, k, formats.padded_k(k, kind.block), rank)
        if session.takes(Variant("sm90_decode", cluster=0), problem):
            out[f"{kind}, {m} tokens"], *_ = _whole(session, kind, m, n, k, rank, i)
    return out


def _repeated(out: Outcome, loops: dict[str, Callable], repeats: int) -> None:
    for name, run in loops.items():
        digests = {_digest(run()) for _ in range(repeats)}
        out.check(len(digests) == 1, f"{name}: {len(digests)} results in {repeats} runs")


def repeat(session: Session) -> Outcome:
    """the same bits in every run"""
    out = Outcome()
    _repeated(out, _loops(session), REPEATS if session.target is not None else 3)
    return out


def threads(session: Session) -> Outcome:
    """the same bits when four threads call at once"""
    out = Outcome()
    loops = _loops(session)
    alone = {name: _digest(run()) for name, run in loops.items()}
    names = list(loops) * (12 if session.target is not None else 2)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = pool.map(lambda name: (name, _digest(loops[name]())), names)
    for name, digest in together:
        out.check(digest == alone[name], f"{name}: another result beside other threads")
    return out


def neighbour(session: Session) -> Outcome:
    """the same bits while another process keeps the memory busy"""
    out = Outcome()
    loops = _loops(session)
    alone = {name: _digest(run()) for name, run in loops.items()}
    ready = subprocess.Popen(
        [sys.executable, "-P", "-m", "jax_w4a4.selftest.parts", "--hog"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert ready.stdout is not None
        out.check(ready.stdout.readline().startswith("busy"), "the other process did not start")
        for name, run in loops.items():
            for _ in range(20 if session.target is not None else 2):
                out.check(_digest(run()) == alone[name], f"{name}: another result")
    finally:
        ready.kill()
        ready.wait()
    return out


def hog(seconds: float = 120) -> None:
    """Streams memory until it is killed, at most two minutes."""
    x = jnp.zeros((1 << 26 if jax.default_backend() == "gpu" else 1 << 16,), jnp.float32)
    step = jax.jit(lambda v: v + 1)
    x = step(x).block_until_ready()
    print("busy", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        x = step(x).block_until_ready()


PARTS: dict[str, Callable[[Session], Outcome]] = {
    "preflight": preflight,
    **{p.name: functools.partial(probe, which=p) for p in PROBES},
    "pair": pair,
    "quantizer": quantizer,
    "grouped": grouped,
    "exact": exact,
    "random": random,
    "repeat": repeat,
    "threads": threads,
    "neighbour": neighbour,
}


def describe(name: str) -> str:
    """What a part tests, in one line."""
    if name in probes.BY_NAME:
        return probes.BY_NAME[name].assumption
    return (PARTS[name].__doc__ or "").split("\n")[0]


# ------------------------------------------------------------------------------------------------
# The process
# ------------------------------------------------------------------------------------------------

MOST_FAILURES = 20
# Parts of kernels that a GPU may lack.
OPTIONAL = ("pair", "grouped")


def _kernel_calls(session: Session) -> int:
    """How often a handler of this package ran so far in this process."""
    return _ffi.counters()["calls"] if session.target is not None else 0


def shortened(waits: list[str]) -> list[str]:
    """The wait that began first with its place, and the others of every kind counted."""
    kinds: dict[str, int] = {}
    for text in waits[1:]:
        kind = text.partition(" (")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    return waits[:1] + [f"{kind}: {count} more" for kind, count in kinds.items()][:MOST_FAILURES]


def _watch(write: Callable[..., None]) -> None:
    """Writes what kernels wait for in vain, in the second before they trap: an error of the driver
    may take the process with it."""
    while not _ffi.stuck_waits():
        time.sleep(0.1)
    time.sleep(0.4)  # for the other warps
    write(waits=shortened(_ffi.stuck_waits()))


def run_parts(names: Iterable[str], out: pathlib.Path, make: Callable[[], Session]) -> None:
    """Runs parts in order and appends a line of JSON to `out` before and after each; one line more,
    if kernels whose waits end gave up.

    Returns after a part that raised: what an error of the driver leaves behind is not to be
    trusted.
    """
    with out.open("a") as file:
        lock = threading.Lock()

        def write(**line: Any) -> None:
            with lock:
                file.write(json.dumps(line) + "\n")
                file.flush()

        try:
            session = make()
        except NoGpuError as error:
            write(nothing=str(error))
            return
        threading.Thread(target=_watch, args=(write,), daemon=True).start()
        for name in names:
            write(start=name)
            started, before = time.monotonic(), _kernel_calls(session)
            raised = False
            try:
                found = PARTS[name](session)
            except Exception as error:
                raised = True
                last = traceback.extract_tb(error.__traceback__)[-1]
                at = f"{pathlib.Path(last.filename).name}:{last.lineno}"
                found = Outcome(failures=[f"{type(error).__name__} ({at}): {error}"[:2000]])
            ran = _kernel_calls(session) - before
            if not found.failures:
                if not found.checks and name not in OPTIONAL:
                    found.failures.append("nothing was checked")
                elif found.checks and session.target is not None and not ran:
                    found.failures.append("no kernel ran: the reference stood in for it")
            write(
                part=name,
                seconds=round(time.monotonic() - started, 2),
                checks=found.checks,
                kernel_calls=ran,
                failures=found.failures[:MOST_FAILURES],
                more_failures=max(0, len(found.failures) - MOST_FAILURES),
                facts=found.facts,
            )
            if raised:
                return


def main(make: Callable[[], Session] = Session.here) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hog", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.hog:
        hog()
        return
    # The self-test itself is what the record is about.
    os.environ[record.ENV_ALLOW] = "1"
    run_parts(args.names, args.out, make)


if __name__ == "__main__":
    main()
