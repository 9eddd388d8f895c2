"""Moving tiles: global to shared memory and accumulators to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from . import layouts


@cute.jit
def load_rows(
    copy: cute.TiledCopy,
    tidx: Int32,
    mX: cute.Tensor,
    sX: cute.Tensor,
    first_row: Int32,
    length: Int32,
    zero_past_end: cutlass.Constexpr,
):
    """cp.async rows ``first_row ...`` of mX (len, head_dim) into sX (rows, head_dim).

    Rows from ``length`` on do not exist and nothing outside the tensor is touched. With ``zero_past_end`` they become
    zeros; else the last row stands in for them, which saves a branch where what they hold is never used.
    """
    thr_copy = copy.get_slice(tidx)
    tXsX = thr_copy.partition_D(sX)
    tXcX = thr_copy.partition_D(cute.make_identity_tensor(flat_shape(sX)))
    for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        row = first_row + tXcX[0, i, 0][0]
        if cutlass.const_expr(zero_past_end):
            if row < length:
                _load_row(copy, mX, row, tXcX[None, i, None], tXsX[None, i, None])
            else:
                tXsX[None, i, None].fill(0.0)
        else:
            _load_row(copy, mX, cutlass.min(row, length - 1), tXcX[None, i, None], tXsX[None, i, None])


@cute.jit
def _load_row(copy: cute.TiledCopy, mX: cute.Tensor, row: Int32, tXcX: cute.Tensor, tXsX: cute.Tensor):
    for j in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        cute.copy(copy, row_vector(mX, row, tXcX[0, j][1], tXsX.shape[0]), tXsX[None, j])


@dataclass(frozen=True)
class Ring:
    """One thread's part in streaming the tiles of K or V, last tile first, through a ring in shared memory by cp.async.

    mX          (key_len, head_dim) in global memory
    sX          (tile_n, head_dim, stages)
    cursor      (1,) the address in global memory of this thread's first vector of the next tile, in bytes
    row_chunks  16-byte chunks from one row of mX to the next
    """

    copy: cute.TiledCopy
    tidx: Int32
    mX: cute.Tensor
    sX: cute.Tensor
    cursor: cute.Tensor
    row_chunks: Uint32


def make_ring(copy: cute.TiledCopy, tidx: Int32, mX: cute.Tensor, sX: cute.Tensor) -> Ring:
    """The ring of mX (key_len, head_dim) in sX (tile_n, head_dim, stages); ``load_first_tile`` sets its cursor."""
    row_chunks = Uint32(mX.stride[0] // (layouts.VECTOR_BYTES * 8 // mX.element_type.width))
    return Ring(copy, tidx, mX, sX, cute.make_rmem_tensor(1, Int64), row_chunks)


@cute.jit
def load_first_tile(ring: Ring, tile: Int32, key_len: Int32, zero_past_end: cutlass.Constexpr):
    """Key tile ``tile``, which may reach past the end, into slot 0; the next is the one before it."""
    tile_n, cols = flat_shape(ring.sX)
    load_rows(ring.copy, ring.tidx, ring.mX, ring.sX[None, None, 0], tile * tile_n, key_len, zero_past_end)
    tXcX = ring.copy.get_slice(ring.tidx).partition_D(cute.make_identity_tensor((tile_n, cols)))
    row = (tile - 1) * tile_n + tXcX[0, 0, 0][0]
    ring.cursor[0] = row_vector(ring.mX, row, tXcX[0, 0, 0][1], tXcX.shape[0]).iterator.toint()


@cute.jit
def load_next_tile(ring: Ring, slot: Int32):
    """The tile at the cursor, all of whose rows exist, into ``slot``.

    Addresses are a 64-bit cursor plus a constant times a 32-bit count of 16-byte chunks: one wide multiply-add each,
    right for rows up to 2^34 elements apart.
    """
    tXsX = ring.copy.get_slice(ring.tidx).partition_D(ring.sX)
    rows_a_pass = ring.copy.size // layouts.LANES_A_ROW
    row_bytes = Int64(ring.row_chunks) * layouts.VECTOR_BYTES
    for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
            address = ring.cursor[0] + row_bytes * (i * rows_a_pass) + j * layouts.LANES_A_ROW * layouts.VECTOR_BYTES
            pointer = cute.make_ptr(
                ring.mX.element_type, address, cutlass.AddressSpace.gmem, assumed_align=layouts.VECTOR_BYTES
            )
            vector = cute.make_tensor(pointer, cute.make_layout((tXsX.shape[0],)))
            cute.copy(ring.copy, vector, tXsX[None, i, j, slot])


@cute.jit
def advance(ring: Ring):
    """Move the cursor to the tile before; past the first tile it points nowhere and must not be used."""
    tile_n, _ = flat_shape(ring.sX)
    ring.cursor[0] = ring.cursor[0] - Int64(ring.row_chunks) * layouts.VECTOR_BYTES * tile_n


def flat_shape(sX: cute.Tensor) -> tuple[int, int]:
    """(rows, cols) of a tile whose swizzled layout has nested modes."""
    return (cute.size(sX.shape[0]), cute.size(sX.shape[1]))


def row_vector(mX: cute.Tensor, row: Int32, col: Int32, shape) -> cute.Tensor:
    """The 16 bytes of mX (len, cols) at (row, col), shaped as one copy atom's operand."""
    # The product in 64 bits: row * stride passes 2^31 elements in long or wide tensors.
    offset = Int64(row) * mX.stride[0] + Int64(col)
    vector = layouts.VECTOR_BYTES * 8 // mX.element_type.width
    return cute.make_tensor(mX.iterator + cute.assume(offset, divby=vector), cute.make_layout((shape,)))


