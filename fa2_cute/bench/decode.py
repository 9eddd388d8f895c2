"""The section ``decode``: one query a sequence over a KV cache; bytes of K and V a second, beside reading memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import SDPBackend

from .. import decode as decoding
from .. import forward
from ..cache_spec import BLOCK_TOKENS
from ..kvcache import flash_attn_with_kvcache
from ..quantize import FP8 as FP8_DTYPE
from ..quantize import quantize_kv
from . import checking, problems
from .peers import CUDNN, FA4, FLASH, OURS, fa4, sdpa
from .problems import Decode
from .results import Cell, Section
from .roofline import Roof
from .session import Entry, Session, Task, collect, compete
from .timing import Call

FP8, FP8_BLOCKS = "FP8", "FP8, 128 keys a scale"
CHECKED_HEADS = 32

Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Call]
PEERS: dict[str, Make] = {
    FLASH: functools.partial(sdpa(SDPBackend.FLASH_ATTENTION), causal=False),
    CUDNN: functools.partial(sdpa(SDPBackend.CUDNN_ATTENTION), causal=False),
    FA4: functools.partial(fa4(None), causal=False),
}


def whole_cache(q, k_cache, v_cache, **options) -> Call:
    """A call over all of a cache, its lengths in a tensor."""
    lengths = torch.full((q.shape[0],), k_cache.shape[1], dtype=torch.int32, device=q.device)
    return lambda: flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **options)


def paged(q, k_cache, v_cache, page_size: int) -> Call:
    """The same over pages in random order."""
    batch, length = k_cache.shape[:2]
    table = torch.randperm(batch * length // page_size, device=q.device)
    pools = [torch.empty_like(x).view(-1, page_size, *x.shape[2:]) for x in (k_cache, v_cache)]
    for pool, x in zip(pools, (k_cache, v_cache), strict=True):
        pool[table] = x.view(pool.shape)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    table = table.to(torch.int32).view(batch, -1)
    return lambda: flash_attn_with_kvcache(q, *pools, cache_seqlens=lengths, block_table=table)


def fp8(q, k_cache, v_cache) -> Call:
    """The same over the cache in FP8, without scales."""
    return whole_cache(q, k_cache.to(FP8_DTYPE), v_cache.to(FP8_DTYPE))


def fp8_blocks(q, k_cache, v_cache) -> Call:
    """The same over the cache in FP8, a scale for each 128 keys."""
    (k, k_descale), (v, v_descale) = quantized(k_cache), quantized(v_cache)
    return whole_cache(q, k, v, k_descale=k_descale, v_descale=v_descale)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize_kv``, a sequence at a time: its float32 copies of a large cache would not fit."""
    data, factors = zip(*[quantize_kv(one) for one in x.split(1)], strict=True)
    return torch.cat(data), torch.cat(factors)


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """What a cache in FP8 without scales holds of ``x``."""
    return x.to(FP8_DTYPE).double()


def scaled_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """What a cache in FP8 with scales holds of ``x`` (batch, length, kv_heads, dim), in float64."""
    data, factors = quantize_kv(x)
    return data.double() * factors.double().repeat_interleave(BLOCK_TOKENS, dim=1)[:, : x.shape[1], :, None]


HELD = {FP8: rounded_to_fp8, FP8_BLOCKS: scaled_to_fp8}


def ours(splits: Sequence[int], pages: Sequence[int], fp8_too: bool) -> dict[str, Make]:
    """Our contestants: as it chooses itself, with numbers of splits, over pages, and in FP8."""
    return {
        OURS: whole_cache,
        **{f"{n} splits": functools.partial(whole_cache, num_splits=n) for n in splits},
        **{f"page {n}": functools.partial(paged, page_size=n) for n in pages},
        **({FP8: fp8, FP8_BLOCKS: fp8_blocks} if fp8_too else {}),
    }


def contestants(session: Session, splits: Sequence[int], pages: Sequence[int]) -> dict[str, Make]:
    """Those who take part: ours (in FP8 where the device has it), and the peers."""
    has_fp8 = forward.architecture_of(session.device).capability >= (8, 9)
    peers = {name: make for name, make in PEERS.items() if session.takes_part(name)}
    return {**ours(splits, pages, has_fp8), **peers}


def run(session: Session, cells: Sequence[Decode], splits: Sequence[int], pages: Sequence[int], roof: Roof) -> Section:
    """The section. roof: a load that reads."""
    all_of_them = contestants(session, splits, pages)
    section = Section(
        name="decode",
        title="Decode: sequences x keys, one query each",
        unit="us",
        work_unit="byte",
        contestants=tuple(all_of_them),
        peers=tuple(name for name in all_of_them if name in PEERS),
    )
    tasks = [
        Task(of.name, group(of), section.contestants, functools.partial(_cell, session, of, all_of_them, roof))
        for of in cells
    ]
    return collect(session, section, tasks)


def group(of: Decode) -> str:
    """The table that a cell belongs to."""
    return f"{of.heads}/{of.kv_heads} heads of {of.head_dim}"


@torch.inference_mode()
def _cell(session: Session, of: Decode, all_of_them: dict[str, Make], roof: Roof) -> Cell:
    sets = problems.rotated(lambda: problems.decode_inputs(of, session.device), session.l2)
    q, k, v = sets[0]

    @functools.cache
    def expected(kind: str | None) -> checking.Expected:
        stored = {"stored": HELD[kind]} if kind else {}
        return checking.expect(q, k, v, causal=False, heads=CHECKED_HEADS, **stored)

    entries = {
        name: Entry(
            make=lambda make=make: [make(*tensors) for tensors in sets],
            expected=lambda name=name: expected(name if name in HELD else None),
            ours=name not in PEERS,
        )
        for name, make in all_of_them.items()
    }
    found = compete(session, entries, roof)
    notes = {"splits": decoding.prepare(q, k, v).choice.splits, **found.notes}
    return Cell(of.name, group(of), float(of.cache_bytes), found.figures, found.missing, notes, found.roof)
