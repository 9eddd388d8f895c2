"""Where a thread is in the launch, read once more where values must not be kept."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Place:
    """This thread in its block, and its block in the grid."""

    thread: Int32
    block_x: Int32
    block_y: Int32
    block_z: Int32


def read() -> Place:
    """This thread's place."""
    thread, _, _ = cute.arch.thread_idx()
    return Place(thread, *cute.arch.block_idx())


def read_again() -> Place:
    """The same in a way that the compiler cannot see through.

    What is computed from it is computed anew, where it is used: addresses and coordinates that a rare path or the end
    of a kernel needs would else be kept in registers through a loop that needs these itself.
    """
    here = read()
    return Place(*(opaque(value) for value in (here.thread, here.block_x, here.block_y, here.block_z)))


def anew(value: Int32, varying: Int32) -> Int32:
    """``value``, as if it depended on ``varying``, which is not negative: what is computed from it in a loop over
    ``varying`` is computed anew in each iteration rather than kept in registers."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 zero; shr.s32 zero, {$r1}, 31; add.s32 {$w0}, {$r0}, zero; }",
        write_only_types=[Int32],
        read_only_args=[value, varying],
    )


def opaque(value: Int32) -> Int32:
    """``value``, as a 32-bit register of which LLVM knows nothing more: it then neither widens nor recombines it."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[type(value)], read_only_args=[value])
