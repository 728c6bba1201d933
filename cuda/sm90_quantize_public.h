// Activation quantizer of the public layout, with a token in the registers of its
// warps (sm90_quantize_public.cuh).
#ifndef JAX_W4A4_CUDA_SM90_QUANTIZE_PUBLIC_H_
#define JAX_W4A4_CUDA_SM90_QUANTIZE_PUBLIC_H_

#include <cstdint>

#include "formats.cuh"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

struct QuantizePublicParams {
  const void* x;              // (m, k), k a multiple of 8
  const float* smooth;        // (k,) or null; x is multiplied by 1 / smooth
  const float* global_scale;  // (1,) or null; then by 1 / global_scale
  void* packed;               // (m, k_pad / 2)
  void* scales;               // (m, k_pad / block)
  int64_t m;
  int k, k_pad, block;
  int chunks, warps;  // HasQuantizeV2
  DType x_dtype, scale_dtype;
  ScaleRule rule;
  bool is_unsigned;  // int4 activations are 0..15
};

// Launches on `stream` and returns a cudaError_t. m >= 1. `beside`: runs beside the
// launch before it, and ends after that one's end.
int LaunchQuantizePublic(Format format, const QuantizePublicParams& params,
                         bool beside, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_QUANTIZE_PUBLIC_H_
