// Grouped GEMM for Hopper: the v2 kernel (sm90_gemm_v2.cuh) with a weight for each group of rows.
//
// Row tiles begin at a group's first row and never cross its end, so that their number is known on the
// device only: the launch before writes a table of them (sm90_groups.cuh), and every persistent CTA
// reads from it what its next tile is. Main loop, low-rank branch and rings are those of v2 on one CTA;
// operands of all groups lie one behind the other, N rows each. A tile whose tokens are not all the
// group's is stored by the threads, row by row; whole ones go through the copy engine.
//
// Shared memory per CTA as in v2, but for the token ring: 2 x (kTileM x 4 + 16), since a tile's token
// scales begin anywhere and are copied from the 16 bytes round their beginning on.
#pragma once

#include "sm90_gemm_v2.cuh"
#include "sm90_groups.cuh"

namespace jax_w4a4::sm90 {

struct GroupedArgs {
  GemmV2Args gemm;         // n counts the weight rows of all groups; m_tiles is not used
  const GroupTile* table;  // written by the launch before
  int group_n;             // weight rows of a group
};

struct GroupedTile {
  int m0, end;      // its first row, the group's end
  int row;          // its first weight row, of all groups
  int n0;           // and of the group
};

template <int kTileM>
constexpr int kGroupedTokenBytes = kTileM * 4 + 16;

// Not .nc: ptxas takes such a load for one of constants and moves it in front of the wait for the launch
// that writes the table.
__device__ __forceinline__ int4 load_entry(const GroupedArgs& args, int index) {
  int4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(args.table + index)
               : "memory");
  return v;
}

// The table's entry of tile `index`: a group's tiles are as many entries times n_tiles.
__device__ __forceinline__ int4 entry_of(const GroupedArgs& args, int index) {
  return load_entry(args, 1 + index / args.gemm.n_tiles);
}

// Order inside a group as tile_at has it.
template <int kTileM>
__device__ __forceinline__ GroupedTile grouped_tile(const GroupedArgs& args, int4 entry,
                                                    int index) {
  const GemmV2Args& gemm = args.gemm;
  const int m_tiles = (entry.w - entry.z + kTileM - 1) / kTileM;
  const int rest = index - entry.y * gemm.n_tiles;
  const int sweep = rest / (gemm.group_m * gemm.n_tiles);
  const int first_m = sweep * gemm.group_m;
  const int height = min(gemm.group_m, m_tiles - first_m);
  const int inside = rest - first_m * gemm.n_tiles;
  const int n = inside / height;
  const int m0 = entry.z + (first_m + inside - n * height) * kTileM;
  return {m0, entry.w, entry.x * args.group_n + n * kTileN, n * kTileN};
}

// Both weight rows of a thread; rows past N are never stored.
template <class Format>
__device__ __forceinline__ void load_rows(const GroupedArgs& args, const GroupedTile& tile,
                                          const Place& place, Row (&rows)[2]) {
  const int last = args.group_n - 1 - tile.n0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int local = min(place.local_row + 8 * r, last);
    rows[r] = load_row<Format>(args.gemm, tile.row + local, place.q);
  }
}

// ---- roles ----

