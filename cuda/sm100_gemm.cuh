// GEMM for Blackwell: Y[M, N] = scale(X[M, K] W[N, K]^T) + lora_act lora_up^T + bias, 4-bit operands
// with block scales as the tensor core takes them.
//
// Persistent, warp-specialised. A group of one CTA, or of two that share every MMA, computes a tile of
// 128 kGroup x kTileN: each CTA 128 rows of X and of the result, and its share of W's rows.
//
//   load   one thread per CTA fills the main ring: codes and scale factors of 256 elements of K,
//          afterwards 64 ranks of both low-rank operands in the same slots
//   mma    one thread of the leader copies scale factors to tensor memory and issues the MMAs
//   store  eight warps: accumulators to registers, fp32 epilogue, TMA store
//
// Two rings of sm90_pipeline.cuh: main (load -> mma) and accumulators (mma -> store). In a pair the
// leader's barriers count for both CTAs: bytes of both loads, releases of both epilogues; a commit
// arrives in both.
//
// The low-rank product has a slot of the accumulator ring of its own, as channel_scale and alpha do
// not apply to it. Scaling the first product inside tensor memory would cost the same two hand-overs
// and a round trip of the whole tile; a lora_up divided by the scales beforehand would be rounded to
// 16 bits again and does not exist where channel_scale is zero. With three slots (tile_n up to 128) the
// second product and the next tile's first run on while the epilogue drains; where there is one
// (tile_n 256) the low-rank product waits until the first one is in registers, which is also when the
// next tile's product may begin.
//
// Shared memory per CTA (bytes), offsets and counts from the plan:
//   main ring    stages x 128 x 128 activations | stages x kTileN / kGroup x 128 weights
//                | stages x scale atoms of 128 rows of X | stages x atoms of kTileN rows of W
//   store slots  stages x 4 warps x 32 rows x 64
//   aux          2 x kTileN x 4, channel_scale and bias of the tile
//   barriers     16 x (main stages + accumulators), address of tensor memory
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "sm100_layout.h"
#include "sm100_ptx.cuh"
#include "sm90_pipeline.cuh"
#include "tile_order.cuh"

