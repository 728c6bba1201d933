"""The compiled side without a GPU: absence of the extension, ABI check, arithmetic, plan checks.

The format functions and the plan checks of cuda/ are plain C++. They are compiled here for the CPU,
so that what the kernels compute and refuse is defended on machines without a GPU.
"""

import contextlib
import ctypes
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
from unittest import mock

import gpu_parity
import jax
import jax.numpy as jnp
import ml_dtypes
import model
import numpy as np
import pytest
from absl.testing import parameterized

from jax_w4a4 import _ffi, formats, plan, primitives

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
CMAKE = shutil.which("cmake")


# ------------------------------------------------------------------------------------------------
# _ffi.py
# ------------------------------------------------------------------------------------------------


class FfiApi(parameterized.TestCase):
    """Handlers built against newer headers than the running jaxlib are refused before they are
    registered: registering them would break the whole backend."""

    @parameterized.parameters(((0, 3), (0, 3)), ((0, 3), (0, 4)), ((0, 3), (0, 5)))
    def test_same_or_older_headers_pass(self, built, running):
        _ffi.check_ffi_api(built, running)

    @parameterized.parameters(
        ((0, 4), (0, 3)), ((0, 9), (0, 5)), ((1, 0), (0, 9)), ((0, 3), (1, 0))
    )
    def test_newer_headers_and_other_majors_are_refused(self, built, running):
        with self.assertRaisesRegex(ImportError, "jax_w4a4: .*headers.*Upgrade jaxlib, or rebuild"):
            _ffi.check_ffi_api(built, running)

    def test_running_version_is_that_of_the_headers(self):
        major, minor = _ffi.running_ffi_api()
        self.assertEqual(major, 0)
        self.assertGreaterEqual(minor, 3)

    def test_build_requirement_is_the_oldest_supported_jaxlib(self):
        text = (ROOT / "pyproject.toml").read_text()
        build = re.search(r'"jaxlib==(\d+\.\d+)\.\*"', text).group(1)
        oldest = re.search(r'"jaxlib>=(\d+\.\d+)', text).group(1)
        self.assertEqual(build, oldest)


def fake_extension(ffi_api):
    return types.SimpleNamespace(
        build_info=lambda: {"ffi_api": ffi_api},
        registrations=lambda: {"a.v1": {"execute": object()}, "b.v1": {"execute": object()}},
    )


class Registration(parameterized.TestCase):
    """`register` runs the check first, registers each target once, and is idempotent."""

    def register(self, extension):
        with (
            mock.patch.object(_ffi, "_extension", extension),
            mock.patch.object(_ffi, "_registered", False),
            mock.patch.object(jax.ffi, "register_ffi_target") as registered,
        ):
            try:
                _ffi.register()
                _ffi.register()
            finally:
                self.names = [call.args[0] for call in registered.call_args_list]

    def test_each_target_once(self):
        self.register(fake_extension((0, 3)))
        self.assertEqual(self.names, ["a.v1", "b.v1"])

    def test_nothing_is_registered_after_a_failed_check(self):
        with self.assertRaises(ImportError):
            self.register(fake_extension((0, 99)))
        self.assertEqual(self.names, [])

    def test_cpu_package_registers_nothing(self):
        self.register(None)
        self.assertEqual(self.names, [])


WITHOUT_EXTENSION = """
import sys
sys.modules["jax_w4a4._cuda"] = None
import jax.numpy as jnp
from jax_w4a4 import _ffi
from jax_w4a4.matmul import matmul
from jax_w4a4.weight import Weight

assert not _ffi.has_cuda() and _ffi.KERNELS == frozenset(), _ffi.KERNELS
info = _ffi.build_info()
assert info["cuda"] is False and info["checked"] is False, info
assert "CPU package" in info["reason"], info
for f in (_ffi.counters, _ffi.last_launch, lambda: _ffi.set_dependent_launch(True)):
    try:
        f()
    except RuntimeError as error:
        assert "no CUDA kernels here" in str(error), error
    else:
        raise AssertionError("no error from the CPU package")
ones = jnp.full((3, 16), 0x22, jnp.uint8)  # code 2 is 1.0
w = Weight.from_packed(ones, jnp.ones((3, 2), jnp.float8_e4m3fn), format="nvfp4")
y = matmul(jnp.ones((2, 32), jnp.float32), w)
assert (abs(y - 32) < 2).all(), y
print("works")
"""

BROKEN_EXTENSION = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "jax_w4a4._cuda":
            raise ImportError("libexample.so.1: cannot open shared object file")
