"""torch's scaled_dot_product_attention, its layout and meaning; and a context that routes torch's own calls here."""

import math
import types

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from . import ops
from .attention import refuse_dropout

_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}  # what torch calls the arguments of attend


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on these kernels, masks included.

    Arguments (names, order and meaning of torch's):
        query: (..., heads, query_len, head_dim), float16 or bfloat16, head_dim a multiple of 8 from 8 to 256.
        key: (..., kv_heads, key_len, head_dim); value: (..., kv_heads, key_len, value_dim).
            Leading dimensions broadcast, and so do heads where one has a single head; two or three dimensions are
            taken as well. Any strides: a tensor whose last stride is not 1 is copied, and so are several leading
            dimensions that cannot be viewed as one.
        attn_mask: bool (True takes part), or query's dtype or float32 (added to the logits); broadcasts to
            (..., heads, query_len, key_len).
        dropout_p: 0.0 only.
        is_causal: query i sees keys j <= i, aligned to the top left as torch has it; with ``attn_mask``, both hold.
        scale: finite number, by default ``head_dim ** -0.5``.
        enable_gqa: query head h reads KV head ``h // (heads // kv_heads)``; kv_heads divides heads.
    Returns:
        (..., heads, query_len, value_dim) in query's dtype; in memory, the heads of a query lie side by side, as
        torch's own flash attention returns them. A query that sees no key gets 0 (older torch: NaN).

    Raises TypeError, ValueError and NotImplementedError as ``flash_attn_func`` does, where torch has RuntimeError.
    """
    refuse_dropout(dropout_p)
    if is_causal not in (True, False):
        raise TypeError(f"is_causal: got {is_causal!r}, takes True or False")
    if attn_mask is None and _fit(query, key, value, enable_gqa):  # the usual, and quick
        window = (None, query.shape[2] - key.shape[2] if is_causal else None)
        rows = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out, _ = ops.attend_named(_NAMES, *rows, softmax_scale=scale, window=window, wants_lse=False)
        return out.transpose(1, 2)
    q, k, v = _broadcast(query, key, value, enable_gqa)
    *leading, _, query_len, _ = q.shape
    key_len = k.shape[-2]
    mask = None if attn_mask is None else _mask(attn_mask, query, (*q.shape[:-1], key_len))
    out, _ = ops.attend_named(
        _NAMES,
        _rows(q),
        _rows(k),
        _rows(v),
        softmax_scale=scale,
        window=(None, query_len - key_len if is_causal else None),
        mask=mask,
        wants_lse=False,
    )
    if len(leading) != 1:
        out = out.view(*leading, *out.shape[1:])
    out = out.transpose(-3, -2)
    rank = max(query.dim(), key.dim(), value.dim())
    return out if rank >= 4 else out.view(out.shape[4 - rank :])


class sdpa_kernel(TorchFunctionMode):
    """Inside ``with fa2_cute.sdpa_kernel():``, torch's scaled_dot_product_attention is this package's.

    However it was imported, and where torch calls it itself: ``nn.MultiheadAttention`` and the transformer layers with
    ``need_weights=False`` (their fused fast path, which does not call it, is off inside). A call that the kernels do
    not take raises, as in torch's own ``sdpa_kernel``, and says why; nothing falls back.

    The context is of the thread that enters it, nests, and may be entered inside ``torch.compile`` or around it. Calls
    of ``torch.ops.aten.scaled_dot_product_attention`` and code in C++ or TorchScript are not routed. Each call of a
    torch function inside passes through Python once: about a microsecond.
    """

    def __init__(self, *backends):
        if backends:
            raise TypeError(f"sdpa_kernel: got {backends[0]}, takes no backends: every call inside is this package's")
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _ROUTES.get(func, func)(*args, **(kwargs or {}))


# A mode is off while it handles a call, so that torch's attention inside torch's multi-head attention would not be
# seen: the same code runs with another global of that name. It must not ask for modes again either; and without a
# module's name, torch.compile takes these globals for what they are.
_GLOBALS = {name: value for name, value in vars(F).items() if name != "__name__"}
_GLOBALS["scaled_dot_product_attention"] = scaled_dot_product_attention
_GLOBALS["has_torch_function"] = lambda tensors: False
_multi_head_attention_forward = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    _GLOBALS,
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
_ROUTES = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: _multi_head_attention_forward,
}


def _fit(query, key, value, enable_gqa: bool) -> bool:
    """Whether these are tensors of four dimensions in which nothing is broadcast, with contiguous rows."""
    for x in (query, key, value):
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.dim() != 4 or x.stride(3) != 1:
            return False
    (batch, heads, _, head_dim), (of_key, kv_heads, key_len, of_row), of_value = query.shape, key.shape, value.shape
    if batch != of_key or head_dim != of_row or (heads != kv_heads and not enable_gqa):
        return False
    return of_value[0] == of_key and of_value[1] == kv_heads and of_value[2] == key_len


def _broadcast(query, key, value, enable_gqa: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value with four dimensions or more that fit each other, expanded where they broadcast."""
    named = (("query", query), ("key", key), ("value", value))
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor")
        if x.layout != torch.strided:
            raise ValueError(f"{name}: got layout {x.layout}, takes a strided tensor")
        if x.dim() < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes (..., heads, length, head_dim)")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: got head_dim {key.shape[-1]}, takes query's {query.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: got length {value.shape[-2]}, takes key's {key.shape[-2]}")
    rank = max(4, *(x.dim() for _, x in named))
    return _expand(*_heads(*(_with_rank(x, rank) for _, x in named), enable_gqa))


