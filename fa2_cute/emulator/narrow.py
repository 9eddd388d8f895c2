"""float16, bfloat16 and 8-bit floats: conversions and arithmetic, rounded once."""

from __future__ import annotations

import numpy as np

from .numerics import fmax32, fmax32_nan, fmin32, fmin32_nan, odd_sum, saturate


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
    return half_arith(name, fmt, *[a.view(np.uint16) for a in args], relu=relu, sat=sat, nan=nan).view(np.uint32)


def half_values(x, fmt):
    """f16 or bf16 bits (uint16) as float32."""
    return f16_to_f32(x) if fmt == "f16" else bf16_to_f32(x)
