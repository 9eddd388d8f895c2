"""The parts that many splits of a sequence leave, as one output: a block a row.

The weights of all splits first (a warp's lanes read a reference each), then groups of lanes add the splits' rows, group
g those of number g, g + groups, ..., and the groups' sums are added in order: the same bits for the same splits,
whatever else is computed.

The launch may overlap the end of the decode kernel, and that of the next kernel the end of this one (programmatic
dependent launch, PTX ISA griddepcontrol): ``griddepcontrol.wait`` is where what came before is complete.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..decode_spec import MAX_SPLITS, CombineSpec
from . import partial, softmax

EARLY = 8  # rows that a thread loads ahead of their weights: with head_dim 128 those of 32 splits


class Combine:
    """The kernel for one specification; compiled by ``cute.compile(Combine(spec), ...)``."""

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
            smem=spec.shared_bytes,
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
        lanes, groups = spec.lanes, spec.groups
        tidx, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        b, query, head = partial.place_of(mO, index)
        splits = mPartO.shape[0]

        smem = cutlass.memory.SmemAllocator()
        sWeight = smem.allocate_tensor(Float32, cute.make_layout(MAX_SPLITS), byte_alignment=16)
        sO = smem.allocate_tensor(
            Float32, cute.make_layout((groups, lanes * 4), stride=(lanes * 4, 1)), byte_alignment=16
        )
        if cutlass.const_expr(spec.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        # The rows that this thread adds up are loaded before their weights are known; those of parts that saw no key
        # hold anything.
        group = tidx // lanes
        column = cutlass.min(tidx % lanes * 4, spec.value_dim - 4)
        early = cute.make_rmem_tensor((4, EARLY), Float32)
        for i in cutlass.range_constexpr(EARLY):
            load_part(mPartO, cutlass.min(group + i * groups, splits - 1), index, column, early[None, i])

        # Every warp finds the row's reference and sum, each lane from some of the splits.
        largest = -Float32.inf
        for s in cutlass.range(tidx % 32, splits, 32, unroll=1):
            largest = cute.arch.fmax(largest, mPartState[s, index, 0])
        largest = warp_max(largest)
        total = Float32(0.0)
        for s in cutlass.range(tidx % 32, splits, 32, unroll=1):
            m, part = mPartState[s, index, 0], mPartState[s, index, 1]
            weight = partial.weight(m, largest, scale_log2)
            total = cute.math.fma(weight, part, total)
            # A weight of -1 says that the part saw no key: what its row of O holds is not even to be read.
            if tidx < 32:
                sWeight[s] = cutlass.select_(partial.is_live(m, part), weight, Float32(-1.0))
        total = warp_sum(total)
        cute.arch.sync_threads()

        values = cute.make_rmem_tensor(4, Float32)
        values.fill(0.0)
        for i in cutlass.range_constexpr(EARLY):
            s = group + i * groups
            add_part(values, sWeight[cutlass.min(s, splits - 1)], early[None, i], s < splits)
        for s in cutlass.range(group + EARLY * groups, splits, groups, unroll=1):
            part = cute.make_rmem_tensor(4, Float32)
            load_part(mPartO, s, index, column, part)
            add_part(values, sWeight[s], part, Boolean(True))
        for e in cutlass.range_constexpr(4):
            sO[group, tidx % lanes * 4 + e] = values[e]
        cute.arch.sync_threads()

        if tidx * 4 < spec.value_dim:
            for e in cutlass.range_constexpr(4):
                values[e] = sO[0, tidx * 4 + e]
            for g in cutlass.range_constexpr(1, groups):
                for e in cutlass.range_constexpr(4):
                    values[e] = values[e] + sO[g, tidx * 4 + e]
            sink = mSink[head] if cutlass.const_expr(mSink is not None) else None
            inverse, lse = finish(spec, largest, total, scale_log2, sink)
            partial.store_output(mO[b, query, head, None], tidx * 4, values, inverse, spec.output_exponent)
            if tidx == 0:
                mLSE[b, head, query] = lse


@cute.jit
def load_part(mPartO: cute.Tensor, split: Int32, index: Int32, column: Int32, part: cute.Tensor):
    """Four columns of a split's row."""
    row = mPartO[split, index, None]
    source = cute.make_tensor(row.iterator + cute.assume(column, divby=4), cute.make_layout(4))
    cute.autovec_copy(source, part)


@cute.jit
def add_part(values: cute.Tensor, weight: Float32, part: cute.Tensor, exists: Boolean):
    """values += weight * part, if the split exists and saw a key."""
    counts = exists & (weight >= 0.0)
    for e in cutlass.range_constexpr(4):
        values[e] = cutlass.select_(counts, cute.math.fma(weight, part[e], values[e]), values[e])


def finish(
    spec: CombineSpec, m: Float32, total: Float32, scale_log2: Float32, sink: Float32 | None
) -> tuple[Float32, Float32]:
    """(inverse, lse) of a row, as the kernel that left its parts would have finished it."""
    if spec.logits:
        row = softmax.end_row(m, total, sink)
        return cutlass.select_(row.attended, row.inverse, Float32(0.0)), softmax.logsumexp(row)
    return partial.finish_row(m, total, scale_log2, spec.sum_exponent, sink)


def warp_max(x: Float32) -> Float32:
    """Maximum over a warp; NaN is ignored."""
    for offset in (16, 8, 4, 2, 1):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def warp_sum(x: Float32) -> Float32:
    """Sum over a warp, the same on every lane."""
    for offset in (16, 8, 4, 2, 1):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x
