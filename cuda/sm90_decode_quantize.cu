// Host side of the decode GEMM's quantizer.
#include "sm90_decode_quantize.h"

#include <cuda_runtime.h>

#include "launch.h"
#include "sm90_decode_quantize.cuh"

namespace jax_w4a4 {
namespace sm90 {
// One per path, in files that CMake writes.
const void* decode_quantize_kernel_Mxfp4(Source source, int chunks, int warps);
const void* decode_quantize_kernel_Nvfp4(Source source, int chunks, int warps);
const void* decode_quantize_kernel_Nvfp4Rounded(Source source, int chunks, int warps);
const void* decode_quantize_kernel_Int4Row(Source source, int chunks, int warps);
}  // namespace sm90

namespace {

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

const void* Kernel(GemmV2Path path, sm90::Source source, int chunks, int warps) {
  switch (path) {
    case GemmV2Path::kMxfp4:
      return sm90::decode_quantize_kernel_Mxfp4(source, chunks, warps);
    case GemmV2Path::kNvfp4:
      return sm90::decode_quantize_kernel_Nvfp4(source, chunks, warps);
    case GemmV2Path::kNvfp4Rounded:
      return sm90::decode_quantize_kernel_Nvfp4Rounded(source, chunks, warps);
    case GemmV2Path::kInt4Row:
      return sm90::decode_quantize_kernel_Int4Row(source, chunks, warps);
    default:
      return nullptr;
  }
}

}  // namespace

int LaunchDecodeQuantize(GemmV2Path path, const DecodeQuantizeParams& p,
                         int device, cudaStream_t stream) {
  const void* kernel = Kernel(path, sm90::source_of(p), p.chunks, p.warps);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  PreferShared(kernel, device);
  sm90::QuantizeV2Args a = {};
  a.groups = static_cast<int>(GemmV2ActBytes(path, p.k_pad) / kGemmV2RowBytes);
  sm90::set_token_args(&a, p, a.groups * GemmV2TileK(path), p.scale_dtype);
  a.act = static_cast<uint8_t*>(p.act);
  a.token_scale = p.token_scale;
  sm90::FewDownArgs down = {};
  down.x = static_cast<const __nv_bfloat16*>(p.x);
  down.lora_down = static_cast<const __nv_bfloat16*>(p.lora_down);
  down.lora_act = static_cast<__nv_bfloat16*>(p.lora_act);
  down.rank = p.rank;
  down.rank_tiles = CeilDiv(p.rank, kDecodeDownRanks);
  const int cluster = p.rank > 0 ? kDecodeDownCluster : 1;
  down.ctas = p.rank > 0 ? cluster * down.rank_tiles * CeilDiv(p.m, kDecodeDownTokens) : 0;

  cudaLaunchAttribute attribute = ClusterAttribute(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(down.ctas + CeilDiv(p.m, cluster) * cluster);
  config.blockDim = dim3(32 * p.warps);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* args[] = {&a, &down};
  return cudaLaunchKernelExC(&config, kernel, args);
}

}  // namespace jax_w4a4
