"""What an architecture cannot hold, told before anything is compiled, with the reason."""

from __future__ import annotations

from collections.abc import Iterable

from ..arch import Architecture
from . import binding
from .space import KIB, Point, Refusal, Workload

# A thread has 255 registers. Beside the accumulators of O and S live P, operand fragments, addresses and the softmax
# state: in every kernel that ptxas has made without spilling that was at least this many.
LEAST_OTHER_REGISTERS = 24
MAX_REGISTERS = 255


def refusal(point: Point, workload: Workload, arch: Architecture) -> str | None:
    """Why ``point`` cannot be had, or None."""
    try:
        spec = binding.spec_of(point, workload, arch)
    except ValueError as error:
        return str(error)
    if spec.shared_bytes > arch.shared_block_bytes:
        return f"needs {spec.shared_bytes / KIB:g} KiB, {arch.name} gives a block {arch.shared_block_bytes / KIB:g}"
    rows = spec.rows_a_warp // 16  # m16n8 accumulator rows of a warp
    accumulators = rows * (spec.value_dim + 7) // 8 * 4 + rows * spec.tile_n // 8 * 4
    fragments = rows * spec.held_columns // 16 * 4
    held = accumulators + fragments
    names = "O, S and Q" if fragments else "O and S"
    if held + LEAST_OTHER_REGISTERS > MAX_REGISTERS:
        return f"{names} alone take {held} registers a thread of {MAX_REGISTERS}: it would spill"
    if spec.threads * (held + LEAST_OTHER_REGISTERS) > arch.registers:
        return (
            f"{spec.threads} threads with {held} registers for {names} each need more than the "
            f"{arch.registers:,} registers of an SM"
        )
    if spec.threads > 1024:
        return f"{spec.threads} threads, a block takes 1024"
    return None


def split(points: Iterable[Point], workload: Workload, arch: Architecture) -> tuple[list[Point], list[Refusal]]:
    """Points that may be compiled, and the others with their reasons.

    Raises ValueError where the kernel does not take the problem at all.
    """
    binding.shipped(workload, arch)
    kept, refused = [], []
    for point in points:
        reason = refusal(point, workload, arch)
        if reason is None:
            kept.append(point)
        else:
            refused.append(Refusal(point, reason))
    return kept, refused
