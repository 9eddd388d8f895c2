"""What a person calls: flash-attn's functions on torch tensors."""

import math
import numbers
import sys

import torch

from . import arch, jit, tiling
from .arch import Architecture
from .problem import Problem
from .spec import MAX_GRID_YZ

LOG2_E = math.log2(math.e)  # the kernel's softmax is in base 2
FLOAT32_MAX = torch.finfo(torch.float32).max
VECTOR_BYTES, VECTOR_ELEMENTS = 16, 8  # what one cp.async moves of a 16-bit type
MAX_ROW_STRIDE = 2**34 - VECTOR_ELEMENTS  # the kernel counts a row's 16-byte vectors in 31 bits


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
):
    """Exact attention ``softmax(softmax_scale * q k^T + mask) v`` (FlashAttention-2, Dao 2023).

    Arguments (names and meaning of flash-attn's ``flash_attn_func``):
        q: (batch, query_len, heads, head_dim), float16 or bfloat16, head_dim 64 or 128.
        k, v: (batch, key_len, kv_heads, head_dim), same dtype and device; kv_heads divides heads, and query head h
            reads KV head ``h // (heads // kv_heads)``.
        softmax_scale: finite number, by default ``head_dim ** -0.5``.
        causal: query i sees keys ``j <= i + key_len - query_len`` (aligned to the bottom right).
        window_size: (-1, -1), or (-1, 0), which is ``causal``.
        deterministic: accepted; the forward pass always is.
        return_softmax_lse: also return the logsumexp.
        return_attn_probs: return (out, lse, None), as flash-attn's callers unpack it without dropout.
    Returns:
        out (batch, query_len, heads, head_dim) in q's dtype, contiguous; with ``return_softmax_lse`` (out, lse), lse
        (batch, heads, query_len) float32, natural logarithm. A query that sees no key gets 0 and -inf (flash-attn's
        logsumexp is +inf there). Where v holds an infinity or NaN, queries that see that key get what float64 gives,
        and queries of the same KV head that do not see it may get NaN (0 * inf).
        Scores and sums of weighted values are float32 inside: where they pass 2^128, so does the result.

    Any strides are taken as long as the last is 1. A tensor whose start or whose strides are not multiples of 16 bytes
    is copied first. CUDA tensors run on torch's current stream without synchronising; CPU tensors run the sm_120a
    kernel in the emulator.

    Before anything is launched it raises TypeError (an argument of the wrong type or dtype), ValueError (a shape,
    stride, device or number that is not taken) or NotImplementedError (an option that is not there yet, or inputs that
    require grad).
    """
    _refuse_unsupported(
        dropout_p=(dropout_p, 0.0),
        softcap=(softcap, 0.0),
        alibi_slopes=(alibi_slopes, None),
    )
    if causal not in (True, False):
        raise TypeError(f"causal: got {causal!r}, takes True or False")
    causal = bool(causal) or _is_causal_window(window_size)
    problem = Problem.of(q, k, v, causal=causal)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "q, k, v: got tensors that require grad, takes tensors that do not (or a call under torch.no_grad()): "
            "there is no backward pass yet"
        )
    scale_log2 = _scale_log2(softmax_scale, problem.head_dim)
    architecture = _architecture(q.device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() and not x.data_ptr():
            raise ValueError(f"{name}: got a {type(x).__name__} without memory of its own, takes one that has some")

    out = torch.empty(
        (problem.batch, problem.query_len, problem.heads, problem.head_dim), dtype=q.dtype, device=q.device
    )
    lse = torch.empty((problem.batch, problem.heads, problem.query_len), dtype=torch.float32, device=q.device)
    if problem.key_len == 0:
        out.zero_()
        lse.fill_(-math.inf)
    elif out.numel():
        kernel = jit.compiled(tiling.choose(problem, architecture), architecture)
        tensors = (_aligned(q), _aligned(k), _aligned(v), out, lse)
        if problem.batch <= MAX_GRID_YZ:
            _launch(kernel, problem, scale_log2, *tensors)
        else:
            for parts in zip(*(tensor.split(MAX_GRID_YZ) for tensor in tensors), strict=True):
                _launch(kernel, problem, scale_log2, *parts)
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_softmax_lse else out


def _scale_log2(softmax_scale: float | None, head_dim: int) -> float:
    """The scale of scores in base 2, as the kernel's float32 argument holds it."""
    if softmax_scale is None:
        return head_dim**-0.5 * LOG2_E
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(f"softmax_scale: got {type(softmax_scale).__name__}, takes a real number or None")
    try:
        scale_log2 = float(softmax_scale) * LOG2_E
    except OverflowError:  # an integer beyond float64
        scale_log2 = math.inf
    if not abs(scale_log2) <= FLOAT32_MAX:
        raise ValueError(
            f"softmax_scale: got {softmax_scale!r}, takes a finite number below {FLOAT32_MAX / LOG2_E:.4g}"
        )
    return scale_log2


def _is_causal_window(window_size) -> bool:
    """Whether a window is the causal one, (-1, 0), rather than none, (-1, -1)."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, takes a pair (left, right)")
    window = tuple(-1 if side is None else side for side in window_size)
    if window not in ((-1, -1), (-1, 0)):
        raise NotImplementedError(
            f"window_size: got {window_size!r}, takes (-1, -1) or (-1, 0), which is causal: no sliding window yet"
        )
    return window == (-1, 0)


def _launch(kernel: jit.Kernel, problem: Problem, scale_log2: float, *tensors: torch.Tensor):
    """(q, k, v, out, lse) on the device they are on; at most MAX_GRID_YZ sequences."""
    device = tensors[0].device
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel.function(*tensors, scale_log2)
    else:
        from . import emulation

        _outside_dynamo(emulation.announce_and_run)(kernel, problem, tensors, scale_log2)


def _outside_dynamo(function):
    """``function``, which torch.compile must not trace: it would unroll the emulator. Loads no compiler to say so."""
    dynamo = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


def _refuse_unsupported(**options):
    for name, (given, only) in options.items():
        if given is not only and (given is None or only is None or given != only):
            raise NotImplementedError(f"{name}: got {given!r}, takes {only!r} only: not supported yet")


def _architecture(device: torch.device) -> Architecture:
    if device.type == "cuda":
        return arch.by_capability(*torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        return arch.TARGET
    raise ValueError(f"q: got device {device}, takes a CUDA or a CPU tensor")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or its contiguous copy where a row does not start at a multiple of 16 bytes.

    The stride of an extent of 1 is never multiplied by anything but 0, so it is replaced rather than copied for.
    """
    x = x.resolve_neg()
    if _starts_aligned(x.data_ptr(), *x.stride()[:3]):
        return x
    strides = [0 if extent == 1 else stride for extent, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    if _starts_aligned(x.data_ptr(), *strides):
        return x.as_strided(x.shape, (*strides, 1))
    return x.clone(memory_format=torch.contiguous_format)


def _starts_aligned(start: int, batch_stride: int, row_stride: int, head_stride: int) -> bool:
    """Whether all rows start at multiples of 16 bytes and are not too far apart."""
    odd = start % VECTOR_BYTES or (batch_stride | row_stride | head_stride) % VECTOR_ELEMENTS
    return not odd and row_stride <= MAX_ROW_STRIDE
