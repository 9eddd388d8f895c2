"""Online softmax in base 2, one state a query row (FlashAttention-2, Dao 2023, section 3.1; Milakov & Gimelshein 2018).

A row's probabilities are kept relative to a reference ``m`` that need not be the true maximum: any reference gives the
same quotient, as long as nothing overflows and the largest probability does not underflow. Two ways to choose it:

trailing    m follows the row maximum, but is raised only when a score exceeds it by more than a slack in powers of
            two: ``follow_maximum``. That saves the reduction over the four lanes of a row and the rescaling of O in
            almost every tile. With a slack of 0 m is the maximum, and a row's largest probability exactly 1.
first       m is the maximum of the row's first keys, and stays: ``begin`` or ``follow_maximum`` in the tiles that hold
            them, then ``settle``. With a slack of 0 that is the maximum of all those tiles, with an infinite one that
            of the first in which the row sees a key. Whether that was right ``is_sound`` tells at the end.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from .products import accumulator_rows

LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634

# P may grow to 2^8 before O is rescaled: far from fp16's 65504, and sums of 2^8 over any length stay in fp32.
RESCALE_SLACK = 8.0

# A lane's share of a row sum: four of them stay below 2^125, whose reciprocal rcp.approx.ftz does not flush to zero.
LARGEST_SUM = 2.0**123
# The same where sums are weighed against a sink or against other parts: with another reference 2^126 times higher a
# weight is flushed to 0, and must not take more than 2^-26 of the row with it.
LARGEST_WEIGHED_SUM = 2.0**98

# exp2(x * c - m * c) in one FMA carries the rounding error of m * c, 2^-24 |m * c|, in the exponent. It is common to
# the row and cancels in the quotient, but beyond this bound it could pass fp16's range; such rows take (x - m) * c.
FUSED_LIMIT = 2.0**26


def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that hold one row of an MMA accumulator."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that hold one row of an MMA accumulator."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@dataclass(frozen=True)
class SoftmaxState:
    """The running state of one thread's rows, in registers; each (rows,) float32.

    row_ref       reference maximum m of the raw scores, the same on the row's four lanes; -inf: no key seen yet
    row_limit     raw score above which follow_maximum looks at m again: m + slack / c, or -inf: always
    row_offset    what is to be subtracted from x * c: m * c, but after follow_maximum 0 where m is -inf or where x
                  comes as x - m (FUSED_LIMIT)
    row_sum       this lane's share of the sum of exp2((x - m) * c)
    row_top       at the end: m as a logit in natural units, which is also what a part of several leaves
    """

    row_ref: cute.Tensor
    row_limit: cute.Tensor
    row_offset: cute.Tensor
    row_sum: cute.Tensor
    row_top: cute.Tensor


def allocate(rows: int) -> SoftmaxState:
    """Registers for ``rows`` rows; ``reset`` makes them valid."""
    return SoftmaxState(*(cute.make_rmem_tensor(rows, Float32) for _ in range(5)))


@cute.jit
def reset(state: SoftmaxState):
    """No row has a reference."""
    state.row_ref.fill(-Float32.inf)
    state.row_limit.fill(-Float32.inf)
    state.row_offset.fill(0.0)


@cute.jit
def clear(state: SoftmaxState, acc_O: cute.Tensor):
    """Begin the sums and the output, with whatever references there are."""
    state.row_sum.fill(0.0)
    acc_O.fill(0.0)


@cute.jit
def begin(state: SoftmaxState, acc_S: cute.Tensor, scale_log2: Float32, slack: Float32):
    """Begin the sums, each row's maximum in acc_S its reference: none where the row has only -inf.

    Every lane of the warp must call it. slack: how far ``follow_maximum`` is to let later scores pass it.
    """
    rS = accumulator_rows(acc_S)
    for r in cutlass.range_constexpr(cute.size(rS.shape[0])):
        ref = quad_max(_max_of(rS, r))
        state.row_ref[r] = ref
        state.row_limit[r] = _limit(ref, scale_log2, slack)
        state.row_offset[r] = cutlass.select_(ref != -Float32.inf, ref * scale_log2, Float32(0.0))
        state.row_sum[r] = Float32(0.0)


@cute.jit
def follow_maximum(state: SoftmaxState, acc_S: cute.Tensor, acc_O: cute.Tensor, scale_log2: Float32, slack: Float32):
    """Raise the reference of the rows whose scores pass it by more than ``slack`` powers of two, and rescale O and the
    sums to it. An infinite slack gives a reference to rows that have none.

    Every lane of the warp must call it. acc_S: raw scores (masked ones -inf); where a row is beyond FUSED_LIMIT they
    become x - m. acc_O: the output accumulator. scale_log2: c, positive.
    """
    rS = accumulator_rows(acc_S)
    rows = cute.size(rS.shape[0])
    row_max = cute.make_rmem_tensor(rows, Float32)
    exceeded = Boolean(False)
    for r in cutlass.range_constexpr(rows):
        row_max[r] = _max_of(rS, r)
        exceeded = exceeded | (row_max[r] > state.row_limit[r])
    if cute.arch.vote_any_sync(exceeded):
        _raise_reference(state, row_max, acc_S, acc_O, scale_log2, slack)


def _is_fused(offset: Float32) -> Boolean:
    """Whether scores of a row may be scaled and taken relative to ``offset``, m * c, in one FMA; not without a
    reference."""
    return cute.arch.fmax(offset, -offset) < FUSED_LIMIT


def _limit(ref: Float32, scale_log2: Float32, slack: Float32) -> Float32:
    """The raw score above which ``follow_maximum`` looks at the reference ``ref`` again."""
    limit = ref + cute.arch.rcp_approx(scale_log2) * slack
    return cutlass.select_(_is_fused(ref * scale_log2), limit, -Float32.inf)


def _offset_and_shift(ref: Float32, scale_log2: Float32) -> tuple[Float32, Float32]:
    """What to subtract after and what before scaling a score relative to ``ref``; nothing without a reference."""
    fused = _is_fused(ref * scale_log2)
    zero = Float32(0.0)
    unfused = (ref != -Float32.inf) & ~fused
    return cutlass.select_(fused, ref * scale_log2, zero), cutlass.select_(unfused, ref, zero)


@cute.jit
def settle(state: SoftmaxState, scale_log2: Float32):
    """References change no more: from here on row_offset is m * c in every row, which ``exponentiate``, ``is_sound``
    and ``conclude_settled`` are content with. So row_ref is let go, a register a row through the loop that matters.

    Probabilities of rows beyond FUSED_LIMIT, and of rows without a reference, come out wrong and unsound.
    """
    for r in cutlass.range_constexpr(cute.size(state.row_ref)):
        state.row_offset[r] = state.row_ref[r] * scale_log2


@cute.jit
def conclude_settled(state: SoftmaxState):
    """After the last step with settled references: row_top, for ``finish``."""
    for r in cutlass.range_constexpr(cute.size(state.row_top)):
        state.row_top[r] = state.row_offset[r] * LN_2


@cute.jit
def conclude_followed(state: SoftmaxState, scale_log2: Float32):
    """After the last step that followed the maximum: row_top, for ``finish``."""
    scale = scale_log2 * LN_2
    for r in cutlass.range_constexpr(cute.size(state.row_top)):
        state.row_top[r] = state.row_ref[r] * scale  # in base 2 the lowest finite logit would become -inf


@cute.jit
def exponentiate(state: SoftmaxState, acc_S: cute.Tensor, scale_log2: Float32):
    """Turn scores into probabilities in place, exp2(score * c - row_offset), and add them to the row sums."""
    rS = accumulator_rows(acc_S)
    for r in cutlass.range_constexpr(cute.size(rS.shape[0])):
        state.row_sum[r] = state.row_sum[r] + _exponentiate_row(rS, r, scale_log2, -state.row_offset[r])


def _exponentiate_row(rS: cute.Tensor, r: int, scale_log2: Float32, addend: Float32) -> Float32:
    """The row's probabilities, in place, and their sum."""
    total = None
    for c in range(cute.size(rS.shape[1])):
        probability = cute.math.exp2(cute.math.fma(rS[r, c], scale_log2, addend), fastmath=True)
        rS[r, c] = probability
        total = probability if total is None else total + probability
    return total


