// Register expansion of 4-bit weights into wgmma A fragments, straight from the public layout.
//
// Public layout: packed (N, K/2), byte = odd k << 4 | even k, so a 32-bit word holds eight
// consecutive k, lowest nibble first. A thread reads 16 (8) contiguous bytes per row and stage and so
// owns one whole scale block: lane q of a quad holds k = 32 q .. 32 q + 31 of a 128-k stage (16-bit
// MMA: k = 16 q .. 16 q + 15 of a 64-k stage). wgmma wants lane q to hold other k's; the difference is
// a fixed permutation of k inside the stage, which the activation quantizer applies to its output:
//   8-bit fragments, position 32 s + 16 h + 4 q + j  <-  k = 32 q + 8 s + 4 h + j
//   the same of 64-k groups, likewise  <-  k = 64 (s / 2) + 16 q + 8 (s % 2) + 4 h + j
//   16-bit fragments, position 16 s + 8 h + 2 q + j  <-  k = 16 q + 8 (s / 2) + 2 (s % 2) + h + 4 j
// (s = k-step, h = half of the step, j = byte or half-word of a fragment register.)
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "sm90_ptx.cuh"

namespace jax_w4a4::sm90 {

// Eight FP8 bytes: the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 times one scale.
struct FoldTable {
  uint32_t lo;
  uint32_t hi;
};

// Binades that the fold spans: blocks up to this far below their row's largest exponent are exact.
constexpr int kFoldSpan = 26;
// value = e2m1 * 2^(offset - kFoldBias) for offset 0..kFoldSpan.
constexpr int kFoldBias = 13;

// Builds a block's table from its e8m0 byte; offset = byte - base = byte - (row's largest - span), so
// never above kFoldSpan. Every non-zero magnitude stays an e5m2 normal number, so the exponent is
// added to all table bytes at once; byte 0 (zero) is left alone. Negative offsets flush: such a block
// is more than 26 binades under the row's largest. Byte 0 means a scale of zero and always flushes.
class E8m0RowFold {
 public:
  __device__ __forceinline__ explicit E8m0RowFold(int base)
      : base_(base > 1 ? base : 1),
        lo_(0x0A080400u - base * 0x04040400u),
        hi_(0x12100E0Cu - base * 0x04040404u) {}

  // Without kFlush no scale may flush, but that of a block of zero codes: their byte stays zero.
  template <int kPart = 0, bool kFlush = true>
  __device__ __forceinline__ FoldTable block(uint32_t scale) const {
    const bool flushed = kFlush && flushes(static_cast<int>(scale));
    return {flushed ? 0u : scale * 0x04040400u + lo_, flushed ? 0u : scale * 0x04040404u + hi_};
  }

  __device__ __forceinline__ bool flushes(int scale) const { return scale < base_; }

  // In registers: the compiler would work them out for every block.
  __device__ __forceinline__ void keep() { asm volatile("" : "+r"(lo_), "+r"(hi_)); }

 private:
  int base_;
  uint32_t lo_, hi_;
};

__device__ __forceinline__ uint32_t magnitudes_of(uint32_t word) {
  uint32_t magnitudes;
  // Opaque, or the compiler masks the two halves separately.
  asm("and.b32 %0, %1, 0x77777777;" : "=r"(magnitudes) : "r"(word));
  return magnitudes;
}

// Eight e2m1 codes to two fragment registers, 9 instructions: two byte permutes move the sign of
// nibble i of each half to bit 8 i + 7.
__device__ __forceinline__ void expand_e2m1_e5m2(uint32_t word, FoldTable table, uint32_t& half0,
                                                 uint32_t& half1) {
  const uint32_t magnitude = magnitudes_of(word);
  const uint32_t shifted = word << 4;
  const uint32_t sign0 = prmt(word, shifted, 0x1504);
  const uint32_t sign1 = prmt(word, shifted, 0x3726);
  half0 = prmt(table.lo, table.hi, magnitude) ^ (sign0 & 0x80808080u);
  half1 = prmt(table.lo, table.hi, magnitude >> 16) ^ (sign1 & 0x80808080u);
}

// The same of codes whose signs are sorted, 7 instructions: that of nibble i of the first half is bit
// 8 i + 7 of the word, that of the second half bit 8 i + 3 (formats.py sorts them).
__device__ __forceinline__ void expand_e2m1_e5m2_sorted(uint32_t word, FoldTable table,
                                                        uint32_t& half0, uint32_t& half1) {
  const uint32_t magnitude = magnitudes_of(word);
  half0 = prmt(table.lo, table.hi, magnitude) ^ (word & 0x80808080u);
  half1 = prmt(table.lo, table.hi, magnitude >> 16) ^ (word << 4 & 0x80808080u);
}

// ---- value * scale rounded to e4m3 ----
//
// A row's scales are divided by a power of two, its `power`, so that the largest has an e4m3 byte of
// at most kRoundedTop. Taken in fp16, the bits without the seven that are always zero then count e4m3
// steps over an exponent without a lower end: index = byte + kRoundedBias, and 256 more for negative
// scales.

constexpr int kRoundedTop = 0x66;  // six times it still fits
constexpr int kRoundedLow = 0x10;  // half of it is still a normal number, as is all above
constexpr int kRoundedBias = 64;

// log2 of the power of a row whose largest scale has the magnitude bits `largest`.
__device__ __forceinline__ int rounded_exponent(uint32_t largest) {
  const int half = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(largest), __NV_E4M3).x;
  return max(((half >> 7) - kRoundedBias - kRoundedTop + 7) >> 3, -14);
}

