#include "plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>

#include "sm100_down.h"
#include "sm90_decode_quantize.h"
#include "sm90_down_v2.h"
#include "sm90_quantize_v1.h"
#include "sm90_quantize_v2.h"

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
  int64_t align = 128;
  int64_t end() const { return offset + bytes * stages; }
};

// A region the kernel uses has the size it needs and lies inside `limit` bytes.
ffi::Error CheckRegion(const Region& r, int64_t limit) {
  if (r.bytes == r.needed && r.offset >= 0 && r.offset % r.align == 0 &&
      r.end() <= limit) {
    return ffi::Error::Success();
  }
  return Precondition("plan puts ", r.bytes, " bytes of ", r.name,
                      " at offset ", r.offset, " of ", limit,
                      "; the kernel needs ", r.needed, " bytes x ", r.stages,
                      " stages, ", r.align, "-byte aligned, inside");
}

bool Overlap(const Region& a, const Region& b) {
  return std::max(a.offset, b.offset) < std::min(a.end(), b.end());
}

ffi::Error CheckV1Attrs(const PlanAttrs& p) {
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
  return ffi::Error::Success();
}

// Whether the main loop of `path` can multiply what the spec describes.
bool PathTakes(GemmV2Path path, const SpecAttrs& s) {
  switch (path) {
    case GemmV2Path::kMxfp4:
    case GemmV2Path::kMxfp4Promoted:
    case GemmV2Path::kMxfp4Sorted:
      return s.format == static_cast<int64_t>(Format::kMxfp4);
    case GemmV2Path::kNvfp4:
    case GemmV2Path::kNvfp4Rounded:
      return s.format == static_cast<int64_t>(Format::kNvfp4);
    case GemmV2Path::kInt4Row:
      return s.format == static_cast<int64_t>(Format::kInt4) &&
             s.block_size == s.k_pad && s.k_pad <= kGemmV2MaxInt4K;
    case GemmV2Path::kInt4Group64:
    case GemmV2Path::kInt4Group128:
      return s.format == static_cast<int64_t>(Format::kInt4) &&
             s.block_size * GemmV2StageGroups(path) == 128;
    case GemmV2Path::kInt4Scaled:
      return s.format == static_cast<int64_t>(Format::kInt4) &&
             s.block_size <= 128;
  }
  return false;
}

const char* V2Name(const PlanAttrs& p) {
  return p.IsGrouped() ? "sm90_grouped" : "sm90_v2";
}

// Of sm90_grouped too, which has the same roles and layout.
ffi::Error CheckV2Attrs(const PlanAttrs& p, const SpecAttrs& s) {
  if (!IsGemmV2Path(p.path) || !PathTakes(p.V2Path(), s)) {
    return Invalid("kernel ", V2Name(p), " has no path ", p.path, " for format ",
                   s.format, " with block_size=", s.block_size, " k_pad=",
                   s.k_pad);
  }
  const int tile_k = GemmV2TileK(p.V2Path());
  const bool promoted = p.V2Path() == GemmV2Path::kMxfp4Promoted;
  if (promoted ? p.promote_k < tile_k || p.promote_k % tile_k != 0
               : p.promote_k != 0) {
    return Invalid("promote_k=", p.promote_k, " on path ", p.path,
                   " of kernel ", V2Name(p), "; expected ",
                   promoted ? "a positive multiple of " : "0, not a multiple of ",
                   tile_k);
  }
  const int most_stages =
      p.IsGrouped() ? kGroupedMaxStages : kGemmV2MaxStages;
  const int tile_m = static_cast<int>(p.tile_m);
  const int cluster = static_cast<int>(p.cluster);
  const bool compiled =
      p.IsGrouped()
          ? cluster == 1 && GroupedKernel(p.V2Path(), tile_m) != nullptr
          : GemmV2Kernel(p.V2Path(), tile_m, cluster) != nullptr;
  if (!compiled ||
      p.tile_n != kGemmV2TileN * p.cluster || p.tile_k != tile_k ||
      p.threads != kGemmV2Threads || p.main_stages < 2 ||
      p.main_stages > most_stages || p.lora_stages != 0 ||
      p.store_stages != 1 || p.group_m < 1) {
    return Invalid("kernel ", V2Name(p), " can't run tile (", p.tile_m, ", ", p.tile_n,
                   ", ", p.tile_k, "), cluster ", p.cluster, ", group_m ",
                   p.group_m, ", ", p.threads, " threads, stages main ",
                   p.main_stages, " lora ", p.lora_stages, " store ",
                   p.store_stages, "; expected a compiled tile_m, tile_n 128 x "
                   "cluster, tile_k ", tile_k, ", cluster ", p.IsGrouped() ? "1" : "1 | 2",
                   ", group_m >= 1, 384 threads, stages main 2..", most_stages,
                   " lora 0 store 1");
  }
  return ffi::Error::Success();
}

