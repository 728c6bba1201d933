// LoRA-down of the v2 path: lora_act (M, R) = x (M, K) lora_down (K, R), bf16 with fp32 sums.
//
// A cluster takes 72 tokens, or 16 where groups are small (kTokens), and splits K between its CTAs. Roles in
// a CTA:
//   load     one thread fills a ring of 64-k stages: x, then one box of 64 ranks per rank tile
//   project  one or two warpgroups, kTiles rank tiles each: lora_act^T[64 ranks, tokens] += ...
// Partial sums stay in shared memory, over the ring, and are added in rank order by all CTAs of the
// cluster, each a share of the tokens: the same bits in every run. The roles serve sm90_decode_down.cuh too, with
// 64, 128 or 256 tokens.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "sm90_down_v2.h"
#include "sm90_groups.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_ptx.cuh"
#include "sm90_wgmma.cuh"

namespace jax_w4a4::sm90 {

constexpr int kDownTokens = 72;
constexpr int kDownStageK = 64;  // 128 bytes of x
template <int kTokens>
constexpr int kDownXBytes = (kTokens > kDownTokens ? kTokens : kDownTokens) * 128;  // of a slot
constexpr int kDownRankBytes = kDownStageK * 128;  // box of 64 ranks

struct DownV2Args : Watched {
  CUtensorMap x;          // (M, K) bf16, box 64 x kTokens, 128-byte swizzle
  CUtensorMap lora_down;  // (K, R), or (groups, K, R), bf16, box 64 x 64, 128-byte swizzle
  __nv_bfloat16* lora_act;  // (M, R)
  int m, rank;
  int steps;    // 64-k stages of K
  int cluster;  // CTAs
  int stages;   // of the ring
  int off_barriers;
  int groups;         // 0: one weight
  const int* bounds;  // of the groups' rows (sm90_groups.cuh)
};

#define W4A4_STR_72 W4A4_S30 "," W4A4_S4_0(3) ",%34,%35"
#define W4A4_OPS_72(c) W4A4_OPS_64(c), W4A4_D4(c, 32)

// D[64 ranks, tokens] += A[64, 16] B[16, tokens]: A with its ranks contiguous, B with its k.
#define W4A4_DOWN_MMA(N, a_, b_, p_)                                                              \
  __device__ __forceinline__ void down_mma(float (&d)[N / 2], uint64_t a, uint64_t b,             \
                                           bool accumulate) {                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_                                         \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {"               \
                 W4A4_STR_##N "}, %" #a_ ", %" #b_ ", p, 1, 1, 1, 0;\n}\n"                        \
                 : W4A4_OPS_##N("+f")                                                             \
                 : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)));                       \
  }
W4A4_DOWN_MMA(256, 128, 129, 130)
W4A4_DOWN_MMA(128, 64, 65, 66)
W4A4_DOWN_MMA(72, 36, 37, 38)
W4A4_DOWN_MMA(64, 32, 33, 34)
W4A4_DOWN_MMA(16, 8, 9, 10)
#undef W4A4_DOWN_MMA

__device__ __forceinline__ float4 load_cluster_f4(uint32_t address, uint32_t rank) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

struct DownTile {
  int m0, end;  // first token, and the last one's successor
  int group;    // -1: there is no such tile
};

// Token tile `index`; one warp.
template <int kTokens>
__device__ __forceinline__ DownTile down_tile(const DownV2Args& args, int index, int lane) {
  if (args.groups == 0) return {index * kTokens, args.m, 0};
  DownTile mine = {0, 0, -1};
  walk_groups(args.bounds, args.groups, kTokens, lane,
              [&](int group, int first, int begin, int end) {
                const int m0 = begin + (index - first) * kTokens;
                if (index >= first && m0 < end) mine = {m0, end, group};
              });
  const uint32_t found = __ballot_sync(0xFFFFFFFFu, mine.group >= 0);
  const int lane_with = found == 0 ? 0 : 31 - __clz(found);
  return {__shfl_sync(0xFFFFFFFFu, mine.m0, lane_with),
          __shfl_sync(0xFFFFFFFFu, mine.end, lane_with),
          __shfl_sync(0xFFFFFFFFu, mine.group, lane_with)};
}

// ---- roles ----

// `step` into a slot whose barrier is armed for it.
template <int kRankTiles, int kTokens>
__device__ __forceinline__ void load_down_step(const DownV2Args& args, uint32_t slot, uint32_t full,
                                               const DownTile& tile, int step) {
  tma_load_2d(slot, &args.x, full, step * kDownStageK, tile.m0);
#pragma unroll
  for (int t = 0; t < kRankTiles; ++t) {
    const uint32_t down = slot + kDownXBytes<kTokens> + t * kDownRankBytes;
    if (args.groups > 0) {
      tma_load_3d(down, &args.lora_down, full, t * 64, step * kDownStageK, tile.group);
    } else {
      tma_load_2d(down, &args.lora_down, full, t * 64, step * kDownStageK);
    }
  }
}

template <int kRankTiles, int kTokens>
constexpr uint32_t kDownSlotBytes = kDownXBytes<kTokens> + kRankTiles * kDownRankBytes;

// `rows`: of a box of x. `stage`: where the ring stands at `first`.
template <int kRankTiles, int kTokens>
__device__ __forceinline__ void load_down(const DownV2Args& args, uint32_t smem, const Ring& ring,
                                          const DownTile& tile, int rows, int first, int steps,
                                          RingState stage = {}) {
  for (int step = first; step < first + steps; ++step) {
    const uint32_t full = ring.acquire(stage, rows * 128 + kRankTiles * kDownRankBytes);
    load_down_step<kRankTiles, kTokens>(args, smem + stage.slot * kDownSlotBytes<kRankTiles, kTokens>, full,
                                        tile, step);
    ring.advance(stage);
  }
}

// MMAs of one stage are in flight while the next one's are issued; slots are released one behind.
template <int kRankTiles, int kTiles, int kTokens>
__device__ __forceinline__ void project(uint32_t smem, const Ring& ring, int steps, int group,
                                        uint32_t lane, float (&acc)[kTiles][kTokens / 2]) {
  RingState stage;
  int previous = 0;
  for (int step = 0; step < steps; ++step) {
    ring.wait_full(stage);
    const uint32_t slot = smem + stage.slot * kDownSlotBytes<kRankTiles, kTokens>;
    const uint64_t x = matrix_descriptor<128>(slot);
    const uint32_t down = slot + kDownXBytes<kTokens> + group * kTiles * kDownRankBytes;
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kDownStageK / 16; ++s) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        // 16 k are 16 rows of 128 bytes of lora_down and 32 bytes of each row of x.
        const uint64_t a = nmajor_descriptor<128>(down + t * kDownRankBytes + s * 2048, 0);
        down_mma(acc[t], a, x + 2 * s, step > 0 || s > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    ring.release<1>(previous, lane, step > 0);
    previous = stage.slot;
    ring.advance(stage);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) pin(acc[t]);
}

// Floats of a token's partial sums; the pad keeps a quad's tokens in different banks.
template <int kRankTiles>
constexpr int kDownPitch = 64 * kRankTiles + 4;

template <int kRankTiles, int kTiles, int kTokens>
__device__ __forceinline__ void store_partial(uint32_t smem, int group, int warp, uint32_t lane,
                                              const float (&acc)[kTiles][kTokens / 2]) {
  constexpr int kPitch = kDownPitch<kRankTiles>;
  const uint32_t at =
      smem + (lane % 4 * 2 * kPitch + group * kTiles * 64 + warp * 16 + lane / 4) * 4;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_shared_u32(at + ((8 * j + i % 2) * kPitch + t * 64 + i / 2 * 8) * 4,
                         __float_as_uint(acc[t][4 * j + i]));
      }
    }
  }
}

