// The decode GEMM, for few tokens: what the handlers know of it. The design is
// described in sm90_decode.cuh.
#ifndef JAX_W4A4_CUDA_SM90_DECODE_H_
#define JAX_W4A4_CUDA_SM90_DECODE_H_

#include <cstdint>

#include "sm90_gemm_v2.h"
#include "sm90_repack_v2.h"

typedef struct CUstream_st* cudaStream_t;

namespace jax_w4a4 {

// Fixed by the kernel; a plan must ask for exactly these.
constexpr int DecodeThreads(int64_t tile_m) { return tile_m > 64 ? 384 : 640; }
constexpr int kDecodeMaxStages = 16;
constexpr int kDecodeMaxTileN = 128;
constexpr int kDecodeMaxSplits = 2;
// Tokens of the largest tile and of a launch, which may have several of it and two
// of a tile that is nearly as large.
constexpr int kDecodeMostTileM = 128;
constexpr int kDecodeMostTokens = 512;
constexpr int64_t DecodeMostTokens(int64_t tile_m) {
  return tile_m == kDecodeMostTileM ? kDecodeMostTokens
         : tile_m > 64              ? 2 * tile_m
                                    : tile_m;
}
constexpr int64_t DecodeTokenTiles(int64_t m, int64_t tile_m) {
  return (m + tile_m - 1) / tile_m;
}
// A box of weights is 128 bytes wide.
constexpr int kDecodeBoxK = 256;

// How the compute warpgroups of a CTA share its weight rows and K, by the number
// of rows: four warpgroups, or two whose registers hold the sums of 128 tokens.
// With 32 rows and more than 16 tokens a stage is half as long in K: 80 KB left
// room for two.
struct DecodeShape {
  int rows;      // most weight rows of a CTA
  int k_groups;  // warpgroups along K
  int boxes;     // boxes of weights in a stage, one behind the other along K
};
constexpr DecodeShape DecodeShapeOf(int64_t tile_m, int64_t tile_n) {
  if (tile_m > 64) return tile_n <= 64 ? DecodeShape{64, 2, 1} : DecodeShape{128, 1, 1};
  return tile_n <= 32   ? DecodeShape{32, 4, tile_m > 16 ? 2 : 4}
         : tile_n <= 64 ? DecodeShape{64, 4, 2}
                        : DecodeShape{128, 2, 1};
}
constexpr int DecodeTileK(int64_t tile_m, int64_t tile_n) {
  return kDecodeBoxK * DecodeShapeOf(tile_m, tile_n).boxes;
}
// K elements per block scale, 0 where a row has one.
constexpr int DecodeBlock(GemmV2Path path) {
  return GemmV2ActPath(path) == GemmV2Path::kMxfp4 ? 32
         : path == GemmV2Path::kInt4Row            ? 0
                                                   : 16;
}
// Stages of K.
constexpr int64_t DecodeSteps(int64_t tile_m, int64_t tile_n, int64_t k_pad) {
  const int step = DecodeTileK(tile_m, tile_n);
  return (k_pad + step - 1) / step;
}
constexpr int64_t DecodeWeightBytes(int64_t tile_m, int64_t tile_n) {
  return tile_n * DecodeTileK(tile_m, tile_n) / 2;
}
constexpr int64_t DecodeActBytes(GemmV2Path path, int64_t tile_m,
                                 int64_t tile_n) {
  return tile_m * DecodeTileK(tile_m, tile_n) * GemmV2ElementBytes(path);
}
// Of them in one of `splits` CTAs that divide them.
constexpr int64_t DecodeCtaSteps(int64_t tile_m, int64_t tile_n, int64_t k_pad,
                                 int64_t splits) {
  return (DecodeSteps(tile_m, tile_n, k_pad) + splits - 1) / splits;
}
// Block scales of a CTA's rows: boxes of 128 bytes of each row.
constexpr int kDecodeScaleBox = 128;
constexpr int64_t DecodeScaleBoxes(GemmV2Path path, int64_t tile_m, int64_t tile_n,
                                   int64_t k_pad, int64_t splits) {
  const int block = DecodeBlock(path);
  if (block == 0) return 0;
  const int64_t blocks =
      DecodeCtaSteps(tile_m, tile_n, k_pad, splits) * DecodeTileK(tile_m, tile_n) / block;
  return (blocks + kDecodeScaleBox - 1) / kDecodeScaleBox;
}
// Whether the copy engine fetches them: rows of the matrix, and what each CTA has
// of them, have to begin at whole 16 bytes (an illegal instruction else).
constexpr bool DecodeScaleMap(GemmV2Path path, int64_t tile_m, int64_t tile_n,
                              int64_t k_pad, int64_t splits) {
  const int block = DecodeBlock(path);
  if (block == 0 || k_pad / block % 16 != 0) return false;
  return splits == 1 ||
         DecodeCtaSteps(tile_m, tile_n, k_pad, splits) * DecodeTileK(tile_m, tile_n) /
                 block % 16 == 0;
}
// Boxes that there is room for: all of them, or with many tokens two, which the
// boxes take in turn, and the ring has more stages. What is looked through ahead
// of the loop then fits into the ring's last stage, and a box covers as many
// stages of K as the ring has.
constexpr int64_t DecodeScaleSlots(GemmV2Path path, int64_t tile_m, int64_t tile_n,
                                   int64_t k_pad, int64_t splits, int64_t stages) {
  const int64_t boxes = DecodeScaleBoxes(path, tile_m, tile_n, k_pad, splits);
  if (boxes <= 2 || tile_m <= 16) return boxes;
  const int block = DecodeBlock(path);
  const int64_t stage = DecodeWeightBytes(tile_m, tile_n) + DecodeActBytes(path, tile_m, tile_n);
  const bool fits = (boxes - 2) * tile_n * kDecodeScaleBox <= stage;
  const bool covers = stages * DecodeTileK(tile_m, tile_n) <= kDecodeScaleBox * block;
  // Others come without a tensor map, all at once.
  const bool mapped = DecodeScaleMap(path, tile_m, tile_n, k_pad, splits);
  return fits && covers && mapped ? 2 : boxes;
}
// A ring's barriers, those of the block scales and that of the peer's sums.
constexpr int64_t DecodeBarrierBytes(int64_t stages) { return 16 * stages + 32; }
// fp32 sums of a tile.
constexpr int64_t DecodeSlabBytes(int64_t tile_m, int64_t tile_n) {
  return tile_m * DecodeShapeOf(tile_m, tile_n).rows * 4;
}

// Of the shares of K, if there are more than one; whole swizzle patterns, as the
// block scales lie behind.
constexpr int64_t DecodePartialBytes(int64_t tile_m, int64_t tile_n) {
  const int groups = DecodeShapeOf(tile_m, tile_n).k_groups;
  const int64_t bytes = groups > 1 ? groups * DecodeSlabBytes(tile_m, tile_n) : 0;
  return (bytes + 1023) / 1024 * 1024;
}
// Low-rank product and the peer's sums; where a warpgroup has all of K, half of
// those sums and 32 ranks of lora_act.
constexpr int64_t DecodeAddendBytes(int64_t tile_m, int64_t tile_n, int64_t rank,
                                    int64_t splits) {
  const int64_t slab = DecodeSlabBytes(tile_m, tile_n);
  if (DecodeShapeOf(tile_m, tile_n).k_groups > 1) {
    return rank > 0 || splits > 1 ? slab : 0;
  }
  return (splits > 1 ? slab / 2 : 0) + (rank > 0 ? tile_m * 32 * 2 : 0);
}

// LoRA-down by CTAs of this launch, ahead of the others: so many of them divide
// K, of up to so many ranks, with a ring like that of sm90_down_v2. More than 256
// tokens are in groups of a tile with as many CTAs each.
constexpr int kDownAheadCtas = 4;
constexpr int kDownAheadRank = 32;
constexpr int kDownAheadLeastTileM = 32;
constexpr int kDownAheadMaxStages = 16;
constexpr int kDownAheadMmaTokens = 256;
constexpr int DownAheadGroups(int64_t m) {
  return m <= kDownAheadMmaTokens ? 1
                                  : static_cast<int>(DecodeTokenTiles(m, kDecodeMostTileM));
}
// Tokens of the MMA, for m of the call.
constexpr int DownAheadTokens(int64_t tile_m, int64_t m) {
  return tile_m <= 64                                         ? 64
         : m <= kDecodeMostTileM || DownAheadGroups(m) > 1 ? kDecodeMostTileM
                                                              : kDownAheadMmaTokens;
}
// Stages of 64 k of x and of 64 ranks; room for 72 tokens, as in sm90_down_v2.
constexpr int64_t DownAheadStageBytes(int64_t tile_m, int64_t m) {
  const int tokens = DownAheadTokens(tile_m, m);
  return (tokens > 72 ? tokens : 72) * 128 + 64 * 128;
}
constexpr int64_t DownAheadPartialBytes(int64_t tile_m, int64_t m) {
  return DownAheadTokens(tile_m, m) * (64 + 4) * 4;
}
// Rows of (rank,) sums that they leave for each other.
constexpr int64_t DownAheadSums(int64_t m) { return (kDownAheadCtas - 1) * m; }

// Offsets from the start of dynamic shared memory; act from the start of a slot.
struct DecodeSmem {
  int act, scales, rows, tokens, partial, addend, barriers;
  int stage_bytes, total_bytes;
};

// Rows of activations that the kernel reads, those past m whatever they are. Rows
// that lie past a matrix, which the copy engine makes zeros of, take it longer.
constexpr int64_t DecodeActRows(int64_t m, int64_t tile_m) {
  return tile_m > 16 ? DecodeTokenTiles(m, tile_m) * tile_m : m;
}

struct DecodeParams {
  // (DecodeActRows(m, tile_m), GemmV2ActBytes), private layout of GEMM v2
  const void* act;
  const float* token_scale;   // (m,), paths that have one
  const uint8_t* weight;      // (n, k_pad / 2)
  WeightRowParams row_inputs;  // `rows` is not used
  void* lora_act;             // (m, rank) bf16, written with down_sums
  const void* lora_up;        // (n, rank) bf16
  void* out;                  // (m, n) bf16
  int64_t m, n;               // 1 <= m <= DecodeMostTokens(tile_m)
  int k_pad;
  int rank;  // 0: no low-rank branch
  int tile_n;
  int splits;  // CTAs that divide K
  int stages;
  DecodeSmem smem;
  // LoRA-down in this launch: the launch before has filled lora_act and
  // down_sums, (DownAheadSums(m), rank) fp32. Null: lora_act is there already.
  void* down_sums;
  const void* x;          // (m, k) bf16
  const void* lora_down;  // (k, rank) bf16
  int k;
  int down_stages, off_down_barriers;
  int early_ctas;  // of this launch for which the launch before leaves SMs
};

// The kernel for a path, token tile and number of weight rows, null if it was not
// compiled.
const void* DecodeKernel(GemmV2Path path, int tile_m, int tile_n);

// Launches on `stream`. `dependent`: the kernel before it on the stream writes
// act, token_scale and lora_act, and may still be running.
LaunchResult LaunchDecode(GemmV2Path path, int tile_m, const DecodeParams& params,
                          bool dependent, int device, cudaStream_t stream);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_SM90_DECODE_H_
