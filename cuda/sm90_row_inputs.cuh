// What the v2 GEMM wants to know about each weight row, prepared once per call from the block scales
// and the optional vectors by spare CTAs of the launch before it.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "formats.cuh"
#include "sm90_expand.cuh"
#include "sm90_repack_v2.h"

namespace jax_w4a4::sm90 {

// y = acc * scale_lo * token_scale * scale_hi + low-rank + bias. The power of two of the row's base
// exponent is split over scale_lo and scale_hi so that no intermediate leaves fp32's range unless
// the result does. A NaN block scale makes scale_lo NaN; of int4's an infinite one too.
struct alignas(16) RowInputs {
  float scale_lo;
  float scale_hi;
  float bias;
  int base;  // what the path's RowFold is made from, some float's bits in Int4Scaled
};

struct RowInputsArgs {
  const uint8_t* weight_scales;   // (N, scale_blocks)
  const float* global_scale;      // one per group of rows, or null
  const float* act_global_scale;  // one per group of rows, or null
  const float* channel_scale;     // (N,) or null
  const float* bias;              // (N,) or null
  RowInputs* rows;                // (N,)
  int n, scale_blocks;
  DType scale_dtype;  // of int4
  bool rounded;       // nvfp4: for RoundedRowFold
  int group_rows;     // weight rows that share the global scales
  const int* bounds;  // of tokens; rows of a group without any are not prepared. Or null.
  const uint8_t* scale_range;  // (N, 2) largest and least byte of a row's mxfp4 scales, or null
};

// `blocks`: block scales per weight row.
inline RowInputsArgs row_inputs_args(GemmV2Path path, const WeightRowParams& p, int blocks) {
  return {static_cast<const uint8_t*>(p.weight_scale),
          p.weight_global_scale,
          p.act_global_scale,
          p.channel_scale,
          p.bias,
          static_cast<RowInputs*>(p.rows),
          static_cast<int>(p.n),
          blocks,
          p.scale_dtype,
          path == GemmV2Path::kNvfp4Rounded,
          static_cast<int>(p.bounds != nullptr ? p.n / p.groups : p.n),
          p.bounds,
          GemmV2ActPath(path) == GemmV2Path::kMxfp4 ? p.scale_range : nullptr};
}

// Weight rows that a warp prepares where it looks through block scales: eight, or so many times eight where
// they are whole 16 bytes of one-byte scales, whose loads are on their way together.
constexpr int kPrepareSets = 4;
__host__ __device__ constexpr int PrepareWarpRows(bool one_byte, int scale_blocks) {
  return one_byte && scale_blocks % 16 == 0 ? 8 * kPrepareSets : 8;
}
constexpr int kNanScale = 255;          // e8m0
constexpr int kFloatNan = 0x7FC00000;
constexpr int kFloatInf = 0x7F800000;

// CTAs of `threads` that prepare `n` rows of `blocks` scales: a warp for some where it looks through block
// scales, else a thread for each.
inline int prepare_ctas(GemmV2Path path, const RowInputsArgs& args, int threads) {
  const int64_t n = args.n;
  const int blocks = args.scale_blocks;
  const bool integers = path == GemmV2Path::kInt4Row || path == GemmV2Path::kInt4Group64 ||
                        path == GemmV2Path::kInt4Group128;
  const bool looks = !integers && args.scale_range == nullptr;
  const int64_t rows =
      looks ? PrepareWarpRows(path != GemmV2Path::kInt4Scaled, blocks) * (threads / 32) : threads;
  return static_cast<int>((n + rows - 1) / rows);
}

// 2^exponent for -149 <= exponent <= 127, exact, subnormals included.
__device__ __forceinline__ float power_of_two(int exponent) {
  return exponent >= -126 ? __int_as_float((exponent + 127) << 23)
                          : __int_as_float(1 << (exponent + 149));
}

// Exponent of the power of two that undoes a fold whose largest e8m0 byte is `largest`.
__device__ __forceinline__ int fold_exponent(int largest) {
  return largest - 127 - kFoldSpan + kFoldBias;
}

// The magnitude bits of the largest of int4's scales, a whole warp's `row` of them.
__device__ __forceinline__ int largest_scale(const void* scales, int64_t row, int blocks, DType dtype,
                                             int lane) {
  int largest = 0;
  for (int i = lane; i < blocks; i += 32) {
    largest = max(largest, __float_as_int(fabsf(Flush(LoadElement(scales, row * blocks + i, dtype)))));
  }
  return __reduce_max_sync(0xFFFFFFFFu, largest);
}

__device__ __forceinline__ bool is_unused(const RowInputsArgs& args, int row) {
  if (args.bounds == nullptr) return false;
  const int* bounds = args.bounds + row / args.group_rows;
  return bounds[0] == bounds[1];
}

// What the optional vectors and scalars say of a row, as it was loaded: nothing waits for the loads
// before the values are used.
struct RowFactors {
  float channel, global, act_global, bias;