namespace jax_w4a4::sm100 {

constexpr int kStoreWarps = 8;
constexpr int kLoadWarp = 8;
constexpr int kMmaWarp = 9;
constexpr int kGemmThreads = 384;  // two warps stay idle: register budgets belong to warpgroups
constexpr int kIssueRegisters = 64;
constexpr int kStoreRegisters = 216;
constexpr int kStoreColumns = 32;  // of a store slot
constexpr int kStoreBytes = 32 * kStoreColumns * 2;  // of a warp in a store stage
constexpr int kMaxStoreSlots = 4;  // of a warp

struct GemmArgs : Watched {
  CUtensorMap act, weight;              // (rows, K / 2) bytes, box 128 x 128 or a CTA's share of W
  CUtensorMap act_scale, weight_scale;  // (row tiles x atoms, 128) words, box 128 x a stage's atoms
  CUtensorMap lora_act, lora_up;        // (rows, R) of 16 bits, box 64 x rows as above
  CUtensorMap out;                      // (M, N) of 16 bits, box 32 x 32
  const float* act_global_scale;        // () or null
  const float* weight_global_scale;     // () or null
  const float* channel_scale;           // (N,) or null
  const float* bias;                    // (N,) or null
  void* y;
  int m, n;
  int k_stages, lora_stages;  // slots of the main ring per tile
  int atoms;                  // scale atoms along K
  int m_tiles, n_tiles, group_m;
  int tma_store;  // 0: N * 2 is no multiple of 16, rows are stored by the threads
  int lora_bf16, out_bf16;  // 0: fp16
  // From the plan.
  int stages, store_stages;
  int off_act, off_weight, off_act_scale, off_weight_scale, off_store, off_aux, off_barriers;
};

template <int kGroup_, int kTileN_, int kBlock_>
struct Shape {
  static constexpr int kGroup = kGroup_;
  static constexpr int kTileM = 128 * kGroup;
  static constexpr int kTileN = kTileN_;
  static constexpr int kBlock = kBlock_;
  static constexpr int kAtoms = Sm100StageAtoms(kBlock);
  static constexpr int kWeightTiles = static_cast<int>(Sm100AtomTiles(kTileN));
  static constexpr uint32_t kActBytes = 128 * kSm100RowBytes;
  static constexpr uint32_t kWeightBytes = kTileN / kGroup * kSm100RowBytes;
  static constexpr uint32_t kActScaleBytes = kAtoms * kSm100AtomBytes;
  static constexpr uint32_t kWeightScaleBytes = kWeightTiles * kActScaleBytes;
  static constexpr int kAccumulators = Sm100Accumulators(kTileN, kBlock);
  static constexpr uint32_t kScaleColumns = Sm100ScaleColumns(kTileN, kBlock);
  static constexpr uint32_t kScaleBase = kAccumulators * kTileN;
  static_assert(kScaleBase + kSm100ScaleSlots * kScaleColumns <= kSm100Columns);
  static constexpr int kWarpColumns = kTileN / 2;  // of the result, in a store warp
};

template <class S>
__device__ __forceinline__ TileIndex tile_at(const GemmArgs& args, int index) {
  return tile_index(index, args.m_tiles, args.n_tiles, args.group_m);
}

// ---- load ----

template <class S>
__device__ __forceinline__ void load(const GemmArgs& args, uint32_t smem, const Ring& main,
                                     int group, int groups, int rank) {
  RingState stage;
  for (int index = group; index < args.m_tiles * args.n_tiles; index += groups) {
    const TileIndex tile = tile_at<S>(args, index);
    const int m_tile = tile.m * S::kGroup + rank;
    const int n0 = tile.n * S::kTileN;
    const int w_row = n0 + rank * (S::kTileN / S::kGroup);
    for (int s = 0; s < args.k_stages + args.lora_stages; ++s) {
      main.wait_empty(stage);
      const bool scaled = s < args.k_stages;
      const uint32_t bytes = S::kActBytes + S::kWeightBytes +
                             (scaled ? S::kActScaleBytes + S::kWeightScaleBytes : 0);
      const uint32_t full = main.full(stage);
      // The peer's bytes may land before: the phase cannot end without this arrival.
      if (rank == 0) mbarrier_arrive_expect_tx(full, S::kGroup * bytes);
      const uint32_t act = smem + args.off_act + stage.slot * S::kActBytes;
      const uint32_t weight = smem + args.off_weight + stage.slot * S::kWeightBytes;
      if (scaled) {
        load_box<S::kGroup>(act, &args.act, full, s * kSm100RowBytes, m_tile * 128);
        load_box<S::kGroup>(weight, &args.weight, full, s * kSm100RowBytes, w_row);
        load_box<S::kGroup>(smem + args.off_act_scale + stage.slot * S::kActScaleBytes,
                            &args.act_scale, full, 0, m_tile * args.atoms + s * S::kAtoms);
        const uint32_t scales =
            smem + args.off_weight_scale + stage.slot * S::kWeightScaleBytes;
#pragma unroll
        for (int i = 0; i < S::kWeightTiles; ++i) {
          load_box<S::kGroup>(scales + i * S::kActScaleBytes, &args.weight_scale, full, 0,
                              (n0 / kSm100AtomRows + i) * args.atoms + s * S::kAtoms);
        }
      } else {
        const int r = (s - args.k_stages) * kSm100StageRanks;
        load_box<S::kGroup>(act, &args.lora_act, full, r, m_tile * 128);
        load_box<S::kGroup>(weight, &args.lora_up, full, r, w_row);
      }
      main.advance(stage);
    }
  }
  // No commit may be on its way to a CTA that has left.
  for (int s = 0; s < args.stages; ++s) {
    main.wait_empty(stage);
    main.advance(stage);
  }
}

// ---- mma ----

// A stage's scale factors to the columns of slot `scales`: X's atoms, then W's with those of all its
// row tiles side by side. Copies and MMAs of a CTA or pair execute in the order of issue.
template <class S>
__device__ __forceinline__ void copy_stage_scales(const GemmArgs& args, uint32_t smem, int slot,
                                                  uint32_t scales) {
  const uint32_t act = smem + args.off_act_scale + slot * S::kActScaleBytes;
  const uint32_t weight = smem + args.off_weight_scale + slot * S::kWeightScaleBytes;
#pragma unroll
  for (int atom = 0; atom < S::kAtoms; ++atom) {
    copy_scales<S::kGroup>(scales + atom * kSm100AtomColumns,
                           Sm100ScaleDescriptor(act + atom * kSm100AtomBytes));
#pragma unroll
    for (int i = 0; i < S::kWeightTiles; ++i) {
      copy_scales<S::kGroup>(
          scales + (S::kAtoms + atom * S::kWeightTiles + i) * kSm100AtomColumns,
          Sm100ScaleDescriptor(weight + (i * S::kAtoms + atom) * kSm100AtomBytes));
    }
  }
}

template <class S>
__device__ __forceinline__ void mma(const GemmArgs& args, uint32_t smem, uint32_t tmem,
                                    const Ring& main, const Ring& accumulators, int group,
                                    int groups) {
  const uint32_t low_rank = Sm100F16Instruction(S::kTileM, S::kTileN, args.lora_bf16 != 0);
  RingState stage, acc;
  uint32_t scale_slot = 0;
  for (int index = group; index < args.m_tiles * args.n_tiles; index += groups) {
    // A tile of 64 weight rows may be the second half of an atom.
    const uint32_t half =
        S::kTileN < kSm100AtomRows ? tile_at<S>(args, index).n * S::kTileN % kSm100AtomRows / 32 : 0;
    accumulators.wait_empty(acc);
    fence_after();
    uint32_t d = tmem + acc.slot * S::kTileN;
    for (int s = 0; s < args.k_stages; ++s) {
      main.wait_full(stage);
      fence_after();
      const uint32_t scales = tmem + S::kScaleBase + scale_slot * S::kScaleColumns;
      copy_stage_scales<S>(args, smem, stage.slot, scales);
      const uint64_t x =
          Sm100OperandDescriptor(smem + args.off_act + stage.slot * S::kActBytes);
      const uint64_t w =
          Sm100OperandDescriptor(smem + args.off_weight + stage.slot * S::kWeightBytes);
#pragma unroll
      for (int i = 0; i < kSm100Steps; ++i) {
        // Blocks before this step: whole atoms, then a place in the atom.
        constexpr int kStepBlocks = kSm100StepK / S::kBlock;
        const int atom = i * kStepBlocks / kSm100AtomBlocks;
        const uint32_t instruction = Sm100ScaledInstruction(
            S::kTileM, S::kTileN, S::kBlock, i * kStepBlocks % kSm100AtomBlocks);
        mma_scaled<S::kGroup, S::kBlock>(
            d, x + 2 * i, w + 2 * i, instruction, scales + atom * kSm100AtomColumns,
            scales + (S::kAtoms + atom * S::kWeightTiles) * kSm100AtomColumns + half,
            s > 0 || i > 0);
      }
      scale_slot ^= 1;
      commit<S::kGroup>(main.empty(stage));
      main.advance(stage);
    }
    commit<S::kGroup>(accumulators.full(acc));
    accumulators.advance(acc);

    if (args.lora_stages == 0) continue;
    accumulators.wait_empty(acc);
    fence_after();
    d = tmem + acc.slot * S::kTileN;
    for (int s = 0; s < args.lora_stages; ++s) {
      main.wait_full(stage);
      fence_after();
      const uint64_t l =
          Sm100OperandDescriptor(smem + args.off_act + stage.slot * S::kActBytes);
      const uint64_t u =
          Sm100OperandDescriptor(smem + args.off_weight + stage.slot * S::kWeightBytes);
#pragma unroll
      for (int i = 0; i < kSm100Steps; ++i) {
        mma_f16<S::kGroup>(d, l + 2 * i, u + 2 * i, low_rank, s > 0 || i > 0);
      }
      commit<S::kGroup>(main.empty(stage));
      main.advance(stage);
    }
    commit<S::kGroup>(accumulators.full(acc));
    accumulators.advance(acc);
  }
}

// ---- store ----

// Where a store warp stands: lanes are rows, half of the tile's columns.
struct StorePlace {
  int lane, quarter, half;

