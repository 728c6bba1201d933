// Decode GEMM for Hopper: Y[M, N] = scale(X[M, K] W[N, K]^T) + lora_act lora_up^T + bias for M up to 64,
// bound by reading W. One CTA per SM takes 8 to 128 weight rows, all tokens and all of K; the number of
// rows makes about as many CTAs as there are SMs. Where N is too small for that a cluster of two CTAs
// shares the rows and divides K.
//
// Roles in a CTA of 20 warps:
//   load      one thread of warp 16 fetches the block scales and streams weights and activations through
//             a ring. Scales and the first weights, arguments of the program, are on their way before
//             the launch before has ended.
//   multiply  warps 0..15, four warpgroups that divide K (and 65 rows or more) among them. Each
//             expands its 4-bit weights in registers (sm90_expand.cuh) and adds up Y^T = W X^T; the
//             sums meet in shared memory and are added in the order of the warpgroups.
//   add       warps 17..19 work out the low-rank product meanwhile, on mma.sync, from L2.
//
// Shared memory per CTA, every offset and count given by the plan:
//   main ring    stages x (boxes x tile_n x 128 weights, then records x kTokens x 128 activations)
//   partial sums k groups x kTokens x (kRows + 4) fp32, over the ring once it is through
//   scales       all block scales of the CTA's rows: boxes of 128 bytes x tile_n, 128-byte swizzle
//   rows         tile_n RowInputs
//   tokens       kTokens fp32 scales
//   addend       kTokens x (kRows + 4) fp32, the low-rank product; with two CTAs of the tokens that this
//                one finishes, and in the place of the others what the peer has of this one's
//   barriers     16 x stages, 8 for the scales
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "mma.cuh"
#include "sm90_decode.h"
#include "sm90_paths.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_ptx.cuh"
#include "sm90_row_inputs.cuh"
#include "sm90_wgmma.cuh"

namespace jax_w4a4::sm90 {

constexpr int kBoxBytes = 128;  // of a row of weights or a token in one box
constexpr int kMultiplyWarps = 16;
constexpr int kMultiplyThreads = 32 * kMultiplyWarps;
constexpr int kLoadWarp = kMultiplyWarps;
constexpr int kAddWarps = 3;
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
  int scale_boxes;
  bool scale_map;  // block scales come by the copy engine
  int off_act;  // inside a stage
  int off_scales, off_rows, off_tokens, off_partial, off_addend, off_barriers;
};

// The work of a CTA.
struct Share {
  int n0;                  // first weight row
  int rank;                // in the cluster
  int first_step, steps;   // stages of K
};

__device__ __forceinline__ Share share_of(const DecodeArgs& args) {
  Share share = {static_cast<int>(blockIdx.x) * args.tile_n, 0, 0, args.steps};
  if (args.splits > 1) {
    share.rank = static_cast<int>(cluster_rank());
    share.n0 = blockIdx.x / args.splits * args.tile_n;
    const int each = (args.steps + args.splits - 1) / args.splits;
    share.first_step = share.rank * each;
    share.steps = min(each, args.steps - share.first_step);
  }
  return share;
}

// Whether this CTA finishes a token: all of them, or half.
template <int kTokens>
__device__ __forceinline__ bool finishes(const DecodeArgs& args, const Share& share, int token) {
  return args.splits == 1 || token / (kTokens / 2) == share.rank;
}

// kRows and the division of the work; see DecodeShape.
template <class Path, int kMostRows>
struct Division {
  static constexpr DecodeShape kShape = DecodeShapeOf(kMostRows);
  static constexpr int kRows = kShape.rows;
  static constexpr int kGroups = kShape.k_groups;
  static constexpr int kBoxes = kShape.boxes;
  static constexpr int kBlocks = 4 / kGroups;         // warpgroups along the rows
  static constexpr int kHalves = kRows == 32 ? 1 : 2;  // rows of the MMA that a thread serves
  static constexpr int kStageK = kBoxes * kDecodeBoxK;
  // Of K per warpgroup and stage: what one fragment's worth of a path covers, Path::kStageK.
  static constexpr int kRecords = kStageK / kGroups / Path::kStageK;
  static constexpr int kBoxRecords = kDecodeBoxK / Path::kStageK;
  static constexpr int kScaleBytes = kGroups * kRecords * Path::kStageScales;  // of a row and stage
  static constexpr int kPitch = kRows + 4;  // floats; a quad's tokens lie in different banks
  static_assert(kRows == kMostRows && kRecords * Path::kStageK * kGroups == kStageK);
};

