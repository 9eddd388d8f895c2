"""Every option of ``attend``, alone and together, in the emulator against float64 within derived bounds.

Calls run kernels that ``strategies.TESTED`` lists, so that few have to be compiled.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa2_cute import reference
from fa2_cute.forward import attend
from fa2_cute.fuzz import Case, check
from fa2_cute.fuzz.judging import call, check_tensors, run
from fa2_cute.fuzz.masks import HIDING_MASKS, MASK_LAYOUTS, MASKS
from fa2_cute.fuzz.per_head import SINKS, SLOPES
from fa2_cute.fuzz.strategies import TESTED, caches, cases, tile_edges
from fa2_cute.fuzz.values import VALUES
from fa2_cute.spec import CAUSAL, FULL

quiet = pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")
half = settings(max_examples=settings().max_examples // 2)  # of the profile's

# Kernels by what they are used for here; an option that is on but unwanted is set to what changes nothing.
WINDOW = {"head_dim": 64, "sink": "absent"}
ALIBI = {"head_dim": 8}
CAPPED = {"dtype": "float16", "head_dim": 80, "causal": True, "alibi": "tiny"}
BOOL = {"dtype": "float16", "head_dim": 96, "value_dim": 40, "sink": "absent"}
FLOAT32 = {"head_dim": 32, "window": (2**40, None), "mask_dtype": "float32"}
FLOAT16 = {"dtype": "float16", "causal": True, "softcap": 1e30, "mask_dtype": "same"}
EVERYTHING = {"head_dim": 48, "value_dim": 160, "softcap": 20.0, "alibi": "ladder", "mask_dtype": "same"}
OPTIONS = st.sampled_from(
    [kernel for kernel in TESTED if kernel.features not in (FULL, CAUSAL) and not kernel.has("varlen")]
)


@given(cases(OPTIONS, values=st.just("normal")))
@half
def test_matches_float64_on_normal_values(case):
    check(case)


@given(cases(OPTIONS))
@example(  # softmax_scale / softcap vanishes in float32, and 0 times -inf would be NaN
    Case(dtype="float16", head_dim=80, causal=True, softmax_scale=1e-40, softcap=1e30, values="minus_infinite_keys")
)
def test_matches_float64_on_adversarial_values(case):
    check(case)


@given(cases(st.sampled_from([kernel for kernel in TESTED[:7] if kernel.head_dim == 64]), dense=caches()))
@half
def test_matches_float64_on_long_caches(case):
    """Few queries and many keys: these go to the kernels that split the keys."""
    check(case)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 192), (40, 136)])
def test_widths_of_long_caches(head_dim, value_dim):
    """Values wider than what one warp takes, which are no power of two."""
    check(Case(query_len=2, key_len=1030, heads=4, kv_heads=2, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("fields", [WINDOW | {"window": (40, None)}, BOOL | {"mask": "few"}], ids=["window", "mask"])
@pytest.mark.parametrize("values", [values for values in VALUES if values != "values_not_finite"])
def test_every_kind_of_value(values, fields):
    causal = "mask" not in fields
    check(Case(query_len=70, key_len=130, heads=2, causal=causal, values=values, **{**fields, "sink": "mixed"}))


# ---- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 2**31 - 1, 2**40])
@pytest.mark.parametrize("offset", [-60, 65])
def test_left_sides_at_tile_edges(left, offset):
    check(Case(query_len=140, key_len=140 + offset, causal=True, **{**WINDOW, "window": (left, None)}))


@pytest.mark.parametrize("right", [-129, -128, -65, -64, -1, 0, 1, 63, 64, 65, 127, 128, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("left", [0, 70])
def test_right_sides_at_tile_edges(left, right):
    """A right side below the negative left one leaves every row empty."""
    check(Case(query_len=140, key_len=150, **{**WINDOW, "window": (left, right)}))


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (1, 200), (200, 1), (129, 64), (64, 129), (130, 260)])
def test_a_window_of_the_diagonal_alone_gives_the_value_there(query_len, key_len):
    _, _, v, out, _ = run(Case(query_len=query_len, key_len=key_len, **{**WINDOW, "window": (0, 0)}))
    expected = torch.zeros_like(out)
    common = min(query_len, key_len)
    expected[:, query_len - common :] = v[:, key_len - common :]
    assert torch.equal(out, expected)


@quiet
def test_rows_that_a_window_leaves_empty_give_exactly_zero_and_minus_infinity():
    _, _, _, out, lse = run(Case(query_len=150, key_len=20, heads=2, causal=True, **{**WINDOW, "window": (5, None)}))
    assert (out[:, :130] == 0).all()
    assert (lse[:, :, :130] == -math.inf).all()
    assert lse[:, :, 130:].isfinite().all()


@pytest.mark.parametrize("key", [0, 3, 63, 64, 100])
def test_a_window_reads_nothing_of_a_key_it_hides_from_every_row(key):
    """NaN in tiles that are skipped, and in keys of tiles that are not: values there must not be NaN, but keys may."""
    q, k, v = Case(query_len=10, key_len=140).tensors()
    k[:, key] = math.nan
    check_tensors(q, k, v, window=(20, 0), sink=torch.full((1,), -math.inf))


@pytest.mark.parametrize(("query_len", "key_len"), [(70, 140), (140, 70), (128, 64), (1, 65)])
def test_the_top_left_causal_of_torch(query_len, key_len):
    """As torch's own attention has it with ``is_causal``: query i sees keys up to i."""
    q, k, v = Case(query_len=query_len, key_len=key_len, heads=2).tensors()
    window = (None, query_len - key_len)
    check_tensors(q, k, v, window=window)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    expected, _ = reference.attention(q, k, v, window=window)
    torch.testing.assert_close(theirs.transpose(1, 2).double(), expected, rtol=2**-7, atol=2**-7)


