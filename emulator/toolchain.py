"""nvcc to PTX, and the launch code to a library that talks to the emulator. Results are cached."""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from emulator import ptx
from emulator.compile import Code
from jax_w4a4 import plan

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda"
HOST = pathlib.Path(__file__).resolve().parent / "host"
NVCC = shutil.which("nvcc")
_FLAGS = ("-std=c++17", "-Wno-deprecated-gpu-targets")


def cache_dir() -> pathlib.Path:
    return pathlib.Path(os.environ.get("W4A4_EMULATOR_CACHE", ROOT / "build" / "emulator"))


# Paths with activations of their own (GemmV2ActPath); of those of the decode kernel.
QUANTIZE_V2_PATHS = (
    "Mxfp4",
    "Nvfp4",
    "Nvfp4Rounded",
    "Int4Row",
    "Int4Group64",
    "Int4Group128",
    "Int4Scaled",
)
DECODE_QUANTIZE_PATHS = ("Mxfp4", "Nvfp4", "Nvfp4Rounded", "Int4Row")

# (path, tile_m) of GEMM v2 that the launch code can launch here: the smallest tile of every path,
# whose loop is that of tiles up to 192, and two more sizes on a path each.
INSTANCES = (
    *((path, 64) for path in plan.budget.V2_PATHS),
    ("Mxfp4Sorted", 144),
    ("Nvfp4", 160),
)
# The same of the decode kernel.
DECODE_INSTANCES = tuple(
    (path, tile) for path in plan.budget.DECODE_PATHS for tile in plan.budget.DECODE_TOKENS
)

# The same of the grouped kernel.
GROUPED_INSTANCES = tuple(
    (path.name, tile) for path in plan.budget.V2_PATHS.values() if path.grouped_tiles
    for tile in (16, 64)
)  # fmt: skip

# What is there of kernels whose waits end: enough to show what they do.
CHECKED_INSTANCES = (("Mxfp4", 64),)
CHECKED_DECODE_INSTANCES = (("Mxfp4", 8), ("Mxfp4", 32))
_CHECKED_FLAGS = ("-DJAX_W4A4_CHECKED",)

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


def gemm_v2_name(path: str, tile_m: int) -> str:
    return f"sm90_gemm_v2_{path}_{tile_m}.cu"


def grouped_name(path: str, tile_m: int) -> str:
    return f"sm90_grouped_{path}_{tile_m}.cu"


def decode_name(path: str, tile_m: int) -> str:
    return f"sm90_decode_{path}_{tile_m}.cu"


def decode_quantize_name(path: str) -> str:
    return f"sm90_decode_quantize_{path}.cu"


def quantize_v2_name(path: str) -> str:
    return f"sm90_quantize_v2_{path}.cu"


def source_text(name: str) -> str:
    """A source of the product: a file of cuda/, or instances as CMake would write them, of one tile
    or, where the name ends with the path, of all that the launch code can launch here."""
    path = CUDA / name
    if path.exists():
        return path.read_text()
    for kind in ("gemm_v2", "grouped", "decode_quantize", "decode", "quantize_v2"):
        start = f"sm90_{kind}_"
        if name.startswith(start):
            template = (CUDA / f"{start}instance.cu.in").read_text()
            kernel, _, tile = name[len(start) : -len(".cu")].partition("_")
            listed = dict(zip(("gemm_v2", "decode", "grouped"), _instances(False), strict=True))
            tiles = [tile] if tile else [t for path, t in listed.get(kind, ()) if path == kernel]
            lines = [f"W4A4_{kind.upper()}_INSTANCE({kernel}, {t})" for t in tiles]
            return template.replace("@path@", kernel).replace("@instances@", "\n".join(lines))
    raise FileNotFoundError(name)


def arch_of(name: str) -> str:
    """The architecture that a source of cuda/ is written for; its name begins with it."""
    return {"sm90": "sm_90a", "sm100": "sm_100a"}[family_of(name)]


def family_of(name: str) -> str:
    """The host library that holds a source of cuda/."""
    return "sm100" if name.startswith("sm100") else "sm90"


def _instances(checked: bool) -> tuple[tuple[tuple[str, int], ...], ...]:
    """(path, tile_m) of GEMM v2, of the decode kernel and of the grouped one."""
    if checked:
        return CHECKED_INSTANCES, CHECKED_DECODE_INSTANCES, CHECKED_INSTANCES
    return INSTANCES, DECODE_INSTANCES, GROUPED_INSTANCES


def _host_sources(family: str, checked: bool) -> list[str]:
    if family == "sm100":
        return [f"sm100_{n}.cu" for n in ("gemm", "scales", "quantize", "down")]
    names = [f"sm90_{n}.cu" for n in (
        "gemm_v1", "gemm_v2", "decode", "decode_quantize", "down_v2", "quantize_v2",
        "quantize_public", "repack_v2", "grouped",
    )]  # fmt: skip
    gemms, decodes, groups = _instances(checked)
    names += [gemm_v2_name(path, tile) for path, tile in gemms]
    names += [decode_quantize_name(path) for path in DECODE_QUANTIZE_PATHS]
    if checked:
        names += [decode_name(path, tile) for path, tile in decodes]
        names += [grouped_name(path, tile) for path, tile in groups]
    else:  # the tiles of a path together: half of a small source's time goes into headers
        names += [f"sm90_decode_{path}.cu" for path in dict(decodes)]
        names += [f"sm90_grouped_{path}.cu" for path in dict(groups)]
    return names + [quantize_v2_name(path) for path in QUANTIZE_V2_PATHS]


