// Block scales from rows (as every format stores them) to the atoms that the tensor core reads
// (sm100_layout.h), whole stages of K and whole row tiles, zeros past both ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sm100_layout.h"

namespace jax_w4a4::sm100 {

struct ScaleRows {
  const uint8_t* scales;  // (rows, blocks)
  uint8_t* atoms;
  int rows, blocks;
};

constexpr int kCtaAtoms = 32;  // along K

// CTAs that one set of scales takes; each has 128 rows and up to kCtaAtoms atoms.
inline int64_t scale_ctas(int64_t rows, int64_t atoms) {
  return Sm100AtomTiles(rows) * ((atoms + kCtaAtoms - 1) / kCtaAtoms);
}

// The share of CTA `index`. `shared`: kCtaAtoms * kSm100AtomBytes bytes, 16-byte aligned. Through
// shared memory, so that both sides are read and written in whole lines.
__device__ __forceinline__ void write_atoms(const ScaleRows& args, int atoms, int index,
                                            uint32_t* shared) {
  const int chunks = (atoms + kCtaAtoms - 1) / kCtaAtoms;
  const int tile = index / chunks;
  const int first = index % chunks * kCtaAtoms;
  const int count = min(kCtaAtoms, atoms - first);
  for (int i = threadIdx.x; i < kSm100AtomRows * kCtaAtoms; i += blockDim.x) {
    const int r = i / kCtaAtoms, atom = i % kCtaAtoms;
    if (atom >= count) continue;
    const int row = tile * kSm100AtomRows + r;
    const int block = (first + atom) * kSm100AtomBlocks;
    uint32_t word = 0;
    if (row < args.rows) {
      const uint8_t* from = args.scales + static_cast<int64_t>(row) * args.blocks + block;
#pragma unroll
      for (int b = 0; b < kSm100AtomBlocks; ++b) {
        if (block + b < args.blocks) word |= static_cast<uint32_t>(from[b]) << 8 * b;
      }
    }
    shared[Sm100ScaleWord(r, atom, kCtaAtoms) / 4] = word;
  }
  __syncthreads();
  uint4* out = reinterpret_cast<uint4*>(
      args.atoms + (static_cast<int64_t>(tile) * atoms + first) * kSm100AtomBytes);
  for (int i = threadIdx.x; i < count * kSm100AtomBytes / 16; i += blockDim.x) {
    out[i] = reinterpret_cast<const uint4*>(shared)[i];
  }
}

}  // namespace jax_w4a4::sm100
