// MXFP4 activation quantizer of the v2 GEMM, with the low-rank down projection in the same pass.
//
// A cluster owns kRows tokens and splits K between its CTAs, so that one read of x fills the chip
// even at M = 256 and every CTA still feeds 64-row MMAs. Per 64-k stage the copy engine brings x and
// lora_down; the warpgroups issue their half of the ranks' MMAs and, under them, quantize the same
// shared-memory tile. Codes (4 bits) and block exponents stay in shared memory until the row's
// largest exponent is known across the cluster; then they are folded to e5m2 bytes in the GEMM's
// permuted order (sm90_expand.cuh) and written. The down projection's partial sums are added over
// the cluster in rank order: no atomics, the same bits in every run.
//
// The launch also carries the CTAs that prepare the GEMM's per-weight-row inputs.
//
// Compiled with -ftz=true: fp32 subnormals count as zero (docs/numerics.md), and here every product
// that matters is a plain fp32 multiplication.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "formats.cuh"
#include "sm90_expand.cuh"
#include "sm90_pipeline.cuh"
#include "sm90_ptx.cuh"
#include "sm90_row_inputs.cuh"
#include "sm90_wgmma.cuh"

namespace jax_w4a4::sm90 {

constexpr int kQuantizeRows = 64;
constexpr int kQuantizeStageK = 64;
constexpr int kQuantizeThreads = 288;  // two warpgroups and the loading warp
constexpr int kQuantizeWarps = 8;      // that consume

constexpr int kLargestScale = 252;

struct QuantizeV2Args {
  CUtensorMap x;          // (M, K) bf16, box 64 x 64, 128-byte swizzle
  CUtensorMap lora_down;  // (K, R) bf16, box (32 or 64) x 64, 64- or 128-byte swizzle
  const float* smooth;           // (K,) or null
  const float* act_global_scale; // () or null
  uint8_t* folded;        // (M, K128)
  float* token_scale;     // (M,)
  __nv_bfloat16* lora_act;  // (M, R)
  RowInputsArgs rows;
  int prepare_ctas;  // leading CTAs that prepare weight rows, whole clusters
  int m, k, rank;
  int slice_groups;  // 128-k groups per CTA of a cluster
  int floor_rule;    // 0 rceil, 1 floor
  // From the plan.
  int stages;
  int stage_bytes;
  int off_codes, code_pitch, off_exponents, off_reciprocal, off_row_max, off_barriers;
};

// max(|a|, |b|) under the sign of a * b: one instruction, where fabsf on an assembly operand is two.
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

// The e8m0 byte of a block, 0 for a block that quantizes to zero.
__device__ __forceinline__ int block_scale(float amax, bool floor_rule) {
  const float t = amax * (1.0f / 6.0f);
  const uint32_t bits = __float_as_uint(t);
  int byte = floor_rule ? static_cast<int>(__float_as_uint(amax) >> 23) - 2
                        : static_cast<int>(bits >> 23) + ((bits & 0x7FFFFF) != 0 ? 1 : 0);
  byte = min(max(byte, 1), kLargestScale);
  if (bits < 0x00800000) byte = 0;
  return amax != amax ? kNanScale : byte;
}

// The e2m1 code of |u| <= 6, to nearest, ties to even, in the low three bits; higher bits are junk.
// Adding 2^(e + 22), e = max(exponent of u, 0), rounds |u| to multiples of 2^(e - 1), of which the
// code is the count plus 2 e. The 6 makes the constants of s and s >> 22 vanish modulo 8. Power and
// sum carry u's sign, since a fused multiply-add takes no magnitudes.
__device__ __forceinline__ uint32_t e2m1_code(float u) {
  const float at_least_one = max_magnitude(u, 1.0f);
  uint32_t power_bits;
  // (x & mask) | 6 in one instruction; from C++ it becomes two, one per immediate.
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
      : "=r"(power_bits)
      : "r"(__float_as_uint(at_least_one)), "r"(0xFF800000u), "r"(6u));
  const float power = __uint_as_float(power_bits);
  const uint32_t s = __float_as_uint(fmaf(power, 4194304.0f, u));
  return s + (s >> 22);
}

