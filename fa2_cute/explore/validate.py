"""How honest is the model? Many tiles on many problems, measured on a GPU and predicted without one, side by side.

    python -m fa2_cute.explore.validate measure times.json     # on a GPU
    python -m fa2_cute.explore.validate compare times.json --into docs/explore

The second needs no GPU. It prints rank correlations and what the model's first choice would have cost, and draws the
plot.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import arch as architectures
from .. import resources
from ..arch import Architecture
from ..shipping import cores
from . import binding, model, prune, rates, records
from .command import parse_tile
from .space import Point, Workload

HEAD_DIMS, LENGTHS = (64, 128), (512, 1024, 2048, 4096, 8192)
TOKENS = 16_384  # batch x length: the same number of rows for every length
HEADS = {64: 32, 128: 16}
#: Every kind of tile: 16 and 32 rows a warp, 2, 4 and 8 warps, short and long steps, 2 and 3 stages, Q here and there.
TILES = """
    64x32x4x2 64x64x2x2 64x64x4x2-q 64x128x4x2 128x32x4x2 128x48x4x2 128x48x4x2-q 128x48x4x3 128x64x4x2 128x64x4x2-q
    128x96x4x2 128x32x8x2 128x64x8x2-q 128x128x8x2 256x32x8x2 256x64x8x2
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Pair:
    """One point on one problem: milliseconds measured and predicted, and whether its kernel spills registers."""

    workload: Workload
    point: Point
    measured: float
    predicted: float
    spills: bool