// p * 2^exponent to the nearest e4m3 byte, ties to even; below e4m3's largest.
constexpr uint32_t round_e4m3(uint32_t p, int exponent) {
  if (p == 0) return 0;
  int binade = exponent;
  for (uint32_t rest = p; rest > 1; rest >>= 1) ++binade;
  binade = binade < -6 ? -6 : binade;
  const int dropped = binade - 3 - exponent;
  if (dropped > 20) return 0;
  uint32_t steps = dropped > 0 ? p >> dropped : p << -dropped;
  if (dropped > 0) {
    const uint32_t rest = p - (steps << dropped);
    const uint32_t half = 1u << (dropped - 1);
    if (rest > half || (rest == half && steps % 2 == 1)) ++steps;
  }
  return (binade + 6) * 8 + steps;
}

// The e4m3 bytes of all magnitudes times the scale of an index.
constexpr FoldTable rounded_table(uint32_t index) {
  constexpr uint32_t kTwice[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // e2m1 times two
  const uint32_t magnitude = index % 256;
  if (magnitude == 0 || magnitude > kRoundedTop + kRoundedBias) return {0, 0};
  const int exponent = static_cast<int>(magnitude / 8) - kRoundedBias / 8 - 11;
  uint32_t bytes[8] = {};
  for (int i = 0; i < 8; ++i) {
    bytes[i] = round_e4m3(kTwice[i] * (8 + magnitude % 8), exponent) | (index & 256) >> 1;
  }
  return {bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24,
          bytes[4] | bytes[5] << 8 | bytes[6] << 16 | bytes[7] << 24};
}

// The same where all results are normal, scales from kRoundedLow to kRoundedTop: only the products
// with 1.5, 3 and 6 are rounded, and how far they lie above scale, 2 scale and 4 scale depends on the
// mantissa alone.
constexpr uint64_t kRoundedSteps = 0x0404050505050504;  // by mantissa
__host__ __device__ constexpr FoldTable rounded_table_fast(uint32_t index, uint32_t steps) {
  constexpr uint32_t kBias = kRoundedBias * 0x01010101u;
  return {steps * 0x01000000u + (index * 0x01010100u - (kBias & 0xFFFFFF00u) - 0x800u),
          steps * 0x01000100u + (index * 0x01010101u - kBias + 0x10100808u)};
}
constexpr bool rounded_table_fast_holds() {
  for (uint32_t byte = kRoundedLow; byte <= kRoundedTop; ++byte) {
    const FoldTable a = rounded_table(byte + kRoundedBias);
    const FoldTable b =
        rounded_table_fast(byte + kRoundedBias, kRoundedSteps >> byte % 8 * 8 & 0xFF);
    if (a.lo != b.lo || a.hi != b.hi) return false;
  }
  return true;
}
static_assert(rounded_table_fast_holds());

// All of them, for zero and negative scales and those far below their row's largest.
struct RoundedTables {
  FoldTable at[512];
};
constexpr RoundedTables rounded_tables() {
  RoundedTables tables = {};
  for (uint32_t i = 0; i < 512; ++i) tables.at[i] = rounded_table(i);
  return tables;
}
__device__ constexpr RoundedTables kRoundedTables = rounded_tables();

// Tables of two neighbouring blocks from their e4m3 bytes.
class RoundedRowFold {
 public:
  // `exponent`: log2 of the row's power.
  __device__ __forceinline__ explicit RoundedRowFold(int exponent)
      : inverse_((15 - exponent) * 0x04000400u) {}

  template <int kPart = 0>
  __device__ __forceinline__ FoldTable block(uint32_t scales) const {
    uint32_t halves;
    asm("{\n"
        ".reg .b32 exact;\n"
        "cvt.rn.f16x2.e4m3x2 exact, %1;\n"
        "mul.rn.f16x2 %0, exact, %2;\n"
        "}\n"
        : "=r"(halves)
        : "h"(static_cast<uint16_t>(scales)), "r"(inverse_));
    const uint32_t index = kPart == 0 ? halves >> 7 & 0x1FF : halves >> 23;
    const uint32_t steps = prmt(static_cast<uint32_t>(kRoundedSteps),
                                static_cast<uint32_t>(kRoundedSteps >> 32), (index & 7) | 0x8880);
    FoldTable t = rounded_table_fast(index, steps);
    // Rare, and a branch would cut the MMA's stream in two.
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.gt.u32 p, %3, %4;\n"
        "@p ld.global.nc.v2.u32 {%0, %1}, [%2];\n"
        "}\n"
        : "+r"(t.lo), "+r"(t.hi)
        : "l"(&kRoundedTables.at[index]), "r"(index - (kRoundedLow + kRoundedBias)),
          "n"(kRoundedTop - kRoundedLow));
    return t;
  }

 private:
  uint32_t inverse_;
};

