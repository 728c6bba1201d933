#include "sm90_quantize_v1.h"

#include <cuda_runtime.h>

#include "element.cuh"
#include "mma.cuh"

namespace jax_w4a4 {
namespace {

constexpr int kRows = kQuantizeRows;
constexpr int kChunk = kQuantizeChunk;
constexpr int kThreads = kQuantizeThreads;
static_assert(kChunk == kThreads, "each thread owns one column of a chunk");

struct Column {
  int k;
  bool valid;            // k < K; the rest of k_pad is zeros
  float smooth_inverse;  // 1 / smooth rounded once, 1 when absent
};

__device__ Column GetColumn(const QuantizeParams& p, int k) {
  const bool valid = k < p.k;
  const bool smoothed = valid && p.smooth != nullptr;
  return {k, valid, smoothed ? Reciprocal(p.smooth[k]) : 1.0f};
}

// The value that is quantized: x * (1 / smooth) * (1 / global scale). Absent
// operands are exact ones, so nothing is skipped.
__device__ float Normalize(float x, float smooth_inverse,
                           float global_inverse) {
  return Flush(MulRn(Flush(MulRn(x, smooth_inverse)), global_inverse));
}

__device__ float LoadX(const QuantizeParams& p, int64_t row,
                       const Column& column) {
  if (!column.valid || row >= p.m) return 0.0f;
  return Flush(LoadElement(p.x, row * p.k + column.k, p.x_dtype));
}

// amax of whole rows: warp w takes rows w, w + 8.
__device__ void FindRowAmax(const QuantizeParams& p, int64_t row0,
                            float global_inverse, uint32_t* row_amax) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kRows; i += kThreads / 32) {
    uint32_t amax = 0;
    for (int k = lane; k < p.k; k += 32) {
      const Column column = GetColumn(p, k);
      const float v = Normalize(LoadX(p, row0 + i, column),
                                column.smooth_inverse, global_inverse);
      amax = AccumulateAbsMax(amax, v, p.is_unsigned);
    }
    amax = __reduce_max_sync(0xFFFFFFFFu, amax);
    if (lane == 0) row_amax[i] = amax;
  }
}

__device__ void StoreScale(const QuantizeParams& p, int64_t index,
                           uint32_t bits) {
  if (p.scale_dtype == DType::kF32) {
    static_cast<uint32_t*>(p.scales)[index] = bits;
  } else if (p.scale_dtype == DType::kF16 || p.scale_dtype == DType::kBf16) {
    static_cast<uint16_t*>(p.scales)[index] = static_cast<uint16_t>(bits);
  } else {
    static_cast<uint8_t*>(p.scales)[index] = static_cast<uint8_t>(bits);
  }
}

// Quantizes columns k0.. of the chunk. One thread takes one block of one row;
// when the whole row is the block, 32 columns of it.
template <Format kFormat>
__device__ void QuantizeChunk(const QuantizeParams& p, int64_t row0, int k0,
                              const float* chunk, const uint32_t* row_amax) {
  const bool whole_row = p.block == p.k_pad;
  const int unit = whole_row ? 32 : p.block;
  const int columns = min(kChunk, p.k_pad - k0);
  const int units = (columns + unit - 1) / unit;
  for (int task = threadIdx.x; task < kRows * units; task += kThreads) {
    const int i = task / units;
    const int first = (task % units) * unit;
    const int64_t row = row0 + i;
    if (row >= p.m) continue;
    const float4* values =
        reinterpret_cast<const float4*>(chunk + i * kChunk + first);

    uint32_t amax = whole_row ? row_amax[i] : 0u;
    if (!whole_row) {
#pragma unroll 1
      for (int j = 0; j < unit / 4; ++j) {
        const float4 v = values[j];
        amax = AccumulateAbsMax(amax, v.x, p.is_unsigned);
        amax = AccumulateAbsMax(amax, v.y, p.is_unsigned);
        amax = AccumulateAbsMax(amax, v.z, p.is_unsigned);
        amax = AccumulateAbsMax(amax, v.w, p.is_unsigned);
      }
    }
    const BlockScale scale = ChooseScale<kFormat>(amax, p.is_unsigned, p.rule,
                                                  p.scale_dtype);
    if (!whole_row || k0 + first == 0) {
      StoreScale(p, row * (p.k_pad / p.block) + (k0 + first) / p.block,
                 scale.bits);
    }

    uint16_t* packed = reinterpret_cast<uint16_t*>(
        p.packed + row * (p.k_pad / 2) + (k0 + first) / 2);
#pragma unroll 1
    for (int j = 0; j < unit / 4; ++j) {
      uint32_t codes = 0;
      if (scale.live) {
        const float4 v = values[j];
        codes = EncodeValue<kFormat>(v.x, scale, p.is_unsigned) |
                EncodeValue<kFormat>(v.y, scale, p.is_unsigned) << 4 |
                EncodeValue<kFormat>(v.z, scale, p.is_unsigned) << 8 |
                EncodeValue<kFormat>(v.w, scale, p.is_unsigned) << 12;
      }
      packed[j] = static_cast<uint16_t>(codes);
    }
  }
}

// LoRA-down of the 256 ranks from rank0: thread (group, r) sums its share of
// every chunk for all rows; the groups are added in a fixed order at the end.
struct LoraDown {
  int rank0;
  int width;  // threads per group, a power of two
  int r;
  int group;
  bool active;
  float sum[kRows];

