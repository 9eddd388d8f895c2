"""On a real GPU: the cache's kernels against the judge, streams, graphs, and memory beside the cache."""

import pytest
import torch
from hypothesis import given, settings
from kvcases import CALLS, SETTINGS, Case, Setting, calls, cases, make
from test_append import check as check_append
from test_examples import load

from fa2_cute import reference
from fa2_cute.append import append
from fa2_cute.fuzz.cache_judging import check_cache, run_append
from fa2_cute.kvcache import flash_attn_with_kvcache
from fa2_cute.serving import PagedKVCache

pytestmark = pytest.mark.gpu


@given(cases())
def test_appends(case):
    check_append(case, "cuda")


@settings(max_examples=25)
@given(calls())
def test_appends_and_attends(call):
    check_cache(call, "cuda")


@pytest.mark.parametrize(("setting", "options"), CALLS)
def test_longer_caches(setting, options):
    length, width = (16, 40) if setting.paged else (640, 1)
    seqlens = (0, 300, 637, 5, 639, 700)
    shape = {"new_len": 3, "query_len": 3, "kv_heads": 2, "length": length, "width": width}
    check_cache(Case(setting, seqlens, **shape, options=options), "cuda")


def test_a_prompt_of_many_blocks():
    options = CALLS[4][1]
    shape = {"new_len": 700, "query_len": 700, "kv_heads": 4, "length": 16, "width": 48}
    check_append(Case(SETTINGS[2], (3, 0), **shape, options=options), "cuda")
    check_cache(Case(SETTINGS[2], (3, 0), new_len=300, query_len=300, length=16, width=20, options=options), "cuda")


def test_writes_nothing_beside_the_cache():
    """Lengths and tables that are garbage; the cache lies between guards."""
    setting = Setting(paged=True)
    t = make(Case(setting, (0, 3, 5), length=4, width=2), "cuda")
    guarded = []
    for cache in (t.cache.k, t.cache.v):
        flat = torch.full((cache.numel() + 2 * 2**16,), 3.0, dtype=cache.dtype, device="cuda")
        guarded.append(flat)
    views = [flat[2**16 : -(2**16)].view_as(cache) for flat, cache in zip(guarded, (t.cache.k, t.cache.v), strict=True)]
    big = 2**31 - 1
    seqlens = torch.tensor([big, -big, 7], dtype=torch.int32, device="cuda")
    last = len(views[0]) - 1
    table = torch.tensor([[big, -1], [last + 1, 10**6], [-big, last]], dtype=torch.int32, device="cuda")
    flash_attn_with_kvcache(t.q, *views, t.k, t.v, cache_seqlens=seqlens, block_table=table)
    for flat, view, new in zip(guarded, views, (t.k, t.v), strict=True):
        assert torch.equal(view[last, 3], new[2, 0])
        view[last, 3] = 3.0
        assert (flat == 3.0).all()


def test_a_cache_of_more_than_2_to_the_31_elements():
    rows, length, dim = 3, 2**25, 64
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free device memory")
    caches = [torch.empty((rows, length, 1, dim), dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2)]
    k = torch.randn(2, 2, 1, dim, device="cuda").bfloat16()
    seqlens = torch.tensor([length - 1, length // 2], dtype=torch.int32, device="cuda")
    index = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
    append(k, k, *caches, seqlens, capacity=length, cache_batch_idx=index)
    for cache in caches:
        assert torch.equal(cache[0, -1, 0].float(), k[0, 0, 0].to(cache.dtype).float())
        assert torch.equal(cache[2, length // 2 : length // 2 + 2].float(), k[1].to(cache.dtype).float())


def test_a_graph_of_a_step_is_replayed_with_other_lengths_and_tables():
    """Captured once; lengths grow and pages move between replays, and each replay gives the bits of a call."""
    case = Case(SETTINGS[2], (2, 30, 61), new_len=1, kv_heads=2, length=16, width=5)
    t, twin = make(case, "cuda"), make(case, "cuda")

    def step(x):
        return flash_attn_with_kvcache(
            x.q,
            x.cache.k,
            x.cache.v,
            x.k,
            x.v,
            rotary_cos=x.cos,
            rotary_sin=x.sin,
            cache_seqlens=x.seqlens,
            block_table=x.cache.block_table,
            causal=True,
            num_splits=2,
        )

    table = torch.randperm(17, device="cuda")[:15].to(torch.int32).view(3, 5)
    for x in (t, twin):
        x.cache.block_table.copy_(table)
        for cache in (x.cache.k, x.cache.v):  # any page may come to be anybody's
            cache.copy_(torch.linspace(-1, 1, cache.numel(), device="cuda").view_as(cache))
    step(make(case, "cuda"))  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(t)
    for i in range(4):
        new = torch.randn_like(t.k)
        for x in (t, twin):
            x.seqlens.add_(i)
            x.k.copy_(new)
            if i == 2:
                x.cache.block_table.copy_(table.flip(0))
        graph.replay()
        assert torch.equal(out, step(twin))
        assert torch.equal(t.cache.k.view(torch.uint8), twin.cache.k.view(torch.uint8))


def test_never_synchronises_and_runs_on_the_current_stream():
    case = Case(SETTINGS[3], (2, 9, 11), new_len=2, query_len=2, kv_heads=2, length=16, width=2)
    t, twin = make(case, "cuda"), make(case, "cuda")
    expected = [x.clone() for x in run_append(case, twin)]
    attend = {"cache_seqlens": expected[0], "block_table": twin.cache.block_table}
    flash_attn_with_kvcache(twin.q, twin.cache.k, twin.cache.v, **attend)  # compile
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)
            done = torch.cuda.Event()
            got = run_append(case, t)
            flash_attn_with_kvcache(t.q, t.cache.k, t.cache.v, cache_seqlens=got[0], block_table=t.cache.block_table)
            done.record()
            assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(t.cache.k.view(torch.uint8), twin.cache.k.view(torch.uint8))


def test_serves_requests():
    example = load("continuous_batching")
    layer = example.Layer(heads=8, kv_heads=2, device="cuda")
    cache = PagedKVCache(60, 16, layer.kv_heads, layer.head_dim, dtype=layer.dtype, device="cuda")
    requests = example.random_requests(20, 0)
    server = example.Server(layer, cache, list(requests))
    server.run()
    assert cache.free_pages == cache.pages
    for request in requests:
        length = layer.system_prompt + request.prompt + request.answer
        expected = layer.exact(request.number, length)[0, layer.system_prompt :]
        got = torch.stack([server.outputs[request.number, p] for p in range(layer.system_prompt, length)])
        assert reference.error(got, expected).max < 2**-6
