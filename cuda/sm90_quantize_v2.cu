// Host side of the v2 quantizer: tensor maps, grid, launch.
#include "sm90_quantize_v2.h"

#include <cuda_runtime.h>

#include "launch.h"
#include "sm90_quantize_v2.cuh"
#include "tensor_map.h"

namespace jax_w4a4 {
namespace {

static_assert(sm90::kQuantizeRows == kQuantizeV2Rows);
static_assert(sm90::kQuantizeStageK == kQuantizeV2StageK);
static_assert(sm90::kQuantizeThreads == kQuantizeV2Threads);

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

template <int kRanks>
const void* KernelOf(bool smooth, bool global) {
  if (smooth && global) {
    return reinterpret_cast<const void*>(
        &sm90::quantize_v2_kernel<kRanks, true, true>);
  }
  if (smooth) {
    return reinterpret_cast<const void*>(
        &sm90::quantize_v2_kernel<kRanks, true, false>);
  }
  if (global) {
    return reinterpret_cast<const void*>(
        &sm90::quantize_v2_kernel<kRanks, false, true>);
  }
  return reinterpret_cast<const void*>(
      &sm90::quantize_v2_kernel<kRanks, false, false>);
}

const void* Kernel(int64_t ranks, bool smooth, bool global) {
  switch (ranks) {
    case 0:
      return KernelOf<0>(smooth, global);
    case 32:
      return KernelOf<32>(smooth, global);
    case 64:
      return KernelOf<64>(smooth, global);
    case 128:
      return KernelOf<128>(smooth, global);
  }
  return nullptr;
}

}  // namespace

int LaunchQuantizeV2(const QuantizeV2Params& p, int device,
                     cudaStream_t stream) {
  const QuantizeV2Layout l =
      GetQuantizeV2Layout(p.k, p.rank, p.cluster, p.stages);
  sm90::QuantizeV2Args a = {};
  a.smooth = p.smooth;
  a.act_global_scale = p.global_scale;
  a.folded = static_cast<uint8_t*>(p.act);
  a.token_scale = p.token_scale;
  a.lora_act = static_cast<__nv_bfloat16*>(p.lora_act);
  a.rows = {static_cast<const uint8_t*>(p.weight.weight_scale),
            p.weight.weight_global_scale,
            p.weight.act_global_scale,
            p.weight.channel_scale,
            p.weight.bias,
            static_cast<sm90::RowInputs*>(p.weight.rows),
            static_cast<int>(p.weight.n),
            p.k_pad / 32};
  a.m = static_cast<int>(p.m);
  a.k = p.k;
  a.rank = p.rank;
  a.floor_rule = p.rule == ScaleRule::kFloor;
  // Whole clusters.
  a.prepare_ctas =
      CeilDiv(CeilDiv(p.weight.n, sm90::kRowsPerPrepareCta), p.cluster) *
      p.cluster;
  a.slice_groups = static_cast<int>(l.slice_groups);
  a.stages = p.stages;
  a.stage_bytes = static_cast<int>(l.stage_bytes);
  a.off_codes = static_cast<int>(l.codes);
  a.code_pitch = static_cast<int>(l.code_pitch);
  a.off_exponents = static_cast<int>(l.exponents);
  a.off_reciprocal = static_cast<int>(l.reciprocal);
  a.off_row_max = static_cast<int>(l.row_max);
  a.off_barriers = static_cast<int>(l.barriers);

  const auto bf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  TensorMaps maps;
  maps.Encode("x", &a.x, {p.x, p.m, p.k, bf16, 2}, kQuantizeV2Rows,
              kQuantizeV2StageK, CU_TENSOR_MAP_SWIZZLE_128B);
  if (l.ranks > 0) {
    const int box = l.ranks == 32 ? 32 : 64;
    maps.Encode("lora_down", &a.lora_down, {p.lora_down, p.k, p.rank, bf16, 2},
                kQuantizeV2StageK, box,
                box == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                          : CU_TENSOR_MAP_SWIZZLE_128B);
  }
  if (maps.refused() != nullptr) return cudaErrorInvalidValue;

  const void* kernel =
      Kernel(l.ranks, p.smooth != nullptr, p.global_scale != nullptr);
  if (int code = RaiseSmemLimit(kernel, device, static_cast<int>(l.total_bytes));
      code != cudaSuccess) {
    return code;
  }
  cudaLaunchAttribute attribute = ClusterAttribute(p.cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(a.prepare_ctas + CeilDiv(p.m, kQuantizeV2Rows) * p.cluster);
  config.blockDim = dim3(kQuantizeV2Threads);
  config.dynamicSmemBytes = l.total_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* args[] = {&a};
  return cudaLaunchKernelExC(&config, kernel, args);
}

}  // namespace jax_w4a4
