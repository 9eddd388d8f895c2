"""Loads, stores, copies, atomics, views with gaps, far offsets, generic and local addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ptx_operands import FEW
from ptx_support import aligned, kernel_text, run

from fa2_cute.emulator import Tensor, errors, launch, load

SHARED = ".extern .shared .align 16 .b8 smem[];\n"


SHAPES = [(1, 8), (1, 16), (1, 32), (1, 64), (2, 16), (4, 16), (2, 32), (4, 32), (2, 64)]
ACCESSES = [(space, *shape) for space in ("global", "shared", "generic", "local") for shape in SHAPES]


@pytest.mark.parametrize(("space", "vector", "bits"), [*ACCESSES, ("global", 4, 64)])  # 32 bytes: global only
def test_round_trips(space, vector, bits):
    size = vector * bits // 8
    source = aligned(np.random.default_rng(bits).integers(0, 256, 64 * size).astype(np.uint8))
    out = aligned(np.zeros_like(source))
    register = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}[bits]
    names = [f"{register}{40 + i}" for i in range(vector)]
    value = f"{{{', '.join(names)}}}" if vector > 1 else names[0]
    tail = (f".v{vector}" if vector > 1 else "") + f".b{bits}"
    body = (
        f"mov.u32 %r1, %tid.x; mul.wide.u32 %rd10, %r1, {size}; add.u64 %rd11, %rd0, %rd10; add.u64 %rd12, %rd1, %rd10;"
    )
    body += f"ld.global.nc.L1::no_allocate.L2::128B{tail} {value}, [%rd11];\n"
    through = {
        "global": "",
        "shared": f"mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, {size}, %r2; st.shared{tail} [%r3], {value}; "
        f"ld.shared{tail} {value}, [%r3];",
        "generic": f"mov.u32 %r2, smem; cvt.u64.u32 %rd13, %r2; cvta.shared.u64 %rd14, %rd13; add.u64 "
        f"%rd15, %rd14, %rd10; "
        f"st{tail} [%rd15], {value}; ld{tail} {value}, [%rd15]; st{tail} [%rd12], {value};",
        "local": f"mov.u64 %rd13, depot; cvta.local.u64 %rd14, %rd13; st.local{tail} [%rd13+32], {value}; "
        f"ld{tail} {value}, [%rd14+32];",
    }[space]
    body += f"{through}\nst.global{tail} [%rd12], {value};"
    run(
        body,
        [source, out],
        block=64,
        shared=4096,
        before=SHARED,
        declarations=".local .align 16 .b8 depot[64];",
    )
    assert (out == source).all()


def test_sign_and_zero_extension():
    source = np.arange(256, dtype=np.uint8)
    out = aligned(np.zeros((256, 4), np.int64))
    body = """mov.u32 %r1, %tid.x; cvt.u64.u32 %rd10, %r1; add.u64 %rd11, %rd0, %rd10;
    mul.wide.u32 %rd12, %r1, 32;
    add.u64 %rd13, %rd1, %rd12; ld.global.s8 %rd20, [%rd11]; ld.global.u8 %rd21, [%rd11];
    ld.global.s8 %r10, [%rd11];
    ld.global.s8 %h10, [%rd11]; cvt.s64.s32 %rd22, %r10; cvt.s64.s16 %rd23, %h10;
    st.global.v4.u64 [%rd13], {%rd20, %rd21, %rd22, %rd23};"""
    run(body, [source, out], block=256)
    signed = source.view(np.int8).astype(np.int64)
    assert (out == np.stack([signed, source, signed, signed], 1)).all()


def test_predicated_accesses():
    source, out = np.arange(64, dtype=np.uint32), np.full(64, 7, np.uint32)
    body = """mov.u32 %r1, %tid.x; mul.wide.u32 %rd10, %r1, 4; add.u64 %rd11, %rd0, %rd10;
    add.u64 %rd12, %rd1, %rd10;
    and.b32 %r2, %r1, 3; setp.eq.u32 %p1, %r2, 0; mov.u32 %r3, 99; @%p1 ld.global.u32 %r3, [%rd11];
    setp.lt.u32 %p2, %r1, 50; @%p2 st.global.u32 [%rd12], %r3; @!%p2 bra END; @%p1 add.u32 %r3, %r3, 1;
    END: mov.u32 %r9, 0;"""
    run(body, [source, out], block=64)
    want = np.where(source % 4 == 0, source, 99)
    assert (out == np.where(source < 50, want, 7)).all()


@pytest.mark.parametrize("size", [4, 8, 16])
@FEW
@given(data=st.data())
def test_async_copies_with_source_sizes(size, data):
    lengths = np.array(data.draw(st.lists(st.integers(0, size), min_size=32, max_size=32)), np.uint32)
    skip = np.array(data.draw(st.lists(st.booleans(), min_size=32, max_size=32)), np.uint8)
    source = np.random.default_rng(size).integers(1, 256, (32, size)).astype(np.uint8)
    out = np.zeros((2, 32, size), np.uint8)
    kind = "cg" if size == 16 else "ca"
    words = "".join(
        f"ld.shared.u32 %r20, [%r3+{base + 4 * i}]; st.global.u32 "
        f"[%rd14+{base // 1024 * 32 * size + 4 * i}], %r20;\n"
        for base in (0, 1024) for i in range(size // 4))  # fmt: skip
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, {size}, %r2;
    mul.wide.u32 %rd10, %r1, {size};
    add.u64 %rd11, %rd0, %rd10; mad.wide.u32 %rd12, %r1, 4, %rd1; ld.global.u32 %r4, [%rd12];
    cvt.u64.u32 %rd13, %r1;
    add.u64 %rd13, %rd13, %rd2; ld.global.u8 %h1, [%rd13]; setp.ne.u16 %p1, %h1, 0;
    add.u64 %rd14, %rd3, %rd10;
    st.shared.u32 [%r3+1024], 0; {"st.shared.u32 [%r3+1028], 0;" if size > 4 else ""}
    {"st.shared.v2.u32 [%r3+1032], {0, 0};" if size > 8 else ""}
    cp.async.{kind}.shared.global.L2::128B [%r3], [%rd11], {size}, %r4;
    @%p1 cp.async.{kind}.shared.global [%r3+1024], [%rd11], {size};
    cp.async.commit_group; cp.async.wait_group 0;\n{words}"""
    run(body, [source, lengths, skip, out], shared=2048, before=SHARED)
    partial = np.where(np.arange(size) < lengths[:, None], source, 0)
    assert (out[0] == partial).all()
    assert (out[1] == np.where(skip[:, None] != 0, source, 0)).all()


