"""Whole sections on CPU tensors: ours in the emulator, torch's peers for real, times made up."""

import functools
import io
from dataclasses import replace

import pytest
import torch
from fake_timer import FakeReplay
from rich.console import Console

from fa2_cute.bench import (
    command,
    compiling,
    decode,
    host,
    kvcache,
    memory,
    peers,
    prefill,
    problems,
    results,
    roofline,
    session,
    tables,
    warming,
)
from fa2_cute.bench.results import Figure
from fa2_cute.explore.space import Point, Workload

SMALL = [
    Workload(64, 70, 70, False, 2, 2, 2),
    Workload(64, 40, 80, True, 1, 4, 2),
]
ROOF = roofline.Roof(lambda: None, 1e6)


def test_prefill_times_everybody_who_takes_the_call(cpu):
    cpu.timer.times = [100.0, 200.0, 0.0, 0.0, 300.0, 10.0]  # ours, flash, two that fail on a CPU, naive, the roof
    section = prefill.run(cpu, SMALL, (), ROOF)
    assert [cell.name for cell in section.cells] == ["2 x 70 x 2 x 64", "1 x 40 on 80 x 4/2 x 64"]
    first = section.cells[0]
    assert set(first.figures) == {peers.OURS, peers.FLASH, peers.NAIVE}
    assert first.figures[peers.OURS].median == 100.0
    assert first.work == 4 * 2 * 2 * 70 * 70 * 64
    assert results.rate(section, first, first.figures[peers.OURS]) == pytest.approx(first.work / 100e-6)
    assert results.ratio(section, first, peers.OURS) == pytest.approx(2.0)  # naive is not held against us
    assert first.roof == pytest.approx(1e6 / 10e-6)
    assert "this device runs it anyway" in first.missing[peers.SM_120_TILE]
    assert peers.CUDNN in first.missing  # it has no CPU kernel, and says so


def test_prefill_takes_other_tiles(cpu):
    section = prefill.run(cpu, SMALL[:1], [Point(64, 32, 4, 2)], ROOF)
    assert "64x32x4x2" in section.cells[0].figures


@pytest.mark.parametrize("whose", [peers.OURS, peers.FLASH])
def test_a_wrong_result_has_no_figure(cpu, monkeypatch, whose):
    def spoilt(make):
        def made(*args):
            call = make(*args)

            def wrong():
                out = call().clone()
                out[0, 0, 0, 0] += 0.5
                return out

            return wrong

        return made

    spoil = [replace(one, make=spoilt(one.make)) if one.name == whose else one for one in peers.PREFILL]
    monkeypatch.setattr(prefill, "PREFILL", tuple(spoil))
    if whose == peers.OURS:
        section = prefill.run(cpu, SMALL[:1], (), ROOF)
        assert section.failed.startswith("2 x 70 x 2 x 64, head_dim 64, full: fa2_cute: 1 of")
        assert section.cells[0].figures == {}
    else:
        cell = prefill.run(cpu, SMALL[:1], (), ROOF).cells[0]
        assert whose not in cell.figures
        assert cell.missing[whose].startswith("wrong: 1 of")


def test_our_own_failure_is_not_a_peers_limit(cpu, monkeypatch):
    def fails(*args):
        raise RuntimeError("boom")

    spoil = [replace(one, make=fails) if one.name == peers.OURS else one for one in peers.PREFILL]
    monkeypatch.setattr(prefill, "PREFILL", tuple(spoil))
    with pytest.raises(RuntimeError, match="boom"):
        prefill.run(cpu, SMALL[:1], (), ROOF)


def test_a_failed_device_names_the_culprit_and_keeps_what_there_was(cpu, monkeypatch):
    class Dies(FakeReplay):
        def run(self):
            if self.runs:  # the first one is that of the check
                raise RuntimeError("CUDA error: illegal\nand more")
            return super().run()

    def capture(calls):
        # Of the first cell ours, flash, efficient, cuDNN, naive, the roof; of the second ours, flash, efficient, naive.
        cpu.timer.captured += 1
        kind = Dies if cpu.timer.captured == 10 else FakeReplay
        return kind(list(calls), [1.0])

    monkeypatch.setattr(cpu.timer, "capture", capture)
    cells = [*SMALL, SMALL[0]]
    empty = results.Report("2026-01-01T00:00:00+00:00", {"device": "cpu"}, cpu.peers, ())
    roofs = dict.fromkeys(("prefill", "decode"), lambda: ROOF)
    report = command.measured(cpu, ("prefill", "decode"), plan(prefill=tuple(cells)), roofs, {}, empty, [].append)
    [section] = report.sections
    assert [bool(cell.figures) for cell in section.cells] == [True, False, False]
    why = "the device failed: torch naive: CUDA error: illegal"
    assert report.refused == {"prefill": why, "decode": why}


