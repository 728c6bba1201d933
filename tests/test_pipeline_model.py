"""The mbarrier protocol of sm90_v2 (cuda/sm90_pipeline.cuh), explored exhaustively on the CPU."""

import pipeline_model
import pytest
from absl.testing import absltest, parameterized

pytestmark = pytest.mark.matrix


class ProtocolTest(parameterized.TestCase):
    """No deadlock, no read of a slot that is not complete, no copy into one that is read."""

    @parameterized.product(cluster=(1, 2), stages=(2, 3))
    def test_every_corner_holds(self, cluster, stages):
        """Tiles 0, 1, 2, many x blocks fewer than, equal to, more than stages x LoRA chunks."""
        corners = [
            c for c in pipeline_model.corners() if (c.cluster, c.stages) == (cluster, stages)
        ]
        self.assertGreaterEqual(len(corners), 27)
        for corner in corners:
            states, violation = pipeline_model.explore(corner)
            self.assertIsNone(violation, corner)
            self.assertEqual(states == 1, corner.tiles == 0, corner)

    @parameterized.parameters(*pipeline_model.decode_corners())
    def test_every_corner_of_decode_holds(self, *corner):
        corner = pipeline_model.Config(*corner) if len(corner) > 1 else corner[0]
        states, violation = pipeline_model.explore(corner)
        self.assertIsNone(violation, corner)
        self.assertGreater(states, 1)

    @parameterized.product(ahead=(False, True), stages=(3, 4))
    def test_scales_in_turn_need_a_box_as_long_as_the_ring(self, ahead, stages):
        """What the plan asks for: with more stages a box comes after a block that needs it."""
        corner = pipeline_model.Config(stages=stages, k_blocks=8, decode=True, cover=2, ahead=ahead)
        self.assertRegex(pipeline_model.explore(corner)[1], "scales of block .* are not there")

    @parameterized.product(
        bug=("", *pipeline_model.SCALE_BUGS), shape=((2, 2, True), (2, 2, False), (2, 3, False))
    )
    def test_reduction_keeps_the_verdict_of_scales_in_turn(self, bug, shape):
        stages, cover, ahead = shape
        corner = pipeline_model.Config(
            stages=stages, k_blocks=2 * cover + 1, decode=True, cover=cover, ahead=ahead, bug=bug
        )
        reduced, full = (pipeline_model.explore(corner, reduce=r)[1] for r in (True, False))
        self.assertEqual(reduced is None, full is None)

    @parameterized.parameters("early_release", "no_empty_wait")
    def test_known_bug_is_found_in_decode(self, bug):
        corner = pipeline_model.Config(stages=2, k_blocks=5, decode=True, bug=bug)
        self.assertIsNotNone(pipeline_model.explore(corner)[1], bug)

    @parameterized.parameters(*pipeline_model.BUGS)
    def test_known_bug_is_found(self, bug):
        _, violation = pipeline_model.explore(pipeline_model.BUG_CORNERS[bug])
        self.assertIsNotNone(violation, pipeline_model.BUGS[bug])

    @parameterized.product(
        bug=("", "early_release", "release_own_cta_only", "last_block_kept", "no_empty_wait"),
        shape=((1, 1, 1, 2, 2), (2, 1, 0, 1, 1)),
    )
    def test_reduction_keeps_the_verdict(self, bug, shape):
        """Fewer interleavings are explored than there are; small rings are explored both ways."""
        cluster, blocks, chunks, tiles, consumers = shape
        corner = pipeline_model.Config(cluster, 2, blocks, chunks, tiles, consumers, bug=bug)
        reduced, full = (pipeline_model.explore(corner, reduce=r)[1] for r in (True, False))
        self.assertEqual(reduced is None, full is None)


if __name__ == "__main__":
    absltest.main()
