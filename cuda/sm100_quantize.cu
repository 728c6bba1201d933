// Host side of the quantizer for Blackwell.
#include "sm100_quantize.h"

#include <cuda_runtime.h>

#include "sm100_quantize.cuh"

namespace jax_w4a4 {
namespace {

template <Format kFormat, sm90::Source kSource>
const void* Kernel(int chunks, int warps) {
#define W4A4_CASE(c, w)                                                     \
  if (chunks == c && warps == w) {                                          \
    return reinterpret_cast<const void*>(                                   \
        &sm100::quantize_kernel<kFormat, kSource, c, w>);                   \
  }
  W4A4_CASE(4, 4)
  W4A4_CASE(4, 8)
  W4A4_CASE(8, 8)
  W4A4_CASE(8, 16)
#undef W4A4_CASE
  return nullptr;
}

template <Format kFormat>
const void* Kernel(sm90::Source source, int chunks, int warps) {
  switch (source) {
    case sm90::Source::kPlain:
      return Kernel<kFormat, sm90::Source::kPlain>(chunks, warps);
    case sm90::Source::kBf16:
      return Kernel<kFormat, sm90::Source::kBf16>(chunks, warps);
    case sm90::Source::kAny:
      return Kernel<kFormat, sm90::Source::kAny>(chunks, warps);
  }
  return nullptr;
}

}  // namespace

int LaunchSm100Quantize(Format format, const Sm100QuantizeParams& p,
                        cudaStream_t stream) {
  const sm90::Source source = sm90::source_of(p);
  const bool nvfp4 = format == Format::kNvfp4;
  const void* kernel = nvfp4 ? Kernel<Format::kNvfp4>(source, p.chunks, p.warps)
                             : Kernel<Format::kMxfp4>(source, p.chunks, p.warps);
  if (kernel == nullptr || format == Format::kInt4) {
    return cudaErrorInvalidDeviceFunction;
  }
  const int block = nvfp4 ? 16 : 32;
  const int64_t atoms = Sm100Atoms(p.k_pad, block);
  sm100::QuantizeArgs a = {};
  // The layout of the scale factors has whole stages.
  const int layout = static_cast<int>(atoms) * kSm100AtomBlocks * block;
  sm90::set_token_args(&a, p, layout, DType::kF32);
  a.packed = static_cast<uint32_t*>(p.packed);
  a.chunks = p.k_pad / 8;
  a.act_atoms = p.act_atoms;
  a.weight = {p.weight_scale, p.weight_atoms, static_cast<int>(p.n),
              p.k_pad / block};
  a.atoms = static_cast<int>(atoms);
  a.weight_ctas = static_cast<int>(sm100::scale_ctas(p.n, atoms));
  TokenParams whole = p;  // row tiles
  whole.m = Sm100AtomTiles(p.m) * kSm100AtomRows;
  return sm90::launch_tokens(kernel, &a, whole, a.weight_ctas, stream);
}

}  // namespace jax_w4a4
