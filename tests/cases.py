"""One attention call as plain data: what strategies draw, failures print and tensors are built from.

``repr`` of a case is valid Python: paste it after ``from cases import *`` and call ``checks.check(...)``.
"""

import math
from dataclasses import dataclass

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# A normal number of the dtype near the bottom of its range, below which all is denormal.
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
# Magnitude of large logits' queries and keys. Their products stay far from fp32's largest number.
LARGE = 32.0
# A magnitude of v at which sums of a few thousand unscaled products overflow fp32 (bfloat16) or the dtype
# (float16), while the exact output does not.
LARGE_VALUE = {"float16": 2.0**13, "bfloat16": 2.0**112}

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
VALUES = (
    "normal",
    "large_logits",
    "all_equal",
    "zeros",
    "one_huge_logit",
    "rising_logits",
    "falling_logits",
    "large_values",
    "minus_infinite_keys",
    "nan_queries",
    "nan_keys",
    "denormal",
)


@dataclass(frozen=True)
class Case:
    """A call: shapes as in ``flash_attn_func``, options, how the memory is laid out, what the numbers are."""

    dtype: str = "bfloat16"
    batch: int = 1
    query_len: int = 1
    key_len: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    causal: bool = False
    softmax_scale: float | None = None
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    values: str = "normal"
    seed: int = 0

    def tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v on ``device``. Memory between and around views holds NaN, so that stray reads show."""
        generator = torch.Generator().manual_seed(self.seed)
        query_shape = (self.batch, self.query_len, self.heads, self.head_dim)
        key_shape = (self.batch, self.key_len, self.kv_heads, self.head_dim)
        q, k, v = (torch.randn(shape, generator=generator) for shape in (query_shape, key_shape, key_shape))
        q, k, v = _VALUES[self.values](self, q, k, v, generator)
        dtype = DTYPES[self.dtype]
        return tuple(
            lay_out(x.to(dtype).to(device), layout) for x, layout in zip((q, k, v), self.layouts, strict=True)
        )


def _normal(case, q, k, v, generator):
    return q, k, v


def _large_logits(case, q, k, v, generator):
    return q * LARGE, k * LARGE, v


def _all_equal(case, q, k, v, generator):
    return torch.ones_like(q), torch.ones_like(k), v


def _zeros(case, q, k, v, generator):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _one_huge_logit(case, q, k, v, generator):
    """All queries point the same way, and so does one key, 100 times as far as the others."""
    direction = torch.randn(case.head_dim, generator=generator)
    if case.key_len:
        k[:, int(torch.randint(case.key_len, (), generator=generator))] = 100.0 * direction
    return direction + 0.1 * q, k, v


def _rising_logits(case, q, k, v, generator):
    """Logits grow along the keys, by more than any slack in a tile: going upwards means rescaling always."""
    direction = torch.randn(case.head_dim, generator=generator)
    ramp = torch.linspace(-1.0, 1.0, max(case.key_len, 1))[: case.key_len, None, None] * 8.0
    return direction + 0.1 * q, ramp * direction + 0.1 * k, v


def _falling_logits(case, q, k, v, generator):
    """The same for kernels that go downwards."""
    q, k, v = _rising_logits(case, q, k, v, generator)
    return q, k.flip(1), v


def _large_values(case, q, k, v, generator):
    """v near the top of the range, under logits that rise: probabilities must not be far above 1 for long."""
    q, k, v = _rising_logits(case, q, k, v, generator)
    return q, 0.125 * k, v.clamp(-3, 3) * LARGE_VALUE[case.dtype]


def _minus_infinite_keys(case, q, k, v, generator):
    """Some keys at a logit of -inf for all queries (with a positive scale): a mask put into the data."""
    hidden = torch.rand(case.batch, case.key_len, generator=generator) < 0.5
    k[hidden] = -math.inf
    return q.abs() + 0.125, k, v


def _nan_queries(case, q, k, v, generator):
    q[torch.rand(case.batch, case.query_len, case.heads, generator=generator) < 0.25] = math.nan
    return q, k, v


def _nan_keys(case, q, k, v, generator):
    if case.key_len:
        k[:, int(torch.randint(case.key_len, (), generator=generator)), :, 0] = math.nan
    return q, k, v


def _denormal(case, q, k, v, generator):
    """Every number below the normal range of its dtype, so that no step may flush it."""
    limit = 0.9 * SMALLEST_NORMAL[case.dtype]
    return q.clamp(-1, 1) * limit, k.clamp(-1, 1) * limit, v.clamp(-1, 1) * limit


_VALUES = {
    "normal": _normal,
    "large_logits": _large_logits,
    "all_equal": _all_equal,
    "zeros": _zeros,
    "one_huge_logit": _one_huge_logit,
    "rising_logits": _rising_logits,
    "falling_logits": _falling_logits,
    "large_values": _large_values,
    "minus_infinite_keys": _minus_infinite_keys,
    "nan_queries": _nan_queries,
    "nan_keys": _nan_keys,
    "denormal": _denormal,
}


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A view like ``x``, with the same numbers unless it broadcasts, laid out in memory as named.

    x: (batch, length, heads, head_dim), contiguous. The last stride of the view is 1.
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
        return _inside(
            (batch, length, heads, 3 * head_dim), x, lambda whole: whole[..., head_dim : 2 * head_dim]
        )
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
