"""Timing of chains of calls on whatever device JAX has: wall time, and time inside kernels."""

import collections
import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

# Operand sets must add up to several times the L2 (60 MB on an H200), or the cache is measured.
ROTATE_BYTES = 300e6


def copies_past_cache(bytes_per_set: int, *, most: int = 32) -> int:
    """How many operand sets to rotate so that no call finds its weights in the L2."""
    return max(2, min(most, round(ROTATE_BYTES / max(bytes_per_set, 1))))


@dataclasses.dataclass(frozen=True)
class Chain:
    """`calls` calls on different operands, enqueued together.

    Attributes:
      enqueue: starts them without waiting.
      wait: waits for everything enqueued so far, given what `enqueue` returned last.
      calls: how many calls one `enqueue` makes.
    """

    enqueue: Callable[[], Any]
    wait: Callable[[Any], None]
    calls: int


def jax_chain(call: Callable, operand_sets: Sequence[tuple]) -> Chain:
    """One jitted function that makes `call(*operands)` for every operand set.

    Host dispatch (30-45 us) is then paid once per chain. Buffer addresses stay the same, as command
    buffers need.
    """
    sets = list(operand_sets)

    @jax.jit
    def chain(sets):
        return [call(*operands) for operands in sets]

    return Chain(lambda: chain(sets), jax.block_until_ready, len(sets))


def seconds_per_call(chain: Chain, *, rounds: int = 7, min_seconds: float = 0.05) -> float:
    """Median seconds of one call.

    Chains are enqueued back to back and the host waits once per round, so the device never idles
    between them.
    """
    for _ in range(3):  # compile, then let command buffers be recorded
        chain.wait(chain.enqueue())
    start = time.perf_counter()
    chain.wait(chain.enqueue())
    repeats = max(1, round(min_seconds / max(time.perf_counter() - start, 1e-6)))
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            out = chain.enqueue()
        chain.wait(out)
        samples.append((time.perf_counter() - start) / (repeats * chain.calls))
    return statistics.median(samples)


def kernel_seconds(chain: Chain, *, min_seconds: float = 0.05) -> dict[str, float]:
    """Seconds per call inside each GPU kernel, as the profiler saw them; {} without a GPU.

    The median over a kernel's launches times its launches per call. Kernels that overlap (dependent
    launch) count their overlap twice: switch that off first.
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