ffi::Error CheckSm100Attrs(const PlanAttrs& p, const SpecAttrs& s) {
  if (Sm100GemmKernel(static_cast<Format>(s.format),
                      static_cast<int>(p.cluster),
                      static_cast<int>(p.tile_n)) == nullptr ||
      p.tile_m != kSm100AtomRows * p.cluster || p.tile_k != kSm100StageK ||
      p.threads != kSm100Threads || p.main_stages < 2 || p.lora_stages != 0 ||
      p.store_stages < 2 || p.group_m < 1 || p.path != 0 || p.promote_k != 0) {
    return Invalid("kernel sm100_v2 can't run format ", s.format, ", tile (",
                   p.tile_m, ", ", p.tile_n, ", ", p.tile_k, "), cluster ",
                   p.cluster, ", group_m ", p.group_m, ", ", p.threads,
                   " threads, stages main ", p.main_stages, " lora ",
                   p.lora_stages, " store ", p.store_stages, ", path ", p.path,
                   ", promote_k ", p.promote_k,
                   "; expected format 0 | 1, a compiled cluster and tile_n, "
                   "tile_m 128 x cluster, tile_k ", kSm100StageK,
                   ", group_m >= 1, ", kSm100Threads,
                   " threads, stages main 2.. lora 0 store 2.., path 0, "
                   "promote_k 0");
  }
  return ffi::Error::Success();
}

ffi::Error CheckSm100Regions(const PlanAttrs& p, const SpecAttrs& s,
                             int64_t rank) {
  if (rank % 8 != 0) {
    return Precondition("kernel sm100_v2 takes ranks that are a multiple of 8, "
                        "lora_up has rank ", rank);
  }
  const int block = static_cast<int>(s.block_size);
  const int64_t scales = Sm100StageAtoms(block) * kSm100AtomBytes;
  const int64_t barriers = Sm100BarrierBytes(
      static_cast<int>(p.main_stages), static_cast<int>(p.tile_n), block);
  // 1024: the swizzle of 128-byte rows repeats every eight of them.
  const Region regions[] = {
      {"act", p.off_act, p.bytes_act, kSm100AtomRows * kSm100RowBytes,
       p.main_stages, 1024},
      {"weight", p.off_weight, p.bytes_weight,
       p.tile_n / p.cluster * kSm100RowBytes, p.main_stages, 1024},
      {"act_scale", p.off_act_scale, p.bytes_act_scale, scales, p.main_stages},
      {"weight_scale", p.off_weight_scale, p.bytes_weight_scale,
       scales * Sm100AtomTiles(p.tile_n), p.main_stages},
      {"store", p.off_store, p.bytes_store, kSm100StoreBytes, p.store_stages,
       1024},
      {"aux", p.off_aux, p.bytes_aux, p.tile_n * 2 * 4, 1},
      // The barriers only have to fit: the plan rounds them up.
      {"barriers", p.off_barriers, p.bytes_barriers,
       std::max(p.bytes_barriers, barriers), 1},
  };
  for (const Region& r : regions) {
    if (ffi::Error e = CheckRegion(r, p.smem_bytes); e.failure()) return e;
  }
  for (const Region& a : regions) {
    for (const Region& b : regions) {
      if (&a < &b && Overlap(a, b)) {
        return Precondition("plan lets ", a.name, " overlap ", b.name);
      }
    }
  }
  return ffi::Error::Success();
}

