"""The public operator: values, transformations, gradients and errors."""

from __future__ import annotations

import warnings

import cases
import jax
import jax.numpy as jnp
import model
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

from jax_w4a4 import plan, primitives
from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.weight import Activation, Weight

# fp32 sums in another order; and one rounding to bfloat16 or float16 of the result.
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-3, "float16": 4e-4}
TRAINABLE = ("lora_up", "lora_down", "bias", "channel_scale")

N, K = 24, 128
jitted = jax.jit(matmul)


def trainable(w: Weight) -> dict[str, jax.Array]:
    return {name: getattr(w, name) for name in TRAINABLE if getattr(w, name) is not None}


def loss(x, leaves, w, target):
    """Differentiable in x and the trainable leaves, with a cotangent that varies over y."""
    return jnp.sum(matmul(x, w.replace(**leaves)).astype(jnp.float32) * target)


grads = jax.jit(jax.grad(loss, argnums=(0, 1)))


class PreparedTest(parameterized.TestCase):
    """A prepared weight gives the bits that it gave before, through every transformation."""

    def setUp(self):
        super().setUp()
        self.w = cases.weight(N, K, "mxfp4")
        self.p = self.w.prepare()
        self.x = cases.activation(2, 3, K, dtype="bfloat16")

    @parameterized.named_parameters(
        ("eager", matmul),
        ("jit", jitted),
        ("vmap", jax.vmap(matmul, in_axes=(0, None))),
        ("shared", lambda x, w: matmul(quantize_activation(x, w), w)),
        ("prepared_inside", jax.jit(lambda x, w: matmul(x, w.prepare()))),
    )
    def test_same_bits(self, f):
        np.testing.assert_array_equal(f(self.x, self.p), f(self.x, self.w))
        self.assertLess(cases.error(f(self.x, self.p), cases.expected(self.x, self.p)), 3e-3)

    def test_stacks(self):
        """scan over layers and vmap over weights."""
        stack = jax.tree.map(lambda *a: jnp.stack(a), self.w, cases.weight(N, K, "mxfp4", seed=5))

        def scanned(w):
            return lax.scan(lambda c, w: (c, matmul(self.x, w)), 0, w)[1]

        mapped = jax.vmap(matmul, in_axes=(None, 0))
        np.testing.assert_array_equal(scanned(stack.prepare()), scanned(stack))
        np.testing.assert_array_equal(mapped(self.x, stack.prepare()), mapped(self.x, stack))

    def test_gradients(self):
        x, target = cases.activation(5, K), cases.activation(5, N, seed=3)
        want = grads(x, trainable(self.w), self.w, target)
        got = grads(x, trainable(self.p), self.p, target)
        jax.tree.map(np.testing.assert_array_equal, got, want)

    def test_weights_share_an_activation_whatever_their_order(self):
        """One quantizer in the program: its parameters do not name the order."""

        def quantize(x, w):
            return jax.make_jaxpr(lambda x, w: quantize_activation(x, w).packed)(x, w)

        self.assertEqual(
            str(quantize(self.x, self.p.replace(scale_range=None))), str(quantize(self.x, self.w))
        )

    def test_what_has_no_kernel_says_how_to_go_on(self):
        for options in ({"precision": "highest"}, {"preferred_element_type": jnp.float32}):
            with self.assertRaisesRegex(NotImplementedError, r"use w\.linear\(\), which undoes"):
                matmul(self.x, self.p, implementation="cuda", **options)
            with plan.recording() as plans:
                matmul(self.x, self.p, **options)
            self.assertEmpty(plans)


