"""Which keys a query row sees, applied to the score accumulator in the tiles that need it."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .products import accumulator_rows


@dataclass(frozen=True)
class Visibility:
    """Row i sees keys below key_len, from i + offset - left to i + offset + right, with offset = key_len - query_len.

    first_row: the query tile's first row. left, right: None where the window is unbounded.
    """

    first_row: Int32
    query_len: Int32
    key_len: Int32
    left: Int32 | None
    right: Int32 | None


@cute.jit
def apply_mask(visible: Visibility, acc_S: cute.Tensor, tScS: cute.Tensor, first_key: Int32):
    """Set the scores of the keys from ``first_key`` on that a row must not see to -inf.

    tScS: (row of the query tile, key from first_key on) for each element of this thread's accumulator.
    """
    rS, cS = accumulator_rows(acc_S), accumulator_rows(tScS)
    keys = [cS[0, c][1] for c in range(cute.size(rS.shape[1]))]
    unseen = Float32(-Float32.inf)
    offset = visible.key_len - visible.query_len - first_key
    for r in cutlass.range_constexpr(cute.size(rS.shape[0])):
        row = visible.first_row + cS[r, 0][0]
        end = visible.key_len - first_key  # keys [begin, end) from first_key on are what row r sees
        if cutlass.const_expr(visible.right is not None):
            end = cutlass.min(end, row + (offset + visible.right) + 1)
        if cutlass.const_expr(visible.left is not None):
            begin = row + (offset - visible.left)
        for c in cutlass.range_constexpr(len(keys)):
            seen = keys[c] < end
            if cutlass.const_expr(visible.left is not None):
                seen = seen & (keys[c] >= begin)
            rS[r, c] = cutlass.select_(seen, rS[r, c], unseen)


def sees_any(visible: Visibility, first_row: Int32, rows: int, n_tile: Int32, tile_n: int) -> Boolean:
    """Whether the window lets any of ``rows`` rows, from the query tile's ``first_row`` on, see key tile ``n_tile``."""
    row = visible.first_row + first_row + (visible.key_len - visible.query_len)
    first_key = n_tile * tile_n
    seen = Boolean(True)
    if visible.right is not None:
        seen = seen & (row + (rows - 1) + visible.right >= first_key)
    if visible.left is not None:
        seen = seen & (row - visible.left < first_key + tile_n)
    return seen
