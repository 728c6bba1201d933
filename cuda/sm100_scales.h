// Scale factors of both operands of a product to the layout of the GEMM for
// Blackwell: for activations whose scales have the public layout.
#ifndef JAX_W4A4_CUDA_SM100_SCALES_H_
#define JAX_W4A4_CUDA_SM100_SCALES_H_

#include <cstdint>

#include "sm100_layout.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

struct Sm100ScalesParams {
  const uint8_t* act_scale;     // (m, k_pad / block)
  const uint8_t* weight_scale;  // (n, k_pad / block)
  uint8_t* act_atoms;     // (Sm100AtomTiles(m) * Sm100Atoms, kSm100AtomBytes)
  uint8_t* weight_atoms;  // the same of n
  int64_t m, n;
  int k_pad, block;
};

// Launches on `stream` and returns a cudaError_t. m, n >= 1.
int LaunchSm100Scales(const Sm100ScalesParams& params, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM100_SCALES_H_
