"""A functional emulator of PTX: executes what nvcc emits, on a machine without a GPU.

It runs kernels for sm_90a and sm_100a warp by warp, with clusters, mbarriers, the copy engine,
wgmma and tcgen05, under adversarial seeded schedules, and reports deadlocks, data races, accesses
out of bounds, reads of memory that nobody wrote and misused instructions. docs/emulator.md says
what is modelled, what is not and what the model rests on.
"""

from emulator.errors import DeadlockError, EmulationError, RaceError, UnknownOpcodeError
from emulator.launch import Device, Options

__all__ = [
    "DeadlockError",
    "Device",
    "EmulationError",
    "Options",
    "RaceError",
    "UnknownOpcodeError",
]
