"""Counters: what must follow from the shape does, and no shipped kernel has a bank conflict."""

import numpy as np
import pytest
import torch

from fa2_cute import arch, cli, emulation, flash_attn_func, forward, jit, reference, tiling, trace
from fa2_cute.emulator.counters import Counters
from fa2_cute.problem import Problem
from fa2_cute.spec import CAUSAL, FULL


@pytest.mark.parametrize("spec", tiling.shipped(arch.TARGET), ids=lambda s: f"{s.dtype}-{s.head_dim}-{s.causal}")
def test_no_shipped_kernel_has_a_bank_conflict(spec, monkeypatch):
    """Two query tiles of which one is partial, four key tiles: prologue, both loops and epilogue are in it."""
    of_many = tiling.choose(spec.dtype, spec.head_dim, spec.value_dim, spec.features, arch.TARGET)
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 0 if spec == of_many else 170)
    problem = Problem(
        spec.dtype, 1, spec.tile_m + 5, 4 * spec.tile_n - 3, 2, 1, spec.head_dim, spec.value_dim, spec.features
    )
    (found,) = trace.trace(problem)
    assert found.launch.spec == spec
    shared = [access for access in trace.accesses(found.stats) if access.wavefronts]
    assert {"ldmatrix", "cp"} <= {access.opcode.split(".")[0] for access in shared}
    assert {access: access.conflicts for access in shared if access.conflicts} == {}


def test_the_counter_of_conflicts_counts_them():
    """The shipped layouts have none, so this is what tells a counter that works from one that does not."""

    class Site:
        line, text, source = 1, "ld.shared.b32", None

    class Warp:
        warps = 1

        lane = np.arange(32)
        global_warp = np.zeros(32, int)

    for stride_words, wavefronts in [(1, 1), (2, 2), (32, 32), (33, 1), (0, 1)]:
        counters = Counters()
        counters.shared_access(Site, Warp, np.arange(32) * 4 * stride_words, 4)
        assert counters.lines[1].wavefronts == wavefronts
        assert counters.bank_conflicts == wavefronts - 1


