// Small kernels that pin down single facts of the hardware: what an MMA rounds, where the copy
// engine puts the bytes of a box. Built as a program they run on an H200 and write golden bits;
// as PTX they run in the emulator (tests/emulator/probes.py), which has to give the same.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "sm90_ptx.cuh"
#include "sm90_wgmma.cuh"
#include "tensor_map.h"

using namespace jax_w4a4;
using namespace jax_w4a4::sm90;

extern __shared__ __align__(1024) uint8_t probe_smem[];

constexpr int kN = 32;
constexpr int kMmaSteps = 4;
constexpr int kMmaSmem = kN * 128 + 16;

// One warpgroup: D[64, kN] = D0 + four k-steps; A from registers, B by the copy engine.
template <MmaKind kKind>
__device__ __forceinline__ void mma_probe(const CUtensorMap& b, const uint32_t* a,
                                          const uint32_t* d0, uint32_t* d, int accumulate) {
  const uint32_t smem = smem_address(probe_smem);
  const uint32_t barrier = smem + kN * 128;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, kN * 128);
    tma_load_2d(smem, &b, barrier, 0, 0);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  using T = typename std::conditional<kKind == MmaKind::kS8, int, float>::type;
  float acc[kN / 2];
  uint32_t fragments[kMmaSteps][4];
  for (int i = 0; i < kN / 2; ++i) acc[i] = __uint_as_float(d0[threadIdx.x * (kN / 2) + i]);
#pragma unroll
  for (int s = 0; s < kMmaSteps; ++s) {
    for (int i = 0; i < 4; ++i) fragments[s][i] = a[(threadIdx.x * kMmaSteps + s) * 4 + i];
  }
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kMmaSteps; ++s) {
    Wgmma<kN>::rs<kKind>(reinterpret_cast<T(&)[kN / 2]>(acc), fragments[s],
                         matrix_descriptor<128>(smem) + 2 * s, s > 0 || accumulate);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(acc);
  for (int i = 0; i < kN / 2; ++i) d[threadIdx.x * (kN / 2) + i] = __float_as_uint(acc[i]);
}

#define W4A4_MMA_PROBE(name, kind)                                                          \
  extern "C" __global__ void __launch_bounds__(128) name(                                   \
      const __grid_constant__ CUtensorMap b, const uint32_t* a, const uint32_t* d0,         \
      uint32_t* d, int accumulate) {                                                        \
    mma_probe<MmaKind::kind>(b, a, d0, d, accumulate);                                      \
  }
W4A4_MMA_PROBE(mma_e5m2, kE5m2E5m2)
W4A4_MMA_PROBE(mma_mixed, kE5m2E4m3)
W4A4_MMA_PROBE(mma_e4m3, kE4m3E4m3)
W4A4_MMA_PROBE(mma_bf16, kBf16)
W4A4_MMA_PROBE(mma_s8, kS8)

constexpr int kBoxRows = 24;
constexpr int kBoxSmem = 8192;

// Copies a box to shared memory and shared memory, byte by byte, to `out`.
extern "C" __global__ void __launch_bounds__(128)
    box_probe(const __grid_constant__ CUtensorMap map, uint8_t* out, int bytes, int inner,
              int outer) {
  const uint32_t smem = smem_address(probe_smem);
  const uint32_t barrier = smem + kBoxSmem;
  for (int i = threadIdx.x; i < kBoxSmem; i += 128) probe_smem[i] = 0xA5;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, bytes);
    // Not at a multiple of 1024: the swizzle goes by the address.
    tma_load_2d(smem + 384, &map, barrier, inner, outer);
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < kBoxSmem; i += 128) out[i] = probe_smem[i];
}

// Conversions and arithmetic whose rounding the kernels rely on, one result per thread.
extern "C" __global__ void scalar_probe(const float* a, const float* b, const float* c,
                                        uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float x = a[i], y = b[i], z = c[i];
  uint32_t pair, product;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x), "f"(y));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(0x7B807B80u));
  float xorsign, with_nan;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(xorsign) : "f"(x), "f"(y));
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(with_nan) : "f"(x), "f"(y));
  float ftz;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(ftz) : "f"(x), "f"(y));
  const uint32_t results[8] = {__float_as_uint(fmaf(x, y, z)), pair,
                               product, __float_as_uint(xorsign),
                               __float_as_uint(with_nan), __float_as_uint(ftz),
                               __float_as_uint(__fdiv_rn(x, y)),
                               prmt(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z))};
  for (int r = 0; r < 8; ++r) out[r * n + i] = results[r];
}

