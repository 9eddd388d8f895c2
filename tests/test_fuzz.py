"""Fuzzing: cases that say how to repeat them, a judge that notices, campaigns that end, shrink and save."""

import dataclasses
import functools
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from campaigns import drive, drive_until_met
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fa2_cute import cli
from fa2_cute._torch_internals import EMPTY_STRIDED
from fa2_cute.forward import SPLIT_KEYS, attend
from fa2_cute.fuzz import Case, WrongResult, check, command, judge
from fa2_cute.fuzz import campaign as campaign_module
from fa2_cute.fuzz.campaign import MOST_FAILURES, Campaign, program
from fa2_cute.fuzz.judging import Expectation, poisoned_allocations, require_same, run
from fa2_cute.fuzz.layouts import LAYOUTS, lay_out, moved
from fa2_cute.fuzz.masks import HIDING_MASKS, MASK_LAYOUTS, MASKS
from fa2_cute.fuzz.per_head import SINKS, SLOPES
from fa2_cute.fuzz.strategies import TESTED, WIDTHS, cases, kernels, some_kernels
from fa2_cute.fuzz.values import VALUES

GOOD = Case("float16", 1, 5, 7, 2, 1, 64, causal=True)


@given(cases() | cases(kernels()))
def test_a_case_survives_its_repr_and_its_tensors_have_its_shapes(case):
    assert eval(repr(case), {"Case": Case}) == case
    q, k, v = case.tensors()
    (batch, query_len), (_, key_len) = case.query_rows, case.key_rows
    leading = (batch,) if case.packed is None else ()
    assert q.shape == (*leading, query_len, case.heads, case.head_dim)
    assert k.shape == (*leading, key_len, case.kv_heads, case.head_dim)
    assert v.shape == (*leading, key_len, case.kv_heads, case.value_width)
    assert all(x.numel() == 0 or x.stride(-1) == 1 for x in (q, k, v))
    assert compile(case.as_call(), "case", "exec")
    assert all(isinstance(kind, str) for kind in case.classes().values())


@given(cases() | cases(kernels()))
def test_a_case_calls_with_the_options_it_names(case):
    options = case.options
    assert options["window"][1] == (0 if case.causal else case.window[1])
    assert ("softcap" in options) == (case.softcap > 0)
    assert ("mask" in options) == (case.mask is not None)
    if "mask" in options:
        shape = (case.batch, case.heads, case.query_len, case.key_len)
        assert torch.broadcast_shapes(options["mask"].shape, shape) == shape
        assert options["mask"].dtype in (torch.bool, torch.float32, case.torch_dtype)
    if case.alibi is not None:
        assert options["alibi_slopes"].shape in ((case.heads,), (case.sequence_count, case.heads))
        assert options["alibi_slopes"].isfinite().all() == (case.alibi != "nan")
    if case.sink is not None:
        assert options["sink"].shape == (case.heads,)
    if case.packed is not None:
        for side, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
            assert options[name].dtype == torch.int32
            assert options[name].diff().tolist() == [pair[side] for pair in case.packed]


@given(cases() | cases(kernels()))
@settings(max_examples=20)
def test_a_case_is_the_same_numbers_every_time(case):
    options = (case.options, case.options)
    tensors = [[x for x in given.values() if torch.is_tensor(x)] for given in options]
    for first, second in zip((*case.tensors(), *tensors[0]), (*case.tensors(), *tensors[1]), strict=True):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())
        assert torch.equal(first.isnan(), second.isnan())


