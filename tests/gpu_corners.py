"""Corners of the sm90_v2 and sm90_decode pipelines, under a watchdog: `tests/gpu_corners.py`.

Where a ring can lock up or hand over the wrong slot: every combination of tiles per CTA (none for
some clusters, one, two, many), K blocks (one, fewer than the stages, as many, one more, many),
cluster width and low-rank chunks (none, one, many), for each format and ring depth. Results land in
poisoned buffers and are compared with an fp32 product of the same quantized operands. If a corner's
result does not come for a while, the watchdog names it and ends the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gpu_parity  # noqa: E402
from gpu_parity import (  # noqa: E402
    Cell,
    Poisoned,
    in_processes,
    make_weight,
    operands_of,
    solve,
)

from jax_w4a4 import primitives, reference  # noqa: E402

WATCHDOG_S = 60.0
TILE_M = 64
# (M, N) in units of (tile_m, 128 weight rows): one tile; at most two per CTA of 132; many.
TILES = {"one": (1, 1), "two": (13, 14), "many": (23, 26)}
BLOCKS = ("one", "fewer", "as many", "one more", "many")
FORMATS = ("mxfp4", "nvfp4", "int4 per row", "int4 in blocks", "mxfp4 prepared")
# What makes a cell of it beside the format's name.
OPTIONS: dict[str, dict] = {
    "int4 per row": {"block_size": None, "scale_dtype": "float32"},
    "int4 in blocks": {"block_size": 32},
    "mxfp4 prepared": {"sign_order": "sorted"},
}


def k_blocks(name: str, stages: int) -> int:
    return {
        "one": 1,
        "fewer": max(1, stages - 1),
        "as many": stages,
        "one more": stages + 1,
        "many": 3 * stages + 1,
    }[name]


@dataclasses.dataclass(frozen=True)
class Corner:
    format: str
    tiles: str
    blocks: str
    cluster: int
    rank: int
    stages: int

    @property
    def cell(self) -> Cell:
        step = 64 if self.format in ("nvfp4", "int4 in blocks") else 128
        m, n = TILES[self.tiles]
        return Cell(
            self.format.split()[0],
            self.rank,
            m * TILE_M - 3,
            n * 128 - 8,
            k_blocks(self.blocks, self.stages) * step - 24,
            kernel="sm90_v2",
            tile_m=TILE_M,
            cluster=self.cluster,
            main_stages=self.stages,
            special=False,
            **OPTIONS.get(self.format, {}),
        )


@dataclasses.dataclass(frozen=True)
class DecodeCorner:
    """The same of sm90_decode: steps of K against stages, rows per CTA, CTAs that divide K."""

    format: str
    blocks: str
    m: int
    tile_n: int
    cluster: int
    rank: int
    stages: int

    @property
    def cell(self) -> Cell:
        step = 256 * gpu_parity.plan.budget.decode_shape(self.m, self.tile_n)[2]
        steps = max(k_blocks(self.blocks, self.stages) * self.cluster, self.cluster)
        return Cell(
            self.format.split()[0],
            self.rank,
            self.m,
            3 * self.tile_n - 5,
            steps * step - 24,
            kernel="sm90_decode",
            tile_n=self.tile_n,
            cluster=self.cluster,
            main_stages=self.stages,
            special=False,
            **OPTIONS.get(self.format, {}),
        )


def decode_corners(formats: tuple[str, ...]) -> Iterator[DecodeCorner]:
    known = [f for f in formats if f != "int4 in blocks"]
    for parts in itertools.product(known, BLOCKS, (5,), (24, 64, 128), (1, 2), (0, 160), (2, 4)):
        yield DecodeCorner(*parts)
    # Many tokens, where a warpgroup has half of K and all of it; few stages fit.
    for parts in itertools.product(known, BLOCKS, (101,), (40, 104), (1, 2), (0, 48), (2, 3)):
        corner = DecodeCorner(*parts)
        if gpu_parity.fits(corner.cell):
            yield corner


def corners(formats: tuple[str, ...]) -> Iterator[Corner]:
    for parts in itertools.product(formats, TILES, BLOCKS, (1, 2), (0, 32, 160), (2, 4)):
        yield Corner(*parts)


def run(corner: Corner | DecodeCorner) -> str | None:
    """What went wrong, None if nothing did."""
    cell = corner.cell
    rng = np.random.default_rng(0)
    x = jnp.asarray(gpu_parity.make_x(cell, rng))
    w = make_weight(cell, rng)
    spec = w.spec(cell.out_dtype)
    if cell.rank == 0:
        spec = spec.replace(lora_dtype="bfloat16")
    for_quantize, for_gemm = operands_of(w, spec)
    params = {"spec": spec, "plan": solve(cell, spec), "implementation": "cuda"}
    args = (x, *for_quantize, *for_gemm)
    program = Poisoned(lambda *a: primitives.matmul_p.bind(*a, **params), *args)
    (y, *_), landed = program.run()
    (again, *_), _ = program.run()
    if not landed:
        return "results did not land in poisoned buffers"
    if y.tobytes() != again.tobytes():
        return "two runs differ"
    with jax.default_matmul_precision("highest"):
        # Without scale_range, of which the reference knows nothing.
        want = np.asarray(jax.jit(reference.matmul_ref, static_argnums=10)(*args[:-1], spec)[0])
    got, want = y.astype(np.float64), want.astype(np.float64)
    if not np.isfinite(got).all():
        return f"{np.sum(~np.isfinite(got))} cells are not finite"
    # Two roundings to bf16 and, for lora_act, its own: a wrong cell is off by the size of y.
    scale = np.sqrt(np.mean(want**2))
    worst = np.max(np.abs(got - want) / (np.abs(want) + scale))
    return None if worst < 0.02 else f"a cell is off by {worst:.3g} of its size"


def run_safely(corner: Corner | DecodeCorner) -> str | None:
    """`run`; one broken corner must not hide the others."""
    try:
        return run(corner)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--kernel", choices=("sm90_v2", "sm90_decode"), help="only its corners")
    parser.add_argument("--every", type=int, default=1, help="every N-th corner only")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    # Most of the time would go into trying tiles for the fp32 product, shape after shape.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    todo: list = []
    if args.kernel in (None, "sm90_v2"):
        todo += corners(tuple(args.formats))
    if args.kernel in (None, "sm90_decode"):
        todo += decode_corners(tuple(args.formats))
    todo = todo[:: args.every]
    started, finished, failed = time.time(), 0, []
    try:
        for problem in in_processes(run_safely, todo, args.jobs, WATCHDOG_S):
            corner = todo[finished]
            finished += 1
            if problem is not None:
                failed.append({**dataclasses.asdict(corner), "problem": problem})
                print(f"FAILED {corner}: {problem}", flush=True)
    except TimeoutError:
        print(f"HUNG: nothing came for {WATCHDOG_S} s of {todo[finished]}", flush=True)
        return 3
    seconds = round(time.time() - started, 1)
    print(f"{len(todo)} corners, {len(failed)} failed, none hung, {seconds} s")
    if args.json:
        device = jax.devices()[0].device_kind
        report = {"device": device, "jax": jax.__version__, "corners": len(todo)}
        report |= {"seconds": seconds, "failed": failed}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