def _may_wait(text: str) -> bool:
    """Whether a source, or what it includes of cuda/, asks if it is to be built with waits that
    end."""
    texts, seen = [text], set()
    while texts:
        text = texts.pop()
        if "JAX_W4A4_CHECKED" in text:
            return True
        found = {name for name in re.findall(r'#include "(.*?)"', text) if (CUDA / name).exists()}
        texts += [(CUDA / name).read_text() for name in found - seen]
        seen |= found
    return False


def product_ptx(name: str, edits: Sequence[Edit] = (), checked: bool = False) -> str:
    """PTX of one source of the product, see source_text; `checked` as in host_library."""
    kept = host_library(family_of(name), checked)[1] / f"{pathlib.Path(name).stem}.ptx"
    if not edits and kept.exists():
        return kept.read_text()
    text = None if (CUDA / name).exists() else source_text(name)
    flags = _CHECKED_FLAGS if checked else ()
    return ptx_of(name, arch_of(name), flags, edits=edits, text=text)


@functools.cache
def host_library(family: str, checked: bool = False) -> tuple[pathlib.Path, pathlib.Path]:
    """The launch code of an architecture ("sm90", "sm100") with the fake runtime.

    Args:
      checked: with kernels whose waits end (cuda/watch.h).

    Returns the library and a folder with the PTX of each source of it.
    """
    key = _key(_sources_digest(CUDA), _sources_digest(HOST), *_instances(checked), checked)
    out = cache_dir() / f"host-{family}{'-checked' if checked else ''}-{key}"
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a minute's work: once, whatever runs in parallel
        if not out.exists():
            _build_host_library(family, out, checked)
    return out / "host.so", out


def _build_host_library(family: str, out: pathlib.Path, checked: bool) -> None:
    gemms, decodes, groups = _instances(checked)
    if NVCC is None:
        raise RuntimeError("emulator: nvcc is not on PATH")

    def listed(instances: Sequence[tuple[str, int]]) -> str:
        return " ".join(f"W4A4_KERNEL({path}, {tile})" for path, tile in instances)

    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = pathlib.Path(name)
        done = folder / "done"
        done.mkdir()
        for kind, instances in (("gemm_v2", gemms), ("decode", decodes)):
            text = f"#define W4A4_{kind.upper()}_KERNELS {listed(instances)}\n"
            if kind == "gemm_v2":
                text += f"#define W4A4_GROUPED_KERNELS {listed(groups)}\n"
            (folder / f"sm90_{kind}_kernels.h").write_text(text)
        names = _host_sources(family, checked)
        for source in names:
            (folder / source).write_text(source_text(source))
        for source in ("fake_cuda.cc", f"entry_{family}.cc", *(["waits.cc"] if checked else [])):
            shutil.copy(HOST / source, folder)
            names.append(source)
        flags = (*_FLAGS, *(_CHECKED_FLAGS if checked else ()))
        if checked:
            (folder / "watch.cc").write_text((CUDA / "watch.cc").read_text())
            names.append("watch.cc")
        arch = {"sm90": "compute_90a", "sm100": "compute_100a"}[family]
        # What knows of no waits is the same in both libraries.
        same = {s for s in _host_sources(family, True) if not _may_wait(source_text(s))}
        others = host_library(family)[1] if checked else None

        def build(source: str) -> None:
            if others is not None and source in same:
                shutil.copy(others / f"{source}.o", folder)
                shutil.copy(others / f"{pathlib.Path(source).stem}.ptx", done)
                return
            # -keep leaves the PTX beside the object.
            keep = folder / f"keep-{source}"
            keep.mkdir()
            _run(
                [NVCC, "-gencode", f"arch={arch},code={arch}", *flags, f"-I{CUDA}",
                 f"-I{folder}", "-Xcompiler", "-fPIC", "-keep", "-keep-dir", keep, "-c", source,
                 "-o", f"{source}.o"],
                folder,
            )  # fmt: skip
            for made in keep.glob("*.ptx"):
                made.rename(done / made.name)
            shutil.rmtree(keep)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(build, names))
        _run(
            [NVCC, "-shared", "-cudart", "none", "-Xlinker", "-Bsymbolic",
             *(f"{n}.o" for n in names), "-o", done / "host.so"],
            folder,
        )  # fmt: skip
        if not checked:
            for source in same:
                (folder / f"{source}.o").rename(done / f"{source}.o")
        # The library and its PTX appear together: names of kernels carry a hash of their build.
        done.rename(out)


@functools.lru_cache(maxsize=64)
def codes(text: str) -> dict[str, Code]:
    """Executable kernels of a PTX text, by name."""
    return {name: Code(kernel) for name, kernel in ptx.parse(text).kernels.items()}
