// Layouts and descriptors of the tcgen05 kernels, as plain integers: shared by the
// kernels, by whoever prepares their operands, and by host tests.
#ifndef JAX_W4A4_CUDA_SM100_LAYOUT_H_
#define JAX_W4A4_CUDA_SM100_LAYOUT_H_

#include <cstdint>

#include "formats.cuh"

namespace jax_w4a4 {

// A stage holds 128 bytes of every row: 256 4-bit elements, or 64 ranks of a
// 16-bit type.
constexpr int kSm100StageK = 256;
constexpr int kSm100StageRanks = 64;
constexpr int kSm100RowBytes = 128;
// Elements of K, and MMAs per stage: each takes 32 bytes of a row.
constexpr int kSm100StepK = 64;
constexpr int kSm100Steps = kSm100StageK / kSm100StepK;

// ---- scale factors ----

// Scale factors come in atoms of 128 rows by 4 blocks of K. A row of an atom is in
// the lane and column of tensor memory that the MMA reads it from: 32 lanes of 16
// bytes, a word of four blocks for each of the rows r, r + 32, r + 64, r + 96.
constexpr int kSm100AtomRows = 128;
constexpr int kSm100AtomBlocks = 4;
constexpr int kSm100AtomBytes = 512;
constexpr int kSm100AtomColumns = 4;

W4A4_HD constexpr int Sm100StageAtoms(int block) {
  return kSm100StageK / block / kSm100AtomBlocks;
}
// Atoms along K, whole stages of them: what lies past K is zero.
W4A4_HD constexpr int64_t Sm100Atoms(int64_t k_pad, int block) {
  return (k_pad + kSm100StageK - 1) / kSm100StageK * Sm100StageAtoms(block);
}
W4A4_HD constexpr int64_t Sm100AtomTiles(int64_t rows) {
  return (rows + kSm100AtomRows - 1) / kSm100AtomRows;
}
// Offset of the four scales of blocks 4 atom .. 4 atom + 3 of a row.
W4A4_HD constexpr int64_t Sm100ScaleWord(int64_t row, int64_t atom,
                                         int64_t atoms) {
  return (row / kSm100AtomRows * atoms + atom) * kSm100AtomBytes +
         row % 32 * 16 + row / 32 % 4 * 4;
}

// ---- tensor memory ----

constexpr int kSm100Columns = 512;
// Scale factors of two stages: a copy then writes columns whose last readers are
// the MMAs of the stage before the last, not the ones just issued.
constexpr int kSm100ScaleSlots = 2;

W4A4_HD constexpr int Sm100ScaleColumns(int tile_n, int block) {
  return Sm100StageAtoms(block) * kSm100AtomColumns *
         static_cast<int>(1 + Sm100AtomTiles(tile_n));
}
// Slots of the ring of accumulators, tile_n columns each: three where they fit, so
// that a tile's two products and the next tile's first have one each, else one.
W4A4_HD constexpr int Sm100Accumulators(int tile_n, int block) {
  return 3 * tile_n + kSm100ScaleSlots * Sm100ScaleColumns(tile_n, block) <=
                 kSm100Columns
             ? 3
             : 1;
}

// ---- descriptors ----

// Rows of 128 bytes, K contiguous, with the 128-byte swizzle: eight rows are 1024
// bytes. `address` is a shared-memory address.
W4A4_HD constexpr uint64_t Sm100OperandDescriptor(uint32_t address) {
  return uint64_t{2} << 61 | uint64_t{1} << 46 | uint64_t{1024 >> 4} << 32 |
         (address & 0x3FFFF) >> 4;
}
// An atom: eight rows of 16 bytes are 128, no swizzle.
W4A4_HD constexpr uint64_t Sm100ScaleDescriptor(uint32_t address) {
  return uint64_t{1} << 46 | uint64_t{128 >> 4} << 32 | (address & 0x3FFFF) >> 4;
}
// e2m1 operands; scales are e4m3 (blocks of 16) or e8m0 (32). `first` is the scale
// of an atom's four that the step begins with.
W4A4_HD constexpr uint32_t Sm100ScaledInstruction(int m, int n, int block,
                                                  int first) {
  return static_cast<uint32_t>(first) << 29 | static_cast<uint32_t>(m / 16) << 24 |
         (block == 32 ? 1u : 0u) << 23 | static_cast<uint32_t>(n / 8) << 17 |
         1u << 10 | 1u << 7 | static_cast<uint32_t>(first) << 4;
}
// fp16 or bf16 operands, fp32 accumulator.
W4A4_HD constexpr uint32_t Sm100F16Instruction(int m, int n, bool bf16) {
  return static_cast<uint32_t>(m / 16) << 24 | static_cast<uint32_t>(n / 8) << 17 |
         (bf16 ? 1u << 10 | 1u << 7 : 0u) | 1u << 4;
}

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM100_LAYOUT_H_
