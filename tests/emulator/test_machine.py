"""The machine on hand-written PTX: arithmetic, divergence, barriers, and what is an error."""

import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
from absl.testing import parameterized

from emulator import (
    DeadlockError,
    Device,
    EmulationError,
    Options,
    RaceError,
    UnknownOpcodeError,
    lanes,
    ptx,
    tensormap,
)
from emulator.compile import Code
from emulator.errors import OutOfBoundsError, ProtocolError, UninitializedError
from emulator.scheduler import POLICIES

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 dynamic[];
.visible .entry kernel(.param .u64 in, .param .u64 out)
{
  .reg .pred %p<20>;
  .reg .b16 %h<20>;
  .reg .b32 %r<60>;
  .reg .f32 %f<40>;
  .reg .b64 %d<20>;
  ld.param.u64 %d1, [in];
  ld.param.u64 %d2, [out];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %d3, %r1, 4;
  add.s64 %d4, %d1, %d3;
  add.s64 %d5, %d2, %d3;
"""


def code_of(body: str) -> Code:
    code = Code(ptx.parse(HEAD + body + "\n  ret;\n}\n").kernels["kernel"])
    assert code.nodes
    return code


def run(body, values=None, threads=32, shared=1024, cluster=1, **options):
    """Runs the body; every thread has its word of the input at [%d4], of the output at [%d5]."""
    device = Device(Options(**options))
    total = threads * cluster
    values = np.arange(total, dtype=np.uint32) if values is None else values
    source, out = device.array(values, "in"), device.empty(4 * total, "out")
    device.launch(
        code_of(body), (cluster, 1, 1), (threads, 1, 1), struct.pack("<QQ", source.base, out.base),
        cluster=cluster, dynamic_shared=shared,
    )  # fmt: skip
    return out.data[: 4 * total].view(np.uint32).copy()


LOAD, STORE = "ld.global.u32 %r2, [%d4];", "st.global.u32 [%d5], %r3;"


class Arithmetic(parameterized.TestCase):
    @parameterized.parameters(
        ("add.s32 %r3, %r2, -5;", lambda x: x - 5),
        ("mul.hi.u32 %r3, %r2, %r2;", lambda x: x.astype(np.uint64) ** 2 >> 32),
        (
            "cvt.u64.u32 %d6, %r2; shl.b64 %d6, %d6, 32; mul.hi.u64 %d7, %d6, %d6;"
            "cvt.u32.u64 %r3, %d7;",
            lambda x: x * x,
        ),
        ("mad.lo.s32 %r3, %r2, 7, %r1;", lambda x: x * 7 + np.arange(32)),
        ("shr.s32 %r3, %r2, 3;", lambda x: x.view(np.int32) >> 3),
        ("shr.u32 %r3, %r2, 40;", lambda x: x * 0),
        ("shl.b32 %r3, %r2, %r1;", lambda x: x << np.arange(32, dtype=np.uint32)),
        ("bfe.u32 %r3, %r2, 4, 8;", lambda x: x >> 4 & 255),
        ("bfi.b32 %r3, %r2, %r1, 8, 4;", lambda x: np.arange(32) & ~0xF00 | (x & 15) << 8),
        ("prmt.b32 %r3, %r2, %r1, 0x5410;", lambda x: x & 0xFFFF | np.arange(32) << 16),
        ("prmt.b32 %r3, %r2, 0, 0x888B;",
         lambda x: np.where(x >> 31, 0xFF, 0) | np.where(x >> 7 & 1, 0xFFFFFF00, 0)),
        ("lop3.b32 %r3, %r2, %r1, 15, 0xEA;", lambda x: x & np.arange(32) | 15),
        ("popc.b32 %r3, %r2;", np.bitwise_count),
        ("div.s32 %r3, %r2, -7;",
         lambda x: np.trunc(x.view(np.int32) / -7).astype(np.int64)),
        ("min.s32 %r3, %r2, 3;", lambda x: np.minimum(x.view(np.int32), 3)),
        ("setp.lt.s32 %p1, %r2, 0;\n selp.b32 %r3, 1, 2, %p1;", lambda x: np.where(x >> 31, 1, 2)),
        ("cvt.u16.u32 %h1, %r2;\n cvt.s32.s16 %r3, %h1;", lambda x: x.astype(np.int16)),
        ("mov.b32 {%h1, %h2}, %r2;\n mov.b32 %r3, {%h2, %h1};", lambda x: x >> 16 | x << 16),
    )  # fmt: skip
    def test_integer(self, text, want):
        x = np.random.default_rng(0).integers(0, 1 << 32, 32, np.uint32)
        x[:4] = 0, 1, 0x80000000, 0xFFFFFFFF
        got = run(LOAD + text + STORE, x)
        np.testing.assert_array_equal(got, np.asarray(want(x)).astype(np.int64).astype(np.uint32))

    def test_fma_rounds_once(self):
        rng = np.random.default_rng(1)
        a, b = rng.standard_normal((2, 4096)).astype(np.float32)
        c = (-a.astype(np.float64) * b * (1 + rng.uniform(-1, 1, 4096) * 2.0**-24)).astype(
            np.float32
        )
        exact = [_fma_reference(*v) for v in zip(a, b, c, strict=True)]
        got = lanes.fma(a, b, c)
        np.testing.assert_array_equal(
            got.view(np.uint32), np.array(exact, np.float32).view(np.uint32)
        )

    def test_float_modifiers(self):
        tiny = np.float32(1e-40)
        a = np.array([np.nan, -1.0, -0.0, tiny], np.float32)
        b = np.array([2.0, np.nan, 0.0, -tiny], np.float32)
        want = np.array([2, -1, -0.0], np.float32)
        np.testing.assert_array_equal(lanes.fmin(a, b)[:3].view(np.uint32), want.view(np.uint32))
        np.testing.assert_array_equal(lanes.ftz(a).view(np.uint32)[3], 0)
        got = lanes.minmax(a, b, True, True, True)
        self.assertTrue(np.isnan(got[:2]).all())


class SmallFloats(parameterized.TestCase):
    """cvt to and from 4- and 8-bit floats, against ml_dtypes."""

    X = np.r_[
        np.array([0, -0.0, 0.25, 0.75, 2.5, -3.5, 5, 7, np.nan, np.inf, -1e30], np.float32),
        np.random.default_rng(0).standard_normal(53).astype(np.float32) * 3,
    ]

    def convert(self, text):
        x = self.X.view(np.uint32)
        device = Device()
        source, out = device.array(x, "in"), device.empty(128, "out")
        load = """
          add.s64 %d6, %d4, 128;
          ld.global.f32 %f1, [%d4];
          ld.global.f32 %f2, [%d6];
        """
        device.launch(
            code_of(load + text + STORE), (1, 1, 1), (32, 1, 1),
            struct.pack("<QQ", source.base, out.base),
        )  # fmt: skip
        return out.data[:128].view(np.uint32), self.X[:32], self.X[32:]

    @parameterized.parameters(("e4m3x2", "float8_e4m3fn", 448), ("e5m2x2", "float8_e5m2", 57344))
    def test_fp8(self, name, dtype, largest):
        got, lo, hi = self.convert(
            f"cvt.rn.satfinite.{name}.f32 %h1, %f2, %f1; cvt.u32.u16 %r3, %h1;"
        )
        dtype = np.dtype(getattr(ml_dtypes, dtype))
        for part, x in ((got & 255, lo), (got >> 8, hi)):
            finite = ~np.isnan(x)
            want = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
            np.testing.assert_array_equal(part[finite], want[finite])
            self.assertTrue((part[~finite] & 0x7F == 0x7F).all())

    def test_e2m1(self):
        text = """
          .reg .b8 %b<4>;
          cvt.rn.satfinite.e2m1x2.f32 %b1, %f2, %f1;
          mov.b16 %h1, {%b1, 0};
          cvt.u32.u16 %r3, %h1;
        """
        got, lo, hi = self.convert(text)
        for part, x in ((got & 15, lo), (got >> 4, hi)):
            finite = ~np.isnan(x)
            want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            np.testing.assert_array_equal(part[finite], want[finite])
            self.assertTrue((part[~finite] == 7).all())

    def test_e8m0_rounds_up(self):
        got, lo, _ = self.convert(
            "cvt.rp.satfinite.ue8m0x2.f32 %h1, %f2, %f1; cvt.u32.u16 %r3, %h1;"
            "and.b32 %r3, %r3, 255;"
        )
        for byte, x in zip(got, np.abs(lo), strict=True):
            if np.isfinite(x) and x > 0:
                self.assertLessEqual(x, 2.0 ** (int(byte) - 127))
                self.assertLess(2.0 ** (int(byte) - 128), x)

    def test_unpack(self):
        got, lo, hi = self.convert(
            "cvt.rn.satfinite.e4m3x2.f32 %h1, %f2, %f1; cvt.rn.f16x2.e4m3x2 %r3, %h1;"
        )
        for part, x in ((got & 0xFFFF, lo), (got >> 16, hi)):
            finite = ~np.isnan(x)
            want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float16)
            np.testing.assert_array_equal(
                part.astype(np.uint16).view(np.float16)[finite], want[finite]
            )


def _fma_reference(x, y, z):
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    guess = np.float32(float(exact))
    best = min(
        (guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))),
        key=lambda v: (abs(Fraction(float(v)) - exact), v.view(np.uint32) & 1),
    )
    return best


class Control(parameterized.TestCase):
    @parameterized.parameters(*range(4))
    def test_divergent_loop(self, seed):
        """Every lane counts to its own number; lanes meet again at the end."""
        body = """
          mov.u32 %r3, 0;
        LOOP:
          setp.ge.u32 %p1, %r3, %r1;
          @%p1 bra DONE;
          add.s32 %r3, %r3, 1;
          bra LOOP;
        DONE:
          bar.warp.sync -1;
          redux.sync.add.s32 %r4, %r3, -1;
          add.s32 %r3, %r3, %r4;
        """
        got = run(body + STORE, seed=seed)
        np.testing.assert_array_equal(got, np.arange(32) + 31 * 16)

    def test_shfl_and_vote(self):
        body = """
          shfl.sync.bfly.b32 %r3|%p1, %r1, 5, 31, -1;
          setp.gt.u32 %p2, %r1, 29;
          vote.sync.ballot.b32 %r4, %p2, -1;
          add.s32 %r3, %r3, %r4;
        """
        got = run(body + STORE)
        np.testing.assert_array_equal(got, (np.arange(32) ^ 5) + np.uint32(0xC0000000))

    def test_partial_warp_and_exit(self):
        body = "setp.gt.u32 %p1, %r1, 9; @%p1 bra END; mov.u32 %r3, %r1;" + STORE + "END:"
        got = run(body, threads=20)
        np.testing.assert_array_equal(got[:10], np.arange(10))
        self.assertTrue((got[10:] == 0xFFFFFFFF).all())


SHARED = "mov.u32 %r10, dynamic; shl.b32 %r11, %r1, 2; add.s32 %r12, %r10, %r11;"
INIT = """
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra INITIALISED;
  mbarrier.init.shared::cta.b64 [%r10+512], 2;
  fence.mbarrier_init.release.cluster;
INITIALISED:
  bar.sync 0;
"""


class Errors(parameterized.TestCase):
    def test_unknown_opcodes_and_modifiers(self):
        for text in ("frobnicate.b32 %r3, %r2;", "add.sat.s32 %r3, %r2, %r2;",
                     "cvt.rs.bf16x2.f32 %r3, %f1, %f2;", "ld.weird.u32 %r3, [%d4];"):  # fmt: skip
            with self.assertRaises(UnknownOpcodeError):
                code_of(text)

    def test_out_of_bounds(self):
        with self.assertRaisesRegex(OutOfBoundsError, r"past in .*\n  at .* line \d+"):
            run("ld.global.u32 %r2, [%d4+4];")
        with self.assertRaisesRegex(OutOfBoundsError, "misaligned"):
            run("ld.global.u64 %d6, [%d4];")
        with self.assertRaisesRegex(OutOfBoundsError, "the CTA has"):
            run(SHARED + "st.shared.u32 [%r12+1024], %r1;")

    def test_uninitialized(self):
        with self.assertRaises(UninitializedError):
            run(SHARED + "ld.shared.u32 %r3, [%r12];")
        with self.assertRaises(UninitializedError):
            run("ld.global.u32 %r3, [%d5];")

    def test_inputs_are_read_only(self):
        with self.assertRaisesRegex(ProtocolError, "input"):
            run("st.global.u32 [%d4], %r1;")

    @parameterized.parameters(True, False)
    def test_race(self, synchronised):
        """Warp 1 reads what warp 0 wrote."""
        sync = "bar.sync 0;" if synchronised else ""
        body = (
            SHARED
            + f"""
          st.shared.u32 [%r12], %r1;
          {sync}
          xor.b32 %r13, %r11, 128;
          add.s32 %r13, %r13, %r10;
          ld.shared.u32 %r3, [%r13];
        """
            + STORE
        )
        if synchronised:
            np.testing.assert_array_equal(run(body, threads=64), np.arange(64) ^ 32)
        else:
            with self.assertRaises((RaceError, UninitializedError)):
                for seed in range(4):
                    run(body, threads=64, seed=seed)

    def test_deadlock_names_every_warp(self):
        body = (
            SHARED
            + INIT
            + """
          setp.lt.u32 %p2, %r1, 32;
          @%p2 bra SECOND;
        FIRST:
          mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10+512], 0;
          @!%p3 bra FIRST;
        SECOND:
          bar.sync 1, 64;
        """
        )
        with self.assertRaises(DeadlockError) as caught:
            run(body, threads=64)
        text = str(caught.exception)
        self.assertRegex(text, r"warp 0 line \d+: bar.sync 1, 64 waits for barrier 1: 32 of 64")
        self.assertRegex(
            text, r"warp 1 line \d+: mbarrier.try_wait.* waits for parity 0 of mbarrier"
        )
        self.assertRegex(text, "phase 0, 2 of 2 arrivals")

    def test_barrier_misuse(self):
        arrive = "mbarrier.arrive.shared::cta.b64 _, [%r10+512];"
        with self.assertRaisesRegex(ProtocolError, "no mbarrier at"):
            run(SHARED + arrive)
        with self.assertRaisesRegex(RaceError, "initialisation"):
            for seed in range(8):
                run(SHARED + INIT.replace("bar.sync 0;", "setp.lt.u32 %p4, %r1, 32; @%p4 bra END;")
                    + arrive + "END:", threads=64, seed=seed)  # fmt: skip
        with self.assertRaisesRegex(ProtocolError, "named barrier 17"):
            run("bar.sync 17, 32;")
        with self.assertRaisesRegex(ProtocolError, "waited for by"):
            run("and.b32 %r3, %r1, 32; add.s32 %r3, %r3, 64; bar.sync 1, %r3;", threads=64)

    def test_data_over_a_barrier(self):
        """Not before it is invalid."""
        body = SHARED + INIT + "setp.ne.u32 %p2, %r1, 0; @%p2 bra END; INVAL"
        body += " st.shared.u32 [%r10+516], %r1; END:"
        with self.assertRaisesRegex(ProtocolError, "warp 0 overwrites an mbarrier, at shared"):
            run(body.replace("INVAL", ""))
        run(body.replace("INVAL", "mbarrier.inval.shared::cta.b64 [%r10+512];"))

    def test_phases(self):
        """32 arrivals on a barrier of two make 16 phases."""
        body = SHARED + INIT + """
          mbarrier.arrive.shared::cta.b64 _, [%r10+512];
        WAIT:
          mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10+512], 1;
          @!%p3 bra WAIT;
          mov.u32 %r3, 7;
        """ + STORE  # fmt: skip
        np.testing.assert_array_equal(run(body), np.full(32, 7))

    def test_cluster_barrier_and_peer_memory(self):
        body = SHARED + """
          mov.u32 %r20, %cluster_ctarank;
          mad.lo.s32 %r21, %r20, 100, %r1;
          st.shared.u32 [%r12], %r21;
          barrier.cluster.arrive.release.aligned;
          barrier.cluster.wait.acquire.aligned;
          xor.b32 %r22, %r20, 1;
          mapa.shared::cluster.u32 %r23, %r12, %r22;
          ld.shared::cluster.u32 %r3, [%r23];
          mov.u32 %r24, %ctaid.x;
          mul.wide.u32 %d6, %r24, 128;
          add.s64 %d5, %d5, %d6;
        """ + STORE  # fmt: skip
        end = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
        got = run(body + end, cluster=2)
        np.testing.assert_array_equal(got, np.r_[100 + np.arange(32), np.arange(32)])
        with self.assertRaisesRegex(EmulationError, "has exited"):
            for seed in range(8):
                run(body, cluster=2, seed=seed)


# Words of 128 bytes each: what CTA 0 stores, and two for what CTA 1 finds there.
TWO_CTAS = """
  add.s64 %d6, %d5, 128;
  add.s64 %d7, %d5, 256;
  mov.u32 %r10, %ctaid.x;
  add.s32 %r20, %r1, 1000;
  setp.ne.u32 %p1, %r10, 0;
  @%p1 bra READ;
  STORE
  bra END;
