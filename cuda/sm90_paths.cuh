// What the main loops multiply: a format on one of the tensor core's operand types. The names are those
// of GemmV2Path; sm90_gemm_v2.cuh and sm90_decode.cuh run them.
#pragma once

#include <cstdint>

#include "sm90_expand.cuh"
#include "sm90_ptx.cuh"
#include "sm90_row_inputs.cuh"
#include "sm90_wgmma.cuh"

namespace jax_w4a4::sm90 {

// e2m1 with an e8m0 scale per 32: exponents folded into e5m2 on both sides, FP8 MMA.
template <bool kSortedSigns>
struct FoldedE2m1 {
  static constexpr Format kFormat = Format::kMxfp4;
  using Accumulator = float;
  static constexpr bool kPromote = false;
  static constexpr bool kRuntimeBlock = false;
  static constexpr MmaKind kMma = MmaKind::kE5m2E5m2;
  static constexpr int kStageK = 128;
  static constexpr int kWeightBytes = 64;  // per row and stage
  static constexpr int kLaneBytes = 16;    // from one lane of a quad to the next
  static constexpr int kStageScales = 4;
  static constexpr int kLaneBlocks = 1;
  static constexpr int kStageGroups = 0;
  static constexpr bool kTokenScale = true;

  using RowFold = E8m0RowFold;
  static __device__ __forceinline__ uint4 load_packed(uint32_t address) {
    return load_shared_v4(address);
  }
  static __device__ __forceinline__ void expand(const uint4& packed, int step, FoldTable table,
                                                uint32_t& half0, uint32_t& half1) {
    const uint32_t word = step == 0 ? packed.x : step == 1 ? packed.y : step == 2 ? packed.z
                                                                                  : packed.w;
    expand_word(word, table, half0, half1);
  }
  static __device__ __forceinline__ void expand_word(uint32_t word, FoldTable table,
                                                     uint32_t& half0, uint32_t& half1) {
    if constexpr (kSortedSigns) {
      expand_e2m1_e5m2_sorted(word, table, half0, half1);
    } else {
      expand_e2m1_e5m2(word, table, half0, half1);
    }
  }
  static __device__ __forceinline__ float scaled(float acc, const RowInputs& row, float token) {
    return acc * row.scale_lo * token * row.scale_hi;
  }
};
struct Mxfp4 : FoldedE2m1<false> {};
struct Mxfp4Sorted : FoldedE2m1<true> {};  // of a prepared weight

struct Mxfp4Promoted : Mxfp4 {
  static constexpr bool kPromote = true;
};

// e2m1 with an e4m3 scale per 16, exact: value * scale has six significant bits, so bf16 holds it.
struct Nvfp4 {
  static constexpr Format kFormat = Format::kNvfp4;
  using Accumulator = float;
  static constexpr bool kPromote = false;
  static constexpr bool kRuntimeBlock = false;
  static constexpr MmaKind kMma = MmaKind::kBf16;
  static constexpr int kStageK = 64;
  static constexpr int kWeightBytes = 32;
  static constexpr int kLaneBytes = 8;
  static constexpr int kStageScales = 4;
  static constexpr int kLaneBlocks = 1;
  static constexpr int kStageGroups = 0;
  static constexpr bool kTokenScale = false;
  using RowFold = E4m3RowFold;

  static __device__ __forceinline__ uint2 load_packed(uint32_t address) {
    return load_shared_v2(address);
  }
  static __device__ __forceinline__ void expand(const uint2& packed, int step, uint32_t multiplier,
                                                uint32_t& half0, uint32_t& half1) {
    const uint32_t word = step < 2 ? packed.x : packed.y;
    if (step % 2 == 0) {
      half0 = expand_e2m1_bf16<0>(word, multiplier);
      half1 = expand_e2m1_bf16<1>(word, multiplier);
    } else {
      half0 = expand_e2m1_bf16<2>(word, multiplier);
      half1 = expand_e2m1_bf16<3>(word, multiplier);
    }
  }
  static __device__ __forceinline__ float scaled(float acc, const RowInputs& row, float) {
    return acc * row.scale_lo * row.scale_hi;
  }
};

// e2m1 with an e4m3 scale per 16, each value times its scale rounded to e4m3, FP8 MMA.
struct Nvfp4Rounded {
  static constexpr Format kFormat = Format::kNvfp4;
  using Accumulator = float;
  static constexpr bool kPromote = false;
  static constexpr bool kRuntimeBlock = false;
  static constexpr MmaKind kMma = MmaKind::kE4m3E4m3;
  static constexpr int kStageK = 128;
  static constexpr int kWeightBytes = 64;
  static constexpr int kLaneBytes = 16;
  static constexpr int kStageScales = 8;
  static constexpr int kLaneBlocks = 2;
  static constexpr int kStageGroups = 0;
  static constexpr bool kTokenScale = true;
  using RowFold = RoundedRowFold;

