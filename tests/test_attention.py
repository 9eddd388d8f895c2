"""Plain and causal calls on CPU tensors: sm_120a code in the emulator, against float64 within derived bounds."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import arch, emulation, flash_attn_func, forward, jit, reference
from fa2_cute.fuzz import Case, check
from fa2_cute.fuzz.cases import DTYPES
from fa2_cute.fuzz.judging import check_tensors, run
from fa2_cute.fuzz.layouts import LAYOUTS, far_apart
from fa2_cute.fuzz.strategies import TESTED, cases, tile_edges
from fa2_cute.fuzz.values import VALUES
from fa2_cute.reference import error, torch_error
from fa2_cute.spec import CAUSAL, FULL

#: The kernels without options; test_options.py and test_varlen.py have the others.
plain = st.sampled_from([kernel for kernel in TESTED if kernel.features in (FULL, CAUSAL)])
quiet = pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")


@given(cases(plain, values=st.just("normal")))
def test_matches_float64_on_normal_values(case):
    check(case)


@given(cases(plain))
def test_matches_float64_on_adversarial_values(case):
    check(case)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_kind_of_value(values, causal, dtype):
    check(Case(dtype, 1, 66, 130, 2, 1, 64, causal=causal, values=values))
    check(Case(dtype, 1, 70, 70, 2, 1, 64, causal=causal, values=values))
    check(Case(dtype, 1, 40, 330, 2, 1, 64, causal=causal, values=values))  # keys beyond those that are followed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    check(Case("bfloat16", 2, 33, 65, 4, 2, 64, causal=True, layouts=(layout, layout, layout)))
    check(Case("bfloat16", 1, 1, 1, 1, 1, 64, layouts=(layout, layout, layout)))


@pytest.mark.parametrize("heads", range(1, 18))
def test_every_small_number_of_heads(heads):
    """Blocks are given out in groups of heads; a group that is not full has idle ones."""
    check(Case("bfloat16", 2, 130, 70, heads, 1, 64, causal=True))
    check(Case("bfloat16", 1, 3, 5, heads, heads, 64))


@quiet
@pytest.mark.parametrize("batch", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "fields",
    [
        {"causal": True},
        {"head_dim": 8, "alibi": "of_each_sequence"},
        {"dtype": "float16", "head_dim": 96, "value_dim": 40, "sink": "normal", "mask": "some", "mask_layout": "full"},
    ],
    ids=["causal", "slopes", "mask"],
)
def test_batches_beyond_one_launch(monkeypatch, batch, fields):
    case = Case(**{"batch": batch, "query_len": 5, "key_len": 7, "heads": 2, **fields})
    *_, whole, whole_lse = run(case)
    monkeypatch.setattr(forward, "MAX_GRID_YZ", 2)
    *_, parts, parts_lse = run(case)
    assert torch.equal(parts, whole)
    assert torch.equal(parts_lse, whole_lse)


@quiet
def test_a_long_call_says_so_and_can_be_interrupted(monkeypatch, capsys):
    case = Case(query_len=200, key_len=70, heads=2)
    monkeypatch.setattr(emulation, "QUIET_SECONDS", 0.0)
    check(case)
    assert "emulating this call takes about" in capsys.readouterr().err

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(emulation.rich.progress.Progress, "update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(case)
    check(case)  # and leaves nothing behind


@quiet
def test_a_short_call_says_nothing(capfd):
    run(Case())
    capfd.readouterr()  # that a kernel is compiled is said
    run(Case(query_len=200, key_len=70, heads=2))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("key_len", tile_edges(130))
def test_key_lengths_at_tile_edges(key_len):
    check(Case("bfloat16", 1, 3, key_len, 1, 1, 64))


@pytest.mark.parametrize("query_len", tile_edges(130))
def test_query_lengths_at_tile_edges(query_len):
    check(Case("float16", 1, query_len, 5, 1, 1, 64, causal=True))


@pytest.mark.parametrize("offset", [-129, -128, -127, -65, -64, -63, -1, 0, 1, 63, 64, 65, 127, 128, 129])
def test_causal_offsets(offset):
    """Queries at the end of the keys (offset > 0) or before the first key (< 0: rows that see nothing)."""
    query_len = 140 if offset < 0 else 10
    check(Case("bfloat16", 1, query_len, query_len + offset, 1, 1, 64, causal=True))


# Around every threshold at which a softmax may change what it does: its slack, 16-bit and fp32 ranges.
JUMPS = (
    0.5,
    7.9,
    8.1,
    15,
    16,
    17,
    24,
    39,
    40,
    41,
    100,
    124,
    125,
    126,
    127,
    128,
    129,
    149,
    150,
    151,
    250,
    260,
    1000,
)


# Of bfloat16's 500 keys the last two tiles give references that are kept; 140 are followed to the end.
@pytest.mark.parametrize(
    ("dtype", "key_len", "position"),
    [(dtype, 140, position) for dtype in ("float16", "bfloat16") for position in (0, 62, 120, 132)]
    + [("bfloat16", 500, position) for position in (0, 62, 300, 490)],
)
@pytest.mark.parametrize("sign", [1, -1], ids=["up", "down"])
@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("size", [-1, 0, 1], ids=["small-v", "v", "large-v"])
def test_some_keys_stand_out_by_powers_of_two(dtype, key_len, position, sign, width, size):
    """Head i has the logit sign * JUMPS[i] (base 2) at ``width`` keys, wherever their tile, and 0 elsewhere.

    Heads, so that each jump has a block of its own: what one row makes a block do may save the others. Eight keys
    are spread over all lanes that share a row, so that only their sum may overflow; with small v a sum of
    probabilities may overflow where the output does not, with large v the other way round.
    """
    heights = torch.tensor(JUMPS)
    q, k = torch.zeros(1, 1, len(JUMPS), 64), torch.zeros(1, key_len, 1, 64)
    q[0, 0, :, 0] = sign * heights
    k[0, position : position + width, 0, 0] = 1.0
    v = torch.randn(1, key_len, 1, 64, generator=torch.Generator().manual_seed(position))
    v = v * (2.0**100 if dtype == "bfloat16" else 2.0**10) ** size
    check_tensors(*(x.to(DTYPES[dtype]) for x in (q, k, v)), softmax_scale=math.log(2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("key_len", "hidden"),
    [(140, range(*hidden)) for hidden in ((64,), (64, 128), (128, 140), (1, 140), (139,))]
    + [(500, range(*hidden)) for hidden in ((64, 400), (448, 500), (320, 500), (1, 500), (499,))],
)
def test_whole_tiles_of_keys_at_minus_infinity(dtype, key_len, hidden):
    """A tile in which no row sees anything leaves no trace, wherever it lies."""
    q, k, v = Case(dtype, query_len=70, key_len=key_len, heads=2).tensors()
    q = q.abs() + 0.125
    k[:, list(hidden), 0] = -math.inf
    check_tensors(q, k, v)


@quiet
def test_rows_without_a_key_give_exactly_zero_and_minus_infinity():
    _, _, _, out, lse = run(Case(query_len=70, key_len=4, heads=2, kv_heads=1, causal=True))
    assert (out[:, :66] == 0).all()
    assert (lse[:, :, :66] == -math.inf).all()
    assert lse[:, :, 66:].isfinite().all()


@quiet
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_single_key_is_returned_bit_for_bit(dtype):
    """One weight of exactly 1: the output is v itself, the logsumexp the logit."""
    q, k, v = (torch.randn(1, 1, 2, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    out, lse = flash_attn_func(q, k, v, return_softmax_lse=True)
    assert torch.equal(out, v)
    logit = (q.double() * k.double()).sum(-1).transpose(1, 2) * 64**-0.5
    torch.testing.assert_close(lse.double(), logit, rtol=2**-20, atol=2**-20)


@quiet
def test_logsumexp_of_equal_logits_is_their_value_plus_the_logarithm_of_their_number():
    q, k = torch.ones(1, 2, 1, 64, dtype=torch.float16), torch.ones(1, 100, 1, 64, dtype=torch.float16)
    _, lse = flash_attn_func(q, k, k, softmax_scale=0.25, return_softmax_lse=True)
    torch.testing.assert_close(lse.double(), torch.full((1, 1, 2), 16 + math.log(100)).double(), rtol=2**-22, atol=0)


@quiet
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_error_is_at_most_twice_that_of_torch(dtype, causal):
    q, k, v = Case(str(dtype).removeprefix("torch."), 1, 129, 193, 4, 2, 128).tensors()
    expected, _ = reference.attention(q, k, v, causal=causal)
    ours = error(flash_attn_func(q, k, v, causal=causal), expected)
    theirs = torch_error(q, k, v, expected, causal=causal)
    assert ours.max <= 2 * theirs.max
    assert ours.rms <= 2 * theirs.rms


@quiet
def test_repeats_bit_for_bit():
    q, k, v = Case(query_len=130, key_len=70, heads=2, kv_heads=1, causal=True, seed=3).tensors()
    assert torch.equal(flash_attn_func(q, k, v, causal=True), flash_attn_func(q, k, v, causal=True))


@quiet
def test_strides_do_not_change_a_bit():
    base = Case("bfloat16", 2, 40, 70, 4, 2, 64, causal=True, seed=5)
    expected = flash_attn_func(*base.tensors(), causal=True)
    for layout in LAYOUTS:
        if not layout.startswith("broadcast"):
            laid_out = Case("bfloat16", 2, 40, 70, 4, 2, 64, causal=True, seed=5, layouts=(layout,) * 3)
            assert torch.equal(flash_attn_func(*laid_out.tensors(), causal=True), expected), layout


@quiet
@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((0, 4, 2, 64), (0, 4, 2, 64)),  # batch
        ((2, 0, 2, 64), (2, 4, 2, 64)),  # query length
        ((2, 4, 0, 64), (2, 4, 0, 64)),  # heads and KV heads
        ((2, 4, 0, 64), (2, 4, 2, 64)),  # heads alone
        ((0, 0, 0, 64), (0, 0, 0, 64)),
    ],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nothing_to_compute_gives_empty_results(query, key, causal):
    q, k = torch.randn(query).half(), torch.randn(key).half()
    out, lse = flash_attn_func(q, k, k.clone(), causal=causal, return_softmax_lse=True)
    assert out.shape == query
    assert out.dtype == torch.float16
    assert lse.shape == (query[0], query[2], query[1])
    assert lse.dtype == torch.float32


@quiet
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_no_keys_give_zeros_and_minus_infinity(causal):
    q, k = torch.randn(2, 3, 4, 64).bfloat16(), torch.randn(2, 0, 2, 64).bfloat16()
    out, lse = flash_attn_func(q, k, k.clone(), causal=causal, return_softmax_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == (2, 4, 3)
    assert (lse == -math.inf).all()


@quiet
def test_new_lengths_batches_and_heads_compile_nothing():
    run(Case(query_len=5, key_len=9))
    before = jit.kernels()
    run(Case(batch=3, query_len=130, key_len=67, heads=6, kv_heads=3, layouts=("heads_first",) * 3, seed=1))
    assert jit.kernels() == before


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["batch", "length", "heads"])
def test_offsets_past_two_to_the_31_elements(argument, dimension):
    """A view whose last batch, row or head starts beyond 2^31 elements, in memory that is hardly touched."""
    shape = (2, 5, 2, 64)
    view = far_apart(torch.empty, shape, dimension, torch.float16)
    given = dict(zip("qkv", Case("float16", 2, 5, 5, 2, 2, 64).tensors(), strict=True))
    view.copy_(given[argument])
    check_tensors(**{**given, argument: view}, causal=True)


def test_the_first_cpu_call_says_once_that_it_is_emulated():
    """In a process of its own, with the default filters of a user's script."""
    script = (
        "import torch, fa2_cute\n"
        "q = torch.zeros(1, 1, 1, 64, dtype=torch.float16)\n"
        "for _ in range(3):\n"
        "    fa2_cute.flash_attn_func(q, q, q)\n"
        "fa2_cute.flash_attn_func(q, q, q, causal=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == ""
    assert result.stderr.count("EmulationNotice") == 1, result.stderr


@quiet
def test_what_is_returned():
    """As flash-attn's callers unpack it."""
    q = torch.randn(1, 3, 2, 64).half()
    out = flash_attn_func(q, q, q)
    with_lse = flash_attn_func(q, q, q, return_softmax_lse=True)
    with_probs = flash_attn_func(q, q, q, return_attn_probs=True)
    assert len(with_lse) == 2
    assert len(with_probs) == 3
    assert torch.equal(out, with_lse[0])
    assert torch.equal(out, with_probs[0])
    assert torch.equal(with_lse[1], with_probs[1])
    assert with_probs[2] is None


@quiet
@pytest.mark.parametrize("window", [(-1, 0), (None, 0), [-1, 0]], ids=str)
def test_the_causal_window_is_causal(window):
    q, k, v = (torch.randn(1, n, 2, 64).half() for n in (70, 90, 90))
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v, causal=True))


