"""What a call becomes when the plan's kernel has a layout of its own: workspace, FFI call,
reference."""

import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import export
from test_primitives import cuda_text, operands

from jax_w4a4 import plan, primitives
from jax_w4a4.matmul import matmul, quantize_activation

M, N, K, RANK = 512, 24, 96, 16


def call_line(text, name):
    return next(line for line in text.splitlines() if f"@jax_w4a4.{name}.v" in line)


def result_types(line):
    return re.findall(r"tensor<(.*?)>", line[line.rindex("-> (") :])


class PrefillLoweringTest(parameterized.TestCase):
    """The plan, and the arrays that carry what one launch leaves for the next."""

    def setUp(self):
        super().setUp()
        if primitives._cuda_capability() is not None:
            self.skipTest("cross-lowering is for machines without CUDA; test_gpu has the rest")
        self.x = cases.activation(M, K, dtype="bfloat16")

    def weight(self, format, **kwargs):
        return cases.weight(N, K, format, rank=RANK, **kwargs)

    def planned(self, line):
        return {k: int(v) for k, v in re.findall(r"(\w+) = (-?\d+) : i64", line)}

    def test_mxfp4(self):
        """One pass over x: no public codes, activations in whole stages of 128 bytes."""
        line = call_line(cuda_text(matmul, self.x, self.weight("mxfp4")), "matmul")
        attrs = self.planned(line)
        self.assertEqual((attrs["kernel"], attrs["q_kernel"]), (3, 2))
        tokens = M + attrs["tile_m"]
        self.assertEqual(
            result_types(line),
            ["512x24xbf16", "0x48xui8", "0x3xf8E8M0FNU", "512x16xbf16", "512x128xui8"]
            + [f"{tokens}xf32", "24x4xf32"],
        )

    @parameterized.parameters(64, 16)
    def test_low_rank_down_in_the_gemms_launch(self, m):
        """sm90_decode with more than 16 rows: sums of LoRA-down are a result of the call too."""
        k = 4096
        x = cases.activation(m, k, dtype="bfloat16")
        w = cases.weight(N, k, "mxfp4", rank=RANK)
        line = call_line(cuda_text(matmul, x, w), "matmul")
        attrs = self.planned(line)
        self.assertEqual((attrs["kernel"], attrs["q_kernel"]), (4, 5))
        self.assertEqual(attrs["down_ahead"], 4 if m > 16 else 0)
        sums = [f"{3 * m}x{RANK}xf32"] if m > 16 else []
        types = result_types(line)
        self.assertEqual(types[:5] + types[7:], [
            f"{m}x{N}xbf16", "0x2048xui8", "0x128xf8E8M0FNU", f"{m}x{RANK}xbf16", f"{m}x4096xui8",
            *sums,
        ])  # fmt: skip

    def test_kernel_by_name(self):
        """The simple kernel stays selectable where the planner would not take it."""
        for quantized in (False, True):

            def call(x, w, quantized=quantized):
                if quantized:
                    x = quantize_activation(x, w, implementation="sm90_v1")
                return matmul(x, w, implementation="sm90_v1")

            text = cuda_text(call, self.x, self.weight("mxfp4"))
            line = call_line(text, "gemm" if quantized else "matmul")
            self.assertEqual(self.planned(line)["kernel"], 1)
        with self.assertRaisesRegex(NotImplementedError, "sm90_v2 cannot take this problem"):
            matmul(
                self.x,
                self.weight("int4", block_size=32),
                implementation="sm90_v2",
                precision="highest",
            )

    def test_nvfp4(self):
        """bf16 in whole stages, without public codes or token scales."""
        line = call_line(cuda_text(matmul, self.x, self.weight("nvfp4")), "matmul")
        attrs = self.planned(line)
        self.assertEqual((attrs["kernel"], attrs["q_kernel"]), (3, 2))
        self.assertEqual(
            result_types(line),
            ["512x24xbf16", "0x48xui8", "0x6xf8E4M3FN", "512x16xbf16", "512x256xui8"]
            + ["0xf32", "24x4xf32"],
        )

    def test_shared_activation(self):
        """The public layout from the plain quantizer, converted in front of each gemm."""
        text = cuda_text(
            lambda x, w: matmul(quantize_activation(x, w), w), self.x, self.weight("mxfp4")
        )
        self.assertEqual(self.planned(call_line(text, "quantize"))["kernel"], 1)
        line = call_line(text, "gemm")
        attrs = self.planned(line)
        self.assertEqual(attrs["kernel"], 3)
        self.assertEqual(
            result_types(line),
            ["512x24xbf16", "512x128xui8", f"{M + attrs['tile_m']}xf32", "24x4xf32"],
        )

    @parameterized.parameters(
        ({"x_dtype": "float32"}, 1),  # a float32 result
        ({"lora_dtype": "float16"}, 1),
        ({"lora_smoothed": True}, 3),
        ({"k": 92}, 3),
    )
    def test_what_the_weight_decides(self, changes, kernel):
        """Facts that only the call knows reach the planner."""
        changes = dict(changes)
        x = cases.activation(M, changes.get("k", K), dtype=changes.pop("x_dtype", "bfloat16"))
        w = cases.weight(N, changes.pop("k", K), "mxfp4", rank=RANK, **changes)
        attrs = self.planned(call_line(cuda_text(matmul, x, w), "matmul"))
        self.assertEqual((attrs["kernel"], attrs["q_kernel"]), (kernel, 1))

    def test_symbolic_rows(self):
        """The workspace grows with the batch of an exported program."""
        (batch,) = export.symbolic_shape("batch")
        x = jax.ShapeDtypeStruct((batch, K), jnp.bfloat16)
        made = export.export(
            jax.jit(matmul),
            platforms=("cuda",),
            disabled_checks=primitives.DISABLE_JAX_EXPORT_CHECKS,
        )(x, self.weight("mxfp4"))
        line = call_line(made.mlir_module(), "matmul")
        self.assertEqual(self.planned(line)["kernel"], 3)
        self.assertEqual(result_types(line)[0], "?x24xbf16")

    def test_partitioned_rows(self):
        """Workspace inside a shard_map: per device, and marked like x."""
        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
        spec = jax.sharding.PartitionSpec("i", None)
        with jax.set_mesh(mesh):
            x = jax.device_put(cases.activation(4 * M, K, dtype="bfloat16"), spec)
            text = cuda_text(matmul, x, self.weight("mxfp4"))
        self.assertEqual(result_types(call_line(text, "matmul"))[0], "512x24xbf16")


