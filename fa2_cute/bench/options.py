"""What a person may choose of ``fa2-cute bench``, checked before torch, the compiler or a peer is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..explore.command import parse_tile
from ..explore.space import Point, Workload
from . import problems
from .problems import PAGES

SECTIONS = ("host", "memory", "prefill", "decode", "compile", "kvcache")


@dataclass(frozen=True)
class Options:
    """See the command's help. ValueError names an option that is not taken."""

    quick: bool = False
    peer: tuple[str, ...] = ()
    rounds: int | None = None
    minutes: float | None = None
    jobs: int | None = None
    out: Path | None = None
    shape: tuple[str, ...] = ()
    key_len: int | None = None
    dtype: str = "bfloat16"
    tile: tuple[str, ...] = ()
    heads: int = 32
    kv_heads: int | None = None
    head_dim: int = 128
    cell: tuple[str, ...] = ()
    splits: tuple[int, ...] = ()
    page: tuple[int, ...] = PAGES

    def __post_init__(self):
        for name in ("rounds", "jobs"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name}: got {value}, takes 1 or more")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"--minutes: got {self.minutes}, takes a positive number")
        for name in ("splits", "page"):
            for value in getattr(self, name):
                if value < 1:
                    raise ValueError(f"--{name}: got {value}, takes 1 or more")
        for problems_of in (self.prefill, self.tiles, self.decode):  # what cannot be read is refused now
            problems_of()

    def prefill(self) -> list[Workload]:
        """The problems of the prefill section."""
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"--dtype: got {self.dtype!r}, takes bfloat16 or float16")
        if not self.shape:
            return [replace(of, dtype=self.dtype) for of in problems.prefill_cells(self.quick)]
        found = [problems.parse_shape(text, self.kv_heads, self.key_len, self.dtype) for text in self.shape]
        return [of for cells in found for of in cells]

    def tiles(self) -> list[Point]:
        """The tiles that are timed beside the shipped one."""
        return [parse_tile(text) for text in self.tile]

    def decode(self) -> list[problems.Decode]:
        """The problems of the decode section."""
        cells = [problems.parse_cell(text) for text in self.cell] or problems.decode_cells(self.quick)
        kv_heads = 8 if self.kv_heads is None else self.kv_heads
        for page, (_, length) in itertools.product(self.page, cells):
            if length % page:
                raise ValueError(f"--page: got {page}, takes a divisor of all numbers of keys, {length} among them")
        return [problems.Decode(batch, length, self.heads, kv_heads, self.head_dim) for batch, length in cells]


def sections_of(what: Sequence[str]) -> tuple[str, ...]:
    """The sections asked for, in the order in which they run; all without any. ValueError for a name that is none's."""
    for name in what:
        if name not in SECTIONS:
            raise ValueError(f"bench: got {name!r}, takes any of {', '.join(SECTIONS)}, or: plot FILE")
    return tuple(name for name in SECTIONS if not what or name in what)
