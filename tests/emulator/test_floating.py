"""Floating-point instructions against exact rational arithmetic, or float64 functions for the approximate ones."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_operands import FEW, bits16, f32s
from ptx_support import FORMATS, elementwise, round_exact, same, value16

from fa2_cute.emulator import errors

F32 = np.float32
CANONICAL = 0x7FFFFFFF


def exact(op, values, fmt, mode="rn"):
    """One operation on Python floats, rounded once; non-finite cases by float64, whose rules are the same."""
    if all(math.isfinite(v) for v in values):
        a, b, *c = (Fraction(v) for v in values)
        if op in ("add", "sub"):
            signs = [math.copysign(1, v) for v in values]
            if op == "sub":
                b, signs[1] = -b, -signs[1]
            total = a + b
            zero_negative = (signs[0] < 0 and signs[1] < 0) or (mode == "rm" and signs[0] != signs[1])
            return round_exact(total, fmt, mode, total == 0 and zero_negative)
        product_sign = math.copysign(1, values[0]) * math.copysign(1, values[1])
        if op == "mul":
            r = round_exact(a * b, fmt, mode)
            return math.copysign(r, product_sign)
        if op == "fma":
            total = a * b + c[0]
            product_zero = a == 0 or b == 0
            signs = (product_sign, math.copysign(1, values[2]))
            negative = (signs[0] < 0 and signs[1] < 0) or (mode == "rm" and signs[0] != signs[1])
            if total == 0 and not product_zero and c[0] != 0:
                negative = mode == "rm"
            return round_exact(total, fmt, mode, negative)
        if op == "div" and b != 0:
            return math.copysign(round_exact(a / b, fmt, mode), product_sign)
    with np.errstate(all="ignore"):
        a, b, *c = (np.float64(v) for v in values)
        return float({"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: a / b,
                      "fma": lambda: a * b + c[0]}[op]())  # fmt: skip


def check32(got, want):
    """float32 results bit for bit, NaN canonical."""
    want = np.array(want, np.float64).astype(F32)
    assert same(got, want), [(i, g, w) for i, (g, w) in enumerate(zip(got, want, strict=True)) if not same(g, w)][:4]
    assert (got.view(np.uint32)[np.isnan(got)] == CANONICAL).all()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@FEW
@given(a=f32s(), b=f32s(), c=f32s())
def test_f32_arithmetic(mode, a, b, c):
    text = f"add.{mode}.f32 %o0, %a0, %a1; sub.{mode}.f32 %o1, %a0, %a1; mul.{mode}.f32 %o2, %a0, %a1;"
    text += f"fma.{mode}.f32 %o3, %a0, %a1, %a2;" + ("div.rn.f32 %o4, %a0, %a1;" if mode == "rn" else "")
    out = elementwise(text, [a, b, c], [F32] * (5 if mode == "rn" else 4))
    for got, op in zip(out, ("add", "sub", "mul", "fma", "div"), strict=False):
        values = [a, b, c] if op == "fma" else [a, b]
        check32(got, [exact(op, [float(v[i]) for v in values], "f32", mode) for i in range(len(a))])


@FEW
@given(a=f32s(), b=f32s(), c=f32s(), d=f32s())
def test_packed_f32x2(a, b, c, d):
    text = """mov.b64 %rd50, {%a0, %a1}; mov.b64 %rd51, {%a2, %a3}; add.rn.f32x2 %rd52, %rd50, %rd51;
    fma.rn.f32x2 %rd53, %rd50, %rd51, %rd52; mul.f32x2 %rd54, %rd50, %rd51; mov.b64 {%o0, %o1}, %rd52;
    mov.b64 {%o2, %o3}, %rd53; mov.b64 {%o4, %o5}, %rd54; add.s64 %o6, %rd54, 1;"""
    out = elementwise(text, [a, b, c, d], [F32] * 6 + [np.uint64])
    for lane, (x, y) in enumerate(((a, c), (b, d))):
        sums = [exact("add", [float(p), float(q)], "f32") for p, q in zip(x, y, strict=True)]
        check32(out[lane], sums)
        fused = [exact("fma", [float(p), float(q), float(s)], "f32") for p, q, s in zip(x, y, out[lane], strict=True)]
        check32(out[2 + lane], fused)
        check32(out[4 + lane], [exact("mul", [float(p), float(q)], "f32") for p, q in zip(x, y, strict=True)])
    packed = out[4].view(np.uint32).astype(np.uint64) | out[5].view(np.uint32).astype(np.uint64) << np.uint64(32)
    assert (out[6] == packed + np.uint64(1)).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@FEW
@given(a=bits16(), b=bits16(), c=f32s())
def test_mixed_precision(kind, mode, a, b, c):
    """float32 arithmetic on 16-bit first operands and factors: one rounding of the exact result."""
    text = f"add.{mode}.f32.{kind} %o0, %a0, %a2; sub.{mode}.f32.{kind} %o1, %a0, %a2;"
    text += f"fma.{mode}.f32.{kind} %o2, %a0, %a1, %a2; fma.{mode}.sat.f32.{kind} %o3, %a0, %a1, %a2;"
    out = elementwise(text, [a, b, c], [F32] * 4)
    x, y, z = value16(a, kind), value16(b, kind), [float(v) for v in c]
    check32(out[0], [exact("add", pair, "f32", mode) for pair in zip(x, z, strict=True)])
    check32(out[1], [exact("sub", pair, "f32", mode) for pair in zip(x, z, strict=True)])
    check32(out[2], [exact("fma", triple, "f32", mode) for triple in zip(x, y, z, strict=True)])
    assert same(out[3], np.where(np.isnan(out[2]), 0.0, np.clip(out[2], 0, 1)).astype(F32) + F32(0))


def test_mixed_precision_is_refused_elsewhere():
    half = np.array([0], np.uint16)
    with pytest.raises(errors.UnknownInstruction, match="mul"):
        elementwise("mul.rn.f32.bf16 %o0, %a0, %a1;", [half, np.zeros(1, F32)], [F32])


def test_fma_rounds_once():
    """Regression: the float64 sum of this product and addend lies exactly between two float32 after rounding."""
    a = np.array([1 + 2**-12], F32)
    c = np.array([2.0**-60], F32)
    (got,) = elementwise("fma.rn.f32 %o0, %a0, %a0, %a1;", [a, c], [F32])
    want = round_exact(Fraction(float(a[0])) ** 2 + Fraction(float(c[0])), "f32")
    assert got[0] == F32(want) != F32(np.float64(a[0]) * np.float64(a[0]) + np.float64(c[0]))


def flushed(x):
    """Subnormals to signed zero."""
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


@FEW
@given(a=f32s(), b=f32s())
def test_ftz_and_saturation(a, b):
    text = (
        "add.ftz.f32 %o0, %a0, %a1; mul.ftz.f32 %o1, %a0, %a1; add.sat.f32 %o2, %a0, %a1; "
        "fma.rn.ftz.f32 %o3, %a0, %a1, %a0;"
    )
    out = elementwise(text, [a, b], [F32] * 4)
    x, y = flushed(a), flushed(b)
    for got, op, values in ((out[0], "add", (x, y)), (out[1], "mul", (x, y)), (out[3], "fma", (x, y, x))):
        want = np.array([exact(op, [float(v[i]) for v in values], "f32") for i in range(len(a))], np.float64).astype(
            F32
        )
        check32(got, flushed(want))
    total = np.array([exact("add", [float(p), float(q)], "f32") for p, q in zip(a, b, strict=True)])
    assert same(out[2], np.where(np.isnan(total), 0.0, np.clip(total, 0, 1)).astype(F32) + F32(0))


@FEW
@given(a=f32s(), b=f32s(), c=f32s())
def test_f32_min_max(a, b, c):
    text = """min.f32 %o0, %a0, %a1; max.f32 %o1, %a0, %a1; min.NaN.f32 %o2, %a0, %a1;
    max.NaN.f32 %o3, %a0, %a1;
    max.f32 %o4, %a0, %a1, %a2; max.NaN.f32 %o5, %a0, %a1, %a2; neg.f32 %o6, %a0; abs.f32 %o7, %a0;"""
    out = elementwise(text, [a, b, c], [F32] * 8)

    def order(x):  # -0 below +0
        return (float(x), not np.signbit(x))

    def pick(choose, values, strict):
        if strict and any(np.isnan(v) for v in values):
            return math.nan
        numbers = [v for v in values if not np.isnan(v)]
        return float(choose(numbers, key=order)) if numbers else math.nan

    for i in range(len(a)):
        two, three = (a[i], b[i]), (a[i], b[i], c[i])
        want = [
            pick(min, two, 0),
            pick(max, two, 0),
            pick(min, two, 1),
            pick(max, two, 1),
            pick(max, three, 0),
            pick(max, three, 1),
        ]
        check32(np.array([o[i] for o in out[:6]]), want)
    check32(out[6], -a.astype(np.float64))
    check32(out[7], np.abs(a.astype(np.float64)))


COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]


@FEW
@given(a=f32s(), b=f32s())
def test_f32_comparisons(a, b):
    ops = COMPARE + [f"{o}u" for o in COMPARE] + ["num", "nan"]
    text = "".join(f"setp.{op}.f32 %o{i}, %a0, %a1;\n" for i, op in enumerate(ops))
    out = elementwise(text, [a, b], [bool] * len(ops))
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        unordered = math.isnan(x) or math.isnan(y)
        plain = [x == y, x != y and not unordered, x < y, x <= y, x > y, x >= y]
        want = plain + [p or unordered for p in plain] + [not unordered, unordered]
        assert [bool(o[i]) for o in out] == want


FUNCTIONS = {
    "ex2.approx.f32": np.exp2,
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.f32": np.log2,
    "rcp.approx.ftz.f32": lambda x: 1 / x,
    "rcp.rn.f32": lambda x: 1 / x,
    "sqrt.rn.f32": np.sqrt,
    "sqrt.approx.ftz.f32": np.sqrt,
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
    "tanh.approx.f32": np.tanh,
    "sin.approx.f32": np.sin,
    "cos.approx.ftz.f32": np.cos,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@FEW
@given(a=f32s())
def test_functions(name, a):
    (got,) = elementwise(f"{name} %o0, %a0;", [a], [F32])
    with np.errstate(all="ignore"):
        x = flushed(a) if "ftz" in name else a
        want = FUNCTIONS[name](x.astype(np.float64)).astype(F32)
        want = flushed(want) if "ftz" in name else want
    check32(got, want)


def test_special_values_of_approximations():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 2.0**-149], F32)
    out = elementwise(
        "ex2.approx.ftz.f32 %o0, %a0; rcp.approx.ftz.f32 %o1, %a0; lg2.approx.f32 %o2, %a0; "
        "rsqrt.approx.f32 %o3, %a0;",
        [x], [F32] * 4)  # fmt: skip
    nan, inf = np.nan, np.inf
    assert same(out[0], np.array([1, 1, inf, 0, nan, 0.5, 1], F32))
    assert same(out[1], np.array([inf, -inf, 0, -0.0, nan, -1, inf], F32))
    assert same(out[2], np.array([-inf, -inf, inf, nan, nan, nan, -149], F32))
    assert same(out[3], np.array([inf, -inf, 0, nan, nan, nan, 2.0**74.5], F32))


@FEW
@given(a=f32s(), b=f32s())
def test_sign_and_class(a, b):
    text = (
        "copysign.f32 %o0, %a0, %a1; testp.finite.f32 %o1, %a0; testp.infinite.f32 %o2, %a0; "
        "testp.subnormal.f32 %o3, %a0;"
    )
    text += "testp.normal.f32 %o4, %a0; testp.notanumber.f32 %o5, %a0;"
    out = elementwise(text, [a, b], [F32] + [bool] * 5)
    ua, ub = a.view(np.uint32), b.view(np.uint32)
    assert (out[0].view(np.uint32) == (ua & 0x80000000 | ub & 0x7FFFFFFF)).all()
    exponent, fraction = ua >> 23 & 255, ua & 0x7FFFFF
    assert (out[1] == (exponent < 255)).all()
    assert (out[2] == ((exponent == 255) & (fraction == 0))).all()
    assert (out[3] == ((exponent == 0) & (fraction != 0))).all()
    assert (out[4] == ((exponent > 0) & (exponent < 255))).all()
    assert (out[5] == ((exponent == 255) & (fraction != 0))).all()


@FEW
@given(data=st.data())
def test_f64(data):
    element = st.one_of(st.floats(width=64), st.floats(-100, 100))
    a, b, c = (np.array(data.draw(st.lists(element, min_size=16, max_size=16))) for _ in range(3))
    text = """add.f64 %o0, %a0, %a1; mul.rn.f64 %o1, %a0, %a1; fma.rn.f64 %o2, %a0, %a1, %a2;
    div.rn.f64 %o3, %a0, %a1;
    neg.f64 %o4, %a0; max.f64 %o5, %a0, %a1; sqrt.rn.f64 %o6, %a0;"""
    out = elementwise(text, [a, b, c], [np.float64] * 7)
    with np.errstate(all="ignore"):
        for got, want in zip(out, (a + b, a * b, None, a / b, -a, np.fmax(a, b), np.sqrt(a)), strict=True):
            if want is not None:
                assert ((got == want) | (np.isnan(got) & np.isnan(want))).all()
        for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), out[2].tolist(), strict=True):
            if all(map(math.isfinite, (x, y, z))):
                total = Fraction(x) * Fraction(y) + Fraction(z)
                if abs(total) < Fraction(2) ** 1023:
                    assert got == float(total)


def decode(got, fmt):
    return value16(np.ascontiguousarray(got), fmt)


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@FEW
@given(a=bits16(), b=bits16(), c=bits16())
def test_half_arithmetic(fmt, a, b, c):
    text = "".join(f"{op}.rn.{fmt} %o{i}, %a0, %a1;\n" for i, op in enumerate(("add", "sub", "mul")))
    text += (
        f"fma.rn.{fmt} %o3, %a0, %a1, %a2; max.{fmt} %o4, %a0, %a1; min.NaN.{fmt} %o5, %a0, %a1; neg.{fmt} %o6, %a0;"
    )
    text += f"mov.b32 %r60, {{%a0, %a1}}; mov.b32 %r61, {{%a1, %a2}}; fma.rn.{fmt}x2 %o7, %r60, %r61, %r60;"
    text += f"fma.rn.relu.{fmt} %o8, %a0, %a1, %a2;"
    out = elementwise(text, [a, b, c], [np.uint16] * 7 + [np.uint32, np.uint16])
    x, y, z = (value16(v, fmt).tolist() for v in (a, b, c))

    def check(got, wants):
        for g, w in zip(decode(got, fmt).tolist(), wants, strict=True):
            assert (math.isnan(g) and math.isnan(w)) or (g == w and math.copysign(1, g) == math.copysign(1, w))

    for got, op in zip(out[:3], ("add", "sub", "mul"), strict=True):
        check(got, [exact(op, [p, q], fmt) for p, q in zip(x, y, strict=True)])
    fused = [exact("fma", v, fmt) for v in zip(x, y, z, strict=True)]
    check(out[3], fused)
    order = lambda v: (v, math.copysign(1, v))  # noqa: E731
    check(
        out[4],
        [max([v for v in p if not math.isnan(v)] or [math.nan], key=order) for p in zip(x, y, strict=True)],
    )
    check(out[5], [math.nan if math.isnan(sum(map(abs, p))) and any(map(math.isnan, p)) else min(p, key=order)
                   for p in zip(x, y, strict=True)])  # fmt: skip
    assert (out[6] == a ^ np.uint16(0x8000)).all()
    check((out[7] & 0xFFFF).astype(np.uint16), [exact("fma", [p, q, p], fmt) for p, q in zip(x, y, strict=True)])
    check((out[7] >> 16).astype(np.uint16), [exact("fma", [q, r, q], fmt) for q, r in zip(y, z, strict=True)])
    check(out[8], [v if math.isnan(v) or v > 0 else 0.0 for v in fused])


def test_formats_table_is_the_standard_one():
    for fmt, dtype in (("f16", np.float16), ("f32", np.float32)):
        info = np.finfo(dtype)
        bits, low, high = FORMATS[fmt]
        assert (bits, low, high) == (info.nmant + 1, info.minexp, info.maxexp - 1)
