"""mma.sync as the tensor cores of sm_90 compute it, bit for bit.

The rule was found on results recorded on an H200 (docs/emulator.md, "Numbers"); it has the form that Fasi, Higham,
Mikaitis and Pranesh ("Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 2021) and Li et al. ("FTTN:
Feature-Targeted Testing for Numerical Properties of NVIDIA & AMD Matrix Accelerators", CCGrid 2024) describe. Of one
element of D, over all k of the instruction at once:

1. The exponent of a product is the sum of the exponents of its factors (the product of the significands, below 4, is
   not normalised first); E is the largest exponent of the nonzero products and C.
2. Each product, exact, and C are cut towards zero to a multiple of 2^(E - 25).
3. These integers are summed exactly, and the sum is cut towards zero to float32.
"""

from __future__ import annotations

import numpy as np

from .fragments import stack
from .numerics import canon, round32

ALIGNED_BITS = 25  # fraction bits kept below the largest exponent
MODELLED = frozenset(("m16n8k16", kind, kind, "f32") for kind in ("bf16", "f16"))  # the forms that were recorded
DEPTH = 16
LEAST_EXPONENT = {"bf16": -126, "f16": -14, "f32": -126}  # of normal numbers, and of all subnormals
NO_EXPONENT = -10_000  # of zeros: below every sum of exponents, and twice it fits int16
# Exponents E for which products and their multiples of 2^(E - 25) are exact in float32, or lost in step 2 anyway
FLOAT32_EXPONENTS = (-100, 125)


def exponents(x: np.ndarray, kind: str) -> np.ndarray:
    """Exponents of finite float32 values that hold numbers of type ``kind``, as int16."""
    field = (x.view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(np.int16) - np.int16(127)
    return np.where(x == 0, np.int16(NO_EXPONENT), np.maximum(field, np.int16(LEAST_EXPONENT[kind])))


def accumulate(a, b, a_exponents, b_exponents, c) -> np.ndarray:
    """One product of fragments. ``a`` (k, 16, warps), ``b`` (k, 8, warps), ``c`` (16, 8, warps), finite float32."""
    largest = exponents(c, "f32")
    for i in range(len(a)):
        np.maximum(largest, a_exponents[i][:, None] + b_exponents[i][None], out=largest)
    largest[largest <= NO_EXPONENT // 2] = 0  # nothing but zeros: any scale will do
    low, high = FLOAT32_EXPONENTS
    inside = largest.min() >= low and largest.max() <= high
    kind = np.float32 if inside else np.float64
    scale = np.ldexp(kind(1), ALIGNED_BITS - largest.astype(np.int32))
    a, b = a.astype(kind, copy=False), b.astype(kind, copy=False)
    part, aligned = np.empty(c.shape, kind), np.empty(c.shape, np.int32)
    total = np.zeros(c.shape, np.int32)  # 16 * (2 - 2^-10)^2 * 2^25 < 2^31
    for i in range(len(a)):
        np.multiply(a[i][:, None], b[i][None], out=part)
        np.multiply(part, scale, out=part)
        np.copyto(aligned, part, casting="unsafe")  # to an integer: towards zero
        np.add(total, aligned, out=total)
    exact = total.astype(np.int64) + (c.astype(kind, copy=False) * scale).astype(np.int64)
    value = np.ldexp(exact.astype(np.float64), largest.astype(np.int32) - ALIGNED_BITS)
    if inside:  # a float64 without its last 29 bits is the float32 below it
        return (value.view(np.uint64) & np.uint64(0xFFFFFFFFE0000000)).view(np.float64).astype(np.float32)
    cut = round32(value, "rz")
    return np.where(np.abs(value) >= 2.0**128, np.copysign(np.float32(np.inf), cut), cut)


def not_finite(a, b, c) -> np.ndarray:
    """D where it is infinite or NaN by IEEE rules, else some finite number; shapes as in ``accumulate``.

    Finite factors are replaced by their signs, so that no product or sum of them overflows on the way.
    """
    a, b, c = (np.where(np.isfinite(x), np.sign(x), x) for x in (a, b, c))
    for i in range(len(a)):
        c = c + a[i][:, None] * b[i][None]
    return c


def multiply(form, a_fragments, b_fragments, pairs, c, warps: int) -> list[np.ndarray]:
    """``fragments.multiply`` with the accumulation of sm_90, for the forms in MODELLED."""
    a_kind, b_kind, _ = form
    # (fragments, k, rows or columns, warps): warps last, since they are many and nothing is summed over them
    a = np.ascontiguousarray(stack(a_fragments, a_kind, warps, 2).reshape(warps, -1, 16, DEPTH).transpose(1, 3, 2, 0))
    b = np.ascontiguousarray(stack(b_fragments, b_kind, warps, 1).reshape(warps, -1, 8, DEPTH).transpose(1, 3, 2, 0))
    c = np.stack(c).reshape(len(pairs), 2, 2, warps, 8, 4)  # row half, column parity, warp, row, column pair
    c = np.ascontiguousarray(c.transpose(0, 1, 4, 5, 2, 3)).reshape(len(pairs), 16, 8, warps)
    finite = all(np.isfinite(x).all() for x in (a, b, c))
    clean_a, clean_b, clean_c = (a, b, c) if finite else (np.where(np.isfinite(x), x, 0) for x in (a, b, c))
    a_exponents, b_exponents = exponents(clean_a, a_kind), exponents(clean_b, b_kind)
    out = np.empty_like(c)
    for p, (i, j) in enumerate(pairs):
        out[p] = accumulate(clean_a[i], clean_b[j], a_exponents[i], b_exponents[j], clean_c[p])
        if not finite:
            special = not_finite(a[i], b[j], c[p])
            out[p] = np.where(np.isfinite(special), out[p], special)
    out = out.reshape(len(pairs), 2, 8, 4, 2, warps).transpose(0, 1, 4, 5, 2, 3)
    return list(canon(np.ascontiguousarray(out).reshape(len(pairs) * 4, warps * 32)))
