"""What becomes of a score before the softmax: softcap, ALiBi, a mask that is added or chosen by.

With any of them, scores leave here as logits in natural units, and the softmax that follows has a scale of log2(e): in
base 2 the lowest finite float, which masks are made of, would become -inf.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .products import accumulator_rows

LOG2_E = 1.4426950408889634

# Below it tanh comes from its series, whose first omitted term, 62/2835 y^9, is 2^-21.5 of y there. Above, the absolute
# error of 1 - 2 / (1 + e^2y), about 2^-23, is less than 2^-20 of it.
SERIES_LIMIT = 0.25


@dataclass(frozen=True)
class Modifiers:
    """What a row's logits are made of; what is off is None.

    scale           of the raw scores, positive; divided by softcap where there is one
    softcap         logits are softcap * tanh(scale * score); positive
    slope           ALiBi: slope times |i + key_len - query_len - j| is subtracted
    mMask           (query_len, key_len): uint8, not zero where the key takes part, or floats to add
    mask_start      which of its keys is key 0; None: its first
    """

    scale: Float32
    softcap: Float32 | None
    slope: Float32 | None
    mMask: cute.Tensor | None
    mask_start: Int32 | None


@cute.jit
def modify(
    modifiers: Modifiers,
    acc_S: cute.Tensor,
    tScS: cute.Tensor,
    first_row: Int32,
    first_key: Int32,
    query_len: Int32,
    key_len: Int32,
):
    """Turn raw scores into logits, in place.

    tScS: (row, key) within the tile that starts at (first_row, first_key). Scores of keys and rows that do not exist
    become some number; nothing is read for them.
    """
    rS, cS = accumulator_rows(acc_S), accumulator_rows(tScS)
    for r in cutlass.range_constexpr(cute.size(rS.shape[0])):
        row = first_row + cS[r, 0][0]
        for c in cutlass.range_constexpr(cute.size(rS.shape[1])):
            key = first_key + cS[r, c][1]
            if cutlass.const_expr(modifiers.softcap is not None):
                rS[r, c] = tanh(rS[r, c] * modifiers.scale) * modifiers.softcap
            else:
                rS[r, c] = rS[r, c] * modifiers.scale
            if cutlass.const_expr(modifiers.slope is not None):
                distance = row + (key_len - query_len) - key
                distance = cutlass.max(distance, -distance)
                rS[r, c] = cute.math.fma(Float32(distance), -modifiers.slope, rS[r, c])
            if cutlass.const_expr(modifiers.mMask is not None):
                column = cutlass.min(key, key_len - 1)
                if cutlass.const_expr(modifiers.mask_start is not None):
                    column = column + modifiers.mask_start
                value = _mask_value(modifiers.mMask, cutlass.min(row, query_len - 1), column)
                if cutlass.const_expr(modifiers.mMask.element_type == cutlass.Uint8):
                    rS[r, c] = rS[r, c] if value != 0 else -Float32.inf
                else:
                    rS[r, c] = rS[r, c] + Float32(value)


def _mask_value(mMask: cute.Tensor, row: Int32, key: Int32):
    # Offsets in 64 bits: row * stride passes 2^31 elements in long masks.
    offset = Int64(row) * mMask.stride[0] + Int64(key) * mMask.stride[1]
    return cute.make_tensor(mMask.iterator + offset, cute.make_layout(1))[0]


def tanh(y: Float32) -> Float32:
    """Hyperbolic tangent, within about 2^-20 of itself for every y (``tanh.approx`` errs by 2^-11)."""
    square = y * y
    series = cute.math.fma(square, Float32(-17.0 / 315.0), Float32(2.0 / 15.0))
    series = cute.math.fma(square, series, Float32(-1.0 / 3.0))
    series = cute.math.fma(square * y, series, y)
    power = cute.math.exp2(y * (2.0 * LOG2_E), fastmath=True)
    far = cute.math.fma(cute.arch.rcp_approx(power + 1.0), Float32(-2.0), Float32(1.0))
    return cutlass.select_(cute.arch.fmax(y, -y) < SERIES_LIMIT, series, far)
