"""Every wrong input is refused at once, by an error that names the argument, what came and what is taken."""

import math
from dataclasses import replace

import pytest
import torch

import fa2_cute
from fa2_cute import (
    arch,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    forward,
    jit,
    scaled_dot_product_attention,
    tiling,
)


def tensors(query=(2, 5, 4, 64), key=(2, 7, 2, 64), dtype=torch.float16):
    return torch.zeros(query, dtype=dtype), torch.zeros(key, dtype=dtype), torch.zeros(key, dtype=dtype)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    """Refusal comes before any work."""

    def compiled(*args, **kwargs):
        pytest.fail("a kernel was asked for before the input was refused")

    monkeypatch.setattr(jit, "compiled", compiled)


def refused(kind, *texts, q, k, v, **options):
    """The call raises ``kind``; its one-line message starts with the first of ``texts`` and holds all."""
    refused_by(flash_attn_func, kind, *texts, given=(q, k, v), **options)


def refused_by(function, kind, *texts, given, **options):
    """The same of any function and its positional arguments."""
    with pytest.raises(kind) as caught:
        function(*given, **options)
    message = str(caught.value)
    assert message.startswith(f"{texts[0]}: "), message
    for text in texts:
        assert text in message, message
    assert ": got " in message or ": takes " in message, message
    assert "takes" in message
    assert "\n" not in message


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("shape", [(), (64,), (5, 64), (5, 4, 64), (1, 2, 5, 4, 64)])
def test_wrong_rank(position, shape):
    given = list(tensors())
    given[position] = torch.zeros(shape, dtype=torch.float16)
    refused(ValueError, "qkv"[position], f"{len(shape)} dimensions", "4", q=given[0], k=given[1], v=given[2])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64]
)
def test_wrong_dtype(position, dtype):
    given = list(tensors())
    given[position] = given[position].to(dtype)
    refused(TypeError, "qkv"[position], str(dtype), "float16", q=given[0], k=given[1], v=given[2])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_refused(dtype):
    q, k, v = (x.to(dtype) for x in tensors())
    refused(TypeError, "q", str(dtype), q=q, k=k, v=v)


@pytest.mark.parametrize("position", [1, 2])
def test_mixed_dtypes(position):
    given = list(tensors())
    given[position] = given[position].bfloat16()
    refused(TypeError, "qkv"[position], "torch.bfloat16", "torch.float16", q=given[0], k=given[1], v=given[2])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("thing", [None, 1.0, [[1.0]], "q"])
def test_no_tensor(position, thing):
    given = list(tensors())
    given[position] = thing
    refused(TypeError, "qkv"[position], type(thing).__name__, "Tensor", q=given[0], k=given[1], v=given[2])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(position):
    given = list(tensors())
    given[position] = torch.nested.nested_tensor(list(given[position]))
    refused(TypeError, "qkv"[position], "a nested tensor", "flash_attn_varlen_func", q=given[0], k=given[1], v=given[2])


def test_numpy_arrays():
    q, k, v = (x.numpy() for x in tensors())
    refused(TypeError, "q", "ndarray", q=q, k=k, v=v)


@pytest.mark.parametrize("position", [1, 2])
def test_mixed_devices(position):
    given = list(tensors())
    given[position] = given[position].to("meta")
    refused(ValueError, "qkv"[position], "meta", "cpu", q=given[0], k=given[1], v=given[2])


def test_a_device_that_is_neither_cuda_nor_cpu():
    q, k, v = (x.to("meta") for x in tensors())
    refused(ValueError, "q", "meta", "CUDA", q=q, k=k, v=v)


@pytest.mark.parametrize("kv_heads", [3, 5, 8, 0])
def test_head_counts_that_do_not_divide(kv_heads):
    q, k, v = tensors(key=(2, 7, kv_heads, 64))
    refused(ValueError, "k", f"{kv_heads} KV heads", "4 heads", q=q, k=k, v=v)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_last_stride_not_one(position):
    given = list(tensors())
    given[position] = given[position].transpose(2, 3).contiguous().transpose(2, 3)
    refused(ValueError, "qkv"[position], "stride", "1", q=given[0], k=given[1], v=given[2])


def test_every_second_element():
    _, k, v = tensors()
    wide = torch.zeros(2, 5, 4, 128, dtype=torch.float16)[..., ::2]
    refused(ValueError, "q", "stride", q=wide, k=k, v=v)


