"""Which query tile of which head a thread block works on, and which key tiles that tile needs."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..spec import FEWER_REFERENCED, REFERENCED_KEYS, group_log2, sequences_log2
from .place import Place


@dataclass(frozen=True)
class Work:
    """One block's query tile.

    head, b                 query head; batch index of the tensors (0 where sequences are packed)
    sequence                which sequence it is
    first_row               the tile's first row, counted within its sequence; negative: there is no work
    query_start, query_len  the sequence's queries among the rows of q
    key_start, key_len      the sequence's keys among the rows of k and v
    split, splits           which share of the tile's keys, and of how many; None: all keys
    """

    head: Int32
    b: Int32
    sequence: Int32
    first_row: Int32
    query_start: Int32
    query_len: Int32
    key_start: Int32
    key_len: Int32
    split: Int32 | None = None
    splits: Int32 | None = None


def rank_and_head(place: Place, heads: Int32) -> tuple[Int32, Int32]:
    """(rank of the query tile, head) of this block in a grid made by ``ForwardSpec.grid``; a head >= heads is idle.

    Blocks start in the order x, y, z. Heads of a group alternate in x, so that blocks that run together share K and V
    in the L2.
    """
    shift = group_log2(heads)
    rank = place.block_x >> shift
    return rank, (place.block_y << shift) + place.block_x - (rank << shift)


@cute.jit
def batched_work(
    place: Place,
    batch: Int32,
    heads: Int32,
    query_len: Int32,
    key_len: Int32,
    splits: Int32 | None,
    tile_m: cutlass.Constexpr,
) -> Work:
    """The work of this block where every sequence of the batch has the same lengths; a sequence >= batch is idle.

    The last query tiles come first: under a causal mask those are the longest, and a long block that starts last would
    leave the other multiprocessors idle at the end. Short sequences alternate, too, so that this holds for many blocks.
    The shares of a tile follow each other.
    """
    tiles = cute.ceil_div(query_len, tile_m)
    # Uniform for ptxas, too: what follows from them then takes registers of the warp, not of its threads.
    head_shift = cute.arch.make_warp_uniform(group_log2(heads))
    sequence_shift = cute.arch.make_warp_uniform(sequences_log2(batch, tiles))
    rank = place.block_x >> (head_shift + sequence_shift)
    rest = place.block_x - (rank << (head_shift + sequence_shift))
    sequence = rest >> head_shift
    head = (place.block_y << head_shift) + rest - (sequence << head_shift)
    b = (place.block_z << sequence_shift) + sequence
    split = None
    if cutlass.const_expr(splits is not None):
        share = rank
        rank = share // splits
        split = share - rank * splits
    first_row = (tiles - 1 - rank) * tile_m
    return Work(head, b, b, first_row, Int32(0), query_len, Int32(0), key_len, split, splits)


@cute.jit
def packed_work(
    place: Place,
    heads: Int32,
    total_queries: Int32,
    total_keys: Int32,
    mCuQ: cute.Tensor,  # (sequences + 1,) int32
    mCuK: cute.Tensor,
    tile_m: cutlass.Constexpr,
) -> Work:
    """The work of this block where sequences are packed along the rows.

    Sequence i of n is rows [cu[i], cu[i + 1]). The rows before the first and after the last count as sequences of
    their own that have no keys, so that every row is written: start(0) = 0, start(i) = cu[i - 1], start(n + 2) = total.
    The tiles of sequence i have the ranks from start(i) // tile_m + i on: that never decreases, and leaves each
    sequence as many as it needs, so the block finds its sequence by search, and the grid needs no lengths.

    Whatever cu holds, all rows of a Work are rows of the tensors.
    """
    rank, head = rank_and_head(place, heads)
    sequences = mCuQ.shape[0] + 1  # with the two that have no keys
    i = find_sequence(rank, mCuQ, total_queries, 1, tile_m)
    query_start = start_of(mCuQ, i, total_queries)
    query_len = cutlass.max(start_of(mCuQ, i + 1, total_queries) - query_start, Int32(0))
    key_start = Int32(0)
    key_len = Int32(0)
    if (i > 0) & (i < sequences - 1):
        key_start = start_of(mCuK, i, total_keys)
        key_len = cutlass.max(start_of(mCuK, i + 1, total_keys) - key_start, Int32(0))
    local = rank - (query_start // tile_m + i)
    first_row = (cute.ceil_div(query_len, tile_m) - 1 - local) * tile_m
    sequence = cutlass.max(cutlass.min(i - 1, sequences - 3), Int32(0))
    return Work(head, Int32(0), sequence, first_row, query_start, query_len, key_start, key_len)


@cute.jit
def start_of(mCu: cute.Tensor, i: Int32, total: Int32) -> Int32:
    """The first row of sequence ``i``, between 0 and ``total`` whatever mCu holds."""
    last = mCu.shape[0] - 1
    value = mCu[cutlass.max(cutlass.min(i - 1, last), Int32(0))]
    value = cutlass.max(cutlass.min(value, total), Int32(0))
    if i == 0:
        value = Int32(0)
    if i > last + 1:
        value = total
    return value


@cute.jit
def find_sequence(
    rank: Int32, mCu: cute.Tensor, total: Int32, rows_a_query: Int32 | int, tile_m: cutlass.Constexpr
) -> Int32:
    """The last sequence whose first tile's rank is at most ``rank``; the lanes of a warp look at 32 at a time."""
    lane = cute.arch.lane_idx()
    low = Int32(0)
    span = mCu.shape[0] + 1  # it is among the ``span`` sequences from ``low`` on
    while span > 1:
        step = cute.ceil_div(span, 32)
        i = low + lane * step
        begins = (i < low + span) & (first_rank(mCu, i, total, rows_a_query, tile_m) <= rank)
        # Where the starts do not increase, lane 0 alone is sure: low itself was found to begin in time.
        found = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(begins)), Int32(1))
        high = low + span
        low = low + (found - 1) * step
        span = cutlass.min(step, high - low)
    return low