// Four ranks of a token at a time, with what all CTAs have of them on its way at once.
template <int kRankTiles, int kTokens>
__device__ __forceinline__ void add_partials(const DownV2Args& args, uint32_t smem,
                                             const DownTile& tile, int rank, int active, int thread,
                                             int threads) {
  const int quads = args.rank / 4;
  const int share = (kTokens + args.cluster - 1) / args.cluster;
  const int first = rank * share;
  const int last = min(min(first + share, kTokens), tile.end - tile.m0);
  for (int i = thread; i < (last - first) * quads; i += threads) {
    const int token = first + i / quads;
    const int r = i % quads * 4;
    float4 part[kDownV2MaxCluster];
#pragma unroll
    for (int peer = 0; peer < kDownV2MaxCluster; ++peer) {
      // Those that there are not read the last one again, as a branch would wait for what came before it.
      part[peer] = load_cluster_f4(smem + (token * kDownPitch<kRankTiles> + r) * 4, min(peer, active - 1));
    }
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int peer = 0; peer < kDownV2MaxCluster; ++peer) {
      if (peer >= active) continue;
      sum.x += part[peer].x;
      sum.y += part[peer].y;
      sum.z += part[peer].z;
      sum.w += part[peer].w;
    }
    const __nv_bfloat162 out[2] = {__floats2bfloat162_rn(sum.x, sum.y),
                                   __floats2bfloat162_rn(sum.z, sum.w)};
    __nv_bfloat16* to = args.lora_act + static_cast<int64_t>(tile.m0 + token) * args.rank + r;
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(out);
  }
}

