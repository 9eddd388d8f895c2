"""Whether a timed result is right: rows of some heads against float64, within what rounding explains.

Two tests, both derived. No element is further off than ``fuzz.bounds`` grants an exact kernel with 16-bit
probabilities; that holds for the worst case, and at long lengths says little, since an output shrinks with the number
of keys and the bound does not. So the root mean square of the errors is held to twice what rounding gives on average:
the n probabilities w_j of a row and its output o are each rounded to 16 bits, independently and by at most u of
themselves, which makes a variance of at most

    u^2 / 3 (sum_j w_j^2 v_j^2 + o^2)

and, where the scores s_j are rounded to 16 bits too and again when they are scaled (plain torch does),

    2 u^2 / 3 sum_j w_j^2 s_j^2 (v_j - o)^2

more. Of random numbers an output is about n^-1/2 of a value, and what 64 keys have to do with it 8 / n: to leave them
out moves it by (64 / n)^1/2 of itself, 6% at 16,384 keys, where rounding to bfloat16 gives 0.3%.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import reference
from ..fuzz.bounds import ROUNDOFF, bounds

ROWS = 128  # of a head; the first and the last among them
RMS_MARGIN = 2.0


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of one head: out, bound, variance (rows, value_dim) float64."""

    batch: int
    head: int
    rows: torch.Tensor
    out: torch.Tensor
    bound: torch.Tensor
    variance: torch.Tensor


@dataclass(frozen=True, eq=False)
class Expected:
    """What an attention call must give: (batch, query_len, heads, value_dim), and parts of it in float64."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def expect(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    heads: int = 4,
    rounded_scores: bool = False,
    stored: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    seed: int = 0,
) -> Expected:
    """The reference for a call on q, k, v (of ``reference.attention``), in ``heads`` of its heads and sequences.

    rounded_scores: for somebody who rounds scores to 16 bits. stored: what is made of keys and values before they are
    attended to; it is given those of one head of one sequence, (1, key_len, 1, dim).
    """
    generator = torch.Generator().manual_seed(seed)
    batch, query_len, all_heads, _ = q.shape
    total = batch * all_heads
    inner = torch.randperm(max(total - 2, 0), generator=generator)[: max(heads - 2, 0)] + 1
    chosen = sorted({0, total - 1, *inner.tolist()})
    rows = torch.randperm(query_len, generator=generator)[:ROWS]
    rows = torch.cat((rows, torch.tensor([0, query_len - 1]))).unique().to(q.device)
    # Of the chosen rows only: a mask of all of a long sequence would not fit.
    last = rows[:, None] + (k.shape[1] - query_len if causal else k.shape[1])
    visible = torch.arange(k.shape[1], device=q.device)[None, :] <= last
    parts = [_part(q, k, v, i // all_heads, i % all_heads, rows, visible, rounded_scores, stored) for i in chosen]
    return Expected((*q.shape[:3], v.shape[3]), tuple(parts))


def _part(q, k, v, b: int, head: int, rows, visible, rounded_scores: bool, stored) -> Part:
    kv_head = head // (q.shape[2] // k.shape[2])
    keys, values = (stored(x[b : b + 1, :, kv_head : kv_head + 1]) for x in (k, v))
    apart = (q[b : b + 1, rows, head : head + 1], keys, values)
    query, key, value = (x[0, :, 0] for x in apart)
    out = reference.attention(*apart, mask=visible)[0][0, :, 0]
    bound = bounds(*apart, mask=visible)[0][0, :, 0]
    roundoff = ROUNDOFF[q.dtype]
    scores = query.double() @ key.double().T * query.shape[1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=1)
    numbers = value.double()
    variance = roundoff**2 / 3 * (weights.square() @ numbers.square() + out.square())
    if rounded_scores:
        turned = (weights * scores).square()
        around = (
            turned @ numbers.square() - 2 * out * (turned @ numbers) + out.square() * turned.sum(dim=1, keepdim=True)
        )
        variance = variance + 2 * roundoff**2 / 3 * around
        bound = bound + _by_scores(scores, weights, numbers, out, 2 * roundoff)
    return Part(b, head, rows, out, bound, variance)


def _by_scores(scores, weights, values, out, roundoff: float):
    """What moving each score by ``roundoff`` of itself can do to the output (``fuzz.bounds``, 3)."""
    moved = weights * torch.expm1(roundoff * scores.abs())
    lowered = (weights * torch.exp(-roundoff * scores.abs())).sum(dim=1, keepdim=True)
    return (moved @ values.abs() + moved.sum(dim=1, keepdim=True) * out.abs()) / lowered


def fault(out: torch.Tensor, expected: Expected) -> str | None:
    """Why ``out`` is wrong, or None."""
    if tuple(out.shape) != expected.shape:
        return f"shape {tuple(out.shape)}, not {expected.shape}"
    if not bool(torch.isfinite(out).all()):
        return "not finite"
    squares, variances, elements = 0.0, 0.0, 0
    for part in expected.parts:
        error = (out[part.batch, part.rows, part.head].double() - part.out).abs()
        beyond = error > part.bound
        if bool(beyond.any()):
            worst = (error / part.bound)[beyond].max().item()
            where = f"sequence {part.batch}, head {part.head}"
            return f"{int(beyond.sum())} of {error.numel()} elements off, by {worst:.3g} times the bound, in {where}"
        squares += error.square().sum().item()
        variances += part.variance.sum().item()
        elements += error.numel()
    rms, allowed = math.sqrt(squares / elements), RMS_MARGIN * math.sqrt(variances / elements)
    return None if rms <= allowed else f"RMS error {rms:.3g}, takes {allowed:.3g}"
