"""Decoding over contiguous and paged caches in the emulator: drawn calls, and every option by name."""

import dataclasses
import itertools
import math

import pytest
import torch
from decode_cases import PLAIN, SETTINGS, Case, Setting, cases, judge, judge_sequence, make, run
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_cute import emulation, emulator, jit
from fa2_cute.arch import TARGET
from fa2_cute.decode import decode, prepare
from fa2_cute.resources import usage


@given(cases())
def test_any_call(case):
    tensors = make(case)
    judge(case, tensors, *run(case, tensors))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_each_setting_with_several_splits(setting):
    case = Case(
        setting,
        seqlens=(300, 64, 0, 1),
        query_len=7 if setting.wide else 3,
        kv_heads=2,
        group=5,
        length=16 if setting.paged else 320,
        width=20 if setting.paged else 1,
        left=100 if setting.window else None,
        right=0 if setting.window else None,
        splits=3,
    )
    tensors = make(case)
    judge(case, tensors, *run(case, tensors))


@pytest.mark.parametrize(
    ("cache_dtype", "value_dim"),
    [*(("bfloat16", dim) for dim in (136, 160, 192, 208)), ("float8_e4m3fn", 144), ("float8_e4m3fn", 192)],
)
def test_values_that_two_warps_share_unevenly(cache_dtype, value_dim):
    """Columns that are no whole lines of the swizzle for each of the two warps: padded, or it does not compile."""
    case = Case(Setting(cache_dtype=cache_dtype, head_dim=64, value_dim=value_dim), (70, 33), length=70, splits=1)
    tensors = make(case)
    judge(case, tensors, *run(case, tensors))


