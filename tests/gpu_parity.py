"""Parity of the CUDA kernels with an independent model, cell by cell.

`pytest -m gpu` runs the cells as tests; `python tests/gpu_parity.py --json out.json` runs them all
and writes what was measured; `--small` takes a few small cells, for use under compute-sanitizer.

Each cell runs the fused handler on results that were filled with NaN bytes beforehand, and checks
 - packed bytes and block scales, bit for bit: every row against the `jnp` reference, sampled rows
   against `tests/model.py`; where the kernel has an activation layout of its own (sm90_v2), that
   layout, decoded, against the same values;
 - y against the float64 product of the very operands that the kernel quantized;
 - lora_act against a float64 product;
 - a second run: the same bits; the two halves as separate calls: the same bits where they run the
   same kernels, the same bounds otherwise.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import model  # noqa: E402

from jax_w4a4 import _ffi, formats, plan, primitives, reference  # noqa: E402
from jax_w4a4.weight import Weight  # noqa: E402

FORMATS = ("nvfp4", "mxfp4", "int4")
RANKS = (0, 16, 32, 128)
ROWS = (1, 7, 63, 64, 65, 200, 4352)
# (N, K): neither divides a tile or a block, except the last two.
SHAPES = ((1, 40), (129, 100), (257, 1000), (600, 272), (3072, 512))
TILES = (None, 32, 64, 128)  # None: the planner's choice

# int4 comes in these kinds: block size, scale dtype, unsigned activations.
INT4_KINDS = (
    (64, "float16", False),
    (32, "bfloat16", False),
    (128, "float32", False),
    (None, "float16", False),
    (64, "bfloat16", True),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call of the operator: shapes, dtypes and which optional operands there are."""

    format: str
    rank: int
    m: int
    n: int
    k: int
    tile_m: int | None = None
    tile_n: int | None = None
    x_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    lora_dtype: str = "bfloat16"
    block_size: int | None = -1
    scale_dtype: str | None = None
    act_unsigned: bool = False
    act_rule: str = "rceil"
    lora_smoothed: bool = False
    affine: bool = True  # smooth, channel_scale, bias
    global_scales: bool = False
    special: bool = True  # NaN, Inf, zero, tiny and negative rows, when m allows
    positive: bool = False  # x and w uniform in 0.5..1: the largest sums
    spread: int = 0  # binades between blocks of a row; then also zero and negative weight scales
    exponent: int = 0  # x times 2^exponent, w over it
    kernel: str | None = None  # None: the planner's choice, as for the other fields of a plan
    cluster: int | None = None
    main_stages: int | None = None
    group_m: int | None = None
    quantizer: int | None = None
    down_ahead: int | None = None
    promote_k: int | None = None
    precision: str | None = None
    sign_order: str = "linear"  # "sorted": a prepared weight

    def __str__(self) -> str:
        shape = f"{self.format} r{self.rank} {self.m}x{self.k}x{self.n}"
        words = {"precision": self.precision} if self.precision else {}
        words |= {"sign_order": self.sign_order} if self.sign_order != "linear" else {}
        words |= self.choices
        return " ".join([shape, *(f"{name}={value}" for name, value in words.items())])

    @property
    def choices(self) -> dict[str, int]:
        """What the cell forces of its plan."""
        names = (
            "tile_m", "tile_n", "cluster", "main_stages", "group_m", "quantizer", "down_ahead",
            "promote_k",
        )  # fmt: skip
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def cells_of(format: str, rank: int, m: int) -> Iterator[Cell]:
    """The sm90_v1 cells of one (format, rank, M): every shape, dtypes and options cycling."""
    start = zlib.crc32(f"{format} {rank} {m}".encode())
    for i, (n, k) in enumerate(SHAPES):
        turn = start + i
        x_dtype, out_dtype = (
            ("bfloat16", "bfloat16"),
            ("float32", "float32"),
            ("float16", "float16"),
            ("bfloat16", "float32"),
        )[turn % 4]
        cell = Cell(
            format,
            rank,
            m,
            n,
            k,
            kernel="sm90_v1",
            tile_m=TILES[turn // 4 % 4] if m <= 200 else None,
            x_dtype=x_dtype,
            out_dtype=out_dtype,
            lora_dtype=("bfloat16", "float16", "float32")[turn % 3],
            lora_smoothed=turn % 2 == 1,
            affine=turn % 5 != 0,
            global_scales=turn % 3 == 0,
            act_rule=("rceil", "floor")[turn // 2 % 2] if format == "mxfp4" else "rceil",
        )
        if format == "int4":
            block_size, scale_dtype, unsigned = INT4_KINDS[i]
            cell = dataclasses.replace(
                cell, block_size=block_size, scale_dtype=scale_dtype, act_unsigned=unsigned
            )
        yield cell


# (M, N, K) for sm90_v2: tails of each against every tile, K below and above the ring's depth.
V2_SHAPES = (
    (1, 128, 256),
    (7, 130, 160),  # rows of y are no multiple of 16 bytes: direct stores
    (63, 77, 32),
    (65, 1000, 2208),  # 69 mxfp4 scales per row
    (200, 256, 512),
    (257, 1, 104),
    (333, 600, 384),
    (511, 513, 1056),
    (777, 1536, 3840),
    (1100, 2184, 1280),
)
V2_RANKS = (0, 16, 32, 128, 256)
# Path of the main loop -> what makes a cell take it.
V2_PATHS: dict[str, dict[str, Any]] = {
    "Mxfp4": {"format": "mxfp4"},
    "Mxfp4Promoted": {"format": "mxfp4", "precision": "highest"},
    "Nvfp4": {"format": "nvfp4"},
    "Nvfp4Rounded": {"format": "nvfp4", "precision": "fastest"},
    "Int4Row": {"format": "int4", "block_size": None},
    "Int4Group64": {"format": "int4", "block_size": 64, "precision": "highest"},
    "Int4Group128": {"format": "int4", "block_size": 128, "precision": "highest"},
    "Int4Scaled": {"format": "int4", "block_size": 64},
    "Mxfp4Sorted": {"format": "mxfp4", "sign_order": "sorted"},
}


def v2_cells_of(path: str, tile_m: int, cluster: int) -> Iterator[Cell]:
    """The sm90_v2 cells of one compiled kernel: every rank and shape, options cycling."""
    which = V2_PATHS[path]
    format = which["format"]
    start = zlib.crc32(f"v2 {path} {tile_m} {cluster}".encode())
    for i, (m, n, k) in enumerate(V2_SHAPES):
        turn = start + i
        if path.startswith(("Int4Group", "Int4Scaled")):
            k += 128  # more than one group, or the row has a single scale
        cell = Cell(
            rank=V2_RANKS[turn % 5],
            m=m,
            n=n,
            k=k,
            kernel="sm90_v2",
            tile_m=tile_m,
            cluster=cluster,
            # The fused quantizer takes bf16 only; the others exercise the way round it.
            x_dtype=("bfloat16", "bfloat16", "bfloat16", "float32", "float16")[turn // 5 % 5],
            quantizer=1 if turn % 7 == 0 else None,
            affine=turn % 4 != 0,
            global_scales=turn % 3 == 0,
            act_rule=("rceil", "floor")[turn // 2 % 2] if format == "mxfp4" else "rceil",
            lora_smoothed=turn % 6 == 1,
            main_stages=(None, None, 2, 3)[turn % 4],
            group_m=(None, 2)[turn // 3 % 2],
            **which,
        )
        if format == "int4":
            dtypes = ("float16", "bfloat16", "float32")
            cell = dataclasses.replace(
                cell, scale_dtype=dtypes[turn // 2 % 3], act_unsigned=turn % 3 == 1
            )
        if path == "Int4Scaled":
            cell = dataclasses.replace(cell, block_size=(64, 128, 64, 32)[turn % 4])
        if path == "Mxfp4Promoted":
            cell = dataclasses.replace(cell, promote_k=(None, 128, 256)[turn % 3])
        yield cell


def v2_cells(paths: Iterable[str] = tuple(V2_PATHS)) -> Iterator[Cell]:
    for path in paths:
        for tile_m in plan.budget.V2_PATHS[path].tiles:
            for cluster in (1, 2):
                yield from v2_cells_of(path, tile_m, cluster)


def v2_extra_cells(paths: Iterable[str] = tuple(V2_PATHS)) -> Iterator[Cell]:
    """Every rank, K that the fused quantizer cannot copy, and the planner's own choices."""
    for path in paths:
        cell = functools.partial(Cell, **V2_PATHS[path])
        for rank in (*V2_RANKS, 48, 64, 96, 160, 240):
            yield cell(rank=rank, m=300, n=264, k=640, kernel="sm90_v2")
        for k in (31, 33, 100, 4097, 8200):
            yield cell(rank=32, m=130, n=200, k=k, kernel="sm90_v2")
        yield cell(rank=128, m=513, n=3840, k=15360)
        yield cell(rank=128, m=4352, n=3072, k=3840)
        yield cell(rank=0, m=256, n=3072, k=3840, affine=False)
        yield cell(rank=32, m=2100, n=256, k=512, kernel="sm90_v2", tile_m=64, group_m=5)
    for path in sorted({"Nvfp4", "Nvfp4Rounded"} & set(paths)):
        for spread in (4, 10, 20):
            for scale in (False, True):
                yield Cell(
                    **V2_PATHS[path],
                    rank=16,
                    m=140,
                    n=136,
                    k=1056,
                    spread=spread,
                    global_scales=scale,
                    kernel="sm90_v2",
                )
    for path in sorted({"Mxfp4", "Mxfp4Promoted", "Mxfp4Sorted"} & set(paths)):
        for k in (3840, 15360) if path == "Mxfp4Promoted" else ():  # docs/numerics.md
            yield Cell(**V2_PATHS[path], rank=0, m=130, n=136, k=k, positive=True, kernel="sm90_v2")
        yield Cell(**V2_PATHS[path], rank=16, m=140, n=136, k=1056, spread=40, kernel="sm90_v2")
    if "Int4Scaled" in paths:
        cell = functools.partial(Cell, "int4", 0, 140, 136, 1056, kernel="sm90_v2")
        for block, dtype, spread in (
            (64, "float16", 6),
            (64, "bfloat16", 20),
            (128, "float32", 30),
            (32, "bfloat16", 60),
        ):
            for unsigned in (False, True):
                yield cell(
                    block_size=block, scale_dtype=dtype, spread=spread, act_unsigned=unsigned
                )
        for exponent in (-100, 100):
            for dtype in ("bfloat16", "float32"):
                yield cell(block_size=64, scale_dtype=dtype, exponent=exponent, spread=4)
        yield cell(block_size=64, positive=True)
        yield cell(block_size=128, positive=True, act_unsigned=True, scale_dtype="bfloat16")
    if "Int4Row" in paths:
        # Integer sums beyond 2^24, where their conversion to fp32 rounds.
        yield Cell("int4", 0, 130, 136, 61440, block_size=None, positive=True, kernel="sm90_v2")
    if "Mxfp4" not in paths:
        return
    for m in (1, 64, 65, 1000):
        for cluster_k in (128, 1024, 3848, 5128):  # 1, 2, 4 and 8 CTAs per 64 tokens
            yield Cell("mxfp4", 256, m, 136, cluster_k, kernel="sm90_v2", quantizer=2)


# (N, K) for sm90_decode: ragged, one stage and many; and its weight rows per CTA.
DECODE_SHAPES = (
    (77, 32),
    (130, 160),
    (264, 1056),
    (1000, 2208),
    (257, 4104),
    (600, 384),
    (3072, 1280),
    (520, 6152),
)
DECODE_TILES = (None, 8, 24, 32, 40, 64, 88, 128)


SCALES_IN_TURN = (
    (24, 1, 8704), (40, 1, 9728), (128, 1, 12800), (72, 1, 24576), (32, 2, 17408), (64, 2, 18944),
    (120, 2, 33280), (56, 1, 15872),
)  # fmt: skip


# (M, N, K, weight rows and CTAs of a tile): CTAs without a share of K, and shares that end inside a
# stage; a full chip and several rounds of CTAs.
DOWN_AHEAD = (
    (17, 77, 8, 32, 1), (64, 264, 200, 64, 1), (33, 130, 520, 128, 2), (32, 3072, 1032, 24, 1),
    (64, 4096, 4096, 32, 1), (63, 8192, 4128, 64, 1), (40, 4096, 14336, 64, 2),
    (61, 36864, 1280, 128, 1), (48, 16384, 2056, 128, 1),
    # 128 tokens, of both shapes of a CTA.
    (65, 77, 8, 32, 1), (100, 264, 200, 104, 1), (97, 130, 520, 128, 2), (128, 4096, 4096, 32, 1),
    (127, 4096, 14336, 64, 2), (96, 16384, 2056, 128, 1), (65, 36864, 1280, 128, 1),
    # Two tiles of them.
    (129, 77, 8, 32, 1), (200, 264, 200, 104, 1), (256, 130, 520, 128, 2), (256, 4096, 4096, 64, 1),
    (255, 4096, 14336, 128, 2), (256, 8192, 8192, 128, 1), (130, 36864, 1280, 128, 1),
    # Three and four, which have CTAs of their own for LoRA-down each.
    (257, 77, 8, 32, 1), (300, 264, 200, 104, 1), (384, 130, 520, 128, 2),
    (383, 4096, 4096, 128, 1), (385, 4096, 14336, 128, 1), (512, 3840, 2056, 128, 1),
    (400, 36864, 1280, 128, 1),
)  # fmt: skip


# Of several tiles of 128 tokens: around whole tiles, and between.
SEVERAL_TILES = (
    129, 130, 136, 137, 192, 193, 248, 255, 256, 257, 320, 383, 384, 385, 448, 505, 511, 512,
    *range(141, 512, 19),
)  # fmt: skip


def decode_cells_of(path: str) -> Iterator[Cell]:
    """The sm90_decode cells of one path: every M of one tile once and some of several, what else
    there is cycling."""
    which = V2_PATHS[path]
    format = which["format"]
    for m in (*range(1, plan.budget.DECODE_TOKENS[-1] + 1), *SEVERAL_TILES):
        turn = zlib.crc32(f"decode {path} {m}".encode())
        n, k = DECODE_SHAPES[turn % len(DECODE_SHAPES)]
        cell = Cell(
            rank=V2_RANKS[turn // 8 % 5],
            m=m,
            n=n,
            k=k,
            kernel="sm90_decode",
            x_dtype=("bfloat16", "bfloat16", "bfloat16", "float32", "float16")[turn // 40 % 5],
            quantizer=1 if turn % 7 == 0 else None,
            affine=turn % 4 != 0,
            global_scales=turn % 3 == 0,
            act_rule=("rceil", "floor")[turn // 2 % 2] if format == "mxfp4" else "rceil",
            lora_smoothed=turn % 6 == 1,
            main_stages=(None, 2, None, 3)[turn % 4],
            **which,
        )
        if format == "int4":
            dtypes = ("float16", "bfloat16", "float32")
            cell = dataclasses.replace(
                cell, scale_dtype=dtypes[turn // 2 % 3], act_unsigned=turn % 3 == 1
            )
        # The next of the tiles that fits the shared memory; and two CTAs that divide K, where there
        # is enough of it.
        for i in range(2 * len(DECODE_TILES)):
            tile_n = DECODE_TILES[(turn // 11 + i) % len(DECODE_TILES)]
            cluster = (2, 1)[(turn // 5 + i // len(DECODE_TILES)) % 2] if tile_n else None
            found = dataclasses.replace(cell, tile_n=tile_n, cluster=cluster)
            if fits(found):
                break
        else:  # three stages of no tile
            found = dataclasses.replace(cell, main_stages=2)
        yield found


def fits(cell: Cell) -> bool:
    try:
        solve(cell, spec_of(cell))
    except ValueError:  # DoesNotFitError, or no such tile
        return False
    return True


def decode_cells(paths: Iterable[str] = plan.budget.DECODE_PATHS) -> Iterator[Cell]:
    for path in paths:
        yield from decode_cells_of(path)
        cell = functools.partial(Cell, **V2_PATHS[path], kernel="sm90_decode")
        for rank in (*V2_RANKS, 48, 64, 96, 160, 240):
            for m, tile_n in ((3, None), (61, None), (125, 64), (125, 88), (201, 64), (300, 88)):
                yield cell(rank=rank, m=m, n=264, k=640, tile_n=tile_n)
        for tile_n in range(8, 136, 8):  # every number of rows per CTA, and N that it leaves ragged
            for cluster in (1, 2):
                for m in (9, 61, 101, (133, 256, 390, 512)[tile_n // 8 % 4]):
                    found = cell(rank=16, m=m, n=269, k=2208, tile_n=tile_n, cluster=cluster)
                    if fits(found):
                        yield found
        # The block scales of the second CTA begin inside 16 bytes.
        for m in (1, 64, 127, 191):
            yield cell(rank=16, m=m, n=269, k=512, tile_n=128, cluster=2)
        # More block scales than have room at once, with many tokens.
        for tile_n, cluster, k in SCALES_IN_TURN:
            for m in (17, 64, 93, 257):
                found = cell(rank=16, m=m, n=269, k=k, tile_n=tile_n, cluster=cluster)
                if fits(found):
                    yield found
        for k in (31, 33, 100, 4097, 8200):
            yield cell(rank=32, m=13, n=200, k=k)
        # LoRA-down in the gemm's launch and in the quantizer's, whatever the planner takes.
        for m, n, k, tile_n, cluster in DOWN_AHEAD:
            for ahead in (0, plan.budget.DOWN_AHEAD_CTAS):
                found = cell(
                    rank=(32, 16)[m % 2],
                    m=m,
                    n=n,
                    k=k,
                    tile_n=tile_n,
                    cluster=cluster,
                    down_ahead=ahead,
                )
                if fits(found):
                    yield found
        for n, k in ((14336, 512), (11008, 512), (5120, 5120), (3072, 3072), (512, 14336)):
            for m in (1, 16, 64, 128, 256, 512):
                yield cell(rank=32, m=m, n=n, k=k)
        # LoRA-down in the gemm's launch: CTAs without a share of K, rings that wrap, any end of K.
        grid = itertools.product((24, 40, 64, 104, 128), (1, 2), (40, 1032, 2208, 8200))
        for i, (tile_n, cluster, k) in enumerate(grid):
            few = (17, 21, 32)[i % 3], (33, 61, 64)[i // 2 % 3]
            for m in (
                *few,
                (65, 97, 128)[i // 3 % 3],
                (129, 200, 256)[i // 2 % 3],
                (257, 384, 500)[i // 2 % 3],
            ):
                found = cell(
                    rank=(16, 32)[(i + i // 4 + i // 8) % 2], m=m, n=269, k=k, tile_n=tile_n,
                    cluster=cluster, down_ahead=4,
                )  # fmt: skip
                if fits(found):
                    yield found
        # Block scales in turn: places taken once and again, of one CTA and of two.
        for m, tile_n, cluster, k in (
            (17, 8, 1, 8704), (64, 64, 1, 16384), (33, 40, 2, 28672), (30, 128, 1, 8704),
            (24, 32, 2, 28672), (32, 16, 1, 11264), (66, 64, 1, 16384), (120, 72, 2, 28672),
            (140, 64, 1, 16384), (385, 72, 2, 28672),
        ):  # fmt: skip
            found = cell(rank=16, m=m, n=3 * tile_n + 5, k=k, tile_n=tile_n, cluster=cluster)
            if fits(found):
                yield found
    for path in sorted({"Nvfp4", "Nvfp4Rounded"} & set(paths)):
        for spread in (4, 10, 20):
            yield Cell(
                **V2_PATHS[path], rank=16, m=40, n=136, k=1056, spread=spread, kernel="sm90_decode"
            )
    for path in sorted({"Mxfp4", "Mxfp4Sorted"} & set(paths)):
        yield Cell(**V2_PATHS[path], rank=16, m=40, n=136, k=1056, spread=40, kernel="sm90_decode")
    if "Int4Row" in paths:
        # Integer sums beyond 2^24, where their conversion to fp32 rounds.
        yield Cell("int4", 0, 30, 136, 61440, block_size=None, positive=True, kernel="sm90_decode")


def all_cells() -> Iterator[Cell]:
    for format in FORMATS:
        for rank in RANKS:
            for m in ROWS:
                yield from cells_of(format, rank, m)
    yield from v2_cells()


def extra_cells() -> Iterator[Cell]:
    """What the grid leaves out: a large K, odd ranks, every tile on one shape, N beyond grid.y."""
    yield from v2_extra_cells()
    yield from decode_cells()
    for format in FORMATS:
        yield Cell(format, 32, 65, 600, 15360)
        for rank in (1, 5, 33, 300):
            yield Cell(format, rank, 65, 129, 272, out_dtype="float32")
        for tile_m in (32, 64, 128):
            yield Cell(format, 32, 200, 600, 1000, tile_m=tile_m, out_dtype="float32")
    for block_size, scale_dtype, unsigned in INT4_KINDS:
        yield Cell(
            "int4",
            16,
            65,
            257,
            1000,
            block_size=block_size,
            scale_dtype=scale_dtype,
            act_unsigned=unsigned,
            out_dtype="float32",
        )
    yield Cell("nvfp4", 0, 1, 65535 * 128 + 200, 32, affine=False)


def small_cells() -> Iterator[Cell]:
    """Few and small, but each kernel instance at least once."""
    for format in FORMATS:
        for tile_m, rank, m in ((32, 0, 7), (64, 16, 65), (128, 33, 130)):
            yield Cell(format, rank, m, 129, 200, tile_m=tile_m)
    yield Cell("int4", 5, 20, 140, 100, block_size=None)
    yield Cell("int4", 5, 20, 140, 100, block_size=32, act_unsigned=True)
    for path, which in V2_PATHS.items():
        for tile_m in plan.budget.V2_PATHS[path].tiles:
            for cluster, rank in ((1, 0), (2, 48)):
                yield Cell(
                    rank=rank,
                    m=70,
                    n=264,
                    k=416,
                    kernel="sm90_v2",
                    tile_m=tile_m,
                    cluster=cluster,
                    **which,
                )
    yield Cell("mxfp4", 16, 70, 130, 416, kernel="sm90_v2", quantizer=1)
    for path in plan.budget.DECODE_PATHS:
        for tile_n, cluster in ((24, 1), (64, 2), (104, 2), (128, 1)):
            for m, rank in zip(
                (8, 11, 32, 60, 65, 90, 120, 140), (0, 48, 16, 16, 48, 32, 32, 16), strict=True
            ):
                cell = Cell(
                    rank=rank,
                    m=m,
                    n=264,
                    k=1056,
                    kernel="sm90_decode",
                    tile_n=tile_n,
                    cluster=cluster,
                    **V2_PATHS[path],
                )
                ahead = dataclasses.replace(cell, down_ahead=plan.budget.DOWN_AHEAD_CTAS)
                yield from filter(fits, (cell, ahead))


# ------------------------------------------------------------------------------------------------
# Operands
# ------------------------------------------------------------------------------------------------


def make_x(cell: Cell, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal((cell.m, cell.k)).astype(np.float32)
    if cell.positive:
        x = rng.uniform(0.5, 1, x.shape).astype(np.float32)
    x *= np.exp2(cell.exponent + rng.integers(-3, 4, (cell.m, 1))).astype(np.float32)
    x = spread_blocks(x, cell, rng)
    if cell.act_unsigned:
        x = np.maximum(x, -0.1)
    if cell.special and cell.m >= 7:
        x[0, cell.k // 2] = np.nan
        x[1, cell.k // 3] = np.inf
        x[1, cell.k - 1] = -np.inf if cell.k > 1 else 1
        x[2] = 0
        x[3] *= 1e-5
        x[4] = -np.abs(x[4])
        x[5, ::2] = -0.0
    return x.astype(model.dtype_of(cell.x_dtype))


def spread_blocks(v: np.ndarray, cell: Cell, rng: np.random.Generator) -> np.ndarray:
    """Every block of int4 (else 16 columns) of a row times a power of two of its own."""
    if not cell.spread:
        return v
    width = cell.block_size if cell.format == "int4" else 16
    power = np.exp2(rng.integers(-cell.spread, 1, (v.shape[0], -(-v.shape[1] // width))))
    return (v * np.repeat(power, width, axis=1)[:, : v.shape[1]]).astype(np.float32)


def spec_of(cell: Cell) -> formats.Spec:
    """What the planner wants to know; the weight's own spec has more."""
    fmt = formats.FORMATS[cell.format]
    block_size = fmt.default_block if cell.block_size == -1 else cell.block_size
    k_pad = formats.padded_k(cell.k, block_size)
    return formats.Spec(
        cell.format,
        cell.k,
        k_pad,
        block_size or k_pad,
        cell.scale_dtype or fmt.scale_dtypes[0],
        out_dtype=cell.out_dtype,
        lora_dtype=cell.lora_dtype,
        lora_smoothed=cell.lora_smoothed,
        sign_order=cell.sign_order,
    )


def make_weight(cell: Cell, rng: np.random.Generator) -> Weight:
    spec = spec_of(cell)
    default = formats.FORMATS[cell.format].default_block
    block_size = default if cell.block_size == -1 else cell.block_size
    w = rng.standard_normal((cell.n, cell.k), np.float32)
    if cell.positive:
        w = rng.uniform(0.5, 1, w.shape).astype(np.float32)
    w = spread_blocks(w * 2.0**-cell.exponent / np.sqrt(cell.k), cell, rng).astype(np.float32)
    quantize = jax.jit(formats.quantize_blocks, static_argnames="spec")
    packed, scales = quantize(jnp.asarray(w), spec=spec)  # signed, whatever the activation is
    if cell.spread and cell.format == "nvfp4":
        # Codes of a zero scale count as zero; a negative scale is a value like any other.
        bits = np.array(scales).view(np.uint8)
        bits[rng.random(bits.shape) < 0.1] = 0
        bits[rng.random(bits.shape) < 0.1] ^= 0x80
        scales = jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn))

    def vector(size, low, high):
        return jnp.asarray(rng.uniform(low, high, size).astype(np.float32))

    parts: dict[str, Any] = {}
    if cell.affine:
        parts["smooth"] = vector(cell.k, 0.5, 2.0)
        parts["channel_scale"] = vector(cell.n, -1.5, 1.5)
        parts["bias"] = vector(cell.n, -1, 1)
    if cell.global_scales:
        parts["global_scale"] = jnp.float32(0.37)
        parts["act_global_scale"] = jnp.float32(1.9)
    if cell.rank:
        dt = model.dtype_of(cell.lora_dtype)
        down = rng.standard_normal((cell.k, cell.rank)) / np.sqrt(cell.k)
        up = rng.standard_normal((cell.n, cell.rank)) / np.sqrt(cell.rank)
        parts["lora_down"] = jnp.asarray(down.astype(np.float32).astype(dt))
        parts["lora_up"] = jnp.asarray(up.astype(np.float32).astype(dt))
    weight = Weight(
        packed,
        scales,
        format=cell.format,
        k=cell.k,
        block_size=block_size,
        lora_smoothed=cell.lora_smoothed,
        act_unsigned=cell.act_unsigned,
        act_rule=cell.act_rule,
        **parts,
    )
    return weight.prepare() if cell.sign_order == "sorted" else weight


def operands_of(w: Weight, spec: formats.Spec) -> tuple[list, list]:
    """The weight's operands of the quantizer and of the gemm, absent ones with zero size."""

    def vector(v):
        return jnp.zeros((0,), jnp.float32) if v is None else v.reshape(-1)

    down = jnp.zeros((w.k, 0), spec.lora_dtype) if w.lora_down is None else w.lora_down
    up = jnp.zeros((w.shape[0], 0), spec.lora_dtype) if w.lora_up is None else w.lora_up
    return (
        [vector(w.smooth), vector(w.act_global_scale), down],
        [
            w.packed,
            w.scales,
            vector(w.global_scale),
            up,
            vector(w.channel_scale),
            vector(w.bias),
            jnp.zeros((0, 2), jnp.uint8) if w.scale_range is None else w.scale_range,
        ],
    )


def solve(cell: Cell, spec: formats.Spec, target: str = "sm_90") -> plan.Plan:
    return plan.solve(problem_of(cell, spec), target, kernel=cell.kernel, **cell.choices)


def problem_of(cell: Cell, spec: formats.Spec, n: int | None = None) -> plan.Problem:
    """The planner's view of a cell, with its own N or another."""
    return plan.Problem(
        m=cell.m,
        n=cell.n if n is None else n,
        k_pad=spec.k_pad,
        rank=cell.rank,
        format=cell.format,
        block_size=spec.block_size,
        x_dtype=cell.x_dtype,
        out_dtype=spec.out_dtype,
        lora_dtype=spec.lora_dtype,
        scale_dtype=spec.scale_dtype,
        k=spec.k,
        lora_smoothed=spec.lora_smoothed,
        precision=cell.precision,
        sign_order=spec.sign_order,
    )


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------


def poison(aval: Any, byte: int = 0xFF) -> jax.Array:
    """A device array of this shape and dtype of such bytes: 0xFF is NaN in every float type."""
    dtype = np.dtype(aval.dtype)
    size = int(np.prod(aval.shape)) * dtype.itemsize
    return jax.device_put(np.full(size, byte, np.uint8).view(dtype).reshape(aval.shape))


class Poisoned:
    """f compiled so that its results land in buffers full of NaN bytes.

    The poison arrays are donated arguments that f does not read, of the results' shapes and
    dtypes, so XLA aliases each to a result. Results without elements have no buffer; they are left
    out of the program.
    """

    def __init__(self, f, *args):
        def wrapped(_, *operands):
            return [r for r in f(*operands) if r.size]

        self.args = args
        self.all_avals = jax.eval_shape(f, *args)
        self.avals = [a for a in self.all_avals if a.size]
        jitted = jax.jit(wrapped, donate_argnums=0, keep_unused=True)
        self.compiled = jitted.lower(self.avals, *args).compile()

    def run(self, byte: int = 0xFF) -> tuple[list[np.ndarray], bool]:
        """The results, and whether every one really came back in a poisoned buffer with no copy
        in the program that could have gone between."""
        poisons = [poison(a, byte) for a in self.avals]
        before = [p.unsafe_buffer_pointer() for p in poisons]
        results = self.compiled(poisons, *self.args)
        after = [r.unsafe_buffer_pointer() for r in results]
        # Equal avals may be swapped among each other.
        landed = set(after) <= set(before) and " copy(" not in self.compiled.as_text()
        left = map(np.asarray, results)
        every = [next(left) if a.size else np.zeros(a.shape, a.dtype) for a in self.all_avals]
        return every, landed


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


FP32_SUM = 4 * 2.0**-23
# Sums inside the tensor core drop bits below the largest term of each step: FP8 operands keep about
# 13 bits of it, and products of two e4m3 have eight. Part of the absolute sum that a result of
# sm90_v2 may be off by, per path.
V2_SUM = {
    "Mxfp4": 2.0**-11,
    "Mxfp4Promoted": 2.0**-12,
    "Nvfp4": 2.0**-15,
    "Nvfp4Rounded": 2.0**-10,
    "Int4Row": 2.0**-15,
    "Int4Group64": 2.0**-15,
    "Int4Group128": 2.0**-15,
    "Int4Scaled": 2.0**-15,
    "Mxfp4Sorted": 2.0**-11,
}
# What the rounding of both operands to fp16 adds, 2^-11 of each value and as much of each float32
# scale.
V2_ROUNDING = {"Int4Scaled": 2.0**-10}
BF16_MMA_SUM = 2.0**-18


def error_ratio(
    got: np.ndarray, want: np.ndarray, magnitude: np.ndarray, part: float = FP32_SUM
) -> float:
    """Largest |got - want| in units of what rounding may cost.

    The unit is half a place of got's dtype plus `part` of `magnitude`, the same sum with every
    term's absolute value: fp32 sums in any order stay well inside the default.
    """
    info = ml_dtypes.finfo(got.dtype)
    half_place = np.maximum(float(info.eps) / 2 * np.abs(want), float(info.smallest_subnormal) / 2)
    limit = float(info.max)
    got = got.astype(np.float64)
    with np.errstate(all="ignore"):
        overflow = np.abs(want) > limit * (1 - 2.0**-12)
        unit = half_place + part * magnitude
        ratio = np.where(overflow & (np.abs(got) >= limit), 0.0, np.abs(got - want) / unit)
    return float(np.max(np.nan_to_num(ratio, nan=np.inf))) if ratio.size else 0.0


OPERANDS = {
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "s8": np.int8,
}


def decode_private(
    act: np.ndarray, token_scale: np.ndarray, path: plan.budget.V2Path, k_pad: int
) -> np.ndarray:
    """float64 values (M, k_pad) of the activation layout that sm90_v2 reads, in natural order.

    Within a stage of 128 one-byte or 64 two-byte elements, position 32 s + 16 h + 4 q + j holds
    k = 32 q + 8 s + 4 h + j, and position 16 s + 8 h + 2 q + j holds
    k = 16 q + 8 (s // 2) + 2 (s % 2) + h + 4 j (cuda/sm90_expand.cuh).
    """
    position = np.arange(path.tile_k)
    if path.act_bytes == 1:
        s, h, q, j = position // 32, position // 16 % 2, position // 4 % 4, position % 4
        k = 32 * q + 8 * s + 4 * h + j
        if path.stage_groups:
            k = 64 * (s // 2) + 16 * q + 8 * (s % 2) + 4 * h + j
    else:
        s, h, q, j = position // 16, position // 8 % 2, position // 2 % 4, position % 2
        k = 16 * q + 8 * (s // 2) + 2 * (s % 2) + h + 4 * j
    values = act.view(OPERANDS[path.operand]).astype(np.float64)
    stages = values.reshape(len(act), -1, len(position))
    natural = np.empty_like(stages)
    natural[:, :, k] = stages
    natural = natural.reshape(len(act), -1)
    assert not np.any(natural[:, k_pad:]), "padding is not zero"
    natural = natural[:, :k_pad]
    if not token_scale.size:
        return natural
    scales = token_scale.reshape(len(act), -1).astype(np.float64)
    return natural * np.repeat(scales, k_pad // scales.shape[1], axis=1)


def folded_values(
    packed: np.ndarray, scales: np.ndarray, format: str, unsigned: bool, rounded: bool
) -> np.ndarray:
    """What that layout should hold: the quantized values; in mxfp4 zeros for blocks more than 26
    binades below their row's largest."""
    if rounded and format == "int4":
        return model.rounded_int4(packed, scales, unsigned)
    if rounded:
        return model.rounded_nvfp4(packed, scales)
    values = model.decode(packed, scales, format, unsigned)
    if format == "mxfp4":
        byte = scales.view(np.uint8).astype(int)
        far = byte < byte.max(axis=1, keepdims=True) - 26
        values = np.where(np.repeat(far, 32, axis=1), 0.0, values)
    return values


def run_cell(cell: Cell, implementation: str | None = "cuda", model_rows: int = 12) -> dict:
    """Runs one cell; the returned dict has the measurements and `failures`, a list of texts."""
    rng = np.random.default_rng(zlib.crc32(str(cell).encode()))
    x = make_x(cell, rng)
    w = make_weight(cell, rng)
    spec = w.spec(cell.out_dtype)
    if cell.rank == 0:
        spec = spec.replace(lora_dtype="bfloat16")
    found = solve(cell, spec)
    params = {"spec": spec, "plan": found, "implementation": implementation}
    for_quantize, for_gemm = operands_of(w, spec)
    xj = jnp.asarray(x)

    def fused(x, *operands):
        return primitives.matmul_p.bind(x, *operands, **params)

    # As the public functions plan it: without a gemm, whatever the order of the weight's codes.
    alone_spec = spec.replace(sign_order="linear")
    alone_plan = plan.solve(problem_of(cell, alone_spec, n=0), "sm_90")
    for_codes = {**params, "spec": alone_spec, "plan": alone_plan}

    def halves(x, smooth, x_gs, down, *weight):
        xp, xs, la = primitives.quantize_p.bind(x, smooth, x_gs, down, **for_codes)
        y, *private = primitives.gemm_p.bind(xp, xs, x_gs, la, *weight, **params)
        return [y, xp, xs, la, *private]

    failures: list[str] = []

    def check(ok: bool, what: str) -> bool:
        if not ok:
            failures.append(what)
        return bool(ok)

    args = (xj, *for_quantize, *for_gemm)
    program = Poisoned(fused, *args)
    first, poisoned = program.run()
    again, _ = program.run()
    split, _ = Poisoned(halves, *args).run()
    y, xp, xs, la, *private = first
    v2 = plan.budget.DESIGNS[found.kernel].private_layout
    path = plan.budget.v2_path(found.problem) if v2 else None
    rounded = path is not None and path.name in ("Nvfp4Rounded", "Int4Scaled")
    rounded = rounded and implementation == "cuda"
    fused_quantizer = found.quantizer.kernel in (2, 5)
    if implementation == "cuda":
        check(poisoned, "results did not land in poisoned buffers")
    identical = check(
        all(map(same_bits, first, again)), "two runs of the same program differ in bits"
    )
    if found.quantizer.down is not None and found.quantizer.down.ahead:
        # 0xFF is also what the kernel takes for "not yet": whether it is told by whoever has to.
        other, _ = program.run(0x7F)
        same = same_bits(y, other[0]) and same_bits(la, other[3])
        check(same, "other bytes in the results beforehand change the result")
    # LoRA-down as a launch of its own sums in another order than inside quantizer 1.
    alone = (found.quantizer.down, for_codes["plan"].quantizer.down)
    same_sums = cell.rank == 0 or (alone[0] is None) == (alone[1] is None)
    split_same = None
    if not fused_quantizer:
        # Not the workspace of the gemm: the call through x has more of it.
        compared = range(4) if same_sums else (1, 2)
        same = all(same_bits(first[i], split[i]) for i in compared)
        split_same = check(same, "fused call differs from its halves")

    if cell.sign_order == "sorted":
        as_linear = dataclasses.replace(cell, sign_order="linear")
        of_linear = {**params, "spec": alone_spec, "plan": solve(as_linear, alone_spec)}
        twin = jax.jit(lambda *operands: primitives.matmul_p.bind(*operands, **of_linear)[0])
        operands = (xj, *for_quantize, *operands_of(w.linear(), spec)[1])
        # With two CTAs a row's base is that of the whole row, not of each one's part of K.
        if not (cell.spread and found.cluster > 1):
            check(same_bits(y, np.asarray(twin(*operands))), "y differs from that of linear codes")

    # Quantizer, every row: against the reference on the CPU. XLA's GPU division is not correctly
    # rounded, so there the reference can be one place off in 1 / smooth.
    cpu = jax.devices("cpu")[0]
    quantize_ref = jax.jit(reference.quantize_activation_ref, static_argnames="spec")
    on_cpu = jax.device_put((xj, *for_quantize), cpu)
    ref_xp, ref_xs, _ = map(np.asarray, quantize_ref(*on_cpu, spec=spec))
    if fused_quantizer:
        xp, xs = split[1], split[2]
    check(same_bits(xp, ref_xp), f"{np.sum(xp != ref_xp)} packed bytes differ from the reference")
    check(same_bits(xs, ref_xs), "block scales differ from the reference")
    # ... sampled rows: against the numpy model.
    ops = model.Operands.of(w)
    rows = np.unique(np.concatenate([np.arange(min(6, cell.m)), rng.integers(0, cell.m, 32)]))
    rows = rows[:model_rows]
    model_xp, model_xs, la64 = model.quantize_activation(x[rows], ops)
    check(same_bits(xp[rows], model_xp), f"packed bytes of rows {rows} differ from the model")
    check(same_bits(xs[rows], model_xs), f"block scales of rows {rows} differ from the model")

    finite = np.isfinite(x.astype(np.float32)).all(axis=1)
    nan_rows = np.isnan(x.astype(np.float32)).any(axis=1)
    if v2 and implementation == "cuda":
        # What follows a gemm's own is LoRA-down's, where that is in its launch.
        for name, (act, tokens, _) in (("x", private[:3]), ("the public layout", split[4:])):
            if path.stage_groups:
                tokens = tokens.reshape(spec.blocks, -1).T
            if tokens.size:
                tokens = tokens[: cell.m][~nan_rows]
            # Rows past M are read, but nobody writes them.
            got = decode_private(act[: cell.m][~nan_rows], tokens, path, spec.k_pad)
            want = folded_values(xp, xs, cell.format, cell.act_unsigned, rounded)[~nan_rows]
            wrong = np.sum(got != want)
            check(wrong == 0, f"{wrong} activations from {name} differ from the quantized values")
    check(np.isnan(y[nan_rows].astype(np.float32)).all(), "a NaN in x did not reach its row of y")

    # LoRA-down. sampled rows, finite ones.
    lora_ratio = 0.0
    if cell.rank:
        use = finite[rows]
        xl = (model.smoothed(x[rows], ops) if cell.lora_smoothed else x[rows]).astype(np.float64)
        magnitude = np.abs(xl[use]) @ np.abs(ops.lora_down.astype(np.float64))
        part = BF16_MMA_SUM if fused_quantizer else FP32_SUM
        lora_ratio = error_ratio(la[rows][use], la64[use], magnitude, part)
        check(lora_ratio <= 1, f"lora_act is {lora_ratio:.3g} x its error bound off")

    # GEMM: float64 product of the kernel's own quantized operands.
    want = model.gemm_f64(xp[finite], xs[finite], la[finite], ops, rounded=rounded)
    absolute = dataclasses.replace(
        ops,
        **{
            name: None if (v := getattr(ops, name)) is None else np.abs(v)
            for name in ("channel_scale", "lora_up", "bias", "global_scale", "act_global_scale")
        },
    )
    magnitude = _gemm_magnitude(xp[finite], xs[finite], la[finite], absolute, rounded)
    got = y[finite]
    part = V2_SUM[path.name] if path else FP32_SUM
    ratio = error_ratio(got, want, magnitude, part)
    check(ratio <= 1, f"y is {ratio:.3g} x its error bound off")
    if fused_quantizer or not same_sums:
        half_want = model.gemm_f64(xp[finite], xs[finite], split[3][finite], ops, rounded=rounded)
        half_ratio = error_ratio(split[0][finite], half_want, magnitude, part)
        check(half_ratio <= 1, f"y of the halves is {half_ratio:.3g} x its error bound off")
    if path and path.name in V2_ROUNDING and cell.spread < 20:
        # Without the rounding of the operands; of blocks far below the row's largest more is lost.
        exact = model.gemm_f64(xp[finite], xs[finite], la[finite], ops)
        wide = V2_ROUNDING[path.name] * (2 if spec.scale_dtype == "float32" else 1)
        exact_ratio = error_ratio(got, exact, magnitude, part + wide)
        check(exact_ratio <= 1, f"y is {exact_ratio:.3g} x the bound of its rounding off")
    norm = np.linalg.norm(want)
    clipped = np.clip(got.astype(np.float64), -1e30, 1e30)
    frobenius = float(np.linalg.norm(clipped - want) / norm) if norm else 0.0

    return {
        **dataclasses.asdict(cell),
        "block_size": w.block_size,
        "plan_kernel": found.kernel,
        "plan_tile_m": found.tile_m,
        "plan_tile_n": found.tile_n,
        "plan_cluster": found.cluster,
        "plan_quantizer": found.quantizer.kernel,
        "y_error_over_bound": round(ratio, 4),
        "y_relative_frobenius": float(f"{frobenius:.3g}"),
        "lora_error_over_bound": round(lora_ratio, 4),
        "poisoned": poisoned,
        "two_runs_identical": identical,
        "halves_identical": split_same,
        "failures": failures,
    }


def _gemm_magnitude(xp, xs, la, ops: model.Operands, rounded: bool) -> np.ndarray:
    """`model.gemm_f64` with the absolute value of every term."""
    x, weight = model.operand_values(xp, xs, ops, rounded)
    total = np.abs(x) @ np.abs(weight).T
    for scale in (ops.global_scale, ops.act_global_scale):
        if scale is not None:
            total *= np.float64(scale)
    if ops.channel_scale is not None:
        total *= ops.channel_scale
    if ops.lora_up is not None:
        total += np.abs(la.astype(np.float64)) @ ops.lora_up.astype(np.float64).T
    if ops.bias is not None:
        total += ops.bias
    return total


def run_safely(cell: Cell, implementation: str | None) -> dict:
    """`run_cell`; one broken cell must not hide the others."""
    try:
        return run_cell(cell, implementation)
    except Exception as error:
        return {**dataclasses.asdict(cell), "failures": [f"{type(error).__name__}: {error}"]}


def in_processes(
    run: Callable[[Any], Any], todo: Sequence[Any], jobs: int, patience_s: float | None = None
) -> Iterator[Any]:
    """run(item) of every item in turn, `jobs` at a time.

    Processes, because most of a cell is tracing and lowering, which hold the interpreter lock: 133
    cells took 90 s in 16 threads. With one job everything runs in this process, under a sanitizer
    say.

    Raises:
      TimeoutError: the next result did not come for `patience_s`. The processes are killed.
    """
    if jobs == 1:
        yield from map(run, todo)
        return
    # Every process has the GPU's memory to share.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn) as pool:
        try:
            yield from (f.result(patience_s) for f in [pool.submit(run, item) for item in todo])
        except TimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write all measurements here")
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--small", action="store_true", help="a few small cells only")
    parser.add_argument("--kernel", help="only cells that force this kernel, or leave it open")
    parser.add_argument("--rows", type=int, default=0, help="only cells of at least so many rows")
    parser.add_argument("--every", type=int, default=1, help="every N-th cell only")
    parser.add_argument(
        "--paths", nargs="+", choices=V2_PATHS, help="only the cells of these paths"
    )
    parser.add_argument(
        "--reference", action="store_true", help="run the jnp reference instead of the kernels"
    )
    args = parser.parse_args()
    implementation = None if args.reference else "cuda"
    todo = list(small_cells()) if args.small else [*all_cells(), *extra_cells()]
    if args.paths:
        decode = [p for p in args.paths if p in plan.budget.DECODE_PATHS]
        todo = [*v2_cells(args.paths), *v2_extra_cells(args.paths), *decode_cells(decode)]
    if args.kernel:
        todo = [cell for cell in todo if cell.kernel in (args.kernel, None)]
    todo = [cell for cell in todo if cell.m >= args.rows]
    todo = todo[:: args.every]
    results, failed, started = [], 0, time.time()
    run = functools.partial(run_safely, implementation=implementation)
    for i, (cell, result) in enumerate(zip(todo, in_processes(run, todo, args.jobs), strict=True)):
        results.append(result)
        if result["failures"]:
            failed += 1
            print(f"FAILED {cell}: " + "; ".join(result["failures"]), flush=True)
        elif i % 50 == 0:
            print(f"{i + 1}/{len(todo)} {cell} ok", flush=True)
    device = jax.devices()[0]
    report = {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "build": {k: str(v) for k, v in _ffi.build_info().items()},
        "implementation": implementation or "reference",
        "cells": len(results),
        "failed": failed,
        "seconds": round(time.time() - started, 1),
        "largest_y_error_over_bound": max(r.get("y_error_over_bound", 0.0) for r in results),
        "largest_lora_error_over_bound": max(r.get("lora_error_over_bound", 0.0) for r in results),
        "results": results,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{len(results)} cells, {failed} failed, {report['seconds']} s, largest error "
        f"{report['largest_y_error_over_bound']} of the bound"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
