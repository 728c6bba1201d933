// The tcgen05 instructions of Blackwell (sm_100a, sm_103a) that its kernels use, one thin function each.
// kGroup is the number of CTAs that share an MMA.
#pragma once

#include <cstdint>

#include "sm90_ptx.cuh"

namespace jax_w4a4::sm100 {

using namespace sm90;

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

#define W4A4_F16_MMA(GROUP)                                                       \
  asm volatile(                                                                   \
      "{\n"                                                                       \
      ".reg .pred p;\n"                                                           \
      "setp.ne.b32 p, %4, 0;\n"                                                   \
      "tcgen05.mma.cta_group::" #GROUP ".kind::f16 [%0], %1, %2, %3, p;\n"        \
      "}\n" ::"r"(d),                                                             \
      "l"(a), "l"(b), "r"(descriptor), "r"(accumulate)                            \
      : "memory")

// 16-bit operands: a step of the low-rank product.
template <int kGroup>
__device__ __forceinline__ void mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor,
                                        uint32_t accumulate) {
  if constexpr (kGroup == 1) {
    W4A4_F16_MMA(1);
  } else {
    W4A4_F16_MMA(2);
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

// kColumns columns of this warp's 32 lanes. The values may be used after wait_loads.
template <int kColumns>
__device__ __forceinline__ void tmem_load(uint32_t tmem, uint32_t* v);
template <>
__device__ __forceinline__ void tmem_load<16>(uint32_t tmem, uint32_t* v) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
      " %12, %13, %14, %15}, [%16];"
      : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]),
        "=r"(v[5]), "=r"(v[6]), "=r"(v[7]), "=r"(v[8]), "=r"(v[9]),
        "=r"(v[10]), "=r"(v[11]), "=r"(v[12]), "=r"(v[13]), "=r"(v[14]),
        "=r"(v[15])
      : "r"(tmem));
}
template <>
__device__ __forceinline__ void tmem_load<32>(uint32_t tmem, uint32_t* v) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11,"
      " %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23,"
      " %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
      : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]),
        "=r"(v[5]), "=r"(v[6]), "=r"(v[7]), "=r"(v[8]), "=r"(v[9]),
        "=r"(v[10]), "=r"(v[11]), "=r"(v[12]), "=r"(v[13]), "=r"(v[14]),
        "=r"(v[15]), "=r"(v[16]), "=r"(v[17]), "=r"(v[18]), "=r"(v[19]),
        "=r"(v[20]), "=r"(v[21]), "=r"(v[22]), "=r"(v[23]), "=r"(v[24]),
        "=r"(v[25]), "=r"(v[26]), "=r"(v[27]), "=r"(v[28]), "=r"(v[29]),
        "=r"(v[30]), "=r"(v[31])
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

}  // namespace jax_w4a4::sm100
