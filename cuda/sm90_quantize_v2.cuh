// Activation quantizer of the v2 GEMM: x (M, K) straight into the GEMM's activation layout.
//
// kWarps warps take one token and keep it in registers, kChunks pieces of eight values per lane, so x
// is read once and nothing but the row's maximum passes between warps. Leading CTAs prepare the GEMM's
// weight rows. LoRA-down is a launch of its own before this one (sm90_down_v2.cuh) and runs beside it:
// the two share no data but x.
//
// Chunk c of a token is k = 8 c .. 8 c + 7. Layouts of 8-bit and 16-bit operands: sm90_expand.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "formats.cuh"
#include "sm90_expand.cuh"
#include "sm90_gemm_v2.h"
#include "sm90_ptx.cuh"
#include "sm90_row_inputs.cuh"

namespace jax_w4a4::sm90 {

struct QuantizeV2Args {
  const void* x;                  // (M, K)
  const float* smooth;            // (K,) or null
  const float* act_global_scale;  // () or null
  uint8_t* act;                   // (M, 128 groups)
  float* token_scale;             // (M,), or (groups of K, token_pitch); paths that have one
  RowInputsArgs rows;
  int prepare_ctas;
  int m, k;
  int groups;        // 128 bytes of the layout each, per token
  int k_layout;      // K that these hold
  int64_t token_pitch;
  DType x_dtype;     // where kX is not kBf16
  bool floor_rule;   // mxfp4
  bool is_unsigned;  // int4
  bool wait;         // for the launch before this one, which runs beside it
};

// How x is read. kPlain: bf16 and neither smooth nor global scale. kAny: any dtype, with them.
enum class Source { kPlain, kBf16, kAny };

// ---- arithmetic: one instruction each ----

// max(|a|, |b|) under the sign of a * b, where fabsf on an assembly operand is an instruction more.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float d;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// The same, NaN if either is.
__device__ __forceinline__ float max_magnitude_nan(float a, float b) {
  float d;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ uint32_t max_magnitude_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// Subnormal operands and results count as zero (docs/numerics.md).
__device__ __forceinline__ float multiply_flush(float a, float b) {
  float d;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float reciprocal_flush(float a) {
  float d;
  asm("rcp.rn.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
  return d;
}

// Rounds |u| <= 6 unit to e2m1 times unit, a power of two or zero: adding 2^(e + 22), e the exponent of
// max(|u|, unit), rounds to multiples of 2^(e - 1), ties to even. Power and sum carry u's sign.
__device__ __forceinline__ float round_e2m1(float u, float unit) {
  const float power = __uint_as_float(__float_as_uint(max_magnitude(u, unit)) & 0xFF800000u);
  return fmaf(power, -4194304.0f, fmaf(power, 4194304.0f, u));
}

__device__ __forceinline__ float clamp(float v, float low, float high) {
  return fminf(fmaxf(v, low), high);
}

// 1 / divisor in two floats: v * high + v * low has v / divisor's value to 2^-45, so its rounding to
// fp32 is that of the correctly rounded quotient wherever a code could change. 0 for a zero divisor.
struct Quotient {
  float high, low;

  __device__ __forceinline__ explicit Quotient(float divisor) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(high) : "f"(divisor));
    high = fmaf(fmaf(-divisor, high, 1.0f), high, high);
    low = fmaf(-divisor, high, 1.0f) * high;
    if (divisor == 0.0f) high = low = 0.0f;
  }

  // |v| must be finite.
  __device__ __forceinline__ float operator()(float v) const { return fmaf(v, high, v * low); }
};

__device__ __forceinline__ uint32_t pack_e5m2(const float* v) {
  uint32_t d;
  asm("{\n"
      ".reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n"
      "}\n"
      : "=r"(d)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
  return d;
}

__device__ __forceinline__ uint32_t pack_e4m3(const float* v) {
  uint32_t d;
  asm("{\n"
      ".reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n"
      "}\n"
      : "=r"(d)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
  return d;
}

// Rounds to integers: adding 1.5 * 2^23 leaves them, as two's complement, in the low byte.
__device__ __forceinline__ uint32_t pack_s8(const float* v) {
  uint32_t b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = __float_as_uint(v[i] + 12582912.0f);
  return prmt(prmt(b[0], b[1], 0x0040), prmt(b[2], b[3], 0x0040), 0x5410);
}

// ---- one chunk of x ----

__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ void unpack_bf16(const uint4& raw, float (&v)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

// Chunks of one token in a lane: packed as loaded, or (not kPlain) as the values that are quantized.
template <Source kSource, int kChunks>
struct Chunks {
  static constexpr bool kPlain = kSource == Source::kPlain;
  uint4 raw[kPlain ? kChunks : 1];
  float value[kPlain ? 1 : kChunks][8];

  __device__ __forceinline__ void get(int i, float (&v)[8]) const {
    if constexpr (kPlain) {
      unpack_bf16(raw[i], v);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = value[i][j];
    }
  }

  // The largest magnitude, or with `is_unsigned` the largest value above zero; NaN if there is one.
  __device__ __forceinline__ float largest(int i, bool is_unsigned = false) const {
    float v[8];
    if (kPlain && !is_unsigned) {
      const uint4& r = raw[i];
      const uint32_t both = max_magnitude_nan_bf16x2(max_magnitude_nan_bf16x2(r.x, r.y),
                                                     max_magnitude_nan_bf16x2(r.z, r.w));
      return fabsf(max_magnitude_nan(__uint_as_float(both << 16),
                                     __uint_as_float(both & 0xFFFF0000u)));
    }
    get(i, v);
    float m = is_unsigned ? max_nan(v[0], 0.0f) : v[0];
#pragma unroll
    for (int j = 1; j < 8; ++j) m = is_unsigned ? max_nan(m, v[j]) : max_magnitude_nan(m, v[j]);
    return fabsf(m);
  }
};

// x * (1 / smooth) * (1 / global scale), both reciprocals rounded once.
template <Source kSource, int kChunks, int kWarps>
__device__ __forceinline__ void load_token(const QuantizeV2Args& args, int64_t token, int first,
                                           Chunks<kSource, kChunks>& x) {
  const int chunks = args.k / 8;
  const int64_t start = token * args.k;
  uint4 raw[kChunks][kSource == Source::kAny ? 2 : 1];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int c = first + i * 32 * kWarps;
#pragma unroll
    for (auto& part : raw[i]) part = make_uint4(0, 0, 0, 0);
    if (c < chunks) {
      if constexpr (kSource == Source::kAny) {
        const int width = args.x_dtype == DType::kF32 ? 4 : 2;
        const uint8_t* at = static_cast<const uint8_t*>(args.x) + (start + c * 8) * width;
        raw[i][0] = load_stream(at);
        if (width == 4) raw[i][1] = load_stream(at + 16);
      } else {
        raw[i][0] = load_stream(static_cast<const __nv_bfloat16*>(args.x) + start + c * 8);
      }
    }
  }
  if constexpr (kSource == Source::kPlain) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) x.raw[i] = raw[i][0];
  } else {
    const bool has_global = args.act_global_scale != nullptr;
    const float global = has_global ? reciprocal_flush(*args.act_global_scale) : 1.0f;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float(&v)[8] = x.value[i];
      if (kSource == Source::kAny && args.x_dtype == DType::kF32) {
        const float4 a = reinterpret_cast<const float4&>(raw[i][0]);
        const float4 b = reinterpret_cast<const float4&>(raw[i][kSource == Source::kAny]);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
      } else if (kSource == Source::kAny && args.x_dtype == DType::kF16) {
        const __half2* h = reinterpret_cast<const __half2*>(&raw[i][0]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = __half22float2(h[j]);
          v[2 * j] = pair.x;
          v[2 * j + 1] = pair.y;
        }
      } else {
        unpack_bf16(raw[i][0], v);
      }
      const int c = first + i * 32 * kWarps;
      if (args.smooth != nullptr && c < chunks) {
        const float4* smooth = reinterpret_cast<const float4*>(args.smooth) + 2 * c;
        const float4 s[2] = {__ldg(smooth), __ldg(smooth + 1)};
        const float divisors[8] = {s[0].x, s[0].y, s[0].z, s[0].w,
                                   s[1].x, s[1].y, s[1].z, s[1].w};
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = multiply_flush(v[j], reciprocal_flush(divisors[j]));
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = multiply_flush(v[j], global);
    }
  }
}

// ---- exchanges ----

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Largest over a token's warps. `slots`: kWarps words, not reused before the token after next.
template <int kWarps>
__device__ __forceinline__ uint32_t token_max(uint32_t v, uint32_t* slots, int part, int lane,
                                              int barrier) {
  v = __reduce_max_sync(kAllLanes, v);
  if (lane == 0) slots[part] = v;
  named_barrier_sync(barrier, 32 * kWarps);
#pragma unroll
  for (int i = 0; i < kWarps; ++i) v = max(v, slots[i]);
  return v;
}

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

// Where a lane stands in its token.
struct Place {
  int part, lane;    // warp of the token, lane
  uint32_t* slots;   // for token_max
  int barrier;
};

template <int kWarps>
__device__ __forceinline__ int chunk_of(const Place& at, int i) {
  return at.part * 32 + at.lane + i * 32 * kWarps;
}

// Whether piece i of a warp lies past the token's end; the same for all its lanes.
template <int kWarps>
__device__ __forceinline__ bool past_end(const QuantizeV2Args& args, const Place& at, int i) {
  return 8 * (at.part * 32 + i * 32 * kWarps) >= args.k_layout;
}

// e5m2, blocks of four lanes. The fold cancels a block's own scale: every value of the token is
// multiplied by one power of two and rounded on the grid of its block, 2^(offset - kFoldBias).
template <int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize_mxfp4(const QuantizeV2Args& args, const X& x, int token,
                                               uint8_t* out, const Place& at) {
  constexpr int kLargestScale = 252;  // so that 6 times the scale is finite
  uint32_t bytes[(kChunks + 3) / 4] = {};
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    float amax = x.largest(i);
    amax = fabsf(max_magnitude_nan(amax, __shfl_xor_sync(kAllLanes, amax, 1)));
    amax = fabsf(max_magnitude_nan(amax, __shfl_xor_sync(kAllLanes, amax, 2)));
    const uint32_t t = __float_as_uint(multiply_flush(amax, 1.0f / 6.0f));
    int byte = args.floor_rule ? static_cast<int>(__float_as_uint(amax) >> 23) - 2
                               : static_cast<int>((t + 0x7FFFFF) >> 23);
    byte = min(max(byte, 1), kLargestScale);
    if (t == 0) byte = 0;
    if (amax != amax) byte = kNanScale;
    largest = max(largest, static_cast<uint32_t>(byte));
    bytes[i / 4] = i % 4 == 0 ? byte : bytes[i / 4] | byte << 8 * (i % 4);
  }
  largest = token_max<kWarps>(largest, at.slots, at.part, at.lane, at.barrier);
  const int base = static_cast<int>(largest) - kFoldSpan;
  if (at.part == 0 && at.lane == 0) {
    args.token_scale[token] = largest == kNanScale ? __int_as_float(kFloatNan)
                                                   : power_of_two(fold_exponent(largest));
  }
  // In two factors where one would overflow: the largest block scale is below 2^-114.
  const int exponent = 127 - base - kFoldBias;
  const float factor = power_of_two(min(exponent, 127));
  const float more = power_of_two(max(exponent - 127, 0));
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
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
    for (int j = 0; j < 8; ++j) {
      // Clamped: the floor rule and Inf leave the range.
      r[j] = round_e2m1(clamp(multiply_flush(v[j], scale), -6.0f * unit, 6.0f * unit), unit);
    }
    const int c = chunk_of<kWarps>(at, i);
    store_8bit(out + c / 16 * 128, pack_e5m2(r), pack_e5m2(r + 4), at.lane, c / 16 < args.groups);
  }
}

