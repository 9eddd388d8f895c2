"""Options of a call, checked one by one: each function names its argument, what came and what is taken."""

import math
import numbers
from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from ._torch_internals import in_forward_ad
from .problem import DTYPES, Problem

WHOLE = (-1, -1)  # flash-attn's window_size over all keys, which its functions have by default
LOG2_E = math.log2(math.e)  # the kernels' softmax is in base 2
FLOAT32_MAX = torch.finfo(torch.float32).max


def has_memory(x: torch.Tensor) -> bool:
    """Whether a strided tensor's elements, if any, are somewhere: its storage has not been freed, nor ever been.

    A view of a freed storage starts where it would start in a storage at address 0.
    """
    return not x.numel() or x.data_ptr() > x.storage_offset() * x.element_size()


def scale_of(softmax_scale: float | None, head_dim: int) -> float:
    """``softmax_scale`` as a number, or its default."""
    if softmax_scale is None:
        return head_dim**-0.5
    number = _number("softmax_scale", softmax_scale, "a real number or None")
    if not abs(number) * LOG2_E <= FLOAT32_MAX:
        raise ValueError(
            f"softmax_scale: got {softmax_scale!r}, takes a finite number below {FLOAT32_MAX / LOG2_E:.4g}"
        )
    return number


def softcap_of(softcap: float) -> float:
    """``softcap`` as a number; 0 is off."""
    number = _number("softcap", softcap, "a real number")
    if not 0.0 <= number <= FLOAT32_MAX or 0.0 < number < 2.0**-126:
        raise ValueError(f"softcap: got {softcap!r}, takes 0 (off) or a positive float32")
    return number


def _number(name: str, value, takes: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {type(value).__name__}, takes {takes}")
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf


def window_of(window) -> tuple[int | None, int | None]:
    """(left, right), None where unbounded."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window_size: got {window!r}, takes a pair (left, right)")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise TypeError(f"window_size: got {window!r}, takes integers or None")
    left, right = window
    if left is not None and left < 0:
        raise ValueError(f"window_size: got a left side of {left}, takes 0 or more, or None")
    return left, right


def sides_of(window_size) -> tuple[int | None, int | None]:
    """flash-attn's ``window_size`` as (left, right), None where unbounded: -1 or None there."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, takes a pair (left, right)")
    for side in window_size:
        # torch.SymInt: of a graph in which it is not known yet.
        if side is not None and (isinstance(side, bool) or not isinstance(side, (numbers.Integral, torch.SymInt))):
            raise TypeError(f"window_size: got {window_size!r}, takes a pair of integers or None")
        if side is not None and side < -1:
            raise ValueError(f"window_size: got {window_size!r}, takes numbers of keys, or -1 or None for unbounded")
    left, right = (None if side is None or side == -1 else side for side in window_size)
    return left, right


def _is_whole(window_size) -> bool:
    """Whether it is ``WHOLE``, whose -1 is no -1.0."""
    return type(window_size) is tuple and window_size == WHOLE and type(window_size[0]) is type(window_size[1]) is int


def causal_window_of(causal, window_size) -> tuple[int | None, int | None]:
    """flash-attn's ``causal`` and ``window_size`` as (left, right), None where unbounded."""
    if type(causal) is bool and (window_size is WHOLE or _is_whole(window_size)):  # the usual: the rest takes longer
        return (None, 0) if causal else (None, None)
    if causal not in (True, False):
        raise TypeError(f"causal: got {causal!r}, takes True or False")
    left, right = sides_of(window_size)
    return left, 0 if causal else right


def refuse_gradients(arguments: Iterable[tuple[str, object]], reason: str):
    """Raises NotImplementedError where a gradient would be lost.

    arguments: names and what was given for them; what is no tensor is left to other checks. reason: why there is none.
    """
    graded, dual = torch.is_grad_enabled(), in_forward_ad()
    if not graded and not dual:
        return
    for name, x in arguments:
        if not isinstance(x, torch.Tensor):
            continue
        if graded and x.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires grad, takes one that does not (or a call under torch.no_grad()): "
                f"{reason}"
            )
        if dual and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: got a tensor with a forward-mode tangent, takes one without: {reason}")


