"""Device code of test_model.py: what each block of a grid works on, as kernels/schedule.py has it."""

import cutlass.cute as cute
from cutlass import Int32

from fa2_cute.kernels import place, schedule


class Order:
    """Blocks of one warp; the blocks of a grid are counted in the order in which a GPU starts them: x, y, z."""

    def __init__(self, tile_m: int):
        self.tile_m = tile_m

    @cute.jit
    def __call__(self, mFound: cute.Tensor, batch: Int32, heads: Int32, query_len: Int32, stream):  # (blocks, 3) int32
        self.kernel(mFound, batch, heads, query_len).launch(
            grid=[mFound.shape[0], 1, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mFound: cute.Tensor, batch: Int32, heads: Int32, query_len: Int32):
        here = place.read()
        work = schedule.batched_work(here, batch, heads, query_len, query_len, None, self.tile_m)
        across, down, _ = cute.arch.grid_dim()
        block = here.block_x + across * (here.block_y + down * here.block_z)
        if here.thread == 0:
            mFound[block, 0] = work.b
            mFound[block, 1] = work.head
            mFound[block, 2] = work.first_row
