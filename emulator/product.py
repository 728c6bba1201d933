"""The project's sm_90a kernels in the emulator: operands, launches by the host code, checks."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from emulator import formats, toolchain
from emulator.host import Host
from emulator.launch import Device, Options
from emulator.memory import Allocation
from jax_w4a4 import plan

PATHS = {"mxfp4": "Mxfp4", "nvfp4": "Nvfp4", "int4": "Int4Row"}
BLOCKS = {"mxfp4": 32, "nvfp4": 16}
SCALE_DTYPES = {"mxfp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn", "int4": "float16"}
_DTYPE_CODES = {"float16": 1, "float8_e4m3fn": 3, "float8_e8m0fnu": 4}
INSTANCES = tuple((path, 64) for path in PATHS.values())
KERNEL_SOURCES = (
    *(toolchain.gemm_v2_name(path, tile) for path, tile in INSTANCES),
    "sm90_gemm_v1.cu",
    "sm90_quantize_v2.cu",
    "sm90_repack_v2.cu",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the operator.

    Attributes:
      clusters: clusters that the chip runs at once, so tiles per CTA.
      exact: data whose sums are exact in fp32 in any order.
    """

    format: str = "mxfp4"
    m: int = 70
    n: int = 264
    k: int = 416
    rank: int = 0
    cluster: int = 1
    clusters: int = 2
    stages: int | None = None
    group_m: int | None = None
    affine: bool = True
    kernel: str = "sm90_v2"  # or sm90_v1, on packed activations
    tile_m: int = 64
    fused: bool = False  # the mxfp4 quantizer from x, instead of the repack of codes
    smooth: bool = True
    global_scale: bool = False
    act_unsigned: bool = False
    rule: str = "rceil"
    quantizer_cluster: int | None = None
    exact: bool = False
    seed: int = 0

    @property
    def path(self) -> str:
        return PATHS[self.format]

    @property
    def k_pad(self) -> int:
        return -(-self.k // 32) * 32

    @property
    def blocks(self) -> int:
        return 1 if self.format == "int4" else self.k_pad // BLOCKS[self.format]

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name not in ("format", "m", "n", "k", "rank")
            and getattr(self, f.name) != f.default
        ]
        shape = f"{self.format} {self.m}x{self.k}x{self.n} r{self.rank}"
        return " ".join([shape, *changed])


@functools.cache
def plan_of(case: Case) -> plan.Plan:
    problem = plan.Problem(
        m=case.m,
        n=case.n,
        k_pad=case.k_pad,
        rank=case.rank,
        format=case.format,
        block_size=case.k_pad // case.blocks,
        x_dtype="bfloat16",
        out_dtype="bfloat16",
        lora_dtype="bfloat16",
        scale_dtype=SCALE_DTYPES[case.format],
        k=case.k,
        lora_smoothed=False,
    )
    if case.kernel == "sm90_v1":
        return plan.solve(problem, "sm_90", kernel="sm90_v1", tile_m=case.tile_m)
    forced = {"tile_m": case.tile_m, "cluster": case.cluster, "quantizer": 2 if case.fused else 1}
    if case.stages:
        forced["main_stages"] = case.stages
    if case.group_m:
        forced["group_m"] = case.group_m
    return plan.solve(problem, "sm_90", kernel="sm90_v2", **forced)


