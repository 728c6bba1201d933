"""Parity of the grouped kernel, cell by cell, and its corners, under a watchdog.

`pytest -m gpu` runs the cells as tests; `python -P tests/gpu_grouped.py --json out.json` runs them
all. Each cell runs the handler on results that were filled with NaN bytes beforehand, with NaN in
the rows of x that belong to no group, and checks for every group
 - the activations that the quantizer made, against those of `jnp` on the CPU;
 - lora_act and y against float64 products of the kernel's own operands;
 - y bit for bit against kernel sm90_v2 on that group alone, which multiplies in the same order;
and that rows of no group are zeros and a second run gives the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gpu_parity  # noqa: E402
import model  # noqa: E402
from gpu_parity import Cell, Poisoned, in_processes, same_bits  # noqa: E402

from jax_w4a4 import plan, primitives, reference  # noqa: E402
from jax_w4a4.weight import Weight  # noqa: E402

WATCHDOG_S = 60.0
PATHS = {
    "Mxfp4": {"format": "mxfp4"},
    "Nvfp4": {"format": "nvfp4"},
    "Nvfp4Rounded": {"format": "nvfp4", "precision": "fastest"},
    "Int4Row": {"format": "int4", "block_size": None},
    "Int4Scaled": {"format": "int4", "block_size": 64},
    "Mxfp4Sorted": {"format": "mxfp4", "sign_order": "sorted"},
}
RANKS = (0, 16, 48, 128, 256)
SHAPES = ((600, 272), (77, 1000), (1032, 2056), (8, 64))  # (N, K)
# Where groups begin and end. Tails of every tile, empty groups, rows of no group at both ends, one
# group of all rows, more groups than lanes of a warp.
BOUNDS = {
    "ragged": (0, 3, 3, 205, 206, 300),
    "outside": (7, 7, 207, 231, 231, 290),
    "whole": (0, 0, 300, 300),
    "decode": tuple(range(0, 300, 6)),
    "ones": tuple(range(100, 171)),
    "none": (0, 0, 0),
    "large": (0, 1, 2000, 2100, 4352),
}


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A grouped call: what the groups have in common (its m counts all rows), and their rows."""

    cell: Cell
    bounds: tuple[int, ...]

    def __str__(self) -> str:
        b = self.bounds
        return f"{self.cell} {len(b) - 1} groups {b[:8]}{'...' if len(b) > 8 else ''}"

    @property
    def groups(self) -> int:
        return len(self.bounds) - 1


