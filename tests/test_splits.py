"""The forward kernel in splits of the keys: right within derived bounds, even shares, the same bits again."""

import math
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from probes import Probe, compiled

from fa2_cute import arch, emulation, forward, jit, split_calls, splitting
from fa2_cute.decode_spec import MAX_SPLITS
from fa2_cute.fuzz import Case, check
from fa2_cute.fuzz.judging import call, check_tensors
from fa2_cute.fuzz.masks import HIDING_MASKS, MASK_LAYOUTS, MASKS
from fa2_cute.fuzz.per_head import SINKS
from fa2_cute.fuzz.strategies import PLAIN, TESTED, lengths, numbers_of_splits, split_cases
from fa2_cute.spec import FEWER_REFERENCED, FULL, REFERENCED_KEYS, Features, ForwardSpec

KERNELS = st.sampled_from([*PLAIN, *(kernel for kernel in TESTED[len(PLAIN) :] if not kernel.has("varlen"))])


@given(split_cases(KERNELS))
@example(  # logits of the lowest finite float, which base 2 does not hold
    Case(head_dim=32, query_len=3, key_len=70, window=(100, None), mask="lowest", mask_dtype="float32", splits=2)
)
@example(Case(query_len=83, key_len=83, softmax_scale=1e30, splits=2, values="huge_octets"))  # logits past float32
def test_matches_float64_within_derived_bounds(case):
    check(case)


@given(split_cases(st.sampled_from(PLAIN)))
def test_plain_kernels_match_float64(case):
    check(case)


# ---- shares ----------------------------------------------------------------------------------------------------------

