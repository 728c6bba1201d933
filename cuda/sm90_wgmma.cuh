// Warpgroup MMA (wgmma) for the tile widths of the kernels: D[64, N] += A[64, K] B[K, N]^T-major.
//
// N is the token tile. An inline-assembly statement needs every accumulator as a literal operand, so
// the per-width text is produced by the macros below: one W4A4_WGMMA line per N.
// Accumulator layout (all kinds): thread (g = lane / 4, q = lane % 4) of warp w holds, for the
// tokens 8 j + 2 q + {0, 1}, d[4 j + {0, 1}] of row 16 w + g and d[4 j + {2, 3}] of row 16 w + g + 8.
#pragma once

#include <cstdint>
#include <type_traits>

namespace jax_w4a4::sm90 {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accumulator reads above a wait it cannot see through.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory matrix descriptor, K-major rows of kRowBytes (the swizzle width), 8-row atoms.
template <int kRowBytes>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "swizzle width");
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr uint64_t kAtomStride = 8 * kRowBytes / 16;
  return (kSwizzle << 62) | (kAtomStride << 32) | (uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}

// Descriptor of a [k][n] tile (n contiguous) in blocks of kBlockBytes / 2 n's, the swizzle width:
// within a block 8 k rows make an atom, blocks lie `block_stride` bytes apart.
template <int kBlockBytes>
__device__ __forceinline__ uint64_t nmajor_descriptor(uint32_t address, uint32_t block_stride) {
  static_assert(kBlockBytes == 128 || kBlockBytes == 64, "swizzle width");
  constexpr uint64_t kSwizzle = kBlockBytes == 128 ? 1 : 2;
  constexpr uint64_t kAtomStride = 8 * kBlockBytes / 16;
  return (kSwizzle << 62) | (kAtomStride << 32) | (uint64_t{block_stride / 16} << 16) |
         ((address & 0x3FFFF) >> 4);
}

// Element types of the two operands. The INT8 MMA takes no N that is an odd multiple of 8 above 24.
enum class MmaKind { kE5m2E5m2, kE5m2E4m3, kE4m3E4m3, kBf16, kF16, kS8 };

template <int N>
struct Wgmma;

// Operand placeholders "%0,%1,..." and operand bindings, four accumulators at a time.
#define W4A4_S4_0(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3"
#define W4A4_S4_4(t) "%" #t "4,%" #t "5,%" #t "6,%" #t "7"
#define W4A4_S2_8(t) "%" #t "8,%" #t "9"
#define W4A4_S10(t) W4A4_S4_0(t) "," W4A4_S4_4(t) "," W4A4_S2_8(t)
#define W4A4_S2_0(t) "%" #t "0,%" #t "1"
#define W4A4_S10_0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9"
#define W4A4_S8_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define W4A4_S20 W4A4_S10_0 "," W4A4_S10(1)
#define W4A4_S30 W4A4_S20 "," W4A4_S10(2)
#define W4A4_S40 W4A4_S30 "," W4A4_S10(3)
#define W4A4_S50 W4A4_S40 "," W4A4_S10(4)
#define W4A4_S60 W4A4_S50 "," W4A4_S10(5)
#define W4A4_S70 W4A4_S60 "," W4A4_S10(6)
#define W4A4_S80 W4A4_S70 "," W4A4_S10(7)
#define W4A4_S90 W4A4_S80 "," W4A4_S10(8)
#define W4A4_S100 W4A4_S90 "," W4A4_S10(9)
#define W4A4_S120 W4A4_S100 "," W4A4_S10(10) "," W4A4_S10(11)
#define W4A4_STR_8 "%0,%1,%2,%3"
#define W4A4_STR_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define W4A4_STR_32 W4A4_S10_0 "," W4A4_S4_0(1) ",%14,%15"
#define W4A4_STR_64 W4A4_S30 "," W4A4_S2_0(3)
#define W4A4_STR_96 W4A4_S40 "," W4A4_S4_0(4) "," W4A4_S4_4(4)
#define W4A4_STR_128 W4A4_S60 "," W4A4_S4_0(6)
#define W4A4_STR_144 W4A4_S70 "," W4A4_S2_0(7)
#define W4A4_STR_160 W4A4_S80
#define W4A4_STR_176 W4A4_S80 "," W4A4_S4_0(8) "," W4A4_S4_4(8)
#define W4A4_STR_184 W4A4_S90 "," W4A4_S2_0(9)
#define W4A4_STR_192 W4A4_S90 "," W4A4_S4_0(9) ",%94,%95"
#define W4A4_STR_200 W4A4_S100
#define W4A4_STR_208 W4A4_S100 "," W4A4_S4_0(10)
#define W4A4_STR_224 W4A4_S100 "," W4A4_S10(10) "," W4A4_S2_0(11)
#define W4A4_STR_240 W4A4_S120
#define W4A4_STR_256 W4A4_S120 "," W4A4_S4_0(12) "," W4A4_S4_4(12)