@quiet
@pytest.mark.parametrize("key_len", [140, 500])
def test_a_sum_whose_reciprocal_would_be_flushed(key_len):
    """The first tile is 2^123.5 below the last: the row sum lies in [2^126, 2^127), its reciprocal below 2^-126."""
    q = torch.zeros(1, 140, 8, 64, dtype=torch.bfloat16)
    q[..., 0] = 123.5
    k = torch.zeros(1, key_len, 8, 64, dtype=torch.bfloat16)
    k[:, :8, :, 0] = 1
    out = flash_attn_func(q, k, torch.ones_like(k), softmax_scale=math.log(2))
    assert torch.equal(out, torch.ones_like(out))


@quiet
@pytest.mark.parametrize("key", [3, 69], ids=["inside", "last"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_value_that_is_not_finite(dtype, value, key):
    """It reaches its own column, as float64 has it, and no copy of it stands in for keys past the end."""
    q, k, v = (torch.randn(1, 70, 2, 64).to(dtype) for _ in range(3))
    v[0, key, 0, 5] = value
    out = flash_attn_func(q, k, v).double()
    expected, _ = reference.attention(q, k, v)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())


@quiet
@pytest.mark.parametrize("scale", [0.0, 1e-45, -1e-40, 1e-38, 2e-31, -1e-30])
def test_a_tiny_scale_with_scores_near_the_top_of_float32(scale):
    """Scores up to 1e38: their product with the scale decides, not the smallest scale that a register could hold."""
    q = torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16)
    q[..., 0] = 1e19
    k = torch.zeros(1, 200, 1, 64, dtype=torch.bfloat16)
    k[0, :, 0, 0] = torch.linspace(-1, 1, 200) * 1e19
    v = torch.randn_like(k)
    check_tensors(q, k, v, softmax_scale=scale, causal=False)


