"""`python -m bench.decode`: microseconds per layer of a jitted stack of small-M layers.

A stack is 16 or more layers of one shape, each with weights of its own, more than the L2 holds. One
jitted call runs all of them several times in turn, because what a dispatch costs the host grows
with the number of arrays it is given, here hundreds: after one turn of small layers the GPU would
wait for the host. The call is one CUDA graph that is replayed. Low-rank branch (R = 32),
channel_scale and bias are on, every layer starts from bf16 x, and MXFP4 weights are prepared
(`Weight.prepare`) unless `--linear`. All layers read one x, so that it is in the L2 as it is where
the operation before has just written it. Peers run in graphs of their own, quantization included.

Every row says what a dispatch costs the host while the GPU is idle ("host"), and is marked where
that is most of the time: such a row measures the host. "captures" counts handler calls that went
into a CUDA graph while the clock ran: none where the graph was replayed. `--kernels` adds to the
JSON what a layer spends in each kernel, one after the other and outside the graph; the stack's own
kernel, which reads the results, is among them.

Large layers of many rows run into the chip's power limit. `--cool` adds what they take at the clock
of a GPU that idled before ("cool_us"), as between the other parts of a model.

`--implementations` times each layer once for each of these kernels, side by side, instead of with
what the planner takes; a kernel that can't run a shape is an error of that row.

`--crossover` times M = 1 .. 8192 on three shapes instead (bench/plot.py draws the result).

In such a stack the results of all layers stay until a small kernel has read an element of each.
With `--chain` a layer's x is the result of the layer before, as in a network, and a dispatch
returns the last one. Where K and N differ such layers take turns with ones of N x K; the row has
the mean of both and is called KxN+NxK. Weights are scaled so that results stay about as large as
x, however many layers there are. Peers outside of JAX are left out.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_w4a4
from jax_w4a4 import _ffi
from jax_w4a4.primitives import IMPLEMENTATIONS, KERNELS

from . import cases, peers, timing
from .__main__ import environment
from .shapes import Shape

# (K, N), as the issue of decoding names them: attention, MLP up, MLP down, two large squares.
LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (16384, 16384))
ROWS = (1, 16, 64)
RANK = 32
# Packed bytes that a stack rotates through: several times the L2.
STACK_BYTES = 570e6
# A row whose dispatch takes the host this share of its time measures the host.
HOST_BOUND = 0.8
CROSSOVER = ((4096, 4096), (4096, 14336), (8192, 8192))
CROSSOVER_ROWS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096, 8192,
)  # fmt: skip


def layers_of(shape: Shape) -> int:
    """How many layers a stack has: 16 or enough for `STACK_BYTES`."""
    return min(64, max(16, round(STACK_BYTES / (shape.n * shape.k * 17 / 32))))


def in_turn(shape: Shape) -> tuple[Shape, ...]:
    """The shapes of a chain's layers: one that is square, or two that take turns."""
    back = dataclasses.replace(shape, k=shape.n, n=shape.k)
    return (shape,) if back == shape else (shape, back)


# The weights of each route's last stack: making them takes longer than timing them for another M.
_stacks: dict[str, tuple[tuple, list]] = {}


def stack(
    route: str, shapes: tuple[Shape, ...], layers: int, make: Callable[[jax.Array, Shape], Any]
) -> list:
    """What `make` makes of the keys of a stack's layers, whose shapes take turns."""
    shapes = tuple(dataclasses.replace(shape, m=1) for shape in shapes)
    what = (shapes, layers)
    if _stacks.get(route, ((), []))[0] != what:
        _stacks.pop(route, None)  # first, or there are two of them
        made = jax.jit(make, static_argnums=1)
        keys = jax.random.split(jax.random.key(0), layers)
        turns = itertools.cycle(shapes)
        _stacks[route] = what, [made(key, next(turns)) for key in keys]
    return _stacks[route][1]


def stacked(call: Callable, shape: Shape, weights: list, turns: int, chained: bool) -> timing.Chain:
    """A stack in which all layers read one x, or each the result of the one before."""
    x = jax.random.normal(jax.random.key(1), (shape.m, shape.k), jnp.bfloat16)
    if chained:
        return timing.jax_layers(call, x, weights, turns)
    return timing.jax_turns(call, [(x, w) for w in weights], turns)


def xla_bf16(shape: Shape, layers: int, turns: int, *, chained: bool = False) -> timing.Chain:
    def make(key: jax.Array, shape: Shape) -> jax.Array:
        w = jax.random.normal(key, (shape.n, shape.k), jnp.bfloat16)
        return w * shape.k**-0.5 if chained else w

    shapes = in_turn(shape) if chained else (shape,)
    weights = stack(f"{cases.BASE} {chained}", shapes, layers, make)
    call = lambda x, w: jnp.einsum("mk,nk->mn", x, w)  # noqa: E731
    return stacked(call, shape, weights, turns, chained)