def same(a, b) -> bool:
    """The same bits, NaN included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 3))
def test_a_sequence_gives_the_same_bits_in_any_batch(seqlen, splits, place):
    alone = Case(PLAIN, (seqlen,), length=300, splits=splits)
    t = make(alone)
    out, lse = run(alone, t)
    others = make(Case(PLAIN, (300, 0, 17, 5), length=300, seed=1))
    others.q[place], others.seqlens[place] = t.q[0], seqlen
    others.cache.k[place], others.cache.v[place] = t.cache.k[0], t.cache.v[0]
    outs, lses = run(alone, others)
    assert same(outs[place], out[0])
    assert same(lses[place], lse[0])


@settings(max_examples=12)
@given(st.sampled_from([1, 3, 15, 50]), st.integers(0, 300), st.integers(0, 9))
def test_pages_of_any_size_give_the_bits_of_a_contiguous_cache(page_size, seqlen, seed):
    case = Case(PLAIN, (seqlen, 300), length=300, splits=2, seed=seed)
    t = make(case)
    out, lse = run(case, t)
    pages = 2 * (300 // page_size)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    scattered = [torch.empty_like(x[:2]).reshape(pages, page_size, *x.shape[2:]) for x in (t.cache.k, t.cache.v)]
    for pool, x in zip(scattered, (t.cache.k, t.cache.v), strict=True):
        pool[order] = x[:2].reshape(pool.shape)
    table = order.to(torch.int32).view(2, -1)
    paged_out, paged_lse = decode(t.q, *scattered, cache_seqlens=t.seqlens, block_table=table, num_splits=2)
    assert same(paged_out, out)
    assert same(paged_lse, lse)


PACKED = Setting(head_dim=64, value_dim=64, paged=True, window=True, sink=True)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([1, 3]),
    st.sampled_from([None, 1, 20]),
)
@settings(max_examples=15)
def test_queries_of_different_lengths(lengths, before, after, splits, max_seqlen_q):
    """Prefill, chunks and decoding in one launch; rows of no sequence are defined."""
    queries, seqlens = zip(*lengths, strict=True)
    case = Case(PACKED, seqlens, kv_heads=2, group=3, length=16, width=5, right=0, splits=splits)
    t = make(case)
    starts = [before + sum(queries[:b]) for b in range(len(queries) + 1)]
    rows = starts[-1] + after
    q = torch.randn(rows, 6, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
    cu_seqlens_q = torch.tensor(starts, dtype=torch.int32)
    out, lse = run(case, t, q=q, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        judge_sequence(case, t, b, q[None, start:end], out[None, start:end], lse[None, :, start:end])
    for rest in (slice(0, before), slice(starts[-1], rows)):
        assert (out[rest] == 0).all()
        assert (lse[:, rest] == t.sink[:, None]).all()


def test_no_kernel_is_compiled_again_for_other_lengths_batches_and_pages():
    def call(batch, length, heads):
        case = Case(SETTINGS[3], (length,) * batch, kv_heads=heads, length=8, width=-(-length // 8) or 1, splits=0)
        run(case, make(case))

    call(2, 200, 1)
    before = jit.kernels()
    for batch, length, heads in ((1, 1, 3), (5, 64, 2), (3, 500, 1)):
        call(batch, length, heads)
    assert jit.kernels() == before


def test_a_cache_of_more_than_2_to_the_31_elements():
    """Only the pages that are touched take memory."""
    page_size, dim = 2**15, 128
    pages = 2**31 // (page_size * dim) + 2
    pool = [torch.empty((pages, page_size, 1, dim), dtype=torch.bfloat16) for _ in range(2)]
    assert pool[0].numel() > 2**31
    last = pages - 1
    keys, values = (torch.randn(100, 1, dim, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    pool[0][last, :100], pool[1][last, :100] = keys, values
    q = torch.randn(1, 1, 4, dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    table, lengths = torch.tensor([[last]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    out, lse = decode(q, *pool, cache_seqlens=lengths, block_table=table, num_splits=1)
    near, near_lse = decode(q, keys[None], values[None], cache_seqlens=lengths, num_splits=1)
    assert same(out, near)
    assert same(lse, near_lse)


def test_nan_in_a_key_that_is_seen_makes_nan_of_its_rows_alone():
    case = Case(PLAIN, (200, 200), kv_heads=2, length=200, splits=3)
    t = make(case)
    clean, _ = run(case, t)
    t.cache.k[1, 120, 1] = torch.nan
    out, lse = run(case, t)
    assert out[1, 0, 4:].isnan().all()
    assert lse[1, 4:].isnan().all()
    assert same(out[0], clean[0])
    assert same(out[1, 0, :4].contiguous(), clean[1, 0, :4].contiguous())


@pytest.mark.parametrize("splits", [1, 2])
def test_without_lengths_every_slot_is_a_key(splits):
    case = Case(PLAIN, (130, 130), length=130, splits=splits)
    t = make(case)
    out, lse = run(case, t)
    whole = [x[:2] for x in (t.cache.k, t.cache.v)]
    plan = prepare(t.q, *whole, num_splits=splits, every_slot=True)
    got, got_lse = plan.run(t.q)
    assert same(got, out)
    assert same(got_lse, lse)
    assert same(decode(t.q, *whole, num_splits=splits)[0], out)
    with pytest.raises(TypeError, match="cache_seqlens: got Tensor, takes None"):
        plan.run(t.q, t.seqlens)
    with pytest.raises(TypeError, match="cache_seqlens: got NoneType, takes a torch"):
        prepare(t.q, *whole).run(t.q)


def test_a_plan_runs_as_often_as_wanted():
    case = Case(PLAIN, (100, 30), length=128)
    t = make(case)
    plan = prepare(t.q, t.cache.k, t.cache.v)
    for seqlens in ((100, 30), (5, 0)):
        shorter = dataclasses.replace(case, seqlens=seqlens)
        judge(shorter, t, *plan.run(t.q, torch.tensor(seqlens, dtype=torch.int32)))


@pytest.mark.parametrize("shape", [(0, 1, 4), (2, 0, 4), (2, 1, 0)], ids=str)
def test_calls_without_a_query_give_empty_outputs(shape):
    q = torch.zeros((*shape, 64), dtype=torch.bfloat16)
    cache = torch.zeros((max(shape[0], 1), 8, 1, 64), dtype=torch.bfloat16)
    out, lse = decode(q, cache, cache, cache_seqlens=torch.zeros(shape[0], dtype=torch.int32))
    assert out.shape == q.shape
    assert lse.shape == (shape[0], shape[2], shape[1])


@pytest.mark.parametrize("sink", [None, 0.5])
def test_a_cache_without_slots(sink):
    q, cache = torch.zeros((2, 1, 4, 64), dtype=torch.bfloat16), torch.zeros((2, 0, 1, 64), dtype=torch.bfloat16)
    sinks = None if sink is None else torch.full((4,), sink)
    out, lse = decode(q, cache, cache, cache_seqlens=torch.ones(2, dtype=torch.int32), sink=sinks)
    assert (out == 0).all()
    assert (lse == (-math.inf if sink is None else sink)).all()


def planned(setting):
    """A plan, and what it launches, of the kernels that the other tests compile anyway."""
    case = Case(setting, (1,), query_len=7 if setting.wide else 3, group=5, splits=2)
    if setting.window:
        case = dataclasses.replace(case, right=0)
    t = make(case)
    plan = prepare(
        t.q, t.cache.k, t.cache.v, alibi_slopes=t.slopes, sink=t.sink, block_table=t.cache.block_table,
        cache_batch_idx=t.cache.cache_batch_idx, cache_leftpad=t.leftpad, k_descale=t.cache.k_descale,
        v_descale=t.cache.v_descale, num_splits=case.splits, **case.options,
    )  # fmt: skip
    out = t.q.new_empty((*t.q.shape[:3], setting.value_dim))
    return plan.launches(t.q, t.seqlens, out, torch.empty(1, t.q.shape[2], t.q.shape[1]))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_nothing_spills_and_all_fits(setting):
    for launch in planned(setting):
        found = usage(jit.compiled(launch.spec, TARGET))
        assert found.stack_bytes == found.local_bytes == 0
        assert found.shared_bytes <= TARGET.shared_block_bytes
        assert found.blocks_per_sm >= 1


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_launcher_for_gpus_takes_what_it_is_given(setting):
    """All but the device: number and dtypes of arguments, strides and alignment are checked before that."""
    for launch in planned(setting):
        with pytest.raises(Exception, match="device_type"):
            jit.compiled(launch.spec, TARGET).function(*launch.values)


@pytest.mark.parametrize("schedule", ["reversed", 1, 2])
def test_warps_in_any_order_give_the_same_bits_without_a_hazard(schedule):
    """The main loop has no barrier of the block: nothing may depend on which warp is ahead."""
    case = Case(PLAIN, (200, 77), length=208, splits=2)
    t = make(case)
    expected, expected_lse = run(case, t)
    out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    for launch in prepare(t.q, t.cache.k, t.cache.v, num_splits=2).launches(t.q, t.seqlens, out, lse):
        kernel = jit.compiled(launch.spec, TARGET)
        emulator.launch(
            emulator.load(kernel.ptx).kernel(),
            grid=launch.grid,
            block=launch.spec.threads,
            args=emulation.arguments(launch.spec, launch.values),
            shared_bytes=launch.spec.shared_bytes,
            schedule=schedule,
        )
    assert same(out, expected)
    assert same(lse, expected_lse)


def test_vectors_and_tables_of_any_strides():
    setting = SETTINGS[3]
    case = Case(setting, (100,), length=16, width=7, splits=2)
    t = make(case)
    out, lse = run(case, t)
    # One element, two apart from the next; rows of a table that is wider, backwards in memory.
    t.seqlens = torch.tensor([100, 7], dtype=torch.int32).as_strided((1,), (2,))
    t.leftpad = torch.stack((t.leftpad, t.leftpad + 3), dim=1)[:, 0]
    t.cache = dataclasses.replace(t.cache, block_table=t.cache.block_table.T.contiguous().T)
    again, lse_again = run(case, t)
    assert same(again, out)
    assert same(lse_again, lse)


def test_left_padding_past_the_last_key_of_a_full_table():
    """Past the table too, in the tile of keys that the last one is in."""
    case = Case(SETTINGS[3], (33, 40, 38), length=8, width=5, splits=2)
    t = make(case)
    t.leftpad = torch.tensor([33, 47, 45], dtype=torch.int32)
    out, lse = run(case, t)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("exponent", [-120, -30, 60, 110])
def test_bfloat16_queries_of_any_size_over_float8_keys(exponent):
    """Their rows are scaled to float16 and back; within a row too elements are far apart."""
    case = Case(SETTINGS[3], (150, 20), kv_heads=2, length=16, width=10, splits=2, softmax_scale=0.1 * 2.0**-exponent)
    t = make(case)
    t.leftpad.zero_()
    columns = torch.exp2(-4.0 * (torch.arange(128) % 7))
    t.q = (t.q.float() * columns * 2.0**exponent).bfloat16()
    t.q[0, 0, 1] = 0.0
    judge(case, t, *run(case, t))
