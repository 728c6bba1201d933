"""`Weight` and `Activation`: the quantized operands as pytrees.

Both hold packed bytes, not JAX four-bit arrays: on a GPU a slice of a uint8 array can alias its
parent where a slice of a four-bit array is copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jax_w4a4 import formats
from jax_w4a4.formats import Spec

Array = jax.Array

# Leaves of a weight-like tree that hold no codes: shapes, specs, marks of a filter, zero gradients.
_NO_CODES = (
    jax.ShapeDtypeStruct,
    jax.core.ShapedArray,
    PartitionSpec,
    jax.sharding.Sharding,
    np.ndarray,  # of float0
    str,
    bool,
    int,
)

_VECTORS = ("global_scale", "act_global_scale", "smooth", "channel_scale", "bias")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "packed",
        "scales",
        "global_scale",
        "act_global_scale",
        "smooth",
        "lora_down",
        "lora_up",
        "channel_scale",
        "bias",
        "scale_range",
    ],
    meta_fields=[
        "format",
        "k",
        "block_size",
        "lora_smoothed",
        "act_unsigned",
        "act_rule",
        "sign_order",
    ],
)
@dataclasses.dataclass(frozen=True)
class Weight:
    """A quantized (N, K) weight with its optional low-rank branch, scales, smoothing and bias.

    It stands for the linear map y = x @ effective().T + bias. Build one with
    `jax_w4a4.quantize`, `Weight.from_packed`, `Weight.from_scaled` or `Weight.from_qarray`.
    Stacked weights carry the same leading dimensions on every array.

    Attributes:
      packed: uint8 (N, K_pad/2) four-bit codes, even k in the low nibble; signs in sign_order.
      scales: (N, K_pad/block) block scales; float8_e4m3fn for nvfp4, float8_e8m0fnu for mxfp4,
        float16, bfloat16 or float32 for int4. K_pad is K rounded up to whole blocks and to 32.
      global_scale: float32 (), multiplies all block scales, or None.
      act_global_scale: float32 (), divides activations before their block quantization and
        multiplies the product, or None.
      smooth: float32 (K,), divides x before quantization, or None; the codes hold w * smooth.
      lora_down: (K, R) bfloat16, float16 or float32, or None.
      lora_up: (N, R) of lora_down's dtype, or None.
      channel_scale: float32 (N,), multiplies the quantized product (not the low-rank branch), or
        None.
      bias: float32 (N,), or None.
      scale_range: uint8 (N, 2) after `prepare()` (mxfp4 only), or None: the largest and the least
        of each row's block scales as bytes, which kernels read in place of looking through the
        scales.
      format: "nvfp4", "mxfp4" or "int4" (static, as all below).
      k: logical K.
      block_size: values per block scale; None for one scale per row (int4).
      lora_smoothed: the low-rank branch reads x / smooth instead of x.
      act_unsigned: activations are quantized to 0..15 (int4 and nonnegative x only).
      act_rule: "rceil" or "floor", how mxfp4 activation scales are chosen.
      sign_order: "linear", or "sorted" after `prepare()` (mxfp4 only): the signs of every eight
        codes are permuted.
    """

    packed: Array
    scales: Array
    global_scale: Array | None = None
    act_global_scale: Array | None = None
    smooth: Array | None = None
    lora_down: Array | None = None
    lora_up: Array | None = None
    channel_scale: Array | None = None
    bias: Array | None = None
    scale_range: Array | None = None
    format: str = dataclasses.field(kw_only=True)
    k: int = dataclasses.field(kw_only=True)
    block_size: int | None = dataclasses.field(kw_only=True)
    lora_smoothed: bool = dataclasses.field(kw_only=True, default=False)
    act_unsigned: bool = dataclasses.field(kw_only=True, default=False)
    act_rule: str = dataclasses.field(kw_only=True, default="rceil")
    sign_order: str = dataclasses.field(kw_only=True, default="linear")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (..., N, K)."""
        return (*self.packed.shape[:-1], self.k)

    @property
    def ndim(self) -> int:
        """Number of logical dimensions; 2 unless stacked."""
        return self.packed.ndim

    @property
    def dtype(self) -> Any:
        """dtype of `dequantize()`: float32."""
        return jnp.dtype(jnp.float32)

    @property
    def rank(self) -> int:
        """Rank of the low-rank branch, 0 if there is none."""
        return 0 if self.lora_up is None else self.lora_up.shape[-1]

    @property
    def k_pad(self) -> int:
        """K as stored."""
        return 2 * self.packed.shape[-1]

    @property
    def nbytes_packed(self) -> int:
        """Bytes of codes and block scales."""
        return _nbytes(self.packed) + _nbytes(self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(_nbytes(leaf) for leaf in jax.tree.leaves(self))

    @property
    def values(self) -> Array:
        """The logical four-bit values (..., N, K): float4_e2m1fn, or int4."""
        _check_sharded_k(self, "Weight.values")
        dtype = formats.FORMATS[self.format].dtype
        packed = formats.linear_codes(self.packed, self.sign_order)
        pairs = lax.bitcast_convert_type(packed, jnp.dtype(dtype))
        return pairs.reshape(*self.packed.shape[:-1], self.k_pad)[..., : self.k]

    def dequantize(self) -> Array:
        """codes * block scales * global_scale as float32 (..., N, K).

        This is the quantized part alone, in smoothed space: no channel_scale, no low-rank branch,
        not divided by smooth. See `effective` for the whole map.
        """
        _check_sharded_k(self, "Weight.dequantize")
        w = formats.dequantize_blocks(
            self.packed,
            self.scales,
            self.format,
            self.block_size or self.k_pad,
            sign_order=self.sign_order,
        )[..., : self.k]
        if self.global_scale is not None:
            w = w * self.global_scale[..., None, None]
        return w

    def effective(self) -> Array:
        """The matrix this weight stands for: float32 (..., N, K).

        channel_scale * dequantize() / smooth + lora_up @ lora_down.T. `matmul` differs from
        x @ effective().T + bias by the quantization of the activation (and rounding) only; the
        straight-through gradient with respect to x is taken through this matrix.
        """
        _check_sharded_k(self, "Weight.effective")
        w = self.dequantize()
        if self.smooth is not None:
            inverse = formats.reciprocal(self.smooth)[..., None, :]
            w = w * inverse
        if self.channel_scale is not None:
            w = w * self.channel_scale[..., :, None]
        if self.lora_up is not None and self.lora_down is not None:
            low_rank = jnp.einsum(
                "...nr,...kr->...nk",
                formats.to_f32(self.lora_up),
                formats.to_f32(self.lora_down),
                precision=lax.Precision.HIGHEST,
            )
            if self.lora_smoothed and self.smooth is not None:
                low_rank = low_rank * inverse
            w = w + low_rank
        return w

    def spec(self, out_dtype: str) -> Spec:
        """The static description of a call with this weight and that result dtype."""
        return Spec(
            format=self.format,
            k=self.k,
            k_pad=self.k_pad,
            block_size=self.block_size or self.k_pad,
            scale_dtype=jnp.dtype(self.scales.dtype).name,
            act_unsigned=self.act_unsigned,
            act_rule=self.act_rule,
            lora_smoothed=self.lora_smoothed,
            lora_dtype="bfloat16" if self.lora_up is None else jnp.dtype(self.lora_up.dtype).name,
            out_dtype=out_dtype,
            sign_order=self.sign_order,
        )

    def replace(self, **changes: Any) -> Weight:
        """A copy with some fields changed; nothing is checked or cast.

        New `scales` leave no `scale_range` but one that comes with them.
        """
        if "scales" in changes and isinstance(self.scale_range, jax.Array | np.ndarray):
            changes.setdefault("scale_range", None)
        return dataclasses.replace(self, **changes)

    def prepare(self) -> Weight:
        """The same weight as this package's Hopper kernels read it fastest.

        mxfp4 gets the signs of every eight codes sorted (sign_order="sorted"), which takes two of
        nine instructions out of their expansion, and `scale_range`, so that no kernel has to look
        through the block scales before it multiplies; other formats stay as they are. Nothing is
        rounded, and results have the same bits, except that two CTAs which divide K count what is
        more than 26 binades under the largest scale of the whole row as zero, not of their part.
        Kernels trust `scale_range`, and a wrong one makes results wrong: it goes where rows go, and
        what changes `scales` by other means than `replace`, which drops it, must call
        `linear().prepare()`. On a prepared weight without one `prepare` makes it. Do it once, when
        weights are loaded and outside of `jit`: in a jitted step it would be done in every call.
        `linear()` undoes it.

        Kernels that expand sorted codes are "sm90_decode", "sm90_v2" and "sm90_grouped", without
        precision="highest"; Blackwell's take linear ones only. Stacked weights can be prepared, and
        so can weights of `jax.ShapeDtypeStruct`, `PartitionSpec` or `Sharding`, which get the field
        and what stands for `scale_range`. It is None where K is sharded, in these and on explicit
        meshes. Prepare before sharding where an explicit mesh leaves each device a part of K that
        is no multiple of eight: the signs of eight codes would come from several devices, which is
        refused, here and in `linear`, `values` and `dequantize`.
        """
        return self._in_order("sorted", "prepare") if self.format == "mxfp4" else self

    def linear(self) -> Weight:
        """The same weight in the public layout, as checkpoints and every kernel read it."""
        return self._in_order("linear", "linear")

    def _in_order(self, order: str, who: str) -> Weight:
        _check_sign_order(self.sign_order, self.format, f"Weight.{who}")
        if self.sign_order == order and (self.scale_range is None) == (order == "linear"):
            return self
        packed = self.packed
        has_codes = isinstance(packed, jax.Array | np.ndarray) and packed.dtype != jax.dtypes.float0
        if not (has_codes or packed is None or isinstance(packed, _NO_CODES)):
            # A box with codes in it would keep them in the other order.
            raise TypeError(
                f"jax_w4a4.Weight.{who}: weight.packed is {type(packed).__name__}; expected an "
                "array, or what stands for one (ShapeDtypeStruct, PartitionSpec, Sharding); take "
                "arrays out of their boxes first"
            )
        if has_codes and self.sign_order != order:
            # Whole words of eight codes, in a shard too.
            width = -(-packed.shape[-1] // 4) * 4 if packed.ndim else 4
            _check("packed", packed, ("uint8",), (*packed.shape[:-1], width), f"Weight.{who}")
            _check_sharded_words(packed, f"Weight.{who}")
            packed = (formats.sort_signs if order == "sorted" else formats.unsort_signs)(packed)
        found = _range_of(self.scales) if order == "sorted" else None
        return self.replace(packed=packed, sign_order=order, scale_range=found)

    def with_lora_on(self, side: str) -> Weight:
        """The same weight with its low-rank branch reading "raw" x or "smoothed" x / smooth.

        lora_down is multiplied or divided by smooth and rounded to its dtype once.
        """
        if side not in ("raw", "smoothed"):
            raise ValueError(
                f"jax_w4a4.Weight.with_lora_on: side={side!r}; expected 'raw' or 'smoothed'"
            )
        smoothed = side == "smoothed"
        if smoothed == self.lora_smoothed:
            return self
        down = self.lora_down
        if down is not None and self.smooth is not None:
            factor = self.smooth if smoothed else formats.reciprocal(self.smooth)
            down = formats.round_to(
                formats.to_f32(down) * factor[..., :, None], jnp.dtype(down.dtype).name
            )
        return self.replace(lora_down=down, lora_smoothed=smoothed)

    def shard_specs(self, axis_name: str | tuple[str, ...], dim: str = "n") -> Weight:
        """A `Weight` of `PartitionSpec`s for tensor parallelism.

        Args:
          axis_name: mesh axis (or axes) to shard over.
          dim: "n" shards output channels, "k" shards input channels. For "k" each shard has to
            hold whole blocks and an unpadded K; a whole-row scale is replicated. "group" shards
            the leading axis of a stacked weight (expert parallelism).

        Returns:
          A weight of the same structure, to be used as in_specs or mapped to shardings.
        """
        if dim not in ("n", "k", "group"):
            raise ValueError(
                f"jax_w4a4.Weight.shard_specs: dim={dim!r}; expected 'n', 'k' or 'group'"
            )
        if dim == "group" and self.ndim < 3:
            raise ValueError(
                f"jax_w4a4.Weight.shard_specs: dim='group' on a weight of shape {self.shape}; "
                "expected a stacked one (G, N, K)"
            )
        n, k = (axis_name if dim == name else None for name in "nk")
        axes = {
            "packed": (n, k),
            "scales": (n, None if self.block_size is None else k),
            "global_scale": (),
            "act_global_scale": (),
            "smooth": (k,),
            "lora_down": (k, None),
            "lora_up": (n, None),
            "channel_scale": (n,),
            "bias": (n,),
            "scale_range": (n, None),
        }
        lead = [None] * (self.ndim - 2)
        if dim == "group":
            lead[0] = axis_name
        return self.replace(
            **{
                name: PartitionSpec(*lead, *spec)
                for name, spec in axes.items()
                if getattr(self, name) is not None
            }
        )

    def validate(self, who: str) -> None:
        """Checks the dtype and shape of every array against the static fields.

        Args:
          who: name of the public function on whose behalf, for the message.

        Raises:
          TypeError: a leaf is no array or has the wrong dtype.
          ValueError: unknown format, rule or block size, or shapes that don't fit together.
        """
        _validate(self, who)

    @classmethod
    def from_packed(
        cls, packed: Array, scales: Array, *, format: str, k: int | None = None, **optional: Any
    ) -> Weight:
        """A weight from packed codes and row-major block scales, as checkpoints hold them.

        Args:
          packed: uint8 (N, ceil(K/2)) or wider, even k in the low nibble. With
            sign_order="sorted" as `prepare` leaves them.
          scales: (N, K/block) of a scale dtype of the format; the raw uint8 bytes of e4m3 and
            e8m0 scales are accepted. int4's block size follows from its width: one column is a
            whole-row scale.
          format: "nvfp4", "mxfp4" or "int4".
          k: logical K; default 2 * packed.shape[-1].
          **optional: any other field of `Weight` but block_size. Vectors are cast to float32; a
            (1,) scalar is accepted for the global scales. `scale_range` is made anew.

        Returns:
          A checked weight; K is padded with zero codes and zero scales where the layout needs it.

        Raises:
          TypeError, ValueError: as `validate`.
        """
        return _from_packed(packed, scales, format, k, optional, "Weight.from_packed")

    @classmethod
    def from_scaled(
        cls, values: Array, scales: Array, *, format: str | None = None, **optional: Any
    ) -> Weight:
        """A weight from four-bit values and block scales, the rhs of `jax.nn.scaled_matmul`.

        Args:
          values: (N, K) float4_e2m1fn or int4.
          scales: (N, K/block) of a scale dtype of the format.
          format: default: by dtypes (float4 with e4m3 is nvfp4, with e8m0 mxfp4; int4).
          **optional: any other field of `Weight` but block_size, k and sign_order.
        """
        who = "Weight.from_scaled"
        values, scales = _array("values", values, who), _array("scales", scales, who)
        if values.ndim < 2:
            raise ValueError(f"jax_w4a4.{who}: values are {_describe(values)}; expected (N, K)")
        if format is None:
            format = _format_of(values, scales, who)
        fmt = formats.get_format(format, who)
        if values.dtype != jnp.dtype(fmt.dtype):
            raise TypeError(
                f"jax_w4a4.{who}: values are {_describe(values)}; "
                f"expected {fmt.dtype} for format {format!r}"
            )
        k = values.shape[-1]
        return _from_values(values, scales, format, k, optional, who)

    @classmethod
    def from_qarray(cls, q: Any, **optional: Any) -> Weight:
        """A weight from a qwix `QArray` of logical shape (N, K); transpose (K, N) kernels first.

        Args:
          q: qtype "nvfp4", "mxfp4" or int4, scaled per row or in blocks along K. qwix keeps nvfp4
            and mxfp4 scales in a wide dtype; they must be representable (after division by
            global_scale, if given), which is checked outside of `jit`.
          **optional: any other field of `Weight` but block_size, k and sign_order.

        Raises:
          NotImplementedError: the array has a zero point.
          TypeError, ValueError: other dtypes, shapes, or scales that are not representable.
        """
        return _from_qarray(q, optional)

    def to_qarray(self) -> Any:
        """The quantized part as a qwix `QArray` (N, K) with float32 (int4: its own) scales.

        global_scale is multiplied into the scales. qwix must be installed.

        Raises:
          NotImplementedError: the weight has fields a QArray can't hold, or K is padded inside a
            block.
        """
        return _to_qarray(self)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["packed", "scales", "global_scale", "lora_act"],
    meta_fields=["format", "k", "block_size", "unsigned", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Activation:
    """A quantized (..., K) activation, the result of `jax_w4a4.quantize_activation`.

    Weights that share smooth, act_global_scale and lora_down can share it.

    Attributes:
      packed: uint8 (..., K_pad/2) four-bit codes, even k in the low nibble.
      scales: (..., K_pad/block) block scales, of the weight's scale dtype.
      global_scale: float32 () that multiplies all block scales, or None.
      lora_act: (..., R) x @ lora_down, rounded to lora_up's dtype, or None.
      format: "nvfp4", "mxfp4" or "int4" (static, as all below).
      k: logical K.
      block_size: values per block scale; None for one scale per row.
      unsigned: codes are 0..15.
      dtype: dtype name of the x it came from, and of results by default.
    """

    packed: Array
    scales: Array
    global_scale: Array | None = None
    lora_act: Array | None = None
    format: str = dataclasses.field(kw_only=True)
    k: int = dataclasses.field(kw_only=True)
    block_size: int | None = dataclasses.field(kw_only=True)
    unsigned: bool = dataclasses.field(kw_only=True, default=False)
    dtype: str = dataclasses.field(kw_only=True, default="float32")

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (..., K)."""
        return (*self.packed.shape[:-1], self.k)

    @property
    def ndim(self) -> int:
        """Number of logical dimensions."""
        return self.packed.ndim

    @property
    def k_pad(self) -> int:
        """K as stored."""
        return 2 * self.packed.shape[-1]

    def replace(self, **changes: Any) -> Activation:
        """A copy with some fields changed; nothing is checked or cast."""
        return dataclasses.replace(self, **changes)

    def validate(self, who: str) -> None:
        """Checks dtypes and shapes, as `Weight.validate`."""
        _validate_activation(self, who)

    def dequantize(self) -> Array:
        """codes * block scales * global_scale as float32 (..., K), near x / smooth."""
        x = formats.dequantize_blocks(
            self.packed,
            self.scales,
            self.format,
            self.block_size or self.k_pad,
            unsigned=self.unsigned,
        )[..., : self.k]
        if self.global_scale is not None:
            x = x * self.global_scale.reshape((1,) * x.ndim)
        return x


# ------------------------------------------------------------------------------------------------
# Checks
# ------------------------------------------------------------------------------------------------


def _nbytes(leaf: Any) -> int:
    size = 1
    for dim in leaf.shape:
        size *= dim
    return size * jnp.dtype(leaf.dtype).itemsize


def _describe(a: Any) -> str:
    return f"{jnp.dtype(a.dtype).name}[{','.join(str(d) for d in a.shape)}]"


def _check(
    name: str,
    a: Any,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    who: str,
    owner: str = "weight",
) -> None:
    if not (hasattr(a, "shape") and hasattr(a, "dtype")):
        raise TypeError(f"jax_w4a4.{who}: {owner}.{name} is {type(a).__name__}; expected an array")
    wanted = f"{' or '.join(dtypes)}[{','.join(str(d) for d in shape)}]"
    message = f"jax_w4a4.{who}: {owner}.{name} is {_describe(a)}; expected {wanted}"
    if jnp.dtype(a.dtype).name not in dtypes:
        raise TypeError(message)
    if tuple(a.shape) != tuple(shape):
        raise ValueError(message)


def check_options(
    format: str, block_size: int | None, act_unsigned: bool, act_rule: str, who: str
) -> formats.Format:
    """ValueError unless the static fields of a weight exist and fit together."""
    fmt = formats.get_format(format, who)
    formats.check_block_size(fmt, block_size, who)
    if act_rule not in formats.ACT_RULES:
        raise ValueError(
            f"jax_w4a4.{who}: act_rule={act_rule!r}; expected 'rceil' or 'floor' (mxfp4)"
        )
    if not isinstance(act_unsigned, bool):
        raise TypeError(f"jax_w4a4.{who}: act_unsigned={act_unsigned!r}; expected a bool")
    if act_unsigned and format != "int4":
        raise ValueError(
            f"jax_w4a4.{who}: act_unsigned is for format 'int4'; the format is {format!r}"
        )
    return fmt


def _range_of(scales: Any) -> Any:
    """`Weight.scale_range` for block scales, or for what stands for them.

    None where K is sharded by name: a row's largest scale would need communication.
    """
    if isinstance(scales, jax.ShapeDtypeStruct | jax.core.ShapedArray):
        spec = getattr(scales.sharding, "spec", ())
        if len(spec) == len(scales.shape) and spec[-1] is not None:
            return None
        return scales.update(shape=(*scales.shape[:-1], 2), dtype=jnp.dtype(jnp.uint8))
    if isinstance(scales, jax.sharding.NamedSharding):
        spec = _range_of(scales.spec)
        if spec is None:
            return None
        return jax.sharding.NamedSharding(scales.mesh, spec, memory_kind=scales.memory_kind)
    if isinstance(scales, PartitionSpec):
        # That of a whole matrix says so of K; dimensions that a shorter one leaves out are whole.
        return None if len(scales) > 1 and scales[-1] is not None else scales
    if isinstance(scales, jax.Array | np.ndarray) and scales.dtype != jax.dtypes.float0:
        scales = jnp.asarray(scales)
        return None if _k_axes(scales) else formats.scale_range(scales)
    if isinstance(scales, np.ndarray):
        return np.zeros((*scales.shape[:-1], 2), scales.dtype)
    return scales


def _check_sign_order(order: Any, format: str, who: str) -> None:
    if not (isinstance(order, str) and order in formats.SIGN_ORDERS):
        raise ValueError(f"jax_w4a4.{who}: sign_order={order!r}; expected 'linear' or 'sorted'")
    if order == "sorted" and format != "mxfp4":
        raise ValueError(
            f"jax_w4a4.{who}: sign_order='sorted' is for format 'mxfp4'; the format is {format!r}"
        )


def _validate(w: Weight, who: str) -> None:
    fmt = check_options(w.format, w.block_size, w.act_unsigned, w.act_rule, who)
    _check_sign_order(w.sign_order, w.format, who)
    if not isinstance(w.lora_smoothed, bool):
        raise TypeError(f"jax_w4a4.{who}: lora_smoothed={w.lora_smoothed!r}; expected a bool")
    if isinstance(w.k, bool) or not isinstance(w.k, int) or w.k < 1:
        raise ValueError(f"jax_w4a4.{who}: k={w.k!r}; expected a positive integer")
    packed = w.packed
    if not (hasattr(packed, "shape") and hasattr(packed, "dtype")):
        _check("packed", packed, ("uint8",), (), who)
    if len(packed.shape) < 2:
        raise ValueError(
            f"jax_w4a4.{who}: weight.packed is {_describe(packed)}; expected uint8[N,K_pad/2]"
        )
    *lead, n, _ = packed.shape
    k_pad = formats.padded_k(w.k, w.block_size)
    _check("packed", packed, ("uint8",), (*lead, n, k_pad // 2), who)
    blocks = k_pad // (w.block_size or k_pad)
    _check("scales", w.scales, fmt.scale_dtypes, (*lead, n, blocks), who)
    shapes = {
        "global_scale": (),
        "act_global_scale": (),
        "smooth": (w.k,),
        "channel_scale": (n,),
        "bias": (n,),
    }
    for name, shape in shapes.items():
        if (a := getattr(w, name)) is not None:
            _check(name, a, ("float32",), (*lead, *shape), who)
    if w.scale_range is not None:
        if w.format != "mxfp4":
            raise ValueError(
                f"jax_w4a4.{who}: weight.scale_range is for format 'mxfp4'; the format is "
                f"{w.format!r}"
            )
        _check("scale_range", w.scale_range, ("uint8",), (*lead, n, 2), who)
    down, up = w.lora_down, w.lora_up
    if (down is None) != (up is None):
        there, missing = ("lora_up", "lora_down") if down is None else ("lora_down", "lora_up")
        raise ValueError(f"jax_w4a4.{who}: weight has {there} but no {missing}; give both or none")
    if up is not None:
        rank = up.shape[-1] if getattr(up, "shape", ()) else 0
        _check("lora_up", up, formats.FLOAT_DTYPES, (*lead, n, rank), who)
        if rank < 1:
            raise ValueError(
                f"jax_w4a4.{who}: weight.lora_up is {_describe(up)}; a branch of rank 0 is "
                "lora_down=None, lora_up=None"
            )
        _check("lora_down", down, (jnp.dtype(up.dtype).name,), (*lead, w.k, rank), who)


def _validate_activation(x: Activation, who: str) -> None:
    fmt = check_options(x.format, x.block_size, x.unsigned, "rceil", who)
    if not isinstance(x.dtype, str) or x.dtype not in formats.FLOAT_DTYPES:
        raise TypeError(
            f"jax_w4a4.{who}: activation.dtype is {x.dtype!r}; expected "
            f"{' or '.join(formats.FLOAT_DTYPES)}"
        )
    if not getattr(x.packed, "shape", ()):
        _check("packed", x.packed, ("uint8",), ("...", "K_pad/2"), who, "activation")
    lead = x.packed.shape[:-1]
    k_pad = formats.padded_k(x.k, x.block_size)
    blocks = k_pad // (x.block_size or k_pad)
    _check("packed", x.packed, ("uint8",), (*lead, k_pad // 2), who, "activation")
    _check("scales", x.scales, fmt.scale_dtypes, (*lead, blocks), who, "activation")
    if x.global_scale is not None:
        _check("global_scale", x.global_scale, ("float32",), (), who, "activation")
    if (act := x.lora_act) is not None:
        rank = act.shape[-1] if getattr(act, "shape", ()) else 0
        _check("lora_act", act, formats.FLOAT_DTYPES, (*lead, rank), who, "activation")


def integer(value: Any, what: str, least: int, most: int | None = None) -> int:
    """An int from any integer type but bool; ValueError beginning with `what` otherwise."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        raise ValueError(what)
    return number


def _k_axes(packed: Any) -> tuple[str, ...]:
    """Axes of an explicit mesh that shard K."""
    entry = jax.typeof(packed).sharding.spec[-1]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _check_sharded_words(packed: Array, who: str) -> None:
    """NotImplementedError where a device has a part of eight codes whose signs are permuted."""
    axes = _k_axes(packed)
    sizes = jax.typeof(packed).sharding.mesh.shape
    parts = math.prod(sizes[axis] for axis in axes)
    if axes and packed.shape[-1] % (4 * parts):
        raise NotImplementedError(
            f"jax_w4a4.{who}: weight.packed is {_describe(packed)} with K over {parts} devices "
            f"(mesh axes {', '.join(axes)}), which cuts the groups of four bytes whose signs are "
            f"permuted; call {'prepare' if who == 'Weight.prepare' else 'linear'}() before the "
            "weight is sharded, shard N instead of K, or gather K (jax.sharding.reshard)"
        )


def _check_sharded_k(w: Weight, who: str) -> None:
    """NotImplementedError where logical values of K can't stay on the devices of their codes."""
    if w.sign_order == "sorted":
        _check_sharded_words(w.packed, who)
    axes = _k_axes(w.packed)
    if w.k != w.k_pad and axes:
        raise NotImplementedError(
            f"jax_w4a4.{who}: K={w.k} is stored as {w.k_pad} and sharded (mesh axes "
            f"{', '.join(axes)}), and parts of {w.k} values are not those of {w.k_pad}; shard N "
            "instead of K, or gather K (jax.sharding.reshard)"
        )


# ------------------------------------------------------------------------------------------------
# Constructors
# ------------------------------------------------------------------------------------------------


def _array(name: str, a: Any, who: str) -> Array:
    try:
        return jnp.asarray(a)
    except (TypeError, ValueError):
        raise TypeError(
            f"jax_w4a4.{who}: {name} is {type(a).__name__}; expected an array"
        ) from None


def _pad_last(a: Array, width: int) -> Array:
    missing = width - a.shape[-1]
    return a if missing <= 0 else jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)])


