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
const void* quantize_v2_kernel_Int4Scaled(Source source, int chunks, int warps);
}  // namespace sm90

namespace {

const void* Kernel(GemmV2Path path, sm90::Source source, int chunks, int warps) {
  switch (GemmV2ActPath(path)) {
    case GemmV2Path::kMxfp4:
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
    case GemmV2Path::kInt4Scaled:
      return sm90::quantize_v2_kernel_Int4Scaled(source, chunks, warps);
    default:
      return nullptr;
  }
}

}  // namespace

int LaunchQuantizeV2(GemmV2Path path, const QuantizeV2Params& p,
                     cudaStream_t stream) {
  const void* kernel = Kernel(path, sm90::source_of(p), p.chunks, p.warps);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  sm90::QuantizeV2Args a = {};
  a.groups = static_cast<int>(GemmV2ActBytes(path, p.k_pad) / kGemmV2RowBytes);
  sm90::set_token_args(&a, p, a.groups * GemmV2TileK(path), p.weight.scale_dtype);
  a.act = static_cast<uint8_t*>(p.act);
  a.token_scale = p.token_scale;
  a.token_pitch = p.token_pitch;
  a.block_lanes = p.block / 8;
  a.rows = sm90::row_inputs_args(path, p.weight, p.k_pad / p.block);
  a.prepare_ctas =
      sm90::prepare_ctas(path, a.rows, TokenQuantizerThreads(p.warps));
  if (p.weight.bounds != nullptr) {
    a.prepare_ctas += 1;
    a.weight_groups = static_cast<int>(p.weight.groups);
    a.tile_m = p.tile_m;
    a.table = static_cast<sm90::GroupTile*>(p.table);
    a.y = static_cast<__nv_bfloat16*>(p.y);
  }
  return sm90::launch_tokens(kernel, &a, p, a.prepare_ctas, stream);
}

}  // namespace jax_w4a4
