// Prefill GEMM for Hopper: Y[M, N] = scale(X[M, K] W[N, K]^T) + lora_act lora_up^T + bias.
//
// Persistent, warp-specialised: warpgroup 0 loads, warpgroups 1 and 2 each own 64 weight rows of a
// 128 x kTileM tile of Y^T and do not wait for each other, so one's epilogue runs under the other's
// MMAs; only int4 groups make them take turns, group by group. Weights are staged as raw 4-bit bytes and expanded in registers right before the MMA
// (sm90_expand.cuh). A cluster of two CTAs takes two neighbouring weight tiles of the same tokens;
// each loads half of the activations and multicasts it, which halves L2 traffic but no footprint.
// The low-rank branch streams through the same ring slots as 32-rank chunks after the K blocks.
//
// Shared memory per CTA (bytes), every offset and count given by the plan:
//   main ring   stages x (kTileM x 128 activations, then 128 x 64 weights); a low-rank chunk puts
//               kTileM x 64 (lora_act) and 128 x 64 (lora_up) in the same slot
//   store slab  2 warpgroups x kTileM x 128
//   token ring  2 x kTileM x 4; with scales per group in the slots instead, behind the weights
//   barriers    16 x (stages + 2)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "sm90_expand.cuh"
#include "sm90_paths.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_ptx.cuh"
#include "sm90_row_inputs.cuh"
#include "sm90_wgmma.cuh"
#include "tile_order.cuh"

