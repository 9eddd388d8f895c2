"""torch's scaled_dot_product_attention on these kernels: torch's own results, in all the shapes that torch takes."""

import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fa2_cute
from fa2_cute import forward, reference, scaled_dot_product_attention
from fa2_cute.fuzz.judging import judge

pytestmark = pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")

# Half a unit in the last place of the result, and what float64 and float32 differ by beside it.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
FLOAT32 = 1e-5


def normal(*shape, seed=0, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def from_reference(q, k, v, **options):
    """The core, in float64: what is asked is what it is handed."""
    assert all(x.dim() == 4 and (x.stride(-1) == 1 or not x.numel()) for x in (q, k, v))
    for unused in ("cu_seqlens_q", "cu_seqlens_k"):
        assert options.pop(unused, None) is None
    wants_lse = options.pop("wants_lse")
    out, lse = reference.attention(q, k, v, **options)
    return out.to(q.dtype), lse.float() if wants_lse else None


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(forward, "attend", from_reference)


def agrees(tensors, **options):
    """Torch's result in float32, within the rounding of ours."""
    got = scaled_dot_product_attention(*tensors, **options)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options["attn_mask"] = mask.float()
    expected = F.scaled_dot_product_attention(*(x.float() for x in tensors), **options).nan_to_num()
    assert got.shape == expected.shape
    assert got.dtype == tensors[0].dtype
    torch.testing.assert_close(got.float(), expected, rtol=ROUNDING[got.dtype], atol=FLOAT32)


@st.composite
def calls(draw):
    """Shapes that torch takes, an option or two, and masks of every shape that broadcasts."""
    query_len, key_len = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    leading = draw(st.lists(st.integers(1, 3), max_size=3))
    gqa = draw(st.booleans())
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 2)) if gqa else kv_heads

    def squeezed(extents):
        return [draw(st.sampled_from([extent, 1])) for extent in extents]

    shapes = []
    for i, (count, length, width) in enumerate(
        [(heads, query_len, 8), (kv_heads, key_len, 8), (kv_heads, key_len, 16)]
    ):
        front = leading if i == 0 else squeezed(leading)
        shapes.append([*front, count, length, width])
    if not leading and not gqa and heads == 1 and draw(st.booleans()):
        shapes = [shape[1:] for shape in shapes]
    options = {"is_causal": draw(st.booleans()), "enable_gqa": gqa, "scale": draw(st.sampled_from([None, 0.3]))}
    if draw(st.booleans()):
        full = (*leading, heads, query_len, key_len)[-max(len(s) for s in shapes) :]
        shape = squeezed(full)[draw(st.integers(0, len(full) - 2)) :]
        mask = normal(*shape, seed=9)
        kind = draw(st.sampled_from([torch.bool, torch.float16, torch.float32]))
        options["attn_mask"] = mask > -0.3 if kind == torch.bool else mask.to(kind)
        if options["is_causal"]:  # torch takes one of the two on most backends
            options["is_causal"] = False
    return [normal(*shape, seed=i) for i, shape in enumerate(shapes)], options


@given(calls())
def test_agrees_with_torch(call):
    tensors, options = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "attend", from_reference)
        agrees(tensors, **options)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 1, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
        [(2, 3, 4, 8), (2, 1, 5, 8), (2, 3, 5, 8)],
        [(2, 3, 4, 8), (3, 5, 8), (3, 5, 8)],
        [(3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
        [(0, 3, 4, 8), (0, 3, 5, 8), (0, 3, 5, 8)],
        [(2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 8)],
        [(2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)],
        [(2, 0, 3, 4, 8), (2, 0, 3, 5, 8), (2, 0, 3, 5, 8)],
    ],
)
def test_shapes_that_broadcast_or_are_empty(quick, shapes):
    agrees([normal(*shape, seed=i) for i, shape in enumerate(shapes)])


def test_grouped_heads_of_keys_and_values_that_differ(quick):
    for of_key, of_value in [(2, 1), (1, 4), (4, 2)]:
        tensors = normal(2, 4, 3, 8), normal(2, of_key, 5, 8, seed=1), normal(2, of_value, 5, 8, seed=2)
        agrees(tensors, enable_gqa=True)


def test_causal_with_a_mask_is_both(quick):
    q, k = normal(1, 2, 5, 8), normal(1, 2, 4, 8, seed=1)
    mask = normal(5, 4, seed=2) > -0.5
    both = mask & torch.ones(5, 4, dtype=torch.bool).tril()
    got = scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=True)
    assert torch.equal(got, scaled_dot_product_attention(q, k, k, attn_mask=both))


