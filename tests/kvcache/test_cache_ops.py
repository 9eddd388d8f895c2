"""The operators that torch's tracers see: their schemas, torch.compile without breaks, and what is refused."""

import pytest
import torch
from kvcases import SETTINGS, Case, make

from fa2_cute.kvcache import append_to_kvcache, flash_attn_with_kvcache

CASE = Case(SETTINGS[2], (2, 9), new_len=1, length=8, width=2)


def arguments(t):
    """(positional arguments of the operators, options) of a causal call."""
    options = {
        "rotary_cos": t.cos,
        "rotary_sin": t.sin,
        "cache_seqlens": t.seqlens,
        "block_table": t.cache.block_table,
        "rotary_interleaved": False,
        "causal": True,
    }
    return (t.q, t.cache.k.nan_to_num(), t.cache.v.nan_to_num(), t.k, t.v), options


def test_the_operators_keep_what_their_schemas_say():
    positional, options = arguments(make(CASE))
    torch.library.opcheck(torch.ops.fa2_cute.with_kvcache.default, positional, options)
    del options["rotary_cos"], options["rotary_sin"]
    torch.library.opcheck(torch.ops.fa2_cute.attend_kvcache.default, positional[:3], options)


def test_compiles_without_a_break_and_changes_the_caches():
    (q, k_cache, v_cache, k, v), options = arguments(make(CASE))
    twin_k, twin_v = k_cache.clone(), v_cache.clone()
    compiled = torch.compile(lambda *x, **o: flash_attn_with_kvcache(*x, **o) * 2, fullgraph=True, dynamic=True)
    expected = flash_attn_with_kvcache(q, twin_k, twin_v, k, v, **options) * 2
    got = compiled(q, k_cache, v_cache, k, v, **options)
    assert torch.equal(got, expected)
    assert torch.equal(k_cache, twin_k)
    assert torch.equal(v_cache, twin_v)
    assert not torch.equal(k_cache, arguments(make(CASE))[0][1])
    again = compiled(q[:1], k_cache, v_cache, None, None, cache_seqlens=5, block_table=options["block_table"][:1])
    twin = flash_attn_with_kvcache(q[:1], twin_k, twin_v, cache_seqlens=5, block_table=options["block_table"][:1])
    assert torch.equal(again, twin * 2)


def test_compiles_an_append_alone():
    (_, k_cache, v_cache, k, v), options = arguments(make(CASE))
    twin_k, twin_v = k_cache.clone(), v_cache.clone()
    chosen = {name: options[name] for name in ("cache_seqlens", "block_table")}
    append_to_kvcache(twin_k, twin_v, k, v, **chosen)
    torch.compile(append_to_kvcache, fullgraph=True, backend="aot_eager")(k_cache, v_cache, k, v, **chosen)
    assert torch.equal(k_cache, twin_k)
    assert torch.equal(v_cache, twin_v)


def test_gradients_are_refused_by_the_operators_too():
    positional, options = arguments(make(CASE))
    positional = (positional[0].requires_grad_(), *positional[1:])
    with pytest.raises(NotImplementedError, match="requires grad"):
        torch.ops.fa2_cute.with_kvcache.default(*positional, **options)
    with torch.no_grad():
        torch.ops.fa2_cute.with_kvcache.default(*positional, **options)


def test_the_append_alone_keeps_what_its_schema_says():
    (_, k_cache, v_cache, k, v), options = arguments(make(CASE))
    del options["causal"]
    torch.library.opcheck(torch.ops.fa2_cute.append_kvcache.default, (k_cache, v_cache, k, v), options)


def test_autocast_casts_queries_and_new_tokens_and_no_cache():
    (q, k_cache, v_cache, k, v), options = arguments(make(CASE))
    twins = k_cache.clone(), v_cache.clone()
    expected = flash_attn_with_kvcache(q, *twins, k, v, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flash_attn_with_kvcache(q.float(), k_cache, v_cache, k.float(), v.float(), **options)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)
    assert torch.equal(k_cache, twins[0])
    del options["causal"]
    for k_twin, v_twin in (twins, (k_cache, v_cache)):
        k_twin.zero_(), v_twin.zero_()
    append_to_kvcache(*twins, k, v, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        append_to_kvcache(k_cache, v_cache, k.float(), v.float(), **options)
    assert torch.equal(k_cache, twins[0])
    assert torch.equal(v_cache, twins[1])
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(TypeError, match=r"^k_cache: got dtype torch.bfloat16, takes q's dtype torch.float16"),
    ):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
