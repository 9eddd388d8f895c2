"""flash_attn_with_kvcache in the emulator against the judge: every way to append, find slots and attend."""

import inspect
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvcases import SETTINGS, Case, Setting, cases, make
from test_append import run as run_append

from fa2_cute import reference
from fa2_cute.fuzz.bounds import FP32, bounds
from fa2_cute.fuzz.judging import require_within
from fa2_cute.kvcache import append_to_kvcache, flash_attn_with_kvcache

# Weights and sums of splits are combined once more: two exponentials, a product, a sum and a quotient in float32.
COMBINING = 16 * FP32


@dataclass(frozen=True)
class Options:
    """What the attention is asked for; the flags are compiled in, so tests share a few of them."""

    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    leftpad: bool = False
    num_splits: int = 0


# Each setting with options, so that every one meets pages, FP8 or a rotation somewhere.
CALLS = (
    (SETTINGS[0], Options()),
    (SETTINGS[0], Options(causal=True, leftpad=True)),
    (SETTINGS[1], Options(causal=True, sink=True)),
    (SETTINGS[2], Options(left=5, right=1)),
    (SETTINGS[2], Options(causal=True, alibi=True, leftpad=True)),
    (SETTINGS[3], Options(causal=True)),
    (SETTINGS[4], Options(softcap=3.0)),
    (SETTINGS[5], Options()),
)


def arguments(case, t, options, generator):
    """Keyword arguments of ``flash_attn_with_kvcache`` for the attention alone, and the same for the judge."""
    heads = case.kv_heads * case.group
    slopes = torch.rand(heads, generator=generator) if options.alibi else None
    sink = torch.randn(heads, generator=generator) if options.sink else None
    pad = torch.randint(-1, case.capacity + 2, (case.batch,), generator=generator).to(torch.int32)
    device = t.q.device
    slopes, sink, pad = (x if x is None else x.to(device) for x in (slopes, sink, pad))
    ours = {
        "causal": options.causal,
        "window_size": (options.left, options.right),
        "softcap": options.softcap,
        "alibi_slopes": slopes,
        "learnable_sink": sink,
        "cache_leftpad": pad if options.leftpad else None,
        "num_splits": options.num_splits,
    }
    left, right = (None if side < 0 else side for side in (options.left, options.right))
    judges = {
        "window": (left, 0 if options.causal else right),
        "softcap": options.softcap,
        "alibi_slopes": slopes,
        "sink": sink,
    }
    return ours, judges, pad if options.leftpad else torch.zeros_like(pad)


def call(t, case, **options):
    """The function on the tensors of a case, all options by name: (out, lse)."""
    return flash_attn_with_kvcache(
        t.q,
        t.cache.k,
        t.cache.v,
        k=t.k,
        v=t.v,
        rotary_cos=t.cos,
        rotary_sin=t.sin,
        cache_seqlens=t.seqlens,
        cache_batch_idx=t.cache.cache_batch_idx,
        block_table=t.cache.block_table,
        rotary_interleaved=case.setting.interleaved,
        return_softmax_lse=True,
        k_descale=t.cache.k_descale,
        v_descale=t.cache.v_descale,
        **options,
    )


def judge(q, cache, lengths, pad, out, lse, **options):
    """Raise unless out and lse are the attention of q over the first ``lengths`` tokens of a cache, within bounds."""
    slopes = options.pop("alibi_slopes", None)
    for b in range(q.shape[0]):
        end = min(max(int(lengths[b]), 0), cache.capacity)
        k, v, exist = cache.gather(b, range(min(max(int(pad[b]), 0), end), end))
        mask = None if bool(exist.all()) else exist[None, None, None, :]
        chosen = {**options, "alibi_slopes": slopes, "mask": mask}
        one = (q[b : b + 1], k[None], v[None])
        expected = reference.attention(*one, **chosen)
        out_bound, lse_bound = bounds(*one, **chosen)
        out_bound = out_bound + COMBINING * v.abs().amax().item() if len(v) else out_bound
        require_within(out[b : b + 1], expected[0], out_bound, f"out of sequence {b}")
        require_within(lse[b : b + 1], expected[1], lse_bound + COMBINING, f"lse of sequence {b}")


def check(case, options, device="cpu"):
    case = replace(case, ordered=options.causal or options.left >= 0 or options.right >= 0)
    generator = torch.Generator().manual_seed(case.seed)
    twin, t = make(case, device), make(case, device)
    lengths, rotated = run_append(case, twin)
    ours, judges, pad = arguments(case, t, options, generator)
    out, lse = call(t, case, **ours)
    assert torch.equal(t.cache.k.view(torch.uint8), twin.cache.k.view(torch.uint8))
    assert torch.equal(t.cache.v.view(torch.uint8), twin.cache.v.view(torch.uint8))
    assert out.shape == (*t.q.shape[:3], case.setting.value_dim)
    assert out.dtype == t.q.dtype
    assert lse.dtype == torch.float32
    q = (t.q if rotated is None else rotated).cpu()
    judges = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in judges.items()}
    judge(q, t.to("cpu").cache, lengths, pad, out.cpu(), lse.cpu(), **judges)


@st.composite
def calls(draw):
    setting, options = draw(st.sampled_from(CALLS))
    case = draw(cases((setting,)))
    case = replace(case, new_len=min(case.new_len, case.capacity))  # more is refused
    if options.causal or options.left >= 0 or options.right >= 0:  # one query is another kernel: see the examples
        case = replace(case, query_len=max(case.query_len, 2))
    return case, replace(options, num_splits=draw(st.sampled_from([0, 0, 1, 2, 3])))


