"""What a person calls: flash-attn's forward functions (version 2.8) on torch tensors.

Six ways to hand over queries, keys and values, one meaning; ``ops.py`` does the work.
"""

import numbers

import torch

from . import forward, ops
from ._torch_internals import likeness_is_all
from .checks import WHOLE, causal_window_of


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
):
    """Exact attention ``softmax(softmax_scale * q k^T + mask) v`` (FlashAttention-2, Dao 2023, arXiv:2307.08691).

    Arguments (names, order and meaning of flash-attn's ``flash_attn_func``; the last two are this package's own):
        q: (batch, query_len, heads, head_dim), float16 or bfloat16, head_dim a multiple of 8 from 8 to 256.
        k: (batch, key_len, kv_heads, head_dim), same dtype and device; kv_heads divides heads, and query head h
            reads KV head ``h // (heads // kv_heads)``.
        v: (batch, key_len, kv_heads, value_dim), value_dim a multiple of 8 from 8 to 256.
        dropout_p: 0.0 only.
        softmax_scale: finite number, by default ``head_dim ** -0.5``.
        causal: query i sees keys ``j <= i + key_len - query_len`` (aligned to the bottom right).
        window_size: (left, right): query i sees keys ``i + key_len - query_len - left <= j <= i + key_len - query_len
            + right``; -1 or None is unbounded. ``causal`` makes right 0.
        softcap: above 0, logits are ``softcap * tanh(logit / softcap)`` (Gemma 2, arXiv:2408.00118, section 2).
        alibi_slopes: (heads,) or (batch, heads), float32: ``slope * |i + key_len - query_len - j|`` is subtracted from
            the logits (Press et al. 2022, arXiv:2108.12409).
        deterministic: accepted; the forward pass always is.
        return_attn_probs: return (out, lse, None), as flash-attn's callers unpack it without dropout.
        return_softmax_lse: return (out, lse).
        learnable_sink: (heads,), float32 or 16 bits: one more logit a head, which takes its share of the weights and
            has no value (the sinks of GPT-OSS); part of the logsumexp.
    Returns:
        out (batch, query_len, heads, value_dim) in q's dtype, contiguous; lse (batch, heads, query_len) float32,
        natural logarithm. A query that sees no key gets 0 and -inf (flash-attn's logsumexp is +inf there), or with a
        sink 0 and the sink's logit. Where v holds an infinity or NaN, queries that see that key get what float64
        gives, and queries of the same KV head that do not see it may get NaN (0 * inf).
        Scores and sums of weighted values are float32 inside: where they pass 2^128, so does the result.

    Any strides are taken as long as the last is 1. A tensor whose start or whose strides are not multiples of 16 bytes
    is copied first. CUDA tensors run on torch's current stream without synchronising; CPU tensors run the sm_120a
    kernel in the emulator. Under ``torch.autocast``, q, k and v are cast to its dtype.

    Before anything is launched it raises TypeError (an argument of the wrong type or dtype), ValueError (a shape,
    stride, device or number that is not taken) or NotImplementedError (an option that is not there yet, or inputs that
    require grad).
    """
    refuse_dropout(dropout_p)
    window, results = causal_window_of(causal, window_size), None
    wants_lse = return_attn_probs or return_softmax_lse
    if alibi_slopes is learnable_sink is None and likeness_is_all():  # as ops.attend asks, and soonest
        results = forward.attend_again(q, k, v, softmax_scale, window, softcap, wants_lse)
    if results is None:
        results = ops.attend_anew(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            window=window,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sink=learnable_sink,
            wants_lse=wants_lse,
        )
    return _results(*results, return_attn_probs, return_softmax_lse) if wants_lse else results[0]


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
):
    """``flash_attn_func`` with keys and values in one tensor, read in place.

    kv: (batch, key_len, 2, kv_heads, head_dim). All else as ``flash_attn_func`` has it.
    """
    k, v = _unpack("kv", kv, 5)
    wants_lse = return_attn_probs or return_softmax_lse
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, wants_lse)
    out, lse = ops.attend_named({"k": "kv", "v": "kv"}, q, k, v, **options)
    return _results(out, lse, return_attn_probs, return_softmax_lse)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
):
    """``flash_attn_func`` with queries, keys and values in one tensor, read in place.

    qkv: (batch, length, 3, heads, head_dim). All else as ``flash_attn_func`` has it.
    """
    q, k, v = _unpack("qkv", qkv, 5)
    wants_lse = return_attn_probs or return_softmax_lse
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, wants_lse)
    out, lse = ops.attend_named({"q": "qkv", "k": "qkv", "v": "qkv"}, q, k, v, **options)
    return _results(out, lse, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
):
    """``flash_attn_func`` on sequences of different lengths, packed one after the other.

    Arguments:
        q: (total_q, heads, head_dim); k: (total_k, kv_heads, head_dim); v: (total_k, kv_heads, value_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device. Sequence b has the queries
            ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]`` and the keys of the same range in ``cu_seqlens_k``; lengths of
            0 are taken. Entries outside the tensors are clamped to them. On a GPU the host never reads them: where they
            decrease, results of the sequences they belong to are undefined, and nothing outside is read or written. On
            the CPU they are looked at, and ValueError says where they decrease.
        max_seqlen_q, max_seqlen_k: accepted; no result depends on them.
        block_table: (batch, pages a sequence) int32: key s of sequence b is row ``s % page_size`` of page
            ``block_table[b, s // page_size]``; k is (pages, page_size, kv_heads, head_dim) and v (pages, page_size,
            kv_heads, value_dim), of any page size, and differences of ``cu_seqlens_k`` are the lengths. Pages outside
            of k are taken for keys that are not there.
        alibi_slopes: (heads,) or (batch, heads) float32.
    Returns:
        out (total_q, heads, value_dim) and lse (heads, total_q) float32. Rows of q that belong to no sequence get 0
        and -inf. All else as ``flash_attn_func`` has it, with each sequence's own lengths.
    """
    wants_lse = return_attn_probs or return_softmax_lse
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, wants_lse)
    lengths = _lengths(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is None:
        out, lse = ops.attend(q, k, v, **lengths, **options)
    else:
        hint = max_seqlen_q if isinstance(max_seqlen_q, int) else None
        pages = {"block_table": block_table, "max_seqlen_q": hint}
        out, lse = ops.attend_named({"k_cache": "k", "v_cache": "v"}, q, k, v, **lengths, **pages, **options)
    return _results(out, lse, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
):
    """``flash_attn_varlen_func`` with keys and values in one tensor, read in place.

    kv: (total_k, 2, kv_heads, head_dim). All else as ``flash_attn_varlen_func`` has it.
    """
    k, v = _unpack("kv", kv, 4)
    wants_lse = return_attn_probs or return_softmax_lse
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, wants_lse)
    lengths = _lengths(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    out, lse = ops.attend_named({"k": "kv", "v": "kv"}, q, k, v, **lengths, **options)
    return _results(out, lse, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = WHOLE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    learnable_sink: torch.Tensor | None = None,
):
    """``flash_attn_varlen_func`` with queries, keys and values in one tensor, read in place.

    qkv: (total, 3, heads, head_dim); cu_seqlens: (batch + 1,) int32, of queries and keys alike. All else as
    ``flash_attn_varlen_func`` has it.
    """
    q, k, v = _unpack("qkv", qkv, 4)
    wants_lse = return_attn_probs or return_softmax_lse
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, wants_lse)
    _lengths(cu_seqlens=cu_seqlens)
    names = {"q": "qkv", "k": "qkv", "v": "qkv", "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens"}
    out, lse = ops.attend_named(names, q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **options)
    return _results(out, lse, return_attn_probs, return_softmax_lse)


