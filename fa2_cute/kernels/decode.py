"""Attention of few queries over a KV cache: FlashAttention-2 with the keys split over blocks and over warps.

With one query a tile of the forward kernel would be one row high, and one block would read a sequence alone. Here

- the query heads that share a KV head are rows of one tile (row r is query r // group, head r % group), so K and V are
  read once for all of them;
- a sequence's keys are split over ``splits`` blocks; each leaves a part (kernels/partial.py) that kernels/combine.py
  weighs against the others, or finishes its rows itself if it is the only one;
- a block's warps split its keys again: a group of warps (``warps_m`` along the rows, 16 each, by ``warps_v`` along the
  columns of V) has a ring of tiles of its own, into which it copies every ``warps_n``-th tile. The main loop has no
  barrier of the block: per tile there is one wait and one barrier of the group (of the warp, if it is one):

      wait + barrier      tile t has landed for all lanes of the group; all are past tile t - 1
      S = Q K^T
      copy tile t + stages - 1 into the slot of tile t - 1
      mask, softmax, O += P V

  At the end the groups' parts are merged through shared memory.

Which keys exist (page tables, lengths) is decided when a tile is copied: what does not exist becomes zeros in shared
memory, and a bit of the tile's word ``exists`` that masks its scores. So nothing of unused slots or of other sequences'
pages is ever read.

FP8: kernels/narrow.py. Scores are scaled to logits row by row (``scale``, the power of two of Q's row, K's scale). A
scale s of V that changes from key to key cannot be taken out of the sum over keys; it is folded into the probabilities
before they are rounded, by adding ln(s) to the logit. What the softmax then sums is p s; the row's sum of p is made of
p s / s beside it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..decode_spec import DecodeSpec
from ..spec import SMALLEST_SCALE
from . import pages, softmax
from .cache_products import CacheProducts
from .cache_ring import CacheRing
from .cache_scores import CacheScores
from .decode_output import DecodeOutput, Target
from .decode_work import Keys, Rows, find_keys, find_rows
from .products import accumulator_rows
from .softmax import LOG2_E


class Decode:
    """The kernel for one specification; compiled by ``cute.compile(Decode(spec), ...)``.

    A tensor or number that the specification has no use for is None.
    """

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        self.ring, self.products = CacheRing(spec), CacheProducts(spec)
        self.scores, self.output = CacheScores(spec), DecodeOutput(spec)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, query_len, heads, head_dim)
        mK: cute.Tensor,  # (rows, cache_len, kv_heads, head_dim), or (pages, page_size, ...); uint8 if FP8
        mV: cute.Tensor,  # (rows, cache_len, kv_heads, value_dim), likewise
        mO: cute.Tensor,  # (batch, query_len, heads, value_dim), written if splits == 1
        mLSE: cute.Tensor,  # (batch, heads, query_len) float32, written if splits == 1
        mPartO: cute.Tensor,  # (splits, batch * query_len * heads, value_dim) float32, written if splits > 1
        mPartState: cute.Tensor,  # (splits, batch * query_len * heads, 2) float32, likewise: m and l
        mSeqlens: cute.Tensor | None,  # (batch,) int32; without it every slot holds a key
        mCuQ: cute.Tensor | None,  # (batch + 1,) int32: with it the tensors' own batch is 1
        mTable: cute.Tensor | None,  # (batch, pages a sequence) int32
        mBatchIdx: cute.Tensor | None,  # (batch,) int32
        mLeftpad: cute.Tensor | None,  # (batch,) int32
        mKScale: cute.Tensor | None,  # (batch, kv_heads) or (rows, blocks, kv_heads) float32
        mVScale: cute.Tensor | None,
        mSlopes: cute.Tensor | None,  # (batch, heads) float32
        mSink: cute.Tensor | None,  # (heads,) float32
        scale: Float32,  # the softmax scale; times log2(e) unless spec.logits
        softcap: Float32 | None,
        left: Int32,
        right: Int32,
        splits: Int32,
        stream,
    ):
        spec = self.spec
        batch = mQ.shape[0] if cutlass.const_expr(mCuQ is None) else mCuQ.shape[0] - 1
        self.kernel(
            mQ, mK, mV, mO, mLSE, mPartO, mPartState, mSeqlens, mCuQ, mTable, mBatchIdx, mLeftpad, mKScale, mVScale,
            mSlopes, mSink, scale, softcap, left, right, splits,
        ).launch(
            grid=spec.grid(batch, mQ.shape[1], mQ.shape[2], mK.shape[2], splits),
            block=[spec.threads, 1, 1],
            smem=spec.shared_bytes,
            stream=stream,
            use_pdl=spec.overlap,
            # As many registers as there are: without this ptxas aims at three blocks an SM, whose shared memory would
            # not fit, and computes addresses anew in every tile (243 instructions a tile of head_dim 128, not 203).
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mPartO: cute.Tensor,
        mPartState: cute.Tensor,
        mSeqlens: cute.Tensor | None,
        mCuQ: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mBatchIdx: cute.Tensor | None,
        mLeftpad: cute.Tensor | None,
        mKScale: cute.Tensor | None,
        mVScale: cute.Tensor | None,
        mSlopes: cute.Tensor | None,
        mSink: cute.Tensor | None,
        scale: Float32,
        softcap: Float32 | None,
        left: Int32,
        right: Int32,
        splits: Int32,
    ):
        spec = cutlass.const_expr(self.spec)
        if cutlass.const_expr(spec.overlap):
            # This kernel's launch may overlap the end of the one before: all that it reads may come from there, and all
            # that it writes to may be read there.
            cute.arch.griddepcontrol_wait()
        _, _, split = cute.arch.block_idx()
        rows = find_rows(spec, mQ, mK, mCuQ)
        if cutlass.const_expr(spec.paged):
            pages.prefetch_table(mTable[cutlass.max(rows.b, Int32(0)), None], split, splits)
        keys = find_keys(spec, mK, mSeqlens, mTable, mBatchIdx, mLeftpad, rows, left, right)

        # This block's tiles: as many steps of all groups as an even split takes, in the order of the splits.
        first_tile = keys.first // spec.tile_n
        tiles = cute.ceil_div(keys.end, spec.tile_n) - first_tile
        # No key may lie in the tile of ``first`` either: then there is no tile, and nothing is looked up.
        tiles = cutlass.select_(keys.first < keys.end, tiles, Int32(0))
        tiles_a_split = cute.ceil_div(tiles, splits * spec.warps_n) * spec.warps_n
        begin = cutlass.min(split * tiles_a_split, tiles)
        end = first_tile + cutlass.min(begin + tiles_a_split, tiles)
        begin = first_tile + begin

        smem = cutlass.memory.SmemAllocator()
        base = smem.allocate_tensor(cutlass.Uint8, cute.make_layout(spec.shared_bytes), byte_alignment=1024)
        target = Target(mO, mLSE, mSink, mPartO, mPartState, splits, split)
        if begin < end:
            self.attend_split(
                mQ, mK, mV, mKScale, mVScale, mSlopes, scale, softcap, left, right, target, rows, keys, begin, end, base
            )  # fmt: skip
        elif rows.count > 0:
            self.output.store_nothing(target, rows)

    @cute.jit
    def attend_split(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mKScale: cute.Tensor | None,
        mVScale: cute.Tensor | None,
        mSlopes: cute.Tensor | None,
        scale: Float32,
        softcap: Float32 | None,
        left: Int32,
        right: Int32,
        target: Target,
        rows: Rows,
        keys: Keys,
        begin: Int32,
        end: Int32,
        base: cute.Tensor,
    ):
        """Key tiles [begin, end) for a block's rows: to the output, or to a part if there are several splits."""
        spec = cutlass.const_expr(self.spec)
        stages = spec.stages
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % spec.group_threads
        part_v = thread // (32 * spec.warps_m)  # of V's columns, this thread's
        group = cute.arch.make_warp_uniform(tidx // spec.group_threads)
        start = base.iterator.toint()
        first = begin + group
        ring = self.ring.make(mK, mV, rows, keys, thread, group, first, start, start + spec.value_rings)
        # Start the stream before anything else waits for memory.
        if cutlass.const_expr(spec.paged):
            self.ring.look_up(ring, keys, first)
        for t in cutlass.range_constexpr(stages - 1):
            self.ring.load(ring, keys, rows, mKScale, mVScale, first + t * spec.warps_n, end, Int32(t), t)

        operands = self.products.partition(base, thread % (32 * spec.warps_m), part_v)
        thr_mma = operands.thr_mma
        row_factor = cute.make_rmem_tensor(2, Float32)
        self.products.load_Q(mQ, thr_mma, rows, scale, operands.rQ, row_factor)
        if cutlass.const_expr(spec.k_scale == "sequence"):
            for r in cutlass.range_constexpr(2):
                row_factor[r] = row_factor[r] * mKScale[rows.b, rows.kv_head]
        slopes = self.scores.load_slopes(mSlopes, thr_mma, rows)
        acc_O = cute.make_rmem_tensor(
            thr_mma.partition_shape_C((spec.tile_m, spec.value_width // spec.warps_v)), Float32
        )
        state = softmax.allocate(2)
        softmax.reset(state)
        softmax.clear(state, acc_O)
        softmax_scale = Float32(LOG2_E)
        if cutlass.const_expr(not spec.logits):
            softmax_scale = cute.arch.fmax(cute.arch.fmax(scale, -scale), Float32(SMALLEST_SCALE))

        # The maximum itself is followed: it rises ever more rarely, and a largest probability of 1 is not rounded.
        # Beside FP8's own errors that counts for nothing, and costs 17% at 16 x 1024 keys (docs/decode.md).
        slack = Float32(softmax.RESCALE_SLACK if spec.fp8 else 0.0)
        ring.slot[0] = Int32(0)
        for tile in cutlass.range(first, end, spec.warps_n, unroll=1):
            slot = ring.slot[0]
            cute.arch.cp_async_wait_group(stages - 2)
            # The tile of all lanes is visible; all are past the previous tile: its slot is free.
            self.ring.group_barrier(group)
            acc_S = cute.make_rmem_tensor(thr_mma.partition_shape_C((spec.tile_m, spec.tile_n)), Float32)
            self.products.multiply_QK(operands, group * stages + slot, acc_S)
            exists = ring.exists[0]
            k_scale = ring.k_scale[0] if cutlass.const_expr(spec.k_scale == "block") else None
            v_scale = ring.v_scale[0] if cutlass.const_expr(spec.v_scale == "block") else None
            previous = slot - 1 if slot > 0 else Int32(stages - 1)
            self.ring.shift(ring)
            self.ring.load(
                ring, keys, rows, mKScale, mVScale, tile + (stages - 1) * spec.warps_n, end, previous, stages - 2
            )
            self.scores.modify(acc_S, thr_mma, rows, keys, tile, row_factor, slopes, softcap, k_scale, v_scale)
            self.scores.mask(acc_S, thr_mma, rows, keys, tile, exists, left, right)
            softmax.follow_maximum(state, acc_S, acc_O, softmax_scale, slack)
            self.scores.exponentiate(state, acc_S, thr_mma, softmax_scale, v_scale)
            rP = cute.make_rmem_tensor_like(acc_S, self.products.mma_dtype)
            rP.store(acc_S.load().to(self.products.mma_dtype))
            self.products.multiply_PV(operands, group * stages + slot, rP, acc_O)
            ring.slot[0] = slot + 1 if slot < stages - 1 else Int32(0)
        if cutlass.const_expr(spec.group_threads > 32 and spec.warps_n > 1):
            # A group that has a tile less than others meets once more, for compute-sanitizer's racecheck: it orders
            # the block's barriers below by how many barriers each thread has passed, those of its group included.
            steps = cute.ceil_div(end - begin, spec.warps_n)
            if first + (steps - 1) * spec.warps_n >= end:
                self.ring.group_barrier(group)

        if cutlass.const_expr(spec.v_scale == "sequence"):
            rO = accumulator_rows(acc_O)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(cute.size(rO.shape[1])):
                    rO[r, c] = rO[r, c] * mVScale[rows.b, rows.kv_head]
        if cutlass.const_expr(spec.overlap):
            # The kernel that combines, or whatever comes next, may be launched now; it waits for this one's end.
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # all rings are read: their memory is free
        sO, sState = self.output.parts(base)
        self.output.share(acc_O, state, thr_mma, group, part_v, sO, sState)
        cute.arch.sync_threads()
        self.output.merge(target, rows, softmax_scale, sO, sState)
