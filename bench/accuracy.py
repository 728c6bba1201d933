"""`python -m bench.accuracy`: how far the kernels' sums are from exact ones, on harsh data too.

For each kind of data the result is compared with a float64 product of the same quantized operands,
so quantization itself does not count. What is left is the accumulation, the folding of block
scales, and the rounding of the result to bf16, whose size alone is printed beside it. Errors are
Frobenius norms relative to that of the exact product.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_w4a4

from . import cases
from .__main__ import environment

Array = jax.Array


def _gaussian(key: Array, shape: tuple[int, int]) -> Array:
    return jax.random.normal(key, shape)


def _student_t(key: Array, shape: tuple[int, int]) -> Array:
    return jax.random.t(key, 3.0, shape)


def _lognormal_channels(key: Array, shape: tuple[int, int]) -> Array:
    kx, kc = jax.random.split(key)
    return jax.random.normal(kx, shape) * jnp.exp(jax.random.normal(kc, (1, shape[1])))


def _outlier_channels(key: Array, shape: tuple[int, int]) -> Array:
    """One channel in a hundred is thirty times as large."""
    kx, kc = jax.random.split(key)
    large = jax.random.bernoulli(kc, 0.01, (1, shape[1]))
    return jax.random.normal(kx, shape) * jnp.where(large, 30.0, 1.0)


def _all_positive(key: Array, shape: tuple[int, int]) -> Array:
    """Sums grow with every term: the worst case for an accumulator of few bits."""
    return jnp.abs(jax.random.normal(key, shape))


# name -> (x, w)
DATA: dict[str, tuple[Callable, Callable]] = {
    "gaussian": (_gaussian, _gaussian),
    "student t3": (_student_t, _student_t),
    "lognormal channels": (_lognormal_channels, _gaussian),
    "outlier channels": (_outlier_channels, _gaussian),
    "all positive": (_all_positive, _all_positive),
}


def measure(layer: cases.Layer, data: str, m: int, k: int, n: int) -> dict:
    """Relative errors of one product."""
    kx, kw = jax.random.split(jax.random.key(0))
    make_x, make_w = DATA[data]
    x = make_x(kx, (m, k)).astype(jnp.bfloat16)
    w = jax_w4a4.quantize(make_w(kw, (n, k)), rank=0, **layer.quantize)
    y = np.asarray(jax_w4a4.matmul(x, w, **layer.matmul), np.float64)
    a = np.asarray(jax_w4a4.quantize_activation(x, w).dequantize(), np.float64)
    exact = a @ np.asarray(w.dequantize(), np.float64).T
    rounded = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
    norm = np.linalg.norm(exact)
    return {
        "layer": layer.name,
        "data": data,
        "m": m,
        "k": k,
        "n": n,
        "error": float(np.linalg.norm(y - exact) / norm),
        "error_of_bf16": float(np.linalg.norm(rounded - exact) / norm),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    names = [layer.name for layer in cases.LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=names)
    parser.add_argument("--k", nargs="+", type=int, default=[3840, 15360])
    parser.add_argument("--rows", type=int, default=512, help="of x and of the weight")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    rows = []
    for layer in cases.LAYERS:
        if layer.name not in args.layers:
            continue
        for data in DATA:
            for k in args.k:
                row = measure(layer, data, args.rows, k, args.rows)
                rows.append(row)
                print(
                    f"{layer.name:<16} {data:<20} K={k:<6} error {row['error']:.2e}, of bf16 "
                    f"{row['error_of_bf16']:.2e}",
                    flush=True,
                )
    if args.json:
        result = {"environment": environment("bench.accuracy"), "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
