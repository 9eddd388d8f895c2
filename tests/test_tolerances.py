"""The bounds: wide enough for arithmetic that rounds as a kernel may, narrow enough to notice a fault."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import reference
from fa2_cute.fuzz import Case
from fa2_cute.fuzz.bounds import ROUNDOFF, bounds
from fa2_cute.fuzz.cases import DTYPES
from fa2_cute.fuzz.judging import Expectation
from fa2_cute.fuzz.strategies import cases, kernels
from fa2_cute.fuzz.values import SMALLEST_NORMAL

FINITE_VALUES = (
    "normal", "large_logits", "all_equal", "one_huge_logit", "rising_logits", "large_values",
    "minus_infinite_keys", "denormal",
)  # fmt: skip


def in_fp32(
    q, k, v, softmax_scale=None, window=(None, None), softcap=0.0, alibi_slopes=None, sink=None, mask=None
):  # fmt: skip
    """Attention with fp32 logits and sums and 16-bit probabilities: (out, lse)."""
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    (batch, query_len, heads, _), key_len = q.shape, k.shape[1]
    queries = q.float().transpose(1, 2)
    keys, values = (x.repeat_interleave(heads // k.shape[2], dim=2).float().transpose(1, 2) for x in (k, v))
    logits = scale * (queries @ keys.transpose(2, 3))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if alibi_slopes is not None:
        distance = reference.distances(query_len, key_len).float()
        logits = logits - alibi_slopes.broadcast_to(batch, heads)[..., None, None] * distance
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.float()
    logits = logits.masked_fill(~reference.visible_keys(query_len, key_len, window=window), -math.inf)
    sunk = torch.full((heads,), -math.inf) if sink is None else sink.float()
    column = sunk[None, :, None, None].expand(batch, heads, query_len, 1)
    top = torch.cat((logits, column), -1).amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(column - top)
    blind = (logits == -math.inf).all(-1, keepdim=True)
    out = ((weights.to(q.dtype).float() @ values) / total).masked_fill(blind, 0.0)
    return out.to(q.dtype).transpose(1, 2), (top + total.log()).squeeze(-1)


def simulated(q, k, v, **options):
    packed = "cu_seqlens_q" in options
    out, lse = reference.by_sequence(in_fp32, q, k, v, **options) if packed else in_fp32(q, k, v, **options)
    return out.contiguous(), lse


@given(cases(values=st.sampled_from(FINITE_VALUES)) | cases(kernels(), values=st.sampled_from(FINITE_VALUES)))
def test_arithmetic_in_fp32_stays_within(case):
    tensors = case.tensors()
    Expectation.of(*tensors, **case.options).judge(*simulated(*tensors, **case.options), what=repr(case))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (20, 0)},
        {"softcap": 30.0},
        {"alibi": "ladder"},
        {"sink": "normal"},
        {"mask": "some"},
        {"mask": "bias", "mask_dtype": "float32"},
        {"window": (20, 0), "softcap": 5.0, "alibi": "ladder", "sink": "normal"},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_no_wider_than_a_few_roundings_on_normal_values(dtype, options):
    """Three 16-bit roundings of a weighted mean of |v| near 0.8, or of a few values near 3, and fp32's share."""
    case = Case(dtype, 1, 64, 128, 2, 1, 64, **options)
    q, k, v = case.tensors()
    out_bound, lse_bound = bounds(q, k, v, **case.options)
    assert out_bound.max() < 8 * ROUNDOFF[DTYPES[dtype]]
    assert out_bound.mean() < 3 * ROUNDOFF[DTYPES[dtype]]
    assert lse_bound.max() < 1e-3


# ---- faults ----------------------------------------------------------------------------------------------------------

BASE = Case("bfloat16", 2, 65, 65, 4, 2, 64)
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0625], [0.4, 0.2, 0.1, 0.05]])
SINK = torch.tensor([3.0, 1.0, 4.0, 2.0])


def mask_like(case, **fields):
    return Case(**{**case.__dict__, "mask": "some", **fields}).options["mask"]


BOOL, BIAS = mask_like(BASE), mask_like(BASE, mask="bias", mask_dtype="float32")


