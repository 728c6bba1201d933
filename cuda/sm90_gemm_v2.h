// GEMM v2, the prefill kernel: what the handlers know of it. The design is
// described in sm90_gemm_v2.cuh.
#ifndef JAX_W4A4_CUDA_SM90_GEMM_V2_H_
#define JAX_W4A4_CUDA_SM90_GEMM_V2_H_

#include <cstdint>

#include "formats.cuh"
#include "launch_result.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these.
constexpr int kGemmV2TileN = 128;  // weight rows per CTA
constexpr int kGemmV2Threads = 384;
constexpr int kGemmV2MaxStages = 8;
constexpr int kGemmV2TokenStages = 2;
constexpr int kGemmV2MaxRank = 256;
// The int32 sums of 16 * weight * activation stay below 2^31 up to here.
constexpr int64_t kGemmV2MaxInt4K = 1 << 20;
// Bytes of one token in a stage, and of one token or weight row in a chunk of 32
// ranks.
constexpr int kGemmV2RowBytes = 128;
constexpr int kGemmV2RankBytes = 64;

// What the main loop multiplies, value of the plan's `path`: a format on one of
// the tensor core's operand types. sm90_gemm_v2.cuh has a struct for each.
enum class GemmV2Path : int {
  kMxfp4 = 1,          // e5m2, block exponents folded in
  kMxfp4Promoted = 2,  // the same, sums moved to fp32 registers every promote_k
  kNvfp4 = 3,          // bf16, exact
  kNvfp4Rounded = 4,   // e4m3, value * scale rounded
  kInt4Row = 5,        // s8, one scale per row and token
  kInt4Group64 = 6,    // e4m3 integers, fp32 scales after each group
  kInt4Group128 = 7,
  kInt4Scaled = 8,  // fp16, code * scale rounded
  kMxfp4Sorted = 9,  // kMxfp4 on a weight whose signs are sorted
};
constexpr bool IsGemmV2Path(int64_t path) { return path >= 1 && path <= 9; }

// Which path's activations a path reads: those that differ in the weight or the
// sums alone share them.
constexpr GemmV2Path GemmV2ActPath(GemmV2Path path) {
  return path == GemmV2Path::kMxfp4Promoted || path == GemmV2Path::kMxfp4Sorted
             ? GemmV2Path::kMxfp4
             : path;
}
constexpr bool GemmV2IsInt4(GemmV2Path path) {
  return path == GemmV2Path::kInt4Row || path == GemmV2Path::kInt4Group64 ||
         path == GemmV2Path::kInt4Group128 || path == GemmV2Path::kInt4Scaled;
}
constexpr int GemmV2ElementBytes(GemmV2Path path) {
  return path == GemmV2Path::kNvfp4 || path == GemmV2Path::kInt4Scaled ? 2 : 1;
}
constexpr int GemmV2TileK(GemmV2Path path) {
  return kGemmV2RowBytes / GemmV2ElementBytes(path);
}
// Whether each token has a scale of its own in the private activation layout.
constexpr bool GemmV2TokenScale(GemmV2Path path) {
  return path != GemmV2Path::kNvfp4 && path != GemmV2Path::kInt4Group64 &&
         path != GemmV2Path::kInt4Group128;
}
// Groups of K in a stage of 128, each with fp32 token scales in the slot; 0: none.
constexpr int GemmV2StageGroups(GemmV2Path path) {
  return path == GemmV2Path::kInt4Group64    ? 2
         : path == GemmV2Path::kInt4Group128 ? 1
                                             : 0;
}
// Bytes of a token in the private activation layout: whole stages.
constexpr int64_t GemmV2ActBytes(GemmV2Path path, int64_t k_pad) {
  const int64_t step = GemmV2TileK(path);
  return (k_pad + step - 1) / step * kGemmV2RowBytes;
}
// Token scales: one per token, or one per group and token, and a tile more, as
// the kernel copies whole tiles.
constexpr int64_t GemmV2TokenPitch(int64_t m, int64_t tile_m) {
  return (m + tile_m + 3) / 4 * 4;
}
constexpr int64_t GemmV2Tokens(GemmV2Path path, int64_t m, int64_t tile_m,
                               int64_t k_pad) {
  if (GemmV2StageGroups(path) > 0) {
    return k_pad * GemmV2StageGroups(path) / 128 * GemmV2TokenPitch(m, tile_m);
  }
  return GemmV2TokenScale(path) ? m + tile_m : 0;
}
// Bytes per weight row of the inputs that the launch before the gemm prepares.
constexpr int kGemmV2RowInputBytes = 16;

// Where the plan put everything. Offsets of ring objects count from the start of
// a slot, the others from the start of dynamic shared memory.
struct GemmV2Smem {
  int weight, lora_up, store, token, barriers;
  int stage_bytes, total_bytes;
};

struct GemmV2Params {
  const void* act;             // (m, GemmV2ActBytes), private layout
  const float* token_scale;    // GemmV2Tokens
  const void* rows;            // (n, kGemmV2RowInputBytes)
  const uint8_t* weight;       // (n, k_pad / 2)
  const void* weight_scale;    // (n, k_pad / block)
  const void* lora_act;        // (m, rank) bf16
  const void* lora_up;         // (n, rank) bf16
  void* out;                   // (m, n) bf16
  int64_t m, n;
  int k_pad;
  int rank;  // 0: no low-rank branch
  int stages;
  int group_m;
  int promote_k;  // kMxfp4Promoted only
  int block;          // K elements per weight scale
  DType scale_dtype;  // of int4 groups
  GemmV2Smem smem;
};

// The kernel for a path, tile and cluster width, null if it was not compiled.
const void* GemmV2Kernel(GemmV2Path path, int tile_m, int cluster);

// Launches on `stream`. m, n >= 1. `dependent`: the kernel before it on the
// stream writes act, token_scale, rows and lora_act, and may still be running.
LaunchResult LaunchGemmV2(GemmV2Path path, int tile_m, int cluster,
                          const GemmV2Params& params, bool dependent,
                          int device, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_GEMM_V2_H_
