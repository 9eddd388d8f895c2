"""The notice that calls are emulated comes once in a process, from whichever test is first: not from these."""

import warnings

import pytest

from fa2_cute import emulation


@pytest.fixture(autouse=True, scope="session")
def _noticed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emulation.EmulationNotice)
        emulation.announce()
