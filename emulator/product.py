"""The project's sm_90a kernels in the emulator: operands, launches by the host code, checks."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from emulator import formats, toolchain
from emulator.host import Host
from emulator.launch import Device, Options
from emulator.memory import Allocation
from jax_w4a4 import plan

SCALE_DTYPES = {"mxfp4": "float8_e8m0fnu", "nvfp4": "float8_e4m3fn", "int4": "float16"}
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu")  # by C++ code
FORMATS = ("nvfp4", "mxfp4", "int4")
RULES = ("rceil", "floor")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the operator.

    Attributes:
      precision: of the planner, which picks the path with it.
      block: of int4: K elements per scale, 0 for all of K.
      scale_dtype: of int4.
      clusters: clusters that the chip runs at once, so tiles per CTA.
      promote_k: of Mxfp4Promoted, instead of the plan's.
      fused: the quantizer from x, LoRA-down before it, instead of the repack of codes.
      exact: data whose sums are exact in fp32 in any order.
      far: every ninth block of mxfp4 has a scale that is nothing beside its row's others, some
        of them zero.
      sign_order: "sorted" gives the kernels a prepared weight of mxfp4; `make_operands` does not.
    """

    format: str = "mxfp4"
    m: int = 70
    n: int = 264
    k: int = 416
    rank: int = 0
    precision: str | None = None
    block: int = 0
    scale_dtype: str = ""
    x_dtype: str = "bfloat16"
    cluster: int = 1
    clusters: int = 2
    stages: int | None = None
    group_m: int | None = None
    affine: bool = True
    kernel: str = "sm90_v2"  # or sm90_decode; or sm90_v1, on packed activations
    tile_m: int = 64
    tile_n: int | None = None  # of sm90_decode
    fused: bool = False
    promote_k: int | None = None
    smooth: bool = True
    global_scale: bool = False
    act_unsigned: bool = False
    rule: str = "rceil"
    down_cluster: int | None = None
    down_ahead: int = 0  # CTAs of sm90_decode's launch for LoRA-down
    exact: bool = False
    far: bool = False
    seed: int = 0
    sign_order: str = "linear"

    @property
    def path(self) -> plan.budget.V2Path:
        path = plan.budget.v2_path(problem_of(self))
        assert path is not None, self
        return path

    @property
    def k_pad(self) -> int:
        unit = max(32, self.block)
        return -(-self.k // unit) * unit

    @property
    def blocks(self) -> int:
        """Scales per row."""
        fixed = {"mxfp4": 32, "nvfp4": 16}.get(self.format, self.block)
        return self.k_pad // fixed if fixed else 1

    @property
    def scales(self) -> str:
        return self.scale_dtype or SCALE_DTYPES[self.format]

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name not in ("format", "m", "n", "k", "rank")
            and getattr(self, f.name) != f.default
        ]
        shape = f"{self.format} {self.m}x{self.k}x{self.n} r{self.rank}"
        return " ".join([shape, *changed])


def problem_of(case: Case) -> plan.Problem:
    return plan.Problem(
        m=case.m,
        n=case.n,
        k_pad=case.k_pad,
        rank=case.rank,
        format=case.format,
        block_size=case.k_pad // case.blocks,
        x_dtype=case.x_dtype,
        out_dtype="bfloat16",
        lora_dtype="bfloat16",
        scale_dtype=case.scales,
        k=case.k,
        lora_smoothed=False,
        precision=case.precision,
        sign_order=case.sign_order,
    )


@functools.cache
def plan_of(case: Case) -> plan.Plan:
    problem = problem_of(case)
    if case.kernel == "sm90_v1":
        return plan.solve(problem, "sm_90", kernel="sm90_v1", tile_m=case.tile_m)
    forced = {"tile_m": case.tile_m, "cluster": case.cluster, "quantizer": 2 if case.fused else 1}
    if case.fused and case.kernel == "sm90_decode":
        forced["quantizer"] = 5
        forced["down_ahead"] = case.down_ahead
    if case.tile_n:
        forced["tile_n"] = case.tile_n
    if case.stages:
        forced["main_stages"] = case.stages
    if case.group_m:
        forced["group_m"] = case.group_m
    return plan.solve(problem, "sm_90", kernel=case.kernel, **forced)


