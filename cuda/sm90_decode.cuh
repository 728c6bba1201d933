// Decode GEMM for Hopper: Y[M, N] = scale(X[M, K] W[N, K]^T) + lora_act lora_up^T + bias for M up to 512,
// bound by reading W. One CTA per SM takes 8 to 128 weight rows, all tokens, or of more than 128 a tile of
// that many, and all of K; the number of rows makes about as many CTAs as there are SMs. Where N is too
// small for that a cluster of two CTAs shares the rows and divides K. The CTAs of a weight tile have
// numbers beside each other, so that they run at the same time: one reads its weights from memory, the
// others from L2.
//
// Roles in a CTA of 20 warps, or of 12 with 128 tokens:
//   multiply  four warpgroups, or two, that divide K (and 65 rows or more) among them. Each
//             expands its 4-bit weights in registers (sm90_expand.cuh) and adds up Y^T = W X^T; the
//             sums meet in shared memory and are added in the order of the warpgroups. With 128 tokens
//             and more than 64 rows each has all of K: sums stay in registers (kAlone).
//   load      one thread of the warp behind them fetches the block scales and streams weights and
//             activations through a ring. Scales and the first weights, arguments of the program, are on
//             their way before the launch before has ended.
//   add       the last three warps work out the low-rank product meanwhile, on mma.sync, from L2; or leave
//             lora_act in shared memory for warps that do so with their own rows at the end.
// With many tokens the first CTAs may do LoRA-down instead (sm90_decode_down.cuh), for which the add warps
// of the others wait: x need not wait for it.
//
// Shared memory per CTA, every offset and count given by the plan:
//   main ring    stages x (boxes x tile_n x 128 weights, then records x kTokens x 128 activations)
//   partial sums k groups x kTokens x kRows fp32 in chunks, over the ring once it is through; none where a
//                warpgroup has all of K
//   scales       block scales of the CTA's rows: boxes of 128 bytes x tile_n, 128-byte swizzle. All of them,
//                or two, which the boxes take in turn; then all are looked through ahead of the loop, those
//                past two in the ring's last stage
//   rows         tile_n RowInputs
//   tokens       kTokens fp32 scales
//   addend       kTokens x kRows fp32 in chunks, the low-rank product; with two CTAs of the tokens that
//                this one finishes, and in the place of the others what the peer has of this one's.
//                Where a warpgroup has all of K (kAlone): with two CTAs what the peer has of the half
//                that this one finishes, then kTokens x 32 ranks of lora_act
//   barriers     16 x stages, and 8 each for the scales, the last stage's scales and the peer's sums
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "mma.cuh"
#include "sm90_decode.h"
#include "sm90_decode_down.cuh"
#include "sm90_paths.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_ptx.cuh"
#include "sm90_row_inputs.cuh"
#include "sm90_wgmma.cuh"

