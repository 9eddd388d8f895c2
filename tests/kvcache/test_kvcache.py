"""flash_attn_with_kvcache in the emulator against the judge: every way to append, find slots and attend."""

import inspect

import pytest
import torch
from hypothesis import example, given, settings
from kvcases import CALLS, SETTINGS, Case, Options, Setting, calls, make

from fa2_cute import reference
from fa2_cute.fuzz.bounds import bounds
from fa2_cute.fuzz.cache_judging import COMBINING, check_cache, run_append
from fa2_cute.fuzz.judging import require_within
from fa2_cute.kvcache import append_to_kvcache, flash_attn_with_kvcache


@settings(max_examples=25)
@given(calls())
@example(Case(SETTINGS[0], (0,), new_len=0))
@example(Case(SETTINGS[2], (0, 7), new_len=1, query_len=2, length=1, width=8, options=CALLS[3][1]))
@example(Case(SETTINGS[2], (0,), query_len=2, length=1, width=1, options=CALLS[4][1]))  # more left padding than slots
def test_appends_and_attends(call):
    check_cache(call)


@pytest.mark.parametrize(("setting", "options"), CALLS)
def test_every_setting_with_its_options(setting, options):
    shape = {"new_len": 3, "query_len": 2, "kv_heads": 2, "length": 16, "width": 2}
    check_cache(Case(setting, (0, 5, 9, 40), **shape, options=options, missing=True))


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

    options = Options(num_splits=2)
    check_cache(Case(SETTINGS[0], (3,), new_len=1, length=32, options=options))
    before = jit.kernels()
    check_cache(Case(SETTINGS[0], (3, 9, 90), new_len=1, kv_heads=3, length=130, options=options))
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
