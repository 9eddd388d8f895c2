"""Device code of test_splits.py: what each share of a query tile's keys is, as kernels/schedule.py has it."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa2_cute.kernels import place, schedule


class Shares:
    """A block for each share of the keys of a call's first query tile."""

    def __init__(self, tile_m: int, tile_n: int, causal: bool):
        self.tile_m, self.tile_n, self.causal = tile_m, tile_n, causal

    @cute.jit
    def __call__(self, mFound: cute.Tensor, query_len: Int32, key_len: Int32, stream):  # (shares, 5) int32
        self.kernel(mFound, query_len, key_len).launch(grid=[mFound.shape[0], 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mFound: cute.Tensor, query_len: Int32, key_len: Int32):
        here = place.read()
        zero = Int32(0)
        right = zero if cutlass.const_expr(self.causal) else None
        shares = mFound.shape[0]
        work = schedule.Work(zero, zero, zero, zero, zero, query_len, zero, key_len, here.block_x, shares)
        tiles = schedule.key_range(work, None, right, self.tile_m, self.tile_n)
        share, own = schedule.share_of(work, tiles, self.tile_n, False, self.causal)
        if here.thread == 0:
            mFound[here.block_x, 0] = share.key_start
            mFound[here.block_x, 1] = share.key_len
            mFound[here.block_x, 2] = own.end
            mFound[here.block_x, 3] = own.referenced
            mFound[here.block_x, 4] = tiles.end
