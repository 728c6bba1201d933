"""Kernel plans: targets, the shared-memory account and the planner. Pure Python, no JAX needed.

>>> from jax_w4a4 import plan
>>> problem = plan.Problem(4352, 3072, 3840, 128, "nvfp4", 16, "bfloat16", "bfloat16",
...                        "bfloat16", "float8_e4m3fn")
>>> plan.solve(problem, "sm_100").main_stages
7
"""

from jax_w4a4.plan import budget, planner, roofline, targets, tuning
from jax_w4a4.plan.budget import Buffer, Config, Problem, QuantizerPlan, Region, Row
from jax_w4a4.plan.planner import (
    DoesNotFitError,
    Plan,
    Schedule,
    record,
    recording,
    schedule,
    solve,
)
from jax_w4a4.plan.targets import Target

__all__ = [
    "Buffer",
    "Config",
    "DoesNotFitError",
    "Plan",
    "Problem",
    "QuantizerPlan",
    "Region",
    "Row",
    "Schedule",
    "Target",
    "budget",
    "planner",
    "record",
    "recording",
    "roofline",
    "schedule",
    "solve",
    "targets",
    "tuning",
]
