"""Q K^T and P V with tiles of a KV cache, 16-bit or FP8; Q stays in registers."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..decode_spec import DecodeSpec
from . import narrow, pages, products, softmax
from .decode_work import Rows
from .layouts import ldmatrix_atom, transposed
from .products import accumulator_rows


@dataclass(frozen=True)
class Operands:
    """One thread's MMA operands; the last mode of tSsK and tOsV is the ring slot. rQ: Q in registers, ready."""

    tiled_mma: cute.TiledMma
    thr_mma: cute.ThrMma
    copy_K: cute.TiledCopy
    copy_V: cute.TiledCopy
    tSsK: cute.Tensor
    tOsV: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    rQ: cute.Tensor


class CacheProducts:
    """How the kernel of one specification multiplies."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        self.mma_dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[spec.mma_dtype]

    def partition(self, base: cute.Tensor, thread: Int32, part_v: Int32) -> Operands:
        """The operands of thread ``thread`` along the rows, with part ``part_v`` of V's columns; rQ is not loaded yet.

        base: shared memory, all rings of K (tile_n, columns, slots), then those of V.
        """
        spec = self.spec
        slots = spec.warps_n * spec.stages
        sK = cute.make_tensor(
            cute.recast_ptr(base.iterator, dtype=self.mma_dtype), pages.ring_layout(spec.key_bytes, spec.tile_n, slots)
        )
        sV = cute.make_tensor(
            cute.recast_ptr(base.iterator + spec.value_rings, dtype=self.mma_dtype),
            pages.ring_layout(spec.value_bytes, spec.tile_n, slots),
        )
        columns = spec.value_bytes // 2
        sVt = transposed(sV, spec.tile_n, columns, slots)
        sVt = cute.local_tile(sVt, (columns // spec.warps_v, spec.tile_n, slots), (part_v, 0, 0))
        tiled_mma = products.make_tiled_mma(self.mma_dtype, spec.warps_m)
        thr_mma = tiled_mma.get_slice(thread)
        copy_K = cute.make_tiled_copy_B(ldmatrix_atom(self.mma_dtype), tiled_mma)
        copy_V = cute.make_tiled_copy_B(ldmatrix_atom(self.mma_dtype, transpose=True), tiled_mma)
        dims = spec.key_bytes // spec.cache_bytes
        return Operands(
            tiled_mma,
            thr_mma,
            copy_K,
            copy_V,
            copy_K.get_slice(thread).partition_S(sK),
            copy_V.get_slice(thread).partition_S(sVt),
            thr_mma.make_fragment_B(thr_mma.partition_B(sK[None, None, 0])),
            thr_mma.make_fragment_B(thr_mma.partition_B(sVt[None, None, 0])),
            cute.make_rmem_tensor(thr_mma.partition_shape_A((spec.tile_m, dims)), self.mma_dtype),
        )

    @cute.jit
    def load_Q(
        self,
        mQ: cute.Tensor,
        thr_mma: cute.ThrMma,
        rows: Rows,
        scale: Float32,
        rQ: cute.Tensor,
        row_factor: cute.Tensor,
    ):
        """This thread's part of the packed rows into MMA operand registers; rows that do not exist are zeros.

        PTX ISA, m16n8k16, A: registers (row lane / 4, + 8) x (columns 2 (lane % 4) and the next, + 8). Beside FP8 keys
        the contraction index is permuted as kernels/narrow.py says: the same registers hold columns 4 (lane % 4) and
        the three after it.

        row_factor: (2,), what makes logits of a row's raw scores, written.
        """
        spec = cutlass.const_expr(self.spec)
        tidx, _, _ = cute.arch.thread_idx()
        lane = tidx % 32
        words = cute.recast_tensor(rQ, Int32)
        steps = cutlass.const_expr(spec.key_bytes // spec.cache_bytes // 16)
        cQ = accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor((spec.tile_m, 8))))
        for r in cutlass.range_constexpr(2):
            row = cQ[r, 0][0]
            exists = row < rows.count
            packed = rows.first + cutlass.select_(exists, row, Int32(0))
            query = packed // rows.group
            head = rows.kv_head * rows.group + packed - query * rows.group
            mQ_row = mQ[rows.batch_row, rows.start + query, head, None]
            for step in cutlass.range_constexpr(steps):
                for half in cutlass.range_constexpr(2):
                    if cutlass.const_expr(spec.fp8):
                        column = step * 16 + lane % 4 * 4 + half * 2
                    else:
                        column = step * 16 + half * 8 + lane % 4 * 2
                    inside = exists
                    if cutlass.const_expr(step * 16 + 16 > spec.head_dim):
                        inside = exists & (column < spec.head_dim)
                    column = cutlass.select_(inside, column, Int32(0))
                    pair = cute.make_tensor(
                        cute.recast_ptr(mQ_row.iterator + cute.assume(column, divby=2), dtype=Int32),
                        cute.make_layout(1),
                    )
                    words[r + 2 * half + 4 * step] = cutlass.select_(inside, pair[0], Int32(0))
            row_factor[r] = scale
            if cutlass.const_expr(spec.fp8 and spec.dtype == "bfloat16"):
                row_factor[r] = scale * self.narrow_Q_row(words, r, steps)
        if cutlass.const_expr(not spec.logits):
            # The row maximum belongs to the largest probability only if the softmax's scale is positive.
            sign = Int32(-0x7FFF8000) if scale < 0.0 else Int32(0)  # both sign bits
            for step in cutlass.range_constexpr(steps):
                for i in cutlass.range_constexpr(4):
                    words[4 * step + i] = words[4 * step + i] ^ sign

    @cute.jit
    def narrow_Q_row(self, words: cute.Tensor, r: cutlass.Constexpr, steps: cutlass.Constexpr) -> Float32:
        """bfloat16 to float16 in place, scaled by a power of two; returns what undoes that."""
        largest = Float32(0.0)
        for i in cutlass.range_constexpr(2 * steps):
            for x in narrow.halves(words[r + 2 * i]):
                largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
        up, down = narrow.row_scale(softmax.quad_max(largest))
        for i in cutlass.range_constexpr(2 * steps):
            low, high = narrow.halves(words[r + 2 * i])
            words[r + 2 * i] = narrow.pack_float16(low * up, high * up)
        return down

    @cute.jit
    def multiply_QK(self, p: Operands, slot: Int32, acc_S: cute.Tensor):
        """acc_S = Q K^T with the tile in ``slot``."""
        acc_S.fill(0.0)
        tSrK_copy = p.copy_K.retile(p.tSrK)
        for k in cutlass.range_constexpr(cute.size(p.tSrK.shape[2])):
            cute.copy(p.copy_K, p.tSsK[None, None, k, slot], tSrK_copy[None, None, k])
            if cutlass.const_expr(self.spec.fp8):
                # Register i of the B operand holds bytes of 16 dims: two registers of float16.
                pairs = cute.recast_tensor(p.tSrK[None, None, k], Int32)
                keys8 = cute.size(pairs) // 2
                for i in cutlass.range_constexpr(2):
                    rK = cute.make_rmem_tensor_like(p.tSrK[None, None, k])
                    words = cute.recast_tensor(rK, Int32)
                    for n in cutlass.range_constexpr(keys8):
                        words[2 * n], words[2 * n + 1] = narrow.widen(pairs[2 * n + i], self.spec.cache_dtype)
                    cute.gemm(p.tiled_mma, acc_S, p.rQ[None, None, 2 * k + i], rK, acc_S)
            else:
                cute.gemm(p.tiled_mma, acc_S, p.rQ[None, None, k], p.tSrK[None, None, k], acc_S)

    @cute.jit
    def multiply_PV(self, p: Operands, slot: Int32, rP: cute.Tensor, acc_O: cute.Tensor):
        """acc_O += P V with the tile in ``slot``; P in registers, in accumulator order.

        Columns of an FP8 cache's acc_O: see ``column``.
        """
        tOrP = products.as_operand_A(rP)
        tOrV_copy = p.copy_V.retile(p.tOrV)
        for k in cutlass.range_constexpr(cute.size(p.tOrV.shape[2])):
            cute.copy(p.copy_V, p.tOsV[None, None, k, slot], tOrV_copy[None, None, k])
            if cutlass.const_expr(self.spec.fp8):
                pairs = cute.recast_tensor(p.tOrV[None, None, k], Int32)
                rV = cute.make_rmem_tensor(((2, 2), cute.size(pairs)), self.mma_dtype)
                words = cute.recast_tensor(rV, Int32)
                for n in cutlass.range_constexpr(cute.size(pairs) // 2):
                    for i in cutlass.range_constexpr(2):  # keys 2 (lane % 4) and the next, + 8
                        even, odd = narrow.widen(narrow.pair_keys(pairs[2 * n + i]), self.spec.cache_dtype)
                        words[4 * n + i], words[4 * n + 2 + i] = even, odd
                cute.gemm(p.tiled_mma, acc_O, tOrP[None, None, k], rV, acc_O)
            else:
                cute.gemm(p.tiled_mma, acc_O, tOrP[None, None, k], p.tOrV[None, None, k], acc_O)


def column_of(spec: DecodeSpec, c: int, nominal: Int32, lane: Int32) -> Int32:
    """The column of V that element ``c`` of a thread's row of acc_O belongs to; ``nominal``: the MMA's.

    With FP8, accumulators 2 n and 2 n + 1 hold the even and the odd columns of 16 (kernels/narrow.py).
    """
    if not spec.fp8:
        return nominal
    n_tile, e = c // 2, c % 2
    return n_tile // 2 * 16 + lane % 4 * 4 + 2 * e + n_tile % 2
