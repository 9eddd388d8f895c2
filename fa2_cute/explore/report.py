"""One HTML file that answers which tile and why, with pictures in it: opens from disk, asks nothing of a network."""

from __future__ import annotations

import dataclasses
import html
import os
from pathlib import Path

from ..resources import usage
from . import binding, kernel_layouts, pictures, rates, records, simulate
from .records import Record
from .searching import Found
from .space import KIB, PARAMETERS

MIX_ROWS = 12
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: 2px 8px; text-align: right; border-bottom: 1px solid #eee; }
th { background: #f5f5f5; } td:first-child, th:first-child, td.text { text-align: left; }
tr.shipped { background: #fff7d6; }
tr.best { font-weight: bold; } p.answer { background: #eef6ee; padding: .6rem 1rem; }
svg { max-width: 100%; height: auto; }
details { margin: .5rem 0; } .scroll { overflow-x: auto; } code { background: #f5f5f5; }
"""
PARTS = {
    "mma": "products that the problem needs",
    "masked": "products that the mask throws away, and the mask",
    "stalls": "loop time in which the tensor pipes wait",
    "ends": "first loads, last stores, launch of blocks",
    "tail": "SMs without work at the end",
    "memory": "waiting for L2 or device memory",
}


def write(found: Found, path: Path) -> Path:
    """Write the report of ``found`` to ``path``."""
    text = page(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text)
    os.replace(scratch, path)
    return path


def page(found: Found) -> str:
    """The report as HTML."""
    from .command import answer

    title = f"Tiles for {found.workload.title} on {found.arch.name}"
    good = [r for r in found.records if r.refusal is None]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f'<p class="answer">{html.escape(line)}</p>' for line in answer(found)),
    ]
    if good:
        parts += [
            "<h2>All tiles</h2>",
            _table(found, good),
            "<h2>The space</h2>",
            pictures.svg(pictures.heatmap(found)),
            "<h2>Why: where the time goes</h2>",
            _parts(good),
            "<h2>Why: which pipe is busy</h2>",
            pictures.svg(pictures.mix(good[:MIX_ROWS])),
            "<h2>Why: the loop over time</h2>",
            "<p>The loop's own instructions on one SM, by the model: each row is a warp.</p>",
            *_pipelines(found),
            "<h2>Roofline</h2>",
            pictures.svg(pictures.roofline(found, rates.of(found.arch))),
            "<h2>Instructions of one step and warp</h2>",
            _opcodes(good[0]),
            "<h2>Layouts of the best tile</h2>",
            _layouts(found),
        ]
    parts += ["<h2>Refused</h2>", _refused(found), "<h2>What this is computed from</h2>", _origins(found)]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _rows(headings, rows, classes=()) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    body = []
    for i, row in enumerate(rows):
        css = classes[i] if i < len(classes) else ""
        cells = "".join(f"<td{' class=text' if isinstance(c, str) else ''}>{html.escape(str(c))}</td>" for c in row)
        body.append(f'<tr class="{css}">{cells}</tr>')
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _table(found: Found, good: list[Record]) -> str:
    measured = any(r.measured for r in good)
    headings = [
        "tile_m x tile_n x warps x stages", *(["measured ms", "drift"] if measured else []), "predicted ms", "TFLOP/s",
        "of bound", "binds", "registers", "stack", "shared KiB", "blocks/SM", "warps/SM", "bank conflicts",
        "bytes read",
        *(f"{pipe}" for pipe in good[0].mix),
    ]  # fmt: skip
    rows, classes = [], []
    for i, r in enumerate(good):
        p = r.prediction
        times = []
        if measured:
            times = [_n(r.measured["median"], 4), _n(r.measured["drift"], 3)] if r.measured else [_n(0), _n(0)]
        rows.append(
            [
                r.point.name, *times, _n(p.milliseconds, 4), _n(p.tflops, 1), f"{p.of_bound:.1%}", p.binds, r.registers,
                r.stack_bytes, _n(r.shared_bytes / KIB, 1), r.blocks_per_sm, r.warps_per_sm,
                r.counts.get("conflicts", 0), r.counts.get("bytes_read", 0), *r.mix.values(),
            ]
        )  # fmt: skip
        classes.append(("best " if i == 0 else "") + ("shipped" if r.point == found.shipped else ""))
    return (
        _rows(headings, rows, classes)
        + "<p>Bold: the best. Yellow: what this call runs today. -q: Q in registers, -h: half of it. Registers and "
        "stack (spills) by cuobjdump; conflicts and bytes by the emulator, of one block and three steps; the last "
        "columns are SASS instructions of one warp and step by pipe.</p>"
    )


def _n(value: float, digits: int = 2):
    return _Number(f"{value:.{digits}f}")


class _Number:
    """A number with its digits; a table aligns what is no str to the right."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


def _parts(good: list[Record]) -> str:
    headings = ["tile", *PARTS.values(), "what binds"]
    rows = [
        [r.point.name, *(_n(100 * r.prediction.parts.get(part, 0.0), 1) for part in PARTS), r.prediction.why]
        for r in good[:MIX_ROWS]
    ]
    return "<p>Percent of the predicted time.</p>" + _rows(headings, rows)


def _pipelines(found: Found):
    shipped = next((r for r in found.records if r.point == found.shipped and r.refusal is None), None)
    for record in dict.fromkeys((found.best.point, *([shipped.point] if shipped else []))):
        kernel = binding.compiled_with_lines(record, found.workload, found.arch)
        step, _ = records.loops(kernel)
        blocks = usage(kernel).blocks_per_sm
        outcome = simulate.run(
            step, rates.of(found.arch), warps=record.warps, blocks=blocks, iterations=4, keep_events=True
        )
        resident = f"{blocks} block{'s' * (blocks > 1)} of {record.warps} warps"
        title = f"{record.name}: {resident}, {outcome.cycles:.0f} cycles a step"
        yield pictures.svg(pictures.pipeline(outcome.events, title, 1.25 * outcome.cycles))


def _opcodes(best: Record) -> str:
    rows = [[name, count] for name, count in best.opcodes.items()]
    total = f"{best.point.name}, {sum(best.opcodes.values())} instructions"
    return f"<details><summary>{total}</summary>{_rows(['opcode', 'count'], rows)}</details>"


def _layouts(found: Found) -> str:
    both = [dataclasses.replace(found.best.point, swizzle=way) for way in (True, False)]
    versions = [kernel_layouts.extract(binding.spec_of(x, found.workload, found.arch)) for x in both]
    out = ["<p>Evaluated from the kernel's own code. Left as it is, right with the swizzle taken out.</p>"]
    for name in dict.fromkeys(a.name for a in versions[0].accesses):
        out.append(f"<h3>{html.escape(name)}</h3>" + pictures.svg(pictures.shared_memory(versions, name)))
    for op in versions[0].operands:
        out.append(
            f"<details><summary>Operand {html.escape(op.name)}</summary>{pictures.svg(pictures.operand(op))}</details>"
        )
    return "".join(out)


def _refused(found: Found) -> str:
    rows = [[r.point.name, r.reason] for r in found.refused]
    rows += [[r.point.name, r.refusal] for r in found.records if r.refusal is not None]
    return _rows(["tile", "why"], rows) if rows else "<p>None.</p>"


def _origins(found: Found) -> str:
    device = rates.of(found.arch)
    table = _rows(["rate", "value"], [[f.name, getattr(device, f.name)] for f in dataclasses.fields(device)])
    space = _rows(["parameter", "what"], [[name, f.metadata["says"]] for name, f in PARAMETERS.items()])
    return (
        "<p>The model runs the loop's SASS with these rates (their origins stand beside them in "
        f"<code>fa2_cute/explore/rates.py</code>).</p>{table}{space}"
    )
