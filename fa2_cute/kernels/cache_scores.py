"""What becomes of a tile's scores: logits, the mask, probabilities."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..decode_spec import P_EXPONENT, SCALED_SUM_EXPONENT, DecodeSpec
from . import scores, softmax
from .cache_ring import of_key
from .decode_work import Keys, Rows
from .products import accumulator_rows
from .softmax import LN_2


class CacheScores:
    """How the kernel of one specification treats them. Accumulators are two rows of a thread (m16n8)."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec

    @cute.jit
    def load_slopes(self, mSlopes: cute.Tensor | None, thr_mma: cute.ThrMma, rows: Rows) -> cute.Tensor:
        """(2,): ALiBi's of this thread's rows."""
        slopes = cute.make_rmem_tensor(2, Float32)
        slopes.fill(0.0)
        if cutlass.const_expr(mSlopes is not None):
            cQ = accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor((self.spec.tile_m, 8))))
            for r in cutlass.range_constexpr(2):
                packed = rows.first + cutlass.min(cQ[r, 0][0], rows.count - 1)
                slopes[r] = mSlopes[rows.b, rows.kv_head * rows.group + packed % rows.group]
        return slopes

    @cute.jit
    def modify(
        self,
        acc_S: cute.Tensor,
        thr_mma: cute.ThrMma,
        rows: Rows,
        keys: Keys,
        tile: Int32,
        row_factor: cute.Tensor,
        slopes: cute.Tensor,
        softcap: Float32 | None,
        k_scale: Float32 | None,
        v_scale: Float32 | None,
    ):
        """Raw scores to logits (natural units), where the softmax takes those; plus the logarithm of V's scale."""
        spec = cutlass.const_expr(self.spec)
        if cutlass.const_expr(spec.logits):
            rS = accumulator_rows(acc_S)
            cS = accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n))))
            for c in cutlass.range_constexpr(cute.size(rS.shape[1])):
                key = cS[0, c][1]
                factor = of_key(spec, k_scale, key) if cutlass.const_expr(k_scale is not None) else Float32(1.0)
                log_scale = Float32(0.0)
                if cutlass.const_expr(v_scale is not None):
                    log_scale = cute.math.log2(of_key(spec, v_scale, key), fastmath=True) * LN_2
                for r in cutlass.range_constexpr(2):
                    x = rS[r, c] * row_factor[r]
                    if cutlass.const_expr(k_scale is not None):
                        x = rS[r, c] * (row_factor[r] * factor)
                    if cutlass.const_expr(spec.softcap):
                        x = scores.tanh(x / softcap) * softcap
                    if cutlass.const_expr(spec.alibi):
                        query = (rows.first + cS[r, c][0]) // rows.group
                        distance = query + keys.offset - (tile * spec.tile_n + key)
                        distance = cutlass.max(distance, -distance)
                        x = cute.math.fma(Float32(distance), -slopes[r], x)
                    rS[r, c] = x + log_scale if cutlass.const_expr(v_scale is not None) else x

    @cute.jit
    def mask(
        self,
        acc_S: cute.Tensor,
        thr_mma: cute.ThrMma,
        rows: Rows,
        keys: Keys,
        tile: Int32,
        exists: Int32,
        left: Int32,
        right: Int32,
    ):
        """-inf for keys that do not exist or that a row must not see."""
        spec = cutlass.const_expr(self.spec)
        rS = accumulator_rows(acc_S)
        cS = accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n))))
        for r in cutlass.range_constexpr(2):
            visible = exists
            if cutlass.const_expr(spec.row_mask):
                position = (rows.first + cS[r, 0][0]) // rows.group + keys.offset - tile * spec.tile_n
                visible = exists & bits_between(position - left, position + right)
            for c in cutlass.range_constexpr(cute.size(rS.shape[1])):
                rS[r, c] = cutlass.select_(((visible >> cS[r, c][1]) & 1) != 0, rS[r, c], -Float32.inf)

    @cute.jit
    def exponentiate(
        self,
        state: softmax.SoftmaxState,
        acc_S: cute.Tensor,
        thr_mma: cute.ThrMma,
        scale_log2: Float32,
        v_scale: Float32 | None,
    ):
        """Scores to probabilities in place, and the row sums; both times powers of two, see decode_spec.py."""
        spec = cutlass.const_expr(self.spec)
        if cutlass.const_expr(spec.mma_dtype == "bfloat16"):
            softmax.exponentiate(state, acc_S, scale_log2)
        else:
            rS = accumulator_rows(acc_S)
            cS = accumulator_rows(thr_mma.partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n))))
            total = cute.make_rmem_tensor(2, Float32)
            total.fill(0.0)
            for c in cutlass.range_constexpr(cute.size(rS.shape[1])):
                inverse = Float32(1.0)
                if cutlass.const_expr(v_scale is not None):
                    inverse = cute.arch.rcp_approx(of_key(spec, v_scale, cS[0, c][1])) * 2.0**SCALED_SUM_EXPONENT
                for r in cutlass.range_constexpr(2):
                    # The exponent is added after the offset: beside a large offset it would be rounded away.
                    power = cute.math.fma(rS[r, c], scale_log2, -state.row_offset[r]) + Float32(P_EXPONENT)
                    rS[r, c] = cute.math.exp2(power, fastmath=True)
                    if cutlass.const_expr(v_scale is not None):
                        total[r] = cute.math.fma(rS[r, c], inverse, total[r])
                    else:
                        total[r] = total[r] + rS[r, c]
            for r in cutlass.range_constexpr(2):
                state.row_sum[r] = state.row_sum[r] + total[r]


def bits_between(first: Int32, last: Int32) -> Int32:
    """Bits ``first`` to ``last`` of a word; none where last < first, and those that there are of a longer range."""
    low = cutlass.min(cutlass.max(first, Int32(0)), Int32(32))
    high = cutlass.min(cutlass.max(last + 1, low), Int32(32))
    return Int32((Int64(1) << Int64(high)) - (Int64(1) << Int64(low)))
