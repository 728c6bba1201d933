"""Wall time of chains of calls on whatever device JAX has."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Operand sets must add up to several times the L2 (60 MB on an H200), or the cache is measured.
ROTATE_BYTES = 300e6
# How long each operand set must keep the GPU in one dispatch, which costs the host 10 to 25 us per
# set of a layer's arrays. A wrong guess at a chip's peaks costs turns, not correctness.
TURNS_SECONDS = 50e-6
MOST_TURNS = 8


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


def turns_of(m: int, k: int, n: int) -> int:
    """How many turns `jax_turns` should make, by a guess at the time of one call."""
    guess = 4e-6 + max(n * k * 17 / 32 / 4.5e12, 2 * m * k * n / 1.4e15)
    return min(MOST_TURNS, math.ceil(TURNS_SECONDS / guess))


def turning(call: Callable, tree: Any, turns: int) -> Callable[..., jax.Array]:
    """A function of the operand sets' leaves that goes through the sets (x, w) `turns` times.

    Set i of turn t takes the x of set i + t: no product is asked for twice. A turn's x depends on
    the results of the turn before, so that products with one weight can't be merged. Of each result
    one element is read, all in one small kernel per turn; without a reader XLA would drop the
    product.
    """

    def run(seen, *leaves):
        xs, weights = zip(*tree.unflatten(leaves), strict=True)
        for t in range(turns):
            ys = [call(xs[(i + t) % len(xs)], w) for i, w in enumerate(weights)]
            # Or XLA might compute the elements that are read and no others.
            ys = lax.optimization_barrier(ys)
            seen = seen + jnp.stack([y[0, 0] for y in ys]).astype(seen.dtype)
            xs, seen = lax.optimization_barrier((xs, seen))
        return seen

    return run


def jax_turns(
    call: Callable, operand_sets: Sequence[tuple], turns: int, made: Callable = turning
) -> Chain:
    """One jitted function that makes `call(x, w)` on every operand set, `turns` times in turn.

    For small products: what a dispatch costs the host grows with the arrays it is given and makes,
    not with the turns. The one result is donated to the next call, so that no address changes and
    a command buffer is replayed. `made` makes the function that goes through the sets.
    """
    leaves, tree = jax.tree.flatten(list(operand_sets))
    jitted = jax.jit(made(call, tree, turns), donate_argnums=0)
    state = [jnp.zeros(len(operand_sets))]

    def enqueue() -> jax.Array:
        state[0] = jitted(state[0], *leaves)
        return state[0]

    return Chain(enqueue, jax.block_until_ready, turns * len(operand_sets))


def burst_seconds(chain: Chain, repeats: int) -> float:
    """Seconds of so many `enqueue` back to back on an idle device, until all are done."""
    start = time.perf_counter()
    for _ in range(repeats):
        out = chain.enqueue()
    chain.wait(out)
    return time.perf_counter() - start


def seconds_per_call(chain: Chain, *, rounds: int = 7, min_seconds: float = 0.05) -> float:
    """Median seconds of one call.

    Chains are enqueued back to back and the host waits once per round, so the device never idles
    between them. Of a round's long burst a single chain is subtracted: the host takes a
    millisecond or more until the first of hundreds of layers starts, 3 % of a burst of 50 ms.
    """
    for _ in range(3):  # compile, then let command buffers be recorded
        chain.wait(chain.enqueue())
    start = time.perf_counter()
    chain.wait(chain.enqueue())
    repeats = max(1, round(min_seconds / max(time.perf_counter() - start, 1e-6)))
    bursts, singles = [], []
    for _ in range(rounds):
        bursts.append(burst_seconds(chain, repeats + 1))
        singles.append(burst_seconds(chain, 1))
    # One that the host held up would make a call free of charge, and `tune` would take its tile.
    while len(singles) < 3:
        singles.append(burst_seconds(chain, 1))
    spent = statistics.median(bursts) - statistics.median(singles)
    return spent / (repeats * chain.calls)
