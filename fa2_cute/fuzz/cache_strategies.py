"""Calls over a KV cache, as hypothesis strategies."""

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from ..decode_spec import WARP_M
from .cache_cases import KINDS, CacheCase, Options, Setting

MOST_SLOTS = 200  # of a sequence: some steps of all warps, and a few tenths of a second in the emulator
PAGE_SIZES = (1, 2, 3, 8, 16, 31, 64)
ROW_LENGTHS = (1, 7, 64, 130, MOST_SLOTS)


@dataclass(frozen=True)
class CacheKernel:
    """What needs kernels of its own, an append and an attention: a setting, flags of options, and whether the queries
    of a KV head's group are more than the 16 rows of one MMA."""

    setting: Setting
    options: Options
    wide: bool = False


#: What other kernels shrink to.
PLAIN = CacheKernel(Setting(), Options())


def some_cache_kernels(count: int, seed: int) -> tuple[CacheKernel, ...]:
    """``count`` different ones out of all, the same for the same seed."""
    rng = random.Random(seed)
    drawn: dict[CacheKernel, None] = {}
    while len(drawn) < count:
        dtype = rng.choice(("bfloat16", "float16"))
        cache_dtype = rng.choice((dtype, dtype, "float8_e4m3fn", "float8_e5m2"))
        step = 8 if cache_dtype == dtype else 16
        head_dim = rng.choice((64, 128, 256, rng.randrange(step, 257, step)))
        value_dim = rng.choice((head_dim, head_dim, rng.randrange(step, 257, step)))
        paged = rng.random() < 0.6
        rotary_dims = range(0, head_dim + 1, 16)
        descales = ("unit", "tensor", "head", "sequence", "block")
        descale = {f"{x}_descale": rng.choice(descales) for x in "kv"} if cache_dtype != dtype else {}
        setting = Setting(
            dtype,
            cache_dtype,
            head_dim,
            value_dim,
            paged=paged,
            indexed=not paged and rng.random() < 0.5,
            rotary_dim=rng.choice((0, rotary_dims[-1], rng.choice(rotary_dims))),
            interleaved=rng.random() < 0.5,
            rotary_dtype=rng.choice((dtype, "float32")),
            **descale,
        )
        chance = rng.choice((0.1, 0.4))
        options = Options(
            causal=rng.random() < 0.5,
            left=0 if rng.random() < chance else -1,
            right=0 if rng.random() < chance else -1,
            softcap=3.0 if rng.random() < chance else 0.0,
            **{name: rng.random() < chance for name in ("alibi", "sink", "leftpad")},
        )
        drawn[CacheKernel(setting, options, wide=rng.random() < 0.4)] = None
    return tuple(drawn)


@st.composite
def cache_cases(draw, kernels: st.SearchStrategy[CacheKernel]) -> CacheCase:
    """A whole call: lengths from none to all of the cache and past its end, rows and pages of any size, any split."""
    kernel = draw(kernels)
    setting, options = kernel.setting, kernel.options
    length = draw(st.sampled_from(PAGE_SIZES if setting.paged else ROW_LENGTHS))
    width = draw(st.integers(1, max(1, min(40, MOST_SLOTS // length)))) if setting.paged else 1
    capacity = length * width
    group = draw(st.sampled_from((1, 2, 3, 4, 7, 8)))
    most = WARP_M // group
    if kernel.wide:
        query_len = draw(st.integers(most + 1, most + 12))
    else:  # one query is another kernel where rows may see different keys
        query_len = draw(st.integers(min(2, most) if options.ordered else 1, most))
    sides = st.integers(0, 80)
    appends = draw(st.sampled_from((True, True, True, False)))
    return CacheCase(
        setting,
        tuple(draw(st.lists(st.integers(-1, capacity + 2), min_size=1, max_size=3))),
        new_len=draw(st.integers(0, min(9, capacity))) if appends else None,
        query_len=query_len,
        kv_heads=draw(st.integers(1, 2)),
        group=group,
        length=length,
        width=width,
        options=replace(
            options,
            left=draw(sides) if options.left >= 0 else -1,
            right=draw(sides) if options.right >= 0 else -1,
            num_splits=draw(st.sampled_from((0, 0, 1, 2, 3, 7, 40))),
        ),
        softmax_scale=draw(st.sampled_from((None, None, -0.3, 0.0, 1.0))),
        missing=draw(st.booleans()),
        kind=draw(st.sampled_from(KINDS)),
        seed=draw(st.integers(0, 99)),
    )
