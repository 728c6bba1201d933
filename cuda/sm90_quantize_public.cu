// Host side of the public layout's quantizer.
#include "sm90_quantize_public.h"

#include <cuda_runtime.h>

#include "sm90_quantize_public.cuh"
#include "sm90_quantize_v2.h"

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

int LaunchQuantizePublic(Format format, const QuantizePublicParams& p, bool beside,
                         cudaStream_t stream) {
  const bool normalized = p.smooth != nullptr || p.global_scale != nullptr;
  const sm90::Source source = p.x_dtype != DType::kBf16 ? sm90::Source::kAny
                              : normalized              ? sm90::Source::kBf16
                                                        : sm90::Source::kPlain;
  const void* kernel = Kernel(format, source, p.chunks, p.warps);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  sm90::QuantizePublicArgs a = {};
  a.x = p.x;
  a.smooth = p.smooth;
  a.act_global_scale = p.global_scale;
  a.m = static_cast<int>(p.m);
  a.k = p.k;
  a.k_layout = p.k_pad;
  a.x_dtype = p.x_dtype;
  a.scale_dtype = p.scale_dtype;
  a.floor_rule = p.rule == ScaleRule::kFloor;
  a.is_unsigned = p.is_unsigned;
  a.wait = beside;
  a.packed = static_cast<uint32_t*>(p.packed);
  a.scales = p.scales;
  a.block_shift = p.block == p.k_pad ? -1
                  : p.block == 32    ? 2
                  : p.block == 64    ? 3
                                     : 4;

  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  const int64_t tokens = QuantizeV2Tokens(p.warps);
  config.gridDim = dim3(static_cast<unsigned>((p.m + tokens - 1) / tokens));
  config.blockDim = dim3(static_cast<unsigned>(QuantizeV2Threads(p.warps)));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = beside ? 1 : 0;
  void* args[] = {&a};
  return cudaLaunchKernelExC(&config, kernel, args);
}

}  // namespace jax_w4a4
