"""`python -m bench`: time the operator beside XLA's own routes and write the result as JSON.

Ratios are taken within one run, on random data, with operands rotated past the L2 cache. TF counts
2*M*K*N only, for every route.
"""

import argparse
import datetime
import json
import pathlib
import platform
import sys

import jax
import jaxlib

import jax_w4a4

from . import cases, timing

FORMATS = ("nvfp4", "mxfp4", "int4")


def environment() -> dict:
    device = jax.devices()[0]
    return {
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "backend": getattr(device.client, "platform_version", device.platform),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_w4a4": jax_w4a4.__version__,
        "build": {k: str(v) for k, v in jax_w4a4.build_info().items()},
    }


def run(shapes: list[cases.Shape], formats: tuple[str, ...], rounds: int) -> list[dict]:
    rows = []
    for shape in shapes:
        copies = timing.copies_past_cache(shape.n * shape.k // 2 + 2 * shape.m * shape.k, most=8)
        base = None
        for name, build in cases.routes(formats):
            row = {"shape": str(shape), "route": name, "m": shape.m, "k": shape.k, "n": shape.n}
            try:
                call, sets = build(jax.random.key(0), shape, copies)
                seconds = timing.seconds_per_call(call, sets, rounds=rounds)
            except Exception as error:  # a peer that cannot run a shape is a result, not the end
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                base = seconds if base is None else base
                row |= {
                    "us": seconds * 1e6,
                    "tflops": shape.flops / seconds / 1e12,
                    "speedup_vs_xla_bf16": base / seconds,
                }
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict) -> str:
    head = f"{row['shape']:>22}  {row['route']:<28}"
    if "error" in row:
        return f"{head} {row['error'][:80]}"
    us, tflops, speedup = row["us"], row["tflops"], row["speedup_vs_xla_bf16"]
    return f"{head} {us:10.1f} us {tflops:8.2f} TF {speedup:6.2f}x"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--shapes", nargs="+", type=cases.Shape.parse, help="MxKxN or MxKxNrR", default=None
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, help="where the result is written")
    args = parser.parse_args(argv)
    rows = run(args.shapes or list(cases.PREFILL), tuple(args.formats), args.rounds)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n"
        )
    return 0 if all("error" not in r for r in rows if r["route"].startswith("matmul")) else 1


if __name__ == "__main__":
    sys.exit(main())
