"""Where the rows of a KV cache lie in memory and in shared memory, and their way from one to the other."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from ..cache_spec import VECTOR_BYTES
from .place import opaque

LINE_ENTRIES = 32  # of a page table in 128 bytes


def chunks_a_line(row_bytes: int) -> int:
    """16-byte chunks of the columns that are stored together: 8 (128 bytes), or the power of two that divides a row."""
    chunks = row_bytes // VECTOR_BYTES
    return min(8, chunks & -chunks)


def swizzle(row: int | Int32, width: int) -> int | Int32:
    """What the chunk's number in a line of ``width`` chunks is XORed with in row ``row``.

    The eight rows of one ldmatrix matrix must meet all eight groups of four banks: a line of 8 chunks takes a pass over
    the banks, of 4 half a pass (two rows), and so on.
    """
    return (row // (8 // width)) % width


def ring_layout(row_bytes: int, rows: int, slots: int):
    """(rows, columns, slots) of 16-bit elements, swizzled as ``swizzle`` says: lines of rows, then of columns."""
    width = chunks_a_line(row_bytes)
    atom = cute.make_composed_layout(
        cute.make_swizzle(width.bit_length() - 1, 3, 3), 0, cute.make_layout((8, width * 8), stride=(width * 8, 1))
    )
    return cute.tile_to_shape(atom, (rows, row_bytes // 2, slots), (0, 1, 2))


@dataclass(frozen=True)
class RowCopy:
    """How ``threads`` threads copy tiles of ``rows`` rows: ``lanes`` side by side, ``step`` rows at a time.

    source_bytes    bytes of a row in memory; row_bytes in shared memory, where the rest is zeros
    """

    source_bytes: int
    row_bytes: int
    rows: int
    threads: int

    @property
    def chunks(self) -> int:
        return self.row_bytes // VECTOR_BYTES

    @property
    def lanes(self) -> int:
        fewest = self.threads // self.rows  # no thread may be left without a row
        return max(fewest, min(8, 1 << (self.chunks - 1).bit_length()))

    @property
    def step(self) -> int:
        return self.threads // self.lanes

    @property
    def passes(self) -> int:
        return self.rows // self.step

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Source:
    """One thread's view of the rows of one KV head, and of the ring that they are copied to.

    start           address of the sequence's row 0 (or of page 0), of this thread's first chunk
    row_chunks      16-byte units from row to row; page_chunks from page to page
    target          shared address of this thread's first chunk of row 0 of slot 0
    """

    start: Int64
    row_chunks: Uint32
    page_chunks: Uint32
    target: Int32


def make_source(
    copy: RowCopy,
    thread: Int32,
    mX: cute.Tensor,  # (rows of the cache, length, kv_heads, dim)
    row: Int32,
    kv_head: Int32,
    ring: Int32,  # shared address of the group's first slot
) -> Source:
    """The rows of ``kv_head`` of row ``row`` of the cache, as ``thread`` of the group copies them."""
    element_bytes = mX.element_type.width // 8
    lane = thread % copy.lanes
    first_row = thread // copy.lanes
    width = chunks_a_line(copy.row_bytes)
    # In 64 bits: caches have more than 2^31 elements.
    offset = (Int64(row) * mX.stride[0] + Int64(kv_head) * mX.stride[2]) * element_bytes
    start = mX.iterator.toint() + offset + Int64(lane * VECTOR_BYTES)
    line = (lane // width * copy.rows + first_row) * width
    chunk = (lane % width) ^ swizzle(first_row, width)
    return Source(
        start,
        opaque(Uint32(mX.stride[1] * element_bytes // VECTOR_BYTES)),
        opaque(Uint32(mX.stride[0] * element_bytes // VECTOR_BYTES)),
        ring + (line + chunk) * VECTOR_BYTES,
    )


@cute.jit
def copy_row(
    copy: cutlass.Constexpr,
    source: Source,
    i: cutlass.Constexpr,
    slot: Int32,
    page: Int32,
    row: Int32,
    exists: Boolean,
):
    """This thread's chunks of its ``i``-th row of a tile into ``slot``; zeros if there is no such row."""
    width = chunks_a_line(copy.row_bytes)
    chunks = Int64(source.page_chunks) * Int64(Uint32(page)) + Int64(source.row_chunks) * Int64(Uint32(row))
    address = source.start + chunks * VECTOR_BYTES
    target = source.target + slot * copy.tile_bytes
    # Rows are ``step`` apart, a power of two: what their numbers add to the swizzle is one more XOR, in bits of the
    # address that lines and slots leave alone.
    turn = swizzle(i * copy.step % 8, width) * VECTOR_BYTES
    if cutlass.const_expr(turn):
        target = target ^ turn
    for j in cutlass.range_constexpr((copy.chunks + copy.lanes - 1) // copy.lanes):
        line = j * copy.lanes // width * copy.rows + i * copy.step
        left = copy.source_bytes // VECTOR_BYTES - j * copy.lanes  # chunks of the row from this pass on
        size = Int32(VECTOR_BYTES) if exists else Int32(0)
        lane = cute.arch.thread_idx()[0] % copy.lanes
        if cutlass.const_expr(left < copy.lanes):
            size = size if lane < left else Int32(0)
        if cutlass.const_expr(copy.chunks - j * copy.lanes < copy.lanes):
            if lane < copy.chunks - j * copy.lanes:
                copy_chunk(target + line * width * VECTOR_BYTES, address + j * copy.lanes * VECTOR_BYTES, size)
        else:
            copy_chunk(target + line * width * VECTOR_BYTES, address + j * copy.lanes * VECTOR_BYTES, size)


def copy_chunk(target: Int32, address: Int64, size: Int32):
    """16 bytes to shared memory, of which ``size`` are read and the rest are zeros (PTX ISA, cp.async, src-size).

    L2::256B costs 3 to 10% (H200), also where a row of a head has 128 bytes and its neighbour's is wanted soon.
    """
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, address, size]
    )


