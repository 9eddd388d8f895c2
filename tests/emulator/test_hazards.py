"""A planted fault for every hazard class, beside the clean kernel that raises nothing, under several schedules."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_support import run

from fa2_cute.emulator import EmulatorError, Tensor, errors

SCHEDULES = ["lowest", "reversed", 1, 2]
SHARED = ".extern .shared .align 16 .b8 smem[];\n"
# %r1: thread; %r2: its 4-byte shared slot; %r3: the slot of the thread 32 further (mod 64)
PROLOGUE = """mov.u32 %r1, %tid.x; mov.u32 %r50, smem; shl.b32 %r51, %r1, 2; add.u32 %r2, %r50, %r51;
xor.b32 %r52, %r51, 128; add.u32 %r3, %r50, %r52; mul.wide.u32 %rd50, %r1, 4; add.u64 %rd51, %rd0, %rd50;
shl.b32 %r53, %r1, 4; add.u32 %r4, %r50, %r53; mul.wide.u32 %rd52, %r1, 16; add.u64 %rd53, %rd0, %rd52;
xor.b32 %r54, %r53, 512; add.u32 %r5, %r50, %r54;
"""


def go(body, schedule="lowest", block=64, shared=4096, tensors=None, **options):
    tensors = [np.zeros(1024, np.uint32)] if tensors is None else tensors
    run(PROLOGUE + body, tensors, block=block, shared=shared, before=SHARED, schedule=schedule, **options)
    return tensors


# name: (exception classes that may report it, faulty body, clean body). Which of two racing accesses comes
# first, and so
# the class, may depend on the schedule; that it is found may not.
CASES = {
    "uninitialised read": (
        (errors.UninitialisedSharedRead,),
        "ld.shared.u32 %r10, [%r2]; st.global.u32 [%rd51], %r10;",
        "st.shared.u32 [%r2], %r1; ld.shared.u32 %r10, [%r2]; st.global.u32 [%rd51], %r10;",
    ),
    "uninitialised bytes of a row": (
        (errors.UninitialisedSharedRead,),
        "st.shared.u32 [%r4], %r1; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];",
        "st.shared.v2.u32 [%r4], {%r1, %r1}; st.shared.v2.u32 [%r4+8], {%r1, %r1}; "
        "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];",
    ),
    "read after write": (
        (errors.UnsynchronisedRead, errors.UninitialisedSharedRead, errors.WriteAfterRead),
        "st.shared.u32 [%r2], %r1; ld.shared.u32 %r10, [%r3];",
        "st.shared.u32 [%r2], %r1; bar.sync 0; ld.shared.u32 %r10, [%r3];",
    ),
    "write after read": (
        (errors.WriteAfterRead, errors.UnsynchronisedRead),
        "st.shared.u32 [%r2], %r1; bar.sync 0; ld.shared.u32 %r10, [%r3]; st.shared.u32 [%r2], %r10;",
        "st.shared.u32 [%r2], %r1; bar.sync 0; ld.shared.u32 %r10, [%r3]; bar.sync 0; st.shared.u32 "
        "[%r2], %r10;",
    ),
    "write after write": (
        (errors.WriteAfterWrite,),
        "st.shared.u32 [%r2], %r1; st.shared.u32 [%r3], %r1;",
        "st.shared.u32 [%r2], %r1; bar.sync 0; st.shared.u32 [%r3], %r1;",
    ),
    "16-byte write after a narrow read": (
        (errors.WriteAfterRead, errors.UnsynchronisedRead),
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; ld.shared.u32 %r10, [%r5+4]; "
        "st.shared.v4.u32 [%r4], {%r10, %r1, %r1, %r1};",
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; ld.shared.u32 %r10, [%r5+4]; bar.sync 0; "
        "st.shared.v4.u32 [%r4], {%r10, %r1, %r1, %r1};",
    ),
    "narrow write after a 16-byte read": (
        (errors.WriteAfterRead, errors.UnsynchronisedRead),
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; ld.shared.v4.u32 {%r10, %r11, %r12, "
        "%r13}, [%r5]; "
        "st.shared.u32 [%r4+12], %r10;",
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; ld.shared.v4.u32 {%r10, %r11, %r12, "
        "%r13}, [%r5]; "
        "st.shared.u32 [%r5+12], %r10;",
    ),
    "two lanes of one instruction": (
        (errors.WriteAfterWrite,),
        "setp.lt.u32 %p1, %r1, 32; @%p1 st.shared.u32 [smem], %r1;",
        "setp.lt.u32 %p1, %r1, 32; @%p1 st.shared.u32 [smem], 7;",  # one warp, one value: allowed
    ),
    "pending copy": (
        (errors.PendingCopyRead,),
        "cp.async.ca.shared.global [%r4], [%rd53], 16; cp.async.commit_group; ld.shared.u32 %r10, [%r4];",
        "cp.async.ca.shared.global [%r4], [%rd53], 16; cp.async.commit_group; cp.async.wait_group 0; "
        "ld.shared.u32 %r10, [%r4];",
    ),
    "copy not committed": (
        (errors.PendingCopyRead,),
        "cp.async.ca.shared.global [%r2], [%rd51], 4; cp.async.wait_group 0; ld.shared.u32 %r10, [%r2];",
        "cp.async.ca.shared.global [%r2], [%rd51], 4; cp.async.wait_all; ld.shared.u32 %r10, [%r2];",
    ),
    "one group too many in flight": (
        (errors.PendingCopyRead,),
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.commit_group; "
        "cp.async.cg.shared.global [%r4+1024], [%rd53], 16; cp.async.commit_group; cp.async.wait_group 1; "
        "ld.shared.u32 %r10, [%r4+1024];",
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.commit_group; "
        "cp.async.cg.shared.global [%r4+1024], [%rd53], 16; cp.async.commit_group; cp.async.wait_group 1; "
        "ld.shared.u32 %r10, [%r4];",
    ),
    "another warp's copy without a barrier": (
        (errors.SharedRace, errors.PendingCopyRead, errors.UninitialisedSharedRead),
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.commit_group; cp.async.wait_group 0; "
        "ld.shared.u32 %r10, [%r5];",
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.commit_group; cp.async.wait_group 0; "
        "bar.sync 0; "
        "ld.shared.u32 %r10, [%r5];",
    ),
    "barrier before the wait": (
        (errors.UnsynchronisedRead, errors.PendingCopyRead, errors.WriteAfterRead),
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.commit_group; bar.sync 0; "
        "cp.async.wait_group 0; "
        "ld.shared.u32 %r10, [%r5];",
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.commit_group; cp.async.wait_group 0; "
        "bar.sync 0; "
        "ld.shared.u32 %r10, [%r5];",
    ),
    "copy over bytes being read": (
        (errors.WriteAfterRead, errors.PendingCopyRead, errors.UnsynchronisedRead),
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; ld.shared.u32 %r10, [%r5]; "
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.wait_all;",
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; ld.shared.u32 %r10, [%r5]; bar.sync 0; "
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.wait_all;",
    ),
    "store over a pending copy": (
        (errors.WriteAfterWrite,),
        "cp.async.cg.shared.global [%r4], [%rd53], 16; st.shared.u32 [%r4], %r1; cp.async.wait_all;",
        "cp.async.cg.shared.global [%r4], [%rd53], 16; cp.async.wait_all; st.shared.u32 [%r4], %r1;",
    ),
    "atomic against a plain read": (
        (errors.WriteAfterRead, errors.UnsynchronisedRead),
        "st.shared.u32 [%r2], 0; bar.sync 0; atom.shared.add.u32 %r10, [smem], 1; setp.eq.u32 %p1, %r1, 40; "
        "@%p1 ld.shared.u32 %r11, [smem];",
        "st.shared.u32 [%r2], 0; bar.sync 0; atom.shared.add.u32 %r10, [smem], 1; bar.sync 0; "
        "setp.eq.u32 %p1, %r1, 40; "
        "@%p1 ld.shared.u32 %r11, [smem];",
    ),
    "named barrier of a subset": (
        (errors.UnsynchronisedRead, errors.WriteAfterRead, errors.UninitialisedSharedRead),
        # each warp waits at its own barrier: nothing orders them
        "st.shared.u32 [%r2], %r1; shr.u32 %r20, %r1, 5; bar.sync %r20, 32; ld.shared.u32 %r10, [%r3];",
        "st.shared.u32 [%r2], %r1; bar.sync 5, 64; ld.shared.u32 %r10, [%r3];",
    ),
    "arrive is not sync": (
        (errors.SharedRace, errors.UninitialisedSharedRead),
        # warp 0 arrives, warp 1 syncs: warp 1 has seen warp 0, not the other way round
        "st.shared.u32 [%r2], %r1; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 3, 64; bra B; A: "
        "bar.arrive 3, 64; "
        "ld.shared.u32 %r10, [%r3]; B: mov.u32 %r11, 0;",
        "st.shared.u32 [%r2], %r1; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 3, 64; ld.shared.u32 "
        "%r10, [%r3]; "
        "bra B; A: bar.arrive 3, 64; B: mov.u32 %r11, 0;",
    ),
    "misaligned shared": (
        (errors.MisalignedAccess,),
        "st.shared.v4.u32 [%r4+4], {%r1, %r1, %r1, %r1};",
        "st.shared.v4.u32 [%r4+16], {%r1, %r1, %r1, %r1};",
    ),
    "misaligned global": (
        (errors.MisalignedAccess,),
        "ld.global.v2.u32 {%r10, %r11}, [%rd53+4];",
        "ld.global.v2.u32 {%r10, %r11}, [%rd53+8];",
    ),
    "past the shared allocation": (
        (errors.OutOfBoundsShared,),
        "st.shared.u32 [%r2+3844], %r1;",
        "st.shared.u32 [%r2+3840], %r1;",
    ),
    "before the shared allocation": (
        (errors.OutOfBoundsShared,),
        "st.shared.u32 [%r2+-4], %r1;",
        "st.shared.u32 [%r2+4], %r1;",
    ),
    "past a tensor": (
        (errors.OutOfBoundsGlobal,),
        "ld.global.u32 %r10, [%rd51+3844];",
        "ld.global.u32 %r10, [%rd51+3840];",
    ),
    "copy from past a tensor": (
        (errors.OutOfBoundsGlobal,),
        "cp.async.cg.shared.global [%r4], [%rd53+3088], 16;",
        "cp.async.cg.shared.global [%r4], [%rd53+3072], 16;",
    ),
    "two threads, one global word": (
        (errors.GlobalRace,),
        "st.global.u32 [%rd0], %r1;",
        "red.global.add.u32 [%rd0], %r1; atom.global.max.u32 %r10, [%rd0], %r1;",
    ),
    "two blocks, one global word": (
        (errors.GlobalRace,),
        "mov.u32 %r20, %ctaid.x; mul.wide.u32 %rd60, %r20, 252; add.u64 %rd61, %rd51, %rd60; "
        "st.global.u32 [%rd61], %r1;",
        "mov.u32 %r20, %ctaid.x; mul.wide.u32 %rd60, %r20, 256; add.u64 %rd61, %rd51, %rd60; "
        "st.global.u32 [%rd61], %r1;",
    ),
    "half a warp at bar.sync": (
        (errors.PartialWarp,),
        "and.b32 %r20, %r1, 1; setp.eq.u32 %p1, %r20, 0; @%p1 bra A; bar.sync 0; bra B; A: bar.sync 0; "
        "B: mov.u32 %r9, 0;",
        "and.b32 %r20, %r1, 32; setp.eq.u32 %p1, %r20, 0; @%p1 bra A; bar.sync 0; bra B; A: bar.sync 0; "
        "B: mov.u32 %r9, 0;",
    ),
    "half a warp at a shuffle": (
        (errors.PartialWarp,),
        "and.b32 %r20, %r1, 1; setp.eq.u32 %p1, %r20, 0; @%p1 shfl.sync.idx.b32 %r10, %r1, 0, 31, -1;",
        "and.b32 %r20, %r1, 1; setp.eq.u32 %p1, %r20, 0; @%p1 shfl.sync.idx.b32 %r10, %r1, 0, 31, "
        "0x55555555;",
    ),
    "a member mask without the lane": (
        (errors.PartialWarp,),
        "vote.sync.ballot.b32 %r10, 1, 0xffff;",
        "vote.sync.ballot.b32 %r10, 1, 0xffffffff;",
    ),
    "half a warp at ldmatrix": (
        (errors.PartialWarp,),
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; and.b32 %r20, %r1, 1; setp.eq.u32 "
        "%p1, %r20, 0; "
        "@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [smem];",
        "st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; and.b32 %r20, %r1, 32; setp.eq.u32 "
        "%p1, %r20, 0; "
        "@%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [smem];",
    ),
    "a barrier one warp never reaches": (
        (errors.BarrierMismatch,),
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 0; A: mov.u32 %r9, 0;",
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 0, 32; A: mov.u32 %r9, 0;",
    ),
    "a warp exits before the barrier": (
        (errors.BarrierMismatch,),
        "setp.lt.u32 %p1, %r1, 32; @%p1 ret; bar.sync 0;",
        "setp.lt.u32 %p1, %r1, 32; @%p1 ret; bar.sync 0, 32;",
    ),
    "different counts": (
        (errors.BarrierMismatch,),
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 32; B: mov.u32 %r9, 0;",
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 64; B: mov.u32 %r9, 0;",
    ),
    "different barriers": (
        (errors.BarrierMismatch,),
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1; bra B; A: bar.sync 2; B: mov.u32 %r9, 0;",
        "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 2; bra B; A: bar.sync 2; B: mov.u32 %r9, 0;",
    ),
    "a count that is not whole warps": (
        (errors.BarrierMismatch,),
        "bar.sync 1, 48;",
        "bar.sync 1, 64;",
    ),
    "trap": ((errors.Trap,), "setp.eq.u32 %p1, %r1, 3; @%p1 trap;", "setp.eq.u32 %p1, %r1, 99; @%p1 trap;"),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_faulty_and_clean(name, schedule):
    classes, faulty, clean = CASES[name]
    grid = 2 if "blocks" in name else 1
    with pytest.raises(classes) as caught:
        go(faulty, schedule, grid=grid)
    assert caught.value.line
    assert caught.value.text
    assert str(caught.value.line) in str(caught.value)
    go(clean, schedule, grid=grid)


def test_every_hazard_class_is_planted():
    planted = {c for classes, *_ in CASES.values() for c in classes}
    elsewhere = {
        errors.ReadOnlyWrite,
        errors.SharedLimit,
        errors.UninitialisedRegister,
        errors.UnknownInstruction,
        errors.ParseError,
        errors.ArgumentError,
        errors.SharedRace,
        errors.OutOfBoundsLocal,
    }
    every = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, EmulatorError)}
    assert every - {EmulatorError} == (planted - {EmulatorError}) | elsewhere


def test_read_only_write():
    data = np.zeros(64, np.uint32)
    body = "st.global.u32 [%rd51], %r1;"
    with pytest.raises(errors.ReadOnlyWrite, match="'weights'"):
        go(body, tensors=[Tensor(data, "weights")])
    assert not data.any()
    go(body, tensors=[Tensor(data, "weights", writable=True)])
    assert (data == np.arange(64)).all()


def test_shared_limit():
    for arch, kib in {
        "sm_80": 163,
        "sm_86": 99,
        "sm_89": 99,
        "sm_90a": 227,
        "sm_100a": 227,
        "sm_120a": 99,
    }.items():
        go("bar.sync 0;", shared=kib * 1024, arch=arch)
        with pytest.raises(errors.SharedLimit, match=arch):
            go("bar.sync 0;", shared=kib * 1024 + 1, arch=arch)


def test_uninitialised_register():
    with pytest.raises(errors.UninitialisedRegister, match="%r77"):
        go("add.u32 %r78, %r77, 1;")
    with pytest.raises(errors.UninitialisedRegister, match="%p9"):
        go("@%p9 mov.u32 %r78, 1;")
    go("mov.u32 %r77, 4; add.u32 %r78, %r77, 1;")


def test_unknown_instruction_before_anything_runs():
    data = np.zeros(64, np.uint32)
    unknown = (
        "frobnicate.b32 %r20, %r1;",
        "add.frob.u32 %r20, %r1, 1;",
        "wmma.load.a.sync %r1, [%rd0];",
        "vote.all.pred %p1, 1;",
        "add.u32 %r20, %r1;",
        "add.u32 %rd20, %r1, 1;",
        "add.u32 %r20, %rd50, 1;",
        "mov.b64 %r20, 5;",
        "barrier.cluster.arrive;",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%r1, %r1, %r1, %r1}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, "
        "{%r1, %r1, %r1, %r1};",
        "cp.async.cg.shared.global [%r4], [%rd53], 8;",
        "cp.async.bulk.shared.global [%r4], [%rd53], 16, [%r2];",
        "call foo, (%r1);",
    )
    for bad in unknown:
        with pytest.raises(errors.UnknownInstruction) as caught:
            go(f"st.global.u32 [%rd51], %r1;\n{bad}", tensors=[data])
        assert not data.any()
        assert caught.value.line > 0
        assert bad[:-1] in str(caught.value)


def test_the_first_error_is_deterministic():
    body = "ld.shared.u32 %r10, [%r3];"
    texts = set()
    for _ in range(3):
        with pytest.raises(errors.UninitialisedSharedRead) as caught:
            go(body, grid=3)
        texts.add(str(caught.value))
    assert len(texts) == 1
    assert "block (0, 0, 0), warp 0, lane 0" in texts.pop()


def test_message_says_where_and_what_to_do():
    with pytest.raises(errors.OutOfBoundsGlobal) as caught:
        go(
            "ld.global.u32 %r10, [%rd51+4096];",
            tensors=[Tensor(np.zeros((4, 256), np.uint32), "query", writable=True)],
        )
    text = str(caught.value)
    for part in ("'query'", "byte offset 4096", "4 bytes past its last element", "shape [4, 256]", "PTX line",
                 "ld.global.u32 %r10, [%rd51+4096]"):  # fmt: skip
        assert part in text


def test_source_line_from_loc():
    body = ".loc 1 42 7\nld.shared.u32 %r10, [%r2];"
    with pytest.raises(errors.UninitialisedSharedRead, match=r"kernel source model/kernel\.py:42"):
        run(
            PROLOGUE + body,
            [np.zeros(4, np.uint32)],
            block=32,
            shared=256,
            before='.file 1 "model/kernel.py"\n' + SHARED,
        )


def test_checks_off_keeps_bounds_and_results():
    racy = CASES["read after write"][1]
    go(racy, checks=False)
    with pytest.raises(errors.OutOfBoundsShared):
        go(CASES["past the shared allocation"][1], checks=False)
    with pytest.raises(errors.OutOfBoundsGlobal):
        go(CASES["past a tensor"][1], checks=False)


def test_transitive_order_through_a_third_warp():
    """Warp 0 -> warp 1 by one barrier, warp 1 -> warp 2 by another: warp 2 may read what warp 0 wrote."""
    body = """shr.u32 %r20, %r1, 5; setp.eq.u32 %p1, %r20, 0; setp.eq.u32 %p2, %r20, 1;
    setp.eq.u32 %p3, %r20, 2;
    @%p1 st.shared.u32 [%r2], %r1;
    @%p1 bar.arrive 1, 64; @%p2 bar.sync 1, 64; {middle} @%p3 bar.sync 2, 64;
    and.b32 %r21, %r1, 31; shl.b32 %r21, %r21, 2; add.u32 %r22, %r50, %r21;
    @%p3 ld.shared.u32 %r23, [%r22];"""
    for schedule in SCHEDULES:
        go(body.format(middle="@%p2 bar.arrive 2, 64;"), schedule, block=96)
    # warp 1 arrives at the second barrier before it meets warp 0: then nothing is passed on
    early = body.replace("@%p1 bar.arrive 1, 64;", "@%p2 bar.arrive 2, 64; @%p1 bar.arrive 1, 64;").format(middle="")
    for schedule in SCHEDULES:
        with pytest.raises((errors.SharedRace, errors.UninitialisedSharedRead)):
            go(early, schedule, block=96)