def bf16(x: np.ndarray) -> np.ndarray:
    """Any floats to bf16 bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float16, bfloat16 or float32; bfloat16 as its bits."""
    return bf16(values) if dtype == "bfloat16" else np.asarray(values).astype(dtype)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    return from_bf16(bits) if dtype == "bfloat16" else bits


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
            values = rng.integers(126, 129 if case.exact else 134, shape, np.uint8)
            if case.far:
                values[rng.random(shape) < 1 / 9] = rng.choice([0, 1, 60])
            return values
        if case.format == "nvfp4":
            return rng.choice([0x38, 0x30, 0x40], shape).astype(np.uint8) if case.exact else (
                rng.integers(0x20, 0x50, shape, np.uint8)
            )  # fmt: skip
        values = rng.choice([0.5, 1, 2], shape) if case.exact else rng.uniform(0.01, 0.1, shape)
        return to_bits(values, case.scales)

    out["weight"], out["weight_scale"] = codes(case.n), scales(case.n)
    if case.fused:
        x = rng.standard_normal((case.m, case.k)) * np.exp2(rng.integers(-3, 4, (case.m, 1)))
        out["x"] = to_bits(x, case.x_dtype)
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


def stored(case: Case, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The operands as the kernels take them; prepared weights of every second seed with the range
    of each row's block scales."""
    if case.sign_order == "linear":
        return operands
    found = operands | {"weight": formats.sort_signs(operands["weight"])}
    if case.seed % 2 == 0:
        scales = operands["weight_scale"]
        found["scale_range"] = np.stack([scales.max(axis=-1), scales.min(axis=-1)], axis=-1)
    return found


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
        ("groups", ctypes.c_int64),
        ("bounds", ctypes.c_void_p),
        ("scale_range", ctypes.c_void_p),
    ]


class DownAhead(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("sums", "x", "lora_down")),
        *((name, ctypes.c_int) for name in ("k", "stages", "off_barriers", "early")),
    ]


class Tokens(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "smooth", "global_scale")),
        ("m", ctypes.c_int64),
        *((name, ctypes.c_int) for name in (
            "k", "k_pad", "chunks", "warps", "x_dtype", "rule", "is_unsigned", "beside",
        )),
    ]  # fmt: skip


@functools.cache
def host() -> Host:
    return Host(*toolchain.host_library("sm90"))