// ---- INT8 MMA ----

// Integers take no block scale.
struct NoFold {
  __device__ __forceinline__ explicit NoFold(int) {}
  template <int kPart = 0>
  __device__ __forceinline__ NoFold block(uint32_t) const {
    return *this;
  }
};

// Powers of two that the INT8 expansion leaves in its products.
constexpr float kS8Undo = 1.0f / 16;

// Eight two's complement nibbles to two fragment registers, each in the upper half of a byte.
__device__ __forceinline__ void expand_s4_s8(uint32_t word, uint32_t& half0, uint32_t& half1) {
  const uint32_t odd = word & 0xF0F0F0F0u;
  const uint32_t even = word << 4 & 0xF0F0F0F0u;
  half0 = prmt(even, odd, 0x5140);
  half1 = prmt(even, odd, 0x7362);
}

// ---- integers on the FP8 MMA ----

// e4m3 of 0..7, and what to flip in them for -8..-1.
struct S4Tables {
  uint32_t lo, hi, flip_lo, flip_hi;

  __device__ __forceinline__ S4Tables()
      : lo(0x44403800u), hi(0x4E4C4A48u), flip_lo(0xCACCCED0u ^ lo), flip_hi(0xB8C0C4C8u ^ hi) {
    // Opaque, or they are made anew for each word.
    asm volatile("" : "+r"(lo), "+r"(hi), "+r"(flip_lo), "+r"(flip_hi));
  }
};

// Eight two's complement nibbles to two fragment registers of e4m3, 11 instructions.
__device__ __forceinline__ void expand_s4_e4m3(uint32_t word, const S4Tables& tables,
                                               uint32_t& half0, uint32_t& half1) {
  uint32_t low;
  asm("and.b32 %0, %1, 0x77777777;" : "=r"(low) : "r"(word));
  const uint32_t shifted = word << 4;
  // Bytes of the sign bits of four nibbles each.
  const uint32_t negative0 = prmt(word, shifted, 0x9D8C);
  const uint32_t negative1 = prmt(word, shifted, 0xBFAE);
  half0 = prmt(tables.lo, tables.hi, low) ^ (prmt(tables.flip_lo, tables.flip_hi, low) & negative0);
  low >>= 16;
  half1 = prmt(tables.lo, tables.hi, low) ^ (prmt(tables.flip_lo, tables.flip_hi, low) & negative1);
}

// ---- 16-bit MMA ----

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Powers of two that the 16-bit expansion leaves in its products: value = e2m1 * e4m3 * 2^-8.
constexpr float kBf16Undo = 256.0f;

