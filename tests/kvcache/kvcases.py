"""The kernels that the tests of caches share, each some seconds of compiling, and how calls of them are drawn."""

from dataclasses import replace

from hypothesis import strategies as st

from fa2_cute.fuzz.cache_cases import DTYPES, Options, Setting, make
from fa2_cute.fuzz.cache_cases import CacheCase as Case

__all__ = ["CALLS", "DTYPES", "SETTINGS", "Case", "Options", "Setting", "calls", "cases", "make"]

# Every option, and every pair of options that meets in a line of the kernel.
SETTINGS = (
    Setting(),
    Setting("float16", "float16", 40, 72, indexed=True, rotary_dim=32, interleaved=True, rotary_dtype="float16"),
    Setting("bfloat16", "bfloat16", 128, 64, paged=True, rotary_dim=64, rotary_dtype="bfloat16"),
    Setting(
        "float16", "float8_e4m3fn", paged=True, rotary_dim=64, interleaved=True, k_descale="block", v_descale="head"
    ),
    Setting("bfloat16", "float8_e4m3fn", indexed=True, rotary_dim=16, k_descale="block", v_descale="block"),
    Setting("bfloat16", "float8_e5m2", 64, 128, paged=True, v_descale="sequence", k_descale="tensor"),
)

# Each setting with options, so that every one meets pages, FP8 or a rotation somewhere.
CALLS = (
    (SETTINGS[0], Options()),
    (SETTINGS[0], Options(causal=True, leftpad=True)),
    (SETTINGS[1], Options(causal=True, sink=True)),
    (SETTINGS[2], Options(left=5, right=1)),
    (SETTINGS[2], Options(causal=True, alibi=True, leftpad=True)),
    (SETTINGS[3], Options(causal=True)),
    (SETTINGS[4], Options(softcap=3.0)),
    (SETTINGS[5], Options()),
)


@st.composite
def cases(draw, settings=SETTINGS, max_new_len: int = 9):
    """Appends of every setting: lengths from none to all of the cache and past its end, rows and pages of any size."""
    setting = draw(st.sampled_from(settings))
    length = draw(st.sampled_from([1, 2, 3, 8, 16, 31] if setting.paged else [1, 7, 64, 130]))
    width = draw(st.integers(1, 4)) if setting.paged else 1
    capacity = length * width
    return Case(
        setting,
        tuple(draw(st.lists(st.integers(-1, capacity + 2), min_size=1, max_size=4))),
        new_len=draw(st.integers(0, max_new_len)),
        query_len=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        length=length,
        width=width,
        options=Options(causal=draw(st.booleans())),
        missing=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def calls(draw):
    """Calls that append and attend, of every pair in CALLS."""
    setting, options = draw(st.sampled_from(CALLS))
    case = draw(cases((setting,)))
    query_len = case.query_len
    if options.ordered:  # one query is another kernel: see the examples
        query_len = max(query_len, 2)
    options = replace(options, num_splits=draw(st.sampled_from([0, 0, 1, 2, 3])))
    new_len = min(case.new_len, case.capacity)  # more is refused
    return replace(case, new_len=new_len, query_len=query_len, options=options)
