"""Operand vectors biased to the edges: powers of two and their neighbours, extremes, NaN, infinities, subnormals."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

N = 48
FEW = settings(max_examples=8, deadline=None)  # each example is a whole vector of operands


def ints(dtype):
    """A vector of N integers of a dtype."""
    info = np.iinfo(dtype)
    edges = sorted(
        {
            0,
            1,
            2,
            info.max,
            info.max - 1,
            info.min,
            info.min + 1,
            *(v for k in range(info.bits) for v in ((1 << k) - 1, 1 << k, -(1 << k)) if info.min <= v <= info.max),
        }
    )
    element = st.one_of(st.sampled_from(edges), st.integers(info.min, info.max))
    return st.lists(element, min_size=N, max_size=N).map(lambda x: np.array(x, dtype))


SPECIAL32 = [
    0x00000000,
    0x80000000,
    0x3F800000,
    0xBF800000,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC00001,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x00000001,
    0x80000001,
    0x007FFFFF,
    0x00800000,
    0x80800000,
    0x3F7FFFFF,
    0x3F800001,
    0x4B800000,
    0x477FE000,
    0x477FF000,
    0x33000000,
    0x33800001,
    0x387FC000,
    0x43E00000,
    0x47600000,
    0x3F808000,
    0x3F818000,
]


def f32s():
    """A vector of N float32 values, by bits so that every value has a chance."""
    near = st.integers(0x3D000000, 0x43000000)
    signed = st.tuples(near, st.booleans()).map(lambda x: x[0] | (0x80000000 if x[1] else 0))
    element = st.one_of(st.sampled_from(SPECIAL32), st.integers(0, 2**32 - 1), signed)
    return st.lists(element, min_size=N, max_size=N).map(lambda x: np.array(x, np.uint32).view(np.float32))


def bits16():
    """A vector of N 16-bit patterns, edges of f16 and bf16 included."""
    edges = [
        0,
        0x8000,
        0x3C00,
        0x3F80,
        0x7C00,
        0xFC00,
        0x7F80,
        0xFF80,
        0x7FFF,
        0x7E00,
        1,
        0x8001,
        0x03FF,
        0x0400,
        0x7BFF,
        0x7F7F,
    ]
    element = st.one_of(st.sampled_from(edges), st.integers(0, 65535), st.integers(0x3800, 0x4400))
    return st.lists(element, min_size=N, max_size=N).map(lambda x: np.array(x, np.uint16))


def predicates():
    """A vector of N booleans."""
    return st.lists(st.booleans(), min_size=N, max_size=N).map(lambda x: np.array(x, bool))
