"""The kernels whose waits end (cuda/watch.h), executed: a seeded lost arrival ends in a trap that
names role, barrier and stage, and without a bug they give the bits of the others. Their second net,
ptxas's checks of tensor-memory accesses, is looked for in the machine code."""

import collections
import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping

import mutants
import mutants_sm100
import numpy as np
import pytest
from absl.testing import parameterized

from emulator import Options, blackwell, ptx, toolchain
from emulator import product as hopper
from emulator.compile import Code
from emulator.errors import DeadlockError, TrapError
from emulator.host import CheckedHost
from emulator.scheduler import POLICIES

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

RUN = {"sm90": hopper, "sm100": blackwell}


@functools.cache
def host(family):
    return CheckedHost(*toolchain.host_library(family, checked=True))


def named(name, table=mutants):
    return next(m for m in table.MUTANTS if m.name == name)


def kinds(waits):
    """{wait without its place: how many}."""
    return dict(collections.Counter(text.partition(" (")[0] for text in waits))


def wait(kernel, role, barrier, stage, parity):
    return f"{kernel}: role {role} waits for barrier {barrier}, stage {stage}, parity {parity}"


@dataclasses.dataclass(frozen=True)
class Lost:
    """A bug after which somebody waits for ever, and what is waited for: {wait: how many warps}.

    Attributes:
      first: the wait that has to begin first under every schedule, where there is one.
      attrs: changes to the plan.
    """

    name: str
    case: object
    edits: tuple
    sources: tuple
    waits: dict
    first: str | None = None
    attrs: Mapping[str, Callable[[int], int]] = dataclasses.field(default_factory=dict)

    @property
    def family(self):
        return toolchain.family_of(self.sources[0])


def lost(name, waits, first=None, table=mutants):
    """One of the emulator's seeded bugs."""
    m = named(name, table)
    edits = m.all_edits() if table is mutants_sm100 else m.edits
    sources = m.sources or ("sm90_gemm_v2_Mxfp4_64.cu",)
    return Lost(name, m.case, edits, sources, waits, first)


V2, DECODE, DOWN = "sm90_gemm_v2", "sm90_decode", "sm90_down_v2"
SM100, SM100_DOWN = "sm100_gemm", "sm100_down"
_TOKENS = wait(V2, "load", "tokens empty", 0, 0)
_FULL = wait(V2, "compute", "main full", 0, 0)
_NEVER = wait(SM100, "store", "accumulators full", 1, 0)
_OWN = wait(SM100, "mma", "accumulators empty", 0, 0)
_LEFT = wait(SM100_DOWN, "load", "main empty", 0, 0)

