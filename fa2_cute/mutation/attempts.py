"""A task tried: what noticed it, and if nothing did, why nothing could."""

from dataclasses import dataclass

from . import equivalents, trial
from .sample import Task

# What the emulator refuses before anything runs is no PTX, and says nothing about the checks.
REFUSED = frozenset({"ParseError", "UnknownInstruction", "UninitialisedRegister"})


@dataclass(frozen=True)
class Result:
    """A task, what noticed it ("" for nothing), at which case, and why it could not be noticed, if that is known.

    It is one of four: ``invalid`` (no PTX), ``killed``, ``equivalent`` or ``survived``.
    """

    task: Task
    noticed: str
    case: int
    excuse: str | None

    @property
    def invalid(self) -> bool:
        return self.noticed in REFUSED

    @property
    def killed(self) -> bool:
        return bool(self.noticed) and not self.invalid

    @property
    def equivalent(self) -> bool:
        return not self.noticed and self.excuse is not None

    @property
    def survived(self) -> bool:
        return not self.noticed and self.excuse is None


def attempt(task: Task) -> Result:
    """Try one mutant; runs in a worker."""
    if task.ptx is None:
        verdict = trial.try_call(task.spec, task.kind, task.change)
    else:
        verdict = trial.try_ptx(task.spec, task.ptx)
    excuse = None
    if not verdict.noticed:
        excuse = equivalents.reason(task.kind, task.change, task.opcode, task.source)
    return Result(task, verdict.noticed, verdict.case, excuse)
