"""Fuzzing: calls drawn over everything that may vary, judged against float64 within derived bounds.

    from fa2_cute.fuzz import Case, check
    check(Case(dtype="float16", query_len=65, key_len=129, causal=True))    # raises WrongResult, or returns

``cases``, ``values``, ``masks`` and ``per_head`` say what a call is, ``bounds`` how far a right kernel may be from
exact, ``judging`` runs and judges one call, ``strategies`` draws calls and ``campaign`` does so for minutes. Only the
last two need hypothesis.
"""

from .cases import Case
from .judging import WrongResult, check, judge

__all__ = ["Case", "WrongResult", "check", "judge"]
