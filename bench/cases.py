"""The routes a JAX user could take through a layer, as chains to be timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

import jax_w4a4

from . import peers, timing
from .shapes import Shape

BASE = "xla bf16 dot"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One way to quantize and run a layer.

    Attributes:
      name: for the route.
      quantize: keywords of `jax_w4a4.quantize`.
      matmul: keywords of `jax_w4a4.matmul`.
      prepared: the weight is as `Weight.prepare` leaves it.
    """

    name: str
    quantize: dict
    matmul: dict = dataclasses.field(default_factory=dict)
    prepared: bool = False


LAYERS = (
    Layer("mxfp4", {"format": "mxfp4"}),
    Layer("mxfp4 highest", {"format": "mxfp4"}, {"precision": "highest"}),
    Layer("nvfp4", {"format": "nvfp4"}),
    Layer("nvfp4 fastest", {"format": "nvfp4"}, {"precision": "fastest"}),
    Layer("int4", {"format": "int4"}),
    Layer("int4 highest", {"format": "int4"}, {"precision": "highest"}),
    Layer("int4 per row", {"format": "int4", "block_size": None}),
)


def prepared(layer: Layer) -> Layer:
    """The layer with a prepared weight, where there are kernels for it."""
    able = layer.quantize["format"] == "mxfp4" and layer.matmul.get("precision") != "highest"
    return dataclasses.replace(layer, prepared=able)


def random_layer(
    key: jax.Array, shape: Shape, layer: Layer, *, bare: bool = False
) -> tuple[jax.Array, jax_w4a4.Weight]:
    """Gaussian bf16 x and a weight with low-rank branch, bias and channel_scale unless `bare`.

    The low-rank factors are random rather than an SVD: the kernels cannot tell, and a benchmark
    need not wait for one decomposition per operand set.
    """
    kx, kw, kd, ku, kb = jax.random.split(key, 5)
    x = jax.random.normal(kx, (shape.m, shape.k), jnp.bfloat16)
    values = jax.random.normal(kw, (shape.n, shape.k)) / shape.k**0.5
    w = jax_w4a4.quantize(values, rank=0, **layer.quantize)
    w = w.prepare() if layer.prepared else w
    if bare:
        return x, w
    optional = {
        "bias": jax.random.normal(kb, (shape.n,)),
        "channel_scale": jnp.ones((shape.n,)),
    }
    if shape.rank:
        down = jax.random.normal(kd, (shape.k, shape.rank)) / shape.k**0.5
        up = jax.random.normal(ku, (shape.n, shape.rank)) / shape.rank**0.5
        optional |= {"lora_down": down.astype(jnp.bfloat16), "lora_up": up.astype(jnp.bfloat16)}
    return x, w.replace(**optional)


def xla_bf16(shape: Shape, copies: int) -> timing.Chain:
    """What the layer costs unquantized: one bf16 dot, no low-rank branch, no bias."""
    sets = []
    for set_key in jax.random.split(jax.random.key(0), copies):
        kx, kw = jax.random.split(set_key)
        x = jax.random.normal(kx, (shape.m, shape.k), jnp.bfloat16)
        sets.append((x, jax.random.normal(kw, (shape.n, shape.k), jnp.bfloat16)))
    return timing.jax_chain(lambda x, w: jnp.einsum("mk,nk->mn", x, w), sets)


def xla_scaled_matmul(shape: Shape, copies: int) -> timing.Chain:
    """`jax.nn.scaled_matmul` on NVFP4 operands that are already quantized."""
    sets = []
    for key in jax.random.split(jax.random.key(0), copies):
        x, w = random_layer(key, shape, Layer("nvfp4", {"format": "nvfp4"}), bare=True)
        a = jax_w4a4.quantize_activation(x, w)
        codes = jax_w4a4.Weight.from_packed(a.packed, a.scales, format="nvfp4", k=shape.k).values
        sets.append((codes[None], w.values[None], a.scales[None], w.scales[None]))
    call = functools.partial(jax.nn.scaled_matmul, preferred_element_type=jnp.bfloat16)
    return timing.jax_chain(call, sets)


def ours(
    layer: Layer,
    shape: Shape,
    copies: int,
    *,
    quantized: bool = False,
    bare: bool = False,
    implementation: str | None = None,
) -> timing.Chain:
    """`matmul` from bf16 x, or (quantized=True) from a ready Activation."""
    keys = jax.random.split(jax.random.key(0), copies)
    sets = [random_layer(k, shape, layer, bare=bare) for k in keys]
    call = functools.partial(jax_w4a4.matmul, implementation=implementation, **layer.matmul)
    if quantized:
        sets = [(jax_w4a4.quantize_activation(x, w), w) for x, w in sets]
    return timing.jax_chain(call, sets)


Builder = Callable[[Shape, int], timing.Chain]


def routes(layers: Sequence[Layer], *, simple: bool = False) -> Iterator[tuple[str, Builder]]:
    """(name, builder) of everything that is timed in one run.

    XLA's own routes and other libraries'; then for every layer what `matmul` does by default from
    float x and from a shared activation, and the local ceiling: the same without low-rank branch
    and affine. `simple` adds the simple kernel that the fast one is to be compared with.
    """
    yield BASE, xla_bf16
    yield "jax.nn.scaled_matmul nvfp4", xla_scaled_matmul
    yield from peers.routes()
    for layer in layers:
        run = functools.partial(ours, layer)
        yield f"matmul {layer.name}", run
        yield f"matmul {layer.name} quantized x", functools.partial(run, quantized=True)
        yield f"matmul {layer.name} bare", functools.partial(run, bare=True)
        if simple and jax.default_backend() == "gpu":
            yield (
                f"matmul {layer.name} sm90_v1",
                functools.partial(run, implementation="sm90_v1"),
            )
