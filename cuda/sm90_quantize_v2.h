// Activation quantizer v2: from float x straight into GEMM v2's activation
// layout; leading CTAs prepare the gemm's weight rows. The design is described in
// sm90_quantize_v2.cuh.
#ifndef JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_
#define JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_

#include <cstdint>

#include "formats.cuh"
#include "sm90_gemm_v2.h"
#include "sm90_repack_v2.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// A token is held by `warps` warps, `chunks` pieces of eight values in each lane.
constexpr bool HasQuantizeV2(int64_t chunks, int64_t warps) {
  return (chunks == 4 && warps == 4) || (chunks == 4 && warps == 8) ||
         (chunks == 8 && warps == 8) || (chunks == 8 && warps == 16);
}
constexpr int64_t QuantizeV2MaxK(int64_t chunks, int64_t warps) {
  return 8 * 32 * chunks * warps;
}
constexpr int64_t QuantizeV2Threads(int64_t warps) {
  return warps > 8 ? 32 * warps : 256;
}
constexpr int64_t QuantizeV2Tokens(int64_t warps) {
  return QuantizeV2Threads(warps) / 32 / warps;
}

struct QuantizeV2Params {
  const void* x;              // (m, k), k a multiple of 8
  const float* smooth;        // (k,) or null; x is multiplied by 1 / smooth
  const float* global_scale;  // (1,) or null; then by 1 / global_scale
  void* act;                  // (m, GemmV2ActBytes), private layout
  float* token_scale;         // GemmV2Tokens
  int64_t token_pitch;        // GemmV2TokenPitch
  WeightRowParams weight;
  int64_t m;
  int k, k_pad;
  int chunks, warps;
  DType x_dtype;
  ScaleRule rule;
  bool is_unsigned;  // int4 activations are 0..15
};

// Launches on `stream` and returns a cudaError_t. m, n >= 1. `beside`: runs beside
// the launch before it, and ends after that one's end.
int LaunchQuantizeV2(GemmV2Path path, const QuantizeV2Params& params, bool beside,
                     cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_
