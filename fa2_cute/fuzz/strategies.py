"""What a call can vary, as hypothesis strategies named after what they mean; each shrinks to the plainest."""

from hypothesis import strategies as st

from .. import arch, tiling
from .cases import DTYPES, Case
from .layouts import LAYOUTS
from .values import NEED_ORDINARY_SCALE, NEED_POSITIVE_SCALE, VALUES

PRIMES = (2, 3, 5, 7, 17, 31, 61, 97, 131, 193, 257)
MOST_TILES = 24  # tiles of work in one case: a few tenths of a second in the emulator


def tile_edges(limit: int) -> list[int]:
    """Lengths up to ``limit`` at which a shipped tile is just not full, full, and just overfull."""
    sides = {side for spec in tiling.shipped(arch.TARGET) for side in (spec.tile_m, spec.tile_n)}
    edges = {m * side + step for side in sides for m in range(1, limit // side + 1) for step in (-1, 0, 1)}
    return sorted(edge for edge in edges if 0 < edge <= limit)


def lengths(limit: int = 260) -> st.SearchStrategy[int]:
    """Sequence lengths: 1, tile edges plus and minus one, primes, and anything between."""
    primes = [prime for prime in PRIMES if prime <= limit]
    return st.one_of(st.integers(1, limit), st.sampled_from(tile_edges(limit)), st.sampled_from(primes), st.just(1))


#: (query heads, KV heads): equal, grouped, one KV head for all, ratios that are no power of two, and numbers of heads
#: that leave blocks of a group of two, four or eight idle (ForwardSpec.grid).
head_counts = st.sampled_from([(1, 1), (2, 2), (2, 1), (4, 2), (3, 1), (6, 2), (5, 5), (8, 1), (9, 3), (17, 17)])

dtypes = st.sampled_from(sorted(DTYPES))
head_dims = st.sampled_from([64, 128])
layouts = st.sampled_from(LAYOUTS)


@st.composite
def length_pairs(draw, limit: int = 260) -> tuple[int, int]:
    """(query_len, key_len): equal, unrelated, a single query on a cache, offsets of both signs, nothing at all."""
    kind = draw(st.sampled_from(["equal", "unrelated", "decode", "fewer_keys", "more_keys", "empty"]))
    query_len = draw(lengths(limit))
    if kind == "equal":
        return query_len, query_len
    if kind == "decode":
        return 1, query_len
    if kind == "empty":
        return draw(st.sampled_from([(query_len, 0), (0, query_len), (0, 0)]))
    if kind == "unrelated":
        return query_len, draw(lengths(limit))
    offset = draw(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129]))
    key_len = query_len - offset if kind == "fewer_keys" else query_len + offset
    return query_len, min(max(key_len, 1), limit)


def softmax_scales(values: str) -> st.SearchStrategy[float | None]:
    """The default, 1, one that underflows float32, a huge one, 0 and negative ones; only what ``values`` take."""
    if values in NEED_ORDINARY_SCALE:
        return st.sampled_from([None, 1.0, 0.0, -0.125])
    if values == "huge_products":
        return st.sampled_from([None, 2.0**-110, -(2.0**-110), 2.0**-27, 0.0])
    positive = [None, 1.0, 1e-40, 1e30]
    return st.sampled_from(positive if values in NEED_POSITIVE_SCALE else [*positive, 0.0, -0.125, -1e-40])


@st.composite
def cases(draw, values: st.SearchStrategy[str] | None = None) -> Case:
    """A whole call, small enough for the emulator."""
    drawn_values = draw(st.sampled_from(VALUES) if values is None else values)
    query_len, key_len = draw(length_pairs())
    heads, kv_heads = draw(head_counts)
    tiles = -(-query_len // 128) * -(-key_len // 64)
    batch = draw(st.integers(1, 3))
    while batch * heads * tiles > MOST_TILES and (batch > 1 or heads > kv_heads > 1 or heads > 2):
        if batch > 1:
            batch -= 1
        else:
            heads, kv_heads = (heads // kv_heads, 1) if kv_heads > 1 else (2, 1)
    return Case(
        dtype=draw(dtypes),
        batch=batch,
        query_len=query_len,
        key_len=key_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(head_dims),
        causal=draw(st.booleans()),
        softmax_scale=draw(softmax_scales(drawn_values)),
        layouts=(draw(layouts), draw(layouts), draw(layouts)),
        values=drawn_values,
        seed=draw(st.integers(0, 2**16)),
    )
