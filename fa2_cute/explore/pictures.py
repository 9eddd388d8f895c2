"""Pictures as matplotlib figures: operands, shared memory by bank, the pipeline over time, heatmap, roofline."""

from __future__ import annotations

import ast
import functools
import io
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.colors
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from . import model
from .kernel_layouts import ELEMENT_BYTES, VECTOR, Access, KernelLayouts, Operand, SharedTile
from .rates import Rates
from .records import Record
from .sass import ALU, FMA, MUFU, SHARED, TENSOR
from .searching import Found
from .simulate import Event
from .space import Refusal, Workload

# ColorBrewer Set3 without its grey: eight hues that stay apart in the common kinds of colour blindness, light enough
# for text.
GROUP_COLOURS = ("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")
GROUPS = len(GROUP_COLOURS)  # of four banks: what 16 bytes touch
ROWS_SHOWN = 16  # two atoms of the swizzle
PHASES = {
    "Q K^T": "#1f78b4",
    "P V": "#33a02c",
    "softmax": "#e31a1c",
    "ldmatrix": "#a6cee3",
    "cp.async": "#ff7f00",
    "other": "#bbbbbb",
}
_HELD = {"none": "", "half": ", half of Q in registers", "all": ", Q in registers"}
STYLE = {
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "fa2_cute",  # the same picture gives the same file
    "font.size": 8,
    "font.family": "sans-serif",
}


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.svg and ``stem``.png."""
    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=110)
    return paths


def svg(figure: Figure) -> str:
    """The figure as an <svg> element."""
    with matplotlib.rc_context(STYLE):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _figure(width: float, height: float, rows: int = 1, cols: int = 1, **options):
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, cols, squeeze=False, **options)


def operand(op: Operand) -> Figure:
    """Each element of an MMA operand with the thread and value that hold it; threads by colour."""
    rows, cols = op.shape
    figure, axes = _figure(0.42 * cols + 1, 0.3 * rows + 0.8)
    ax = axes[0][0]
    _cells(ax, [[op.owner[row, col][0] % GROUPS for col in range(cols)] for row in range(rows)])
    for (row, col), (thread, value) in op.owner.items():
        ax.text(col + 0.5, row + 0.5, f"T{thread}\nV{value}", ha="center", va="center", fontsize=5)
    _grid(ax, rows, cols, f"{op.name}: thread (T) and register element (V) of each element, warp 0")
    ax.set_xlabel(op.axes[1])
    ax.set_ylabel(op.axes[0])
    return figure


def _cells(ax, groups: Sequence[Sequence[int]]):
    """Colour unit cells by group, as one small image: a vector file of thousands of rectangles is large."""
    image = [[matplotlib.colors.to_rgb(GROUP_COLOURS[group]) for group in row] for row in groups]
    ax.imshow(image, extent=(0, len(groups[0]), len(groups), 0), interpolation="nearest", aspect="auto")
    for x in range(1, len(groups[0])):
        ax.axvline(x, color="white", lw=0.5)
    for y in range(1, len(groups)):
        ax.axhline(y, color="white", lw=0.5)


def _grid(ax, rows: int, cols: int, title: str):
    ax.set_xlim(0, cols)
    ax.set_ylim(rows, 0)
    ax.set_xticks([x + 0.5 for x in range(cols)], [str(x) for x in range(cols)], fontsize=6)
    ax.set_yticks([y + 0.5 for y in range(rows)], [str(y) for y in range(rows)], fontsize=6)
    ax.tick_params(length=0)
    ax.set_title(title, fontsize=8)


def access_title(layouts: KernelLayouts, name: str) -> str:
    """What the picture of ``name`` says: its first instruction's conflicts, and those of the whole tile."""
    all_of = layouts.of(name)
    first = all_of[0]
    phase = first.phases[0]
    total, ideal = sum(a.wavefronts for a in all_of), sum(len(a.phases) for a in all_of)
    swizzled = "as shipped" if layouts.spec.swizzle else "swizzle removed"
    return (
        f"{name}, {swizzled}: {len(phase.lanes)} lanes, {phase.wavefronts} wavefront{'s' * (phase.wavefronts > 1)}, "
        f"{phase.conflicts} conflicts\nwhole tile, all warps: {total} wavefronts for {ideal} phases, "
        f"{total - ideal} conflicts"
    )


