"""`python -m jax_w4a4 selftest`: each part fails for its own reason only, a process that hangs or
dies never stops the command, and a record is what lets an unproven kernel run."""

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized

import jax_w4a4
from jax_w4a4 import _ffi, formats, plan, primitives, selftest
from jax_w4a4.selftest import parts, probes, record, runner

CHILD = pathlib.Path(__file__).resolve().parent / "selftest_child.py"
NAMES = tuple(probe.name for probe in probes.PROBES)


def child(bug):
    return (sys.executable, str(CHILD), bug, "--reference")


def failed(found):
    return {part["part"]: part["failures"] for part in found if part["failures"]}


class ProbeTest(parameterized.TestCase):
    """The data: exact, right for the reference, and blind to what is not its business."""

    @parameterized.parameters(*NAMES)
    def test_results_are_exact(self, name):
        sizes = (probes.SMALL, probes.FEW, *([] if name == "ring" else [probes.LARGE]))
        for kind, size in itertools.product(probes.KINDS, sizes):
            for call in probes.BY_NAME[name].calls(kind, size):
                self.assertEqual(call.k % (kind.block or 32), 0)
                np.testing.assert_array_equal(call.want, call.want.astype(np.float32))
                if name != "rounding":
                    got = probes.from_bf16(probes.bf16(call.want))
                    np.testing.assert_array_equal(got, call.want)

    @parameterized.parameters(*probes.KINDS)
    def test_bits_mean_what_the_formats_say(self, kind):
        rng = np.random.default_rng(0)
        k = formats.padded_k(128, kind.block)
        codes = rng.integers(0, 16, (3, k), np.uint8)
        exponents = rng.integers(-4, 4, (3, k // (kind.block or k)))
        call = probes.call(kind, codes, codes, act_exponents=exponents)
        dtype = getattr(ml_dtypes, kind.scale_dtype, kind.scale_dtype)
        values = formats.dequantize_blocks(
            jnp.asarray(call.arrays["packed"]), jnp.asarray(call.arrays["act_scale"].view(dtype)),
            kind.format, call.block,
        )  # fmt: skip
        want = kind.values(codes) * np.repeat(np.exp2(exponents.astype(float)), call.block, 1)
        np.testing.assert_array_equal(np.asarray(values), want)

    def test_messages_spell_the_index(self):
        """Two tokens change places: the message names both."""
        probe = probes.BY_NAME["tokens"]
        calls = list(probe.calls(probes.KINDS[0], probes.SMALL))
        results = []
        for call in calls:
            bits = probes.bf16(call.want)
            bits[[3, 30]] = bits[[30, 3]]
            results.append(bits)
        text = "\n".join(probes.mismatches(probe, calls, results))
        self.assertIn("y[3, 0] of 72x136 has the value of token 30 instead of 3", text)
        self.assertEqual(probes.mismatches(probe, calls, [probes.bf16(c.want) for c in calls]), [])

    def test_an_unwritten_cell_is_wrong(self):
        probe = probes.BY_NAME["store"]
        calls = list(probe.calls(probes.KINDS[0], probes.SMALL))
        results = [probes.bf16(c.want) for c in calls]
        results[-1][-1, -1] = 0xFFFF
        self.assertLen(probes.mismatches(probe, calls, results), 1)

    def test_exact_data_fits_the_fp8_accumulator(self):
        """Thirteen bits below the largest term: sums of halves stay below 2^12."""
        for kind, (m, n, k, _) in itertools.product(probes.KINDS, parts.EXACT + parts.EXACT_FEW):
            call = parts.exact_call(kind, m, n, formats.padded_k(k, kind.block), 1, 0)
            arrays = {name: call.arrays[name] for name in call.arrays if "lora" not in name}
            arrays |= {"channel_scale": np.ones(n), "bias": np.zeros(n)}
            arrays |= {"lora_act": np.zeros((m, 1), np.uint16)}
            arrays |= {"lora_up": np.zeros((n, 1), np.uint16)}
            total = parts._magnitude(dataclasses.replace(call, arrays=arrays))
            self.assertLess(total.max(), 2.0**12)


class PartTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        """The processes compile the same programs, once: that is what takes longest in them."""
        super().setUpClass()
        cache = {
            "JAX_COMPILATION_CACHE_DIR": cls.enterClassContext(tempfile.TemporaryDirectory()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        cls.enterClassContext(mock.patch.dict(os.environ, cache))

    def test_all_pass_on_the_reference(self):
        names = [name for name in parts.PARTS if name not in ("quantizer", "grouped")]
        found = runner.run(names, command=child("none"), limit_s=120)
        self.assertEqual([part["part"] for part in found], names)
        self.assertEqual(failed(found), {})
        checks = {part["part"]: part["checks"] for part in found}
        # A reference has no clusters.
        self.assertEqual([name for name, count in checks.items() if not count], ["pair"])

    def test_grouped_passes_on_the_reference(self):
        with mock.patch.object(parts, "KINDS", probes.KINDS[:1]):
            found = parts.grouped(parts.Session(None))
        self.assertEqual((found.failures, found.checks), ([], 4))

    def test_grouped_notices_the_weight_of_another_group(self):
        def wrong(x, w, sizes, **settings):
            return jax_w4a4.grouped_matmul(x, w, sizes[::-1], **settings)

        with (
            mock.patch.object(parts, "KINDS", probes.KINDS[:1]),
            mock.patch.object(parts, "grouped_matmul", wrong),
        ):
            self.assertNotEmpty(parts.grouped(parts.Session(None)).failures)

    @parameterized.parameters(
        ("token scales of another block", "token-scales"),
        ("weight scales of another row", "weight-scales"),
        ("k pairs swapped in x", "depth"),
        ("ranks swapped in lora_up", "low-rank"),
        ("results cut", "rounding"),
    )
    def test_a_bug_fails_its_probe_and_no_other(self, bug, name):
        found = failed(runner.run(NAMES, command=child(bug), limit_s=120))
        self.assertEqual(set(found), {name})
        self.assertRegex(found[name][0], r"cells are wrong, first \[\d+, \d+\]: .* instead of")

    @parameterized.parameters(
        ("hang", "did not end within 15 s: killed"),
        ("crash", "the process died of SIGABRT"),
        ("error", r"RuntimeError \(selftest_child.py:\d+\): CUDA_ERROR_ILLEGAL_ADDRESS"),
    )
    def test_hang_crash_and_error_are_failures_of_their_part(self, bug, text):
        found = runner.run(["depth", "low-rank", "codes"], command=child(bug), limit_s=15)
        self.assertEqual([part["part"] for part in found], ["depth", "low-rank", "codes"])
        self.assertEqual(set(failed(found)), {"low-rank"})
        self.assertRegex(failed(found)["low-rank"][0], text)

    @parameterized.parameters("stuck", "stuck and crash")
    def test_a_wait_that_ends_is_named(self, bug):
        """First of the failures of its part, whatever becomes of the process."""
        found = runner.run(["low-rank", "codes"], command=child(bug), limit_s=60)
        self.assertEqual(set(failed(found)), {"low-rank"})
        self.assertEqual(
            failed(found)["low-rank"][:2],
            ["sm90_gemm_v2: role load waits for barrier main empty, stage 3, parity 1 (CTA 7, "
             "warp 0)",
             "sm90_gemm_v2: role compute waits for barrier main full, stage 2, parity 0: 2 more"],
        )  # fmt: skip
        self.assertRegex(failed(found)["low-rank"][2], "CUDA_ERROR_LAUNCH_FAILED|SIGABRT")

    def test_a_wait_that_came_to_its_end_is_a_fact(self):
        (found,) = runner.run(["low-rank"], command=child("slow"), limit_s=60)
        self.assertEqual(found["failures"], [])
        self.assertLen(found["facts"]["slow_waits"], 2)

    def test_checked_kernels_are_asked_for(self):
        show = "import os; print(os.environ.get('JAX_W4A4_CHECKED')); 1/0"
        clean = {k: v for k, v in os.environ.items() if k != _ffi.ENV_CHECKED}
        with mock.patch.dict(os.environ, clean, clear=True):
            for checked, text in ((False, "None"), (True, "1")):
                (part,) = runner.run(["a"], command=(sys.executable, "-c", show), checked=checked)
                self.assertStartsWith(part["log"], text)

    def test_a_stopped_command_leaves_no_process(self):
        """What hangs on a GPU would keep it busy for ever."""
        with tempfile.TemporaryDirectory() as folder:
            told = pathlib.Path(folder, "pid")
            hang = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); " \
                   "time.sleep(60)"  # fmt: skip
            run = "import sys; from jax_w4a4.selftest import runner; runner.main(" \
                  f"['--part', 'store'], command=(sys.executable, '-c', {hang!r}))"  # fmt: skip
            with subprocess.Popen([sys.executable, "-c", run]) as command:
                while not (told.exists() and told.read_text()):
                    time.sleep(0.05)
                command.terminate()
                self.assertEqual(command.wait(30), 128 + signal.SIGTERM)
            with self.assertRaises(ProcessLookupError):
                os.kill(int(told.read_text()), 0)

    def test_a_process_that_cannot_start(self):
        found = runner.run(
            ["preflight", "store"], command=(sys.executable, "-c", "1/0"), limit_s=30
        )
        self.assertIn("exit status 1", failed(found)["preflight"][0])
        self.assertEqual(failed(found)["store"], ["not run: preflight failed"])
        self.assertIn("ZeroDivisionError", found[0]["log"])

    @parameterized.parameters((3, []), (0, ["no kernel ran: the reference stood in for it"]))
    def test_a_kernel_has_to_run(self, calls, failures):
        """A plan without a kernel would be served by the reference."""
        count = itertools.count(0, calls) if calls else itertools.repeat(0)
        session = parts.Session(plan.targets.get("sm_90"))
        part = {"one": lambda session: parts.Outcome(checks=1)}
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(parts.PARTS, part),
            mock.patch.object(parts._ffi, "counters", lambda: {"calls": next(count)}),
        ):
            out = pathlib.Path(folder, "lines")
            parts.run_parts(["one"], out, lambda: session)
            line = json.loads(out.read_text().splitlines()[-1])
        self.assertEqual((line["failures"], line["kernel_calls"]), (failures, calls))

    def test_two_hangs_are_enough(self):
        sleep = (sys.executable, "-c", "import time; time.sleep(60)")
        found = failed(runner.run(["a", "b", "c"], command=sleep, limit_s=0.3))
        self.assertEqual(found["c"], ["not run: 2 parts had to be killed"])


class VariantTest(parameterized.TestCase):
    """What is run on a GPU: every kernel of its build, with plans that the kernels can honour."""

    @parameterized.product(target=("sm_90", "sm_100", "sm_103"), kind=probes.KINDS)
    def test_plans_have_kernels(self, target, kind):
        session = parts.Session(plan.targets.get(target))
        cc = session.target.cc
        built = frozenset(
            name for name, design in plan.budget.DESIGNS.items()
            # The self-test has no grouped calls: their kernel is made of the roles of sm90_v2.
            if design.implemented and cc in design.ccs and not design.grouped
        )  # fmt: skip
        with (
            mock.patch.object(parts._ffi, "KERNELS", built),
            mock.patch.dict(os.environ, {record.ENV_ALLOW: "1"}),
        ):
            found = list(session.variants(kind))
            self.assertNotEmpty(session.smallest(kind, 1))
            for variant, rank in itertools.product(found, (0, 32, 128)):
                m = 64 if variant.few else 300
                problem = session.problem(kind, m, 600, 1152, 1152, rank)
                self.assertTrue(session.takes(variant, problem), variant)
                solved = session.plan(variant, problem)
                self.assertIsNone(primitives._missing_kernel(solved, cc))
                self.assertEqual(solved.kernel, variant.kernel)
        names = {variant.kernel for variant in found}
        pairs = {variant.kernel for variant in found if variant.cluster == 2}
        if target == "sm_90":
            path = plan.budget.v2_path(session.problem(kind, 8, 8, 256, 256, 0)).name
            few = {"sm90_decode"} if path in plan.budget.DECODE_PATHS else set()
            self.assertEqual(names, built - {"sm90_decode", "sm90_grouped"} | few)
            self.assertLessEqual({"sm90_v2"}, pairs)
        elif kind.format == "int4":
            self.assertEqual(names, {"sm100_v1"})
        else:
            self.assertEqual(names, built)
            self.assertEqual(pairs, {"sm100_v2"})

    @parameterized.product(kind=probes.KINDS, cluster=(1, 2))
    def test_every_division_of_128_tokens(self, kind, cluster):
        """The kernels whose warpgroups divide K, and those in which each has all of it."""
        session = parts.Session(plan.targets.get("sm_90"))
        variant = parts.Variant("sm90_decode", cluster=cluster)
        found = set()
        for m, n, k, rank in parts.EXACT_FEW:
            k = formats.padded_k(k, kind.block)
            problem = session.problem(kind, m, n, k, k, rank)
            if m > 64 and session.takes(variant, problem):
                found.add(plan.budget.decode_shape(128, session.plan(variant, problem).tile_n)[:2])
        able = str(kind) in ("nvfp4", "nvfp4 fastest", "mxfp4", "int4 block row")
        self.assertEqual(found, {(64, 2), (128, 1)} if able else set())

    @parameterized.parameters(*probes.KINDS)
    def test_low_rank_down_in_the_gemm_s_launch(self, kind):
        """Wherever there is a kernel for it: from x against the reference, and repeated."""
        session = parts.Session(plan.targets.get("sm_90"))
        found = []

        def solve(problem, target, **forced):
            solved = plan.solve(problem, target, **forced)
            if "kernel" not in forced:  # or it is asked for only, and nobody launches it
                found.append(solved)
            return solved

        def ahead(run):
            found.clear()
            with (
                mock.patch.object(parts, "plan", mock.Mock(wraps=plan, solve=solve)),
                mock.patch.object(parts, "KINDS", (kind,)),
            ):
                run()
            return [p.problem.m for p in found if p.quantizer.down and p.quantizer.down.ahead]

        def from_x():
            for m, k, rank in parts.QUANTIZER:
                parts._whole(session, kind, m, 264, k, rank)

        able = str(kind) in ("nvfp4", "nvfp4 fastest", "mxfp4", "int4 block row")
        rows = [33, 97] * able + [205] * (able and kind.format != "int4")
        self.assertEqual(ahead(from_x), rows)
        self.assertEqual(ahead(lambda: parts._loops(session)), rows)


class CommandTest(parameterized.TestCase):
    """Exit statuses, the report, the record."""

    def setUp(self):
        self.folder = self.enter_context(tempfile.TemporaryDirectory())
        self.enter_context(mock.patch.dict(os.environ, {record.ENV_CACHE: self.folder}))

    def command(self, *args):
        return subprocess.run(
            [sys.executable, "-m", "jax_w4a4", "selftest", *args], capture_output=True, text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            cwd=pathlib.Path(jax_w4a4.__file__).parents[1],
        )  # fmt: skip

    def test_without_a_gpu(self):
        done = self.command()
        self.assertEqual(done.returncode, runner.NOTHING_TO_TEST, done.stderr)
        self.assertRegex(done.stdout, "Nothing to test: (this installation has no|JAX has no) CUDA")
        self.assertEqual(os.listdir(self.folder), [])

    def test_list_and_bad_arguments(self):
        done = self.command("--list")
        self.assertEqual([line.split()[0] for line in done.stdout.splitlines()], list(parts.PARTS))
        done = self.command("--part", "nonsense")
        self.assertEqual(done.returncode, 2)
        self.assertIn("no part nonsense; --list prints them", done.stderr)
        self.assertEqual(self.command("--limit", "0").returncode, 2)

    def test_a_report_that_cannot_be_written(self):
        """Known before the parts run, not after."""
        for path in (self.folder, os.path.join(self.folder, "none", "report.json")):
            with mock.patch.object(runner, "run") as run, self.assertRaises(SystemExit) as stop:
                runner.main(["--json", path])
            self.assertEqual(stop.exception.code, 2)
            run.assert_not_called()

    def test_checked_kernels_that_are_not_there(self):
        """They are never replaced by others."""
        if _ffi.has_checked():
            self.skipTest("they are there")
        done = self.command("--checked")
        self.assertEqual(done.returncode, runner.NOTHING_TO_TEST, done.stderr)
        self.assertIn("build it with -C cmake.define.JAX_W4A4_CHECKED=ON", done.stdout)
        done = subprocess.run(
            [sys.executable, "-c", "import jax_w4a4"], capture_output=True, text=True,
            env={**os.environ, _ffi.ENV_CHECKED: "1"},
        )  # fmt: skip
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("ImportError: jax_w4a4: JAX_W4A4_CHECKED=1, but this inst", done.stderr)

    def run_main(self, results, *args):
        path = os.path.join(self.folder, "report.json")

        def fake(names, *, command, limit_s, checked, tell):
            found = [{"part": name, "seconds": 1.0, "checks": 1, "failures": results.get(name, []),
                      "more_failures": 0, "facts": FACTS if name == "preflight" else {}}
                     for name in names]  # fmt: skip
            for part in found:
                tell(part)
            return found

        with mock.patch.object(runner, "run", fake), mock.patch("builtins.print"):
            status = runner.main(["--json", path, *args])
        return status, json.loads(pathlib.Path(path).read_text())

    def test_a_full_run_is_recorded_and_a_failing_one_takes_it_back(self):
        found = record.Identity(*IDENTITY)
        self.assertFalse(record.passed(found))
        status, report = self.run_main({})
        self.assertEqual((status, report["passed"]), (0, True))
        self.assertTrue(record.passed(found))
        self.assertFalse(record.passed(dataclasses.replace(found, driver="580.1")))
        self.assertFalse(record.passed(dataclasses.replace(found, extension="other")))
        status, report = self.run_main({"ring": ["wrong"]})
        self.assertEqual((status, report["passed"]), (1, False))
        self.assertFalse(record.passed(found))

    def test_a_checked_run_is_no_record(self):
        with mock.patch.object(_ffi, "has_checked", lambda: True):
            status, report = self.run_main({}, "--checked")
        self.assertEqual((status, report["checked"]), (0, True))
        self.assertFalse(record.passed(record.Identity(*IDENTITY)))

    def test_some_parts_are_no_record(self):
        self.run_main({}, "--part", "preflight")
        self.assertFalse(record.passed(record.Identity(*IDENTITY)))


IDENTITY = ("NVIDIA B200", "580.95.05", "0123456789abcdef")
FACTS = dict(zip(("gpu", "driver", "extension_sha256"), IDENTITY, strict=True))


class RequireTest(parameterized.TestCase):
    """The gate in front of kernels that were proven without their chip."""

    def setUp(self):
        self.folder = self.enter_context(tempfile.TemporaryDirectory())
        clean = {k: v for k, v in os.environ.items() if k != record.ENV_ALLOW}
        clean[record.ENV_CACHE] = self.folder
        self.enter_context(mock.patch.dict(os.environ, clean, clear=True))
        self.enter_context(mock.patch.object(record, "_proven", set()))
        self.identity = record.Identity(*IDENTITY)
        self.enter_context(mock.patch.object(record, "identity", lambda device: self.identity))

    def test_refuses_without_a_record(self):
        with self.assertRaisesRegex(
            selftest.UnprovenError,
            r"^jax_w4a4\.matmul: kernel sm100_v2 .* no passing self-test .* NVIDIA B200, driver "
            r"580\.95\.05 .*run `python -m jax_w4a4 selftest` .*JAX_W4A4_ALLOW_UNPROVEN=1",
        ):
            selftest.require("sm100_v2")
        self.assertIsInstance(selftest.UnprovenError(), NotImplementedError)

    def test_passes_with_a_record(self):
        record.save(self.identity, {"passed": True})
        selftest.require("sm100_v2")

    @parameterized.parameters('{"passed": true}', "{", "[]", '{"passed": false}', "")
    def test_a_record_that_says_something_else(self, text):
        pathlib.Path(self.folder, self.identity.file_name).write_text(text)
        with self.assertRaises(selftest.UnprovenError):
            selftest.require("sm100_v2")

    def test_allowed_by_the_environment(self):
        os.environ[record.ENV_ALLOW] = "1"
        selftest.require("sm100_v2")
        os.environ[record.ENV_ALLOW] = "0"
        with self.assertRaises(selftest.UnprovenError):
            selftest.require("sm100_v2")

    def test_unknown_driver(self):
        self.identity = "the version of the GPU's driver cannot be read"
        with self.assertRaisesRegex(selftest.UnprovenError, "driver cannot be read"):
            selftest.require("sm100_v2")


class RecordTest(absltest.TestCase):
    def test_folder(self):
        with mock.patch.dict(os.environ, clear=True):
            os.environ["HOME"] = "/home/me"
            self.assertEqual(record.folder(), pathlib.Path("/home/me/.cache/jax_w4a4"))
            os.environ["XDG_CACHE_HOME"] = "relative"
            self.assertEqual(record.folder(), pathlib.Path("/home/me/.cache/jax_w4a4"))
            os.environ["XDG_CACHE_HOME"] = "/cache"
            self.assertEqual(record.folder(), pathlib.Path("/cache/jax_w4a4"))
            os.environ[record.ENV_CACHE] = "/mine"
            self.assertEqual(record.folder(), pathlib.Path("/mine"))

    def test_a_failed_write_leaves_the_old_record(self):
        found = record.Identity(*IDENTITY)
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.dict(os.environ, {record.ENV_CACHE: folder}):
                record.save(found, {"passed": True})
                with mock.patch.object(os, "replace", side_effect=OSError):
                    with self.assertRaises(OSError):
                        record.save(found, {"passed": False})
                self.assertTrue(record.passed(found))
                self.assertLen(os.listdir(folder), 1)

    def test_without_an_extension(self):
        with mock.patch.object(record, "extension_hash", lambda: None):
            self.assertEqual(record.identity(), "this installation has no CUDA kernels")


if __name__ == "__main__":
    absltest.main()
