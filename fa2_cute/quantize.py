"""Keys and values in FP8: one factor for a block of tokens of a KV head, from its largest magnitude."""

import torch

from .cache_spec import BLOCK_TOKENS

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of a block that is so small that its own factor would be subnormal in float32, which GPUs may flush to zero.
SMALLEST_FACTOR = torch.finfo(torch.float32).tiny


@torch.no_grad()
def quantize_kv(x: torch.Tensor, block: int = BLOCK_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` as float8_e4m3fn numbers and the float32 factors that give it back: ``x ~ data * factor``.

    The factor of a block is its largest finite magnitude / 448 (the largest e4m3fn number), so that it fills the
    range; of a block of zeros it is 1, and never less than 2^-126. Rounding is to nearest even, from ``x / factor`` in
    float32. Infinities become +-448 (saturated, and ignored for the factor); a NaN stays NaN and touches no other
    element.

    Arguments:
        x: (..., tokens, kv_heads, dim), float16, bfloat16 or float32: a cache, or pages.
        block: tokens a factor, by default the 128 that ``flash_attn_with_kvcache`` takes for a contiguous cache; for
            pages the page size. The last block may be shorter.
    Returns:
        data, x's shape, contiguous, float8_e4m3fn; factors (..., ceil(tokens / block), kv_heads) float32: what
        ``k_descale`` and ``v_descale`` take.

    An element that does not saturate and is not below 2^-6 factors (where e4m3fn is subnormal) is within 2^-4 of itself
    (OCP 8-bit Floating Point Specification 1.0, section 5: 3 mantissa bits).
    Raises TypeError (not a tensor of these dtypes; block not an integer) or ValueError (fewer than 3 dimensions, block
    not positive).
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: got {type(x).__name__}, takes a torch.Tensor")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: got dtype {x.dtype}, takes {', '.join(map(str, DTYPES))}")
    if x.dim() < 3:
        raise ValueError(f"x: got shape {tuple(x.shape)}, takes (..., tokens, kv_heads, dim)")
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block: got {block!r}, takes a positive integer")
    if block < 1:
        raise ValueError(f"block: got {block}, takes a positive integer")
    tokens, kv_heads, dim = x.shape[-3:]
    blocks = -(-tokens // block)
    if blocks * dim == 0:
        return x.to(FP8, memory_format=torch.contiguous_format), x.new_ones(
            (*x.shape[:-3], blocks, kv_heads), dtype=torch.float32
        )
    x = x.float()
    whole = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * block - tokens))
    whole = whole.reshape(*x.shape[:-3], blocks, block, kv_heads, dim)
    magnitude = whole.abs()
    largest = magnitude.masked_fill(~torch.isfinite(magnitude), 0.0).amax(dim=(-3, -1))
    factors = (largest / torch.finfo(FP8).max).clamp_min(SMALLEST_FACTOR)
    factors = torch.where(largest == 0, 1.0, factors)
    scaled = whole / factors[..., :, None, :, None]
    data = saturated(scaled, FP8).reshape(*x.shape[:-3], blocks * block, kv_heads, dim)
    return data[..., :tokens, :, :].contiguous(), factors


def dequantize_kv(data: torch.Tensor, factors: torch.Tensor, block: int = BLOCK_TOKENS) -> torch.Tensor:
    """What ``data`` and ``factors`` of ``quantize_kv`` stand for: float32 of data's shape."""
    by_token = factors.repeat_interleave(block, dim=-2)[..., : data.shape[-3], :]
    return data.float() * by_token[..., None]


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to an FP8 ``dtype``, what is beyond its largest number to that; NaN stays NaN."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)
