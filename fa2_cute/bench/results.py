"""What a run found, as plain data, and as JSON."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FORMAT = 1


@dataclass(frozen=True)
class Figure:
    """A measured number in its section's unit: median and quartiles of ``samples`` repetitions, and the smallest."""

    median: float
    low: float
    high: float
    least: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Of one or more repetitions; ValueError for none."""
        if not values:
            raise ValueError("values: got none, takes one or more")
        low, median, high = (
            statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        )
        return cls(median, low, high, min(values), len(values))


@dataclass(frozen=True)
class Cell:
    """One problem and what everybody took for it.

    name        "8 x 2048 x 16 x 128"
    group       cells of one table: "head_dim 128, full"
    work        FLOP or bytes of one call, as the section's ``work_unit`` says; 0 where there is none
    figures     by contestant
    missing     contestants without a figure, and why
    notes       numbers beside the figures, such as the number of splits
    roof        what the device gives of the section's ``work_unit`` a second, measured beside these figures; 0: nothing
    """

    name: str
    group: str
    work: float
    figures: dict[str, Figure]
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    roof: float = 0.0


@dataclass(frozen=True)
class Gauge:
    """A fixed load at the start and at the end of a section: what drifts there drifted everywhere.

    name, unit      what it is: "mma.sync rate", "TFLOP/s"
    """

    name: str
    unit: str
    start: float
    end: float

    @property
    def drift(self) -> float:
        """By how much of itself it changed; negative: it fell."""
        return self.end / self.start - 1.0


@dataclass(frozen=True)
class Section:
    """Cells of one kind.

    unit        of the figures: "us", "ms" or "MiB"
    work_unit   "FLOP", "byte" or "": then a rate is work over time
    contestants by name, in the order of the columns; ours first
    failed      why some cells have no figures of ours, or the last ones none at all; empty if all is well
    peers       the contestants that ours are held against: those on the same instructions
    """

    name: str
    title: str
    unit: str
    work_unit: str
    contestants: tuple[str, ...]
    peers: tuple[str, ...]
    cells: tuple[Cell, ...] = ()
    gauge: Gauge | None = None
    failed: str = ""


@dataclass(frozen=True)
class PeerStatus:
    """A peer's version, or why it does not take part."""

    name: str
    version: str
    missing: str = ""


@dataclass(frozen=True)
class Report:
    """One run.

    date        "2026-11-30T14:50:00+00:00"
    machine     device, driver, versions: machine.describe
    refused     sections without some or all of their figures, and why
    """

    date: str
    machine: dict[str, str | int | float]
    peers: tuple[PeerStatus, ...]
    sections: tuple[Section, ...]
    refused: dict[str, str] = field(default_factory=dict)

    def section(self, name: str) -> Section | None:
        """The section called ``name``, if it was run."""
        return next((section for section in self.sections if section.name == name), None)


def rate(section: Section, cell: Cell, figure: Figure) -> float:
    """Work a second at the median: FLOP/s or byte/s. Only of sections with work and times."""
    return cell.work / (figure.median * {"us": 1e-6, "ms": 1e-3}[section.unit])


def ratio(section: Section, cell: Cell, ours: str) -> float:
    """Time of the fastest of the section's peers over that of ``ours``: above 1, ours is faster. NaN without both."""
    times = [cell.figures[name].median for name in section.peers if name in cell.figures]
    if ours not in cell.figures or not times:
        return math.nan
    return min(times) / cell.figures[ours].median


def save(report: Report, path: Path):
    """Write ``report``; a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps({"format": FORMAT, **asdict(report)}, indent=1, allow_nan=False) + "\n")
    os.replace(scratch, path)


def load(path: Path) -> Report:
    """The report in ``path``; ValueError where it is none. OSError where it cannot be read."""
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise KeyError("format")
        return _report(data)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: is no file of results of fa2-cute bench, format {FORMAT}") from None


def _report(data: dict) -> Report:
    return Report(
        **{
            **data,
            "peers": tuple(PeerStatus(**x) for x in data["peers"]),
            "sections": tuple(_section(x) for x in data["sections"]),
        }
    )


def _section(data: dict) -> Section:
    return Section(
        **{
            **data,
            "contestants": tuple(data["contestants"]),
            "peers": tuple(data["peers"]),
            "cells": tuple(_cell(x) for x in data["cells"]),
            "gauge": None if data["gauge"] is None else Gauge(**data["gauge"]),
        }
    )


def _cell(data: dict) -> Cell:
    return Cell(**{**data, "figures": {name: Figure(**x) for name, x in data["figures"].items()}})