namespace jax_w4a4::sm90 {

constexpr int kTileN = 128;
constexpr int kRowBytes = 128;           // activation bytes per token and stage
constexpr int kLoraRanks = 32;           // ranks per low-rank chunk
constexpr int kLoraRowBytes = 64;        // kLoraRanks bf16
constexpr int kTokenStages = 2;
constexpr int kConsumerWarps = 8;
constexpr int kGemmThreads = 384;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

struct GemmV2Args : Watched {
  CUtensorMap weight;        // packed (N, K/2) bytes, box 64 x 128, no swizzle
  CUtensorMap act[2];        // (M, K128) bytes, box 128 x half of the tile, 128-byte swizzle
  CUtensorMap lora_up;       // (N, R) bf16, box 32 x 128, 64-byte swizzle
  CUtensorMap lora_act[2];   // (M, R) bf16, box 32 x half of the tile, 64-byte swizzle
  CUtensorMap out;           // (M, N) bf16, box 64 x tile, 128-byte swizzle
  const uint8_t* weight_scales;  // (N, scale_blocks)
  const float* token_scale;      // (M rounded up to the tile), or so many for each group
  const RowInputs* rows;         // (N)
  __nv_bfloat16* y;
  int m, n;
  int k_blocks;      // stages of K per tile
  int scale_blocks;  // block scales per weight row
  int64_t token_pitch;  // kStageGroups > 0: from one group's token scales to the next
  // Int4 with block scales only.
  int group_shift;      // log2 of the K elements of a block, Int4Scaled
  int scale_shift;      // log2 of the bytes of a weight scale
  int scale_left;       // bits to shift it left to make it fp32
  int scale_half;       // it is fp16
  int promote_stages;  // stages of K that are added up in the tensor core, kPromote only
  int lora_chunks;
  int m_tiles, n_tiles;  // n_tiles counts cluster-wide tiles: kCluster x 128 rows
  int group_m;           // m tiles that share one sweep over n
  int tma_store;         // 0: N * 2 is no multiple of 16, rows are stored by the threads
  // From the plan.
  int stages;
  int stage_bytes;
  int off_weight, off_lora_up;  // inside a stage; activations and lora_act start it
  int off_store, off_token, off_barriers;  // off_token inside a stage if kStageGroups > 0
};

struct Tile {
  int m0;
  int n0;
};

template <int kCluster>
__device__ __forceinline__ int cta_rank() {
  return kCluster == 1 ? 0 : static_cast<int>(cluster_rank());
}

// The tile of CTA `rank` of a cluster, which takes neighbouring weight tiles.
__device__ __forceinline__ Tile tile_at(const GemmV2Args& args, int index, int tile_m,
                                        int cluster_n, int rank) {
  const TileIndex tile = tile_index(index, args.m_tiles, args.n_tiles, args.group_m);
  return {tile.m * tile_m, tile.n * cluster_n + rank * kTileN};
}

// The part of a tile's tokens that CTA `rank` of a cluster loads, whole 8-row swizzle atoms.
template <int kTileM, int kCluster>
struct TokenHalf {
  static constexpr int kFirst = kCluster == 1 ? kTileM : (kTileM / 2 + 7) / 8 * 8;
  static __device__ __forceinline__ int begin(int rank) { return rank == 0 ? 0 : kFirst; }
};

// ---- roles ----

template <class Format, int kTileM, int kCluster>
__device__ __forceinline__ void load_token_box(const CUtensorMap* maps, uint32_t dst,
                                               uint32_t row_bytes, uint32_t barrier, int inner,
                                               int m0, int rank) {
  const int begin = TokenHalf<kTileM, kCluster>::begin(rank);
  if constexpr (kCluster == 1) {
    tma_load_2d(dst, &maps[0], barrier, inner, m0);
  } else {
    tma_load_2d_multicast(dst + begin * row_bytes, &maps[rank], barrier, inner, m0 + begin,
                          static_cast<uint16_t>((1 << kCluster) - 1));
  }
}

// Stages of a CTA's first tile whose weights, an argument of the program, are on their way before the launch
// before has ended (load_early in sm90_decode.cuh says why they may be). None, two, four and eight: 27.5, 27.2,
// 27.0 and 27.1 us a layer of 192 x 4096 x 14336, 24.15, 23.9, 23.9 and 24.1 of 512 x 4096 x 4096.
constexpr int kEarlyStages = 4;
// Where a group of K has a scale of its own ptxas spills what it then has no registers for.
template <class Format>
constexpr bool kEarly = Format::kStageGroups == 0;

// One thread per CTA feeds both rings for every tile of its cluster.
template <class Format, int kTileM, int kCluster>
__device__ __forceinline__ void load(const GemmV2Args& args, uint32_t smem, Ring main, Ring tokens,
                                     int cluster, int clusters, int rank) {
  constexpr uint32_t kBlockBytes = kTileM * kRowBytes + kTileN * Format::kWeightBytes +
                                   Format::kStageGroups * kTileM * 4;
  constexpr uint32_t kChunkBytes = kTileM * kLoraRowBytes + kTileN * kLoraRowBytes;
  RingState stage;
  RingState token;
  const int tiles = args.m_tiles * args.n_tiles;
  const int early = kEarly<Format> ? min(min(kEarlyStages, args.stages), args.k_blocks) : 0;
  if (kEarly<Format> && cluster < tiles) {
    const Tile tile = tile_at(args, cluster, kTileM, kCluster * kTileN, rank);
#pragma unroll 1
    for (int kb = 0; kb < early; ++kb) {
      mbarrier_arrive_expect_tx(main.full(kb), kBlockBytes);
      tma_load_2d(smem + kb * args.stage_bytes + args.off_weight, &args.weight, main.full(kb),
                  kb * Format::kWeightBytes, tile.n0);
    }
  }
  if constexpr (kEarly<Format>) grid_dependency_wait();
  for (int index = cluster; index < tiles; index += clusters) {
    const Tile tile = tile_at(args, index, kTileM, kCluster * kTileN, rank);

    if constexpr (Format::kTokenScale) {
      const uint32_t token_full = tokens.acquire(token, kTileM * 4);
      bulk_load(smem + args.off_token + token.slot * kTileM * 4, args.token_scale + tile.m0,
                kTileM * 4, token_full);
      tokens.advance(token);
    }

    for (int kb = 0; kb < args.k_blocks; ++kb) {
      const uint32_t slot = smem + stage.slot * args.stage_bytes;
      const uint32_t full = main.full(stage);
      if (index > cluster || kb >= early) {
        main.acquire(stage, kBlockBytes);
        tma_load_2d(slot + args.off_weight, &args.weight, full, kb * Format::kWeightBytes, tile.n0);
      }
      for (int g = 0; g < Format::kStageGroups; ++g) {
        const int group = min(kb * Format::kStageGroups + g, args.scale_blocks - 1);
        bulk_load(slot + args.off_token + g * kTileM * 4,
                  args.token_scale + static_cast<int64_t>(group) * args.token_pitch + tile.m0,
                  kTileM * 4, full);
      }
      load_token_box<Format, kTileM, kCluster>(args.act, slot, kRowBytes, full,
                                               kb * Format::kStageK, tile.m0, rank);
      main.advance(stage);
    }
    for (int chunk = 0; chunk < args.lora_chunks; ++chunk) {
      const uint32_t full = main.acquire(stage, kChunkBytes);
      const uint32_t slot = smem + stage.slot * args.stage_bytes;
      tma_load_2d(slot + args.off_lora_up, &args.lora_up, full, chunk * kLoraRanks, tile.n0);
      load_token_box<Format, kTileM, kCluster>(args.lora_act, slot, kLoraRowBytes, full,
                                               chunk * kLoraRanks, tile.m0, rank);
      main.advance(stage);
    }
  }
}

// What a thread knows about one of its two weight rows (g and g + 8) of a tile.
struct Row {
  RowInputs inputs;
  uint32_t scales;        // where in weight_scales this lane's bytes of the next stage are; int4: the
                          // row's first scale, counted in scales
  uint32_t scale;         // their value for the stage about to be expanded
  uint32_t next;          // and for the one after it, unless kPromote, which has no register left
};

// Reads a lane's scale bytes and steps to the next stage. Past the last scale the old value stays: the
// codes there are zero (the copy engine fills them in), so any scale will do.
template <class Format>
__device__ __forceinline__ void next_scale(const GemmV2Args& args, Row& row, uint32_t& bytes,
                                           bool inside) {
  if constexpr (Format::kStageScales == 8) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p ld.global.nc.u16 %0, [%1];\n"
        "}\n"
        : "+r"(bytes)
        : "l"(args.weight_scales + row.scales), "r"(static_cast<uint32_t>(inside)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %2, 0;\n"
        "@p ld.global.nc.u8 %0, [%1];\n"
        "}\n"
        : "+r"(bytes)
        : "l"(args.weight_scales + row.scales), "r"(static_cast<uint32_t>(inside)));
  }
  row.scales += Format::kStageScales;
}

