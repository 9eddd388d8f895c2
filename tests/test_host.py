"""Calls that cost little: which go straight to a kept plan, which must not, and what that costs beside torch's own.

Plans are kept for CUDA tensors; here one is put in its place for CPU tensors, with a function that notes its arguments
and refuses what a launcher refuses.
"""

import contextlib
import dataclasses
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

import fa2_cute
from fa2_cute import arch, checks, flash_attn_func, flash_attn_varlen_func, forward, jit, kept, ops, split_calls, tiling
from fa2_cute._torch_internals import below_autograd, likeness
from fa2_cute.fuzz import Case
from fa2_cute.fuzz.judging import call
from fa2_cute.fuzz.strategies import cases

SHAPE, OTHER = (2, 16, 4, 64), (2, 16, 2, 64)
NO_LSE = torch.empty(0, 0, 0)


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def qkv():
    return normal(SHAPE), normal(OTHER, 1), normal(OTHER, 2)


class Launched(list):
    """Arguments of launches; and how many there were that the launcher refused."""

    refused = 0


# What plans are kept in: calls as they are, in inference mode, under autocast, and by the operator.
MODES = (contextlib.nullcontext, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), below_autograd)


@pytest.fixture
def launched(monkeypatch):
    """What has been launched by plans: in each mode there are a full and a causal one for tensors like ``qkv()``."""
    calls, (q, k, v) = Launched(), qkv()

    def launcher(*arguments):
        for x in arguments[:4]:
            if x.data_ptr() % 16 or x.dtype != torch.bfloat16:
                calls.refused += 1
                raise ValueError("Mismatched Tensor")
        calls.append(arguments)

    monkeypatch.setattr(forward, "_PLANS", kept.Kept(100))
    monkeypatch.setattr(forward, "_recent", ())
    monkeypatch.setattr(forward, "current_cuda_device", lambda: -1)  # of CPU tensors
    monkeypatch.setitem(forward.EMPTY_STRIDED, "cuda", forward.EMPTY_STRIDED["cpu"])
    lse = forward.metadata_of(torch.empty(2, 4, 16))
    for window in ((None, None), (None, 0)):
        plan = forward.KeptPlan(launcher, -1, forward.metadata_of(q), lse, NO_LSE, (0.18, 2, window))
        for mode in MODES:
            with mode():
                forward._keep(plan, q, k, v, None, window, 0.0)
    return calls


def kept_plan():
    """The full one of ``launched``."""
    ((_, plan), *_) = forward._PLANS[SHAPE, OTHER, None, (None, None), 0.0]
    return plan


@pytest.fixture
def checked(monkeypatch):
    """The calls that are checked, which end there."""
    calls = []

    class Checked(Exception):
        pass

    def check(*tensors, **options):
        calls.append(tensors)
        raise Checked

    monkeypatch.setattr(forward, "check", check)
    return Checked


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_call_like_one_before_is_launched_on_its_own_tensors(launched, checked, mode, causal):
    q, k, v = qkv()
    with mode():
        out, lse = flash_attn_func(q, k, v, causal=causal, return_softmax_lse=True)
    ((*tensors, scale, group, window),) = launched
    assert all(a is b for a, b in zip(tensors, (q, k, v, out, lse), strict=True))
    assert (scale, group, window) == (0.18, 2, (None, 0 if causal else None))
    assert (out.shape, out.dtype, out.is_contiguous()) == (SHAPE, torch.bfloat16, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 16), torch.float32, True)
    assert out.is_inference() == lse.is_inference() == (mode is torch.inference_mode)
    assert not out.requires_grad


def test_window_size_by_hand_is_the_same_call(launched, checked):
    flash_attn_func(*qkv(), window_size=(-1, -1))
    flash_attn_func(*qkv(), window_size=[None, None])
    flash_attn_func(*qkv(), causal=1, window_size=(None, 7))
    assert [x[-1] for x in launched] == [(None, None), (None, None), (None, 0)]


