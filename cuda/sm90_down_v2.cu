// Host side of LoRA-down v2: tensor maps, grid, launch.
#include "sm90_down_v2.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "launch.h"
#include "sm90_down_v2.cuh"
#include "tensor_map.h"

namespace jax_w4a4 {

static_assert(sm90::kDownTokens == kDownV2Tokens);
static_assert(sm90::kDownXBytes<kDownV2Tokens> + sm90::kDownRankBytes == DownV2StageBytes(64));

namespace {

template <int kTokens>
const void* Kernel(int tiles) {
  return tiles == 1   ? reinterpret_cast<const void*>(&sm90::down_v2_kernel<1, 1, kTokens>)
         : tiles == 2 ? reinterpret_cast<const void*>(&sm90::down_v2_kernel<2, 1, kTokens>)
                      : reinterpret_cast<const void*>(&sm90::down_v2_kernel<2, 2, kTokens>);
}

}  // namespace

int LaunchDownV2(const DownV2Params& p, int device, cudaStream_t stream) {
  const int tiles = DownV2RankTiles(p.rank);
  const int tokens = DownV2Tokens(p.groups, p.m);
  const void* kernel = tokens == 16 ? Kernel<16>(tiles) : Kernel<kDownV2Tokens>(tiles);
  sm90::DownV2Args a = {};
  a.lora_act = static_cast<__nv_bfloat16*>(p.lora_act);
  a.m = static_cast<int>(p.m);
  a.rank = p.rank;
  a.steps = (p.k + sm90::kDownStageK - 1) / sm90::kDownStageK;
  a.cluster = p.cluster;
  a.stages = p.stages;
  a.off_barriers = p.off_barriers;
  a.groups = p.groups;
  a.bounds = p.bounds;

  const auto bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  TensorMaps maps;
  maps.Encode("x", &a.x, {p.x, p.m, p.k, bf16, 2}, tokens,
              sm90::kDownStageK, swizzle);
  maps.Encode("lora_down", &a.lora_down,
              {p.lora_down, p.k, p.rank, bf16, 2, p.groups}, sm90::kDownStageK,
              64, swizzle);
  if (maps.refused() != nullptr) return cudaErrorInvalidValue;

  if (int code = RaiseSmemLimit(kernel, device, p.smem_bytes);
      code != cudaSuccess) {
    return code;
  }
  cudaLaunchAttribute attribute = ClusterAttribute(p.cluster);
  // With groups the most that there can be.
  const int64_t token_tiles = (p.m + tokens - 1) / tokens +
                              std::min<int64_t>(p.groups, p.m);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(token_tiles * p.cluster));
  config.blockDim = dim3(DownV2Threads(p.rank));
  config.dynamicSmemBytes = p.smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* args[] = {&a};
  return cudaLaunchKernelExC(&config, kernel, args);
}

}  // namespace jax_w4a4