class ValueTest(parameterized.TestCase):
    """The operator computes what the independent numpy model says."""

    @parameterized.product(format=("nvfp4", "mxfp4", "int4"), full=(True, False))
    def test_agrees_with_model(self, format, full):
        """Every format, with all optional operands and with none."""
        w = cases.weight(N, K, format, full=full, rank=8 if full else 0)
        x = cases.activation(5, K)
        self.assertLess(cases.error(jitted(x, w), cases.expected(x, w)), 2e-6)

    @parameterized.parameters("float32", "bfloat16", "float16")
    def test_dtypes(self, dtype):
        """The result has x's dtype unless preferred_element_type says otherwise."""
        w = cases.weight(N, K, lora_smoothed=True)
        x = cases.activation(5, K, dtype=dtype)
        y = jitted(x, w)
        self.assertEqual(y.dtype.name, dtype)
        want = cases.expected(x, w)
        self.assertLess(cases.error(y, want), TOLERANCE[dtype])
        wide = matmul(x, w, preferred_element_type=jnp.float32)
        self.assertEqual(wide.dtype, jnp.float32)
        self.assertLess(cases.error(wide, want), 2e-6)

    @parameterized.parameters(
        {"n": 7, "k": 100, "format": "nvfp4"},
        {"n": 1, "k": 33, "format": "mxfp4"},
        {"n": 9, "k": 40, "format": "int4", "block_size": 32, "scale_dtype": "bfloat16"},
        {"n": 9, "k": 70, "format": "int4", "block_size": None},
        {"n": 8, "k": 64, "format": "int4", "act_unsigned": True},
        {"n": 8, "k": 64, "format": "mxfp4", "act_rule": "floor", "lora_dtype": "float32"},
    )
    def test_odd_shapes_and_options(self, n, k, format, **options):
        """Odd N, K that pads, whole-row scales, unsigned activations, the floor rule."""
        w = cases.weight(n, k, format, **options)
        x = cases.activation(3, k)
        self.assertLess(cases.error(jitted(x, w), cases.expected(x, w)), 2e-6)

    def test_leading_dimensions(self):
        """Any number of them, none included, all folded into the same product."""
        w = cases.weight(N, K)
        x = cases.activation(2, 3, K)
        y = jitted(x, w)
        self.assertEqual(y.shape, (2, 3, N))
        np.testing.assert_array_equal(jitted(x.reshape(6, K), w).reshape(2, 3, N), y)
        one = jitted(x[1, 2], w)
        self.assertEqual(one.shape, (N,))
        self.assertLess(cases.error(one, y[1, 2]), 1e-6)

    @parameterized.parameters((0, K), (2, 0, K))
    def test_empty_m(self, *shape):
        """No rows give no rows, forward and backward."""
        w = cases.weight(N, K)
        x = jnp.zeros(shape)
        self.assertEqual(matmul(x, w).shape, (*shape[:-1], N))
        y = matmul(quantize_activation(x, w), w)
        self.assertEqual(y.shape, (*shape[:-1], N))
        dx, d = jax.grad(loss, argnums=(0, 1))(x, trainable(w), w, jnp.zeros((*shape[:-1], N)))
        self.assertEqual(dx.shape, x.shape)
        np.testing.assert_array_equal(d["bias"], np.zeros(N))

    @parameterized.parameters("nvfp4", "mxfp4", "int4")
    def test_nan_and_inf_rows(self, format):
        """A NaN makes its own row NaN; an Inf saturates; other rows don't notice."""
        w = cases.weight(N, K, format, rank=0)
        x = cases.activation(4, K)
        clean = jitted(x, w)
        y = jitted(x.at[1, 5].set(jnp.nan).at[2, 70].set(jnp.inf), w)
        self.assertTrue(np.isnan(y[1]).all())
        self.assertFalse(np.isnan(y[2]).any())
        np.testing.assert_array_equal(y[0], clean[0])
        np.testing.assert_array_equal(y[3], clean[3])

    def test_transposed_and_strided_inputs(self):
        """Views are taken by value, whatever their layout."""
        w = cases.weight(N, K)
        x = cases.activation(6, K)
        y = jitted(x, w)
        host = np.asarray(x)
        np.testing.assert_array_equal(matmul(np.asfortranarray(host), w), y)
        np.testing.assert_array_equal(matmul(np.repeat(host, 2, axis=0)[::2], w), y)
        np.testing.assert_array_equal(jax.jit(lambda t: matmul(t.T, w))(x.T), y)

    def test_x64(self):
        """Enabling x64 changes neither result nor dtypes."""
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        y = jitted(x, w)
        with jax.enable_x64(True):
            z = jax.jit(lambda x, w: matmul(x, w))(x, w)
            g = jax.grad(lambda x: matmul(x, w).sum())(x)
        self.assertEqual((z.dtype, g.dtype), (jnp.float32, jnp.float32))
        np.testing.assert_array_equal(y, z)

    def test_xla_implementation(self):
        """implementation="xla" gives the same result and the primitive remembers the choice."""
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        np.testing.assert_array_equal(matmul(x, w, implementation="xla"), matmul(x, w))
        text = str(jax.make_jaxpr(lambda x: matmul(x, w, implementation="xla"))(x))
        self.assertIn("implementation=xla", text)

    @parameterized.parameters("fastest", "highest")
    def test_precision(self, precision):
        """A permission: the reference ignores it, the primitive and its plan carry it."""
        w = cases.weight(24, 96, rank=16)
        x = cases.activation(300, 96, dtype="bfloat16")
        y = matmul(x, w, precision=precision)
        np.testing.assert_array_equal(y, matmul(x, w))
        text = str(jax.make_jaxpr(lambda x: matmul(x, w, precision=precision))(x))
        self.assertIn(f"precision='{precision}'", text)


