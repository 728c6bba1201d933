"""`jax_w4a4.flax.nnx.Linear` behaves as `flax.nnx.Linear` does, on a quantized weight."""

import functools
import subprocess
import sys
import tempfile
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl.testing import parameterized
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_w4a4
from jax_w4a4.flax.nnx import Linear, W4A4Weight

K, N, RANK = 96, 80, 8
FORMATS = ("nvfp4", "mxfp4", "int4")


def dense(use_bias=True, seed=0, **kwargs):
    """A float layer whose weight and bias look like a trained one's: outlier columns, real bias."""
    rngs = nnx.Rngs(seed)
    layer = nnx.Linear(K, N, use_bias=use_bias, rngs=rngs, **kwargs)
    columns = jnp.exp(jax.random.normal(rngs.params(), (K, 1))).astype(layer.param_dtype)
    layer.kernel[...] = layer.kernel[...] * columns
    if use_bias:
        layer.bias[...] = jax.random.normal(rngs.params(), (N,)).astype(layer.param_dtype)
    return layer


def inputs(*leading, dtype=jnp.float32, seed=1):
    return jax.random.normal(jax.random.key(seed), (*leading, K), jnp.float32).astype(dtype)


def assert_trees_equal(a, b):
    """Same structure and, leaf by leaf, same dtype and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


class OutputTest(parameterized.TestCase):
    """The layer is the operator applied to the weight it holds, with flax's shapes and dtypes."""

    @parameterized.product(format=FORMATS, rank=(0, RANK), use_bias=(True, False))
    def test_equals_operator(self, format, rank, use_bias):
        """Taking the weight apart into variables and together again loses nothing."""
        float_layer = dense(use_bias)
        weight = jax_w4a4.quantize(float_layer.kernel[...].T, format=format, rank=rank)
        if use_bias:
            weight = weight.replace(bias=float_layer.bias[...])
        layer = Linear.from_linear(float_layer, format=format, rank=rank)
        assert_trees_equal(layer.as_weight(), weight)
        x = inputs(5)
        np.testing.assert_array_equal(layer(x), jax_w4a4.matmul(x, weight))

    @parameterized.product(format=FORMATS)
    def test_close_to_float_layer(self, format):
        """A transposed kernel, a lost bias or a wrong nibble order would be far off."""
        float_layer = dense()
        layer = Linear.from_linear(float_layer, format=format, rank=RANK)
        x = inputs(64)
        expected = float_layer(x)
        error = jnp.linalg.norm(layer(x) - expected) / jnp.linalg.norm(expected)
        self.assertLess(float(error), 0.2)

    def test_smoothing_from_calibration(self):
        """`act_amax` reaches the weight and helps where one input channel dominates."""
        float_layer = dense()
        x = inputs(64) * jnp.ones((K,)).at[3].set(60.0)[None, :]
        expected = float_layer(x)
        amax = jnp.max(jnp.abs(x), axis=0)
        plain = Linear.from_linear(float_layer, format="nvfp4", rank=0)
        smooth = Linear.from_linear(float_layer, format="nvfp4", rank=0, act_amax=amax)
        self.assertIsNone(plain.as_weight().smooth)
        self.assertEqual(smooth.as_weight().smooth.shape, (K,))
        error = [float(jnp.linalg.norm(layer(x) - expected)) for layer in (plain, smooth)]
        self.assertLess(error[1], error[0])

    @parameterized.parameters((), (0,), (1,), (3,), (2, 3), (2, 1, 2))
    def test_leading_shapes(self, *leading):
        """Any number of leading dimensions, none and empty included."""
        layer = Linear.from_linear(dense(), rank=RANK)
        self.assertEqual(layer(inputs(*leading)).shape, (*leading, N))

    @parameterized.product(
        x_dtype=(jnp.float32, jnp.bfloat16),
        dtype=(None, jnp.float32, jnp.bfloat16),
        param_dtype=(jnp.float32, jnp.bfloat16),
        preferred=(None, jnp.float32),
    )
    def test_output_dtype_is_flax_s(self, x_dtype, dtype, param_dtype, preferred):
        """Swapping the layer in changes no dtype downstream."""
        float_layer = dense(
            dtype=dtype,
            param_dtype=param_dtype,
            preferred_element_type=preferred,
            use_bias=False,
        )
        x = inputs(2, dtype=x_dtype)
        with jax.numpy_dtype_promotion("standard"):
            expected = jax.eval_shape(float_layer, x).dtype
        layer = Linear.from_linear(float_layer, rank=0)
        self.assertEqual(jax.eval_shape(layer, x).dtype, expected)

    def test_shared_activation(self):
        """Layers with equal smoothing and lora_down can share one quantized activation."""
        layer = Linear.from_linear(dense(), rank=RANK)
        x = inputs(7)
        activation = layer.quantize_activation(x)
        self.assertIsInstance(activation, jax_w4a4.Activation)
        np.testing.assert_array_equal(layer(activation), layer(x))

    def test_prepared_weight(self):
        """The same layer with the weight as the kernels read it fastest."""
        layer = Linear.from_linear(dense(), format="mxfp4", rank=RANK)
        prepared = Linear.from_weight(layer.as_weight().prepare())
        self.assertEqual(prepared.as_weight().sign_order, "sorted")
        np.testing.assert_array_equal(prepared(inputs(7)), layer(inputs(7)))

    def test_drawn_from_rngs(self):
        """Without a float layer the kernel comes from kernel_init and is then quantized."""
        kernels = []

        def kernel_init(key, shape, dtype):
            kernels.append(jax.random.normal(key, shape, dtype))
            return kernels[-1]

        layer = Linear(K, N, rngs=nnx.Rngs(0), kernel_init=kernel_init, format="int4", rank=RANK)
        self.assertEqual(kernels[0].shape, (K, N))
        weight = jax_w4a4.quantize(kernels[0].T, format="int4", rank=RANK)
        np.testing.assert_array_equal(layer.as_weight().packed, weight.packed)
        np.testing.assert_array_equal(layer.bias[...], np.zeros((N,), np.float32))


