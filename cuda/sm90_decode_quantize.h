// Activations of the decode GEMM in one launch: the quantizer and LoRA-down. The
// design is described in sm90_decode_quantize.cuh.
#ifndef JAX_W4A4_CUDA_SM90_DECODE_QUANTIZE_H_
#define JAX_W4A4_CUDA_SM90_DECODE_QUANTIZE_H_

#include <cstdint>

#include "sm90_gemm_v2.h"
#include "sm90_quantize_token.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these.
constexpr int kDecodeDownTokens = 16;
// Few tokens leave SMs for twice the CTAs, which then read half as much: 2.2 us instead of 2.5 at K = 4096,
// 3.3 instead of 4.0 at 16384 (M = 1, R = 32).
constexpr int DecodeDownRanks(int warps) { return warps > 8 ? 32 : 16; }
// CTAs of a cluster, which divide K for LoRA-down.
constexpr bool IsDecodeDownCluster(int64_t cluster) {
  return cluster == 8 || cluster == 16;
}

// A token is held by `warps` warps, `chunks` pieces of eight values in each lane.
constexpr bool HasDecodeQuantizer(int64_t chunks, int64_t warps) {
  return (warps == 8 && (chunks == 2 || chunks == 4 || chunks == 8)) ||
         (warps == 16 &&
          (chunks == 1 || chunks == 2 || chunks == 4 || chunks == 8));
}

struct DecodeQuantizeParams : TokenParams {
  void* act;              // (m, GemmV2ActBytes), private layout of GEMM v2
  float* token_scale;     // (m,), paths that have one
  DType scale_dtype;      // of int4
  const void* lora_down;  // (k, rank) bf16; x is bf16 then
  void* lora_act;         // (m, rank) bf16
  int rank;               // a multiple of 16, 0 for none
  int down_cluster;       // with a rank, unless
  void* down_sums;        // the GEMM's launch does LoRA-down; see DecodeParams
};

// Launches on `stream` and returns a cudaError_t. m >= 1.
int LaunchDecodeQuantize(GemmV2Path path, const DecodeQuantizeParams& params,
                         int device, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_DECODE_QUANTIZE_H_
