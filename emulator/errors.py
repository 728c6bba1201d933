"""What the emulator raises. Every message ends with the instruction that was executing."""

from __future__ import annotations


class EmulationError(Exception):
    """A kernel did what the hardware forbids or leaves undefined."""


class UnknownOpcodeError(EmulationError):
    """The emulator does not model an instruction; it never skips one."""


class OutOfBoundsError(EmulationError):
    """An access outside every allocation, or misaligned."""


class UninitializedError(EmulationError):
    """A read of memory that nothing has written."""


class RaceError(EmulationError):
    """Two accesses of which one is a write, with nothing that orders them."""


class ProtocolError(EmulationError):
    """Misuse of a barrier, a register budget, an asynchronous group or an aligned instruction."""


class TrapError(EmulationError):
    """A kernel gave up."""


class DeadlockError(EmulationError):
    """No warp can run and nothing is in flight."""
