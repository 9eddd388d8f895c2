"""flash-attn's six functions: their arguments, that each means what it says, and that all six are one function.

Numbers are judged on the CPU by the derived bounds; test_options.py and test_varlen.py draw the options themselves.
"""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fa2_cute
from fa2_cute import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    ops,
)
from fa2_cute.fuzz.judging import judge

pytestmark = pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")

# Of flash-attn 2.8, in its order.
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
TENSORS = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
}


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lengths(*of_each):
    return torch.tensor([0, *of_each]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("name", TENSORS)
def test_arguments_are_flash_attns(name):
    parameters = inspect.signature(getattr(fa2_cute, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    expected = dict.fromkeys(TENSORS[name], inspect.Parameter.empty) | OPTIONS
    if name == "flash_attn_varlen_func":
        expected["block_table"] = None
    assert list(positional.items()) == list(expected.items())
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert own == {"return_softmax_lse": False, "learnable_sink": None}


@pytest.fixture
def handed_on(monkeypatch):
    """What reaches the core, which is not run."""
    calls = []

    def attend(q, k, v, **options):
        calls.append(((q, k, v), options))
        lse = q.new_empty(()) if options["wants_lse"] else None
        return q.new_empty((*q.shape[:-1], v.shape[-1])), lse

    monkeypatch.setattr(ops.forward, "attend", attend)
    return calls


SIDES = st.one_of(st.none(), st.just(-1), st.integers(0, 300))


@given(left=SIDES, right=SIDES, causal=st.booleans())
def test_windows(left, right, causal):
    """-1 and None are unbounded; causal is a right side of 0."""
    calls = []
    q = normal(1, 2, 1, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.forward, "attend", lambda *args, **options: calls.append(options) or (q, q))
        flash_attn_func(q, q, q, causal=causal, window_size=(left, right))
    unbounded = {None: None, -1: None}
    assert calls[0]["window"] == (unbounded.get(left, left), 0 if causal else unbounded.get(right, right))


def test_options_reach_the_core(handed_on):
    q, slopes, sink = normal(1, 2, 3, 64), torch.rand(3), torch.rand(3)
    flash_attn_func(q, q, q, 0.0, 0.3, True, (5, 7), 20.0, slopes, True, learnable_sink=sink)
    ((tensors, options),) = handed_on
    assert all(x is q for x in tensors)
    assert options.pop("alibi_slopes") is slopes
    assert options.pop("sink") is sink
    assert options == {
        "softmax_scale": 0.3,
        "window": (5, 0),
        "softcap": 20.0,
        "mask": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "wants_lse": False,
    }


@pytest.mark.parametrize("name", TENSORS)
def test_results_that_are_asked_for(handed_on, name):
    function = getattr(fa2_cute, name)
    q, k = normal(1, 4, 2, 64), normal(1, 4, 2, 64, seed=1)
    packed = {"q": q, "k": k, "v": k, "kv": torch.stack((k, k), 2), "qkv": torch.stack((q, k, k), 2)}
    given_lengths = dict.fromkeys(["cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"], lengths(4))
    arguments = [
        {**packed, **given_lengths}[argument] if argument in packed or argument in given_lengths else 4
        for argument in TENSORS[name]
    ]
    if "varlen" in name:
        arguments = [x[0] if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    out = function(*arguments)
    assert isinstance(out, torch.Tensor)
    assert [type(x) for x in function(*arguments, return_softmax_lse=True)] == [torch.Tensor] * 2
    probabilities = function(*arguments, return_attn_probs=True)
    assert [type(x) for x in probabilities] == [torch.Tensor, torch.Tensor, type(None)]
    both = function(*arguments, return_attn_probs=True, return_softmax_lse=True)
    assert len(both) == 3
    assert [options["wants_lse"] for _, options in handed_on] == [False, True, True, True]


def test_all_options_together_are_right():
    q, k, v = normal(2, 9, 4, 64), normal(2, 20, 2, 64, seed=1), normal(2, 20, 2, 64, seed=2)
    slopes, sink = torch.tensor([0.5, 0.25, 0.0, -0.1]), torch.tensor([1.0, -2.0, 0.0, 3.0])
    out, lse = flash_attn_func(
        q, k, v, 0.0, 0.2, False, (6, 3), 15.0, slopes, return_softmax_lse=True, learnable_sink=sink
    )
    options = {"softmax_scale": 0.2, "window": (6, 3), "softcap": 15.0, "alibi_slopes": slopes, "sink": sink}
    judge(q, k, v, out, lse, **options)


def test_values_narrower_than_queries():
    q, k, v = normal(1, 5, 2, 64), normal(1, 7, 2, 64, seed=1), normal(1, 7, 2, 32, seed=2)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.shape == (1, 5, 2, 32)
    judge(q, k, v, out, lse, window=(None, 0))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors_are_the_same_call(causal):
    qkv = normal(2, 11, 3, 2, 64)
    q, k, v = qkv.unbind(2)
    expected = flash_attn_func(q, k, v, causal=causal, return_softmax_lse=True)
    of_three = flash_attn_qkvpacked_func(qkv, causal=causal, return_softmax_lse=True)
    of_two = flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=causal, return_softmax_lse=True)
    for got in (of_three, of_two):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_packed_sequences_are_the_same_calls():
    """One after the other, and in each of three forms; max_seqlen changes nothing, whatever it says."""
    cu = lengths(3, 0, 7, 1)
    qkv = normal(11, 3, 2, 64)
    q, k, v = qkv.unbind(1)
    options = {"causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, **options)
    judge(q, k, v, out, lse, window=(None, 0), cu_seqlens_q=cu, cu_seqlens_k=cu)
    others = [
        flash_attn_varlen_qkvpacked_func(qkv, cu, 7, **options),
        flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 7, 7, **options),
        flash_attn_varlen_func(q, k, v, cu, cu, 1, 0, **options),
        flash_attn_varlen_func(q, k, v, cu, cu, torch.tensor(9), None, **options),
    ]
    for got in others:
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)


def test_rows_of_no_sequence_and_of_no_key():
    q, k = normal(9, 2, 64), normal(6, 2, 64, seed=1)
    cu_q, cu_k = torch.tensor([1, 4, 7], dtype=torch.int32), torch.tensor([0, 0, 6], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 3, 6, causal=True, return_softmax_lse=True)
    blind = [0, 1, 2, 3, 7, 8]  # before and after the sequences, and the sequence without keys
    assert out[blind].count_nonzero() == 0
    assert (lse[:, blind] == -math.inf).all()
    judge(q, k, k, out, lse, window=(None, 0), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_queries_beyond_the_keys_give_zeros():
    q, k = normal(1, 6, 1, 64), normal(1, 2, 1, 64, seed=1)
    out, lse = flash_attn_func(q, k, k, causal=True, return_softmax_lse=True)
    assert out[:, :4].count_nonzero() == 0
    assert (lse[..., :4] == -math.inf).all()
    assert lse[..., 4:].isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_keys_and_values_in_pages(compiled):
    """Two sequences over pages in any order; what max_seqlen says changes nothing."""
    page_size, cu_q, cu_k = 4, lengths(3, 1), lengths(9, 6)
    q, k, v = normal(4, 4, 64), normal(15, 2, 64, seed=1), normal(15, 2, 64, seed=2)
    table = torch.tensor([[5, 0, 3], [2, 6, -1]], dtype=torch.int32)
    pages = [torch.full((7, page_size, 2, 64), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    for x, paged in zip((k, v), pages, strict=True):
        for b, (start, end) in enumerate([(0, 9), (9, 15)]):
            for s, row in enumerate(x[start:end]):
                paged[table[b, s // page_size], s % page_size] = row

    def call(longest):
        options = {"causal": True, "block_table": table, "return_softmax_lse": True}
        return flash_attn_varlen_func(q, *pages, cu_q, cu_k, longest, 9, **options)

    out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(3) if compiled else call(3)
    judge(q, k, v, out, lse, window=(None, 0), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    judge(q, k, v, *call(None), window=(None, 0), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
