"""What a call can vary, as hypothesis strategies named after what they mean; each shrinks to the plainest."""

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from .. import arch, tiling
from ..spec import CAUSAL, FULL, Features
from .cases import DTYPES, Case
from .layouts import LAYOUTS
from .masks import HIDING_MASKS, MASK_LAYOUTS, MASKS
from .per_head import SINKS, SLOPES
from .values import NEED_ORDINARY_SCALE, NEED_POSITIVE_SCALE, NEED_UNWEIGHTED_KEYS, VALUES

PRIMES = (2, 3, 5, 7, 17, 31, 61, 97, 131, 193, 257)
MOST_TILES = 24  # tiles of work of head_dim 64 in one case: a few tenths of a second in the emulator
WIDTHS = range(8, 257, 8)


@dataclass(frozen=True)
class Kernel:
    """What needs a kernel of its own, whatever the architecture: dtype, widths of rows, features of the call."""

    dtype: str
    head_dim: int
    value_dim: int
    features: Features

    def has(self, *names: str) -> bool:
        """Whether any of these features is on."""
        return any(getattr(self.features, name) for name in names)


#: What other kernels shrink to.
PLAIN = (Kernel("bfloat16", 64, 64, FULL), Kernel("bfloat16", 64, 64, CAUSAL))
#: What the tests draw from, since each takes some seconds to compile: every feature in both dtypes; every width of rows
#: in shared memory, exact and padded; and every two features that share code meet.
TESTED = (
    *PLAIN,
    *(
        Kernel(*fields)
        for fields in (
            ("float16", 64, 64, FULL),
            ("float16", 64, 64, CAUSAL),
            ("bfloat16", 128, 128, CAUSAL),
            ("float16", 128, 128, FULL),
            ("bfloat16", 64, 64, Features(left=True, right=True, sink=True)),
            ("float16", 256, 256, Features(left=True, right=True, softcap=True)),
            ("bfloat16", 192, 128, CAUSAL),
            ("bfloat16", 128, 64, Features(left=True)),
            ("bfloat16", 8, 8, Features(alibi=True)),
            ("float16", 80, 80, Features(right=True, softcap=True, alibi=True)),
            ("float16", 96, 40, Features(sink=True, mask="bool")),
            ("bfloat16", 32, 32, Features(left=True, mask="float32")),
            ("float16", 64, 64, Features(right=True, softcap=True, mask="float16")),
            ("bfloat16", 48, 160, Features(softcap=True, alibi=True, sink=True, mask="bfloat16")),
            ("bfloat16", 64, 64, Features(right=True, varlen=True)),
            ("float16", 128, 128, Features(varlen=True, sink=True)),
            ("bfloat16", 104, 200, Features(left=True, right=True, varlen=True, softcap=True, alibi=True, sink=True)),
            ("float16", 32, 64, Features(left=True, varlen=True, alibi=True)),
        )
    ),
)

dtypes = st.sampled_from(sorted(DTYPES))
layouts = st.sampled_from(LAYOUTS)
#: (query heads, KV heads): equal, grouped, one KV head for all, ratios that are no power of two, and numbers of heads
#: that leave blocks of a group of two, four or eight idle (ForwardSpec.grid).
head_counts = st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 2), (5, 5), (8, 1), (9, 3), (17, 17)])
#: Sides of a window: nothing but the diagonal, tile edges, more than there is, more than 32 bits.
reaches = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 2**31 - 1, 2**40])
#: What Gemma 2 has, what cuts everything off, what changes nothing, what is nearly a step.
softcaps = st.sampled_from([50.0, 1.0, 5.0, 0.25, 1e-3, 1e-30, 1e4, 1e30])


@st.composite
def features(draw) -> Features:
    """Any options together that a call may have together."""
    mask = draw(st.sampled_from([None, None, None, "bool", "16-bit", "float32"]))
    return Features(
        left=draw(st.booleans()),
        right=draw(st.booleans()),
        varlen=mask is None and draw(st.booleans()),
        softcap=draw(st.booleans()),
        alibi=draw(st.booleans()),
        sink=draw(st.booleans()),
        mask=mask if mask != "16-bit" else "bfloat16",
    )


@st.composite
def kernels(draw) -> Kernel:
    """Any kernel that there is."""
    head_dim = draw(st.one_of(st.sampled_from([64, 128, 192, 256]), st.sampled_from(WIDTHS)))
    value_dim = draw(st.one_of(st.just(head_dim), st.sampled_from(WIDTHS)))
    return _kernel(draw(dtypes), head_dim, value_dim, draw(features()))


