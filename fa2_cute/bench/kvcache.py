"""The section ``kvcache``: the append kernel, and whole calls over a cache with and without append and rotation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import reference_cache
from ..kvcache import append_to_kvcache, flash_attn_with_kvcache
from . import checking, problems
from .results import Cell, Section
from .roofline import Roof, Wrong
from .session import Session, Task, collect, timed
from .timing import Call

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
APPEND, ATTEND, WHOLE = "append", "attention", "append, rotation, attention"
POSITION = 500  # where appended tokens begin
# What rounding to the nearest number of a type is of the number at most, and half its smallest step (OCP 8-bit Floating
# Point Specification 1.0, section 5, for e4m3).
ROUNDING = {torch.bfloat16: (2.0**-8, 2.0**-134), torch.float8_e4m3fn: (2.0**-4, 2.0**-10)}


@dataclass(frozen=True)
class Append:
    """new tokens for each of batch sequences."""

    batch: int
    new: int
    paged: bool = False
    fp8: bool = False
    rotary: bool = False

    @property
    def name(self) -> str:
        kind = ("pages" if self.paged else "rows", "FP8" if self.fp8 else "", "rotary" if self.rotary else "")
        return f"{self.batch} x {self.new}, {', '.join(filter(None, kind))}"

    @property
    def capacity(self) -> int:
        return max(2 * self.new, 1024)


@dataclass(frozen=True)
class Attend:
    """A query for each of batch sequences of length tokens."""

    batch: int
    length: int
    paged: bool = False
    fp8: bool = False

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.length}, {'pages' if self.paged else 'rows'}{', FP8' if self.fp8 else ''}"


APPENDS = (
    Append(1, 1),
    Append(1, 1, rotary=True),
    Append(16, 1, paged=True, rotary=True),
    Append(64, 1, paged=True, rotary=True),
    Append(64, 1, paged=True, fp8=True, rotary=True),
    Append(1, 8192),
    Append(1, 8192, paged=True, rotary=True),
    Append(1, 8192, paged=True, fp8=True, rotary=True),
)
ATTENDS = (
    Attend(1, 1024),
    Attend(1, 8192),
    Attend(1, 8192, paged=True),
    Attend(16, 8192, paged=True),
    Attend(16, 8192, paged=True, fp8=True),
)


@dataclass(frozen=True, eq=False)
class Inputs:
    """One set: the cache, new keys and values, a query for each new token, and the tables of rotations."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    lengths: torch.Tensor  # tokens of each sequence before the call
    block_table: torch.Tensor | None

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches as (batch, capacity, kv_heads, head_dim)."""
        if self.block_table is None:
            return self.k_cache, self.v_cache
        return tuple(_taken(x, self.block_table.long()).flatten(1, 2) for x in (self.k_cache, self.v_cache))


def inputs(batch: int, new: int, capacity: int, length: int, paged: bool, fp8: bool, device: torch.device) -> Inputs:
    """Random numbers; pages in random order."""
    rows = (batch * capacity // PAGE, PAGE) if paged else (batch, capacity)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    cache = [x.to(dtype) for x in problems.normal(device, torch.bfloat16, *[(*rows, KV_HEADS, DIM)] * 2)]
    shapes = [(batch, new, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    angles = torch.rand(capacity, DIM // 2, device=device)
    table = torch.randperm(rows[0], device=device).to(torch.int32).view(batch, -1) if paged else None
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    return Inputs(*cache, *problems.normal(device, torch.bfloat16, *shapes), angles.cos(), angles.sin(), lengths, table)


def inputs_of(of: Append | Attend, device: torch.device) -> Inputs:
    """One set of inputs of a problem."""
    if isinstance(of, Append):
        return inputs(of.batch, of.new, of.capacity, POSITION, of.paged, of.fp8, device)
    return inputs(of.batch, 1, of.length, of.length - 2, of.paged, of.fp8, device)


def calls_of(of: Append | Attend, x: Inputs) -> dict[str, Call]:
    """What is timed of a problem, by contestant."""
    if isinstance(of, Append):
        turn = {"rotary_cos": x.cos, "rotary_sin": x.sin, "rotary_interleaved": False} if of.rotary else {}
        return {
            APPEND: lambda: append_to_kvcache(
                x.k_cache, x.v_cache, x.k, x.v, x.lengths, block_table=x.block_table, **turn
            )
        }
    where = {"cache_seqlens": x.lengths, "block_table": x.block_table, "causal": True}
    new = (x.k, x.v, x.cos, x.sin)
    return {
        ATTEND: lambda: flash_attn_with_kvcache(x.q, x.k_cache, x.v_cache, **where),
        WHOLE: lambda: flash_attn_with_kvcache(x.q, x.k_cache, x.v_cache, *new, **where, rotary_interleaved=False),
    }


def run(session: Session, problems_: Sequence[Append | Attend], roof: Roof) -> Section:
    """The section. roof: a load that copies, bytes read and written together."""
    section = Section(
        name="kvcache",
        title=f"KV cache, {HEADS}/{KV_HEADS} heads of {DIM}, pages of {PAGE}: sequences x tokens",
        unit="us",
        work_unit="byte",
        contestants=(APPEND, ATTEND, WHOLE),
        peers=(),
    )
    tasks = [
        Task(of.name, "append", (APPEND,), functools.partial(_append_cell, session, of, roof))
        if isinstance(of, Append)
        else Task(of.name, "one query", (ATTEND, WHOLE), functools.partial(_attend_cell, session, of))
        for of in problems_
    ]
    return collect(session, section, tasks)


def _rotated(make: Callable[[], Inputs], l2: int) -> list[Inputs]:
    def tensors() -> tuple:
        one = make()
        kept.append(one)
        return (one.k_cache, one.v_cache, one.q, one.k, one.v)

    kept: list[Inputs] = []
    problems.rotated(tensors, l2)
    return kept


@torch.inference_mode()
def _append_cell(session: Session, of: Append, roof: Roof) -> Cell:
    sets = _rotated(lambda: inputs_of(of, session.device), session.l2)
    replay = session.timer.capture([calls_of(of, x)[APPEND] for x in sets])
    clear_appended(sets[0])
    replay.run()
    session.timer.finish()
    check_appended(of.name, sets[0], of.rotary)
    found = timed(session, {APPEND: replay}, {}, roof)
    x = sets[0]
    moved = x.k.nbytes + x.v.nbytes + 2 * x.k.numel() * x.k_cache.element_size()
    return Cell(of.name, "append", float(moved), found.figures, notes=found.notes, roof=found.roof)


@torch.inference_mode()
def _attend_cell(session: Session, of: Attend) -> Cell:
    sets = _rotated(lambda: inputs_of(of, session.device), session.l2)
    calls = [calls_of(of, x) for x in sets]
    replays = {name: session.timer.capture([each[name] for each in calls]) for name in (ATTEND, WHOLE)}
    x = sets[0]
    clear_appended(x)
    for name, replay in replays.items():
        replay.run()
        session.timer.finish()
        q, length = x.q, of.length - 2
        if name == WHOLE:
            check_appended(of.name, x, True)
            q, length = _rotated_queries(x), of.length - 1
        keys, values = (cache[:, :length].to(torch.float32) for cache in x.dense())
        fault = checking.fault(
            replay.results[0], checking.expect(q, keys, values, causal=False, heads=of.batch * HEADS // 4 + 2)
        )
        if fault is not None:
            raise Wrong(f"kvcache {of.name}, {name}: {fault}")
    found = timed(session, replays, {})
    read = 2 * of.batch * (of.length - 2) * KV_HEADS * DIM * x.k_cache.element_size()
    return Cell(of.name, "one query", float(read), found.figures, notes=found.notes)


def _rotated_queries(x: Inputs) -> torch.Tensor:
    """The queries of a call with append and rotation, as the kernels round them."""
    turned = reference_cache.rotated_queries(x.q, x.lengths, x.cos, x.sin, rotary_interleaved=False, ordered=True)
    return turned.to(x.q.dtype)


def _slots(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, indices) of the cache, (batch, new) each: where new tokens belong."""
    positions = x.lengths.long()[:, None] + torch.arange(x.k.shape[1], device=x.k.device)
    if x.block_table is None:
        return torch.arange(x.k.shape[0], device=x.k.device)[:, None].expand_as(positions), positions
    page = x.k_cache.shape[1]
    return x.block_table.long().gather(1, positions // page), positions % page


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: torch does not index FP8 on every device."""
    return cache.view(torch.uint8 if cache.element_size() == 1 else torch.int16)


def _taken(cache: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """``cache[index]``."""
    return _bits(cache)[index].view(cache.dtype)


def clear_appended(x: Inputs):
    """Zeros where new tokens belong, so that an append that does nothing is seen."""
    where = _slots(x)
    for cache in (x.k_cache, x.v_cache):
        _bits(cache)[where] = 0


def check_appended(name: str, x: Inputs, rotary: bool):
    """Raises Wrong unless the cache holds the new tokens, keys rotated if ``rotary``, within its type's rounding.

    A rotated key is a difference of two products in float32, each operation within 2^-23, rounded at most twice: to the
    keys' type and to the cache's.
    """
    rows, indices = _slots(x)
    keys = x.k.double()
    slack = torch.zeros_like(keys)
    if rotary:
        turned = [
            reference_cache.rotated(
                k, x.cos, x.sin, start + torch.arange(k.shape[0], device=k.device), interleaved=False
            )
            for k, start in zip(x.k, x.lengths.tolist(), strict=True)
        ]
        half = keys.shape[-1] // 2
        pairs = (keys[..., :half].abs() + keys[..., half:].abs()).repeat(1, 1, 1, 2)
        keys = torch.stack(turned)
        slack = ROUNDING[x.k.dtype][0] * keys.abs() + 3 * 2.0**-23 * pairs
    for what, cache, exact, extra in (("keys", x.k_cache, keys, slack), ("values", x.v_cache, x.v.double(), 0.0)):
        relative, absolute = ROUNDING[cache.dtype]
        error = (_taken(cache, rows, indices).double() - exact).abs()
        if not bool((error <= relative * exact.abs() + absolute + extra).all()):
            raise Wrong(f"kvcache {name}: appended {what} are off by {error.max().item():.3g}")
