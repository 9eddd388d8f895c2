"""On a real GPU: shapes against float64 and torch, memory, streams, synchronisation, compilation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import (
    arch,
    demo,
    flash_attn_func,
    flash_attn_varlen_func,
    forward,
    jit,
    reference,
    resources,
    scaled_dot_product_attention,
    split_calls,
    tiling,
)
from fa2_cute.explore import tuning
from fa2_cute.fuzz import Case, check
from fa2_cute.fuzz.bounds import FP32
from fa2_cute.fuzz.judging import check_tensors, judge
from fa2_cute.fuzz.layouts import LAYOUTS, far_apart
from fa2_cute.fuzz.strategies import PLAIN, cases, split_cases
from fa2_cute.fuzz.values import VALUES
from fa2_cute.spec import CAUSAL, FULL

pytestmark = pytest.mark.gpu

LENGTHS = (1, 17, 64, 127, 1000, 4096)
HEADS = ((4, 4), (4, 2), (4, 1))
DTYPES = (torch.float16, torch.bfloat16)


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_that_of_torch(dtype, head_dim, causal):
    """All pairs of lengths and all head ratios. The floor: what fp32 sums may err where torch does not."""
    worst = []
    for query_len in LENGTHS:
        for key_len in LENGTHS:
            batch = 2 if query_len * key_len < 10**6 else 1
            for heads, kv_heads in HEADS:
                q = normal(batch, query_len, heads, head_dim, dtype=dtype, seed=query_len)
                k, v = (normal(batch, key_len, kv_heads, head_dim, dtype=dtype, seed=key_len + i) for i in (1, 2))
                out, lse = flash_attn_func(q, k, v, causal=causal, return_softmax_lse=True)
                expected, expected_lse = reference.attention(q, k, v, causal=causal)
                ours = reference.error(out, expected)
                theirs = reference.torch_error(q, k, v, expected, causal=causal)
                floor = key_len * FP32 * v.abs().max().item()
                if ours.max > 2 * theirs.max + floor or ours.rms > 2 * theirs.rms + floor:
                    worst.append((query_len, key_len, heads, kv_heads, ours, theirs))
                seen = expected_lse != -math.inf
                assert torch.equal(lse != -math.inf, seen)
                torch.testing.assert_close(lse[seen].double(), expected_lse[seen], rtol=1e-5, atol=1e-4)
    assert not worst


@given(cases())
def test_matches_float64_within_derived_bounds(case):
    check(case, "cuda")


@given(split_cases(st.sampled_from(PLAIN)))
def test_the_forward_kernel_in_splits_matches_float64(case):
    check(case, "cuda")


@pytest.mark.parametrize(
    "case",
    [
        Case(query_len=300, key_len=8192, heads=4, kv_heads=2),
        Case(query_len=300, key_len=8192, heads=4, kv_heads=2, causal=True, sink="normal"),
        Case("float16", 2, 200, 5000, 4, 2, softcap=20.0, alibi="ladder"),
        Case(query_len=100, key_len=5000, heads=2, mask="some"),
    ],
    ids=repr,
)
def test_few_tiles_on_many_keys_match_float64(case):
    """In splits by themselves: of which kernel depends on the GPU, but there are too few tiles for any."""
    problem, options, inputs = forward.check(*case.tensors("cuda"), **case.options_on("cuda"))
    assert split_calls.plan(problem, options, inputs) is not None
    check(case, "cuda")


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_kind_of_value(dtype, values):
    for causal in (False, True):
        check(Case(dtype, 2, 300, 500, 4, 2, 128, causal=causal, values=values), "cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    check(Case("bfloat16", 2, 133, 165, 4, 2, 128, causal=True, layouts=(layout, layout, layout)), "cuda")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_known_call_looks_at_new_tensors(position):
    """What its launcher refuses is copied, or refused in this package's words."""
    tensors = Case("bfloat16", 1, 40, 50, 4, 2, 64).tensors("cuda")
    expected = flash_attn_func(*tensors, causal=True)
    assert torch.equal(flash_attn_func(*tensors, causal=True), expected)

    def call_with(x):
        return flash_attn_func(*tensors[:position], x, *tensors[position + 1 :], causal=True)

    x = tensors[position]
    unaligned = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert torch.equal(call_with(unaligned), expected)
    assert torch.equal(call_with(torch._neg_view(-x)), expected)
    name = "qkv"[position]
    with pytest.raises(TypeError, match=r"^[kv]: got dtype" if name == "q" else f"^{name}: got dtype torch.float16"):
        call_with(x.half())
    with pytest.raises(ValueError, match=r"^[kv]: got device" if name == "q" else f"^{name}: got device cpu"):
        call_with(x.cpu())