# ---- softcap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [50.0, 30.0, 1.0, 0.25, 2.0**-126, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize(
    "values", ["normal", "zeros", "large_logits", "one_huge_logit", "minus_infinite_keys", "nan_keys"]
)
def test_softcaps_from_end_to_end(softcap, values):
    check(Case(query_len=70, key_len=70, softcap=softcap, values=values, **CAPPED))


@pytest.mark.parametrize("scale", [1e30, 1e-40, -1e-40, 0.0, -0.125])
@pytest.mark.parametrize("softcap", [1.0, 1e-30, 1e30])
def test_softcaps_of_every_scale(softcap, scale):
    check(Case(query_len=70, key_len=70, softcap=softcap, softmax_scale=scale, **CAPPED))


@pytest.mark.parametrize("height", [0.01, 0.2, 0.249, 0.251, 0.5, 1.0, 3.0, 9.0, 40.0, 87.0, 89.0, 1e4])
def test_a_softcap_is_a_hyperbolic_tangent(height):
    """One key of logit y and one of 0: the logsumexp tells the capped logit, relatively as exact as float32 has it."""
    q, k = torch.zeros(1, 2, 2, 80, dtype=torch.float16), torch.zeros(1, 2, 1, 80, dtype=torch.float16)
    q[..., 0] = torch.tensor([1.0, -1.0]).half()
    k[:, 0, :, 0] = 1.0
    slopes = torch.zeros(2)
    _, lse = call(q, k, k, softmax_scale=height, softcap=1.0, alibi_slopes=slopes, window=(None, -1))
    expected = math.tanh(height)
    torch.testing.assert_close(lse[0, :, 1].double(), torch.tensor([expected, -expected]).double(), rtol=2**-19, atol=0)


# ---- ALiBi -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alibi", SLOPES)
@pytest.mark.parametrize(("query_len", "key_len"), [(5, 200), (150, 20)])
def test_every_kind_of_slope(alibi, query_len, key_len):
    check(Case(batch=2, query_len=query_len, key_len=key_len, heads=6, kv_heads=2, alibi=alibi, **ALIBI))


