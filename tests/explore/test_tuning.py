"""The user's tuning file."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fa2_cute import arch, forward
from fa2_cute.explore import tuning
from fa2_cute.explore.space import Point
from fa2_cute.explore.tuning import ProblemClass

CAUSAL = ProblemClass("bfloat16", 128, 128, True)
FULL = ProblemClass("bfloat16", 128, 128, False)
CARD = "NVIDIA GeForce RTX 5090"
TILE = {"tile_m": 64, "tile_n": 32, "warps": 4, "stages": 2}


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tuning.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    return path


def test_nothing_is_read_unless_asked_for(monkeypatch):
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setattr(tuning, "_read", None)
    assert tuning.tuned(CAUSAL, CARD) is None


def test_what_is_applied_is_found_by_device_and_class(file):
    assert tuning.tuned(CAUSAL, CARD) is None
    assert tuning.apply(TILE, CAUSAL, CARD, "0.7 ms") == file
    assert tuning.tuned(CAUSAL, CARD) == TILE
    assert tuning.tuned(FULL, CARD) is None
    assert tuning.tuned(CAUSAL, "another") is None


def test_other_entries_stay_and_new_ones_are_seen_at_once(file):
    tuning.apply(TILE, CAUSAL, CARD, "a")
    assert tuning.tuned(FULL, CARD) is None
    other = {**TILE, "tile_n": 64}
    tuning.apply(other, FULL, CARD, "b")
    assert (tuning.tuned(CAUSAL, CARD), tuning.tuned(FULL, CARD)) == (TILE, other)
    assert json.loads(file.read_text())["notes"] == {
        f"{CARD}: {CAUSAL.key}": "a", f"{CARD}: {FULL.key}": "b",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "devices": {"x": {"y": {"tile": 3}}}, "notes": {}}']
)
def test_a_damaged_file_is_named_and_left_alone(file, text):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{tuning.VARIABLE}: .* holds no tuning"):
        tuning.tuned(CAUSAL, CARD)
    with pytest.raises(ValueError, match="holds no tuning"):
        tuning.apply(TILE, CAUSAL, CARD, "")
    assert file.read_text() == text


def test_applying_needs_a_name(monkeypatch):
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"--apply: .*{tuning.VARIABLE}"):
        tuning.apply(TILE, CAUSAL, CARD, "")


def test_a_point_is_written_as_fields_of_the_specification():
    assert tuning.tile_of(Point(64, 32, 4, 2)).items() >= TILE.items()


def test_a_call_on_such_a_device_runs_the_tile(file, monkeypatch):
    """The device alone is made up: what chooses is what every call goes through."""
    x, hopper = torch.zeros(1, 4, 1, 128, dtype=torch.bfloat16), arch.by_name("sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    tuning.apply(TILE, CAUSAL, CARD, "")

    def chosen(right, on_card):
        call = forward.prepare(x, x, x, window=(None, right))[2]
        card = (SimpleNamespace(device=torch.device("cuda", 0)), *call.tensors[1:])
        return (replace(call, tensors=card) if on_card else call).spec(hopper)

    assert chosen(0, True) == replace(chosen(0, False), **TILE) != chosen(0, False)
    assert chosen(None, True) == chosen(None, False)
    monkeypatch.delenv(tuning.VARIABLE)
    assert chosen(0, True) == chosen(0, False)
