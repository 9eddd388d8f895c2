"""Helpers of the emulator tests: one-warp (or more) kernels made around a PTX snippet, and an exact rounding
reference."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fa2_cute.emulator import Tensor, launch, load

WIDTH_REG = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}
HEADER = ".version 8.8\n.target sm_120a\n.address_size 64\n"


def aligned(array: np.ndarray, to: int = 32) -> np.ndarray:
    """A copy whose first byte is at a multiple of ``to``."""
    raw = np.zeros(array.nbytes + to, np.uint8)
    start = -raw.__array_interface__["data"][0] % to
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def kernel_text(body: str, params: int, declarations: str = "", before: str = "") -> str:
    """A kernel with ``params`` pointer parameters p0, p1, ... already in %rd0, %rd1, ..."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(params))
    return f"""{HEADER}{before}
.visible .entry k({names})
{{
.reg .pred %p<32>;
.reg .b16 %h<64>;
.reg .b32 %r<128>;
.reg .b64 %rd<128>;
{declarations}
{loads}
{body}
ret;
}}
"""


def run(body, tensors, block=32, grid=1, shared=0, declarations="", before="", **options):
    """Runs a snippet on writable tensors (numpy arrays); %rd0.. hold their addresses. Returns Stats."""
    text = kernel_text(body, len(tensors), declarations, before)
    args = [t if isinstance(t, Tensor) else Tensor(t, f"t{i}", writable=True) for i, t in enumerate(tensors)]
    return launch(load(text).kernel(), grid, block, args, shared_bytes=shared, **options)


def elementwise(snippet, inputs, out_dtypes, **options):
    """Runs ``snippet`` once a thread.

    Input i is in %a{i} and output j is taken from %o{j}, in registers of their width (bool: a predicate).
    Inputs are
    equal-length arrays; returns the outputs.
    """
    inputs = [np.ascontiguousarray(x) for x in inputs]
    n = len(inputs[0])
    raw = [x.astype(np.uint8) if x.dtype == bool else x for x in inputs]
    outs = [np.zeros(n, np.uint8 if d is bool else d) for d in out_dtypes]
    decl, code = "", "mov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\nmad.lo.u32 %r0, %r1, 128, %r0;\n"
    code += f"setp.ge.u32 %p31, %r0, {n};\n@%p31 exit;\n"
    for i, x in enumerate(inputs):
        width = raw[i].dtype.itemsize
        code += f"mad.wide.u32 %rd100, %r0, {width}, %rd{i};\n"
        decl += f".reg .{WIDTH_REG[width]} %a{i};\n" if x.dtype != bool else f".reg .pred %a{i};\n"
        if x.dtype == bool:
            code += f"ld.global.u8 %h60, [%rd100];\nsetp.ne.u16 %a{i}, %h60, 0;\n"
        else:
            code += f"ld.global.b{8 * width} %a{i}, [%rd100];\n"
    for j, d in enumerate(out_dtypes):
        decl += f".reg .pred %o{j};\n" if d is bool else f".reg .{WIDTH_REG[np.dtype(d).itemsize]} %o{j};\n"
    code += snippet + "\n"
    for j, d in enumerate(out_dtypes):
        width = outs[j].dtype.itemsize
        code += f"mad.wide.u32 %rd100, %r0, {width}, %rd{len(inputs) + j};\n"
        if d is bool:
            code += f"selp.u16 %h60, 1, 0, %o{j};\nst.global.u8 [%rd100], %h60;\n"
        else:
            code += f"st.global.b{8 * width} [%rd100], %o{j};\n"
    tensors = [Tensor(x, f"in{i}") for i, x in enumerate(raw)]
    tensors += [Tensor(x, f"out{j}", writable=True) for j, x in enumerate(outs)]
    run(code, tensors, block=128, grid=-(-n // 128), declarations=decl, **options)
    return [o.astype(bool) if d is bool else o for o, d in zip(outs, out_dtypes, strict=True)]


# ---- exact reference ---------------------------------------------------------------------------------------
# name: (significand bits with the hidden one, smallest normal exponent, largest exponent)
FORMATS = {"f32": (24, -126, 127), "f16": (11, -14, 15), "bf16": (8, -126, 127)}


def round_exact(value: Fraction, fmt: str, mode: str = "rn", negative_zero: bool = False) -> float:
    """``value`` rounded once to a format (subnormals kept), computed with rationals only."""
    bits, low, high = FORMATS[fmt]
    if value == 0:
        return -0.0 if negative_zero else 0.0
    sign, v = (-1 if value < 0 else 1), abs(value)
    exponent = v.numerator.bit_length() - v.denominator.bit_length()
    if Fraction(2) ** exponent > v:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, low) - bits + 1)
    steps, rest = divmod(v, quantum)
    up = {
        "rn": rest * 2 > quantum or (rest * 2 == quantum and steps % 2 == 1),
        "rz": False,
        "rm": rest > 0 and sign < 0,
        "rp": rest > 0 and sign > 0,
    }[mode]
    v = (steps + up) * quantum
    largest = (2 - Fraction(2) ** (1 - bits)) * Fraction(2) ** high
    if v > largest:
        to_infinity = mode == "rn" or (mode == "rm" and sign < 0) or (mode == "rp" and sign > 0)
        return sign * (math.inf if to_infinity else float(largest))
    return sign * float(v)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, except that any NaN equals any NaN."""
    a, b = np.asarray(a), np.asarray(b)
    nan = np.isnan(a) & np.isnan(b)
    return bool(((a.view(f"u{a.dtype.itemsize}") == b.view(f"u{b.dtype.itemsize}")) | nan).all())


def value16(bits: np.ndarray, fmt: str) -> np.ndarray:
    """f16 or bf16 bit patterns as float64."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        if fmt == "f16":
            return bits.view(np.float16).astype(np.float64)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