sys.meta_path.insert(0, Broken())
from jax_w4a4 import _ffi
"""


class Extension(parameterized.TestCase):
    """The package with, without and with a broken extension."""

    def test_without_extension_the_package_works_and_says_so(self):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_EXTENSION], capture_output=True, text=True
        )
        self.assertEqual(done.stdout.strip(), "works", done.stderr)

    def test_a_broken_extension_is_not_taken_for_a_cpu_package(self):
        done = subprocess.run(
            [sys.executable, "-c", BROKEN_EXTENSION], capture_output=True, text=True
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("libexample.so.1", done.stderr)

    def test_build_info_agrees_with_has_cuda(self):
        info = _ffi.build_info()
        self.assertEqual(info["cuda"], _ffi.has_cuda())
        self.assertEqual(bool(info["reason"]), not _ffi.has_cuda())
        self.assertEqual(frozenset(info["kernels"]), _ffi.KERNELS)

    def test_compiled_extension(self):
        if not _ffi.has_cuda():
            self.skipTest("CPU package")
        info = _ffi.build_info()
        self.assertIn("90a", info["cuda_archs"])
        hopper = {"sm90_v1", "sm90_v2", "sm90_decode", "sm90_grouped"}
        blackwell = {"sm100_v1", "sm100_v2"} if "100a" in info["cuda_archs"] else set()
        self.assertEqual(_ffi.KERNELS, hopper | blackwell)
        self.assertRegex(info["nvcc"], r"^\d+\.\d+")
        self.assertLessEqual(info["ffi_api"], _ffi.running_ffi_api())
        self.assertEqual(set(_ffi._extension.registrations()), set(primitives.FFI_TARGETS.values()))
        self.assertEqual(set(_ffi.counters()), {"calls", "captured"})

    def test_extension_needs_no_cuda_library(self):
        if not _ffi.has_cuda() or shutil.which("readelf") is None:
            self.skipTest("CPU package, or no readelf")
        listing = subprocess.run(
            ["readelf", "-d", _ffi._extension.__file__], capture_output=True, text=True, check=True
        ).stdout
        needed = re.findall(r"NEEDED.*\[(.*)\]", listing)
        self.assertIn("libc.so.6", needed)
        self.assertEqual([lib for lib in needed if "cuda" in lib], [])


@pytest.mark.skipif(CMAKE is None, reason="needs cmake")
class CMakeOption(parameterized.TestCase):
    """JAX_W4A4_CUDA decides, loudly: no silent CPU package where kernels were demanded."""

    def configure(self, *options):
        with tempfile.TemporaryDirectory() as build:
            return subprocess.run(
                [CMAKE, "-S", str(ROOT), "-B", build, f"-DPython_EXECUTABLE={sys.executable}"]
                + list(options),
                capture_output=True,
                text=True,
            )

    def test_off_is_the_cpu_package_and_says_so(self):
        done = self.configure("-DJAX_W4A4_CUDA=OFF")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("CPU package, no CUDA kernels", done.stdout)

    def test_unknown_value_is_an_error(self):
        done = self.configure("-DJAX_W4A4_CUDA=MAYBE")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("expected AUTO, ON or OFF", done.stderr)


class ParityDriver(parameterized.TestCase):
    """The GPU parity driver itself, on the reference: it accepts right results and no others."""

    cell = gpu_parity.Cell("int4", 5, 9, 20, 50, out_dtype="float32", act_unsigned=True)

    def test_accepts_the_reference(self):
        self.assertEqual(gpu_parity.run_cell(self.cell, implementation=None)["failures"], [])

    def test_notices_a_wrong_product(self):
        exact = model.gemm_f64
        with mock.patch.object(model, "gemm_f64", lambda *a, **k: exact(*a, **k) * (1 + 1e-4)):
            failures = gpu_parity.run_cell(self.cell, implementation=None)["failures"]
        self.assertRegex(" ".join(failures), "y is .* x its error bound off")

    def test_notices_a_wrong_code(self):
        exact = model.pack
        with mock.patch.object(model, "pack", lambda codes: exact(codes) ^ 1):
            failures = gpu_parity.run_cell(self.cell, implementation=None)["failures"]
        self.assertRegex(" ".join(failures), "packed bytes .* differ from the model")


# ------------------------------------------------------------------------------------------------
# C++ on the CPU
# ------------------------------------------------------------------------------------------------


def compiled_tiles(kind="GEMM_V2"):
    """Token tiles of a kernel that CMake compiles, by path."""
    text = (ROOT / "CMakeLists.txt").read_text()
    lines = re.search(rf"set\(W4A4_{kind}_TILES\n(.*?)\)", text, re.S).group(1)
    words = [line.strip(' "').split() for line in lines.splitlines()]
    return {path: sorted(map(int, tiles)) for path, *tiles in words}


def compiled_decode_tiles():
    """The same of the decode kernel."""
    text = (ROOT / "CMakeLists.txt").read_text()
    body = re.search(r"set\(decode_kernels.*?\nendforeach", text, re.S).group()
    paths, tiles = re.findall(r"IN ITEMS ([\w ]+)\)", body)
    return {path: sorted(map(int, tiles.split())) for path in paths.split()}


def kind_of(mode):
    """What makes a call of it: a precision, or "prepared" for a weight whose signs are sorted."""
    return {"sign_order": "sorted"} if mode == "prepared" else {"precision": mode}


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("host") / "libhost.so"
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
    command += ["-Wall", "-Wextra", "-Werror", f"-I{CUDA}", f"-isystem{jax.ffi.include_dir()}"]
    for name, compiled in (
        ("GEMM_V2", compiled_tiles()),
        ("GROUPED", compiled_tiles("GROUPED")),
        ("DECODE", compiled_decode_tiles()),
    ):
        pairs = [(path, tile) for path, tiles in compiled.items() for tile in tiles]
        kernels = " ".join(f"W4A4_KERNEL({path}, {tile})" for path, tile in pairs)
        command += [f"-DW4A4_{name}_KERNELS={kernels}"]
    command += [str(ROOT / "tests" / "host_checks.cc"), str(CUDA / "plan.cc"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.usefixtures("host_library")
class HostTest(parameterized.TestCase):
    @pytest.fixture(autouse=True)
    def _library(self, host_library):
        self.lib = host_library


DECODE_KINDS = {"e2m1": 0, "s4": 1, "u4": 2, "e4m3": 3, "e8m0": 4, "float16": 5, "bfloat16": 6}
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e8m0fnu": 4}


class FormatFunctions(HostTest):
    """cuda/formats.cuh, the very functions of the kernels, against tables: every code and scale."""

    def decode(self, kind, codes):
        codes = np.ascontiguousarray(codes, np.uint32)
        out = np.empty(codes.shape, np.float32)
        size = ctypes.c_int64(codes.size)
        self.lib.Decode(DECODE_KINDS[kind], pointer(codes), pointer(out), size)
        return out

    def encode(self, kind, values):
        values = np.ascontiguousarray(values, np.float32)
        out = np.empty(values.shape, np.uint32)
        size = ctypes.c_int64(values.size)
        self.lib.Encode(DECODE_KINDS[kind], pointer(values), pointer(out), size)
        return out

    def test_decode_codes(self):
        codes = np.arange(16)
        e2m1 = np.concatenate([model.E2M1, -model.E2M1]).astype(np.float32)
        self.assertEqual(self.decode("e2m1", codes).tobytes(), e2m1.tobytes())
        np.testing.assert_array_equal(self.decode("u4", codes), codes)
        np.testing.assert_array_equal(self.decode("s4", codes), (codes ^ 8) - 8)

    def test_decode_every_scale(self):
        byte = np.arange(256, dtype=np.uint8)
        want = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(self.decode("e4m3", byte), want)
        want = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        want[0] = 0  # a subnormal, and those count as zero
        np.testing.assert_array_equal(self.decode("e8m0", byte), want)
        bits = np.arange(65536, dtype=np.uint16)
        want = bits.view(np.float16).astype(np.float32)
        np.testing.assert_array_equal(self.decode("float16", bits), want)
        want = bits.view(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(self.decode("bfloat16", bits), want)

    def test_pack_of_every_product_is_exact(self):
        codes = self.decode("e2m1", np.arange(16))
        for scales in (self.decode("e4m3", np.arange(127)), self.decode("e8m0", np.arange(253))):
            products = np.outer(scales, codes).astype(np.float32)
            products = products[np.isfinite(products).all(axis=1)]
            words = np.empty(products.size // 2, np.uint32)
            self.lib.PackPairs(pointer(products), pointer(words), ctypes.c_int64(words.size))
            unpacked = words.view(ml_dtypes.bfloat16).astype(np.float32)
            self.assertEqual(unpacked.tobytes(), products.tobytes())

    @parameterized.parameters(
        ("e4m3", "float8_e4m3fn", 448),
        ("float16", "float16", 65504),
        ("bfloat16", "bfloat16", 2e38),
    )
    def test_encode_scale_rounds_to_nearest_even(self, kind, dtype, top):
        with np.errstate(invalid="ignore"):
            table = np.sort(model._values_of(model.dtype_of(dtype)))
        table = table[table <= top].astype(np.float32)
        if dtype == "bfloat16":
            table = table[(table == 0) | (table >= model.TINY)]
        # Exact values, ties between neighbours and the floats next to both.
        middle = ((table[1:].astype(np.float64) + table[:-1]) / 2).astype(np.float32)
        points = np.concatenate([table, middle])
        points = np.concatenate(
            [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
        )
        points = model.flush(points[points <= table[-1]])
        got = self.decode(kind, self.encode(kind, points))
        want = table[model._nearest(points, table.astype(np.float64))]
        if dtype == "bfloat16":  # dropping the subnormals shifted the parity of the table's index
            want = points.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(got, want)

    def test_encode_nan(self):
        nan = np.array([np.nan])
        self.assertEqual(self.encode("e4m3", nan)[0], 0x7F)
        self.assertEqual(self.encode("float16", nan)[0], 0x7E00)
        self.assertEqual(self.encode("bfloat16", nan)[0], 0x7FC0)

    def test_encode_e2m1_of_every_bfloat16(self):
        values = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
        values = values[~np.isnan(values)]
        want = model._nearest(np.abs(values), model.E2M1) + 8 * np.signbit(values)
        np.testing.assert_array_equal(self.encode("e2m1", values), want)

    @parameterized.parameters(
        ("nvfp4", 16, "float8_e4m3fn", False, "rceil"),
        ("mxfp4", 32, "float8_e8m0fnu", False, "rceil"),
        ("mxfp4", 32, "float8_e8m0fnu", False, "floor"),
        *itertools.product(
            ["int4"], [32, 64, 128], ["float16", "bfloat16", "float32"], [False, True], ["rceil"]
        ),
    )
    def test_blocks(self, format, block, scale_dtype, unsigned, rule):
        rng = np.random.default_rng(block)
        v = rng.standard_normal((300, block)).astype(np.float32)
        v *= np.exp2(rng.uniform(-140, 126, (300, 1))).astype(np.float32)
        v[:100] = rng.standard_normal((100, block)) * np.exp2(rng.integers(-12, 12, (100, 1)))
        v[0] = 0
        v[1] = -0.0
        v[2, 3] = np.nan
        v[3, 4] = np.inf
        v[4, 5] = -np.inf
        v[5] = -np.abs(v[5])
        v[6] = rng.integers(-7, 8, block)  # codes that fall on ties
        v[7] = np.float32(1e-40)
        v[8, :4] = [np.float32(3e38), -3e38, 1e-40, -1e-40]
        with np.errstate(all="ignore"):
            want_codes, want_bits = model.quantize(
                v,
                format,
                block_size=block,
                scale_dtype=scale_dtype,
                unsigned=unsigned,
                rule=rule,
            )
        codes = np.empty(v.shape, np.uint8)
        bits = np.empty(len(v), np.uint32)
        self.lib.Quantize(
            list(formats.FORMATS).index(format),
            pointer(v),
            ctypes.c_int64(len(v)),
            block,
            DTYPES[scale_dtype],
            int(unsigned),
            formats.ACT_RULES.index(rule),
            pointer(codes),
            pointer(bits),
        )
        np.testing.assert_array_equal(bits, want_bits[:, 0])
        np.testing.assert_array_equal(codes, want_codes[:, :block])


def fields(**values):
    """Bits of a descriptor: name=(value, first bit, width)."""
    word = 0
    for value, first, width in values.values():
        assert 0 <= value < 1 << width
        word |= value << first
    return word


class BlackwellLayout(HostTest):
    """cuda/sm100_layout.h, the kernels' own functions, against the fields that are documented."""

    def setUp(self):
        super().setUp()
        self.lib.OperandDescriptor.restype = self.lib.ScaleDescriptor.restype = ctypes.c_uint64
        self.lib.ScaledInstruction.restype = self.lib.F16Instruction.restype = ctypes.c_uint32
        self.lib.AtomsAlongK.restype = ctypes.c_int64

    @parameterized.parameters((1, 1), (128, 4), (129, 8), (300, 3))
    def test_scale_words(self, rows, atoms):
        """Rows r, r + 32, r + 64, r + 96 of an atom side by side in lane r, four bytes each."""
        out = np.empty((rows, atoms), np.int64)
        self.lib.ScaleWords(ctypes.c_int64(rows), ctypes.c_int64(atoms), pointer(out))
        tiles = -(-rows // 128)
        places = np.arange(tiles * atoms * 128).reshape(tiles, atoms, 32, 4) * 4
        want = places.transpose(0, 3, 2, 1).reshape(tiles * 128, atoms)[:rows]
        np.testing.assert_array_equal(out, want)

    @parameterized.parameters(0x400, 0x1C400, 0x38C00, 0x01000400)
    def test_shared_memory_descriptors(self, address):
        """Addresses in 16 bytes without the CTA's rank; version 1; 128-byte swizzle is 2."""
        start = (address & 0x3FFFF) >> 4, 0, 14
        version = 1, 46, 3
        operand = fields(start=start, stride=(64, 32, 14), version=version, swizzle=(2, 61, 3))
        self.assertEqual(self.lib.OperandDescriptor(ctypes.c_uint32(address)), operand)
        scale = fields(start=start, stride=(8, 32, 14), version=version)
        self.assertEqual(self.lib.ScaleDescriptor(ctypes.c_uint32(address)), scale)

    @parameterized.product(m=(128, 256), n=(64, 128, 256), block=(16, 32), first=(0, 2))
    def test_instruction_descriptors(self, m, n, block, first):
        shape = {"n": (n // 8, 17, 6), "m": (m // 16, 24, 5)}
        e2m1 = 1
        scaled = fields(
            b_scale=(first, 4, 2), a=(e2m1, 7, 3), b=(e2m1, 10, 3), e8m0=(block == 32, 23, 1),
            a_scale=(first, 29, 2), **shape,
        )  # fmt: skip
        self.assertEqual(self.lib.ScaledInstruction(m, n, block, first), scaled)
        for bf16 in (0, 1):
            want = fields(fp32=(1, 4, 2), a=(bf16, 7, 3), b=(bf16, 10, 3), **shape)
            self.assertEqual(self.lib.F16Instruction(m, n, bf16), want)

    @parameterized.product(tile=plan.budget.DESIGNS["sm100_v2"].tiles, format=("nvfp4", "mxfp4"))
    def test_tensor_memory_is_that_of_the_account(self, tile, format):
        block = {"nvfp4": 16, "mxfp4": 32}[format]
        half = "bfloat16"
        scale = {"nvfp4": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu"}[format]
        problem = plan.Problem(4352, 3072, 3840, 128, format, block, half, half, half, scale)
        names = dict(zip(("tile_m", "tile_n", "cluster"), tile, strict=True))
        found = plan.solve(problem, "sm_100", kernel="sm100_v2", **names)
        (row,) = (row for row in found.rows if row.name == "accumulator")
        self.assertEqual(self.lib.Accumulators(found.tile_n, block), row.stages)
        used = row.stages * found.tile_n + 2 * self.lib.ScaleColumns(found.tile_n, block)
        config = plan.budget.Config(*tile[:2], found.tile_k, tile[2], 2, 0, 2)
        target = plan.targets.get("sm_100")
        self.assertEqual(plan.budget.tmem_columns(problem, target, config), used)
        self.assertLessEqual(used, target.tmem_columns)

    @parameterized.product(k_pad=(32, 256, 288, 3840), format=("nvfp4", "mxfp4"), m=(1, 128, 300))
    def test_atoms_are_those_of_the_workspace(self, k_pad, format, m):
        block = {"nvfp4": 16, "mxfp4": 32}[format]
        half = "bfloat16"
        scale = {"nvfp4": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu"}[format]
        problem = plan.Problem(m, 200, k_pad, 0, format, block, half, half, half, scale)
        buffers = plan.solve(problem, "sm_100", kernel="sm100_v2").workspace(m, "gemm")
        atoms = self.lib.AtomsAlongK(ctypes.c_int64(k_pad), block)
        self.assertEqual(
            [(b.name, b.shape) for b in buffers],
            [("act_atoms", (-(-m // 128) * atoms, 512)), ("weight_atoms", (2 * atoms, 512))],
        )


class PlanCase(HostTest):
    """Plans and specs through XLA's decoder to the handlers' checks."""

    def setUp(self):
        super().setUp()
        stages = {
            "instantiate": jax.ffi.pycapsule(self.lib.Instantiate),
            "execute": jax.ffi.pycapsule(self.lib.Execute),
        }
        jax.ffi.register_ffi_target("jax_w4a4_test_plan", stages, platform="cpu")

    def attrs(
        self,
        format="nvfp4",
        rank=32,
        m=64,
        k_pad=256,
        block=16,
        scale="float8_e4m3fn",
        kernel="sm90_v1",
        precision=None,
        groups=0,
        sign_order="linear",
        **kw,
    ):
        spec = formats.Spec(format, k_pad, k_pad, block, scale)
        half = "bfloat16"
        problem = plan.Problem(
            m, 300, k_pad, rank, format, block, half, half, half, scale, precision=precision,
            groups=groups, sign_order=sign_order,
        )  # fmt: skip
        target = "sm_100" if kernel.startswith("sm100") else "sm_90"
        return plan.solve(problem, target, kernel=kernel, **kw).ffi_attrs(), spec.ffi_attrs()

    def v2_attrs(
        self, format="mxfp4", rank=32, k_pad=256, precision=None, group=None,
        kernel="sm90_v2", **kw,
    ):  # fmt: skip
        block, scale = {
            "nvfp4": (16, "float8_e4m3fn"),
            "mxfp4": (32, "float8_e8m0fnu"),
            "int4": (group or k_pad, "float16"),
        }[format]
        return self.attrs(
            format,
            rank,
            block=block,
            scale=scale,
            k_pad=k_pad,
            kernel=kernel,
            precision=precision,
            **kw,
        )

    def compile(self, plan_attrs, spec_attrs, rank=32, m=64):
        return self.compile_all([(plan_attrs, spec_attrs, rank, m)])

    def compile_all(self, calls):
        """A program of (plan attributes, spec attributes, rank, rows)."""

        def f(operands):
            call = jax.ffi.ffi_call("jax_w4a4_test_plan", jax.ShapeDtypeStruct((), jnp.float32))
            return [
                call(*operands[rank, m], plan=dict(plan_attrs), spec=dict(spec_attrs))
                for plan_attrs, spec_attrs, rank, m in calls
            ]

        operands = {
            (rank, m): (jnp.zeros((300, rank), jnp.bfloat16), jnp.zeros(m, jnp.bfloat16))
            for *_, rank, m in calls
        }
        compiled = jax.jit(f).lower(operands).compile()
        return lambda: jax.block_until_ready(compiled(operands))

    @contextlib.contextmanager
    def accepting(self):
        """Collects calls, none of which may be refused. They are one program, as it takes far
        longer to compile one than to check a plan; if it fails, each is one, to be named."""
        calls = []
        yield lambda attrs, rank=32, m=64: calls.append((*attrs, rank, m))
        self.assertNotEmpty(calls)
        try:
            self.compile_all(calls)()
        except jax.errors.JaxRuntimeError:
            for call in calls:
                with self.subTest(plan=call[0], rank=call[2], m=call[3]):
                    self.compile_all([call])()
            raise


class PlanChecks(PlanCase):
    """The handlers' checks on the attributes (cuda/plan.cc), decoded by XLA as on the GPU: they
    accept what the planner makes and refuse everything else, at compile where that is possible."""

    def test_every_plan_of_the_planner_is_accepted(self):
        kinds = [("nvfp4", 16, "float8_e4m3fn"), ("mxfp4", 32, "float8_e8m0fnu")]
        kinds += [("int4", block, "float16") for block in (32, 64, 128, 384)]
        with self.accepting() as accept:
            for (format, block, scale), rank, tile_m in itertools.product(
                kinds, (0, 16, 128), (32, 64, 128)
            ):
                with self.subTest(format=format, block=block, rank=rank, tile_m=tile_m):
                    attrs = self.attrs(format, rank, 64, 384, block, scale, tile_m=tile_m)
                    accept(attrs, rank)

    @parameterized.parameters(
        ("plan", "schema", 1, "INVALID_ARGUMENT.*plan schema 1"),
        ("plan", "schema", 3, "INVALID_ARGUMENT.*plan schema 3"),
        ("plan", "kernel", 2, "FAILED_PRECONDITION.*kernel 2 runs on sm_100 and sm_103 only"),
        ("plan", "kernel", 9, "FAILED_PRECONDITION.*kernel 9; expected 1 .sm90_v1."),
        ("plan", "cc", 100, "FAILED_PRECONDITION.*sm_100"),
        ("plan", "tile_m", 48, "INVALID_ARGUMENT.*tile .48, 128, 64."),
        ("plan", "tile_n", 256, "INVALID_ARGUMENT.*tile"),
        ("plan", "tile_k", 128, "INVALID_ARGUMENT.*tile"),
        ("plan", "cluster", 2, "INVALID_ARGUMENT.*cluster 2"),
        ("plan", "threads", 128, "INVALID_ARGUMENT.*128 threads"),
        ("plan", "main_stages", 3, "INVALID_ARGUMENT.*main 3"),
        ("plan", "store_stages", 1, "INVALID_ARGUMENT.*store 1"),
        ("spec", "format", 3, "INVALID_ARGUMENT.*unknown format 3"),
        ("spec", "block_size", 48, "INVALID_ARGUMENT.*block_size=48"),
        ("spec", "k_pad", 240, "INVALID_ARGUMENT.*k_pad=240"),
        ("spec", "k", 0, "INVALID_ARGUMENT.*k=0"),
        ("spec", "act_unsigned", 1, "INVALID_ARGUMENT.*act_unsigned=1"),
        ("spec", "act_rule", 2, "INVALID_ARGUMENT.*act_rule=2"),
    )
    def test_refused_at_compile(self, which, key, value, text):
        plan_attrs, spec_attrs = self.attrs()
        attrs = {"plan": plan_attrs, "spec": spec_attrs}
        attrs[which][key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s){text}"):
            self.compile(attrs["plan"], attrs["spec"])

    @parameterized.parameters(("missing", -1), ("surplus", 1))
    def test_wrong_attribute_count_is_refused(self, change, difference):
        plan_attrs, spec_attrs = self.attrs()
        count = len(plan_attrs)
        if change == "missing":
            del plan_attrs["q_rows"]
        else:
            plan_attrs["extra"] = 0
        text = f"(?s)INVALID_ARGUMENT.*expected {count} attributes but got {count + difference}"
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, text):
            self.compile(plan_attrs, spec_attrs)

    @parameterized.parameters(
        ("off_act", 0, "act overlap weight"),
        ("off_act", 64, "128-byte aligned"),
        ("off_weight_scale", 0, "weight_scale overlap weight"),
        ("off_aux", 1 << 20, "of aux"),
        ("bytes_weight", 128, "of weight at"),
        ("bytes_act_scale", 0, "of act_scale"),
        ("bytes_lora_up", 128, "of lora_up"),
        ("off_lora_act", 0, "lora_act overlap lora_up"),
        ("lora_stages", 0, "no LoRA stage"),
        ("smem_bytes", 1024, "inside"),
        ("q_rows", 8, "quantizer 1 8 rows"),
        ("q_smem_bytes", 0, "quantizer"),
        ("q_kernel", 2, "before kernels sm90_v2, sm90_decode and sm90_grouped"),
        ("q_kernel", 3, "quantizer 3"),
    )
    def test_regions_that_differ_from_the_kernel_are_refused(self, key, value, text):
        plan_attrs, spec_attrs = self.attrs("int4", block=64, scale="float16")
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs)()

    def test_epilogue_regions_may_lie_on_the_main_loop_but_not_on_aux(self):
        plan_attrs, spec_attrs = self.attrs()
        self.assertLess(plan_attrs["off_lora_up"], 2 * plan_attrs["bytes_weight"])
        plan_attrs["off_lora_up"] = plan_attrs["off_aux"]
        plan_attrs["smem_bytes"] += 1 << 15
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "lora_up overlap aux"):
            self.compile(plan_attrs, spec_attrs)()

    @parameterized.product(
        path=(
            ("int4", (64, "highest"), "Int4Group64"),
            ("int4", (128, "highest"), "Int4Group128"),
            ("int4", (32, None), "Int4Scaled"),
            ("int4", (64, None), "Int4Scaled"),
            ("int4", (128, "fastest"), "Int4Scaled"),
            ("nvfp4", None, "Nvfp4"),
            ("nvfp4", "fastest", "Nvfp4Rounded"),
            ("mxfp4", None, "Mxfp4"),
            ("mxfp4", "highest", "Mxfp4Promoted"),
            ("int4", (None, None), "Int4Row"),
            ("mxfp4", "prepared", "Mxfp4Sorted"),
        ),
        cluster=(1, 2),
        rank=(0, 16, 256),
        quantizer=(None, 1),
    )
    def test_every_v2_plan_is_accepted(self, path, cluster, rank, quantizer):
        format, mode, path = path
        group, precision = mode if format == "int4" else (None, mode)
        kind = kind_of(precision) | ({"group": group} if format == "int4" else {})
        k_pad = {128: 384, 64: 448}.get(group, 416)
        forced = {"cluster": cluster} | ({} if quantizer is None else {"quantizer": quantizer})
        with self.accepting() as accept:
            for tile_m, main_stages in itertools.product(compiled_tiles()[path], (None, 2, 3)):
                stages = {} if main_stages is None else {"main_stages": main_stages}
                with self.subTest(tile_m=tile_m, main_stages=main_stages):
                    attrs = self.v2_attrs(
                        format, rank, k_pad, tile_m=tile_m, **kind, **forced, **stages
                    )
                    self.assertEqual(attrs[0]["path"], plan.budget.V2_PATHS[path].code)
                    accept(attrs, rank)

    @parameterized.product(
        path=(
            ("nvfp4", None, "Nvfp4"),
            ("nvfp4", "fastest", "Nvfp4Rounded"),
            ("mxfp4", None, "Mxfp4"),
            ("int4", None, "Int4Row"),
            ("int4", 64, "Int4Scaled"),
            ("mxfp4", "prepared", "Mxfp4Sorted"),
        ),
        rank=(0, 16, 256),
    )
    def test_every_grouped_plan_is_accepted(self, path, rank):
        format, mode, path = path
        kind = {"group": mode} if format == "int4" else kind_of(mode)
        with self.accepting() as accept:
            for tile_m, main_stages in itertools.product(
                compiled_tiles("GROUPED")[path], (None, 2)
            ):
                stages = {} if main_stages is None else {"main_stages": main_stages}
                with self.subTest(tile_m=tile_m, main_stages=main_stages):
                    attrs = self.v2_attrs(
                        format, rank, 448, kernel="sm90_grouped", groups=5, tile_m=tile_m, **kind,
                        **stages,
                    )  # fmt: skip
                    accept(attrs, rank)

    @parameterized.parameters(
        ("cluster", 2, "INVALID_ARGUMENT.*sm90_grouped can't run.*cluster 2"),
        ("tile_m", 32, "INVALID_ARGUMENT.*tile .32, "),
        ("main_stages", 21, "INVALID_ARGUMENT.*main 21"),
        ("path", 2, "INVALID_ARGUMENT.*sm90_grouped"),
        ("bytes_act_scale", 64, "FAILED_PRECONDITION.*of act_scale"),
        ("q_kernel", 1, "FAILED_PRECONDITION.*quantizer 1"),
        ("smem_bytes", 1 << 15, "FAILED_PRECONDITION"),
    )
    def test_grouped_refused(self, key, value, text):
        plan_attrs, spec_attrs = self.v2_attrs(kernel="sm90_grouped", groups=5, tile_m=16)
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s){text}"):
            self.compile(plan_attrs, spec_attrs)()

    @parameterized.product(
        format=("nvfp4", "mxfp4"),
        tile=plan.budget.DESIGNS["sm100_v2"].tiles,
        rank=(0, 8, 256),
    )
    def test_every_sm100_plan_is_accepted(self, format, tile, rank):
        block, scale = {"nvfp4": (16, "float8_e4m3fn"), "mxfp4": (32, "float8_e8m0fnu")}[format]
        tile = dict(zip(("tile_m", "tile_n", "cluster"), tile, strict=True))
        with self.accepting() as accept:
            for k_pad, m, stages in itertools.product(
                (32, 416, 3840), (64, 4352), ({}, {"main_stages": 2})
            ):
                attrs = self.attrs(
                    format, rank, m, k_pad, block, scale, kernel="sm100_v2", **tile, **stages
                )
                accept(attrs, rank)

    def test_v1_of_sm100_is_accepted(self):
        self.compile(*self.attrs(kernel="sm100_v1"))()

    @parameterized.parameters(
        ("plan", "kernel", 3, "FAILED_PRECONDITION.*kernel 3 runs on sm_90 only"),
        ("plan", "cc", 90, "FAILED_PRECONDITION.*kernel 2 runs on sm_100 and sm_103 only"),
        ("plan", "cc", 120, "FAILED_PRECONDITION.*kernel 2 runs on sm_100 and sm_103 only"),
        ("plan", "tile_m", 128, "INVALID_ARGUMENT.*tile .128, "),
        ("plan", "tile_n", 64, "INVALID_ARGUMENT.*compiled cluster and tile_n"),
        ("plan", "tile_k", 128, "INVALID_ARGUMENT.*tile_k 256"),
        ("plan", "cluster", 4, "INVALID_ARGUMENT.*cluster 4"),
        ("plan", "threads", 192, "INVALID_ARGUMENT.*192 threads"),
        ("plan", "main_stages", 1, "INVALID_ARGUMENT.*main 1"),
        ("plan", "lora_stages", 2, "INVALID_ARGUMENT.*lora 2"),
        ("plan", "store_stages", 1, "INVALID_ARGUMENT.*store 1"),
        ("plan", "group_m", 0, "INVALID_ARGUMENT.*group_m 0"),
        ("plan", "path", 3, "INVALID_ARGUMENT.*path 3"),
        ("plan", "promote_k", 512, "INVALID_ARGUMENT.*promote_k 512"),
    )
    def test_sm100_refused_at_compile(self, which, key, value, text):
        attrs = self.attrs(kernel="sm100_v2", tile_m=256, tile_n=128)
        attrs = dict(zip(("plan", "spec"), attrs, strict=True))
        attrs[which][key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s){text}"):
            self.compile(attrs["plan"], attrs["spec"])

    def test_sm100_refuses_int4(self):
        plan_attrs, _ = self.attrs(kernel="sm100_v2")
        _, spec_attrs = self.attrs("int4", block=64, scale="float16")
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "expected format 0 . 1"):
            self.compile(plan_attrs, spec_attrs)

    @parameterized.parameters(
        ("off_weight", 0, "weight overlap act|act overlap weight"),
        ("off_weight", 512, "1024-byte aligned"),
        ("off_act_scale", 0, "act_scale overlap|overlap act_scale"),
        ("off_weight_scale", 64, "128-byte aligned"),
        ("off_store", 128, "1024-byte aligned"),
        ("off_store", 0, "overlap"),
        ("off_aux", 0, "overlap"),
        ("off_barriers", 0, "overlap"),
        ("off_aux", 1 << 20, "of aux"),
        ("bytes_act", 128, "of act at"),
        ("bytes_weight", 16384, "of weight at"),
        ("bytes_act_scale", 1024, "of act_scale"),
        ("bytes_weight_scale", 1024, "of weight_scale"),
        ("bytes_store", 4096, "of store"),
        ("bytes_aux", 512, "of aux"),
        ("bytes_barriers", 16, "of barriers"),
        ("smem_bytes", 1024, "inside"),
    )
    def test_sm100_regions_that_differ_from_the_kernel_are_refused(self, key, value, text):
        plan_attrs, spec_attrs = self.attrs(kernel="sm100_v2", tile_m=256, tile_n=128)
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs)()

    def test_sm100_refuses_ranks_without_16_byte_rows(self):
        attrs = self.attrs(kernel="sm100_v2")
        with self.assertRaisesRegex(
            jax.errors.JaxRuntimeError, "multiple of 8, lora_up has rank 12"
        ):
            self.compile(*attrs, 12)()

    def test_every_v2_quantizer_is_accepted(self):
        """Its shapes and LoRA-down's shared memory are worked out twice, in Python and in C++."""
        seen = set()
        with self.accepting() as accept:
            for k_pad, rank in itertools.product(
                (32, 256, 512, 3840, 5120, 8192, 15360, 28672), (0, 16, 64, 80, 128, 144, 256)
            ):
                for m in (256, 4352):
                    attrs = self.v2_attrs(rank=rank, m=m, k_pad=k_pad)
                    self.assertEqual(attrs[0]["q_kernel"], 2)
                    accept(attrs, rank)
                    seen.add((attrs[0]["q_lane_chunks"], attrs[0]["q_warps"]))
        self.assertEqual(seen, set(plan.budget.QUANTIZER_SHAPES))

    @parameterized.parameters(
        ("plan", "kernel", 10, "FAILED_PRECONDITION.*kernel 10 runs on sm_100 and sm_103 only"),
        ("plan", "cc", 100, "FAILED_PRECONDITION.*kernel 3 runs on sm_90 only"),
        ("plan", "tile_m", 96, "INVALID_ARGUMENT.*tile .96, "),
        ("plan", "tile_n", 512, "INVALID_ARGUMENT.*tile"),
        ("plan", "tile_k", 64, "INVALID_ARGUMENT.*tile_k 128"),
        ("plan", "cluster", 4, "INVALID_ARGUMENT.*cluster 4"),
        ("plan", "cluster", 1, "INVALID_ARGUMENT.*tile_n 128 x cluster"),
        ("plan", "threads", 256, "INVALID_ARGUMENT.*256 threads"),
        ("plan", "main_stages", 1, "INVALID_ARGUMENT.*main 1"),
        ("plan", "main_stages", 9, "INVALID_ARGUMENT.*main 9"),
        ("plan", "lora_stages", 1, "INVALID_ARGUMENT.*lora 1"),
        ("plan", "store_stages", 2, "INVALID_ARGUMENT.*store 2"),
        ("plan", "group_m", 0, "INVALID_ARGUMENT.*group_m 0"),
        ("plan", "path", 0, "INVALID_ARGUMENT.*no path 0"),
        ("plan", "path", 99, "INVALID_ARGUMENT.*no path 99"),
        ("plan", "path", 2, "INVALID_ARGUMENT.*promote_k=0 on path 2"),
        ("plan", "promote_k", 512, "INVALID_ARGUMENT.*promote_k=512 on path 1"),
        # The low 32 bits would pass for the plan's own.
        ("plan", "group_m", 1 << 32, f"INVALID_ARGUMENT.*plan holds {1 << 32}"),
        ("plan", "tile_m", (1 << 32) + 200, f"INVALID_ARGUMENT.*plan holds {(1 << 32) + 200}"),
        ("plan", "off_store", -16, "INVALID_ARGUMENT.*plan holds -16"),
        ("spec", "format", 0, "INVALID_ARGUMENT.*block_size=32"),
    )
    def test_v2_refused_at_compile(self, which, key, value, text):
        attrs = dict(zip(("plan", "spec"), self.v2_attrs(cluster=2), strict=True))
        attrs[which][key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s){text}"):
            self.compile(attrs["plan"], attrs["spec"])

    @parameterized.parameters(
        ("mxfp4", "int4", {}),
        ("int4", "mxfp4", {}),
        ("nvfp4", "mxfp4", {}),
        ("int4", "int4", {"block_size": 32}),
        ("int4", "int4", {"k_pad": 1 << 21, "block_size": 1 << 21}),
    )
    def test_v2_refuses_a_path_that_the_format_has_not(self, planned, called, changes):
        plan_attrs, _ = self.v2_attrs(planned)
        _, spec_attrs = self.v2_attrs(called)
        spec_attrs.update(changes)
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "sm90_v2 has no path"):
            self.compile(plan_attrs, spec_attrs)

    @parameterized.parameters(
        ("off_act", 1024, "act at offset 1024"),
        ("off_lora_act", 512, "lora_act at 512"),
        ("off_weight", 0, "weight overlap act"),
        ("off_weight", 512, "1024-byte aligned"),
        ("off_weight", 1 << 16, "of weight"),
        ("off_lora_up", 0, "lora_up overlap lora_act"),
        ("off_lora_up", 256, "512-byte aligned"),
        ("off_store", 0, "store overlap main ring"),
        ("off_store", 128, "1024-byte aligned"),
        ("off_act_scale", 0, "act_scale overlap main ring"),
        ("off_barriers", 0, "barriers overlap main ring"),
        ("bytes_barriers", 16, "of barriers"),
        ("bytes_act", 128, "of act at"),
        ("bytes_lora_up", 128, "of lora_up"),
        ("bytes_store", 128, "of store"),
        ("stage_bytes", 1000, "multiple of 1024"),
        ("stage_bytes", 1024, "of act"),
        ("stage_bytes", 1 << 17, "per stage|of main ring"),
        ("smem_bytes", 1 << 16, "inside"),
        ("q_rows", 16, "quantizer 2 16 rows"),
        ("q_warps", 3, "3 warps"),
        ("q_lane_chunks", 8, "8 lane chunks"),
        ("q_smem_bytes", 4, "quantizer 2"),
        ("down_cluster", 9, "cluster 9"),
        ("down_stages", 1, "1 stages"),
        ("off_down_barriers", 0, "barriers at 0"),
        ("down_smem_bytes", 1 << 10, "of 1024 bytes"),
    )
    def test_v2_regions_that_differ_from_the_kernel_are_refused(self, key, value, text):
        plan_attrs, spec_attrs = self.v2_attrs(tile_m=64)
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs)()

    @parameterized.parameters(
        ({"k": 250}, 32, "k a multiple of 8"),
        ({"lora_smoothed": 1}, 32, "LoRA-down on x"),
        ({}, 24, "ranks that are a multiple of 16"),
    )
    def test_calls_that_v2_cannot_take(self, changes, rank, text):
        plan_attrs, spec_attrs = self.v2_attrs()
        spec_attrs.update(changes)
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs, rank)()


