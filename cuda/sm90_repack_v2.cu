// Public activation layout -> GEMM v2's: exponents folded, k permuted inside each
// stage (sm90_expand.cuh). One warp per token; leading CTAs prepare weight rows.
#include "sm90_repack_v2.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "sm90_expand.cuh"
#include "sm90_gemm_v2.h"
#include "sm90_ptx.cuh"
#include "sm90_row_inputs.cuh"

namespace jax_w4a4 {
namespace {

using sm90::E4m3RowFold;
using sm90::E8m0RowFold;
using sm90::FoldTable;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Args {
  const uint8_t* packed;
  const uint8_t* scales;
  uint8_t* act;
  float* token_scale;
  sm90::RowInputsArgs rows;
  int prepare_ctas;
  int m;
  int packed_pitch;  // bytes per token
  int scale_blocks;
  int stages;  // of K, whole ones
  int block;   // K elements per block scale
  bool is_unsigned;
  bool scaled;  // path Int4Scaled
  int64_t token_pitch;
};

// The word of block `block` that step `step` of a stage takes; zero past K.
template <int kBlockBytes>
__device__ __forceinline__ uint32_t LoadWord(const uint8_t* row, int block,
                                             int blocks, int word) {
  if (block >= blocks) return 0;
  return __ldg(reinterpret_cast<const uint32_t*>(row + block * kBlockBytes) +
               word);
}

__device__ __forceinline__ uint32_t LoadScale(const uint8_t* row, int block,
                                              int blocks) {
  return block < blocks ? __ldg(row + block) : 0;
}

__device__ __forceinline__ const uint8_t* PackedRow(const Args& args, int row) {
  return args.packed + static_cast<int64_t>(row) * args.packed_pitch;
}

// Block scales of one byte.
__device__ __forceinline__ const uint8_t* ScaleRow(const Args& args, int row) {
  return args.scales + static_cast<int64_t>(row) * args.scale_blocks;
}

__device__ __forceinline__ uint4* ActRow(const Args& args, int row) {
  return reinterpret_cast<uint4*>(
      args.act + static_cast<int64_t>(row) * args.stages * kGemmV2RowBytes);
}

// Thread (stage, step) writes the 32 bytes of one k-step: half 0, then half 1, in
// each the four blocks q of the stage in turn.
__device__ __forceinline__ void StoreStep(uint4* out, int i,
                                          const uint32_t (&half)[2][4]) {
  out[2 * i] = make_uint4(half[0][0], half[0][1], half[0][2], half[0][3]);
  out[2 * i + 1] = make_uint4(half[1][0], half[1][1], half[1][2], half[1][3]);
}

__device__ __forceinline__ void RepackMxfp4(const Args& args, int row,
                                            int lane) {
  const uint8_t* packed = PackedRow(args, row);
  const uint8_t* scales = ScaleRow(args, row);
  int largest = 0;
  for (int i = lane; i < args.scale_blocks; i += 32) {
    largest = max(largest, static_cast<int>(__ldg(scales + i)));
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (lane == 0) {
    args.token_scale[row] =
        largest == sm90::kNanScale
            ? __int_as_float(sm90::kFloatNan)
            : sm90::power_of_two(sm90::fold_exponent(largest));
  }
  const E8m0RowFold fold(largest - sm90::kFoldSpan);
  uint4* out = ActRow(args, row);
  for (int i = lane; i < 4 * args.stages; i += 32) {
    uint32_t half[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int block = i / 4 * 4 + q;
      const uint32_t word =
          LoadWord<16>(packed, block, args.scale_blocks, i % 4);
      const FoldTable table =
          fold.block(LoadScale(scales, block, args.scale_blocks));
      sm90::expand_e2m1_e5m2(word, table, half[0][q], half[1][q]);
    }
    StoreStep(out, i, half);
  }
}

// e2m1 * e4m3 as bf16, exact. The weights' expansion leaves the product times
// 2^-8; here that is undone at once.
template <int kFirst>
__device__ __forceinline__ uint32_t ExpandPair(uint32_t word,
                                               uint32_t multiplier, bool nan) {
  constexpr uint32_t kUndo = 0x43804380;  // 256, twice
  const uint32_t pair = sm90::multiply_bf16x2(
      sm90::expand_e2m1_bf16<kFirst>(word, multiplier), kUndo);
  return nan ? 0x7FC07FC0u : pair;
}

__device__ __forceinline__ void RepackNvfp4(const Args& args, int row,
                                            int lane) {
  const uint8_t* packed = PackedRow(args, row);
  const uint8_t* scales = ScaleRow(args, row);
  uint4* out = ActRow(args, row);
  const E4m3RowFold fold(0);
  for (int i = lane; i < 4 * args.stages; i += 32) {
    const int step = i % 4;
    uint32_t half[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int block = i / 4 * 4 + q;
      const uint32_t word =
          LoadWord<8>(packed, block, args.scale_blocks, step / 2);
      const uint32_t scale = LoadScale(scales, block, args.scale_blocks);
      const uint32_t multiplier = fold.block(scale);
      const bool nan = (scale & 0x7F) == 0x7F;
      if (step % 2 == 0) {
        half[0][q] = ExpandPair<0>(word, multiplier, nan);
        half[1][q] = ExpandPair<1>(word, multiplier, nan);
      } else {
        half[0][q] = ExpandPair<2>(word, multiplier, nan);
        half[1][q] = ExpandPair<3>(word, multiplier, nan);
      }
    }
    StoreStep(out, i, half);
  }
}

// e2m1 * e4m3 / 2^exponent as e4m3, to nearest even.
__device__ __forceinline__ uint32_t RoundE4m3(uint32_t codes, float scale) {
  uint32_t bytes = 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const float2 v = make_float2(DecodeE2m1(codes >> 4 * j & 15) * scale,
                                 DecodeE2m1(codes >> (4 * j + 4) & 15) * scale);
    const uint32_t pair = __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3);
    bytes |= pair << 8 * j;
  }
  return bytes;
}

__device__ __forceinline__ void RepackNvfp4Rounded(const Args& args, int row,
                                                   int lane) {
  const uint8_t* packed = PackedRow(args, row);
  const uint8_t* scales = ScaleRow(args, row);
  uint32_t largest = 0;
  for (int i = lane; i < args.scale_blocks; i += 32) {
    largest = max(largest, __ldg(scales + i) & 0x7Fu);
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  const int exponent = sm90::rounded_exponent(largest);
  if (lane == 0) {
    args.token_scale[row] = largest == 0x7F ? __int_as_float(sm90::kFloatNan)
                                            : sm90::power_of_two(exponent);
  }
  const float inverse = sm90::power_of_two(-exponent);
  uint4* out = ActRow(args, row);
  for (int i = lane; i < 4 * args.stages; i += 32) {
    const int step = i % 4;
    uint32_t half[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int block = i / 4 * 8 + 2 * q + step / 2;
      const uint32_t word =
          LoadWord<8>(packed, block, args.scale_blocks, step % 2);
      const float scale =
          DecodeE4m3(LoadScale(scales, block, args.scale_blocks)) * inverse;
      half[0][q] = RoundE4m3(word, scale);
      half[1][q] = RoundE4m3(word >> 16, scale);
    }
    StoreStep(out, i, half);
  }
}

// Integers as bytes: the low halves of both words, nibble by nibble, are a step's
// two halves.
__device__ __forceinline__ uint32_t SpreadNibbles(uint32_t half_word,
                                                  bool is_unsigned) {
  const uint32_t pairs = (half_word | half_word << 8) & 0x00FF00FFu;
  const uint32_t bytes = (pairs | pairs << 4) & 0x0F0F0F0Fu;
  // Two's complement: (v ^ 8) - 8 in each byte.
  return is_unsigned ? bytes : __vsub4(bytes ^ 0x08080808u, 0x08080808u);
}

__device__ __forceinline__ void RepackInt4(const Args& args, int row,
                                           int lane) {
  const uint8_t* packed = PackedRow(args, row);
  if (lane == 0) {
    args.token_scale[row] =
        Flush(LoadElement(args.scales, row, args.rows.scale_dtype));
  }
  uint4* out = ActRow(args, row);
  const int blocks = args.packed_pitch / 16;
  for (int i = lane; i < 4 * args.stages; i += 32) {
    uint32_t half[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const uint32_t word = LoadWord<16>(packed, i / 4 * 4 + q, blocks, i % 4);
      half[0][q] = SpreadNibbles(word & 0xFFFFu, args.is_unsigned);
      half[1][q] = SpreadNibbles(word >> 16, args.is_unsigned);
    }
    StoreStep(out, i, half);
  }
}

// Four integers as e4m3.
__device__ __forceinline__ uint32_t IntegersE4m3(uint32_t half_word,
                                                 bool is_unsigned) {
  uint32_t bytes = 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const int low = half_word >> 4 * j & 15;
    const int high = half_word >> (4 * j + 4) & 15;
    const float2 v =
        is_unsigned ? make_float2(low, high)
                    : make_float2((low ^ 8) - 8, (high ^ 8) - 8);
    const uint32_t pair = __nv_cvt_float2_to_fp8x2(v, __NV_NOSAT, __NV_E4M3);
    bytes |= pair << 8 * j;
  }
  return bytes;
}

// A step takes its words from one half of a stage: the groups may be that small.
__device__ __forceinline__ void RepackInt4Groups(const Args& args, int row,
                                                 int lane) {
  const uint8_t* packed = PackedRow(args, row);
  const int64_t first = static_cast<int64_t>(row) * args.scale_blocks;
  for (int i = lane; i < args.scale_blocks; i += 32) {
    args.token_scale[i * args.token_pitch + row] =
        Flush(LoadElement(args.scales, first + i, args.rows.scale_dtype));
  }
  uint4* out = ActRow(args, row);
  const int blocks = args.packed_pitch / 8;
  for (int i = lane; i < 4 * args.stages; i += 32) {
    const int step = i % 4;
    uint32_t half[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int block = i / 4 * 8 + step / 2 * 4 + q;
      const uint32_t word = LoadWord<8>(packed, block, blocks, step % 2);
      half[0][q] = IntegersE4m3(word & 0xFFFFu, args.is_unsigned);
      half[1][q] = IntegersE4m3(word >> 16, args.is_unsigned);
    }
    StoreStep(out, i, half);
  }
}

// Code * scale / 2^exponent as fp16, both rounded.
__device__ __forceinline__ uint32_t ScaledPair(uint32_t word, int first,
                                               float factor, bool is_unsigned) {
  float v[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t code = word >> 4 * (first + 4 * j);
    v[j] = (is_unsigned ? DecodeU4(code) : DecodeS4(code)) * factor;
  }
  const __half2 pair = __floats2half2_rn(v[0], v[1]);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ void RepackInt4Scaled(const Args& args, int row,
                                                 int lane) {
  const uint8_t* packed = PackedRow(args, row);
  const int largest =
      sm90::largest_scale(args.scales, row, args.scale_blocks,
                          args.rows.scale_dtype, lane);
  const int exponent = sm90::scaled_exponent(largest);
  if (lane == 0) {
    args.token_scale[row] = largest >= sm90::kFloatInf
                                ? __int_as_float(sm90::kFloatNan)
                                : sm90::power_of_two(exponent);
  }
  const float inverse = sm90::power_of_two(-exponent);
  const int64_t first = static_cast<int64_t>(row) * args.scale_blocks;
  uint4* out = ActRow(args, row);
  const int blocks = args.packed_pitch / 8;
  for (int i = lane; i < 4 * args.stages; i += 32) {
    const int step = i % 4;
    uint32_t half[2][4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int block = i / 4 * 4 + q;  // of 16 elements
      const uint32_t word = LoadWord<8>(packed, block, blocks, step / 2);
      const int scale = min(block * 16 / args.block, args.scale_blocks - 1);
      const uint32_t pair = sm90::scaled_f16x2(
          LoadElement(args.scales, first + scale, args.rows.scale_dtype),
          inverse);
      const float factor =
          __half2float(__ushort_as_half(static_cast<uint16_t>(pair)));
      const int at = step % 2 * 2;
      half[0][q] = ScaledPair(word, at, factor, args.is_unsigned);
      half[1][q] = ScaledPair(word, at + 1, factor, args.is_unsigned);
    }
    StoreStep(out, i, half);
  }
}

template <Format kFormat>
__global__ void __launch_bounds__(kThreads) RepackV2(const Args args) {
  sm90::grid_dependency_launch();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int block = blockIdx.x;
  if (block < args.prepare_ctas) {
    if (kFormat == Format::kInt4 && !args.scaled) {
      sm90::write_int4_row_inputs(args.rows, block * kThreads + threadIdx.x);
    } else {
      sm90::write_rows<kFormat>(args.rows, block, warp, kWarps, lane);
    }
    return;
  }
  const int row = (block - args.prepare_ctas) * kWarps + warp;
  if (row >= args.m) return;
  if constexpr (kFormat == Format::kMxfp4) {
    RepackMxfp4(args, row, lane);
  } else if constexpr (kFormat == Format::kNvfp4) {
    if (args.rows.rounded) {
      RepackNvfp4Rounded(args, row, lane);
    } else {
      RepackNvfp4(args, row, lane);
    }
  } else if (args.scaled) {
    RepackInt4Scaled(args, row, lane);
  } else if (args.token_pitch > 0) {
    RepackInt4Groups(args, row, lane);
  } else {
    RepackInt4(args, row, lane);
  }
}

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

int LaunchRepackV2(GemmV2Path path, const RepackV2Params& p,
                   cudaStream_t stream) {
  const int blocks = p.k_pad / p.block;
  Args args = {};
  args.packed = p.packed;
  args.scales = static_cast<const uint8_t*>(p.scales);
  args.act = static_cast<uint8_t*>(p.act);
  args.token_scale = p.token_scale;
  args.rows = sm90::row_inputs_args(path, p.weight, blocks);
  const bool int4 = GemmV2IsInt4(path);
  args.prepare_ctas = sm90::prepare_ctas(path, args.rows, kThreads);
  args.m = static_cast<int>(p.m);
  args.packed_pitch = p.k_pad / 2;
  args.scale_blocks = blocks;
  args.stages = CeilDiv(p.k_pad, GemmV2TileK(path));
  args.block = p.block;
  args.is_unsigned = p.is_unsigned;
  args.scaled = path == GemmV2Path::kInt4Scaled;
  args.token_pitch = GemmV2StageGroups(path) > 0 ? p.token_pitch : 0;
  const void* kernel =
      int4 ? reinterpret_cast<const void*>(&RepackV2<Format::kInt4>)
      : p.block == 32
          ? reinterpret_cast<const void*>(&RepackV2<Format::kMxfp4>)
          : reinterpret_cast<const void*>(&RepackV2<Format::kNvfp4>);
  void* kernel_args[] = {&args};
  return cudaLaunchKernel(kernel,
                          dim3(args.prepare_ctas + CeilDiv(p.m, kWarps)),
                          dim3(kThreads), kernel_args, 0, stream);
}

}  // namespace jax_w4a4
