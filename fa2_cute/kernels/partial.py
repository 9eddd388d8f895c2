"""Parts of a softmax that saw different keys: how they are weighed against each other and how a row is finished.

A part of a row is (m, l, O): a reference m, the sum l of the probabilities relative to it, and the weighted values O,
not divided. m and l are kept apart, not as a logsumexp: m c + log2(l) in float32 would have lost the fraction where
scores are large. Two powers of two stand beside them (decode_spec.py): the true sum is l 2^sum_exponent, and the output
is O / l 2^output_exponent.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .softmax import LN_2, LOG2_E


def weight(m: Float32, largest: Float32, scale_log2: Float32) -> Float32:
    """What a part with reference ``m`` is multiplied by, beside one with the ``largest`` reference.

    0 without a reference: such a part has O = 0 and l = 0, or NaN, which stays.
    """
    seen = m != -Float32.inf
    # A logit past float32 is +inf, and inf - inf is not to be asked.
    below = cutlass.select_(m == largest, Float32(0.0), m - largest)
    return cutlass.select_(seen, cute.math.exp2(below * scale_log2, fastmath=True), Float32(0.0))


def is_live(m: Float32, total: Float32) -> Boolean:
    """Whether a part saw a key. One that saw only NaN has no reference, but its sum is NaN and not 0."""
    return (m != -Float32.inf) | (total != 0.0)


@cute.jit
def finish_row(
    m: Float32,
    total: Float32,
    scale_log2: Float32,
    sum_exponent: cutlass.Constexpr,
    sink: Float32 | None,
) -> tuple[Float32, Float32]:
    """(inverse, lse): what a row's O is multiplied by, before 2^output_exponent, and its natural logsumexp.

    sink: one more logit (natural units) without a value. A row without a key gives 0, and -inf or the sink.
    """
    seen = is_live(m, total)
    lse = m * scale_log2 + (cute.math.log2(total, fastmath=True) + Float32(sum_exponent))  # base 2
    inverse = cute.arch.rcp_approx(total)
    unseen = -Float32.inf
    if cutlass.const_expr(sink is not None):
        unseen = sink
        sink_log2 = sink * LOG2_E
        top = cute.arch.fmax(lse, sink_log2)
        both = cute.math.exp2(lse - top, fastmath=True) + cute.math.exp2(sink_log2 - top, fastmath=True)
        with_sink = top + cute.math.log2(both, fastmath=True)
        inverse = inverse * cute.math.exp2(lse - with_sink, fastmath=True)
        lse = with_sink
    return cutlass.select_(seen, inverse, Float32(0.0)), cutlass.select_(seen, lse * LN_2, unseen)


def place_of(mO: cute.Tensor, index: Int32) -> tuple[Int32, Int32, Int32]:
    """(batch, query, head) of row ``index`` of mO (batch, query_len, heads, value_dim)."""
    query_row = index // mO.shape[2]
    head = index - query_row * mO.shape[2]
    b = query_row // mO.shape[1]
    return b, query_row - b * mO.shape[1], head


@cute.jit
def store_output(
    mO_row: cute.Tensor,  # (value_dim,)
    column: Int32,
    values: cute.Tensor,  # (4,) float32
    inverse: Float32,
    output_exponent: cutlass.Constexpr,
):
    """Four columns of an output row, divided and rounded; a row without a key gives zeros."""
    rounded = cute.make_rmem_tensor(4, mO_row.element_type)
    for e in cutlass.range_constexpr(4):
        # Two factors: their product could be below the normal numbers.
        value = values[e] * inverse * Float32(2.0**output_exponent)
        rounded[e] = mO_row.element_type(value)
    out = cute.make_tensor(mO_row.iterator + cute.assume(column, divby=4), cute.make_layout(4))
    cute.autovec_copy(rounded, out)