// ---- load ----

__device__ __forceinline__ uint32_t scale_barrier(const DecodeArgs& args, uint32_t smem) {
  return smem + args.off_barriers + 16 * args.stages;
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_weights(const DecodeArgs& args, uint32_t slot, uint32_t full,
                                             int step, int n0) {
  using D = Division<Path, kRows>;
#pragma unroll
  for (int box = 0; box < D::kBoxes; ++box) {
    tma_load_2d(slot + box * args.tile_n * kBoxBytes, &args.weight, full,
                (step * D::kBoxes + box) * kBoxBytes, n0);
  }
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_activations(const DecodeArgs& args, uint32_t slot,
                                                 uint32_t full, int step) {
  using D = Division<Path, kRows>;
  tma_load_3d(slot + args.off_act, &args.act, full, 0, 0, step * D::kGroups * D::kRecords);
}

// The CTA's share of its rows' block scales.
struct ScaleShare {
  int first;   // block of the matrix
  int blocks;  // of a row of the matrix from there on
  int bytes;   // that the CTA uses, zeros past `blocks`
};

template <class Path, int kRows>
__device__ __forceinline__ ScaleShare scale_share(const DecodeArgs& args, const Share& share) {
  constexpr int kStepBytes = Division<Path, kRows>::kScaleBytes;
  const int first = share.first_step * kStepBytes;
  return {first, args.rows.scale_blocks - first, share.steps * kStepBytes};
}

// Stages of weights that are asked for at once, and how many by the time that the block scales are there.
// What the launch before reads stands in the same queues: with all stages asked for at once its product came
// 1 to 1.5 us later, and with K above 4096 it takes so long that memory would stand still without the second
// batch (us of both launches with 1 or 2, 4 and 6 stages in it, MXFP4, M = 1 and 16: 4096x4096 7.2 7.8 7.8,
// 7.6 7.9 7.9; 14336x4096 13.4 12.7 13.1, 14.8 13.7 14.2; 16384x16384 39.6 38.8 38.9, 42.7 41.8 42.1).
template <int kTokens>
__device__ __forceinline__ int first_stages(const DecodeArgs& args, const Share& share) {
  const int most = kTokens > 16 || share.steps >= 8 ? 2 : 1;
  return min(min(most, args.stages), share.steps);
}
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ int early_stages(const DecodeArgs& args, const Share& share) {
  if (args.steps * Division<Path, kRows>::kStageK <= 4096) return first_stages<kTokens>(args, share);
  return min(min(4, args.stages), share.steps);
}

template <class Path, int kTokens, int kRows>
__device__ __forceinline__ uint32_t stage_bytes(int tile_n) {
  using D = Division<Path, kRows>;
  return D::kBoxes * tile_n * kBoxBytes + D::kGroups * D::kRecords * kTokens * kBoxBytes;
}

// The weights of stages into their slots, which nothing has been in.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_stages(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                            const Share& share, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    mbarrier_arrive_expect_tx(ring.full(step), stage_bytes<Path, kTokens, kRows>(args.tile_n));
    load_weights<Path, kTokens, kRows>(args, smem + step * args.stage_bytes, ring.full(step),
                                       share.first_step + step, share.n0);
  }
}

