// The two attribute structs of every FFI call and the checks on them. The keys
// and their order are those of Plan.ffi_attrs() and Spec.ffi_attrs() in Python.
#ifndef JAX_W4A4_CUDA_PLAN_H_
#define JAX_W4A4_CUDA_PLAN_H_

#include <cstdint>

#include "formats.cuh"
#include "sm100_gemm.h"
#include "sm90_decode.h"
#include "sm90_gemm_v1.h"
#include "sm90_gemm_v2.h"
#include "sm90_grouped.h"
#include "xla/ffi/api/ffi.h"

namespace jax_w4a4 {

constexpr int64_t kPlanSchema = 5;

// Values of PlanAttrs::kernel.
enum class KernelId : int64_t {
  kSm90V1 = 1,
  kSm100V2 = 2,
  kSm90V2 = 3,
  kSm90Decode = 4,
  kSm90Grouped = 5,
  kSm100V1 = 10,
};
// Values of PlanAttrs::q_kernel.
enum class QuantizerId : int64_t {
  kV1 = 1,
  kV2 = 2,
  kPublic = 3,
  kSm100 = 4,
  kDecode = 5,
};

struct PlanAttrs {
  int64_t schema, kernel, cc;
  int64_t tile_m, tile_n, tile_k, cluster;
  int64_t main_stages, lora_stages, store_stages, threads, smem_bytes;
  // m tiles per sweep over n; 0 where the hardware orders the tiles.
  int64_t group_m;
  // Kernels with the roles of sm90_v2, sm90_decode: a GemmV2Path; 0 otherwise.
  int64_t path;
  // K elements that kMxfp4Promoted adds up in the tensor core; 0 otherwise.
  int64_t promote_k;
  // From one stage of the activation to the next.
  int64_t stage_bytes;
  // Offsets of the first stage from the start of dynamic shared memory.
  int64_t off_weight, off_act, off_weight_scale, off_act_scale, off_lora_up,
      off_lora_act, off_aux, off_store, off_barriers;
  // Bytes per stage.
  int64_t bytes_weight, bytes_act, bytes_weight_scale, bytes_act_scale,
      bytes_lora_up, bytes_lora_act, bytes_aux, bytes_store, bytes_barriers;
  int64_t q_kernel, q_rows, q_chunk_k, q_threads, q_smem_bytes;
  // Quantizers 2 to 4: warps that hold a token, pieces of eight values per lane; its
  // launch of LoRA-down, 0 without one.
  int64_t q_warps, q_lane_chunks, down_cluster, down_stages, down_smem_bytes,
      off_down_barriers;
  // LoRA-down in the gemm's launch: CTAs ahead of the others, 0 elsewhere; and how
  // many of the launch begin early.
  int64_t down_ahead, down_early;

