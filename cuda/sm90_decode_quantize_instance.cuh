// The decode GEMM's quantizers of one path. CMake writes a source file for each,
// which includes this and ends with W4A4_DECODE_QUANTIZE_INSTANCE(path), so that
// they compile side by side.
#pragma once

#include "sm90_decode_quantize.cuh"

namespace jax_w4a4::sm90 {

template <GemmV2Path kPath, Source kSource>
const void* decode_quantize_kernel_of(int chunks, int warps) {
#define W4A4_CASE(c, w)                                     \
  if (chunks == c && warps == w) {                          \
    return reinterpret_cast<const void*>(                   \
        &decode_quantize_kernel<kPath, kSource, c, w>);     \
  }
  W4A4_CASE(2, 8)
  W4A4_CASE(4, 8)
  W4A4_CASE(8, 8)
  W4A4_CASE(1, 16)
  W4A4_CASE(2, 16)
  W4A4_CASE(4, 16)
  W4A4_CASE(8, 16)
#undef W4A4_CASE
  return nullptr;
}

template <GemmV2Path kPath>
const void* decode_quantize_kernel_of(Source source, int chunks, int warps) {
  switch (source) {
    case Source::kPlain:
      return decode_quantize_kernel_of<kPath, Source::kPlain>(chunks, warps);
    case Source::kBf16:
      return decode_quantize_kernel_of<kPath, Source::kBf16>(chunks, warps);
    case Source::kAny:
      return decode_quantize_kernel_of<kPath, Source::kAny>(chunks, warps);
  }
  return nullptr;
}

}  // namespace jax_w4a4::sm90

#define W4A4_DECODE_QUANTIZE_INSTANCE(path)                                    \
  namespace jax_w4a4::sm90 {                                                   \
  const void* decode_quantize_kernel_##path(Source source, int chunks,         \
                                            int warps) {                       \
    return decode_quantize_kernel_of<GemmV2Path::k##path>(source, chunks,      \
                                                          warps);              \
  }                                                                            \
  }
