"""`python -m bench.grouped`: experts with rows of their own, beside XLA and a loop of products.

Every route gets the same shapes, group sizes and seeds; weights are rotated past the L2, and those
of MXFP4 are prepared (`Weight.prepare`) unless `--linear`. Rates
count the bytes of codes and block scales of experts that have rows, and the FLOP of the product.

A dispatch makes `--copies` calls that need not wait for each other. With `--stack` it is that many
layers of a network: rows and group sizes of each are known only with the result of the one before,
and the dispatch, which goes through all layers `--turns` times, is one CUDA graph that is replayed.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_w4a4

from . import timing
from .__main__ import environment
from .cases import LAYERS, Layer, prepared

RANK = 32


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts (N, K) and the rows that each of them gets."""

    name: str
    k: int
    n: int
    sizes: tuple[int, ...]

    @property
    def m(self) -> int:
        return sum(self.sizes)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.name} {len(self.sizes)}x{self.k}x{self.n} m{self.m}"


def _ragged(groups: int, m: int, empty: int) -> tuple[int, ...]:
    """Sizes of a router's kind: some experts have much, some nothing."""
    rng = np.random.default_rng(0)
    share = rng.gamma(1.0, size=groups)
    share[rng.permutation(groups)[:empty]] = 0
    return tuple(int(v) for v in rng.multinomial(m, share / share.sum()))


CASES = (
    Experts("decode", 2048, 4096, (8,) * 64),
    Experts("decode", 4096, 2048, (8,) * 64),
    Experts("decode ragged", 2048, 4096, _ragged(64, 512, 16)),
    Experts("prefill", 2048, 4096, (256,) * 64),
    Experts("prefill", 4096, 4096, (1000,) * 8),
    Experts("prefill ragged", 2048, 4096, _ragged(64, 16384, 8)),
)


def weights(case: Experts, layer: Layer, key: jax.Array) -> jax_w4a4.Weight:
    """Gaussian experts with low-rank branch, bias and channel_scale."""
    groups = len(case.sizes)
    kw, kd, ku, kb = jax.random.split(key, 4)

    @jax.jit
    @jax.vmap
    def one(key):
        values = jax.random.normal(key, (case.n, case.k)) / case.k**0.5
        w = jax_w4a4.quantize(values, rank=0, **layer.quantize)
        return w.prepare() if layer.prepared else w

    # In parts: the float weights of all experts at once would fill the memory.
    keys = jax.random.split(kw, groups)
    parts = [one(keys[i : i + 8]) for i in range(0, groups, 8)]
    w = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    down = jax.random.normal(kd, (groups, case.k, RANK), jnp.bfloat16) / case.k**0.5
    up = jax.random.normal(ku, (groups, case.n, RANK), jnp.bfloat16) / RANK**0.5
    return w.replace(
        bias=jax.random.normal(kb, (groups, case.n)),
        channel_scale=jnp.ones((groups, case.n)),
        lora_down=down.astype(jnp.bfloat16),
        lora_up=up.astype(jnp.bfloat16),
    )


def rows(case: Experts, key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (case.m, case.k), jnp.bfloat16)


Chainer = Callable[[Callable, list[tuple]], timing.Chain]


def xla_ragged_dot(case: Experts, copies: int, chain: Chainer) -> timing.Chain:
    sets = []
    for key in jax.random.split(jax.random.key(0), copies):
        w = jax.random.normal(key, (len(case.sizes), case.k, case.n), jnp.bfloat16)
        sets.append((rows(case, key), w, jnp.asarray(case.sizes, jnp.int32)))
    return chain(lax.ragged_dot, sets)


def grouped(layer: Layer, case: Experts, copies: int, chain: Chainer) -> timing.Chain:
    sets = [
        (rows(case, key), weights(case, layer, key), jnp.asarray(case.sizes, jnp.int32))
        for key in jax.random.split(jax.random.key(0), copies)
    ]
    call = functools.partial(jax_w4a4.grouped_matmul, implementation="cuda", **layer.matmul)
    return chain(call, sets)


def loop(layer: Layer, case: Experts, copies: int, chain: Chainer) -> timing.Chain:
    """A product for each expert with rows, which needs sizes that are known to the host."""

    def call(x, w):
        out, first = [], 0
        for g, size in enumerate(case.sizes):
            if size:
                one = jax.tree.map(lambda leaf: leaf[g], w)  # noqa: B023
                out.append(jax_w4a4.matmul(x[first : first + size], one, **layer.matmul))
            first += size
        return jnp.concatenate(out)

    sets = [
        (rows(case, key), weights(case, layer, key))
        for key in jax.random.split(jax.random.key(0), copies)
    ]
    return chain(call, sets)


