"""`explain`: every call is found, with its multiplicity and the shapes of one device."""

import dataclasses
import functools
import json
import os
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_w4a4 import _ffi, plan
from jax_w4a4.explain import explain
from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.plan import targets
from jax_w4a4.weight import Weight

M, K, N, R = 64, 128, 256, 16


def weight(n=N, k=K, rank=R):
    lora = {}
    if rank:
        lora = {
            "lora_down": jnp.zeros((k, rank), jnp.bfloat16),
            "lora_up": jnp.zeros((n, rank), jnp.bfloat16),
        }
    packed = jnp.zeros((n, k // 2), jnp.uint8)
    scales = jnp.zeros((n, k // 16), jnp.float8_e4m3fn)
    return Weight.from_packed(packed, scales, format="nvfp4", **lora)


def x_like(*shape, **kwargs):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, **kwargs)


def seen(explanation):
    """(kind, count, m, n, k) of every section."""
    return [(c.kind, c.count, c.problem.m, c.problem.n, c.problem.k_pad) for c in explanation.calls]


class ShapeTest(parameterized.TestCase):
    """Bare shapes: an H200 or B200 plan read on a laptop."""

    def test_production_shape_on_sm_100(self):
        with mock.patch.object(_ffi, "KERNELS", frozenset()):
            text = str(explain((4352, 3840, 3072), rank=128, target="sm_100"))
        for expected in (
            "matmul 4352 x 3840 x 3072 (M x K x N), nvfp4 block 16, rank 128",
            "sm_100 (B200)",
            "kernel sm100_v2, not in this build (it has: no kernel)",
            "stages: main 7, LoRA in the main ring, store 3",
            "shared memory 227328 of 232448 B (97.8 %) per CTA",
            "17 x 24 = 408 tiles on 74 CTA pairs (one CTA per SM) = 6 waves",
            "product 10.3 us at 10000 TFLOP/s fp4",
            "(computed, not measured)",
            "7 main stages: one more needs 28672 B",
        ):
            self.assertIn(expected, text)

    def test_every_row_of_the_account_is_printed(self):
        lines = str(explain((64, 128, 256), rank=16, target="sm_90")).splitlines()
        for name in targets.RESIDENT_OBJECTS:
            self.assertTrue(any(line.startswith(f"{name} ") for line in lines), name)
        self.assertTrue(any("halves no footprint" in line for line in lines))

    def test_roofline_by_hand(self):
        """sm_90, v1: 2MNK at 989 TFLOP/s plus 2MNR in fp32 at 67, against 44.7 MB at 4.8 TB/s."""
        (call,) = explain((4352, 3840, 3072), rank=128, target="sm_90", kernel="sm90_v1").calls
        gemm = call.gemm
        product, lora = 102_676_561_920 / 989e12, 3_422_552_064 / 67e12
        self.assertAlmostEqual(gemm.compute_s, product + lora, delta=1e-12)
        self.assertAlmostEqual(gemm.dram_s, gemm.traffic.total_bytes / 4.8e12, delta=1e-12)
        self.assertEqual(gemm.roofline_s, gemm.compute_s)
        self.assertEqual(gemm.limit, "product")
        self.assertAlmostEqual(gemm.filled_s, gemm.compute_s * 7 * 132 / 816, delta=1e-12)

    @parameterized.parameters(
        ("mxfp4", {}, "fp8", "beside LoRA-down (72 rows per 2 CTAs", 4352 * 3840 + 4352 * 4),
        ("nvfp4", {}, "bf16", "into the gemm's layout (2 rows per", 4352 * 3840 * 2 + 4352 * 4),
        ("mxfp4", {"quantizer": 1}, "fp8", ", then a pass", 4352 * 3840 + 4352 * 4),
    )
    def test_prefill_kernel(self, format, forced, mma, quantizer, activation):
        """sm90_v2: its account, its reasons, the MMA that bounds it and the bytes that it reads."""
        found = explain((4352, 3840, 3072), rank=128, format=format, target="sm_90", **forced)
        text = str(found)
        for expected in (
            "tile 200x256, K step ",
            "on 2 CTAs of 384 threads, persistent",
            "LoRA in the main ring, store 1",
            "22 x 12 = 264 tiles on 66 CTA pairs (one CTA per SM) = 4 waves, last 100 % full",
            "for 4352 rows: 264 tiles in 4 waves of 66, ",
            "LoRA streamed through the main ring (4 extra steps): it costs no main stage",
            "2 groups of up to 11 m tiles",
            f"TFLOP/s {mma}; LoRA-up",
            quantizer,
            found.calls[0].plan.quantizer.why,
        ):
            self.assertIn(expected, text)
        moved = dict(found.calls[0].gemm.traffic.bytes)
        self.assertEqual(moved["activations"] + moved["activation scales"], activation)

    @parameterized.parameters(
        (64, "gemm and LoRA-down (4 CTAs ahead, 12 stages of 64 k, 209088 B shared memory) in"),
        (16, "threads) and LoRA-down (16 rows and 16 ranks per 8 CTAs) in one launch\n"),
    )
    def test_where_low_rank_down_runs(self, m, where):
        """sm90_decode: the launch that has it, and the reason for the quantizer says the same."""
        (call,) = explain((m, 4096, 4096), rank=32, format="mxfp4", target="sm_90").calls
        ahead = "LoRA-down by 4 CTAs of the gemm's launch, ahead of the others"
        text = str(call)
        self.assertIn("kernel sm90_decode", text)
        self.assertIn(where, text)
        self.assertIn(call.plan.quantizer.why, text)
        self.assertEqual(ahead in text, m == 64)
        self.assertEqual("\ngemm\n" in text, m == 16)

    @parameterized.parameters(
        # Sums in shared memory over the ring; results from registers: of one CTA, of two, without
        # a low-rank branch.
        (16, 4096, 32, "on warps of its own, from L2: 2048 B beside", True),
        (65, 4096, 32, "on warps of its own, from L2: 24576 B with what the peer sends", True),
        (128, 14336, 48, "at the end, each warp of its own rows: 8192 B beside", False),
        (128, 8192, 32, "at the end, each warp of its own rows: 40960 B with what the", False),
        (128, 14336, 0, None, False),
    )
    def test_what_sums_and_low_rank_product_cost(self, m, n, rank, product, over):
        """The reasons name the bytes of the account, and nothing of no bytes lies anywhere."""
        shape = (m, 8192 if n == 8192 else 4096, n)
        text = str(explain(shape, rank=rank, format="mxfp4", target="sm_90"))
        if product is None:
            self.assertNotIn("low-rank product", text)
            self.assertNotIn("ranks", text)
        else:
            self.assertIn(f"- low-rank product {product}", text)
            self.assertIn("LoRA beside the main ring", text)
        self.assertEqual("; store lie over the main stages" in text, over)

    @parameterized.parameters((64, True), (16, False))
    def test_work_of_low_rank_down_is_its_launch_s(self, m, in_gemm):
        """FLOP and bytes are those of the launch that has LoRA-down; both read x where it is the
        gemm's, and what it leaves for the last of its CTAs is marked by the launch before."""
        (call,) = explain((m, 8192, 4096), rank=32, format="mxfp4", target="sm_90").calls
        bytes_of = [dict(launch.traffic.bytes) for launch in (call.quantizer, call.gemm)]
        quantizer, gemm = bytes_of
        owner, other = (call.gemm, call.quantizer) if in_gemm else (call.quantizer, call.gemm)
        self.assertEqual(dict(owner.traffic.flops)["LoRA-down"], 2 * m * 8192 * 32)
        self.assertIn(
            ("LoRA-down", 2 * m * 8192 * 32 / 989e12), [each[:2] for each in owner.compute]
        )
        self.assertNotIn("LoRA-down", dict(other.traffic.flops))
        self.assertEqual(dict(owner.traffic.bytes)["lora_down"], 8192 * 32 * 2)
        self.assertNotIn("lora_down", dict(other.traffic.bytes))
        x, sums = 2 * m * 8192, 3 * m * 32 * 4
        self.assertEqual((quantizer["x"], gemm.get("x")), (x, x if in_gemm else None))
        for moved in bytes_of:
            self.assertEqual(moved.get("down_sums"), sums if in_gemm else None)
            self.assertEqual(moved["lora_act"], m * 32 * 2)
        data = explain((m, 8192, 4096), rank=32, format="mxfp4", target="sm_90").as_dict()
        self.assertEqual("LoRA-down" in data["calls"][0]["gemm"]["flops"], in_gemm)

    def test_ready_activation_has_no_low_rank_down(self):
        """The gemm's plan names four CTAs for it, which a call with lora_act does not start."""
        found = explain(
            lambda x, w: matmul(quantize_activation(x, w), w),
            x_like(64, 8192),
            weight(k=8192),
            target="sm_90",
        )
        quantize, gemm = found.calls
        self.assertEqual(gemm.plan.quantizer.down.ahead, 4)
        self.assertEqual(dict(gemm.gemm.traffic.flops).keys(), {"product", "LoRA-up"})
        self.assertNotIn("lora_down", dict(gemm.gemm.traffic.bytes))
        self.assertIn("\ngemm\n", str(gemm))
        self.assertIn("LoRA-down", dict(quantize.quantizer.traffic.flops))

    def test_shared_activation_on_the_prefill_kernel(self):
        """The gemm of a ready activation owes nothing to the quantizer that its plan names."""
        found = explain(
            lambda x, w: matmul(quantize_activation(x, w), w),
            x_like(512, K),
            weight(),
            target="sm_90",
        )
        gemm = next(call for call in found.calls if call.kind == "gemm")
        self.assertEqual(gemm.plan.kernel, "sm90_v2")
        self.assertIn("ready activation in the public layout: a pass into", str(gemm))
        self.assertNotIn("quantizer 2", str(gemm))

    def test_grouped(self):
        """Sizes are on the device: the text says what was assumed, and figures follow from that."""
        (call,) = explain((512, 2048, 4096), rank=32, format="mxfp4", groups=64).calls
        text = str(call)
        for expected in (
            "grouped 512 x 2048 x 4096 (M x K x N), 64 groups",
            "kernel sm90_grouped",
            "tile 16x128, K step 128, on one CTA of 384 threads, persistent",
            "for 512 rows in 64 groups, taken as 64 of 8: 2048 tiles in 8 waves of 264",
            "64 x 32 = 2048 tiles on 264 CTAs (2 CTAs per SM)",
            "of 115712 B (92.5 %) per CTA, two of which share an SM",
            "tile_m*4 + 16, one fp32 power of two per token",
        ):
            self.assertIn(expected, text)
        moved = dict(call.gemm.traffic.bytes)
        self.assertEqual(moved["weights"], 64 * 4096 * 2048 // 2)
        self.assertEqual(dict(call.quantizer.traffic.bytes)["lora_down"], 64 * 2048 * 32 * 2)
        # Three rows: as many weights are read.
        (call,) = explain((3, 2048, 4096), format="mxfp4", groups=64).calls
        self.assertEqual(dict(call.gemm.traffic.bytes)["weights"], 3 * 4096 * 2048 // 2)
        with self.assertRaisesRegex(NotImplementedError, "sm_100 has no kernel for groups"):
            explain((512, 2048, 4096), format="mxfp4", groups=64, target="sm_100")

    def test_reason_for_the_kernel(self):
        text = str(explain((129, 3840, 3072), rank=128, target="sm_90"))
        reason = "129 rows in tiles of 128 at rank 128, not measured"
        self.assertIn(f"- kernel sm90_v2 instead of sm90_decode: {reason}", text)
        text = str(explain((32, 3840, 3072), rank=8, target="sm_90"))
        for name in ("sm90_decode", "sm90_v2"):
            reason = "rank 8 is not a multiple of 16 up to 256"
            self.assertIn(f"- kernel sm90_v1 instead of {name}: {reason}", text)

    def test_one_row_is_bound_by_memory(self):
        (call,) = explain((1, 4096, 4096), target="sm_90").calls
        self.assertEqual(call.gemm.limit, "DRAM")
        self.assertEqual(call.gemm.filled_s, call.gemm.dram_s)

    @parameterized.parameters(
        ("int4", None, "int4 whole-row scales", 160),
        ("int4", 64, "int4 block 64", 192),
        ("mxfp4", 32, "mxfp4 block 32", 160),
        ("nvfp4", 16, "nvfp4 block 16", 160),
    )
    def test_k_is_padded(self, format, block, text, k_pad):
        found = explain((8, 150, 96), format=format, block_size=block, target="sm_90")
        self.assertIn(
            f"8 x 150 x 96 (M x K x N), K padded to {k_pad} in all figures, {text}", str(found)
        )
        self.assertEqual(found.calls[0].problem.k_pad, k_pad)

    def test_forced_choices_reach_the_planner(self):
        found = explain((4352, 3840, 3072), rank=128, target="sm_100", lora_stages=2)
        self.assertEqual(found.calls[0].plan.lora_stages, 2)

    def test_default_target_is_the_environment(self):
        with mock.patch.dict(os.environ, {targets.ENV_TARGET: "sm_103"}):
            if any(d.platform == "gpu" for d in jax.devices()):
                self.skipTest("the device decides")
            self.assertEqual(explain((64, 128, 256)).calls[0].target.name, "sm_103")

    def test_modified_target(self):
        """The halving rule left out, on the carved-out variant: fewer main stages."""
        right = targets.get("sm_100")
        wrong = dataclasses.replace(right, halved=right.halved - {"lora_up"})
        stages = [
            explain((4352, 3840, 3072), rank=128, target=t, tile_m=256, tile_n=128, lora_stages=2)
            .calls[0]
            .plan.main_stages
            for t in (right, wrong)
        ]
        self.assertEqual(stages, [4, 2])

    @parameterized.parameters(
        ((1, 2), "three positive integers"),
        ((0, 128, 128), "three positive integers"),
        ((4, 128, 1.5), "three positive integers"),
    )
    def test_bad_shape(self, shape, message):
        with self.assertRaisesRegex(ValueError, message):
            explain(shape)

    def test_bad_options(self):
        with self.assertRaisesRegex(ValueError, "unknown format 'fp8'"):
            explain((1, 64, 64), format="fp8")
        with self.assertRaisesRegex(ValueError, "block_size is 0"):
            explain((1, 64, 64), format="int4", block_size=0)
        with self.assertRaisesRegex(ValueError, "block_size is 48; int4 has 32, 64, 128 or None"):
            explain((1, 64, 64), format="int4", block_size=48)
        for name in ("dtype", "out_dtype", "lora_dtype"):
            for dtype in ("float64", "float8_e4m3fn", "int8", jnp.float8_e5m2):
                with self.assertRaisesRegex(TypeError, rf"^jax_w4a4\.explain: {name} is .*; expec"):
                    explain((1, 64, 64), **{name: dtype})
        with self.assertRaisesRegex(TypeError, r"^jax_w4a4\.explain: scale_dtype is float16; exp"):
            explain((1, 64, 64), scale_dtype="float16")
        with self.assertRaisesRegex(TypeError, "cannot force colour"):
            explain((1, 64, 64), colour=3)
        with self.assertRaisesRegex(TypeError, "a function and its arguments"):
            explain("matmul")
        with self.assertRaisesRegex(TypeError, "and 1 arguments"):
            explain((1, 64, 64), 3)
        with self.assertRaises(NotImplementedError):
            explain((1, 64, 64), target="sm_120")

    def test_json(self):
        found = explain((4352, 3840, 3072), rank=128, target="sm_100")
        data = json.loads(json.dumps(found.as_dict()))
        self.assertEqual(data["times"], "computed, not measured")
        (call,) = data["calls"]
        self.assertEqual(call["plan"]["main_stages"], 7)
        self.assertEqual(call["schedule"]["waves"], 6)
        self.assertEqual(call["gemm"]["flops"]["product"], 102_676_561_920)


class DocsTest(parameterized.TestCase):
    """docs/plans.md prints what the code computes."""

    @parameterized.product(
        shape=(
            (256, 3840, 3072, 128),
            (4352, 3840, 3072, 128),
            (4352, 3840, 15360, 128),
            (4352, 15360, 3840, 128),
            (4352, 10240, 3072, 32),
        ),
        target=("sm_90", "sm_100"),
    )
    def test_production_shapes(self, shape, target):
        *mkn, rank = shape
        (call,) = explain(mkn, rank=rank, target=target).calls
        p, s, g = call.plan, call.schedule, call.gemm
        group = ", one CTA" if p.cluster == 1 else ", pair"
        times = (g.compute_s, g.dram_s, g.roofline_s, g.filled_s)
        cells = (
            f"{mkn[0]} x {mkn[1]} x {mkn[2]}, {rank}",
            f"{p.tile_m}x{p.tile_n}{group}",
            f"{p.main_stages} / {p.lora_stages or 'streamed'} / {p.store_stages}",
            str(p.smem_bytes),
            f"{s.tiles} in {s.waves}, {100 * s.fill:.0f} %",
            *(f"{seconds * 1e6:.1f}" for seconds in times),
        )
        docs = pathlib.Path(__file__).parents[1] / "docs" / "plans.md"
        self.assertIn("| " + " | ".join(cells) + " |", docs.read_text().splitlines())


class StatusTest(parameterized.TestCase):
    """The table says what would really run."""

    @parameterized.parameters(
        ((), "sm_90", "kernel sm90_decode, not in this build (it has: no kernel)"),
        (("sm90_decode",), "sm_90", "kernel sm90_decode, in this build"),
        (("sm90_v1",), "sm_100", "kernel sm100_v2, not in this build (it has: sm90_v1)"),
    )
    def test_build(self, kernels, target, expected):
        with mock.patch.object(_ffi, "KERNELS", frozenset(kernels)):
            self.assertIn(expected, str(explain((64, 128, 256), target=target)))

    def test_account_for_comparison(self):
        found = explain((64, 128, 256), rank=16, target="sm_100", kernel="svdquant_v2")
        self.assertIn("an account for comparison", str(found))

    def test_xla(self):
        found = explain(
            lambda x, w: matmul(x, w, implementation="xla"), x_like(M, K), weight(), target="sm_90"
        )
        self.assertEqual(seen(found), [("matmul", 1, M, N, K)])
        self.assertIn("runs as XLA operations (implementation='xla')", str(found))

    def test_named_kernel(self):
        """A kernel that the call asks for is the one that is told of."""
        f = functools.partial(matmul, implementation="sm90_v1")
        for target in (None, "sm_90"):
            found = explain(f, x_like(M, K), weight(), target=target)
            self.assertEqual(found.calls[0].plan.kernel, "sm90_v1")

    def test_prepared_weight(self):
        """Its path, and where there is none the way out, on the target asked for."""
        packed = jnp.zeros((N, K // 2), jnp.uint8)
        scales = jnp.zeros((N, K // 32), jnp.float8_e8m0fnu)
        w = Weight.from_packed(packed, scales, format="mxfp4").prepare()
        found = explain(matmul, x_like(M, K), w, target="sm_90")
        self.assertEqual(found.calls[0].plan.ffi_attrs()["path"], 9)
        self.assertIn("mxfp4 block 32, rank 0, bfloat16 -> bfloat16, prepared\n", str(found))
        for f, target in (
            (functools.partial(matmul, precision="highest"), "sm_90"), (matmul, "sm_100")
        ):  # fmt: skip
            (call,) = explain(f, x_like(M, K), w, target=target).calls
            self.assertIsNone(call.plan)
            self.assertEqual(call.problem.sign_order, "sorted")
            self.assertIn("use w.linear()", call.status)

    def test_target_without_design(self):
        """A function can be explained for a chip without kernels; a bare shape can not."""
        found = explain(matmul, x_like(M, K), weight(), target="sm_120")
        self.assertIn("no kernel plan: no kernel design for sm_120", str(found))
        self.assertIsNone(found.calls[0].gemm)
        self.assertIsNone(found.as_dict()["calls"][0]["plan"])


class FunctionTest(parameterized.TestCase):
    """The operator is found wherever JAX's transformations put it."""

    @parameterized.parameters(False, True)
    def test_jit_and_plain(self, jit):
        f = jax.jit(matmul) if jit else matmul
        self.assertEqual(seen(explain(f, x_like(M, K), weight())), [("matmul", 1, M, N, K)])

    def test_leading_dimensions_fold_into_m(self):
        found = explain(matmul, x_like(3, 5, K), weight())
        self.assertEqual(seen(found), [("matmul", 1, 15, N, K)])

    def test_scan_counts_its_trips(self):
        def f(x, w):
            def body(carry, _):
                return jnp.tile(carry[:, : K // 2], 2) + matmul(carry, w)[:, :K], None

            return matmul(jax.lax.scan(body, x, None, length=7)[0], w)

        self.assertEqual(seen(explain(f, x_like(M, K), weight())), [("matmul", 8, M, N, K)])

    def test_while_and_cond(self):
        def f(x, w):
            y = jax.lax.fori_loop(0, x.shape[0] + jnp.int32(1), lambda _, c: matmul(c, w), x)
            return jax.lax.cond(y[0, 0] > 0, lambda y: matmul(y, w), lambda y: y, y)

        square = weight(n=K)
        self.assertEqual(seen(explain(f, x_like(M, K), square)), [("matmul", 2, M, K, K)])

    def test_branches_are_alternatives(self):
        """The branch with most calls counts, however conditionals nest and repeat."""
        w, v = weight(n=K), weight(n=96)

        def twice(x):
            return matmul(matmul(x, w), w)

        def inner(x):
            return jax.lax.cond(x[0, 0] > 1, twice, lambda x: matmul(x, w), x)

        def choose(x):
            return jax.lax.switch(
                x[0, 0].astype(jnp.int32),
                [lambda x: matmul(x, w), inner, lambda x: x + matmul(x, v)[:, :1]],
                x,
            )

        chosen = jax.jit(choose)
        found = explain(lambda x: matmul(chosen(chosen(x)), w), x_like(M, K))
        self.assertEqual(seen(found), [("matmul", 5, M, K, K), ("matmul", 2, M, 96, K)])
        text = str(found)
        self.assertIn("at most 5x (in a branch)", text)
        self.assertIn("note: branches of cond and switch are alternatives", text)
        self.assertTrue(found.as_dict()["calls"][0]["conditional"])

    def test_keyword_arguments(self):
        """Arrays are traced, everything else is passed through."""
        found = explain(
            matmul,
            x_like(M, K),
            w=weight(),
            preferred_element_type=np.float32,
            implementation="xla",
        )
        self.assertEqual(seen(found), [("matmul", 1, M, N, K)])
        self.assertEqual(found.calls[0].problem.out_dtype, "float32")
        self.assertEqual(found.calls[0].implementation, "xla")

    def test_distinct_calls_have_sections(self):
        def f(x, w, v):
            return matmul(x, w), matmul(x, w), matmul(x, v)

        found = explain(f, x_like(M, K), weight(), weight(n=96))
        self.assertEqual(seen(found), [("matmul", 2, M, N, K), ("matmul", 1, M, 96, K)])
        self.assertIn("bfloat16, 2x\n", str(found))

    def test_vmap(self):
        """An unbatched weight folds the batch into M; a batched one makes groups, or a loop where
        the grouped kernel can't."""
        found = explain(jax.vmap(matmul, in_axes=(1, None)), x_like(M, 6, K), weight())
        self.assertEqual(seen(found), [("matmul", 1, 6 * M, N, K)])
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 6), weight())
        found = explain(jax.vmap(matmul), x_like(6, M, K), stacked)
        self.assertEqual(seen(found), [("grouped", 1, 6 * M, N, K)])
        f = jax.vmap(lambda x, w: matmul(x, w, preferred_element_type="float32"))
        found = explain(f, x_like(6, M, K), stacked)
        self.assertEqual(seen(found), [("matmul", 6, M, N, K)])

    def test_grad_and_remat(self):
        def loss(x, w):
            return jnp.sum(matmul(x, w).astype(jnp.float32))

        found = explain(jax.grad(loss), x_like(M, K), weight())
        self.assertEqual(seen(found), [("matmul", 1, M, N, K)])
        found = explain(jax.grad(jax.checkpoint(loss)), x_like(M, K), weight())
        self.assertGreaterEqual(found.calls[0].count, 1)

    def test_shared_activation(self):
        def f(x, w):
            a = quantize_activation(x, w)
            return matmul(a, w), matmul(a, w)

        found = explain(f, x_like(M, K), weight())
        self.assertEqual(seen(found), [("quantize", 1, M, 0, K), ("gemm", 2, M, N, K)])
        quantize, gemm = found.calls
        self.assertIsNone(quantize.gemm)
        self.assertIsNotNone(quantize.quantizer)
        self.assertIsNone(gemm.quantizer)
        self.assertNotIn("waves:", str(quantize))

    def test_target_replans(self):
        found = explain(matmul, x_like(M, K), weight(), target="sm_100")
        self.assertEqual(found.calls[0].plan.kernel, "sm100_v2")
        self.assertEqual(found.calls[0].target.name, "sm_100")

    def test_static_arguments(self):
        f = jax.jit(
            lambda x, w, twice: matmul(matmul(x, w), w) if twice else matmul(x, w), static_argnums=2
        )
        self.assertEqual(explain(f, x_like(M, K), weight(n=K), True).calls[0].count, 2)

    def test_symbolic_rows(self):
        (m,) = jax.export.symbolic_shape("m")
        found = explain(matmul, x_like(m, K), weight())
        self.assertIsNone(found.calls[0].problem.m)
        self.assertIn("M (symbolic, figures for 4096) x 128 x 256", str(found))

    def test_nothing_to_explain(self):
        with self.assertRaisesRegex(ValueError, "does not contain the operator.*relu"):
            explain(jax.nn.relu, x_like(M, K))

    def test_shape_options_are_refused(self):
        with self.assertRaisesRegex(TypeError, r"^jax_w4a4\.explain: 'matmul': .*'rank'; options"):
            explain(matmul, x_like(M, K), weight(), rank=16)

    def test_does_not_run_the_function(self):
        def f(x, w):
            y = matmul(x, w)
            jax.debug.callback(lambda: self.fail("executed"))
            return y

        explain(f, x_like(M, K), weight())


class ShardingTest(parameterized.TestCase):
    """Plans of one device's shard, on whatever kind of mesh."""

    def setUp(self):
        super().setUp()
        if len(jax.devices()) < 4:
            self.skipTest("needs four devices")

    def mesh(self, kind=AxisType.Auto):
        return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))

    def place(self, mesh, dim):
        w = weight()
        specs = w.shard_specs("model", dim)
        return jax.tree.map(lambda v, s: jax.device_put(v, NamedSharding(mesh, s)), w, specs)

    @parameterized.parameters(("n", M // 2, N // 2, K), ("k", M // 2, N, K // 2))
    def test_auto(self, dim, m, n, k):
        mesh = self.mesh()
        x = x_like(M, K, sharding=NamedSharding(mesh, P("data")))
        w = self.place(mesh, dim)

        def f(x, w):
            return matmul(matmul(x, w)[:, :K], w)

        found = explain(f, x, w)
        self.assertIn(
            ("matmul", m, n, k),
            [(c.kind, *s[2:]) for c, s in zip(found.calls, seen(found), strict=True)],
        )
        self.assertTrue(all(s[3] == n and s[4] == k for s in seen(found)), seen(found))
        self.assertIn("one of 4 devices", found.notes[0])

    def test_auto_after_the_function_ran(self):
        """An executable that JAX already holds must not hide the partitioner's plans."""
        mesh = self.mesh()
        w = self.place(mesh, "n")
        x = jax.device_put(jnp.ones((M, K), jnp.bfloat16), NamedSharding(mesh, P("data")))
        f = jax.jit(lambda x, w: matmul(x, w))
        f(x, w).block_until_ready()
        for _ in range(2):
            self.assertEqual(seen(explain(f, x, w)), [("matmul", 1, M // 2, N // 2, K)])

    def test_auto_in_scan_keeps_the_count(self):
        mesh = self.mesh()
        x = x_like(M, K, sharding=NamedSharding(mesh, P("data")))

        def f(x, w):
            return jax.lax.scan(lambda c, _: (matmul(c, w)[:, :K], None), x, None, length=5)[0]

        found = explain(f, x, self.place(mesh, "n"))
        self.assertEqual([s[1:] for s in seen(found)], [(5, M // 2, N // 2, K)])

    def test_layers_of_a_network(self):
        """Column- and row-parallel layers in a scan: each section keeps its own count."""
        mesh = self.mesh()
        x = x_like(M, K, sharding=NamedSharding(mesh, P("data")))

        def place(w, dim):
            specs = w.shard_specs("model", dim)
            return jax.tree.map(lambda v, s: jax.device_put(v, NamedSharding(mesh, s)), w, specs)

        weights = (
            place(weight(n=K), "n"),
            place(weight(n=512), "n"),
            place(weight(n=512), "n"),
            place(weight(n=K, k=512), "k"),
        )

        def layer(x, weights):
            q, gate, up, down = weights
            h = matmul(quantize_activation(x, q), q)
            return matmul(jax.nn.silu(matmul(h, gate)) * matmul(h, up), down)

        def f(x, weights):
            x = jax.lax.scan(lambda c, _: (layer(c, weights), None), x, None, length=3)[0]
            return matmul(x, weights[0])

        self.assertEqual(
            seen(explain(f, x, weights)),
            [
                ("quantize", 3, M // 2, 0, K),
                ("gemm", 3, M // 2, K // 2, K),
                ("matmul", 6, M // 2, 256, K),
                ("matmul", 3, M // 2, K, 256),
                ("matmul", 1, M // 2, K // 2, K),
            ],
        )

    def test_auto_shardings_of_the_jit(self):
        """Sharded by in_shardings only: no argument shows it."""
        mesh = self.mesh()
        rows = NamedSharding(mesh, P("data"))
        f = jax.jit(matmul, in_shardings=(rows, NamedSharding(mesh, P())))
        self.assertEqual(seen(explain(f, x_like(M, K), weight())), [("matmul", 1, M // 2, N, K)])

    def test_shared_activation(self):
        mesh = self.mesh()
        x = x_like(M, K, sharding=NamedSharding(mesh, P("data")))
        found = explain(lambda x, w: matmul(quantize_activation(x, w), w), x, self.place(mesh, "n"))
        self.assertEqual(
            seen(found), [("quantize", 1, M // 2, 0, K), ("gemm", 1, M // 2, N // 2, K)]
        )

    def test_shard_map(self):
        mesh = self.mesh()
        w = self.place(mesh, "n")
        f = jax.shard_map(
            matmul,
            mesh=mesh,
            in_specs=(P("data"), w.shard_specs("model", "n")),
            out_specs=P("data", "model"),
        )
        x = x_like(M, K, sharding=NamedSharding(mesh, P("data")))
        found = explain(f, x, w)
        self.assertEqual(seen(found), [("matmul", 1, M // 2, N // 2, K)])
        self.assertEqual(found.notes, ())

    def test_explicit(self):
        mesh = self.mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            w = self.place(mesh, "n")
            x = jax.device_put(jnp.ones((M, K), jnp.bfloat16), NamedSharding(mesh, P("data")))
            self.assertEqual(seen(explain(matmul, x, w)), [("matmul", 1, M // 2, N // 2, K)])

    def partitioned(self, reported):
        """Explains a stand-in for the operator whose compilation reports the given plans."""
        fake = Primitive("jax_w4a4_matmul")
        fake.def_abstract_eval(lambda x, **_: x)

        def lowering(ctx, x, **_):
            for each in reported:
                plan.record(each)
            return [x]

        jax.interpreters.mlir.register_lowering(fake, lowering)
        whole = explain((M, K, N), target="sm_90").calls[0].plan
        x = x_like(M, K, sharding=NamedSharding(self.mesh(), P("data")))
        return explain(lambda x: fake.bind(x, plan=whole, implementation=None), x)

    def test_no_report_says_so(self):
        """Without per-device plans the global shape stays, with a note."""
        found = self.partitioned([])
        self.assertEqual(seen(found), [("matmul", 1, M, N, K)])
        self.assertIn("no per-device plan was reported", found.notes[0])

    def test_ambiguous_report_gives_no_count(self):
        """More plans than calls: all are shown, none with an invented count."""
        parts = [
            explain(shape, target="sm_90").calls[0].plan
            for shape in ((M, K, N // 2), (M, K // 2, N))
        ]
        found = self.partitioned(parts)
        self.assertEqual(
            seen(found), [("matmul", None, M, N // 2, K), ("matmul", None, M, N, K // 2)]
        )
        self.assertIn(", several times\n", str(found))


if __name__ == "__main__":
    absltest.main()
