"""The project's sm_100a kernels in the emulator: operands, launches by the host code, checks.

What does not depend on the architecture is that of product.py.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from emulator import formats, product, toolchain
from emulator.host import Host
from emulator.launch import Device, Options
from jax_w4a4 import plan

BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the operator on sm_100.

    Attributes:
      tile_n, group: columns of a tile, CTAs that share an MMA (a tile has 128 rows for each).
      clusters: groups that the chip runs at once, so tiles per group.
      stages: of the main ring; None for the plan's.
      exact: data whose sums are exact in fp32 in any order.
    """

    format: str = "nvfp4"
    m: int = 256
    n: int = 128
    k: int = 512
    rank: int = 0
    group: int = 2
    tile_n: int = 128
    clusters: int = 2
    stages: int | None = None
    store_stages: int | None = None
    group_m: int | None = None
    affine: bool = True
    global_scale: bool = True
    out_dtype: str = "bfloat16"
    lora_dtype: str = "bfloat16"
    exact: bool = True
    seed: int = 0
    # What product.make_operands asks besides.
    fused: bool = False
    smooth: bool = True
    far: bool = False
    x_dtype: str = "bfloat16"
    rule: str = "rceil"
    act_unsigned: bool = False

    @property
    def block(self) -> int:
        return BLOCKS[self.format]

    @property
    def k_pad(self) -> int:
        return -(-self.k // 32) * 32

    @property
    def blocks(self) -> int:
        return self.k_pad // self.block

    @property
    def scales(self) -> str:
        return product.SCALE_DTYPES[self.format]

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name not in ("format", "m", "n", "k", "rank", "group", "tile_n")
            and getattr(self, f.name) != f.default
        ]
        tile = f"{128 * self.group}x{self.tile_n}"
        shape = f"{self.format} {tile} {self.m}x{self.k}x{self.n} r{self.rank}"
        return " ".join([shape, *changed])


def problem_of(case: Case) -> plan.Problem:
    return plan.Problem(
        m=case.m,
        n=case.n,
        k_pad=case.k_pad,
        rank=case.rank,
        format=case.format,
        block_size=case.block,
        x_dtype=case.x_dtype,
        out_dtype=case.out_dtype,
        lora_dtype=case.lora_dtype,
        scale_dtype=case.scales,
        k=case.k,
    )


@functools.cache
def plan_of(case: Case) -> plan.Plan:
    forced = {"tile_m": 128 * case.group, "tile_n": case.tile_n, "cluster": case.group}
    for name, value in (
        ("main_stages", case.stages), ("store_stages", case.store_stages),
        ("group_m", case.group_m),
    ):  # fmt: skip
        if value is not None:
            forced[name] = value
    return plan.solve(problem_of(case), "sm_100", kernel="sm100_v2", **forced)


def make_operands(case: Case) -> dict[str, np.ndarray]:
    """Random operands as arrays of bits; absent ones are missing."""
    made = product.make_operands(case)  # type: ignore[arg-type]
    if case.lora_dtype == "float16":
        for name in ("lora_act", "lora_up"):
            if name in made:
                made[name] = product.from_bf16(made[name]).astype(np.float16).view(np.uint16)
    return made


@functools.cache
def host() -> Host:
    return Host(*toolchain.host_library("sm100"))


class GemmCall(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "act", "act_atoms", "act_global_scale", "lora_act", "weight", "weight_atoms",
            "weight_global_scale", "lora_up", "channel_scale", "bias", "out",
        )),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_int) for name in (
            "k_pad", "rank", "stages", "store_stages", "group_m", "lora_dtype", "out_dtype",
        )),
        ("smem", ctypes.c_int * 8),
    ]  # fmt: skip


@dataclasses.dataclass
class Result:
    """Bits that the kernels wrote."""

    y: np.ndarray
    packed: np.ndarray
    act_atoms: np.ndarray
    weight_atoms: np.ndarray
    lora_act: np.ndarray | None
    written: np.ndarray  # per byte of y: the CTA that wrote it, or 0
    instructions: int
    seconds: float
    grid: int  # CTAs of the gemm


