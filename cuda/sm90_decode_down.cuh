// LoRA-down in the decode GEMM's launch: the CTAs ahead of the GEMM's divide K. All but the last leave their
// sums in memory, and the last adds those to its own, in the order of the CTAs, and leaves lora_act. What
// is not there yet is told from what is by its bits: the launch before fills both with kNotYet, a NaN that no
// sum is. Every CTA waits for such of lower numbers only: as CTAs are dispatched in the order of
// their numbers, which was seen and is not documented, the launch ends on any number of SMs.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "sm90_decode.h"
#include "sm90_down_v2.cuh"
#include "sm90_ptx.cuh"
#include "sm90_watch.cuh"

namespace jax_w4a4::sm90 {

constexpr uint32_t kNotYet = 0xFFFFFFFF;

struct DownAheadArgs : DownV2Args {
  float* sums;  // (kDownAheadCtas - 1, M, R)
  int ctas;     // kDownAheadCtas, or 0: lora_act is there already
};

__device__ __forceinline__ bool is_there(const uint4& v) {
  return v.x != kNotYet && v.y != kNotYet && v.z != kNotYet && v.w != kNotYet;
}

// The launch before: a token's row of all that is to come, by one warp.
__device__ __forceinline__ void fill_not_yet(float* sums, __nv_bfloat16* lora_act, int m, int rank, int token,
                                             int lane) {
  if (lane >= rank) return;
#pragma unroll
  for (int part = 0; part < kDownAheadCtas - 1; ++part) {
    sums[(part * m + token) * rank + lane] = __uint_as_float(kNotYet);
  }
  if (lane < rank / 2) reinterpret_cast<uint32_t*>(lora_act + token * rank)[lane] = kNotYet;
}

__device__ __forceinline__ void add_sums(float4& sum, const uint4& bits) {
  sum.x += __uint_as_float(bits.x);
  sum.y += __uint_as_float(bits.y);
  sum.z += __uint_as_float(bits.z);
  sum.w += __uint_as_float(bits.w);
}

// One of the CTAs ahead of the GEMM's, with the roles of sm90_down_v2.
template <int kTokens, int kThreads, int kLoadWarp>
__device__ __forceinline__ void down_ahead(const DownAheadArgs& args, uint32_t smem) {
  constexpr int kProjectThreads = 128;
  constexpr int kPitch = kDownPitch<1>;
  const int part = blockIdx.x;
  const int slice = (args.steps + kDownAheadCtas - 1) / kDownAheadCtas;
  const int first_step = part * slice;
  const int steps = max(0, min(slice, args.steps - first_step));
  const Ring ring(smem + args.off_barriers, args.stages, watch(args, RingName::kDecodeDown));
  const int thread = threadIdx.x;
  const int warp = __shfl_sync(0xFFFFFFFFu, thread / 32, 0);
  if (warp == kLoadWarp) {
    if (elect_one()) {
      prefetch_tensor_map(&args.x);
      prefetch_tensor_map(&args.lora_down);
      ring.init(kProjectThreads / 32);
      fence_mbarrier_init();
    }
    __syncwarp();
  } else {
    // Boxes have M rows: rows past the matrix would take the copy engine as long as many others. The MMA reads
    // them.
    const int missing = (kTokens - args.m) * 128 / 16;
    const int first = warp < kLoadWarp ? thread : thread - 32;
    for (int slot = 0; slot < args.stages; ++slot) {
      const uint32_t at = smem + slot * (kDownXBytes<kTokens> + kDownRankBytes) + args.m * 128;
      for (int i = first; i < missing; i += kThreads - 32) {
        store_shared_v4(at + i * 16, make_uint4(0, 0, 0, 0));
      }
    }
    fence_async_proxy();
  }
  __syncthreads();
  float acc[1][kTokens / 2];
  if (thread < kProjectThreads) {
    project<1, 1, kTokens>(smem, ring, steps, 0, thread % 32, acc);
  } else if (warp == kLoadWarp) {
    if (elect_one()) load_down<1, kTokens>(args, smem, ring, {0, args.m, 0}, args.m, first_step, steps);
    __syncwarp();
  }
  // The sums are laid over the ring. All threads, though four warps would do: behind a barrier of some,
  // racecheck takes the next one of all for none.
  __syncthreads();
  if (thread < kProjectThreads) store_partial<1, 1, kTokens>(smem, 0, warp, thread % 32, acc);
  __syncthreads();
  // Until then the launch before may be filling what follows is written to.
  grid_dependency_wait();
  // Four ranks of a token at a time.
  for (int i = thread; i < kDownAheadRank / 4 * args.m; i += kThreads) {
    const int token = i / (kDownAheadRank / 4);
    const int rank = i % (kDownAheadRank / 4) * 4;
    if (rank >= args.rank) continue;
    uint4 own = make_uint4(0, 0, 0, 0);
    if (steps > 0) own = load_shared_v4(smem + (token * kPitch + rank) * 4);
    const int place = token * args.rank + rank;
    const int all = args.m * args.rank;
    if (part < kDownAheadCtas - 1) {
      store_relaxed_v4(args.sums + part * all + place, own);
      continue;
    }
    uint4 others[kDownAheadCtas - 1];
    watched_look(args, RingName::kDecodeLoraAct, [&] {
      bool there = true;
#pragma unroll
      for (int p = 0; p < kDownAheadCtas - 1; ++p) {
        others[p] = load_relaxed_v4(args.sums + p * all + place);
      }
#pragma unroll
      for (const uint4& sums : others) there = there && is_there(sums);
      return there;
    });
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (const uint4& sums : others) add_sums(sum, sums);
    add_sums(sum, own);
    const __nv_bfloat162 lo = __floats2bfloat162_rn(sum.x, sum.y);
    const __nv_bfloat162 hi = __floats2bfloat162_rn(sum.z, sum.w);
    store_relaxed_v2(args.lora_act + place, reinterpret_cast<const uint32_t&>(lo),
                     reinterpret_cast<const uint32_t&>(hi));
  }
}

}  // namespace jax_w4a4::sm90