def test_last_stride_of_zero():
    q, k, _ = tensors()
    flat = torch.zeros(2, 7, 2, 1, dtype=torch.float16).expand(-1, -1, -1, 64)
    refused(ValueError, "v", "stride", q=q, k=k, v=flat)


@pytest.mark.parametrize("head_dim", [0, 1, 4, 12, 63, 65, 127, 129, 260, 264, 512])
def test_unsupported_head_dim(head_dim):
    q, k, v = tensors((2, 5, 4, head_dim), (2, 7, 2, head_dim))
    refused(ValueError, "q", f"head_dim {head_dim}", "multiples of 8", "256", q=q, k=k, v=v)
    q, k, _ = tensors()
    refused(ValueError, "v", f"head_dim {head_dim}", "multiples of 8", "256", q=q, k=k, v=v)


def test_head_dims_that_differ():
    q, _, v = tensors()
    refused(ValueError, "k", "128", "64", q=q, k=torch.zeros(2, 7, 2, 128, dtype=torch.float16), v=v)


@pytest.mark.parametrize("shape", [(3, 7, 2, 64), (2, 8, 2, 64), (2, 7, 1, 64)], ids=["batch", "length", "heads"])
def test_shapes_of_v_and_k_that_differ(shape):
    q, k, v = tensors()
    refused(ValueError, "v", str(shape), str((2, 7, 2, 64)), q=q, k=k, v=v.new_zeros(shape))


def test_batches_that_differ():
    q, k, v = tensors(key=(3, 7, 2, 64))
    refused(ValueError, "k", "(3, 7, 2, 64)", "batch=2", q=q, k=k, v=v)
    q, k, v = tensors(key=(1, 7, 2, 64))  # no silent broadcasting
    refused(ValueError, "k", "(1, 7, 2, 64)", "batch=2", q=q, k=k, v=v)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scale_that_is_no_finite_number(scale):
    q, k, v = tensors()
    refused(ValueError, "softmax_scale", str(scale), "finite", q=q, k=k, v=v, softmax_scale=scale)


@pytest.mark.parametrize("scale", [1e39, -1e39, 3e38, 1e300])
def test_scale_beyond_fp32(scale):
    """In base 2 the kernel takes scale * log2(e) as an fp32 number."""
    q, k, v = tensors()
    refused(ValueError, "softmax_scale", str(scale), q=q, k=k, v=v, softmax_scale=scale)


@pytest.mark.parametrize("scale", ["1", [1.0], torch.ones(3)], ids=["string", "list", "tensor"])
def test_scale_that_is_no_number(scale):
    q, k, v = tensors()
    refused(TypeError, "softmax_scale", type(scale).__name__, q=q, k=k, v=v, softmax_scale=scale)


@pytest.mark.parametrize("dropout", [0.1, 1.0, -1, math.nan])
def test_dropout(dropout):
    """The message says why, and what to use."""
    q, k, v = tensors()
    refused(NotImplementedError, "dropout_p", "backward", "evaluate with", q=q, k=k, v=v, dropout_p=dropout)


@pytest.mark.parametrize("dropout", [None, "0", True, [0.0]])
def test_dropout_that_is_no_number(dropout):
    q, k, v = tensors()
    refused(TypeError, "dropout_p", type(dropout).__name__, q=q, k=k, v=v, dropout_p=dropout)


@pytest.mark.parametrize("window", [5, (1,), (1, 2, 3), "ab", None, (1.0, 0), ("1", 0), (True, 0), torch.ones(2)])
def test_window_that_is_no_pair_of_integers(window):
    q, k, v = tensors()
    refused(TypeError, "window_size", "takes", q=q, k=k, v=v, window_size=window)


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-100, -100)])
def test_window_of_negative_sides(window):
    q, k, v = tensors()
    refused(ValueError, "window_size", str(window), "-1", q=q, k=k, v=v, window_size=window)


@pytest.mark.parametrize("softcap", [-1.0, math.nan, math.inf, 1e39, 1e-39, 10**400])
def test_softcap_that_no_float32_holds(softcap):
    q, k, v = tensors()
    refused(ValueError, "softcap", "positive", q=q, k=k, v=v, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, "1", True, [1.0]])
def test_softcap_that_is_no_number(softcap):
    q, k, v = tensors()
    refused(TypeError, "softcap", type(softcap).__name__, q=q, k=k, v=v, softcap=softcap)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2,), (2, 2), (2, 3), (1, 4), (4, 2), (2, 4, 1)])
