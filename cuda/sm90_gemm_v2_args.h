// What the host tells every kernel that is made of GEMM v2's roles.
#ifndef JAX_W4A4_CUDA_SM90_GEMM_V2_ARGS_H_
#define JAX_W4A4_CUDA_SM90_GEMM_V2_ARGS_H_

#include "sm90_gemm_v2.cuh"
#include "sm90_gemm_v2.h"

namespace jax_w4a4 {

// All but tensor maps, m_tiles, n_tiles and group_m.
inline sm90::GemmV2Args CommonArgs(GemmV2Path path, int tile_m,
                                   const GemmV2Params& p) {
  const int stage_k = GemmV2TileK(path);
  sm90::GemmV2Args a = {};
  a.weight_scales = static_cast<const uint8_t*>(p.weight_scale);
  a.token_scale = p.token_scale;
  a.rows = static_cast<const sm90::RowInputs*>(p.rows);
  a.y = static_cast<__nv_bfloat16*>(p.out);
  a.m = static_cast<int>(p.m);
  a.n = static_cast<int>(p.n);
  a.k_blocks = (p.k_pad + stage_k - 1) / stage_k;
  a.scale_blocks = p.k_pad / p.block;
  for (a.group_shift = 0; p.block >> a.group_shift > 1;) ++a.group_shift;
  a.token_pitch = GemmV2TokenPitch(p.m, tile_m);
  a.scale_shift = p.scale_dtype == DType::kF32 ? 2 : 1;
  a.scale_left = p.scale_dtype == DType::kF32 ? 0 : 16;
  a.scale_half = p.scale_dtype == DType::kF16;
  a.promote_stages = p.promote_k / stage_k;
  a.lora_chunks = (p.rank + sm90::kLoraRanks - 1) / sm90::kLoraRanks;
  a.tma_store = p.n % 8 == 0;
  a.stages = p.stages;
  a.stage_bytes = p.smem.stage_bytes;
  a.off_weight = p.smem.weight;
  a.off_lora_up = p.smem.lora_up;
  a.off_store = p.smem.store;
  a.off_token = p.smem.token;
  a.off_barriers = p.smem.barriers;
  return a;
}

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_GEMM_V2_ARGS_H_
