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


# ---- float32 -----------------------------------------------------------------------------------------------
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


# ---- narrow formats ----------------------------------------------------------------------------------------
def bf16_to_f32(x):
    """bfloat16 bits (uint16) to float32; exact."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_to_f32(x):
    """float16 bits (uint16) to float32; exact."""
    return x.view(np.float16).astype(np.float32)


def f32_to_bf16(x, mode="rn", relu=False, satfinite=False):
    """float32 to bfloat16 bits as uint16."""
    bits = x.view(np.uint32)
    if mode == "rn":
        out = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    elif mode == "rz":
        out = bits >> np.uint32(16)
    else:
        up = (bits >> np.uint32(31)) == np.uint32(0 if mode == "rp" else 1)
        inexact = (bits & np.uint32(0xFFFF)) != 0
        out = (bits >> np.uint32(16)) + (up & inexact & np.isfinite(x)).astype(np.uint32)
    nan = x != x
    if satfinite:
        big = ((out & np.uint32(0x7FFF)) == np.uint32(0x7F80)) & ~nan
        out = np.where(big, (out & np.uint32(0x8000)) | np.uint32(0x7F7F), out)
    if relu:
        out = np.where(x < 0, np.uint32(0), out)
        out = np.where(out == np.uint32(0x8000), np.uint32(0), out)
    if nan.any():
        out = np.where(nan, np.uint32(0x7FFF), out)
    return out.astype(np.uint16)


def _directed(x, narrow, wide, mode):
    """Repairs a round-to-nearest narrowing into rz, rm or rp."""
    finite = np.isfinite(x)
    if mode == "rz":
        off = finite & (np.abs(wide) > np.abs(x))
        return np.where(off, np.nextafter(narrow, narrow.dtype.type(0)), narrow)
    if mode == "rm":
        return np.where(finite & (wide > x), np.nextafter(narrow, narrow.dtype.type(-np.inf)), narrow)
    return np.where(finite & (wide < x), np.nextafter(narrow, narrow.dtype.type(np.inf)), narrow)


def f32_to_f16(x, mode="rn", relu=False, satfinite=False):
    """float32 or float64 to float16 bits as uint16."""
    h = x.astype(np.float16)
    if mode != "rn":
        h = _directed(x, h, h.astype(x.dtype), mode)
    if satfinite:
        h = np.where(np.isinf(h), np.copysign(np.float16(65504), h), h)
    if relu:
        h = np.where((h <= 0), np.float16(0), h)
    out = h.view(np.uint16)
    nan = x != x
    return np.where(nan, np.uint16(0x7FFF), out) if nan.any() else out


def pack32(low, high):
    """Two uint16 arrays as one uint32 array, the first in the low half."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def pack64(low, high):
    """Two uint32 arrays as one uint64 array, the first in the low half."""
    out = np.empty((low.shape[0], 2), np.uint32)
    out[:, 0] = low
    out[:, 1] = high
    return out.reshape(-1).view(np.uint64)


def pack_bf16x2(high, low, mode="rn", relu=False, satfinite=False):
    """cvt.bf16x2.f32 d, a, b: a becomes the high half."""
    return pack32(f32_to_bf16(low, mode, relu, satfinite), f32_to_bf16(high, mode, relu, satfinite))


def pack_f16x2(high, low, mode="rn", relu=False, satfinite=False):
    """cvt.f16x2.f32 d, a, b: a becomes the high half."""
    return pack32(f32_to_f16(low, mode, relu, satfinite), f32_to_f16(high, mode, relu, satfinite))


def halves(x):
    """uint32 array as its (low, high) uint16 arrays."""
    both = x.view(np.uint16).reshape(-1, 2)
    return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])


def _fp8_table(exponent_bits, mantissa_bits, bias, has_inf):
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = codes & ((1 << mantissa_bits) - 1)
    value = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias - mantissa_bits),
        (1 + fraction / 2.0**mantissa_bits) * 2.0 ** (exponent.astype(float) - bias),
    )
    top = (1 << exponent_bits) - 1
    if has_inf:
        value = np.where(exponent == top, np.where(fraction == 0, np.inf, np.nan), value)
    else:
        value = np.where((exponent == top) & (fraction == (1 << mantissa_bits) - 1), np.nan, value)
    return (sign * value).astype(np.float32)