#define W4A4_D4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define W4A4_D16(c, i) W4A4_D4(c, i), W4A4_D4(c, i + 4), W4A4_D4(c, i + 8), W4A4_D4(c, i + 12)
#define W4A4_OPS_8(c) W4A4_D4(c, 0)
#define W4A4_OPS_16(c) W4A4_D4(c, 0), W4A4_D4(c, 4)
#define W4A4_OPS_32(c) W4A4_D16(c, 0)
#define W4A4_OPS_64(c) W4A4_D16(c, 0), W4A4_D16(c, 16)
#define W4A4_OPS_96(c) W4A4_OPS_64(c), W4A4_D16(c, 32)
#define W4A4_OPS_128(c) W4A4_OPS_96(c), W4A4_D16(c, 48)
#define W4A4_OPS_144(c) W4A4_OPS_128(c), W4A4_D4(c, 64), W4A4_D4(c, 68)
#define W4A4_OPS_160(c) W4A4_OPS_128(c), W4A4_D16(c, 64)
#define W4A4_OPS_176(c) W4A4_OPS_160(c), W4A4_D4(c, 80), W4A4_D4(c, 84)
#define W4A4_OPS_184(c) W4A4_OPS_176(c), W4A4_D4(c, 88)
#define W4A4_OPS_192(c) W4A4_OPS_160(c), W4A4_D16(c, 80)
#define W4A4_OPS_200(c) W4A4_OPS_192(c), W4A4_D4(c, 96)
#define W4A4_OPS_208(c) W4A4_OPS_200(c), W4A4_D4(c, 100)
#define W4A4_OPS_224(c) W4A4_OPS_192(c), W4A4_D16(c, 96)
#define W4A4_OPS_240(c) W4A4_OPS_224(c), W4A4_D4(c, 112), W4A4_D4(c, 116)
#define W4A4_OPS_256(c) W4A4_OPS_224(c), W4A4_D16(c, 112)

// A from registers (expanded weights), B from shared memory. `accumulate` false overwrites D.
// %n0..%n3 = A, %n4 = B descriptor, %n5 = accumulate.
#define W4A4_RS(KIND, TYPES, T, C, N, n0, n1, n2, n3, n4, n5, TAIL)                              \
  template <MmaKind kKind>                                                                       \
  static __device__ __forceinline__ std::enable_if_t<kKind == MmaKind::KIND> rs(                 \
      T(&d)[N / 2], const uint32_t(&a)[4], uint64_t b, int accumulate) {                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5                                        \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N TYPES "{" W4A4_STR_##N             \
                 "}, {%" #n0 ",%" #n1 ",%" #n2 ",%" #n3 "}, %" #n4 ", p" TAIL ";\n}\n"           \
                 : W4A4_OPS_##N(C)                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));         \
  }

