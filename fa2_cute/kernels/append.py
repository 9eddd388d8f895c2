"""New keys and values into a KV cache, in place: rotated, rounded, sent to their slots; and queries rotated beside.

A thread works on 8 elements of one row (of a token's head): 16 bytes in, 16 or 8 bytes out. The blocks of a sequence
are those for its keys, then those for its values, then those for its queries; which row a thread has follows from its
number alone, so nothing is shared and nothing waits.

    rotary (Su et al. 2021, equation 34): of a pair (x, y) at position p,  x cos - y sin  and  x sin + y cos,
    cos and sin being row p of their tables; float32 inside, rounded once, to the cache's type
    FP8: round(x / descale), saturating

A token whose slot the cache does not have (past its end, in a page that does not exist, in a row that does not exist)
is dropped.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..append_spec import THREADS, VECTOR, AppendSpec
from ..cache_spec import BLOCK_TOKENS


class Append:
    """The kernel for one specification; compiled by ``cute.compile(Append(spec), ...)``.

    A tensor that the specification has no use for is None.
    """

    def __init__(self, spec: AppendSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor | None,  # (batch, query_len, heads, head_dim), to be rotated
        mK: cute.Tensor,  # (batch, new_len, kv_heads, head_dim)
        mV: cute.Tensor,  # (batch, new_len, kv_heads, value_dim)
        mKcache: cute.Tensor,  # (rows, cache_len, kv_heads, head_dim), written
        mVcache: cute.Tensor,  # (rows, cache_len, kv_heads, value_dim), written
        mRotatedQ: cute.Tensor | None,  # (batch, query_len, heads, head_dim), written
        mLengths: cute.Tensor,  # (batch,) int32, written: tokens of each sequence afterwards
        mSeqlens: cute.Tensor,  # (batch,) int32: tokens before
        mBatchIdx: cute.Tensor | None,  # (batch,) int32: rows of the cache
        mTable: cute.Tensor | None,  # (batch, pages a sequence) int32
        mCos: cute.Tensor | None,  # (positions, rotary_dim / 2)
        mSin: cute.Tensor | None,  # (positions, rotary_dim / 2)
        mKdescale: cute.Tensor | None,  # (batch, kv_heads) or (rows, blocks, kv_heads) float32
        mVdescale: cute.Tensor | None,
        capacity: Int32,  # slots of a sequence
        query_step: Int32,  # 1: query i is at position seqlen + i; 0: all are at seqlen
        stream,
    ):
        new_rows = mK.shape[1] * mK.shape[2]
        query_rows = mQ.shape[1] * mQ.shape[2] if cutlass.const_expr(mQ is not None) else Int32(0)
        self.kernel(
            mQ,
            mK,
            mV,
            mKcache,
            mVcache,
            mRotatedQ,
            mLengths,
            mSeqlens,
            mBatchIdx,
            mTable,
            mCos,
            mSin,
            mKdescale,
            mVdescale,
            capacity,
            query_step,
        ).launch(
            grid=self.spec.grid(mK.shape[0], query_rows, new_rows),
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.spec.overlap,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor | None,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mKcache: cute.Tensor,
        mVcache: cute.Tensor,
        mRotatedQ: cute.Tensor | None,
        mLengths: cute.Tensor,
        mSeqlens: cute.Tensor,
        mBatchIdx: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mCos: cute.Tensor | None,
        mSin: cute.Tensor | None,
        mKdescale: cute.Tensor | None,
        mVdescale: cute.Tensor | None,
        capacity: Int32,
        query_step: Int32,
    ):
        spec = cutlass.const_expr(self.spec)
        if cutlass.const_expr(spec.overlap):
            # What comes next may be launched now: it waits for this kernel's end, as this one does for that before.
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        new_len, kv_heads = mK.shape[1], mK.shape[2]
        k_blocks = spec.blocks(new_len * kv_heads, spec.head_dim)
        v_blocks = spec.blocks(new_len * kv_heads, spec.value_dim)
        blocks = k_blocks + v_blocks
        if cutlass.const_expr(spec.rotary_dim > 0):
            blocks = blocks + spec.blocks(mQ.shape[1] * mQ.shape[2], spec.head_dim)
        b = block // blocks
        part = block % blocks

        seqlen = cutlass.min(cutlass.max(mSeqlens[b], Int32(0)), capacity)
        if part == 0 and tidx == 0:
            mLengths[b] = cutlass.min(seqlen + new_len, capacity)
        if part < k_blocks:
            self.append_row(
                mK, mKcache, mBatchIdx, mTable, mCos, mSin, mKdescale, spec.k_descale, b, part, seqlen, capacity
            )
        elif part < k_blocks + v_blocks:
            self.append_row(
                mV,
                mVcache,
                mBatchIdx,
                mTable,
                None,
                None,
                mVdescale,
                spec.v_descale,
                b,
                part - k_blocks,
                seqlen,
                capacity,
            )
        else:
            if cutlass.const_expr(spec.rotary_dim > 0):
                query, head, vector = thread_row(part - k_blocks - v_blocks, mQ.shape[2], spec.head_dim)
                if query < mQ.shape[1]:
                    x = load_vector(mQ[b, query, head, None], vector)
                    rotate(spec, x, mQ[b, query, head, None], mCos, mSin, vector, seqlen + query * query_step)
                    store_vector(x, mRotatedQ[b, query, head, None], vector)

    @cute.jit
    def append_row(
        self,
        mX: cute.Tensor,  # (batch, new_len, kv_heads, dim)
        mCache: cute.Tensor,  # (rows, cache_len, kv_heads, dim)
        mBatchIdx: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mCos: cute.Tensor | None,
        mSin: cute.Tensor | None,
        mDescale: cute.Tensor | None,
        descale: cutlass.Constexpr,
        b: Int32,
        part: Int32,
        seqlen: Int32,
        capacity: Int32,
    ):
        """This thread's vector of new keys, or of new values (no cosines), to its slot if there is one."""
        spec = cutlass.const_expr(self.spec)
        token, head, vector = thread_row(part, mX.shape[2], mX.shape[3])
        if token < mX.shape[1]:
            position = seqlen + token
            row, slot, exists = find_slot(mCache, mBatchIdx, mTable, b, position, capacity)
            if exists:
                mX_row = mX[b, token, head, None]
                x = load_vector(mX_row, vector)
                if cutlass.const_expr(mCos is not None):
                    rotate(spec, x, mX_row, mCos, mSin, vector, position)
                if cutlass.const_expr(descale == "sequence"):
                    divide(x, mDescale[b, head])
                elif cutlass.const_expr(descale == "block"):
                    block = Int32(0) if cutlass.const_expr(spec.paged) else slot // BLOCK_TOKENS
                    divide(x, mDescale[row, block, head])
                store_vector(x, mCache[row, slot, head, None], vector)


