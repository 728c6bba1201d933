"""What the demo measures: quantized variants of the encoder against the float32 one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_w4a4.demo.encoder import Encoder, linears, replace_linears
from jax_w4a4.flax.nnx import Linear

BATCH = 64
# GELU's minimum is -0.16997.
GELU_SHIFT = 0.17


@dataclass(frozen=True)
class Variant:
    """How the linears are quantized: format, rank, and smoothing strength (None: data-free)."""

    format: str
    rank: int
    alpha: float | None = None

    @property
    def label(self) -> str:
        smoothing = "" if self.alpha is None else f" + smoothing {self.alpha:g}"
        return f"rank {self.rank}{smoothing}"


@dataclass(frozen=True)
class Result:
    """One row of the demo's table.

    Attributes:
      format, label: what was measured; "fp32" for the encoder as it came.
      mean_cosine, min_cosine: cosine of each embedding to its fp32 one.
      top1_kept: share of sentences whose nearest neighbour is the fp32 one.
      top5_overlap: mean share of the five nearest that are the same.
      spearman: mean rank correlation of each sentence's similarities to all others.
      linear_bytes, total_bytes: bytes of the linears' parameters, of all parameters.
      quantize_seconds: time to quantize the linears, compilation included.
      encode_seconds: best time to encode all sentences, compiled.
    """

    format: str
    label: str
    mean_cosine: float
    min_cosine: float
    top1_kept: float
    top5_overlap: float
    spearman: float
    linear_bytes: int
    total_bytes: int
    quantize_seconds: float
    encode_seconds: float


class _AbsMax(nnx.Variable[jax.Array]):
    """Largest |x| seen per input channel."""


class _Observed(nnx.Module):
    """A linear that records the largest |x| per input channel over the real tokens."""

    def __init__(self, linear: nnx.Linear, mask: jax.Array):
        self.linear = linear
        self.mask = nnx.Variable(mask)
        self.amax = _AbsMax(jnp.zeros((linear.in_features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        real = jnp.where(self.mask[...][:, :, None], jnp.abs(x), 0.0)
        self.amax[...] = jnp.maximum(self.amax[...], jnp.max(real, axis=(0, 1)))
        return self.linear(x)


def calibrate(encoder: Encoder, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Path of each linear -> (K,) f32 largest |x| per input channel over the sentences."""
    observed = replace_linears(encoder, lambda _, linear: _Observed(linear, mask))
    _encode(observed, ids, mask)
    return {path: module.amax[...] for path, module in linears(observed)}


class Shifted(nnx.Module):
    """A quantized linear of x >= -shift that reads x + shift, in codes 0..15.

    Half of int4's signed codes would stand for values that GELU never gives, so its input is moved
    up and quantized as unsigned, as nunchaku does; the bias takes the shift out again.
    """

    def __init__(self, linear: nnx.Linear, shift: float, act_amax: jax.Array | None, **options):
        if act_amax is not None:
            options["act_amax"] = act_amax + shift
        self.linear = Linear.from_linear(linear, act_unsigned=True, **options)
        self.shift = shift
        moved = jnp.full((linear.in_features,), shift, jnp.float32)
        exact = jnp.matmul(
            self.linear.as_weight().effective(), moved, precision=jax.lax.Precision.HIGHEST
        )
        self.linear.bias[...] = self.linear.bias[...] - exact

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x + self.shift)


