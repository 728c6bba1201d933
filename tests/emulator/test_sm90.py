"""The product's sm_90a kernels in the emulator: every cell of the result, several schedules."""

import itertools

import model
import numpy as np
import pytest
from absl.testing import parameterized

from emulator import Options, product, toolchain
from emulator.product import Case
from emulator.scheduler import POLICIES

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

# (M, N, K): a tail of each against the tile of 64 x 128 and stages of 64 or 128.
SHAPES = ((1, 8, 32), (70, 264, 416), (64, 128, 128), (65, 77, 96), (130, 392, 288))


def cases():
    """Formats x ranks x clusters over shapes, tile counts and options in turn."""
    grid = itertools.product(("mxfp4", "nvfp4", "int4"), (0, 32, 128), (1, 2))
    for i, (format, rank, cluster) in enumerate(grid):
        for j in range(2):
            m, n, k = SHAPES[(i + 3 * j) % len(SHAPES)]
            yield Case(
                format,
                m,
                n,
                k,
                rank,
                cluster=cluster,
                clusters=(1, 2, 64)[(i + j) % 3],
                stages=(None, 2, 3)[(i // 2 + j) % 3],
                group_m=(None, 1)[i % 2],
                affine=(i + j) % 4 != 0,
                global_scale=format == "nvfp4" or i % 3 == 0,
                act_unsigned=format == "int4" and i % 2 == 0,
                exact=j == 0,
                seed=i,
            )


def named(all_cases):
    return [(str(case).replace(" ", "_"), case) for case in all_cases]


def run(case, policy, seed, **options):
    operands = product.make_operands(case)
    result = product.run(case, Options(policy=policy, seed=seed, **options), operands=operands)
    product.check(case, operands, result)
    return operands, result


class Gemm(parameterized.TestCase):
    @parameterized.named_parameters(named(cases()))
    def test_cells(self, case):
        run(case, POLICIES[case.seed % 4], case.seed)

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
    @parameterized.named_parameters(named(cases()))
    def test_policies_and_seeds(self, case):
        for policy, seed in itertools.product(POLICIES, range(3)):
            run(case, policy, seed)


class GemmV1(parameterized.TestCase):
    @parameterized.parameters(("nvfp4", 32, 0), ("mxfp4", 64, 16), ("int4", 128, 40))
    def test_cells(self, format, tile_m, rank):
        case = Case(format, 45, 136, 160, rank, kernel="sm90_v1", tile_m=tile_m, seed=rank)
        run(case, "random", 0)


class Quantizer(parameterized.TestCase):
    """Fused quantizer and repack against tests/model.py."""

    @parameterized.parameters(
        (1, 40, 0, 1, "rceil"),
        (70, 416, 32, 1, "rceil"),
        (70, 640, 48, 2, "floor"),
        (64, 1024, 128, 4, "rceil"),
        (5, 1096, 16, 8, "rceil"),
    )
    def test_fused(self, m, k, rank, cluster, rule):
        case = Case("mxfp4", m, 40, k, rank, fused=True, quantizer_cluster=cluster, rule=rule,
                    global_scale=rank == 32, seed=m)  # fmt: skip
        operands, result = run(case, POLICIES[rank // 16 % 4], m)
        x = product.from_bf16(operands["x"])
        w = model.Operands(
            operands["weight"], operands["weight_scale"].view(model.dtype_of("float8_e8m0fnu")),
            "mxfp4", k, act_global_scale=operands.get("act_global_scale"),
            smooth=operands["smooth"], act_rule=rule, block_size=32,
        )  # fmt: skip
        if rank:
            w.lora_down = product.from_bf16(operands["lora_down"])
        packed, scales, lora_act = model.quantize_activation(x, w)
        want = model.decode(packed, scales, "mxfp4")
        got = product.private_activation(case, result.act, result.token_scale)
        np.testing.assert_array_equal(got, want)
        if rank:
            got = product.from_bf16(result.lora_act)
            np.testing.assert_allclose(got, lora_act, rtol=2**-8, atol=1e-4)

    @parameterized.parameters("mxfp4", "nvfp4", "int4")
    def test_repack(self, format):
        case = Case(format, 70, 40, 416, global_scale=format == "nvfp4")
        operands, result = run(case, "random", 0)
        scales = operands["act_scale"]
        if format != "int4":
            scales = scales.view(model.dtype_of(product.SCALE_DTYPES[format]))
        want = model.decode(operands["packed"], scales, format)
        got = product.private_activation(case, result.act, result.token_scale)
        np.testing.assert_array_equal(got, want)
