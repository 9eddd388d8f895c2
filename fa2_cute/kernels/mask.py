"""Which keys a query row sees, applied to the score accumulator in the tiles that need it."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .products import accumulator_rows


@dataclass(frozen=True)
class Visibility:
    """Row i sees keys below key_len and, with ``causal``, up to i + key_len - query_len.

    first_row: the query tile's first row.
    """

    first_row: Int32
    query_len: Int32
    key_len: Int32
    causal: bool


@cute.jit
def apply_mask(visible: Visibility, acc_S: cute.Tensor, tScS: cute.Tensor, n_tile: Int32, tile_n: cutlass.Constexpr):
    """Set the scores of key tile ``n_tile`` that a row must not see to -inf.

    tScS: (row, key) within the tile for each element of this thread's accumulator.
    """
    rS, cS = accumulator_rows(acc_S), accumulator_rows(tScS)
    first_key = n_tile * tile_n
    for r in cutlass.range_constexpr(cute.size(rS.shape[0])):
        limit = visible.key_len - first_key  # keys of this tile that row r sees
        if cutlass.const_expr(visible.causal):
            row = visible.first_row + cS[r, 0][0]
            limit = cutlass.min(limit, row + visible.key_len - visible.query_len + 1 - first_key)
        for c in cutlass.range_constexpr(cute.size(rS.shape[1])):
            rS[r, c] = rS[r, c] if cS[r, c][1] < limit else -Float32.inf