def quantize_encoder(
    encoder: Encoder,
    variant: Variant,
    amax: dict[str, jax.Array],
    *,
    iterations: int,
    progress: Callable[[], None] = lambda: None,
) -> Encoder:
    """The encoder with each linear replaced by :class:`jax_w4a4.flax.nnx.Linear`.

    For int4 the one after GELU becomes a :class:`Shifted` one.

    Args:
      encoder: the float32 encoder.
      variant: format, rank, smoothing.
      amax: calibration by path, used when the variant smooths.
      iterations: rounds of low-rank fit and rounding, as for :func:`jax_w4a4.quantize`.
      progress: called after each linear.
    """

    def make(path: str, linear: nnx.Linear) -> nnx.Module:
        options: dict[str, Any] = {
            "format": variant.format,
            "rank": variant.rank,
            "iterations": iterations,
            "act_amax": None,
        }
        if variant.alpha is not None:
            options |= {"act_amax": amax[path], "smooth_alpha": variant.alpha}
        if variant.format == "int4" and path.endswith(".fc2"):
            quantized = Shifted(linear, GELU_SHIFT, **options)
        else:
            quantized = Linear.from_linear(linear, **options)
        jax.block_until_ready(nnx.state(quantized))
        progress()
        return quantized

    return replace_linears(encoder, make)


@nnx.jit
def _encode(encoder: Encoder, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return encoder(ids, mask)


def encode(encoder: Encoder, ids: jax.Array, mask: jax.Array) -> np.ndarray:
    """Embeddings (B, hidden), in batches of one shape so that it compiles once."""
    rows = ids.shape[0]
    batch = min(rows, BATCH)
    pad = ((0, -rows % batch), (0, 0))
    ids, mask = jnp.pad(ids, pad), jnp.pad(mask, pad)
    parts = [
        _encode(encoder, ids[start : start + batch], mask[start : start + batch])
        for start in range(0, ids.shape[0], batch)
    ]
    return np.concatenate([np.asarray(part) for part in parts])[:rows]


def parameter_bytes(tree: Any) -> int:
    """True bytes of every array in a module or pytree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(tree)))


def measure(
    encoder: Encoder,
    ids: jax.Array,
    mask: jax.Array,
    reference: np.ndarray,
    variant: Variant | None,
    quantize_seconds: float = 0.0,
) -> Result:
    """Encodes the sentences and compares with the fp32 embeddings ``reference`` (B, hidden)."""
    embeddings = encode(encoder, ids, mask)
    encode_seconds = min(_seconds(lambda: encode(encoder, ids, mask)) for _ in range(2))
    cosines = np.sum(embeddings * reference, axis=1)
    ranking, expected = _others(embeddings), _others(reference)
    top = min(5, expected.shape[1])
    near, near_expected = _nearest(ranking, top), _nearest(expected, top)
    overlap = [len(set(a) & set(b)) / top for a, b in zip(near, near_expected, strict=True)]
    return Result(
        format="fp32" if variant is None else variant.format,
        label="as shipped" if variant is None else variant.label,
        mean_cosine=float(cosines.mean()),
        min_cosine=float(cosines.min()),
        top1_kept=float(np.mean(near[:, 0] == near_expected[:, 0])),
        top5_overlap=float(np.mean(overlap)),
        spearman=float(np.mean([_spearman(a, b) for a, b in zip(ranking, expected, strict=True)])),
        linear_bytes=sum(parameter_bytes(module) for _, module in linears(encoder)),
        total_bytes=parameter_bytes(encoder),
        quantize_seconds=quantize_seconds,
        encode_seconds=encode_seconds,
    )


def variants(formats: Sequence[str], rank: int, alpha: float) -> list[Variant]:
    """Per format: without low-rank, with it, and with smoothing as well."""
    ranks = dict.fromkeys((0, rank))
    return [
        variant
        for format in formats
        for variant in (*(Variant(format, r) for r in ranks), Variant(format, rank, alpha))
    ]


def _seconds(f: Callable[[], Any]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def _others(embeddings: np.ndarray) -> np.ndarray:
    """(B, B-1) cosine similarity of each sentence to every other one."""
    rows = len(embeddings)
    similarity = embeddings @ embeddings.T
    return similarity[~np.eye(rows, dtype=bool)].reshape(rows, rows - 1)


def _nearest(similarity: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-similarity, axis=1, kind="stable")[:, :count]


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    # Similarities are distinct floats, so ranks need no averaging over ties.
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])
