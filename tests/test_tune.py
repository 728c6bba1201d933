"""Tuned choices: what the sweep keeps, how the planner takes it, and what a bad file does."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

import jax_w4a4
from jax_w4a4 import plan
from jax_w4a4.plan import tuning
from jax_w4a4.tune import _operands, _plan_of, kernels, sweep

PROBLEM = plan.Problem(
    4352, 3072, 3840, 128, "mxfp4", 32, "bfloat16", "bfloat16", "bfloat16", "float8_e8m0fnu", 3840
)
OTHER = (("cluster", 1), ("tile_m", 64), ("tile_n", 128))


def entry(problem=PROBLEM, choices=OTHER, kernel="sm90_v2"):
    return tuning.Tuned("sm_90", problem, kernel, choices, 70.0, 80.0, "a test")


class TableTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(tuning.clear)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "tuning.json"

    def test_the_planner_takes_a_tuned_tile_and_says_so(self):
        own = plan.solve(PROBLEM, "sm_90")
        self.assertNotEqual(own.tile_m, 64)
        with tuning.using([entry()]):
            tuned = plan.solve(PROBLEM, "sm_90")
        self.assertEqual((tuned.tile_m, tuned.cluster), (64, 1))
        self.assertIn("70.0 us measured on a test, planned 80.0", tuned.reasons[0])
        self.assertEqual(plan.solve(PROBLEM, "sm_90"), own)

    def test_other_problems_targets_and_forced_plans_are_untouched(self):
        tuning.add([entry()])
        wider = plan.Problem(**{**PROBLEM.__dict__, "n": 6144})
        self.assertNotEqual(plan.solve(wider, "sm_90").tile_m, 64)
        self.assertEqual(plan.solve(PROBLEM, "sm_90", tile_m=200).tile_m, 200)
        self.assertIsNone(tuning.lookup(PROBLEM, "sm_100"))

    def test_a_change_of_the_table_makes_jax_trace_again(self):
        """A plan that jit remembered from before the tuning would never be replaced."""
        w = jax_w4a4.quantize(jax.random.normal(jax.random.key(0), (3072, 3840)), "mxfp4", rank=0)
        x = jax.ShapeDtypeStruct((4352, 3840), jnp.bfloat16)
        problem = plan.Problem(**{**PROBLEM.__dict__, "rank": 0})

        def tile():
            with plan.recording() as plans:
                jax.jit(lambda x, w: jax_w4a4.matmul(x, w)).trace(x, w)
            return plans[0].tile_m

        before = tile()
        tuning.add([entry(problem)])
        self.assertEqual(tile(), 64)
        tuning.clear()
        self.assertEqual(tile(), before)

    def test_a_file_round_trips(self):
        tuning.save(self.path, [entry()])
        self.assertEqual(tuning.load(self.path), (entry(),))
        self.assertEqual(plan.solve(PROBLEM, "sm_90").tile_m, 64)

    def test_where_low_rank_down_runs_can_be_in_a_table(self):
        """Forced out of the gemm's launch, and in, where the planner would have it otherwise."""
        for k, planned in ((4096, 4), (2048, 0)):
            problem = dataclasses.replace(PROBLEM, m=64, n=4096, k_pad=k, k=k, rank=32)
            self.assertEqual(plan.solve(problem, "sm_90").ffi_attrs()["down_ahead"], planned)
            tuning.add([entry(problem, (("down_ahead", 4 - planned),), "sm90_decode")])
            self.assertEqual(plan.solve(problem, "sm_90").ffi_attrs()["down_ahead"], 4 - planned)

    @parameterized.parameters(
        ("not json", "JSONDecodeError"),
        ("{}", "KeyError"),
        (json.dumps({"schema": 1, "entries": []}), "schema 1, expected 2"),
    )
    def test_a_bad_file_is_refused(self, text, reason):
        self.path.write_text(text)
        with self.assertRaisesRegex(ValueError, f"jax_w4a4.plan.tuning.load: .*{reason}"):
            tuning.load(self.path)

    @parameterized.parameters(
        ({"choices": {}}, "without choices"),
        ({"choices": [["tile_m", 64]]}, "AttributeError"),
        ({"choices": {"tile_m": "64"}}, "forced tile_m is '64'"),
        ({"choices": {"tile_m": 64.5}}, "forced tile_m is 64.5"),
        ({"choices": {"tile_m": float("inf")}}, "forced tile_m is inf"),
        ({"choices": {"group_m": 2**32}}, "forced group_m is 4294967296"),
        ({"choices": {"main_stages": 1}}, "needs 2 or more"),
        ({"choices": {"down_ahead": "4"}}, "forced down_ahead is '4'"),
        ({"choices": {"down_ahead": 3}}, "forced down_ahead is 3; expected 0 or 4"),
        ({"choices": {"down_ahead": 4}}, "it is for sm90_decode behind quantizer 5"),
        ({"kernel": None}, "kernel is None, expected one of sm90_v1, "),
        ({"kernel": "sm90_v9"}, "kernel is 'sm90_v9', expected one of"),
        # An account for comparison, which has no kernel.
        ({"kernel": "svdquant_v2", "target": "sm_100"}, "kernel is 'svdquant_v2', expected one of"),
        ({"kernel": "sm90_decode"}, "sm90_decode cannot take this problem: 4352 rows"),
        ({"us": "fast"}, "us is 'fast'"),
        ({"planned_us": None}, "planned_us is None"),
        ({"target": "sm_999"}, "sm_999"),
        ({"problem": {**PROBLEM.__dict__, "k": "3840"}}, "Problem.k is '3840'"),
        ({"problem": {**PROBLEM.__dict__, "lora_smoothed": "no"}}, "Problem.lora_smoothed"),
        ({"extra": 1}, "extra"),
    )
    def test_a_bad_entry_is_refused(self, changes, reason):
        tuning.save(self.path, [entry()])
        data = json.loads(self.path.read_text())
        data["entries"][0] |= changes
        self.path.write_text(json.dumps(data))
        with self.assertRaisesRegex(ValueError, f"jax_w4a4.plan.tuning.load: (.|\n)*{reason}"):
            tuning.load(self.path)

    def test_a_file_of_any_depth_is_refused(self):
        self.path.write_text("[" * 200_000)
        with self.assertRaisesRegex(ValueError, "jax_w4a4.plan.tuning.load: .*RecursionError"):
            tuning.load(self.path)

    def test_a_target_may_have_any_of_its_names(self):
        tuning.save(self.path, [dataclasses.replace(entry(), target="9.0")])
        tuning.load(self.path)
        self.assertEqual(plan.solve(PROBLEM, "sm_90").tile_m, 64)

    def test_an_entry_that_the_planner_refuses_is_refused_at_once(self):
        tuning.save(self.path, [entry(choices=(("tile_m", 1000),))])
        with self.assertRaisesRegex(ValueError, "has no tile with tile_m=1000"):
            tuning.load(self.path)
        self.assertIsNone(tuning.lookup(PROBLEM, "sm_90"))

    def test_the_environment_names_a_file(self):
        tuning.save(self.path, [entry()])
        row = json.loads(self.path.read_text())["entries"][0]
        program = (
            "from jax_w4a4 import plan; from jax_w4a4.plan import tuning;"
            f"p = tuning._entry({row}).problem;"
            "print(plan.solve(p, 'sm_90').tile_m)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, tuning.ENVIRONMENT: str(self.path), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertEqual(done.stdout.strip(), "64")

    @parameterized.parameters(None, "{}", json.dumps({"schema": 2, "entries": [{"choices": {}}]}))
    def test_a_bad_file_in_the_environment_names_the_variable(self, text):
        if text is not None:
            self.path.write_text(text)
        self.enter_context(mock.patch.dict(os.environ, {tuning.ENVIRONMENT: str(self.path)}))
        tuning._load_environment.cache_clear()
        self.addCleanup(tuning._load_environment.cache_clear)
        with self.assertRaisesRegex(ValueError, "jax_w4a4.plan.tuning: JAX_W4A4_TUNING=/"):
            plan.solve(PROBLEM, "sm_90")


class SweepTest(parameterized.TestCase):
    def test_every_tile_that_fits_is_timed_and_the_fastest_kept(self):
        planned = plan.solve(PROBLEM, "sm_90")
        timed = []

        def seconds(kernel, choices):
            self.assertEqual(kernel, "sm90_v2")
            timed.append(tuple(sorted(choices.items())))
            return 1e-6 if choices["tile_m"] == 64 and choices["cluster"] == 1 else 2e-6

        best = sweep(planned, seconds, "a test")
        self.assertEqual(best.choices, OTHER)
        self.assertAlmostEqual(best.us, 1.0)
        self.assertAlmostEqual(best.planned_us, 2.0)
        self.assertEqual(len(timed), len(set(timed)))
        tiles = plan.budget.DESIGNS["sm90_v2"].tiles_of(PROBLEM)
        self.assertLen(timed, len(tiles))

    def test_the_planned_tile_stays_unless_another_is_faster(self):
        planned = plan.solve(PROBLEM, "sm_90")
        best = sweep(planned, lambda kernel, choices: 1e-6, "a test")
        self.assertEqual(dict(best.choices)["tile_m"], planned.tile_m)

    @parameterized.parameters(
        (1, {}, ["sm90_decode"]), (16, {}, ["sm90_decode"]), (17, {}, ["sm90_decode", "sm90_v2"]),
        (128, {}, ["sm90_decode", "sm90_v2"]), (257, {}, ["sm90_v2", "sm90_decode"]),
        (512, {}, ["sm90_v2", "sm90_decode"]), (513, {}, ["sm90_v2"]), (4352, {}, ["sm90_v2"]),
        (None, {}, ["sm90_v2"]), (257, {"precision": "highest"}, ["sm90_v2"]),
        (64, {"out_dtype": "float32"}, ["sm90_v1"]),
    )  # fmt: skip
    def test_kernels_that_a_problem_may_be_for(self, m, changes, names):
        problem = dataclasses.replace(PROBLEM, m=m, **changes)
        self.assertEqual(kernels(plan.solve(problem, "sm_90")), names)

    @parameterized.parameters((128, "sm90_decode", "sm90_v2"), (257, "sm90_v2", "sm90_decode"))
    def test_the_tile_of_another_kernel_may_be_the_fastest(self, m, own, other):
        """128x128 on one CTA is a tile of both: the entry says whose it is."""
        problem = dataclasses.replace(PROBLEM, m=m)
        planned = plan.solve(problem, "sm_90")
        self.assertEqual(planned.kernel, own)
        tile = {"tile_m": 128, "tile_n": 128, "cluster": 1}
        fastest = lambda kernel, choices: 2.0 - (kernel == other and choices == tile)  # noqa: E731
        best = sweep(planned, fastest, "a test")
        self.assertEqual((best.kernel, dict(best.choices)), (other, tile))
        with tuning.using([best]):
            self.assertEqual(plan.solve(problem, "sm_90").kernel, other)
            self.assertIn(f"tuned {other}, cluster=1", plan.solve(problem, "sm_90").reasons[0])

    def test_without_a_gpu_it_says_what_to_do(self):
        if jax.default_backend() == "gpu":
            self.skipTest("there is one")
        with self.assertRaisesRegex(NotImplementedError, "jax_w4a4.tune: needs a GPU"):
            jax_w4a4.tune([(4352, 3840, 3072)])

    @parameterized.parameters(
        ((1, 2),), ((0, 64, 64),), ((1.5, 64, 64),), ((True, 64, 64),), (5,), (None,)
    )
    def test_bad_shapes(self, shape):
        with self.assertRaisesRegex(ValueError, r"jax_w4a4.tune: shape .* expected \(M, K, N\)"):
            jax_w4a4.tune([shape])

    def test_bad_arguments(self):
        with self.assertRaisesRegex(TypeError, "jax_w4a4.tune: shapes is NoneType"):
            jax_w4a4.tune(None)
        with self.assertRaisesRegex(ValueError, "jax_w4a4.tune: rounds=0"):
            jax_w4a4.tune([(64, 64, 64)], rounds=0)
        with self.assertRaisesRegex(ValueError, "jax_w4a4.tune: precision='fast'"):
            jax_w4a4.tune([(64, 64, 64)], precision="fast")

    def test_no_two_operand_sets_share_memory(self):
        """Weights that share it would be read from the L2."""
        xs, ws = _operands((4, 64, 48), "mxfp4", 16, jnp.bfloat16, {})
        self.assertLen(xs, 16)
        self.assertLen(ws, 16)
        self.assertEqual((xs[0].shape, ws[0].shape), ((4, 64), (48, 64)))
        leaves = jax.tree.leaves((xs, ws))
        self.assertLen({leaf.unsafe_buffer_pointer() for leaf in leaves}, len(leaves))

    @parameterized.parameters((False, "linear"), (True, "sorted"))
    def test_prepared_weights_are_tuned_apart(self, prepared, order):
        xs, ws = _operands((4, 64, 48), "mxfp4", 16, jnp.bfloat16, {}, prepared)
        call = functools.partial(jax_w4a4.matmul, implementation="cuda")
        self.assertEqual(_plan_of(call, xs[0], ws[0]).problem.sign_order, order)

    def test_precision_reaches_the_problem(self):
        w = jax_w4a4.quantize(jnp.ones((32, 32)), rank=0)
        call = functools.partial(jax_w4a4.matmul, implementation="cuda", precision="fastest")
        self.assertEqual(_plan_of(call, jnp.ones((4, 32)), w).problem.precision, "fastest")


if __name__ == "__main__":
    absltest.main()
