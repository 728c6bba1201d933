// A block-scaled 4-bit GEMM with a low-rank branch for sm_100a, small enough to read: the emulator's
// test of tcgen05. Y[M, N] = alpha (X W^T + L U^T), X and W e2m1 with a scale per kBlock elements.
//
// A group of kGroup CTAs computes a tile of 128 kGroup x 128: each CTA 128 rows of X and of the
// accumulator, and 128 / kGroup rows of W. Warps 0..3 are the epilogue, warp 4 loads, warp 5 of the
// leader issues. A stage holds 256 elements of K, or 64 ranks of bf16 for the kind::f16 steps that
// follow. Scale factors come as atoms of 128 rows x 4 (512 bytes), W's whole atoms to both CTAs.
// Tensor memory: two accumulators, then scale factors for two stages.
#include "sm100_ptx.cuh"

namespace jax_w4a4::sm100 {

constexpr int kTileN = 128;
constexpr int kStages = 3;
constexpr int kStageK = 256;
constexpr int kSteps = 4;        // MMAs per stage
constexpr int kAtomBytes = 512;
constexpr int kColumns = 512;
constexpr int kScaleColumns = 32;  // per stage: 16 of X, 16 of W
constexpr int kScaleBase = 2 * kTileN;
constexpr int kThreads = 192;

struct Args {
  CUtensorMap x, w;    // (rows, K / 2) bytes, box 128 bytes x 128 (x) or 128 / kGroup (w) rows
  CUtensorMap sx, sw;  // (row tiles x atoms along K, 128) words, box 128 words x atoms per stage
  CUtensorMap l, u;    // (rows, R) bf16, boxes of 64 ranks
  float* y;
  float alpha;
  int m, n;
  int k_stages, lora_stages;
  int atoms;  // along K
  int m_tiles, n_tiles;
};

template <int kGroup, int kBlock>
struct Layout {
  static constexpr int kAtoms = kStageK / kBlock / 4;  // per stage and 128 rows
  static constexpr int kX = 128 * 128, kW = kTileN / kGroup * 128;
  static constexpr int kScales = kAtoms * kAtomBytes;
  static constexpr int kStage = kX + kW + 2 * kScales;
  static constexpr int kBarriers = kStages * kStage;
  // full, empty of the stages; full, empty of the accumulators; the base of tensor memory.
  static constexpr int kAccumulator = kBarriers + 16 * kStages;
  static constexpr int kTmem = kAccumulator + 32;
};

struct Walk {
  int slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

template <int kGroup, int kBlock>
__device__ __forceinline__ void load(const Args& args, uint32_t smem, int group, int groups,
                                     int rank) {
  using L = Layout<kGroup, kBlock>;
  Walk stage;
  for (int index = group; index < args.m_tiles * args.n_tiles; index += groups) {
    const int m = index % args.m_tiles * kGroup + rank, n = index / args.m_tiles;
    const int n_row = n * kTileN + rank * (kTileN / kGroup);
    for (int s = 0; s < args.k_stages + args.lora_stages; ++s) {
      const uint32_t full = smem + L::kBarriers + 8 * stage.slot;
      mbarrier_wait(full + 8 * kStages, stage.phase ^ 1);
      const bool scaled = s < args.k_stages;
      const uint32_t bytes = L::kX + L::kW + (scaled ? 2 * L::kScales : 0);
      // The leader's barrier counts both CTAs' bytes.
      if (rank == 0) mbarrier_arrive_expect_tx(full, kGroup * bytes);
      const uint32_t slot = smem + stage.slot * L::kStage;
      if (scaled) {
        load_box<kGroup>(slot, &args.x, full, s * 128, m * 128);
        load_box<kGroup>(slot + L::kX, &args.w, full, s * 128, n_row);
        load_box<kGroup>(slot + L::kX + L::kW, &args.sx, full, 0,
                         m * args.atoms + s * L::kAtoms);
        load_box<kGroup>(slot + L::kX + L::kW + L::kScales, &args.sw, full, 0,
                         n * args.atoms + s * L::kAtoms);
      } else {
        const int r = (s - args.k_stages) * 64;
        load_box<kGroup>(slot, &args.l, full, r, m * 128);
        load_box<kGroup>(slot + L::kX, &args.u, full, r, n_row);
      }
      stage.advance(kStages);
    }
  }
}

template <int kGroup, int kBlock>
__device__ __forceinline__ void issue(const Args& args, uint32_t smem, uint32_t tmem, int group,
                                      int groups) {
  using L = Layout<kGroup, kBlock>;
  constexpr uint32_t kScaled = scaled_descriptor(128 * kGroup, kTileN, kBlock);
  constexpr uint32_t kBf16 = bf16_descriptor(128 * kGroup, kTileN);
  Walk stage, acc;
  int scale_slot = 0;
  for (int index = group; index < args.m_tiles * args.n_tiles; index += groups) {
    const uint32_t acc_full = smem + L::kAccumulator + 8 * acc.slot;
    mbarrier_wait(acc_full + 16, acc.phase ^ 1);
    fence_after();
    const uint32_t d = tmem + acc.slot * kTileN;
    for (int s = 0; s < args.k_stages + args.lora_stages; ++s) {
      const uint32_t full = smem + L::kBarriers + 8 * stage.slot;
      mbarrier_wait(full, stage.phase);
      fence_after();
      const uint32_t slot = smem + stage.slot * L::kStage;
      const uint64_t x = operand_descriptor(slot), w = operand_descriptor(slot + L::kX);
      if (s < args.k_stages) {
        const uint32_t scales = tmem + kScaleBase + scale_slot * kScaleColumns;
        const uint32_t atoms = slot + L::kX + L::kW;
#pragma unroll
        for (int i = 0; i < L::kAtoms; ++i) {
          copy_scales<kGroup>(scales + 4 * i, scale_descriptor(atoms + i * kAtomBytes));
          copy_scales<kGroup>(scales + 16 + 4 * i,
                              scale_descriptor(atoms + L::kScales + i * kAtomBytes));
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          // An atom holds four scales per row: one step of 16-blocks, two of 32-blocks.
          const int atom = kBlock == 16 ? i : i / 2;
          const uint32_t id = kBlock == 16 ? 0 : i % 2 * 2;
          mma_scaled<kGroup, kBlock>(d, x + 2 * i, w + 2 * i, kScaled | id << 29 | id << 4,
                                     scales + 4 * atom, scales + 16 + 4 * atom, s > 0 || i > 0);
        }
        scale_slot ^= 1;
      } else {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) mma_bf16<kGroup>(d, x + 2 * i, w + 2 * i, kBf16);
      }
      commit<kGroup>(full + 8 * kStages);
      stage.advance(kStages);
    }
    commit<kGroup>(acc_full);
    acc.advance(2);
  }
}

template <int kGroup, int kBlock>
__device__ __forceinline__ void store(const Args& args, uint32_t smem, uint32_t tmem, int group,
                                      int groups, int rank, int warp, int lane) {
  using L = Layout<kGroup, kBlock>;
  Walk acc;
  for (int index = group; index < args.m_tiles * args.n_tiles; index += groups) {
    const int m = index % args.m_tiles * kGroup + rank, n0 = index / args.m_tiles * kTileN;
    const int row = m * 128 + warp * 32 + lane;
    const uint32_t full = smem + L::kAccumulator + 8 * acc.slot;
    mbarrier_wait(full, acc.phase);
    fence_after();
    for (int column = 0; column < kTileN; column += 16) {
      uint32_t v[16];
      __syncwarp();
      tmem_load(tmem + (static_cast<uint32_t>(warp * 32) << 16) + acc.slot * kTileN + column, v);
      wait_loads();
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int n = n0 + column + i;
        if (row < args.m && n < args.n) {
          args.y[static_cast<int64_t>(row) * args.n + n] = args.alpha * __uint_as_float(v[i]);
        }
      }
    }
    fence_before();
    __syncwarp();
    // The issuer is in the leader.
    mbarrier_arrive_cluster_if(full + 16, 0, lane == 0);
    acc.advance(2);
  }
}

