"""Registers ``attn_implementation="fa2_cute"`` with Hugging Face transformers (4.57 or later): import this module.

    import fa2_cute.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation="fa2_cute")

transformers asks two functions: one makes the mask of a forward pass, once, and one attends, in each layer. What they
agree on, told apart by dtype so that a mask is the whole truth about who sees whom; always four dimensions, since a
model hands on what has four as it is:

    None                                 causal if the layer is (aligned to the bottom right), else everything
    int64 (1, 1, 1, 2), on the CPU       [left, right] of a window, aligned to the bottom right
    int32 (1, 1, 1, sequences + 1)       cumulative lengths of packed sequences, causal in each
    uint8 (batch, 1, 1, key_len)         1 where a key is no padding; causal on top
    bool or floating, whatever fits      broadcasts to (batch, heads, query_len, key_len); nothing on top

Only the last can cost memory for every pair of query and key: it is for what a window cannot say (images whose tokens
see each other, chunks, padding together with a window, caches of fixed length, windows in compiled graphs).
"""

import inspect
from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .. import ops
from ..attention import refuse_dropout

NAME = "fa2_cute"
_OLD = "cache_position" in inspect.signature(sdpa_mask).parameters  # of transformers before 5.4: mask's docstring
_UNBOUNDED = 2**62  # among a window's sides, as a tensor has no None

# What transformers calls the arguments of ``ops.attend``.
_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scaling", "learnable_sink": "s_aux"}
_NAMES |= {"attn_mask": "attention_mask", "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k"}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    output_attentions: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """What a layer calls (transformers' AttentionInterface).

    Arguments:
        query: (batch, heads, query_len, head_dim); key: (batch, kv_heads, key_len, head_dim); value: (batch, kv_heads,
            key_len, value_dim); float16 or bfloat16.
        attention_mask: what ``mask`` made, or a four-dimensional mask of the caller's own.
        sliding_window: used with packed sequences; otherwise the mask holds the window.
        softcap, s_aux (heads,): ``softcap`` and ``learnable_sink`` of ``flash_attn_func``.
        position_bias: added to the logits, broadcastable to (batch, heads, query_len, key_len).
        cu_seq_lens_q, cu_seq_lens_k: cumulative lengths of sequences packed along query_len, batch 1; the mask is not
            looked at then.
    Returns:
        (batch, query_len, heads, value_dim), and None for the weights, which are never materialised.

    Raises what ``flash_attn_func`` raises, and NotImplementedError for ``output_attentions``.
    """
    if output_attentions:
        raise NotImplementedError(
            'output_attentions: got True, takes False: attention weights are not kept (use attn_implementation="eager")'
        )
    refuse_dropout(dropout)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sink": s_aux, "wants_lse": False}
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    if cu_seq_lens_q is not None:
        window = _window_of_layer(module, sliding_window, is_causal)
    elif attention_mask is not None and attention_mask.dtype == torch.int32:
        cu_seq_lens_q = cu_seq_lens_k = _own(attention_mask, (1, 1, 1, None)).flatten()
        window = (None, 0)
    if cu_seq_lens_q is not None:
        if position_bias is not None:
            raise NotImplementedError("position_bias: got a tensor, takes None with packed sequences")
        packed = (x.flatten(0, 1) for x in (q, k, v))
        lengths = {"cu_seqlens_q": cu_seq_lens_q, "cu_seqlens_k": cu_seq_lens_k}
        out, _ = ops.attend_named(_NAMES, *packed, window=window, **lengths, **options)
        return out.view(*q.shape[:2], *out.shape[1:]), None

    window, bias = _window_and_mask(attention_mask, is_causal, q.dtype)
    if position_bias is not None:
        bias = _with_position_bias(bias, position_bias)
    out, _ = ops.attend_named(_NAMES, q, k, v, window=window, mask=bias, **options)
    return out, None


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config=None,
    cache_position: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """What a model calls once a forward pass (transformers' AttentionMaskInterface); the module says what it returns.

    Query i stands at position ``q_offset + i``, key j at ``kv_offset + j``; ``mask_function`` says who sees whom. It is
    known to be plain where a mask may be left out: causal (``allow_is_causal_skip``), perhaps with a window or chunks
    of ``local_size``; or everything (``allow_is_bidirectional_skip``), perhaps with a window to both sides.
    Older versions of transformers give the queries' positions (``cache_position``) for ``q_length`` and ``q_offset``.
    """
    if cache_position is not None:
        q_length = cache_position.shape[0]
        q_offset = cache_position[0] if _traced() else cache_position[0].item()
    padding = attention_mask
    if padding is not None:
        to_come = max(kv_offset + kv_length - padding.shape[1], 0)  # of a cache of fixed length
        padding = torch.nn.functional.pad(padding.bool(), (0, to_come))[:, kv_offset : kv_offset + kv_length]
        if not _traced() and padding.all():
            padding = None
    if allow_is_causal_skip or allow_is_bidirectional_skip:
        window = _window(q_length, kv_length, q_offset, kv_offset, local_size, allow_is_causal_skip, config)
        usual = (None, 0 if allow_is_causal_skip and q_length > 1 else None)
        if padding is None:
            if window == usual:
                return None
            if window is not None and not _traced():
                sides = [_UNBOUNDED if side is None else side for side in window]
                return torch.tensor(sides, device="cpu")[None, None, None]
        elif window == (None, 0):
            return padding[:, None, None, :].view(torch.uint8)
        elif window == (None, None):
            return padding[:, None, None, :]
    if padding is None and not _traced():
        lengths = _packed_lengths(mask_function)
        if lengths is not None:
            return lengths
    queries = {"cache_position": cache_position} if _OLD else {"q_length": q_length, "q_offset": q_offset}
    return sdpa_mask(
        batch_size,
        **queries,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **kwargs,
    )


