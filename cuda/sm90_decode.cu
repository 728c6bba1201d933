// Host side of the decode GEMM: tensor maps, grid, launch.
#include "sm90_decode.h"

#include <cuda_runtime.h>

#include "launch.h"
#include "sm90_decode.cuh"
#include "sm90_decode_kernels.h"  // written by CMake
#include "tensor_map.h"

namespace jax_w4a4 {
namespace sm90 {
// One per compiled path and token tile, in files that CMake writes with this list.
#define W4A4_KERNEL(path, tile_m) const void* decode_##path##_##tile_m(int rows);
W4A4_DECODE_KERNELS
#undef W4A4_KERNEL
}  // namespace sm90

static_assert(sm90::kBoxBytes == kGemmV2RowBytes);

const void* DecodeKernel(GemmV2Path path, int tile_m, int tile_n) {
  if (tile_n < 8 || tile_n > kDecodeMaxTileN || tile_n % 8 != 0) return nullptr;
#define W4A4_KERNEL(name, tile)                               \
  if (path == GemmV2Path::k##name && tile_m == tile) {        \
    return sm90::decode_##name##_##tile(DecodeShapeOf(tile_m, tile_n).rows); \
  }
  W4A4_DECODE_KERNELS
#undef W4A4_KERNEL
  return nullptr;
}

LaunchResult LaunchDecode(GemmV2Path path, int tile_m, const DecodeParams& p,
                          bool dependent, int device, cudaStream_t stream) {
  const void* kernel = DecodeKernel(path, tile_m, p.tile_n);
  if (kernel == nullptr) return {cudaErrorInvalidDeviceFunction, nullptr, 0};
  if (int code = RaiseSmemLimit(kernel, device, p.smem.total_bytes);
      code != cudaSuccess) {
    return {code, nullptr, 0};
  }
  const int block = DecodeBlock(path);
  sm90::DecodeArgs a = {};
  a.rows = sm90::row_inputs_args(path, p.row_inputs,
                                 block == 0 ? 1 : p.k_pad / block);
  a.token_scale = p.token_scale;
  a.lora_act = static_cast<const __nv_bfloat16*>(p.lora_act);
  a.lora_up = static_cast<const __nv_bfloat16*>(p.lora_up);
  a.y = static_cast<__nv_bfloat16*>(p.out);
  a.m = static_cast<int>(p.m);
  a.n = static_cast<int>(p.n);
  a.steps = static_cast<int>(DecodeSteps(tile_m, p.tile_n, p.k_pad));
  a.splits = p.splits;
  a.rank = p.rank;
  a.tile_n = p.tile_n;
  a.token_tiles = static_cast<int>(DecodeTokenTiles(p.m, tile_m));
  a.stages = p.stages;
  a.stage_bytes = p.smem.stage_bytes;
  a.off_act = p.smem.act;
  a.scale_boxes = static_cast<int>(
      DecodeScaleBoxes(path, tile_m, p.tile_n, p.k_pad, p.splits));
  a.scale_slots = static_cast<int>(DecodeScaleSlots(
      path, tile_m, p.tile_n, p.k_pad, p.splits, p.stages));
  a.off_scales = p.smem.scales;
  a.off_rows = p.smem.rows;
  a.off_tokens = p.smem.tokens;
  a.off_partial = p.smem.partial;
  a.off_addend = p.smem.addend;
  a.off_barriers = p.smem.barriers;

  const auto u8 = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  const int width = GemmV2ElementBytes(path);
  const int64_t columns = GemmV2ActBytes(path, p.k_pad) / width;
  TensorMaps maps;
  if (p.down_sums != nullptr) {
    sm90::DownAheadArgs& d = a.down;
    const auto bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    d.lora_act = static_cast<__nv_bfloat16*>(p.lora_act);
    d.sums = static_cast<float*>(p.down_sums);
    d.m = a.m;
    d.rank = p.rank;
    d.steps = (p.k + sm90::kDownStageK - 1) / sm90::kDownStageK;
    d.stages = p.down_stages;
    d.off_barriers = p.off_down_barriers;
    const int groups = DownAheadGroups(p.m);
    d.ctas = kDownAheadCtas * groups;
    d.box_rows = groups > 1 ? DownAheadTokens(tile_m, p.m) : a.m;
    a.early_ctas = p.early_ctas;
    maps.Encode("x", &d.x, {p.x, p.m, p.k, bf16, 2}, d.box_rows,
                sm90::kDownStageK, swizzle);
    maps.Encode("lora_down", &d.lora_down, {p.lora_down, p.k, p.rank, bf16, 2},
                sm90::kDownStageK, 64, swizzle);
  }
  maps.Encode("packed", &a.weight, {p.weight, p.n, p.k_pad / 2, u8, 1}, p.tile_n,
              sm90::kBoxBytes, swizzle);
  const int piece = sm90::kBoxBytes / width;
  maps.EncodePieces(
      "activation", &a.act,
      {p.act, DecodeActRows(p.m, tile_m), columns,
       width == 1 ? u8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, width},
      tile_m, piece, DecodeTileK(tile_m, p.tile_n) / piece, swizzle);
  a.scale_map = DecodeScaleMap(path, tile_m, p.tile_n, p.k_pad, p.splits);
  if (a.scale_map) {
    maps.Encode("weight_scale", &a.scales,
                {p.row_inputs.weight_scale, p.n, a.rows.scale_blocks, u8, 1},
                p.tile_n, kDecodeScaleBox, swizzle);
  }
  if (maps.refused() != nullptr) {
    return {cudaErrorInvalidValue, maps.refused(), 0};
  }

  cudaLaunchAttribute attributes[2] = {ClusterAttribute(p.splits), {}};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  const int tiles =
      a.token_tiles * static_cast<int>((p.n + p.tile_n - 1) / p.tile_n);
  const int grid = tiles * p.splits + a.down.ctas;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(DecodeThreads(tile_m));
  config.dynamicSmemBytes = p.smem.total_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  void* args[] = {&a};
  return {cudaLaunchKernelExC(&config, kernel, args), nullptr, grid};
}

}  // namespace jax_w4a4