#ifdef W4A4_PROBE_MAIN
// probes IN OUT: reads what tests/emulator/probes.py wrote, appends every result.
namespace {

FILE* g_in;
FILE* g_out;

#define W4A4_CHECK(expr)                                                     \
  do {                                                                       \
    if (cudaError_t code = (expr); code != cudaSuccess) {                    \
      std::fprintf(stderr, "%s: %s\n", #expr, cudaGetErrorString(code));     \
      std::exit(1);                                                          \
    }                                                                        \
  } while (false)

int ReadInt() {
  int v = 0;
  if (std::fread(&v, 4, 1, g_in) != 1) std::exit(2);
  return v;
}

template <class T>
T* ReadBuffer() {
  const int bytes = ReadInt();
  std::vector<uint8_t> host(bytes);
  if (std::fread(host.data(), 1, bytes, g_in) != static_cast<size_t>(bytes)) std::exit(2);
  void* device = nullptr;
  W4A4_CHECK(cudaMalloc(&device, bytes));
  W4A4_CHECK(cudaMemcpy(device, host.data(), bytes, cudaMemcpyHostToDevice));
  return static_cast<T*>(device);
}

template <class T>
T* Result(int bytes) {
  void* device = nullptr;
  W4A4_CHECK(cudaMalloc(&device, bytes));
  W4A4_CHECK(cudaMemset(device, 0xFF, bytes));
  return static_cast<T*>(device);
}

void Write(const void* device, int bytes) {
  W4A4_CHECK(cudaDeviceSynchronize());
  std::vector<uint8_t> host(bytes);
  W4A4_CHECK(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
  std::fwrite(host.data(), 1, bytes, g_out);
}

CUtensorMap Map(const void* data, int rows, int columns, int box_rows, int box_columns,
                int swizzle) {
  CUtensorMap map;
  TensorMaps maps;
  maps.Encode("probe", &map, {data, rows, columns, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1}, box_rows,
              box_columns, static_cast<CUtensorMapSwizzle>(swizzle));
  if (maps.refused() != nullptr) std::exit(3);
  return map;
}

}  // namespace

int main(int, char** argv) {
  g_in = std::fopen(argv[1], "rb");
  g_out = std::fopen(argv[2], "wb");
  for (int what = ReadInt(); what >= 0; what = ReadInt()) {
    if (what < 5) {
      const auto kernel = what == 0   ? mma_e5m2
                          : what == 1 ? mma_mixed
                          : what == 2 ? mma_e4m3
                          : what == 3 ? mma_bf16
                                      : mma_s8;
      const int accumulate = ReadInt();
      const auto* b = ReadBuffer<uint8_t>();
      const auto* a = ReadBuffer<uint32_t>();
      const auto* d0 = ReadBuffer<uint32_t>();
      auto* d = Result<uint32_t>(128 * kN * 2);
      kernel<<<1, 128, kMmaSmem>>>(Map(b, kN, 128, kN, 128, 3), a, d0, d, accumulate);
      Write(d, 128 * kN * 2);
    } else if (what == 5) {
      const int rows = ReadInt(), columns = ReadInt(), box = ReadInt(), swizzle = ReadInt();
      const int inner = ReadInt(), outer = ReadInt();
      const auto* data = ReadBuffer<uint8_t>();
      auto* out = Result<uint8_t>(kBoxSmem);
      box_probe<<<1, 128, kBoxSmem + 16>>>(Map(data, rows, columns, kBoxRows, box, swizzle), out,
                                           kBoxRows * box, inner, outer);
      Write(out, kBoxSmem);
    } else {
      const int n = ReadInt();
      const auto* a = ReadBuffer<float>();
      const auto* b = ReadBuffer<float>();
      const auto* c = ReadBuffer<float>();
      auto* out = Result<uint32_t>(8 * 4 * n);
      scalar_probe<<<(n + 127) / 128, 128>>>(a, b, c, out, n);
      Write(out, 8 * 4 * n);
    }
  }
  return std::fclose(g_out);
}
#endif  // W4A4_PROBE_MAIN
