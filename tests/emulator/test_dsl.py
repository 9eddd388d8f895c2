"""Kernels from the CuTe DSL: right results, every deleted barrier or wait found, bank conflicts counted."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from dsl_kernels import THREADS, TILE, Gemm, add_ptx, gemm_ptx

from fa2_cute.emulator import EmulatorError, Tensor, errors, launch, load

SCHEDULES = ["lowest", "reversed", 11]
SHARED_BYTES = Gemm(None, True).shared_bytes
HAZARDS = (errors.SharedRace, errors.PendingCopyRead, errors.UninitialisedSharedRead)


def test_vector_add():
    n = 1000
    x, y = np.random.default_rng(0).standard_normal((2, n)).astype(np.float32)
    out = np.full(n + 1, -1, np.float32)
    tensors = [
        Tensor(a, name, extents=(0,), writable=name == "out") for a, name in ((x, "x"), (y, "y"), (out[:n], "out"))
    ]
    launch(load(add_ptx()).kernel(), -(-n // THREADS), THREADS, tensors)
    assert (out[:n] == x + y).all()
    assert out[n] == -1


def operands(kind, m, n, k):
    torch.manual_seed(m + n + k)
    dtype = getattr(torch, kind)
    a = torch.randn(m, 2 * k)[:, :k].to(dtype)
    b = torch.randn(n, k).to(dtype)
    return a, b, torch.full((m, n), torch.nan)


def gemm(ptx, a, b, c, shared_bytes=SHARED_BYTES, **options):
    matrix = {"extents": (0, 1), "strides": (0,)}
    args = [Tensor(a, "a", **matrix), Tensor(b, "b", **matrix), Tensor(c, "c", writable=True, **matrix)]
    grid = (c.shape[0] // TILE, c.shape[1] // TILE)
    return launch(load(ptx).kernel(), grid, THREADS, args, shared_bytes=shared_bytes, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_gemm(kind, schedule):
    a, b, c = operands(kind, 128, 192, 256)
    stats = gemm(gemm_ptx(kind), a, b, c, schedule=schedule)
    want = a.double() @ b.double().T
    # 256 products, exact, and as many float32 additions: each off by at most half an ulp of the sum of
    # magnitudes
    bound = (a.double().abs() @ b.double().abs().T) * 256 * 2.0**-24
    assert ((c.double() - want).abs() <= bound).all()
    assert stats.mma == 128 * 192 * 256 // (16 * 8 * 16)


def synchronisation_lines():
    return [
        i
        for i, line in enumerate(gemm_ptx("bfloat16").split("\n"))
        if re.search(r"\tbar\.sync|wait_group|commit_group", line)
    ]


def test_every_deleted_synchronisation_is_found():
    lines = gemm_ptx("bfloat16").split("\n")
    places = synchronisation_lines()
    assert len(places) >= 4
    tensors = operands("bfloat16", 64, 64, 256)
    found = 0
    for place in places:
        broken = "\n".join("" if i == place else line for i, line in enumerate(lines))
        for schedule in SCHEDULES:
            with pytest.raises(HAZARDS) as caught:
                gemm(broken, *tensors, schedule=schedule)
            assert "dsl_kernels.py:" in str(caught.value)  # the kernel's own source line, from .loc
            found += 1
    assert found == len(places) * len(SCHEDULES)


def test_a_matrix_that_is_too_small():
    a, b, c = operands("bfloat16", 128, 64, 128)
    with pytest.raises(errors.OutOfBoundsGlobal, match="'a'"):
        gemm(gemm_ptx("bfloat16"), a[:64].clone(), b, c)
    with pytest.raises(errors.OutOfBoundsShared):
        gemm(gemm_ptx("bfloat16"), a, b, c, shared_bytes=SHARED_BYTES - 16)


def test_bank_conflicts_of_a_plain_and_a_swizzled_layout():
    """Rows of 128 bytes: the 8 rows of an ldmatrix matrix meet in the same 4 banks unless the layout is swizzled."""
    conflicts = {}
    for swizzled in (True, False):
        a, b, c = operands("bfloat16", 64, 64, 128)
        stats = gemm(gemm_ptx("bfloat16", swizzled), a, b, c, counters=True)
        loads = [line for line in stats.counters.lines.values() if line.text.startswith("ldmatrix")]
        assert sum(line.executions for line in loads) == 4 * (128 // 16) * 4  # warps, k steps, x4 loads of A and B
        assert all(line.ideal == 4 * line.executions and line.source[0].endswith("dsl_kernels.py") for line in loads)
        conflicts[swizzled] = [line.wavefronts / line.ideal for line in loads]
        assert stats.counters.read == {"a": 64 * 128 * 2, "b": 64 * 128 * 2}
        assert stats.counters.written == {"c": 64 * 64 * 4}
        copies = [line for line in stats.counters.lines.values() if line.text.startswith("cp.async")]
        assert sum(line.sectors for line in copies) == 2 * 64 * 128 * 2 // 32
    assert set(conflicts[True]) == {1.0}
    assert set(conflicts[False]) == {8.0}


def test_errors_are_the_emulators_own():
    a, b, c = operands("bfloat16", 64, 64, 64)
    with pytest.raises(EmulatorError, match="shared"):
        gemm(gemm_ptx("bfloat16").replace("cp.async.wait_group", "// cp.async.wait_group"), a, b, c)
