"""The commands ``fa2-cute explore`` and ``fa2-cute layouts``: what the terminal shows of a search."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import arch as architectures
from ..arch import Architecture
from ..folders import require_writable
from . import model, rates, space, tuning
from .searching import Found, default_file, search
from .space import KIB, Workload

ROWS = 12  # of the table in the terminal; the report has them all


def architecture(name: str | None) -> Architecture:
    """The one asked for, else the current CUDA device's, else sm_120; ValueError names the known ones."""
    if name is not None:
        chosen = architectures.by_name(name)
    else:
        import torch

        if torch.cuda.is_available():
            chosen = architectures.by_capability(*torch.cuda.get_device_capability())
        else:
            chosen = architectures.TARGET
    rates.of(chosen)
    return chosen


def device_name(arch: Architecture) -> str | None:
    """The current CUDA device if it is of ``arch``: what can be timed."""
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == arch.capability:
        return torch.cuda.get_device_name()
    return None


def require_tools():
    """ToolMissing, with what to install, where the packages for pictures and machine code are not there."""
    from ..resources import ToolMissing
    from . import sass

    if importlib.util.find_spec("matplotlib") is None:
        raise ToolMissing("needs matplotlib, which the extra 'explore' brings: pip install -e '.[explore]'")
    sass.nvdisasm()


def explore(
    workload: Workload,
    arch: Architecture,
    console: Console,
    *,
    points: Sequence[space.Point],
    jobs: int | None = None,
    file: Path | None = None,
    report: Path | None = None,
    time: bool = True,
    apply: bool = False,
) -> Found:
    """Search ``points``, show the best ones, write the report; with ``apply`` also the tuning file.

    Raises ValueError for what is impossible, before anything is compiled.
    """
    require_tools()
    from . import binding

    binding.shipped_point(workload, arch)  # refuses what no kernel takes
    device = device_name(arch) if time else None
    if apply and device is None:
        raise ValueError(f"--apply: needs measured times, and there is no CUDA device of {arch.name} to measure on")
    if apply:
        tuning.destination()
    file = file or default_file(workload, arch)
    report = report or file.with_suffix(".html")
    require_writable("--results", file.parent)
    require_writable("--report", report.parent)
    console.print(f"{workload.title}; {arch.name} ({rates.of(arch).device}); results in {file}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("points", total=None)

        def progress(done: int, total: int, doing: str):
            bar.update(task, completed=done, total=total, description=doing)

        found = search(workload, arch, file, space=points, jobs=jobs, device=device is not None, progress=progress)
    console.print(table(found))
    for line in answer(found):
        console.print(line)
    from . import report as reporting

    reporting.write(found, report)
    console.print(f"Report: {report}")
    best = found.best
    if apply and (best is None or best.measured is None):
        raise ValueError("--apply: no tile could be measured; the report says why")
    if apply:
        tile = tuning.tile_of(best.point)
        kind = tuning.ProblemClass(workload.dtype, workload.head_dim, workload.head_dim, workload.causal)
        path = tuning.apply(tile, kind, device, f"{best.measured['median']:.4f} ms on {workload.title}")
        console.print(f"{path}: {device}, {kind.key}: {best.point.name}")
    return found


def table(found: Found) -> Table:
    """The best points, the shipped one marked."""
    measured = any(r.measured for r in found.records)
    title = "Best tiles" + (", measured" if measured else ", predicted")
    shown = Table(title=title)
    headings = [
        "tile_m x n x warps x stages",
        "ms",
        "TFLOP/s",
        "of bound",
        "binds",
        "regs",
        "KiB",
        "warps/SM",
        "conflicts",
    ]
    if measured:
        headings.insert(1, "measured ms")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in ("binds", headings[0]) else "right")
    good = [r for r in found.records if r.refusal is None]
    for rank, r in enumerate(good):
        if rank >= ROWS and r.point != found.shipped:
            continue
        p = r.prediction
        cells = [
            r.point.name + (" (shipped)" if r.point == found.shipped else "") + (" spills" if r.stack_bytes else ""),
            f"{p.milliseconds:.3f}",
            f"{p.tflops:.0f}",
            f"{p.of_bound:.0%}",
            p.binds,
            str(r.registers),
            f"{r.shared_bytes / KIB:g}",
            str(r.warps_per_sm),
            f"{r.counts.get('conflicts', 0):,}",
        ]
        if measured:
            cells.insert(1, f"{r.measured['median']:.3f}" if r.measured else "")
        shown.add_row(*cells)
    return shown


