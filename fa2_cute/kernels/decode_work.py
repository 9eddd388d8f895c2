"""Which rows and which keys a block of the decode kernel works on."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..decode_spec import DecodeSpec
from . import packing, pages


@dataclass(frozen=True)
class Keys:
    """Which keys a block works on and where they are.

    first, end      keys of the sequence that any of the block's rows sees
    length          keys of the sequence; query i is at position i + offset
    row             of the cache; 0 if paged
    table           None if not paged
    """

    first: Int32
    end: Int32
    length: Int32
    offset: Int32
    row: Int32
    table: pages.Table | None


@dataclass(frozen=True)
class Rows:
    """Packed rows: ``count`` of them exist, and row r is query (first + r) // group of head (first + r) % group.

    b               sequence; -1 of rows that belong to none
    kv_head         whose group of query heads they are
    batch_row, start    the sequence's queries are rows [start, start + query_len) of row ``batch_row`` of q
    """

    b: Int32
    kv_head: Int32
    group: Int32
    batch_row: Int32
    start: Int32
    query_len: Int32
    first: Int32
    count: Int32


def find_rows(spec: DecodeSpec, mQ: cute.Tensor, mK: cute.Tensor, mCuQ: cute.Tensor | None) -> Rows:
    """This block's rows, in a grid made by ``DecodeSpec.grid``; a count that is not positive: none."""
    x, y, _ = cute.arch.block_idx()
    group = mQ.shape[2] // mK.shape[2]
    index = x // mK.shape[2]
    kv_head = x - index * mK.shape[2]
    if mCuQ is not None:
        work = packing.find_work(index, mCuQ, mQ.shape[1], group, spec.tile_m)
        count = cutlass.min(work.query_len * group - work.first_row, Int32(spec.tile_m))
        return Rows(work.b, kv_head, group, Int32(0), work.start, work.query_len, work.first_row, count)
    query_len = mQ.shape[1]
    first = y * spec.tile_m
    count = cutlass.min(query_len * group - first, Int32(spec.tile_m))
    return Rows(index, kv_head, group, index, Int32(0), query_len, first, count)


def find_keys(
    spec: DecodeSpec,
    mK: cute.Tensor,
    mSeqlens: cute.Tensor | None,
    mTable: cute.Tensor | None,
    mBatchIdx: cute.Tensor | None,
    mLeftpad: cute.Tensor | None,
    rows: Rows,
    left: Int32,
    right: Int32,
) -> Keys:
    """The keys that rows of this block see: those of the sequence within the window of its first to last query."""
    capacity = mK.shape[1]
    b = cutlass.max(rows.b, Int32(0))
    row = b
    table = None
    if mTable is not None:
        capacity = capacity * mTable.shape[1]
        table = pages.Table(mTable[b, None], mK.shape[0], mK.shape[1])
        row = Int32(0)
    length = capacity if mSeqlens is None else cutlass.min(cutlass.max(mSeqlens[b], Int32(0)), capacity)
    first, end = Int32(0), length
    if mBatchIdx is not None:
        row = mBatchIdx[b]
        exists = (row >= 0) & (row < mK.shape[0])
        row = cutlass.select_(exists, row, Int32(0))
        end = cutlass.select_(exists, end, Int32(0))
    if mLeftpad is not None:
        first = cutlass.max(mLeftpad[b], Int32(0))
    if spec.varlen:
        end = cutlass.select_((rows.b >= 0) & (rows.count > 0), end, Int32(0))
    offset = length - rows.query_len
    first_query = rows.first // rows.group
    last_query = (rows.first + rows.count - 1) // rows.group
    first = cutlass.max(first, first_query + offset - left)
    end = cutlass.min(end, last_query + offset + right + 1)
    return Keys(first, cutlass.max(end, Int32(0)), length, offset, row, table)
