"""What all sections share: the device, how time is taken, who takes part; and how contestants are made ready."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from . import checking
from .peers import Refused, reason
from .results import Cell, Figure, PeerStatus, Section
from .roofline import Roof, Wrong
from .sensors import Sensors
from .timing import Call, DeviceFailed, Replay, Timer, measure

ROUNDS, QUICK_ROUNDS = 12, 6
OUT_OF_MEMORY, DEVICE_FAILED = "out of memory", "the device failed"
OUT_OF_TIME = "out of time (--minutes)"
ROOF, AGAIN = "roof", "again"
MOST_DIFFERENCE = 0.02  # between two timings of the same calls
ATTEMPTS = 3


@dataclass(frozen=True, eq=False)
class Session:
    """One run.

    peers   those asked for, installed or not
    rounds  interleaved repetitions of each contestant
    say     shows a line of progress
    l2      bytes that inputs are rotated past, twice
    sensors of the device's clock and power, while it is timed
    deadline after which no cell is begun, ``time.monotonic()``
    """

    device: torch.device
    timer: Timer
    peers: tuple[PeerStatus, ...]
    rounds: int
    quick: bool
    say: Callable[[str], None]
    l2: int
    sensors: Sensors | None = None
    deadline: float = math.inf

    def takes_part(self, name: str) -> bool:
        """Whether the peer ``name`` was asked for and is installed."""
        return any(peer.name == name and not peer.missing for peer in self.peers)

    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline


@dataclass(frozen=True, eq=False)
class Entry:
    """A contestant in one cell: how each of its calls is made, and what the first one must return.

    ours    an error or a wrong result is a fault of the run, not a peer's limit
    """

    make: Callable[[], Sequence[Call]]
    expected: Callable[[], checking.Expected]
    ours: bool = False


@dataclass(frozen=True, eq=False)
class Outcome:
    """figures in us and missing, by contestant; notes: clock and power meanwhile; roof: work a second, 0 for none."""

    figures: dict[str, Figure]
    missing: dict[str, str]
    notes: dict[str, float]
    roof: float


def compete(session: Session, entries: Mapping[str, Entry], roof: Roof | None = None) -> Outcome:
    """Every entry captured, its repeated result checked, then all timed side by side.

    Raises Wrong where one of ours is wrong, and what it raises where one of ours fails, unless memory ran out.
    """
    replays: dict[str, Replay] = {}
    missing: dict[str, str] = {}
    for name, entry in entries.items():
        try:
            replay = session.timer.capture(entry.make())
            replay.run()
            session.timer.finish()
        except torch.OutOfMemoryError:
            missing[name] = OUT_OF_MEMORY
            continue
        except Exception as error:  # somebody else's limit, of whatever kind
            require_device(session, name, error)
            if entry.ours and not isinstance(error, Refused):
                raise
            missing[name] = reason(error)
            continue
        fault = checking.fault(replay.results[0], entry.expected())
        if fault is None:
            replays[name] = replay
        elif entry.ours:
            raise Wrong(f"{name}: {fault}")
        else:
            missing[name] = f"wrong: {fault}"
    return timed(session, replays, missing, roof)


def timed(
    session: Session, replays: Mapping[str, Replay], missing: dict[str, str], roof: Roof | None = None
) -> Outcome:
    """``replays`` timed side by side, and ``roof`` among them: it meets the clock that they meet.

    The first of them is timed twice, as two contestants. Where the two differ by more than ``MOST_DIFFERENCE``, all is
    timed again with twice the rounds, and once more; Wrong if they still do: no other difference could be believed.
    """
    start = time.monotonic()
    beside = {} if roof is None else {ROOF: session.timer.capture([roof.launch])}
    first = next(iter(replays), None)
    if first is not None:
        beside[AGAIN] = replays[first]
    for more in range(ATTEMPTS):
        figures = measure({**replays, **beside}, session.timer, session.rounds << more)
        difference = figures[AGAIN].median / figures[first].median - 1.0 if first is not None else 0.0
        if abs(difference) <= MOST_DIFFERENCE:
            break
        session.say(f"{first} beside itself: {difference:+.1%}")
    else:
        raise Wrong(f"{first} timed twice differs by {difference:+.1%}, takes {MOST_DIFFERENCE:.0%}")
    figures.pop(AGAIN, None)
    rate = roof.work / (figures.pop(ROOF).median * 1e-6) if roof else 0.0
    notes = {"beside itself": difference, **(session.sensors.since(start) if session.sensors else {})}
    return Outcome(figures, missing, notes, rate)


def require_device(session: Session, name: str, error: Exception):
    """Raises DeviceFailed if the device does not work since ``name`` raised ``error``."""
    try:
        session.timer.finish()
    except RuntimeError:
        raise DeviceFailed(f"{name}: {reason(error)}") from error


@dataclass(frozen=True, eq=False)
class Task:
    """A cell to be measured: what it is called, who is in it, and how."""

    name: str
    group: str
    contestants: tuple[str, ...]
    make: Callable[[], Cell]

    def without(self, why: str) -> Cell:
        """The cell without figures."""
        return Cell(self.name, self.group, 0.0, {}, dict.fromkeys(self.contestants, why))


def collect(session: Session, section: Section, tasks: Sequence[Task]) -> Section:
    """``section`` with the cells of ``tasks``: without figures where a problem does not fit the device or one of our
    results is wrong, and from where the time is up, or the device fails, on."""
    stopped, wrong = "", ""
    cells = []
    for task in tasks:
        if not stopped and session.is_late():
            stopped = OUT_OF_TIME
        if stopped:
            cells.append(task.without(stopped))
            continue
        session.say(f"{section.name} {task.name}, {task.group}")
        try:
            cells.append(task.make())
        except torch.OutOfMemoryError:
            cells.append(task.without(OUT_OF_MEMORY))
        except Wrong as error:
            wrong = wrong or f"{task.name}, {task.group}: {error}"
            cells.append(task.without(f"refused: {error}"))
        except DeviceFailed as error:
            stopped = f"{DEVICE_FAILED}: {error}"
            cells.append(task.without(stopped))
            continue
        release(session.device)
    return replace(section, cells=tuple(cells), failed=stopped or wrong)


def release(device: torch.device):
    """Give back what a cell has used, before the next one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
