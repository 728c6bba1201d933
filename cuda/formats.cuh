// Bit-exact encode and decode of every 4-bit format and scale type. The only
// place where a code or a scale byte changes into a number or back.
//
// Everything here compiles for the device and, with a plain C++ compiler, for
// the host: tests/test_build.py runs these very functions on the CPU against
// the numpy model. The host build needs -ffp-contract=off; the device side
// spells out the rounding (MulRn, DivRn) so that no flag can change it.
#ifndef JAX_W4A4_CUDA_FORMATS_CUH_
#define JAX_W4A4_CUDA_FORMATS_CUH_

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define W4A4_HD __host__ __device__ __forceinline__
#else
#define W4A4_HD inline
#endif

namespace jax_w4a4 {

// Values are the `format` attribute of the FFI calls.
enum class Format : int { kNvfp4 = 0, kMxfp4 = 1, kInt4 = 2 };
// Value of the `act_rule` attribute.
enum class ScaleRule : int { kRceil = 0, kFloor = 1 };
// Element types that operands may have besides the packed bytes.
enum class DType : int { kF32 = 0, kF16 = 1, kBf16 = 2, kE4m3 = 3, kE8m0 = 4 };

W4A4_HD uint32_t FloatBits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

W4A4_HD float BitsFloat(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

W4A4_HD float MulRn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

W4A4_HD float DivRn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kMinNormalBits = 0x00800000u;

// fp32 subnormals count as zero of the same sign, in the operands and in every
// intermediate result (docs/numerics.md).
W4A4_HD float Flush(float x) {
  const uint32_t bits = FloatBits(x);
  return (bits & 0x7FFFFFFFu) < kMinNormalBits ? BitsFloat(bits & 0x80000000u)
                                               : x;
}

// 1 / x rounded once.
W4A4_HD float Reciprocal(float x) { return Flush(DivRn(1.0f, Flush(x))); }

// ---------------------------------------------------------------------------
// Decode: code or scale byte -> fp32, always exact.
// ---------------------------------------------------------------------------

// The three magnitude bits ee.m placed on the fp32 exponent/mantissa border
// read as value * 2^-126 (code 1 lands on an fp32 subnormal, which is why the
// kernels are never compiled with -ftz=true).
W4A4_HD float DecodeE2m1(uint32_t code) {
  const uint32_t bits = ((code & 8u) << 28) | ((code & 7u) << 22);
  return MulRn(BitsFloat(bits), 0x1p126f);
}

// 2^23 + u is exact, so subtracting 2^23 + 8 leaves u - 8.
W4A4_HD float DecodeS4(uint32_t code) {
  return BitsFloat(0x4B000000u | ((code & 15u) ^ 8u)) - 8388616.0f;
}

W4A4_HD float DecodeU4(uint32_t code) {
  return BitsFloat(0x4B000000u | (code & 15u)) - 8388608.0f;
}

W4A4_HD float DecodeE4m3(uint32_t byte) {
  if ((byte & 0x7Fu) == 0x7Fu) return BitsFloat(kNanBits);
  const uint32_t bits = ((byte & 0x80u) << 24) | ((byte & 0x7Fu) << 20);
  return MulRn(BitsFloat(bits), 0x1p120f);
}

// Byte 0 (2^-127, an fp32 subnormal) reads as zero, like every subnormal.
W4A4_HD float DecodeE8m0(uint32_t byte) {
  return BitsFloat(byte == 255u ? kNanBits : byte << 23);
}

W4A4_HD float DecodeF16(uint32_t half) {
#ifdef __CUDA_ARCH__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(half)));
  return x;
#else
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = (half & 0x7FFFu) << 13;
  if ((half & 0x7C00u) == 0x7C00u) {  // Inf and NaN keep their fraction
    return BitsFloat(sign | kInfBits | (magnitude & 0x007FFFFFu));
  }
  return MulRn(BitsFloat(sign | magnitude), 0x1p112f);
#endif
}

W4A4_HD float DecodeBf16(uint32_t bits) { return BitsFloat(bits << 16); }

// Two fp32 values that bf16 holds exactly -> one register, `lo` at the lower
// address. Truncation is exact for every e2m1 * scale and for 4-bit integers.
W4A4_HD uint32_t PackExactBf16(float lo, float hi) {
  return (FloatBits(lo) >> 16) | (FloatBits(hi) & 0xFFFF0000u);
}

// ---------------------------------------------------------------------------
// Encode: fp32 -> scale or code.
// ---------------------------------------------------------------------------

// Adds half a unit in the last kept place, minus one if that place is even.
W4A4_HD uint32_t RoundBitsToEven(uint32_t bits, int dropped) {
  const uint32_t half = 1u << (dropped - 1);
  return bits + (half - 1u) + ((bits >> dropped) & 1u);
}

// Round to nearest even, 0 <= t <= 448 or NaN.
W4A4_HD uint32_t EncodeE4m3(float t) {
  const uint32_t bits = FloatBits(t);
  if (bits > kInfBits) return 0x7Fu;
  if (bits < 0x3C800000u) {  // below 2^-6: steps of 2^-9; 8 steps = 0x08
    return static_cast<uint32_t>(rintf(MulRn(t, 512.0f)));
  }
  return (RoundBitsToEven(bits, 20) - 0x3C000000u) >> 20;
}

// Round to nearest even, 0 <= t <= 65504 or NaN.
W4A4_HD uint32_t EncodeF16(float t) {
  const uint32_t bits = FloatBits(t);
  if (bits > kInfBits) return 0x7E00u;
#ifdef __CUDA_ARCH__
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(t));
  return half;
#else
  if (bits < 0x38800000u) {  // below 2^-14: steps of 2^-24
    return static_cast<uint32_t>(rintf(MulRn(t, 0x1p24f)));
  }
  return (RoundBitsToEven(bits, 13) - 0x38000000u) >> 13;
#endif
}

// Round to nearest even, t normal or zero and below the bf16 maximum, or NaN.
W4A4_HD uint32_t EncodeBf16(float t) {
  const uint32_t bits = FloatBits(t);
  if (bits > kInfBits) return 0x7FC0u;
  return RoundBitsToEven(bits, 16) >> 16;
}

// Nearest e2m1 code, ties to the even code, saturating at 6, sign bit kept also
// for zero: the hardware's cvt.rn.satfinite.e2m1 for everything but NaN, which
// callers mask.
W4A4_HD uint32_t EncodeE2m1(float v) {
  const float a = fabsf(v);
  const uint32_t magnitude = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) +
                             (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) +
                             (a > 5.0f);
  return magnitude | ((FloatBits(v) >> 28) & 8u);
}