def bf16(x: np.ndarray) -> np.ndarray:
    """Any floats to bf16 bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make_operands(case: Case) -> dict[str, np.ndarray]:
    """Random operands as arrays of bits; absent ones are missing."""
    rng = np.random.default_rng(case.seed)
    out: dict[str, np.ndarray] = {}

    def codes(rows: int) -> np.ndarray:
        c = rng.integers(0, 16, (rows, case.k_pad), np.uint8)
        c[:, case.k :] = 0
        return (c[:, 0::2] | c[:, 1::2] << 4).astype(np.uint8)

    def scales(rows: int) -> np.ndarray:
        shape = (rows, case.blocks)
        if case.format == "mxfp4":
            return rng.integers(126, 129 if case.exact else 134, shape, np.uint8)
        if case.format == "nvfp4":
            return rng.choice([0x38, 0x30, 0x40], shape).astype(np.uint8) if case.exact else (
                rng.integers(0x20, 0x50, shape, np.uint8)
            )  # fmt: skip
        if case.exact:
            return rng.choice([0.5, 1, 2], shape).astype(np.float16)
        return rng.uniform(0.01, 0.1, shape).astype(np.float16)

    out["weight"], out["weight_scale"] = codes(case.n), scales(case.n)
    if case.fused:
        x = rng.standard_normal((case.m, case.k)) * np.exp2(rng.integers(-3, 4, (case.m, 1)))
        out["x"] = bf16(x)
        if case.rank:
            out["lora_down"] = bf16(rng.standard_normal((case.k, case.rank)) / np.sqrt(case.k))
        if case.smooth:
            out["smooth"] = rng.uniform(0.5, 2, case.k).astype(np.float32)
    else:
        out["packed"], out["act_scale"] = codes(case.m), scales(case.m)
        if case.rank:
            out["lora_act"] = bf16(_grid(rng, (case.m, case.rank), case.exact))
    if case.rank:
        out["lora_up"] = bf16(_grid(rng, (case.n, case.rank), case.exact))
    if case.affine:
        if case.exact:
            out["channel_scale"] = rng.choice([-1, 0.5, 2], case.n).astype(np.float32)
            out["bias"] = rng.integers(-8, 9, case.n).astype(np.float32)
        else:
            out["channel_scale"] = rng.uniform(-1.5, 1.5, case.n).astype(np.float32)
            out["bias"] = rng.standard_normal(case.n).astype(np.float32)
    if case.global_scale:
        out["weight_global_scale"] = np.array([0.5 if case.exact else 0.37], np.float32)
        out["act_global_scale"] = np.array([2 if case.exact else 1.9], np.float32)
    return out


def _grid(rng: np.random.Generator, shape: tuple[int, int], exact: bool) -> np.ndarray:
    return rng.integers(-2, 3, shape) if exact else 0.3 * rng.standard_normal(shape)


class WeightRows(ctypes.Structure):
    _fields_ = [
        ("weight_scale", ctypes.c_void_p),
        ("weight_global_scale", ctypes.c_void_p),
        ("act_global_scale", ctypes.c_void_p),
        ("channel_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("scale_dtype", ctypes.c_int),
    ]


@functools.cache
def host() -> Host:
    return Host(toolchain.host_library(INSTANCES))


def load_kernels(
    target: Host,
    sources: Sequence[str] = KERNEL_SOURCES,
    edits: Sequence[toolchain.Edit] = (),
) -> None:
    """Loads the kernels of these sources, with the edits of toolchain.ptx_of if any."""
    for source in sources:
        target.load(toolchain.codes(toolchain.product_ptx(source, edits)))


@contextlib.contextmanager
def seeded(sources: Sequence[str], edits: Sequence[toolchain.Edit]) -> Iterator[Host]:
    """The product's driver with kernels that have bugs, for a while."""
    driver = host()
    if not driver.kernels:
        load_kernels(driver)
    saved = dict(driver.kernels)
    try:
        load_kernels(driver, sources, edits)
        yield driver
    finally:
        driver.kernels = saved


@dataclasses.dataclass
class Result:
    """Bits that the kernels wrote."""

    y: np.ndarray
    act: np.ndarray
    token_scale: np.ndarray
    rows: np.ndarray
    lora_act: np.ndarray | None
    written: np.ndarray  # per byte of y: the CTA that wrote it, or 0
    instructions: int
    seconds: float
    grid: int = 0  # CTAs of the gemm