ffi::Error CheckDecodeAttrs(const PlanAttrs& p, const SpecAttrs& s) {
  if (!IsGemmV2Path(p.path) || !PathTakes(p.V2Path(), s) ||
      DecodeKernel(p.V2Path(), static_cast<int>(p.tile_m),
                   static_cast<int>(p.tile_n)) == nullptr) {
    return Invalid("kernel sm90_decode has no path ", p.path, " for format ",
                   s.format, " with block_size=", s.block_size, " k_pad=",
                   s.k_pad, " and tile (", p.tile_m, ", ", p.tile_n,
                   "); expected tile_n a multiple of 8 up to ",
                   kDecodeMaxTileN, " and a compiled path and tile_m");
  }
  if (p.tile_k != DecodeTileK(p.tile_m, p.tile_n) || p.cluster < 1 ||
      p.cluster > kDecodeMaxSplits ||
      DecodeSteps(p.tile_m, p.tile_n, s.k_pad) < p.cluster ||
      p.threads != DecodeThreads(p.tile_m) || p.main_stages < 2 ||
      p.main_stages > kDecodeMaxStages || p.lora_stages != 0 ||
      p.store_stages != 1 || p.group_m != 0 || p.promote_k != 0) {
    return Invalid("kernel sm90_decode can't run tile (", p.tile_m, ", ",
                   p.tile_n, ") with tile_k ", p.tile_k, ", cluster ", p.cluster,
                   ", group_m ", p.group_m, ", promote_k ", p.promote_k, ", ",
                   p.threads, " threads, stages main ", p.main_stages,
                   " lora ", p.lora_stages, " store ", p.store_stages,
                   "; expected tile_k ", DecodeTileK(p.tile_m, p.tile_n),
                   ", cluster 1 | 2 with a stage of K for each CTA, group_m and "
                   "promote_k 0, ", DecodeThreads(p.tile_m),
                   " threads, stages main 2..", kDecodeMaxStages,
                   " lora 0 store 1");
  }
  return ffi::Error::Success();
}