def test_slopes_of_a_wrong_shape(shape):
    q, k, v = tensors()
    refused(ValueError, "alibi_slopes", str(shape), "(4,)", "(2, 4)", q=q, k=k, v=v, alibi_slopes=torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_slopes_of_a_wrong_dtype(dtype):
    q, k, v = tensors()
    slopes = torch.zeros(4, dtype=dtype)
    refused(TypeError, "alibi_slopes", str(dtype), "float32", q=q, k=k, v=v, alibi_slopes=slopes)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 4), (4, 1)])
def test_sinks_of_a_wrong_shape(shape):
    q, k, v = tensors()
    refused(ValueError, "learnable_sink", str(shape), "(4,)", q=q, k=k, v=v, learnable_sink=torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_sinks_of_a_wrong_dtype(dtype):
    q, k, v = tensors()
    sink = torch.zeros(4, dtype=dtype)
    refused(TypeError, "learnable_sink", str(dtype), "float32", q=q, k=k, v=v, learnable_sink=sink)


@pytest.mark.parametrize("name", ["alibi_slopes", "learnable_sink"])
def test_options_that_are_no_tensors_or_elsewhere(name):
    q, k, v = tensors()
    refused(TypeError, name, "list", "Tensor", q=q, k=k, v=v, **{name: [1.0] * 4})
    refused(ValueError, name, "meta", "cpu", q=q, k=k, v=v, **{name: torch.zeros(4, device="meta")})


@pytest.mark.parametrize("position", [0, 1, 2])
def test_inputs_that_require_grad(position):
    given = list(tensors())
    given[position].requires_grad_()
    refused(NotImplementedError, "qkv"[position], "grad", "backward", q=given[0], k=given[1], v=given[2])


def test_unknown_arguments():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="softmax_scal"):
        flash_attn_func(q, k, v, softmax_scal=1.0)


def test_tensors_that_are_not_strided():
    q, k, v = tensors()
    refused(ValueError, "q", "sparse", q=q.to_sparse(), k=k, v=v)


def test_extents_beyond_32_bits():
    q, _, _ = tensors()
    long = torch.zeros(1, 1, 1, 64, dtype=torch.float16).expand(2, 2**30, 2, 64)
    refused(ValueError, "k", str(2**30), q=q, k=long, v=long)


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (7, 5)])
def test_architectures_before_sm_80(capability):
    with pytest.raises(ValueError, match=rf"{capability[0]}\.{capability[1]}.*takes.*sm_80"):
        arch.by_capability(*capability)


@pytest.mark.parametrize("name", ["sm_75", "sm_12", "120x", "", "blackwell"])
def test_unknown_architecture_names(name):
    with pytest.raises(ValueError, match=r"takes.*sm_120"):
        arch.by_name(name)


@pytest.mark.parametrize("name", ["sm_120", "sm_120a", "120", "SM_120", 120])
def test_known_architecture_names(name):
    assert arch.by_name(name).capability == (12, 0)