def test_the_launcher_refuses_what_a_plan_leaves_to_it():
    """Starts and dtypes: the same code looks at every tensor; here at q only, for no CPU tensor gets further."""
    q, k, v = (normal((1, 8, 2, 64), seed) for seed in range(3))
    spec = tiling.choose("bfloat16", 64, 64, tiling.FULL, arch.TARGET)
    function = jit.compiled(spec, arch.TARGET).function
    rest = (torch.empty_like(q), torch.empty(1, 2, 8), 0.1, 1, *(None,) * 9)
    with pytest.raises(ValueError, match=r"Misaligned Tensor data on argument #0(.|\n)*alignment=16 bytes"):
        function(unaligned(q), k, v, *rest)
    with pytest.raises(ValueError, match=r"Mismatched Tensor on argument #0(.|\n)*device_type=cuda"):
        function(q, k, v, *rest)


def unaligned(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def freed(x):
    x.untyped_storage().resize_(0)
    return x


def nested(x):
    """The same rows, as a tensor without strides: a guard that sees it ends the process."""
    return torch.nested.nested_tensor(list(x))


def view_of_freed(x):
    """At the start and strides of x in a storage that is no longer: its address is not 0."""
    view = torch.stack((x, x))[1]
    assert freed(view).data_ptr()
    return view


CHANGES = {
    "length": lambda q, k, v: (q[:, 1:], k, v),
    "batch": lambda q, k, v: (q[:1], k[:1], v[:1]),
    "dtype": lambda q, k, v: (q.half(), k.half(), v.half()),
    "one dtype": lambda q, k, v: (q, k, v.half()),
    "strides": lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    "strides of k": lambda q, k, v: (q, torch.cat((k, k), -1)[..., :64], v),
    "value_dim": lambda q, k, v: (q, k, v[..., :32]),
    "negated q": lambda q, k, v: (torch._neg_view(q), k, v),
    "negated k": lambda q, k, v: (q, torch._neg_view(k), v),
    "negated v": lambda q, k, v: (q, k, torch._neg_view(v)),
    "start of q": lambda q, k, v: (unaligned(q), k, v),
    "start of k": lambda q, k, v: (q, unaligned(k), v),
    "start of v": lambda q, k, v: (q, k, unaligned(v)),
    "freed q": lambda q, k, v: (freed(q), k, v),
    "freed k": lambda q, k, v: (q, freed(k), v),
    "view of freed v": lambda q, k, v: (q, k, view_of_freed(v)),
    "sparse": lambda q, k, v: (q.to_sparse(), k, v),
    "sparse v": lambda q, k, v: (q, k, v.to_sparse()),
    "nested q": lambda q, k, v: (nested(q), k, v),
    "nested k": lambda q, k, v: (q, nested(k), v),
    "nested v": lambda q, k, v: (q, k, nested(v)),
    "on no device": lambda q, k, v: (q, k, v.to("meta")),
    "a parameter": lambda q, k, v: (q, k, torch.nn.Parameter(v, requires_grad=False)),
    "one tensor twice": lambda q, k, v: (q, k, k),
    "no tensor": lambda q, k, v: (q, k, [v]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_unlike_them_are_checked(launched, checked, change):
    with pytest.raises(checked):
        flash_attn_func(*CHANGES[change](*qkv()))
    assert launched == []
    assert launched.refused == change.startswith("start")


@pytest.mark.parametrize("freed", [freed, view_of_freed])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_tensor_whose_storage_has_been_freed_is_refused(launched, position, freed):
    inputs = list(qkv())
    flash_attn_func(*inputs)
    inputs[position] = freed(inputs[position])
    with pytest.raises(ValueError, match=f"^{'qkv'[position]}: got a Tensor without memory of its own"):
        flash_attn_func(*inputs)
    assert len(launched) == 1


def through_ours(*qkv):
    return fa2_cute.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), enable_gqa=True)


WAYS = {
    "flash_attn_func": flash_attn_func,
    "scaled_dot_product_attention": through_ours,
    "autocast": torch.autocast("cpu", torch.bfloat16)(flash_attn_func),
    "the operator": torch.ops.fa2_cute.attend.default,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_launcher_that_refuses_is_asked_once(launched, checked, way):
    q, k, v = qkv()
    WAYS[way](q, k, v)
    assert (len(launched), launched.refused) == (1, 0)
    with pytest.raises(checked):
        WAYS[way](q, unaligned(k), v)
    assert (len(launched), launched.refused) == (1, 1)


OPTIONS = [
    {"softmax_scale": 0.5},
    {"softmax_scale": True},
    {"softcap": 1.0},
    {"softcap": 0},
    {"causal": True, "window_size": (3, -1)},
    {"alibi_slopes": torch.zeros(4)},
    {"learnable_sink": torch.zeros(4)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_unlike_theirs_are_checked(launched, checked, options):
    with pytest.raises(checked):
        flash_attn_func(*qkv(), **options)
    assert launched == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"causal": 2}, TypeError),
        ({"window_size": (-1.0, -1.0)}, TypeError),
        ({"window_size": (-2, -1)}, ValueError),
        ({"dropout_p": 0.1}, NotImplementedError),
        ({"dropout_p": False}, TypeError),
    ],
    ids=str,
)
def test_what_is_refused_stays_refused(launched, options, error):
    flash_attn_func(*qkv())
    with pytest.raises(error):
        flash_attn_func(*qkv(), **options)
    assert len(launched) == 1


