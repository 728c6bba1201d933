"""kernels/sm100_gemm.cu in the emulator: operands, launch, float64 reference."""

from __future__ import annotations

import dataclasses
import pathlib
import struct
from collections.abc import Sequence

import numpy as np

from emulator import Device, Options, formats, tensormap, toolchain

SOURCE = pathlib.Path(__file__).resolve().parent / "kernels" / "sm100_gemm.cu"
TILE_N, STAGE_K, STAGES, THREADS = 128, 256, 3, 192


@dataclasses.dataclass(frozen=True)
class Case:
    format: str = "nvfp4"
    group: int = 1
    m: int = 128
    n: int = 128
    k: int = 512
    rank: int = 0
    groups: int = 1
    seed: int = 0

    @property
    def block(self) -> int:
        return 16 if self.format == "nvfp4" else 32

    @property
    def kernel(self) -> str:
        return f"{self.format}_{self.group}sm"

    @property
    def atoms_per_stage(self) -> int:
        return STAGE_K // self.block // 4

    @property
    def shared_bytes(self) -> int:
        stage = 128 * 128 + TILE_N // self.group * 128 + 2 * self.atoms_per_stage * 512
        return STAGES * stage + 16 * STAGES + 32 + 16

    def __str__(self) -> str:
        return f"{self.kernel} {self.m}x{self.k}x{self.n} r{self.rank} groups={self.groups}"


def scale_atoms(scales: np.ndarray, atoms: int) -> np.ndarray:
    """(rows, K / block) scale bytes to (row tiles x atoms, 512): 128 rows by 4 in each atom."""
    rows, columns = scales.shape
    tiles = -(-rows // 128)
    padded = np.zeros((tiles * 128, atoms * 4), np.uint8)
    padded[:rows, :columns] = scales
    grid = padded.reshape(tiles, 4, 32, atoms, 4)  # tile, r / 32, r % 32, atom, k
    return np.ascontiguousarray(grid.transpose(0, 3, 2, 1, 4)).reshape(tiles * atoms, 512)


def bf16(x: np.ndarray) -> np.ndarray:
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclasses.dataclass
class Operands:
    x: np.ndarray
    w: np.ndarray
    x_scale: np.ndarray
    w_scale: np.ndarray
    lora_act: np.ndarray | None
    lora_up: np.ndarray | None
    alpha: float = 0.5


def make_operands(case: Case) -> Operands:
    """Values whose sums are exact in fp32."""
    rng = np.random.default_rng(case.seed)

    def codes(rows: int) -> np.ndarray:
        return rng.integers(0, 256, (rows, case.k // 2), np.uint8)

    def scales(rows: int) -> np.ndarray:
        shape = (rows, case.k // case.block)
        if case.format == "nvfp4":
            return rng.choice(np.array([0x30, 0x34, 0x38, 0x40], np.uint8), shape)
        return rng.integers(126, 129, shape, np.uint8)

    lora = (None, None)
    if case.rank:
        lora = tuple(bf16(rng.integers(-3, 4, (rows, case.rank))) for rows in (case.m, case.n))
    return Operands(codes(case.m), codes(case.n), scales(case.m), scales(case.n), *lora)


def values(case: Case, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    name = "ue4m3" if case.format == "nvfp4" else "ue8m0"
    return formats.decode(codes, "e2m1") * np.repeat(formats.table(name)[scales], case.block, 1)


def expected(case: Case, operands: Operands) -> np.ndarray:
    y = values(case, operands.x, operands.x_scale) @ values(case, operands.w, operands.w_scale).T
    if case.rank:
        y = y + formats.decode(operands.lora_act.view(np.uint8), "bf16") @ (
            formats.decode(operands.lora_up.view(np.uint8), "bf16").T
        )
    return y * operands.alpha


def run(
    case: Case,
    options: Options | None = None,
    edits: Sequence[tuple[str, str]] = (),
    operands: Operands | None = None,
) -> tuple[np.ndarray, int, float]:
    """y as float32, warp instructions, seconds. `edits` replace text of the source, each once."""
    values_in = operands or make_operands(case)
    text = SOURCE.read_text()
    header = (SOURCE.parent / "sm100_ptx.cuh").read_text()
    text = text.replace('#include "sm100_ptx.cuh"\n', header.replace("#pragma once\n", ""))
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times")
        text = text.replace(old, new)
    code = toolchain.codes(toolchain.ptx_of("sm100_gemm.cu", "sm_100a", text=text))[case.kernel]
    device = Device(options)
    k_stages, lora_stages = -(-case.k // STAGE_K), -(-case.rank // 64)
    atoms = k_stages * case.atoms_per_stage

    def matrix(
        array: np.ndarray, name: str, kind: int, box: tuple[int, int], swizzle: int
    ) -> bytes:
        made = device.array(array, name)
        return tensormap.encode(
            kind, made.base, [array.shape[1], array.shape[0]],
            [array.shape[1] * array.itemsize], box, [1, 1], swizzle=swizzle,
        )  # fmt: skip

    w_rows = TILE_N // case.group
    raw = matrix(values_in.x, "x", 0, (128, 128), 3)
    raw += matrix(values_in.w, "w", 0, (128, w_rows), 3)
    for scales, name in ((values_in.x_scale, "x_scale"), (values_in.w_scale, "w_scale")):
        words = scale_atoms(scales, atoms).view(np.uint32)
        raw += matrix(words, name, 2, (128, case.atoms_per_stage), 0)
    for array, name, rows in (
        (values_in.lora_act, "lora_act", 128), (values_in.lora_up, "lora_up", w_rows)
    ):  # fmt: skip
        raw += matrix(array, name, 9, (64, rows), 3) if case.rank else bytes(128)
    y = device.empty(case.m * case.n * 4, "y")
    m_tiles, n_tiles = -(-case.m // (128 * case.group)), -(-case.n // TILE_N)
    raw += struct.pack(
        "<Qfiiiiiii", y.base, values_in.alpha, case.m, case.n, k_stages, lora_stages, atoms,
        m_tiles, n_tiles,
    )  # fmt: skip
    groups = min(case.groups, m_tiles * n_tiles)
    raw = raw.ljust(code.kernel.param_bytes, b"\0")
    record = device.launch(
        code, (groups * case.group, 1, 1), (THREADS, 1, 1), raw, cluster=case.group,
        dynamic_shared=case.shared_bytes,
    )  # fmt: skip
    out = y.data[: case.m * case.n * 4].view(np.float32).reshape(case.m, case.n)
    return out.copy(), record.instructions, record.seconds


def check(
    case: Case, options: Options | None = None, edits: Sequence[tuple[str, str]] = ()
) -> None:
    """Runs and compares every cell, exactly."""
    operands = make_operands(case)
    y, _, _ = run(case, options, edits, operands)
    want = expected(case, operands)
    bad = ~(y == want)
    if bad.any():
        row, column = (int(v[0]) for v in np.nonzero(bad))
        raise AssertionError(
            f"{case}: {np.count_nonzero(bad)} of {bad.size} cells are wrong, first [{row}, "
            f"{column}]: {y[row, column]} instead of {want[row, column]}"
        )
