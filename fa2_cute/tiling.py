"""Which tile for which problem on which architecture, and why."""

import functools
from dataclasses import asdict, dataclass

from .arch import Architecture
from .spec import CAUSAL, DTYPES, FULL, Features, ForwardSpec


@dataclass(frozen=True)
class Tile:
    """Fields of a ForwardSpec that are a matter of speed."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int = 2
    query_in_registers: bool = False


# By the widest row of Q, K and V.
#
# sm_120, sm_121, sm_86, sm_89: 100 KiB of shared memory an SM. Eight warps are resident, two a sub-partition, so that
# the softmax of one runs under the MMAs of the other: two blocks of 4 where 48 KiB hold a block, else one of 8. An
# m16n8k16 takes 32 cycles on sm_120, so K/V fragment traffic is no limit: a warp and tile of head_dim 128 are 288
# shared-memory cycles against 4096 of its tensor pipe. Wider rows take fewer keys a step to stay within 99 KiB; at 256,
# 16 keys are still 2048 cycles of a warp's tensor pipe for one barrier. Q in registers, where they suffice, saves a
# ninth of the traffic and more. At 128, two blocks of 64x32 (48 KiB) rather than one of 128x64: they drift apart, and
# waste fewer products at a causal diagonal (the explorer's model: 8% at 4096 causal; run on an H200 beside it, the same
# at 8192 keys and 10 to 20% faster at 512).
_SMALL_SHARED = {
    64: Tile(128, 64, 4, query_in_registers=True),
    96: Tile(128, 32, 4),
    128: Tile(64, 32, 4, query_in_registers=True),
    192: Tile(128, 32, 8),
    256: Tile(128, 16, 8),
}
# sm_90 (measured: docs/performance.md), and sm_100 by analogy, unmeasured: an m16n8k16 takes 6 cycles, so fragments
# read from shared memory are the limit with 16 rows a warp; 32 rows halve them, and Q in registers takes another fifth
# off at head_dim 64. Two blocks of 4 warps fit an SM: they drift apart and fill each other's gaps. Beyond 128, O of 32
# rows a warp does not fit the registers, but Q of 16 does.
_LARGE_SHARED = {
    64: Tile(128, 64, 4, query_in_registers=True),
    96: Tile(128, 64, 4),
    128: Tile(128, 48, 4),
    192: Tile(128, 64, 8, query_in_registers=True),
    256: Tile(64, 32, 4, query_in_registers=True),
}
# A block has 163 KiB there, and so has the SM: 8 warps of head_dim 256 must share theirs.
_SM_80 = {**_LARGE_SHARED, 256: Tile(128, 32, 8, query_in_registers=True)}

# bfloat16 without a bound on the left: 64 keys a step are 5% faster than 48 at length 512 and as fast at 8192
# (docs/performance.md); with a bound they spill.
_WITHOUT_LEFT = {Tile(128, 48, 4): Tile(128, 64, 4)}

# What more a row's state, mask addresses and the arithmetic on scores need of the registers does not fit beside 32 rows
# a warp: the same tiles on twice the warps. Of mask elements 32 columns at head_dim 128, not 64.
_SMALLER = {
    Tile(128, 64, 4, query_in_registers=True): Tile(128, 64, 8, query_in_registers=True),
    Tile(128, 48, 4): Tile(128, 64, 8, query_in_registers=True),
    Tile(128, 32, 4): Tile(128, 64, 8, query_in_registers=True),
    Tile(128, 64, 4): Tile(128, 64, 8, query_in_registers=True),
    Tile(128, 64, 8, query_in_registers=True): Tile(128, 32, 8),
}

_TABLE = {
    "sm_80": _SM_80,
    "sm_86": _SMALL_SHARED,
    "sm_89": _SMALL_SHARED,
    "sm_90": _LARGE_SHARED,
    "sm_100": _LARGE_SHARED,
    "sm_120": _SMALL_SHARED,
    "sm_121": _SMALL_SHARED,
}

_COMMON_HEAD_DIMS = (64, 128)


@functools.cache
def choose(dtype: str, head_dim: int, value_dim: int, features: Features, arch: Architecture) -> ForwardSpec:
    """The specification for such calls on ``arch``; lengths, batch and heads do not enter it."""
    table = _TABLE[arch.name]
    width = max(head_dim, value_dim)
    # What is wider than all, ForwardSpec refuses.
    tile = table[min((widest for widest in table if width <= widest), default=max(table))]
    if dtype == "bfloat16" and not features.left:
        tile = _WITHOUT_LEFT.get(tile, tile)
    if features.changes_scores or (features.left and features.varlen):
        tile = _SMALLER.get(tile, tile)
    # float16 has no room for a reference that is not followed: 2^16 above it a probability overflows. With a mask, a
    # row may see no key of its first tiles.
    reference = "first" if dtype == "bfloat16" and features.mask is None else "trailing"
    return ForwardSpec(dtype, head_dim, value_dim, features, reference=reference, **asdict(tile))


def shipped(arch: Architecture) -> list[ForwardSpec]:
    """The most common specifications that ``choose`` returns for ``arch``: what ``fa2-cute compile`` makes."""
    return [
        choose(dtype, head_dim, head_dim, features, arch)
        for dtype in DTYPES
        for head_dim in _COMMON_HEAD_DIMS
        for features in (FULL, CAUSAL)
    ]