namespace jax_w4a4::sm90 {

constexpr int kBoxBytes = 128;  // of a row of weights or a token in one box
constexpr int kAddWarps = 3;
constexpr int kAddThreads = 32 * kAddWarps;
// Two warpgroups with more than 64 tokens: the sums of four would leave no registers for weights.
template <int kTokens>
constexpr int kThreads = DecodeThreads(kTokens);
template <int kTokens>
constexpr int kMultiplyWarps = kThreads<kTokens> / 32 - 1 - kAddWarps;
template <int kTokens>
constexpr int kMultiplyThreads = 32 * kMultiplyWarps<kTokens>;
template <int kTokens>
constexpr int kLoadWarp = kMultiplyWarps<kTokens>;
// Named barriers.
constexpr uint32_t kMultiplyBarrier = 1;  // the multiply warps
constexpr uint32_t kSumBarrier = 2;       // they wait for the add warps as well

struct DecodeArgs : Watched {
  CUtensorMap weight;  // packed (N, K/2) bytes, box 128 x tile_n, 128-byte swizzle
  CUtensorMap act;     // (pieces of 128 bytes of K, M, 128), box of a stage, 128-byte swizzle
  CUtensorMap scales;  // (N, blocks) bytes, box 128 x tile_n, 128-byte swizzle; with scale_map
  RowInputsArgs rows;
  const float* token_scale;
  const __nv_bfloat16* lora_act;
  const __nv_bfloat16* lora_up;
  __nv_bfloat16* y;
  int m, n;
  int steps;   // stages of K
  int splits;  // CTAs of a cluster, which divide them
  int rank;    // a multiple of 16
  int tile_n;  // weight rows, a multiple of 8
  // From the plan.
  int stages, stage_bytes;
  int scale_boxes;  // of a CTA
  int scale_slots;  // how many there is room for
  bool scale_map;  // block scales come by the copy engine
  int off_act;  // inside a stage
  int off_scales, off_rows, off_tokens, off_partial, off_addend, off_barriers;
  DownAheadArgs down;
  int early_ctas;  // that begin before the launch before has ended
  int token_tiles;  // of kTokens
};

// The work of a CTA.
struct Share {
  int n0;                  // first weight row
  int rank;                // in the cluster
  int first_step, steps;   // stages of K
  int m0;                  // first token, where there may be several tiles of them
};

template <int kTokens>
constexpr bool kMayBeSeveral = DecodeMostTokens(kTokens) > kTokens;  // tiles of tokens

template <int kTokens>
__device__ __forceinline__ Share share_of(const DecodeArgs& args) {
  const int cta = blockIdx.x - args.down.ctas;
  Share share = {cta * args.tile_n, 0, 0, args.steps};
  if (args.splits > 1) {
    share.rank = static_cast<int>(cluster_rank());
    share.n0 = cta / args.splits * args.tile_n;
    const int each = (args.steps + args.splits - 1) / args.splits;
    share.first_step = share.rank * each;
    share.steps = min(each, args.steps - share.first_step);
  }
  if constexpr (kMayBeSeveral<kTokens>) {
    if (args.token_tiles > 1) {
      const int tile = cta / args.splits;
      share.n0 = tile / args.token_tiles * args.tile_n;
      share.m0 = tile % args.token_tiles * kTokens;
    }
  }
  return share;
}

// The number among all of a token of the tile. Where there is one tile that is no sum: the kernels for few
// tokens have what they had before there were several.
template <int kTokens>
__device__ __forceinline__ int number_of(const Share& share, int token) {
  if constexpr (kMayBeSeveral<kTokens>) return share.m0 + token;
  return token;
}

// Whether this CTA finishes a token: all of them, or half.
template <int kTokens>
__device__ __forceinline__ bool finishes(const DecodeArgs& args, const Share& share, uint32_t token) {
  return args.splits == 1 || token / (kTokens / 2) == static_cast<uint32_t>(share.rank);
}

// kRows and the division of the work; see DecodeShape.
template <class Path, int kTokens, int kMostRows>
struct Division {
  static constexpr DecodeShape kShape = DecodeShapeOf(kTokens, kMostRows);
  static constexpr int kRows = kShape.rows;
  static constexpr int kGroups = kShape.k_groups;
  static constexpr int kBoxes = kShape.boxes;
  static constexpr int kBlocks = kMultiplyWarps<kTokens> / 4 / kGroups;  // warpgroups along the rows
  static constexpr int kHalves = kRows == 32 ? 1 : 2;  // rows of the MMA that a thread serves
  static constexpr int kStageK = kBoxes * kDecodeBoxK;
  // A warpgroup has all of K, and its sums never leave its registers: 128 rows of 128 tokens would take 64 KB,
  // and as much the low-rank product, which is now made of what the add warps left of lora_act. Four
  // stages fit in where it was two or three.
  static constexpr bool kAlone = kGroups == 1;
  // Of K per warpgroup and stage: what one fragment's worth of a path covers, Path::kStageK.
  static constexpr int kRecords = kStageK / kGroups / Path::kStageK;
  static constexpr int kBoxRecords = kDecodeBoxK / Path::kStageK;
  static constexpr int kScaleBytes = kGroups * kRecords * Path::kStageScales;  // of a row and stage
  // A chunk is what a lane has of a sum: two tokens and kHalves rows. A unit is a warp's chunks of eight
  // tokens, and the tile's units are in the order of their rows, then of their tokens.
  static constexpr int kChunk = 2 * kHalves;            // fp32
  static constexpr int kUnitRows = 8 * kHalves;
  static constexpr int kRowUnits = kRows / kUnitRows;
  static_assert(kRows == kMostRows && kRecords * Path::kStageK * kGroups == kStageK);
};

// The row in its warp's unit that a lane serves; with two halves the next one as well. Of eight lanes that
// read 16 bytes of shared memory each, four take a row in the lower half of the swizzle pattern and four one
// in the upper.
template <int kHalves>
__device__ __forceinline__ int lane_row(int lane) {
  const int upper = lane / 4 % 2 * 4;
  return kHalves == 1 ? upper + lane / 8 : upper + lane / 8 % 2 * 2 + lane / 16 * 8;
}

// Bytes from the start of a sum of the tile to a lane's chunk of a unit.
template <class D, int kTokens>
__device__ __forceinline__ uint32_t chunk_place(int row_unit, int token_unit, int lane) {
  return ((row_unit * (kTokens / 8) + token_unit) * 32 + lane) * (4 * D::kChunk);
}

// ---- load ----

__device__ __forceinline__ uint32_t scale_barrier(const DecodeArgs& args, uint32_t smem) {
  return smem + args.off_barriers + 16 * args.stages;
}
// Complete once the scales in the ring's last stage have been looked through.
__device__ __forceinline__ uint32_t seen_barrier(const DecodeArgs& args, uint32_t smem) {
  return scale_barrier(args, smem) + 8;
}
__device__ __forceinline__ uint32_t sum_barrier(const DecodeArgs& args, uint32_t smem) {
  return scale_barrier(args, smem) + 16;
}

// Whether block scales take their places in turn.
__device__ __forceinline__ bool in_turn(const DecodeArgs& args) {
  return args.scale_boxes > args.scale_slots;
}
// And whether those past the first lie in the ring's last stage until all have been looked through.
__device__ __forceinline__ bool in_last_stage(const DecodeArgs& args) {
  return in_turn(args) && args.rows.scale_range == nullptr;
}

// Where a box of block scales lies while all are looked through.
__device__ __forceinline__ uint32_t scale_box(const DecodeArgs& args, uint32_t smem, int box) {
  const bool in_ring = box >= args.scale_slots;
  return smem + (in_ring ? (args.stages - 1) * args.stage_bytes : args.off_scales) +
         (in_ring ? box - args.scale_slots : box) * args.tile_n * kDecodeScaleBox;
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_weights(const DecodeArgs& args, uint32_t slot, uint32_t full,
                                             int step, int n0) {
  using D = Division<Path, kTokens, kRows>;
#pragma unroll
  for (int box = 0; box < D::kBoxes; ++box) {
    tma_load_2d(slot + box * args.tile_n * kBoxBytes, &args.weight, full,
                (step * D::kBoxes + box) * kBoxBytes, n0);
  }
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_activations(const DecodeArgs& args, uint32_t slot,
                                                 uint32_t full, int step, int m0) {
  using D = Division<Path, kTokens, kRows>;
  tma_load_3d(slot + args.off_act, &args.act, full, 0, m0, step * D::kGroups * D::kRecords);
}

// The CTA's share of its rows' block scales.
struct ScaleShare {
  int first;   // block of the matrix
  int blocks;  // of a row of the matrix from there on
  int bytes;   // that the CTA uses, zeros past `blocks`
};

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ ScaleShare scale_share(const DecodeArgs& args, const Share& share) {
  constexpr int kStepBytes = Division<Path, kTokens, kRows>::kScaleBytes;
  const int first = share.first_step * kStepBytes;
  return {first, args.rows.scale_blocks - first, share.steps * kStepBytes};
}

// Whether LoRA-down may be in this launch, and whether it is.
template <int kTokens>
constexpr bool kMayBeAhead = kTokens >= kDownAheadLeastTileM;
template <int kTokens>
constexpr int kAheadTokens = DownAheadTokens(kTokens, kTokens);  // of one tile

template <int kTokens>
__device__ __forceinline__ bool down_is_ahead(const DecodeArgs& args) {
  return kMayBeAhead<kTokens> && args.down.ctas > 0;
}

// Stages of weights that are asked for at once, and how many by the time that the block scales are there.
// What the launch before reads stands in the same queues: with all stages asked for at once its product came
// 1 to 1.5 us later, and with K above 4096 it takes so long that memory would stand still without the second
// batch (us of both launches with 1 or 2, 4 and 6 stages in it, MXFP4, M = 1 and 16: 4096x4096 7.2 7.8 7.8,
// 7.6 7.9 7.9; 14336x4096 13.4 12.7 13.1, 14.8 13.7 14.2; 16384x16384 39.6 38.8 38.9, 42.7 41.8 42.1).
template <int kTokens>
__device__ __forceinline__ int first_stages(const DecodeArgs& args, const Share& share) {
  int most = kTokens > 16 || share.steps >= 8 ? 2 : 1;
  if (down_is_ahead<kTokens>(args)) most = static_cast<int>(blockIdx.x) < args.early_ctas ? 4 : 1;
  return min(min(most, args.stages - in_last_stage(args)), share.steps);
}
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ int early_stages(const DecodeArgs& args, const Share& share) {
  if (args.steps * Division<Path, kTokens, kRows>::kStageK <= 4096 || down_is_ahead<kTokens>(args)) {
    return first_stages<kTokens>(args, share);
  }
  return min(min(4, args.stages - in_last_stage(args)), share.steps);
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ uint32_t stage_bytes(int tile_n) {
  using D = Division<Path, kTokens, kRows>;
  return D::kBoxes * tile_n * kBoxBytes + D::kGroups * D::kRecords * kTokens * kBoxBytes;
}

// The weights of stages into their slots, which nothing has been in.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_stages(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                            const Share& share, int begin, int end) {
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    mbarrier_arrive_expect_tx(ring.full(step), stage_bytes<Path, kTokens, kRows>(args.tile_n));
    load_weights<Path, kTokens, kRows>(args, smem + step * args.stage_bytes, ring.full(step),
                                       share.first_step + step, share.n0);
  }
}

// The boxes of block scales that come during the loop, from L2, each with the weights of a stage.
template <class Path, int kTokens, int kRows>
struct NextScales {
  // Stages that a box covers.
  static constexpr int kStages =
      Path::kStageScales > 0 ? kDecodeScaleBox / Division<Path, kTokens, kRows>::kScaleBytes : 1;
  int box, step;

  // The slot of a stage is free once the stage so many before is through, here the last of the box whose
  // place this one takes. The stage that it comes with is ahead of those that it covers, as the plan has no
  // more stages in the ring than a box covers.
  __device__ __forceinline__ explicit NextScales(const DecodeArgs& args)
      : box(args.scale_slots), step(kStages - 1 + args.stages) {}

  __device__ __forceinline__ bool come_with(const DecodeArgs& args, int step) const {
    return Path::kStageScales > 0 && box < args.scale_boxes && step == this->step;
  }

  __device__ __forceinline__ void load(const DecodeArgs& args, uint32_t smem, uint32_t full,
                                       const Share& share) {
    tma_load_2d(scale_box(args, smem, box % args.scale_slots), &args.scales, full,
                scale_share<Path, kTokens, kRows>(args, share).first + box * kDecodeScaleBox, share.n0);
    ++box;
    step += kStages;
  }
};

// Bytes of the peer's sums: units of the tokens that this CTA finishes.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ uint32_t peer_bytes(const DecodeArgs& args, const Share& share) {
  using D = Division<Path, kTokens, kRows>;
  constexpr int kHalf = kTokens / 2;
  const int row_units = (args.tile_n + D::kUnitRows - 1) / D::kUnitRows;
  const int tokens = min(max(args.m - number_of<kTokens>(share, share.rank * kHalf), 0), kHalf);
  const int token_pairs = kTokens == 8 ? kHalf / 2 : (tokens + 7) / 8 * 4;
  return row_units * token_pairs * (8 * 4 * D::kChunk);
}

// What need not wait for the launch before. The weights may be results of XLA operations before this
// call: those ended before the first kernel of this handler began, which is launched without the
// dependent attribute, and every kernel of the handler begins after that one. So only what the handler's
// own kernels write needs the wait.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_early(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                           const Share& share) {
  const uint32_t barrier = scale_barrier(args, smem);
  const int first_empty = first_stages<kTokens>(args, share);
  mbarrier_init(barrier, 1);
  ring.init_full(0, first_empty);
  fence_mbarrier_init();
  if (Path::kStageScales > 0 && args.scale_map) {
    // Nothing is multiplied before all of them are there.
    const uint32_t box_bytes = args.tile_n * kDecodeScaleBox;
    const int first = scale_share<Path, kTokens, kRows>(args, share).first;
    const int boxes = in_turn(args) && !in_last_stage(args) ? args.scale_slots : args.scale_boxes;
    mbarrier_arrive_expect_tx(barrier, boxes * box_bytes);
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      tma_load_2d(scale_box(args, smem, box), &args.scales, barrier, first + box * kDecodeScaleBox,
                  share.n0);
    }
  }
  load_stages<Path, kTokens, kRows>(args, smem, ring, share, 0, first_empty);
}

