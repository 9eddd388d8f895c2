"""Fuzzing of calls over KV caches: cases that repeat, a judge that notices, and what a campaign makes of them."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from campaigns import drive_until_met
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_cute import cache_ops
from fa2_cute.fuzz import CacheCase, WrongResult, cache_judging, check_cache
from fa2_cute.fuzz.cache_cases import KINDS, Options, Setting, make
from fa2_cute.fuzz.cache_strategies import PLAIN, cache_cases, some_cache_kernels
from fa2_cute.fuzz.campaign import Campaign, program

SOME = (PLAIN, *some_cache_kernels(30, 0))
GOOD = CacheCase(Setting(), (3, 7), new_len=1, kv_heads=2)


@given(cache_cases(st.sampled_from(SOME)))
def test_a_case_survives_its_repr_and_its_tensors_have_its_shapes(case):
    assert eval(repr(case), {"CacheCase": CacheCase, "Setting": Setting, "Options": Options}) == case
    t, again = make(case), make(case)
    assert t.q.shape == (case.batch, case.query_len, case.kv_heads * case.group, case.setting.head_dim)
    assert t.cache.k.shape[1:] == (case.length, case.kv_heads, case.setting.head_dim)
    assert (t.k is None) == (case.new_len is None)
    assert t.cache.capacity == case.capacity
    for name in ("k", "v"):
        assert torch.equal(*(getattr(x.cache, name).view(torch.uint8) for x in (t, again)))
    assert compile(case.as_call(), "case", "exec")
    assert all(isinstance(kind, str) for kind in case.classes().values())


def test_kernels_of_a_seed_are_the_same_and_cover_everything_in_time():
    assert some_cache_kernels(5, 3) == some_cache_kernels(5, 3) != some_cache_kernels(5, 4)
    drawn = [kernel for seed in range(100) for kernel in some_cache_kernels(3, seed)]
    for name in ("paged", "indexed", "interleaved"):
        assert {getattr(kernel.setting, name) for kernel in drawn} == {False, True}
    for name in ("causal", "alibi", "sink", "leftpad"):
        assert {getattr(kernel.options, name) for kernel in drawn} == {False, True}
    assert {kernel.setting.cache_dtype for kernel in drawn} == {"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}
    for name in ("k_descale", "v_descale"):
        found = {getattr(kernel.setting, name) for kernel in drawn}
        assert found == {"unit", "tensor", "head", "sequence", "block"}
    assert {kernel.wide for kernel in drawn} == {False, True}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t, out, lse: out[1, 0, 2, 5].add_(0.1), "out of sequence 1 of CacheCase.*1 of 256 elements wrong"),
        (lambda t, out, lse: lse[0, 1].fill_(torch.nan), "lse of sequence 0"),
        (lambda t, out, lse: t.cache.k[0, 3, 1, 9].add_(1.0), "k_cache of CacheCase.*not what an append alone writes"),
        (lambda t, out, lse: t.cache.v[4].fill_(0.0), "v_cache of CacheCase"),  # a row of nobody
    ],
)
def test_the_judge_notices(spoil, message, monkeypatch):
    check_cache(GOOD)

    def wrong(case, t):
        out, lse = call(case, t)
        spoil(t, out, lse)
        return out, lse

    call = cache_judging.call
    monkeypatch.setattr(cache_judging, "call", wrong)
    with pytest.raises(WrongResult, match=message):
        check_cache(replace(GOOD, seqlens=(3, 7, 2), length=16))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t, lengths, rotated: t.cache.k[0, 3, 0, 0].mul_(1.02), "k_cache of .*: wrong numbers"),
        (lambda t, lengths, rotated: t.cache.v[0, 0, 0, 0].fill_(7.0), "v_cache of .*: written to where no token"),
        (lambda t, lengths, rotated: lengths[0].add_(1), "lengths of"),
        (lambda t, lengths, rotated: rotated[0, 0, 0, 3].add_(0.1), "rotated queries of .*: wrong numbers"),
    ],
)
def test_the_judge_of_appends_notices(spoil, message, monkeypatch):
    case = replace(GOOD, setting=Setting(rotary_dim=32))
    run_append = cache_judging.run_append

    def wrong(case, t):
        lengths, rotated = run_append(case, t)
        spoil(t, lengths, rotated)
        return lengths, rotated

    monkeypatch.setattr(cache_judging, "run_append", wrong)
    with pytest.raises(WrongResult, match=message):
        check_cache(case)


def test_a_recorded_call_that_writes_nothing_is_noticed(monkeypatch):
    """Its results are memory of the call before otherwise."""
    monkeypatch.setattr(cache_ops, "_RECORDINGS", {})
    case = replace(GOOD, new_len=None)
    check_cache(case)
    assert cache_ops._RECORDINGS
    for key, recording in cache_ops._RECORDINGS.items():
        cache_ops._RECORDINGS[key] = replace(recording, steps=())
    with pytest.raises(WrongResult, match=r"out of sequence 0 of CacheCase.*got nan"):
        check_cache(case)


def test_on_a_gpu_a_call_is_made_again_from_what_was_kept(monkeypatch):
    def changing(case, t):
        out, lse = call(case, t)
        made.append(out)
        if len(made) == 2:
            lse[1, 3, 0] = lse[1, 3, 0].nextafter(torch.tensor(0.0))
        return out, lse

    call, made = cache_judging.call, []
    monkeypatch.setattr(cache_judging, "call", changing)
    monkeypatch.setattr(cache_judging, "keeps_calls", lambda device: True)
    with pytest.raises(WrongResult, match=r"lse of CacheCase.*, made again: 1 of 8 .* first at \(1, 3, 0\)"):
        check_cache(GOOD)
    check_cache(GOOD)
    assert len(made) == 4


@settings(max_examples=20)
@given(cache_cases(st.just(PLAIN)))
def test_drawn_calls_are_right(case):
    check_cache(case)


EVERY_KIND = {
    "slots": {"pages of 1", "pages", "rows, indexed", "rows"},
    "missing": {"none", "pages or rows"},
    "appended": {"nothing", "one token", "several"},
    "rotation": {"none", "interleaved, float32", "halves, float32"},
    "splits": {"chosen", "1", "several"},
    "packed rows": {"to 16", "more"},
    "keys": set(KINDS),
}


def test_a_campaign_reaches_every_kind_of_cache():
    campaign = Campaign(seed=1, check=lambda case, device: None)
    drive_until_met(campaign, EVERY_KIND)
    for aspect, kinds in EVERY_KIND.items():
        assert aspect == "rotation" or set(campaign.classes[aspect]) == kinds  # of rotations there are more


def test_a_failure_is_shrunk_saved_and_runs(tmp_path):
    def wrong(case, device):
        if isinstance(case, CacheCase) and case.query_len > 2 and case.missing:
            raise WrongResult("too many queries")

    campaign = Campaign(seed=2, folder=tmp_path, check=wrong)
    campaign.run(3.0)
    assert campaign.failures
    failure = campaign.failures[0]
    assert failure.case == CacheCase(Setting(), failure.case.seqlens, 0, 3, 1, 1, 1, 1, missing=True)
    assert failure.path.read_text() == program(failure, "cpu")
    # Right in truth, so its program ends well.
    assert subprocess.run([sys.executable, "-W", "ignore", failure.path]).returncode == 0