  __device__ __forceinline__ StorePlace()
      : lane(threadIdx.x % 32), quarter(threadIdx.x / 32 % 4), half(threadIdx.x / 128) {}
};

// The next accumulator, and back to the MMA's thread in the leader as soon as it is in registers.
template <class S, bool kAdd>
__device__ __forceinline__ void drain(uint32_t tmem, const Ring& accumulators, RingState& acc,
                                      const StorePlace& at, float (&v)[S::kWarpColumns]) {
  accumulators.wait_full(acc);
  fence_after();
  const uint32_t from = tmem + (static_cast<uint32_t>(at.quarter * 32) << 16) +
                        acc.slot * S::kTileN + at.half * S::kWarpColumns;
  __syncwarp();
  if constexpr (kAdd) {
#pragma unroll
    for (int c = 0; c < S::kWarpColumns; c += 16) {
      uint32_t low_rank[16];  // v leaves few registers
      tmem_load<16>(from + c, low_rank);
      wait_loads();
#pragma unroll
      for (int i = 0; i < 16; ++i) v[c + i] = __fadd_rn(v[c + i], __uint_as_float(low_rank[i]));
    }
  } else {
    uint32_t raw[S::kWarpColumns];
#pragma unroll
    for (int c = 0; c < S::kWarpColumns; c += 32) tmem_load<32>(from + c, raw + c);
    wait_loads();
#pragma unroll
    for (int i = 0; i < S::kWarpColumns; ++i) v[i] = __uint_as_float(raw[i]);
  }
  fence_before();
  __syncwarp();
  if constexpr (S::kGroup == 1) {
    mbarrier_arrive_if(accumulators.empty(acc), at.lane == 0);
  } else {
    mbarrier_arrive_cluster_if(accumulators.empty(acc), 0, at.lane == 0);
  }
  accumulators.advance(acc);
}

// channel_scale and bias of this half's columns to shared memory, where every lane reads them; what is
// absent or past N is neutral.
template <class S>
__device__ __forceinline__ void load_vectors(const GemmArgs& args, uint32_t aux, int n0, int half) {
  const int column = half * S::kWarpColumns + threadIdx.x % 128;
  const bool mine = threadIdx.x % 128 < S::kWarpColumns;
  const int n = n0 + column;
  float scale = 1.0f, bias = -0.0f;  // -0 + v is v, also for -0
  if (mine && n < args.n) {
    if (args.channel_scale != nullptr) scale = __ldg(args.channel_scale + n);
    if (args.bias != nullptr) bias = __ldg(args.bias + n);
  }
  named_barrier_sync(1 + half, 128);  // the last tile's are no longer read
  if (mine) {
    store_shared_u32(aux + column * 4, __float_as_uint(scale));
    store_shared_u32(aux + (S::kTileN + column) * 4, __float_as_uint(bias));
  }
  named_barrier_sync(1 + half, 128);
}

// Two values in the result's type, `lo` at the lower address.
__device__ __forceinline__ uint32_t pack_result(float lo, float hi, int bf16) {
  if (bf16) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<const uint32_t&>(v);
  }
  const __half2 v = __floats2half2_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(v);
}