def test_packed_sequences_are_checked(launched, checked):
    lengths = torch.tensor([0, 16, 32], dtype=torch.int32)
    with pytest.raises(checked):
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in qkv()), lengths, lengths, 16, 16)


def recorded(q, k, v, **options):
    """What a call on many keys leaves to be repeated."""
    problem, options, inputs = forward.check(q, k, v, **options)
    return split_calls.plan(problem, options, inputs).recorded(q, k, v)


@pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")
@pytest.mark.parametrize("query_len", [1, 20])
def test_a_split_call_is_repeated_on_other_tensors(query_len):
    """Few queries on many keys: two kernels, in the emulator."""

    def tensors(seed):
        return (
            normal((1, query_len, 4, 64), seed),
            normal((1, 1100, 2, 64), seed + 1),
            normal((1, 1100, 2, 64), seed + 2),
        )

    plan = forward.SplitPlan(recorded(*tensors(0), window=(None, 0)))
    assert plan.recording is not None
    for seed in (0, 7):
        expected = flash_attn_func(*tensors(seed), causal=True, return_softmax_lse=True)
        got = plan.run(*tensors(seed), False)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, expected, strict=True))


def test_a_split_call_that_cannot_be_told_apart_is_not_recorded():
    """Keys as values: which of the two a place was for, the next call's may differ."""
    q, k = normal((1, 1, 4, 64)), normal((1, 1100, 2, 64))
    assert recorded(q, k, k) is None


@pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")
@pytest.mark.parametrize("splits", [2, 9])
def test_a_call_of_the_forward_kernel_in_splits_is_repeated_on_other_tensors(splits):
    def tensors(seed):
        return (
            normal((2, 40, 4, 64), seed),
            normal((2, 300, 2, 64), seed + 1),
            normal((2, 300, 2, 64), seed + 2),
        )

    first = tensors(0)
    problem, options, inputs = forward.check(*first, window=(None, 0))
    plan = forward.SplitPlan(split_calls.split_forward(problem, options, inputs, splits).recorded(*first))
    for seed in (0, 7):
        expected = split_calls.attend(*tensors(seed), splits=splits, window=(None, 0))
        got = plan.run(*tensors(seed), False)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, expected, strict=True))


class Subclass(torch.Tensor):
    pass


def under(context):
    def call(q, k, v):
        with context():
            return flash_attn_func(q, k, v)

    return call


def fake(q, k, v):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return flash_attn_func(*map(mode.from_tensor, (q, k, v)))


def among_fake(q, k, v):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        return flash_attn_func(q, k, v)


