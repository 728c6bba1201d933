"""tcgen05 on the block-scaled test kernels: exact results, schedules, seeded bugs."""

import itertools

import mutants_sm100
import pytest
import sm100
from absl.testing import parameterized
from sm100 import Case

from emulator import EmulationError, Options, toolchain
from emulator.scheduler import POLICIES

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

CASES = tuple(
    Case(format, group, m * group, n, k, rank, groups, seed=i)
    for i, ((format, group), (m, n, k, rank, groups)) in enumerate(
        itertools.product(
            itertools.product(("nvfp4", "mxfp4"), (1, 2)),
            (
                (128, 128, 512, 0, 1),
                (100, 72, 768, 64, 1),
                (300, 200, 512, 96, 1),
                (300, 300, 320, 32, 2),
                (260, 130, 2048, 0, 64),
            ),
        )
    )
)


class Exact(parameterized.TestCase):
    @parameterized.named_parameters((str(c), c) for c in CASES)
    def test_cells(self, case):
        for policy in POLICIES:
            sm100.check(case, Options(policy=policy, seed=case.seed))

    def test_loads_may_be_read_without_wait_when_lenient(self):
        edits = (("      wait_loads();\n", "      if (column == kTileN - 16) wait_loads();\n"),)
        case = Case("nvfp4", 1)
        sm100.check(case, Options(strict_ld=False), edits)
        with self.assertRaisesRegex(EmulationError, "before the wait"):
            sm100.check(case, Options(), edits)

    def test_strict_copies_are_ordered_by_double_buffering(self):
        """Two stages of scale columns are not enough under documented orders alone: the copy for
        the stage after next may overtake the MMAs that read the columns."""
        with self.assertRaisesRegex(EmulationError, r"\(cp\)|may still read"):
            for seed in range(4):
                sm100.check(Case("nvfp4", 2, 256, 128, 2048), Options("late", seed, strict_cp=True))


@pytest.mark.slow
class Schedules(parameterized.TestCase):
    @parameterized.named_parameters((str(c), c) for c in CASES)
    def test_policies_and_seeds(self, case):
        for policy, seed in itertools.product(POLICIES, range(6)):
            sm100.check(case, Options(policy=policy, seed=seed))


class Mutants(parameterized.TestCase):
    @parameterized.named_parameters((m.name, m) for m in mutants_sm100.MUTANTS)
    def test_noticed(self, mutant):
        for seed, policy in itertools.product(range(2), POLICIES):
            options = Options(policy, seed, max_steps=500_000)
            try:
                sm100.check(mutant.case, options, mutant.edits)
            except EmulationError as error:
                self.assertIn(type(error).__name__, mutant.caught, str(error))
                return
            except AssertionError:
                self.assertIn("cells", mutant.caught)
                return
        self.fail(f"{mutant.name} was not noticed")
