"""Which model of the tensor core's sums gives the golden bits of the MMA probes.

  python tests/emulator/fit_numerics.py [FILE]

Prints, for every operand type, the models with the fewest wrong results. The best one belongs into
emulator/wgmma.py (HOPPER_FRACTION_BITS and align_and_truncate).
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]

import goldens  # noqa: E402
import numpy as np  # noqa: E402
import probes  # noqa: E402

from emulator import formats  # noqa: E402

TYPES = {
    "e5m2": ("e5m2", "e5m2"),
    "mixed": ("e5m2", "e4m3"),
    "e4m3": ("e4m3", "e4m3"),
    "bf16": ("bf16", "bf16"),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """How one instruction sums.

    Attributes:
      bits: fraction bits below the largest exponent that aligned terms keep.
      group: products that are aligned together.
      accumulator: aligned with the products ("in"), or added in fp32 afterwards ("after").
      normalized: exponents of products are those of their values, not sums of exponents.
      result: fraction bits of the result, truncated; 0 rounds to nearest fp32.
    """

    bits: int
    group: int
    accumulator: str
    normalized: bool
    result: int


def _exponent(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, -2000, np.frexp(x)[1] - 1)


def _truncate(x: np.ndarray, bits: int) -> np.ndarray:
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(fraction, bits + 1)), exponent - bits - 1)


def step(a: np.ndarray, b: np.ndarray, d: np.ndarray, model: Model) -> np.ndarray:
    for low in range(0, a.shape[1], model.group):
        x, y = a[:, None, low : low + model.group], b[None, :, low : low + model.group]
        products = x * y
        exponents = _exponent(products) if model.normalized else np.where(
            products == 0, -2000, _exponent(x) + _exponent(y)
        )  # fmt: skip
        top = exponents.max(axis=2)
        if model.accumulator == "in":
            top = np.maximum(top, _exponent(d))
        quantum = np.exp2(np.maximum(top, -1000).astype(np.float64) - model.bits)
        total = np.trunc(products / quantum[:, :, None]).sum(axis=2)
        if model.accumulator == "in":
            total = total + np.trunc(d / quantum)
        out = total * quantum
        if model.accumulator == "after":
            out = out + d
        d = _truncate(out, model.result) if model.result else out.astype(np.float32).astype(float)
    return d


def probe_operands(probe: probes.Probe, kind: str):
    """A (64, 4, k), B (n, 4, k) and D0 (64, n) of an MMA probe."""
    b, a, d0 = probe.arrays
    a_type, b_type = TYPES[kind]
    # Thread t, step s, register 2 h + r, byte j: row 16 w + 8 r + g, K byte 16 h + 4 q + j.
    raw = a.reshape(4, 8, 4, 4, 2, 2, 4)  # w, g, q, s, h, r, j
    raw = np.ascontiguousarray(raw.transpose(0, 5, 1, 3, 4, 2, 6)).reshape(64, 4, 32)
    n = probes.N
    grid = d0.reshape(4, 8, 4, n // 8, 2, 2)  # w, g, q, j, h, i
    start = grid.transpose(0, 4, 1, 3, 2, 5).reshape(64, n).astype(np.float64)
    return (
        formats.decode(raw, a_type),
        formats.decode(b.reshape(n, 4, 32), b_type),
        start if probe.numbers[0] else np.zeros_like(start),
    )


def run(probe: probes.Probe, kind: str, model: Model) -> np.ndarray:
    """fp32 bits in the order that the kernel writes."""
    a, b, d = probe_operands(probe, kind)
    for s in range(4):
        d = step(a[:, s], b[:, s], d, model)
    n = probes.N
    grid = d.astype(np.float32).reshape(4, 2, 8, n // 8, 4, 2)  # w, h, g, j, q, i
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 3, 1, 5)).reshape(128, n // 2)


def main() -> None:
    stored = np.load(sys.argv[1] if len(sys.argv) > 1 else goldens.FILE)
    for kind in TYPES:
        cases = [p for p in probes.probes() if p.name.startswith(f"mma {kind} ")]
        want = {p.name: stored[f"probe/{p.name}"].view(np.float32).reshape(128, -1) for p in cases}
        narrow = kind != "bf16"
        table = []
        for bits, group, accumulator, normalized, result in itertools.product(
            range(12, 16) if narrow else range(23, 28),
            (32, 16, 8, 4) if narrow else (16, 8, 4),
            ("in", "after"),
            (False, True),
            (0, 13, 22, 23) if narrow else (0, 23),
        ):
            model = Model(bits, group, accumulator, normalized, result)
            wrong = sum(
                int((run(p, kind, model).view(np.uint32) != want[p.name].view(np.uint32)).sum())
                for p in cases
            )
            table.append((wrong, model))
        total = sum(v.size for v in want.values())
        for wrong, model in sorted(table, key=lambda row: row[0])[:4]:
            print(f"{kind:6} {wrong:5} of {total} wrong: {model}", flush=True)


if __name__ == "__main__":
    main()