def test_writes_every_output_and_nothing_else(monkeypatch):
    """Outputs come from memory full of NaN between guards that stay as they are."""
    guard = 4096
    made = []

    def poisoned(shape, stride, dtype):
        flat = torch.full((math.prod(shape) + 2 * guard,), math.nan, dtype=dtype, device="cuda")
        made.append(flat)
        return flat[guard : flat.numel() - guard].view(shape)

    q, k, v = Case("bfloat16", 2, 333, 217, 6, 2, 128).tensors("cuda")
    flash_attn_func(q, k, v, causal=True)  # compile, and plan
    with monkeypatch.context() as patch:
        patch.setitem(forward.EMPTY_STRIDED, "cuda", poisoned)
        out, lse = flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
        assert len(made) == 2  # the output, the logsumexp, and nothing else
        alone = flash_attn_func(q, k, v, causal=True)
    assert len(made) == 3  # another output
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert torch.equal(alone, out)
    for flat in made:
        assert flat[:guard].isnan().all()
        assert flat[-guard:].isnan().all()


def varlen(q, k, v, **options):
    """Three packed sequences, the last longer than the others."""
    cu_q, cu_k = (torch.tensor([0, 7, 100, len(x)], dtype=torch.int32, device="cuda") for x in (q[0], k[0]))
    return flash_attn_varlen_func(q[0], k[0], v[0], cu_q, cu_k, 9, 9, **options)


def masked(q, k, v):
    mask = torch.arange(k.shape[1], device="cuda") % 3 > 0
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True)


def of_torchs_kind(q, k, v):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True)


@pytest.mark.parametrize("function", [flash_attn_func, varlen, masked, of_torchs_kind])
def test_a_logsumexp_that_is_not_asked_for_takes_no_memory(function):
    """It would take a quarter of what the output takes. Nor does a first call take it, whose plan others have it by."""
    q, k, v = Case("bfloat16", 1, 4096, 300, 16, 2, 8).tensors("cuda")
    small = 16 << 10  # lengths, a mask of one row, and what the allocator rounds up
    function(q, k, v)  # compile
    q, k, v = q[:, :4000], k[:, :290], v[:, :290]  # a call that is not known
    out_bytes = q.numel() * 2
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = function(q, k, v)
        assert torch.cuda.max_memory_allocated() - before <= out_bytes + small
        if function in (flash_attn_func, varlen):
            again, lse = function(q, k, v, return_softmax_lse=True)
            assert torch.equal(again, out)
            assert lse.isfinite().all()
            del again, lse
        del out


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batch", "length", "heads"])
def test_offsets_past_two_to_the_31_elements(argument, dimension):
    """A view whose last batch, row or head starts beyond 2^31 elements; all else there is NaN."""

    def full_of_nan(elements, dtype):
        return torch.full((elements,), math.nan, dtype=dtype, device="cuda")

    view = far_apart(full_of_nan, (2, 66, 2, 64), dimension, torch.float16)
    given = dict(zip("qkv", Case("float16", 2, 66, 66, 2, 2, 64).tensors("cuda"), strict=True))
    view.copy_(given[argument])
    check_tensors(**{**given, argument: view}, causal=True)


def test_an_output_of_more_than_two_to_the_31_elements():
    """4 GiB of q and of out, one key: every output row is that key's value."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free device memory")
    query_len = 2**31 // (8 * 128) + 3
    q = torch.ones(1, query_len, 8, 128, dtype=torch.float16, device="cuda")
    k = normal(1, 1, 1, 128, dtype=torch.float16)
    v = normal(1, 1, 1, 128, dtype=torch.float16, seed=1)
    out = flash_attn_func(q, k, v)
    assert out.numel() > 2**31
    assert torch.equal(out[0, -5:], v[0].expand(5, 8, 128))
    assert all((rows == v[0]).all() for rows in out[0].split(2**18))


def test_more_sequences_than_one_grid_takes():
    q = normal(65_535 + 3, 1, 1, 64, dtype=torch.float16)
    k, v = (normal(65_535 + 3, 3, 1, 64, dtype=torch.float16, seed=i) for i in (1, 2))
    out = flash_attn_func(q, k, v)
    logits = (q.double() * k.double()).sum(-1, keepdim=True) / 8
    expected = (torch.softmax(logits, dim=1) * v.double()).sum(1, keepdim=True)
    torch.testing.assert_close(out.double(), expected, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_never_synchronises(causal):
    """``torch.cuda.set_sync_debug_mode`` sees torch's own; a long wait before the call sees any other."""
    q, k, v = (normal(2, 512, 4, 128, seed=i) for i in range(3))
    flash_attn_func(q, k, v, causal=causal)  # compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second of clock cycles
        done = torch.cuda.Event()
        flash_attn_func(q, k, v, causal=causal)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_runs_on_the_current_stream():
    """Inputs are filled late on a side stream: a launch on any other stream would read zeros."""
    filled = [normal(1, 300, 4, 64, seed=i) for i in range(3)]
    expected = flash_attn_func(*filled)
    late = [torch.zeros_like(x) for x in filled]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, filled, strict=True):
            target.copy_(source)
        out = flash_attn_func(*late)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_captures_into_a_cuda_graph():
    q, k, v = (normal(1, 200, 4, 64, seed=i) for i in range(3))
    flash_attn_func(q, k, v, causal=True)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v, causal=True)
    q.copy_(normal(1, 200, 4, 64, seed=9))
    graph.replay()
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))


