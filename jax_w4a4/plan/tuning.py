"""Measured choices that stand in for the planner's: a table that `jax_w4a4.tune` fills.

The table is empty unless a file is loaded: by `load`, or from the path in the environment variable
JAX_W4A4_TUNING when the first plan is made. Entries hold for exactly one problem on one target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from jax_w4a4.plan import targets
from jax_w4a4.plan.budget import DESIGNS, Problem

ENVIRONMENT = "JAX_W4A4_TUNING"
SCHEMA = 2


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The fastest choices found for one problem.

    Attributes:
      target: name of the target, such as "sm_90".
      problem: what was timed.
      kernel: the fastest's, a name in ``budget.DESIGNS``: a tile may be of more than one.
      choices: (name, value) pairs as `plan.solve` takes them.
      us: microseconds of one call with them.
      planned_us: the same with the planner's own choices, in the same run.
      device: name of the device that it was measured on.
    """

    target: str
    problem: Problem
    kernel: str
    choices: tuple[tuple[str, int], ...]
    us: float
    planned_us: float
    device: str

    def __str__(self) -> str:
        text = ", ".join(f"{name}={value}" for name, value in self.choices)
        measured = f"{self.us:.1f} us measured on {self.device}, planned {self.planned_us:.1f}"
        return f"{self.kernel}, {text}: {measured}"


_table: dict[tuple[str, Problem], Tuned] = {}
_version = 0


def version() -> int:
    """Changes whenever the table does; part of every call's static parameters, so that JAX traces
    again."""
    _load_environment()
    return _version


def lookup(problem: Problem, target: str) -> Tuned | None:
    """The entry for a problem, None if it was not tuned."""
    _load_environment()
    return _table.get((target, problem))


def add(entries: Iterable[Tuned]) -> None:
    """Puts entries into the table, over those that it has for the same problems."""
    global _version
    _table.update({(entry.target, entry.problem): entry for entry in entries})
    _version += 1


def clear() -> None:
    """Empties the table."""
    global _version
    _table.clear()
    _version += 1


@contextlib.contextmanager
def using(entries: Iterable[Tuned]) -> Iterator[None]:
    """The table with these entries added, inside the block."""
    global _version
    before = dict(_table)
    add(entries)
    try:
        yield
    finally:
        _table.clear()
        _table.update(before)
        _version += 1


def save(path: str | os.PathLike, entries: Iterable[Tuned]) -> None:
    """Writes entries as JSON."""
    rows = [dataclasses.asdict(entry) | {"choices": dict(entry.choices)} for entry in entries]
    text = json.dumps({"schema": SCHEMA, "entries": rows}, indent=1)
    pathlib.Path(path).write_text(text + "\n")


def load(path: str | os.PathLike) -> tuple[Tuned, ...]:
    """Reads a file that `save` wrote and adds its entries to the table.

    Raises:
      OSError: the file can't be read.
      ValueError: it is not such a file, or the planner of this version refuses an entry.
    """
    from jax_w4a4.plan import planner

    who = "jax_w4a4.plan.tuning.load"
    try:
        data = json.loads(pathlib.Path(path).read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, expected {SCHEMA}")
        entries = tuple(_entry(row) for row in data["entries"])
        for entry in entries:
            planner.solve(entry.problem, entry.target, kernel=entry.kernel, **dict(entry.choices))
    except OSError:
        raise
    except Exception as error:  # JSON can hold anything, nested to any depth
        raise ValueError(
            f"{who}: {os.fspath(path)} is no tuning file of this version "
            f"({type(error).__name__}: {error}); write it anew with jax_w4a4.tune"
        ) from error
    add(entries)
    return entries


def _entry(row: dict[str, Any]) -> Tuned:
    choices = tuple(sorted(row["choices"].items()))
    if not choices:
        raise ValueError("an entry without choices")
    for name in ("us", "planned_us"):
        if not isinstance(row[name], int | float) or not math.isfinite(row[name]):
            raise ValueError(f"{name} is {row[name]!r}, expected microseconds")
    read = {
        "target": targets.get(row["target"]).name,
        "problem": Problem(**row["problem"]),
        "kernel": _kernel(row["kernel"]),
        "choices": choices,
        "device": str(row["device"]),
    }
    return Tuned(**row | read)


def _kernel(name: Any) -> str:
    design = DESIGNS.get(name) if isinstance(name, str) else None
    if design is None or not design.implemented:
        kernels = ", ".join(each.name for each in DESIGNS.values() if each.implemented)
        raise ValueError(f"kernel is {name!r}, expected one of {kernels}")
    return name


@functools.cache
def _load_environment() -> None:
    path = os.environ.get(ENVIRONMENT)
    if path:
        try:
            load(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"jax_w4a4.plan.tuning: {ENVIRONMENT}={path}: {error}") from error
