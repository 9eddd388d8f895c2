"""The parts that a few splits of a sequence leave, as one output: a group of lanes a row, several rows a block.

Every thread weighs all splits itself and adds up its own four columns, in the order of the splits: nothing is shared
and nothing waits. With many rows (prompts on long keys) a block a row, as in kernels/combine.py, would mostly start and
end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..decode_spec import FEW_SPLITS, CombineSpec
from . import partial
from .combine import add_part, finish, load_part


class CombineFew:
    """The kernel for one specification; compiled by ``cute.compile(CombineFew(spec), ...)``."""

    def __init__(self, spec: CombineSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mPartO: cute.Tensor,  # (splits, rows, value_dim) float32
        mPartState: cute.Tensor,  # (splits, rows, 2) float32: m and l
        mO: cute.Tensor,  # (batch, query_len, heads, value_dim), written
        mLSE: cute.Tensor,  # (batch, heads, query_len) float32, written
        mSink: cute.Tensor | None,  # (heads,) float32
        scale_log2: Float32,  # what differences of references are multiplied by
        stream,
    ):
        spec = self.spec
        self.kernel(mPartO, mPartState, mO, mLSE, mSink, scale_log2).launch(
            grid=spec.grid(mPartO.shape[1]),
            block=[spec.threads, 1, 1],
            stream=stream,
            use_pdl=spec.overlap,
        )

    @cute.kernel
    def kernel(
        self,
        mPartO: cute.Tensor,
        mPartState: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mSink: cute.Tensor | None,
        scale_log2: Float32,
    ):
        spec = cutlass.const_expr(self.spec)
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * spec.groups + tidx // spec.lanes
        column = tidx % spec.lanes * 4
        splits = mPartO.shape[0]
        if cutlass.const_expr(spec.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        if (index < mPartO.shape[1]) & (column < spec.value_dim):
            # All loads first; those past the last split repeat it, and parts that saw no key hold anything.
            parts = cute.make_rmem_tensor((4, FEW_SPLITS), Float32)
            m = cute.make_rmem_tensor(FEW_SPLITS, Float32)
            total = cute.make_rmem_tensor(FEW_SPLITS, Float32)
            for s in cutlass.range_constexpr(FEW_SPLITS):
                split = cutlass.min(Int32(s), splits - 1)
                load_part(mPartO, split, index, column, parts[None, s])
                m[s], total[s] = mPartState[split, index, 0], mPartState[split, index, 1]
            largest = m[0]
            for s in cutlass.range_constexpr(1, FEW_SPLITS):
                largest = cute.arch.fmax(largest, m[s])
            values = cute.make_rmem_tensor(4, Float32)
            values.fill(0.0)
            row_total = Float32(0.0)
            for s in cutlass.range_constexpr(FEW_SPLITS):
                weight = partial.weight(m[s], largest, scale_log2)
                exists = s < splits
                row_total = cutlass.select_(exists, cute.math.fma(weight, total[s], row_total), row_total)
                add_part(values, weight, parts[None, s], exists & partial.is_live(m[s], total[s]))
            b, query, head = partial.place_of(mO, index)
            sink = mSink[head] if cutlass.const_expr(mSink is not None) else None
            inverse, lse = finish(spec, largest, row_total, scale_log2, sink)
            partial.store_output(mO[b, query, head, None], column, values, inverse, spec.output_exponent)
            if column == 0:
                mLSE[b, head, query] = lse
