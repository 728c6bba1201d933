"""The shared-memory account: every byte formula of the project, one function per kernel design.

A design's function takes the problem, the target and a :class:`Config` and returns one
:class:`Row` per resident object. Everything else (how many stages fit, where each region
starts, what the launch asks for) is derived from the rows here; no other module multiplies
tile sizes.

Units: bytes per CTA, unless a name says columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax_w4a4.plan.targets import Target

__all__ = [
    "DESIGNS",
    "ITEMSIZE",
    "QUANTIZER_SHAPES",
    "Buffer",
    "Config",
    "Design",
    "DownPlan",
    "Problem",
    "QuantizerPlan",
    "Region",
    "Row",
    "Traffic",
    "V2_PATHS",
    "V2Path",
    "gemm_traffic",
    "grouped_row_tiles",
    "layout",
    "DECODE_MOST_TOKENS",
    "DECODE_PATHS",
    "DECODE_TOKENS",
    "decode_alone",
    "decode_cta_bytes",
    "decode_quantizer",
    "decode_shape",
    "decode_steps",
    "down_sm100",
    "down_v2",
    "lora_steps",
    "output_tile_bytes",
    "quantizer_traffic",
    "quantizer_v1",
    "row_bytes",
    "sm90_v1",
    "sm90_v2",
    "sm90_decode",
    "sm100_v2",
    "step_flops",
    "svdquant_v2",
    "tmem_columns",
    "token_quantizer",
    "v2_path",
    "weight_stage_bytes",
    "workspace",
]

FORMATS = ("nvfp4", "mxfp4", "int4")
PRECISIONS = (None, "fastest", "highest")
SIGN_ORDERS = ("linear", "sorted")

ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {
        "float8_e4m3fn": 1,
        "float8_e8m0fnu": 1,
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "float64": 8,
    }
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of the operator, as the planner sees it.

    ``y[m, n] = x[m, k] w[n, k]^T + lora_act[m, rank] lora_up[n, rank]^T`` and the affine terms.

    Attributes:
      m: rows of the activation on one device, None when symbolic.
      n: output features on one device.
      k_pad: K rounded up to a multiple of ``max(32, block_size)``.
      rank: of the low-rank branch, 0 for none.
      format: ``"nvfp4"``, ``"mxfp4"`` or ``"int4"``.
      block_size: K elements per block scale; ``k_pad`` for one scale per row.
      x_dtype, out_dtype, lora_dtype, scale_dtype: dtype names.
      k: logical K, None where it is k_pad.
      lora_smoothed: LoRA-down reads the smoothed x.
      precision: None, ``"fastest"`` or ``"highest"``; see :func:`jax_w4a4.matmul`.
      groups: weights of a grouped call, among which the rows are divided; 0 for one weight.
      sign_order: ``"linear"``, or ``"sorted"`` (mxfp4 only) after ``Weight.prepare``.
    """

    m: int | None
    n: int
    k_pad: int
    rank: int
    format: str
    block_size: int
    x_dtype: str
    out_dtype: str
    lora_dtype: str
    scale_dtype: str
    k: int | None = None
    lora_smoothed: bool = False
    precision: str | None = None
    groups: int = 0
    sign_order: str = "linear"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(
                f"jax_w4a4.plan: unknown format {self.format!r}; expected one of {FORMATS}"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"jax_w4a4.plan: unknown precision {self.precision!r}; expected one of {PRECISIONS}"
            )
        if self.sign_order not in SIGN_ORDERS or (
            self.sign_order == "sorted" and self.format != "mxfp4"
        ):
            raise ValueError(
                f"jax_w4a4.plan: sign_order {self.sign_order!r} of {self.format}; expected "
                "'linear', or 'sorted' with mxfp4"
            )
        for name, least in (
            ("m", 0), ("n", 0), ("rank", 0), ("k_pad", 1), ("block_size", 1), ("groups", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if name == "m" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"jax_w4a4.plan: Problem.{name} is {value!r}; expected an integer >= {least}"
                )
        k = self.k_pad if self.k is None else self.k
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= self.k_pad:
            raise ValueError(
                f"jax_w4a4.plan: Problem.k is {self.k!r}; expected an integer from 1 to k_pad"
            )
        if not isinstance(self.lora_smoothed, bool):
            raise ValueError(
                f"jax_w4a4.plan: Problem.lora_smoothed is {self.lora_smoothed!r}; expected a bool"
            )
        fixed = {"nvfp4": 16, "mxfp4": 32}.get(self.format, self.block_size)
        if self.block_size != fixed:
            raise ValueError(
                f"jax_w4a4.plan: {self.format} has a block size of {fixed}, got {self.block_size}"
            )
        if self.k_pad % 32 or self.k_pad % self.block_size:
            raise ValueError(
                f"jax_w4a4.plan: Problem.k_pad is {self.k_pad}; expected a multiple of 32 and of "
                f"the block size {self.block_size}"
            )
        for name in ("x_dtype", "out_dtype", "lora_dtype", "scale_dtype"):
            if getattr(self, name) not in ITEMSIZE:
                raise ValueError(
                    f"jax_w4a4.plan: Problem.{name} is {getattr(self, name)!r}; expected one of "
                    f"{', '.join(ITEMSIZE)}"
                )


@dataclasses.dataclass(frozen=True)
class Config:
    """A choice of the planner: the tile, the group that works on it, and all multiplicities.

    ``tile_m`` by ``tile_n`` is what one group (``cluster`` CTAs) produces. ``lora_stages`` counts
    dedicated buffers; with a low-rank branch and 0 of them the design streams LoRA through the
    main ring if it can.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster: int
    main_stages: int
    lora_stages: int
    store_stages: int

    def tile(self) -> tuple[int, int, int]:
        return self.tile_m, self.tile_n, self.cluster


@dataclasses.dataclass(frozen=True)
class Row:
    """One resident object.

    Attributes:
      name: one of ``targets.RESIDENT_OBJECTS``.
      single: bytes per stage in each CTA when one CTA works on the tile alone.
      dual: bytes per stage in each CTA when two CTAs share the tile.
      stages: buffers of it.
      sliced: whether two CTAs divide it (``dual < single``); decided by the target.
      overlaps_main: whether it must coexist with the main loop's buffers. If not, it is
        laid over them.
      memory: ``"smem"``, ``"tmem"`` or ``"registers"``.
      lifetime: ``"K loop"``, ``"tile"``, ``"epilogue"`` or ``"kernel"``.
      note: the formula of ``single``, and anything a reader would ask.
    """

    name: str
    single: int
    dual: int
    stages: int
    sliced: bool
    overlaps_main: bool
    memory: str
    lifetime: str
    note: str

    def bytes(self, cluster: int) -> int:
        """Bytes of one stage in one CTA of a group of ``cluster``."""
        return self.single if cluster == 1 else self.dual


@dataclasses.dataclass(frozen=True)
class Region:
    """Where a row lives in dynamic shared memory: byte offset of the first stage, bytes per stage,
    stages, and bytes from one stage to the next."""

    name: str
    offset: int
    bytes_per_stage: int
    stages: int
    stride: int


@dataclasses.dataclass(frozen=True)
class DownPlan:
    """LoRA-down: beside quantizer 2 (cuda/sm90_down_v2.cuh), in quantizer 5's launch, or in the
    gemm's (cuda/sm90_decode_down.cuh).

    Attributes:
      rows: tokens per cluster.
      cluster: CTAs that divide K among them.
      stages: of the ring, 64 k each.
      threads, smem_bytes: per CTA.
      off_barriers: bytes from the start of shared memory to the ring's barriers.
      ahead: CTAs of the gemm's launch that do it, ahead of the others; 0 elsewhere.
      early: CTAs of that launch for which the quantizer leaves SMs.
    """

    rows: int
    cluster: int
    stages: int
    threads: int
    smem_bytes: int
    off_barriers: int
    ahead: int = 0
    early: int = 0


@dataclasses.dataclass(frozen=True)
class QuantizerPlan:
    """Launch of the activation quantizer.

    Attributes:
      kernel: 1 writes the public layout (codes and block scales), 2 that of the sm90_v2 gemm, 3
        the public layout with a token in registers, 4 the same with the block scales as sm100_v2
        reads them, 5 that of sm90_v2 for the few tokens of sm90_decode.
      rows: tokens per CTA.
      chunk_k: K elements at a time.
      threads, smem_bytes: per CTA.
      warps: that hold a token in registers (quantizers 2 to 5).
      lane_chunks: pieces of eight values of a token in each of their lanes (quantizers 2 to 5).
      down: LoRA-down, where it is a launch of its own, or other CTAs of quantizer 5's or of the
        gemm's.
      why: the reason for this kernel, where there was a choice.
    """

    rows: int
    chunk_k: int
    threads: int
    smem_bytes: int
    kernel: int = 1
    warps: int = 0
    lane_chunks: int = 0
    down: DownPlan | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in device memory that a call needs besides its operands and its result."""

    name: str
    shape: tuple
    dtype: str


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Work of one kernel launch and its compulsory DRAM bytes, every operand moved once.

    ``flops`` and ``bytes`` are pairs (what, amount) in print order. A multiply-add is two FLOP.
    """

    flops: tuple[tuple[str, int], ...]
    bytes: tuple[tuple[str, int], ...]

    @property
    def total_flops(self) -> int:
        return sum(amount for _, amount in self.flops)

    @property
    def total_bytes(self) -> int:
        return sum(amount for _, amount in self.bytes)


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def _row(
    target: Target,
    name: str,
    single: int,
    stages: int,
    lifetime: str,
    note: str,
    *,
    memory: str = "smem",
    overlaps_main: bool = True,
    sliced: bool | None = None,
) -> Row:
    """Applies the target's halving rule, the one place where it is applied; a design whose CTAs
    divide the tile without a common MMA passes ``sliced``."""
    sliced = (name in target.halved if sliced is None else sliced) and single > 0
    return Row(
        name=name,
        single=single,
        dual=single // 2 if sliced else single,
        stages=stages,
        sliced=sliced,
        overlaps_main=overlaps_main,
        memory=memory,
        lifetime=lifetime,
        note=note,
    )


def sm90_v1(problem: Problem, target: Target, config: Config) -> tuple[Row, ...]:
    """The monolithic kernel of sm_90 and sm_100: one CTA per tile, double-buffered, bf16 MMA.

    Operands are expanded exactly to bf16 on their way into shared memory. nvfp4 and mxfp4
    block scales are folded into them; int4 keeps fp32 scales because bf16 holds the integers
    but not integer times scale.
    """
    m, n, k = config.tile_m, config.tile_n, config.tile_k
    groups = max(1, k // problem.block_size) if problem.format == "int4" else 0
    scale = f"rows*{groups} groups*4, fp32" if groups else "folded into the bf16 operands"
    lora = "rows*32 ranks*4, fp32; laid over the main stages"
    main, extra = config.main_stages, config.lora_stages
    scales = main if groups else 0

    def row(*args, **kwargs) -> Row:
        return _row(target, *args, **kwargs)

    return (
        row("weight", n * k * 2, main, "K loop", "tile_n*tile_k*2, bf16"),
        row("activation", m * k * 2, main, "K loop", "tile_m*tile_k*2, bf16"),
        row("weight_scale", n * groups * 4, scales, "K loop", scale),
        row("activation_scale", m * groups * 4, scales, "K loop", scale),
        row("lora_up", n * 32 * 4, extra, "epilogue", lora, overlaps_main=False),
        row("lora_act", m * 32 * 4, extra, "epilogue", lora, overlaps_main=False),
        row("store", 0, 0, "epilogue", "direct stores from registers"),
        row("accumulator", m * n * 4, 1, "tile", "tile_m*tile_n*4, fp32", memory="registers"),
        row("aux", 2 * n * 4, 1, "kernel", "channel_scale and bias, tile_n*4 each"),
        row("barriers", 0, 0, "kernel", "__syncthreads only"),
    )


@dataclasses.dataclass(frozen=True)
class V2Path:
    """What the main loop of sm90_v2 multiplies: a format on one of the MMA's operand types.

    Attributes:
      name: of the struct in cuda/sm90_gemm_v2.cuh and of the lines in CMakeLists.txt.
      code: the FFI attribute ``path``.
      operand: element type of both operands of the MMA.
      act_bytes: of an activation element in the gemm's own layout.
      token_scale: what the scale of a token is, None where there is none.
      tiles: token tiles that CMakeLists.txt compiles.
      peak: field of Target that bounds the product.
      grouped_tiles: the same of sm90_grouped, none where it has no code for the path.
      stage_groups: groups of K in a stage whose token scales are staged with it.
      promote_k: K elements that the tensor core adds up before the sums move on into fp32
        registers; 0 for all of K.
      why: the reason for this path where another would do.
    """

    name: str
    code: int
    operand: str
    act_bytes: int
    token_scale: str | None
    tiles: tuple[int, ...]
    peak: str
    grouped_tiles: tuple[int, ...] = ()
    stage_groups: int = 0
    promote_k: int = 0
    why: str = ""

    @property
    def tile_k(self) -> int:
        return _V2_ROW_BYTES // self.act_bytes


# Activation bytes of a token in one stage.
_V2_ROW_BYTES = 128
_V2_TOKEN_STAGES = 2
_V2_TILES = (256, 200, 192, 160, 144, 128, 64)
_GROUPED_TILES = (256, 200, 128, 64, 16)

V2_PATHS: Mapping[str, V2Path] = MappingProxyType(
    {
        p.name: p
        for p in (
            V2Path("Mxfp4", 1, "e5m2", 1, "power of two", _V2_TILES, "peak_fp8", _GROUPED_TILES),
            V2Path(
                "Mxfp4Promoted",
                2,
                "e5m2",
                1,
                "power of two",
                (200, 192, 128, 64),  # two sets of accumulators
                "peak_fp8",
                # 512 is exact to fp32, 1024 to 1e-4 at most (docs/numerics.md) and 3 % faster.
                promote_k=1024,
                why="precision='highest': sums move to fp32 registers every {promote_k} of K",
            ),
            V2Path("Nvfp4", 3, "bf16", 2, None, _V2_TILES, "peak_bf16", _GROUPED_TILES),
            V2Path(
                "Nvfp4Rounded",
                4,
                "e4m3",
                1,
                "power of two",
                _V2_TILES,
                "peak_fp8",
                _GROUPED_TILES,
                why="precision='fastest': each value times its block scale is rounded to e4m3",
            ),
            # The INT8 MMA has no width of 200 tokens.
            V2Path(
                "Int4Row",
                5,
                "s8",
                1,
                "block scale",
                (256, 208, 192, 160, 144, 128, 64),
                "peak_int8",
                (256, 192, 128, 64, 16),
            ),
            *(
                V2Path(
                    f"Int4Group{group}",
                    code,
                    "e4m3",
                    1,
                    None,
                    (200, 128, 64),  # two sets of accumulators
                    "peak_fp8",
                    stage_groups=128 // group,
                    why="precision='highest': integers on the FP8 MMA, exact sums of a group times "
                    "fp32 scales",
                )
                for code, group in ((6, 64), (7, 128))
            ),
            V2Path(
                "Int4Scaled",
                8,
                "f16",
                2,
                "power of two",
                _V2_TILES,
                "peak_bf16",
                _GROUPED_TILES,
                why="each code times its block scale is rounded to fp16; precision='highest' keeps "
                "the product exact",
            ),
            V2Path(
                "Mxfp4Sorted",
                9,
                "e5m2",
                1,
                "power of two",
                _V2_TILES,
                "peak_fp8",
                _GROUPED_TILES,
                why="prepared weight, signs sorted: 7 instead of 9 instructions for eight codes",
            ),
        )
    }
)


def v2_path(problem: Problem) -> V2Path | None:
    """How sm90_v2 multiplies the problem's format, None if it has no code for it."""
    if problem.format == "mxfp4":
        if problem.precision == "highest":
            return None if problem.sign_order == "sorted" else V2_PATHS["Mxfp4Promoted"]
        return V2_PATHS["Mxfp4Sorted" if problem.sign_order == "sorted" else "Mxfp4"]
    if problem.format == "nvfp4":
        return V2_PATHS["Nvfp4Rounded" if problem.precision == "fastest" else "Nvfp4"]
    if problem.block_size == problem.k_pad:
        return V2_PATHS["Int4Row"]
    if problem.precision == "highest":
        return V2_PATHS.get(f"Int4Group{problem.block_size}")
    return V2_PATHS["Int4Scaled"]


def row_bytes(problem: Problem) -> int:
    """Bytes of one token in the activation layout of sm90_v2: whole stages of 128 bytes."""
    path = v2_path(problem)
    assert path is not None, problem
    return _align(problem.k_pad * path.act_bytes, _V2_ROW_BYTES)


def sm90_v2(problem: Problem, target: Target, config: Config) -> tuple[Row, ...]:
    """The persistent, warp-specialised Hopper kernel (cuda/sm90_gemm_v2.cuh).

    ``tile_n`` is 128 weight rows per CTA of the cluster; the cluster's CTAs share the tokens by
    multicast. Weights are staged as 4-bit bytes and expanded in registers, activations as the MMA
    takes them. A slot of the main ring holds either a K step of both or 32 ranks of both low-rank
    operands.
    """
    m, n, k = config.tile_m, config.tile_n, config.tile_k
    path = v2_path(problem)
    assert path is not None, problem
    act = path.act_bytes
    main = config.main_stages
    lora = 1 if problem.rank else 0
    steps = lora_steps(problem, 64)
    streamed = f"32 ranks in a slot of the main ring, {_plural(steps, 'extra step')}"
    # Tiles of a grouped call begin at any token, copies of token scales at every fourth.
    token = m * 4 + (16 if problem.groups else 0) if path.token_scale else 0
    per_token = "tile_m*4 + 16" if problem.groups else "tile_m*4"
    groups = path.stage_groups
    where = "in aux, one per row" if path.operand == "s8" else "from L2 into registers"

    def row(*args, **kwargs) -> Row:
        return _row(target, *args, **kwargs)

    return (
        row("activation", m * k * act, main, "K loop", f"tile_m*tile_k*{act}, as the MMA takes it"),
        row("weight", n * k // 2, main, "K loop", "tile_n*tile_k/2, 4-bit codes", sliced=True),
        row(
            "weight_scale",
            0,
            0,
            "K loop",
            where,
        ),
        row("lora_act", m * 64, lora, "tile", f"tile_m*64; {streamed}", overlaps_main=False),
        row(
            "lora_up",
            n * 64,
            lora,
            "tile",
            f"tile_n*64; {streamed}",
            overlaps_main=False,
            sliced=True,
        ),
        row(
            "store",
            m * n * ITEMSIZE[problem.out_dtype],
            config.store_stages,
            "epilogue",
            "tile_m*tile_n*2, one slab per warpgroup",
            sliced=True,
        ),
        row(
            "activation_scale",
            # A stage is whole swizzle patterns of 1024 bytes.
            _align(m * 4 * groups, 1024),
            main,
            "K loop",
            f"tile_m*{4 * groups} to 1024, an fp32 block scale per token and group",
        )
        if groups
        else row(
            "activation_scale",
            token,
            _V2_TOKEN_STAGES if token else 0,
            "tile",
            f"{per_token}, one fp32 {path.token_scale} per token" if token else "folded into bf16",
        ),
        row(
            "accumulator",
            m * n * 4,
            1,
            "tile",
            "tile_m*tile_n*4, fp32",
            memory="registers",
            sliced=True,
        ),
        row("aux", 0, 0, "tile", "16 bytes per weight row, from L2 into registers"),
        row(
            "barriers",
            _align(16 * (main + _V2_TOKEN_STAGES), 128),
            1,
            "kernel",
            "two mbarriers per slot of the main and token rings",
        ),
    )


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _scale_columns(rows: int, per_row: int) -> int:
    """TMEM columns of block scales: 128-row atoms, four replicas over the lanes.

    128 rows of ``per_row`` one-byte scales, times 4 replicas, over 512 bytes per column.
    """
    return _align(rows, 128) // 128 * per_row


def _accumulator_bytes(config: Config) -> int:
    """One fp32 accumulator: 128 lanes of 4 bytes are 512 bytes per TMEM column."""
    return -(-config.tile_m // 128) * config.tile_n * 512


def _sm100_tmem(problem: Problem, target: Target, config: Config) -> tuple[int, int, int]:
    """(accumulators, columns of one, columns of both block scales, those of two stages).

    cuda/sm100_layout.h has the kernel's side; tests compare them. Three accumulators, where they
    fit, are a tile's product, its low-rank product, and the next tile's product.
    """
    rows, columns = config.tile_m, _accumulator_bytes(config) // 512
    if config.cluster == 2 and "accumulator" in target.halved:
        rows, columns = rows // 2, columns // 2
    per_row = config.tile_k // problem.block_size
    scales = 2 * (_scale_columns(rows, per_row) + _scale_columns(config.tile_n, per_row))
    stages = 3 if 3 * columns + scales <= target.tmem_columns else 1
    return stages, columns, scales


# Of the decode kernel: most weight rows of a CTA, warpgroups along K, boxes of 256 K in a stage; up
# to so many tokens. With 128 there are two warpgroups, not four, whose registers hold the sums.
_DECODE_SHAPES = {
    16: ((32, 4, 4), (64, 4, 2), (128, 2, 1)),
    64: ((32, 4, 2), (64, 4, 2), (128, 2, 1)),
    128: ((64, 2, 1), (128, 1, 1)),
}
DECODE_TOKENS = (8, 16, 32, 64, 96, 128)
DECODE_MOST_TOKENS = 512  # in several tiles of the largest
DECODE_PAIR_TOKENS = 96  # of a tile of which a launch may have two
DECODE_PATHS = ("Mxfp4", "Nvfp4", "Nvfp4Rounded", "Int4Row", "Mxfp4Sorted")
_DECODE_SCALE_BOX = 128  # block scales of a row that the copy engine fetches at once
# Weight bytes that the ring holds at most; more in flight is slower (docs/plans.md).
_DECODE_IN_FLIGHT = 98304


def decode_shape(tile_m: int, tile_n: int) -> tuple[int, int, int]:
    """Most weight rows, warpgroups along K and boxes of 256 K per stage of a decode CTA."""
    shapes = next(each for most, each in _DECODE_SHAPES.items() if tile_m <= most)
    return next(shape for shape in shapes if tile_n <= shape[0])


def decode_tokens(m: int) -> tuple[int, ...]:
    """Token tiles of the decode kernel for ``m`` rows: the least that has them all, or several."""
    if not 0 < m <= DECODE_MOST_TOKENS:
        return ()
    largest = DECODE_TOKENS[-1]
    if m <= largest:
        return (min(t for t in DECODE_TOKENS if t >= m),)
    return (largest, DECODE_PAIR_TOKENS) if m <= 2 * DECODE_PAIR_TOKENS else (largest,)


def decode_alone(tile_m: int, tile_n: int) -> bool:
    """Whether a warpgroup of a decode CTA has all of K, and its sums never leave its registers."""
    return decode_shape(tile_m, tile_n)[1] == 1


def sm90_decode(problem: Problem, target: Target, config: Config) -> tuple[Row, ...]:
    """The Hopper kernel for few tokens (cuda/sm90_decode.cuh): one CTA per SM streams its weights.

    The CTAs of a cluster have the same rows and divide K.

    The stage holds 4-bit weights and activations as the MMA takes them; block scales of all rows of
    the CTA are resident, or two boxes of them in turn. The warpgroups divide K, and their sums lie
    over the ring.
    """
    m, n, k = config.tile_m, config.tile_n, config.tile_k
    path = v2_path(problem)
    assert path is not None, problem
    rows, groups, _ = decode_shape(m, n)
    main = config.main_stages
    slab = m * rows * 4
    block = 0 if path.operand == "s8" else problem.block_size
    boxes, slots = decode_scale_boxes(problem, config)
    alone = decode_alone(m, n)
    peer = slab // 2 if config.cluster > 1 else 0
    if alone:
        addend = peer + (m * 32 * 2 if problem.rank else 0)
    else:
        addend = slab if problem.rank or peer else 0

    def row(*args, **kwargs) -> Row:
        return _row(target, *args, **kwargs)

    return (
        row("weight", n * k // 2, main, "K loop", "tile_n*tile_k/2, 4-bit codes"),
        row(
            "activation", m * k * path.act_bytes, main, "K loop", f"tile_m*tile_k*{path.act_bytes}"
        ),
        row(
            "weight_scale",
            slots * n * _DECODE_SCALE_BOX,
            1 if slots else 0,
            "kernel",
            "in aux, one per row"
            if not block
            else f"tile_n*(K/{block} to {_DECODE_SCALE_BOX}), all of the CTA's"
            if slots == boxes
            else f"{slots}*tile_n*{_DECODE_SCALE_BOX}, the CTA's {boxes} boxes in turn",
        ),
        row(
            "activation_scale",
            m * 4 if path.token_scale else 0,
            1 if path.token_scale else 0,
            "kernel",
            f"tile_m*4, one fp32 {path.token_scale} per token"
            if path.token_scale
            else "folded into bf16",
        ),
        row("lora_up", 0, 0, "kernel", "from L2 into registers"),
        row(
            "lora_act",
            addend,
            1 if addend else 0,
            "kernel",
            f"tile_m*{rows}*4, the low-rank product and the peer's sums in fp32"
            if addend and not alone
            else "; ".join(
                (["tile_m*64, 32 ranks of it"] if problem.rank else [])
                + ([f"tile_m*{rows}*2, the peer's sums in fp32"] if peer else [])
            ),
        ),
        row(
            "store",
            # Whole swizzle patterns, as the block scales lie behind.
            0 if alone else _align(groups * slab, 1024),
            config.store_stages,
            "epilogue",
            "from registers"
            if alone
            else f"{groups}*tile_m*{rows}*4 to 1024, the sums of {groups} shares of K",
            overlaps_main=False,
        ),
        row("accumulator", groups * m * n * 4, 1, "tile", "fp32", memory="registers"),
        row("aux", n * 16, 1, "kernel", "tile_n*16, scales and bias of a row"),
        row(
            "barriers",
            16 * main + 32,
            1,
            "kernel",
            "16 per stage, two of the block scales, and the peer's",
        ),
    )


def sm100_v2(problem: Problem, target: Target, config: Config) -> tuple[Row, ...]:
    """The persistent, warp-specialised kernel for sm_100/sm_103 (cuda/sm100_gemm.cuh).

    Accumulators are in TMEM. A K step is 256 4-bit elements = 128 bytes per row. With
    ``lora_stages == 0`` the low-rank operands take the main ring's slots as extra steps of 64 ranks
    (64 bf16 = 128 bytes per row) after the K loop and own no bytes; dedicated LoRA stages are an
    account without a kernel.
    Block scales keep the 128x4 atom, so rows round up to 128.
    """
    m, n, k = config.tile_m, config.tile_n, config.tile_k
    per_row = config.tile_k // problem.block_size
    main, lora = config.main_stages, config.lora_stages
    acc_stages, columns, scales = _sm100_tmem(problem, target, config)
    out = ITEMSIZE[problem.out_dtype]
    if problem.rank == 0:
        up = act = 0
        note = "no low-rank branch"
    elif lora:
        width = ITEMSIZE[problem.lora_dtype]
        up, act = n * problem.rank * width, m * problem.rank * width
        note = f"rows*rank*{width}, dedicated"
    else:
        up = act = 0
        note = f"streamed: {lora_steps(problem)} extra steps in the main ring's slots"

    def row(*args, **kwargs) -> Row:
        return _row(target, *args, **kwargs)

    return (
        row("activation", m * k // 2, main, "K loop", "tile_m*128, 4-bit codes"),
        row("weight", n * k // 2, main, "K loop", "tile_n*128, 4-bit codes"),
        row(
            "activation_scale", _align(m, 128) * per_row, main, "K loop", f"tile_m*{per_row} scales"
        ),
        row("weight_scale", _align(n, 128) * per_row, main, "K loop", f"tile_n*{per_row} scales"),
        row("lora_act", act, lora, "tile", note),
        row("lora_up", up, lora, "tile", note),
        row("store", 128 * 32 * out, config.store_stages, "epilogue", f"128 rows*32 cols*{out}"),
        row(
            "accumulator",
            _accumulator_bytes(config),
            acc_stages,
            "tile",
            f"{acc_stages}*{columns} fp32 columns + {scales} of scales of {target.tmem_columns}",
            memory="tmem",
        ),
        row("aux", 2 * n * 4, 1, "epilogue", "channel_scale and bias, tile_n*4 each"),
        row("barriers", 1024, 1, "kernel", "mbarriers, TMEM pointer, 1024-byte alignment"),
    )


def svdquant_v2(problem: Problem, target: Target, config: Config) -> tuple[Row, ...]:
    """The published account of svdquant-kernels' v2 kernel, for comparison with sm100_v2.

    LoRA has ``lora_stages`` dedicated buffers, the vectors are 16 bit, one accumulator.
    """
    m, n, rank = config.tile_m, config.tile_n, problem.rank
    main, lora = config.main_stages, config.lora_stages

    def row(*args, **kwargs) -> Row:
        return _row(target, *args, **kwargs)

    return (
        row("activation", m * 128, main, "K loop", "tile_m*128"),
        row("weight", n * 128, main, "K loop", "tile_n*128"),
        row("activation_scale", m * 16, main, "K loop", "tile_m*16"),
        row("weight_scale", n * 16, main, "K loop", "tile_n*16"),
        row("lora_act", m * rank * 2, lora, "tile", "tile_m*rank*2"),
        row("lora_up", n * rank * 2, lora, "tile", "tile_n*rank*2"),
        row("store", 128 * 32 * 2, config.store_stages, "epilogue", "128*32*2"),
        row(
            "accumulator",
            _accumulator_bytes(config),
            1,
            "tile",
            "one accumulator: no overlap of the epilogue with the next K loop",
            memory="tmem",
        ),
        row("aux", 2 * n * 2, 1, "epilogue", "channel scale and bias, tile_n*2 each"),
        row("barriers", 1024, 1, "kernel", "reserved"),
    )


def lora_steps(problem: Problem, row_bytes: int = 128) -> int:
    """Extra main-ring steps of a streamed low-rank branch: ``row_bytes`` of ranks per row each."""
    return -(-problem.rank * ITEMSIZE[problem.lora_dtype] // row_bytes)


def tmem_columns(problem: Problem, target: Target, config: Config) -> int:
    """TMEM columns that the sm100_v2 design uses in one CTA: accumulators and block scales."""
    stages, columns, scales = _sm100_tmem(problem, target, config)
    return stages * columns + scales


def layout(
    rows: tuple[Row, ...], cluster: int, align: int, interleaved: bool = False
) -> tuple[tuple[Region, ...], int]:
    """Places the shared-memory rows: K-loop rows first, epilogue-only rows over them.

    ``interleaved``: the K-loop rows of a stage lie side by side, and the stages follow each other,
    each large enough for the rows of a tile that pass through it; otherwise the stages of a row lie
    together.

    Returns the regions in the order of ``rows`` and the total bytes. A row without bytes
    or stages gets an empty region at offset 0.
    """
    placed: dict[str, Region] = {}
    smem = [row for row in rows if row.memory == "smem"]
    loop = [row for row in smem if row.overlaps_main and row.lifetime == "K loop"]
    over = [row for row in smem if not row.overlaps_main]
    slot = sum(_align(row.bytes(cluster), align) for row in loop)
    streamed = [row for row in over if row.lifetime == "tile" and row.stages]
    slot = max(slot, sum(_align(row.bytes(cluster), align) for row in streamed))

    def place(row: Row, offset: int, stride: int | None = None) -> int:
        size = row.bytes(cluster)
        if size == 0 or row.stages <= 0:
            placed[row.name] = Region(row.name, 0, 0, 0, 0)
            return offset
        placed[row.name] = Region(row.name, offset, size, row.stages, stride or size)
        return _align(offset + size * (1 if stride else row.stages), align)

    loop_end = over_end = 0
    for row in loop:
        loop_end = place(row, loop_end, slot if interleaved else None)
    if interleaved:
        loop_end = slot * max((row.stages for row in loop), default=0)
    for row in over:
        over_end = place(row, over_end)
    end = max(loop_end, over_end)
    for row in smem:
        if row.overlaps_main and row.lifetime != "K loop":
            end = place(row, end)
    return tuple(placed[row.name] for row in smem), end


def quantizer_v1(problem: Problem) -> QuantizerPlan:
    """The activation quantizer: 16 rows per CTA, K in chunks of 256.

    fp32 chunk of x, one fp32 per row, and with a low-rank branch 256 threads' partial
    sums of 16 ranks.
    """
    rows, threads, chunk = 16, 256, 256
    smem = rows * chunk * 4 + rows * 4 + (threads * 16 * 4 if problem.rank else 0)
    return QuantizerPlan(rows, chunk, threads, smem)


# (lane chunks, warps) of quantizers 2 to 4 that are compiled.
QUANTIZER_SHAPES = ((4, 4), (4, 8), (8, 8), (8, 16))


# The same of quantizer 5: CTAs that lie beside the gemm's, and where that leaves no room for them
# larger ones.
DECODE_QUANTIZER_SHAPES = ((2, 8), (4, 8), (8, 8), (8, 16))
DECODE_QUANTIZER_LARGE = ((1, 16), (2, 16), (4, 16), (8, 16))


def decode_down_ranks(warps: int) -> int:
    """Ranks that a cluster of quantizer 5's LoRA-down takes, in CTAs of so many warps."""
    return 32 if warps > 8 else 16


def beside_decode(problem: Problem, tile_m: int, tile_n: int) -> bool:
    """Whether CTAs of quantizer 5, of 256 threads and 96 registers each, lie on an SM beside one of
    sm90_decode: where that has 64 registers for each of its 640 threads."""
    if tile_m <= 16:
        return True
    # Longer tokens would take more registers.
    k = problem.k or problem.k_pad
    return tile_m == 32 and decode_shape(tile_m, tile_n)[0] == 32 and k <= 4096


def decode_quantizer(problem: Problem, sm_count: int, beside: bool) -> QuantizerPlan | None:
    """Quantizer 5 (cuda/sm90_decode_quantize.cuh), None where K is too long.

    A CTA takes a token, or four share one. With a low-rank branch, clusters of CTAs of the same
    launch take 16 tokens and 16 or 32 ranks and divide K: 16 CTAs where eight would not have all of
    it on its way at once, if the whole launch then runs at once. No dynamic shared memory.

    Args:
      beside: with CTAs that lie beside the gemm's (`beside_decode`).
    """
    k = problem.k or problem.k_pad
    m = problem.m or 1
    for chunks, warps in DECODE_QUANTIZER_SHAPES if beside else DECODE_QUANTIZER_LARGE:
        if k <= 8 * 32 * chunks * warps:
            threads = 32 * warps
            down = None
            if problem.rank:
                tiles = -(-m // 16) * -(-problem.rank // decode_down_ranks(warps))
                wide = k > 4096 and 16 * tiles + m <= sm_count
                down = DownPlan(16, 16 if wide else 8, 0, threads, 0, 0)
            return QuantizerPlan(
                1, problem.k_pad, threads, 0, kernel=5, warps=warps, lane_chunks=chunks, down=down
            )
    return None


def token_quantizer(problem: Problem, kernel: int) -> QuantizerPlan | None:
    """Quantizer 2, 3 or 4 (cuda/sm90_quantize_token.cuh), None where K is too long.

    A token is held by the registers of ``warps`` warps, so a CTA of 256 threads, or of 16 warps,
    takes one or two tokens and has no dynamic shared memory.
    """
    k = problem.k or problem.k_pad
    for chunks, warps in QUANTIZER_SHAPES:
        if k <= 8 * 32 * chunks * warps:
            threads = max(256, 32 * warps)
            rows = threads // 32 // warps
            return QuantizerPlan(
                rows, problem.k_pad, threads, 0, kernel=kernel, warps=warps, lane_chunks=chunks
            )
    return None


def down_v2(problem: Problem, cluster: int, capacity: int) -> DownPlan:
    """LoRA-down of the sm90_v2 path (cuda/sm90_down_v2.cuh): 72 tokens per cluster, K divided.

    Per CTA a ring of 64-k stages, 72 rows of x and boxes of 64 ranks; over it, once it is through,
    the partial sums of 72 tokens; barriers. As many stages as fit ``capacity``, eight at most.
    Where groups have 16 rows or fewer each a cluster takes 16 tokens, in the same bytes.

    With groups the launch has CTAs for as many tiles as there could be, and only when all of them
    have begun does the next launch begin beside them: two share an SM, up to rank 128.
    """
    rows, step = 72, 64
    tiles = next(t for t in (1, 2, 4) if problem.rank <= 64 * t)
    stage = rows * step * 2 + tiles * 64 * step * 2
    partial = rows * (64 * tiles + 4) * 4
    if problem.groups and tiles <= 2:
        capacity = capacity // 2 - 1024
    stages = min(8, (capacity - 128) // stage)
    off = _align(max(stages * stage, partial), 8)
    threads = 128 * min(tiles, 2) + 32
    if problem.m is not None and problem.m <= 16 * problem.groups:
        rows = 16
    return DownPlan(rows, cluster, stages, threads, off + 16 * stages, off)


# LoRA-down in the launch of sm90_decode: CTAs that divide K, the most ranks, the fewest tokens of
# the tile, the most of one MMA.
DOWN_AHEAD_CTAS = 4
DOWN_AHEAD_RANK = 32
DOWN_AHEAD_LEAST_TILE_M = 32
DOWN_AHEAD_MMA_TOKENS = 256


def down_ahead_ctas(m: int) -> int:
    """CTAs of `down_ahead` for ``m`` tokens: of more than one MMA takes, as many for each tile."""
    return DOWN_AHEAD_CTAS * (1 if m <= DOWN_AHEAD_MMA_TOKENS else -(-m // DECODE_TOKENS[-1]))


def down_ahead(
    problem: Problem, tile_m: int, threads: int, smem_bytes: int, early: int
) -> DownPlan | None:
    """LoRA-down by CTAs of sm90_decode's launch (cuda/sm90_decode_down.cuh), which divide K; None
    where their shared memory is not enough.

    The ring and the partial sums of sm90_down_v2, for 64, 128 or 256 tokens, or 128 of more: as
    many stages as fit into ``smem_bytes`` of the gemm, 16 at most.

    Args:
      early: SMs that quantizer 5 leaves to CTAs of the gemm's launch.
    """
    assert 0 < problem.rank <= DOWN_AHEAD_RANK, problem
    assert problem.m is not None and problem.m <= DECODE_MOST_TOKENS, problem
    most = DECODE_TOKENS[-1]
    tokens = most if tile_m > 64 else 64
    if most < problem.m <= DOWN_AHEAD_MMA_TOKENS:
        tokens = DOWN_AHEAD_MMA_TOKENS
    stage = max(72, tokens) * 64 * 2 + 64 * 64 * 2
    partial = tokens * (64 + 4) * 4
    stages = min(16, smem_bytes // (stage + 16))
    off = stages * stage
    if stages < 2:
        return None
    assert off >= partial and off % 8 == 0
    ctas = down_ahead_ctas(problem.m)
    return DownPlan(tokens, 1, stages, threads, off + 16 * stages, off, ctas, early)


def down_sm100(problem: Problem, capacity: int) -> DownPlan:
    """LoRA-down of the sm100_v2 path (cuda/sm100_down.cuh): 64 tokens and 64 ranks per CTA.

    A ring of 64-k stages, 64 rows of x and 64 of lora_down of 128 bytes each; barriers. Two CTAs
    share an SM, eight stages at most.
    """
    stage = 2 * 64 * 128
    stages = min(8, (capacity // 2 - 1024 - 128) // stage)
    off = stages * stage
    return DownPlan(64, 1, stages, 160, off + 16 * stages, off)


def workspace(
    problem: Problem, design: Design, quantizer: QuantizerPlan, tile_m: int, m: Any, kind: str
) -> tuple[Buffer, ...]:
    """Results that a primitive returns besides those its caller wants, in their order.

    Device memory belongs to XLA, so what one launch leaves for the next is a result of the call.

    Args:
      tile_m: rows of the gemm's tile; it reads whole tiles.
      m: rows; may be a symbolic dimension.
      kind: ``"matmul"`` (after y), ``"gemm"`` (after y, on a ready activation) or ``"grouped"``
        (after y).
    """
    public = (
        Buffer("packed", (m, problem.k_pad // 2), "uint8"),
        Buffer("scales", (m, problem.k_pad // problem.block_size), problem.scale_dtype),
    )
    lora_act = Buffer("lora_act", (m, problem.rank), problem.lora_dtype)
    if design.scale_atoms:
        atoms = -(-problem.k_pad // 256) * (64 // problem.block_size)
        private = tuple(
            Buffer(name, ((rows + 127) // 128 * atoms, 512), "uint8")
            for name, rows in (("act_atoms", m), ("weight_atoms", problem.n))
        )
        if kind == "gemm":
            return private
        if quantizer.kernel == 4:
            public = (public[0], dataclasses.replace(public[1], shape=(0, public[1].shape[1])))
        return (*public, lora_act, *private)
    if not design.private_layout:
        return (*public, lora_act) if kind == "matmul" else ()
    path = v2_path(problem)
    tokens: tuple = (0,)
    if path is not None and path.stage_groups:
        tokens = (problem.k_pad // problem.block_size * ((m + tile_m + 3) // 4 * 4),)
    elif path is not None and path.token_scale:
        tokens = (m + tile_m + (4 if problem.groups else 0),)
    # A box of activations that ends past the matrix costs up to half the time of the product
    # (docs/notes.md): sm90_decode reads rows that nobody writes instead.
    rows = (m + tile_m - 1) // tile_m * tile_m if design.decode and tile_m > 16 else m
    private = (
        Buffer("act", (rows, row_bytes(problem)), "uint8"),
        Buffer("token_scale", tokens, "float32"),
        # sm90_decode works them out itself.
        Buffer("rows", (0 if design.decode else max(1, problem.groups) * problem.n, 4), "float32"),
    )
    if kind == "grouped":
        table = Buffer("table", (grouped_row_tiles(problem, m, tile_m) + 1, 4), "int32")
        return (lora_act, *private, table)
    if kind == "gemm":
        return private
    if quantizer.kernel in (2, 5):
        public = tuple(dataclasses.replace(b, shape=(0, b.shape[1])) for b in public)
    if quantizer.down is not None and quantizer.down.ahead:
        # What all CTAs but the last leave for that one.
        rows = (DOWN_AHEAD_CTAS - 1) * m
        private = (*private, Buffer("down_sums", (rows, problem.rank), "float32"))
    return (*public, lora_act, *private)


def grouped_row_tiles(problem: Problem, m: Any, tile_m: int) -> Any:
    """Row tiles of a grouped call that there can be; how many there are is known on the device."""
    return (m + tile_m - 1) // tile_m + problem.groups


def _weights_read(problem: Problem, m: int) -> int:
    """Weights that a call reads; of a grouped one those of as many groups as can have rows."""
    return max(1, min(problem.groups, m))


def _act_traffic(problem: Problem, m: int, private: bool) -> tuple[int, int]:
    """Bytes of the quantized activation and of its scales, in the public or the gemm's layout."""
    if private:
        path = v2_path(problem)
        groups = problem.k_pad // problem.block_size if path and path.stage_groups else 1
        return m * row_bytes(problem), m * 4 * groups
    blocks = problem.k_pad // problem.block_size
    return m * problem.k_pad // 2, m * blocks * ITEMSIZE[problem.scale_dtype]


def _down_traffic(problem: Problem, m: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    """FLOP of LoRA-down and the bytes that it reads; x is read by the quantizer as well."""
    k = problem.k_pad
    weight = _weights_read(problem, m) * k * problem.rank * ITEMSIZE[problem.lora_dtype]
    x = ("x", m * k * ITEMSIZE[problem.x_dtype])
    return 2 * m * k * problem.rank, (x, ("lora_down", weight))


def _down_sums(problem: Problem, m: int, ahead: int) -> tuple[tuple[str, int], ...]:
    """Bytes of what CTAs of a gemm's launch that have LoRA-down, if there are any, leave to the
    last of those that divide K."""
    return (("down_sums", (DOWN_AHEAD_CTAS - 1) * m * problem.rank * 4),) if ahead else ()


def gemm_traffic(problem: Problem, m: int, private: bool = False, ahead: int = 0) -> Traffic:
    """The gemm for ``m`` rows: 2*M*N*K of the product, 2*M*N*R of the low-rank branch.

    ``private``: the activation comes in the kernel's own layout, as sm90_v2 wants it.
    ``ahead``: CTAs of the launch that have LoRA-down, see :class:`DownPlan`; 0 where the launch
    before has it.
    """
    n, k, rank = problem.n, problem.k_pad, problem.rank
    blocks = k // problem.block_size
    scale = ITEMSIZE[problem.scale_dtype]
    codes, scales = _act_traffic(problem, m, private)
    weights = _weights_read(problem, m) * n
    flops, reads = _down_traffic(problem, m)
    return Traffic(
        flops=(
            ("product", 2 * m * n * k),
            ("LoRA-up", 2 * m * n * rank),
            *((("LoRA-down", flops),) if ahead else ()),
        ),
        bytes=(
            ("weights", weights * k // 2),
            ("weight scales", weights * blocks * scale),
            ("activations", codes),
            ("activation scales", scales),
            ("lora_up", weights * rank * ITEMSIZE[problem.lora_dtype]),
            ("lora_act", m * rank * ITEMSIZE[problem.lora_dtype]),
            ("vectors", 2 * weights * 4),
            *(reads if ahead else ()),
            *_down_sums(problem, m, ahead),
            ("output", m * n * ITEMSIZE[problem.out_dtype]),
        ),
    )


def quantizer_traffic(
    problem: Problem, m: int, private: bool = False, scale_atoms: bool = False, ahead: int = 0
) -> Traffic:
    """The activation quantizer for ``m`` rows: reads x once, 2*M*K*R of LoRA-down.

    ``private``: it writes the layout of the sm90_v2 gemm.
    ``scale_atoms``: the weight's block scales are brought into the layout of sm100_v2 beside it.
    ``ahead``: CTAs of the gemm's launch that have LoRA-down instead; what they fill is marked here
    as not yet there.
    """
    k, rank = problem.k_pad, problem.rank
    codes, scales = _act_traffic(problem, m, private)
    weights = _weights_read(problem, m)
    weight = problem.n * (k // problem.block_size) * ITEMSIZE[problem.scale_dtype]
    atoms = (("weight scales as atoms", 2 * weight),) if scale_atoms and weight else ()
    flops, (x, lora_down) = _down_traffic(problem, m)
    return Traffic(
        flops=() if ahead else (("LoRA-down", flops),),
        bytes=(
            x,
            ("smooth", weights * k * 4),
            *(() if ahead else (lora_down,)),
            ("codes", codes),
            ("scales", scales),
            ("lora_act", m * rank * ITEMSIZE[problem.lora_dtype]),
            *_down_sums(problem, m, ahead),
            *atoms,
        ),
    )


def step_flops(config: Config) -> int:
    """FLOP of one main-loop step of one group."""
    return 2 * config.tile_m * config.tile_n * config.tile_k


def decode_scale_boxes(problem: Problem, config: Config) -> tuple[int, int]:
    """Boxes of block scales of a CTA of sm90_decode, and how many it has room for at once.

    All of them, or with many tokens two, so that the ring has more stages: those past two are in
    the ring's last stage while a row's largest scale is looked for, and come again during the K
    loop, each with the weights of a stage that is ahead of those that it covers.
    """
    path = v2_path(problem)
    assert path is not None, problem
    if path.operand == "s8":
        return 0, 0
    block = problem.block_size
    scales = decode_steps(problem, config) * config.tile_k // block  # of a row and CTA
    boxes = -(-scales // _DECODE_SCALE_BOX)
    stage = config.tile_n * config.tile_k // 2 + config.tile_m * config.tile_k * path.act_bytes
    in_turn = (
        boxes > 2
        and config.tile_m > 16
        and (boxes - 2) * config.tile_n * _DECODE_SCALE_BOX <= stage
        and config.main_stages * config.tile_k <= _DECODE_SCALE_BOX * block
        # Others come without a tensor map, all at once.
        and problem.k_pad // block % 16 == 0
        and (config.cluster == 1 or scales % 16 == 0)
    )
    return boxes, 2 if in_turn else boxes


def decode_steps(problem: Problem, config: Config) -> int:
    """Main-loop steps of one CTA of sm90_decode."""
    steps = -(-problem.k_pad // config.tile_k)
    return -(-steps // config.cluster)


def weight_stage_bytes(config: Config) -> int:
    """4-bit weights of one main-loop step of one group."""
    return config.tile_n * config.tile_k // 2


def decode_cta_bytes(problem: Problem, config: Config) -> int:
    """Weights and block scales that a CTA of sm90_decode reads."""
    scale = ITEMSIZE[problem.scale_dtype]
    row = problem.k_pad // 2 + problem.k_pad // problem.block_size * scale
    return config.tile_n * row // config.cluster


def output_tile_bytes(problem: Problem, config: Config) -> int:
    """Bytes that one group writes per tile."""
    return config.tile_m * config.tile_n * ITEMSIZE[problem.out_dtype]


@dataclasses.dataclass(frozen=True)
class Design:
    """A kernel design: its account and the choices that the planner may make for it.

    Attributes:
      code: the integer the FFI attribute ``kernel`` carries; 0 for an account without a kernel
        of ours.
      implemented: whether this repository holds the kernel; if not, it is a design.
      ccs: compute capabilities it is made for.
      rows: the account.
      tiles: candidates (tile_m, tile_n, cluster).
      tile_k: K step by format; the formats that the design covers. sm90_v2 has its own in
        ``V2_PATHS``, here and in ``main_peak``.
      threads, align: constants of the design; ``align`` of each region in bytes.
      many_threads: threads where ``tile_m`` is over 64; 0 where that makes no difference.
      persistent: CTAs loop over tiles.
      max_main_stages: None for as many as fit.
      min_store_stages: 0 when results go straight from registers.
      grow_store: left-over bytes become store stages.
      lora_choices: counts of dedicated LoRA buffers to consider for a low-rank branch.
      main_peak: field of Target that bounds the product, by format.
      up_peak, down_peak: the same of LoRA-up (in the gemm) and of LoRA-down (in the quantizer, or
        ahead of the gemm).
      grow_main: ``max_main_stages`` is a limit; without it the design has exactly so many.
      lora_row_bytes: of one token or weight row in a step of a streamed low-rank branch.
      interleaved: the K-loop objects of a stage lie side by side.
      private_layout: the gemm reads activations in a layout of its own.
      grouped: it takes rows sorted by group and a weight for each group, and nothing else.
      shared_tiles: values of tile_m whose CTAs share an SM, two and two.
      scale_atoms: the gemm reads the block scales of both operands as 128x4 atoms.
      lora_runs: those of ``lora_choices`` that the kernel has; the others are accounts.
      group_m: most m tiles that share a sweep over n; 0 where the hardware orders the tiles.
      unproven: the kernel never ran on its chip, so it asks for a passing self-test of the machine.
      decode: made for few tokens; the tile holds all of them, or there are several of the largest.
      least_smem: that a launch asks for, so that no second CTA shares an SM.
      most_weight_bytes: in the ring's stages; None for as many as fit.
    """

    name: str
    code: int
    implemented: bool
    ccs: frozenset[int]
    rows: Callable[[Problem, Target, Config], tuple[Row, ...]]
    tiles: tuple[tuple[int, int, int], ...]
    tile_k: Mapping[str, int]
    threads: int
    align: int
    persistent: bool
    max_main_stages: int | None
    min_store_stages: int
    grow_store: bool
    lora_choices: tuple[int, ...]
    main_peak: Mapping[str, str]
    up_peak: str
    down_peak: str
    grow_main: bool = True
    lora_row_bytes: int = 128
    interleaved: bool = False
    private_layout: bool = False
    many_threads: int = 0
    decode: bool = False
    least_smem: int = 0
    most_weight_bytes: int | None = None
    scale_atoms: bool = False
    lora_runs: tuple[int, ...] | None = None
    group_m: int = 0
    unproven: bool = False
    grouped: bool = False
    shared_tiles: tuple[int, ...] = ()

    def threads_of(self, tile_m: int) -> int:
        """Threads of a CTA."""
        return self.many_threads if self.many_threads and tile_m > 64 else self.threads

    def ctas_per_sm(self, tile_m: int) -> int:
        """CTAs that an SM runs at once."""
        return 2 if tile_m in self.shared_tiles else 1

    def capacity(self, target: Target, tile_m: int) -> int:
        """Shared memory that a CTA may ask for."""
        ctas = self.ctas_per_sm(tile_m)
        if ctas == 1:
            return target.smem_bytes
        # What the system keeps of every CTA's.
        reserved = target.smem_per_sm - target.smem_bytes
        return target.smem_per_sm // ctas - reserved

    def spare(self, problem: Problem, tile_m: int, tile_n: int) -> int:
        """Of it, what a launch leaves to a CTA of the launch before it, to start early: quantizer 5
        has up to 20544 bytes with eight warps, and 1 KB is reserved."""
        return 1024 + 20544 if self.decode and beside_decode(problem, tile_m, tile_n) else 0

    def runs(self, lora_stages: int) -> bool:
        """Whether the kernel has this LoRA staging."""
        return self.lora_runs is None or lora_stages in self.lora_runs

    def step(self, problem: Problem, tile_m: int, tile_n: int) -> int:
        """K elements of one main-loop step."""
        if self.decode:
            return 256 * decode_shape(tile_m, tile_n)[2]
        path = v2_path(problem) if self.private_layout else None
        return path.tile_k if path else self.tile_k[problem.format]

    def peak(self, problem: Problem) -> str:
        """Field of Target that bounds the product."""
        path = v2_path(problem) if self.private_layout else None
        return path.peak if path else self.main_peak[problem.format]

    def tiles_of(self, problem: Problem) -> tuple[tuple[int, int, int], ...]:
        """The candidates that the design has for a problem."""
        if self.decode:
            tokens = decode_tokens(problem.m or 0)
            return tuple(
                t
                for t in self.tiles
                if t[0] in tokens and (t[2] == 1 or problem.k_pad > self.step(problem, *t[:2]))
            )
        path = v2_path(problem) if self.private_layout else None
        if path is None:
            return self.tiles
        compiled = path.grouped_tiles if self.grouped else path.tiles
        return tuple(t for t in self.tiles if t[0] in compiled)


DESIGNS: Mapping[str, Design] = MappingProxyType(
    {
        d.name: d
        for d in (
            Design(
                name="sm90_v1",
                code=1,
                implemented=True,
                ccs=frozenset({90}),
                rows=sm90_v1,
                tiles=((128, 128, 1), (64, 128, 1), (32, 128, 1)),
                tile_k=dict.fromkeys(FORMATS, 64),
                threads=256,
                align=128,
                persistent=False,
                max_main_stages=2,
                min_store_stages=0,
                grow_store=False,
                lora_choices=(1,),
                main_peak=dict.fromkeys(FORMATS, "peak_bf16"),
                up_peak="peak_fp32",
                down_peak="peak_fp32",
                grow_main=False,
            ),
            Design(
                name="sm90_v2",
                code=3,
                implemented=True,
                ccs=frozenset({90}),
                rows=sm90_v2,
                tiles=tuple(
                    (tile_m, 128 * cluster, cluster)
                    for tile_m in sorted({m for p in V2_PATHS.values() for m in p.tiles})[::-1]
                    for cluster in (2, 1)
                ),
                tile_k={},
                threads=384,
                align=128,
                persistent=True,
                max_main_stages=8,
                min_store_stages=1,
                grow_store=False,
                lora_choices=(0,),
                main_peak={},
                up_peak="peak_bf16",
                down_peak="peak_bf16",
                lora_row_bytes=64,
                interleaved=True,
                private_layout=True,
                group_m=11,
            ),
            Design(
                name="sm100_v1",
                code=10,
                implemented=True,
                ccs=frozenset({100, 103}),
                rows=sm90_v1,
                tiles=((128, 128, 1), (64, 128, 1), (32, 128, 1)),
                tile_k=dict.fromkeys(FORMATS, 64),
                threads=256,
                align=128,
                persistent=False,
                max_main_stages=2,
                min_store_stages=0,
                grow_store=False,
                lora_choices=(1,),
                main_peak=dict.fromkeys(FORMATS, "peak_bf16"),
                up_peak="peak_fp32",
                down_peak="peak_fp32",
                grow_main=False,
                unproven=True,
            ),
            Design(
                name="sm90_decode",
                code=4,
                implemented=True,
                ccs=frozenset({90}),
                rows=sm90_decode,
                tiles=tuple(
                    (m, n, cluster)
                    for m in DECODE_TOKENS
                    for n in range(128, 0, -8)
                    for cluster in (1, 2)
                ),
                tile_k={},
                threads=640,
                many_threads=384,
                align=128,
                persistent=False,
                max_main_stages=16,
                min_store_stages=1,
                grow_store=False,
                lora_choices=(0,),
                main_peak={},
                up_peak="peak_bf16",
                down_peak="peak_bf16",
                interleaved=True,
                private_layout=True,
                decode=True,
                # Two CTAs of up to 115712 bytes fit an SM's 228 KB with 1 KB reserved for each.
                least_smem=115840,
                most_weight_bytes=_DECODE_IN_FLIGHT,
            ),
            Design(
                name="sm90_grouped",
                code=5,
                implemented=True,
                ccs=frozenset({90}),
                rows=sm90_v2,
                tiles=tuple(
                    (tile_m, 128, 1)
                    for tile_m in sorted({m for p in V2_PATHS.values() for m in p.grouped_tiles})[
                        ::-1
                    ]
                ),
                tile_k={},
                threads=384,
                align=128,
                persistent=True,
                max_main_stages=20,
                min_store_stages=1,
                grow_store=False,
                lora_choices=(0,),
                main_peak={},
                up_peak="peak_bf16",
                down_peak="peak_bf16",
                lora_row_bytes=64,
                interleaved=True,
                private_layout=True,
                group_m=11,
                grouped=True,
                shared_tiles=(16,),
            ),
            Design(
                name="sm100_v2",
                code=2,
                implemented=True,
                ccs=frozenset({100, 103}),
                rows=sm100_v2,
                tiles=((256, 256, 2), (256, 128, 2), (128, 256, 1), (128, 128, 1), (128, 64, 1)),
                tile_k=dict.fromkeys(("nvfp4", "mxfp4"), 256),
                threads=384,
                align=1024,
                persistent=True,
                max_main_stages=None,
                min_store_stages=2,
                grow_store=True,
                lora_choices=(0, 1, 2),
                main_peak=dict.fromkeys(("nvfp4", "mxfp4"), "peak_fp4"),
                up_peak="peak_bf16",
                down_peak="peak_bf16",
                scale_atoms=True,
                lora_runs=(0,),
                group_m=11,
                unproven=True,
            ),
            Design(
                name="svdquant_v2",
                code=0,
                implemented=False,
                ccs=frozenset({100, 103}),
                rows=svdquant_v2,
                tiles=((256, 128, 2), (256, 256, 2), (128, 128, 1), (128, 256, 1)),
                tile_k=dict.fromkeys(("nvfp4", "mxfp4"), 256),
                threads=192,
                align=1,
                persistent=True,
                max_main_stages=None,
                min_store_stages=2,
                grow_store=True,
                lora_choices=(2,),
                main_peak=dict.fromkeys(("nvfp4", "mxfp4"), "peak_fp4"),
                up_peak="peak_bf16",
                down_peak="peak_bf16",
            ),
        )
    }
)
