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
  switch (GemmV2ActPath(path)) {
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

// CTAs that share a token, as a power of two: where few tokens are long.
int LogShared(const DecodeQuantizeParams& p) {
  return p.m > kDecodeDownTokens || p.chunks < 8 ? 0 : 2;
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
  down.m = static_cast<int>(p.m);
  down.k = p.k;
  down.rank = p.rank;
  down.log_shared = LogShared(p);
  const int64_t ctas = p.m << down.log_shared;

  // x: the cluster; y: tiles of ranks; z: tiles of tokens, then the quantizer.
  dim3 grid(1, 1, static_cast<unsigned>(ctas));
  down.sums = static_cast<float*>(p.down_sums);
  if (p.rank > 0 && p.down_sums == nullptr) {
    if (int code = AllowCluster(kernel, device, p.down_cluster);
        code != cudaSuccess) {
      return code;
    }
    grid.x = p.down_cluster;
    const int ranks = DecodeDownRanks(p.warps);
    grid.y = CeilDiv(p.rank, ranks);
    down.token_tiles = CeilDiv(p.m, kDecodeDownTokens);
    grid.z = down.token_tiles + CeilDiv(ctas, grid.x * grid.y);
    while (kDecodeDownTokens * ranks >> down.log_share > p.down_cluster) ++down.log_share;
  }
  cudaLaunchAttribute attribute = ClusterAttribute(grid.x);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(32 * p.warps);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* args[] = {&down, &a};
  return cudaLaunchKernelExC(&config, kernel, args);
}

}  // namespace jax_w4a4