// Meanwhile, by a thread of another warp: what nothing is on its way to yet.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void init_barriers(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                              const Share& share) {
  prefetch_tensor_map(&args.act);
  ring.init_full(first_stages<kTokens>(args, share), args.stages);
  ring.init_empty(kMultiplyWarps<kTokens>);
  mbarrier_init(seen_barrier(args, smem), kMultiplyWarps<kTokens>);
  mbarrier_init(sum_barrier(args, smem), 1);
  fence_mbarrier_init();
  if (args.splits > 1) {
    mbarrier_arrive_expect_tx(sum_barrier(args, smem), peer_bytes<Path, kTokens, kRows>(args, share));
  }
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                     const Share& share) {
  const int early = early_stages<Path, kTokens, kRows>(args, share);
  const int first = first_stages<kTokens>(args, share);
  if (Path::kStageScales > 0 && args.scale_map && first < early) {
    watched_wait(args, RingName::kDecodeScales, scale_barrier(args, smem), 0);
  }
  load_stages<Path, kTokens, kRows>(args, smem, ring, share, first, early);
  RingState stage;
  grid_dependency_wait();
  NextScales<Path, kTokens, kRows> scales(args);
  for (int step = 0; step < share.steps; ++step) {
    const uint32_t slot = smem + stage.slot * args.stage_bytes;
    const uint32_t full = ring.full(stage);
    if (step >= early) {
      if (in_last_stage(args) && step == args.stages - 1) {
        watched_wait(args, RingName::kDecodeSeen, seen_barrier(args, smem), 0);
      }
      const bool brings_scales = scales.come_with(args, step);
      const uint32_t more = brings_scales ? args.tile_n * kDecodeScaleBox : 0;
      ring.acquire(stage, stage_bytes<Path, kTokens, kRows>(args.tile_n) + more);
      if (brings_scales) scales.load(args, smem, full, share);
      load_weights<Path, kTokens, kRows>(args, slot, full, share.first_step + step, share.n0);
    }
    load_activations<Path, kTokens, kRows>(args, slot, full, share.first_step + step,
                                             number_of<kTokens>(share, 0));
    ring.advance(stage);
  }
}

// ---- multiply ----

// A thread's pieces of kBytes of the rows' block scales: lanes beside each other take neighbours in a
// row, warps take whole rows.
template <int kBytes, int kWarps>
struct ScaleWalk {
  int log_lanes;  // lanes along a row
  int pieces;     // of a row
  int row, piece;

  __device__ __forceinline__ ScaleWalk(int bytes, int warp, int lane)
      : pieces((bytes + kBytes - 1) / kBytes) {
    log_lanes = min(5, 32 - __clz(pieces - 1));
    row = (warp << (5 - log_lanes)) + (lane >> log_lanes);
    piece = first(lane);
  }
  __device__ __forceinline__ int first(int lane) const { return lane & ((1 << log_lanes) - 1); }
  // The same for all lanes of a warp: whether one of them has a row.
  __device__ __forceinline__ bool more(int rows, int lane) const {
    return row - (lane >> log_lanes) < rows;
  }
  __device__ __forceinline__ void advance(int lane) {
    piece += 1 << log_lanes;
    // The same for all lanes of a row.
    if (piece - first(lane) >= pieces) {
      piece = first(lane);
      row += kWarps << (5 - log_lanes);
    }
  }
};

// Where 16 bytes of the block scales of a row lie.
__device__ __forceinline__ uint32_t scale_place(const DecodeArgs& args, uint32_t smem, int row,
                                                int piece) {
  return scale_box(args, smem, piece / 8) + row * kDecodeScaleBox + (piece % 8 ^ row % 8) * 16;
}

// Block scales of all rows where the copy engine can't fetch them, in pieces of kBytes.
template <int kBytes, int kWarps>
__device__ __forceinline__ void copy_scales(const DecodeArgs& args, const ScaleShare& share, int n0,
                                            uint32_t smem, int warp, int lane) {
  const int bytes = (share.bytes + 15) / 16 * 16;  // as find_extremes reads them
  for (ScaleWalk<kBytes, kWarps> at(bytes, warp, lane); at.more(args.tile_n, lane); at.advance(lane)) {
    if (at.row >= args.tile_n || at.piece >= at.pieces) continue;
    const int offset = at.piece * kBytes;
    const int row = min(n0 + at.row, args.n - 1);
    const uint8_t* from =
        args.rows.weight_scales + static_cast<int64_t>(row) * args.rows.scale_blocks + share.first;
    const uint32_t to = scale_place(args, smem, at.row, offset / 16) + offset % 16;
    const bool inside = offset < share.blocks;
    if constexpr (kBytes == 1) {
      store_shared_u8(to, inside ? __ldg(from + offset) : 0);
    } else {
      static_assert(kBytes == 4);
      copy_async_u32(to, from + (inside ? offset : 0), inside);
    }
  }
}

// The largest block scale of a row, and the least where that counts.
struct Extremes {
  int most, least;
};

// By the lanes of a row, this one being `lane` of kLanes; all of them get it.
template <Format kFormat, int kLanes>
__device__ __forceinline__ Extremes find_extremes(const DecodeArgs& args, const ScaleShare& share,
                                                  uint32_t smem, int row, int lane) {
  constexpr uint32_t kBytes = kScaleMask<kFormat> * 0x01010101u;
  const int bytes = min(share.bytes, share.blocks);  // that count
  uint32_t most = 0, least = 0xFFFFFFFF;
  for (int piece = lane; piece * 16 < bytes; piece += kLanes) {
    const uint4 raw = load_shared_v4(scale_place(args, smem, row, piece));
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (piece * 16 + 4 * i >= bytes) continue;
      const uint32_t word = words[i] & kBytes;
      most = larger_bytes(most, word);
      if (kFormat == Format::kMxfp4) least = smaller_bytes(least, word);
    }
  }
  // One number whose halves grow.
  const uint32_t lack = ~least;
  const uint32_t upper = prmt(most, lack, 0x7531);
  uint32_t found = __vmaxu2(upper & 0xFF00FF, upper >> 8 & 0xFF00FF);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    found = __vmaxu2(found, __shfl_xor_sync(0xFFFFFFFFu, found, step));
  }
  return {static_cast<int>(found & 0xFFFF), 0xFF - static_cast<int>(found >> 16)};
}

// RowInputs::base of a row of sm90_decode in shared memory: of mxfp4 the lower half, with whether one of
// the row's blocks flushes above it.
template <class Path>
constexpr bool kMayFlush = Path::kFormat == Format::kMxfp4;

template <class Path>
__device__ __forceinline__ int base_of(uint32_t word) {
  return kMayFlush<Path> ? static_cast<int16_t>(word) : static_cast<int>(word);
}

// Whether a block of the CTA's rows flushes: rarely, and a loop that need not ask is 4 % faster.
template <class Path>
__device__ __forceinline__ bool some_flush(const DecodeArgs& args, uint32_t smem, int lane) {
  if (!kMayFlush<Path>) return true;
  uint32_t flags = 0;
  for (int row = lane; row < args.tile_n; row += 32) {
    flags |= load_shared_u32(smem + args.off_rows + row * 16 + 12);
  }
  return __any_sync(0xFFFFFFFFu, flags >> 16 & 1);
}

// The row of the CTA that a multiply thread prepares. The lanes of a warp exchange what they find. With two
// per row a warp has 16 rows, of which tile_n, a multiple of 8, may leave half; those past the last repeat it.
template <int kTokens, int kRows>
struct OwnRow {
  static constexpr int kLanes = kMultiplyThreads<kTokens> / kRows;  // of a row
  int own, row;

  __device__ __forceinline__ OwnRow(const DecodeArgs& args, int thread)
      : own(thread / kLanes), row(kLanes >= 4 ? own : min(own, args.tile_n - 1)) {}
};

// What a multiply thread has asked for of its row before the mbarriers are known.
struct RowLoads {
  RowFactors factors;
  ScaleRange range;
};

