#include "plan.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <string>

#include "sm90_quantize_v1.h"

namespace jax_w4a4 {
namespace {

namespace ffi = ::xla::ffi;

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
ffi::Error Invalid(const Parts&... parts) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                    Concat("jax_w4a4: ", parts...));
}

template <typename... Parts>
ffi::Error Precondition(const Parts&... parts) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                    Concat("jax_w4a4: ", parts...));
}

bool IsFlag(int64_t value) { return value == 0 || value == 1; }

ffi::Error CheckSpec(const SpecAttrs& s) {
  if (s.format < 0 || s.format > 2) {
    return Invalid("unknown format ", s.format,
                   "; expected 0 (nvfp4), 1 (mxfp4) or 2 (int4)");
  }
  constexpr int64_t kMaxK = std::numeric_limits<int32_t>::max() - 1024;
  if (s.k < 1 || s.k_pad < s.k || s.k_pad % 32 != 0 || s.k_pad > kMaxK) {
    return Invalid("k=", s.k, " k_pad=", s.k_pad,
                   "; expected 1 <= k <= k_pad, k_pad a multiple of 32 below ",
                   kMaxK);
  }
  const Format format = static_cast<Format>(s.format);
  const bool block_ok =
      format == Format::kNvfp4   ? s.block_size == 16
      : format == Format::kMxfp4 ? s.block_size == 32
                                 : s.block_size == 32 || s.block_size == 64 ||
                                       s.block_size == 128 ||
                                       s.block_size == s.k_pad;
  if (!block_ok || s.k_pad % s.block_size != 0) {
    return Invalid("block_size=", s.block_size, " with k_pad=", s.k_pad,
                   " does not exist for format ", s.format,
                   "; expected 16 (nvfp4), 32 (mxfp4), 32, 64, 128 or k_pad "
                   "(int4), dividing k_pad");
  }
  if (!IsFlag(s.act_unsigned) || !IsFlag(s.act_rule) ||
      !IsFlag(s.lora_smoothed) ||
      (s.act_unsigned && format != Format::kInt4)) {
    return Invalid("act_unsigned=", s.act_unsigned, " act_rule=", s.act_rule,
                   " lora_smoothed=", s.lora_smoothed,
                   "; expected 0 or 1, act_unsigned=1 with int4 only");
  }
  return ffi::Error::Success();
}

struct Region {
  const char* name;
  int64_t offset;
  int64_t bytes;   // per stage, as planned
  int64_t needed;  // per stage, by the kernel
  int64_t stages;
  int64_t end() const { return offset + bytes * stages; }
};

bool Overlap(const Region& a, const Region& b) {
  return std::max(a.offset, b.offset) < std::min(a.end(), b.end());
}

}  // namespace

ffi::Error CheckAttrs(const PlanAttrs& p, const SpecAttrs& s) {
  if (p.schema != kPlanSchema) {
    return Invalid("plan schema ", p.schema, ", this build reads schema ",
                   kPlanSchema,
                   "; export the program again with the installed version");
  }
  if (p.kernel != static_cast<int64_t>(KernelId::kSm90V1)) {
    return Precondition("plan asks for kernel ", p.kernel,
                        ", this build holds only kernel 1 (sm90_v1)");
  }
  if (p.cc != 90) {
    return Precondition("plan made for sm_", p.cc,
                        ", kernel sm90_v1 runs on sm_90 only");
  }
  if (GemmV1Kernel(Format::kNvfp4, static_cast<int>(p.tile_m)) == nullptr ||
      p.tile_n != kGemmTileN || p.tile_k != kGemmTileK || p.cluster != 1 ||
      p.threads != kGemmThreads || p.main_stages != kGemmStages ||
      p.store_stages != 0 || p.lora_stages < 0 || p.lora_stages > 1) {
    return Invalid("kernel sm90_v1 can't run tile (", p.tile_m, ", ", p.tile_n,
                   ", ", p.tile_k, "), cluster ", p.cluster, ", ", p.threads,
                   " threads, stages main ", p.main_stages, " lora ",
                   p.lora_stages, " store ", p.store_stages,
                   "; expected tile (32 | 64 | 128, 128, 64), cluster 1, 256 "
                   "threads, stages main 2 lora 0 | 1 store 0");
  }
  return CheckSpec(s);
}