def dense(layer: Layer, case: Experts, copies: int, chain: Chainer) -> timing.Chain:
    """One weight for all rows: what the kernel makes of the same FLOP without groups."""
    one = dataclasses.replace(case, sizes=(1,))
    sets = []
    for key in jax.random.split(jax.random.key(0), copies):
        w = jax.tree.map(lambda leaf: leaf[0], weights(one, layer, key))
        sets.append((rows(case, key), w))
    return chain(functools.partial(jax_w4a4.matmul, **layer.matmul), sets)


Builder = Callable[[Experts, int, Chainer], timing.Chain]


def routes(layers: list[Layer]) -> Iterator[tuple[str, Builder]]:
    yield "xla ragged_dot bf16", xla_ragged_dot
    for layer in layers:
        yield f"grouped_matmul {layer.name}", functools.partial(grouped, layer)
        yield f"loop {layer.name}", functools.partial(loop, layer)
        yield f"dense {layer.name}", functools.partial(dense, layer)


def weight_bytes(case: Experts, route: str) -> int:
    """Codes and block scales of the experts that have rows."""
    if "xla" in route:
        bits = 16.0
    else:
        bits = 4.0 + (8 / 32 if "mxfp4" in route else 8 / 16 if "nvfp4" in route else 0.0)
    used = 1 if route.startswith("dense") else sum(size > 0 for size in case.sizes)
    return int(used * case.n * case.k * bits / 8)


def measure(case: Experts, route: str, build: Builder, args: argparse.Namespace) -> dict:
    how = timing.jax_chain
    if args.stack:
        how = functools.partial(timing.jax_stack, turns=args.turns)
    chain = build(case, args.stack or args.copies, how)
    seconds = timing.seconds_per_call(chain, rounds=args.rounds)
    row = {
        "us": seconds * 1e6,
        "tflops": case.flops / seconds / 1e12,
        "weight_tb_per_s": weight_bytes(case, route) / seconds / 1e12,
    }
    kernels = timing.kernel_seconds(chain) if args.kernels else {}
    if kernels and not route.startswith("loop"):
        gemm = max(kernels.values())
        row |= {
            "kernels_us": {name: s * 1e6 for name, s in kernels.items()},
            "gemm_us": gemm * 1e6,
            "gemm_tflops": case.flops / gemm / 1e12,
            "gemm_tb_per_s": weight_bytes(case, route) / gemm / 1e12,
        }
    return row


def line(row: dict) -> str:
    head = f"{row['case']:<34} {row['route']:<24}"
    if "error" in row:
        return f"{head} {row['error'][:90]}"
    text = f"{head} {row['us']:8.1f} us {row['tflops']:7.1f} TF {row['weight_tb_per_s']:5.2f} TB/s"
    if "gemm_us" in row:
        text += (
            f"  gemm {row['gemm_us']:8.1f} us {row['gemm_tflops']:7.1f} TF "
            f"{row['gemm_tb_per_s']:5.2f} TB/s"
        )
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.grouped", description=__doc__)
    names = [layer.name for layer in LAYERS]
    parser.add_argument(
        "--layers", nargs="+", choices=names, default=["mxfp4", "nvfp4", "int4 per row"]
    )
    parser.add_argument("--linear", action="store_true", help="weights as quantize returns them")
    parser.add_argument("--cases", nargs="+", help="only cases that contain one of these texts")
    parser.add_argument("--routes", nargs="+", help="only routes that contain one of these texts")
    parser.add_argument("--copies", type=int, default=3, help="sets of operands, rotated")
    parser.add_argument("--stack", type=int, metavar="LAYERS", help="a stack of so many layers")
    parser.add_argument("--turns", type=int, default=2, help="of a dispatch through the stack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--no-kernels", dest="kernels", action="store_false", help="wall time only, no profiler"
    )
    parser.add_argument("--json", type=pathlib.Path, help="where the result is written")
    args = parser.parse_args(argv)
    layers = [layer for layer in LAYERS if layer.name in args.layers]
    if not args.linear:
        layers = [prepared(layer) for layer in layers]
    found: list[dict] = []
    for case in CASES:
        if args.cases and not any(text in str(case) for text in args.cases):
            continue
        for name, build in routes(layers):
            if args.routes and not any(text in name for text in args.routes):
                continue
            row = {"case": str(case), "route": name, "m": case.m, "k": case.k, "n": case.n}
            row["sizes"] = list(case.sizes)
            if args.stack:
                row |= {"layers": args.stack, "turns": args.turns}
            row["prepared"] = any(layer.prepared and name.endswith(layer.name) for layer in layers)
            try:
                row |= measure(case, name, build, args)
            except Exception as error:  # a route that cannot run a case is a result
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(row)
            print(line(row), flush=True)
            if args.json:
                result = {"environment": environment("bench.grouped"), "rank": RANK, "rows": found}
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = [row for row in found if "error" in row and row["route"].startswith("grouped")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
