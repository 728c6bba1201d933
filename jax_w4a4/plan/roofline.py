"""Time bounds of a launch from datasheet peaks. Computed, never measured."""

from __future__ import annotations

import dataclasses

from jax_w4a4.plan import budget
from jax_w4a4.plan.budget import Design, Problem, Traffic
from jax_w4a4.plan.planner import Schedule
from jax_w4a4.plan.targets import Target

__all__ = ["Launch", "gemm", "quantizer"]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Roofline of one kernel launch. Computed from datasheet peaks, not measured.

    Attributes:
      traffic: FLOP and compulsory DRAM bytes.
      compute: (what, seconds at peak, the peak in FLOP/s, its name), one per entry of
        ``traffic.flops``; they add up, a launch does one after the other.
      dram_s: seconds for all bytes at peak bandwidth.
      fill: share of the waves' tiles that exist (1.0 where the launch is not tiled so).
    """

    traffic: Traffic
    compute: tuple[tuple[str, float, float, str], ...]
    dram_s: float
    fill: float

    @property
    def compute_s(self) -> float:
        return sum(seconds for _, seconds, _, _ in self.compute)

    @property
    def roofline_s(self) -> float:
        """Seconds, the larger of compute and DRAM, all SMs busy."""
        return max(self.compute_s, self.dram_s)

    @property
    def filled_s(self) -> float:
        """Seconds with the compute part stretched by partly filled waves."""
        return max(self.compute_s / self.fill if self.fill else 0.0, self.dram_s)

    @property
    def limit(self) -> str:
        """``"DRAM"`` or the largest compute part."""
        if self.dram_s >= self.compute_s:
            return "DRAM"
        return max(self.compute, key=lambda part: part[1])[0]


def gemm(
    kernel: str, problem: Problem, m: int, target: Target, schedule: Schedule, ahead: int = 0
) -> Launch:
    """Bounds of the gemm of ``m`` rows by the kernel design ``kernel``.

    ``ahead``: CTAs of its launch that have LoRA-down.
    """
    design = budget.DESIGNS[kernel]
    traffic = budget.gemm_traffic(problem, m, design.private_layout, ahead)
    return _launch(design, problem, traffic, target, schedule.fill)


def quantizer(
    kernel: str, problem: Problem, m: int, target: Target, private: bool = False, ahead: int = 0
) -> Launch:
    """Bounds of the activation quantizer that runs before the kernel design ``kernel``.

    ``private``: it writes the layout of that kernel, not the public one.
    ``ahead``: CTAs of that kernel's launch that have LoRA-down.
    """
    design = budget.DESIGNS[kernel]
    traffic = budget.quantizer_traffic(problem, m, private, design.scale_atoms, ahead)
    return _launch(design, problem, traffic, target, 1.0)


def _launch(
    design: Design, problem: Problem, traffic: Traffic, target: Target, fill: float
) -> Launch:
    compute = []
    low_rank = {"LoRA-up": design.up_peak, "LoRA-down": design.down_peak}
    for what, flops in traffic.flops:
        if flops:
            field = low_rank.get(what) or design.peak(problem)
            peak = getattr(target, field)
            compute.append((what, flops / peak, peak, field.removeprefix("peak_")))
    return Launch(traffic, tuple(compute), traffic.total_bytes / target.hbm_bytes_per_s, fill)
