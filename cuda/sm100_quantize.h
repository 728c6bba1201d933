// Activation quantizer of the GEMM for Blackwell; see sm100_quantize.cuh.
#ifndef JAX_W4A4_CUDA_SM100_QUANTIZE_H_
#define JAX_W4A4_CUDA_SM100_QUANTIZE_H_

#include <cstdint>

#include "sm100_layout.h"
#include "sm90_quantize_token.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

struct Sm100QuantizeParams : TokenParams {
  void* packed;        // (m, k_pad / 2)
  uint8_t* act_atoms;  // (Sm100AtomTiles(m) * Sm100Atoms, kSm100AtomBytes)
  const uint8_t* weight_scale;  // (n, k_pad / block)
  uint8_t* weight_atoms;        // as act_atoms, of n
  int64_t n;
};

// nvfp4 or mxfp4. Launches on `stream` and returns a cudaError_t. m, n >= 1.
int LaunchSm100Quantize(Format format, const Sm100QuantizeParams& params,
                        cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM100_QUANTIZE_H_
