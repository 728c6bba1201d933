"""`jax_w4a4.flax.linen.Dense` behaves as `flax.linen.Dense` does, on a quantized weight."""

import tempfile

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl.testing import parameterized

import jax_w4a4
from jax_w4a4.flax.linen import Dense, variables_from_dense, variables_from_weight

K, N, RANK = 96, 80, 8
FORMATS = ("nvfp4", "mxfp4", "int4")


def inputs(*leading, dtype=jnp.float32, seed=1):
    return jax.random.normal(jax.random.key(seed), (*leading, K), jnp.float32).astype(dtype)


def dense_params(use_bias=True, seed=0, dtype=jnp.float32):
    """Parameters of a float layer with outlier columns and a real bias."""
    keys = jax.random.split(jax.random.key(seed), 3)
    columns = jnp.exp(jax.random.normal(keys[0], (K, 1))) / K**0.5
    params = {"kernel": (jax.random.normal(keys[1], (K, N)) * columns).astype(dtype)}
    if use_bias:
        params["bias"] = jax.random.normal(keys[2], (N,)).astype(dtype)
    return params


class OutputTest(parameterized.TestCase):
    """The layer is the operator applied to the weight in its variables."""

    @parameterized.product(format=FORMATS, rank=(0, RANK), use_bias=(True, False))
    def test_equals_operator(self, format, rank, use_bias):
        """Conversion transposes the flax kernel once and loses nothing."""
        params = dense_params(use_bias)
        weight = jax_w4a4.quantize(params["kernel"].T, format=format, rank=rank)
        if use_bias:
            weight = weight.replace(bias=params["bias"])
        variables = variables_from_dense(params, format=format, rank=rank)
        x = inputs(5)
        y = Dense(N, use_bias=use_bias, format=format, rank=rank).apply(variables, x)
        np.testing.assert_array_equal(y, jax_w4a4.matmul(x, weight))

    @parameterized.product(format=FORMATS)
    def test_close_to_float_layer(self, format):
        """A transposed kernel, a lost bias or a wrong nibble order would be far off."""
        params = dense_params()
        x = inputs(64)
        expected = flax.linen.Dense(N).apply({"params": params}, x)
        y = Dense(N, format=format, rank=RANK).apply(
            variables_from_dense(params, format=format, rank=RANK), x
        )
        error = jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected)
        self.assertLess(float(error), 0.2)

    def test_auto_mesh_set(self):
        """Variables and an input that were never placed on the mesh."""
        variables, x = variables_from_dense(dense_params(), rank=RANK), inputs(8)
        layer = Dense(N, rank=RANK)
        expected = layer.apply(variables, x)
        devices = len(jax.devices())
        mesh = jax.make_mesh((devices,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.set_mesh(mesh):
            for apply in (layer.apply, jax.jit(layer.apply)):
                np.testing.assert_allclose(apply(variables, x), expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters((), (0,), (3,), (2, 3))
    def test_leading_shapes(self, *leading):
        variables = variables_from_dense(dense_params(), rank=RANK)
        self.assertEqual(
            Dense(N, rank=RANK).apply(variables, inputs(*leading)).shape, (*leading, N)
        )

    @parameterized.product(
        x_dtype=(jnp.float32, jnp.bfloat16),
        dtype=(None, jnp.float32, jnp.bfloat16),
        param_dtype=(jnp.float32, jnp.bfloat16),
    )
    def test_output_dtype_is_flax_s(self, x_dtype, dtype, param_dtype):
        """Swapping the layer in changes no dtype downstream."""
        x = inputs(2, dtype=x_dtype)
        params = dense_params(dtype=param_dtype)
        float_layer = flax.linen.Dense(N, dtype=dtype, param_dtype=param_dtype)
        with jax.numpy_dtype_promotion("standard"):
            expected = jax.eval_shape(float_layer.apply, {"params": params}, x).dtype
        layer = Dense(N, dtype=dtype, param_dtype=param_dtype, rank=0)
        y = jax.eval_shape(layer.apply, variables_from_dense(params, rank=0), x)
        self.assertEqual(y.dtype, expected)


class InitTest(parameterized.TestCase):
    """`init` draws a kernel, quantizes it and sorts the parts into two collections."""

    @parameterized.product(format=FORMATS, rank=(0, RANK), use_bias=(True, False))
    def test_collections(self, format, rank, use_bias):
        layer = Dense(N, format=format, rank=rank, use_bias=use_bias)
        variables = layer.init(jax.random.key(0), inputs(1))
        trained = {"bias"} if use_bias else set()
        trained |= {"lora_down", "lora_up"} if rank else set()
        self.assertEqual(set(variables.get("params", {})), trained)
        weight = variables["w4a4"]["weight"]
        self.assertEqual((weight.shape, weight.format, weight.rank), ((N, K), format, 0))
        abstract = jax.eval_shape(layer.init, jax.random.key(0), inputs(1))
        self.assertEqual(jax.tree.structure(abstract), jax.tree.structure(variables))
        for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(variables), strict=True):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))

    def test_is_the_quantized_kernel(self):
        """Codes, scales and low-rank of one init belong to the kernel of kernel_init."""
        kernels = []

        def kernel_init(key, shape, dtype):
            kernels.append(jax.random.normal(key, shape, dtype))
            return kernels[-1]

        layer = Dense(N, kernel_init=kernel_init, format="int4", rank=RANK, use_bias=False)
        variables = layer.init(jax.random.key(0), inputs(1))
        expected = variables_from_dense({"kernel": kernels[0]}, format="int4", rank=RANK)
        for name in ("lora_down", "lora_up"):
            np.testing.assert_array_equal(variables["params"][name], expected["params"][name])
        np.testing.assert_array_equal(
            variables["w4a4"]["weight"].packed, expected["w4a4"]["weight"].packed
        )

    def test_prepared_weight(self):
        layer = Dense(N, format="mxfp4", rank=RANK)
        variables = layer.init(jax.random.key(0), inputs(1))
        prepared = {**variables, "w4a4": {"weight": variables["w4a4"]["weight"].prepare()}}
        np.testing.assert_array_equal(
            layer.apply(prepared, inputs(7)), layer.apply(variables, inputs(7))
        )

    def test_quantize_kwargs(self):
        """Options of quantize go through."""
        layer = Dense(N, format="int4", rank=0, quantize_kwargs={"block_size": 32})
        weight = layer.init(jax.random.key(0), inputs(1))["w4a4"]["weight"]
        self.assertEqual((weight.block_size, weight.scales.shape), (32, (N, K // 32)))


class Mlp(flax.linen.Module):
    """Two layers with a nonlinearity, as a user would write them."""

    @flax.linen.compact
    def __call__(self, x):
        x = jax.nn.gelu(Dense(48, rank=RANK, lora_dtype=jnp.float32, name="fc1")(x))
        return Dense(N, rank=RANK, lora_dtype=jnp.float32, name="fc2")(x)


class TransformTest(parameterized.TestCase):
    """jit, grad, lifted transforms and checkpoints."""

    def test_fine_tuning(self):
        """Adam on "params" alone lowers the loss; gradients have the shape of "params"."""
        model, x = Mlp(), inputs(32)
        variables = model.init(jax.random.key(0), x)
        params, frozen = variables["params"], variables["w4a4"]
        target = jnp.sin(3.0 * x[:, :N])

        def loss(params):
            y = model.apply({"params": params, "w4a4": frozen}, x)
            return jnp.mean((y - target) ** 2)

        optimizer = optax.adam(1e-2)
        state = optimizer.init(params)

        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params)
            # optax mixes integers and floats.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value, grads

        losses = []
        for _ in range(20):
            params, state, value, grads = step(params, state)
            losses.append(float(value))
        self.assertEqual(jax.tree.structure(grads), jax.tree.structure(params))
        for leaf in jax.tree.leaves(grads):
            self.assertGreater(float(jnp.max(jnp.abs(leaf))), 0.0)
        self.assertLess(losses[-1], 0.8 * losses[0])

    def test_scan_over_layers(self):
        """nn.scan stacks both collections and runs as the layers one by one."""

        class Block(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, x, _):
                return jax.nn.tanh(Dense(K, rank=RANK, name="fc")(x)), None

        stack = flax.linen.scan(
            Block,
            variable_axes={"params": 0, "w4a4": 0},
            split_rngs={"params": True},
            length=3,
        )()
        x = inputs(4)
        variables = stack.init(jax.random.key(0), x, None)
        self.assertEqual(variables["w4a4"]["fc"]["weight"].shape, (3, K, K))
        y, _ = stack.apply(variables, x, None)
        expected = x
        for index in range(3):
            layer = jax.tree.map(lambda leaf, i=index: leaf[i], variables)
            expected, _ = Block().apply(layer, expected, None)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

    @parameterized.product(format=FORMATS, rank=(0, RANK))
    def test_orbax_round_trip(self, format, rank):
        layer = Dense(N, format=format, rank=rank)
        variables = layer.init(jax.random.key(0), inputs(1))
        abstract = jax.eval_shape(layer.init, jax.random.key(0), inputs(1))
        path = f"{self.enterContext(tempfile.TemporaryDirectory())}/layer"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, variables)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(path, abstract)
        x = inputs(3)
        np.testing.assert_array_equal(layer.apply(restored, x), layer.apply(variables, x))

    def test_stacked_kernels(self):
        """Kernels stacked by nn.scan convert in one call."""
        params = [dense_params(seed=seed) for seed in range(2)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        variables = variables_from_dense(stacked, rank=RANK)
        x = inputs(3)
        for index, single in enumerate(params):
            one = jax.tree.map(lambda leaf, i=index: leaf[i], variables)
            expected = variables_from_dense(single, rank=RANK)
            y, y_expected = (Dense(N, rank=RANK).apply(v, x) for v in (one, expected))
            np.testing.assert_allclose(y, y_expected, rtol=0.05, atol=0.05)


class ErrorTest(parameterized.TestCase):
    """Mistakes are named where they are made."""

    def test_missing_collection(self):
        variables = variables_from_dense(dense_params(), rank=RANK)
        with pytest.raises(ValueError, match="no 'w4a4' collection"):
            Dense(N, rank=RANK).apply({"params": variables["params"]}, inputs(1))

    def test_weight_of_another_shape(self):
        weight = jax_w4a4.quantize(jnp.ones((N, K + 32)), format="nvfp4", rank=0)
        with pytest.raises(ValueError, match=r"\(80, 128\).*\(80, 96\)"):
            Dense(N, rank=0, use_bias=False).apply(variables_from_weight(weight), inputs(1))

    def test_low_rank_of_another_rank(self):
        variables = variables_from_dense(dense_params(), rank=RANK)
        with pytest.raises(flax.errors.ScopeParamShapeError):
            Dense(N, rank=RANK + 1).apply(variables, inputs(1))

    def test_partitioned_kernel(self):
        """A sharding of the float kernel fits no leaf of the weight: refused, not dropped."""
        init = flax.linen.with_partitioning(jax.nn.initializers.lecun_normal(), (None, "tp"))
        with pytest.raises(NotImplementedError, match="shard_specs"):
            Dense(N, kernel_init=init).init(jax.random.key(0), inputs(1))

    def test_other_parameters(self):
        with pytest.raises(ValueError, match="scale"):
            variables_from_dense({"kernel": jnp.ones((K, N)), "scale": jnp.ones((N,))})
