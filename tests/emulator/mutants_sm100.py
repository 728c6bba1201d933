# ruff: noqa: E501 (the texts of edits)
"""Seeded bugs in the product's kernel for Blackwell, in the form of mutants.py.

Only the case's kernel is compiled: the launch code of the others stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from emulator.blackwell import Case

GEMM = "sm100_gemm.cuh"
PTX = "sm100_ptx.cuh"
LAYOUT = "sm100_layout.h"
RING = "sm90_pipeline.cuh"
SCALES = "sm100_scales.cuh"
ORDER = "tile_order.cuh"
QUANT = "sm100_quantize.cuh"
DOWN = "sm100_down.cuh"

ONE = Case("nvfp4", 200, 136, 512, 64, 1, 128, clusters=1, stages=2)
ROWS = Case("nvfp4", 600, 72, 160, 0, 1, 128, clusters=1)  # accumulators wrap
TWO = Case("nvfp4", 400, 136, 1024, 64, 2, 128, clusters=1, stages=2)
TALL = Case("nvfp4", 1100, 72, 160, 0, 2, 128, clusters=1)
LONG = Case("nvfp4", 256, 128, 2048, 0, 2, 128, clusters=1, stages=3)
WIDE = Case("nvfp4", 256, 512, 160, 64, 2, 256, clusters=1)
MX = Case("mxfp4", 256, 256, 512, 0, 2, 128, clusters=1)
HALF = Case("nvfp4", 128, 128, 160, 0, 1, 64, clusters=1)
ODD = Case("nvfp4", 100, 77, 160, 0, 1, 128, clusters=1)
FUSED = Case("nvfp4", 70, 136, 520, 72, 1, 128, clusters=1, fused=True, exact=False)


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    kind: str  # protocol, layout, arithmetic, account, cells
    case: Case
    caught: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...]
    attrs: Mapping[str, Callable[[int], int]]
    fast: bool  # in every run, not with -m slow only

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def sources(self) -> tuple[str, ...]:
        files = {name for name, _, _ in self.edits}
        found = [
            f"sm100_{source}.cu"
            for source, names in (
                ("scales", {SCALES, LAYOUT}),
                ("quantize", {QUANT}),
                ("down", {DOWN}),
            )
            if files & names
        ]
        only = files and files <= {QUANT, DOWN}
        return tuple(found) if only else ("sm100_gemm.cu", *found)

    def all_edits(self) -> tuple[tuple[str, str, str], ...]:
        made = list(self.edits)
        for group, tile_n in ((2, 256), (2, 128), (1, 256), (1, 128), (1, 64)):
            if (group, tile_n) != (self.case.group, self.case.tile_n):
                made.append(("sm100_gemm.cu", f"  W4A4_CASE({group}, {tile_n})\n", ""))
        other = 32 if self.case.format == "nvfp4" else 16
        made.append(("sm100_gemm.cu", f"return Kernel<{other}>(group, tile_n);", "return nullptr;"))
        return tuple(made)


def _m(name, kind, case, caught, *edits, fast=False, **attrs) -> Mutant:
    return Mutant(name, kind, case, tuple(caught.split()), edits, attrs, fast)


_EXPECT = "mbarrier_arrive_expect_tx(full, S::kGroup * bytes);"
_COMMIT_STAGE = "      scale_slot ^= 1;\n      commit<S::kGroup>(main.empty(stage));\n"
_DRAINED = "  fence_before();\n  __syncwarp();\n  if constexpr (S::kGroup == 1) {"
_INIT = "  fence_before();\n  __syncthreads();\n  // The peer's copies and arrivals may reach this CTA as soon as the peer passes this point.\n  if constexpr (kGroup > 1) cluster_sync();\n"

MUTANTS = (
    _m("empty parity", "protocol", LONG, "DeadlockError",
       (RING, "mbarrier_wait(empty(state), state.phase ^ 1);", "mbarrier_wait(empty(state), state.phase);")),
    _m("full parity", "protocol", LONG, "UninitializedError RaceError DeadlockError ProtocolError",
       (RING, "mbarrier_wait(full(state), state.phase);", "mbarrier_wait(full(state), state.phase ^ 1);")),
    _m("no full wait", "protocol", LONG, "UninitializedError RaceError",
       (GEMM, "      main.wait_full(stage);\n      fence_after();\n      const uint32_t scales", "      fence_after();\n      const uint32_t scales")),
    _m("no full wait of a low-rank stage", "protocol", ONE, "UninitializedError RaceError cells",
       (GEMM, "      main.wait_full(stage);\n      fence_after();\n      const uint64_t l", "      fence_after();\n      const uint64_t l")),
    _m("no empty wait", "protocol", LONG, "RaceError ProtocolError DeadlockError",
       (GEMM, "      main.wait_empty(stage);\n      const bool scaled", "      const bool scaled"), fast=True),
    _m("expect_tx of one CTA", "protocol", LONG, "UninitializedError RaceError DeadlockError ProtocolError",
       (GEMM, _EXPECT, "mbarrier_arrive_expect_tx(full, bytes);")),
    _m("expect_tx 16 bytes short", "protocol", LONG, "DeadlockError UninitializedError RaceError ProtocolError",
       (GEMM, _EXPECT, "mbarrier_arrive_expect_tx(full, S::kGroup * bytes - 16);")),
    _m("low-rank stages expect scales too", "protocol", ONE, "DeadlockError",
       (GEMM, "(scaled ? S::kActScaleBytes + S::kWeightScaleBytes : 0)", "(S::kActScaleBytes + S::kWeightScaleBytes)")),
    _m("both CTAs expect", "protocol", LONG, "ProtocolError DeadlockError UninitializedError RaceError",
       (GEMM, "if (rank == 0) mbarrier_arrive_expect_tx", "mbarrier_arrive_expect_tx")),
    _m("peer's bytes on its own barrier", "protocol", LONG, "DeadlockError ProtocolError",
       (PTX, '"r"(barrier & 0xFEFFFFFF)', '"r"(barrier)')),
    _m("commit to the leader only", "protocol", LONG, "DeadlockError",
       (PTX, '"h"(static_cast<uint16_t>(3))', '"h"(static_cast<uint16_t>(1))'), fast=True),
    _m("slot released before its MMAs", "protocol", LONG, "RaceError",
       (GEMM, _COMMIT_STAGE, "      scale_slot ^= 1;\n"),
       (GEMM, "      const uint32_t scales = tmem + S::kScaleBase", "      commit<S::kGroup>(main.empty(stage));\n      const uint32_t scales = tmem + S::kScaleBase"), fast=True),
    _m("accumulator published too early", "protocol", TWO, "RaceError UninitializedError",
       (GEMM, "    uint32_t d = tmem + acc.slot * S::kTileN;\n", "    uint32_t d = tmem + acc.slot * S::kTileN;\n    commit<S::kGroup>(accumulators.full(acc));\n"),
       (GEMM, "    commit<S::kGroup>(accumulators.full(acc));\n    accumulators.advance(acc);\n\n    if (args.lora_stages == 0) continue;", "    accumulators.advance(acc);\n\n    if (args.lora_stages == 0) continue;")),
    _m("low-rank accumulator never published", "protocol", ONE, "DeadlockError",
       (GEMM, "      commit<S::kGroup>(main.empty(stage));\n      main.advance(stage);\n    }\n    commit<S::kGroup>(accumulators.full(acc));\n    accumulators.advance(acc);\n  }\n}", "      commit<S::kGroup>(main.empty(stage));\n      main.advance(stage);\n    }\n    accumulators.advance(acc);\n  }\n}")),
    _m("low-rank product into the accumulator that is being read", "protocol", WIDE, "RaceError cells ProtocolError",
       (GEMM, "    if (args.lora_stages == 0) continue;\n    accumulators.wait_empty(acc);\n    fence_after();\n", "    if (args.lora_stages == 0) continue;\n    fence_after();\n"), fast=True),
    _m("both CTAs issue", "protocol", LONG, "ProtocolError DeadlockError",
       (GEMM, "warp == kMmaWarp && rank == 0)", "warp == kMmaWarp)")),
    _m("all lanes issue", "protocol", ONE, "ProtocolError",
       (GEMM, "if (elect_one()) mma<S>", "mma<S>")),
    _m("no wait for the accumulator to be empty", "protocol", ROWS, "RaceError ProtocolError",
       (GEMM, "    accumulators.wait_empty(acc);\n    fence_after();\n    uint32_t d", "    fence_after();\n    uint32_t d"), fast=True),
    _m("accumulators of another number for the MMA", "protocol", ROWS, "DeadlockError RaceError ProtocolError UninitializedError",
       (GEMM, "    commit<S::kGroup>(accumulators.full(acc));\n    accumulators.advance(acc);\n\n", "    commit<S::kGroup>(accumulators.full(acc));\n    acc.advance(2);\n\n")),
    _m("epilogue without wait", "protocol", ONE, "RaceError UninitializedError",
       (GEMM, "  accumulators.wait_full(acc);\n  fence_after();\n  const uint32_t from", "  fence_after();\n  const uint32_t from")),
    _m("empty count of one CTA", "protocol", TALL, "ProtocolError RaceError DeadlockError",
       (GEMM, "accumulators.init(kStoreWarps * kGroup);", "accumulators.init(kStoreWarps);")),
    _m("arrival at the own CTA", "protocol", TALL, "DeadlockError ProtocolError",
       (GEMM, "mbarrier_arrive_cluster_if(accumulators.empty(acc), 0,", "mbarrier_arrive_cluster_if(accumulators.empty(acc), cluster_rank(),")),
    _m("accumulator released before it is in registers", "protocol", ROWS, "RaceError ProtocolError",
       (GEMM, "  accumulators.wait_full(acc);\n  fence_after();\n  const uint32_t from", "  accumulators.wait_full(acc);\n  fence_after();\n  mbarrier_arrive_if(accumulators.empty(acc), at.lane == 0);\n  const uint32_t from"),
       (GEMM, "    mbarrier_arrive_if(accumulators.empty(acc), at.lane == 0);\n  } else", "  } else")),
    _m("no fence after the wait for the accumulator", "protocol", ONE, "RaceError",
       (GEMM, "  accumulators.wait_full(acc);\n  fence_after();\n", "  accumulators.wait_full(acc);\n")),
    _m("no fence before the accumulator's release", "protocol", ROWS, "RaceError",
       (GEMM, _DRAINED, "  __syncwarp();\n  if constexpr (S::kGroup == 1) {")),
    _m("no tcgen05.wait::ld", "protocol", ONE, "ProtocolError",
       (GEMM, "    wait_loads();\n#pragma unroll\n    for (int i = 0; i < S::kWarpColumns; ++i)", "#pragma unroll\n    for (int i = 0; i < S::kWarpColumns; ++i)"), fast=True),
    _m("vectors overwritten while read", "protocol", ROWS, "RaceError",
       (GEMM, "  named_barrier_sync(1 + half, 128);  // the last tile's are no longer read\n", "")),
    _m("vectors read before they are there", "protocol", ONE, "RaceError UninitializedError",
       (GEMM, "  named_barrier_sync(1 + half, 128);\n}", "}")),
    _m("store slot reused while it is read", "protocol", ONE, "RaceError",
       (GEMM, "  if (lane == 0) wait_store_slot(slots);\n", "")),
    _m("no fence.proxy.async before the store", "protocol", ONE, "RaceError",
       (GEMM, "  fence_async_proxy();\n  __syncwarp();\n  if (lane == 0) {\n    tma_store_2d", "  __syncwarp();\n  if (lane == 0) {\n    tma_store_2d"), fast=True),
    _m("exit before the stores have read", "protocol", ONE, "ProtocolError",
       (GEMM, "  if (at.lane == 0) store_wait_read<0>();\n", "")),
    _m("no barrier after init", "protocol", ONE, "ProtocolError RaceError UninitializedError",
       (GEMM, _INIT, "  fence_before();\n")),
    _m("no cluster barrier after init", "protocol", LONG, "ProtocolError RaceError",
       (GEMM, _INIT, "  fence_before();\n  __syncthreads();\n")),
    _m("no wait for the launch before", "protocol", ONE, "RaceError ProtocolError UninitializedError",
       (GEMM, "  grid_dependency_wait();\n", "")),
    _m("no barrier before dealloc", "protocol", ONE, "ProtocolError OutOfBoundsError",
       (GEMM, "  fence_before();\n  __syncthreads();\n  // The pair's", "  // The pair's")),
    _m("no dealloc", "protocol", ONE, "ProtocolError",
       (GEMM, "  if (warp == kMmaWarp) tmem_free<kGroup>(tmem, kSm100Columns);\n", "")),
    _m("dealloc of half the columns", "protocol", ONE, "ProtocolError",
       (GEMM, "tmem_free<kGroup>(tmem, kSm100Columns);", "tmem_free<kGroup>(tmem, kSm100Columns / 2);")),
    _m("too few columns", "account", ONE, "OutOfBoundsError",
       (GEMM, "tmem_alloc<kGroup>(tmem_address, kSm100Columns);", "tmem_alloc<kGroup>(tmem_address, 256);")),
    _m("columns no power of two", "account", ONE, "ProtocolError",
       (GEMM, "tmem_alloc<kGroup>(tmem_address, kSm100Columns);", "tmem_alloc<kGroup>(tmem_address, 448);")),
    _m("weights halved twice in the account", "account", LONG, "RaceError cells UninitializedError ProtocolError OutOfBoundsError",
       fast=True, off_act_scale=lambda v: v - 3 * 4096),
    _m("W's scales halved in the account", "account", dataclasses.replace(LONG, n=384), "RaceError cells UninitializedError ProtocolError OutOfBoundsError",
       off_store=lambda v: v - 3 * 1024),
    _m("barriers over the vectors", "account", ONE, "ProtocolError RaceError DeadlockError UninitializedError",
       off_aux=lambda v: v + 1024),
    _m("wrong quarter of tensor memory", "layout", ONE, "ProtocolError",
       (GEMM, "static_cast<uint32_t>(at.quarter * 32) << 16", "static_cast<uint32_t>((at.quarter ^ 1) * 32) << 16")),
    _m("atom stride of the operands", "layout", LONG, "cells RaceError UninitializedError",
       (LAYOUT, "uint64_t{1024 >> 4} << 32", "uint64_t{512 >> 4} << 32"), fast=True),
    _m("swizzle of the operands", "layout", LONG, "cells",
       (LAYOUT, "return uint64_t{2} << 61", "return uint64_t{4} << 61")),
    _m("K advance", "layout", LONG, "cells",
       (GEMM, "d, x + 2 * i, w + 2 * i, instruction,", "d, x + 2 * i, w + i, instruction,")),
    _m("K advance of the low-rank product", "layout", ONE, "cells",
       (GEMM, "l + 2 * i, u + 2 * i,", "l + 2 * i, u + i,")),
    _m("scale columns of W", "layout", LONG, "cells UninitializedError",
       (GEMM, "            scales + (S::kAtoms + atom * S::kWeightTiles) * kSm100AtomColumns + half,", "            scales + (S::kAtoms - 1 + atom * S::kWeightTiles) * kSm100AtomColumns + half,")),
    _m("scales of the atom's rows", "layout", LONG, "cells",
       (LAYOUT, "uint64_t{128 >> 4} << 32", "uint64_t{64 >> 4} << 32")),
    _m("scales of the second row tile of W", "layout", WIDE, "cells",
       (GEMM, "(n0 / kSm100AtomRows + i) * args.atoms", "(n0 / kSm100AtomRows) * args.atoms"), fast=True),
    _m("half of an atom", "layout", HALF, "cells",
       (GEMM, "n * S::kTileN % kSm100AtomRows / 32 : 0;", "n * S::kTileN % kSm100AtomRows / 64 : 0;")),
    _m("scale factors over the accumulator", "layout", LONG, "cells ProtocolError",
       (GEMM, "kScaleBase = kAccumulators * kTileN;", "kScaleBase = kTileN - 32;")),
    _m("rows of an atom in order", "layout", ONE, "cells",
       (LAYOUT, "row % 32 * 16 + row / 32 % 4 * 4;", "row % 128 * 4;")),
    _m("row tiles of the scales", "layout", TALL, "cells",
       (SCALES, "const int row = tile * kSm100AtomRows + r;", "const int row = tile * 64 + r;")),
    _m("scales past K not zero", "layout", ODD, "cells OutOfBoundsError",
       (SCALES, "if (block + b < args.blocks) word", "word")),
    _m("swapped halves of W in the pair", "layout", LONG, "cells",
       (GEMM, "n0 + rank * (S::kTileN / S::kGroup);", "n0 + (S::kGroup - 1 - rank) * (S::kTileN / S::kGroup);")),
    _m("store without swizzle", "layout", ONE, "cells",
       (GEMM, "((i ^ (lane / 2 % 4)) << 4)", "(i << 4)")),
    _m("scale format bit", "arithmetic", MX, "ProtocolError",
       (LAYOUT, "(block == 32 ? 1u : 0u) << 23", "0u << 23")),
    _m("scale factor id", "arithmetic", MX, "cells",
       (GEMM, "i * kStepBlocks % kSm100AtomBlocks);", "0);")),
    _m("accumulate flag", "arithmetic", LONG, "cells",
       (GEMM, "            s > 0 || i > 0);\n      }\n      scale_slot", "            i > 0);\n      }\n      scale_slot")),
    _m("low-rank product added to an old tile", "arithmetic", ONE, "cells RaceError UninitializedError ProtocolError",
       (GEMM, "low_rank, s > 0 || i > 0);", "low_rank, true);")),
    _m("low-rank product scaled", "arithmetic", ONE, "cells",
       (GEMM, "__fadd_rn(v[c + i], __uint_as_float(low_rank[i]));", "v[c + i] * 2 + __uint_as_float(low_rank[i]);")),
    _m("N of the instruction", "arithmetic", ONE, "cells UninitializedError",
       (LAYOUT, "static_cast<uint32_t>(n / 8) << 17 |\n         1u << 10 | 1u << 7 |", "static_cast<uint32_t>(n / 16) << 17 |\n         1u << 10 | 1u << 7 |")),
    _m("low-rank steps of one stage only", "arithmetic", dataclasses.replace(ONE, rank=96), "cells",
       (GEMM, "const int r = (s - args.k_stages) * kSm100StageRanks;", "const int r = 0;")),
    _m("bias of the other half", "arithmetic", ONE, "cells RaceError",
       (GEMM, "vectors + (S::kTileN + c + i) * 4", "aux + (S::kTileN + c + i) * 4")),
    _m("quantizer does not answer for LoRA-down", "protocol", FUSED, "RaceError ProtocolError",
       (QUANT, "  end_after_launch_beside(args);\n", ""), fast=True),
    _m("LoRA-down's slot released before it is read", "protocol", FUSED, "RaceError DeadlockError ProtocolError",
       (DOWN, "    ring.wait_full(stage);\n    const uint32_t x", "    ring.wait_full(stage);\n    ring.release<1>(stage.slot, lane);\n    const uint32_t x"),
       (DOWN, "    __syncwarp();\n    ring.release<1>(stage.slot, lane);\n", "")),
    _m("scales of a token in order", "layout", FUSED, "cells",
       (QUANT, "scales, 2 * kLanes) << 16;", "scales, kLanes) << 16;")),
    _m("codes in the order of big ends", "layout", FUSED, "cells",
       (QUANT, "{b0, b1, b2, b3}", "{b3, b2, b1, b0}")),
    _m("row tile not filled up", "cells", FUSED, "UninitializedError RaceError ProtocolError cells",
       (QUANT, "if (token < Sm100AtomTiles(args.m) * kSm100AtomRows) {", "if (token < args.m) {")),
    _m("ranks of the second CTA", "cells", FUSED, "UninitializedError RaceError ProtocolError cells",
       (DOWN, "r0 = blockIdx.y * kSm100DownRanks;", "r0 = 0;")),
    _m("last row of a tile", "cells", ODD, "cells",
       (GEMM, "if (row >= args.m) return;", "if (row + 1 >= args.m) return;"), fast=True),
    _m("last column of an odd N", "cells", ODD, "cells",
       (GEMM, "if (column + i < args.n) out", "if (column + i + 1 < args.n) out")),
    _m("half of the columns stored", "cells", ONE, "cells RaceError",
       (GEMM, "  if (lane == 0) {\n    tma_store_2d", "  if (lane == 0 && column % 64 == 0) {\n    tma_store_2d")),
    _m("last tile of a group of m tiles", "cells", dataclasses.replace(ROWS, n=200, group_m=2), "cells",
       (ORDER, "min(group_m, m_tiles - first_m)", "group_m")),
)  # fmt: skip