template <class Path>
__device__ __forceinline__ bool is_ranged(const DecodeArgs& args) {
  return kMayFlush<Path> && args.rows.scale_range != nullptr;
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ RowLoads ask_for_rows(const DecodeArgs& args, uint32_t smem, const Share& share,
                                                 int warp, int lane) {
  RowLoads loads = {};
  if constexpr (Path::kStageScales > 0) {
    if (!args.scale_map && args.rows.scale_blocks % 4 == 0) {
      copy_scales<4, kMultiplyWarps<kTokens>>(args, scale_share<Path, kTokens, kRows>(args, share), share.n0,
                                              smem, warp, lane);
    }
    const int n = min(share.n0 + OwnRow<kTokens, kRows>(args, warp * 32 + lane).row, args.n - 1);
    loads.factors = row_factors(args.rows, n, 0);
    if (is_ranged<Path>(args)) loads.range = scale_range(args.rows, n);
  }
  return loads;
}

// What the multiply warps do while the launch before may still be running: block scales and RowInputs
// into shared memory.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void prepare_rows(const DecodeArgs& args, uint32_t smem, const Share& share,
                                             const RowLoads& loads, int warp, int lane) {
  const int n0 = share.n0;
  const int thread = warp * 32 + lane;
  const auto write = [&](int row, const RowInputs& v) {
    store_shared_v4(smem + args.off_rows + row * 16,
                    make_uint4(__float_as_uint(v.scale_lo), __float_as_uint(v.scale_hi),
                               __float_as_uint(v.bias), v.base));
  };
  if constexpr (Path::kStageScales == 0) {
    if (thread < args.tile_n) {
      write(thread, int4_row_inputs(args.rows, min(n0 + thread, args.n - 1)));
    }
  } else {
    using Own = OwnRow<kTokens, kRows>;
    const Own own(args, thread);
    const ScaleShare scales = scale_share<Path, kTokens, kRows>(args, share);
    if (args.scale_map) {
      // Else nothing here reads them.
      if (!is_ranged<Path>(args)) watched_wait(args, RingName::kDecodeScales, scale_barrier(args, smem), 0);
    } else {
      if (args.rows.scale_blocks % 4 != 0) {
        copy_scales<1, kMultiplyWarps<kTokens>>(args, scales, n0, smem, warp, lane);
      }
      wait_copies();
      named_barrier_sync(kMultiplyBarrier, kMultiplyThreads<kTokens>);
    }
    // The same for a whole warp.
    if (own.row < args.tile_n) {
      // With two CTAs each may have a base of its own for a row: their sums are scaled before they meet.
      const Extremes found = is_ranged<Path>(args)
                                 ? Extremes{loads.range.most(), loads.range.least()}
                                 : find_extremes<Path::kFormat, Own::kLanes>(args, scales, smem, own.row,
                                                                             thread % Own::kLanes);
      RowInputs v = row_inputs<Path::kFormat>(args.rows.rounded, loads.factors, found.most);
      if constexpr (kMayFlush<Path>) {
        const bool flushes = typename Path::RowFold(v.base).flushes(found.least);
        v.base = (v.base & 0xFFFF) | flushes << 16;
      }
      if (thread % Own::kLanes == 0 && (Own::kLanes >= 4 || own.own < args.tile_n)) write(own.row, v);
    }
    if (in_last_stage(args)) {
      __syncwarp();
      mbarrier_arrive_if(seen_barrier(args, smem), lane == 0);
    }
  }
  named_barrier_sync(kMultiplyBarrier, kMultiplyThreads<kTokens>);
}

// A lane's bytes of the block scales of one record.
template <class Path>
__device__ __forceinline__ uint32_t load_scale(uint32_t address) {
  if constexpr (Path::kStageScales == 8) return load_shared_u16(address);
  if constexpr (Path::kStageScales == 4) return load_shared_u8(address);
  return 0;
}

// What a fold makes of a block scale.
template <int kPart, bool kFlush, class Fold>
__device__ __forceinline__ auto table(const Fold& fold, uint32_t scale) {
  if constexpr (kFlush) {
    return fold.template block<kPart>(scale);
  } else {
    return fold.template block<kPart, false>(scale);
  }
}

// Whether a stage's codes and scales are read while the last MMAs of the stage before run. Its slot goes
// back only then, which with many tokens and few stages costs more than it saves (us of both launches
// without and with: 4096x14336 12.1 and 12.0 at M = 1, 12.8 and 12.5 at M = 16; 8192x8192, M = 16, 13.3
// and 13.0).
template <int kTokens>
constexpr bool kReadAhead = kTokens <= 16;

// How the MMAs of a record and the expansion of weights lie over each other: fragment by fragment, or with
// many tokens, where registers allow two sets of fragments, record by record. ptxas puts the fragments of a
// record in front of all its MMAs but one, where the tensor core then waits (us of gemm at M = 64: 4096x14336
// 15.3 and 14.6; 8192x8192 15.2 and 15.1). A stage is held until the next has come, which two in the ring
// don't bear (32 rows: 7.8 and 8.7 at 4096x4096); with two blocks in a lane's piece registers spill.
template <class Path, int kTokens, int kRows>
constexpr bool kWholeRecords = kTokens > 16 && kRows > 32 && Path::kLaneBlocks == 1;

// The sums of one warpgroup over all of K. A record is what Path::kStageK of K are to one MMA row block:
// four MMAs. What is expanded is ahead of them, and so are a stage's codes and scales.
template <class Path, int kTokens, int kRows, bool kFlush>
__device__ __forceinline__ void multiply(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                         int steps, float (&acc)[kTokens / 2], int group, int row_unit,
                                         int lane) {
  using D = Division<Path, kTokens, kRows>;
  using Fragments = uint32_t[4][4];
  const int q = lane % 4;
  // First record of this warpgroup in a stage.
  const int record = group * D::kRecords;
  const int chunk = record % D::kBoxRecords * (Path::kWeightBytes / 16) + q * Path::kLaneBytes / 16;
  const uint32_t box = smem + record / D::kBoxRecords * args.tile_n * kBoxBytes;
  uint32_t weight[D::kHalves], scales[D::kHalves];
  typename Path::RowFold fold[2] = {typename Path::RowFold(0), typename Path::RowFold(0)};
#pragma unroll
  for (int h = 0; h < D::kHalves; ++h) {
    int row = row_unit * D::kUnitRows + lane_row<D::kHalves>(lane) + h;
    const int g = row % 8;
    // Rows past the last eight repeat them; what they sum up is never read.
    row = min(row, args.tile_n - 8 + g);
    // The swizzle adds row % 8 to the number of 16 bytes.
    weight[h] = box + row * kBoxBytes + (chunk ^ g) * 16 + q * Path::kLaneBytes % 16;
    scales[h] = smem + args.off_scales + row * kDecodeScaleBox +
                (g * 16 ^ (record * Path::kStageScales + q * (Path::kStageScales / 4)));
    fold[h] = typename Path::RowFold(
        base_of<Path>(load_shared_u32(smem + args.off_rows + row * 16 + 12)));
    if constexpr (kMayFlush<Path>) fold[h].keep();
    // Opaque, or they are worked out anew for every stage.
    asm volatile("" : "+r"(weight[h]), "+r"(scales[h]));
  }
  const uint64_t act = matrix_descriptor<kBoxBytes>(smem + args.off_act + record * kTokens * kBoxBytes);

  // Rows that no thread serves are zero all along; opaque, or they are made anew under a running MMA.
  Fragments a[kWholeRecords<Path, kTokens, kRows> ? 2 : 1];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof a / 4); ++i) {
    asm volatile("mov.b32 %0, 0;" : "=r"(a[i / 16][i / 4 % 4][i % 4]));
  }
  RingState stage;
  uint32_t block_scale[D::kRecords][2];
  decltype(Path::load_packed(0)) packed[D::kRecords][2];
  const auto read_stage = [&](int step) {
    // The stage's scales: in which box, and where in it.
    const uint32_t scale = step * D::kScaleBytes;
    uint32_t place = scale / kDecodeScaleBox;
    if (kTokens > 16 && in_turn(args)) place %= 2;
    place *= args.tile_n * kDecodeScaleBox;
#pragma unroll
    for (int r = 0; r < D::kRecords; ++r) {
#pragma unroll
      for (int h = 0; h < D::kHalves; ++h) {
        block_scale[r][h] = load_scale<Path>((scales[h] ^ scale % kDecodeScaleBox) + place +
                                             r * Path::kStageScales);
      }
    }
    ring.wait_full(stage);
    const uint32_t slot = stage.slot * args.stage_bytes;
#pragma unroll
    for (int r = 0; r < D::kRecords; ++r) {
#pragma unroll
      for (int h = 0; h < D::kHalves; ++h) {
        packed[r][h] = Path::load_packed((weight[h] + slot) ^ (r * Path::kWeightBytes));
      }
    }
  };
  auto table0 = table<0, kFlush>(fold[0], 0);
  auto table1 = table0;
  const auto expand = [&](int r, int s, uint32_t (&to)[4]) {
    if (s == 0) {
      table0 = table<0, kFlush>(fold[0], block_scale[r][0]);
      table1 = table<0, kFlush>(fold[1], block_scale[r][D::kHalves - 1]);
    }
    if (s == 2 && Path::kLaneBlocks == 2) {
      table0 = table<1, kFlush>(fold[0], block_scale[r][0]);
      table1 = table<1, kFlush>(fold[1], block_scale[r][D::kHalves - 1]);
    }
    Path::expand(packed[r][0], s, table0, to[0], to[2]);
    if constexpr (D::kHalves == 2) Path::expand(packed[r][1], s, table1, to[1], to[3]);
  };
  const auto expand_record = [&](int r, Fragments& to) {
#pragma unroll
    for (int s = 0; s < 4; ++s) expand(r, s, to[s]);
  };
  const uint32_t stage_pieces = static_cast<uint32_t>(args.stage_bytes) / 16;
  const auto descriptor = [&](int r) {
    // Counts pieces of 16 bytes, and nothing carries into the upper half. Opaque, or each MMA's is worked
    // out by itself.
    uint64_t b;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(b)
        : "r"(static_cast<uint32_t>(act) + stage.slot * stage_pieces), "r"(static_cast<uint32_t>(act >> 32)));
    return b + r * kTokens * kBoxBytes / 16;
  };
  const auto mma = [&](int step, int r, int s, const uint32_t (&fragment)[4]) {
    using Accumulators = typename Path::Accumulator[kTokens / 2];
    const uint64_t b = descriptor(r);
    Wgmma<kTokens>::template rs<Path::kMma>(reinterpret_cast<Accumulators&>(acc), fragment, b + 2 * s,
                                            s > 0 || r > 0 || step > 0);
  };
  // Record r of a stage.
  const auto turn = [&](int step, int r, Fragments& now, Fragments& next) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) mma(step, r, s, now[s]);
    wgmma_commit();
    if (r + 1 < D::kRecords) {
      expand_record(r + 1, next);
      wgmma_wait<0>();
      return;
    }
    const int through = stage.slot;
    ring.advance(stage);
    if (step + 1 < steps) {
      read_stage(step + 1);
      expand_record(0, next);
    }
    wgmma_wait<0>();
    ring.release<1>(through, lane);
  };
  if (Path::kStageScales > 0 && args.scale_map) {
    watched_wait(args, RingName::kDecodeScales, scale_barrier(args, smem), 0);
  }
  read_stage(0);
  if constexpr (!kWholeRecords<Path, kTokens, kRows>) {
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int f = 0; f < 4 * D::kRecords; ++f) {
        expand(f / 4, f % 4, a[0][f % 4]);
        wgmma_fence();
        mma(step, f / 4, f % 4, a[0][f % 4]);
        wgmma_commit();
        // The next fragment's registers are free.
        if (f + 1 < 4 * D::kRecords) {
          wgmma_wait<3>();
          continue;
        }
        const int through = stage.slot;
        ring.advance(stage);
        if (kReadAhead<kTokens> && step + 1 < steps) read_stage(step + 1);
        wgmma_wait<0>();
        ring.release<1>(through, lane);
        if (!kReadAhead<kTokens> && step + 1 < steps) read_stage(step + 1);
      }
    }
  } else if constexpr (D::kRecords == 1) {
    // Two records a round, so that the sets of fragments are known.
    expand_record(0, a[0]);
    for (int step = 0; step < steps; step += 2) {
      turn(step, 0, a[0], a[1]);
      if (step + 1 < steps) turn(step + 1, 0, a[1], a[0]);
    }
  } else {
    static_assert(D::kRecords % 2 == 0);
    expand_record(0, a[0]);
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int r = 0; r < D::kRecords; ++r) turn(step, r, a[r % 2], a[(r + 1) % 2]);
    }
  }
  pin(acc);
}

