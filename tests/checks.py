"""Judges one call of ``flash_attn_func``: shapes, dtypes, values within derived bounds, inputs untouched."""

import math
import warnings

import torch
from cases import Case
from tolerances import bounds

from fa2_cute import flash_attn_func, reference
from fa2_cute.emulation import EmulationNotice


def run(case: Case, device: str | torch.device = "cpu"):
    """The call of ``case``: (q, k, v, out, lse)."""
    q, k, v = case.tensors(device)
    return q, k, v, *_call(q, k, v, softmax_scale=case.softmax_scale, causal=case.causal)


def _call(q, k, v, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)  # a test of its own sees to it
        return flash_attn_func(q, k, v, **options, return_softmax_lse=True)


def check(case: Case, device: str | torch.device = "cpu"):
    """Run ``case`` and compare it with float64; an AssertionError shows the case and the worst element."""
    q, k, v = case.tensors(device)
    check_tensors(q, k, v, softmax_scale=case.softmax_scale, causal=case.causal, what=repr(case))
    for before, after, name in zip(case.tensors(device), (q, k, v), "qkv", strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num()), f"{name} was written to: {case}"


def check_tensors(
    q, k, v, *, softmax_scale: float | None = None, causal: bool = False, what: str = "the call"
):
    """Call ``flash_attn_func`` and compare both results with float64 within the bounds of ``tolerances``."""
    options = {"softmax_scale": softmax_scale, "causal": causal}
    out, lse = _call(q, k, v, **options)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert out.device == q.device
    assert out.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.dtype == torch.float32
    expected_out, expected_lse = reference.attention(q, k, v, **options)
    out_bound, lse_bound = bounds(q, k, v, **options)
    assert_within(out, expected_out, out_bound, f"out of {what}")
    assert_within(lse, expected_lse, lse_bound, f"lse of {what}")


def assert_within(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str):
    """Element by element: NaN where NaN is expected, the same infinity, else within ``bound``.

    A finite expectation beyond the range of the result's type asks for the infinity that it rounds to.
    """
    rounded = expected.to(got.dtype)
    got64 = got.double()
    judged = rounded.isfinite()
    same = torch.where(expected.isnan(), got64.isnan(), got64 == rounded.double())
    excess = torch.where(judged, (got64 - expected).abs() - bound, 0.0)
    wrong = torch.where(judged, ~(excess <= 0), ~same)
    if wrong.any():
        ranking = torch.where(wrong, excess.nan_to_num(nan=math.inf), -1.0)
        index = torch.unravel_index(ranking.argmax(), got.shape)
        where = tuple(int(i) for i in index)
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements wrong; worst at {where}: "
            f"got {got64[where]:.9g}, expected {expected[where]:.9g} within {bound[where]:.3g}"
        )