// Volatile: loading them again is meant where they would stay in registers through the K loop.
__device__ __forceinline__ RowInputs load_row_inputs(const GemmV2Args& args, int row) {
  RowInputs v;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.scale_lo), "=f"(v.scale_hi), "=f"(v.bias), "=r"(v.base)
               : "l"(args.rows + min(row, args.n - 1)));  // rows past N are never stored
  return v;
}

// The bits of a row's scale of a group, which args.weight_scales holds as fp16, bf16 or fp32.
__device__ __forceinline__ uint32_t load_group_scale(const GemmV2Args& args, uint32_t index) {
  uint32_t bits;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.eq.s32 p, %2, 2;\n"
      "@p ld.global.nc.b32 %0, [%1];\n"
      "@!p ld.global.nc.u16 %0, [%1];\n"
      "}\n"
      : "=r"(bits)
      : "l"(args.weight_scales + (static_cast<uint64_t>(index) << args.scale_shift)),
        "r"(args.scale_shift));
  return bits;
}

// The same of a lane's values of a stage. Past K the last scale stands in: the codes there are zero.
template <class Format>
__device__ __forceinline__ uint32_t load_lane_scale(const GemmV2Args& args, const Row& row,
                                                    int stage, int q) {
  const int block = (stage * Format::kStageK + q * (Format::kStageK / 4)) >> args.group_shift;
  return load_group_scale(args, row.scales + min(block, args.scale_blocks - 1));
}

template <class Format>
__device__ __forceinline__ Row load_row(const GemmV2Args& args, int index, int q) {
  const int r = min(index, args.n - 1);
  Row row;
  row.inputs = load_row_inputs(args, index);
  const int first = q * Format::kStageScales / 4;
  row.scales = static_cast<uint32_t>(r) * args.scale_blocks + first;
  row.scale = 0;
  if constexpr (Format::kRuntimeBlock) {
    row.scale = load_lane_scale<Format>(args, row, 0, q);
    row.next = load_lane_scale<Format>(args, row, 1, q);
  } else if constexpr (Format::kStageScales > 0) {
    next_scale<Format>(args, row, row.scale, first < args.scale_blocks);
    if constexpr (!Format::kPromote) {
      row.next = 0;  // not row.scale, for which it would wait
      next_scale<Format>(args, row, row.next, first + Format::kStageScales < args.scale_blocks);
    }
  }
  return row;
}

// From stage `kb` to the next, and the scales of one more stage on their way: what is needed under the
// last MMA of a stage must have been asked for a whole stage before.
template <class Format>
__device__ __forceinline__ void next_scales(const GemmV2Args& args, Row (&rows)[2], int kb, int q) {
  if constexpr (Format::kRuntimeBlock) {
#pragma unroll
    for (Row& row : rows) {
      row.scale = row.next;
      row.next = load_lane_scale<Format>(args, row, kb + 2, q);
    }
  } else if constexpr (Format::kStageScales > 0) {
    constexpr int kAhead = Format::kPromote ? 1 : 2;
    const int first = q * Format::kStageScales / 4;
    const bool inside = (kb + kAhead) * Format::kStageScales < args.scale_blocks - first;
#pragma unroll
    for (Row& row : rows) {
      if constexpr (!Format::kPromote) row.scale = row.next;
      next_scale<Format>(args, row, Format::kPromote ? row.scale : row.next, inside);
    }
  }
}

template <class Format>
__device__ __forceinline__ typename Format::RowFold row_fold(const GemmV2Args& args,
                                                             const Row& row) {
  if constexpr (Format::kRuntimeBlock) {
    return {row.inputs.base, args.scale_left, args.scale_half != 0};
  } else {
    return typename Format::RowFold(row.inputs.base);
  }
}

