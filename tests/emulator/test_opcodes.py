"""The static gate: the emulator knows every instruction of every kernel of the project."""

import re
import tempfile

import pytest
from absl.testing import parameterized

from emulator import ptx, toolchain
from emulator.__main__ import main
from emulator.compile import Code
from jax_w4a4 import plan

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(toolchain.NVCC is None, reason="needs nvcc"),
]

PATHS = plan.budget.V2_PATHS
GEMMS = [toolchain.gemm_v2_name(name, 64) for name in PATHS]
QUANTIZERS = [toolchain.quantize_v2_name(name) for name in toolchain.QUANTIZE_V2_PATHS]
# The largest tile: of one path for each operand in every run, of the rest with -m slow.
FIRST = {path.operand: name for name, path in reversed(PATHS.items())}.values()
LARGEST = [toolchain.gemm_v2_name(name, max(PATHS[name].tiles)) for name in FIRST]
OTHERS = [toolchain.gemm_v2_name(n, max(PATHS[n].tiles)) for n in PATHS if n not in FIRST]
# Of the others there are host functions only.
PLAIN = [f"sm90_{name}.cu" for name in (
    "gemm_v1", "quantize_v1", "quantize_public", "down_v2", "repack_v2",
)]  # fmt: skip
# Tokens in registers: the smallest shape has the opcodes of all.
SMALLEST = re.compile(
    "quantize_(v2_|public_)?kernel.*ELi4ELi4E|^(?!.*quantize_(v2_|public_)?kernel)"
)


class Gate(parameterized.TestCase):
    def gate(self, source):
        text = toolchain.product_ptx(source)
        names = re.findall(r"\.entry (\w+)", text)
        self.assertTrue(names)
        for name in names:
            kernel = ptx.parse(text, only=name).kernels[name]
            self.assertTrue(Code(kernel).nodes)

    @parameterized.parameters(*GEMMS, *LARGEST, *QUANTIZERS, *PLAIN)
    def test_all(self, source):
        self.gate(source)

    @pytest.mark.slow
    @parameterized.parameters(*OTHERS)
    def test_largest(self, source):
        self.gate(source)

    @parameterized.product(
        source=(*sorted(path.name for path in toolchain.CUDA.glob("sm100_*.cu")), *PLAIN[:3]),
        arch=("sm_100a", "sm_103a"),
    )
    def test_blackwell(self, source, arch):
        """Its own kernels, and v1 as it is compiled for these chips."""
        built = arch == toolchain.arch_of(source)  # the launch code's library has it
        text = toolchain.product_ptx(source) if built else toolchain.ptx_of(source, arch)
        self.assertIn(f".target {arch}", text)
        names = [n for n in re.findall(r"\.entry (\w+)", text) if SMALLEST.search(n)]
        self.assertTrue(names)
        for name in names:
            self.assertTrue(Code(ptx.parse(text, only=name).kernels[name]).nodes)

    def test_command_fails_on_an_unknown_opcode(self):
        text = toolchain.product_ptx("sm90_repack_v2.cu").replace(
            "redux.sync.max", "redux.sync.mix"
        )
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(text)
            file.flush()
            self.assertEqual(main(["--check", file.name]), 1)