def test_rows_of_no_sequence_are_nan_and_sequences_that_reach_too_far_are_cut():
    q, k, _ = Case(packed=((2, 3), (4, 5)), unused=(1, 2, 3, 0)).tensors()
    assert q.isnan().all(-1).all(-1).tolist() == [True] + [False] * 6 + [True] * 2
    assert k.isnan().all(-1).all(-1).tolist() == [True] * 3 + [False] * 8
    cut = Case(packed=((2, 3), (4, 5)), unused=(0, -3, -2, 0))
    assert [len(x) for x in cut.tensors()] == [3, 6, 6]
    assert cut.options["cu_seqlens_q"].tolist() == [0, 2, 6]
    assert cut.options["cu_seqlens_k"].tolist() == [-2, 1, 6]


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("dtype", ["bool", "same", "float32"])
def test_a_mask_lies_in_memory_as_named_and_stays_so_where_it_is_moved(layout, dtype):
    case = Case(batch=2, query_len=5, key_len=7, heads=4, mask="some", mask_dtype=dtype, mask_layout=layout)
    mask = case.options["mask"]
    assert (mask == case.options["mask"]).all()
    full = mask.broadcast_to(2, 4, 5, 7)
    assert full.unique().numel() == (1 if layout == "one" else 2)
    strides = {"transposed": (140, 35, 1, 5), "every_other": (280, 70, 14, 2), "sliced": (200, 50, 10, 1)}
    assert full.stride() == strides.get(layout, full.stride())
    there = moved(mask, "meta")
    assert (there.shape, there.stride()) == (mask.shape, mask.stride())


@pytest.mark.parametrize("mask", HIDING_MASKS)
def test_a_mask_that_hides_is_the_same_in_every_dtype(mask):
    case = Case(batch=2, query_len=70, key_len=90, heads=2, mask=mask)
    hides, *added = (
        Case(**{**case.__dict__, "mask_dtype": dtype}).options["mask"] for dtype in ("bool", "same", "float32")
    )
    assert all(torch.equal(x == 0.0, hides) and torch.equal(x == -math.inf, ~hides) for x in added)


def test_kernels_of_a_seed_are_the_same_and_cover_everything_in_time():
    assert some_kernels(8, 3) == some_kernels(8, 3) != some_kernels(8, 4)
    drawn = [kernel for seed in range(60) for kernel in some_kernels(8, seed)]
    assert {kernel.head_dim for kernel in drawn} == {kernel.value_dim for kernel in drawn} == set(WIDTHS)
    for name in ("left", "right", "varlen", "softcap", "alibi", "sink"):
        assert {getattr(kernel.features, name) for kernel in drawn} == {False, True}
    assert {kernel.features.mask for kernel in drawn} == {None, "bool", "float32", "float16", "bfloat16"}
    assert all(kernel.features.mask in (None, "bool", "float32", kernel.dtype) for kernel in (*drawn, *TESTED))


def test_the_tested_kernels_have_every_option_in_both_dtypes():
    for name in ("left", "right", "varlen", "softcap", "alibi", "sink", "mask"):
        assert {kernel.dtype for kernel in TESTED if kernel.has(name)} == {"float16", "bfloat16"}
    assert {kernel.features.mask for kernel in TESTED} == {None, "bool", "float32", "float16", "bfloat16"}
    assert len(set(TESTED)) == len(TESTED) <= 20  # some seconds of compiling each


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("broadcast")])
@given(shape=st.tuples(*(st.integers(0, 3),) * 3, st.just(64)))
@settings(max_examples=20)
def test_a_layout_keeps_the_numbers(layout, shape):
    x = torch.randn(shape)
    assert torch.equal(lay_out(x, layout), x)


@pytest.mark.parametrize("values", VALUES)
def test_values_are_deterministic_and_finite_unless_they_say_otherwise(values):
    case = Case("bfloat16", 2, 70, 130, 2, 1, 64, values=values)
    for name, x in zip("qkv", case.tensors(), strict=True):
        allowed = (name, values) in {
            ("q", "nan_queries"), ("k", "nan_keys"), ("k", "minus_infinite_keys"), ("k", "minus_infinite_tiles"),
            ("v", "values_not_finite"), *((name, "nan_sequences") for name in "qkv"),
        }  # fmt: skip
        assert x.isfinite().all() or allowed


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match=r"values: got 'nice', takes one of normal"):
        Case(values="nice").tensors()
    with pytest.raises(ValueError, match=r"layout: got 'nice', takes one of contiguous"):
        Case(layouts=("nice",) * 3).tensors()
    for field, first in (("alibi", "ladder"), ("sink", "normal"), ("mask", "all_visible")):
        with pytest.raises(ValueError, match=f"{field}: got 'nice', takes one of {first}"):
            Case(**{field: "nice"}).options  # noqa: B018
    for field, first in (("mask_dtype", "bool"), ("mask_layout", "full")):
        with pytest.raises(ValueError, match=f"{field}: got 'nice', takes one of {first}"):
            Case(mask="some", **{field: "nice"}).options  # noqa: B018
    with pytest.raises(ValueError, match="mask: got 'bias' of dtype bool, takes one of all_visible"):
        Case(mask="bias").options  # noqa: B018