class ActivationTest(parameterized.TestCase):
    """A shared activation gives what separate calls give."""

    def setUp(self):
        super().setUp()
        self.w = cases.weight(N, K, rank=8)
        self.x = cases.activation(2, 3, K, dtype="bfloat16")

    def test_same_as_matmul(self):
        """Quantized once, multiplied with two weights that share smooth and lora_down."""
        other = cases.weight(40, K, rank=8, seed=5).replace(
            smooth=self.w.smooth, lora_down=self.w.lora_down
        )
        act = quantize_activation(self.x, self.w)
        self.assertEqual(act.shape, (2, 3, K))
        self.assertEqual(act.dtype, "bfloat16")
        for w in (self.w, other):
            y = matmul(act, w)
            self.assertEqual(y.dtype, jnp.bfloat16)
            np.testing.assert_array_equal(y, matmul(self.x, w))

    def test_bits_agree_with_model(self):
        """Codes and scales are those of the independent quantizer, bit for bit."""
        x = cases.activation(5, 100)
        w = cases.weight(4, 100, "mxfp4", rank=0)
        act = quantize_activation(x, w)
        packed, scales, _ = model.quantize_activation(np.asarray(x), model.Operands.of(w))
        np.testing.assert_array_equal(act.packed, packed)
        np.testing.assert_array_equal(np.asarray(act.scales).view(np.uint8), scales.view(np.uint8))

    def test_sharing_counts(self):
        """q, k, v from one activation: one quantize and three gemms, and no fused call."""

        @jax.jit
        def qkv(x, w):
            act = quantize_activation(x, w)
            return matmul(act, w), matmul(act, w.replace(bias=None)), matmul(act, w)

        found = cases.primitives_in(jax.make_jaxpr(qkv)(self.x, self.w))
        self.assertEqual(found, ["quantize", "gemm", "gemm", "gemm"])

    def test_equal_quantizations_are_merged(self):
        """XLA computes two identical quantizations once, for weights of different widths too."""
        wide = cases.weight(40, K, rank=8, seed=5)

        def f(x, w, wide):
            wide = wide.replace(
                smooth=w.smooth, lora_down=w.lora_down, act_global_scale=w.act_global_scale
            )
            a, b = quantize_activation(x, w), quantize_activation(x, wide)
            return a.packed, b.packed, a.scales, b.scales

        text = jax.jit(f).lower(self.x, self.w, wide).compile().as_text()
        once = jax.jit(lambda x, w: f(x, w, w)[::2]).lower(self.x, self.w).compile().as_text()
        # One reduction (the block maxima) per quantization.
        self.assertGreater(once.count(" reduce("), 0)
        self.assertEqual(text.count(" reduce("), once.count(" reduce("))

    def test_gradients(self):
        """d lora_act, lora_up, bias and channel_scale through matmul(act, w); lora_down through
        quantize_activation; all equal to those of matmul(x, w)."""
        x = self.x.astype(jnp.float32)
        target = cases.activation(2, 3, N, seed=7)
        _, want = grads(x, trainable(self.w), self.w, target)

        def shared(leaves):
            w = self.w.replace(**leaves)
            act = quantize_activation(x, w)
            return jnp.sum(matmul(act, w) * target)

        got = jax.jit(jax.grad(shared))(trainable(self.w))
        for name in TRAINABLE:
            self.assertLess(cases.error(got[name], want[name]), 5e-3, name)

        act = quantize_activation(x, self.w)
        by_act = jax.grad(
            lambda a: jnp.sum(matmul(act.replace(lora_act=a), self.w).astype(jnp.float32) * target)
        )(act.lora_act)
        want = jnp.einsum("bmn,nr->bmr", target, self.w.lora_up.astype(jnp.float32))
        self.assertLess(cases.error(by_act, want), 5e-3)

    def test_gradient_to_x_is_refused(self):
        """It would lack the main branch; silence would be a wrong gradient."""
        f = lambda x: matmul(quantize_activation(x, self.w), self.w).sum()  # noqa: E731
        with self.assertRaisesRegex(NotImplementedError, r"quantize_activation: .*matmul\(x, w\)"):
            jax.grad(f)(self.x)
        stopped = jax.grad(lambda x: f(lax.stop_gradient(x)))(self.x)
        np.testing.assert_array_equal(stopped, np.zeros(self.x.shape, stopped.dtype))

    def test_vmap(self):
        """A batch of activations folds; so does one that was batched before quantization."""
        act = quantize_activation(self.x, self.w)
        y = matmul(self.x, self.w)
        axes = act.replace(packed=0, scales=0, global_scale=None, lora_act=0)
        np.testing.assert_array_equal(
            jax.vmap(lambda a: matmul(a, self.w), in_axes=(axes,))(act), y
        )
        both = jax.vmap(lambda x: matmul(quantize_activation(x, self.w), self.w), 1, 1)
        np.testing.assert_array_equal(both(self.x), y)

    def test_vmap_over_global_scale_and_smooth(self):
        """Batched scalars of an activation, batched parameters of its quantization."""
        scales = jnp.array([0.5, 2.0], jnp.float32)
        act = quantize_activation(self.x, self.w)
        got = jax.vmap(lambda s: matmul(act.replace(global_scale=s), self.w))(scales)
        for i in range(2):
            np.testing.assert_array_equal(
                got[i], matmul(act.replace(global_scale=scales[i]), self.w)
            )
        got = jax.vmap(lambda s: quantize_activation(self.x, self.w.replace(act_global_scale=s)))(
            scales
        )
        for i in range(2):
            want = quantize_activation(self.x, self.w.replace(act_global_scale=scales[i]))
            np.testing.assert_array_equal(got.packed[i], want.packed)

    @parameterized.named_parameters(
        ("format", cases.weight(4, 64, "mxfp4"), "format 'nvfp4'"),
        ("k", cases.weight(4, 96), "k 64"),
        ("rank", cases.weight(4, 64, rank=4), "rank"),
        ("lora_dtype", cases.weight(4, 64, lora_dtype="float16"), "rank"),
        ("no_rank", cases.weight(4, 64, rank=0), "rank"),
    )
    def test_mismatch(self, w, message):
        """An activation quantized for another weight is refused."""
        act = quantize_activation(cases.activation(2, 64), cases.weight(4, 64))
        with self.assertRaisesRegex(ValueError, message):
            matmul(act, w)

    def test_mismatch_of_int4_options(self):
        act = quantize_activation(cases.activation(2, 64), cases.weight(4, 64, "int4"))
        for other in (
            cases.weight(4, 64, "int4", block_size=32),
            cases.weight(4, 64, "int4", act_unsigned=True),
            cases.weight(4, 64, "int4", scale_dtype="bfloat16"),
        ):
            with self.assertRaisesRegex(ValueError, "the activation was quantized with"):
                matmul(act, other)

    def test_inconsistent_leading_dimensions(self):
        act = quantize_activation(self.x, self.w)
        message = (
            r"^jax_w4a4\.matmul: activation\.scales is float8_e4m3fn\[1,3,8\]; expected .*\[2,3,8\]"
        )
        with self.assertRaisesRegex(ValueError, message):
            matmul(act.replace(scales=act.scales[:1]), self.w)

    @parameterized.parameters(
        (dict(packed=None), TypeError, "activation.packed is NoneType; expected an array"),
        (dict(scales=None), TypeError, "activation.scales is NoneType; expected an array"),
        (dict(packed=jnp.zeros((2, 3, K // 2))), TypeError, "activation.packed is float32"),
        (dict(lora_act=jnp.zeros((2, 1, 8))), ValueError, r"activation.lora_act is .*\[2,1,8\]"),
        (dict(global_scale=jnp.ones(1)), ValueError, r"activation.global_scale is float32\[1\]"),
        (dict(unsigned="no"), TypeError, "act_unsigned='no'; expected a bool"),
    )
    def test_damaged(self, changes, error, message):
        act = quantize_activation(self.x, self.w)
        with self.assertRaisesRegex(error, rf"^jax_w4a4\.matmul: {message}"):
            matmul(act.replace(**changes), self.w)


class VmapTest(parameterized.TestCase):
    """vmap equals a Python loop, for every choice of what is batched."""

    def setUp(self):
        super().setUp()
        self.w = cases.weight(N, K)
        self.x = cases.activation(4, 2, K)
        self.stack = jax.tree.map(
            lambda a, b: jnp.stack([a, b]), self.w, cases.weight(N, K, seed=9)
        )

    def one(self, i):
        return jax.tree.map(lambda leaf: leaf[i], self.stack)

    def test_unbatched_weight_folds(self):
        """One product for the whole batch, on any axis and nested."""
        y = jitted(self.x, self.w)
        for f in (
            jax.vmap(matmul, in_axes=(0, None)),
            jax.vmap(matmul, in_axes=(1, None), out_axes=1),
            jax.vmap(jax.vmap(matmul, in_axes=(0, None)), in_axes=(0, None)),
            jax.vmap(jax.vmap(matmul, in_axes=(0, None)), in_axes=(1, None), out_axes=1),
        ):
            np.testing.assert_array_equal(jax.jit(f)(self.x, self.w), y)
        with plan.recording() as plans:
            jax.make_jaxpr(jax.vmap(matmul, in_axes=(0, None)))(jnp.ones((5, 3, K)), self.w)
        self.assertIn(15, [p.problem.m for p in plans])

    def test_both_batched(self):
        y = jax.jit(jax.vmap(matmul))(self.x[:2], self.stack)
        z = jax.jit(jax.vmap(matmul, in_axes=(1, 0), out_axes=1))(self.x, self.stack)
        for i in range(2):
            np.testing.assert_array_equal(y[i], jitted(self.x[i], self.one(i)))
            np.testing.assert_array_equal(z[:, i], jitted(self.x[:, i], self.one(i)))

    def test_weight_only(self):
        y = jax.jit(jax.vmap(matmul, in_axes=(None, 0)))(self.x, self.stack)
        for i in range(2):
            np.testing.assert_array_equal(y[i], jitted(self.x, self.one(i)))

    @parameterized.parameters("bias", "global_scale", "smooth", "lora_up", "packed")
    def test_one_leaf_only(self, name):
        """A batch on a single leaf of the weight."""
        leaf = getattr(self.stack, name)
        y = jax.jit(jax.vmap(lambda v: matmul(self.x, self.w.replace(**{name: v}))))(leaf)
        for i in range(2):
            want = jitted(self.x, self.w.replace(**{name: leaf[i]}))
            self.assertLess(cases.error(y[i], want), 1e-6)

    def test_nested_over_weight_and_x(self):
        f = jax.vmap(jax.vmap(matmul, in_axes=(0, None)), in_axes=(None, 0))
        y = jax.jit(f)(self.x, self.stack)
        for i in range(2):
            np.testing.assert_array_equal(y[i], jitted(self.x, self.one(i)))

    def test_of_grad(self):
        """Per-example gradients equal those of single examples."""
        target = cases.activation(4, 2, N, seed=3)
        f = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, None, 0)))
        dx, d = f(self.x, trainable(self.w), self.w, target)
        for i in range(4):
            want_x, want = grads(self.x[i], trainable(self.w), self.w, target[i])
            self.assertLess(cases.error(dx[i], want_x), 1e-5)
            for name in TRAINABLE:
                self.assertLess(cases.error(d[name][i], want[name]), 5e-3, name)

    def test_grad_of_batched_weight(self):
        """Gradients of a loss over stacked weights."""
        target = cases.activation(2, 2, N, seed=3)

        def f(bias):
            return jnp.sum(jax.vmap(matmul)(self.x[:2], self.stack.replace(bias=bias)) * target)

        got = jax.jit(jax.grad(f))(self.stack.bias)
        self.assertLess(cases.error(got, target.sum(axis=1)), 1e-6)


class GradientTest(parameterized.TestCase):
    """Straight-through gradients against differentiation of a dense model with jax itself."""

    @parameterized.product(
        format=("nvfp4", "int4"),
        lora_smoothed=(False, True),
        full=(True, False),
    )
    def test_formulas(self, format, lora_smoothed, full):
        """x sees the effective weight, channel_scale the quantized product."""
        w = cases.weight(N, K, format, full=full, lora_dtype="float32", lora_smoothed=lora_smoothed)
        x = cases.activation(2, 3, K)
        target = cases.activation(2, 3, N, seed=3)
        bare = w.replace(lora_up=None, lora_down=None, bias=None, channel_scale=None)
        product = matmul(x, bare)

        def dense(x, leaves):
            v = w.replace(**leaves)
            # The value is that of the quantized product, the derivative that of the dense one.
            through = jnp.einsum("...k,nk->...n", x, bare.effective())
            y = through + lax.stop_gradient(product - through)
            if full:
                y = y * v.channel_scale[None, None, :]
            smoothed = x / w.smooth[None, None, :] if lora_smoothed and full else x
            y = y + jnp.einsum("...k,kr,nr->...n", smoothed, v.lora_down, v.lora_up)
            return jnp.sum((y + v.bias[None, None, :] if full else y) * target)

        got_x, got = grads(x, trainable(w), w, target)
        want_x, want = jax.jit(jax.grad(dense, argnums=(0, 1)))(x, trainable(w))
        self.assertLess(cases.error(got_x, want_x), 1e-5)
        self.assertEqual(set(got), set(want))
        for name in want:
            self.assertLess(cases.error(got[name], want[name]), 1e-5, name)

    def test_padded_k_and_one_dimension(self):
        """A gradient has the logical K, and a 1-d x gets one of its own shape."""
        w = cases.weight(7, 100, "mxfp4")
        x = cases.activation(100)
        dx, d = grads(x, trainable(w), w, jnp.ones(7))
        want = jnp.ones(7) @ w.effective()
        self.assertEqual(dx.shape, (100,))
        self.assertLess(cases.error(dx, want), 1e-5)
        np.testing.assert_allclose(d["bias"], np.ones(7))

    def test_dtypes(self):
        """Each gradient has the dtype of its leaf; bfloat16 products stay close to fp32 ones."""
        w = cases.weight(N, K)
        x = cases.activation(6, K, dtype="bfloat16")
        target = cases.activation(6, N, seed=3)
        dx, d = grads(x, trainable(w), w, target)
        self.assertEqual(dx.dtype, jnp.bfloat16)
        self.assertEqual(
            {k: v.dtype.name for k, v in d.items()},
            {
                "lora_up": "bfloat16",
                "lora_down": "bfloat16",
                "bias": "float32",
                "channel_scale": "float32",
            },
        )
        self.assertLess(cases.error(dx, target @ w.effective()), 1e-2)

    def test_quantized_leaves_get_zeros(self):
        """The gradient of a whole weight exists, and only the trainable leaves are nonzero."""
        w = cases.weight(N, K)
        x = cases.activation(6, K)
        d = jax.grad(lambda w: matmul(x, w).sum(), allow_int=True)(w)
        self.assertEqual(d.packed.dtype, jax.dtypes.float0)
        for name in ("scales", "global_scale", "act_global_scale", "smooth"):
            self.assertFalse(np.asarray(getattr(d, name), np.float32).any(), name)
        for name in TRAINABLE:
            self.assertTrue(np.asarray(getattr(d, name), np.float32).any(), name)

    def test_unused_product_is_not_computed(self):
        """The second quantized product serves channel_scale only: without it XLA drops it."""
        w = cases.weight(N, K)
        x = cases.activation(6, K)
        f = jax.jit(jax.grad(lambda x: matmul(x, w).sum()))
        # Nothing of y is left in dx, so no product with the codes of x either: one dot over N,
        # and the two of the low-rank branch.
        self.assertLessEqual(f.lower(x).compile().as_text().count(" dot("), 3)

    def test_linearize_and_remat(self):
        """linearize and checkpoint give the gradient of grad."""
        w = cases.weight(N, K)
        x = cases.activation(6, K)
        target = cases.activation(6, N, seed=3)
        want, _ = grads(x, trainable(w), w, target)
        f = lambda x: loss(x, trainable(w), w, target)  # noqa: E731
        self.assertLess(cases.error(jax.jit(jax.grad(jax.checkpoint(f)))(x), want), 1e-6)
        _, vjp = jax.vjp(lambda x: matmul(x, w), x)
        self.assertLess(cases.error(vjp(target)[0], want), 1e-6)
        y, linear = jax.linearize(lambda b: matmul(x, w.replace(bias=b)), w.bias)
        np.testing.assert_array_equal(y, matmul(x, w))
        transposed = jax.linear_transpose(linear, w.bias)(target)[0]
        self.assertLess(cases.error(transposed, target.sum(axis=0)), 1e-6)

    def test_scan_over_layers(self):
        """A scan over stacked weights with remat equals the unrolled layers, gradient included."""
        layers = [cases.weight(K, K, seed=s) for s in range(3)]
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        x = cases.activation(4, K)

        def scanned(x, up):
            def step(x, w):
                return 0.1 * matmul(x, w), None

            return lax.scan(jax.checkpoint(step), x, stack.replace(lora_up=up))[0]

        def unrolled(x, up):
            for i, w in enumerate(layers):
                x = 0.1 * matmul(x, w.replace(lora_up=up[i]))
            return x

        np.testing.assert_allclose(
            jax.jit(scanned)(x, stack.lora_up), jax.jit(unrolled)(x, stack.lora_up), rtol=1e-4
        )
        got, want = (
            jax.jit(jax.grad(lambda x, up, f=f: jnp.sum(f(x, up) ** 2), argnums=(0, 1)))(
                x, stack.lora_up
            )
            for f in (scanned, unrolled)
        )
        self.assertLess(cases.error(got[0], want[0]), 1e-4)
        self.assertLess(cases.error(got[1], want[1]), 1e-2)

    def test_no_forward_mode(self):
        """jvp is an error, not a wrong tangent."""
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        with self.assertRaises(TypeError):
            jax.jvp(lambda x: matmul(x, w), (x,), (x,))


class CompilationTest(parameterized.TestCase):
    """One trace per shape, AOT, donation."""

    def test_traced_once(self):
        """Equal shapes are planned once, eager or jitted, whatever the values."""
        w = cases.weight(31, 96)
        with plan.recording() as plans:
            for seed in range(3):
                matmul(cases.activation(5, 96, seed=seed), cases.weight(31, 96, seed=seed))
            f = jax.jit(lambda x, w: matmul(x, w) + matmul(2.0 * x, w))
            f(cases.activation(5, 96), w)
            f(cases.activation(5, 96, seed=8), w)
        self.assertLen(plans, 1)

    def test_aot(self):
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        compiled = jax.jit(matmul).lower(x, w).compile()
        np.testing.assert_array_equal(compiled(x, w), jitted(x, w))
        abstract = jax.eval_shape(matmul, x, w)
        self.assertEqual((abstract.shape, abstract.dtype), ((2, N), jnp.float32))

    def test_disable_jit(self):
        """The layers work without any jit round them, for debugging."""
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        with jax.disable_jit():
            self.assertLess(cases.error(matmul(x, w), jitted(x, w)), 1e-6)
            self.assertEqual(jax.vmap(lambda x: matmul(x, w))(x).shape, (2, N))

    def test_donation(self):
        """x may be donated to a result of its shape."""
        w = cases.weight(K, K)
        x = cases.activation(2, K)
        want = jitted(x, w)
        f = jax.jit(matmul, donate_argnums=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CPU may decline the donation
            np.testing.assert_array_equal(f(jnp.copy(x), w), want)

    def test_target_is_part_of_the_cache_key(self):
        """Another JAX_W4A4_TARGET makes another plan for the same shapes."""
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        for target in ("sm_90", "sm_100"):
            with absltest.mock.patch.dict("os.environ", JAX_W4A4_TARGET=target):
                text = str(jax.make_jaxpr(lambda x: matmul(x, w))(x))
            self.assertIn(f" {target} ", text)


class ErrorTest(parameterized.TestCase):
    """Bad input is a typed error that says what came and what was expected."""

    @parameterized.named_parameters(
        ("int", np.zeros((2, K), np.int32), TypeError, "x has dtype int32; expected float32"),
        ("f64", np.zeros((2, K)), TypeError, r"float64; .*astype\(jnp.float32\)"),
        ("f8", jnp.zeros((2, K), jnp.float8_e4m3fn), TypeError, "float8_e4m3fn"),
        ("complex", jnp.zeros((2, K), jnp.complex64), TypeError, "complex64"),
        ("list", [[0.0] * K], TypeError, "x is list"),
        ("scalar", jnp.float32(1), ValueError, r"float32\[\]; expected \(..., K\)"),
        ("k", jnp.zeros((2, K + 1)), ValueError, rf"float32\[2,{K + 1}\].*K={K}"),
    )
    def test_x(self, x, error, message):
        w = cases.weight(N, K)
        for f in (matmul, quantize_activation):
            with self.assertRaisesRegex(error, f"^jax_w4a4.{f.__name__}: .*{message}"):
                f(x, w)

    @parameterized.named_parameters(
        ("array", lambda w: w.packed, TypeError, "expected a jax_w4a4.Weight"),
        ("packed", lambda w: w.replace(packed=w.packed.astype(jnp.int8)), TypeError, "uint8"),
        ("scales", lambda w: w.replace(scales=w.scales[:, :-1]), ValueError, "scales"),
        ("scale_rows", lambda w: w.replace(scales=w.scales[1:]), ValueError, "scales"),
        (
            "scale_dtype",
            lambda w: w.replace(scales=w.scales.astype(jnp.float32)),
            TypeError,
            "float8_e4m3fn",
        ),
        ("format", lambda w: w.replace(format="fp4"), ValueError, "'fp4'"),
        ("bias", lambda w: w.replace(bias=w.bias[1:]), ValueError, "bias"),
        ("half_lora", lambda w: w.replace(lora_down=None), ValueError, "lora_down"),
        ("rank", lambda w: w.replace(lora_up=w.lora_up[:, :-1]), ValueError, "lora_"),
        ("stacked", lambda w: jax.tree.map(lambda a: a[None], w), ValueError, "stacked"),
    )
    def test_weight(self, damage, error, message):
        w = damage(cases.weight(N, K))
        for f in (matmul, quantize_activation):
            with self.assertRaisesRegex(error, f"(?s)^jax_w4a4.{f.__name__}: .*{message}"):
                f(jnp.zeros((2, K)), w)

    def test_options(self):
        w = cases.weight(N, K)
        x = jnp.zeros((2, K))
        for f in (matmul, quantize_activation):
            with self.assertRaisesRegex(ValueError, "implementation='triton'; expected None"):
                f(x, w, implementation="triton")
        for precision in ("high", 1, jax.lax.Precision.HIGHEST, np.zeros(2)):
            with self.assertRaisesRegex(ValueError, "precision=.*; expected None, 'fastest'"):
                matmul(x, w, precision=precision)
        for dtype in (jnp.int8, jnp.float64, jnp.float8_e4m3fn, "foo", 3):
            with self.assertRaisesRegex(TypeError, "^jax_w4a4.matmul: preferred_element_type is"):
                matmul(x, w, preferred_element_type=dtype)

    def test_cuda_where_there_is_none(self):
        """Asking for the kernel on a CPU is an error that says what to ask for instead."""
        if jax.default_backend() != "cpu":
            self.skipTest("a CUDA device is present")
        w = cases.weight(N, K)
        x = jnp.zeros((2, K))
        message = "implementation='cuda' can't be compiled for platform 'cpu'.*'xla'"
        with self.assertRaisesRegex(NotImplementedError, f"matmul: {message}"):
            matmul(x, w, implementation="cuda")
        with self.assertRaisesRegex(NotImplementedError, f"quantize_activation: {message}"):
            quantize_activation(x, w, implementation="cuda")

    def test_unknown_gpu(self):
        """A GPU without a plan: the reference, with one warning; an error if asked for."""
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        unknown = NotImplementedError("jax_w4a4.plan: no kernel plan for target '8.0'")
        with absltest.mock.patch.object(plan.targets, "current", side_effect=unknown):
            primitives._warned.clear()
            with self.assertWarnsRegex(primitives.FallbackWarning, "no kernel plan for target"):
                y = matmul(x, w)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                matmul(x, w)
            np.testing.assert_array_equal(y, matmul(x, w, implementation="xla"))
            with self.assertRaises(NotImplementedError):
                matmul(x, w, implementation="cuda")


class PytreeTest(absltest.TestCase):
    """Activations pass through jit boundaries like any pytree."""

    def test_activation_crosses_jit(self):
        w = cases.weight(N, K)
        x = cases.activation(2, K)
        act = jax.jit(quantize_activation)(x, w)
        self.assertIsInstance(act, Activation)
        np.testing.assert_array_equal(jax.jit(matmul)(act, w), jitted(x, w))


if __name__ == "__main__":
    absltest.main()
