"""Command line: ``python -m jax_w4a4 explain | demo | selftest | info``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from jax_w4a4 import plan
from jax_w4a4.plan import budget, planner, targets


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Bad arguments exit with status 2."""
    try:
        status = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (such as `head`) has left; Python would flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(argv: list[str]) -> int:
    if argv[:1] == ["demo"]:
        # The demo has its own parser and its own dependencies.
        from jax_w4a4 import demo

        return demo.main(argv[1:]) or 0
    if argv[:1] == ["selftest"]:
        from jax_w4a4.selftest import runner

        return runner.main(argv[1:])
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command == "info":
        print(json.dumps(info(), indent=2))
        return 0
    return _explain(parser, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jax_w4a4", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="show the kernel plan of one shape, no GPU needed",
        description="Shows the shared-memory account, the stage counts and the roofline of "
        "y[M, N] = x[M, K] w[N, K]^T with a low-rank branch. Times are computed, not measured.",
    )
    explain.add_argument("shape", nargs="*", type=int, metavar="M K N")
    explain.add_argument("--rank", type=int, default=0, help="of the low-rank branch (default 0)")
    explain.add_argument("--format", choices=budget.FORMATS, default="nvfp4")
    explain.add_argument(
        "--block-size",
        type=_block_size,
        default="format",
        help="K elements per block scale, or 'row' (default: the format's)",
    )
    explain.add_argument(
        "--target", help=f"one of {', '.join(targets.TARGETS)} (default: this GPU)"
    )
    explain.add_argument("--dtype", default="bfloat16", help="of x (default bfloat16)")
    explain.add_argument("--precision", choices=budget.PRECISIONS[1:], help="as of matmul")
    explain.add_argument(
        "--prepared", action="store_true", help="the weight as Weight.prepare() returns it"
    )
    explain.add_argument("--out-dtype", help="of y (default: that of x)")
    explain.add_argument(
        "--accounting",
        choices=("own", "svdquant-v2"),
        default="own",
        help="svdquant-v2: the published account of svdquant-kernels; without a shape, its "
        "whole stage table",
    )
    explain.add_argument(
        "--unhalved",
        action="append",
        default=[],
        choices=targets.RESIDENT_OBJECTS,
        metavar="OBJECT",
        help="count OBJECT whole in each CTA of a pair, against the target's rule; repeatable",
    )
    for name in planner.FORCIBLE:
        explain.add_argument(f"--{name.replace('_', '-')}", type=int, help="force this choice")
    explain.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("demo", help="quantize a real model and compare", add_help=False)
    commands.add_parser("selftest", help="prove the kernels on this GPU", add_help=False)
    commands.add_parser("info", help="versions, build and device, as JSON")
    return parser