// Codes and signs of elements 0, 2, 4, 6 or 1, 3, 5, 7 as one nibble per byte.
__device__ __forceinline__ uint32_t nibble_bytes(float u0, float u1, float u2, float u3) {
  const uint32_t codes = prmt(prmt(e2m1_code(u0), e2m1_code(u1), 0x0040),
                              prmt(e2m1_code(u2), e2m1_code(u3), 0x0040), 0x5410);
  const uint32_t signs =
      prmt(prmt(__float_as_uint(u0), __float_as_uint(u1), 0x0073),
           prmt(__float_as_uint(u2), __float_as_uint(u3), 0x0073), 0x5410);
  return (codes & 0x07070707u) | ((signs >> 4) & 0x08080808u);
}

// Splits the packed pair exactly.
__device__ __forceinline__ void unpack_bf16(uint32_t pair, float& lo, float& hi) {
  lo = __uint_as_float(pair << 16);
  hi = __uint_as_float(pair & 0xFFFF0000u);
}

// ---- roles ----

template <int kRanks>  // per warpgroup
__device__ __forceinline__ void load_slice(const QuantizeV2Args& args, uint32_t smem, Ring ring,
                                           int m0, int k0, int steps) {
  constexpr int kBoxRanks = kRanks == 32 ? 32 : 64;
  constexpr int kBoxes = 2 * kRanks / kBoxRanks;
  constexpr uint32_t kXBytes = kQuantizeRows * kQuantizeStageK * 2;
  constexpr uint32_t kBoxBytes = kQuantizeStageK * kBoxRanks * 2;
  RingState stage;
  for (int step = 0; step < steps; ++step) {
    const uint32_t full = ring.acquire(stage, kXBytes + kBoxes * kBoxBytes);
    const uint32_t slot = smem + stage.slot * args.stage_bytes;
    const int k = k0 + step * kQuantizeStageK;
    tma_load_2d(slot, &args.x, full, k, m0);
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      tma_load_2d(slot + kXBytes + b * kBoxBytes, &args.lora_down, full, b * kBoxRanks, k);
    }
    ring.advance(stage);
  }
}

// Quantizes this thread's 16 elements (half of a block) of one stage; returns the block's byte.
template <bool kSmooth, bool kGlobal>
__device__ __forceinline__ int quantize_half_block(const QuantizeV2Args& args, uint32_t tile,
                                                   uint32_t reciprocal, int row, int part,
                                                   float global_inverse,
                                                   uint32_t (&words)[2]) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t chunk = (2 * part + i) ^ (row % 8);
    const uint4 raw = load_shared_v4(tile + row * 128 + chunk * 16);
    unpack_bf16(raw.x, v[8 * i + 0], v[8 * i + 1]);
    unpack_bf16(raw.y, v[8 * i + 2], v[8 * i + 3]);
    unpack_bf16(raw.z, v[8 * i + 4], v[8 * i + 5]);
    unpack_bf16(raw.w, v[8 * i + 6], v[8 * i + 7]);
  }
  if constexpr (kSmooth) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 r = load_shared_f4(reciprocal + (16 * part + 4 * i) * 4);
      v[4 * i + 0] *= r.x;
      v[4 * i + 1] *= r.y;
      v[4 * i + 2] *= r.z;
      v[4 * i + 3] *= r.w;
    }
  }
  if constexpr (kGlobal) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= global_inverse;
  }
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = max_magnitude_nan(amax, v[i]);
  amax = fabsf(max_magnitude_nan(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1)));

  const int byte = block_scale(amax, args.floor_rule);
  const float inverse = byte == 0 ? 0.0f : __int_as_float((254 - min(byte, 253)) << 23);
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] *= inverse;
  // Only the floor rule, Inf and NaN leave the range that e2m1_code handles.
  if (!(amax * inverse <= 6.5f)) {
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = fminf(fmaxf(v[i], -6.0f), 6.0f);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* u = v + 8 * i;
    words[i] = nibble_bytes(u[0], u[2], u[4], u[6]) | (nibble_bytes(u[1], u[3], u[5], u[7]) << 4);
  }
  return byte;
}

