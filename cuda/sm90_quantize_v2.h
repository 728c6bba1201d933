// Activation quantizer v2: from float x straight into GEMM v2's activation
// layout; leading CTAs prepare the gemm's weight rows. The design is described in
// sm90_quantize_v2.cuh.
#ifndef JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_
#define JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_

#include <cstdint>

#include "sm90_gemm_v2.h"
#include "sm90_quantize_token.h"
#include "sm90_repack_v2.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

struct QuantizeV2Params : TokenParams {
  void* act;            // (m, GemmV2ActBytes), private layout
  float* token_scale;   // GemmV2Tokens
  int64_t token_pitch;  // GemmV2TokenPitch
  int block;            // K elements per block scale
  WeightRowParams weight;
  // Groups of rows (weight.bounds) only; smooth and global_scale then have one
  // row for each group.
  void* table;  // of the gemm's row tiles (sm90_groups.cuh)
  int tile_m;   // their rows
  void* y;      // (m, weight.n / weight.groups) bf16: rows of no group become zeros
};

// Launches on `stream` and returns a cudaError_t. m, n >= 1.
int LaunchQuantizeV2(GemmV2Path path, const QuantizeV2Params& params,
                     cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_
