// Host side of the v2 quantizer.
#include "sm90_quantize_v2.h"

#include <cuda_runtime.h>

#include "sm90_quantize_v2.cuh"

namespace jax_w4a4 {
namespace sm90 {
// One per path, in files that CMake writes.
const void* quantize_v2_kernel_Mxfp4(Source source, int chunks, int warps);
const void* quantize_v2_kernel_Nvfp4(Source source, int chunks, int warps);
const void* quantize_v2_kernel_Nvfp4Rounded(Source source, int chunks, int warps);
const void* quantize_v2_kernel_Int4Row(Source source, int chunks, int warps);
const void* quantize_v2_kernel_Int4Group64(Source source, int chunks, int warps);
const void* quantize_v2_kernel_Int4Group128(Source source, int chunks, int warps);
}  // namespace sm90

namespace {

static_assert(sm90::quantize_threads(4) == QuantizeV2Threads(4));
static_assert(sm90::quantize_threads(16) == QuantizeV2Threads(16));
static_assert(sm90::quantize_tokens(4) == QuantizeV2Tokens(4));
static_assert(sm90::quantize_tokens(16) == QuantizeV2Tokens(16));

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

const void* Kernel(GemmV2Path path, sm90::Source source, int chunks, int warps) {
  switch (path) {
    case GemmV2Path::kMxfp4:
    case GemmV2Path::kMxfp4Promoted:
      return sm90::quantize_v2_kernel_Mxfp4(source, chunks, warps);
    case GemmV2Path::kNvfp4:
      return sm90::quantize_v2_kernel_Nvfp4(source, chunks, warps);
    case GemmV2Path::kNvfp4Rounded:
      return sm90::quantize_v2_kernel_Nvfp4Rounded(source, chunks, warps);
    case GemmV2Path::kInt4Row:
      return sm90::quantize_v2_kernel_Int4Row(source, chunks, warps);
    case GemmV2Path::kInt4Group64:
      return sm90::quantize_v2_kernel_Int4Group64(source, chunks, warps);
    case GemmV2Path::kInt4Group128:
      return sm90::quantize_v2_kernel_Int4Group128(source, chunks, warps);
  }
  return nullptr;
}

}  // namespace

int LaunchQuantizeV2(GemmV2Path path, const QuantizeV2Params& p, bool beside,
                     cudaStream_t stream) {
  const bool normalized = p.smooth != nullptr || p.global_scale != nullptr;
  const sm90::Source source = p.x_dtype != DType::kBf16 ? sm90::Source::kAny
                              : normalized              ? sm90::Source::kBf16
                                                        : sm90::Source::kPlain;
  const void* kernel = Kernel(path, source, p.chunks, p.warps);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  const int block = GemmV2Block(path);
  const int threads = static_cast<int>(QuantizeV2Threads(p.warps));
  sm90::QuantizeV2Args a = {};
  a.x = p.x;
  a.smooth = p.smooth;
  a.act_global_scale = p.global_scale;
  a.act = static_cast<uint8_t*>(p.act);
  a.token_scale = p.token_scale;
  a.rows = sm90::row_inputs_args(path, p.weight, block == 0 ? 1 : p.k_pad / block);
  const bool int4 = path >= GemmV2Path::kInt4Row;
  a.prepare_ctas =
      CeilDiv(p.weight.n, int4 ? threads : sm90::kRowsPerPrepareCta);
  a.m = static_cast<int>(p.m);
  a.k = p.k;
  a.groups = static_cast<int>(GemmV2ActBytes(path, p.k_pad) / kGemmV2RowBytes);
  a.k_layout = a.groups * GemmV2TileK(path);
  a.token_pitch = p.token_pitch;
  a.x_dtype = p.x_dtype;
  a.scale_dtype = p.weight.scale_dtype;
  a.floor_rule = p.rule == ScaleRule::kFloor;
  a.is_unsigned = p.is_unsigned;
  a.wait = beside;

  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(a.prepare_ctas + CeilDiv(p.m, QuantizeV2Tokens(p.warps)));
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = beside ? 1 : 0;
  void* args[] = {&a};
  return cudaLaunchKernelExC(&config, kernel, args);
}

}  // namespace jax_w4a4
