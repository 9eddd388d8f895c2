"""Every wrong argument of ``decode`` is refused before anything is compiled, by an error that names it."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import jit
from fa2_cute.decode import decode, prepare
from fa2_cute.decode_checks import takes

BATCH, LENGTH, KV_HEADS, HEADS, DIM = 2, 40, 2, 8, 64
STARTS = torch.tensor([0, 2, 5], dtype=torch.int32)
INT32 = torch.zeros(BATCH, dtype=torch.int32)


def call(**changes):
    arguments = {
        "q": torch.zeros(BATCH, 1, HEADS, DIM, dtype=torch.bfloat16),
        "k_cache": torch.zeros(BATCH, LENGTH, KV_HEADS, DIM, dtype=torch.bfloat16),
        "v_cache": torch.zeros(BATCH, LENGTH, KV_HEADS, DIM, dtype=torch.bfloat16),
        "cache_seqlens": INT32,
    }
    return decode(**arguments | changes)


def cache(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


WRONG = {
    "q": [
        (TypeError, {"q": None}, "NoneType"),
        (TypeError, {"q": cache(BATCH, 1, HEADS, DIM, dtype=torch.float32)}, "float32"),
        (ValueError, {"q": cache(BATCH, HEADS, DIM)}, "4 dimensions"),
        (ValueError, {"cu_seqlens_q": INT32}, "rows, heads, head_dim"),
        (ValueError, {"q": cache(BATCH, 1, HEADS, 12)}, "multiples of 8"),
        (ValueError, {"q": cache(BATCH, 1, HEADS, 264)}, "up to 256"),
        (ValueError, {"q": cache(BATCH, 1, DIM, HEADS).transpose(2, 3)}, "last stride"),
    ],
    "k_cache": [
        (TypeError, {"k_cache": 3}, "int"),
        (TypeError, {"k_cache": cache(BATCH, LENGTH, KV_HEADS, DIM, dtype=torch.float16)}, "float16"),
        (ValueError, {"k_cache": cache(BATCH, LENGTH, KV_HEADS, DIM).to("meta")}, "meta"),
        (ValueError, {"k_cache": cache(BATCH, LENGTH, KV_HEADS, 128)}, "head_dim 64"),
        (ValueError, {"k_cache": cache(BATCH, LENGTH, 3, DIM), "v_cache": cache(BATCH, LENGTH, 3, DIM)}, "divisor"),
        (ValueError, {"k_cache": cache(1, LENGTH, KV_HEADS, DIM), "v_cache": cache(1, LENGTH, KV_HEADS, DIM)}, "rows"),
        (ValueError, {"k_cache": cache(BATCH, LENGTH, KV_HEADS, DIM + 4)[..., :DIM]}, "16 bytes"),
        (ValueError, {"k_cache": cache(BATCH, LENGTH, DIM, KV_HEADS).transpose(2, 3)}, "last stride"),
    ],
    "v_cache": [
        (TypeError, {"v_cache": cache(BATCH, LENGTH, KV_HEADS, DIM, dtype=torch.uint8)}, "uint8"),
        (TypeError, {"v_cache": cache(BATCH, LENGTH, KV_HEADS, DIM).to(torch.float8_e5m2)}, "k_cache's"),
        (ValueError, {"v_cache": cache(BATCH, LENGTH + 1, KV_HEADS, DIM)}, "k_cache's"),
        (ValueError, {"v_cache": cache(BATCH, LENGTH, KV_HEADS, 12)}, "multiples of 8"),
    ],
    "cache_seqlens": [
        (TypeError, {"cache_seqlens": [1, 2]}, "list"),
        (TypeError, {"cache_seqlens": INT32.long()}, "int64"),
        (ValueError, {"cache_seqlens": INT32[:1]}, "batch=2"),
        (ValueError, {"cache_seqlens": INT32.to("meta")}, "meta"),
    ],
    "block_table": [
        (TypeError, {"block_table": INT32[:, None].long()}, "int64"),
        (ValueError, {"block_table": INT32}, "pages a sequence"),
        (ValueError, {"block_table": INT32[:1, None]}, "batch=2"),
    ],
    "cache_batch_idx": [
        (TypeError, {"cache_batch_idx": INT32.float()}, "float32"),
        (ValueError, {"cache_batch_idx": INT32[None]}, "batch=2"),
        (ValueError, {"cache_batch_idx": INT32, "block_table": INT32[:, None]}, "one of the two"),
    ],
    "cache_leftpad": [(TypeError, {"cache_leftpad": 1}, "int"), (ValueError, {"cache_leftpad": INT32[:1]}, "batch=2")],
    "softmax_scale": [
        (TypeError, {"softmax_scale": "1"}, "str"),
        (ValueError, {"softmax_scale": float("nan")}, "finite"),
    ],
    "window_size": [
        (TypeError, {"window": 3}, "pair"),
        (ValueError, {"window": (-1, 0)}, "0 or more"),
        (TypeError, {"window": (None, 0.5)}, "integers"),
    ],
    "softcap": [(ValueError, {"softcap": -1.0}, "positive"), (TypeError, {"softcap": None}, "real number")],
    "alibi_slopes": [
        (TypeError, {"alibi_slopes": torch.zeros(HEADS, dtype=torch.bfloat16)}, "bfloat16"),
        (ValueError, {"alibi_slopes": torch.zeros(HEADS + 1)}, "heads"),
    ],
    "learnable_sink": [
        (TypeError, {"sink": torch.zeros(HEADS, dtype=torch.int32)}, "int32"),
        (ValueError, {"sink": torch.zeros(1)}, "heads"),
    ],
    "k_descale": [(ValueError, {"k_descale": torch.ones(1)}, "float8 only")],
    "v_descale": [(TypeError, {"v_descale": 1.0}, "float")],
    "cu_seqlens_q": [
        (TypeError, {"q": cache(5, HEADS, DIM), "cu_seqlens_q": [0, 2, 5]}, "list"),
        (TypeError, {"q": cache(5, HEADS, DIM), "cu_seqlens_q": INT32.long()}, "int64"),
        (ValueError, {"q": cache(5, HEADS, DIM), "cu_seqlens_q": INT32[None]}, "batch . 1"),
        (ValueError, {"q": cache(5, HEADS, DIM), "cu_seqlens_q": torch.tensor([0, 5, 2]).int()}, "2 after 5 .index 2."),
    ],
    "max_seqlen_q": [
        (
            TypeError,
            {"q": cache(5, HEADS, DIM), "cu_seqlens_q": torch.tensor([0, 2, 5]).int(), "max_seqlen_q": 1.0},
            "",
        ),
    ],
    "num_splits": [
        (TypeError, {"num_splits": 1.0}, "integer"),
        (TypeError, {"num_splits": True}, "integer"),
        (ValueError, {"num_splits": -1}, "0 .chosen. to 256"),
        (ValueError, {"num_splits": 257}, "257"),
    ],
}


@pytest.mark.parametrize(
    ("name", "error", "changes", "says"),
    [(name, *wrong) for name, several in WRONG.items() for wrong in several],
)
def test_a_wrong_argument(name, error, changes, says):
    before = jit.kernels()
    with pytest.raises(error, match=f"^{name}: got .*{says}"):
        call(**changes)
    assert jit.kernels() == before


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=BATCH + 1, max_size=BATCH + 1))
def test_starts_are_refused_if_and_only_if_they_decrease(starts):
    """Whatever was chosen, and kept, for others of the same shape."""
    k = cache(BATCH, LENGTH, KV_HEADS, DIM)
    for numbers in (sorted(starts), starts):
        decreases = numbers != sorted(numbers)
        refusal = pytest.raises(ValueError, match=r"^cu_seqlens_q: got .*, takes numbers that do not decrease$")
        with refusal if decreases else contextlib.nullcontext():
            prepare(cache(5, HEADS, DIM), k, k, cu_seqlens_q=torch.tensor(numbers, dtype=torch.int32))


def test_float8_rows_of_half_vectors():
    q = cache(BATCH, 1, HEADS, 72)
    narrow = cache(BATCH, LENGTH, KV_HEADS, 72).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^q: got rows of 72, takes multiples of 16"):
        call(q=q, k_cache=narrow, v_cache=narrow)


def test_a_plan_takes_the_queries_that_it_was_made_for():
    k = cache(BATCH, LENGTH, KV_HEADS, DIM)
    plan = prepare(cache(BATCH, 1, HEADS, DIM), k, k)
    with pytest.raises(ValueError, match=r"^q: got .* takes what was prepared for"):
        plan.run(cache(BATCH, 2, HEADS, DIM), INT32)


def wide(*shape):
    """A shape of any size: strides of 0."""
    return cache(8).expand(*shape, 8)


def many(sequences, rows, heads):
    """Packed queries of ``heads`` heads on one KV head."""
    return {
        "q": wide(rows, heads),
        "k_cache": wide(1, 16, 1),
        "v_cache": wide(1, 16, 1),
        "cu_seqlens_q": torch.zeros(1, dtype=torch.int32).expand(sequences + 1),
        "block_table": torch.zeros(1, 1, dtype=torch.int32).expand(sequences, 1),
        "max_seqlen_q": 1,
    }


def test_rows_and_blocks_that_32_bits_do_not_count():
    with pytest.raises(ValueError, match=r"^q: got 8388608 rows of 256 heads in 2 sequences, takes fewer: 2147483648"):
        prepare(**many(2, 2**23, 256))
    with pytest.raises(ValueError, match=r"^q: got 1048576 rows of 256 heads in 120000000 sequences, takes fewer"):
        prepare(**many(120_000_000, 2**20, 256))
    assert prepare(**many(2, 2**22, 256)).spec.varlen
    keys = {"k_cache": wide(2**21, 16, 2**10), "v_cache": wide(2**21, 16, 2**10)}
    with pytest.raises(ValueError, match=r"^q: got 2097152 sequences, takes fewer with 1024 KV heads"):
        prepare(q=wide(2**21, 1, 2**10), **keys)
    assert prepare(q=wide(2**21 - 1, 1, 2**10), **keys).spec is not None


def test_splits_of_an_output_that_32_bits_do_not_address():
    given = {"q": wide(2**13, 2**8, 2**7), "k_cache": wide(2**13, 16, 2**7), "v_cache": wide(2**13, 16, 2**7)}
    with pytest.raises(ValueError, match=r"^num_splits: got 2, takes 0 or 1 for an output of 2\^31 elements or more"):
        prepare(**given, num_splits=2)
    assert prepare(**given).choice.splits == 1
    packed = many(2, 2**22, 2**7)
    packed |= {"k_cache": wide(8, 2**16, 1), "v_cache": wide(8, 2**16, 1)}
    assert prepare(**packed).choice.splits == 1


def test_a_negated_view_is_no_cache():
    k = cache(BATCH, LENGTH, KV_HEADS, DIM)
    call_with = {"q": cache(BATCH, 1, HEADS, DIM), "k_cache": k, "v_cache": k}
    prepare(**call_with)  # what is chosen for it must not be taken for the next
    for name in ("k_cache", "v_cache"):
        with pytest.raises(ValueError, match=f"^{name}: got a negated view"):
            prepare(**call_with | {name: torch._neg_view(k)})


def test_a_window_of_true_is_not_one_of_1():
    k = cache(BATCH, LENGTH, KV_HEADS, DIM)
    prepare(cache(BATCH, 1, HEADS, DIM), k, k, window=(1, 0))
    with pytest.raises(TypeError, match=r"^window_size: got \(True, 0\)"):
        prepare(cache(BATCH, 1, HEADS, DIM), k, k, window=(True, 0))


def test_takes_says_what_decode_refuses():
    """Of what the forward pass takes; each shape at its limit and past it."""

    def of(batch, query_len, heads, key_len, kv_heads):
        return wide(batch, query_len, heads), wide(batch, key_len, kv_heads), wide(batch, key_len, kv_heads)

    for shape in ((1, 1, 8, 2**30 - 2, 8), (2**21 - 1, 1, 2**10, 16, 2**10), (1, 2**12, 16, 16, 1)):
        assert takes(*of(*shape))
        prepare(*of(*shape))
    for shape in ((1, 1, 8, 2**30 - 1, 8), (2**21, 1, 2**10, 16, 2**10)):
        assert not takes(*of(*shape))
        with pytest.raises(ValueError, match="takes fewer"):
            prepare(*of(*shape))
    q, k, v = of(1, 1, 8, 16, 8)
    assert takes(q, k, v)
    assert not takes(q, torch._neg_view(k), v)
    far = [torch.empty_strided((2, 16, 1, 8), (n, 8, 8, 1), dtype=k.dtype, device="meta") for n in (2**35 - 8, 2**35)]
    assert takes(q, far[0], v)
    assert not takes(q, far[1], v)  # rows of the cache 64 GiB apart
    assert not takes(q, k, far[1])
