"""Fuzzing for minutes: draws cases until the time is up, shrinks what fails, saves it as a program, and counts."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from .. import jit
from .cache_cases import CacheCase
from .cache_judging import check_cache
from .cache_strategies import PLAIN as PLAIN_CACHE
from .cache_strategies import cache_cases, some_cache_kernels
from .cases import Case
from .judging import check
from .strategies import PLAIN, caches, cases, length_pairs, some_kernels, split_cases

CASES_A_ROUND = 500  # hypothesis starts afresh, with a seed of its own and other kernels, after as many
KERNELS_A_ROUND = 8  # a kernel takes some 4 s to compile: half a minute for a minute or two of emulated cases
SPLIT_KERNELS_A_ROUND = 3  # of those, in splits too: each is the kernel and two combinations
CACHE_KERNELS_A_ROUND = 3  # each is an append, an attention and the combination of splits
SHRINK_SECONDS = 60.0  # what shrinking one failure may take beyond the time asked for
MOST_FAILURES = 10  # a campaign that has found as many has made its point


@dataclass(frozen=True)
class Failure:
    """A case that failed, the smallest that shrinking found, and what it raised; ``path`` is the saved program."""

    case: Case | CacheCase
    error: Exception
    path: Path | None = None


def check_any(case: Case | CacheCase, device: str):
    """``check`` or ``check_cache``."""
    (check_cache if isinstance(case, CacheCase) else check)(case, device)


@dataclass
class Campaign:
    """What has been drawn and found so far.

    seed         of the first round; the same seed draws the same cases
    device       torch's name of the device the calls run on
    folder       where failing programs go; None: nowhere
    first_calls  seconds of the cases that needed a kernel which the process did not have yet: nearly all of it
                 compiling, where the cache has none
    """

    seed: int
    device: str = "cpu"
    folder: Path | None = None
    check: Callable[[Case | CacheCase, str], None] = check_any
    drawn: int = 0
    seconds: float = 0.0
    first_calls: float = 0.0
    classes: dict[str, Counter] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def run(self, seconds: float, on_case: Callable[["Campaign"], None] = lambda campaign: None):
        """Draw and judge cases for ``seconds``; ``on_case`` is called after each.

        KeyboardInterrupt passes through; all found up to then is in place.
        """
        start = time.monotonic()
        deadline = start + seconds
        round_seed = self.seed
        try:
            while time.monotonic() < deadline and len(self.failures) < MOST_FAILURES:
                self._round(round_seed, deadline, start, on_case)
                round_seed += 1
        finally:
            self.seconds = time.monotonic() - start

    def _round(self, seed: int, deadline: float, start: float, on_case):
        others = some_kernels(KERNELS_A_ROUND, seed)
        kernels = st.sampled_from((*PLAIN, *others))
        dense = [kernel for kernel in others if not kernel.has("varlen")]
        split_kernels = st.sampled_from((*PLAIN, *dense)[:SPLIT_KERNELS_A_ROUND])
        cache_kernels = st.sampled_from((PLAIN_CACHE, *some_cache_kernels(CACHE_KERNELS_A_ROUND, seed)))
        calls = cases(kernels, dense=length_pairs() | caches())
        smallest: list[Failure] = []  # hypothesis tries only simpler cases than the last that failed

        @hypothesis.seed(seed)
        @settings(
            max_examples=CASES_A_ROUND,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(calls | split_cases(split_kernels) | cache_cases(cache_kernels))
        def draw(case):
            now = time.monotonic()
            if now > (deadline + SHRINK_SECONDS if smallest else deadline):
                raise _TimeIsUp
            kernels = jit.kernels()
            try:
                self.check(case, self.device)
            except Exception as error:
                smallest[:] = [Failure(case, error)]
                raise
            finally:
                self.seconds = time.monotonic() - start
                if jit.kernels() > kernels:
                    self.first_calls += time.monotonic() - now
                if not smallest:
                    self._count(case)
                on_case(self)

        try:
            draw()
        except _TimeIsUp:
            pass
        except Exception:
            if not smallest:  # hypothesis' own complaint, not a call's
                raise
        finally:
            known = {failure.case for failure in self.failures}
            self.failures += [self._saved(failure) for failure in smallest if failure.case not in known]

    def _count(self, case: Case | CacheCase):
        self.drawn += 1
        for aspect, kind in case.classes().items():
            self.classes.setdefault(aspect, Counter())[kind] += 1

    def _saved(self, failure: Failure) -> Failure:
        if self.folder is None:
            return failure
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"failure_{self.seed}_{len(self.failures)}.py"
        path.write_text(program(failure, self.device))
        return Failure(failure.case, failure.error, path)


class _TimeIsUp(BaseException):
    """Leaves hypothesis at once: it would take an Exception for a failing case."""


def program(failure: Failure, device: str) -> str:
    """A program that reproduces ``failure``, with what happened on top as a comment."""
    said = f"{type(failure.error).__name__}: {failure.error}"
    return "".join(f"# {line}\n" for line in said.splitlines()) + failure.case.as_call(device)
