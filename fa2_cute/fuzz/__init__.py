"""Fuzzing: calls drawn over everything that may vary, judged against float64 within derived bounds.

    from fa2_cute.fuzz import Case, check
    check(Case(dtype="float16", query_len=65, key_len=129, causal=True))    # raises WrongResult, or returns

``cases``, ``values``, ``masks`` and ``per_head`` say what a call is, ``bounds`` how far a right kernel may be from
exact, ``judging`` runs and judges one call; ``cache_cases`` and ``cache_judging`` do so for calls over a KV cache.
``strategies`` and ``cache_strategies`` draw calls and ``campaign`` does so for minutes: these need hypothesis.
"""

from .cache_cases import CacheCase
from .cache_judging import check_cache
from .cases import Case
from .judging import WrongResult, check, judge

__all__ = ["CacheCase", "Case", "WrongResult", "check", "check_cache", "judge"]