class ReferenceTest(parameterized.TestCase):
    """On other platforms the reference stands in for the kernel; the workspace holds nothing."""

    @parameterized.product(format=("mxfp4", "nvfp4"), jit=(True, False))
    def test_same_product(self, format, jit):
        x = cases.activation(M, K, dtype="bfloat16")
        w = cases.weight(N, K, format, rank=RANK)
        spec = w.spec("bfloat16")
        problem = primitives._problem(spec, M, N, RANK, "bfloat16")
        found = plan.solve(problem, "sm_90")
        self.assertEqual(found.kernel, "sm90_v2")

        def call(*ops, plan):
            return primitives.matmul_p.bind(*ops, spec=spec, plan=plan, implementation=None)

        run = jax.jit(call, static_argnames="plan") if jit else call
        got = run(x, *operands(w, x)[1:], plan=found)
        want = run(x, *operands(w, x)[1:], plan=None)
        np.testing.assert_array_equal(got[0], want[0])
        self.assertLen(got, 7)
        for array, buffer in zip(got[1:], found.workspace(M, "matmul"), strict=True):
            self.assertEqual((array.shape, array.dtype.name), (buffer.shape, buffer.dtype))

    @parameterized.parameters(True, False)
    def test_same_product_with_low_rank_down_in_the_gemms_launch(self, jit):
        m, k = 33, 4096
        x = cases.activation(m, k, dtype="bfloat16")
        w = cases.weight(N, k, "mxfp4", rank=RANK)
        spec = w.spec("bfloat16")
        found = plan.solve(primitives._problem(spec, m, N, RANK, "bfloat16"), "sm_90")
        self.assertEqual(found.ffi_attrs()["down_ahead"], 4)

        def call(*ops, plan):
            return primitives.matmul_p.bind(*ops, spec=spec, plan=plan, implementation=None)

        run = jax.jit(call, static_argnames="plan") if jit else call
        got = run(x, *operands(w, x)[1:], plan=found)
        np.testing.assert_array_equal(got[0], run(x, *operands(w, x)[1:], plan=None)[0])
        self.assertEqual(got[-1].shape, (3 * m, RANK))
        for array, buffer in zip(got[1:], found.workspace(m, "matmul"), strict=True):
            self.assertEqual((array.shape, array.dtype.name), (buffer.shape, buffer.dtype))


if __name__ == "__main__":
    absltest.main()
