"""Wall time of chains of calls on whatever device JAX has."""

from __future__ import annotations

import dataclasses
import statistics
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
