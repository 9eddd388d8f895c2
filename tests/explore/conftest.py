"""One small kernel that the explorer's tests share: compiled once a process."""

import pytest

from fa2_cute import arch
from fa2_cute.explore import binding
from fa2_cute.explore.space import Point, Workload

SM_120 = arch.by_name("sm_120")


@pytest.fixture(scope="session")
def workload():
    return Workload(head_dim=64, query_len=256, key_len=256, heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def point():
    return Point(tile_m=64, tile_n=32, warps=4, stages=2)


@pytest.fixture(scope="session")
def kernel(point, workload):
    return binding.compiled(point, workload, SM_120)
