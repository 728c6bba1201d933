"""The compiled extension: what it contains, and its registration with XLA.

The package works without it (the CPU package): every operator then runs as the `jnp` reference.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import re
from types import ModuleType
from typing import Any

import jax
import jaxlib

ENV_CHECKED = "JAX_W4A4_CHECKED"
"""Set to 1, the kernels whose waits end take the place of the others (docs/selftest.md)."""
_CHECKED = "jax_w4a4._cuda_checked"
_EXTENSION = _CHECKED if os.environ.get(ENV_CHECKED) == "1" else "jax_w4a4._cuda"
NO_CHECKED = (
    "this installation has no kernels with bounded waits; build it with "
    "-C cmake.define.JAX_W4A4_CHECKED=ON"
)


def _load() -> tuple[ModuleType | None, str]:
    """The extension module, or None and why."""
    try:
        return importlib.import_module(_EXTENSION), ""
    except ModuleNotFoundError as error:
        if error.name != _EXTENSION:
            raise
        if _EXTENSION == _CHECKED:
            raise ImportError(f"jax_w4a4: {ENV_CHECKED}=1, but {NO_CHECKED}") from None
        return None, "built without a CUDA compiler (CPU package)"


_extension, _absent = _load()

KERNELS: frozenset[str] = frozenset(
    _extension.build_info()["kernels"].split(",") if _extension is not None else ()
)
"""Plan kernels that this installation can launch, such as "sm90_v1". Empty in the CPU package."""


def has_checked() -> bool:
    """Whether this installation contains the kernels whose waits end, in use or not."""
    return importlib.util.find_spec(_CHECKED) is not None


def has_cuda() -> bool:
    """Whether this installation contains CUDA kernels. Says nothing about the machine's GPUs."""
    return _extension is not None


def build_info() -> dict[str, Any]:
    """How this installation was built.

    Returns:
      cuda: whether CUDA kernels are in it.
      reason: why not, "" if they are.
      checked: whether they are those whose waits end.
      cuda_archs: tuple of architectures with machine code, such as ("90a",).
      kernels: sorted tuple of plan kernels.
      nvcc: version of the CUDA compiler, "" without kernels.
      ffi_api: (major, minor) XLA FFI version of the headers it was compiled with, None without.
    """
    if _extension is None:
        return {
            "cuda": False,
            "reason": _absent,
            "checked": False,
            "cuda_archs": (),
            "kernels": (),
            "nvcc": "",
            "ffi_api": None,
        }
    info = _extension.build_info()
    return {
        "cuda": True,
        "reason": "",
        "checked": info["checked"],
        "cuda_archs": tuple(info["cuda_archs"].split(",")),
        "kernels": tuple(sorted(KERNELS)),
        "nvcc": info["nvcc"],
        "ffi_api": info["ffi_api"],
    }


def running_ffi_api() -> tuple[int, int]:
    """(major, minor) XLA FFI version of the installed jaxlib, from the headers it ships."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


def check_ffi_api(built: tuple[int, int], running: tuple[int, int]) -> None:
    """Raises ImportError when handlers built against `built` can't be loaded into `running`.

    A newer jaxlib accepts older handlers. An older one rejects newer handlers only when its
    backend starts, and then the whole backend fails; hence the check before registration.
    """
    if built[0] == running[0] and built[1] <= running[1]:
        return
    built_text, running_text = (".".join(map(str, api)) for api in (built, running))
    raise ImportError(
        f"jax_w4a4: the extension was compiled with XLA FFI headers {built_text}, but the "
        f"installed jaxlib {jaxlib.version.__version__} speaks {running_text}. Upgrade jaxlib, or "
        "rebuild against it: pip install --no-cache-dir --force-reinstall --no-deps jax_w4a4 "
        "(from a source tree with --no-build-isolation, the headers of the installed jaxlib are "
        "used)"
    )


_registered = False


def register() -> None:
    """Registers the FFI targets for CUDA. Does nothing the second time or in the CPU package.

    Raises:
      ImportError: the extension was compiled for a newer jaxlib than the installed one.
    """
    global _registered
    if _extension is None or _registered:
        return
    check_ffi_api(_extension.build_info()["ffi_api"], running_ffi_api())
    for name, stages in _extension.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA", api_version=1)
    _registered = True


def _require_extension(who: str) -> ModuleType:
    if _extension is None:
        raise RuntimeError(f"jax_w4a4.{who}: no CUDA kernels here: {_absent}")
    return _extension


def extension_file() -> pathlib.Path | None:
    """Where the extension in use is, None in the CPU package."""
    path = getattr(_extension, "__file__", None)
    return None if path is None else pathlib.Path(path)


def stuck_waits() -> list[str]:
    """Waits that kernels of this process gave up, or are about to; the one that began first ahead.

    Only kernels whose waits end tell; empty for others.
    """
    if _extension is None or not _extension.build_info()["checked"]:
        return []
    return _extension.stuck_waits()


def counters() -> dict[str, int]:
    """Handler activity of this process.

    Returns:
      calls: how often an execute handler ran. A replayed CUDA graph runs none.
      captured: how many of those calls were recorded into a CUDA graph.

    Raises:
      RuntimeError: CPU package.
    """
    return _require_extension("counters").counters()


def last_launch() -> dict[str, Any]:
    """The last gemm launch of this process and what the driver reports about its kernel.

    Returns:
      grid: (x, y) blocks.  block: threads.  cluster: blocks per cluster.
      dynamic_smem_bytes: of the launch.
      static_smem_bytes, max_dynamic_smem_bytes, registers, local_bytes: cudaFuncGetAttributes.
      blocks_per_sm: co-resident blocks at this shared-memory size.

    Raises:
      RuntimeError: CPU package.
      ValueError: nothing launched yet, or the driver's error.
    """
    return _require_extension("last_launch").last_launch()


def set_dependent_launch(enabled: bool) -> None:
    """Turns the overlap of quantizer and gemm inside one matmul call on (the default) or off.

    For measurements. Affects launches and CUDA graph captures made from then on.

    Raises:
      RuntimeError: CPU package.
    """
    _require_extension("set_dependent_launch").set_dependent_launch(enabled)
