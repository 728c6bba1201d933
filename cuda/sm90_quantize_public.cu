// Host side of the public layout's quantizer.
#include "sm90_quantize_public.h"

#include <cuda_runtime.h>

#include "sm90_quantize_public.cuh"

namespace jax_w4a4 {
namespace {

template <Format kFormat, sm90::Source kSource>
const void* Kernel(int chunks, int warps) {
#define W4A4_CASE(c, w)                            \
  if (chunks == c && warps == w) {                 \
    return reinterpret_cast<const void*>(          \
        &sm90::quantize_public_kernel<kFormat, kSource, c, w>); \
  }
  W4A4_CASE(4, 4)
  W4A4_CASE(4, 8)
  W4A4_CASE(8, 8)
  W4A4_CASE(8, 16)
#undef W4A4_CASE
  return nullptr;
}

template <Format kFormat>
const void* Kernel(sm90::Source source, int chunks, int warps) {
  switch (source) {
    case sm90::Source::kPlain:
      return Kernel<kFormat, sm90::Source::kPlain>(chunks, warps);
    case sm90::Source::kBf16:
      return Kernel<kFormat, sm90::Source::kBf16>(chunks, warps);
    case sm90::Source::kAny:
      return Kernel<kFormat, sm90::Source::kAny>(chunks, warps);
  }
  return nullptr;
}

const void* Kernel(Format format, sm90::Source source, int chunks, int warps) {
  switch (format) {
    case Format::kNvfp4:
      return Kernel<Format::kNvfp4>(source, chunks, warps);
    case Format::kMxfp4:
      return Kernel<Format::kMxfp4>(source, chunks, warps);
    case Format::kInt4:
      return Kernel<Format::kInt4>(source, chunks, warps);
  }
  return nullptr;
}

}  // namespace

int LaunchQuantizePublic(Format format, const QuantizePublicParams& p,
                         cudaStream_t stream) {
  const void* kernel = Kernel(format, sm90::source_of(p), p.chunks, p.warps);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  sm90::QuantizePublicArgs a = {};
  sm90::set_token_args(&a, p, p.k_pad, p.scale_dtype);
  a.packed = static_cast<uint32_t*>(p.packed);
  a.scales = p.scales;
  a.block_shift = p.block == p.k_pad ? -1
                  : p.block == 32    ? 2
                  : p.block == 64    ? 3
                                     : 4;
  return sm90::launch_tokens(kernel, &a, p, 0, stream);
}

}  // namespace jax_w4a4