class TransformTest(parameterized.TestCase):
    """NNX transforms see a module like any other."""

    @parameterized.product(format=FORMATS, rank=(0, RANK))
    def test_jit_split_merge_clone(self, format, rank):
        layer = Linear.from_linear(dense(), format=format, rank=rank)
        x = inputs(6)
        expected = nnx.jit(lambda layer, x: layer(x))(layer, x)
        np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
        merged = nnx.merge(*nnx.split(layer))
        assert_trees_equal(nnx.state(merged), nnx.state(layer))
        np.testing.assert_array_equal(nnx.clone(layer)(x), layer(x))

    @parameterized.product(format=FORMATS)
    def test_eval_shape(self, format):
        """An abstract layer has the shapes and dtypes of a real one, without any compute."""

        def create():
            return Linear(K, N, rngs=nnx.Rngs(0), format=format, rank=RANK)

        abstract, real = nnx.state(nnx.eval_shape(create)), nnx.state(create())
        self.assertEqual(jax.tree.structure(abstract), jax.tree.structure(real))
        for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
            self.assertIsInstance(a, jax.ShapeDtypeStruct)
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))

    def test_stacked_layers_scan(self):
        """Layers made by nnx.vmap and run by nnx.scan equal the same layers one by one."""

        def create(key):
            return Linear(K, K, rngs=nnx.Rngs(key), format="nvfp4", rank=RANK)

        keys = jax.random.split(jax.random.key(3), 3)
        stacked = nnx.vmap(create)(keys)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return jax.nn.tanh(layer(x))

        x = inputs(4)
        expected = x
        for index in range(3):
            graphdef, state = nnx.split(stacked)
            layer = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=index: leaf[i], state))
            expected = jax.nn.tanh(layer(expected))
        np.testing.assert_allclose(run(x, stacked), expected, rtol=1e-5, atol=1e-5)

    def test_sharded_over_outputs(self):
        """A weight placed by shard_specs stays sharded and gives the same numbers."""
        mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
        weight = Linear.from_linear(dense(), rank=RANK).as_weight()
        shardings = jax.tree.map(
            functools.partial(NamedSharding, mesh),
            weight.shard_specs("tp"),
            is_leaf=lambda leaf: isinstance(leaf, P),
        )
        layer = Linear.from_weight(jax.device_put(weight, shardings))
        x = inputs(8)
        y = nnx.jit(lambda layer, x: layer(x))(layer, x)
        self.assertEqual(y.sharding.spec, P(None, "tp"))
        np.testing.assert_allclose(y, jax_w4a4.matmul(x, weight), rtol=1e-5, atol=1e-5)

    def test_auto_mesh_set(self):
        """A layer and an input that were never placed, made outside of the mesh or under it."""
        mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
        x = inputs(8)
        whole = Linear.from_linear(dense(), rank=RANK)
        expected = whole(x)

        def loss(layer):
            return jnp.sum(layer(x) ** 2)

        gradients = nnx.jit(nnx.grad(loss))(whole)
        with jax.set_mesh(mesh):
            for layer in (whole, Linear.from_linear(dense(), rank=RANK)):
                for call in (lambda layer, x: layer(x), nnx.jit(lambda layer, x: layer(x))):
                    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)
            got = nnx.jit(nnx.grad(loss))(whole)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    def test_from_weight_refuses(self):
        """Stacked weights and what is no weight."""
        weight = Linear.from_linear(dense(), rank=RANK).as_weight()
        stacked = jax.tree.map(lambda a: a[None], weight)
        with self.assertRaisesRegex(ValueError, r"^jax_w4a4\..*from_weight: the weight is stacked"):
            Linear.from_weight(stacked)
        with self.assertRaisesRegex(TypeError, r"^jax_w4a4\..*from_weight: got .*Array"):
            Linear.from_weight(weight.packed)

    def test_out_sharding(self):
        """On an explicit mesh the result has the sharding asked for."""
        mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))
        layer = Linear.from_linear(dense(), rank=RANK)
        x = inputs(8)
        expected = layer(x)
        with jax.set_mesh(mesh):
            x = jax.device_put(x, P("tp", None))
            state = jax.device_put(nnx.state(layer), P())
            layer = nnx.merge(nnx.graphdef(layer), state)
            y = jax.jit(lambda x: layer(x, out_sharding=P(None, "tp")))(x)
            self.assertEqual(jax.typeof(y).sharding.spec, P(None, "tp"))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


