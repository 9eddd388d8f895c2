"""load, launch, Tensor and Stats: what they accept, what they refuse, and the words they use."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from ptx_support import HEADER, kernel_text, run

from fa2_cute.emulator import EmulatorError, Tensor, errors, launch, load

STRUCT = f"""{HEADER}
.visible .entry k(.param .align 8 .b8 t[40], .param .u64 out, .param .f32 scale, .param .s32 n)
{{
.reg .b32 %r<20>; .reg .b64 %rd<20>;
ld.param.u64 %rd1, [out];
ld.param.v2.u32 {{%r1, %r2}}, [t+8];
ld.param.u32 %r3, [t+16];
ld.param.u64 %rd2, [t+24];
ld.param.u64 %rd3, [t+32];
ld.param.f32 %r4, [scale];
ld.param.s32 %r5, [n];
ld.param.u64 %rd4, [t];
mov.b64 %rd6, t;
ld.param.u32 %r6, [%rd6+8];
st.global.v4.u32 [%rd1], {{%r1, %r2, %r3, %r4}};
st.global.v2.u64 [%rd1+16], {{%rd2, %rd3}};
st.global.v2.u32 [%rd1+32], {{%r5, %r6}};
st.global.u64 [%rd1+40], %rd4;
ret;
}}"""


def test_tensor_struct_and_scalars():
    """The parameter struct of a DSL tensor: pointer, extents as i32, strides as i64 at their natural alignment."""
    x = torch.zeros(7, 6, 5, 8, dtype=torch.bfloat16)[:, ::2, 1:]
    out = np.zeros(6, np.uint64)
    kernel = load(STRUCT).kernels["k"]
    args = [
        Tensor(x, "x", (0, 1, 2), (0, 1)),
        Tensor(out, "out", writable=True),
        np.float32(1.5),
        np.int32(-3),
    ]
    launch(kernel, 1, 1, args)
    words = out.view(np.uint32)
    assert words[:3].tolist() == [7, 3, 4]
    assert words[3:4].view(np.float32)[0] == 1.5
    assert out[2:4].tolist() == [6 * 5 * 8, 2 * 5 * 8]
    assert words[8:10].view(np.int32).tolist() == [-3, 7]
    assert out[5] == x.data_ptr()
    raw = bytes(Tensor(x, "x", (0, 1, 2), (0, 1)).pack())
    launch(kernel, 1, 1, [raw, *args[1:]])


@pytest.mark.parametrize("change", [
    (0, lambda x: Tensor(x, "x", (0, 1), (0, 1)), "32 bytes, the kernel's parameter is 40"),
    (2, lambda x: 1.5, "not float"),
    (2, lambda x: np.float64(1.5), "float64 scalar is 8 bytes"),
    (3, lambda x: np.int64(1), "int64 scalar is 8 bytes"),
    (1, lambda x: [1, 2], "not list"),
])  # fmt: skip
def test_arguments_that_do_not_fit(change):
    x, out = np.zeros((2, 3, 4), np.float32), np.zeros(8, np.uint64)
    args = [Tensor(x, "x", (0, 1, 2), (0, 1)), Tensor(out, "out", writable=True), np.float32(1), np.int32(1)]
    position, make, words = change
    args[position] = make(x)
    with pytest.raises(errors.ArgumentError, match=words):
        launch(load(STRUCT).kernel(), 1, 1, args)
    with pytest.raises(errors.ArgumentError, match="takes 4 arguments, got 3"):
        launch(load(STRUCT).kernel(), 1, 1, args[:3])


def test_tensors_that_are_refused():
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    Tensor(read_only, "r")
    for make, words in (
        (lambda: Tensor(read_only, "r", writable=True), "read-only"),
        (lambda: Tensor([1, 2], "l"), "list"),
        (lambda: Tensor(np.zeros(4), "a", extents=(1,)), "dimension 1 of a 1-d"),
        (lambda: Tensor(torch.zeros(4, device="meta"), "m"), "meta"),
    ):
        with pytest.raises(errors.ArgumentError, match=words):
            make()


def test_dimensions():
    for grid, block, words in (
        (0, 32, "grid"),
        (1, 2048, "1024 threads"),
        ((1, 1, 1, 1), 32, "grid"),
        (1, (8, -1), "block"),
    ):
        with pytest.raises(errors.ArgumentError, match=words):
            run("mov.u32 %r1, 0;", [np.zeros(1)], block=block, grid=grid)
    text = kernel_text("mov.u32 %r1, 0;", 0).replace(")\n{", ")\n.reqntid 64, 1, 1\n{", 1)
    launch(load(text).kernel(), 1, 64, [])
    with pytest.raises(errors.ArgumentError, match="reqntid"):
        launch(load(text).kernel(), 1, 32, [])
    with pytest.raises(errors.ArgumentError, match="sm_42"):
        launch(load(text).kernel(), 1, 64, [], arch="sm_42")
    with pytest.raises(errors.ArgumentError, match="schedule"):
        launch(load(text).kernel(), 1, 64, [], schedule="fastest")


def test_three_dimensional_indices():
    grid, block = (3, 2, 2), (5, 3, 4)
    out = np.zeros((12, 60, 6), np.uint32)
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ctaid.x;
    mov.u32 %r5, %ctaid.y;
    mov.u32 %r6, %ctaid.z; mov.u32 %r10, %ntid.x; mov.u32 %r11, %ntid.y; mov.u32 %r12, %nctaid.x;
    mov.u32 %r13, %nctaid.y;
    mad.lo.u32 %r20, %r3, %r11, %r2; mad.lo.u32 %r20, %r20, %r10, %r1; mad.lo.u32 %r21, %r6, %r13, %r5;
    mad.lo.u32 %r21, %r21, %r12, %r4; mad.lo.u32 %r22, %r21, 60, %r20; mad.wide.u32 %rd10, %r22, 24, %rd0;
    st.global.v2.u32 [%rd10], {%r1, %r2}; st.global.v2.u32 [%rd10+8], {%r3, %r4};
    st.global.v2.u32 [%rd10+16], {%r5, %r6};"""
    stats = run(body, [out], grid=grid, block=block)
    assert stats.ctas == 12
    for cta in range(12):
        for thread in range(60):
            want = [thread % 5, thread // 5 % 3, thread // 15, cta % 3, cta // 3 % 2, cta // 6]
            assert out[cta, thread].tolist() == want


def test_progress_and_interruption():
    seen = []
    body = (
        "mov.u32 %r1, %ctaid.x; mad.wide.u32 %rd10, %r1, 4, %rd0; setp.eq.u32 %p1, %r1, 0; st.global.u32 [%rd10], %r1;"
    )
    blocks = 1000
    out = np.zeros(blocks, np.uint32)
    body = "mov.u32 %r2, %tid.x; setp.ne.u32 %p2, %r2, 0; @%p2 ret; " + body
    run(body, [out], block=32, grid=blocks, progress=lambda done, total: seen.append((done, total)))
    assert (out == np.arange(blocks)).all()
    assert len(seen) > 1
    assert seen[-1] == (blocks, blocks)
    assert seen == sorted(set(seen))

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(body, [out], block=32, grid=blocks, progress=stop)
    run(body, [out], block=32, grid=blocks)


def test_stats():
    body = (
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra A; add.u32 %r2, %r1, 1; add.u32 "
        "%r2, %r2, 1; A: mov.u32 %r3, 1;"
    )
    stats = run(body, [np.zeros(1)], block=96, grid=5)
    assert stats.opcodes["add.u32"] == 2 * 2 * 5
    assert stats.opcodes["setp.lt.u32"] == 3 * 5
    assert stats.mma == 0
    assert stats.seconds > 0
    assert stats.instructions == sum(stats.opcodes.values())


def test_no_warnings_leak():
    x = np.array([np.nan, np.inf, -np.inf, 1e38], np.float32)
    body = """ld.global.v4.f32 {%r1, %r2, %r3, %r4}, [%rd0]; add.f32 %r5, %r2, %r3; mul.f32 %r6, %r4, %r4;
    div.rn.f32 %r7, %r1, %r1;
    cvt.rzi.s32.f32 %r8, %r1; cvt.rn.f16.f32 %h1, %r4; sqrt.rn.f32 %r9, %r3; add.u32 %r10, 0xffffffff, 1;
    mul.lo.u32 %r11, %r10, -1;
    mul.lo.s32 %r12, 2147483647, 2147483647; shl.b32 %r13, %r12, 31; ex2.approx.f32 %r14, %r4;
    div.s32 %r15, %r12, 0;"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(body, [x])


def test_parse_errors_name_the_line():
    for body, words in (
        ("mov.u32 %r1, %nowhere;", "%nowhere"),
        ("@%q7 bra L;", "%q7"),
        ("bra MISSING;", "MISSING"),
        ("mov.u32 %r500, 1;", "%r500"),
        (".frob 7;", ".frob"),
    ):
        text = kernel_text(f"mov.u32 %r2, 0;\n{body}\n", 0)
        line = text[: text.index(body)].count("\n") + 1
        with pytest.raises(errors.ParseError, match=words.replace(".", r"\.")) as caught:
            launch(load(text).kernel(), 1, 32, [])
        assert caught.value.line == line
        assert f"line {line}" in str(caught.value)
    for text in ("hello", ".entry k(", HEADER + ".visible .entry k()\n{ ret;"):
        with pytest.raises(errors.ParseError):
            load(text)
    with pytest.raises(errors.ParseError, match="exactly one"):
        load(HEADER).kernel()


def test_syntax_that_compilers_write():
    """Comments, nested scopes of inline assembly, debug sections, pragmas, indirect branches, two kernels."""
    text = f"""//
// Generated
//
{HEADER}
.file 1 "kernel.py"
.section .debug_info {{
.b32 1
.b8 2, 3 // text {{
}}
.visible .entry first() .maxntid 128, 1, 1 .minnctapersm 2 {{ ret; }}
.visible .entry second(.param .u64 .ptr .global .align 16 p) /* a
comment over lines */
.reqntid 32, 1, 1
{{
 .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
 .loc 1 10 3, function_name $L__info_string0, inlined_at 1 5 2
 ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x;
 // begin inline asm
 {{ .reg .pred p; .reg .b32 t;
   setp.lt.u32 p, %r1, 16; selp.b32 t, 5, 6, p;
   @!p bra L; add.u32 t, t, 100;
 L: mov.b32 %r2, t; }}
 // end inline asm
 {{ .reg .b32 t; add.u32 t, %r2, 1; L: mov.b32 %r2, t; }}
 .pragma "nounroll";
 and.b32 %r3, %r1, 3;
 brx.idx %r3, $L_table;
$L_table: .branchtargets $A, $B, $A, $C;
$A: add.u32 %r2, %r2, 1000; bra.uni $END;
$B: add.u32 %r2, %r2, 2000; bra.uni $END;
$C: add.u32 %r2, %r2, 3000;
$END: mad.wide.u32 %rd2, %r1, 4, %rd1; st.global.u32 [%rd2], %r2; ret;
}}"""
    module = load(text)
    assert list(module.kernels) == ["first", "second"]
    assert module.target == "sm_120a"
    assert module.version == "8.8"
    out = np.zeros(32, np.uint32)
    launch(module.kernels["second"], 1, 32, [Tensor(out, "out", writable=True)])
    lane = np.arange(32)
    want = np.where(lane < 16, 106, 7) + np.array([1000, 2000, 1000, 3000])[lane % 4]
    assert (out == want).all()


def test_barrier_reductions_and_unaligned_barriers():
    out = np.zeros((64, 4), np.uint32)
    body = """mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 40; bar.red.popc.u32 %r2, 0, %p1;
    bar.red.and.pred %p2, 1, 64, %p1;
    bar.red.or.pred %p3, 0, %p1; selp.u32 %r3, 1, 0, %p2; selp.u32 %r4, 1, 0, %p3; and.b32 %r5, %r1, 1;
    setp.eq.u32 %p4, %r5, 0;
    @%p4 bra EVEN; barrier.sync 2, 64; bra END; EVEN: barrier.cta.sync 2, 64;
    END: barrier.cta.red.popc.aligned.u32 %r6, 1, %p1; bar.cta.red.popc.u32 %r7, 2, 64, %p1; bar.cta.sync 3;
    add.u32 %r2, %r2, %r6; barrier.red.popc.u32 %r6, 3, 64, %p1; add.u32 %r2, %r2, %r6;
    add.u32 %r2, %r2, %r7; setp.lt.u32 %p5, %r1, 32; @%p5 barrier.arrive 4, 64; @!%p5 barrier.cta.sync 4, 64;
    @%p5 bar.cta.arrive 5, 64; @!%p5 bar.cta.sync 5, 64; @%p5 barrier.cta.arrive.aligned 6, 64;
    @!%p5 barrier.sync.aligned 6, 64; mad.wide.u32 %rd10, %r1, 16, %rd0;
    st.global.v4.u32 [%rd10], {%r2, %r3, %r4, %r1};"""
    for schedule in ("lowest", "reversed", 4):
        out[:] = 0
        run(body, [out], block=64, schedule=schedule)
        assert (out == np.stack([np.full(64, 4 * 40), np.zeros(64), np.ones(64), np.arange(64)], 1)).all()


def test_spinning_threads_let_others_run():
    flag = np.zeros(1, np.uint32)
    body = """mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra SET;
    SPIN: atom.global.add.u32 %r2, [%rd0], 0; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN; bra END;
    SET: atom.global.exch.b32 %r3, [%rd0], 1; END: mov.u32 %r4, 0;"""
    run(body, [flag], block=32, grid=2)
    assert flag[0] == 1


def test_errors_share_one_base():
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, Exception):
            assert issubclass(cls, EmulatorError)


def test_importing_needs_neither_torch_nor_the_compiler():
    code = "import sys, fa2_cute.emulator; print([m for m in ('torch', 'cutlass') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
