"""What a self-test leaves behind: one record per GPU model, driver and extension.

Records are small JSON files in JAX_W4A4_CACHE, or jax_w4a4/ below XDG_CACHE_HOME or ~/.cache. They
hold nothing that names a machine or a single GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
from typing import Any

import jax

from jax_w4a4 import _ffi

ENV_CACHE = "JAX_W4A4_CACHE"
ENV_ALLOW = "JAX_W4A4_ALLOW_UNPROVEN"
SCHEMA = 1
COMMAND = "python -m jax_w4a4 selftest"


class UnprovenError(NotImplementedError):
    """A kernel that asks for a passing self-test of this GPU, driver and extension has none."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a record holds for.

    Attributes:
      gpu: the model, such as "NVIDIA H200".
      driver: version of the kernel driver, or of its CUDA interface where only that is known.
      extension: SHA-256 of the extension module, machine code included.
    """

    gpu: str
    driver: str
    extension: str

    @property
    def file_name(self) -> str:
        text = json.dumps([SCHEMA, *dataclasses.astuple(self)])
        model = re.sub(r"[^A-Za-z0-9]+", "-", self.gpu).strip("-").lower()
        return f"selftest-{model}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@functools.cache
def extension_hash() -> str | None:
    """SHA-256 of the extension's file, None in the CPU package."""
    path = _ffi.extension_file()
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _nvml_driver() -> str | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2():
            return None
        try:
            if nvml.nvmlSystemGetDriverVersion(text, len(text)):
                return None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return text.value.decode(errors="replace") or None


def _proc_driver() -> str | None:
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def _cuda_driver() -> str | None:
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


@functools.cache
def driver_version() -> str | None:
    """Of the GPU's driver, None where nothing tells."""
    return _nvml_driver() or _proc_driver() or _cuda_driver()


def identity(device: jax.Device | None = None) -> Identity | str:
    """Of the first local CUDA device, or of another; a text says why there is none."""
    extension = extension_hash()
    if extension is None:
        return "this installation has no CUDA kernels"
    if device is None:
        try:
            device = jax.local_devices(backend="cuda")[0]
        except RuntimeError:
            return "JAX has no CUDA device"
    driver = driver_version()
    if driver is None:
        return "the version of the GPU's driver cannot be read"
    return Identity(device.device_kind, driver, extension)


def folder() -> pathlib.Path:
    """Where records are."""
    if named := os.environ.get(ENV_CACHE):
        return pathlib.Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative XDG_CACHE_HOME counts as unset.
    root = pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / ".cache"
    return root / "jax_w4a4"


def save(found: Identity, report: dict[str, Any]) -> pathlib.Path:
    """Stores a report, passing or not, in place of an older one. Readers see all of it or none."""
    path = folder() / found.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": SCHEMA, "identity": dataclasses.asdict(found), **report}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    return path


def passed(found: Identity) -> bool:
    """Whether the last full self-test of this identity passed. What cannot be read counts as no."""
    try:
        record = json.loads((folder() / found.file_name).read_text())
    except (OSError, ValueError):
        return False
    return (
        isinstance(record, dict)
        and record.get("identity") == dataclasses.asdict(found)
        and record.get("passed") is True
    )


_proven: set[Identity] = set()


def unproven(kernel: str, device: jax.Device | None = None) -> str | None:
    """Why `kernel` may not run here, with the way out; None if it may."""
    if os.environ.get(ENV_ALLOW) == "1":
        return None
    found = identity(device)
    if isinstance(found, str):
        why = found
    elif found in _proven or passed(found):
        _proven.add(found)
        return None
    else:
        why = (
            f"there is no passing self-test of it for {found.gpu}, driver {found.driver} and this "
            f"build ({found.extension[:12]}) in {folder()}"
        )
    return (
        f"kernel {kernel} was proven without its chip, and {why}; run `{COMMAND}` once on this "
        f"machine, or set {ENV_ALLOW}=1, or use implementation='xla'"
    )


def require(kernel: str, device: jax.Device | None = None) -> None:
    """Raises unless the self-test passed with this GPU, driver and extension.

    Args:
      kernel: name of the kernel that asks, for the message.
      device: the first local CUDA device by default.

    Raises:
      UnprovenError: there is no passing record, and JAX_W4A4_ALLOW_UNPROVEN is not 1.
    """
    why = unproven(kernel, device)
    if why is not None:
        raise UnprovenError(f"jax_w4a4.matmul: {why}")