# OCP 8-bit floating point specification 1.0: e4m3 has one NaN code a sign and no infinity; e5m2 follows IEEE
# 754.
FP8_VALUES = {"e4m3": _fp8_table(4, 3, 7, False), "e5m2": _fp8_table(5, 2, 15, True)}


def fp8_to_f32(x, fmt):
    """8-bit codes (any integer array) to float32; exact."""
    return FP8_VALUES[fmt][x]


def f32_to_fp8(x, fmt, relu=False):
    """cvt.rn.satfinite.{e4m3,e5m2}x2: nearest even code as uint16, saturated to the largest finite value."""
    table = FP8_VALUES[fmt][:128].astype(np.float64)
    top = int(np.flatnonzero(np.isfinite(table))[-1])
    positive = table[: top + 1]
    v = np.abs(x).astype(np.float64)
    above = np.clip(np.searchsorted(positive, v), 0, top)
    below = np.maximum(above - 1, 0)
    to_below, to_above = v - positive[below], positive[above] - v
    code = np.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    code = np.where(v >= positive[top], top, code)
    code = code | np.where(np.signbit(x), 0x80, 0)
    if relu:
        code = np.where(np.signbit(x), 0, code)
    return np.where(x != x, 0x7F, code).astype(np.uint16)


def half_arith(name, fmt, *args, relu=False, sat=False, nan=False):
    """add, sub, mul, fma, min, max, abs, neg, ... on f16 or bf16 bit arrays (uint16), rounded once."""
    if name == "neg":
        return args[0] ^ np.uint16(0x8000)
    if name == "abs":
        return args[0] & np.uint16(0x7FFF)
    widen = f16_to_f32 if fmt == "f16" else bf16_to_f32
    x = [widen(a) for a in args]
    if name in ("min", "max"):
        f = {"min": fmin32, "max": fmax32}[name] if not nan else {"min": fmin32_nan, "max": fmax32_nan}[name]
        r = f(x[0], x[1])
        return f32_to_f16(r) if fmt == "f16" else f32_to_bf16(r)
    w = [v.astype(np.float64) for v in x]
    if name == "add":
        r = odd_sum(w[0], w[1])
    elif name == "sub":
        r = odd_sum(w[0], -w[1])
    elif name == "mul":
        r = w[0] * w[1]
    elif name == "fma":
        r = odd_sum(w[0] * w[1], w[2])
    elif name == "ex2":
        r = np.exp2(w[0])
    elif name == "tanh":
        r = np.tanh(w[0])
    else:
        raise ValueError(name)
    if sat:
        r = saturate(r)
    if relu:
        r = np.where(r <= 0, 0.0, r)
    if fmt == "f16":
        return f32_to_f16(r)
    f = r.astype(np.float32)  # to odd, so that the rounding to bfloat16 below is the only one
    wide = f.astype(np.float64)
    f = np.where(np.isfinite(r) & (np.abs(wide) > np.abs(r)), np.nextafter(f, np.float32(0)), f)
    inexact = np.isfinite(r) & (f.astype(np.float64) != r)
    return f32_to_bf16((f.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32))


def half2(name, fmt, *args, relu=False, sat=False, nan=False):
    """half_arith on packed pairs (uint32 arrays)."""
    return half_arith(name, fmt, *[a.view(np.uint16) for a in args], relu=relu, sat=sat, nan=nan).view(
        np.uint32
    )


def half_values(x, fmt):
    """f16 or bf16 bits (uint16) as float32."""
    return f16_to_f32(x) if fmt == "f16" else bf16_to_f32(x)


# ---- comparisons -------------------------------------------------------------------------------------------
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


