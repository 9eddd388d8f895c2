"""Searches: results that are kept, the report, the command line."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from fa2_cute import arch, cli
from fa2_cute.explore import binding, command, model, records, report, searching, tuning
from fa2_cute.explore.results import Results
from fa2_cute.explore.space import Point, Workload

SM_120 = arch.by_name("sm_120")


@pytest.fixture(scope="module")
def space(workload, point):
    return [point, Point(64, 64, 4, 3), Point(64, 32, 8, 2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory, workload, space):
    return searching.search(workload, SM_120, tmp_path_factory.mktemp("search") / "r.json", space=space, jobs=1)


def test_the_shipped_tile_is_always_among_them(found, workload):
    assert found.shipped == binding.shipped_point(workload, SM_120)
    assert {r.point for r in found.records} == {found.shipped, Point(64, 32, 4, 2), Point(64, 64, 4, 3)}
    assert [r.point for r in found.refused] == [Point(64, 32, 8, 2)]
    times = [r.prediction.milliseconds for r in found.records]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= (1 + model.TIE) * min(times)


def test_a_search_goes_on_where_it_was(tmp_path, workload, space, found, monkeypatch):
    """Stopped after its first point, it evaluates only the others; a second run evaluates nothing."""
    known = {r.point: r for r in found.records}
    asked = []

    def evaluate(point, *_):
        asked.append(point)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return known[point]

    monkeypatch.setattr(searching, "_one", evaluate)
    file = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        searching.search(workload, SM_120, file, space=space, jobs=1)
    first = asked[0]
    again = searching.search(workload, SM_120, file, space=space, jobs=1)
    assert asked.count(first) == 1
    assert again.records == found.records
    count = len(asked)
    searching.search(workload, SM_120, file, space=space, jobs=1)
    assert len(asked) == count


def test_ties_go_to_tiles_without_spills_and_with_many_rows():
    small, large = Point(64, 32, 4, 2), Point(128, 64, 8, 2)
    near = 1 + 0.9 * model.TIE
    assert model.preferred([(small, 1.0, False), (large, near, False)]) == large
    assert model.preferred([(small, 1.0, False), (large, near, True)]) == small
    assert model.preferred([(small, 1.0, False), (large, 1 + 1.1 * model.TIE, False)]) == small
    assert model.preferred([(small, 1.0, True), (large, near, True)]) == large


def test_results_of_other_code_are_made_again(tmp_path, workload, found):
    results = Results(tmp_path / "r.json", workload, SM_120)
    results.put(found.records[0], "state")
    again = Results(tmp_path / "r.json", workload, SM_120)
    assert again.get(found.records[0].point, "state") == found.records[0]
    assert again.get(found.records[0].point, "another") is None


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}', '{"format": 1, "workload": {}}'])
def test_a_file_that_holds_no_results_is_left_alone(tmp_path, workload, text):
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no file of results"):
        Results(file, workload, SM_120)
    assert file.read_text() == text


def test_results_of_another_problem_are_refused(tmp_path, workload, found):
    Results(tmp_path / "r.json", workload, SM_120).put(found.records[0], "state")
    with pytest.raises(ValueError, match="holds results of head_dim 64"):
        Results(tmp_path / "r.json", Workload(64, 1, 1), SM_120)


def test_a_space_of_nothing_possible_says_what_is_wrong(tmp_path, workload, monkeypatch):
    monkeypatch.setattr(searching.prune, "refusal", lambda *_: "needs 112 KiB, sm_120 gives a block 99")
    with pytest.raises(ValueError, match=r"sm_120 can hold none: .*needs 112 KiB"):
        searching.search(workload, SM_120, tmp_path / "r.json", space=[Point(64, 64, 4, 3)], jobs=1)


def test_a_compiler_error_is_a_refusal_of_that_point(workload, point, monkeypatch):
    def fails(*_):
        raise RuntimeError("ptxas: no")

    monkeypatch.setattr(searching, "evaluate", fails)
    assert searching._one(point, workload, SM_120).refusal == "does not compile: ptxas: no"


def test_the_report_answers_and_asks_nothing_of_a_network(found, tmp_path):
    text = report.write(found, tmp_path / "report.html").read_text()
    assert f"Which: {found.best.point.name}" in text
    assert "Why:" in text
    assert text.count("<svg") >= 10
    for record in found.records:
        assert record.point.name in text
    assert found.refused[0].reason in text
    loaded = re.findall(r'(?:src|href)="(?!#|data:)([^"]*)"', text)
    assert loaded == []
    assert "@import" not in text
    assert "7 conflicts" in text  # the spoiled layout beside the shipped one


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--arch", "sm_42"), "fa2-cute: --arch: got 'sm_42', takes one of sm_80"),
        (("--head-dim", "12"), "fa2-cute: --head-dim: got 12, takes multiples of 8"),
        (("--head-dim", "0"), "fa2-cute: --head-dim: got 0"),
        (("--seqlen", "0"), "fa2-cute: --seqlen: got 0"),
        (("--vary", "tile_k=3"), "--vary: got 'tile_k=3', takes NAME=VALUE"),
        (("--dtype", "float8"), "fa2-cute: --dtype: got 'float8'"),
        (("--jobs", "0"), "--jobs: got 0"),
        (("--apply", "--arch", "sm_80"), "--apply: needs measured times"),
        (("--kv-heads", "5"), "fa2-cute: --kv-heads: got 5, takes a divisor of 32 heads"),
    ],
)
def test_bad_input_is_one_line(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["explore", *arguments])
    assert caught.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert text in captured.err
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_results_and_report(tmp_path, monkeypatch, capsys, found):
    monkeypatch.chdir(tmp_path)
    known = {r.point: r for r in found.records}
    monkeypatch.setattr(searching, "_one", lambda point, *_: known[point])
    arguments = "--arch sm_120a --head-dim 64 --seqlen 256 --heads 4 --kv-heads 2 --jobs 1"
    arguments += " --vary tile_m=64 --vary tile_n=32 --vary warps=4 --vary stages=2 --vary query_held=none"
    with pytest.raises(SystemExit) as caught:
        cli.main(["explore", *arguments.split()])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "Which: " in out
    (file,) = (tmp_path / "fa2-cute-explore").glob("*.json")
    assert set(json.loads(file.read_text())["points"]) == {p.name for p in known if p != Point(64, 64, 4, 3)}
    assert file.with_suffix(".html").exists()


def test_apply_writes_the_fastest_measured_tile_for_later_calls(tmp_path, monkeypatch, capsys, found, workload):
    """As on a machine with a GPU, but for the timing itself: the tile that is predicted slowest is measured fastest."""
    slowest = max(found.records, key=lambda r: r.prediction.milliseconds)

    def measured(records, *_):
        timing = {"low": 1.0, "high": 1.0, "rounds": 9, "drift": 1.0}
        return [replace(r, measured={"median": 1.0 if r.point == slowest.point else 2.0, **timing}) for r in records]

    known = {r.point: r for r in found.records}
    monkeypatch.setattr(searching, "_one", lambda point, *_: known[point])
    monkeypatch.setattr(searching, "_measured", measured)
    monkeypatch.setattr(command, "device_name", lambda arch: "A Card")
    monkeypatch.setattr(report, "write", lambda *_: None)
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "tuning.json"))
    files = {"file": tmp_path / "r.json", "report": tmp_path / "r.html"}
    command.explore(workload, SM_120, Console(), points=list(known), jobs=1, apply=True, **files)
    kind = tuning.ProblemClass("bfloat16", 64, 64, False)
    tile = tuning.tuned(kind, "A Card")
    assert tile == tuning.tile_of(slowest.point)
    assert replace(binding.shipped(workload, SM_120), **tile) == binding.spec_of(slowest.point, workload, SM_120)
    assert tuning.tuned(kind, "Another Card") is None


def test_layouts_are_drawn(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["layouts", "--head-dim", "64", "--tile", "64x32x4x2", "--no-swizzle", "--into", str(tmp_path)])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "swizzle removed" in out
    assert "ldmatrix K" in out
    assert len(list(tmp_path.glob("*.svg"))) == len(list(tmp_path.glob("*.png"))) == 10


def test_vary_help_lists_the_parameters(capsys):
    with pytest.raises(SystemExit):
        cli.main(["explore", "--vary", "help"])
    out = capsys.readouterr().out
    assert "tile_m" in out
    assert "query rows a block" in out


def test_a_method_that_changes_makes_old_results_stale(workload, point, monkeypatch):
    before = searching._state(point, workload, SM_120)
    monkeypatch.setattr(searching, "method", lambda: "other")
    assert searching._state(point, workload, SM_120) != before
    assert records.method() in before


@pytest.mark.parametrize(
    ("milliseconds", "says"),
    [
        (None, "It is what a call runs today."),
        (1.01, "A call runs shipped today, which is one of these."),
        (1.5, "A call runs shipped today, predicted 50.0% slower: it waits."),
    ],
)
def test_the_answer_names_what_a_call_runs(milliseconds, says):
    def record(name, time):
        prediction = SimpleNamespace(milliseconds=time, why="it waits")
        return SimpleNamespace(point=SimpleNamespace(name=name), prediction=prediction, measured=None, refusal=None)

    best = record("best", 1.0)
    shipped = best if milliseconds is None else record("shipped", milliseconds)
    found = SimpleNamespace(best=best, records=[best, shipped], shipped=shipped.point, refused=[])
    assert command.answer(found)[-2] == says
