"""Timing of chains of calls: wall time (of the package), and time inside GPU kernels."""

import collections
import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_w4a4
from jax_w4a4 import _ffi
from jax_w4a4._timing import (
    Chain,
    burst_seconds,
    copies_past_cache,
    jax_chain,
    jax_turns,
    seconds_per_call,
    turns_of,
)

__all__ = [
    "Chain",
    "cool_seconds_per_call",
    "copies_past_cache",
    "host_seconds",
    "jax_chain",
    "jax_layers",
    "jax_stack",
    "jax_turns",
    "kernel_seconds",
    "seconds_per_call",
    "through",
    "turns_of",
    "without_dependent_launch",
]


def through(call: Callable, tree: Any, turns: int) -> Callable[..., jax.Array]:
    """A function of x and the weights' leaves that takes x through all layers, `turns` times.

    Each layer reads the result of the one before, so that none can be dropped. The first argument
    is memory for the result.
    """

    def run(_, x, *leaves):
        for w in tree.unflatten(leaves) * turns:
            x = call(x, w)
        return x

    return run


def jax_layers(call: Callable, x: jax.Array, weights: Sequence[Any], turns: int) -> Chain:
    """One jitted function that takes x through `call(x, w)` of every weight, `turns` times.

    It begins with the same x each time. Its result, which has the shape of x, is written over that
    of the call before, so that no address changes and a command buffer is replayed.
    """
    leaves, tree = jax.tree.flatten(list(weights))
    jitted = jax.jit(through(call, tree, turns), donate_argnums=0, keep_unused=True)
    state = [jnp.zeros_like(x)]

    def enqueue() -> jax.Array:
        state[0] = jitted(state[0], x, *leaves)
        return state[0]

    return Chain(enqueue, jax.block_until_ready, turns * len(weights))


def stacking(call: Callable, tree: Any, turns: int) -> Callable[..., jax.Array]:
    """A function of the operand sets' leaves that makes `call(*operands)` of every set in turn.

    What a call reads besides its weight, the second operand, is known only with the result of the
    call before: so it is with rows and group sizes, which a router makes of that. Set i of turn t
    takes those of set i + t, so that no product is asked for twice, which XLA could merge. Of each
    result one element is read, all in one small kernel per turn, or XLA would drop the product.
    """

    def run(seen, *leaves):
        before = seen
        sets = tree.unflatten(leaves)
        for turn in range(turns):
            ys = []
            for i, (_, w, *_) in enumerate(sets):
                x, _, *rest = sets[(i + turn) % len(sets)]
                (x, rest), before = lax.optimization_barrier(((x, rest), before))
                if ys:
                    ys[-1] = before
                before = call(x, w, *rest)
                ys.append(before)
            ys = lax.optimization_barrier(ys)
            seen = seen + jnp.stack([y[0, 0] for y in ys]).astype(seen.dtype)
            before = seen
        return seen

    return run


def jax_stack(call: Callable, operand_sets: Sequence[tuple], turns: int) -> Chain:
    """`jax_turns` in which each call waits for the one before, of `call(x, w, ...)`."""
    return jax_turns(call, operand_sets, turns, stacking)


def host_seconds(chain: Chain, *, samples: int = 5) -> float:
    """Median seconds that the host spends on one `enqueue` while the device is idle.

    Back to back, chains can't take less than this: where it comes near the wall time of one, the
    time measured is the host's.
    """
    for _ in range(3):  # compile, then let command buffers be recorded
        chain.wait(chain.enqueue())
    spent = []
    for _ in range(samples):
        start = time.perf_counter()
        out = chain.enqueue()
        spent.append(time.perf_counter() - start)
        chain.wait(out)
    return statistics.median(spent)


def cool_seconds_per_call(
    chain: Chain, *, rounds: int = 7, pause: float = 0.2, burst: float = 3e-3
) -> float:
    """Median seconds of one call on a GPU that idled for `pause` seconds before some ms of work.

    Kernels that are near a chip's power limit slow its clock down after that (an H200: 1980 to 1530
    MHz, docs/notes.md), so `seconds_per_call` is what they take hour after hour, and this is what
    they take between other work. A sample is the difference of two bursts, of one and three parts.
    """
    chain.wait(chain.enqueue())
    start = time.perf_counter()
    chain.wait(chain.enqueue())
    part = max(1, round(burst / max(time.perf_counter() - start, 1e-6)))

    def seconds(repeats: int) -> float:
        time.sleep(pause)
        return burst_seconds(chain, repeats)

    samples = [seconds(3 * part) - seconds(part) for _ in range(rounds)]
    return statistics.median(samples) / (2 * part * chain.calls)


@contextlib.contextmanager
def without_dependent_launch() -> Iterator[None]:
    """Our kernels one after the other: an early start would be billed as time in the kernel.

    For launches and captures made inside; what was captured before stays as it is.
    """
    if jax_w4a4.has_cuda():
        _ffi.set_dependent_launch(False)
    try:
        yield
    finally:
        if jax_w4a4.has_cuda():
            _ffi.set_dependent_launch(True)


def kernel_seconds(chain: Chain, *, min_seconds: float = 0.05) -> dict[str, float]:
    """Seconds per call inside each GPU kernel, as the profiler saw them; {} without a GPU.

    The median over a kernel's launches times its launches per call. Kernels that overlap (dependent
    launch) count their overlap twice: see `without_dependent_launch`.
    """
    chain.wait(chain.enqueue())
    start = time.perf_counter()
    chain.wait(chain.enqueue())
    repeats = max(2, round(min_seconds / max(time.perf_counter() - start, 1e-6)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                out = chain.enqueue()
            chain.wait(out)
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        planes = [p for f in files for p in jax.profiler.ProfileData.from_file(str(f)).planes]
    durations = collections.defaultdict(list)
    for plane in planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                # Besides the streams there are derived lines (XLA ops, modules, steps).
                if line.name.startswith("Stream"):
                    for event in line.events:
                        durations[event.name].append(event.duration_ns * 1e-9)
    calls = repeats * chain.calls
    return {
        name: statistics.median(times) * len(times) / calls
        for name, times in durations.items()
        if not name.startswith("Mem")  # copies and sets
    }
