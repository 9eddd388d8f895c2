"""quantize_kv: what its numbers and factors give back, for every kind of block."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute.quantize import FP8, SMALLEST_FACTOR, dequantize_kv, quantize_kv

LARGEST, SMALLEST_NORMAL = 448.0, 2.0**-6


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(1, 300),
    st.integers(1, 3),
    st.sampled_from([1, 16, 128]),
    st.integers(-30, 30),
    st.integers(0, 99),
)
def test_gives_back_every_element_within_half_a_step(dtype, tokens, kv_heads, block, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn((2, tokens, kv_heads, 16), generator=generator)
    x = (spread * spread.exp() * 2.0**exponent).clamp(-3e4, 3e4).to(dtype)
    data, factors = quantize_kv(x, block)
    assert data.dtype == FP8
    assert data.shape == x.shape
    assert factors.dtype == torch.float32
    assert factors.shape == (2, math.ceil(tokens / block), kv_heads)
    assert (factors >= SMALLEST_FACTOR).all()
    step = factors.repeat_interleave(block, dim=1)[:, :tokens, :, None].double()
    error = (dequantize_kv(data, factors, block).double() - x.double()).abs()
    # Three mantissa bits: half a step is 2^-4 of the number, or of the smallest normal number of the block.
    allowed = torch.maximum(x.double().abs(), SMALLEST_NORMAL * step) * 2.0**-4
    assert (error <= allowed * (1 + 2.0**-20)).all()


@given(st.integers(1, 260), st.integers(0, 99))
def test_the_largest_magnitude_of_a_block_is_the_largest_number(tokens, seed):
    x = torch.randn((tokens, 2, 8), generator=torch.Generator().manual_seed(seed)).bfloat16()
    data, factors = quantize_kv(x)
    for i in range(factors.shape[0]):
        for head in range(2):
            block = slice(128 * i, 128 * (i + 1))
            assert data[block, head].float().abs().max() == LARGEST
            assert factors[i, head].item() == pytest.approx(x[block, head].abs().max().item() / LARGEST, rel=1e-6)


def test_a_block_of_zeros():
    data, factors = quantize_kv(torch.zeros(5, 2, 8).bfloat16())
    assert (factors == 1.0).all()
    assert (data.float() == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_block_of_the_smallest_numbers_has_a_normal_factor(dtype):
    x = torch.full((3, 1, 8), torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).to(dtype)
    data, factors = quantize_kv(x)
    assert (factors >= SMALLEST_FACTOR).all()
    assert dequantize_kv(data, factors).isfinite().all()


def test_infinities_saturate_and_are_ignored_for_the_factor():
    x = torch.ones(2, 1, 8).bfloat16()
    x[0, 0, :2] = torch.tensor([math.inf, -math.inf])
    data, factors = quantize_kv(x)
    assert factors.item() == pytest.approx(1 / LARGEST)
    assert data[0, 0, :3].float().tolist() == [LARGEST, -LARGEST, LARGEST]


def test_a_nan_stays_and_touches_nothing_else():
    x = torch.randn(130, 2, 8).bfloat16()
    clean, clean_factors = quantize_kv(x.clone().index_fill_(0, torch.tensor([7]), 0.0))
    x[7] = math.nan
    data, factors = quantize_kv(x)
    assert torch.equal(factors, clean_factors)
    assert data[7].float().isnan().all()
    others = torch.arange(130) != 7
    assert torch.equal(data[others].float(), clean[others].float())


def test_a_block_of_nan_only():
    data, factors = quantize_kv(torch.full((4, 1, 8), math.nan).bfloat16())
    assert factors.item() == 1.0
    assert data.float().isnan().all()


def test_pages_and_no_tokens():
    pages = torch.randn(6, 16, 2, 8).bfloat16()
    _, factors = quantize_kv(pages, block=16)
    assert factors.shape == (6, 1, 2)
    data, factors = quantize_kv(pages[:, :0])
    assert data.shape == (6, 0, 2, 8)
    assert factors.shape == (6, 0, 2)


def test_inputs_of_any_strides_and_with_gradients():
    x = torch.randn(2, 3, 200, 8)
    expected = quantize_kv(x.transpose(1, 2).contiguous())
    for given_ in (x.transpose(1, 2), x.transpose(1, 2).requires_grad_()):
        data, factors = quantize_kv(given_)
        assert torch.equal(data.float(), expected[0].float())
        assert torch.equal(factors, expected[1])
        assert not factors.requires_grad


@pytest.mark.parametrize(
    ("kind", "start", "arguments"),
    [
        (TypeError, "x: got list", ([1.0],)),
        (TypeError, "x: got dtype torch.int8", (torch.zeros(1, 1, 8, dtype=torch.int8),)),
        (TypeError, "x: got dtype torch.float64", (torch.zeros(1, 1, 8, dtype=torch.float64),)),
        (ValueError, "x: got shape (4, 8)", (torch.zeros(4, 8),)),
        (TypeError, "block: got 1.5", (torch.zeros(1, 1, 8), 1.5)),
        (TypeError, "block: got True", (torch.zeros(1, 1, 8), True)),
        (ValueError, "block: got 0", (torch.zeros(1, 1, 8), 0)),
    ],
)
def test_refuses(kind, start, arguments):
    with pytest.raises(kind) as caught:
        quantize_kv(*arguments)
    assert str(caught.value).startswith(start)
    assert "takes" in str(caught.value)
