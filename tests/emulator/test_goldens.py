"""The emulator gives the bits that an H200 gave (dump_goldens.py writes the file)."""

import functools

import goldens
import numpy as np
import probes
import pytest
from absl.testing import parameterized

from emulator import Options, product, toolchain

pytestmark = [
    pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc"),
    pytest.mark.skipif(not goldens.FILE.exists(), reason="no golden file"),
]
HOPPER = Options(numerics="hopper")


@functools.cache
def stored():
    return dict(np.load(goldens.FILE))


class Goldens(parameterized.TestCase):
    @parameterized.named_parameters((p.name, p) for p in probes.probes())
    def test_probe(self, probe):
        got = probes.emulate(probe, HOPPER)
        want = stored()[f"probe/{probe.name}"]
        if probe.name == "scalars":
            # Which NaN an instruction gives does not matter to any kernel.
            got, want = (np.nan_to_num(v.view(np.float32), nan=np.pi) for v in (got, want))
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))

    @parameterized.named_parameters((str(c), c) for c in goldens.CASES)
    def test_case(self, case):
        operands = product.make_operands(case)
        if str(stored()[f"case/{case}/operands"]) != goldens.digest(operands):
            self.fail("the operands are not those of the golden file; dump it again")
        result = product.run(case, HOPPER, operands=operands)
        for name in goldens.RESULTS:
            key = f"case/{case}/{name}"
            if key in stored():
                got = getattr(result, name)
                want = stored()[key].reshape(got.shape).view(got.dtype)
                np.testing.assert_array_equal(got, want, name)
