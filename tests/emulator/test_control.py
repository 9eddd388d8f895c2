"""Barriers between lanes, blocks that are not whole warps, instructions without effect, deadlock reports."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ptx_support import run

from fa2_cute.emulator import errors
from fa2_cute.emulator.ops.registry import opcodes

SHARED = ".extern .shared .align 16 .b8 smem[];\n"
SCHEDULES = ["lowest", "reversed", 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_block_that_is_not_whole_warps(schedule):
    """48 threads: the second warp has 16 lanes, which meet barriers and shuffles with the absent ones named."""
    out = np.zeros(48, np.uint32)
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, 4, %r2;
    st.shared.u32 [%r3], %r1; bar.sync 0;
    sub.u32 %r4, 47, %r1; mad.lo.u32 %r5, %r4, 4, %r2; ld.shared.u32 %r6, [%r5]; bar.sync 0;
    shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1; vote.sync.all.pred %p1, 1, -1; selp.u32 %r8, 1000, 0, %p1;
    add.u32 %r7, %r7, %r8;
    mad.wide.u32 %rd10, %r1, 4, %rd0; st.global.u32 [%rd10], %r7;"""
    run(body, [out], block=48, shared=192, before=SHARED, schedule=schedule)
    assert (out == 1047 - (np.arange(48) ^ 1)).all()
    with pytest.raises(errors.PartialWarp, match="reads lane"):
        run("mov.u32 %r1, 3; shfl.sync.bfly.b32 %r7, %r1, 16, 31, -1;", [out], block=48)
    with pytest.raises(errors.PartialWarp, match="all 32 lanes"):
        run("mov.u32 %r1, 3; movmatrix.sync.aligned.m8n8.trans.b16 %r7, %r1;", [out], block=48)


def test_warp_barrier():
    half = "mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bra B; A: bar.warp.sync {}; B: mov.u32 %r2, 0;"
    run(half.format("0xffff"), [np.zeros(1)], block=64)
    run("bar.warp.sync 0xffffffff;", [np.zeros(1)], block=64)
    with pytest.raises(errors.PartialWarp, match="names lanes"):
        run(half.format("-1"), [np.zeros(1)], block=64)


def test_instructions_without_effect():
    """Fences, hints and policies run; isspacep and clocks answer something sensible."""
    out = np.zeros(4, np.uint32)
    body = """membar.gl; membar.cta; fence.acq_rel.gpu; fence.proxy.async;
    fence.mbarrier_init.release.cluster; nanosleep.u32 20;
    griddepcontrol.wait; griddepcontrol.launch_dependents; prefetch.global.L2 [%rd0]; prefetchu.L1 [%rd0];
    applypriority.global.L2::evict_normal [%rd0], 128; pmevent 1; setmaxnreg.inc.sync.aligned.u32 232;
    createpolicy.fractional.L2::evict_last.b64 %rd20, 1.0; discard.global.L2 [%rd0], 128;
    mov.u32 %r1, %clock; mov.u64 %rd21, %clock64; mov.u32 %r2, %smid; mov.u32 %r3, %lanemask_lt;
    isspacep.global %p1, %rd0;
    mov.u32 %r4, smem; cvt.u64.u32 %rd22, %r4; cvta.shared.u64 %rd23, %rd22; isspacep.shared %p2, %rd23;
    isspacep.shared %p3, %rd0; cvta.to.shared.u64 %rd24, %rd23; setp.eq.u64 %p4, %rd24, %rd22;
    selp.u32 %r10, 1, 0, %p1; selp.u32 %r11, 1, 0, %p2; selp.u32 %r12, 1, 0, %p3; selp.u32 %r13, 1, 0, %p4;
    st.global.v4.u32 [%rd0], {%r10, %r11, %r12, %r13};"""
    run(body, [out], block=1, shared=16, before=SHARED)
    assert out.tolist() == [1, 1, 0, 1]


def test_lane_masks():
    out = np.zeros((32, 5), np.uint32)
    names = ["eq", "lt", "le", "gt", "ge"]
    body = "mov.u32 %r1, %laneid; mad.wide.u32 %rd10, %r1, 20, %rd0;"
    body += "".join(f"mov.u32 %r2, %lanemask_{n}; st.global.u32 [%rd10+{4 * i}], %r2;" for i, n in enumerate(names))
    run(body, [out])
    for lane, row in enumerate(out.tolist()):
        below = (1 << lane) - 1
        everything = 0xFFFFFFFF
        want = [1 << lane, below, below | 1 << lane, everything & ~(below | 1 << lane), everything & ~below]
        assert row == want


def test_deadlock_report_names_everybody():
    body = """mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r2, 1;
    @%p1 ret;
    @%p2 bra TWO; bar.sync 3, 96; bra END; TWO: bar.sync 5, 64; END: mov.u32 %r9, 1;"""
    with pytest.raises(errors.BarrierMismatch) as caught:
        run(body, [np.zeros(1)], block=96)
    text = str(caught.value)
    for words in (
        "deadlock: barrier 3 has 32 of 96 threads (warps [2] wait)",
        "warps [0] have exited",
        "warps [1] wait at barrier 5",
    ):
        assert words in text