class TrainingTest(parameterized.TestCase):
    """Gradients and optimisers touch lora_down, lora_up and bias, never codes and scales."""

    def test_grad_is_of_params_only(self):
        layer = Linear.from_linear(dense(), rank=RANK, lora_dtype=jnp.float32)
        x, target = inputs(16), jax.random.normal(jax.random.key(5), (16, N))

        def loss(layer):
            return jnp.sum(layer(x) * target)

        grads = nnx.grad(loss)(layer)
        self.assertEqual(set(grads), {"bias", "lora_down", "lora_up"})
        # d/d bias, d/d lora_up, d/d lora_down of sum(y * target), written out.
        np.testing.assert_allclose(grads["bias"][...], jnp.sum(target, axis=0), rtol=1e-4)
        down, up = layer.lora_down[...], layer.lora_up[...]
        np.testing.assert_allclose(
            grads["lora_up"][...], target.T @ (x @ down), rtol=1e-3, atol=1e-3
        )
        np.testing.assert_allclose(
            grads["lora_down"][...], x.T @ (target @ up), rtol=1e-3, atol=1e-3
        )

    def test_fine_tuning_step(self):
        """Adam on nnx.Param lowers the loss and leaves the quantized part bit for bit alone."""
        layer = Linear.from_linear(dense(), format="int4", rank=RANK, lora_dtype=jnp.float32)
        x = inputs(32)
        target = dense(seed=9)(x)
        frozen = jax.tree.map(jnp.copy, layer.weight.get_value())
        optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer):
            value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(layer)
            # optax mixes integers and floats.
            with jax.numpy_dtype_promotion("standard"):
                optimizer.update(layer, grads)
            return value

        losses = [float(step(layer, optimizer)) for _ in range(20)]
        self.assertLess(losses[-1], 0.8 * losses[0])
        assert_trees_equal(layer.weight.get_value(), frozen)

    def test_filters(self):
        """The quantized part has a variable type of its own."""
        layer = Linear.from_linear(dense(), rank=RANK)
        _, frozen, params = nnx.split(layer, W4A4Weight, nnx.Param)
        self.assertEqual(set(frozen), {"weight"})
        self.assertEqual(set(params), {"bias", "lora_down", "lora_up"})


