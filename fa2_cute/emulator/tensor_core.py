"""mma.sync as the tensor cores of sm_90 compute it, bit for bit.

The rule was found on results recorded on an H200 (docs/emulator.md, "Numbers"); it has the form that Fasi, Higham,
Mikaitis and Pranesh ("Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 2021) and Li et al. ("FTTN:
Feature-Targeted Testing for Numerical Properties of NVIDIA & AMD Matrix Accelerators", CCGrid 2024) describe. Of one
element of D, over all k of the instruction at once:

1. The exponent of a product is the sum of the exponents of its factors; neither subnormal factors nor the product of
   the significands, which is below 4, are normalised first. E is the largest exponent of the nonzero products and C.
2. Each product, exact, and C are cut towards zero to a multiple of 2^(E - 25).
3. These integers are summed exactly, and the sum is cut towards zero to float32, subnormals kept; what is 2^128 or more
   becomes infinite.

sm_90 has no 8-bit mma.sync: its code unpacks the operands to f16, multiplies the k with k mod 4 < 2 and then the others
into a sum that starts at zero, and adds C in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .fragments import stack
from .numerics import canon, round32

ALIGNED_BITS = 25  # fraction bits kept below the largest exponent
# (shape, type of A, of B, of C and D): the forms that were recorded
MODELLED = frozenset(
    {(shape, kind, kind, "f32") for shape in ("m16n8k8", "m16n8k16") for kind in ("bf16", "f16")}
    | {("m16n8k32", a, b, "f32") for a, b in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2"))}
)
# Exponent of the subnormals, and least one of the normal numbers; 8-bit types are multiplied as f16
LEAST_EXPONENT = {"bf16": -126, "f16": -14, "e4m3": -14, "e5m2": -14, "f32": -126}
NO_EXPONENT = -10_000  # of zeros: below every sum of exponents, and twice it fits int16
# Exponents E for which products and their multiples of 2^(E - 25) are exact in float32, or lost in step 2 anyway
FLOAT32_EXPONENTS = (-100, 125)


def exponents(x: np.ndarray, kind: str) -> np.ndarray:
    """Exponents of finite float32 values that hold numbers of type ``kind``, as int16."""
    field = (x.view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(np.int16) - np.int16(127)
    return np.where(x == 0, np.int16(NO_EXPONENT), np.maximum(field, np.int16(LEAST_EXPONENT[kind])))


@dataclass(frozen=True)
class Factor:
    """Matrices A or B: ``values`` float32 (matrices, k, rows of A or columns of B, warps), most of the work being
    along the warps; ``finite`` the same with 0 for infinities and NaN; ``exponents`` of that; ``ordinary``: there are
    neither infinities nor NaN."""

    values: np.ndarray
    finite: np.ndarray
    exponents: np.ndarray
    ordinary: bool

    @staticmethod
    def of(fragments, kind: str, warps: int, row_blocks: int) -> Factor:
        """From registers, as ``fragments.stack`` takes them."""
        rows = stack(fragments, kind, warps, row_blocks)
        rows = rows.reshape(warps, len(fragments), row_blocks * 8, -1)
        values = np.ascontiguousarray(rows.transpose(1, 3, 2, 0))
        ordinary = bool(np.isfinite(values).all())
        finite = values if ordinary else np.where(np.isfinite(values), values, np.float32(0))
        return Factor(values, finite, exponents(finite, kind), ordinary)

    def pick(self, matrix: int, k: slice | list[int]) -> Factor:
        """One matrix, some of its k."""
        return Factor(self.values[matrix][k], self.finite[matrix][k], self.exponents[matrix][k], self.ordinary)


def accumulate(a: Factor, b: Factor, c: np.ndarray) -> np.ndarray:
    """c + a b of one matrix each, all k at once, at most 16; ``c`` (16, 8, warps)."""
    if a.ordinary and b.ordinary and np.isfinite(c).all():
        return _accumulate_finite(a, b, c)
    special = _accumulate_classes(a, b, c)
    finite = _accumulate_finite(a, b, np.where(np.isfinite(c), c, np.float32(0)))
    return np.where(np.isfinite(special), finite, special)


def _accumulate_finite(a: Factor, b: Factor, c: np.ndarray) -> np.ndarray:
    """``accumulate`` of ``a.finite`` and ``b.finite``."""
    depth = len(a.finite)
    largest = exponents(c, "f32")
    for i in range(depth):
        np.maximum(largest, a.exponents[i][:, None] + b.exponents[i][None], out=largest)
    largest[largest <= NO_EXPONENT // 2] = 0  # nothing but zeros: any scale will do
    low, high = FLOAT32_EXPONENTS
    narrow = largest.min() >= low and largest.max() <= high
    kind = np.float32 if narrow else np.float64
    scale = np.ldexp(kind(1), ALIGNED_BITS - largest.astype(np.int32))
    left, right = a.finite.astype(kind, copy=False), b.finite.astype(kind, copy=False)
    part, aligned = np.empty(c.shape, kind), np.empty(c.shape, np.int32)
    total = np.zeros(c.shape, np.int32)  # 16 * (2 - 2^-10)^2 * 2^25 < 2^31
    for i in range(depth):
        np.multiply(left[i][:, None], right[i][None], out=part)
        np.multiply(part, scale, out=part)
        np.copyto(aligned, part, casting="unsafe")  # to an integer: towards zero
        np.add(total, aligned, out=total)
    exact = total.astype(np.int64) + (c.astype(kind, copy=False) * scale).astype(np.int64)
    value = np.ldexp(exact.astype(np.float64), largest.astype(np.int32) - ALIGNED_BITS)
    if narrow:  # a float64 without its last 29 bits is the float32 below it
        return (value.view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)).view(np.float64).astype(np.float32)
    cut = round32(value, "rz")
    return np.where(np.abs(value) >= 2.0**128, np.copysign(np.float32(np.inf), cut), cut)


def _accumulate_classes(a: Factor, b: Factor, c: np.ndarray) -> np.ndarray:
    """Infinite or NaN where c + a b is by IEEE rules, else some finite number.

    Finite factors are replaced by their signs, so that no product or sum of them overflows on the way.
    """
    left, right, total = (np.where(np.isfinite(x), np.sign(x), x) for x in (a.values, b.values, c))
    for i in range(len(left)):
        total = total + left[i][:, None] * right[i][None]
    return total


def _eight_bit(a: Factor, b: Factor, i: int, j: int, c: np.ndarray) -> np.ndarray:
    """D of an 8-bit mma, from two of f16 and a float32 addition."""
    total = np.zeros_like(c)
    for start in (0, 2):
        k = [start + 4 * step + pair for step in range(8) for pair in (0, 1)]
        total = accumulate(a.pick(i, k), b.pick(j, k), total)
    return total + c


def multiply(form, a_fragments, b_fragments, pairs, c, warps: int) -> list[np.ndarray]:
    """``fragments.multiply`` with the accumulation of sm_90, for the forms in MODELLED."""
    a_kind, b_kind, _ = form
    a, b = Factor.of(a_fragments, a_kind, warps, 2), Factor.of(b_fragments, b_kind, warps, 1)
    c = np.stack(c).reshape(len(pairs), 2, 2, warps, 8, 4)  # row half, column parity, warp, row, column pair
    c = np.ascontiguousarray(c.transpose(0, 1, 4, 5, 2, 3)).reshape(len(pairs), 16, 8, warps)
    out = np.empty_like(c)
    for p, (i, j) in enumerate(pairs):
        if a_kind in ("bf16", "f16"):
            out[p] = accumulate(a.pick(i, slice(None)), b.pick(j, slice(None)), c[p])
        else:
            out[p] = _eight_bit(a, b, i, j, c[p])
    out = out.reshape(len(pairs), 2, 8, 4, 2, warps).transpose(0, 1, 4, 5, 2, 3)
    return list(canon(np.ascontiguousarray(out).reshape(len(pairs) * 4, warps * 32)))
