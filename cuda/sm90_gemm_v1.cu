#include "sm90_gemm_v1.h"

#include <cuda_runtime.h>

#include "element.cuh"
#include "mma.cuh"

namespace jax_w4a4 {
namespace {

constexpr int kTileN = kGemmTileN;
constexpr int kTileK = kGemmTileK;
constexpr int kThreads = kGemmThreads;
constexpr int kRankChunk = kGemmRankChunk;

// 2 x 4 warps; a warp owns tile_m / 2 tokens by 32 features.
constexpr int kWarpsM = 2;
constexpr int kWarpN = 32;
static_assert(kWarpsM * (kTileN / kWarpN) * 32 == kThreads, "warp layout");

// Half a row of a step: 32 codes and the scale bytes that go with them.
struct HalfRow {
  uint4 codes;
  uint32_t scale;
};

// Rows past the end and the K tail read as code 0 with scale byte 0. k_pad is
// a multiple of 32, so a half row is inside or outside as a whole and its
// address is a multiple of 16.
template <Format kFormat>
__device__ HalfRow LoadHalfRow(const uint8_t* packed, const void* scales,
                               int64_t row, int64_t rows, int k, int k_pad) {
  HalfRow half = {make_uint4(0, 0, 0, 0), 0};
  if (row >= rows || k >= k_pad) return half;
  half.codes = *reinterpret_cast<const uint4*>(packed + row * (k_pad / 2) +
                                               k / 2);
  const uint8_t* bytes = static_cast<const uint8_t*>(scales);
  if constexpr (kFormat == Format::kNvfp4) {
    half.scale = *reinterpret_cast<const uint16_t*>(
        bytes + row * (k_pad / 16) + k / 16);
  } else if constexpr (kFormat == Format::kMxfp4) {
    half.scale = bytes[row * (k_pad / 32) + k / 32];
  }
  return half;
}

// Eight codes -> eight bf16, exact. `scale` is 1 for int4.
template <Format kFormat>
__device__ uint4 Dequantize8(uint32_t codes, float scale, bool is_unsigned) {
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = codes >> (4 * i);
    if constexpr (kFormat == Format::kInt4) {
      v[i] = is_unsigned ? DecodeU4(code) : DecodeS4(code);
    } else {
      v[i] = MulRn(DecodeE2m1(code), scale);
    }
  }
  return make_uint4(PackExactBf16(v[0], v[1]), PackExactBf16(v[2], v[3]),
                    PackExactBf16(v[4], v[5]), PackExactBf16(v[6], v[7]));
}

// Tiles hold 64 bf16 per row: 128 bytes = 8 chunks of 16, chunk c of row r at
// c ^ (r % 8), which keeps both these stores and ldmatrix free of conflicts.
__device__ int TileOffset(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Writes columns 32 * half .. + 31 of one row of a tile.
template <Format kFormat>
__device__ void StoreHalfRow(unsigned char* tile, int row, int half,
                             const HalfRow& raw, bool is_unsigned) {
  const uint32_t words[4] = {raw.codes.x, raw.codes.y, raw.codes.z,
                             raw.codes.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float scale = 1.0f;
    if constexpr (kFormat == Format::kNvfp4) {
      scale = DecodeE4m3((raw.scale >> (i < 2 ? 0 : 8)) & 0xFFu);
    } else if constexpr (kFormat == Format::kMxfp4) {
      scale = DecodeE8m0(raw.scale);
    }
    *reinterpret_cast<uint4*>(tile + TileOffset(row, half * 4 + i)) =
        Dequantize8<kFormat>(words[i], scale, is_unsigned);
  }
}

// fp32 value of the int4 scale of group `group`, 0 outside the matrix.
__device__ float LoadGroupScale(const void* scales, int64_t row, int64_t rows,
                                int group, int groups_per_row, DType dtype) {
  if (row >= rows || group >= groups_per_row) return 0.0f;
  return LoadElement(scales, row * groups_per_row + group, dtype);
}

// Everything a thread carries from global memory to a stage of shared memory.
// Thread t handles half t % 2 of row t / 2 of both tiles, and (int4) the
// scales of rows t and t + 256 of [weight rows of group 0, act rows of group
// 0, weight rows of group 1, ...].
template <Format kFormat, int kTileM>
struct Fetch {
  static constexpr bool kHasGroupScales = kFormat == Format::kInt4;
  static constexpr int kScaleRows = kTileN + kTileM;
  static constexpr int kScalesPerThread =
      (2 * kScaleRows + kThreads - 1) / kThreads;

  HalfRow weight;
  HalfRow act;
  float scale[kHasGroupScales ? kScalesPerThread : 1];

  // Weight bytes are arguments of the call, never results of the kernel
  // before: they may be read before GridDependencyWait().
  __device__ void LoadWeight(const GemmParams& p, int64_t n0, int k0) {
    weight = LoadHalfRow<kFormat>(p.weight, p.weight_scale,
                                  n0 + threadIdx.x / 2, p.n,
                                  k0 + 32 * (threadIdx.x % 2), p.k_pad);
  }

  __device__ void LoadActAndScales(const GemmParams& p, int64_t m0, int64_t n0,
                                   int k0) {
    if (threadIdx.x < 2 * kTileM) {
      act = LoadHalfRow<kFormat>(p.act, p.act_scale, m0 + threadIdx.x / 2, p.m,
                                 k0 + 32 * (threadIdx.x % 2), p.k_pad);
    }
    if constexpr (kHasGroupScales) {
      const int groups = GemmScaleGroups(p.block);
      const int groups_per_row = p.k_pad / p.block;
#pragma unroll
      for (int i = 0; i < kScalesPerThread; ++i) {
        const int slot = threadIdx.x + i * kThreads;
        const int local = slot / kScaleRows;
        const int row = slot % kScaleRows;
        if (local >= groups) continue;
        const int group = k0 / p.block + local;
        scale[i] = row < kTileN
                       ? LoadGroupScale(p.weight_scale, n0 + row, p.n, group,
                                        groups_per_row, p.scale_dtype)
                       : LoadGroupScale(p.act_scale, m0 + row - kTileN, p.m,
                                        group, groups_per_row, p.scale_dtype);
      }
    }
  }

  __device__ void Store(const GemmParams& p, unsigned char* smem,
                        int stage) const {
    StoreHalfRow<kFormat>(smem + p.smem.weight + stage * p.smem.weight_bytes,
                          threadIdx.x / 2, threadIdx.x % 2, weight, false);
    if (threadIdx.x < 2 * kTileM) {
      StoreHalfRow<kFormat>(smem + p.smem.act + stage * p.smem.act_bytes,
                            threadIdx.x / 2, threadIdx.x % 2, act,
                            p.is_unsigned);
    }
    if constexpr (kHasGroupScales) {
      float* weight_scale = reinterpret_cast<float*>(
          smem + p.smem.weight_scale + stage * p.smem.weight_scale_bytes);
      float* act_scale = reinterpret_cast<float*>(
          smem + p.smem.act_scale + stage * p.smem.act_scale_bytes);
      const int groups = GemmScaleGroups(p.block);
#pragma unroll
      for (int i = 0; i < kScalesPerThread; ++i) {
        const int slot = threadIdx.x + i * kThreads;
        const int local = slot / kScaleRows;
        const int row = slot % kScaleRows;
        if (local >= groups) continue;
        if (row < kTileN) {
          weight_scale[local * kTileN + row] = scale[i];
        } else {
          act_scale[local * kTileM + row - kTileN] = scale[i];
        }
      }
    }
  }
};

// Accumulators of a warp: fragment (i, j) covers tokens 16 i + {0, 8} + lane /
// 4 and features 8 j + 2 (lane % 4) + {0, 1}; element 2 h + c is token half h,
// feature c.
template <int kTileM>
struct Accumulators {
  static constexpr int kFragM = kTileM / kWarpsM / 16;
  static constexpr int kFragN = kWarpN / 8;
  float v[kFragM][kFragN][4];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < kFragM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[i][j][e] = 0.0f;
      }
    }
  }

  // First token and feature of this thread inside the block's tile.
  __device__ static int FirstM() {
    return (threadIdx.x / 32 % kWarpsM) * (kTileM / kWarpsM) +
           threadIdx.x % 32 / 4;
  }
  __device__ static int FirstN() {
    return (threadIdx.x / 32 / kWarpsM) * kWarpN + threadIdx.x % 4 * 2;
  }

  // v += act(16 columns of K from 16 * step) * weight^T.
  __device__ void Multiply(uint32_t act_tile, uint32_t weight_tile, int step) {
    const int lane = threadIdx.x % 32;
    const int warp_m = threadIdx.x / 32 % kWarpsM;
    const int warp_n = threadIdx.x / 32 / kWarpsM;
    uint32_t b[kFragN / 2][4];
#pragma unroll
    for (int j = 0; j < kFragN / 2; ++j) {
      const int row = warp_n * kWarpN + 16 * j + (lane & 7) + (lane >> 4) * 8;
      LoadMatrixX4(b[j],
                   weight_tile + TileOffset(row, 2 * step + (lane >> 3 & 1)));
    }
#pragma unroll
    for (int i = 0; i < kFragM; ++i) {
      const int row = warp_m * (kTileM / kWarpsM) + 16 * i + (lane & 15);
      uint32_t a[4];
      LoadMatrixX4(a, act_tile + TileOffset(row, 2 * step + (lane >> 4)));
#pragma unroll
      for (int j = 0; j < kFragN; ++j) {
        MmaBf16(v[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  // v += part * (act_scale * weight_scale), then part = 0.
  __device__ void AddScaled(Accumulators& part, const float* act_scale,
                            const float* weight_scale) {
    const float* sx = act_scale + FirstM();
    const float* sw = weight_scale + FirstN();
#pragma unroll
    for (int i = 0; i < kFragM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float scale = sx[16 * i + 8 * (e / 2)] * sw[8 * j + e % 2];
          v[i][j][e] = fmaf(part.v[i][j][e], scale, v[i][j][e]);
        }
      }
    }
    part.Clear();
  }

  // v = channel_scale * (alpha * v).
  __device__ void Scale(float alpha, const float* channel_scale) {
    const float* scale = channel_scale + FirstN();
#pragma unroll
    for (int i = 0; i < kFragM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[i][j][e] = scale[8 * j + e % 2] * (alpha * v[i][j][e]);
        }
      }
    }
  }
};

