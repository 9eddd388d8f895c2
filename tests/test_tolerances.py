"""The bounds: wide enough for arithmetic that rounds as a kernel may, narrow enough to notice a fault."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fa2_cute import reference
from fa2_cute.fuzz import Case
from fa2_cute.fuzz.bounds import ROUNDOFF, bounds
from fa2_cute.fuzz.cases import DTYPES
from fa2_cute.fuzz.judging import require_within
from fa2_cute.fuzz.strategies import cases
from fa2_cute.fuzz.values import SMALLEST_NORMAL

FINITE_VALUES = (
    "normal", "large_logits", "all_equal", "one_huge_logit", "rising_logits", "large_values",
    "minus_infinite_keys", "denormal",
)  # fmt: skip


def emulated_by_torch(q, k, v, scale, causal):
    """Attention with fp32 logits and sums and 16-bit probabilities: (out, lse)."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    queries = q.float().transpose(1, 2)
    keys, values = (x.repeat_interleave(group, dim=2).float().transpose(1, 2) for x in (k, v))
    visible = reference.visible_keys(q.shape[1], k.shape[1], causal=causal)
    logits = (scale * (queries @ keys.transpose(2, 3))).masked_fill(~visible, -math.inf)
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    out = ((weights.to(q.dtype).float() @ values) / total).masked_fill(total == 0, 0.0)
    return out.to(q.dtype).transpose(1, 2), (top + total.log()).squeeze(-1)


@given(cases(values=st.sampled_from(FINITE_VALUES)))
def test_arithmetic_in_fp32_stays_within(case):
    assume(case.key_len)
    q, k, v = case.tensors()
    options = {"softmax_scale": case.softmax_scale, "causal": case.causal}
    out, lse = emulated_by_torch(q, k, v, case.softmax_scale, case.causal)
    expected_out, expected_lse = reference.attention(q, k, v, **options)
    out_bound, lse_bound = bounds(q, k, v, **options)
    require_within(out, expected_out, out_bound, f"out of {case}")
    require_within(lse, expected_lse, lse_bound, f"lse of {case}")


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_no_wider_than_a_few_roundings_on_normal_values(dtype):
    """Three 16-bit roundings of a weighted mean of |v| near 0.8, and fp32's share."""
    q, k, v = Case(dtype, 1, 64, 128, 2, 1, 64).tensors()
    out_bound, lse_bound = bounds(q, k, v)
    assert out_bound.max() < 4 * ROUNDOFF[DTYPES[dtype]]
    assert lse_bound.max() < 1e-3


def test_notices_a_dropped_key_a_wrong_head_and_a_shifted_diagonal():
    q, k, v = Case("bfloat16", 1, 65, 65, 4, 2, 64).tensors()
    expected, _ = reference.attention(q, k, v, causal=True)
    bound, _ = bounds(q, k, v, causal=True)
    dropped, _ = reference.attention(q[:, :64], k[:, :64], v[:, :64], causal=False)
    swapped, _ = reference.attention(q, k.flip(2), v.flip(2), causal=True)
    shifted, _ = reference.attention(q, k.roll(1, 1), v.roll(1, 1), causal=True)
    assert ((dropped - expected[:, :64]).abs() > bound[:, :64]).any(-1)[:, :63].all()
    assert ((swapped - expected).abs() > bound).any(-1).all()
    assert ((shifted - expected).abs() > bound).any(-1)[:, :64].all()


def test_range_of_v_takes_over_where_logits_are_huge():
    q, k, v = Case("bfloat16", 1, 8, 40, 1, 1, 64, values="large_logits").tensors()
    out_bound, _ = bounds(q, k, v, softmax_scale=1e30)
    spread = (v.double().amax() - v.double().amin()).item()
    assert out_bound.isfinite().all()
    assert out_bound.max() <= 1.1 * spread


def test_denormals_have_a_floor_and_no_more():
    q, k, v = Case("float16", 1, 4, 8, 1, 1, 64, values="denormal").tensors()
    out_bound, _ = bounds(q, k, v)
    assert (out_bound > 0).all()
    assert (out_bound < 0.05 * SMALLEST_NORMAL["float16"]).all()
