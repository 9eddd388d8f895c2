"""At home in torch: compiled, exported, traced, autocast, in inference mode; and never a gradient lost in silence.

Where only the surface is asked, a stand-in computes the result (``quick``): the kernels are tested elsewhere.
"""

import contextlib
import math
import shutil
import threading

import pytest
import torch
from torch.autograd import forward_ad

from fa2_cute import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    forward,
    ops,
    reference,
    scaled_dot_product_attention,
)

pytestmark = pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")

DYNAMIC = {"fullgraph": True, "dynamic": True, "backend": "aot_eager"}


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(batch=2, query_len=5, key_len=7, heads=4, kv_heads=2, dtype=torch.bfloat16):
    keys = (batch, key_len, kv_heads, 64)
    return (
        normal(batch, query_len, heads, 64, dtype=dtype),
        normal(*keys, seed=1, dtype=dtype),
        normal(*keys, seed=2, dtype=dtype),
    )


LENGTHS = torch.tensor([0, 3, 9], dtype=torch.int32)


def rows(total=9):
    return normal(total, 4, 64), normal(total, 2, 64, seed=1), normal(total, 2, 64, seed=2)


@pytest.fixture(autouse=True)
def _no_compiled_graphs_of_another_test():
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch):
    """The core is the float64 reference."""

    def attend(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, wants_lse=True, **options):
        if not all(x.dtype in (torch.float16, torch.bfloat16) for x in (q, k, v)):
            raise TypeError(f"q: got dtype {q.dtype}, takes torch.float16 or torch.bfloat16")
        if cu_seqlens_q is None:
            out, lse = reference.attention(q, k, v, **options)
        else:
            options.pop("mask", None)
            out, lse = reference.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        return out.to(q.dtype), lse.float() if wants_lse else None

    monkeypatch.setattr(forward, "attend", attend)


def all_options(q, k, v):
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=0.2,
        causal=True,
        window_size=(3, -1),
        softcap=20.0,
        alibi_slopes=torch.full((q.shape[2],), 0.1),
        learnable_sink=torch.zeros(q.shape[2]),
        return_softmax_lse=True,
    )


def same(got, expected):
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler")
def test_a_compiled_graph_runs_the_kernel():
    """Inductor, one graph; the emulator is not traced."""
    q, k, v = qkv()
    compiled = torch.compile(lambda q, k, v: 2 * flash_attn_func(q + 1, k, v, causal=True), fullgraph=True)
    assert torch.equal(compiled(q, k, v), 2 * flash_attn_func(q + 1, k, v, causal=True))


def test_dynamic_shapes_compile_once(quick):
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(all_options, fullgraph=True, dynamic=True, backend=backend)
    for batch, query_len, key_len in [(3, 5, 7), (6, 4, 11), (5, 9, 8)]:  # extents that are equal at first stay equal
        inputs = qkv(batch, query_len, key_len)
        same(compiled(*inputs), all_options(*inputs))
    assert len(graphs) == 1
    assert torch.ops.fa2_cute.attend.default in graphs[0]


def test_windows_of_any_width_compile_once(quick):
    graphs = []

    def call(q, k, v, left):
        return flash_attn_func(q, k, v, window_size=(left, left + 1))

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for left in (2, 3, 6):
        assert torch.equal(compiled(*qkv(), left), call(*qkv(), left))
    assert len(graphs) == 1


