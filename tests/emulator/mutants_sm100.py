# ruff: noqa: E501 (the texts of edits)
"""Seeded bugs in kernels/sm100_gemm.cu, in the form of mutants.py; edits are (text, replacement)."""

from __future__ import annotations

import dataclasses

from sm100 import Case

ONE = Case("nvfp4", 1, 200, 200, 512, 64, groups=1)
TWO = Case("nvfp4", 2, 400, 200, 1024, 64, groups=1)
LONG = Case("nvfp4", 2, 256, 128, 2048, groups=1)
MX = Case("mxfp4", 2, 256, 256, 512, groups=1)


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    case: Case
    caught: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return self.name


def _m(name, kind, case, caught, *edits) -> Mutant:
    return Mutant(name, kind, case, tuple(caught.split()), edits)


MUTANTS = (
    _m("empty parity", "protocol", LONG, "DeadlockError",
       ("mbarrier_wait(full + 8 * kStages, stage.phase ^ 1);", "mbarrier_wait(full + 8 * kStages, stage.phase);")),
    _m("full parity", "protocol", LONG, "UninitializedError RaceError DeadlockError",
       ("mbarrier_wait(full, stage.phase);", "mbarrier_wait(full, stage.phase ^ 1);")),
    _m("no full wait", "protocol", LONG, "UninitializedError RaceError",
       ("mbarrier_wait(full, stage.phase);", "")),
    _m("no empty wait", "protocol", LONG, "RaceError ProtocolError DeadlockError",
       ("mbarrier_wait(full + 8 * kStages, stage.phase ^ 1);", "")),
    _m("expect_tx of one CTA", "protocol", LONG, "UninitializedError RaceError DeadlockError",
       ("mbarrier_arrive_expect_tx(full, kGroup * bytes);", "mbarrier_arrive_expect_tx(full, bytes);")),
    _m("expect_tx 16 bytes short", "protocol", LONG, "DeadlockError UninitializedError RaceError",
       ("mbarrier_arrive_expect_tx(full, kGroup * bytes);", "mbarrier_arrive_expect_tx(full, kGroup * bytes - 16);")),
    _m("both CTAs expect", "protocol", LONG, "ProtocolError DeadlockError",
       ("if (rank == 0) mbarrier_arrive_expect_tx", "mbarrier_arrive_expect_tx")),
    _m("peer's bytes on its own barrier", "protocol", LONG, "DeadlockError ProtocolError",
       ('"r"(barrier & 0xFEFFFFFF)', '"r"(barrier)')),
    _m("commit to the leader only", "protocol", LONG, "DeadlockError",
       ('"h"(static_cast<uint16_t>(3))', '"h"(static_cast<uint16_t>(1))')),
    _m("slot released before its MMAs", "protocol", LONG, "RaceError",
       ("      commit<kGroup>(full + 8 * kStages);\n", ""),
       ("      const uint32_t slot = smem + stage.slot * L::kStage;\n      const uint64_t x",
        "      commit<kGroup>(full + 8 * kStages);\n      const uint32_t slot = smem + stage.slot * L::kStage;\n      const uint64_t x")),
    _m("accumulator published too early", "protocol", TWO, "RaceError UninitializedError",
       ("    commit<kGroup>(acc_full);\n", ""),
       ("    const uint32_t d = tmem + acc.slot * kTileN;\n", "    const uint32_t d = tmem + acc.slot * kTileN;\n    commit<kGroup>(acc_full);\n")),
    _m("both CTAs issue", "protocol", LONG, "ProtocolError DeadlockError",
       ("if (rank == 0 && elect_one()) issue", "if (elect_one()) issue")),
    _m("all lanes issue", "protocol", ONE, "ProtocolError",
       ("if (rank == 0 && elect_one()) issue", "if (rank == 0) issue")),
    _m("no wait for the accumulator to be empty", "protocol", dataclasses.replace(ONE, m=600), "RaceError ProtocolError",
       ("mbarrier_wait(acc_full + 16, acc.phase ^ 1);", "")),
    _m("accumulator phase of one slot", "protocol", dataclasses.replace(ONE, m=600), "DeadlockError RaceError ProtocolError",
       ("    commit<kGroup>(acc_full);\n    acc.advance(2);", "    commit<kGroup>(acc_full);\n    acc.advance(1);")),
    _m("epilogue without wait", "protocol", ONE, "RaceError UninitializedError",
       ("    mbarrier_wait(full, acc.phase);\n", "")),
    _m("empty count of one CTA", "protocol", dataclasses.replace(TWO, m=1100), "ProtocolError RaceError DeadlockError",
       ("mbarrier_init(smem + L::kAccumulator + 16 + 8 * s, 4 * kGroup);", "mbarrier_init(smem + L::kAccumulator + 16 + 8 * s, 4);")),
    _m("arrival at the own CTA", "protocol", dataclasses.replace(TWO, m=1100), "DeadlockError ProtocolError",
       ("mbarrier_arrive_cluster_if(full + 16, 0, lane == 0);", "mbarrier_arrive_cluster_if(full + 16, rank, lane == 0);")),
    _m("no fence after the wait for the accumulator", "protocol", ONE, "RaceError",
       ("    mbarrier_wait(full, acc.phase);\n    fence_after();\n", "    mbarrier_wait(full, acc.phase);\n")),
    _m("no fence before the accumulator's release", "protocol", dataclasses.replace(ONE, m=600), "RaceError",
       ("    fence_before();\n    __syncwarp();\n    // The issuer", "    __syncwarp();\n    // The issuer")),
    _m("issuer without fence after the wait for its accumulator", "protocol", dataclasses.replace(ONE, m=600), "RaceError",
       ("    mbarrier_wait(acc_full + 16, acc.phase ^ 1);\n    fence_after();\n", "    mbarrier_wait(acc_full + 16, acc.phase ^ 1);\n"),
       ("      mbarrier_wait(full, stage.phase);\n      fence_after();\n", "      mbarrier_wait(full, stage.phase);\n")),
    _m("no tcgen05.wait::ld", "protocol", ONE, "ProtocolError",
       ("      wait_loads();\n", "")),
    _m("no barrier after init", "protocol", ONE, "ProtocolError RaceError UninitializedError",
       ("  fence_before();\n  __syncthreads();\n  if constexpr (kGroup > 1) cluster_sync();\n  fence_after();\n  const uint32_t tmem",
        "  fence_before();\n  fence_after();\n  const uint32_t tmem")),
    _m("no cluster barrier after init", "protocol", LONG, "ProtocolError RaceError",
       ("  if constexpr (kGroup > 1) cluster_sync();\n  fence_after();\n  const uint32_t tmem", "  fence_after();\n  const uint32_t tmem")),
    _m("no barrier before dealloc", "protocol", ONE, "ProtocolError OutOfBoundsError",
       ("  fence_before();\n  __syncthreads();\n  // The peer's", "  // The peer's")),
    _m("no dealloc", "protocol", ONE, "ProtocolError",
       ("  if (warp == 5) tmem_free<kGroup>(tmem, kColumns);\n", "")),
    _m("dealloc of half the columns", "protocol", ONE, "ProtocolError",
       ("tmem_free<kGroup>(tmem, kColumns);", "tmem_free<kGroup>(tmem, kColumns / 2);")),
    _m("too few columns", "account", ONE, "OutOfBoundsError",
       ("constexpr int kColumns = 512;", "constexpr int kColumns = 256;")),
    _m("columns no power of two", "account", ONE, "ProtocolError",
       ("constexpr int kColumns = 512;", "constexpr int kColumns = 320;")),
    _m("stage stride too small", "account", LONG, "RaceError cells UninitializedError ProtocolError",
       ("static constexpr int kStage = kX + kW + 2 * kScales;", "static constexpr int kStage = kX + kW + kScales;")),
    _m("wrong quarter of tensor memory", "layout", ONE, "ProtocolError",
       ("(static_cast<uint32_t>(warp * 32) << 16)", "(static_cast<uint32_t>((warp ^ 1) * 32) << 16)")),
    _m("atom stride of the operands", "layout", LONG, "cells RaceError UninitializedError",
       ("uint64_t{64} << 32 | (address & 0x3FFFF) >> 4;\n}\n// 32 rows", "uint64_t{32} << 32 | (address & 0x3FFFF) >> 4;\n}\n// 32 rows")),
    _m("swizzle of the operands", "layout", LONG, "cells",
       ("return uint64_t{2} << 61", "return uint64_t{4} << 61")),
    _m("K advance", "layout", LONG, "cells",
       ("mma_scaled<kGroup, kBlock>(d, x + 2 * i, w + 2 * i,", "mma_scaled<kGroup, kBlock>(d, x + 2 * i, w + i,")),
    _m("scale columns of W", "layout", LONG, "cells UninitializedError",
       ("scales + 4 * atom, scales + 16 + 4 * atom,", "scales + 4 * atom, scales + 12 + 4 * atom,")),
    _m("scales of the atom's rows", "layout", LONG, "cells",
       ("return uint64_t{1} << 46 | uint64_t{8} << 32", "return uint64_t{1} << 46 | uint64_t{4} << 32")),
    _m("scale factors over the accumulator", "layout", LONG, "cells ProtocolError",
       ("constexpr int kScaleBase = 2 * kTileN;", "constexpr int kScaleBase = kTileN - 32;")),
    _m("scale format bit", "arithmetic", MX, "ProtocolError",
       ("(block == 32 ? 1u : 0u) << 23", "0u << 23")),
    _m("scale factor id", "arithmetic", MX, "cells",
       ("kBlock == 16 ? 0 : i % 2 * 2;", "0;")),
    _m("accumulate flag", "arithmetic", LONG, "cells",
       ("scales + 16 + 4 * atom, s > 0 || i > 0);", "scales + 16 + 4 * atom, i > 0);")),
    _m("swapped halves of W in the pair", "layout", LONG, "cells",
       ("n * kTileN + rank * (kTileN / kGroup);", "n * kTileN + (kGroup - 1 - rank) * (kTileN / kGroup);")),
    _m("N of the instruction", "arithmetic", ONE, "cells UninitializedError",
       ("scaled_descriptor(128 * kGroup, kTileN, kBlock)", "scaled_descriptor(128 * kGroup, kTileN / 2, kBlock)")),
    _m("last row of a tile", "cells", ONE, "cells",
       ("if (row < args.m && n < args.n) {", "if (row + 1 < args.m && n < args.n) {")),
    _m("low-rank steps of one stage only", "arithmetic", dataclasses.replace(ONE, rank=96), "cells",
       ("const int r = (s - args.k_stages) * 64;", "const int r = 0;")),
)  # fmt: skip