  static __device__ __forceinline__ uint4 load_packed(uint32_t address) {
    return load_shared_v4(address);
  }
  static __device__ __forceinline__ void expand(const uint4& packed, int step, FoldTable table,
                                                uint32_t& half0, uint32_t& half1) {
    const uint32_t word = step == 0 ? packed.x : step == 1 ? packed.y : step == 2 ? packed.z
                                                                                  : packed.w;
    expand_e2m1_e5m2(word, table, half0, half1);
  }
  static __device__ __forceinline__ float scaled(float acc, const RowInputs& row, float token) {
    return acc * row.scale_lo * token * row.scale_hi;
  }
};

// int4 with one scale per row and per token: integers on the INT8 MMA, weights times 16. The sums
// are exact while 16 * 8 * 15 * K stays below 2^31; in the accumulators they are int32 bits.
struct Int4Row {
  static constexpr Format kFormat = Format::kInt4;
  using Accumulator = int;
  static constexpr bool kPromote = false;
  static constexpr bool kRuntimeBlock = false;
  static constexpr MmaKind kMma = MmaKind::kS8;
  static constexpr int kStageK = 128;
  static constexpr int kWeightBytes = 64;
  static constexpr int kLaneBytes = 16;
  static constexpr int kStageScales = 0;
  static constexpr int kLaneBlocks = 1;
  static constexpr int kStageGroups = 0;
  static constexpr bool kTokenScale = true;
  using RowFold = NoFold;

  static __device__ __forceinline__ uint4 load_packed(uint32_t address) {
    return load_shared_v4(address);
  }
  static __device__ __forceinline__ void expand(const uint4& packed, int step, NoFold,
                                                uint32_t& half0, uint32_t& half1) {
    const uint32_t word = step == 0 ? packed.x : step == 1 ? packed.y : step == 2 ? packed.z
                                                                                  : packed.w;
    expand_s4_s8(word, half0, half1);
  }
  // Row and token scale first: their product leaves fp32's range only where the result does.
  static __device__ __forceinline__ float scaled(float acc, const RowInputs& row, float token) {
    return __int2float_rn(__float_as_int(acc)) * (row.scale_lo * token) * row.scale_hi;
  }
};

// int4 with a scale per block of 32, 64 or 128 on both sides, each code times its scale rounded to
// fp16 (sm90_expand.cuh).
struct Int4Scaled {
  static constexpr Format kFormat = Format::kInt4;
  using Accumulator = float;
  static constexpr bool kPromote = false;
  static constexpr bool kRuntimeBlock = true;
  static constexpr MmaKind kMma = MmaKind::kF16;
  static constexpr int kStageK = 64;
  static constexpr int kWeightBytes = 32;
  static constexpr int kLaneBytes = 8;
  static constexpr int kStageScales = 0;
  static constexpr int kLaneBlocks = 1;
  static constexpr int kStageGroups = 0;
  static constexpr bool kTokenScale = true;
  using RowFold = ScaledRowFold;

  static __device__ __forceinline__ uint2 load_packed(uint32_t address) {
    return load_shared_v2(address);
  }
  static __device__ __forceinline__ void expand(const uint2& packed, int step, uint32_t multiplier,
                                                uint32_t& half0, uint32_t& half1) {
    const uint32_t word = step < 2 ? packed.x : packed.y;
    if (step % 2 == 0) {
      half0 = expand_s4_f16<0>(word, multiplier);
      half1 = expand_s4_f16<1>(word, multiplier);
    } else {
      half0 = expand_s4_f16<2>(word, multiplier);
      half1 = expand_s4_f16<3>(word, multiplier);
    }
  }
  static __device__ __forceinline__ float scaled(float acc, const RowInputs& row, float token) {
    return acc * row.scale_lo * token * row.scale_hi;
  }
};

// int4 with a scale per group of 64 or 128 on both sides: integers as e4m3, whose sums over a group
// fit what the FP8 tensor core keeps, and fp32 scales after each.
template <int kGroup>
struct Int4Group {
  static constexpr bool kPromote = false;
  static constexpr bool kRuntimeBlock = false;
  static constexpr MmaKind kMma = MmaKind::kE4m3E4m3;
  static constexpr int kStageK = 128;
  static constexpr int kWeightBytes = 64;
  static constexpr int kLaneBytes = 8;  // of each half of a stage
  static constexpr int kStageScales = 0;
  static constexpr int kStageGroups = 128 / kGroup;
  static constexpr bool kTokenScale = false;

  static __device__ __forceinline__ float scaled(float acc, const RowInputs& row, float) {
    return acc * row.scale_hi;
  }
};
using Int4Group64 = Int4Group<64>;
using Int4Group128 = Int4Group<128>;

}  // namespace jax_w4a4::sm90