// kGroups warpgroups with kTiles tiles of 64 ranks each; one more warp loads.
template <int kGroups, int kTiles, int kTokens>
__global__ void __launch_bounds__(128 * kGroups + 32, 1)
    down_v2_kernel(const __grid_constant__ DownV2Args args) {
  constexpr int kRankTiles = kGroups * kTiles;
  constexpr int kThreads = 128 * kGroups;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  // The quantizer needs nothing from here and may run beside this launch.
  grid_dependency_launch();
  const int rank = static_cast<int>(cluster_rank());
  const int slice = (args.steps + args.cluster - 1) / args.cluster;
  const int first = rank * slice;
  const int steps = max(0, min(slice, args.steps - first));
  const int active = (args.steps + slice - 1) / slice;
  const Ring ring(smem + args.off_barriers, args.stages, watch(args, RingName::kDown));
  const DownTile tile = down_tile<kTokens>(args, blockIdx.x / args.cluster, threadIdx.x % 32);
  if (tile.group < 0) return;  // so for the whole cluster
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.x);
    prefetch_tensor_map(&args.lora_down);
    ring.init(4 * kGroups);
    fence_mbarrier_init();
  }
  __syncthreads();

  const int thread = threadIdx.x;
  if (thread < kThreads) {
    float acc[kTiles][kTokens / 2];
    const int group = thread / 128;
    project<kRankTiles, kTiles, kTokens>(smem, ring, steps, group, thread % 32, acc);
    // Both warpgroups are through with the ring.
    named_barrier_sync(1, kThreads);
    if (steps > 0) {
      store_partial<kRankTiles, kTiles, kTokens>(smem, group, thread / 32 % 4, thread % 32, acc);
    }
  } else {
    if (thread == kThreads) load_down<kRankTiles, kTokens>(args, smem, ring, tile, kTokens, first, steps);
    __syncwarp();
  }
  cluster_sync();
  if (thread < kThreads) {
    add_partials<kRankTiles, kTokens>(args, smem, tile, rank, active, thread, kThreads);
  }
  // Peers read this CTA's partial sums until they are through.
  cluster_sync();
}

}  // namespace jax_w4a4::sm90
