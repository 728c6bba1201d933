// Plain C entries to the launch functions, for emulator/product.py.
#include <cuda_runtime_api.h>

#include "sm90_decode.h"
#include "sm90_decode_quantize.h"
#include "sm90_down_v2.h"
#include "sm90_gemm_v1.h"
#include "sm90_gemm_v2.h"
#include "sm90_grouped.h"
#include "sm90_quantize_public.h"
#include "sm90_quantize_v2.h"
#include "sm90_repack_v2.h"

using namespace jax_w4a4;

// `device`: the launch code asks once per device how many clusters fit, so a
// machine that runs another number of them counts as another device.

extern "C" {

struct WeightRows {
  const void* weight_scale;
  const float* weight_global_scale;
  const float* act_global_scale;
  const float* channel_scale;
  const float* bias;
  void* rows;
  int64_t n;
  int scale_dtype;
  int64_t groups;
  const int* bounds;
  const uint8_t* scale_range;
};

static WeightRowParams Unpack(const WeightRows& w) {
  return {w.weight_scale,  w.weight_global_scale,
          w.act_global_scale, w.channel_scale,
          w.bias,          w.rows,
          w.n,             static_cast<DType>(w.scale_dtype),
          w.groups,        w.bounds,
          w.scale_range};
}

int emulator_repack_v2(int path, const uint8_t* packed, const void* scales,
                       void* act, float* token_scale, const WeightRows* weight,
                       int64_t m, int k_pad, int block, int tile_m,
                       int is_unsigned) {
  RepackV2Params p = {};
  p.packed = packed;
  p.scales = scales;
  p.act = act;
  p.token_scale = token_scale;
  p.weight = Unpack(*weight);
  p.m = m;
  p.k_pad = k_pad;
  p.block = block;
  p.is_unsigned = is_unsigned != 0;
  p.token_pitch = GemmV2TokenPitch(m, tile_m);
  return LaunchRepackV2(static_cast<GemmV2Path>(path), p, nullptr);
}

int emulator_down_v2(const void* x, const void* lora_down, void* lora_act,
                     int64_t m, int k, int rank, int cluster, int stages,
                     int off_barriers, int smem_bytes, int device,
                     int groups, const int* bounds) {
  DownV2Params p = {};
  p.groups = groups;
  p.bounds = bounds;
  p.x = x;
  p.lora_down = lora_down;
  p.lora_act = lora_act;
  p.m = m;
  p.k = k;
  p.rank = rank;
  p.cluster = cluster;
  p.stages = stages;
  p.off_barriers = off_barriers;
  p.smem_bytes = smem_bytes;
  return LaunchDownV2(p, device, nullptr);
}

// What both quantizers read.
struct Tokens {
  const void* x;
  const float* smooth;
  const float* global_scale;
  int64_t m;
  int k, k_pad;
  int chunks, warps;
  int x_dtype, rule, is_unsigned, beside;
};

static void SetTokens(TokenParams* p, const Tokens& t) {
  p->x = t.x;
  p->smooth = t.smooth;
  p->global_scale = t.global_scale;
  p->m = t.m;
  p->k = t.k;
  p->k_pad = t.k_pad;
  p->chunks = t.chunks;
  p->warps = t.warps;
  p->x_dtype = static_cast<DType>(t.x_dtype);
  p->rule = static_cast<ScaleRule>(t.rule);
  p->is_unsigned = t.is_unsigned != 0;
  p->beside = t.beside != 0;
}

int emulator_quantize_v2(int path, const Tokens* t, void* act,
                         float* token_scale, const WeightRows* weight,
                         int block, int tile_m, void* table, void* y) {
  QuantizeV2Params p = {};
  p.tile_m = tile_m;
  p.table = table;
  p.y = y;
  SetTokens(&p, *t);
  p.act = act;
  p.token_scale = token_scale;
  p.token_pitch = GemmV2TokenPitch(t->m, tile_m);
  p.block = block;
  p.weight = Unpack(*weight);
  return LaunchQuantizeV2(static_cast<GemmV2Path>(path), p, nullptr);
}

int emulator_decode_quantize(int path, const Tokens* t, void* act,
                             float* token_scale, int scale_dtype,
                             const void* lora_down, void* lora_act, int rank,
                             int down_cluster, void* down_sums) {
  DecodeQuantizeParams p = {};
  SetTokens(&p, *t);
  p.beside = false;
  p.act = act;
  p.token_scale = token_scale;
  p.scale_dtype = static_cast<DType>(scale_dtype);
  p.lora_down = lora_down;
  p.lora_act = lora_act;
  p.rank = rank;
  p.down_cluster = down_cluster;
  p.down_sums = down_sums;
  return LaunchDecodeQuantize(static_cast<GemmV2Path>(path), p, 0, nullptr);
}

int emulator_quantize_public(int format, const Tokens* t, void* packed,
                             void* scales, int block, int scale_dtype) {
  QuantizePublicParams p = {};
  SetTokens(&p, *t);
  p.packed = packed;
  p.scales = scales;
  p.block = block;
  p.scale_dtype = static_cast<DType>(scale_dtype);
  return LaunchQuantizePublic(static_cast<Format>(format), p, nullptr);
}

// groups > 0: the grouped kernel. smem: weight, lora_up, store, token, barriers, stage_bytes, total_bytes.
int emulator_gemm_v2(int path, int tile_m, int cluster, const void* act,
                     const float* token_scale, const void* rows,
                     const uint8_t* weight, const void* weight_scale,
                     const void* lora_act, const void* lora_up, void* out,
                     int64_t m, int64_t n, int k_pad, int rank, int stages,
                     int group_m, int promote_k, int block, int scale_dtype,
                     const int* smem, int dependent, int device,
                     int64_t groups, const void* table) {
  GemmV2Params p = {};
  p.act = act;
  p.token_scale = token_scale;
  p.rows = rows;
  p.weight = weight;
  p.weight_scale = weight_scale;
  p.lora_act = lora_act;
  p.lora_up = lora_up;
  p.out = out;
  p.m = m;
  p.n = n;
  p.k_pad = k_pad;
  p.rank = rank;
  p.stages = stages;
  p.group_m = group_m;
  p.promote_k = promote_k;
  p.block = block;
  p.scale_dtype = static_cast<DType>(scale_dtype);
  p.smem = {smem[0], smem[1], smem[2], smem[3], smem[4], smem[5], smem[6]};
  if (groups > 0) {
    return LaunchGrouped(static_cast<GemmV2Path>(path), tile_m,
                         {p, groups, table}, dependent != 0, device, nullptr)
        .code;
  }
  return LaunchGemmV2(static_cast<GemmV2Path>(path), tile_m, cluster, p,
                      dependent != 0, device, nullptr)
      .code;
}

// LoRA-down in the gemm's launch.
struct DownAhead {
  void* sums;  // null: none
  const void* x;
  const void* lora_down;
  int k, stages, off_barriers, early;
};

// smem: in the order of DecodeSmem.
int emulator_decode(int path, int tile_m, int tile_n, int splits, const void* act,
                    const float* token_scale, const WeightRows* rows,
                    const uint8_t* weight, void* lora_act,
                    const void* lora_up, void* out, int64_t m, int64_t n,
                    int k_pad, int rank, int stages, const int* smem,
                    int dependent, int device, const DownAhead* down) {
  DecodeParams p = {};
  p.act = act;
  p.token_scale = token_scale;
  p.weight = weight;
  p.row_inputs = Unpack(*rows);
  p.lora_act = lora_act;
  p.lora_up = lora_up;
  p.out = out;
  p.m = m;
  p.n = n;
  p.k_pad = k_pad;
  p.rank = rank;
  p.tile_n = tile_n;
  p.splits = splits;
  p.stages = stages;
  p.smem = {smem[0], smem[1], smem[2], smem[3], smem[4],
            smem[5], smem[6], smem[7], smem[8]};
  p.down_sums = down->sums;
  p.x = down->x;
  p.lora_down = down->lora_down;
  p.k = down->k;
  p.down_stages = down->stages;
  p.off_down_barriers = down->off_barriers;
  p.early_ctas = down->early;
  return LaunchDecode(static_cast<GemmV2Path>(path), tile_m, p, dependent != 0,
                      device, nullptr)
      .code;
}

struct GemmV1Call {
  const uint8_t* act;
  const void* act_scale;
  const float* act_global_scale;
  const void* lora_act;
  const uint8_t* weight;
  const void* weight_scale;
  const float* weight_global_scale;
  const void* lora_up;
  const float* channel_scale;
  const float* bias;
  void* out;
  int64_t m, n;
  int k_pad, block, rank, scale_dtype, is_unsigned;
  int smem[12];  // in the order of GemmSmem
};

// bf16 results and low-rank operands.
int emulator_gemm_v1(int format, int tile_m, const GemmV1Call* c) {
  GemmParams p = {};
  p.act = c->act;
  p.act_scale = c->act_scale;
  p.act_global_scale = c->act_global_scale;
  p.lora_act = c->lora_act;
  p.weight = c->weight;
  p.weight_scale = c->weight_scale;
  p.weight_global_scale = c->weight_global_scale;
  p.lora_up = c->lora_up;
  p.channel_scale = c->channel_scale;
  p.bias = c->bias;
  p.out = c->out;
  p.m = c->m;
  p.n = c->n;
  p.k_pad = c->k_pad;
  p.block = c->block;
  p.rank = c->rank;
  p.scale_dtype = static_cast<DType>(c->scale_dtype);
  p.lora_dtype = p.out_dtype = DType::kBf16;
  p.is_unsigned = c->is_unsigned != 0;
  const int* s = c->smem;
  p.smem = {s[0], s[1], s[2], s[3], s[4],  s[5],
            s[6], s[7], s[8], s[9], s[10], s[11]};
  const Format kind = static_cast<Format>(format);
  if (int code = cudaFuncSetAttribute(
          GemmV1Kernel(kind, tile_m),
          cudaFuncAttributeMaxDynamicSharedMemorySize, p.smem.total_bytes);
      code != cudaSuccess) {
    return code;
  }
  return LaunchGemmV1(kind, tile_m, p, false, nullptr);
}

}  // extern "C"
