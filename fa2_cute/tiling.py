"""Which tile for which problem on which architecture, and why."""

import functools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .arch import Architecture
from .spec import CAUSAL, DTYPES, FULL, Features, ForwardSpec, packed_tiles

if TYPE_CHECKING:
    from .explore.space import Workload
    from .problem import Problem


@dataclass(frozen=True)
class Tile:
    """Fields of a ForwardSpec that are a matter of speed."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int = 2
    query_held: str = "none"

    @property
    def rows_a_warp(self) -> int:
        return self.tile_m // self.warps


# By the widest row of Q, K and V.
#
# sm_120, sm_121, sm_86, sm_89: 100 KiB of shared memory an SM. Eight warps are resident, two a sub-partition, so that
# the softmax of one runs under the MMAs of the other: two blocks of 4 where 48 KiB hold a block, else one of 8. Wider
# rows take fewer keys a step to stay within 99 KiB. Q in registers, or half of it where that makes room for twice the
# keys a step: by the explorer's model 2 to 5% at 192 beyond length 1024, 1% at 256.
#
# At 128, 32 rows a warp read K and V half as often as 16, from the L2 and from shared memory, and with half of Q in
# registers two blocks fit 48 KiB each: run on an H200, 442 TFLOP/s at 8192 where two blocks of 64x32, with all of Q in
# registers, have 331. On sm_120, where an m16n8k16 takes 32 cycles, neither traffic is a limit: the explorer's model
# has the two within 5% of each other for launches of many blocks, where the fewer reads decide. Of few blocks those of
# 64 rows fill the device better.
_SMALL_SHARED = {
    64: Tile(128, 64, 4, query_held="all"),
    96: Tile(128, 32, 4),
    128: Tile(128, 32, 4, query_held="half"),
    192: Tile(128, 32, 8, query_held="all"),
    256: Tile(128, 32, 8, query_held="half"),
}
# sm_90 (measured: docs/performance.md), and sm_100 by analogy, unmeasured: an m16n8k16 takes 6 cycles, so fragments
# read from shared memory are the limit with 16 rows a warp; 32 rows halve them, and Q in registers takes another fifth
# off at head_dim 64. Two blocks of 4 warps fit an SM: they drift apart and fill each other's gaps. Beyond 128, O of 32
# rows a warp does not fit the registers, but Q of 16 does.
_LARGE_SHARED = {
    64: Tile(128, 64, 4, query_held="all"),
    96: Tile(128, 64, 4),
    128: Tile(128, 48, 4),
    192: Tile(128, 64, 8, query_held="all"),
    256: Tile(64, 32, 4, query_held="all"),
}
# A block has 163 KiB there, and so has the SM: 8 warps of head_dim 256 must share theirs.
_SM_80 = {**_LARGE_SHARED, 256: Tile(128, 32, 8, query_held="all")}

# Of fewer waves of blocks (all that a device holds at a time) the last one, which is not full, is a large part: by the
# explorer's model of sm_120, blocks of half as many rows are faster by 7 to 8% in a launch of 3 such waves, by at most
# 5% in one of 6. Calls in splits always have few blocks.
MANY_WAVES = 6

# bfloat16 without a bound on the left: 64 keys a step are 5% faster than 48 at length 512 and as fast at 8192
# (docs/performance.md); with a bound they spill.
_WITHOUT_LEFT = {Tile(128, 48, 4): Tile(128, 64, 4)}

# What more a row's state, mask addresses and the arithmetic on scores need of the registers does not fit beside 32 rows
# a warp: the same tiles on twice the warps. Of mask elements 32 columns at head_dim 128, not 64.
_SMALLER = {
    Tile(128, 64, 4, query_held="all"): Tile(128, 64, 8, query_held="all"),
    Tile(128, 48, 4): Tile(128, 64, 8, query_held="all"),
    Tile(128, 32, 4): Tile(128, 64, 8, query_held="all"),
    Tile(128, 64, 4): Tile(128, 64, 8, query_held="all"),
    Tile(128, 64, 8, query_held="all"): Tile(128, 32, 8),
}

# Where V's ring has no room for half of Q, or registers none for it. In tiles of 32 rows a warp there is none beside a
# reference that follows the maximum, nor for arithmetic on scores.
_WITHOUT_HALF = {
    Tile(128, 32, 4, query_held="half"): Tile(64, 32, 4, query_held="all"),
    Tile(128, 32, 8, query_held="half"): Tile(128, 16, 8),
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
def choose(
    dtype: str, head_dim: int, value_dim: int, features: Features, arch: Architecture, *, few_blocks: bool = False
) -> ForwardSpec:
    """The specification for such calls on ``arch``; few_blocks: of fewer blocks than fill it MANY_WAVES times."""
    table = _TABLE[arch.name]
    width = max(head_dim, value_dim)
    # What is wider than all, ForwardSpec refuses.
    widest = min((widest for widest in table if width <= widest), default=max(table))
    tile = table[widest]
    if dtype == "bfloat16" and not features.left:
        tile = _WITHOUT_LEFT.get(tile, tile)
    if features.changes_scores or (features.left and features.varlen):
        tile = _SMALLER.get(tile, tile)
    if tile.query_held == "half":
        narrower = max((other for other in table if other < widest), default=0)
        has_room = min(head_dim, value_dim) > narrower and not features.left
        if tile.rows_a_warp == 32:
            has_room = has_room and dtype == "bfloat16" and not features.changes_scores and not few_blocks
        if not has_room:
            tile = _WITHOUT_HALF[tile]
    # float16 has no room for a reference that is not followed: 2^16 above it a probability overflows. With a mask, a
    # row may see no key of its first tiles.
    reference = "first" if dtype == "bfloat16" and features.mask is None else "trailing"
    return ForwardSpec(dtype, head_dim, value_dim, features, reference=reference, **asdict(tile))


def choose_for(problem: "Problem | Workload", arch: Architecture, sms: int) -> ForwardSpec:
    """The specification for ``problem`` on a device of ``sms`` multiprocessors; 0: there are none to be filled."""
    kind = (problem.dtype, problem.head_dim, problem.value_dim, problem.features, arch)
    spec = choose(*kind)
    tiles = problem.batch * -(-problem.query_len // spec.tile_m)
    if problem.features.varlen:
        tiles = packed_tiles(problem.batch, problem.query_len, spec.tile_m)
    wave = arch.blocks_held(spec.shared_bytes) * sms
    return choose(*kind, few_blocks=tiles * problem.heads < MANY_WAVES * wave)


def every(dtype: str, head_dim: int, value_dim: int, features: Features, arch: Architecture) -> list[ForwardSpec]:
    """All that such calls may take, whatever their number of blocks."""
    kind = (dtype, head_dim, value_dim, features, arch)
    return list(dict.fromkeys((choose(*kind), choose(*kind, few_blocks=True))))


def shipped(arch: Architecture) -> list[ForwardSpec]:
    """The most common specifications that ``choose`` returns for ``arch``: what ``fa2-cute compile`` makes."""
    return [
        spec
        for dtype in DTYPES
        for head_dim in _COMMON_HEAD_DIMS
        for features in (FULL, CAUSAL)
        for spec in every(dtype, head_dim, head_dim, features, arch)
    ]