// What need not wait for the launch before. The weights may be results of XLA operations before this
// call: those ended before the first kernel of this handler began, which is launched without the
// dependent attribute, and every kernel of the handler begins after that one. So only what the handler's
// own kernels write needs the wait.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void load_early(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                           const Share& share) {
  if (Path::kStageScales > 0 && args.scale_map) {
    // Nothing is multiplied before all of them are there.
    const uint32_t barrier = scale_barrier(args, smem);
    const uint32_t box_bytes = args.tile_n * kDecodeScaleBox;
    const int first = scale_share<Path, kRows>(args, share).first;
    mbarrier_arrive_expect_tx(barrier, args.scale_boxes * box_bytes);
    for (int box = 0; box < args.scale_boxes; ++box) {
      tma_load_2d(smem + args.off_scales + box * box_bytes, &args.scales, barrier,
                  first + box * kDecodeScaleBox, share.n0);
    }
  }
  load_stages<Path, kTokens, kRows>(args, smem, ring, share, 0, first_stages<kTokens>(args, share));
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
  for (int step = 0; step < share.steps; ++step) {
    const uint32_t slot = smem + stage.slot * args.stage_bytes;
    const uint32_t full = ring.full(stage);
    if (step >= early) {
      ring.acquire(stage, stage_bytes<Path, kTokens, kRows>(args.tile_n));
      load_weights<Path, kTokens, kRows>(args, slot, full, share.first_step + step, share.n0);
    }
    load_activations<Path, kTokens, kRows>(args, slot, full, share.first_step + step);
    ring.advance(stage);
  }
}

// ---- multiply ----

// A thread's pieces of kBytes of the rows' block scales: lanes beside each other take neighbours in a
// row, warps take whole rows.
template <int kBytes>
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
      row += kMultiplyWarps << (5 - log_lanes);
    }
  }
};

// Where 16 bytes of the block scales of a row lie.
__device__ __forceinline__ uint32_t scale_place(const DecodeArgs& args, uint32_t smem, int row,
                                                int piece) {
  return smem + args.off_scales + (piece / 8 * args.tile_n + row) * kDecodeScaleBox +
         (piece % 8 ^ row % 8) * 16;
}

