"""Single faults in PTX: what a slip in the kernel's source, or in the compiler, would look like.

Each operator takes a statement and yields (change, replacement); an empty replacement drops the statement. The name of
an operator is the kind of its mutants.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .statements import Statement, statements

Changes = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class PtxMutant:
    """``ptx`` with ``before`` at [start, end) replaced by ``after``. ``change`` says in a word what was done."""

    kind: str
    change: str
    start: int
    end: int
    before: str
    after: str
    opcode: str
    line: int
    source: tuple[str, int, str]

    def apply(self, ptx: str) -> str:
        """The mutated text; ValueError if ``ptx`` is not the text that the mutant was made of."""
        if ptx[self.start : self.end] != self.before:
            raise ValueError(f"ptx: has {ptx[self.start : self.end]!r} where the mutant replaces {self.before!r}")
        return ptx[: self.start] + self.after + ptx[self.end :]

    def __str__(self) -> str:
        path, number, text = self.source
        where = f"{path.rpartition('/')[2]}:{number}: {text}" if path else "no source line"
        return f"PTX line {self.line}: {_one_line(self.before)}  ->  {_one_line(self.after) or 'dropped'}  ({where})"


def mutants(ptx: str) -> list[PtxMutant]:
    """Every mutant of the only kernel in ``ptx``, in the order of its text."""
    found = []
    for statement in statements(ptx):
        before = ptx[statement.start : statement.end]
        for operator in OPERATORS:
            for change, after in operator(statement):
                place = (statement.start, statement.end, before, after, statement.opcode, statement.line)
                found.append(PtxMutant(operator.__name__, change, *place, statement.source))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


# ---- synchronisation and copies --------------------------------------------------------------------------------------


def barrier(s: Statement) -> Changes:
    """Of a block or of a warp."""
    if s.opcode.startswith(("bar.sync", "bar.warp.sync")):
        yield "dropped", ""


def copy_wait(s: Statement) -> Changes:
    if s.opcode == "cp.async.wait_group":
        yield "dropped", ""
        yield "one group later", s.with_operand(0, str(int(s.operands[0]) + 1))


def copy_commit(s: Statement) -> Changes:
    if s.opcode == "cp.async.commit_group":
        yield "dropped", ""


def copy(s: Statement) -> Changes:
    if s.opcode.startswith("cp.async.c"):
        yield "dropped", ""


def store(s: Statement) -> Changes:
    if s.opcode.startswith("st."):
        yield "dropped", ""
        swapped = _swapped(s.operands[1], 0, 1) if s.operands[1].startswith("{") else s.operands[1]
        if swapped != s.operands[1]:
            yield "first two values swapped", s.with_operand(1, swapped)


def agreement(s: Statement) -> Changes:
    """Votes and reductions over a warp or a block."""
    if s.opcode.startswith(("vote.", "bar.red.")):
        for one, other in ((".any", ".all"), (".all", ".any"), (".or", ".and"), (".and", ".or")):
            if one in s.opcode:
                yield f"{one[1:]} to {other[1:]}", s.text(opcode=s.opcode.replace(one, other))
    if s.opcode.startswith("vote."):
        yield "own value only", f"mov.pred {s.operands[0]}, {s.operands[1]}"
    if s.opcode.startswith("bar.red."):
        yield "own value only", f"bar.sync {s.operands[1]}; mov.pred {s.operands[0]}, {s.operands[2]}"


def shuffle(s: Statement) -> Changes:
    if s.opcode.startswith("shfl.sync"):
        lane = int(s.operands[2])
        yield "lane doubled", s.with_operand(2, str(2 * lane if lane else 1))
        yield "dropped", f"mov.b32 {s.operands[0]}, {s.operands[1]}"


# ---- control and selection -------------------------------------------------------------------------------------------

# Relaxed or tightened by the case of equality, signed, unsigned and unordered.
_EDGES = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "ltu": "leu", "leu": "ltu", "gtu": "geu", "geu": "gtu"}
_OPPOSITES = {"eq": "ne", "ne": "eq", "equ": "neu", "neu": "equ", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def comparison(s: Statement) -> Changes:
    """A compare relaxed or tightened by equality."""
    head, _, tail = s.opcode.partition(".")
    relation, _, kind = tail.partition(".")
    if head == "setp" and relation in _EDGES:
        yield f"{relation} to {_EDGES[relation]}", s.text(opcode=f"setp.{_EDGES[relation]}.{kind}")


def opposite(s: Statement) -> Changes:
    """A compare turned round."""
    head, _, tail = s.opcode.partition(".")
    relation, _, kind = tail.partition(".")
    if head == "setp" and relation in _OPPOSITES:
        yield f"{relation} to {_OPPOSITES[relation]}", s.text(opcode=f"setp.{_OPPOSITES[relation]}.{kind}")


def guard(s: Statement) -> Changes:
    if s.guard:
        yield "negated", s.text(negated=not s.negated)
        yield "always", s.text(guard="")
        if s.opcode.startswith("bra"):
            yield "never", ""


def selection(s: Statement) -> Changes:
    if s.opcode.startswith("selp."):
        yield "operands swapped", s.text(operands=(s.operands[0], s.operands[2], s.operands[1], s.operands[3]))


def logic(s: Statement) -> Changes:
    """and for or, of predicates."""
    if s.opcode == "and.pred":
        yield "and to or", s.text(opcode="or.pred")
    if s.opcode == "or.pred":
        yield "or to and", s.text(opcode="and.pred")


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def extremum(s: Statement) -> Changes:
    """min for max and the other way round; a clamp at zero dropped."""
    head, _, tail = s.opcode.partition(".")
    if head in ("min", "max"):
        other = "max" if head == "min" else "min"
        yield f"{head} to {other}", s.text(opcode=f"{other}.{tail.replace('relu.', '')}")
        if "relu" in tail:
            yield "relu dropped", s.text(opcode=f"{head}.{tail.replace('relu.', '')}")


def arithmetic(s: Statement) -> Changes:
    head, _, tail = s.opcode.partition(".")
    swaps = {"add": "sub", "sub": "add", "shl": "shr", "shr": "shl"}
    if head in swaps:
        signed = tail.replace("u", "b") if swaps[head] == "shl" else tail.replace("b", "u") if head == "shl" else tail
        yield f"{head} to {swaps[head]}", s.text(opcode=f"{swaps[head]}.{signed}")
    if head in ("neg", "abs") or s.opcode.startswith("ex2"):
        width = "64" if tail.endswith("64") else "32"
        yield "dropped", f"mov.b{width} {s.operands[0]}, {s.operands[1]}"
    if head in ("fma", "mad"):
        yield "product only", s.with_operand(3, "0f00000000" if "f32" in tail else "0")


_INTEGER = re.compile(r"-?\d+")


def integer_constant(s: Statement) -> Changes:
    """An immediate operand off by one, up and down."""
    if s.opcode.startswith(("ld.", "st.", "shfl.", "bar.", "cp.", "vote.", "bra", "mov.pred")):
        return
    for index, operand in enumerate(s.operands):
        if index and _INTEGER.fullmatch(operand):
            for step in (1, -1):
                if int(operand) + step >= 0 or not s.opcode.startswith(("shl", "shr")):
                    yield f"{step:+d}", s.with_operand(index, str(int(operand) + step))


_FLOAT = re.compile(r"0f[0-9A-Fa-f]{8}")


def float_constant(s: Statement) -> Changes:
    """A float32 immediate: 1/64 larger, or 1 where it was 0 or infinite."""
    for index, operand in enumerate(s.operands):
        if index and _FLOAT.fullmatch(operand):
            bits = int(operand[2:], 16)
            plain = 0 < bits & 0x7F800000 < 0x7F800000
            yield (
                "larger" if plain else "to 1",
                s.with_operand(index, f"0f{bits + (1 << 17) if plain else 0x3F800000:08X}"),
            )


def rounding(s: Statement) -> Changes:
    """Towards zero instead of to nearest."""
    if ".rn." in s.opcode:
        yield "rn to rz", s.text(opcode=s.opcode.replace(".rn.", ".rz."))


# ---- operands --------------------------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"\[([^+\]]+)(?:\+(-?\d+))?\]")


def address(s: Statement) -> Changes:
    """The offset of a memory operand moved by the width of the access, or by 16 bytes where that is its row."""
    if not s.opcode.startswith(("ld.shared", "ld.global", "st.", "ldmatrix", "cp.async.c")):
        return
    wide = "v4" in s.opcode or "ldmatrix" in s.opcode or "cp.async" in s.opcode
    for index, operand in enumerate(s.operands):
        match = _ADDRESS.fullmatch(operand)
        if match:
            offset = int(match.group(2) or 0)
            for step in (16, -16) if wide else (4, -4):
                yield f"{step:+d} bytes", s.with_operand(index, f"[{match.group(1)}+{offset + step}]")


def mma_operand(s: Statement) -> Changes:
    """Two neighbouring registers of an MMA's D, A, B or C swapped; the accumulator dropped."""
    if not s.opcode.startswith("mma."):
        return
    for index, name in enumerate("DABC"):
        count = s.operands[index].count(",") + 1
        for first in range(0, count, 2) if count > 2 else (0,):
            swapped = _swapped(s.operands[index], first, first + 1)
            if swapped != s.operands[index]:
                yield f"{name}{first} and {name}{first + 1} swapped", s.with_operand(index, swapped)
    a = s.operands[1]
    yield "A1 and A2 swapped", s.with_operand(1, _swapped(a, 1, 2))
    if len(set(s.operands[3].strip("{}").replace(" ", "").split(","))) > 1:  # else it is one register, and holds 0
        yield "no C", s.with_operand(3, "{0f00000000, 0f00000000, 0f00000000, 0f00000000}")


def matrix_load(s: Statement) -> Changes:
    if s.opcode.startswith("ldmatrix"):
        yield "first two matrices swapped", s.with_operand(0, _swapped(s.operands[0], 0, 1))
        turned = s.opcode.replace(".trans", "") if ".trans" in s.opcode else s.opcode.replace(".x4", ".x4.trans")
        yield "transposed the other way", s.text(opcode=turned)


def conversion(s: Statement) -> Changes:
    """The halves of a packed conversion swapped."""
    if s.opcode.startswith("cvt.") and "x2.f32" in s.opcode:
        yield "halves swapped", s.text(operands=(s.operands[0], s.operands[2], s.operands[1]))


def _swapped(vector: str, i: int, j: int) -> str:
    items = [item.strip() for item in vector.strip("{}").split(",")]
    items[i], items[j] = items[j], items[i]
    return "{" + ", ".join(items) + "}"


OPERATORS = (
    *(barrier, copy_wait, copy_commit, copy, store, agreement, shuffle),
    *(comparison, opposite, guard, selection, logic),
    *(extremum, arithmetic, integer_constant, float_constant, rounding),
    *(address, mma_operand, matrix_load, conversion),
)