// ---------------------------------------------------------------------------
// One block of activations: amax -> scale -> codes (docs/numerics.md).
// ---------------------------------------------------------------------------

// max(amax, |v|) on bit patterns: integer order is float order for
// non-negative floats and puts every NaN above Inf, so NaN propagates.
// Unsigned activations count negative values as 0.
W4A4_HD uint32_t AccumulateAbsMax(uint32_t amax_bits, float v,
                                  bool is_unsigned) {
  const uint32_t bits = FloatBits(v);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (is_unsigned && bits > 0x80000000u && magnitude <= kInfBits) {
    return amax_bits;
  }
  return magnitude > amax_bits ? magnitude : amax_bits;
}

struct BlockScale {
  uint32_t bits;  // as stored: one byte, two bytes or a float
  float factor;   // codes encode v / factor (mxfp4: v * factor)
  bool live;      // false: every code of the block is 0
};

W4A4_HD BlockScale ChooseNvfp4Scale(uint32_t amax_bits) {
  if (amax_bits > kInfBits) return {0x7Fu, 1.0f, false};
  const float t = fminf(MulRn(BitsFloat(amax_bits), 1.0f / 6.0f), 448.0f);
  const uint32_t byte = EncodeE4m3(t);
  return {byte, DecodeE4m3(byte), byte != 0u};
}

