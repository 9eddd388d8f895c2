"""What ``fa2-cute bench`` does: the sections one after the other, each watched for drift; tables, JSON, pictures."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from .. import forward
from ..explore.space import Point, Workload
from ..folders import require_writable
from ..shipping import cores
from . import (
    compiling,
    decode,
    host,
    kvcache,
    machine,
    memory,
    peers,
    prefill,
    problems,
    results,
    tables,
    warming,
)
from .options import Options, sections_of
from .results import Gauge, Report, Section
from .roofline import CopyProbe, MmaProbe, ReadProbe, Roof, Wrong
from .sensors import Sensors
from .session import DEVICE_FAILED, OUT_OF_TIME, QUICK_ROUNDS, ROUNDS, Session
from .timing import DeviceFailed, GraphTimer, Timer

SENSED = ("prefill", "decode", "kvcache")
FOLDER = Path("bench/results")
# By how much a fixed load may change from a section's start to its end. Contestants of a cell are interleaved, so their
# ratios hold through a drift; absolute figures do not, and this is half of what separates neighbours there.
MOST_DRIFT = 0.04
MOST_HOST_DRIFT = 0.10  # a processor's clock and a server's other work move more
HOST_LOOP = 200_000


class Failed(ValueError):
    """Some section lacks figures; the text says which and why."""


def run(what: Sequence[str], options: Options, console: Console) -> Path:
    """Measure, print, and write the JSON file, whose path is returned.

    Raises ValueError for arguments that are not taken and where there is no GPU, ``Failed`` where a section has no
    figures (the file then has the others).
    """
    wanted = sections_of(what)
    plan = Plan.of(options)
    asked = peers.statuses(options.peer)
    if not torch.cuda.is_available():
        raise ValueError(
            "bench: needs a CUDA device of compute capability 8.0 or newer, and torch sees none; "
            "fa2-cute bench plot FILE draws recorded results without one"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    forward.architecture_of(device)  # refuses a device that is too old
    start = time.monotonic()

    def say(text: str):
        console.print(f"[dim]{time.monotonic() - start:5.0f} s  {escape(text)}[/]")

    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    timer = GraphTimer(device, machine.l2_bytes(device))
    deadline = math.inf if options.minutes is None else start + 60.0 * options.minutes
    l2 = machine.l2_bytes(device)
    session = Session(device, timer, asked, rounds, options.quick, say, l2, deadline=deadline)
    mma, read, copy = (_made_when_needed(probe, device, timer) for probe in (MmaProbe, ReadProbe, CopyProbe))
    roofs = {"prefill": mma, "decode": read, "kvcache": copy}
    loads = {
        "prefill": Load("rate of mma.sync", "TFLOP/s", 1e12, lambda: mma().rate(timer)),
        "decode": Load("rate of reading memory", "GB/s", 1e9, lambda: read().rate(timer)),
        "kvcache": Load("rate of copying memory", "GB/s", 1e9, lambda: copy().rate(timer)),
        "host": Load("a loop on one core", "us", 1e-6, host_loop, MOST_HOST_DRIFT),
    }
    date, described = machine.now(), machine.describe(device)
    path = options.out or FOLDER / machine.file_name(date, str(described["device"]))
    require_writable("--out", path.parent)
    jobs = plan.jobs(session, wanted)
    warming.warm(session, jobs, options.jobs or cores())

    empty = Report(date, described, asked, ())
    report = measured(session, wanted, plan, roofs, loads, empty, lambda report: results.save(report, path))
    tables.show(report, console)
    console.print(f"\nwritten to {path}")
    if report.refused:
        raise Failed("bench: " + "; ".join(f"{name}: {why}" for name, why in report.refused.items()))
    return path


@dataclass(frozen=True)
class Plan:
    """What each section is run on."""

    prefill: tuple[Workload, ...]
    tiles: tuple[Point, ...]
    decode: tuple[problems.Decode, ...]
    splits: tuple[int, ...]
    pages: tuple[int, ...]
    kvcache: tuple[kvcache.Append | kvcache.Attend, ...]
    memory: tuple[Workload, ...]

    @classmethod
    def of(cls, options: Options) -> Plan:
        """What was chosen, and what there is no choice of."""
        return cls(
            prefill=tuple(options.prefill()),
            tiles=tuple(options.tiles()),
            decode=tuple(options.decode()),
            splits=options.splits,
            pages=options.page,
            kvcache=(*kvcache.APPENDS, *kvcache.ATTENDS),
            memory=tuple(memory.cells(options.quick)),
        )

    def run(self, session: Session, name: str, roofs: Mapping[str, Callable[[], Roof]]) -> Section:
        """Run a section beside its roof."""
        if name == "prefill":
            return prefill.run(session, self.prefill, self.tiles, roofs[name]())
        if name == "decode":
            return decode.run(session, self.decode, self.splits, self.pages, roofs[name]())
        if name == "kvcache":
            return kvcache.run(session, self.kvcache, roofs[name]())
        if name == "host":
            return host.run(session)
        if name == "compile":
            return compiling.run(session)
        return memory.run(session, self.memory)

    def jobs(self, session: Session, wanted: Sequence[str]) -> list[warming.Job]:
        """What is worth compiling ahead for the sections ``wanted``."""
        dense = [*self.prefill * ("prefill" in wanted), *self.memory * ("memory" in wanted)]
        found = warming.prefill_jobs(dense, [one.name for one in prefill.contestants(session)])
        if "decode" in wanted:
            names = list(decode.contestants(session, (), self.pages))
            found += warming.decode_jobs(self.decode, names, self.pages)
        return found + warming.kvcache_jobs(self.kvcache if "kvcache" in wanted else ())


def measured(
    session: Session,
    wanted: Sequence[str],
    plan: Plan,
    roofs: Mapping[str, Callable[[], Roof]],
    loads: Mapping[str, Load],
    report: Report,
    keep: Callable[[Report], None],
) -> Report:
    """``report`` with the sections ``wanted``; ``keep`` is given what there is after each: a run that is stopped, or
    dies, has what it measured."""
    device_failed = ""
    for name in wanted:
        why = device_failed or (OUT_OF_TIME if session.is_late() else "")
        if not why:
            try:
                with sensed(session, name) as here:
                    run_section = functools.partial(plan.run, here, name, roofs)
                    section = watched(name, run_section, loads.get(name), session.say)
                report = replace(report, sections=(*report.sections, section))
                why = section.failed
            except Wrong as error:
                why = str(error)
            except DeviceFailed as error:
                why = f"{DEVICE_FAILED}: {error}"
            device_failed = why if why.startswith(DEVICE_FAILED) else ""
        if why:
            report = replace(report, refused={**report.refused, name: why})
        keep(report)
    return report


@contextlib.contextmanager
def sensed(session: Session, name: str) -> Iterator[Session]:
    """``session``, within which clock and power are sampled if the section ``name`` times a GPU: sampling costs the
    host a little, which the other sections time."""
    if session.device.type != "cuda" or name not in SENSED:
        yield session
        return
    with Sensors(machine.driver_id(session.device)) as sensors:
        yield replace(session, sensors=sensors)


@dataclass(frozen=True)
class Load:
    """A fixed load that shows whether the machine holds still.

    unit, scale     what it is shown in, and how much that is of what ``measure`` returns (FLOP/s, byte/s or s)
    limit           by how much of itself it may change
    """

    name: str
    unit: str
    scale: float
    measure: Callable[[], float]
    limit: float = MOST_DRIFT


def watched(name: str, run_section: Callable[[], Section], load: Load | None, say: Callable[[str], None]) -> Section:
    """``run_section()``, with the load before and after; once more if that drifted too far.

    Raises Wrong if it did so twice.
    """
    if load is None:
        return run_section()
    for more in ("; again", ""):
        start = load.measure()
        section = run_section()
        if section.failed.startswith(DEVICE_FAILED):  # what there is of it is kept as it is
            return section
        gauge = Gauge(load.name, load.unit, start / load.scale, load.measure() / load.scale)
        if abs(gauge.drift) <= load.limit:
            return replace(section, gauge=gauge)
        say(f"{name}: {gauge.name} went from {gauge.start:.4g} to {gauge.end:.4g} {gauge.unit}{more}")
    raise Wrong(
        f"{gauge.name} drifted by {gauge.drift:+.1%} from start to end, twice; takes {load.limit:.0%}: "
        "something else uses the machine, or its clock is not held"
    )


def host_loop() -> float:
    """Seconds of a loop of Python: the best of some, as interruptions only add."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        total = 0
        for i in range(HOST_LOOP):
            total += i
        best = min(best, time.perf_counter() - start)
    return best


def _made_when_needed(make: Callable, device: torch.device, timer: Timer) -> Callable[[], Roof]:
    """A probe's roof; it is compiled, checked and sized when it is first asked for."""
    return functools.cache(lambda: make(device).roof(timer))