@settings(max_examples=25)
@given(calls())
@example((Case(SETTINGS[0], (0,), new_len=0), Options()))
@example((Case(SETTINGS[2], (0, 7), new_len=1, query_len=2, length=1, width=8), CALLS[3][1]))
@example((Case(SETTINGS[2], (0,), query_len=2, length=1, width=1), CALLS[4][1]))  # more left padding than slots
def test_appends_and_attends(call):
    check(*call)


@pytest.mark.parametrize(("setting", "options"), CALLS)
def test_every_setting_with_its_options(setting, options):
    check(Case(setting, (0, 5, 9, 40), new_len=3, query_len=2, kv_heads=2, length=16, width=2, missing=True), options)


def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives():
    """Prefill in chunks against the cache: each chunk's rows are within the bounds of attention over the whole."""
    setting, length = SETTINGS[2], 70
    k, v = torch.randn(1, length, 1, 128).bfloat16(), torch.randn(1, length, 1, 64).bfloat16()
    q = torch.randn(1, length, 2, 128).bfloat16()
    t = make(Case(setting, (0,), new_len=1, length=16, width=5))
    table = torch.arange(5, dtype=torch.int32).flip(0)[None]
    outs, start = [], 0
    for size in (33, 1, 36):
        chunk = slice(start, start + size)
        seqlens = torch.tensor([start], dtype=torch.int32)
        new = (q[:, chunk], t.cache.k, t.cache.v, k[:, chunk], v[:, chunk])
        outs.append(flash_attn_with_kvcache(*new, cache_seqlens=seqlens, block_table=table, causal=True))
        start += size
    expected, _ = reference.attention(q, k, v, causal=True)
    out_bound, _ = bounds(q, k, v, causal=True)
    require_within(torch.cat(outs, dim=1), expected, out_bound + COMBINING * v.abs().max().item(), "out of the chunks")


def test_lengths_as_an_int_or_not_at_all():
    t = make(Case(SETTINGS[0], (8, 8), new_len=0))
    given_ = torch.tensor([8, 8], dtype=torch.int32)
    expected = flash_attn_with_kvcache(t.q, t.cache.k, t.cache.v, cache_seqlens=given_)
    assert torch.equal(flash_attn_with_kvcache(t.q, t.cache.k, t.cache.v, cache_seqlens=8), expected)
    assert torch.equal(flash_attn_with_kvcache(t.q, t.cache.k, t.cache.v), expected)


def test_a_fixed_number_of_splits_gives_the_same_bits_in_any_batch():
    t = make(Case(SETTINGS[0], (40, 3, 64), new_len=0, length=64))
    both = flash_attn_with_kvcache(t.q, t.cache.k, t.cache.v, cache_seqlens=t.seqlens, num_splits=3)
    for b in range(3):
        row = torch.tensor([b], dtype=torch.int32)
        alone = flash_attn_with_kvcache(
            t.q[b : b + 1],
            t.cache.k,
            t.cache.v,
            cache_seqlens=t.seqlens[b : b + 1],
            cache_batch_idx=row,
            num_splits=3,
        )
        assert torch.equal(alone[0], both[b])


def test_appending_alone_writes_the_same():
    case = Case(SETTINGS[3], (2, 11), new_len=3, kv_heads=2, length=8, width=2)
    t, twin = make(case), make(case)
    run_append(case, twin)
    append_to_kvcache(
        t.cache.k,
        t.cache.v,
        t.k,
        t.v,
        t.seqlens,
        rotary_cos=t.cos,
        rotary_sin=t.sin,
        rotary_interleaved=case.setting.interleaved,
        block_table=t.cache.block_table,
        k_descale=t.cache.k_descale,
        v_descale=t.cache.v_descale,
    )
    assert torch.equal(t.cache.k.view(torch.uint8), twin.cache.k.view(torch.uint8))
    assert torch.equal(t.cache.v.view(torch.uint8), twin.cache.v.view(torch.uint8))


def test_names_order_and_defaults_are_those_of_flash_attn():
    parameters = list(inspect.signature(flash_attn_with_kvcache).parameters.values())
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[:3] == [(name, inspect.Parameter.empty) for name in ("q", "k_cache", "v_cache")]
    assert positional[3:] == [
        ("k", None),
        ("v", None),
        ("rotary_cos", None),
        ("rotary_sin", None),
        ("cache_seqlens", None),
        ("cache_batch_idx", None),
        ("cache_leftpad", None),
        ("block_table", None),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("rotary_interleaved", True),
        ("alibi_slopes", None),
        ("num_splits", 0),
        ("return_softmax_lse", False),
    ]
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["k_descale", "v_descale", "learnable_sink"]


def test_no_kernel_is_compiled_again_for_other_lengths_and_batches():
    from fa2_cute import jit

    check(Case(SETTINGS[0], (3,), new_len=1, length=32), Options(num_splits=2))
    before = jit.kernels()
    check(Case(SETTINGS[0], (3, 9, 90), new_len=1, kv_heads=3, length=130), Options(num_splits=2))
    assert jit.kernels() == before


def test_a_cache_beside_other_things_in_one_buffer():
    """Keys and values interleaved in one allocation, as engines keep them: strides are not those of a tensor alone."""
    both = torch.full((3, 2, 8, 1, 64), torch.nan).bfloat16()  # (rows, k or v, length, kv_heads, dim)
    t = make(Case(Setting(), (0, 4, 7)))
    rows = t.cache.k[:3], t.cache.v[:3]
    for i, cache in enumerate(rows):
        both[:, i] = cache
    expected = flash_attn_with_kvcache(t.q, *(x.clone() for x in rows), t.k, t.v, cache_seqlens=t.seqlens)
    got = flash_attn_with_kvcache(t.q, both[:, 0], both[:, 1], t.k, t.v, cache_seqlens=t.seqlens)
    assert torch.equal(got, expected)
