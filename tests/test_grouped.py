"""`grouped_matmul`: each group's rows against `matmul` with that group's weight."""

from __future__ import annotations

import functools
import warnings

import cases
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax

from jax_w4a4 import explain, primitives
from jax_w4a4.grouped import group_bounds, grouped_matmul
from jax_w4a4.matmul import matmul

N, K, G = 24, 128, 4
TRAINABLE = ("lora_up", "lora_down", "bias", "channel_scale")
SIZES = {
    "ragged": [3, 0, 5, 1],
    "whole": [0, 0, 11, 0],
    "none": [0, 0, 0, 0],
    "past": [6, 4, 7, 1],  # more than there are rows
    "negative": [4, -2, 3, 0],
    "first_empty": [0, 2, 0, 9],
}
M = 11

jitted = jax.jit(grouped_matmul)


def stack(groups=G, n=N, k=K, format="nvfp4", **options):
    weights = [cases.weight(n, k, format, seed=seed, **options) for seed in range(groups)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


def group(w, g):
    return jax.tree.map(lambda leaf: leaf[g], w)


def looped(x, w, sizes, **options):
    """One product per group; zeros elsewhere."""
    n = w.shape[1]
    y = np.zeros((x.shape[0], n), np.float64)
    first = 0
    for g, size in enumerate(sizes):
        last = min(first + max(size, 0), x.shape[0])
        if last > first:
            got = matmul(x[first:last], group(w, g), **options)
            y[first:last] = np.asarray(got, np.float64)
        first = last
    return y


class ValueTest(parameterized.TestCase):
    @parameterized.product(format=("nvfp4", "mxfp4", "int4"), sizes=tuple(SIZES))
    def test_is_matmul_by_group(self, format, sizes):
        """Every optional part is that of the row's group; rows of no group are zeros."""
        w = stack(format=format)
        x = cases.activation(M, K)
        sizes = SIZES[sizes]
        y = jitted(x, w, jnp.asarray(sizes))
        self.assertLess(cases.error(y, looped(x, w, sizes)), 2e-6)

    def test_prepared_weights_give_the_same_bits(self):
        w = stack(format="mxfp4")
        x, sizes = cases.activation(M, K, dtype="bfloat16"), jnp.asarray(SIZES["ragged"])
        np.testing.assert_array_equal(jitted(x, w.prepare(), sizes), jitted(x, w, sizes))

    @parameterized.parameters(
        dict(full=False, rank=0),
        dict(lora_smoothed=True),
        dict(format="int4", block_size=None),
        dict(format="mxfp4", lora_dtype="float32"),
    )
    def test_parts(self, **options):
        w = stack(**options)
        x = cases.activation(M, K)
        y = jitted(x, w, jnp.asarray(SIZES["ragged"]))
        self.assertLess(cases.error(y, looped(x, w, SIZES["ragged"])), 2e-6)

    @parameterized.parameters(*SIZES)
    def test_rows_are_those_of_ragged_dot(self, sizes):
        """Which row belongs to which group, as lax.ragged_dot has it. It leaves negative sizes
        undefined."""
        if sizes == "negative":
            self.skipTest("undefined there")
        w = stack(full=False, rank=0)
        x = cases.activation(M, K)
        sizes = jnp.asarray(SIZES[sizes], jnp.int32)
        exact = w.dequantize().swapaxes(1, 2)
        want = lax.ragged_dot(x, exact, sizes)
        got = jitted(x, w, sizes)
        np.testing.assert_array_equal(np.asarray(got).any(1), np.asarray(want).any(1))
        if np.asarray(want).any():
            self.assertLess(cases.error(got, want), 0.2)  # quantized activations

    def test_rows_of_no_group_may_be_nan(self):
        w = stack()
        x = cases.activation(M, K).at[9:].set(jnp.nan)
        y = jitted(x, w, jnp.asarray([3, 0, 5, 1]))
        self.assertFalse(np.isnan(y).any())
        self.assertFalse(np.asarray(y[9:]).any())

    def test_neighbours_do_not_matter(self):
        """A row's bits are those it has with another group's rows behind it."""
        w = stack()
        x = cases.activation(M, K)
        y = jitted(x, w, jnp.asarray([3, 0, 5, 1]))
        z = jitted(x.at[3:].set(7.0), w, jnp.asarray([3, 0, 5, 1]))
        np.testing.assert_array_equal(y[:3], z[:3])

    @parameterized.parameters("float32", "bfloat16", "float16")
    def test_dtypes(self, dtype):
        w = stack()
        x = cases.activation(M, K, dtype=dtype)
        sizes = jnp.asarray(SIZES["ragged"])
        self.assertEqual(jitted(x, w, sizes).dtype.name, dtype)
        wide = grouped_matmul(x, w, sizes, preferred_element_type=jnp.float32)
        self.assertEqual(wide.dtype, jnp.float32)
        self.assertLess(cases.error(wide, looped(x.astype("float32"), w, SIZES["ragged"])), 1e-6)

    @parameterized.parameters((1, 1), (300, 2), (40, 40), (5, 0), (0, 3))
    def test_shapes(self, m, groups):
        """One group, more rows than the reference takes at a time, none of either."""
        w = stack(max(groups, 1), n=8, k=64, format="mxfp4")
        w = jax.tree.map(lambda leaf: leaf[:groups], w)
        sizes = [m // max(groups, 1)] * groups
        x = cases.activation(m, 64)
        y = jitted(x, w, jnp.asarray(sizes, jnp.int32))
        self.assertEqual(y.shape, (m, 8))
        if m and groups:
            self.assertLess(cases.error(y, looped(x, w, sizes)), 2e-6)

    @parameterized.parameters("uint8", "int64", "uint32")
    def test_integers(self, dtype):
        w = stack()
        x = cases.activation(M, K)
        sizes = np.asarray(SIZES["ragged"], dtype)
        y = jitted(x, w, jnp.asarray(SIZES["ragged"]))
        np.testing.assert_array_equal(jitted(x, w, sizes), y)

    def test_bounds(self):
        for sizes, want in (
            ([2, 3], [0, 2, 5]),
            ([7, 7], [0, 7, 10]),
            ([2**31 - 1, 2**31 - 1], [0, 10, 10]),
            ([-5, 4], [0, 0, 4]),
        ):
            np.testing.assert_array_equal(group_bounds(jnp.asarray(sizes), 10), want)

    @parameterized.parameters("int4", "uint4", "int8", "uint8", "int16", "uint16")
    def test_bounds_of_narrow_sizes(self, dtype):
        """M need not fit into the dtype of the sizes."""
        bounds = group_bounds(jnp.asarray([7, 0, 3], dtype), 70000)
        np.testing.assert_array_equal(bounds, [0, 7, 7, 10])

    def test_bounds_do_not_wrap(self):
        """Sizes that are cut to M may add up to more than 32 bits hold."""
        for most in (2**20, 2**31 - 1):
            bounds = np.asarray(group_bounds(jnp.full(5000, 2**31 - 1, jnp.int32), most))
            self.assertEqual(bounds[0], 0)
            self.assertTrue((bounds[1:] == most).all())
        sizes = np.full(5000, 300)
        bounds = group_bounds(jnp.asarray(sizes, jnp.int32), 2**20)
        np.testing.assert_array_equal(bounds[1:], np.minimum(np.cumsum(sizes), 2**20))

    def test_wide_sizes_on_the_host(self):
        """numpy's int64 is cut, not wrapped, where x64 is off."""
        w = stack()
        x = cases.activation(M, K)
        y = grouped_matmul(x, w, np.asarray([2, -(2**33), 2**32 + 1, 1]))
        np.testing.assert_array_equal(y, jitted(x, w, jnp.asarray([2, 0, M, 0])))


class TransformationTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.w = stack()
        self.x = cases.activation(M, K)
        self.sizes = jnp.asarray(SIZES["ragged"])

    def test_sizes_are_not_static(self):
        """One compilation for all sizes."""
        f = jax.jit(lambda x, w, s: grouped_matmul(x, w, s))
        for sizes in SIZES.values():
            f(self.x, self.w, jnp.asarray(sizes))
        self.assertEqual(f._cache_size(), 1)

    @parameterized.product(over=("x", "sizes", "w", "x+sizes", "all"))
    def test_vmap(self, over):
        """Equal to a Python loop, whatever is batched."""
        xs = jnp.stack([self.x, 2 * self.x[::-1]])
        sizes = jnp.asarray([SIZES["ragged"], SIZES["first_empty"]])
        ws = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), self.w)
        axes = tuple(
            0 if over == "all" or n in over.split("+") else None for n in ("x", "w", "sizes")
        )
        args = [b if a == 0 else o for a, b, o in zip(
            axes, (xs, ws, sizes), (self.x, self.w, self.sizes), strict=True)]  # fmt: skip
        y = jax.jit(jax.vmap(grouped_matmul, in_axes=axes))(*args)
        for i in range(2):
            one = [
                jax.tree.map(lambda leaf: leaf[i], a) if axis == 0 else a  # noqa: B023
                for axis, a in zip(axes, args, strict=True)
            ]
            np.testing.assert_array_equal(y[i], jitted(*one))

    @parameterized.product(
        format=("nvfp4", "int4"), lora_smoothed=(False, True), sizes=("ragged", "past", "none")
    )
    def test_grad(self, format, lora_smoothed, sizes):
        """Gradients of the loop over groups."""
        w = stack(format=format, lora_dtype="float32", lora_smoothed=lora_smoothed)
        sizes = SIZES[sizes]
        target = cases.activation(M, N, seed=3)
        leaves = {name: getattr(w, name) for name in TRAINABLE}

        def loss(x, leaves):
            y = grouped_matmul(x, w.replace(**leaves), jnp.asarray(sizes))
            return jnp.sum(y * target)

        def reference(x, leaves):
            full = w.replace(**leaves)
            total, first = jnp.float32(0), 0
            for g, size in enumerate(sizes):
                last = min(first + size, M)
                if last > first:
                    total += jnp.sum(matmul(x[first:last], group(full, g)) * target[first:last])
                first = last
            return total

        got = jax.jit(jax.grad(loss, argnums=(0, 1)))(self.x, leaves)
        want = jax.jit(jax.grad(reference, argnums=(0, 1)))(self.x, leaves)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            self.assertLess(np.abs(np.asarray(a) - np.asarray(b)).max(), 1e-4)

    def test_grad_ignores_rows_of_no_group(self):
        x = self.x.at[9:].set(jnp.nan)
        target = cases.activation(M, N, seed=3)
        f = jax.jit(jax.grad(
            lambda x, w: jnp.sum(grouped_matmul(x, w, self.sizes) * target),
            argnums=(0, 1), allow_int=True))  # fmt: skip
        dx, dw = f(x, self.w)
        self.assertFalse(np.asarray(dx[9:]).any())
        for name in TRAINABLE:
            self.assertFalse(np.isnan(np.asarray(getattr(dw, name), np.float32)).any(), name)

    def test_remat_and_scan(self):
        def step(carry, s):
            return carry, jax.checkpoint(grouped_matmul)(self.x, self.w, s)

        sizes = jnp.asarray([SIZES["ragged"], SIZES["past"]])
        _, y = jax.jit(lambda s: lax.scan(step, 0, s))(sizes)
        for i in range(2):
            np.testing.assert_array_equal(y[i], jitted(self.x, self.w, sizes[i]))

    def test_abstract_evaluation(self):
        y = jax.eval_shape(
            functools.partial(grouped_matmul, preferred_element_type=jnp.bfloat16),
            jax.ShapeDtypeStruct((M, K), jnp.float32), self.w, self.sizes,
        )  # fmt: skip
        self.assertEqual((y.shape, y.dtype.name), ((M, N), "bfloat16"))

    @parameterized.parameters(False, True)
    def test_export(self, symbolic):
        """With fixed and with symbolic M."""
        m = jax.export.symbolic_shape("m")[0] if symbolic else M
        shape = jax.ShapeDtypeStruct((m, K), jnp.float32)
        exported = jax.export.export(jax.jit(grouped_matmul))(shape, self.w, self.sizes)
        again = jax.export.deserialize(exported.serialize())
        y = again.call(self.x, self.w, self.sizes)
        self.assertLess(cases.error(y, jitted(self.x, self.w, self.sizes)), 1e-6)


