"""The protocol of sm100_v2 (cuda/sm100_gemm.cuh), explored exhaustively on the CPU."""

import pair_model
import pytest
from absl.testing import absltest, parameterized

pytestmark = pytest.mark.matrix


class ProtocolTest(parameterized.TestCase):
    """No deadlock, no slot overwritten under an MMA, no accumulator under an epilogue."""

    @parameterized.parameters(*sorted(pair_model.shapes()))
    def test_every_corner_holds(self, group, accumulators, lora):
        corners = [
            c for c in pair_model.corners()
            if (c.group, c.accumulators, c.lora_blocks) == (group, accumulators, lora)
        ]  # fmt: skip
        self.assertGreaterEqual(len(corners), 18)
        for corner in corners:
            # In full but for the largest, where little is left that a smaller one does not reach.
            large = corner.stages + corner.tiles > 4
            states, violation = pair_model.explore(corner, reduce=large)
            self.assertIsNone(violation, corner)
            self.assertEqual(states == 1, corner.tiles == 0, corner)

    def test_plans_as_they_are(self):
        """The stages of every plan, two store warps; reduced."""
        for found in pair_model.plans():
            (accumulator,) = (row for row in found.rows if row.name == "accumulator")
            stages = found.main_stages
            lora = pair_model.budget.lora_steps(found.problem)
            corner = pair_model.Config(
                found.cluster, stages, accumulator.stages, stages + 1, lora, 2, warps=2
            )
            self.assertIsNone(pair_model.explore(corner)[1], corner)

    def test_corners_cover_the_plans(self):
        """Both group sizes, with and without a low-rank branch, one accumulator and more."""
        groups, accumulators, lora = (set(v) for v in zip(*pair_model.shapes(), strict=True))
        self.assertEqual(groups, {1, 2})
        self.assertEqual(lora, {0, 1, 2})
        self.assertIn(1, accumulators)
        self.assertGreater(max(accumulators), 1)

    @parameterized.parameters(*pair_model.BUGS)
    def test_known_bug_is_found(self, bug):
        _, violation = pair_model.explore(pair_model.BUG_CORNERS[bug])
        self.assertIsNotNone(violation, pair_model.BUGS[bug])

    @parameterized.parameters("", *pair_model.BUGS)
    def test_reduction_keeps_the_verdict(self, bug):
        corner = pair_model.Config(2, 2, 1, 2, 1, 2, bug=bug)
        reduced, full = (pair_model.explore(corner, reduce=r)[1] for r in (True, False))
        self.assertEqual(reduced is None, full is None, (reduced, full))


if __name__ == "__main__":
    absltest.main()