def test_late_jumps_reach_the_steps_they_name():
    """In base 2 the logits of the standing keys are 0 or a step of JUMPS, up to the rounding of q to 16 bits."""
    case = Case("bfloat16", 1, 40, 300, 1, 1, 64, softmax_scale=1.0, values="late_jumps", seed=3)
    q, k, _ = (x.double()[0, :, 0] for x in case.tensors())
    (standing,) = torch.nonzero((k[:, 0] == 1.0) & (k[:, 1:] == 0).all(1), as_tuple=True)
    assert 1 <= len(standing) <= 8
    logits = (q @ k[standing].T) * math.log2(math.e)
    assert logits.min() >= -0.01
    assert logits.max() > 100


def test_poison_reaches_what_torch_allocates_and_goes_away():
    before, direct = torch.are_deterministic_algorithms_enabled(), dict(EMPTY_STRIDED)
    torch.ones(1000, dtype=torch.float16)  # memory that may be given out again
    with poisoned_allocations():
        assert torch.empty(1000, dtype=torch.float16).isnan().all()
        assert torch.empty(7, 3).isnan().all()
        x = EMPTY_STRIDED["cpu"]((5, 7), (1, 5), torch.bfloat16)  # what kept calls allocate with
        assert x.isnan().all()
        assert (x.shape, x.stride(), x.dtype) == ((5, 7), (1, 5), torch.bfloat16)
    assert torch.are_deterministic_algorithms_enabled() == before
    assert direct == EMPTY_STRIDED


