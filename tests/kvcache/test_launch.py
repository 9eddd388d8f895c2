"""Recorded calls: a second call like the first is launched unchecked, on its own tensors; one unlike it is checked."""

from dataclasses import replace

import pytest
import torch
from kvcases import CALLS, SETTINGS, Case, make

from fa2_cute import cache_ops
from fa2_cute.fuzz import check_cache
from fa2_cute.kept import Kept
from fa2_cute.kvcache import append_to_kvcache, flash_attn_with_kvcache

CASE = Case(SETTINGS[0], (2, 5, 7), new_len=1, kv_heads=2)


class Checked(Exception):
    """A call was checked that should have been launched as recorded."""


@pytest.fixture(autouse=True)
def _nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(cache_ops, "_RECORDINGS", {})


def recorded():
    return len(cache_ops._RECORDINGS)


def refuse_checks(monkeypatch):
    def of(*arguments, **options):
        raise Checked

    monkeypatch.setattr(cache_ops.CacheCall, "of", of)


def arguments(case, **changes):
    t = make(case)
    plain = {"q": t.q, "k_cache": t.cache.k, "v_cache": t.cache.v, "k": t.k, "v": t.v, "cache_seqlens": t.seqlens}
    return {**plain, **changes}


@pytest.mark.parametrize(("setting", "options"), CALLS)
def test_a_recorded_call_is_right_on_other_tensors(setting, options, monkeypatch):
    """Other numbers, lengths, pages and padding; the judge of the first call judges the second."""
    first = Case(setting, (0, 5, 9, 40), new_len=3, query_len=2, kv_heads=2, length=16, width=2, options=options)
    check_cache(first)
    assert recorded() == 1
    refuse_checks(monkeypatch)
    check_cache(replace(first, seqlens=(20, 0, 3, 28), missing=True, seed=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True},
        {"window_size": (3, -1)},
        {"softmax_scale": 0.5},
        {"softcap": 2.0},
        {"num_splits": 2},
        {"k": None, "v": None},
        {"cache_leftpad": torch.zeros(3, dtype=torch.int32)},
        {"learnable_sink": torch.zeros(4)},
        {"alibi_slopes": torch.zeros(4)},
        {"q": torch.zeros(3, 2, 4, 64).bfloat16()},
        {"q": torch.zeros(3, 4, 1, 64).bfloat16().transpose(1, 2)},
        {"q": torch.zeros(3, 1, 4, 64).half()},
        {"q": torch._neg_view(torch.zeros(3, 1, 4, 64).bfloat16())},
        {"learnable_sink": torch._neg_view(torch.zeros(4))},
        {"q": torch.zeros(3 * 4 * 64 + 1).bfloat16()[1:].view(3, 1, 4, 64)},
        {"k_cache": torch.zeros(5 * 8 * 2 * 64 + 1).bfloat16()[1:].view(5, 8, 2, 64)},
        {"cache_seqlens": 3},
        {"cache_seqlens": torch.zeros(3, dtype=torch.int64)},
        {"cache_seqlens": torch.zeros(6, dtype=torch.int32)[::2]},
        {"causal": 0},
        {"num_splits": True},
        {"window_size": [-1, -1]},
        {"window_size": (-1, [])},
        {"softmax_scale": [1.0]},
        {"softcap": torch.zeros(())},
    ],
    ids=lambda changes: " and ".join(changes),
)
def test_a_call_unlike_it_is_checked(changes, monkeypatch):
    flash_attn_with_kvcache(**arguments(CASE))
    assert recorded() == 1
    refuse_checks(monkeypatch)
    flash_attn_with_kvcache(**arguments(CASE))
    with pytest.raises(Checked):
        flash_attn_with_kvcache(**arguments(CASE, **changes))


def test_tensors_that_are_the_same_are_not_recorded():
    """Keys as values: which of the two a place was for cannot be told, and the next call's may differ."""
    given = arguments(CASE)
    flash_attn_with_kvcache(**{**given, "v": given["k"]})
    assert recorded() == 0
    expected = flash_attn_with_kvcache(**arguments(CASE))
    assert recorded() == 1
    assert torch.equal(flash_attn_with_kvcache(**arguments(CASE)), expected)


