"""FlashAttention-2 forward (Dao 2023, algorithm 1) on SM80-style atoms: cp.async, ldmatrix, mma.sync.

One block computes tile_m query rows of one head. It walks over the key tiles from the last to the first, so that the
tiles that need a causal mask come first and the loop over the others carries none. K and V go through rings of
``stages`` tiles in shared memory; per key tile there is one wait and one barrier:

    wait + barrier          K(t), V(t) have landed for all threads; all warps are past step t - 1
    S = Q K(t)^T
    issue K, V(t+stages-1)  into the slot of step t - 1
    modify                  softcap, ALiBi, a mask tensor: only where the specification has them
    mask                    where the tile crosses the window's edge or the end
    P = exp2(S c - m c)     O rescaled where m rises
    O += P V(t)

Which reference m is subtracted is a choice, exact either way (kernels/softmax.py). ``reference="trailing"`` follows the
row maximum in every tile. ``reference="first"`` takes it from the first steps, which also mask (two of them at once
where Q is in registers); the loop that remains has no maximum, no vote and no branch, and the compiler overlaps
exponentials and MMAs freely. Should a later score be so much larger that anything overflows, the block finds out at its
end and computes everything again, following the maximum in one loop that masks where it must: code that is rarely run
is kept short, because what it needs is kept from the registers of the loop that matters. Blocks of few keys take that
loop at once: there the rounding of a row's largest probability, which is exactly 1 only relative to the true maximum,
would show.

Q's fragments are read from shared memory once, or in every step, or (``query_held="half"``) those of its first columns
once and the others in every step: the first columns then lie in V's ring until all warps have taken them, and V comes
only after that. A second pass has to fetch them again, and takes 16 keys at a time, for want of registers.

With ``split`` several blocks share a tile's keys. Each walks over its own as if there were no others, and leaves a part
(kernels/partial.py) where it would have written the output; a block without keys leaves the word that it saw none.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..decode_spec import MAX_SPLITS
from ..spec import SMALLEST_SCALE, ForwardSpec
from . import layouts, mask, partial, place, products, schedule, scores, softmax
from .copies import (
    Ring,
    Rows,
    load_last_tile,
    load_rows,
    load_tile,
    make_ring,
    negate_own,
    store_rows,
    zero_columns,
)
from .products import accumulator_rows

# Blocks of up to so many keys, rounded down to whole tiles, follow the maximum exactly. The error of a reference that
# is not the maximum, relative to one that is: simulated 1.07 times the RMS at 64 keys, 1.04 at 512 and 1.02 at 2048, in
# the worst element twice at 64.
FOLLOWED_KEYS = 240


@dataclass(frozen=True)
class Mainloop:
    """One thread's part of a block's query rows while it walks over the keys.

    acc_O: unnormalised output. scale: c, positive, of what the softmax is given. slot: (1,), the current key tile's
    ring slot.
    """

    work: schedule.Work
    tiles: schedule.KeyRange
    tidx: Int32

    operands: products.Products
    ring_K: Ring
    ring_V: Ring
    modifiers: scores.Modifiers | None
    visible: mask.Visibility
    state: softmax.SoftmaxState
    acc_O: cute.Tensor
    scale: Float32
    slot: cute.Tensor


@dataclass(frozen=True)
class Shared:
    """A block's shared memory.

    sK (tile_n, head_width, stages), sV (tile_n, value_width, stages); sQ (tile_m, head_width, 1), and in its place sO
    (tile_m, value_width). Where half of Q is held, its columns lie at the end of sV until they are.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """The kernel's tensors and scalars; what the features do not need is None."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor
    scale_log2: Float32
    heads_per_kv_head: Int32
    window_left: Int32 | None
    window_right: Int32 | None
    softcap: Float32 | None
    scale_over_softcap: Float32 | None
    mSlopes: cute.Tensor | None
    mSink: cute.Tensor | None
    mMask: cute.Tensor | None
    mCuQ: cute.Tensor | None
    mCuK: cute.Tensor | None

    @property
    def mPartO(self) -> cute.Tensor:
        """mO of a kernel whose blocks leave parts."""
        return self.mO

    @property
    def mPartState(self) -> cute.Tensor:
        return self.mLSE


class Forward:
    """The kernel for one specification; compiled by ``cute.compile(Forward(spec), ...)``."""

    def __init__(self, spec: ForwardSpec):
        self.spec = spec
        self.dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[spec.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, query_len, heads, head_dim); packed: (1, all queries, heads, head_dim)
        mK: cute.Tensor,  # (batch, key_len, kv_heads, head_dim)
        mV: cute.Tensor,  # (batch, key_len, kv_heads, value_dim)
        # (batch, query_len, heads, value_dim); split: mPartO (splits, batch * query_len * heads, value_dim), float32
        mO: cute.Tensor,
        # (batch, heads, query_len), float32, natural logarithm; or (0, 0, 0): not asked for; split: mPartState
        # (splits, batch * query_len * heads, 2), float32: m as a logit in natural units, and l
        mLSE: cute.Tensor,
        scale_log2: Float32,  # softmax scale times log2(e)
        heads_per_kv_head: Int32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        softcap: Float32 | None,
        scale_over_softcap: Float32 | None,  # |softmax scale| / softcap
        mSlopes: cute.Tensor | None,  # (batch, heads)
        mSink: cute.Tensor | None,  # (heads,)
        mMask: cute.Tensor | None,  # (batch, heads, query_len, key_len)
        mCuQ: cute.Tensor | None,  # (sequences + 1,)
        mCuK: cute.Tensor | None,
        stream,
    ):
        spec = self.spec
        batch = mQ.shape[0]
        if cutlass.const_expr(spec.features.varlen):
            batch = mCuQ.shape[0] - 1
        splits = mO.shape[0] if cutlass.const_expr(spec.split) else 1
        self.kernel(
            mQ,
            mK,
            mV,
            mO,
            mLSE,
            scale_log2,
            heads_per_kv_head,
            window_left,
            window_right,
            softcap,
            scale_over_softcap,
            mSlopes,
            mSink,
            mMask,
            mCuQ,
            mCuK,
        ).launch(
            grid=spec.grid(batch, mQ.shape[2], mQ.shape[1], splits),
            block=[spec.threads, 1, 1],
            smem=spec.shared_bytes,
            stream=stream,
            # With 16 rows a warp, as many registers as there are: ptxas aims at three blocks of 128 threads an SM,
            # whose shared memory would not fit, and spills for it. With 32 rows it takes them all in any case.
            min_blocks_per_mp=1 if spec.rows_a_warp == 16 else 0,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale_log2: Float32,
        heads_per_kv_head: Int32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        softcap: Float32 | None,
        scale_over_softcap: Float32 | None,
        mSlopes: cute.Tensor | None,
        mSink: cute.Tensor | None,
        mMask: cute.Tensor | None,
        mCuQ: cute.Tensor | None,
        mCuK: cute.Tensor | None,
    ):
        inputs = Inputs(
            mQ,
            mK,
            mV,
            mO,
            mLSE,
            scale_log2,
            heads_per_kv_head,
            window_left,
            window_right,
            softcap,
            scale_over_softcap,
            mSlopes,
            mSink,
            mMask,
            mCuQ,
            mCuK,
        )
        here = place.read()
        work = self.work(inputs, here)
        if (work.head < mQ.shape[2]) & (work.b < mQ.shape[0]) & (work.first_row >= 0):
            self.attend_tile(inputs, here.thread, work)

    @cute.jit
    def work(self, inputs: Inputs, here: place.Place) -> schedule.Work:
        """What the block at ``here`` has to do."""
        batch, queries, heads, _ = inputs.mQ.shape
        keys = inputs.mK.shape[1]
        if cutlass.const_expr(self.spec.features.varlen):
            return schedule.packed_work(here, heads, queries, keys, inputs.mCuQ, inputs.mCuK, self.spec.tile_m)
        splits = inputs.mPartO.shape[0] if cutlass.const_expr(self.spec.split) else None
        return schedule.batched_work(here, batch, heads, queries, keys, splits, self.spec.tile_m)

    @cute.jit
    def work_again(self, inputs: Inputs, here: place.Place, work: schedule.Work) -> schedule.Work:
        """``work`` computed anew, but for packed sequences: those would have to be searched."""
        if cutlass.const_expr(self.spec.features.varlen):
            return work
        return self.work(inputs, here)

    @cute.jit
    def attend_tile(self, inputs: Inputs, tidx: Int32, work: schedule.Work):
        """All of one block's work: rows [first_row, first_row + tile_m) of one head of one sequence."""
        spec = cutlass.const_expr(self.spec)
        shared = self.allocate_shared()
        shape_O = self.tiled_mma().get_slice(tidx)
        acc_O = cute.make_rmem_tensor(shape_O.partition_shape_C((spec.tile_m, spec.value_width)), Float32)
        state = softmax.allocate(cute.size(accumulator_rows(acc_O).shape[0]))
        loop = self.mainloop(inputs, shared, tidx, work, state, acc_O)
        if loop.tiles.end > loop.tiles.begin:
            self.load_queries(inputs, shared, loop)

        few = self.are_few(loop.tiles)
        if cutlass.const_expr(spec.reference == "trailing"):
            slack = Float32(0.0) if few else Float32(softmax.RESCALE_SLACK)
            self.follow(loop, slack)
            softmax.conclude_followed(state, loop.scale)
        else:
            follows = Boolean(few)
            if ~follows:
                self.keep_first_reference(loop)
                softmax.conclude_settled(state)
                # Also a barrier: all warps are past their last step, and the rings are free.
                weighed = cutlass.const_expr(spec.split or spec.features.sink)
                sound = softmax.is_sound(state, acc_O, weighed, MAX_SPLITS if spec.split else 1)
                follows = block_any(~sound)
            if follows:
                self.attend_again(inputs, shared, place.read_again(), work, state, acc_O)
        if cutlass.const_expr(spec.split):
            self.leave_part(inputs, place.read_again(), work, state, acc_O)
        else:
            self.finish(inputs, shared, place.read_again(), work, state, acc_O)

    @cute.jit
    def attend_again(
        self,
        inputs: Inputs,
        shared: Shared,
        here: place.Place,
        work: schedule.Work,
        state: softmax.SoftmaxState,
        acc_O: cute.Tensor,
    ):
        """All steps over, with the maximum for a reference; or for the first time, if the keys are few."""
        work = self.work_again(inputs, here, work)
        loop = self.mainloop(inputs, shared, here.thread, work, state, acc_O)
        if cutlass.const_expr(self.spec.query_makes_room):
            self.load_queries_again(inputs, shared, loop)
        self.start(loop)
        if cutlass.const_expr(self.spec.query_makes_room):
            self.steps_in_slices(loop)
        else:
            self.steps(loop, loop.tiles.end, loop.tiles.begin, "some", Float32(0.0))
        softmax.conclude_followed(state, loop.scale)

    def are_few(self, tiles: schedule.KeyRange) -> Boolean:
        """Whether the keys are so few that the maximum is followed at once."""
        return tiles.end - tiles.begin <= max(FOLLOWED_KEYS // self.spec.tile_n, 1)

    @cute.jit
    def allocate_shared(self) -> Shared:
        """The block's shared memory; O takes the place of Q."""
        spec, dtype = cutlass.const_expr(self.spec), self.dtype
        smem = cutlass.memory.SmemAllocator()
        widest = max(spec.head_width, spec.value_width)
        ring_K = self.smem_layout(spec.tile_n, spec.head_width, spec.stages)
        ring_V = self.smem_layout(spec.tile_n, spec.value_width, spec.stages)
        if cutlass.const_expr(spec.query_makes_room):
            sK = smem.allocate_tensor(dtype, ring_K, byte_alignment=1024)
            sV = smem.allocate_tensor(dtype, ring_V, byte_alignment=1024)
            rest = self.smem_layout(spec.tile_m, widest - spec.held_columns)
            # The first columns of a tile are the first in memory (layouts.smem_layout): these are in V's place.
            rows = smem.allocate_tensor(dtype, rest, byte_alignment=1024).iterator - spec.tile_m * spec.held_columns
        else:
            # In this order: with K first ptxas makes a loop with spills at head_dim 128, causal, on sm_90.
            rows = smem.allocate_tensor(dtype, self.smem_layout(spec.tile_m, widest), byte_alignment=1024).iterator
            sK = smem.allocate_tensor(dtype, ring_K, byte_alignment=1024)
            sV = smem.allocate_tensor(dtype, ring_V, byte_alignment=1024)
        sQ = cute.make_tensor(rows, self.smem_layout(spec.tile_m, spec.head_width, 1))
        sO = cute.make_tensor(rows, self.smem_layout(spec.tile_m, spec.value_width))
        return Shared(sQ, sK, sV, sO)

    def smem_layout(self, rows: int, cols: int, stages: int | None = None):
        return layouts.smem_layout(rows, cols, stages, swizzle=self.spec.swizzle)

    @cute.jit
    def mainloop(
        self,
        inputs: Inputs,
        shared: Shared,
        tidx: Int32,
        work: schedule.Work,
        state: softmax.SoftmaxState,
        acc_O: cute.Tensor,
    ) -> Mainloop:
        """This thread's part of ``work``."""
        spec = cutlass.const_expr(self.spec)
        tiles = schedule.key_range(work, inputs.window_left, inputs.window_right, spec.tile_m, spec.tile_n)
        if cutlass.const_expr(spec.split):
            work, tiles = schedule.share_of(work, tiles, spec.tile_n, spec.features.left, spec.features.right)
        kv_head = work.head // inputs.heads_per_kv_head
        key_end = work.key_start + work.key_len
        gK = Rows(inputs.mK[work.b, None, kv_head, None], work.key_start, key_end)
        gV = Rows(inputs.mV[work.b, None, kv_head, None], work.key_start, key_end)
        sVt = layouts.transposed(shared.sV, spec.tile_n, spec.value_width, spec.stages)
        tiled_mma = self.tiled_mma()
        modifiers, softmax_scale = self.modifiers(inputs, work)
        sQ = shared.sQ[None, None, 0]
        return Mainloop(
            work=work,
            tiles=tiles,
            tidx=tidx,
            operands=products.partition(tiled_mma, tidx, sQ, shared.sK, sVt, spec.head_dim, spec.held_columns),
            ring_K=make_ring(self.row_copy(spec.head_width), tidx, gK, shared.sK, self.keeps_lines),
            ring_V=make_ring(self.row_copy(spec.value_width), tidx, gV, shared.sV, self.keeps_lines),
            modifiers=modifiers,
            visible=mask.Visibility(
                work.first_row, work.query_len, work.key_len, inputs.window_left, inputs.window_right
            ),
            state=state,
            acc_O=acc_O,
            scale=softmax_scale,
            slot=cute.make_rmem_tensor(1, Int32),
        )

    def tiled_mma(self) -> cute.TiledMma:
        return products.make_tiled_mma(self.dtype, self.spec.warps, self.spec.rows_a_warp // 16)

    @property
    def keeps_lines(self) -> bool:
        """Whether the addresses that the rings' copies start from are kept in registers: not beside half of Q."""
        return not self.spec.query_makes_room

    def row_copy(self, width: int) -> layouts.RowCopy:
        return layouts.async_row_copy(self.dtype, self.spec.threads, self.spec.copy_lanes(width))

    @cute.jit
    def load_queries(self, inputs: Inputs, shared: Shared, loop: Mainloop):
        """Q into shared memory, on the way with the first group of the rings; and zeros where rows are padded."""
        spec, work, tidx = cutlass.const_expr(self.spec), loop.work, loop.tidx
        mQ_head = inputs.mQ[work.b, None, work.head, None]
        gQ = Rows(mQ_head, work.query_start, work.query_start + work.query_len)
        copy = self.row_copy(spec.head_width)
        load_rows(copy, tidx, gQ, shared.sQ[None, None, 0], work.first_row, zero_past_end=False)
        if cutlass.const_expr(spec.head_width > spec.head_dim):
            zero_columns(tidx, spec.threads, shared.sQ, spec.head_dim)
            zero_columns(tidx, spec.threads, shared.sK, spec.head_dim)
        if cutlass.const_expr(not spec.query_makes_room):
            self.zero_values(loop)
        if inputs.scale_log2 < 0.0:  # the row maximum belongs to the largest probability only if c is positive
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            negate_own(copy, tidx, shared.sQ[None, None, 0], spec.head_dim)

    @cute.jit
    def load_queries_again(self, inputs: Inputs, shared: Shared, loop: Mainloop):
        """``load_queries`` for a second pass: V has taken the place of what was held."""
        if ~self.are_few(loop.tiles):
            self.load_queries(inputs, shared, loop)

    @cute.jit
    def zero_values(self, loop: Mainloop):
        """Zeros where V's rows are padded."""
        spec = cutlass.const_expr(self.spec)
        if cutlass.const_expr(spec.value_width > spec.value_dim):
            zero_columns(loop.tidx, spec.threads, loop.ring_V.sX, spec.value_dim)

    @cute.jit
    def make_room(self, loop: Mainloop):
        """Once this thread's copies of Q have landed: take what is held of it, and leave its place to V."""
        cute.arch.sync_threads()  # the copies of all threads have
        products.load_queries(loop.operands)
        cute.arch.sync_threads()  # all warps have taken theirs
        self.zero_values(loop)

    @cute.jit
    def finish(
        self,
        inputs: Inputs,
        shared: Shared,
        here: place.Place,
        work: schedule.Work,
        state: softmax.SoftmaxState,
        acc_O: cute.Tensor,
    ):
        """Divide by the row sums; write out and logsumexp."""
        spec, tidx = cutlass.const_expr(self.spec), here.thread
        work = self.work_again(inputs, here, work)
        sink = None
        if cutlass.const_expr(spec.features.sink):
            sink = inputs.mSink[work.head]
        row_lse = softmax.finish(state, acc_O, sink)
        tiled_mma = self.tiled_mma()
        fence = None  # at least one barrier has passed since Q was read
        if cutlass.const_expr(spec.query_makes_room):
            fence = cutlass.const_expr("block")
        elif cutlass.const_expr(spec.query_held == "none"):
            fence = cutlass.const_expr("warp" if spec.head_width == spec.value_width else "block")
        lanes = cutlass.const_expr(8 if spec.value_width % 64 == 0 else 4)
        mO_head = inputs.mO[work.b, None, work.head, None]
        gO = Rows(mO_head, work.query_start, work.query_start + work.query_len)
        store_rows(acc_O, tiled_mma, shared.sO, gO, tidx, work.first_row, lanes, fence)
        mLSE_head = inputs.mLSE[work.b, work.head, None]
        cO = cute.make_identity_tensor((spec.tile_m, spec.value_width))
        tOcO = accumulator_rows(tiled_mma.get_slice(tidx).partition_C(cO))
        # One of the four lanes of a row; where nobody asked for the logsumexp, its tensor has no rows.
        if (tidx % 4 == 0) & (mLSE_head.shape[0] > 0):
            for r in cutlass.range_constexpr(cute.size(row_lse)):
                row = work.first_row + tOcO[r, 0][0]
                if row < work.query_len:
                    mLSE_head[work.query_start + row] = row_lse[r]

    @cute.jit
    def leave_part(
        self,
        inputs: Inputs,
        here: place.Place,
        work: schedule.Work,
        state: softmax.SoftmaxState,
        acc_O: cute.Tensor,
    ):
        """Write what this block's share of the keys makes of its rows; of a row that sees none of them the word alone.

        The four lanes of a row write 32 bytes that follow one another, a sector, with each store.
        """
        spec, tidx = cutlass.const_expr(self.spec), here.thread
        work = self.work_again(inputs, here, work)
        rO = accumulator_rows(acc_O)
        cO = cute.make_identity_tensor((spec.tile_m, spec.value_width))
        tOcO = accumulator_rows(self.tiled_mma().get_slice(tidx).partition_C(cO))
        for r in cutlass.range_constexpr(cute.size(rO.shape[0])):
            m, total = state.row_top[r], softmax.quad_sum(state.row_sum[r])
            row = work.first_row + tOcO[r, 0][0]
            if row < work.query_len:
                index = (work.b * work.query_len + row) * inputs.mQ.shape[2] + work.head
                if partial.is_live(m, total):
                    mPart_row = inputs.mPartO[work.split, index, None]
                    for c in cutlass.range_constexpr(0, cute.size(rO.shape[1]), 2):
                        # Eight columns of an MMA are all padding or none.
                        if cutlass.const_expr(c // 2 * 8 < spec.value_dim):
                            pair = cute.make_rmem_tensor(2, Float32)
                            pair[0], pair[1] = rO[r, c], rO[r, c + 1]
                            start = mPart_row.iterator + cute.assume(tOcO[r, c][1], divby=2)
                            cute.autovec_copy(pair, cute.make_tensor(start, cute.make_layout(2)))
                if tidx % 4 == 0:
                    inputs.mPartState[work.split, index, 0] = m
                    inputs.mPartState[work.split, index, 1] = total

    @cute.jit
    def modifiers(self, inputs: Inputs, work: schedule.Work):
        """(Modifiers or None, the scale that is left to the softmax)."""
        spec, features = cutlass.const_expr(self.spec), cutlass.const_expr(self.spec.features)
        scale_log2 = cute.arch.fmax(cute.arch.fmax(inputs.scale_log2, -inputs.scale_log2), Float32(SMALLEST_SCALE))
        modifiers, softmax_scale = None, scale_log2
        if cutlass.const_expr(features.changes_scores):
            scale, slope, mMask, mask_start = scale_log2 * softmax.LN_2, None, None, None
            if cutlass.const_expr(features.softcap):
                scale = inputs.scale_over_softcap
            if cutlass.const_expr(features.alibi):
                slope = inputs.mSlopes[work.sequence, work.head]
            if cutlass.const_expr(features.mask is not None):
                mMask = inputs.mMask[work.b, work.head, None, None]
                if cutlass.const_expr(spec.split):
                    mask_start = work.key_start
            modifiers = scores.Modifiers(scale, inputs.softcap, slope, mMask, mask_start)
            softmax_scale = Float32(softmax.LOG2_E)
        return modifiers, softmax_scale

    @cute.jit
    def follow(self, loop: Mainloop, slack: Float32):
        """All steps, the reference trailing the row maximum by up to ``slack`` powers of two."""
        tiles = loop.tiles
        self.start(loop)
        self.steps(loop, tiles.end, tiles.plain_end, "all", slack)
        self.steps(loop, tiles.plain_end, tiles.plain_begin, "none", slack)
        if cutlass.const_expr(self.spec.features.left):
            self.steps(loop, tiles.plain_begin, tiles.begin, "all", slack)

    @cute.jit
    def keep_first_reference(self, loop: Mainloop):
        """All steps, the reference being a row's maximum in the first of them; with a bound on the right, where those
        are the tiles at the diagonal, the maximum of the first tile (or two) in which the row sees a key."""
        tiles = loop.tiles
        slack = Float32.inf if cutlass.const_expr(self.spec.features.right) else Float32(0.0)
        end, referenced = tiles.end, tiles.referenced
        if cutlass.const_expr(self.spec.begins_with_two_tiles):
            self.first_two_steps(loop, slack)
            end = end - 2
            referenced = cutlass.min(referenced, end)
        else:
            self.start(loop)
        self.steps(loop, end, referenced, "some", slack)
        softmax.settle(loop.state, loop.scale)
        plain_begin = cutlass.min(tiles.plain_begin, referenced)
        self.steps(loop, referenced, plain_begin, "none", None)
        if cutlass.const_expr(self.spec.features.left):
            self.steps(loop, plain_begin, tiles.begin, "all", None)

    @cute.jit
    def start(self, loop: Mainloop):
        """No row has seen a key; load the first stages - 1 key tiles, the very first of which can pass the end.

        Step t works on key tile end - 1 - t, which lives in slot t % stages and was loaded by cp.async group t. Every
        step commits one group, even an empty one, so that the number of open groups is always known.
        """
        stages, end = cutlass.const_expr(self.spec.stages), loop.tiles.end
        softmax.reset(loop.state)
        softmax.clear(loop.state, loop.acc_O)
        loop.slot[0] = Int32(0)
        if end > loop.tiles.begin:
            # What K holds past the end is masked; V's rows there meet P = 0, and 0 * inf would be NaN.
            load_last_tile(loop.ring_K, end - 1, Int32(0), zero_past_end=False)
            if cutlass.const_expr(self.spec.query_makes_room):
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                self.make_room(loop)
            load_last_tile(loop.ring_V, end - 1, Int32(0), zero_past_end=True)
        cute.arch.cp_async_commit_group()
        for t in cutlass.range_constexpr(1, stages - 1):
            self.load_tile(loop, end - 1 - t, Int32(t))
        if cutlass.const_expr(self.spec.query_held == "all"):
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_threads()
            if end > loop.tiles.begin:
                products.load_queries(loop.operands)

    @cute.jit
    def first_two_steps(self, loop: Mainloop, slack: Float32):
        """The last two key tiles, of which there must be two, at once: the maximum of both is a row's first reference.

        O takes no registers yet, so that the scores of both fit, and nothing is rescaled. (Where Q is read from shared
        memory again and again, at 32 rows a warp and head_dim 128, nothing is gained.) K comes before V: cp.async
        groups are Q with K(0), K(1), V(0) with V(1), and then as ever. The next tile takes the place of tile 0.

        Where ``overlaps_first_steps``, Q's fragments are held only afterwards.
        """
        stages, last = cutlass.const_expr(self.spec.stages), loop.tiles.end - 1
        load_last_tile(loop.ring_K, last, Int32(0), zero_past_end=False)
        cute.arch.cp_async_commit_group()
        load_tile(loop.ring_K, last - 1, Int32(1))
        cute.arch.cp_async_commit_group()
        load_last_tile(loop.ring_V, last, Int32(0), zero_past_end=True)
        load_tile(loop.ring_V, last - 1, Int32(1))
        cute.arch.cp_async_commit_group()
        for t in cutlass.range_constexpr(2, stages):
            self.load_tile(loop, last - t, Int32(t))
        next_tile = last - stages

        both = self.allocate_scores(2 * self.spec.tile_n)
        of_tile = [products.of_keys(both, 2, (t * self.spec.tile_n, (t + 1) * self.spec.tile_n)) for t in range(2)]
        for t in cutlass.range_constexpr(2):
            cute.arch.cp_async_wait_group(stages - t)
            cute.arch.sync_threads()
            if cutlass.const_expr(t == 0 and not self.overlaps_first_steps):
                products.load_queries(loop.operands)
            self.first_scores(loop, last - t, t, of_tile[t])
        cute.arch.cp_async_wait_group(stages - 2)
        cute.arch.sync_threads()  # V(0) and V(1) are visible; all warps are past K(0)
        if next_tile >= loop.tiles.begin:
            load_tile(loop.ring_K, next_tile, Int32(0))
        softmax.begin(loop.state, both, loop.scale, slack)
        loop.acc_O.fill(0.0)
        for t in cutlass.range_constexpr(2):
            self.first_values(loop, last - t, t, of_tile[t])
            if cutlass.const_expr(t == 0):
                cute.arch.sync_threads()  # all warps are past V(0)
                if next_tile >= loop.tiles.begin:
                    load_tile(loop.ring_V, next_tile, Int32(0))
                cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.overlaps_first_steps):
            # Only now, so that the registers were free; Q is in shared memory until ``finish``.
            products.load_queries(loop.operands)
        # Opaque: LLVM would make the loop behind this for a known slot first, and shuffle registers in it.
        loop.slot[0] = place.opaque(Int32(2 % stages))

    @property
    def overlaps_first_steps(self) -> bool:
        """Whether exponentials and MMAs of the first two steps overlap, 16 keys at a time.

        That needs the registers of Q's fragments, which are read again for each step, and code without a branch. So not
        under a mask, where it is worth more that a warp skips the keys of which its rows see nothing; nor with 16 rows
        a warp, where ptxas makes a better loop of what follows if there are branches.
        """
        return self.spec.rows_a_warp == 32 and not self.spec.features.right

    @cute.jit
    def first_scores(self, loop: Mainloop, n_tile: Int32, slot: cutlass.Constexpr, acc_S: cute.Tensor):
        """The scores of key tile ``n_tile``, -inf in a warp that skips it."""
        keys = cutlass.const_expr((0, self.spec.tile_n))
        if cutlass.const_expr(self.overlaps_first_steps):
            # In the order of MMAs of the steps behind: another one, and ptxas makes a slower loop of those (measured).
            products.multiply_QK(replace(loop.operands, held_QK=0), Int32(slot), acc_S, keys)
        elif self.sees_any(loop, n_tile):
            cute.arch.sync_warp()  # keeps this a branch
            products.multiply_QK(loop.operands, Int32(slot), acc_S, keys)
        else:
            cute.arch.sync_warp()
            acc_S.fill(-Float32.inf)
        cut = cutlass.const_expr(self.spec.features.right or slot == 0)
        self.modify_and_mask(loop, n_tile, acc_S, "some" if cut else "none")

    @cute.jit
    def first_values(self, loop: Mainloop, n_tile: Int32, slot: cutlass.Constexpr, acc_S: cute.Tensor):
        """Add what the scores of key tile ``n_tile`` give to O, unless this warp skips it."""
        keys = cutlass.const_expr((0, self.spec.tile_n))
        if cutlass.const_expr(self.overlaps_first_steps):
            for part in cutlass.const_expr(self.parts()):
                self.add_values(loop, Int32(slot), products.of_keys(acc_S, 2, part), part)
        elif cutlass.const_expr(self.spec.features.right):
            if self.sees_any(loop, n_tile):
                cute.arch.sync_warp()  # keeps this a branch
                self.add_values(loop, Int32(slot), acc_S, keys)
        else:
            rP = cute.make_rmem_tensor_like(acc_S, self.dtype)
            if self.sees_any(loop, n_tile):
                cute.arch.sync_warp()  # keeps this a branch
                softmax.exponentiate(loop.state, acc_S, loop.scale)
                rP.store(acc_S.load().to(self.dtype))
            else:
                cute.arch.sync_warp()
                rP.fill(0.0)
            products.multiply_PV(loop.operands, Int32(slot), rP, loop.acc_O, keys)

    def parts(self) -> list[tuple[int, int]]:
        """The keys of a tile, 16 at a time: (begin, end)."""
        return [(key, key + 16) for key in range(0, self.spec.tile_n, 16)]

    def allocate_scores(self, keys: int) -> cute.Tensor:
        """Registers for this thread's scores of ``keys`` keys."""
        shape = self.tiled_mma().get_slice(0).partition_shape_C((self.spec.tile_m, keys))
        return cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def sees_any(self, loop: Mainloop, n_tile: Int32) -> Boolean:
        """Whether the window lets any of this warp's rows see any of key tile ``n_tile``.

        Without bounds they all do, and the branch that asks keeps apart what ptxas would else have alive together.
        """
        if cutlass.const_expr(not (self.spec.features.left or self.spec.features.right)):
            return place.opaque(n_tile) >= loop.tiles.begin
        warp_row = cute.arch.make_warp_uniform(loop.tidx // 32) * self.spec.rows_a_warp
        return mask.sees_any(loop.visible, warp_row, self.spec.rows_a_warp, n_tile, self.spec.tile_n)

    @cute.jit
    def load_tile(self, loop: Mainloop, tile: Int32, slot: Int32):
        """Load key tile ``tile`` into ``slot`` if it is one of the block's, as one group in either case."""
        if tile >= loop.tiles.begin:
            load_tile(loop.ring_K, tile, slot)
            load_tile(loop.ring_V, tile, slot)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def steps(self, loop: Mainloop, end: Int32, begin: Int32, masked: cutlass.Constexpr, slack: Float32 | None):
        """Key tiles end - 1 down to begin, one ``step`` each."""
        for n_tile in cutlass.range(end - 1, begin - 1, -1, unroll=1):
            self.step(loop, n_tile, masked, slack)

    @cute.jit
    def steps_in_slices(self, loop: Mainloop):
        """All key tiles, 16 keys at a time in a loop of their own, which follows the maximum and masks where it must:
        short, and of few registers beside those of Q."""
        width = cutlass.const_expr(16)
        slices = cutlass.const_expr(self.spec.tile_n // width)
        for n_tile in cutlass.range(loop.tiles.end - 1, loop.tiles.begin - 1, -1, unroll=1):
            slot = self.arrive(loop)
            self.load_next(loop, n_tile, slot)
            for i in cutlass.range(slices, unroll=1):
                acc_S, first_key = self.allocate_scores(width), i * width
                products.multiply_QK(loop.operands, slot, acc_S, (0, width), first_key)
                self.modify_and_mask(loop, n_tile, acc_S, "some", first_key)
                softmax.follow_maximum(loop.state, acc_S, loop.acc_O, loop.scale, Float32(0.0))
                self.add_values(loop, slot, acc_S, (0, width), first_key)
            self.leave(loop, slot)

    @cute.jit
    def arrive(self, loop: Mainloop) -> Int32:
        """The current tile's slot, once K, V (and Q) of all threads are visible there and all warps are past the
        previous step: its slot is free."""
        cute.arch.cp_async_wait_group(self.spec.stages - 2)
        cute.arch.sync_threads()
        return loop.slot[0]

    @cute.jit
    def leave(self, loop: Mainloop, slot: Int32):
        """On to the slot behind ``slot``."""
        loop.slot[0] = slot + 1 if slot < self.spec.stages - 1 else Int32(0)

    @cute.jit
    def step(self, loop: Mainloop, n_tile: Int32, masked: cutlass.Constexpr, slack: Float32 | None):
        """Attend to key tile ``n_tile``.

        masked: which tiles of such steps need a mask, "all", "none" or "some". slack: powers of two by which the
        reference trails the row maximum (softmax.follow_maximum), or None: every row keeps the reference it has.
        """
        spec = cutlass.const_expr(self.spec)
        slot = self.arrive(loop)
        plain = cutlass.const_expr(masked == "none" and slack is None and loop.modifiers is None)
        if cutlass.const_expr(plain and spec.query_held == "all"):
            self.attend_in_parts(loop, n_tile, slot)
        else:
            self.attend_keys(loop, n_tile, slot, masked, slack)
        self.leave(loop, slot)

    @cute.jit
    def load_next(self, loop: Mainloop, n_tile: Int32, slot: Int32):
        """Load what the step ``stages - 1`` behind this one needs, in place of the step before.

        Behind a step's first MMAs, not ahead of them: addresses are computed while the tensor cores work, and what
        arrives does not keep them from K, which they read fastest.
        """
        stages = cutlass.const_expr(self.spec.stages)
        previous = slot - 1 if slot > 0 else Int32(stages - 1)
        self.load_tile(loop, n_tile - (stages - 1), previous)

    @cute.jit
    def attend_keys(self, loop: Mainloop, n_tile: Int32, slot: Int32, masked: cutlass.Constexpr, slack: Float32 | None):
        """The step's work: all keys of the tile at once, as a mask, a maximum and Q's fragments are for all of them.

        A warp whose rows see none of them, as at the diagonal of a causal mask, leaves the tensor cores to others, but
        not the copies, which are everybody's. They come first there: between two branches S would be kept for, they
        cost spills in all loops.
        """
        spec = cutlass.const_expr(self.spec)
        acc_S = self.allocate_scores(spec.tile_n)
        keys = cutlass.const_expr((0, spec.tile_n))
        bounded = cutlass.const_expr(spec.features.left or spec.features.right)
        # With half of Q the branch that asks saves spills without bounds, too. Not at the left edge of a pass that
        # keeps its references: beside the plain loop it costs some.
        asks = cutlass.const_expr(masked != "none" and slack is not None and (bounded or spec.query_makes_room))
        if cutlass.const_expr(not asks):
            products.multiply_QK(loop.operands, slot, acc_S, keys)
            self.load_next(loop, n_tile, slot)
            self.weigh_values(loop, n_tile, slot, acc_S, masked, slack)
        else:
            sees = self.sees_any(loop, n_tile)
            self.load_next(loop, n_tile, slot)
            if sees:
                cute.arch.sync_warp()  # keeps this a branch
                products.multiply_QK(loop.operands, slot, acc_S, keys)
                self.weigh_values(loop, n_tile, slot, acc_S, masked, slack)

    @cute.jit
    def weigh_values(
        self,
        loop: Mainloop,
        n_tile: Int32,
        slot: Int32,
        acc_S: cute.Tensor,
        masked: cutlass.Constexpr,
        slack: Float32 | None,
    ):
        """From the scores of key tile ``n_tile`` to O."""
        self.modify_and_mask(loop, n_tile, acc_S, masked)
        if cutlass.const_expr(slack is not None):
            softmax.follow_maximum(loop.state, acc_S, loop.acc_O, loop.scale, slack)
        # In the order in which they overlap: for whole tiles ptxas puts fewer exponentials beside MMAs. (Where Q is in
        # registers and the plain loop goes by parts anyway, it makes that loop longer.)
        whole = cutlass.const_expr([(0, self.spec.tile_n)])
        for keys in cutlass.const_expr(whole if self.spec.query_held == "all" else self.parts()):
            self.add_values(loop, slot, products.of_keys(acc_S, 2, keys), keys)

    @cute.jit
    def modify_and_mask(
        self,
        loop: Mainloop,
        n_tile: Int32,
        acc_S: cute.Tensor,
        masked: cutlass.Constexpr,
        first_key: Int32 | cutlass.Constexpr = 0,
    ):
        """What comes between Q K^T and the softmax, from key ``first_key`` of the tile on. masked: as in ``step``."""
        spec, visible = cutlass.const_expr(self.spec), loop.visible
        keys = cutlass.const_expr(cute.size(acc_S.shape[2]) * products.MMA_SHAPE[1])
        tScS = loop.operands.thr_mma.partition_C(cute.make_identity_tensor((spec.tile_m, keys)))
        first_key = n_tile * spec.tile_n + first_key
        if cutlass.const_expr(loop.modifiers is not None):
            scores.modify(loop.modifiers, acc_S, tScS, visible.first_row, first_key, visible.query_len, visible.key_len)
        if cutlass.const_expr(masked == "all"):
            mask.apply_mask(visible, acc_S, tScS, first_key)
        elif cutlass.const_expr(masked == "some"):
            self.mask_if_cut(loop, acc_S, tScS, n_tile, first_key)

    @cute.jit
    def add_values(
        self,
        loop: Mainloop,
        slot: Int32,
        acc_S: cute.Tensor,
        keys: cutlass.Constexpr,
        first_key: Int32 | cutlass.Constexpr = 0,
    ):
        """Turn the scores of the keys [begin, end) = ``keys`` from ``first_key`` on of a tile into probabilities, and
        add P V to O."""
        softmax.exponentiate(loop.state, acc_S, loop.scale)
        rP = cute.make_rmem_tensor_like(acc_S, self.dtype)
        rP.store(acc_S.load().to(self.dtype))
        products.multiply_PV(loop.operands, slot, rP, loop.acc_O, keys, first_key)

    @cute.jit
    def attend_in_parts(self, loop: Mainloop, n_tile: Int32, slot: Int32):
        """The step's work where there is neither a mask nor a maximum, and Q is at hand: 16 keys at a time.

        The scores of the next keys are asked for before the exponentials of these, and the compiler makes of that a
        stream of MMAs with exponentials between them. (With Q in shared memory each part would read it again.)
        """
        parts = cutlass.const_expr(self.parts())
        acc_S = self.allocate_scores(self.spec.tile_n)
        of_part = [products.of_keys(acc_S, 2, keys) for keys in parts]
        products.multiply_QK(loop.operands, slot, of_part[0], parts[0])
        self.load_next(loop, n_tile, slot)
        for i in cutlass.range_constexpr(len(parts)):
            if cutlass.const_expr(i + 1 < len(parts)):
                products.multiply_QK(loop.operands, slot, of_part[i + 1], parts[i + 1])
            self.add_values(loop, slot, of_part[i], parts[i])

    @cute.jit
    def mask_if_cut(self, loop: Mainloop, acc_S: cute.Tensor, tScS: cute.Tensor, n_tile: Int32, first_key: Int32):
        """Mask what there is of key tile ``n_tile``, from key ``first_key`` of the sequence on, if some row does not
        see all of the tile."""
        if (n_tile >= loop.tiles.plain_end) | (n_tile < loop.tiles.plain_begin):
            cute.arch.sync_warp()  # keeps this a branch
            mask.apply_mask(loop.visible, acc_S, tScS, first_key)


@cute.jit
def block_any(flag: Boolean) -> Boolean:
    """Whether ``flag`` holds for any thread of the block; a barrier for all of them (PTX ISA, bar.red)."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred mine, any; setp.ne.s32 mine, {$r0}, 0; "
        "bar.red.or.pred any, 0, mine; selp.s32 {$w0}, 1, 0, any; }",
        write_only_types=[Int32],
        read_only_args=[Int32(flag)],
    )
    return found != 0
