// Activation quantizer of the public layout: packed codes (M, k_pad / 2) and block scales, for an
// activation that several weights share. The same arithmetic on a token as the one for the v2 GEMM
// (sm90_quantize_token.cuh); here zeros keep their sign, as the format does.
#pragma once

#include <cstdint>

#include "sm90_quantize_token.cuh"

namespace jax_w4a4::sm90 {

struct QuantizePublicArgs : TokenArgs {
  uint32_t* packed;  // (M, k_layout / 8) words of eight codes
  void* scales;      // (M, blocks)
  int block_shift;   // int4: 2^block_shift pieces of eight k share a scale; -1: all of a token
};

// ---- codes ----

// (a & mask) | (b & ~mask)
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
  return d;
}

// Values over their block scale, brought to this unit, have e5m2 bytes sign << 7 | code << 1.
constexpr float kCodeUnit = 1.0f / 16384.0f;

// Eight e2m1 codes, element i in nibble i, of |v| <= 6 kCodeUnit.
__device__ __forceinline__ uint32_t encode_e2m1(const float (&v)[8]) {
  float even[4], odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = copysignf(round_e2m1(v[2 * i], kCodeUnit), v[2 * i]);
    odd[i] = copysignf(round_e2m1(v[2 * i + 1], kCodeUnit), v[2 * i + 1]);
  }
  const uint32_t e = pack_e5m2(even);
  const uint32_t o = pack_e5m2(odd);
  const uint32_t low = select_bits(e >> 4, e >> 1, 0x08080808u);
  const uint32_t high = select_bits(o, o << 3, 0x80808080u);
  return select_bits(low, high, 0x0F0F0F0Fu);
}

// Eight integers, two's complement or unsigned.
__device__ __forceinline__ uint32_t encode_int4(const float (&v)[8]) {
  const uint32_t low = pack_s8(v) & 0x0F0F0F0Fu;
  const uint32_t high = pack_s8(v + 4) & 0x0F0F0F0Fu;
  // Bytes 0 1 2 3 of both to nibbles 0..3 and 4..7.
  const uint32_t a = (low | low >> 4) & 0x00FF00FFu;
  const uint32_t b = (high | high >> 4) & 0x00FF00FFu;
  return prmt(a, b, 0x6420);
}

// Every half-float or float scale fits its dtype exactly: ChooseInt4Scale rounded it.
__device__ __forceinline__ void store_scale(void* scales, int64_t index, const BlockScale& scale,
                                            DType dtype) {
  if (dtype == DType::kF32) {
    static_cast<uint32_t*>(scales)[index] = scale.bits;
  } else {
    static_cast<uint16_t*>(scales)[index] = static_cast<uint16_t>(scale.bits);
  }
}

// ---- one token ----

template <Format kFormat, int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize_fp4(const QuantizePublicArgs& args, const X& x,
                                             int64_t token, const Place& at) {
  constexpr int kLanes = kFormat == Format::kMxfp4 ? 4 : 2;
  const int chunks = args.k_layout / 8;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    const float largest = x.largest(i);
    float v[8];
    x.get(i, v);
    uint32_t byte;
    const bool live = normalize_fp4<kFormat>(v, largest, args.floor_rule, byte);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= kCodeUnit;
    const uint32_t word = live ? encode_e2m1(v) : 0;
    const int c = chunk_of<kWarps>(at, i);
    if (c < chunks) {
      args.packed[token * chunks + c] = word;
      if (c % kLanes == 0) {
        static_cast<uint8_t*>(args.scales)[token * (chunks / kLanes) + c / kLanes] =
            static_cast<uint8_t>(byte);
      }
    }
  }
}

template <int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize_int4(const QuantizePublicArgs& args, const X& x,
                                              int64_t token, const Place& at) {
  const int chunks = args.k_layout / 8;
  // Bits of non-negative floats or NaN: ordered as integers.
  uint32_t row = 0;
  const bool per_token = args.block_shift < 0;
  if (per_token) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      row = max(row, __float_as_uint(x.largest(i, args.is_unsigned)));
    }
    row = token_max<kWarps>(row, at.slots, at.part, at.lane, at.barrier);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    uint32_t largest = row;
    if (!per_token) {
      largest = __float_as_uint(x.largest(i, args.is_unsigned));
      for (int d = 1; d < 1 << args.block_shift; d *= 2) {
        largest = max(largest, __shfl_xor_sync(kAllLanes, largest, d));
      }
    }
    const BlockScale scale = ChooseInt4Scale(largest, args.is_unsigned, args.scale_dtype);
    const Int4Codes codes(scale, args.is_unsigned);
    float v[8];
    x.get(i, v);
    codes(v);
    const int c = chunk_of<kWarps>(at, i);
    if (c < chunks) {
      args.packed[token * chunks + c] = scale.live ? encode_int4(v) : 0;
      const int block = per_token ? 0 : c >> args.block_shift;
      const bool first = per_token ? c == 0 : c == block << args.block_shift;
      const int64_t blocks = per_token ? 1 : chunks >> args.block_shift;
      if (first) store_scale(args.scales, token * blocks + block, scale, args.scale_dtype);
    }
  }
}

// ---- kernel ----

template <Format kFormat, Source kSource, int kChunks, int kWarps>
__global__ void __launch_bounds__(kQuantizeThreads<kWarps>,
                                  (kQuantizeBlocks<kSource, kChunks, kWarps>))
    quantize_public_kernel(const __grid_constant__ QuantizePublicArgs args) {
  constexpr int kTokens = kQuantizeTokens<kWarps>;
  __shared__ uint32_t slots[kTokens][kWarps];
  const int warp = threadIdx.x / 32;
  const int local = warp / kWarps;
  const int token = blockIdx.x * kTokens + local;
  const Place at = {warp % kWarps, static_cast<int>(threadIdx.x % 32), slots[local], 1 + local};
  if (token < args.m) {
    Chunks<kSource, kChunks> x;
    load_token<kSource, kChunks, kWarps>(args, token, chunk_of<kWarps>(at, 0), x);
    if constexpr (kFormat == Format::kInt4) {
      quantize_int4<kChunks, kWarps>(args, x, token, at);
    } else {
      quantize_fp4<kFormat, kChunks, kWarps>(args, x, token, at);
    }
  }
  end_after_launch_beside(args);
}

}  // namespace jax_w4a4::sm90
