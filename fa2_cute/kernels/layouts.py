"""How tiles lie in shared memory and which thread copies which bytes of them."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp

from ..spec import SWIZZLE_ROW_ELEMENTS

VECTOR_BYTES = 16  # the widest cp.async and the row of one ldmatrix matrix
LANES_A_ROW = SWIZZLE_ROW_ELEMENTS * 2 // VECTOR_BYTES  # threads side by side that copy 128 bytes of a row


def smem_layout(dtype: type[cutlass.Numeric], rows: int, cols: int, stages: int | None = None):
    """A row-major tile, swizzled so that neither cp.async nor ldmatrix meets a bank twice.

    Eight rows of 128 bytes form the atom: the 16-byte chunk c of row r lies at chunk c ^ r, so the eight rows that
    one ldmatrix matrix reads at one column fall into eight different groups of four banks.

    Shape ``(rows, cols)``, or ``(rows, cols, stages)`` with ``stages``.
    """
    atom = cute.make_composed_layout(
        cute.make_swizzle(3, 3, 3),
        0,
        cute.make_layout((8, SWIZZLE_ROW_ELEMENTS), stride=(SWIZZLE_ROW_ELEMENTS, 1)),
    )
    if stages is None:
        return cute.tile_to_shape(atom, (rows, cols), (0, 1))
    return cute.tile_to_shape(atom, (rows, cols, stages), (0, 1, 2))


def transposed(sX: cute.Tensor, rows: int, cols: int, stages: int) -> cute.Tensor:
    """``sX`` (rows, cols, stages) seen as (cols, rows, stages): V as the MMA's K-major B operand."""
    view = cute.make_ordered_layout((cols, rows, stages), order=(1, 0, 2))
    return cute.composition(sX, view)


def row_copy(atom: cute.CopyAtom, dtype: type[cutlass.Numeric], threads: int) -> cute.TiledCopy:
    """Eight threads side by side cover 128 bytes of a row; ``threads // 8`` rows a pass."""
    vector = VECTOR_BYTES * 8 // dtype.width
    return cute.make_tiled_copy_tv(
        atom,
        cute.make_ordered_layout((threads // LANES_A_ROW, LANES_A_ROW), order=(1, 0)),
        cute.make_layout((1, vector)),
    )


def async_row_copy(dtype: type[cutlass.Numeric], threads: int) -> cute.TiledCopy:
    """Global to shared memory by 16-byte ``cp.async.cg`` (past the L1: each byte is used by one block only)."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL),
        dtype,
        num_bits_per_copy=VECTOR_BYTES * 8,
    )
    return row_copy(atom, dtype, threads)


def vector_row_copy(dtype: type[cutlass.Numeric], threads: int) -> cute.TiledCopy:
    """Shared memory through registers to global memory, 16 bytes a thread."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=VECTOR_BYTES * 8)
    return row_copy(atom, dtype, threads)


def ldmatrix_atom(dtype: type[cutlass.Numeric], transpose: bool = False) -> cute.CopyAtom:
    """``ldmatrix.x4`` (PTX ISA, ldmatrix): four 8x8 matrices of 16-bit elements a warp instruction."""
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)
