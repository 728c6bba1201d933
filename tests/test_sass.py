"""The machine code of the compiled kernels: the loops hold the MMAs they must and nothing spills.

ptxas_gate.py stops a build that spills or serializes; what it cannot see is a loop that the
compiler unrolled, split or emptied. Needs the compiled package and cuobjdump (CUDA toolkit).
"""

import collections
import re
import shutil
import subprocess

import pytest
from absl.testing import parameterized

from jax_w4a4 import _ffi
from jax_w4a4.plan import budget

CUOBJDUMP = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")

needs_kernels = pytest.mark.skipif(
    not _ffi.has_cuda() or CUOBJDUMP is None, reason="needs the compiled package and cuobjdump"
)

pytestmark = pytest.mark.matrix

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ +)?(\S+)(.*?);")
BRANCH = re.compile(r"\b0x([0-9a-f]+)")
MMA = re.compile(r"([HQI]GMMA)\.64x(\d+)x(\d+)\.(\S+)")
GEMM = re.compile(r"gemm_v2_kernelINS0_\d+([A-Za-z0-9]+?)(?:ILi(\d+)EE)?ELi(\d+)ELi(\d+)EE")
GROUPED = re.compile(r"grouped_kernelINS0_\d+([A-Za-z0-9]+?)ELi(\d+)EE")
BLACKWELL = re.compile(r"sm100\d+gemm_kernelILi(\d)ELi(\d+)ELi(\d+)EE")
DECODE = re.compile(r"decode_kernelINS0_\d+([A-Za-z0-9]+?)ELi(\d+)ELi(\d+)EE")
DOWN = re.compile(r"down_v2_kernelILi(\d+)ELi(\d+)ELi(\d+)EE")
# operand of V2Path -> what the instruction is called
OPCODES = {
    "e5m2": ("QGMMA", "F32.E5M2.E5M2"),
    "e4m3": ("QGMMA", "F32.E4M3.E4M3"),
    "bf16": ("HGMMA", "F32.BF16"),
    "f16": ("HGMMA", "F32"),
    "s8": ("IGMMA", "S8.S8"),
}


def read_kernels():
    """{(architecture, mangled name): [(address, opcode, rest)]} of what is in the extension; a
    predicate is the end of the rest."""
    dump = subprocess.Popen(
        [CUOBJDUMP, "--dump-sass", _ffi._extension.__file__], stdout=subprocess.PIPE, text=True
    )
    kernels, code, arch = {}, [], ""
    for line in dump.stdout:
        if line.startswith("arch ="):
            arch = line.split("=")[1].strip()
        elif "Function :" in line:
            code = kernels.setdefault((arch, line.split(":")[1].strip()), [])
        elif match := INSTRUCTION.match(line):
            code.append((int(match[1], 16), match[3], match[4] + (match[2] or "")))
    assert dump.wait() == 0
    return kernels


@pytest.fixture(scope="module")
def everything():
    return read_kernels()


@pytest.fixture(scope="module")
def kernels(everything):
    return {name: code for (arch, name), code in everything.items() if arch == "sm_90a"}


