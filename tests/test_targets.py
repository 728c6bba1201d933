"""The target table and the choice of the current target."""

import dataclasses
import pathlib
import subprocess
import sys
import types
from unittest import mock

from absl.testing import absltest, parameterized

from jax_w4a4.plan import targets


class TableTest(parameterized.TestCase):
    """The figures the planner and the roofline stand on."""

    @parameterized.parameters(
        ("sm_90", 90, 232448, 132, 0),
        ("sm_100", 100, 232448, 148, 512),
        ("sm_103", 103, 232448, 148, 512),
        ("sm_120", 120, 101376, 188, 0),
    )
    def test_limits(self, name, cc, smem, sms, columns):
        """Shared memory, SMs and TMEM of each architecture."""
        target = targets.get(name)
        self.assertEqual(
            (target.cc, target.smem_bytes, target.sm_count, target.tmem_columns),
            (cc, smem, sms, columns),
        )
        # A block's opt-in limit is the SM's memory less the 1 KiB the driver reserves.
        self.assertEqual(target.smem_per_sm - target.smem_bytes, 1024)

    @parameterized.parameters(*targets.TARGETS)
    def test_every_figure_names_a_source(self, name):
        """No number without provenance."""
        target = targets.get(name)
        figures = {
            field.name
            for field in dataclasses.fields(target)
            if field.name.startswith(("peak_", "hbm", "l2", "sm_count", "smem_bytes"))
        }
        self.assertEqual(figures - {field for field, _ in target.sources}, set())
        self.assertTrue(all(source for _, source in target.sources))

    def test_halving_belongs_to_the_target(self):
        """A Blackwell pair halves M- and N-split objects but not the weight's scales; a Hopper
        cluster halves nothing."""
        for name in ("sm_100", "sm_103"):
            halved = targets.get(name).halved
            for each in ("activation", "activation_scale", "lora_act", "weight", "lora_up"):
                self.assertIn(each, halved)
            for each in ("weight_scale", "store", "aux", "barriers"):
                self.assertNotIn(each, halved)
        hopper = targets.get("sm_90")
        self.assertEqual(hopper.halved, frozenset())
        self.assertIn("activation", hopper.multicast)
        self.assertNotIn("weight", hopper.multicast)

    def test_unknown_resident_object_is_refused(self):
        """A misspelt object in a halving rule would silently halve nothing."""
        with self.assertRaisesRegex(ValueError, "lora_updown"):
            dataclasses.replace(targets.get("sm_100"), halved=frozenset({"lora_updown"}))


class GetTest(parameterized.TestCase):
    """Names that people and drivers use for an architecture."""

    @parameterized.parameters("sm_100", "SM_100", "100", "10.0", "sm_100a", "sm100", " sm_100f ")
    def test_spellings(self, name):
        self.assertEqual(targets.get(name).name, "sm_100")

    def test_target_passes_through(self):
        target = dataclasses.replace(targets.get("sm_90"), sm_count=78)
        self.assertIs(targets.get(target), target)

    @parameterized.parameters("sm_89", "8.6", "110")
    def test_known_chip_without_plan_names_the_way_out(self, name):
        with self.assertRaisesRegex(NotImplementedError, "implementation='xla'"):
            targets.get(name)

    @parameterized.parameters("hopper", "", "gfx942", "sm_")
    def test_nonsense(self, name):
        with self.assertRaisesRegex(ValueError, "jax_w4a4.plan: unknown target.*sm_103"):
            targets.get(name)

    def test_wrong_type(self):
        with self.assertRaisesRegex(TypeError, "got int"):
            targets.get(90)


def _fake_jax(platforms, devices):
    """A stand-in for the jax module with the given platform restriction and CUDA devices."""

    def local_devices(backend=None):
        if devices is None:
            raise RuntimeError(f"Unknown backend {backend}")
        return devices

    return types.SimpleNamespace(
        config=types.SimpleNamespace(jax_platforms=platforms), local_devices=local_devices
    )


class CurrentTest(parameterized.TestCase):
    """Device first, then the environment, then sm_90; and no backend is started for nothing."""

    def current(self, jax, env=None):
        env = {} if env is None else {targets.ENV_TARGET: env}
        with (
            mock.patch.dict(sys.modules, {"jax": jax}),
            mock.patch.dict("os.environ", env),
        ):
            if not env:
                targets.os.environ.pop(targets.ENV_TARGET, None)
            return targets.current()

    def test_device_wins_over_environment(self):
        device = types.SimpleNamespace(compute_capability="10.0", core_count=148)
        self.assertIs(self.current(_fake_jax(None, [device]), "sm_90"), targets.get("sm_100"))

    def test_sm_count_of_the_device(self):
        """An H20 is an sm_90 with 78 SMs: waves must be counted with the real figure."""
        device = types.SimpleNamespace(compute_capability="9.0", core_count=78)
        target = self.current(_fake_jax("cuda", [device]))
        self.assertEqual((target.name, target.sm_count), ("sm_90", 78))

    def test_unplanned_device(self):
        device = types.SimpleNamespace(compute_capability="8.9")
        with self.assertRaises(NotImplementedError):
            self.current(_fake_jax(None, [device]))

    @parameterized.parameters(None, "cpu")
    def test_without_device(self, platforms):
        jax = _fake_jax(platforms, None)
        self.assertEqual(self.current(jax).name, "sm_90")
        self.assertEqual(self.current(jax, "sm_103").name, "sm_103")
        with self.assertRaisesRegex(ValueError, "sm_9000"):
            self.current(jax, "sm_9000")

    def test_restricted_platforms_start_no_backend(self):
        jax = _fake_jax("cpu,tpu", None)
        jax.local_devices = mock.Mock(side_effect=AssertionError("backend started"))
        self.assertEqual(self.current(jax).name, "sm_90")

    def test_without_jax(self):
        self.assertEqual(self.current(None, "sm_120").name, "sm_120")

    def test_plan_package_needs_no_jax(self):
        """Plans can be made where JAX is not installed at all."""
        package = pathlib.Path(targets.__file__).parents[1]
        code = (
            "import sys, types\n"
            "sys.modules['jax'] = sys.modules['jaxlib'] = sys.modules['numpy'] = None\n"
            "parent = types.ModuleType('jax_w4a4'); parent.__path__ = [sys.argv[1]]\n"
            "sys.modules['jax_w4a4'] = parent\n"
            "from jax_w4a4 import plan\n"
            "p = plan.Problem(64, 128, 64, 16, 'nvfp4', 16, *['bfloat16'] * 3, 'float8_e4m3fn')\n"
            "print(plan.solve(p, plan.targets.current()).kernel)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(package)],
            capture_output=True,
            text=True,
            env={},
            check=True,
        )
        self.assertEqual(done.stdout.strip(), "sm90_decode")


if __name__ == "__main__":
    absltest.main()
