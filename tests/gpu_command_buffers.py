"""Child process of test_gpu.py: chains of handler calls under the XLA_FLAGS of its environment.

  gpu_command_buffers.py LENGTH [ROWS [FORMAT]]         LENGTH calls with other operations between
  gpu_command_buffers.py stack LENGTH [ROWS [FORMAT]]   a decode step: the calls alone, replayed

Prints one JSON object with the handler's counters. A process of its own because XLA reads its flags
once.
"""

import collections
import functools
import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a4 import _ffi, explain
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


def host_events(run):
    """How often each event was seen on the host while `run` ran, by name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        planes = [p for f in files for p in jax.profiler.ProfileData.from_file(str(f)).planes]
    return collections.Counter(
        event.name
        for plane in planes
        if plane.name.startswith("/host")
        for line in plane.lines
        for event in line.events
    )


def stack(length: int, rows: int = 1, format: str = "mxfp4") -> None:
    """`length` layers of one token batch, whose result is donated to the next step."""
    size, steps = 352, 10
    keys = jax.random.split(jax.random.key(0), length + 1)
    x = jax.random.normal(keys[0], (rows, size), jnp.bfloat16)
    weights = [
        quantize(jax.random.normal(k, (size, size)) / size**0.5, format=format, rank=16).replace(
            bias=jnp.ones(size)
        )
        for k in keys[1:]
    ]
    call = functools.partial(matmul, implementation="cuda")
    expected = np.asarray(functools.reduce(call, weights, x)).tobytes()

    # Given away so that the result lands there.
    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def layers(last, x, weights):
        return functools.reduce(call, weights, x)

    report = {"length": length, "kernel": explain(call, x, weights[0]).calls[0].plan.kernel}
    y = jnp.zeros_like(x)
    wrong = 0

    def step():
        nonlocal y
        y = layers(y, x, weights)

    start = _ffi.counters()
    for _ in range(3):
        step()
        wrong += np.asarray(y).tobytes() != expected
    report["first"] = delta(start)
    start = _ffi.counters()
    for _ in range(steps):
        step()
    wrong += np.asarray(y).tobytes() != expected
    report["replays"] = delta(start)
    start = _ffi.counters()
    seen = host_events(lambda: [step() for _ in range(steps)] and y.block_until_ready())
    wrong += np.asarray(y).tobytes() != expected
    report["profiled"] = delta(start)
    # "cuGraphLaunch (CudaGraph:58)"
    launches = {name: count for name, count in seen.items() if name.startswith("cuGraphLaunch")}
    report["graphs"], report["graph_launches"] = len(launches), sum(launches.values())
    report["wrong"] = int(wrong)
    print(json.dumps(report))


if __name__ == "__main__":
    run, arguments = main, sys.argv[1:]
    if arguments[0] == "stack":
        run, arguments = stack, arguments[1:]
    run(int(arguments[0]), *map(int, arguments[1:2]), *arguments[2:3])
