"""`Weight` and `Activation`: pytrees that survive every transform, and constructors that check."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import model
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_w4a4
from jax_w4a4 import formats
from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.weight import Weight

FORMATS = ("nvfp4", "mxfp4", "int4")


def same(a: Weight, b: Weight) -> None:
    """Every leaf bit for bit, and the static fields."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, (x.dtype, y.dtype)
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_array_equal(
            x.view(f"u{x.dtype.itemsize}"), y.view(f"u{y.dtype.itemsize}")
        )


class PytreeTest(parameterized.TestCase):
    """JAX rebuilds pytrees with any leaf, under every transform."""

    def test_arbitrary_leaves(self):
        """No check runs on unflattening: objects, None, shapes and specs all pass."""
        w = cases.weight(8, 64)
        leaves, treedef = jax.tree.flatten(w)
        self.assertLen(leaves, 9)
        for leaf in (object(), jax.ShapeDtypeStruct((1,), jnp.float32), PartitionSpec(), 3.0):
            rebuilt = jax.tree.unflatten(treedef, [leaf] * 9)
            self.assertIs(rebuilt.packed, leaf)
        self.assertIsNone(jax.tree.map(lambda _: None, w).packed)

    def test_static_fields_are_part_of_the_type(self):
        """Two formats never share a trace."""
        w = cases.weight(8, 64, "mxfp4")
        floor = w.replace(act_rule="floor")
        self.assertNotEqual(jax.tree.structure(w), jax.tree.structure(floor))
        hash(jax.tree.structure(w))

    def test_jit_eval_shape_and_scan(self):
        """A weight goes in and out of jit and eval_shape; scan slices a stack of them."""
        w = cases.weight(8, 64)
        same(jax.jit(lambda w: w)(w), w)
        shapes = jax.eval_shape(lambda w: w, w)
        shapes.validate("f")
        self.assertEqual((shapes.shape, shapes.nbytes), (w.shape, w.nbytes))
        stack = jax.tree.map(lambda *a: jnp.stack(a), w, cases.weight(8, 64, seed=1))
        self.assertEqual(stack.shape, (2, 8, 64))
        stack.validate("f")
        _, dense = lax.scan(lambda c, w: (c, w.effective()), 0, stack)
        np.testing.assert_allclose(dense, stack.effective(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(dense[0], w.effective(), rtol=1e-6, atol=1e-6)
        vmapped = jax.vmap(Weight.dequantize)(stack)
        np.testing.assert_array_equal(vmapped, stack.dequantize())

    def test_frozen(self):
        with self.assertRaises(dataclasses.FrozenInstanceError):
            cases.weight(8, 64).k = 3


class PropertiesTest(parameterized.TestCase):
    """What a weight says about itself."""

    @parameterized.parameters(
        ("nvfp4", 100, 128, 64 + 8), ("mxfp4", 100, 128, 64 + 4), ("int4", 100, 128, 64 + 2 * 2)
    )
    def test_sizes(self, format, k, k_pad, row_bytes):
        """Logical shape, padded K and true bytes (JAX counts one byte per four-bit value)."""
        w = cases.weight(8, k, format, rank=4)
        self.assertEqual((w.shape, w.ndim, w.k_pad, w.rank), ((8, k), 2, k_pad, 4))
        self.assertEqual(w.dtype, jnp.float32)
        self.assertEqual(w.nbytes_packed, 8 * row_bytes)
        vectors = 4 * (k + 8 + 8 + (2 if format == "nvfp4" else 0))
        self.assertEqual(w.nbytes, 8 * row_bytes + 2 * 4 * (k + 8) + vectors)
        self.assertEqual(cases.weight(8, k, format, rank=0, full=False).rank, 0)

    @parameterized.parameters(*FORMATS)
    def test_values_and_dequantize(self, format):
        """values are the logical four-bit numbers; dequantize is the model's decode, exactly."""
        w = cases.weight(8, 100, format)
        self.assertEqual(w.values.shape, (8, 100))
        self.assertEqual(w.values.dtype, jnp.int4 if format == "int4" else jnp.float4_e2m1fn)
        ones = jnp.ones_like(w.scales)
        codes = w.replace(scales=ones, global_scale=None).dequantize()
        np.testing.assert_array_equal(w.values.astype(jnp.float32), codes)
        want = model.decode(w.packed, np.asarray(w.scales), format)[:, :100]
        if w.global_scale is not None:
            want = (want.astype(np.float32) * np.asarray(w.global_scale)).astype(np.float32)
        np.testing.assert_array_equal(w.dequantize(), want.astype(np.float32))

    @parameterized.parameters((f, s) for f in FORMATS for s in (False, True))
    def test_effective(self, format, lora_smoothed):
        """The linear map: what the operator computes when the activation is not quantized."""
        w = cases.weight(8, 100, format, rank=4, lora_dtype="float32", lora_smoothed=lora_smoothed)
        ops = model.Operands.of(w)
        x = np.random.default_rng(0).standard_normal((5, 100))
        xs = x / ops.smooth
        dense = model.decode(ops.packed, ops.scales, format)[:, :100]
        y = xs @ dense.T * (1 if ops.global_scale is None else ops.global_scale)
        y = y * ops.channel_scale + (xs if lora_smoothed else x) @ ops.lora_down @ ops.lora_up.T
        self.assertLess(cases.error(x @ np.asarray(w.effective(), np.float64).T, y), 1e-6)

    def test_spec(self):
        """The static description of a call."""
        w = cases.weight(8, 100, "int4", rank=4, block_size=None, scale_dtype="float32")
        spec = w.spec("bfloat16")
        self.assertEqual((spec.k, spec.k_pad, spec.block_size, spec.blocks), (100, 128, 128, 1))
        self.assertEqual((spec.scale_dtype, spec.lora_dtype), ("float32", "bfloat16"))
        self.assertEqual(spec.out_dtype, "bfloat16")


class PrepareTest(parameterized.TestCase):
    """The layout that the Hopper kernels read fastest: another order of bits, the same weight."""

    @parameterized.parameters(64, 100)
    def test_nothing_is_lost(self, k):
        w = cases.weight(8, k, "mxfp4")
        p = w.prepare()
        self.assertEqual(p.sign_order, "sorted")
        self.assertEqual((p.shape, p.nbytes), (w.shape, w.nbytes + 2 * 8))
        raw = np.asarray(w.scales).view(np.uint8)
        np.testing.assert_array_equal(p.scale_range, np.stack([raw.max(1), raw.min(1)], axis=1))
        self.assertFalse(np.array_equal(p.packed, w.packed))
        p.validate("f")
        self.assertIs(p.prepare(), p)
        same(p.linear(), w)
        same(jax.jit(Weight.prepare)(w), p)
        self.assertEqual(p.spec("bfloat16"), w.spec("bfloat16").replace(sign_order="sorted"))

    def test_range_of_other_scales_does_not_stay(self):
        """Kernels trust it: a stale one gives wrong results, which no CPU would show."""
        p = cases.weight(8, 64, "mxfp4").prepare()
        other = cases.weight(8, 64, "mxfp4", seed=1).prepare()
        self.assertFalse(np.array_equal(p.scale_range, other.scale_range))
        changed = p.replace(packed=other.packed, scales=other.scales)
        self.assertIsNone(changed.scale_range)
        np.testing.assert_array_equal(changed.prepare().packed, other.packed)
        np.testing.assert_array_equal(changed.prepare().scale_range, other.scale_range)
        both = p.replace(scales=other.scales, scale_range=other.scale_range)
        self.assertIs(both.scale_range, other.scale_range)
        # What stands for arrays is no range of anything.
        specs = p.shard_specs("tp")
        self.assertIs(specs.replace(scales=specs.packed).scale_range, specs.scale_range)
        # Nor is one from outside taken on trust.
        wrong = jnp.zeros_like(p.scale_range)
        for w in (p, p.linear()):
            args = (w.packed, w.scales)
            made = Weight.from_packed(
                *args, format="mxfp4", sign_order=w.sign_order, scale_range=wrong
            )
            np.testing.assert_array_equal(made.scale_range, w.scale_range)
        self.assertIsNone(p.linear().replace(scale_range=wrong).linear().scale_range)

    def test_range_of_what_stands_for_scales(self):
        w = cases.weight(8, 64, "mxfp4")
        p = w.prepare()
        for shapes in (jax.typeof, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)):
            found = jax.tree.map(shapes, w).prepare()
            same_shapes = jax.tree.map(
                lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), found, p
            )
            self.assertTrue(all(jax.tree.leaves(same_shapes)))
        mesh = jax.make_mesh((1,), ("tp",))
        host = jax.devices()[0].addressable_memories()[0].kind
        spec = jax.sharding.PartitionSpec
        at = jax.sharding.NamedSharding(mesh, spec("tp"), memory_kind=host)
        self.assertEqual(jax.tree.map(lambda a: at, w).prepare().scale_range, at)
        # K, the last dimension of a stack, is whole where the spec ends before it.
        stack = jax.tree.map(lambda a: jnp.stack([a, a]), w)
        for axes, kept in ((("tp", None), True), ((None, "tp"), True), ((None, None, "tp"), False)):
            at = jax.sharding.NamedSharding(mesh, spec(*axes))
            scales = jax.ShapeDtypeStruct(stack.scales.shape, stack.scales.dtype, sharding=at)
            found = jax.eval_shape(lambda w: w, stack).replace(scales=scales).prepare().scale_range
            self.assertEqual(found is not None, kept, axes)
            if found is not None:
                self.assertEqual((found.shape, found.sharding), ((2, 8, 2), at))

    def test_every_reader_honours_it(self):
        w = cases.weight(8, 100, "mxfp4")
        p = w.prepare()
        np.testing.assert_array_equal(p.values, w.values)
        np.testing.assert_array_equal(p.dequantize(), w.dequantize())
        np.testing.assert_array_equal(p.effective(), w.effective())

    def test_to_qarray(self):
        pytest.importorskip("qwix")
        w = cases.weight(8, 64, "mxfp4", rank=0, full=False)
        np.testing.assert_array_equal(w.prepare().to_qarray().qvalue, w.to_qarray().qvalue)

    def test_stacked(self):
        stack = jax.tree.map(
            lambda *a: jnp.stack(a), *(cases.weight(8, 64, "mxfp4", seed=i) for i in range(3))
        )
        p = stack.prepare()
        same(jax.vmap(Weight.prepare)(stack), p)
        same(jax.tree.map(lambda a: a[1], p), cases.weight(8, 64, "mxfp4", seed=1).prepare())
        same(p.linear(), stack)

    def test_other_formats_stay(self):
        for format in ("nvfp4", "int4"):
            w = cases.weight(8, 64, format)
            self.assertIs(w.prepare(), w)
            self.assertIs(w.linear(), w)

    def test_codes_are_never_relabelled(self):
        """A box around codes, or codes that can't be sorted, would change in name only."""
        w = cases.weight(8, 64, "mxfp4")
        for packed, error in (
            ([w.packed], "packed is list; expected an array"),
            (w.packed.astype(jnp.int8), r"packed is int8\[8,32\]; expected uint8"),
            (w.packed[:, :30], r"packed is uint8\[8,30\]; expected uint8"),
        ):
            with self.assertRaisesRegex((TypeError, ValueError), rf"Weight.prepare: .*{error}"):
                w.replace(packed=packed).prepare()
        for order in (None, "", 0, "Sorted"):
            with self.assertRaisesRegex(
                ValueError, r"Weight.prepare: sign_order=.*expected 'linear'"
            ):
                w.replace(sign_order=order).prepare()

    def test_gradients_change_order(self):
        """Their codes are float0; the tree has to match the weight of either order."""
        w = cases.weight(8, 64, "mxfp4", rank=16).prepare()
        x = jnp.ones((2, 64), jnp.float32)
        grads = jax.grad(lambda w: matmul(x, w).sum(), allow_int=True)(w)
        tree = jax.tree.structure(grads.linear())
        self.assertEqual(tree, jax.tree.structure(w.linear()))

    def test_a_symbolic_number_of_rows_exports(self):
        w = cases.weight(8, 64, "mxfp4", rank=0, full=False).prepare()
        (n,) = jax.export.symbolic_shape("n")
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), w)
        run = jax.export.export(jax.jit(Weight.dequantize))(shapes)
        np.testing.assert_array_equal(run.call(w), w.dequantize())

    def test_structures(self):
        """Shapes, specs and shardings of a weight get the field, to match a prepared one."""
        w = cases.weight(8, 64, "mxfp4")
        p = w.prepare()
        shapes = jax.eval_shape(lambda: w).prepare()
        self.assertEqual(jax.tree.structure(shapes), jax.tree.structure(p))
        self.assertEqual(shapes.packed, jax.ShapeDtypeStruct((8, 32), jnp.uint8))
        self.assertEqual(w.shard_specs("x").prepare(), p.shard_specs("x"))

    @parameterized.parameters(64, 100)
    def test_from_packed(self, k):
        """As a checkpoint of prepared weights would hold it; codes past K are cleared."""
        w = cases.weight(8, k, "mxfp4", rank=0, full=False)
        dirty = w.replace(packed=w.packed.at[:, -(-k // 2) :].set(0xFF)).prepare()
        got = Weight.from_packed(dirty.packed, w.scales, format="mxfp4", k=k, sign_order="sorted")
        same(got, w.prepare())
        with self.assertRaisesRegex(ValueError, f"packed is .*; expected {w.k_pad // 2} to"):
            short = dirty.packed[:, :-1]
            Weight.from_packed(short, w.scales, format="mxfp4", k=k, sign_order="sorted")

    def test_values_have_no_order(self):
        w = cases.weight(8, 64, "mxfp4")
        with self.assertRaisesRegex(TypeError, r"from_scaled: unexpected .*'sign_order'; prepare"):
            Weight.from_scaled(w.values, w.scales, sign_order="sorted")

    @parameterized.parameters(
        ("nvfp4", "sorted", "sign_order='sorted' is for format 'mxfp4'; the format is 'nvfp4'"),
        ("mxfp4", "shuffled", "sign_order='shuffled'; expected 'linear' or 'sorted'"),
        ("mxfp4", None, "sign_order=None; expected"),
    )
    def test_refused(self, format, order, message):
        w = cases.weight(8, 64, format).replace(sign_order=order)
        with self.assertRaisesRegex(ValueError, f"^jax_w4a4.matmul: {message}"):
            matmul(cases.activation(2, 64), w)
        if order:
            with self.assertRaisesRegex(ValueError, f"^jax_w4a4.Weight.from_packed: {message}"):
                Weight.from_packed(w.packed, w.scales, format=format, sign_order=order)


class LoraSideTest(parameterized.TestCase):
    """Converting the low-rank branch between raw and smoothed x."""

    @parameterized.parameters(("float32", 1e-6), ("bfloat16", 4e-3))
    def test_effective_is_kept(self, lora_dtype, tolerance):
        w = cases.weight(8, 100, rank=4, lora_dtype=lora_dtype)
        smoothed = w.with_lora_on("smoothed")
        self.assertTrue(smoothed.lora_smoothed)
        self.assertEqual(smoothed.lora_down.dtype, jnp.dtype(lora_dtype))
        self.assertLess(cases.error(smoothed.effective(), w.effective()), tolerance)
        back = smoothed.with_lora_on("raw")
        self.assertLess(cases.error(back.lora_down, w.lora_down), tolerance)
        x = cases.activation(5, 100)
        self.assertLess(cases.error(matmul(x, smoothed), matmul(x, w)), max(tolerance, 1e-3))

    def test_trivial(self):
        """Same side: the same object. Nothing to convert: only the flag moves."""
        w = cases.weight(8, 64, rank=4)
        self.assertIs(w.with_lora_on("raw"), w)
        same(
            w.replace(smooth=None).with_lora_on("smoothed"),
            w.replace(smooth=None, lora_smoothed=True),
        )
        self.assertTrue(cases.weight(8, 64, rank=0).with_lora_on("smoothed").lora_smoothed)
        with self.assertRaisesRegex(ValueError, r"jax_w4a4\.Weight\.with_lora_on: side='x'"):
            w.with_lora_on("x")


class ShardSpecsTest(parameterized.TestCase):
    """PartitionSpecs that place a weight on a mesh."""

    @parameterized.parameters((f, d) for f in FORMATS for d in ("n", "k"))
    def test_placement(self, format, dim):
        """Every leaf can be placed, the sharded ones hold a part, and values are kept."""
        mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
        w = cases.weight(16, 512, format, rank=4)
        specs = w.shard_specs("tp", dim)
        placed = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), w, specs)
        same(placed, w)
        part = {"n": (4, 256), "k": (16, 64)}[dim]
        self.assertEqual(placed.packed.sharding.shard_shape(placed.packed.shape), part)
        for name, sharded in (("lora_up", "n"), ("bias", "n"), ("smooth", "k"), ("lora_down", "k")):
            leaf = getattr(placed, name)
            self.assertEqual(leaf.sharding.is_fully_replicated, sharded != dim, name)

    def test_other(self):
        """Absent leaves stay absent, stacks get leading None, whole-row scales are replicated."""
        w = cases.weight(8, 64, rank=0, full=False)
        self.assertIsNone(w.shard_specs("tp").bias)
        stack = jax.tree.map(lambda a: a[None], w)
        self.assertEqual(stack.shard_specs("tp").packed, PartitionSpec(None, "tp", None))
        row = cases.weight(8, 64, "int4", block_size=None, full=False)
        self.assertEqual(row.shard_specs("tp", "k").scales, PartitionSpec(None, None))
        with self.assertRaisesRegex(ValueError, r"jax_w4a4\.Weight\.shard_specs: dim='m'"):
            w.shard_specs("tp", "m")


class FromPackedTest(parameterized.TestCase):
    """Checkpoint bytes in."""

    def test_as_is(self):
        """Arrays that need nothing are stored unchanged; vectors become fp32."""
        rng = np.random.default_rng(0)
        packed = rng.integers(0, 256, (8, 64), np.uint8)
        scales = rng.uniform(1, 2, (8, 8)).astype(ml_dtypes.float8_e4m3fn)
        w = Weight.from_packed(
            packed,
            scales,
            format="nvfp4",
            global_scale=np.ones((1,), ml_dtypes.bfloat16),
            bias=np.ones(8, np.float16),
        )
        np.testing.assert_array_equal(w.packed, packed)
        self.assertEqual((w.k, w.block_size, w.global_scale.shape), (128, 16, ()))
        self.assertEqual((w.bias.dtype, w.global_scale.dtype), (jnp.float32, jnp.float32))
        raw = Weight.from_packed(packed, scales.view(np.uint8), format="nvfp4")
        same(raw, w.replace(global_scale=None, bias=None))

    @parameterized.parameters(
        (100, 2, 64), (100, 4, 32), (100, 1, None), (256, 2, 128), (256, 4, 64), (33, 2, 32)
    )
    def test_int4_block_is_inferred(self, k, columns, block):
        w = Weight.from_packed(
            np.zeros((8, -(-k // 2)), np.uint8),
            np.ones((8, columns), np.float16),
            format="int4",
            k=k,
        )
        self.assertEqual(w.block_size, block)

    @parameterized.parameters(*FORMATS)
    def test_padding(self, format):
        """K is padded with zero codes and scales, whatever the spare nibble held."""
        k = 99
        full = cases.weight(8, 100, format, rank=0, full=False)
        packed = np.asarray(full.packed)[:, :50] | 0x70
        w = Weight.from_packed(packed, full.scales, format=format, k=k)
        self.assertEqual((w.k, w.packed.shape), (k, (8, 64)))
        codes = np.asarray(formats.unpack(w.packed))
        np.testing.assert_array_equal(codes[:, k:], 0)
        np.testing.assert_array_equal(codes[:, 1:k:2] & 7, (packed >> 4)[:, : k // 2] & 7)
        self.assertEqual(w.scales.shape[1], w.k_pad // w.block_size)
        self.assertEqual(w.dequantize().shape, (8, k))

    def test_rank_zero_arrays(self):
        """Empty low-rank arrays mean none."""
        w = Weight.from_packed(
            np.zeros((8, 32), np.uint8),
            np.ones((8, 4), ml_dtypes.float8_e4m3fn),
            format="nvfp4",
            lora_down=jnp.zeros((64, 0)),
            lora_up=jnp.zeros((8, 0)),
        )
        self.assertIsNone(w.lora_up)

    def test_traced(self):
        """Constructors work under jit."""
        w = cases.weight(8, 64)
        build = jax.jit(lambda p, s: Weight.from_packed(p, s, format="nvfp4"))
        same(build(w.packed, w.scales), Weight.from_packed(w.packed, w.scales, format="nvfp4"))

    @parameterized.parameters(
        (
            dict(packed=np.zeros((8, 32), np.int8)),
            TypeError,
            "packed is int8.8,32.; expected uint8",
        ),
        (dict(packed=np.zeros(32, np.uint8)), ValueError, "packed is uint8.32.; expected"),
        (dict(packed=np.zeros((8, 40), np.uint8), k=64), ValueError, "packed is uint8.8,40.; exp"),
        (dict(packed=np.zeros((8, 20), np.uint8), k=64), ValueError, "packed is uint8.8,20.; exp"),
        (
            dict(scales=np.ones((8, 3), "float8_e4m3fn")),
            ValueError,
            "scales are float8_e4m3fn.8,3.",
        ),
        (dict(scales=np.ones((8, 5), "float8_e4m3fn")), ValueError, "weight.scales is float8"),
        (dict(scales=np.ones((8, 4), "float32")), TypeError, "weight.scales is float32.8,4.; exp"),
        (dict(format="fp4"), ValueError, "unknown format 'fp4'"),
        (dict(format="int4", scales=np.ones((8, 3), np.float16)), ValueError, "3 scales per row"),
        (dict(k="a"), ValueError, "k='a'; expected a positive integer"),
        (dict(k=64.0), ValueError, "k=64.0; expected a positive integer"),
        (dict(k=True), ValueError, "k=True; expected a positive integer"),
        (dict(act_unsigned="no"), TypeError, "act_unsigned='no'; expected a bool"),
        (dict(blocksize=16), TypeError, "unexpected argument 'blocksize'"),
        (dict(block_size=16), TypeError, "unexpected argument 'block_size'"),
        (dict(bias=np.ones(7)), ValueError, r"weight.bias is float32.7.; expected float32.8."),
    )
    def test_bad(self, kw, error, message):
        args = dict(packed=np.zeros((8, 32), np.uint8), scales=np.ones((8, 4), "float8_e4m3fn"))
        args |= dict(format="nvfp4") | kw
        packed, scales = args.pop("packed"), args.pop("scales")
        with self.assertRaisesRegex(error, rf"^jax_w4a4\.Weight\.from_packed: {message}"):
            Weight.from_packed(packed, scales, **args)


class FromScaledTest(parameterized.TestCase):
    """The operand form of jax.nn.scaled_matmul."""

    @parameterized.parameters((f, k) for f in FORMATS for k in (128, 96, 67))
    def test_round_trip(self, format, k):
        """values and scales in, the same values out; odd K too; the format follows from dtypes."""
        w = cases.weight(8, k, format, rank=0, full=False)
        blocks = -(-k // w.block_size)
        same(Weight.from_scaled(w.values, w.scales[:, :blocks]), w)

    def test_scaled_matmul(self):
        """Feeds jax.nn.scaled_matmul and gives its product."""
        w = cases.weight(16, 64, "nvfp4", rank=0, full=False)
        x = cases.weight(8, 64, "nvfp4", rank=0, full=False, seed=3)
        try:
            y = jax.nn.scaled_matmul(x.values[None], w.values[None], x.scales[None], w.scales[None])
        except NotImplementedError:
            self.skipTest("this jax has no scaled_matmul for the CPU")
        want = np.asarray(x.dequantize(), np.float64) @ np.asarray(w.dequantize(), np.float64).T
        self.assertLess(cases.error(y[0], want), 1e-5)

    def test_bad(self):
        w = cases.weight(8, 64, "nvfp4", rank=0, full=False)
        with self.assertRaisesRegex(TypeError, r"^jax_w4a4\.Weight\.from_scaled: no format has"):
            Weight.from_scaled(w.values, w.scales.astype(jnp.float32))
        with self.assertRaisesRegex(TypeError, r"^jax_w4a4\.Weight\.from_scaled: values are"):
            Weight.from_scaled(w.values, w.scales, format="int4")


class QArrayTest(parameterized.TestCase):
    """To and from qwix."""

    def setUp(self):
        super().setUp()
        self.qwix = pytest.importorskip("qwix")

    @parameterized.parameters(
        ("nvfp4", 16),
        ("mxfp4", 32),
        (jnp.int4, 32),
        (jnp.int4, 64),
        (jnp.int4, 128),
        (jnp.int4, 256),
    )
    def test_round_trip(self, qtype, tile):
        """qwix's own quantizer to a Weight and back: the same dequantized values each way."""
        w = cases.activation(8, 256)
        q = self.qwix.quantize(w, qtype, channelwise_axes=(0,), tiled_axes={1: tile})
        weight = Weight.from_qarray(q)
        self.assertEqual(weight.block_size, None if tile == 256 else tile)
        np.testing.assert_array_equal(weight.dequantize(), self.qwix.dequantize(q))
        back = weight.to_qarray()
        self.assertEqual(back.qtype, q.qtype)
        np.testing.assert_array_equal(self.qwix.dequantize(back), self.qwix.dequantize(q))

    def test_two_level(self):
        """A global scale is folded in on the way out and can be taken out on the way in."""
        w = cases.weight(8, 64, "nvfp4", rank=0, full=False)
        w = w.replace(global_scale=jnp.float32(0.123))
        q = w.to_qarray()
        np.testing.assert_allclose(self.qwix.dequantize(q), w.dequantize(), rtol=1e-6)
        same(Weight.from_qarray(q, global_scale=w.global_scale), w)
        with self.assertRaisesRegex(ValueError, r"from_qarray: some scales are not float8_e4m3fn"):
            Weight.from_qarray(q)

    def test_per_tensor_scale(self):
        q = self.qwix.quantize(cases.activation(8, 64), jnp.int4)
        np.testing.assert_array_equal(Weight.from_qarray(q).dequantize(), self.qwix.dequantize(q))

    def test_what_does_not_fit(self):
        """Zero points, foreign types, and fields a QArray has no place for."""
        x = cases.activation(8, 64)
        q = self.qwix.quantize(x, jnp.int4, channelwise_axes=(0,), calibration_method="minmax")
        with self.assertRaisesRegex(
            NotImplementedError, r"^jax_w4a4\.Weight\.from_qarray: the arr"
        ):
            Weight.from_qarray(q)
        with self.assertRaisesRegex(TypeError, r"^jax_w4a4\.Weight\.from_qarray: qtype is 'int8'"):
            Weight.from_qarray(self.qwix.quantize(x, jnp.int8))
        with self.assertRaisesRegex(ValueError, r"^jax_w4a4\.Weight\.from_qarray: qvalue is"):
            Weight.from_qarray(self.qwix.quantize(x, jnp.int4, tiled_axes={0: 2, 1: 32}))
        with self.assertRaisesRegex(
            NotImplementedError, r"to_qarray: a QArray has no place for act"
        ):
            cases.weight(8, 64).to_qarray()
        with self.assertRaisesRegex(NotImplementedError, r"to_qarray: K=100 is no multiple"):
            cases.weight(8, 100, rank=0, full=False).to_qarray()


class ValidateTest(parameterized.TestCase):
    """Each thing that can be wrong has a message that begins with the caller's name."""

    @parameterized.parameters(
        (dict(format="fp4"), ValueError, "unknown format 'fp4'"),
        (dict(block_size=32), ValueError, "block_size=32 does not exist for format 'nvfp4'"),
        (dict(act_rule="ceil"), ValueError, "act_rule='ceil'; expected 'rceil' or 'floor'"),
        (dict(act_unsigned=True), ValueError, "act_unsigned is for format 'int4'; the format is"),
        (dict(k=0), ValueError, "k=0; expected a positive integer"),
        (dict(k=2.0), ValueError, "k=2.0; expected a positive integer"),
        (dict(k=32), ValueError, "weight.packed is uint8.8,32.; expected uint8.8,16."),
        (dict(packed=object()), TypeError, "weight.packed is object; expected an array"),
        (dict(packed=np.zeros(32, np.uint8)), ValueError, "weight.packed is uint8.32.; expected"),
        (
            dict(packed=np.zeros((8, 32), np.int8)),
            TypeError,
            "weight.packed is int8.8,32.; expected",
        ),
        (
            dict(scales=np.ones((8, 4))),
            TypeError,
            "weight.scales is float64.8,4.; expected float8_",
        ),
        (
            dict(scales=np.ones((4, 8), ml_dtypes.float8_e4m3fn)),
            ValueError,
            "weight.scales is float8_e4m3fn.4,8.; expected float8_e4m3fn.8,4.",
        ),
        (dict(smooth=np.ones(8, np.float32)), ValueError, "weight.smooth is float32.8.; expected"),
        (
            dict(smooth=np.ones(64, np.float16)),
            TypeError,
            "weight.smooth is float16.64.; expected f",
        ),
        (
            dict(channel_scale=np.ones(64, np.float32)),
            ValueError,
            "weight.channel_scale is float32",
        ),
        (
            dict(global_scale=np.ones(1, np.float32)),
            ValueError,
            "weight.global_scale is float32.1.",
        ),
        (
            dict(bias=np.ones((8, 1), np.float32)),
            ValueError,
            "weight.bias is float32.8,1.; expected",
        ),
        (dict(bias=1.0), TypeError, "weight.bias is float; expected an array"),
        (dict(lora_up=None), ValueError, "weight has lora_down but no lora_up; give both or none"),
        (dict(lora_down=None), ValueError, "weight has lora_up but no lora_down; give both"),
        (
            dict(lora_down=np.ones((64, 5), ml_dtypes.bfloat16)),
            ValueError,
            "weight.lora_down is bfloat16.64,5.; expected bfloat16.64,4.",
        ),
        (
            dict(lora_down=np.ones((64, 4), np.float32)),
            TypeError,
            "weight.lora_down is float32.64,4.; expected bfloat16.64,4.",
        ),
        (
            dict(lora_up=np.ones((8, 4), np.int8)),
            TypeError,
            "weight.lora_up is int8.8,4.; expected",
        ),
        (
            dict(lora_down=np.ones((64, 0), np.float32), lora_up=np.ones((8, 0), np.float32)),
            ValueError,
            "weight.lora_up is float32.8,0.; a branch of rank 0 is",
        ),
    )
    def test_messages(self, change, error, message):
        w = cases.weight(8, 64, rank=4).replace(**change)
        with self.assertRaisesRegex(error, rf"^jax_w4a4\.f: {message}"):
            w.validate("f")

    @parameterized.parameters(*FORMATS)
    def test_good(self, format):
        """Full, bare, stacked and traced weights pass."""
        w = cases.weight(8, 100, format)
        w.validate("f")
        cases.weight(8, 100, format, rank=0, full=False).validate("f")
        jax.tree.map(lambda a: jnp.stack([a, a]), w).validate("f")
        jax.jit(lambda w: w.validate("f"))(w)


class ActivationTest(parameterized.TestCase):
    """The quantized activation."""

    @parameterized.parameters(
        ("nvfp4", {}), ("mxfp4", {}), ("int4", {}), ("int4", dict(act_unsigned=True))
    )
    def test_dequantize(self, format, static):
        """Approximates x / smooth, with leading dimensions, padding removed."""
        w = cases.weight(8, 100, format, **static)
        x = jnp.abs(cases.activation(2, 3, 100))
        a = quantize_activation(x, w)
        self.assertEqual((a.shape, a.ndim, a.k_pad, a.dtype), ((2, 3, 100), 3, 128, "float32"))
        want = np.asarray(x) / np.asarray(w.smooth)
        self.assertLess(cases.error(a.dequantize(), want), 0.15)
        rebuilt = jax.tree.unflatten(jax.tree.structure(a), [object()] * len(jax.tree.leaves(a)))
        self.assertEqual(rebuilt.replace(dtype="bfloat16").dtype, "bfloat16")
        same(jax.jit(lambda a: a)(a), a)


class NoArrayTest(parameterized.TestCase):
    @parameterized.parameters(
        (lambda: Weight.from_packed(None, None, format="nvfp4"), "Weight.from_packed: packed is"),
        (lambda: Weight.from_packed("a", "b", format="nvfp4"), "Weight.from_packed: packed is str"),
        (lambda: Weight.from_scaled("a", "b"), "Weight.from_scaled: values is str"),
        (lambda: Weight.from_qarray(None), "Weight.from_qarray: q is NoneType"),
        (lambda: jax_w4a4.quantization_error(jnp.ones((4, 4)), None), "quantization_error: weight"),
    )
    def test_no_array(self, make, message):
        with self.assertRaisesRegex(TypeError, f"jax_w4a4.{message}"):
            make()

    def test_a_scalar_has_no_k(self):
        with self.assertRaisesRegex(ValueError, r"Weight.from_scaled: values are int4\[\]"):
            Weight.from_scaled(jnp.int4(1), jnp.ones((1, 1), jnp.float16))

    def test_static_fields(self):
        w = jax_w4a4.quantize(jnp.ones((32, 32)), rank=0)
        x = jax_w4a4.quantize_activation(jnp.ones((4, 32)), w)
        with self.assertRaisesRegex(TypeError, "jax_w4a4.matmul: lora_smoothed=1"):
            jax_w4a4.matmul(x, w.replace(lora_smoothed=1))
        for dtype in ("int8", []):
            with self.assertRaisesRegex(TypeError, "jax_w4a4.matmul: activation.dtype is"):
                jax_w4a4.matmul(x.replace(dtype=dtype), w)


if __name__ == "__main__":
    absltest.main()