// Waits until the store slot to be used next has been read.
__device__ __forceinline__ void wait_store_slot(int slots) {
  switch (slots) {
    case 1:
      return store_wait_read<0>();
    case 2:
      return store_wait_read<1>();
    case 3:
      return store_wait_read<2>();
    default:
      return store_wait_read<3>();
  }
}

// 32 columns of the warp's rows through a store slot: rows of 64 bytes, 64-byte swizzle.
__device__ __forceinline__ void store_box(const GemmArgs& args, uint32_t slot, int slots, int lane,
                                          int row0, int column, const uint32_t (&words)[16]) {
  if (lane == 0) wait_store_slot(slots);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_shared_v4(slot + lane * 64 + ((i ^ (lane / 2 % 4)) << 4), words[4 * i],
                    words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    tma_store_2d(&args.out, slot, column, row0);
    store_commit();
  }
}

// The same where the copy engine cannot address the rows.
__device__ __forceinline__ void store_row(const GemmArgs& args, int row, int column,
                                          const uint32_t (&words)[16]) {
  if (row >= args.m) return;
  uint16_t* out = static_cast<uint16_t*>(args.y) + static_cast<int64_t>(row) * args.n + column;
#pragma unroll
  for (int i = 0; i < kStoreColumns; ++i) {
    if (column + i < args.n) out[i] = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
  }
}

