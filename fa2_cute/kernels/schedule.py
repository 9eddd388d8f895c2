"""Which query tile of which head a thread block works on, and which key tiles that tile needs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..spec import group_log2


@cute.jit
def tile_coordinates(heads: Int32, query_len: Int32, tile_m: cutlass.Constexpr):
    """(query tile, head, batch) of this block in a grid made by ``ForwardSpec.grid``; a head >= heads has no work.

    Blocks start in the order x, y, z. Heads of a group alternate in x, so that blocks that run together share K and V
    in the L2; the last query tiles come first: under a causal mask those are the longest, and a long block that starts
    last would leave the other multiprocessors idle at the end.
    """
    x, y, b = cute.arch.block_idx()
    shift = group_log2(heads)
    rank = x >> shift
    head = (y << shift) + x - (rank << shift)
    return cute.ceil_div(query_len, tile_m) - 1 - rank, head, b


@cute.jit
def key_range(
    first_row: Int32,
    query_len: Int32,
    key_len: Int32,
    tile_m: cutlass.Constexpr,
    tile_n: cutlass.Constexpr,
    causal: cutlass.Constexpr,
):
    """(unmasked, end, referenced): the key tiles of the query tile that starts at ``first_row``.

    Tiles [0, unmasked) need no mask, [unmasked, end) do, and no row sees the rest. In the tiles [referenced, end) every
    row that sees any key sees one. With ``causal``, row i sees keys j <= i + key_len - query_len.
    """
    seen_by_all = key_len
    seen_by_any = key_len
    if cutlass.const_expr(causal):
        offset = key_len - query_len
        last_row = cutlass.min(first_row + tile_m, query_len) - 1
        seen_by_all = cutlass.max(cutlass.min(first_row + offset + 1, key_len), Int32(0))
        seen_by_any = cutlass.max(cutlass.min(last_row + offset + 1, key_len), Int32(0))
    # The first row sees keys of the tile that holds its last one; the other rows see more.
    referenced = cutlass.max(seen_by_all - 1, Int32(0)) // tile_n
    return seen_by_all // tile_n, cute.ceil_div(seen_by_any, tile_n), referenced
