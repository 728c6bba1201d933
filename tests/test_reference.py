"""The jnp reference against the numpy model: quantizer bit for bit, product to fp32 summation."""

import itertools

import cases
import jax
import jax.numpy as jnp
import model
import numpy as np
from absl.testing import absltest, parameterized
from jax import export

from jax_w4a4 import reference
from jax_w4a4.weight import Weight

FORMATS = ("nvfp4", "mxfp4", "int4")


def operands(w: Weight) -> tuple:
    """What `matmul_ref` takes after x: zero-size arrays for absent parts."""
    n, k = w.shape
    none = jnp.zeros((0,), jnp.float32)
    vector = lambda a: none if a is None else a.reshape(-1)  # noqa: E731
    down = jnp.zeros((k, 0), jnp.bfloat16) if w.lora_down is None else w.lora_down
    up = jnp.zeros((n, 0), jnp.bfloat16) if w.lora_up is None else w.lora_up
    return (
        vector(w.smooth),
        vector(w.act_global_scale),
        down,
        w.packed,
        w.scales,
        vector(w.global_scale),
        up,
        vector(w.channel_scale),
        vector(w.bias),
    )


def run(x, w: Weight, out_dtype="float32"):
    """y, x_packed, x_scales, lora_act of one compiled call."""
    spec = w.spec(out_dtype)
    return jax.jit(lambda x, *a: reference.matmul_ref(x, *a, spec))(x, *operands(w))


class ParityTest(parameterized.TestCase):
    """Every combination of what may be absent or differ in dtype."""

    @parameterized.parameters(
        itertools.product(FORMATS, (0, 1, 20), ("float32", "bfloat16", "float16"))
    )
    def test_formats_ranks_dtypes(self, format, rank, dtype):
        """Codes, scales: equal bits. y: within fp32 summation error of float64. Ragged N and K."""
        lora_dtype = "float32" if dtype == "float32" else dtype
        w = cases.weight(23, 200, format, rank=rank, lora_dtype=lora_dtype)
        x = cases.activation(9, 200, dtype=dtype)
        y, packed, scales, lora_act = run(x, w)
        ops = model.Operands.of(w)
        want_packed, want_scales, want_act = model.quantize_activation(np.asarray(x), ops)
        np.testing.assert_array_equal(np.asarray(packed), want_packed)
        np.testing.assert_array_equal(
            np.asarray(scales).view(np.uint8), np.asarray(want_scales).view(np.uint8)
        )
        if rank:
            self.assertEqual(lora_act.dtype, jnp.dtype(lora_dtype))
            self.assertLess(cases.error(lora_act, want_act), 4e-3)
        else:
            self.assertEqual(lora_act.shape, (9, 0))
        want = model.gemm_f64(want_packed, want_scales, np.asarray(lora_act), ops)
        self.assertLess(cases.error(y, want), 1e-6)

    @parameterized.parameters(
        "smooth", "global_scale", "act_global_scale", "channel_scale", "bias", "lora"
    )
    def test_each_part_alone(self, part):
        """Any one optional operand without the others."""
        full = cases.weight(16, 64, "nvfp4", rank=4)
        keep = {"lora_down", "lora_up"} if part == "lora" else {part}
        optional = {"smooth", "global_scale", "act_global_scale", "channel_scale", "bias"}
        drop = (optional | {"lora_down", "lora_up"}) - keep
        w = full.replace(**dict.fromkeys(drop))
        x = cases.activation(5, 64)
        y = run(x, w)[0]
        self.assertLess(cases.error(y, cases.expected(x, w)), 2e-4)
        bare = w.replace(**dict.fromkeys(keep))
        self.assertGreater(cases.error(run(x, bare)[0], y), 1e-3)

    @parameterized.parameters(
        dict(format="int4", block_size=32, scale_dtype="bfloat16"),
        dict(format="int4", block_size=128, scale_dtype="float32"),
        dict(format="int4", block_size=None, scale_dtype="float32"),
        dict(format="int4", act_unsigned=True),
        dict(format="mxfp4", act_rule="floor"),
        dict(format="nvfp4", lora_smoothed=True),
    )
    def test_variants(self, **kw):
        """Block sizes, scale dtypes, unsigned activations, rules, the smoothed low-rank branch."""
        w = cases.weight(16, 160, rank=4, lora_dtype="float32", **kw)
        x = cases.activation(5, 160)
        y, packed, scales, _ = run(x, w)
        want_packed, want_scales, _ = model.quantize_activation(np.asarray(x), model.Operands.of(w))
        np.testing.assert_array_equal(np.asarray(packed), want_packed)
        np.testing.assert_array_equal(
            np.asarray(scales).view(np.uint8), np.asarray(want_scales).view(np.uint8)
        )
        self.assertLess(cases.error(y, cases.expected(x, w)), 1e-6)


