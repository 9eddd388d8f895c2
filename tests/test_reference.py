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
sides = st.none() | st.integers(0, 8)
few_heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])


def by_loops(
    q,
    k,
    v,
    scale,
    causal=False,
    window=(None, None),
    softcap=0.0,
    alibi_slopes=None,
    sink=None,
    mask=None,
):
    """Attention in Python numbers, straight from its definition."""
    batch, query_len, heads, head_dim = q.shape
    key_len, kv_heads = k.shape[1], k.shape[2]
    out = torch.zeros(batch, query_len, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, query_len), -math.inf, dtype=torch.float64)

    def logit(b, h, i, j):
        """None for a key that the query does not see."""
        behind = (key_len - j) - (query_len - i)  # how far before the diagonal, both counted from their ends
        if causal and behind < 0:
            return None
        if window[0] is not None and behind > window[0]:
            return None
        if not causal and window[1] is not None and -behind > window[1]:
            return None
        x = scale * sum(float(q[b, i, h, c]) * float(k[b, j, h * kv_heads // heads, c]) for c in range(head_dim))
        if softcap:
            x = softcap * math.tanh(x / softcap)
        if alibi_slopes is not None:
            x -= float(alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]) * abs(behind)
        if mask is None:
            return x
        entry = mask.expand(batch, heads, query_len, key_len)[b, h, i, j]
        if mask.dtype == torch.bool:
            return x if entry else None
        return None if entry == -math.inf else x + float(entry)

    for b in range(batch):
        for h in range(heads):
            for i in range(query_len):
                seen = {j: x for j in range(key_len) if (x := logit(b, h, i, j)) is not None}
                terms = list(seen.values()) + ([] if sink is None else [float(sink[h])])
                if not any(x > -math.inf for x in terms):
                    continue
                top = max(terms)
                total = sum(math.exp(x - top) for x in terms)
                lse[b, h, i] = top + math.log(total)
                for c in range(v.shape[3]):
                    out[b, i, h, c] = (
                        sum(math.exp(x - top) * float(v[b, j, h * kv_heads // heads, c]) for j, x in seen.items())
                        / total
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


@st.composite
def options(draw, batch: int, query_len: int, key_len: int, heads: int) -> dict:
    """Options of the reference, each in about half of the cases."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask_shape = tuple(draw(st.sampled_from([1, extent])) for extent in (batch, heads, query_len, key_len))
    masks = {
        "none": None,
        "bool": normal(*mask_shape) > -0.5,
        "added": normal(*mask_shape),
        "hiding": torch.where(normal(*mask_shape) > -0.5, normal(*mask_shape), -math.inf),
        "of keys": normal(key_len) > -0.5,
    }
    return {
        "causal": draw(st.booleans()),
        "window": (draw(sides), draw(sides | st.integers(-3, -1))),
        "softcap": draw(st.sampled_from([0.0, 0.3, 20.0])),
        "alibi_slopes": draw(st.sampled_from([None, normal(heads), normal(batch, heads)])),
        "sink": draw(st.sampled_from([None, normal(heads), torch.full((heads,), -math.inf), 30 * normal(heads)])),
        "mask": masks[draw(st.sampled_from(sorted(masks)))],
    }


@given(st.data(), small_lengths, small_lengths, few_heads, st.sampled_from([0.0, 1.0, -0.5, 30.0]))
def test_equals_loops(data, query_len, key_len, heads, scale):
    q, k, v = draw_tensors(query_len, key_len, heads, data.draw(st.integers(0, 99)))
    drawn = data.draw(options(2, query_len, key_len, heads[0]))
    out, lse = reference.attention(q, k, v, softmax_scale=scale, **drawn)
    expected_out, expected_lse = by_loops(q, k, v, scale, **drawn)
    torch.testing.assert_close(out, expected_out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-11, atol=1e-11)


@given(st.data(), st.integers(1, 40), st.integers(1, 40), few_heads)
def test_equals_torch_in_float64_with_every_option(data, query_len, key_len, heads):
    q, k, v = draw_tensors(query_len, key_len, heads, 0, head_dim=8, value_dim=12)
    drawn = data.draw(options(2, query_len, key_len, heads[0]))
    out, _ = reference.attention(q, k, v, **drawn)
    torch.testing.assert_close(out, reference.torch_attention(q, k, v, **drawn), rtol=1e-11, atol=1e-11)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5),
    st.tuples(*(st.integers(0, 2),) * 4),
    st.booleans(),
)
def test_packed_sequences_are_what_they_are_alone(lengths, unused, causal):
    """Rows before the first and after the last sequence belong to nobody."""
    heads, window = 4, (2, None)
    edges_q, edges_k = (
        torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0) + unused[2 * side] for side in (0, 1)
    )
    total_q, total_k = int(edges_q[-1]) + unused[1], int(edges_k[-1]) + unused[3]
    q, k, v = (x[0] for x in draw_tensors(max(total_q, total_k), max(total_q, total_k), (heads, 2), 5))
    q, k, v = q[:total_q], k[:total_k], v[:total_k]
    slopes = torch.rand(len(lengths), heads, dtype=torch.float64)
    sink = torch.rand(heads, dtype=torch.float64)
    shared = {"causal": causal, "window": window, "softcap": 2.0, "sink": sink}
    out, lse = reference.varlen_attention(q, k, v, edges_q, edges_k, alibi_slopes=slopes, **shared)
    covered = torch.zeros(total_q, dtype=torch.bool)
    for b, (query_len, key_len) in enumerate(lengths):
        rows = slice(int(edges_q[b]), int(edges_q[b]) + query_len)
        keys = slice(int(edges_k[b]), int(edges_k[b]) + key_len)
        covered[rows] = True
        alone = by_loops(q[None, rows], k[None, keys], v[None, keys], 3**-0.5, alibi_slopes=slopes[b], **shared)
        torch.testing.assert_close(out[rows], alone[0][0], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(lse[:, rows], alone[1][0], rtol=1e-11, atol=1e-11)
    assert (out[~covered] == 0).all()
    assert (lse[:, ~covered] == sink[:, None]).all()


def test_sequences_are_cut_to_the_rows_there_are():
    assert reference.sequences(torch.tensor([2, 2, 5, 9]), 9) == [(2, 2), (2, 5), (5, 9)]
    assert reference.sequences(torch.tensor([-3, 4, 100]), 9) == [(0, 4), (4, 9)]
    assert reference.sequences(torch.tensor([7, 3, 12, 8]), 9) == [(7, 7), (3, 9), (9, 9)]
    assert reference.sequences(torch.tensor([0]), 9) == []


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


def test_a_window_is_counted_from_the_diagonal():
    rows = reference.visible_keys(3, 4, window=(1, 0)).int().tolist()
    assert rows == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    rows = reference.visible_keys(2, 4, window=(0, 1)).int().tolist()
    assert rows == [[0, 0, 1, 1], [0, 0, 0, 1]]
    # torch's causal, aligned to the top left, is a right side of query_len - key_len
    assert reference.visible_keys(2, 4, window=(None, -2)).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert reference.visible_keys(3, 3, causal=True, window=(1, 2)).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_a_window_may_leave_rows_empty():
    q, k, v = draw_tensors(6, 2, (2, 1), 0)
    out, lse = reference.attention(q, k, v, window=(1, 0))
    empty = [True] * 4 + [False] * 2
    assert (lse == -math.inf).all(1).all(0).tolist() == empty
    assert (out == 0).all(-1).all(-1).all(0).tolist() == empty


def test_a_softcap_far_above_the_logits_changes_nothing_and_one_far_below_makes_them_signs():
    q, k, v = draw_tensors(3, 5, (1, 1), 2)
    torch.testing.assert_close(reference.attention(q, k, v, softcap=1e9), reference.attention(q, k, v))
    _, lse = reference.attention(q, k[:, :1], v[:, :1], softcap=1e-3, softmax_scale=1e9)
    assert lse.abs().sub(1e-3).abs().max() < 1e-9


def test_a_sink_takes_weight_and_gives_no_value():
    """Equal logits of 0 and a sink of 0: n keys share n / (n + 1) of the weight."""
    q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 3, 1, 4), torch.ones(1, 3, 1, 2)
    out, lse = reference.attention(q, k, v, sink=torch.zeros(1))
    torch.testing.assert_close(out, torch.full_like(out, 0.75))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))


def test_a_row_that_sees_nothing_has_its_sink_alone():
    q, k, v = draw_tensors(3, 1, (2, 1), 0)
    v[:] = math.nan
    sink = torch.tensor([1.5, -math.inf])
    out, lse = reference.attention(q, k, v, causal=True, sink=sink)
    assert (out[:, :2] == 0).all()
    assert (lse[:, 0, :2] == 1.5).all()
    assert (lse[:, 1, :2] == -math.inf).all()


def test_a_lowest_number_in_a_mask_is_a_number():
    """A row that is masked by the lowest float32 alone, as some models do it, has the mean of all values."""
    q, k, v = draw_tensors(2, 4, (1, 1), 0)
    mask = torch.full((2, 4), torch.finfo(torch.float32).min)
    out, _ = reference.attention(q, k, v, mask=mask)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))


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
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (7, None)},
        {"softcap": 5.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"sink": torch.zeros(4)},
        {"mask": torch.linspace(-1, 1, 50)},
    ],
    ids=lambda options: "".join(options),
)
def test_torch_error_is_that_of_sixteen_bits(causal, options):
    """Above nothing, and below what a few roundings of values near 1 can make."""
    q, k, v = Case("bfloat16", 1, 40, 50, 4, 2, 64).tensors()
    expected, _ = reference.attention(q, k, v, causal=causal, **options)
    found = reference.torch_error(q, k, v, expected, causal=causal, **options)
    assert 0 < found.rms < found.max < 2.0**-4
