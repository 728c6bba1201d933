"""GPU targets: what a kernel plan has to know about the chip.

Pure data plus a look-up. Nothing here imports JAX except :func:`current`, and only when called.

Units: bytes, bytes per second, FLOP per second (dense, no sparsity; one multiply-add is 2 FLOP).
Each figure names its source in :attr:`Target.sources`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ENV_TARGET", "RESIDENT_OBJECTS", "TARGETS", "Target", "current", "get"]

ENV_TARGET = "JAX_W4A4_TARGET"

# Names of the rows of the accounting table (see budget.py).
RESIDENT_OBJECTS = (
    "weight",
    "activation",
    "weight_scale",
    "activation_scale",
    "lora_up",
    "lora_act",
    "store",
    "accumulator",
    "aux",
    "barriers",
)


@dataclasses.dataclass(frozen=True)
class Target:
    """One GPU architecture, with the figures of the part named in ``chip``.

    Attributes:
      name: ``"sm_90"`` and so on.
      cc: compute capability, ten times major plus minor.
      chip: the product whose SM count, bandwidth and peaks are listed.
      smem_bytes: largest dynamic shared memory one block may opt in to.
      smem_per_sm: shared memory of one SM (bounds the co-resident blocks).
      sm_count: streaming multiprocessors.
      tmem_columns: tensor-memory columns of one SM (128 lanes of 4 bytes each), 0 without TMEM.
      hbm_bytes_per_s: peak DRAM bandwidth.
      l2_bytes: L2 capacity.
      peak_fp32: of the CUDA cores.
      peak_bf16, peak_fp8, peak_int8, peak_fp4: dense tensor-core peaks, 0.0 where the MMA
        does not exist.
      halved: resident objects of which each CTA of a two-CTA MMA group holds half.
      multicast: resident objects whose L2 reads a two-CTA cluster halves by multicast;
        their footprint stays whole.
      sources: pairs (field, where the figure comes from).
    """

    name: str
    cc: int
    chip: str
    smem_bytes: int
    smem_per_sm: int
    sm_count: int
    tmem_columns: int
    hbm_bytes_per_s: float
    l2_bytes: int
    peak_fp32: float
    peak_bf16: float
    peak_fp8: float
    peak_int8: float
    peak_fp4: float
    halved: frozenset[str] = frozenset()
    multicast: frozenset[str] = frozenset()
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        unknown = (self.halved | self.multicast) - set(RESIDENT_OBJECTS)
        if unknown:
            raise ValueError(
                f"jax_w4a4.plan: target {self.name!r} names unknown resident objects "
                f"{sorted(unknown)}; known: {', '.join(RESIDENT_OBJECTS)}"
            )


# tcgen05.mma.cta_group::2 splits A and D by M and B by N between the two CTAs. The block
# scales of A follow A; both CTAs need the scales of all N columns of B. LoRA operands go
# through the same MMA, so lora_act follows A and lora_up follows B.
_CTA_PAIR_HALVES = frozenset(
    {"activation", "activation_scale", "lora_act", "weight", "lora_up", "accumulator"}
)
# wgmma reads the shared memory of its own CTA only: a Hopper cluster along N shares the tokens'
# tiles by TMA multicast (half the L2 reads each) and keeps a full copy in each CTA. The tokens'
# scales are too few to share: each CTA fetches its own.
_HOPPER_MULTICAST = frozenset({"activation", "lora_act"})

_CUDA_GUIDE = "CUDA programming guide, technical specifications per compute capability"

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        t.name: t
        for t in (
            Target(
                name="sm_90",
                cc=90,
                chip="H200 SXM",
                smem_bytes=232448,
                smem_per_sm=233472,
                sm_count=132,
                tmem_columns=0,
                hbm_bytes_per_s=4.8e12,
                l2_bytes=60 * 2**20,
                peak_fp32=67e12,
                peak_bf16=989e12,
                peak_fp8=1979e12,
                peak_int8=1979e12,
                peak_fp4=0.0,
                multicast=_HOPPER_MULTICAST,
                sources=(
                    ("smem_bytes", _CUDA_GUIDE),
                    ("sm_count", "H200 SXM datasheet (H100 SXM: the same)"),
                    ("hbm_bytes_per_s", "H200 datasheet; a copy kernel reaches 4.3e12"),
                    ("l2_bytes", "CUDA device property of an H200 (H100: 50 MiB)"),
                    ("peak_fp32", "H200 datasheet"),
                    ("peak_bf16", "H200 datasheet, dense"),
                    ("peak_fp8", "H200 datasheet, dense"),
                    ("peak_int8", "H200 datasheet, dense"),
                    ("peak_fp4", "no FP4 tensor core"),
                ),
            ),
            Target(
                name="sm_100",
                cc=100,
                chip="B200",
                smem_bytes=232448,
                smem_per_sm=233472,
                sm_count=148,
                tmem_columns=512,
                hbm_bytes_per_s=8.0e12,
                l2_bytes=126 * 2**20,
                peak_fp32=75e12,
                peak_bf16=2.25e15,
                peak_fp8=4.5e15,
                peak_int8=4.5e15,
                peak_fp4=1.0e16,
                halved=_CTA_PAIR_HALVES,
                sources=(
                    ("smem_bytes", _CUDA_GUIDE),
                    ("sm_count", "CUDA device property: two dies of 74 SMs"),
                    ("hbm_bytes_per_s", "B200 datasheet (bus width and clock give 7.67e12)"),
                    ("l2_bytes", "Blackwell tuning guide, CUDA toolkit"),
                    ("peak_fp32", "HGX B200 datasheet, an eighth"),
                    ("peak_bf16", "B200 datasheet, dense"),
                    ("peak_fp8", "B200 datasheet, dense"),
                    ("peak_int8", "B200 datasheet, dense"),
                    ("peak_fp4", "10 PFLOP/s dense, the figure published MFUs divide by"),
                ),
            ),
            Target(
                name="sm_103",
                cc=103,
                chip="B300",
                smem_bytes=232448,
                smem_per_sm=233472,
                sm_count=148,
                tmem_columns=512,
                hbm_bytes_per_s=8.0e12,
                l2_bytes=126 * 2**20,
                peak_fp32=75e12,
                peak_bf16=2.25e15,
                peak_fp8=4.5e15,
                peak_int8=1.5e14,
                peak_fp4=1.35e16,
                halved=_CTA_PAIR_HALVES,
                sources=(
                    ("smem_bytes", _CUDA_GUIDE),
                    ("sm_count", "148 of the die pair's 160 enabled"),
                    ("hbm_bytes_per_s", "B300 datasheet"),
                    ("l2_bytes", "taken equal to B200"),
                    ("peak_fp32", "taken equal to B200"),
                    ("peak_bf16", "B300 datasheet, dense"),
                    ("peak_fp8", "B300 datasheet, dense"),
                    ("peak_int8", "HGX B300 datasheet, dense: a thirtieth of B200"),
                    ("peak_fp4", "13.5 PFLOP/s dense, the figure published MFUs divide by"),
                ),
            ),
            Target(
                name="sm_120",
                cc=120,
                chip="RTX PRO 6000 Blackwell",
                smem_bytes=101376,
                smem_per_sm=102400,
                sm_count=188,
                tmem_columns=0,
                hbm_bytes_per_s=1.792e12,
                l2_bytes=128 * 2**20,
                peak_fp32=125e12,
                peak_bf16=5.0e14,
                peak_fp8=1.0e15,
                peak_int8=1.0e15,
                peak_fp4=2.0e15,
                sources=(
                    ("smem_bytes", _CUDA_GUIDE),
                    ("sm_count", "datasheet: 24064 CUDA cores, 128 per SM"),
                    ("hbm_bytes_per_s", "datasheet, GDDR7"),
                    ("l2_bytes", "RTX Blackwell PRO white paper"),
                    ("peak_fp32", "datasheet"),
                    ("peak_bf16", "half of FP8"),
                    ("peak_fp8", "half of FP4"),
                    ("peak_int8", "equal to FP8"),
                    ("peak_fp4", "datasheet: 4000 AI TOPS with sparsity, halved"),
                ),
            ),
        )
    }
)


def get(name: str | Target) -> Target:
    """Returns the target called ``name`` (``"sm_90"``, ``"90"``, ``"9.0"`` or ``"sm_90a"``).

    A :class:`Target` is returned unchanged.

    Raises:
      NotImplementedError: an NVIDIA architecture without an entry in :data:`TARGETS`.
      ValueError: anything else.
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"jax_w4a4.plan: a target is a string such as 'sm_90' or a Target, "
            f"got {type(name).__name__}"
        )
    text = name.strip().lower()
    digits = text.removeprefix("sm_").removeprefix("sm").rstrip("af").replace(".", "")
    found = TARGETS.get(f"sm_{digits}")
    if found is not None:
        return found
    known = ", ".join(TARGETS)
    if digits.isdecimal() and 2 <= len(digits) <= 3:
        raise NotImplementedError(
            f"jax_w4a4.plan: no kernel plan for target {name!r}; known targets: {known}. "
            "The operator itself runs anywhere with implementation='xla'."
        )
    raise ValueError(f"jax_w4a4.plan: unknown target {name!r}; known targets: {known}")


def current() -> Target:
    """The target to plan for when none is named.

    In this order: the first local CUDA device that JAX can use, the environment variable
    ``JAX_W4A4_TARGET``, ``sm_90``. The SM count of a CUDA device replaces the table's.
    When JAX is missing or restricted to other platforms, no backend is touched.

    Raises:
      NotImplementedError: the CUDA device's architecture is not in the table.
      ValueError: ``JAX_W4A4_TARGET`` names no target.
    """
    device = _cuda_device()
    if device is not None:
        target = get(str(device.compute_capability))
        sm_count = getattr(device, "core_count", None)
        if isinstance(sm_count, int) and sm_count > 0 and sm_count != target.sm_count:
            target = dataclasses.replace(target, sm_count=sm_count)
        return target
    return get(os.environ.get(ENV_TARGET) or "sm_90")


def _cuda_device():
    """First local CUDA device, or None; initialises a backend only if it may be CUDA."""
    try:
        import jax
    except ImportError:
        return None
    allowed = jax.config.jax_platforms
    if allowed and not {"cuda", "gpu"} & set(allowed.split(",")):
        return None
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