def test_full_attention_does_the_work_of_its_tiles_and_reads_what_it_must():
    """128 x 128 full tiles: every count is known from the shape."""
    problem = Problem("float16", 2, 128, 128, 4, 2, 64, 64, FULL)
    (found,) = trace.trace(problem)
    products = 2 * 4 * 2 * 128 * 128 * 64  # batch, heads, Q K^T and P V, multiply-adds of one head
    assert found.stats.mma * trace.MMA_MULTIPLY_ADDS == products == 2 * 8 * 64 * trace.visible_pairs(problem)
    assert found.stats.opcodes["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] == found.stats.mma
    counters = found.stats.counters
    q_bytes, kv_bytes = 2 * 128 * 4 * 64 * 2, 2 * 128 * 2 * 64 * 2
    assert counters.read == {"q": q_bytes, "k": 2 * kv_bytes, "v": 2 * kv_bytes}  # two query heads on each KV head
    assert counters.written == {"out": q_bytes, "lse": 2 * 4 * 128 * 4}
    sectors = sum(line.sectors for line in counters.lines.values())
    assert sectors * trace.SECTOR_BYTES == sum(counters.read.values()) + sum(counters.written.values())


def test_accesses_add_up_to_the_lines_they_group():
    (found,) = trace.trace(Problem("bfloat16", 1, 130, 70, 2, 1, 64, 64, CAUSAL))
    stats = found.stats
    lines, grouped = stats.counters.lines.values(), trace.accesses(stats)
    for name in ("executions", "wavefronts", "conflicts", "sectors", "bytes"):
        assert sum(getattr(x, name) for x in lines) == sum(getattr(x, name) for x in grouped)
    assert len({(x.opcode, x.where) for x in grouped}) == len(grouped)
    assert all(x.where for x in grouped)


def test_counting_does_not_change_the_result():
    """``trace`` throws results away; here they are looked at."""
    q, k, v = (torch.randn(1, 40, 2, 64, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    results = []
    for counters in (False, True):
        out, lse, call = forward.prepare(q, k, v, window=(None, 0))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        spec = call.spec(arch.TARGET)
        kernel = jit.compiled(spec, arch.TARGET)
        stats = emulation.run(kernel, call.grid(spec), call.values(), counters=counters)
        assert (stats.counters is not None) == counters
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    expected, _ = reference.attention(q, k, v, causal=True)
    assert (results[1][0] - expected).abs().max() < 2e-3


@pytest.mark.parametrize(
    ("query_len", "key_len", "causal", "pairs"),
    [(3, 3, False, 9), (3, 3, True, 6), (1, 7, True, 7), (5, 2, True, 3), (2, 5, True, 9), (4, 1, True, 1)],
)
def test_visible_pairs_are_those_of_the_reference(query_len, key_len, causal, pairs):
    problem = Problem("float16", 1, query_len, key_len, 1, 1, 64, 64, CAUSAL if causal else FULL)
    assert trace.visible_pairs(problem) == pairs
    assert int(reference.visible_keys(query_len, key_len, causal=causal).sum()) == pairs


def test_the_command_prints_its_tables(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["trace", "1x70x2x64", "--kv-heads", "1", "--causal", "--dtype", "float16"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    for text in ("mma.sync", "ldmatrix", "conflicts", "products.py:", "source", "sectors", "lse", "multiply-adds"):
        assert text in printed
    assert "Kernels of this call on CPU tensors, as on 170 SMs of sm_120: 1\n" in printed
    assert "1. float16, head_dim 64, causal" in printed


CALLS = {
    "short": (1, 70, 70, 4, 2, False),
    "in parts": (forward.MAX_GRID_YZ + 1, 1, 1, 1, 1, False),
    "few queries": (1, 1, 1100, 4, 2, True),
    "a tile of queries": (2, 16, 1024, 4, 2, False),
    "few tiles": (1, 200, 2048, 2, 1, True),
    "few queries of many heads": (1, 1, 1024, 340, 170, False),
}


@pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")
@pytest.mark.parametrize("what", CALLS)
def test_what_is_counted_is_what_a_call_launches(monkeypatch, what):
    """The very kernels, grids and shapes, whatever ``forward.attend`` goes by; nothing is run here."""
    batch, query_len, key_len, heads, kv_heads, causal = CALLS[what]
    ran = []

    def run(kernel, grid, values, *, tiles=0, counters=False):
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in values]
        ran.append((kernel.spec, grid, shapes, tiles))

    monkeypatch.setattr(emulation, "run", run)
    q = torch.zeros(batch, query_len, heads, 64, dtype=torch.bfloat16)
    k = torch.zeros(batch, key_len, kv_heads, 64, dtype=torch.bfloat16)
    flash_attn_func(q, k, k, causal=causal, return_softmax_lse=True)
    by_call, ran[:] = list(ran), []
    features = CAUSAL if causal else FULL
    traces = trace.trace(Problem("bfloat16", batch, query_len, key_len, heads, kv_heads, 64, 64, features))
    assert ran == by_call
    assert [one.launch.spec for one in traces] == [spec for spec, *_ in ran]
    kinds = [type(one.launch.spec).__name__ for one in traces]
    expected = {"short": ["ForwardSpec"], "in parts": ["ForwardSpec"] * 2, "few queries of many heads": ["DecodeSpec"]}
    assert kinds == expected.get(what, ["DecodeSpec", "CombineSpec"])


def test_split_calls_are_counted_kernel_by_kernel():
    """Every count of these is known from the shape: each split writes its part, the combination reads them all."""
    query_len, key_len, heads, kv_heads, dim = 1, 1024, 4, 2, 64
    split, combine = trace.trace(Problem("float16", 1, query_len, key_len, heads, kv_heads, dim, dim, FULL))
    splits = split.launch.values[-1]
    assert splits > 1
    parts = splits * query_len * heads * 4  # bytes of one float32 for each row of each split
    read, written = split.stats.counters.read, split.stats.counters.written
    assert (read["k_cache"], read["v_cache"]) == (key_len * kv_heads * dim * 2,) * 2
    assert (written["partial_out"], written["partial_state"]) == (parts * dim, parts * 2)
    assert written["out"] == written["lse"] == 0
    assert split.stats.mma * trace.MMA_MULTIPLY_ADDS >= 2 * heads * dim * trace.visible_pairs(split.problem)
    read, written = combine.stats.counters.read, combine.stats.counters.written
    assert written == {"out": query_len * heads * dim * 2, "lse": query_len * heads * 4}
    assert read["partial_out"] == parts * dim
    assert combine.stats.mma == 0


def test_the_command_says_which_kernels_a_call_takes(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["trace", "1x1x4x64", "--key-len", "1100", "--causal"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "Kernels of this call on CPU tensors, as on 170 SMs of sm_120: 2\n" in printed
    assert "1. decode, bfloat16, head_dim 64" in printed
    assert "2. combining" in printed
    for text in ("k_cache", "partial_out", "multiply-adds that the shape needs"):
        assert text in printed
    assert "block_table" not in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1x2x3"], "SHAPE: got '1x2x3', takes BATCHxQUERY_LENxHEADSxHEAD_DIM"),
        (["1x0x1x64"], "SHAPE: got 1x0x1x64, takes numbers from 1 to"),
        (["1x99999999999999999999x1x64"], "SHAPE: got 1x99999999999999999999x1x64, takes numbers from 1 to"),
        (["1x8x4x64", "--key-len", "0"], "--key-len: got 0, takes numbers from 1 to"),
        (["1x8x4x64", "--key-len", str(2**30)], f"--key-len: got {2**30}, takes numbers from 1 to {2**30 - 1}"),
        (["1x8x4x64", "--kv-heads", "0"], "--kv-heads: got 0, takes numbers from 1 to"),
        (["1x8x4x64", "--kv-heads", "3"], "--kv-heads: got 3, takes a divisor of SHAPE's 4 heads"),
        (["1x8x4x100"], "SHAPE: got head_dim 100, takes multiples of 8"),
        (["1x8x4x64", "--dtype", "float32"], "--dtype: got 'float32', takes"),
    ],
)
def test_the_command_refuses_what_is_no_shape_in_one_line(arguments, text, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["trace", *arguments])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fa2-cute: {text}")
    assert said.count("\n") == 1
