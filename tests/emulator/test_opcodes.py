"""The static gate: the emulator knows every instruction of every kernel of the project."""

import tempfile

import pytest
import sm100
from absl.testing import parameterized

from emulator import ptx, toolchain
from emulator.__main__ import main
from emulator.compile import Code
from jax_w4a4 import plan

pytestmark = pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc")

SOURCES = [
    *(
        toolchain.gemm_v2_name(name, tile)
        for name, path in plan.budget.V2_PATHS.items()
        for tile in (min(path.tiles), max(path.tiles))
    ),
    *sorted(path.name for path in toolchain.CUDA.glob("*.cu") if path.name != "sm90_gemm_v2.cu"),
]


class Gate(parameterized.TestCase):
    @parameterized.parameters(*SOURCES)
    def test_product(self, source):
        module = ptx.parse(toolchain.product_ptx(source))
        self.assertTrue(module.kernels)
        for kernel in module.kernels.values():
            self.assertTrue(Code(kernel).nodes)

    @parameterized.parameters("sm_100a", "sm_103a")
    def test_blackwell(self, arch):
        flags = [f"-I{sm100.SOURCE.parent}"]
        module = ptx.parse(toolchain.ptx_of(sm100.SOURCE, arch, flags))
        self.assertEqual(module.target, arch)
        for kernel in module.kernels.values():
            self.assertTrue(Code(kernel).nodes)

    def test_command_fails_on_an_unknown_opcode(self):
        text = toolchain.product_ptx("sm90_repack_v2.cu").replace(
            "redux.sync.max", "redux.sync.mix"
        )
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(text)
            file.flush()
            self.assertEqual(main(["--check", file.name]), 1)