@dataclass(frozen=True)
class Table:
    """The page table of one sequence.

    mTable      (pages a sequence,) int32
    pages       there are; entries outside [0, pages) are pages that do not exist
    page_size   rows
    """

    mTable: cute.Tensor
    pages: Int32
    page_size: Int32


@cute.jit
def prefetch_table(mTable_row: cute.Tensor, split: Int32, splits: Int32):
    """Into the L2: the entries of one split of a full sequence, a line a thread, while its length is still on the way.

    A guess: of a shorter sequence they are others.
    """
    tidx, _, _ = cute.arch.thread_idx()
    width = mTable_row.shape[0]
    entries = cute.ceil_div(width, splits)
    entry = split * entries + tidx * LINE_ENTRIES
    if entry < cutlass.min((split + 1) * entries, width):
        address = mTable_row.iterator.toint() + Int64(entry) * mTable_row.stride[0] * 4
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


@dataclass(frozen=True)
class Walk:
    """A key's place in a page table that moves on by the same number of keys each time: no division but the first.

    place           (2,) the table's entry, and the row of its page
    step_entries, step_rows     what a move adds to them
    """

    place: cute.Tensor
    step_entries: Int32
    step_rows: Int32


def start_walk(table: Table, key: Int32, step: int) -> Walk:
    """At key ``key``, to go on by ``step`` keys at a time."""
    walk = Walk(cute.make_rmem_tensor(2, Int32), step // table.page_size, step % table.page_size)
    walk.place[0] = key // table.page_size
    walk.place[1] = key % table.page_size
    return walk


def look_up(table: Table, walk: Walk, wanted: Boolean) -> tuple[Int32, Int32]:
    """(page, row in the page) where ``walk`` is; page -1 if that is not ``wanted`` (the table may then end before it)
    or if there is no such page."""
    page = table.mTable[cutlass.select_(wanted, walk.place[0], Int32(0))]
    exists = wanted & (page >= 0) & (page < table.pages)
    return cutlass.select_(exists, page, Int32(-1)), walk.place[1]


def move(table: Table, walk: Walk):
    """``walk`` one step on."""
    entry, row = walk.place[0] + walk.step_entries, walk.place[1] + walk.step_rows
    over = row >= table.page_size
    walk.place[0] = cutlass.select_(over, entry + 1, entry)
    walk.place[1] = cutlass.select_(over, row - table.page_size, row)
