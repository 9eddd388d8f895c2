"""FlashAttention-2 forward (Dao 2023, algorithm 1) on SM80-style atoms: cp.async, ldmatrix, mma.sync.

One block computes tile_m query rows of one head. It walks over the key tiles from the last to the first, so that the
tiles that need a mask come first and the loop over the others carries none. K and V go through rings of ``stages``
tiles in shared memory; per key tile there is one wait and one barrier:

    wait + barrier          K(t), V(t) have landed for all threads; all warps are past step t - 1
    S = Q K(t)^T
    issue K, V(t+stages-1)  into the slot of step t - 1
    mask                    where the tile crosses the diagonal or the end
    P = exp2(S c - m c)     O rescaled where m rises
    O += P V(t)

Which reference m is subtracted is a choice, exact either way (kernels/softmax.py). ``reference="trailing"`` follows the
row maximum in every tile. ``reference="first"`` takes it once for each row, in the steps that also mask; the loop that
remains has no maximum, no vote and no branch, and the compiler overlaps exponentials and MMAs freely. Should a later
score be so much larger that anything overflows, the block finds out at its end, makes a pass over K alone for the true
maxima and computes everything again with those.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..spec import ForwardSpec
from . import layouts, mask, products, schedule, softmax
from .copies import Ring, advance, load_first_tile, load_next_tile, load_rows, make_ring, negate_own, store_rows
from .products import accumulator_rows

# A scale of zero becomes the smallest subnormal number: with it every finite score vanishes beside 1 (2^128 of them are
# 2^-21), while -inf stays -inf, where -inf times 0 would be NaN. Nothing that c meets flushes subnormals.
SMALLEST_SCALE = 2.0**-149


@dataclass(frozen=True)
class Mainloop:
    """One thread's part of a block's query rows while it walks over the keys.

    acc_O: unnormalised output. scale: c, positive. slot: (1,), the ring slot of the current key tile.
    """

    operands: products.Products
    ring_K: Ring
    ring_V: Ring
    visible: mask.Visibility
    state: softmax.SoftmaxState
    acc_O: cute.Tensor
    scale: Float32
    slot: cute.Tensor


class Forward:
    """The kernel for one specification; compiled by ``cute.compile(Forward(spec), ...)``."""

    def __init__(self, spec: ForwardSpec):
        self.spec = spec
        self.dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[spec.dtype]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, query_len, heads, head_dim)
        mK: cute.Tensor,  # (batch, key_len, kv_heads, head_dim)
        mV: cute.Tensor,  # (batch, key_len, kv_heads, head_dim)
        mO: cute.Tensor,  # (batch, query_len, heads, head_dim)
        mLSE: cute.Tensor,  # (batch, heads, query_len), float32, natural logarithm
        scale_log2: Float32,  # softmax scale times log2(e)
        stream,
    ):
        spec = self.spec
        heads_per_kv_head = mQ.shape[2] // mK.shape[2]
        self.kernel(mQ, mK, mV, mO, mLSE, scale_log2, heads_per_kv_head).launch(
            grid=spec.grid(mQ.shape[0], mQ.shape[2], mQ.shape[1]),
            block=[spec.threads, 1, 1],
            smem=spec.shared_bytes,
            stream=stream,
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
    ):
        m_tile, head, b = schedule.tile_coordinates(mQ.shape[2], mQ.shape[1], self.spec.tile_m)
        if head < mQ.shape[2]:
            self.attend_tile(mQ, mK, mV, mO, mLSE, scale_log2, m_tile, head, head // heads_per_kv_head, b)

    @cute.jit
    def attend_tile(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scale_log2: Float32,
        m_tile: Int32,
        head: Int32,
        kv_head: Int32,
        b: Int32,
    ):
        """All of one block's work: rows [m_tile * tile_m, ...) of one head."""
        spec = cutlass.const_expr(self.spec)
        tile_m, tile_n, head_dim, stages = spec.tile_m, spec.tile_n, spec.head_dim, spec.stages
        tidx, _, _ = cute.arch.thread_idx()
        query_len, key_len = mQ.shape[1], mK.shape[1]
        first_row = m_tile * tile_m
        unmasked, n_end, referenced = schedule.key_range(first_row, query_len, key_len, tile_m, tile_n, spec.causal)

        mQ_head = mQ[b, None, head, None]  # (query_len, head_dim)
        mO_head = mO[b, None, head, None]
        mLSE_head = mLSE[b, head, None]  # (query_len,)

        smem = cutlass.memory.SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, layouts.smem_layout(self.dtype, tile_m, head_dim), byte_alignment=1024)
        ring = layouts.smem_layout(self.dtype, tile_n, head_dim, stages)
        sK = smem.allocate_tensor(self.dtype, ring, byte_alignment=1024)  # (tile_n, head_dim, stages)
        sV = smem.allocate_tensor(self.dtype, ring, byte_alignment=1024)
        sVt = layouts.transposed(sV, tile_n, head_dim, stages)  # (head_dim, tile_n, stages)

        tiled_mma = products.make_tiled_mma(self.dtype, spec.warps)
        thr_mma = tiled_mma.get_slice(tidx)
        copy = layouts.async_row_copy(self.dtype, spec.threads)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile_m, head_dim)), Float32)
        scale = cute.arch.fmax(cute.arch.fmax(scale_log2, -scale_log2), Float32(SMALLEST_SCALE))
        loop = Mainloop(
            operands=products.partition(tiled_mma, tidx, sQ, sK, sVt),
            ring_K=make_ring(copy, tidx, mK[b, None, kv_head, None], sK),
            ring_V=make_ring(copy, tidx, mV[b, None, kv_head, None], sV),
            visible=mask.Visibility(first_row, query_len, key_len, spec.causal),
            state=softmax.allocate(cute.size(accumulator_rows(acc_O).shape[0])),
            acc_O=acc_O,
            scale=scale,
            slot=cute.make_rmem_tensor(1, Int32),
        )
        if n_end > 0:
            load_rows(
                copy, tidx, mQ_head, sQ, first_row, query_len, zero_past_end=False
            )  # lands with the first group of the rings
            if scale_log2 < 0.0:  # the row maximum belongs to the largest probability only if c is positive
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                negate_own(copy, tidx, sQ)
        softmax.reset(loop.state)
        if cutlass.const_expr(spec.reference == "trailing"):
            softmax.clear(loop.state, acc_O)
            self.start(loop, n_end, values=True)
            self.steps(loop, n_end, unmasked, True, "trail")
            self.steps(loop, unmasked, Int32(0), False, "trail")
        else:
            self.attend_with_first_reference(loop, n_end, referenced)

        row_lse = softmax.finish(loop.state, acc_O, scale)
        store_rows(acc_O, tiled_mma, sQ, mO_head, tidx, first_row, query_len, self.dtype)
        cO = accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor((tile_m, head_dim))))
        if tidx % 4 == 0:  # one of the four lanes of a row
            for r in cutlass.range_constexpr(cute.size(row_lse)):
                row = first_row + cO[r, 0][0]
                if row < query_len:
                    mLSE_head[row] = row_lse[r]

    @cute.jit
    def attend_with_first_reference(self, loop: Mainloop, n_end: Int32, referenced: Int32):
        """All steps with ``reference="first"``: key tiles from ``referenced`` on give every row its reference."""
        careful = referenced  # key tiles from here on are masked, and rows without a reference take one
        exact = Boolean(False)  # the references are the true maxima
        again = Boolean(True)
        while again:
            softmax.clear(loop.state, loop.acc_O)
            self.start(loop, n_end, values=True)
            self.steps(loop, n_end, careful, True, "take")
            self.steps(loop, careful, Int32(0), False, "keep")
            again = Boolean(False)
            if ~exact:
                again = block_any(~softmax.is_sound(loop.state, loop.acc_O, loop.scale, careful > 0))
                if again:
                    softmax.reset(loop.state)
                    self.start(loop, n_end, values=False)
                    self.steps(loop, n_end, Int32(0), True, "track")
                    softmax.settle_maximum(loop.state, loop.scale)
                    cute.arch.sync_threads()  # the last K tile is read: its slot is free
                careful = Int32(0)
                exact = Boolean(True)

    @cute.jit
    def start(self, loop: Mainloop, n_end: Int32, values: cutlass.Constexpr):
        """Load the first stages - 1 key tiles below n_end, with or without V; only the very first can pass the end.

        Step t works on key tile n_end - 1 - t, which lives in slot t % stages and was loaded by cp.async group t.
        Every step commits one group, even an empty one, so that the number of open groups is always known.
        """
        stages = cutlass.const_expr(self.spec.stages)
        loop.slot[0] = Int32(0)
        if n_end > 0:
            # What K holds past the end is masked; V's rows there meet P = 0, and 0 * inf would be NaN.
            load_first_tile(loop.ring_K, n_end - 1, loop.visible.key_len, zero_past_end=False)
            if cutlass.const_expr(values):
                load_first_tile(loop.ring_V, n_end - 1, loop.visible.key_len, zero_past_end=True)
        cute.arch.cp_async_commit_group()
        for t in cutlass.range_constexpr(1, stages - 1):
            self.load_next(loop, t < n_end, Int32(t), values)

    @cute.jit
    def load_next(self, loop: Mainloop, exists: Boolean, slot: Int32, values: cutlass.Constexpr):
        """Load the next key tile into ``slot`` if it exists, as one group in either case."""
        if exists:
            load_next_tile(loop.ring_K, slot)
            if cutlass.const_expr(values):
                load_next_tile(loop.ring_V, slot)
        advance(loop.ring_K)
        if cutlass.const_expr(values):
            advance(loop.ring_V)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def steps(self, loop: Mainloop, end: Int32, begin: Int32, masked: cutlass.Constexpr, reference: cutlass.Constexpr):
        """Key tiles end - 1 down to begin, one step each."""
        for n_tile in cutlass.range(end - 1, begin - 1, -1, unroll=1):
            self.step(loop, n_tile, masked, reference)

    @cute.jit
    def step(self, loop: Mainloop, n_tile: Int32, masked: cutlass.Constexpr, reference: cutlass.Constexpr):
        """Attend to key tile ``n_tile``.

        reference: "trail" follows the row maximum, "take" gives rows without a reference one, "keep" leaves them all,
        "track" only looks for the maxima.
        """
        spec = cutlass.const_expr(self.spec)
        slot = loop.slot[0]
        cute.arch.cp_async_wait_group(spec.stages - 2)
        # K, V (and Q) of all threads are visible; all warps are past the previous step: its slot is free.
        cute.arch.sync_threads()

        thr_mma = loop.operands.thr_mma
        acc_S = cute.make_rmem_tensor(thr_mma.partition_shape_C((spec.tile_m, spec.tile_n)), Float32)
        products.multiply_QK(loop.operands, slot, acc_S)
        # Behind the first MMAs, not ahead of them: the addresses are computed while the tensor cores work.
        previous = slot - 1 if slot > 0 else Int32(spec.stages - 1)
        self.load_next(loop, n_tile >= spec.stages - 1, previous, values=reference != "track")
        if cutlass.const_expr(masked):
            tScS = thr_mma.partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n)))
            mask.apply_mask(loop.visible, acc_S, tScS, n_tile, spec.tile_n)
        if cutlass.const_expr(reference == "track"):
            softmax.track_maximum(loop.state, acc_S)
        else:
            if cutlass.const_expr(reference == "trail"):
                softmax.follow_maximum(loop.state, acc_S, loop.acc_O, loop.scale)
            elif cutlass.const_expr(reference == "take"):
                softmax.take_reference(loop.state, acc_S, loop.scale)
            softmax.exponentiate(loop.state, acc_S, loop.scale)
            rP = cute.make_rmem_tensor_like(acc_S, self.dtype)
            rP.store(acc_S.load().to(self.dtype))
            products.multiply_PV(loop.operands, slot, rP, loop.acc_O)
        loop.slot[0] = slot + 1 if slot < spec.stages - 1 else Int32(0)


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