def rows_that_differ(right: dict, wrong: dict, tensors=None, wrong_tensors=None) -> float:
    """The share of rows (of a head) in which the exact result of ``wrong`` is out of the bounds of ``right``."""
    tensors = BASE.tensors() if tensors is None else tensors
    expected, _ = reference.attention(*tensors, **right)
    bound, _ = bounds(*tensors, **right)
    got, _ = reference.attention(*(tensors if wrong_tensors is None else wrong_tensors), **wrong)
    return ((got - expected).abs() > bound).any(-1).double().mean().item()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param({"causal": True}, {}, id="mask forgotten"),
        pytest.param({"causal": True}, {"window": (None, 1)}, id="diagonal off by one"),
        pytest.param({"window": (20, None)}, {"window": (21, None)}, id="left side off by one"),
        pytest.param({"window": (None, 9)}, {"window": (None, 8)}, id="right side off by one"),
        pytest.param({"window": (20, 3)}, {"window": (3, 20)}, id="sides swapped"),
        pytest.param({"softcap": 1.0}, {}, id="softcap forgotten"),
        pytest.param({"softcap": 1.0}, {"softcap": 2.0}, id="another softcap"),
        pytest.param({"alibi_slopes": SLOPES}, {}, id="slopes forgotten"),
        pytest.param({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES.flip(1)}, id="slope of another head"),
        pytest.param({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES.flip(0)}, id="slope of another sequence"),
        pytest.param({"alibi_slopes": SLOPES}, {"alibi_slopes": -SLOPES}, id="sign of the slope"),
        pytest.param({"sink": SINK}, {}, id="sink forgotten"),
        pytest.param({"sink": SINK}, {"sink": SINK.roll(1)}, id="sink of another head"),
        pytest.param({"mask": BOOL}, {}, id="bool mask forgotten"),
        pytest.param({"mask": BOOL}, {"mask": ~BOOL}, id="bool mask turned round"),
        pytest.param({"mask": BOOL}, {"mask": BOOL.roll(1, 3)}, id="bool mask of the key before"),
        pytest.param({"mask": BOOL}, {"mask": BOOL.roll(1, 2)}, id="bool mask of the row before"),
        pytest.param({"mask": BOOL}, {"mask": BOOL.float()}, id="bool mask added"),
        pytest.param({"mask": BIAS}, {}, id="bias forgotten"),
        pytest.param({"mask": BIAS}, {"mask": BIAS.transpose(2, 3)}, id="bias transposed"),
        pytest.param({"mask": BIAS}, {"mask": BIAS.roll(1, 1)}, id="bias of another head"),
        pytest.param({"mask": BIAS}, {"mask": BIAS.roll(1, 0)}, id="bias of another sequence"),
        pytest.param({"mask": BIAS}, {"mask": BIAS * math.log2(math.e)}, id="bias in base 2"),
        pytest.param({"mask": BIAS, "softcap": 1.0}, {"mask": BIAS}, id="softcap forgotten beside a bias"),
    ],
)
def test_notices_an_option_gone_wrong(right, wrong):
    assert rows_that_differ(right, right) == 0
    assert rows_that_differ(right, wrong) > 0.6


def test_notices_a_dropped_key_a_wrong_head_and_a_shifted_diagonal():
    q, k, v = BASE.tensors()
    assert rows_that_differ({}, {}, wrong_tensors=(q, k[:, :64], v[:, :64])) > 0.85
    assert rows_that_differ({}, {}, wrong_tensors=(q, k.flip(2), v.flip(2))) == 1
    assert rows_that_differ({"causal": True}, {"causal": True}, wrong_tensors=(q, k.flip(2), v.flip(2))) == 1
    shifted = (q, k.roll(1, 1), v.roll(1, 1))
    assert rows_that_differ({"causal": True}, {"causal": True}, wrong_tensors=shifted) > 0.97