ffi::Error CheckGemmRegions(const PlanAttrs& p, const SpecAttrs& s,
                            int64_t rank) {
  const bool int4 = s.format == static_cast<int64_t>(Format::kInt4);
  const int64_t groups =
      int4 ? GemmScaleGroups(static_cast<int>(s.block_size)) : 0;
  const int64_t chunk = rank > 0 ? kGemmRankChunk * 4 : 0;
  if (rank > 0 && p.lora_stages != 1) {
    return Precondition("plan has no LoRA stage but lora_up has rank ", rank);
  }
  const Region regions[] = {
      {"weight", p.off_weight, p.bytes_weight, p.tile_n * p.tile_k * 2,
       p.main_stages},
      {"act", p.off_act, p.bytes_act, p.tile_m * p.tile_k * 2, p.main_stages},
      {"weight_scale", p.off_weight_scale, p.bytes_weight_scale,
       p.tile_n * groups * 4, p.main_stages},
      {"act_scale", p.off_act_scale, p.bytes_act_scale, p.tile_m * groups * 4,
       p.main_stages},
      {"aux", p.off_aux, p.bytes_aux, p.tile_n * 2 * 4, 1},
      {"lora_up", p.off_lora_up, p.bytes_lora_up, p.tile_n * chunk, 1},
      {"lora_act", p.off_lora_act, p.bytes_lora_act, p.tile_m * chunk, 1},
  };
  constexpr int kAux = 4;  // the regions after it live in the epilogue
  constexpr int kRegions = 7;
  for (int i = 0; i < kRegions; ++i) {
    const Region& r = regions[i];
    if (r.needed == 0) continue;
    if (r.bytes != r.needed || r.offset < 0 || r.offset % 128 != 0 ||
        r.end() > p.smem_bytes) {
      return Precondition("plan puts ", r.bytes, " bytes of ", r.name,
                          " at offset ", r.offset, " of ", p.smem_bytes,
                          "; the kernel needs ", r.needed, " bytes x ",
                          r.stages, " stages, 128-byte aligned, inside");
    }
    for (int j = 0; j < i; ++j) {
      // Epilogue regions may lie on the main loop's, never on aux.
      const bool alias_ok = i > kAux && j < kAux;
      if (!alias_ok && regions[j].needed != 0 && Overlap(r, regions[j])) {
        return Precondition("plan lets ", r.name, " overlap ",
                            regions[j].name);
      }
    }
  }
  return ffi::Error::Success();
}

ffi::Error CheckQuantizer(const PlanAttrs& p, int64_t rank) {
  const int64_t needed = QuantizeSmemBytes(rank > 0);
  if (p.q_rows != kQuantizeRows || p.q_chunk_k != kQuantizeChunk ||
      p.q_threads != kQuantizeThreads || p.q_smem_bytes != needed) {
    return Precondition("plan gives the quantizer ", p.q_rows, " rows, chunk ",
                        p.q_chunk_k, ", ", p.q_threads, " threads, ",
                        p.q_smem_bytes, " bytes; it needs ", kQuantizeRows,
                        " rows, chunk ", kQuantizeChunk, ", ",
                        kQuantizeThreads, " threads, ", needed,
                        " bytes at rank ", rank);
  }
  return ffi::Error::Success();
}

GemmSmem GetGemmSmem(const PlanAttrs& p) {
  return {static_cast<int>(p.off_weight),
          static_cast<int>(p.off_act),
          static_cast<int>(p.off_weight_scale),
          static_cast<int>(p.off_act_scale),
          static_cast<int>(p.off_lora_up),
          static_cast<int>(p.off_lora_act),
          static_cast<int>(p.off_aux),
          static_cast<int>(p.bytes_weight),
          static_cast<int>(p.bytes_act),
          static_cast<int>(p.bytes_weight_scale),
          static_cast<int>(p.bytes_act_scale),
          static_cast<int>(p.smem_bytes)};
}

}  // namespace jax_w4a4