def test_new_lengths_batches_and_heads_compile_nothing():
    flash_attn_func(*(normal(1, 5, 1, 64, seed=i) for i in range(3)))
    before = jit.kernels()
    for batch, query_len, key_len, heads, kv_heads in [
        (1, 1, 999, 8, 1),
        (3, 128, 64, 2, 2),
        (2, 1000, 17, 6, 3),
    ]:
        q = normal(batch, query_len, heads, 64)
        k, v = (normal(batch, key_len, kv_heads, 64, seed=i) for i in (1, 2))
        flash_attn_func(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    assert jit.kernels() == before


def test_allocates_nothing_that_grows_with_length_squared():
    q, k, v = (normal(1, 16384, 2, 64, seed=i) for i in range(3))
    flash_attn_func(q, k, v)  # compile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flash_attn_func(q, k, v, return_softmax_lse=True)
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - before
    assert grown <= out.numel() * 2 + lse.numel() * 4 + 4096  # the allocator's rounding


def test_repeats_bit_for_bit():
    q, k, v = (normal(2, 1000, 4, 128, seed=i) for i in range(3))
    first = flash_attn_func(q, k, v, causal=True)
    assert all(torch.equal(flash_attn_func(q, k, v, causal=True), first) for _ in range(5))


def test_mixed_devices_are_refused():
    q, k, v = (normal(1, 4, 1, 64, seed=i) for i in range(3))
    with pytest.raises(ValueError, match=r"k: got device cpu, takes q's device cuda"):
        flash_attn_func(q, k.cpu(), v)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_its_tensors():
    """The current device is another one, at the first call and at the next."""
    q, k, v = (normal(1, 300, 4, 64, seed=i) for i in range(3))
    expected = flash_attn_func(q, k, v)
    for _ in range(2):
        out = flash_attn_func(*(x.to("cuda:1") for x in (q, k, v)))
        assert out.device == torch.device("cuda:1")
        assert torch.equal(out.to(q.device), expected)


def test_an_unsupported_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))
    q = normal(1, 4, 1, 64)
    with pytest.raises(ValueError, match=r"7\.5.*takes"):
        flash_attn_func(q, q, q)


def test_kernels_of_this_gpu_fit_and_run():
    architecture = arch.by_capability(*torch.cuda.get_device_capability())
    for spec in tiling.shipped(architecture):
        used = resources.usage(jit.compiled(spec, architecture))
        assert used.blocks_per_sm >= 1


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [128, 192, 256])
@pytest.mark.parametrize("values", ["normal", "late_maximum"])
def test_the_tiles_of_sm_120_are_right_on_this_gpu(values, head_dim, causal):
    """Half and all of Q in registers where this GPU's own tile may have none; with a second pass, too."""
    architecture = arch.by_capability(*torch.cuda.get_device_capability())
    for spec in tiling.every("bfloat16", head_dim, head_dim, CAUSAL if causal else FULL, arch.TARGET):
        kernel = jit.compiled(spec, architecture)
        for query_len, key_len in ((1, 300), (300, 1), (513, 513), (130, 1100)):
            q, k, v = (normal(2, n, 2, head_dim, seed=n + i) for i, n in enumerate((query_len, key_len, key_len)))
            if values == "late_maximum":
                k[:, : key_len // 3] *= 300
            out, lse, call = forward.prepare(q, k, v, window=(None, 0 if causal else None))
            out.fill_(math.nan)
            lse.fill_(math.nan)
            forward.launch(kernel, call)
            judge(q, k, v, out, lse, causal=causal, what=f"{spec.title}, {query_len} on {key_len}")


def test_a_tuned_tile_is_what_runs(tmp_path, monkeypatch):
    monkeypatch.setenv(forward.TUNING, str(tmp_path / "tuning.json"))
    tile = {"tile_m": 64, "tile_n": 32, "warps": 4, "stages": 3, "query_held": "all"}
    kind = tuning.ProblemClass("bfloat16", 128, 128, True)
    tuning.apply(tile, kind, torch.cuda.get_device_name(), "a test")
    q, known = normal(2, 333, 4, 128), set(jit._KERNELS)
    out, lse = flash_attn_func(q, q, q, causal=True, return_softmax_lse=True)
    (made,) = [spec for spec, _ in set(jit._KERNELS) - known]
    assert {name: getattr(made, name) for name in tile} == tile
    judge(q, q, q, out, lse, softmax_scale=None, causal=True, what="the tuned tile")


def test_demo():
    from rich.console import Console

    workload = demo.Workload(batch=2, heads=8, kv_heads=2, head_dim=128, prompt=512, steps=2)
    assert demo.run(torch.device("cuda"), Console(quiet=True), workload=workload) == []
