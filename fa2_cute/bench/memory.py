"""The section ``memory``: what a call allocates at most beyond its inputs, its output and the logsumexp."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..explore.space import Workload
from . import checking, problems
from .peers import CUDNN, EFFICIENT, FA4, FA4_SM_120, FLASH, OURS, PREFILL, reason
from .results import Cell, Figure, Section
from .roofline import Wrong
from .session import Session, Task, collect, require_device

CONTESTANTS = (OURS, FLASH, FA4_SM_120, EFFICIENT, CUDNN, FA4)
MIB = 2.0**20


def cells(quick: bool) -> list[Workload]:
    """Prefill, grouped queries, few queries (which splits need a workspace for), and a very long sequence."""
    found = [
        Workload(128, 8192, 8192, True, 2, 16, 16),
        Workload(128, 512, 8192, True, 1, 32, 8),
        Workload(128, 1, 32_768, False, 4, 32, 8),
    ]
    return found if quick else [*found, Workload(128, 131_072, 131_072, True, 1, 16, 16)]


def run(session: Session, problems_: Sequence[Workload]) -> Section:
    """The section. Needs a CUDA device: torch counts no CPU memory."""
    section = Section(
        name="memory",
        title="Peak memory of a call beyond inputs, output and logsumexp",
        unit="MiB",
        work_unit="",
        contestants=CONTESTANTS,
        peers=(),
    )
    tasks = [
        Task(problems.title(of), group(of), CONTESTANTS, functools.partial(_cell, session, of)) for of in problems_
    ]
    return collect(session, section, tasks)


def group(of: Workload) -> str:
    """The table that a cell belongs to."""
    return "causal" if of.causal else "full"


@torch.inference_mode()
def _cell(session: Session, of: Workload) -> Cell:
    tensors = problems.prefill_inputs(of, session.device)
    expected = checking.expect(*tensors, causal=of.causal)
    kept = of.batch * of.heads * of.query_len * (of.head_dim * tensors[0].element_size() + 4)  # output, logsumexp
    figures, missing, notes = {}, {}, {}
    for one in PREFILL:
        if one.name not in CONTESTANTS or (one.name != OURS and not session.takes_part(one.name)):
            continue
        try:
            call = one.make(*tensors, of.causal)
            out = call()
            fault = checking.fault(out, expected)
            del out
            peak, milliseconds = _peak(call)
        except Exception as error:  # somebody else's limit, of whatever kind
            require_device(session, one.name, error)
            if one.name == OURS:
                raise
            missing[one.name] = reason(error)
            continue
        if fault is not None and one.name == OURS:
            raise Wrong(f"memory {problems.title(of)}: {fault}")
        if fault is not None:
            missing[one.name] = f"wrong: {fault}"
            continue
        figures[one.name] = Figure.of([max(0.0, peak - kept) / MIB])  # some keep no logsumexp
        notes[f"{one.name}, ms"] = milliseconds
    return Cell(problems.title(of), group(of), 0.0, figures, missing, notes)


def _peak(call) -> tuple[int, float]:
    """(bytes allocated at most by a call beyond what was there, milliseconds that it took)."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    out = call()
    end.record()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del out
    return peak, start.elapsed_time(end)