def sequences_of(cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, q: torch.Tensor) -> int:
    """How many sequences two vectors of cumulative lengths tell apart; their numbers are looked at on the CPU only."""
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, torch.Tensor):
            raise TypeError(f"{name}: got {type(cu).__name__}, takes a torch.Tensor")
        if cu.dtype != torch.int32:
            raise TypeError(f"{name}: got dtype {cu.dtype}, takes torch.int32")
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise ValueError(f"{name}: got shape {tuple(cu.shape)}, takes (sequences + 1,)")
        if cu.device != q.device:
            raise ValueError(f"{name}: got device {cu.device}, takes q's device {q.device}")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: got shape {tuple(cu_seqlens_k.shape)}, takes cu_seqlens_q's {tuple(cu_seqlens_q.shape)}"
        )
    if q.device.type == "cpu":
        refuse_decreasing("cu_seqlens_q", cu_seqlens_q)
        refuse_decreasing("cu_seqlens_k", cu_seqlens_k)
    return cu_seqlens_q.shape[0] - 1


def refuse_decreasing(name: str, cu_seqlens: torch.Tensor):
    """Raises ValueError where lengths between cumulative ones would be negative; looks at the numbers.

    So it is for CPU tensors, whose numbers are at hand: to ask a GPU would be to wait for it. There such sequences give
    what they give (``flash_attn_varlen_func``), and the emulator would report that two of them write the same rows.
    """
    if not has_memory(cu_seqlens):
        raise ValueError(f"{name}: got a tensor without memory of its own, takes one that has some")
    decreases = (cu_seqlens[1:] < cu_seqlens[:-1]).nonzero()
    if len(decreases):
        at = int(decreases[0]) + 1
        raise ValueError(
            f"{name}: got {int(cu_seqlens[at])} after {int(cu_seqlens[at - 1])} (index {at}), takes numbers that do "
            "not decrease"
        )


def slopes_of(slopes: torch.Tensor, problem: Problem, q: torch.Tensor) -> torch.Tensor:
    """(batch, heads)."""
    if not isinstance(slopes, torch.Tensor):
        raise TypeError(f"alibi_slopes: got {type(slopes).__name__}, takes a torch.Tensor or None")
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes: got dtype {slopes.dtype}, takes torch.float32")
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes: got device {slopes.device}, takes q's device {q.device}")
    batch, heads = problem.batch, problem.heads
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes: got shape {tuple(slopes.shape)}, takes (heads,) = ({heads},) "
            f"or (batch, heads) = ({batch}, {heads})"
        )
    return slopes.resolve_neg().expand(batch, heads)


def sink_of(sink: torch.Tensor, problem: Problem, q: torch.Tensor) -> torch.Tensor:
    """(heads,) float32, contiguous."""
    if not isinstance(sink, torch.Tensor):
        raise TypeError(f"learnable_sink: got {type(sink).__name__}, takes a torch.Tensor or None")
    if sink.dtype not in (torch.float32, *DTYPES):
        raise TypeError(f"learnable_sink: got dtype {sink.dtype}, takes float32, float16 or bfloat16")
    if sink.device != q.device:
        raise ValueError(f"learnable_sink: got device {sink.device}, takes q's device {q.device}")
    if sink.shape != (problem.heads,):
        raise ValueError(f"learnable_sink: got shape {tuple(sink.shape)}, takes (heads,) = ({problem.heads},)")
    return sink.resolve_neg().to(torch.float32).contiguous().as_strided(sink.shape, (1,))


def check_mask_kind(mask: torch.Tensor, q: torch.Tensor, varlen: bool):
    """Refuses what is no mask for q, whatever its shape."""
    if varlen:
        raise ValueError("attn_mask: takes calls of one length a batch, not packed sequences")
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask: got {type(mask).__name__}, takes a torch.Tensor or None")
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise TypeError(f"attn_mask: got dtype {mask.dtype}, takes torch.bool, torch.float32 or q's dtype {q.dtype}")
    if mask.device != q.device:
        raise ValueError(f"attn_mask: got device {mask.device}, takes q's device {q.device}")


def mask_of(mask: torch.Tensor, problem: Problem) -> torch.Tensor:
    """(batch, heads, query_len, key_len), uint8 for bool."""
    shape = (problem.batch, problem.heads, problem.query_len, problem.key_len)
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(extent not in (1, full) for extent, full in zip(padded, shape, strict=True)):
        raise ValueError(f"attn_mask: got shape {tuple(mask.shape)}, takes one that broadcasts to {shape}")
    mask = mask.resolve_neg()
    return (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(shape)
