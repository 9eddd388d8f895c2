"""The simulated multiprocessor: loops whose time is known by arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute.explore import rates, simulate
from fa2_cute.explore.sass import Instruction, Loop

RATES = rates.RATES["sm_90"]


def instruction(opcode, *, stall=1, write=None, read=None, waits=(), operands="", predicate=""):
    return Instruction(0, opcode, predicate, operands, stall, write, read, tuple(waits))


MMA = instruction("HMMA.16816.F32.BF16")
EX2 = instruction("MUFU.EX2")
LDSM = instruction("LDSM.16.M88.4")
ADD = instruction("FADD")
BARRIER = instruction("BAR.SYNC")
COPY = instruction("LDGSTS.E.BYPASS.LTC128B.128")
COMMIT = instruction("LDGDEPBAR")
WAIT_ALL = instruction("DEPBAR.LE", operands="SB0, 0x0")


def cycles(*body, warps=4, blocks=1, **options):
    return simulate.run(Loop(body), RATES, warps=warps, blocks=blocks, iterations=12, **options).cycles


@given(st.integers(20, 60), st.sampled_from((4, 8)), st.integers(1, 2))
def test_products_alone_take_the_tensor_pipe(count, warps, blocks):
    found = simulate.run(Loop((MMA,) * count), RATES, warps=warps, blocks=blocks, iterations=12)
    assert found.cycles == pytest.approx(count * RATES.mma_cycles * warps * blocks / 4, rel=0.05)
    assert found.busy["tensor"] == pytest.approx(1.0, abs=0.02)


def test_exponentials_alone_take_the_mufu():
    assert cycles(*[EX2] * 50, warps=8) == pytest.approx(50 * RATES.mufu_cycles * 2, rel=0.05)


def test_ldmatrix_takes_the_banks_of_the_whole_sm():
    assert cycles(*[LDSM] * 50, warps=8) == pytest.approx(50 * 4 * 8, rel=0.05)


def test_bank_conflicts_take_as_many_more():
    assert cycles(*[LDSM] * 50, warps=8, shared_factor=8.0) == pytest.approx(50 * 4 * 8 * 8, rel=0.05)


def test_a_sub_partition_issues_one_instruction_a_cycle():
    assert cycles(*[ADD] * 100, warps=16) == pytest.approx(100 * 4, rel=0.05)


def test_stall_counts_are_a_warps_own():
    slow = instruction("FADD", stall=10)
    assert cycles(*[slow] * 20, warps=4) == pytest.approx(200, rel=0.02)
    assert cycles(*[slow] * 20, warps=32) == pytest.approx(200, rel=0.02)  # eight warps hide each other's


def test_a_scoreboard_waits_for_ldmatrix():
    body = (instruction("LDSM.16.M88.4", write=0), instruction("FADD", waits=(0,)))
    assert cycles(*body, warps=1) == pytest.approx(4 + RATES.shared_latency + 1, rel=0.05)


def test_copies_are_waited_for_and_take_bandwidth():
    latency = cycles(COPY, COMMIT, WAIT_ALL, warps=1)
    assert latency == pytest.approx(RATES.copy_latency + 512 / RATES.l2_bytes, rel=0.05)
    many = cycles(*[COPY] * 100, COMMIT, WAIT_ALL, warps=4)
    assert many == pytest.approx(100 * 4 * 512 / RATES.l2_bytes, rel=0.1)


def test_a_barrier_keeps_the_warps_of_a_block_together():
    apart = (instruction("FADD", stall=15),) * 4
    assert cycles(*apart, BARRIER, warps=4) == pytest.approx(
        60 + RATES.barrier_cycles + 4 * RATES.barrier_warp_cycles, rel=0.05
    )


@given(st.lists(st.sampled_from((MMA, EX2, LDSM, ADD)), min_size=20, max_size=60))
def test_more_warps_never_give_less_work_a_cycle(body):
    one, two = cycles(*body, warps=4), cycles(*body, warps=8)
    assert one * 0.98 <= two <= 2 * one * 1.05
    # An instruction counts when it is issued, with what it leaves in a pipe past the end: little of many iterations.
    found = simulate.run(Loop(tuple(body)), RATES, warps=8, blocks=1, iterations=24)
    assert all(share <= 1.02 for share in found.busy.values())


def test_padding_takes_an_issue_slot_and_nothing_else():
    padding = instruction("UIADD3", predicate="@!UPT")
    assert cycles(*[padding] * 64, warps=4) == pytest.approx(64, rel=0.05)


def test_events_are_those_of_the_measured_stretch():
    found = simulate.run(Loop((MMA,) * 20), RATES, warps=4, blocks=2, iterations=4, keep_events=True)
    assert {(e.block, e.warp) for e in found.events} == {(b, w) for b in range(2) for w in range(4)}
    assert {e.pipe for e in found.events} == {"tensor"}
