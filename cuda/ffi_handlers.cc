#include "ffi_handlers.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "plan.h"
#include "sm100_down.h"
#include "sm100_gemm.h"
#include "sm100_quantize.h"
#include "sm100_scales.h"
#include "sm90_decode.h"
#include "sm90_decode_quantize.h"
#include "sm90_down_v2.h"
#include "sm90_gemm_v1.h"
#include "sm90_gemm_v2.h"
#include "sm90_grouped.h"
#include "sm90_quantize_public.h"
#include "sm90_quantize_v1.h"
#include "sm90_quantize_v2.h"
#include "sm90_repack_v2.h"
#include "xla/ffi/api/ffi.h"

namespace jax_w4a4 {
namespace {

namespace ffi = ::xla::ffi;
using ffi::AnyBuffer;
using ffi::DataType;
using ffi::Error;
using ffi::ErrorCode;
using Result = ffi::Result<AnyBuffer>;

std::atomic<int64_t> g_calls{0};
std::atomic<int64_t> g_captured{0};
std::atomic<bool> g_dependent_launch{true};

// Returns from the enclosing function when `expr` is an error.
#define W4A4_RETURN_IF_ERROR(expr)               \
  do {                                           \
    if (Error error = (expr); error.failure()) { \
      return error;                              \
    }                                            \
  } while (false)

// ---------------------------------------------------------------------------
// Buffers
// ---------------------------------------------------------------------------

constexpr std::initializer_list<DataType> kFloats = {
    DataType::F32, DataType::F16, DataType::BF16};
constexpr int64_t kAny = -1;

DType ToDType(DataType type) {
  switch (type) {
    case DataType::F16:
      return DType::kF16;
    case DataType::BF16:
      return DType::kBf16;
    case DataType::F8E4M3FN:
      return DType::kE4m3;
    case DataType::F8E8M0FNU:
      return DType::kE8m0;
    default:
      return DType::kF32;
  }
}

std::string Describe(const AnyBuffer& buffer) {
  std::ostringstream out;
  out << buffer.element_type() << "[";
  const char* separator = "";
  for (int64_t dim : buffer.dimensions()) {
    out << separator << dim;
    separator = ",";
  }
  out << "]";
  return out.str();
}

// Checks dtype, rank, dimensions (kAny matches all) and 16-byte alignment.
Error Check(const char* name, const AnyBuffer& buffer,
            std::initializer_list<DataType> types,
            std::initializer_list<int64_t> dims) {
  bool type_ok = false;
  for (DataType type : types) type_ok |= buffer.element_type() == type;
  const auto got = buffer.dimensions();
  bool dims_ok = got.size() == dims.size();
  size_t i = 0;
  for (int64_t dim : dims) {
    if (!dims_ok) break;
    dims_ok = dim == kAny || got[i] == dim;
    ++i;
  }
  if (type_ok && dims_ok) {
    const auto address = reinterpret_cast<std::uintptr_t>(buffer.untyped_data());
    if (buffer.element_count() == 0 || address % 16 == 0) {
      return Error::Success();
    }
    std::ostringstream out;
    out << "jax_w4a4: " << name << " " << Describe(buffer) << " is at address 0x"
        << std::hex << address << "; expected a multiple of 16 bytes";
    return Error(ErrorCode::kInvalidArgument, out.str());
  }
  std::ostringstream out;
  out << "jax_w4a4: " << name << " is " << Describe(buffer) << "; expected ";
  const char* separator = "";
  for (DataType type : types) {
    out << separator << type;
    separator = " or ";
  }
  out << " [";
  separator = "";
  for (int64_t dim : dims) {
    out << separator;
    if (dim == kAny) {
      out << "*";
    } else {
      out << dim;
    }
    separator = ",";
  }
  out << "]";
  return Error(ErrorCode::kInvalidArgument, out.str());
}

// A float32 vector of `size`, or absent: no elements.
Error CheckOptional(const char* name, const AnyBuffer& buffer, int64_t size) {
  return Check(name, buffer, {DataType::F32},
               {buffer.element_count() == 0 ? 0 : size});
}

const float* OptionalData(const AnyBuffer& buffer) {
  return buffer.element_count() == 0
             ? nullptr
             : static_cast<const float*>(buffer.untyped_data());
}

// Dimension `axis` of a buffer, -1 if it has no such axis (Check then fails).
int64_t Dim(const AnyBuffer& buffer, size_t axis) {
  const auto dims = buffer.dimensions();
  return axis < dims.size() ? dims[axis] : -1;
}

Error CheckScales(const char* name, const AnyBuffer& buffer, int64_t rows,
                  const SpecAttrs& spec) {
  const int64_t blocks = spec.k_pad / spec.block_size;
  switch (static_cast<Format>(spec.format)) {
    case Format::kNvfp4:
      return Check(name, buffer, {DataType::F8E4M3FN}, {rows, blocks});
    case Format::kMxfp4:
      return Check(name, buffer, {DataType::F8E8M0FNU}, {rows, blocks});
    case Format::kInt4:
      break;
  }
  return Check(name, buffer, kFloats, {rows, blocks});
}

// ---------------------------------------------------------------------------
// Device
// ---------------------------------------------------------------------------

constexpr int kMaxDevices = 64;

Error CudaError(const char* what, int code) {
  return Error(ErrorCode::kInternal,
               std::string("jax_w4a4: ") + what + ": " +
                   cudaGetErrorString(static_cast<cudaError_t>(code)));
}

// Runs `expr`, a CUDA runtime call, and turns a failure into INTERNAL.
#define W4A4_CUDA(expr)                           \
  do {                                            \
    if (int code = (expr); code != cudaSuccess) { \
      return CudaError(#expr, code);              \
    }                                             \
  } while (false)

// Facts of a device, read once. Racing threads store the same values.
struct DeviceFacts {
  std::atomic<int> cc{0};
  std::atomic<int> smem_optin{0};
};

Error GetDevice(int* device, int* cc, int* smem_optin) {
  static DeviceFacts facts[kMaxDevices];
  W4A4_CUDA(cudaGetDevice(device));
  if (*device >= kMaxDevices) {
    return Error(ErrorCode::kFailedPrecondition,
                 "jax_w4a4: device ordinal " + std::to_string(*device) +
                     " is beyond the supported 64");
  }
  DeviceFacts& known = facts[*device];
  if (known.cc.load(std::memory_order_acquire) == 0) {
    int major = 0, minor = 0, optin = 0;
    W4A4_CUDA(cudaDeviceGetAttribute(
        &major, cudaDevAttrComputeCapabilityMajor, *device));
    W4A4_CUDA(cudaDeviceGetAttribute(
        &minor, cudaDevAttrComputeCapabilityMinor, *device));
    W4A4_CUDA(cudaDeviceGetAttribute(
        &optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, *device));
    known.smem_optin.store(optin, std::memory_order_relaxed);
    known.cc.store(10 * major + minor, std::memory_order_release);
  }
  *cc = known.cc.load(std::memory_order_acquire);
  *smem_optin = known.smem_optin.load(std::memory_order_relaxed);
  return Error::Success();
}

Error CheckDevice(const PlanAttrs& plan, int64_t smem_bytes, int* device) {
  int cc = 0, smem_optin = 0;
  W4A4_RETURN_IF_ERROR(GetDevice(device, &cc, &smem_optin));
  if (cc != plan.cc || smem_bytes > smem_optin) {
    std::ostringstream out;
    out << "jax_w4a4: plan made for sm_" << plan.cc << " with " << smem_bytes
        << " bytes of shared memory, but device " << *device << " is sm_" << cc
        << " and allows " << smem_optin
        << "; trace and compile the program on that device";
    return Error(ErrorCode::kFailedPrecondition, out.str());
  }
  return Error::Success();
}

// Raises the kernel's dynamic shared-memory limit on this device to `bytes`
// if it is lower. One attribute call per kernel, device and new maximum.
Error AllowSmem(Format format, int tile_m, int device, int bytes) {
  static std::atomic<int> allowed[3][3][kMaxDevices];
  const int tile = tile_m == 32 ? 0 : tile_m == 64 ? 1 : 2;
  std::atomic<int>& limit =
      allowed[static_cast<int>(format)][tile][device];
  if (limit.load(std::memory_order_acquire) >= bytes) return Error::Success();
  // Serialized so that a smaller plan can't lower what a larger one just set.
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (limit.load(std::memory_order_acquire) >= bytes) return Error::Success();
  W4A4_CUDA(cudaFuncSetAttribute(GemmV1Kernel(format, tile_m),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bytes));
  limit.store(bytes, std::memory_order_release);
  return Error::Success();
}

void CountCall(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  g_calls.fetch_add(1, std::memory_order_relaxed);
  if (status != cudaStreamCaptureStatusNone) {
    g_captured.fetch_add(1, std::memory_order_relaxed);
  }
}

struct LastLaunch {
  const void* kernel = nullptr;
  int device = 0;
  unsigned grid_x = 0, grid_y = 0;
  int block = 0;
  int smem_bytes = 0;
  int cluster = 1;
};
std::mutex g_last_mutex;
LastLaunch g_last;

// ---------------------------------------------------------------------------
// Compute: operands -> launches
// ---------------------------------------------------------------------------

struct QuantizeBuffers {
  AnyBuffer x, smooth, global_scale, lora_down;
  AnyBuffer packed, scales, lora_act;  // results
};

struct GemmBuffers {
  AnyBuffer act, act_scale, act_global_scale, lora_act;
  AnyBuffer weight, weight_scale, weight_global_scale, lora_up;
  AnyBuffer channel_scale, bias, scale_range;
  AnyBuffer out;  // result
};

// (rows, 2), or absent: no rows.
Error CheckRange(const AnyBuffer& b, int64_t n) {
  return Check("scale_range", b, {DataType::U8},
               {b.element_count() == 0 ? 0 : n, 2});
}

// Null where it is absent.
const uint8_t* RangeData(const AnyBuffer& b) {
  return b.element_count() == 0 ? nullptr
                                : static_cast<const uint8_t*>(b.untyped_data());
}

Error CheckQuantize(const QuantizeBuffers& b, const PlanAttrs& plan,
                    const SpecAttrs& spec) {
  const int64_t m = Dim(b.x, 0);
  const int64_t rank = Dim(b.lora_down, 1);
  W4A4_RETURN_IF_ERROR(Check("x", b.x, kFloats, {kAny, spec.k}));
  W4A4_RETURN_IF_ERROR(CheckOptional("smooth", b.smooth, spec.k));
  W4A4_RETURN_IF_ERROR(CheckOptional("act_global_scale", b.global_scale, 1));
  W4A4_RETURN_IF_ERROR(
      Check("lora_down", b.lora_down, kFloats, {spec.k, kAny}));
  W4A4_RETURN_IF_ERROR(
      Check("packed", b.packed, {DataType::U8}, {m, spec.k_pad / 2}));
  W4A4_RETURN_IF_ERROR(CheckScales("scales", b.scales, m, spec));
  W4A4_RETURN_IF_ERROR(Check("lora_act", b.lora_act, kFloats, {m, rank}));
  return CheckQuantizer(plan, spec, m, rank);
}

Error Quantize(cudaStream_t stream, const QuantizeBuffers& b,
               const SpecAttrs& spec) {
  QuantizeParams p = {};
  p.m = Dim(b.x, 0);
  if (p.m == 0) return Error::Success();
  p.x = b.x.untyped_data();
  p.smooth = OptionalData(b.smooth);
  p.global_scale = OptionalData(b.global_scale);
  p.lora_down = b.lora_down.untyped_data();
  p.packed = static_cast<uint8_t*>(b.packed.untyped_data());
  p.scales = b.scales.untyped_data();
  p.lora_act = b.lora_act.untyped_data();
  p.k = static_cast<int>(spec.k);
  p.k_pad = static_cast<int>(spec.k_pad);
  p.block = static_cast<int>(spec.block_size);
  p.rank = static_cast<int>(Dim(b.lora_down, 1));
  p.x_dtype = ToDType(b.x.element_type());
  p.scale_dtype = ToDType(b.scales.element_type());
  p.lora_down_dtype = ToDType(b.lora_down.element_type());
  p.lora_act_dtype = ToDType(b.lora_act.element_type());
  p.rule = static_cast<ScaleRule>(spec.act_rule);
  p.is_unsigned = spec.act_unsigned != 0;
  p.lora_smoothed = spec.lora_smoothed != 0;
  W4A4_CUDA(LaunchQuantizeV1(static_cast<Format>(spec.format), p, stream));
  return Error::Success();
}

Error CheckGemm(const GemmBuffers& b, const PlanAttrs& plan,
                const SpecAttrs& spec) {
  const int64_t m = Dim(b.act, 0);
  const int64_t n = Dim(b.weight, 0);
  const int64_t rank = Dim(b.lora_up, 1);
  W4A4_RETURN_IF_ERROR(
      Check("activation", b.act, {DataType::U8}, {kAny, spec.k_pad / 2}));
  W4A4_RETURN_IF_ERROR(
      CheckScales("activation scales", b.act_scale, m, spec));
  W4A4_RETURN_IF_ERROR(
      CheckOptional("act_global_scale", b.act_global_scale, 1));
  W4A4_RETURN_IF_ERROR(
      Check("packed", b.weight, {DataType::U8}, {kAny, spec.k_pad / 2}));
  W4A4_RETURN_IF_ERROR(CheckScales("scales", b.weight_scale, n, spec));
  W4A4_RETURN_IF_ERROR(
      CheckOptional("global_scale", b.weight_global_scale, 1));
  W4A4_RETURN_IF_ERROR(Check("lora_up", b.lora_up, kFloats, {n, kAny}));
  W4A4_RETURN_IF_ERROR(
      Check("lora_act", b.lora_act, {b.lora_up.element_type()}, {m, rank}));
  W4A4_RETURN_IF_ERROR(CheckOptional("channel_scale", b.channel_scale, n));
  W4A4_RETURN_IF_ERROR(CheckOptional("bias", b.bias, n));
  W4A4_RETURN_IF_ERROR(CheckRange(b.scale_range, n));
  W4A4_RETURN_IF_ERROR(Check("result", b.out, kFloats, {m, n}));
  if (b.act_scale.element_type() != b.weight_scale.element_type()) {
    return Error(ErrorCode::kInvalidArgument,
                 "jax_w4a4: activation scales are " + Describe(b.act_scale) +
                     " but scales are " + Describe(b.weight_scale) +
                     "; expected one dtype");
  }
  return CheckGemmRegions(plan, spec, rank);
}

Error Gemm(cudaStream_t stream, const GemmBuffers& b, const PlanAttrs& plan,
           const SpecAttrs& spec, int device, bool dependent) {
  GemmParams p = {};
  p.m = Dim(b.act, 0);
  p.n = Dim(b.weight, 0);
  if (p.m == 0 || p.n == 0) return Error::Success();
  p.act = static_cast<const uint8_t*>(b.act.untyped_data());
  p.act_scale = b.act_scale.untyped_data();
  p.act_global_scale = OptionalData(b.act_global_scale);
  p.lora_act = b.lora_act.untyped_data();
  p.weight = static_cast<const uint8_t*>(b.weight.untyped_data());
  p.weight_scale = b.weight_scale.untyped_data();
  p.weight_global_scale = OptionalData(b.weight_global_scale);
  p.lora_up = b.lora_up.untyped_data();
  p.channel_scale = OptionalData(b.channel_scale);
  p.bias = OptionalData(b.bias);
  p.out = b.out.untyped_data();
  p.k_pad = static_cast<int>(spec.k_pad);
  p.block = static_cast<int>(spec.block_size);
  p.rank = static_cast<int>(Dim(b.lora_up, 1));
  p.scale_dtype = ToDType(b.weight_scale.element_type());
  p.lora_dtype = ToDType(b.lora_up.element_type());
  p.out_dtype = ToDType(b.out.element_type());
  p.is_unsigned = spec.act_unsigned != 0;
  p.smem = GetGemmSmem(plan);

  const Format format = static_cast<Format>(spec.format);
  const int tile_m = static_cast<int>(plan.tile_m);
  W4A4_RETURN_IF_ERROR(
      AllowSmem(format, tile_m, device, p.smem.total_bytes));
  W4A4_CUDA(LaunchGemmV1(format, tile_m, p, dependent, stream));
  const GemmGrid grid = GemmV1Grid(p.m, p.n, tile_m);
  std::lock_guard<std::mutex> lock(g_last_mutex);
  g_last = {GemmV1Kernel(format, tile_m), device,
            grid.x,                       grid.y,
            kGemmThreads,                 p.smem.total_bytes,
            1};
  return Error::Success();
}

// ---------------------------------------------------------------------------
// Kernel sm90_v2: operands -> launches
// ---------------------------------------------------------------------------

// What one launch leaves for the gemm; results of the call.
struct PrivateBuffers {
  AnyBuffer act, token_scale, rows;
  const AnyBuffer* down_sums = nullptr;  // LoRA-down in the gemm's launch
};

Error CheckPrivate(const PrivateBuffers& b, int64_t m, int64_t n,
                   const PlanAttrs& plan, const SpecAttrs& spec) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;
  // The kernel counts weight scales in 32 bits.
  const int64_t scales = spec.k_pad / spec.block_size * n;
  if (m > kMost || n > kMost || scales >> 32 != 0) {
    return Error(ErrorCode::kFailedPrecondition,
                 "jax_w4a4: kernel sm90_v2 takes fewer than 2^31 rows and 2^32 "
                 "weight scales, got " +
                     std::to_string(m) + " and " + std::to_string(n) +
                     " rows, " + std::to_string(scales) + " scales");
  }
  const int64_t tokens =
      GemmV2Tokens(plan.V2Path(), m, plan.tile_m, spec.k_pad);
  const int64_t rows = plan.IsDecode() ? DecodeActRows(m, plan.tile_m) : m;
  W4A4_RETURN_IF_ERROR(Check("act", b.act, {DataType::U8},
                             {rows, GemmV2ActBytes(plan.V2Path(), spec.k_pad)}));
  W4A4_RETURN_IF_ERROR(
      Check("token_scale", b.token_scale, {DataType::F32}, {tokens}));
  // sm90_decode works them out itself.
  return Check("rows", b.rows, {DataType::F32},
               {plan.IsDecode() ? 0 : n, kGemmV2RowInputBytes / 4});
}

// The private layout holds bf16 low-rank operands and results only.
Error CheckV2Types(const GemmBuffers& b) {
  W4A4_RETURN_IF_ERROR(
      Check("result", b.out, {DataType::BF16}, {kAny, kAny}));
  if (Dim(b.lora_up, 1) == 0) return Error::Success();
  return Check("lora_up", b.lora_up, {DataType::BF16}, {kAny, kAny});
}

WeightRowParams WeightRows(const GemmBuffers& b, const PrivateBuffers& w,
                           int64_t rows) {
  WeightRowParams p = {};
  p.weight_scale = b.weight_scale.untyped_data();
  p.weight_global_scale = OptionalData(b.weight_global_scale);
  p.act_global_scale = OptionalData(b.act_global_scale);
  p.channel_scale = OptionalData(b.channel_scale);
  p.bias = OptionalData(b.bias);
  p.rows = w.rows.untyped_data();
  p.scale_dtype = ToDType(b.weight_scale.element_type());
  p.n = rows;
  p.scale_range = RangeData(b.scale_range);
  return p;
}

// Weight rows that the launch before the gemm prepares.
int64_t PreparedRows(const GemmBuffers& b, const PlanAttrs& plan) {
  return plan.IsDecode() ? 0 : Dim(b.weight, 0);
}

Error Repack(cudaStream_t stream, const GemmBuffers& b, const PrivateBuffers& w,
             const PlanAttrs& plan, const SpecAttrs& spec) {
  RepackV2Params p = {};
  p.packed = static_cast<const uint8_t*>(b.act.untyped_data());
  p.scales = b.act_scale.untyped_data();
  p.act = w.act.untyped_data();
  p.token_scale = static_cast<float*>(w.token_scale.untyped_data());
  p.weight = WeightRows(b, w, PreparedRows(b, plan));
  p.m = Dim(b.act, 0);
  p.k_pad = static_cast<int>(spec.k_pad);
  p.block = static_cast<int>(spec.block_size);
  p.is_unsigned = spec.act_unsigned != 0;
  p.token_pitch = GemmV2TokenPitch(p.m, plan.tile_m);
  W4A4_CUDA(LaunchRepackV2(plan.V2Path(), p, stream));
  return Error::Success();
}

void SetDown(DownV2Params* d, const QuantizeBuffers& q, const PlanAttrs& plan,
             const SpecAttrs& spec, int64_t rank) {
  d->x = q.x.untyped_data();
  d->lora_down = q.lora_down.untyped_data();
  d->lora_act = q.lora_act.untyped_data();
  d->m = Dim(q.x, 0);
  d->k = static_cast<int>(spec.k);
  d->rank = static_cast<int>(rank);
  d->cluster = static_cast<int>(plan.down_cluster);
  d->stages = static_cast<int>(plan.down_stages);
  d->off_barriers = static_cast<int>(plan.off_down_barriers);
  d->smem_bytes = static_cast<int>(plan.down_smem_bytes);
}

// LoRA-down; what follows may run beside it.
Error Down(cudaStream_t stream, const QuantizeBuffers& q, const PlanAttrs& plan,
           const SpecAttrs& spec, int device) {
  if (Dim(q.lora_down, 1) == 0) return Error::Success();
  if (plan.IsBlackwell()) {
    Sm100DownParams d = {};
    d.x = q.x.untyped_data();
    d.lora_down = q.lora_down.untyped_data();
    d.lora_act = q.lora_act.untyped_data();
    d.m = Dim(q.x, 0);
    d.k = static_cast<int>(spec.k);
    d.rank = static_cast<int>(Dim(q.lora_down, 1));
    d.stages = static_cast<int>(plan.down_stages);
    d.off_barriers = static_cast<int>(plan.off_down_barriers);
    d.smem_bytes = static_cast<int>(plan.down_smem_bytes);
    W4A4_CUDA(LaunchSm100Down(d, device, stream));
    return Error::Success();
  }
  DownV2Params d = {};
  SetDown(&d, q, plan, spec, Dim(q.lora_down, 1));
  W4A4_CUDA(LaunchDownV2(d, device, stream));
  return Error::Success();
}

// What both quantizers that hold a token in registers are told.
void SetTokens(TokenParams* p, const QuantizeBuffers& q, const PlanAttrs& plan,
               const SpecAttrs& spec, int64_t rank) {
  p->x = q.x.untyped_data();
  p->smooth = OptionalData(q.smooth);
  p->global_scale = OptionalData(q.global_scale);
  p->m = Dim(q.x, 0);
  p->k = static_cast<int>(spec.k);
  p->k_pad = static_cast<int>(spec.k_pad);
  p->chunks = static_cast<int>(plan.q_lane_chunks);
  p->warps = static_cast<int>(plan.q_warps);
  p->x_dtype = ToDType(q.x.element_type());
  p->rule = static_cast<ScaleRule>(spec.act_rule);
  p->is_unsigned = spec.act_unsigned != 0;
  p->beside = rank > 0 && g_dependent_launch.load(std::memory_order_relaxed);
}

// Codes and scales, with a token in registers.
Error QuantizePublic(cudaStream_t stream, const QuantizeBuffers& q,
                     const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  QuantizePublicParams p = {};
  SetTokens(&p, q, plan, spec, Dim(q.lora_down, 1));
  if (p.m == 0) return Error::Success();
  W4A4_RETURN_IF_ERROR(Down(stream, q, plan, spec, device));
  p.packed = q.packed.untyped_data();
  p.scales = q.scales.untyped_data();
  p.block = static_cast<int>(spec.block_size);
  p.scale_dtype = ToDType(q.scales.element_type());
  W4A4_CUDA(
      LaunchQuantizePublic(static_cast<Format>(spec.format), p, stream));
  return Error::Success();
}

// LoRA-down, then beside it the quantizer of the private layout; or both in one
// launch.
Error QuantizeFused(cudaStream_t stream, const QuantizeBuffers& q,
                    const GemmBuffers& b, const PrivateBuffers& w,
                    const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  if (plan.QuantizerIsDecode()) {
    DecodeQuantizeParams p = {};
    SetTokens(&p, q, plan, spec, Dim(q.lora_down, 1));
    p.beside = false;
    p.act = w.act.untyped_data();
    p.token_scale = static_cast<float*>(w.token_scale.untyped_data());
    p.scale_dtype = ToDType(b.weight_scale.element_type());
    p.lora_down = q.lora_down.untyped_data();
    p.lora_act = q.lora_act.untyped_data();
    p.rank = static_cast<int>(Dim(q.lora_down, 1));
    p.down_cluster = static_cast<int>(plan.down_cluster);
    if (w.down_sums != nullptr) p.down_sums = w.down_sums->untyped_data();
    W4A4_CUDA(LaunchDecodeQuantize(plan.V2Path(), p, device, stream));
    return Error::Success();
  }
  W4A4_RETURN_IF_ERROR(Down(stream, q, plan, spec, device));
  QuantizeV2Params p = {};
  SetTokens(&p, q, plan, spec, Dim(q.lora_down, 1));
  p.act = w.act.untyped_data();
  p.token_scale = static_cast<float*>(w.token_scale.untyped_data());
  p.token_pitch = GemmV2TokenPitch(p.m, plan.tile_m);
  p.block = static_cast<int>(spec.block_size);
  p.weight = WeightRows(b, w, PreparedRows(b, plan));
  W4A4_CUDA(LaunchQuantizeV2(plan.V2Path(), p, stream));
  return Error::Success();
}

// What became of a launch; a good one is the last launch from now on.
Error Launched(const char* what, const LaunchResult& done, const void* kernel,
               int device, int threads, int smem_bytes, int cluster) {
  if (done.detail != nullptr) {
    return Error(ErrorCode::kInternal,
                 std::string("jax_w4a4: the driver refused a tensor map of ") +
                     done.detail);
  }
  if (done.code != cudaSuccess) return CudaError(what, done.code);
  std::lock_guard<std::mutex> lock(g_last_mutex);
  g_last = {kernel,  device,     static_cast<unsigned>(done.grid), 1,
            threads, smem_bytes, cluster};
  return Error::Success();
}

Error GemmV2(cudaStream_t stream, const GemmBuffers& b, const PrivateBuffers& w,
             const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  GemmV2Params p = {};
  p.act = w.act.untyped_data();
  p.token_scale = static_cast<const float*>(w.token_scale.untyped_data());
  p.rows = w.rows.untyped_data();
  p.weight = static_cast<const uint8_t*>(b.weight.untyped_data());
  p.weight_scale = b.weight_scale.untyped_data();
  p.lora_act = b.lora_act.untyped_data();
  p.lora_up = b.lora_up.untyped_data();
  p.out = b.out.untyped_data();
  p.m = Dim(b.out, 0);
  p.n = Dim(b.out, 1);
  p.k_pad = static_cast<int>(spec.k_pad);
  p.rank = static_cast<int>(Dim(b.lora_up, 1));
  p.stages = static_cast<int>(plan.main_stages);
  p.group_m = static_cast<int>(plan.group_m);
  p.promote_k = static_cast<int>(plan.promote_k);
  p.block = static_cast<int>(spec.block_size);
  p.scale_dtype = ToDType(b.weight_scale.element_type());
  p.smem = GetGemmV2Smem(plan);

  const int tile_m = static_cast<int>(plan.tile_m);
  const int cluster = static_cast<int>(plan.cluster);
  const LaunchResult done =
      LaunchGemmV2(plan.V2Path(), tile_m, cluster, p,
                   g_dependent_launch.load(std::memory_order_relaxed), device,
                   stream);
  return Launched("gemm sm90_v2", done,
                  GemmV2Kernel(plan.V2Path(), tile_m, cluster), device,
                  kGemmV2Threads, p.smem.total_bytes, cluster);
}

// With `q` LoRA-down is in this launch, if the plan says so.
Error Decode(cudaStream_t stream, const QuantizeBuffers* q,
             const GemmBuffers& b, const PrivateBuffers& w,
             const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  DecodeParams p = {};
  p.act = w.act.untyped_data();
  p.token_scale = static_cast<const float*>(w.token_scale.untyped_data());
  p.weight = static_cast<const uint8_t*>(b.weight.untyped_data());
  p.row_inputs = WeightRows(b, w, Dim(b.weight, 0));
  p.lora_act = b.lora_act.untyped_data();
  p.lora_up = b.lora_up.untyped_data();
  p.out = b.out.untyped_data();
  p.m = Dim(b.out, 0);
  p.n = Dim(b.out, 1);
  p.k_pad = static_cast<int>(spec.k_pad);
  p.rank = static_cast<int>(Dim(b.lora_up, 1));
  p.tile_n = static_cast<int>(plan.tile_n);
  p.splits = static_cast<int>(plan.cluster);
  p.stages = static_cast<int>(plan.main_stages);
  p.smem = GetDecodeSmem(plan);
  if (q != nullptr && w.down_sums != nullptr) {
    p.down_sums = w.down_sums->untyped_data();
    p.x = q->x.untyped_data();
    p.lora_down = q->lora_down.untyped_data();
    p.k = static_cast<int>(spec.k);
    p.down_stages = static_cast<int>(plan.down_stages);
    p.off_down_barriers = static_cast<int>(plan.off_down_barriers);
    p.early_ctas = static_cast<int>(plan.down_early);
  }

  const int tile_m = static_cast<int>(plan.tile_m);
  if (p.m > DecodeMostTokens(tile_m)) {
    return Error(ErrorCode::kFailedPrecondition,
                 "jax_w4a4: kernel sm90_decode takes up to " +
                     std::to_string(DecodeMostTokens(tile_m)) +
                     " rows in tiles of tile_m=" + std::to_string(tile_m) +
                     ", got " + std::to_string(p.m));
  }
  const LaunchResult done =
      LaunchDecode(plan.V2Path(), tile_m, p,
                   g_dependent_launch.load(std::memory_order_relaxed), device,
                   stream);
  return Launched("gemm sm90_decode", done,
                  DecodeKernel(plan.V2Path(), tile_m, p.tile_n), device,
                  DecodeThreads(tile_m), p.smem.total_bytes, p.splits);
}

// The gemm of a plan that reads the private layout.
Error PrivateGemm(cudaStream_t stream, const QuantizeBuffers* q,
                  const GemmBuffers& b, const PrivateBuffers& w,
                  const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  return plan.IsDecode() ? Decode(stream, q, b, w, plan, spec, device)
                         : GemmV2(stream, b, w, plan, spec, device);
}

// From x, straight into the gemm's layout: q.scales is empty, q.packed has
// `packed_rows`.
Error CheckFused(const QuantizeBuffers& q, const GemmBuffers& g,
                 int64_t packed_rows, const PlanAttrs& plan,
                 const SpecAttrs& spec) {
  const int64_t m = Dim(q.x, 0), n = Dim(g.weight, 0);
  const int64_t rank = Dim(g.lora_up, 1);
  W4A4_RETURN_IF_ERROR(Check("x", q.x, kFloats, {kAny, spec.k}));
  W4A4_RETURN_IF_ERROR(CheckOptional("smooth", q.smooth, spec.k));
  W4A4_RETURN_IF_ERROR(CheckOptional("act_global_scale", q.global_scale, 1));
  if (rank > 0) {
    W4A4_RETURN_IF_ERROR(Check("x", q.x, {DataType::BF16}, {kAny, spec.k}));
    W4A4_RETURN_IF_ERROR(
        Check("lora_down", q.lora_down, {DataType::BF16}, {spec.k, rank}));
    W4A4_RETURN_IF_ERROR(
        Check("lora_act", q.lora_act, {DataType::BF16}, {m, rank}));
  }
  W4A4_RETURN_IF_ERROR(
      Check("packed", q.packed, {DataType::U8}, {packed_rows, spec.k_pad / 2}));
  W4A4_RETURN_IF_ERROR(CheckScales("scales", q.scales, 0, spec));
  W4A4_RETURN_IF_ERROR(
      Check("packed", g.weight, {DataType::U8}, {kAny, spec.k_pad / 2}));
  W4A4_RETURN_IF_ERROR(CheckScales("scales", g.weight_scale, n, spec));
  W4A4_RETURN_IF_ERROR(
      CheckOptional("global_scale", g.weight_global_scale, 1));
  W4A4_RETURN_IF_ERROR(Check("lora_up", g.lora_up, kFloats, {n, kAny}));
  W4A4_RETURN_IF_ERROR(CheckOptional("channel_scale", g.channel_scale, n));
  W4A4_RETURN_IF_ERROR(CheckOptional("bias", g.bias, n));
  W4A4_RETURN_IF_ERROR(CheckRange(g.scale_range, n));
  W4A4_RETURN_IF_ERROR(Check("result", g.out, kFloats, {m, n}));
  W4A4_RETURN_IF_ERROR(CheckQuantizer(plan, spec, m, rank));
  return CheckGemmRegions(plan, spec, rank);
}

Error MatmulV2(cudaStream_t stream, const QuantizeBuffers& q,
               const GemmBuffers& g, const PrivateBuffers& w,
               const PlanAttrs& plan, const SpecAttrs& spec) {
  const int64_t m = Dim(q.x, 0), n = Dim(g.weight, 0);
  int device = 0;
  if (plan.QuantizerIsPrivate()) {
    W4A4_RETURN_IF_ERROR(CheckFused(q, g, 0, plan, spec));
    W4A4_RETURN_IF_ERROR(CheckV2Types(g));
    W4A4_RETURN_IF_ERROR(CheckPrivate(w, m, n, plan, spec));
    if (w.down_sums != nullptr) {
      W4A4_RETURN_IF_ERROR(Check("down_sums", *w.down_sums, {DataType::F32},
                                 {DownAheadSums(m), Dim(g.lora_up, 1)}));
    }
    W4A4_RETURN_IF_ERROR(CheckDevice(
        plan, std::max(plan.smem_bytes, plan.down_smem_bytes), &device));
    if (m == 0 || n == 0) return Error::Success();
    W4A4_RETURN_IF_ERROR(QuantizeFused(stream, q, g, w, plan, spec, device));
    return PrivateGemm(stream, &q, g, w, plan, spec, device);
  }
  W4A4_RETURN_IF_ERROR(CheckQuantize(q, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckGemm(g, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckV2Types(g));
  W4A4_RETURN_IF_ERROR(CheckPrivate(w, m, n, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckDevice(plan, plan.smem_bytes, &device));
  if (m == 0 || n == 0) return Error::Success();
  W4A4_RETURN_IF_ERROR(Quantize(stream, q, spec));
  W4A4_RETURN_IF_ERROR(Repack(stream, g, w, plan, spec));
  return PrivateGemm(stream, nullptr, g, w, plan, spec, device);
}

// ---------------------------------------------------------------------------
// Kernel sm100_v2: operands -> launches
// ---------------------------------------------------------------------------

// Scale factors as the tensor core reads them; results of the call.
struct AtomBuffers {
  AnyBuffer act, weight;
};

Error CheckSm100(const GemmBuffers& b, const AtomBuffers& w, int64_t m,
                 int64_t n, const SpecAttrs& spec) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;
  const int64_t atoms =
      Sm100Atoms(spec.k_pad, static_cast<int>(spec.block_size));
  if (m > kMost || n > kMost ||
      std::max(Sm100AtomTiles(m), Sm100AtomTiles(n)) * atoms > kMost) {
    return Error(ErrorCode::kFailedPrecondition,
                 "jax_w4a4: kernel sm100_v2 takes fewer than 2^31 rows and scale "
                 "atoms, got " +
                     std::to_string(m) + " and " + std::to_string(n) +
                     " rows with " + std::to_string(atoms) +
                     " atoms for each 128");
  }
  W4A4_RETURN_IF_ERROR(Check("act_atoms", w.act, {DataType::U8},
                             {Sm100AtomTiles(m) * atoms, kSm100AtomBytes}));
  W4A4_RETURN_IF_ERROR(Check("weight_atoms", w.weight, {DataType::U8},
                             {Sm100AtomTiles(n) * atoms, kSm100AtomBytes}));
  W4A4_RETURN_IF_ERROR(
      Check("result", b.out, {DataType::BF16, DataType::F16}, {m, n}));
  if (Dim(b.lora_up, 1) == 0) return Error::Success();
  return Check("lora_up", b.lora_up, {DataType::BF16, DataType::F16},
               {kAny, kAny});
}

Error Sm100Scales(cudaStream_t stream, const GemmBuffers& b,
                  const AtomBuffers& w, const SpecAttrs& spec) {
  Sm100ScalesParams p = {};
  p.act_scale = static_cast<const uint8_t*>(b.act_scale.untyped_data());
  p.weight_scale = static_cast<const uint8_t*>(b.weight_scale.untyped_data());
  p.act_atoms = static_cast<uint8_t*>(w.act.untyped_data());
  p.weight_atoms = static_cast<uint8_t*>(w.weight.untyped_data());
  p.m = Dim(b.out, 0);
  p.n = Dim(b.out, 1);
  p.k_pad = static_cast<int>(spec.k_pad);
  p.block = static_cast<int>(spec.block_size);
  W4A4_CUDA(LaunchSm100Scales(p, stream));
  return Error::Success();
}

// LoRA-down, then beside it the quantizer, which leaves both sets of atoms.
Error QuantizeSm100(cudaStream_t stream, const QuantizeBuffers& q,
                    const GemmBuffers& b, const AtomBuffers& w,
                    const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  W4A4_RETURN_IF_ERROR(Down(stream, q, plan, spec, device));
  Sm100QuantizeParams p = {};
  SetTokens(&p, q, plan, spec, Dim(q.lora_down, 1));
  p.packed = q.packed.untyped_data();
  p.act_atoms = static_cast<uint8_t*>(w.act.untyped_data());
  p.weight_scale = static_cast<const uint8_t*>(b.weight_scale.untyped_data());
  p.weight_atoms = static_cast<uint8_t*>(w.weight.untyped_data());
  p.n = Dim(b.weight, 0);
  W4A4_CUDA(LaunchSm100Quantize(static_cast<Format>(spec.format), p, stream));
  return Error::Success();
}

Error GemmSm100(cudaStream_t stream, const GemmBuffers& b, const AtomBuffers& w,
                const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  Sm100GemmParams p = {};
  p.act = static_cast<const uint8_t*>(b.act.untyped_data());
  p.act_scale = static_cast<const uint8_t*>(w.act.untyped_data());
  p.act_global_scale = OptionalData(b.act_global_scale);
  p.lora_act = b.lora_act.untyped_data();
  p.weight = static_cast<const uint8_t*>(b.weight.untyped_data());
  p.weight_scale = static_cast<const uint8_t*>(w.weight.untyped_data());
  p.weight_global_scale = OptionalData(b.weight_global_scale);
  p.lora_up = b.lora_up.untyped_data();
  p.channel_scale = OptionalData(b.channel_scale);
  p.bias = OptionalData(b.bias);
  p.out = b.out.untyped_data();
  p.m = Dim(b.out, 0);
  p.n = Dim(b.out, 1);
  p.k_pad = static_cast<int>(spec.k_pad);
  p.rank = static_cast<int>(Dim(b.lora_up, 1));
  p.stages = static_cast<int>(plan.main_stages);
  p.store_stages = static_cast<int>(plan.store_stages);
  p.group_m = static_cast<int>(plan.group_m);
  p.lora_dtype = ToDType(b.lora_up.element_type());
  p.out_dtype = ToDType(b.out.element_type());
  p.smem = GetSm100GemmSmem(plan);

  const Format format = static_cast<Format>(spec.format);
  const int group = static_cast<int>(plan.cluster);
  const int tile_n = static_cast<int>(plan.tile_n);
  const LaunchResult done =
      LaunchSm100Gemm(format, group, tile_n, p,
                      g_dependent_launch.load(std::memory_order_relaxed), device,
                      stream);
  return Launched("gemm sm100_v2", done,
                  Sm100GemmKernel(format, group, tile_n), device,
                  kSm100Threads, p.smem.total_bytes, group);
}

Error MatmulSm100(cudaStream_t stream, const QuantizeBuffers& q,
                  const GemmBuffers& g, const AtomBuffers& w,
                  const PlanAttrs& plan, const SpecAttrs& spec) {
  const int64_t m = Dim(q.x, 0), n = Dim(g.weight, 0);
  int device = 0;
  if (plan.QuantizerIsSm100()) {
    W4A4_RETURN_IF_ERROR(CheckFused(q, g, m, plan, spec));
    W4A4_RETURN_IF_ERROR(CheckSm100(g, w, m, n, spec));
    W4A4_RETURN_IF_ERROR(CheckDevice(
        plan, std::max(plan.smem_bytes, plan.down_smem_bytes), &device));
    if (m == 0 || n == 0) return Error::Success();
    W4A4_RETURN_IF_ERROR(QuantizeSm100(stream, q, g, w, plan, spec, device));
    return GemmSm100(stream, g, w, plan, spec, device);
  }
  W4A4_RETURN_IF_ERROR(CheckQuantize(q, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckGemm(g, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckSm100(g, w, m, n, spec));
  W4A4_RETURN_IF_ERROR(CheckDevice(
      plan, std::max(plan.smem_bytes, plan.q_smem_bytes), &device));
  if (m == 0 || n == 0) return Error::Success();
  W4A4_RETURN_IF_ERROR(Quantize(stream, q, spec));
  W4A4_RETURN_IF_ERROR(Sm100Scales(stream, g, w, spec));
  return GemmSm100(stream, g, w, plan, spec, device);
}

// Results of a call after y, as many as its kernel's plan has.
size_t ResultCount(const PlanAttrs& plan, size_t v1, size_t v2, size_t sm100) {
  return plan.IsPrivate() ? v2 : plan.IsSm100() ? sm100 : v1;
}

// ---------------------------------------------------------------------------
// Kernel sm90_grouped: operands -> launches
// ---------------------------------------------------------------------------

// Operands of all groups lie one behind the other, so the launches of one weight
// see groups x n rows; what is counted per group they are told beside.
struct GroupedBuffers {
  AnyBuffer x, bounds, smooth, act_global_scale, lora_down;
  AnyBuffer weight, weight_scale, weight_global_scale, lora_up;
  AnyBuffer channel_scale, bias, scale_range;
  AnyBuffer out;                                    // result
  AnyBuffer lora_act, act, token_scale, rows, table;  // workspace

  int64_t m() const { return Dim(x, 0); }
  int64_t groups() const { return Dim(weight, 0); }
  int64_t n() const { return Dim(weight, 1); }
  int64_t rank() const { return Dim(lora_up, 2); }
};

// A float32 array with a row of `size` for each group, or absent: no elements.
Error CheckGroupVector(const char* name, const AnyBuffer& buffer,
                       int64_t groups, int64_t size) {
  return Check(name, buffer, {DataType::F32},
               {groups, buffer.element_count() == 0 ? 0 : size});
}

Error CheckGrouped(const GroupedBuffers& b, const PlanAttrs& plan,
                   const SpecAttrs& spec) {
  const int64_t m = b.m(), groups = b.groups(), n = b.n(), rank = b.rank();
  const int64_t blocks = spec.k_pad / spec.block_size;
  const int64_t tile_m = plan.tile_m;
  const GemmV2Path path = plan.V2Path();
  const DataType scale_type =
      static_cast<Format>(spec.format) == Format::kNvfp4   ? DataType::F8E4M3FN
      : static_cast<Format>(spec.format) == Format::kMxfp4 ? DataType::F8E8M0FNU
                                                           : b.weight_scale.element_type();
  // The kernels count rows, tiles and weight scales in 32 bits.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;
  const int64_t tiles = GroupedRowTiles(m, groups, tile_m) *
                        ((n + kGemmV2TileN - 1) / kGemmV2TileN);
  if (m > kMost || groups * n > kMost || tiles > kMost ||
      (blocks * groups * n) >> 32 != 0) {
    return Error(ErrorCode::kFailedPrecondition,
                 "jax_w4a4: kernel sm90_grouped takes fewer than 2^31 rows and "
                 "tiles and 2^32 weight scales, got " +
                     std::to_string(m) + " rows and " + std::to_string(groups) +
                     " x " + std::to_string(n) + " weight rows");
  }
  W4A4_RETURN_IF_ERROR(Check("x", b.x, kFloats, {kAny, spec.k}));
  W4A4_RETURN_IF_ERROR(
      Check("bounds", b.bounds, {DataType::S32}, {groups + 1}));
  W4A4_RETURN_IF_ERROR(CheckGroupVector("smooth", b.smooth, groups, spec.k));
  W4A4_RETURN_IF_ERROR(CheckGroupVector("act_global_scale",
                                        b.act_global_scale, groups, 1));
  W4A4_RETURN_IF_ERROR(Check("packed", b.weight, {DataType::U8},
                             {groups, kAny, spec.k_pad / 2}));
  W4A4_RETURN_IF_ERROR(
      Check("scales", b.weight_scale, {scale_type}, {groups, n, blocks}));
  W4A4_RETURN_IF_ERROR(CheckGroupVector("global_scale", b.weight_global_scale,
                                        groups, 1));
  W4A4_RETURN_IF_ERROR(
      Check("lora_up", b.lora_up, kFloats, {groups, n, kAny}));
  if (rank > 0) {
    W4A4_RETURN_IF_ERROR(Check("x", b.x, {DataType::BF16}, {kAny, spec.k}));
    W4A4_RETURN_IF_ERROR(
        Check("lora_up", b.lora_up, {DataType::BF16}, {groups, n, rank}));
    W4A4_RETURN_IF_ERROR(Check("lora_down", b.lora_down, {DataType::BF16},
                               {groups, spec.k, rank}));
    W4A4_RETURN_IF_ERROR(
        Check("lora_act", b.lora_act, {DataType::BF16}, {m, rank}));
  }
  W4A4_RETURN_IF_ERROR(
      CheckGroupVector("channel_scale", b.channel_scale, groups, n));
  W4A4_RETURN_IF_ERROR(CheckGroupVector("bias", b.bias, groups, n));
  W4A4_RETURN_IF_ERROR(
      Check("scale_range", b.scale_range, {DataType::U8},
            {groups, b.scale_range.element_count() == 0 ? 0 : n, 2}));
  W4A4_RETURN_IF_ERROR(Check("result", b.out, {DataType::BF16}, {m, n}));
  W4A4_RETURN_IF_ERROR(Check("act", b.act, {DataType::U8},
                             {m, GemmV2ActBytes(path, spec.k_pad)}));
  W4A4_RETURN_IF_ERROR(Check("token_scale", b.token_scale, {DataType::F32},
                             {GroupedTokens(path, m, tile_m)}));
  W4A4_RETURN_IF_ERROR(Check("rows", b.rows, {DataType::F32},
                             {groups * n, kGemmV2RowInputBytes / 4}));
  W4A4_RETURN_IF_ERROR(
      Check("table", b.table, {DataType::S32},
            {GroupedTableEntries(m, groups, tile_m), kGroupedEntryInts}));
  W4A4_RETURN_IF_ERROR(CheckQuantizer(plan, spec, m, rank));
  return CheckGemmRegions(plan, spec, rank);
}

// LoRA-down, beside it the quantizer, which also writes the table.
Error QuantizeGrouped(cudaStream_t stream, const GroupedBuffers& b,
                      const PlanAttrs& plan, const SpecAttrs& spec,
                      int device) {
  // Nothing here has the public layout.
  const QuantizeBuffers q = {b.x,   b.smooth, b.act_global_scale, b.lora_down,
                             b.act, b.act,    b.lora_act};
  const auto* bounds = static_cast<const int*>(b.bounds.untyped_data());
  const int64_t rank = b.rank();
  if (rank > 0) {
    DownV2Params d = {};
    SetDown(&d, q, plan, spec, rank);
    d.groups = static_cast<int>(b.groups());
    d.bounds = bounds;
    W4A4_CUDA(LaunchDownV2(d, device, stream));
  }
  QuantizeV2Params p = {};
  SetTokens(&p, q, plan, spec, rank);
  p.act = b.act.untyped_data();
  p.token_scale = static_cast<float*>(b.token_scale.untyped_data());
  p.weight.weight_scale = b.weight_scale.untyped_data();
  p.weight.weight_global_scale = OptionalData(b.weight_global_scale);
  p.weight.act_global_scale = OptionalData(b.act_global_scale);
  p.weight.channel_scale = OptionalData(b.channel_scale);
  p.weight.bias = OptionalData(b.bias);
  p.weight.rows = b.rows.untyped_data();
  p.weight.scale_dtype = ToDType(b.weight_scale.element_type());
  p.block = static_cast<int>(spec.block_size);
  p.weight.n = b.groups() * b.n();
  p.weight.groups = b.groups();
  p.weight.bounds = bounds;
  p.weight.scale_range = RangeData(b.scale_range);
  p.table = b.table.untyped_data();
  p.tile_m = static_cast<int>(plan.tile_m);
  p.y = b.out.untyped_data();
  W4A4_CUDA(LaunchQuantizeV2(plan.V2Path(), p, stream));
  return Error::Success();
}

Error GemmGrouped(cudaStream_t stream, const GroupedBuffers& b,
                  const PlanAttrs& plan, const SpecAttrs& spec, int device) {
  GroupedParams params = {};
  params.groups = b.groups();
  params.table = b.table.untyped_data();
  GemmV2Params& p = params.gemm;
  p.act = b.act.untyped_data();
  p.token_scale = static_cast<const float*>(b.token_scale.untyped_data());
  p.rows = b.rows.untyped_data();
  p.weight = static_cast<const uint8_t*>(b.weight.untyped_data());
  p.weight_scale = b.weight_scale.untyped_data();
  p.lora_act = b.lora_act.untyped_data();
  p.lora_up = b.lora_up.untyped_data();
  p.out = b.out.untyped_data();
  p.m = b.m();
  p.n = b.n();
  p.k_pad = static_cast<int>(spec.k_pad);
  p.rank = static_cast<int>(b.rank());
  p.stages = static_cast<int>(plan.main_stages);
  p.group_m = static_cast<int>(plan.group_m);
  p.block = static_cast<int>(spec.block_size);
  p.scale_dtype = ToDType(b.weight_scale.element_type());
  p.smem = GetGemmV2Smem(plan);
  const int tile_m = static_cast<int>(plan.tile_m);
  const LaunchResult done =
      LaunchGrouped(plan.V2Path(), tile_m, params,
                    g_dependent_launch.load(std::memory_order_relaxed), device,
                    stream);
  return Launched("gemm sm90_grouped", done,
                  GroupedKernel(plan.V2Path(), tile_m), device,
                  kGemmV2Threads, p.smem.total_bytes, 1);
}

// The results of a call after y, as many as its kernel's plan has.
Error GetResults(const ffi::RemainingRets& rets, size_t expected,
                 std::vector<AnyBuffer>* buffers) {
  if (rets.size() != expected) {
    return Error(ErrorCode::kInvalidArgument,
                 "jax_w4a4: the call has " + std::to_string(rets.size()) +
                     " results after y; the plan's kernel has " +
                     std::to_string(expected));
  }
  for (size_t i = 0; i < expected; ++i) {
    auto buffer = rets.get<AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    buffers->push_back(**buffer);
  }
  return Error::Success();
}

// ---------------------------------------------------------------------------
// Impl: what each handler does with its buffers
// ---------------------------------------------------------------------------

// A plan for one weight, or for groups, in the handler that is for it.
Error CheckKind(const PlanAttrs& plan, bool grouped) {
  if (plan.IsGrouped() == grouped) return Error::Success();
  return Error(ErrorCode::kFailedPrecondition,
               grouped ? "jax_w4a4: the grouped handler takes plans of kernel "
                         "sm90_grouped only"
                       : "jax_w4a4: kernel sm90_grouped belongs to the grouped "
                         "handler");
}

Error InstantiateImpl(PlanAttrs plan, SpecAttrs spec) {
  return CheckAttrs(plan, spec);
}

Error QuantizeImpl(cudaStream_t stream, AnyBuffer x, AnyBuffer smooth,
                   AnyBuffer global_scale, AnyBuffer lora_down, Result packed,
                   Result scales, Result lora_act, PlanAttrs plan,
                   SpecAttrs spec) {
  CountCall(stream);
  const QuantizeBuffers b = {x,       smooth,  global_scale, lora_down,
                             *packed, *scales, *lora_act};
  int device = 0;
  W4A4_RETURN_IF_ERROR(CheckAttrs(plan, spec));
  W4A4_RETURN_IF_ERROR(CheckKind(plan, /*grouped=*/false));
  W4A4_RETURN_IF_ERROR(CheckQuantize(b, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckDevice(
      plan, std::max(plan.q_smem_bytes, plan.down_smem_bytes), &device));
  if (!plan.QuantizerIsPublic()) return Quantize(stream, b, spec);
  if (Dim(lora_down, 1) > 0) {
    W4A4_RETURN_IF_ERROR(Check("x", x, {DataType::BF16}, {kAny, kAny}));
    W4A4_RETURN_IF_ERROR(
        Check("lora_down", lora_down, {DataType::BF16}, {kAny, kAny}));
    W4A4_RETURN_IF_ERROR(
        Check("lora_act", b.lora_act, {DataType::BF16}, {kAny, kAny}));
  }
  return QuantizePublic(stream, b, plan, spec, device);
}

Error GemmImpl(cudaStream_t stream, AnyBuffer act, AnyBuffer act_scale,
               AnyBuffer act_global_scale, AnyBuffer lora_act,
               AnyBuffer weight, AnyBuffer weight_scale,
               AnyBuffer weight_global_scale, AnyBuffer lora_up,
               AnyBuffer channel_scale, AnyBuffer bias,
               AnyBuffer scale_range, Result out, ffi::RemainingRets rets,
               PlanAttrs plan, SpecAttrs spec) {
  CountCall(stream);
  const GemmBuffers b = {
      act,    act_scale,    act_global_scale,    lora_act,
      weight, weight_scale, weight_global_scale, lora_up,
      channel_scale, bias, scale_range, *out};
  int device = 0;
  std::vector<AnyBuffer> r;
  W4A4_RETURN_IF_ERROR(CheckAttrs(plan, spec));
  W4A4_RETURN_IF_ERROR(CheckKind(plan, /*grouped=*/false));
  W4A4_RETURN_IF_ERROR(GetResults(rets, ResultCount(plan, 0, 3, 2), &r));
  W4A4_RETURN_IF_ERROR(CheckGemm(b, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckDevice(plan, plan.smem_bytes, &device));
  if (plan.IsPrivate()) {
    const PrivateBuffers w = {r[0], r[1], r[2]};
    const int64_t m = Dim(act, 0), n = Dim(weight, 0);
    W4A4_RETURN_IF_ERROR(CheckV2Types(b));
    W4A4_RETURN_IF_ERROR(CheckPrivate(w, m, n, plan, spec));
    if (m == 0 || n == 0) return Error::Success();
    W4A4_RETURN_IF_ERROR(Repack(stream, b, w, plan, spec));
    return PrivateGemm(stream, nullptr, b, w, plan, spec, device);
  }
  if (plan.IsSm100()) {
    const AtomBuffers w = {r[0], r[1]};
    const int64_t m = Dim(act, 0), n = Dim(weight, 0);
    W4A4_RETURN_IF_ERROR(CheckSm100(b, w, m, n, spec));
    if (m == 0 || n == 0) return Error::Success();
    W4A4_RETURN_IF_ERROR(Sm100Scales(stream, b, w, spec));
    return GemmSm100(stream, b, w, plan, spec, device);
  }
  // Alone in its handler: XLA may have put any kernel before it, so no
  // dependent launch.
  return Gemm(stream, b, plan, spec, device, /*dependent=*/false);
}

Error MatmulImpl(cudaStream_t stream, AnyBuffer x, AnyBuffer smooth,
                 AnyBuffer act_global_scale, AnyBuffer lora_down,
                 AnyBuffer weight, AnyBuffer weight_scale,
                 AnyBuffer weight_global_scale, AnyBuffer lora_up,
                 AnyBuffer channel_scale, AnyBuffer bias,
                 AnyBuffer scale_range, Result out, ffi::RemainingRets rets,
                 PlanAttrs plan, SpecAttrs spec) {
  CountCall(stream);
  std::vector<AnyBuffer> r;
  W4A4_RETURN_IF_ERROR(CheckAttrs(plan, spec));
  W4A4_RETURN_IF_ERROR(CheckKind(plan, /*grouped=*/false));
  const size_t sums = plan.down_ahead > 0 ? 1 : 0;
  W4A4_RETURN_IF_ERROR(GetResults(rets, ResultCount(plan, 3, 6 + sums, 5), &r));
  const QuantizeBuffers q = {x,    smooth, act_global_scale, lora_down,
                             r[0], r[1],   r[2]};
  const GemmBuffers g = {
      r[0],   r[1],         act_global_scale,    r[2],
      weight, weight_scale, weight_global_scale, lora_up,
      channel_scale, bias, scale_range, *out};
  if (plan.IsPrivate()) {
    const AnyBuffer* down_sums = sums > 0 ? &r[6] : nullptr;
    return MatmulV2(stream, q, g, {r[3], r[4], r[5], down_sums}, plan, spec);
  }
  if (plan.IsSm100()) {
    return MatmulSm100(stream, q, g, {r[3], r[4]}, plan, spec);
  }
  int device = 0;
  if (plan.QuantizerIsPublic()) {
    return Error(ErrorCode::kFailedPrecondition,
                 "jax_w4a4: quantizer 3 belongs to calls without a gemm");
  }
  W4A4_RETURN_IF_ERROR(CheckQuantize(q, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckGemm(g, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckDevice(plan, plan.smem_bytes, &device));
  W4A4_RETURN_IF_ERROR(Quantize(stream, q, spec));
  return Gemm(stream, g, plan, spec, device,
              g_dependent_launch.load(std::memory_order_relaxed));
}

Error GroupedImpl(cudaStream_t stream, AnyBuffer x, AnyBuffer bounds,
                  AnyBuffer smooth, AnyBuffer act_global_scale,
                  AnyBuffer lora_down, AnyBuffer weight, AnyBuffer weight_scale,
                  AnyBuffer weight_global_scale, AnyBuffer lora_up,
                  AnyBuffer channel_scale, AnyBuffer bias,
                  AnyBuffer scale_range, Result out, Result lora_act, Result act,
                  Result token_scale, Result rows,
                  Result table, PlanAttrs plan, SpecAttrs spec) {
  CountCall(stream);
  const GroupedBuffers b = {
      x,       bounds,       smooth, act_global_scale, lora_down,
      weight,  weight_scale, weight_global_scale, lora_up, channel_scale,
      bias,    scale_range,  *out,         *lora_act, *act, *token_scale, *rows, *table};
  int device = 0;
  W4A4_RETURN_IF_ERROR(CheckAttrs(plan, spec));
  W4A4_RETURN_IF_ERROR(CheckKind(plan, /*grouped=*/true));
  W4A4_RETURN_IF_ERROR(CheckGrouped(b, plan, spec));
  W4A4_RETURN_IF_ERROR(CheckDevice(
      plan, std::max(plan.smem_bytes, plan.down_smem_bytes), &device));
  if (b.m() == 0 || b.n() == 0) return Error::Success();
  W4A4_RETURN_IF_ERROR(QuantizeGrouped(stream, b, plan, spec, device));
  return GemmGrouped(stream, b, plan, spec, device);
}

}  // namespace

CallCounts GetCallCounts() {
  return {g_calls.load(std::memory_order_relaxed),
          g_captured.load(std::memory_order_relaxed)};
}

void SetDependentLaunch(bool enabled) {
  g_dependent_launch.store(enabled, std::memory_order_relaxed);
}

bool GetLastLaunch(LaunchReport* report, std::string* error) {
  LastLaunch last;
  {
    std::lock_guard<std::mutex> lock(g_last_mutex);
    last = g_last;
  }
  if (last.kernel == nullptr) {
    *error = "no gemm has been launched";
    return false;
  }
  int previous = 0;
  cudaFuncAttributes attributes = {};
  int blocks = 0;
  int code = cudaGetDevice(&previous);
  if (code == cudaSuccess) code = cudaSetDevice(last.device);
  if (code == cudaSuccess) {
    code = cudaFuncGetAttributes(&attributes, last.kernel);
  }
  if (code == cudaSuccess) {
    code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, last.kernel, last.block, last.smem_bytes);
  }
  if (code == cudaSuccess) code = cudaSetDevice(previous);
  if (code != cudaSuccess) {
    *error = cudaGetErrorString(static_cast<cudaError_t>(code));
    return false;
  }
  *report = {last.grid_x,
             last.grid_y,
             last.block,
             last.cluster,
             last.smem_bytes,
             static_cast<int64_t>(attributes.sharedSizeBytes),
             attributes.maxDynamicSharedSizeBytes,
             attributes.numRegs,
             static_cast<int64_t>(attributes.localSizeBytes),
             blocks};
  return true;
}

}  // namespace jax_w4a4

// ---------------------------------------------------------------------------
// Handler symbols
// ---------------------------------------------------------------------------

namespace ffi = ::xla::ffi;
using jax_w4a4::PlanAttrs;
using jax_w4a4::SpecAttrs;

XLA_FFI_DEFINE_HANDLER_SYMBOL(W4a4Instantiate, jax_w4a4::InstantiateImpl,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<PlanAttrs>("plan")
                                  .Attr<SpecAttrs>("spec"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    W4a4Quantize, jax_w4a4::QuantizeImpl,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // x (m, k)
        .Arg<ffi::AnyBuffer>()  // smooth (k,) | (0,)
        .Arg<ffi::AnyBuffer>()  // act_global_scale (1,) | (0,)
        .Arg<ffi::AnyBuffer>()  // lora_down (k, r)
        .Ret<ffi::AnyBuffer>()  // packed (m, k_pad / 2)
        .Ret<ffi::AnyBuffer>()  // scales (m, k_pad / block)
        .Ret<ffi::AnyBuffer>()  // lora_act (m, r)
        .Attr<PlanAttrs>("plan")
        .Attr<SpecAttrs>("spec"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    W4a4Gemm, jax_w4a4::GemmImpl,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // activation (m, k_pad / 2)
        .Arg<ffi::AnyBuffer>()  // activation scales (m, k_pad / block)
        .Arg<ffi::AnyBuffer>()  // act_global_scale (1,) | (0,)
        .Arg<ffi::AnyBuffer>()  // lora_act (m, r)
        .Arg<ffi::AnyBuffer>()  // packed (n, k_pad / 2)
        .Arg<ffi::AnyBuffer>()  // scales (n, k_pad / block)
        .Arg<ffi::AnyBuffer>()  // global_scale (1,) | (0,)
        .Arg<ffi::AnyBuffer>()  // lora_up (n, r)
        .Arg<ffi::AnyBuffer>()  // channel_scale (n,) | (0,)
        .Arg<ffi::AnyBuffer>()  // bias (n,) | (0,)
        .Arg<ffi::AnyBuffer>()  // scale_range (n, 2) | (0, 2)
        .Ret<ffi::AnyBuffer>()  // y (m, n)
        .RemainingRets()  // sm90_v2: act, token_scale, rows; sm100_v2: both atoms
        .Attr<PlanAttrs>("plan")
        .Attr<SpecAttrs>("spec"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    W4a4Matmul, jax_w4a4::MatmulImpl,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // x (m, k)
        .Arg<ffi::AnyBuffer>()  // smooth (k,) | (0,)
        .Arg<ffi::AnyBuffer>()  // act_global_scale (1,) | (0,)
        .Arg<ffi::AnyBuffer>()  // lora_down (k, r)
        .Arg<ffi::AnyBuffer>()  // packed (n, k_pad / 2)
        .Arg<ffi::AnyBuffer>()  // scales (n, k_pad / block)
        .Arg<ffi::AnyBuffer>()  // global_scale (1,) | (0,)
        .Arg<ffi::AnyBuffer>()  // lora_up (n, r)
        .Arg<ffi::AnyBuffer>()  // channel_scale (n,) | (0,)
        .Arg<ffi::AnyBuffer>()  // bias (n,) | (0,)
        .Arg<ffi::AnyBuffer>()  // scale_range (n, 2) | (0, 2)
        .Ret<ffi::AnyBuffer>()  // y (m, n)
        // Workspace: packed, scales, lora_act; sm90_v2: act, token_scale, rows;
        // sm100_v2: act_atoms, weight_atoms.
        .RemainingRets()
        .Attr<PlanAttrs>("plan")
        .Attr<SpecAttrs>("spec"),
    {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    W4a4Grouped, jax_w4a4::GroupedImpl,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()  // x (m, k)
        .Arg<ffi::AnyBuffer>()  // bounds (g + 1,)
        .Arg<ffi::AnyBuffer>()  // smooth (g, k) | (g, 0)
        .Arg<ffi::AnyBuffer>()  // act_global_scale (g, 1) | (g, 0)
        .Arg<ffi::AnyBuffer>()  // lora_down (g, k, r)
        .Arg<ffi::AnyBuffer>()  // packed (g, n, k_pad / 2)
        .Arg<ffi::AnyBuffer>()  // scales (g, n, k_pad / block)
        .Arg<ffi::AnyBuffer>()  // global_scale (g, 1) | (g, 0)
        .Arg<ffi::AnyBuffer>()  // lora_up (g, n, r)
        .Arg<ffi::AnyBuffer>()  // channel_scale (g, n) | (g, 0)
        .Arg<ffi::AnyBuffer>()  // bias (g, n) | (g, 0)
        .Arg<ffi::AnyBuffer>()  // scale_range (g, n, 2) | (g, 0, 2)
        .Ret<ffi::AnyBuffer>()  // y (m, n)
        .Ret<ffi::AnyBuffer>()  // workspace: lora_act (m, r)
        .Ret<ffi::AnyBuffer>()  // act
        .Ret<ffi::AnyBuffer>()  // token_scale
        .Ret<ffi::AnyBuffer>()  // rows
        .Ret<ffi::AnyBuffer>()  // table of row tiles
        .Attr<PlanAttrs>("plan")
        .Attr<SpecAttrs>("spec"),
    {ffi::Traits::kCmdBufferCompatible});