@cute.jit
def _raise_reference(
    state: SoftmaxState,
    row_max: cute.Tensor,
    acc_S: cute.Tensor,
    acc_O: cute.Tensor,
    scale_log2: Float32,
    slack: Float32,
):
    cute.arch.sync_warp()  # keeps the caller's `if` a branch: as a select all of this would be computed every time
    rows = cute.size(row_max)
    factor = cute.make_rmem_tensor(rows, Float32)
    begun = Boolean(False)
    for r in cutlass.range_constexpr(rows):
        old = state.row_ref[r]
        new = cute.arch.fmax(old, quad_max(row_max[r]))
        offset, _ = _offset_and_shift(new, scale_log2)
        # A row that had seen nothing has O = 0 and sum = 0, which any finite factor keeps.
        seen = new != -Float32.inf
        factor[r] = cute.math.exp2((old - new) * scale_log2, fastmath=True) if seen else Float32(1.0)
        state.row_ref[r] = new
        state.row_limit[r] = _limit(new, scale_log2, slack)
        state.row_offset[r] = offset
        state.row_sum[r] = state.row_sum[r] * factor[r]
        begun = begun | (old != -Float32.inf)
    if cute.arch.vote_any_sync(begun):  # not in a block's first tile, where O is still zero
        cute.arch.sync_warp()  # keeps this a branch
        rO = accumulator_rows(acc_O)
        for r in cutlass.range_constexpr(rows):
            row_factor = factor[r]
            for c in cutlass.range_constexpr(cute.size(rO.shape[1])):
                rO[r, c] = rO[r, c] * row_factor
    _shift(state, acc_S, scale_log2)