template <class Format, int kTileM>
__device__ __forceinline__ void load_grouped(const GroupedArgs& args, uint32_t smem, Ring main,
                                             Ring tokens, int tiles) {
  const GemmV2Args& gemm = args.gemm;
  constexpr uint32_t kBlockBytes = kTileM * kRowBytes + kTileN * Format::kWeightBytes;
  constexpr uint32_t kChunkBytes = kTileM * kLoraRowBytes + kTileN * kLoraRowBytes;
  RingState stage;
  RingState token;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const GroupedTile tile = grouped_tile<kTileM>(args, entry_of(args, index), index);
    if constexpr (Format::kTokenScale) {
      const uint32_t token_full = tokens.acquire(token, kGroupedTokenBytes<kTileM>);
      bulk_load(smem + gemm.off_token + token.slot * kGroupedTokenBytes<kTileM>,
                gemm.token_scale + tile.m0 / 4 * 4, kGroupedTokenBytes<kTileM>, token_full);
      tokens.advance(token);
    }
    for (int kb = 0; kb < gemm.k_blocks; ++kb) {
      const uint32_t full = main.acquire(stage, kBlockBytes);
      const uint32_t slot = smem + stage.slot * gemm.stage_bytes;
      tma_load_2d(slot + gemm.off_weight, &gemm.weight, full, kb * Format::kWeightBytes, tile.row);
      tma_load_2d(slot, &gemm.act[0], full, kb * Format::kStageK, tile.m0);
      main.advance(stage);
    }
    for (int chunk = 0; chunk < gemm.lora_chunks; ++chunk) {
      const uint32_t full = main.acquire(stage, kChunkBytes);
      const uint32_t slot = smem + stage.slot * gemm.stage_bytes;
      tma_load_2d(slot + gemm.off_lora_up, &gemm.lora_up, full, chunk * kLoraRanks, tile.row);
      tma_load_2d(slot, &gemm.lora_act[0], full, chunk * kLoraRanks, tile.m0);
      main.advance(stage);
    }
  }
}

// As scale, with token scales that begin at any word.
template <class Format, int kTileM>
__device__ __forceinline__ void scale_grouped(float (&acc)[kTileM / 2], const Row (&rows)[2],
                                              uint32_t thread_tokens) {
#pragma unroll
  for (int j = 0; j < kTileM / 8; ++j) {
    float t[2] = {1.0f, 1.0f};
    if constexpr (Format::kTokenScale) {
      t[0] = __uint_as_float(load_shared_u32(thread_tokens + 32 * j));
      t[1] = __uint_as_float(load_shared_u32(thread_tokens + 32 * j + 4));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      acc[4 * j + i] = Format::scaled(acc[4 * j + i], rows[i / 2].inputs, t[i % 2]);
    }
  }
}

// As store, but for rows that are not the group's.
template <int kTileM>
__device__ __forceinline__ void store_grouped(const GroupedArgs& args, uint32_t slab,
                                              const GroupedTile& tile, int group,
                                              const float (&acc)[kTileM / 2], const Row (&rows)[2],
                                              int warp, uint32_t lane) {
  const GemmV2Args& gemm = args.gemm;
  const bool issuer = warp == 0 && lane == 0;
  const uint32_t barrier = 1 + group;
  if (issuer) store_wait_read<0>();
  named_barrier_sync(barrier, 128);
  write_slab<kTileM>(slab, acc, rows, warp, lane);

  const int n0 = tile.n0 + group * 64;
  if (gemm.tma_store && tile.m0 + kTileM <= tile.end) {
    fence_async_proxy();
    named_barrier_sync(barrier, 128);
    if (issuer) {
      tma_store_2d(&gemm.out, slab, n0, tile.m0);
      store_commit();
    }
    return;
  }
  named_barrier_sync(barrier, 128);
  const int rows_left = min(kTileM, tile.end - tile.m0);
  __nv_bfloat16* out = gemm.y + static_cast<int64_t>(tile.m0) * args.group_n + n0;
  if (gemm.tma_store) {
    // Sixteen bytes per thread, eight threads per token row; N is a multiple of eight.
    const int chunk = lane % 8;
    if (n0 + 8 * chunk < args.group_n) {
      for (int token = 4 * warp + lane / 8; token < rows_left; token += 16) {
        const uint4 v = load_shared_v4(slab + token * 128 + (chunk ^ (token % 8)) * 16);
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * args.group_n + 8 * chunk) = v;
      }
    }
    return;
  }
  store_rows(slab, out, args.group_n, args.group_n - n0, rows_left, warp, lane);
}