# ---- the judge -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda out, lse: out[0, 2, 1, 5].fill_(math.nan),
            r"out of .* 1 of 640 elements wrong; worst at \(0, 2, 1, 5\)",
        ),
        (lambda out, lse: out[0, 2, 1, 5].add_(0.05), r"1 of 640 elements wrong"),
        (lambda out, lse: out[0, 0, 0].fill_(math.inf), r"64 of 640 elements wrong"),
        (lambda out, lse: lse[0, 1, 3].add_(1e-3), r"lse of .* 1 of 10 elements wrong; worst at \(0, 1, 3\)"),
        (lambda out, lse: lse[0, 1, 3].fill_(-math.inf), r"lse of"),
    ],
)
def test_the_judge_notices_one_wrong_element(spoil, message):
    q, k, v, out, lse = run(GOOD)
    judge(q, k, v, out, lse, **GOOD.options)
    spoil(out, lse)
    with pytest.raises(WrongResult, match=message):
        judge(q, k, v, out, lse, **GOOD.options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_judge_notices_a_rounding_that_leans_one_way(dtype, causal):
    """Truncated to 16 bits instead of rounded, in all elements or in one column: each within its own bound."""
    case = Case(dtype, 2, 130, 130, 4, 2, 64, causal=causal, values="single_weights")
    q, k, v = case.tensors()
    expectation = Expectation.of_case(case, q, k, v)
    rounded, lse = expectation.out.to(q.dtype), expectation.lse.float()
    towards_zero = torch.where(
        rounded.double() > expectation.out, rounded.nextafter(torch.zeros_like(rounded)), rounded
    )
    expectation.judge(rounded, lse)
    one_column = rounded.clone()
    one_column[..., 3] = towards_zero[..., 3]
    for biased in (towards_zero, one_column):
        with pytest.raises(WrongResult, match="something rounds one way"):
            expectation.judge(biased, lse)


#: Calls that the kernels once got wrong.
REGRESSIONS = (
    # a row whose first tile holds one key, kept as its reference while the second tile overflows
    Case(query_len=70, key_len=70, causal=True, values="large_logits"),
    Case(query_len=65, key_len=65, causal=True, softmax_scale=1e30),
    # the second pass over all tiles, with the queries negated for a negative scale
    Case(query_len=128, key_len=128, softmax_scale=-0.125, values="large_logits"),
    # row sums in [2^126, 2^127)
    Case(query_len=70, key_len=140, values="overflowing_sums"),
    # a value that is not finite, and rows past the end
    Case("float16", query_len=5, key_len=70, values="values_not_finite", seed=1),
    # scales that float32 holds as a denormal; Q must not vanish beside infinite keys
    Case("float16", query_len=5, key_len=70, softmax_scale=1e-40, values="minus_infinite_keys"),
    Case(query_len=5, key_len=70, softmax_scale=-1e-40, values="huge_products"),
)


@pytest.mark.parametrize("case", REGRESSIONS, ids=repr)
def test_what_once_was_wrong_is_right(case):
    check(case)


def test_the_judge_notices_wrong_shapes_dtypes_and_strides():
    q, k, v, out, lse = run(GOOD)
    for wrong in (out[:, :4], out.float(), out.transpose(1, 2).contiguous().transpose(1, 2)):
        with pytest.raises(WrongResult, match="out of"):
            judge(q, k, v, wrong, lse, **GOOD.options)
    for wrong in (lse[:, :1], lse.double()):
        with pytest.raises(WrongResult, match="lse of"):
            judge(q, k, v, out, wrong, **GOOD.options)


def test_check_notices_an_element_that_is_not_written_and_an_input_that_is(monkeypatch):
    def lazy(q, k, v, **options):
        out, lse = attend(q, k, v, **options)
        late = torch.empty(out.shape, dtype=out.dtype)
        late[:, :-1] = out[:, :-1]
        return late, lse

    def greedy(q, k, v, **options):
        result = attend(q, k, v, **options)
        k[0, 3, 0, 9] += 1
        return result

    monkeypatch.setattr("fa2_cute.fuzz.judging.attend", lazy)
    with pytest.raises(WrongResult, match="got nan"):
        check(GOOD)
    monkeypatch.setattr("fa2_cute.fuzz.judging.attend", greedy)
    with pytest.raises(WrongResult, match="k was written to"):
        check(GOOD)

    def greedier(q, k, v, **options):
        result = attend(q, k, v, **options)
        options["mask"][0, 0, 0, 0] ^= True
        return result

    monkeypatch.setattr("fa2_cute.fuzz.judging.attend", greedier)
    with pytest.raises(WrongResult, match="mask was written to"):
        check(Case("float16", 1, 5, 7, 2, 1, 96, value_dim=40, mask="some", sink="normal"))


def test_check_makes_a_call_that_is_kept_again(monkeypatch):
    """A right result both times, but not the same one."""
    made = []

    def changing(q, k, v, **options):
        out, lse = attend(q, k, v, **options)
        made.append(out)
        if len(made) == 2:
            out[0, 2, 1, 5] = out[0, 2, 1, 5].nextafter(torch.tensor(math.inf, dtype=out.dtype))
        return out, lse

    monkeypatch.setattr("fa2_cute.fuzz.judging.attend", changing)
    check(GOOD)
    assert len(made) == 1
    made.clear()
    monkeypatch.setattr("fa2_cute.fuzz.judging.keeps_calls", lambda device: True)
    with pytest.raises(WrongResult, match=r"out of .*, made again: 1 of 640 elements .* first at \(0, 2, 1, 5\): got"):
        check(GOOD)
    check(GOOD)  # the third and the fourth agree


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out, lse: (out, lse.clone().fill_(-0.0)), "lse of x, made again: 6 of 6 elements"),
        (lambda out, lse: (out[:1], lse), "out of x, made again: got"),
        (lambda out, lse: (out.bfloat16(), lse), "out of x, made again: got"),
        (lambda out, lse: (out.t().contiguous().t(), lse), "out of x, made again: got"),
        (lambda out, lse: (out.nan_to_num(posinf=math.inf), lse), "out of x, made again: 1 of 4 .*got 0, the .* nan"),
    ],
)
def test_the_same_is_every_bit_but_those_of_a_nan(spoil, message):
    out, lse = torch.tensor([[1.0, math.inf], [math.nan, 2.0]], dtype=torch.float16), torch.zeros(6)
    other = out.clone()
    other[1, 0] = torch.tensor([-1], dtype=torch.int16).view(torch.float16)[0]  # another NaN
    require_same((other, lse), (out, lse), "x")
    with pytest.raises(WrongResult, match=message):
        require_same(spoil(out, lse), (out, lse), "x")


