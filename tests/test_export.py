"""Ahead-of-time artefacts: jax.export round trips, on this platform and for CUDA."""

from __future__ import annotations

import functools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_w4a4 import plan, primitives
from jax_w4a4.matmul import matmul, quantize_activation

N, K = 24, 64


def round_trip(f, *args, **options):
    """Exports, serializes and reads back."""
    return export.deserialize(export.export(f, **options)(*args).serialize())


class ExportTest(parameterized.TestCase):
    """What is read back computes what was exported."""

    def setUp(self):
        super().setUp()
        self.w = cases.weight(N, K)
        self.x = cases.activation(5, 3, K)

    def test_static_shapes(self):
        """The pytree of the weight survives too, static fields included."""
        f = jax.jit(matmul)
        again = round_trip(f, self.x, self.w)
        np.testing.assert_array_equal(again.call(self.x, self.w), f(self.x, self.w))
        with self.assertRaises(ValueError):
            again.call(self.x, self.w.replace(lora_smoothed=True))

    def test_a_file_from_before_a_static_field(self):
        """What it lacks has its default; a prepared weight stays one."""
        w = cases.weight(N, K, "mxfp4")
        blob = bytes(export.export(jax.jit(matmul))(self.x, w).serialize())
        field = b', "sign_order": "linear"'
        self.assertIn(field, blob)
        old = blob.replace(field, b" " * len(field))
        again = export.deserialize(bytearray(old))
        np.testing.assert_array_equal(again.call(self.x, w), jax.jit(matmul)(self.x, w))
        with self.assertRaises(ValueError):
            again.call(self.x, w.prepare())
        prepared = round_trip(jax.jit(matmul), self.x, w.prepare())
        np.testing.assert_array_equal(prepared.call(self.x, w.prepare()), again.call(self.x, w))

    def test_activation_as_result_and_argument(self):
        quantize = round_trip(jax.jit(quantize_activation), self.x, self.w)
        act = quantize.call(self.x, self.w)
        multiply = round_trip(jax.jit(matmul), act, self.w)
        np.testing.assert_array_equal(multiply.call(act, self.w), matmul(self.x, self.w))

    @parameterized.named_parameters(
        ("matmul", matmul),
        ("shared", lambda x, w: matmul(quantize_activation(x, w), w)),
        ("vmap", jax.vmap(matmul, in_axes=(1, None), out_axes=1)),
        ("grad", jax.grad(lambda x, w: jnp.sum(matmul(x, w) ** 2))),
    )
    def test_symbolic_batch(self, f):
        """One artefact serves every batch size; the plan assumes none."""
        (batch,) = export.symbolic_shape("batch")
        f = jax.jit(f)
        again = round_trip(f, jax.ShapeDtypeStruct((batch, 3, K), jnp.float32), self.w)
        for size in (1, 5):
            x = self.x[:size]
            self.assertLess(cases.error(again.call(x, self.w), f(x, self.w)), 1e-6)

    def test_cuda_from_here(self):
        """For CUDA from any machine, if the check for foreign calls is lifted by name."""
        if primitives._cuda_capability() is not None:
            self.skipTest("cross-lowering is for machines without CUDA")
        (batch,) = export.symbolic_shape("batch")
        for rows in (5, batch):
            x = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16)
            f = functools.partial(export.export, jax.jit(matmul), platforms=("cuda",))
            with self.assertRaisesRegex(ValueError, "no compatibility guarantees"):
                f()(x, self.w).serialize()
            made = f(disabled_checks=primitives.DISABLE_JAX_EXPORT_CHECKS)(x, self.w)
            again = export.deserialize(made.serialize())
            self.assertEqual(again.platforms, ("cuda",))
            self.assertIn("@jax_w4a4.matmul.v4", again.mlir_module())
            self.assertIn(f"schema = {plan.planner.SCHEMA} : i64", again.mlir_module())

    def test_checks_name_every_target(self):
        self.assertLen(primitives.DISABLE_JAX_EXPORT_CHECKS, len(primitives.FFI_TARGETS))
        for target in primitives.FFI_TARGETS.values():
            self.assertIsNotNone(re.fullmatch(r"jax_w4a4\.\w+\.v\d+", target))

    @parameterized.parameters("n", "k")
    def test_explicit_mesh(self, dim):
        """Sharded programs over explicit axes are exported with their shardings."""
        if jax.device_count() < 4:
            self.skipTest("needs four devices; JAX_PLATFORMS=cpu has them")
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
        specs = self.w.shard_specs("model", dim)
        with jax.set_mesh(mesh):
            w = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), self.w, specs)
            x = jax.device_put(cases.activation(6, K), NamedSharding(mesh, P("data")))
            again = round_trip(jax.jit(matmul), x, w)
            self.assertEqual(again.nr_devices, 4)
            got = jax.jit(again.call)(x, w)
        self.assertLess(cases.error(got, matmul(cases.activation(6, K), self.w)), 1e-3)


if __name__ == "__main__":
    absltest.main()
