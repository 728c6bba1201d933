// What test_build.py runs of cuda/ on the CPU: the format functions that the
// kernels are made of, and the checks that the handlers do on a plan.
#include <cstdint>

#include "formats.cuh"
#include "plan.h"
#include "sm90_decode.h"

namespace ffi = ::xla::ffi;
using namespace jax_w4a4;

namespace jax_w4a4 {
// Stand in for the kernel tables: the tiles of sm90_gemm_v1.cu and those that
// CMakeLists.txt compiles of GEMM v2 and of the decode kernel.
static const int kKernel = 0;
const void* GemmV1Kernel(Format, int tile_m) {
  return tile_m == 32 || tile_m == 64 || tile_m == 128 ? &kKernel : nullptr;
}
const void* GemmV2Kernel(GemmV2Path path, int tile_m, int cluster) {
#define W4A4_KERNEL(name, tile) \
  || (path == GemmV2Path::k##name && tile_m == tile)
  const bool compiled = false W4A4_GEMM_V2_KERNELS;
#undef W4A4_KERNEL
  return compiled && (cluster == 1 || cluster == 2) ? &kKernel : nullptr;
}
const void* GroupedKernel(GemmV2Path path, int tile_m) {
#define W4A4_KERNEL(name, tile) \
  || (path == GemmV2Path::k##name && tile_m == tile)
  const bool compiled = false W4A4_GROUPED_KERNELS;
#undef W4A4_KERNEL
  return compiled ? &kKernel : nullptr;
}
const bool kBuiltForSm100 = true;
const void* Sm100GemmKernel(Format format, int group, int tile_n) {
  const bool compiled = tile_n == 256 || tile_n == 128 || (tile_n == 64 && group == 1);
  return format != Format::kInt4 && compiled && (group == 1 || group == 2) ? &kKernel : nullptr;
}
const void* DecodeKernel(GemmV2Path path, int tile_m, int tile_n) {
#define W4A4_KERNEL(name, tile) \
  || (path == GemmV2Path::k##name && tile_m == tile)
  const bool compiled = false W4A4_DECODE_KERNELS;
#undef W4A4_KERNEL
  return compiled && tile_n >= 8 && tile_n <= kDecodeMaxTileN && tile_n % 8 == 0
             ? &kKernel
             : nullptr;
}
}  // namespace jax_w4a4

extern "C" {

// Offsets of the scale words of every row and atom, rows first.
void ScaleWords(int64_t rows, int64_t atoms, int64_t* out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t a = 0; a < atoms; ++a) {
      out[r * atoms + a] = Sm100ScaleWord(r, a, atoms);
    }
  }
}
uint64_t OperandDescriptor(uint32_t address) { return Sm100OperandDescriptor(address); }
uint64_t ScaleDescriptor(uint32_t address) { return Sm100ScaleDescriptor(address); }
uint32_t ScaledInstruction(int m, int n, int block, int first) {
  return Sm100ScaledInstruction(m, n, block, first);
}
uint32_t F16Instruction(int m, int n, int bf16) {
  return Sm100F16Instruction(m, n, bf16 != 0);
}
int Accumulators(int tile_n, int block) { return Sm100Accumulators(tile_n, block); }
int ScaleColumns(int tile_n, int block) { return Sm100ScaleColumns(tile_n, block); }
int64_t AtomsAlongK(int64_t k_pad, int block) { return Sm100Atoms(k_pad, block); }

// Of sm90_decode: boxes of block scales, and how many have room.
void DecodeScales(int path, int64_t tile_m, int64_t tile_n, int64_t k_pad, int64_t splits,
                  int64_t stages, int64_t* out) {
  const auto p = static_cast<GemmV2Path>(path);
  out[0] = DecodeScaleBoxes(p, tile_m, tile_n, k_pad, splits);
  out[1] = DecodeScaleSlots(p, tile_m, tile_n, k_pad, splits, stages);
}

// kind: 0 e2m1, 1 s4, 2 u4, 3 e4m3, 4 e8m0, 5 f16, 6 bf16
void Decode(int kind, const uint32_t* in, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t x = in[i];
    out[i] = kind == 0   ? DecodeE2m1(x)
             : kind == 1 ? DecodeS4(x)
             : kind == 2 ? DecodeU4(x)
             : kind == 3 ? DecodeE4m3(x)
             : kind == 4 ? DecodeE8m0(x)
             : kind == 5 ? DecodeF16(x)
                         : DecodeBf16(x);
  }
}

// kind: 0 e2m1, 3 e4m3, 5 f16, 6 bf16
void Encode(int kind, const float* in, uint32_t* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const float x = in[i];
    out[i] = kind == 0   ? EncodeE2m1(x)
             : kind == 3 ? EncodeE4m3(x)
             : kind == 5 ? EncodeF16(x)
                         : EncodeBf16(x);
  }
}

void PackPairs(const float* in, uint32_t* out, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    out[i] = PackExactBf16(in[2 * i], in[2 * i + 1]);
  }
}
}

template <Format kFormat>
void QuantizeBlocks(const float* v, int64_t blocks, int block, int scale_dtype,
                    bool is_unsigned, int rule, uint8_t* codes,
                    uint32_t* scales) {
  for (int64_t b = 0; b < blocks; ++b, v += block, codes += block) {
    uint32_t amax = 0;
    for (int i = 0; i < block; ++i) {
      amax = AccumulateAbsMax(amax, Flush(v[i]), is_unsigned);
    }
    const BlockScale scale =
        ChooseScale<kFormat>(amax, is_unsigned, static_cast<ScaleRule>(rule),
                             static_cast<DType>(scale_dtype));
    scales[b] = scale.bits;
    for (int i = 0; i < block; ++i) {
      codes[i] = scale.live ? static_cast<uint8_t>(EncodeValue<kFormat>(
                                  Flush(v[i]), scale, is_unsigned))
                            : 0;
    }
  }
}

extern "C" void Quantize(int format, const float* v, int64_t blocks, int block,
                         int scale_dtype, int is_unsigned, int rule,
                         uint8_t* codes, uint32_t* scales) {
  auto run = format == 0   ? QuantizeBlocks<Format::kNvfp4>
             : format == 1 ? QuantizeBlocks<Format::kMxfp4>
                           : QuantizeBlocks<Format::kInt4>;
  run(v, blocks, block, scale_dtype, is_unsigned != 0, rule, codes, scales);
}

static ffi::Error CheckRegions(ffi::AnyBuffer lora_up, ffi::AnyBuffer x,
                               ffi::Result<ffi::AnyBuffer>, PlanAttrs plan,
                               SpecAttrs spec) {
  const int64_t rank = lora_up.dimensions()[1];
  if (ffi::Error e = CheckGemmRegions(plan, spec, rank); e.failure()) return e;
  return CheckQuantizer(plan, spec, x.dimensions()[0], rank);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Instantiate, CheckAttrs,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<PlanAttrs>("plan")
                                  .Attr<SpecAttrs>("spec"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(Execute, CheckRegions,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()  // lora_up (n, r)
                                  .Arg<ffi::AnyBuffer>()  // of m rows
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<PlanAttrs>("plan")
                                  .Attr<SpecAttrs>("spec"));