// One chunk of 32 ranks, fp32, rank-major: rank r of row i at
// r * rows + (i ^ r). Global loads run along r, reads along i; the XOR keeps
// both free of conflicts.
__device__ void LoadRankChunk(float* chunk, int rows, const void* source,
                              int64_t row0, int64_t row_end, int rank0,
                              int rank, DType dtype) {
  const int r = threadIdx.x % kRankChunk;
  for (int i = threadIdx.x / kRankChunk; i < rows;
       i += kThreads / kRankChunk) {
    const int64_t row = row0 + i;
    const bool inside = row < row_end && rank0 + r < rank;
    chunk[r * rows + (i ^ r)] =
        inside ? LoadElement(source, row * rank + rank0 + r, dtype) : 0.0f;
  }
}

// acc += lora_act @ lora_up^T in fp32.
template <int kTileM>
__device__ void AddLora(const GemmParams& p, unsigned char* smem, int64_t m0,
                        int64_t n0, Accumulators<kTileM>& acc) {
  using Acc = Accumulators<kTileM>;
  float* up = reinterpret_cast<float*>(smem + p.smem.lora_up);
  float* act = reinterpret_cast<float*>(smem + p.smem.lora_act);
  for (int rank0 = 0; rank0 < p.rank; rank0 += kRankChunk) {
    __syncthreads();  // the region may hold main tiles or the previous chunk
    LoadRankChunk(up, kTileN, p.lora_up, n0, p.n, rank0, p.rank, p.lora_dtype);
    LoadRankChunk(act, kTileM, p.lora_act, m0, p.m, rank0, p.rank,
                  p.lora_dtype);
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < kRankChunk; ++r) {
      float b[Acc::kFragN][2];
#pragma unroll
      for (int j = 0; j < Acc::kFragN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          b[j][c] = up[r * kTileN + ((Acc::FirstN() + 8 * j + c) ^ r)];
        }
      }
#pragma unroll
      for (int i = 0; i < Acc::kFragM; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float a =
              act[r * kTileM + ((Acc::FirstM() + 16 * i + 8 * h) ^ r)];
#pragma unroll
          for (int j = 0; j < Acc::kFragN; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              acc.v[i][j][2 * h + c] =
                  fmaf(a, b[j][c], acc.v[i][j][2 * h + c]);
            }
          }
        }
      }
    }
  }
}

