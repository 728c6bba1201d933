"""The command line: what it prints, and exit status 2 without a traceback for bad arguments."""

import contextlib
import io
import json
import os
import subprocess
import sys
import types
from unittest import mock

from absl.testing import absltest, parameterized

from jax_w4a4 import __main__ as cli
from jax_w4a4.explain import explain


def run(*argv):
    """(exit status, stdout, stderr) of one command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(argv)
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


class ExplainTest(parameterized.TestCase):
    """`explain` on the command line is `explain` in Python."""

    def test_the_documented_command(self):
        status, out, _ = run(
            *"explain 4352 3840 3072 --rank 128 --format nvfp4 --target sm_100".split()
        )
        self.assertEqual(status, 0)
        expected = explain((4352, 3840, 3072), rank=128, format="nvfp4", target="sm_100")
        self.assertEqual(out, f"{expected}\n")

    def test_options(self):
        status, out, _ = run(
            *"explain 64 150 96 --format int4 --block-size row --dtype float16".split(),
            *"--out-dtype float32 --target sm_90 --tile-m 32".split(),
        )
        self.assertEqual(status, 0)
        self.assertIn(
            "64 x 150 x 96 (M x K x N), K padded to 160 in all figures, int4 whole-row scales", out
        )
        self.assertIn("float16 -> float32", out)
        self.assertIn("tile 32x128", out)

    @parameterized.parameters(("mxfp4", True), ("nvfp4", False))
    def test_prepared(self, format, differs):
        """As of `Weight.prepare()`, which leaves other formats as they are."""
        command = f"explain 1 4096 4096 --target sm_90 --format {format}".split()
        linear, prepared = (run(*command, *extra) for extra in ((), ("--prepared",)))
        self.assertEqual((linear[0], prepared[0]), (0, 0))
        self.assertEqual("bfloat16, prepared\n" in prepared[1], differs)
        self.assertEqual("signs sorted" in prepared[1], differs)
        self.assertEqual(linear[1] != prepared[1], differs)

    def test_json(self):
        status, out, _ = run(*"explain 300 128 96 --target sm_90 --json".split())
        self.assertEqual(status, 0)
        self.assertEqual(json.loads(out)["calls"][0]["plan"]["kernel"], "sm90_v2")

    def test_published_account_of_a_shape(self):
        command = "explain 4352 3840 3072 --rank 128 --accounting svdquant-v2 --tile-m 256"
        for extra, stages in ((), "main 4"), (("--unhalved", "lora_up"), "main 2"):
            status, out, _ = run(*command.split(), "--tile-n", "128", "--lora-stages", "2", *extra)
            self.assertEqual(status, 0)
            self.assertIn(f"stages: {stages}, LoRA 2", out)

    def test_published_table(self):
        """The table that docs/plans.md prints."""
        status, out, _ = run("explain", "--accounting", "svdquant-v2")
        self.assertEqual(status, 0)
        cells = {
            line.split(" on ")[0]: line.split()[4:] for line in out.splitlines() if "CTA " in line
        }
        self.assertEqual(cells["256x128"], ["6/4", "7/2", "4/2", "5/4", "-", "4/2"])
        self.assertEqual(cells["256x256"], ["4/5", "5/2", "2/2", "3/5", "-", "2/2"])
        self.assertEqual(cells["128x128"], ["4/6", "5/3", "2/3", "4/2", "-", "2/3"])
        self.assertEqual(cells["128x256"], ["2/8", "3/4", "-", "2/2", "-", "-"])
        sweep = [line.split()[1] for line in out.splitlines()[-5:]]
        self.assertEqual(sweep, ["7/3", "5/4", "4/2", "2/3", "-"])

    def test_published_table_as_json(self):
        """The same cells as the text."""
        status, out, _ = run(*"explain --accounting svdquant-v2 --json".split())
        self.assertEqual(status, 0)
        found = json.loads(out)
        self.assertEqual(found["target"], "sm_100")
        self.assertLen(found["stages"], 4 * 3 * 2)
        sweep = [(c["main"], c["store"]) for c in found["lora_stage_sweep"]]
        self.assertEqual(sweep, [(7, 3), (5, 4), (4, 2), (2, 3), (None, None)])
        self.assertEqual(
            f"{cli.stage_table(found)}\n", run("explain", "--accounting", "svdquant-v2")[1]
        )

    def test_published_table_with_the_bug(self):
        _, out, _ = run(*"explain --accounting svdquant-v2 --unhalved lora_up".split())
        self.assertNotIn("lora_up", out.splitlines()[1])
        sweep = [line.split()[1] for line in out.splitlines()[-5:]]
        self.assertEqual(sweep, ["7/3", "5/2", "2/5", "-", "-"])

    @parameterized.parameters(
        ("explain 64 128", "three sizes M K N, got 2"),
        ("explain", "three sizes M K N, got 0"),
        ("explain a b c", "invalid int value: 'a'"),
        ("explain 64 128 0 --target sm_90", "three positive integers"),
        ("explain 64 128 96 --target volta", "unknown target 'volta'"),
        ("explain 64 128 96 --target sm_120", "no kernel design for sm_120"),
        ("explain 64 128 96 --format fp8", "invalid choice: 'fp8'"),
        ("explain 64 128 96 --block-size x", "invalid"),
        ("explain 64 128 96 --block-size 24 --target sm_90", "nvfp4 has a block size of 16"),
        ("explain 64 128 96 --rank -1 --target sm_90", "Problem.rank is -1"),
        (
            "explain 64 128 96 --dtype int8 --target sm_90",
            "explain: dtype is int8; expected float32",
        ),
        ("explain 64 128 96 --out-dtype float64 --target sm_90", "out_dtype is float64; expected"),
        ("explain 64 128 96 --target sm_90 --tile-m 48", "no tile with tile_m=48"),
        ("explain 128 128 96 --rank 8 --target sm_90 --main-stages 3", "at most 2"),
        ("explain 64 128 96 --unhalved lora_upp", "invalid choice: 'lora_upp'"),
        ("explode", "invalid choice: 'explode'"),
        ("", "required: command"),
    )
    def test_bad_arguments(self, command, message):
        status, out, err = run(*command.split())
        self.assertEqual((status, out), (2, ""))
        self.assertIn(message, err)
        self.assertNotIn("Traceback", err)

    def test_bad_environment(self):
        with mock.patch.dict(os.environ, {"JAX_W4A4_TARGET": "volta"}):
            status, _, err = run("explain", "64", "128", "96")
        if status == 0:
            self.skipTest("a CUDA device decides")
        self.assertEqual(status, 2)
        self.assertIn("unknown target 'volta'", err)


class OtherCommandsTest(parameterized.TestCase):
    """`info` and `demo`."""

    def test_info(self):
        status, out, _ = run("info")
        self.assertEqual(status, 0)
        found = json.loads(out)
        self.assertEqual(found["python"], sys.version.split()[0])
        self.assertIn("jax", found)
        self.assertIsInstance(found["build"]["kernels"], list)
        self.assertIn("name", found["target"])

    @parameterized.parameters((None, 0), (0, 0), (3, 3))
    def test_demo_gets_its_own_arguments(self, returned, status):
        fake = types.ModuleType("jax_w4a4.demo")
        fake.main = mock.Mock(return_value=returned)
        with (
            mock.patch.dict(sys.modules, {"jax_w4a4.demo": fake}),
            mock.patch("jax_w4a4.demo", fake, create=True),
        ):
            self.assertEqual(run("demo", "--format", "int4", "--help")[0], status)
        fake.main.assert_called_once_with(["--format", "int4", "--help"])

    def test_reader_that_leaves(self):
        """`... | head -1` ends quietly."""
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "jax_w4a4", "explain", "64", "128", "96", "--target", "sm_90"],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write)
        self.assertEqual((done.returncode, done.stderr), (1, ""))

    def test_python_dash_m(self):
        done = subprocess.run(
            [sys.executable, "-m", "jax_w4a4", "explain", "64", "128", "96", "--target", "sm_99"],
            capture_output=True,
            text=True,
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn("no kernel plan for target 'sm_99'", done.stderr)


if __name__ == "__main__":
    absltest.main()