// The e4m3 scale of a block of two lanes, as a float, and its byte.
__device__ __forceinline__ float block_scale_nvfp4(float amax, uint32_t& byte) {
  amax = fabsf(max_magnitude_nan(amax, __shfl_xor_sync(kAllLanes, amax, 1)));
  uint32_t pair;  // two fp16, the value in the lower
  uint16_t bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(bytes)
      : "f"(0.0f), "f"(multiply_flush(amax, 1.0f / 6.0f)));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
  byte = bytes & 0xFF;
  return __half2float(__ushort_as_half(pair & 0xFFFF));
}

// e2m1 times the block scale, exact in fp32. A NaN scale makes NaNs.
__device__ __forceinline__ void round_nvfp4(float (&v)[8], float scale) {
  const Quotient quotient(scale);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j] = round_e2m1(quotient(clamp(v[j], -6.0f * scale, 6.0f * scale)), 1.0f) * scale;
  }
}

// bf16, exact.
template <int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize_nvfp4(const QuantizeV2Args& args, const X& x, uint8_t* out,
                                               const Place& at) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
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
template <int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize_nvfp4_rounded(const QuantizeV2Args& args, const X& x,
                                                       int token, uint8_t* out, const Place& at) {
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
  if (at.part == 0 && at.lane == 0) {
    args.token_scale[token] =
        largest == 0x7F ? __int_as_float(kFloatNan) : power_of_two(exponent);
  }
  const float inverse = power_of_two(-exponent);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    float v[8];
    x.get(i, v);
    round_nvfp4(v, scales[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= inverse;
    const int c = chunk_of<kWarps>(at, i);
    store_8bit(out + c / 16 * 128, pack_e4m3(v), pack_e4m3(v + 4), at.lane, c / 16 < args.groups);
  }
}

// Codes of int4 as floats, -8..7 or 0..15 and not yet rounded.
struct Int4Codes {
  Quotient quotient;
  // A power of two times the scale, which the scale's cap keeps finite, so that Inf has a quotient.
  float bound;
  float low, high;

  __device__ __forceinline__ Int4Codes(const BlockScale& scale, bool is_unsigned)
      : quotient(scale.live ? scale.factor : 0.0f),
        bound((is_unsigned ? 16.0f : 8.0f) * scale.factor),
        low(is_unsigned ? 0.0f : -8.0f),
        high(is_unsigned ? 15.0f : 7.0f) {}

  __device__ __forceinline__ float operator()(float v) const {
    return clamp(quotient(clamp(v, -bound, bound)), low, high);
  }
};

// Integers as bytes, one scale per token.
template <int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize_int4_row(const QuantizeV2Args& args, const X& x, int token,
                                              uint8_t* out, const Place& at) {
  uint32_t largest = 0;  // bits of a non-negative float or NaN: ordered as integers
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    largest = max(largest, __float_as_uint(x.largest(i, args.is_unsigned)));
  }
  largest = token_max<kWarps>(largest, at.slots, at.part, at.lane, at.barrier);
  const BlockScale scale = ChooseInt4Scale(largest, args.is_unsigned, args.rows.scale_dtype);
  if (at.part == 0 && at.lane == 0) args.token_scale[token] = Flush(scale.factor);
  const Int4Codes codes(scale, args.is_unsigned);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    float v[8];
    x.get(i, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = codes(v[j]);
    const int c = chunk_of<kWarps>(at, i);
    store_8bit(out + c / 16 * 128, pack_s8(v), pack_s8(v + 4), at.lane, c / 16 < args.groups);
  }
}

