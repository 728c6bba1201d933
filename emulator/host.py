"""The fake driver: launches and tensor maps of the product's host code arrive here."""

from __future__ import annotations

import ctypes
import pathlib
import re
from collections.abc import Callable

from emulator import ptx, tensormap
from emulator.compile import Code
from emulator.launch import Device


class LaunchInfo(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_int * 3),
        ("block", ctypes.c_int * 3),
        ("cluster", ctypes.c_int),
        ("smem_bytes", ctypes.c_int),
        ("dependent", ctypes.c_int),
    ]


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(LaunchInfo), ctypes.POINTER(ctypes.c_void_p)
)
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_void_p] * 4,
    *[ctypes.c_int] * 4,
)
_LAUNCH_FAILED = 719  # cudaErrorLaunchFailure


def normalized(name: str) -> str:
    """Kernel names without the hashes of anonymous namespaces, which depend on paths."""
    return re.sub(r"_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_[0-9a-f]{8}", r"_GLOBAL__N__\1", name)


class Host:
    """The host library, connected to a device and to kernels.

    An exception inside a launch is kept and raised again by `call`.

    Args:
      library: of toolchain.host_library.
      sources: a folder with the PTX of its kernels, which are compiled when they are launched.
    """

    checked = False

    def __init__(self, library: pathlib.Path, sources: pathlib.Path):
        self.library = ctypes.CDLL(str(library))
        self.device: Device | None = None
        self.kernels: dict[str, Code] = {}  # loaded instead of the library's
        self._sources = sources
        self._known: dict[str, Code] = {}
        self.error: BaseException | None = None
        self.on_launch: Callable[[str, bool], None] | None = None
        # The library keeps the pointers: these must live as long.
        self._callbacks = (_LAUNCH(self._launch), _ENCODE(self._encode))
        self.library.emulator_connect(*self._callbacks)

    def load(self, kernels: dict[str, Code]) -> None:
        self.kernels.update({normalized(name): code for name, code in kernels.items()})

    def find(self, raw: str) -> Code:
        """The kernel of this mangled name."""
        name = normalized(raw)
        if name in self.kernels:
            return self.kernels[name]
        if name not in self._known:
            entry = f".entry {raw}("
            texts = (path.read_text() for path in sorted(self._sources.glob("*.ptx")))
            text = next((text for text in texts if entry in text), None)
            if text is None:
                raise KeyError(f"no PTX of {raw} in {self._sources}")
            self._known[name] = Code(ptx.parse(text, only=raw).kernels[raw])
        return self._known[name]

    def set_clusters(self, clusters: int) -> None:
        """Clusters that run at once, which persistent kernels ask for."""
        self.library.emulator_set_clusters(clusters)

    def call(self, name: str, *args: object) -> None:
        """Calls a launch function; raises what the emulated kernel raised."""
        self.error = None
        code = getattr(self.library, name)(*args)
        if self.error is not None:
            raise self.error
        if code:
            raise RuntimeError(f"{name}: the launch code returned CUDA error {code}")

    def _launch(self, info_pointer: object, args: object) -> int:
        try:
            info = info_pointer.contents  # type: ignore[attr-defined]
            name = normalized(info.kernel.decode())
            code = self.find(info.kernel.decode())
            kernel = code.kernel
            raw = bytearray(kernel.param_bytes)
            for i, param in enumerate(kernel.params):
                data = ctypes.string_at(args[i], param.size)  # type: ignore[index]
                raw[param.offset : param.offset + param.size] = data
            if self.on_launch is not None:
                self.on_launch(name, bool(info.dependent))
            assert self.device is not None
            self.device.launch(
                code,
                tuple(info.grid),
                tuple(info.block),
                bytes(raw),
                cluster=info.cluster,
                dynamic_shared=info.smem_bytes,
                dependent=bool(info.dependent),
            )
            return 0
        except BaseException as error:
            self.error = error
            return _LAUNCH_FAILED

    def _encode(self, out, kind, rank, address, sizes, strides, box, steps, *modes) -> int:
        def values(pointer: int, ctype: type, count: int) -> list[int]:
            return list((ctype * count).from_address(pointer)) if count else []

        try:
            raw = tensormap.encode(
                kind,
                address or 0,
                values(sizes, ctypes.c_uint64, rank),
                values(strides, ctypes.c_uint64, rank - 1),
                values(box, ctypes.c_uint32, rank),
                values(steps, ctypes.c_uint32, rank),
                *modes,
            )
        except tensormap.Refused as error:
            self.error = error
            return 1
        ctypes.memmove(out, raw, len(raw))
        return 0


class CheckedHost(Host):
    """The same for kernels whose waits end: toolchain.host_library(family, checked=True)."""

    checked = True

    def __init__(self, library: pathlib.Path, sources: pathlib.Path):
        self._device: Device | None = None
        super().__init__(library, sources)
        self.library.emulator_set_wait_records.argtypes = [ctypes.c_void_p]
        self.library.emulator_stuck_waits.argtypes = [ctypes.c_void_p]
        self.library.emulator_stuck_waits.restype = ctypes.c_char_p

    @property
    def device(self) -> Device | None:  # type: ignore[override]
        return self._device

    @device.setter
    def device(self, device: Device | None) -> None:
        """Kernels of the device leave their records in memory of it."""
        self._device = device
        if device is not None:
            size = self.library.emulator_wait_records_bytes()
            self._records = device.empty(size, "records of waits", poison=0)
            self.library.emulator_set_wait_records(self._records.base)

    def stuck_waits(self) -> list[str]:
        """What the kernels of the device wait for in vain, the wait that began first ahead."""
        text = self.library.emulator_stuck_waits(self._records.data.ctypes.data)
        return text.decode().splitlines()
