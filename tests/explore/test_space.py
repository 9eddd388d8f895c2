"""The search space: points, problems, and what cannot be had."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import arch
from fa2_cute.explore import binding, prune, space
from fa2_cute.explore.space import PARAMETERS, Point, Workload
from fa2_cute.spec import QUERY_HELD

SM_120, SM_90 = arch.by_name("sm_120"), arch.by_name("sm_90")
LONG = Workload(128, 4096, 4096, causal=True)


def test_points_are_all_combinations():
    assert len(space.points()) == len(set(space.points()))
    some = space.points({"tile_m": (64,), "tile_n": (32, 64), "warps": (4,), "stages": (2,), "query_held": ("none",)})
    assert [p.tile_n for p in some] == [32, 64]


def test_a_parameter_is_one_field():
    assert list(PARAMETERS) == [f.name for f in dataclasses.fields(Point)]
    assert all(f.metadata["says"] and f.default in f.metadata["values"] for f in PARAMETERS.values())


def test_names_tell_points_apart():
    points = space.points({"swizzle": (False, True), "query_held": QUERY_HELD})
    assert len({p.name for p in points}) == len(points)


def test_vary_is_read_from_text():
    assert space.parse_vary(["tile-n=16, 32", "swizzle=no,yes"]) == {"tile_n": (16, 32), "swizzle": (False, True)}
    assert space.parse_vary(["query-held=half,all"]) == {"query_held": ("half", "all")}


@pytest.mark.parametrize(
    "text", ["tile_k=1", "tile_n", "tile_n=", "tile_n=x", "tile_n=0", "swizzle=maybe", "query_held=some", "=3"]
)
def test_vary_names_what_it_takes(text):
    with pytest.raises(ValueError, match=r"--vary: .*takes"):
        space.parse_vary([text])


def test_points_refuses_unknown_parameters():
    with pytest.raises(ValueError, match="vary: got 'colour', takes one of tile_m"):
        space.points({"colour": (1,)})


@given(st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_visible_pairs_are_those_of_the_mask(query_len, key_len, causal):
    seen = sum(not causal or key <= row + key_len - query_len for row in range(query_len) for key in range(key_len))
    assert Workload(64, query_len, key_len, causal).visible_pairs == seen


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"head_dim": 0}, ValueError, "head_dim: got 0"),
        ({"query_len": -1}, ValueError, "query_len: got -1"),
        ({"kv_heads": 3}, ValueError, "kv_heads: got 3, takes a divisor of 32"),
        ({"dtype": "float32"}, ValueError, "dtype: got 'float32', takes 'bfloat16' or 'float16'"),
        ({"batch": 1.5}, TypeError, "batch: got 1.5, takes an integer"),
    ],
)
def test_impossible_problems_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        Workload(**{"head_dim": 128, "query_len": 8, "key_len": 8, **options})


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        (Point(64, 64, 4, 3), "needs 112 KiB, sm_120 gives a block 99"),
        (Point(64, 32, 8, 2), "tile_m: got 64, takes a multiple of 16 rows for each of 8 warps"),
        (Point(128, 64, 4, 2, warps_n=2), "warps_n: got 2, the kernel has 1 only"),
        (Point(128, 64, 4, 1), "stages: got 1, takes 2 or more"),
    ],
)
def test_a_refusal_says_why(point, reason):
    assert prune.refusal(point, LONG, SM_120) == reason


def test_registers_are_counted():
    assert "registers a thread" in prune.refusal(Point(128, 128, 4, 2), LONG, SM_90)


@given(st.sampled_from(space.points()), st.sampled_from((40, 64, 96, 128, 192, 256)), st.sampled_from((SM_120, SM_90)))
def test_what_is_kept_fits_and_what_is_refused_does_not(point, head_dim, architecture):
    problem = Workload(head_dim, 512, 512)
    reason = prune.refusal(point, problem, architecture)
    if reason is None:
        assert binding.spec_of(point, problem, architecture).shared_bytes <= architecture.shared_block_bytes
    elif "KiB" in reason:
        assert binding.spec_of(point, problem, architecture).shared_bytes > architecture.shared_block_bytes


def test_the_shipped_tile_is_never_refused():
    for name in arch.BY_NAME:
        architecture = arch.by_name(name)
        for head_dim in (64, 128, 256):
            problem = Workload(head_dim, 512, 512)
            assert prune.refusal(binding.shipped_point(problem, architecture), problem, architecture) is None


@pytest.mark.parametrize("head_dim", [12, 264, 1000])
def test_a_head_dim_that_no_kernel_takes_names_what_is_possible(head_dim):
    with pytest.raises(ValueError, match=r"head_dim: got .*takes multiples of 8"):
        prune.split(space.points(), Workload(head_dim, 512, 512), SM_120)
