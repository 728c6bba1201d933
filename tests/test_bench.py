"""The benchmark program: routes run, JSON is complete, failures set the exit code."""

import json
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

# At the end: the installed package must win over the source tree beside bench/.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
from bench import __main__ as bench_main  # noqa: E402
from bench import cases, timing  # noqa: E402


class BenchTest(parameterized.TestCase):
    """A benchmark that silently skips a route or loses its provenance is worse than none."""

    @parameterized.parameters(
        ("4352x3840x3072r128", (4352, 3840, 3072, 128)), ("1x2x3", (1, 2, 3, 0))
    )
    def test_shape_text_round_trips(self, text, expected):
        shape = cases.Shape.parse(text)
        self.assertEqual((shape.m, shape.k, shape.n, shape.rank), expected)
        self.assertEqual(cases.Shape.parse(str(shape)), shape)

    def test_operand_sets_exceed_the_cache(self):
        self.assertGreaterEqual(timing.copies_past_cache(6_000_000) * 6_000_000, 180e6)
        self.assertEqual(timing.copies_past_cache(10**10), 2)

    def test_every_route_is_timed_and_the_json_names_its_origin(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "results" / "out.json"
            arguments = ["--shapes", "16x64x48r16", "--rounds", "1", "--json", str(path)]
            self.assertEqual(bench_main.main(arguments), 0)
            result = json.loads(path.read_text())
        for key in ("command", "date", "device", "jax", "jaxlib", "jax_w4a4"):
            self.assertIn(key, result["environment"])
        names = [row["route"] for row in result["rows"]]
        self.assertEqual(names, [name for name, _ in cases.routes(bench_main.FORMATS)])
        for row in result["rows"]:
            if row["route"].startswith("matmul"):
                self.assertGreater(row["us"], 0)

    def test_a_failing_route_of_ours_fails_the_run(self):
        def broken(key, shape, copies):
            raise ValueError("no kernel")

        with mock.patch.object(cases, "routes", lambda formats: [("matmul nvfp4", broken)]):
            self.assertEqual(bench_main.main(["--shapes", "8x32x8", "--rounds", "1"]), 1)


if __name__ == "__main__":
    absltest.main()
