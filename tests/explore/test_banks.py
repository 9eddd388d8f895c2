"""Bank conflicts: by definition, and as the emulator counts them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute.emulator.counters import Counters, Line
from fa2_cute.explore import banks

WIDTHS = st.sampled_from((4, 8, 16))


@st.composite
def warp_accesses(draw):
    """(addresses of 32 lanes, bytes a lane): aligned, in 8 KiB."""
    width = draw(WIDTHS)
    slots = st.integers(0, 8192 // width - 1)
    return [width * slot for slot in draw(st.lists(slots, min_size=32, max_size=32))], width


@given(warp_accesses())
def test_wavefronts_are_the_busiest_bank_of_each_phase(access):
    addresses, width = access
    lanes = 32 * 4 // width
    expected = 0
    for first in range(0, 32, lanes):
        words = {(a + 4 * i) // 4 for a in addresses[first : first + lanes] for i in range(width // 4)}
        expected += max(sum(word % 32 == bank for word in words) for bank in range(32))
    assert banks.wavefronts(addresses, width) == expected


@given(warp_accesses())
def test_the_emulator_counts_the_same(access):
    addresses, width = access
    line = Line("", None)
    lanes = 32 * 4 // width
    Counters().count(line, np.arange(32) // lanes, np.array(addresses), width, lanes)
    phases = banks.phases(addresses, width)
    assert line.wavefronts == sum(phase.wavefronts for phase in phases)
    assert line.conflicts == sum(phase.conflicts for phase in phases)


@pytest.mark.parametrize(("stride", "wavefronts"), [(16, 1), (128, 8), (256, 8), (64, 4), (144, 1), (0, 1)])
def test_eight_lanes_of_sixteen_bytes(stride, wavefronts):
    assert banks.phases([stride * lane for lane in range(8)], 16)[0].wavefronts == wavefronts
