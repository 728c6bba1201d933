"""nvcc to PTX, and the launch code to a library that talks to the emulator. Results are cached."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from emulator import ptx
from emulator.compile import Code

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda"
HOST = pathlib.Path(__file__).resolve().parent / "host"
NVCC = shutil.which("nvcc")
_FLAGS = ("-std=c++17", "-Wno-deprecated-gpu-targets")


def cache_dir() -> pathlib.Path:
    return pathlib.Path(os.environ.get("W4A4_EMULATOR_CACHE", ROOT / "build" / "emulator"))


Edit = tuple[str, str, str]  # file in cuda/, text, replacement


@functools.cache
def _sources_digest(folder: pathlib.Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".cu", ".cuh", ".h", ".cc", ".in"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _key(*parts: object) -> str:
    digest = hashlib.sha256(repr(parts).encode())
    return digest.hexdigest()[:20]


def _run(command: Sequence[str | pathlib.Path], cwd: pathlib.Path) -> None:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def _edited(folder: pathlib.Path, edits: Sequence[Edit]) -> pathlib.Path:
    """A copy of cuda/ with the edits applied; every text must occur exactly once."""
    target = folder / "cuda"
    shutil.copytree(CUDA, target)
    for name, old, new in edits:
        path = target / name
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times in {name}; expected once")
        path.write_text(text.replace(old, new))
    return target


def ptx_of(
    source: str | pathlib.Path,
    arch: str = "sm_90a",
    flags: Sequence[str] = (),
    edits: Sequence[Edit] = (),
    text: str | None = None,
) -> str:
    """PTX of a .cu file.

    Args:
      source: a name in cuda/, or a path; with `text` the name of a file that does not exist.
      edits: changes to files of cuda/ before the compilation, for seeded bugs.
      text: the source itself.
    """
    path = pathlib.Path(source)
    if text is None:
        text = (path if path.is_absolute() else CUDA / path).read_text()
    key = _key(_sources_digest(CUDA), path.name, text, arch, tuple(flags), tuple(edits))
    out = cache_dir() / f"{path.stem}-{key}.ptx"
    if not out.exists():
        if NVCC is None:
            raise RuntimeError("emulator: nvcc is not on PATH")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            include = _edited(folder, edits) if edits else CUDA
            if edits and not path.is_absolute() and (include / path.name).exists():
                text = (include / path.name).read_text()
            (folder / path.name).write_text(text)
            made = folder / "out.ptx"
            _run(
                [NVCC, f"-arch={arch}", *_FLAGS, *flags, f"-I{include}", "-ptx", path.name,
                 "-o", made],
                folder,
            )  # fmt: skip
            _publish(made, out)
    return out.read_text()


def _publish(made: pathlib.Path, out: pathlib.Path) -> None:
    temporary = out.with_suffix(f".{os.getpid()}")
    shutil.copy(made, temporary)
    temporary.replace(out)


def gemm_v2_source(path: str, tile_m: int) -> str:
    """The instance file that CMake would write."""
    template = (CUDA / "sm90_gemm_v2_instance.cu.in").read_text()
    return template.replace("@path@", path).replace("@tile_m@", str(tile_m))


def gemm_v2_name(path: str, tile_m: int) -> str:
    return f"sm90_gemm_v2_{path}_{tile_m}.cu"


QUANTIZE_FLAGS = ("--ftz=true",)  # as in CMakeLists.txt


def arch_of(name: str) -> str:
    """The architecture that a source of cuda/ is written for; its name begins with it."""
    return "sm_100a" if name.startswith("sm100") else "sm_90a"


def product_ptx(name: str, edits: Sequence[Edit] = ()) -> str:
    """PTX of one source of the product: a file of cuda/ or a gemm_v2 instance."""
    if name.startswith("sm90_gemm_v2_"):
        path, tile = name[len("sm90_gemm_v2_") : -len(".cu")].rsplit("_", 1)
        return ptx_of(name, edits=edits, text=gemm_v2_source(path, int(tile)))
    flags = QUANTIZE_FLAGS if name == "sm90_quantize_v2.cu" else ()
    return ptx_of(name, arch_of(name), flags, edits)


def host_library(instances: Sequence[tuple[str, int]]) -> pathlib.Path:
    """The launch code with the fake runtime; of GEMM v2 for these (path, tile_m)."""
    key = _key(_sources_digest(CUDA), _sources_digest(HOST), tuple(instances))
    out = cache_dir() / f"host-{key}.so"
    if out.exists():
        return out
    if NVCC is None:
        raise RuntimeError("emulator: nvcc is not on PATH")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        kernels = " ".join(f"W4A4_KERNEL({path}, {tile})" for path, tile in instances)
        (folder / "sm90_gemm_v2_kernels.h").write_text(f"#define W4A4_GEMM_V2_KERNELS {kernels}\n")
        names = ("sm90_gemm_v1", "sm90_gemm_v2", "sm90_quantize_v2", "sm90_repack_v2")
        sources = [CUDA / f"{n}.cu" for n in names]
        sources += [HOST / "entry.cc", HOST / "fake_cuda.cc"]
        for path, tile in instances:
            instance = folder / gemm_v2_name(path, tile)
            instance.write_text(gemm_v2_source(path, tile))
            sources.append(instance)
        objects = []
        for source in sources:
            made = folder / (source.name + ".o")
            virtual = arch_of(source.name).replace("sm", "compute")
            flags = QUANTIZE_FLAGS if source.name == "sm90_quantize_v2.cu" else ()
            _run(
                [NVCC, "-gencode", f"arch={virtual},code={virtual}", *_FLAGS, *flags,
                 f"-I{CUDA}", f"-I{folder}", "-Xcompiler", "-fPIC", "-c", source, "-o", made],
                folder,
            )  # fmt: skip
            objects.append(made)
        _run(
            [NVCC, "-shared", "-cudart", "none", "-Xlinker", "-Bsymbolic", *objects,
             "-o", folder / "host.so"],
            folder,
        )  # fmt: skip
        _publish(folder / "host.so", out)
    return out


@functools.lru_cache(maxsize=64)
def codes(text: str) -> dict[str, Code]:
    """Executable kernels of a PTX text, by name."""
    return {name: Code(kernel) for name, kernel in ptx.parse(text).kernels.items()}
