"""Exhaustive interleaving check of the v2 kernel's mbarrier protocol (cuda/sm90_pipeline.cuh).

The model is the kernel's synchronisation and nothing else. Per CTA of a cluster: one producer,
`consumers` consumer warps (two stand for eight, they differ only by identity), a main ring whose
activation copies are multicast to the cluster, and a token ring of the CTA's own. Copies are
asynchronous: each issued copy lands at any later time, in any order, and counts on its target's
full barrier. Reads are asynchronous too: a consumer's MMAs use a slot from its wait until the MMA
wait that precedes the release.

Checked in every reachable state:
- a copy is issued only into a slot that every consumer of the target CTA has read and left;
- a consumer that passes a full barrier finds exactly the block it expects, every part of it landed;
- no barrier is completed more often than it was armed;
- nobody arrives at, or copies to, a CTA that has not initialised its barriers or that has exited;
- the only states without a successor are those where every role has finished and no copy is left.

Partial-order reduction (`reduce=True`): steps that commute with every other role's steps are taken
as soon as they are enabled, alone. These are a producer's acquire with the copies it issues, a
consumer passing a full barrier, and the landing of copies in one slot that a consumer waits for
(all their orders). What remains is branched on: releases and start-up. It is sound because a
too-early copy is reported when it is issued, not when it lands. The tests run the full exploration
as well on small rings and require the same verdicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
import typing


@dataclasses.dataclass(frozen=True)
class Config:
    """One corner. Blocks are K blocks then low-rank chunks, all through the main ring."""

    cluster: int = 1
    stages: int = 2
    k_blocks: int = 2
    lora_chunks: int = 0
    tiles: int = 1
    consumers: int = 2
    token_stages: int = 2
    # sm90_decode, one tile: the first stages get their weights before the launch before has ended,
    # their activations after it, and in the end the consumers' sums go over the ring.
    decode: bool = False
    # With block scales in turn: K blocks that a box of them covers; 0: all boxes have room.
    # Boxes 0 and 1 are there at first, the others in the last stage until all are looked through.
    cover: int = 0
    # Whether a block's scales are read, and it is waited for, before the one before it is released.
    ahead: bool = True
    bug: str = ""


BUGS = {
    "state_reset_per_tile": "consumers restart at slot 0, phase 0 in every tile",
    "early_release": "a slot is released when its MMAs are issued, not when they have completed",
    "release_own_cta_only": "consumers release to their own CTA's barrier only",
    "empty_counts_one_cta": "the empty barrier counts one CTA's consumers",
    "expect_own_half": "the full barrier expects only what this CTA loads",
    "no_exit_sync": "a CTA exits without waiting for its peer",
    "no_init_sync": "roles start before the peer has initialised its barriers",
    "last_chunk_kept": "the last low-rank chunk of a tile is never released",
    "last_block_kept": "the last K block of a tile is never released",
    "token_early_release": "the token slot is released before it is read",
    "no_empty_wait": "the producer loads without waiting for the slot",
    "wrong_initial_phase": "the producer's first wait uses the consumers' phase",
    "full_count_all_ctas": "the full barrier waits for an arrival from every CTA's producer",
    "sums_before_all": "decode: a warp stores its sums when it is through itself",
    "sums_in_flight": "decode: sums are stored while the last MMAs read the ring",
    "early_weights_only": "decode: the first stages' barriers expect the weights alone",
    "scales_early": "decode: a box of scales comes while its place may still be read",
    "scales_late": "decode: a box of scales comes with the block that needs it",
    "scales_not_expected": "decode: the full barrier does not expect a box of scales",
    "last_stage_unseen": "decode: weights go over scales that are not looked through",
    "early_over_scales": "decode: early weights go into the last stage too",
}


class Violation(Exception):
    """The protocol broke; the message says where."""


def settle(barrier: tuple[int, int, int], count: int) -> tuple[int, int, int]:
    """A barrier (phase, arrivals to come, bytes to come) after it was touched: the next phase if
    nothing is to come."""
    phase, arrivals, missing = barrier
    if arrivals < 0:
        raise Violation("a barrier gets more arrivals than it counts")
    return (phase ^ 1, count, 0) if arrivals == 0 and missing == 0 else barrier


class Walk:
    """A role's (slot, phase, block) walk of one ring."""

    def __init__(self, depth: int):
        self.depth, self.slot, self.phase, self.block = depth, 0, 0, 0

    def step(self):
        at = (self.slot, self.phase, self.block)
        self.block += 1
        self.slot += 1
        if self.slot == self.depth:
            self.slot, self.phase = 0, self.phase ^ 1
        return at

    def restart(self):
        self.slot, self.phase = 0, 0


