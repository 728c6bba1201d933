// Activations of the decode GEMM: x (M, K) into the GEMM's layout, a CTA or more per token, and beside it
// in the same launch lora_act (M, R) = x lora_down (K, R) with fp32 sums. All is latency here, of memory
// and of instructions one after the other: every load goes out at once, and few instructions stand before
// it. A CTA is small enough to lie beside the GEMM's on an SM, which starts early and asks for its weights.
//
// LoRA-down: the CTAs of a cluster take 16 tokens and 16 or 32 ranks and divide K. A warp takes units of 32
// k from L2 into fragments of mma.sync; a lane's eight k of a token, and the same k of two or four ranks, are
// what it reads at once, so k and ranks are permuted, on both sides and in the result. A CTA adds the sums of
// its warps in their order and hands each CTA of the cluster its share, which that one adds in the order
// of the CTAs: the same bits in every run.
//
// Or LoRA-down is left to the GEMM's launch, and all CTAs quantize.
//
// A long token is shared by CTAs that all look through the whole of it and write a part.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "mma.cuh"
#include "sm90_decode_down.cuh"
#include "sm90_decode_quantize.h"
#include "sm90_ptx.cuh"
#include "sm90_quantize_v2.cuh"
#include "sm90_watch.cuh"

namespace jax_w4a4::sm90 {

constexpr int kFewUnit = 32;   // k of a warp at a time
template <int kWarps>
constexpr int kFewRanks = DecodeDownRanks(kWarps);
template <int kWarps>
constexpr int kFewPitch = kFewRanks<kWarps> + 4;  // floats
template <int kWarps>
constexpr int kFewSums = kDecodeDownTokens * kFewRanks<kWarps>;
// Units of a warp that are on their way at once: as many as registers hold, and no more than a share of K
// has where `kChunks` pieces hold a token.
template <int kChunks, int kWarps>
constexpr int kFewUnits = kWarps > 8 ? 1 : kChunks >= 8 ? 4 : 2;

// What the first instructions need lies together: constants come in lines.
struct FewDownArgs : Watched {
  const __nv_bfloat16* x;          // (M, K)
  const __nv_bfloat16* lora_down;  // (K, R)
  __nv_bfloat16* lora_act;         // (M, R)
  float* sums;  // of LoRA-down in the GEMM's launch, to be filled; or null
  int m, k, rank;
  int token_tiles;  // of gridDim.z that do LoRA-down; the CTAs past them quantize
  int log_share;    // of the sums that a CTA finishes
  int log_shared;   // of the CTAs that share a token
};

template <int kWarps>
struct FewDownSmem {
  float sums[kWarps][kDecodeDownTokens * kFewPitch<kWarps>];
  float shares[kFewSums<kWarps>];  // this CTA's share from each CTA of the cluster
  uint64_t arrived;        // mbarrier
};

// ---- LoRA-down ----

template <int kRanks>
struct DownFragments {
  uint4 a[2];                 // rows g and g + 8 of x, eight k
  uint32_t b[8][kRanks / 2];  // those k of lora_down
};

// Where a lane reads: tokens g and g + 8 of x from k on, and kRanks ranks of the rows from k on. Tokens past
// M and ranks past R are the last ones again, whose sums nobody stores.
template <int kRanks>
struct DownPlace {
  const uint8_t* x;
  const uint8_t* down;
  uint32_t second;  // bytes from token g to token g + 8, 0 where the tile has eight
  uint32_t pitch;   // bytes from one k of lora_down to the next
  int k;