def cuda_text(f, *args):
    """StableHLO of a program lowered for CUDA, whatever this machine has."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


class BatchedWeightsTest(parameterized.TestCase):
    """vmap of `matmul` over its weight is one grouped call where a kernel takes it."""

    def setUp(self):
        super().setUp()
        self.w = stack(rank=16)
        self.x = cases.activation(G, 5, K, dtype="bfloat16")

    def primitives(self, f, *args):
        return cases.primitives_in(jax.make_jaxpr(f)(*args))

    def test_one_call(self):
        f = jax.vmap(matmul)
        self.assertEqual(self.primitives(f, self.x, self.w), ["grouped"])
        (call,) = explain(f, self.x, self.w).calls
        self.assertEqual((call.kind, call.count, call.m), ("grouped", 1, 5 * G))
        self.assertEqual(call.problem.groups, G)

    def test_values(self):
        y = jax.jit(jax.vmap(matmul))(self.x, self.w)
        for g in range(G):
            want = jax.jit(matmul)(self.x[g], group(self.w, g))
            self.assertLess(cases.error(y[g], want), 1e-3)

    def test_shared_x_and_shared_leaves(self):
        bias = self.w.bias[0]
        y = jax.jit(jax.vmap(matmul, in_axes=(None, self.w.replace(
            **{f: 0 for f in _fields(self.w)} | {"bias": None}))))(
            self.x[0], self.w.replace(bias=bias))  # fmt: skip
        for g in range(G):
            want = matmul(self.x[0], group(self.w, g).replace(bias=bias))
            self.assertLess(cases.error(y[g], want), 1e-3)

    def test_nested(self):
        """x batched as well, inside or outside, and the weight twice."""
        both = jax.vmap(jax.vmap(matmul, in_axes=(0, None)))
        self.assertEqual(self.primitives(both, self.x, self.w), ["grouped"])
        y = jax.jit(both)(self.x, self.w)
        outer = jax.vmap(jax.vmap(matmul), in_axes=(0, None))
        xs = jnp.stack([self.x, -self.x])
        self.assertEqual(self.primitives(outer, xs, self.w), ["grouped"])
        z = jax.jit(outer)(xs, self.w)
        ws = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), self.w)
        x2 = self.x.reshape(2, 2, 5, K)
        twice = jax.vmap(jax.vmap(matmul))
        self.assertEqual(self.primitives(twice, x2, ws), ["grouped"])
        u = jax.jit(twice)(x2, ws)
        for g in range(G):
            want = matmul(self.x[g], group(self.w, g))
            self.assertLess(cases.error(y[g], want), 1e-3)
            self.assertLess(cases.error(z[0, g], want), 1e-3)
            self.assertLess(cases.error(u.reshape(y.shape)[g], want), 1e-3)

    def test_grad(self):
        f = jax.jit(jax.vmap(jax.grad(lambda x, w: matmul(x, w).astype(jnp.float32).sum())))
        dx = f(self.x, self.w)
        for g in range(G):
            want = jax.grad(lambda x: matmul(x, group(self.w, g)).astype(jnp.float32).sum())(  # noqa: B023
                self.x[g]
            )
            self.assertLess(cases.error(dx[g], want), 1e-2)

    @parameterized.parameters(
        dict(implementation="xla"), dict(preferred_element_type="float32"), dict(kernel=True)
    )
    def test_others_loop(self, kernel=False, **options):
        """What the grouped kernel does not take runs as before: a loop over the weights."""
        if kernel:
            options["implementation"] = "sm90_v1"
        f = jax.vmap(functools.partial(matmul, **options))
        self.assertEqual(self.primitives(f, self.x, self.w), ["matmul"])

    @parameterized.parameters(None, "xla")
    def test_nothing(self, implementation):
        """No weights, no rows, no columns, of one batch or of two."""
        f = functools.partial(matmul, implementation=implementation)
        w, x = (jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), v) for v in (self.w, self.x))
        by_column = ("packed", "scales", "lora_up", "channel_scale", "bias")
        narrow = w.replace(**{name: getattr(w, name)[:, :, :0] for name in by_column})
        one = jax.vmap(f)(self.x[:0], jax.tree.map(lambda leaf: leaf[:0], self.w))
        self.assertEqual(one.shape, (0, 5, N))
        for operands, shape in (
            ((x[:0], jax.tree.map(lambda leaf: leaf[:0], w)), (0, G, 5, N)),
            ((x[:, :0], jax.tree.map(lambda leaf: leaf[:, :0], w)), (3, 0, 5, N)),
            ((x[:, :, :0], w), (3, G, 0, N)),
            ((x, narrow), (3, G, 5, 0)),
        ):
            self.assertEqual(jax.vmap(jax.vmap(f))(*operands).shape, shape)

    def test_codes_that_are_shared_are_not_copied(self):
        """A batch of biases alone: no copies of the codes for a grouped call."""
        w = group(self.w, 0)
        f = jax.vmap(lambda bias: matmul(self.x[0], w.replace(bias=bias)))
        self.assertEqual(self.primitives(f, self.w.bias), ["matmul"])

    def test_lowered_for_cuda(self):
        text = cuda_text(jax.vmap(matmul), self.x, self.w)
        self.assertEqual(text.count("custom_call @jax_w4a4.grouped.v2"), 1)
        self.assertNotIn("jax_w4a4.matmul", text)


def _fields(w):
    return [name for name in ("packed", "scales", "global_scale", "act_global_scale", "smooth",
                              "lora_down", "lora_up", "channel_scale")
            if getattr(w, name) is not None]  # fmt: skip


class LoweringTest(parameterized.TestCase):
    def test_one_call(self):
        """One FFI call with the planner's attributes; other platforms have the reference."""
        w = stack(format="mxfp4", rank=16)
        x = cases.activation(M, K, dtype="bfloat16")
        sizes = jnp.asarray(SIZES["ragged"])
        text = cuda_text(grouped_matmul, x, w, sizes)
        self.assertEqual(text.count("custom_call @jax_w4a4.grouped.v2"), 1)
        call = next(line for line in text.splitlines() if "@jax_w4a4.grouped.v2" in line)
        (found,) = explain(grouped_matmul, x, w, sizes).calls
        for name, value in found.plan.ffi_attrs().items():
            self.assertIn(f"{name} = {value} :", call)
        # y, then what the plan says the launches leave for each other.
        results = call.rpartition("->")[2]
        self.assertEqual(results.count("tensor<"), 1 + len(found.plan.workspace(M, "grouped")))

    def test_both_platforms(self):
        """One program for CPU and CUDA."""
        w, x = stack(rank=16), cases.activation(M, K, dtype="bfloat16")
        lowered = jax.jit(grouped_matmul).trace(x, w, jnp.ones(G, int)).lower(
            lowering_platforms=("cpu", "cuda")
        )  # fmt: skip
        self.assertIn("jax_w4a4.grouped.v2", lowered.as_text())

    def test_no_kernel_is_said(self):
        """What the kernel does not take: the reference with one warning, or an error."""
        w = stack(format="int4", rank=16)
        x = cases.activation(M, K, dtype="bfloat16")
        sizes = jnp.ones(G, int)
        exact = functools.partial(grouped_matmul, precision="highest")
        primitives._warned.clear()
        with self.assertWarnsRegex(
            primitives.FallbackWarning, r"^jax_w4a4\.grouped_matmul: .*int4 in blocks of 64 with pr"
        ):
            text = cuda_text(exact, x, w, sizes)
        self.assertNotIn("jax_w4a4.grouped.v2", text)
        with self.assertRaisesRegex(NotImplementedError, "'highest' is not built for it"):
            exact(x, w, sizes, implementation="cuda")

    def test_xla_is_asked_for(self):
        """implementation='xla' lowers for CUDA without a kernel and without a warning."""
        f = jax.jit(functools.partial(grouped_matmul, implementation="xla"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            text = f.trace(cases.activation(M, K), stack(), jnp.ones(G, int)).lower(
                lowering_platforms=("cuda",)
            ).as_text()  # fmt: skip
        self.assertNotIn("jax_w4a4.grouped", text)

    @parameterized.parameters("cuda", "sm90_grouped")
    def test_gradients_of_a_kernel_that_is_asked_for(self, implementation):
        """The product that the gradient of channel_scale needs is none that the kernel stores."""
        w = stack(format="mxfp4", rank=16)
        x = cases.activation(M, K, dtype="bfloat16")

        def loss(x, channel_scale):
            v = w.replace(channel_scale=channel_scale)
            y = grouped_matmul(x, v, jnp.ones(G, int), implementation=implementation)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        cuda_text(jax.grad(loss), x, w.channel_scale)
        primitives._warned.clear()
        with self.assertWarnsRegex(primitives.FallbackWarning, "the result is float32"):
            text = cuda_text(jax.grad(loss, argnums=1), x, w.channel_scale)
        self.assertEqual(text.count("custom_call @jax_w4a4.grouped.v2"), 1)

    def test_cuda_on_cpu(self):
        if any(device.platform != "cpu" for device in jax.devices()):
            self.skipTest("there is a GPU")
        w = stack(format="mxfp4", rank=16)
        x = cases.activation(M, K, dtype="bfloat16")
        with self.assertRaisesRegex(NotImplementedError, r"^jax_w4a4\."):
            jitted_cuda = jax.jit(functools.partial(grouped_matmul, implementation="cuda"))
            jitted_cuda(x, w, jnp.ones(G, int))


class ErrorTest(parameterized.TestCase):
    def call(self, **changes):
        given = {"x": cases.activation(M, K), "w": stack(), "group_sizes": jnp.ones(G, int)}
        return grouped_matmul(**given | changes)

    @parameterized.parameters(
        (dict(w=3), TypeError, "w is int; expected a stacked jax_w4a4.Weight"),
        (dict(w=cases.weight(N, K)), ValueError, r"the weight has shape \(24, 128\); expected \(G"),
        (dict(x=[1.0]), TypeError, "x is list; expected an array"),
        (dict(x=jnp.ones((M, K), int)), TypeError, "x has dtype int32"),
        (dict(x=jnp.ones((M, K + 1))), ValueError, r"x is float32\[11,129\] .* K=128"),
        (dict(x=jnp.ones((2, M, K))), ValueError, r"x is float32\[2,11,128\]; expected \(M, K\)"),
        (dict(group_sizes=[1, 2]), TypeError, "group_sizes is list; expected an integer"),
        (
            dict(group_sizes=jax.ShapeDtypeStruct((G,), "int32")),
            TypeError,
            "group_sizes is ShapeDtypeStruct; expected an integer array",
        ),
        (dict(group_sizes=jnp.ones(G)), TypeError, r"group_sizes is float32\[4\]; expected integ"),
        (dict(group_sizes=jnp.ones(G, bool)), TypeError, r"group_sizes is bool\[4\]"),
        (dict(group_sizes=jnp.ones(3, int)), ValueError, r"int32\[3\] and the weight has 4 groups"),
        (dict(precision="low"), ValueError, "precision='low'; expected"),
        (dict(implementation="cpu"), ValueError, "implementation='cpu'; expected"),
        (dict(preferred_element_type="int8"), TypeError, "preferred_element_type"),
    )
    def test_message(self, changes, error, message):
        with self.assertRaisesRegex(error, rf"^jax_w4a4\.grouped_matmul: .*{message}"):
            self.call(**changes)

    def test_activation(self):
        act = primitives.Activation(
            jnp.zeros((M, K // 2), jnp.uint8), jnp.zeros((M, K // 16), jnp.float8_e4m3fn),
            format="nvfp4", k=K, block_size=16,
        )  # fmt: skip
        with self.assertRaisesRegex(TypeError, r"^jax_w4a4\.grouped_matmul: x is a quantized"):
            self.call(x=act)


if __name__ == "__main__":
    absltest.main()
