"""Counters: what must follow from the shape does, and no shipped kernel has a bank conflict."""

import numpy as np
import pytest
import torch

from fa2_cute import arch, cli, emulation, forward, jit, reference, tiling, trace
from fa2_cute.emulator.counters import Counters
from fa2_cute.problem import Problem
from fa2_cute.spec import CAUSAL, FULL


@pytest.mark.parametrize("spec", tiling.shipped(arch.TARGET), ids=lambda s: f"{s.dtype}-{s.head_dim}-{s.causal}")
def test_no_shipped_kernel_has_a_bank_conflict(spec):
    """Two query tiles of which one is partial, four key tiles: prologue, both loops and epilogue are in it."""
    problem = Problem(
        spec.dtype, 1, spec.tile_m + 5, 4 * spec.tile_n - 3, 2, 1, spec.head_dim, spec.value_dim, spec.features
    )
    found = trace.trace(problem)
    assert found.spec == spec
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
    found = trace.trace(problem)
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
    stats = trace.trace(Problem("bfloat16", 1, 130, 70, 2, 1, 64, 64, CAUSAL)).stats
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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1x2x3"], "SHAPE: got '1x2x3', takes BATCHxQUERY_LENxHEADSxHEAD_DIM"),
        (["1x0x1x64"], "takes 1 or more"),
        (["1x8x4x64", "--kv-heads", "3"], "KV heads"),
        (["1x8x4x100"], "head_dim"),
        (["1x8x4x64", "--dtype", "float32"], "--dtype: got 'float32', takes"),
    ],
)
def test_the_command_refuses_what_is_no_shape_in_one_line(arguments, text, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["trace", *arguments])
    assert caught.value.code == 1
    assert text in capsys.readouterr().err
