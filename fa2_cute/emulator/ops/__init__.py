"""Instruction families. Importing this package fills the opcode table."""

from . import control, convert, floating, integer, memory, mma, registry, warp

__all__ = ["control", "convert", "floating", "integer", "memory", "mma", "registry", "warp"]