// The K loop of one tile: expand, MMA, release. Leaves the last stage's MMAs in flight.
// Four fragment buffers and two MMAs in flight: a stage's MMAs are known to be complete one k-step
// into the next stage plus the wait, which is where its slot is released.
template <class Format, int kTileM, int kCluster>
__device__ __forceinline__ void mma(const GemmV2Args& args, uint32_t smem, const Ring& main,
                                    RingState& stage, float (&acc)[kTileM / 2], Row (&rows)[2],
                                    uint32_t thread_weight, int q, uint32_t lane) {
  uint32_t a[4][4];
  const auto fold0 = row_fold<Format>(args, rows[0]);
  const auto fold1 = row_fold<Format>(args, rows[1]);
  // What a block's scale becomes is worked out under the MMA before the one that needs it.
  auto block0 = fold0.template block<0>(rows[0].scale);
  auto block1 = fold1.template block<0>(rows[1].scale);
  int previous = 0;
  for (int kb = 0; kb < args.k_blocks; ++kb) {
    const uint32_t scale0 = rows[0].scale;
    const uint32_t scale1 = rows[1].scale;
    next_scales<Format>(args, rows, kb, q);

    main.wait_full(stage);
    const uint32_t slot = smem + stage.slot * args.stage_bytes;
    const uint32_t weight = slot + thread_weight;
    const auto packed0 = Format::load_packed(weight);
    const auto packed1 = Format::load_packed(weight + 8 * Format::kWeightBytes);
    const uint64_t act = matrix_descriptor<kRowBytes>(slot);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      Format::expand(packed0, s, block0, a[s][0], a[s][2]);
      Format::expand(packed1, s, block1, a[s][1], a[s][3]);
      wgmma_fence();
      // 32 bytes of K per step, in 16-byte descriptor units.
      using Accumulators = typename Format::Accumulator[kTileM / 2];
      Wgmma<kTileM>::template rs<Format::kMma>(reinterpret_cast<Accumulators&>(acc), a[s],
                                               act + 2 * s, s > 0 || kb > 0);
      wgmma_commit();
      if (s == 1 && Format::kLaneBlocks == 2) {
        block0 = fold0.template block<1>(scale0);
        block1 = fold1.template block<1>(scale1);
      } else if (s == 3) {
        block0 = fold0.template block<0>(rows[0].scale);
        block1 = fold1.template block<0>(rows[1].scale);
      }
      wgmma_wait<2>();
      if (s == 1) main.release<kCluster>(previous, lane, kb > 0);
    }
    previous = stage.slot;
    main.advance(stage);
  }
}

// The same a whole stage ahead, with up to so many tokens: one stage's MMAs run while the next stage's fragments
// are made, in registers of their own (us a layer without and with: 129 x 4096 x 14336 22.9 and 22.6, 512 x
// 4096 x 4096 24.3 and 24.0, 257 x 8192 x 8192 42.1 and 41.4). A stage is held longer, of which 256 tokens have
// four.
constexpr int kAheadTileM = 192;

template <class Format, int kTileM, int kCluster>
__device__ __forceinline__ void mma_ahead(const GemmV2Args& args, uint32_t smem, const Ring& main,
                                          RingState& stage, float (&acc)[kTileM / 2], Row (&rows)[2],
                                          uint32_t thread_weight, int q, uint32_t lane) {
  using Fragments = uint32_t[4][4];
  Fragments a[2];
  const auto fold0 = row_fold<Format>(args, rows[0]);
  const auto fold1 = row_fold<Format>(args, rows[1]);
  // The fragments of stage `kb`, at which the ring stands.
  const auto expand = [&](int kb, Fragments& to) {
    const uint32_t scale0 = rows[0].scale;
    const uint32_t scale1 = rows[1].scale;
    next_scales<Format>(args, rows, kb, q);
    main.wait_full(stage);
    const uint32_t weight = smem + stage.slot * args.stage_bytes + thread_weight;
    const auto packed0 = Format::load_packed(weight);
    const auto packed1 = Format::load_packed(weight + 8 * Format::kWeightBytes);
    auto block0 = fold0.template block<0>(scale0);
    auto block1 = fold1.template block<0>(scale1);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (s == 2 && Format::kLaneBlocks == 2) {
        block0 = fold0.template block<1>(scale0);
        block1 = fold1.template block<1>(scale1);
      }
      Format::expand(packed0, s, block0, to[s][0], to[s][2]);
      Format::expand(packed1, s, block1, to[s][1], to[s][3]);
    }
  };
  int previous = 0;
  const auto turn = [&](int kb, Fragments& now, Fragments& next) {
    const uint64_t act = matrix_descriptor<kRowBytes>(smem + stage.slot * args.stage_bytes);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      using Accumulators = typename Format::Accumulator[kTileM / 2];
      Wgmma<kTileM>::template rs<Format::kMma>(reinterpret_cast<Accumulators&>(acc), now[s],
                                               act + 2 * s, s > 0 || kb > 0);
    }
    wgmma_commit();
    const int slot = stage.slot;
    main.advance(stage);
    wgmma_wait<1>();
    main.release<kCluster>(previous, lane, kb > 0);
    previous = slot;
    if (kb + 1 < args.k_blocks) expand(kb + 1, next);
  };
  expand(0, a[0]);
  for (int kb = 0; kb < args.k_blocks; kb += 2) {
    turn(kb, a[0], a[1]);
    if (kb + 1 < args.k_blocks) turn(kb + 1, a[1], a[0]);
  }
}

