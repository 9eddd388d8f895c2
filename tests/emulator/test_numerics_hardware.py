"""numerics="sm_90" against values recorded on an H200 (data/README.md), and its MMA rule in exact rationals."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_support import elementwise, run, same, value16
from single_instructions import finite_operands, mma_code

from fa2_cute.emulator import errors, special_functions

RECORDED = np.load(Path(__file__).parent / "data" / "sm_90.npz")
FORMS = sorted({key.rsplit(".", 1)[0].removeprefix("mma.") for key in RECORDED if key.startswith("mma.")})
FUNCTIONS = [key for key in RECORDED if key.endswith(".f32")]
EVERY = 509  # of the 2^23 fractions


def mma(form: str, a, b, c, numerics="sm_90") -> np.ndarray:
    """One mma.sync in every warp. Operands (warps, 32, registers) uint32, result like c."""
    out = np.zeros_like(c)
    code = mma_code(form, [x.shape[2] for x in (a, b, c, out)])
    run(code, [np.ascontiguousarray(x) for x in (a, b, c)] + [out], grid=len(a), numerics=numerics)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_mma_has_the_recorded_bits(form):
    a, b, c, d = (RECORDED[f"mma.{form}.{x}"] for x in "abcd")
    assert (mma(form, a, b, c) == d).all()


def test_the_default_has_other_bits():
    """The recorded values can tell the two numerics apart."""
    form = "m16n8k16.bf16.bf16.f32"
    a, b, c, d = (RECORDED[f"mma.{form}.{x}"][:2] for x in "abcd")  # normal and scaled operands
    assert 0.1 < (mma(form, a, b, c, "ieee") == d).mean() < 0.9


def cut(value: Fraction, quantum: Fraction) -> Fraction:
    """Towards zero to a multiple of ``quantum``."""
    steps = floor(abs(value) / quantum) * quantum
    return -steps if value < 0 else steps


def exponent(value: float, least: int) -> int:
    """Of a nonzero number, not below ``least``."""
    return max(int(np.frexp(value)[1]) - 1, least)


def by_the_rule(a, b, c, least: int) -> float:
    """One element of D, finite operands: the three steps of ``tensor_core`` in rationals."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
    sizes = [exponent(x, least) + exponent(y, least) for x, y in pairs] + ([exponent(c, -126)] if c else [])
    if not sizes:
        return 0.0
    quantum = Fraction(2) ** (max(sizes) - 25)
    total = sum((cut(Fraction(x) * Fraction(y), quantum) for x, y in pairs), cut(Fraction(c), quantum))
    if total == 0:
        return 0.0
    size = exponent(float(total), -126)  # float64 holds the sum: 32 bits
    result = abs(cut(total, Fraction(2) ** (size - 23)))
    return float(np.copysign(float(result) if result < 2**128 else np.inf, float(total)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["bf16", "f16"]), st.integers(0, 2**32 - 1), st.sampled_from([0, 2, 6, 30]))
