"""The grouped kernel in the emulator: every cell of every group, several schedules."""

import dataclasses
import itertools

import numpy as np
import pytest
from absl.testing import parameterized
from test_sm90 import half

from emulator import Options, grouped, toolchain
from emulator.grouped import GroupedCase
from emulator.product import Case
from emulator.scheduler import POLICIES

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

PATHS = (
    Case("mxfp4"),
    Case("nvfp4"),
    Case("nvfp4", precision="fastest"),
    Case("int4"),
    Case("int4", block=32),
    Case("mxfp4", sign_order="sorted"),
)
# Where groups begin and end: tails, empty groups at each end and inside, rows of no group, one
# group of all rows, none at all, more groups than lanes of a warp.
BOUNDS = (
    (0, 3, 3, 20, 70),
    (0, 0, 64, 64, 64),
    (5, 5, 6, 61, 66, 66),
    (0, 17, 33, 65),
    (0, 0, 0),
    (*range(0, 72, 2), 71),
)
# K of whole 16 bytes of block scales, and not.
SHAPES = ((264, 416), (77, 200), (128, 512), (8, 72))


def cases():
    for i, (case, bounds) in enumerate(itertools.product(PATHS, BOUNDS)):
        n, k = SHAPES[i % len(SHAPES)]
        rank = (0, 48, 160)[i // 2 % 3]
        case = dataclasses.replace(
            case,
            m=73 if i % 3 else bounds[-1] or 4,
            n=n,
            k=k,
            rank=rank,
            fused=True,
            tile_m=(16, 64)[i % 2],
            clusters=(1, 3, 64)[i % 3],
            stages=(None, 2, 3)[i // 2 % 3],
            group_m=(None, 1)[i // 3 % 2],
            affine=i % 4 != 0,
            smooth=i % 5 != 0,
            global_scale=case.format == "nvfp4" or i % 3 == 0,
            act_unsigned=case.format == "int4" and i % 2 == 0,
            seed=i,
        )
        yield GroupedCase(case, bounds)


def named(all_cases):
    return [(str(case).replace(" ", "_"), case) for case in all_cases]


def run(case, policy, seed):
    operands = grouped.make_operands(case)
    results = grouped.run(case, Options(policy=policy, seed=seed), operands=operands)
    grouped.check(case, operands, results)
    return results


class Grouped(parameterized.TestCase):
    # The others are among those of `Schedules`.
    @parameterized.named_parameters(named(half(cases(), True)))
    def test_cells(self, case):
        run(case, POLICIES[case.case.seed % 4], case.case.seed)

    @parameterized.parameters(*POLICIES)
    def test_schedules_agree(self, policy):
        case = GroupedCase(
            Case("mxfp4", 73, 264, 288, 32, fused=True, tile_m=16, clusters=3), (0, 3, 40, 40, 70)
        )
        first, second = (run(case, policy, seed) for seed in range(2))
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a.y, b.y)

    @parameterized.parameters(16, 64)
    def test_a_prepared_weight_gives_the_same_bits(self, tile_m):
        case = Case("mxfp4", 73, 264, 288, 32, fused=True, tile_m=tile_m, clusters=3)
        linear, prepared = (
            run(GroupedCase(dataclasses.replace(case, sign_order=order), (0, 3, 40, 40, 70)),
                "random", 0)
            for order in ("linear", "sorted")
        )  # fmt: skip
        for a, b in zip(linear, prepared, strict=True):
            np.testing.assert_array_equal(a.y, b.y)

    @parameterized.product(down_cluster=(1, 2, 4), rank=(16, 128, 256))
    def test_low_rank_down(self, down_cluster, rank):
        """Groups longer than a tile of LoRA-down, K that is no multiple of its stage."""
        case = Case(
            "mxfp4", 170, 24, 200, rank, fused=True, tile_m=64, clusters=4,
            down_cluster=down_cluster,
        )  # fmt: skip
        run(GroupedCase(case, (1, 1, 150, 151, 168)), "random", rank)

    @parameterized.product(down_cluster=(1, 3, 8), rank=(16, 80, 256))
    def test_low_rank_down_of_small_groups(self, down_cluster, rank):
        """16 tokens a cluster, groups of up to three tiles; CTAs without a share of K."""
        case = Case(
            "mxfp4", 62, 9, 360, rank, fused=True, tile_m=16, clusters=4,
            down_cluster=down_cluster,
        )  # fmt: skip
        grouped_case = GroupedCase(case, (0, 33, 34, 34, 51, 62))
        self.assertEqual(grouped.plan_of(grouped_case).quantizer.down.rows, 16)
        run(grouped_case, "random", rank)


@pytest.mark.slow
class Schedules(parameterized.TestCase):
    @parameterized.named_parameters(named(cases()))
    def test_policies_and_seeds(self, case):
        for policy, seed in itertools.product(POLICIES, range(3)):
            run(case, policy, seed)
