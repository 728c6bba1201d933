// The tcgen05 instructions of the sm_100a test kernels, one thin function each. kGroup is the number
// of CTAs that share an MMA.
#pragma once

#include <cstdint>

#include "sm90_ptx.cuh"

namespace jax_w4a4::sm100 {

using namespace sm90;

__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// Writes the first of `columns` columns to shared memory. A whole warp of every CTA of the group.
template <int kGroup>
__device__ __forceinline__ void tmem_alloc(uint32_t dst, uint32_t columns) {
  if constexpr (kGroup == 1) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(dst),
                 "r"(columns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  } else {
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(dst),
                 "r"(columns)
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
  }
}

template <int kGroup>
__device__ __forceinline__ void tmem_free(uint32_t tmem, uint32_t columns) {
  if constexpr (kGroup == 1) {
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(columns));
  } else {
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(columns));
  }
}

__device__ __forceinline__ void fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// One atom of scale factors, 128 rows x 4, to four columns.
template <int kGroup>
__device__ __forceinline__ void copy_scales(uint32_t tmem, uint64_t atom) {
  if constexpr (kGroup == 1) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tmem), "l"(atom));
  } else {
    asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(tmem), "l"(atom));
  }
}

#define W4A4_SCALED_MMA(GROUP, KIND)                                                           \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .pred p;\n"                                                                        \
      "setp.ne.b32 p, %6, 0;\n"                                                                \
      "tcgen05.mma.cta_group::" #GROUP ".kind::" KIND " [%0], %1, %2, %3, [%4], [%5], p;\n"    \
      "}\n" ::"r"(d),                                                                          \
      "l"(a), "l"(b), "r"(descriptor), "r"(scale_a), "r"(scale_b), "r"(accumulate)             \
      : "memory")

// kBlock: elements per scale factor, 16 (e4m3) or 32 (e8m0).
template <int kGroup, int kBlock>
__device__ __forceinline__ void mma_scaled(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor,
                                           uint32_t scale_a, uint32_t scale_b,
                                           uint32_t accumulate) {
  if constexpr (kGroup == 1 && kBlock == 16) {
    W4A4_SCALED_MMA(1, "mxf4nvf4.block_scale.scale_vec::4X");
  } else if constexpr (kGroup == 2 && kBlock == 16) {
    W4A4_SCALED_MMA(2, "mxf4nvf4.block_scale.scale_vec::4X");
  } else if constexpr (kGroup == 1) {
    W4A4_SCALED_MMA(1, "mxf4.block_scale.scale_vec::2X");
  } else {
    W4A4_SCALED_MMA(2, "mxf4.block_scale.scale_vec::2X");
  }
}

// bf16 operands, always accumulating: a step of the low-rank product.
template <int kGroup>
__device__ __forceinline__ void mma_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor) {
  if constexpr (kGroup == 1) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(descriptor)
        : "memory");
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
        "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(descriptor)
        : "memory");
  }
}

// Arrives on the barrier at this offset in every CTA of the group when all MMAs so far are done.
template <int kGroup>
__device__ __forceinline__ void commit(uint32_t barrier) {
  if constexpr (kGroup == 1) {
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
        " [%0], %1;" ::"r"(barrier),
        "h"(static_cast<uint16_t>(3))
        : "memory");
  }
}

// 16 columns of this warp's 32 lanes. The values may be used after wait_loads.
__device__ __forceinline__ void tmem_load(uint32_t tmem, uint32_t (&v)[16]) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
      " %12, %13, %14, %15}, [%16];"
      : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]),
        "=r"(v[7]), "=r"(v[8]), "=r"(v[9]), "=r"(v[10]), "=r"(v[11]), "=r"(v[12]), "=r"(v[13]),
        "=r"(v[14]), "=r"(v[15])
      : "r"(tmem));
}
__device__ __forceinline__ void wait_loads() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

// A box of 128-byte rows; in a pair the bytes count on the leader's barrier, whose address the peer
// gets by clearing the bit that tells the two apart.
template <int kGroup>
__device__ __forceinline__ void load_box(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                         int inner, int outer) {
  if constexpr (kGroup == 1) {
    tma_load_2d(dst, map, barrier, inner, outer);
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
        "l"(map), "r"(barrier & 0xFEFFFFFF), "r"(inner), "r"(outer)
        : "memory");
  }
}

// K-major rows of 128 bytes with the 128-byte swizzle, atoms of 8 rows.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address) {
  return uint64_t{2} << 61 | uint64_t{1} << 46 | uint64_t{64} << 32 | (address & 0x3FFFF) >> 4;
}
// 32 rows of 16 bytes, one after the other.
__device__ __forceinline__ uint64_t scale_descriptor(uint32_t address) {
  return uint64_t{1} << 46 | uint64_t{8} << 32 | (address & 0x3FFFF) >> 4;
}

// e2m1 operands; scales e4m3 (16) or e8m0 (32).
__host__ __device__ constexpr uint32_t scaled_descriptor(int m, int n, int block) {
  return 1u << 7 | 1u << 10 | static_cast<uint32_t>(n / 8) << 17 | (block == 32 ? 1u : 0u) << 23 |
         static_cast<uint32_t>(m / 16) << 24;
}
// bf16 operands, fp32 accumulator.
__host__ __device__ constexpr uint32_t bf16_descriptor(int m, int n) {
  return 1u << 4 | 1u << 7 | 1u << 10 | static_cast<uint32_t>(n / 8) << 17 |
         static_cast<uint32_t>(m / 16) << 24;
}

}  // namespace jax_w4a4::sm100