// Integers as e4m3, which holds -8..16, and a scale for each kLanes lanes of a token.
template <int kLanes, int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize_int4_groups(const QuantizeV2Args& args, const X& x,
                                                     int token, uint8_t* out, const Place& at) {
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
    const BlockScale scale = ChooseInt4Scale(largest, args.is_unsigned, args.rows.scale_dtype);
    const int c = chunk_of<kWarps>(at, i);
    const int group = c / kLanes;
    if (c % kLanes == 0 && group < groups) {
      args.token_scale[group * args.token_pitch + token] = Flush(scale.factor);
    }
    const Int4Codes codes(scale, args.is_unsigned);
    float v[8];
    x.get(i, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = rintf(codes(v[j]));
    store_8bit<true>(out + c / 16 * 128, pack_e4m3(v), pack_e4m3(v + 4), at.lane,
                     c / 16 < args.groups);
  }
}

// ---- kernel ----

constexpr int kQuantizeThreads = 256;

// Threads of a CTA and tokens they take.
__host__ __device__ constexpr int quantize_threads(int warps) {
  return warps > 8 ? 32 * warps : kQuantizeThreads;
}
__host__ __device__ constexpr int quantize_tokens(int warps) {
  return quantize_threads(warps) / 32 / warps;
}
// CTAs per SM that registers must leave room for: loads in flight hide the memory's latency.
__host__ __device__ constexpr int quantize_blocks(Source source, int chunks, int warps) {
  const bool plain = source == Source::kPlain;
  const int threads = chunks == 4 ? (plain ? 1536 : 1024) : (plain ? 1024 : 512);
  return threads / quantize_threads(warps);
}