@quiet
def test_a_lazily_negated_view():
    q, k, v = (torch.randn(1, 5, 2, 64).half() for _ in range(3))
    assert torch.equal(flash_attn_func(torch._neg_view(-q), k, v), flash_attn_func(q, k, v))


@quiet
def test_torch_compile_breaks_its_graph_here():
    """It neither unrolls the emulator nor changes a number."""
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (5, 70, 70))
    compiled = torch.compile(lambda q, k, v: 2 * flash_attn_func(q, k, v), backend="eager")
    assert torch.equal(compiled(q, k, v), 2 * flash_attn_func(q, k, v))


@quiet
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_healthy_numbers_are_computed_once(dtype, causal):
    """A second pass over the keys would be right, and hide what is wrong with the first."""
    q, k, v = (torch.randn(1, 256, 1, 64).to(dtype) for _ in range(3))
    _, _, call = forward.prepare(q, k, v, window=(None, 0 if causal else None))
    kernel = jit.compiled(call.spec(arch.TARGET), arch.TARGET)
    stats = emulation.run(kernel, call.grid(kernel.spec), call.values())
    spec = kernel.spec
    rows = spec.rows_a_warp  # a warp skips tiles of which its rows see nothing
    tiles = sum(-(-((row + rows) if causal else 256) // spec.tile_n) for row in range(0, 256, rows))
    assert stats.mma == tiles * 2 * rows * spec.tile_n * spec.head_dim // (16 * 8 * 16)