def test_strides_that_the_kernel_does_not_take(quick):
    x = normal(2, 3, 8, 8)
    agrees([x.transpose(2, 3), x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3), x.transpose(2, 3)])


def test_queries_that_see_no_key_get_zeros(quick):
    q = normal(1, 1, 3, 8)
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])
    out = scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert out[..., 1, :].count_nonzero() == 0
    assert out[..., [0, 2], :].count_nonzero() == 16


@pytest.mark.parametrize("options", ["causal", "bool", "float32"])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5)])
def test_on_the_kernel(options, lengths):
    """Top-left causal and masks, in the kernel; judged by the derived bounds."""
    query_len, key_len = lengths
    q, k, v = normal(2, 4, query_len, 64), normal(2, 2, key_len, 64, seed=1), normal(2, 2, key_len, 64, seed=2)
    mask = normal(2, 1, query_len, key_len, seed=3, dtype=torch.float32)
    given, expected = {
        "causal": ({"is_causal": True}, {"window": (None, query_len - key_len)}),
        "bool": ({"attn_mask": mask > 0}, {"mask": mask > 0}),
        "float32": ({"attn_mask": mask}, {"mask": mask}),
    }[options]
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, **given)
    heads_last = [x.transpose(1, 2) for x in (q, k, v)]
    _, lse = forward.attend(*heads_last, **expected)
    judge(*heads_last, out.transpose(1, 2), lse, **expected)


@pytest.fixture
def routed(quick, monkeypatch):
    """The shapes of queries that reach the core."""
    seen = []

    def attend(q, k, v, **options):
        seen.append(tuple(q.shape))
        return from_reference(q, k, v, **options)

    monkeypatch.setattr(forward, "attend", attend)
    return seen


def test_the_context_routes_torchs_calls(routed):
    imported_before = F.scaled_dot_product_attention
    q = normal(2, 3, 5, 8)
    with fa2_cute.sdpa_kernel():
        inside = imported_before(q, q, q, is_causal=True)
        with fa2_cute.sdpa_kernel():
            nested = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert routed == [(2, 5, 3, 8)] * 2
    assert torch.equal(inside, nested)
    F.scaled_dot_product_attention(q, q, q)
    assert len(routed) == 2


def test_the_context_is_of_its_thread(routed):
    q = normal(2, 3, 5, 8)
    with fa2_cute.sdpa_kernel():
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(q, q, q))
        thread.start()
        thread.join()
    assert not routed


def test_the_context_ends_with_an_error(routed):
    q = normal(2, 3, 5, 8)
    with pytest.raises(NotImplementedError, match="dropout_p"), fa2_cute.sdpa_kernel():
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert not routed


@pytest.mark.parametrize(
    ("compiled", "outer"), [(False, False), (False, True), (True, False)], ids=["eager", "default_device", "compiled"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_multi_head_attention_is_routed(routed, compiled, outer):
    """Also beneath another mode, which torch.device as a context is."""
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float16).eval()
    x, padding = normal(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    padding = None if compiled else padding  # torch does not compile its own check of it

    def call(x):
        return attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with torch.no_grad():
        expected = attention.float()(*[x.float()] * 3, key_padding_mask=padding, need_weights=False)[0]
        attention.half()
        if outer:
            with torch.device("cpu"), fa2_cute.sdpa_kernel():
                got = function(x)
        else:
            with fa2_cute.sdpa_kernel():
                got = function(x)
    assert routed == [(2, 5, 2, 8)]
    # Two projections to and from 16 numbers in float16: an error of some units in the last place.
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=8 * 2**-11)
    torch._dynamo.reset()


def test_transformer_layers_are_routed(routed):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dtype=torch.bfloat16).eval()
    with torch.no_grad(), fa2_cute.sdpa_kernel():
        layer(normal(2, 5, 16, dtype=torch.bfloat16))
    assert routed == [(2, 5, 2, 8)]


def test_the_context_inside_a_compiled_function(routed):
    q = normal(2, 3, 5, 8)

    def call(q):
        with fa2_cute.sdpa_kernel():
            return F.scaled_dot_product_attention(q, q, q)

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(got, scaled_dot_product_attention(q, q, q))
    assert len(routed) == 2
    torch._dynamo.reset()


def test_gradients_are_refused_in_the_context(routed):
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float16)
    x = normal(2, 5, 16)
    with fa2_cute.sdpa_kernel(), pytest.raises(NotImplementedError, match="query: got a tensor that requires grad"):
        attention(x, x, x, need_weights=False)


def test_the_context_takes_no_backends():
    with pytest.raises(TypeError, match=r"^sdpa_kernel: got .*, takes no backends"):
        fa2_cute.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION])