// ---- sums ----

template <int kFloats>
__device__ __forceinline__ void store_chunk(uint32_t address, const float* v) {
  if constexpr (kFloats == 4) {
    store_shared_v4(address, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]),
                                        __float_as_uint(v[2]), __float_as_uint(v[3])));
  } else {
    store_shared_v2(address, v[0], v[1]);
  }
}

template <class T, int kCount>
__device__ __forceinline__ void load_chunk(uint32_t address, T (&v)[kCount]) {
  static_assert(sizeof(T) == 4 && (kCount == 4 || kCount == 2));
  if constexpr (kCount == 4) {
    const uint4 raw = load_shared_v4(address);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = reinterpret_cast<const T&>(words[i]);
  } else {
    const uint2 raw = load_shared_v2(address);
    v[0] = reinterpret_cast<const T&>(raw.x);
    v[1] = reinterpret_cast<const T&>(raw.y);
  }
}

// A warpgroup's sums to shared memory; rows past the last have room of their own.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void store_partial(const DecodeArgs& args, uint32_t smem,
                                              const float (&acc)[kTokens / 2], int group, int row_unit,
                                              int lane) {
  using D = Division<Path, kTokens, kRows>;
  const uint32_t sum = smem + args.off_partial + group * kTokens * kRows * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    store_chunk<D::kChunk>(sum + chunk_place<D, kTokens>(row_unit, j, lane), acc + 4 * j);
  }
}

// What the multiply warps do once all sums are in shared memory: a warp has the rows of one unit and every
// so many tokens, a lane a chunk at a time. Few instructions count, as all warps run them at once.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void finish(const DecodeArgs& args, const Share& share, uint32_t smem,
                                       int warp, int lane) {
  using D = Division<Path, kTokens, kRows>;
  using Sum = typename Path::Accumulator;
  constexpr int kTokenUnits = kTokens / 8;
  constexpr int kWarps = kMultiplyWarps<kTokens> / D::kRowUnits;  // that share the tokens
  // Opaque, or what follows from it is worked out ahead of the loop and spilled.
  asm volatile("" : "+r"(lane));
  const int row_unit = warp % D::kRowUnits;
  const int row = row_unit * D::kUnitRows + lane_row<D::kHalves>(lane);
  float scale_lo[D::kHalves], scale_hi[D::kHalves], bias[D::kHalves];
#pragma unroll
  for (int h = 0; h < D::kHalves; ++h) {
    const uint4 raw = load_shared_v4(smem + args.off_rows + min(row + h, args.tile_n - 1) * 16);
    scale_lo[h] = __uint_as_float(raw.x);
    scale_hi[h] = __uint_as_float(raw.y);
    bias[h] = __uint_as_float(raw.z);
  }
  // The first of the pair of rows that the lane stores.
  const int pair = row & ~1;
  const int n = share.n0 + pair;
  // The lane of an even row stores the first token of two, with one row per lane that of the next row the
  // second.
  const bool odd = D::kHalves == 1 && row % 2 == 1;
  const int first = lane % 4 * 2 + odd;  // of eight tokens
  const int tokens =  // of the tile from there on
      pair < args.tile_n && n < args.n ? args.m - number_of<kTokens>(share, first) : 0;
  const uint32_t pitch = 2u * args.n;
  uint8_t* const out = reinterpret_cast<uint8_t*>(args.y) + int64_t{2} * n +
                       static_cast<int64_t>(number_of<kTokens>(share, first)) * pitch;
  // The warpgroups' sums of a unit in their order, scaled.
  const auto load_sums = [&](int unit, float (&v)[D::kChunk]) {
    Sum sum[D::kChunk] = {};
#pragma unroll
    for (int group = 0; group < D::kGroups; ++group) {
      Sum part[D::kChunk];
      load_chunk(smem + args.off_partial + group * kTokens * kRows * 4 +
                     chunk_place<D, kTokens>(row_unit, unit, lane),
                 part);
#pragma unroll
      for (int j = 0; j < D::kChunk; ++j) sum[j] += part[j];
    }
    float token_scale[2] = {1.0f, 1.0f};
    if constexpr (Path::kTokenScale) {
      load_chunk(smem + args.off_tokens + (unit * 8 + lane % 4 * 2) * 4, token_scale);
    }
#pragma unroll
    for (int j = 0; j < D::kChunk; ++j) {
      const RowInputs inputs = {scale_lo[j / 2], scale_hi[j / 2], bias[j / 2], 0};
      v[j] = Path::scaled(reinterpret_cast<const float&>(sum[j]), inputs, token_scale[j % 2]);
    }
  };
  const auto add = [&](uint32_t place, float (&v)[D::kChunk]) {
    float addend[D::kChunk];
    load_chunk(smem + args.off_addend + place, addend);
#pragma unroll
    for (int j = 0; j < D::kChunk; ++j) v[j] += addend[j];
  };
  // `left`: tokens from the lane's first on.
  const auto store = [&](bool even, int unit, const float (&v)[D::kChunk], int left) {
    const auto store_pair = [&](uint8_t* to, float v0, float v1, bool inside) {
      // Packed ahead of the conditions, which are then the stores' alone and no branches.
      const __nv_bfloat162 y = __floats2bfloat162_rn(v0, v1);
      if (even) {
        if (inside) *reinterpret_cast<__nv_bfloat162*>(to) = y;
      } else {
        if (inside) *reinterpret_cast<__nv_bfloat16*>(to) = y.x;
        if (inside && n + 1 < args.n) *reinterpret_cast<__nv_bfloat16*>(to + 2) = y.y;
      }
    };
    uint8_t* to = out + static_cast<uint64_t>(unit * 8u) * pitch;
    if constexpr (D::kHalves == 2) {
      store_pair(to, v[0] + bias[0], v[2] + bias[1], left > 0);
      store_pair(to + pitch, v[1] + bias[0], v[3] + bias[1], left > 1);
    } else {
      const float own = (odd ? v[1] : v[0]) + bias[0];
      const float theirs = __shfl_xor_sync(0xFFFFFFFFu, (odd ? v[0] : v[1]) + bias[0], 8);
      store_pair(to, odd ? theirs : own, odd ? own : theirs, left > 0);
    }
  };
  constexpr int kUnits = (kTokenUnits + kWarps - 1) / kWarps;  // of a warp
  const auto place_of = [&](int unit) { return chunk_place<D, kTokens>(row_unit, unit, lane); };
  if (args.splits == 1) {
    if (row_unit * D::kUnitRows >= args.tile_n) return;
    // Without a branch from one unit to the next, or they wait for each other; what is made of units past M,
    // whatever it is, is not stored. 2 us otherwise at 128 tokens.
    const int in_tile = args.m - number_of<kTokens>(share, 0);
    const auto finish_units = [&](bool even, bool lora) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int unit = warp / D::kRowUnits + i * kWarps;
        if (kTokenUnits % kWarps != 0 && unit >= kTokenUnits) return;
        float v[D::kChunk];
        load_sums(unit, v);
        // The add warps leave out units past M.
        if (lora && unit * 8 < in_tile) add(place_of(unit), v);
        store(even, unit, v, tokens - unit * 8);
      }
    };
    if (args.n % 2 != 0) {
      finish_units(false, args.rank > 0);
    } else if (args.rank > 0) {
      finish_units(true, true);
    } else {
      finish_units(true, false);
    }
    return;
  }
  // What the peer waits for comes first. A unit's other is the one as far into the other half.
  const auto other_of = [](int unit) {
    return unit < kTokenUnits / 2 ? unit + kTokenUnits / 2 : unit - kTokenUnits / 2;
  };
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int turn = warp / D::kRowUnits + i * kWarps;
    if (kTokenUnits % kWarps != 0 && turn >= kTokenUnits) continue;
    const int unit = kTokenUnits > 1 && share.rank == 0 ? other_of(turn) : turn;
    if (number_of<kTokens>(share, unit * 8) >= args.m || row_unit * D::kUnitRows >= args.tile_n) continue;
    float v[D::kChunk];
    load_sums(unit, v);
    const bool mine = finishes<kTokens>(args, share, unit * 8 + lane % 4 * 2);
    // Where the other CTA has this chunk is the place of tokens that it does not finish.
    const uint32_t other = kTokenUnits > 1
                               ? place_of(other_of(unit))
                               : chunk_place<D, kTokens>(row_unit, unit, lane ^ 2);
    if (!mine) {
      store_cluster_async<D::kChunk>(smem + args.off_addend + other, sum_barrier(args, smem),
                                     1 - share.rank, v);
    }
    // Eight tokens of a tile of eight are of both CTAs.
    if (!__any_sync(0xFFFFFFFFu, mine)) continue;
    watched_wait(args, RingName::kDecodePeer, sum_barrier(args, smem), 0);
    if (mine) add(other, v);
    if (args.rank > 0) add(place_of(unit), v);
    store(args.n % 2 == 0, unit, v, mine ? tokens - unit * 8 : 0);
  }
  // The peer writes here: not before that is through may the CTA end.
  watched_wait(args, RingName::kDecodePeer, sum_barrier(args, smem), 0);
}