# Every wait of the kernels is in one of them; those of the grouped kernel are GEMM v2's.
LOST = (
    lost("tokens never released", {_TOKENS: 1, wait(V2, "compute", "main full", 0, 0): 8}, _TOKENS),
    lost("full barriers count two", {_FULL: 8, wait(V2, "load", "main empty", 0, 0): 1}, _FULL),
    # Only the CTA that misses an arrival stops at the slot itself.
    lost("release of this CTA only", {
        wait(V2, "load", "main empty", 0, 0): 1, wait(V2, "load", "main empty", 1, 0): 1,
        wait(V2, "compute", "main full", 0, 1): 16}),
    Lost("decode: slots never released", dataclasses.replace(mutants.FEW, stages=2),
         ((mutants.DECODE, "        ring.release<1>(through, lane);\n        if", "        if"),),
         ("sm90_decode_Mxfp4_8.cu",),
         {wait(DECODE, "load", "main empty", 0, 0): 1,
          wait(DECODE, "multiply", "main full", 0, 1): 16}),
    Lost("decode: shares of LoRA-down that never come", mutants.FEW_FUSED,
         ((mutants.DECODE_QUANT, "kFewSums<kWarps> * sizeof(float));",
           "kFewSums<kWarps> * sizeof(float) + 8);"),),
         ("sm90_decode_quantize_Mxfp4.cu",),
         {wait(f"{DECODE}_quantize", "project", "sums full", 0, 0): 8}),
    Lost("decode: block scales that never come", dataclasses.replace(mutants.FEW, k=2048),
         ((mutants.DECODE, "(barrier, boxes * box_bytes);", "(barrier, boxes * box_bytes + 8);"),),
         ("sm90_decode_Mxfp4_8.cu",), {wait(DECODE, "multiply", "scales full", 0, 0): 16}),
    Lost("decode: scales in the last stage never looked through", mutants.TURN,
         ((mutants.DECODE, "      mbarrier_arrive_if(seen_barrier(args, smem), lane == 0);\n",
           ""),),
         ("sm90_decode_Mxfp4_32.cu",),
         {wait(DECODE, "load", "last stage's scales full", 0, 0): 1,
          wait(DECODE, "multiply", "main full", 7, 0): 16}),
    lost("decode: sixteen bytes too many of the peer's sums are waited for",
         {wait(DECODE, "multiply", "peer's sums full", 0, 0): 32}),
    Lost("decode: slots of LoRA-down never released", mutants.DOWN_AHEAD,
         ((mutants.DOWN, "ring.release<1>(previous, lane, step > 0);", ""),),
         ("sm90_decode_Mxfp4_32.cu",),
         {wait(DECODE, "load", "LoRA-down empty", 0, 0): 1,
          wait(DECODE, "project", "LoRA-down full", 0, 1): 4}, attrs={"down_stages": lambda v: 2}),
    # The last of the CTAs ahead: a warp for every 32 times four ranks of a token.
    Lost("decode: sums of LoRA-down that never come", mutants.DOWN_AHEAD,
         ((mutants.AHEAD, "store_relaxed_v4(args.sums + part * all + it.place, it.own);",
           "if (part != 1) store_relaxed_v4(args.sums + part * all + it.place, it.own);"),),
         ("sm90_decode_Mxfp4_32.cu",), {wait(DECODE, "add", "lora_act full", 0, 0): 6}),
    lost("decode: ranks of LoRA-down past the first 16",
         {wait(DECODE, "add", "lora_act full", 0, 0): 3}),
    Lost("LoRA-down: slots never released", dataclasses.replace(mutants.FUSED, k=2560),
         ((mutants.DOWN, "ring.release<1>(previous, lane, step > 0);", ""),), ("sm90_down_v2.cu",),
         {wait(DOWN, "load", "main empty", 0, 0): 8,
          wait(DOWN, "project", "main full", 0, 1): 64}, attrs={"down_stages": lambda v: 2}),
    lost("commit to the leader only", {
        wait(SM100, "load", "main empty", 0, 0): 1, wait(SM100, "load", "main empty", 0, 1): 1,
        wait(SM100, "mma", "main full", 0, 1): 1,
        wait(SM100, "store", "accumulators full", 0, 0): 16}, table=mutants_sm100),
    lost("low-rank accumulator never published", {
        _NEVER: 8, wait(SM100, "mma", "accumulators empty", 1, 0): 1,
        wait(SM100, "load", "main empty", 0, 1): 1}, _NEVER, mutants_sm100),
    lost("arrival at the own CTA", {
        _OWN: 1, wait(SM100, "load", "main empty", 3, 0): 2,
        wait(SM100, "store", "accumulators full", 0, 1): 16}, _OWN, mutants_sm100),
    Lost("sm100: slots of LoRA-down never released",
         dataclasses.replace(mutants_sm100.FUSED, k=1040),
         ((mutants_sm100.DOWN, "    ring.release<1>(stage.slot, lane);\n", ""),),
         ("sm100_down.cu",), {_LEFT: 1, wait(SM100_DOWN, "project", "main full", 0, 1): 4}, _LEFT),
)  # fmt: skip