def some_kernels(count: int, seed: int) -> tuple[Kernel, ...]:
    """``count`` different kernels out of all, the same for the same seed, each with few or many options."""
    rng = random.Random(seed)
    drawn: dict[Kernel, None] = {}
    while len(drawn) < count:
        chance = rng.choice([0.1, 0.3, 0.6])
        on = {name: rng.random() < chance for name in ("left", "right", "varlen", "softcap", "alibi", "sink")}
        mask = rng.choice(["bool", "bfloat16", "float32"]) if rng.random() < chance and not on["varlen"] else None
        head_dim = rng.choice([64, 128, rng.choice(WIDTHS), rng.choice(WIDTHS)])
        value_dim = rng.choice([head_dim, head_dim, rng.choice(WIDTHS)])
        drawn[_kernel(rng.choice(sorted(DTYPES)), head_dim, value_dim, Features(**on, mask=mask))] = None
    return tuple(drawn)


def _kernel(dtype: str, head_dim: int, value_dim: int, on: Features) -> Kernel:
    """A mask of 16 bits is one of q's dtype."""
    if on.mask in DTYPES:
        on = Features(**{**on.__dict__, "mask": dtype})
    return Kernel(dtype, head_dim, value_dim, on)


def tile_edges(limit: int) -> list[int]:
    """Lengths up to ``limit`` at which a shipped tile is just not full, full, and just overfull."""
    sides = {side for spec in tiling.shipped(arch.TARGET) for side in (spec.tile_m, spec.tile_n)}
    edges = {m * side + step for side in sides for m in range(1, limit // side + 1) for step in (-1, 0, 1)}
    return sorted(edge for edge in edges if 0 < edge <= limit)


def lengths(limit: int = 260) -> st.SearchStrategy[int]:
    """Sequence lengths: 1, tile edges plus and minus one, primes, and anything between."""
    primes = [prime for prime in PRIMES if prime <= limit]
    return st.one_of(st.integers(1, limit), st.sampled_from(tile_edges(limit)), st.sampled_from(primes), st.just(1))


@st.composite
def length_pairs(draw, limit: int = 260) -> tuple[int, int]:
    """(query_len, key_len): equal, unrelated, a single query on a cache, offsets of both signs, more keys than a kernel
    follows the maximum of, nothing at all."""
    kind = draw(st.sampled_from(["equal", "unrelated", "decode", "fewer_keys", "more_keys", "many_keys", "empty"]))
    query_len = draw(lengths(limit))
    if kind == "equal":
        return query_len, query_len
    if kind == "decode":
        return 1, query_len
    if kind == "many_keys" and limit > 240:
        return min(query_len, 70), draw(st.integers(241, 700))
    if kind == "empty":
        return draw(st.sampled_from([(query_len, 0), (0, query_len), (0, 0)]))
    if kind == "unrelated":
        return query_len, draw(lengths(limit))
    offset = draw(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129]))
    key_len = query_len - offset if kind == "fewer_keys" else query_len + offset
    return query_len, min(max(key_len, 1), limit)


@st.composite
def caches(draw) -> tuple[int, int]:
    """(query_len, key_len): a few queries, or a tile or two, on keys that are enough to be split among blocks."""
    return draw(st.sampled_from([1, 1, 2, 5, 16, 70, 130])), draw(st.sampled_from([1023, 1024, 1025, 1031, 1100, 1664]))


#: Few and many, as different kernels combine them; as few keys as these calls have leave some of many empty.
numbers_of_splits = st.sampled_from([2, 3, 1, 4, 5, 7, 8, 9, 20])


@st.composite
def split_cases(draw, kernels: st.SearchStrategy[Kernel], values: st.SearchStrategy[str] | None = None) -> Case:
    """A call of one of ``kernels``, without packed sequences, whose keys blocks of the forward kernel share."""
    dense = length_pairs(520).filter(lambda lengths: all(lengths))
    return replace(draw(cases(kernels, values, dense)), splits=draw(numbers_of_splits))


@st.composite
def packings(draw) -> dict:
    """Packed sequences and rows around them: a few, many of length 0, more of them than rows, none; sometimes cut."""
    empty = st.sampled_from([(0, 0), (0, 5), (3, 0)])
    few = st.lists(length_pairs(140), min_size=1, max_size=4)
    mixed = st.lists(st.one_of(empty, length_pairs(70)), min_size=2, max_size=6)
    many = st.lists(st.one_of(st.just((0, 0)), empty, st.just((1, 1))), min_size=34, max_size=80)
    packed = draw(st.one_of(few, mixed, many, st.just([])))
    rows = st.sampled_from([0, 0, 0, 1, 3, 64, 130])
    unused = draw(st.one_of(st.just((0, 0, 0, 0)), st.tuples(rows, rows, rows, rows)))
    if packed and draw(st.integers(0, 7)) == 7:
        unused = tuple(draw(st.sampled_from([0, 0, -1, -5, -70])) for _ in range(4))
    return {"packed": tuple(packed), "unused": unused}


