"""The layer shapes that are timed, and the routes a JAX user could take through them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import jax_w4a4


@dataclasses.dataclass(frozen=True)
class Shape:
    m: int
    k: int
    n: int
    rank: int

    @property
    def flops(self) -> int:
        """The main product only, so that routes with and without a low-rank branch compare."""
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}r{self.rank}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """'MxKxN' or 'MxKxNrR'."""
        dims, _, rank = text.partition("r")
        m, k, n = map(int, dims.split("x"))
        return cls(m, k, n, int(rank or 0))


# Z-Image Turbo at 1024 x 1024 (svdquant-kernels' production shapes), one that divides by no tile
# (Qwen-Image, 83^2 tokens) and a square one.
PREFILL = (
    Shape(4352, 3840, 3072, 128),
    Shape(4352, 3840, 15360, 128),
    Shape(4352, 15360, 3840, 128),
    Shape(4352, 10240, 3072, 32),
    Shape(8192, 8192, 8192, 128),
    Shape(6889, 3072, 12288, 128),
)


def random_layer(key: jax.Array, shape: Shape, format: str) -> tuple[jax.Array, jax_w4a4.Weight]:
    """Gaussian bf16 x and a weight with low-rank branch, bias and channel_scale.

    The low-rank factors are random rather than an SVD: the kernels cannot tell, and a benchmark
    need not wait for one decomposition per operand set.
    """
    kx, kw, kd, ku, kb = jax.random.split(key, 5)
    x = jax.random.normal(kx, (shape.m, shape.k), jnp.bfloat16)
    w = jax_w4a4.quantize(jax.random.normal(kw, (shape.n, shape.k)) / shape.k**0.5, format, rank=0)
    optional = {
        "bias": jax.random.normal(kb, (shape.n,)),
        "channel_scale": jnp.ones((shape.n,)),
    }
    if shape.rank:
        down = jax.random.normal(kd, (shape.k, shape.rank)) / shape.k**0.5
        up = jax.random.normal(ku, (shape.n, shape.rank)) / shape.rank**0.5
        optional |= {"lora_down": down.astype(jnp.bfloat16), "lora_up": up.astype(jnp.bfloat16)}
    return x, w.replace(**optional)


def xla_bf16(key: jax.Array, shape: Shape, copies: int) -> tuple[Callable, list[tuple]]:
    """What the layer costs unquantized: one bf16 dot, no low-rank branch, no bias."""
    sets = []
    for set_key in jax.random.split(key, copies):
        kx, kw = jax.random.split(set_key)
        x = jax.random.normal(kx, (shape.m, shape.k), jnp.bfloat16)
        sets.append((x, jax.random.normal(kw, (shape.n, shape.k), jnp.bfloat16)))
    return lambda x, w: jnp.einsum("mk,nk->mn", x, w), sets


def xla_scaled_matmul(key: jax.Array, shape: Shape, copies: int) -> tuple[Callable, list[tuple]]:
    """`jax.nn.scaled_matmul` on NVFP4 operands that are already quantized."""
    sets = []
    for set_key in jax.random.split(key, copies):
        x, w = random_layer(set_key, dataclasses.replace(shape, rank=0), "nvfp4")
        a = jax_w4a4.quantize_activation(x, w.replace(bias=None, channel_scale=None))
        codes = jax_w4a4.Weight.from_packed(a.packed, a.scales, format="nvfp4", k=shape.k).values
        sets.append((codes[None], w.values[None], a.scales[None], w.scales[None]))
    return lambda *a: jax.nn.scaled_matmul(*a, preferred_element_type=jnp.bfloat16), sets


def ours(format: str, *, quantized: bool, implementation: str | None = None) -> Callable:
    """`matmul` from bf16 x, or (quantized=True) from a ready Activation."""

    def build(key: jax.Array, shape: Shape, copies: int) -> tuple[Callable, list[tuple]]:
        sets = [random_layer(k, shape, format) for k in jax.random.split(key, copies)]
        call = functools.partial(jax_w4a4.matmul, implementation=implementation)
        if quantized:
            sets = [(jax_w4a4.quantize_activation(x, w), w) for x, w in sets]
        return call, sets

    return build


def routes(formats: tuple[str, ...]) -> Iterator[tuple[str, Callable]]:
    """(name, builder) of everything that is timed in one run: XLA's own routes, what `matmul` does
    by default, and on a GPU the simple kernel it is to be compared with."""
    yield "xla bf16 dot", xla_bf16
    yield "jax.nn.scaled_matmul nvfp4", xla_scaled_matmul
    on_gpu = jax.default_backend() == "gpu"
    for format in formats:
        yield f"matmul {format}", ours(format, quantized=False)
        yield f"matmul {format} quantized x", ours(format, quantized=True)
        if on_gpu:
            v1 = ours(format, quantized=False, implementation="sm90_v1")
            yield f"matmul {format} sm90_v1", v1
