"""Specifications that no table chooses: refused with a reason, or right in the emulator like those that are shipped."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa2_cute import arch, emulation, jit, problem
from fa2_cute.attention import LOG2_E
from fa2_cute.fuzz.judging import judge
from fa2_cute.spec import ForwardSpec

# Each is compiled once: more stages than tiles at some lengths, one warp, tiles of 16, 32, 48 and 64 keys.
SPECS = [
    ForwardSpec("bfloat16", 64, True, 64, 32, 4, 3, "first"),
    ForwardSpec("bfloat16", 64, False, 32, 48, 2, 4, "first"),
    ForwardSpec("float16", 64, True, 16, 16, 1, 2),
    ForwardSpec("float16", 128, False, 64, 64, 2, 2),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.title)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.tuples(st.integers(1, 150), st.integers(1, 150)), seed=st.integers(0, 99))
def test_right_like_the_shipped_ones(spec, lengths, seed):
    query_len, key_len = lengths
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    q = torch.randn(1, query_len, 2, spec.head_dim, generator=generator).to(dtype)
    k, v = (torch.randn(1, key_len, 1, spec.head_dim, generator=generator).to(dtype) for _ in range(2))
    out = torch.full_like(q, math.nan)
    lse = torch.full((1, 2, query_len), math.nan)
    of = problem.Problem.of(q, k, v, causal=spec.causal)
    kernel = jit.compiled(spec, arch.TARGET)
    emulation.run(kernel, of, (q, k, v, out, lse), spec.head_dim**-0.5 * LOG2_E)

    judge(q, k, v, out, lse, softmax_scale=None, causal=spec.causal, what=spec.title)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float32"),
        ("head_dim", 0),
        ("head_dim", 72),
        ("tile_m", 0),
        ("tile_m", 100),
        ("tile_n", 0),
        ("tile_n", 40),
        ("warps", -1),
        ("warps", 3),
        ("stages", 1),
        ("reference", "last"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(field, value):
    fields = {"dtype": "bfloat16", "head_dim": 64, "causal": True, "tile_m": 128, "tile_n": 64, "warps": 4, "stages": 2}
    with pytest.raises(ValueError, match=rf"^{'tile_m' if field == 'warps' and value > 0 else field}: got "):
        ForwardSpec(**{**fields, field: value})


def test_a_first_reference_needs_the_range_of_bfloat16():
    with pytest.raises(ValueError, match=r"^reference: got 'first' with dtype 'float16'"):
        ForwardSpec("float16", 64, True, 128, 64, 4, 2, "first")
