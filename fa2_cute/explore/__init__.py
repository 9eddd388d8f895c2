"""Layouts and tile sizes, seen, predicted and measured: which tile, and why?

    from fa2_cute import arch, explore
    found = explore.search(explore.Workload(head_dim=128, query_len=4096, key_len=4096, causal=True),
                           arch.by_name("sm_120"), file=Path("results.json"))

See docs/explore.md. Importing this loads nothing heavy.
"""

from importlib import import_module

_WHERE = {
    "Point": "space", "Workload": "space", "points": "space", "Record": "records", "evaluate": "records",
    "Found": "searching", "search": "searching", "tuned": "tuning", "ProblemClass": "tuning",
}  # fmt: skip
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
