"""How tiles lie in shared memory and which thread copies which bytes of them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp

VECTOR_BYTES = 16  # the widest cp.async and the row of one ldmatrix matrix


def smem_layout(rows: int, cols: int, stages: int | None = None, *, swizzle: bool = True):
    """A row-major tile of 16-bit elements, swizzled so that neither cp.async nor ldmatrix meets a bank twice.

    An atom is eight rows of 128 bytes: the 16-byte chunk c of row r lies at chunk c ^ r, so the eight rows that one
    ldmatrix matrix reads at one column fall into eight different groups of four banks. Where 64 elements do not divide
    ``cols``, it is eight rows of 64 bytes, two rows to a pass over the banks: chunk c lies at c ^ (r / 2).

    Shape ``(rows, cols)``, or ``(rows, cols, stages)`` with ``stages``; cols is a multiple of 32. Without ``swizzle``
    chunks stay where they are, to be seen and measured.
    """
    width = atom_cols(cols)
    bits = {64: 3, 32: 2}[width]
    atom = cute.make_composed_layout(
        cute.make_swizzle(bits if swizzle else 0, 3, 3),
        0,
        cute.make_layout((8, width), stride=(width, 1)),
    )
    if stages is None:
        return cute.tile_to_shape(atom, (rows, cols), (0, 1))
    return cute.tile_to_shape(atom, (rows, cols, stages), (0, 1, 2))


def atom_cols(cols: int) -> int:
    """Elements of a row of the swizzle's atom in a tile of ``cols`` columns."""
    return 64 if cols % 64 == 0 else 32


def transposed(sX: cute.Tensor, rows: int, cols: int, stages: int) -> cute.Tensor:
    """``sX`` (rows, cols, stages) seen as (cols, rows, stages): V as the MMA's K-major B operand."""
    view = cute.make_ordered_layout((cols, rows, stages), order=(1, 0, 2))
    return cute.composition(sX, view)


@dataclass(frozen=True)
class RowCopy:
    """Threads that copy rows, 16 bytes each: ``lanes`` side by side, ``rows`` rows at a time."""

    tiled: cute.TiledCopy
    lanes: int
    rows: int


def row_copy(atom: cute.CopyAtom, dtype: type[cutlass.Numeric], threads: int, lanes: int) -> RowCopy:
    """``lanes`` threads side by side cover 16 bytes each of a row; ``threads // lanes`` rows a pass."""
    vector = VECTOR_BYTES * 8 // dtype.width
    rows = threads // lanes
    tiled = cute.make_tiled_copy_tv(
        atom,
        cute.make_ordered_layout((rows, lanes), order=(1, 0)),
        cute.make_layout((1, vector)),
    )
    return RowCopy(tiled, lanes, rows)


def async_row_copy(dtype: type[cutlass.Numeric], threads: int, lanes: int) -> RowCopy:
    """Global to shared memory by 16-byte ``cp.async.cg`` (past the L1: each byte is used by one block only)."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL),
        dtype,
        num_bits_per_copy=VECTOR_BYTES * 8,
    )
    return row_copy(atom, dtype, threads, lanes)


def vector_row_copy(dtype: type[cutlass.Numeric], threads: int, lanes: int) -> RowCopy:
    """Shared memory through registers to global memory, 16 bytes a thread."""
    return row_copy(vector_atom(dtype), dtype, threads, lanes)


def vector_atom(dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
    """16 bytes of a thread by one load or store."""
    return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=VECTOR_BYTES * 8)


def ldmatrix_atom(dtype: type[cutlass.Numeric], transpose: bool = False) -> cute.CopyAtom:
    """``ldmatrix.x4`` (PTX ISA, ldmatrix): four 8x8 matrices of 16-bit elements a warp instruction."""
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)