W4A4_HD BlockScale ChooseMxfp4Scale(uint32_t amax_bits, ScaleRule rule) {
  if (amax_bits > kInfBits) return {0xFFu, 1.0f, false};
  const uint32_t t = FloatBits(MulRn(BitsFloat(amax_bits), 1.0f / 6.0f));
  if (t < kMinNormalBits) return {0u, 1.0f, false};
  int byte = rule == ScaleRule::kFloor
                 ? static_cast<int>(amax_bits >> 23) - 2
                 : static_cast<int>(t >> 23) + ((t & 0x007FFFFFu) != 0u);
  byte = byte < 1 ? 1 : (byte > 252 ? 252 : byte);
  const uint32_t inverse = static_cast<uint32_t>(254 - byte) << 23;
  return {static_cast<uint32_t>(byte), BitsFloat(inverse), true};
}

// The cap is the largest finite scale / 8 (unsigned: / 16), a power of two above
// the largest code, so that code * scale stays finite.
W4A4_HD BlockScale ChooseInt4Scale(uint32_t amax_bits, bool is_unsigned,
                                   DType scale_dtype) {
  const bool is_nan = amax_bits > kInfBits;
  const uint32_t max_bits = scale_dtype == DType::kF16    ? 0x477FE000u
                            : scale_dtype == DType::kBf16 ? 0x7F7F0000u
                                                          : 0x7F7FFFE0u;
  const float cap = BitsFloat(max_bits - ((is_unsigned ? 4u : 3u) << 23));
  const float reciprocal = is_unsigned ? 1.0f / 15.0f : 1.0f / 7.0f;
  const float t =
      is_nan ? BitsFloat(kNanBits)
             : Flush(fminf(MulRn(BitsFloat(amax_bits), reciprocal), cap));
  uint32_t bits = FloatBits(t);
  float value = t;
  if (scale_dtype == DType::kF16) {
    bits = EncodeF16(t);
    value = DecodeF16(bits);
  } else if (scale_dtype == DType::kBf16) {
    bits = EncodeBf16(t);
    value = DecodeBf16(bits);
  } else if (!is_nan) {
    // 19 significant bits, so that scale * (code + 1/2) is exact in fp32.
    bits = RoundBitsToEven(bits, 5) & ~31u;
    value = BitsFloat(bits);
  }
  return {bits, value, !is_nan && value != 0.0f};
}

W4A4_HD uint32_t EncodeInt4(float q, bool is_unsigned) {
  const float low = is_unsigned ? 0.0f : -8.0f;
  const float high = is_unsigned ? 15.0f : 7.0f;
  const float rounded = fminf(fmaxf(rintf(q), low), high);
  return static_cast<uint32_t>(static_cast<int>(rounded)) & 15u;
}

template <Format kFormat>
W4A4_HD BlockScale ChooseScale(uint32_t amax_bits, bool is_unsigned,
                               ScaleRule rule, DType scale_dtype) {
  if constexpr (kFormat == Format::kNvfp4) return ChooseNvfp4Scale(amax_bits);
  if constexpr (kFormat == Format::kMxfp4) {
    return ChooseMxfp4Scale(amax_bits, rule);
  }
  return ChooseInt4Scale(amax_bits, is_unsigned, scale_dtype);
}

// Code of one value of a block whose scale is `live`.
template <Format kFormat>
W4A4_HD uint32_t EncodeValue(float v, const BlockScale& scale,
                             bool is_unsigned) {
  if constexpr (kFormat == Format::kNvfp4) {
    return EncodeE2m1(DivRn(v, scale.factor));
  }
  if constexpr (kFormat == Format::kMxfp4) {
    return EncodeE2m1(MulRn(v, scale.factor));
  }
  return EncodeInt4(DivRn(v, scale.factor), is_unsigned);
}

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_FORMATS_CUH_
