"""The reference against loops over single numbers and against torch's own attention in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import reference
from fa2_cute.fuzz import Case
from fa2_cute.fuzz.strategies import head_counts

small_lengths = st.integers(1, 7)


def by_loops(q, k, v, scale, causal):
    """Attention in Python numbers, straight from its definition."""
    batch, query_len, heads, head_dim = q.shape
    key_len, kv_heads = k.shape[1], k.shape[2]
    out = torch.zeros(batch, query_len, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, query_len), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h * kv_heads // heads
            for i in range(query_len):
                seen = [j for j in range(key_len) if not causal or query_len - i <= key_len - j]
                logits = [
                    scale * sum(float(q[b, i, h, c]) * float(k[b, j, g, c]) for c in range(head_dim)) for j in seen
                ]
                if not seen:
                    continue
                top = max(logits)
                weights = [math.exp(logit - top) for logit in logits]
                lse[b, h, i] = top + math.log(sum(weights))
                for c in range(v.shape[3]):
                    out[b, i, h, c] = sum(w * float(v[b, j, g, c]) for w, j in zip(weights, seen, strict=True)) / sum(
                        weights
                    )
    return out, lse


def draw_tensors(query_len, key_len, head_counts, seed, head_dim=3, value_dim=2, batch=2):
    heads, kv_heads = head_counts
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, query_len, heads, head_dim, generator=generator, dtype=torch.float64),
        torch.randn(batch, key_len, kv_heads, head_dim, generator=generator, dtype=torch.float64),
        torch.randn(batch, key_len, kv_heads, value_dim, generator=generator, dtype=torch.float64),
    )


@given(
    small_lengths,
    small_lengths,
    head_counts,
    st.booleans(),
    st.sampled_from([0.0, 1.0, -0.5, 30.0]),
    st.integers(0, 99),
)
def test_equals_loops(query_len, key_len, heads, causal, scale, seed):
    q, k, v = draw_tensors(query_len, key_len, heads, seed)
    out, lse = reference.attention(q, k, v, softmax_scale=scale, causal=causal)
    expected_out, expected_lse = by_loops(q, k, v, scale, causal)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 80), st.integers(1, 80), head_counts, st.booleans(), st.integers(0, 99))
def test_equals_torch_in_float64(query_len, key_len, heads, causal, seed):
    q, k, v = draw_tensors(query_len, key_len, heads, seed, head_dim=16, value_dim=16)
    out, _ = reference.attention(q, k, v, causal=causal)
    torch.testing.assert_close(out, reference.torch_attention(q, k, v, causal=causal), rtol=1e-12, atol=1e-12)


def test_default_scale_is_one_over_the_root_of_head_dim():
    q, k, v = draw_tensors(4, 5, (2, 1), 0, head_dim=9)
    torch.testing.assert_close(reference.attention(q, k, v), reference.attention(q, k, v, softmax_scale=1 / 3))


def test_causal_is_aligned_to_the_bottom_right():
    assert reference.visible_keys(2, 4, causal=True).tolist() == [[True, True, True, False], [True] * 4]
    assert reference.visible_keys(3, 1, causal=True).tolist() == [[False], [False], [True]]
    assert reference.visible_keys(2, 1, causal=False).tolist() == [[True], [True]]


def test_large_logits_do_not_overflow():
    q, k, v = (x * 1000 for x in draw_tensors(3, 5, (1, 1), 1))
    out, lse = reference.attention(q, k, v)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_rows_that_see_nothing_give_zero_and_minus_infinity():
    q, k, v = draw_tensors(5, 2, (2, 1), 0)
    out, lse = reference.attention(q, k, v, causal=True)
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    assert (out[:, 3:] != 0).all()
    out, lse = reference.attention(q, k[:, :0], v[:, :0])
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_keys_at_minus_infinity_count_as_unseen():
    q, k, v = draw_tensors(3, 6, (1, 1), 2)
    q = q.abs()
    k[:, 2] = -math.inf
    kept = [0, 1, 3, 4, 5]
    for got, expected in zip(reference.attention(q, k, v), reference.attention(q, k[:, kept], v[:, kept]), strict=True):
        torch.testing.assert_close(got, expected)
    out, lse = reference.attention(q, torch.full_like(k, -math.inf), v)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_nan_reaches_the_rows_that_see_it_and_no_other():
    q, k, v = draw_tensors(4, 4, (2, 2), 3)
    k[0, 2, 1, 0] = math.nan
    q[1, 1, 0, 2] = math.nan
    out, lse = reference.attention(q, k, v, causal=True)
    expected = torch.zeros(2, 2, 4, dtype=torch.bool)  # (batch, heads, query_len)
    expected[0, 1, 2:] = True
    expected[1, 0, 1] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan().all(-1), expected.transpose(1, 2))
    assert torch.equal(out.isnan().any(-1), expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("query", "key"),
    [((0, 3, 2, 4), (0, 5, 1, 4)), ((2, 0, 2, 4), (2, 5, 1, 4)), ((2, 3, 0, 4), (2, 5, 0, 4))],
)
def test_nothing_gives_nothing(query, key):
    out, lse = reference.attention(torch.zeros(query), torch.zeros(key), torch.zeros(key), causal=True)
    assert out.shape == query
    assert lse.shape == (query[0], query[2], query[1])


def test_error_is_largest_and_root_mean_square():
    expected = torch.zeros(4, dtype=torch.float64)
    assert reference.error(torch.tensor([0.0, 3.0, 0.0, -4.0]), expected) == reference.Error(4.0, 2.5)
    assert reference.error(torch.tensor([0.0, 0.0, math.nan, 0.0]), expected).max == math.inf
    assert reference.error(torch.zeros(0), torch.zeros(0)) == reference.Error(0.0, 0.0)
    with pytest.raises(ValueError, match="out"):
        reference.error(torch.zeros(3), expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_torch_error_is_that_of_sixteen_bits(causal):
    """Above nothing, and below what a few roundings of values near 1 can make."""
    q, k, v = Case("bfloat16", 1, 40, 50, 4, 2, 64).tensors()
    expected, _ = reference.attention(q, k, v, causal=causal)
    found = reference.torch_error(q, k, v, expected, causal=causal)
    assert 0 < found.rms < found.max < 2.0**-4