# ---- campaigns -------------------------------------------------------------------------------------------------------


def quiet_check(case, device):
    """Stands for a kernel that is right, and quick."""


def wrong_beyond(limit):
    def wrong(case, device):
        if isinstance(case, Case) and case.key_len > limit and case.causal:
            raise WrongResult(f"key_len {case.key_len} is too much")

    return wrong


def test_a_campaign_draws_until_the_time_is_up_and_counts_classes():
    campaign = Campaign(seed=1, check=quiet_check)
    seen = []
    campaign.run(1.0, lambda campaign: seen.append(campaign.drawn))
    assert 0.9 < campaign.seconds < 10
    assert campaign.drawn == seen[-1] > 50
    assert not campaign.failures
    calls = campaign.classes["call"]
    assert set(calls) == {"attend", "flash_attn_with_kvcache"}
    assert sum(calls.values()) == campaign.drawn
    counts = {aspect: sum(kinds.values()) for aspect, kinds in campaign.classes.items() if aspect != "call"}
    assert set(counts.values()) == set(calls.values())


EVERYTHING = {
    "dtype": {"float16", "bfloat16"},
    "head_dim": {"64", "128", "below 64", "below 128", "below 192", "below 256"},
    "value_dim": {"equal", "different"},
    "window": {
        "full", "left", "right", "left and right", "causal", "left and causal",
        "causal, offset 0", "causal, offset > 0", "causal, offset < 0",
    },
    "softcap": {"none", "tiny", "ordinary", "huge"},
    "alibi": {"None", *SLOPES},
    "sink": {"None", *SINKS},
    "mask": {"None", *MASKS},
    "mask dtype": {"none", "bool", "same", "float32"},
    "mask layout": {"none", *MASK_LAYOUTS},
    "sequences": {"one", "a batch", "packed", "packed, cut", "packed, rows unused", "packed, more than rows"},
    "values": set(VALUES),
    "scale": {"default", "ordinary", "ordinary, negative", "tiny", "tiny, negative", "huge", "zero"},
    "query_len": {"0", "1", "full tiles", "a tile + 1", "a tile - 1", "other"},
    "key_len": {"0", "1", "full tiles", "a tile + 1", "a tile - 1", "other", "long"},
    **{f"layout of {name}": set(LAYOUTS) for name in "qkv"},
    "heads": {"MHA", "MQA", "GQA 2:1", "GQA 3:1"},
    "forward splits": {"as is fastest", "few", "few, some empty", "many", "many, some empty"},
}  # fmt: skip
OPEN_ENDED = {"head_dim", "heads"}  # more kinds than these may be drawn


def test_a_campaign_reaches_every_kind_of_everything():
    campaign = Campaign(seed=1, check=quiet_check)
    drive_until_met(campaign, EVERYTHING)
    for aspect, kinds in EVERYTHING.items():
        assert aspect in OPEN_ENDED or set(campaign.classes[aspect]) == kinds


def test_the_same_seed_draws_the_same_cases():
    def drawn(seed):
        met = []
        drive(Campaign(seed=seed, check=lambda case, device: met.append(case)), 60)
        return met[:60]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_a_failure_is_shrunk_saved_and_runs(tmp_path):
    campaign = Campaign(seed=2, folder=tmp_path / "new", check=wrong_beyond(10))
    campaign.run(3.0)
    assert 1 <= len(campaign.failures) <= MOST_FAILURES
    for failure in campaign.failures:
        query_len, key_len = failure.case.query_len, failure.case.key_len
        assert 10 < key_len <= 64 or key_len == SPLIT_KEYS - 1  # the fewest of those drawn for the split kernels
        assert failure.case == Case(query_len=query_len, key_len=key_len, causal=True)  # all else is at its plainest
        assert failure.path.read_text() == program(failure, "cpu")
        assert f"key_len {key_len} is too much" in failure.path.read_text()
    # The last is right in truth, so its program ends well.
    assert subprocess.run([sys.executable, "-W", "ignore", failure.path]).returncode == 0