class LostArrivals(parameterized.TestCase):
    def lost_arrival(self, one, policies):
        """Under every schedule the same waits, and nothing else, are told."""
        module = RUN[one.family]
        operands = module.make_operands(one.case)
        with hopper.seeded(one.sources, one.edits, host(one.family)) as driver:
            for policy in policies:
                options = Options(policy=policy, max_steps=500_000)
                with self.assertRaisesRegex(TrapError, "trap"):
                    module.run(
                        one.case, options, kernels=driver, operands=operands, changes=one.attrs
                    )
                waits = driver.stuck_waits()
                self.assertEqual(kinds(waits), one.waits, policy)
                if one.first:
                    self.assertStartsWith(waits[0], one.first)
                self.assertLen(set(waits), len(waits))


@pytest.mark.slow
class OtherSchedules(LostArrivals):
    @parameterized.named_parameters((one.name, one) for one in LOST)
    def test_a_lost_arrival_ends_in_a_trap_with_its_name(self, one):
        self.lost_arrival(one, [p for p in POLICIES if p not in POLICIES[::3]])


class Waits(LostArrivals):
    @parameterized.named_parameters((one.name, one) for one in LOST)
    def test_a_lost_arrival_ends_in_a_trap_with_its_name(self, one):
        self.lost_arrival(one, POLICIES[::3])

    def test_without_bounds_it_is_a_deadlock(self):
        bug = named("tokens never released")
        with (
            hopper.seeded(("sm90_gemm_v2_Mxfp4_64.cu",), bug.edits),
            self.assertRaises(DeadlockError),
        ):
            hopper.run(bug.case, Options())


