# ruff: noqa: E501 (the texts of edits)
"""Seeded bugs in the product's kernels, and how the emulator has to notice each.

An edit is (file of cuda/, text that occurs once, replacement). `caught` names what may stop the
mutant: an error class of emulator.errors, or "cells" for a result that is wrong or unwritten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from emulator.product import Case

GEMM = "sm90_gemm_v2.cuh"
PATHS = "sm90_paths.cuh"
RING = "sm90_pipeline.cuh"
WGMMA = "sm90_wgmma.cuh"
EXPAND = "sm90_expand.cuh"
QUANT = "sm90_quantize_v2.cuh"
TOKEN = "sm90_quantize_token.cuh"
DOWN = "sm90_down_v2.cuh"
DECODE = "sm90_decode.cuh"
DECODE_QUANT = "sm90_decode_quantize.cuh"
PTX = "sm90_ptx.cuh"

PLAIN = Case("mxfp4", 70, 200, 288, 32, clusters=1, stages=2)
PAIR = Case("mxfp4", 70, 200, 288, 32, cluster=2, clusters=1, stages=2)
MANY = Case("mxfp4", 130, 264, 160, 32, clusters=1, stages=3)
EXACT = Case("mxfp4", 70, 200, 288, 32, clusters=1, exact=True)
PREPARED = dataclasses.replace(EXACT, sign_order="sorted")
NVFP4 = Case("nvfp4", 70, 136, 208, 32, clusters=1, exact=True)
INT4 = Case("int4", 70, 136, 288, 0, clusters=1, exact=True)
ODD = Case("mxfp4", 70, 77, 160, 0, clusters=1, exact=True)
GROUPS = Case("int4", 70, 136, 320, 48, block=64, precision="highest", clusters=1, stages=2)
PROMOTED = Case("mxfp4", 70, 136, 544, 48, precision="highest", promote_k=256, clusters=1, stages=2)
FUSED = Case("mxfp4", 70, 136, 640, 80, clusters=1, fused=True)

FEW = Case("mxfp4", 8, 40, 2080, 48, kernel="sm90_decode", tile_m=8, tile_n=40, clusters=1)
FEW_EXACT = dataclasses.replace(FEW, exact=True)
FEW_PAIR = dataclasses.replace(FEW, cluster=2)
# More tokens: records as a whole, and block scales of a CTA that take two places in turn.
MANY_PAIR = Case(
    "mxfp4",
    21,
    40,
    2080,
    48,
    kernel="sm90_decode",
    tile_m=32,
    tile_n=40,
    cluster=2,
    clusters=1,
    stages=2,
)
MANY_EXACT = dataclasses.replace(MANY_PAIR, exact=True)
TURN = Case(
    "mxfp4", 17, 8, 8704, 0, kernel="sm90_decode", tile_m=32, tile_n=8, clusters=1, stages=4
)
TURN_EXACT = dataclasses.replace(TURN, exact=True)
# A second round, and a unit of K that is not whole.
FEW_FUSED = dataclasses.replace(FEW, n=8, k=6168, tile_n=8, fused=True, down_cluster=8)
# Four CTAs share a token.
FEW_LONG = dataclasses.replace(FEW, m=1, n=8, k=8232, rank=0, tile_n=8, fused=True)


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    kind: str  # protocol, layout, arithmetic, account, cells
    case: Case
    caught: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...] = ()
    attrs: Mapping[str, Callable[[int], int]] = dataclasses.field(default_factory=dict)
    sources: tuple[str, ...] = ()  # what to compile; by default the case's gemm

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)


def _m(name, kind, case, caught, *edits, **rest) -> Mutant:
    return Mutant(name, kind, case, tuple(caught.split()), edits, **rest)


_QUANT = {"sources": ("sm90_quantize_v2_Mxfp4.cu",)}
_DOWN = {"sources": ("sm90_down_v2.cu",)}
_FEW = {"sources": ("sm90_decode_Mxfp4_8.cu",)}
_MANY = {"sources": ("sm90_decode_Mxfp4_32.cu",)}
_FEW_QUANT = {"sources": ("sm90_decode_quantize_Mxfp4.cu",)}

MUTANTS = (
    # ---- the ring ----
    _m("empty parity", "protocol", PLAIN, "DeadlockError",
       (RING, "mbarrier_wait(empty(state), state.phase ^ 1);",
        "mbarrier_wait(empty(state), state.phase);")),
    _m("full parity", "protocol", PLAIN, "RaceError UninitializedError",
       (RING, "mbarrier_wait(full(state), state.phase);",
        "mbarrier_wait(full(state), state.phase ^ 1);")),
    _m("no full wait", "protocol", PLAIN, "RaceError UninitializedError",
       (RING, "mbarrier_wait(full(state), state.phase);", "")),
    _m("no empty wait", "protocol", PLAIN, "RaceError ProtocolError",
       (RING, "mbarrier_wait(empty(state), state.phase ^ 1);", "")),
    _m("phase never flips", "protocol", PLAIN, "ProtocolError",
       (RING, "phase ^= 1;", "")),
    _m("phase flips one slot early", "protocol", PLAIN, "DeadlockError RaceError ProtocolError",
       (RING, "if (++slot == stages) {", "if (++slot == stages - 1) {")),
    _m("all lanes arrive", "protocol", PLAIN, "DeadlockError ProtocolError",
       (RING, "mbarrier_arrive_if(barrier, condition && lane == 0);",
        "mbarrier_arrive_if(barrier, condition);")),
    _m("release of this CTA only", "protocol", PAIR, "DeadlockError",
       (RING, "condition && lane < kCluster", "condition && lane == 0")),
    _m("release of the wrong slot", "protocol", PLAIN, "DeadlockError RaceError ProtocolError",
       (RING, "const uint32_t barrier = empty_ + 8 * slot;",
        "const uint32_t barrier = empty_ + 8 * (slot ^ 1);")),
    _m("full barriers count two", "protocol", PLAIN, "DeadlockError",
       (RING, "mbarrier_init(full_ + 8 * s, 1);", "mbarrier_init(full_ + 8 * s, 2);")),
    _m("empty barriers overlap full ones", "protocol", PLAIN, "DeadlockError RaceError ProtocolError",
       (RING, "empty_(barriers + 8 * stages)", "empty_(barriers + 8 * (stages - 1))")),
    # ---- the producer ----
    _m("expect_tx 16 bytes short", "protocol", PLAIN, "DeadlockError RaceError UninitializedError",
       (GEMM, "Format::kStageGroups * kTileM * 4;\n  constexpr uint32_t kChunkBytes",
        "Format::kStageGroups * kTileM * 4 - 16;\n  constexpr uint32_t kChunkBytes")),
    _m("expect_tx 16 bytes long", "protocol", PLAIN, "DeadlockError",
       (GEMM, "constexpr uint32_t kChunkBytes = kTileM * kLoraRowBytes + kTileN * kLoraRowBytes;",
        "constexpr uint32_t kChunkBytes = kTileM * kLoraRowBytes + kTileN * kLoraRowBytes + 16;")),
    _m("multicast mask lacks the peer", "protocol", PAIR, "DeadlockError",
       (GEMM, "static_cast<uint16_t>((1 << kCluster) - 1)", "static_cast<uint16_t>(1 << rank)")),
    _m("both warps produce", "protocol", PLAIN, "ProtocolError RaceError DeadlockError",
       (GEMM, "    if (threadIdx.x == 0) {\n      load<", "    if (threadIdx.x % 64 == 0) {\n      load<")),
    _m("producer restarts the ring at each tile", "protocol", MANY,
       "DeadlockError RaceError ProtocolError",
       (GEMM, "const Tile tile = tile_at(args, index, kTileM, kCluster * kTileN, rank);\n\n",
        "const Tile tile = tile_at(args, index, kTileM, kCluster * kTileN, rank);\n"
        "    stage = RingState();\n")),
    _m("token ring of one slot", "protocol", MANY, "RaceError",
       (GEMM, "bulk_load(smem + args.off_token + token.slot * kTileM * 4,",
        "bulk_load(smem + args.off_token,")),
    _m("stage stride too small", "layout", PLAIN, "RaceError cells",
       (GEMM, "const uint32_t slot = smem + stage.slot * args.stage_bytes;\n"
        "      tma_load_2d(slot + args.off_weight",
        "const uint32_t slot = smem + stage.slot * (args.stage_bytes - 1024);\n"
        "      tma_load_2d(slot + args.off_weight")),
    # ---- consumers ----
    _m("release before the MMAs are complete", "protocol", PLAIN, "RaceError",
       (GEMM, "if (s == 1) main.release", "if (s == 0) main.release")),
    _m("release of the stage in use", "protocol", PLAIN, "RaceError",
       (GEMM, "if (s == 1) main.release<kCluster>(previous, lane, kb > 0);",
        "if (s == 1) main.release<kCluster>(stage.slot, lane, true);"),
       (GEMM, "    main.release<kCluster>((stage.slot == 0 ? args.stages : stage.slot) - 1, lane);\n",
        "")),
    _m("three MMAs in flight on four fragments", "protocol", PLAIN, "RaceError ProtocolError",
       (GEMM, "wgmma_wait<2>();", "wgmma_wait<4>();")),
    _m("no wgmma.fence", "protocol", PLAIN, "ProtocolError",
       (GEMM, "wgmma_fence();\n      // 32 bytes", "// 32 bytes")),
    _m("no wgmma.wait before the epilogue", "protocol", PLAIN, "ProtocolError",
       (GEMM, "    if constexpr (Format::kStageGroups == 0) {\n      wgmma_wait<0>();\n      pin(acc);",
        "    if constexpr (Format::kStageGroups == 0) {\n      pin(acc);")),
    _m("low-rank slot released one MMA early", "protocol", dataclasses.replace(PLAIN, rank=96),
       "RaceError",
       (GEMM, "    wgmma_commit();\n    wgmma_wait<1>();\n    main.release<kCluster>(previous, lane, chunk > 0);",
        "    wgmma_commit();\n    main.release<kCluster>(previous, lane, chunk > 0);")),
    _m("no wait for the tokens", "protocol", PLAIN, "RaceError UninitializedError",
       (GEMM, "tokens.wait_full(token);", "")),
    _m("tokens never released", "protocol", MANY, "DeadlockError",
       (GEMM, "tokens.release<1>(token.slot, lane);", "")),
    # ---- start and end ----
    _m("empty count of one CTA", "protocol", PAIR, "ProtocolError RaceError DeadlockError",
       (GEMM, "main.init(kConsumerWarps * kCluster);", "main.init(kConsumerWarps);")),
    _m("no cluster barrier after init", "protocol", PAIR, "ProtocolError RaceError",
       (GEMM, "  if constexpr (kCluster > 1) {\n    cluster_sync();\n  } else {\n    __syncthreads();\n  }",
        "  __syncthreads();")),
    _m("no barrier after init", "protocol", PLAIN, "ProtocolError RaceError",
       (GEMM, "  } else {\n    __syncthreads();\n  }", "  }")),
    _m("no fence.mbarrier_init", "protocol", PLAIN, "ProtocolError",
       (GEMM, "    fence_mbarrier_init();\n", "")),
    _m("no cluster barrier before exit", "protocol", PAIR, "ProtocolError",
       (GEMM, "  if constexpr (kCluster > 1) cluster_sync();\n}", "}")),
    _m("no griddepcontrol.wait", "protocol", PLAIN, "ProtocolError",
       (GEMM, "  grid_dependency_wait();\n", "")),
    _m("producer keeps its registers", "protocol", PLAIN, "DeadlockError",
       (GEMM, "    release_registers<kProducerRegisters>();\n", "")),
    _m("consumers claim too many registers", "protocol", PLAIN, "DeadlockError",
       (GEMM, "kConsumerRegisters = 240", "kConsumerRegisters = 248")),
    # ---- the epilogue ----
    _m("no fence.proxy.async before the store", "protocol", PLAIN, "RaceError",
       (GEMM, "    fence_async_proxy();\n    named_barrier_sync(barrier, 128);",
        "    named_barrier_sync(barrier, 128);")),
    _m("no barrier before the store", "protocol", PLAIN, "RaceError UninitializedError",
       (GEMM, "    fence_async_proxy();\n    named_barrier_sync(barrier, 128);",
        "    fence_async_proxy();")),
    _m("fence after the barrier, by the issuer only", "protocol", MANY, "RaceError",
       (GEMM, "    fence_async_proxy();\n    named_barrier_sync(barrier, 128);\n    if (issuer) {",
        "    if (issuer) fence_async_proxy();\n    named_barrier_sync(barrier, 128);\n"
        "    if (issuer) {")),
    _m("slab reused before it is read", "protocol", MANY, "RaceError",
       (GEMM, "  if (issuer) store_wait_read<0>();\n", "")),
    _m("no barrier before the slab is reused", "protocol", MANY, "RaceError",
       (GEMM, "  if (issuer) store_wait_read<0>();\n  named_barrier_sync(barrier, 128);",
        "  if (issuer) store_wait_read<0>();")),
    _m("no wait for the last store", "protocol", PLAIN, "ProtocolError",
       (GEMM, "  if (place.warp == 0 && place.lane == 0) store_wait_read<0>();\n", "")),
    _m("both warpgroups on one barrier", "protocol", MANY, "ProtocolError RaceError DeadlockError",
       (GEMM, "const uint32_t barrier = 1 + group;", "const uint32_t barrier = 1;")),
    _m("barrier for all threads", "protocol", PLAIN, "DeadlockError",
       (GEMM, "    fence_async_proxy();\n    named_barrier_sync(barrier, 128);",
        "    fence_async_proxy();\n    named_barrier_sync(barrier, 384);")),
    _m("slab without swizzle", "layout", EXACT, "cells",
       (GEMM, "(2 * warp + lane / 8 % 2) ^ (lane % 8)", "(2 * warp + lane / 8 % 2)")),
    _m("bias of the other row", "arithmetic", EXACT, "cells",
       (GEMM, "const float b1 = rows[1].inputs.bias;", "const float b1 = rows[0].inputs.bias;")),
    _m("last column of an odd N", "cells", ODD, "cells",
       (GEMM, "if (feature + 1 < n) out[1]", "if (feature + 2 < n) out[1]"),
       (GEMM, "if (feature < n) out[0]", "if (feature + 1 < n) out[0]")),
    _m("rows of the last tile", "cells", ODD, "cells",
       (GEMM, "min(kTileM, args.m - tile.m0), warp, lane);",
        "min(kTileM, args.m - tile.m0 - 4), warp, lane);")),
    _m("direct store past N", "cells", ODD, "OutOfBoundsError cells",
       (GEMM, "if (feature + 1 < n) out[1]", "out[1]")),
    _m("both CTAs of a pair take the same rows", "cells", PAIR, "cells RaceError",
       (GEMM, "n * cluster_n + rank * kTileN};", "n * cluster_n};")),
    _m("a tile computed twice", "cells", dataclasses.replace(MANY, clusters=2), "RaceError cells",
       (GEMM, "  return {tile.m * tile_m, tile.n * cluster_n + rank * kTileN};",
        "  return {tile.m / 2 * tile_m, tile.n * cluster_n + rank * kTileN};")),
    # ---- descriptors and fragments ----
    _m("atom stride of the descriptor", "layout", EXACT, "cells RaceError",
       (WGMMA, "constexpr uint64_t kAtomStride = 8 * kRowBytes / 16;",
        "constexpr uint64_t kAtomStride = 4 * kRowBytes / 16;")),
    _m("swizzle code of the descriptor", "layout", EXACT, "cells RaceError UninitializedError",
       (WGMMA, "kSwizzle = kRowBytes == 128 ? 1 : 2;", "kSwizzle = kRowBytes == 128 ? 2 : 1;")),
    _m("K advance of the descriptor", "layout", EXACT, "cells",
       (GEMM, "act + 2 * s, s > 0 || kb > 0", "act + s, s > 0 || kb > 0")),
    _m("accumulate flag", "arithmetic", EXACT, "cells",
       (GEMM, "s > 0 || kb > 0);", "s > 0);")),
    _m("second row's weights", "layout", EXACT, "cells",
       (GEMM, "Format::load_packed(weight + 8 * Format::kWeightBytes)",
        "Format::load_packed(weight + 4 * Format::kWeightBytes)")),
    _m("scale column of the quad", "layout", EXACT, "cells",
       (GEMM, "static_cast<uint32_t>(r) * args.scale_blocks + first;",
        "static_cast<uint32_t>(r) * args.scale_blocks;")),
    _m("scale rows past K", "arithmetic", Case("mxfp4", 70, 200, 96, 0, clusters=1, exact=True),
       "OutOfBoundsError",
       (GEMM, "next_scale<Format>(args, row, row.scale, first < args.scale_blocks);",
        "next_scale<Format>(args, row, row.scale, true);")),
    _m("scales of a second stage that is not there", "arithmetic",
       Case("mxfp4", 70, 200, 96, 0, clusters=1, exact=True), "OutOfBoundsError",
       (GEMM, "row, row.next, first + Format::kStageScales < args.scale_blocks);",
        "row, row.next, true);")),
    _m("scales two stages past K", "arithmetic", EXACT, "OutOfBoundsError",
       (GEMM, "constexpr int kAhead = Format::kPromote ? 1 : 2;", "constexpr int kAhead = 1;")),
    _m("half of the second low-rank step", "arithmetic", EXACT, "cells",
       (GEMM, "Wgmma<kTileM>::ss_bf16(acc, up + 2, act + 2);",
        "Wgmma<kTileM>::ss_bf16(acc, up + 2, act);")),
    _m("sign permutation", "arithmetic", EXACT, "cells",
       (EXPAND, "prmt(word, shifted, 0x1504)", "prmt(word, shifted, 0x1540)")),
    _m("signs of the second half", "arithmetic", PREPARED, "cells",
       (EXPAND, "word << 4 & 0x80808080u", "word & 0x80808080u")),
    _m("smallest magnitude becomes zero", "arithmetic", EXACT, "cells",
       (EXPAND, "lo_(0x0A080400u - base * 0x04040400u)", "lo_(0x0A080000u - base * 0x04040400u)")),
    _m("fold keeps flushed blocks' neighbours", "arithmetic", EXACT, "cells",
       (EXPAND, "return scale < base_;", "return scale <= base_ + 26;")),
    _m("bf16 expansion of the second pair", "arithmetic", NVFP4, "cells",
       (PATHS, "half1 = expand_e2m1_bf16<3>(word, multiplier);",
        "half1 = expand_e2m1_bf16<2>(word, multiplier);")),
    _m("odd nibbles", "arithmetic", INT4, "cells",
       (EXPAND, "half1 = prmt(even, odd, 0x7362);", "half1 = prmt(even, odd, 0x7326);")),
    # ---- the account ----
    _m("weight halved twice in the account", "account", PAIR, "RaceError cells ProtocolError",
       attrs={"stage_bytes": lambda v: v - 4096}),
    _m("slab inside the ring", "account", PLAIN, "RaceError cells",
       attrs={"off_store": lambda v: v - 2048}),
    _m("barriers past the end", "account", PLAIN, "OutOfBoundsError",
       attrs={"smem_bytes": lambda v: v - 112}),
    _m("low-rank operands overlap", "account", PLAIN, "RaceError cells",
       attrs={"off_lora_up": lambda v: v - 1024}),
    # ---- scales per group, promotion ----
    _m("nobody has the first turn", "protocol", GROUPS, "DeadlockError",
       (GEMM, "  if (Format::kStageGroups > 0 && place.group == 1) pass_turn(1);\n", "")),
    _m("a warpgroup passes the turn to itself", "protocol", GROUPS, "DeadlockError ProtocolError",
       (GEMM, "named_barrier_arrive(kTurn + 1 - group, kTurnThreads);",
        "named_barrier_arrive(kTurn + group, kTurnThreads);")),
    _m("turns on the store's barriers", "protocol", GROUPS, "ProtocolError DeadlockError",
       (GEMM, "constexpr uint32_t kTurn = 3;", "constexpr uint32_t kTurn = 1;")),
    _m("turns of one warpgroup's threads", "protocol", GROUPS, "ProtocolError DeadlockError",
       (GEMM, "constexpr uint32_t kTurnThreads = 256;", "constexpr uint32_t kTurnThreads = 128;")),
    _m("a turn too many at the end", "protocol", GROUPS, "DeadlockError",
       (GEMM, "  if (Format::kStageGroups > 0 && place.group == 0) await_turn(0);",
        "  if (Format::kStageGroups > 0) await_turn(place.group);")),
    _m("last turn not taken", "protocol", GROUPS, "ProtocolError",
       (GEMM, "  if (Format::kStageGroups > 0 && place.group == 0) await_turn(0);", "")),
    _m("sums of a group before its MMAs", "protocol", GROUPS, "ProtocolError",
       (GEMM, "      wgmma_wait<0>();\n      pin(acc);\n#pragma unroll\n      for (int j",
        "      pin(acc);\n#pragma unroll\n      for (int j")),
    _m("slot released under a group's token scales", "protocol", GROUPS, "RaceError",
       (GEMM, "      const uint32_t tokens = slot + args.off_token + g * kTileM * 4 + q * 8;\n"
        "      wgmma_wait<0>();\n      pin(acc);",
        "      const uint32_t tokens = slot + args.off_token + g * kTileM * 4 + q * 8;\n"
        "      wgmma_wait<0>();\n      pin(acc);\n"
        "      if (g == kGroups - 1) main.release<kCluster>(stage.slot, lane);"),
       (GEMM, "    __syncwarp();\n    main.release<kCluster>(stage.slot, lane);\n", "")),
    _m("token scales of the first group", "arithmetic", GROUPS, "cells",
       (GEMM, "slot + args.off_token + g * kTileM * 4 + q * 8;",
        "slot + args.off_token + q * 8;")),
    _m("weight scale of the group before", "arithmetic", GROUPS, "cells",
       (GEMM, "const int next = min((kb + 1) * kGroups + g, args.scale_blocks - 1);",
        "const int next = min(kb * kGroups + g, args.scale_blocks - 1);")),
    _m("weight scales past the last group", "arithmetic", GROUPS, "OutOfBoundsError",
       (GEMM, "const int next = min((kb + 1) * kGroups + g, args.scale_blocks - 1);",
        "const int next = (kb + 1) * kGroups + g;")),
    _m("promotion before the MMAs are complete", "protocol", PROMOTED, "ProtocolError",
       (GEMM, "    wgmma_wait<0>();\n    pin(acc);\n#pragma unroll\n    for (int i = 0; i < kTileM / 2; ++i) total",
        "    pin(acc);\n#pragma unroll\n    for (int i = 0; i < kTileM / 2; ++i) total")),
    _m("promoted sums stay in the tensor core", "arithmetic", PROMOTED, "cells",
       (GEMM, "    int accumulate = 0;\n", "    int accumulate = kb > 0;\n")),
    # ---- the quantizer, LoRA-down ----
    _m("token maximum before every warp is done", "protocol", FUSED, "RaceError UninitializedError",
       (TOKEN, "  named_barrier_sync(barrier, 32 * kWarps);\n", ""), **_QUANT),
    _m("two tokens on one barrier", "protocol", FUSED,
       "RaceError UninitializedError ProtocolError DeadlockError",
       (QUANT, "slots[local], 1 + local};", "slots[local], 1};"), **_QUANT),
    _m("quantizer does not answer for LoRA-down", "protocol", FUSED, "ProtocolError",
       (QUANT, "  end_after_launch_beside(args);\n", ""), **_QUANT),
    _m("x past the last piece", "arithmetic", FUSED, "OutOfBoundsError",
       (TOKEN, "    if (c < chunks) {", "    if (c <= chunks) {"), **_QUANT),
    _m("partial sums before the ring is empty", "protocol", FUSED, "RaceError",
       (DOWN, "    named_barrier_sync(1, kThreads);\n", ""), **_DOWN),
    _m("partial sums before the cluster barrier", "protocol",
       dataclasses.replace(FUSED, down_cluster=2), "RaceError UninitializedError",
       (DOWN, "  cluster_sync();\n  if (thread < kThreads) add", "  if (thread < kThreads) add"),
       **_DOWN),
    _m("exit while a peer still reads", "protocol", dataclasses.replace(FUSED, down_cluster=2),
       "ProtocolError",
       (DOWN, "  // Peers read this CTA's partial sums until they are through.\n  cluster_sync();\n",
        ""), **_DOWN),
    _m("stage of LoRA-down released under its MMAs", "protocol",
       dataclasses.replace(FUSED, k=1352, down_cluster=1), "RaceError ProtocolError",
       (DOWN, "    wgmma_wait<1>();\n    ring.release<1>(previous, lane, step > 0);",
        "    wgmma_wait<1>();\n    ring.release<1>(stage.slot, lane);"), **_DOWN),
    _m("LoRA-down expects one box", "protocol", FUSED,
       "RaceError DeadlockError UninitializedError ProtocolError",
       (DOWN, "ring.acquire(stage, kLoadBytes)",
        "ring.acquire(stage, kDownXBytes + kDownRankBytes)"), **_DOWN),
    # ---- the gemm for few tokens ----
    _m("decode: activations before the launch before has ended", "protocol", FEW, "ProtocolError",
       (DECODE, "  grid_dependency_wait();\n  NextScales", "  NextScales"), **_FEW),
    _m("decode: a stage expects its weights only", "protocol", FEW,
       "RaceError UninitializedError ProtocolError DeadlockError",
       (DECODE, "D::kBoxes * tile_n * kBoxBytes + D::kGroups * D::kRecords * kTokens * kBoxBytes;",
        "D::kBoxes * tile_n * kBoxBytes;"), **_FEW),
    _m("decode: sums over a ring that is still read", "protocol", FEW, "RaceError",
       (DECODE, "    named_barrier_sync(kMultiplyBarrier, kMultiplyThreads);\n    store_partial",
        "    store_partial"), **_FEW),
    _m("decode: sums before all are there", "protocol", FEW,
       "RaceError UninitializedError ProtocolError DeadlockError",
       (DECODE, "    named_barrier_sync(kSumBarrier, kMultiplyThreads + 32 * kAddWarps);\n"
        "    if (args.splits", "    if (args.splits"), **_FEW),
    _m("decode: scales of others before they are there", "protocol", FEW,
       "RaceError UninitializedError",
       (DECODE, "      wait_copies();\n      named_barrier_sync(kMultiplyBarrier, kMultiplyThreads);\n",
        "      wait_copies();\n"), **_FEW),
    _m("decode: scales before they have come", "protocol", dataclasses.replace(FEW, k=2176),
       "UninitializedError RaceError", (DECODE, "      wait_copies();\n", ""), **_FEW),
    _m("decode: scales before the copy engine has brought them", "protocol",
       dataclasses.replace(FEW, k=2048), "UninitializedError RaceError",
       (DECODE, "    if (args.scale_map) {\n      watched_wait(args, RingName::kDecodeScales, "
        "scale_barrier(args, smem), 0);\n    } else {", "    if (!args.scale_map) {"), **_FEW),
    _m("decode: more boxes of scales are expected than asked for", "protocol",
       dataclasses.replace(FEW, k=8192), "DeadlockError ProtocolError",
       (DECODE, "box < args.scale_boxes; ++box) {\n      tma",
        "box + 1 < args.scale_boxes; ++box) {\n      tma"), **_FEW),
    _m("decode: rows before all are prepared", "protocol", FEW, "RaceError UninitializedError",
       (DECODE, "  named_barrier_sync(kMultiplyBarrier, kMultiplyThreads);\n}\n\n// A lane's bytes",
        "}\n\n// A lane's bytes"), **_FEW),
    _m("decode: stage released under its MMAs", "protocol", dataclasses.replace(FEW, stages=2),
       "RaceError ProtocolError",
       (DECODE, "        wgmma_wait<0>();\n        ring.release<1>(through, lane);",
        "        ring.release<1>(through, lane);\n        wgmma_wait<0>();"), **_FEW),
    _m("decode: a stage's codes before it has come", "protocol", FEW, "RaceError UninitializedError",
       (DECODE, "    ring.wait_full(stage);\n    const uint32_t slot = stage.slot * args.stage_bytes;\n"
        "#pragma unroll\n    for (int r = 0; r < D::kRecords; ++r) {\n#pragma unroll",
        "    const uint32_t slot = stage.slot * args.stage_bytes;\n"
        "#pragma unroll\n    for (int r = 0; r < D::kRecords; ++r) {\n#pragma unroll"), **_FEW),
    _m("decode: peer's sums before they are there", "protocol", FEW_PAIR,
       "RaceError UninitializedError ProtocolError",
       (DECODE, "      watched_wait(args, RingName::kDecodePeer, sum_barrier(args, smem), 0);\n      if (mine)",
        "      if (mine)"), **_FEW),
    _m("decode: sixteen bytes of the peer's sums are not waited for", "protocol", FEW_PAIR,
       "DeadlockError RaceError UninitializedError ProtocolError",
       (DECODE, "return row_units * token_pairs * (8 * 4 * D::kChunk);",
        "return row_units * token_pairs * (8 * 4 * D::kChunk) - 16;"), **_FEW),
    _m("decode: sixteen bytes too many of the peer's sums are waited for", "protocol", FEW_PAIR,
       "DeadlockError",
       (DECODE, "return row_units * token_pairs * (8 * 4 * D::kChunk);",
        "return row_units * token_pairs * (8 * 4 * D::kChunk) + 16;"), **_FEW),
    _m("decode: the peer's sums of tokens past M are waited for", "protocol", MANY_PAIR, "DeadlockError",
       (DECODE, "const int token_pairs = kTokens == 8 ? kHalf / 2 : (tokens + 7) / 8 * 4;",
        "const int token_pairs = kHalf / 2;"), **_MANY),
    _m("decode: the peer's sums of rows past the tile are waited for", "protocol", FEW_PAIR,
       "DeadlockError",
       (DECODE, "const int row_units = (args.tile_n + D::kUnitRows - 1) / D::kUnitRows;\n  const int tokens",
        "const int row_units = D::kRowUnits;\n  const int tokens"), **_FEW),
    _m("decode: the peer's sums over the own low-rank product", "layout", MANY_PAIR, "RaceError cells",
       (DECODE, "chunk_place<D, kTokens>(row_unit, unit ^ kTokenUnits / 2, lane)",
        "chunk_place<D, kTokens>(row_unit, unit, lane)"), **_MANY),
    _m("decode: the peer's half of eight tokens over the own", "layout", FEW_PAIR, "RaceError cells",
       (DECODE, "chunk_place<D, kTokens>(row_unit, unit, lane ^ 2);",
        "chunk_place<D, kTokens>(row_unit, unit, lane);"), **_FEW),
    _m("decode: sums to the peer where it looks for others", "layout", MANY_PAIR,
       "RaceError UninitializedError cells",
       (DECODE, "store_cluster_async<D::kChunk>(smem + args.off_addend + other,",
        "store_cluster_async<D::kChunk>(smem + args.off_addend + place,"), **_MANY),
    _m("decode: sums to a peer that may not run", "protocol", FEW_PAIR, "RaceError ProtocolError",
       (DECODE, "    if (args.splits > 1) cluster_wait();\n    finish<", "    finish<"), **_FEW),
    _m("decode: the peer is let on before the barrier of its sums is there", "protocol", FEW_PAIR,
       "RaceError ProtocolError",
       (DECODE, "if (args.splits > 1 && warp != kLoadWarp) cluster_arrive_relaxed();",
        "if (args.splits > 1) cluster_arrive_relaxed();"),
       (DECODE, "    if (args.splits > 1) cluster_arrive_relaxed();\n", ""), **_FEW),
    _m("decode: barriers without a fence", "protocol", FEW_PAIR, "RaceError ProtocolError",
       (DECODE, "      fence_mbarrier_init();\n", ""), **_FEW),
    _m("decode: both CTAs take the first half of K", "arithmetic", FEW_PAIR, "cells",
       (DECODE, "share.first_step = share.rank * each;", "share.first_step = 0;"), **_FEW),
    _m("decode: last token", "cells", FEW_EXACT, "cells",
       (DECODE, "if (inside && token + j < args.m) {", "if (inside && token + j + 1 < args.m) {"), **_FEW),
    _m("decode: last row of an odd N, lanes with one row", "cells",
       dataclasses.replace(FEW_EXACT, n=77, tile_n=24), "cells",
       (DECODE, "pair < args.tile_n && n < args.n;", "row < args.tile_n && share.n0 + row < args.n;"), **_FEW),
    _m("decode: store past an odd N", "cells", dataclasses.replace(FEW_EXACT, n=77),
       "OutOfBoundsError RaceError cells",
       (DECODE, "if (n + 1 < args.n) out[1] = y.y;", "out[1] = y.y;"), **_FEW),
    _m("decode: swizzle of the scales", "layout", dataclasses.replace(FEW_EXACT, k=2048),
       "cells UninitializedError",
       (DECODE, "(g * 16 ^ (record * Path::kStageScales", "(0 ^ (record * Path::kStageScales"), **_FEW),
    _m("decode: a box of the scales forgotten", "layout", dataclasses.replace(FEW_EXACT, k=8192),
       "cells",
       (DECODE, "uint32_t place = scale / kDecodeScaleBox;", "uint32_t place = 0;"), **_FEW),
    _m("decode: scales in turn are looked for in places of their own", "layout", TURN,
       "RaceError UninitializedError OutOfBoundsError cells",
       (DECODE, "    if (kTokens > 16 && in_last_stage(args)) place %= 2;\n", ""), **_MANY),
    _m("decode: next scales over those of a stage still to be read", "protocol", TURN, "RaceError",
       (DECODE, "step(kStages - 1 + args.stages) {}", "step(kStages - 2 + args.stages) {}"), **_MANY),
    _m("decode: next scales with the stage that needs them", "protocol", TURN,
       "RaceError UninitializedError",
       (DECODE, "step(kStages - 1 + args.stages) {}", "step(kStages + args.stages) {}"), **_MANY),
    _m("decode: next scales are not waited for", "protocol", TURN, "RaceError ProtocolError DeadlockError",
       (DECODE, "stage_bytes<Path, kTokens, kRows>(args.tile_n) + more);",
        "stage_bytes<Path, kTokens, kRows>(args.tile_n));"), **_MANY),
    _m("decode: next scales never come", "arithmetic", TURN_EXACT, "cells",
       (DECODE, "const bool brings_scales = scales.come_with(args, step);",
        "const bool brings_scales = false;"), **_MANY),
    _m("decode: weights over the last stage's scales before all are seen", "protocol", TURN, "RaceError",
       (DECODE, "        watched_wait(args, RingName::kDecodeSeen, seen_barrier(args, smem), 0);\n", ""),
       **_MANY),
    _m("decode: one warp's look at the scales is not waited for", "protocol", TURN, "RaceError ProtocolError",
       (DECODE, "mbarrier_init(seen_barrier(args, smem), kMultiplyWarps);",
        "mbarrier_init(seen_barrier(args, smem), kMultiplyWarps - 1);"), **_MANY),
    _m("decode: early weights over the last stage's scales", "protocol",
       dataclasses.replace(TURN, stages=2), "RaceError ProtocolError DeadlockError",
       (DECODE, "min(min(most, args.stages - in_last_stage(args)), share.steps);",
        "min(min(most, args.stages), share.steps);"), **_MANY),
    _m("decode: fragments of a record under its MMAs", "protocol", MANY_PAIR, "ProtocolError",
       (DECODE, "      read_stage(step + 1);\n      expand_record(0, next);",
        "      read_stage(step + 1);\n      expand_record(0, now);"), **_MANY),
    _m("decode: stage released under a whole record's MMAs", "protocol", MANY_PAIR, "RaceError ProtocolError",
       (DECODE, "    wgmma_wait<0>();\n    ring.release<1>(through, lane);\n  };",
        "    ring.release<1>(through, lane);\n    wgmma_wait<0>();\n  };"), **_MANY),
    _m("decode: both records of a round from one set of fragments", "arithmetic", MANY_EXACT,
       "cells ProtocolError",
       (DECODE, "if (step + 1 < steps) turn(step + 1, 0, a[1], a[0]);",
        "if (step + 1 < steps) turn(step + 1, 0, a[0], a[1]);"), **_MANY),
    _m("decode: a block that flushes goes unseen", "arithmetic",
       dataclasses.replace(FEW_EXACT, n=136, tile_n=64, far=True), "cells",
       (DECODE, "v.base = (v.base & 0xFFFF) | flushes << 16;", "v.base = v.base & 0xFFFF;"), **_FEW),
    _m("decode: ranks past the first 32", "arithmetic", FEW_EXACT, "cells",
       (DECODE, "for (int rank = 32; rank < args.rank; rank += 32) {",
        "for (int rank = 32; rank < 32; rank += 32) {"), **_FEW),
    _m("decode: second row of the low-rank product", "layout", FEW_EXACT, "cells",
       (DECODE, "constexpr int kNext = D::kHalves == 2 ? 1 : 8;", "constexpr int kNext = 8;"), **_FEW),
    _m("decode: low-rank product over the tokens' scales", "account", FEW, "RaceError cells",
       attrs={"off_lora_act": lambda v: v - 256}, **_FEW),
    # ---- the launch before it ----
    _m("decode: shares of LoRA-down eight bytes short", "protocol", FEW_FUSED,
       "RaceError UninitializedError ProtocolError DeadlockError",
       (DECODE_QUANT, "kFewSums<kWarps> * sizeof(float));",
        "kFewSums<kWarps> * sizeof(float) - 8);"),
       **_FEW_QUANT),
    _m("decode: shares before they are there", "protocol", FEW_FUSED,
       "RaceError UninitializedError ProtocolError",
       (DECODE_QUANT, "  watched_wait(args, RingName::kDecodeSums, arrived, 0);\n", ""), **_FEW_QUANT),
    _m("decode: shares to a peer that may not run", "protocol", FEW_FUSED,
       "RaceError ProtocolError",
       (DECODE_QUANT, "  cluster_wait();\n  // A thread adds", "  // A thread adds"), **_FEW_QUANT),
    _m("decode: barrier of the shares without a fence", "protocol", FEW_FUSED, "ProtocolError RaceError",
       (DECODE_QUANT, "        fence_mbarrier_init();\n", ""), **_FEW_QUANT),
    _m("decode: shares of the sums before every warp is done", "protocol", FEW_FUSED,
       "RaceError UninitializedError",
       (DECODE_QUANT, "  __syncthreads();\n  cluster_wait();\n", "  cluster_wait();\n"),
       **_FEW_QUANT),
    _m("decode: shares one after the other in every CTA", "layout", FEW_FUSED,
       "cells RaceError UninitializedError",
       (DECODE_QUANT, "smem.shares[(part << args.log_share) + (first", "smem.shares[(first"),
       **_FEW_QUANT),
    _m("decode: a unit past the end of K", "arithmetic", FEW_FUSED, "OutOfBoundsError cells",
       (DECODE_QUANT, "const int whole = args.k / kFewUnit;",
        "const int whole = args.k / kFewUnit + 1;"), **_FEW_QUANT),
    _m("decode: two CTAs write the same part of a token", "cells", FEW_LONG,
       "cells RaceError UninitializedError",
       (DECODE_QUANT, "return (i & (shares - 1)) == share;", "return (i & 1) == (share & 1);"),
       **_FEW_QUANT),
    _m("decode: nobody writes the last part of a token", "cells", FEW_LONG,
       "cells RaceError UninitializedError",
       (DECODE_QUANT, "return (i & (shares - 1)) == share;",
        "return (i & (shares - 1)) == share && i < shares - 1;"), **_FEW_QUANT),
)  # fmt: skip
