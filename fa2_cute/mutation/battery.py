"""The cases that every mutant must pass to survive: few, small, at tile edges; those that kill most come first.

Shapes decide what is noticed: on round lengths most relaxed and tightened compares give the same result.
"""

from dataclasses import replace

from ..fuzz import Case
from ..spec import ForwardSpec


def battery(spec: ForwardSpec) -> list[Case]:
    """Cases that run the kernel of ``spec``, in the order in which they are tried."""
    plain = Case(dtype=spec.dtype, head_dim=spec.head_dim, causal=spec.causal)
    return [replace(plain, **fields) for fields in (*_FIELDS, *_TAILS, *_COLUMNS, *_WEIGHTS)]


_TWO = {"heads": 2, "kv_heads": 1}
_FIELDS = (
    # Blocks of few keys: two tiles of keys and the start of a third, rows that are no tile; keys that no row sees.
    {"query_len": 70, "key_len": 130, **_TWO},
    # Blocks of more than FOLLOWED_KEYS, whose references are kept: rows that jump far above them in any tile, and rows
    # beside them that do not.
    {"query_len": 130, "key_len": 330, "values": "late_jumps", "seed": 1},
    {"query_len": 140, "key_len": 397, **_TWO},
    # Short rows whose first tile holds a key or two, far below the maximum of the second.
    {"query_len": 125, "key_len": 189, "values": "large_logits"},
    # Rows that are their last key alone: every key that they must not see would drown it, and none before it does, so
    # that the references that were kept are right. Ends of rows in even octets of a tile and in odd ones.
    *(
        {"query_len": 128, "key_len": key_len, "values": "rising_logits", "softmax_scale": 32.0}
        for key_len in (303, 311)
    ),
    # All scores far below 0.
    {"query_len": 130, "key_len": 310, "values": "all_equal", "softmax_scale": -8.0},
    {"query_len": 125, "key_len": 75, "values": "all_equal", "softmax_scale": -8.0},
    # Everything with a stride of its own, two query tiles, the head ratio 2 in 4, a batch.
    {
        "batch": 2, "query_len": 129, "key_len": 193, "heads": 4, "kv_heads": 2,
        "layouts": ("heads_first", "sliced_length", "packed"), "seed": 2,
    },
    # The largest score belongs to the smallest product, far beyond any slack.
    {"query_len": 129, "key_len": 200, "softmax_scale": -0.125, "values": "large_logits"},
    {"query_len": 129, "key_len": 300, "softmax_scale": -0.125, "values": "large_logits"},
    {"query_len": 200, "key_len": 191, "values": "falling_logits", **_TWO},
    {"query_len": 140, "key_len": 300, "values": "late_jumps", "seed": 5},
    {"query_len": 130, "key_len": 255, "values": "slight_jumps", "seed": 1},
    *({"query_len": 130, "key_len": 383, "values": "slight_jumps", "seed": seed} for seed in (2, 3)),
    # All keys of the last tile in use, which a second pass has to load again.
    {"query_len": 130, "key_len": 255, "values": "late_jumps", "seed": 2},
    {"query_len": 130, "key_len": 319, "values": "late_jumps", "seed": 3},
    {"query_len": 125, "key_len": 200, "values": "steep_logits", "heads": 2},
    *({"query_len": 125, "key_len": 255, "values": "steep_logits", "heads": 2, "seed": seed} for seed in (0, 1)),
    {"query_len": 125, "key_len": 321, "values": "steep_logits", "heads": 2},
    *({"query_len": 125, "key_len": 200, "values": "octet_jumps", "seed": seed} for seed in (0, 1)),
    {"query_len": 125, "key_len": 340, "values": "octet_jumps", "seed": 3},
    # Every row of one octet of a warp in the same tile, and no row of another octet.
    {"query_len": 64, "key_len": 340, "values": "octet_jumps", "seed": 2},
    {"query_len": 56, "key_len": 340, "values": "octet_jumps", "seed": 7},
    *(
        {"query_len": 125, "key_len": key_len, "values": "huge_octets", "seed": seed}
        for key_len in (200, 330)
        for seed in (0, 2)
    ),
    {"query_len": 200, "key_len": 210, "values": "rare_jumps", "heads": 2},
    *({"query_len": 200, "key_len": 390, "values": "rare_jumps", "seed": seed} for seed in (1, 2)),
    *({"query_len": 125, "key_len": 260, "values": "overflowing_sums", "seed": seed} for seed in (0, 1)),
    # Lengths at tile edges, offsets of both signs.
    {"query_len": 128, "key_len": 128},
    {"query_len": 127, "key_len": 127},
    {"query_len": 129, "key_len": 129},
    {"query_len": 1, "key_len": 65},
    {"query_len": 64, "key_len": 63},
    {"query_len": 65, "key_len": 64},
    {"query_len": 1, "key_len": 1},
    {"query_len": 200, "key_len": 71},
    {"query_len": 193, "key_len": 65},
    {"query_len": 5, "key_len": 260},
    # Tiles, rows and keys that hold nothing to add, or only NaN.
    *({"query_len": 125, "key_len": 200, "values": "minus_infinite_tiles", "seed": seed} for seed in (0, 2, 3, 5)),
    *({"query_len": 125, "key_len": 330, "values": "minus_infinite_tiles", "seed": seed} for seed in (2, 6)),
    {"query_len": 125, "key_len": 130, "values": "minus_infinite_keys"},
    {"query_len": 125, "key_len": 130, "values": "nan_queries"},
    {"query_len": 125, "key_len": 5, "values": "nan_queries"},
    *({"query_len": 125, "key_len": 125, "values": "nan_queries", "seed": seed} for seed in (1, 3)),
    {"query_len": 125, "key_len": 140, "values": "nan_queries", "seed": 1},
    {"query_len": 125, "key_len": 300, "values": "nan_queries", "seed": 3},
    {"query_len": 125, "key_len": 130, "values": "values_not_finite", **_TWO},
    {"query_len": 125, "key_len": 130, "values": "nan_keys", "seed": 1},
    # Roundings that lean one way, scales at their ends, magnitudes at theirs.
    {"query_len": 125, "key_len": 130, "softmax_scale": 0.0},
    {"query_len": 125, "key_len": 130, "softmax_scale": 1e30},
    {"query_len": 125, "key_len": 330, "softmax_scale": 1e30},
    {"query_len": 125, "key_len": 130, "softmax_scale": -1e-40, "values": "large_logits"},
    {"query_len": 125, "key_len": 130, "softmax_scale": 1e-40, "values": "minus_infinite_keys"},
    {"query_len": 125, "key_len": 200, "softmax_scale": 2.0**-110, "values": "huge_products"},
    {"query_len": 125, "key_len": 200, "softmax_scale": -(2.0**-110), "values": "huge_products"},
    {"query_len": 125, "key_len": 130, "values": "large_values"},
    {"query_len": 125, "key_len": 130, "values": "denormal"},
    {"query_len": 125, "key_len": 260, "values": "one_huge_logit", "softmax_scale": 1.0},
    # Groups of two, four and eight heads that are not full.
    {"query_len": 129, "key_len": 65, "heads": 9, "kv_heads": 3},
    {"query_len": 3, "key_len": 65, "heads": 5, "kv_heads": 5},
    {"query_len": 3, "key_len": 65, "heads": 7},
    {"batch": 3, "query_len": 3, "key_len": 7, "heads": 3},
    # Inputs that have to be copied, and strides that mean nothing.
    {"query_len": 6, "key_len": 7, "layouts": ("misaligned_start",) * 3, **_TWO},
    {"query_len": 6, "key_len": 7, "layouts": ("odd_strides",) * 3, **_TWO},
    {"query_len": 1, "key_len": 9, "layouts": ("odd_unit_strides",) * 3},
)  # fmt: skip
# Every column of an m16n8 accumulator has a compare of its own with the end of the keys; a lane holds columns 8 n and
# 8 n + 1 of a tile of 64 (PTX ISA, m16n8k16).
_TAILS = tuple(
    {"query_len": 81, "key_len": tiles + tail}
    for tiles in (64, 256)
    for n in range(8)
    for tail in (8 * n, 8 * n + 1)
    if tail
)
# Overflow in one column of the output alone, the first or a late one, of one of the two rows of a lane.
_COLUMNS = tuple(
    {"query_len": 130, "key_len": 260, "values": "one_large_column", "seed": seed} for seed in (0, 1, 126, 127)
)
# Enough rows for a rounding that leans one way to show in a single register: 256 for each key tile and half.
# Few keys, and more than FOLLOWED_KEYS.
_WEIGHTS = (
    {"batch": 2, "query_len": 256, "key_len": 250, "heads": 8, "kv_heads": 4, "values": "single_weights"},
    {"batch": 4, "query_len": 128, "key_len": 320, "heads": 5, "kv_heads": 5, "values": "single_weights"},
)