def run(
    case: Case,
    options: Options | None = None,
    *,
    kernels: Host | None = None,
    operands: dict[str, np.ndarray] | None = None,
    changes: Mapping[str, Callable[[int], int]] | None = None,
) -> Result:
    """Quantizer or repack, then the gemm as a dependent launch.

    Args:
      kernels: driver with other kernels than the product's.
      changes: to attributes of the plan, for seeded bugs of the account.
    """
    driver = kernels or host()
    if not driver.kernels:
        load_kernels(driver)
    found = plan_of(case)
    values = operands or make_operands(case)
    device = driver.device = Device(options)
    driver.set_clusters(case.clusters)  # as device number `clusters`, see entry.cc
    buffers = {name: device.array(value, name) for name, value in values.items()}
    attrs = found.ffi_attrs()
    for name, change in (changes or {}).items():
        attrs[name] = change(attrs[name])

    def address(name: str) -> int | None:
        return buffers[name].base if name in buffers else None

    if case.kernel == "sm90_v1":
        return _run_v1(case, found, driver, device, address)
    act_bytes = plan.budget.row_bytes(found.problem)
    token_rows = 0 if case.format == "nvfp4" else case.m + found.tile_m
    made: dict[str, Allocation] = {
        "act": device.empty(case.m * act_bytes, "act"),
        "token_scale": device.empty(max(1, token_rows) * 4, "token_scale"),
        "rows": device.empty(case.n * 16, "rows"),
        "y": device.empty(case.m * case.n * 2, "y"),
    }
    # The ring copies whole tiles; what it reads past M is never used.
    initialized = made["token_scale"].initialized
    assert initialized is not None
    initialized[4 * case.m :] = True
    weight = WeightRows(
        address("weight_scale"),
        address("weight_global_scale"),
        address("act_global_scale"),
        address("channel_scale"),
        address("bias"),
        made["rows"].base,
        case.n,
        _DTYPE_CODES[SCALE_DTYPES[case.format]],
    )
    path = {"Mxfp4": 1, "Nvfp4": 2, "Int4Row": 3}[case.path]
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    if case.fused:
        if case.rank:
            made["lora_act"] = device.empty(case.m * case.rank * 2, "lora_act")
        driver.call(
            "emulator_quantize_v2",
            pointer(address("x")),
            pointer(address("smooth")),
            pointer(address("act_global_scale")),
            pointer(address("lora_down")),
            pointer(made["act"].base),
            pointer(made["token_scale"].base),
            pointer(made["lora_act"].base if case.rank else None),
            ctypes.byref(weight),
            long(case.m),
            case.k,
            case.k_pad,
            case.rank,
            {"rceil": 0, "floor": 1}[case.rule],
            case.quantizer_cluster or attrs["q_cluster"],
            attrs["q_stages"],
            case.clusters,
        )
    else:
        driver.call(
            "emulator_repack_v2",
            path,
            pointer(address("packed")),
            pointer(address("act_scale")),
            pointer(made["act"].base),
            pointer(made["token_scale"].base),
            ctypes.byref(weight),
            long(case.m),
            case.k_pad,
            int(case.act_unsigned),
        )
    lora_act = made["lora_act"].base if "lora_act" in made else address("lora_act")
    smem = (ctypes.c_int * 7)(
        *(
            attrs[name]
            for name in (
                "off_weight",
                "off_lora_up",
                "off_store",
                "off_act_scale",
                "off_barriers",
                "stage_bytes",
                "smem_bytes",
            )
        )
    )
    for name in ("act", "token_scale", "rows", "lora_act"):
        if name in made:
            made[name].pending = True
    driver.call(
        "emulator_gemm_v2",
        path,
        found.tile_m,
        found.cluster,
        pointer(made["act"].base),
        pointer(made["token_scale"].base),
        pointer(made["rows"].base),
        pointer(address("weight")),
        pointer(address("weight_scale")),
        pointer(lora_act),
        pointer(address("lora_up")),
        pointer(made["y"].base),
        long(case.m),
        long(case.n),
        case.k_pad,
        case.rank,
        found.main_stages,
        found.group_m,
        smem,
        1,
        case.clusters,
    )

    def bits(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return made[name].data[:count].view(dtype).reshape(shape).copy()

    return Result(
        bits("y", "uint16", (case.m, case.n)),
        bits("act", "uint8", (case.m, act_bytes)),
        bits("token_scale", "float32", (case.m,)) if token_rows else np.zeros(0, np.float32),
        bits("rows", "uint32", (case.n, 4)),
        bits("lora_act", "uint16", (case.m, case.rank)) if "lora_act" in made else None,
        made["y"].writer[: case.m * case.n * 2].copy(),
        sum(launch.instructions for launch in device.launches),
        sum(launch.seconds for launch in device.launches),
        device.launches[-1].grid[0],
    )


class GemmV1Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "act", "act_scale", "act_global_scale", "lora_act", "weight", "weight_scale",
            "weight_global_scale", "lora_up", "channel_scale", "bias", "out",
        )),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("k_pad", "block", "rank", "scale_dtype", "unsigned")),
        ("smem", ctypes.c_int * 12),
    ]  # fmt: skip


def _run_v1(
    case: Case,
    found: plan.Plan,
    driver: Host,
    device: Device,
    address: Callable[[str], int | None],
) -> Result:
    """The gemm alone, on packed activations."""
    y = device.empty(case.m * case.n * 2, "y")
    attrs = found.ffi_attrs()
    regions = ("weight", "act", "weight_scale", "act_scale", "lora_up", "lora_act", "aux")
    smem = [attrs[f"off_{name}"] for name in regions]
    smem += [attrs[f"bytes_{name}"] for name in regions[:4]] + [attrs["smem_bytes"]]
    call = GemmV1Call(
        address("packed"), address("act_scale"), address("act_global_scale"), address("lora_act"),
        address("weight"), address("weight_scale"), address("weight_global_scale"),
        address("lora_up"), address("channel_scale"), address("bias"), y.base, case.m, case.n,
        case.k_pad, case.k_pad // case.blocks, case.rank,
        _DTYPE_CODES[SCALE_DTYPES[case.format]], int(case.act_unsigned),
        (ctypes.c_int * 12)(*smem),
    )  # fmt: skip
    format_code = ("nvfp4", "mxfp4", "int4").index(case.format)
    driver.call("emulator_gemm_v1", format_code, found.tile_m, ctypes.byref(call))
    size = case.m * case.n * 2
    none = np.zeros(0, np.uint8)
    (launch,) = device.launches
    return Result(
        y.data[:size].view(np.uint16).reshape(case.m, case.n).copy(),
        none, none, none, None, y.writer[:size].copy(), launch.instructions, launch.seconds,
    )  # fmt: skip


