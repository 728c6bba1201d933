"""The probes of `python -m jax_w4a4 selftest`, executed by the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from emulator import EmulationError, Options, blackwell, product
from jax_w4a4 import plan
from jax_w4a4.selftest import probes

# Sizes for one CTA after another.
FEW = dataclasses.replace(probes.FEW, shapes=((13, 136), (5, 77), (1, 8)), ring=(1152, 16, 264))

# Probes that sm100_v2 has no code for.
SM100_LACKS: set[str] = set()


def product_case(call: probes.Call, cluster: int) -> product.Case:
    return product.Case(
        call.kind.format, call.m, call.n, call.k, call.rank, call.kind.precision,
        call.kind.block or 0 if call.kind.format == "int4" else 0, cluster=cluster, clusters=1,
        promote_k=128 if call.kind.precision == "highest" else None,
    )  # fmt: skip


def on_sm90(call: probes.Call, cluster: int = 1, options: Options | None = None) -> np.ndarray:
    """bf16 bits of y from sm90_v2 behind its repack, launched by the product's host code."""
    result = product.run(product_case(call, cluster), options, operands=call.arrays)
    if not result.written.all():
        raise product.WrongCells("bytes of y are unwritten")
    return result.y


def on_decode(call: probes.Call, options: Options | None = None) -> np.ndarray:
    """The same from sm90_decode."""
    least = min(t for t in plan.budget.DECODE_TOKENS if t >= call.m)
    case = dataclasses.replace(product_case(call, 1), kernel="sm90_decode", tile_m=least)
    result = product.run(case, options, operands=call.arrays)
    if not result.written.all():
        raise product.WrongCells("bytes of y are unwritten")
    return result.y


def on_sm100(call: probes.Call, group: int = 1, options: Options | None = None) -> np.ndarray:
    """The same from sm100_v2, a CTA alone or in a pair."""
    case = blackwell.Case(call.kind.format, call.m, call.n, call.k, call.rank, group, clusters=1)
    result = blackwell.run(case, options, operands=call.arrays)
    if not result.written.all():
        raise product.WrongCells("bytes of y are unwritten")
    return result.y


def failures(probe: probes.Probe, kind: probes.Kind, run, *args) -> list[str]:
    """What a probe has to say about an emulated kernel; an emulation error is a failure."""
    calls = list(probe.calls(kind, FEW if run is on_decode else probes.SMALL))
    results = []
    for one in calls:
        try:
            results.append(run(one, *args))
        except (EmulationError, product.WrongCells) as error:
            return [f"{type(error).__name__}: {error}"]
    return probes.mismatches(probe, calls, results)


def failing(kind: probes.Kind, run, *args, names: Sequence[str] | None = None) -> set[str]:
    return {
        probe.name
        for probe in probes.PROBES
        if (names is None or probe.name in names) and failures(probe, kind, run, *args)
    }
