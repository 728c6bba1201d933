// One token of activations in the registers of its warps: what the quantizers of every layout share.
//
// kWarps warps hold a token, kChunks pieces of eight values per lane: chunk c is k = 8 c .. 8 c + 7. x is
// read once, and nothing but the row's maximum passes between warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "formats.cuh"
#include "sm90_ptx.cuh"
#include "sm90_quantize_token.h"

namespace jax_w4a4::sm90 {

struct TokenArgs {
  const void* x;                  // (M, K)
  const float* smooth;            // (K,) or null
  const float* act_global_scale;  // () or null
  int m, k;
  int k_layout;       // K that the layout holds, zeros past k
  DType x_dtype;      // where the source is kAny
  DType scale_dtype;  // int4
  bool floor_rule;    // mxfp4
  bool is_unsigned;   // int4
  bool wait;          // end after the launch before this one, which runs beside it
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

// v / divisor by way of 1 / divisor, rounded once. One step from the approximation rounds correctly
// where no intermediate leaves the normal numbers, which the step's error tells.
__device__ __forceinline__ void multiply_reciprocals(float (&v)[8], const float (&divisors)[8]) {
  float inverse[8];
  float worst = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse[j]) : "f"(divisors[j]));
    const float error = fmaf(-divisors[j], inverse[j], 1.0f);
    worst = max_magnitude_nan(worst, error);
    inverse[j] = fmaf(error, inverse[j], inverse[j]);
  }
  if (!(fabsf(worst) < 0x1p-20f)) {
#pragma unroll
    for (int j = 0; j < 8; ++j) inverse[j] = reciprocal_flush(divisors[j]);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = multiply_flush(v[j], inverse[j]);
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

// The same with subnormal values as zero, where nothing before it has made them so.
__device__ __forceinline__ float clamp_flush(float v, float low, float high) {
  float d;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(v), "f"(low));
  asm("min.ftz.f32 %0, %1, %2;" : "=f"(d) : "f"(d), "f"(high));
  return d;
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

__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(lo), "f"(hi));
  return d;
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers

