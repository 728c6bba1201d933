// Host side of the GEMM for Blackwell: tensor maps, grid, launch.
#include "sm100_gemm.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "launch.h"
#include "sm100_gemm.cuh"
#include "tensor_map.h"

namespace jax_w4a4 {

const bool kBuiltForSm100 = true;

static_assert(sm100::kGemmThreads == kSm100Threads);
static_assert(4 * sm100::kStoreBytes == kSm100StoreBytes);

namespace {

template <int kBlock>
const void* Kernel(int group, int tile_n) {
#define W4A4_CASE(g, n)                                                         \
  if (group == g && tile_n == n) {                                              \
    return reinterpret_cast<const void*>(&sm100::gemm_kernel<g, n, kBlock>);    \
  }
  W4A4_CASE(2, 256)
  W4A4_CASE(2, 128)
  W4A4_CASE(1, 256)
  W4A4_CASE(1, 128)
  W4A4_CASE(1, 64)
#undef W4A4_CASE
  return nullptr;
}

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

const void* Sm100GemmKernel(Format format, int group, int tile_n) {
  switch (format) {
    case Format::kNvfp4:
      return Kernel<16>(group, tile_n);
    case Format::kMxfp4:
      return Kernel<32>(group, tile_n);
    case Format::kInt4:
      break;
  }
  return nullptr;
}

LaunchResult LaunchSm100Gemm(Format format, int group, int tile_n,
                             const Sm100GemmParams& p, bool dependent,
                             int device, cudaStream_t stream) {
  const void* kernel = Sm100GemmKernel(format, group, tile_n);
  if (kernel == nullptr) return {cudaErrorInvalidDeviceFunction, nullptr, 0};
  int clusters = 0;
  if (int code = RaiseSmemLimit(kernel, device, p.smem.total_bytes);
      code != cudaSuccess) {
    return {code, nullptr, 0};
  }
  if (int code = MaxClusters(kernel, group, kSm100Threads, p.smem.total_bytes,
                             device, &clusters);
      code != cudaSuccess) {
    return {code, nullptr, 0};
  }

  const int block = format == Format::kNvfp4 ? 16 : 32;
  const int tile_m = 128 * group;
  sm100::GemmArgs a = {};
  a.act_global_scale = p.act_global_scale;
  a.weight_global_scale = p.weight_global_scale;
  a.channel_scale = p.channel_scale;
  a.bias = p.bias;
  a.y = p.out;
  a.m = static_cast<int>(p.m);
  a.n = static_cast<int>(p.n);
  a.k_stages = CeilDiv(p.k_pad, kSm100StageK);
  a.lora_stages = CeilDiv(p.rank, kSm100StageRanks);
  a.atoms = static_cast<int>(Sm100Atoms(p.k_pad, block));
  a.m_tiles = CeilDiv(p.m, tile_m);
  a.n_tiles = CeilDiv(p.n, tile_n);
  a.group_m = std::min(p.group_m, a.m_tiles);
  a.tma_store = p.n % 8 == 0;
  a.lora_bf16 = p.lora_dtype == DType::kBf16;
  a.out_bf16 = p.out_dtype == DType::kBf16;
  a.stages = p.stages;
  a.store_stages = p.store_stages;
  a.off_act = p.smem.act;
  a.off_weight = p.smem.weight;
  a.off_act_scale = p.smem.act_scale;
  a.off_weight_scale = p.smem.weight_scale;
  a.off_store = p.smem.store;
  a.off_aux = p.smem.aux;
  a.off_barriers = p.smem.barriers;

  const auto u8 = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto u32 = CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const auto lora = a.lora_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto out = a.out_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  const int w_rows = tile_n / group;
  TensorMaps maps;
  maps.Encode("activation", &a.act, {p.act, p.m, p.k_pad / 2, u8, 1}, 128,
              kSm100RowBytes, swizzle);
  maps.Encode("packed", &a.weight, {p.weight, p.n, p.k_pad / 2, u8, 1}, w_rows,
              kSm100RowBytes, swizzle);
  const auto atoms = [&](const uint8_t* data, int64_t rows) {
    return Matrix{data, Sm100AtomTiles(rows) * a.atoms, kSm100AtomBytes / 4, u32,
                  4};
  };
  maps.Encode("activation scales", &a.act_scale, atoms(p.act_scale, p.m),
              Sm100StageAtoms(block), kSm100AtomBytes / 4,
              CU_TENSOR_MAP_SWIZZLE_NONE);
  maps.Encode("scales", &a.weight_scale, atoms(p.weight_scale, p.n),
              Sm100StageAtoms(block), kSm100AtomBytes / 4,
              CU_TENSOR_MAP_SWIZZLE_NONE);
  if (p.rank > 0) {
    maps.Encode("lora_act", &a.lora_act, {p.lora_act, p.m, p.rank, lora, 2}, 128,
                kSm100StageRanks, swizzle);
    maps.Encode("lora_up", &a.lora_up, {p.lora_up, p.n, p.rank, lora, 2}, w_rows,
                kSm100StageRanks, swizzle);
  }
  if (a.tma_store) {
    maps.Encode("result", &a.out, {p.out, p.m, p.n, out, 2}, 32,
                sm100::kStoreColumns, CU_TENSOR_MAP_SWIZZLE_64B);
  }
  if (maps.refused() != nullptr) {
    return {cudaErrorInvalidValue, maps.refused(), 0};
  }

  const int64_t tiles = int64_t{a.m_tiles} * a.n_tiles;
  clusters = static_cast<int>(std::min<int64_t>(clusters, tiles));
  return LaunchClusters(kernel, &a, clusters, group, kSm100Threads,
                        p.smem.total_bytes, dependent, stream);
}

}  // namespace jax_w4a4