@pytest.mark.parametrize("values", ["large_logits", "late_jumps", "rising_logits", "minus_infinite_tiles", "denormal"])
@pytest.mark.parametrize("alibi", ["steep", "enormous", "of_both_signs"])
def test_slopes_beside_adversarial_values(alibi, values):
    check(Case(query_len=70, key_len=140, heads=3, alibi=alibi, values=values, **ALIBI))


@quiet
def test_a_slope_of_zero_changes_no_bit():
    q, k, v = Case(batch=2, query_len=70, key_len=90, heads=2, head_dim=8).tensors()
    slopes = torch.zeros(2)
    with_slopes = attend(q, k, v, alibi_slopes=slopes)
    as_batch = attend(q, k, v, alibi_slopes=slopes.expand(2, 2))
    assert torch.equal(with_slopes[0], as_batch[0])
    assert torch.equal(with_slopes[1], as_batch[1])


# ---- sinks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize(("query_len", "key_len"), [(5, 200), (150, 20), (3, 0)])
def test_every_kind_of_sink(sink, query_len, key_len):
    """With a window that leaves rows empty where there are more queries than keys."""
    fields = {**WINDOW, "sink": sink, "window": (30, None)}
    check(Case(batch=2, query_len=query_len, key_len=key_len, heads=7, kv_heads=1, causal=True, **fields))