class Records(parameterized.TestCase):
    """What the host makes of the records."""

    def texts(self, *records):
        driver = host("sm100")
        table = np.zeros((driver.library.emulator_wait_records_bytes() // 16, 4), np.uint32)
        for i, record in enumerate(records):
            table[7 * i] = record
        return driver.library.emulator_stuck_waits(table.ctypes.data).decode().splitlines()

    def test_the_first_is_first_also_where_the_timer_wraps(self):
        magic, where = 0x57340000, 3 << 16 | 9 << 8 | 1
        found = self.texts(
            (magic | 6 << 8 | 3, where, 40, 0x00000100),
            (magic | 7 << 8 | 0, where, 41, 0xFFFFFF00),
            (magic | 6 << 8 | 2, where, 42, 0x00000200),
        )
        self.assertEqual(found, [
            "sm100_gemm: role mma waits for barrier accumulators empty, stage 3, parity 0 (CTA 41, "
            "1 of its cluster, warp 9)",
            "sm100_gemm: role mma waits for barrier main full, stage 3, parity 1 (CTA 40, 1 of its "
            "cluster, warp 9)",
            "sm100_gemm: role mma waits for barrier main full, stage 3, parity 0 (CTA 42, 1 of its "
            "cluster, warp 9)",
        ])  # fmt: skip

    def test_what_is_no_record_is_none(self):
        self.assertEqual(self.texts(), [])
        self.assertEqual(self.texts((0x12340003, 0, 0, 5)), [])
        self.assertEqual(self.texts((0x5734FF03, 0, 0, 5)), ["a wait of an unknown ring"])

    def test_memory_of_the_product_compiles(self):
        subprocess.run(
            [toolchain.NVCC, "-std=c++17", "-DJAX_W4A4_CHECKED", f"-I{toolchain.CUDA}", "-c",
             toolchain.CUDA / "watch_records.cc", "-o", "/dev/null"],
            check=True, capture_output=True,
        )  # fmt: skip


class Same(parameterized.TestCase):
    @parameterized.named_parameters(
        ("gemm", mutants.PLAIN),
        ("pair", mutants.PAIR),
        ("fused", mutants.FUSED),
        ("decode", mutants.FEW_PAIR),
        ("decode_many", mutants.MANY_PAIR),
        ("decode_scales_in_turn", mutants.TURN),
        ("decode_down_ahead", mutants.DOWN_AHEAD),
        ("decode_down_ahead_pair", dataclasses.replace(mutants.DOWN_AHEAD, k=2080, cluster=2)),
        ("sm100", mutants_sm100.ONE),
        ("sm100_pair", mutants_sm100.TWO),
        ("sm100_fused", mutants_sm100.FUSED),
    )
    def test_the_same_bits_and_no_complaint(self, case):
        module = blackwell if isinstance(case, blackwell.Case) else hopper
        driver = host("sm100" if module is blackwell else "sm90")
        operands = module.make_operands(case)
        want = module.run(case, operands=operands)
        self.assertTrue(want.written.all())
        for policy in ("random", "late"):
            found = module.run(case, Options(policy=policy), kernels=driver, operands=operands)
            np.testing.assert_array_equal(found.y, want.y)
            self.assertTrue(found.written.all())
            self.assertEqual(driver.stuck_waits(), [])


class Gate(parameterized.TestCase):
    """Both builds' code."""

    @parameterized.parameters(
        "sm90_gemm_v2_Mxfp4_64.cu", "sm90_grouped_Mxfp4_64.cu", "sm90_decode_Mxfp4_8.cu",
        "sm90_decode_Mxfp4_32.cu", "sm90_decode_quantize_Mxfp4.cu", "sm90_down_v2.cu",
        "sm100_gemm.cu", "sm100_down.cu",
    )  # fmt: skip
    def test_every_wait_is_bounded_and_known(self, source):
        """The release build has nothing of it: no timer, no trap, no second kind of wait."""
        plain, checked = (toolchain.product_ptx(source, checked=which) for which in (False, True))
        # Of memory that other CTAs write: a word of lora_act, all of it, the sums of LoRA-down.
        looks = 3 if source == "sm90_decode_Mxfp4_32.cu" else 0
        self.assertNotRegex(plain, r"globaltimer|\btrap;|test_wait|fence\.acq_rel\.sys")
        for name in re.findall(r"\.entry (\w+)", checked):
            kernel = ptx.parse(checked, only=name).kernels[name]
            self.assertTrue(Code(kernel).nodes)
            count = collections.Counter(ins.op.split(".shared")[0] for ins in kernel.instrs)
            waits = count["mbarrier.test_wait.parity"]
            self.assertEqual(count["trap"], waits + looks)
            # A loop may be turned so that it has two.
            self.assertIn(count["mbarrier.try_wait.parity"], (waits, 2 * waits))
            self.assertGreater(waits, 0)

    @parameterized.parameters("sm_100a", "sm_103a")
    def test_accesses_to_tensor_memory_are_checked(self, arch):
        """ptxas calls a guard that traps for each thing it checks; the names are in the symbols."""
        (edits,) = {m.all_edits() for m in (named("no dealloc", mutants_sm100),)}
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            include = toolchain._edited(folder, edits[1:])
            guards = {}
            for flag in (None, "-g-tmem-access-check"):
                out = folder / "out.cubin"
                subprocess.run(
                    [toolchain.NVCC, f"-arch={arch}", "-std=c++17", "-cubin", f"-I{include}",
                     *(["-DJAX_W4A4_CHECKED", f"-Xptxas={flag}"] if flag else []),
                     include / "sm100_gemm.cu", "-o", out],
                    check=True, capture_output=True,
                )  # fmt: skip
                guards[flag] = set(re.findall(rb"guardrail_trap_(\w+)", out.read_bytes()))
        new = guards["-g-tmem-access-check"] - guards[None]
        self.assertLessEqual(
            {b"unallocated_columns_access", b"access_out_of_physical_bounds",
             b"current_warp_owner_invalid", b"invalid_datapath_alignment"}, new,
        )  # fmt: skip

    def test_the_emulator_checks_the_same(self):
        """Seeded bugs of the same kinds, in its table."""
        for bug, error in (
            ("too few columns", "OutOfBoundsError"),  # access to what is not allocated
            ("wrong quarter of tensor memory", "ProtocolError"),  # another warp's lanes
            ("columns no power of two", "ProtocolError"),  # granularity
            ("dealloc of half the columns", "ProtocolError"),  # not what alloc returned
        ):
            self.assertIn(error, named(bug, mutants_sm100).caught)
