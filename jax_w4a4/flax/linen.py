"""``Dense`` for Flax Linen: ``flax.linen.Dense`` with a 4-bit weight and 4-bit activations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jax_w4a4.matmul import matmul
from jax_w4a4.quantize import quantize
from jax_w4a4.weight import Weight

COLLECTION = "w4a4"

_WHO = "jax_w4a4.flax.linen"


class Dense(linen.Module):
    """A linear map over the last dimension of the input, in 4 bits x 4 bits.

    Variables: the collection ``"params"`` holds what can be trained, ``lora_down``
    (in, rank), ``lora_up`` (features, rank) and ``bias`` (features,); the collection
    ``"w4a4"`` holds ``weight``, a :class:`jax_w4a4.Weight` without them. So
    ``jax.grad(lambda params: model.apply({"params": params, "w4a4": frozen}, x)...)`` never
    meets codes or scales. Under ``nn.scan`` and ``nn.vmap`` list ``"w4a4"`` in
    ``variable_axes`` next to ``"params"``. Hopper's kernels read MXFP4 fastest from a prepared
    weight: replace ``weight`` by ``weight.prepare()`` in the collection, once.

    Attributes:
      features: N, the number of output features.
      use_bias: whether to add a bias.
      dtype: the dtype inputs are cast to and of the output (default: outputs have the
        promotion of the input's dtype and ``param_dtype``, as in ``flax.linen.Dense``).
      param_dtype: dtype of the initial kernel and of the bias.
      kernel_init: initializer of the (in, features) kernel that is quantized.
      bias_init: initializer of the bias.
      format: "nvfp4", "mxfp4" or "int4".
      rank: rank R of the low-rank residual; 0 for none.
      lora_dtype: dtype of ``lora_down`` and ``lora_up``.
      precision, implementation: as in :func:`jax_w4a4.matmul`.
      quantize_kwargs: more keyword arguments for :func:`jax_w4a4.quantize` at ``init``.
    """

    features: int
    use_bias: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = initializers.lecun_normal()
    bias_init: Initializer = initializers.zeros
    format: str = "nvfp4"
    rank: int = 32
    lora_dtype: Dtype = jnp.bfloat16
    precision: str | None = None
    implementation: str | None = None
    quantize_kwargs: Mapping[str, Any] | None = None

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """inputs (..., in) of a float dtype -> (..., features).

        Raises:
          ValueError: ``apply`` without the ``"w4a4"`` collection, or a weight of another shape.
          NotImplementedError: ``kernel_init`` carries partitioning metadata.
        """
        in_features = inputs.shape[-1]
        initial = self._initial(in_features) if self.is_initializing() else None
        if initial is None and not self.has_variable(COLLECTION, "weight"):
            raise ValueError(
                f"{_WHO}.Dense: no {COLLECTION!r} collection among the variables; apply with "
                f'{{"params": ..., {COLLECTION!r}: ...}} as init or variables_from_dense return it'
            )
        weight: Weight = self.variable(COLLECTION, "weight", lambda: _frozen(initial)).value
        if weight.shape != (self.features, in_features):
            raise ValueError(
                f"{_WHO}.Dense: weight has shape {weight.shape}, expected (features, in) = "
                f"{(self.features, in_features)}"
            )

        def lora(name: str, size: int) -> jax.Array | None:
            if not self.rank:
                return None
            # After init only the shape of what this returns is looked at.
            value = (
                jnp.zeros((size, self.rank), self.lora_dtype)
                if initial is None
                else getattr(initial, name)
            )
            return self.param(name, lambda _: value)

        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
            bias = bias.astype(jnp.float32)
        weight = weight.replace(
            lora_down=lora("lora_down", in_features),
            lora_up=lora("lora_up", self.features),
            bias=bias,
        )
        if self.dtype is not None:
            inputs, out_dtype = inputs.astype(self.dtype), self.dtype
        else:
            with jax.numpy_dtype_promotion("standard"):
                out_dtype = jnp.promote_types(inputs.dtype, self.param_dtype)
        return matmul(
            inputs,
            weight,
            preferred_element_type=out_dtype,
            precision=self.precision,
            implementation=self.implementation,
        )

    def _initial(self, in_features: int) -> Weight:
        kernel = self.kernel_init(
            self.make_rng("params"), (in_features, self.features), self.param_dtype
        )
        if isinstance(kernel, linen.meta.AxisMetadata):
            raise NotImplementedError(
                f"{_WHO}.Dense: kernel_init carries partitioning metadata, but the leaves of the "
                "quantized weight have several shapes; place them by Weight.shard_specs"
            )
        return quantize(
            kernel.T,
            format=self.format,
            rank=self.rank,
            lora_dtype=self.lora_dtype,
            **(self.quantize_kwargs or {}),
        )


def variables_from_dense(
    params: Mapping[str, jax.Array],
    *,
    format: str = "nvfp4",
    rank: int = 32,
    act_amax: jax.Array | None = None,
    **quantize_kwargs: Any,
) -> dict[str, Any]:
    """Quantizes the parameters of a ``flax.linen.Dense`` for :class:`Dense`.

    Args:
      params: {"kernel": (in, features)} or that and {"bias": (features,)}. Parameters stacked
        along leading dimensions, as ``nn.scan`` makes them, become a stacked weight.
      format, rank: as for :class:`Dense`.
      act_amax: (in,) largest |x| per input channel in calibration data, stacked as the kernel
        is; turns on smoothing.
      **quantize_kwargs: the rest goes to :func:`jax_w4a4.quantize`.

    Returns:
      {"params": {...}, "w4a4": {"weight": Weight}}, the variables of :class:`Dense`.

    Raises:
      ValueError: keys other than kernel and bias, or no kernel.
    """
    if "kernel" not in params or not set(params) <= {"kernel", "bias"}:
        raise ValueError(
            f"{_WHO}.variables_from_dense: got parameters {sorted(params)}, expected 'kernel' "
            "and perhaps 'bias'"
        )
    convert = functools.partial(_quantize_kernel, format=format, rank=rank, **quantize_kwargs)
    for _ in range(params["kernel"].ndim - 2):
        convert = jax.vmap(convert)
    weight = convert(params["kernel"], act_amax)
    variables = variables_from_weight(weight)
    if "bias" in params:
        variables["params"]["bias"] = params["bias"]
    return variables


def variables_from_weight(weight: Weight) -> dict[str, Any]:
    """The variables of :class:`Dense` for a quantized (features, in) weight."""
    trained = {name: getattr(weight, name) for name in ("lora_down", "lora_up", "bias")}
    return {
        "params": {name: value for name, value in trained.items() if value is not None},
        COLLECTION: {"weight": _frozen(weight)},
    }


def _quantize_kernel(kernel: jax.Array, act_amax: jax.Array | None, **kwargs: Any) -> Weight:
    return quantize(kernel.T, act_amax=act_amax, **kwargs)


def _frozen(weight: Weight) -> Weight:
    return weight.replace(lora_down=None, lora_up=None, bias=None)