def test_specifications_that_no_kernel_can_have():
    spec = tiling.shipped(arch.TARGET)[0]
    for name, value in [
        ("dtype", "float32"),
        ("head_dim", 65),
        ("tile_m", 100),
        ("tile_n", 8),
        ("stages", 1),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: got {value!r}"):
            replace(spec, **{name: value})


def test_a_tensor_whose_memory_was_taken_away():
    q, k, v = tensors()
    k.untyped_storage().resize_(0)
    refused(ValueError, "k", "memory", q=q, k=k, v=v)


@pytest.mark.parametrize("causal", ["no", 2, None])
def test_causal_that_is_no_truth_value(causal):
    q, k, v = tensors()
    refused(TypeError, "causal", repr(causal), q=q, k=k, v=v, causal=causal)


def test_a_scale_beyond_float64():
    q, k, v = tensors()
    refused(ValueError, "softmax_scale", "finite", q=q, k=k, v=v, softmax_scale=10**400)


LENGTHS = torch.tensor([0, 2, 5], dtype=torch.int32)


def varlen(q=None, k=None, v=None, cu_seqlens_q=LENGTHS, cu_seqlens_k=LENGTHS):
    """Positional arguments of ``flash_attn_varlen_func``, right but for what is given."""
    x = torch.zeros(5, 4, 64, dtype=torch.float16)
    return (*(x if y is None else y for y in (q, k, v)), cu_seqlens_q, cu_seqlens_k, 3, 3)


@pytest.mark.parametrize("position", [3, 4])
@pytest.mark.parametrize(
    ("kind", "lengths", "texts"),
    [
        (TypeError, None, ["NoneType", "int32"]),
        (TypeError, [0, 2, 5], ["list", "int32"]),
        (TypeError, LENGTHS.long(), ["torch.int64", "torch.int32"]),
        (TypeError, LENGTHS.float(), ["torch.float32", "torch.int32"]),
        (ValueError, LENGTHS[None], ["(1, 3)"]),
        (ValueError, LENGTHS[0], ["()"]),
        (ValueError, LENGTHS[:0], ["(0,)"]),
        (ValueError, LENGTHS.to("meta"), ["meta", "cpu"]),
    ],
)
def test_cumulative_lengths(position, kind, lengths, texts):
    given = list(varlen())
    given[position] = lengths
    name = ("cu_seqlens_q", "cu_seqlens_k")[position - 3]
    refused_by(flash_attn_varlen_func, kind, name, *texts, given=given)
    q, k, _, *rest = given
    refused_by(flash_attn_varlen_kvpacked_func, kind, name, *texts, given=(q, torch.stack((k, k), 1), *rest))


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([0, 5, 3], "got 3 after 5 (index 2)"),
        ([1, 0, 5], "got 0 after 1 (index 1)"),
        ([5, 2, 0], "got 2 after 5 (index 1)"),
        ([2**31 - 1, -(2**31), 0], f"got {-(2**31)} after {2**31 - 1} (index 1)"),
    ],
    ids=str,
)
def test_cumulative_lengths_that_decrease(side, lengths, text):
    """On the CPU, where they are at hand; by every function that takes them, and by the operator."""
    decreasing, name = torch.tensor(lengths, dtype=torch.int32), f"cu_seqlens_{side}"
    texts = (text, "takes numbers that do not decrease")
    given = varlen(**{name: decreasing})
    refused_by(flash_attn_varlen_func, ValueError, name, *texts, given=given)
    q, k, v, cu_q, cu_k, *rest = given
    kv = torch.stack((k, v), 1)
    refused_by(flash_attn_varlen_kvpacked_func, ValueError, name, *texts, given=(q, kv, cu_q, cu_k, *rest))
    by_operator = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    refused_by(torch.ops.fa2_cute.attend, ValueError, name, *texts, given=(q, k, v), **by_operator)
    qkv = torch.stack((q, k, v), 1)
    refused_by(flash_attn_varlen_qkvpacked_func, ValueError, "cu_seqlens", *texts, given=(qkv, decreasing, 3))
    pages = torch.zeros(3, 4, 4, 64, dtype=torch.float16)
    table = torch.zeros(2, 1, dtype=torch.int32)
    paged = (q, pages, pages, cu_q, cu_k, *rest)
    refused_by(flash_attn_varlen_func, ValueError, name, *texts, given=paged, block_table=table)


def test_cumulative_lengths_without_memory():
    nowhere = LENGTHS.clone()
    nowhere.untyped_storage().resize_(0)
    given = varlen(cu_seqlens_k=nowhere)
    refused_by(flash_attn_varlen_func, ValueError, "cu_seqlens_k", "without memory", given=given)


def test_cumulative_lengths_of_different_batches():
    given = varlen(cu_seqlens_k=LENGTHS[:2])
    refused_by(flash_attn_varlen_func, ValueError, "cu_seqlens_k", "(2,)", "(3,)", given=given)


@pytest.mark.parametrize("lengths", [None, LENGTHS.long(), LENGTHS[None], LENGTHS.to("meta")])
def test_cumulative_lengths_of_everything_packed(lengths):
    """The error names the argument there is."""
    qkv = torch.zeros(5, 3, 4, 64, dtype=torch.float16)
    refused_by(
        flash_attn_varlen_qkvpacked_func, (TypeError, ValueError), "cu_seqlens", "takes", given=(qkv, lengths, 3)
    )


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5, 64), (1, 5, 4, 64)])
def test_packed_sequences_of_a_wrong_rank(position, shape):
    given = list(varlen())
    given[position] = torch.zeros(shape, dtype=torch.float16)
    refused_by(flash_attn_varlen_func, ValueError, "qkv"[position], f"{len(shape)} dimensions", "3", given=given)


def test_packed_sequences_that_do_not_fit():
    x = torch.zeros(6, 4, 64, dtype=torch.float16)
    refused_by(flash_attn_varlen_func, ValueError, "v", "(6, 4, 64)", "(5, 4, 64)", given=varlen(v=x))
    three = torch.zeros(5, 3, 64, dtype=torch.float16)
    refused_by(flash_attn_varlen_func, ValueError, "k", "3 KV heads", given=varlen(k=three, v=three))
    other = torch.zeros(5, 4, 128, dtype=torch.float16)
    refused_by(flash_attn_varlen_func, ValueError, "k", "(5, 4, 128)", "64", given=varlen(k=other))


