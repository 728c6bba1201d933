"""Exhaustive interleaving check of the protocol of sm100_v2 (cuda/sm100_gemm.cuh).

The model is the synchronisation of a group of one CTA, or of two that share every MMA, and nothing
else. Per CTA: one load thread and `warps` store warps (one or two stand for eight). In the leader:
one thread that issues MMAs. The tensor pipe executes later, in order, what it issued: an MMA, which
reads a slot of the main ring in both CTAs and writes an accumulator in both, or a commit's arrival.
Copies land at any later time in any order. Barriers, as in the kernel:

  main full    the leader's; one arrival that expects the bytes of both CTAs
  main empty   each CTA's own; one arrival, of a commit that reaches both
  acc full     each CTA's own; one arrival, of a commit that reaches both
  acc empty    the leader's; an arrival of every store warp of both CTAs

The low-rank product has accumulators of its own in the same ring (`lora_blocks` > 0).

Checked in every reachable state:
- a copy is issued only into a slot whose MMAs have executed;
- an MMA that executes finds its K block in both CTAs, complete;
- an MMA is issued into an accumulator only when every store warp has let go of what it held;
- a store warp that passes a full barrier finds the product that it expects, finished;
- no barrier gets more than it counts, none is touched before it is initialised or after its CTA has
  exited;
- every state without a successor is the end.

The tests search small rings in full. Partial-order reduction (`reduce=True`) reaches the stages of
real plans: loads, issues and the passing of full barriers are taken alone
as soon as they are enabled, and copies land only when the MMA thread waits for them. Sound, because
what a copy or an MMA may destroy is asked when it is issued; the verdicts are compared.

Accumulators, groups and whether there is a low-rank branch come from the plans of `plans()`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from pipeline_model import Violation, Walk, search, settle

from jax_w4a4 import plan
from jax_w4a4.plan import budget


@dataclasses.dataclass(frozen=True)
class Config:
    """One corner; `k_blocks` and `lora_blocks` are main-ring steps of a tile."""

    group: int = 2
    stages: int = 2
    accumulators: int = 2
    k_blocks: int = 2
    lora_blocks: int = 0
    tiles: int = 2
    warps: int = 1
    bug: str = ""


BUGS = {
    "wrong_initial_phase": "the load's first wait uses the consumer's phase",
    "no_empty_wait": "the load does not wait for the slot",
    "full_wait_parity": "the MMA thread waits for the other phase of full",
    "expect_own_half": "the full barrier expects the leader's bytes only",
    "both_expect": "both CTAs arrive at the leader's full barrier, which counts one",
    "peer_signals_itself": "the peer's bytes count on its own barrier",
    "release_leader_only": "the commit that frees a slot reaches the leader only",
    "early_release": "a slot's commit is issued before its MMAs",
    "accumulator_early": "an accumulator is published before its last MMA",
    "no_accumulator_wait": "the MMA thread does not wait for an empty accumulator",
    "low_rank_not_waited": "the low-rank product takes the next accumulator without waiting",
    "low_rank_same_accumulator": "the low-rank product does not advance the accumulators",
    "publish_leader_only": "the commit of an accumulator reaches the leader only",
    "empty_counts_one_cta": "the accumulator's empty barrier counts one CTA's store warps",
    "release_to_own_cta": "store warps of the peer release to their own CTA",
    "release_before_read": "store warps release an accumulator before they have waited for it",
    "one_drain": "store warps take one accumulator per tile, low-rank branch or not",
    "both_issue": "the peer's MMA thread issues too",
    "no_init_sync": "roles start before the peer has initialised its barriers",
    "no_exit_sync": "a CTA exits without waiting for its peer",
}


def load_program(c: Config) -> list[tuple]:
    """(slot, parity to wait for, block)."""
    walk = Walk(c.stages)
    flip = 0 if c.bug == "wrong_initial_phase" else 1
    steps = (walk.step() for _ in range(c.tiles * (c.k_blocks + c.lora_blocks)))
    return [(slot, phase ^ flip, block) for slot, phase, block in steps]


def mma_program(c: Config) -> list[tuple]:
    """What the MMA thread does: ("accumulator", slot, parity, product), then for each block
    ("mma", slot, parity, block, accumulator slot, product, last)."""
    main, acc = Walk(c.stages), Walk(c.accumulators)
    ops: list[tuple] = []
    for _ in range(c.tiles):
        for low_rank, blocks in ((False, c.k_blocks), (True, c.lora_blocks)):
            if not blocks:
                continue
            kept = (acc.slot, acc.phase, acc.block)
            a, phase, product = acc.step()
            skip = c.bug == "no_accumulator_wait" or (low_rank and c.bug == "low_rank_not_waited")
            if low_rank and c.bug == "low_rank_same_accumulator":
                acc.slot, acc.phase, acc.block = kept
                a, phase, product = kept[0], kept[1], kept[2] - 1
            ops.append(("accumulator", a, None if skip else phase ^ 1, product))
            for i in range(blocks):
                slot, full, block = main.step()
                parity = full ^ (c.bug == "full_wait_parity")
                ops.append(("mma", slot, parity, block, a, product, i == blocks - 1))
    return ops


def issued_by(c: Config, op: tuple) -> list[tuple]:
    """Operations of the tensor pipe: ("mma", slot, block, product), ("free", slot), ("publish",
    accumulator slot, product)."""
    if op[0] != "mma":
        return []
    _, slot, _, block, a, product, last = op
    work, free = ("mma", slot, block, product), ("free", slot)
    publish = [("publish", a, product)] if last else []
    if c.bug == "early_release":
        return [free, work, *publish]
    if c.bug == "accumulator_early":
        return [*publish, work, free]
    return [work, free, *publish]


def store_program(c: Config) -> list[tuple]:
    """("wait", accumulator slot, parity, product) and ("release", slot, product)."""
    acc = Walk(c.accumulators)
    ops: list[tuple] = []
    drains = 2 if c.lora_blocks and c.bug != "one_drain" else 1
    for _ in range(c.tiles * drains):
        a, phase, product = acc.step()
        pair = [("wait", a, phase, product), ("release", a, product)]
        ops += pair[::-1] if c.bug == "release_before_read" else pair
    return ops


class Model:
    """Successor function over states (program counters, pipe position, barriers, landed copies,
    copies in flight, initialised CTAs)."""

    def __init__(self, c: Config, reduce: bool = True):
        self.c, self.reduce = c, reduce
        ctas = range(c.group)
        self.roles = [(cta, "load") for cta in ctas] + [(0, "mma")]
        if c.bug == "both_issue":
            self.roles.append((1, "mma"))
        self.roles += [(cta, "store") for cta in ctas for _ in range(c.warps)]
        programs = {"load": load_program(c), "mma": mma_program(c), "store": store_program(c)}
        self.programs = [programs[kind] for _, kind in self.roles]
        self.issuers = [i for i, (_, kind) in enumerate(self.roles) if kind == "mma"]
        # What the pipe executes, and how much of it is issued at each position of the MMA thread.
        self.queue: list[tuple] = []
        self.issued = [0]
        for op in programs["mma"]:
            self.queue += issued_by(c, op)
            self.issued.append(len(self.queue))
        executed = list(itertools.accumulate((op[0] == "mma" for op in self.queue), initial=0))
        self.executed = executed  # MMAs after so many operations
        ends = {op[3]: i + 1 for i, op in enumerate(self.queue) if op[0] == "mma"}
        self.finished_after = ends  # product -> operations
        count = c.warps * (1 if c.bug == "empty_counts_one_cta" else c.group)
        self.counts: dict[tuple, int] = {}
        for cta in ctas:
            for s in range(c.stages):
                self.counts["full", cta, s] = self.counts["empty", cta, s] = 1
            for a in range(c.accumulators):
                self.counts["acc full", cta, a] = 1
                self.counts["acc empty", cta, a] = count
        self.index = {key: i for i, key in enumerate(self.counts)}

    def initial(self) -> tuple:
        early = self.c.bug == "no_init_sync"
        barriers = tuple((0, count, 0) for count in self.counts.values())
        return (
            (-1 if early else 0,) * len(self.roles), 0, barriers, frozenset(), frozenset(),
            (not early,) * self.c.group,
        )  # fmt: skip

    def finished(self, state: tuple) -> bool:
        pcs, pipe, _, _, flight, _ = state
        done = all(pc == len(p) for pc, p in zip(pcs, self.programs, strict=True))
        return done and not flight and pipe == len(self.queue) * len(self.issuers)

    def _touch(self, state: tuple, cta: int) -> None:
        pcs, *_, ready = state
        if not ready[cta]:
            raise Violation("touches barriers that are not initialised")
        if self.c.bug == "no_exit_sync" and all(
            pc == len(p)
            for pc, p, role in zip(pcs, self.programs, self.roles, strict=True)
            if role[0] == cta
        ):
            raise Violation("touches a CTA that has exited")

    def _arrive(self, state: tuple, barriers: list, key: tuple, expect: int = 0) -> None:
        self._touch(state, key[1])
        phase, arrivals, missing = barriers[self.index[key]]
        barriers[self.index[key]] = settle(
            (phase, arrivals - 1, missing + expect), self.counts[key]
        )

    def _open(self, state: tuple, key: tuple, parity: int | None) -> bool:
        """Whether a wait for this parity passes."""
        return parity is None or state[2][self.index[key]][0] != parity

    def _load(self, state: tuple, i: int, op: tuple) -> tuple | None:
        pcs, pipe, barriers, landed, flight, ready = state
        slot, parity, block = op
        cta, c = self.roles[i][0], self.c
        if c.bug != "no_empty_wait" and not self._open(state, ("empty", cta, slot), parity):
            return None
        if self.executed[min(pipe, len(self.queue))] < block - c.stages + 1:
            raise Violation(f"loads slot {slot} of CTA {cta} before its MMAs have executed")
        barriers = list(barriers)
        if cta == 0 or c.bug == "both_expect":
            expect = 1 if c.bug == "expect_own_half" else c.group
            self._arrive(state, barriers, ("full", 0, slot), expect)
        signal = cta if c.bug == "peer_signals_itself" else 0
        self._touch(state, signal)
        copy = (cta, slot, block, signal)
        return self._next(pcs, i), pipe, tuple(barriers), landed, flight | {copy}, ready

    def _land(self, state: tuple, copy: tuple) -> tuple:
        pcs, pipe, barriers, landed, flight, ready = state
        cta, slot, block, signal = copy
        key = ("full", signal, slot)
        phase, arrivals, missing = barriers[self.index[key]]
        barriers = list(barriers)
        barriers[self.index[key]] = settle((phase, arrivals, missing - 1), self.counts[key])
        landed = frozenset(x for x in landed if x[:2] != (cta, slot)) | {(cta, slot, block)}
        return pcs, pipe, tuple(barriers), landed, flight - {copy}, ready

    def _issue(self, state: tuple, i: int, op: tuple) -> tuple | None:
        pcs, pipe, barriers, landed, flight, ready = state
        cta = self.roles[i][0]
        if op[0] == "accumulator":
            _, a, parity, product = op
            if not self._open(state, ("acc empty", 0, a), parity):
                return None
            for pc, program, (_, kind) in zip(pcs, self.programs, self.roles, strict=True):
                if kind == "store":
                    released = sum(step[0] == "release" for step in program[: max(pc, 0)])
                    if released < product - self.c.accumulators + 1:
                        raise Violation(f"MMAs into accumulator {a} before it was read")
        elif not self._open(state, ("full", 0 if cta == 0 else cta, op[1]), op[2]):
            return None
        return self._next(pcs, i), pipe, barriers, landed, flight, ready

    def _execute(self, state: tuple) -> tuple | None:
        """The next operation of the tensor pipe, if it was issued."""
        pcs, pipe, barriers, landed, flight, ready = state
        total = sum(self.issued[max(pcs[i], 0)] for i in self.issuers)
        if pipe == total:
            return None
        if pipe >= self.issued[max(pcs[self.issuers[0]], 0)]:
            raise Violation("an operation is issued twice")
        op, c = self.queue[pipe], self.c
        barriers = list(barriers)
        if op[0] == "mma":
            for cta in range(c.group):
                if (cta, op[1], op[2]) not in landed:
                    raise Violation(f"an MMA expects block {op[2]} in slot {op[1]} of CTA {cta}")
        elif op[0] == "free":
            for cta in range(1 if c.bug == "release_leader_only" else c.group):
                self._arrive(state, barriers, ("empty", cta, op[1]))
        else:
            for cta in range(1 if c.bug == "publish_leader_only" else c.group):
                self._arrive(state, barriers, ("acc full", cta, op[1]))
        return pcs, pipe + 1, tuple(barriers), landed, flight, ready

    def _store(self, state: tuple, i: int, op: tuple) -> tuple | None:
        pcs, pipe, barriers, landed, flight, ready = state
        cta = self.roles[i][0]
        if op[0] == "wait":
            _, a, parity, product = op
            if not self._open(state, ("acc full", cta, a), parity):
                return None
            if pipe < self.finished_after.get(product, 0):
                raise Violation(f"accumulator {a} is read before its MMAs have executed")
            if any(
                step[0] == "accumulator" and step[3] > product and step[1] == a
                for step in self.programs[self.issuers[0]][: max(pcs[self.issuers[0]], 0)]
            ):
                raise Violation(f"accumulator {a} is read after the next MMAs into it")
        else:
            barriers = list(barriers)
            to = cta if self.c.bug == "release_to_own_cta" else 0
            self._arrive(state, barriers, ("acc empty", to, op[1]))
        return self._next(pcs, i), pipe, tuple(barriers), landed, flight, ready

    @staticmethod
    def _next(pcs: tuple, i: int) -> tuple:
        return pcs[:i] + (pcs[i] + 1,) + pcs[i + 1 :]

    def successors(self, state: tuple) -> list:
        pcs, _, _, _, flight, ready = state
        branches: list[Any] = []
        awaited = set()
        for i, ((cta, kind), program) in enumerate(zip(self.roles, self.programs, strict=True)):
            pc = pcs[i]
            if pc == len(program):
                continue
            if pc < 0:  # start-up without the cluster barrier
                if kind == "load" or ready[cta]:
                    marks = tuple(r or t == cta for t, r in enumerate(ready))
                    branches.append((self._next(pcs, i), *state[1:5], marks))
                continue
            op = program[pc]
            take = {"load": self._load, "mma": self._issue, "store": self._store}[kind]
            step = take(state, i, op)
            if step is None:
                if kind == "mma" and op[0] == "mma":
                    awaited.add(op[1])
            elif self.reduce and (kind != "store" or op[0] == "wait"):
                return [step]
            else:
                branches.append(step)
        step = self._execute(state)
        if step is not None:
            branches.append(step)
        if not self.reduce:
            return branches + [self._land(state, copy) for copy in flight]
        landing = [copy for copy in flight if copy[1] in awaited]
        if landing:
            return [self._land(state, copy) for copy in landing]
        # A bug may leave the thread past its wait; what is in flight then still lands.
        return branches or [self._land(state, copy) for copy in flight]


def explore(c: Config, reduce: bool = True) -> tuple[int, str | None]:
    """(states visited, violation or None)."""
    return search(Model(c, reduce))


def plans() -> list[plan.Plan]:
    """Every tile and format of sm100_v2, without and with a low-rank branch."""
    found = []
    for fmt, rank, tile in itertools.product(
        ("nvfp4", "mxfp4"), (0, 32, 128), budget.DESIGNS["sm100_v2"].tiles
    ):
        block, scale = {"nvfp4": (16, "float8_e4m3fn"), "mxfp4": (32, "float8_e8m0fnu")}[fmt]
        half = "bfloat16"
        problem = plan.Problem(4352, 3072, 3840, rank, fmt, block, half, half, half, scale)
        forced = dict(zip(("tile_m", "tile_n", "cluster"), tile, strict=True))
        found.append(plan.solve(problem, "sm_100", kernel="sm100_v2", lora_stages=0, **forced))
    return found


def shapes() -> set[tuple[int, int, int]]:
    """(CTAs of a group, accumulators, whether 0, 1 or more low-rank steps) that occur in plans."""
    out = set()
    for p in plans():
        (accumulator,) = (row for row in p.rows if row.name == "accumulator")
        out.add((p.cluster, accumulator.stages, min(2, budget.lora_steps(p.problem))))
    return out


def corners() -> list[Config]:
    """Plans' shapes x ring depths x blocks fewer than, equal to, more than stages x tiles."""
    out = []
    for (group, accumulators, lora), stages in itertools.product(sorted(shapes()), (2, 3)):
        for blocks in (stages - 1, stages, stages + 1):
            for tiles in (0, 1, 2, accumulators + 1):
                out.append(Config(group, stages, accumulators, blocks, lora, tiles))
    return list(dict.fromkeys(out))


# The smallest corner in which each bug can show.
BUG_CORNERS = {
    bug: Config(2, 2, 2, 2, 1, 3, bug=bug) for bug in BUGS
} | {
    # With two accumulators the store warps of a tile have let go of the low-rank one before.
    "low_rank_not_waited": Config(2, 2, 1, 2, 1, 3, bug="low_rank_not_waited"),
}  # fmt: skip