def cells(paths: tuple[str, ...] = tuple(PATHS)) -> Iterator[Grouped]:
    """Every path, tile, rank and set of bounds; shapes and options cycle."""
    turn = 0
    for path in paths:
        tiles = plan.budget.V2_PATHS[path].grouped_tiles
        for (name, bounds), rank, tile_m in itertools.product(BOUNDS.items(), RANKS, tiles):
            turn += 1
            if name == "large" and (rank, tile_m) not in ((48, tiles[0]), (0, 64), (128, tiles[1])):
                continue
            n, k = SHAPES[turn % len(SHAPES)]
            # One block per row is planned as integers with a scale per row.
            rows_tiles = plan.budget.V2_PATHS["Int4Row"].grouped_tiles
            if k == PATHS[path].get("block_size") and tile_m not in rows_tiles:
                continue
            yield Grouped(
                Cell(
                    rank=rank,
                    m=4352 if name == "large" else 300,
                    n=n,
                    k=k,
                    tile_m=tile_m,
                    affine=turn % 5 != 0,
                    global_scales=turn % 3 == 0,
                    act_unsigned=PATHS[path]["format"] == "int4" and turn % 2 == 0,
                    act_rule="floor" if path.startswith("Mxfp4") and turn % 2 else "rceil",
                    group_m=(None, 1, 3)[turn % 3],
                    main_stages=(None, 2)[turn // 4 % 2],
                    **PATHS[path],
                ),
                bounds,
            )


def corners(paths: tuple[str, ...] = tuple(PATHS)) -> Iterator[Grouped]:
    """Tiles per CTA x K blocks x low-rank chunks x ring depth, where a ring can lock up."""
    sizes = {
        "none": (0, 0, 0),
        "one": (0, 0, 5, 5),
        "two": tuple(range(0, 16 * 18, 16)),
        "many": (0, *range(3, 600, 11)),
    }
    for path, name, blocks, rank, stages in itertools.product(
        paths, sizes, (1, 2, 4, 5, 13), (0, 32, 160), (2, 4)
    ):
        step = plan.budget.V2_PATHS[path].tile_k
        bounds = sizes[name]
        yield Grouped(
            Cell(
                rank=rank,
                m=max(bounds[-1], 4),
                n=2040,
                k=blocks * step - 32,
                tile_m=16,
                main_stages=stages,
                special=False,
                **PATHS[path],
            ),
            bounds,
        )


def small_cells() -> Iterator[Grouped]:
    """A few for compute-sanitizer: every path, with all operands."""
    for path, tile_m in itertools.product(PATHS, (16, 64)):
        cell = Cell(rank=48, m=70, n=136, k=272, tile_m=tile_m, global_scales=True, **PATHS[path])
        yield Grouped(cell, (1, 4, 4, 25, 66))


def _stack(weights: list[Weight]) -> Weight:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


def _operands(w: Weight, spec: Any) -> list[jax.Array]:
    """Those of grouped_p after bounds, absent ones with zero size."""
    groups, n, _ = w.shape
    none = jnp.zeros((groups, 0), jnp.float32)

    def vector(v):
        return none if v is None else v.reshape(groups, -1)

    def matrix(v, rows):
        return jnp.zeros((groups, rows, 0), spec.lora_dtype) if v is None else v

    return [
        vector(w.smooth), vector(w.act_global_scale), matrix(w.lora_down, w.k), w.packed, w.scales,
        vector(w.global_scale), matrix(w.lora_up, n), vector(w.channel_scale), vector(w.bias),
        jnp.zeros((groups, 0, 2), jnp.uint8) if w.scale_range is None else w.scale_range,
    ]  # fmt: skip


def run(grouped: Grouped) -> dict:
    """What was measured, and `failures`, a list of texts."""
    cell, bounds = grouped.cell, grouped.bounds
    rng = np.random.default_rng(zlib.crc32(str(grouped).encode()))
    parts = [dataclasses.replace(cell, m=b - a) for a, b in itertools.pairwise(bounds)]
    weights = [gpu_parity.make_weight(part, rng) for part in parts]
    x = np.full((cell.m, cell.k), np.nan, model.dtype_of(cell.x_dtype))
    for part, a, b in zip(parts, bounds, bounds[1:], strict=False):
        x[a:b] = gpu_parity.make_x(part, rng)
    w = _stack(weights)
    spec = w.spec(cell.out_dtype).replace(precision=cell.precision)
    if cell.rank == 0:
        spec = spec.replace(lora_dtype="bfloat16")
    problem = dataclasses.replace(gpu_parity.problem_of(cell, spec), groups=grouped.groups)
    found = plan.solve(problem, "sm_90", **cell.choices)
    params = {"spec": spec, "plan": found, "implementation": "cuda"}
    args = (jnp.asarray(x), jnp.asarray(bounds, jnp.int32), *_operands(w, spec))
    program = Poisoned(lambda *a: primitives.grouped_p.bind(*a, **params), *args)
    first, poisoned = program.run()
    again, _ = program.run()
    y, lora_act, act, tokens, *_ = first
    failures: list[str] = []

    def check(ok: Any, what: str) -> None:
        if not ok:
            failures.append(what)

    check(poisoned, "results did not land in poisoned buffers")
    # Of the workspace only what the kernels write; the rest keeps its poison.
    check(same_bits(y, again[0]), "two runs of the same program differ in bits")
    outside = np.ones(cell.m, bool)
    outside[bounds[0] : bounds[-1]] = False
    check(not y[outside].view(np.uint16).any(), "rows of no group are not zeros")
    worst, lora_worst = 0.0, 0.0
    for g, (part, a, b) in enumerate(zip(parts, bounds, bounds[1:], strict=False)):
        if a < b:
            got = (y[a:b], act[a:b], tokens[a:b] if tokens.size else tokens, lora_act[a:b])
            ratios = _check_group(part, weights[g], spec, found, x[a:b], got, check, g)
            worst, lora_worst = max(worst, ratios[0]), max(lora_worst, ratios[1])
    return {
        **dataclasses.asdict(cell),
        "bounds": list(bounds),
        "plan_tile_m": found.tile_m,
        "plan_main_stages": found.main_stages,
        "y_error_over_bound": round(worst, 4),
        "lora_error_over_bound": round(lora_worst, 4),
        "poisoned": poisoned,
        "failures": failures,
    }


@functools.cache
def _alone(found: plan.Plan, spec: Any) -> Any:
    """One weight's product; groups of equal sizes share the compilation."""
    params = {"spec": spec, "plan": found, "implementation": "cuda"}
    return jax.jit(lambda *operands: primitives.matmul_p.bind(*operands, **params)[0])


def _check_group(
    cell: Cell,
    w: Weight,
    spec: Any,
    found: plan.Plan,
    x: np.ndarray,
    got: tuple[np.ndarray, ...],
    check: Any,
    g: int,
) -> tuple[float, float]:
    """One group's rows; returns the errors of y and of lora_act over their bounds."""
    y, act, tokens, la = got
    path = plan.budget.v2_path(found.problem)
    assert path is not None
    rounded = path.name in ("Nvfp4Rounded", "Int4Scaled")
    for_quantize, for_gemm = gpu_parity.operands_of(w, spec)
    # Groups of all sizes share few compilations.
    rows = next(m for m in (64, 256, 1024, 4352) if m >= cell.m)
    padded = np.concatenate([x, np.zeros((rows - cell.m, cell.k), x.dtype)])
    on_cpu = jax.device_put((jnp.asarray(padded), *for_quantize), jax.devices("cpu")[0])
    quantize_ref = jax.jit(reference.quantize_activation_ref, static_argnames="spec")
    xp, xs, _ = (np.asarray(v)[: cell.m] for v in quantize_ref(*on_cpu, spec=spec))
    wide = x.astype(np.float32)
    nan, finite = np.isnan(wide).any(axis=1), np.isfinite(wide).all(axis=1)
    decoded = gpu_parity.decode_private(act[~nan], tokens[~nan] if tokens.size else tokens, path,
                                        spec.k_pad)  # fmt: skip
    want = gpu_parity.folded_values(xp, xs, cell.format, cell.act_unsigned, rounded)[~nan]
    check(np.array_equal(decoded, want), f"group {g}: activations differ from the quantized values")
    check(np.isnan(y[nan].astype(np.float32)).all(), f"group {g}: a NaN in x is not in its row")

    ops = model.Operands.of(w)
    lora_ratio = 0.0
    if cell.rank:
        down = ops.lora_down.astype(np.float64)
        xf = x[finite].astype(np.float64)
        lora_ratio = gpu_parity.error_ratio(
            la[finite], xf @ down, np.abs(xf) @ np.abs(down), gpu_parity.BF16_MMA_SUM
        )
        check(lora_ratio <= 1, f"group {g}: lora_act is {lora_ratio:.3g} x its error bound off")
    exact = model.gemm_f64(xp[finite], xs[finite], la[finite], ops, rounded=rounded)
    absolute = dataclasses.replace(ops, **{
        name: None if (v := getattr(ops, name)) is None else np.abs(v)
        for name in ("channel_scale", "lora_up", "bias", "global_scale", "act_global_scale")
    })  # fmt: skip
    magnitude = gpu_parity._gemm_magnitude(xp[finite], xs[finite], la[finite], absolute, rounded)
    ratio = gpu_parity.error_ratio(y[finite], exact, magnitude, gpu_parity.V2_SUM[path.name])
    check(ratio <= 1, f"group {g}: y is {ratio:.3g} x its error bound off")

    # LoRA-down divides K among as many CTAs, or its sums come in another order.
    alone = plan.solve(
        dataclasses.replace(found.problem, m=rows, groups=0), "sm_90", kernel="sm90_v2", cluster=1
    )
    same_down = dataclasses.replace(alone.quantizer, down=found.quantizer.down)
    alone = dataclasses.replace(alone, quantizer=same_down)
    one = np.asarray(_alone(alone, spec)(jnp.asarray(padded), *for_quantize, *for_gemm))
    check(
        same_bits(one[: cell.m], y), f"group {g}: y differs from kernel sm90_v2 on the group alone"
    )
    return ratio, lora_ratio


def run_safely(grouped: Grouped) -> dict:
    """`run`; one broken cell must not hide the others."""
    try:
        return run(grouped)
    except Exception as error:
        failures = [f"{type(error).__name__}: {error}"]
        return {**dataclasses.asdict(grouped.cell), "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write all measurements here")
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--small", action="store_true", help="a few small cells only")
    parser.add_argument("--every", type=int, default=1, help="every N-th cell only")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    args = parser.parse_args()
    paths = tuple(args.paths)
    todo = list(small_cells() if args.small else (*cells(paths), *corners(paths)))[:: args.every]
    started, results, failed = time.time(), [], 0
    try:
        for result in in_processes(run_safely, todo, args.jobs, WATCHDOG_S):
            results.append(result)
            if result["failures"]:
                failed += 1
                name = todo[len(results) - 1]
                print(f"FAILED {name}: " + "; ".join(result["failures"][:4]), flush=True)
            elif len(results) % 50 == 0:
                print(f"{len(results)}/{len(todo)}", flush=True)
    except TimeoutError:
        print(f"HUNG: nothing came for {WATCHDOG_S} s of {todo[len(results)]}", flush=True)
        return 3
    seconds = round(time.time() - started, 1)
    worst = max((r.get("y_error_over_bound", 0.0) for r in results), default=0.0)
    print(f"{len(results)} cells, {failed} failed, none hung, {seconds} s, error {worst} of bound")
    if args.json:
        report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        report |= {"cells": len(results), "failed": failed, "seconds": seconds}
        report |= {"largest_y_error_over_bound": worst, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
