// Activation quantizer v1: smoothing, block quantization and LoRA-down.
#ifndef JAX_W4A4_CUDA_SM90_QUANTIZE_V1_H_
#define JAX_W4A4_CUDA_SM90_QUANTIZE_V1_H_

#include <cstdint>

#include "formats.cuh"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these.
constexpr int kQuantizeRows = 16;
constexpr int kQuantizeChunk = 256;
constexpr int kQuantizeThreads = 256;

// fp32 chunk of x, one word per row (row amax), split-K partials of LoRA-down.
constexpr int QuantizeSmemBytes(bool has_lora) {
  return kQuantizeRows * kQuantizeChunk * 4 + kQuantizeRows * 4 +
         (has_lora ? kQuantizeThreads * kQuantizeRows * 4 : 0);
}

struct QuantizeParams {
  const void* x;              // (m, k)
  const float* smooth;        // (k,) or null; x is multiplied by 1 / smooth
  const float* global_scale;  // (1,) or null; then by 1 / global_scale
  const void* lora_down;      // (k, rank)
  uint8_t* packed;            // (m, k_pad / 2)
  void* scales;               // (m, k_pad / block)
  void* lora_act;             // (m, rank)
  int64_t m;
  int k;
  int k_pad;
  int block;  // k_pad: one scale per row
  int rank;   // 0: no LoRA
  DType x_dtype;
  DType scale_dtype;
  DType lora_down_dtype;
  DType lora_act_dtype;
  ScaleRule rule;
  bool is_unsigned;
  bool lora_smoothed;
};

// Launches on `stream` and returns a cudaError_t. m >= 1.
int LaunchQuantizeV1(Format format, const QuantizeParams& params,
                     cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_QUANTIZE_V1_H_