def inside(transform):
    """A call in which the tensors are not what is transformed."""
    return lambda *x: transform(lambda y: (flash_attn_func(*x).float().sum() * y).sum())(torch.ones(3))


WATCHED = {
    "compiled": lambda *x: torch.compile(flash_attn_func, fullgraph=True, backend="eager")(*x),
    "traced by jit": lambda *x: torch.jit.trace(flash_attn_func, x, check_trace=False),
    "traced by jit around it": inside(lambda f: lambda y: torch.jit.trace(f, y, check_trace=False)),
    "fake": fake,
    "fake mode": among_fake,
    "a subclass": lambda q, k, v: flash_attn_func(q, k.as_subclass(Subclass), v),
    "in a mapped function": inside(lambda f: lambda y: torch.vmap(f)(y)),
    "in a function to be differentiated": inside(lambda f: lambda y: torch.func.grad(f)(y[0])),
    "mapped": lambda *x: torch.vmap(lambda *y: flash_attn_func(*y))(*(torch.stack((y, y)) for y in x)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", WATCHED)
def test_a_watched_call_goes_through_the_operator(launched, monkeypatch, how):
    """It is the operator that then launches, as known or anew, or its fake implementation that makes a shape."""
    through = []

    def attend(q, k, v, **options):
        through.append(q)
        return q + 0, q.new_zeros(2, 4, 16)

    monkeypatch.setattr(ops, "_launch_again", attend)
    WATCHED[how](*qkv())
    assert launched == []
    assert bool(through) == (not how.startswith("fake"))
    flash_attn_func(*qkv())
    assert len(launched) == 1
    torch._dynamo.reset()


def test_autocast_casts_before_it_is_looked_for(launched, checked):
    q, k, v = qkv()
    with torch.autocast("cpu", torch.float16), pytest.raises(checked):
        flash_attn_func(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        flash_attn_func(q.float(), k.float(), v.float())
    assert [x[0].dtype for x in launched] == [torch.bfloat16]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_gradients_are_refused_for_a_known_call(launched, position):
    inputs = list(qkv())
    flash_attn_func(*inputs)
    inputs[position].requires_grad_()
    forward._keep(kept_plan(), *inputs, None, (None, None), 0.0)
    with pytest.raises(NotImplementedError, match="requires grad"):
        flash_attn_func(*inputs)
    with torch.no_grad():
        flash_attn_func(*inputs)
    inputs[position].requires_grad_(False)
    with forward_ad.dual_level():
        inputs[position] = forward_ad.make_dual(inputs[position], inputs[position])
        with pytest.raises(NotImplementedError, match="tangent"):
            flash_attn_func(*inputs)
    assert len(launched) == 2


def test_one_tensor_for_two_is_known_as_such(launched, checked):
    """The guard that is asked refuses a tensor that comes twice, whatever it is like."""
    x = normal(SHAPE)
    with pytest.raises(checked):
        flash_attn_func(x, x, x)
    forward._keep(kept_plan(), x, x, x, None, (None, None), 0.0)
    y = normal(SHAPE, 1)
    for inputs in ((x, x, x), (y, y, y), (y, x, x), (normal(SHAPE, 2), x, y)):
        flash_attn_func(*inputs)
        assert all(a is b for a, b in zip(launched[-1], inputs, strict=False))
    for other in CHANGES["strides of k"](x, x, x)[1], unaligned(x):
        with pytest.raises(checked):
            flash_attn_func(x, x, other)
        with pytest.raises(checked):
            flash_attn_func(other, x, x)
    assert (len(launched), launched.refused) == (4, 2)


def test_a_plan_is_for_the_mode_it_was_made_in(monkeypatch, launched, checked):
    plan, (q, k, v) = kept_plan(), qkv()
    monkeypatch.setattr(forward, "_PLANS", kept.Kept(100))
    forward._keep(plan, q, k, v, None, (None, None), 0.0)
    with torch.inference_mode(), pytest.raises(checked):
        flash_attn_func(q, k, v)
    assert launched == []
    flash_attn_func(q, k, v)
    assert len(launched) == 1


def test_calls_of_several_kinds_in_turn_are_all_known(launched, checked):
    """More kinds than are tried first, with each other's shapes, strides and options; three times each."""
    _, k, v = qkv()
    plans, kinds = {}, []
    for length in (16, 24):
        for stride in (64, 72):
            for scale in (None, 0.25):
                q = torch.zeros(2, length, 4, stride, dtype=torch.bfloat16)[..., :64]
                kinds.append((q, scale))
                plans[length, stride, scale] = dataclasses.replace(kept_plan(), rest=(length, stride, scale))
                forward._keep(plans[length, stride, scale], q, k, v, scale, (None, None), 0.0)
    for q, scale in kinds * 2 + [kind for kind in kinds for _ in range(3)]:
        flash_attn_func(q, k, v, softmax_scale=scale)
        assert launched[-1][0] is q
        assert launched[-1][5:] == (q.shape[1], q.stride(2), scale)
    with pytest.raises(checked):
        flash_attn_func(q, k, v, softmax_scale=0.125)


def test_a_logsumexp_that_is_not_wanted_is_not_allocated(launched):
    """The kernel takes one without rows in its place."""
    q, k, v = qkv()
    out = flash_attn_func(q, k, v)
    assert (out.shape, out.dtype, out.is_contiguous()) == (SHAPE, torch.bfloat16, True)
    (with_lse, lse), (with_probs, of_probs, probs) = (
        flash_attn_func(q, k, v, **{name: True}) for name in ("return_softmax_lse", "return_attn_probs")
    )
    assert lse.shape == of_probs.shape == (2, 4, 16)
    assert probs is None
    for launch, expected in zip(launched, ((out, NO_LSE), (with_lse, lse), (with_probs, of_probs)), strict=True):
        assert all(a is b for a, b in zip(launch[:5], (q, k, v, *expected), strict=True))


@pytest.mark.parametrize(
    ("way", "has_lse"),
    [("flash_attn_func", False), ("scaled_dot_product_attention", False), ("autocast", False), ("the operator", True)],
)
def test_a_known_call_allocates_what_is_wanted_of_it(launched, checked, way, has_lse):
    """The operator's is promised by its schema."""
    WAYS[way](*qkv())
    ((*_, lse, _, _, _),) = launched
    assert (lse is not NO_LSE) == has_lse


LENGTHS = torch.tensor([0, 16, 32], dtype=torch.int32)


def kvpacked(q, k, v, **options):
    return fa2_cute.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **options)


def qkvpacked(q, k, v, **options):
    return fa2_cute.flash_attn_qkvpacked_func(torch.stack((k, k, v), 2), **options)


def varlen(q, k, v, **options):
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return flash_attn_varlen_func(*rows, LENGTHS, LENGTHS, 16, 16, **options)


def varlen_kvpacked(q, k, v, **options):
    kv = torch.stack((k, v), 2).flatten(0, 1)
    return fa2_cute.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv, LENGTHS, LENGTHS, 16, 16, **options)


def varlen_qkvpacked(q, k, v, **options):
    qkv = torch.stack((k, k, v), 2).flatten(0, 1)
    return fa2_cute.flash_attn_varlen_qkvpacked_func(qkv, LENGTHS, 16, **options)


def of_many_options(q, k, v, **options):
    of_heads = {"alibi_slopes": torch.ones(4), "learnable_sink": torch.ones(4)}
    return flash_attn_func(q, k, v, causal=True, window_size=(9, 9), softcap=2.0, **of_heads, **options)


def masked(q, k, v):
    rows = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(16, 16, dtype=torch.bool)
    return fa2_cute.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)