class CheckpointTest(parameterized.TestCase):
    """Orbax stores every leaf; nothing in the tree has a dtype it refuses."""

    @parameterized.product(format=FORMATS, rank=(0, RANK))
    def test_round_trip(self, format, rank):
        layer = Linear.from_linear(
            dense(), format=format, rank=rank, act_amax=jnp.linspace(0.5, 4.0, K)
        )
        abstract = nnx.eval_shape(lambda: nnx.merge(*nnx.split(layer)))
        directory = self.enterContext(tempfile.TemporaryDirectory())
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{directory}/layer", nnx.state(layer))
            checkpointer.wait_until_finished()
            state = checkpointer.restore(f"{directory}/layer", nnx.state(abstract))
        restored = nnx.merge(nnx.graphdef(abstract), state)
        assert_trees_equal(nnx.state(restored), nnx.state(layer))
        x = inputs(3)
        np.testing.assert_array_equal(restored(x), layer(x))


class ErrorTest(parameterized.TestCase):
    """Mistakes are named where they are made."""

    def test_needs_rngs_or_weight(self):
        with pytest.raises(ValueError, match="neither rngs nor weight"):
            Linear(K, N)

    def test_weight_of_another_shape(self):
        weight = jax_w4a4.quantize(jnp.ones((N, K)), format="nvfp4", rank=0)
        with pytest.raises(ValueError, match=r"\(80, 96\).*\(96, 80\)"):
            Linear(N, K, weight=weight)

    def test_unknown_format(self):
        with pytest.raises(ValueError, match="nf4"):
            Linear(K, N, rngs=nnx.Rngs(0), format="nf4")

    def test_sharding_metadata(self):
        """A sharding of the float kernel fits no leaf of the weight: refused, not dropped."""
        with pytest.raises(NotImplementedError, match="shard_specs"):
            Linear(K, N, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": (None, "tp")})
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
        with pytest.raises(NotImplementedError, match="shard_specs"):
            Linear(K, N, rngs=nnx.Rngs(0), kernel_init=init)

    def test_from_linear_rejects(self):
        with pytest.raises(TypeError, match="LayerNorm"):
            Linear.from_linear(nnx.LayerNorm(K, rngs=nnx.Rngs(0)))
        odd = dense(dot_general=functools.partial(jax.lax.dot_general))
        with pytest.raises(NotImplementedError, match="dot_general"):
            Linear.from_linear(odd)

    def test_without_flax(self):
        """The package imports without flax; the layers say what to install."""
        code = """
            import sys
            sys.modules["flax"] = None
            import jax_w4a4
            try:
                import jax_w4a4.flax
            except ImportError as error:
                print(error)
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertIn('pip install "jax_w4a4[flax]"', result.stdout)