def run(
    case: Case,
    options: Options | None = None,
    *,
    kernels: Host | None = None,
    operands: dict[str, np.ndarray] | None = None,
    changes: Mapping[str, Callable[[int], int]] | None = None,
    prepared: bool = False,
) -> Result:
    """The scales' launch, or LoRA-down and the quantizer; then the gemm as a dependent launch.

    Args:
      kernels: driver with other kernels than the product's.
      changes: to attributes of the plan, for seeded bugs of the account.
      prepared: the gemm alone; its scale atoms are made here, and count as an earlier launch's.
    """
    driver = kernels or host()
    found = plan_of(case)
    values = operands or make_operands(case)
    device = driver.device = Device(options)
    driver.set_clusters(case.clusters)  # as device number `clusters`, see entry_sm90.cc
    buffers = {name: device.array(value, name) for name, value in values.items()}
    attrs = found.ffi_attrs()
    for name, change in (changes or {}).items():
        attrs[name] = change(attrs[name])
    shapes = {b.name: b.shape for b in found.workspace(case.m, "gemm")}
    for name, scales in (("act_atoms", "act_scale"), ("weight_atoms", "weight_scale")):
        if prepared:
            buffers[name] = device.array(scale_atoms(values[scales], case.block), name)
        else:
            buffers[name] = device.empty(int(np.prod(shapes[name])), name)
    y = buffers["out"] = device.empty(case.m * case.n * 2, "y")

    def address(name: str) -> int | None:
        return buffers[name].base if name in buffers else None

    pointer, long = ctypes.c_void_p, ctypes.c_int64
    if case.fused:
        if case.rank:
            buffers["lora_act"] = device.empty(case.m * case.rank * 2, "lora_act")
            driver.call(
                "emulator_sm100_down", pointer(address("x")), pointer(address("lora_down")),
                pointer(address("lora_act")), long(case.m), case.k, case.rank,
                attrs["down_stages"], attrs["off_down_barriers"], attrs["down_smem_bytes"],
                case.clusters,
            )  # fmt: skip
        buffers["packed"] = device.empty(case.m * case.k_pad // 2, "packed")
        driver.call(
            "emulator_sm100_quantize", product.FORMATS.index(case.format),
            ctypes.byref(product.tokens(case, attrs, address)),  # type: ignore[arg-type]
            pointer(address("packed")), pointer(address("act_atoms")),
            pointer(address("weight_scale")), pointer(address("weight_atoms")), long(case.n),
        )  # fmt: skip
    elif not prepared:
        driver.call(
            "emulator_sm100_scales", pointer(address("act_scale")),
            pointer(address("weight_scale")), pointer(address("act_atoms")),
            pointer(address("weight_atoms")), long(case.m), long(case.n), case.k_pad, case.block,
        )  # fmt: skip
    names = ("act", "weight", "act_scale", "weight_scale", "store", "aux", "barriers")
    smem = [attrs[f"off_{name}"] for name in names] + [attrs["smem_bytes"]]
    pointers = {"act": "packed", **{name: name for name, _ in GemmCall._fields_[1:11]}}
    call = GemmCall(
        *(address(name) for name in pointers.values()), case.m, case.n, case.k_pad, case.rank,
        attrs["main_stages"], attrs["store_stages"], attrs["group_m"],
        product.DTYPES.index(case.lora_dtype), product.DTYPES.index(case.out_dtype),
        (ctypes.c_int * 8)(*smem),
    )  # fmt: skip
    for name in ("act_atoms", "weight_atoms", *(("packed", "lora_act") if case.fused else ())):
        if name in buffers:
            buffers[name].pending = True
    driver.call(
        "emulator_sm100_gemm", product.FORMATS.index(case.format), case.group, case.tile_n,
        ctypes.byref(call), 1, case.clusters,
    )  # fmt: skip
    size = case.m * case.n * 2

    def bits(name: str, dtype: str, *shape: int) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return buffers[name].data[:count].view(dtype).reshape(shape).copy()

    return Result(
        bits("out", "uint16", case.m, case.n),
        bits("packed", "uint8", case.m, case.k_pad // 2),
        bits("act_atoms", "uint8", *shapes["act_atoms"]),
        bits("weight_atoms", "uint8", *shapes["weight_atoms"]),
        bits("lora_act", "uint16", case.m, case.rank) if case.rank else None,
        y.writer[:size].copy(),
        sum(launch.instructions for launch in device.launches),
        sum(launch.seconds for launch in device.launches),
        device.launches[-1].grid[0],
    )


# ---- references ----


def scale_atoms(scales: np.ndarray, block: int) -> np.ndarray:
    """(rows, blocks) scale bytes as atoms of 128 rows by four, whole stages of 256 elements."""
    rows, columns = scales.shape
    tiles, atoms = -(-rows // 128), -(-columns * block // 256) * (64 // block)
    padded = np.zeros((tiles * 128, atoms * 4), np.uint8)
    padded[:rows, :columns] = scales.view(np.uint8)
    grid = padded.reshape(tiles, 4, 32, atoms, 4)  # tile, r / 32, r % 32, atom, block
    return np.ascontiguousarray(grid.transpose(0, 3, 2, 1, 4)).reshape(tiles * atoms, 512)


def _values(case: Case, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    table = formats.table("ue4m3" if case.format == "nvfp4" else "ue8m0")
    return formats.decode(packed, "e2m1") * np.repeat(table[scales], case.block, 1)


def scale_rows(atoms: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The inverse of scale_atoms."""
    grid = atoms.reshape(-(-rows // 128), -1, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(grid.reshape(grid.shape[0] * 128, -1)[:rows, :columns])


def expected(
    case: Case, operands: dict[str, np.ndarray], result: Result
) -> tuple[np.ndarray, np.ndarray]:
    """y in float64, and what the magnitudes of its terms sum to."""
    x = _values(case, result.packed, scale_rows(result.act_atoms, case.m, case.blocks))
    w = _values(case, operands["weight"], operands["weight_scale"])
    factor = np.ones(case.n)
    for name in ("weight_global_scale", "act_global_scale", "channel_scale"):
        if name in operands:
            factor = factor * operands[name].astype(np.float64)
    y, size = x @ w.T * factor, np.abs(x) @ np.abs(w.T) * np.abs(factor)
    if case.rank:
        name = "bf16" if case.lora_dtype == "bfloat16" else "f16"
        la, lu = (
            formats.decode(bits.view(np.uint8), name)
            for bits in (result.lora_act, operands["lora_up"])
        )
        y, size = y + la @ lu.T, size + np.abs(la) @ np.abs(lu.T)
    if "bias" in operands:
        y, size = y + operands["bias"], size + np.abs(operands["bias"])
    return y, size


def check(
    case: Case, operands: dict[str, np.ndarray], result: Result, numerics: str = "exact"
) -> float:
    """Every cell of y and every scale factor; returns y's largest error in units of its bound.
    `numerics` is that of product.check: a tcgen05 product is exact up to fp32 in all.

    Raises:
      product.WrongCells: as product.check.
    """
    for name, scales in (("act_atoms", "act_scale"), ("weight_atoms", "weight_scale")):
        if scales not in operands:
            continue
        if (getattr(result, name) != scale_atoms(operands[scales], case.block)).any():
            raise product.WrongCells(f"{case}: {name} are wrong")
    y, size = expected(case, operands, result)
    return product.check_cells(str(case), y, size, result, case.exact, 2.0**-18, case.out_dtype)


def run_checked(
    case: Case,
    options: Options | None = None,
    operands: dict[str, np.ndarray] | None = None,
    **rest,
) -> Result:
    operands = operands or make_operands(case)
    result = run(case, options, operands=operands, **rest)
    check(case, operands, result)
    return result