def _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, wants_lse) -> dict:
    """flash-attn's options as ``ops.attend`` takes them."""
    refuse_dropout(dropout_p)
    return {
        "softmax_scale": softmax_scale,
        "window": causal_window_of(causal, window_size),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sink": learnable_sink,
        "wants_lse": wants_lse,
    }


def refuse_dropout(dropout_p: float):
    """Raises NotImplementedError unless there is no dropout, and TypeError for what is no number."""
    if type(dropout_p) is float and dropout_p == 0.0:  # the usual: the checks below take longer
        return
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real):
        raise TypeError(f"dropout_p: got {type(dropout_p).__name__}, takes 0.0")
    if dropout_p != 0:
        raise NotImplementedError(
            f"dropout_p: got {dropout_p!r}, takes 0.0 only: dropout is for training, and there is no backward pass yet "
            "(train with torch's scaled_dot_product_attention; evaluate with dropout_p=0.0)"
        )


def _lengths(**lengths) -> dict:
    """``lengths`` as they are, once they are tensors."""
    for name, cu_seqlens in lengths.items():
        if not isinstance(cu_seqlens, torch.Tensor):
            raise TypeError(f"{name}: got {type(cu_seqlens).__name__}, takes an int32 torch.Tensor (batch + 1,)")
    return lengths


def _unpack(name: str, packed: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
    """The 2 or 3 tensors (one a letter of ``name``) along the third dimension from the end."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name}: got {type(packed).__name__}, takes a torch.Tensor")
    if packed.dim() != rank or packed.shape[-3] != len(name):
        length = "batch, length" if rank == 5 else "total length"
        raise ValueError(
            f"{name}: got shape {tuple(packed.shape)}, takes ({length}, {len(name)}, heads, head_dim), "
            f"{rank} dimensions"
        )
    return packed.unbind(-3)


def _results(out: torch.Tensor, lse: torch.Tensor | None, return_attn_probs: bool, return_softmax_lse: bool):
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_softmax_lse else out
