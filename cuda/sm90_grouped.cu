// Host side of the grouped GEMM: tensor maps, grid, launch.
#include "sm90_grouped.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "launch.h"
#include "sm90_gemm_v2_args.h"
#include "sm90_gemm_v2_kernels.h"  // written by CMake
#include "sm90_grouped.cuh"
#include "tensor_map.h"

namespace jax_w4a4 {
namespace sm90 {
// One per compiled path and tile, in files that CMake writes with this list.
#define W4A4_KERNEL(path, tile_m) const void* grouped_##path##_##tile_m();
W4A4_GROUPED_KERNELS
#undef W4A4_KERNEL
}  // namespace sm90

static_assert(sizeof(sm90::GroupTile) == kGroupedEntryInts * sizeof(int));
#define W4A4_KERNEL(path, tile_m)                               \
  static_assert(sm90::kGroupedTokenBytes<tile_m> ==             \
                    GroupedTokenBytes(GemmV2Path::k##path, tile_m) || \
                !sm90::path::kTokenScale);
W4A4_GROUPED_KERNELS
#undef W4A4_KERNEL

const void* GroupedKernel(GemmV2Path path, int tile_m) {
#define W4A4_KERNEL(name, tile)                        \
  if (path == GemmV2Path::k##name && tile_m == tile) { \
    return sm90::grouped_##name##_##tile();            \
  }
  W4A4_GROUPED_KERNELS
#undef W4A4_KERNEL
  return nullptr;
}

LaunchResult LaunchGrouped(GemmV2Path path, int tile_m,
                           const GroupedParams& params, bool dependent,
                           int device, cudaStream_t stream) {
  const void* kernel = GroupedKernel(path, tile_m);
  if (kernel == nullptr) return {cudaErrorInvalidDeviceFunction, nullptr, 0};
  const GemmV2Params& p = params.gemm;
  if (int code = RaiseSmemLimit(kernel, device, p.smem.total_bytes);
      code != cudaSuccess) {
    return {code, nullptr, 0};
  }
  int ctas = 0;
  if (int code = MaxClusters(kernel, 1, kGemmV2Threads, p.smem.total_bytes,
                             device, &ctas);
      code != cudaSuccess) {
    return {code, nullptr, 0};
  }

  sm90::GroupedArgs args = {};
  args.table = static_cast<const sm90::GroupTile*>(params.table);
  args.group_n = static_cast<int>(p.n);
  const int64_t rows = params.groups * p.n;  // of all weights
  const int stage_k = GemmV2TileK(path);
  sm90::GemmV2Args& a = args.gemm;
  a = CommonArgs(path, tile_m, p);
  a.n = static_cast<int>(rows);
  a.n_tiles = static_cast<int>((p.n + kGemmV2TileN - 1) / kGemmV2TileN);
  a.group_m = p.group_m;

  const auto u8 = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle_128 = CU_TENSOR_MAP_SWIZZLE_128B;
  const auto swizzle_64 = CU_TENSOR_MAP_SWIZZLE_64B;
  const int width = GemmV2ElementBytes(path);
  TensorMaps maps;
  maps.Encode("packed", &a.weight, {p.weight, rows, p.k_pad / 2, u8, 1},
              kGemmV2TileN, stage_k / 2, CU_TENSOR_MAP_SWIZZLE_NONE);
  maps.Encode("activation", &a.act[0],
              {p.act, p.m, int64_t{a.k_blocks} * stage_k,
               width == 1 ? u8 : bf16, width},
              tile_m, stage_k, swizzle_128);
  if (p.rank > 0) {
    maps.Encode("lora_up", &a.lora_up, {p.lora_up, rows, p.rank, bf16, 2},
                kGemmV2TileN, sm90::kLoraRanks, swizzle_64);
    maps.Encode("lora_act", &a.lora_act[0],
                {p.lora_act, p.m, p.rank, bf16, 2}, tile_m, sm90::kLoraRanks,
                swizzle_64);
  }
  if (a.tma_store) {
    maps.Encode("result", &a.out, {p.out, p.m, p.n, bf16, 2}, tile_m, 64,
                swizzle_128);
  }
  if (maps.refused() != nullptr) {
    return {cudaErrorInvalidValue, maps.refused(), 0};
  }

  // The most that there can be; the table has those that there are.
  const int64_t tiles =
      GroupedRowTiles(p.m, std::min(params.groups, p.m), tile_m) * a.n_tiles;
  const int grid = static_cast<int>(std::min<int64_t>(ctas, tiles));
  return LaunchClusters(kernel, &args, grid, 1, kGemmV2Threads,
                        p.smem.total_bytes, dependent, stream);
}

}  // namespace jax_w4a4
