"""SASS listings: scheduling fields, loops, pipes."""

from collections import Counter

import pytest

from fa2_cute.explore import records, sass
from fa2_cute.explore.sass import parse


def line(address: int, text: str, *, stall=1, write=7, read=7, waits=0) -> str:
    """An instruction as nvdisasm -c -hex prints it, with the scheduling fields given."""
    control = stall | write << 5 | read << 8 | waits << 11
    return (
        f"        /*{address:04x}*/                   {text} ;   /* 0x{0x1234:016x} */\n"
        f"                                                     /* 0x{control << 41:016x} */\n"
    )


LOOP = (
    line(0x00, "MOV R1, c[0x0][0x28]", stall=2)
    + ".L_x_1:\n"
    + '\t//## File "/somewhere/kernels/products.py", line 77\n'
    + line(0x10, "LDSM.16.M88.4 R4, [R1]", write=3, stall=8)
    + line(0x20, "HMMA.16816.F32.BF16 R8, R4, R6, R8", waits=0b001000, stall=6)
    + line(0x30, "@P0 BRA `(.L_x_2)")
    + line(0x40, "FMUL R8, R8, R9")
    + line(0x50, "MUFU.EX2 R8, R8", write=0, read=1)
    + ".L_x_2:\n"
    + line(0x60, "@P1 BRA `(.L_x_3)")
    + line(0x70, "LDGSTS.E.BYPASS.128 [R1], [R2.64]")
    + ".L_x_3:\n"
    + line(0x80, "@P2 BRA `(.L_x_1)", stall=5)
    + line(0x90, "EXIT", stall=5)
)


def test_scheduling_fields():
    load, product = parse(LOOP).code[1:3]
    assert (load.opcode, load.stall, load.write_barrier, load.read_barrier, load.waits) == (
        "LDSM.16.M88.4",
        8,
        3,
        None,
        (),
    )
    assert (product.stall, product.write_barrier, product.waits) == (6, None, (3,))
    assert product.source == ("products.py", 77)
    exponential = parse(LOOP).code[5]
    assert (exponential.write_barrier, exponential.read_barrier) == (0, 1)


def test_a_loop_skips_what_runs_rarely_and_keeps_what_copies():
    (loop,) = parse(LOOP).loops()
    assert [x.name for x in loop.body] == ["LDSM", "HMMA", "BRA", "BRA", "LDGSTS", "BRA"]
    assert loop.mix() == {"tensor": 1, "fma": 0, "alu": 0, "mufu": 0, "shared": 2, "uniform": 0, "control": 3}


def test_code_outside_of_loops():
    assert parse(LOOP).outside_stalls() == 2 + 5


def test_a_listing_without_code_is_an_error():
    with pytest.raises(RuntimeError, match="no instruction"):
        parse("nothing\n")


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("HMMA.16816.F32.BF16", "tensor"), ("FFMA", "fma"), ("FFMA2", "fma"), ("IMAD.WIDE", "fma"), ("IADD3.X", "alu"),
        ("F2FP.BF16.F32.PACK_AB", "alu"), ("MUFU.EX2", "mufu"), ("LDSM.16.MT88.4", "shared"), ("UIADD3", "uniform"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "shared"), ("BAR.SYNC.DEFER_BLOCKING", "control"), ("NEVERSEEN", "alu"),
    ],
)  # fmt: skip
def test_pipes(opcode, pipe):
    assert parse(line(0, f"{opcode} R0, R1")).code[0].pipe == pipe


def test_the_kernels_own_code(kernel):
    program = sass.disassemble(kernel.cubin)
    step, masked = records.loops(kernel)
    assert step.mmas == masked.mmas == records.mmas_a_step(kernel.spec) == 4 * 4 + 8 * 2
    assert len(step.body) < len(masked.body)
    scores = kernel.spec.tile_n * 16 // 32  # of a thread: one exponential each
    assert step.opcodes()["MUFU"] == scores
    assert step.opcodes()["BAR"] == 1
    # Of some, ptxas's own table has the right line with a neighbour's file.
    assert Counter(x.source[0] for x in step.body if x.pipe == "tensor").most_common(1)[0][0] == "products.py"
    assert program.outside_stalls() > 0
    assert all(1 <= x.stall <= 15 for x in step.body if x.pipe == "tensor")


def test_a_binary_that_is_none_is_an_error():
    with pytest.raises(RuntimeError, match="nvdisasm"):
        sass.disassemble(b"no cubin")