@pytest.mark.parametrize("splits", [0, 3])
def test_a_saved_program_fails_where_the_result_is_wrong(tmp_path, splits):
    text = dataclasses.replace(GOOD, splits=splits).as_call().replace("judge(q", "out[0, 1, 0, 3] += 1\njudge(q")
    assert ("attend(q, k, v, splits=3, **options)" in text) == (splits == 3)
    (tmp_path / "wrong.py").write_text(text)
    result = subprocess.run([sys.executable, tmp_path / "wrong.py"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "WrongResult: out of the call: 1 of 640 elements wrong; worst at (0, 1, 0, 3)" in result.stderr


def test_a_program_for_a_device_that_keeps_calls_makes_its_call_again(tmp_path):
    text = GOOD.as_call("cuda:0")
    assert "cuda:0" in text
    for spoil, code in (("", 0), ("out[0, 1, 0, 3] = out[0, 1, 0, 3].nextafter(lse[0, 0, 0].to(out))\n", 1)):
        (tmp_path / "again.py").write_text(text.replace("cuda:0", "cpu").replace("judge(q", spoil + "judge(q"))
        result = subprocess.run([sys.executable, tmp_path / "again.py"], capture_output=True, text=True)
        assert result.returncode == code, result.stderr
        assert ("made again: 1 of 640 elements differ" in result.stderr) == bool(spoil)


def test_an_interrupted_campaign_keeps_what_it_found():
    campaign = Campaign(seed=3, check=wrong_beyond(1))

    def interrupt(campaign):
        if campaign.drawn > 20 and campaign.failures:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign.run(60.0, interrupt)
    assert campaign.failures
    text = rendered(command.summary(campaign, interrupted=True))
    assert "interrupted" in text
    assert "too much" in text
    assert "values" in text


@pytest.mark.parametrize("compiling", [True, False])
def test_a_campaign_that_mostly_compiled_says_so(monkeypatch, compiling):
    """Cases that are the first to need a kernel take long, as where the cache is empty; others take as long, or not."""
    there = []
    monkeypatch.setattr(campaign_module.jit, "kernels", lambda: len(there))

    def judged(case, device):
        first = len(there) < 3
        if first:
            there.append(case)
        if first == compiling:
            time.sleep(0.02)

    campaign = Campaign(seed=1, check=judged)
    drive(campaign, 10)
    assert (0.06 <= campaign.first_calls < campaign.seconds) == compiling
    campaign.seconds = 0.1  # what drawing takes depends on the machine
    assert ("s of that were first calls of kernels" in rendered(command.summary(campaign))) == compiling


def rendered(renderable) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [False, True])
def test_the_command_ends_with_a_summary_and_its_exit_code(monkeypatch, tmp_path, capsys, failing):
    stand_in = wrong_beyond(10) if failing else quiet_check
    monkeypatch.setattr(command, "Campaign", functools.partial(Campaign, check=stand_in))
    minutes = "0.06" if failing else "0.02"  # until a case is drawn that fails
    arguments = ["fuzz", "--minutes", minutes, "--seed", "4", "--device", "cpu", "--folder", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    printed = capsys.readouterr().out
    assert caught.value.code == int(failing)
    assert "(seed 4)" in printed
    assert "layout of q" in printed
    assert bool(list(tmp_path.glob("out/*.py"))) == failing
    assert ("attend(" in printed) == failing


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_the_command_refuses_no_time(minutes, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["fuzz", "--minutes", minutes, "--device", "cpu"])
    assert caught.value.code == 1
    assert "--minutes: got" in capsys.readouterr().err


def test_without_hypothesis_the_command_says_what_to_install():
    script = (
        "import sys; sys.modules['hypothesis'] = None\nfrom fa2_cute import cli\ncli.main(['fuzz', '--device', 'cpu'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install -e '.[test]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_command_runs_the_emulator(tmp_path):
    """The whole of it, in a process of its own: a few seconds of real cases."""
    result = subprocess.run(
        [sys.executable, "-m", "fa2_cute", "fuzz", "--minutes", "0.1", "--seed", "1", "--device", "cpu"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 failures" in result.stdout
    assert not list(Path(tmp_path).iterdir())
