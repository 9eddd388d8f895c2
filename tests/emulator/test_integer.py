"""Integer, bit, select and compare instructions against Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_operands import FEW, ints, predicates
from ptx_support import elementwise

DTYPES = {
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
}


def wrap(value: int, dtype) -> int:
    """Python integer reduced to a dtype's range."""
    info = np.iinfo(dtype)
    value &= (1 << info.bits) - 1
    return value - (1 << info.bits) if info.min < 0 and value > info.max else value


def truncated(a: int, b: int) -> int:
    """Quotient rounded toward zero."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


BINARY = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: (a * b) >> w,
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
    "div": lambda a, b, w: truncated(a, b) if b else None,
    "rem": lambda a, b, w: a - truncated(a, b) * b if b else None,
}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("op", BINARY)
@FEW
@given(data=st.data())
def test_binary(op, kind, data):
    dtype = DTYPES[kind]
    a, b = data.draw(ints(dtype)), data.draw(ints(dtype))
    width = np.iinfo(dtype).bits
    want = [BINARY[op](int(x), int(y), width) for x, y in zip(a, b, strict=True)]
    (got,) = elementwise(f"{op}.{kind} %o0, %a0, %a1;", [a, b], [dtype])
    for w, g in zip(want, got, strict=True):
        if w is not None:  # division by zero is not defined
            assert int(g) == wrap(w, dtype)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
@FEW
@given(data=st.data())
def test_wide_products(kind, data):
    dtype = DTYPES[kind]
    wide = DTYPES[kind[0] + str(2 * int(kind[1:]))]
    a, b, c = data.draw(ints(dtype)), data.draw(ints(dtype)), data.draw(ints(wide))
    p, m = elementwise(f"mul.wide.{kind} %o0, %a0, %a1;\nmad.wide.{kind} %o1, %a0, %a1, %a2;", [a, b, c], [wide, wide])
    for x, y, z, gp, gm in zip(a, b, c, p, m, strict=True):
        assert int(gp) == wrap(int(x) * int(y), wide)
        assert int(gm) == wrap(int(x) * int(y) + int(z), wide)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@FEW
@given(data=st.data())
def test_mad_and_unary(kind, data):
    dtype = DTYPES[kind]
    a, b, c = (data.draw(ints(dtype)) for _ in range(3))
    signed = kind[0] == "s"
    text = f"mad.lo.{kind} %o0, %a0, %a1, %a2;\nmad.hi.{kind} %o1, %a0, %a1, %a2;\n"
    text += f"neg.{kind} %o2, %a0;\nabs.{kind} %o3, %a0;" if signed else "mov.b32 %r9, 0;"
    outs = elementwise(text, [a, b, c], [dtype] * (4 if signed else 2))
    width = np.iinfo(dtype).bits
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        assert int(outs[0][i]) == wrap(x * y + z, dtype)
        assert int(outs[1][i]) == wrap(((x * y) >> width) + z, dtype)
        if signed:
            assert int(outs[2][i]) == wrap(-x, dtype)
            assert int(outs[3][i]) == wrap(abs(x), dtype)


@pytest.mark.parametrize("bits", [16, 32, 64])
@FEW
@given(data=st.data())
def test_bitwise_and_shifts(bits, data):
    u, s = DTYPES[f"u{bits}"], DTYPES[f"s{bits}"]
    a, b = data.draw(ints(u)), data.draw(ints(u))
    n = data.draw(ints(np.uint32)) % np.uint32(80)
    text = f"""and.b{bits} %o0, %a0, %a1; or.b{bits} %o1, %a0, %a1; xor.b{bits} %o2, %a0, %a1;
    not.b{bits} %o3, %a0;
    shl.b{bits} %o4, %a0, %a2; shr.u{bits} %o5, %a0, %a2; shr.s{bits} %o6, %a0, %a2; cnot.b{bits} %o7, %a0;
    shl.b{bits} %o8, %a0, 3; shr.s{bits} %o9, %a0, {bits + 5};"""
    out = elementwise(text, [a, b, n], [u] * 6 + [s, u, u, s])
    for i, (x, y, k) in enumerate(zip(a.tolist(), b.tolist(), n.tolist(), strict=True)):
        signed = wrap(x, s)
        want = [
            x & y,
            x | y,
            x ^ y,
            ~x,
            x << k,
            x >> k,
            signed >> k,
            int(x == 0),
            x << 3,
            -1 if signed < 0 else 0,
        ]
        for j, w in enumerate(want):
            assert int(out[j][i]) == wrap(w, s if j in (6, 9) else u), (j, x, y, k)


@FEW
@given(data=st.data())
def test_bit_counting(data):
    a, b = data.draw(ints(np.uint32)), data.draw(ints(np.uint64))
    text = """popc.b32 %o0, %a0; clz.b32 %o1, %a0; brev.b32 %o2, %a0; bfind.u32 %o3, %a0; bfind.s32 %o4, %a0;
    popc.b64 %o5, %a1; clz.b64 %o6, %a1; brev.b64 %o7, %a1; bfind.shiftamt.u32 %o8, %a0;"""
    out = elementwise(text, [a, b], [np.uint32] * 7 + [np.uint64, np.uint32])
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        signed = wrap(x, np.int32)
        magnitude = ~signed if signed < 0 else signed
        none = 0xFFFFFFFF
        want = [
            x.bit_count() if hasattr(x, "bit_count") else bin(x).count("1"),
            32 - x.bit_length(),
            int(f"{x:032b}"[::-1], 2),
            x.bit_length() - 1 if x else none,
            magnitude.bit_length() - 1 if magnitude else none,
            bin(y).count("1"),
            64 - y.bit_length(),
            int(f"{y:064b}"[::-1], 2),
            32 - x.bit_length() if x else none,
        ]
        assert [int(o[i]) for o in out] == want


@FEW
@given(data=st.data(), table=st.integers(0, 255))
def test_lop3(data, table):
    a, b, c = (data.draw(ints(np.uint32)) for _ in range(3))
    (got,) = elementwise(f"lop3.b32 %o0, %a0, %a1, %a2, {table};", [a, b, c], [np.uint32])
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        bits = [(table >> ((x >> k & 1) << 2 | (y >> k & 1) << 1 | z >> k & 1) & 1) << k for k in range(32)]
        assert g == sum(bits)


@FEW
@given(data=st.data())
def test_byte_permute_and_funnel(data):
    a, b, c = (data.draw(ints(np.uint32)) for _ in range(3))
    text = """prmt.b32 %o0, %a0, %a1, %a2; shf.l.wrap.b32 %o1, %a0, %a1, %a2;
    shf.r.wrap.b32 %o2, %a0, %a1, %a2;
    shf.l.clamp.b32 %o3, %a0, %a1, %a2; shf.r.clamp.b32 %o4, %a0, %a1, %a2;
    prmt.b32.f4e %o5, %a0, %a1, %a2;"""
    out = elementwise(text, [a, b, c], [np.uint32] * 6)
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        source = (y << 32 | x).to_bytes(8, "little")
        permuted = 0
        for k in range(4):
            control = z >> 4 * k & 15
            byte = source[control & 7]
            permuted |= ((0xFF if byte & 128 else 0) if control & 8 else byte) << 8 * k
        both, wrapped, clamped = y << 32 | x, z & 31, min(z, 32)
        mask = 0xFFFFFFFF
        f4e = int.from_bytes(bytes(source[(z & 3) + k] for k in range(4)), "little")
        want = [permuted, both << wrapped >> 32 & mask, both >> wrapped & mask, both << clamped >> 32 & mask,
                both >> clamped & mask, f4e]  # fmt: skip
        assert [int(o[i]) for o in out] == want


@pytest.mark.parametrize("bits", [32, 64])
@FEW
@given(data=st.data())
def test_bit_fields(bits, data):
    u, s = DTYPES[f"u{bits}"], DTYPES[f"s{bits}"]
    a, b = data.draw(ints(u)), data.draw(ints(u))
    start, length = data.draw(ints(np.uint32)) % np.uint32(70), data.draw(ints(np.uint32)) % np.uint32(70)
    text = f"bfe.u{bits} %o0, %a0, %a2, %a3; bfe.s{bits} %o1, %a0, %a2, %a3; bfi.b{bits} %o2, %a0, %a1, %a2, %a3;"
    out = elementwise(text, [a, b, start, length], [u, s, u])
    for i, (x, y, p, n) in enumerate(zip(a.tolist(), b.tolist(), start.tolist(), length.tolist(), strict=True)):
        sign = 0 if n == 0 else x >> min(p + n - 1, bits - 1) & 1
        unsigned = sum((x >> p + k & 1) << k for k in range(bits) if k < n and p + k < bits)
        signed = unsigned | sum(sign << k for k in range(bits) if not (k < n and p + k < bits))
        inserted = y
        for k in range(n):
            if p + k < bits:
                inserted = inserted & ~(1 << p + k) | (x >> k & 1) << p + k
        assert int(out[0][i]) == unsigned
        assert int(out[1][i]) == wrap(signed, s)
        assert int(out[2][i]) == inserted


COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("kind", DTYPES)
@FEW
@given(data=st.data())
def test_compare_and_select(kind, data):
    dtype = DTYPES[kind]
    a, b, c = data.draw(ints(dtype)), data.draw(ints(dtype)), data.draw(predicates())
    text = "".join(f"setp.{op}.{kind} %o{i}, %a0, %a1;\n" for i, op in enumerate(COMPARE))
    bits = np.iinfo(dtype).bits
    text += f"setp.lt.and.{kind} %o6|%o7, %a0, %a1, %a2; setp.lt.or.{kind} %o8, %a0, %a1, !%a2;\n"
    text += f"setp.lt.xor.{kind} %o9, %a0, %a1, %a2; selp.b{bits} %o10, %a0, %a1, %a2; setp.lo.u{bits} %o11, %a0, %a1;"
    out = elementwise(text, [a, b, c], [bool] * 10 + [dtype, bool])
    less = a < b
    for i, op in enumerate(COMPARE):
        assert (out[i] == COMPARE[op](a, b)).all()
    assert (out[6] == (less & c)).all()
    assert (out[7] == (~less & c)).all()
    assert (out[8] == (less | ~c)).all()
    assert (out[9] == (less ^ c)).all()
    assert (out[10] == np.where(c, a, b)).all()
    unsigned = DTYPES[f"u{bits}"]
    assert (out[11] == (a.view(unsigned) < b.view(unsigned))).all()


def low24(x):
    """The low 24 bits sign-extended, as uint32."""
    return np.array([((v & 0xFFFFFF) ^ 0x800000) - 0x800000 & 0xFFFFFFFF for v in x.tolist()], np.uint32)


@FEW
@given(data=st.data())
def test_packing(data):
    a, b = data.draw(ints(np.uint32)), data.draw(ints(np.uint32))
    h, q = data.draw(ints(np.uint16)), data.draw(ints(np.uint64))
    text = """mov.b64 %o0, {%a0, %a1}; mov.b64 {%o1, %o2}, %a3; mov.b32 %o3, {%a2, %a2};
    mov.b32 {%o4, %o5}, %a0;
    mov.b64 {%o6, _}, %a3; mov.b64 %rd50, {%a1, 7}; mov.b64 {%r50, %o7}, %rd50; add.s64 %o8, %o0, %rd50;
    mov.b64 {%o9, %h20, %h21, %h22}, %a3; mov.b64 %o10, {%o9, %h20, %h21, %h22};
    slct.u32.s32 %o11, %a0, %a1, %a0; set.lt.u32.s32 %o12, %a0, %a1; sad.u32 %o13, %a0, %a1, 5;
    mul24.lo.s32 %o14, %a0, %a1; mad24.lo.u32 %o15, %a0, %a1, 9;"""
    u32, u64, u16 = np.uint32, np.uint64, np.uint16
    out = elementwise(
        text, [a, b, h, q], [u64, u32, u32, u32, u16, u16, u32, u32, u64, u16, u64, u32, u32, u32, u32, u32]
    )
    joined = a.astype(u64) | b.astype(u64) << u64(32)
    low, high = (q & u64(0xFFFFFFFF)).astype(u32), (q >> u64(32)).astype(u32)
    want = [
        joined,
        low,
        high,
        h.astype(u32) * u32(65537),
        (a & u32(65535)).astype(u16),
        (a >> u32(16)).astype(u16),
        low,
        np.full_like(a, 7),
        joined + (b.astype(u64) | u64(7 << 32)),
        (q & u64(65535)).astype(u16),
        q,
        np.where(a.view(np.int32) >= 0, a, b),
        np.where(a.view(np.int32) < b.view(np.int32), u32(0xFFFFFFFF), u32(0)),
        np.where(a < b, b - a, a - b) + u32(5),
        low24(a) * low24(b),
        (a & u32(0xFFFFFF)) * (b & u32(0xFFFFFF)) + u32(9),
    ]
    for i, (w, g) in enumerate(zip(want, out, strict=True)):
        assert (w == g).all(), i


@FEW
@given(data=st.data())
def test_byte_dot_product(data):
    a, b, c = (data.draw(ints(np.uint32)) for _ in range(3))
    (got,) = elementwise("dp4a.u32.u32 %o0, %a0, %a1, %a2;", [a, b, c], [np.uint32])
    for x, y, z, g in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        products = [(x >> k & 255) * (y >> k & 255) for k in (0, 8, 16, 24)]
        assert g == (sum(products) + z) & 0xFFFFFFFF
