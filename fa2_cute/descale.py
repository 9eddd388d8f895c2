"""What an FP8 cache is multiplied by: one description of every form in which descales are given."""

from dataclasses import dataclass

import torch

from .cache_spec import BLOCK_TOKENS


@dataclass(frozen=True)
class Descale:
    """Float32 factors: a cached element stands for ``factor * element``.

    kind      of ``cache_spec.SCALE_KINDS``. "unit": 1 everywhere, without factors.
              "sequence": factors (batch, kv_heads), by sequence of the call.
              "block": factors (rows, blocks, kv_heads), by row of the cache: (pages, 1, kv_heads) for a paged cache,
              (batch_cache, ceil(cache_len / BLOCK_TOKENS), kv_heads) for a contiguous one.
    factors   strides may be 0 where fewer numbers were given
    """

    kind: str
    factors: torch.Tensor | None = None


UNIT = Descale("unit")


def normalise(
    name: str,
    descale: torch.Tensor | None,
    cache: torch.Tensor,
    *,
    batch: int,
    paged: bool,
) -> Descale:
    """``descale`` as the kernels take it; no look at the numbers, and no copy (but of a lazily negated view).

    Arguments:
        name: what messages call it.
        descale: None for 1, or float32 on the cache's device: () or (1,) for the tensor, (kv_heads,),
            (batch, kv_heads), or (rows, blocks, kv_heads) as in ``Descale``.
        cache: (batch_cache, cache_len, kv_heads, dim), or (pages, page_size, kv_heads, dim) if ``paged``.
        batch: sequences of the call.
    Raises TypeError (no tensor, not float32) or ValueError (shape, device, or given with a cache of 16-bit numbers).
    """
    if descale is None:
        return UNIT
    if not isinstance(descale, torch.Tensor):
        raise TypeError(f"{name}: got {type(descale).__name__}, takes a float32 torch.Tensor or None")
    if descale.dtype != torch.float32:
        raise TypeError(f"{name}: got dtype {descale.dtype}, takes torch.float32")
    if descale.device != cache.device:
        raise ValueError(f"{name}: got device {descale.device}, takes the cache's device {cache.device}")
    if cache.element_size() != 1:
        raise ValueError(f"{name}: got one with a cache of {cache.dtype}, takes it with a cache of float8 only")
    rows, length, kv_heads, _ = cache.shape
    blocks = 1 if paged else -(-length // BLOCK_TOKENS)
    shape = tuple(descale.shape)
    if shape in ((), (1,), (kv_heads,), (batch, kv_heads)):
        return Descale("sequence", descale.resolve_neg().expand(batch, kv_heads))
    if shape == (rows, blocks, kv_heads):
        return Descale("block", descale.resolve_neg())
    raise ValueError(
        f"{name}: got shape {shape}, takes (), (1,), (kv_heads={kv_heads},), (batch={batch}, {kv_heads}) "
        f"or a factor for each {'page' if paged else f'{BLOCK_TOKENS} tokens'}: {(rows, blocks, kv_heads)}"
    )