// ---- add ----

__device__ __forceinline__ uint4 load_ranks(const __nv_bfloat16* row, int rank, int ranks,
                                            bool inside) {
  if (!inside || rank >= ranks) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(row + rank);
}

// What a lane has of 16 rows of lora_up and 32 ranks, for two MMAs: eight ranks of two rows.
struct LoraUp {
  uint4 row[2];
};

template <class D>
__device__ __forceinline__ LoraUp load_lora_up(const DecodeArgs& args, const Share& share, int block,
                                               int rank, int lane) {
  constexpr int kNext = D::kHalves == 2 ? 1 : 8;  // from a lane's first row to its second
  const int row = share.n0 + block * 16 + lane_row<D::kHalves>(lane);
  const __nv_bfloat16* up = args.lora_up + static_cast<int64_t>(row) * args.rank;
  return {{load_ranks(up, rank, args.rank, row < args.n),
           load_ranks(up + kNext * args.rank, rank, args.rank, row + kNext < args.n)}};
}

// lora_up of the CTA's rows to L2 by the add warps, a line at a time.
__device__ __forceinline__ void prefetch_lora_up(const DecodeArgs& args, const Share& share, int thread) {
  const int64_t rows = min(args.tile_n, args.n - share.n0);
  const char* from = reinterpret_cast<const char*>(args.lora_up) + int64_t{2} * share.n0 * args.rank;
  for (int64_t at = 128 * thread; at < 2 * rows * args.rank; at += 128 * kAddThreads) {
    prefetch_l2(from + at);
  }
}

__device__ __forceinline__ void multiply_ranks(float (&acc)[4], const LoraUp& up, const uint4& act) {
  MmaBf16(acc, {up.row[0].x, up.row[1].x, up.row[0].y, up.row[1].y}, act.x, act.y);
  MmaBf16(acc, {up.row[0].z, up.row[1].z, up.row[0].w, up.row[1].w}, act.z, act.w);
}

__device__ __forceinline__ uint4 load_lora_act(const DecodeArgs& args, int token, int rank) {
  if (token >= args.m || rank >= args.rank) return make_uint4(0, 0, 0, 0);
  return load_relaxed_v4(args.lora_act + token * args.rank + rank);
}

// One word of the tile's lora_act until it is there, and only then all: the lanes of all CTAs would be in
// each other's way.
template <int kTokens>
__device__ __forceinline__ void await_lora_act(const DecodeArgs& args, const Share& share) {
  watched_look(args, RingName::kDecodeLoraAct, [&] {
    return load_relaxed_u32(args.lora_act + number_of<kTokens>(share, 0) * args.rank) != kNotYet;
  });
}

// How the add warps share the low-rank product: blocks of 16 rows, or with many tokens units of eight of
// them. What is read of one side then stays in registers for all of a warp's share of the other.
template <class D, int kTokens>
struct LowRank {
  static constexpr int kBlocks = D::kRows / 16;
  static constexpr int kUnits = kTokens / 8;
  static constexpr bool kByUnits = kTokens > 16;
  static constexpr int kOwnBlocks = kByUnits ? kBlocks : (kBlocks + kAddWarps - 1) / kAddWarps;
  static constexpr int kOwnUnits = kByUnits ? (kUnits + kAddWarps - 1) / kAddWarps : kUnits;
  static constexpr int kHeld = kOwnBlocks < 4 ? kOwnBlocks : 4;  // blocks whose ranks are in registers
  static_assert(kOwnBlocks % kHeld == 0);
  using Up = LoraUp[kHeld];

  static __device__ __forceinline__ int block(int warp, int i) { return kByUnits ? i : warp + i * kAddWarps; }
  static __device__ __forceinline__ int unit(int warp, int i) { return kByUnits ? warp + i * kAddWarps : i; }

  static __device__ __forceinline__ void load(const DecodeArgs& args, const Share& share, int first,
                                              int warp, int lane, Up& up) {
#pragma unroll
    for (int b = 0; b < kHeld; ++b) {
      up[b] = load_lora_up<D>(args, share, block(warp, first + b), lane % 4 * 8, lane);
    }
  }
};