def answer(found: Found) -> list[str]:
    """Which tile and why, in a few sentences."""
    best = found.best
    if best is None:
        return ["No point could be evaluated:"] + [f"  {r.point.name}: {r.refusal}" for r in found.records]
    tied = []
    lines = [f"Which: {best.point.name} ({best.prediction.milliseconds:.3f} ms predicted). Why: {best.prediction.why}."]
    if best.measured is None:
        limit = (1 + model.TIE) * min(r.prediction.milliseconds for r in found.records if r.refusal is None)
        tied = [r for r in found.records if r.refusal is None and r.prediction.milliseconds <= limit]
        if len(tied) > 1:
            lines.append(
                f"{len(tied)} tiles are within {model.TIE:.0%} of the fastest, which the model cannot tell apart; of "
                "these it takes one without spills, with the most query rows."
            )
    shipped = next((r for r in found.records if r.point == found.shipped and r.refusal is None), None)
    if shipped is best:
        lines.append("It is what a call runs today.")
    elif shipped in tied:
        lines.append(f"A call runs {shipped.point.name} today, which is one of these.")
    elif shipped is not None:
        measured = best.measured and shipped.measured
        ratio = (
            shipped.measured["median"] / best.measured["median"]
            if measured
            else shipped.prediction.milliseconds / best.prediction.milliseconds
        )
        lines.append(
            f"A call runs {shipped.point.name} today, "
            f"{'measured' if measured else 'predicted'} {ratio - 1:.1%} slower: "
            f"{shipped.prediction.why}."
        )
    lines.append(f"{len(found.refused)} points were refused without compiling; the report has each reason.")
    return lines


def parameters() -> Table:
    """What can be varied."""
    shown = Table(title="Parameters of the search space")
    for heading in ("name", "default values", "what"):
        shown.add_column(heading)
    for name, f in space.PARAMETERS.items():
        shown.add_row(name, ", ".join(map(str, f.metadata["values"])), f.metadata["says"])
    return shown


def layouts(
    workload: Workload, arch: Architecture, point: space.Point | None, into: Path, swizzle: bool, console: Console
):
    """Draw the layouts of a tile into the folder ``into``, and count what they cost.

    workload: its head_dim and dtype are what matters. point: by default what a call of many blocks runs. Raises
    ValueError for a tile that ``arch`` cannot have, as a search refuses it, and OSError for a folder that cannot be
    written to, before anything is traced.
    """
    require_tools()
    from . import binding, kernel_layouts, pictures, prune

    shipped = binding.shipped_points(workload, arch)
    point = shipped[0] if point is None else point
    both = [replace(point, swizzle=way) for way in (True, False)]
    specs = [binding.spec_of(x, workload, arch) for x in both]
    reason = prune.refusal(point, workload, arch)
    if reason is not None:
        raise ValueError(f"--tile: got {point.name}, takes one that {arch.name} can have: {reason}")
    require_writable("--into", into)
    console.print("Tracing the kernel's layouts and drawing them: some 15 seconds.")
    versions = [kernel_layouts.extract(spec) for spec in specs]
    shown = versions[0 if swizzle else 1]
    state = "as shipped" if point in shipped else f"shipped is {' or '.join(x.name for x in shipped)}"
    counted = Table(
        title=f"{point.name}, head_dim {workload.head_dim}: one tile each, {state if swizzle else 'swizzle removed'}"
    )
    for heading in ("access", "instructions", "wavefronts", "without conflicts", "conflicts"):
        counted.add_column(heading, justify="left" if heading == "access" else "right")
    for name in dict.fromkeys(access.name for access in shown.accesses):
        accesses = shown.of(name)
        passes, ideal = sum(a.wavefronts for a in accesses), sum(len(a.phases) for a in accesses)
        counted.add_row(name, f"{len(accesses):,}", f"{passes:,}", f"{ideal:,}", f"{passes - ideal:,}")
        pictures.save(pictures.shared_memory(versions, name), into / name.replace(" ", "-").replace(".", "-"))
    for op in shown.operands:
        pictures.save(pictures.operand(op), into / ("operand-" + op.name.replace(": ", "-").replace(" ", "-")))
    console.print(counted)
    console.print(f"{len(list(into.glob('*.svg')))} pictures as SVG and PNG in {into}")


def parse_tile(text: str) -> space.Point:
    """ "128x64x8x2" or "128x64x8x2-q": tile_m, tile_n, warps, stages; with -q Q in registers, with -h half of it."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:-([qh]))?", text)
    if match is None:
        raise ValueError(f"--tile: got {text!r}, takes TILE_MxTILE_NxWARPSxSTAGES such as 128x64x8x2, with -q or -h")
    return space.Point(*map(int, match.groups()[:4]), query_held={None: "none", "h": "half", "q": "all"}[match[5]])
