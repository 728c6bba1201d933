// LoRA-down in the decode GEMM's launch: the CTAs ahead of the GEMM's divide K. All but the last leave their
// sums in memory, and the last adds those to its own, in the order of the CTAs, and leaves lora_act. What
// is not there yet is told from what is by its bits: the launch before fills both with kNotYet, a NaN that no
// sum is. Of more than 256 tokens each tile has such CTAs of its own, one tile's behind the other's. Every CTA
// waits for such of lower numbers only: as CTAs are dispatched in the order of
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
  int ctas;     // kDownAheadCtas for each group of tokens, or 0: lora_act is there already
  int box_rows;  // of x
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
  const int part = blockIdx.x % kDownAheadCtas;
  const int m0 = blockIdx.x / kDownAheadCtas * kTokens;
  const int m = min(args.m - m0, kTokens);
  const int slice = (args.steps + kDownAheadCtas - 1) / kDownAheadCtas;
  const int first_step = part * slice;
  const int steps = max(0, min(slice, args.steps - first_step));
  const Ring ring(smem + args.off_barriers, args.stages, watch(args, RingName::kDecodeDown));
  const int thread = threadIdx.x;
  const int warp = __shfl_sync(0xFFFFFFFFu, thread / 32, 0);
  const DownTile tile = {m0, args.m, 0};
  const int at_once = min(steps, args.stages);
  if (warp == kLoadWarp) {
    // One barrier and what comes to it, then the next: with all barriers first, and everyone told of them, the
    // first copy was asked for 0.6 us later. Nobody waits on a barrier before the one below.
    if (elect_one()) {
#pragma unroll 1
      for (int s = 0; s < at_once; ++s) {
        ring.init_full(s, s + 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(ring.full(s), args.box_rows * 128 + kDownRankBytes);
        load_down_step<1, kTokens>(args, smem + s * kDownSlotBytes<1, kTokens>, ring.full(s), tile,
                                   first_step + s);
      }
    }
    __syncwarp();
  } else if (warp == kLoadWarp + 1) {
    if (elect_one()) {
      ring.init_full(at_once, args.stages);
      ring.init_empty(kProjectThreads / 32);
      fence_mbarrier_init();
    }
    __syncwarp();
  } else {
    // Boxes of one group have M rows: rows past the matrix would take the copy engine as long as many others.
    // The MMA reads them.
    const int missing = (kTokens - args.box_rows) * 128 / 16;
    const int first = warp < kLoadWarp ? thread : thread - 64;
    for (int slot = 0; slot < args.stages; ++slot) {
      const uint32_t at = smem + slot * kDownSlotBytes<1, kTokens> + args.box_rows * 128;
      for (int i = first; i < missing; i += kThreads - 64) {
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
    RingState stage;
    stage.phase = 1;  // the ring is full
    if (elect_one()) {
      load_down<1, kTokens>(args, smem, ring, tile, args.box_rows, first_step + at_once, steps - at_once, stage);
    }
    __syncwarp();
  }
  // The sums are laid over the ring. All threads, though four warps would do: behind a barrier of some,
  // racecheck takes the next one of all for none.
  __syncthreads();
  if (thread < kProjectThreads) store_partial<1, 1, kTokens>(smem, 0, warp, thread % 32, acc);
  __syncthreads();
  // Until then the launch before may be filling what follows is written to.
  grid_dependency_wait();
  // Four ranks of a token at a time, and a batch of them on its way at once: one after the other they took
  // 2.2 us of 256 tokens.
  constexpr int kQuads = kDownAheadRank / 4;
  constexpr int kEach = (kQuads * kTokens + kThreads - 1) / kThreads;
  constexpr int kBatch = kEach < 3 ? kEach : 3;
  const int all = args.m * args.rank;
  struct Item {
    bool used;
    int place;  // in a part's sums
    uint4 own;
  };
  const auto item = [&](int i) {
    const int token = i / kQuads;
    const int rank = i % kQuads * 4;
    const bool used = token < m && rank < args.rank;
    Item it = {used, (m0 + token) * args.rank + rank, make_uint4(0, 0, 0, 0)};
    if (used && steps > 0) it.own = load_shared_v4(smem + (token * kPitch + rank) * 4);
    return it;
  };
  if (part < kDownAheadCtas - 1) {
    for (int i = thread; i < kQuads * m; i += kThreads) {
      const Item it = item(i);
      if (it.used) store_relaxed_v4(args.sums + part * all + it.place, it.own);
    }
    return;
  }
  for (int first = thread; first < kQuads * m; first += kBatch * kThreads) {
    Item items[kBatch];
    uint4 others[kBatch][kDownAheadCtas - 1];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) items[b] = item(first + b * kThreads);
    watched_look(args, RingName::kDecodeLoraAct, [&] {
      bool there = true;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int p = 0; p < kDownAheadCtas - 1; ++p) {
          others[b][p] = make_uint4(0, 0, 0, 0);
          if (items[b].used) others[b][p] = load_relaxed_v4(args.sums + p * all + items[b].place);
        }
      }
#pragma unroll
      for (const auto& parts : others) {
#pragma unroll
        for (const uint4& sums : parts) there = there && is_there(sums);
      }
      return there;
    });
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!items[b].used) continue;
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (const uint4& sums : others[b]) add_sums(sum, sums);
      add_sums(sum, items[b].own);
      const __nv_bfloat162 lo = __floats2bfloat162_rn(sum.x, sum.y);
      const __nv_bfloat162 hi = __floats2bfloat162_rn(sum.z, sum.w);
      store_relaxed_v2(args.lora_act + items[b].place, reinterpret_cast<const uint32_t&>(lo),
                       reinterpret_cast<const uint32_t&>(hi));
    }
  }
}

}  // namespace jax_w4a4::sm90
