"""PTX text as statements with their places, so that one can be replaced and all else stays as the compiler wrote it."""

import linecache
import re
from dataclasses import dataclass

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_ENTRY = re.compile(r"\.entry\b[^{]*\{")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^\n]*")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_NOT_CODE = re.compile(r"^\s*\.(?:loc|file|pragma)\b[^\n]*|^\s*[$\w%]+:|\{?\s*\.reg\b[^;]*;", re.M)
_STATEMENT = re.compile(r"(?:@(!?)([\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")


@dataclass(frozen=True)
class Statement:
    """One instruction. ``start`` and ``end`` are its place in the text, without the semicolon.

    guard       predicate register of ``@p`` or ``@!p``, "" without one; ``negated`` tells the second
    opcode      with its modifiers
    operands    as written
    line        PTX line, from 1
    source      (file, line, text) of the Python line that it comes from, ("", 0, "") where the compiler says nothing
    """

    start: int
    end: int
    guard: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]
    line: int
    source: tuple[str, int, str]

    def text(self, *, opcode=None, operands=None, guard=None, negated=None) -> str:
        """The instruction as PTX, with some of its parts replaced."""
        guard = self.guard if guard is None else guard
        negated = self.negated if negated is None else negated
        before = f"@{'!' if negated else ''}{guard} " if guard else ""
        after = ", ".join(self.operands if operands is None else operands)
        return f"{before}{opcode or self.opcode} {after}".rstrip()

    def with_operand(self, index: int, operand: str) -> str:
        """The instruction with one operand replaced."""
        return self.text(operands=[*self.operands[:index], operand, *self.operands[index + 1 :]])


def statements(ptx: str) -> list[Statement]:
    """All instructions of the only kernel in ``ptx``, in order."""
    text = _COMMENT.sub(_blank, ptx)
    entry = _ENTRY.search(text)
    if entry is None:
        raise ValueError("ptx: has no .entry with a body")
    files = dict(_FILE.findall(text))
    places = [(m.start(), *m.groups()) for m in _LOC.finditer(text)]
    code = text[: entry.end()].replace(text[: entry.end()], " " * entry.end()) + _NOT_CODE.sub(
        _blank, text[entry.end() :]
    )
    found, start = [], entry.end()
    source, next_place = ("", 0, ""), 0
    while (end := code.find(";", start)) >= 0:
        words = code[start:end]
        offset = start + len(words) - len(words.lstrip(" \n\t}{"))
        while next_place < len(places) and places[next_place][0] < offset:
            _, number, line, column = places[next_place]
            if int(column):  # column 0 is the compiler's word for "somewhere in this function"
                path = files.get(number, "")
                source = (path, int(line), linecache.getline(path, int(line)).strip())
            next_place += 1
        match = _STATEMENT.fullmatch(code[offset:end].strip())
        if match:
            negated, guard, opcode, tail = match.groups()
            operands = tuple(piece.strip() for piece in _OPERAND.findall(tail))
            number = ptx.count("\n", 0, offset) + 1
            found.append(Statement(offset, end, guard or "", bool(negated), opcode, operands, number, source))
        start = end + 1
    return found


def _blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match.group())
