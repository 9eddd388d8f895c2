"""A task tried: what noticed it, and if nothing did, why nothing could."""

from dataclasses import dataclass

from . import equivalents, trial
from .sample import Task


@dataclass(frozen=True)
class Result:
    """A task, what noticed it ("" for nothing), at which case, and why it could not be noticed, if that is known."""

    task: Task
    noticed: str
    case: int
    excuse: str | None


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
