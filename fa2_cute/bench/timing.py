"""Device and host times, fair to each contestant: interleaved, in short bursts, medians with spread.

A contestant's calls, one for each set of inputs, are captured in a CUDA graph: what is timed is the device's work, not
the host's. A round replays every contestant's graph once, in a random order. Attention at full speed draws more than a
card's power limit, which then lowers its clock, for whoever comes next too; and a device that has idled takes a
millisecond to come back to its speed. So every burst of a cell has the same rest before it, in proportion to the mean
burst, and then a lead-in, reads of more memory than the L2 holds: the device is warm, the host is ahead, and nobody
finds what the last one left in the L2.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from .results import Figure

WARM_UP_ROUNDS = 2
# Rest before each burst, in mean bursts: a duty of a quarter keeps a card of 700 W whose bursts draw more far from its
# limit.
REST = 3.0
MOST_REST = 0.25  # seconds
LEAD_IN_BYTES = 2**28  # at least, a read: 60 us on the fastest memory there is, so that a few are soon launched
LEAD_IN_US = 2000.0
LEAST_BURST_US = 400.0  # events resolve half a microsecond
ORDER_SEED = 0
Call = Callable[[], Any]


class DeviceFailed(Exception):
    """The device is of no more use to this process; the text says since whose work."""


class Replay(Protocol):
    """Calls that can be repeated together and timed."""

    results: Sequence[Any]  # what each call returned; written anew by each repetition

    def run(self) -> Callable[[], float]:
        """Repeat them all; the function gives the microseconds of one of them, once ``finish`` has been called."""


class Timer(Protocol):
    """How calls are repeated and timed."""

    def capture(self, calls: Sequence[Call]) -> Replay:
        """Make each call once, and get ready to repeat them."""

    def finish(self):
        """Wait for all that has been started."""

    def rest(self, seconds: float):
        """Let the idle device cool for ``seconds``, then give it a lead-in."""


class GraphReplay:
    """Calls captured in a CUDA graph on the current device."""

    def __init__(self, calls: Sequence[Call]):
        # The graph knows addresses alone: what the calls hold (copies in another layout, masks) must live as long.
        self.calls = tuple(calls)
        for call in calls:  # compiles, loads, tunes
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]

    def run(self) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        return lambda: start.elapsed_time(end) * 1000.0 / len(self.results)


class GraphTimer:
    """Times by CUDA events around graph replays. A lead-in reads twice ``l2_bytes``, again and again."""

    def __init__(self, device: torch.device, l2_bytes: int):
        self.memory = torch.zeros(max(2 * l2_bytes, LEAD_IN_BYTES) // 4, device=device)
        once = GraphReplay([self.memory.sum])
        elapsed = [once.run() for _ in range(5)]
        self.finish()
        reads = max(1, round(LEAD_IN_US / elapsed[-1]()))
        self.lead_in = GraphReplay([self.memory.sum] * reads)

    def capture(self, calls: Sequence[Call]) -> GraphReplay:
        """The calls, over and over if they are too short for the resolution of events."""
        replay = GraphReplay(calls)
        elapsed = replay.run()
        self.finish()
        repeats = math.ceil(LEAST_BURST_US / max(elapsed() * len(calls), 1.0))
        return replay if repeats == 1 else GraphReplay(list(calls) * repeats)

    def finish(self):
        torch.cuda.synchronize()

    def rest(self, seconds: float):
        time.sleep(seconds)
        self.lead_in.run()


def measure(replays: Mapping[str, Replay], timer: Timer, rounds: int) -> dict[str, Figure]:
    """Microseconds of one call of each contestant, over ``rounds`` interleaved repetitions."""
    names = list(replays)
    order = random.Random(ORDER_SEED)
    times: dict[str, list[float]] = {name: [] for name in names}
    rest = 0.0
    for round_ in range(-WARM_UP_ROUNDS, rounds):
        bursts = []
        for name in order.sample(names, len(names)):
            timer.rest(rest)
            try:
                elapsed = replays[name].run()
                timer.finish()
            except RuntimeError as error:
                raise DeviceFailed(f"{name}: {str(error).splitlines()[0]}") from error
            bursts.append(elapsed() * len(replays[name].results) * 1e-6)
            if round_ >= 0:
                times[name].append(elapsed())
        if round_ < 0 and bursts:
            rest = min(REST * statistics.mean(bursts), MOST_REST)
    return {name: Figure.of(values) for name, values in times.items()}


def host_microseconds(call: Call, calls: int, repeats: int, finish: Callable[[], None]) -> Figure:
    """Microseconds that the calling thread spends on a call; ``finish`` empties the device's queue after each repeat.

    ``calls`` at a time should be fewer than the queue holds (about 1000 launches), and their device work shorter than
    their host work: a full queue makes the host wait.
    """
    for _ in range(2):
        for _ in range(calls):
            call()
        finish()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - start
        finish()
        times.append(elapsed / calls * 1e6)
    return Figure.of(times)
