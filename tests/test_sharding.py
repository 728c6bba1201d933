"""The operator over meshes of four devices: values, plans, and every collective counted."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import unittest
import warnings
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_w4a4 import plan, primitives, sharding
from jax_w4a4.grouped import grouped_matmul
from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.weight import Weight

M, N, K = 8, 32, 256
TRAINABLE = ("lora_up", "lora_down", "bias", "channel_scale")

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    r"|ragged-all-to-all)(?:-start)?\("
)

# Where x and the weight live: spec of x, (mesh axis, dimension) of the weight, collectives of the
# forward call, and the (M, N, K) that one device multiplies.
LAYOUTS = {
    "replicated": (P(), None, {}, (8, 32, 256)),
    "data": (P("data"), None, {}, (4, 32, 256)),
    "n": (P(), ("model", "n"), {}, (8, 16, 256)),
    "data_n": (P("data"), ("model", "n"), {}, (4, 16, 256)),
    "n_both": (P(), (("data", "model"), "n"), {}, (8, 8, 256)),
    "k": (P(None, "model"), ("model", "k"), {"all-reduce": 1}, (8, 32, 128)),
    "data_k": (P("data", "model"), ("model", "k"), {"all-reduce": 1}, (4, 32, 128)),
    "k_both": (
        P(None, ("data", "model")),
        (("data", "model"), "k"),
        {"all-reduce": 1},
        (8, 32, 64),
    ),
    # One side whole: it is cut locally.
    "k_of_w": (P(), ("model", "k"), {"all-reduce": 1}, (8, 32, 128)),
    "k_of_x": (P(None, "model"), None, {"all-reduce": 1}, (8, 32, 128)),
}


def setUpModule():
    if jax.device_count() < 4:
        raise unittest.SkipTest("needs four devices; JAX_PLATFORMS=cpu has them")


def census(compiled):
    """Collectives of a compiled program."""
    return dict(collections.Counter(_COLLECTIVE.findall(compiled.as_text())))


def make_mesh(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def place(tree, mesh, specs):
    return jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs)


def place_weight(w, mesh, where):
    if where is None:
        return place(w, mesh, jax.tree.map(lambda _: P(), w))
    return place(w, mesh, w.shard_specs(*where))


def context(kind, mesh):
    return jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext()


def trainable(w):
    return {name: getattr(w, name) for name in TRAINABLE}


def loss(x, leaves, w, target):
    return jnp.sum(matmul(x, w.replace(**leaves)) * target)


BOTH = ("auto", AxisType.Auto), ("explicit", AxisType.Explicit)


def layouts(names=tuple(LAYOUTS)):
    return parameterized.named_parameters(
        (f"{label}_{name}", kind, name) for label, kind in BOTH for name in names
    )


class MatmulTest(parameterized.TestCase):
    """Auto and explicit meshes: the right values with the fewest collectives."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.w = cases.weight(N, K)
        cls.x = cases.activation(M, K)
        cls.y = jax.jit(matmul)(cls.x, cls.w)
        cls.target = cases.activation(M, N, seed=3)
        cls.grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(
            cls.x, trainable(cls.w), cls.w, cls.target
        )

    @layouts()
    def test_forward(self, kind, name):
        x_spec, where, collectives, local = LAYOUTS[name]
        mesh = make_mesh(kind)
        with context(kind, mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, x_spec))
            w = place_weight(self.w, mesh, where)
            # A function of its own, so that nothing is cached and the plan is recorded.
            f = jax.jit(lambda x, w: matmul(x, w))
            sharding_of = f.trace(x, w)
            with plan.recording() as plans:
                compiled = sharding_of.lower().compile()
            self.assertEqual(census(compiled), collectives)
            y = f(x, w)
            eager = matmul(x, w)
        # K parts round x @ lora_down to bfloat16 one by one.
        self.assertLess(cases.error(y, self.y), 1e-3 if collectives else 1e-6)
        np.testing.assert_array_equal(y, eager)
        if kind == AxisType.Auto and name != "replicated":
            shapes = {(p.problem.m, p.problem.n, p.problem.k_pad) for p in plans}
            self.assertEqual(shapes, {local})
        elif kind == AxisType.Explicit:
            found = _plans(sharding_of.jaxpr)
            shapes = {(p.problem.m, p.problem.n, p.problem.k_pad) for p in found}
            self.assertEqual(shapes, {local})

    @parameterized.named_parameters(
        # Auto: sums over devices are placed by the compiler. Explicit: one per sharded gradient,
        # combined where alike. In words: dx needs a sum under n, the weight's leaves one each
        # under data; no gather anywhere.
        ("auto_data", AxisType.Auto, "data", 1),
        ("auto_n", AxisType.Auto, "n", 1),
        ("auto_data_n", AxisType.Auto, "data_n", 2),
        ("auto_k", AxisType.Auto, "k", 1),
        ("auto_data_k", AxisType.Auto, "data_k", 2),
        ("explicit_data", AxisType.Explicit, "data", 1),
        ("explicit_n", AxisType.Explicit, "n", 1),
        ("explicit_data_n", AxisType.Explicit, "data_n", 3),
        ("explicit_k", AxisType.Explicit, "k", 2),
        ("explicit_data_k", AxisType.Explicit, "data_k", 3),
    )
    def test_gradients(self, kind, name, reduces):
        """Gradients equal those of one device; all-reduces only, and how many at most."""
        x_spec, where, _, _ = LAYOUTS[name]
        mesh = make_mesh(kind)
        with context(kind, mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, x_spec))
            w = place_weight(self.w, mesh, where)
            compiled = (
                jax.jit(jax.grad(loss, argnums=(0, 1)))
                .lower(x, trainable(w), w, self.target)
                .compile()
            )
            dx, d = compiled(x, trainable(w), w, self.target)
        found = census(compiled)
        self.assertEqual(set(found), {"all-reduce"})
        self.assertLessEqual(found["all-reduce"], reduces)
        self.assertEqual(_axes(dx), _axes(x))
        self.assertLess(cases.error(dx, self.grads[0]), 1e-5)
        for leaf in TRAINABLE:
            # Explicit: gradients of bfloat16 leaves are summed over devices in bfloat16.
            tolerance = 6e-3 if leaf.startswith("lora") else 1e-5
            self.assertLess(cases.error(d[leaf], self.grads[1][leaf]), tolerance, leaf)

    @parameterized.named_parameters(*BOTH)
    def test_gradient_of_x_alone(self, kind):
        """K sharded: dx stays with its part of K, without any communication."""
        mesh = make_mesh(kind)
        with context(kind, mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, P("data", "model")))
            w = place_weight(self.w, mesh, ("model", "k"))
            f = jax.jit(jax.grad(lambda x, w: loss(x, {}, w, self.target)))
            self.assertEqual(census(f.lower(x, w).compile()), {})
            self.assertLess(cases.error(f(x, w), self.grads[0]), 1e-5)

    @parameterized.named_parameters(*BOTH)
    def test_batch_dimensions(self, kind):
        """Two sharded leading dimensions, and none at all."""
        mesh = make_mesh(kind)
        x = cases.activation(4, 6, K)
        with context(kind, mesh):
            w = place_weight(self.w, mesh, None)
            f = jax.jit(lambda x, w: matmul(x, w))
            placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
            self.assertEqual(census(f.lower(placed, w).compile()), {})
            y = f(placed, w)
            self.assertEqual(y.sharding.spec[:2], ("data", "model"))
            self.assertLess(cases.error(y, matmul(x, self.w)), 1e-6)
            row = jax.device_put(x[0, 0], NamedSharding(mesh, P()))
            w = place_weight(self.w, mesh, ("model", "n"))
            self.assertEqual(census(f.lower(row, w).compile()), {})
            self.assertLess(cases.error(f(row, w), matmul(x[0, 0], self.w)), 1e-6)

    @layouts(("data_n", "data_k"))
    def test_prepared(self, kind, name):
        """Shards of a prepared weight are prepared: their sums under K read linear codes."""
        x_spec, where, collectives, _ = LAYOUTS[name]
        mesh = make_mesh(kind)
        linear = cases.weight(N, K, "mxfp4", rank=16)
        with context(kind, mesh):
            x = jax.device_put(self.x.astype(jnp.bfloat16), NamedSharding(mesh, x_spec))
            w, p = (place_weight(w, mesh, where) for w in (linear, linear.prepare()))
            np.testing.assert_array_equal(w.prepare().packed, p.packed)
            f = jax.jit(lambda x, w: matmul(x, w))
            with plan.recording() as plans:
                self.assertEqual(census(f.lower(x, p).compile()), collectives)
            np.testing.assert_array_equal(f(x, p), f(x, w))
        shares = [p.problem for p in plans if (p.problem.n, p.problem.k_pad) != (N, K)]
        order = "linear" if name == "data_k" else "sorted"
        self.assertEqual({problem.sign_order for problem in shares}, {order})

    @parameterized.named_parameters(*BOTH)
    def test_bias_and_rank_count_once_under_k(self, kind):
        """A weight of zero codes: what remains of y is exactly the bias, or the low-rank term."""
        mesh = make_mesh(kind)
        dead = self.w.replace(packed=jnp.zeros_like(self.w.packed))
        only_bias = dead.replace(lora_down=None, lora_up=None)
        only_rank = dead.replace(bias=None)
        with context(kind, mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, P(None, "model")))
            y = matmul(x, place_weight(only_bias, mesh, ("model", "k")))
            np.testing.assert_array_equal(y, np.broadcast_to(self.w.bias, (M, N)))
            w = place_weight(only_rank, mesh, ("model", "k"))
            want = matmul(self.x, only_rank)
            self.assertLess(cases.error(matmul(x, w), want), 1e-2)
            shared = matmul(quantize_activation(x, w), w)
            self.assertLess(cases.error(shared, want), 1e-2)

    def test_result_type_of_k_parts(self):
        """Partial sums are fp32: bfloat16 x loses no more than one rounding."""
        mesh = make_mesh(AxisType.Auto)
        w = self.w.replace(lora_down=None, lora_up=None)
        x = self.x.astype(jnp.bfloat16)
        placed = jax.device_put(x, NamedSharding(mesh, P(None, ("data", "model"))))
        y = matmul(placed, place_weight(w, mesh, (("data", "model"), "k")))
        self.assertEqual(y.dtype, jnp.bfloat16)
        exact = matmul(x, w, preferred_element_type=jnp.float32)
        once = exact.astype(jnp.bfloat16)
        # Another order of fp32 sums may flip a rounding to bfloat16 here and there.
        self.assertGreater(np.mean(np.asarray(y == once)), 0.99)

    @parameterized.parameters((P("data"),), (P(None, "data"),))
    def test_vmap_over_a_sharded_batch(self, spec):
        """Explicit mesh: vmap owns the axis of the mapped dimension, the product has the other."""
        mesh = make_mesh(AxisType.Explicit)
        x = cases.activation(4, 6, K)
        want = matmul(x, self.w)
        with jax.set_mesh(mesh):
            w = place_weight(self.w, mesh, ("model", "n"))
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            for f in (matmul, lambda row, w: matmul(quantize_activation(row, w), w)):
                f = jax.jit(jax.vmap(f, in_axes=(0, None)))
                self.assertEqual({p.problem.m for p in _plans(jax.make_jaxpr(f)(placed, w))}, {12})
                # jax 0.10 gathers a mapped dimension at the border of any shard_map.
                if spec == P(None, "data") or jax.__version_info__ >= (0, 11):
                    self.assertEqual(census(f.lower(placed, w).compile()), {})
                self.assertLess(cases.error(f(placed, w), want), 1e-6)

    def test_vmap_over_sharded_weights(self):
        """Explicit mesh, with the kernel that bfloat16 has, whose workspace has vectors."""
        mesh = make_mesh(AxisType.Explicit)
        x, w = cases.activation(4, 6, K, dtype="bfloat16"), stacked(rank=16)
        want = jax.jit(jax.vmap(matmul))(x, w)
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P("data")))
            placed_w = jax.tree.map(
                lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("data"))), w
            )
            y = jax.jit(jax.vmap(matmul))(placed, placed_w)
        self.assertLess(cases.error(y, want), 1e-6)

    def test_nested_vmap_over_sharded_dimensions(self):
        """All axes of the mesh are vmap's."""
        mesh = make_mesh(AxisType.Explicit)
        x = cases.activation(2, 4, 6, K)
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
            f = jax.jit(jax.vmap(jax.vmap(lambda rows: matmul(rows, self.w))))
            self.assertEqual(census(f.lower(placed).compile()), {})
            self.assertLess(cases.error(f(placed), matmul(x, self.w)), 1e-6)

    def test_without_a_mesh_context(self):
        """Explicitly sharded arrays carry their mesh with them."""
        mesh = make_mesh(AxisType.Explicit)
        x = jax.device_put(self.x, NamedSharding(mesh, P("data")))
        w = place_weight(self.w, mesh, ("model", "n"))
        y = matmul(x, w)
        self.assertLess(cases.error(y, self.y), 1e-6)
        self.assertEqual(y.sharding.spec, P("data", "model"))


