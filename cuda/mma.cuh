// One-line wrappers over the PTX instructions that the kernels use.
#ifndef JAX_W4A4_CUDA_MMA_CUH_
#define JAX_W4A4_CUDA_MMA_CUH_

#include <cstdint>

namespace jax_w4a4 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the row addresses
// of matrix i.
__device__ __forceinline__ void LoadMatrixX4(uint32_t (&r)[4],
                                             uint32_t address) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(address)
      : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void LoadMatrixX4Trans(uint32_t (&r)[4],
                                                  uint32_t address) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(address)
      : "memory");
}

// d(16x8, fp32) += a(16x16, bf16, row major) * b(16x8, bf16, column major).
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4],
                                        uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Lets the next kernel of the chain start before this one ends. Its results
// become visible to that kernel only at GridDependencyWait().
__device__ __forceinline__ void LaunchDependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Blocks until the kernels this one depends on have ended and their writes are
// visible; returns at once in a kernel launched without the attribute.
__device__ __forceinline__ void GridDependencyWait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_MMA_CUH_