@pytest.mark.parametrize(
    "height", [-200.0, -127.0, -126.0, -24.0, -8.1, 0.0, 7.9, 8.1, 100.0, 122.5, 124.0, 126.5, 128.0, 250.0]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sink_stands_out_by_powers_of_two(dtype, height):
    """Keys at a logit of 0, the sink at ``height`` in base 2: sums that only the sink makes overflow, or vanish."""
    fields = BOOL if dtype == "float16" else WINDOW
    q, k, v = Case(
        dtype, query_len=5, key_len=140, head_dim=fields["head_dim"], value_dim=fields.get("value_dim")
    ).tensors()
    sink = torch.full((1,), height * math.log(2))
    extra = {"mask": torch.ones(5, 140, dtype=torch.bool)} if dtype == "float16" else {"window": (500, 500)}
    check_tensors(torch.zeros_like(q), k, v, sink=sink, **extra)
    check_tensors(q * 30, k, v, sink=sink, **extra)


def test_a_sink_that_a_reference_is_far_below():
    """References come from logits of 0; others are 115 powers of two higher, and the sink 126: what it leaves of the
    row is a product of a large sum and a weight that vanishes."""
    q = torch.zeros(1, 3, 1, 64, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 640, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    q[..., 0] = 1.0
    k[0, :390, 0, 0], v[0, :390] = 79.5, 1.0
    check_tensors(q, k, v, softmax_scale=1.0, sink=torch.tensor([87.5]))


def test_a_sink_beside_logits_past_float32():
    check(Case(key_len=1023, softmax_scale=1e30, sink="normal", values="huge_octets"))


# ---- masks -----------------------------------------------------------------------------------------------------------

KINDS_OF_MASK = [
    *(pytest.param(BOOL, mask, id=f"bool-{mask}") for mask in HIDING_MASKS),
    *(pytest.param(FLOAT32, mask, id=f"float32-{mask}") for mask in MASKS),
    *(pytest.param(FLOAT16, mask, id=f"float16-{mask}") for mask in MASKS),
    *(pytest.param(EVERYTHING, mask, id=f"bfloat16-{mask}") for mask in MASKS),
]


@pytest.mark.parametrize(("fields", "mask"), KINDS_OF_MASK)
def test_every_kind_of_mask(fields, mask):
    shape = {"batch": 2, "query_len": 70, "key_len": 140, "heads": 4, "kv_heads": 2}
    check(Case(**shape, **{"sink": None, **fields, **_sink_of(fields), "mask": mask}))


def _sink_of(fields):
    return {"sink": "mixed"} if fields is EVERYTHING else {}


@pytest.mark.parametrize("layout", MASK_LAYOUTS)
@pytest.mark.parametrize("fields", [BOOL, FLOAT32, FLOAT16, EVERYTHING], ids=["bool", "float32", "float16", "bfloat16"])
def test_every_layout_of_a_mask(fields, layout):
    mask = "some" if fields is BOOL else "bias_and_hidden"
    for query_len, key_len in ((33, 65), (1, 7), (3, 1)):
        shape = {"batch": 2, "query_len": query_len, "key_len": key_len, "heads": 4, "kv_heads": 2, "seed": 3}
        check(Case(**shape, **{**fields, **_sink_of(fields), "mask": mask, "mask_layout": layout}))


@pytest.mark.parametrize("key_len", tile_edges(130))
def test_masked_key_lengths_at_tile_edges(key_len):
    check(Case(query_len=3, key_len=key_len, mask="some", seed=1, **BOOL))


@quiet
def test_a_mask_may_hide_nan_by_choice():
    """A bool mask chooses: what it hides is not there, whatever its key holds."""
    q, k, v = Case("float16", query_len=20, key_len=100, head_dim=96, value_dim=40).tensors()
    mask = torch.rand(20, 100) < 0.5
    mask[:, 40:60] = False
    k[:, 40:60] = math.nan
    check_tensors(q, k, v, mask=mask, sink=torch.zeros(1))


@quiet
def test_a_mask_of_zeros_and_a_mask_of_true_are_none():
    q, k, v = Case(batch=2, query_len=70, key_len=90, heads=2, head_dim=32).tensors()
    expected, expected_lse = reference.attention(q, k, v)
    out, lse = attend(q, k, v, mask=torch.zeros(70, 90), window=(500, None))
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@quiet
def test_a_mask_past_two_to_the_31_elements():
    """A view whose last row starts beyond 2^31 elements, in memory that is hardly touched."""
    q, k, v = Case("float16", query_len=5, key_len=70, head_dim=96, value_dim=40).tensors()
    stride = 2**29 + 4
    whole = torch.empty(4 * stride + 70, dtype=torch.bool)
    mask = whole.as_strided((5, 70), (stride, 1))
    mask.copy_(torch.rand(5, 70) < 0.5)
    check_tensors(q, k, v, mask=mask, sink=torch.zeros(1))


# ---- together --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in TESTED if not kernel.has("varlen")],
    ids=lambda kernel: f"{kernel.dtype}-{kernel.head_dim}-{kernel.features.title}",
)
def test_error_is_at_most_twice_that_of_torch(kernel):
    """RMS; torch with what has to be added to the logits as a mask in float32."""
    on = kernel.features
    case = Case(
        kernel.dtype, 1, 129, 193, 4, 2, kernel.head_dim, kernel.value_dim,
        window=(100 if on.left else None, 0 if on.right else None),
        softcap=20.0 if on.softcap else 0.0,
        alibi="ladder" if on.alibi else None,
        sink="normal" if on.sink else None,
        mask="some" if on.mask else None,
        mask_dtype=on.mask if on.mask in ("bool", "float32") else "same",
    )  # fmt: skip
    q, k, v, out, _ = run(case)
    expected, _ = reference.attention(q, k, v, **case.options)
    ours, theirs = reference.error(out, expected), reference.torch_error(q, k, v, expected, **case.options)
    assert ours.rms <= 2 * theirs.rms


@quiet
def test_strides_do_not_change_a_bit_of_a_call_with_everything():
    base = {"batch": 2, "query_len": 40, "key_len": 70, "heads": 4, "kv_heads": 2, "mask": "bias", "sink": "normal"}
    expected = run(Case(**base, **EVERYTHING))[3]
    for layout in ("heads_first", "packed", "misaligned_start", "odd_strides"):
        assert torch.equal(run(Case(**base, **EVERYTHING, layouts=(layout,) * 3))[3], expected), layout
