"""Which kernel: plain data, nothing is compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import arch
from fa2_cute.decode_spec import (
    FP8_DTYPES,
    MIN_STAGES,
    SHARED_BUDGET,
    CombineSpec,
    DecodeSpec,
    choose,
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
