"""Performance counters of a launch: shared-memory wavefronts and global sectors, by PTX line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Line:
    """Counters of one instruction; ``ideal`` is the wavefronts that its bytes need at 128 bytes each."""

    text: str
    source: tuple[str, int] | None
    executions: int = 0
    wavefronts: int = 0
    ideal: int = 0
    sectors: int = 0
    bytes: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts add."""
        return self.wavefronts - self.ideal


@dataclass
class Counters:
    """``lines``: by PTX line number. ``read`` and ``written``: bytes by tensor name."""

    lines: dict[int, Line] = field(default_factory=dict)
    read: Counter = field(default_factory=Counter)
    written: Counter = field(default_factory=Counter)

    def line(self, site) -> Line:
        """The counters of an instruction."""
        if site.line not in self.lines:
            self.lines[site.line] = Line(site.text, site.source)
        return self.lines[site.line]

    @property
    def bank_conflicts(self) -> int:
        """Extra wavefronts of the whole launch."""
        return sum(x.conflicts for x in self.lines.values())

    def shared_access(self, site, t, pos, width) -> None:
        """32 banks of 4 bytes: 8-byte accesses go by half warps, 16-byte ones by quarter warps."""
        entry = self.line(site)
        lanes = 32 if width <= 4 else 128 // width
        phase = t.global_warp * 32 + t.lane // lanes
        self.count(entry, phase, pos, width, lanes)
        entry.executions += t.warps

    def matrix_access(self, site, t, pos) -> None:
        """ldmatrix and stmatrix: one 8 x 16-byte matrix a phase."""
        entry = self.line(site)
        self.count(entry, np.arange(len(pos)) // 8, pos, 16, 8)
        entry.executions += t.warps

    def count(self, entry, phase, pos, width, lanes) -> None:
        """Wavefronts of a phase: the most distinct 4-byte words that any bank is asked for."""
        words = pos[:, None] // 4 + np.arange(max(width // 4, 1))
        key = np.unique((phase[:, None].astype(np.int64) << 40 | words).reshape(-1))
        bank = (key >> 40) * 32 + (key & 31)
        where, busy = np.unique(bank, return_counts=True)
        starts = np.flatnonzero(np.r_[True, where[1:] // 32 != where[:-1] // 32])
        entry.wavefronts += int(np.maximum.reduceat(busy, starts).sum())
        entry.ideal += len(starts)
        entry.bytes += len(pos) * width

    def global_access(self, site, t, address, width, parts, write) -> None:
        """Distinct 32-byte sectors that each warp touches."""
        entry = self.line(site)
        sectors = address >> np.uint64(5)
        pairs = np.stack([t.global_warp.astype(np.uint64), sectors], 1)
        if width > 32:
            pairs = np.concatenate([pairs, np.stack([t.global_warp.astype(np.uint64), sectors + np.uint64(1)], 1)])
        entry.sectors += len(np.unique(pairs, axis=0))
        entry.executions += t.warps
        entry.bytes += t.n * width
        table = self.written if write else self.read
        for region, where in parts:
            table[region.name] += width * (t.n if where is None else len(where))
