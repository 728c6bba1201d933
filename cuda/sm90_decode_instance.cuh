// The decode kernels of one path and token tile. CMake writes one source file per
// path, which includes this and ends with W4A4_DECODE_INSTANCE(path, tile_m) for
// each tile, so that paths compile side by side.
#pragma once

#include "sm90_decode.cuh"

namespace jax_w4a4::sm90 {

template <class Path, int kTokens>
const void* decode_instance(int rows) {
  if constexpr (DecodeShapeOf(kTokens, 8).rows == 32) {
    if (rows == 32) return reinterpret_cast<const void*>(&decode_kernel<Path, kTokens, 32>);
  }
  return rows == 64 ? reinterpret_cast<const void*>(&decode_kernel<Path, kTokens, 64>)
                    : reinterpret_cast<const void*>(&decode_kernel<Path, kTokens, 128>);
}

}  // namespace jax_w4a4::sm90

#define W4A4_DECODE_INSTANCE(path, tile_m)            \
  namespace jax_w4a4::sm90 {                          \
  const void* decode_##path##_##tile_m(int rows) {    \
    return decode_instance<path, tile_m>(rows);       \
  }                                                   \
  }
