"""How far a right forward kernel may be from exact attention, element by element.

Everything below is for one query and one head: logits s_j (natural units, s_j = scale * q.k_j), weights
w_j = exp(s_j - lse), output o = sum_j w_j v_j over the n visible keys, head_dim d. The kernel sees the same
16-bit q, k, v, so only its own arithmetic counts. ``u`` is the unit roundoff of the 16-bit type (2^-8
bfloat16, 2^-11 float16), ``f = 2^-23`` bounds one fp32 operation, a truncating one too (tensor cores do).

1. A logit. Products of two 16-bit numbers are exact in fp32. Summing d of them errs by at most
   ``d f sum_c |q_c k_jc|``. Rounding scale * log2(e), the product with it, the subtraction of the reference
   maximum and that maximum's own product err by at most ``2 f (|s_j| + max_i |s_i|)``. Products below the
   normal range lose at most 2^-126 each. So

       |delta_j| <= |scale| d f sum_c |q_c k_jc| + 2 f (|s_j| + max_i |s_i|) + |scale| d 2^-126

2. The weights. With r_j = exp(delta_j) the kernel weighs by w_j r_j / sum_i w_i r_i. Subtracting o,

       |o' - o| = |sum_j w_j (r_j - 1)(v_j - o)| / sum_j w_j r_j
               <= sum_j w_j expm1(|delta_j|) (|v_j| + |o|) / sum_j w_j exp(-|delta_j|)

   Large logits make that large, but weights are positive and add up to one whatever the logits are, so o'
   stays within the range of v and ``|o' - o| <= max(max_j v_j - o, o - min_j v_j)``: the smaller of the two
   holds.

3. Rounding on the way to the output, relative to ``A >= sum_j w'_j |v_j|``. P is rounded to 16 bits: u. exp2
   of the weights and of the rescaling, the reciprocal: 2 f each (PTX ISA: ex2.approx and rcp.approx err below
   2^-22). The sums over n keys for O and for the denominator, with one rescaling a tile: 2 n f and n f. Of an
   fp16 P nothing below half its smallest denormal is kept: 2^-25 sum_j |v_j| (P is relative to a maximum that
   the row has reached, so the denominator is at least 1). Rounding the output: u |o'| and half the smallest
   16-bit denormal.

4. The logsumexp moves by at most max_j |delta_j|, and errs by n f in the sum, 2^-21 in log2 and 4 f
   relative to its own size and to the largest logit, from which it is assembled in fp32.
"""

import math

import torch

from .. import reference

FP32 = 2.0**-23
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_DENORMAL = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
LARGEST_EXPONENT = 600.0  # exp of it is finite in float64, and far beyond the point where the range of v takes over


def bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest admissible |error| of the output (batch, query_len, heads, head_dim) and of the logsumexp
    (batch, heads, query_len), float64, as derived above. Meaningless where the exact result is not finite.
    """
    batch, query_len, heads, head_dim = q.shape
    key_len, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    visible = reference.visible_keys(query_len, key_len, causal=causal, device=q.device)
    out_bound = torch.zeros((batch, query_len, heads, head_dim), dtype=torch.float64, device=q.device)
    lse_bound = torch.zeros((batch, heads, query_len), dtype=torch.float64, device=q.device)
    if key_len == 0:
        return out_bound, lse_bound
    for b in range(batch):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            query, key, value = (x.double() for x in (q[b, :, head], k[b, :, kv_head], v[b, :, kv_head]))
            out_bound[b, :, head], lse_bound[b, head] = _head_bounds(query, key, value, scale, visible, q.dtype)
    return out_bound, lse_bound


def _head_bounds(query, key, value, scale: float, visible, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim = query.shape[1]
    keys = visible.sum(dim=1, keepdim=True)
    logits = (scale * (query @ key.T)).masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(logits, dim=1, keepdim=True)
    magnitude = logits.abs().masked_fill(logits == -math.inf, 0.0)
    largest = magnitude.amax(dim=1, keepdim=True)
    delta = (
        abs(scale) * head_dim * FP32 * (query.abs() @ key.abs().T).nan_to_num(posinf=0.0)
        + 2 * FP32 * (magnitude + largest)
        + abs(scale) * head_dim * 2.0**-126
    )
    exponent = (logits - lse).nan_to_num(nan=-math.inf)  # rows without a key have logits and lse of -inf
    weights = exponent.exp()
    raised = (exponent + delta).clamp(max=LARGEST_EXPONENT).exp()
    lowered_total = (exponent - delta).exp().sum(dim=1, keepdim=True).clamp(min=2.0**-1000)

    out = weights @ value
    by_logits = _tilted(exponent, delta, value.abs(), out.abs()) / lowered_total
    by_range = torch.maximum(value.amax(dim=0) - out, out - value.amin(dim=0))
    spread = torch.minimum(by_logits, by_range)
    mass = torch.minimum(raised @ value.abs() / lowered_total, value.abs().amax(dim=0))
    rounding = (2 * ROUNDOFF[dtype] + (6 + 3 * keys) * FP32) * mass
    underflow = HALF_DENORMAL[dtype] * (1 + visible.double() @ value.abs()) + 2.0**-125
    out_bound = torch.where(keys > 0, spread + rounding + underflow, 0.0)

    moved = delta.masked_fill(~visible, 0.0).amax(dim=1, keepdim=True)
    lse_bound = moved + keys * FP32 + 2.0**-21 + 4 * FP32 * (lse.abs() + largest)
    return out_bound, torch.where(lse == -math.inf, 0.0, lse_bound).squeeze(1)


def _tilted(exponent, delta, value_magnitude, out_magnitude):
    """sum_j w_j expm1(delta_j) (|v_j| + |o|), taken together so that neither factor overflows."""
    grown = (exponent + delta).clamp(max=LARGEST_EXPONENT).exp() - exponent.exp()
    return grown @ value_magnitude + grown.sum(dim=1, keepdim=True) * out_magnitude


# Standard deviations by which a mean may miss before it is called biased: 2e-9 of right results do (normal errors).
SIGMAS = 6.0


def mean_error_bound(dtype: torch.dtype, keys: int, elements: torch.Tensor) -> torch.Tensor:
    """How far the mean of (out - o) / o over ``elements`` outputs, each one weight, may be from 0.

    Rounding to nearest has no preferred direction: of an output and of the probability that it shows each errs by at
    most u, independently of other elements, with a variance of u^2 / 3 if uniform. What fp32 does, (6 + 3 n) f as in
    ``bounds``, may lean one way. A rounding towards zero leans by u / (2 ln 2) on average over mantissas.
    """
    deviation = ROUNDOFF[dtype] * (2.0 / 3.0 / elements.double()).sqrt()
    return SIGMAS * deviation + (6 + 3 * keys) * FP32
