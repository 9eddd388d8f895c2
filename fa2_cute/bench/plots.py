"""A report as pictures: bars by problem, one picture a section, PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console

from ..folders import require_writable
from .results import Cell, Report, Section, load, rate
from .tables import SCALES

# ColorBrewer Paired, its strong ones first: ours is the first, peers keep their order.
COLOURS = ("#e31a1c", "#fb9a99", "#1f78b4", "#33a02c", "#a6cee3", "#ff7f00", "#6a3d9a", "#b2df8a", "#999999", "#cab2d6")
STYLE = {"font.size": 8, "font.family": "sans-serif", "axes.spines.top": False, "axes.spines.right": False}
DPI = 100
PANEL, LONE_PANEL = (6.0, 2.6), (9.0, 3.2)  # inches
# A cell has one amount of work, that of a cache in 16 bits.
RATE_LABELS = {"FLOP": "TFLOP/s", "byte": "GB/s, counted as 16 bits"}


def draw_files(files: Sequence[Path], into: Path | None, console: Console):
    """Draw the reports in ``files``: PNG beside each file, or into a folder.

    Raises ValueError without a file, OSError where one cannot be read or the folder cannot be written to.
    """
    takes = "takes one or more that fa2-cute bench wrote"
    if not files:
        raise ValueError(f"bench plot: got no file, {takes}")
    reports = {}
    for file in files:
        try:
            reports[file] = load(file)
        except OSError as error:
            raise OSError(f"bench plot: got {file}, {takes}: {error.strerror or error}") from error
    folders = {file: file.parent if into is None else into for file in files}
    for folder in folders.values():
        require_writable("bench plot" if into is None else "--out", folder)
    for file, report in reports.items():
        for path in save(report, folders[file], file.stem):
            console.print(f"{path}")


def save(report: Report, folder: Path, stem: str) -> list[Path]:
    """Write ``stem``-``section``.png into ``folder`` for each section that has something to show."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in report.sections:
        with matplotlib.rc_context(STYLE):
            figure = draw(section, report)
            if figure is None:
                continue
            path = folder / f"{stem}-{section.name}.png"
            figure.savefig(path, dpi=DPI)
            written.append(path)
    return written


def draw(section: Section, report: Report) -> Figure | None:
    """Bars of all contestants, a panel for each group of cells; None without figures."""
    groups = list(dict.fromkeys(cell.group for cell in section.cells if cell.figures))
    if not groups:
        return None
    columns = 1 if len(groups) == 1 else 2
    rows = math.ceil(len(groups) / columns)
    width, height = LONE_PANEL if columns == 1 else PANEL
    figure = Figure(figsize=(width * columns, height * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(section.contestants)}
    handles: dict[str, object] = {}
    for panel, group in zip(panels, groups, strict=False):
        handles |= _bars(panel, section, [cell for cell in section.cells if cell.group == group], colours)
        panel.set_title(group, loc="left", fontsize=8)
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    figure.suptitle(f"{section.title}\n{report.machine.get('device', '')}, {report.date[:10]}", fontsize=9)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    return figure


def _bars(panel, section: Section, cells: list[Cell], colours: dict[str, str]) -> dict[str, object]:
    """Draws a panel; returns what its legend needs."""
    names = [name for name in section.contestants if any(name in cell.figures for cell in cells)]
    width = 0.85 / len(names)
    handles: dict[str, object] = {}
    for i, name in enumerate(names):
        places = [j for j, cell in enumerate(cells) if name in cell.figures]
        heights = [_height(section, cells[j], name) for j in places]
        xs = [j + (i - (len(names) - 1) / 2) * width for j in places]
        handles[name] = panel.bar(xs, heights, width * 0.92, color=colours[name], lw=0)
    panel.set_xticks(range(len(cells)), [cell.name for cell in cells], fontsize=6, rotation=20, ha="right")
    if section.work_unit:
        scale = SCALES[section.work_unit][0]
        panel.set_ylabel(RATE_LABELS[section.work_unit])
        roofed = [(j, cell.roof / scale) for j, cell in enumerate(cells) if cell.roof]
        if roofed:
            places, heights = zip(*roofed, strict=True)
            handles["measured roof"] = panel.hlines(
                heights, [j - 0.45 for j in places], [j + 0.45 for j in places], color="black", lw=0.8, ls="--"
            )
    else:
        panel.set_ylabel(section.unit)
        values = [cell.figures[name].median for cell in cells for name in cell.figures]
        if min(values) > 0 and max(values) / min(values) > 50:
            panel.set_yscale("log")
    return handles


def _height(section: Section, cell: Cell, name: str) -> float:
    figure = cell.figures[name]
    if section.work_unit and cell.work:
        return rate(section, cell, figure) / SCALES[section.work_unit][0]
    return figure.median
