"""Every wrong argument of flash_attn_with_kvcache is refused by name before anything is compiled or written."""

import math

import pytest
import torch

from fa2_cute import append, append_spec, cache_ops, checks, descale, jit
from fa2_cute.cache_spec import MAX_INT32
from fa2_cute.decode_checks import Heads
from fa2_cute.kvcache import append_to_kvcache, flash_attn_with_kvcache

BATCH, HEADS, KV_HEADS, DIM, LENGTH, PAGE = 2, 4, 2, 64, 16, 4


def plain(**changes):
    """Arguments of a call that is right, but for ``changes``."""
    arguments = {
        "q": torch.zeros(BATCH, 3, HEADS, DIM).bfloat16(),
        "k_cache": torch.zeros(BATCH, LENGTH, KV_HEADS, DIM).bfloat16(),
        "v_cache": torch.zeros(BATCH, LENGTH, KV_HEADS, 32).bfloat16(),
        "k": torch.zeros(BATCH, 2, KV_HEADS, DIM).bfloat16(),
        "v": torch.zeros(BATCH, 2, KV_HEADS, 32).bfloat16(),
        "cache_seqlens": torch.zeros(BATCH, dtype=torch.int32),
        "rotary_cos": torch.zeros(LENGTH, 16),
        "rotary_sin": torch.zeros(LENGTH, 16),
    }
    return {**arguments, **changes}


def paged(**changes):
    arguments = {
        "k_cache": torch.zeros(9, PAGE, KV_HEADS, DIM).bfloat16(),
        "v_cache": torch.zeros(9, PAGE, KV_HEADS, 32).bfloat16(),
        "block_table": torch.zeros(BATCH, 4, dtype=torch.int32),
    }
    return plain(**{**arguments, **changes})


def quantised(dtype=torch.float8_e4m3fn, **changes):
    caches = {name: plain()[name].to(dtype) for name in ("k_cache", "v_cache")}
    return plain(**{**caches, **changes})


class Reached(Exception):
    """The checks let a call through to the compiler."""


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    def compiled(*arguments):
        raise Reached

    monkeypatch.setattr(jit, "compiled", compiled)
    monkeypatch.setattr(cache_ops, "_RECORDINGS", {})


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def misaligned(*shape):
    return zeros(math.prod(shape) + 1)[1:].view(shape)


