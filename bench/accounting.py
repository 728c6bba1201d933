"""`python -m bench.accounting`: what the account of shared memory is worth, on one layer.

Three plans of the same kernel and tile, so that only what the account decides differs:

  single    one CTA per tile, LoRA streamed through the main ring
  carved    a cluster of two; the LoRA operands of all ranks are charged as residents, at full size
            (a Hopper cluster halves no footprint), and the main ring gets what is left
  streamed  a cluster of two, LoRA streamed: what the planner does

The kernel streams LoRA in all three; "carved" takes from the main ring the stages that resident
operands would cost. Results must agree bit for bit.
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np

import jax_w4a4
from jax_w4a4 import _ffi, plan
from jax_w4a4.plan.tuning import Tuned

from . import cases, timing
from .__main__ import environment
from .shapes import PREFILL, Shape

TARGET = plan.targets.get("sm_90")
KERNEL = "sm90_v2"


def carved_stages(streamed: plan.Plan) -> int:
    """Main stages left once both LoRA operands of all ranks are resident beside them.

    Raises:
      ValueError: not even two are left.
    """
    p = streamed.problem
    rows = streamed.tile_n // streamed.cluster + streamed.tile_m
    resident = rows * p.rank * plan.budget.ITEMSIZE[p.lora_dtype]
    for stages in range(streamed.main_stages, 1, -1):
        tile = {key: getattr(streamed, key) for key in ("tile_m", "tile_n", "cluster")}
        fewer = plan.solve(p, TARGET, kernel=KERNEL, main_stages=stages, **tile)
        if fewer.smem_bytes + resident <= TARGET.smem_bytes:
            return stages
    raise ValueError(f"rank {p.rank} at tile {streamed.tile_m} leaves no two main stages")


def variants(problem: plan.Problem, tile_m: int) -> dict[str, plan.Plan]:
    """The three plans."""
    pair = {"tile_m": tile_m, "tile_n": 256, "cluster": 2}
    streamed = plan.solve(problem, TARGET, kernel=KERNEL, **pair)
    return {
        "single": plan.solve(problem, TARGET, kernel=KERNEL, tile_m=tile_m, tile_n=128, cluster=1),
        "carved": plan.solve(
            problem, TARGET, kernel=KERNEL, main_stages=carved_stages(streamed), **pair
        ),
        "streamed": streamed,
    }


def _forced(found: plan.Plan) -> Tuned:
    """A table entry that makes every call with the plan's problem take the plan."""
    keys = ("cluster", "main_stages", "tile_m", "tile_n")
    choices = tuple((key, getattr(found, key)) for key in keys)
    return Tuned(found.target, found.problem, found.kernel, choices, 0.0, 0.0, "forced")


def run(shape: Shape, layer: cases.Layer, tile_m: int, rounds: int) -> list[dict]:
    copies = timing.copies_past_cache(shape.n * shape.k // 2 + 2 * shape.m * shape.k, most=8)
    keys = jax.random.split(jax.random.key(0), copies)
    sets = [cases.random_layer(key, shape, layer) for key in keys]
    with plan.recording() as plans:
        jax.jit(jax_w4a4.matmul).trace(*sets[0])
    rows, first = [], None
    _ffi.set_dependent_launch(False)
    for name, found in variants(plans[0].problem, tile_m).items():
        with plan.tuning.using([_forced(found)]):
            chain = timing.jax_chain(
                lambda x, w: jax_w4a4.matmul(x, w, implementation="cuda"), sets
            )
            seconds = timing.seconds_per_call(chain, rounds=rounds)
            launched = _ffi.last_launch()
            kernels = timing.kernel_seconds(chain)
            y = np.asarray(chain.enqueue()[0]).view(np.uint16)
        first = y if first is None else first
        gemm = max(kernels.values())
        rows.append(
            {
                "variant": name,
                "tile": [found.tile_m, found.tile_n],
                "cluster": launched["cluster"],
                "main_stages": found.main_stages,
                "smem_bytes_planned": found.smem_bytes,
                "smem_bytes_launched": launched["dynamic_smem_bytes"],
                "us": seconds * 1e6,
                "gemm_us": gemm * 1e6,
                "gemm_tflops": shape.flops / gemm / 1e12,
                "bits_agree": bool(np.array_equal(y, first)),
            }
        )
        print(line(rows[-1]), flush=True)
    _ffi.set_dependent_launch(True)
    return rows


def line(row: dict) -> str:
    return (
        f"{row['variant']:<9} cluster {row['cluster']}  main stages {row['main_stages']}  "
        f"{row['smem_bytes_launched']:>6} B  gemm {row['gemm_us']:7.1f} us "
        f"{row['gemm_tflops']:7.1f} TF  {'same bits' if row['bits_agree'] else 'BITS DIFFER'}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accounting", description=__doc__)
    parser.add_argument("--shape", type=Shape.parse, default=PREFILL[0], help="MxKxNrR")
    parser.add_argument("--tile-m", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    rows = run(args.shape, cases.LAYERS[0], args.tile_m, args.rounds)
    if args.json:
        result = {
            "environment": environment("bench.accounting"),
            "shape": str(args.shape),
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["bits_agree"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
