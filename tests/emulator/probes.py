"""Inputs of kernels/probes_sm90.cu, and its kernels in the emulator.

The same inputs go to the program on an H200 (dump_goldens.py) and to the emulator; they come from
seeds, so only results are stored.
"""

from __future__ import annotations

import dataclasses
import pathlib
import struct
from collections.abc import Iterator

import numpy as np

from emulator import Device, Options, tensormap, toolchain

SOURCE = pathlib.Path(__file__).resolve().parent / "kernels" / "probes_sm90.cu"
KINDS = ("e5m2", "mixed", "e4m3", "bf16", "s8")
SPREADS = ("narrow", "wide")
N = 32
BOX_ROWS, BOX_SMEM = 24, 8192
SCALARS = 1024


@dataclasses.dataclass(frozen=True)
class Probe:
    """One launch: `code` is what the program switches on, `numbers` and `arrays` its input."""

    name: str
    code: int
    numbers: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]
    out_bytes: int

    def serialized(self) -> bytes:
        raw = struct.pack(f"<{1 + len(self.numbers)}i", self.code, *self.numbers)
        for array in self.arrays:
            data = array.tobytes()
            raw += struct.pack("<i", len(data)) + data
        return raw


def _operand(rng: np.random.Generator, kind: str, spread: str, shape: tuple[int, ...]):
    """Bytes of elements: exponents close together or all over the finite range."""
    if kind == "s8":
        return rng.integers(0, 256, shape, np.uint8)
    if kind == "bf16":
        half = (*shape[:-1], shape[-1] // 2)
        exponent = (
            rng.integers(124, 130, half) if spread == "narrow" else rng.integers(100, 150, half)
        )
        bits = rng.integers(0, 2, half) << 15 | exponent << 7 | rng.integers(0, 128, half)
        return np.ascontiguousarray(bits.astype(np.uint16)).view(np.uint8)
    bits = rng.integers(0, 256, shape, np.uint8)
    exponent_bits, low = (0x7C, 0x38) if kind == "e5m2" else (0x78, 0x30)
    if spread == "narrow":
        keep = rng.integers(0, 4, shape, np.uint8) << (2 if kind == "e5m2" else 3)
        return ((bits & ~np.uint8(exponent_bits)) | (low + keep)).astype(np.uint8)
    infinite = (bits & exponent_bits) == exponent_bits
    return np.where(infinite, bits & 0x83, bits).astype(np.uint8)


def probes() -> Iterator[Probe]:
    for code, kind in enumerate(KINDS):
        a_kind, b_kind = ("e5m2", "e4m3") if kind == "mixed" else (kind, kind)
        for spread in SPREADS:
            for accumulate in (0, 1):
                rng = np.random.default_rng([code, SPREADS.index(spread), accumulate])
                b = _operand(rng, b_kind, spread, (N, 128))
                a = _operand(rng, a_kind, spread, (128, 64))
                if kind == "s8":
                    d0 = rng.integers(-(1 << 20), 1 << 20, (128, N // 2)).astype(np.int32)
                else:
                    scale = np.exp2(rng.integers(-8, 9, (128, N // 2)))
                    d0 = (rng.standard_normal((128, N // 2)) * scale).astype(np.float32)
                yield Probe(
                    f"mma {kind} {spread} accumulate={accumulate}",
                    code, (accumulate,), (b, a, d0), 128 * N * 2,
                )  # fmt: skip
    rng = np.random.default_rng(5)
    for swizzle, box in ((0, 48), (1, 32), (2, 64), (3, 128)):
        # Inside, past both ends, before both starts.
        for inner, outer in ((16, 1), (176, 30), (-16, -5)):
            data = rng.integers(0, 256, (40, 208), np.uint8)
            yield Probe(
                f"box swizzle={swizzle} at {inner},{outer}",
                5, (40, 208, box, swizzle, inner, outer), (data,), BOX_SMEM,
            )  # fmt: skip
    rng = np.random.default_rng(6)
    values = [rng.integers(0, 1 << 32, SCALARS, np.uint32) for _ in range(3)]
    values[0][: SCALARS // 2] = rng.standard_normal(SCALARS // 2).astype(np.float32).view(np.uint32)
    values[1][: SCALARS // 2] = rng.standard_normal(SCALARS // 2).astype(np.float32).view(np.uint32)
    values[2][: SCALARS // 2] = rng.standard_normal(SCALARS // 2).astype(np.float32).view(np.uint32)
    yield Probe("scalars", 6, (SCALARS,), tuple(values), 8 * 4 * SCALARS)


def emulate(probe: Probe, options: Options | None = None) -> np.ndarray:
    """The bytes that the probe's kernel writes."""
    codes = toolchain.codes(toolchain.ptx_of(SOURCE))
    device = Device(options)
    arrays = [device.array(a, f"input {i}") for i, a in enumerate(probe.arrays)]
    out = device.empty(probe.out_bytes, "out")
    if probe.code < 5:
        code = codes[f"mma_{KINDS[probe.code]}"]
        b, a, d0 = (x.base for x in arrays)
        raw = tensormap.encode(0, b, [128, N], [128], [128, N], [1, 1], swizzle=3)
        raw += struct.pack("<QQQi", a, d0, out.base, probe.numbers[0])
        device.launch(code, (1, 1, 1), (128, 1, 1), raw.ljust(192, b"\0"),
                      dynamic_shared=N * 128 + 16)  # fmt: skip
    elif probe.code == 5:
        rows, columns, box, swizzle, inner, outer = probe.numbers
        raw = tensormap.encode(
            0, arrays[0].base, [columns, rows], [columns], [box, BOX_ROWS], [1, 1], swizzle=swizzle
        )
        raw += struct.pack("<Qiii", out.base, BOX_ROWS * box, inner, outer)
        device.launch(codes["box_probe"], (1, 1, 1), (128, 1, 1), raw.ljust(192, b"\0"),
                      dynamic_shared=BOX_SMEM + 16)  # fmt: skip
    else:
        raw = struct.pack("<QQQQi", *(x.base for x in arrays), out.base, SCALARS)
        device.launch(codes["scalar_probe"], (SCALARS // 128, 1, 1), (128, 1, 1), raw)
    return out.data[: probe.out_bytes].copy()