class DecodePlanChecks(PlanCase):
    """The same of kernel sm90_decode and its quantizer."""

    PATHS = (
        ("mxfp4", None), ("nvfp4", None), ("nvfp4", "fastest"), ("int4", None),
        ("mxfp4", "prepared"),
    )  # fmt: skip

    def decode_attrs(self, format="mxfp4", rank=32, k_pad=1056, mode=None, m=9, **kw):
        block, scale = {
            "nvfp4": (16, "float8_e4m3fn"),
            "mxfp4": (32, "float8_e8m0fnu"),
            "int4": (k_pad, "float16"),
        }[format]
        return self.attrs(
            format, rank, m, k_pad, block, scale, kernel="sm90_decode", **kind_of(mode), **kw
        )

    @parameterized.product(path=PATHS, rank=(0, 16, 256), cluster=(1, 2), quantizer=(None, 1, 2))
    def test_every_decode_plan_is_accepted(self, path, rank, cluster, quantizer):
        format, mode = path
        forced = {"cluster": cluster} | ({} if quantizer is None else {"quantizer": quantizer})
        tokens = (1, 12, 30, 64, 300 if rank == 16 else 100)
        with self.accepting() as accept:
            for tile_n, m in itertools.product((8, 24, 32, 40, 64, 88, 128), tokens):
                with self.subTest(tile_n=tile_n, m=m):
                    try:
                        attrs = self.decode_attrs(
                            format, rank, 2080, mode, m, tile_n=tile_n, **forced
                        )
                    except plan.DoesNotFitError:
                        continue
                    accept(attrs, rank)

    @parameterized.product(path=PATHS, cluster=(1, 2), m=(16, 30, 64, 128))
    def test_every_decode_plan_of_a_long_k_is_accepted(self, path, cluster, m):
        """Block scales all at once, or two boxes of them in turn."""
        format, mode = path
        with self.accepting() as accept:
            for tile_n, k_pad in itertools.product(
                (8, 32, 40, 64, 72, 128), (4352, 8192, 8704, 8736, 16384, 17408, 28672)
            ):
                with self.subTest(tile_n=tile_n, k_pad=k_pad):
                    try:
                        attrs = self.decode_attrs(
                            format, 16, k_pad, mode, m, tile_n=tile_n, cluster=cluster
                        )
                    except plan.DoesNotFitError:
                        continue
                    accept(attrs, 16)

    @parameterized.product(path=PATHS, cluster=(1, 2))
    def test_block_scales_in_turn_are_the_plans(self, path, cluster):
        """The kernel's condition for two boxes in turn is the account's, where no plan is made too:
        each part of it decides for some of these."""
        (format, mode), half = path, "bfloat16"
        found, in_turn = np.zeros(2, np.int64), 0
        for k_pad, tile_m, tile_n, stages in itertools.product(
            (2048, 4352, 4608, 8192, 8224, 8704, 16896, 17408), plan.budget.DECODE_TOKENS,
            (8, 32, 40, 64, 72, 128), (1, 2, 3, 4, 5, 8, 9, 16),
        ):  # fmt: skip
            block, scale = {
                "nvfp4": (16, "float8_e4m3fn"), "mxfp4": (32, "float8_e8m0fnu"),
                "int4": (k_pad, "float16"),
            }[format]  # fmt: skip
            problem = plan.Problem(
                tile_m, 300, k_pad, 0, format, block, half, half, half, scale, **kind_of(mode)
            )
            tile_k = 256 * plan.budget.decode_shape(tile_m, tile_n)[2]
            config = plan.Config(tile_m, tile_n, tile_k, cluster, stages, 0, 1)
            code = plan.budget.v2_path(problem).code
            self.lib.DecodeScales(
                code, *map(ctypes.c_int64, (tile_m, tile_n, k_pad, cluster, stages)), pointer(found)
            )
            boxes, slots = plan.budget.decode_scale_boxes(problem, config)
            self.assertEqual((boxes, slots), tuple(found), config)
            in_turn += slots < boxes
        self.assertEqual(in_turn > 0, format != "int4")

    def test_every_decode_quantizer_is_accepted(self):
        seen = set()
        k = (32, 4096, 4128, 8224, 14336, 28672)
        with self.accepting() as accept:
            for k_pad, rank, m in itertools.product(k, (0, 16, 256), (9, 40)):
                attrs = self.decode_attrs(rank=rank, k_pad=k_pad, m=m)
                self.assertEqual(attrs[0]["q_kernel"], 5)
                accept(attrs, rank)
                seen.add((attrs[0]["q_lane_chunks"], attrs[0]["q_warps"]))
        shapes = plan.budget.DECODE_QUANTIZER_SHAPES + plan.budget.DECODE_QUANTIZER_LARGE
        self.assertEqual(seen, set(shapes))

    @parameterized.parameters(
        ("cc", 100, "FAILED_PRECONDITION.*kernel 4 runs on sm_90 only"),
        ("tile_m", 24, "INVALID_ARGUMENT.*tile .24, "),
        ("tile_n", 136, "INVALID_ARGUMENT.*tile .16, 136"),
        ("tile_n", 60, "INVALID_ARGUMENT.*tile .16, 60"),
        ("tile_k", 128, "INVALID_ARGUMENT.*tile_k 128"),
        ("cluster", 3, "INVALID_ARGUMENT.*cluster 3"),
        ("cluster", 0, "INVALID_ARGUMENT.*cluster 0"),
        ("threads", 384, "INVALID_ARGUMENT.*384 threads"),
        ("main_stages", 1, "INVALID_ARGUMENT.*main 1"),
        ("main_stages", 17, "INVALID_ARGUMENT.*main 17"),
        ("lora_stages", 1, "INVALID_ARGUMENT.*lora 1"),
        ("store_stages", 0, "INVALID_ARGUMENT.*store 0"),
        ("group_m", 1, "INVALID_ARGUMENT.*group_m 1"),
        ("path", 2, "INVALID_ARGUMENT.*no path 2"),
        ("promote_k", 128, "INVALID_ARGUMENT.*promote_k 128"),
    )
    def test_decode_refused_at_compile(self, key, value, text):
        plan_attrs, spec_attrs = self.decode_attrs(tile_n=64, cluster=1)
        plan_attrs[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s){text}"):
            self.compile(plan_attrs, spec_attrs)

    def test_more_ctas_than_stages_of_k(self):
        plan_attrs, spec_attrs = self.decode_attrs(k_pad=256, tile_n=64, cluster=1)
        plan_attrs["cluster"] = 2
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "a stage of K for each CTA"):
            self.compile(plan_attrs, spec_attrs)

    @parameterized.parameters(
        ("off_weight", 1024, "weight at offset 1024"),
        ("off_act", 0, "weight overlap act"),
        ("off_act", 512, "1024-byte aligned"),
        ("bytes_act", 128, "of act at"),
        ("bytes_weight", 128, "of weight at"),
        ("stage_bytes", 1000, "multiple of 1024"),
        ("stage_bytes", 1024, "of weight"),
        ("off_weight_scale", 0, "main ring overlap weight_scale"),
        ("bytes_weight_scale", 64, "of weight_scale"),
        ("off_act_scale", 0, "main ring overlap act_scale"),
        ("off_lora_act", 0, "main ring overlap lora_act"),
        ("off_aux", 0, "main ring overlap aux"),
        ("off_barriers", 0, "main ring overlap barriers"),
        ("off_store", 1 << 17 | 1024, "of store|overlap store"),
        ("bytes_store", 128, "of store"),
        ("smem_bytes", 1 << 16, "inside"),
        ("q_rows", 2, "quantizer 5 2 rows"),
        ("q_warps", 4, "4 warps"),
        ("q_smem_bytes", 4, "quantizer 5"),
        ("down_cluster", 4, "LoRA-down cluster 4"),
        ("down_stages", 2, "2 stages"),
    )
    def test_decode_regions_that_differ_from_the_kernel_are_refused(self, key, value, text):
        plan_attrs, spec_attrs = self.decode_attrs(tile_n=64, cluster=1)
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs)()

    @parameterized.parameters(
        # Of four warpgroups, and of 64 rows where there are two.
        ("threads", 640, "INVALID_ARGUMENT.*640 threads.*expected.*384 threads"),
        ("tile_k", 512, "INVALID_ARGUMENT.*tile .128, 72. with tile_k 512.*expected tile_k 256"),
        ("bytes_act", 16384, "FAILED_PRECONDITION.*16384 bytes of act at"),
        # The whole low-rank product, and what a single CTA has.
        ("bytes_lora_act", 65536, "FAILED_PRECONDITION.*65536 bytes of lora_act"),
        ("bytes_lora_act", 8192, "FAILED_PRECONDITION.*8192 bytes of lora_act"),
        ("off_lora_act", 0, "FAILED_PRECONDITION.*main ring overlap lora_act"),
    )
    def test_results_from_registers(self, key, value, text):
        """128 tokens, a warpgroup with all of K: no partial sums, the peer's of half the tokens."""
        plan_attrs, spec_attrs = self.decode_attrs(m=97, tile_n=72, cluster=2)
        self.compile(plan_attrs, spec_attrs)()
        self.assertEqual((plan_attrs["bytes_store"], plan_attrs["bytes_lora_act"]), (0, 40960))
        plan_attrs[key] = value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s){text}"):
            self.compile(plan_attrs, spec_attrs)()

    def test_the_other_shape_of_128_tokens(self):
        """Of at most 64 rows two warpgroups divide K: its regions are not those of more rows."""
        few, spec_attrs = self.decode_attrs(m=97, tile_n=64, cluster=2)
        self.compile(few, spec_attrs)()
        self.assertEqual((few["bytes_store"], few["bytes_lora_act"]), (65536, 32768))
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "FAILED_PRECONDITION"):
            self.compile(few | {"bytes_store": 0}, spec_attrs)()

    @parameterized.product(path=PATHS, rank=(16, 32), cluster=(1, 2))
    def test_every_plan_with_low_rank_down_in_the_launch_is_accepted(self, path, rank, cluster):
        format, mode = path
        forced = {"cluster": cluster, "down_ahead": 4}
        tokens = (17, 33, 64, 65) if rank == 16 else (64, 97, 150, 200)
        with self.accepting() as accept:
            for tile_n, m, k in itertools.product((8, 40, 64, 128), tokens, (1056, 8704)):
                with self.subTest(tile_n=tile_n, m=m, k=k):
                    try:
                        attrs = self.decode_attrs(format, rank, k, mode, m, tile_n=tile_n, **forced)
                    except plan.DoesNotFitError:
                        continue
                    self.assertEqual(attrs[0]["down_ahead"], 4)
                    accept(attrs, rank, m)

    @parameterized.parameters(
        ("down_ahead", 2, "LoRA-down 2 CTAs of the gemm's launch of tile_m 32"),
        ("down_ahead", 8, "LoRA-down 8 CTAs .* it needs 4 of tile_m 32 and more"),
        # Not ahead: what quantizer 5's own LoRA-down must not have.
        ("down_ahead", 0, "LoRA-down cluster 1"),
        ("down_cluster", 0, "in clusters of 0"),
        ("down_cluster", 8, "in clusters of 8"),
        ("down_stages", 0, ", 0 stages"),
        ("down_stages", 1, ", 1 stages"),
        ("down_stages", 17, ", 17 stages, .* cluster 1, 2..16 stages"),
        ("off_down_barriers", 0, "barriers at 0 of"),
        ("off_down_barriers", lambda a: a["off_down_barriers"] - 8, "barriers behind .* of ring"),
        ("off_down_barriers", lambda a: a["off_down_barriers"] + 4, "barriers at"),
        ("off_down_barriers", lambda a: a["off_down_barriers"] + 8, "barriers at"),
        ("down_smem_bytes", lambda a: a["down_smem_bytes"] - 1, "barriers at"),
        ("down_smem_bytes", lambda a: a["smem_bytes"] + 1, "of the gemm's"),
        ("down_smem_bytes", 0, "of 0 of the gemm's"),
    )
    def test_low_rank_down_in_the_launch_that_cannot_be_is_refused(self, key, value, text):
        plan_attrs, spec_attrs = self.decode_attrs(m=17, tile_n=64, cluster=1, down_ahead=4)
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs[key] = value(plan_attrs) if callable(value) else value
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs)()

    def test_partial_sums_lie_in_front_of_the_barriers(self):
        """Of a ring of two stages, which is the shortest, too: it is longer than they are."""
        plan_attrs, spec_attrs = self.decode_attrs(m=17, tile_n=64, cluster=1, down_ahead=4)
        stage = 72 * 128 + 64 * 128
        plan_attrs.update(down_stages=2, off_down_barriers=2 * stage)
        self.compile(plan_attrs, spec_attrs)()
        self.assertGreater(2 * stage, 64 * (64 + 4) * 4)

    def test_stages_of_low_rank_down_of_128_tokens(self):
        """A ring for 64 tokens would end in front of the barriers, too."""
        plan_attrs, spec_attrs = self.decode_attrs(m=97, tile_n=64, cluster=1, down_ahead=4)
        stage = 128 * 128 + 64 * 128
        plan_attrs.update(down_stages=2, off_down_barriers=2 * stage)
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs["off_down_barriers"] = 2 * (72 * 128 + 64 * 128)
        text = f"behind {2 * stage} bytes of ring"
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, text):
            self.compile(plan_attrs, spec_attrs)()

    def test_stages_of_low_rank_down_of_several_tiles(self):
        """A ring for 128 tokens would end in front of the barriers, too, as would their sums."""
        plan_attrs, spec_attrs = self.decode_attrs(m=193, tile_n=64, cluster=1, down_ahead=4)
        stage = 256 * 128 + 64 * 128
        plan_attrs.update(down_stages=2, off_down_barriers=2 * stage)
        self.compile(plan_attrs, spec_attrs, m=129)()
        self.compile(plan_attrs, spec_attrs, m=256)()
        self.assertGreater(2 * stage, 256 * (64 + 4) * 4)
        plan_attrs["off_down_barriers"] = 2 * (128 * 128 + 64 * 128)
        self.compile(plan_attrs, spec_attrs, m=128)()
        text = f"of tile_m 128 for 129 rows .*behind {2 * stage} bytes of ring"
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, text):
            self.compile(plan_attrs, spec_attrs, m=129)()

    def test_more_rows_need_more_ctas_of_low_rank_down_in_the_launch(self):
        plan_attrs, spec_attrs = self.decode_attrs(m=256, tile_n=64, cluster=1, down_ahead=4)
        self.compile(plan_attrs, spec_attrs, m=256)()
        for ctas, needed, m in ((4, 12, 257), (16, 12, 384), (12, 16, 385), (12, 4, 256)):
            plan_attrs["down_ahead"] = ctas
            text = (
                f"FAILED_PRECONDITION.*gives LoRA-down {ctas} .*for {m} rows .*it needs {needed} "
            )
            with self.assertRaisesRegex(jax.errors.JaxRuntimeError, text):
                self.compile(plan_attrs, spec_attrs, m=m)()
        for ctas, m in ((12, 257), (12, 384), (16, 385), (16, 512)):
            plan_attrs["down_ahead"] = ctas
            self.compile(plan_attrs, spec_attrs, m=m)()

    @parameterized.parameters((48, "at rank 48; .* rank up to 32"), (0, "at rank 0"))
    def test_ranks_that_low_rank_down_in_the_launch_lacks(self, rank, text):
        plan_attrs, spec_attrs = self.decode_attrs(m=17, tile_n=64, cluster=1, down_ahead=4)
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"(?s)FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs, rank)()

    def test_low_rank_down_in_the_launch_of_few_tokens(self):
        """The kernels for up to 16 tokens have no code for it."""
        plan_attrs, spec_attrs = self.decode_attrs(m=16, tile_n=64, cluster=1)
        ahead, _ = self.decode_attrs(m=17, tile_n=64, cluster=1, down_ahead=4)
        names = ("down_cluster", "down_stages", "down_smem_bytes", "off_down_barriers")
        plan_attrs.update({name: ahead[name] for name in (*names, "down_ahead", "down_early")})
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "launch of tile_m 16"):
            self.compile(plan_attrs, spec_attrs)()

    @parameterized.parameters(1, 2)
    def test_low_rank_down_in_the_launch_behind_another_quantizer(self, quantizer):
        """Only quantizer 5 fills what its CTAs wait for."""
        plan_attrs, spec_attrs = self.decode_attrs(m=17, tile_n=64, cluster=1, quantizer=quantizer)
        self.compile(plan_attrs, spec_attrs)()
        plan_attrs["down_ahead"] = 4
        text = f"LoRA-down 4 CTAs of the gemm's launch behind quantizer {quantizer}; it needs"
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, f"FAILED_PRECONDITION.*{text}"):
            self.compile(plan_attrs, spec_attrs)()

    def test_low_rank_down_in_the_launch_of_another_kernel(self):
        plan_attrs, spec_attrs = self.v2_attrs(tile_m=64)
        plan_attrs["down_ahead"] = 4
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "behind quantizer 2; it needs"):
            self.compile(plan_attrs, spec_attrs)()

    def test_quantizer_five_before_another_kernel(self):
        plan_attrs, spec_attrs = self.v2_attrs(tile_m=64)
        plan_attrs["q_kernel"] = 5
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "belongs to kernel sm90_decode"):
            self.compile(plan_attrs, spec_attrs)()