template <class S>
__device__ __forceinline__ void store(const GemmArgs& args, uint32_t smem, uint32_t tmem,
                                      const Ring& accumulators, int group, int groups, int rank) {
  const StorePlace at;
  float alpha = args.act_global_scale != nullptr ? __ldg(args.act_global_scale) : 1.0f;
  if (args.weight_global_scale != nullptr) alpha = __fmul_rn(alpha, __ldg(args.weight_global_scale));
  const uint32_t aux = smem + args.off_aux;
  // Store stages alternate between the halves.
  const int slots = min((args.store_stages + 1 - at.half) / 2, kMaxStoreSlots);
  int slot = 0;
  RingState acc;
  for (int index = group; index < args.m_tiles * args.n_tiles; index += groups) {
    const TileIndex tile = tile_at<S>(args, index);
    const int n0 = tile.n * S::kTileN;
    const int row0 = tile.m * S::kTileM + rank * 128 + at.quarter * 32;
    load_vectors<S>(args, aux, n0, at.half);

    float v[S::kWarpColumns];
    drain<S, false>(tmem, accumulators, acc, at, v);
    const uint32_t vectors = aux + at.half * S::kWarpColumns * 4;
#pragma unroll
    for (int c = 0; c < S::kWarpColumns; c += 4) {
      const float4 scale = load_shared_f4(vectors + c * 4);
      v[c] = __fmul_rn(__fmul_rn(v[c], alpha), scale.x);
      v[c + 1] = __fmul_rn(__fmul_rn(v[c + 1], alpha), scale.y);
      v[c + 2] = __fmul_rn(__fmul_rn(v[c + 2], alpha), scale.z);
      v[c + 3] = __fmul_rn(__fmul_rn(v[c + 3], alpha), scale.w);
    }
    if (args.lora_stages > 0) drain<S, true>(tmem, accumulators, acc, at, v);

#pragma unroll
    for (int c = 0; c < S::kWarpColumns; c += kStoreColumns) {
      uint32_t words[16];
#pragma unroll
      for (int i = 0; i < kStoreColumns; i += 4) {
        const float4 bias = load_shared_f4(vectors + (S::kTileN + c + i) * 4);
        words[i / 2] = pack_result(__fadd_rn(v[c + i], bias.x), __fadd_rn(v[c + i + 1], bias.y),
                                   args.out_bf16);
        words[i / 2 + 1] = pack_result(__fadd_rn(v[c + i + 2], bias.z),
                                       __fadd_rn(v[c + i + 3], bias.w), args.out_bf16);
      }
      const int column = n0 + at.half * S::kWarpColumns + c;
      if (args.tma_store) {
        const uint32_t stage = smem + args.off_store + (2 * slot + at.half) * 4 * kStoreBytes;
        store_box(args, stage + at.quarter * kStoreBytes, slots, at.lane, row0, column, words);
        if (++slot == slots) slot = 0;
      } else {
        store_row(args, row0 + at.lane, column, words);
      }
    }
  }
  // The slots must outlive the copy engine's reads.
  if (at.lane == 0) store_wait_read<0>();
}

// ---- kernel ----

template <int kGroup, int kTileN, int kBlock>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ GemmArgs args) {
  using S = Shape<kGroup, kTileN, kBlock>;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  const int warp = threadIdx.x / 32;
  const int rank = kGroup == 1 ? 0 : static_cast<int>(cluster_rank());
  const int group = blockIdx.x / kGroup;
  const int groups = gridDim.x / kGroup;
  const Ring main(smem + args.off_barriers, args.stages, watch(args, RingName::kSm100Main));
  const Ring accumulators(smem + args.off_barriers + 16 * args.stages, S::kAccumulators,
                          watch(args, RingName::kSm100Accumulators));
  const uint32_t tmem_address = smem + args.off_barriers + 16 * (args.stages + S::kAccumulators);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.act);
    prefetch_tensor_map(&args.weight);
    main.init(1);  // by a commit
    accumulators.init(kStoreWarps * kGroup);
    fence_mbarrier_init();
  }
  if (warp == kMmaWarp) tmem_alloc<kGroup>(tmem_address, kSm100Columns);
  fence_before();
  __syncthreads();
  // The peer's copies and arrivals may reach this CTA as soon as the peer passes this point.
  if constexpr (kGroup > 1) cluster_sync();
  fence_after();
  const uint32_t tmem = load_shared_u32(tmem_address);
  grid_dependency_wait();

  if (warp < kStoreWarps) {
    claim_registers<kStoreRegisters>();
    store<S>(args, smem, tmem, accumulators, group, groups, rank);
  } else {
    release_registers<kIssueRegisters>();
    if (warp == kLoadWarp) {
      if (elect_one()) load<S>(args, smem, main, group, groups, rank);
    } else if (warp == kMmaWarp && rank == 0) {
      if (elect_one()) mma<S>(args, smem, tmem, main, accumulators, group, groups);
    }
  }
  __syncwarp();
  fence_before();
  __syncthreads();
  // The pair's MMAs and the peer's arrivals are over only when both are here.
  if constexpr (kGroup > 1) cluster_sync();
  fence_after();
  if (warp == kMmaWarp) tmem_free<kGroup>(tmem, kSm100Columns);
}

}  // namespace jax_w4a4::sm100