def test_an_input_that_is_copied_or_converted_is_not_recorded():
    flash_attn_with_kvcache(**arguments(CASE, learnable_sink=torch.ones(4).bfloat16()))
    assert recorded() == 0
    flash_attn_with_kvcache(**arguments(CASE, cache_seqlens=torch.zeros(6, dtype=torch.int32)[::2]))
    assert recorded() == 0
    flash_attn_with_kvcache(**arguments(CASE, learnable_sink=torch.ones(4)))
    assert recorded() == 1


def test_an_append_alone_and_no_queries():
    given = arguments(CASE)
    del given["q"]
    append_to_kvcache(**given)
    assert torch.equal(given["k_cache"][1, 5], given["k"][1, 0])
    assert recorded() == 1


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[3]], ids=["plain", "rotated, FP8, pages"])
def test_a_recorded_append_is_right_on_other_tensors(setting, monkeypatch):
    """The second append gives what the first gave of the same numbers; the judge of appends is in test_append.py."""
    tensors = [make(Case(setting, (2, 5, 7), new_len=2, kv_heads=2, seed=seed)) for seed in (0, 1, 0, 1)]

    def appended(t):
        descales = {"k_descale": t.cache.k_descale, "v_descale": t.cache.v_descale}
        rotary = {"rotary_cos": t.cos, "rotary_sin": t.sin, "rotary_interleaved": setting.interleaved}
        where = {"block_table": t.cache.block_table, "cache_batch_idx": t.cache.cache_batch_idx}
        append_to_kvcache(t.cache.k, t.cache.v, t.k, t.v, t.seqlens, **rotary, **where, **descales)
        return [x.view(torch.uint8) for x in (t.cache.k, t.cache.v)]

    before = [x.clone() for x in (tensors[0].cache.k.view(torch.uint8), tensors[1].cache.k.view(torch.uint8))]
    expected = []
    for t in tensors[:2]:
        cache_ops._RECORDINGS.clear()
        expected.append(appended(t))
        assert recorded() == 1

    def appending(*arguments, **options):
        raise Checked

    monkeypatch.setattr(cache_ops.CacheCall, "appending", appending)
    for t, wanted, unchanged in zip(tensors[2:], expected, before, strict=True):
        got = appended(t)
        assert all(map(torch.equal, got, wanted))
        assert not torch.equal(got[0], unchanged)


def test_parameters_and_tensors_that_require_grad_are_recorded_where_no_gradient_is_wanted(monkeypatch):
    sink = torch.nn.Parameter(torch.ones(4))
    expected = flash_attn_with_kvcache(**arguments(CASE, learnable_sink=sink.detach()))
    cache_ops._RECORDINGS.clear()
    trained = arguments(CASE)["q"].requires_grad_()
    with torch.no_grad():
        assert torch.equal(flash_attn_with_kvcache(**arguments(CASE, q=trained, learnable_sink=sink)), expected)
        assert recorded() == 1
        refuse_checks(monkeypatch)
        got = flash_attn_with_kvcache(**arguments(CASE, q=trained, learnable_sink=sink))
    assert torch.equal(got, expected)
    assert not got.requires_grad
    with pytest.raises(NotImplementedError, match=r"^q: got a tensor that requires grad"):
        flash_attn_with_kvcache(**arguments(CASE, q=trained))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
@pytest.mark.parametrize("viewed", [False, True])
def test_a_tensor_whose_storage_has_been_freed_is_refused(name, viewed):
    """A view of a freed storage starts at its offset, not at 0."""
    call = arguments(CASE)
    flash_attn_with_kvcache(**call)
    assert recorded() == 1
    x = torch.stack((call[name], call[name]))[1] if viewed else call[name].clone()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"^{name}: got a Tensor without memory of its own"):
        flash_attn_with_kvcache(**{**call, name: x})


def test_recordings_hold_no_tensor():
    flash_attn_with_kvcache(**arguments(CASE))
    ((_, recording),) = cache_ops._RECORDINGS.items()
    assert recording.constants
    assert not any(isinstance(value, torch.Tensor) for value in recording.constants)


def test_not_more_than_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(cache_ops, "_RECORDINGS", Kept(2))
    for scale in (0.1, 0.2, 0.3):
        flash_attn_with_kvcache(**arguments(CASE, softmax_scale=scale))
    assert recorded() == 1