// The stage loop of a consumer warp: MMAs for this warpgroup's ranks, quantization under them.
template <int kRanks, bool kSmooth, bool kGlobal>
__device__ __forceinline__ int quantize_slice(const QuantizeV2Args& args, uint32_t smem,
                                              const Ring& ring, int steps, int warp, uint32_t lane,
                                              float (&acc)[kRanks == 0 ? 1 : kRanks / 2]) {
  constexpr int kBlockBytes = kRanks == 32 ? 64 : 128;
  constexpr uint32_t kXBytes = kQuantizeRows * kQuantizeStageK * 2;
  const int row = 8 * warp + lane / 4;
  const int part = lane % 4;  // half-blocks of the stage's two blocks
  const float global_inverse = kGlobal ? Reciprocal(*args.act_global_scale) : 1.0f;
  int largest = 0;
  RingState stage;
  for (int step = 0; step < steps; ++step) {
    ring.wait_full(stage);
    const uint32_t slot = smem + stage.slot * args.stage_bytes;
    if constexpr (kRanks > 0) {
      const uint64_t x = matrix_descriptor<128>(slot);
      const uint64_t down = nmajor_descriptor<kBlockBytes>(
          slot + kXBytes + warp / 4 * kRanks * kQuantizeStageK * 2, kQuantizeStageK * kBlockBytes);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < kQuantizeStageK / 16; ++s) {
        Wgmma<kRanks>::ss_bf16_nmajor(acc, x + 2 * s, down + s * 16 * kBlockBytes / 16,
                                      step > 0 || s > 0);
      }
      wgmma_commit();
    }
    uint32_t words[2];
    const int byte = quantize_half_block<kSmooth, kGlobal>(
        args, slot, smem + args.off_reciprocal + step * kQuantizeStageK * 4, row, part,
        global_inverse, words);
    largest = max(largest, byte);
    // Codes: [row][128-group][word s of the block][block q], what one thread folds is contiguous.
    const int q = step % 2 * 2 + part / 2;
    const uint32_t codes = smem + args.off_codes + row * args.code_pitch + step / 2 * 64 + q * 4 +
                           part % 2 * 32;
    store_shared_u32(codes, words[0]);
    store_shared_u32(codes + 16, words[1]);
    if (part % 2 == 0) {
      store_shared_u8(smem + args.off_exponents + row * args.slice_groups * 4 + step / 2 * 4 + q,
                      byte);
    }
    if constexpr (kRanks > 0) wgmma_wait<0>();
    __syncwarp();
    ring.release<1>(stage.slot, lane);
    ring.advance(stage);
  }
  // The four lanes of a row.
  largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
  return max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
}

// Folds the slice's codes with each row's cluster-wide base and writes them in the GEMM's order.
__device__ __forceinline__ void write_folded(const QuantizeV2Args& args, uint32_t smem, int m0,
                                             int k0, int groups, int warp, int lane,
                                             uint32_t ranks) {
  const int pitch = (args.k + 127) / 128 * 128;
  for (int row = warp; row < kQuantizeRows && m0 + row < args.m; row += kQuantizeWarps) {
    int largest = 0;
    for (uint32_t r = 0; r < ranks; ++r) {
      largest = max(largest, static_cast<int>(
                                 load_cluster_u32(smem + args.off_row_max + row * 4, r)));
    }
    if (k0 == 0 && lane == 0) {
      args.token_scale[m0 + row] = largest == kNanScale ? __int_as_float(kFloatNan)
                                                        : power_of_two(fold_exponent(largest));
    }
    const E8m0RowFold fold(largest - kFoldSpan);
    uint8_t* out = args.folded + static_cast<int64_t>(m0 + row) * pitch + k0;
    for (int i = lane; i < groups * 4; i += 32) {
      const int group = i / 4;
      const uint4 words =
          load_shared_v4(smem + args.off_codes + row * args.code_pitch + i * 16);
      const uint32_t bytes =
          load_shared_u32(smem + args.off_exponents + (row * args.slice_groups + group) * 4);
      uint4 half0, half1;
      expand_e2m1_e5m2(words.x, fold.block(bytes & 0xFF), half0.x, half1.x);
      expand_e2m1_e5m2(words.y, fold.block(bytes >> 8 & 0xFF), half0.y, half1.y);
      expand_e2m1_e5m2(words.z, fold.block(bytes >> 16 & 0xFF), half0.z, half1.z);
      expand_e2m1_e5m2(words.w, fold.block(bytes >> 24), half0.w, half1.w);
      reinterpret_cast<uint4*>(out + i * 32)[0] = half0;
      reinterpret_cast<uint4*>(out + i * 32)[1] = half1;
    }
  }
}

