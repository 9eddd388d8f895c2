"""The judge of everything around a KV cache, in plain torch and float64: append, rotary, pages, FP8, attention over it.

It shares no code with the kernels: loops over sequences and tokens, then ``reference.attention`` on what a sequence
sees.
"""

from dataclasses import dataclass

import torch

from . import reference
from .descale import BLOCK_TOKENS


@dataclass(frozen=True)
class Cache:
    """A cache and how sequences find their slots in it; the arguments of ``flash_attn_with_kvcache`` by the same names.

    k, v: (rows, cache_len, kv_heads, head_dim or value_dim); rows are pages where there is a block_table.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Slots of a sequence."""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    def slot(self, b: int, position: int) -> tuple[int, int] | None:
        """(row, index in the row) of a token of sequence b, or None where the cache has no such slot."""
        if not 0 <= position < self.capacity:
            return None
        row, index = b, position
        if self.block_table is not None:
            row, index = int(self.block_table[b, position // self.k.shape[1]]), position % self.k.shape[1]
        elif self.cache_batch_idx is not None:
            row = int(self.cache_batch_idx[b])
        return (row, index) if 0 <= row < self.k.shape[0] else None

    def factor(self, descale: torch.Tensor | None, b: int, slot: tuple[int, int]) -> torch.Tensor:
        """(kv_heads, 1) float64: what the elements in ``slot`` are to be multiplied by."""
        kv_heads = self.k.shape[2]
        if descale is None:
            descale = torch.ones((), device=self.k.device)
        if descale.dim() == 2:
            descale = descale[b]
        elif descale.dim() == 3:
            descale = descale[slot[0], 0 if self.block_table is not None else slot[1] // BLOCK_TOKENS]
        return descale.double().expand(kv_heads)[:, None]

    def gather(self, b: int, positions: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys (len, kv_heads, head_dim) and values in float64, and (len,) bool: which exist (the others are 0)."""
        k = torch.zeros((len(positions), *self.k.shape[2:]), dtype=torch.float64, device=self.k.device)
        v = torch.zeros((len(positions), *self.v.shape[2:]), dtype=torch.float64, device=self.k.device)
        exist = torch.zeros(len(positions), dtype=torch.bool, device=self.k.device)
        for i, position in enumerate(positions):
            slot = self.slot(b, position)
            if slot is not None:
                k[i] = self.k[slot].double() * self.factor(self.k_descale, b, slot)
                v[i] = self.v[slot].double() * self.factor(self.v_descale, b, slot)
                exist[i] = True
        return k, v, exist


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """x (length, heads, dim) in float64, its first rotary_dim elements rotated (Su et al. 2021, equation 34).

    cos, sin (positions, rotary_dim / 2); positions (length,): the row of cos and sin for each token. Interleaved:
    elements 2 i and 2 i + 1 are a pair, else i and i + rotary_dim / 2.
    """
    x = x.double().clone()
    half = cos.shape[1]
    c, s = cos.double()[positions][:, None, :], sin.double()[positions][:, None, :]
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    left, right = x[..., first].clone(), x[..., second].clone()
    x[..., first] = left * c - right * s
    x[..., second] = left * s + right * c
    return x


def appended(
    cache: Cache,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the slots must hold after k, v (batch, new_len, kv_heads, dim) are appended, before they are rounded.

    Returns keys and values in float64, of the shapes of cache.k and cache.v, NaN where nothing is written, and
    (rows, cache_len) bool: which slots are written.
    """
    keys = torch.full(cache.k.shape, torch.nan, dtype=torch.float64, device=k.device)
    values = torch.full(cache.v.shape, torch.nan, dtype=torch.float64, device=k.device)
    written = torch.zeros(cache.k.shape[:2], dtype=torch.bool, device=k.device)
    for b in range(k.shape[0]):
        start = min(max(int(cache_seqlens[b]), 0), cache.capacity)
        for i in range(k.shape[1]):
            slot = cache.slot(b, start + i)
            if slot is None:
                continue
            key = k[b, i].double()
            if rotary_cos is not None:
                at = torch.tensor([start + i], device=k.device)
                key = rotated(k[b, i][None], rotary_cos, rotary_sin, at, interleaved=rotary_interleaved)[0]
            keys[slot] = key / cache.factor(cache.k_descale, b, slot)
            values[slot] = v[b, i].double() / cache.factor(cache.v_descale, b, slot)
            written[slot] = True
    return keys, values, written


def lengths_after(cache: Cache, cache_seqlens: torch.Tensor, new_len: int) -> torch.Tensor:
    """(batch,) int32: tokens of each sequence after ``new_len`` more, as far as the cache has slots for them."""
    return (cache_seqlens.clamp(0, cache.capacity) + new_len).clamp_max(cache.capacity)


def rotated_queries(
    q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    rotary_cos: torch.Tensor,
    rotary_sin: torch.Tensor,
    *,
    rotary_interleaved: bool = True,
    ordered: bool,
) -> torch.Tensor:
    """q (batch, query_len, heads, head_dim) in float64, rotated.

    ``ordered`` (causal or windowed calls): query i is at position cache_seqlens + i; else all are at cache_seqlens.
    """
    steps = torch.arange(q.shape[1], device=q.device) * int(ordered)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for b in range(q.shape[0]):
        at = int(cache_seqlens[b]) + steps
        out[b] = rotated(q[b], rotary_cos, rotary_sin, at, interleaved=rotary_interleaved)
    return out


def attention(
    q: torch.Tensor,
    cache: Cache,
    lengths: torch.Tensor,
    *,
    cache_leftpad: torch.Tensor | None = None,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, query_len, heads, head_dim) over the first ``lengths`` (batch,) tokens of each sequence.

    cache_leftpad: (batch,), tokens at the beginning of each sequence that nobody sees. options: those of
    ``reference.attention``; alibi_slopes may be (batch, heads). Returns out (batch, query_len, heads, value_dim) and
    logsumexp (batch, heads, query_len) in float64.
    """
    outs, logsumexps = [], []
    slopes = options.pop("alibi_slopes", None)
    for b in range(q.shape[0]):
        end = min(max(int(lengths[b]), 0), cache.capacity)
        begin = 0 if cache_leftpad is None else min(max(int(cache_leftpad[b]), 0), end)
        k, v, exist = cache.gather(b, range(begin, end))
        chosen = dict(options)
        if slopes is not None:
            chosen["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[b : b + 1]
        if not bool(exist.all()):
            chosen["mask"] = exist[None, None, None, :]
        out, logsumexp = reference.attention(q[b : b + 1], k[None], v[None], **chosen)
        outs.append(out)
        logsumexps.append(logsumexp)
    return torch.cat(outs), torch.cat(logsumexps)
