"""Writes goldens_h200.npz: what an H200 computes for the cases of goldens.py and of probes.py.

  python tests/emulator/dump_goldens.py [--out FILE]

Needs the installed package with its kernels, nvcc and the GPU. test_goldens.py compares the
emulator with the file.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# At the end: the installed package comes before the source tree, which has no extension module.
sys.path += [str(HERE), str(HERE.parents[1])]

import goldens  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import probes  # noqa: E402

from emulator import product, toolchain  # noqa: E402
from jax_w4a4 import formats, primitives  # noqa: E402


def run_product(case: product.Case) -> dict[str, np.ndarray]:
    """Bits of the results of one case, from the GPU."""
    operands = product.make_operands(case)
    scale_dtype = product.SCALE_DTYPES[case.format]
    spec = formats.Spec(
        case.format, case.k, case.k_pad, case.k_pad // case.blocks, scale_dtype,
        act_unsigned=case.act_unsigned, act_rule=case.rule,
    )  # fmt: skip
    params = {"spec": spec, "plan": product.plan_of(case), "implementation": "cuda"}

    def array(name: str, dtype: str, shape: tuple[int, ...]) -> jax.Array:
        if name not in operands:
            return jnp.zeros(shape, dtype)
        return jnp.asarray(operands[name].view(getattr(ml_dtypes, dtype, dtype)))

    weight = (
        array("weight", "uint8", ()),
        array("weight_scale", scale_dtype, ()),
        array("weight_global_scale", "float32", (0,)),
        array("lora_up", "bfloat16", (case.n, 0)),
        array("channel_scale", "float32", (0,)),
        array("bias", "float32", (0,)),
    )
    act_global = array("act_global_scale", "float32", (0,))
    if case.fused:
        f = jax.jit(lambda *ops: primitives.matmul_p.bind(*ops, **params))
        y, _, _, lora_act, *private = f(
            array("x", "bfloat16", ()),
            array("smooth", "float32", (0,)),
            act_global,
            array("lora_down", "bfloat16", (case.k, 0)),
            *weight,
        )
    else:
        f = jax.jit(lambda *ops: primitives.gemm_p.bind(*ops, **params))
        y, *private = f(
            array("packed", "uint8", ()),
            array("act_scale", scale_dtype, ()),
            act_global,
            array("lora_act", "bfloat16", (case.m, 0)),
            *weight,
        )
        lora_act = None
    act, token_scale, rows = map(np.asarray, private)
    out = {
        "y": np.asarray(y).view(np.uint16),
        "act": act,
        "token_scale": token_scale[: case.m if token_scale.size else 0],
        "rows": rows.view(np.uint32),
    }
    if lora_act is not None and case.rank:
        out["lora_act"] = np.asarray(lora_act).view(np.uint16)
    return out


def run_probes(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Every probe in one run of the program."""
    program = folder / "probes"
    subprocess.run(
        [toolchain.NVCC, "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++17",
         "-DW4A4_PROBE_MAIN", f"-I{toolchain.CUDA}", probes.SOURCE, "-o", program],
        check=True,
    )  # fmt: skip
    every = list(probes.probes())
    (folder / "in").write_bytes(b"".join(p.serialized() for p in every) + b"\xff\xff\xff\xff")
    subprocess.run([program, folder / "in", folder / "out"], check=True)
    raw = np.frombuffer((folder / "out").read_bytes(), np.uint8)
    out, at = {}, 0
    for probe in every:
        out[probe.name] = raw[at : at + probe.out_bytes]
        at += probe.out_bytes
    if at != raw.size:
        raise RuntimeError(f"the probes wrote {raw.size} bytes; expected {at}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=goldens.FILE)
    args = parser.parse_args()
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as name:
        for probe, bits in run_probes(pathlib.Path(name)).items():
            found[f"probe/{probe}"] = bits
    print(f"{len(found)} probes")
    for case in goldens.CASES:
        operands = product.make_operands(case)
        results = run_product(case)
        again = run_product(case)
        for key, value in results.items():
            if value.tobytes() != again[key].tobytes():
                raise RuntimeError(f"{case}: two runs differ in {key}")
            found[f"case/{case}/{key}"] = value
        found[f"case/{case}/operands"] = np.array(goldens.digest(operands))
        print(case)
    np.savez_compressed(args.out, device=np.array(jax.devices()[0].device_kind), **found)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
