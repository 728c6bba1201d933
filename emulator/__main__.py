"""Runs a kernel of the project in the emulator and checks every cell of its result.

  python -m emulator --kernel sm90_gemm_v2 --format mxfp4 --shape 70x416x264 --rank 48 --seeds 3
  python -m emulator --check some.ptx

Shapes are MxKxN. Every policy runs with every seed; a schedule that fails is printed with the
arguments that repeat it. --trace prints what happens: launches, barriers, copies as they are issued
and as their pieces land, MMAs, exits, with warp and line of the PTX.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from emulator import EmulationError, Options, ptx
from emulator.compile import Code
from emulator.scheduler import POLICIES

KERNELS = {
    "sm90_gemm_v1": "the plain gemm",
    "sm90_gemm_v2": "repack of packed codes, then the gemm",
    "sm90_quantize_v2": "the quantizer from x, LoRA-down before it, then the gemm",
    "sm100_gemm": "the scale factors' launch, then the gemm",
    "sm100_quantize": "the quantizer from x, LoRA-down before it, then the gemm",
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m emulator", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--kernel", choices=KERNELS, default="sm90_gemm_v2")
    p.add_argument("--format", choices=("mxfp4", "nvfp4", "int4"), default="mxfp4")
    p.add_argument("--precision", choices=("fastest", "highest"))
    p.add_argument("--block", type=int, default=0, help="of int4: 64, 128; 0: all of K")
    p.add_argument("--prepared", action="store_true", help="the weight's signs sorted; of mxfp4")
    p.add_argument("--shape", default="70x416x264", help="MxKxN")
    p.add_argument("--rank", type=int, default=0)
    p.add_argument("--cluster", type=int, default=1, choices=(1, 2), help="CTAs per cluster")
    p.add_argument("--tile-n", type=int, default=128, help="of sm100")
    p.add_argument("--clusters", type=int, default=2, help="clusters that run at once")
    p.add_argument("--stages", type=int, help="of the main ring; default: the planner's")
    p.add_argument("--exact", action="store_true", help="data whose sums are exact")
    p.add_argument("--policy", choices=POLICIES, action="append", help="default: all")
    p.add_argument("--seeds", type=int, default=1, help="how many")
    p.add_argument("--seed", type=int, default=0, help="the first of them")
    p.add_argument("--numerics", choices=("exact", "hopper"), default="exact")
    p.add_argument("--trace", action="store_true", help="print synchronisation and copies")
    p.add_argument("--check", nargs="+", metavar="PTX", help="only check that opcodes are known")
    return p


def check(paths: Sequence[str]) -> int:
    """The static gate: every instruction of every kernel must be modelled."""
    failed = 0
    for path in paths:
        try:
            module = ptx.parse(pathlib.Path(path).read_text())
            for kernel in module.kernels.values():
                assert Code(kernel).nodes
        except EmulationError as error:
            failed = 1
            print(f"{path}: {error}")
            continue
        count = sum(len(kernel.instrs) for kernel in module.kernels.values())
        print(
            f"{path}: {module.target}, {len(module.kernels)} kernels, {count} instructions, "
            f"{len(module.opcodes())} opcodes, all known"
        )
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.check:
        return check(args.check)
    from emulator import blackwell, product  # need jax_w4a4 and nvcc

    m, k, n = (int(side) for side in args.shape.split("x"))
    machine = blackwell if args.kernel.startswith("sm100") else product
    if machine is blackwell:
        case = blackwell.Case(
            args.format, m, n, k, args.rank, args.cluster, args.tile_n, args.clusters,
            args.stages, exact=args.exact, fused=args.kernel == "sm100_quantize",
        )  # fmt: skip
    else:
        case = product.Case(
            args.format, m, n, k, args.rank, args.precision, args.block,
            cluster=args.cluster, clusters=args.clusters,
            stages=args.stages, exact=args.exact, fused=args.kernel == "sm90_quantize_v2",
            kernel="sm90_v1" if args.kernel == "sm90_gemm_v1" else "sm90_v2",
            sign_order="sorted" if args.prepared else "linear",
        )  # fmt: skip
    print(f"{case}: {machine.plan_of(case)}")
    trace = (lambda line: print("  " + line)) if args.trace else None
    failed = 0
    for policy in args.policy or POLICIES:
        for seed in range(args.seed, args.seed + args.seeds):
            options = Options(policy=policy, seed=seed, numerics=args.numerics, trace=trace)
            operands = machine.make_operands(case)
            try:
                result = machine.run(case, options, operands=operands)
                worst = machine.check(case, operands, result, args.numerics)
            except (EmulationError, AssertionError) as error:
                failed += 1
                print(f"{policy:7} seed {seed}: {type(error).__name__}: {error}")
                if not args.trace:
                    print(f"    repeat: --policy {policy} --seed {seed} --seeds 1 --trace")
                continue
            print(
                f"{policy:7} seed {seed}: every cell right, largest error {worst:.2f} of its "
                f"bound; {result.instructions} warp instructions in {result.seconds:.2f} s"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