// out = cast(acc + bias), rows and columns past the end left out.
template <int kTileM>
__device__ void StoreOut(const GemmParams& p, int64_t m0, int64_t n0,
                         const float* bias, const Accumulators<kTileM>& acc) {
  using Acc = Accumulators<kTileM>;
#pragma unroll
  for (int i = 0; i < Acc::kFragM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = m0 + Acc::FirstM() + 16 * i + 8 * h;
      if (row >= p.m) continue;
#pragma unroll
      for (int j = 0; j < Acc::kFragN; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = Acc::FirstN() + 8 * j + c;
          if (n0 + column >= p.n) continue;
          StoreElement(p.out, row * p.n + n0 + column,
                       acc.v[i][j][2 * h + c] + bias[column], p.out_dtype);
        }
      }
    }
  }
}

// Grid: (ceil(m / tile_m), min(ceil(n / 128), 65535)); blocks walk over the
// tiles of N beyond the grid limit.
template <Format kFormat, int kTileM>
__global__ void __launch_bounds__(kThreads, 1)
    GemmV1(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  float* channel_scale = reinterpret_cast<float*>(smem + p.smem.aux);
  float* bias = channel_scale + kTileN;

  const int64_t m0 = static_cast<int64_t>(blockIdx.x) * kTileM;
  const int64_t n_step = static_cast<int64_t>(gridDim.y) * kTileN;
  const int steps = (p.k_pad + kTileK - 1) / kTileK;
  const float alpha =
      (p.act_global_scale != nullptr ? *p.act_global_scale : 1.0f) *
      (p.weight_global_scale != nullptr ? *p.weight_global_scale : 1.0f);

  bool waited = false;
  for (int64_t n0 = static_cast<int64_t>(blockIdx.y) * kTileN; n0 < p.n;
       n0 += n_step) {
    Fetch<kFormat, kTileM> fetch;
    fetch.LoadWeight(p, n0, 0);
    if (!waited) GridDependencyWait();
    waited = true;
    fetch.LoadActAndScales(p, m0, n0, 0);

    __syncthreads();  // the previous tile's epilogue has read everything
    if (threadIdx.x < kTileN) {
      const int64_t n = n0 + threadIdx.x;
      const bool inside = n < p.n;
      channel_scale[threadIdx.x] =
          inside && p.channel_scale != nullptr ? p.channel_scale[n] : 1.0f;
      bias[threadIdx.x] = inside && p.bias != nullptr ? p.bias[n] : 0.0f;
    }
    fetch.Store(p, smem, 0);
    __syncthreads();

    Accumulators<kTileM> acc;
    acc.Clear();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const bool more = step + 1 < steps;
      if (more) {
        fetch.LoadWeight(p, n0, (step + 1) * kTileK);
        fetch.LoadActAndScales(p, m0, n0, (step + 1) * kTileK);
      }
      const int stage = step % kGemmStages;
      const uint32_t act_tile =
          SharedAddress(smem + p.smem.act + stage * p.smem.act_bytes);
      const uint32_t weight_tile =
          SharedAddress(smem + p.smem.weight + stage * p.smem.weight_bytes);
      if constexpr (kFormat == Format::kInt4) {
        const float* sx = reinterpret_cast<const float*>(
            smem + p.smem.act_scale + stage * p.smem.act_scale_bytes);
        const float* sw = reinterpret_cast<const float*>(
            smem + p.smem.weight_scale + stage * p.smem.weight_scale_bytes);
        const bool two_groups = GemmScaleGroups(p.block) == 2;
        Accumulators<kTileM> part;
        part.Clear();
        part.Multiply(act_tile, weight_tile, 0);
        part.Multiply(act_tile, weight_tile, 1);
        if (two_groups) {
          acc.AddScaled(part, sx, sw);
          sx += kTileM;
          sw += kTileN;
        }
        part.Multiply(act_tile, weight_tile, 2);
        part.Multiply(act_tile, weight_tile, 3);
        acc.AddScaled(part, sx, sw);
      } else {
#pragma unroll
        for (int k16 = 0; k16 < kTileK / 16; ++k16) {
          acc.Multiply(act_tile, weight_tile, k16);
        }
      }
      // The other stage was last read before the previous barrier.
      if (more) fetch.Store(p, smem, (step + 1) % kGemmStages);
      __syncthreads();
    }

    acc.Scale(alpha, channel_scale);
    AddLora<kTileM>(p, smem, m0, n0, acc);
    StoreOut<kTileM>(p, m0, n0, bias, acc);
  }
}

