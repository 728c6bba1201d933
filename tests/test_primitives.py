"""The primitives: shapes, lowering decisions, and the FFI call that a CUDA program contains."""

from __future__ import annotations

import functools
import re
import warnings
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from jax_w4a4 import _ffi, plan, primitives, reference
from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.primitives import FallbackWarning, choose_lowering, gemm_p, matmul_p, quantize_p

N, K, RANK = 24, 96, 8


def operands(w, x):
    """Operands of matmul_p: those of reference.matmul_ref, and the range of the scales."""
    vector = lambda v: jnp.zeros((0,), jnp.float32) if v is None else v.reshape(-1)  # noqa: E731
    return [
        x,
        vector(w.smooth),
        vector(w.act_global_scale),
        w.lora_down,
        w.packed,
        w.scales,
        vector(w.global_scale),
        w.lora_up,
        vector(w.channel_scale),
        vector(w.bias),
        jnp.zeros((0, 2), jnp.uint8) if w.scale_range is None else w.scale_range,
    ]


def cuda_text(f, *args, platforms=("cuda",)):
    """StableHLO of a program lowered for CUDA, whatever this machine has."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=platforms).as_text()


def ffi_calls(text):
    return re.findall(r"custom_call @(jax_w4a4\.[a-z]+\.v[34])", text)


class ChooseLoweringTest(parameterized.TestCase):
    """The whole table of decisions, as a pure function."""

    @parameterized.product(
        platform=("cuda", "cpu", "tpu"),
        implementation=(None, "cuda", "xla"),
        backend=(False, True),
        build=(False, True),
        missing=(None, "no such kernel"),
    )
    def test_table(self, platform, implementation, backend, build, missing):
        ask = functools.partial(
            choose_lowering,
            platform,
            implementation,
            has_cuda_backend=backend,
            has_cuda_build=build,
            missing=missing,
        )
        if implementation == "xla":
            self.assertEqual(ask(), ("reference", None))
        elif platform != "cuda":
            if implementation is None:
                self.assertEqual(ask(), ("reference", None))
            else:
                with self.assertRaisesRegex(NotImplementedError, f"platform '{platform}'.*'xla'"):
                    ask()
        elif missing is None and (build or not backend):
            # Without a CUDA device the program is for another machine, whose build is unknown.
            self.assertEqual(ask(), ("kernel", None))
        else:
            why = missing or "built without CUDA kernels; rebuild .*pip install"
            if implementation == "cuda":
                with self.assertRaisesRegex(NotImplementedError, why):
                    ask()
            else:
                chosen, reason = ask()
                self.assertEqual(chosen, "reference")
                self.assertRegex(reason, why)

    def test_names_the_public_function(self):
        with self.assertRaisesRegex(NotImplementedError, "^jax_w4a4.quantize_activation: "):
            choose_lowering(
                "cpu",
                "cuda",
                has_cuda_backend=False,
                has_cuda_build=False,
                missing=None,
                who="quantize_activation",
            )


class MissingKernelTest(parameterized.TestCase):
    """What is known against launching a plan here."""

    def setUp(self):
        super().setUp()
        problem = plan.Problem(
            64, N, K, RANK, "nvfp4", 16, "bfloat16", "bfloat16", "bfloat16", "float8_e4m3fn"
        )
        self.sm90 = plan.solve(problem, "sm_90")
        self.sm100 = plan.solve(problem, "sm_100")

    def test_other_architecture(self):
        """A plan made for another GPU than the one that is here."""
        self.assertRegex(primitives._missing_kernel(self.sm90, 120), "sm_90 .*runs on sm_120")

    def test_cross_lowering(self):
        """Nothing is held against a plan for another machine."""
        self.assertIsNone(primitives._missing_kernel(self.sm90, None))

    def test_not_in_build(self):
        with (
            mock.patch.object(_ffi, "has_cuda", return_value=True),
            mock.patch.object(_ffi, "KERNELS", frozenset({"other"})),
        ):
            self.assertRegex(primitives._missing_kernel(self.sm90, 90), "it has: other.*pip")
        with (
            mock.patch.object(_ffi, "has_cuda", return_value=True),
            mock.patch.object(_ffi, "KERNELS", frozenset({"sm90_v1"})),
        ):
            self.assertIsNone(primitives._missing_kernel(self.sm90, 90))

    def test_account_without_kernel(self):
        """A design or a staging that exists on paper only is never emitted."""
        for choice in ({"kernel": "svdquant_v2"}, {"lora_stages": 2}):
            account = plan.solve(self.sm100.problem, "sm_100", **choice)
            self.assertRegex(primitives._missing_kernel(account, None), "account.*no kernel")
        self.assertIsNone(primitives._missing_kernel(self.sm100, None))

    def test_no_machine_code(self):
        """A build for one Blackwell chip has the kernel, and nothing that the other one can run."""
        sm103 = plan.solve(self.sm100.problem, "sm_103")
        info = {"cuda_archs": ("90a", "100a")}
        with (
            mock.patch.object(_ffi, "has_cuda", return_value=True),
            mock.patch.object(_ffi, "KERNELS", frozenset({"sm100_v2"})),
            mock.patch.object(_ffi, "build_info", return_value=info),
            mock.patch.dict("os.environ", JAX_W4A4_ALLOW_UNPROVEN="1"),
        ):
            self.assertRegex(primitives._missing_kernel(sm103, 103), "no machine code for sm_103a")
            self.assertIsNone(primitives._missing_kernel(self.sm100, 100))

    def test_a_kernel_that_never_ran_on_its_chip(self):
        """It asks for a self-test of this machine; a kernel that did run does not."""
        built = mock.patch.object(_ffi, "KERNELS", frozenset({"sm90_v1", "sm100_v2"}))
        with mock.patch.object(_ffi, "has_cuda", return_value=True), built:
            with mock.patch.dict("os.environ", JAX_W4A4_ALLOW_UNPROVEN="0"):
                why = primitives._missing_kernel(self.sm100, 100)
                self.assertRegex(why, "sm100_v2 .*selftest.*ALLOW_UNPROVEN=1.*'xla'")
                self.assertIsNone(primitives._missing_kernel(self.sm90, 90))
            with mock.patch.dict("os.environ", JAX_W4A4_ALLOW_UNPROVEN="1"):
                self.assertIsNone(primitives._missing_kernel(self.sm100, 100))


class AbstractTest(parameterized.TestCase):
    """Result shapes, and typed errors for operands that don't fit."""

    def setUp(self):
        super().setUp()
        self.w = cases.weight(N, K, rank=RANK)
        self.x = cases.activation(5, K)
        self.spec = self.w.spec("bfloat16")
        self.operands = operands(self.w, self.x)

    def bind(self, prim, *ops):
        return jax.eval_shape(
            lambda *o: prim.bind(*o, spec=self.spec, plan=None, implementation=None), *ops
        )

    def test_results(self):
        y, xp, xs, lora_act = self.bind(matmul_p, *self.operands)
        self.assertEqual((y.shape, y.dtype.name), ((5, N), "bfloat16"))
        self.assertEqual((xp.shape, xp.dtype.name), ((5, K // 2), "uint8"))
        self.assertEqual((xs.shape, xs.dtype.name), ((5, K // 16), "float8_e4m3fn"))
        self.assertEqual((lora_act.shape, lora_act.dtype.name), ((5, RANK), "bfloat16"))
        halves = self.bind(quantize_p, *self.operands[:4])
        self.assertEqual([v.shape for v in halves], [xp.shape, xs.shape, lora_act.shape])
        (gemm,) = self.bind(
            gemm_p, halves[0], halves[1], self.operands[2], halves[2], *self.operands[4:]
        )
        self.assertEqual((gemm.shape, gemm.dtype), (y.shape, y.dtype))

    @parameterized.named_parameters(
        ("x_k", 0, (5, K + 1), "float32", ValueError, r"x is float32\[5,97\]; .*\(5, 96\)"),
        ("x_rank", 0, (K,), "float32", ValueError, "two dimensions"),
        ("x_dtype", 0, (5, K), "int32", TypeError, "x is int32"),
        ("smooth", 1, (K - 1,), "float32", ValueError, "smooth"),
        ("smooth_dtype", 1, (K,), "bfloat16", TypeError, "smooth"),
        ("act_global_scale", 2, (2,), "float32", ValueError, "act_global_scale"),
        ("lora_down", 3, (K - 1, RANK), "bfloat16", ValueError, "lora_down"),
        ("packed", 4, (N, K), "uint8", ValueError, "packed"),
        ("packed_dtype", 4, (N, K // 2), "int8", TypeError, "packed"),
        ("scales", 5, (N, K // 32), "float8_e4m3fn", ValueError, "scales"),
        ("scales_dtype", 5, (N, K // 16), "float32", TypeError, "scales"),
        ("lora_up", 7, (N, RANK - 1), "bfloat16", ValueError, "lora_act"),
        ("lora_up_dtype", 7, (N, RANK), "float32", TypeError, "lora_up"),
        ("channel_scale", 8, (N + 1,), "float32", ValueError, "channel_scale"),
        ("bias", 9, (N, 1), "float32", ValueError, "bias"),
        ("scale_range", 10, (N, 1), "uint8", ValueError, "scale_range"),
        ("scale_range_dtype", 10, (N, 2), "int8", TypeError, "scale_range"),
    )
    def test_errors(self, index, shape, dtype, error, message):
        ops = list(self.operands)
        ops[index] = jax.ShapeDtypeStruct(shape, dtype)
        with self.assertRaisesRegex(error, f"^jax_w4a4.matmul: .*{message}"):
            self.bind(matmul_p, *ops)

    def test_eager_and_jit_bind(self):
        """A primitive runs by itself, outside and inside jit, as the reference does."""
        params = {"spec": self.spec, "plan": None, "implementation": "xla"}
        want = jax.jit(reference.matmul_ref, static_argnums=10)(*self.operands[:-1], self.spec)
        eager = matmul_p.bind(*self.operands, **params)
        jitted = jax.jit(lambda *ops: matmul_p.bind(*ops, **params))(*self.operands)
        for a, b, c in zip(want, eager, jitted, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)


class CudaLoweringTest(parameterized.TestCase):
    """A program lowered for CUDA on any machine contains the FFI call and the plan."""

    def setUp(self):
        super().setUp()
        if primitives._cuda_capability() is not None:
            self.skipTest("cross-lowering is for machines without CUDA; test_gpu has the rest")
        self.w = cases.weight(N, K, rank=RANK)
        self.x = cases.activation(5, K)
        primitives._warned.clear()

    def test_matmul_call(self):
        """One call; target, attributes, row-major layouts and dtypes on the wire."""
        text = cuda_text(matmul, self.x, self.w)
        self.assertEqual(ffi_calls(text), ["jax_w4a4.matmul.v4"])
        line = next(line for line in text.splitlines() if "@jax_w4a4.matmul.v4" in line)
        attrs = dict(re.findall(r"(\w+) = (-?\d+) : i64", line))
        problem = plan.Problem(
            5, N, K, RANK, "nvfp4", 16, "float32", "float32", "bfloat16", "float8_e4m3fn"
        )
        solved = plan.solve(problem, plan.targets.current())
        want = {**solved.ffi_attrs(), **self.w.spec("float32").ffi_attrs()}
        self.assertEqual(attrs, {key: str(value) for key, value in want.items()})
        layouts = re.search(r"operand_layouts = \[(.*?)\], result_layouts = \[(.*?)\]\}", line)
        for group, ranks in ((1, (2, 1, 1, 2, 2, 2, 1, 2, 1, 1, 2)), (2, (2, 2, 2, 2))):
            self.assertEqual(
                re.findall(r"dense<(.*?)> :", layouts[group]),
                ["[1, 0]" if rank == 2 else "0" for rank in ranks],
            )
        self.assertIn(
            "(tensor<5x96xf32>, tensor<96xf32>, tensor<1xf32>, tensor<96x8xbf16>, "
            "tensor<24x48xui8>, tensor<24x6xf8E4M3FN>, tensor<1xf32>, tensor<24x8xbf16>, "
            "tensor<24xf32>, tensor<24xf32>, tensor<0x2xui8>) -> (tensor<5x24xf32>, "
            "tensor<5x48xui8>, tensor<5x6xf8E4M3FN>, tensor<5x8xbf16>)",
            line,
        )

    def test_shared_activation(self):
        def qkv(x, w):
            act = quantize_activation(x, w)
            return matmul(act, w), matmul(act, w.replace(bias=None))

        text = cuda_text(qkv, self.x, self.w)
        self.assertEqual(
            sorted(ffi_calls(text)), ["jax_w4a4.gemm.v4"] * 2 + ["jax_w4a4.quantize.v3"]
        )

    def test_absent_operands_are_empty(self):
        w = cases.weight(N, K, "int4", rank=0, full=False)
        text = cuda_text(matmul, self.x.astype(jnp.bfloat16), w)
        line = next(line for line in text.splitlines() if "@jax_w4a4.matmul.v4" in line)
        self.assertIn(
            "(tensor<5x96xbf16>, tensor<0xf32>, tensor<0xf32>, tensor<96x0xbf16>, "
            "tensor<24x64xui8>, tensor<24x2xf16>, tensor<0xf32>, tensor<24x0xbf16>, "
            "tensor<0xf32>, tensor<0xf32>, tensor<0x2xui8>)",
            line,
        )

    def test_both_platforms(self):
        """A program for CPU and CUDA holds both, chosen by platform at run time."""
        text = cuda_text(matmul, self.x, self.w, platforms=("cpu", "cuda"))
        self.assertIn("stablehlo.case", text)
        self.assertEqual(ffi_calls(text), ["jax_w4a4.matmul.v4"])

    @parameterized.parameters("sm90_v2", "sm90_decode", "sm90_v1")
    def test_gradients_of_a_named_kernel(self, name):
        """channel_scale's gradient has an fp32 product, which not every kernel stores."""
        w = cases.weight(256, 128, rank=16)
        x = cases.activation(8, 128, dtype="bfloat16")

        def loss(x, channel_scale):
            y = matmul(x, w.replace(channel_scale=channel_scale), implementation=name)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        text = cuda_text(jax.grad(loss, argnums=(0, 1)), x, w.channel_scale)
        self.assertEqual(text.count("custom_call @jax_w4a4.matmul"), 2)

    def test_xla_implementation_has_no_call(self):
        f = functools.partial(matmul, implementation="xla")
        self.assertEqual(ffi_calls(cuda_text(f, self.x, self.w)), [])

    def test_cuda_implementation(self):
        """Allowed where the program is for CUDA alone, refused where a CPU part is wanted."""
        f = functools.partial(matmul, implementation="cuda")
        self.assertEqual(ffi_calls(cuda_text(f, self.x, self.w)), ["jax_w4a4.matmul.v4"])
        with self.assertRaisesRegex(NotImplementedError, "implementation='cuda'"):
            cuda_text(f, self.x, self.w, platforms=("cpu", "cuda"))

    def test_empty_product_launches_nothing(self):
        self.assertEqual(ffi_calls(cuda_text(matmul, jnp.zeros((0, K)), self.w)), [])

    def test_equal_calls_share_one_function(self):
        """Reference lowering: three equal layers are traced and lowered as one function."""

        def f(x, w):
            for _ in range(3):
                x = matmul(x, w)[:, :1] + x
            return x

        text = jax.jit(f).lower(self.x, self.w).as_text()
        self.assertEqual(len(re.findall(r"func private @_?jax_w4a4_matmul_reference", text)), 1)

    @mock.patch.dict("os.environ", JAX_W4A4_TARGET="sm_100")
    def test_blackwell(self):
        """Lowered for another machine: the tcgen05 kernel, v1 for what that one lacks, and an error
        where a kernel is asked for by name."""
        x = cases.activation(64, K, dtype="bfloat16")
        for format, kernel in (("nvfp4", 2), ("int4", 10)):
            w = cases.weight(N, K, format, rank=RANK)
            text = cuda_text(lambda x, w=w: matmul(x, w), x)
            self.assertEqual(ffi_calls(text), ["jax_w4a4.matmul.v4"])
            self.assertIn(f"kernel = {kernel} : i64", text)
        with self.assertRaisesRegex(NotImplementedError, "no int4 path.*implementation='xla'"):
            cuda_text(lambda x: matmul(x, w, implementation="sm100_v2"), x)

    @mock.patch.dict("os.environ", JAX_W4A4_TARGET="sm_103")
    def test_blackwell_workspace(self):
        """Scale factors of both operands are results of the call: atoms of 512 bytes, 128 rows and
        four blocks each, whole stages of 256. From x the plain scales are left out."""
        x = cases.activation(130, K, dtype="bfloat16")
        w = cases.weight(N, K, "nvfp4", rank=RANK)
        text = cuda_text(matmul, x, w)
        results = "-> (tensor<130x24xbf16>, tensor<130x48xui8>, tensor<0x6xf8E4M3FN>, "
        atoms = "tensor<8x512xui8>, tensor<4x512xui8>)"
        self.assertIn(f"{results}tensor<130x8xbf16>, {atoms}", text)

        def shared(x, w):
            return matmul(quantize_activation(x, w), w)

        text = cuda_text(shared, x, w)
        self.assertEqual(sorted(ffi_calls(text)), ["jax_w4a4.gemm.v4", "jax_w4a4.quantize.v3"])
        self.assertIn(f"-> (tensor<130x24xbf16>, {atoms}", text)
        lines = {line.split("@")[1].split("(")[0]: line for line in text.splitlines()
                 if "@jax_w4a4." in line}  # fmt: skip
        self.assertIn("kernel = 2 : i64", lines["jax_w4a4.gemm.v4"])
        quantize = lines["jax_w4a4.quantize.v3"]
        self.assertIn("kernel = 10 : i64", quantize)
        self.assertIn("q_kernel = 3 : i64", quantize)

    @mock.patch.dict("os.environ", JAX_W4A4_TARGET="sm_120")
    def test_target_without_plan(self):
        """No kernel for the chip: the reference with a reason, or an error if asked for."""
        w = cases.weight(N, K, rank=RANK)
        with self.assertWarnsRegex(FallbackWarning, "no kernel design for sm_120"):
            self.assertEqual(ffi_calls(cuda_text(lambda x: matmul(x, w), self.x)), [])
        with self.assertRaisesRegex(NotImplementedError, "sm_120.*implementation='xla'"):
            cuda_text(lambda x: matmul(x, w, implementation="cuda"), self.x)


class WithoutKernelsTest(parameterized.TestCase):
    """A CUDA machine with the CPU package: imitated by what the lowering rule asks for."""

    def setUp(self):
        super().setUp()
        self.w = cases.weight(N, K, rank=RANK)
        self.x = cases.activation(5, K)
        primitives._warned.clear()
        for patch in (
            mock.patch.object(primitives, "_cuda_capability", return_value=90),
            mock.patch.object(_ffi, "has_cuda", return_value=False),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def test_default_warns_once(self):
        with self.assertWarnsRegex(FallbackWarning, "built without CUDA kernels; rebuild"):
            self.assertEqual(ffi_calls(cuda_text(lambda x: matmul(x, self.w), self.x)), [])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cuda_text(lambda x: matmul(x, self.w) + 1.0, self.x)
            cuda_text(lambda x: matmul(x, self.w, implementation="xla"), self.x)

    def test_cuda_says_how_to_rebuild(self):
        for f in (matmul, quantize_activation):
            with self.assertRaisesRegex(
                NotImplementedError,
                f"(?s)^jax_w4a4.{f.__name__}: .*pip install.*JAX_W4A4_PIP_CUDA=true.*'xla'",
            ):
                cuda_text(lambda x, f=f: f(x, self.w, implementation="cuda"), self.x)

    def test_warning_can_be_made_an_error(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            with self.assertRaises(FallbackWarning):
                cuda_text(lambda x: matmul(x, self.w), self.x)


if __name__ == "__main__":
    absltest.main()
