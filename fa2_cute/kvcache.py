"""Attention over a KV cache, as flash-attn has it: append new keys and values, rotate, attend, in one call."""

import torch

from . import cache_ops
from .checks import WHOLE


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = WHOLE,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
):
    """Attention of a few or many new queries over a cache of keys and values, which new ones are first appended to.

    Names, order, defaults and meaning are those of flash-attn 2.8; what comes after ``return_softmax_lse`` is added,
    value rows may be of another width, and pages may have any size.

    Arguments:
        q: (batch, query_len, heads, head_dim), float16 or bfloat16; head_dim a multiple of 8 up to 256.
        k_cache: (batch_cache, cache_len, kv_heads, head_dim), or with ``block_table``
            (pages, page_size, kv_heads, head_dim); q's dtype, float8_e4m3fn or float8_e5m2. Changed in place where
            ``k`` is given. Rows start at multiples of 16 bytes.
        v_cache: likewise, (..., value_dim).
        k, v: (batch, new_len, kv_heads, head_dim or value_dim), q's dtype: token i of sequence b goes to slot
            ``cache_seqlens[b] + i``, and the queries see it. With an FP8 cache it is divided by the descale and
            rounded, saturating.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype or float32: rotate the first rotary_dim elements
            (a multiple of 16) of k, which is at position ``cache_seqlens[b] + i``, and of q: query i is there too if
            the call is causal or windowed, and else all queries are at ``cache_seqlens[b]``. positions must reach the
            cache's end.
        cache_seqlens: tokens of each sequence before the call: (batch,) int32, or one int for all. By default the whole
            cache (not with ``k``). Numbers out of range are clamped on the device.
        cache_batch_idx: (batch,) int32: the cache's row of each sequence; by default row b. Appending to one row twice
            in a call leaves it undefined.
        cache_leftpad: (batch,) int32: slots at the beginning of each sequence that nobody sees.
        block_table: (batch, pages a sequence) int32: slot s of sequence b is slot ``s % page_size`` of page
            ``block_table[b, s // page_size]``. Entries past a sequence's pages may be anything.
        softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink: as in ``flash_attn_func``, where
            key_len is the sequence's length after the append. Slots count from the cache's beginning, left padding
            included.
        rotary_interleaved: rotate elements (2 i, 2 i + 1) together; else (i, i + rotary_dim / 2), as GPT-NeoX.
        num_splits: parts that the keys are split into; 0 chooses.
        k_descale, v_descale: (FP8) float32 factors that the stored numbers stand for: () or (1,); (kv_heads,);
            (batch, kv_heads); or for each block of 128 tokens (batch_cache, ceil(cache_len / 128), kv_heads), for each
            page (pages, 1, kv_heads), as ``quantize_kv`` gives them. By default 1.
    Returns:
        out (batch, query_len, heads, value_dim) in q's dtype; with ``return_softmax_lse`` (out, lse), lse (batch,
        heads, query_len) float32. A query that sees no key gets 0 and -inf.

    Nothing is ever written outside the cache: a token past the cache's end, or whose page does not exist, is dropped,
    and unseen slots are never read into a result. A query at a position that the rotary tables do not have gives NaN.
    CUDA tensors run on torch's current stream without synchronising; CPU tensors in the emulator. Under
    ``torch.autocast`` q, k and v are cast to its dtype; the caches, which are changed in place, are not: they must have
    that dtype or be FP8.

    Before anything is launched or written it raises TypeError (an argument of the wrong type or dtype), ValueError (a
    shape, stride, device or number that is not taken; an append that the host can see does not fit) or
    NotImplementedError (an argument that requires grad while grad mode is on, or has a forward-mode tangent).
    """
    rows = (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin)
    others = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    factors = (alibi_slopes, learnable_sink, k_descale, v_descale)
    options = (rotary_interleaved, softmax_scale, causal, softcap, num_splits)
    out, lse = cache_ops.attend_again(rows, others, factors, window_size, options) or cache_ops.append_and_attend(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        k_descale=k_descale,
        v_descale=v_descale,
        learnable_sink=learnable_sink,
    )
    return (out, lse) if return_softmax_lse else out


def append_to_kvcache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: int | torch.Tensor,
    *,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_batch_idx: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
):
    """The append of ``flash_attn_with_kvcache`` without the attention: same arguments, same errors, but that they
    speak of k's batch, dtype and device where those speak of q's."""
    cache_ops.append(
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        block_table=block_table,
        k_descale=k_descale,
        v_descale=v_descale,
    )
