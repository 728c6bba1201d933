// The v2 quantizer's kernels of one path. CMake writes a source file for each,
// which includes this and ends with W4A4_QUANTIZE_V2_INSTANCE(path), so that they
// compile side by side.
#pragma once

#include "sm90_quantize_v2.cuh"

namespace jax_w4a4::sm90 {

template <GemmV2Path kPath, int kChunks, int kWarps>
const void* quantize_v2_kernel_of(Source source) {
  switch (source) {
    case Source::kPlain:
      return reinterpret_cast<const void*>(
          &quantize_v2_kernel<kPath, Source::kPlain, kChunks, kWarps>);
    case Source::kBf16:
      return reinterpret_cast<const void*>(
          &quantize_v2_kernel<kPath, Source::kBf16, kChunks, kWarps>);
    case Source::kAny:
      return reinterpret_cast<const void*>(
          &quantize_v2_kernel<kPath, Source::kAny, kChunks, kWarps>);
  }
  return nullptr;
}

template <GemmV2Path kPath>
const void* quantize_v2_kernel_of(Source source, int chunks, int warps) {
  if (chunks == 4 && warps == 4) return quantize_v2_kernel_of<kPath, 4, 4>(source);
  if (chunks == 4 && warps == 8) return quantize_v2_kernel_of<kPath, 4, 8>(source);
  if (chunks == 8 && warps == 8) return quantize_v2_kernel_of<kPath, 8, 8>(source);
  if (chunks == 8 && warps == 16) return quantize_v2_kernel_of<kPath, 8, 16>(source);
  return nullptr;
}

}  // namespace jax_w4a4::sm90

#define W4A4_QUANTIZE_V2_INSTANCE(path)                                        \
  namespace jax_w4a4::sm90 {                                                   \
  const void* quantize_v2_kernel_##path(Source source, int chunks, int warps) { \
    return quantize_v2_kernel_of<GemmV2Path::k##path>(source, chunks, warps);  \
  }                                                                            \
  }