@contextlib.contextmanager
def seeded(
    sources: Sequence[str], edits: Sequence[toolchain.Edit], driver: Host | None = None
) -> Iterator[Host]:
    """The product's driver, sm_90's unless given, with kernels that have bugs, for a while."""
    driver = driver or host()
    saved = dict(driver.kernels)
    try:
        for source in sources:
            driver.load(toolchain.codes(toolchain.product_ptx(source, edits, driver.checked)))
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
    prepared: Result | None = None,
) -> Result:
    """Quantizer or repack, then the gemm as a dependent launch.

    Args:
      kernels: driver with other kernels than the product's.
      changes: to attributes of the plan, for seeded bugs of the account.
      prepared: the gemm alone, behind what the repack of the same operands left in this result.
    """
    driver = kernels or host()
    found = plan_of(case)
    values = stored(case, operands or make_operands(case))
    device = driver.device = Device(options)
    driver.set_clusters(case.clusters)  # as device number `clusters`, see entry_sm90.cc
    buffers = {name: device.array(value, name) for name, value in values.items()}
    attrs = found.ffi_attrs()
    for name, change in (changes or {}).items():
        attrs[name] = change(attrs[name])

    def address(name: str) -> int | None:
        return buffers[name].base if name in buffers else None

    if case.kernel == "sm90_v1":
        return _run_v1(case, found, driver, device, address)
    path = case.path
    shapes = {b.name: b.shape for b in found.workspace(case.m, "gemm")}
    sizes = {
        "act": int(np.prod(shapes["act"])),
        "token_scale": 4 * shapes["token_scale"][0],
        "rows": 16 * shapes["rows"][0],
        "y": case.m * case.n * 2,
    }
    made = {name: device.empty(size, name) for name, size in sizes.items()}
    # The ring copies whole tiles; what it reads past M is never used, and of activations neither.
    act = made["act"]
    assert act.initialized is not None
    act.initialized[case.m * shapes["act"][1] :] = True
    ring = made["token_scale"]
    assert ring.initialized is not None
    pitch = shapes["token_scale"][0] // (case.blocks if path.stage_groups else 1)
    for first in range(0, shapes["token_scale"][0], max(1, pitch)):
        ring.initialized[4 * (first + case.m) : 4 * (first + pitch)] = True
    decode = case.kernel == "sm90_decode"
    weight = WeightRows(
        address("weight_scale"),
        address("weight_global_scale"),
        address("act_global_scale"),
        address("channel_scale"),
        address("bias"),
        made["rows"].base,
        shapes["rows"][0],
        DTYPES.index(case.scales),
        scale_range=address("scale_range"),
    )
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    ahead = DownAhead()
    block = case.k_pad // case.blocks
    if prepared is not None:
        assert not case.fused, case
        tokens_of = np.zeros((shapes["token_scale"][0] // pitch if pitch else 0, pitch), np.float32)
        if tokens_of.size:
            tokens_of[:, : case.m] = prepared.token_scale.T
        for name, value in (
            ("act", prepared.act), ("token_scale", tokens_of), ("rows", prepared.rows)
        ):  # fmt: skip
            made[name].write_host(value)
    elif case.fused and decode:
        if case.rank:
            made["lora_act"] = device.empty(case.m * case.rank * 2, "lora_act")
        if case.down_ahead:
            rows = dict((b.name, b.shape) for b in found.workspace(case.m, "matmul"))["down_sums"]
            made["down_sums"] = device.empty(4 * int(np.prod(rows)), "down_sums")
            ahead = DownAhead(
                made["down_sums"].base, address("x"), address("lora_down"), case.k,
                attrs["down_stages"], attrs["off_down_barriers"], attrs["down_early"],
            )  # fmt: skip
        driver.call(
            "emulator_decode_quantize", path.code,
            ctypes.byref(tokens(case, attrs, address)), pointer(made["act"].base),
            pointer(made["token_scale"].base), DTYPES.index(case.scales),
            pointer(address("lora_down")),
            pointer(made["lora_act"].base if case.rank else None), case.rank,
            case.down_cluster or attrs["down_cluster"], pointer(ahead.sums),
        )  # fmt: skip
    elif case.fused:
        if case.rank:
            made["lora_act"] = _down(case, attrs, driver, device, address)
        driver.call(
            "emulator_quantize_v2",
            path.code,
            ctypes.byref(tokens(case, attrs, address)),
            pointer(made["act"].base),
            pointer(made["token_scale"].base),
            ctypes.byref(weight),
            block,
            found.tile_m,
            None,
            None,
        )
    else:
        driver.call(
            "emulator_repack_v2",
            path.code,
            pointer(address("packed")),
            pointer(address("act_scale")),
            pointer(made["act"].base),
            pointer(made["token_scale"].base),
            ctypes.byref(weight),
            long(case.m),
            case.k_pad,
            block,
            found.tile_m,
            int(case.act_unsigned),
        )
    lora_act = made["lora_act"].base if "lora_act" in made else address("lora_act")
    for name in ("act", "token_scale", "rows", "lora_act", "down_sums"):
        if name in made:
            made[name].pending = True
    if decode:
        weight.n = case.n
        order = (
            "off_act", "off_weight_scale", "off_aux", "off_act_scale", "off_store",
            "off_lora_act", "off_barriers", "stage_bytes", "smem_bytes",
        )  # fmt: skip
        driver.call(
            "emulator_decode", path.code, found.tile_m, found.tile_n, found.cluster,
            pointer(made["act"].base), pointer(made["token_scale"].base), ctypes.byref(weight),
            pointer(address("weight")),
            pointer(lora_act), pointer(address("lora_up")), pointer(made["y"].base), long(case.m),
            long(case.n), case.k_pad, case.rank, found.main_stages,
            (ctypes.c_int * 9)(*(attrs[name] for name in order)), 1, case.clusters,
            ctypes.byref(ahead),
        )  # fmt: skip
    else:
        order = (
            "off_weight", "off_lora_up", "off_store", "off_act_scale", "off_barriers",
            "stage_bytes", "smem_bytes",
        )  # fmt: skip
        driver.call(
            "emulator_gemm_v2", path.code, found.tile_m, found.cluster, pointer(made["act"].base),
            pointer(made["token_scale"].base), pointer(made["rows"].base),
            pointer(address("weight")), pointer(address("weight_scale")), pointer(lora_act),
            pointer(address("lora_up")), pointer(made["y"].base), long(case.m), long(case.n),
            case.k_pad, case.rank, found.main_stages, found.group_m,
            attrs["promote_k"] if case.promote_k is None else case.promote_k,
            block, DTYPES.index(case.scales),
            (ctypes.c_int * 7)(*(attrs[name] for name in order)), 1, case.clusters, long(0), None,
        )  # fmt: skip

    def bits(name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return made[name].data[:count].view(dtype).reshape(shape).copy()

    return Result(
        bits("y", "uint16", (case.m, case.n)),
        bits("act", "uint8", (case.m, shapes["act"][1])),
        _token_scales(bits("token_scale", "float32", shapes["token_scale"]), pitch, case.m),
        bits("rows", "uint32", shapes["rows"]),
        bits("lora_act", "uint16", (case.m, case.rank)) if "lora_act" in made else None,
        made["y"].writer[: case.m * case.n * 2].copy(),
        sum(launch.instructions for launch in device.launches),
        sum(launch.seconds for launch in device.launches),
        device.launches[-1].grid[0],
    )


def _token_scales(values: np.ndarray, pitch: int, m: int) -> np.ndarray:
    """(m, groups), or nothing."""
    return values.reshape(-1, pitch)[:, :m].T.copy() if values.size else values


def tokens(case: Case, attrs: Mapping[str, int], address: Callable) -> Tokens:
    return Tokens(
        address("x"), address("smooth"), address("act_global_scale"), case.m, case.k, case.k_pad,
        attrs["q_lane_chunks"], attrs["q_warps"], DTYPES.index(case.x_dtype),
        RULES.index(case.rule), int(case.act_unsigned), int(case.rank > 0),
    )  # fmt: skip


def _down(
    case: Case, attrs: Mapping[str, int], driver: Host, device: Device, address: Callable
) -> Allocation:
    """LoRA-down, the launch before a quantizer."""
    made = device.empty(case.m * case.rank * 2, "lora_act")
    cluster = case.down_cluster or attrs["down_cluster"]
    pointer = ctypes.c_void_p
    driver.call(
        "emulator_down_v2", pointer(address("x")), pointer(address("lora_down")),
        pointer(made.base), ctypes.c_int64(case.m), case.k, case.rank, cluster,
        attrs["down_stages"], attrs["off_down_barriers"], attrs["down_smem_bytes"],
        case.clusters, 0, None,
    )  # fmt: skip
    return made


def quantize_public(
    case: Case, options: Options | None = None, operands: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and bits of the scales of the public layout's quantizer."""
    driver = host()
    problem = problem_of(case)
    shape = plan.budget.token_quantizer(problem, 3)
    assert shape is not None, case
    device = driver.device = Device(options)
    values = operands or make_operands(case)
    buffers = {name: device.array(value, name) for name, value in values.items()}
    item = plan.budget.ITEMSIZE[case.scales]
    packed = device.empty(case.m * case.k_pad // 2, "packed")
    scales = device.empty(case.m * case.blocks * item, "scales")
    attrs = {"q_lane_chunks": shape.lane_chunks, "q_warps": shape.warps}

    def address(name: str) -> int | None:
        return buffers[name].base if name in buffers else None

    driver.call(
        "emulator_quantize_public", FORMATS.index(case.format),
        ctypes.byref(tokens(dataclasses.replace(case, rank=0), attrs, address)),
        ctypes.c_void_p(packed.base), ctypes.c_void_p(scales.base), problem.block_size,
        DTYPES.index(case.scales),
    )  # fmt: skip
    assert packed.initialized[: packed.size].all() and scales.initialized[: scales.size].all()
    return (
        packed.data[: packed.size].reshape(case.m, -1).copy(),
        scales.data[: scales.size].view(f"uint{8 * item}").reshape(case.m, -1).copy(),
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
        DTYPES.index(case.scales), int(case.act_unsigned),
        (ctypes.c_int * 12)(*smem),
    )  # fmt: skip
    format_code = FORMATS.index(case.format)
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
        s = from_bits(scales, case.scales).astype(np.float64)
    else:
        values = formats.table("e2m1")[codes]
        s = formats.table("ue8m0" if case.format == "mxfp4" else "ue4m3")[scales]
        if case.format == "mxfp4":
            s = np.where(scales == 0, 0.0, s)
    return values * np.repeat(s, codes.shape[1] // s.shape[1], axis=1)


def private_activation(case: Case, act: np.ndarray, token_scale: np.ndarray) -> np.ndarray:
    """The values that the gemm's own activation layout stands for, (m, k_pad)."""
    path = case.path
    p = np.arange(path.tile_k)
    if path.act_bytes == 2:
        s, h, q, j = p // 16, p // 8 % 2, p // 2 % 4, p % 2
        logical = 16 * q + 8 * (s // 2) + 2 * (s % 2) + h + 4 * j
    else:
        s, h, q, j = p // 32, p // 16 % 2, p // 4 % 4, p % 4
        logical = 32 * q + 8 * s + 4 * h + j
        if path.stage_groups:
            logical = 64 * (s // 2) + 16 * q + 8 * (s % 2) + 4 * h + j
    stages = formats.decode(act, path.operand).reshape(case.m, -1, len(p))
    out = np.empty_like(stages)
    out[:, :, logical] = stages
    out = out.reshape(case.m, -1)
    assert not out[:, case.k_pad :].any(), "padding is not zero"
    out = out[:, : case.k_pad]
    if not token_scale.size:
        return out
    return out * np.repeat(token_scale.astype(np.float64), case.k_pad // token_scale.shape[1], 1)


def _rounded(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """nvfp4 rounded to e4m3 under a power of two per row: 6 times its largest scale still fits."""
    largest = formats.table("ue4m3")[scales].max(axis=1)
    power = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 56) / 56)))[:, None]
    return formats.table("e4m3")[formats.encode_fp8(values / power, "e4m3")] * power


def _scaled(case: Case, packed: np.ndarray, scales: np.ndarray, unsigned: bool) -> np.ndarray:
    """int4 rounded to fp16 under a power of two per row: its largest scale is 2048 or more."""
    s = from_bits(scales, case.scales).astype(np.float64)
    power = np.exp2(np.frexp(np.abs(s).max(axis=1))[1] - 12.0)[:, None]
    codes = _public(case, packed, to_bits(np.ones_like(s), case.scales), unsigned)
    small = (s / power).astype(np.float16).astype(np.float64)
    values = codes * np.repeat(small, codes.shape[1] // s.shape[1], axis=1)
    return values.astype(np.float16).astype(np.float64) * power


def expected(case: Case, operands: dict[str, np.ndarray], result: Result):
    """y in float64, and what the magnitudes of its terms sum to."""
    if case.fused:
        x = private_activation(case, result.act, result.token_scale)
        lora_act = result.lora_act
    else:
        x = _public(case, operands["packed"], operands["act_scale"], case.act_unsigned)
        lora_act = operands.get("lora_act")
    w = _public(case, operands["weight"], operands["weight_scale"], False)
    if case.path.operand == "e4m3" and case.format == "nvfp4":
        w = _rounded(w, operands["weight_scale"])
        x = x if case.fused else _rounded(x, operands["act_scale"])
    elif case.path.name == "Int4Scaled":
        w = _scaled(case, operands["weight"], operands["weight_scale"], False)
        if not case.fused:
            x = _scaled(case, operands["packed"], operands["act_scale"], case.act_unsigned)
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
    """Every cell of y against float64, and of LoRA-down where it was done; returns the largest
    error of y in units of its bound.

    Raises:
      WrongCells: a cell is off by more than the rounding to bf16 and fp32 sums allow, or with
        exact data by anything.
    """
    y, size = expected(case, operands, result)
    exact = case.exact and numerics == "exact"
    if case.fused and case.rank:
        check_down(case, operands, result, _SUM_LOSS[numerics])
    return check_cells(str(case), y, size, result, exact, _SUM_LOSS[numerics])


def check_down(case: Case, operands: dict[str, np.ndarray], result: Result, loss: float) -> None:
    """The product of x with lora_down, of which y is made."""
    assert result.lora_act is not None, case
    x = from_bits(operands["x"], case.x_dtype).astype(np.float64)
    down = from_bf16(operands["lora_down"]).astype(np.float64)
    want, size = x @ down, np.abs(x) @ np.abs(down)
    error = np.abs(from_bf16(result.lora_act) - want)
    bad = ~(error <= np.abs(want) * 2.0**-8 + size * loss + 1e-30)
    if bad.any():
        token, rank = (int(v[0]) for v in np.nonzero(bad))
        raise WrongCells(f"{case}: {np.count_nonzero(bad)} of lora_act, first [{token}, {rank}]")


def check_cells(
    name: str, y: np.ndarray, size: np.ndarray, result: Any, exact: bool, loss: float,
    dtype: str = "bfloat16",
) -> float:  # fmt: skip
    """The bits of result.y, and that all were written; see check."""
    got = from_bits(result.y, dtype).astype(np.float64)
    missing = np.count_nonzero(result.written == 0)
    if missing:
        raise WrongCells(f"{name}: {missing} bytes unwritten")
    if exact:
        bad = result.y != to_bits(y.astype(np.float32), dtype).view(result.y.dtype)
        worst = 0.0
    else:
        bound = np.abs(y) * 2.0**-8 + size * loss + 1e-30
        error = np.abs(got - y) / bound
        worst = float(error.max())
        bad = ~(error <= 1)
    if bad.any():
        row, column = (int(v[0]) for v in np.nonzero(bad))
        raise WrongCells(
            f"{name}: {np.count_nonzero(bad)} of {bad.size} cells are wrong, first [{row}, "
            f"{column}]: {got[row, column]} instead of {y[row, column]}"
        )
    return worst
