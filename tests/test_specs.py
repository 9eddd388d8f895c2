"""Specifications that no table chooses: refused with a reason, or right in the emulator like those that are shipped."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa2_cute import arch, emulation, forward, jit, tiling
from fa2_cute.fuzz.judging import judge
from fa2_cute.problem import Problem
from fa2_cute.spec import CAUSAL, FULL, Features, ForwardSpec

# Each is compiled once: more stages than tiles at some lengths, one warp, tiles of 16, 32, 48 and 64 keys, three blocks
# of rows a warp, rows of 64 bytes without a swizzle, half of Q in registers beside V's rows with padding.
SPECS = [
    ForwardSpec("bfloat16", 64, 64, CAUSAL, 64, 32, 4, 3, "first"),
    ForwardSpec("bfloat16", 64, 40, FULL, 32, 48, 2, 4, "first"),
    ForwardSpec("float16", 64, 64, CAUSAL, 16, 16, 1, 2),
    ForwardSpec("float16", 72, 128, FULL, 64, 64, 2, 2),
    ForwardSpec("bfloat16", 40, 64, CAUSAL, 48, 48, 1, 2, "first", query_held="all"),
    ForwardSpec("float16", 96, 32, CAUSAL, 32, 32, 2, 2, swizzle=False),
    ForwardSpec("bfloat16", 64, 64, CAUSAL, 64, 32, 4, 3, "first", query_held="all"),
    ForwardSpec("bfloat16", 96, 40, FULL, 32, 32, 2, 4, "first", query_held="all"),
    ForwardSpec("bfloat16", 64, 64, FULL, 64, 48, 2, 3, "first", query_held="all"),
    ForwardSpec("bfloat16", 128, 128, FULL, 128, 32, 4, 2, "first", query_held="half"),
    ForwardSpec("bfloat16", 104, 120, CAUSAL, 64, 32, 4, 3, "first", query_held="half"),
    ForwardSpec("float16", 128, 112, CAUSAL, 32, 16, 2, 2, query_held="half"),
    ForwardSpec("bfloat16", 128, 192, FULL, 64, 16, 4, 3, "first", query_held="half"),
    ForwardSpec("bfloat16", 256, 128, CAUSAL, 64, 48, 4, 2, "first", query_held="half", swizzle=False),
    *(tiling.choose("bfloat16", 128, 128, features, arch.TARGET, few_blocks=True) for features in (FULL, CAUSAL)),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.title)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
# With more than 240 keys a reference that is taken first is also kept.
@given(lengths=st.tuples(st.integers(1, 150), st.integers(1, 150) | st.integers(241, 400)), seed=st.integers(0, 99))
def test_right_like_the_shipped_ones(spec, lengths, seed):
    query_len, key_len = lengths
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    q = torch.randn(1, query_len, 2, spec.head_dim, generator=generator).to(dtype)
    k = torch.randn(1, key_len, 1, spec.head_dim, generator=generator).to(dtype)
    v = torch.randn(1, key_len, 1, spec.value_dim, generator=generator).to(dtype)
    out, lse, call = forward.prepare(q, k, v, window=(None, 0 if spec.causal else None))
    out.fill_(math.nan)
    lse.fill_(math.nan)
    emulation.run(jit.compiled(spec, arch.TARGET), call.grid(spec), call.values())

    judge(q, k, v, out, lse, softmax_scale=None, causal=spec.causal, what=spec.title)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float32"),
        ("head_dim", 0),
        ("head_dim", 100),
        ("head_dim", 264),
        ("value_dim", 4),
        ("tile_m", 0),
        ("tile_m", 100),
        ("tile_n", 0),
        ("tile_n", 40),
        ("warps", -1),
        ("warps", 3),
        ("stages", 1),
        ("reference", "last"),
        ("query_held", "some"),
        ("query_held", "half"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(field, value):
    fields = {"dtype": "bfloat16", "head_dim": 64, "value_dim": 64, "features": CAUSAL}
    fields |= {"tile_m": 128, "tile_n": 64, "warps": 4, "stages": 2}
    with pytest.raises(ValueError, match=rf"^{'tile_m' if field == 'warps' and value > 0 else field}: got "):
        ForwardSpec(**{**fields, field: value})


@pytest.mark.parametrize("causal", [False, True])
def test_half_of_q_is_there_for_a_second_pass(causal):
    """Of a late far maximum, and of Q that a negative scale negates in shared memory."""
    spec = tiling.choose("bfloat16", 128, 128, CAUSAL if causal else FULL, arch.TARGET)
    assert spec.query_makes_room
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 128, generator=generator).to(torch.bfloat16) for n in (130, 400, 400))
    k[:, :100] *= 300
    out, lse, call = forward.prepare(q, k, v, window=(None, 0 if causal else None), softmax_scale=-0.2)
    out.fill_(math.nan)
    lse.fill_(math.nan)
    emulation.run(jit.compiled(spec, arch.TARGET), call.grid(spec), call.values())
    judge(q, k, v, out, lse, softmax_scale=-0.2, causal=causal, what=spec.title)


def test_half_of_q_needs_rows_of_whole_blocks():
    for head_dim in (64, 96, 192):
        with pytest.raises(ValueError, match=rf"^query_held: got 'half' with rows of {head_dim} .*multiples of 128"):
            ForwardSpec("bfloat16", head_dim, 256, FULL, 64, 32, 4, 2, query_held="half")


def test_half_of_q_needs_room_in_the_ring_of_v():
    ForwardSpec("bfloat16", 128, 128, FULL, 128, 32, 4, 2, query_held="half")
    for value_dim, tile_m in ((64, 128), (128, 256)):
        with pytest.raises(ValueError, match=rf"^query_held: got 'half' of {tile_m} rows, takes it where V's ring"):
            ForwardSpec("bfloat16", 128, value_dim, FULL, tile_m, 32, 4, 2, query_held="half")


def test_a_first_reference_needs_the_range_of_bfloat16():
    with pytest.raises(ValueError, match=r"^reference: got 'first' with dtype 'float16'"):
        ForwardSpec("float16", 64, 64, CAUSAL, 128, 64, 4, 2, "first")


def test_a_first_reference_needs_to_know_which_tiles_a_row_sees():
    with pytest.raises(ValueError, match=r"^reference: got 'first' with a mask"):
        ForwardSpec("bfloat16", 64, 64, Features(mask="bool"), 128, 64, 4, 2, "first")


def test_a_mask_is_one_of_its_kinds_and_not_for_packed_sequences():
    with pytest.raises(ValueError, match=r"^mask: got 'int8'"):
        Features(mask="int8")
    with pytest.raises(ValueError, match=r"^mask: takes calls of one length"):
        Features(mask="bool", varlen=True)


WIDTHS = st.integers(1, 32).map(lambda n: 8 * n)


@given(WIDTHS, WIDTHS, st.sampled_from(sorted(arch.BY_NAME)), st.sampled_from(["float16", "bfloat16"]))
def test_every_width_has_a_tile_that_fits(head_dim, value_dim, name, dtype):
    architecture = arch.by_name(name)
    spec = tiling.choose(dtype, head_dim, value_dim, CAUSAL, architecture)
    assert spec.shared_bytes <= architecture.shared_block_bytes
    assert head_dim <= spec.head_width
    assert value_dim <= spec.value_width
    for width in (spec.head_width, spec.value_width):
        assert width % (8 * spec.copy_lanes(width)) == 0


@given(
    st.integers(1, 64), st.integers(1, 20_000), st.sampled_from([8, 16, 32]), st.sampled_from([30, 132, 170, 188]),
    st.sampled_from([FULL, CAUSAL, Features(varlen=True)]),
)  # fmt: skip
def test_few_blocks_take_smaller_tiles(batch, query_len, heads, sms, features):
    problem = Problem("bfloat16", batch, query_len, query_len, heads, heads, 128, 128, features)
    chosen, large = tiling.choose_for(problem, arch.TARGET, sms), tiling.choose_for(problem, arch.TARGET, 0)
    x, y, z = large.grid(batch, heads, query_len)
    waves = x * y * z / (2 * sms)  # some of the grid's blocks may be idle
    assert large.query_held == "half"
    assert chosen in tiling.every("bfloat16", 128, 128, features, arch.TARGET)
    if waves < tiling.MANY_WAVES:
        assert chosen.tile_m < large.tile_m
    if waves >= 4 * tiling.MANY_WAVES:
        assert chosen == large
    sm_90 = arch.by_name("sm_90")
    assert tiling.choose_for(problem, sm_90, sms) == tiling.choose_for(problem, sm_90, 0)


@pytest.mark.parametrize(("rows", "tile_m"), [(254 * 128, 64), (254 * 128 + 1, 128)])
def test_few_blocks_are_less_than_six_waves(rows, tile_m):
    """Two blocks on each of 170 multiprocessors, six times: 2040 blocks."""
    problem = Problem("bfloat16", 1, rows, rows, 8, 8, 128, 128, FULL)
    assert tiling.choose_for(problem, arch.TARGET, 170).tile_m == tile_m


def test_threads_that_copy_pieces_of_swizzled_blocks_are_refused():
    with pytest.raises(
        ValueError, match=r"^warps: got 3, takes as many as copy whole blocks of 8 rows .* 12 rows of 64"
    ):
        ForwardSpec("bfloat16", 64, 64, FULL, 96, 96, 3, 2)