READ:
  LOAD
  st.global.u32 [%d6], %r3;
  st.global.u32 [%d7], %r4;
END:
"""
# Eight lanes go on, each with 16 bytes of its own in %d8.
EIGHT_VECTORS = """
  mul.wide.u32 %d8, %r1, 12;
  add.s64 %d8, %d5, %d8;
  setp.gt.u32 %p2, %r1, 7;
  @%p2 bra END;
"""
RELAXED_STORE = "st.relaxed.gpu.global.u32 [%d5], %r20;"
RELAXED_LOADS = "ld.relaxed.gpu.global.u32 %r3, [%d5]; ld.relaxed.gpu.global.u32 %r4, [%d5];"
OLD, NEW = 7, np.arange(1000, 1032)


class Relaxed(parameterized.TestCase):
    """Global memory that CTAs write and read without an order between them."""

    def two(self, store=RELAXED_STORE, load=RELAXED_LOADS, cluster=1, filled=True, **options):
        """CTA 0 stores, CTA 1 loads: the words that it found first and then."""
        device = Device(Options(**options))
        out = device.empty(3 * 128, "out")
        if filled:
            out.write_host(np.full(96, OLD, np.uint32))
        source = device.array(np.zeros(32, np.uint32), "in")
        device.launch(
            code_of(TWO_CTAS.replace("STORE", store).replace("LOAD", load)), (2, 1, 1),
            (32, 1, 1), struct.pack("<QQ", source.base, out.base), cluster=cluster,
        )  # fmt: skip
        return out.data[128:384].view(np.uint32).reshape(2, 32).copy()

    @parameterized.parameters(
        (RELAXED_STORE, RELAXED_LOADS.replace(".relaxed.gpu", ""), "cta 1 reads what cta 0 wrote"),
        (RELAXED_STORE.replace(".relaxed.gpu", ""), RELAXED_LOADS, "cta 1 reads what cta 0 wrote"),
        (RELAXED_STORE, RELAXED_STORE, "cta 1 overwrites what cta 0 wrote"),
        # The last store counts.
        (RELAXED_STORE + "st.global.u32 [%d5], %r20;", RELAXED_LOADS, "cta 1 reads what"),
    )
    def test_anything_else_is_a_race(self, store, load, text):
        with self.assertRaisesRegex(RaceError, text):
            self.two(store, "mov.u32 %r3, 0; mov.u32 %r4, 0;" + load)

    def test_every_word_of_a_vector_is_asked_for(self):
        """A plain store among relaxed ones is a race wherever in the vector it is."""
        head = EIGHT_VECTORS
        load = head + "ld.relaxed.gpu.global.v4.u32 {%r3, %r4, %r5, %r6}, [%d8];"
        relaxed = "st.relaxed.gpu.global.v4.u32 [%d8], {%r20, %r20, %r20, %r20};"
        self.assertIn(1000, self.two(head + relaxed, load))
        for place in (0, 4, 8, 12):
            with self.assertRaisesRegex(RaceError, "cta 1 reads what cta 0 wrote"):
                self.two(head + relaxed + f"st.global.u32 [%d8+{place}], %r20;", load)

    def test_a_store_may_be_seen_late(self):
        """By each lane for itself, by a second look too; a lane that has seen it stays with it."""
        pairs = set()
        for seed in range(20):
            first, then = self.two(seed=seed, spurious_wait=0.5)
            for found in (first, then):
                self.assertTrue(((found == OLD) | (found == NEW)).all())
            pairs.update(zip((first == NEW).tolist(), (then == NEW).tolist(), strict=True))
        self.assertEqual(pairs, {(False, False), (False, True), (True, True)})

    def test_words_of_a_vector_are_late_each_for_itself(self):
        head = EIGHT_VECTORS + "mov.u32 %r21, 5; mov.u32 %r22, 6;"
        store = head + "st.relaxed.gpu.global.v2.u32 [%d8], {%r21, %r22};"
        load = head + "ld.relaxed.gpu.global.v2.u32 {%r3, %r4}, [%d8];"
        found = set()
        for seed in range(20):
            first, second = self.two(store, load, seed=seed, spurious_wait=0.5)[:, :8]
            found.update(zip(first.tolist(), second.tolist(), strict=True))
        self.assertEqual(found, {(OLD, OLD), (OLD, 6), (5, OLD), (5, 6)})

    def test_nothing_is_late_where_it_is_turned_off(self):
        first, then = self.two(spurious_wait=0.0)
        np.testing.assert_array_equal(first, NEW)
        np.testing.assert_array_equal(then, NEW)

    def test_a_late_look_finds_what_was_there(self):
        """Nothing, where nobody has written before the store."""
        with self.assertRaisesRegex(UninitializedError, "out may be read before anything was"):
            self.two(filled=False, spurious_wait=0.5)

    LOOP = """
    LOOP:
      ld.relaxed.gpu.global.u32 %r3, [%d5];
      setp.ne.u32 %p2, %r3, %r20;
      @%p2 bra LOOP;
      mov.u32 %r4, %r3;
    """

    @parameterized.product(policy=POLICIES, cluster=(1, 2), seed=(0, 1, 2))
    def test_a_loop_ends(self, policy, cluster, seed):
        """Also beside the CTA that it waits for, whatever the schedule would rather run."""
        store = """
          mov.u32 %r21, 0;
        MORE:
          add.s32 %r21, %r21, 1;
          bar.sync 0;
          setp.lt.u32 %p3, %r21, 200;
          @%p3 bra MORE;
        """
        found = self.two(
            store + RELAXED_STORE, self.LOOP, cluster, policy=policy, seed=seed, max_steps=5000,
            spurious_wait=0.5,
        )  # fmt: skip
        np.testing.assert_array_equal(found, [NEW, NEW])

    @parameterized.product(policy=POLICIES, cluster=(1, 2))
    def test_a_loop_for_what_never_comes_is_a_deadlock(self, policy, cluster):
        with self.assertRaisesRegex(DeadlockError, r"ld\.relaxed.* waits for a store to out"):
            self.two("", self.LOOP, cluster, policy=policy, max_steps=5000)


TMEM = (
    SHARED
    + """
  .reg .b32 %t<8>;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 64;
  ld.shared.u32 %t0, [%r10];
  add.s32 %t1, %r1, 1000;
  tcgen05.st.sync.aligned.32x32b.x2.b32 [%t0+3], {%r1, %t1};
  WAIT_ST
  tcgen05.ld.sync.aligned.32x32b.x2.b32 {%t2, %t3}, [%t0+3];
  WAIT_LD
  add.s32 %r3, %t2, %t3;
  FREE
