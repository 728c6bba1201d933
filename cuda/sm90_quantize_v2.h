// Activation quantizer v2: mxfp4 from bf16, straight into GEMM v2's activation
// layout, with LoRA-down and the gemm's weight rows in the same launch.
#ifndef JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_
#define JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_

#include <cstdint>

#include "formats.cuh"
#include "sm90_repack_v2.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these. cluster is a choice
// among 1, 2, 4 and 8, stages among 2, 3 and 4.
constexpr int kQuantizeV2Rows = 64;
constexpr int kQuantizeV2StageK = 64;
constexpr int kQuantizeV2Threads = 288;
constexpr int kQuantizeV2MaxRank = 256;

// Where the kernel keeps what, in bytes from the start of dynamic shared memory.
// quantizer_v2 in jax_w4a4/plan/budget.py has the same account.
struct QuantizeV2Layout {
  int64_t ranks;         // per warpgroup, of which there are two
  int64_t slice_groups;  // groups of 128 k per CTA of the cluster
  int64_t stage_bytes, code_pitch;
  int64_t codes, exponents, reciprocal, row_max, barriers, total_bytes;
};

inline QuantizeV2Layout GetQuantizeV2Layout(int64_t k, int64_t rank,
                                            int64_t cluster, int64_t stages) {
  const auto align = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
  QuantizeV2Layout l = {};
  l.ranks = rank == 0 ? 0 : rank <= 64 ? 32 : rank <= 128 ? 64 : 128;
  l.slice_groups = ((k + 127) / 128 + cluster - 1) / cluster;
  l.stage_bytes = kQuantizeV2StageK * 2 * (kQuantizeV2Rows + 2 * l.ranks);
  // The partial sums of LoRA-down take the ring's place.
  const int64_t ring = stages * l.stage_bytes;
  const int64_t partial =
      l.ranks > 0 ? kQuantizeV2Rows * (2 * l.ranks + 8) * 4 : 0;
  l.code_pitch = l.slice_groups * 64 + 16;
  l.codes = align(ring > partial ? ring : partial);
  l.exponents = l.codes + align(kQuantizeV2Rows * l.code_pitch);
  l.reciprocal = l.exponents + align(kQuantizeV2Rows * l.slice_groups * 4);
  l.row_max = l.reciprocal + l.slice_groups * 512;
  l.barriers = l.row_max + kQuantizeV2Rows * 4;
  l.total_bytes = l.barriers + 16 * stages;
  return l;
}

struct QuantizeV2Params {
  const void* x;              // (m, k) bf16, k a multiple of 8
  const float* smooth;        // (k,) or null; x is multiplied by 1 / smooth
  const float* global_scale;  // (1,) or null; then by 1 / global_scale
  const void* lora_down;      // (k, rank) bf16
  void* act;                  // (m, GemmV2ActBytes), private layout
  float* token_scale;         // (m + tile_m)
  void* lora_act;             // (m, rank) bf16
  WeightRowParams weight;
  int64_t m;
  int k, k_pad;
  int rank;  // a multiple of 16, at most 256
  ScaleRule rule;
  int cluster, stages;
};

// Launches on `stream` and returns a cudaError_t. m, n >= 1.
int LaunchQuantizeV2(const QuantizeV2Params& params, int device,
                     cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_QUANTIZE_V2_H_