@cute.jit
def thread_row(part: Int32, heads: Int32, dim: cutlass.Constexpr) -> tuple[Int32, Int32, Int32]:
    """(token, head, vector) of this thread in block ``part`` of rows of ``dim`` elements; idle threads get no token."""
    tidx, _, _ = cute.arch.thread_idx()
    vectors = cutlass.const_expr(dim // VECTOR)
    rows_a_block = cutlass.const_expr(THREADS // vectors)
    row = part * rows_a_block + tidx // vectors
    token = row // heads
    if tidx >= rows_a_block * vectors:
        token = Int32(2**31 - 1)
    return token, row % heads, tidx % vectors


@cute.jit
def find_slot(
    mCache: cute.Tensor,
    mBatchIdx: cute.Tensor | None,
    mTable: cute.Tensor | None,
    b: Int32,
    position: Int32,
    capacity: Int32,
) -> tuple[Int32, Int32, Boolean]:
    """(row, slot) of mCache (rows, cache_len, ...) for the token at ``position`` >= 0 of sequence b; if it exists."""
    row, slot = b, position
    exists = Boolean(position < capacity)
    if cutlass.const_expr(mTable is not None):
        slot = position % mCache.shape[1]
        if exists:  # the table has no entry for what lies past its end
            row = mTable[b, position // mCache.shape[1]]
    if cutlass.const_expr(mBatchIdx is not None):
        row = mBatchIdx[b]
    if row < 0 or row >= mCache.shape[0]:
        exists = Boolean(False)
    return row, slot, exists


@cute.jit
def load_vector(mRow: cute.Tensor, index: Int32, size: cutlass.Constexpr = VECTOR) -> cute.Tensor:
    """Elements [index * size, (index + 1) * size) of mRow (dim,) as float32 in registers."""
    rX = cute.make_rmem_tensor(size, mRow.element_type)
    cute.autovec_copy(cute.local_tile(mRow, (size,), (index,)), rX)
    x = cute.make_rmem_tensor(size, Float32)
    x.store(rX.load().to(Float32))
    return x


@cute.jit
def store_vector(x: cute.Tensor, mRow: cute.Tensor, index: Int32):
    """Registers x (8,) float32 to elements 8 * index ... of mRow (dim,), to nearest even; to FP8 saturating."""
    rX = cute.make_rmem_tensor(VECTOR, mRow.element_type)
    rX.store(x.load().to(mRow.element_type))
    cute.autovec_copy(rX, cute.local_tile(mRow, (VECTOR,), (index,)))


@cute.jit
def divide(x: cute.Tensor, factor: Float32):
    for i in cutlass.range_constexpr(VECTOR):
        x[i] = x[i] / factor


@cute.jit
def rotate(
    spec: cutlass.Constexpr,
    x: cute.Tensor,
    mRow: cute.Tensor,
    mCos: cute.Tensor,
    mSin: cute.Tensor,
    vector: Int32,
    position: Int32,
):
    """Rotate x (8,), which holds vector ``vector`` of mRow (dim,), if that is within rotary_dim.

    Where the tables end before ``position`` there is no angle, and the result is NaN.
    """
    vectors = cutlass.const_expr(spec.rotary_dim // VECTOR)
    if vector < vectors:
        if position < mCos.shape[0]:
            mCos_row, mSin_row = mCos[position, None], mSin[position, None]
            if cutlass.const_expr(spec.interleaved):
                cos = load_vector(mCos_row, vector, VECTOR // 2)
                sin = load_vector(mSin_row, vector, VECTOR // 2)
                for i in cutlass.range_constexpr(VECTOR // 2):
                    left, right = x[2 * i], x[2 * i + 1]
                    x[2 * i] = left * cos[i] - right * sin[i]
                    x[2 * i + 1] = left * sin[i] + right * cos[i]
            else:
                angle = vector % (vectors // 2)
                cos, sin = load_vector(mCos_row, angle), load_vector(mSin_row, angle)
                other = load_vector(mRow, (vector + vectors // 2) % vectors)
                sign = Float32(-1.0) if vector < vectors // 2 else Float32(1.0)
                for i in cutlass.range_constexpr(VECTOR):
                    x[i] = x[i] * cos[i] + other[i] * (sign * sin[i])
        else:
            x.fill(math.nan)