INT = torch.int32
WRONG = {
    "q is no tensor": (TypeError, "q: got list", plain(q=[1.0])),
    "q of float32": (TypeError, "q: got dtype torch.float32", plain(q=zeros(2, 3, 4, 64, dtype=torch.float32))),
    "q of FP8": (TypeError, "q: got dtype", plain(q=plain()["q"].to(torch.float8_e4m3fn))),
    "q of rank 3": (ValueError, "q: got 3 dimensions", plain(q=zeros(2, 4, 64))),
    "q with a last stride": (ValueError, "q: got strides", plain(q=zeros(2, 3, 4, 128)[..., ::2])),
    "q with grad": (
        NotImplementedError,
        "q: got a tensor that requires grad",
        plain(q=zeros(2, 3, 4, 64).requires_grad_()),
    ),
    "q on meta": (
        ValueError,
        "q: got a Tensor without memory",
        plain(q=torch.zeros(2, 3, 4, 64, device="meta").bfloat16()),
    ),
    "heads that do not divide": (ValueError, "k_cache: got 2 KV heads", plain(q=zeros(2, 3, 3, 64))),
    "cache of another dtype": (
        TypeError,
        "k_cache: got dtype torch.float16",
        plain(k_cache=zeros(2, 16, 2, 64, dtype=torch.float16)),
    ),
    "cache of int8": (TypeError, "k_cache: got dtype torch.int8", plain(k_cache=zeros(2, 16, 2, 64, dtype=torch.int8))),
    "caches of two dtypes": (TypeError, "v_cache: got dtype", quantised(v_cache=zeros(2, 16, 2, 32))),
    "cache of rank 3": (ValueError, "k_cache: got 3 dimensions", plain(k_cache=zeros(16, 2, 64))),
    "cache of another width": (ValueError, "k_cache: got rows of 72", plain(k_cache=zeros(2, 16, 2, 72))),
    "values of an odd width": (ValueError, "v_cache: got rows of 20", plain(v_cache=zeros(2, 16, 2, 24)[..., :20])),
    "values of 264": (ValueError, "v_cache: got rows of 264", plain(v_cache=zeros(2, 16, 2, 264))),
    "values of another length": (ValueError, "v_cache: got shape (2, 15, 2, 32)", plain(v_cache=zeros(2, 15, 2, 32))),
    "too few rows": (
        ValueError,
        "k_cache: got 1 rows",
        plain(k_cache=zeros(1, 16, 2, 64), v_cache=zeros(1, 16, 2, 32)),
    ),
    "misaligned cache": (ValueError, "k_cache: got strides", plain(k_cache=misaligned(2, 16, 2, 64))),
    "negated cache": (ValueError, "k_cache: got a negated view", plain(k_cache=torch._neg_view(zeros(2, 16, 2, 64)))),
    "empty pages": (
        ValueError,
        "k_cache: got pages of 0",
        paged(k_cache=zeros(9, 0, 2, 64), v_cache=zeros(9, 0, 2, 32)),
    ),
    "k without v": (ValueError, "v: got None", plain(v=None)),
    "v without k": (ValueError, "v: got one without k", plain(k=None, rotary_cos=None, rotary_sin=None)),
    "k is no tensor": (TypeError, "k: got int", plain(k=3)),
    "k of another dtype": (TypeError, "k: got dtype torch.float16", plain(k=zeros(2, 2, 2, 64, dtype=torch.float16))),
    "k of FP8": (TypeError, "k: got dtype torch.float8_e4m3fn", quantised(k=plain()["k"].to(torch.float8_e4m3fn))),
    "k of another batch": (ValueError, "k: got shape (3, 2, 2, 64)", plain(k=zeros(3, 2, 2, 64))),
    "k of other heads": (ValueError, "k: got shape (2, 2, 4, 64)", plain(k=zeros(2, 2, 4, 64))),
    "v of another length": (ValueError, "v: got shape (2, 1, 2, 32)", plain(v=zeros(2, 1, 2, 32))),
    "v of another width": (ValueError, "v: got shape (2, 2, 2, 64)", plain(v=zeros(2, 2, 2, 64))),
    "more than the cache": (ValueError, "k: got 17 new tokens", plain(k=zeros(2, 17, 2, 64), v=zeros(2, 17, 2, 32))),
    "more than the pages": (ValueError, "k: got 17 new tokens", paged(k=zeros(2, 17, 2, 64), v=zeros(2, 17, 2, 32))),
    "past the cache's end": (ValueError, "cache_seqlens: got 15, takes 0 to 14 of 16", plain(cache_seqlens=15)),
    "past the table's end": (ValueError, "cache_seqlens: got 15, takes 0 to 14 of 16", paged(cache_seqlens=15)),
    "a negative length": (ValueError, "cache_seqlens: got -1", plain(cache_seqlens=-1)),
    "longer than the cache": (
        ValueError,
        "cache_seqlens: got 17",
        plain(k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=17),
    ),
    "a bool": (TypeError, "cache_seqlens: got bool", plain(cache_seqlens=True)),
    "a list": (TypeError, "cache_seqlens: got list", plain(cache_seqlens=[0, 0])),
    "k without lengths": (ValueError, "cache_seqlens: got None", plain(cache_seqlens=None)),
    "lengths of int64": (
        TypeError,
        "cache_seqlens: got dtype torch.int64",
        plain(cache_seqlens=torch.zeros(2, dtype=torch.int64)),
    ),
    "lengths of another batch": (ValueError, "cache_seqlens: got shape (3,)", plain(cache_seqlens=zeros(3, dtype=INT))),
    "lengths elsewhere": (
        ValueError,
        "cache_seqlens: got device meta",
        plain(cache_seqlens=torch.zeros(2, dtype=INT, device="meta")),
    ),
    "index of int64": (
        TypeError,
        "cache_batch_idx: got dtype",
        plain(cache_batch_idx=torch.zeros(2, dtype=torch.int64)),
    ),
    "index of another batch": (
        ValueError,
        "cache_batch_idx: got shape (1,)",
        plain(cache_batch_idx=zeros(1, dtype=INT)),
    ),
    "index and table": (
        ValueError,
        "cache_batch_idx: got one with block_table",
        paged(cache_batch_idx=zeros(2, dtype=INT)),
    ),
    "padding of int64": (TypeError, "cache_leftpad: got dtype", plain(cache_leftpad=torch.zeros(2, dtype=torch.int64))),
    "padding is no tensor": (TypeError, "cache_leftpad: got int", plain(cache_leftpad=1)),
    "table of int64": (TypeError, "block_table: got dtype", paged(block_table=torch.zeros(2, 4, dtype=torch.int64))),
    "table of rank 1": (ValueError, "block_table: got shape (2,)", paged(block_table=zeros(2, dtype=INT))),
    "table of another batch": (ValueError, "block_table: got shape (3, 4)", paged(block_table=zeros(3, 4, dtype=INT))),
    "table too wide": (ValueError, "block_table: got", paged(block_table=zeros(1, 1, dtype=INT).expand(2, 2**28))),
    "cos without sin": (TypeError, "rotary_sin: got NoneType", plain(rotary_sin=None)),
    "sin without cos": (TypeError, "rotary_cos: got NoneType", plain(rotary_cos=None)),
    "rotary without k": (ValueError, "rotary_cos: got one without k", plain(k=None, v=None)),
    "rotary of float64": (
        TypeError,
        "rotary_cos: got dtype torch.float64",
        plain(rotary_cos=torch.zeros(16, 16).double()),
    ),
    "rotary of two dtypes": (TypeError, "rotary_sin: got dtype", plain(rotary_sin=zeros(16, 16))),
    "rotary of rank 3": (ValueError, "rotary_cos: got shape (16, 1, 16)", plain(rotary_cos=torch.zeros(16, 1, 16))),
    "rotary_dim of 18": (
        ValueError,
        "rotary_cos: got shape (16, 9), a rotary_dim of 18",
        plain(rotary_cos=torch.zeros(16, 9)),
    ),
    "rotary_dim of 0": (ValueError, "rotary_cos: got shape (16, 0)", plain(rotary_cos=torch.zeros(16, 0))),
    "rotary_dim of 80": (
        ValueError,
        "rotary_cos: got shape (16, 40), a rotary_dim of 80",
        plain(rotary_cos=torch.zeros(16, 40)),
    ),
    "rotary of two shapes": (ValueError, "rotary_sin: got shape (17, 16)", plain(rotary_sin=torch.zeros(17, 16))),
    "too few positions": (
        ValueError,
        "rotary_cos: got 15 positions",
        plain(rotary_cos=torch.zeros(15, 16), rotary_sin=torch.zeros(15, 16)),
    ),
    "too few positions for q": (
        ValueError,
        "rotary_cos: got 16 positions, takes the 17",
        plain(cache_seqlens=14, causal=True),
    ),
    "interleaved": (TypeError, "rotary_interleaved: got 'yes'", plain(rotary_interleaved="yes")),
    "causal": (TypeError, "causal: got None", plain(causal=None)),
    "window of one": (TypeError, "window_size: got 5", plain(window_size=5)),
    "window of floats": (TypeError, "window_size: got (1.0, 2)", plain(window_size=(1.0, 2))),
    "window of a bool": (TypeError, "window_size: got (True, 0)", plain(window_size=(True, 0))),
    "negative window": (ValueError, "window_size: got (-2, 0)", plain(window_size=(-2, 0))),
    "negated lengths": (
        ValueError,
        "cache_seqlens: got a negated view",
        plain(cache_seqlens=torch._neg_view(torch.zeros(2, dtype=INT))),
    ),
    "FP8 of half vectors": (
        ValueError,
        "v_cache: got rows of 24, takes multiples of 16",
        quantised(v_cache=zeros(2, 16, 2, 32).to(torch.float8_e4m3fn)[..., :24]),
    ),
    "softcap": (ValueError, "softcap: got -1", plain(softcap=-1.0)),
    "scale": (TypeError, "softmax_scale: got str", plain(softmax_scale="1")),
    "slopes": (ValueError, "alibi_slopes: got shape", plain(alibi_slopes=torch.zeros(3))),
    "sink": (ValueError, "learnable_sink: got shape", plain(learnable_sink=torch.zeros(3))),
    "num_splits": (ValueError, "num_splits: got -1", plain(num_splits=-1)),
    "descale of 16 bits": (
        ValueError,
        "k_descale: got one with a cache of torch.bfloat16",
        plain(k_descale=torch.ones(())),
    ),
    "descale of float64": (TypeError, "k_descale: got dtype", quantised(k_descale=torch.ones((), dtype=torch.float64))),
    "descale is a number": (TypeError, "v_descale: got float", quantised(v_descale=1.0)),
    "descale of another shape": (ValueError, "v_descale: got shape (3,)", quantised(v_descale=torch.ones(3))),
    "descale of blocks": (ValueError, "v_descale: got shape (2, 2, 2)", quantised(v_descale=torch.ones(2, 2, 2))),
    "descale elsewhere": (ValueError, "k_descale: got device meta", quantised(k_descale=torch.ones((), device="meta"))),
}


