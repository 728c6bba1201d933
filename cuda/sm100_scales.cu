#include "sm100_scales.h"

#include "sm100_scales.cuh"

namespace jax_w4a4 {
namespace {

constexpr int kThreads = 256;

struct Args {
  sm100::ScaleRows act, weight;
  int atoms;
  int act_ctas;
};

__global__ void __launch_bounds__(kThreads)
    scales_kernel(const __grid_constant__ Args args) {
  __shared__ __align__(16) uint32_t shared[sm100::kCtaAtoms * kSm100AtomBytes / 4];
  const int cta = blockIdx.x;
  const bool act = cta < args.act_ctas;
  sm100::write_atoms(act ? args.act : args.weight, args.atoms,
                     act ? cta : cta - args.act_ctas, shared);
}

}  // namespace

int LaunchSm100Scales(const Sm100ScalesParams& p, cudaStream_t stream) {
  const int64_t atoms = Sm100Atoms(p.k_pad, p.block);
  const int blocks = p.k_pad / p.block;
  Args a = {};
  a.act = {p.act_scale, p.act_atoms, static_cast<int>(p.m), blocks};
  a.weight = {p.weight_scale, p.weight_atoms, static_cast<int>(p.n), blocks};
  a.atoms = static_cast<int>(atoms);
  const int64_t act_ctas = sm100::scale_ctas(p.m, atoms);
  const int64_t ctas = act_ctas + sm100::scale_ctas(p.n, atoms);
  a.act_ctas = static_cast<int>(act_ctas);
  void* args[] = {&a};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&scales_kernel),
                          dim3(static_cast<unsigned>(ctas)), dim3(kThreads), args,
                          0, stream);
}

}  // namespace jax_w4a4