ffi::Error CheckV1Regions(const PlanAttrs& p, const SpecAttrs& s,
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
    if (ffi::Error error = CheckRegion(r, p.smem_bytes); error.failure()) {
      return error;
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

ffi::Error CheckV2Regions(const PlanAttrs& p, int64_t rank) {
  if (rank % 16 != 0 || rank > kGemmV2MaxRank) {
    return Precondition("kernel ", V2Name(p), " takes ranks that are a multiple of 16 "
                        "up to ", kGemmV2MaxRank, ", lora_up has rank ", rank);
  }
  const int64_t rows = kGemmV2TileN;  // weight rows of this CTA
  const int64_t token = p.IsGrouped()
                            ? GroupedTokenBytes(p.V2Path(), p.tile_m)
                        : GemmV2TokenScale(p.V2Path()) ? p.tile_m * 4
                                                       : 0;
  // Up to the next swizzle pattern, so that the next slot starts with one.
  const int64_t groups =
      (GemmV2StageGroups(p.V2Path()) * p.tile_m * 4 + 1023) / 1024 * 1024;
  const int64_t rank_bytes = rank > 0 ? kGemmV2RankBytes : 0;
  const int64_t ring = p.stage_bytes * p.main_stages;
  // 1024: the swizzle of 128-byte rows repeats every eight of them; 512: of
  // 64-byte rows.
  const Region slot[] = {
      {"act", p.off_act, p.bytes_act, p.tile_m * kGemmV2RowBytes, 1, 1024},
      {"weight", p.off_weight, p.bytes_weight, rows * p.tile_k / 2, 1, 1024},
      {"lora_act", p.off_lora_act, p.bytes_lora_act, p.tile_m * rank_bytes, 1,
       512},
      {"lora_up", p.off_lora_up, p.bytes_lora_up, rows * rank_bytes, 1, 512},
      {"act_scale", p.off_act_scale, p.bytes_act_scale, groups, 1},
  };
  // The barriers only have to fit: the plan may round them up.
  const int64_t barriers = 16 * (p.main_stages + kGemmV2TokenStages);
  const Region whole[] = {
      {"store", p.off_store, p.bytes_store, p.tile_m * rows * 2, 1, 1024},
      {"act_scale", p.off_act_scale, p.bytes_act_scale, token,
       kGemmV2TokenStages},
      {"barriers", p.off_barriers, p.bytes_barriers,
       std::max(p.bytes_barriers, barriers), 1},
      {"main ring", 0, ring, ring, 1},
  };
  if (p.stage_bytes < 1 || p.stage_bytes % 1024 != 0 ||
      p.stage_bytes > p.smem_bytes) {
    return Precondition("plan has ", p.stage_bytes, " bytes per stage of ",
                        p.smem_bytes, "; expected a multiple of 1024, inside");
  }
  // The kernel puts activations and lora_act first in a slot.
  if (p.off_act != 0 || p.off_lora_act != 0) {
    return Precondition("plan puts act at offset ", p.off_act,
                        " and lora_act at ", p.off_lora_act,
                        " of a stage; the kernel has both at 0");
  }
  for (const Region& r : slot) {
    if (r.needed == 0) continue;
    if (ffi::Error e = CheckRegion(r, p.stage_bytes); e.failure()) return e;
  }
  for (const Region& r : whole) {
    if (r.needed == 0) continue;
    if (ffi::Error e = CheckRegion(r, p.smem_bytes); e.failure()) return e;
  }
  if (Overlap(slot[0], slot[1])) {
    return Precondition("plan lets weight overlap act");
  }
  if (groups > 0 && (Overlap(slot[0], slot[4]) || Overlap(slot[1], slot[4]))) {
    return Precondition("plan lets act_scale overlap act or weight");
  }
  if (rank > 0 && Overlap(slot[2], slot[3])) {
    return Precondition("plan lets lora_up overlap lora_act");
  }
  for (const Region& a : whole) {
    for (const Region& b : whole) {
      if (&a < &b && a.needed != 0 && b.needed != 0 && Overlap(a, b)) {
        return Precondition("plan lets ", a.name, " overlap ", b.name);
      }
    }
  }
  return ffi::Error::Success();
}

ffi::Error CheckDecodeRegions(const PlanAttrs& p, const SpecAttrs& s,
                              int64_t rank) {
  if (rank % 16 != 0 || rank > kGemmV2MaxRank) {
    return Precondition("kernel sm90_decode takes ranks that are a multiple of "
                        "16 up to ", kGemmV2MaxRank, ", lora_up has rank ",
                        rank);
  }
  const int64_t ring = p.stage_bytes * p.main_stages;
  // 1024: the swizzle of 128-byte rows repeats every eight of them.
  const Region slot[] = {
      {"weight", p.off_weight, p.bytes_weight, DecodeWeightBytes(p.tile_m, p.tile_n), 1,
       1024},
      {"act", p.off_act, p.bytes_act,
       DecodeActBytes(p.V2Path(), p.tile_m, p.tile_n), 1, 1024},
  };
  const Region whole[] = {
      {"main ring", 0, ring, ring, 1, 1024},
      {"weight_scale", p.off_weight_scale, p.bytes_weight_scale,
       DecodeScaleSlots(p.V2Path(), p.tile_m, p.tile_n, s.k_pad, p.cluster,
                        p.main_stages) *
           p.tile_n * kDecodeScaleBox,
       1, 1024},
      {"act_scale", p.off_act_scale, p.bytes_act_scale,
       GemmV2TokenScale(p.V2Path()) ? p.tile_m * 4 : 0, 1},
      {"lora_act", p.off_lora_act, p.bytes_lora_act,
       DecodeAddendBytes(p.tile_m, p.tile_n, rank, p.cluster), 1},
      {"aux", p.off_aux, p.bytes_aux, p.tile_n * kGemmV2RowInputBytes, 1},
      {"barriers", p.off_barriers, p.bytes_barriers,
       DecodeBarrierBytes(p.main_stages), 1},
      // Over the ring, once that is through, never over the others.
      {"store", p.off_store, p.bytes_store,
       DecodePartialBytes(p.tile_m, p.tile_n), 1},
  };
  if (p.stage_bytes < 1 || p.stage_bytes % 1024 != 0 ||
      p.stage_bytes > p.smem_bytes) {
    return Precondition("plan has ", p.stage_bytes, " bytes per stage of ",
                        p.smem_bytes, "; expected a multiple of 1024, inside");
  }
  if (p.off_weight != 0) {
    return Precondition("plan puts weight at offset ", p.off_weight,
                        " of a stage; the kernel has it at 0");
  }
  for (const Region& r : slot) {
    if (ffi::Error e = CheckRegion(r, p.stage_bytes); e.failure()) return e;
  }
  if (Overlap(slot[0], slot[1])) {
    return Precondition("plan lets weight overlap act");
  }
  for (const Region& a : whole) {
    if (a.needed == 0) continue;
    if (ffi::Error e = CheckRegion(a, p.smem_bytes); e.failure()) return e;
    for (const Region& b : whole) {
      const bool alias_ok = &a == &whole[0] && &b == &whole[6];
      if (&a < &b && b.needed != 0 && !alias_ok && Overlap(a, b)) {
        return Precondition("plan lets ", a.name, " overlap ", b.name);
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error CheckAttrs(const PlanAttrs& p, const SpecAttrs& s) {
  if (p.schema != kPlanSchema) {
    return Invalid("plan schema ", p.schema, ", this build reads schema ",
                   kPlanSchema,
                   "; export the program again with the installed version");
  }
  // Launch code narrows every one of them to int.
  static_assert(sizeof(PlanAttrs) % sizeof(int64_t) == 0);
  int64_t values[sizeof(PlanAttrs) / sizeof(int64_t)];
  std::memcpy(values, &p, sizeof(PlanAttrs));
  for (int64_t value : values) {
    if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
      return Invalid("plan holds ", value, "; expected 0 <= value < 2^31");
    }
  }
  const bool blackwell = p.IsBlackwell();
  if (!p.IsV1() && !p.IsPrivate() && !p.IsSm100()) {
    return Precondition("plan asks for kernel ", p.kernel,
                        "; expected 1 (sm90_v1), 3 (sm90_v2), 4 "
                        "(sm90_decode), 5 (sm90_grouped), 10 (sm100_v1) or 2 (sm100_v2)");
  }
  if (blackwell && !kBuiltForSm100) {
    return Precondition("plan asks for kernel ", p.kernel,
                        ", this build has no code for sm_100; rebuild with nvcc "
                        "12.9 or newer and JAX_W4A4_CUDA_ARCHS=90a;100a;103a");
  }
  if (blackwell ? p.cc != 100 && p.cc != 103 : p.cc != 90) {
    return Precondition("plan made for sm_", p.cc, ", kernel ", p.kernel,
                        " runs on ", blackwell ? "sm_100 and sm_103" : "sm_90",
                        " only");
  }
  if (ffi::Error error = CheckSpec(s); error.failure()) return error;
  if (p.IsDecode()) return CheckDecodeAttrs(p, s);
  if (p.HasV2Roles()) return CheckV2Attrs(p, s);
  return p.IsSm100() ? CheckSm100Attrs(p, s) : CheckV1Attrs(p);
}

ffi::Error CheckGemmRegions(const PlanAttrs& p, const SpecAttrs& s,
                            int64_t rank) {
  if (p.IsDecode()) return CheckDecodeRegions(p, s, rank);
  if (p.HasV2Roles()) return CheckV2Regions(p, rank);
  return p.IsSm100() ? CheckSm100Regions(p, s, rank) : CheckV1Regions(p, s, rank);
}

namespace {

// LoRA-down for Blackwell.
ffi::Error CheckSm100Down(const PlanAttrs& p) {
  const int64_t ring = kSm100DownStageBytes * p.down_stages;
  if (p.down_cluster == 1 && p.down_stages >= 2 &&
      p.off_down_barriers % 8 == 0 && p.off_down_barriers >= ring &&
      p.off_down_barriers + 16 * p.down_stages <= p.down_smem_bytes) {
    return ffi::Error::Success();
  }
  return Precondition("plan gives LoRA-down cluster ", p.down_cluster, ", ",
                      p.down_stages, " stages, barriers at ",
                      p.off_down_barriers, " of ", p.down_smem_bytes,
                      " bytes; it needs cluster 1, 2.. stages, barriers behind ",
                      ring, " bytes of ring");
}

// Quantizers 2 to 4, which hold a token in registers and leave LoRA-down to a
// launch of its own.
ffi::Error CheckTokenQuantizer(const PlanAttrs& p, const SpecAttrs& s,
                               int64_t rank) {
  const int64_t ranks = p.IsBlackwell() ? 8 : 16;
  const int64_t most = p.IsBlackwell()
                           ? std::numeric_limits<int32_t>::max()
                           : static_cast<int64_t>(kDownV2MaxRank);
  if (p.QuantizerIsV2() != p.IsPrivate() || p.QuantizerIsSm100() != p.IsSm100() ||
      s.k % 8 != 0 || rank % ranks != 0 || rank > most ||
      (rank > 0 && s.lora_smoothed != 0)) {
    return Precondition(
        "quantizer ", p.q_kernel, " takes k a multiple of 8, 2 before kernels "
        "sm90_v2, sm90_decode and sm90_grouped, 4 before sm100_v2 and 3 without one, rank a multiple of ",
        ranks, " up to ", most, ", LoRA-down on x; got kernel ", p.kernel, ", k ",
        s.k, ", rank ", rank, ", lora_smoothed ", s.lora_smoothed);
  }
  const bool compiled = HasTokenQuantizer(p.q_lane_chunks, p.q_warps);
  if (!compiled || s.k > TokenQuantizerMaxK(p.q_lane_chunks, p.q_warps) ||
      p.q_rows != TokensPerCta(p.q_warps) || p.q_chunk_k != s.k_pad ||
      p.q_threads != TokenQuantizerThreads(p.q_warps) || p.q_smem_bytes != 0) {
    return Precondition(
        "plan gives quantizer ", p.q_kernel, " ", p.q_rows, " rows, chunk ", p.q_chunk_k, ", ",
        p.q_threads, " threads, ", p.q_smem_bytes, " bytes, ", p.q_warps,
        " warps and ", p.q_lane_chunks, " lane chunks for k ", s.k,
        "; it needs lane chunks and warps 4 and 4, 4 and 8, 8 and 8 or 8 and 16 "
        "that hold k, all of k in one chunk, no dynamic shared memory");
  }
  if (rank == 0) {
    return p.down_cluster == 0 ? ffi::Error::Success()
                               : Precondition("plan launches LoRA-down, but "
                                              "lora_down has rank 0");
  }
  if (p.IsBlackwell()) return CheckSm100Down(p);
  const int64_t ring = DownV2StageBytes(rank) * p.down_stages;
  const int64_t barriers = 16 * p.down_stages;
  if (p.down_cluster < 1 || p.down_cluster > kDownV2MaxCluster ||
      p.down_stages < 2 || p.down_stages > kDownV2MaxStages ||
      p.off_down_barriers % 8 != 0 ||
      p.off_down_barriers < std::max(ring, DownV2PartialBytes(rank)) ||
      p.off_down_barriers + barriers > p.down_smem_bytes) {
    return Precondition(
        "plan gives LoRA-down cluster ", p.down_cluster, ", ", p.down_stages,
        " stages, barriers at ", p.off_down_barriers, " of ", p.down_smem_bytes,
        " bytes; it needs cluster 1..", kDownV2MaxCluster, ", 2..",
        kDownV2MaxStages, " stages, barriers behind ", ring, " bytes of ring and ",
        DownV2PartialBytes(rank), " of partial sums at rank ", rank);
  }
  return ffi::Error::Success();
}

// LoRA-down in the launch of sm90_decode.
ffi::Error CheckDownAhead(const PlanAttrs& p, int64_t m, int64_t rank) {
  const int64_t ring = DownAheadStageBytes(p.tile_m, m) * p.down_stages;
  const int64_t partial = DownAheadPartialBytes(p.tile_m, m);
  const int ctas = kDownAheadCtas * DownAheadGroups(m);
  if (p.down_ahead != ctas || rank < 1 || rank > kDownAheadRank ||
      p.tile_m < kDownAheadLeastTileM || m > kDecodeMostTokens ||
      p.down_cluster != 1 || p.down_stages < 2 ||
      p.down_stages > kDownAheadMaxStages || p.off_down_barriers % 8 != 0 ||
      p.off_down_barriers < std::max(ring, partial) ||
      p.off_down_barriers + 16 * p.down_stages > p.down_smem_bytes ||
      p.down_smem_bytes > p.smem_bytes) {
    return Precondition(
        "plan gives LoRA-down ", p.down_ahead,
        " CTAs of the gemm's launch of tile_m ", p.tile_m, " for ", m,
        " rows in clusters of ", p.down_cluster, ", ", p.down_stages,
        " stages, barriers at ", p.off_down_barriers, " of ", p.down_smem_bytes, " of the gemm's ",
        p.smem_bytes, " bytes at rank ", rank, "; it needs ", ctas,
        " of tile_m ", kDownAheadLeastTileM, " and more for up to ",
        kDecodeMostTokens, " rows, cluster 1, 2..",
        kDownAheadMaxStages, " stages, barriers behind ", ring,
        " bytes of ring and ", partial,
        " of partial sums, rank up to ", kDownAheadRank);
  }
  return ffi::Error::Success();
}

// Quantizer 5: like them, LoRA-down in the same launch or in the gemm's.
ffi::Error CheckDecodeQuantizer(const PlanAttrs& p, const SpecAttrs& s,
                                int64_t m, int64_t rank) {
  if (!p.IsDecode() || s.k % 8 != 0 || rank % 16 != 0 ||
      rank > kGemmV2MaxRank || (rank > 0 && s.lora_smoothed != 0)) {
    return Precondition(
        "quantizer 5 belongs to kernel sm90_decode and takes k a multiple of 8, "
        "rank a multiple of 16 up to ", kGemmV2MaxRank, ", LoRA-down on x; got "
        "kernel ", p.kernel, ", k ", s.k, ", rank ", rank, ", lora_smoothed ",
        s.lora_smoothed);
  }
  if (!HasDecodeQuantizer(p.q_lane_chunks, p.q_warps) ||
      s.k > TokenQuantizerMaxK(p.q_lane_chunks, p.q_warps) || p.q_rows != 1 ||
      p.q_chunk_k != s.k_pad || p.q_threads != 32 * p.q_warps ||
      p.q_smem_bytes != 0 ||
      (p.down_ahead == 0 &&
       (!(rank > 0 ? IsDecodeDownCluster(p.down_cluster) : p.down_cluster == 0) ||
        p.down_stages != 0 || p.down_smem_bytes != 0))) {
    return Precondition(
        "plan gives quantizer 5 ", p.q_rows, " rows, chunk ", p.q_chunk_k, ", ",
        p.q_threads, " threads, ", p.q_smem_bytes, " bytes, ", p.q_warps,
        " warps and ", p.q_lane_chunks, " lane chunks for k ", s.k,
        ", LoRA-down cluster ", p.down_cluster, ", ", p.down_stages,
        " stages and ", p.down_smem_bytes, " bytes; it needs one row, 2, 4 "
        "or 8 lane chunks of 8 warps or 1, 2, 4 or 8 of 16 that hold k, all of k in "
        "one chunk, no dynamic shared memory, cluster ",
        rank > 0 ? "8 or 16" : "0");
  }
  return p.down_ahead == 0 ? ffi::Error::Success() : CheckDownAhead(p, m, rank);
}

}  // namespace

ffi::Error CheckQuantizer(const PlanAttrs& p, const SpecAttrs& s, int64_t m,
                          int64_t rank) {
  if (p.down_ahead != 0 && !p.QuantizerIsDecode()) {
    return Precondition("plan gives LoRA-down ", p.down_ahead,
                        " CTAs of the gemm's launch behind quantizer ",
                        p.q_kernel, "; it needs quantizer 5");
  }
  if (p.QuantizerIsV2() || p.QuantizerIsPublic() || p.QuantizerIsSm100()) {
    return CheckTokenQuantizer(p, s, rank);
  }
  if (p.QuantizerIsDecode()) return CheckDecodeQuantizer(p, s, m, rank);
  const int64_t needed = QuantizeSmemBytes(rank > 0);
  if (p.q_kernel != static_cast<int64_t>(QuantizerId::kV1) ||
      p.q_rows != kQuantizeRows || p.q_chunk_k != kQuantizeChunk ||
      p.q_threads != kQuantizeThreads || p.q_smem_bytes != needed) {
    return Precondition("plan gives quantizer ", p.q_kernel, " ", p.q_rows,
                        " rows, chunk ", p.q_chunk_k, ", ", p.q_threads,
                        " threads, ", p.q_smem_bytes,
                        " bytes; quantizer 1 needs ", kQuantizeRows,
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

GemmV2Smem GetGemmV2Smem(const PlanAttrs& p) {
  return {static_cast<int>(p.off_weight),   static_cast<int>(p.off_lora_up),
          static_cast<int>(p.off_store),    static_cast<int>(p.off_act_scale),
          static_cast<int>(p.off_barriers), static_cast<int>(p.stage_bytes),
          static_cast<int>(p.smem_bytes)};
}

Sm100GemmSmem GetSm100GemmSmem(const PlanAttrs& p) {
  return {static_cast<int>(p.off_act),          static_cast<int>(p.off_weight),
          static_cast<int>(p.off_act_scale),
          static_cast<int>(p.off_weight_scale), static_cast<int>(p.off_store),
          static_cast<int>(p.off_aux),          static_cast<int>(p.off_barriers),
          static_cast<int>(p.smem_bytes)};
}

DecodeSmem GetDecodeSmem(const PlanAttrs& p) {
  return {static_cast<int>(p.off_act),       static_cast<int>(p.off_weight_scale),
          static_cast<int>(p.off_aux),       static_cast<int>(p.off_act_scale),
          static_cast<int>(p.off_store),     static_cast<int>(p.off_lora_act),
          static_cast<int>(p.off_barriers),  static_cast<int>(p.stage_bytes),
          static_cast<int>(p.smem_bytes)};
}

}  // namespace jax_w4a4