def test_slopes_of_packed_sequences():
    slopes = torch.zeros(3, 4)
    refused_by(
        flash_attn_varlen_func, ValueError, "alibi_slopes", "(3, 4)", "(2, 4)", given=varlen(), alibi_slopes=slopes
    )


def test_paged_keys_and_values():
    q, pages = torch.zeros(5, 4, 64, dtype=torch.float16), torch.zeros(3, 2, 4, 64, dtype=torch.float16)
    table = torch.zeros(2, 2, dtype=torch.int32)
    for kind, name, text, change in [
        (TypeError, "block_table", "torch.int64", {"block_table": table.long()}),
        (TypeError, "block_table", "list", {"block_table": [[0]]}),
        (ValueError, "block_table", "(3, 2)", {"block_table": table[:1].expand(3, 2)}),
        (ValueError, "k", "(3, 4, 64)", {"k": pages[:, 0]}),
        (ValueError, "v", "(3, 2, 2, 64)", {"v": pages[:, :, :2]}),
        (TypeError, "k", "torch.float32", {"k": pages.float()}),
        (TypeError, "cu_seqlens_k", "torch.int64", {"cu_seqlens_k": LENGTHS.long()}),
        (ValueError, "cu_seqlens_k", "(2,)", {"cu_seqlens_k": LENGTHS[:2]}),
    ]:
        given = varlen(**({"q": q, "k": pages, "v": pages} | {x: y for x, y in change.items() if x != "block_table"}))
        refused_by(flash_attn_varlen_func, kind, name, text, given=given, block_table=change.get("block_table", table))


HALF = {"dtype": torch.float16}
PACKED = [
    (flash_attn_kvpacked_func, "kv", lambda kv: (torch.zeros(2, 5, 4, 64, **HALF), kv), (2, 7, 2, 2, 64)),
    (flash_attn_qkvpacked_func, "qkv", lambda qkv: (qkv,), (2, 7, 3, 2, 64)),
    (
        flash_attn_varlen_kvpacked_func,
        "kv",
        lambda kv: (torch.zeros(5, 4, 64, **HALF), kv, LENGTHS, LENGTHS, 3, 3),
        (5, 2, 2, 64),
    ),
    (flash_attn_varlen_qkvpacked_func, "qkv", lambda qkv: (qkv, LENGTHS, 3), (5, 3, 2, 64)),
]


@pytest.mark.parametrize(("function", "name", "arguments", "shape"), PACKED)
def test_packed_tensors(function, name, arguments, shape):
    """Every error names the argument that the caller gave."""
    right = torch.zeros(shape, **HALF)
    for kind, text, wrong in [
        (TypeError, "NoneType", None),
        (TypeError, "list", [1.0]),
        (TypeError, "torch.float32", right.float()),
        (ValueError, "head_dim 12", right[..., :12]),
        (ValueError, "shape", right[0]),
        (ValueError, "shape", right[None]),
        (ValueError, "shape", right.transpose(-3, -2).repeat_interleave(2, -3)),
        (ValueError, "stride", right.transpose(-1, -2).contiguous().transpose(-1, -2)),
        (NotImplementedError, "grad", right.clone().requires_grad_()),
    ]:
        refused_by(function, kind, name, text, given=arguments(wrong))


@pytest.mark.parametrize(
    "name", [name for name in fa2_cute.__all__ if name.startswith("flash_attn_") and "kvcache" not in name]
)
@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("dropout_p", 0.5, NotImplementedError),
        ("causal", 3, TypeError),
        ("window_size", (-5, 0), ValueError),
        ("softcap", -2.0, ValueError),
        ("softmax_scale", math.nan, ValueError),
        ("alibi_slopes", torch.ones(7), ValueError),
        ("learnable_sink", torch.ones(7), ValueError),
    ],
)
def test_every_function_checks_every_option(name, option, value, kind):
    positional = {function.__name__: arguments(torch.zeros(shape, **HALF)) for function, _, arguments, shape in PACKED}
    positional |= {"flash_attn_func": tensors(), "flash_attn_varlen_func": varlen()}
    refused_by(getattr(fa2_cute, name), kind, option, given=positional[name], **{option: value})