def test_nothing_is_begun_when_the_time_is_up(cpu):
    late = replace(cpu, deadline=0.0)
    section = prefill.run(late, SMALL, (), ROOF)
    assert all(cell.figures == {} for cell in section.cells)
    assert section.failed == "out of time (--minutes)"
    empty = results.Report("2026-01-01T00:00:00+00:00", {"device": "cpu"}, cpu.peers, ())
    report = command.measured(late, ("host", "compile"), plan(), {}, {}, empty, [].append)
    assert report.sections == ()
    assert set(report.refused) == {"host", "compile"}


def test_decode_times_pages_splits_and_fp8(cpu):
    section = decode.run(cpu, [problems.Decode(2, 256, 4, 2, 64)], (2,), (16,), ROOF)
    [cell] = section.cells
    assert {peers.OURS, "2 splits", "page 16", decode.FP8, decode.FP8_BLOCKS, peers.FLASH} <= set(cell.figures)
    assert cell.work == 2 * 2 * 256 * 2 * 64 * 2
    assert cell.notes["splits"] >= 1


def test_a_problem_that_does_not_fit_is_a_line(cpu, monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(problems, "decode_inputs", fails)
    [cell] = decode.run(cpu, [problems.Decode(1, 256, 2, 2, 64)], (), (), ROOF).cells
    assert cell.figures == {}
    assert cell.missing[peers.OURS] == "out of memory"
    monkeypatch.undo()
    monkeypatch.setitem(decode.PEERS, peers.FLASH, fails)
    [cell] = decode.run(cpu, [problems.Decode(1, 256, 2, 2, 64)], (), (), ROOF).cells
    assert peers.OURS in cell.figures
    assert cell.missing[peers.FLASH] == "out of memory"


def test_fp8_by_sequence_is_fp8():
    x = torch.randn(3, 300, 2, 64)
    whole, apart = decode.quantize_kv(x), decode.quantized(x)
    assert torch.equal(whole[0].view(torch.uint8), apart[0].view(torch.uint8))
    assert torch.equal(whole[1], apart[1])
    error = (decode.scaled_to_fp8(x) - x).abs()
    assert bool((error <= 2.0**-4 * x.abs() + 2.0**-10 * x.abs().max()).all())


def test_kvcache_appends_and_attends(cpu):
    wanted = [
        kvcache.Append(1, 1),
        kvcache.Append(2, 3, paged=True, fp8=True, rotary=True),
        kvcache.Attend(1, 64, paged=True, fp8=True),
    ]
    section = kvcache.run(cpu, wanted, ROOF)
    assert [set(cell.figures) for cell in section.cells] == [
        {kvcache.APPEND},
        {kvcache.APPEND},
        {kvcache.ATTEND, kvcache.WHOLE},
    ]


@pytest.mark.parametrize("fault", ["nothing", "values", "rotation"])
def test_a_wrong_append_is_noticed(fault):
    of = kvcache.Append(2, 3, paged=True, fp8=True, rotary=True)
    x = kvcache.inputs_of(of, torch.device("cpu"))
    kvcache.clear_appended(x)
    with torch.inference_mode():
        if fault != "nothing":
            kvcache.calls_of(of, x)[kvcache.APPEND]()
            kvcache.check_appended("right", x, True)
        if fault == "values":
            x.v[1, 2, 0, 0] += 1.0
        if fault == "rotation":
            x.cos[kvcache.POSITION + 2] *= 0.5
        with pytest.raises(roofline.Wrong, match="appended"):
            kvcache.check_appended("wrong", x, True)


def test_host_times_calls_with_and_without_autograd(cpu):
    section = host.run(replace(cpu, quick=True))
    assert {cell.group for cell in section.cells} == {host.WITH, host.WITHOUT}
    assert all(cell.figures[peers.OURS].least > 0 for cell in section.cells)


def test_compile_times_new_processes(cpu):
    [problem] = list(compiling.PROBLEMS)[:1]
    section = compiling.run(cpu, (problem,))
    times = {(cell.group, cell.name): cell.figures[peers.OURS].median for cell in section.cells}
    assert times[compiling.COLD, problem] > times[compiling.WARM, problem] > 0


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit('no compiler')", "no compiler"),
        ("pass", "printed '', not times"),
        ("print('hello')", "printed 'hello', not times"),
    ],
)
def test_a_process_that_fails_costs_its_section_and_no_other(cpu, monkeypatch, program, why):
    run = compiling.subprocess.run

    def other_program(command, **options):
        return run([command[0], "-c", program], **options)

    monkeypatch.setattr(compiling.subprocess, "run", other_program)
    empty = results.Report("2026-01-01T00:00:00+00:00", {"device": "cpu"}, cpu.peers, ())
    report = command.measured(cpu, ("compile", "memory"), plan(), {}, {}, empty, [].append)
    assert report.refused["compile"] == f"a process that makes first calls failed: {why}"
    assert [section.name for section in report.sections] == ["memory"]


