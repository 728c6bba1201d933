// The grouped kernel of one path and token tile. CMake writes one source file per
// path, which includes this and ends with W4A4_GROUPED_INSTANCE(path, tile_m) for
// each tile, so that paths compile side by side.
#pragma once

#include "sm90_grouped.cuh"

#define W4A4_GROUPED_INSTANCE(path, tile_m)                                  \
  namespace jax_w4a4::sm90 {                                                 \
  const void* grouped_##path##_##tile_m() {                                  \
    return reinterpret_cast<const void*>(&grouped_kernel<path, tile_m>);     \
  }                                                                          \
  }
