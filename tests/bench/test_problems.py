"""The problems: read from text, enough of them, inputs past the L2."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute.bench import problems
from fa2_cute.explore.space import Workload


def test_the_default_prefill_problems():
    cells = problems.prefill_cells()
    plain = {(c.head_dim, c.batch, c.query_len) for c in cells if c.kv_heads == c.heads}
    for n in (512, 1024, 2048, 4096, 8192, 16_384):
        assert {(128, 16_384 // n, n), (64, 16_384 // n, n)} <= plain
    assert {(d, 16_384 // n, n) for d in (96, 192, 256) for n in (2048, 8192)} <= plain
    grouped = {(c.batch, c.query_len, c.key_len, c.heads, c.kv_heads, c.causal) for c in cells if c.kv_heads < c.heads}
    assert grouped == {
        (batch, q, k, 32, 8, causal) for batch, q, k in ((4, 4096, 4096), (1, 512, 8192)) for causal in (False, True)
    }
    assert len(problems.prefill_cells(quick=True)) < len(cells) / 2


def test_the_default_decode_problems():
    assert {(b, n) for b in (1, 4, 16, 64) for n in (1024, 8192, 32_768)} <= set(problems.decode_cells())
    assert set(problems.decode_cells(quick=True)) <= set(problems.decode_cells())


@given(st.integers(1, 9), st.integers(1, 99_999), st.integers(1, 64), st.integers(1, 256))
def test_shapes_are_read(batch, length, heads, head_dim):
    full, causal = problems.parse_shape(f"{batch}x{length}x{heads}x{head_dim}", None, None, "float16")
    assert full == Workload(head_dim, length, length, False, batch, heads, heads, "float16")
    assert causal == Workload(head_dim, length, length, True, batch, heads, heads, "float16")


@pytest.mark.parametrize("text", ["", "1x2x3", "0x1x1x1", "1x2x3x4x5", "axbxcxd", "1x2x3x-4", "1 x 2 x 3 x 4"])
def test_other_shapes_are_refused(text):
    with pytest.raises(ValueError, match="--shape: got"):
        problems.parse_shape(text, None, None, "bfloat16")


@pytest.mark.parametrize("text", ["", "1", "0x1", "1x2x3", "axb"])
def test_other_cells_are_refused(text):
    with pytest.raises(ValueError, match="--cell: got"):
        problems.parse_cell(text)


def test_kv_heads_must_divide():
    with pytest.raises(ValueError, match="kv_heads"):
        problems.parse_shape("1x2x6x64", 4, None, "bfloat16")
    with pytest.raises(ValueError, match="kv_heads"):
        problems.Decode(1, 8, 6, 4)


def test_titles():
    assert problems.title(Workload(128, 512, 8192, True, 1, 32, 8)) == "1 x 512 on 8192 x 32/8 x 128"
    assert problems.title(Workload(64, 512, 512, False, 2, 4, 4)) == "2 x 512 x 4 x 64"
    assert problems.parse_cell("16x8192") == (16, 8192)
    assert problems.Decode(16, 8192).cache_bytes == 2 * 16 * 8192 * 8 * 128 * 2


@given(st.integers(0, 4000), st.integers(1, 1000))
def test_sets_together_pass_the_l2_twice(l2, elements):
    sets = problems.rotated(lambda: (torch.zeros(elements, dtype=torch.uint8),), l2)
    assert len(sets) == min(problems.MOST_SETS, max(1, -(-2 * l2 // elements)))
    assert len({tensors[0].data_ptr() for tensors in sets}) == len(sets)