  __device__ __forceinline__ float scale() const { return channel * global * act_global; }
};
__device__ __forceinline__ RowFactors row_factors(const RowInputsArgs& args, int row, int group) {
  return {load_nc_or(args.channel_scale, row, 1.0f), load_nc_or(args.global_scale, group, 1.0f),
          load_nc_or(args.act_global_scale, group, 1.0f), load_nc_or(args.bias, row, 0.0f)};
}
__device__ __forceinline__ RowFactors row_factors(const RowInputsArgs& args, int row) {
  return row_factors(args, row, row / args.group_rows);
}

// `largest` of a row's block scales: the byte (mxfp4), the magnitude bits, where 0x7F is NaN (nvfp4), or
// fp32 bits (int4 of path Int4Scaled).
template <Format kFormat>
__device__ __forceinline__ RowInputs row_inputs(bool rounded, const RowFactors& given, int largest) {
  RowInputs out;
  if constexpr (kFormat == Format::kNvfp4) {
    out.scale_lo = largest == 0x7F ? __int_as_float(kFloatNan) : 1.0f;
    out.scale_hi = kBf16Undo * given.scale();
    out.base = 0;
    if (rounded) {
      out.base = rounded_exponent(largest);
      out.scale_lo *= power_of_two(out.base);
      out.scale_hi = given.scale();
    }
  } else if constexpr (kFormat == Format::kInt4) {
    const int exponent = scaled_exponent(largest);
    const int low = exponent >> 1;
    out.scale_lo = largest >= kFloatInf ? __int_as_float(kFloatNan) : power_of_two(low);
    out.scale_hi = power_of_two(exponent - low) * given.scale();
    out.base = __float_as_int(power_of_two(-exponent));
  } else {
    const int exponent = fold_exponent(largest);
    const int low = exponent >> 1;
    out.scale_lo = largest == kNanScale ? __int_as_float(kFloatNan) : power_of_two(low);
    out.scale_hi = power_of_two(exponent - low) * given.scale();
    out.base = largest - kFoldSpan;
  }
  out.bias = given.bias;
  return out;
}

// Bits of a block scale that count for `largest`.
template <Format kFormat>
constexpr int kScaleMask = kFormat == Format::kNvfp4 ? 0x7F : 0xFF;

// One warp, one row: looks through its block scales.
template <Format kFormat>
__device__ __forceinline__ void write_row_inputs(const RowInputsArgs& args, int row, int lane) {
  const uint8_t* scales = args.weight_scales + static_cast<int64_t>(row) * args.scale_blocks;
  int largest = 0;
  if constexpr (kFormat == Format::kInt4) {
    largest = largest_scale(args.weight_scales, row, args.scale_blocks, args.scale_dtype, lane);
  } else {
    for (int i = lane; i < args.scale_blocks; i += 32) {
      largest = max(largest, scales[i] & kScaleMask<kFormat>);
    }
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  }
  if (lane != 0) return;
  args.rows[row] = row_inputs<kFormat>(args.rounded, row_factors(args, row), largest);
}

// Bytes 1 and 3 of the result are the larger, or smaller, of theirs and of the word's: bytes are compared as
// the upper halves of 16 bits, where the lower ones do not matter.
__device__ __forceinline__ uint32_t larger_bytes(uint32_t most, uint32_t word) {
  return __vmaxu2(most, __vmaxu2(word, word << 8));
}
__device__ __forceinline__ uint32_t smaller_bytes(uint32_t least, uint32_t word) {
  return __vminu2(least, __vminu2(word, word << 8));
}

// The largest of sixteen one-byte scales.
template <Format kFormat>
__device__ __forceinline__ int largest_of(const uint4& v) {
  constexpr uint32_t kBytes = kScaleMask<kFormat> * 0x01010101u;
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t word : {v.x & kBytes, v.y & kBytes, v.z & kBytes, v.w & kBytes}) {
    largest = larger_bytes(largest, word);
  }
  return static_cast<int>(max(largest >> 24, largest >> 8 & 0xFF));
}

