"""Kinds of numbers for q, k and v, each aimed at a way in which attention goes wrong."""

import math
from dataclasses import replace

import torch

from .seeds import generator_of

# A normal number of the dtype near the bottom of its range, below which all is denormal.
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
# Magnitude of large logits' queries and keys. Their products stay far from fp32's largest number.
LARGE = 32.0
# The same for scores: sums of 128 products of two such numbers stay in float32, and the numbers in their dtype.
HUGE = {"float16": 2.0**12, "bfloat16": 2.0**54}
# A magnitude of v at which sums of a few thousand unscaled products overflow fp32 (bfloat16) or the dtype
# (float16), while the exact output does not.
LARGE_VALUE = {"float16": 2.0**13, "bfloat16": 2.0**112}
# Steps of a logit, in powers of two of its weight, around every threshold at which a softmax that does not follow the
# maximum exactly may change what it does: the slack of a trailing reference (8), the range of float16 (15 to 16, 24
# below) and of float32 (126 to 150), and far beyond.
JUMPS = (
    *(0.5, 7.9, 8.1, 15, 16, 17, 24, 39, 40, 41, 100, 122.5, 123.5, 124, 125),
    *(126, 127, 128, 129, 149, 150, 151, 250, 260, 1000),
)
# Factors of v that keep it within its dtype and bring it near the ends.
STRETCH = {"float16": 2.0**10, "bfloat16": 2.0**100}
KEYS_A_TILE = 64  # keys that a shipped kernel takes at a time (tiling.py)