  __device__ __forceinline__ DownPlace(const FewDownArgs& args, int first_token, int first_rank,
                                       int unit, int lane) {
    const int g = lane / 4;
    k = kFewUnit * unit + lane % 4 * 8;
    pitch = 2 * args.rank;
    const uint32_t row = 2 * args.k;
    const int token = min(first_token + g, args.m - 1);
    x = reinterpret_cast<const uint8_t*>(args.x) + (token * row + 2 * k);
    second = first_token + 8 < args.m ? (min(first_token + g + 8, args.m - 1) - token) * row : 0;
    down = reinterpret_cast<const uint8_t*>(args.lora_down) +
           (k * pitch + 2 * min(first_rank + kRanks * g, args.rank - kRanks));
  }
  __device__ __forceinline__ void advance(int units) {
    k += kFewUnit * units;
    x += 2 * kFewUnit * units;
    down += kFewUnit * units * pitch;
  }
  __device__ __forceinline__ void load(DownFragments<kRanks>& f) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kRanks == 2) {
        f.b[i][0] = load_nc_u32(down + i * pitch);
      } else {
        const uint2 ranks = load_nc_v2(down + i * pitch);
        f.b[i][0] = ranks.x;
        f.b[i][1] = ranks.y;
      }
    }
    f.a[0] = load_nc_v4(x);
    f.a[1] = make_uint4(0, 0, 0, 0);
    if (second != 0) f.a[1] = load_nc_v4(x + second);
  }
  // The last unit, in which K may end: eight at a time, as K is a multiple of 8.
  __device__ __forceinline__ void load(const FewDownArgs& args, DownFragments<kRanks>& f) const {
    f = {};
    if (k < args.k) load(f);
  }
};

// Rank j of a lane's: two k of it side by side.
template <int kRank, int kRanks>
__device__ __forceinline__ uint32_t pair_of(const DownFragments<kRanks>& f, int k) {
  return prmt(f.b[k][kRank / 2], f.b[k + 1][kRank / 2], kRank % 2 == 0 ? 0x5410 : 0x7632);
}

template <int kRank, int kRanks>
__device__ __forceinline__ void multiply_rank(const DownFragments<kRanks>& f, float (&acc)[4]) {
  MmaBf16(acc, {f.a[0].x, f.a[1].x, f.a[0].y, f.a[1].y}, pair_of<kRank>(f, 0), pair_of<kRank>(f, 2));
  MmaBf16(acc, {f.a[0].z, f.a[1].z, f.a[0].w, f.a[1].w}, pair_of<kRank>(f, 4), pair_of<kRank>(f, 6));
}

// The cluster's tokens and ranks.
template <int kChunks, int kWarps>
__device__ __forceinline__ void down_few(const FewDownArgs& args, FewDownSmem<kWarps>& smem) {
  constexpr int kUnits = kFewUnits<kChunks, kWarps>;
  constexpr int kRanks = kFewRanks<kWarps> / 8;  // of a lane
  using Fragments = DownFragments<kRanks>;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int part = blockIdx.x;  // of K, and rank in the cluster
  const int first_token = kDecodeDownTokens * blockIdx.z;
  const int first_rank = kFewRanks<kWarps> * blockIdx.y;
  // Units of all warps of the cluster, in turn. What is not on its way at once comes to L2 meanwhile, a
  // lane asks for a row.
  const int stride = kWarps * gridDim.x;
  const int unit = part * kWarps + warp;
  const int whole = args.k / kFewUnit;
  DownPlace<kRanks> at(args, first_token, first_rank, unit, lane);
  Fragments f[kUnits];
  const auto load = [&](int unit, Fragments& f) {
    if (unit < whole) {
      at.load(f);
    } else {
      at.load(args, f);
    }
    at.advance(stride);
  };
  const uint32_t arrived = smem_address(&smem.arrived);
  float acc[kRanks][4] = {};
  int next = unit;
#pragma unroll 1
  do {
#pragma unroll
    for (Fragments& fragments : f) {
      load(next, fragments);
      next += stride;
    }
    if (next == unit + kUnits * stride) {
      for (int row = kFewUnit * next + lane; row < args.k; row += kFewUnit * stride) {
        prefetch_l2(args.lora_down + static_cast<int64_t>(row) * args.rank + first_rank);
      }
      if (threadIdx.x == 0) {
        mbarrier_init(arrived, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(arrived, kFewSums<kWarps> * sizeof(float));
      }
      __syncwarp();
      // Peers write into this CTA's memory and count on its barrier once both are there.
      cluster_arrive_relaxed();
    }
#pragma unroll
    for (const Fragments& fragments : f) {
      multiply_rank<0>(fragments, acc[0]);
      multiply_rank<1>(fragments, acc[1]);
      if constexpr (kRanks == 4) {
        multiply_rank<2>(fragments, acc[2]);
        multiply_rank<3>(fragments, acc[3]);
      }
    }
  } while (kFewUnit * next < args.k);
  // Column c of the MMAs holds kRanks ranks from kRanks c on, one from each.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = lane / 4 + i / 2 * 8;
    const int rank = kRanks * (2 * (lane % 4) + i % 2);
    float* to = &smem.sums[warp][token * kFewPitch<kWarps> + rank];
#pragma unroll
    for (int j = 0; j < kRanks; j += 2) {
      *reinterpret_cast<float2*>(to + j) = make_float2(acc[j][i], acc[j + 1][i]);
    }
  }
  __syncthreads();
  cluster_wait();
  // A thread adds two sums beside each other.
  const int first = 2 * threadIdx.x;
  if (first >= kFewSums<kWarps>) return;
  const float* from = &smem.sums[0][first / kFewRanks<kWarps> * kFewPitch<kWarps> +
                                    first % kFewRanks<kWarps>];
  float2 two = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float2 v = *reinterpret_cast<const float2*>(from + w * kDecodeDownTokens * kFewPitch<kWarps>);
    two.x += v.x;
    two.y += v.y;
  }
  const int share = 1 << args.log_share;
  store_cluster_async_f2(
      smem_address(&smem.shares[(part << args.log_share) + (first & (share - 1))]), arrived,
      first >> args.log_share, two);
  if (static_cast<int>(threadIdx.x) >= share) return;
  const int own = (part << args.log_share) + threadIdx.x;
  const int token = first_token + own / kFewRanks<kWarps>;
  const int rank = first_rank + own % kFewRanks<kWarps>;
  watched_wait(args, RingName::kDecodeSums, arrived, 0);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < kFewSums<kWarps>; i += 8 * share) {  // of a cluster of 8 or 16
#pragma unroll
    for (int peer = 0; peer < 8; ++peer) sum += smem.shares[i + peer * share];
  }
  if (token < args.m && rank < args.rank) {
    args.lora_act[token * args.rank + rank] = __float2bfloat16_rn(sum);
  }
}

