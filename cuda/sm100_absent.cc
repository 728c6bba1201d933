// In place of the kernels for Blackwell where the build has no code for it.
#include <cuda_runtime_api.h>

#include "sm100_down.h"
#include "sm100_gemm.h"
#include "sm100_quantize.h"
#include "sm100_scales.h"

namespace jax_w4a4 {

const bool kBuiltForSm100 = false;

const void* Sm100GemmKernel(Format, int, int) { return nullptr; }

LaunchResult LaunchSm100Gemm(Format, int, int, const Sm100GemmParams&, bool, int,
                             cudaStream_t) {
  return {cudaErrorInvalidDeviceFunction, nullptr, 0};
}

int LaunchSm100Scales(const Sm100ScalesParams&, cudaStream_t) {
  return cudaErrorInvalidDeviceFunction;
}

int LaunchSm100Quantize(Format, const Sm100QuantizeParams&, cudaStream_t) {
  return cudaErrorInvalidDeviceFunction;
}

int LaunchSm100Down(const Sm100DownParams&, int, cudaStream_t) {
  return cudaErrorInvalidDeviceFunction;
}

}  // namespace jax_w4a4
