"""The model: its arithmetic, its schedule of blocks, and what is known of real devices."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from probes import Probe, compiled

from fa2_cute import arch, emulation, resources
from fa2_cute.explore import binding, model, pictures, rates, records, simulate, validate
from fa2_cute.explore.model import CompiledFacts, Step
from fa2_cute.explore.space import Point, Workload
from fa2_cute.spec import FULL, ForwardSpec

SM_120 = arch.by_name("sm_120")
RATES = rates.RATES["sm_120"]


def facts(*cycles: float, outside: float = 0.0) -> CompiledFacts:
    """A kernel whose step takes ``cycles[n - 1]`` with n resident blocks."""
    busy = tuple({"tensor": 0.5} for _ in cycles)
    waits = tuple({"dependency": 0.5} for _ in cycles)
    step = Step(tuple(cycles), busy, waits)
    return CompiledFacts(len(cycles), step, step, outside, 128, False)


lengths = st.integers(1, 600)
tiles = st.sampled_from([(64, 32), (64, 48), (128, 64), (128, 128)])


@given(tiles, lengths, lengths, st.booleans(), st.booleans())
def test_key_tiles_are_those_that_the_mask_needs(tile, query_len, key_len, causal, first):
    point, problem = Point(*tile), Workload(64, query_len, key_len, causal)
    for m in range(math.ceil(query_len / point.tile_m)):
        rows = range(m * point.tile_m, min((m + 1) * point.tile_m, query_len))
        offset = key_len - query_len
        last = [
            min(row + offset, key_len - 1) if causal else key_len - 1 for row in rows
        ]  # key that each row sees last
        unmasked, masked = model.key_tiles(point, problem, m, first)
        assert (
            unmasked + masked == math.ceil((max(last) + 1) / point.tile_n) if max(last) >= 0 else unmasked + masked == 0
        )
        assert unmasked == 0 or all(
            key >= unmasked * point.tile_n - 1 for key in last
        )  # every row sees all keys of these
        if first and max(last) >= 0:
            assert masked >= 1


@given(st.integers(1, 20), st.integers(1, 18), st.integers(1, 700))
@example(1, 32, 640)  # groups of heads one after the other
@example(40, 8, 64)  # 16 sequences side by side, and a group of them with 8 idle ones
@example(3, 5, 130)  # both
@example(9, 12, 64 * 17)  # two sequences side by side
@settings(max_examples=15)
def test_blocks_start_in_the_order_of_the_kernels_grid(batch, heads, query_len):
    tile_m = 64
    grid = ForwardSpec("bfloat16", 64, 64, FULL, tile_m, 32, 4, 2).grid(batch, heads, query_len)
    found = torch.full((math.prod(grid), 3), -1, dtype=torch.int32)
    probe = Probe("order_kernel", "Order", (tile_m,), 3, ("batch", "heads", "query_len"))
    emulation.run(compiled(probe), grid, (found, batch, heads, query_len))
    working = [(b, head, row // tile_m) for b, head, row in found.tolist() if b < batch and head < heads]
    assert working == list(model.launch_order(tile_m, Workload(64, query_len, query_len, True, batch, heads, heads)))


def test_a_prediction_is_of_blocks_in_that_order(monkeypatch):
    """Two groups of eight heads: the first one's short tiles come before the second one's long ones."""
    given = []
    monkeypatch.setattr(model, "_makespan", lambda work, *_: given.append(work) or (1e6, 0.0))
    model.predict(Point(64, 32), Workload(64, 192, 192, causal=True, heads=16, kv_heads=16), RATES, facts(100.0))
    assert [sum(steps) for steps in given[0]] == 2 * (8 * [6] + 8 * [4] + 8 * [2])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), min_size=1, max_size=60), st.integers(1, 7))
def test_one_block_an_sm_is_list_scheduling(work, sms):
    end, idle = model._makespan(work, 10.0, facts(100.0), sms)
    free = [0.0] * sms
    for a, b in work:
        sm = free.index(min(free))
        free[sm] += (a + b) * 100.0 + 10.0
    assert end == pytest.approx(max(free))
    assert idle == pytest.approx(max(free) - sum(free) / sms)


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 4))
def test_equal_blocks_fill_the_device(blocks, sms, resident):
    """Blocks that do not slow each other down, ``resident`` at a time on each SM."""
    end, _ = model._makespan([(5, 0)] * blocks, 0.0, facts(*[100.0] * resident), sms)
    assert end == pytest.approx(500.0 * math.ceil(blocks / (sms * resident)))


@given(st.integers(1, 40), st.integers(1, 5))
def test_blocks_that_share_an_sm_fully_gain_nothing_by_it(blocks, sms):
    work = [(3, 1)] * blocks
    alone, _ = model._makespan(work, 0.0, facts(100.0), sms)
    shared, _ = model._makespan(work, 0.0, facts(100.0, 200.0), sms)
    assert shared == pytest.approx(alone)


@given(tiles, st.integers(1, 4096), st.booleans())
def test_nothing_is_faster_than_its_bounds(tile, length, causal):
    point, problem = Point(*tile, 8), Workload(128, length, length, causal)
    mmas = point.tile_m // 128 * (point.tile_n // 8 * 8 + 16 * point.tile_n // 16) or 64
    known = CompiledFacts(1, *[facts(mmas * 2 * RATES.mma_cycles).step] * 2, 100.0, mmas, False)
    found = model.predict(point, problem, RATES, known)
    assert found.milliseconds > 1e3 * model.device_bytes(problem) / (RATES.device_gbytes * 1e9)
    assert found.of_bound < 1
    assert found.tflops == pytest.approx(problem.operations / found.milliseconds / 1e9)
    assert sum(found.parts.values()) == pytest.approx(1.0)


def test_a_launch_bound_by_memory_says_so():
    known = facts(1.0)
    found = model.predict(Point(128, 64, 8), Workload(128, 128, 128, batch=4096), RATES, known)
    assert found.binds in ("l2", "device")


def test_few_warps_are_named_as_the_reason():
    found = model.predict(Point(64, 64, 4), Workload(128, 4096, 4096), RATES, facts(9000.0))
    assert found.binds == "latency"
    assert "1 warps a sub-partition" in found.why


def test_every_architecture_of_the_kernels_has_rates():
    assert rates.missing() == []


def test_the_public_record_of_an_rtx_5090():
    """A hand-written kernel of 64x64 tiles on 4 warps, Q in registers, K double-buffered, V single (48 KiB: two blocks
    an SM) is on record at 94.4% of 209.5 TFLOP/s (batch 4, 8 heads, 4096 x 8192). This project's loop with such a tile,
    two blocks resident as there, must come within 5 points of it."""
    problem = Workload(128, 4096, 8192, batch=4, heads=8, kv_heads=8)
    point = Point(64, 64, 4, 2, query_held="all")
    step, masked = records.loops(binding.compiled(point, problem, SM_120))
    resident = {"warps": 4, "blocks": 2, "shared_bytes": 48 * 1024, "stack_bytes": 0}
    steps = [model.step_of(loop, RATES, **resident) for loop in (step, masked)]
    found = model.predict(point, problem, RATES, CompiledFacts(2, *steps, 3000.0, step.mmas, True))
    assert found.of_bound == pytest.approx(0.944, abs=0.05)
    assert found.binds == "tensor"


def test_the_h200_record_in_the_docs_says_what_the_docs_say():
    """Rank correlation at least 0.85 and first choices within 5% of the best, over 300 measured points."""
    pairs = validate.read_pairs(Path(__file__).parents[2] / "docs" / "explore" / "comparison.json")
    assert len(pairs) == 300
    assert len({x.workload.head_dim for x in pairs}) == 2
    assert len({x.workload.query_len for x in pairs}) == 5
    speeds = [(x.workload.operations / x.measured, x.workload.operations / x.predicted) for x in pairs]
    assert validate.spearman([x.measured for x in pairs], [x.predicted for x in pairs]) >= 0.99
    assert validate.spearman(*zip(*speeds, strict=True)) >= 0.95
    costs = validate.first_choice_costs(pairs)
    assert len(costs) == 20
    assert max(costs.values()) <= 0.05


@given(st.permutations(range(12)))
def test_spearman_is_pearsons_coefficient_of_ranks(order):
    expected = np.corrcoef(np.arange(12), np.argsort(np.argsort(order)))[0, 1]
    assert validate.spearman(range(12), order) == pytest.approx(expected)


def test_the_record_follows_the_usage_of_the_kernel(kernel, workload, point):
    record = records.evaluate(point, workload, SM_120)
    used = resources.usage(kernel)
    assert (record.registers, record.stack_bytes, record.blocks_per_sm) == (
        used.registers,
        used.stack_bytes,
        used.blocks_per_sm,
    )
    assert record.counts["conflicts"] == 0
    assert record.prediction.milliseconds > 0
    assert records.Record.from_dict(record.as_dict()) == record


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_the_pictures_know_both_products_of_any_architecture(point, workload, target):
    """Code is compiled without source lines where the emulator does not run it; the pictures need them."""
    architecture = arch.by_name(target)
    step, _ = records.loops(binding.compiled_with_lines(point, workload, architecture))
    outcome = simulate.run(step, rates.of(architecture), warps=4, blocks=1, iterations=4, keep_events=True)
    parts = {pictures.phase_of(event) for event in outcome.events}
    assert {"Q K^T", "P V", "softmax", "ldmatrix", "cp.async"} <= parts
