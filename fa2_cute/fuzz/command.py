"""The command ``fa2-cute fuzz``: a progress bar while cases are drawn, then what was drawn and what failed."""

import tempfile
from pathlib import Path

from hypothesis.configuration import set_hypothesis_home_dir
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
from rich.table import Table

from .campaign import Campaign, program


def run(minutes: float, seed: int, device: str, folder: Path, console: Console) -> Campaign:
    """Fuzz for ``minutes`` and print the summary; failures are saved to ``folder``. Ctrl-C ends it early."""
    campaign = Campaign(seed=seed, device=device, folder=folder)
    seconds = 60.0 * minutes
    console.print(f"Fuzzing on {device} for {minutes:g} min with seed {seed}; Ctrl-C ends it with the summary.")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    interrupted = False
    bar = Progress(*columns, console=console, transient=True)
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as scratch, bar:
        set_hypothesis_home_dir(scratch)  # else it leaves a folder where the user is
        task = bar.add_task("compiling", total=seconds)

        def show(campaign: Campaign):
            what = f"{campaign.drawn} cases, {len(campaign.failures)} failures"
            bar.update(task, completed=min(campaign.seconds, seconds), description=what)

        try:
            campaign.run(seconds, show)
        except KeyboardInterrupt:
            interrupted = True
    console.print(summary(campaign, interrupted))
    return campaign


def summary(campaign: Campaign, interrupted: bool = False) -> Group:
    """Tables of the classes drawn, every failure as a program, and the verdict."""
    table = Table(title="Drawn", show_header=False)
    for aspect, kinds in campaign.classes.items():
        table.add_row(aspect, ", ".join(f"{kind} [dim]{count}[/]" for kind, count in sorted(kinds.items())))
    parts: list = [table] if campaign.drawn else []
    for failure in campaign.failures:
        if failure.path is not None:
            parts.append(f"[red]failed:[/] {escape(str(failure.path))}")
        parts.append(Syntax(program(failure, campaign.device), "python", word_wrap=True))
    colour = "red" if campaign.failures else "green"
    early = "interrupted: " if interrupted else ""
    parts.append(
        f"[{colour}]{early}{campaign.drawn} cases in {campaign.seconds:.0f} s, "
        f"{len(campaign.failures)} failures[/] (seed {campaign.seed})"
    )
    if campaign.first_calls > campaign.seconds / 2:
        parts.append(
            f"{campaign.first_calls:.0f} s of that were first calls of kernels, which compile what the cache does not "
            "have: more minutes draw many more cases"
        )
    return Group(*parts)
