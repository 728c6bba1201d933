// The device side of watch.h.
#pragma once

#include <cstdint>

#include "sm90_ptx.cuh"
#include "watch.h"

namespace jax_w4a4::sm90 {

#ifdef JAX_W4A4_CHECKED

__device__ __forceinline__ Watch watch(const Watched& args, RingName ring) {
  return {ring, args.wait_records};
}

__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ uint32_t nanoseconds() {
  uint32_t now;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
  return now;
}

// Volatile throughout: worked out in front of a loop, all this would take registers from it.
__device__ __forceinline__ void tell(const Watch& watch, bool full, uint32_t slot, uint32_t parity,
                                     uint32_t since) {
  if (watch.records == nullptr) return;
  uint32_t thread, cta, row, width, layer, height;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(row));
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(width));
  asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(layer));
  asm volatile("mov.u32 %0, %%nctaid.y;" : "=r"(height));
  cta += (layer * height + row) * width;
  const uint32_t warp = thread / 32;
  const WaitRecord* record = watch.records + cta % kWaitCtas * kWaitWarps + warp % kWaitWarps;
  // One store: the host finds all of a record or nothing.
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\nfence.acq_rel.sys;" ::"l"(record),
               "r"(kWaitMagic | static_cast<uint32_t>(watch.ring) << 8 | full << 1 | parity),
               "r"(slot << 16 | warp << 8 | cluster_rank()), "r"(cta), "r"(since)
               : "memory");
}

__device__ __forceinline__ void bounded_wait(const Watch& watch, uint32_t barrier, uint32_t parity,
                                             bool full, uint32_t slot) {
  if (mbarrier_test_wait(barrier, parity)) return;
  const uint32_t since = nanoseconds();
  while (!mbarrier_try_wait(barrier, parity)) {
    const uint32_t waited = nanoseconds() - since;
    if (waited >= kTellNs) tell(watch, full, slot, parity, since);
    if (waited >= kTrapNs) asm volatile("trap;");
  }
}

// For a barrier of no ring.
__device__ __forceinline__ void watched_wait(const Watched& args, RingName name, uint32_t barrier,
                                             uint32_t parity) {
  bounded_wait(watch(args, name), barrier, parity, true, 0);
}

// For memory of other CTAs: `look` tells whether all is there.
template <class Look>
__device__ __forceinline__ void watched_look(const Watched& args, RingName name, Look look) {
  if (look()) return;
  const uint32_t since = nanoseconds();
  while (!look()) {
    const uint32_t waited = nanoseconds() - since;
    if (waited >= kTellNs) tell(watch(args, name), true, 0, 0, since);
    if (waited >= kTrapNs) asm volatile("trap;");
  }
}

#else

template <class Args>
__device__ __forceinline__ Watch watch(const Args&, RingName) {
  return {};
}

__device__ __forceinline__ void watched_wait(const Watched&, RingName, uint32_t barrier,
                                             uint32_t parity) {
  mbarrier_wait(barrier, parity);
}

template <class Look>
__device__ __forceinline__ void watched_look(const Watched&, RingName, Look look) {
  while (!look()) {
  }
}

#endif

}  // namespace jax_w4a4::sm90