// Block scales of all rows where the copy engine can't fetch them, in pieces of kBytes.
template <int kBytes>
__device__ __forceinline__ void copy_scales(const DecodeArgs& args, const ScaleShare& share, int n0,
                                            uint32_t smem, int warp, int lane) {
  const int bytes = (share.bytes + 15) / 16 * 16;  // as find_extremes reads them
  for (ScaleWalk<kBytes> at(bytes, warp, lane); at.more(args.tile_n, lane); at.advance(lane)) {
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

// By the lanes of a row, this one being `lane` of kLanes; all of them get it. Bytes are compared as the
// upper halves of 16 bits, where the lower ones do not matter.
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
      most = __vmaxu2(most, __vmaxu2(word, word << 8));
      if (kFormat == Format::kMxfp4) least = __vminu2(least, __vminu2(word, word << 8));
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

// What the multiply warps do while the launch before may still be running: block scales and RowInputs
// into shared memory. `begun` makes the barriers of the load warp known.
template <class Path, int kRows, class Begun>
__device__ __forceinline__ void prepare_rows(const DecodeArgs& args, uint32_t smem,
                                             const Share& share, int warp, int lane, Begun begun) {
  const int n0 = share.n0;
  const int thread = warp * 32 + lane;
  const auto write = [&](int row, const RowInputs& v) {
    store_shared_v4(smem + args.off_rows + row * 16,
                    make_uint4(__float_as_uint(v.scale_lo), __float_as_uint(v.scale_hi),
                               __float_as_uint(v.bias), v.base));
  };
  if constexpr (Path::kStageScales == 0) {
    begun();
    if (thread < args.tile_n) {
      write(thread, int4_row_inputs(args.rows, min(n0 + thread, args.n - 1)));
    }
  } else {
    constexpr int kLanes = kMultiplyThreads / kRows;  // of a row
    const int row = thread / kLanes;
    const ScaleShare scales = scale_share<Path, kRows>(args, share);
    const bool words = args.rows.scale_blocks % 4 == 0;
    if (!args.scale_map && words) copy_scales<4>(args, scales, n0, smem, warp, lane);
    const RowFactors factors = row_factors(args.rows, min(n0 + row, args.n - 1));
    begun();
    if (args.scale_map) {
      watched_wait(args, RingName::kDecodeScales, scale_barrier(args, smem), 0);
    } else {
      if (!words) copy_scales<1>(args, scales, n0, smem, warp, lane);
      wait_copies();
      named_barrier_sync(kMultiplyBarrier, kMultiplyThreads);
    }
    // The same for a whole warp, as tile_n is a multiple of 8: its lanes exchange what they find.
    if (row < args.tile_n) {
      // With two CTAs each has a base of its own for a row: their sums are scaled before they meet.
      const Extremes found =
          find_extremes<Path::kFormat, kLanes>(args, scales, smem, row, thread % kLanes);
      RowInputs v = row_inputs<Path::kFormat>(args.rows.rounded, factors, found.most);
      if constexpr (kMayFlush<Path>) {
        const bool flushes = typename Path::RowFold(v.base).flushes(found.least);
        v.base = (v.base & 0xFFFF) | flushes << 16;
      }
      if (thread % kLanes == 0) write(row, v);
    }
  }
  named_barrier_sync(kMultiplyBarrier, kMultiplyThreads);
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

// The sums of one warpgroup over all of K. A record is what Path::kStageK of K are to one MMA row block:
// four MMAs. Fragments are written while the MMAs before are in flight.
template <class Path, int kTokens, int kRows, bool kFlush>
__device__ __forceinline__ void multiply(const DecodeArgs& args, uint32_t smem, const Ring& ring,
                                         int steps, float (&acc)[kTokens / 2], int group, int block,
                                         int warp, int lane) {
  using D = Division<Path, kRows>;
  const int q = lane % 4;
  // Of eight lanes that read shared memory together four take a row in the lower half of the swizzle
  // pattern and four one in the upper: rows 0, 4, 1, 5, 2, 6, 3, 7.
  const int g = lane / 4 % 2 * 4 + lane / 8;
  // Groups of eight rows past the last repeat it; what they sum up is never read.
  const int last = args.tile_n / 8 - 1;
  const int group8[2] = {min(block * 8 + warp, last), min(block * 8 + warp + 4, last)};
  // First record of this warpgroup in a stage.
  const int record = group * D::kRecords;
  const int chunk = record % D::kBoxRecords * (Path::kWeightBytes / 16) + q * Path::kLaneBytes / 16;
  const uint32_t in_row = (chunk ^ g) * 16 + q * Path::kLaneBytes % 16;
  const uint32_t box = smem + record / D::kBoxRecords * args.tile_n * kBoxBytes;
  uint32_t weight[D::kHalves], scales[D::kHalves];
  typename Path::RowFold fold[2] = {typename Path::RowFold(0), typename Path::RowFold(0)};
#pragma unroll
  for (int h = 0; h < D::kHalves; ++h) {
    const int row = group8[h] * 8 + g;
    weight[h] = box + row * kBoxBytes + in_row;
    // Row % 8 is g, which the swizzle adds to the number of 16 bytes.
    scales[h] = smem + args.off_scales + row * kDecodeScaleBox +
                (g * 16 ^ (record * Path::kStageScales + q * (Path::kStageScales / 4)));
    fold[h] = typename Path::RowFold(
        base_of<Path>(load_shared_u32(smem + args.off_rows + row * 16 + 12)));
    if constexpr (kMayFlush<Path>) fold[h].keep();
  }
  const uint32_t act = smem + args.off_act + record * kTokens * kBoxBytes;

  // Rows that no thread serves are zero all along; opaque, or they are made anew under a running MMA.
  uint32_t a[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("mov.b32 %0, 0;" : "=r"(a[i / 4][i % 4]));
  RingState stage;
  uint32_t block_scale[D::kRecords][2];
  decltype(Path::load_packed(0)) packed[D::kRecords][2];
  const auto read_stage = [&](int step) {
    // The stage's scales: in which box, and where in it.
    const uint32_t scale = step * D::kScaleBytes;
    const uint32_t box = scale / kDecodeScaleBox * (args.tile_n * kDecodeScaleBox);
#pragma unroll
    for (int r = 0; r < D::kRecords; ++r) {
#pragma unroll
      for (int h = 0; h < D::kHalves; ++h) {
        block_scale[r][h] = load_scale<Path>((scales[h] ^ scale % kDecodeScaleBox) + box +
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
  if (kReadAhead<kTokens>) read_stage(0);
  for (int step = 0; step < steps; ++step) {
    if (!kReadAhead<kTokens>) read_stage(step);
    const uint32_t slot = stage.slot * args.stage_bytes;
#pragma unroll
    for (int r = 0; r < D::kRecords; ++r) {
      const auto packed0 = packed[r][0];
      const auto packed1 = packed[r][D::kHalves - 1];
      auto table0 = table<0, kFlush>(fold[0], block_scale[r][0]);
      auto table1 = table<0, kFlush>(fold[1], block_scale[r][D::kHalves - 1]);
      const uint64_t b = matrix_descriptor<kBoxBytes>(act + slot + r * kTokens * kBoxBytes);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        if (s == 2 && Path::kLaneBlocks == 2) {
          table0 = table<1, kFlush>(fold[0], block_scale[r][0]);
          table1 = table<1, kFlush>(fold[1], block_scale[r][D::kHalves - 1]);
        }
        Path::expand(packed0, s, table0, a[s][0], a[s][2]);
        if constexpr (D::kHalves == 2) Path::expand(packed1, s, table1, a[s][1], a[s][3]);
        wgmma_fence();
        using Accumulators = typename Path::Accumulator[kTokens / 2];
        Wgmma<kTokens>::template rs<Path::kMma>(reinterpret_cast<Accumulators&>(acc), a[s],
                                                b + 2 * s, s > 0 || r > 0 || step > 0);
        wgmma_commit();
        // The next fragment's registers are free. After the last one the slot goes back at once, though
        // no MMA is then in flight: what bounds many tokens is how soon a slot is filled again
        // (8192x8192, three stages at M = 64: 15.1 us, 15.9 when it goes back behind the first MMA of
        // the next stage; 11.9 and 11.6 at M = 1, but 11.7 and 12.1 at 4096x14336, M = 16).
        if (s == 3 && r == D::kRecords - 1) {
          const int through = stage.slot;
          ring.advance(stage);
          if (kReadAhead<kTokens> && step + 1 < steps) read_stage(step + 1);
          wgmma_wait<0>();
          ring.release<1>(through, lane);
        } else {
          wgmma_wait<3>();
        }
      }
    }
  }
  pin(acc);
}

// Sums to shared memory; groups of eight rows past the last have room of their own.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void store_partial(const DecodeArgs& args, uint32_t smem,
                                              const float (&acc)[kTokens / 2], int group, int block,
                                              int warp, int lane) {
  using D = Division<Path, kRows>;
  const int g = lane / 4 % 2 * 4 + lane / 8;
  const uint32_t at = smem + args.off_partial +
                      ((group * kTokens + lane % 4 * 2) * D::kPitch + block * 64 + warp * 8 + g) * 4;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2 * D::kHalves; ++i) {
      store_shared_u32(at + ((8 * j + i % 2) * D::kPitch + i / 2 * 32) * 4,
                       __float_as_uint(acc[4 * j + i]));
    }
  }
}

// Two neighbouring rows of the tile and every so many tokens, one thread's part of the result.
template <class Path, int kTokens, int kRows>
struct Finish {
  using D = Division<Path, kRows>;
  using Sum = typename Path::Accumulator;
  static constexpr int kPairs = kRows / 2;
  static constexpr int kStep = kMultiplyThreads / kPairs;  // tokens at once

  const DecodeArgs& args;
  const Share& share;
  uint32_t smem;
  int row, first_token;
  RowInputs inputs[2];

  __device__ __forceinline__ Finish(const DecodeArgs& args, const Share& share, uint32_t smem,
                                    int thread)
      : args(args), share(share), smem(smem), row(thread % kPairs * 2),
        first_token(thread / kPairs) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = min(row + j, args.tile_n - 1);
      const uint4 raw = load_shared_v4(smem + args.off_rows + at * 16);
      inputs[j] = {__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z),
                   static_cast<int>(raw.w)};
    }
  }

  __device__ __forceinline__ uint32_t place(int token) const {
    return (token * D::kPitch + row) * 4;
  }

  // The warpgroups' sums in their order, scaled.
  __device__ __forceinline__ float2 scaled(int token) const {
    Sum sum[2] = {};
#pragma unroll
    for (int group = 0; group < D::kGroups; ++group) {
      const uint2 part = load_shared_v2(smem + args.off_partial +
                                        group * kTokens * D::kPitch * 4 + place(token));
      sum[0] += reinterpret_cast<const Sum&>(part.x);
      sum[1] += reinterpret_cast<const Sum&>(part.y);
    }
    float token_scale = 1.0f;
    if constexpr (Path::kTokenScale) {
      token_scale = __uint_as_float(load_shared_u32(smem + args.off_tokens + token * 4));
    }
    return {Path::scaled(reinterpret_cast<const float&>(sum[0]), inputs[0], token_scale),
            Path::scaled(reinterpret_cast<const float&>(sum[1]), inputs[1], token_scale)};
  }

  // The peer's tokens to the peer, into places of tokens that it does not finish.
  __device__ __forceinline__ void give() const {
    if (row >= args.tile_n) return;
    for (int token = first_token; token < args.m; token += kStep) {
      if (finishes<kTokens>(args, share, token)) continue;
      const int other = (token + kTokens / 2) % kTokens;
      store_cluster_f2(smem + args.off_addend + place(other), 1 - share.rank, scaled(token));
    }
  }

  __device__ __forceinline__ float2 addend(int token) const {
    const uint2 raw = load_shared_v2(smem + args.off_addend + place(token));
    return {__uint_as_float(raw.x), __uint_as_float(raw.y)};
  }

  __device__ __forceinline__ void store() const {
    const int n = share.n0 + row;
    if (row >= args.tile_n || n >= args.n) return;
#pragma unroll 2
    for (int token = first_token; token < args.m; token += kStep) {
      if (!finishes<kTokens>(args, share, token)) continue;
      float2 sum = scaled(token);
      if (args.splits > 1) {
        const float2 peer = addend((token + kTokens / 2) % kTokens);
        sum = {sum.x + peer.x, sum.y + peer.y};
      }
      if (args.rank > 0) {
        const float2 low_rank = addend(token);
        sum = {sum.x + low_rank.x, sum.y + low_rank.y};
      }
      const __nv_bfloat162 y = __floats2bfloat162_rn(sum.x + inputs[0].bias, sum.y + inputs[1].bias);
      __nv_bfloat16* out = args.y + static_cast<int64_t>(token) * args.n + n;
      if (args.n % 2 == 0) {
        *reinterpret_cast<__nv_bfloat162*>(out) = y;
      } else {
        out[0] = y.x;
        if (n + 1 < args.n) out[1] = y.y;
      }
    }
  }
};

// ---- add ----

__device__ __forceinline__ uint4 load_ranks(const __nv_bfloat16* row, int rank, int ranks,
                                            bool inside) {
  if (!inside || rank >= ranks) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(row + rank);
}

// The low-rank product of the tile. A lane reads eight ranks of a row at once and calls the first two
// pairs k 2q, 2q + 1, 2q + 8, 2q + 9 of one MMA, the others those of the next, on both sides.
template <class Path, int kTokens, int kRows>
__device__ __forceinline__ void add_low_rank(const DecodeArgs& args, uint32_t smem,
                                             const Share& share, int warp, int lane) {
  using D = Division<Path, kRows>;
  constexpr int kPart = kTokens < 32 ? kTokens : 32;  // tokens at a time
  const int g = lane / 4;
  const int q = lane % 4;
  for (int block = warp; block * 16 < args.tile_n; block += kAddWarps) {
    const int row = share.n0 + block * 16 + g;
    const __nv_bfloat16* up = args.lora_up + static_cast<int64_t>(row) * args.rank;
    for (int first = 0; first < args.m; first += kPart) {
      float acc[kPart / 8][4] = {};
      for (int rank = 8 * q; rank < args.rank + 8 * q; rank += 32) {
        const uint4 a0 = load_ranks(up, rank, args.rank, row < args.n);
        const uint4 a1 = load_ranks(up + 8 * args.rank, rank, args.rank, row + 8 < args.n);
        uint4 b[kPart / 8];
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) {
          const int token = first + 8 * j + g;
          b[j] = load_ranks(args.lora_act + token * args.rank, rank, args.rank, token < args.m);
        }
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) {
          MmaBf16(acc[j], {a0.x, a1.x, a0.y, a1.y}, b[j].x, b[j].y);
          MmaBf16(acc[j], {a0.z, a1.z, a0.w, a1.w}, b[j].z, b[j].w);
        }
      }
      const uint32_t at =
          smem + args.off_addend + ((first + 2 * q) * D::kPitch + block * 16 + g) * 4;
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!finishes<kTokens>(args, share, first + 8 * j + 2 * q + i % 2)) continue;
          store_shared_u32(at + ((8 * j + i % 2) * D::kPitch + i / 2 * 8) * 4,
                           __float_as_uint(acc[j][i]));
        }
      }
    }
  }
}