def test_mma_follows_the_rule(kind, seed, spread):
    """Finite operands of any size."""
    rng = np.random.default_rng(seed)
    form = f"m16n8k16.{kind}.{kind}.f32"
    a, b, c = finite_operands(form, rng, 2, spread)
    got = mma(form, a, b, c).view(np.float32)
    x, y = (value16(v.view(np.uint16).reshape(-1), kind).reshape(2, 32, -1) for v in (a, b))
    # PTX ISA, fragments of m16n8k16. A, register r, element e: row g + 8 (r mod 2), column 2 i + e + 8 (r div 2)
    order = [(k, i, e) for k in (0, 1) for i in range(4) for e in (0, 1)]
    for warp in [0] * 12 + [1] * 12:
        lane, r = rng.integers(32), rng.integers(4)
        row, column = lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2
        left = [x[warp, row % 8 * 4 + i, 2 * (row // 8 + 2 * k) + e] for k, i, e in order]
        right = [y[warp, column * 4 + i, 2 * k + e] for k, i, e in order]
        addend = float(c[warp, lane, r].view(np.float32))
        want = by_the_rule(left, right, addend, -126 if kind == "bf16" else -14)
        assert same(got[warp, lane, r], np.float32(want))


def test_runs_of_mma_are_as_single_ones():
    """Shared fragments and chained accumulators: bit for bit the same grouped and apart."""
    rng = np.random.default_rng(1)
    data = rng.standard_normal((20, 64)).astype(np.float16).view(np.uint32).reshape(20, 32)
    data[12:] = rng.standard_normal((8, 32)).astype(np.float32).view(np.uint32)

    def text(separator):
        code = "mov.u32 %r1, %laneid; mul.wide.u32 %rd10, %r1, 4; add.u64 %rd11, %rd0, %rd10; "
        code += "".join(f"ld.global.b32 %r{10 + i}, [%rd11+{128 * i}];\n" for i in range(20))
        quad = lambda first: f"{{%r{first}, %r{first + 1}, %r{first + 2}, %r{first + 3}}}"  # noqa: E731
        for a, b, d in ((10, 18, 22), (14, 20, 26), (10, 20, 22), (14, 18, 26)):
            code += f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {quad(d)}, {quad(a)}, "
            code += f"{{%r{b}, %r{b + 1}}}, {quad(d)};\n{separator}\n"
        code += "add.u64 %rd12, %rd1, %rd10;\n"
        return code + "".join(f"st.global.b32 [%rd12+{128 * i}], %r{22 + i};\n" for i in range(8))

    together, apart = np.zeros((8, 32), np.uint32), np.zeros((8, 32), np.uint32)
    run(text(""), [data, together], numerics="sm_90")
    run(text("bar.sync 0;"), [data, apart], numerics="sm_90")
    assert (together == apart).all()
    assert (together != data[12:]).mean() > 0.9


@pytest.mark.parametrize("instruction", FUNCTIONS)
def test_functions_have_the_recorded_bits(instruction):
    """Edges, random bits and ordinary numbers, with .ftz and without."""
    (got,) = elementwise(f"{instruction} %o0, %a0;", [RECORDED["x"]], [np.uint32], numerics="sm_90")
    assert (got == RECORDED[instruction]).all()


@pytest.mark.parametrize(
    ("key", "function", "first", "step", "exact"),
    [
        ("ex2.below_zero", "ex2", 0.0, -(2.0**-23), np.exp2),
        ("rcp.one_to_two", "rcp", 1.0, 2.0**-23, np.reciprocal),
        ("lg2.one_to_two", "lg2", 1.0, 2.0**-23, np.log2),
        ("lg2.half_to_one", "lg2", 0.5, 2.0**-24, np.log2),
    ],
)
def test_functions_over_all_segments(key, function, first, step, exact):
    errors_in_ulp = RECORDED[key].astype(np.int64)
    x = first + np.arange(len(errors_in_ulp)) * (EVERY * step)
    rounded = exact(x).astype(np.float32).view(np.int32)
    (got,) = elementwise(f"{function}.approx.ftz.f32 %o0, %a0;", [x.astype(np.float32)], [np.int32], numerics="sm_90")
    known = np.abs(errors_in_ulp) < 127
    assert known.mean() > 0.98
    assert ((got - rounded)[known] == errors_in_ulp[known]).all()
    assert (np.abs(got - rounded)[~known] >= 127).all()
    assert (errors_in_ulp != 0).mean() > 0.05  # they are not the rounded values


def test_the_squarer_only_loses():
    """Of t in [0, 1) it gives at most t^2, and less by no more than all that it drops."""
    squares = special_functions.squares()
    t = np.arange(len(squares)) / len(squares)
    lost = t**2 - squares / 2.0**special_functions.SQUARE_BITS
    dropped = sum(2.0 ** -(2 * i) for i in range(8, 18)) + sum(
        2.0 ** -(i + j - 1) for i in range(1, 18) for j in range(i + 1, 18) if i + j - 1 > 15
    )
    assert lost.min() >= 0
    assert lost.max() == lost[-1] == dropped


@pytest.mark.parametrize(
    "instruction",
    [
        "tanh.approx.f32",
        "rsqrt.approx.ftz.f32",
        "sqrt.approx.f32",
        "sin.approx.f32",
        "cos.approx.f32",
        "ex2.approx.f16",
    ],
)
def test_functions_without_a_model_are_refused(instruction):
    x = np.ones(4, np.uint16 if instruction.endswith("f16") else np.uint32)
    with pytest.raises(errors.UnknownInstruction, match="sm_90"):
        elementwise(f"{instruction} %o0, %a0;", [x], [x.dtype], numerics="sm_90")


def test_divisions_without_a_model_are_refused():
    x = np.ones(4, np.float32)
    for instruction in ("div.approx.f32", "div.full.f32"):
        with pytest.raises(errors.UnknownInstruction, match="sm_90"):
            elementwise(f"{instruction} %o0, %a0, %a0;", [x], [np.float32], numerics="sm_90")
    (got,) = elementwise("div.rn.f32 %o0, %a0, %a0;", [x], [np.float32], numerics="sm_90")
    assert (got == 1).all()


def test_mma_without_a_model_is_refused():
    a, b, c = (np.zeros((1, 32, n), np.uint32) for n in (4, 2, 2))
    with pytest.raises(errors.UnknownInstruction, match="sm_90"):
        mma("m16n8k16.f16.f16.f16", a, b, c)


def test_unknown_numerics_are_refused():
    with pytest.raises(errors.ArgumentError, match="'ieee', 'sm_90'"):
        run("mov.u32 %r1, 0;", [np.zeros(1, np.uint32)], numerics="sm_80")