// Adds the cluster's partial down projections, each CTA its share of the tokens.
template <int kRanks>
__device__ __forceinline__ void write_lora_act(const QuantizeV2Args& args, uint32_t smem, int m0,
                                               uint32_t rank, uint32_t ranks) {
  constexpr int kPitch = 2 * kRanks + 8;
  const int share = kQuantizeRows / ranks;
  for (int i = threadIdx.x; i < share * kRanks; i += 32 * kQuantizeWarps) {
    const int row = rank * share + i / kRanks;
    const int r = i % kRanks * 2;
    if (m0 + row >= args.m || r >= args.rank) continue;
    float2 sum = make_float2(0.0f, 0.0f);
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      const float2 v = load_cluster_f2(smem + (row * kPitch + r) * 4, peer);
      sum.x += v.x;
      sum.y += v.y;
    }
    *reinterpret_cast<__nv_bfloat162*>(args.lora_act + static_cast<int64_t>(m0 + row) * args.rank +
                                       r) = __floats2bfloat162_rn(sum.x, sum.y);
  }
}

// Grid: prepare_ctas, then one cluster per kRows tokens. Cluster size is a launch attribute.
// kRanks: ranks per warpgroup, 0 without a low-rank branch.
template <int kRanks, bool kSmooth, bool kGlobal>
__global__ void __launch_bounds__(kQuantizeThreads, kRanks == 128 ? 1 : 2)
    quantize_v2_kernel(const __grid_constant__ QuantizeV2Args args) {
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  const int warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  grid_dependency_launch();

  if (static_cast<int>(blockIdx.x) < args.prepare_ctas) {
    write_rows<Format::kMxfp4>(args.rows, blockIdx.x, warp, kQuantizeThreads / 32, lane);
    return;
  }

  const uint32_t rank = cluster_rank();
  uint32_t ranks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
  const int m0 = (blockIdx.x - args.prepare_ctas) / ranks * kQuantizeRows;
  const int k0 = rank * args.slice_groups * 128;
  const int all_groups = (args.k + 127) / 128;
  const int groups = max(0, min(args.slice_groups, all_groups - static_cast<int>(rank) *
                                                                    args.slice_groups));
  const int steps = 2 * groups;
  const Ring ring(smem + args.off_barriers, args.stages);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.x);
    if (kRanks > 0) prefetch_tensor_map(&args.lora_down);
    ring.init(kQuantizeWarps);
    fence_mbarrier_init();
  }
  if constexpr (kSmooth) {
    for (int i = threadIdx.x; i < groups * 128; i += kQuantizeThreads) {
      const float s = k0 + i < args.k ? args.smooth[k0 + i] : 1.0f;
      store_shared_u32(smem + args.off_reciprocal + i * 4, __float_as_uint(Reciprocal(s)));
    }
  }
  __syncthreads();

  if (warp == kQuantizeWarps) {
    if (lane == 0) load_slice<kRanks>(args, smem, ring, m0, k0, steps);
    __syncwarp();
  } else {
    float acc[kRanks == 0 ? 1 : kRanks / 2] = {};
    const int largest =
        quantize_slice<kRanks, kSmooth, kGlobal>(args, smem, ring, steps, warp, lane, acc);
    if (lane % 4 == 0) {
      store_shared_u32(smem + args.off_row_max + (8 * warp + lane / 4) * 4, largest);
    }
    if constexpr (kRanks > 0) {
      // The partial sums reuse the ring: every warp must be through with it.
      named_barrier_sync(1, 32 * kQuantizeWarps);
      constexpr int kPitch = 2 * kRanks + 8;  // floats; eight apart, so that rows miss each other
      const int row = warp % 4 * 16 + lane / 4;
      const int first = warp / 4 * kRanks + lane % 4 * 2;
      pin(acc);
#pragma unroll
      for (int j = 0; j < kRanks / 8; ++j) {
        store_shared_v2(smem + (row * kPitch + first + 8 * j) * 4, acc[4 * j], acc[4 * j + 1]);
        store_shared_v2(smem + ((row + 8) * kPitch + first + 8 * j) * 4, acc[4 * j + 2],
                        acc[4 * j + 3]);
      }
    }
  }
  cluster_sync();
  if (warp < kQuantizeWarps) {
    write_folded(args, smem, m0, k0, groups, warp, lane, ranks);
    if constexpr (kRanks > 0) write_lora_act<kRanks>(args, smem, m0, rank, ranks);
  }
  // Peers read this CTA's row maxima and partial sums until here.
  cluster_sync();
}

}  // namespace jax_w4a4::sm90
