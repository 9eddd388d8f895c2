"""Arithmetic of PTX on numpy arrays, bit for bit: NaN, subnormals, rounding modes, narrow formats.

Rounding happens once. Sums and fused multiply-adds are formed in float64 and rounded to odd there (Boldo and
Melquiond, "Emulation of FMA and correctly rounded sums", 2008), so that the second rounding, to float32,
float16 or
bfloat16, gives the same result as rounding the exact value.
"""

from __future__ import annotations

import numpy as np

CANONICAL_NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # PTX ISA, "Floating Point Instructions": NaN results
_LOW29 = np.uint64(0x1FFFFFFF)  # float64 fraction bits that float32 drops
_HALF29 = np.uint64(0x10000000)
_MIN_NORMAL = 2.0**-126


def canon(x):
    """Replaces every NaN of a float32 array by the canonical one."""
    bad = x != x
    return np.where(bad, CANONICAL_NAN, x) if bad.any() else x


def canon64(x):
    """Canonical NaN of float64."""
    bad = x != x
    return np.where(bad, np.uint64(0x7FFFFFFFFFFFFFFF).view(np.float64), x) if bad.any() else x


def flush(x):
    """.ftz: subnormal float32 values become zeros of the same sign."""
    small = np.abs(x) < np.float32(_MIN_NORMAL)
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def saturate(x):
    """.sat: clamp to [0, 1], NaN to +0."""
    return np.where(x != x, x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1))) + x.dtype.type(0)


def fmin32(a, b):
    """min: the number where one operand is NaN; -0 below +0."""
    r = np.fmin(a, b)
    zero = r == 0
    if zero.any():
        both = (a == 0) & (b == 0)
        r = np.where(both, np.where(np.signbit(a) | np.signbit(b), -r.dtype.type(0), r.dtype.type(0)), r)
    return canon(r) if r.dtype == np.float32 else canon64(r)


def fmax32(a, b):
    """max: the number where one operand is NaN; +0 above -0."""
    r = np.fmax(a, b)
    zero = r == 0
    if zero.any():
        both = (a == 0) & (b == 0)
        r = np.where(both, np.where(np.signbit(a) & np.signbit(b), -r.dtype.type(0), r.dtype.type(0)), r)
    return canon(r) if r.dtype == np.float32 else canon64(r)


def fmin32_nan(a, b):
    """min.NaN: NaN where either operand is."""
    r = fmin32(a, b)
    bad = (a != a) | (b != b)
    return np.where(bad, CANONICAL_NAN, r) if bad.any() else r


def fmax32_nan(a, b):
    """max.NaN: NaN where either operand is."""
    r = fmax32(a, b)
    bad = (a != a) | (b != b)
    return np.where(bad, CANONICAL_NAN, r) if bad.any() else r


def odd_sum(p, c):
    """p + c in float64 rounded to odd; p and c are float64."""
    s = p + c
    back = s - p
    err = (p - (s - back)) + (c - back)
    inexact = (err != 0) & np.isfinite(s) & np.isfinite(err)
    if not inexact.any():
        return s
    bits = s.view(np.int64).copy()
    toward = inexact & ((err < 0) != (s < 0)) & (s != 0)
    bits[toward] -= 1
    bits[inexact] |= 1
    return bits.view(np.float64)


def fma32(a, b, c):
    """fma.rn.f32: one rounding. The product of two float32 is exact in float64."""
    p = np.multiply(a, b, dtype=np.float64)
    s = np.add(p, c, dtype=np.float64)
    low = s.view(np.uint64) & _LOW29
    risky = low == _HALF29
    small = np.abs(s) < 2 * _MIN_NORMAL
    if small.any():
        risky = risky | (small & (s != 0))
    if risky.any():
        s = np.where(risky, odd_sum(*np.broadcast_arrays(p, np.asarray(c, np.float64))), s)
    return canon(s.astype(np.float32))


def round32(x, mode):
    """Float64 (rounded to odd) to float32 with rn, rz, rm or rp."""
    f = x.astype(np.float32)
    if mode == "rn":
        return canon(f)
    wide = f.astype(np.float64)
    finite = np.isfinite(x)
    if mode == "rz":
        f = np.where(finite & (np.abs(wide) > np.abs(x)), np.nextafter(f, np.float32(0)), f)
    elif mode == "rm":
        f = np.where(finite & (wide > x), np.nextafter(f, np.float32(-np.inf)), f)
    else:
        f = np.where(finite & (wide < x), np.nextafter(f, np.float32(np.inf)), f)
    return canon(f)


def _directed_sum(p, c, mode):
    """Float32 sum of two float64 values, rounded once in a direction."""
    s = odd_sum(p, c)
    r = round32(s, mode)
    if mode == "rm":  # an exact zero sum of opposite signs is -0 when rounding down (IEEE 754-2019, 6.3)
        r = np.where((s == 0) & (np.signbit(p) != np.signbit(c)), np.float32(-0.0), r)
    return r


def add32_mode(a, b, mode):
    """add with a directed rounding."""
    a, b = np.broadcast_arrays(a, b)
    return _directed_sum(a.astype(np.float64), b.astype(np.float64), mode)


def mul32_mode(a, b, mode):
    """mul with a directed rounding."""
    return round32(np.multiply(a, b, dtype=np.float64), mode)


def fma32_mode(a, b, c, mode):
    """fma with a directed rounding."""
    p = np.multiply(a, b, dtype=np.float64)
    p, c = np.broadcast_arrays(p, np.asarray(c, np.float64))
    return _directed_sum(p, c, mode)


def fma64(a, b, c):
    """fma.rn.f64, element by element in exact rational arithmetic (slow; attention kernels do not use it)."""
    from fractions import Fraction

    a, b, c = np.broadcast_arrays(a, b, c)
    out = a * b + c
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            try:
                out[i] = float(exact)
            except OverflowError:
                out[i] = np.inf if exact > 0 else -np.inf
    return canon64(out)


def via64(function, x):
    """A correctly rounded (to within float64's own error) float32 function value."""
    return canon(function(x.astype(np.float64)).astype(np.float32))


def ex2(x):
    """2**x."""
    return via64(np.exp2, x)


def lg2(x):
    """log2(x)."""
    return via64(np.log2, x)


def sin32(x):
    """sin(x), x in radians."""
    return via64(np.sin, x)


def cos32(x):
    """cos(x), x in radians."""
    return via64(np.cos, x)


def tanh32(x):
    """tanh(x)."""
    return via64(np.tanh, x)


def rsqrt32(x):
    """1 / sqrt(x), rounded once."""
    return via64(lambda v: 1.0 / np.sqrt(v), x)


def compare(op, a, b):
    """setp comparison; the u-forms are true on NaN."""
    if op == "eq":
        return a == b
    if op == "ne":
        return (a != b) if a.dtype.kind != "f" else (a < b) | (a > b)
    if op in ("lt", "lo"):
        return a < b
    if op in ("le", "ls"):
        return a <= b
    if op in ("gt", "hi"):
        return a > b
    if op in ("ge", "hs"):
        return a >= b
    if op == "num":
        return (a == a) & (b == b)
    if op == "nan":
        return (a != a) | (b != b)
    ordered = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}[op]
    return ~compare(ordered, a, b)
