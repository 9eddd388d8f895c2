"""The table of opcodes. A handler turns one instruction into Python source through a BlockBuilder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """How one opcode is handled.

    ``destinations``: how many leading operands are written. ``maskable``: the handler honours the guard
    predicate
    itself (through ``define`` or ``mask``);
    otherwise a guarded instruction is branched around. ``ends``: how it
    ends a basic block (bra, brx, exit, barrier) or None.
    """

    handler: Callable
    destinations: int = 1
    maskable: bool = True
    ends: str | None = None


_TABLE: dict[str, Op] = {}


def instruction(*names: str, destinations: int = 1, maskable: bool = True, ends: str | None = None):
    """Registers a handler ``f(g, ins)`` for opcodes (the part of the mnemonic before the first dot)."""

    def register(handler):
        for name in names:
            if name in _TABLE:
                raise ValueError(f"opcode {name!r} has two handlers")
            _TABLE[name] = Op(handler, destinations, maskable, ends)
        return handler

    return register


def lookup(ins) -> Op | None:
    """The entry for an instruction; ``bar``-like opcodes with several forms are registered as ``op.form``."""
    if ins.mods:
        found = _TABLE.get(f"{ins.op}.{ins.mods[0]}")
        if found is not None:
            return found
        if len(ins.mods) > 1:
            found = _TABLE.get(f"{ins.op}.{ins.mods[0]}.{ins.mods[1]}")
            if found is not None:
                return found
    return _TABLE.get(ins.op)


def opcodes() -> list[str]:
    """All registered opcodes, sorted."""
    return sorted(_TABLE)