class DisagreementTest(parameterized.TestCase):
    """Operands that want the same mesh axis for different dimensions."""

    def setUp(self):
        super().setUp()
        self.w = cases.weight(N, K)
        self.x = cases.activation(M, K)

    def test_explicit_is_an_error(self):
        """Explicit meshes communicate only where asked to."""
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, P("data")))
            with self.assertRaisesRegex(
                ValueError, "axis 'data' shards both dimension 0 of x and N; reshard"
            ):
                matmul(x, place_weight(self.w, mesh, ("data", "n")))
            x = jax.device_put(self.x, NamedSharding(mesh, P(None, "data")))
            with self.assertRaisesRegex(ValueError, "axis 'data' shards both N and K"):
                matmul(x, place_weight(self.w, mesh, ("data", "n")))
            with self.assertRaisesRegex(ValueError, "K is sharded over .*reshard"):
                matmul(x, place_weight(self.w, mesh, ("model", "k")))

    def test_auto_gathers_one_operand(self):
        """Auto meshes: the result's sharding says which operand moves; the weight's five or six
        arrays, or x."""
        mesh = make_mesh(AxisType.Auto)
        x = jax.device_put(self.x, NamedSharding(mesh, P("data")))
        w = place_weight(self.w, mesh, ("data", "n"))
        want = matmul(self.x, self.w)
        for out in (P("data"), P(None, "data")):
            f = jax.jit(matmul, out_shardings=NamedSharding(mesh, out))
            found = census(f.lower(x, w).compile())
            self.assertEqual(set(found), {"all-gather"})
            self.assertLess(cases.error(f(x, w), want), 1e-6)