def inner_loops(code):
    """The MMAs of every innermost loop that has any: [[(opcode, n, k, types)]]."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    loops = []
    for i, (address, opcode, rest) in enumerate(code):
        target = BRANCH.search(rest) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) <= address:
            first = index[int(target[1], 16)]
            found = [MMA.match(op) for _, op, _ in code[first : i + 1]]
            found = [(m[1], int(m[2]), int(m[3]), m[4]) for m in found if m]
            if found:
                loops.append((first, i, found))
    return [
        found
        for first, last, found in loops
        if not any((f, t) != (first, last) and f >= first and t <= last for f, t, _ in loops)
    ]


def mmas(code):
    return [m for _, op, _ in code if (m := MMA.match(op))]


def roles(code):
    """The opcodes in pieces that end where a thread is through, whatever it is."""
    found = [[]]
    for _, opcode, rest in code:
        found[-1].append(opcode)
        if opcode == "EXIT" and "@" not in rest:
            found.append([])
    return found


def gemm_name(match):
    return f"{match[1]}{match[2] or ''}"


@needs_kernels
class TestGemm:
    def test_every_compiled_instance_is_there(self, kernels):
        seen = collections.Counter()
        for name in kernels:
            if match := GEMM.search(name):
                seen[gemm_name(match), int(match[3]), int(match[4])] += 1
        want = {
            (path.name, tile, cluster): 1
            for path in budget.V2_PATHS.values()
            for tile in path.tiles
            for cluster in (1, 2)
        }
        assert dict(seen) == want

    def test_main_and_lora_loops(self, kernels):
        """A stage is multiplied by tile_k / k instructions of the path's type, LoRA by bf16."""
        paths = {path.name: path for path in budget.V2_PATHS.values()}
        for name, code in kernels.items():
            match = GEMM.search(name)
            if match is None:
                continue
            path, tile = paths[gemm_name(match)], int(match[3])
            opcode, types = OPCODES[path.operand]
            k = 16 if opcode == "HGMMA" else 32
            main = [(opcode, tile, k, types)] * (path.tile_k // k)
            # A stage ahead, in two sets of fragments: a turn of the loop has two stages.
            if tile <= 192 and not path.promote_k and not path.name.startswith("Int4Group"):
                main *= 2
            lora = [("HGMMA", tile, 16, "F32.BF16")] * 2
            loops = inner_loops(code)
            assert main in loops, (name, loops)
            assert lora in loops, (name, loops)
            assert len(mmas(code)) == len(main) + len(lora), name


@needs_kernels
class TestDecode:
    def test_every_compiled_instance_is_there(self, kernels):
        seen = collections.Counter()
        for name in kernels:
            if match := DECODE.search(name):
                seen[match[1], int(match[2]), int(match[3])] += 1
        want = {
            (path, tile, rows): 1
            for path in budget.DECODE_PATHS
            for tile in budget.DECODE_TOKENS
            for rows in ((32, 64, 128) if tile <= 64 else (64, 128))
        }
        assert dict(seen) == want

    def test_main_and_low_rank_loops(self, kernels):
        """A warpgroup's share of a stage of K, all of it in one loop; mxfp4 has a second one for
        blocks that flush (kMayKnow in sm90_decode.cuh). The low-rank product is on mma.sync, and
        LoRA-down, where CTAs of the launch may have it, in a loop over stages of 64 k; with 128
        tokens there is one more for several tiles."""
        for name, code in kernels.items():
            match = DECODE.search(name)
            if match is None:
                continue
            path = budget.V2_PATHS[match[1]]
            opcode, types = OPCODES[path.operand]
            k = 16 if opcode == "HGMMA" else 32
            tokens, rows = int(match[2]), int(match[3])
            _, groups, boxes = budget.decode_shape(tokens, rows)
            main = [(opcode, tokens, k, types)] * (256 * boxes // groups // k)
            loops = 2 if path.operand == "e5m2" and rows > 32 else 1
            # kWholeRecords: a round of two records of four MMAs, which are two stages where a stage
            # has one. A wait out of line jumps back between them.
            whole = tokens > 16 and rows > 32 and path.operand in ("e5m2", "s8")
            turn = main * 2 if whole and len(main) == 4 else main
            many = (128, budget.DOWN_AHEAD_MMA_TOKENS)
            widths = {32: (64,), 64: (64,), 96: many, 128: many}
            downs = [[("HGMMA", n, 16, "F32.BF16")] * 4 for n in widths.get(tokens, ())]
            assert all(loop in inner_loops(code) for loop in (turn, *downs)), name
            assert all(loop in (turn, main, *downs) for loop in inner_loops(code)), name
            assert len(mmas(code)) == loops * len(turn) + 4 * len(downs), name
            assert any(op.startswith("HMMA.16816.F32.BF16") for _, op, _ in code), name

    def test_results_of_the_launch_before_are_read_after_the_wait(self, kernels):
        """The add role comes first in the code, and so does its wait; its loads are no loads of
        constants, which ptxas may move. The multiply role reads arguments only and has no wait, but
        where it has all of K: then ranks past 32 of lora_act, by relaxed loads as everywhere."""
        for name, code in kernels.items():
            if match := DECODE.search(name):
                opcodes = [op for _, op, _ in code]
                wait = opcodes.index("ACQBULK")
                loads = [i for i, op in enumerate(opcodes) if re.match(r"LDG\b", op)]
                # What the rows' inputs are made of is asked for ahead of the barrier of all roles:
                # arguments, and constants as far as ptxas knows.
                first = [i for i in loads if i < wait]
                barrier = next(i for i, op in enumerate(opcodes) if op.startswith("BAR.SYNC"))
                assert all(i < barrier and "CONSTANT" in opcodes[i] for i in first), name
                after = next(i for i in loads if i > wait)
                assert "CONSTANT" not in opcodes[after], name
                tokens, rows = int(match[2]), int(match[3])
                readers = 0
                before = []
                for role in roles(code):
                    relaxed = [i for i, op in enumerate(role) if re.match("LDG.*STRONG", op)]
                    if relaxed:
                        # Of LoRA-down all CTAs wait, and all but the last are through ahead of it.
                        assert "ACQBULK" in before + role[: relaxed[0]], name
                        readers += 1
                    stores = any(re.match("STG.*STRONG", op) for op in role)
                    before = role if stores and not relaxed else []
                # The add role, CTAs of LoRA-down, of several tiles too, and the multiply role.
                alone = budget.decode_shape(tokens, rows)[1] == 1
                ahead = tokens >= budget.DOWN_AHEAD_LEAST_TILE_M
                several = tokens >= budget.DECODE_PAIR_TOKENS
                assert readers == 1 + ahead + several + alone, name


@needs_kernels
class TestGrouped:
    def test_every_compiled_instance_is_there(self, kernels):
        seen = sorted((m[1], int(m[2])) for name in kernels if (m := GROUPED.search(name)))
        paths = budget.V2_PATHS.values()
        assert seen == sorted((path.name, tile) for path in paths for tile in path.grouped_tiles)

    def test_main_loop(self, kernels):
        for name, code in kernels.items():
            if match := GROUPED.search(name):
                path = budget.V2_PATHS[match[1]]
                opcode, types = OPCODES[path.operand]
                k = 16 if opcode == "HGMMA" else 32
                main = [(opcode, int(match[2]), k, types)] * (path.tile_k // k)
                assert main in inner_loops(code), name


@needs_kernels
class TestDependentLaunch:
    def test_nothing_is_read_before_the_wait(self, kernels):
        """A load of constants (.nc) may move in front of it: once a gemm took its number of tiles
        from the call before."""
        seen = 0
        for name, code in kernels.items():
            if GEMM.search(name) or GROUPED.search(name):
                opcodes = [op for _, op, _ in code]
                wait = opcodes.index("ACQBULK")
                early = [op for op in opcodes[:wait] if op.startswith(("LDG", "LD.", "UTMALDG"))]
                assert not early, (name, early)
                seen += 1
        assert seen


@needs_kernels
class TestDown:
    def test_loop(self, kernels):
        """64 K of a stage are four instructions for every 64 ranks of a warpgroup."""
        found = {}
        for name, code in kernels.items():
            if match := DOWN.search(name):
                (loop,) = {tuple(loop) for loop in inner_loops(code)}
                found[tuple(map(int, match.groups()))] = loop
                assert len(mmas(code)) == len(loop), name
        assert found == {
            (groups, tiles, tokens): (("HGMMA", tokens, 16, "F32.BF16"),) * (4 * tiles)
            for groups, tiles in ((1, 1), (2, 1), (2, 2))
            for tokens in (16, 72)
        }


@needs_kernels
class TestBlackwell:
    @pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
    def test_tensor_instructions(self, everything, arch):
        """Each once: the four MMAs of a stage, of both kinds, and the copies of its scale factors.
        A loop around an MMA, as a compiler makes it of what is not uniform, would show as more."""
        if arch.removeprefix("sm_") not in _ffi.build_info()["cuda_archs"]:
            pytest.skip("not built for it")
        seen = set()
        for (built_for, name), code in everything.items():
            match = BLACKWELL.search(name)
            if match is None or built_for != arch:
                continue
            group, tile_n, block = map(int, match.groups())
            seen.add((128 * group, tile_n, group, block))
            count = collections.Counter(op.split(".")[0] for _, op, _ in code)
            atoms = 256 // block // 4
            assert count["UTCOMMA"] == count["UTCHMMA"] == 4, name
            assert count["UTCCP"] == atoms * (1 + -(-tile_n // 128)), name
            opcodes = [op for _, op, _ in code]
            early = opcodes[: opcodes.index("ACQBULK")]
            assert not [op for op in early if op.startswith(("LDG", "LD.", "UTMALDG"))], name
        tiles = budget.DESIGNS["sm100_v2"].tiles
        assert seen == {(*tile, block) for tile in tiles for block in (16, 32)}


@needs_kernels
class TestLocalMemory:
    def test_no_kernel_uses_it(self, everything):
        for name, code in everything.items():
            assert not [op for _, op, _ in code if op.startswith(("LDL", "STL"))], name


class TestLoopReader(parameterized.TestCase):
    """The reader must see an unrolled and an emptied loop as what they are."""

    CODE = [
        (0x00, "QGMMA.64x200x32.F32.E4M3.E4M3", " R24"),
        (0x10, "QGMMA.64x200x32.F32.E4M3.E4M3", " R24"),
        (0x20, "BRA", " 0x0"),
        (0x30, "HGMMA.64x200x16.F32.BF16", " R24"),
        (0x40, "BRA", " 0x30"),
        (0x50, "BRA", " 0x0"),
        (0x60, "BRA", " 0x70"),
    ]

    def test_roles(self):
        code = [(0x00, "LDG.E", ""), (0x10, "EXIT", "@P0 "), (0x20, "EXIT", ""), (0x30, "BRA", "")]
        self.assertEqual(roles(code), [["LDG.E", "EXIT", "EXIT"], ["BRA"]])

    def test_inner_loops(self):
        one, two = inner_loops(self.CODE)
        self.assertEqual(one, [("QGMMA", 200, 32, "F32.E4M3.E4M3")] * 2)
        self.assertEqual(two, [("HGMMA", 200, 16, "F32.BF16")])
