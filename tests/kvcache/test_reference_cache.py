"""The judge of the cache, judged by other formulas: complex numbers, a concatenation, a plain attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcases import SETTINGS, Case, cases, make

from fa2_cute import reference, reference_cache
from fa2_cute.quantize import dequantize_kv, quantize_kv
from fa2_cute.reference_cache import Cache


@given(st.integers(1, 5), st.sampled_from([16, 32, 64]), st.booleans(), st.integers(0, 99))
def test_a_rotation_is_a_product_of_complex_numbers(tokens, rotary_dim, interleaved, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, 2, 72), generator=generator, dtype=torch.float64)
    angles = torch.rand((9, rotary_dim // 2), generator=generator, dtype=torch.float64) * 6
    positions = torch.randint(0, 9, (tokens,), generator=generator)
    got = reference_cache.rotated(x, angles.cos(), angles.sin(), positions, interleaved=interleaved)
    turned = x[..., :rotary_dim]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles[positions]), angles[positions]
    ).unsqueeze(1)
    pairs = torch.view_as_real(product)
    expected = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(got[..., :rotary_dim], expected)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_positions_only_count_by_their_differences():
    """What rotary embeddings are for: q at m times k at n depends on m - n (Su et al. 2021, equation 12)."""
    frequencies = 10_000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    angles = torch.arange(40, dtype=torch.float64)[:, None] * frequencies
    q, k = torch.randn(1, 1, 16).double(), torch.randn(1, 1, 16).double()

    def product(m, n):
        turn = {"interleaved": True}
        at_m = reference_cache.rotated(q, angles.cos(), angles.sin(), torch.tensor([m]), **turn)
        at_n = reference_cache.rotated(k, angles.cos(), angles.sin(), torch.tensor([n]), **turn)
        return (at_m * at_n).sum()

    torch.testing.assert_close(product(5, 2), product(39, 36))


@given(cases())
def test_a_slot_is_written_once_and_in_order(case):
    t = make(case)
    keys, values, written = reference_cache.appended(t.cache, t.k, t.v, t.seqlens)
    after = reference_cache.lengths_after(t.cache, t.seqlens, case.new_len)
    assert torch.equal(written, ~keys.isnan().any(dim=(2, 3)))
    assert torch.equal(written, ~values.isnan().any(dim=(2, 3)))
    slots = {}
    for b in range(case.batch):
        for position in range(int(t.seqlens[b].clamp(0, case.capacity)), int(after[b])):
            slot = t.cache.slot(b, position)
            if slot is not None:
                assert slots.setdefault(slot, (b, position)) == (b, position)
    assert set(map(tuple, written.nonzero().tolist())) == set(slots)


def test_attention_over_pages_is_attention_over_their_concatenation():
    k, v = torch.randn(1, 11, 2, 16), torch.randn(1, 11, 2, 24)
    q = torch.randn(1, 3, 4, 16)
    table = torch.tensor([[3, 0, 2, -1]], dtype=torch.int32)
    pages_k, pages_v = torch.full((5, 4, 2, 16), torch.nan), torch.full((5, 4, 2, 24), torch.nan)
    for position in range(11):
        page = table[0, position // 4]
        pages_k[page, position % 4], pages_v[page, position % 4] = k[0, position], v[0, position]
    expected = reference.attention(q, k, v, causal=True)
    got = reference_cache.attention(q, Cache(pages_k, pages_v, table), torch.tensor([11]), causal=True)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("leftpad", [0, 3, 9, 20])
def test_left_padding_hides_and_moves_nothing(leftpad):
    k, v, q = torch.randn(1, 9, 1, 16), torch.randn(1, 9, 1, 16), torch.randn(1, 2, 1, 16)
    hidden = torch.arange(9) >= leftpad
    expected = reference.attention(q, k, v, window=(4, 0), mask=hidden[None, None, None, :])
    lengths = torch.tensor([9])
    pad = torch.tensor([leftpad])
    got = reference_cache.attention(q, Cache(k, v), lengths, cache_leftpad=pad, window=(4, 0))
    torch.testing.assert_close(got, expected)


def test_the_descales_of_blocks_are_those_of_quantize_kv():
    k, v, q = torch.randn(2, 300, 2, 16), torch.randn(2, 300, 2, 16), torch.randn(2, 1, 2, 16)
    (k8, k_factors), (v8, v_factors) = quantize_kv(k), quantize_kv(v)
    cache = Cache(k8, v8, k_descale=k_factors, v_descale=v_factors)
    got = reference_cache.attention(q, cache, torch.tensor([300, 300]))
    plain = (dequantize_kv(k8, k_factors).double(), dequantize_kv(v8, v_factors).double())
    expected = reference.attention(q, *plain)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_a_page_that_is_missing_is_as_if_hidden():
    case = Case(SETTINGS[2], (14,), new_len=0, length=4, width=4, kv_heads=1)
    t = make(case)
    t.cache.block_table[0, 1] = -1
    out, _ = reference_cache.attention(t.q, t.cache, t.seqlens)
    exist = torch.arange(14) // 4 != 1
    full = make(case).cache.gather(0, range(14))
    expected, _ = reference.attention(t.q, full[0][None], full[1][None], mask=exist[None, None, None, :])
    torch.testing.assert_close(out, expected)
