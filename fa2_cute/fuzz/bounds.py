"""How far a right forward kernel may be from exact attention, element by element.

Everything below is for one query and one head: logits s_j = scale * q.k_j (natural units), L_j what the options make of
them, weights w_j = exp(L_j - lse), output o = sum_j w_j v_j over the n visible keys, head_dim d. The kernel sees the
same inputs, so only its own arithmetic counts. ``u`` is the unit roundoff of the 16-bit type (2^-8 bfloat16, 2^-11
float16), ``f = 2^-23`` bounds one fp32 operation, a truncating one too (tensor cores do); two that round to nearest.

1. A score. Products of two 16-bit numbers are exact in fp32. Summing d of them errs by at most
   ``d f sum_c |q_c k_jc|``, and products below the normal range lose at most 2^-126 each. So

       |eps_j| <= |scale| d (f sum_c |q_c k_jc| + 2^-126)

2. A logit, relative to a reference m.

   Plain, L_j = s_j: rounding scale * log2(e), the product with it, the subtraction of m and m's own product err by at
   most 2 f (|L_j| + |m|).

   Softcap, t_j = C tanh(s_j / C): a tanh moves by no more than its argument does, and hardly at all where it is flat:
   its argument's error, eps_j + 3 f |s_j|, is followed through it exactly. For |y| >= 1/4 tanh y is 1 - 2 / (1 + E),
   E = 2^(2 log2(e) y): ex2.approx errs by 2 f of E, of which E / (1 + E)^2 <= 1/4 reaches the quotient R; the sum and
   rcp.approx by 1.5 f R; doubled, and the last difference by f / 2: less than 4 f in all, where |tanh y| > 0.244.
   Below, a series or anything that is as good relative to y. So 16 f |t_j|.

   ALiBi and mask, L_j = t_j + a_j + m_j: the slope times log2(e), its product with the distance (an exact integer), the
   mask's product with log2(e), two additions and what the plain logit has: 4 f (|t_j| + |a_j| + |m_j|) + 2 f |m|.

   A reference is a logit of the row, or its sink. It need not be the largest, L_max, but the last one is no further
   below it than float32's exponents reach (a sum of 2^127 or more overflows, which a kernel must notice), 88 in natural
   units; earlier ones are forgotten with the weights that were relative to them. So |m| <= R with

       R = min(max_j |L_j|, |L_max| + 88)

   A sink is one more key at the logit L = sink, rounded as a plain one, with a value of 0.

3. The weights. With |delta_j| the sum of what 1 and 2 grant and r_j = exp(delta_j) the kernel weighs by
   w_j r_j / sum_i w_i r_i. Subtracting o,

       |o' - o| = |sum_j w_j (r_j - 1)(v_j - o)| / sum_j w_j r_j
               <= sum_j w_j expm1(|delta_j|) (|v_j| + |o|) / sum_j w_j exp(-|delta_j|)

   Large logits make that large, but weights are positive and add up to one whatever the logits are, so o'
   stays within the range of v (and 0, if there is a sink) and ``|o' - o| <= max(max_j v_j - o, o - min_j v_j)``: the
   smaller of the two holds.

4. Rounding on the way to the output, relative to ``A >= sum_j w'_j |v_j|``. P is rounded to 16 bits: u. exp2
   of the weights and of the rescaling, the reciprocal: 2 f each (PTX ISA: ex2.approx and rcp.approx err below
   2^-22), and once more for a sink. The sums over n keys for O and for the denominator, with one rescaling a tile:
   2 n f and n f. Of an fp16 P nothing below half its smallest denormal is kept: 2^-25 sum_j |v_j| (P is relative to a
   maximum that the row has reached, so the denominator is at least 1), of a bfloat16 one 2^-134, and ex2.approx.ftz
   flushes what is below 2^-126. Rounding the output: u |o'| and half the smallest 16-bit denormal.

5. The logsumexp moves by what delta_j move the sum of the weights, and errs by n f in the sum, 2^-21 in log2 and 4 f
   relative to its own size and to R, from which it is assembled in fp32.
"""

