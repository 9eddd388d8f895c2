"""Shared-memory banks: 32 of 4 bytes. How many passes an access takes, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BANKS, BANK_BYTES = 32, 4  # CUDA C++ Programming Guide, "Shared Memory", all architectures since sm_50


@dataclass(frozen=True)
class Phase:
    """Lanes whose accesses are served together.

    lanes       their numbers; addresses: their byte addresses
    banks       for each lane the first bank of what it touches
    wavefronts  passes: the most distinct 4-byte words that one bank is asked for
    """

    lanes: tuple[int, ...]
    addresses: tuple[int, ...]
    banks: tuple[int, ...]
    wavefronts: int

    @property
    def conflicts(self) -> int:
        """Passes beyond the one that these bytes need."""
        return self.wavefronts - 1


def phases(addresses: Sequence[int], width: int) -> list[Phase]:
    """The phases of one warp's access of ``width`` bytes a lane at ``addresses``.

    Lanes go together so that a phase is 128 bytes: 8 lanes of 16 bytes, which for ldmatrix is one 8x8 matrix.
    """
    together = len(addresses) if width <= BANK_BYTES else BANKS * BANK_BYTES // width
    found = []
    for first in range(0, len(addresses), together):
        part = tuple(addresses[first : first + together])
        words: dict[int, set[int]] = {}
        for address in part:
            for word in range(address // BANK_BYTES, (address + width - 1) // BANK_BYTES + 1):
                words.setdefault(word % BANKS, set()).add(word)
        found.append(
            Phase(
                tuple(range(first, first + len(part))),
                part,
                tuple(address // BANK_BYTES % BANKS for address in part),
                max(len(distinct) for distinct in words.values()),
            )
        )
    return found


def wavefronts(addresses: Sequence[int], width: int) -> int:
    """Passes of the whole access."""
    return sum(phase.wavefronts for phase in phases(addresses, width))
