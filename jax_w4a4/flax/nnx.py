"""``Linear`` for Flax NNX: ``flax.nnx.Linear`` with a 4-bit weight and 4-bit activations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax.nn import initializers

from jax_w4a4.matmul import matmul, quantize_activation
from jax_w4a4.quantize import quantize
from jax_w4a4.weight import Activation, Weight

# A bare Weight attribute of a module is data, not a static attribute.
nnx.register_data_type(Weight)

_WHO = "jax_w4a4.flax.nnx.Linear"
_KERNEL_INIT = initializers.lecun_normal()
_BIAS_INIT = initializers.zeros
# What flax.nnx.Linear computes with unless told otherwise.
_DEFAULTS = {
    name: inspect.signature(nnx.Linear.__init__).parameters[name].default
    for name in ("dot_general", "promote_dtype")
}
_SHARDING_KEYS = ("out_sharding", "sharding", "sharding_names")


class W4A4Weight(nnx.Variable[Weight]):
    """The frozen part of a layer: a :class:`jax_w4a4.Weight` without low-rank and bias.

    Not an ``nnx.Param``: ``nnx.grad`` and ``nnx.Optimizer(..., wrt=nnx.Param)`` leave the
    codes and scales alone and see only ``lora_down``, ``lora_up`` and ``bias``.
    """


class Linear(nnx.Module):
    """A linear map over the last dimension of the input, in 4 bits x 4 bits.

    Variables: ``weight`` (:class:`W4A4Weight`: codes, scales, smoothing, channel scale),
    ``lora_down`` (in_features, rank), ``lora_up`` (out_features, rank) and ``bias``
    (out_features,), the last three ``nnx.Param`` or None. The operator is that of
    :func:`jax_w4a4.matmul`, and so is ``precision``; ``dot_general`` and ``promote_dtype`` of
    ``flax.nnx.Linear`` have no counterpart.

    Hopper's kernels read MXFP4 fastest from a prepared weight, as long as results are bfloat16:
    ``layer.weight.set_value(layer.weight.get_value().prepare())``, once, before the layer is used.

    To shard, place the weight before it goes in: with ``specs = w.shard_specs("tp")``,
    ``Linear.from_weight(jax.device_put(w, jax.tree.map(partial(NamedSharding, mesh), specs)))``.

    Args:
      in_features: K, the last dimension of the input.
      out_features: N, the last dimension of the output.
      use_bias: whether to add a bias.
      dtype: the dtype inputs are cast to and of the output (default: outputs have the
        promotion of the input's dtype and ``param_dtype``, as in ``flax.nnx.Linear``).
      param_dtype: dtype of the initial kernel and of the bias.
      preferred_element_type: dtype of the output, over ``dtype``.
      kernel_init: initializer of the (in_features, out_features) kernel that is quantized.
      bias_init: initializer of the bias.
      rngs: source of the keys; needed unless ``weight`` is given.
      kernel_metadata: metadata of the ``weight`` variable; no sharding, whose leaves have
        several shapes.
      bias_metadata: metadata of the ``bias`` variable.
      format: "nvfp4", "mxfp4" or "int4".
      rank: rank R of the low-rank residual; 0 for none.
      weight: a quantized weight (out_features, in_features), taken as it is with its bias and
        low-rank: nothing is drawn, and ``format``, ``rank`` and ``use_bias`` are the weight's.
      precision, implementation: as in :func:`jax_w4a4.matmul`.
      **quantize_kwargs: the rest goes to :func:`jax_w4a4.quantize`.

    Raises:
      NotImplementedError: a sharding in ``kernel_metadata`` or on ``kernel_init``.
      TypeError, ValueError: what :func:`jax_w4a4.quantize` raises.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        preferred_element_type: Dtype | None = None,
        kernel_init: Initializer = _KERNEL_INIT,
        bias_init: Initializer = _BIAS_INIT,
        rngs: nnx.Rngs | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        format: str = "nvfp4",
        rank: int = 32,
        weight: Weight | None = None,
        precision: str | None = None,
        implementation: str | None = None,
        **quantize_kwargs: Any,
    ):
        bias = None
        if weight is None:
            if rngs is None:
                raise ValueError(f"{_WHO}: got neither rngs nor weight; pass one of them")
            kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
            if isinstance(kernel, nnx.VariableMetadata):
                kernel_metadata = {**kernel.metadata, **kernel_metadata}
                kernel = kernel.raw_value
            weight = quantize(kernel.T, format=format, rank=rank, **quantize_kwargs)
            if use_bias:
                bias = bias_init(rngs.params(), (out_features,), param_dtype)
        else:
            if weight.shape[-2:] != (out_features, in_features):
                raise ValueError(
                    f"{_WHO}: weight has shape {weight.shape}, expected "
                    f"(out_features, in_features) = {(out_features, in_features)}"
                )
            if weight.bias is not None:
                bias = weight.bias.astype(param_dtype)
        if any(kernel_metadata.get(key) is not None for key in _SHARDING_KEYS):
            raise NotImplementedError(
                f"{_WHO}: got a sharding for the kernel, but the leaves of the quantized weight "
                "have several shapes; place it by Weight.shard_specs and use Linear.from_weight"
            )
        frozen = weight.replace(lora_down=None, lora_up=None, bias=None)
        self.weight = W4A4Weight(frozen, **kernel_metadata)
        self.lora_down = _param(weight.lora_down)
        self.lora_up = _param(weight.lora_up)
        self.bias = _param(bias, bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias is not None
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.preferred_element_type = preferred_element_type
        self.precision = precision
        self.implementation = implementation

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        *,
        format: str = "nvfp4",
        rank: int = 32,
        act_amax: jax.Array | None = None,
        precision: str | None = None,
        implementation: str | None = None,
        **quantize_kwargs: Any,
    ) -> Linear:
        """Quantizes a ``flax.nnx.Linear``; dtypes of inputs and outputs stay as they were.

        Args:
          linear: the layer; its kernel is (in_features, out_features).
          format, rank, precision, implementation: as for :class:`Linear`.
          act_amax: (in_features,) largest |x| per input channel in calibration data; turns on
            smoothing. None for data-free quantization.
          **quantize_kwargs: the rest goes to :func:`jax_w4a4.quantize`.

        Raises:
          TypeError: ``linear`` is no ``flax.nnx.Linear``.
          NotImplementedError: it has its own ``dot_general`` or ``promote_dtype``, which the
            quantized layer would drop.
        """
        who = f"{_WHO}.from_linear"
        if not isinstance(linear, nnx.Linear):
            raise TypeError(f"{who}: got {type(linear).__name__}, expected flax.nnx.Linear")
        for name, default in _DEFAULTS.items():
            if getattr(linear, name) is not default:
                raise NotImplementedError(
                    f"{who}: the layer has its own {name}, which the quantized layer would drop; "
                    "if that is fine, use jax_w4a4.quantize(linear.kernel[...].T) and "
                    "Linear.from_weight"
                )
        weight = quantize(
            linear.kernel[...].T, format=format, rank=rank, act_amax=act_amax, **quantize_kwargs
        )
        if linear.bias is not None:
            weight = weight.replace(bias=linear.bias[...].astype(jnp.float32))
        return cls.from_weight(
            weight,
            dtype=linear.dtype,
            param_dtype=linear.param_dtype,
            preferred_element_type=linear.preferred_element_type,
            precision=precision,
            implementation=implementation,
        )

    @classmethod
    def from_weight(cls, weight: Weight, **kwargs: Any) -> Linear:
        """The layer of a quantized (out_features, in_features) weight, bias and all.

        Args:
          weight: the weight, 2-D.
          **kwargs: ``dtype``, ``param_dtype``, ``preferred_element_type``, ``precision``,
            ``implementation`` and metadata, as for :class:`Linear`.

        Raises:
          TypeError: ``weight`` is no :class:`jax_w4a4.Weight`.
          ValueError: it is stacked.
        """
        who = f"{_WHO}.from_weight"
        if not isinstance(weight, Weight):
            raise TypeError(f"{who}: got {type(weight).__name__}, expected jax_w4a4.Weight")
        if weight.ndim != 2:
            raise ValueError(
                f"{who}: the weight is stacked, its shape is {weight.shape}; expected "
                "(out_features, in_features): use nnx.vmap, or index it with jax.tree.map"
            )
        out_features, in_features = weight.shape
        return cls(in_features, out_features, weight=weight, **kwargs)

    def as_weight(self) -> Weight:
        """The whole weight as :func:`jax_w4a4.matmul` takes it: frozen part, low-rank, bias."""
        return self.weight.get_value().replace(
            lora_down=None if self.lora_down is None else self.lora_down[...],
            lora_up=None if self.lora_up is None else self.lora_up[...],
            bias=None if self.bias is None else self.bias[...].astype(jnp.float32),
        )

    def quantize_activation(self, inputs: jax.Array) -> Activation:
        """Quantizes inputs (..., in_features) for layers with this smoothing and ``lora_down``."""
        if self.dtype is not None:
            inputs = inputs.astype(self.dtype)
        return quantize_activation(inputs, self.as_weight(), implementation=self.implementation)

    def __call__(
        self, inputs: jax.Array | Activation, out_sharding: Any | None = None
    ) -> jax.Array:
        """inputs (..., in_features), float or quantized -> (..., out_features).

        Args:
          inputs: the array, or the :class:`jax_w4a4.Activation` it was quantized to.
          out_sharding: sharding of the result on an explicit mesh.
        """
        if self.dtype is not None and not isinstance(inputs, Activation):
            inputs = inputs.astype(self.dtype)
        out_dtype = (
            self.dtype if self.preferred_element_type is None else self.preferred_element_type
        )
        if out_dtype is None:
            with jax.numpy_dtype_promotion("standard"):
                out_dtype = jnp.promote_types(inputs.dtype, self.param_dtype)
        y = matmul(
            inputs,
            self.as_weight(),
            preferred_element_type=out_dtype,
            precision=self.precision,
            implementation=self.implementation,
        )
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _param(
    value: Any | None, metadata: Mapping[str, Any] = MappingProxyType({})
) -> nnx.Param | None:
    # A plain None would be a static attribute, so that filling it later changes the graph.
    return nnx.data(None) if value is None else nnx.Param(value, **metadata)
