"""The command line of ``fa2-cute bench``, and its pictures from a recorded file."""

import shutil
from pathlib import Path

import pytest
import torch

from fa2_cute import cli
from fa2_cute.bench import command, plots, results
from fa2_cute.bench.options import SECTIONS, Options, sections_of

RECORDED = Path(__file__).parent / "data" / "report.json"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it would run")


def fails(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    assert caught.value.code not in (0, None)
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@needs_no_gpu
@pytest.mark.parametrize("arguments", [(), ("prefill",), ("decode", "host", "--quick")])
def test_without_a_gpu_it_says_what_it_needs(capsys, arguments):
    assert "needs a CUDA device of compute capability 8.0 or newer" in fails(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nonsense",), "got 'nonsense', takes any of host, memory, prefill"),
        (("--shape", "3x"), "--shape: got '3x'"),
        (("--shape", "1x8x6x64", "--kv-heads", "4"), "fa2-cute: --kv-heads: got 4, takes a divisor of 6 heads"),
        (("--shape", "1x8x6x64", "--key-len", "0"), "fa2-cute: --key-len: got 0"),
        (("--heads", "0"), "fa2-cute: --heads: got 0"),
        (("--cell", "3"), "--cell: got '3'"),
        (("--tile", "big"), "--tile: got 'big'"),
        (("--dtype", "float8"), "--dtype: got 'float8'"),
        (("--peer", "nobody"), "--peer: got 'nobody'"),
        (("--rounds", "0"), "--rounds: got 0"),
        (("--minutes", "0"), "--minutes: got 0"),
        (("--jobs", "-1"), "--jobs: got -1"),
        (("--page", "48"), "--page: got 48, takes a divisor"),
        (("--page", "0"), "--page: got 0"),
        (("--splits", "0"), "--splits: got 0"),
        (("plot",), "got no file"),
        (
            ("plot", "no-such-file.json"),
            "bench plot: got no-such-file.json, takes one or more that fa2-cute bench wrote: No",
        ),
        (
            ("plot", str(RECORDED), "--out", str(RECORDED)),
            f"--out: got {RECORDED}, takes a folder that can be written to",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(capsys, arguments, text):
    assert text in fails(capsys, *arguments)


def test_sections_run_in_their_order():
    assert sections_of(()) == SECTIONS
    assert sections_of(("prefill", "memory", "prefill")) == ("memory", "prefill")


def test_options_reach_the_problems():
    options = Options(
        shape=("2x64x8x128",), kv_heads=2, key_len=96, tile=("64x32x4x2-q",), cell=("3x512",), splits=(4,), page=(8,)
    )
    plan = command.Plan.of(options)
    assert {(of.batch, of.query_len, of.key_len, of.heads, of.kv_heads, of.causal) for of in plan.prefill} == {
        (2, 64, 96, 8, 2, False),
        (2, 64, 96, 8, 2, True),
    }
    assert plan.tiles[0].query_held == "all"
    assert [(of.batch, of.length, of.kv_heads) for of in plan.decode] == [(3, 512, 2)]
    assert (plan.splits, plan.pages) == ((4,), (8,))
    assert Options(quick=True).prefill() != Options().prefill()


def test_pictures_of_a_recorded_run(tmp_path, capsys):
    report = results.load(RECORDED)
    file = shutil.copy(RECORDED, tmp_path / "run.json")
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "plot", str(file), "--out", str(tmp_path / "pictures")])
    assert caught.value.code == 0
    names = {f"run-{section.name}.png" for section in report.sections}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == names
    printed = capsys.readouterr().out
    for name in names:
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")
        assert name in "".join(printed.split())


def test_a_picture_has_a_bar_for_each_figure():
    report = results.load(RECORDED)
    for section in report.sections:
        figure = plots.draw(section, report)
        bars = sum(len(container) for panel in figure.axes for container in panel.containers)
        assert bars == sum(len(cell.figures) for cell in section.cells)


def test_a_section_without_figures_has_no_picture():
    empty = results.Section("s", "t", "us", "", ("a",), (), (results.Cell("x", "g", 0.0, {}),))
    assert plots.draw(empty, results.Report("2026", {}, (), (empty,))) is None
