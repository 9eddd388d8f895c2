"""The section ``prefill``: TFLOP/s of whole attention calls, beside every peer's and the rate of ``mma.sync``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .. import forward
from ..explore.space import Point, Workload
from . import checking, problems
from .peers import PACKAGES, PREFILL, Contestant, tile_contestant
from .results import Cell, Section
from .roofline import Roof
from .session import Entry, Session, Task, collect, compete


def contestants(session: Session, tiles: Sequence[Point] = ()) -> tuple[Contestant, ...]:
    """Those who take part: ours, ours with other tiles, and the peers."""
    ours = [one for one in PREFILL if one.name not in PACKAGES]
    return (*ours, *map(tile_contestant, tiles), *(one for one in PREFILL if session.takes_part(one.name)))


def run(session: Session, cells: Sequence[Workload], tiles: Sequence[Point], roof: Roof) -> Section:
    """The section. roof: a load of ``mma.sync``."""
    all_of_them = contestants(session, tiles)
    architecture = forward.architecture_of(session.device)
    section = Section(
        name="prefill",
        title="Prefill: batch x length x heads x head_dim",
        unit="us",
        work_unit="FLOP",
        contestants=tuple(one.name for one in all_of_them),
        peers=tuple(one.name for one in all_of_them if one.name in PACKAGES and one.mma_sync(architecture)),
    )
    tasks = [
        Task(
            problems.title(of),
            problems.group(of),
            section.contestants,
            functools.partial(_cell, session, of, all_of_them, roof),
        )
        for of in cells
    ]
    return collect(session, section, tasks)


@torch.inference_mode()
def _cell(session: Session, of: Workload, all_of_them: Sequence[Contestant], roof: Roof) -> Cell:
    sets = problems.rotated(lambda: problems.prefill_inputs(of, session.device), session.l2)

    @functools.cache
    def expected(rounded_scores: bool) -> checking.Expected:
        return checking.expect(*sets[0], causal=of.causal, rounded_scores=rounded_scores)

    entries = {
        one.name: Entry(
            make=lambda one=one: [one.make(*tensors, of.causal) for tensors in sets],
            expected=lambda one=one: expected(one.rounded_scores),
            ours=one.name not in PACKAGES,
        )
        for one in all_of_them
    }
    found = compete(session, entries, roof)
    work = float(of.operations)
    return Cell(problems.title(of), problems.group(of), work, found.figures, found.missing, found.notes, found.roof)