def _with_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """``x`` with dimensions of 1 in front."""
    return x if x.dim() == rank else x[(None,) * (rank - x.dim())]


def _heads(query, key, value, enable_gqa: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query with all heads, key and value with as many heads as each other."""
    heads, of_key, of_value = (x.shape[-3] for x in (query, key, value))
    if not enable_gqa:
        heads = max(heads, of_key, of_value) if heads and of_key and of_value else 0
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.shape[-3] not in (1, heads):
                raise ValueError(f"{name}: got {x.shape[-3]} heads, takes {heads} or 1 (or enable_gqa=True)")
    kv_heads = max(of_key, of_value)
    for name, x in (("key", key), ("value", value)):
        of_x = x.shape[-3]
        if heads and (not of_x or heads % of_x or kv_heads % of_x):
            raise ValueError(f"{name}: got {of_x} heads, takes a divisor of query's {heads} heads")
    return _with_heads(query, heads), _with_heads(key, kv_heads), _with_heads(value, kv_heads)


def _with_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``x`` with its heads repeated to ``heads``; without a copy where it has one."""
    if x.shape[-3] == heads:
        return x
    if x.shape[-3] == 1:
        return x.expand(*x.shape[:-3], heads, *x.shape[-2:])
    return x.repeat_interleave(heads // x.shape[-3], dim=-3)


def _expand(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensors`` with the same dimensions before the heads."""
    shapes = [tuple(x.shape[:-3]) for x in tensors]
    try:
        leading = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise ValueError(
            f"query, key, value: got leading dimensions {', '.join(map(str, shapes))}, takes ones that broadcast"
        ) from None
    return tuple(x.expand(*leading, *x.shape[-3:]) for x in tensors)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(..., heads, length, dim) as (batch, length, heads, dim) with a last stride of 1."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return _flat(x).transpose(1, 2)


def _mask(mask: torch.Tensor, query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``mask`` with four dimensions that broadcast to (batch, heads, query_len, key_len)."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask: got {type(mask).__name__}, takes a torch.Tensor or None")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(f"attn_mask: got dtype {mask.dtype}, takes torch.bool, torch.float32 or query's {query.dtype}")
    if mask.dim() > len(shape) or any(
        extent not in (1, full) for extent, full in zip(mask.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(f"attn_mask: got shape {tuple(mask.shape)}, takes one that broadcasts to {tuple(shape)}")
    mask = _with_rank(mask, len(shape))
    if len(shape) != 4 and any(extent != 1 for extent in mask.shape[:-3]):
        mask = mask.expand(*shape[:-3], *mask.shape[-3:])
    return _flat(mask)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its dimensions before the last three made one."""
    return x if x.dim() == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