def first_rank(mCu: cute.Tensor, i: Int32, total: Int32, rows_a_query: Int32 | int, tile_m: int) -> Int32:
    """The rank of the first tile of sequence ``i``."""
    return start_of(mCu, i, total) * rows_a_query // tile_m + i


@dataclass(frozen=True)
class KeyRange:
    """Key tiles [begin, end) of a query tile, or of a block's share; no row sees the rest.

    [plain_begin, plain_end)   need no mask: every row sees all their keys
    referenced                 in the tiles [referenced, end) every row that sees any key sees one; without a bound on
                               the right they are the tiles that hold the last keys, as many as references should be of
    """

    begin: Int32
    plain_begin: Int32
    plain_end: Int32
    end: Int32
    referenced: Int32


@cute.jit
def key_range(
    work: Work,
    window_left: Int32 | None,
    window_right: Int32 | None,
    tile_m: cutlass.Constexpr,
    tile_n: cutlass.Constexpr,
) -> KeyRange:
    """The key tiles that ``work`` needs. Row i sees keys from i + offset - left to i + offset + right, with
    offset = key_len - query_len; a side that is None is unbounded.
    """
    key_len = work.key_len
    offset = key_len - work.query_len
    first_row = work.first_row
    last_row = cutlass.min(first_row + tile_m, work.query_len) - 1
    begin, plain_begin = Int32(0), Int32(0)
    seen_by_all, seen_by_any = key_len, key_len
    if cutlass.const_expr(window_right is not None):
        seen_by_all = _clamped(first_row + (offset + window_right) + 1, key_len)
        seen_by_any = _clamped(last_row + (offset + window_right) + 1, key_len)
    end = cute.ceil_div(seen_by_any, tile_n)
    if cutlass.const_expr(window_left is not None):
        begin = cutlass.min(_clamped(first_row + (offset - window_left), key_len) // tile_n, end)
        plain_begin = cute.ceil_div(_clamped(last_row + (offset - window_left), key_len), tile_n)
    plain_end = cutlass.max(seen_by_all // tile_n, begin)
    plain_begin = cutlass.min(plain_begin, plain_end)
    # The first row sees keys of the tile that holds its last one; the other rows' last ones come later.
    referenced = cutlass.max(cutlass.max(seen_by_all - 1, Int32(0)) // tile_n, begin)
    if cutlass.const_expr(window_right is None):
        referenced = cutlass.max(_first_referenced_tile(key_len, (end - begin) * tile_n, tile_n), begin)
    return KeyRange(begin, plain_begin, plain_end, end, referenced)


def share_of(work: Work, tiles: KeyRange, tile_n: int, left: bool, right: bool) -> tuple[Work, KeyRange]:
    """``work`` and its ``tiles`` without the keys of other shares: even ones, the first a tile longer than the last; of
    few tiles some get none.

    The share's first key becomes key 0, so that no loop needs to know where the share begins: to all that counts keys
    from the sequence's end (windows, slopes) it is as if the keys before had never been there.

    left, right: where the window is bounded. With a bound on the right a row's last key may lie in this share or behind
    it, in which case the row sees all of the share's last tile, or nothing but what the left side leaves. Else all rows
    end with the share, and references come from as many of its keys as they would if it were the whole row, since its
    part is combined with parts that have references of their own.
    """
    count = tiles.end - tiles.begin
    each = count // work.splits
    longer = count - each * work.splits
    own = each + cutlass.select_(work.split < longer, Int32(1), Int32(0))
    begin = tiles.begin + work.split * each + cutlass.min(work.split, longer)
    zero = Int32(0)
    plain_begin, plain_end = (
        cutlass.max(cutlass.min(edge - begin, own), zero) for edge in (tiles.plain_begin, tiles.plain_end)
    )
    keys_before, keys = begin * tile_n, own * tile_n
    if right:
        referenced = cutlass.min(tiles.referenced - begin, own - 1)
    else:
        referenced = _first_referenced_tile(cutlass.min(work.key_len - keys_before, keys), keys, tile_n)
    share = replace(work, key_start=work.key_start + keys_before, key_len=work.key_len - keys_before)
    return share, KeyRange(zero, plain_begin if left else zero, plain_end, own, cutlass.max(referenced, zero))


def _first_referenced_tile(key_end: Int32, keys: Int32, tile_n: int) -> Int32:
    """The first tile that a row's reference comes from where no mask cuts: REFERENCED_KEYS and fewer of the last.

    key_end: behind the last key. keys: how many the row has, in whole tiles.
    """
    wanted = cutlass.max(REFERENCED_KEYS - keys // FEWER_REFERENCED, Int32(1))
    return cutlass.max(key_end - wanted, Int32(0)) // tile_n


def _clamped(key: Int32, key_len: Int32) -> Int32:
    return cutlass.max(cutlass.min(key, key_len), Int32(0))