@pytest.mark.parametrize(("kind", "start", "arguments"), WRONG.values(), ids=WRONG)
def test_is_refused_by_name(kind, start, arguments):
    with pytest.raises(kind) as caught:
        flash_attn_with_kvcache(**arguments)
    message = str(caught.value)
    assert message.startswith(start), message
    assert "takes" in message
    assert "\n" not in message


RIGHT = {
    "plain": plain(),
    "paged": paged(),
    "FP8": quantised(),
    "e5m2 with descales": quantised(torch.float8_e5m2, k_descale=torch.ones(2, 2), v_descale=torch.ones(2, 1, 2)),
    "last slot": plain(cache_seqlens=14),
    "a whole cache of new tokens": plain(k=zeros(2, 16, 2, 64), v=zeros(2, 16, 2, 32), cache_seqlens=0),
    "None in a window": plain(window_size=(None, 3)),
    "strides of extents of 1": plain(
        k_cache=zeros(2, 16, 1, 72)[..., :64].as_strided((2, 16, 1, 64), (1152, 72, 9, 1)),
        v_cache=zeros(2, 16, 1, 32),
        k=zeros(2, 2, 1, 64),
        v=zeros(2, 2, 1, 32),
    ),
}


@pytest.mark.parametrize("arguments", RIGHT.values(), ids=RIGHT)
def test_is_let_through(arguments):
    with pytest.raises(Reached):
        flash_attn_with_kvcache(**arguments)


