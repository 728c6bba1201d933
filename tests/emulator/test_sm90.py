"""The product's sm_90a kernels in the emulator: every cell of the result, several schedules."""

import collections
import dataclasses
import itertools
import zlib

import model
import mutants
import numpy as np
import pytest
from absl.testing import parameterized

from emulator import Options, product, toolchain
from emulator.product import Case
from emulator.scheduler import POLICIES
from jax_w4a4 import plan

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

# (M, N, K): a tail of each against the tile of 64 x 128 and stages of 64 or 128.
SHAPES = ((1, 8, 32), (70, 264, 416), (64, 128, 128), (65, 77, 96), (130, 392, 288))


PATHS = (
    Case("mxfp4"),
    Case("mxfp4", precision="highest", promote_k=256),
    Case("nvfp4"),
    Case("nvfp4", precision="fastest"),
    Case("int4"),
    Case("int4", block=64, precision="highest"),
    Case("int4", block=128, scale_dtype="float32", precision="highest"),
    Case("int4", block=64),
    Case("int4", block=128, scale_dtype="float32"),
    Case("int4", block=32, scale_dtype="bfloat16"),
    Case("mxfp4", sign_order="sorted"),
)


def cases():
    """Paths x ranks x clusters over shapes, tile counts and options in turn."""
    grid = itertools.product(PATHS, (0, 48, 160), (1, 2))
    for i, (case, rank, cluster) in enumerate(grid):
        m, n, k = SHAPES[i % len(SHAPES)]
        yield dataclasses.replace(
            case,
            m=m,
            n=n,
            k=k,
            rank=rank,
            cluster=cluster,
            clusters=(1, 2, 64)[i % 3],
            stages=(None, 2, 3)[i // 2 % 3],
            group_m=(None, 1)[i % 2],
            affine=i % 4 != 0,
            global_scale=case.format == "nvfp4" or i % 3 == 0,
            act_unsigned=case.format == "int4" and i % 2 == 0,
            # Rounded operands have seven bits more.
            exact=i % 3 == 0 and case.precision != "fastest",
            seed=i,
        )


def stage_cases(stages=3):
    """K blocks against stages of the ring, and tiles per CTA, where warpgroups take turns and
    scales are loaded stages ahead."""
    grid = itertools.product(PATHS, (1, stages - 1, stages, stages + 1), (1, 3))
    for i, (case, blocks, tiles) in enumerate(grid):
        yield dataclasses.replace(
            case,
            m=64 * tiles - 7,
            n=77 if i % 3 else 136,
            k=case.path.tile_k * blocks - (0, 24)[i % 2],
            rank=(0, 48)[i // 2 % 2],
            cluster=1 + i // 3 % 2,
            clusters=1,
            stages=stages,
            seed=i,
        )


def tile_cases():
    """Larger tiles: K of one stage, of two and of three; several tiles of a CTA, of which the last
    has eight tokens, nearly all or all."""
    # Path, M, N, stages of K, rank, CTAs of a cluster.
    for i, (case, m, n, blocks, rank, cluster) in enumerate((
        (Case("mxfp4", sign_order="sorted", tile_m=144), 129, 264, 1, 0, 1),
        (Case("mxfp4", sign_order="sorted", tile_m=144), 152, 264, 3, 48, 2),
        (Case("nvfp4", tile_m=160), 318, 77, 3, 48, 1),
        (Case("nvfp4", tile_m=160), 160, 520, 1, 0, 2),
        (Case("nvfp4", tile_m=160), 145, 136, 2, 16, 1),
    )):  # fmt: skip
        yield dataclasses.replace(
            case, m=m, n=n, k=case.path.tile_k * blocks - (0, 24)[i % 2], rank=rank,
            cluster=cluster, clusters=1, global_scale=i % 2 == 0, exact=i % 3 == 1, seed=i,
        )  # fmt: skip


def named(all_cases):
    return [(str(case).replace(" ", "_"), case) for case in all_cases]


def half(all_cases, default):
    """The cases that run by default, or the others: by their names, so that neither half has one
    value of something all cases take in turn."""
    return [c for c in all_cases if (zlib.crc32(str(c).encode()) % 2 == 0) == default]


def run(case, policy, seed, **options):
    operands = product.make_operands(case)
    result = product.run(case, Options(policy=policy, seed=seed, **options), operands=operands)
    product.check(case, operands, result)
    return operands, result


def check_prepared(case):
    """Bit for bit: sums come in the same order."""
    _, linear = run(case, "random", 0)
    _, prepared = run(dataclasses.replace(case, sign_order="sorted"), "random", 0)
    np.testing.assert_array_equal(prepared.y, linear.y)


def check_every_schedule(case):
    """The same bits, whatever each of the waits finds at first, and whoever comes late."""
    operands = product.make_operands(case)
    found = set()
    for seed, (policy, late) in enumerate(itertools.product(POLICIES, (0.1, 0.6))):
        options = Options(policy, seed, spurious_wait=late)
        result = product.run(case, options, operands=operands)
        found.add((result.y.tobytes(), result.lora_act.tobytes()))
    product.check(case, operands, result)
    assert len(found) == 1, case


class Gemm(parameterized.TestCase):
    @parameterized.named_parameters(named(cases()))
    def test_cells(self, case):
        run(case, POLICIES[case.seed % 4], case.seed)

    @parameterized.named_parameters(named(half(stage_cases(), True)))
    def test_stages(self, case):
        run(case, POLICIES[(case.seed + 1) % 4], case.seed)

    @parameterized.named_parameters(named(tile_cases()))
    def test_tiles(self, case):
        run(case, POLICIES[case.seed % 4], case.seed)

    def test_loop_of_large_tiles(self):
        """That of more than 192 tokens, in a tile of 64: sums come in the same order."""
        cases = [
            Case("mxfp4", 70, 136, k, rank, cluster=cluster, clusters=1, stages=stages)
            for k, rank, cluster, stages in ((96, 0, 1, 4), (288, 48, 2, 2), (480, 0, 2, 3))
        ]
        ahead = [run(case, "late", i)[1].y for i, case in enumerate(cases)]
        with product.seeded((toolchain.gemm_v2_name("Mxfp4", 64),), (mutants.LARGE,)):
            for i, case in enumerate(cases):
                np.testing.assert_array_equal(run(case, POLICIES[i], i)[1].y, ahead[i])

    @parameterized.parameters(("float32", 40), ("bfloat16", 60), ("float16", 12))
    def test_spread_int4_scales(self, dtype, spread):
        """Blocks far below their row's largest, zero and negative scales, a row of zeros; a scale
        that is no finite number spoils its row alone."""
        case = Case("int4", 65, 77, 416, block=32, scale_dtype=dtype, seed=spread)
        operands = product.make_operands(case)
        rng = np.random.default_rng(spread)
        for name in ("weight_scale", "act_scale"):
            shape = operands[name].shape
            values = rng.uniform(1, 2, shape) * np.exp2(rng.integers(-spread, 1, shape))
            values *= rng.choice([0, -1, 1, 1], shape)
            values[5] = 0
            operands[name] = product.to_bits(values.astype(np.float32), dtype)
        result = product.run(case, Options(), operands=operands)
        product.check(case, operands, result)
        spoiled = dict(operands)
        values = product.from_bits(operands["weight_scale"], dtype).astype(np.float32)
        values[3, 2], values[70, -1] = np.nan, np.inf
        spoiled["weight_scale"] = product.to_bits(values, dtype)
        if dtype == "bfloat16":
            spoiled["weight_scale"][3, 2] = 0x7FC0
        y = product.run(case, Options(), operands=spoiled).y
        self.assertTrue(np.isnan(product.from_bf16(y[:, [3, 70]])).all())
        rest = np.delete(np.arange(case.n), [3, 70])
        np.testing.assert_array_equal(y[:, rest], result.y[:, rest])

    @parameterized.parameters(*POLICIES)
    def test_schedules_agree(self, policy):
        case = Case("mxfp4", 130, 264, 288, 32, cluster=2, clusters=1)
        bits = [run(case, policy, seed)[1].y for seed in range(2)]
        np.testing.assert_array_equal(bits[0], bits[1])

    @parameterized.product(tiles=(1, 2, 3, 4, 5), cluster=(1, 2))
    def test_tile_counts(self, tiles, cluster):
        """1, 2, and one below, equal to and above the number of clusters."""
        case = Case("mxfp4", 64 * tiles - 3, 96 * cluster, 160, 32, cluster=cluster, clusters=4)
        _, result = run(case, "random", tiles)
        self.assertEqual(result.grid, min(tiles, 4) * cluster)


@pytest.mark.slow
class Schedules(parameterized.TestCase):
    @parameterized.parameters((0, 1), (48, 2))
    def test_a_prepared_weight_gives_the_same_bits(self, rank, cluster):
        check_prepared(Case("mxfp4", 70, 136, 416, rank, cluster=cluster))

    @parameterized.named_parameters(named([*cases(), *stage_cases()]))
    def test_policies_and_seeds(self, case):
        for policy, seed in itertools.product(POLICIES, range(5)):
            run(case, policy, seed)


def decode_cases():
    return [*few_decode_cases(), *large_decode_cases()]


def few_decode_cases():
    """Paths x rows per CTA x CTAs that divide K over shapes, ranks and ring depths in turn."""
    shapes = ((1, 77, 2080), (7, 131, 1056), (8, 264, 3104))
    paths = decode_paths()
    for i, (case, tile_n, cluster) in enumerate(
        itertools.product(paths, (8, 24, 40, 64, 128), (1, 2))
    ):
        m, n, k = shapes[i % 3]
        yield dataclasses.replace(
            case,
            m=m,
            n=n,
            k=k,
            rank=(0, 48, 160)[(i + 1) % 3],
            kernel="sm90_decode",
            tile_m=8,
            tile_n=tile_n,
            cluster=cluster,
            stages=(None, 2, 3)[i // 2 % 3],
            fused=i % 2 == 0,
            affine=i % 4 != 0,
            global_scale=i % 3 == 0,
            act_unsigned=case.format == "int4" and i % 4 == 1,
            exact=i % 3 == 1 and i % 2 == 1 and case.precision != "fastest",
            seed=i,
        )
    yield from token_cases(len(paths) * 10)
    yield from scale_cases(len(paths) * 10 + 100)
    yield from ahead_cases(len(paths) * 10 + 200)


def large_decode_cases():
    seed = len(decode_paths()) * 10
    yield from many_cases(seed + 300)
    yield from several_cases(seed + 400)


def decode_paths():
    return [c for c in PATHS if c.path.name in plan.budget.DECODE_PATHS]


def token_cases(seed):
    """Paths x token tiles above 8 x divisions of a CTA's rows: mostly two CTAs that meet, an odd N
    or M, rows and tokens that leave units without work."""
    # Rows of a CTA and N.
    divisions = (
        ((8, 13), (24, 61), (32, 67)),
        ((40, 77), (56, 57), (64, 67)),
        ((72, 73), (104, 110), (128, 131)),
    )
    tokens = {16: (9, 13, 16), 32: (21, 17, 32), 64: (61, 33, 51)}
    grid = itertools.product(decode_paths(), (16, 32, 64), divisions)
    for i, (case, tile_m, rows) in enumerate(grid):
        tile_n, n = rows[(i // 3 + i // 9) % 3]
        yield dataclasses.replace(
            case,
            m=tokens[tile_m][(i + i // 3) % 3],
            n=n,
            # Block scales of any number, in words, in whole 16 bytes.
            k=(1056, 2176, 2560, 1536)[i % 4],
            rank=(48, 0, 160)[i // 2 % 3],
            kernel="sm90_decode",
            tile_m=tile_m,
            tile_n=tile_n,
            cluster=1 + (i % 4 != 3),
            stages=2 if i % 3 == 0 else None,
            fused=i % 2 == 0,
            affine=i % 5 != 0,
            global_scale=i % 3 == 0,
            act_unsigned=case.format == "int4" and i % 2 == 1,
            exact=i % 4 == 1 and case.precision != "fastest",
            seed=seed + i,
        )


def scale_cases(seed):
    """Many tokens and more boxes of block scales than two: in turn where the copy engine brings
    them, of one CTA and of two, places taken once and several times; all at once elsewhere."""
    mxfp4, rounded = Case("mxfp4"), Case("nvfp4", precision="fastest")
    prepared, nvfp4 = Case("mxfp4", sign_order="sorted"), Case("nvfp4")
    # Path, M, N, K, tile_m, tile_n, CTAs, stages: as many as a box covers, or fewer.
    for i, (case, *shape) in enumerate((
        (mxfp4, 17, 9, 8704, 32, 8, 1, 8),
        (prepared, 20, 21, 17408, 32, 24, 2, 3),
        (prepared, 33, 41, 8704, 64, 40, 1, 4),
        (mxfp4, 64, 44, 17408, 64, 48, 2, 3),
        (mxfp4, 18, 75, 8704, 32, 72, 1, 5),
        (nvfp4, 19, 9, 8448, 32, 8, 1, 4),
        (nvfp4, 50, 45, 8448, 64, 40, 2, 2),
        (nvfp4, 23, 41, 4864, 32, 40, 1, 4),
        (rounded, 40, 17, 10496, 64, 16, 1, 2),
        (rounded, 31, 43, 9728, 32, 40, 2, 4),
        (rounded, 17, 81, 4352, 32, 80, 1, 3),
        (mxfp4, 17, 9, 8224, 32, 8, 1, 2),
        (nvfp4, 17, 11, 8256, 32, 8, 2, 2),
        (mxfp4, 65, 9, 8704, 96, 8, 1, 4),
        (rounded, 98, 73, 4352, 128, 72, 1, 2),
        # Those of the second CTA begin inside 16 bytes.
        (mxfp4, 3, 131, 512, 8, 128, 2, 2),
        (prepared, 33, 131, 1536, 64, 128, 2, 2),
    )):  # fmt: skip
        m, n, k, tile_m, tile_n, cluster, stages = shape
        yield dataclasses.replace(
            case, m=m, n=n, k=k, kernel="sm90_decode", tile_m=tile_m, tile_n=tile_n,
            cluster=cluster, stages=stages, rank=(0, 16)[i % 2],
            far=case.format == "mxfp4" and i % 3 == 0, seed=seed + i,
        )  # fmt: skip


def ahead_cases(seed):
    """LoRA-down in the gemm's launch: paths x token tiles x divisions of a CTA's rows, one CTA and
    two, any number of tiles, tokens and K."""
    divisions = ((24, 61), (56, 113), (104, 105))
    tokens = {32: (17, 21, 32), 64: (33, 61, 64)}
    grid = itertools.product(decode_paths(), (32, 64), divisions)
    for i, (case, tile_m, (tile_n, n)) in enumerate(grid):
        cluster = 1 + (i + i // 6) % 2
        yield dataclasses.replace(
            case,
            m=tokens[tile_m][(i + i // 3) % 3],
            n=n,
            # Two CTAs have a stage each, or more. Of the four ahead one or two have no part of 72.
            k=((72, 1032, 1056, 4136), (2056, 2080, 4128, 2080))[cluster - 1][i // 2 % 4],
            rank=(16, 32)[i % 2],
            kernel="sm90_decode",
            tile_m=tile_m,
            tile_n=tile_n,
            cluster=cluster,
            stages=2 if i % 3 == 0 else None,
            fused=True,
            down_ahead=4,
            affine=i % 5 != 0,
            global_scale=i % 3 == 0,
            act_unsigned=case.format == "int4" and i % 2 == 1,
            seed=seed + i,
        )


# Rows of a CTA of 96 or 128 tokens and N: two warpgroups along K, and one that has all of it.
MANY_DIVISIONS = (((8, 13), (40, 77), (64, 67)), ((72, 73), (104, 110), (128, 131)))


def many_case(i, case, rows, cluster, rank, ahead):
    """65 to 128 tokens; M, K, ring depth and options in turn."""
    tile_n, n = rows
    m = (65, 90, 128, 96, 97, 120, 127)[i % 7]
    return dataclasses.replace(
        case,
        m=m,
        n=n,
        # Two CTAs have a stage of 256 each, or more; odd and even numbers of them.
        k=((40, 544, 1056, 768), (288, 776, 1280, 1304))[cluster - 1][i // 2 % 4],
        rank=rank,
        kernel="sm90_decode",
        tile_m=96 if m <= 96 else 128,
        tile_n=tile_n,
        cluster=cluster,
        stages=2 if i % 3 == 0 else None,
        fused=ahead > 0 or i % 4 == 1,
        down_ahead=ahead,
        affine=i % 5 != 0,
        global_scale=i % 3 == 0,
        act_unsigned=case.format == "int4" and i % 2 == 1,
        far=case.format == "mxfp4" and i % 4 == 3,
        exact=ahead == 0 and i % 4 == 2 and case.precision != "fastest",
        seed=i,
    )


def many_cases(seed):
    """96 and 128 tokens: paths x divisions of the work x one CTA and two, ranks and LoRA-down in
    turn."""
    grid = itertools.product(decode_paths(), MANY_DIVISIONS, (1, 2))
    for i, (case, divisions, cluster) in enumerate(grid):
        rank, ahead = ((32, 4), (48, 0), (16, 4), (0, 0), (96, 0))[(i + i // 4 * 2) % 5]
        case = many_case(i, case, divisions[(i + i // 4) % 3], cluster, rank, ahead)
        yield dataclasses.replace(case, seed=seed + i)


def more_many_cases():
    """The same with every number of rows and rank."""
    ranks = ((0, 0), (16, 0), (16, 4), (32, 0), (32, 4), (48, 0), (96, 0))
    rows = itertools.chain(*MANY_DIVISIONS)
    grid = itertools.product(decode_paths(), rows, (1, 2), ranks)
    for i, (case, division, cluster, (rank, ahead)) in enumerate(grid):
        yield many_case(i + i // 42, case, division, cluster, rank, ahead)


def several_cases(seed):
    """Several tiles of 128 tokens, two of 96: the last of one token, of some and of all; the
    counts for which LoRA-down can be in the launch, and more; both shapes of a CTA, one and two
    that divide K."""
    mxfp4, prepared = Case("mxfp4"), Case("mxfp4", sign_order="sorted")
    nvfp4, rounded = Case("nvfp4"), Case("nvfp4", precision="fastest")
    # Path, M, N, K, rows of a CTA, CTAs, rank, LoRA-down in the launch.
    for i, (case, *shape) in enumerate((
        (mxfp4, 129, 13, 40, 8, 1, 16, 4),
        (prepared, 200, 77, 288, 72, 2, 48, 0),
        (nvfp4, 256, 67, 40, 40, 1, 32, 0),
        (rounded, 257, 73, 72, 72, 1, 48, 0),
        (Case("int4"), 385, 11, 296, 8, 2, 0, 0),
        (mxfp4, 130, 73, 72, 72, 1, 32, 4),
        (mxfp4, 258, 13, 72, 8, 1, 32, 4),
        (mxfp4, 129, 67, 776, 40, 2, 16, 4, 96),
        (rounded, 150, 73, 72, 72, 1, 48, 0, 96),
        (nvfp4, 192, 13, 40, 8, 1, 32, 4, 96),
        (Case("int4"), 150, 73, 296, 72, 2, 16, 4, 96),
    )):  # fmt: skip
        yield several_case(i, case, *shape, seed=seed)


def several_case(i, case, m, n, k, tile_n, cluster, rank, ahead, tile_m=128, seed=0):
    return dataclasses.replace(
        case, m=m, n=n, k=k, rank=rank, kernel="sm90_decode", tile_m=tile_m, tile_n=tile_n,
        cluster=cluster, stages=2 if i % 3 == 1 else None, fused=ahead > 0, down_ahead=ahead,
        affine=i % 4 != 2, global_scale=i % 3 == 0,
        act_unsigned=case.format == "int4" and i % 2 == 1, seed=seed + i,
    )  # fmt: skip


def more_several_cases():
    """Paths x shapes of a CTA x one CTA and two x M; rows, K, ranks and LoRA-down in turn."""
    tiles = [(128, m) for m in (129, 200, 256, 257, 385, 400, 512)]
    tiles += [(96, m) for m in (129, 150, 192)]
    grid = itertools.product(decode_paths(), MANY_DIVISIONS, (1, 2), tiles)
    for i, (case, divisions, cluster, (tile_m, m)) in enumerate(grid):
        tile_n, n = divisions[(i + i // 7) % 3]
        k = ((40, 544, 768), (288, 776, 1280))[cluster - 1][i // 2 % 3]
        rank, ahead = ((32, 4), (48, 0), (16, 4), (0, 0), (16, 0))[(i + i // 7) % 5]
        found = several_case(i, case, m, n, k, tile_n, cluster, rank, ahead, tile_m)
        yield dataclasses.replace(found, fused=found.fused or i % 5 == 1)


class Decode(parameterized.TestCase):
    @parameterized.named_parameters(named([*half(few_decode_cases(), True), *large_decode_cases()]))
    def test_cells(self, case):
        run(case, POLICIES[case.seed % 4], case.seed)

    def test_many_cases(self):
        """With 96 and 128 tokens every path, both shapes of a CTA and clusters of both widths;
        every number of ranks that shared memory holds, and more, of one CTA and of two."""
        found = list(many_cases(0))
        for what in (
            lambda c: (c.path.name, plan.budget.decode_shape(128, c.tile_n), c.cluster),
            lambda c: (c.rank, c.cluster),
            lambda c: (c.down_ahead, plan.budget.decode_shape(128, c.tile_n), c.cluster),
            # Half the rows of a warp whose lanes exchange block scales, or all.
            lambda c: (c.tile_n % 16, plan.budget.decode_shape(128, c.tile_n)),
            lambda c: (c.tile_m, plan.budget.decode_shape(c.tile_m, c.tile_n), c.cluster),
        ):
            seen = {what(case) for case in found}
            parts = [set(values) for values in zip(*seen, strict=True)]
            self.assertLen(seen, int(np.prod([len(part) for part in parts])))
        self.assertEqual({case.rank for case in found}, {0, 16, 32, 48, 96})
        self.assertTrue(all(64 < case.m <= 128 for case in found))
        self.assertEqual({case.tile_m for case in found}, {96, 128})

    def test_several_cases(self):
        """Every path, shape of a CTA, width of a cluster and number of tiles; ragged ones too."""
        found = list(several_cases(0))
        names = [[c.path.name for c in cases] for cases in (found, decode_paths())]
        self.assertEqual(*map(set, names))
        for cases in (found, list(more_several_cases())):
            shapes = {(plan.budget.decode_shape(128, c.tile_n), c.cluster) for c in cases}
            self.assertLen(shapes, 4)
            self.assertEqual({c.rank for c in cases}, {0, 16, 32, 48})
            self.assertEqual({c.down_ahead for c in cases}, {0, 4})
            tiles = {-(-c.m // c.tile_m) for c in cases}
            self.assertEqual(tiles, {2, 3, 4})
            pairs = {(plan.budget.decode_shape(96, c.tile_n), c.cluster, c.m) for c in cases
                     if c.tile_m == 96}  # fmt: skip
            parts = [set(values) for values in zip(*pairs, strict=True)]
            self.assertEqual([len(part) for part in parts], [2, 2, 3])

    def test_scales_come_in_turn(self):
        """Of some cases by the plan, of every path that has block scales, and of others not."""
        found = collections.Counter()
        for case in decode_cases():
            boxes, slots = plan.budget.decode_scale_boxes(
                product.problem_of(case), product.plan_of(case)
            )
            if boxes > 2:
                found[case.path.name if slots < boxes else "all", case.cluster] += 1
        names = ("Mxfp4", "Mxfp4Sorted", "Nvfp4", "Nvfp4Rounded", "all")
        self.assertCountEqual(found, itertools.product(names, (1, 2)))

    @parameterized.product(steps=(1, 2, 3, 4, 7), stages=(2, 3), cluster=(1, 2))
    def test_stages(self, steps, stages, cluster):
        """Fewer steps of K than the ring has stages, as many, more, of each CTA."""
        case = Case("mxfp4", 3, 16, 512 * steps * cluster - 24, 16, kernel="sm90_decode", tile_m=8)
        case = dataclasses.replace(case, tile_n=64, cluster=cluster, stages=stages, seed=steps)
        run(case, POLICIES[steps % 4], steps)

    @parameterized.parameters(
        ("mxfp4", 32, 512, 1), ("nvfp4", 32, 256, 1), ("nvfp4", 32, 512, 1), ("nvfp4", 64, 256, 1),
        ("mxfp4", 32, 1536, 2), ("nvfp4", 64, 768, 2),
    )  # fmt: skip
    def test_k_ends_within_a_step(self, format, tile_n, k, cluster):
        """Scales in whole pieces of 16 bytes, fewer of them than a step has."""
        case = Case(format, 1, tile_n, k, kernel="sm90_decode", tile_m=8, tile_n=tile_n)
        run(dataclasses.replace(case, cluster=cluster), "early", k)

    @parameterized.product(tile_n=(24, 64, 128), far=(False, True))
    def test_a_prepared_weight_gives_the_same_bits(self, tile_n, far):
        """Both loops: that which asks every block whether it flushes, and that which need not."""
        case = Case("mxfp4", 7, 2 * tile_n, 1056, 16, kernel="sm90_decode", tile_m=8, far=far)
        check_prepared(dataclasses.replace(case, tile_n=tile_n, fused=True))

    @parameterized.product(tile_n=(32, 64, 128), k=(1024, 1056))
    def test_blocks_that_flush(self, tile_n, k):
        """The loop that asks every block, beside CTAs whose rows need none."""
        case = Case("mxfp4", 8, 2 * tile_n, k, kernel="sm90_decode", tile_m=8, tile_n=tile_n)
        run(dataclasses.replace(case, far=True, exact=True), "random", k)

    @parameterized.parameters(*POLICIES)
    def test_schedules_agree(self, policy):
        case = Case("mxfp4", 8, 40, 2080, 32, kernel="sm90_decode", tile_m=8, tile_n=40, cluster=2)
        bits = [run(case, policy, seed)[1].y for seed in range(2)]
        np.testing.assert_array_equal(bits[0], bits[1])

    @parameterized.parameters(
        (1, 40, 16), (5, 1032, 32), (17, 520, 48), (20, 2056, 128), (33, 264, 256)
    )
    def test_down(self, m, k, rank):
        case = Case("mxfp4", m, 24, k, rank, kernel="sm90_decode", fused=True, tile_n=64)
        case = dataclasses.replace(case, tile_m=8 if m <= 8 else 32 if m <= 32 else 64)
        operands, result = run(case, POLICIES[rank // 16 % 4], rank)
        want = quantized(case, operands)[2]
        got = product.from_bf16(result.lora_act)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


@pytest.mark.slow
class OtherCells(parameterized.TestCase):
    """The half of the cells that does not run by default."""

    @parameterized.named_parameters(named(half(few_decode_cases(), False)))
    def test_cells(self, case):
        run(case, POLICIES[case.seed % 4], case.seed)

    @parameterized.named_parameters(named(half(stage_cases(), False)))
    def test_stages(self, case):
        run(case, POLICIES[(case.seed + 1) % 4], case.seed)


@pytest.mark.slow
class ManyTokens(parameterized.TestCase):
    """96 and 128 tokens, every division of a CTA's rows and every rank."""

    @parameterized.named_parameters(named(more_many_cases()))
    def test_cells(self, case):
        run(case, POLICIES[case.seed % 4], case.seed)


@pytest.mark.slow
class SeveralTiles(parameterized.TestCase):
    """More than 128 tokens."""

    @parameterized.named_parameters(named(more_several_cases()))
    def test_cells(self, case):
        run(case, POLICIES[case.seed % 4], case.seed)

    @parameterized.parameters(
        dict(n=73), dict(n=73, cluster=2, k=544), dict(n=37, tile_n=24), dict(n=73, m=140),
        dict(n=37, tile_n=40, m=150, tile_m=96, cluster=2, k=544),
    )  # fmt: skip
    def test_every_schedule_gives_the_same_bits(self, **changes):
        case = Case("mxfp4", 256, 72, 288, 32, kernel="sm90_decode", tile_m=128, tile_n=72)
        check_every_schedule(
            dataclasses.replace(case, **{"fused": True, "down_ahead": 4} | changes)
        )

    @parameterized.parameters((129, 1032, 32), (257, 40, 48), (512, 520, 32))
    def test_down(self, m, k, rank):
        """LoRA-down in the quantizer's launch."""
        case = Case(
            "mxfp4", m, 8, k, rank, fused=True, kernel="sm90_decode", tile_m=128, tile_n=8,
        )  # fmt: skip
        operands, result = run(case, POLICIES[rank // 16 % 4], rank)
        want = quantized(case, operands)[2]
        got = product.from_bf16(result.lora_act)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


class DownAhead(parameterized.TestCase):
    """LoRA-down by CTAs of sm90_decode's launch."""

    CASE = Case(
        "mxfp4", 21, 40, 1056, 32, kernel="sm90_decode", tile_m=32, tile_n=40, fused=True,
        down_ahead=4,
    )  # fmt: skip

    def test_cases(self):
        """Every path, tile of tokens, division of the rows, rank, and one CTA as well as two."""
        found = list(ahead_cases(0))
        for what in (
            lambda c: (c.path.name, c.tile_m),
            lambda c: (plan.budget.decode_shape(c.tile_m, c.tile_n), c.tile_m, c.cluster),
            lambda c: (c.rank, c.cluster),
        ):
            seen = {what(case) for case in found}
            parts = [set(values) for values in zip(*seen, strict=True)]
            self.assertLen(seen, int(np.prod([len(part) for part in parts])))
        self.assertTrue(all(product.plan_of(case).quantizer.down.ahead == 4 for case in found))
        self.assertEqual({case.cluster for case in found}, {1, 2})

    @parameterized.product(k=(8, 64, 72, 136, 200, 264), policy=POLICIES)
    def test_ctas_without_a_share_of_k(self, k, policy):
        """One to four stages of 64 k, the last of which may hold eight, and five."""
        _, result = run(dataclasses.replace(self.CASE, k=k, rank=16, m=17), policy, k)
        self.assertEqual(result.grid, 5)

    @parameterized.product(policy=POLICIES, cluster=(1, 2))
    def test_a_ring_that_wraps(self, policy, cluster):
        """Two stages, fewer than a CTA's share of K, and the barriers right behind them."""
        case = dataclasses.replace(self.CASE, k=2080, cluster=cluster, m=32)
        operands = product.make_operands(case)
        stage = 72 * 128 + 64 * 128
        changes = {"down_stages": lambda _: 2, "off_down_barriers": lambda _: 2 * stage}
        result = product.run(case, Options(policy), operands=operands, changes=changes)
        product.check(case, operands, result)

    @parameterized.parameters(dict(cluster=1), dict(cluster=2))
    def test_every_schedule_gives_the_same_bits(self, **changes):
        check_every_schedule(dataclasses.replace(self.CASE, **{"k": 2080} | changes))

    @parameterized.product(early=(0, 6, 132), cluster=(1, 2))
    def test_how_many_begin_early(self, early, cluster):
        """The number of weights' stages that a CTA asks for at first is a matter of speed."""
        case = dataclasses.replace(self.CASE, k=4128, n=77, cluster=cluster)
        operands = product.make_operands(case)
        changes = {"down_early": lambda _: early}
        result = product.run(case, Options(), operands=operands, changes=changes)
        product.check(case, operands, result)

    @parameterized.parameters(0xFFFF, 0x7FFF, 0x7FC0, 0x7F80, 0xFF80)
    def test_what_is_no_number_is_not_taken_for_what_is_to_come(self, bits):
        """A NaN, with all bits set too, or an infinity in x or lora_down: the launch ends, and the
        tokens or ranks that it is in are the only ones that it spoils."""
        operands = product.make_operands(self.CASE)
        clean = product.run(self.CASE, Options(), operands=operands).lora_act
        spoiled = dict(operands, x=operands["x"].copy(), lora_down=operands["lora_down"].copy())
        spoiled["x"][3, [5, 700]] = bits
        spoiled["x"][20] = bits
        spoiled["lora_down"][1000, 4:8] = bits
        got = product.run(self.CASE, Options(), operands=spoiled).lora_act
        bad = np.zeros(got.shape, bool)
        bad[[3, 20]] = bad[:, 4:8] = True
        self.assertFalse(np.isfinite(product.from_bf16(got[bad])).any())
        np.testing.assert_array_equal(got[~bad], clean[~bad])


@pytest.mark.slow
class DownAheadSchedules(parameterized.TestCase):
    @parameterized.parameters(
        dict(cluster=2, tile_m=64, m=61, rank=16), dict(cluster=1, tile_n=8, n=61),
        dict(cluster=2, tile_m=96, m=65, tile_n=40, k=544),
        dict(cluster=2, tile_m=128, m=97, tile_n=72, k=544),
    )  # fmt: skip
    def test_others_give_the_same_bits(self, **changes):
        check_every_schedule(dataclasses.replace(DownAhead.CASE, **{"k": 2080} | changes))


class GemmV1(parameterized.TestCase):
    @parameterized.parameters(("nvfp4", 32, 0), ("mxfp4", 64, 16), ("int4", 128, 40))
    def test_cells(self, format, tile_m, rank):
        case = Case(format, 45, 136, 160, rank, kernel="sm90_v1", tile_m=tile_m, seed=rank)
        run(case, "random", 0)


KINDS = ("", "zero", "negative zero", "tiny", "subnormal", "huge", "ties", "infinite", "NaN")


def awkward(case, nan=True):
    """Operands with an x whose rows have all that a quantizer may stumble over."""
    rng = np.random.default_rng(case.seed)
    x = rng.standard_normal((case.m, case.k))
    x *= np.exp2(rng.integers(-12, 13, (case.m, case.k // 8))).repeat(8, 1)
    for row in range(case.m):
        kind = KINDS[row % (len(KINDS) - (not nan))]
        if kind == "zero":
            x[row] = 0
        elif kind == "negative zero":
            x[row] = -np.abs(x[row])
            x[row, ::3] = -0.0
        elif kind == "tiny":
            x[row] *= 2.0**-126
        elif kind == "subnormal":
            x[row] *= 2.0**-128 / np.abs(x[row]).max()
        elif kind == "huge":
            x[row] *= 8 if case.x_dtype == "float16" else 2.0**110
        elif kind == "ties":
            x[row] = rng.choice([0.25, 0.75, -1.25, 1.75, -2.5, 3.5, 5, 6, -7, 7.5, 15], case.k)
        elif kind:
            x[row, rng.integers(case.k)] = np.inf if kind == "infinite" else np.nan
    operands = product.make_operands(case)
    x = x.astype(np.float32)
    if case.x_dtype == "bfloat16":
        bits = product.bf16(np.where(np.isfinite(x), x, 0))
        bits[np.isinf(x)] = 0x7F80
        bits[np.isnan(x)] = 0x7FC0
        operands["x"] = bits
    else:
        operands["x"] = x.astype(case.x_dtype)
    return operands


def quantized(case, operands):
    """What tests/model.py makes of x: packed bytes, scales, LoRA-down."""
    w = model.Operands(
        operands["weight"], operands["weight_scale"].view(model.dtype_of(case.scales)),
        case.format, case.k, act_global_scale=operands.get("act_global_scale"),
        smooth=operands.get("smooth"), act_rule=case.rule, act_unsigned=case.act_unsigned,
        block_size=None if case.format == "int4" and not case.block else case.k_pad // case.blocks,
    )  # fmt: skip
    if case.rank:
        w.lora_down = product.from_bf16(operands["lora_down"])
    with np.errstate(all="ignore"):
        return model.quantize_activation(product.from_bits(operands["x"], case.x_dtype), w)


def folded(case, packed, scales):
    """The values of the gemm's own layout: mxfp4 drops blocks 26 binades below the largest."""
    if case.path.name == "Nvfp4Rounded":
        return model.rounded_nvfp4(packed, scales)
    if case.path.name == "Int4Scaled":
        return model.rounded_int4(packed, scales, case.act_unsigned)
    values = model.decode(packed, scales, case.format, case.act_unsigned)
    if case.format == "mxfp4":
        byte = scales.view(np.uint8).astype(int)
        far = byte < byte.max(axis=1, keepdims=True) - 26
        values = np.where(np.repeat(far, 32, axis=1), 0.0, values)
    return values


# x as it is, normalized, and of another dtype.
SOURCES = (
    {"smooth": False},
    {"global_scale": True},
    {"x_dtype": "float16"},
    {"x_dtype": "float32", "smooth": False, "rule": "floor"},
)


def quantizer_cases():
    """Paths x sources, with K that leaves warps and pieces without work."""
    for i, (case, source) in enumerate(itertools.product(PATHS, SOURCES)):
        if case.path.name not in toolchain.QUANTIZE_V2_PATHS:
            continue  # the quantizer of mxfp4
        k = (72, 1032, 40, 520)[i % 4]
        case = dataclasses.replace(case, **source)
        yield dataclasses.replace(case, m=11, n=24, k=k, fused=True, seed=i,
                                  act_unsigned=case.format == "int4" and i % 3 == 0)  # fmt: skip


def decode_quantizer_cases():
    for case in quantizer_cases():
        if case.path.name in plan.budget.DECODE_PATHS:
            yield dataclasses.replace(case, kernel="sm90_decode", tile_m=8, tile_n=24, m=8)


def check_fused(case):
    operands = awkward(case)
    result = product.run(case, Options(seed=case.seed), operands=operands)
    packed, scales, _ = quantized(case, operands)
    with np.errstate(all="ignore"):
        want = folded(case, packed, scales)
        got = product.private_activation(case, result.act, result.token_scale)
    # A NaN spoils its block, or its token where that has one scale.
    bad = np.isnan(want)
    assert np.isnan(got[bad]).all()
    rows = ~bad.any(axis=1)
    np.testing.assert_array_equal(got[rows], want[rows])


class Quantizers(parameterized.TestCase):
    """Of the gemm's layout and of the public one, and the repack, against tests/model.py."""

    @parameterized.named_parameters(named(quantizer_cases()))
    def test_fused(self, case):
        check_fused(case)

    @parameterized.named_parameters(named(decode_quantizer_cases()))
    def test_decode(self, case):
        check_fused(case)

    @parameterized.named_parameters(named(quantizer_cases()))
    def test_public(self, case):
        operands = awkward(case)
        packed, scales = product.quantize_public(case, Options(seed=case.seed), operands)
        want = quantized(case, operands)
        np.testing.assert_array_equal(scales, want[1].view(scales.dtype))
        np.testing.assert_array_equal(packed, want[0])

    @parameterized.parameters(
        # As many CTAs as stages of K, fewer, more.
        (73, 16, 1, 40), (70, 16, 8, 520), (71, 32, 1, 136), (73, 32, 2, 264), (1, 32, 8, 264),
        (9, 48, 1, 72), (70, 48, 2, 416), (70, 48, 8, 200), (73, 64, 4, 264), (1, 80, 8, 1032),
        (1, 128, 1, 136), (73, 160, 2, 520), (64, 256, 1, 72), (5, 256, 2, 136), (73, 256, 4, 264),
        (37, 256, 8, 328),
    )  # fmt: skip
    def test_down(self, m, rank, cluster, k):
        case = Case("mxfp4", m, 24, k, rank, fused=True, down_cluster=cluster)
        operands, result = run(case, POLICIES[rank // 16 % 4], rank)
        want = quantized(case, operands)[2]
        got = product.from_bf16(result.lora_act)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)

    @parameterized.parameters(
        # One warp with work, and a unit of K that is not whole; a second round; CTAs of 16 warps.
        (5, 16, 40, 8), (16, 32, 1000, 16), (8, 80, 4400, 8), (1, 16, 8232, 8), (17, 48, 4136, 8),
        (33, 16, 8200, 16), (3, 16, 16392, 16),
    )  # fmt: skip
    def test_decode_down(self, m, rank, k, cluster):
        tile_m = next(tile for tile in plan.budget.DECODE_TOKENS if tile >= m)
        case = Case(
            "mxfp4", m, 8, k, rank, fused=True, kernel="sm90_decode", tile_m=tile_m, tile_n=8,
            down_cluster=cluster,
        )  # fmt: skip
        operands, result = run(case, POLICIES[rank // 16 % 4], rank)
        want = quantized(case, operands)[2]
        got = product.from_bf16(result.lora_act)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)

    @parameterized.named_parameters(named(PATHS))
    def test_repack(self, case):
        case = dataclasses.replace(case, n=40, k=416, global_scale=True)
        operands, result = run(case, "random", 0)
        scales = operands["act_scale"].view(model.dtype_of(case.scales))
        want = folded(case, operands["packed"], scales)
        got = product.private_activation(case, result.act, result.token_scale)
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
class LongQuantizers(parameterized.TestCase):
    @parameterized.product(
        path=(0, 2, 3, 4, 5, 6, 7, 8, 9), k=(2056, 4104, 8200, 16392), source=SOURCES
    )
    def test_fused(self, path, k, source):
        case = dataclasses.replace(PATHS[path], m=10, n=8, k=k, fused=True, seed=k, **source)
        check_fused(case)