  bool Is(KernelId id) const { return kernel == static_cast<int64_t>(id); }
  // GEMM v1, the same code on every architecture.
  bool IsV1() const { return Is(KernelId::kSm90V1) || Is(KernelId::kSm100V1); }
  bool IsV2() const { return Is(KernelId::kSm90V2); }
  bool IsGrouped() const { return Is(KernelId::kSm90Grouped); }
  // Kernels made of the roles of sm90_v2.
  bool HasV2Roles() const { return IsV2() || IsGrouped(); }
  bool IsDecode() const { return Is(KernelId::kSm90Decode); }
  // Kernels that read activations in the layout of sm90_v2.
  bool IsPrivate() const { return HasV2Roles() || IsDecode(); }
  bool IsSm100() const { return Is(KernelId::kSm100V2); }
  // Valid once CheckAttrs has passed, as all that follows.
  GemmV2Path V2Path() const { return static_cast<GemmV2Path>(path); }
  bool QuantizerIsV2() const {
    return q_kernel == static_cast<int64_t>(QuantizerId::kV2);
  }
  bool QuantizerIsDecode() const {
    return q_kernel == static_cast<int64_t>(QuantizerId::kDecode);
  }
  // Quantizers that write the private layout from x.
  bool QuantizerIsPrivate() const {
    return QuantizerIsV2() || QuantizerIsDecode();
  }
  bool QuantizerIsPublic() const {
    return q_kernel == static_cast<int64_t>(QuantizerId::kPublic);
  }
  bool QuantizerIsSm100() const {
    return q_kernel == static_cast<int64_t>(QuantizerId::kSm100);
  }
  bool IsBlackwell() const { return Is(KernelId::kSm100V1) || IsSm100(); }
};

struct SpecAttrs {
  int64_t format, k, k_pad, block_size, act_unsigned, act_rule, lora_smoothed;
};

// What can be judged from the attributes alone, so that it fails when XLA
// compiles: schema, kernel present in this build, architecture, tile, format,
// block size. INVALID_ARGUMENT or FAILED_PRECONDITION.
xla::ffi::Error CheckAttrs(const PlanAttrs& plan, const SpecAttrs& spec);

// Whether the regions of the plan are the ones that the gemm kernel uses for
// this call: sizes, alignment, no overlap, inside smem_bytes.
xla::ffi::Error CheckGemmRegions(const PlanAttrs& plan, const SpecAttrs& spec,
                                 int64_t rank);

// Whether the quantizer part of the plan is what its quantizer kernel uses for
// m rows.
xla::ffi::Error CheckQuantizer(const PlanAttrs& plan, const SpecAttrs& spec,
                               int64_t m, int64_t rank);

// Shared-memory layout of a plan that passed CheckGemmRegions.
GemmSmem GetGemmSmem(const PlanAttrs& plan);
GemmV2Smem GetGemmV2Smem(const PlanAttrs& plan);
Sm100GemmSmem GetSm100GemmSmem(const PlanAttrs& plan);
DecodeSmem GetDecodeSmem(const PlanAttrs& plan);

}  // namespace jax_w4a4

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_w4a4::PlanAttrs, StructMember<int64_t>("schema"),
    StructMember<int64_t>("kernel"), StructMember<int64_t>("cc"),
    StructMember<int64_t>("tile_m"), StructMember<int64_t>("tile_n"),
    StructMember<int64_t>("tile_k"), StructMember<int64_t>("cluster"),
    StructMember<int64_t>("main_stages"), StructMember<int64_t>("lora_stages"),
    StructMember<int64_t>("store_stages"), StructMember<int64_t>("threads"),
    StructMember<int64_t>("smem_bytes"), StructMember<int64_t>("group_m"),
    StructMember<int64_t>("path"), StructMember<int64_t>("promote_k"),
    StructMember<int64_t>("stage_bytes"), StructMember<int64_t>("off_weight"),
    StructMember<int64_t>("off_act"), StructMember<int64_t>("off_weight_scale"),
    StructMember<int64_t>("off_act_scale"),
    StructMember<int64_t>("off_lora_up"), StructMember<int64_t>("off_lora_act"),
    StructMember<int64_t>("off_aux"), StructMember<int64_t>("off_store"),
    StructMember<int64_t>("off_barriers"), StructMember<int64_t>("bytes_weight"),
    StructMember<int64_t>("bytes_act"),
    StructMember<int64_t>("bytes_weight_scale"),
    StructMember<int64_t>("bytes_act_scale"),
    StructMember<int64_t>("bytes_lora_up"),
    StructMember<int64_t>("bytes_lora_act"), StructMember<int64_t>("bytes_aux"),
    StructMember<int64_t>("bytes_store"),
    StructMember<int64_t>("bytes_barriers"), StructMember<int64_t>("q_kernel"),
    StructMember<int64_t>("q_rows"), StructMember<int64_t>("q_chunk_k"),
    StructMember<int64_t>("q_threads"), StructMember<int64_t>("q_smem_bytes"),
    StructMember<int64_t>("q_warps"), StructMember<int64_t>("q_lane_chunks"),
    StructMember<int64_t>("down_cluster"), StructMember<int64_t>("down_stages"),
    StructMember<int64_t>("down_smem_bytes"),
    StructMember<int64_t>("off_down_barriers"),
    StructMember<int64_t>("down_ahead"), StructMember<int64_t>("down_early"));

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jax_w4a4::SpecAttrs, StructMember<int64_t>("format"),
    StructMember<int64_t>("k"), StructMember<int64_t>("k_pad"),
    StructMember<int64_t>("block_size"), StructMember<int64_t>("act_unsigned"),
    StructMember<int64_t>("act_rule"), StructMember<int64_t>("lora_smoothed"));

#endif  // JAX_W4A4_CUDA_PLAN_H_
