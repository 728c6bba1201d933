"""Runs parts of the self-test with a seeded bug: python selftest_child.py BUG [--reference] ...

The bugs stand for a kernel that reads, multiplies or finishes wrongly. Without a GPU (--reference)
the parts run on the jnp reference.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from jax_w4a4.selftest import parts, probes


def _swapped(array: np.ndarray, axis: int, a: int, b: int) -> np.ndarray:
    out = array.copy()
    index = [slice(None)] * array.ndim
    index[axis] = [a, b]
    other = [slice(None)] * array.ndim
    other[axis] = [b, a]
    out[tuple(index)] = array[tuple(other)]
    return out


def _operand(name: str, change):
    """gemm on an operand that is changed, where it has two rows and columns and more."""

    def wrong(self, call, variant):
        array = call.arrays.get(name)
        if array is not None and min(array.shape) > 1:
            call = parts.dataclasses.replace(call, arrays={**call.arrays, name: change(array)})
        return right(self, call, variant)

    return wrong


def _result(change):
    return lambda self, call, variant: change(right(self, call, variant), call)


def _truncated(bits: np.ndarray, call: probes.Call) -> np.ndarray:
    """The cast to bfloat16 cuts instead of rounding."""
    exact = np.asarray(call.want, np.float32).view(np.uint32)
    return np.where(exact & 0xFFFF, exact >> 16, bits).astype(np.uint16)


def _hang(self, call, variant):
    if call.rank == 128:
        time.sleep(3600)
    return right(self, call, variant)


def _gpu_hang(self, call, variant):
    if call.rank == 128:
        import jax
        import jax.numpy as jnp

        spin = jax.jit(lambda x: jax.lax.while_loop(lambda v: v[0] >= 0, lambda v: v * 0, x))
        spin(jnp.zeros(2)).block_until_ready()
    return right(self, call, variant)


WAITS = [
    "sm90_gemm_v2: role load waits for barrier main empty, stage 3, parity 1 (CTA 7, warp 0)",
    "sm90_gemm_v2: role compute waits for barrier main full, stage 2, parity 0 (CTA 7, warp 4)",
    "sm90_gemm_v2: role compute waits for barrier main full, stage 2, parity 0 (CTA 7, warp 5)",
]


def _stuck(end):
    """A kernel says what it waits for, and a second later it traps."""

    def wrong(self, call, variant):
        if call.rank == 128:
            parts._ffi.stuck_waits = lambda: WAITS
            time.sleep(1.5)
            end()
        return right(self, call, variant)

    return wrong


def _trap():
    raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")


def _crash(self, call, variant):
    if call.rank == 128:
        os.abort()
    return right(self, call, variant)


def _raise(self, call, variant):
    if call.rank == 128:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    return right(self, call, variant)


right = parts.Session.gemm
BUGS = {
    "none": right,
    "token scales of another block": _operand("act_scale", lambda s: _swapped(s, 1, 0, 1)),
    "weight scales of another row": _operand("weight_scale", lambda s: _swapped(s, 0, 0, 5)),
    "k pairs swapped in x": _operand("packed", lambda p: _swapped(p, 1, 3, 4)),
    "ranks swapped in lora_up": _operand("lora_up", lambda u: _swapped(u, 1, 2, 40 % u.shape[1])),
    "results cut": _result(_truncated),
    "hang": _hang,
    "GPU hang": _gpu_hang,
    "crash": _crash,
    "stuck": _stuck(_trap),
    "stuck and crash": _stuck(os.abort),
    "slow": _stuck(lambda: None),
    "error": _raise,
}


def main() -> None:
    bug = sys.argv.pop(1)
    reference = "--reference" in sys.argv
    if reference:
        sys.argv.remove("--reference")
        # Kinds differ in nothing here; one of each format keeps the tests short.
        parts.KINDS = probes.KINDS[:9:3]
    parts.Session.gemm = BUGS[bug]
    make = (lambda: parts.Session(None)) if reference else parts.Session.here
    parts.main(make)


if __name__ == "__main__":
    main()