@cute.jit
def _shift(state: SoftmaxState, acc_S: cute.Tensor, scale_log2: Float32):
    """Turn the scores of rows beyond FUSED_LIMIT into x - m; there almost never are any."""
    rS = accumulator_rows(acc_S)
    rows = cute.size(rS.shape[0])
    shifted = Boolean(False)
    for r in cutlass.range_constexpr(rows):
        shifted = shifted | ~_is_fused(state.row_ref[r] * scale_log2)
    if cute.arch.vote_any_sync(shifted):
        cute.arch.sync_warp()  # keeps this a branch
        for r in cutlass.range_constexpr(rows):
            _, shift = _offset_and_shift(state.row_ref[r], scale_log2)
            for c in cutlass.range_constexpr(cute.size(rS.shape[1])):
                rS[r, c] = rS[r, c] - shift


@cute.jit
def is_sound(
    state: SoftmaxState, acc_O: cute.Tensor, weighed: cutlass.Constexpr = False, parts: cutlass.Constexpr = 1
) -> Boolean:
    """Whether references that were taken once, and settled, have served this thread's rows to the end.

    They have not where a sum or an output is too large or NaN, in rows beyond FUSED_LIMIT, whose scores must come as
    x - m, and in rows that had only scores of -inf to take one from.

    weighed: the sums will be weighed against others that have references of their own, a sink's or those of parts.
    parts: up to so many such outputs must not be too large together.
    """
    largest = cutlass.const_expr(LARGEST_WEIGHED_SUM if weighed else LARGEST_SUM)
    rO = accumulator_rows(acc_O)
    sound = Boolean(True)
    for r in cutlass.range_constexpr(cute.size(rO.shape[0])):
        zero = Float32(0.0)
        for c in cutlass.range_constexpr(cute.size(rO.shape[1])):
            value = rO[r, c] if cutlass.const_expr(parts == 1) else rO[r, c] * Float32(parts)
            zero = cute.math.fma(value, Float32(0.0), zero)  # NaN if any is not finite
        fused = _is_fused(state.row_offset[r])
        sound = sound & (zero == 0.0) & (state.row_sum[r] < largest) & fused
    return sound


