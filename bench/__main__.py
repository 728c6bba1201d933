"""`python -m bench`: time the operator beside XLA's own routes and write the result as JSON.

Ratios are taken within one run, on random data, with operands rotated past the L2 cache. TF counts
2*M*K*N only, for every route. On a GPU each route is also traced once, for the time inside its
kernels: "gemm" is its longest one.
"""

import argparse
import datetime
import json
import pathlib
import platform
import shlex
import sys

import jax
import jaxlib

import jax_w4a4

from . import cases, summary, timing
from .shapes import PREFILL, Shape


def environment(module: str = "bench") -> dict:
    """Where and how a result was measured."""
    device = jax.devices()[0]
    # Where the result goes is no part of what was measured, and names a folder of one machine.
    arguments = sys.argv[1:]
    if "--json" in arguments:
        at = arguments.index("--json")
        arguments = arguments[:at] + arguments[at + 2 :]
    return {
        "command": shlex.join(["python", "-m", module, *arguments]),
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "backend": getattr(device.client, "platform_version", device.platform),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_w4a4": jax_w4a4.__version__,
        "build": {k: str(v) for k, v in jax_w4a4.build_info().items()},
    }


def _time(build: cases.Builder, shape: Shape, copies: int, args: argparse.Namespace) -> dict:
    chain = build(shape, copies)
    seconds = timing.seconds_per_call(chain, rounds=args.rounds)
    row = {"us": seconds * 1e6, "tflops": shape.flops / seconds / 1e12}
    if not args.kernels:
        return row
    with timing.without_dependent_launch():
        kernels = timing.kernel_seconds(build(shape, copies))
    if kernels:
        row["kernels_us"] = {name[:80]: t * 1e6 for name, t in kernels.items()}
        row["gemm_us"] = max(row["kernels_us"].values())
    return row


def run(shapes: list[Shape], layers: list[cases.Layer], args: argparse.Namespace) -> list[dict]:
    rows = []
    for shape in shapes:
        copies = timing.copies_past_cache(shape.n * shape.k // 2 + 2 * shape.m * shape.k, most=8)
        base = None
        for name, build in cases.routes(layers, simple=args.simple):
            if args.routes and not any(part in name for part in [*args.routes, cases.BASE]):
                continue
            if any(part in name for part in args.skip):
                continue
            row = {"shape": str(shape), "route": name, "m": shape.m, "k": shape.k, "n": shape.n}
            try:
                row |= _time(build, shape, copies, args)
            except Exception as error:  # a peer that cannot run a shape is a result, not the end
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                base = row["us"] if base is None else base
                row["speedup_vs_xla_bf16"] = base / row["us"]
            rows.append(row)
            print(line(row), flush=True)
        # After each shape, so that a run that is cut short leaves what it has.
        _save(args.json, rows)
    return rows


def _save(path: pathlib.Path | None, rows: list[dict]) -> None:
    if path is None:
        return
    result = {"environment": environment(), "ratios": summary.ratios(rows), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def line(row: dict) -> str:
    head = f"{row['shape']:>22}  {row['route']:<32}"
    if "error" in row:
        return f"{head} {row['error'][:80]}"
    text = f"{head} {row['us']:9.1f} us {row['tflops']:8.2f} TF {row['speedup_vs_xla_bf16']:6.2f}x"
    if "gemm_us" in row:
        rest = sum(row["kernels_us"].values()) - row["gemm_us"]
        gemm_tf = row["tflops"] * row["us"] / row["gemm_us"]
        text += f"  gemm {row['gemm_us']:8.1f} us {gemm_tf:7.1f} TF, other kernels {rest:7.1f} us"
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = [layer.name for layer in cases.LAYERS]
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, help="MxKxN or MxKxNrR")
    parser.add_argument("--layers", nargs="+", choices=names, default=names)
    parser.add_argument("--routes", nargs="+", help="only routes that contain one of these texts")
    parser.add_argument(
        "--skip", nargs="+", default=[], help="no routes that contain one of these texts"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--simple", action="store_true", help="time kernel sm90_v1 too")
    parser.add_argument(
        "--no-kernels", dest="kernels", action="store_false", help="wall time only, no profiler"
    )
    parser.add_argument("--json", type=pathlib.Path, help="where the result is written")
    parser.add_argument(
        "--compare",
        type=pathlib.Path,
        help="committed results: exit code 1 where a ratio fell by more than 5 %%",
    )
    args = parser.parse_args(argv)
    layers = [layer for layer in cases.LAYERS if layer.name in args.layers]
    rows = run(args.shapes or list(PREFILL), layers, args)
    print("\n".join(summary.table(rows)))
    failures = [
        f"{row['route']} at {row['shape']}: {row['error']}"
        for row in rows
        if "error" in row and row["route"].startswith("matmul")
    ]
    if args.compare:
        committed = json.loads(args.compare.read_text())["rows"]
        failures += summary.regressions(rows, committed)
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