// Both from shared memory, always accumulating: one k16 step of the low-rank product.
#define W4A4_SS_BF16(N, n0, n1)                                                                  \
  static __device__ __forceinline__ void ss_bf16(float(&d)[N / 2], uint64_t a, uint64_t b) {     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" W4A4_STR_##N       \
                 "}, %" #n0 ", %" #n1 ", 1, 1, 1, 0, 0;\n"                                       \
                 : W4A4_OPS_##N("+f")                                                            \
                 : "l"(a), "l"(b));                                                              \
  }

// Both from shared memory, B with its N dimension contiguous: one k16 step of x lora_down.
#define W4A4_SS_BF16_NMAJOR(N, n0, n1, n2)                                                       \
  static __device__ __forceinline__ void ss_bf16_nmajor(float(&d)[N / 2], uint64_t a,            \
                                                        uint64_t b, int accumulate) {            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2                                        \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                                    \
                 "k16.f32.bf16.bf16 {" W4A4_STR_##N "}, %" #n0 ", %" #n1                         \
                 ", p, 1, 1, 0, 1;\n}\n"                                                         \
                 : W4A4_OPS_##N("+f")                                                            \
                 : "l"(a), "l"(b), "r"(accumulate));                                             \
  }

#define W4A4_WGMMA(N, n0, n1, n2, n3, n4, n5)                                                    \
  template <>                                                                                    \
  struct Wgmma<N> {                                                                              \
    W4A4_RS(kE5m2E5m2, "k32.f32.e5m2.e5m2 ", float, "+f", N, n0, n1, n2, n3, n4, n5, ", 1, 1")   \
    W4A4_RS(kE5m2E4m3, "k32.f32.e5m2.e4m3 ", float, "+f", N, n0, n1, n2, n3, n4, n5, ", 1, 1")   \
    W4A4_RS(kE4m3E4m3, "k32.f32.e4m3.e4m3 ", float, "+f", N, n0, n1, n2, n3, n4, n5, ", 1, 1")   \
    W4A4_RS(kBf16, "k16.f32.bf16.bf16 ", float, "+f", N, n0, n1, n2, n3, n4, n5, ", 1, 1, 0")    \
    W4A4_RS(kF16, "k16.f32.f16.f16 ", float, "+f", N, n0, n1, n2, n3, n4, n5, ", 1, 1, 0")      \
    W4A4_RS(kS8, "k32.s32.s8.s8 ", int, "+r", N, n0, n1, n2, n3, n4, n5, "")                     \
    W4A4_SS_BF16(N, n0, n1)                                                                      \
    W4A4_SS_BF16_NMAJOR(N, n0, n1, n2)                                                           \
  };

W4A4_WGMMA(8, 4, 5, 6, 7, 8, 9)
W4A4_WGMMA(16, 8, 9, 10, 11, 12, 13)
W4A4_WGMMA(32, 16, 17, 18, 19, 20, 21)
W4A4_WGMMA(64, 32, 33, 34, 35, 36, 37)
W4A4_WGMMA(96, 48, 49, 50, 51, 52, 53)
W4A4_WGMMA(128, 64, 65, 66, 67, 68, 69)
W4A4_WGMMA(144, 72, 73, 74, 75, 76, 77)
W4A4_WGMMA(160, 80, 81, 82, 83, 84, 85)
W4A4_WGMMA(176, 88, 89, 90, 91, 92, 93)
W4A4_WGMMA(184, 92, 93, 94, 95, 96, 97)
W4A4_WGMMA(192, 96, 97, 98, 99, 100, 101)
W4A4_WGMMA(200, 100, 101, 102, 103, 104, 105)
W4A4_WGMMA(208, 104, 105, 106, 107, 108, 109)
W4A4_WGMMA(224, 112, 113, 114, 115, 116, 117)
W4A4_WGMMA(240, 120, 121, 122, 123, 124, 125)
W4A4_WGMMA(256, 128, 129, 130, 131, 132, 133)

}  // namespace jax_w4a4::sm90
