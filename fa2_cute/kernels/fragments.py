"""Addresses of MMA operands in swizzled shared memory, for ldmatrix."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import layouts


@dataclass(frozen=True)
class LaneRows:
    """The 16 bytes that this lane names of each ldmatrix of a tile (layouts.smem_layout) or a ring of tiles.

    From the first of them to another are multiples of 8 rows and 16 columns. The swizzle xors the number of a 16-byte
    chunk with bits of its row, which are then the lane's own: so other columns of the atom are one exclusive-or away,
    and all else is a constant in the instruction. CuTe's own partition keeps two registers and two predicates of a tile
    for that, and as many more as there are such columns once they are taken out of the loop.

    base        shared-memory address of the first of them, in bytes, in slot 0; tiles start at multiples of 128 bytes
    atom_cols   elements of a row of the swizzle's atom
    rows        of the tile
    slot_bytes  from one slot to the next
    layout      16 bytes as the operand of a copy atom
    """

    base: Int32
    dtype: type[cutlass.Numeric]
    atom_cols: int
    rows: int
    slot_bytes: int
    layout: cute.Layout

    def in_slot(self, slot: Int32, first_row: Int32 | int = 0) -> Int32:
        """``base`` in ``slot``, ``first_row`` rows further on: a multiple of 8."""
        return self.base + slot * self.slot_bytes + first_row * (self.atom_cols * self.dtype.width // 8)

    def address(self, base: Int32, row: int, col: int) -> Int32:
        """Of the 16 bytes ``row`` rows and ``col`` columns from those at ``base``: multiples of 8 and 16."""
        element_bytes = self.dtype.width // 8
        block, col_in_atom = divmod(col, self.atom_cols)
        constant = (block * self.rows + row) * self.atom_cols * element_bytes
        return (base ^ col_in_atom * element_bytes) + constant

    def at(self, base: Int32, row: int, col: int) -> cute.Tensor:
        """The 16 bytes at ``address``."""
        address = self.address(base, row, col)
        pointer = cute.make_ptr(self.dtype, address, cutlass.AddressSpace.smem, assumed_align=layouts.VECTOR_BYTES)
        return cute.make_tensor(pointer, self.layout)


def lane_rows(tXsX: cute.Tensor, rows: int, cols: int) -> LaneRows:
    """Those of tXsX, this lane's partition by a tiled copy of ldmatrix of a tile (rows, cols), or of a ring of them:
    row-major in memory, whichever way round it is seen."""
    first = tXsX.iterator + cute.crd2idx((0,) * cute.rank(tXsX), tXsX.layout)
    dtype = tXsX.element_type
    layout = cute.make_layout(((layouts.VECTOR_BYTES * 8 // dtype.width, 1),))
    return LaneRows(first.toint(), dtype, layouts.atom_cols(cols), rows, rows * cols * dtype.width // 8, layout)