// Rounds to integers, as two's complement in the low byte.
__device__ __forceinline__ uint32_t pack_s8(const float* v) {
  uint32_t b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = __float_as_uint(v[i] + kRound);
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
__device__ __forceinline__ void load_token(const TokenArgs& args, int64_t token, int first,
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
        multiply_reciprocals(v, divisors);
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

// ---- one token ----

// Where a lane stands in its token.
struct Place {
  int part, lane;    // warp of the token, lane
  uint32_t* slots;   // for token_max
  int barrier;

  // Whether this CTA writes piece i, and the token's scale.
  __device__ __forceinline__ bool writes(int) const { return true; }
  __device__ __forceinline__ bool writes_scale() const { return part == 0 && lane == 0; }
};

template <int kWarps>
__device__ __forceinline__ int chunk_of(const Place& at, int i) {
  return at.part * 32 + at.lane + i * 32 * kWarps;
}

// Whether piece i of a warp lies past the token's end; the same for all its lanes.
template <int kWarps>
__device__ __forceinline__ bool past_end(const TokenArgs& args, const Place& at, int i) {
  return 8 * (at.part * 32 + i * 32 * kWarps) >= args.k_layout;
}

constexpr int kLargestScale = 252;  // e8m0 byte; 6 times the scale is finite

// The e8m0 byte of a block of four lanes, 0 for a block that quantizes to zero.
__device__ __forceinline__ int block_scale_mxfp4(float amax, bool floor_rule) {
  constexpr int kNan = 255;
  amax = fabsf(max_magnitude_nan(amax, __shfl_xor_sync(kAllLanes, amax, 1)));
  amax = fabsf(max_magnitude_nan(amax, __shfl_xor_sync(kAllLanes, amax, 2)));
  const uint32_t t = __float_as_uint(multiply_flush(amax, 1.0f / 6.0f));
  int byte = floor_rule ? static_cast<int>(__float_as_uint(amax) >> 23) - 2
                        : static_cast<int>((t + 0x7FFFFF) >> 23);
  byte = min(max(byte, 1), kLargestScale);
  if (t == 0) byte = 0;
  return amax != amax ? kNan : byte;
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

// One piece of a token whose block has the largest magnitude `largest`: v over the block's scale, in
// the range of e2m1 but not yet rounded, and the scale's byte. Zeros keep their sign. False where
// every code of the block is zero.
template <Format kFormat>
__device__ __forceinline__ bool normalize_fp4(float (&v)[8], float largest, bool floor_rule,
                                              uint32_t& byte) {
  bool live;
  if constexpr (kFormat == Format::kMxfp4) {
    byte = block_scale_mxfp4(largest, floor_rule);
    live = byte != 0 && byte != 255;
    const float inverse = __uint_as_float((254 - (live ? byte : 127)) << 23);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = clamp(multiply_flush(v[j], inverse), -6.0f, 6.0f);
  } else {
    const float scale = block_scale_nvfp4(largest, byte);
    live = byte != 0 && byte != 0x7F;
    const Quotient quotient(live ? scale : 0.0f);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      // The quotient of a zero may lose its sign.
      v[j] = copysignf(quotient(clamp(v[j], -6.0f * scale, 6.0f * scale)), v[j]);
    }
  }
  return live;
}

// Codes of int4 as floats, -8..7 or 0..15 and not yet rounded.
struct Int4Codes {
  Quotient quotient;
  // No value is Inf, below zero where that counts, or so far above the scale that it needs a bound:
  // signed codes under a scale that keeps eight bits and is below every dtype's cap.
  bool inside;
  // A power of two times the scale, which the scale's cap keeps finite, so that Inf has a quotient.
  float bound;
  float low, high;

  __device__ __forceinline__ Int4Codes(const BlockScale& scale, bool is_unsigned)
      : quotient(scale.live ? scale.factor : 0.0f),
        inside(!is_unsigned && scale.live && scale.factor >= 0x1p-14f && scale.factor < 0x1p12f),
        bound((is_unsigned ? 16.0f : 8.0f) * scale.factor),
        low(is_unsigned ? 0.0f : -8.0f),
        high(is_unsigned ? 15.0f : 7.0f) {}

  // In place.
  __device__ __forceinline__ void operator()(float (&v)[8]) const {
    if (inside) {
#pragma unroll
      for (float& f : v) f = quotient(f);
    } else {
#pragma unroll
      for (float& f : v) f = clamp(quotient(clamp_flush(f, -bound, bound)), low, high);
    }
  }
};

// ---- kernel ----

// Threads of a CTA and tokens they take.
template <int kWarps>
constexpr int kQuantizeThreads = static_cast<int>(TokenQuantizerThreads(kWarps));
template <int kWarps>
constexpr int kQuantizeTokens = static_cast<int>(TokensPerCta(kWarps));
// CTAs per SM that registers must leave room for: loads in flight hide the memory's latency.
template <Source kSource, int kChunks, int kWarps>
constexpr int kQuantizeBlocks =
    (kChunks == 4 ? (kSource == Source::kPlain ? 1536 : 1024)
                  : (kSource == Source::kPlain ? 1024 : 512)) /
    kQuantizeThreads<kWarps>;

// What follows waits for this launch only, so this one must end after the launch beside it. One CTA
// sees to that, the last to start: if all did, the first of them would keep the others from their SMs.
__device__ __forceinline__ void end_after_launch_beside(const TokenArgs& args) {
  if (args.wait && blockIdx.x + 1 == gridDim.x) grid_dependency_wait();
}

// ---- host ----

inline Source source_of(const TokenParams& p) {
  if (p.x_dtype != DType::kBf16) return Source::kAny;
  return p.smooth != nullptr || p.global_scale != nullptr ? Source::kBf16 : Source::kPlain;
}

inline void set_token_args(TokenArgs* a, const TokenParams& p, int k_layout, DType scale_dtype) {
  a->x = p.x;
  a->smooth = p.smooth;
  a->act_global_scale = p.global_scale;
  a->m = static_cast<int>(p.m);
  a->k = p.k;
  a->k_layout = k_layout;
  a->x_dtype = p.x_dtype;
  a->scale_dtype = scale_dtype;
  a->floor_rule = p.rule == ScaleRule::kFloor;
  a->is_unsigned = p.is_unsigned;
  a->wait = p.beside;
}

// `leading`: CTAs before those that take tokens.
inline int launch_tokens(const void* kernel, void* args, const TokenParams& p, int leading,
                         cudaStream_t stream) {
  const int64_t tokens = TokensPerCta(p.warps);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(leading + (p.m + tokens - 1) / tokens));
  config.blockDim = dim3(static_cast<unsigned>(TokenQuantizerThreads(p.warps)));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = p.beside ? 1 : 0;
  void* arguments[] = {args};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace jax_w4a4::sm90