@cute.jit
def negate_own(copy: cute.TiledCopy, tidx: Int32, sX: cute.Tensor):
    """Flip the sign of what this thread itself has copied to sX (after its wait, before the barrier)."""
    tXsX = copy.get_slice(tidx).partition_D(sX)
    for i in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
        for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
            piece = tXsX[None, i, j]
            piece.store(-piece.load())


@cute.jit
def store_rows(
    acc: cute.Tensor,
    tiled_mma: cute.TiledMma,
    sX: cute.Tensor,
    mX: cute.Tensor,
    tidx: Int32,
    first_row: Int32,
    length: Int32,
    dtype: cutlass.Constexpr,
):
    """Write an fp32 accumulator (rows, cols) as ``dtype`` to rows ``first_row ...`` below ``length`` of mX (len, cols).

    It passes through sX (rows, cols) to make 16-byte stores of whole lines. Each warp writes and reads only the rows
    that it alone has read as the MMA's A operand, so a warp-wide fence is enough.
    """
    warps = tiled_mma.size // 32
    rX = cute.make_rmem_tensor_like(acc, dtype)
    rX.store(acc.load().to(dtype))
    to_shared = cute.make_tiled_copy_C(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype), tiled_mma)
    thr_shared = to_shared.get_slice(tidx)
    cute.arch.sync_warp()  # all lanes have read their A fragments
    cute.copy(to_shared, thr_shared.retile(rX), thr_shared.partition_D(sX))
    cute.arch.sync_warp()

    to_global = layouts.vector_row_copy(dtype, 32)
    thr_global = to_global.get_slice(tidx % 32)
    cX = cute.make_identity_tensor(flat_shape(sX))
    warp = cute.arch.make_warp_uniform(tidx // 32)
    rows, cols = flat_shape(sX)
    stripe = (16, cols)
    for i in cutlass.range_constexpr(rows // (16 * warps)):
        tXsX = thr_global.partition_S(cute.local_tile(sX, stripe, (i * warps + warp, 0)))
        tXcX = thr_global.partition_S(cute.local_tile(cX, stripe, (i * warps + warp, 0)))
        tXrX = cute.make_rmem_tensor_like(tXsX, dtype)
        cute.copy(to_global, tXsX, tXrX)
        for r in cutlass.range_constexpr(cute.size(tXsX.shape[1])):
            row = first_row + tXcX[0, r, 0][0]
            if row < length:
                for j in cutlass.range_constexpr(cute.size(tXsX.shape[2])):
                    cute.copy(to_global, tXrX[None, r, j], row_vector(mX, row, tXcX[0, r, j][1], tXsX.shape[0]))
