"""The product's sm_100a kernels in the emulator, with what test_matrix_sm100.py has not: all
options in turn, one schedule each; seeded bugs."""

import itertools

import mutants_sm100
import numpy as np
import pytest
from absl.testing import parameterized
from test_sm90 import SOURCES, awkward, quantized

from emulator import EmulationError, Options, blackwell, product, toolchain
from emulator.blackwell import Case
from emulator.scheduler import POLICIES

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

# (CTAs that share an MMA, columns of the tile)
VARIANTS = ((2, 256), (2, 128), (1, 256), (1, 128), (1, 64))
# K: whole stages, part of one, one block of 32, more stages than the ring has.
LENGTHS = (512, 320, 32, 1056)


def cases():
    """Variants x formats x ranks over tails, tile counts and options in turn."""
    grid = itertools.product(VARIANTS, ("nvfp4", "mxfp4"), (0, 32, 128))
    for i, ((group, tile_n), format, rank) in enumerate(grid):
        tiles_m, tiles_n = ((1, 1), (2, 1), (1, 3), (2, 2))[i % 4]
        yield Case(
            format,
            m=128 * group * tiles_m - (0, 37, 91)[i % 3],
            n=tile_n * tiles_n - (0, 3, 24)[i // 2 % 3],
            k=LENGTHS[i // 3 % 4],
            rank=rank,
            group=group,
            tile_n=tile_n,
            clusters=(1, 2, 64)[i // 4 % 3],
            stages=(None, 2, 3)[i // 5 % 3],
            store_stages=(None, 2)[i % 2],
            group_m=(None, 1)[i // 2 % 2],
            affine=i % 5 != 0,
            global_scale=i % 2 == 0,
            exact=i % 4 != 3,
            seed=i,
        )


def named(all_cases):
    return [(str(case).replace(" ", "_"), case) for case in all_cases]


class Gemm(parameterized.TestCase):
    @parameterized.named_parameters(named(cases()))
    def test_cells(self, case):
        blackwell.run_checked(case, Options(POLICIES[case.seed % 4], case.seed))

    @parameterized.parameters(*POLICIES)
    def test_schedules_agree(self, policy):
        case = Case("nvfp4", 300, 200, 576, 40, clusters=1, exact=False)
        bits = [blackwell.run_checked(case, Options(policy, seed)).y for seed in range(2)]
        np.testing.assert_array_equal(bits[0], bits[1])

    @parameterized.parameters(("float16", "float16"), ("bfloat16", "float16"))
    def test_float16(self, out, lora):
        blackwell.run_checked(Case("nvfp4", 130, 72, 64, 24, 1, out_dtype=out, lora_dtype=lora))

    def test_strict_copies(self):
        """Under the documented orders alone, a copy of scale factors may overtake the MMAs that
        read its columns: the kernel relies on the order of issue, as published kernels do."""
        with self.assertRaisesRegex(EmulationError, r"\(cp\)|may still read"):
            for seed in range(4):
                blackwell.run_checked(Case(k=2048), Options("late", seed, strict_cp=True))


def quantizer_cases():
    """Formats x sources, with K that leaves warps, pieces and parts of a stage without work."""
    for i, (format, source) in enumerate(itertools.product(("nvfp4", "mxfp4"), SOURCES)):
        yield Case(
            format, (11, 130)[i % 2], 24, (72, 1032, 40, 520)[i % 4], group=1, fused=True,
            exact=False, seed=i, **{"global_scale": False, **source},
        )  # fmt: skip


def check_quantized(case, operands, result):
    """Codes and scale factors bit for bit; returns what lora_act should be."""
    packed, scales, lora_act = quantized(case, operands)
    np.testing.assert_array_equal(result.packed, packed)
    atoms = blackwell.scale_atoms(scales.view(np.uint8), case.block)
    np.testing.assert_array_equal(result.act_atoms, atoms)
    atoms = blackwell.scale_atoms(operands["weight_scale"], case.block)
    np.testing.assert_array_equal(result.weight_atoms, atoms)
    return lora_act


def check_lora_act(result, want):
    got = product.from_bf16(result.lora_act)
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


class Quantizer(parameterized.TestCase):
    """From x: codes and scale factors bit for bit, with zeros past M and K; LoRA-down."""

    @parameterized.named_parameters(named(quantizer_cases()))
    def test_bits(self, case):
        operands = awkward(case)
        with np.errstate(all="ignore"):
            result = blackwell.run(case, Options(POLICIES[case.seed % 4], 1), operands=operands)
        check_quantized(case, operands, result)

    @parameterized.parameters((8, 40), (40, 136), (64, 1032), (72, 520), (128, 264))
    def test_low_rank(self, rank, k):
        case = Case("mxfp4", (70, 65, 1)[rank % 3], 136, k, rank, 1, fused=True, exact=False)
        operands = blackwell.make_operands(case)
        result = blackwell.run(case, Options(POLICIES[rank // 8 % 4], rank), operands=operands)
        blackwell.check(case, operands, result)
        check_lora_act(result, quantized(case, operands)[2])


class GemmV1(parameterized.TestCase):
    """sm100_v1: the kernel of sm90_v1, as nvcc compiles it for sm_100a."""

    @parameterized.parameters(("nvfp4", 32, 0), ("mxfp4", 64, 16), ("int4", 128, 40))
    def test_cells(self, format, tile_m, rank):
        text = toolchain.ptx_of("sm90_gemm_v1.cu", "sm_100a")
        case = product.Case(format, 45, 136, 160, rank, kernel="sm90_v1", tile_m=tile_m, seed=rank)
        with product.seeded((), ()) as driver:
            driver.load(toolchain.codes(text))
            operands = product.make_operands(case)
            result = product.run(case, Options(), operands=operands)
        product.check(case, operands, result)


@pytest.mark.slow
class Schedules(parameterized.TestCase):
    @parameterized.named_parameters(named(cases()))
    def test_policies_and_seeds(self, case):
        for policy, seed in itertools.product(POLICIES, range(3)):
            blackwell.run_checked(case, Options(policy, seed))


class Noticing(parameterized.TestCase):
    def run_checked(self, mutant, options):
        case = mutant.case
        operands = blackwell.make_operands(case)
        result = blackwell.run(case, options, operands=operands, changes=mutant.attrs)
        blackwell.check(case, operands, result)
        if case.fused:
            packed, scales, _ = quantized(case, operands)
            atoms = blackwell.scale_atoms(scales.view(np.uint8), case.block)
            if (result.packed != packed).any() or (result.act_atoms != atoms).any():
                raise product.WrongCells("codes or scale factors are wrong")

    def notice(self, mutant):
        with product.seeded(mutant.sources, mutant.all_edits(), blackwell.host()):
            for seed, policy in itertools.product(range(2), POLICIES):
                options = Options(policy, seed, max_steps=500_000)
                try:
                    self.run_checked(mutant, options)
                except EmulationError as error:
                    self.assertIn(type(error).__name__, mutant.caught, str(error))
                    return
                except product.WrongCells:
                    self.assertIn("cells", mutant.caught)
                    return
        self.fail(f"{mutant.name} was not noticed")


class Mutants(Noticing):
    @parameterized.named_parameters((m.name, m) for m in mutants_sm100.MUTANTS if m.fast)
    def test_noticed(self, mutant):
        self.notice(mutant)

    def test_table(self):
        kinds = {m.kind for m in mutants_sm100.MUTANTS}
        self.assertGreaterEqual(len(mutants_sm100.MUTANTS), 40)
        self.assertLessEqual({"protocol", "account", "layout", "arithmetic", "cells"}, kinds)


@pytest.mark.slow
class AllMutants(Noticing):
    @parameterized.named_parameters((m.name, m) for m in mutants_sm100.MUTANTS if not m.fast)
    def test_noticed(self, mutant):
        self.notice(mutant)