// The low-rank product of the tile. A lane reads eight ranks of a row at once and calls the first two pairs
// k 2q, 2q + 1, 2q + 8, 2q + 9 of one MMA, the others those of the next, on both sides. `up`: the warp's first
// rows of lora_up.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void add_low_rank(
    const DecodeArgs& args, uint32_t smem, const Share& share, int warp, int lane,
    typename LowRank<Division<Path, kTokens, kRows>, kTokens>::Up& up) {
  using D = Division<Path, kTokens, kRows>;
  using L = LowRank<D, kTokens>;
  const int q = lane % 4;
  uint4 act[L::kOwnUnits];
  const auto token_of = [&](int i) {
    return number_of<kTokens>(share, L::unit(warp, i) * 8 + lane / 4);
  };
  const auto look = [&] {
    bool there = true;
#pragma unroll
    for (int i = 0; i < L::kOwnUnits; ++i) act[i] = load_lora_act(args, token_of(i), 8 * q);
#pragma unroll
    for (int i = 0; i < L::kOwnUnits; ++i) there = there && is_there(act[i]);
    return static_cast<bool>(__all_sync(0xFFFFFFFFu, there));
  };
  if (down_is_ahead<kTokens>(args)) {
    await_lora_act<kTokens>(args, share);
    watched_look(args, RingName::kDecodeLoraAct, look);
  } else {
    look();
  }
  const auto skips = [&](int unit) {
    return (L::kByUnits && unit >= L::kUnits) || number_of<kTokens>(share, unit * 8) >= args.m ||
           (L::kUnits > 1 && !finishes<kTokens>(args, share, unit * 8));
  };
  const auto place = [&](int block, int unit, int h) {
    return smem + args.off_addend +
           chunk_place<D, kTokens>(block * 4 / D::kChunk + h, unit, lane);
  };
  // Eight tokens of a tile of eight are of both CTAs.
  const bool stores = L::kUnits > 1 || finishes<kTokens>(args, share, 2 * q);
#pragma unroll 1
  for (int first = 0; first < L::kOwnBlocks; first += L::kHeld) {
    if (first > 0) L::load(args, share, first, warp, lane, up);
#pragma unroll
    for (int i = 0; i < L::kOwnUnits; ++i) {
      const int unit = L::unit(warp, i);
      if (skips(unit)) continue;
#pragma unroll
      for (int b = 0; b < L::kHeld; ++b) {
        const int block = L::block(warp, first + b);
        float acc[4] = {};
        multiply_ranks(acc, up[b], act[i]);
        if (block * 16 >= args.tile_n || !stores) continue;
#pragma unroll
        for (int h = 0; h < 4 / D::kChunk; ++h) store_chunk<D::kChunk>(place(block, unit, h), acc + 2 * h);
      }
    }
  }
  // More ranks are rare: the sums come back from where they are, and nothing is unrolled.
#pragma unroll 1
  for (int rank = 32 + 8 * q; rank < args.rank + 8 * q; rank += 32) {
#pragma unroll 1
    for (int i = 0; i < L::kOwnUnits; ++i) {
      const int unit = L::unit(warp, i);
      if (skips(unit)) continue;
      const uint4 more_act = load_lora_act(args, token_of(i), rank);
#pragma unroll 1
      for (int b = 0; b < L::kOwnBlocks; ++b) {
        const int block = L::block(warp, b);
        if (block * 16 >= args.tile_n) break;
        const LoraUp more = load_lora_up<D>(args, share, block, rank, lane);
        float acc[4] = {};
        float(&chunks)[4 / D::kChunk][D::kChunk] = reinterpret_cast<float(&)[4 / D::kChunk][D::kChunk]>(acc);
#pragma unroll
        for (int h = 0; h < 4 / D::kChunk; ++h) {
          if (stores) load_chunk(place(block, unit, h), chunks[h]);
        }
        multiply_ranks(acc, more, more_act);
#pragma unroll
        for (int h = 0; h < 4 / D::kChunk; ++h) {
          if (stores) store_chunk<D::kChunk>(place(block, unit, h), chunks[h]);
        }
      }
    }
  }
}

// ---- where a warpgroup has all of K ----

constexpr int kActRanks = 32;  // of lora_act in shared memory; more come from L2

template <class D, int kTokens>
__device__ __forceinline__ uint32_t lora_act_place(const DecodeArgs& args, uint32_t smem) {
  const bool peer = args.splits > 1;
  return smem + args.off_addend + (peer ? D::kRows * kTokens / 2 * 4 : 0);
}

// By the add warps: lora_act into shared memory, the 16 bytes of a lane of the MMA behind each other.
template <class D, int kTokens>
__device__ __forceinline__ void stage_lora_act(const DecodeArgs& args, const Share& share, uint32_t smem,
                                               int thread) {
  constexpr int kPieces = kTokens * kActRanks / 8;
  constexpr int kEach = (kPieces + kAddThreads - 1) / kAddThreads;
  uint4 act[kEach];
  const auto look = [&] {
    bool there = true;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int piece = thread + i * kAddThreads;
      act[i] = load_lora_act(args, number_of<kTokens>(share, piece / (kActRanks / 8)),
                             piece % (kActRanks / 8) * 8);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) there = there && is_there(act[i]);
    return static_cast<bool>(__all_sync(0xFFFFFFFFu, there));
  };
  if (down_is_ahead<kTokens>(args)) {
    await_lora_act<kTokens>(args, share);
    watched_look(args, RingName::kDecodeLoraAct, look);
  } else {
    look();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int piece = thread + i * kAddThreads;
    if (piece < kPieces) store_shared_v4(lora_act_place<D, kTokens>(args, smem) + piece * 16, act[i]);
  }
}

// Bytes from the start of the peer's sums to a lane's chunk of a unit, of the tokens that one CTA finishes.
template <class D, int kTokens>
__device__ __forceinline__ uint32_t peer_place(int row_unit, int unit, int lane) {
  constexpr int kUnits = kTokens / 16;
  return ((row_unit * kUnits + unit % kUnits) * 32 + lane) * (4 * D::kChunk);
}

// A warp finishes its own 16 rows from its registers. `up`: of them, the first ranks. Every instruction is
// met once for each of 16 units, and eight warps wait for each other little: few of them count. With a
// branch, a division of tokens and three kinds of stores in each unit this took 4 us.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void finish_alone(const DecodeArgs& args, const Share& share, uint32_t smem,
                                             float (&acc)[kTokens / 2], const LoraUp& up, int row_unit,
                                             int lane) {
  using D = Division<Path, kTokens, kRows>;
  constexpr int kUnits = kTokens / 8;
  constexpr int kHalf = kTokens / 4;  // sums of half of the tokens
  asm volatile("" : "+r"(lane));  // as in `finish`
  if (row_unit * D::kUnitRows >= args.tile_n) return;
  const int row = row_unit * D::kUnitRows + lane_row<D::kHalves>(lane);
  const bool two = args.splits > 1;
  float bias[2];
  {
    RowInputs inputs[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 raw = load_shared_v4(smem + args.off_rows + min(row + h, args.tile_n - 1) * 16);
      inputs[h] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), 0};
      bias[h] = inputs[h].bias;
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float token_scale[2] = {1.0f, 1.0f};
      if constexpr (Path::kTokenScale) {
        load_chunk(smem + args.off_tokens + (unit * 8 + lane % 4 * 2) * 4, token_scale);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& v = acc[4 * unit + j];
        v = Path::scaled(v, inputs[j / 2], token_scale[j % 2]);
      }
    }
  }
  int first = 0;  // token of the tile that this CTA finishes
  if (two) {
    // From here on this CTA's tokens come first, and then the peer's, which waits for them.
    first = share.rank * (kTokens / 2);
    if (share.rank == 1) {
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float v = acc[i];
        acc[i] = acc[kHalf + i];
        acc[kHalf + i] = v;
      }
    }
    const int theirs = args.m - number_of<kTokens>(share, kTokens / 2 - first);
    const uint32_t to = smem + args.off_addend + peer_place<D, kTokens>(row_unit, 0, lane);
#pragma unroll
    for (int unit = 0; unit < kUnits / 2; ++unit) {
      const float* sum = &acc[kHalf + 4 * unit];
      const float v[4] = {sum[0], sum[1], sum[2], sum[3]};
      if (unit * 8 < theirs) {
        store_cluster_async<4>(to + unit * (32 * 4 * D::kChunk), sum_barrier(args, smem), 1 - share.rank, v);
      }
    }
  }
  const auto add_ranks = [&](int unit, const LoraUp& ranks, const uint4& act) {
    float product[4] = {};
    multiply_ranks(product, ranks, act);
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[4 * unit + j] += product[j];
  };
  // The halves of the tokens, of which with two CTAs one has the first only.
  const auto each_unit = [&](const auto& work) {
#pragma unroll
    for (int unit = 0; unit < kUnits / 2; ++unit) work(unit);
    if (two) return;
#pragma unroll
    for (int unit = kUnits / 2; unit < kUnits; ++unit) work(unit);
  };
  if (args.rank > 0) {
    const uint32_t act = lora_act_place<D, kTokens>(args, smem) + (first * 4 + lane) * 16;
    each_unit([&](int unit) { add_ranks(unit, up, load_shared_v4(act + unit * (32 * 16))); });
  }
  if (args.rank > kActRanks) {
    grid_dependency_wait();
    for (int rank = kActRanks; rank < args.rank; rank += kActRanks) {
      const int of = rank + lane % 4 * 8;
      const LoraUp more = load_lora_up<D>(args, share, row_unit, of, lane);
      const int token = number_of<kTokens>(share, first + lane / 4);
      each_unit([&](int unit) { add_ranks(unit, more, load_lora_act(args, token + unit * 8, of)); });
    }
  }
  if (two) {
    // The CTA may not end while the peer writes here.
    watched_wait(args, RingName::kDecodePeer, sum_barrier(args, smem), 0);
    const uint32_t from = smem + args.off_addend + peer_place<D, kTokens>(row_unit, 0, lane);
    const int sent = args.m - number_of<kTokens>(share, first);  // tokens
#pragma unroll
    for (int unit = 0; unit < kUnits / 2; ++unit) {
      float peer[4] = {};
      if (unit * 8 < sent) load_chunk(from + unit * (32 * 4 * D::kChunk), peer);
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[4 * unit + j] += peer[j];
    }
  }
  const int n = share.n0 + row;
  const int token = number_of<kTokens>(share, first + lane % 4 * 2);
  const int tokens = row < args.tile_n && n < args.n ? args.m - token : 0;  // from there on
  const int64_t pitch = int64_t{2} * args.n;
  uint8_t* to[2];
  to[0] = reinterpret_cast<uint8_t*>(args.y) + token * pitch + int64_t{2} * n;
  to[1] = to[0] + pitch;
  const auto store = [&](const auto& store_one) {
    each_unit([&](int unit) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Ahead of the condition, which is then the store's alone and no branch.
        const __nv_bfloat162 y =
            __floats2bfloat162_rn(acc[4 * unit + j] + bias[0], acc[4 * unit + 2 + j] + bias[1]);
        store_one(to[j], y, unit * 8 + j < tokens);
        to[j] += 8 * pitch;
      }
    });
  };
  if (args.n % 2 == 0) {
    store([](uint8_t* to, __nv_bfloat162 y, bool inside) {
      if (inside) *reinterpret_cast<__nv_bfloat162*>(to) = y;
    });
  } else {
    const bool second = n + 1 < args.n;
    store([&](uint8_t* to, __nv_bfloat162 y, bool inside) {
      if (inside) *reinterpret_cast<__nv_bfloat16*>(to) = y.x;
      if (inside && second) *reinterpret_cast<__nv_bfloat16*>(to + 2) = y.y;
    });
  }
}

