"""Moving tiles: global to shared memory and accumulators to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from . import layouts
from .place import opaque


@dataclass(frozen=True)
class Rows:
    """The rows [first, end) of mX (len, cols) that make up one sequence: nothing else of mX is touched."""

    mX: cute.Tensor
    first: Int32
    end: Int32


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
    vectors = make_vectors(rows.mX, tXsX)
    zeros = None
    if cutlass.const_expr(zero_past_end):
        zeros = cute.make_rmem_tensor(vectors.layout, sX.element_type)
        zeros.fill(0.0)
    whole, width = _whole_passes(copy, rows.mX), rows.mX.shape[1]
    for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        row = rows.first + first_row + tXcX[0, i, 0][0]
        for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
            if cutlass.const_expr(j < whole) or tXcX[0, i, j][1] < width:
                _load_vector(copy, vectors, row, rows.end, tXcX[0, i, j][1], tXsX[None, i, j], zeros)


@cute.jit
def _load_vector(
    copy: layouts.RowCopy,
    vectors: "Vectors",
    row: Int32,
    end: Int32,
    col: Int32,
    tXsX: cute.Tensor,
    zeros: cute.Tensor | None,
):
    if cutlass.const_expr(zeros is not None):
        if row < end:
            cute.copy_atom_call(copy.tiled, vectors.at(row, col), tXsX)
        else:
            cute.copy_atom_call(vectors.plain_copy, zeros, tXsX)
    else:
        cute.copy_atom_call(copy.tiled, vectors.at(cutlass.min(row, end - 1), col), tXsX)


def _whole_passes(copy: layouts.RowCopy, mX: cute.Tensor) -> int:
    """How many passes over a row cover only columns that mX has."""
    return mX.shape[1] // (copy.lanes * vector_elements(mX))


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
    column      address in global memory of this thread's first vector of key tile 0, in bytes
    row_bytes   from one row to the next
    """

    copy: layouts.RowCopy
    tidx: Int32
    rows: Rows
    sX: cute.Tensor
    column: Int64
    row_bytes: Uint32


def make_ring(copy: layouts.RowCopy, tidx: Int32, rows: Rows, sX: cute.Tensor) -> Ring:
    """The ring of ``rows`` in sX (tile_n, width, stages)."""
    element_bytes = rows.mX.element_type.width // 8
    tXcX = copy.tiled.get_slice(tidx).partition_D(cute.make_identity_tensor(flat_shape(sX)))
    # Opaque, or LLVM makes the 64-bit stride of it again, with a shift and a mask for each half of each address.
    row_bytes = opaque(Uint32(rows.mX.stride[0] * element_bytes))
    first_row, first_col = tXcX[0, 0, 0]
    column = rows.mX.iterator.toint() + Int64(first_col) * element_bytes
    # The thread's own row is in here: what is added for a tile is then the same for all threads.
    column = column + Int64(Uint64(Uint32(rows.first + first_row)) * Uint64(row_bytes))
    return Ring(copy, tidx, rows, sX, column, row_bytes)


@cute.jit
def load_last_tile(ring: Ring, tile: Int32, slot: Int32, zero_past_end: cutlass.Constexpr):
    """Key tile ``tile``, which may reach past the end, into ``slot``."""
    tile_n, _ = flat_shape(ring.sX)
    load_rows(ring.copy, ring.tidx, ring.rows, ring.sX[None, None, slot], tile * tile_n, zero_past_end)


@cute.jit
def load_tile(ring: Ring, tile: Int32, slot: Int32):
    """Key tile ``tile``, all of whose rows exist, into ``slot``.

    An address is the 64-bit column plus the product of two 32-bit numbers, rows and row_bytes: one wide multiply-add,
    right for rows of less than 4 GiB.
    """
    thr_copy = ring.copy.tiled.get_slice(ring.tidx)
    tXsX = thr_copy.partition_D(ring.sX)
    tXcX = thr_copy.partition_D(cute.make_identity_tensor(flat_shape(ring.sX)))
    tile_n, _ = flat_shape(ring.sX)
    layout = cute.make_layout((tXsX.shape[0],))
    whole, width = _whole_passes(ring.copy, ring.rows.mX), ring.rows.mX.shape[1]
    for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        offset = Uint64(Uint32(tile * tile_n + i * ring.copy.rows)) * Uint64(ring.row_bytes)
        address = ring.column + Int64(offset)
        for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
            if cutlass.const_expr(j < whole) or tXcX[0, 0, j][1] < width:
                vector = _vector_of_pass(ring, address, j, layout)
                cute.copy_atom_call(ring.copy.tiled, vector, tXsX[None, i, j, slot])


