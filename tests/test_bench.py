"""The benchmark program: routes run, JSON is complete, failures set the exit code."""

import functools
import itertools
import json
import pathlib
import sys
import tempfile
from unittest import mock
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

# At the end: the installed package must win over the source tree beside bench/.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
import jax_w4a4  # noqa: E402
from bench import __main__ as bench_main  # noqa: E402
from bench import accounting, accuracy, cases, decode, plot, shapes, summary, timing  # noqa: E402
from jax_w4a4 import _timing, plan  # noqa: E402
from jax_w4a4._timing import turning  # noqa: E402


class BenchTest(parameterized.TestCase):
    """A benchmark that silently skips a route or loses its provenance is worse than none."""

    @parameterized.parameters(
        ("4352x3840x3072r128", (4352, 3840, 3072, 128)), ("1x2x3", (1, 2, 3, 0))
    )
    def test_shape_text_round_trips(self, text, expected):
        shape = shapes.Shape.parse(text)
        self.assertEqual((shape.m, shape.k, shape.n, shape.rank), expected)
        self.assertEqual(shapes.Shape.parse(str(shape)), shape)

    def test_operand_sets_exceed_the_cache(self):
        self.assertGreaterEqual(timing.copies_past_cache(6_000_000) * 6_000_000, 180e6)
        self.assertEqual(timing.copies_past_cache(10**10), 2)

    def test_every_route_is_timed_and_the_json_names_its_origin(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "results" / "out.json"
            arguments = ["--shapes", "16x64x48r16", "--rounds", "1", "--json", str(path)]
            layers = [layer for layer in cases.LAYERS if layer.name in ("mxfp4", "int4 per row")]
            names = [layer.name for layer in layers]
            self.assertEqual(bench_main.main([*arguments, "--layers", *names]), 0)
            result = json.loads(path.read_text())
        for key in ("command", "date", "device", "jax", "jaxlib", "jax_w4a4"):
            self.assertIn(key, result["environment"])
        routes = [row["route"] for row in result["rows"]]
        self.assertEqual(routes, [name for name, _ in cases.routes(layers)])
        self.assertIn("matmul mxfp4 / xla bf16 dot", result["ratios"])
        for row in result["rows"]:
            if row["route"].startswith("matmul"):
                self.assertGreater(row["us"], 0)

    def test_the_command_can_be_repeated(self):
        """Names of routes hold blanks."""
        with mock.patch.object(sys, "argv", ["bench", "--routes", "dense mxfp4"]):
            command = bench_main.environment("bench.grouped")["command"]
        self.assertEqual(command, "python -m bench.grouped --routes 'dense mxfp4'")

    def test_a_failing_route_of_ours_fails_the_run(self):
        def broken(shape, copies):
            raise ValueError("no kernel")

        with mock.patch.object(cases, "routes", lambda *_, **__: [("matmul nvfp4", broken)]):
            self.assertEqual(bench_main.main(["--shapes", "8x32x8", "--rounds", "1"]), 1)

    def test_a_peer_that_cannot_run_does_not(self):
        def broken(shape, copies):
            raise ValueError("not on this chip")

        with mock.patch.object(cases, "routes", lambda *_, **__: [("torch int8", broken)]):
            self.assertEqual(bench_main.main(["--shapes", "8x32x8", "--rounds", "1"]), 0)

    def test_a_chain_is_timed_call_by_call(self):
        done = []
        chain = timing.Chain(lambda: done.append(0), lambda _: None, 4)
        self.assertGreater(timing.seconds_per_call(chain, rounds=1, min_seconds=0.001), 0)
        self.assertGreater(len(done), 4)

    def test_a_chain_is_timed_without_what_starts_and_ends_it(self):
        """A clock that each burst moves by 5 s and each enqueue by 2: half a second a call."""
        clock = [0.0]

        def spend(seconds):
            clock[0] += seconds

        chain = timing.Chain(lambda: spend(2), lambda _: spend(5), 4)
        fake = mock.Mock(perf_counter=lambda: clock[0], sleep=spend)
        with mock.patch.object(timing, "time", fake), mock.patch.object(_timing, "time", fake):
            got = timing.cool_seconds_per_call(chain, rounds=3, pause=1, burst=14)
            warm = timing.seconds_per_call(chain, rounds=3, min_seconds=70)
        self.assertEqual((got, warm), (0.5, 0.5))

    def test_a_single_chain_that_the_host_holds_up_makes_no_call_free_of_charge(self):
        """A negative time would be the fastest that `tune` finds."""
        clock, waits = [0.0], []

        def spend(seconds):
            clock[0] += seconds

        def wait(_):
            waits.append(0)
            # Three to warm up, one for the number of repeats, a burst.
            spend(500 if len(waits) == 6 else 5)

        chain = timing.Chain(lambda: spend(2), wait, 4)
        fake = mock.Mock(perf_counter=lambda: clock[0])
        with mock.patch.object(_timing, "time", fake):
            self.assertEqual(timing.seconds_per_call(chain, rounds=1, min_seconds=70), 0.5)


NVFP4 = next(layer for layer in cases.LAYERS if layer.name == "nvfp4")


def rows(**times):
    """Rows of one shape: route (underscores for spaces) = (us, gemm_us)."""
    return [
        {"shape": "s", "route": name.replace("_", " "), "us": us, "gemm_us": gemm}
        for name, (us, gemm) in times.items()
    ]


class SummaryTest(parameterized.TestCase):
    """A regression that the comparison lets through goes unseen until a user meets it."""

    committed = rows(xla_bf16_dot=(100, 90), matmul_mxfp4=(50, 45), matmul_mxfp4_bare=(44, 40))

    def test_ratios_take_whole_calls_and_gemms_apart(self):
        got = summary.ratios(self.committed)
        self.assertEqual(got["matmul mxfp4 / xla bf16 dot"], {"s": 2.0})
        self.assertEqual(got["matmul mxfp4 gemm / xla bf16 dot"], {"s": 2.0})
        self.assertAlmostEqual(got["matmul mxfp4 gemm / its bare gemm"]["s"], 40 / 45)
        self.assertNotIn("matmul mxfp4 gemm / torch bf16", got)

    def test_geomean(self):
        self.assertAlmostEqual(summary.geomean([1.0, 4.0]), 2.0)

    @parameterized.parameters((52, 45, 0), (53, 45, 1), (50, 48, 2))
    def test_a_ratio_that_falls_by_more_than_a_twentieth_is_a_regression(self, us, gemm, count):
        """Slower in the call, in the gemm (against the peer and against the local ceiling)."""
        new = rows(xla_bf16_dot=(100, 90), matmul_mxfp4=(us, gemm), matmul_mxfp4_bare=(44, 40))
        self.assertLen(summary.regressions(new, self.committed), count)

    def test_a_slower_machine_is_no_regression(self):
        slow = rows(xla_bf16_dot=(200, 180), matmul_mxfp4=(100, 90), matmul_mxfp4_bare=(88, 80))
        self.assertEqual(summary.regressions(slow, self.committed), [])

    def test_the_comparison_sets_the_exit_code(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "before.json"
            arguments = ["--shapes", "8x32x16r16", "--rounds", "1", "--layers", "mxfp4"]
            self.assertEqual(bench_main.main([*arguments, "--json", str(path)]), 0)
            before = json.loads(path.read_text())
            for row in before["rows"]:
                if row["route"] == "matmul mxfp4":
                    row["us"] /= 1000
            path.write_text(json.dumps(before))
            self.assertEqual(bench_main.main([*arguments, "--compare", str(path)]), 1)


class AccountingTest(parameterized.TestCase):
    """The comparison must differ in the account alone, or it shows something else."""

    def problem(self, rank):
        return plan.Problem(
            *(4352, 3072, 3840, rank, "mxfp4", 32, "bfloat16", "bfloat16", "bfloat16"),
            "float8_e8m0fnu",
        )

    def test_resident_lora_costs_main_stages(self):
        plans = accounting.variants(self.problem(128), 200)
        self.assertEqual({p.tile_m for p in plans.values()}, {200})
        self.assertEqual([p.cluster for p in plans.values()], [1, 2, 2])
        # 328 rows x 128 ranks x 2 bytes beside the rest of 232448 leave two stages of five.
        stages = {name: p.main_stages for name, p in plans.items()}
        self.assertEqual(stages, {"single": 5, "carved": 2, "streamed": 5})

    def test_too_large_a_rank_is_refused(self):
        with self.assertRaisesRegex(ValueError, "rank 256 at tile 256 leaves no two main stages"):
            accounting.variants(self.problem(256), 256)


class AccuracyTest(parameterized.TestCase):
    @parameterized.parameters("gaussian", "outlier channels", "all positive")
    def test_the_reference_is_off_by_the_rounding_of_the_result_only(self, data):
        """fp32 sums: anything above bf16's rounding would be an error of the measurement."""
        row = accuracy.measure(NVFP4, data, 32, 256, 32)
        self.assertAlmostEqual(row["error"] / row["error_of_bf16"], 1.0, delta=0.02)

    def test_a_wrong_product_shows(self):
        original = jax_w4a4.matmul
        with mock.patch.object(jax_w4a4, "matmul", lambda x, w: original(x, w) * 1.03125):
            row = accuracy.measure(NVFP4, "gaussian", 32, 256, 32)
        self.assertGreater(row["error"], 0.03)


def layers_of_ones(count):
    """Operands of `count` layers, told apart by their values, and the sums read of them."""
    sets = [(jnp.full((8, 64), i + 1.0), jnp.eye(64) * 10.0**i) for i in range(count)]

    def read(turns):
        return [sum(10.0**i * ((i + t) % count + 1.0) for t in range(turns)) for i in range(count)]

    return sets, read


class DecodeTest(parameterized.TestCase):
    """What is timed is the GPU at work on every layer, and the picture shows every point."""

    def test_every_turn_takes_another_x_to_each_weight(self):
        sets, read = layers_of_ones(3)
        chain = timing.jax_turns(lambda x, w: x @ w, sets, 2)
        self.assertEqual(chain.calls, 6)
        np.testing.assert_array_equal(chain.enqueue(), read(2))
        np.testing.assert_array_equal(chain.enqueue(), np.multiply(read(2), 2))

    def test_the_result_lands_where_the_last_one_lay(self):
        chain = timing.jax_turns(lambda x, w: x @ w, layers_of_ones(3)[0], 2)
        first = chain.enqueue().unsafe_buffer_pointer()
        self.assertEqual(chain.enqueue().unsafe_buffer_pointer(), first)

    @parameterized.parameters(1, 3)
    def test_the_compiler_drops_and_merges_no_product(self, turns):
        leaves, tree = jax.tree.flatten(layers_of_ones(4)[0])
        layers = jax.jit(turning(lambda x, w: x @ w, tree, turns))
        text = layers.lower(jnp.zeros(4), *leaves).compile().as_text()
        self.assertEqual(text.count(" dot("), 4 * turns, text)

    def test_small_layers_take_more_turns(self):
        turns = [timing.turns_of(1, k, k) for k in (4096, 8192, 16384)]
        self.assertEqual(turns, sorted(turns, reverse=True))
        self.assertGreater(turns[0], 4)
        self.assertEqual(timing.turns_of(8192, 4096, 14336), 1)

    def test_a_slow_host_is_told_from_a_slow_device(self):
        """A device that works on one chain after the other, on a clock of its own."""
        clock, free = [0.0], [0.0]

        def chain(host, device):
            def enqueue():
                clock[0] += host
                free[0] = max(free[0], clock[0]) + device

            def wait(_):
                clock[0] = max(clock[0], free[0])

            return timing.Chain(enqueue, wait, 2)

        fake = mock.Mock(perf_counter=lambda: clock[0])
        with mock.patch.object(timing, "time", fake), mock.patch.object(_timing, "time", fake):
            host = decode.measure(chain(0.04, 0.01), 1, False)
            device = decode.measure(chain(0.004, 0.1), 1, False)
        self.assertTrue(host["host_bound"], host)
        self.assertAlmostEqual(host["host_us"], 40000)
        self.assertAlmostEqual(host["dispatch_us"], 40000)
        self.assertFalse(device["host_bound"], device)
        self.assertAlmostEqual(device["dispatch_us"], 100000)

    @parameterized.parameters(("mxfp4", "sorted"), ("mxfp4 highest", "linear"), ("nvfp4", "linear"))
    def test_weights_are_prepared_where_there_are_kernels_for_them(self, name, order):
        (layer,) = (cases.prepared(layer) for layer in cases.LAYERS if layer.name == name)
        _, w = cases.random_layer(jax.random.key(0), shapes.Shape(4, 64, 32, 16), layer)
        self.assertEqual(w.sign_order, order)

    def test_stacks_exceed_the_cache(self):
        for k, n in decode.LAYERS:
            layers = decode.layers_of(shapes.Shape(1, k, n, 32))
            self.assertGreaterEqual(layers, 16)
            self.assertGreater(layers * k * n * 17 / 32, 3 * 60e6)

    @parameterized.parameters(((), True), (("--linear",), False))
    def test_run_and_picture(self, flags, prepared):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.json"
            arguments = ["--shapes", "64x128", "--rows", "1", "4", "--rounds", "1"]
            arguments += ["--turns", "2", *flags]
            with mock.patch.object(decode, "layers_of", lambda _: 2):
                self.assertEqual(decode.main([*arguments, "--json", str(path)]), 0)
            result = json.loads(path.read_text())
        self.assertEqual({row["m"] for row in result["rows"]}, {1, 4})
        self.assertIn("matmul mxfp4", {row["route"] for row in result["rows"]})
        ours = [row for row in result["rows"] if row["route"].startswith("matmul ")]
        self.assertEqual({row["prepared"] for row in ours}, {prepared})
        for row in result["rows"]:
            self.assertEqual((row["layers"], row["turns"]), (2, 2))
            self.assertAlmostEqual(row["dispatch_us"], 4 * row["us"])
            self.assertEqual((row["handler_calls"], row["captures"]), (0, 0))
        picture = ElementTree.fromstring(plot.draw(result))
        lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
        self.assertLen(lines, len({row["route"] for row in result["rows"]}))
        self.assertTrue(all(len(line.get("points").split()) == 2 for line in lines))

    def test_implementations_side_by_side(self):
        """One row of each and of XLA's dot; one that can't be had is an error, and not the end."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.json"
            arguments = [
                "--shapes",
                "64x128",
                "--rows",
                "1",
                "129",
                "--rounds",
                "1",
                "--turns",
                "1",
            ]
            arguments += ["--implementations", "xla", "sm90_decode", "--json", str(path)]
            with mock.patch.object(decode, "layers_of", lambda _: 2):
                code = decode.main(arguments)
            rows = json.loads(path.read_text())["rows"]
        names = [cases.BASE, "matmul mxfp4 xla", "matmul mxfp4 sm90_decode"]
        self.assertEqual([(row["m"], row["route"]) for row in rows],
                         [(m, name) for m in (1, 129) for name in names])  # fmt: skip
        self.assertEqual(code, 0)
        if jax.default_backend() != "gpu":
            self.assertEqual(["error" in row for row in rows], [False, False, True] * 2)

    def test_implementations_force_the_kernel(self):
        (layer,) = (layer for layer in cases.LAYERS if layer.name == "mxfp4")
        found = decode.named([layer], ["sm90_decode", "sm90_v2"])
        self.assertEqual(list(found), ["matmul mxfp4 sm90_decode", "matmul mxfp4 sm90_v2"])
        x, w = cases.random_layer(jax.random.key(0), shapes.Shape(256, 512, 512, 32), layer)
        for name, each in found.items():
            call = functools.partial(jax_w4a4.matmul, **each.matmul)
            kernel = jax_w4a4.explain(call, x, w, target="sm_90").calls[0].plan.kernel
            self.assertEqual(name, f"matmul mxfp4 {kernel}")
        self.assertEqual(decode.named([layer], []), {"matmul mxfp4": layer})

    @parameterized.product(kn=((64, 64), (64, 96)), turns=(1, 3), prepared=(False, True))
    def test_a_chain_is_a_loop_of_layers(self, kn, turns, prepared):
        """Each layer reads the result of the one before, and a dispatch begins with the same x."""
        shape = shapes.Shape(3, *kn, 32)
        (layer,) = (layer for layer in cases.LAYERS if layer.name == "mxfp4")
        layer = cases.prepared(layer) if prepared else layer
        chain = decode.ours(layer, shape, 4, turns, chained=True)
        self.assertEqual(chain.calls, 4 * turns)
        _, weights = decode._stacks[f"mxfp4 {prepared} True"]
        ks = [k for k, _ in itertools.islice(itertools.cycle((kn, kn[::-1])), 4)]
        self.assertEqual([w.k for w in weights], ks)
        self.assertEqual({w.sign_order for w in weights}, {"sorted" if prepared else "linear"})
        y = jax.random.normal(jax.random.key(1), (3, kn[0]), jnp.bfloat16)
        for w in weights * turns:
            y = jax_w4a4.matmul(y, w)
        for _ in range(2):
            np.testing.assert_array_equal(chain.enqueue(), y)

    @parameterized.parameters(1, 3)
    def test_nothing_of_a_chain_is_dropped_and_nothing_added(self, turns):
        """All products, XLA's and ours, and no copy or kernel of another kind beside XLA's."""
        shape = shapes.Shape(4, 64, 96, 32)
        weights = [jnp.ones((n, k)) for k, n in ((64, 96), (96, 64), (64, 96), (96, 64))]
        leaves, tree = jax.tree.flatten(weights)
        x = jnp.ones((4, 64))
        dots = jax.jit(
            timing.through(lambda x, w: jnp.einsum("mk,nk->mn", x, w), tree, turns),
            donate_argnums=0,
            keep_unused=True,
        )
        text = dots.lower(x, x, *leaves).compile().as_text()
        self.assertEqual(text.count(" dot("), 4 * turns, text)
        self.assertNotIn(" copy(", text)
        self.assertIn("input_output_alias={ {}: (0, {}", text)
        decode.ours(NVFP4, shape, 4, turns, chained=True)
        leaves, tree = jax.tree.flatten(decode._stacks["nvfp4 False True"][1])
        x = jnp.ones((4, 64), jnp.bfloat16)
        layers = timing.through(jax_w4a4.matmul, tree, turns)
        calls = jax_w4a4.explain(layers, x, x, *leaves).calls
        self.assertEqual(
            [(call.count, call.problem.k, call.problem.n) for call in calls],
            [(2 * turns, 64, 96), (2 * turns, 96, 64)],
        )

    @parameterized.parameters(1, 3)
    def test_a_stack_makes_every_call_of_every_turn(self, turns):
        """None merged with that of another turn, none dropped, and sums of all results' corners."""
        keys = jax.random.split(jax.random.key(0), 4)
        sets = [
            (jax.random.normal(key, (4, 64)), jax.random.normal(key, (96, 64)), jnp.float32(i))
            for i, key in enumerate(keys)
        ]
        call = lambda x, w, size: jnp.einsum("mk,nk->mn", x, w) + size  # noqa: E731
        leaves, tree = jax.tree.flatten(sets)
        stack = jax.jit(timing.stacking(call, tree, turns))
        text = stack.lower(jnp.zeros(4), *leaves).compile().as_text()
        self.assertEqual(text.count(" dot("), 4 * turns, text)
        chain = timing.jax_stack(call, sets, turns)
        self.assertEqual(chain.calls, 4 * turns)
        want = np.zeros(4)
        for turn, (i, (_, w, _)) in itertools.product(range(turns), enumerate(sets)):
            x, _, size = sets[(i + turn) % 4]
            want[i] += call(x, w, size)[0, 0]
        for dispatches in (1, 2):
            np.testing.assert_allclose(chain.enqueue(), dispatches * want, rtol=1e-5)

    def test_layers_of_a_stack_wait_for_each_other(self):
        """Group sizes of a layer are there only once the layer before is through."""
        sets = [(jnp.ones((4, 64)), jnp.ones((96, 64)), jnp.float32(i)) for i in range(3)]
        call = lambda x, w, size: x @ w.T + size  # noqa: E731
        leaves, tree = jax.tree.flatten(sets)
        jaxpr = jax.make_jaxpr(timing.stacking(call, tree, 2))(jnp.zeros(3), *leaves).jaxpr
        after = {}  # the products that a value depends on
        dots = 0
        for eqn in jaxpr.eqns:
            found = set().union(*(after.get(str(v), set()) for v in eqn.invars))
            if eqn.primitive.name == "dot_general":
                self.assertEqual(after[str(eqn.invars[0])], set(range(dots)))
                found, dots = found | {dots}, dots + 1
            after |= {str(v): found for v in eqn.outvars}
        self.assertEqual(dots, 6)

    @parameterized.parameters((64, 64), (64, 160))
    def test_results_of_a_chain_stay_as_large_as_x(self, k, n):
        """Hundreds of layers, the most of one dispatch, ours from an x that is too large as well.
        What keeps XLA's is the law of large numbers, in layers of this size hardly."""
        shape = shapes.Shape(4, k, n, 32)
        decode.ours(NVFP4, shape, 16, 1, chained=True)
        decode.xla_bf16(shape, 16, 1, chained=True)
        for route, call, start, most in (
            ("nvfp4 False True", jax_w4a4.matmul, (1, 1e3), 2),
            ("xla bf16 dot True", lambda x, w: jnp.einsum("mk,nk->mn", x, w), (1,), 1e3),
        ):
            step = jax.jit(call)
            for size in start:
                y = size * jax.random.normal(jax.random.key(1), (4, k), jnp.bfloat16)
                for w in decode._stacks[route][1] * 32:
                    y = step(y, w)
                rms = float(jnp.sqrt(jnp.mean(y.astype(jnp.float32) ** 2)))
                self.assertBetween(rms, 1 / most, most, route)

    def test_the_result_of_a_chain_lands_where_the_last_one_lay(self):
        chain = decode.xla_bf16(shapes.Shape(4, 64, 96, 32), 4, 2, chained=True)
        first = chain.enqueue().unsafe_buffer_pointer()
        self.assertEqual(chain.enqueue().unsafe_buffer_pointer(), first)

    def test_run_of_chains(self):
        """Two shapes that are each other's transposes are one row."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.json"
            arguments = ["--chain", "--shapes", "64x96", "96x64", "64x64", "--rows", "1"]
            arguments += ["--rounds", "1", "--turns", "2", "--json", str(path)]
            with mock.patch.object(decode, "layers_of", lambda _: 3):
                self.assertEqual(decode.main(arguments), 0)
            result = json.loads(path.read_text())
        names = [cases.BASE, "matmul mxfp4"]
        self.assertEqual(
            [(row["shape"], row["layers"], row["route"]) for row in result["rows"]],
            [("64x96+96x64", 4, name) for name in names] + [("64x64", 3, name) for name in names],
        )
        for row in result["rows"]:
            self.assertTrue(row["chained"])
            self.assertAlmostEqual(row["dispatch_us"], 2 * row["layers"] * row["us"])
        with self.assertRaises(SystemExit), mock.patch.object(sys, "stderr"):
            decode.main(["--chain", "--kernels"])

    def test_kernels_are_traced_on_request(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(timing, "kernel_seconds", lambda _: {"gemm": 5e-6}),
            mock.patch.object(decode, "layers_of", lambda _: 2),
        ):
            path = pathlib.Path(folder) / "out.json"
            arguments = ["--shapes", "64x48", "--rows", "1", "--rounds", "1", "--turns", "1"]
            decode.main([*arguments, "--kernels", "--json", str(path)])
            result = json.loads(path.read_text())
        for row in result["rows"]:
            self.assertAlmostEqual(row["kernels_us"]["gemm"], 5.0)

    def test_points_that_measure_the_host_are_circled(self):
        rows = [
            {"m": m, "k": 64, "n": 64, "route": "r", "us": 5.0 * m, "host_bound": m == 2}
            for m in (1, 2, 4)
        ]
        where = {"device": "d", "jax": "j", "date": "t", "command": "c"}
        picture = ElementTree.fromstring(plot.draw({"rows": rows, "environment": where}))
        (line,) = picture.findall("{http://www.w3.org/2000/svg}polyline")
        (circle,) = picture.findall("{http://www.w3.org/2000/svg}circle")
        middle = line.get("points").split()[1]
        self.assertEqual(f"{circle.get('cx')},{circle.get('cy')}", middle)

    def test_a_line_stands_where_another_kernel_takes_over(self):
        """At the first point that it runs, once for all that it runs, under its name."""
        kernels = {1: "a 8x32", 2: "a 16x32", 4: "b 64x256", 16: "b 128x256"}
        rows = [
            {"m": m, "k": 64, "n": 64, "route": "r", "us": 3.0 * m, "plan": plan}
            for m, plan in kernels.items()
        ]
        rows += [{"m": m, "k": 64, "n": 64, "route": "peer", "us": 5.0 * m} for m in kernels]
        where = {"device": "d", "jax": "j", "date": "t", "command": "c"}
        picture = ElementTree.fromstring(plot.draw({"rows": rows, "environment": where}))
        svg = "{http://www.w3.org/2000/svg}"
        (dashed,) = (p for p in picture.findall(f"{svg}path") if p.get("stroke-dasharray"))
        third = picture.find(f"{svg}polyline").get("points").split()[2]
        self.assertEqual(dashed.get("d").removeprefix("M").split()[0], third.split(",")[0])
        texts = [text.text for text in picture.findall(f"{svg}text")]
        self.assertEqual((texts.count("a"), texts.count("b")), (0, 1))

    @parameterized.parameters(
        (7.3, 421.0, [5, 10, 20, 50, 100, 200, 500]),
        (10.0, 20.0, [10, 20]),
        (13.0, 13.0, [10, 20]),
        (0.6, 1.5, [0.5, 1, 2]),
        (100.0, 100.0, [100, 200]),
    )
    def test_the_axis_holds_all_times(self, low, high, expected):
        self.assertEqual([round(each, 9) for each in plot.in_decades(low, high)], expected)


if __name__ == "__main__":
    absltest.main()
