// LoRA-down of the v2 path, a launch before the quantizer's: what the launcher
// knows of it. The design is described in sm90_down_v2.cuh.
#ifndef JAX_W4A4_CUDA_SM90_DOWN_V2_H_
#define JAX_W4A4_CUDA_SM90_DOWN_V2_H_

#include <cstdint>

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these.
constexpr int kDownV2Tokens = 72;
// Tokens of a cluster: of small groups fewer, or most of what it reads belongs to
// other groups. `m` rows of `groups`, as the sizes are on the device.
constexpr int DownV2Tokens(int64_t groups, int64_t m) {
  return m <= 16 * groups ? 16 : kDownV2Tokens;
}
constexpr int kDownV2MaxRank = 256;
constexpr int kDownV2MaxCluster = 8;
constexpr int kDownV2MaxStages = 8;

// Tiles of 64 ranks, and warpgroups that share them.
constexpr int DownV2RankTiles(int64_t rank) {
  return rank <= 64 ? 1 : rank <= 128 ? 2 : 4;
}
constexpr int DownV2Groups(int64_t rank) { return rank <= 64 ? 1 : 2; }
constexpr int DownV2Threads(int64_t rank) {
  return 128 * DownV2Groups(rank) + 32;
}
constexpr int64_t DownV2StageBytes(int64_t rank) {
  return kDownV2Tokens * 128 + DownV2RankTiles(rank) * 64 * 128;
}
// Partial sums, over the ring.
constexpr int64_t DownV2PartialBytes(int64_t rank) {
  return kDownV2Tokens * (64 * DownV2RankTiles(rank) + 4) * 4;
}

struct DownV2Params {
  const void* x;          // (m, k) bf16, k a multiple of 8
  const void* lora_down;  // (k, rank), or (groups, k, rank), bf16
  void* lora_act;         // (m, rank) bf16
  int64_t m;
  int k;
  int rank;  // a multiple of 16 up to kDownV2MaxRank, not 0
  int cluster, stages;
  int off_barriers, smem_bytes;
  int groups;         // 0: one weight
  const int* bounds;  // (groups + 1,) rows of x
};

// Launches on `stream` and returns a cudaError_t. m >= 1.
int LaunchDownV2(const DownV2Params& params, int device, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_DOWN_V2_H_
