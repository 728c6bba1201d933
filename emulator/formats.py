"""Element formats as tables of their values, and rounding into the 8-bit ones."""

from __future__ import annotations

import functools

import numpy as np


def _float_table(bits: int, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    codes = np.arange(1 << bits)
    sign = np.where(codes >> (bits - 1), -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    scale = 2.0**-mantissa_bits
    normal = (1 + mantissa * scale) * np.exp2(exponent.astype(float) - bias)
    return sign * np.where(exponent == 0, mantissa * scale * 2.0 ** (1 - bias), normal)


@functools.cache
def table(name: str) -> np.ndarray:
    """float64 values of all codes of an 8-bit or smaller format."""
    if name == "e2m1":
        return _float_table(4, 2, 1, 1)
    if name == "e4m3":
        out = _float_table(8, 4, 3, 7)
        out[[0x7F, 0xFF]] = np.nan
        return out
    if name == "ue4m3":
        return np.abs(table("e4m3"))
    if name == "e5m2":
        out = _float_table(8, 5, 2, 15)
        out[[0x7C, 0xFC]] = [np.inf, -np.inf]
        out[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
        return out
    if name == "ue8m0":
        out = np.exp2(np.arange(256.0) - 127)
        out[255] = np.nan
        return out
    if name == "s8":
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64)
    if name == "u8":
        return np.arange(256.0)
    raise KeyError(name)


def decode(raw: np.ndarray, name: str) -> np.ndarray:
    """Bytes of rows of elements, (..., bytes) uint8, to float64 (..., elements)."""
    if name == "bf16":
        halves = np.ascontiguousarray(raw).view(np.uint16)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if name == "f16":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float64)
    if name == "e2m1":
        pair = np.stack([raw & 15, raw >> 4], axis=-1)
        return table("e2m1")[pair.reshape(*raw.shape[:-1], -1)]
    return table(name)[raw]


def sort_signs(packed: np.ndarray) -> np.ndarray:
    """Rows of e2m1 codes as a prepared weight has them: of every eight codes the odd ones take the
    signs of the first four, the even ones those of the others."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1, 8)
    signs = codes & 8
    signs = np.stack([signs[..., 4:], signs[..., :4]], axis=-1).reshape(codes.shape)
    codes = codes & 7 | signs
    return (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(packed.shape)


def encode_fp8(x: np.ndarray, name: str) -> np.ndarray:
    """fp32 to e4m3 or e5m2 bytes, to nearest even, saturating to the largest finite value."""
    values = table(name)[:128]
    values = values[np.isfinite(values)]
    mag = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    upper = np.clip(np.searchsorted(values, mag), 1, len(values) - 1)
    above, below = values[upper] - mag, mag - values[upper - 1]
    code = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    code = np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint8)


def unpack_pair(x: np.ndarray, name: str, to: str) -> np.ndarray:
    """Pairs of 4- or 8-bit floats to pairs of f16 or bf16, as 32-bit words."""
    bits = 4 if name == "e2m1" else 8
    parts = []
    for code in (x & ((1 << bits) - 1), x >> bits):
        value = table(name)[code].astype(np.float32)
        if to == "f16":
            half = value.astype(np.float16).view(np.uint16)
        else:
            half = (value.view(np.uint32) >> 16).astype(np.uint16)
        parts.append(np.where(np.isnan(value), 0x7FFF, half).astype(np.uint32))
    return parts[0] | parts[1] << np.uint32(16)
