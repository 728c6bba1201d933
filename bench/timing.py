"""Timing of jitted chains on whatever device JAX has."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax

# Operand sets must add up to several times the L2 (60 MB on an H200), or the cache is measured.
ROTATE_BYTES = 300e6


def copies_past_cache(bytes_per_set: int, *, most: int = 32) -> int:
    """How many operand sets to rotate so that no call finds its weights in the L2."""
    return max(2, min(most, round(ROTATE_BYTES / max(bytes_per_set, 1))))


def seconds_per_call(
    call: Callable, operand_sets: Sequence[tuple], *, rounds: int = 7, min_seconds: float = 0.05
) -> float:
    """Median seconds of one `call(*operands)`.

    All operand sets run inside one jitted function, so that host dispatch (30-45 us) is paid once
    per chain; chains are enqueued back to back and the host waits once per round, so the device
    never idles between them. Buffer addresses stay the same, as command buffers need.
    """

    @jax.jit
    def chain(sets):
        return [call(*operands) for operands in sets]

    sets = list(operand_sets)
    for _ in range(3):  # compile, then let command buffers be recorded
        jax.block_until_ready(chain(sets))
    start = time.perf_counter()
    jax.block_until_ready(chain(sets))
    repeats = max(1, round(min_seconds / max(time.perf_counter() - start, 1e-6)))
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            out = chain(sets)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / (repeats * len(sets)))
    return statistics.median(samples)