def softmax_scales(values: str) -> st.SearchStrategy[float | None]:
    """The default, 1, one that underflows float32, a huge one, 0 and negative ones; only what ``values`` take."""
    if values in NEED_ORDINARY_SCALE:
        return st.sampled_from([None, 1.0, 0.0, -0.125])
    if values == "huge_products":
        return st.sampled_from([None, 2.0**-110, -(2.0**-110), 2.0**-27, 0.0])
    positive = [None, 1.0, 1e-40, 1e30]
    return st.sampled_from(positive if values in NEED_POSITIVE_SCALE else [*positive, 0.0, -0.125, -1e-40])


def kinds_of_values(kernel: Kernel) -> list[str]:
    """The kinds of numbers that calls of ``kernel`` take."""
    weighted = kernel.has("left", "varlen", "alibi", "sink", "mask")
    return [values for values in VALUES if not (weighted and values in NEED_UNWEIGHTED_KEYS)]


@st.composite
def windows(draw, kernel: Kernel, offset: int) -> dict:
    """Both sides of a window, as the kernel has them; on the right mostly causal, also torch's own causal."""
    left = draw(reaches) if kernel.has("left") else None
    if not kernel.has("right"):
        return {"window": (left, None)}
    if draw(st.integers(0, 3)):
        return {"causal": True, "window": (left, None)}
    return {"window": (left, draw(st.one_of(reaches, st.integers(-140, -1), st.just(-offset))))}


@st.composite
def masks(draw, kernel: Kernel) -> dict:
    """What is hidden or added, and how it lies in memory."""
    kind = kernel.features.mask
    return {
        "mask": draw(st.sampled_from(HIDING_MASKS if kind == "bool" else MASKS)),
        "mask_dtype": kind if kind in ("bool", "float32") else "same",
        "mask_layout": draw(st.sampled_from(MASK_LAYOUTS)),
    }


@st.composite
def cases(
    draw,
    kernels: st.SearchStrategy[Kernel] = st.sampled_from(TESTED),  # noqa: B008
    values: st.SearchStrategy[str] | None = None,
    dense: st.SearchStrategy[tuple[int, int]] = length_pairs(),  # noqa: B008
) -> Case:
    """A whole call, small enough for the emulator; ``dense`` has the lengths of sequences that are not packed."""
    kernel = draw(kernels)
    drawn_values = draw(st.sampled_from(kinds_of_values(kernel)) if values is None else values)
    heads, kv_heads = draw(head_counts)
    if kernel.has("varlen"):
        shape = draw(packings())
        pairs, batch, offset = shape["packed"], 1, 0
    else:
        query_len, key_len = draw(dense)
        shape = {"query_len": query_len, "key_len": key_len}
        pairs, batch, offset = [(query_len, key_len)], draw(st.integers(1, 3)), key_len - query_len
    tiles = sum(-(-rows // 128) * -(-keys // 64) for rows, keys in pairs) * (kernel.head_dim + kernel.value_dim) / 128
    while batch * heads * tiles > MOST_TILES and (batch > 1 or heads > kv_heads > 1 or heads > 2):
        if batch > 1:
            batch -= 1
        else:
            heads, kv_heads = (heads // kv_heads, 1) if kv_heads > 1 else (2, 1)
    return Case(
        dtype=kernel.dtype,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=kernel.head_dim,
        value_dim=None if kernel.value_dim == kernel.head_dim else kernel.value_dim,
        **shape,
        **draw(windows(kernel, offset)),
        softmax_scale=draw(softmax_scales(drawn_values)),
        softcap=draw(softcaps) if kernel.has("softcap") else 0.0,
        alibi=draw(st.sampled_from(SLOPES)) if kernel.has("alibi") else None,
        sink=draw(st.sampled_from(SINKS)) if kernel.has("sink") else None,
        **(draw(masks(kernel)) if kernel.has("mask") else {}),
        layouts=(draw(layouts), draw(layouts), draw(layouts)),
        values=drawn_values,
        seed=draw(st.integers(0, 2**16)),
    )