ATOMICS = {
    "add.u32": (np.uint32, lambda a: a.sum(dtype=np.uint32)),
    "min.s32": (np.int32, lambda a: a.min()),
    "max.u32": (np.uint32, lambda a: a.max()),
    "and.b32": (np.uint32, np.bitwise_and.reduce),
    "or.b32": (np.uint32, np.bitwise_or.reduce),
    "xor.b32": (np.uint32, np.bitwise_xor.reduce),
    "add.u64": (np.uint64, lambda a: a.sum(dtype=np.uint64)),
    "add.f32": (np.float32, lambda a: a.sum(dtype=np.float32)),
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("op", ATOMICS)
def test_atomics(op, space):
    dtype, reduce = ATOMICS[op]
    rng = np.random.default_rng(5)
    values = (
        rng.integers(0, 1000, 64).astype(dtype) if dtype == np.float32 else rng.integers(0, 2**31 - 1, 64).astype(dtype)
    )
    start = values[0]
    total, old = np.array([start], dtype), np.zeros(64, dtype)
    width = values.itemsize
    r = "%r" if width == 4 else "%rd"
    bits = 8 * width
    common = f"""mov.u32 %r1, %tid.x; mul.wide.u32 %rd10, %r1, {width}; add.u64 %rd11, %rd0, %rd10;
    add.u64 %rd12, %rd2, %rd10;
    ld.global.b{bits} {r}40, [%rd11]; setp.eq.u32 %p1, %r1, 0;"""
    if space == "global":
        body = f"{common} atom.relaxed.gpu.global.{op} {r}41, [%rd1], {r}40; st.global.b{bits} [%rd12], {r}41;"
    else:
        body = f"""{common} ld.global.b{bits} {r}42, [%rd1]; @%p1 st.shared.b{bits} [smem], {r}42; bar.sync 0;
        atom.shared.{op} {r}41, [smem], {r}40; st.global.b{bits} [%rd12], {r}41; bar.sync 0;
        ld.shared.b{bits} {r}43, [smem];
        @%p1 st.global.b{bits} [%rd1], {r}43;"""
    run(body, [values, total, old], block=64, shared=64, before=SHARED)
    every = np.concatenate([[start], values]).astype(dtype)
    assert total[0] == reduce(every)
    for i in range(64):  # lanes act in thread order
        assert old[i] == reduce(every[: i + 1])


def test_exchange_compare_increment():
    cells, old = np.array([5, 5, 5, 0], np.uint32), np.zeros((4, 32), np.uint32)
    body = """mov.u32 %r1, %tid.x; mad.wide.u32 %rd10, %r1, 4, %rd1; atom.global.exch.b32 %r2, [%rd0], %r1;
    add.u32 %r6, %r1, 6; add.u32 %r7, %r1, 5; atom.global.cas.b32 %r3, [%rd0+4], %r7, %r6;
    atom.global.inc.u32 %r4, [%rd0+8], 7;
    atom.global.dec.u32 %r5, [%rd0+12], 7; st.global.u32 [%rd10], %r2; st.global.u32 [%rd10+128], %r3;
    st.global.u32 [%rd10+256], %r4; st.global.u32 [%rd10+384], %r5;"""
    run(body, [cells, old])
    lanes = np.arange(32)
    assert (old[0] == np.r_[5, lanes[:-1]]).all()
    assert cells[0] == 31
    assert (old[1] == 5 + lanes).all()
    assert cells[1] == 37
    assert (old[2] == (5 + lanes) % 8).all()
    assert (old[3] == (-lanes) % 8).all()


COPY = """mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 32, %r1;
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.s64 %rd3, [p2]; mul.wide.u32 %rd4, %r3, 4;
add.s64 %rd5, %rd2, %rd4;
cvt.u64.u32 %rd6, %r3; mad.lo.s64 %rd7, %rd6, %rd3, %rd1; ld.global.u32 %r4, [%rd7];
st.global.u32 [%rd5], %r4;"""


def gather(array, stride_bytes, count, name="view"):
    """Reads ``count`` words stride_bytes apart, beginning at the array's first element."""
    text = kernel_text(COPY, 2).replace(".param .u64 p1)", ".param .u64 p1, .param .s64 p2)")
    out = np.zeros(count, np.uint32)
    launch(
        load(text).kernel(),
        count // 32,
        32,
        [Tensor(array, name), Tensor(out, "out", writable=True), np.int64(stride_bytes)],
    )
    return out


def test_strided_views_are_exact():
    base = np.arange(32 * 8, dtype=np.uint32).reshape(32, 8)
    assert (gather(base[:, 2:5], 32, 32) == base[:, 2]).all()
    assert (gather(base[::-1, 3:4], -32, 32) == base[::-1, 3]).all()
    for stride, what in (
        (28, "gap"),
        (36, "gap"),
        (64, "past its last element"),
        (-32, "before its first element"),
    ):
        with pytest.raises(errors.OutOfBoundsGlobal, match=what):
            gather(base[:, 2:5] if stride != 36 else base[:, 4:5], stride, 32)
    with pytest.raises(errors.OutOfBoundsGlobal, match=r"'view' byte offset 128.*element"[:20]):
        gather(base[:4, :], 128, 32)


def test_interleaved_views():
    """q and k cut from one packed tensor: spans overlap, elements do not."""
    packed = torch.arange(64 * 2 * 4, dtype=torch.int32).reshape(64, 2, 4)
    q, k = packed[:, 0], packed[:, 1]
    text = kernel_text(
        """mov.u32 %r1, %tid.x; mul.wide.u32 %rd10, %r1, 32; add.u64 %rd11, %rd0, %rd10;
        add.u64 %rd12, %rd1, %rd10;
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd11];
        st.global.v4.u32 [%rd12], {%r10, %r11, %r12, %r13};""", 2)  # fmt: skip
    launch(load(text).kernel(), 1, 64, [Tensor(q, "q"), Tensor(k, "k", writable=True)])
    assert (k == q).all()
    with pytest.raises(errors.ReadOnlyWrite, match="'q'"):
        launch(load(text).kernel(), 1, 64, [Tensor(k, "k", writable=True), Tensor(q, "q")])


def test_overlapping_strides():
    """A sliding window (strides that do not nest) is checked by a map of its bytes."""
    base = np.arange(64, dtype=np.uint32)
    window = np.lib.stride_tricks.as_strided(base, (20, 3), (8, 4))  # elements 0 .. 40
    assert (gather(window, 4, 32) == base[:32]).all()
    with pytest.raises(errors.OutOfBoundsGlobal):
        gather(window, 8, 32)
    gaps = np.lib.stride_tricks.as_strided(base, (3, 4), (20, 8))  # 0 2 4 6 | 5 7 9 11 | 10 12 14 16: never 1 or 3
    with pytest.raises(errors.OutOfBoundsGlobal, match="gap"):
        gather(gaps, 4, 32)


def test_beyond_two_to_the_31_elements():
    """A lazily allocated 5 GiB tensor: byte offsets past 2**32 are exact, and the end is still guarded."""
    big = np.empty(5 << 30, np.uint8)
    stride = (big.size - 4) // 31 // 4 * 4
    for i in (0, 30, 31):
        big[i * stride : i * stride + 4].view(np.uint32)[0] = 1000 + i
    out = gather(big, stride, 32, "big")
    assert out[30] == 1030
    assert out[31] == 1031
    with pytest.raises(errors.OutOfBoundsGlobal, match="'big' byte offset"):
        gather(big, stride + 4 * (1 << 20), 32, "big")
    wide = torch.empty(5 << 29, dtype=torch.bfloat16).view(5, 1 << 29)
    wide[4, -2:] = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    step = (wide.numel() * 2 - 4) // 31 // 4 * 4
    assert gather(wide, step, 32)[31] is not None


def test_local_memory_bounds():
    for offset, ok in ((60, True), (64, False), (-4, False)):
        body = f"mov.u64 %rd13, depot; st.local.u32 [%rd13+{offset}], 1;"
        if ok:
            run(body, [np.zeros(4, np.uint32)], declarations=".local .align 16 .b8 depot[64];")
        else:
            with pytest.raises(errors.OutOfBoundsLocal):
                run(body, [np.zeros(4, np.uint32)], declarations=".local .align 16 .b8 depot[64];")


def test_static_and_dynamic_shared_memory_do_not_overlap():
    out = np.zeros(32, np.uint32)
    body = """mov.u32 %r1, %tid.x; mov.u32 %r2, table; mov.u32 %r3, smem; mad.lo.u32 %r4, %r1, 4, %r2;
    mad.lo.u32 %r5, %r1, 4, %r3;
    st.shared.u32 [%r4], 100; st.shared.u32 [%r5], %r1; ld.shared.u32 %r6, [%r4]; ld.shared.u32 %r7, [%r5];
    add.u32 %r8, %r6, %r7; mad.wide.u32 %rd10, %r1, 4, %rd0; st.global.u32 [%rd10], %r8;"""
    table = ".shared .align 4 .b8 table[128];"
    run(body, [out], shared=128, before=SHARED, declarations=table)
    assert (out == 100 + np.arange(32)).all()
    with pytest.raises(errors.OutOfBoundsShared, match="the block's 256 bytes"):
        run(body.replace("[%r5], %r1", "[%r5+4], %r1"), [out], shared=128, before=SHARED, declarations=table)
