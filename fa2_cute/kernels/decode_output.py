"""The end of a block of the decode kernel: its warps' parts merged, and written as output or as one split's part."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..decode_spec import DecodeSpec
from . import partial, softmax
from .cache_products import column_of
from .decode_work import Rows
from .products import accumulator_rows


@dataclass(frozen=True)
class Target:
    """Where results go.

    mO, mLSE                of the call, where splits is 1; mSink: its sinks, or None
    mPartO, mPartState      what split ``split`` of several leaves, see kernels/partial.py
    """

    mO: cute.Tensor
    mLSE: cute.Tensor
    mSink: cute.Tensor | None
    mPartO: cute.Tensor
    mPartState: cute.Tensor
    splits: Int32
    split: Int32


class DecodeOutput:
    """How the kernel of one specification ends."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec

    def parts(self, base: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """sO (warps_n, tile_m, value_width) float32 and sState (warps_n, tile_m, 2), in the rings' memory."""
        spec = self.spec
        pitch = spec.output_pitch
        floats = cute.recast_ptr(base.iterator, dtype=Float32)
        rows = spec.warps_n * spec.tile_m
        sO = cute.make_tensor(
            floats,
            cute.make_layout((spec.warps_n, spec.tile_m, spec.value_width), stride=(spec.tile_m * pitch, pitch, 1)),
        )
        sState = cute.make_tensor(
            floats + rows * pitch,
            cute.make_layout((spec.warps_n, spec.tile_m, 2), stride=(spec.tile_m * 2, 2, 1)),
        )
        return sO, sState

    @cute.jit
    def share(
        self,
        acc_O: cute.Tensor,
        state: softmax.SoftmaxState,
        thr_mma: cute.ThrMma,
        group: Int32,
        part_v: Int32,
        sO: cute.Tensor,
        sState: cute.Tensor,
    ):
        """Each warp's part of its rows to shared memory."""
        spec = cutlass.const_expr(self.spec)
        tidx, _, _ = cute.arch.thread_idx()
        rO = accumulator_rows(acc_O)
        columns = spec.value_width // spec.warps_v
        cO = accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor((spec.tile_m, columns))))
        for r in cutlass.range_constexpr(2):
            row = cO[r, 0][0]
            total = softmax.quad_sum(state.row_sum[r])
            if (tidx % 4 == 0) & (part_v == 0):  # one of the four lanes of a row, of one warp
                sState[group, row, 0] = state.row_ref[r]
                sState[group, row, 1] = total
            for c in cutlass.range_constexpr(cute.size(rO.shape[1])):
                sO[group, row, part_v * columns + column_of(spec, c, cO[r, c][1], tidx)] = rO[r, c]

    @cute.jit
    def merge(
        self,
        target: Target,
        rows: Rows,
        scale_log2: Float32,
        sO: cute.Tensor,
        sState: cute.Tensor,
    ):
        """The groups' parts as one, four columns a thread: to the output, or to the workspace as a split's part."""
        spec = cutlass.const_expr(self.spec)
        tidx, _, _ = cute.arch.thread_idx()
        vectors = spec.value_dim // 4
        for i in cutlass.range_constexpr((spec.tile_m * vectors + spec.threads - 1) // spec.threads):
            vector = tidx + i * spec.threads
            row = vector // vectors
            column = (vector - row * vectors) * 4
            if row < rows.count:
                largest = -Float32.inf
                for g in cutlass.range_constexpr(spec.warps_n):
                    largest = cute.arch.fmax(largest, sState[g, row, 0])
                total = Float32(0.0)
                values = cute.make_rmem_tensor(4, Float32)
                values.fill(0.0)
                for g in cutlass.range_constexpr(spec.warps_n):
                    weight = partial.weight(sState[g, row, 0], largest, scale_log2)
                    total = cute.math.fma(weight, sState[g, row, 1], total)
                    for e in cutlass.range_constexpr(4):
                        values[e] = cute.math.fma(weight, sO[g, row, column + e], values[e])
                self.store(target, rows, scale_log2, row, column, largest, total, values)

    @cute.jit
    def store_nothing(
        self,
        target: Target,
        rows: Rows,
    ):
        """What a block without keys leaves: zeros, or the word that its part saw nothing (its O is not read then)."""
        spec = cutlass.const_expr(self.spec)
        tidx, _, _ = cute.arch.thread_idx()
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        vectors = spec.value_dim // 4
        columns = vectors if target.splits == 1 else Int32(1)
        for vector in cutlass.range(tidx, rows.count * columns, spec.threads, unroll=1):
            row = vector // columns
            column = (vector - row * columns) * 4
            self.store(target, rows, Float32(1.0), row, column, -Float32.inf, Float32(0.0), zeros)

    @cute.jit
    def store(
        self,
        target: Target,
        rows: Rows,
        scale_log2: Float32,
        row: Int32,
        column: Int32,
        m: Float32,
        total: Float32,
        values: cute.Tensor,
    ):
        """Four columns of a block's row, finished or as a part; with the first ones, the row's numbers."""
        spec = cutlass.const_expr(self.spec)
        packed = rows.first + row
        query = packed // rows.group
        head = rows.kv_head * rows.group + packed - query * rows.group
        query = query + rows.start
        if target.splits == 1:
            sink = target.mSink[head] if cutlass.const_expr(target.mSink is not None) else None
            inverse, lse = partial.finish_row(m, total, scale_log2, spec.sum_exponent, sink)
            partial.store_output(
                target.mO[rows.batch_row, query, head, None], column, values, inverse, spec.output_exponent
            )
            if column == 0:
                target.mLSE[rows.batch_row, head, query] = lse
        else:
            index = (rows.batch_row * target.mO.shape[1] + query) * target.mO.shape[2] + head
            if partial.is_live(m, total):
                mPart_row = target.mPartO[target.split, index, None]
                part = cute.make_tensor(mPart_row.iterator + cute.assume(column, divby=4), cute.make_layout(4))
                cute.autovec_copy(values, part)
            if column == 0:
                target.mPartState[target.split, index, 0] = m
                target.mPartState[target.split, index, 1] = total