class RoundingTest(parameterized.TestCase):
    """Where the contract says a rounding happens, and nowhere else."""

    @parameterized.parameters("bfloat16", "float16")
    def test_one_final_cast(self, out_dtype):
        """The narrow result is the fp32 result rounded once."""
        w = cases.weight(16, 64, rank=4)
        x = cases.activation(5, 64)
        wide = run(x, w)[0]
        np.testing.assert_array_equal(run(x, w, out_dtype)[0], wide.astype(out_dtype))

    @parameterized.parameters("bfloat16", "float16")
    def test_lora_act_is_rounded(self, lora_dtype):
        """Compiled as one program, the low-rank product still sees the rounded x @ lora_down."""
        w = cases.weight(16, 64, rank=4, lora_dtype=lora_dtype)
        zero = jnp.zeros_like(w.packed)
        w = w.replace(packed=zero, bias=None)
        x = cases.activation(64, 64)
        y, _, _, lora_act = run(x, w)
        want = np.asarray(lora_act, np.float64) @ np.asarray(w.lora_up, np.float64).T
        self.assertLess(cases.error(y, want), 1e-6)
        exact = np.asarray(x, np.float64) @ np.asarray(w.lora_down, np.float64)
        unrounded = exact @ np.asarray(w.lora_up, np.float64).T
        self.assertGreater(cases.error(y, unrounded), 1e-5)

    def test_x_is_rounded(self):
        """A cast of x to bfloat16 in the same program is honoured before quantization."""
        w = cases.weight(16, 64, rank=0, full=False)
        x = cases.activation(16, 64)
        spec = w.spec("float32")
        together = jax.jit(
            lambda x: reference.matmul_ref((x * 1.7).astype(jnp.bfloat16), *operands(w), spec)[0]
        )(x)
        apart = run(jax.jit(lambda x: (x * 1.7).astype(jnp.bfloat16))(x), w)[0]
        np.testing.assert_array_equal(together, apart)

    def test_low_rank_is_not_scaled(self):
        """channel_scale and global scales multiply the quantized product only."""
        w = cases.weight(16, 64, rank=4)
        w = w.replace(packed=jnp.zeros_like(w.packed), bias=None)
        x = cases.activation(5, 64)
        other = w.replace(channel_scale=3 * w.channel_scale, global_scale=5 * w.global_scale)
        np.testing.assert_array_equal(run(x, w)[0], run(x, other)[0])


