"""cvt in every direction, against rationals, numpy and torch's 8-bit formats."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ptx_operands import FEW, bits16, f32s, ints
from ptx_support import FORMATS, elementwise, round_exact, same, value16

INTS = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32,
    "u64": np.uint64, "s64": np.int64,
}  # fmt: skip


def container(dtype):
    """The register that holds an 8-bit value is 16 bits wide."""
    return np.uint16 if np.dtype(dtype).itemsize == 1 else dtype


@pytest.mark.parametrize("source", INTS)
@FEW
@given(data=st.data())
def test_between_integers(source, data):
    wide = np.dtype(f"u{container(INTS[source])().itemsize}")
    raw = data.draw(ints(wide))
    values = raw.astype(np.uint64).tolist()
    bits = int(source[1:])
    if source[0] == "s":
        values = [((v & (1 << bits) - 1) ^ (1 << bits - 1)) - (1 << bits - 1) for v in values]
    else:
        values = [v & (1 << bits) - 1 for v in values]
    text = "".join(f"cvt.{t}.{source} %o{i}, %a0;\n" for i, t in enumerate(INTS))
    text += "".join(f"cvt.sat.{t}.{source} %o{i + 8}, %a0;\n" for i, t in enumerate(INTS))
    outs = elementwise(text, [raw], [container(d) for d in INTS.values()] * 2)
    for i, (name, dtype) in enumerate([*INTS.items()] * 2):
        info = np.iinfo(dtype)
        for v, g in zip(values, outs[i].tolist(), strict=True):
            w = min(max(v, info.min), info.max) if i >= 8 else v
            register = np.iinfo(container(dtype)).bits
            small = (w & (1 << info.bits) - 1) - ((1 << info.bits) if info.min < 0 and w >> info.bits - 1 & 1 else 0)
            assert g & (1 << register) - 1 == small & (1 << register) - 1, (name, v)


ROUND = {"rni": lambda x: round(x), "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("mode", ROUND)
@FEW
@given(a=f32s())
def test_float_to_integer(mode, a):
    kinds = ["u32", "s32", "u64", "s64", "u16", "s16"]
    text = "".join(f"cvt.{mode}.{k}.f32 %o{i}, %a0;\n" for i, k in enumerate(kinds))
    text += f"cvt.{mode}.f32.f32 %o6, %a0;"
    outs = elementwise(text, [a], [INTS[k] for k in kinds] + [np.float32])
    for k, out in zip(kinds, outs, strict=False):
        info = np.iinfo(INTS[k])
        for x, g in zip(a.tolist(), out.tolist(), strict=True):
            if math.isnan(x):
                want = 0
            elif math.isinf(x):
                want = info.max if x > 0 else info.min
            else:
                want = min(max(ROUND[mode](x), info.min), info.max)
            assert g == want, (k, x)
    for x, g in zip(a.tolist(), outs[6].tolist(), strict=True):
        if math.isfinite(x):
            assert g == float(np.float32(ROUND[mode](x))) if abs(x) < 2**60 else g == x


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@FEW
@given(data=st.data())
def test_integer_to_float(mode, data):
    kinds = ["u32", "s32", "u64", "s64"]
    inputs = [data.draw(ints(INTS[k])) for k in kinds]
    text = "".join(f"cvt.{mode}.f32.{k} %o{i}, %a{i};\n" for i, k in enumerate(kinds))
    outs = elementwise(text, inputs, [np.float32] * 4)
    for values, out in zip(inputs, outs, strict=True):
        for v, g in zip(values.tolist(), out.tolist(), strict=True):
            assert g == round_exact(Fraction(v), "f32", mode)


def narrowed(x, fmt, mode, relu=False, finite=False):
    """A float in a narrower format, or NaN."""
    if math.isnan(x):
        return math.nan
    r = x if math.isinf(x) else math.copysign(round_exact(Fraction(x), fmt, mode), x)
    bits, _, high = FORMATS[fmt]
    if finite and math.isinf(r):
        r = math.copysign((2 - 2.0 ** (1 - bits)) * 2.0**high, r)
    return 0.0 if relu and r <= 0 else r


def agree(bits, fmt, want):
    got = value16(np.ascontiguousarray(bits.astype(np.uint16)), fmt)
    assert same(got, np.array(want, np.float64)), list(zip(got, want, strict=True))
    assert (bits[np.isnan(got)] == 0x7FFF).all()  # canonical


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@FEW
@given(a=f32s(), b=f32s())
def test_narrowing(fmt, a, b):
    text = f"""cvt.rn.{fmt}.f32 %o0, %a0; cvt.rz.{fmt}.f32 %o1, %a0; cvt.rn.relu.{fmt}.f32 %o2, %a0;
    cvt.rn.{fmt}x2.f32 %o3, %a0, %a1; cvt.rz.{fmt}x2.f32 %o4, %a0, %a1; cvt.rn.relu.{fmt}x2.f32 %o5, %a0, %a1;
    cvt.rn.satfinite.{fmt}x2.f32 %o6, %a0, %a1;"""
    out = elementwise(text, [a, b], [np.uint16] * 3 + [np.uint32] * 4)
    x, y = a.tolist(), b.tolist()
    agree(out[0], fmt, [narrowed(v, fmt, "rn") for v in x])
    agree(out[1], fmt, [narrowed(v, fmt, "rz") for v in x])
    agree(out[2], fmt, [narrowed(v, fmt, "rn", relu=True) for v in x])
    for i, options in ((3, {}), (4, {"mode": "rz"}), (5, {"relu": True}), (6, {"finite": True})):
        mode = options.pop("mode", "rn")
        agree(out[i] >> np.uint32(16), fmt, [narrowed(v, fmt, mode, **options) for v in x])
        agree(out[i] & np.uint32(0xFFFF), fmt, [narrowed(v, fmt, mode, **options) for v in y])


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@FEW
@given(a=bits16())
def test_widening(fmt, a):
    (out,) = elementwise(f"cvt.f32.{fmt} %o0, %a0;", [a], [np.float32])
    with np.errstate(invalid="ignore"):  # NaN payloads
        assert same(out, value16(a, fmt).astype(np.float32))


FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("fmt", FP8)
def test_every_fp8_code_widens(fmt):
    codes = np.arange(256, dtype=np.uint16) | np.arange(255, -1, -1, dtype=np.uint16) << 8
    a, b = elementwise(f"cvt.rn.f16x2.{fmt}x2 %o0, %a0; cvt.rn.bf16x2.{fmt}x2 %o1, %a0;", [codes], [np.uint32] * 2)
    want = torch.arange(256, dtype=torch.uint8).view(FP8[fmt]).double().numpy()
    for out, kind in ((a, "f16"), (b, "bf16")):
        assert same(value16((out & 0xFFFF).astype(np.uint16), kind), want)
        assert same(value16((out >> 16).astype(np.uint16), kind), want[::-1].copy())


@pytest.mark.parametrize("fmt", FP8)
@FEW
@given(a=f32s(), b=f32s(), h=bits16())
def test_fp8_narrowing(fmt, a, b, h):
    text = f"cvt.rn.satfinite.{fmt}x2.f32 %o0, %a0, %a1; mov.b32 %r60, {{%a2, %a2}}; "
    text += f"cvt.rn.satfinite.{fmt}x2.f16x2 %o1, %r60; cvt.rn.satfinite.relu.{fmt}x2.f32 %o2, %a0, %a1;"
    out = elementwise(text, [a, b, h], [np.uint16] * 3)
    finite = torch.finfo(FP8[fmt]).max

    def reference(x, relu=False):
        t = torch.from_numpy(np.ascontiguousarray(x)).float().clamp(-finite, finite)
        t = torch.where(t <= 0, 0.0, t) if relu else t
        return t.to(FP8[fmt]).view(torch.uint8).numpy()

    for got, want_from, relu in (
        (out[0] >> 8, a, 0),
        (out[0] & 255, b, 0),
        (out[1] & 255, h.view(np.float16), 0),
        (out[2] >> 8, a, 1),
    ):
        nan = np.isnan(want_from)
        assert (got[~nan] == reference(want_from, relu)[~nan]).all()
        assert (got[nan] == 0x7F).all()


@FEW
@given(a=f32s())
def test_double_precision(a):
    text = (
        "cvt.f64.f32 %o0, %a0; cvt.rn.f32.f64 %o1, %o0; cvt.rzi.s32.f64 %o2, %o0; mul.f64 %rd60, "
        "%o0, 0d3FF0000010000001;"
    )
    text += "cvt.rn.f32.f64 %o3, %rd60; cvt.rz.f32.f64 %o4, %rd60;"
    out = elementwise(text, [a], [np.float64, np.float32, np.int32, np.float32, np.float32])
    assert same(out[1], a)
    factor = np.array([0x3FF0000010000001], np.uint64).view(np.float64)[0]
    for x, rn, rz in zip(a.tolist(), out[3].tolist(), out[4].tolist(), strict=True):
        if math.isfinite(x):
            assert rn == round_exact(Fraction(x * factor), "f32")
            assert rz == round_exact(Fraction(x * factor), "f32", "rz")