// The same with promotion: every args.promote_stages stages the sums move on into fp32 registers that
// the tensor core does not shorten. Two fragment buffers, which is what the registers leave; all MMAs
// are complete at the end.
template <class Format, int kTileM, int kCluster>
__device__ __forceinline__ void mma_promoted(const GemmV2Args& args, uint32_t smem,
                                             const Ring& main, RingState& stage,
                                             float (&total)[kTileM / 2], Row (&rows)[2],
                                             uint32_t thread_weight, int q, uint32_t lane) {
  float acc[kTileM / 2];
  // acc too, though the first MMA of a group overwrites it: undefined registers count as live all
  // through the epilogue.
#pragma unroll
  for (int i = 0; i < kTileM / 2; ++i) total[i] = acc[i] = 0.0f;
  uint32_t a[2][4];
  const auto fold0 = row_fold<Format>(args, rows[0]);
  const auto fold1 = row_fold<Format>(args, rows[1]);
  int previous = 0;
  int kb = 0;
  do {
    int left = min(args.promote_stages, args.k_blocks - kb);
    int accumulate = 0;
    do {
      const auto block0 = fold0.template block<0>(rows[0].scale);
      const auto block1 = fold1.template block<0>(rows[1].scale);
      next_scales<Format>(args, rows, kb, q);

      main.wait_full(stage);
      const uint32_t slot = smem + stage.slot * args.stage_bytes;
      const uint32_t weight = slot + thread_weight;
      uint2 packed0, packed1;
      const uint64_t act = matrix_descriptor<kRowBytes>(slot);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        if (s % 2 == 0) {
          packed0 = load_shared_v2(weight + 4 * s);
          packed1 = load_shared_v2(weight + 8 * Format::kWeightBytes + 4 * s);
        }
        Format::expand_word(s % 2 == 0 ? packed0.x : packed0.y, block0, a[s % 2][0], a[s % 2][2]);
        Format::expand_word(s % 2 == 0 ? packed1.x : packed1.y, block1, a[s % 2][1], a[s % 2][3]);
        wgmma_fence();
        Wgmma<kTileM>::template rs<Format::kMma>(acc, a[s % 2], act + 2 * s, s > 0 || accumulate);
        wgmma_commit();
        wgmma_wait<1>();
        if (s == 0) main.release<kCluster>(previous, lane, kb > 0);
      }
      previous = stage.slot;
      main.advance(stage);
      accumulate = 1;
      ++kb;
    } while (--left > 0);
    wgmma_wait<0>();
    pin(acc);
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) total[i] += acc[i];
  } while (kb < args.k_blocks);
}

__device__ __forceinline__ float decode_group_scale(const GemmV2Args& args, uint32_t bits) {
  const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  const float other = __uint_as_float(bits << args.scale_left);
  float flushed;
  asm("mul.ftz.f32 %0, %1, 0f3F800000;" : "=f"(flushed) : "f"(args.scale_half ? half : other));
  return flushed;
}

// The warpgroups take turns to give a group's MMAs to the tensor core, so that one's fp32 work runs
// under the other's MMAs: left alone they stay in step and the tensor core idles meanwhile. Barrier
// kTurn + g is warpgroup g's turn; warpgroup 0 begins.
constexpr uint32_t kTurn = 3;
constexpr uint32_t kTurnThreads = 256;
__device__ __forceinline__ void await_turn(int group) {
  named_barrier_sync(kTurn + group, kTurnThreads);
}
__device__ __forceinline__ void pass_turn(int group) {
  named_barrier_arrive(kTurn + 1 - group, kTurnThreads);
}

