// Activation quantizer of the v2 GEMM: x (M, K) straight into the GEMM's activation layout
// (sm90_quantize_token.cuh has what a token goes through). Leading CTAs prepare the GEMM's weight rows.
// LoRA-down is a launch of its own before this one (sm90_down_v2.cuh) and runs beside it: the two share
// no data but x. Layouts of 8-bit and 16-bit operands: sm90_expand.cuh.
#pragma once

#include <cstdint>

#include "sm90_expand.cuh"
#include "sm90_gemm_v2.h"
#include "sm90_groups.cuh"
#include "sm90_quantize_token.cuh"
#include "sm90_row_inputs.cuh"

namespace jax_w4a4::sm90 {

struct QuantizeV2Args : TokenArgs {
  uint8_t* act;        // (M, 128 groups)
  float* token_scale;  // (M,), or (groups of K, token_pitch); paths that have one
  RowInputsArgs rows;
  int prepare_ctas;
  int groups;  // 128 bytes of the layout each, per token
  int block_lanes;  // lanes that hold a block, Int4Scaled
  int64_t token_pitch;
  // With groups of rows (args.rows.bounds): smooth and act_global_scale of a token are its group's, one
  // more leading CTA writes the gemm's table, and the tokens of no group write their rows of y.
  int weight_groups;  // 0: one weight
  int tile_m;
  GroupTile* table;
  __nv_bfloat16* y;
};

// ---- stores ----

// Words of k 0..3 and 4..7 of a chunk to their places: halves h = 0 and 1 of step s of the 128-k group,
// four bytes for each block q. Lanes of neighbouring blocks swap halves, so that each stores eight
// bytes. s = lane % 4 and q = lane / 4 % 4; with kHalves the order is one of 64 k at a time, and
// s = 2 (lane / 8 % 2) + lane % 2, q = lane / 2 % 4.
template <bool kHalves = false>
__device__ __forceinline__ void store_8bit(uint8_t* group, uint32_t word0, uint32_t word1, int lane,
                                           bool inside) {
  const int q = kHalves ? lane / 2 % 4 : lane / 4 % 4;
  const int s = kHalves ? 2 * (lane / 8 % 2) + lane % 2 : lane % 4;
  const bool odd = q % 2 == 1;
  const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? word0 : word1, kHalves ? 2 : 4);
  const uint2 pair = odd ? make_uint2(other, word1) : make_uint2(word0, other);
  uint8_t* at = group + 32 * s + (odd ? 16 + 4 * (q - 1) : 4 * q);
  if (inside) *reinterpret_cast<uint2*>(at) = pair;
}

// Pairs (k, k + 4) of a chunk, k = 0..3, are word w = k of block q = lane / 2 % 4 in half lane % 2 of
// the 64-k group, at 64 (lane % 2) + 16 w + 4 q. The four lanes of a half transpose them, so that lane
// q stores word q of every block: 16 bytes.
__device__ __forceinline__ void store_16bit(uint8_t* group, uint32_t (&w)[4], int lane,
                                            bool inside) {
  const bool q0 = lane & 2;
  const bool q1 = lane & 4;
  const uint32_t a = __shfl_xor_sync(kAllLanes, q0 ? w[0] : w[1], 2);
  const uint32_t b = __shfl_xor_sync(kAllLanes, q0 ? w[2] : w[3], 2);
  (q0 ? w[0] : w[1]) = a;
  (q0 ? w[2] : w[3]) = b;
  const uint32_t c = __shfl_xor_sync(kAllLanes, q1 ? w[0] : w[2], 4);
  const uint32_t d = __shfl_xor_sync(kAllLanes, q1 ? w[1] : w[3], 4);
  (q1 ? w[0] : w[2]) = c;
  (q1 ? w[1] : w[3]) = d;
  uint8_t* at = group + 64 * (lane % 2) + 16 * (lane / 2 % 4);
  if (inside) *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
}

// ---- one token ----

// At: Place, or what takes its place where several CTAs share a token.

