"""Every way a launch can fail, one exception class for each, all derived from EmulatorError."""

from __future__ import annotations


class EmulatorError(Exception):
    """Base of everything the emulator raises about a PTX program or a launch.

    Attributes (None where they do not apply): ``line`` PTX line number, ``text`` the instruction,
    ``source`` the kernel source position recorded by ``.loc``, ``cta`` the (x, y, z) block index.
    """

    def __init__(self, message: str, *, line=None, text=None, source=None, cta=None):
        super().__init__(message)
        self.line, self.text, self.source, self.cta = line, text, source, cta


class ParseError(EmulatorError):
    """The text is not PTX that this parser understands."""


class UnknownInstruction(EmulatorError):
    """An opcode or a modifier without an implementation; raised before anything runs."""


class ArgumentError(EmulatorError):
    """A launch argument does not fit the kernel's parameter, grid, block or tensor."""


class SharedLimit(EmulatorError):
    """The block asks for more shared memory than the architecture gives one block."""


class UninitialisedRegister(EmulatorError):
    """A register is read that no path from the entry has written."""


class UninitialisedSharedRead(EmulatorError):
    """Shared memory is read that nothing in this block has written."""


class PendingCopyRead(EmulatorError):
    """cp.async data is read before the issuing thread waited for its group."""


class SharedRace(EmulatorError):
    """Two unordered accesses to the same shared bytes, at least one of them a write."""


class UnsynchronisedRead(SharedRace):
    """Read after another thread's write with nothing between that orders the two (read-after-write)."""


class WriteAfterRead(SharedRace):
    """Write over bytes that another thread read, with nothing between that orders the two."""


class WriteAfterWrite(SharedRace):
    """Two writes to the same shared bytes with nothing that orders them."""


class BarrierMismatch(EmulatorError):
    """A barrier that cannot complete, or whose participants disagree about it."""


class PartialWarp(EmulatorError):
    """A warp-wide instruction met by part of a warp, or a member mask naming absent lanes."""


class MisalignedAccess(EmulatorError):
    """An address is not a multiple of the access width."""


class OutOfBoundsGlobal(EmulatorError):
    """A global access outside every tensor of the launch, or in a gap of a strided view."""


class OutOfBoundsShared(EmulatorError):
    """A shared access outside the block's static and dynamic allocation."""


class OutOfBoundsLocal(EmulatorError):
    """A local or parameter access outside its space."""


class ReadOnlyWrite(EmulatorError):
    """A write to a tensor passed with ``writable=False``."""


class GlobalRace(EmulatorError):
    """The same global bytes written by different threads of one launch without atomics."""


class Trap(EmulatorError):
    """The kernel executed ``trap``."""