GATE = ROOT / "cuda" / "ptxas_gate.py"


class PtxasGate(parameterized.TestCase):
    """Spills, stack frames and serialized wgmma stop the build, though ptxas only mentions them."""

    def gate(self, output, code=0):
        program = f"import sys; sys.stderr.write({output!r}); sys.exit({code})"
        command = [sys.executable, str(GATE), sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, text=True)

    @parameterized.parameters(
        "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources",
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions",
        "    0 bytes stack frame, 24 bytes spill stores, 36 bytes spill loads",
        "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
    )
    def test_defect(self, line):
        done = self.gate(f"ptxas info    : 0 bytes gmem\n{line}\n")
        self.assertEqual(done.returncode, 1)
        self.assertIn(line, done.stderr.splitlines())

    def test_clean_build_is_quiet(self):
        done = self.gate(
            "ptxas info    : Used 168 registers, used 16 barriers\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            "x.cu(3): warning #177-D: unused\n"
        )
        self.assertEqual((done.returncode, done.stderr), (0, "x.cu(3): warning #177-D: unused\n"))

    def test_compiler_errors_pass_through(self):
        done = self.gate("x.cu(3): error: expected a ;\n", code=2)
        self.assertEqual(done.returncode, 2)
        self.assertIn("expected a ;", done.stderr)

    def test_every_kernel_library_is_gated(self):
        text = (ROOT / "CMakeLists.txt").read_text()
        body = re.search(r"function\(w4a4_kernels.*?endfunction", text, re.S).group()
        self.assertIn("ptxas_gate.py", body)
        self.assertRegex(body, r"-Xptxas=-v,--warn-on-spills,--warning-as-error")

    def test_path_codes_are_those_of_the_planner(self):
        text = (ROOT / "cuda" / "sm90_gemm_v2.h").read_text()
        body = re.search(r"enum class GemmV2Path.*?};", text, re.S).group()
        codes = {name: int(code) for name, code in re.findall(r"k(\w+) = (\d+)", body)}
        self.assertEqual(codes, {p.name: p.code for p in plan.budget.V2_PATHS.values()})

    def test_most_tokens_of_a_launch_are_those_of_the_planner(self):
        text = (ROOT / "cuda" / "sm90_decode.h").read_text()
        found = {name: int(value) for name, value in re.findall(r"int (k\w+) = (\d+);", text)}
        self.assertEqual(found["kDecodeMostTileM"], plan.budget.DECODE_TOKENS[-1])
        self.assertEqual(found["kDecodeMostTokens"], plan.budget.DECODE_MOST_TOKENS)
        self.assertEqual(found["kDownAheadMmaTokens"], plan.budget.DOWN_AHEAD_MMA_TOKENS)

    def test_compiled_tiles_are_those_of_the_planner(self):
        paths = plan.budget.V2_PATHS.values()
        self.assertEqual({p.name: sorted(p.tiles) for p in paths}, compiled_tiles())
        tiles = sorted(plan.budget.DECODE_TOKENS)
        want = dict.fromkeys(plan.budget.DECODE_PATHS, tiles)
        self.assertEqual(compiled_decode_tiles(), want)
        grouped = {p.name: sorted(p.grouped_tiles) for p in paths if p.grouped_tiles}
        self.assertEqual(grouped, compiled_tiles("GROUPED"))