# ---- float64 reference ----


def _public(case: Case, packed: np.ndarray, scales: np.ndarray, unsigned: bool) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    if case.format == "int4":
        values = codes.astype(np.float64)
        if not unsigned:
            values = np.where(codes > 7, values - 16, values)
        s = scales.astype(np.float64)
    else:
        values = formats.table("e2m1")[codes]
        s = formats.table("ue8m0" if case.format == "mxfp4" else "ue4m3")[scales]
        if case.format == "mxfp4":
            s = np.where(scales == 0, 0.0, s)
    return values * np.repeat(s, codes.shape[1] // s.shape[1], axis=1)


def private_activation(case: Case, act: np.ndarray, token_scale: np.ndarray) -> np.ndarray:
    """The values that the gemm's own activation layout stands for, (m, k_pad)."""
    if case.format == "nvfp4":
        p = np.arange(64)
        s, h, q, j = p // 16, p // 8 % 2, p // 2 % 4, p % 2
        logical = 16 * q + 8 * (s // 2) + 2 * (s % 2) + h + 4 * j
        values = formats.decode(act, "bf16")
    else:
        p = np.arange(128)
        s, h, q, j = p // 32, p // 16 % 2, p // 4 % 4, p % 4
        logical = 32 * q + 8 * s + 4 * h + j
        values = formats.decode(act, "e5m2" if case.format == "mxfp4" else "s8")
        values = values * token_scale.astype(np.float64)[:, None]
    stages = values.reshape(case.m, -1, len(p))
    out = np.empty_like(stages)
    out[:, :, logical] = stages
    return out.reshape(case.m, -1)[:, : case.k_pad]


def expected(case: Case, operands: dict[str, np.ndarray], result: Result):
    """y in float64, and what the magnitudes of its terms sum to."""
    if case.fused:
        x = private_activation(case, result.act, result.token_scale)
        lora_act = result.lora_act
    else:
        x = _public(case, operands["packed"], operands["act_scale"], case.act_unsigned)
        lora_act = operands.get("lora_act")
    w = _public(case, operands["weight"], operands["weight_scale"], False)
    factor = np.ones(case.n)
    for name in ("weight_global_scale", "act_global_scale", "channel_scale"):
        if name in operands:
            factor = factor * operands[name].astype(np.float64)
    y, size = x @ w.T * factor, np.abs(x) @ np.abs(w.T) * np.abs(factor)
    if case.rank:
        la, lu = from_bf16(lora_act).astype(float), from_bf16(operands["lora_up"]).astype(float)
        y, size = y + la @ lu.T, size + np.abs(la) @ np.abs(lu.T)
    if "bias" in operands:
        y, size = y + operands["bias"], size + np.abs(operands["bias"])
    return y, size


class WrongCells(AssertionError):
    """Cells of the result are wrong or were never written."""


# What the sum of a cell may lose, as a part of the sum of its terms' magnitudes: fp32 sums in any
# order, or the bits that Hopper's tensor core drops below the largest term of a step.
_SUM_LOSS = {"exact": 2.0**-18, "hopper": 2.0**-11}


def check(
    case: Case, operands: dict[str, np.ndarray], result: Result, numerics: str = "exact"
) -> float:
    """Every cell of y against float64; returns the largest error in units of its bound.

    Raises:
      WrongCells: a cell is off by more than the rounding to bf16 and fp32 sums allow, or with
        exact data by anything.
    """
    y, size = expected(case, operands, result)
    got = from_bf16(result.y).astype(np.float64)
    missing = np.count_nonzero(result.written == 0)
    if missing:
        raise WrongCells(f"{case}: {missing} bytes unwritten")
    if case.exact and numerics == "exact":
        bad = result.y != bf16(y.astype(np.float32))
        worst = 0.0
    else:
        bound = np.abs(y) * 2.0**-8 + size * _SUM_LOSS[numerics] + 1e-30
        error = np.abs(got - y) / bound
        worst = float(error.max())
        bad = ~(error <= 1)
    if bad.any():
        row, column = (int(v[0]) for v in np.nonzero(bad))
        raise WrongCells(
            f"{case}: {np.count_nonzero(bad)} of {bad.size} cells are wrong, first [{row}, "
            f"{column}]: {got[row, column]} instead of {y[row, column]}"
        )
    return worst