"""
)
TMEM_PARTS = {
    "WAIT_ST": "tcgen05.wait::st.sync.aligned;",
    "WAIT_LD": "tcgen05.wait::ld.sync.aligned;",
    "FREE": "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t0, 64;",
}


class TensorMemory(parameterized.TestCase):
    def run_without(self, missing="", **options):
        text = TMEM
        for name, part in TMEM_PARTS.items():
            text = text.replace(name, "" if name == missing else part)
        return run(text + STORE, **options)

    def test_round_trip(self):
        for seed in range(4):
            got = self.run_without(seed=seed, policy=("random", "late")[seed % 2])
            np.testing.assert_array_equal(got, 1000 + 2 * np.arange(32))

    def test_base_varies(self):
        body = (
            SHARED
            + """
          .reg .b32 %t<8>;
          tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 64;
          ld.shared.u32 %r3, [%r10];
          tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;
        """
            + STORE
        )
        bases = {int(run(body, seed=seed)[0]) for seed in range(12)}
        self.assertGreater(len(bases), 2)
        self.assertLessEqual(bases, set(range(0, 512, 64)))

    @parameterized.parameters(
        ("WAIT_ST", (RaceError, UninitializedError)),
        ("WAIT_LD", ProtocolError),
        ("FREE", ProtocolError),
    )
    def test_what_must_not_be_missing(self, missing, error):
        with self.assertRaises(error):
            self.run_without(missing)


class TensorMaps(parameterized.TestCase):
    GOOD = dict(data_type=0, address=4096, dims=[64, 8], strides=[64], box=[32, 4],
                element_strides=[1, 1], swizzle=0)  # fmt: skip

    def test_round_trip(self):
        found = tensormap.decode(tensormap.encode(**self.GOOD))
        self.assertEqual(found.dims, (64, 8))
        self.assertEqual(found.box, (32, 4))
        self.assertEqual(found.box_bytes, 128)

    @parameterized.parameters(
        {"address": 4104}, {"box": [257, 4]}, {"strides": [72]}, {"box": [8, 4]},
        {"swizzle": 1, "box": [64, 4]}, {"dims": [0, 8]}, {"interleave": 1},
    )  # fmt: skip
    def test_refused(self, **change):
        with self.assertRaises(tensormap.Refused):
            tensormap.encode(**{**self.GOOD, **change})
