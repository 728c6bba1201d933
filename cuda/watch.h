// Waits that end: what a build with JAX_W4A4_CHECKED adds to the waits for mbarriers, for the
// self-test (docs/selftest.md). A wait for an mbarrier that takes kTellNs leaves a record of what is
// waited for in memory of the host, and after kTrapNs the kernel traps. In between the other threads
// that are stuck leave theirs, and the host reads them while the device still answers. Without the
// macro nothing here is code.
//
// Named barriers, the cluster barrier, griddepcontrol.wait and tcgen05.alloc have no form that could
// give up: they wait for as long as it takes.
#ifndef JAX_W4A4_CUDA_WATCH_H_
#define JAX_W4A4_CUDA_WATCH_H_

#include <cstdint>
#include <string>
#include <vector>

namespace jax_w4a4 {

// Every ring of the kernels: kernel, ring, the role that fills it (it waits for `empty` barriers), the
// role that empties it (for `full` ones). Those from kDecodeSums on are one barrier each, or a place in
// memory, and nothing empties them.
#define W4A4_RINGS(RING)                                           \
  RING(kGemmMain, "sm90_gemm_v2", "main", "load", "compute")       \
  RING(kGemmTokens, "sm90_gemm_v2", "tokens", "load", "compute")   \
  RING(kGroupedMain, "sm90_grouped", "main", "load", "compute")    \
  RING(kGroupedTokens, "sm90_grouped", "tokens", "load", "compute") \
  RING(kDecode, "sm90_decode", "main", "load", "multiply")         \
  RING(kDown, "sm90_down_v2", "main", "load", "project")           \
  RING(kSm100Main, "sm100_gemm", "main", "load", "mma")            \
  RING(kSm100Accumulators, "sm100_gemm", "accumulators", "mma", "store") \
  RING(kSm100Down, "sm100_down", "main", "load", "project")        \
  RING(kDecodeDown, "sm90_decode", "LoRA-down", "load", "project") \
  RING(kDecodeSums, "sm90_decode_quantize", "sums", "project", "project") \
  RING(kDecodeScales, "sm90_decode", "scales", "load", "multiply") \
  RING(kDecodeSeen, "sm90_decode", "last stage's scales", "multiply", "load") \
  RING(kDecodePeer, "sm90_decode", "peer's sums", "multiply", "multiply") \
  RING(kDecodeLoraAct, "sm90_decode", "lora_act", "project", "add")

enum class RingName : uint32_t {
#define W4A4_RING(id, ...) id,
  W4A4_RINGS(W4A4_RING)
#undef W4A4_RING
};

#ifdef JAX_W4A4_CHECKED

struct alignas(16) WaitRecord {
  uint32_t what;   // kWaitMagic | ring | full? 2 : 0 | parity
  uint32_t where;  // slot of the ring, warp, CTA of the cluster
  uint32_t cta;    // of the grid
  uint32_t since;  // low half of globaltimer when the wait began
};
constexpr uint32_t kWaitMagic = 0x57340000;  // + ring << 8
constexpr int kWaitCtas = 512;               // that have a place of their own
constexpr int kWaitWarps = 32;
constexpr uint32_t kTellNs = 2000000000u;
constexpr uint32_t kTrapNs = 3000000000u;  // below 2^32, where the half of the timer wraps

// Records of this process, (CTA % kWaitCtas, warp), the same address on host and devices; null where
// there is no memory for them, and then kernels only trap. Made by the first launch.
WaitRecord* WaitRecords();

// The wait of each of so many records, the one that began first ahead.
std::vector<std::string> StuckWaits(const WaitRecord* records, int count);

// Of this process, so far.
std::vector<std::string> StuckWaits();

// Base of kernel arguments.
struct Watched {
  WaitRecord* wait_records = WaitRecords();
};

struct Watch {
  RingName ring;
  WaitRecord* records;
};

#else

struct Watched {};
struct Watch {};

#endif

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_WATCH_H_