// A block's e4m3 scale as two bf16 copies of scale * 2^118. Shifted into place an e4m3 is its value
// times 2^-120, subnormals included; 2^238 takes two multiplications. NaN (0x7F, 0xFF) comes out as
// +-480: rows that hold one are flagged through their RowInputs.
class E4m3RowFold {
 public:
  __device__ __forceinline__ explicit E4m3RowFold(int) {}

  template <int kPart = 0>
  __device__ __forceinline__ uint32_t block(uint32_t scale) const {
    const uint32_t pair = scale * 0x00010001u;
    const uint32_t placed = (pair << 4 & 0x07F007F0u) | (pair << 8 & 0x80008000u);
    return multiply_bf16x2(multiply_bf16x2(placed, 0x7B807B80u), 0x7A807A80u);
  }
};

// Nibbles kFirst and kFirst + 4 of a word to a bf16 pair times the block's multiplier. The nibble's
// eem lands on bits 8..6 of a bf16, where it means e2m1 * 2^-126, zero and one half included.
template <int kFirst>
__device__ __forceinline__ uint32_t expand_e2m1_bf16(uint32_t word, uint32_t multiplier) {
  const uint32_t magnitude = kFirst < 2 ? word << (6 - 4 * kFirst) : word >> (4 * kFirst - 6);
  const uint32_t sign = word << (12 - 4 * kFirst);
  return multiply_bf16x2((magnitude & 0x01C001C0u) | (sign & 0x80008000u), multiplier);
}

// ---- int4 times its block scale as fp16 ----
//
// A row's scales are divided by a power of two, its `power`, that brings the largest into
// [2^kScaledTop, 2^(kScaledTop + 1)): 15 times it is below fp16's largest, and a scale keeps its 11
// bits down to 2^-25 of it. The quotient is rounded to fp16, and so is its product with the code.

constexpr int kScaledTop = 11;

// log2 of the power of a row whose largest scale has these fp32 bits; its reciprocal is finite too.
__device__ __forceinline__ int scaled_exponent(uint32_t largest) {
  return max(static_cast<int>(largest >> 23) - 127 - kScaledTop, -126);
}

// Two fp16 copies of scale / power.
__device__ __forceinline__ uint32_t scaled_f16x2(float scale, float inverse_power) {
  uint32_t d;
  asm("{\n"
      ".reg .f32 quotient;\n"
      "mul.rn.ftz.f32 quotient, %1, %2;\n"
      "cvt.rn.f16x2.f32 %0, quotient, quotient;\n"
      "}\n"
      : "=r"(d)
      : "f"(scale), "f"(inverse_power));
  return d;
}

// A block's multiplier from the bits of its scale, whose dtype is known at run time only.
class ScaledRowFold {
 public:
  // `inverse_power`: its fp32 bits. `left`: bits to shift a scale left to make it fp32, unless it is
  // fp16 (`half`).
  __device__ __forceinline__ ScaledRowFold(int inverse_power, int left, bool half)
      : inverse_(inverse_power), left_(left), half_(half) {}

  template <int kPart = 0>
  __device__ __forceinline__ uint32_t block(uint32_t scale) const {
    const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(scale)));
    return scaled_f16x2(half_ ? half : __uint_as_float(scale << left_), __int_as_float(inverse_));
  }

 private:
  int inverse_, left_;
  bool half_;
};

__device__ __forceinline__ uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Nibbles kFirst and kFirst + 4 of a word, two's complement, to an fp16 pair times the multiplier. A
// nibble v with its sign flipped is v + 8 in the mantissa of 1024, or 16 (v + 8) one nibble further
// up; what is subtracted leaves v, exactly.
template <int kFirst>
__device__ __forceinline__ uint32_t expand_s4_f16(uint32_t word, uint32_t multiplier) {
  if (kFirst >= 2) word >>= 8;
  uint32_t codes;
  if (kFirst % 2 == 0) {
    asm("add.rn.f16x2 %0, %1, %2;"
        : "=r"(codes)
        : "r"((word & 0x000F000Fu) ^ 0x64086408u), "r"(0xE408E408u));  // -1032
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(codes)
        : "r"((word & 0x00F000F0u) ^ 0x64806480u), "r"(0x2C002C00u),  // 1 / 16
          "r"(0xD480D480u));                                          // -72
  }
  return multiply_f16x2(codes, multiplier);
}

}  // namespace jax_w4a4::sm90
