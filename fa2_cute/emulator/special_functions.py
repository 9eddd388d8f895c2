"""ex2, lg2 and rcp as the special-function unit of sm_90 computes them, bit for bit.

The unit interpolates quadratically in tables (Oberman and Siu, "A High-Performance Area-Efficient Multifunction
Interpolator", ARITH 2005). The leading bits of the argument's fraction choose a segment, the others are the offset t in
it; the result is C0 + C1 t + C2 t^2, cut, not rounded, to float32. The squarer leaves out every partial product of two
bits of t whose weight is below 2^-15, and that is all it leaves out. Structure and coefficients were recovered from
values recorded on an H200 (docs/emulator.md, "Numbers").

All functions take float32 arrays, subnormals included; what .ftz adds is the caller's. The PTX instructions without
.ftz are several machine instructions around the unit, as ptxas 13.0 writes them for sm_90.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from . import special_tables as tables
from .numerics import canon

OFFSET_BITS = 17  # widest offset t: 23 fraction bits less 6 that choose one of 64 segments
SQUARE_BITS = 15  # fraction bits of the squarer's result, and of the sum
LG2_BITS = 36  # fraction bits of exponent + logarithm
FRACTION = (1 << 23) - 1
SMALLEST_NORMAL = np.float32(2.0**-126)


@functools.cache
def squares() -> np.ndarray:
    """The squarer: of each 17-bit offset t / 2^17 its square in units of 2^-15, less the dropped partial products."""
    t = np.arange(1 << OFFSET_BITS)
    bits = [t >> OFFSET_BITS - i & 1 for i in range(1, OFFSET_BITS + 1)]  # bits[i - 1] weighs 2^-i
    square = np.zeros(len(t), np.int64)
    for i in range(1, OFFSET_BITS + 1):
        if 2 * i <= SQUARE_BITS:
            square += bits[i - 1] << SQUARE_BITS - 2 * i
        for j in range(i + 1, OFFSET_BITS + 1):
            if i + j - 1 <= SQUARE_BITS:  # the pair (i, j) occurs twice
                square += (bits[i - 1] & bits[j - 1]) << SQUARE_BITS - i - j + 1
    return square


@dataclass(frozen=True)
class Table:
    """Coefficients of one function by segment, as integers in units of 2^-15 of the result's last place.

    ``value(fraction)`` is that of the polynomial for 23-bit fractions, of which the first ``log2(len(c0))`` bits choose
    the segment.
    """

    c0: np.ndarray
    c1: np.ndarray
    c2: np.ndarray

    @staticmethod
    def of(c0, step: int, bias: int, c1, c2) -> Table:
        """A table whose first coefficients are multiples of ``step`` plus a ``bias`` that all segments share."""
        return Table(np.array(c0, np.int64) * step + bias, np.array(c1, np.int64), np.array(c2, np.int64))

    def value(self, fraction: np.ndarray) -> np.ndarray:
        width = 24 - len(self.c0).bit_length()
        segment = fraction >> width
        offset = fraction & (1 << width) - 1
        square = squares()[offset << OFFSET_BITS - width]
        return self.c0[segment] + self.c1[segment] * offset + self.c2[segment] * square


EX2 = Table.of(tables.EX2_C0, 8192, 6114, tables.EX2_C1, tables.EX2_C2)
RCP = Table.of(tables.RCP_C0, 8192, 2023, tables.RCP_C1, tables.RCP_C2)
LG2 = Table.of(tables.LG2_C0, 4096, 837, tables.LG2_C1, tables.LG2_C2)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(negative, biased exponent, fraction) of float32 values."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
    return bits < 0, bits >> 23 & 255, bits & FRACTION


def _unit_ex2(x: np.ndarray) -> np.ndarray:
    """The unit's 2^x, x and result flushed.

    x becomes a fixed-point number with 23 fraction bits, cut. A negative one is complemented, not negated, which makes
    it 2^-23 less, unless its fraction is zero.
    """
    size = np.minimum(np.abs(x.astype(np.float64)), 256.0)  # beyond every overflow and underflow
    fixed = np.where(np.isnan(x), 0, size * 2.0**23).astype(np.int64)
    fixed = np.where(x < 0, np.where(fixed & FRACTION == 0, -fixed, ~fixed), fixed)
    significand = EX2.value(fixed & FRACTION) >> SQUARE_BITS
    result = np.ldexp(significand.astype(np.float64), (fixed >> 23) - 23)
    return np.where(np.isnan(x), x, np.where(result < SMALLEST_NORMAL, 0.0, result)).astype(np.float32)


def ex2(x: np.ndarray) -> np.ndarray:
    """ex2.approx: below -126, the square of 2^(x / 2)."""
    low = x < np.float32(-126)
    result = _unit_ex2(np.where(low, x * np.float32(0.5), x))
    return canon(np.where(low, result * result, result))


def _unit_lg2(x: np.ndarray) -> np.ndarray:
    """The unit's log2(x): exponent plus the logarithm of the significand, cut to 24 bits; x normal or zero.

    The sum has LG2_BITS fraction bits; the magnitude of a negative one is its complement. The polynomial is not zero
    at 1, where the result is.
    """
    negative, exponent, fraction = _split(x)
    total = (exponent - 127 << LG2_BITS) + (LG2.value(fraction) >> SQUARE_BITS + 23 - LG2_BITS)
    size = np.where(total < 0, ~total, total)
    excess = np.maximum(np.frexp(size.astype(np.float64))[1] - 24, 0)  # size has at most 44 bits: exact in float64
    cut = (size >> excess << excess).astype(np.float64) * 2.0**-LG2_BITS
    result = np.where(total < 0, -cut, np.where(x == 1, 0.0, cut))
    result = np.where(exponent == 255, np.where(fraction == 0, np.inf, np.nan), result)
    return np.where(exponent == 0, -np.inf, np.where(negative, np.nan, result)).astype(np.float32)


def lg2(x: np.ndarray) -> np.ndarray:
    """lg2.approx: subnormal x scaled by 2^24 first. NaN for negative x, -inf for zeros."""
    tiny = np.abs(x) < SMALLEST_NORMAL
    result = _unit_lg2(np.where(tiny, x * np.float32(2.0**24), x))
    return canon(np.where(tiny, result - np.float32(24), result))


def _unit_rcp(x: np.ndarray) -> np.ndarray:
    """The unit's 1 / x, x and result flushed."""
    negative, exponent, fraction = _split(x)
    significand = RCP.value(fraction) >> SQUARE_BITS  # of 1 / [1, 2), 24 bits after the point
    result = np.ldexp(significand.astype(np.float64), 127 - exponent - 24)
    result = np.where(result < SMALLEST_NORMAL, 0.0, result)
    result = np.where(exponent == 0, np.inf, np.where(exponent == 255, np.where(fraction == 0, 0.0, np.nan), result))
    return np.where(negative, -result, result).astype(np.float32)


def rcp(x: np.ndarray) -> np.ndarray:
    """rcp.approx: subnormal x scaled by 2^24, |x| above 2^126 by 1/4, and the result by the same."""
    size = np.abs(x)
    scale = np.where(size < SMALLEST_NORMAL, np.float32(2.0**24), np.float32(1))
    scale = np.where(size > np.float32(2.0**126), np.float32(0.25), scale)
    return canon(_unit_rcp(x * scale) * scale)
