"""Interleaving, turning order, warm-up, and refusal of what drifts."""

import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch
from fake_timer import FakeTimer
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute.bench import command, results, roofline, sensors, timing

SECTION = results.Section("s", "t", "us", "", ("a",), (), ())


class Recorder:
    """Two or more contestants that note their turns."""

    def __init__(self, names):
        self.turns = []
        self.replays = {name: self.replay(name) for name in names}

    def replay(self, name):
        outer = self

        class One:
            results = (None,)

            def run(self):
                outer.turns.append(name)
                return lambda: float(len(outer.turns))

        return One()


@given(st.integers(2, 5), st.integers(1, 7))
def test_every_round_has_everybody_once(contestants, rounds):
    names = [f"c{i}" for i in range(contestants)]
    recorder, timer = Recorder(names), FakeTimer()
    figures = timing.measure(recorder.replays, timer, rounds)
    turns = [recorder.turns[i : i + contestants] for i in range(0, len(recorder.turns), contestants)]
    assert len(turns) == rounds + timing.WARM_UP_ROUNDS
    assert all(sorted(turn) == sorted(names) for turn in turns)
    assert {figure.samples for figure in figures.values()} == {rounds}


def test_the_order_differs_from_round_to_round():
    recorder = Recorder(["a", "b", "c"])
    timing.measure(recorder.replays, FakeTimer(), 30)
    turns = [tuple(recorder.turns[i : i + 3]) for i in range(0, len(recorder.turns), 3)]
    assert len(set(turns)) == 6  # all there are: nobody has the same one before it each time


def test_everybody_has_the_same_rest():
    timer = FakeTimer()
    replays = {"short": timer.capture([int, int]), "long": timer.capture([int])}
    replays["short"].times, replays["long"].times = [1000.0], [8000.0]
    timing.measure(replays, timer, 3)
    mean = (2e-3 + 8e-3) / 2  # seconds: a burst is all calls of a replay
    assert timer.rests == pytest.approx([0.0] * 2 + [timing.REST * mean] * 8)
    timer.rests.clear()
    replays["long"].times = [9e6]
    timing.measure(replays, timer, 1)
    assert timer.rests[-1] == timing.MOST_REST


def test_times_are_read_after_the_device_has_finished():
    timer = FakeTimer()

    class Late:
        results = (None,)

        def run(self):
            before = timer.finished

            def elapsed():
                assert timer.finished == before + 1
                return 1.0

            return elapsed

    assert timing.measure({"x": Late()}, timer, 2)["x"].median == 1.0


class FakeGraph:
    """In the place of CUDA's: replaying runs what was captured."""

    def replay(self):
        for call in self.captured:
            call()


def test_what_the_calls_hold_lives_as_long_as_the_graph(monkeypatch):
    emptied = []

    class Capture:
        def __init__(self, graph):
            self.graph = graph

        def __enter__(self):
            gc.collect()
            emptied.append([alive() is not None for alive in held])  # entering gives unused memory back

        def __exit__(self, *_):
            self.graph.captured = []

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    held = []

    def make():
        copy = torch.ones(3)
        held.append(weakref.ref(copy))
        return lambda: copy * 2

    replay = timing.GraphReplay([make(), make()])
    gc.collect()
    assert emptied == [[True, True]]
    assert all(alive() is not None for alive in held)
    assert len(replay.results) == 2
    del replay
    gc.collect()
    assert all(alive() is None for alive in held)


def test_a_device_that_fails_is_said_to_whose_work():
    class Fails:
        results = (None,)

        def run(self):
            raise RuntimeError("CUDA error: an illegal memory access\nmore")

    with pytest.raises(timing.DeviceFailed, match=r"^culprit: CUDA error: an illegal memory access$"):
        timing.measure({"culprit": Fails()}, FakeTimer(), 1)


def test_nobody_to_time():
    assert timing.measure({}, FakeTimer(), 3) == {}


def test_host_time_is_a_calls_share():
    made = []
    figure = timing.host_microseconds(lambda: made.append(1), 10, 4, lambda: made.append("finish"))
    assert made.count(1) == (2 + 4) * 10
    assert made.count("finish") == 2 + 4
    assert figure.samples == 4
    assert 0 < figure.least <= figure.median < 1000


def load(*values):
    remaining = list(values)
    return command.Load("clock", "GHz", 1.0, lambda: remaining.pop(0)), remaining


def test_a_section_that_holds_still_is_run_once(said):
    runs = []
    one, left = load(100.0, 97.0)
    section = command.watched("x", lambda: runs.append(1) or SECTION, one, said.append)
    assert section == replace(SECTION, gauge=results.Gauge("clock", "GHz", 100.0, 97.0))
    assert (runs, left, said) == ([1], [], [])


def test_a_section_that_drifts_is_run_again(said):
    runs = []
    one, left = load(100.0, 90.0, 90.0, 91.0)
    section = command.watched("x", lambda: runs.append(1) or SECTION, one, said.append)
    assert section.gauge.start == 90.0
    assert (runs, left) == ([1, 1], [])
    assert said == ["x: clock went from 100 to 90 GHz; again"]


@pytest.mark.parametrize("end", [90.0, 110.0])
def test_a_section_that_drifts_twice_is_refused(said, end):
    one, left = load(100.0, end, 100.0, end)
    with pytest.raises(
        roofline.Wrong, match=re.escape(f"clock drifted by {end / 100 - 1:+.1%} from start to end, twice")
    ):
        command.watched("x", lambda: SECTION, one, said.append)
    assert left == []


def test_a_section_without_a_load_is_not_watched(said):
    assert command.watched("x", lambda: SECTION, None, said.append) == SECTION


def test_what_the_drivers_tool_prints():
    assert sensors.parse("1980, 612.30\n") == (1980.0, 612.3)
    assert sensors.parse("1980, [N/A]") is None
    assert sensors.parse("1980") is None
    here = sensors.Sensors("GPU-x")
    here.samples = [(1.0, (1000.0, 100.0)), (2.0, (1900.0, 600.0)), (3.0, (1800.0, 500.0)), (4.0, (1700.0, 400.0))]
    assert here.since(2.0) == {"least SM MHz": 1700.0, "most W": 600.0}
    assert here.since(9.0) == {}


def test_a_machine_without_the_drivers_tool_has_no_samples():
    here = sensors.Sensors("GPU-x")
    here.command = ["/no/such/tool"]
    with here:
        pass
    assert here.since(0.0) == {}