def test_every_function_compiles_as_one_graph(quick):
    q, k, v = qkv()
    a, b, c = rows()
    calls = [
        (flash_attn_func, (q, k, v)),
        (flash_attn_kvpacked_func, (q, torch.stack((k, v), 2))),
        (flash_attn_qkvpacked_func, (torch.stack((k, k, v), 2),)),
        (lambda *x: flash_attn_varlen_func(*x, LENGTHS, LENGTHS, 6, 6), (a, b, c)),
        (lambda *x: flash_attn_varlen_kvpacked_func(*x, LENGTHS, LENGTHS, 6, 6), (a, torch.stack((b, c), 1))),
        (lambda x: flash_attn_varlen_qkvpacked_func(x, LENGTHS, 6), (torch.stack((b, b, c), 1),)),
        (
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            tuple(x.transpose(1, 2) for x in (q, k, v)),
        ),
        (
            lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[2], k.shape[2]).bool()),
            tuple(x.transpose(1, 2) for x in (q, q, q)),
        ),
    ]
    for function, inputs in calls:
        assert torch.equal(torch.compile(function, **DYNAMIC)(*inputs), function(*inputs))


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_shapes(quick, strict, tmp_path):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    batch, query_len, key_len = (torch.export.Dim(name, min=1, max=4096) for name in ("batch", "query_len", "key_len"))
    keys = {0: batch, 1: key_len}
    program = torch.export.export(
        Attention(), qkv(), dynamic_shapes=({0: batch, 1: query_len}, keys, keys), strict=strict
    )
    torch.export.save(program, tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2").module()
    inputs = qkv(3, 11, 13)
    assert torch.equal(loaded(*inputs), flash_attn_func(*inputs, causal=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_left": 2, "window_right": 0, "softmax_scale": 0.3},
        {"softcap": 3.0, "sink": torch.ones(4), "alibi_slopes": torch.ones(2, 4), "mask": torch.zeros(5, 7)},
        {"mask": torch.ones(2, 1, 1, 7, dtype=torch.bool)},
        {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS, "window_right": 0},
    ],
    ids=["plain", "window", "all", "mask", "packed"],
)
def test_opcheck(quick, options):
    inputs = rows() if "cu_seqlens_q" in options else qkv()
    results = torch.library.opcheck(torch.ops.fa2_cute.attend.default, inputs, options)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) >= 4


@pytest.mark.parametrize("compiled", [False, True])
def test_the_operator_has_a_logsumexp_whoever_calls_it(quick, compiled):
    """As its schema promises: beneath autograd, and in a graph, where it may be wanted later."""
    inputs, packed = qkv(), rows()
    inputs[0].requires_grad_()
    of_sequences = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS}
    for operator, given, options in (
        (torch.ops.fa2_cute.attend.default, inputs, {}),
        (torch.ops.fa2_cute.attend.default, packed, of_sequences),
    ):
        function = torch.compile(operator, **DYNAMIC) if compiled else operator
        with torch.no_grad():
            got, expected = function(*given, **options), forward.attend(*given, **options)
        same(got, expected)

    def both(q, k, v):
        return flash_attn_func(q, k, v), flash_attn_func(q, k, v, return_softmax_lse=True)

    with torch.no_grad():
        alone, (out, lse) = (torch.compile(both, **DYNAMIC) if compiled else both)(*inputs)
        expected, expected_lse = forward.attend(*inputs)
    same((alone, out, lse), (expected, expected, expected_lse))


def test_fake_tensors_have_the_shapes_of_real_ones(quick):
    inputs = qkv()
    expected = all_options(*inputs)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = all_options(*(mode.from_tensor(x) for x in inputs))
    for fake, real in zip(got, expected, strict=True):
        assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
            real.shape,
            real.dtype,
            real.device,
            real.stride(),
        )


def test_plain_eager_calls_go_around_the_operator(monkeypatch):
    """A dispatcher, a schema and a wrapper cost more host time than the call itself."""
    monkeypatch.setattr(ops.torch.ops.fa2_cute, "attend", None)
    q, k, v = qkv()
    with torch.inference_mode():
        assert flash_attn_func(q, k, v).shape == q.shape


@pytest.mark.parametrize("position", [0, 1, 2])
def test_gradients_are_refused_not_lost(quick, position):
    inputs = list(qkv())
    inputs[position].requires_grad_()
    name = "qkv"[position]
    message = rf"{name}: got a tensor that requires grad.*no backward"
    with pytest.raises(NotImplementedError, match=message):
        flash_attn_func(*inputs)
    with pytest.raises(NotImplementedError, match=message):
        torch.ops.fa2_cute.attend(*inputs)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")(*inputs)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(torch.ops.fa2_cute.attend, fullgraph=True, backend="aot_eager")(*inputs)
    with pytest.raises(NotImplementedError, match=message):
        torch.compile(flash_attn_func, backend="aot_eager")(*inputs)
    with torch.no_grad():  # what was refused does not stay refused
        same(torch.compile(all_options, **DYNAMIC)(*inputs), all_options(*inputs))


@pytest.mark.parametrize("option", ["alibi_slopes", "learnable_sink"])
def test_gradients_of_options_are_refused(quick, option):
    with pytest.raises(NotImplementedError, match=f"{option}: got a tensor that requires grad"):
        flash_attn_func(*qkv(), **{option: torch.ones(4, requires_grad=True)})
    mask = torch.zeros(5, 7, requires_grad=True)
    with pytest.raises(NotImplementedError, match="attn_mask: got a tensor that requires grad"):
        scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv(kv_heads=4)), attn_mask=mask)


