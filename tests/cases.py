"""Random operands for tests: weights with every optional part, and activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import model
import numpy as np
from jax.extend.core import jaxprs_in_params

from jax_w4a4.weight import Weight


def weight(
    n: int,
    k: int,
    format: str = "nvfp4",
    *,
    rank: int = 8,
    seed: int = 0,
    block_size: int | None = -1,
    scale_dtype: str | None = None,
    lora_dtype: str = "bfloat16",
    full: bool = True,
    **static: object,
) -> Weight:
    """Random codes and moderate scales; with `full` every optional vector, else none."""
    rng = np.random.default_rng(seed)
    block = model.BLOCKS[format] if block_size == -1 else block_size
    blocks = -(-k // block) if block else 1
    scales = rng.uniform(0.05, 0.2, (n, blocks))
    if format == "mxfp4":
        scales = np.exp2(np.round(np.log2(scales)))
    scales = scales.astype(model.dtype_of(scale_dtype or model.SCALE_DTYPES[format]))
    parts: dict[str, object] = {}
    if full:
        parts = {
            "smooth": rng.uniform(0.5, 2.0, k),
            "channel_scale": rng.uniform(0.5, 2.0, n),
            "bias": rng.standard_normal(n),
        }
        if format == "nvfp4":
            parts |= {"global_scale": 0.7, "act_global_scale": 1.3}
    if rank:
        dtype = model.dtype_of(lora_dtype)
        parts |= {
            "lora_down": (0.2 * rng.standard_normal((k, rank))).astype(dtype),
            "lora_up": (0.2 * rng.standard_normal((n, rank))).astype(dtype),
        }
    packed = rng.integers(0, 256, (n, -(-k // 2)), np.uint8)
    return Weight.from_packed(packed, scales, format=format, k=k, **parts, **static)


def activation(*shape: int, dtype: str = "float32", seed: int = 1) -> jax.Array:
    """Standard normal x."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(x).astype(dtype)


def expected(x: jax.Array, w: Weight) -> np.ndarray:
    """y in float64 by the independent model, any leading dimensions."""
    rows = np.asarray(x).reshape(-1, x.shape[-1])
    return model.matmul_f64(rows, model.Operands.of(w)).reshape(*x.shape[:-1], w.shape[0])


def error(got: object, want: object) -> float:
    """Frobenius norm of the difference over that of `want`."""
    a, b = (np.asarray(v, np.float64) for v in (got, want))
    if a.shape != b.shape:
        raise AssertionError(f"shape {a.shape}, expected {b.shape}")
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def primitives_in(jaxpr: object) -> list[str]:
    """Names of the operator's primitives in a jaxpr and everything it calls, in program order."""
    names = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name.startswith("jax_w4a4_"):
            names.append(eqn.primitive.name.removeprefix("jax_w4a4_"))
        for sub in jaxprs_in_params(eqn.params):
            names += primitives_in(sub)
    return names