// One warp, 8 kPrepareSets rows of whole 16 bytes of scales, four lanes each: experts have many rows, and what
// a warp waits for takes as long for one as for all of them. Each of the four lanes finishes a row.
template <Format kFormat>
__device__ __forceinline__ void write_rows_together(const RowInputsArgs& args, int first, int lane) {
  static_assert(kPrepareSets == 4);
  const auto row_of = [&](int set) { return first + 8 * set + lane / 4; };
  const auto is_used = [&](int row) { return row < args.n && !is_unused(args, row); };
  const int own = row_of(lane % 4);
  const bool own_used = is_used(own);
  RowFactors factors;
  if (own_used) factors = row_factors(args, own);
  // Its four lanes know of a row's sets what they need.
  const uint32_t used = __ballot_sync(0xFFFFFFFFu, own_used) >> (lane & ~3);
  int largest[kPrepareSets] = {};
  for (int i = lane % 4; i < args.scale_blocks / 16; i += 4) {
    uint4 scales[kPrepareSets];
#pragma unroll
    for (int s = 0; s < kPrepareSets; ++s) {
      scales[s] = make_uint4(0, 0, 0, 0);
      if (used >> s & 1) {
        scales[s] = __ldg(reinterpret_cast<const uint4*>(
                              args.weight_scales + static_cast<int64_t>(row_of(s)) * args.scale_blocks) +
                          i);
      }
    }
#pragma unroll
    for (int s = 0; s < kPrepareSets; ++s) {
      largest[s] = max(largest[s], largest_of<kFormat>(scales[s]));
    }
  }
  int found = 0;
#pragma unroll
  for (int s = 0; s < kPrepareSets; ++s) {
    largest[s] = max(largest[s], __shfl_xor_sync(0xFFFFFFFFu, largest[s], 1));
    largest[s] = max(largest[s], __shfl_xor_sync(0xFFFFFFFFu, largest[s], 2));
    if (lane % 4 == s) found = largest[s];
  }
  if (own_used) args.rows[own] = row_inputs<kFormat>(args.rounded, factors, found);
}

// The largest and the least byte of a row's mxfp4 scales.
struct ScaleRange {
  uint32_t bytes;

  __device__ __forceinline__ int most() const { return bytes & 0xFF; }
  __device__ __forceinline__ int least() const { return bytes >> 8; }
};
__device__ __forceinline__ ScaleRange scale_range(const RowInputsArgs& args, int row) {
  return {load_nc_u16(args.scale_range + 2 * static_cast<int64_t>(row))};
}

// The rows of prepare CTA `block`.
template <Format kFormat>
__device__ __forceinline__ void write_rows(const RowInputsArgs& args, int block, int warp,
                                           int warps, int lane) {
  if (kFormat == Format::kMxfp4 && args.scale_range) {
    const int row = 32 * (block * warps + warp) + lane;
    if (row < args.n && !is_unused(args, row)) {
      args.rows[row] =
          row_inputs<kFormat>(args.rounded, row_factors(args, row), scale_range(args, row).most());
    }
    return;
  }
  const int rows = PrepareWarpRows(kFormat != Format::kInt4, args.scale_blocks);
  const int first = rows * (block * warps + warp);
  if (rows > 8) {
    write_rows_together<kFormat>(args, first, lane);
    return;
  }
  for (int row = first; row < min(first + rows, args.n); ++row) {
    if (!is_unused(args, row)) write_row_inputs<kFormat>(args, row, lane);
  }
}

// int4: with one scale per row, which becomes scale_lo, or with groups.
__device__ __forceinline__ RowInputs int4_row_inputs(const RowInputsArgs& args, int row) {
  const RowFactors given = row_factors(args, row);
  // Exact below 2^-126 too: no scale has more than 19 significant bits.
  const float scale =
      args.scale_blocks == 1
          ? Flush(LoadElement(args.weight_scales, row, args.scale_dtype)) * kS8Undo
          : 1.0f;
  return {scale, given.scale(), given.bias, 0};
}

// One thread per row.
__device__ __forceinline__ void write_int4_row_inputs(const RowInputsArgs& args, int row) {
  if (row < args.n && !is_unused(args, row)) args.rows[row] = int4_row_inputs(args, row);
}

}  // namespace jax_w4a4::sm90
