// Scalar loads and stores of an element type known only at run time. The
// branch is uniform over the grid.
#ifndef JAX_W4A4_CUDA_ELEMENT_CUH_
#define JAX_W4A4_CUDA_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "formats.cuh"

namespace jax_w4a4 {

__device__ __forceinline__ float LoadElement(const void* base, int64_t index,
                                             DType dtype) {
  if (dtype == DType::kF32) return static_cast<const float*>(base)[index];
  const uint16_t bits = static_cast<const uint16_t*>(base)[index];
  return dtype == DType::kF16 ? __half2float(__ushort_as_half(bits))
                              : DecodeBf16(bits);
}

// Rounds to nearest even, as astype does.
__device__ __forceinline__ void StoreElement(void* base, int64_t index,
                                             float value, DType dtype) {
  if (dtype == DType::kF32) {
    static_cast<float*>(base)[index] = value;
  } else if (dtype == DType::kF16) {
    static_cast<__half*>(base)[index] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16_rn(value);
  }
}

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_ELEMENT_CUH_
