"""A timer without a device: calls are made, and times made up."""

from dataclasses import dataclass, field


@dataclass
class FakeReplay:
    """Calls made when captured, and again by the first ``run``; each ``run`` takes the next of ``times``."""

    calls: list
    times: list
    results: list = field(default_factory=list)
    runs: int = 0

    def __post_init__(self):
        self.results = [call() for call in self.calls]

    def run(self):
        if not self.runs:  # as it is checked after one
            self.__post_init__()
        self.runs += 1
        at = self.times.pop(0) if len(self.times) > 1 else self.times[0]
        return lambda: at


@dataclass
class FakeTimer:
    """The n-th that is captured takes the n-th of ``times``, a number or several in turn; the last for all further."""

    times: list = field(default_factory=lambda: [100.0])
    captured: int = 0
    finished: int = 0
    rests: list = field(default_factory=list)

    def capture(self, calls):
        times = self.times[min(self.captured, len(self.times) - 1)]
        self.captured += 1
        return FakeReplay(list(calls), list(times) if isinstance(times, list) else [times])

    def finish(self):
        self.finished += 1

    def rest(self, seconds):
        self.rests.append(seconds)
