"""Every wrong input is refused at once, by an error that names the argument, what came and what is taken."""

import math
from dataclasses import replace

import pytest
import torch

from fa2_cute import arch, flash_attn_func, jit, tiling


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
    with pytest.raises(kind) as caught:
        flash_attn_func(q, k, v, **options)
    message = str(caught.value)
    assert message.startswith(texts[0]), message
    for text in texts:
        assert text in message, message
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


@pytest.mark.parametrize("head_dim", [0, 1, 8, 32, 63, 65, 96, 127, 129, 192, 256])
def test_unsupported_head_dim(head_dim):
    q, k, v = tensors((2, 5, 4, head_dim), (2, 7, 2, head_dim))
    refused(ValueError, "q", f"head_dim {head_dim}", "64", "128", q=q, k=k, v=v)


def test_head_dims_that_differ():
    q, k, v = tensors()
    refused(ValueError, "k", "128", "64", q=q, k=torch.zeros(2, 7, 2, 128, dtype=torch.float16), v=v)
    refused(ValueError, "v", "128", "64", q=q, k=k, v=torch.zeros(2, 7, 2, 128, dtype=torch.float16))


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_p", 0.1),
        ("window_size", (128, 0)),
        ("window_size", (-1, 1)),
        ("softcap", 30.0),
        ("alibi_slopes", torch.ones(4)),
    ],
)
def test_options_that_are_not_there_yet(name, value):
    q, k, v = tensors()
    refused(NotImplementedError, name, q=q, k=k, v=v, **{name: value})


@pytest.mark.parametrize("window", [5, (1,), (1, 2, 3), "ab", None])
def test_window_that_is_no_pair(window):
    q, k, v = tensors()
    refused((TypeError, ValueError, NotImplementedError), "window_size", q=q, k=k, v=v, window_size=window)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_inputs_that_require_grad(position):
    given = list(tensors())
    given[position].requires_grad_()
    refused(NotImplementedError, "q, k, v", "grad", q=given[0], k=given[1], v=given[2])


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
