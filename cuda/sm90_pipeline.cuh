// Producer/consumer rings over mbarriers: the one synchronisation skeleton of the v2 kernels, those of
// Blackwell (sm100_gemm.cuh) included.
//
// A ring has `stages` slots. full[s] completes when a slot's bytes have landed, empty[s] when every
// consumer warp has released it. Each role walks the slots with its own RingState, which is never
// reset at a tile boundary: the phase bit flips when the walk wraps, so a producer may run any
// number of tiles ahead, up to the ring's depth. tests/pipeline_model.py explores this protocol
// exhaustively for small rings.
#pragma once

#include <cstdint>

#include "sm90_ptx.cuh"
#include "sm90_watch.cuh"

namespace jax_w4a4::sm90 {

struct RingState {
  int slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++slot == stages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

class Ring {
 public:
  // `barriers` is the shared address of 2 * stages 8-byte barriers.
  __device__ __forceinline__ Ring(uint32_t barriers, int stages, const Watch& watch)
      : full_(barriers), empty_(barriers + 8 * stages), stages_(stages) {
#ifdef JAX_W4A4_CHECKED
    watch_ = watch;
#endif
  }

  // One thread. `releases` arrivals empty a slot: consumer warps x CTAs that a slot is shared with.
  __device__ __forceinline__ void init(int releases) const {
    init_full(0, stages_);
    init_empty(releases);
  }
  // Its parts, where two threads share them.
  __device__ __forceinline__ void init_full(int first, int last) const {
#pragma unroll 1
    for (int s = first; s < last; ++s) mbarrier_init(full_ + 8 * s, 1);
  }
  __device__ __forceinline__ void init_empty(int releases) const {
#pragma unroll 1
    for (int s = 0; s < stages_; ++s) mbarrier_init(empty_ + 8 * s, releases);
  }

  __device__ __forceinline__ void advance(RingState& state) const { state.advance(stages_); }

  __device__ __forceinline__ uint32_t full(const RingState& state) const {
    return full_ + 8 * state.slot;
  }
  __device__ __forceinline__ uint32_t empty(const RingState& state) const {
    return empty_ + 8 * state.slot;
  }

  // Producer: waits for the slot to be free, arms its byte count, returns the barrier to load on.
  // The wait covers every CTA that the slot's multicast writes to, since they all release to it.
  __device__ __forceinline__ uint32_t acquire(const RingState& state, uint32_t bytes) const {
    wait_empty(state);
    mbarrier_arrive_expect_tx(full(state), bytes);
    return full(state);
  }

  __device__ __forceinline__ void wait_empty(const RingState& state) const {
    mbarrier_wait(empty(state), state.phase ^ 1);
  }

  __device__ __forceinline__ uint32_t full(int slot) const { return full_ + 8 * slot; }

  __device__ __forceinline__ void wait_full(const RingState& state) const {
    mbarrier_wait(full(state), state.phase);
  }

  // Consumer warp: one arrival per CTA that writes this slot, if `condition` (warp-uniform).
  template <int kCluster>
  __device__ __forceinline__ void release(int slot, uint32_t lane, bool condition = true) const {
    const uint32_t barrier = empty_ + 8 * slot;
    if constexpr (kCluster == 1) {
      mbarrier_arrive_if(barrier, condition && lane == 0);
    } else {
      mbarrier_arrive_cluster_if(barrier, lane, condition && lane < kCluster);
    }
  }

 private:
#ifdef JAX_W4A4_CHECKED
  Watch watch_;

  // In place of the function: a ring's waits end.
  __device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) const {
    const bool full = barrier < empty_;
    bounded_wait(watch_, barrier, parity, full, (barrier - (full ? full_ : empty_)) / 8);
  }
#endif

  uint32_t full_;
  uint32_t empty_;
  int stages_;
};

}  // namespace jax_w4a4::sm90
