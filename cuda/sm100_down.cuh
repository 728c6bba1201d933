// LoRA-down for Blackwell: lora_act (M, R) = x (M, K) lora_down (K, R), bf16 with fp32 sums, on mma.sync:
// small beside the product, and free of what only tcgen05 has.
//
// A CTA takes 64 tokens and 64 ranks and all of K. Roles:
//   load     one thread fills a ring of 64-k stages, x rows and lora_down rows of 128 bytes each
//   project  four warps, 16 tokens each
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "mma.cuh"
#include "sm100_down.h"
#include "sm90_pipeline.cuh"
#include "sm90_ptx.cuh"

namespace jax_w4a4::sm100 {

using namespace sm90;

constexpr int kDownStageK = 64;
constexpr int kDownXBytes = kSm100DownTokens * 128;
constexpr int kDownWarps = 4;
constexpr int kDownThreads = 32 * (kDownWarps + 1);

struct DownArgs : Watched {
  CUtensorMap x;          // (M, K) bf16, box 64 x 64, 128-byte swizzle
  CUtensorMap lora_down;  // (K, R) bf16, box 64 x 64, 128-byte swizzle
  __nv_bfloat16* lora_act;  // (M, R)
  int m, rank;
  int steps;   // 64-k stages of K
  int stages;  // of the ring
  int off_barriers;
};

__device__ __forceinline__ void load_down(const DownArgs& args, uint32_t smem, const Ring& ring,
                                          int m0, int r0) {
  RingState stage;
  for (int step = 0; step < args.steps; ++step) {
    const uint32_t full = ring.acquire(stage, kSm100DownStageBytes);
    const uint32_t slot = smem + stage.slot * kSm100DownStageBytes;
    tma_load_2d(slot, &args.x, full, step * kDownStageK, m0);
    tma_load_2d(slot + kDownXBytes, &args.lora_down, full, r0, step * kDownStageK);
    ring.advance(stage);
  }
}

// Address of 16-byte chunk `chunk` of a 128-byte row under the 128-byte swizzle.
__device__ __forceinline__ uint32_t chunk_address(uint32_t base, int row, int chunk) {
  return base + row * 128 + ((chunk ^ row % 8) << 4);
}

// acc[j]: 16 tokens x ranks 8 j .. 8 j + 7, as mma.m16n8k16 leaves them.
__device__ __forceinline__ void project(const DownArgs& args, uint32_t smem, const Ring& ring,
                                        int warp, int lane, float (&acc)[8][4]) {
  RingState stage;
  for (int step = 0; step < args.steps; ++step) {
    ring.wait_full(stage);
    const uint32_t x = smem + stage.slot * kSm100DownStageBytes;
    const uint32_t down = x + kDownXBytes;
#pragma unroll
    for (int k = 0; k < kDownStageK / 16; ++k) {
      uint32_t a[4];
      LoadMatrixX4(a, chunk_address(x, 16 * warp + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        // k 0..7 and 8..15 of ranks 8 j .. 8 j + 7, then of the next eight.
        uint32_t b[4];
        LoadMatrixX4Trans(b, chunk_address(down, 16 * k + lane % 16, j + lane / 16));
        MmaBf16(acc[j], a, b[0], b[1]);
        MmaBf16(acc[j + 1], a, b[2], b[3]);
      }
    }
    __syncwarp();
    ring.release<1>(stage.slot, lane);
    ring.advance(stage);
  }
}

__global__ void __launch_bounds__(kDownThreads)
    down_kernel(const __grid_constant__ DownArgs args) {
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  // The quantizer needs nothing from here and may run beside this launch.
  grid_dependency_launch();
  const int m0 = blockIdx.x * kSm100DownTokens, r0 = blockIdx.y * kSm100DownRanks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Ring ring(smem + args.off_barriers, args.stages, watch(args, RingName::kSm100Down));
  if (threadIdx.x == 0) {
    ring.init(kDownWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warp == kDownWarps) {
    if (lane == 0) load_down(args, smem, ring, m0, r0);
    return;
  }
  float acc[8][4] = {};
  project(args, smem, ring, warp, lane, acc);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int r = r0 + 8 * j + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = m0 + 16 * warp + 8 * i + lane / 4;
      if (token < args.m && r < args.rank) {
        *reinterpret_cast<__nv_bfloat162*>(args.lora_act +
                                           static_cast<int64_t>(token) * args.rank + r) =
            __floats2bfloat162_rn(acc[j][2 * i], acc[j][2 * i + 1]);
      }
    }
  }
}

}  // namespace jax_w4a4::sm100