def test_probes_compute_what_they_say(cpu):
    mma = roofline.MmaProbe(torch.device("cpu"))
    mma.check(2)
    mma.a = mma.a + 1
    mma.launch = lambda *values: None
    with pytest.raises(roofline.Wrong):
        mma.check(2)
    read = roofline.ReadProbe(torch.device("cpu"), 2**16)
    assert int(read.sums.sum()) == int(read.x.sum()) > 0
    read.sums.zero_()
    roof = read.roof(cpu.timer)
    assert roof.rate(cpu.timer) == pytest.approx(read.x.nbytes / 100e-6)
    assert int(read.sums.sum()) == int(read.x.sum())
    assert roofline.CopyProbe(torch.device("cpu"), 2**10).roof(cpu.timer).work == 2 * 2**10


def test_the_mma_load_is_sized_to_take_its_time(cpu):
    mma = roofline.MmaProbe(torch.device("cpu"))
    launched = []
    mma.launch = lambda a, b, c, rounds: launched.append(rounds)
    roof = mma.roof(cpu.timer)  # 100 us for 1000 rounds
    roof.launch()
    assert launched[-1] == 20_000
    assert roof.work == mma.spec.operations(1, 20_000)


def plan(**changes) -> command.Plan:
    empty = command.Plan((), (), (), (), (), (), ())
    return replace(empty, **changes)


def test_a_run_keeps_what_it_has_and_says_what_it_refuses(cpu):
    loads = {
        "prefill": command.Load("a load", "TFLOP/s", 1e12, functools.partial(next, iter([100e12, 99e12]))),
        "decode": command.Load("a load", "GB/s", 1e9, functools.partial(next, iter([1e9, 2e9, 1e9, 3e9]))),
    }
    kept = []
    empty = results.Report("2026-01-01T00:00:00+00:00", {"device": "cpu"}, cpu.peers, ())
    of = plan(prefill=tuple(SMALL[:1]))
    roofs = dict.fromkeys(("prefill", "decode"), lambda: ROOF)
    report = command.measured(cpu, ("prefill", "decode"), of, roofs, loads, empty, kept.append)
    assert [section.name for section in report.sections] == ["prefill"]
    assert report.sections[0].gauge.drift == pytest.approx(-0.01)
    assert report.sections[0].gauge.start == 100.0
    assert "drifted by +200.0%" in report.refused["decode"]
    assert [len(x.sections) for x in kept] == [1, 1]
    text = io.StringIO()
    tables.show(report, Console(file=text, width=200))
    assert "decode: a load drifted" in text.getvalue()
    assert "2 x 70 x 2 x 64" in text.getvalue()


def test_compiling_ahead_makes_each_kind_of_call_once(cpu):
    cells = problems.prefill_cells()
    jobs = warming.prefill_jobs(cells, [peers.OURS, peers.FLASH])
    assert {job.contestant for job in jobs} == {peers.OURS}  # torch comes compiled
    kinds = {(job.problem.head_dim, job.problem.causal) for job in jobs}
    assert kinds == {(d, causal) for d in (64, 96, 128, 192, 256) for causal in (False, True)}
    caches = [problems.Decode(*of) for of in problems.decode_cells()]
    assert all(job.problem.cache_bytes <= warming.MOST_CACHE for job in warming.decode_jobs(caches, [peers.OURS], ()))
    warming.warm(cpu, warming.prefill_jobs(SMALL[:1], [peers.OURS]), 2)


def test_ours_beside_itself(cpu):
    outcome = session.timed(cpu, {"x": FakeReplay([int], [100.0]), "y": FakeReplay([int], [50.0])}, {})
    assert set(outcome.figures) == {"x", "y"}
    assert outcome.notes["beside itself"] == 0.0


@pytest.mark.parametrize("drifts", [1, session.ATTEMPTS])
def test_ours_beside_itself_must_agree(cpu, said, monkeypatch, drifts):
    rounds = []

    def measure(replays, timer, count):
        rounds.append(count)
        other = 103.0 if len(rounds) <= drifts else 101.0
        return {name: Figure.of([other if name == session.AGAIN else 100.0]) for name in replays}

    monkeypatch.setattr(session, "measure", measure)
    if drifts < session.ATTEMPTS:
        outcome = session.timed(cpu, {"x": FakeReplay([int], [1.0])}, {})
        assert outcome.notes["beside itself"] == pytest.approx(0.01)
        assert rounds == [cpu.rounds, 2 * cpu.rounds]
    else:
        with pytest.raises(roofline.Wrong, match=r"x timed twice differs by \+3.0%, takes 2%"):
            session.timed(cpu, {"x": FakeReplay([int], [1.0])}, {})
        assert rounds == [cpu.rounds << i for i in range(session.ATTEMPTS)]
    assert said == ["x beside itself: +3.0%"] * drifts


def test_memory_cells_reach_the_long_sequence():
    assert any(of.query_len == 131_072 and of.batch == 1 for of in memory.cells(quick=False))