def test_notices_alibi_that_counts_from_the_top_left_or_without_the_absolute_value():
    """Both change every row by a constant where it sees only keys before it: that shows in the logsumexp alone."""
    q, k, v = Case("bfloat16", 1, 5, 65, 4, 2, 64).tensors()
    options = {"alibi_slopes": SLOPES[0], "window": (None, 0)}
    _, lse = reference.attention(q, k, v, **options)
    _, bound = bounds(q, k, v, **options)
    distance = torch.arange(5)[:, None] - torch.arange(65)[None, :]
    for wrong in (distance.abs(), distance + 61):
        bias = -SLOPES[0][:, None, None] * wrong
        _, got = reference.attention(q, k, v, window=(None, 0), mask=bias)
        assert ((got - lse).abs() > bound).all()


def test_notices_a_sink_that_is_not_in_the_logsumexp():
    q, k, v = BASE.tensors()
    _, lse = reference.attention(q, k, v, sink=SINK)
    _, bound = bounds(q, k, v, sink=SINK)
    assert ((reference.attention(q, k, v)[1] - lse).abs() > bound).all()


def test_notices_packed_sequences_that_run_into_each_other():
    case = Case("bfloat16", heads=4, kv_heads=2, packed=((30, 30), (35, 50)), alibi="of_each_sequence")
    tensors, options = case.tensors(), case.options
    expectation = Expectation.of(*tensors, **options)
    starts = options["cu_seqlens_k"]
    for name, value in (
        ("cu_seqlens_k", starts + torch.tensor([0, 1, 0], dtype=torch.int32)),
        ("cu_seqlens_k", starts - torch.tensor([0, 0, 1], dtype=torch.int32)),
        ("alibi_slopes", options["alibi_slopes"].flip(0)),
    ):
        out, _ = reference.varlen_attention(*tensors, **{**options, name: value})
        differs = ((out - expectation.out).abs() > expectation.out_bound).any(-1).any(-1)
        assert differs[30:].double().mean() > 0.8


# ---- ends of the ranges ----------------------------------------------------------------------------------------------


def test_range_of_v_takes_over_where_logits_are_huge():
    q, k, v = Case("bfloat16", 1, 8, 40, 1, 1, 64, values="large_logits").tensors()
    out_bound, _ = bounds(q, k, v, softmax_scale=1e30)
    spread = (v.double().amax() - v.double().amin()).item()
    assert out_bound.isfinite().all()
    assert out_bound.max() <= 1.1 * spread


def test_a_lowest_number_in_a_mask_widens_nothing():
    """Keys that float32's lowest number hides are far from the row's largest logit: so they do not blur it."""
    q, k, v = Case("bfloat16", 1, 8, 40, 1, 1, 64).tensors()
    mask = torch.zeros(8, 40)
    mask[:, 11:17] = torch.finfo(torch.float32).min
    for one, other in zip(bounds(q, k, v, mask=mask), bounds(q, k, v, mask=mask == 0), strict=True):
        assert (one <= 1.01 * other + 1e-4).all()


def test_a_huge_softcap_widens_nothing_and_a_tiny_one_makes_all_weights_equal():
    q, k, v = Case("bfloat16", 1, 8, 40, 1, 1, 64).tensors()
    plain, huge, tiny = (bounds(q, k, v, softcap=softcap) for softcap in (0.0, 1e30, 1e-30))
    for one, other in zip(huge, plain, strict=True):
        assert (one <= 1.1 * other).all()
    assert tiny[1].max() < 1e-5


def test_rows_that_see_nothing_have_no_error():
    q, k, v = Case("bfloat16", 1, 8, 3, 2, 1, 64).tensors()
    for options in ({"causal": True}, {"causal": True, "sink": torch.zeros(2)}):
        out_bound, lse_bound = bounds(q, k, v, **options)
        assert (out_bound[:, :5] == 0).all()
        assert (out_bound[:, 5:] > 0).all()
        assert (lse_bound[:, :, :5] < 1e-6).all()


def test_denormals_have_a_floor_and_no_more():
    q, k, v = Case("float16", 1, 4, 8, 1, 1, 64, values="denormal").tensors()
    out_bound, _ = bounds(q, k, v)
    assert (out_bound > 0).all()
    assert (out_bound < 0.05 * SMALLEST_NORMAL["float16"]).all()