def of_five_dimensions(q, k, v):
    return fa2_cute.scaled_dot_product_attention(*(x.transpose(1, 2)[None] for x in (q, k, v)), enable_gqa=True)


BY_FLASH_ATTN = (
    flash_attn_func,
    of_many_options,
    kvpacked,
    qkvpacked,
    varlen,
    varlen_kvpacked,
    varlen_qkvpacked,
)


@pytest.fixture
def allocated(monkeypatch):
    """(calls that are launched, float32 tensors with memory that are allocated before); no kernel is run."""
    calls, floats, empty = [], [], torch.empty

    def noted(*shape, **options):
        made = empty(*shape, **options)
        if made.dtype == torch.float32 and made.numel() and made.device.type != "meta":
            floats.append(made)
        return made

    monkeypatch.setattr(jit, "compiled", lambda *of_kernel: None)
    monkeypatch.setattr(forward, "launch", lambda kernel, call: calls.append(call))
    monkeypatch.setattr(torch, "empty", noted)
    return calls, floats


@pytest.mark.parametrize("function", [*BY_FLASH_ATTN, through_ours, masked, of_five_dimensions])
def test_nothing_of_a_logsumexp_is_made_unless_it_is_asked_for(allocated, function):
    calls, floats = allocated
    out = function(*qkv())
    (call,) = calls
    *_, made, lse = call.tensors
    assert made.data_ptr() == out.data_ptr()
    assert floats == []
    assert (lse.numel(), lse.dim(), lse.dtype, lse.stride(-1)) == (0, 3, torch.float32, 1)
    assert lse.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("asking", ["return_softmax_lse", "return_attn_probs"])