def heads_first(query=(2, 4, 5, 64), key=(2, 4, 7, 64), value=(2, 4, 7, 64)):
    return tuple(torch.zeros(shape, **HALF) for shape in (query, key, value))


@pytest.mark.parametrize(
    ("kind", "name", "shapes", "options"),
    [
        (ValueError, "query", {"query": (64,)}, {}),
        (ValueError, "key", {"key": (2, 4, 7, 32)}, {}),
        (ValueError, "value", {"value": (2, 4, 8, 64)}, {}),
        (ValueError, "query, key, value", {"query": (3, 4, 5, 64)}, {}),
        (
            ValueError,
            "query, key, value",
            {"key": (3, 1, 4, 7, 64), "value": (3, 1, 4, 7, 64), "query": (2, 2, 4, 5, 64)},
            {},
        ),
        (ValueError, "key", {"key": (2, 2, 7, 64), "value": (2, 2, 7, 64)}, {}),
        (ValueError, "key", {"key": (2, 3, 7, 64), "value": (2, 3, 7, 64)}, {"enable_gqa": True}),
        (ValueError, "value", {"value": (2, 3, 7, 64)}, {"enable_gqa": True}),
        (ValueError, "query", {"query": (2, 4, 5, 60), "key": (2, 4, 7, 60)}, {}),
        (ValueError, "value", {"value": (2, 4, 7, 60)}, {}),
        (ValueError, "scale", {}, {"scale": math.inf}),
        (TypeError, "scale", {}, {"scale": "1"}),
        (TypeError, "is_causal", {}, {"is_causal": 2}),
        (NotImplementedError, "dropout_p", {}, {"dropout_p": 0.1}),
        (TypeError, "attn_mask", {}, {"attn_mask": [True]}),
        (TypeError, "attn_mask", {}, {"attn_mask": torch.zeros(5, 7, dtype=torch.float64)}),
        (TypeError, "attn_mask", {}, {"attn_mask": torch.zeros(5, 7, dtype=torch.bfloat16)}),
        (TypeError, "attn_mask", {}, {"attn_mask": torch.zeros(5, 7, dtype=torch.uint8)}),
        (ValueError, "attn_mask", {}, {"attn_mask": torch.zeros(5, 8)}),
        (ValueError, "attn_mask", {}, {"attn_mask": torch.zeros(3, 1, 5, 7)}),
        (ValueError, "attn_mask", {}, {"attn_mask": torch.zeros(2, 2, 5, 7)}),
        (ValueError, "attn_mask", {}, {"attn_mask": torch.zeros(1, 2, 4, 5, 7)}),
        (ValueError, "attn_mask", {}, {"attn_mask": torch.zeros(5, 7, device="meta")}),
    ],
)
def test_torchs_attention(kind, name, shapes, options):
    refused_by(scaled_dot_product_attention, kind, name, "takes", given=heads_first(**shapes), **options)


class Unreadable(ValueError):
    """Not the package's own: it cannot be made of a message alone."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        ValueError("v: 3 of 5 blocks failed"),
        ValueError("values: got 3, takes 2"),
        ValueError("v"),
        ValueError(),
        KeyError("v: got 3, takes 2"),
        Unreadable("v: got 3, takes 2", 7),
    ],
)
def test_errors_of_others_stay_as_they_are(monkeypatch, error):
    """Only what a check says about an argument is said of the caller's argument."""

    def attend(*args, **options):
        raise error

    monkeypatch.setattr(forward, "attend", attend)
    with pytest.raises(type(error)) as caught:
        scaled_dot_product_attention(*heads_first())
    assert caught.value is error


def test_a_renamed_error_has_the_original_as_its_cause():
    query, key, value = heads_first()
    with pytest.raises(TypeError, match=r"^value: got dtype torch\.float32") as caught:
        scaled_dot_product_attention(query, key, value.float())
    assert str(caught.value.__cause__) == str(caught.value).replace("value: ", "v: ", 1)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_torchs_attention_names_its_own_arguments(position):
    name = ("query", "key", "value")[position]
    for kind, text, change in [
        (TypeError, "NoneType", lambda x: None),
        (TypeError, "torch.float32", torch.Tensor.float),
        (ValueError, "sparse", torch.Tensor.to_sparse),
        (NotImplementedError, "grad", lambda x: x.requires_grad_()),
    ]:
        given = list(heads_first())
        given[position] = change(given[position])
        refused_by(scaled_dot_product_attention, kind, name, text, given=given)