class WholeKTest(parameterized.TestCase):
    """K that can't be split is replicated with a warning that says why, and the result is right."""

    @parameterized.product(
        kind=(AxisType.Auto, AxisType.Explicit),
        case=("block", "row", "one_block"),
    )
    def test_warns(self, kind, case):
        w, reason = {
            # 192 = 2 * 96: no multiple of 64 on each device.
            "block": (cases.weight(8, 192, "int4"), "multiple of 64"),
            "row": (cases.weight(8, 128, "int4", block_size=None), "maximum over all of K"),
            "one_block": (cases.weight(8, 64, "int4"), "maximum over all of K"),
        }[case]
        mesh = make_mesh(kind)
        x = cases.activation(6, w.k)
        for f in (matmul, lambda x, w: matmul(quantize_activation(x, w), w)):
            primitives._warned.clear()
            with context(kind, mesh):
                placed = jax.device_put(x, NamedSharding(mesh, P(None, "model")))
                with self.assertWarnsRegex(primitives.FallbackWarning, reason):
                    y = jax.jit(lambda x, w, f=f: f(x, w))(placed, w)
            self.assertLess(cases.error(y, matmul(x, w)), 1e-6)

    def test_padded_k(self):
        """K=100 is stored as 128: the halves of the codes are not the halves of x."""
        w = cases.weight(8, 100)
        mesh = make_mesh(AxisType.Auto)
        x = jax.device_put(cases.activation(6, 100), NamedSharding(mesh, P(None, "model")))
        primitives._warned.clear()
        with self.assertWarnsRegex(primitives.FallbackWarning, "K=100 can't be split over 2"):
            y = jax.jit(lambda x, w: matmul(x, w))(x, w)
        self.assertLess(cases.error(y, matmul(cases.activation(6, 100), w)), 1e-6)

    def test_even_k_does_not_warn(self):
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh), warnings.catch_warnings():
            warnings.simplefilter("error")
            x = jax.device_put(cases.activation(6, 128), NamedSharding(mesh, P(None, "model")))
            matmul(x, place_weight(cases.weight(8, 128, "int4"), mesh, ("model", "k")))