template <class Format, int kTileM>
__device__ __forceinline__ void compute_grouped(const GroupedArgs& args, uint32_t smem, Ring main,
                                                Ring tokens, int tiles) {
  const GemmV2Args& gemm = args.gemm;
  const Place place;
  uint32_t thread_weight = gemm.off_weight + place.local_row * Format::kWeightBytes +
                           place.q * Format::kLaneBytes;
  asm volatile("" : "+r"(thread_weight));  // or it is recomputed from threadIdx in every stage

  RingState stage;
  int index = blockIdx.x;
  const int step = gridDim.x;
  if (index >= tiles) return;
  GroupedTile tile = grouped_tile<kTileM>(args, entry_of(args, index), index);
  Row next_rows[2];
  load_rows<Format>(args, tile, place, next_rows);
  // The entry of the tile after, so that nothing waits for the table.
  int4 entry = entry_of(args, min(index + step, tiles - 1));
  for (int round = 0;; ++round) {
    Row rows[2] = {next_rows[0], next_rows[1]};
    float acc[kTileM / 2];
    mma<Format, kTileM, 1>(gemm, smem, main, stage, acc, rows, thread_weight, place.q, place.lane);

    // The next tile's row inputs come from L2: ask before the epilogue, use after it.
    index += step;
    const bool more = index < tiles;
    GroupedTile next_tile = tile;
    if (more) {
      next_tile = grouped_tile<kTileM>(args, entry, index);
      load_rows<Format>(args, next_tile, place, next_rows);
      entry = entry_of(args, min(index + step, tiles - 1));
    }

    wgmma_wait<0>();
    pin(acc);
    main.release<1>((stage.slot == 0 ? gemm.stages : stage.slot) - 1, place.lane);

    // Where RingState would be after `round` steps, without registers of its own.
    RingState token;
    token.slot = round % kTokenStages;
    token.phase = round / kTokenStages % 2;
    if constexpr (Format::kTokenScale) tokens.wait_full(token);
    scale_grouped<Format, kTileM>(
        acc, rows,
        smem + gemm.off_token + token.slot * kGroupedTokenBytes<kTileM> + tile.m0 % 4 * 4 +
            place.q * 8);
    if constexpr (Format::kTokenScale) {
      __syncwarp();
      tokens.release<1>(token.slot, place.lane);
    }
    add_low_rank<kTileM, 1>(gemm, smem, main, stage, acc, place.group, place.lane);
    store_grouped<kTileM>(args, smem + gemm.off_store + place.group * kTileM * 128, tile,
                          place.group, acc, rows, place.warp, place.lane);
    if (!more) break;
    tile = next_tile;
  }
  // The slab must outlive the copy engine's reads.
  if (place.warp == 0 && place.lane == 0) store_wait_read<0>();
}

// Two CTAs share an SM where the accumulators leave the registers: one's epilogue under the other's
// loads. The plan gives them half of the shared memory each.
template <int kTileM>
constexpr int kGroupedCtas = kTileM <= 16 ? 2 : 1;
template <int kTileM>
constexpr int kGroupedConsumerRegisters = kGroupedCtas<kTileM> == 2 ? 104 : kConsumerRegisters;

template <class Format, int kTileM>
__global__ void __launch_bounds__(kGemmThreads, kGroupedCtas<kTileM>)
    grouped_kernel(const __grid_constant__ GroupedArgs args) {
  static_assert(!Format::kPromote && Format::kStageGroups == 0, "one set of accumulators");
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  const GemmV2Args& gemm = args.gemm;
  const Ring main(smem + gemm.off_barriers, gemm.stages, watch(gemm, RingName::kGroupedMain));
  const Ring tokens(smem + gemm.off_barriers + 16 * gemm.stages, kTokenStages,
                    watch(gemm, RingName::kGroupedTokens));
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&gemm.weight);
    prefetch_tensor_map(&gemm.act[0]);
    if (gemm.tma_store) prefetch_tensor_map(&gemm.out);
    main.init(kConsumerWarps);
    tokens.init(kConsumerWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  grid_dependency_wait();
  const int tiles = load_entry(args, 0).x * gemm.n_tiles;

  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x / 32 == 0 && elect_one()) {
      load_grouped<Format, kTileM>(args, smem, main, tokens, tiles);
    }
    __syncwarp();
  } else {
    claim_registers<kGroupedConsumerRegisters<kTileM>>();
    compute_grouped<Format, kTileM>(args, smem, main, tokens, tiles);
    __syncwarp();
  }
}

}  // namespace jax_w4a4::sm90