def _pack_values(values: Array) -> Array:
    values = _pad_last(lax.bitcast_convert_type(values, jnp.uint4), -(-values.shape[-1] // 2) * 2)
    return formats.pack(values.astype(jnp.uint8))


def _format_of(values: Array, scales: Array, who: str) -> str:
    for fmt in formats.FORMATS.values():
        scale = jnp.dtype(scales.dtype).name
        if values.dtype == jnp.dtype(fmt.dtype) and scale in fmt.scale_dtypes:
            return fmt.name
    raise TypeError(
        f"jax_w4a4.{who}: no format has values {_describe(values)} with scales "
        f"{_describe(scales)}; expected float4_e2m1fn with float8_e4m3fn or float8_e8m0fnu, or "
        "int4 with float16, bfloat16 or float32"
    )


def _infer_block(fmt: formats.Format, k: int, blocks: int, who: str) -> int | None:
    if fmt.name != "int4":
        return fmt.default_block
    if blocks == 1:
        return None
    for block in fmt.blocks:
        if block is not None and -(-k // block) == blocks:
            return block
    raise ValueError(
        f"jax_w4a4.{who}: {blocks} scales per row of K={k} fit no block size of int4; "
        "expected blocks of 32, 64 or 128, or one scale per row"
    )


def _from_values(
    values: Array, scales: Array, format: str, k: int, optional: dict[str, Any], who: str
) -> Weight:
    if "sign_order" in optional:
        raise TypeError(
            f"jax_w4a4.{who}: unexpected argument 'sign_order'; prepare() on the result sorts signs"
        )
    return _from_packed(_pack_values(values), scales, format, k, optional, who)


def _from_packed(
    packed: Array, scales: Array, format: str, k: int | None, optional: dict[str, Any], who: str
) -> Weight:
    fmt = formats.get_format(format, who)
    order = optional.get("sign_order") or "linear"
    _check_sign_order(order, fmt.name, who)
    known = {f.name for f in dataclasses.fields(Weight)}
    unknown = set(optional) - (known - {"packed", "scales", "format", "k", "block_size"})
    if unknown:
        raise TypeError(f"jax_w4a4.{who}: unexpected argument {sorted(unknown)[0]!r}")
    packed, scales = _array("packed", packed, who), _array("scales", scales, who)
    for name, a in (("packed", packed), ("scales", scales)):
        if a.ndim < 2:
            raise ValueError(
                f"jax_w4a4.{who}: {name} is {_describe(a)}; expected (N, ...) with the K axis last"
            )
    if packed.dtype != jnp.uint8:
        raise TypeError(
            f"jax_w4a4.{who}: packed is {_describe(packed)}; expected uint8 "
            "(view int8 checkpoints as uint8)"
        )
    if scales.dtype == jnp.uint8 and fmt.name != "int4":
        scales = lax.bitcast_convert_type(scales, jnp.dtype(fmt.scale_dtypes[0]))
    if k is None:
        k = 2 * packed.shape[-1]
    k = integer(k, f"jax_w4a4.{who}: k={k!r}; expected a positive integer", 1)
    block_size = _infer_block(fmt, k, scales.shape[-1], who)
    k_pad = formats.padded_k(k, block_size)
    blocks = k_pad // (block_size or k_pad)
    # Signs of the last codes may have moved to the end of the row.
    least = k_pad // 2 if order == "sorted" else -(-k // 2)
    if packed.shape[-1] < least or packed.shape[-1] > k_pad // 2:
        raise ValueError(
            f"jax_w4a4.{who}: packed is {_describe(packed)}; expected {least} to "
            f"{k_pad // 2} bytes per row for K={k}"
        )
    if scales.shape[-1] < -(-k // (block_size or k_pad)):
        raise ValueError(
            f"jax_w4a4.{who}: scales are {_describe(scales)}; expected {blocks} per row for K={k} "
            f"in blocks of {block_size or k_pad}"
        )
    fields = {name: value for name, value in optional.items() if value is not None}
    for name in _VECTORS:
        if name in fields:
            value = _array(name, fields[name], who).astype(jnp.float32)
            if name.endswith("global_scale") and packed.ndim == 2 and value.shape == (1,):
                value = value.reshape(())
            fields[name] = value
    for name in ("lora_down", "lora_up"):
        if name in fields:
            fields[name] = _array(name, fields[name], who)
    if fields.keys() >= {"lora_down", "lora_up"} and fields["lora_up"].shape[-1:] == (0,):
        del fields["lora_down"], fields["lora_up"]
    w = Weight(
        _zero_padding(_pad_last(packed, k_pad // 2), k, k_pad, order),
        _pad_last(scales, blocks),
        format=format,
        k=k,
        block_size=block_size,
        **fields,
    )
    _validate(w, who)
    return w.replace(scale_range=_range_of(w.scales) if order == "sorted" else None)


def _zero_padding(packed: Array, k: int, k_pad: int, order: str) -> Array:
    """Clears the codes past K: they'd meet the zero codes of the activation, but be exact."""
    if k == k_pad:
        return packed
    index = jnp.arange(k_pad // 2)
    keep = jnp.where(2 * index + 1 < k, 0xFF, jnp.where(2 * index < k, 0x0F, 0)).astype(jnp.uint8)
    if order == "sorted":
        keep = formats.sort_signs(keep)
    return packed & keep.reshape((1,) * (packed.ndim - 1) + keep.shape)


def _from_qarray(q: Any, optional: dict[str, Any]) -> Weight:
    who = "Weight.from_qarray"
    if not all(hasattr(q, name) for name in ("qvalue", "scale", "qtype")):
        raise TypeError(f"jax_w4a4.{who}: q is {type(q).__name__}; expected a qwix QArray")
    values, scales = jnp.asarray(q.qvalue), jnp.asarray(q.scale)
    if getattr(q, "zero_point", None) is not None:
        raise NotImplementedError(
            f"jax_w4a4.{who}: the array has a zero point; quantize it symmetrically"
        )
    qtype = q.qtype if isinstance(q.qtype, str) else jnp.dtype(q.qtype).name
    format = {"float4_e2m1fn": "nvfp4"}.get(qtype, qtype)
    if format not in formats.FORMATS:
        raise TypeError(f"jax_w4a4.{who}: qtype is {qtype!r}; expected 'nvfp4', 'mxfp4' or int4")
    if values.ndim != 2 or scales.ndim != 2 or scales.shape[0] not in (1, values.shape[0]):
        raise ValueError(
            f"jax_w4a4.{who}: qvalue is {_describe(values)}, scale is {_describe(scales)}; "
            "expected (N, K) and (N, K/block) or (1, K/block)"
        )
    n, k = values.shape
    if format != "int4" and k != scales.shape[1] * formats.FORMATS[format].default_block:
        raise ValueError(
            f"jax_w4a4.{who}: qvalue is {_describe(values)}, scale is {_describe(scales)}; "
            f"expected one scale per {formats.FORMATS[format].default_block} values of K"
        )
    scales = jnp.broadcast_to(scales, (n, scales.shape[1]))
    if format != "int4":
        scales = _narrow_scales(scales, format, optional.get("global_scale"), who)
    return _from_values(values, scales, format, k, optional, who)


def _narrow_scales(scales: Array, format: str, global_scale: Any, who: str) -> Array:
    """Wide scales whose quotient by global_scale is exactly representable, narrowed."""
    dtype = formats.FORMATS[format].scale_dtypes[0]
    if jnp.dtype(scales.dtype).name == dtype:
        return scales
    wide = scales.astype(jnp.float32)
    gs = 1.0 if global_scale is None else jnp.asarray(global_scale, jnp.float32).reshape(())
    narrow = formats.encode_scale(wide / gs, format)
    exact = formats.decode_scale(narrow) * gs == wide
    if not isinstance(exact, jax.core.Tracer) and not bool(jnp.all(exact)):
        raise ValueError(
            f"jax_w4a4.{who}: some scales are not {dtype} numbers"
            + ("" if global_scale is None else " times global_scale")
        )
    return narrow


def _to_qarray(w: Weight) -> Any:
    who = "Weight.to_qarray"
    try:
        from qwix import QArray
    except ImportError as error:
        raise ImportError(f"jax_w4a4.{who}: needs the package qwix") from error
    extra = [
        name
        for name in ("act_global_scale", "smooth", "lora_down", "lora_up", "channel_scale", "bias")
        if getattr(w, name) is not None
    ]
    if extra:
        raise NotImplementedError(
            f"jax_w4a4.{who}: a QArray has no place for {', '.join(extra)}; drop them with "
            f"w.replace({extra[0]}=None, ...) first"
        )
    block = w.block_size or w.k
    if w.k % block:
        raise NotImplementedError(
            f"jax_w4a4.{who}: K={w.k} is no multiple of the block size {block}, which a QArray "
            "requires"
        )
    scales = w.scales[..., : w.k // block]
    if w.format != "int4":
        scales = formats.decode_scale(scales)
    if w.global_scale is not None:
        scales = scales.astype(jnp.float32) * w.global_scale[..., None, None]
    return QArray(w.values, scales, None, jnp.int4 if w.format == "int4" else w.format)