// ---- quantize ----

// In one of the CTAs that share a token. Pieces past the token's end are zeros: to pass over them would
// cost a branch for each, between which nothing overlaps.
struct SharedPlace : Place {
  int share, shares;  // a power of two

  __device__ __forceinline__ bool writes(int i) const { return (i & (shares - 1)) == share; }
  __device__ __forceinline__ bool writes_scale() const {
    return share == 0 && Place::writes_scale();
  }
};
template <int kWarps>
__device__ __forceinline__ bool past_end(const TokenArgs&, const SharedPlace&, int) {
  return false;
}

// ---- kernel ----

// Threads that an SM's registers must have room for, where a token needs no more than that leaves. Eight
// warps lie beside the GEMM's CTA for few tokens, 96 registers for each of 256 threads beside 64 for each
// of 640; of sixteen there are two CTAs.
template <Source kSource, int kChunks, int kWarps>
constexpr int kFewRegisterThreads =
    kSource == Source::kAny || (kSource == Source::kBf16 ? kChunks * kWarps >= 64 || kWarps > 8
                                                         : kChunks * kWarps > 64)
        ? 32 * kWarps
    : kWarps > 8 ? 1024
                 : 640;

template <GemmV2Path kPath, Source kSource, int kChunks, int kWarps>
__global__ void __launch_bounds__((kFewRegisterThreads<kSource, kChunks, kWarps>), 1)
    decode_quantize_kernel(const __grid_constant__ FewDownArgs down,
                           const __grid_constant__ QuantizeV2Args args) {
  __shared__ FewDownSmem<kWarps> smem;
  __shared__ uint32_t slots[kWarps];
  // At once: the GEMM's CTAs take longer to ask for their weights than these for what they read.
  grid_dependency_launch();
  const int z = static_cast<int>(blockIdx.z) - down.token_tiles;
  if (z < 0) {
    down_few<kChunks>(down, smem);
    return;
  }
  const int index = (z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int token = index >> down.log_shared;
  if (token >= down.m) return;
  const int shares = 1 << down.log_shared;
  const SharedPlace at = {
      {static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32), slots, 1},
      index & (shares - 1),
      shares};
  if (down.sums != nullptr && at.share == 0 && at.part == 0) {
    fill_not_yet(down.sums, down.lora_act, down.m, down.rank, token, at.lane);
  }
  quantize_token<kPath, kSource, kChunks, kWarps>(args, args, token, at);
}

}  // namespace jax_w4a4::sm90
