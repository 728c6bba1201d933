// Activation quantizer of the public layout, with a token in the registers of its
// warps (sm90_quantize_public.cuh).
#ifndef JAX_W4A4_CUDA_SM90_QUANTIZE_PUBLIC_H_
#define JAX_W4A4_CUDA_SM90_QUANTIZE_PUBLIC_H_

#include <cstdint>

#include "formats.cuh"
#include "sm90_quantize_token.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

struct QuantizePublicParams : TokenParams {
  void* packed;  // (m, k_pad / 2)
  void* scales;  // (m, k_pad / block)
  int block;
  DType scale_dtype;
};

// Launches on `stream` and returns a cudaError_t. m >= 1.
int LaunchQuantizePublic(Format format, const QuantizePublicParams& params,
                         cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_QUANTIZE_PUBLIC_H_
