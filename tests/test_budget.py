"""The account: byte formulas, the halving rule, the layout."""

import dataclasses

from absl.testing import absltest, parameterized

from jax_w4a4.plan import budget, targets
from jax_w4a4.plan.budget import Config, Problem, Row

SCALE = {"nvfp4": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu", "int4": "float16"}
BLOCK = {"nvfp4": 16, "mxfp4": 32, "int4": 64}


def problem(m=4352, k=3840, n=3072, rank=128, format="nvfp4", block=None, **changes):
    base = Problem(
        m=m,
        n=n,
        k_pad=k,
        rank=rank,
        format=format,
        block_size=block or BLOCK.get(format, 16),
        x_dtype="bfloat16",
        out_dtype="bfloat16",
        lora_dtype="bfloat16",
        scale_dtype=SCALE.get(format, "float16"),
    )
    return dataclasses.replace(base, **changes)


def by_name(rows):
    return {row.name: row for row in rows}


class ProblemTest(parameterized.TestCase):
    """Nonsense is refused where it enters, with what came and what was expected."""

    @parameterized.parameters(
        ({"m": -1}, "Problem.m is -1"),
        ({"m": 1.0}, "Problem.m is 1.0"),
        ({"n": True}, "Problem.n is True"),
        ({"rank": -16}, "Problem.rank is -16"),
        ({"k_pad": 48}, "multiple of 32"),
        ({"k_pad": 0}, "Problem.k_pad is 0"),
        ({"format": "fp4"}, "unknown format 'fp4'"),
        ({"block_size": 32}, "nvfp4 has a block size of 16, got 32"),
        ({"out_dtype": "int8"}, "Problem.out_dtype is 'int8'"),
    )
    def test_refused(self, changes, message):
        with self.assertRaisesRegex(ValueError, f"jax_w4a4.plan: .*{message}"):
            problem(**changes)

    def test_block_must_divide(self):
        with self.assertRaisesRegex(ValueError, "block size 128"):
            problem(k=96, format="int4", block=128)

    def test_symbolic_and_empty_are_valid(self):
        self.assertIsNone(problem(m=None).m)
        self.assertEqual(problem(m=0, n=0).m, 0)


class Sm90V1Test(parameterized.TestCase):
    """The numbers the v1 kernel's launch code checks against its own."""

    def rows(self, tile_m, **kwargs):
        config = Config(tile_m, 128, 64, 1, 2, 1, 0)
        return by_name(budget.sm90_v1(problem(**kwargs), targets.get("sm_90"), config))

    @parameterized.parameters((32, 4096), (64, 8192), (128, 16384))
    def test_operand_tiles_are_bf16(self, tile_m, activation):
        rows = self.rows(tile_m)
        self.assertEqual(rows["weight"].single, 16384)
        self.assertEqual(rows["activation"].single, activation)
        self.assertEqual(rows["lora_up"].single, 16384)
        self.assertEqual(rows["lora_act"].single, tile_m * 128)
        self.assertEqual(rows["aux"].single, 1024)
        self.assertEqual(rows["accumulator"].memory, "registers")

    @parameterized.parameters(
        ("nvfp4", None, 0), ("mxfp4", None, 0), ("int4", 32, 2), ("int4", 64, 1), ("int4", 3840, 1)
    )
    def test_scales_are_resident_only_for_int4(self, format, block, groups):
        """bf16 holds e2m1 times its scale exactly, int4 times its scale not."""
        rows = self.rows(64, format=format, block=block)
        self.assertEqual(rows["weight_scale"].single, 128 * groups * 4)
        self.assertEqual(rows["activation_scale"].single, 64 * groups * 4)

    def test_a_cluster_halves_nothing_on_hopper(self):
        self.assertFalse(any(row.sliced for row in self.rows(128).values()))
        self.assertTrue(all(row.dual == row.single for row in self.rows(128).values()))


class SvdquantV2Test(parameterized.TestCase):
    """Bytes of the published account, per stage and CTA."""

    @parameterized.parameters(
        ((128, 128, 1), 36864),
        ((128, 256, 1), 55296),
        ((256, 128, 2), 28672),
        ((256, 256, 2), 38912),
    )
    def test_main_stage(self, tile, expected):
        config = Config(tile[0], tile[1], 256, tile[2], 1, 2, 2)
        rows = budget.svdquant_v2(problem(), targets.get("sm_100"), config)
        stage = sum(row.bytes(tile[2]) for row in rows if row.lifetime == "K loop")
        self.assertEqual(stage, expected)

    def test_lora_stage_with_and_without_halved_lora_up(self):
        """R=128 at 256x128: lora_up 32768 -> 16384, a LoRA stage 65536 -> 49152."""
        right = targets.get("sm_100")
        wrong = dataclasses.replace(right, halved=right.halved - {"lora_up"})
        config = Config(256, 128, 256, 2, 4, 2, 2)
        for target, expected in ((right, 16384), (wrong, 32768)):
            rows = by_name(budget.svdquant_v2(problem(), target, config))
            self.assertEqual(rows["lora_up"].dual, expected)
            self.assertEqual(rows["lora_act"].dual, 32768)
            self.assertEqual(rows["lora_up"].single, 32768)


class Sm100V2Test(parameterized.TestCase):
    """The tcgen05 design: what a pair slices, what LoRA costs, what TMEM holds."""

    def config(self, tile=(256, 128, 2), lora=0):
        return Config(tile[0], tile[1], 256, tile[2], 2, lora, 2)

    def test_pair_slices_by_the_target_rule(self):
        rows = by_name(budget.sm100_v2(problem(), targets.get("sm_100"), self.config(lora=2)))
        for name in ("activation", "activation_scale", "lora_act", "weight", "lora_up"):
            self.assertEqual(rows[name].dual * 2, rows[name].single, name)
        for name in ("weight_scale", "store", "aux", "barriers"):
            self.assertEqual(rows[name].dual, rows[name].single, name)

    @parameterized.parameters((0, 0), (16, 1), (64, 1), (65, 2), (128, 2), (256, 4))
    def test_streamed_lora_owns_no_bytes(self, rank, steps):
        p = problem(rank=rank)
        rows = by_name(budget.sm100_v2(p, targets.get("sm_100"), self.config()))
        self.assertEqual((rows["lora_up"].single, rows["lora_act"].single), (0, 0))
        self.assertEqual(budget.lora_steps(p), steps)

    def test_streamed_lora_fits_the_ring_slots(self):
        """64 ranks of 16 bits take exactly the bytes of 256 4-bit codes per row."""
        p = problem(rank=64)
        slots = by_name(budget.sm100_v2(p, targets.get("sm_100"), self.config()))
        carved = by_name(budget.sm100_v2(p, targets.get("sm_100"), self.config(lora=1)))
        self.assertEqual(slots["weight"].single, carved["lora_up"].single)
        self.assertEqual(slots["activation"].single, carved["lora_act"].single)

    @parameterized.parameters(
        # tile, format, accumulators, columns in use
        ((256, 128, 2), "nvfp4", 3, 384 + 2 * (16 + 16)),
        ((128, 128, 1), "mxfp4", 3, 384 + 2 * (8 + 8)),
        ((256, 256, 2), "nvfp4", 1, 256 + 2 * (16 + 32)),
        ((128, 256, 1), "mxfp4", 1, 256 + 2 * (8 + 16)),
        ((128, 64, 1), "nvfp4", 3, 192 + 2 * (16 + 16)),
    )
    def test_tmem_columns(self, tile, format, accumulators, columns):
        """256-wide accumulators leave no room for a second one beside the scales of two stages."""
        p, target, config = problem(format=format), targets.get("sm_100"), self.config(tile)
        rows = by_name(budget.sm100_v2(p, target, config))
        self.assertEqual(rows["accumulator"].stages, accumulators)
        self.assertEqual(budget.tmem_columns(p, target, config), columns)
        self.assertLessEqual(columns, 512)

    def test_mxfp4_scales_are_half(self):
        nv = by_name(budget.sm100_v2(problem(), targets.get("sm_100"), self.config()))
        mx = by_name(budget.sm100_v2(problem(format="mxfp4"), targets.get("sm_100"), self.config()))
        self.assertEqual(nv["weight_scale"].single, 2 * mx["weight_scale"].single)

    def test_narrow_tile_keeps_the_scale_atom(self):
        """Scales come in 128-row atoms even where the tile has 64 columns."""
        rows = by_name(budget.sm100_v2(problem(), targets.get("sm_100"), self.config((128, 64, 1))))
        self.assertEqual(rows["weight_scale"].single, 128 * 16)

    def test_fp32_output_doubles_the_store(self):
        rows = by_name(
            budget.sm100_v2(problem(out_dtype="float32"), targets.get("sm_100"), self.config())
        )
        self.assertEqual(rows["store"].single, 2 * 8192)


class LayoutTest(parameterized.TestCase):
    """Regions: inside, aligned, disjoint unless their lifetimes are."""

    @parameterized.product(
        tile_m=(32, 64, 128), format=("nvfp4", "int4"), rank=(0, 16), block=(None, 32)
    )
    def test_sm90_v1(self, tile_m, format, rank, block):
        block = block if format == "int4" else None
        p = problem(format=format, rank=rank, block=block)
        config = Config(tile_m, 128, 64, 1, 2, 1 if rank else 0, 0)
        rows = budget.sm90_v1(p, targets.get("sm_90"), config)
        regions, total = budget.layout(rows, 1, 128)
        spans = [
            (r.name, r.offset, r.offset + r.bytes_per_stage * r.stages) for r in regions if r.stages
        ]
        for name, start, end in spans:
            self.assertEqual(start % 128, 0, name)
            self.assertLessEqual(end, total, name)
        over = {"lora_up", "lora_act"}
        for i, (a, a0, a1) in enumerate(spans):
            for b, b0, b1 in spans[:i]:
                if (a in over) == (b in over) or "aux" in (a, b):
                    self.assertTrue(a1 <= b0 or b1 <= a0, f"{a} overlaps {b}")

    def test_overlay_costs_nothing_while_it_is_smaller(self):
        p = problem(rank=128)
        with_lora = budget.sm90_v1(p, targets.get("sm_90"), Config(128, 128, 64, 1, 2, 1, 0))
        without = budget.sm90_v1(p, targets.get("sm_90"), Config(128, 128, 64, 1, 2, 0, 0))
        self.assertEqual(budget.layout(with_lora, 1, 128)[1], budget.layout(without, 1, 128)[1])

    def test_overlay_counts_where_it_is_larger(self):
        def row(name, size, overlaps, lifetime):
            return Row(name, size, size, 1, False, overlaps, "smem", lifetime, "")

        rows = (
            row("weight", 100, True, "K loop"),
            row("lora_up", 1000, False, "epilogue"),
            row("aux", 10, True, "kernel"),
        )
        regions, total = budget.layout(rows, 1, 128)
        self.assertEqual([r.offset for r in regions], [0, 0, 1024])
        self.assertEqual(total, 1152)

    def test_tmem_and_registers_take_no_shared_memory(self):
        rows = budget.sm100_v2(problem(), targets.get("sm_100"), Config(256, 128, 256, 2, 7, 0, 3))
        regions, total = budget.layout(rows, 2, 1024)
        self.assertNotIn("accumulator", [r.name for r in regions])
        self.assertEqual(total, 7 * 28672 + 3 * 8192 + 1024 + 1024)


class QuantizerTest(parameterized.TestCase):
    """The quantizer's launch."""

    @parameterized.parameters(
        ("nvfp4", None, 0, 16448),
        ("nvfp4", None, 128, 32832),
        ("mxfp4", None, 16, 32832),
        ("int4", 128, 0, 16448),
        ("int4", 3840, 0, 16448),
    )
    def test_plan(self, format, block, rank, smem):
        q = budget.quantizer_v1(problem(format=format, block=block, rank=rank))
        self.assertEqual((q.rows, q.chunk_k, q.threads), (16, 256, 256))
        self.assertEqual(q.smem_bytes, smem)


class TrafficTest(parameterized.TestCase):
    """FLOP and bytes against figures worked out by hand."""

    def test_gemm(self):
        t = budget.gemm_traffic(problem(), 4352)
        self.assertEqual(dict(t.flops), {"product": 102_676_561_920, "LoRA-up": 3_422_552_064})
        self.assertEqual(dict(t.bytes)["weights"], 3072 * 1920)
        self.assertEqual(dict(t.bytes)["weight scales"], 3072 * 240)
        self.assertEqual(dict(t.bytes)["output"], 4352 * 3072 * 2)
        self.assertEqual(t.total_bytes, sum(dict(t.bytes).values()))

    def test_weight_scales_are_rearranged_on_blackwell(self):
        moved = dict(budget.quantizer_traffic(problem(), 4352, scale_atoms=True).bytes)
        self.assertEqual(moved["weight scales as atoms"], 2 * 3072 * 240)
        self.assertNotIn(
            "weight scales as atoms", dict(budget.quantizer_traffic(problem(), 1).bytes)
        )

    def test_quantizer_reads_x_once(self):
        t = budget.quantizer_traffic(problem(), 4352)
        self.assertEqual(dict(t.bytes)["x"], 33_423_360)
        self.assertEqual(dict(t.bytes)["codes"], 8_355_840)
        self.assertEqual(t.total_flops, 2 * 4352 * 3840 * 128)

    def test_low_rank_down_changes_its_launch(self):
        """In the gemm's: work and lora_down go with it, x is read twice, the sums of three CTAs and
        lora_act are written twice."""
        p = problem(m=64, rank=32)
        without = budget.quantizer_traffic(p, 64), budget.gemm_traffic(p, 64)
        ahead = budget.quantizer_traffic(p, 64, ahead=4), budget.gemm_traffic(p, 64, ahead=4)
        total = [sum(t.total_flops for t in each) for each in (without, ahead)]
        self.assertEqual(*total)
        self.assertEqual([t.total_flops for t in ahead][0], 0)
        x, down, sums = 64 * 3840 * 2, 3840 * 32 * 2, 3 * 64 * 32 * 4
        moved = [[t.total_bytes for t in each] for each in (without, ahead)]
        self.assertEqual(moved[1], [moved[0][0] - down + sums, moved[0][1] + x + down + sums])


class GroupedDownTest(parameterized.TestCase):
    """LoRA-down of grouped products: CTAs for all tiles that there may be begin at once."""

    @parameterized.parameters(
        (16, 8, 6, 2), (64, 8, 6, 2), (96, 4, 4, 2), (128, 100, 4, 2), (144, 8, 5, 1),
        (256, 8, 5, 1),
    )  # fmt: skip
    def test_two_share_an_sm(self, rank, rows, stages, ctas):
        p = problem(rank=rank, m=64 * rows, groups=64)
        down = budget.down_v2(p, 1, 232448)
        self.assertEqual(down.stages, stages)
        # Of an SM's 228 KiB each CTA has 1 KiB more than it asks for.
        self.assertEqual(228 * 1024 // (down.smem_bytes + 1024), ctas)
        alone = budget.down_v2(problem(rank=rank, m=64 * rows), 1, 232448)
        self.assertEqual(alone.stages, 8 if rank <= 128 else 5)


class BesideTest(parameterized.TestCase):
    """CTAs of quantizer 5 beside those of sm90_decode: 64 K registers and 228 KB are the SM's."""

    @parameterized.parameters(
        # Registers of the gemm's 640 threads (or 384); the quantizer has 96 for each of 256.
        (8, 128, 64), (16, 24, 64), (32, 32, 64), (64, 32, 96), (32, 40, 96), (64, 40, 96),
    )  # fmt: skip
    def test_registers_and_shared_memory(self, tile_m, tile_n, gemm):
        beside = budget.beside_decode(problem(k=4096), tile_m, tile_n)
        self.assertEqual(beside, 640 * gemm + 256 * 96 <= 65536)
        design = budget.DESIGNS["sm90_decode"]
        # 1 KB of the SM's is reserved for each CTA; 20544 bytes are the quantizer's.
        left = 228 * 1024 - design.capacity(targets.get("sm_90"), tile_m) - 1024
        left += design.spare(problem(m=tile_m, k=4096), tile_m, tile_n)
        self.assertGreaterEqual(left, 1024 + 20544 if beside else 0)

    def test_long_tokens_take_more_registers(self):
        self.assertTrue(budget.beside_decode(problem(k=4096), 32, 32))
        long = dataclasses.replace(problem(k=4128), k=4104)
        self.assertFalse(budget.beside_decode(long, 32, 32))
        self.assertTrue(budget.beside_decode(problem(k=16384), 16, 32))
        # And what the gemm would leave them stays its own.
        design = budget.DESIGNS["sm90_decode"]
        for k, bytes in ((4096, 21568), (4128, 0)):
            self.assertEqual(design.spare(problem(m=32, k=k), 32, 32), bytes)


class DownAheadTest(parameterized.TestCase):
    """LoRA-down in the decode GEMM's launch: its ring takes what that GEMM's CTAs have."""

    STAGE = 72 * 128 + 64 * 128  # 64 k: x of 64 tokens in a slot for 72, a box of 64 ranks

    @parameterized.parameters(
        # Bytes of the GEMM, stages: two at least, sixteen at most, none in between lost.
        (2 * STAGE + 32, 2), (3 * STAGE + 47, 2), (3 * STAGE + 48, 3), (232448, 13),
        (16 * STAGE + 256, 16), (20 * STAGE, 16),
    )  # fmt: skip
    def test_stages(self, smem, stages):
        down = budget.down_ahead(problem(m=64, rank=32), 64, 640, smem, 132)
        self.assertEqual((down.stages, down.off_barriers), (stages, stages * self.STAGE))
        self.assertEqual(down.smem_bytes, stages * (self.STAGE + 16))
        self.assertLessEqual(down.smem_bytes, smem)
        # The partial sums of 64 tokens and ranks lie over the ring, in front of its barriers.
        self.assertGreaterEqual(down.off_barriers, 64 * (64 + 4) * 4)
        self.assertEqual((down.ahead, down.rows, down.cluster, down.threads), (4, 64, 1, 640))

    def test_too_little_shared_memory(self):
        short = 2 * self.STAGE + 31
        self.assertIsNone(budget.down_ahead(problem(m=64, rank=32), 64, 640, short, 132))

    def test_128_tokens(self):
        down = budget.down_ahead(problem(m=65, rank=32), 128, 384, 223872, 67)
        stage = 128 * 128 + 64 * 128
        self.assertEqual((down.stages, down.off_barriers), (9, 9 * stage))
        self.assertEqual((down.rows, down.threads, down.early), (128, 384, 67))

    @parameterized.parameters(129, 256)
    def test_256_tokens(self, m):
        down = budget.down_ahead(problem(m=m, rank=32), 128, 384, 223872, 3)
        stage = 256 * 128 + 64 * 128
        self.assertEqual((down.stages, down.off_barriers), (5, 5 * stage))
        self.assertEqual((down.rows, down.threads), (256, 384))
        self.assertEqual(down.early, 3)

    @parameterized.parameters((257, 12), (384, 12), (385, 16), (512, 16))
    def test_more_tokens_have_ctas_for_each_tile(self, m, ctas):
        down = budget.down_ahead(problem(m=m, rank=32), 128, 384, 223872, 0)
        self.assertEqual((down.ahead, down.rows, down.stages), (ctas, 128, 9))

    def test_256_tokens_need_two_stages(self):
        stage = 256 * 128 + 64 * 128
        self.assertEqual(
            [budget.down_ahead(problem(m=129, rank=32), 128, 384, smem, 0) is None
             for smem in (2 * stage + 31, 2 * stage + 32)],
            [True, False],
        )  # fmt: skip


if __name__ == "__main__":
    absltest.main()
