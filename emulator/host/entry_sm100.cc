// Plain C entries to the launch functions of the kernels for Blackwell, for
// emulator/blackwell.py. `device` as in entry_sm90.cc.
#include <cuda_runtime_api.h>

#include "sm100_down.h"
#include "sm100_gemm.h"
#include "sm100_quantize.h"
#include "sm100_scales.h"

using namespace jax_w4a4;

extern "C" {

int emulator_sm100_scales(const uint8_t* act_scale, const uint8_t* weight_scale,
                          uint8_t* act_atoms, uint8_t* weight_atoms, int64_t m,
                          int64_t n, int k_pad, int block) {
  return LaunchSm100Scales({act_scale, weight_scale, act_atoms, weight_atoms, m,
                            n, k_pad, block},
                           nullptr);
}

int emulator_sm100_down(const void* x, const void* lora_down, void* lora_act,
                        int64_t m, int k, int rank, int stages,
                        int off_barriers, int smem_bytes, int device) {
  return LaunchSm100Down({x, lora_down, lora_act, m, k, rank, stages,
                          off_barriers, smem_bytes},
                         device, nullptr);
}

// As Tokens in entry_sm90.cc.
struct Tokens {
  const void* x;
  const float* smooth;
  const float* global_scale;
  int64_t m;
  int k, k_pad;
  int chunks, warps;
  int x_dtype, rule, is_unsigned, beside;
};

int emulator_sm100_quantize(int format, const Tokens* t, void* packed,
                            uint8_t* act_atoms, const uint8_t* weight_scale,
                            uint8_t* weight_atoms, int64_t n) {
  Sm100QuantizeParams p = {};
  p.x = t->x;
  p.smooth = t->smooth;
  p.global_scale = t->global_scale;
  p.m = t->m;
  p.k = t->k;
  p.k_pad = t->k_pad;
  p.chunks = t->chunks;
  p.warps = t->warps;
  p.x_dtype = static_cast<DType>(t->x_dtype);
  p.rule = static_cast<ScaleRule>(t->rule);
  p.beside = t->beside != 0;
  p.packed = packed;
  p.act_atoms = act_atoms;
  p.weight_scale = weight_scale;
  p.weight_atoms = weight_atoms;
  p.n = n;
  return LaunchSm100Quantize(static_cast<Format>(format), p, nullptr);
}

struct Sm100GemmCall {
  const uint8_t* act;
  const uint8_t* act_atoms;
  const float* act_global_scale;
  const void* lora_act;
  const uint8_t* weight;
  const uint8_t* weight_atoms;
  const float* weight_global_scale;
  const void* lora_up;
  const float* channel_scale;
  const float* bias;
  void* out;
  int64_t m, n;
  int k_pad, rank, stages, store_stages, group_m, lora_dtype, out_dtype;
  int smem[8];  // in the order of Sm100GemmSmem
};

int emulator_sm100_gemm(int format, int group, int tile_n, const Sm100GemmCall* c,
                        int dependent, int device) {
  Sm100GemmParams p = {};
  p.act = c->act;
  p.act_scale = c->act_atoms;
  p.act_global_scale = c->act_global_scale;
  p.lora_act = c->lora_act;
  p.weight = c->weight;
  p.weight_scale = c->weight_atoms;
  p.weight_global_scale = c->weight_global_scale;
  p.lora_up = c->lora_up;
  p.channel_scale = c->channel_scale;
  p.bias = c->bias;
  p.out = c->out;
  p.m = c->m;
  p.n = c->n;
  p.k_pad = c->k_pad;
  p.rank = c->rank;
  p.stages = c->stages;
  p.store_stages = c->store_stages;
  p.group_m = c->group_m;
  p.lora_dtype = static_cast<DType>(c->lora_dtype);
  p.out_dtype = static_cast<DType>(c->out_dtype);
  const int* s = c->smem;
  p.smem = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]};
  return LaunchSm100Gemm(static_cast<Format>(format), group, tile_n, p,
                         dependent != 0, device, nullptr)
      .code;
}

}  // extern "C"