class DegenerateTest(parameterized.TestCase):
    """NaN, Inf and zero on either side, empty M."""

    @parameterized.parameters(*FORMATS)
    def test_nan_row(self, format):
        """A NaN in x makes its row of y NaN and no other, even where the weight is zero."""
        w = cases.weight(8, 64, format, rank=0)
        w = w.replace(packed=w.packed.at[3].set(0))
        x = cases.activation(4, 64).at[2, 17].set(jnp.nan)
        nan = np.isnan(np.asarray(run(x, w)[0]))
        np.testing.assert_array_equal(nan, np.arange(4)[:, None] == np.full(8, 2)[None, :])

    @parameterized.parameters(*FORMATS)
    def test_nan_weight_scale(self, format):
        """A NaN weight scale makes its column of y NaN and no other."""
        w = cases.weight(8, 64, format, rank=0)
        scales = np.asarray(w.scales).copy()
        scales[5, 0] = np.nan
        nan = np.isnan(
            np.asarray(run(cases.activation(4, 64), w.replace(scales=jnp.asarray(scales)))[0])
        )
        np.testing.assert_array_equal(nan, np.broadcast_to(np.arange(8)[None, :] == 5, (4, 8)))

    @parameterized.parameters(*FORMATS)
    def test_infinity_saturates(self, format):
        """Inf in x saturates; without a low-rank branch to carry it, y holds no NaN.

        6 * 2^125, the largest mxfp4 value, may still overflow fp32 once multiplied.
        """
        w = cases.weight(8, 64, format, rank=0)
        x = cases.activation(4, 64).at[2, 17].set(-jnp.inf)
        y = np.asarray(run(x, w)[0])
        self.assertFalse(np.any(np.isnan(y)))
        if format != "mxfp4":
            self.assertTrue(np.all(np.isfinite(y)))
        np.testing.assert_array_equal(
            np.delete(y, 2, 0), np.delete(run(cases.activation(4, 64), w)[0], 2, 0)
        )

    @parameterized.parameters(*FORMATS)
    def test_zero_x(self, format):
        """x = 0 gives the bias exactly."""
        w = cases.weight(8, 64, format, rank=4)
        y = run(jnp.zeros((3, 64)), w)[0]
        np.testing.assert_array_equal(y, np.broadcast_to(np.asarray(w.bias), (3, 8)))

    @parameterized.parameters(*FORMATS)
    def test_empty(self, format):
        """M = 0."""
        y, packed, scales, lora_act = run(jnp.zeros((0, 64)), cases.weight(8, 64, format, rank=4))
        self.assertEqual(y.shape, (0, 8))
        self.assertEqual(packed.shape, (0, 32))
        self.assertEqual(scales.shape[0], 0)
        self.assertEqual(lora_act.shape, (0, 4))


class LoweringTest(parameterized.TestCase):
    """What lowering rules require of the reference."""

    @parameterized.parameters(*FORMATS)
    def test_symbolic_m(self, format):
        """One export with symbolic M serves every M (jax.export itself excludes 0)."""
        w = cases.weight(8, 100, format, rank=4)
        spec = w.spec("bfloat16")
        f = jax.jit(lambda x: reference.matmul_ref(x, *operands(w), spec)[0])
        (m,) = export.symbolic_shape("m")
        exported = export.export(f)(jax.ShapeDtypeStruct((m, 100), jnp.bfloat16))
        for rows in (1, 7):
            x = cases.activation(rows, 100, dtype="bfloat16")
            np.testing.assert_array_equal(exported.call(x), f(x))

    @parameterized.parameters(*FORMATS)
    def test_no_constants(self, format):
        """The traced reference closes over no arrays."""
        w = cases.weight(8, 64, format, rank=4)
        spec = w.spec("float32")
        jaxpr = jax.make_jaxpr(lambda *a: reference.matmul_ref(*a, spec))(
            cases.activation(3, 64), *operands(w)
        )
        self.assertLessEqual(max([np.size(c) for c in jaxpr.consts], default=0), 1)

    def test_halves_make_the_whole(self):
        """quantize_activation_ref and gemm_ref in two programs equal matmul_ref in one."""
        w = cases.weight(16, 64, rank=4)
        x = cases.activation(5, 64, dtype="bfloat16")
        spec = w.spec("bfloat16")
        smooth, ags, down, wp, ws, gs, up, cs, bias = operands(w)
        xp, xs, la = jax.jit(lambda *a: reference.quantize_activation_ref(*a, spec))(
            x, smooth, ags, down
        )
        y = jax.jit(lambda *a: reference.gemm_ref(*a, spec))(
            xp, xs, ags, la, wp, ws, gs, up, cs, bias
        )
        whole = run(x, w, "bfloat16")
        np.testing.assert_array_equal(xp, whole[1])
        np.testing.assert_allclose(y.astype(jnp.float32), whole[0].astype(jnp.float32), rtol=1e-2)


if __name__ == "__main__":
    absltest.main()