// The K loop where every group of K has a scale of its own on both sides: the sums of a group are
// integers, exact on the FP8 MMA, and move on into fp32 times both scales. A slot holds the token
// scales of its groups. Everything is complete and released at the end.
template <class Format, int kTileM, int kCluster>
__device__ __forceinline__ void mma_grouped(const GemmV2Args& args, uint32_t smem, const Ring& main,
                                            RingState& stage, float (&total)[kTileM / 2],
                                            const Row (&rows)[2], uint32_t thread_weight, int q,
                                            uint32_t lane, int warpgroup) {
  constexpr int kGroups = Format::kStageGroups;
  float acc[kTileM / 2];
#pragma unroll
  for (int i = 0; i < kTileM / 2; ++i) total[i] = acc[i] = 0.0f;
  uint32_t a[2][4];
  const S4Tables tables;
  uint32_t bits[2][kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int group = min(g, args.scale_blocks - 1);  // codes past K are zero
    bits[0][g] = load_group_scale(args, rows[0].scales + group);
    bits[1][g] = load_group_scale(args, rows[1].scales + group);
  }
  int kb = 0;
  do {
    main.wait_full(stage);
    const uint32_t slot = smem + stage.slot * args.stage_bytes;
    const uint32_t weight = slot + thread_weight;
    const uint64_t act = matrix_descriptor<kRowBytes>(slot);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      constexpr int kSteps = 4 / kGroups;
      uint2 packed[2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int s = g * kSteps + i;
        if (s % 2 == 0) {
          packed[0] = load_shared_v2(weight + 16 * s);
          packed[1] = load_shared_v2(weight + 8 * Format::kWeightBytes + 16 * s);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          expand_s4_e4m3(s % 2 == 0 ? packed[r].x : packed[r].y, tables, a[s % 2][r],
                         a[s % 2][r + 2]);
        }
        if (i == 0) await_turn(warpgroup);
        wgmma_fence();
        Wgmma<kTileM>::template rs<Format::kMma>(acc, a[s % 2], act + 2 * s, i > 0);
        wgmma_commit();
        if (i + 1 < kSteps) wgmma_wait<1>();
      }
      pass_turn(warpgroup);
      const int next = min((kb + 1) * kGroups + g, args.scale_blocks - 1);
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = decode_group_scale(args, bits[r][g]);
        bits[r][g] = load_group_scale(args, rows[r].scales + next);
      }
      const uint32_t tokens = slot + args.off_token + g * kTileM * 4 + q * 8;
      wgmma_wait<0>();
      pin(acc);
#pragma unroll
      for (int j = 0; j < kTileM / 8; ++j) {
        const uint2 raw = load_shared_v2(tokens + 32 * j);
        const float token[2] = {__uint_as_float(raw.x), __uint_as_float(raw.y)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[4 * j + i] += acc[4 * j + i] * (scale[i / 2] * token[i % 2]);
        }
      }
    }
    __syncwarp();
    main.release<kCluster>(stage.slot, lane);
    main.advance(stage);
  } while (++kb < args.k_blocks);
}

// Scales the accumulators in place: floats from here on, to which the low-rank product is added.
template <class Format, int kTileM>
__device__ __forceinline__ void scale(float (&acc)[kTileM / 2], const Row (&rows)[2],
                                      uint32_t thread_tokens) {
#pragma unroll
  for (int j = 0; j < kTileM / 8; ++j) {
    float t[2] = {1.0f, 1.0f};
    if constexpr (Format::kTokenScale) {
      const uint2 raw = load_shared_v2(thread_tokens + 32 * j);
      t[0] = __uint_as_float(raw.x);
      t[1] = __uint_as_float(raw.y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      acc[4 * j + i] = Format::scaled(acc[4 * j + i], rows[i / 2].inputs, t[i % 2]);
    }
  }
}

template <int kTileM, int kCluster>
__device__ __forceinline__ void add_low_rank(const GemmV2Args& args, uint32_t smem,
                                             const Ring& main, RingState& stage,
                                             float (&acc)[kTileM / 2], int group, uint32_t lane) {
  int previous = 0;
  for (int chunk = 0; chunk < args.lora_chunks; ++chunk) {
    main.wait_full(stage);
    const uint32_t slot = smem + stage.slot * args.stage_bytes;
    const uint64_t up = matrix_descriptor<kLoraRowBytes>(slot + args.off_lora_up +
                                                         group * 64 * kLoraRowBytes);
    const uint64_t act = matrix_descriptor<kLoraRowBytes>(slot);
    wgmma_fence();
    Wgmma<kTileM>::ss_bf16(acc, up, act);
    Wgmma<kTileM>::ss_bf16(acc, up + 2, act + 2);
    wgmma_commit();
    wgmma_wait<1>();
    main.release<kCluster>(previous, lane, chunk > 0);
    previous = stage.slot;
    main.advance(stage);
  }
  wgmma_wait<0>();
  pin(acc);
  main.release<kCluster>(previous, lane, args.lora_chunks > 0);
}

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(v);
}