// e5m2, blocks of four lanes. The fold cancels a block's own scale: every value of the token is
// multiplied by one power of two and rounded on the grid of its block, 2^(offset - kFoldBias).
template <int kChunks, int kWarps, class X, class At>
__device__ __forceinline__ void quantize_mxfp4(const QuantizeV2Args& args, const X& x, int token,
                                               uint8_t* out, const At& at) {
  uint32_t bytes[(kChunks + 3) / 4] = {};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    const int byte = block_scale_mxfp4(x.largest(i), args.floor_rule);
    largest = max(largest, static_cast<uint32_t>(byte));
    bytes[i / 4] = i % 4 == 0 ? byte : bytes[i / 4] | byte << 8 * (i % 4);
  }
  largest = token_max<kWarps>(largest, at.slots, at.part, at.lane, at.barrier);
  const int base = static_cast<int>(largest) - kFoldSpan;
  if (at.writes_scale()) {
    args.token_scale[token] = largest == kNanScale ? __int_as_float(kFloatNan)
                                                   : power_of_two(fold_exponent(largest));
  }
  // The floor rule and Inf, whose scale is the largest, leave the range of the codes.
  const bool outside = args.floor_rule || largest >= kLargestScale;
  // In two factors where one would overflow: the largest block scale is below 2^-114.
  const int exponent = 127 - base - kFoldBias;
  const float factor = power_of_two(min(exponent, 127));
  const float more = power_of_two(max(exponent - 127, 0));
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    if (!at.writes(i)) continue;
    float v[8];
    x.get(i, v);
    if (exponent > 127) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = multiply_flush(v[j], more);
    }
    const int byte = bytes[i / 4] >> 8 * (i % 4) & 0xFF;
    const bool flushed = byte < base || byte == 0;
    const float unit = flushed ? 0.0f : power_of_two(byte - base - kFoldBias);
    const float scale = flushed ? 0.0f : factor;
    float r[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) r[j] = multiply_flush(v[j], scale);
    if (outside) {
#pragma unroll
      for (float& f : r) f = clamp(f, -6.0f * unit, 6.0f * unit);
    }
#pragma unroll
    for (float& f : r) f = round_e2m1(f, unit);
    const int c = chunk_of<kWarps>(at, i);
    store_8bit(out + c / 16 * 128, pack_e5m2(r), pack_e5m2(r + 4), at.lane, c / 16 < args.groups);
  }
}

// bf16, exact.
template <int kChunks, int kWarps, class X, class At>
__device__ __forceinline__ void quantize_nvfp4(const QuantizeV2Args& args, const X& x, uint8_t* out,
                                               const At& at) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    if (!at.writes(i)) continue;
    uint32_t byte;
    const float scale = block_scale_nvfp4(x.largest(i), byte);
    float v[8];
    x.get(i, v);
    round_nvfp4(v, scale);
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = prmt(__float_as_uint(v[j]), __float_as_uint(v[j + 4]), 0x7632);
    }
    const int c = chunk_of<kWarps>(at, i);
    store_16bit(out + c / 8 * 128, words, at.lane, c / 8 < args.groups);
  }
}

// e4m3 of the exact values over a power of two that the token's largest scale decides.
template <int kChunks, int kWarps, class X, class At>
__device__ __forceinline__ void quantize_nvfp4_rounded(const QuantizeV2Args& args, const X& x,
                                                       int token, uint8_t* out, const At& at) {
  float scales[kChunks] = {};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    uint32_t byte;
    scales[i] = block_scale_nvfp4(x.largest(i), byte);
    largest = max(largest, byte & 0x7F);
  }
  largest = token_max<kWarps>(largest, at.slots, at.part, at.lane, at.barrier);
  const int exponent = rounded_exponent(largest);
  if (at.writes_scale()) {
    args.token_scale[token] =
        largest == 0x7F ? __int_as_float(kFloatNan) : power_of_two(exponent);
  }
  const float inverse = power_of_two(-exponent);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    if (!at.writes(i)) continue;
    float v[8];
    x.get(i, v);
    round_nvfp4(v, scales[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= inverse;
    const int c = chunk_of<kWarps>(at, i);
    store_8bit(out + c / 16 * 128, pack_e4m3(v), pack_e4m3(v + 4), at.lane, c / 16 < args.groups);
  }
}

// Integers as bytes, one scale per token.
template <int kChunks, int kWarps, class X, class At>
__device__ __forceinline__ void quantize_int4_row(const QuantizeV2Args& args, const X& x, int token,
                                              uint8_t* out, const At& at) {
  uint32_t largest = 0;  // bits of a non-negative float or NaN: ordered as integers
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    largest = max(largest, __float_as_uint(x.largest(i, args.is_unsigned)));
  }
  largest = token_max<kWarps>(largest, at.slots, at.part, at.lane, at.barrier);
  const BlockScale scale = ChooseInt4Scale(largest, args.is_unsigned, args.scale_dtype);
  if (at.writes_scale()) args.token_scale[token] = Flush(scale.factor);
  const Int4Codes codes(scale, args.is_unsigned);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    if (!at.writes(i)) continue;
    float v[8];
    x.get(i, v);
    codes(v);
    const int c = chunk_of<kWarps>(at, i);
    store_8bit(out + c / 16 * 128, pack_s8(v), pack_s8(v + 4), at.lane, c / 16 < args.groups);
  }
}

