"""The numerics a launch may choose for what PTX leaves to the hardware: sums of mma.sync, and .approx functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import fragments, special_functions, tensor_core
from .errors import ArgumentError


@dataclass(frozen=True)
class Numerics:
    """One choice of numerics.

    multiply    D = A B + C on fragments, with the signature of ``fragments.multiply``
    mma         the (shape, type of A, of B, of D) that ``multiply`` is right for; None: all
    functions   float32 array -> float32 array by PTX opcode, for .approx; None: the function rounded once.

    A kernel that needs what is missing in ``mma`` or ``functions`` is refused with UnknownInstruction.
    """

    name: str
    multiply: Callable
    mma: frozenset | None = None
    functions: dict[str, Callable] | None = None


IEEE = Numerics("ieee", fragments.multiply)
SM_90 = Numerics(
    "sm_90",
    tensor_core.multiply,
    mma=tensor_core.MODELLED,
    functions={"ex2": special_functions.ex2, "lg2": special_functions.lg2, "rcp": special_functions.rcp},
)
BY_NAME = {model.name: model for model in (IEEE, SM_90)}


def by_name(name: str) -> Numerics:
    """``"ieee"`` or ``"sm_90"``; ArgumentError for others."""
    if name not in BY_NAME:
        raise ArgumentError(f"numerics must be one of {', '.join(map(repr, BY_NAME))}, got {name!r}")
    return BY_NAME[name]
