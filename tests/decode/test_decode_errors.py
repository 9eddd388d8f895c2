"""Every wrong argument of ``decode`` is refused before anything is compiled, by an error that names it."""

import pytest
import torch

from fa2_cute import jit
from fa2_cute.decode import decode, prepare

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
