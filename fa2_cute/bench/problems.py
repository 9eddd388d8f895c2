"""The problems that are timed: prefill and decode cells as plain data, read from text, and their inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..explore.space import Workload

if TYPE_CHECKING:  # options are read, and refused, without it
    import torch

MOST_SETS = 64
TOKENS = 16_384  # batch x length of the prefill cells
PAGES = (64, 16, 1)  # sizes that decoding is timed with
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)


def prefill_cells(quick: bool = False) -> list[Workload]:
    """The default prefill problems: lengths at head_dim 128 and 64, other widths, grouped queries, few queries."""
    cells = []
    for head_dim, heads in ((128, 16), (64, 32)):
        cells += [(TOKENS // n, n, n, heads, heads, head_dim) for n in ((2048, 8192) if quick else LENGTHS)]
    if not quick:
        cells += [(TOKENS // n, n, n, 16, 16, d) for d in (96, 192, 256) for n in (2048, 8192)]
    cells += [(4, 4096, 4096, 32, 8, 128), (1, 512, 8192, 32, 8, 128)]
    return [
        Workload(head_dim, query_len, key_len, causal, batch, heads, kv_heads)
        for batch, query_len, key_len, heads, kv_heads, head_dim in cells
        for causal in (False, True)
    ]


def parse_shape(text: str, kv_heads: int | None, key_len: int | None, dtype: str) -> list[Workload]:
    """ "2x8192x16x128": batch, queries, heads, head_dim; full and causal. ValueError names what is wrong."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"--shape: got {text!r}, takes BATCHxLENGTHxHEADSxHEAD_DIM such as 2x8192x16x128")
    batch, query_len, heads, head_dim = map(int, match.groups())
    keys = query_len if key_len is None else key_len
    kv_heads = heads if kv_heads is None else kv_heads
    return [Workload(head_dim, query_len, keys, causal, batch, heads, kv_heads, dtype) for causal in (False, True)]


def title(of: Workload) -> str:
    """ "2 x 8192 x 16 x 128", with "512 on 8192" and "32/8" where lengths or heads differ."""
    length = f"{of.query_len}" if of.query_len == of.key_len else f"{of.query_len} on {of.key_len}"
    heads = f"{of.heads}" if of.heads == of.kv_heads else f"{of.heads}/{of.kv_heads}"
    return f"{of.batch} x {length} x {heads} x {of.head_dim}"


def group(of: Workload) -> str:
    """The table that a prefill cell belongs to."""
    return f"head_dim {of.head_dim}, {'causal' if of.causal else 'full'}"


@dataclass(frozen=True)
class Decode:
    """batch sequences of length keys, one query each."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __post_init__(self):
        Workload(self.head_dim, 1, self.length, False, self.batch, self.heads, self.kv_heads)  # the same rules

    @property
    def cache_bytes(self) -> int:
        """K and V in 16 bits."""
        return 4 * self.batch * self.length * self.kv_heads * self.head_dim

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.length}"


def decode_cells(quick: bool = False) -> list[tuple[int, int]]:
    """(batch, keys) of the default decode problems."""
    if quick:
        return [(1, 8192), (16, 8192), (64, 8192)]
    lone = [(1, 131_072), (4, 131_072)]
    return [(batch, length) for batch in (1, 4, 16, 64) for length in (1024, 8192, 32_768)] + lone


def parse_cell(text: str) -> tuple[int, int]:
    """ "16x8192": batch, keys. ValueError names what is wrong."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"--cell: got {text!r}, takes BATCHxKEYS such as 16x8192")
    return int(match[1]), int(match[2])


def rotated(make: Callable[[], tuple[torch.Tensor, ...]], l2_bytes: int) -> list[tuple[torch.Tensor, ...]]:
    """Sets of inputs from ``make``, together twice the L2 or more, so that no call finds the last one's there."""
    sets = [make()]
    size = sum(x.nbytes for x in sets[0])
    wanted = min(MOST_SETS, max(1, math.ceil(2 * l2_bytes / size)))
    return sets + [make() for _ in range(wanted - 1)]


def prefill_inputs(of: Workload, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Normal random q, k, v, (batch, length, heads, head_dim)."""
    import torch

    return normal(
        device,
        getattr(torch, of.dtype),
        (of.batch, of.query_len, of.heads, of.head_dim),
        *[(of.batch, of.key_len, of.kv_heads, of.head_dim)] * 2,
    )


def decode_inputs(of: Decode, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Normal random q (batch, 1, heads, head_dim), k_cache and v_cache (batch, length, kv_heads, head_dim)."""
    import torch

    cache = (of.batch, of.length, of.kv_heads, of.head_dim)
    return normal(device, torch.bfloat16, (of.batch, 1, of.heads, of.head_dim), cache, cache)


def normal(device: torch.device, dtype: torch.dtype, *shapes: Iterable[int]) -> tuple[torch.Tensor, ...]:
    """Normal random tensors."""
    import torch

    return tuple(torch.empty(tuple(shape), device=device, dtype=dtype).normal_() for shape in shapes)