template <GemmV2Path kPath>
__device__ __forceinline__ void prepare_weight_rows(const QuantizeV2Args& args, int warps) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if constexpr (kPath >= GemmV2Path::kInt4Row) {
    write_int4_row_inputs(args.rows, blockIdx.x * 32 * warps + threadIdx.x);
  } else {
    constexpr Format kFormat =
        kPath == GemmV2Path::kMxfp4 ? Format::kMxfp4 : Format::kNvfp4;
    write_rows<kFormat>(args.rows, blockIdx.x, warp, warps, lane);
  }
}

// kPath kMxfp4 serves kMxfp4Promoted too: they read the same layout.
template <GemmV2Path kPath, Source kSource, int kChunks, int kWarps>
__global__ void __launch_bounds__(quantize_threads(kWarps),
                                  quantize_blocks(kSource, kChunks, kWarps))
    quantize_v2_kernel(const __grid_constant__ QuantizeV2Args args) {
  constexpr int kTokens = quantize_tokens(kWarps);
  __shared__ uint32_t slots[kTokens][kWarps];
  grid_dependency_launch();
  if (static_cast<int>(blockIdx.x) < args.prepare_ctas) {
    prepare_weight_rows<kPath>(args, quantize_threads(kWarps) / 32);
  } else {
    const int warp = threadIdx.x / 32;
    const int local = warp / kWarps;
    const int token = (blockIdx.x - args.prepare_ctas) * kTokens + local;
    const Place at = {warp % kWarps, static_cast<int>(threadIdx.x % 32), slots[local], 1 + local};
    if (token < args.m) {
      Chunks<kSource, kChunks> x;
      load_token<kSource, kChunks, kWarps>(args, token, chunk_of<kWarps>(at, 0), x);
      uint8_t* out = args.act + static_cast<int64_t>(token) * args.groups * 128;
      if constexpr (kPath == GemmV2Path::kMxfp4) {
        quantize_mxfp4<kChunks, kWarps>(args, x, token, out, at);
      } else if constexpr (kPath == GemmV2Path::kNvfp4) {
        quantize_nvfp4<kChunks, kWarps>(args, x, out, at);
      } else if constexpr (kPath == GemmV2Path::kNvfp4Rounded) {
        quantize_nvfp4_rounded<kChunks, kWarps>(args, x, token, out, at);
      } else if constexpr (kPath == GemmV2Path::kInt4Row) {
        quantize_int4_row<kChunks, kWarps>(args, x, token, out, at);
      } else {
        constexpr int kLanes = kPath == GemmV2Path::kInt4Group64 ? 8 : 16;
        quantize_int4_groups<kLanes, kChunks, kWarps>(args, x, token, out, at);
      }
    }
  }
  // The GEMM waits for this launch only, so this one answers for the launch beside it.
  if (args.wait) grid_dependency_wait();
}

}  // namespace jax_w4a4::sm90