def test_append_alone_refuses_the_same():
    arguments = plain()
    del arguments["q"]
    with pytest.raises(Reached):
        append_to_kvcache(**arguments)
    for changes, kind, start in (
        ({"k": None}, TypeError, "k: got NoneType"),
        ({"k": zeros(2, 2, 2, 64, dtype=torch.float32)}, TypeError, "k: got dtype torch.float32"),
        ({"k": zeros(2, 2, 4, 64)}, ValueError, "k: got shape (2, 2, 4, 64), takes (2, 2, 2, 64): k's batch"),
        ({"k_cache": zeros(2, 16, 2, 72)}, ValueError, "k_cache: got rows of 72, takes k's head_dim"),
        ({"rotary_cos": torch.zeros(16, 16).double()}, TypeError, "rotary_cos: got dtype torch.float64, takes k's"),
        ({"v": None}, ValueError, "v: got None"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None"),
        ({"cache_seqlens": 15}, ValueError, "cache_seqlens: got 15"),
        ({"v": zeros(2, 1, 2, 32)}, ValueError, "v: got shape"),
    ):
        with pytest.raises(kind) as caught:
            append_to_kvcache(**{**arguments, **changes})
        assert str(caught.value).startswith(start)


GRADED = {
    **{name: plain() for name in ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")},
    "learnable_sink": plain(learnable_sink=torch.zeros(HEADS)),
    "alibi_slopes": plain(alibi_slopes=torch.zeros(HEADS)),
    "k_descale": quantised(k_descale=torch.ones(())),
    "v_descale": quantised(v_descale=torch.ones(())),
}


@pytest.mark.parametrize("name", GRADED)
def test_a_gradient_through_any_argument_is_refused_by_name(name):
    given = GRADED[name][name]
    for call in calls_with(name):
        with pytest.raises(NotImplementedError, match=f"^{name}: got a tensor that requires grad, takes"):
            call(**{name: given.detach().clone().requires_grad_()})
        with torch.no_grad(), pytest.raises(Reached):
            call(**{name: given.detach().clone().requires_grad_()})
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(given.float(), torch.ones(given.shape)).to(given.dtype)
            with pytest.raises(NotImplementedError, match=f"^{name}: got a tensor with a forward-mode tangent, takes"):
                call(**{name: dual})


def calls_with(name):
    """The function, the operator that its graph holds, and the append alone if it has the argument."""
    arguments = GRADED[name]

    def operator(**changes):
        given = {**arguments, **changes}
        positional = [given.pop(name) for name in ("q", "k_cache", "v_cache", "k", "v")]
        return torch.ops.fa2_cute.with_kvcache.default(*positional, **given)

    def appending(**changes):
        given = {**arguments, **changes}
        del given["q"]
        return append_to_kvcache(**given)

    yield lambda **changes: flash_attn_with_kvcache(**{**arguments, **changes})
    yield operator
    if name not in ("q", "learnable_sink", "alibi_slopes"):
        yield appending


def test_an_append_of_more_than_31_bits_count():
    """Strides of 0: shapes alone are large. The kernel counts rows (token x head), and blocks, in 32 bits."""

    def wide(tokens, heads):
        return zeros(8).expand(1, tokens, heads, 8)

    tokens = 2**23
    given = {"k_cache": wide(tokens, 256), "v_cache": wide(tokens, 256), "cache_seqlens": zeros(1, dtype=INT)}
    with pytest.raises(ValueError, match=r"^k: got shape \(1, 8388608, 256, 8\), takes fewer tokens and heads"):
        append_to_kvcache(k=wide(tokens, 256), v=wide(tokens, 256), **given)
    fewer = tokens - 1
    assert fewer * 256 + append_spec.THREADS <= MAX_INT32
    with pytest.raises(Reached):
        append_to_kvcache(k=wide(fewer, 256), v=wide(fewer, 256), **given)


def test_lazily_negated_factors_are_negated_before_a_kernel_reads_them():
    """A kernel reads memory, where a negated view has the numbers of its base."""
    q, heads = plain()["q"], Heads(BATCH, HEADS)
    pages = paged()["k_cache"].to(torch.float8_e4m3fn)

    def normalised(x):
        return descale.normalise("k_descale", x, pages, batch=BATCH, paged=True).factors

    for x, taken in (
        (torch.rand(HEADS), lambda x: checks.slopes_of(x, heads, q)),
        (torch.rand(HEADS), lambda x: checks.sink_of(x, heads, q)),
        (torch.rand(BATCH, KV_HEADS), normalised),
        (torch.rand(9, 1, KV_HEADS), normalised),
        (torch.rand(LENGTH, 16), append._angles),
    ):
        got = taken(torch._neg_view(x))
        assert not got.is_neg()
        assert torch.equal(got, taken(-x))
        assert not torch.equal(got, taken(x))