def _vector_of_pass(ring: Ring, address: Int64, j: int, layout: cute.Layout) -> cute.Tensor:
    """The vector of pass ``j`` over the columns of the row at ``address``."""
    pointer = cute.make_ptr(
        ring.rows.mX.element_type,
        address + j * ring.copy.lanes * layouts.VECTOR_BYTES,
        cutlass.AddressSpace.gmem,
        assumed_align=layouts.VECTOR_BYTES,
    )
    return cute.make_tensor(pointer, layout)


def flat_shape(sX: cute.Tensor) -> tuple[int, int]:
    """(rows, cols) of a tile whose swizzled layout has nested modes."""
    return (cute.size(sX.shape[0]), cute.size(sX.shape[1]))


def vector_elements(mX: cute.Tensor) -> int:
    """Elements of 16 bytes of mX."""
    return layouts.VECTOR_BYTES * 8 // mX.element_type.width


@dataclass(frozen=True)
class Vectors:
    """A tensor (len, cols) in global memory, 16 bytes at a time: what all of them share is traced once.

    start, stride   its first element, and elements from one row to the next
    elements        of one vector; ``layout`` is a vector's as the operand of a copy atom
    plain_copy      one vector by an ordinary load or store
    """

    start: cute.Pointer
    stride: Int64
    elements: int
    layout: cute.Layout
    plain_copy: cute.CopyAtom

    def at(self, row: Int32, col: Int32) -> cute.Tensor:
        """The vector at (row, col)."""
        # The product in 64 bits: row * stride passes 2^31 elements in long or wide tensors.
        offset = Int64(row) * self.stride + Int64(col)
        return cute.make_tensor(self.start + cute.assume(offset, divby=self.elements), self.layout)


def make_vectors(mX: cute.Tensor, tXsX: cute.Tensor) -> Vectors:
    """Those of mX (len, cols), for copies to or from tXsX (vector, ...), a thread's partition of a tile."""
    layout = cute.make_layout((tXsX.shape[0],))
    return Vectors(mX.iterator, mX.stride[0], vector_elements(mX), layout, layouts.vector_atom(mX.element_type))


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
            for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
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

    to_global = layouts.vector_row_copy(dtype, 32, lanes)
    thr_global = to_global.tiled.get_slice(tidx % 32)
    cX = cute.make_identity_tensor(flat_shape(sX))
    warp = cute.arch.make_warp_uniform(tidx // 32)
    tile_rows, cols = flat_shape(sX)
    stripe = (16, cols)
    whole = _whole_passes(to_global, mX)
    blocks = tile_rows // (16 * warps)
    for i in cutlass.range_constexpr(blocks):
        tXsX = thr_global.partition_S(cute.local_tile(sX, stripe, (warp * blocks + i, 0)))
        tXcX = thr_global.partition_S(cute.local_tile(cX, stripe, (warp * blocks + i, 0)))
        tXrX = cute.make_rmem_tensor_like(tXsX, dtype)
        vectors = make_vectors(mX, tXsX)
        cute.copy(to_global.tiled, tXsX, tXrX)
        for r in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
            row = rows.first + first_row + tXcX[0, r, 0][0]
            for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
                exists = Boolean(row < rows.end)
                if cutlass.const_expr(j >= whole):
                    exists = exists & (tXcX[0, 0, j][1] < mX.shape[1])
                if exists:
                    cute.copy_atom_call(to_global.tiled, tXrX[None, r, j], vectors.at(row, tXcX[0, r, j][1]))
