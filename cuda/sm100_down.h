// LoRA-down before the quantizer for Blackwell; see sm100_down.cuh.
#ifndef JAX_W4A4_CUDA_SM100_DOWN_H_
#define JAX_W4A4_CUDA_SM100_DOWN_H_

#include <cstdint>

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these.
constexpr int kSm100DownTokens = 64;
constexpr int kSm100DownRanks = 64;  // of a CTA
constexpr int kSm100DownStageBytes = (kSm100DownTokens + 64) * 128;

struct Sm100DownParams {
  const void* x;          // (m, k) bf16, k a multiple of 8
  const void* lora_down;  // (k, rank) bf16
  void* lora_act;         // (m, rank) bf16
  int64_t m;
  int k;
  int rank;  // a multiple of 8, not 0
  int stages, off_barriers, smem_bytes;
};

// Launches on `stream` and returns a cudaError_t. m >= 1.
int LaunchSm100Down(const Sm100DownParams& params, int device,
                    cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM100_DOWN_H_
