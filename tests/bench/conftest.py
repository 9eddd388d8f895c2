"""A session without a device: the sections run on CPU tensors, our kernels in the emulator, and times are made up."""

import warnings

import pytest
import torch
from fake_timer import FakeTimer

from fa2_cute import emulation
from fa2_cute.bench import peers, session


@pytest.fixture(autouse=True, scope="session")
def _noticed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emulation.EmulationNotice)
        emulation.announce()


@pytest.fixture
def said():
    return []


@pytest.fixture
def cpu(said):
    """A session on the CPU with torch's peers only."""
    asked = tuple(peers.status(name) for name in (peers.FLASH, peers.CUDNN, peers.EFFICIENT, peers.NAIVE))
    return session.Session(torch.device("cpu"), FakeTimer(), asked, 3, True, said.append, 0)