import math

import torch

from .. import reference

FP32 = 2.0**-23
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_DENORMAL = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
LARGEST_EXPONENT = 600.0  # exp of it is finite in float64, and far beyond the point where the range of v takes over
REFERENCE_SLACK = 88.0  # exp of it is nearly float32's largest number


def bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: reference.Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest admissible |error| of the output (batch, query_len, heads, value_dim) and of the logsumexp
    (batch, heads, query_len), float64, as derived above. Meaningless where the exact result is not finite.

    Arguments as in ``reference.attention``.
    """
    batch, query_len, heads, head_dim = q.shape
    key_len, kv_heads, value_dim = v.shape[1:]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    within = reference.visible_keys(query_len, key_len, causal=causal, window=window, device=q.device)
    distance = reference.distances(query_len, key_len, device=q.device)
    masks = None if mask is None else mask.broadcast_to(batch, heads, query_len, key_len)
    slopes = None if alibi_slopes is None else alibi_slopes.double().broadcast_to(batch, heads)
    out_bound = torch.zeros((batch, query_len, heads, value_dim), dtype=torch.float64, device=q.device)
    lse_bound = torch.zeros((batch, heads, query_len), dtype=torch.float64, device=q.device)
    for b in range(batch):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            query, key, value = (x.double() for x in (q[b, :, head], k[b, :, kv_head], v[b, :, kv_head]))
            logits, delta = _scores(query, key, scale)
            if softcap > 0:
                logits, delta = _capped(logits, delta, softcap)
            magnitude, visible, roundings = logits.abs(), within, 2
            if slopes is not None:
                logits, magnitude = logits - slopes[b, head] * distance, magnitude + (slopes[b, head] * distance).abs()
                roundings = 4
            if masks is not None and masks.dtype == torch.bool:
                visible = visible & masks[b, head]
            elif masks is not None:
                added = masks[b, head].double()
                visible = visible & (added > -math.inf)
                logits, magnitude = logits + added, magnitude + added.abs()
                roundings = 4
            delta = delta + roundings * FP32 * magnitude
            sunk = None if sink is None else sink[head].double()
            found = _head_bounds(logits, delta, value, visible, sunk, q.dtype)
            out_bound[b, :, head], lse_bound[b, head] = found
    return out_bound, lse_bound


def varlen_bounds(q, k, v, cu_seqlens_q, cu_seqlens_k, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """``bounds`` of packed sequences, shaped as ``reference.varlen_attention`` has them."""
    return reference.by_sequence(bounds, q, k, v, cu_seqlens_q, cu_seqlens_k, **options)


def narrow_bound(q, k, v, scales: torch.Tensor, **options) -> torch.Tensor:
    """What the probabilities of an FP8 cache lose below float16's normal numbers, whatever q's dtype is.

    Of w_j = p_j s_j, s_j being V's scale, nothing is kept below half the smallest denormal, 2^-25, of 2^7
    (decode_spec.P_EXPONENT) of the largest: 2^-32 max_i w_i for each key, times the number that is stored, |v_j| / s_j.

    q, k, v, options: as ``bounds``, v with its scales in it; scales (keys, kv_heads, 1), float64.
    """
    if not scales.numel():
        return v.new_zeros((), dtype=torch.float64)
    scales = scales[None]
    # Attention with the scales as values, one key at a time: the weights p_j s_j.
    one_hot = torch.diag_embed(scales[..., 0].movedim(1, -1)).movedim(-1, 1).movedim(-1, 3)
    weights = reference.attention(q, k, one_hot, **options)[0]  # (1, query_len, heads, keys)
    stored = (v.abs() / scales).sum(dim=1).repeat_interleave(q.shape[2] // v.shape[2], dim=1)  # (1, heads, value_dim)
    return 2.0**-32 * weights.amax(dim=-1, keepdim=True) * stored[:, None]


def _scores(query, key, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled scores (queries, keys) and how far the kernel's may be off before any rounding of the logits (1)."""
    head_dim = query.shape[1]
    sums = (query.abs() @ key.abs().T).nan_to_num(posinf=0.0)
    return scale * (query @ key.T), abs(scale) * head_dim * (FP32 * sums + 2.0**-126)


