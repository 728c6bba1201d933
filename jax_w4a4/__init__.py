"""4-bit x 4-bit matrix multiplication with low-rank residual for JAX.

    y = channel_scale * (alpha * sum_blocks(sx * sw * (qx . qw)))
        + (x @ lora_down) @ lora_up.T + bias

`quantize` turns a float weight into a `Weight`, `matmul` multiplies with it, `explain` shows what a
call will launch and why. See docs/numerics.md for every rounding point.
"""

from jax_w4a4._ffi import build_info, has_cuda
from jax_w4a4.explain import Explanation, explain
from jax_w4a4.grouped import grouped_matmul
from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.primitives import DISABLE_JAX_EXPORT_CHECKS, FallbackWarning
from jax_w4a4.quantize import quantization_error, quantize
from jax_w4a4.tune import Tuned, tune
from jax_w4a4.weight import Activation, Weight

__version__ = "0.1.0"
__all__ = [
    "DISABLE_JAX_EXPORT_CHECKS",
    "Activation",
    "Explanation",
    "FallbackWarning",
    "Tuned",
    "Weight",
    "build_info",
    "explain",
    "grouped_matmul",
    "has_cuda",
    "matmul",
    "quantization_error",
    "quantize",
    "quantize_activation",
    "tune",
]
