// Memory for the records of watch.h.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>

#include "watch.h"

namespace jax_w4a4 {
namespace {

// What WaitRecords has made.
std::atomic<WaitRecord*> g_records;

WaitRecord* Allocate() {
  // The first launch may be one that is being captured into a graph, where an
  // allocation is allowed in this mode only.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const size_t bytes = sizeof(WaitRecord) * kWaitCtas * kWaitWarps;
  void* made = nullptr;
  // Of the host and pinned: a trap takes the device's memory with it.
  const cudaError_t code = cudaHostAlloc(
      &made, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (code != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  std::memset(made, 0, bytes);
  g_records = static_cast<WaitRecord*>(made);
  return g_records;
}

}  // namespace

WaitRecord* WaitRecords() {
  static WaitRecord* const records = Allocate();
  return records;
}

std::vector<std::string> StuckWaits() {
  const WaitRecord* records = g_records;
  return StuckWaits(records, records == nullptr ? 0 : kWaitCtas * kWaitWarps);
}

}  // namespace jax_w4a4
