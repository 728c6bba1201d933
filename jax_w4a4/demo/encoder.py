"""The sentence encoder all-MiniLM-L6-v2 as a Flax NNX model, loaded without torch.

A BERT of six post-norm layers, hidden size 384, 12 heads; the sentence's embedding is the
mean of the last layer's states over the real tokens, divided by its L2 norm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import Tokenizer as _Tokenizer

# Names of a layer's linears here and in the checkpoint.
LINEARS: dict[str, str] = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
}
_NORMS: dict[str, str] = {
    "attention_norm": "attention.output.LayerNorm",
    "mlp_norm": "output.LayerNorm",
}


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder, under the names of the checkpoint's ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    layer_norm_eps: float

    @classmethod
    def from_file(cls, path: Path) -> Config:
        """Reads ``config.json``; raises ValueError for another architecture than this one."""
        raw = json.loads(path.read_text())
        for key, expected in (
            ("model_type", "bert"),
            ("hidden_act", "gelu"),
            ("position_embedding_type", "absolute"),
        ):
            if raw.get(key, expected) != expected:
                raise ValueError(
                    f"jax_w4a4.demo: {path} has {key} {raw[key]!r}; this encoder is a BERT "
                    f"with {key} {expected!r}"
                )
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__})


class Layer(nnx.Module):
    """One post-norm transformer layer; each attribute named in ``LINEARS`` can be replaced."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_attention_heads
        self.query = nnx.Linear(hidden, hidden, rngs=rngs)
        self.key = nnx.Linear(hidden, hidden, rngs=rngs)
        self.value = nnx.Linear(hidden, hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, rngs=rngs)
        self.fc1 = nnx.Linear(hidden, inner, rngs=rngs)
        self.fc2 = nnx.Linear(inner, hidden, rngs=rngs)
        self.attention_norm = _norm(config, rngs)
        self.mlp_norm = _norm(config, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x (B, S, hidden) f32, mask (B, S) bool, True at real tokens -> (B, S, hidden) f32."""
        heads = (*x.shape[:2], self.num_heads, -1)
        attended = jax.nn.dot_product_attention(
            self.query(x).reshape(heads),
            self.key(x).reshape(heads),
            self.value(x).reshape(heads),
            mask=mask[:, None, None, :],
        )
        x = self.attention_norm(x + self.out(attended.reshape(x.shape)))
        inner = jax.nn.gelu(self.fc1(x), approximate=False)
        return self.mlp_norm(x + self.fc2(inner))


class Encoder(nnx.Module):
    """Token ids -> unit sentence embeddings."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.words = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, config.hidden_size, rngs=rngs)
        # Only one segment ever occurs, so its embedding is one vector.
        self.segment = nnx.Param(jnp.zeros((config.hidden_size,), jnp.float32))
        self.norm = _norm(config, rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])

    def embed(self, ids: jax.Array) -> jax.Array:
        """ids (B, S) int32 -> the first layer's input (B, S, hidden) f32."""
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
        x = self.words(ids) + self.positions(positions)[None] + self.segment[...][None, None]
        return self.norm(x)

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """ids (B, S) int32, mask (B, S) bool -> embeddings (B, hidden) f32 of norm 1."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return pool(x, mask)


def pool(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x (B, S, hidden) over the tokens in mask (B, S), divided by its L2 norm."""
    weights = mask[:, :, None].astype(jnp.float32)
    # An empty row (padding of the batch) has no token: its sum is 0 and stays 0.
    mean = jnp.sum(x * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1.0)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # E[x^2] - E[x]^2 cancels; the checkpoint was trained with the two-pass variance.
    return nnx.LayerNorm(
        config.hidden_size, epsilon=config.layer_norm_eps, use_fast_variance=False, rngs=rngs
    )


def load(model_dir: Path) -> Encoder:
    """The encoder with the weights of ``model_dir``/model.safetensors in float32.

    Raises:
      FileNotFoundError: config.json or model.safetensors is missing.
      ValueError: another architecture, or a tensor of another shape than config.json says.
    """
    config = Config.from_file(model_dir / "config.json")
    tensors = load_file(model_dir / "model.safetensors")
    encoder = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))

    def assign(param: nnx.Variable, name: str, value: np.ndarray) -> None:
        if value.shape != param.shape:
            raise ValueError(
                f"jax_w4a4.demo: tensor {name} has shape {value.shape}, config.json "
                f"implies {param.shape}"
            )
        param.set_value(jnp.asarray(value, jnp.float32))

    def assign_norm(norm: nnx.LayerNorm, prefix: str) -> None:
        assign(norm.scale, prefix, tensors[f"{prefix}.weight"])
        assign(norm.bias, prefix, tensors[f"{prefix}.bias"])

    for embed, name in ((encoder.words, "word"), (encoder.positions, "position")):
        key = f"embeddings.{name}_embeddings.weight"
        assign(embed.embedding, key, tensors[key])
    key = "embeddings.token_type_embeddings.weight"
    assign(encoder.segment, key, tensors[key][0])
    assign_norm(encoder.norm, "embeddings.LayerNorm")
    for index, layer in enumerate(encoder.layers):
        prefix = f"encoder.layer.{index}"
        for name, source in LINEARS.items():
            linear, key = getattr(layer, name), f"{prefix}.{source}"
            # Checkpoint (out, in), flax (in, out).
            assign(linear.kernel, key, tensors[f"{key}.weight"].T)
            assign(linear.bias, key, tensors[f"{key}.bias"])
        for name, source in _NORMS.items():
            assign_norm(getattr(layer, name), f"{prefix}.{source}")
    return encoder


def linears(encoder: Encoder) -> Iterator[tuple[str, Any]]:
    """(path, module) of every linear in the layers, e.g. ``layers.0.query``."""
    for index, layer in enumerate(encoder.layers):
        for name in LINEARS:
            yield f"layers.{index}.{name}", getattr(layer, name)


def replace_linears(encoder: Encoder, make: Callable[[str, Any], nnx.Module]) -> Encoder:
    """A copy of ``encoder`` whose linear at each path is ``make(path, linear)``."""
    # Split and merge copy the structure and share the arrays.
    copy = nnx.merge(*nnx.split(encoder))
    for index, layer in enumerate(copy.layers):
        for name in LINEARS:
            setattr(layer, name, make(f"layers.{index}.{name}", getattr(layer, name)))
    return copy


class Tokenizer:
    """The checkpoint's WordPiece tokenizer; ids padded to one length per call."""

    def __init__(self, model_dir: Path, *, max_length: int = 256):
        self._tokenizer = _Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._tokenizer.enable_truncation(max_length)
        self._tokenizer.enable_padding(pad_to_multiple_of=8)

    def __call__(self, sentences: Sequence[str]) -> tuple[jax.Array, jax.Array]:
        """Sentences -> ids (B, S) int32 and mask (B, S) bool, S a multiple of 8."""
        encodings = self._tokenizer.encode_batch(list(sentences))
        ids = jnp.asarray([e.ids for e in encodings], jnp.int32)
        return ids, jnp.asarray([e.attention_mask for e in encodings], jnp.bool_)
