"""Attention in plain torch, float64 inside: what every kernel is judged by. Obviously right, not fast."""

import math
from dataclasses import dataclass

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(softmax_scale * q k^T + mask) v``, head by head in float64 (Vaswani et al. 2017, equation 1).

    Arguments:
        q: (batch, query_len, heads, head_dim), any floating dtype.
        k: (batch, key_len, kv_heads, head_dim); v: (batch, key_len, kv_heads, value_dim). Query head h
            reads KV head ``h // (heads // kv_heads)``.
        softmax_scale: by default ``head_dim ** -0.5``.
        causal: query i sees keys ``j <= i + key_len - query_len`` (aligned to the bottom right).
    Returns:
        out (batch, query_len, heads, value_dim) float64 and logsumexp (batch, heads, query_len) float64,
        natural logarithm. A query that sees no key, or only keys at a logit of -inf, gets 0 and -inf.

    NaN in a query makes its row NaN; NaN in a key makes NaN of the rows that see it. A NaN or infinity in v
    reaches every row of its KV head, since an unseen key still enters the product, with weight 0.

    Memory: (query_len, key_len) float64 at a time.
    """
    batch, query_len, heads, head_dim = q.shape
    _, key_len, kv_heads, value_dim = v.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    visible = visible_keys(query_len, key_len, causal=causal, device=q.device)
    out = torch.empty((batch, query_len, heads, value_dim), dtype=torch.float64, device=q.device)
    logsumexp = torch.empty((batch, heads, query_len), dtype=torch.float64, device=q.device)
    for b in range(batch):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            logits = scale * (q[b, :, head].double() @ k[b, :, kv_head].double().T)
            logits = logits.masked_fill(~visible, -math.inf)
            out[b, :, head], logsumexp[b, head] = _softmax_product(logits, v[b, :, kv_head].double())
    return out, logsumexp


def _softmax_product(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(logits) @ values and the logsumexp; logits (queries, keys), values (keys, value_dim)."""
    if logits.shape[1] == 0:
        return values.new_zeros(logits.shape[0], values.shape[1]), values.new_full((logits.shape[0],), -math.inf)
    maximum = logits.amax(dim=1, keepdim=True)
    maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=1, keepdim=True)
    out = (weights @ values) / total
    return out.masked_fill(total == 0, 0.0), (maximum + total.log()).squeeze(1)


def visible_keys(query_len: int, key_len: int, *, causal: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """(query_len, key_len) bool: which keys each query sees; bottom-right aligned where causal."""
    query = torch.arange(query_len, device=device)[:, None]
    key = torch.arange(key_len, device=device)[None, :]
    if not causal:
        return torch.ones((query_len, key_len), dtype=torch.bool, device=device)
    return key <= query + (key_len - query_len)


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The same by ``torch.nn.functional.scaled_dot_product_attention``, in q's dtype: the yardstick.

    Shapes as in ``attention``; returns (batch, query_len, heads, value_dim). Queries that see no key get 0.
    """
    query_len, key_len, heads, kv_heads = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    kv_head = torch.arange(heads, device=q.device) // (heads // kv_heads) if heads else slice(0)
    square = query_len == key_len
    visible = visible_keys(query_len, key_len, causal=causal, device=q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k[:, :, kv_head].transpose(1, 2),
        v[:, :, kv_head].transpose(1, 2),
        attn_mask=visible if causal and not square else None,
        is_causal=causal and square,
        scale=softmax_scale,
    ).transpose(1, 2)
    return torch.where(visible.any(dim=1)[None, :, None, None], out, 0.0)


@dataclass(frozen=True)
class Error:
    """Absolute error of an output against float64: the largest, and the root mean square over all."""

    max: float
    rms: float


def error(out: torch.Tensor, expected: torch.Tensor) -> Error:
    """The error of ``out`` against ``expected`` of the same shape; NaN counts as an infinite error.

    Raises ValueError where the shapes differ.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out: got shape {tuple(out.shape)}, takes {tuple(expected.shape)} as expected has")
    if out.numel() == 0:
        return Error(0.0, 0.0)
    difference = (out.double() - expected.double()).abs().nan_to_num(nan=math.inf)
    return Error(difference.max().item(), difference.square().mean().sqrt().item())


def torch_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    expected: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Error:
    """The error that torch's own attention makes in q's dtype against ``expected`` (from ``attention``)."""
    return error(torch_attention(q, k, v, softmax_scale=softmax_scale, causal=causal), expected)
