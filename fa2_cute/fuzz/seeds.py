"""Random numbers of a case: one stream for each use, so that adding a use changes no other's numbers."""

import torch

STREAMS = ("tensors", "slopes", "sinks", "mask")


def generator_of(case, stream: str) -> torch.Generator:
    """A generator for ``stream`` of ``case``: the same on every machine."""
    return torch.Generator().manual_seed(case.seed + 2**20 * STREAMS.index(stream))
