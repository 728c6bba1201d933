// The v2 kernels of one path and token tile. CMake writes one source file per
// path, which includes this and ends with W4A4_GEMM_V2_INSTANCE(path, tile_m) for
// each tile, so that paths compile side by side.
#pragma once

#include "sm90_gemm_v2.cuh"

#define W4A4_GEMM_V2_INSTANCE(path, tile_m)                                    \
  namespace jax_w4a4::sm90 {                                                   \
  const void* gemm_v2_##path##_##tile_m(int cluster) {                         \
    return cluster == 1   ? reinterpret_cast<const void*>(                     \
                                &gemm_v2_kernel<path, tile_m, 1>)              \
           : cluster == 2 ? reinterpret_cast<const void*>(                     \
                                &gemm_v2_kernel<path, tile_m, 2>)              \
                          : nullptr;                                           \
  }                                                                            \
  }
