"""Warp-wide instructions: shuffles, votes, matches, reductions, elections, whole and divergent warps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_operands import FEW
from ptx_support import elementwise, run

LANES = 64


def words():
    """64 random words, often equal."""
    element = st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1))
    return st.lists(element, min_size=LANES, max_size=LANES).map(lambda x: np.array(x, np.uint32))


def shuffled(mode, values, lane, b, c):
    """The pseudo-code of PTX ISA shfl.sync for one lane."""
    b, segment, c = b & 31, c >> 8 & 31, c & 31
    high, low = (lane & segment) | (c & ~segment), lane & segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | b & ~segment}[mode]
    valid = source >= high if mode == "up" else source <= high
    return values[source if valid else lane], valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@FEW
@given(values=words(), b=words(), width=st.sampled_from([32, 16, 8, 4, 2]), fixed=st.integers(0, 31))
def test_shuffle(mode, values, b, width, fixed):
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    text = f"shfl.sync.{mode}.b32 %o0|%o1, %a0, %a1, {c}, -1; shfl.sync.{mode}.b32 %o2, %a0, {fixed}, {c}, 0xffffffff;"
    moved, valid, constant = elementwise(text, [values, b], [np.uint32, bool, np.uint32])
    for i in range(LANES):
        warp = values[i // 32 * 32 :][:32].tolist()
        want, ok = shuffled(mode, warp, i % 32, int(b[i]), c)
        assert (int(moved[i]), bool(valid[i])) == (want, ok)
        assert int(constant[i]) == shuffled(mode, warp, i % 32, fixed, c)[0]


def reference_votes(flags, members):
    named = [f for k, f in enumerate(flags) if members >> k & 1]
    ballot = sum(1 << k for k, f in enumerate(flags) if f and members >> k & 1)
    return all(named), any(named), all(named) or not any(named), ballot


@FEW
@given(values=words())
def test_votes_of_whole_warps(values):
    text = """setp.lt.u32 %p1, %a0, 2; vote.sync.all.pred %o0, %p1, -1; vote.sync.any.pred %o1, %p1, -1;
    vote.sync.uni.pred %o2, %p1, -1; vote.sync.ballot.b32 %o3, %p1, -1; activemask.b32 %o4;"""
    out = elementwise(text, [values], [bool, bool, bool, np.uint32, np.uint32])
    for i in range(LANES):
        flags = (values[i // 32 * 32 :][:32] < 2).tolist()
        assert [o[i] for o in out] == [*reference_votes(flags, 2**32 - 1), 2**32 - 1]


@FEW
@given(values=words(), members=st.integers(1, 2**32 - 1))
def test_warp_operations_in_a_divergent_branch(values, members):
    text = f"""mov.u32 %r60, %laneid; shr.u32 %r61, {members}, %r60; and.b32 %r61, %r61, 1;
    setp.eq.u32 %p5, %r61, 1;
    mov.u32 %o0, 0; mov.u32 %o1, 0; mov.u32 %o2, 0; mov.u32 %o3, 0; mov.u32 %o4, 0; @!%p5 bra DONE;
    setp.lt.u32 %p1, %a0, 2; vote.sync.ballot.b32 %o0, %p1, {members}; activemask.b32 %o1;
    match.any.sync.b32 %o2, %a0, {members}; redux.sync.add.u32 %o3, %a0, {members};
    redux.sync.max.s32 %o4, %a0, {members};
    DONE: mov.u32 %r62, 0;"""
    out = elementwise(text, [values], [np.uint32] * 5)
    for i in range(LANES):
        warp = values[i // 32 * 32 :][:32].tolist()
        inside = [k for k in range(32) if members >> k & 1]
        if i % 32 not in inside:
            assert not any(int(o[i]) for o in out)
            continue
        ballot = sum(1 << k for k in inside if warp[k] < 2)
        same = sum(1 << k for k in inside if warp[k] == warp[i % 32])
        total = sum(warp[k] for k in inside) & 0xFFFFFFFF
        signed = max(np.array(warp, np.uint32).view(np.int32)[inside].tolist()) & 0xFFFFFFFF
        assert [int(o[i]) for o in out] == [ballot, members, same, total, signed]


@FEW
@given(values=words())
def test_match_reduce_elect(values):
    text = """match.all.sync.b32 %o0|%o1, %a0, -1; redux.sync.min.u32 %o2, %a0, -1;
    redux.sync.and.b32 %o3, %a0, -1;
    redux.sync.or.b32 %o4, %a0, -1; redux.sync.xor.b32 %o5, %a0, -1; elect.sync %o6|%o7, -1;
    elect.sync _|%p9, 0xffffffff;"""
    u = np.uint32
    out = elementwise(text, [values], [u, bool, u, u, u, u, u, bool])
    for i in range(LANES):
        warp = values[i // 32 * 32 :][:32]
        same = len(set(warp.tolist())) == 1
        want = [
            2**32 - 1 if same else 0,
            same,
            warp.min(),
            np.bitwise_and.reduce(warp),
            np.bitwise_or.reduce(warp),
            np.bitwise_xor.reduce(warp),
            0,
            i % 32 == 0,
        ]
        assert [o[i] for o in out] == want


def test_movmatrix_transposes():
    matrix = np.random.default_rng(0).integers(0, 65536, (2, 8, 8)).astype(np.uint16)
    (out,) = elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 %o0, %a0;", [matrix.reshape(-1).view(np.uint32)], [np.uint32]
    )
    assert (out.view(np.uint16).reshape(2, 8, 8) == matrix.transpose(0, 2, 1)).all()


@pytest.mark.parametrize("schedule", ["lowest", "reversed", 5])
def test_divergence_and_reconvergence(schedule):
    """Each thread loops its own number of times, then the warp meets again for a vote."""
    counts = np.random.default_rng(1).integers(0, 20, 96).astype(np.uint32)
    out = np.zeros((96, 3), np.uint32)
    body = """mov.u32 %r1, %tid.x; mul.wide.u32 %rd10, %r1, 4; add.u64 %rd11, %rd0, %rd10;
    ld.global.u32 %r2, [%rd11];
    mov.u32 %r3, 0; mov.u32 %r4, 1;
    LOOP: setp.ge.u32 %p1, %r3, %r2; @%p1 bra DONE; and.b32 %r5, %r3, 1; setp.eq.u32 %p2, %r5, 0;
    @%p2 bra EVEN;
    mad.lo.u32 %r4, %r4, 3, 1; bra NEXT;
    EVEN: add.u32 %r4, %r4, 7;
    NEXT: add.u32 %r3, %r3, 1; bra LOOP;
    DONE: vote.sync.any.pred %p3, %p1, -1; selp.u32 %r6, 1, 0, %p3; activemask.b32 %r7;
    mul.wide.u32 %rd12, %r1, 12; add.u64 %rd13, %rd1, %rd12; st.global.u32 [%rd13], %r4;
    st.global.u32 [%rd13+4], %r6;
    st.global.u32 [%rd13+8], %r7;"""
    run(body, [counts, out], block=96, schedule=schedule)
    for n, row in zip(counts.tolist(), out.tolist(), strict=True):
        v = 1
        for k in range(n):
            v = (v + 7 if k % 2 == 0 else v * 3 + 1) & 0xFFFFFFFF
        assert row == [v, 1, 0xFFFFFFFF]
