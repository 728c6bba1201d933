// XLA FFI handlers and what the Python module reads back from them.
#ifndef JAX_W4A4_CUDA_FFI_HANDLERS_H_
#define JAX_W4A4_CUDA_FFI_HANDLERS_H_

#include <cstdint>
#include <string>

#include "xla/ffi/api/c_api.h"

// Handler symbols. Instantiate takes the attributes only and runs when XLA
// compiles; execute launches. All are stateless.
extern "C" {
XLA_FFI_Error* W4a4Instantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* W4a4Quantize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* W4a4Gemm(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* W4a4Matmul(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* W4a4Grouped(XLA_FFI_CallFrame* call_frame);
}

namespace jax_w4a4 {

// Execute-handler calls since load, and how many of them ran while their
// stream was being captured into a CUDA graph.
struct CallCounts {
  int64_t calls;
  int64_t captured;
};
CallCounts GetCallCounts();

// For measuring what dependent launch is worth: with `enabled` false, the matmul
// handler launches its gemm as an ordinary kernel. On by default; affects what
// is launched or captured from then on.
void SetDependentLaunch(bool enabled);

// The last gemm launch of this process: its configuration, and what the driver
// says about the kernel.
struct LaunchReport {
  int64_t grid_x, grid_y, block, cluster, dynamic_smem_bytes;
  int64_t static_smem_bytes, max_dynamic_smem_bytes, registers, local_bytes;
  int64_t blocks_per_sm;
};
// False if there was no launch or the driver refused; then `error` says which.
bool GetLastLaunch(LaunchReport* report, std::string* error);

}  // namespace jax_w4a4

#endif  // JAX_W4A4_CUDA_FFI_HANDLERS_H_