def box_with(c: Config, block: int) -> int | None:
    """The box of block scales that comes with the weights of a K block."""
    if not c.cover:
        return None
    first = c.cover - 1 + c.stages + {"scales_early": -1, "scales_late": 1}.get(c.bug, 0)
    box = 2 + (block - first) // c.cover
    here = block >= first and (block - first) % c.cover == 0
    return box if here and box * c.cover < c.k_blocks else None


def producer_program(c: Config) -> list[tuple]:
    """("load", ring, slot, parity to wait for, block): acquire, arm, issue the copies."""
    main, token = Walk(c.stages), Walk(c.token_stages)
    flip = 0 if c.bug == "wrong_initial_phase" else 1
    ops = []
    if c.decode:
        steps = [main.step() for _ in range(c.k_blocks)]
        early = steps[: c.stages - (c.cover > 0 and c.bug != "early_over_scales")]
        ops += [("weights", "m", slot, phase ^ flip, block) for slot, phase, block in early]
        ops += [("activations", "m", slot, 0, block) for slot, _, block in early]
        for slot, phase, block in steps[len(early) :]:
            if c.cover and block == c.stages - 1 and c.bug != "last_stage_unseen":
                ops.append(("seen", "m", slot, 0, block))
            ops.append(("load", "m", slot, phase ^ flip, block))
        return ops
    for _ in range(c.tiles):
        slot, phase, block = token.step()
        ops.append(("load", "t", slot, phase ^ flip, block))
        for _ in range(c.k_blocks + c.lora_chunks):
            slot, phase, block = main.step()
            ops.append(("load", "m", slot, phase ^ flip, block))
    return ops