template <Format kFormat>
const void* KernelForTile(int tile_m) {
  switch (tile_m) {
    case 32:
      return reinterpret_cast<const void*>(&GemmV1<kFormat, 32>);
    case 64:
      return reinterpret_cast<const void*>(&GemmV1<kFormat, 64>);
    case 128:
      return reinterpret_cast<const void*>(&GemmV1<kFormat, 128>);
    default:
      return nullptr;
  }
}

}  // namespace

const void* GemmV1Kernel(Format format, int tile_m) {
  switch (format) {
    case Format::kNvfp4:
      return KernelForTile<Format::kNvfp4>(tile_m);
    case Format::kMxfp4:
      return KernelForTile<Format::kMxfp4>(tile_m);
    case Format::kInt4:
      return KernelForTile<Format::kInt4>(tile_m);
  }
  return nullptr;
}

GemmGrid GemmV1Grid(int64_t m, int64_t n, int tile_m) {
  const int64_t tiles_n = (n + kTileN - 1) / kTileN;
  return {static_cast<unsigned>((m + tile_m - 1) / tile_m),
          static_cast<unsigned>(tiles_n < kGemmMaxGridY ? tiles_n
                                                        : kGemmMaxGridY)};
}

int LaunchGemmV1(Format format, int tile_m, const GemmParams& params,
                 bool dependent, cudaStream_t stream) {
  const GemmGrid grid = GemmV1Grid(params.m, params.n, tile_m);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.x, grid.y);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = params.smem.total_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  void* args[] = {const_cast<GemmParams*>(&params)};
  return cudaLaunchKernelExC(&config, GemmV1Kernel(format, tile_m), args);
}

}  // namespace jax_w4a4
