"""Moving tiles: global to shared memory and accumulators to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64

from . import layouts
from .place import anew, opaque


@dataclass(frozen=True)
class Rows:
    """The rows [first, end) of mX (len, cols) that make up one sequence: nothing else of mX is touched."""

    mX: cute.Tensor
    first: Int32
    end: Int32


@dataclass(frozen=True)
class Lines:
    """A sequence's rows in global memory, where a thread reads or writes 16 bytes of each at one place.

    An address is a 64-bit base plus the product of two 32-bit numbers, row and row_bytes: one wide multiply-add, right
    for rows of less than 4 GiB. CuTe's own, with its 64-bit stride, takes six instructions.

    base        address of this thread's vector in the sequence's first row, in bytes
    row_bytes   from one row to the next
    """

    base: Int64
    row_bytes: Uint32

    def at(self, row: Int32) -> Int64:
        """The address in row ``row``, which is not negative."""
        return self.base + Int64(Uint64(Uint32(row)) * Uint64(self.row_bytes))


def make_lines(rows: Rows, col: Int32) -> Lines:
    """Lines through column ``col``."""
    element_bytes = rows.mX.element_type.width // 8
    stride = rows.mX.stride[0]
    base = rows.mX.iterator.toint() + (Int64(rows.first) * stride + Int64(col)) * element_bytes
    # Opaque, or LLVM makes the 64-bit stride of it again, with a shift and a mask for each half of each address.
    return Lines(base, opaque(Uint32(stride * element_bytes)))


def vector_at(mX: cute.Tensor, address: Int64, layout: cute.Layout) -> cute.Tensor:
    """The 16 bytes of mX at ``address``, as the operand of a copy atom."""
    pointer = cute.make_ptr(mX.element_type, address, cutlass.AddressSpace.gmem, assumed_align=layouts.VECTOR_BYTES)
    return cute.make_tensor(pointer, layout)


@cute.jit
def load_rows(
    copy: layouts.RowCopy,
    tidx: Int32,
    rows: Rows,
    sX: cute.Tensor,
    first_row: Int32,
    zero_past_end: cutlass.Constexpr,
):
    """cp.async rows ``first_row ...`` of a sequence into sX (tile rows, width); width >= mX's columns.

    Rows past the sequence's end become zeros with ``zero_past_end``; else its last row stands in for them, which saves
    a branch where what they hold is never used. Columns that mX does not have are left alone (``zero_columns``).
    """
    thr_copy = copy.tiled.get_slice(tidx)
    tXsX = thr_copy.partition_D(sX)
    tXcX = thr_copy.partition_D(cute.make_identity_tensor(flat_shape(sX)))
    own_row, own_col = tXcX[0, 0, 0]
    lines = make_lines(rows, own_col)
    layout = cute.make_layout((tXsX.shape[0],))
    last = rows.end - rows.first - 1
    zeros, plain_copy = None, layouts.vector_atom(sX.element_type)
    if cutlass.const_expr(zero_past_end):
        zeros = cute.make_rmem_tensor(layout, sX.element_type)
        zeros.fill(0.0)
    whole, width = _whole_passes(copy, rows.mX), rows.mX.shape[1]
    for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        row = first_row + own_row + i * copy.rows
        address = lines.at(cutlass.min(row, last))
        for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
            if cutlass.const_expr(j < whole) or tXcX[0, 0, j][1] < width:
                vector = vector_at(rows.mX, address + j * copy.lanes * layouts.VECTOR_BYTES, layout)
                if cutlass.const_expr(zero_past_end):
                    if row <= last:
                        cute.copy_atom_call(copy.tiled, vector, tXsX[None, i, j])
                    else:
                        cute.copy_atom_call(plain_copy, zeros, tXsX[None, i, j])
                else:
                    cute.copy_atom_call(copy.tiled, vector, tXsX[None, i, j])


def _whole_passes(copy: layouts.RowCopy, mX: cute.Tensor) -> int:
    """How many passes over a row cover only columns that mX has."""
    return mX.shape[1] // (copy.lanes * layouts.VECTOR_BYTES * 8 // mX.element_type.width)


@cute.jit
def zero_columns(tidx: Int32, threads: cutlass.Constexpr, sX: cute.Tensor, cols: cutlass.Constexpr):
    """Fill what sX (rows, width, stages) has beyond ``cols`` columns with zeros: no copy ever touches that."""
    rows, width = flat_shape(sX)
    chunks = (width - cols) // 8
    for i in cutlass.range_constexpr((rows * chunks + threads - 1) // threads):
        chunk = i * threads + tidx
        if chunk < rows * chunks:
            for stage in cutlass.range_constexpr(cute.size(sX.shape[2])):
                for c in cutlass.range_constexpr(8):
                    sX[chunk // chunks, cols + chunk % chunks * 8 + c, stage] = sX.element_type(0.0)


@dataclass(frozen=True)
class Ring:
    """One thread's part in streaming the tiles of K or V through a ring in shared memory by cp.async.

    rows        the sequence's rows of K or V in global memory
    sX          (tile_n, width, stages)
    lines       through this thread's first vector of key tile 0: its own row is in the base, so that what is added for
                a tile is the same for all threads. None: made anew for each tile, some twenty instructions that keep
                two registers free
    """

    copy: layouts.RowCopy
    tidx: Int32
    rows: Rows
    sX: cute.Tensor
    lines: Lines | None


def ring_lines(copy: layouts.RowCopy, tidx: Int32, rows: Rows, sX: cute.Tensor) -> Lines:
    """``Ring.lines`` of thread ``tidx``."""
    tXcX = copy.tiled.get_slice(tidx).partition_D(cute.make_identity_tensor(flat_shape(sX)))
    first_row, first_col = tXcX[0, 0, 0]
    lines = make_lines(rows, first_col)
    return Lines(lines.at(first_row), lines.row_bytes)


def make_ring(copy: layouts.RowCopy, tidx: Int32, rows: Rows, sX: cute.Tensor, keeps_lines: bool) -> Ring:
    """The ring of ``rows`` in sX (tile_n, width, stages). keeps_lines: ``Ring.lines`` are not made anew."""
    lines = ring_lines(copy, tidx, rows, sX) if keeps_lines else None
    return Ring(copy, tidx, rows, sX, lines)


@cute.jit
def load_last_tile(ring: Ring, tile: Int32, slot: Int32, zero_past_end: cutlass.Constexpr):
    """Key tile ``tile``, which may reach past the end, into ``slot``."""
    tile_n, _ = flat_shape(ring.sX)
    load_rows(ring.copy, ring.tidx, ring.rows, ring.sX[None, None, slot], tile * tile_n, zero_past_end)


@cute.jit
def load_tile(ring: Ring, tile: Int32, slot: Int32):
    """Key tile ``tile``, all of whose rows exist, into ``slot``."""
    copy, mX, tidx, lines = ring.copy, ring.rows.mX, ring.tidx, ring.lines
    if cutlass.const_expr(lines is None):
        tidx = anew(tidx, tile)
        lines = ring_lines(copy, tidx, ring.rows, ring.sX)
    thr_copy = copy.tiled.get_slice(tidx)
    tXsX = thr_copy.partition_D(ring.sX)
    tXcX = thr_copy.partition_D(cute.make_identity_tensor(flat_shape(ring.sX)))
    tile_n, _ = flat_shape(ring.sX)
    layout = cute.make_layout((tXsX.shape[0],))
    whole, width = _whole_passes(copy, mX), mX.shape[1]
    for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        address = lines.at(tile * tile_n + i * copy.rows)
        for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
            if cutlass.const_expr(j < whole) or tXcX[0, 0, j][1] < width:
                vector = vector_at(mX, address + j * copy.lanes * layouts.VECTOR_BYTES, layout)
                cute.copy_atom_call(copy.tiled, vector, tXsX[None, i, j, slot])


def flat_shape(sX: cute.Tensor) -> tuple[int, int]:
    """(rows, cols) of a tile whose swizzled layout has nested modes."""
    return (cute.size(sX.shape[0]), cute.size(sX.shape[1]))


@cute.jit
def negate_own(copy: layouts.RowCopy, tidx: Int32, sX: cute.Tensor, cols: cutlass.Constexpr):
    """Flip the sign of what this thread itself has copied to the ``cols`` columns of sX (after its wait, before the
    barrier)."""
    thr_copy = copy.tiled.get_slice(tidx)
    tXsX = thr_copy.partition_D(sX)
    tXcX = thr_copy.partition_D(cute.make_identity_tensor(flat_shape(sX)))
    atom = layouts.vector_atom(sX.element_type)
    rX = cute.make_rmem_tensor((tXsX.shape[0],), sX.element_type)
    for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
        if tXcX[0, 0, j][1] < cols:
            for i in cutlass.range(cute.size(tXsX.shape[1]), unroll=1):  # rare: short code rather than fast
                vector = tXsX[None, i, j]
                cute.copy_atom_call(atom, vector, rX)
                rX.store(-rX.load())
                cute.copy_atom_call(atom, rX, vector)


@cute.jit
def store_rows(
    acc: cute.Tensor,
    tiled_mma: cute.TiledMma,
    sX: cute.Tensor,
    rows: Rows,
    tidx: Int32,
    first_row: Int32,
    lanes: cutlass.Constexpr,
    fence: cutlass.Constexpr,
):
    """Write an fp32 accumulator (tile rows, width) to rows ``first_row ...`` of a sequence of mX (len, cols).

    It passes through sX (tile rows, width), in mX's dtype, to make 16-byte stores of whole lines. tiled_mma gives each
    warp rows that follow one another (products.make_tiled_mma): it reads from sX what it has written itself.

    fence: whose last reads of that shared memory may still be under way: "warp", if each warp has read nothing but what
    it writes now (Q, as the MMA's A operand), "block", or None.
    """
    mX = rows.mX
    dtype = mX.element_type
    warps = tiled_mma.size // 32
    rX = cute.make_rmem_tensor_like(acc, dtype)
    rX.store(acc.load().to(dtype))
    to_shared = cute.make_tiled_copy_C(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype), tiled_mma)
    thr_shared = to_shared.get_slice(tidx)
    if cutlass.const_expr(fence == "warp"):
        cute.arch.sync_warp()
    elif cutlass.const_expr(fence == "block"):
        cute.arch.sync_threads()
    cute.copy(to_shared, thr_shared.retile(rX), thr_shared.partition_D(sX))
    cute.arch.sync_warp()

    copy = layouts.vector_row_copy(dtype, 32, lanes)
    thr_copy = copy.tiled.get_slice(cute.arch.lane_idx())
    tile_rows, cols = flat_shape(sX)
    warp_rows = tile_rows // warps
    warp = cute.arch.make_warp_uniform(tidx // 32)
    tXsX = thr_copy.partition_S(cute.local_tile(sX, (warp_rows, cols), (warp, 0)))
    tXcX = thr_copy.partition_S(cute.make_identity_tensor((warp_rows, cols)))
    own_row, own_col = tXcX[0, 0, 0]
    lines = make_lines(rows, own_col)
    row = first_row + warp * warp_rows + own_row
    length = rows.end - rows.first
    if first_row + tile_rows <= length:
        tXrX = cute.make_rmem_tensor_like(tXsX, dtype)
        cute.copy(copy.tiled, tXsX, tXrX)
        for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
            _store_row(copy, mX, lines.at(row + i * copy.rows), tXcX, tXrX[None, i, None])
    else:
        for i in cutlass.range(cute.size(tXsX.shape[1]), unroll=1):  # rarer: short code rather than fast
            if row + i * copy.rows < length:
                rRow = cute.make_rmem_tensor_like(tXsX[None, 0, None], dtype)
                cute.copy(copy.tiled, tXsX[None, i, None], rRow)
                _store_row(copy, mX, lines.at(row + i * copy.rows), tXcX, rRow)


@cute.jit
def _store_row(copy: layouts.RowCopy, mX: cute.Tensor, address: Int64, tXcX: cute.Tensor, rRow: cute.Tensor):
    """This thread's vectors (vector, passes) of one row."""
    layout, whole, width = cute.make_layout((rRow.shape[0],)), _whole_passes(copy, mX), mX.shape[1]
    for j in cutlass.range_constexpr(cute.size(rRow.shape[1])):
        if cutlass.const_expr(j < whole) or tXcX[0, 0, j][1] < width:
            vector = vector_at(mX, address + j * copy.lanes * layouts.VECTOR_BYTES, layout)
            cute.copy_atom_call(copy.tiled, rRow[None, j], vector)
