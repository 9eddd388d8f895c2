"""Ways for a (batch, length, heads, head_dim) tensor to lie in memory, each with a last stride of 1."""

import math

import torch

LAYOUTS = (
    "contiguous",
    "heads_first",
    "sliced_length",
    "sliced_heads",
    "packed",
    "broadcast_batch",
    "broadcast_heads",
    "broadcast_length",
    "misaligned_start",
    "odd_strides",
    "odd_unit_strides",
)


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A view like ``x``, with the same numbers unless it broadcasts, laid out in memory as named.

    x: (batch, length, heads, head_dim), contiguous. The last stride of the view is 1. ValueError for an unknown name.
    """
    batch, length, heads, head_dim = x.shape
    if layout == "contiguous":
        return x
    if layout == "heads_first":
        return _inside((batch, heads, length, head_dim), x, lambda whole: whole.transpose(1, 2))
    if layout == "sliced_length":  # a cache that is longer than what it holds
        return _inside((batch, length + 3, heads, head_dim), x, lambda whole: whole[:, 1 : 1 + length])
    if layout == "sliced_heads":
        return _inside((batch, length, heads + 2, head_dim), x, lambda whole: whole[:, :, 1 : 1 + heads])
    if layout == "packed":  # one of three projections side by side in each row
        return _inside((batch, length, heads, 3 * head_dim), x, lambda whole: whole[..., head_dim : 2 * head_dim])
    if layout == "broadcast_batch":
        return x[:1].expand_as(x)
    if layout == "broadcast_heads":
        return x[:, :, :1].expand_as(x)
    if layout == "broadcast_length":
        return x[:, :1].expand_as(x)
    if layout == "misaligned_start":
        flat = x.new_full((x.numel() + 1,), math.nan)
        return _filled(flat[1:].view(x.shape), x)
    if layout == "odd_strides":
        return _inside((batch, length, heads, head_dim + 3), x, lambda whole: whole[..., :head_dim])
    if layout == "odd_unit_strides":  # the stride of an extent of 1 means nothing, whatever it is
        strides = [7 if extent == 1 else stride for extent, stride in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, (*strides[:3], 1))
    raise ValueError(f"layout: got {layout!r}, takes one of {', '.join(LAYOUTS)}")


def far_apart(allocate, shape, dimension: int, dtype: torch.dtype) -> torch.Tensor:
    """An unfilled view of ``shape``, its last index along ``dimension`` beyond 2^31 elements of its memory.

    allocate: ``torch.empty`` or the like, called with (elements, dtype=...).
    """
    reach = shape[dimension] - 1
    strides = list(torch.empty(shape, device="meta").stride())
    strides[dimension] = -(-(2**31 + 64) // reach // 64) * 64  # a multiple of 64 elements: rows stay aligned
    return allocate(strides[dimension] * reach + math.prod(shape), dtype=dtype).as_strided(shape, strides)


def _inside(shape, x, view_of) -> torch.Tensor:
    """``x`` copied into the view that ``view_of`` takes of a NaN-filled tensor of ``shape``."""
    return _filled(view_of(x.new_full(shape, math.nan)), x)


def _filled(view, x) -> torch.Tensor:
    view.copy_(x)
    return view


def moved(view: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """``view`` on ``device`` with all the memory it is a view of: strides and what lies between are kept."""
    if view.device == torch.device(device):
        return view
    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    return whole.to(device).as_strided(view.shape, view.stride(), view.storage_offset())
