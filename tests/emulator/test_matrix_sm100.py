"""The matrix of the sm_100a kernels: variants x formats x ranks x tile counts x tails, every
policy, several seeds. docs/emulator.md lists the cells."""

import dataclasses
import itertools

import numpy as np
import pytest
from absl.testing import parameterized
from test_sm90 import SOURCES, awkward
from test_sm100 import VARIANTS, check_lora_act, check_quantized

from emulator import Options, blackwell, product, toolchain
from emulator.blackwell import Case
from emulator.scheduler import POLICIES

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc"),
]

FORMATS = ("nvfp4", "mxfp4")
RANKS = (0, 32, 128)
SEEDS = (0, 1)  # data whose sums are exact, data whose sums are rounded
GROUPS = 3  # pairs or single CTAs that the chip runs at once
TILES = sorted({1, 2, GROUPS - 1, GROUPS, GROUPS + 1})
# Rows and columns that the last tiles lack, K, stages of the ring.
TAILS = (
    (0, 0, 768, 2),
    (5, 8, 1056, 3),  # K ends inside a stage; whole 16 bytes of N, so tensor stores
    (91, 3, 32, None),  # one block of K; odd N
)


def shape(tiles, seed):
    """Tiles along M and N."""
    wide = {2: (1, 2), 3: (1, 3), 4: (2, 2)}
    return wide[tiles] if seed and tiles in wide else (tiles, 1)


def gemm_case(variant, format, rank, tiles, tail, seed, groups):
    group, tile_n = variant
    less_m, less_n, k, stages = tail
    tiles_m, tiles_n = shape(tiles, seed)
    return Case(
        format, 128 * group * tiles_m - less_m, tile_n * tiles_n - less_n, k, rank, group, tile_n,
        groups, stages, affine=less_m != 91, global_scale=less_m != 91, exact=seed == 0, seed=seed,
    )  # fmt: skip


def every_schedule(run, first=0):
    """Calls run(options, seed) for each policy and seed; a failure says which. `first` keeps the
    schedules of different cells apart."""
    for policy, seed in itertools.product(POLICIES, SEEDS):
        options = Options(policy, first + seed)
        try:
            run(options, seed)
        except Exception as error:
            error.add_note(f"with {options}, data of seed {seed}")
            raise


def first_tail(format, rank, tiles):
    """Tails take turns in runs that are not of the whole matrix."""
    return (FORMATS.index(format) + RANKS.index(rank) + tiles) % len(TAILS)


class GemmCells(parameterized.TestCase):
    def cell(self, variant, format, rank, tiles, groups, tails):
        for tail in tails:
            cases = [gemm_case(variant, format, rank, tiles, tail, seed, groups) for seed in SEEDS]
            operands = [blackwell.make_operands(case) for case in cases]

            def run(options, seed, cases=cases, operands=operands):
                case, values = cases[seed], operands[seed]
                result = blackwell.run_checked(case, options, values, prepared=True)
                self.assertEqual(result.grid, min(tiles, groups) * variant[0])

            every_schedule(run, 2 * (rank + tiles))

    def first_cell(self, variant, format, rank, tiles):
        first = first_tail(format, rank, tiles)
        self.cell(variant, format, rank, tiles, GROUPS, TAILS[first : first + 1])

    def one_group(self, variant, rank):
        self.cell(variant, FORMATS[rank == 32], rank, 4, 1, TAILS[1:2])


# Two of five cells, and each variant with one of the ranks, in turn; and the others.
ALL_CELLS = [*itertools.product(VARIANTS, FORMATS, RANKS, TILES[1::2])]
CELLS = [cell for i, cell in enumerate(ALL_CELLS) if i % 5 in (0, 2)]
ONE_GROUP = [(variant, RANKS[i % len(RANKS)]) for i, variant in enumerate(VARIANTS)]
MORE_GROUPS = [each for each in itertools.product(VARIANTS, RANKS) if each not in ONE_GROUP]


