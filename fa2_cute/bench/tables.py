"""A report as tables for a terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .results import Cell, Figure, Report, Section, rate, ratio

SCALES = {"FLOP": (1e12, "TFLOP/s"), "byte": (1e9, "GB/s")}
CONDITIONS = {
    "beside itself": ("ours timed twice: at most {:+.1%} apart", lambda values: max(values, key=abs)),
    "least SM MHz": ("SM clock: at least {:.0f} MHz", min),
    "most W": ("power: at most {:.0f} W", max),
}
NOTES_SHOWN = ("splits",)  # the others are in the JSON file, and some in a line below
RATES_SHOWN = ("FLOP",)  # sections whose figures are shown as rates; those of bytes stay times


def show(report: Report, console: Console):
    """Print the machine, who takes part, and a table for each group of cells."""
    machine = report.machine
    words = [str(machine[key]) for key in ("device", "capability") if key in machine]
    words += [f"driver {machine['driver']}"] if "driver" in machine else []
    console.print(f"{', '.join(words)}; torch {machine.get('torch')}; {report.date}")
    for peer in report.peers:
        console.print(f"  {peer.name}: {escape(peer.missing or peer.version)}")
    for section in report.sections:
        unit = SCALES[section.work_unit][1] if section.work_unit in RATES_SHOWN else section.unit
        console.print(f"\n[bold]{section.title}; {unit}[/]")
        for table in tables(section):
            console.print(table)
        for line in absences(section):
            console.print(f"  {escape(line)}")
        for line in conditions(section):
            console.print(f"  {line}")
        if section.gauge is not None:
            gauge = section.gauge
            console.print(f"  {gauge.name}: {gauge.start:.4g} {gauge.unit} before, {gauge.end:.4g} after")
    for name, why in report.refused.items():
        console.print(f"\n[red]{name}:[/] {escape(why)}")


def tables(section: Section) -> list[Table]:
    """One for each group of cells."""
    groups = dict.fromkeys(cell.group for cell in section.cells)
    return [_table(section, group, [cell for cell in section.cells if cell.group == group]) for group in groups]


def _table(section: Section, group: str, cells: list[Cell]) -> Table:
    names = [name for name in section.contestants if any(name in cell.figures for cell in cells)]
    as_rate = section.work_unit in RATES_SHOWN
    table = Table(title=group, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")  # a narrow terminal must not hide a figure
    ours = section.contestants[0]
    has_ratio = bool(section.peers) and any(not math.isnan(ratio(section, cell, ours)) for cell in cells)
    has_roof = any(cell.roof and cell.work and ours in cell.figures for cell in cells)
    notes = [name for name in NOTES_SHOWN if any(name in cell.notes for cell in cells)]
    scale, rate_unit = SCALES.get(section.work_unit, (1.0, ""))
    headings = ["x best peer"] * has_ratio + [rate_unit] * (has_roof and not as_rate) + ["roof", "of it"] * has_roof
    for heading in headings + notes:
        table.add_column(heading, justify="right", overflow="fold")
    for cell in cells:
        row = [_cell(section, cell, name, as_rate) for name in names]
        if has_ratio:
            row.append(_or_dash(ratio(section, cell, ours), ".2f"))
        if has_roof:
            reached = rate(section, cell, cell.figures[ours]) if ours in cell.figures else math.nan
            row += [_or_dash(reached / scale, ".0f")] * (not as_rate)
            row.append(_or_dash(cell.roof / scale if cell.roof else math.nan, ".0f"))
            row.append(_or_dash(reached / cell.roof if cell.roof else math.nan, ".0%"))
        row += [f"{cell.notes[name]:.4g}" if name in cell.notes else "" for name in notes]
        table.add_row(cell.name, *row)
    return table


def _cell(section: Section, cell: Cell, name: str, as_rate: bool) -> str:
    """The median and half of what the middle half of the repetitions spans."""
    figure = cell.figures.get(name)
    if figure is None:
        return "-"
    median, spread = figure.median, (figure.high - figure.low) / 2
    if as_rate:
        scale = SCALES[section.work_unit][0]
        median, spread = (
            rate(section, cell, figure) / scale,
            spread / figure.median * rate(section, cell, figure) / scale,
        )
    return with_spread(median, spread, figure)


def with_spread(median: float, spread: float, figure: Figure) -> str:
    """ "431 ±2", with a decimal where there is room for one."""
    digits = 0 if abs(median) >= 100 else 1 if abs(median) >= 10 else 2
    text = f"{median:.{digits}f}"
    return text if figure.samples == 1 else f"{text} ±{spread:.{digits}f}"


def _or_dash(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def conditions(section: Section) -> list[str]:
    """The extremes of what was noted beside the figures."""
    values = {name: [cell.notes[name] for cell in section.cells if name in cell.notes] for name in CONDITIONS}
    return [text.format(pick(values[name])) for name, (text, pick) in CONDITIONS.items() if values[name]]


def absences(section: Section) -> list[str]:
    """Who has no figure where, one line a contestant and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in section.cells:
        for name, why in cell.missing.items():
            found.setdefault((name, why), []).append(f"{cell.name} ({cell.group})")
    return [
        f"{name}: {why}: {cells[0]}" + (f" and {len(cells) - 1} more" if len(cells) > 1 else "")
        for (name, why), cells in found.items()
    ]
