"""Which kernel and how many splits: plain data, nothing is compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import arch
from fa2_cute.decode_spec import (
    FP8_DTYPES,
    MAX_SPLITS,
    MIN_STAGES,
    SHARED_BUDGET,
    CombineSpec,
    DecodeSpec,
    choose,
    choose_splits,
)

SPEC = choose("bfloat16", "bfloat16", 128, 128, 4)
dims = st.integers(1, 32).map(lambda n: 8 * n)


@given(dims, dims, st.integers(1, 200), st.sampled_from(["float16", "bfloat16", *FP8_DTYPES]), st.booleans())
def test_a_specification_for_every_call_that_is_taken(head_dim, value_dim, rows, cache_dtype, paged):
    dtype = cache_dtype if cache_dtype not in FP8_DTYPES else "bfloat16"
    if cache_dtype in FP8_DTYPES:
        head_dim, value_dim = -(-head_dim // 16) * 16, -(-value_dim // 16) * 16
    spec = choose(dtype, cache_dtype, head_dim, value_dim, rows, paged=paged)
    assert spec.shared_bytes <= SHARED_BUDGET <= min(a.shared_block_bytes for a in arch.BY_NAME.values())
    assert spec.stages >= MIN_STAGES
    assert spec.threads in (64, 128, 256)
    assert spec.tile_m == (16 if rows <= 16 else 64)
    assert spec.tiles_m(rows) * spec.tile_m >= rows
    assert spec.value_width >= value_dim
    assert spec.value_width % (16 * spec.warps_v) == 0
    assert spec.warps_v == 1 or spec.value_bytes % (128 * spec.warps_v) == 0


@given(st.integers(1, 200), st.integers(1, 5000), st.integers(1, 2**20))
def test_splits_fill_the_gpu_and_leave_each_something_to_do(sms, blocks, capacity):
    splits = choose_splits(SPEC, arch.TARGET, sms, blocks, capacity)
    keys_a_step = SPEC.warps_n * SPEC.tile_n
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or splits * keys_a_step <= capacity
    if blocks >= sms:
        assert splits == 1
    if blocks * 2 <= sms and capacity >= keys_a_step * MAX_SPLITS:
        waves = -(-blocks * splits // sms)
        assert blocks * splits >= 0.8 * waves * sms


def test_splits_on_an_rtx_5090_and_an_h200():
    small, large = arch.BY_NAME["sm_120"], arch.BY_NAME["sm_90"]
    assert choose_splits(SPEC, small, 170, 8, 8192) in range(19, 22)
    assert choose_splits(SPEC, large, 132, 8, 8192) in range(15, 17)
    assert choose_splits(SPEC, large, 132, 128, 8192) == choose_splits(SPEC, large, 132, 512, 8192) == 1
    fp8 = choose("bfloat16", "float8_e4m3fn", 128, 128, 4)
    assert choose_splits(fp8, large, 132, 128, 8192) == 2
    assert choose_splits(fp8, large, 132, 8, 8192) in range(15, 17)
    assert choose_splits(fp8, small, 170, 160, 8192) == 1


FIELDS = {
    "dtype": "float32",
    "cache_dtype": "float16",
    "head_dim": 100,
    "value_dim": 264,
    "warps_m": 3,
    "warps_v": 0,
    "warps_n": 16,
    "tile_n": 48,
    "stages": 2,
    "k_scale": "head",
    "v_scale": "block",
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_field_is_refused_by_name(name):
    fields = {field: getattr(SPEC, field) for field in FIELDS} | {name: FIELDS[name]}
    with pytest.raises(ValueError, match=f"{name}: got .*{FIELDS[name]}.*, takes "):
        DecodeSpec(**fields)


def test_float8_needs_rows_of_whole_vectors():
    with pytest.raises(ValueError, match="head_dim: got 72, takes multiples of 16"):
        choose("bfloat16", "float8_e4m3fn", 72, 64, 1)


@pytest.mark.parametrize(("dtype", "value_dim", "name"), [("float32", 64, "dtype"), ("float16", 12, "value_dim")])
def test_combining_refuses_wrong_fields(dtype, value_dim, name):
    with pytest.raises(ValueError, match=f"{name}: got "):
        CombineSpec(dtype, value_dim)