TILE_M, TILE_N = 128, 64


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@given(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 16))
@example(128, 2048, 3)  # as if each were a row of some 700 keys
@settings(max_examples=40)
def test_shares_cover_the_keys_and_take_references_as_whole_rows_do(causal, query_len, key_len, splits):
    found = torch.full((splits, 5), -1, dtype=torch.int32)
    probe = Probe("share_kernel", "Shares", (TILE_M, TILE_N, causal), 5, ("query_len", "key_len"))
    emulation.run(compiled(probe), (splits, 1, 1), (found, query_len, key_len))
    start = 0
    for key_start, length, own, referenced, tiles in found.tolist():
        assert (key_start, length) == (start * TILE_N, key_len - start * TILE_N)
        assert own in (tiles // splits, -(-tiles // splits))
        assert 0 <= referenced < max(own, 1)
        if own and not causal:
            keys = min(own * TILE_N, length)
            wanted = max(REFERENCED_KEYS - own * TILE_N // FEWER_REFERENCED, 1)
            assert keys - referenced * TILE_N >= min(wanted, keys)  # enough keys,
            assert keys - (referenced + 1) * TILE_N < wanted  # and not a tile more
        start += own
    assert start == tiles


def parts(q, k, v, splits, **options):
    """(partial_state, spec): what the blocks leave for the combination, as (splits, batch, query, head, 2)."""
    problem, options, inputs = forward.check(q, k, v, **options)
    planned = split_calls.split_forward(problem, options, inputs, splits)
    planned.run()
    attending, _ = planned.launches
    state = attending.values[4]
    return state.reshape(splits, problem.batch, problem.query_len, problem.heads, 2), attending.spec


def zeros(query_len, key_len, dtype=torch.bfloat16):
    """q, k, v that make every logit 0: the sum of a part is then the number of its keys."""
    return tuple(torch.zeros(1, length, 1, 64, dtype=dtype) for length in (query_len, key_len, key_len))


@given(lengths(140), lengths(1500), numbers_of_splits, st.sampled_from([None, 0, 7, -3]))
@settings(max_examples=settings().max_examples // 2)
def test_shares_are_even_and_hold_every_key_once(query_len, key_len, splits, right):
    """Tiles of keys; shares without any say so."""
    state, spec = parts(*zeros(query_len, key_len), splits, window=(None, right))
    held = state[..., 1].sum(dim=0)[0, :, 0]
    offset = key_len - query_len
    for row in range(query_len):
        seen = key_len if right is None else min(max(row + offset + right + 1, 0), key_len)
        assert held[row] == seen
    for first in range(0, query_len, spec.tile_m):
        # The tile's last row sees the most: keys of all tiles that its block walks over, the last of them in part.
        last = min(first + spec.tile_m, query_len) - 1
        keys = state[:, 0, last, 0, 1]
        tiles = (keys / spec.tile_n).ceil()
        assert tiles.max() - tiles.min() <= 1
        assert tiles.sum() == math.ceil(held[last] / spec.tile_n)
        references = state[:, 0, last, 0, 0]
        assert ((references == 0.0) == (keys > 0)).all()
        assert ((references == -math.inf) == (keys == 0)).all()


@given(
    lengths(140), lengths(700), numbers_of_splits, st.integers(0, 300), st.integers(0, 100),
    st.sampled_from([torch.bfloat16, torch.float16]),
)  # fmt: skip
@settings(max_examples=settings().max_examples // 2)
@example(140, 500, 9, 300, 20, torch.float16)  # shares of a tile, of which some rows see nothing and others all
def test_shares_of_a_window_hold_every_key_once(query_len, key_len, splits, left, right, dtype):
    state, _ = parts(*zeros(query_len, key_len, dtype), splits, window=(left, right))
    held = state[..., 1].sum(dim=0)[0, :, 0]
    offset = key_len - query_len
    for row in range(query_len):
        first, end = max(row + offset - left, 0), min(max(row + offset + right + 1, 0), key_len)
        assert held[row] == max(end - first, 0)


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("right", [None, 0, 100])
def test_no_share_is_computed_twice(right, splits):
    """Each takes references of its own, whichever tiles it has: else its check at the end would fail."""
    q, k, v = Case(query_len=140, key_len=1700, seed=4).tensors()

    def products(call):
        spec = call.launches[0].spec
        kernel = jit.compiled(spec, arch.TARGET)
        return emulation.run(kernel, call.launches[0].grid, call.launches[0].values).mma

    problem, options, inputs = forward.check(q, k, v, window=(None, right))
    one, several = (split_calls.split_forward(problem, options, inputs, n) for n in (1, splits))
    assert products(several) == products(one)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"causal": True}, {"dtype": "float16"}, {"window": (70, None), "causal": True}])
def test_one_split_gives_the_bits_of_the_whole(fields):
    """One part is what the kernel would have finished itself."""
    if "window" in fields:
        fields = fields | {"sink": "normal"}
    case = Case(batch=2, query_len=140, key_len=400, heads=4, kv_heads=2, **fields)
    whole = call(*case.tensors(), **case.options)
    assert all(torch.equal(a, b) for a, b in zip(call(*case.tensors(), splits=1, **case.options), whole, strict=True))


@pytest.mark.parametrize("splits", [2, 5, 9])
def test_the_same_splits_give_the_same_bits_whatever_else_is_in_the_batch(splits):
    case = Case(batch=3, query_len=70, key_len=500, heads=4, kv_heads=2, causal=True)
    q, k, v = case.tensors()
    out, lse = call(q, k, v, causal=True, splits=splits)
    again = call(q, k, v, causal=True, splits=splits)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    for b in range(3):
        alone = call(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True, splits=splits)
        assert torch.equal(alone[0][0], out[b])
        assert torch.equal(alone[1][0], lse[b])


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [2, 5, 20])
@pytest.mark.parametrize("sink", SINKS)
def test_every_kind_of_sink(sink, splits):
    """Added once, not in every part; with a window that leaves rows empty."""
    fields = {"query_len": 90, "key_len": 60, "heads": 7, "causal": True, "window": (30, None)}
    check(Case(sink=sink, splits=splits, **fields))


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("mask_dtype", ["bool", "same", "float32"])
def test_every_kind_of_mask(mask_dtype, splits):
    """Read from a share's first key on; with a sink, which tells whether logits are right, not their differences."""
    for seed, mask in enumerate(HIDING_MASKS if mask_dtype == "bool" else MASKS):
        layout = MASK_LAYOUTS[seed % len(MASK_LAYOUTS)]
        fields = {"query_len": 30, "key_len": 200, "heads": 2, "kv_heads": 1, "sink": "normal"}
        check(Case(mask=mask, mask_dtype=mask_dtype, mask_layout=layout, seed=seed, splits=splits, **fields))


@pytest.mark.parametrize("alibi", ["ladder", "of_both_signs"])
@pytest.mark.parametrize("causal", [False, True])
def test_slopes_count_from_the_end_of_the_sequence(causal, alibi):
    check(Case(query_len=90, key_len=600, heads=4, head_dim=8, causal=causal, alibi=alibi, splits=3, sink="normal"))


