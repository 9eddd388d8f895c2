"""Launches the append kernel: new keys and values into a cache, and queries rotated beside them."""

import functools
from dataclasses import dataclass

import torch

from .append_spec import THREADS, AppendSpec
from .cache_checks import FP8_DTYPES, rows_of
from .cache_spec import FIRST_OVERLAP, MAX_INT32, VECTOR_BYTES
from .descale import UNIT, Descale
from .forward import aligned, architecture_of, dense_vector
from .launch import Launch
from .problem import DTYPES as INPUT_DTYPES

DTYPES = {**INPUT_DTYPES, torch.float32: "float32", **FP8_DTYPES}

_spec = functools.cache(AppendSpec)  # checking one costs as much as a launch


@dataclass(frozen=True, eq=False)
class Appending:
    """A checked append, not launched yet.

    launch      None if there is nothing to append or to rotate
    lengths     (batch,) int32: after the launch, the tokens of each sequence, between 0 and its capacity
    rotated     like q: after the launch, its rotation; None without rotary tables
    """

    launch: Launch | None
    lengths: torch.Tensor
    rotated: torch.Tensor | None


def prepare_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    capacity: int,
    q: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    ordered: bool = True,
    cache_batch_idx: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_descale: Descale = UNIT,
    v_descale: Descale = UNIT,
) -> Appending:
    """What appends k, v (batch, new_len, kv_heads, dim) to caches in place and, with rotary tables, rotates q.

    Arguments are those of ``flash_attn_with_kvcache`` after its checks; cache_seqlens (batch,) int32 on the device,
    capacity the slots of a sequence, ``ordered`` whether query i is at position ``cache_seqlens + i``; without q only
    keys are rotated. Raises ValueError for more rows than a launch takes.
    """
    batch, new_len, kv_heads, head_dim = k.shape
    rotary = rotary_cos is not None
    if rotary and q is None:
        q = k[:, :0]  # what a kernel that rotates is given as queries: none
    spec = _spec(
        dtype=DTYPES[k.dtype],
        cache_dtype=DTYPES[k_cache.dtype],
        head_dim=head_dim,
        value_dim=v.shape[3],
        paged=block_table is not None,
        indexed=cache_batch_idx is not None,
        rotary_dim=2 * rotary_cos.shape[1] if rotary else 0,
        interleaved=rotary and rotary_interleaved,
        rotary_dtype=DTYPES[rotary_cos.dtype] if rotary else "float32",
        k_descale=k_descale.kind,
        v_descale=v_descale.kind,
        overlap=architecture_of(k.device).capability >= FIRST_OVERLAP,
    )
    query_rows = q.shape[1] * q.shape[2] if rotary else 0
    grid = spec.grid(batch, query_rows, new_len * kv_heads)
    # The kernel counts blocks, and rows to the end of a block, in 32 bits.
    if max(grid[0], query_rows + THREADS) > MAX_INT32 and query_rows > new_len * kv_heads:
        raise ValueError(f"q: got shape {tuple(q.shape)}, takes fewer queries and heads: {grid[0]} thread blocks")
    if max(grid[0], new_len * kv_heads + THREADS) > MAX_INT32:
        raise ValueError(f"k: got shape {tuple(k.shape)}, takes fewer tokens and heads: {grid[0]} thread blocks")
    lengths = torch.empty_like(cache_seqlens, memory_format=torch.contiguous_format)
    rotated = torch.empty_like(q, memory_format=torch.contiguous_format) if rotary else None
    values = (
        aligned(q) if rotary else None,
        aligned(k),
        aligned(v),
        rows_of(k_cache),
        rows_of(v_cache),
        rotated,
        lengths,
        dense_vector(cache_seqlens),
        None if cache_batch_idx is None else dense_vector(cache_batch_idx),
        None if block_table is None else _dense_table(block_table),
        _angles(rotary_cos) if rotary else None,
        _angles(rotary_sin) if rotary else None,
        k_descale.factors,
        v_descale.factors,
        capacity,
        int(ordered),
    )
    if grid[0] == 0:
        lengths.copy_(cache_seqlens).clamp_(0, capacity)
        return Appending(None, lengths, rotated)
    return Appending(Launch(spec, grid, 0, values), lengths, rotated)


def append(k: torch.Tensor, *arguments, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``prepare_append`` and its launch: (lengths, rotated)."""
    prepared = prepare_append(k, *arguments, **options)
    if prepared.launch is not None:
        prepared.launch.run(architecture_of(k.device))
    return prepared.lengths, prepared.rotated


def _dense_table(x: torch.Tensor) -> torch.Tensor:
    """Contiguous numbers; a last stride of 1 even where the last extent is 1, when torch leaves it as it is."""
    x = x.contiguous()
    return x if x.stride(1) == 1 else x.as_strided(x.shape, (x.stride(0), 1))


def _angles(x: torch.Tensor) -> torch.Tensor:
    """Rows of cosines or sines that lie contiguously and start at multiples of 16 bytes."""
    x = x.resolve_neg().contiguous()
    return x if x.data_ptr() % VECTOR_BYTES == 0 else x.clone()
