"""Two small kernels that measure what a device gives: the rate of ``mma.sync``, and of reading memory.

Both compute something that is checked. They are compiled for each run and not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..parameters import Parameter, ScalarParameter, TensorParameter

M_TILES, N_TILES = 2, 4  # independent m16n8k16 of a warp: more than its latency over its interval on any device
UNROLL = 8
VECTORS = 8  # 16-byte loads that a thread has under way


@dataclass(frozen=True)
class _Probe:
    """Blocks of some warps that share nothing."""

    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class MmaRateSpec(_Probe):
    """Every warp multiplies the same A (rows, 16) and B (columns, 16) in bfloat16, ``rounds * UNROLL`` times, into
    float32 accumulators in registers: C = rounds UNROLL A B^T, exactly, while that is below 2^24.

    Sixteen warps a block: four a sub-partition, so that one's wait is another's turn.
    """

    warps: int = 16

    @property
    def title(self) -> str:
        return "rate of mma.sync"

    @property
    def rows(self) -> int:
        return 16 * M_TILES

    @property
    def columns(self) -> int:
        return 8 * N_TILES

    def operations(self, blocks: int, rounds: int) -> int:
        """FLOP of a launch."""
        return 2 * self.rows * self.columns * 16 * UNROLL * rounds * self.warps * blocks

    def parameters(self) -> tuple[Parameter, ...]:
        return (
            TensorParameter("a", "bfloat16", (self.rows, 16), (16, 1), divisor=8),
            TensorParameter("b", "bfloat16", (self.columns, 16), (16, 1), divisor=8),
            TensorParameter(
                "c", "float32", (None, self.rows, self.columns), (self.rows * self.columns, self.columns, 1),
                divisor=4, written=True,
            ),
            ScalarParameter("rounds", "int32"),
        )  # fmt: skip

    def build(self) -> Any:
        from .probe_kernels import MmaRate

        return MmaRate(self)


@dataclass(frozen=True)
class ReadRateSpec(_Probe):
    """Every thread adds up int32 numbers, 16 bytes at a time, ``VECTORS`` loads under way: x (n,) to sums (threads,).

    n: a multiple of ``step(blocks)``.
    """

    warps: int = 8

    @property
    def title(self) -> str:
        return "rate of reading memory"

    def step(self, blocks: int) -> int:
        """Elements that the whole grid reads at once."""
        return 4 * VECTORS * self.threads * blocks

    def parameters(self) -> tuple[Parameter, ...]:
        return (
            TensorParameter("x", "int32", (None,), (1,), divisor=4),
            TensorParameter("sums", "int32", (None,), (1,), written=True),
        )

    def build(self) -> Any:
        from .probe_kernels import ReadRate

        return ReadRate(self)
