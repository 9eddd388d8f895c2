"""Which keys a query row sees, applied to the score accumulator in the tiles that need it."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .products import accumulator_rows


@dataclass(frozen=True)
class Visibility:
    """Row i sees keys below key_len and, with ``causal``, up to i + key_len - query_len.

    first_row: the tile's first query row. thr_mma: this thread's part of the MMA, which says which rows it holds.
    """

    first_row: Int32
    query_len: Int32
    key_len: Int32
    thr_mma: cute.TiledMma
    causal: bool


@cute.jit
def hide(
    visible: Visibility,
    acc_S: cute.Tensor,
    n_block: Int32,
    tile_m: cutlass.Constexpr,
    tile_n: cutlass.Constexpr,
):
    """Set the scores of key block ``n_block`` that a row must not see to -inf."""
    rS = accumulator_rows(acc_S)
    cS = accumulator_rows(visible.thr_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n))))
    first_key = n_block * tile_n
    for r in cutlass.range_constexpr(cute.size(rS.shape[0])):
        limit = visible.key_len - first_key  # keys of this tile that row r sees
        if cutlass.const_expr(visible.causal):
            row = visible.first_row + cS[r, 0][0]
            limit = cutlass.min(limit, row + visible.key_len - visible.query_len + 1 - first_key)
        for c in cutlass.range_constexpr(cute.size(rS.shape[1])):
            rS[r, c] = rS[r, c] if cS[r, c][1] < limit else -Float32.inf