def _traced() -> bool:
    """Whether a tensor's values must not be looked at."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _window(
    q_length, kv_length, q_offset, kv_offset, local_size, causal: bool, config
) -> tuple[int | None, int | None] | None:
    """A plain pattern as ``ops.attend``'s window, aligned to the bottom right; None where no window is that pattern."""
    if isinstance(q_offset, torch.Tensor) or isinstance(kv_offset, torch.Tensor):
        return None
    shift = (q_offset - kv_offset) - (kv_length - q_length)  # keys that the last query's own key is from the end
    left, right = None, shift if causal else None
    if local_size is not None and kv_length >= local_size:
        if local_size != getattr(config, "sliding_window", None) or hasattr(config, "attention_chunk_size"):
            return None  # chunks
        left = local_size - 1 - shift if causal else local_size - shift
        right = shift if causal else local_size + shift
        if left < 0:
            return None
    if left is not None and left >= kv_length - 1:
        left = None
    if right is not None and right >= q_length - 1:
        right = None
    return left, right


def _packed_lengths(mask_function: Callable) -> torch.Tensor | None:
    """Cumulative lengths (1, 1, 1, sequences + 1), int32, of a mask that is causal in each of several packed sequences.

    transformers finds such sequences in position_ids and hands on a function of nested closures, which is opened here.
    None for anything but the function that was expected.
    """
    both = _closure(mask_function, "and_masks.<locals>.and_mask").get("mask_functions", ())
    if len(both) != 2:
        return None
    within = _closure(both[0], "remap_positions_for_packed_sequence.<locals>.inner_mask").get("mask_function", both[0])
    sequence = _closure(both[1], "packed_sequence_mask_function.<locals>.inner_mask").get("packed_sequence_mask")
    if within is not causal_mask_function or sequence is None:
        return None
    first = torch.ones_like(sequence, dtype=torch.bool)  # tokens that begin a sequence; a row of the batch begins one
    first[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    starts = first.flatten().nonzero()[:, 0].to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=first.numel())[None, None, None]


def _closure(function: Callable, qualified_name: str) -> dict:
    """The variables that ``function`` closes over, if that is its name."""
    if getattr(function, "__qualname__", None) != qualified_name:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _window_and_mask(
    attention_mask: torch.Tensor | None, causal: bool, dtype: torch.dtype
) -> tuple[tuple[int | None, int | None], torch.Tensor | None]:
    """What ``mask`` made, as ``ops.attend`` takes it."""
    if attention_mask is None:
        return (None, 0 if causal else None), None
    if attention_mask.dtype == torch.int64:
        sides = _own(attention_mask, (1, 1, 1, 2)).flatten().tolist()
        left, right = (None if side == _UNBOUNDED else side for side in sides)
        return (left, right), None
    if attention_mask.dtype == torch.uint8:
        return (None, 0), _own(attention_mask, (None, 1, 1, None)).view(torch.bool)
    if attention_mask.dim() != 4:
        raise ValueError(
            f"attention_mask: got shape {tuple(attention_mask.shape)}, takes one that broadcasts to (batch, heads, "
            "query_len, key_len), four dimensions"
        )
    if attention_mask.is_floating_point() and attention_mask.dtype != dtype:
        attention_mask = attention_mask.float()
    return (None, None), attention_mask


def _own(attention_mask: torch.Tensor, shape: tuple[int | None, ...]) -> torch.Tensor:
    """``attention_mask``, once it is one of integers that ``mask`` can have made; None is any extent."""
    got = attention_mask.shape
    if len(got) != len(shape) or any(full not in (None, extent) for extent, full in zip(got, shape, strict=True)):
        raise TypeError(
            f"attention_mask: got dtype {attention_mask.dtype} and shape {tuple(got)}, takes torch.bool or floating"
        )
    return attention_mask


def _with_position_bias(mask: torch.Tensor | None, position_bias: torch.Tensor) -> torch.Tensor:
    """One mask to add to the logits."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, float("-inf"))
    return position_bias + mask


def _window_of_layer(module: torch.nn.Module, sliding_window: int | None, causal: bool):
    """The window of a layer that gets lengths instead of a mask: it must hand its window down itself."""
    config = module.config
    kinds = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    kind = None if kinds is None or layer is None else kinds[layer]
    if kind == "chunked_attention":
        raise NotImplementedError("cu_seq_lens_q: got lengths, takes None in a layer that attends in chunks")
    if sliding_window is not None:
        return (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    if kind == "sliding_attention" or (kind is None and getattr(config, "sliding_window", None) is not None):
        raise NotImplementedError(
            f"cu_seq_lens_q: got lengths, takes None in a {type(module).__name__}, which has a sliding window and does "
            "not hand it down"
        )
    return None, 0 if causal else None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