def problems() -> list[Workload]:
    """Every head_dim, mask and length."""
    return [
        Workload(d, n, n, causal, TOKENS // n, HEADS[d], HEADS[d])
        for n, d, causal in product(LENGTHS, HEAD_DIMS, (False, True))
    ]


def tiles(workload: Workload, arch: Architecture) -> list[Point]:
    """Those of ``TILES`` that ``arch`` can hold."""
    return [p for p in map(parse_tile, TILES.split()) if prune.refusal(p, workload, arch) is None]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two sequences without ties (Spearman 1904)."""

    def ranks(values):
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0] * len(values)
        for rank, i in enumerate(order):
            found[i] = rank
        return found

    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b), strict=True)) / (n * (n * n - 1))


def compiled_facts(arch_name: str, workload: Workload, point: Point) -> tuple[model.CompiledFacts, bool] | str:
    """What the model needs of a point's kernel and whether it spills, or why there is none; in a process of its own."""
    arch = architectures.by_name(arch_name)
    try:
        kernel = binding.compiled(point, workload, arch)
        used = resources.usage(kernel)
        if used.blocks_per_sm == 0:
            return "does not fit"
        return records.facts(kernel, used, None, rates.of(arch)), used.stack_bytes > 0
    except RuntimeError as error:
        return str(error)


def predicted(
    workloads: Sequence[Workload], arch: Architecture, jobs: int
) -> dict[tuple[Workload, str], tuple[float, bool]]:
    """(milliseconds, spills) of every tile on every problem; one compilation for all lengths."""
    kinds = {(w.head_dim, w.causal): w for w in workloads}
    wanted = [(w, p) for w in kinds.values() for p in tiles(w, arch)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        run = partial(compiled_facts, arch.name)
        found = list(track(pool.map(run, *zip(*wanted, strict=True)), "compiling", total=len(wanted), transient=True))
    facts = {(w.head_dim, w.causal, p): f for (w, p), f in zip(wanted, found, strict=True) if not isinstance(f, str)}
    device = rates.of(arch)
    return {
        (w, p.name): (
            model.predict(p, w, device, facts[w.head_dim, w.causal, p][0]).milliseconds,
            facts[w.head_dim, w.causal, p][1],
        )
        for w in workloads
        for p in tiles(w, arch)
        if (w.head_dim, w.causal, p) in facts
    }


@app.command("measure")
def measure_all(
    file: Path,
    jobs: Annotated[int, typer.Option(help="processes that compile")] = 0,
    rounds: Annotated[int, typer.Option(help="timings of each")] = 9,
):
    """Compile, check and time every tile on every problem on this GPU."""
    import torch

    from . import measure

    arch = architectures.by_capability(*torch.cuda.get_device_capability())
    kinds = {(w.head_dim, w.causal): w for w in problems()}
    wanted = [(arch, w, p) for w in kinds.values() for p in tiles(w, arch)]
    with ProcessPoolExecutor(jobs or cores(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*wanted, strict=True)))
    results = []
    with torch.inference_mode():
        for workload in problems():
            calls = {}
            for point in tiles(workload, arch):
                call = binding.launcher(binding.compiled(point, workload, arch), workload)
                try:
                    fault = measure.wrong_result(call, workload)
                except RuntimeError as error:  # a launch that the device refuses
                    fault = str(error)
                if fault is None:
                    calls[point.name] = call
                else:
                    typer.echo(f"{workload.title}: {point.name}: {fault}")
            times = measure.timings(calls, workload, rounds)
            results.append({"workload": asdict(workload), "times": {n: t.as_dict() for n, t in times.items()}})
            best = min(times, key=lambda name: times[name].median)
            typer.echo(f"{workload.title}: {best} {workload.operations / times[best].median / 1e9:.0f} TFLOP/s")
            file.write_text(json.dumps({"device": torch.cuda.get_device_name(), "arch": arch.name, "results": results}))


def _compile(arch: Architecture, workload: Workload, point: Point) -> None:
    binding.compiled(point, workload, arch)


@app.command("compare")
def compare(
    file: Path,
    into: Annotated[Path, typer.Option(help="folder for the plot and the figures")] = Path("docs/explore"),
    jobs: Annotated[int, typer.Option(help="processes that compile")] = 0,
):
    """Predict what ``measure`` has timed, and set both side by side; needs no GPU."""
    from . import pictures

    data = json.loads(file.read_text())
    arch = architectures.by_name(data["arch"])
    times = [(Workload(**r["workload"]), r["times"]) for r in data["results"]]
    model_times = predicted([w for w, _ in times], arch, jobs or cores())
    pairs = [
        Pair(w, parse_tile(name), t["median"], *model_times[w, name])
        for w, measured in times
        for name, t in measured.items()
        if (w, name) in model_times
    ]
    console = Console(width=120)
    console.print(summary(pairs))
    named = [
        (
            f"{_group(x.workload)}: {x.point.name}",
            *(x.workload.operations / ms / 1e9 for ms in (x.measured, x.predicted)),
        )
        for x in pairs
    ]
    all_of = spearman([x.measured for x in pairs], [x.predicted for x in pairs])
    title = f"{data['device']}: {len(pairs)} points, Spearman {all_of:.3f} in time"
    pictures.save(pictures.comparison(named, title), into / "comparison")
    keep = {
        "device": data["device"],
        "arch": data["arch"],
        "pairs": [
            {
                "workload": asdict(x.workload),
                "tile": x.point.name,
                "measured_ms": x.measured,
                "predicted_ms": x.predicted,
                "spills": x.spills,
            }
            for x in pairs
        ],
    }
    (into / "comparison.json").write_text(json.dumps(keep) + "\n")


def read_pairs(file: Path) -> list[Pair]:
    """The pairs that ``compare`` has kept."""
    return [
        Pair(Workload(**x["workload"]), parse_tile(x["tile"]), x["measured_ms"], x["predicted_ms"], x["spills"])
        for x in json.loads(file.read_text())["pairs"]
    ]


def choice(pairs: Sequence[Pair]) -> Pair:
    """The one that the explorer would name without a GPU."""
    point = model.preferred((x.point, x.predicted, x.spills) for x in pairs)
    return next(x for x in pairs if x.point == point)


def first_choice_costs(pairs: Sequence[Pair]) -> dict[Workload, float]:
    """By problem: how much slower than the best measured tile the one that the model would choose was."""
    costs = {}
    for workload in dict.fromkeys(x.workload for x in pairs):
        of = [x for x in pairs if x.workload == workload]
        chosen = choice(of)
        costs[workload] = chosen.measured / min(x.measured for x in of) - 1
    return costs


def _group(workload: Workload) -> str:
    return f"D{workload.head_dim} {workload.query_len} {'causal' if workload.causal else 'full'}"


def summary(pairs: Sequence[Pair]) -> Table:
    """Rank correlations, errors and first choices, by problem and in all."""
    table = Table(title=f"{len(pairs)} points")
    for heading in ("problem", "points", "Spearman", "measured / predicted", "model's choice", "best", "costs"):
        table.add_column(heading, justify="left" if heading == "problem" else "right")
    costs = first_choice_costs(pairs)
    for workload, cost in costs.items():
        of = [x for x in pairs if x.workload == workload]
        chosen, best = choice(of), min(of, key=lambda x: x.measured)
        table.add_row(_group(workload), *_figures(of), chosen.point.name, best.point.name, f"{cost:.1%}")
    mean = sum(costs.values()) / len(costs)
    table.add_row("all, time", *_figures(pairs), "", "", f"{mean:.1%}, at most {max(costs.values()):.1%}")
    speeds = [(x.workload.operations / x.measured, x.workload.operations / x.predicted) for x in pairs]
    table.add_row("all, TFLOP/s", str(len(pairs)), f"{spearman(*zip(*speeds, strict=True)):.3f}", "", "", "", "")
    return table


def _figures(pairs: Sequence[Pair]) -> tuple[str, str, str]:
    ratios = [math.log(x.measured / x.predicted) for x in pairs]
    mean = sum(ratios) / len(ratios)
    spread = math.sqrt(sum((x - mean) ** 2 for x in ratios) / len(ratios))
    rank = spearman([x.measured for x in pairs], [x.predicted for x in pairs])
    return str(len(pairs)), f"{rank:.3f}", f"{math.exp(mean):.2f} (x{math.exp(spread):.2f})"


if __name__ == "__main__":
    app()
