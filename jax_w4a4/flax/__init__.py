"""Flax layers around :func:`jax_w4a4.matmul`: ``nnx.Linear`` and ``linen.Dense``.

Flax is optional; importing this package without it raises ImportError saying how to get it.
"""

try:
    import flax as _flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        'jax_w4a4.flax: flax is not installed; pip install "jax_w4a4[flax]"'
    ) from error

from jax_w4a4.flax import linen, nnx

__all__ = ["linen", "nnx"]