// ---- kernel ----

// With few tokens registers leave room on an SM for a CTA of the quantizer, as many as launch bounds of
// 1024 threads say (64); with 32 tokens and few rows they are no more by themselves. With 64 of them
// and 32 rows 80 would do, beside a quantizer of 56 without LoRA-down: 9.75 us, not 9.35, at 4096x4096.
template <int kTokens, int kRows>
constexpr int kRegisterThreads = kTokens <= 16 || (kTokens == 32 && kRows == 32) ? 1024 : kThreads<kTokens>;

template <class Path, int kTokens, int kRows>
__global__ void __launch_bounds__((kRegisterThreads<kTokens, kRows>), 1)
    decode_kernel(const __grid_constant__ DecodeArgs args) {
  using D = Division<Path, kTokens, kRows>;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  if constexpr (kMayBeAhead<kTokens>) {
    if (static_cast<int>(blockIdx.x) < args.down.ctas) {
      if constexpr (kMayBeSeveral<kTokens>) {
        if (args.m > kDecodeMostTileM && args.m <= kDownAheadMmaTokens) {
          down_ahead<kDownAheadMmaTokens, kThreads<kTokens>, kLoadWarp<kTokens>>(
              args.down, smem_address(dynamic_smem));
          return;
        }
      }
      down_ahead<kAheadTokens<kTokens>, kThreads<kTokens>, kLoadWarp<kTokens>>(
          args.down, smem_address(dynamic_smem));
      return;
    }
  }
  const uint32_t smem = smem_address(dynamic_smem);
  const Share share = share_of<kTokens>(args);
  // The same in all lanes, and known to be: addresses of a warp then stay in uniform registers.
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const Ring ring(smem + args.off_barriers, args.stages, watch(args, RingName::kDecode));
  // For the peer, which writes here at the end. Relaxed: all that it has to know of is the barrier of the
  // sums, and the warp with that arrives behind a fence of its own.
  constexpr int kInitWarp = kLoadWarp<kTokens> + 1;
  if (args.splits > 1 && warp != kInitWarp) cluster_arrive_relaxed();

  // Up to the one barrier that all roles meet at: what must be on its way first. Nothing that the first
  // copies need not wait for stands in front of them.
  RowLoads loads = {};
  if (warp < kMultiplyWarps<kTokens>) {
    loads = ask_for_rows<Path, kTokens, kRows>(args, smem, share, warp, lane);
  } else if (warp == kLoadWarp<kTokens>) {
    if (elect_one()) load_early<Path, kTokens, kRows>(args, smem, ring, share);
    __syncwarp();
  } else if (warp == kInitWarp) {
    if (elect_one()) init_barriers<Path, kTokens, kRows>(args, smem, ring, share);
    __syncwarp();
    if (args.splits > 1) cluster_arrive_relaxed();
  }
  __syncthreads();

  if (warp < kMultiplyWarps<kTokens>) {
    prepare_rows<Path, kTokens, kRows>(args, smem, share, loads, warp, lane);
    const int warpgroup = warp / 4;
    const int group = warpgroup % D::kGroups;
    const int row_unit = warpgroup / D::kGroups * 4 + warp % 4;
    // An argument of the program, on its way during the loop.
    LoraUp up = {};
    if constexpr (D::kAlone) up = load_lora_up<D>(args, share, row_unit, lane % 4 * 8, lane);
    float acc[kTokens / 2];
    const auto run = [&](auto flush) {
      multiply<Path, kTokens, kRows, decltype(flush)::value>(args, smem, ring, share.steps, acc, group,
                                                             row_unit, lane);
    };
    // The same in all warps of the CTA, as the MMAs of a warpgroup must be. With 32 rows ptxas serializes
    // the MMAs of two loops (C7511).
    constexpr bool kMayKnow = kMayFlush<Path> && kRows > 32;
    if (!kMayKnow || some_flush<Path>(args, smem, lane)) {
      run(std::true_type());
    } else if constexpr (kMayKnow) {
      run(std::false_type());
    }
    // Asked for again, as it would stand in a register all through the loop, or worse.
    const int late_warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    if constexpr (!D::kAlone) {
      // Everyone is through with the ring, over which the sums are laid.
      named_barrier_sync(kMultiplyBarrier, kMultiplyThreads<kTokens>);
      store_partial<Path, kTokens, kRows>(args, smem, acc, late_warp / 4 % D::kGroups,
                                          late_warp / 4 / D::kGroups * 4 + late_warp % 4, lane);
    }
    named_barrier_sync(kSumBarrier, kMultiplyThreads<kTokens> + kAddThreads);
    if (args.splits > 1) cluster_wait();
    if constexpr (D::kAlone) {
      finish_alone<Path, kTokens, kRows>(args, share, smem, acc, up, late_warp, lane);
    } else {
      finish<Path, kTokens, kRows>(args, share, smem, late_warp, lane);
    }
    return;
  }
  if (warp == kLoadWarp<kTokens>) {
    if (elect_one()) load<Path, kTokens, kRows>(args, smem, ring, share);
    __syncwarp();
  } else {
    const int token = threadIdx.x - 32 * (kLoadWarp<kTokens> + 1);
    // An argument of the program: no need to wait. Where the loop is long it would only stand in the way of
    // lora_down, which the launch before reads.
    constexpr int kLongLoop = 12;
    using L = LowRank<D, kTokens>;
    const int add_warp = warp - kLoadWarp<kTokens> - 1;
    const bool early = share.steps < kLongLoop;
    typename L::Up up;
    if (!early) grid_dependency_wait();
    if constexpr (!D::kAlone) {
      if (args.rank > 0) L::load(args, share, 0, add_warp, lane, up);
    }
    if (early) {
      if (args.rank > 0 && (D::kAlone || L::kOwnBlocks > L::kHeld)) prefetch_lora_up(args, share, token);
      grid_dependency_wait();
    }
    constexpr int kScales = (kTokens + kAddThreads - 1) / kAddThreads;  // of a thread
    float token_scale[kScales];
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const int of = token + i * kAddThreads;
      const int number = number_of<kTokens>(share, of);
      token_scale[i] = Path::kTokenScale && number < args.m ? args.token_scale[number] : 0.0f;
    }
    if (args.rank > 0) {
      if constexpr (D::kAlone) {
        stage_lora_act<D, kTokens>(args, share, smem, token);
      } else {
        add_low_rank<Path, kTokens, kRows>(args, smem, share, add_warp, lane, up);
      }
    }
#pragma unroll
    for (int i = 0; i < kScales; ++i) {
      const int of = token + i * kAddThreads;
      if (Path::kTokenScale && of < kTokens) {
        store_shared_u32(smem + args.off_tokens + of * 4, __float_as_uint(token_scale[i]));
      }
    }
    __syncwarp();
    named_barrier_arrive(kSumBarrier, kMultiplyThreads<kTokens> + kAddThreads);
  }
  if (args.splits > 1) cluster_wait();
}

}  // namespace jax_w4a4::sm90
