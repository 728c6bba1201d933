"""What PyTorch users run instead, as far as it is installed: cuBLAS, cuBLASLt, Humming.

None has a low-rank branch. Timed in the same process as our own kernels, so that one clock and one
power state serve both.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from .shapes import Shape
from .timing import Chain


def _chain(call: Callable, sets: list[tuple]) -> Chain:
    import torch

    def enqueue() -> None:
        for operands in sets:
            call(*operands)

    return Chain(enqueue, lambda _: torch.cuda.synchronize(), len(sets))


def graphed(chain: Chain, turns: int) -> Chain:
    """The chain, `turns` times in a row, as one CUDA graph: small layers are otherwise timed by
    what the host spends."""
    import torch

    chain.wait(chain.enqueue())  # compiles and allocates, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            chain.enqueue()
    return Chain(graph.replay, chain.wait, turns * chain.calls)


def _random(torch: Any, rows: int, columns: int) -> Any:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _activations(torch: Any, shape: Shape, copies: int, one_x: bool) -> list:
    if one_x:
        return [_random(torch, shape.m, shape.k)] * copies
    return [_random(torch, shape.m, shape.k) for _ in range(copies)]


def bf16(torch: Any, shape: Shape, copies: int, *, one_x: bool = False) -> Chain:
    """`one_x`: all sets have the same activation."""
    sets = [
        (x, _random(torch, shape.n, shape.k)) for x in _activations(torch, shape, copies, one_x)
    ]
    return _chain(lambda x, w: torch.nn.functional.linear(x, w), sets)


def fp8(torch: Any, shape: Shape, copies: int, *, fast: bool) -> Chain:
    one = torch.ones((), device="cuda")

    def operand(rows: int) -> Any:
        return _random(torch, rows, shape.k).to(torch.float8_e4m3fn)

    def call(x: Any, w: Any) -> Any:
        return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return _chain(call, [(operand(shape.m), operand(shape.n)) for _ in range(copies)])


def int8(torch: Any, shape: Shape, copies: int) -> Chain:
    def operand(rows: int) -> Any:
        return torch.randint(-8, 8, (rows, shape.k), device="cuda", dtype=torch.int8)

    sets = [(operand(shape.m), operand(shape.n)) for _ in range(copies)]
    return _chain(lambda x, w: torch._int_mm(x, w.t()), sets)


def humming(
    torch: Any, shape: Shape, copies: int, *, weight: dict, activation: str, one_x: bool = False
) -> Chain:
    """Humming's layer from bf16 x: a quantization kernel and a W4A8 gemm."""
    from humming.layer import HummingLayer

    sets = []
    for x in _activations(torch, shape, copies, one_x):
        layer = HummingLayer(
            shape_n=shape.n,
            shape_k=shape.k,
            weight_config=dict(weight),
            input_config={"dtype": activation},
            torch_dtype=torch.bfloat16,
        ).cuda()
        layer.load_from_unquantized(_random(torch, shape.n, shape.k))
        layer.transform()
        sets.append((layer, x))
    return _chain(lambda layer, x: layer(x), sets)


def routes() -> Iterator[tuple[str, Callable[[Shape, int], Chain]]]:
    """(name, builder) of every peer that is installed and has a GPU to run on."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    yield "torch bf16", functools.partial(bf16, torch)
    yield "torch fp8 fast accumulation", functools.partial(fp8, torch, fast=True)
    yield "torch fp8 exact accumulation", functools.partial(fp8, torch, fast=False)
    yield "torch int8", functools.partial(int8, torch)
    try:
        import humming as _  # noqa: F401
    except ImportError:
        return
    mxfp4 = {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32}
    yield (
        "humming w4a8 mxfp4",
        functools.partial(humming, torch, weight=mxfp4, activation="float8e4m3"),
    )
    yield (
        "humming w4a8 int4",
        functools.partial(humming, torch, weight={"dtype": "int4"}, activation="int8"),
    )
