// GEMM v1: the simple monolithic kernel. One block owns one output tile; low
// rank, affine and bias are its epilogue.
#ifndef JAX_W4A4_CUDA_SM90_GEMM_V1_H_
#define JAX_W4A4_CUDA_SM90_GEMM_V1_H_

#include <cstdint>

#include "formats.cuh"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these. tile_m is a choice
// among 32, 64 and 128.
constexpr int kGemmTileN = 128;
constexpr int kGemmTileK = 64;
constexpr int kGemmThreads = 256;
constexpr int kGemmStages = 2;
constexpr int kGemmRankChunk = 32;
constexpr int64_t kGemmMaxGridY = 65535;

// Scale groups that one step over K touches (int4; the other formats fold
// their scales into the operands).
W4A4_HD constexpr int GemmScaleGroups(int block) {
  return block < kGemmTileK ? kGemmTileK / block : 1;
}

// Where the plan put everything: offsets from the start of dynamic shared
// memory and bytes per stage.
struct GemmSmem {
  int weight, act, weight_scale, act_scale, lora_up, lora_act, aux;
  int weight_bytes, act_bytes, weight_scale_bytes, act_scale_bytes;
  int total_bytes;
};

struct GemmParams {
  const uint8_t* act;              // (m, k_pad / 2)
  const void* act_scale;           // (m, k_pad / block)
  const float* act_global_scale;   // (1,) or null
  const void* lora_act;            // (m, rank)
  const uint8_t* weight;           // (n, k_pad / 2)
  const void* weight_scale;        // (n, k_pad / block)
  const float* weight_global_scale;  // (1,) or null
  const void* lora_up;             // (n, rank)
  const float* channel_scale;      // (n,) or null
  const float* bias;               // (n,) or null
  void* out;                       // (m, n)
  int64_t m;
  int64_t n;
  int k_pad;
  int block;  // k_pad: one scale per row
  int rank;   // 0: no LoRA
  DType scale_dtype;
  DType lora_dtype;
  DType out_dtype;
  bool is_unsigned;  // int4 activations are 0..15
  GemmSmem smem;
};

// The kernel for a format and tile_m, null if it was not compiled. For
// cudaFuncGetAttributes and cudaFuncSetAttribute.
const void* GemmV1Kernel(Format format, int tile_m);

struct GemmGrid {
  unsigned x, y;
};
GemmGrid GemmV1Grid(int64_t m, int64_t n, int tile_m);

// Launches on `stream` and returns a cudaError_t. m, n >= 1. `dependent`: the
// kernel before it on the stream writes act, act_scale and lora_act and may
// still be running.
int LaunchGemmV1(Format format, int tile_m, const GemmParams& params,
                 bool dependent, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_GEMM_V1_H_