def consumer_program(c: Config) -> list[tuple]:
    """("wait", ring, slot, parity, block) starts reading; ("leave", ring, slot, block) is the MMA
    wait with the release behind it; "release" and "stop" are its halves apart (bugs only)."""
    main, token = Walk(c.stages), Walk(c.token_stages)
    ops = []

    def chain(count, keep_last):
        previous = None
        for _ in range(count):
            slot, phase, block = main.step()
            if previous and not c.ahead and c.bug != "early_release":
                ops.append(("leave", "m", *previous))
                previous = None
            if c.cover:
                ops.append(("scales", "s", block // c.cover % 2, block))
            ops.append(("wait", "m", slot, phase, block))
            if c.bug == "early_release":
                ops.append(("release", "m", slot, block))
                if previous:
                    ops.append(("stop", "m", *previous))
            elif previous:
                ops.append(("leave", "m", *previous))
            previous = (slot, block)
        if previous:
            last = "stop" if keep_last or c.bug == "early_release" else "leave"
            ops.append((last, "m", *previous))

    if c.decode:
        if c.cover:
            ops.append(("look", "m", 0, 0))
        chain(c.k_blocks, False)
        sums = ("sums", "m", 0, 0)
        if c.bug == "sums_in_flight":
            return [*ops[:-1], sums, ops[-1]]
        return [*ops, *([] if c.bug == "sums_before_all" else [("meet", "m", 0, 0)]), sums]
    for _ in range(c.tiles):
        if c.bug == "state_reset_per_tile":
            main.restart()
        chain(c.k_blocks, c.bug == "last_block_kept")
        slot, phase, block = token.step()
        if c.bug == "token_early_release":
            ops += [
                ("release", "t", slot, block),
                ("wait", "t", slot, phase, block),
                ("stop", "t", slot, block),
            ]
        else:
            ops += [("wait", "t", slot, phase, block), ("leave", "t", slot, block)]
        chain(c.lora_chunks, c.bug == "last_chunk_kept")
    return ops


class _Slot(typing.NamedTuple):
    """One slot of one CTA. A barrier is (phase bit, arrivals to come, bytes to come)."""

    full: tuple[int, int, int]
    empty: tuple[int, int, int]
    block: int = -1  # block whose parts land here
    parts: frozenset = frozenset()
    readers: frozenset = frozenset()


class Model:
    """Successor function over states (role counters, slots, copies in flight, initialised CTAs)."""

    def __init__(self, c: Config, reduce: bool = True):
        self.c, self.reduce = c, reduce
        self.depth = {"m": c.stages, "t": c.token_stages, "s": 2 if c.cover else 0}
        self.roles = [(cta, "producer") for cta in range(c.cluster)]
        self.roles += [(cta, "consumer") for cta in range(c.cluster) for _ in range(c.consumers)]
        producer, consumer = producer_program(c), consumer_program(c)
        self.programs = [producer if kind == "producer" else consumer for _, kind in self.roles]
        keys = [
            (cta, r, s) for cta in range(c.cluster) for r in "mts" for s in range(self.depth[r])
        ]
        self.index = {key: i for i, key in enumerate(keys)}
        # Blocks of a ring that a consumer has begun to read by program position.
        self.begun = {
            r: list(
                itertools.accumulate((op[0] == "wait" and op[1] == r for op in consumer), initial=0)
            )
            for r in "mt"
        }
        # Blocks whose scales it has read.
        self.scaled = list(itertools.accumulate((op[0] == "scales" for op in consumer), initial=0))
        self.armed = {"m": 2 if c.bug == "expect_own_half" else 1 + c.cluster, "t": 1}
        self.full_count = {"m": c.cluster if c.bug == "full_count_all_ctas" else 1, "t": 1}
        self.empty_count = {
            "m": c.consumers * (1 if c.bug == "empty_counts_one_cta" else c.cluster),
            "t": c.consumers,
        }
        self.complete = {"m": frozenset(["weight", *range(c.cluster)]), "t": frozenset(["weight"])}

    def initial(self):
        early = self.c.bug == "no_init_sync"
        slots = tuple(
            _Slot((0, 1, 0), (0, 1, 0), block=s)  # the box in a place for scales
            if r == "s"
            else _Slot((0, self.full_count[r], 0), (0, self.empty_count[r], 0))
            for _, r, s in self.index
        )
        return (
            (-1 if early else 0,) * len(self.roles),
            slots,
            frozenset(),
            (not early,) * self.c.cluster,
        )

    def finished(self, state) -> bool:
        pcs, _, flight, _ = state
        return not flight and all(pc == len(p) for pc, p in zip(pcs, self.programs, strict=True))

    def _touch(self, state, cta):
        pcs, _, _, ready = state
        if not ready[cta]:
            raise Violation("touches barriers that are not initialised")
        if self.c.bug == "no_exit_sync" and all(
            pc == len(p)
            for pc, p, r in zip(pcs, self.programs, self.roles, strict=True)
            if r[0] == cta
        ):
            raise Violation("touches a CTA that has exited")

    def _load(self, state, i, op):
        """None while the slot's empty phase is not complete."""
        pcs, slots, flight, ready = state
        kind, ring, slot, parity, block = op
        cta = self.roles[i][0]
        consumers = [
            pc for pc, role in zip(pcs, self.roles, strict=True) if role == (cta, "consumer")
        ]
        if kind == "seen":
            return (self._next(pcs, i), slots, flight, ready) if min(consumers) > 0 else None
        at = self.index[(cta, ring, slot)]
        slots = list(slots)
        copies = set()
        if self.c.cover and slot == self.c.stages - 1 and min(consumers) == 0:
            raise Violation("loads the last stage while scales in it are looked through")
        if kind != "activations":
            if slots[at].empty[0] == parity and self.c.bug != "no_empty_wait":
                return None
            f = slots[at].full
            armed = self.armed[ring]
            if kind == "weights" and self.c.bug == "early_weights_only":
                armed = 1
            box = box_with(self.c, block) if ring == "m" else None
            if box is not None:
                armed += self.c.bug != "scales_not_expected"
                if any(self.scaled[pc] < (box - 1) * self.c.cover for pc in consumers):
                    raise Violation(f"loads box {box} of scales over one that is to be read")
            full = settle((f[0], f[1] - 1, f[2] + armed), self.full_count[ring])
            slots[at] = slots[at]._replace(full=full)
            copies = {(cta, ring, slot, block, "weight")}
            if box is not None:
                copies.add((cta, ring, slot, block, "scales"))
        if ring == "m" and kind != "weights":
            copies |= {(t, ring, slot, block, cta) for t in range(self.c.cluster)}
        for target in {copy[0] for copy in copies}:
            self._touch(state, target)
            there = self.index[(target, ring, slot)]
            if slots[there].readers:
                raise Violation(f"loads {ring}{slot} of CTA {target} while it is read")
            for role, pc in zip(self.roles, pcs, strict=True):
                if (
                    role == (target, "consumer")
                    and self.begun[ring][max(pc, 0)] < block - self.depth[ring] + 1
                ):
                    raise Violation(f"loads {ring}{slot} of CTA {target} before it was read")
        return self._next(pcs, i), tuple(slots), flight | copies, ready

    def _land(self, state, copy):
        pcs, slots, flight, ready = state
        target, ring, slot, block, part = copy
        at = self.index[(target, ring, slot)]
        s = slots[at]
        parts = (s.parts if s.block == block else frozenset()) | {part}
        full = settle((s.full[0], s.full[1], s.full[2] - 1), self.full_count[ring])
        slots = list(slots)
        slots[at] = s._replace(full=full, block=block, parts=parts)
        if part == "scales":
            box = box_with(self.c, block)
            place = self.index[(target, "s", box % 2)]
            slots[place] = slots[place]._replace(block=box)
        return pcs, tuple(slots), flight - {copy}, ready

    def _consume(self, state, i, op):
        pcs, slots, flight, ready = state
        kind, ring, slot, block = op[0], op[1], op[2], op[-1]
        cta = self.roles[i][0]
        if kind == "meet":
            mates = [pc for pc, role in zip(pcs, self.roles, strict=True) if role == self.roles[i]]
            return (self._next(pcs, i), slots, flight, ready) if min(mates) >= pcs[i] else None
        if kind == "look":
            return self._next(pcs, i), slots, flight, ready
        if kind == "sums" and (any(s.readers for s in slots) or flight):
            raise Violation("sums go over slots that are read or copied to")
        at = self.index[(cta, ring, slot)]
        slots = list(slots)
        s = slots[at]
        if kind == "scales":
            if s.block != block // self.c.cover:
                raise Violation(f"scales of block {block} are not there, but box {s.block}")
            return self._next(pcs, i), tuple(slots), flight, ready
        if kind == "wait":
            if s.full[0] == op[3]:
                return None
            complete = self.complete[ring]
            if ring == "m" and box_with(self.c, block) is not None:
                complete |= {"scales"}
            if s.block != block or s.parts != complete:
                raise Violation(
                    f"expects block {block} in {ring}{slot}, finds {sorted(map(str, s.parts))}"
                    f" of {s.block}"
                )
            slots[at] = s._replace(readers=s.readers | {(i, block)})
        if kind in ("stop", "leave"):
            slots[at] = s._replace(readers=s.readers - {(i, block)})
        if kind in ("release", "leave"):
            cluster_wide = ring == "m" and self.c.bug != "release_own_cta_only"
            for target in range(self.c.cluster) if cluster_wide else (cta,):
                self._touch(state, target)
                there = self.index[(target, ring, slot)]
                e = slots[there].empty
                empty = settle((e[0], e[1] - 1, e[2]), self.empty_count[ring])
                slots[there] = slots[there]._replace(empty=empty)
        return self._next(pcs, i), tuple(slots), flight, ready

    @staticmethod
    def _next(pcs, i):
        return pcs[:i] + (pcs[i] + 1,) + pcs[i + 1 :]

    def successors(self, state) -> list:
        pcs, slots, flight, ready = state
        branches, waited = [], []
        for i, ((cta, kind), program) in enumerate(zip(self.roles, self.programs, strict=True)):
            pc = pcs[i]
            if pc == len(program):
                continue
            if pc < 0:  # start-up without the cluster barrier: the producer's thread initialises
                if kind == "producer" or ready[cta]:
                    marks = tuple(r or t == cta for t, r in enumerate(ready))
                    branches.append((self._next(pcs, i), slots, flight, marks))
                continue
            op = program[pc]
            step = self._load(state, i, op) if kind == "producer" else self._consume(state, i, op)
            if step is None:
                if kind == "consumer" and op[0] == "wait":
                    waited.append((cta, op[1], op[2]))
            elif self.reduce and op[0] in ("load", "wait"):
                return [step]
            else:
                branches.append(step)
        if not self.reduce:
            return branches + [self._land(state, copy) for copy in flight]
        for where in waited:
            landing = [copy for copy in flight if copy[:3] == where]
            if landing:
                return [self._land(state, copy) for copy in landing]
        return branches


def search(model: typing.Any, limit: int = 3_000_000) -> tuple[int, str | None]:
    """Every state that a model can reach: (how many were visited, violation or None)."""
    start = model.initial()
    seen, stack = {start}, [start]
    try:
        while stack:
            state = stack.pop()
            following = model.successors(state)
            if not following and not model.finished(state):
                raise Violation("deadlock")
            for s in following:
                if s not in seen:
                    seen.add(s)
                    stack.append(s)
            if len(seen) > limit:
                raise RuntimeError(f"{model.c}: more than {limit} states")
    except Violation as violation:
        return len(seen), str(violation)
    return len(seen), None


def explore(c: Config, reduce: bool = True) -> tuple[int, str | None]:
    """(states visited, violation or None)."""
    return search(Model(c, reduce))


def corners() -> list[Config]:
    """Tiles 0, 1, 2, many x blocks fewer than, equal to, more than stages x cluster x chunks."""
    out = []
    for cluster, stages, tiles, chunks in itertools.product(
        (1, 2), (2, 3), (0, 1, 2, 3), (0, 1, 2)
    ):
        if stages == 3 and tiles == 3:
            continue  # nothing that two tiles or the shallower ring do not reach
        for blocks in (stages - 1, stages, stages + 1):
            out.append(Config(cluster, stages, blocks, chunks, tiles))
    return out


def decode_corners() -> list[Config]:
    """One K block, fewer than, equal to, more than stages, several rounds."""
    plain = [
        Config(stages=stages, k_blocks=blocks, consumers=consumers, decode=True)
        for stages in (2, 3, 4)
        for blocks in sorted({1, stages - 1, stages, stages + 1, 2 * stages + 1})
        for consumers in (2, 3)
    ]
    # As many stages as a box covers, or fewer; a box that is taken once, and places taken again.
    in_turn = [
        Config(stages=stages, k_blocks=blocks, decode=True, cover=cover, ahead=ahead)
        for stages, cover in ((2, 2), (2, 3), (3, 3), (2, 4), (4, 4))
        for blocks in (2 * cover + 1, 3 * cover, 4 * cover + 1)
        for ahead in (False, True)
    ]
    return plain + in_turn


# The smallest corner in which each bug can show.
BUG_CORNERS = {
    bug: Config(cluster=2, stages=2, k_blocks=2, lora_chunks=1, tiles=3, bug=bug) for bug in BUGS
}
# The main ring hides it unless the producer can run two tiles ahead.
BUG_CORNERS["token_early_release"] = Config(
    stages=3, k_blocks=1, tiles=4, bug="token_early_release"
)
DECODE_BUGS = ("sums_before_all", "sums_in_flight", "early_weights_only")
for bug in DECODE_BUGS:
    BUG_CORNERS[bug] = Config(stages=2, k_blocks=3, decode=True, bug=bug)
SCALE_BUGS = (
    "scales_early", "scales_late", "scales_not_expected", "last_stage_unseen", "early_over_scales",
)  # fmt: skip
for bug in SCALE_BUGS:
    BUG_CORNERS[bug] = Config(stages=2, k_blocks=6, decode=True, cover=2, ahead=False, bug=bug)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="also explore small rings unreduced")
    args = parser.parse_args()
    start, total = time.time(), 0
    for c in [*corners(), *decode_corners()]:
        states, violation = explore(c)
        total += states
        if violation:
            raise SystemExit(f"{c}: {violation}")
    print(f"{len(corners())} corners hold, {total} states, {time.time() - start:.1f} s")
    for bug, c in BUG_CORNERS.items():
        states, violation = explore(c)
        if violation is None:
            raise SystemExit(f"bug {bug} not found")
        print(f"{bug:22s} found after {states:6d} states: {violation}")
    if args.full:
        small = [
            Config(cluster, 2, blocks, chunks, tiles, consumers, bug=bug)
            for bug in ("", *BUGS)
            for cluster, blocks, chunks, tiles, consumers in (
                (1, 1, 1, 2, 2),
                (1, 3, 0, 1, 2),
                (2, 1, 0, 1, 1),
                (2, 2, 0, 1, 1),
            )
        ]
        for c in small:
            reduced, full = explore(c)[1], explore(c, reduce=False)
            if (reduced is None) != (full[1] is None):
                raise SystemExit(f"reduction changes the verdict of {c}: {reduced} / {full[1]}")
        print(f"{len(small)} small rings agree with the full exploration")
    print(f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
