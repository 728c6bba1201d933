// Host side of LoRA-down for Blackwell.
#include "sm100_down.h"

#include <cuda_runtime.h>

#include "launch.h"
#include "sm100_down.cuh"
#include "tensor_map.h"

namespace jax_w4a4 {

int LaunchSm100Down(const Sm100DownParams& p, int device, cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&sm100::down_kernel);
  sm100::DownArgs a = {};
  a.lora_act = static_cast<__nv_bfloat16*>(p.lora_act);
  a.m = static_cast<int>(p.m);
  a.rank = p.rank;
  a.steps = (p.k + sm100::kDownStageK - 1) / sm100::kDownStageK;
  a.stages = p.stages;
  a.off_barriers = p.off_barriers;

  const auto bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  TensorMaps maps;
  maps.Encode("x", &a.x, {p.x, p.m, p.k, bf16, 2}, kSm100DownTokens,
              sm100::kDownStageK, swizzle);
  maps.Encode("lora_down", &a.lora_down, {p.lora_down, p.k, p.rank, bf16, 2},
              sm100::kDownStageK, kSm100DownRanks, swizzle);
  if (maps.refused() != nullptr) return cudaErrorInvalidValue;

  if (int code = RaiseSmemLimit(kernel, device, p.smem_bytes);
      code != cudaSuccess) {
    return code;
  }
  const dim3 grid(
      static_cast<unsigned>((p.m + kSm100DownTokens - 1) / kSm100DownTokens),
      (p.rank + kSm100DownRanks - 1) / kSm100DownRanks);
  void* args[] = {&a};
  return cudaLaunchKernel(kernel, grid, dim3(sm100::kDownThreads), args,
                          p.smem_bytes, stream);
}

}  // namespace jax_w4a4
