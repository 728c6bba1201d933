"""`python -m bench.decode`: microseconds per layer of a jitted stack of small-M layers.

A stack is one jitted function of 16 or more layers of one shape, each with weights of its own, more
than the L2 holds. The results of a call are donated to the next, so that every buffer keeps its
address and the stack is one CUDA graph that is replayed. Low-rank branch (R = 32), channel_scale
and bias are on, and every layer starts from bf16 x. Peers run in graphs of their own, quantization
included.

`--crossover` times M = 1 .. 8192 on three shapes instead (bench/plot.py draws the result).
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jax_w4a4
from jax_w4a4 import plan

from . import cases, peers, timing
from .__main__ import environment
from .shapes import Shape

# (K, N), as the issue of decoding names them: attention, MLP up, MLP down, two large squares.
LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (16384, 16384))
ROWS = (1, 16, 64)
RANK = 32
# Packed bytes that a stack rotates through: several times the L2.
STACK_BYTES = 570e6
CROSSOVER = ((4096, 4096), (4096, 14336), (8192, 8192))
CROSSOVER_ROWS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096, 8192,
)  # fmt: skip


def layers_of(shape: Shape) -> int:
    """How many layers a stack has: 16 or enough for `STACK_BYTES`."""
    return min(64, max(16, round(STACK_BYTES / (shape.n * shape.k * 17 / 32))))


def stack(call: Callable, sets: list[tuple]) -> timing.Chain:
    """One jitted call of every layer whose results land where those of the call before lay."""

    def layers(_, sets):
        return [call(*operands) for operands in sets]

    jitted = jax.jit(layers, donate_argnums=0, keep_unused=True)
    shapes = jax.eval_shape(layers, None, sets)
    state = [jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)]

    def enqueue() -> list[jax.Array]:
        state[0] = jitted(state[0], sets)
        return state[0]

    return timing.Chain(enqueue, jax.block_until_ready, len(sets))


def xla_bf16(shape: Shape, layers: int) -> timing.Chain:
    keys = jax.random.split(jax.random.key(0), layers)
    sets = [
        (
            jax.random.normal(jax.random.fold_in(key, 0), (shape.m, shape.k), jnp.bfloat16),
            jax.random.normal(jax.random.fold_in(key, 1), (shape.n, shape.k), jnp.bfloat16),
        )
        for key in keys
    ]
    return stack(lambda x, w: jnp.einsum("mk,nk->mn", x, w), sets)


def ours(layer: cases.Layer, shape: Shape, layers: int) -> timing.Chain:
    make = jax.jit(lambda key: cases.random_layer(key, shape, layer))
    sets = [make(key) for key in jax.random.split(jax.random.key(0), layers)]
    return stack(lambda x, w: jax_w4a4.matmul(x, w, **layer.matmul), sets)


def routes(layers: list[cases.Layer]) -> Iterator[tuple[str, cases.Builder]]:
    yield cases.BASE, xla_bf16
    for name, build in peers.routes():
        if name in ("torch bf16", "humming w4a8 mxfp4"):
            yield f"{name}, graph", lambda shape, n, build=build: peers.graphed(build(shape, n))
    for layer in layers:
        yield f"matmul {layer.name}", lambda shape, n, layer=layer: ours(layer, shape, n)


def describe(layer: cases.Layer, shape: Shape) -> str:
    """Kernel and tile that the planner takes; nothing where XLA runs the layer."""
    x, w = jax.eval_shape(lambda key: cases.random_layer(key, shape, layer), jax.random.key(0))
    with plan.recording() as plans:
        jax.eval_shape(lambda x, w: jax_w4a4.matmul(x, w, **layer.matmul), x, w)
    if not plans:
        return ""
    found = plans[0]
    return f"{found.kernel} {found.tile_m}x{found.tile_n} cluster {found.cluster}"


def time_one(name: str, build: cases.Builder, shape: Shape, rounds: int) -> dict:
    layers = layers_of(shape)
    row = {"m": shape.m, "k": shape.k, "n": shape.n, "rank": shape.rank, "route": name}
    try:
        chain = build(shape, layers)
        seconds = timing.seconds_per_call(chain, rounds=rounds)
    except Exception as error:  # a peer that cannot run a shape is a result, not the end
        return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    packed = shape.n * shape.k * 17 / 32  # e2m1 and a byte of scale per 32
    return row | {"layers": layers, "us": seconds * 1e6, "packed_tb_per_s": packed / seconds / 1e12}


def line(row: dict) -> str:
    head = f"M={row['m']:<5} {row['k']:>5}x{row['n']:<5} {row['route']:<28}"
    if "error" in row:
        return f"{head} {row['error'][:90]}"
    text = f"{head} {row['us']:8.2f} us"
    if "speedup_vs_xla_bf16" in row:
        text += f" {row['packed_tb_per_s']:6.2f} TB/s {row['speedup_vs_xla_bf16']:6.2f}x"
    return f"{text}  {row.get('plan', '')}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    names = [layer.name for layer in cases.LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=["mxfp4"])
    parser.add_argument("--shapes", nargs="+", help="KxN")
    parser.add_argument("--rows", nargs="+", type=int, help="values of M")
    parser.add_argument("--skip", nargs="+", default=[], help="no routes with these in the name")
    parser.add_argument("--crossover", action="store_true", help="M = 1 .. 8192")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    shapes = CROSSOVER if args.crossover else LAYERS
    if args.shapes:
        shapes = tuple(tuple(map(int, text.split("x"))) for text in args.shapes)
    rows_of = args.rows or (CROSSOVER_ROWS if args.crossover else ROWS)
    by_name = {layer.name: layer for layer in cases.LAYERS}
    todo = [
        (name, build)
        for name, build in routes([by_name[name] for name in args.layers])
        if not any(part in name for part in args.skip)
    ]
    results = []
    for k, n in shapes:
        for m in rows_of:
            shape, base = Shape(m, k, n, RANK), None
            for name, build in todo:
                row = time_one(name, build, shape, args.rounds)
                if "error" not in row:
                    base = row["us"] if base is None else base
                    row["speedup_vs_xla_bf16"] = base / row["us"]
                if name.startswith("matmul "):
                    row["plan"] = describe(by_name[name.removeprefix("matmul ")], shape)
                results.append(row)
                print(line(row), flush=True)
            if args.json:
                report = {"environment": environment("bench.decode"), "rows": results}
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any("error" in r and r["route"].startswith("matmul") for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
