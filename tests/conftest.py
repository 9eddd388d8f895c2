"""Hypothesis profiles, and the reason why GPU tests are skipped where there is none."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# No deadline: the first case of a specification compiles its kernel.
_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=40, **_COMMON)
settings.register_profile("quick", max_examples=8, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("FA2_CUTE_HYPOTHESIS_PROFILE", "default"))

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores: torch's own threads would only contend
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
