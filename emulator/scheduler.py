"""Adversarial, seeded schedules of a cluster's warps and of what is in flight.

random  any warp or operation that can run, bursts of random length
pct     the agent of highest random priority; priorities drop at random points
early   operations in flight complete before any warp runs on
late    operations in flight complete only when no warp can run
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from emulator.errors import DeadlockError, EmulationError

POLICIES = ("random", "pct", "early", "late")
# A suspended try_wait may give up; so many rounds of all of them without a change are a deadlock.
_IDLE_ROUNDS = 7
# From the second such round on each takes a second, so that waits with a bound come to it. A step
# of the schedule takes as much as tells who began to wait first.
_ROUND_NS = 1_000_000_000
_STEP_NS = 100


class Scheduler:
    def __init__(self, cluster: Any, policy: str, rng: random.Random, max_steps: int):
        if policy not in POLICIES:
            raise ValueError(f"emulator: unknown policy {policy!r}; expected one of {POLICIES}")
        self.cluster = cluster
        self.policy = policy
        self.rng = rng
        self.max_steps = max_steps
        self.drop_at: set[int] = set()
        if policy == "pct":
            self.drop_at = {int(rng.expovariate(1 / 2000)) for _ in range(8)}

    def run(self) -> None:
        cluster, policy = self.cluster, self.policy
        below = _below(self.rng)
        steps, idle, seen = 0, 0, -1
        floor = 0.0
        version = -1
        warps: list[Any] = []
        operations: list[Any] = []
        agent: Any = None
        for w in cluster.warps:
            w.priority = self.rng.random()
        while True:
            # Who can run changes with the version; without, only for the warp that just ran.
            if cluster.version != version:
                version = cluster.version
                warps = [w for w in cluster.warps if w.ready()]
                operations = [op for op in cluster.in_flight if op.ready()]
            elif agent is not None and not agent.ready():
                warps.remove(agent)
            if not warps and not operations:
                if not cluster.warps:
                    if cluster.in_flight:
                        raise DeadlockError(
                            f"all warps have left, but {cluster.in_flight[0].name} is in flight"
                        )
                    return
                idle = idle + 1 if cluster.progress == seen else 1
                seen = cluster.progress
                if idle > _IDLE_ROUNDS:
                    raise DeadlockError(self._report())
                if idle > 1:
                    cluster.nanoseconds += _ROUND_NS
                cluster.poll_rounds += 1
                version, agent = -1, None
                continue
            steps += 1
            cluster.nanoseconds += _STEP_NS
            if steps > self.max_steps:
                raise EmulationError(f"no end after {steps} scheduling steps\n{self._report()}")
            if policy == "early" and operations:
                agent = operations[below(len(operations))]
            elif policy == "late" and warps:
                agent = warps[below(len(warps))]
            elif policy == "pct":
                agent = max([*warps, *operations], key=lambda a: a.priority)
                if steps in self.drop_at:
                    floor -= 1.0
                    agent.priority = floor
            else:
                i = below(len(warps) + len(operations))
                agent = warps[i] if i < len(warps) else operations[i - len(warps)]
            if agent.__class__ is cluster.warp_class:
                # Under pct a warp keeps running until it has to wait or a priority drops.
                agent.run(24 if policy == "pct" else _BURSTS[below(len(_BURSTS))])
                if agent.live == 0:
                    cluster.warps.remove(agent)
            else:
                agent.step()
                if agent.done:
                    cluster.in_flight.remove(agent)
                cluster.changed()

    def _report(self) -> str:
        cluster = self.cluster
        lines = [
            f"deadlock in cluster {cluster.number}, policy {self.policy}; every warp's position:"
        ]
        for w in cluster.warps:
            lines += ["  " + line for line in w.where()]
        for cta in cluster.ctas:
            for barrier in cta.mbarriers.values():
                lines.append(f"  {barrier}")
        for op in cluster.in_flight:
            lines.append(f"  in flight, not ready: {op.name}")
        return "\n".join(lines)


_BURSTS = (1, 2, 3, 5, 8, 13, 40)


def _below(rng: random.Random) -> Callable[[int], int]:
    """rng.randrange, with less around it."""
    bits = rng.getrandbits

    def below(n: int) -> int:
        width = n.bit_length()
        found = bits(width)
        while found >= n:
            found = bits(width)
        return found

    return below
