"""Child process of test_gpu.py: chains of handler calls under the XLA_FLAGS of its environment.

Prints one JSON object with the handler's counters. A process of its own because XLA reads its flags
once.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a4 import _ffi
from jax_w4a4.matmul import matmul
from jax_w4a4.quantize import quantize

ADDRESS_SETS = 20


def fresh(tree):
    """Copies at new addresses."""
    return jax.tree.map(lambda a: jax.device_put(np.asarray(a)), tree)


def delta(before):
    return {name: value - before[name] for name, value in _ffi.counters().items()}


def chain(length):
    def f(x, weights):
        for w in weights[:length]:
            # Keeps the values in range; a non-handler operation between the calls.
            x = jnp.tanh(matmul(x, w, implementation="cuda"))
        return x

    return jax.jit(f)


def main(length: int, rows: int = 64, format: str = "nvfp4") -> None:
    keys = jax.random.split(jax.random.key(0), length + 1)
    size = 256
    x = jax.random.normal(keys[0], (rows, size), jnp.bfloat16)
    weights = [
        quantize(jax.random.normal(k, (size, size)) / 16, format=format, rank=16) for k in keys[1:]
    ]
    f, g = chain(length), chain(length)
    expected = x
    for w in weights:
        expected = jnp.tanh(matmul(expected, w, implementation="cuda"))
    expected = np.asarray(expected).tobytes()

    report = {"length": length}
    kept, wrong = [], 0
    start = _ffi.counters()
    for _ in range(ADDRESS_SETS):
        operands = fresh((x, weights))
        kept.append((operands, f(*operands)))
    wrong += sum(np.asarray(y).tobytes() != expected for _, y in kept)
    report["moving"] = delta(start)
    report["addresses"] = len({o[0].unsafe_buffer_pointer() for o, _ in kept})

    # The same operands again and again. The result has to go before the next run, or it moves.
    operands = kept[-1][0]
    for _ in range(3):
        f(*operands).block_until_ready()
    start = _ffi.counters()
    for _ in range(10):
        y = f(*operands)
        wrong += np.asarray(y).tobytes() != expected
        del y
    report["still"] = delta(start)

    start = _ffi.counters()
    for i in range(20):
        y = (f, g)[i % 2](*kept[i][0])
        wrong += np.asarray(y).tobytes() != expected
    report["alternating"] = delta(start)
    report["wrong"] = int(wrong)
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:4])