@pytest.mark.parametrize("splits", [2, 3, 40])
@pytest.mark.parametrize(
    "values",
    ["late_jumps", "rising_logits", "one_huge_logit", "large_logits", "minus_infinite_keys", "minus_infinite_tiles",
     "nan_keys", "single_weights"],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_values_at_which_references_fail(values, causal, splits):
    """In shares that keep their first reference (of more than 240 keys) and in shares that do not."""
    check(Case(query_len=70, key_len=1000, heads=2, causal=causal, values=values, splits=splits))


@pytest.mark.parametrize("splits", [8, 64, 256])
def test_sums_that_would_overflow_together(splits):
    """In each share the last tile's logits are 0, from which references come, and all others 116 powers of two higher:
    sums of 2^124 each, which together would be more than float32 holds."""
    share = 5 * 64
    q = torch.zeros(1, 3, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, splits * share, 1, 64, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    k[..., 0] = 80.5  # * log2(e)
    k.view(1, splits, share, 1, 64)[:, :, -64:] = 0.0
    v = torch.rand(1, splits * share, 1, 64).to(torch.bfloat16)
    check_tensors(q, k, v, softmax_scale=1.0, splits=splits)


@pytest.mark.parametrize(("splits", "sink"), [(1, 87.5), (2, None), (2, 87.5)])
def test_what_a_vanishing_weight_would_take_with_it(splits, sink):
    """A share's references are 109 powers of two below its highest scores, and 126 below what it is weighed against: a
    sink, or the other share's highest score, whose value is 0."""
    q = torch.zeros(1, 3, 1, 64, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 1280, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    q[..., 0] = 1.0
    k[0, :256, 0, 0], v[0, :256] = 75.5, 1.0
    k[0, 640:, 0, 0] = -100.0
    k[0, -1, 0, 0] = 87.5 if sink is None else -100.0
    extra = {} if sink is None else {"sink": torch.tensor([sink])}
    check_tensors(q, k, v, softmax_scale=1.0, splits=splits, **extra)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [0, -1, MAX_SPLITS + 1])
def test_numbers_of_splits_that_there_are_not(splits):
    with pytest.raises(ValueError, match=rf"^splits: got {splits}, takes 1 to {MAX_SPLITS}$"):
        split_calls.attend(*zeros(3, 5), splits=splits)


@pytest.mark.parametrize("splits", ["2", 2.0, None, True, torch.tensor(2)], ids=repr)
def test_what_is_no_number_of_splits(splits):
    with pytest.raises(TypeError, match=rf"^splits: got {re.escape(repr(splits))}, takes an integer$"):
        split_calls.attend(*zeros(3, 5), splits=splits)


def test_packed_and_empty_calls_have_no_splits():
    q, k, v = zeros(3, 5)
    lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    packed = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
    with pytest.raises(ValueError, match=r"^splits: got 2 with an output of .*, packed, takes"):
        split_calls.attend(q[0], k[0], v[0], splits=2, **packed)
    for empty in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0]), (q[:0], k[:0], v[:0])):
        with pytest.raises(ValueError, match=r"^splits: got 2 with an output of .* neither empty nor packed"):
            split_calls.attend(*empty, splits=2)


@pytest.mark.parametrize("features", [Features(varlen=True), Features(sink=True)])
def test_a_split_specification_is_neither_packed_nor_has_a_sink(features):
    with pytest.raises(ValueError, match=r"^split: got True with varlen or a sink"):
        ForwardSpec("bfloat16", 64, 64, features, 128, 64, 4, 2, split=True)


def test_what_splits_is_told_apart_from_what_does_not():
    whole = ForwardSpec("bfloat16", 64, 64, Features(sink=True), 128, 64, 4, 2)
    split = splitting.split_spec(whole)
    assert split == ForwardSpec("bfloat16", 64, 64, FULL, 128, 64, 4, 2, split=True)
    assert split.title.endswith(", split")
    for spec, names in ((split, ["partial_out", "partial_state"]), (whole, ["out", "lse"])):
        assert [p.name for p in spec.parameters() if getattr(p, "written", False)] == names
    assert split.grid(3, 4, 1000, 5) == (8 * 5 * 4 * 2, 1, 2)  # two of three sequences side by side
    assert whole.grid(3, 4, 1000) == (8 * 4 * 2, 1, 2)
    assert splitting.combining(whole, 8, True) != splitting.combining(whole, 9, True)
    assert splitting.combining(whole, 8, True).sink