@pytest.mark.parametrize("function", [flash_attn_func, torch.ops.fa2_cute.attend], ids=["function", "operator"])
def test_tangents_are_refused(quick, function):
    q, k, v = qkv()
    with forward_ad.dual_level():
        assert len(function(q, k, v)) == 2  # out of a batch of 2, or (out, lse)
        with pytest.raises(NotImplementedError, match="k: got a tensor with a forward-mode tangent"):
            function(q, forward_ad.make_dual(k, k), v)
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(lambda q: function(q, k, v)[0], (q,), (q,))
    with pytest.raises(NotImplementedError, match="requires grad"):
        torch.func.grad(lambda q: function(q, k, v)[0].float().sum())(q)


def test_no_grad_and_inference_mode(quick):
    q, k, v = qkv()
    q.requires_grad_()
    with torch.no_grad():
        out = flash_attn_func(q, k, v)
    assert not out.requires_grad
    with torch.inference_mode():
        inside = flash_attn_func(q, k, v)
        assert inside.is_inference()
    assert torch.equal(inside, out)


@pytest.mark.parametrize("given", [torch.float32, torch.float16])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast(quick, given, to):
    """As torch's own attention does it: floating inputs are cast, an additive mask in 16 bits with them."""
    inputs = qkv(dtype=given)
    heads_first = [x.transpose(1, 2) for x in qkv(kv_heads=4, dtype=given)]
    mask = normal(5, 7, seed=3, dtype=given)
    expected = all_options(*(x.to(to) for x in inputs))
    with torch.autocast("cpu", to):
        got = all_options(*inputs)
        compiled = torch.compile(all_options, **DYNAMIC)(*inputs)
        masked = scaled_dot_product_attention(*heads_first, attn_mask=mask)
    same(got, expected)
    same(compiled, expected)
    assert masked.dtype == to
    with contextlib.nullcontext() if given == torch.float16 else pytest.raises(TypeError, match="float32"):
        all_options(*inputs)


def test_autocast_leaves_float64_alone(quick):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="float64"):
        flash_attn_func(*qkv(dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_by_jit(quick):
    """The operator is recorded, not its result."""
    traced = torch.jit.trace(flash_attn_func, qkv())
    q, k, v = (2 * x for x in qkv())
    assert torch.equal(traced(q, k, v), flash_attn_func(q, k, v))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap(quick):
    q, k, v = qkv()
    mapped = torch.vmap(lambda q, k, v: flash_attn_func(q[None], k[None], v[None])[0])(q, k, v)
    assert torch.equal(mapped, flash_attn_func(q, k, v))


def test_parameters_and_subclasses(quick):
    q, k, v = qkv()
    with torch.no_grad():
        out = flash_attn_func(torch.nn.Parameter(q), k, v)
    assert torch.equal(out, flash_attn_func(q, k, v))


class Silent(torch.Tensor):
    """A tensor that only operators may be asked of: none of its attributes."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is torch.Tensor.is_nested.__get__:
            raise AssertionError("asked whether it is nested")
        return super().__torch_function__(function, types, arguments, keywords or {})


@pytest.mark.parametrize("position", range(3))
def test_what_is_no_plain_tensor_is_not_looked_into(position):
    """Symbolic tracing's stand-ins are refused by name; a subclass is left to the operator."""
    inputs = list(qkv())
    inputs[position] = inputs[position].as_subclass(Silent)
    assert torch.equal(flash_attn_func(*inputs).as_subclass(torch.Tensor), flash_attn_func(*qkv()))
    name = "qkv"[position]

    def call(x):
        inputs[position] = x
        return flash_attn_func(*inputs)

    with pytest.raises(TypeError, match=f"^{name}: got Proxy, takes a torch.Tensor"):
        torch.fx.symbolic_trace(call)


def test_threads_at_a_time():
    """Each thread gets its own results: nothing is shared but the kernels."""
    inputs = [qkv(1, 3 + i, 6) for i in range(3)]
    expected = [flash_attn_func(*x, causal=True) for x in inputs]
    got = [None] * len(inputs)

    def work(i):
        got[i] = flash_attn_func(*inputs[i], causal=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(got, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_empty_problems(compiled):
    function = torch.compile(flash_attn_func, **DYNAMIC) if compiled else flash_attn_func
    for batch, query_len, key_len in [(0, 5, 7), (2, 0, 7), (2, 5, 0)]:
        out, lse = function(*qkv(batch, query_len, key_len), return_softmax_lse=True)
        assert out.shape == (batch, query_len, 4, 64)
        assert out.count_nonzero() == 0
        assert (lse == -math.inf).all()
