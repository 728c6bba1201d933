// The decode kernels of one path and token tile. CMake writes one source file per
// pair, which includes this and ends with W4A4_DECODE_INSTANCE(path, tile_m), so
// that they compile side by side.
#pragma once

#include "sm90_decode.cuh"

#define W4A4_DECODE_INSTANCE(path, tile_m)                                     \
  namespace jax_w4a4::sm90 {                                                   \
  const void* decode_##path##_##tile_m(int rows) {                             \
    return rows == 32   ? reinterpret_cast<const void*>(                       \
                              &decode_kernel<path, tile_m, 32>)                \
           : rows == 64 ? reinterpret_cast<const void*>(                       \
                              &decode_kernel<path, tile_m, 64>)                \
                        : reinterpret_cast<const void*>(                       \
                              &decode_kernel<path, tile_m, 128>);              \
  }                                                                            \
  }
