"""``python -m fa2_cute.mutation``: draw mutants, try each, report; exit code 1 below the goal."""

import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from .. import arch, jit, tiling
from . import trial
from .attempts import Result, attempt
from .sample import draw

GOAL = 97.0  # per cent of the mutants that are not equivalent


def main(
    count: Annotated[int, typer.Option("--count", help="mutants to try")] = 480,
    seed: Annotated[int, typer.Option(help="of the sample")] = 0,
    jobs: Annotated[int, typer.Option(help="processes")] = 2,
    kind: Annotated[str | None, typer.Option(help="only mutants of this kind")] = None,
):
    """Plant single faults in the kernels' PTX and in their calls; report which of them the checks notice."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    start = time.monotonic()
    kernels = [jit.compiled(spec, arch.TARGET) for spec in tiling.shipped(arch.TARGET)]  # workers find them on disk
    tasks = [task for task in draw(kernels, sys.maxsize if kind else count, seed) if kind in (None, task.kind)][:count]
    for library in ("OMP", "OPENBLAS", "MKL"):  # a process is one core's work
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawning, torch.set_num_threads, (1,)) as pool:
        specs = [kernel.spec for kernel in kernels]
        for spec, verdict in zip(specs, pool.map(trial.try_none, specs), strict=True):
            if verdict.noticed:
                console.print(f"[red]The battery fails without a fault:[/] {verdict} on {spec}")
                raise typer.Exit(2)
        found = track(pool.map(attempt, tasks), "mutants", len(tasks), console=console, transient=True)
        results = list(found)
    report(results, console)
    console.print(f"{len(results)} mutants, seed {seed}, {time.monotonic() - start:.0f} s")
    if percentage(results) < GOAL:
        raise typer.Exit(1)


def percentage(results: list[Result]) -> float:
    """Killed, per cent of the valid mutants that are not known to be equivalent; 100 where there are none."""
    killed, survived, *_ = _tally(results)
    return 100.0 * killed / (killed + survived) if killed + survived else 100.0


def report(results: list[Result], console: Console):
    """Print a table by kind, what noticed and where in the battery, the equivalents and the survivors."""
    table = Table(title="Mutants")
    for heading in ("kind", "killed", "survived", "equivalent", "invalid"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in sorted({result.task.kind for result in results}):
        table.add_row(kind, *map(str, _tally([result for result in results if result.task.kind == kind])))
    table.add_section()
    table.add_row("all", *map(str, _tally(results)))
    console.print(table)
    killed = [result for result in results if result.killed]
    names = Counter(result.noticed for result in killed)
    console.print("Noticed by: " + ", ".join(f"{name} {count}" for name, count in names.most_common()))
    cases = Counter(result.case for result in killed)
    console.print("At case: " + ", ".join(f"{case}: {count}" for case, count in sorted(cases.items())))
    for excuse, count in Counter(result.excuse for result in results if result.excuse).most_common():
        console.print(f"[yellow]equivalent[/] {count}: {escape(excuse)}")
    for result in results:
        if result.survived:
            console.print(f"[red]survived[/] {escape(str(result.task))}")
    console.print(f"{percentage(results):.1f}% of the mutants that are not equivalent were killed (goal: {GOAL:g}%)")


def _tally(results: list[Result]) -> tuple[int, int, int, int]:
    """(killed, survived, equivalent, invalid)."""
    return tuple(sum(getattr(r, name) for r in results) for name in ("killed", "survived", "equivalent", "invalid"))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
