"""A search: prune, evaluate in parallel with what was done before taken over, measure where there is a GPU."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from .. import jit
from ..arch import Architecture
from ..shipping import cores
from . import binding, model, prune
from .records import Record, evaluate, method
from .results import Results
from .space import Point, Refusal, Workload, points


@dataclass(frozen=True)
class Found:
    """What a search has found.

    records     best first: by measured time where there is one, else by predicted (but a tie is broken by
                model.preferred); refused by the compiler last
    refused     points that were never compiled, and why
    shipped     the point that a call runs today
    """

    workload: Workload
    arch: Architecture
    records: tuple[Record, ...]
    refused: tuple[Refusal, ...]
    shipped: Point

    @property
    def best(self) -> Record | None:
        """The first record that could be evaluated."""
        return next((r for r in self.records if r.refusal is None), None)


def default_file(workload: Workload, arch: Architecture) -> Path:
    """Where results of such a search are kept, unless told otherwise."""
    mask = "causal" if workload.causal else "full"
    return Path("fa2-cute-explore") / (
        f"{arch.name}-d{workload.head_dim}-{workload.query_len}x{workload.key_len}-{mask}-"
        f"b{workload.batch}-h{workload.heads}-{workload.kv_heads}-{workload.dtype}.json"
    )


def search(
    workload: Workload,
    arch: Architecture,
    file: Path,
    *,
    space: Iterable[Point] | None = None,
    jobs: int | None = None,
    device: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, doing: None,
) -> Found:
    """Evaluate every point of ``space`` that ``arch`` can hold, and the shipped one; keep results in ``file``.

    space       by default all of ``space.points()``
    jobs        processes that compile; by default one for each core
    device      also time each point on the current CUDA device, which must be of ``arch``
    progress    called with (points done, points in all, what was just done)
    Raises ValueError where the problem or every point is impossible, naming what is possible.
    """
    shipped = binding.shipped_point(workload, arch)
    wanted = list(space) if space is not None else points()
    if shipped not in wanted:
        wanted.insert(0, shipped)
    kept, refused = prune.split(wanted, workload, arch)
    if not kept:
        reasons = "; ".join(f"{r.point.name} {r.reason}" for r in refused[:4])
        raise ValueError(f"--vary: got {len(refused)} points of which {arch.name} can hold none: {reasons}")
    results = Results(file, workload, arch)
    states = {point: _state(point, workload, arch) for point in kept}
    done = [r for point in kept if (r := results.get(point, states[point])) is not None]
    todo = [point for point in kept if results.get(point, states[point]) is None]
    progress(len(done), len(kept), "found in the file" if done else "compiling")
    for record in _evaluated(todo, workload, arch, jobs):
        results.put(record, states[record.point])
        done.append(record)
        progress(len(done), len(kept), record.point.name)
    if device:
        done = _measured(done, workload, arch, results, states, progress)
    return Found(workload, arch, tuple(_ranked(done)), tuple(refused), shipped)


def _ranked(found: Sequence[Record]) -> list[Record]:
    in_order = sorted(found, key=_rank)
    known = [r for r in in_order if r.refusal is None]
    if known and known[0].measured is None:
        best = model.preferred((r.point, r.prediction.milliseconds, r.stack_bytes > 0) for r in known)
        in_order.sort(key=lambda r: r.point != best)  # stable: the others stay in their order
    return in_order


def _rank(record: Record) -> tuple:
    if record.refusal is not None:
        return 2, 0.0
    if record.measured is not None:
        return 0, record.measured["median"]
    return 1, record.prediction.milliseconds


def _state(point: Point, workload: Workload, arch: Architecture) -> str:
    """All that the record of a point depends on."""
    return f"{jit.entry_name(binding.spec_of(point, workload, arch), arch)}-{method()}"


def _evaluated(todo: Sequence[Point], workload: Workload, arch: Architecture, jobs: int | None):
    """Records as they are made, by ``jobs`` processes."""
    jobs = min(jobs or cores(), len(todo))
    if jobs <= 1:
        with _quiet():
            for point in todo:
                yield _one(point, workload, arch)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_quiet_for_good)
    try:
        waiting = {pool.submit(_one, point, workload, arch) for point in todo}
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _one(point: Point, workload: Workload, arch: Architecture) -> Record:
    try:
        return evaluate(point, workload, arch)
    except RuntimeError as error:
        if type(error).__name__ == "ToolMissing":
            raise
        return Record(point, f"does not compile: {' '.join(str(error).split())[:200]}")


def _measured(records, workload, arch, results, states, progress) -> list[Record]:
    """``records`` with times; a point whose result is wrong becomes a refused one."""
    from . import measure

    calls, right, wrong = {}, [], []
    for record in records:
        if record.refusal is not None:
            wrong.append(record)
            continue
        kernel = binding.compiled(record.point, workload, arch)
        call = binding.launcher(kernel, workload)
        fault = measure.wrong_result(call, workload)
        progress(len(calls) + len(wrong), len(records), f"checked {record.point.name}")
        if fault is None:
            calls[record.point.name] = call
            right.append(record)
        else:
            wrong.append(Record(record.point, f"computes a wrong result: {fault}"))
    times = measure.timings(calls, workload) if calls else {}
    done = [replace(record, measured=times[record.point.name].as_dict()) for record in right] + wrong
    for record in done:
        results.put(record, states[record.point])
    return done


@contextlib.contextmanager
def _quiet():
    """Without a line for each kernel that is compiled: there is a progress bar."""
    log = logging.getLogger("fa2_cute")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _quiet_for_good():
    logging.getLogger("fa2_cute").setLevel(logging.ERROR)
