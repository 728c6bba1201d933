// Activations of the decode GEMM: x (M, K) into the GEMM's layout, a CTA per token, and beside it in the
// same launch lora_act (M, R) = x lora_down (K, R) with fp32 sums. All is latency here: the launch is
// small enough to leave room on every SM for the GEMM's CTA, which starts early and asks for its weights.
//
// LoRA-down: a cluster of eight CTAs takes 16 tokens and 32 ranks and divides K. A warp takes 32 k at a
// time from L2 into fragments of mma.sync; a lane's eight k of a token, and the same k of four ranks,
// are what it reads at once, so k and ranks are permuted, on both sides and in the result. Sums go to
// shared memory, are added in the order of the warps, pushed to one CTA of the cluster per token pair,
// and added there in the order of the CTAs: the same bits in every run.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "mma.cuh"
#include "sm90_decode_quantize.h"
#include "sm90_ptx.cuh"
#include "sm90_quantize_v2.cuh"

namespace jax_w4a4::sm90 {

constexpr int kFewWarps = 8;   // of a CTA that share LoRA-down
constexpr int kFewUnit = 32;   // k of a warp at a time
constexpr int kFewPitch = kDecodeDownRanks + 4;  // floats
constexpr int kFewSums = kDecodeDownTokens * kDecodeDownRanks;
constexpr int kFewShare = kFewSums / kDecodeDownCluster;
constexpr uint32_t kFewBarrier = 2;

struct FewDownArgs {
  const __nv_bfloat16* x;          // (M, K)
  const __nv_bfloat16* lora_down;  // (K, R)
  __nv_bfloat16* lora_act;         // (M, R)
  int rank;
  int rank_tiles;
  int ctas;  // that do LoRA-down, whole clusters; the others quantize
};

struct FewDownSmem {
  float sums[kFewWarps][kDecodeDownTokens * kFewPitch];
  float shares[kDecodeDownCluster][kFewShare];
};

// ---- LoRA-down ----

struct DownFragments {
  uint4 a[2];    // rows g and g + 8 of x, eight k
  uint2 b[8];    // those k of lora_down, four ranks
};

__device__ __forceinline__ uint2 load_nc_v2(const void* p) {
  return __ldg(reinterpret_cast<const uint2*>(p));
}

__device__ __forceinline__ void load_down(const QuantizeV2Args& args, const FewDownArgs& down, int k,
                                          int token, int rank, DownFragments& f) {
  const bool inside = k < args.k;  // eight at a time: K is a multiple of 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    f.a[h] = make_uint4(0, 0, 0, 0);
    if (inside && token + 8 * h < args.m) {
      f.a[h] = __ldg(reinterpret_cast<const uint4*>(
          down.x + static_cast<int64_t>(token + 8 * h) * args.k + k));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    f.b[i] = make_uint2(0, 0);
    if (inside && rank < down.rank) {
      f.b[i] = load_nc_v2(down.lora_down + static_cast<int64_t>(k + i) * down.rank + rank);
    }
  }
}

// Rank j of four: two k of it side by side.
template <int kRank>
__device__ __forceinline__ uint32_t pair_of(const uint2& low, const uint2& high) {
  return kRank < 2 ? prmt(low.x, high.x, kRank % 2 == 0 ? 0x5410 : 0x7632)
                   : prmt(low.y, high.y, kRank % 2 == 0 ? 0x5410 : 0x7632);
}

template <int kRank>
__device__ __forceinline__ void multiply_rank(const DownFragments& f, float (&acc)[4]) {
  MmaBf16(acc, {f.a[0].x, f.a[1].x, f.a[0].y, f.a[1].y}, pair_of<kRank>(f.b[0], f.b[1]),
          pair_of<kRank>(f.b[2], f.b[3]));
  MmaBf16(acc, {f.a[0].z, f.a[1].z, f.a[0].w, f.a[1].w}, pair_of<kRank>(f.b[4], f.b[5]),
          pair_of<kRank>(f.b[6], f.b[7]));
}

__device__ __forceinline__ void multiply_down(const DownFragments& f, float (&acc)[4][4]) {
  multiply_rank<0>(f, acc[0]);
  multiply_rank<1>(f, acc[1]);
  multiply_rank<2>(f, acc[2]);
  multiply_rank<3>(f, acc[3]);
}

// The cluster's 16 tokens and 32 ranks. Threads past the first eight warps meet the cluster's barriers
// only.
__device__ __forceinline__ void down_few(const QuantizeV2Args& args, const FewDownArgs& down,
                                         FewDownSmem& smem) {
  // Peers write into this CTA's memory once it runs. Relaxed: nothing of it is published here.
  cluster_arrive_relaxed();
  const int rank_in_cluster = static_cast<int>(cluster_rank());
  const int tile = blockIdx.x / kDecodeDownCluster;
  const int first_token = tile / down.rank_tiles * kDecodeDownTokens;
  const int first_rank = tile % down.rank_tiles * kDecodeDownRanks;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  if (warp < kFewWarps) {
    float acc[4][4] = {};
    constexpr int kStride = kFewUnit * kFewWarps * kDecodeDownCluster;
    const int token = first_token + g;
    const int rank = first_rank + 4 * g;
    const int begin = kFewUnit * (rank_in_cluster * kFewWarps + warp);
    // Registers hold one unit; the others come to L2 meanwhile. A lane asks for a row of lora_down.
    for (int k = begin + kStride + lane; k < args.k; k += kStride) {
      prefetch_l2(down.lora_down + static_cast<int64_t>(k) * down.rank + first_rank);
    }
#pragma unroll 1
    for (int k = begin; k < args.k; k += kStride) {
      DownFragments f;
      load_down(args, down, k + 8 * q, token, rank, f);
      multiply_down(f, acc);
    }
    // Column c of the MMAs holds ranks 4 c + 0..3, one from each.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* at = &smem.sums[warp][(g + i / 2 * 8) * kFewPitch + 4 * (2 * q + i % 2)];
      *reinterpret_cast<float4*>(at) = make_float4(acc[0][i], acc[1][i], acc[2][i], acc[3][i]);
    }
    named_barrier_sync(kFewBarrier, 32 * kFewWarps);
  }
  cluster_wait();
  if (warp < kFewWarps) {
    // Two neighbouring sums per thread; a warp's are those of one CTA.
    const int at = 2 * threadIdx.x;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) {
      const float2 v = *reinterpret_cast<const float2*>(
          &smem.sums[w][at / kDecodeDownRanks * kFewPitch + at % kDecodeDownRanks]);
      sum.x += v.x;
      sum.y += v.y;
    }
    static_assert(kFewShare == 64 && kFewWarps == kDecodeDownCluster);
    store_cluster_f2(smem_address(&smem.shares[rank_in_cluster][2 * lane]), warp, sum);
  }
  cluster_sync();
  if (warp == 0) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int peer = 0; peer < kDecodeDownCluster; ++peer) {
      const float2 v = *reinterpret_cast<const float2*>(&smem.shares[peer][2 * lane]);
      sum.x += v.x;
      sum.y += v.y;
    }
    const int at = rank_in_cluster * kFewShare + 2 * lane;
    const int token = first_token + at / kDecodeDownRanks;
    const int rank = first_rank + at % kDecodeDownRanks;
    if (token < args.m && rank < down.rank) {
      *reinterpret_cast<__nv_bfloat162*>(
          down.lora_act + static_cast<int64_t>(token) * down.rank + rank) =
          __floats2bfloat162_rn(sum.x, sum.y);
    }
  }
}

// ---- kernel ----

// CTAs of 256 threads that an SM's registers must have room for: one lies beside the GEMM's CTA.
template <Source kSource, int kChunks, int kWarps>
constexpr int kFewBlocks = kWarps > 8 ? 1 : kSource == Source::kPlain && kChunks <= 4 ? 4 : 2;

template <GemmV2Path kPath, Source kSource, int kChunks, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, (kFewBlocks<kSource, kChunks, kWarps>))
    decode_quantize_kernel(const __grid_constant__ QuantizeV2Args args,
                           const __grid_constant__ FewDownArgs down) {
  __shared__ FewDownSmem smem;
  __shared__ uint32_t slots[kWarps];
  grid_dependency_launch();
  if (static_cast<int>(blockIdx.x) < down.ctas) {
    down_few(args, down, smem);
    return;
  }
  const int token = blockIdx.x - down.ctas;
  if (token >= args.m) return;
  const Place at = {static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32), slots,
                    1};
  quantize_token<kPath, kSource, kChunks, kWarps>(args, args, token, at);
}

}  // namespace jax_w4a4::sm90
