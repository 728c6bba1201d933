"""The same matrix for the sm_90a kernels, on which the emulator was calibrated."""

import dataclasses

import pytest
from absl.testing import parameterized
from test_matrix_sm100 import RANKS, TILES, every_schedule
from test_sm90 import PATHS, decode_cases, named
from test_sm90_grouped import cases as grouped_cases

from emulator import Options, grouped, product, toolchain
from emulator.scheduler import POLICIES

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.slow,
    pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc"),
]

CLUSTERS = 3  # that the chip runs at once
# Rows that the last tile lacks, columns per CTA of a cluster, K in stages and past them, stages.
TAILS = ((0, 128, 3, 0, 2), (3, 96, 1, 32, 3), (57, 77, 0, 32, None))


class Gemm(parameterized.TestCase):
    @parameterized.product(
        path=tuple(range(len(PATHS))), cluster=(1, 2), rank=RANKS, tiles=tuple(TILES)
    )
    def test_cells(self, path, cluster, rank, tiles):
        number = path + cluster + RANKS.index(rank) + tiles
        less, columns, whole, more, stages = TAILS[number % len(TAILS)]
        case = PATHS[path]
        case = dataclasses.replace(
            case, m=64 * tiles - less, n=columns * cluster,
            k=max(case.block, case.path.tile_k * whole + more), rank=rank, cluster=cluster,
            clusters=CLUSTERS, stages=stages, affine=less != 57,
            global_scale=case.format == "nvfp4" or less == 3,
            act_unsigned=case.format == "int4" and less != 3,
            # Rounded operands have seven bits more.
            exact=number % 2 == 0 and case.precision != "fastest", seed=number,
        )  # fmt: skip
        operands = product.make_operands(case)
        # The repack once; the gemm alone under every schedule.
        before = product.run(case, Options(seed=number), operands=operands)

        def run(options, seed):
            result = product.run(case, options, operands=operands, prepared=before)
            product.check(case, operands, result)
            self.assertEqual(result.grid, min(tiles, CLUSTERS) * cluster)

        every_schedule(run, 2 * number)


class Decode(parameterized.TestCase):
    @parameterized.named_parameters(named(decode_cases()))
    def test_cells(self, case):
        operands = product.make_operands(case)
        for policy in POLICIES:
            result = product.run(case, Options(policy, case.seed), operands=operands)
            product.check(case, operands, result)


class Grouped(parameterized.TestCase):
    @parameterized.named_parameters(named(grouped_cases()))
    def test_cells(self, case):
        operands = grouped.make_operands(case)
        for policy in POLICIES:
            results = grouped.run(case, Options(policy, case.case.seed), operands=operands)
            grouped.check(case, operands, results)