def keeping_size(w: jax_w4a4.Weight) -> jax_w4a4.Weight:
    """A random layer that any number of can follow each other.

    Product and low-rank branch are about as large as x, and the bias about 1. So scaled the mean
    square of y is a third of the sum: 1 where that of x is 1, and else nearer to 1 than it.
    """
    part = 3**-0.5
    return w.replace(
        channel_scale=part * w.channel_scale,
        lora_up=(part * w.lora_up).astype(w.lora_up.dtype),
        bias=part * w.bias,
    )


def ours(
    layer: cases.Layer, shape: Shape, layers: int, turns: int, *, chained: bool = False
) -> timing.Chain:
    def make(key: jax.Array, shape: Shape) -> jax_w4a4.Weight:
        _, w = cases.random_layer(key, shape, layer)
        return keeping_size(w) if chained else w

    shapes = in_turn(shape) if chained else (shape,)
    weights = stack(f"{layer.name} {layer.prepared} {chained}", shapes, layers, make)
    call = lambda x, w: jax_w4a4.matmul(x, w, **layer.matmul)  # noqa: E731
    return stacked(call, shape, weights, turns, chained)


def peer(build: Callable[..., timing.Chain], shape: Shape, layers: int, turns: int) -> timing.Chain:
    return peers.graphed(build(shape, layers, one_x=True), turns)


Builder = Callable[[Shape, int, int], timing.Chain]


def named(layers: list[cases.Layer], implementations: list[str]) -> dict[str, cases.Layer]:
    """Our routes: the layers as `matmul` runs them, or each once for every implementation."""
    return {
        f"matmul {layer.name}{name and ' ' + name}": dataclasses.replace(
            layer, matmul=layer.matmul | ({"implementation": name} if name else {})
        )
        for layer in layers
        for name in implementations or ("",)
    }


def routes(layers: dict[str, cases.Layer], chained: bool = False) -> Iterator[tuple[str, Builder]]:
    yield cases.BASE, functools.partial(xla_bf16, chained=chained)
    for name, build in () if chained else peers.routes():
        if name in ("torch bf16", "humming w4a8 mxfp4"):
            yield f"{name}, graph", functools.partial(peer, build)
    for name, layer in layers.items():
        yield name, functools.partial(ours, layer, chained=chained)


def describe(layer: cases.Layer, shape: Shape) -> str:
    """Kernel and tile that the planner takes; nothing where XLA runs the layer."""
    if not _ffi.has_cuda() or jax.default_backend() != "gpu":
        return ""
    operands = jax.eval_shape(lambda key: cases.random_layer(key, shape, layer), jax.random.key(0))
    call = functools.partial(jax_w4a4.matmul, **layer.matmul)
    found = jax_w4a4.explain(call, *operands).calls[0].plan
    return f"{found.kernel} {found.tile_m}x{found.tile_n} cluster {found.cluster}" if found else ""


def measure(chain: timing.Chain, rounds: int, kernels: bool, cool: bool = False) -> dict:
    """Times of a chain, and whose they are: the GPU's or the host's."""
    host = timing.host_seconds(chain)
    before = _ffi.counters() if _ffi.has_cuda() else {}
    seconds = timing.seconds_per_call(chain, rounds=rounds)
    after = _ffi.counters() if _ffi.has_cuda() else {}
    row = {
        "us": seconds * 1e6,
        "dispatch_us": seconds * chain.calls * 1e6,
        "host_us": host * 1e6,
        "host_bound": host > HOST_BOUND * seconds * chain.calls,
        "handler_calls": after.get("calls", 0) - before.get("calls", 0),
        "captures": after.get("captured", 0) - before.get("captured", 0),
    }
    if cool:
        row["cool_us"] = timing.cool_seconds_per_call(chain, rounds=rounds) * 1e6
    if kernels:
        with timing.without_dependent_launch():
            found = timing.kernel_seconds(chain)
        row["kernels_us"] = {name[:80]: each * 1e6 for name, each in found.items()}
    return row


