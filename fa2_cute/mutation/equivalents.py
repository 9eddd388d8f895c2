"""Mutants that change nothing that a result could show, each with the reason why."""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Equivalent:
    """Mutants of ``kind`` whose change, opcode and source line match; patterns as in a shell.

    A source line is matched by its text, so that the table outlives other edits. An entry excuses only mutants that
    survive: one that it describes and that something notices counts as killed.
    """

    kind: str
    reason: str
    change: str = "*"
    opcode: str = "*"
    source: str = "*"

    def matches(self, kind: str, change: str, opcode: str, source: str) -> bool:
        return self.kind == kind and all(
            fnmatchcase(text, pattern)
            for text, pattern in ((change, self.change), (opcode, self.opcode), (source, self.source))
        )


def reason(kind: str, change: str, opcode: str = "", source: str = "") -> str | None:
    """Why such a mutant cannot be noticed, or None if nothing is known of it."""
    for entry in EQUIVALENTS:
        if entry.matches(kind, change, opcode, source):
            return entry.reason
    return None


EQUIVALENTS: tuple[Equivalent, ...] = ()
