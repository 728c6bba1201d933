"""The grouped kernel in the emulator: each group's rows against float64 of its operands."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping

import numpy as np

from emulator import product
from emulator.host import Host
from emulator.launch import Device, Options
from emulator.product import DTYPES, Case, Result
from jax_w4a4 import plan


@dataclasses.dataclass(frozen=True)
class GroupedCase:
    """A grouped call.

    Attributes:
      case: what is common to the groups: its m counts all rows. clusters is the number of SMs.
      bounds: rows at which groups begin and end, groups + 1 of them.
    """

    case: Case
    bounds: tuple[int, ...]

    @property
    def groups(self) -> int:
        return len(self.bounds) - 1

    def __str__(self) -> str:
        return f"{self.case} bounds={','.join(map(str, self.bounds))}"

    def group(self, g: int) -> Case:
        """One group as a call of its own."""
        rows = self.bounds[g + 1] - self.bounds[g]
        return dataclasses.replace(self.case, m=rows, fused=True, seed=self.case.seed + 100 * g)


def plan_of(grouped: GroupedCase) -> plan.Plan:
    case = grouped.case
    problem = dataclasses.replace(
        product.problem_of(case), groups=grouped.groups, lora_smoothed=False
    )
    forced = {"tile_m": case.tile_m}
    if case.stages:
        forced["main_stages"] = case.stages
    if case.group_m:
        forced["group_m"] = case.group_m
    return plan.solve(problem, "sm_90", **forced)


def make_operands(grouped: GroupedCase) -> list[dict[str, np.ndarray]]:
    """Of each group; their x is theirs alone."""
    return [product.make_operands(grouped.group(g)) for g in range(grouped.groups)]


def run(
    grouped: GroupedCase,
    options: Options | None = None,
    *,
    kernels: Host | None = None,
    operands: list[dict[str, np.ndarray]] | None = None,
) -> list[Result]:
    """The launches of the grouped handler; one result per group.

    Raises:
      WrongCells: a row of no group is not zero.
    """
    case, groups = grouped.case, grouped.groups
    driver = kernels or product.host()
    found = plan_of(grouped)
    attrs = found.ffi_attrs()
    each = [product.stored(case, values) for values in operands or make_operands(grouped)]
    device = driver.device = Device(options)
    driver.set_clusters(case.clusters)
    buffers = {
        name: device.array(np.stack([values[name] for values in each]), name)
        for name in each[0]
        if name != "x"
    }
    x = np.full((case.m, case.k), 0x7FC0, np.uint16)  # NaN in rows of no group
    assert case.x_dtype == "bfloat16", case
    for g, values in enumerate(each):
        x[grouped.bounds[g] : grouped.bounds[g + 1]] = values["x"]
    buffers["x"] = device.array(x, "x")
    bounds = device.array(np.array(grouped.bounds, np.int32), "bounds")

    def address(name: str) -> int | None:
        return buffers[name].base if name in buffers else None

    shapes = {b.name: b for b in found.workspace(case.m, "grouped")}
    made = {
        name: device.empty(int(np.prod(b.shape)) * np.dtype(_BITS[b.dtype]).itemsize, name)
        for name, b in shapes.items()
    }
    made["y"] = device.empty(case.m * case.n * 2, "y")
    # Whole tiles are copied and loaded: what belongs to no group, or lies past M, is never used.
    for name, width in (("act", shapes["act"].shape[1]), ("token_scale", 4), ("lora_act", None)):
        initialized = made[name].initialized
        assert initialized is not None
        width = 2 * case.rank if width is None else width
        unused = np.ones(initialized.size // width if width else 0, bool)
        unused[grouped.bounds[0] : grouped.bounds[-1]] = False
        initialized[: unused.size * width] |= np.repeat(unused, width)
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    weight = product.WeightRows(
        address("weight_scale"), address("weight_global_scale"), address("act_global_scale"),
        address("channel_scale"), address("bias"), made["rows"].base, groups * case.n,
        DTYPES.index(case.scales), groups, bounds.base, address("scale_range"),
    )  # fmt: skip
    if case.rank:
        driver.call(
            "emulator_down_v2", pointer(address("x")), pointer(address("lora_down")),
            pointer(made["lora_act"].base), long(case.m), case.k, case.rank,
            case.down_cluster or attrs["down_cluster"], attrs["down_stages"],
            attrs["off_down_barriers"], attrs["down_smem_bytes"], case.clusters, groups,
            pointer(bounds.base),
        )  # fmt: skip
    driver.call(
        "emulator_quantize_v2", case.path.code,
        ctypes.byref(product.tokens(case, attrs, address)), pointer(made["act"].base),
        pointer(made["token_scale"].base), ctypes.byref(weight), case.k_pad // case.blocks,
        found.tile_m,
        pointer(made["table"].base), pointer(made["y"].base),
    )  # fmt: skip
    smem = (ctypes.c_int * 7)(*(attrs[name] for name in (
        "off_weight", "off_lora_up", "off_store", "off_act_scale", "off_barriers", "stage_bytes",
        "smem_bytes",
    )))  # fmt: skip
    for name in ("act", "token_scale", "rows", "lora_act", "table"):
        made[name].pending = True
    driver.call(
        "emulator_gemm_v2", case.path.code, found.tile_m, 1, pointer(made["act"].base),
        pointer(made["token_scale"].base), pointer(made["rows"].base), pointer(address("weight")),
        pointer(address("weight_scale")), pointer(made["lora_act"].base),
        pointer(address("lora_up")), pointer(made["y"].base), long(case.m), long(case.n),
        case.k_pad, case.rank, found.main_stages, found.group_m, 0, case.k_pad // case.blocks,
        DTYPES.index(case.scales),
        smem, 1, case.clusters, long(groups), pointer(made["table"].base),
    )  # fmt: skip
    return _results(grouped, device, shapes, made)


_BITS = {"bfloat16": "uint16", "uint8": "uint8", "float32": "float32", "int32": "int32"}


def _results(grouped: GroupedCase, device: Device, shapes: Mapping, made: Mapping) -> list[Result]:
    case = grouped.case

    def bits(name: str) -> np.ndarray:
        shape, dtype = shapes[name].shape, _BITS[shapes[name].dtype]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return made[name].data[:size].view(dtype).reshape(shape).copy()

    y = made["y"].data[: 2 * case.m * case.n].view(np.uint16).reshape(case.m, case.n)
    written = made["y"].writer[: 2 * case.m * case.n].reshape(case.m, -1)
    outside = np.ones(case.m, bool)
    outside[grouped.bounds[0] : grouped.bounds[-1]] = False
    initialized = made["y"].initialized[: written.size].reshape(written.shape)
    if y[outside].any() or not initialized[outside].all():
        raise product.WrongCells(f"{grouped}: rows of no group are not zeros")
    act, tokens, lora_act = bits("act"), bits("token_scale"), bits("lora_act")
    rows = bits("rows").reshape(grouped.groups, case.n, 4)
    results = []
    for g in range(grouped.groups):
        part = slice(grouped.bounds[g], grouped.bounds[g + 1])
        token = tokens[part, None] if tokens.size else tokens
        results.append(
            Result(
                y[part].copy(), act[part], token, rows[g].view(np.uint32),
                lora_act[part] if case.rank else None, written[part].ravel().copy(),
                sum(launch.instructions for launch in device.launches),
                sum(launch.seconds for launch in device.launches), device.launches[-1].grid[0],
            )
        )  # fmt: skip
    return results


def check(
    grouped: GroupedCase, operands: list[dict[str, np.ndarray]], results: list[Result]
) -> None:
    """Every cell of every group against float64, as `product.check`."""
    for g, (values, result) in enumerate(zip(operands, results, strict=True)):
        if result.y.size:
            product.check(grouped.group(g), values, result)