// Integers as e4m3, which holds -8..16, and a scale for each kLanes lanes of a token.
template <int kLanes, int kChunks, int kWarps, class X, class At>
__device__ __forceinline__ void quantize_int4_groups(const QuantizeV2Args& args, const X& x,
                                                     int token, uint8_t* out, const At& at) {
  const int groups = (args.k + 8 * kLanes - 1) / (8 * kLanes);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    // Bits of a non-negative float or NaN: ordered as integers.
    uint32_t largest = __float_as_uint(x.largest(i, args.is_unsigned));
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, d));
    }
    const BlockScale scale = ChooseInt4Scale(largest, args.is_unsigned, args.scale_dtype);
    const int c = chunk_of<kWarps>(at, i);
    const int group = c / kLanes;
    if (c % kLanes == 0 && group < groups) {
      args.token_scale[group * args.token_pitch + token] = Flush(scale.factor);
    }
    const Int4Codes codes(scale, args.is_unsigned);
    float v[8];
    x.get(i, v);
    codes(v);
#pragma unroll
    for (float& f : v) f = (f + kRound) - kRound;
    store_8bit<true>(out + c / 16 * 128, pack_e4m3(v), pack_e4m3(v + 4), at.lane,
                     c / 16 < args.groups);
  }
}

// fp16 of code times scale, over a power of two that the token's largest scale decides.
template <int kChunks, int kWarps, class X, class At>
__device__ __forceinline__ void quantize_int4_scaled(const QuantizeV2Args& args, const X& x,
                                                     int token, uint8_t* out, const At& at) {
  float scales[kChunks] = {};
  uint32_t largest = 0;  // bits of a non-negative float or NaN: ordered as integers
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    uint32_t amax = __float_as_uint(x.largest(i, args.is_unsigned));
#pragma unroll
    for (int d = 1; d < 16; d *= 2) {
      // Without a branch: a lane is its own neighbour past the block's end.
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, d < args.block_lanes ? d : 0));
    }
    scales[i] = Flush(ChooseInt4Scale(amax, args.is_unsigned, args.scale_dtype).factor);
    largest = max(largest, __float_as_uint(scales[i]));
  }
  largest = token_max<kWarps>(largest, at.slots, at.part, at.lane, at.barrier);
  const int exponent = scaled_exponent(largest);
  if (at.writes_scale()) {
    args.token_scale[token] =
        largest >= kFloatInf ? __int_as_float(kFloatNan) : power_of_two(exponent);
  }
  const float inverse = power_of_two(-exponent);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    const BlockScale scale = {0, scales[i], scales[i] > 0.0f};
    const Int4Codes codes(scale, args.is_unsigned);
    const uint32_t pair = scaled_f16x2(scales[i], inverse);
    const float factor = __half2float(__ushort_as_half(static_cast<uint16_t>(pair)));
    float v[8];
    x.get(i, v);
    codes(v);
    // (code + kRound) * factor - kRound * factor, exact: 15 bits.
    const float offset = kRound * factor;
#pragma unroll
    for (float& f : v) f = fmaf(f + kRound, factor, -offset);
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack_f16(v[j], v[j + 4]);
    const int c = chunk_of<kWarps>(at, i);
    store_16bit(out + c / 8 * 128, words, at.lane, c / 8 < args.groups);
  }
}

// ---- kernel ----

// Zeros, by the warps of the token.
template <int kWarps>
__device__ __forceinline__ void clear_row(const QuantizeV2Args& args, int token, const Place& at) {
  const int n = args.rows.group_rows;
  __nv_bfloat16* row = args.y + static_cast<int64_t>(token) * n;
  const int width = n % 8 == 0 ? 8 : 1;
  for (int i = (at.part * 32 + at.lane) * width; i < n; i += 32 * kWarps * width) {
    if (width == 8) {
      *reinterpret_cast<uint4*>(row + i) = make_uint4(0, 0, 0, 0);
    } else {
      row[i] = __float2bfloat16_rn(0.0f);
    }
  }
}

