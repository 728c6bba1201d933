// What the quantizers that hold a token in registers are asked for, whatever layout
// they write (sm90_quantize_token.cuh).
#ifndef JAX_W4A4_CUDA_SM90_QUANTIZE_TOKEN_H_
#define JAX_W4A4_CUDA_SM90_QUANTIZE_TOKEN_H_

#include <cstdint>

#include "formats.cuh"

namespace jax_w4a4 {

// A token is held by `warps` warps, `chunks` pieces of eight values in each lane.
constexpr bool HasTokenQuantizer(int64_t chunks, int64_t warps) {
  return (chunks == 4 && warps == 4) || (chunks == 4 && warps == 8) ||
         (chunks == 8 && warps == 8) || (chunks == 8 && warps == 16);
}
constexpr int64_t TokenQuantizerMaxK(int64_t chunks, int64_t warps) {
  return 8 * 32 * chunks * warps;
}
constexpr int64_t TokenQuantizerThreads(int64_t warps) {
  return warps > 8 ? 32 * warps : 256;
}
constexpr int64_t TokensPerCta(int64_t warps) {
  return TokenQuantizerThreads(warps) / 32 / warps;
}

struct TokenParams {
  const void* x;              // (m, k), k a multiple of 8
  const float* smooth;        // (k,) or null; x is multiplied by 1 / smooth
  const float* global_scale;  // (1,) or null; then by 1 / global_scale
  int64_t m;
  int k, k_pad;
  int chunks, warps;  // HasTokenQuantizer
  DType x_dtype;
  ScaleRule rule;
  bool is_unsigned;  // int4 activations are 0..15
  bool beside;       // runs beside the launch before it, and ends after its end
};

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_QUANTIZE_TOKEN_H_