// Adds the bias, rounds to bf16 and transposes into the warpgroup's slab: token rows of 64 features,
// 128-byte swizzle. The slab is one whole tile deep: smaller ones cost more in waits than their space
// would buy in stages.
template <int kTileM>
__device__ __forceinline__ void write_slab(uint32_t slab, const float (&acc)[kTileM / 2],
                                           const Row (&rows)[2], int warp, uint32_t lane) {
  // Matrix i of a stmatrix: features 16 warp + 8 (i % 2), tokens 8 (j + i / 2); lane l addresses
  // token row l % 8 of matrix l / 8.
  const uint32_t token = lane % 8 + lane / 16 * 8;
  const uint32_t chunk = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  const uint32_t at = slab + token * 128 + chunk * 16;
  const float b0 = rows[0].inputs.bias;
  const float b1 = rows[1].inputs.bias;
#pragma unroll
  for (int j = 0; j < kTileM / 8; j += 2) {
    const uint32_t m0 = pack_bf16(acc[4 * j] + b0, acc[4 * j + 1] + b0);
    const uint32_t m1 = pack_bf16(acc[4 * j + 2] + b1, acc[4 * j + 3] + b1);
    if (j + 1 < kTileM / 8) {
      const uint32_t m2 = pack_bf16(acc[4 * j + 4] + b0, acc[4 * j + 5] + b0);
      const uint32_t m3 = pack_bf16(acc[4 * j + 6] + b1, acc[4 * j + 7] + b1);
      stmatrix_x4_trans(at + j * 8 * 128, m0, m1, m2, m3);
    } else {
      stmatrix_x2_trans(at + j * 8 * 128, m0, m1);
    }
  }
}

// Slab to rows of `pitch` features: one token row per warp and step, two features per lane, the first
// `n` of them.
__device__ __forceinline__ void store_rows(uint32_t slab, __nv_bfloat16* y, int pitch, int n,
                                           int rows, int warp, uint32_t lane) {
  const int feature = 2 * lane;
  for (int row = warp; row < rows; row += 4) {
    const uint32_t word =
        load_shared_u32(slab + row * 128 + ((lane / 4) ^ (row % 8)) * 16 + lane % 4 * 4);
    __nv_bfloat16* out = y + static_cast<int64_t>(row) * pitch + feature;
    if (feature < n) out[0] = __ushort_as_bfloat16(word & 0xFFFF);
    if (feature + 1 < n) out[1] = __ushort_as_bfloat16(word >> 16);
  }
}

// Through the slab to global memory.
template <int kTileM>
__device__ __forceinline__ void store(const GemmV2Args& args, uint32_t slab, Tile tile, int group,
                                      const float (&acc)[kTileM / 2], const Row (&rows)[2],
                                      int warp, uint32_t lane) {
  const bool issuer = warp == 0 && lane == 0;
  const uint32_t barrier = 1 + group;
  if (issuer) store_wait_read<0>();
  named_barrier_sync(barrier, 128);
  write_slab<kTileM>(slab, acc, rows, warp, lane);

  const int n0 = tile.n0 + group * 64;
  if (args.tma_store) {
    fence_async_proxy();
    named_barrier_sync(barrier, 128);
    if (issuer) {
      tma_store_2d(&args.out, slab, n0, tile.m0);
      store_commit();
    }
    return;
  }
  named_barrier_sync(barrier, 128);
  store_rows(slab, args.y + static_cast<int64_t>(tile.m0) * args.n + n0, args.n, args.n - n0,
             min(kTileM, args.m - tile.m0), warp, lane);
}

// Where a consumer thread stands.
struct Place {
  __device__ __forceinline__ Place() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    lane = thread % 32;
    warp = thread / 32 % 4;
    group = thread / 128 - 1;
    q = lane % 4;
    local_row = group * 64 + warp * 16 + lane / 4;
  }

  uint32_t lane;
  int warp, group;  // of the warpgroup, of the CTA
  int q;            // in the quad of lanes that share weight rows
  int local_row;    // the first of two weight rows, 8 apart
};