// Moves smooth and act_global_scale on to those of the token's group; false if it has none.
__device__ __forceinline__ bool choose_group(TokenArgs& args, const int* bounds, int groups,
                                             int token, int lane) {
  const int group = find_group(bounds, groups, token, lane);
  if (args.smooth != nullptr) args.smooth += static_cast<int64_t>(group) * args.k;
  if (args.act_global_scale != nullptr) args.act_global_scale += group;
  return group >= 0;
}

template <GemmV2Path kPath>
__device__ __forceinline__ void prepare_weight_rows(const QuantizeV2Args& args, int warps) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (args.weight_groups > 0 && static_cast<int>(blockIdx.x) == args.prepare_ctas - 1) {
    if (warp == 0) {
      write_group_table(args.rows.bounds, args.weight_groups, args.tile_m, lane, args.table);
    }
    return;
  }
  if constexpr (kPath == GemmV2Path::kInt4Scaled) {
    write_rows<Format::kInt4>(args.rows, blockIdx.x, warp, warps, lane);
  } else if constexpr (kPath >= GemmV2Path::kInt4Row) {
    write_int4_row_inputs(args.rows, blockIdx.x * 32 * warps + threadIdx.x);
  } else {
    constexpr Format kFormat =
        kPath == GemmV2Path::kMxfp4 ? Format::kMxfp4 : Format::kNvfp4;
    write_rows<kFormat>(args.rows, blockIdx.x, warp, warps, lane);
  }
}

// kPath is a GemmV2ActPath. `source`: args, or what they are for
// the token's group.
template <GemmV2Path kPath, Source kSource, int kChunks, int kWarps, class At>
__device__ __forceinline__ void quantize_token(const QuantizeV2Args& args, const TokenArgs& source,
                                               int token, const At& at) {
  Chunks<kSource, kChunks> x;
  load_token<kSource, kChunks, kWarps>(source, token, chunk_of<kWarps>(at, 0), x);
  uint8_t* out = args.act + static_cast<int64_t>(token) * args.groups * 128;
  if constexpr (kPath == GemmV2Path::kMxfp4) {
    quantize_mxfp4<kChunks, kWarps>(args, x, token, out, at);
  } else if constexpr (kPath == GemmV2Path::kNvfp4) {
    quantize_nvfp4<kChunks, kWarps>(args, x, out, at);
  } else if constexpr (kPath == GemmV2Path::kNvfp4Rounded) {
    quantize_nvfp4_rounded<kChunks, kWarps>(args, x, token, out, at);
  } else if constexpr (kPath == GemmV2Path::kInt4Row) {
    quantize_int4_row<kChunks, kWarps>(args, x, token, out, at);
  } else if constexpr (kPath == GemmV2Path::kInt4Scaled) {
    quantize_int4_scaled<kChunks, kWarps>(args, x, token, out, at);
  } else {
    constexpr int kLanes = kPath == GemmV2Path::kInt4Group64 ? 8 : 16;
    quantize_int4_groups<kLanes, kChunks, kWarps>(args, x, token, out, at);
  }
}

template <GemmV2Path kPath, Source kSource, int kChunks, int kWarps>
__global__ void __launch_bounds__(kQuantizeThreads<kWarps>,
                                  (kQuantizeBlocks<kSource, kChunks, kWarps>))
    quantize_v2_kernel(const __grid_constant__ QuantizeV2Args args) {
  constexpr int kTokens = kQuantizeTokens<kWarps>;
  __shared__ uint32_t slots[kTokens][kWarps];
  grid_dependency_launch();
  if (static_cast<int>(blockIdx.x) < args.prepare_ctas) {
    prepare_weight_rows<kPath>(args, kQuantizeThreads<kWarps> / 32);
  } else {
    const int warp = threadIdx.x / 32;
    const int local = warp / kWarps;
    const int token = (blockIdx.x - args.prepare_ctas) * kTokens + local;
    const Place at = {warp % kWarps, static_cast<int>(threadIdx.x % 32), slots[local], 1 + local};
    TokenArgs of_token = args;
    bool inside = token < args.m;
    if (inside && args.weight_groups > 0) {
      inside = choose_group(of_token, args.rows.bounds, args.weight_groups, token, at.lane);
      if (!inside) clear_row<kWarps>(args, token, at);
    }
    if (inside) {
      quantize_token<kPath, kSource, kChunks, kWarps>(args, of_token, token, at);
    }
  }
  end_after_launch_beside(args);
}

}  // namespace jax_w4a4::sm90
