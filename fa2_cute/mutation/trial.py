"""One mutant against its battery, in this process: what noticed it, or nothing."""

import contextlib
import functools
import signal
from dataclasses import dataclass
from unittest import mock

from .. import arch, emulation, emulator, jit
from ..fuzz.judging import Expectation, call
from ..spec import ForwardSpec
from . import call_mutants
from .battery import battery
from .call_mutants import CallMutant
from .ptx_mutants import PtxMutant

HANG_SECONDS = 20  # a case takes a few tenths of a second; a loop that lost its end takes for ever


@dataclass(frozen=True)
class Verdict:
    """``noticed`` is the name of the error that ended case number ``case``, "" where all of the battery passed."""

    noticed: str
    case: int


class Hang(Exception):
    """A case has not ended within HANG_SECONDS."""


def try_ptx(spec: ForwardSpec, mutant: PtxMutant) -> Verdict:
    """The verdict on ``mutant`` of the PTX that the target's kernel of ``spec`` has."""
    ptx = mutant.apply(jit.compiled(spec, arch.TARGET).ptx)

    @functools.cache
    def module(original) -> emulator.Module:
        return emulator.load(ptx)

    return _try(spec, mock.patch.object(emulation, "_module", module))


def try_call(spec: ForwardSpec, kind: str, change: str) -> Verdict:
    """The verdict on the call mutant of that name, tried on calls that run the kernel of ``spec``."""
    mutant: CallMutant = call_mutants.by_name(kind, change)
    return _try(spec, mutant.install())


def try_none(spec: ForwardSpec) -> Verdict:
    """The battery on the kernel as it is: it must pass."""
    return _try(spec, contextlib.nullcontext())


def _try(spec: ForwardSpec, fault) -> Verdict:
    with fault:
        for number, case in enumerate(battery(spec)):
            q, k, v, expectation = _prepared(case)
            try:
                with _limited(HANG_SECONDS):
                    out, lse = call(q, k, v, **case.options)
                expectation.judge(out, lse)
            except Exception as error:
                return Verdict(type(error).__name__, number)
    return Verdict("", -1)


@functools.cache
def _prepared(case):
    q, k, v = case.tensors()
    return q, k, v, Expectation.of_case(case, q, k, v)


@contextlib.contextmanager
def _limited(seconds: float):
    def ring(signum, frame):
        raise Hang(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: an exception that is raised in a finalizer or callback is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
