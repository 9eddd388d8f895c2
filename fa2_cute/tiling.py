"""Which tile for which problem on which architecture, and why."""

from .arch import Architecture
from .problem import Problem
from .spec import ForwardSpec

# (tile_m, tile_n, warps, stages) by head_dim.
#
# sm_120, sm_121, sm_86, sm_89: 100 KiB of shared memory an SM. 16 query rows a warp on 8 warps, so that two warps a
# sub-partition are resident and the softmax of one runs under the MMAs of the other. An m16n8k16 takes 32 cycles on
# sm_120, so K/V fragment traffic is no limit: a warp and tile of head_dim 128 are 288 shared-memory cycles against
# 4096 of its tensor pipe.
_SMALL_SHARED = {128: (128, 64, 8, 2), 64: (128, 64, 8, 2)}
# sm_90 (measured: docs/performance.md), and sm_80 and sm_100 by analogy, unmeasured: an m16n8k16 takes 6 cycles, so
# fragments read from shared memory are the limit with 16 rows a warp; 32 rows halve them. Two blocks of 4 warps fit an
# SM. 48 keys beat 64 at head_dim 128: the registers saved on S let the compiler load fragments further ahead.
_LARGE_SHARED = {128: (128, 48, 4, 2), 64: (128, 64, 4, 2)}

_TABLE = {
    "sm_80": _LARGE_SHARED,
    "sm_86": _SMALL_SHARED,
    "sm_89": _SMALL_SHARED,
    "sm_90": _LARGE_SHARED,
    "sm_100": _LARGE_SHARED,
    "sm_120": _SMALL_SHARED,
    "sm_121": _SMALL_SHARED,
}


DTYPES = ("bfloat16", "float16")


def choose(problem: Problem, arch: Architecture) -> ForwardSpec:
    """The specification that computes ``problem`` on ``arch``; lengths, batch and heads do not enter it."""
    return _SPECS[arch.name, problem.dtype, problem.head_dim, problem.causal]


def shipped(arch: Architecture) -> list[ForwardSpec]:
    """Every specification that ``choose`` can return for ``arch``."""
    return [spec for (name, *_), spec in _SPECS.items() if name == arch.name]


def _spec(tile: tuple[int, int, int, int], dtype: str, head_dim: int, causal: bool) -> ForwardSpec:
    # float16 has no room for a reference that is not followed: 2^16 above it a probability overflows.
    reference = "first" if dtype == "bfloat16" else "trailing"
    return ForwardSpec(dtype, head_dim, causal, *tile, reference)


_SPECS = {
    (name, dtype, head_dim, causal): _spec(table[head_dim], dtype, head_dim, causal)
    for name, table in _TABLE.items()
    for dtype in DTYPES
    for head_dim in sorted(table)
    for causal in (False, True)
}
