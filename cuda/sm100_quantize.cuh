// Activation quantizer of the GEMM for Blackwell: packed codes, rounded by the hardware, and scale
// factors straight as the tensor core reads them (sm100_layout.h). sm90_quantize_token.cuh has what a
// token goes through. Leading CTAs bring the weight's scale factors into the same layout; tokens past M
// are the zeros that fill the last row tile.
#pragma once

#include <cstdint>

#include "sm100_layout.h"
#include "sm100_scales.cuh"
#include "sm90_quantize_token.cuh"

namespace jax_w4a4::sm100 {

using namespace sm90;

struct QuantizeArgs : TokenArgs {
  uint32_t* packed;  // (M, chunks) words of eight codes
  int chunks;
  uint8_t* act_atoms;
  ScaleRows weight;
  int atoms;  // along K
  int weight_ctas;
};

// Eight e2m1 codes, element i in nibble i, to nearest even and saturating.
__device__ __forceinline__ uint32_t encode_e2m1(const float (&v)[8]) {
  uint32_t d;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}\n"
      : "=r"(d)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return d;
}

template <Format kFormat, int kChunks, int kWarps, class X>
__device__ __forceinline__ void quantize(const QuantizeArgs& args, const X& x, int64_t token,
                                         const Place& at) {
  constexpr int kLanes = kFormat == Format::kMxfp4 ? 4 : 2;  // that share a block
  constexpr int kAtomLanes = kLanes * kSm100AtomBlocks;
  const bool inside = token < args.m;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (past_end<kWarps>(args, at, i)) break;
    const int c = chunk_of<kWarps>(at, i);
    uint32_t scales = 0;
    if (inside) {
      float v[8];
      x.get(i, v);
      const bool live = normalize_fp4<kFormat>(v, x.largest(i), args.floor_rule, scales);
      if (c < args.chunks) {
        args.packed[token * args.chunks + c] = live ? encode_e2m1(v) : 0;
      }
      scales |= __shfl_down_sync(kAllLanes, scales, kLanes) << 8;
      scales |= __shfl_down_sync(kAllLanes, scales, 2 * kLanes) << 16;
    }
    if (c % kAtomLanes == 0 && 8 * c < args.k_layout) {
      *reinterpret_cast<uint32_t*>(args.act_atoms +
                                   Sm100ScaleWord(token, c / kAtomLanes, args.atoms)) = scales;
    }
  }
}

template <Format kFormat, Source kSource, int kChunks, int kWarps>
__global__ void __launch_bounds__(kQuantizeThreads<kWarps>,
                                  (kQuantizeBlocks<kSource, kChunks, kWarps>))
    quantize_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ __align__(16) uint32_t shared[kCtaAtoms * kSm100AtomBytes / 4];
  grid_dependency_launch();
  if (static_cast<int>(blockIdx.x) < args.weight_ctas) {
    write_atoms(args.weight, args.atoms, blockIdx.x, shared);
  } else {
    const int warp = threadIdx.x / 32;
    const int64_t token = static_cast<int64_t>(blockIdx.x - args.weight_ctas) *
                              kQuantizeTokens<kWarps> + warp / kWarps;
    const Place at = {warp % kWarps, static_cast<int>(threadIdx.x % 32), nullptr, 0};
    Chunks<kSource, kChunks> x;
    if (token < args.m) {
      load_token<kSource, kChunks, kWarps>(args, token, chunk_of<kWarps>(at, 0), x);
    }
    if (token < Sm100AtomTiles(args.m) * kSm100AtomRows) {
      quantize<kFormat, kChunks, kWarps>(args, x, token, at);
    }
  }
  end_after_launch_beside(args);
}

}  // namespace jax_w4a4::sm100