# As LAYOUTS, for rows sorted by group; collectives of the product, of the batched product, where it
# has that layout, and what one device multiplies.
GROUPED = {
    "replicated": (P(), None, {}, (8, 32, 256, 4)),
    "rows": (P("data"), None, {}, (4, 32, 256, 4)),
    "rows_n": (P("data"), ("model", "n"), {}, (4, 16, 256, 4)),
    "n_both": (P(), (("data", "model"), "n"), {}, (8, 8, 256, 4)),
    "k": (P(None, "model"), ("model", "k"), {"all-reduce": 1}, (8, 32, 128, 4)),
    "rows_k": (P("data", "model"), ("model", "k"), {"all-reduce": 1}, (4, 32, 128, 4)),
    "groups": (P(), ("model", "group"), {"all-reduce": 1}, (8, 32, 256, 2)),
    "rows_groups": (P("data"), ("model", "group"), {"all-reduce": 1}, (4, 32, 256, 2)),
}
BATCHED = {
    "replicated": (P(), None, {}, (12, 32, 256, 4)),
    "groups": (P("model"), ("model", "group"), {}, (6, 32, 256, 2)),
    "groups_of_w": (P(), ("model", "group"), {}, (6, 32, 256, 2)),
    "groups_both": (P(("data", "model")), (("data", "model"), "group"), {}, (3, 32, 256, 1)),
    "rows_groups": (P("model"), (("data", "model"), "group"), {}, (3, 32, 256, 1)),
    "n": (P(), ("model", "n"), {}, (12, 16, 256, 4)),
    "groups_k": (P("data", None, "model"), ("model", "k"), {"all-reduce": 1}, (6, 32, 128, 2)),
}