@cute.jit
def finish(state: SoftmaxState, acc_O: cute.Tensor, sink: Float32 | None) -> cute.Tensor:
    """Divide O by the row sums; return each row's natural logsumexp (rows,), -inf where no key was seen. To be called
    once references are concluded.

    sink: one more logit of every row (natural units) that has no value; or None.
    """
    rO = accumulator_rows(acc_O)
    rows = cute.size(rO.shape[0])
    row_lse = cute.make_rmem_tensor(rows, Float32)
    inverse = cute.make_rmem_tensor(rows, Float32)  # negative: the row has attended to nothing
    idle = Boolean(False)
    for r in cutlass.range_constexpr(rows):
        row = end_row(state.row_top[r], quad_sum(state.row_sum[r]), sink)
        inverse[r] = row.inverse
        idle = idle | ~row.attended
        row_lse[r] = logsumexp(row)
    for r in cutlass.range_constexpr(rows):
        for c in cutlass.range_constexpr(cute.size(rO.shape[1])):
            rO[r, c] = rO[r, c] * inverse[r]
    if cute.arch.vote_any_sync(idle):
        cute.arch.sync_warp()  # keeps this a branch
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range_constexpr(cute.size(rO.shape[1])):
                rO[r, c] = cutlass.select_(inverse[r] < 0.0, Float32(0.0), rO[r, c])
    return row_lse


@dataclass(frozen=True)
class RowEnd:
    """A row without another key to come.

    attended    whether it has seen a key; seen: or has a sink
    inverse     what its O is multiplied by; negative if it has seen no key
    top, total  the largest of m, as a logit, and the sink, and the sum relative to that
    """

    attended: Boolean
    seen: Boolean
    inverse: Float32
    top: Float32
    total: Float32


@cute.jit
def end_row(top: Float32, total: Float32, sink: Float32 | None) -> RowEnd:
    """The end of a row of which ``total`` is the sum relative to ``top``, m as a logit."""
    # A row of NaN scores alone leaves m at -inf, but its sum is NaN and not zero.
    attended = (top != -Float32.inf) | (total != 0.0)
    seen = attended
    factor = Float32(1.0)
    if cutlass.const_expr(sink is not None):
        old, top = top, cute.arch.fmax(top, sink)
        shift = top if top != -Float32.inf else Float32(0.0)
        # m may be a logit of +inf, where the scale is huge: then it is the top, and inf - inf is not to be asked.
        factor = cute.math.exp2(cutlass.select_(old == top, Float32(0.0), old - shift) * LOG2_E, fastmath=True)
        total = total * factor + cute.math.exp2((sink - shift) * LOG2_E, fastmath=True)
        seen = seen | (sink != -Float32.inf)
    inverse = cute.arch.rcp_approx(total) * factor if attended else Float32(-1.0)
    return RowEnd(attended, seen, inverse, top, total)


@cute.jit
def logsumexp(row: RowEnd) -> Float32:
    """Natural, the sink included."""
    lse = row.top + cute.math.log2(row.total, fastmath=True) * LN_2
    return lse if row.seen else -Float32.inf


def _max_of(rS: cute.Tensor, r: int) -> Float32:
    best = rS[r, 0]
    for c in range(1, cute.size(rS.shape[1])):
        best = cute.arch.fmax(best, rS[r, c])
    return best