@pytest.mark.parametrize("function", BY_FLASH_ATTN)
def test_a_logsumexp_that_is_asked_for_is_what_the_kernel_is_given(allocated, function, asking):
    calls, floats = allocated
    _, lse, *_ = function(*qkv(), **{asking: True})
    (call,) = calls
    assert call.tensors[4].data_ptr() == lse.data_ptr()
    assert [x.data_ptr() for x in floats] == [lse.data_ptr()]
    assert lse.numel() == 2 * 16 * call.problem.heads
    assert lse.dim() == 2 + (not call.problem.features.varlen)


def test_parts_of_a_call_have_no_logsumexp_either(allocated):
    """More sequences than a grid takes."""
    q = torch.zeros(forward.MAX_GRID_YZ + 2, 1, 1, 8, dtype=torch.bfloat16)
    flash_attn_func(q, q, q)
    parts = list(allocated[0][0].parts())
    assert [part.tensors[0].shape[0] for part in parts] == [forward.MAX_GRID_YZ, 2]
    assert [part.tensors[4].numel() for part in parts] == [0, 0]


@pytest.mark.parametrize("options", [{}, {"learnable_sink": torch.ones(4)}], ids=["plain", "sink"])
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=str)
def test_nor_has_a_call_with_nothing_to_compute(allocated, lengths, options):
    q, k = (torch.zeros(2, length, 4, 64, dtype=torch.bfloat16) for length in lengths)
    out = flash_attn_func(q, k, k, **options)
    assert (out.shape, out.count_nonzero()) == (q.shape, 0)
    assert allocated == ([], [])
    _, lse = flash_attn_func(q, k, k, return_softmax_lse=True, **options)
    assert (lse == (1.0 if options else -torch.inf)).all()


