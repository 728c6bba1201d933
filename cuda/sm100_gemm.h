// GEMM for Blackwell: what the handlers know of it. The design is described in
// sm100_gemm.cuh.
#ifndef JAX_W4A4_CUDA_SM100_GEMM_H_
#define JAX_W4A4_CUDA_SM100_GEMM_H_

#include <cstdint>

#include "formats.cuh"
#include "launch_result.h"
#include "sm100_layout.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Whether this build has machine code for sm_100a and sm_103a; without it the
// launch functions of this architecture launch nothing (sm100_absent.cc).
extern const bool kBuiltForSm100;

// Fixed by the kernel; a plan must ask for exactly these.
constexpr int kSm100Threads = 384;
constexpr int kSm100StoreBytes = 4 * 32 * 32 * 2;  // of a store stage
// Main ring, accumulators, address of tensor memory.
constexpr int Sm100BarrierBytes(int stages, int tile_n, int block) {
  return 16 * (stages + Sm100Accumulators(tile_n, block)) + 4;
}

// Where the plan put everything: offsets of first stages from the start of dynamic
// shared memory.
struct Sm100GemmSmem {
  int act, weight, act_scale, weight_scale, store, aux, barriers;
  int total_bytes;
};

struct Sm100GemmParams {
  const uint8_t* act;               // (m, k_pad / 2)
  const uint8_t* act_scale;         // atoms, see sm100_layout.h
  const float* act_global_scale;    // (1,) or null
  const void* lora_act;             // (m, rank)
  const uint8_t* weight;            // (n, k_pad / 2)
  const uint8_t* weight_scale;      // atoms
  const float* weight_global_scale;  // (1,) or null
  const void* lora_up;              // (n, rank)
  const float* channel_scale;       // (n,) or null
  const float* bias;                // (n,) or null
  void* out;                        // (m, n)
  int64_t m, n;
  int k_pad;
  int rank;  // 0: no low-rank branch; a multiple of 8
  int stages, store_stages, group_m;
  DType lora_dtype, out_dtype;  // kBf16 or kF16
  Sm100GemmSmem smem;
};

// The kernel for a format (nvfp4 or mxfp4), tile and group of CTAs, null if it was
// not compiled. tile_m is 128 * group.
const void* Sm100GemmKernel(Format format, int group, int tile_n);

// Launches on `stream`. m, n >= 1. `dependent`: the kernel before it on the stream
// writes the activation, both atoms and lora_act, and may still be running.
LaunchResult LaunchSm100Gemm(Format format, int group, int tile_n,
                             const Sm100GemmParams& params, bool dependent,
                             int device, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM100_GEMM_H_
