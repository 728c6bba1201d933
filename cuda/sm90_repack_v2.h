// From the public activation (packed codes and block scales) to what GEMM v2
// reads: for activations that were quantized on their own, and for quantizers
// that write the public layout.
#ifndef JAX_W4A4_CUDA_SM90_REPACK_V2_H_
#define JAX_W4A4_CUDA_SM90_REPACK_V2_H_

#include <cstdint>

#include "formats.cuh"
#include "sm90_gemm_v2.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// The weight's part of a v2 call, prepared in the launch before the gemm.
struct WeightRowParams {
  const void* weight_scale;           // (n, k_pad / block)
  const float* weight_global_scale;   // (1,), (groups,) or null
  const float* act_global_scale;      // (1,), (groups,) or null
  const float* channel_scale;         // (n,) or null
  const float* bias;                  // (n,) or null
  void* rows;                         // (n, kGemmV2RowInputBytes)
  int64_t n;  // of all groups
  DType scale_dtype;
  int64_t groups;     // 0: one weight
  const int* bounds;  // (groups + 1,) rows of x; null: one weight
  // (n, 2) largest and least byte of a row's mxfp4 scales, or null.
  const uint8_t* scale_range;
};

struct RepackV2Params {
  const uint8_t* packed;  // (m, k_pad / 2)
  const void* scales;     // (m, k_pad / block)
  void* act;              // (m, GemmV2ActBytes)
  float* token_scale;     // GemmV2Tokens
  WeightRowParams weight;
  int64_t m;
  int k_pad;
  int block;  // K elements per block scale
  bool is_unsigned;  // int4 activations are 0..15
  int64_t token_pitch;  // GemmV2TokenPitch, int4 groups only
};

// Launches on `stream` and returns a cudaError_t. m, n >= 1.
int LaunchRepackV2(GemmV2Path path, const RepackV2Params& params,
                   cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_REPACK_V2_H_
