// Python module jax_w4a4._cuda: handler capsules and build facts. Plain C++;
// knows no CUDA. The same source makes jax_w4a4._cuda_checked, whose kernels
// bound their waits (watch.h).
#include <nanobind/nanobind.h>

#include <string>

#include "ffi_handlers.h"
#include "watch.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace jax_w4a4 {
namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Target(XLA_FFI_Handler* execute) {
  nb::dict stages;
  stages["instantiate"] = Capsule(W4a4Instantiate);
  stages["execute"] = Capsule(execute);
  return stages;
}

nb::dict Registrations() {
  nb::dict targets;
  targets["jax_w4a4.quantize.v3"] = Target(W4a4Quantize);
  targets["jax_w4a4.gemm.v4"] = Target(W4a4Gemm);
  targets["jax_w4a4.matmul.v4"] = Target(W4a4Matmul);
  targets["jax_w4a4.grouped.v2"] = Target(W4a4Grouped);
  return targets;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["cuda_archs"] = JAX_W4A4_CUDA_ARCHS;
  info["nvcc"] = JAX_W4A4_NVCC_VERSION;
  info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  info["kernels"] = JAX_W4A4_KERNELS;
#ifdef JAX_W4A4_CHECKED
  info["checked"] = true;
#else
  info["checked"] = false;
#endif
  return info;
}

nb::dict Counters() {
  const CallCounts counts = GetCallCounts();
  nb::dict result;
  result["calls"] = counts.calls;
  result["captured"] = counts.captured;
  return result;
}

nb::dict LastLaunch() {
  LaunchReport report;
  std::string error;
  if (!GetLastLaunch(&report, &error)) {
    throw nb::value_error(("jax_w4a4: " + error).c_str());
  }
  nb::dict result;
  result["grid"] = nb::make_tuple(report.grid_x, report.grid_y);
  result["block"] = report.block;
  result["cluster"] = report.cluster;
  result["dynamic_smem_bytes"] = report.dynamic_smem_bytes;
  result["static_smem_bytes"] = report.static_smem_bytes;
  result["max_dynamic_smem_bytes"] = report.max_dynamic_smem_bytes;
  result["registers"] = report.registers;
  result["local_bytes"] = report.local_bytes;
  result["blocks_per_sm"] = report.blocks_per_sm;
  return result;
}

#ifdef JAX_W4A4_CHECKED
nb::list Stuck() {
  nb::list result;
  for (const std::string& text : StuckWaits()) {
    result.append(text.c_str());
  }
  return result;
}
#endif

}  // namespace
}  // namespace jax_w4a4

NB_MODULE(JAX_W4A4_MODULE, m) {
  m.def("registrations", &jax_w4a4::Registrations);
  m.def("build_info", &jax_w4a4::BuildInfo);
  m.def("counters", &jax_w4a4::Counters);
  m.def("last_launch", &jax_w4a4::LastLaunch);
  m.def("set_dependent_launch", &jax_w4a4::SetDependentLaunch);
#ifdef JAX_W4A4_CHECKED
  m.def("stuck_waits", &jax_w4a4::Stuck);
#endif
}
