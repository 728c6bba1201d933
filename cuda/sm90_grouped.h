// Grouped GEMM: rows sorted by group, a weight for each group. What the handlers
// know of it; the design is described in sm90_grouped.cuh.
#ifndef JAX_W4A4_CUDA_SM90_GROUPED_H_
#define JAX_W4A4_CUDA_SM90_GROUPED_H_

#include <cstdint>

#include "sm90_gemm_v2.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these. The rest is as in
// GEMM v2, on clusters of one.
constexpr int kGroupedMaxStages = 20;

// A tile's token scales, from the 16 bytes round their beginning on.
constexpr int64_t GroupedTokenBytes(GemmV2Path path, int64_t tile_m) {
  return GemmV2TokenScale(path) ? tile_m * 4 + 16 : 0;
}
// Token scales of a call, as the kernel copies whole tiles.
constexpr int64_t GroupedTokens(GemmV2Path path, int64_t m, int64_t tile_m) {
  return GemmV2TokenScale(path) ? m + tile_m + 4 : 0;
}
// Row tiles that there can be, and entries of the table that holds them.
constexpr int64_t GroupedRowTiles(int64_t m, int64_t groups, int64_t tile_m) {
  return (m + tile_m - 1) / tile_m + groups;
}
constexpr int64_t GroupedTableEntries(int64_t m, int64_t groups,
                                      int64_t tile_m) {
  return GroupedRowTiles(m, groups, tile_m) + 1;
}
constexpr int kGroupedEntryInts = 4;

struct GroupedParams {
  GemmV2Params gemm;  // n is that of one group; weights of all groups
  int64_t groups;
  const void* table;  // (GroupedTableEntries, kGroupedEntryInts), written before
};

// The kernel for a path and tile, null if it was not compiled.
const void* GroupedKernel(GemmV2Path path, int tile_m);

// Launches on `stream`. m, n, groups >= 1. `dependent`: as LaunchGemmV2; the
// kernel before writes the table too.
LaunchResult LaunchGrouped(GemmV2Path path, int tile_m,
                           const GroupedParams& params, bool dependent,
                           int device, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_GROUPED_H_
