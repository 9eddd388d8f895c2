"""Figures, and reports as JSON and back."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute.bench import machine, results
from fa2_cute.bench.results import Cell, Figure, Gauge, PeerStatus, Report, Section

NAMES = st.text(min_size=1, max_size=12)
NUMBERS = st.floats(1e-3, 1e15)
FIGURES = st.lists(NUMBERS, min_size=1, max_size=6).map(Figure.of)
CELLS = st.builds(
    Cell,
    name=NAMES,
    group=NAMES,
    work=NUMBERS,
    figures=st.dictionaries(NAMES, FIGURES, max_size=3),
    missing=st.dictionaries(NAMES, NAMES, max_size=2),
    notes=st.dictionaries(NAMES, NUMBERS, max_size=2),
    roof=NUMBERS,
)
SECTIONS = st.builds(
    Section,
    name=NAMES,
    title=NAMES,
    unit=st.sampled_from(("us", "ms")),
    work_unit=st.sampled_from(("FLOP", "byte", "")),
    contestants=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    peers=st.lists(NAMES, max_size=2).map(tuple),
    cells=st.lists(CELLS, max_size=3).map(tuple),
    gauge=st.none() | st.builds(Gauge, name=NAMES, unit=NAMES, start=NUMBERS, end=NUMBERS),
)
REPORTS = st.builds(
    Report,
    date=NAMES,
    machine=st.dictionaries(NAMES, st.one_of(NAMES, st.integers(), NUMBERS), max_size=3),
    peers=st.lists(st.builds(PeerStatus, name=NAMES, version=NAMES, missing=NAMES), max_size=2).map(tuple),
    sections=st.lists(SECTIONS, max_size=2).map(tuple),
    refused=st.dictionaries(NAMES, NAMES, max_size=2),
)


@given(REPORTS)
def test_a_report_survives_its_file(tmp_path_factory, report):
    path = tmp_path_factory.mktemp("reports") / "new" / "report.json"
    results.save(report, path)
    assert results.load(path) == report
    assert [x.name for x in path.parent.iterdir()] == ["report.json"]  # no scratch file is left


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "date": "x", "machine": {}, "peers": [1]}'],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no file of results"):
        results.load(path)


def test_a_field_too_many_is_refused(tmp_path):
    path = tmp_path / "x.json"
    results.save(Report("2026", {}, (), ()), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))
    with pytest.raises(ValueError, match="is no file of results"):
        results.load(path)


@given(st.lists(NUMBERS, min_size=1, max_size=30))
def test_a_figure_is_median_and_quartiles(values):
    figure = Figure.of(values)
    assert figure.median == pytest.approx(statistics.median(values))
    assert figure.least == min(values)
    assert figure.samples == len(values)
    # Quartiles are interpolated in floating point: equal numbers may come out apart by a rounding.
    slack = 1 + 1e-12
    assert min(values) <= figure.low * slack
    assert figure.low <= figure.median * slack
    assert figure.median <= figure.high * slack
    assert figure.high <= max(values) * slack


def test_no_repetition_is_no_figure():
    with pytest.raises(ValueError, match="got none"):
        Figure.of([])


def test_rates_and_ratios():
    figures = {"ours": Figure.of([200.0]), "a": Figure.of([300.0]), "b": Figure.of([250.0]), "c": Figure.of([100.0])}
    cell = Cell("x", "g", 1e9, figures)
    section = Section("s", "t", "us", "FLOP", tuple(figures), ("a", "b", "z"), (cell,))
    assert results.rate(section, cell, figures["ours"]) == pytest.approx(5e12)
    assert results.ratio(section, cell, "ours") == pytest.approx(1.25)  # beside b: c is no peer, z has no figure
    assert math.isnan(results.ratio(section, Cell("x", "g", 1.0, {"a": figures["a"]}), "ours"))
    assert math.isnan(results.ratio(section, Cell("x", "g", 1.0, {"ours": figures["ours"]}), "ours"))
    assert Gauge("g", "u", 100.0, 97.0).drift == pytest.approx(-0.03)


def test_the_file_is_named_after_date_and_device():
    assert machine.file_name("2026-11-30T14:50:00+00:00", "NVIDIA H200 (x)") == "2026-11-30-nvidia-h200-x.json"
