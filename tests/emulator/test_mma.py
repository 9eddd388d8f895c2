"""mma.sync, ldmatrix and stmatrix against float64 products of matrices laid out by the rules of the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ptx_operands import FEW
from ptx_support import run

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fragment(lane, register, element, per_register, row_blocks):
    """(row, column) of one element of an A-like fragment: PTX ISA figures, lane = 4 * row + column group."""
    row = lane // 4 + 8 * (register % row_blocks)
    column = lane % 4 * per_register + element + 4 * per_register * (register // row_blocks)
    return row, column


def registers(matrix_bytes, itemsize, row_blocks):
    """Registers (lanes, count) of a row-major matrix given as its element bytes (rows, columns, itemsize)."""
    rows, columns = matrix_bytes.shape[:2]
    per = 4 // itemsize
    count = rows * columns // (32 * per)
    out = np.zeros((32, count, per, itemsize), np.uint8)
    for lane in range(32):
        for r in range(count):
            for e in range(per):
                out[lane, r, e] = matrix_bytes[fragment(lane, r, e, per, row_blocks)]
    return out.reshape(32, count * 4).view(np.uint32)


def random_matrix(rng, shape, kind, scale):
    values = torch.from_numpy(rng.standard_normal(shape) * scale).to(TORCH[kind])
    raw = values.contiguous().view(torch.uint8).numpy().reshape(*shape, values.element_size())
    return values.double().numpy(), raw


CASES = [
    ("m16n8k16", "bf16", "bf16", "f32"),
    ("m16n8k16", "f16", "f16", "f32"),
    ("m16n8k8", "bf16", "bf16", "f32"),
    ("m16n8k8", "f16", "f16", "f32"),
    ("m16n8k16", "f16", "f16", "f16"),
    ("m16n8k32", "e4m3", "e4m3", "f32"),
    ("m16n8k32", "e5m2", "e4m3", "f32"),
    ("m16n8k32", "e4m3", "e5m2", "f16"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: ".".join(c))
@FEW
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1.0, 1e-3, 30.0]))
def test_mma(case, seed, scale):
    shape, a_kind, b_kind, d_kind = case
    k = int(shape.split("k")[1])
    rng = np.random.default_rng(seed)
    a, a_raw = random_matrix(rng, (16, k), a_kind, scale)
    bt, b_raw = random_matrix(rng, (8, k), b_kind, scale)  # B is stored by columns
    c_kind = np.float32 if d_kind == "f32" else np.float16
    c = rng.standard_normal((16, 8)).astype(c_kind)
    size = a_raw.shape[2]
    ra, rb = registers(a_raw, size, 2), registers(b_raw, size, 1)
    c_bytes = c.view(np.uint8).reshape(16, 8, c.itemsize)
    if d_kind == "f32":  # lane 4g + i: columns 2i, 2i + 1 of row g, then of row g + 8
        rc = np.stack([np.stack([c[g // 4 + 8 * h, g % 4 * 2 : g % 4 * 2 + 2] for h in (0, 1)]) for g in range(32)])
        rc = rc.reshape(32, 4).view(np.uint32)
    else:
        rc = registers(c_bytes, 2, 2)
    out = np.zeros_like(rc)
    names = {n: ", ".join(f"%r{base + i}" for i in range(x.shape[1])) for n, base, x in
             (("a", 10, ra), ("b", 20, rb), ("c", 30, rc), ("d", 40, rc))}  # fmt: skip
    body = "mov.u32 %r1, %laneid;\n"
    for i, (base, x) in enumerate(((10, ra), (20, rb), (30, rc))):
        body += f"mad.wide.u32 %rd10, %r1, {4 * x.shape[1]}, %rd{i};\n"
        body += "".join(f"ld.global.u32 %r{base + j}, [%rd10+{4 * j}];\n" for j in range(x.shape[1]))
    spelled = ".kind::f8f6f4" if size == 1 and seed % 2 else ""
    body += f"mma.sync.aligned{spelled}.{shape}.row.col.{d_kind}.{a_kind}.{b_kind}.{d_kind} "
    body += f"{{{names['d']}}}, {{{names['a']}}}, {{{names['b']}}}, {{{names['c']}}};\n"
    body += f"mad.wide.u32 %rd10, %r1, {4 * rc.shape[1]}, %rd3;\n"
    body += "".join(f"st.global.u32 [%rd10+{4 * j}], %r{40 + j};\n" for j in range(rc.shape[1]))
    stats = run(body, [ra, rb, rc, out])
    assert stats.mma == 1
    if d_kind == "f32":
        got = np.zeros((16, 8), np.float32)
        for lane in range(32):
            for r in range(4):
                got[lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2] = out[lane, r].view(np.float32)
    else:
        got = np.zeros((16, 8), np.float16)
        halves = out.view(np.float16).reshape(32, 2, 2)
        for lane in range(32):
            for r in range(2):
                got[lane // 4 + 8 * r, lane % 4 * 2 : lane % 4 * 2 + 2] = halves[lane, r]
    want = a @ bt.T + c.astype(np.float64)
    # k + 1 float32 additions, each off by at most half an ulp of the sum of magnitudes; then the result's
    # own rounding
    bound = (np.abs(a) @ np.abs(bt).T + np.abs(c.astype(np.float64))) * (k + 1) * 2.0**-24
    bound += np.abs(want) * (2.0**-11 if d_kind == "f16" else 2.0**-24) + (2.0**-25 if d_kind == "f16" else 2.0**-149)
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


def test_runs_of_mma_equal_single_ones():
    """Grouping must not change results: shared fragments, chains and in-place accumulators, in one block or apart."""
    rng = np.random.default_rng(3)
    data = rng.standard_normal((40, 32, 2)).astype(np.float16).view(np.uint32).reshape(40, 32)
    data[16:] = rng.standard_normal((24, 32)).astype(np.float32).view(np.uint32)

    def text(separator):
        code = "mov.u32 %r1, %laneid; mul.wide.u32 %rd10, %r1, 4; add.u64 %rd11, %rd0, %rd10;\n"
        code += "".join(f"ld.global.u32 %r{10 + i}, [%rd11+{128 * i}];\n" for i in range(40))
        a = [f"{{%r{10 + 4 * i}, %r{11 + 4 * i}, %r{12 + 4 * i}, %r{13 + 4 * i}}}" for i in range(2)]
        b = [f"{{%r{18 + 2 * i}, %r{19 + 2 * i}}}" for i in range(3)]
        acc = [f"{{{', '.join(f'%r{26 + 4 * i + j}' for j in range(4))}}}" for i in range(6)]
        order = [
            (0, 0, 0, 0),
            (0, 1, 1, 1),
            (1, 0, 2, 2),
            (1, 1, 3, 3),
            (1, 2, 4, 4),
            (0, 2, 5, 5),
            (0, 0, 1, 1),
            (1, 1, 1, 1),
            (0, 2, 2, 3),
            (1, 0, 3, 2),
            (0, 0, 4, 4),
            (0, 1, 4, 5),
        ]
        for x, y, d, c in order:
            code += (
                f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {acc[d]}, {a[x]}, {b[y]}, {acc[c]};\n{separator}\n"
            )
        code += "add.u64 %rd12, %rd1, %rd10;\n"
        return code + "".join(f"st.global.u32 [%rd12+{128 * i}], %r{26 + i};\n" for i in range(24))

    together, apart = np.zeros((24, 32), np.uint32), np.zeros((24, 32), np.uint32)
    run(text(""), [data, together])
    run(text("bar.sync 0;"), [data, apart])
    assert np.abs(together.view(np.float32)).max() > 1
    np.testing.assert_allclose(together.view(np.float32), apart.view(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count, trans):
    rng = np.random.default_rng(count)
    matrices = rng.integers(0, 65536, (count, 8, 8)).astype(np.uint16)
    flat = matrices.reshape(-1).copy()
    out, back = np.zeros((count, 32), np.uint32), np.zeros_like(flat)
    suffix = ".trans" if trans else ""
    regs = ", ".join(f"%r{10 + i}" for i in range(count))
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.ge.u32 %p1, %r1, {8 * count};
    mad.lo.u32 %r3, %r1, 16, %r2; mad.wide.u32 %rd10, %r1, 16, %rd0;
    @%p1 bra SKIP; cp.async.cg.shared.global [%r3], [%rd10], 16; SKIP: cp.async.wait_all; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {{{regs}}}, [%r3];
    stmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 [%r3+1024], {{{regs}}}; bar.sync 0;
    mad.wide.u32 %rd11, %r1, 4, %rd1; mad.wide.u32 %rd12, %r1, 16, %rd2;\n"""
    body += "".join(f"st.global.u32 [%rd11+{128 * i}], %r{10 + i};\n" for i in range(count))
    body += (
        "@%p1 ret; ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r3+1024]; st.global.v4.u32 [%rd12], "
        "{%r20, %r21, %r22, %r23};"
    )
    run(body, [flat, out, back], shared=2048, before=".extern .shared .align 16 .b8 smem[];\n")
    want = matrices.transpose(0, 2, 1) if trans else matrices
    assert (out.view(np.uint16).reshape(count, 8, 8) == want).all()
    assert (back == flat).all()
