"""Which rows of which sequence a block has, where queries of different lengths are packed along the rows of q."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .schedule import find_sequence, first_rank, start_of


@dataclass(frozen=True)
class PackedWork:
    """One block's tile of packed rows (query x head of one KV head).

    b               sequence; -1 of rows of q before the first and after the last one
    start           its queries are rows [start, start + query_len) of q
    first_row       the tile's first packed row, counted within the sequence
    """

    b: Int32
    start: Int32
    query_len: Int32
    first_row: Int32


@cute.jit
def find_work(
    rank: Int32,
    mCuQ: cute.Tensor,  # (sequences + 1,) int32
    total: Int32,
    group: Int32,
    tile_m: cutlass.Constexpr,
) -> PackedWork:
    """The tile with number ``rank``, as in ``schedule.packed_work``, a query being ``group`` rows.

    The rows before the first and after the last sequence count as sequences of their own.
    """
    sequences = mCuQ.shape[0] + 1
    low = find_sequence(rank, mCuQ, total, group, tile_m)
    start = start_of(mCuQ, low, total)
    query_len = cutlass.max(start_of(mCuQ, low + 1, total) - start, Int32(0))
    first_row = (rank - first_rank(mCuQ, low, total, group, tile_m)) * tile_m
    b = low - 1 if low < sequences - 1 else Int32(-1)
    return PackedWork(b, start, query_len, first_row)
