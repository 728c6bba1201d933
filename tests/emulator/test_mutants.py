"""Every seeded bug of mutants.py is noticed, and in the way that the table says."""

import collections

import mutants
import pytest
from absl.testing import parameterized

from emulator import EmulationError, Options, product, toolchain
from emulator.scheduler import POLICIES

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

# One of each kind in every run, the rest with -m slow.
FAST = {
    "no full wait",
    "release of this CTA only",
    "release before the MMAs are complete",
    "no wgmma.fence",
    "no fence.proxy.async before the store",
    "no cluster barrier before exit",
    "slab without swizzle",
    "last column of an odd N",
    "weight halved twice in the account",
    "a warpgroup passes the turn to itself",
    "weight scales past the last group",
    "scales two stages past K",
    "token maximum before every warp is done",
    "exit while a peer still reads",
    "decode: one word of lora_act is waited for",
    "decode: ranks past 32 before the launch before has ended",
    "decode: the peer gets the half that this CTA finishes",
}


def outcome(mutant: mutants.Mutant, policy: str, seed: int) -> str:
    """Name of the error, "cells", or "" if nothing was noticed."""
    operands = product.make_operands(mutant.case)
    options = Options(policy=policy, seed=seed, max_steps=500_000)
    try:
        result = product.run(mutant.case, options, operands=operands, changes=mutant.attrs)
        product.check(mutant.case, operands, result)
    except EmulationError as error:
        return type(error).__name__
    except product.WrongCells:
        return "cells"
    return ""


class Noticing(parameterized.TestCase):
    def notice(self, mutant):
        sources = mutant.sources or (toolchain.gemm_v2_name(mutant.case.path.name, 64),)
        with product.seeded(sources, mutant.edits):
            for seed in range(3):
                for policy in POLICIES:
                    found = outcome(mutant, policy, seed)
                    if found:
                        self.assertIn(found, mutant.caught)
                        return
        self.fail(f"{mutant.name} was not noticed")


class Mutants(Noticing):
    @parameterized.named_parameters((m.name, m) for m in mutants.MUTANTS if m.name in FAST)
    def test_noticed(self, mutant):
        self.notice(mutant)

    def test_table(self):
        kinds = collections.Counter(m.kind for m in mutants.MUTANTS)
        self.assertGreaterEqual(len(mutants.MUTANTS), 40)
        self.assertGreaterEqual(kinds["protocol"], 15)
        self.assertGreater(kinds["account"], 0)
        self.assertGreater(kinds["cells"], 0)
        self.assertLess(FAST, {m.name for m in mutants.MUTANTS})


@pytest.mark.slow
class AllMutants(Noticing):
    @parameterized.named_parameters((m.name, m) for m in mutants.MUTANTS if m.name not in FAST)
    def test_noticed(self, mutant):
        self.notice(mutant)