def _capped(scores, error, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Capped logits and how far they may be off (2)."""
    error = (error + 3 * FP32 * scores.abs()).nan_to_num(nan=0.0, posinf=0.0)
    capped, above, below = (softcap * torch.tanh(x / softcap) for x in (scores, scores + error, scores - error))
    return capped, torch.maximum(above - capped, capped - below) + 16 * FP32 * capped.abs()


def _head_bounds(logits, delta, value, visible, sink, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of the rows of one head. logits, delta (queries, keys): what is exact and how far the kernel's may be off
    before the reference is subtracted; value (keys, value_dim); visible (queries, keys); sink: a scalar or None."""
    rows, keys = logits.shape[0], visible.sum(dim=1, keepdim=True)
    sees_nothing = (~visible | (logits == -math.inf)).all(dim=1, keepdim=True)
    lowest, highest = (value.amin(dim=0), value.amax(dim=0)) if len(value) else (value.sum(dim=0),) * 2
    logits = logits.masked_fill(~visible, -math.inf)
    delta = delta.masked_fill(~visible, 0.0)
    # The sink as a last key with a value of 0, hidden where there is none.
    logits = torch.cat((logits, logits.new_full((rows, 1), -math.inf)), dim=1)
    delta = torch.cat((delta, delta.new_zeros(rows, 1)), dim=1)
    magnitudes = torch.cat((value.abs(), value.new_zeros(1, value.shape[1])))
    if sink is not None:
        logits[:, -1], delta[:, -1] = sink, 2 * FP32 * sink.abs().nan_to_num(posinf=0.0)
        lowest, highest = lowest.clamp(max=0.0), highest.clamp(min=0.0)

    lse = torch.logsumexp(logits, dim=1, keepdim=True)
    seen = logits.masked_fill(logits == -math.inf, 0.0)
    top = logits.amax(dim=1, keepdim=True).abs().nan_to_num(posinf=0.0)
    largest = torch.minimum(seen.abs().amax(dim=1, keepdim=True), top + REFERENCE_SLACK)
    delta = delta.nan_to_num(nan=0.0, posinf=0.0) + 2 * FP32 * largest
    exponent = (logits - lse).nan_to_num(nan=-math.inf)  # rows without a key have logits and lse of -inf
    weights = exponent.exp()
    raised = (exponent + delta).clamp(max=LARGEST_EXPONENT).exp()
    lowered_total = (exponent - delta).exp().sum(dim=1, keepdim=True).clamp(min=2.0**-1000)

    out = weights[:, :-1] @ value
    by_logits = _tilted(exponent, delta, magnitudes, out.abs()) / lowered_total
    by_range = torch.maximum(highest - out, out - lowest)
    spread = torch.minimum(by_logits, by_range)
    mass = torch.minimum(raised @ magnitudes / lowered_total, torch.maximum(highest.abs(), lowest.abs()))
    sums = keys + (sink is not None)
    rounding = (2 * ROUNDOFF[dtype] + (6 + 2 * (sink is not None) + 3 * sums) * FP32) * mass
    underflow = HALF_DENORMAL[dtype] + (HALF_DENORMAL[dtype] + 2.0**-126) * (visible.double() @ value.abs()) + 2.0**-125
    out_bound = torch.where(sees_nothing, 0.0, spread + rounding + underflow)

    moved = torch.maximum(
        torch.logsumexp(exponent + delta, dim=1, keepdim=True), -torch.logsumexp(exponent - delta, dim=1, keepdim=True)
    )
    lse_bound = moved + sums * FP32 + 2.0**-21 + 4 * FP32 * (lse.abs() + largest)
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