// ---- kernel ----

// With few tokens registers leave room on an SM for a CTA of the quantizer, as many as launch bounds of
// 1024 threads say (64).
template <int kTokens>
constexpr int kRegisterThreads = kTokens <= 16 ? 1024 : kDecodeThreads;

template <class Path, int kTokens, int kRows>
__global__ void __launch_bounds__(kRegisterThreads<kTokens>, 1)
    decode_kernel(const __grid_constant__ DecodeArgs args) {
  using D = Division<Path, kRows>;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  const Share share = share_of(args);
  // The same in all lanes, and known to be: addresses of a warp then stay in uniform registers.
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  const Ring ring(smem + args.off_barriers, args.stages, watch(args, RingName::kDecode));
  // For the peer, which writes here at the end; relaxed, as nothing is published.
  if (args.splits > 1) cluster_arrive_relaxed();

  if (warp < kMultiplyWarps) {
    prepare_rows<Path, kRows>(args, smem, share, warp, lane, [] { __syncthreads(); });
    const int warpgroup = warp / 4;
    const int group = warpgroup % D::kGroups;
    const int block = warpgroup / D::kGroups;
    float acc[kTokens / 2];
    const auto run = [&](auto flush) {
      multiply<Path, kTokens, kRows, decltype(flush)::value>(args, smem, ring, share.steps, acc, group,
                                                             block, warp % 4, lane);
    };
    // The same in all warps of the CTA, as the MMAs of a warpgroup must be. With 32 rows ptxas serializes
    // the MMAs of two loops (C7511).
    constexpr bool kMayKnow = kMayFlush<Path> && kRows > 32;
    if (!kMayKnow || some_flush<Path>(args, smem, lane)) {
      run(std::true_type());
    } else if constexpr (kMayKnow) {
      run(std::false_type());
    }
    // Everyone is through with the ring, over which the sums are laid.
    named_barrier_sync(kMultiplyBarrier, kMultiplyThreads);
    store_partial<Path, kTokens, kRows>(args, smem, acc, group, block, warp % 4, lane);
    named_barrier_sync(kSumBarrier, kMultiplyThreads + 32 * kAddWarps);
    const Finish<Path, kTokens, kRows> finish(args, share, smem, threadIdx.x);
    if (args.splits > 1) {
      cluster_wait();
      finish.give();
      cluster_sync();
    }
    finish.store();
    return;
  }
  if (warp == kLoadWarp) {
    if (elect_one()) {
      ring.init(kMultiplyWarps);
      mbarrier_init(scale_barrier(args, smem), 1);
      fence_mbarrier_init();
      load_early<Path, kTokens, kRows>(args, smem, ring, share);
      prefetch_tensor_map(&args.act);
    }
    __syncthreads();
    if (elect_one()) load<Path, kTokens, kRows>(args, smem, ring, share);
    __syncwarp();
  } else {
    __syncthreads();
    grid_dependency_wait();
    const int thread = threadIdx.x - 32 * (kLoadWarp + 1);
    if constexpr (Path::kTokenScale) {
      for (int token = thread; token < args.m; token += 32 * kAddWarps) {
        store_shared_u32(smem + args.off_tokens + token * 4,
                         __float_as_uint(args.token_scale[token]));
      }
    }
    if (args.rank > 0) {
      add_low_rank<Path, kTokens, kRows>(args, smem, share, warp - kLoadWarp - 1, lane);
    }
    __syncwarp();
    named_barrier_arrive(kSumBarrier, kMultiplyThreads + 32 * kAddWarps);
  }
  if (args.splits > 1) {
    cluster_wait();
    cluster_sync();
  }
}

}  // namespace jax_w4a4::sm90
