"""Integer and bit arithmetic of PTX, and conversions between integers and floats."""

from __future__ import annotations

import numpy as np

from .numerics import odd_sum, round32


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
    u = u - np.where(a < 0, b.view(np.uint64), np.uint64(0)) - np.where(b < 0, a.view(np.uint64), np.uint64(0))
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
    mask = np.where(valid >= width, ~kind(0), (kind(1) << np.minimum(valid, width - 1).astype(u.dtype)) - kind(1))
    return ((full & mask) | np.where(sign != 0, ~mask, kind(0))).view(a.dtype)


def bfi(a, b, start, length):
    """Bit field insert of a into b."""
    width = a.dtype.itemsize * 8
    start = (np.asarray(start) & np.uint32(255)).astype(np.int64)
    length = (np.asarray(length) & np.uint32(255)).astype(np.int64)
    a, b, start, length = np.broadcast_arrays(a, b, start, length)
    kind = a.dtype.type
    valid = np.clip(np.minimum(length, width - start), 0, width)
    mask = np.where(valid >= width, ~kind(0), (kind(1) << np.minimum(valid, width - 1).astype(a.dtype)) - kind(1))
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