def numbers(case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of ``case`` in float32, contiguous, four-dimensional: packed sequences lie in one batch of all rows."""
    if case.values not in _MAKERS:
        raise ValueError(f"values: got {case.values!r}, takes one of {', '.join(VALUES)}")
    generator = generator_of(case, "tensors")
    (batch, query_len), (_, key_len) = case.query_rows, case.key_rows
    shapes = (
        (batch, query_len, case.heads, case.head_dim),
        (batch, key_len, case.kv_heads, case.head_dim),
        (batch, key_len, case.kv_heads, case.value_width),
    )
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    if case.packed is None:
        return _MAKERS[case.values](case, q, k, v, generator)
    made = _MAKERS[case.values](replace(case, batch=batch, query_len=query_len, key_len=key_len), q, k, v, generator)
    for x, side in zip(made, (0, 1, 1), strict=True):
        edges = case.cumulative(side)
        x[:, : max(int(edges[0]), 0)] = math.nan
        x[:, max(int(edges[-1]), 0) :] = math.nan
    return made


def _draw(limit: int, generator) -> int:
    return int(torch.randint(max(limit, 1), (), generator=generator))


def _normal(case, q, k, v, generator):
    return q, k, v


def _large_logits(case, q, k, v, generator):
    return q * LARGE, k * LARGE, v


def _huge_products(case, q, k, v, generator):
    """Scores near the top of their range, for a scale that makes ordinary logits of them."""
    return q * HUGE[case.dtype], k * HUGE[case.dtype], v


def _all_equal(case, q, k, v, generator):
    return torch.ones_like(q), torch.ones_like(k), v


def _zeros(case, q, k, v, generator):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _single_weights(case, q, k, v, generator):
    """Each output element is one weight, times 64: column d of KV head h shows key d % 64 of tile h.

    Roundings that lean one way, be it those of one register, then show in the mean over rows.
    """
    v.zero_()
    for head in range(case.kv_heads):
        first = KEYS_A_TILE * (head % -(-case.key_len // KEYS_A_TILE)) if case.key_len else 0
        for column in range(case.value_width):
            key = first + column % KEYS_A_TILE
            if key < case.key_len:
                v[:, key, head, column] = 64.0
    return 0.5 * q, k, v


def _one_huge_logit(case, q, k, v, generator):
    """All queries point the same way, and so does one key, 100 times as far as the others."""
    direction = torch.randn(case.head_dim, generator=generator)
    if case.key_len:
        k[:, _draw(case.key_len, generator)] = 100.0 * direction
    return direction + 0.1 * q, k, v


def _rising_logits(case, q, k, v, generator):
    """Logits grow along the keys, by more than any slack in a tile: going upwards means rescaling always."""
    direction = torch.randn(case.head_dim, generator=generator)
    ramp = torch.linspace(-1.0, 1.0, max(case.key_len, 1))[: case.key_len, None, None] * 8.0
    return direction + 0.1 * q, ramp * direction + 0.1 * k, v


def _falling_logits(case, q, k, v, generator):
    """The same for kernels that go downwards."""
    q, k, v = _rising_logits(case, q, k, v, generator)
    return q, k.flip(1), v


def _jumps(case, q, k, v, generator, rows, steps=JUMPS):
    """A few keys of one tile stand above the others, by one of ``steps`` that each of ``rows`` draws for itself.

    Base-2 logits are steps alone where the scale allows it. The jump falls into the first half of the keys, late for a
    kernel that goes downwards: a reference kept from the tiles before is wrong by the step. With small v a sum of
    probabilities may overflow where the output does not, with large v the other way round. rows: bool, like q[..., 0].
    """
    if not case.key_len:
        return q, k, v
    drawn = torch.tensor(steps)[torch.randint(len(steps), q.shape[:3], generator=generator)]
    q[..., 0] = torch.where(rows, drawn, 0.0) / _base2_unit(case)
    k[..., 0] = 0.0
    q[..., 1:] *= 0.125
    first = _draw(case.key_len // 2, generator)
    last = min(first + (1, 2, 8)[_draw(3, generator)], case.key_len)
    k[:, first:last] = 0.0
    k[:, first:last, :, 0] = 1.0
    return q, k, v * STRETCH[case.dtype] ** (-1, 0, 1)[_draw(3, generator)]


def _base2_unit(case) -> float:
    """What a product q.k of 1 means in powers of two of the weight; of scales far from 1 only the sign."""
    unit = case.scale * math.log2(math.e)
    return unit if 2.0**-6 <= abs(unit) <= 2.0**6 else math.copysign(1.0, unit)


def _late_jumps(case, q, k, v, generator):
    """Rows that jump share a warp, a quad and an accumulator with rows that do not."""
    return _jumps(case, q, k, v, generator, torch.rand(q.shape[:3], generator=generator) < 0.5)


def _slight_jumps(case, q, k, v, generator):
    """Just past the slack of 2^8: both the keys that jump and the others keep a weight that shows."""
    rows = torch.rand(q.shape[:3], generator=generator) < 0.5
    q, k, _ = _jumps(case, q, k, v, generator, rows, steps=(7.9, 8.1, 9.0, 10.0))
    return q, k, v


def _rare_jumps(case, q, k, v, generator):
    """One row of a warp's sixteen, or none: what the others vote must not matter."""
    return _jumps(case, q, k, v, generator, torch.rand(q.shape[:3], generator=generator) < 1 / 16)


def _octet_jumps(case, q, k, v, generator):
    """One of the two rows that a lane of an m16n8 accumulator holds, and never the other."""
    return _jumps(case, q, k, v, generator, _octets(case, q))


def _octets(case, q):
    """Bool like q[..., 0]: every other octet of rows, the even ones or the odd ones by the seed."""
    rows = (torch.arange(case.query_len) // 8 + case.seed) % 2 == 0
    return rows[None, :, None].expand(q.shape[:3])


def _overflowing_sums(case, q, k, v, generator):
    """Eight keys 2^123.5 above the others: sums in [2^126, 2^127), whose reciprocals rcp.approx.ftz flushes to 0."""
    q.zero_()
    k.zero_()
    q[..., 0] = torch.where(_octets(case, q), 123.5, 0.0) / _base2_unit(case)
    k[:, :8, :, 0] = 1.0
    return q, k, v


def _one_large_column(case, q, k, v, generator):
    """The same with only column ``seed // 2 % value_dim`` of v large: an output overflows there, and no sum does."""
    q, k, _ = _jumps(case, q, k, v, generator, _octets(case, q), steps=(39.0, 40.0, 100.0))
    v[..., case.seed // 2 % case.value_width] *= STRETCH[case.dtype]
    return q, k, v


def _steep_logits(case, q, k, v, generator):
    """A step of 2^256 in weight from key to key, up for some rows and down for the others.

    A row is its last or its first visible key alone. A key that it must not see would drown it, in a sum or a maximum.
    All is in one column of q and k, the first or, if the seed is odd, the last.
    """
    ramp = torch.arange(case.key_len, dtype=torch.float32)[:, None] * 128.0
    sign = torch.where(torch.rand(q.shape[:3], generator=generator) < 0.8, 1.0, -1.0)
    q.zero_()
    k.zero_()
    column = -(case.seed % 2)
    q[..., column] = 2.0 * sign / _base2_unit(case)
    k[..., column] = ramp
    return q, k, v


def _huge_octets(case, q, k, v, generator):
    """Logits that rise along the keys; in every fourth octet of rows so far that a logit times its scale has no bit
    left for a fraction, in the others by little: one of the four rows that a lane holds of a warp's 32."""
    huge = (torch.arange(case.query_len) // 8 + case.seed) % 4 == 0
    q.zero_()
    k.zero_()
    q[..., 0] = torch.where(huge, 2.0**15, 2.0**-7)[None, :, None] * math.copysign(1.0, case.scale)
    k[..., 0] = torch.arange(case.key_len, dtype=torch.float32).clamp(max=500)[:, None] * 2.0**7
    return q, k, v


def _large_values(case, q, k, v, generator):
    """v near the top of the range, under logits that rise: probabilities must not be far above 1 for long."""
    q, k, v = _rising_logits(case, q, k, v, generator)
    return q, 0.125 * k, v.clamp(-3, 3) * LARGE_VALUE[case.dtype]


def _minus_infinite_keys(case, q, k, v, generator):
    """Some keys at a logit of -inf for all queries (with a positive scale): a mask put into the data."""
    hidden = torch.rand(case.batch, case.key_len, generator=generator) < 0.5
    k[hidden] = -math.inf
    return q.abs() + 0.125, k, v


def _minus_infinite_tiles(case, q, k, v, generator):
    """The same for whole tiles at one end of the keys: a kernel may meet nothing at all at first, or in the end.

    The seed says which: 0 hides all keys, 1 none, then come one tile at the end, one at the start, two at the end ...
    """
    tiles = -(-case.key_len // KEYS_A_TILE)
    edge = KEYS_A_TILE * (case.seed // 2 % (tiles + 1))
    if case.seed % 2:
        k[:, :edge] = -math.inf
    else:
        k[:, KEYS_A_TILE * tiles - edge if edge else 0 :] = -math.inf
    return q.abs() + 0.125, k, v


def _nan_queries(case, q, k, v, generator):
    """Some rows; or, if the seed is odd, every row of every other octet."""
    some = torch.rand(case.batch, case.query_len, case.heads, generator=generator) < 0.25
    octets = (torch.arange(case.query_len) // 8 + case.seed // 2) % 2 == 0
    q[octets[None, :, None].expand(some.shape) if case.seed % 2 else some] = math.nan
    return q, k, v


def _values_not_finite(case, q, k, v, generator):
    """An infinity or NaN in one column of v, at a key that every row sees that sees any.

    Logits are small: a weight that underflows, times infinity, would be NaN in one arithmetic and infinite in another.
    """
    if case.key_len:
        key = 0 if case.sides[1] is not None else _draw(case.key_len, generator)
        column = _draw(case.value_width, generator)
        v[:, key, _draw(case.kv_heads, generator), column] = (math.inf, -math.inf, math.nan)[_draw(3, generator)]
    return 0.0625 * q, k, v


def _nan_keys(case, q, k, v, generator):
    if case.key_len:
        k[:, _draw(case.key_len, generator), :, 0] = math.nan
    return q, k, v


def _nan_sequences(case, q, k, v, generator):
    """Every other sequence is NaN throughout, the first or the second by the seed: none of it may reach its neighbours.

    A tile of packed keys goes on into the next sequence, whose values meet weights of 0.
    """
    for b in range(case.seed % 2, case.sequence_count, 2):
        if case.packed is None:
            q[b], k[b], v[b] = math.nan, math.nan, math.nan
        else:
            for x, side in ((q, 0), (k, 1), (v, 1)):
                start, end = case.cumulative(side)[b : b + 2].clamp(min=0).tolist()
                x[:, start:end] = math.nan
    return q, k, v


def _denormal(case, q, k, v, generator):
    """Every number below the normal range of its dtype, so that no step may flush it."""
    limit = 0.9 * SMALLEST_NORMAL[case.dtype]
    return q.clamp(-1, 1) * limit, k.clamp(-1, 1) * limit, v.clamp(-1, 1) * limit


_MAKERS = {
    "normal": _normal,
    "large_logits": _large_logits,
    "huge_products": _huge_products,
    "all_equal": _all_equal,
    "zeros": _zeros,
    "single_weights": _single_weights,
    "one_huge_logit": _one_huge_logit,
    "rising_logits": _rising_logits,
    "falling_logits": _falling_logits,
    "late_jumps": _late_jumps,
    "slight_jumps": _slight_jumps,
    "rare_jumps": _rare_jumps,
    "octet_jumps": _octet_jumps,
    "overflowing_sums": _overflowing_sums,
    "one_large_column": _one_large_column,
    "steep_logits": _steep_logits,
    "huge_octets": _huge_octets,
    "large_values": _large_values,
    "minus_infinite_keys": _minus_infinite_keys,
    "minus_infinite_tiles": _minus_infinite_tiles,
    "nan_queries": _nan_queries,
    "nan_keys": _nan_keys,
    "values_not_finite": _values_not_finite,
    "nan_sequences": _nan_sequences,
    "denormal": _denormal,
}
VALUES = tuple(_MAKERS)
#: Kinds whose logits are -inf with a positive scale and NaN or +inf with any other.
NEED_POSITIVE_SCALE = frozenset({"minus_infinite_keys", "minus_infinite_tiles"})
#: Kinds whose logits must stay small.
NEED_ORDINARY_SCALE = frozenset({"values_not_finite"})
#: Kinds with a number in v that every row must give a weight above 0, and that only.
NEED_UNWEIGHTED_KEYS = frozenset({"values_not_finite"})