  __device__ explicit LoraDown(const QuantizeParams& p) {
    rank0 = blockIdx.y * kThreads;
    const int ranks = min(kThreads, p.rank - rank0);
    width = 4;
    while (width < ranks) width *= 2;
    r = threadIdx.x % width;
    group = threadIdx.x / width;
    active = r < ranks;
#pragma unroll
    for (int i = 0; i < kRows; ++i) sum[i] = 0.0f;
  }

  __device__ void Accumulate(const QuantizeParams& p, int k0,
                             const float* chunk) {
    if (!active) return;
    // `width` columns per group, since kChunk / (kThreads / width) = width.
#pragma unroll 1
    for (int c = group * width; c < (group + 1) * width; c += 4) {
      float down[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = k0 + c + j;
        down[j] = k < p.k ? LoadElement(p.lora_down,
                                        static_cast<int64_t>(k) * p.rank +
                                            rank0 + r,
                                        p.lora_down_dtype)
                          : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 x =
            *reinterpret_cast<const float4*>(chunk + i * kChunk + c);
        sum[i] = fmaf(x.x, down[0], sum[i]);
        sum[i] = fmaf(x.y, down[1], sum[i]);
        sum[i] = fmaf(x.z, down[2], sum[i]);
        sum[i] = fmaf(x.w, down[3], sum[i]);
      }
    }
  }

  // `partial` holds kRows x kThreads floats.
  __device__ void Store(const QuantizeParams& p, int64_t row0, float* partial) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) partial[i * kThreads + threadIdx.x] = sum[i];
    __syncthreads();
    if (!active) return;
    const int groups = kThreads / width;
    for (int i = group; i < kRows; i += groups) {
      if (row0 + i >= p.m) break;
      float total = 0.0f;
      for (int g = 0; g < groups; ++g) {
        total += partial[i * kThreads + g * width + r];
      }
      StoreElement(p.lora_act, (row0 + i) * p.rank + rank0 + r, total,
                   p.lora_act_dtype);
    }
  }
};

// Left to itself, ptxas takes 128 registers on sm_100 and spills two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define W4A4_QUANTIZE_V1_BOUNDS __launch_bounds__(kThreads, 1)
#else
#define W4A4_QUANTIZE_V1_BOUNDS __launch_bounds__(kThreads)
#endif

// Grid: (ceil(m / 16), max(1, ceil(rank / 256))). Blocks with blockIdx.y == 0
// quantize; every block computes the LoRA-down of its ranks.
template <Format kFormat>
__global__ void W4A4_QUANTIZE_V1_BOUNDS
    QuantizeV1(const QuantizeParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  float* chunk = reinterpret_cast<float*>(smem);
  uint32_t* row_amax = reinterpret_cast<uint32_t*>(chunk + kRows * kChunk);
  float* partial = reinterpret_cast<float*>(row_amax + kRows);

  LaunchDependents();
  GridDependencyWait();

  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kRows;
  const bool quantizes = blockIdx.y == 0;
  const bool has_lora = p.rank > 0;
  const float global_inverse =
      p.global_scale != nullptr ? Reciprocal(*p.global_scale) : 1.0f;
  LoraDown lora(p);

  if (quantizes && p.block == p.k_pad) {
    FindRowAmax(p, row0, global_inverse, row_amax);
  }
  for (int k0 = 0; k0 < p.k_pad; k0 += kChunk) {
    const Column column = GetColumn(p, k0 + threadIdx.x);
    float* own = chunk + threadIdx.x;
    const float before = p.lora_smoothed ? column.smooth_inverse : 1.0f;
    const float after = p.lora_smoothed ? 1.0f : column.smooth_inverse;
    __syncthreads();  // the previous chunk has been read
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      own[i * kChunk] = Flush(MulRn(LoadX(p, row0 + i, column), before));
    }
    __syncthreads();
    if (has_lora) {
      lora.Accumulate(p, k0, chunk);
      __syncthreads();
    }
    if (quantizes) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        own[i * kChunk] = Normalize(own[i * kChunk], after, global_inverse);
      }
      __syncthreads();
      QuantizeChunk<kFormat>(p, row0, k0, chunk, row_amax);
    }
  }
  if (has_lora) lora.Store(p, row0, partial);
}

const void* QuantizeKernel(Format format) {
  switch (format) {
    case Format::kNvfp4:
      return reinterpret_cast<const void*>(&QuantizeV1<Format::kNvfp4>);
    case Format::kMxfp4:
      return reinterpret_cast<const void*>(&QuantizeV1<Format::kMxfp4>);
    case Format::kInt4:
      return reinterpret_cast<const void*>(&QuantizeV1<Format::kInt4>);
  }
  return nullptr;
}

}  // namespace

int LaunchQuantizeV1(Format format, const QuantizeParams& params,
                     cudaStream_t stream) {
  const int rank_blocks = (params.rank + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>((params.m + kRows - 1) / kRows),
                  rank_blocks > 0 ? rank_blocks : 1);
  void* args[] = {const_cast<QuantizeParams*>(&params)};
  return cudaLaunchKernel(QuantizeKernel(format), grid, dim3(kThreads), args,
                          QuantizeSmemBytes(params.rank > 0), stream);
}

}  // namespace jax_w4a4
