// The v2 kernels of one token tile. CMake writes one source file per tile, which
// includes this and ends with W4A4_GEMM_V2_INSTANCE(tile_m), so that they
// compile side by side.
#pragma once

#include "formats.cuh"
#include "sm90_gemm_v2.cuh"

namespace jax_w4a4::sm90 {

template <int kTileM>
const void* gemm_v2_kernel_of(Format format, int cluster) {
  using Mx = MxFp4<MmaKind::kE5m2E5m2>;
  if (format == Format::kMxfp4 && cluster == 1) {
    return reinterpret_cast<const void*>(&gemm_v2_kernel<Mx, kTileM, 1>);
  }
  if (format == Format::kMxfp4 && cluster == 2) {
    return reinterpret_cast<const void*>(&gemm_v2_kernel<Mx, kTileM, 2>);
  }
  if (format == Format::kNvfp4 && cluster == 1) {
    return reinterpret_cast<const void*>(&gemm_v2_kernel<NvFp4, kTileM, 1>);
  }
  if (format == Format::kNvfp4 && cluster == 2) {
    return reinterpret_cast<const void*>(&gemm_v2_kernel<NvFp4, kTileM, 2>);
  }
  return nullptr;
}

}  // namespace jax_w4a4::sm90

#define W4A4_GEMM_V2_INSTANCE(tile_m)                                          \
  namespace jax_w4a4::sm90 {                                                   \
  const void* gemm_v2_kernel_##tile_m(Format format, int cluster) {            \
    return gemm_v2_kernel_of<tile_m>(format, cluster);                         \
  }                                                                            \
  }
