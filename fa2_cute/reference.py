"""Attention in plain torch, float64 inside: what every kernel is judged by. Obviously right, not fast."""

import itertools
import math
from dataclasses import dataclass

import torch

Window = tuple[int | None, int | None]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(softmax_scale * q k^T + mask) v``, head by head in float64 (Vaswani et al. 2017, equation 1).

    Arguments:
        q: (batch, query_len, heads, head_dim), any floating dtype.
        k: (batch, key_len, kv_heads, head_dim); v: (batch, key_len, kv_heads, value_dim). Query head h
            reads KV head ``h // (heads // kv_heads)``.
        softmax_scale: by default ``head_dim ** -0.5``.
        causal: query i sees keys ``j <= i + key_len - query_len`` (aligned to the bottom right), as with a window of
            (left, 0).
        window: (left, right), None being unbounded: query i sees keys ``j`` with
            ``i + offset - left <= j <= i + offset + right``, where ``offset = key_len - query_len``.
        softcap: if above 0, logits become ``softcap * tanh(logit / softcap)`` (Gemma Team 2024, section 2).
        alibi_slopes: (heads,) or (batch, heads): ``-slope * |i + offset - j|`` is added to each logit, after the cap
            (Press et al. 2022).
        sink: (heads,), one more logit in each row's denominator, without a value (Xiao et al. 2024; GPT-OSS).
        mask: broadcastable to (batch, heads, query_len, key_len). bool: True takes part. Floating: added to the logits
            last, -inf hides.
    Returns:
        out (batch, query_len, heads, value_dim) float64 and logsumexp (batch, heads, query_len) float64,
        natural logarithm. A query that sees no key, or only keys at a logit of -inf, gets 0 and -inf; with a
        sink 0 and the sink's logit.

    NaN in a query makes its row NaN; NaN in a key makes NaN of the rows that see it. A NaN or infinity in v
    reaches every row of its KV head that sees a key, since an unseen key still enters the product, with weight 0.

    Memory: (query_len, key_len) float64 at a time.
    """
    batch, query_len, heads, head_dim = q.shape
    _, key_len, kv_heads, value_dim = v.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    visible = visible_keys(query_len, key_len, causal=causal, window=window, device=q.device)
    distance = distances(query_len, key_len, device=q.device)
    masks = None if mask is None else mask.broadcast_to(batch, heads, query_len, key_len)
    slopes = None if alibi_slopes is None else alibi_slopes.double().broadcast_to(batch, heads)
    out = torch.empty((batch, query_len, heads, value_dim), dtype=torch.float64, device=q.device)
    logsumexp = torch.empty((batch, heads, query_len), dtype=torch.float64, device=q.device)
    for b in range(batch):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            logits = scale * (q[b, :, head].double() @ k[b, :, kv_head].double().T)
            if softcap > 0:
                logits = softcap * torch.tanh(logits / softcap)
            if slopes is not None:
                logits = logits - slopes[b, head] * distance
            if masks is not None:
                logits = _masked(logits, masks[b, head])
            logits = logits.masked_fill(~visible, -math.inf)
            sunk = -math.inf if sink is None else sink[head].item()
            out[b, :, head], logsumexp[b, head] = _softmax_product(logits, v[b, :, kv_head].double(), sunk)
    return out, logsumexp


def _masked(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, -math.inf)
    return logits + mask.double()


def _softmax_product(logits: torch.Tensor, values: torch.Tensor, sink: float) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(logits) @ values and the logsumexp; logits (queries, keys), values (keys, value_dim)."""
    sees_nothing = (logits == -math.inf).all(dim=1, keepdim=True)
    logits = torch.cat((logits, logits.new_full((logits.shape[0], 1), sink)), dim=1)
    maximum = logits.amax(dim=1, keepdim=True)
    maximum = maximum.masked_fill(maximum == -math.inf, 0.0)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=1, keepdim=True)
    out = (weights[:, :-1] @ values) / total
    return out.masked_fill(sees_nothing, 0.0), (maximum + total.log()).squeeze(1)