# ---- integers ----------------------------------------------------------------------------------------------
def divide(a, b):
    """Integer division toward zero; division by zero gives all ones, as the hardware routine does."""
    a, b = np.broadcast_arrays(a, b)
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    q = a // safe
    if a.dtype.kind == "i":
        q = q + ((q * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, ~np.zeros_like(a), q)


def remainder(a, b):
    """Remainder with the sign of the dividend; a modulo 0 is a."""
    a, b = np.broadcast_arrays(a, b)
    zero = b == 0
    q = divide(a, np.where(zero, b.dtype.type(1), b))
    return np.where(zero, a, a - q * np.where(zero, b.dtype.type(1), b))


def mulhi64(a, b):
    """High 64 bits of an unsigned 64 x 64 product."""
    a, b = np.broadcast_arrays(a, b)
    m, s = np.uint64(0xFFFFFFFF), np.uint64(32)
    al, ah, bl, bh = a & m, a >> s, b & m, b >> s
    ll, lh, hl, hh = al * bl, al * bh, ah * bl, ah * bh
    middle = (ll >> s) + (lh & m) + (hl & m)
    return hh + (lh >> s) + (hl >> s) + (middle >> s)


def mulhi64s(a, b):
    """High 64 bits of a signed 64 x 64 product."""
    a, b = np.broadcast_arrays(a, b)
    u = mulhi64(a.view(np.uint64), b.view(np.uint64))
    u = (
        u
        - np.where(a < 0, b.view(np.uint64), np.uint64(0))
        - np.where(b < 0, a.view(np.uint64), np.uint64(0))
    )
    return u.view(np.int64)


def lop3(a, b, c, table):
    """Any bitwise function of three operands, by its truth table."""
    out = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(8):
        if table >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return out


def popcount(x):
    """Number of set bits, as uint32."""
    v = x.astype(np.uint64)
    out = np.zeros(x.shape, np.uint32)
    for k in range(0, 64, 8):
        out = out + _POPCOUNT8[((v >> np.uint64(k)) & np.uint64(255)).astype(np.intp)]
    return out


_POPCOUNT8 = np.array([bin(i).count("1") for i in range(256)], np.uint32)


def highest_bit(x):
    """Position of the highest set bit, or -1, as int64."""
    v = x.astype(np.uint64)
    out = np.full(x.shape, -1, np.int64)
    for s in (32, 16, 8, 4, 2, 1):
        big = v >= (np.uint64(1) << np.uint64(s))
        v = np.where(big, v >> np.uint64(s), v)
        out = out + big * s
    return np.where(x != 0, out + 1, -1)


def clz(x):
    """Leading zeros, as uint32."""
    return (x.dtype.itemsize * 8 - 1 - highest_bit(x)).astype(np.uint32)


def bfind(x, shift=False):
    """Position of the most significant non-sign bit, 0xffffffff if none."""
    width = x.dtype.itemsize * 8
    u = x.view(f"u{x.dtype.itemsize}")
    if x.dtype.kind == "i":
        u = np.where(x < 0, ~u, u)
    h = highest_bit(u)
    if shift:
        h = np.where(h < 0, -1, width - 1 - h)
    return h.astype(np.int32).view(np.uint32)


def bit_reverse(x):
    """Bits in opposite order."""
    width = x.dtype.itemsize * 8
    out = np.zeros_like(x)
    one = x.dtype.type(1)
    for i in range(width):
        out = out | (((x >> x.dtype.type(i)) & one) << x.dtype.type(width - 1 - i))
    return out


def bfe(a, start, length, signed):
    """Bit field extract (PTX ISA bfe): out-of-range bits are the sign (or zero)."""
    width = a.dtype.itemsize * 8
    start = (np.asarray(start) & np.uint32(255)).astype(np.int64)
    length = (np.asarray(length) & np.uint32(255)).astype(np.int64)
    a, start, length = np.broadcast_arrays(a, start, length)
    u = a.view(f"u{a.dtype.itemsize}")
    kind = u.dtype.type
    last = np.minimum(start + length - 1, width - 1)
    sign = (u >> last.clip(0).astype(u.dtype)) & kind(1) if signed else np.zeros_like(u)
    sign = np.where(length == 0, kind(0), sign)
    full = np.where(start >= width, kind(0), u >> np.minimum(start, width - 1).astype(u.dtype))
    valid = np.clip(np.minimum(length, width - start), 0, width)
    mask = np.where(
        valid >= width, ~kind(0), (kind(1) << np.minimum(valid, width - 1).astype(u.dtype)) - kind(1)
    )
    return ((full & mask) | np.where(sign != 0, ~mask, kind(0))).view(a.dtype)


def bfi(a, b, start, length):
    """Bit field insert of a into b."""
    width = a.dtype.itemsize * 8
    start = (np.asarray(start) & np.uint32(255)).astype(np.int64)
    length = (np.asarray(length) & np.uint32(255)).astype(np.int64)
    a, b, start, length = np.broadcast_arrays(a, b, start, length)
    kind = a.dtype.type
    valid = np.clip(np.minimum(length, width - start), 0, width)
    mask = np.where(
        valid >= width, ~kind(0), (kind(1) << np.minimum(valid, width - 1).astype(a.dtype)) - kind(1)
    )
    shift = np.minimum(start, width - 1).astype(a.dtype)
    return np.where(valid > 0, (b & ~(mask << shift)) | ((a & mask) << shift), b)


def prmt(a, b, selector, mode=None):
    """Byte permute of the eight bytes {b, a}."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    source = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(a.shape, np.uint32)
    low = (selector & np.uint32(3)).astype(np.int64)
    for i in range(4):
        if mode is None:
            control = (selector >> np.uint32(4 * i)) & np.uint32(15)
            pick, sign = (control & np.uint32(7)).astype(np.uint64), (control & np.uint32(8)) != 0
        else:
            table = {
                "f4e": low + i, "b4e": (low - i) % 8, "rc8": low, "ecl": np.maximum(low, i),
                "ecr": np.minimum(low, i), "rc16": (low & 1) * 2 + (i & 1),
            }  # fmt: skip
            pick, sign = table[mode].astype(np.uint64), np.zeros(a.shape, bool)
        byte = ((source >> (pick * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
        byte = np.where(sign, np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)), byte)
        out = out | (byte << np.uint32(8 * i))
    return out


def funnel(low, high, amount, left, wrap):
    """shf: shift of the 64-bit value {high, low}."""
    low, high, amount = np.broadcast_arrays(low, high, amount)
    n = (amount & np.uint32(31)) if wrap else np.minimum(amount, np.uint32(32))
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    n = n.astype(np.uint64)
    if left:
        return ((both << n) >> np.uint64(32)).astype(np.uint32)
    return (both >> n).astype(np.uint32)


def float_to_int(x, kind, mode):
    """cvt to an integer type with rounding, clamped to its range; NaN gives 0 (PTX ISA cvt)."""
    x = x.astype(np.float64)
    r = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)
    info = np.iinfo(kind)
    out = np.zeros(x.shape, kind)
    inside = (r >= float(info.min)) & (r < float(info.max) + (1.0 if info.bits < 64 else 0.0))
    out[inside] = r[inside].astype(kind)
    out[r >= float(info.max)] = info.max
    out[r < float(info.min)] = info.min
    return out


def int_to_f32(x, mode):
    """Integer to float32 with one rounding."""
    if mode == "rn":
        return x.astype(np.float32)
    if x.dtype.itemsize <= 4:
        return round32(x.astype(np.float64), mode)
    high = (x >> x.dtype.type(32)).astype(np.float64) * 4294967296.0
    low = (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return round32(odd_sum(high, low), mode)


def clamp_int(x, kind):
    """cvt.sat between integer types."""
    info = np.iinfo(kind)
    low = x.dtype.type(max(info.min, np.iinfo(x.dtype).min))
    high = x.dtype.type(min(info.max, np.iinfo(x.dtype).max))
    return np.clip(x, low, high).astype(kind)