// A warpgroup computes 64 weight rows x kTileM tokens of every tile of its cluster.
template <class Format, int kTileM, int kCluster>
__device__ __forceinline__ void compute(const GemmV2Args& args, uint32_t smem, Ring main,
                                        Ring tokens, int cluster, int clusters) {
  Place place;
  uint32_t thread_weight = args.off_weight + place.local_row * Format::kWeightBytes +
                           place.q * Format::kLaneBytes;
  asm volatile("" : "+r"(thread_weight));  // or it is recomputed from threadIdx in every stage

  RingState stage;
  const int tiles = args.m_tiles * args.n_tiles;
  if (cluster >= tiles) return;
  Tile tile = tile_at(args, cluster, kTileM, kCluster * kTileN, cta_rank<kCluster>());
  Row next_rows[2] = {load_row<Format>(args, tile.n0 + place.local_row, place.q),
                      load_row<Format>(args, tile.n0 + place.local_row + 8, place.q)};
  if (Format::kStageGroups > 0 && place.group == 1) pass_turn(1);
  for (int round = 0;; ++round) {
    Row rows[2] = {next_rows[0], next_rows[1]};
    float acc[kTileM / 2];
    if constexpr (Format::kPromote) {
      mma_promoted<Format, kTileM, kCluster>(args, smem, main, stage, acc, rows, thread_weight,
                                             place.q, place.lane);
      // Two sets of accumulators leave few registers: what the K loop does not need comes anew.
      place = Place();
      tile = tile_at(args, cluster + round * clusters, kTileM, kCluster * kTileN,
                     cta_rank<kCluster>());
      rows[0].inputs = load_row_inputs(args, tile.n0 + place.local_row);
      rows[1].inputs = load_row_inputs(args, tile.n0 + place.local_row + 8);
    } else if constexpr (Format::kStageGroups > 0) {
      mma_grouped<Format, kTileM, kCluster>(args, smem, main, stage, acc, rows, thread_weight,
                                            place.q, place.lane, place.group);
      place = Place();
      tile = tile_at(args, cluster + round * clusters, kTileM, kCluster * kTileN,
                     cta_rank<kCluster>());
      rows[0].inputs = load_row_inputs(args, tile.n0 + place.local_row);
      rows[1].inputs = load_row_inputs(args, tile.n0 + place.local_row + 8);
    } else if constexpr (kTileM <= kAheadTileM) {
      mma_ahead<Format, kTileM, kCluster>(args, smem, main, stage, acc, rows, thread_weight, place.q,
                                          place.lane);
    } else {
      mma<Format, kTileM, kCluster>(args, smem, main, stage, acc, rows, thread_weight, place.q,
                                    place.lane);
    }
    const int q = place.q;
    const uint32_t lane = place.lane;

    // The next tile's row inputs come from L2: ask before the epilogue, use after it.
    const int next_index = cluster + (round + 1) * clusters;
    const bool more = next_index < tiles;
    Tile next_tile = tile;
    if (more) {
      next_tile = tile_at(args, next_index, kTileM, kCluster * kTileN, cta_rank<kCluster>());
      next_rows[0] = load_row<Format>(args, next_tile.n0 + place.local_row, q);
      next_rows[1] = load_row<Format>(args, next_tile.n0 + place.local_row + 8, q);
    }

    if constexpr (Format::kStageGroups == 0) {
      wgmma_wait<0>();
      pin(acc);
      main.release<kCluster>((stage.slot == 0 ? args.stages : stage.slot) - 1, lane);
    }

    // Where RingState would be after `round` steps, without registers of its own.
    RingState token;
    token.slot = round % kTokenStages;
    token.phase = round / kTokenStages % 2;
    if constexpr (Format::kTokenScale) {
      tokens.wait_full(token);
    }
    scale<Format, kTileM>(acc, rows, smem + args.off_token + token.slot * kTileM * 4 + q * 8);
    if constexpr (Format::kTokenScale) {
      __syncwarp();
      tokens.release<1>(token.slot, lane);
    }
    add_low_rank<kTileM, kCluster>(args, smem, main, stage, acc, place.group, lane);
    store<kTileM>(args, smem + args.off_store + place.group * kTileM * 128, tile, place.group, acc,
                  rows, place.warp, lane);

    if (!more) break;
    tile = next_tile;
  }
  if (Format::kStageGroups > 0 && place.group == 0) await_turn(0);  // the last one passed
  // The slab must outlive the copy engine's reads.
  if (place.warp == 0 && place.lane == 0) store_wait_read<0>();
}

template <class Format, int kTileM, int kCluster>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_v2_kernel(const __grid_constant__ GemmV2Args args) {
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  const int rank = cta_rank<kCluster>();
  const int cluster = blockIdx.x / kCluster;
  const int clusters = gridDim.x / kCluster;
  const Ring main(smem + args.off_barriers, args.stages, watch(args, RingName::kGemmMain));
  const Ring tokens(smem + args.off_barriers + 16 * args.stages, kTokenStages,
                    watch(args, RingName::kGemmTokens));

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.weight);
    prefetch_tensor_map(&args.act[rank]);
    if (args.tma_store) prefetch_tensor_map(&args.out);
    main.init(kConsumerWarps * kCluster);
    tokens.init(kConsumerWarps);
    fence_mbarrier_init();
  }
  // The peer's copies and arrivals may reach this CTA as soon as the peer passes this point.
  if constexpr (kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  if constexpr (!kEarly<Format>) grid_dependency_wait();

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      load<Format, kTileM, kCluster>(args, smem, main, tokens, cluster, clusters, rank);
    }
    __syncwarp();
  } else {
    if constexpr (kEarly<Format>) grid_dependency_wait();
    claim_registers<kConsumerRegisters>();
    compute<Format, kTileM, kCluster>(args, smem, main, tokens, cluster, clusters);
    __syncwarp();
  }
  // The peer still arrives on this CTA's barriers until its last release.
  if constexpr (kCluster > 1) cluster_sync();
}

}  // namespace jax_w4a4::sm90