@given(cases())
@example(Case(query_len=40, key_len=70, heads=4, kv_heads=2))
@example(Case("float16", 2, 40, 30, 4, 2, 64, causal=True))
@example(Case("float16", 2, 9, 70, 2, 2, 96, value_dim=40, sink="mixed", mask="some"))
@example(Case("bfloat16", heads=2, packed=((3, 5), (70, 130)), unused=(2, 0, 1, 0), causal=True))
@settings(max_examples=settings().max_examples // 4)  # of the profile's
def test_every_kernel_takes_a_logsumexp_without_rows(case):
    """In the emulator, which refuses to write outside of tensors; and the output has the same bits."""
    tensors, options = case.tensors(), case.options
    expected, _ = call(*tensors, **options)
    out, lse = call(*tensors, **options, wants_lse=False)
    assert lse is None
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_numbers_of_other_types_than_a_known_calls_are_checked(launched, checked):
    q, k, v = qkv()
    forward._keep(kept_plan(), q, k, v, 1.0, (None, None), 0.0)
    forward._keep(kept_plan(), q, k, v, 1.0, (None, None), 1.0)
    for softcap in (0.0, 1.0):
        flash_attn_func(q, k, v, softmax_scale=1.0, softcap=softcap)
        for other in ({"softmax_scale": True, "softcap": softcap}, {"softmax_scale": 1.0, "softcap": bool(softcap)}):
            with pytest.raises(checked):
                flash_attn_func(q, k, v, **other)
    with pytest.raises(checked):
        ops.attend(q, k, v, window=[None, None])
    assert len(launched) == 2


def test_plans_of_the_same_shapes_are_few(launched):
    """Those that were made last."""
    plan, (_, k, v), made = kept_plan(), qkv(), []
    for stride in range(64, 64 + 8 * (forward.MOST_ALIKE + 1), 8):
        made.append(torch.zeros(2, 16, 4, stride, dtype=torch.bfloat16)[..., :64])
        forward._keep(plan, made[-1], k, v, None, (None, None), 0.0)
    known = [forward.attend_again(x, k, v, None, (None, None), 0.0) is not None for x in made]
    assert known == [False] + [True] * forward.MOST_ALIKE
    assert [len(alike) for alike in forward._PLANS.values()] == [forward.MOST_ALIKE, len(MODES)]


KINDS = {
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "contiguous": lambda x: x.contiguous(),
    "other strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "further apart": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "shorter": lambda x: x[:, 1:],
    "negated": torch._neg_view,
    "no negation": lambda x: x.resolve_neg(),
    "subclass": lambda x: x.as_subclass(Subclass),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "requires grad": lambda x: x.detach().requires_grad_(),
    "detached": lambda x: x.detach(),
    "nowhere": lambda x: x.to("meta"),
    "alias": lambda x: x.view_as(x),
}
kinds = st.lists(st.sampled_from(sorted(KINDS)), max_size=3)


def of_kind(kinds):
    x = torch.zeros(2, 6, 4, 8, dtype=torch.bfloat16)
    for kind in kinds:
        x = KINDS[kind](x)
    return x


def seen(x):
    """All that a plan depends on."""
    x_is = type(x), x.dtype, x.device, x.shape, x.stride(), x.is_neg(), x.requires_grad, x.is_inference()
    return (*x_is, torch.is_inference_mode_enabled())


@given(st.tuples(kinds, kinds, kinds), st.tuples(kinds, kinds, kinds), st.booleans(), st.booleans())
def test_likeness_is_equality_of_all_that_a_plan_depends_on(ours, theirs, inference, then_inference):
    with torch.inference_mode(inference):
        ours = [of_kind(x) for x in ours]
        is_alike, expected = likeness(*ours), [seen(x) for x in ours]
        assert is_alike(*ours)
    with torch.inference_mode(then_inference):
        theirs = [of_kind(x) for x in theirs]
        assert is_alike(*theirs) == (expected == [seen(x) for x in theirs])


def test_the_default_window_is_the_one_that_is_known():
    """By identity, which is quick: a default that is another tuple would still be right, and slow."""
    assert flash_attn_func.__defaults__[3] is checks.WHOLE


def best(call, repeats=7, calls=400):
    """Seconds of the quickest repeat."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(time.perf_counter() - start)
    return min(times)


def test_a_known_call_costs_the_host_no_more_than_a_few_of_torchs_own(launched):
    """1.4 of torch's own attention on next to nothing, as measured; through the operator it would be 5."""
    plan = dataclasses.replace(kept_plan(), function=lambda *x: None)
    tiny = torch.zeros(1, 1, 1, 8)
    with torch.inference_mode():
        q, k, v = qkv()
        forward._keep(plan, q, k, v, None, (None, None), 0.0)
        ours = best(lambda: flash_attn_func(q, k, v))
        assert ours < 3 * best(lambda: scaled_dot_product_attention(tiny, tiny, tiny))