def _block_size(text: str) -> int | str | None:
    if text in ("format", "row"):
        return None if text == "row" else text
    return int(text)


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from jax_w4a4.explain import explain

    published = options.accounting == "svdquant-v2"
    try:
        if options.target is None:
            target = targets.get("sm_100") if published else targets.current()
        else:
            target = targets.get(options.target)
        if options.unhalved:
            halved = target.halved - set(options.unhalved)
            target = dataclasses.replace(target, halved=halved)
        if published and not options.shape:
            stages = stage_counts(target)
            print(json.dumps(stages, indent=2) if options.json else stage_table(stages))
            return 0
        if len(options.shape) != 3:
            parser.error(f"explain takes three sizes M K N, got {len(options.shape)}")
        settings = {
            name: getattr(options, name)
            for name in planner.FORCIBLE
            if getattr(options, name) is not None
        }
        if options.block_size != "format":
            settings["block_size"] = options.block_size
        if published:
            settings["kernel"] = "svdquant_v2"
        found = explain(
            tuple(options.shape),
            rank=options.rank,
            format=options.format,
            dtype=options.dtype,
            out_dtype=options.out_dtype,
            precision=options.precision,
            prepared=options.prepared,
            target=target,
            **settings,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        parser.error(str(error))
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    return 0


def info() -> dict[str, object]:
    """Versions of what matters, what the extension was built with, and the planning target."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    import jax_w4a4

    names = (
        "jax",
        "jaxlib",
        "numpy",
        "ml_dtypes",
        "flax",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
    )
    found: dict[str, object] = {
        "jax_w4a4": jax_w4a4.__version__,
        "python": platform.python_version(),
        **{name: text for name in names if (text := version(name)) is not None},
    }
    try:
        from jax_w4a4 import _ffi

        found["build"] = {key: _plain(value) for key, value in _ffi.build_info().items()}
    except ImportError as error:
        found["build"] = f"no extension: {type(error).__name__}"
    try:
        target = targets.current()
        found["target"] = {"name": target.name, "chip": target.chip, "sm_count": target.sm_count}
    except (NotImplementedError, ValueError) as error:
        found["target"] = str(error)
    return found


def _plain(value: object) -> object:
    """A value as JSON holds it."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def stage_counts(target: targets.Target) -> dict[str, Any]:
    """Stage counts of the svdquant-kernels v2 account for its tiles, ranks and LoRA stages.

    ``main`` and ``store`` of a cell are None where fewer than two main stages fit.
    """
    design = budget.DESIGNS["svdquant_v2"]

    def cell(tile: tuple[int, int, int], rank: int, lora_stages: int) -> dict[str, Any]:
        half = "bfloat16"
        problem = plan.Problem(
            4352, 3072, 3840, rank, "nvfp4", 16, half, half, half, "float8_e4m3fn"
        )
        choice = dict(zip(("tile_m", "tile_n", "cluster"), tile, strict=True))
        found = {**choice, "rank": rank, "lora_stages": lora_stages, "main": None, "store": None}
        try:
            solved = plan.solve(
                problem, target, kernel=design.name, lora_stages=lora_stages, **choice
            )
        except plan.DoesNotFitError:
            return found
        return found | {"main": solved.main_stages, "store": solved.store_stages}

    return {
        "accounting": "svdquant-v2",
        "target": target.name,
        "halved": [name for name in targets.RESIDENT_OBJECTS if name in target.halved],
        "stages": [
            cell(tile, rank, lora)
            for tile in design.tiles
            for rank in (32, 128, 256)
            for lora in (2, 1)
        ],
        "lora_stage_sweep": [cell((256, 128, 2), 128, lora) for lora in range(5)],
    }


def stage_table(found: dict[str, Any]) -> str:
    """:func:`stage_counts` as text; cells are ``main/store`` stages, ``-`` where none fit."""
    from jax_w4a4.explain import table

    def text(cell: dict[str, Any]) -> str:
        return "-" if cell["main"] is None else f"{cell['main']}/{cell['store']}"

    cells = found["stages"]
    columns = list(dict.fromkeys((cell["rank"], cell["lora_stages"]) for cell in cells))
    rows: dict[str, list[str]] = {}
    for cell in cells:
        tile = f"{cell['tile_m']}x{cell['tile_n']} on {cell['cluster']} CTA"
        rows.setdefault(tile, []).append(text(cell))
    head = ("tile", *(f"R={rank}, {lora} LoRA" for rank, lora in columns))
    sweep = [(str(cell["lora_stages"]), text(cell)) for cell in found["lora_stage_sweep"]]
    return "\n".join(
        [
            f"svdquant-kernels v2 account on {found['target']}: main/store stages, - where two "
            "main stages do not fit",
            f"a CTA pair halves: {', '.join(found['halved'])}",
            "",
            *table(head, [(tile, *row) for tile, row in rows.items()], set(range(1, len(head)))),
            "",
            "tile 256x128 on 2 CTA, R=128, by dedicated LoRA stages",
            *table(("LoRA stages", "main/store"), sweep, right={1}),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
