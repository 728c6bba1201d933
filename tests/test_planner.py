"""The planner: the published stage tables, its optimality, its refusals."""

import dataclasses
import threading

from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from test_budget import problem

from jax_w4a4 import plan
from jax_w4a4.plan import budget, planner, targets
from jax_w4a4.plan.budget import Config

B200 = targets.get("sm_100")
# The published bug: lora_up counted whole in each CTA of a pair.
B200_WHOLE_LORA_UP = dataclasses.replace(B200, halved=B200.halved - {"lora_up"})

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def published(target, tile, rank, lora_stages):
    """(main, store) stages of the svdquant-kernels v2 account, None where it does not fit."""
    tile_m, tile_n, cluster = tile
    try:
        solved = plan.solve(
            problem(rank=rank),
            target,
            kernel="svdquant_v2",
            tile_m=tile_m,
            tile_n=tile_n,
            cluster=cluster,
            lora_stages=lora_stages,
        )
    except plan.DoesNotFitError:
        return None
    return solved.main_stages, solved.store_stages


PAIR128, PAIR256 = (256, 128, 2), (256, 256, 2)
ONE128, ONE256 = (128, 128, 1), (128, 256, 1)


class PublishedTableTest(parameterized.TestCase):
    """Stage counts of svdquant-kernels v2, before and after its lora_up fix."""

    @parameterized.parameters(
        # tile, rank, LoRA stages, before the fix, after it
        (PAIR128, 32, 2, (6, 3), (6, 4)),
        (PAIR128, 128, 2, (2, 5), (4, 2)),
        (PAIR128, 256, 2, None, None),
        (PAIR128, 256, 1, (2, 5), (4, 2)),
        (PAIR256, 32, 2, (4, 3), (4, 5)),
        (PAIR256, 128, 2, None, (2, 2)),
        (PAIR256, 256, 2, None, None),
        (PAIR256, 256, 1, None, (2, 2)),
        (ONE128, 32, 2, (4, 6), (4, 6)),
        (ONE128, 128, 2, (2, 3), (2, 3)),
        (ONE128, 256, 2, None, None),
        (ONE128, 256, 1, (2, 3), (2, 3)),
        (ONE256, 32, 2, (2, 8), (2, 8)),
        (ONE256, 128, 2, None, None),
        (ONE256, 128, 1, (2, 2), (2, 2)),
        (ONE256, 256, 2, None, None),
        (ONE256, 256, 1, None, None),
    )
    def test_stages(self, tile, rank, lora_stages, before, after):
        self.assertEqual(published(B200_WHOLE_LORA_UP, tile, rank, lora_stages), before)
        self.assertEqual(published(B200, tile, rank, lora_stages), after)

    @parameterized.parameters(
        # LoRA stages, quotient before (negative: not even the rest fits), after
        (0, 7, 7),
        (1, 5, 5),
        (2, 2, 4),
        (3, 0, 2),
        (4, -1, 0),
    )
    def test_lora_stage_sweep(self, lora_stages, before, after):
        """7/5/2/0/- before, 7/5/4/2/0 after, at 256x128 and R=128."""
        for target, expected in ((B200_WHOLE_LORA_UP, before), (B200, after)):
            config = Config(256, 128, 256, 2, 0, lora_stages, 2)
            rows = budget.svdquant_v2(problem(), target, config)
            fixed = budget.layout(rows, 2, 1)[1]
            quotient = (target.smem_bytes - fixed) // 28672
            self.assertEqual(max(quotient, -1), expected)
            found = published(target, PAIR128, 128, lora_stages)
            self.assertEqual(found[0] if found else 0, expected if expected >= 2 else 0)

    @parameterized.product(
        tile=(PAIR128, PAIR256, ONE128, ONE256),
        rank=(16, 32, 48, 64, 96, 128, 160, 192, 256),
        lora_stages=(0, 1, 2, 3),
        halved=(True, False),
    )
    def test_closed_form(self, tile, rank, lora_stages, halved):
        """The solver against the published formula, written out on its own."""
        tile_m, tile_n, cta = tile
        main = tile_m // cta * 144 + tile_n // cta * 128 + tile_n * 16
        lora = tile_m // cta * rank * 2 + tile_n // (cta if halved else 1) * rank * 2
        left = 232448 - lora_stages * lora - 4 * tile_n - 1024 - 2 * 8192
        stages, rest = divmod(left, main)
        expected = (stages, 2 + rest // 8192) if stages >= 2 else None
        target = B200 if halved else B200_WHOLE_LORA_UP
        self.assertEqual(published(target, tile, rank, lora_stages), expected)


class StreamedLoraTest(parameterized.TestCase):
    """Without a carve-out the rank costs no stages."""

    @parameterized.product(rank=(0, 16, 32, 128, 256, 1024), format=("nvfp4", "mxfp4"))
    def test_seven_stages_for_any_rank(self, rank, format):
        solved = plan.solve(
            problem(rank=rank, format=format), B200, tile_m=256, tile_n=128, lora_stages=0
        )
        self.assertGreaterEqual(solved.main_stages, 7)
        self.assertEqual(solved.lora_stages, 0)

    def test_chosen_and_explained_at_the_production_shape(self):
        solved = plan.solve(problem(), B200)
        self.assertEqual((solved.tile_m, solved.tile_n, solved.cluster), PAIR128)
        self.assertEqual(solved.lora_stages, 0)
        reasons = "\n".join(solved.reasons)
        self.assertIn("LoRA streamed through the main ring (2 extra steps)", reasons)
        self.assertIn("2 dedicated LoRA stages would leave 4 main stages", reasons)

    def test_carving_out_is_chosen_where_it_is_cheaper(self):
        """A single K step: the ring is never full, prefetched LoRA operands win."""
        solved = plan.solve(problem(k=128, rank=32, m=128, n=256), B200)
        self.assertEqual(solved.lora_stages, 2)


class Sm90V1Test(parameterized.TestCase):
    """Plans of the kernel that runs today."""

    @parameterized.parameters(
        (1, 32), (32, 32), (33, 32), (65, 32), (200, 64), (300, 64), (4352, 128), (None, 64)
    )
    def test_tile_follows_m(self, m, tile_m):
        solved = plan.solve(problem(m=m), "sm_90")
        self.assertEqual(solved.tile_m, tile_m)
        self.assertEqual(
            (solved.kernel, solved.tile_n, solved.tile_k, solved.cluster, solved.main_stages),
            ("sm90_v1", 128, 64, 1, 2),
        )

    def test_ffi_attrs_are_the_wire_format(self):
        """The C++ struct reads exactly these members, in this order."""
        attrs = plan.solve(problem(rank=32, m=128, n=256), "sm_90", tile_m=64).ffi_attrs()
        self.assertEqual(
            list(attrs.items()),
            [
                ("schema", 1),
                ("kernel", 1),
                ("cc", 90),
                ("tile_m", 64),
                ("tile_n", 128),
                ("tile_k", 64),
                ("cluster", 1),
                ("main_stages", 2),
                ("lora_stages", 1),
                ("store_stages", 0),
                ("threads", 256),
                ("smem_bytes", 50176),
                ("off_weight", 0),
                ("off_act", 32768),
                ("off_weight_scale", 0),
                ("off_act_scale", 0),
                ("off_lora_up", 0),
                ("off_lora_act", 16384),
                ("off_aux", 49152),
                ("bytes_weight", 16384),
                ("bytes_act", 8192),
                ("bytes_weight_scale", 0),
                ("bytes_act_scale", 0),
                ("bytes_lora_up", 16384),
                ("bytes_lora_act", 8192),
                ("bytes_aux", 1024),
                ("q_rows", 16),
                ("q_chunk_k", 256),
                ("q_threads", 256),
                ("q_smem_bytes", 32832),
            ],
        )

    def test_int4_scales_have_regions(self):
        attrs = plan.solve(problem(m=128, format="int4", block=32), "sm_90", tile_m=32).ffi_attrs()
        self.assertEqual(attrs["bytes_weight_scale"], 1024)
        self.assertEqual(attrs["bytes_act_scale"], 256)
        self.assertEqual(attrs["off_weight_scale"], 40960)
        self.assertEqual(attrs["off_act_scale"], 40960 + 2048)
        self.assertEqual(attrs["off_aux"], 40960 + 2048 + 512)

    @parameterized.parameters({"m": 0}, {"n": 0}, {"rank": 1}, {"k": 32})
    def test_degenerate_shapes_have_plans(self, **changes):
        self.assertEqual(plan.solve(problem(**changes), "sm_90").main_stages, 2)


class RefusalTest(parameterized.TestCase):
    """What cannot be planned says why and what to do."""

    def test_no_design(self):
        with self.assertRaisesRegex(NotImplementedError, "sm_120.*implementation='xla'"):
            plan.solve(problem(), "sm_120")

    def test_no_int4_on_blackwell(self):
        with self.assertRaisesRegex(NotImplementedError, "int4.*implementation='xla'"):
            plan.solve(problem(format="int4"), "sm_100")

    def test_lora_in_fp32_on_blackwell(self):
        with self.assertRaisesRegex(NotImplementedError, "float32; cast lora_up"):
            plan.solve(problem(lora_dtype="float32"), "sm_103")
        plan.solve(problem(rank=0, lora_dtype="float32"), "sm_103")

    def test_kernel_for_another_target(self):
        with self.assertRaisesRegex(ValueError, "sm90_v1 is made for sm_90, not for sm_100"):
            plan.solve(problem(), "sm_100", kernel="sm90_v1")

    def test_unknown_kernel(self):
        with self.assertRaisesRegex(ValueError, "unknown kernel 'sm90_v9'.*sm90_v1"):
            plan.solve(problem(), "sm_90", kernel="sm90_v9")

    def test_tile_the_design_lacks(self):
        with self.assertRaisesRegex(ValueError, r"no tile with tile_m=48; .*\(32, 128, 1\)"):
            plan.solve(problem(), "sm_90", tile_m=48)

    def test_unknown_choice(self):
        with self.assertRaisesRegex(TypeError, "cannot force stages; expected any of tile_m"):
            plan.solve(problem(), "sm_90", stages=3)

    def test_bad_value(self):
        with self.assertRaisesRegex(ValueError, "forced main_stages is -1"):
            plan.solve(problem(), "sm_90", main_stages=-1)

    def test_more_stages_than_the_design_has(self):
        with self.assertRaisesRegex(plan.DoesNotFitError, "sm90_v1 has at most 2"):
            plan.solve(problem(), "sm_90", main_stages=3)

    @parameterized.parameters(
        ({"lora_stages": 0}, "has 1 LoRA stage at rank 128, got lora_stages=0"),
        ({"lora_stages": 2}, "got lora_stages=2"),
        ({"store_stages": 2}, "stores from registers"),
        ({"cluster": 2}, "no tile with cluster=2"),
    )
    def test_choices_the_kernel_would_reject(self, forced, message):
        """Better here than as a launch error."""
        with self.assertRaisesRegex(ValueError, message):
            plan.solve(problem(), "sm_90", **forced)

    def test_nothing_fits_gives_the_account(self):
        """R=256 with two LoRA stages at the production tile asserts in the published kernel."""
        with self.assertRaises(plan.DoesNotFitError) as caught:
            plan.solve(
                problem(rank=256),
                B200,
                kernel="svdquant_v2",
                tile_m=256,
                tile_n=128,
                lora_stages=2,
            )
        text = str(caught.exception)
        self.assertStartsWith(text, "jax_w4a4.plan: nothing fits 232448 B")
        self.assertIn("214528 B without the main ring and 28672 B per main stage", text)
        self.assertIn("2 main stages need 271872 of 232448 B", text)

    def test_account_without_kernel_cannot_be_launched(self):
        solved = plan.solve(problem(), B200, kernel="svdquant_v2")
        with self.assertRaisesRegex(NotImplementedError, "svdquant_v2"):
            solved.ffi_attrs()


class PlanTest(parameterized.TestCase):
    """A plan is a static parameter: hashable, equal by value, short in a jaxpr."""

    def test_value_semantics(self):
        a = plan.solve(problem(), "sm_90")
        planner._solve.cache_clear()
        b = plan.solve(problem(), targets.get("sm_90"))
        self.assertIsNot(a, b)
        self.assertEqual(a, b)
        self.assertEqual(hash(a), hash(b))
        self.assertNotEqual(a, plan.solve(problem(), "sm_90", tile_m=32))
        with self.assertRaises(dataclasses.FrozenInstanceError):
            a.tile_m = 64

    def test_repr_is_one_short_line(self):
        text = repr(plan.solve(problem(), "sm_90"))
        self.assertEqual(
            text, "Plan(sm90_v1 sm_90 tile=128x128x64 cluster=1 stages=2/1/0 smem=66560)"
        )

    @parameterized.parameters(
        ("nvfp4", "sm_90"), ("int4", "sm_90"), ("nvfp4", "sm_100"), ("mxfp4", "sm_103")
    )
    def test_reasons_are_sentences(self, format, target):
        solved = plan.solve(problem(format=format), target)
        self.assertGreaterEqual(len(solved.reasons), 4)
        for reason in solved.reasons:
            self.assertNotIn("None", reason)
            self.assertGreater(len(reason.split()), 4)

    def test_unknown_region(self):
        with self.assertRaisesRegex(KeyError, "accumulator"):
            plan.solve(problem(), "sm_100").region("accumulator")


class ForcedTest(parameterized.TestCase):
    """Forcing is the only way to fewer than two main stages, and never over budget."""

    @parameterized.parameters(0, 1, 3)
    def test_main_stages(self, stages):
        solved = plan.solve(problem(), B200, tile_m=256, tile_n=128, main_stages=stages)
        self.assertEqual(solved.main_stages, stages)
        self.assertIn("forced by the caller", "\n".join(solved.reasons))

    def test_too_many(self):
        with self.assertRaises(plan.DoesNotFitError):
            plan.solve(problem(), B200, tile_m=256, tile_n=128, main_stages=9)

    def test_store_stages(self):
        solved = plan.solve(problem(), B200, tile_m=256, tile_n=128, store_stages=1)
        self.assertEqual((solved.main_stages, solved.store_stages), (7, 1))


def shapes():
    return st.builds(
        lambda m, k, n, rank, format: problem(m=m, k=32 * k, n=n, rank=rank, format=format),
        st.one_of(st.none(), st.integers(0, 20000)),
        st.integers(1, 600),
        st.integers(0, 20000),
        st.sampled_from([0, 1, 16, 32, 100, 128, 256, 1024]),
        st.sampled_from(["nvfp4", "mxfp4"]),
    )


def capacities():
    return st.integers(16 * 1024, 300 * 1024)


def with_capacity(name, capacity):
    return dataclasses.replace(targets.get(name), smem_bytes=capacity)


def try_solve(*args, **kwargs):
    try:
        return plan.solve(*args, **kwargs)
    except plan.DoesNotFitError:
        return None


class PropertyTest(parameterized.TestCase):
    """What must hold for every problem and every capacity."""

    @parameterized.parameters(
        ("sm_90", "sm90_v1"),
        ("sm_100", "sm100_v2"),
        ("sm_103", "sm100_v2"),
        ("sm_100", "svdquant_v2"),
    )
    def test_within_budget(self, name, kernel):
        @quick
        @given(shapes(), capacities())
        def check(p, capacity):
            solved = try_solve(p, with_capacity(name, capacity), kernel=kernel)
            if solved is None:
                return
            self.assertLessEqual(solved.smem_bytes, capacity)
            self.assertGreaterEqual(solved.main_stages, 2)
            resident = sum(
                row.bytes(solved.cluster) * row.stages
                for row in solved.rows
                if row.memory == "smem" and row.overlaps_main
            )
            self.assertGreaterEqual(solved.smem_bytes, resident)
            for region in solved.regions:
                end = region.offset + region.bytes_per_stage * region.stages
                self.assertLessEqual(end, solved.smem_bytes)

        check()

    @parameterized.parameters("sm90_v1", "sm100_v2", "svdquant_v2")
    def test_monotone_in_capacity(self, kernel):
        """More memory never loses a fit, a main stage of a given tile, or computed time."""
        design = budget.DESIGNS[kernel]
        name = "sm_90" if kernel == "sm90_v1" else "sm_100"

        def cost(solved, target):
            config = Config(
                solved.tile_m,
                solved.tile_n,
                solved.tile_k,
                solved.cluster,
                solved.main_stages,
                solved.lora_stages,
                solved.store_stages,
            )
            return planner._cost(design, solved.problem, target, config)

        @quick
        @given(shapes(), capacities(), capacities(), st.sampled_from(design.tiles))
        def check(p, one, other, tile):
            small, large = (with_capacity(name, c) for c in sorted((one, other)))
            a, b = (try_solve(p, t, kernel=kernel) for t in (small, large))
            if a is not None:
                self.assertIsNotNone(b)
                self.assertLessEqual(cost(b, large), cost(a, small))
            choice = dict(zip(("tile_m", "tile_n", "cluster"), tile, strict=True))
            lora = design.lora_choices[0]
            a, b = (
                try_solve(p, t, kernel=kernel, lora_stages=lora, **choice) for t in (small, large)
            )
            if a is not None:
                self.assertGreaterEqual(b.main_stages, a.main_stages)

        check()

    def test_equals_brute_force(self):
        """Against every (tile, LoRA, main, store) combination, with bytes and time written out
        from the documents and not taken from the package."""

        @quick
        @given(
            m=st.integers(1, 5000),
            n=st.integers(1, 5000),
            k=st.integers(1, 64),
            rank=st.sampled_from([0, 32, 128, 256]),
            capacity=st.integers(40 * 1024, 240 * 1024),
        )
        def check(m, n, k, rank, capacity):
            k *= 256
            target = with_capacity("sm_100", capacity)
            best = None
            for tile_m, tile_n, cta in (PAIR256, PAIR128, ONE256, ONE128, (128, 64, 1)):
                rows_m = tile_m // cta
                main = rows_m * 144 + tile_n // cta * 128 + max(tile_n, 128) * 16
                fixed = -(-8 * tile_n // 1024) * 1024 + 1024
                for lora in (0, 1, 2) if rank else (0,):
                    carved = lora * (rows_m + tile_n // cta) * rank * 2
                    for stages in range(2, 12):
                        for store in range(2, 30):
                            if fixed + carved + stages * main + store * 8192 > capacity:
                                break
                            step = 2 * tile_m * tile_n * 256 / (1e16 / 148 * cta)
                            wait = 650e-9 / stages
                            tile = k // 256 * (step + wait)
                            tile += -(-rank // 64) * (step + (0 if lora else wait))
                            tile += 650e-9 if lora == 1 else 0
                            if tile_n == 256:
                                tile += tile_m * tile_n * 2 / (8e12 / 148 * cta)
                            waves = -(-(-(-m // tile_m) * -(-n // tile_n)) // (148 // cta))
                            moved = (m + n) * (k // 2 + k // 16 + rank * 2) + 8 * n + 2 * m * n
                            time = max(waves * tile, moved / 8e12)
                            key = (round(time * 1e15), -tile_m * tile_n, -stages, lora, -store)
                            if best is None or key < best[0]:
                                best = (key, (tile_m, tile_n, cta, stages, lora, store))
            solved = try_solve(problem(m=m, n=n, k=k, rank=rank), target)
            if best is None:
                self.assertIsNone(solved)
                return
            self.assertEqual(
                (
                    solved.tile_m,
                    solved.tile_n,
                    solved.cluster,
                    solved.main_stages,
                    solved.lora_stages,
                    solved.store_stages,
                ),
                best[1],
            )

        check()


class ScheduleTest(parameterized.TestCase):
    """Waves as the design notes count them."""

    @parameterized.parameters(
        (B200, 256, 128, 2, 408, 6, 0.92), ("sm_90", 128, 128, 1, 816, 7, 0.88)
    )
    def test_production_shape(self, target, tile_m, tile_n, cluster, tiles, waves, fill):
        s = plan.schedule(4352, 3072, tile_m, tile_n, cluster, targets.get(target))
        self.assertEqual((s.tiles, s.waves), (tiles, waves))
        self.assertAlmostEqual(s.fill, fill, places=2)
        self.assertAlmostEqual(s.fill * s.waves, s.waves - 1 + s.last_fill)

    def test_empty(self):
        s = plan.schedule(0, 3072, 64, 128, 1, targets.get("sm_90"))
        self.assertEqual((s.waves, s.fill, s.last_fill), (0, 0.0, 0.0))


class RecordingTest(parameterized.TestCase):
    """Plans are collected where they are asked for and nowhere else."""

    def setUp(self):
        super().setUp()
        self.one = plan.solve(problem(m=1), "sm_90")
        self.two = plan.solve(problem(m=300), "sm_90")

    def test_nested(self):
        plan.record(self.one)
        with plan.recording() as outer:
            plan.record(self.one)
            with plan.recording() as inner:
                self.assertIs(plan.record(self.two), self.two)
            plan.record(self.one)
        plan.record(self.two)
        self.assertEqual(outer, [self.one, self.two, self.one])
        self.assertEqual(inner, [self.two])

    def test_ends_with_an_exception(self):
        with self.assertRaises(RuntimeError), plan.recording() as plans:
            raise RuntimeError
        plan.record(self.one)
        self.assertEqual(plans, [])

    def test_other_python_threads_are_not_heard(self):
        with plan.recording() as plans:
            thread = threading.Thread(target=plan.record, args=(self.one,))
            thread.start()
            thread.join()
        self.assertEqual(plans, [])

    def test_compiler_threads_are_heard(self):
        """Partitioner callbacks may come on a thread that Python did not start."""
        import _thread

        done = threading.Event()

        def callback():
            plan.record(self.two)
            done.set()

        with plan.recording() as plans:
            _thread.start_new_thread(callback, ())
            self.assertTrue(done.wait(10))
        self.assertEqual(plans, [self.two])


if __name__ == "__main__":
    absltest.main()