def stacked(**options):
    weights = [cases.weight(N, K, "mxfp4", seed=seed, **options) for seed in range(4)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


class GroupedTest(parameterized.TestCase):
    """Rows sorted by group: sharded rows cut the groups, sharded groups add up."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.w = stacked()
        cls.x = cases.activation(M, K)
        cls.target = cases.activation(M, N, seed=3)
        cls.sizes = {"ragged": [3, 0, 4, 0], "first": [8, 0, 0, 0], "last": [0, 1, 2, 5]}

    @parameterized.named_parameters(
        (f"{label}_{name}", kind, name) for label, kind in BOTH for name in GROUPED
    )
    def test_forward(self, kind, name):
        x_spec, where, collectives, local = GROUPED[name]
        mesh = make_mesh(kind)
        with context(kind, mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, x_spec))
            w = place_weight(self.w, mesh, where)
            f = jax.jit(lambda x, w, s: grouped_matmul(x, w, s))
            shapes = []
            jax.clear_caches()  # the operator's own jit may know these types already
            with mock.patch.object(
                sharding, "grouped_local", side_effect=_noting(sharding.grouped_local, shapes)
            ):
                compiled = f.lower(x, w, jnp.asarray(self.sizes["ragged"])).compile()
            self.assertEqual(census(compiled), collectives)
            self.assertEqual(shapes[-1], local)
            for sizes in self.sizes.values():
                y = f(x, w, jnp.asarray(sizes))
                want = jax.jit(grouped_matmul)(self.x, self.w, jnp.asarray(sizes))
                # K parts round x @ lora_down to bfloat16 one by one.
                self.assertLess(cases.error(y, want), 1e-3 if where and "k" in where else 1e-6)

    @parameterized.named_parameters(
        (f"{label}_{name}", kind, name)
        for label, kind in BOTH
        for name in ("rows", "rows_n", "k", "rows_groups")
    )
    def test_gradients(self, kind, name):
        x_spec, where, _, _ = GROUPED[name]
        mesh = make_mesh(kind)
        sizes = jnp.asarray(self.sizes["ragged"])

        def loss(x, leaves, w, target):
            return jnp.sum(grouped_matmul(x, w.replace(**leaves), sizes) * target)

        f = jax.jit(jax.grad(loss, argnums=(0, 1)))
        want_x, want = f(self.x, trainable(self.w), self.w, self.target)
        with context(kind, mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, x_spec))
            w = place_weight(self.w, mesh, where)
            dx, d = f(x, trainable(w), w, self.target)
        self.assertLess(cases.error(dx, want_x), 1e-5)
        for leaf in TRAINABLE:
            tolerance = 6e-3 if leaf.startswith("lora") else 1e-5
            self.assertLess(cases.error(d[leaf], want[leaf]), tolerance, leaf)

    @parameterized.named_parameters(*BOTH)
    def test_sharded_sizes(self, kind):
        """Sizes may be sharded as the experts are."""
        mesh = make_mesh(kind)
        sizes = jnp.asarray(self.sizes["ragged"])
        want = jax.jit(grouped_matmul)(self.x, self.w, sizes)
        with context(kind, mesh):
            placed = jax.device_put(sizes, NamedSharding(mesh, P("model")))
            w = place_weight(self.w, mesh, ("model", "group"))
            x = jax.device_put(self.x, NamedSharding(mesh, P("data")))
            y = jax.jit(grouped_matmul)(x, w, placed)
        self.assertLess(cases.error(y, want), 1e-6)

    def test_shard_map_over_experts(self):
        """The recipe of the documentation: each device the experts it has, one sum."""
        mesh = make_mesh(AxisType.Auto)
        sizes = jnp.asarray(self.sizes["last"])

        def experts(x, w, sizes):
            # The rows of the first of my experts come first.
            first = lax.axis_index("model") * w.shape[0]
            ends = jnp.cumsum(sizes)
            before = ends[first] - sizes[first]
            mine = lax.dynamic_slice_in_dim(sizes, first, w.shape[0])
            y = grouped_matmul(jnp.roll(x, -before, 0), w, mine)
            return lax.psum(jnp.roll(y, before, 0), "model")

        f = jax.jit(jax.shard_map(
            experts, mesh=mesh,
            in_specs=(P(), self.w.shard_specs("model", "group"), P()), out_specs=P(),
        ))  # fmt: skip
        y = f(self.x, self.w, sizes)
        want = jax.jit(grouped_matmul)(self.x, self.w, sizes)
        self.assertLess(cases.error(y, want), 1e-6)

    @parameterized.named_parameters(*BOTH)
    def test_disagreement(self, kind):
        """One mesh axis for rows and for groups: an error, or rows win and the weight is whole."""
        mesh = make_mesh(kind)
        sizes = jnp.asarray(self.sizes["ragged"])
        with context(kind, mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, P("data")))
            w = place_weight(self.w, mesh, ("data", "group"))
            if kind == AxisType.Explicit:
                with self.assertRaisesRegex(ValueError, "'data' shards both dimension 0 of x and"):
                    grouped_matmul(x, w, sizes)
                return
            want = jax.jit(grouped_matmul)(self.x, self.w, sizes)
            self.assertLess(cases.error(grouped_matmul(x, w, sizes), want), 1e-6)


def _noting(f, shapes):
    def note(call, x, bounds, w):
        shapes.append((x.shape[0], w.shape[1], x.shape[1], w.shape[0]))
        return f(call, x, bounds, w)

    return note


class BatchedTest(parameterized.TestCase):
    """A batch of products with weights of their own, which vmap makes where a kernel takes them."""

    @parameterized.named_parameters(
        (f"{label}_{name}", kind, name) for label, kind in BOTH for name in BATCHED
    )
    def test_forward(self, kind, name):
        x_spec, where, collectives, local = BATCHED[name]
        whole_x, whole_w = cases.activation(4, 3, K), stacked()
        call = primitives.Call("float32", None, None)
        want = jax.jit(functools.partial(primitives.batched_local, call))(whole_x, whole_w)
        mesh = make_mesh(kind)
        shapes = []
        with context(kind, mesh):
            x = jax.device_put(whole_x, NamedSharding(mesh, x_spec))
            w = place_weight(whole_w, mesh, where)
            f = jax.jit(lambda x, w: sharding.batched_dispatch(call, x, w))
            if kind == AxisType.Explicit and name == "rows_groups":
                with self.assertRaisesRegex(ValueError, "the experts are sharded over"):
                    f(x, w)
                return
            local_run = primitives.grouped_local
            with mock.patch.object(
                primitives, "grouped_local", side_effect=_noting(local_run, shapes)
            ):
                compiled = f.lower(x, w).compile()
            if name != "rows_groups":
                self.assertEqual(census(compiled), collectives)
            self.assertEqual(shapes[-1], local)
            self.assertLess(cases.error(f(x, w), want), 1e-3 if "k" in name else 1e-6)

    @parameterized.named_parameters(*BOTH)
    def test_sharded_k_loops(self, kind):
        """Parts of a product are in fp32, which the grouped kernel does not store."""
        x, w = cases.activation(4, 3, K, dtype="bfloat16"), stacked(rank=16)
        want = jax.jit(jax.vmap(matmul))(x, w)
        mesh = make_mesh(kind)
        with context(kind, mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P(None, None, "model")))
            placed_w = place_weight(w, mesh, ("model", "k"))
            with plan.recording() as plans:
                compiled = jax.jit(jax.vmap(matmul)).lower(placed, placed_w).compile()
        self.assertEqual((plans[-1].problem.out_dtype, plans[-1].problem.groups), ("float32", 0))
        self.assertLess(cases.error(compiled(placed, placed_w), want), 1e-2)


class SharedActivationTest(parameterized.TestCase):
    """quantize_activation over a mesh keeps x's sharding, and gemm takes it from there."""

    @layouts(("data", "data_n", "data_k"))
    def test_round_trip(self, kind, name):
        x_spec, where, collectives, _ = LAYOUTS[name]
        w = cases.weight(N, K)
        x = cases.activation(M, K)
        mesh = make_mesh(kind)
        with context(kind, mesh):
            placed = jax.device_put(x, NamedSharding(mesh, x_spec))
            placed_w = place_weight(w, mesh, where)
            f = jax.jit(lambda x, w: matmul(quantize_activation(x, w), w))
            # Under K one more, for the (M, rank) product with lora_down.
            more = {"all-reduce": 2} if collectives else {}
            self.assertEqual(census(f.lower(placed, placed_w).compile()), more)
            self.assertLess(cases.error(f(placed, placed_w), matmul(x, w)), 1e-6)
            act = jax.jit(quantize_activation)(placed, placed_w)
        want = quantize_activation(x, w)
        np.testing.assert_array_equal(act.packed, want.packed)
        self.assertEqual(_axes(act.packed), _axes(placed))
        self.assertEqual(act.lora_act.dtype, want.lora_act.dtype)

    @parameterized.named_parameters(*BOTH)
    def test_gradients_under_k(self, kind):
        w = cases.weight(N, K)
        x = cases.activation(M, K)
        target = cases.activation(M, N, seed=3)

        def shared(leaves, x, w):
            w = w.replace(**leaves)
            return jnp.sum(matmul(quantize_activation(x, w), w) * target)

        f = jax.jit(jax.grad(shared))
        want = f(trainable(w), x, w)
        mesh = make_mesh(kind)
        with context(kind, mesh):
            placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
            placed_w = place_weight(w, mesh, ("model", "k"))
            got = f(trainable(placed_w), placed, placed_w)
        for leaf in TRAINABLE:
            tolerance = 8e-3 if leaf.startswith("lora") else 1e-5
            self.assertLess(cases.error(got[leaf], want[leaf]), tolerance, leaf)


class ShardMapTest(parameterized.TestCase):
    """Inside the user's shard_map the call is local, and so are its shapes."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.w = cases.weight(N, K)
        cls.x = cases.activation(M, K)
        cls.y = matmul(cls.x, cls.w)
        cls.mesh = make_mesh(AxisType.Auto)

    @parameterized.parameters(True, False)
    def test_n(self, check_vma):
        f = jax.shard_map(
            lambda x, w: matmul(x, w),
            mesh=self.mesh,
            in_specs=(P("data"), self.w.shard_specs("model", "n")),
            out_specs=P("data", "model"),
            check_vma=check_vma,
        )
        with plan.recording() as plans:
            lowered = jax.jit(f).lower(self.x, self.w)
        self.assertEqual({(p.problem.m, p.problem.n) for p in plans} - {(4, 16)}, set())
        self.assertEqual(census(lowered.compile()), {})
        self.assertLess(cases.error(jax.jit(f)(self.x, self.w), self.y), 1e-6)

    def test_k(self):
        """The caller sums: a local weight has the local K and no bias."""

        def local(x, w):
            part = w.replace(k=x.shape[-1], bias=None)
            y = matmul(x, part, preferred_element_type=jnp.float32)
            return lax.psum(y, "model") + w.bias[None, :]

        f = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P("data", "model"), self.w.shard_specs("model", "k")),
            out_specs=P("data"),
        )
        self.assertEqual(census(jax.jit(f).lower(self.x, self.w).compile()), {"all-reduce": 1})
        self.assertLess(cases.error(jax.jit(f)(self.x, self.w), self.y), 1e-3)

    def test_gradients(self):
        """Replicated operands get gradients summed over the mesh."""
        target = cases.activation(M, N, seed=3)
        mapped = jax.shard_map(
            lambda x, w: matmul(x, w),
            mesh=self.mesh,
            in_specs=(P("data"), self.w.shard_specs("model", "n")),
            out_specs=P("data", "model"),
        )

        def through(f):
            def total(x, leaves):
                return jnp.sum(f(x, self.w.replace(**leaves)) * target)

            return jax.jit(jax.grad(total, argnums=(0, 1)))(self.x, trainable(self.w))

        got, want = through(mapped), through(matmul)
        self.assertLess(cases.error(got[0], want[0]), 1e-5)
        for leaf in TRAINABLE:
            tolerance = 6e-3 if leaf.startswith("lora") else 1e-5
            self.assertLess(cases.error(got[1][leaf], want[1][leaf]), tolerance, leaf)

    def test_wrong_out_specs_are_caught(self):
        """Results keep the mark of the axes they vary over, so JAX sees the mistake."""
        f = jax.shard_map(
            lambda x, w: matmul(x, w),
            mesh=self.mesh,
            in_specs=(P("data"), self.w.shard_specs("model", "n")),
            out_specs=P("data"),
        )
        with self.assertRaisesRegex(ValueError, "out_specs"):
            jax.jit(f)(self.x, self.w)
        g = jax.shard_map(
            lambda x, w: quantize_activation(x, w).packed,
            mesh=self.mesh,
            in_specs=(P("data"), jax.tree.map(lambda _: P(), self.w)),
            out_specs=P(),
        )
        with self.assertRaisesRegex(ValueError, "out_specs"):
            jax.jit(g)(self.x, self.w)

    def test_partly_manual(self):
        """Auto axes next to manual ones are refused: they'd be gathered without a word. Explicit
        ones are fine."""
        whole = jax.tree.map(lambda _: P(), self.w)
        shard = functools.partial(
            jax.shard_map, in_specs=(P("data"), whole), out_specs=P("data"), axis_names={"data"}
        )
        f = shard(lambda x, w: matmul(x, w), mesh=self.mesh)
        with self.assertRaisesRegex(NotImplementedError, "axes model are auto.*name all axes"):
            jax.jit(f)(self.x, self.w)
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, P("data")))
            w = place_weight(self.w, mesh, ("model", "n"))
            y = jax.jit(shard(lambda x, w: matmul(x, w)))(x, w)
            self.assertLess(cases.error(y, self.y), 1e-6)

    def test_mixed_mesh(self):
        """A mesh with explicit and auto axes is refused with the way out."""
        mesh = jax.make_mesh(
            (2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto)
        )
        with jax.set_mesh(mesh):
            x = jax.device_put(self.x, NamedSharding(mesh, P("data")))
            with self.assertRaisesRegex(NotImplementedError, "make all axes of the mesh explicit"):
                matmul(x, self.w)


class SetMeshTest(parameterized.TestCase):
    """Under `jax.set_mesh` of an auto mesh, with operands that were never placed: JAX then gives
    the partitioner neither a mesh nor names of axes."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.w = cases.weight(N, K)
        cls.x = cases.activation(M, K)
        cls.mesh = make_mesh(AxisType.Auto)

    @parameterized.parameters(
        "matmul", "quantize_activation", "grouped_matmul", "vmap", "vmap_weights", "grad",
        "grad_grouped", "scan",
    )  # fmt: skip
    def test_whole_on_every_device(self, name):
        experts, sizes = stacked(rank=16), jnp.asarray([3, 0, 4, 0])
        target = cases.activation(M, N, seed=3)
        rows = self.x.astype(jnp.bfloat16).reshape(4, M // 4, K)

        def grouped_loss(x, leaves):
            return jnp.sum(grouped_matmul(x, experts.replace(**leaves), sizes) * target)

        def scan(x):
            def step(x, _):
                return x.at[:, :N].set(matmul(x, self.w)), None

            return lax.scan(step, x, length=2)[0]

        f, operands = {
            "matmul": (matmul, (self.x, self.w)),
            "quantize_activation": (
                lambda x, w: (act := quantize_activation(x, w), matmul(act, w)),
                (self.x, self.w),
            ),
            "grouped_matmul": (grouped_matmul, (self.x, experts, sizes)),
            "vmap": (jax.vmap(matmul, in_axes=(0, None)), (rows, self.w)),
            "vmap_weights": (jax.vmap(matmul), (rows, experts)),
            "grad": (
                jax.grad(loss, argnums=(0, 1)),
                (self.x, trainable(self.w), self.w, target),
            ),
            "grad_grouped": (
                jax.grad(grouped_loss, argnums=(0, 1)),
                (self.x, trainable(experts)),
            ),
            "scan": (scan, (self.x,)),
        }[name]
        inside = jax.jit(lambda *operands: f(*operands))
        want = inside(*operands)
        with jax.set_mesh(self.mesh):
            self.assertEqual(census(inside.lower(*operands).compile()), {})
            for g in (f, inside):
                jax.tree.map(np.testing.assert_array_equal, g(*operands), want)

    @parameterized.named_parameters((name, name) for name in LAYOUTS)
    def test_sharded_by_constraints(self, name):
        """Constraints by axis name shard as placed operands do, with the same collectives."""
        x_spec, where, collectives, local = LAYOUTS[name]
        specs = jax.tree.map(lambda _: P(), self.w) if where is None else self.w.shard_specs(*where)

        @jax.jit
        def f(x, w):
            x = lax.with_sharding_constraint(x, x_spec)
            return matmul(x, jax.tree.map(lax.with_sharding_constraint, w, specs))

        with jax.set_mesh(self.mesh):
            with plan.recording() as plans:
                compiled = f.lower(self.x, self.w).compile()
            self.assertEqual(census(compiled), collectives)
            y = f(self.x, self.w)
        problem = plans[-1].problem
        self.assertEqual((problem.m, problem.n, problem.k_pad), local)
        self.assertLess(cases.error(y, matmul(self.x, self.w)), 1e-3 if collectives else 1e-6)

    @parameterized.parameters("rows_n", "rows_groups", "k")
    def test_grouped_sharded_by_constraints(self, name):
        x_spec, where, collectives, _ = GROUPED[name]
        w, sizes = stacked(), jnp.asarray([3, 0, 4, 0])
        specs = w.shard_specs(*where)

        @jax.jit
        def f(x, w, sizes):
            x = lax.with_sharding_constraint(x, x_spec)
            w = jax.tree.map(lax.with_sharding_constraint, w, specs)
            return grouped_matmul(x, w, sizes)

        want = jax.jit(grouped_matmul)(self.x, w, sizes)
        with jax.set_mesh(self.mesh):
            self.assertEqual(census(f.lower(self.x, w, sizes).compile()), collectives)
            self.assertLess(cases.error(f(self.x, w, sizes), want), 1e-3)

    def test_order_of_devices(self):
        """Shares follow a mesh whose devices are not in the order of their numbers."""
        devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(2, 2)
        specs = self.w.shard_specs("data", "n")

        @jax.jit
        def f(x, w):
            x = lax.with_sharding_constraint(x, P("model"))
            return matmul(x, jax.tree.map(lax.with_sharding_constraint, w, specs))

        with jax.set_mesh(jax.sharding.Mesh(devices, ("data", "model"))):
            self.assertEqual(census(f.lower(self.x, self.w).compile()), {})
            self.assertLess(cases.error(f(self.x, self.w), matmul(self.x, self.w)), 1e-6)

    def test_sharded_without_names_is_refused(self):
        """Not gathered: the call does not see the mesh that sharded x."""

        def f(x, w):
            x = lax.with_sharding_constraint(x, P("data"))
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return matmul(x, w)

        with jax.set_mesh(self.mesh):
            with self.assertRaisesRegex(
                jax.errors.JaxRuntimeError,
                r"NotImplementedError: jax_w4a4.matmul: an operand .* names no mesh axes; call it "
                r"under jax.set_mesh, or place operands with jax.device_put",
            ):
                jax.jit(f)(self.x, self.w)

    def test_names(self):
        """Partition specs are read off the parts of the devices, where there is one that fits."""
        mesh = self.mesh
        matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        for spec in (
            P("data"), P("model"), P(None, "data"), P("data", "model"), P("model", "data"),
            P(("data", "model")), P(None, ("model", "data")),
        ):  # fmt: skip
            got = sharding._named(NamedSharding(mesh, spec), mesh, matrix)
            same = NamedSharding(mesh, got).is_equivalent_to(NamedSharding(mesh, spec), 2)
            self.assertTrue(same, (got, spec))
        line = jax.sharding.Mesh(mesh.devices.reshape(4), ("z",))
        self.assertEqual(sharding._named(NamedSharding(line, P("z")), line, matrix), P("z", None))
        # Half of z, both dimensions along z, and another order of devices.
        for spec in (P("data"), P("model"), P("data", "model"), P(("model", "data"))):
            self.assertIsNone(sharding._named(NamedSharding(mesh, spec), line, matrix))
        diagonal = jax.sharding.Mesh(mesh.devices.reshape(4)[[0, 3, 1, 2]], ("z",))
        both = NamedSharding(mesh, P("data", "model"))
        self.assertIsNone(sharding._named(both, diagonal, matrix))


# What reads the codes of a weight outside of the product.
READERS = {
    "prepare": lambda w: w.prepare(),
    "linear": lambda w: w.linear(),
    "values": lambda w: w.values,
    "dequantize": lambda w: w.dequantize(),
    "effective": lambda w: w.effective(),
}


class WeightOnExplicitMeshTest(parameterized.TestCase):
    """Codes are read on the devices that hold them, or the call says why they can't be."""

    def shard(self, w, mesh, packed, scales):
        whole = jax.tree.map(lambda _: P(), w)
        return place(w, mesh, whole.replace(packed=packed, scales=scales))

    @parameterized.product(
        reader=tuple(READERS),
        prepared=(False, True),
        case=("n_and_part_blocks", "part_blocks", "blocks"),
    )
    def test_read_where_they_are(self, reader, prepared, case):
        """Shares of K that are whole words, of whole blocks or not, are read without traffic."""
        k, packed, scales = {
            # 48 values, one block and a half, on each device.
            "n_and_part_blocks": (96, P("data", "model"), P("data")),
            "part_blocks": (96, P(None, ("data", "model")), P()),
            "blocks": (K, P(None, ("data", "model")), P(None, ("data", "model"))),
        }[case]
        w = cases.weight(N, k, "mxfp4", rank=0)
        w, read = w.prepare() if prepared else w, READERS[reader]
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            placed = self.shard(w, mesh, packed, scales)
            f = jax.jit(lambda w: read(w))
            self.assertEqual(census(f.lower(placed).compile()), {})
            for got in (read(placed), f(placed)):
                first = jax.tree.leaves(got)[0]
                self.assertEqual(first.sharding.spec, packed)
                want = read(w)
                if case == "blocks" and reader == "prepare" and not prepared:
                    # The largest scale of a whole row would need traffic.
                    self.assertIsNone(got.scale_range)
                    want = want.replace(scale_range=None)
                jax.tree.map(np.testing.assert_array_equal, got, want)

    @parameterized.product(format=("nvfp4", "int4"))
    def test_part_blocks_of_other_formats(self, format):
        w = cases.weight(N, 96, format, rank=0, block_size=32 if format == "int4" else -1)
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            placed = self.shard(w, mesh, P(None, ("data", "model")), P())
            np.testing.assert_array_equal(placed.dequantize(), w.dequantize())

    @parameterized.parameters(
        ("prepare", "linear"), ("linear", "sorted"), ("values", "sorted"),
        ("dequantize", "sorted"), ("effective", "sorted"),
    )  # fmt: skip
    def test_parts_of_words_are_refused(self, reader, order):
        """Two bytes on each of eight devices: the other two would have to be fetched."""
        mesh = jax.sharding.AbstractMesh((8,), ("z",), axis_types=(AxisType.Explicit,))
        w = cases.weight(N, 32, "mxfp4", rank=0, full=False).replace(sign_order=order)

        def read(spec):
            abstract = jax.ShapeDtypeStruct(
                w.packed.shape, jnp.uint8, sharding=NamedSharding(mesh, spec)
            )
            return jax.eval_shape(lambda p: READERS[reader](w.replace(packed=p)), abstract)

        with jax.sharding.use_abstract_mesh(mesh):
            with self.assertRaisesRegex(
                NotImplementedError,
                rf"^jax_w4a4.Weight.{reader}: weight.packed is uint8\[32,16\] with K over 8 "
                r"devices \(mesh axes z\).* before the weight is sharded, shard N .*reshard",
            ):
                read(P(None, "z"))
            # The way out.
            read(P("z"))

    def test_parts_of_words_are_cleared_past_k(self):
        """`from_packed` of sorted codes clears the padding where it is."""
        mesh = jax.sharding.AbstractMesh((8,), ("z",), axis_types=(AxisType.Explicit,))
        w = cases.weight(N, 20, "mxfp4", rank=0, full=False)
        codes = jax.ShapeDtypeStruct(
            w.packed.shape, jnp.uint8, sharding=NamedSharding(mesh, P(None, "z"))
        )

        def clear(codes):
            sorted_codes = {"format": "mxfp4", "k": 20, "sign_order": "sorted"}
            return Weight.from_packed(codes, w.scales, **sorted_codes).packed

        with jax.sharding.use_abstract_mesh(mesh):
            self.assertEqual(jax.eval_shape(clear, codes).sharding.spec, P(None, "z"))

    @parameterized.parameters("values", "dequantize", "effective")
    def test_padded_k_is_refused(self, reader):
        """K=80 is stored as 96: halves of 80 values are not halves of 96."""
        w, read = cases.weight(N, 80, "mxfp4", rank=0), READERS[reader]
        mesh = make_mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            placed = self.shard(w, mesh, P("data", "model"), P("data"))
            with self.assertRaisesRegex(
                NotImplementedError,
                rf"^jax_w4a4.Weight.{reader}: K=80 is stored as 96 and sharded \(mesh axes model\)",
            ):
                read(placed)
            # The way out.
            gathered = jax.sharding.reshard(placed.packed, P("data"))
            np.testing.assert_array_equal(read(placed.replace(packed=gathered)), read(w))


class SettleTest(parameterized.TestCase):
    """The rule that gives each mesh axis to one dimension."""

    def settle(self, wanted, result, k=(256, 256, 16)):
        sizes = {"a": 2, "b": 2, "one": 1}
        return sharding._settle("matmul", wanted, sizes, k, result=result)

    def test_no_conflict(self):
        wanted = {"b0": ("a",), "n": ("b",), "k": ()}
        self.assertEqual(self.settle(wanted, {}), wanted)

    def test_axes_of_one_device_shard_nothing(self):
        wanted = {"b0": (), "n": (), "k": ("one",)}
        self.assertEqual(self.settle(wanted, {})["k"], ())

    def test_order_and_result(self):
        wanted = {"b0": ("a",), "n": ("a", "b"), "k": ("b",)}
        self.assertEqual(self.settle(wanted, {}), {"b0": ("a",), "n": ("b",), "k": ()})
        self.assertEqual(
            self.settle(wanted, {"b0": (), "n": ("a",)}), {"b0": (), "n": ("a", "b"), "k": ()}
        )

    def test_rule_text(self):
        """One Shardy rule per structure of operands: absent ones have no entry."""
        w = cases.weight(N, K)
        x = cases.activation(2, 3, K)
        text, kinds = sharding._rule(*sharding._matmul_factors(x, w))
        self.assertEqual(text, "b0 b1 k, n k, n k, , , k, k r, n r, n, n -> b0 b1 n")
        self.assertEqual(
            dict(kinds), {"reduction_factors": ("k",), "need_replication_factors": ("r",)}
        )
        bare = cases.weight(N, K, "int4", block_size=None, rank=0, full=False)
        text, kinds = sharding._rule(*sharding._matmul_factors(x[0], bare))
        self.assertEqual(text, "b0 k, n k, n row -> b0 n")
        self.assertEqual(dict(kinds)["need_replication_factors"], ("row",))


def _axes(a):
    """Mesh axes of an array per dimension, without trailing None."""
    spec = list(a.sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return spec


def _plans(jaxpr):
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name.startswith("jax_w4a4_"):
            found.append(eqn.params["plan"])
        for sub in cases.jaxprs_in_params(eqn.params):
            found += _plans(sub)
    return found


if __name__ == "__main__":
    absltest.main()