def test_producer_and_consumer_over_named_barriers():
    """Warp 0 fills two buffers in turn, warp 1 empties them: full and empty barriers, ten rounds, no false alarm."""
    out = np.zeros((10, 32), np.uint32)
    body = """mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; mov.u32 %r3, smem; mad.lo.u32 %r4, %r2, 4, %r3;
    xor.b32 %r5, %r2, 7; mad.lo.u32 %r5, %r5, 4, %r3; mov.u32 %r6, 0; setp.ge.u32 %p1, %r1, 32;
    mov.u32 %r9, 0;
    @%p1 bra CONSUMER;
    PRODUCER: setp.ge.u32 %p2, %r6, 10; @%p2 bra END; and.b32 %r7, %r6, 1; shl.b32 %r8, %r7, 7;
    add.u32 %r10, %r7, 3;
    setp.lt.u32 %p3, %r6, 2; @%p3 bra FILL; bar.sync %r10, 64;
    FILL: add.u32 %r11, %r4, %r8; mad.lo.u32 %r12, %r6, 100, %r2; st.shared.u32 [%r11], %r12;
    add.u32 %r13, %r7, 1;
    bar.arrive %r13, 64; add.u32 %r6, %r6, 1; bra PRODUCER;
    CONSUMER: setp.ge.u32 %p2, %r6, 10; @%p2 bra END; and.b32 %r7, %r6, 1; shl.b32 %r8, %r7, 7;
    add.u32 %r13, %r7, 1;
    bar.sync %r13, 64; add.u32 %r11, %r5, %r8; ld.shared.u32 %r12, [%r11]; mad.lo.u32 %r14, %r6, 32, %r2;
    mad.wide.u32 %rd10, %r14, 4, %rd0; st.global.u32 [%rd10], %r12; add.u32 %r10, %r7, 3;
    setp.ge.u32 %p3, %r6, 8;
    @%p3 bra LAST; bar.arrive %r10, 64; LAST: add.u32 %r6, %r6, 1; bra CONSUMER;
    END: mov.u32 %r9, 1;"""
    want = np.arange(10)[:, None] * 100 + (np.arange(32) ^ 7)
    for schedule in SCHEDULES:
        out[:] = 0
        run(body, [out], block=64, shared=256, before=SHARED, schedule=schedule)
        assert (out == want).all()
    for broken in (body.replace("bar.sync %r10, 64;", ""), body.replace("bar.sync %r13, 64;", "")):
        for schedule in SCHEDULES:
            with pytest.raises((errors.SharedRace, errors.UninitialisedSharedRead, errors.BarrierMismatch)):
                run(broken, [out], block=64, shared=256, before=SHARED, schedule=schedule)


def test_every_opcode_has_a_test():
    """Each registered opcode appears in the PTX of some test of this folder (or in the DSL kernels')."""
    from pathlib import Path

    text = "\n".join(p.read_text() for p in Path(__file__).parent.glob("*.py"))
    missing = [op for op in opcodes() if not re.search(rf"{re.escape(op)}\b", text)]
    assert not missing


def test_shared_memory_wavefronts():
    """Words at stride s meet in gcd(s, 32) banks; wide accesses go by half and quarter warps."""
    for stride, waves in ((1, 1), (2, 2), (3, 1), (8, 8), (32, 32), (0, 1)):
        body = f"""mov.u32 %r1, %laneid; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, {4 * stride}, %r2;
        st.shared.u32 [%r3], 7;
        bar.warp.sync -1;
        ld.shared.u32 %r4, [%r3];"""
        counters = run(body, [np.zeros(1)], shared=8192, before=SHARED, counters=True).counters
        (load,) = [x for x in counters.lines.values() if x.text.startswith("ld.shared")]
        assert (load.wavefronts, load.ideal, load.conflicts) == (waves, 1, waves - 1)
    for width, ideal in ((8, 2), (16, 4)):
        body = f"""mov.u32 %r1, %laneid; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, {width}, %r2;
        {"st.shared.v2.u32 [%r3], {7, 7};" if width == 8 else "st.shared.v4.u32 [%r3], {7, 7, 7, 7};"}"""
        counters = run(body, [np.zeros(1)], shared=8192, before=SHARED, counters=True).counters
        (store,) = counters.lines.values()
        assert (store.wavefronts, store.ideal, counters.bank_conflicts) == (ideal, ideal, 0)
        assert store.bytes == 32 * width


def test_global_sectors():
    """A warp reading 4-byte words touches 4 sectors when they are neighbours, 32 when they are 32 bytes apart."""
    data = np.zeros(1 << 12, np.uint32)
    start = -data.__array_interface__["data"][0] // 4 % 8
    for stride, sectors in ((1, 4), (2, 8), (8, 32), (0, 1)):
        body = f"mov.u32 %r1, %laneid; mad.wide.u32 %rd10, %r1, {4 * stride}, %rd0; ld.global.u32 %r2, [%rd10];"
        counters = run(body, [data[start:]], counters=True).counters
        (load,) = counters.lines.values()
        assert (load.sectors, load.bytes, load.executions) == (sectors, 128, 1)
        assert counters.read == {"t0": 128}
