// Host side of GEMM v2: tensor maps, grid, launch.
#include "sm90_gemm_v2.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "launch.h"
#include "sm90_gemm_v2_args.h"
#include "sm90_gemm_v2_kernels.h"  // written by CMake
#include "tensor_map.h"

namespace jax_w4a4 {
namespace sm90 {
// One per compiled path and tile, in files that CMake writes with this list.
#define W4A4_KERNEL(path, tile_m) \
  const void* gemm_v2_##path##_##tile_m(int cluster);
W4A4_GEMM_V2_KERNELS
#undef W4A4_KERNEL
}  // namespace sm90

static_assert(sm90::kTileN == kGemmV2TileN);
static_assert(sm90::kGemmThreads == kGemmV2Threads);
static_assert(sm90::kTokenStages == kGemmV2TokenStages);
static_assert(sm90::kRowBytes == kGemmV2RowBytes);
static_assert(sm90::kLoraRowBytes == kGemmV2RankBytes);
static_assert(sizeof(sm90::RowInputs) == kGemmV2RowInputBytes);
#define W4A4_KERNEL(path, tile_m)                                             \
  static_assert(sm90::path::kStageK == GemmV2TileK(GemmV2Path::k##path) &&    \
                sm90::path::kTokenScale == GemmV2TokenScale(GemmV2Path::k##path) && \
                sm90::path::kStageGroups == GemmV2StageGroups(GemmV2Path::k##path));
W4A4_GEMM_V2_KERNELS
#undef W4A4_KERNEL

const void* GemmV2Kernel(GemmV2Path path, int tile_m, int cluster) {
#define W4A4_KERNEL(name, tile)                        \
  if (path == GemmV2Path::k##name && tile_m == tile) { \
    return sm90::gemm_v2_##name##_##tile(cluster);     \
  }
  W4A4_GEMM_V2_KERNELS
#undef W4A4_KERNEL
  return nullptr;
}

namespace {

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

LaunchResult LaunchGemmV2(GemmV2Path path, int tile_m, int cluster,
                          const GemmV2Params& p, bool dependent, int device,
                          cudaStream_t stream) {
  const void* kernel = GemmV2Kernel(path, tile_m, cluster);
  if (kernel == nullptr) return {cudaErrorInvalidDeviceFunction, nullptr, 0};
  int clusters = 0;
  if (int code = RaiseSmemLimit(kernel, device, p.smem.total_bytes);
      code != cudaSuccess) {
    return {code, nullptr, 0};
  }
  if (int code = MaxClusters(kernel, cluster, kGemmV2Threads,
                             p.smem.total_bytes, device, &clusters);
      code != cudaSuccess) {
    return {code, nullptr, 0};
  }

  const int stage_k = GemmV2TileK(path);
  sm90::GemmV2Args a = CommonArgs(path, tile_m, p);
  a.m_tiles = CeilDiv(p.m, tile_m);
  a.n_tiles = CeilDiv(p.n, cluster * kGemmV2TileN);
  a.group_m = std::min(p.group_m, a.m_tiles);

  // Each CTA of a pair loads a share of the tokens in whole swizzle atoms; must
  // agree with TokenHalf in sm90_gemm_v2.cuh.
  const int first = cluster == 1 ? tile_m : CeilDiv(tile_m / 2, 8) * 8;
  const int share[2] = {first, cluster == 1 ? first : tile_m - first};
  const auto u8 = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle_128 = CU_TENSOR_MAP_SWIZZLE_128B;
  const auto swizzle_64 = CU_TENSOR_MAP_SWIZZLE_64B;
  const int width = GemmV2ElementBytes(path);
  const Matrix act = {p.act, p.m, int64_t{a.k_blocks} * stage_k,
                      width == 1 ? u8 : bf16, width};  // fp16 moves as bf16 does
  TensorMaps maps;
  maps.Encode("packed", &a.weight, {p.weight, p.n, p.k_pad / 2, u8, 1},
              kGemmV2TileN, stage_k / 2, CU_TENSOR_MAP_SWIZZLE_NONE);
  for (int i = 0; i < 2; ++i) {
    maps.Encode("activation", &a.act[i], act, share[i], stage_k, swizzle_128);
  }
  if (p.rank > 0) {
    maps.Encode("lora_up", &a.lora_up, {p.lora_up, p.n, p.rank, bf16, 2},
                kGemmV2TileN, sm90::kLoraRanks, swizzle_64);
    for (int i = 0; i < 2; ++i) {
      maps.Encode("lora_act", &a.lora_act[i],
                  {p.lora_act, p.m, p.rank, bf16, 2}, share[i],
                  sm90::kLoraRanks, swizzle_64);
    }
  }
  if (a.tma_store) {
    maps.Encode("result", &a.out, {p.out, p.m, p.n, bf16, 2}, tile_m, 64,
                swizzle_128);
  }
  if (maps.refused() != nullptr) {
    return {cudaErrorInvalidValue, maps.refused(), 0};
  }

  const int64_t tiles = int64_t{a.m_tiles} * a.n_tiles;
  clusters = static_cast<int>(std::min<int64_t>(clusters, tiles));
  return LaunchClusters(kernel, &a, clusters, cluster, kGemmV2Threads,
                        p.smem.total_bytes, dependent, stream);
}

}  // namespace jax_w4a4