def shared_memory(versions: Sequence[KernelLayouts], name: str) -> Figure:
    """A tile in shared memory, 16 bytes a cell, coloured by the four banks it lies in, for each of ``versions``; the
    first phase of the first access called ``name`` drawn into it, with what each group of banks is asked for below."""
    tile = versions[0].tiles[versions[0].of(name)[0].tile]
    cols = tile.cols // VECTOR
    width = max(0.34 * cols + 0.8, 4.2)
    figure, axes = _figure(
        width * len(versions), 0.26 * ROWS_SHOWN + 2.0, 2, len(versions), height_ratios=[ROWS_SHOWN, 3.5]
    )
    for column, layouts in enumerate(versions):
        access = layouts.of(name)[0]
        _tile(axes[0][column], layouts.tiles[access.tile], access)
        axes[0][column].set_title(access_title(layouts, name), fontsize=7)
        _bank_load(axes[1][column], access)
    return figure


def _tile(ax, tile: SharedTile, access: Access):
    rows, cols = min(tile.rows, ROWS_SHOWN), tile.cols // VECTOR
    groups = [[tile.chunks[row][col] * ELEMENT_BYTES // 16 % GROUPS for col in range(cols)] for row in range(rows)]
    _cells(ax, groups)
    for row in range(rows):
        for col in range(cols):
            group = groups[row][col]
            ax.text(
                col + 0.5,
                row + 0.72,
                f"{4 * group}-{4 * group + 3}",
                ha="center",
                va="center",
                fontsize=4,
                color="#555",
            )
    for lane in access.phases[0].lanes:
        row, col = access.lanes[lane]
        if row < rows:
            ax.add_patch(Rectangle((col // VECTOR, row), 1, 1, fill=False, edgecolor="black", lw=1.6))
            ax.text(
                col // VECTOR + 0.5, row + 0.32, f"lane {lane}", ha="center", va="center", fontsize=4.5, weight="bold"
            )
    _grid(ax, rows, cols, "")
    ax.set_xlabel("16-byte chunk of a row; small: its banks")
    ax.set_ylabel("row")


def _bank_load(ax, access: Access):
    phase = access.phases[0]
    asked = [0] * GROUPS
    for bank in phase.banks:
        asked[bank // 4] += 1
    ax.bar(range(GROUPS), asked, color=GROUP_COLOURS, edgecolor="#555", lw=0.5)
    ax.axhline(1, color="black", lw=0.6, ls=":")
    ax.set_xticks(range(GROUPS), [f"{4 * g}-{4 * g + 3}" for g in range(GROUPS)], fontsize=6)
    ax.set_ylim(0, 8.5)  # lanes of a phase
    ax.set_yticks([1, 4, 8])
    ax.set_ylabel("lanes")
    ax.set_xlabel(f"banks asked in this phase: {phase.wavefronts} wavefronts (bars above the line wait)")


@functools.cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, name) of the functions of a file of the kernel."""
    path = Path(__file__).parent.parent / "kernels" / file
    if not path.is_file():
        return ()
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple((n.lineno, n.end_lineno, n.name) for n in nodes if isinstance(n, ast.FunctionDef))


def phase_of(event: Event) -> str:
    """Which part of the algorithm an instruction belongs to: by the function of the kernel that it comes from."""
    file, line = event.source or ("", 0)
    name = next((f for first, last, f in _functions(file) if first <= line <= last), "")
    if event.pipe == TENSOR:
        return "P V" if name == "multiply_PV" else "Q K^T"
    if event.pipe in (MUFU, FMA) or file == "softmax.py":
        return "softmax"
    if event.pipe == SHARED:
        return "ldmatrix" if file == "products.py" else "cp.async" if file == "copies.py" else "other"
    return "other"


def pipeline(events: Sequence[Event], title: str, cycles: float) -> Figure:
    """One row a warp: what it issues over ``cycles`` clocks, by part of the algorithm."""
    start = min(event.cycle for event in events)
    rows = sorted({(event.block, event.warp) for event in events})
    spans = defaultdict(list)
    for event in events:
        if event.cycle - start < cycles:
            part = phase_of(event)
            if part != "other":
                spans[event.block, event.warp, part].append((event.cycle - start, max(event.busy, 2.0)))
    figure, axes = _figure(10, 0.32 * len(rows) + 1.2)
    ax = axes[0][0]
    lanes = {
        "Q K^T": (0.0, 0.36),
        "P V": (0.0, 0.36),
        "softmax": (0.36, 0.2),
        "ldmatrix": (0.56, 0.15),
        "cp.async": (0.71, 0.15),
    }
    for y, (block, warp) in enumerate(rows):
        for part, (offset, height) in lanes.items():
            merged = _merged(spans[block, warp, part])
            if merged:
                ax.broken_barh(merged, (y + offset + 0.07, height), facecolors=PHASES[part], lw=0)
    ax.set_yticks([y + 0.5 for y in range(len(rows))], [f"block {b} warp {w}" for b, w in rows], fontsize=6)
    ax.set_ylim(len(rows), 0)
    ax.set_xlim(0, cycles)
    ax.set_xlabel("cycles")
    ax.set_title(title, fontsize=8)
    ax.legend(
        handles=[Patch(color=PHASES[part], label=part) for part in lanes], ncols=5, fontsize=6, loc="lower center",
        bbox_to_anchor=(0.5, -0.35 - 0.9 / len(rows)),
    )  # fmt: skip
    return figure


def _merged(spans: list[tuple[float, float]], gap: float = 12.0) -> list[tuple[float, float]]:
    """(start, length) intervals; those less than ``gap`` cycles apart are one."""
    out: list[list[float]] = []
    for start, length in sorted(spans):
        if out and start - (out[-1][0] + out[-1][1]) < gap:
            out[-1][1] = max(out[-1][1], start + length - out[-1][0])
        else:
            out.append([start, length])
    return [(a, b) for a, b in out]


def heatmap(found: Found) -> Figure:
    """Predicted TFLOP/s (measured where there are times) by tile_m, warps and stages against tile_n."""
    good = [r for r in found.records if r.refusal is None]
    refused = [*found.refused, *(Refusal(r.point, r.refusal) for r in found.records if r.refusal is not None)]
    every = [r.point for r in good] + [r.point for r in refused]
    columns = sorted({p.tile_n for p in every})

    def row_of(point) -> tuple:
        return tuple(getattr(point, f) for f in ("tile_m", "warps", "stages", "query_held", "swizzle", "warps_n"))

    rows = sorted({row_of(p) for p in every})
    values = {(row_of(r.point), r.point.tile_n): tflops(r, found.workload) for r in good}
    figure, axes = _figure(1.0 * len(columns) + 2.6, 0.3 * len(rows) + 1.2)
    ax = axes[0][0]
    top, low = max(values.values()), min(values.values())
    with matplotlib.rc_context(STYLE):
        colours = matplotlib.colormaps["viridis"]
    for y, row in enumerate(rows):
        for x, tile_n in enumerate(columns):
            value = values.get((row, tile_n))
            if value is None:
                reason = next((r.reason for r in refused if (row_of(r.point), r.point.tile_n) == (row, tile_n)), "")
                ax.add_patch(Rectangle((x, y), 1, 1, facecolor="#eeeeee", hatch="///", edgecolor="white", lw=0))
                ax.text(x + 0.5, y + 0.5, _short(reason), ha="center", va="center", fontsize=5, color="#777")
                continue
            share = (value - low) / (top - low) if top > low else 1.0
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colours(0.15 + 0.85 * share), edgecolor="white", lw=0.5))
            marked = " *" if (row, tile_n) == (row_of(found.shipped), found.shipped.tile_n) else ""
            ax.text(
                x + 0.5,
                y + 0.5,
                f"{value:.0f}{marked}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if share < 0.5 else "black",
            )
    ax.set_xlim(0, len(columns))
    ax.set_ylim(len(rows), 0)
    ax.set_xticks([x + 0.5 for x in range(len(columns))], [str(c) for c in columns])
    labels = [
        f"{m} rows, {w} warps, {s} stages" + _HELD[q] + ("" if z else ", no swizzle") for m, w, s, q, z, _ in rows
    ]
    ax.set_yticks([y + 0.5 for y in range(len(rows))], labels, fontsize=6)
    ax.tick_params(length=0)
    ax.set_xlabel("tile_n: keys a step")
    kind = "measured" if any(r.measured for r in good) else "predicted"
    ax.set_title(f"TFLOP/s, {kind}; * is what a call runs; hatched: refused", fontsize=8)
    return figure


def _short(reason: str) -> str:
    for word, text in (
        ("KiB", "shared memory"),
        ("register", "registers"),
        ("multiple", "does not divide"),
        ("kernel has", "not in kernel"),
    ):
        if word in reason:
            return text
    return "no" if reason else ""


def tflops(record: Record, workload: Workload) -> float:
    """Measured where there is a time, else predicted."""
    if record.measured:
        return workload.operations / record.measured["median"] / 1e9
    return record.prediction.tflops


def roofline(found: Found, rates: Rates) -> Figure:
    """TFLOP/s against FLOP a byte of L2 traffic, under the roofs of tensor pipes, L2 and device memory."""
    good = [r for r in found.records if r.refusal is None]
    figure, axes = _figure(6, 4)
    ax = axes[0][0]
    clock = rates.clock_ghz * 1e9
    peak = 4096 / rates.mma_cycles * 4 * rates.sms * clock / 1e12
    xs = [intensity(r, found.workload) for r in good]
    low, high = 4.0, 4 * max(xs)
    device = found.workload.operations / model.device_bytes(found.workload)
    ax.plot([peak / (rates.l2_total_bytes * clock / 1e12), high * 4], [peak, peak], color="black", lw=1)
    ax.text(high * 3.6, peak * 1.03, f"tensor pipes {peak:.0f}", ha="right", fontsize=7)
    for bandwidth, name, colour in (
        (rates.l2_total_bytes * clock, "L2", "#1f78b4"),
        (rates.device_gbytes * 1e9, "device memory", "#e31a1c"),
    ):
        line = [low, peak * 1e12 / bandwidth]
        ax.plot(
            line, [bandwidth * x / 1e12 for x in line], color=colour, lw=1, label=f"{name} {bandwidth / 1e9:,.0f} GB/s"
        )
    ax.scatter(
        xs, [tflops(r, found.workload) for r in good], s=14, color="#33a02c", zorder=3, label="tiles, by L2 traffic"
    )
    ax.axvline(device, color="#e31a1c", lw=0.6, ls=":")
    ax.text(
        device,
        peak / 40,
        " this problem,\n by device traffic",
        fontsize=6,
        color="#e31a1c",
        ha="left" if device < high else "right",
    )
    best = found.best
    ax.annotate(
        best.point.name,
        (intensity(best, found.workload), tflops(best, found.workload)),
        fontsize=7,
        xytext=(4, -10),
        textcoords="offset points",
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlabel("FLOP a byte")
    ax.set_ylabel("TFLOP/s")
    ax.set_title(f"Roofline, {rates.device}", fontsize=8)
    ax.legend(fontsize=6, loc="lower right")
    return figure


def intensity(record: Record, workload: Workload) -> float:
    """FLOP that the mask leaves, a byte of K, V, Q and O that blocks move through the L2."""
    return workload.operations / model.l2_bytes(record.point, workload)


def mix(records: Sequence[Record]) -> Figure:
    """Cycles that each pipe of a sub-partition needs for one step of one warp, beside those of the tensor pipe."""
    figure, axes = _figure(7, 0.28 * len(records) + 1.2)
    ax = axes[0][0]
    names = (TENSOR, SHARED, MUFU, FMA, ALU, "issue")
    for y, record in enumerate(records):
        for i, name in enumerate(names):
            value = record.prediction.busy.get(name, 0.0)
            ax.barh(y + (i - 2.5) * 0.13, value, 0.12, color=GROUP_COLOURS[i], edgecolor="#777", lw=0.3)
    ax.axvline(model.BINDING, color="black", lw=0.6, ls=":")
    ax.set_yticks(range(len(records)), [r.point.name for r in records], fontsize=6)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.02)
    ax.set_xlabel("share of the time that a pipe is busy in the loop; right of the line it binds")
    ax.legend(
        handles=[Patch(color=GROUP_COLOURS[i], label=n) for i, n in enumerate(names)],
        ncols=6,
        fontsize=6,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
    )
    return figure


def comparison(pairs: Sequence[tuple[str, float, float]], title: str, labelled: int = 6) -> Figure:
    """Measured against predicted TFLOP/s, one colour a group; the ``labelled`` that are furthest off are named.

    pairs: ("group: name", measured, predicted).
    """
    figure, axes = _figure(6.5, 6)
    ax = axes[0][0]
    groups = list(dict.fromkeys(name.split(":")[0] for name, _, _ in pairs))
    colours = matplotlib.colormaps["tab20"]
    for i, group in enumerate(groups):
        part = [(m, p) for name, m, p in pairs if name.split(":")[0] == group]
        ax.scatter([p for _, p in part], [m for m, _ in part], s=14, color=colours(i % 20), label=group)
    worst = sorted(pairs, key=lambda x: -abs(math.log(x[1] / x[2])))[:labelled]
    for name, measured, predicted in worst:
        ax.annotate(name, (predicted, measured), fontsize=5, xytext=(3, 3), textcoords="offset points")
    top = 1.05 * max(max(m, p) for _, m, p in pairs)
    ax.plot([0, top], [0, top], color="black", lw=0.6)
    ax.set_xlim(0, top)
    ax.set_ylim(0, top)
    ax.set_xlabel("predicted TFLOP/s")
    ax.set_ylabel("measured TFLOP/s")
    ax.set_title(title, fontsize=8)
    ax.legend(fontsize=5, loc="lower right", ncols=2)
    return figure