def time_one(
    name: str,
    build: Builder,
    shape: Shape,
    turns: int,
    rounds: int,
    kernels: bool,
    chained: bool = False,
    cool: bool = False,
) -> dict:
    layers = layers_of(shape)
    row = {"m": shape.m, "k": shape.k, "n": shape.n, "rank": shape.rank, "route": name}
    row |= {"layers": layers, "turns": turns}
    if chained:
        shapes = in_turn(shape)
        layers += layers % len(shapes)
        row |= {"layers": layers, "chained": True}
        row["shape"] = "+".join(f"{each.k}x{each.n}" for each in shapes)
    try:
        row |= measure(build(shape, layers, turns), rounds, kernels, cool)
    except Exception as error:  # a peer that cannot run a shape is a result, not the end
        return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    packed = shape.n * shape.k * 17 / 32  # e2m1 and a byte of scale per 32
    return row | {"packed_tb_per_s": packed / row["us"] / 1e6}


def line(row: dict) -> str:
    shape = f"{row['shape']:<23}" if "shape" in row else f"{row['k']:>5}x{row['n']:<5}"
    head = f"M={row['m']:<5} {shape} {row['route']:<28}"
    if "error" in row:
        return f"{head} {row['error'][:90]}"
    text = f"{head} {row['us']:8.2f} us {row['packed_tb_per_s']:6.2f} TB/s"
    if "cool_us" in row:
        text += f" cool {row['cool_us']:.2f}"
    if "speedup_vs_xla_bf16" in row:
        text += f" {row['speedup_vs_xla_bf16']:6.2f}x"
    text += f"  host {row['host_us'] / row['dispatch_us']:4.0%}"
    if row["captures"]:
        text += f" {row['captures']} captures"
    return f"{text}{' HOST BOUND' if row['host_bound'] else ''}  {row.get('plan', '')}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    names = [layer.name for layer in cases.LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=["mxfp4"])
    parser.add_argument(
        "--implementations", nargs="+", choices=(*filter(None, IMPLEMENTATIONS), *KERNELS),
        default=[], metavar="NAME", help="of matmul, side by side: sm90_decode sm90_v2",
    )  # fmt: skip
    parser.add_argument("--linear", action="store_true", help="weights as quantize returns them")
    parser.add_argument("--shapes", nargs="+", help="KxN")
    parser.add_argument("--rows", nargs="+", type=int, help="values of M")
    parser.add_argument("--skip", nargs="+", default=[], help="no routes with these in the name")
    parser.add_argument("--crossover", action="store_true", help="M = 1 .. 8192")
    parser.add_argument("--chain", action="store_true", help="each layer reads the last's result")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, help="how often a dispatch goes through the layers")
    parser.add_argument(
        "--kernels", action="store_true", help="trace each row for the time inside its kernels"
    )
    parser.add_argument(
        "--cool", action="store_true", help="also each row on a GPU that idled before some ms of it"
    )
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    if args.chain and args.kernels:
        parser.error("--kernels takes the median of each kernel, a chain may have two shapes of it")
    shapes = CROSSOVER if args.crossover else LAYERS
    if args.shapes:
        shapes = tuple(tuple(map(int, text.split("x"))) for text in args.shapes)
    if args.chain:  # 4096x14336 has 14336x4096 with it
        first = [next(s for s in shapes if set(s) == set(kn)) for kn in shapes]
        shapes = tuple(dict.fromkeys(first))
    rows_of = args.rows or (CROSSOVER_ROWS if args.crossover else ROWS)
    by_name = {
        layer.name: layer if args.linear else cases.prepared(layer) for layer in cases.LAYERS
    }
    layers = named([by_name[name] for name in args.layers], args.implementations)
    todo = [
        (name, build)
        for name, build in routes(layers, args.chain)
        if not any(part in name for part in args.skip)
    ]
    results = []
    for k, n in shapes:
        for m in rows_of:
            shape, base = Shape(m, k, n, RANK), None
            turns = args.turns or timing.turns_of(m, k, n)
            for name, build in todo:
                how = args.rounds, args.kernels, args.chain, args.cool
                row = time_one(name, build, shape, turns, *how)
                if "error" not in row:
                    base = row["us"] if name == cases.BASE else base
                    if base:
                        row["speedup_vs_xla_bf16"] = base / row["us"]
                if (layer := layers.get(name)) is not None:
                    row["prepared"] = layer.prepared
                if layer is not None and "error" not in row:
                    shapes_of = in_turn(shape) if args.chain else (shape,)
                    plans = filter(None, (describe(layer, each) for each in shapes_of))
                    row["plan"] = " + ".join(plans)
                results.append(row)
                print(line(row), flush=True)
            if args.json:
                report = {"environment": environment("bench.decode"), "rows": results}
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    # A kernel that is asked for may not take a shape; what the planner takes has to run.
    failed = any("error" in r and r["route"].startswith("matmul") for r in results)
    return 1 if failed and not args.implementations else 0


if __name__ == "__main__":
    sys.exit(main())
