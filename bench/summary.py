"""Ratios between routes of one run, and what counts as a regression of them."""

import math
from collections.abc import Iterable

from .cases import BASE

# A ratio that fell by more than this fails a comparison with committed results.
TOLERANCE = 0.05

_TORCH_FP8 = "torch fp8 fast accumulation"
# Of kernel time: the product alone, on both sides.
_GEMM_PEERS = (
    BASE,
    "torch bf16",
    _TORCH_FP8,
    "torch fp8 exact accumulation",
    "humming w4a8 mxfp4",
    "humming w4a8 int4",
)
# Of wall time: the whole call, on both sides.
_CALL_PEERS = (BASE, "jax.nn.scaled_matmul nvfp4")


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def _by_shape(rows: list[dict]) -> dict[str, dict[str, dict]]:
    table: dict[str, dict[str, dict]] = {}
    for row in rows:
        if "error" not in row:
            table.setdefault(row["shape"], {})[row["route"]] = row
    return table


def ratios(rows: list[dict]) -> dict[str, dict[str, float]]:
    """What each of our routes gains over each peer: name -> shape -> ratio (above 1: faster).

    "A gemm / B": time inside the longest kernel of either route. "A / B": time of the whole call.
    "A / its bare gemm" is the share of the local ceiling that is left with the low-rank branch and
    the affine on.
    """
    found: dict[str, dict[str, float]] = {}
    for shape, routes in _by_shape(rows).items():
        for name, row in routes.items():
            if not name.startswith("matmul ") or name.endswith((" bare", " quantized x")):
                continue
            pairs = [(f"{name} / {peer}", "us", peer) for peer in _CALL_PEERS]
            pairs += [(f"{name} gemm / {peer}", "gemm_us", peer) for peer in _GEMM_PEERS]
            pairs += [(f"{name} gemm / its bare gemm", "gemm_us", f"{name} bare")]
            for title, key, peer in pairs:
                if peer in routes and key in row and key in routes[peer]:
                    found.setdefault(title, {})[shape] = routes[peer][key] / row[key]
    return found


def table(rows: list[dict]) -> list[str]:
    """Lines for people: each ratio per shape and its geometric mean."""
    return [
        f"{title:<58} {geomean(by_shape.values()):6.3f}x  "
        + " ".join(f"{shape}:{value:.3f}" for shape, value in by_shape.items())
        for title, by_shape in ratios(rows).items()
    ]


def regressions(rows: list[dict], committed: list[dict]) -> list[str]:
    """Ratios that fell by more than `TOLERANCE` from a committed run, shape by shape."""
    before = ratios(committed)
    return [
        f"{title} at {shape}: {value:.3f}, was {before[title][shape]:.3f}"
        for title, by_shape in ratios(rows).items()
        for shape, value in by_shape.items()
        if title in before
        and shape in before[title]
        and value < before[title][shape] * (1 - TOLERANCE)
    ]