template <int kGroup, int kBlock>
__device__ __forceinline__ void gemm(const Args& args) {
  using L = Layout<kGroup, kBlock>;
  extern __shared__ __align__(1024) uint8_t dynamic_smem[];
  const uint32_t smem = smem_address(dynamic_smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = kGroup == 1 ? 0 : static_cast<int>(cluster_rank());
  const int group = blockIdx.x / kGroup, groups = gridDim.x / kGroup;

  if (threadIdx.x == 0) {
    for (int s = 0; s < 2 * kStages; ++s) mbarrier_init(smem + L::kBarriers + 8 * s, 1);
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(smem + L::kAccumulator + 8 * s, 1);
      mbarrier_init(smem + L::kAccumulator + 16 + 8 * s, 4 * kGroup);
    }
    fence_mbarrier_init();
  }
  if (warp == 5) tmem_alloc<kGroup>(smem + L::kTmem, kColumns);
  fence_before();
  __syncthreads();
  if constexpr (kGroup > 1) cluster_sync();
  fence_after();
  const uint32_t tmem = load_shared_u32(smem + L::kTmem);

  if (warp == 4) {
    if (elect_one()) load<kGroup, kBlock>(args, smem, group, groups, rank);
  } else if (warp == 5) {
    if (rank == 0 && elect_one()) issue<kGroup, kBlock>(args, smem, tmem, group, groups);
  } else {
    store<kGroup, kBlock>(args, smem, tmem, group, groups, rank, warp, lane);
  }
  __syncwarp();
  fence_before();
  __syncthreads();
  // The peer's arrivals and the pair's MMAs are over only when both are here.
  if constexpr (kGroup > 1) cluster_sync();
  fence_after();
  if (warp == 5) tmem_free<kGroup>(tmem, kColumns);
}

#define W4A4_GEMM(name, group, block)                               \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)         \
      name(const __grid_constant__ Args args) {                     \
    gemm<group, block>(args);                                       \
  }
W4A4_GEMM(nvfp4_1sm, 1, 16)
W4A4_GEMM(nvfp4_2sm, 2, 16)
W4A4_GEMM(mxfp4_1sm, 1, 32)
W4A4_GEMM(mxfp4_2sm, 2, 32)

}  // namespace jax_w4a4::sm100