class Gemm(GemmCells):
    @parameterized.parameters(*CELLS)
    def test_cells(self, *cell):
        self.first_cell(*cell)

    @parameterized.parameters(*ONE_GROUP)
    def test_one_group(self, variant, rank):
        """Accumulators and store slots are used again and again."""
        self.one_group(variant, rank)


@pytest.mark.slow
class OtherCells(GemmCells):
    @parameterized.parameters(*(cell for cell in ALL_CELLS if cell not in CELLS))
    def test_cells(self, *cell):
        self.first_cell(*cell)

    @parameterized.parameters(*MORE_GROUPS)
    def test_one_group(self, variant, rank):
        self.one_group(variant, rank)


@pytest.mark.slow
class OtherTails(GemmCells):
    @parameterized.product(variant=VARIANTS, format=FORMATS, rank=RANKS, tiles=TILES)
    def test_cells(self, variant, format, rank, tiles):
        first = first_tail(format, rank, tiles)
        others = TAILS[:first] + TAILS[first + 1 :] if tiles in TILES[1::2] else TAILS
        self.cell(variant, format, rank, tiles, GROUPS, others)


@pytest.mark.slow
class Scales(parameterized.TestCase):
    """Block scales to atoms, the launch before a gemm on packed activations."""

    @parameterized.product(
        format=FORMATS, sides=((128, 128, 256), (131, 77, 96), (300, 8, 544), (1, 130, 2080))
    )
    def test_cells(self, format, sides):
        m, n, k = sides
        case = Case(format, m, n, k, group=1, tile_n=64, clusters=8)

        def run(options, seed):
            blackwell.run_checked(dataclasses.replace(case, seed=seed), options)

        every_schedule(run, m)


@pytest.mark.slow
class Quantizer(parameterized.TestCase):
    """From x: codes and scale factors bit for bit; LoRA-down; the gemm on them."""

    @parameterized.product(format=FORMATS, source=tuple(range(len(SOURCES))), rank=RANKS)
    def test_cells(self, format, source, rank):
        # Rows that fill a tile or do not; K that leaves warps, pieces, parts of a stage idle.
        sides = ((11, 72), (128, 256), (130, 264), (5, 1032))
        m, k = sides[(source + RANKS.index(rank) + FORMATS.index(format)) % len(sides)]
        case = Case(
            format, m, 24, k, rank, group=1, fused=True, exact=False,
            **{"global_scale": False, **SOURCES[source]},
        )  # fmt: skip
        # Only bf16 x can be multiplied by lora_down.
        case = dataclasses.replace(case, x_dtype="bfloat16") if rank else case

        def run(options, seed):
            one = dataclasses.replace(case, seed=seed)
            with np.errstate(all="ignore"):
                operands = blackwell.make_operands(one) if seed else awkward(one)
                result = blackwell.run(one, options, operands=operands)
                lora_act = check_quantized(one, operands, result)
            if seed:  # x without infinities
                blackwell.check(one, operands, result)
                if rank:
                    check_lora_act(result, lora_act)

        every_schedule(run, k)


@pytest.mark.slow
class GemmV1(parameterized.TestCase):
    """sm100_v1: one tile per CTA, so tile counts are those of the grid."""

    @parameterized.product(format=(*FORMATS, "int4"), tile_m=(32, 64, 128), rank=RANKS)
    def test_cells(self, format, tile_m, rank):
        sides = ((tile_m, 128, 128), (45, 136, 160), (3, 77, 32))
        m, n, k = sides[(RANKS.index(rank) + tile_m // 32) % len(sides)]
        case = product.Case(format, m, n, k, rank, kernel="sm90_v1", tile_m=tile_m)
        codes = toolchain.codes(toolchain.ptx_of("sm90_gemm_v1.cu", "sm_100a"))
        with product.seeded((), ()) as driver:
            driver.load(codes)

            def run(options, seed):
                one = dataclasses.replace(case, seed=seed, exact=seed == 0)
                operands = product.make_operands(one)
                result = product.run(one, options, operands=operands)
                product.check(one, operands, result)

            every_schedule(run, rank)
