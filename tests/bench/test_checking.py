"""What the check of a timed result lets through, and what it does not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_cute import reference
from fa2_cute.bench import checking, peers


@pytest.fixture(autouse=True, scope="module")
def _fewer_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "ROWS", 24)
        yield


def tensors(batch=2, query_len=130, key_len=200, heads=4, kv_heads=2, dim=32, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, query_len, heads, dim), *[(batch, key_len, kv_heads, dim)] * 2]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@settings(max_examples=15)
@given(st.booleans(), st.sampled_from((1, 7, 130)), st.sampled_from((130, 300)), st.integers(0, 99))
def test_right_results_pass(causal, query_len, key_len, seed):
    q, k, v = tensors(query_len=query_len, key_len=key_len, seed=seed)
    exact = reference.attention(q, k, v, causal=causal)[0]
    expected = checking.expect(q, k, v, causal=causal, seed=seed)
    assert checking.fault(exact.to(q.dtype), expected) is None
    assert checking.fault(reference.torch_attention(q, k, v, causal=causal), expected) is None


def test_scores_rounded_to_16_bits_pass_where_that_is_known():
    q, k, v = tensors(key_len=500)
    [naive] = [one for one in peers.PREFILL if one.name == peers.NAIVE]
    out = naive.make(q, k, v, False)()
    assert checking.fault(out, checking.expect(q, k, v, causal=False, rounded_scores=True)) is None


@pytest.mark.parametrize("fault", ["element", "tile", "scale", "causal", "nan", "shape", "rounding"])
def test_wrong_results_do_not(fault):
    q, k, v = tensors(key_len=1000)
    out = reference.attention(q, k, v)[0]
    if fault == "element":
        out[0, 0, 0, 0] += 0.1
    elif fault == "tile":
        out = reference.attention(q, k[:, :-64], v[:, :-64])[0]
    elif fault == "scale":
        out = out * 1.02
    elif fault == "causal":
        out = reference.attention(q, k, v, causal=True)[0]
    elif fault == "nan":
        out[1, 5, 2, 3] = torch.nan
    elif fault == "shape":
        out = out[:, :-1]
    else:  # six significant bits, cut off, in place of bfloat16's eight, rounded
        out = (out.float().view(torch.int32) & -(1 << 18)).view(torch.float32)
    assert checking.fault(out.to(q.dtype) if fault != "rounding" else out, checking.expect(q, k, v, causal=False))


def test_heads_and_rows_are_chosen_from_everywhere():
    q, k, v = tensors(batch=3, query_len=400, heads=8)
    expected = checking.expect(q, k, v, causal=True, heads=6)
    assert (expected.parts[0].batch, expected.parts[0].head) == (0, 0)
    assert (expected.parts[-1].batch, expected.parts[-1].head) == (2, 7)
    assert len(expected.parts) == 6
    for part in expected.parts:
        assert part.rows[0] == 0
        assert part.rows[-1] == 399
        assert checking.ROWS <= len(part.rows) <= checking.ROWS + 2


def test_the_rows_of_a_long_sequence_fit():
    q, k, v = (torch.zeros(1, 131_072, 1, 8, dtype=torch.bfloat16) for _ in range(3))
    part = checking.expect(q, k, v, causal=True, heads=1).parts[0]
    assert not part.out.any()