def visible_keys(
    query_len: int,
    key_len: int,
    *,
    causal: bool = False,
    window: Window = (None, None),
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """(query_len, key_len) bool: which keys each query sees, as ``causal`` and ``window`` of ``attention`` say."""
    left, right = window
    right = 0 if causal else right
    ahead = torch.arange(key_len, device=device)[None, :] - _diagonal(query_len, key_len, device)
    visible = torch.ones((query_len, key_len), dtype=torch.bool, device=device)
    if left is not None:
        visible &= ahead >= -left
    if right is not None:
        visible &= ahead <= right
    return visible


def distances(query_len: int, key_len: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """(query_len, key_len) float64: ``|i + key_len - query_len - j|``, the distance that ALiBi counts."""
    return (torch.arange(key_len, device=device)[None, :] - _diagonal(query_len, key_len, device)).abs().double()


def _diagonal(query_len: int, key_len: int, device: torch.device | str) -> torch.Tensor:
    """(query_len, 1): the key on the bottom-right aligned diagonal of each query."""
    return torch.arange(query_len, device=device)[:, None] + (key_len - query_len)


def sequences(cu_seqlens: torch.Tensor, total: int) -> list[tuple[int, int]]:
    """(start, end) of each packed sequence within ``total`` rows.

    cu_seqlens: (batch + 1,). What lies outside the rows is cut off, and an end before its start is an empty sequence.
    """
    edges = [min(max(edge, 0), total) for edge in cu_seqlens.tolist()]
    return [(start, max(start, end)) for start, end in itertools.pairwise(edges)]


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention`` of packed sequences, one after the other.

    Arguments:
        q: (total_q, heads, head_dim); k: (total_k, kv_heads, head_dim); v: (total_k, kv_heads, value_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) integers; sequence b is rows [cu_seqlens[b], cu_seqlens[b + 1]),
            cut as in ``sequences``.
        options: those of ``attention``, but for ``mask``.
    Returns:
        out (total_q, heads, value_dim) float64 and logsumexp (heads, total_q) float64. Rows of q that belong to no
        sequence see no key.
    """
    return by_sequence(attention, q, k, v, cu_seqlens_q, cu_seqlens_k, **options)


def by_sequence(
    function, q, k, v, cu_seqlens_q, cu_seqlens_k, *, alibi_slopes: torch.Tensor | None = None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``function``, called like ``attention``, of each packed sequence, put together as by ``varlen_attention``."""
    queries, keys = sequences(cu_seqlens_q, q.shape[0]), sequences(cu_seqlens_k, k.shape[0])
    sees_nothing = function(q[None], k[None, :0], v[None, :0], **options)
    rows, numbers = sees_nothing[0][0], sees_nothing[1][0]
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(queries, keys, strict=True)):
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        one = function(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], alibi_slopes=slopes, **options)
        rows[q0:q1], numbers[:, q0:q1] = one[0][0], one[1][0]
    return rows, numbers


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch in q's dtype: the yardstick. Arguments as in ``attention``.

    ``torch.nn.functional.scaled_dot_product_attention`` with a mask that holds window, slopes and mask, and for a sink
    one key of zeros more; where there is a softcap, which it does not have, logits and softmax in float32 and the two
    products' other operands in q's dtype. Returns (batch, query_len, heads, value_dim). Queries that see no key get 0.
    """
    batch, query_len, heads, _ = q.shape
    key_len, kv_heads = k.shape[1], k.shape[2]
    kv_head = torch.arange(heads, device=q.device) // (heads // kv_heads) if heads else slice(0)
    queries, keys, values = q.transpose(1, 2), k[:, :, kv_head].transpose(1, 2), v[:, :, kv_head].transpose(1, 2)
    visible = visible_keys(query_len, key_len, causal=causal, window=window, device=q.device)
    bias = None
    if alibi_slopes is not None or mask is not None or sink is not None or softcap > 0:
        bias = _additive(visible, batch, heads, q, alibi_slopes, mask)
    seen = visible.any(dim=1) if bias is None else (bias > -math.inf).any(dim=3).transpose(1, 2)[..., None]
    if bias is None:
        plain_causal = causal and window[0] is None and query_len == key_len
        out = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if plain_causal or bool(visible.all()) else visible,
            is_causal=plain_causal,
            scale=softmax_scale,
        )
        return torch.where(seen[None, :, None, None], out.transpose(1, 2), 0.0)
    if sink is not None:
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (keys, values))
        column = sink.to(bias.dtype)[None, :, None, None].expand(batch, heads, query_len, 1)
        bias = torch.cat((bias, column), dim=3)
    if softcap > 0:
        out = _capped(queries, keys, values, bias, softmax_scale, softcap)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, scale=softmax_scale
        )
    return torch.where(seen, out.transpose(1, 2), 0.0)


def _additive(visible, batch: int, heads: int, like: torch.Tensor, alibi_slopes, mask) -> torch.Tensor:
    """All that is added to the logits, (batch, heads, query_len, key_len), float32 or, for a float64 ``like``, that."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    bias = torch.zeros((batch, heads, *visible.shape), dtype=dtype, device=like.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype).broadcast_to(batch, heads)[..., None, None]
        bias = bias - slopes * distances(*visible.shape, device=like.device).to(dtype)
    if mask is not None:
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask.to(dtype)
    return bias.masked_fill(~visible, -math.inf)


def _capped(queries, keys, values, bias, softmax_scale, softcap: float) -> torch.Tensor:
    """Attention with a softcap on heads-first tensors, in the steps of an eager implementation."""
    scale = queries.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    logits = scale * (queries.to(bias.dtype) @ keys.to(bias.dtype).transpose(2, 3))
    weights = torch.softmax(softcap * torch.tanh(logits / softcap) + bias, dim=3)
    return weights.to(values.dtype) @ values


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


def torch_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, expected: torch.Tensor, **options) -> Error:
    """The error that torch makes in q's dtype against ``expected`` (from ``attention``); options as there."""
    return error(torch_attention(q, k, v, **options), expected)
