"""The forward pass on torch tensors: checks a call with any of its options, picks the kernel, launches it."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from . import arch, jit, tiling
from ._torch_internals import EMPTY_STRIDED, current_cuda_device, likeness
from .arch import Architecture
from .checks import (
    FLOAT32_MAX,
    LOG2_E,
    check_mask_kind,
    has_memory,
    mask_of,
    scale_of,
    sequences_of,
    sink_of,
    slopes_of,
    softcap_of,
    window_of,
)
from .kept import Kept
from .problem import DTYPES, MAX_EXTENT, Problem
from .spec import CAUSAL, FULL, MAX_GRID_YZ, SMALLEST_SCALE, VECTOR_ELEMENTS, Features, ForwardSpec

if TYPE_CHECKING:
    from .launch import Recording

TUNING = "FA2_CUTE_TUNING"  # names a file of tiles, see explore/tuning.py
VECTOR_BYTES = 16  # what one cp.async moves
MAX_ROW_STRIDE = 2**31 - VECTOR_ELEMENTS  # the kernel counts a row's bytes in 32 bits
SPLIT_KEYS = 1024  # below there is little to split
MASK_DTYPES = {torch.bool: "bool", torch.float32: "float32", **DTYPES}


@dataclass(frozen=True, eq=False)
class Options:
    """What the kernels are told beside q, k, v and out; checked, and None where it is not in use.

    window: (left, right), None where unbounded. alibi_slopes (batch, heads) and learnable_sink (heads,) are float32,
    attn_mask (batch, heads, query_len, key_len) uint8 or floating, all of any strides; cu_seqlens (sequences + 1,).
    """

    softmax_scale: float
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    learnable_sink: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One checked call, ready to launch: q, k, v, out with four dimensions and lse with three (packed sequences: a
    batch of 1), of rows that start at multiples of 16 bytes. Where lse has no rows, none is written."""

    problem: Problem
    tensors: tuple[torch.Tensor, ...]
    options: Options

    def spec(self, architecture: Architecture, *, few_blocks: bool = False) -> ForwardSpec:
        """The specification that ``architecture`` runs this call with: the table's, or what the user has tuned.

        few_blocks: the table's for such calls, whatever their number.
        """
        problem, device = self.problem, self.tensors[0].device
        kind = (problem.dtype, problem.head_dim, problem.value_dim, problem.features, architecture)
        if few_blocks:
            spec = tiling.choose(*kind, few_blocks=True)
        else:
            spec = tiling.choose_for(problem, architecture, multiprocessors(device))
        if device.type == "cuda" and TUNING in os.environ and problem.features in (FULL, CAUSAL):
            from .explore import tuning

            of = tuning.ProblemClass(spec.dtype, spec.head_dim, spec.value_dim, spec.causal)
            return replace(spec, **(tuning.tuned(of, torch.cuda.get_device_name(device)) or {}))
        return spec

    def grid(self, spec: ForwardSpec) -> tuple[int, int, int]:
        """The launch's thread blocks."""
        return spec.grid(self.problem.batch, self.problem.heads, self.problem.query_len)

    def values(self) -> tuple:
        """The kernel's arguments, in the order of ``ForwardSpec.parameters``."""
        problem, options = self.problem, self.options
        scale, softcap = options.softmax_scale, options.softcap
        return (
            *self.tensors,
            scale * LOG2_E,
            problem.heads // problem.kv_heads,
            *options.window,
            softcap or None,
            # In float32's range: a factor of 0 would make NaN of a score of -inf.
            min(max(abs(scale) / softcap, SMALLEST_SCALE), FLOAT32_MAX) if softcap else None,
            options.alibi_slopes,
            options.learnable_sink,
            options.attn_mask,
            options.cu_seqlens_q,
            options.cu_seqlens_k,
        )

    def parts(self) -> Iterator["Call"]:
        """This call as several of no more sequences than a grid takes."""
        if self.problem.features.varlen or self.problem.batch <= MAX_GRID_YZ:
            yield self
            return
        for start in range(0, self.problem.batch, MAX_GRID_YZ):
            here = slice(start, start + MAX_GRID_YZ)
            tensors = tuple(x[here] for x in self.tensors)
            options = replace(
                self.options,
                alibi_slopes=None if self.options.alibi_slopes is None else self.options.alibi_slopes[here],
                attn_mask=None if self.options.attn_mask is None else self.options.attn_mask[here],
            )
            yield Call(replace(self.problem, batch=tensors[0].shape[0]), tensors, options)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; the emulator leaves none idle, however few the blocks: 0."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    wants_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of exact attention (FlashAttention-2, Dao 2023) with every option that the kernel has.

    Arguments:
        q: (batch, query_len, heads, head_dim), float16 or bfloat16. k: (batch, key_len, kv_heads, head_dim). v: (batch,
            key_len, kv_heads, value_dim). Query head h reads KV head ``h // (heads // kv_heads)``. head_dim and
            value_dim are multiples of 8 up to 256. With cu_seqlens: without the batch, sequences packed along the rows.
        softmax_scale: finite, by default ``head_dim ** -0.5``: logits are ``softmax_scale * q k^T``.
        window: (left, right): with ``offset = key_len - query_len`` query i sees keys from ``i + offset - left`` to
            ``i + offset + right``; None is unbounded. Causal is (None, 0). right may be negative.
        softcap: positive: logits become ``softcap * tanh(logits / softcap)``. 0: off.
        alibi_slopes: (heads,) or (batch, heads), float32: ``slope * |i + offset - j|`` is subtracted from logits.
        sink: (heads,), floating: one more logit of each row, without a value.
        mask: broadcastable to (batch, heads, query_len, key_len): bool, True where a key takes part, or float32 or q's
            dtype, added to the logits. Not with cu_seqlens.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32: sequence i is rows [cu[i], cu[i + 1]), clamped to the rows
            there are. On a GPU what they hold is not checked (that would wait for it); on the CPU it may not decrease.
    Returns:
        out: (batch, query_len, heads, value_dim) in q's dtype, contiguous; or (rows, heads, value_dim).
        lse: (batch, heads, query_len) float32, the natural logarithm of the sum of exponentials, sink included; or
            (heads, rows). A row that sees no key gives 0 and -inf (or the sink). So does a row of no sequence. Without
            ``wants_lse`` it may be None: then it has not been allocated, nor written.
    Raises TypeError (type or dtype), ValueError (shape, stride, device, number), before anything is launched.
    """
    problem, options, inputs = check(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        mask=mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    plain = alibi_slopes is sink is mask is cu_seqlens_q is cu_seqlens_k is None and problem.batch <= MAX_GRID_YZ
    keep = plain and q.is_cuda and all(type(x) is torch.Tensor for x in (q, k, v))
    # What has been decided on a copy, which lies otherwise, says nothing about the next tensors of these strides.
    keep = keep and all(ours is given for ours, given in zip(inputs, (q, k, v), strict=True))
    known_by = softmax_scale, window, softcap
    if problem.key_len >= SPLIT_KEYS:
        from . import split_calls

        split = split_calls.plan(problem, options, inputs)
        if split is not None:
            results = split.run()
            recording = split.recorded(*inputs) if keep else None
            if recording is not None:
                _keep(SplitPlan(recording), q, k, v, *known_by)
            return results
    out, lse, call = allocated(problem, options, inputs, wants_lse)
    if problem.key_len == 0 or problem.batch == 0:
        out.zero_()
        lse.fill_(-math.inf)
        if wants_lse and sink is not None:
            lse.copy_(options.learnable_sink[:, None].expand_as(lse))
    elif out.numel():
        architecture = architecture_of(q.device)
        kernel = jit.compiled(call.spec(architecture), architecture)
        launch(kernel, call)
        if keep:
            wanted = torch.empty(_lse_shape(problem), dtype=torch.float32, device="meta")
            made = metadata_of(out), metadata_of(wanted), lse.new_empty((0, 0, 0))
            _keep(KeptPlan(kernel.function, q.get_device(), *made, call.values()[5:]), q, k, v, *known_by)
    return out, lse if wants_lse else None


def attend_again(
    q, k, v, softmax_scale, window, softcap, wants_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """What ``attend`` gives, if a call like this one on CUDA tensors has been checked before; else None.

    So it is for a tensor of a subclass, and for one that wants a gradient. ``window`` as ``causal_window_of`` gives it:
    sides that are equal to those of a known call, as False is to 0, are not looked at again. Without ``wants_lse`` the
    logsumexp may be None: then it has not been allocated, nor written. To be asked where what q, k, v are now is what
    the kernel is to get: where ``likeness_is_all``, or below all that would still change them.

    A call waits for this: each attribute of a tensor costs it a tenth of a microsecond. Where tensors start is the
    launcher's to refuse; but that would launch on a tensor whose storage has been freed.
    """
    if not (type(q) is type(k) is type(v) is torch.Tensor) or q.is_nested or k.is_nested or v.is_nested:
        return None  # of nested ones ``likeness`` must not be asked, and of others not even whether they are
    for scale, sides, cap, is_alike, recent in _recent:
        same = (scale is softmax_scale or _equal(scale, softmax_scale)) and (cap is softcap or _equal(cap, softcap))
        if same and sides == window and is_alike(q, k, v):
            plan = recent
            break
    else:
        plan = _known(q, k, v, softmax_scale, window, softcap)
        if plan is None:
            return None
    near = q.data_ptr() < FAR or k.data_ptr() < FAR or v.data_ptr() < FAR
    if near and not (has_memory(q) and has_memory(k) and has_memory(v)):
        return None
    try:
        return plan.run(q, k, v, wants_lse)
    except (TypeError, ValueError):
        # The launcher looks at the alignment of starts anyway, and launches nothing if it is not what it was made for:
        # asked again here, that would cost some tenths of a microsecond. The general way knows what to do.
        return None


def _known(q, k, v, softmax_scale, window, softcap) -> "KeptPlan | SplitPlan | None":
    """The plan for calls like this one, which is then a recent one."""
    global _recent
    if not _may_be_known_by(softmax_scale, softcap):
        return None
    try:
        alike = _PLANS.get((q.shape, k.shape, softmax_scale, window, softcap), ())
    except TypeError:  # what cannot be hashed
        return None
    for is_alike, plan in alike:
        if is_alike(q, k, v):
            _recent = ((softmax_scale, window, softcap, is_alike, plan), *_recent[: MOST_RECENT - 1])
            return plan
    return None


def _keep(plan: "KeptPlan | SplitPlan", q, k, v, softmax_scale, window, softcap):
    """Have ``attend_again`` find ``plan`` for calls like this one: with these options, in torch's present modes."""
    if not _may_be_known_by(softmax_scale, softcap):
        return
    is_alike = likeness(q, k, v)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        asked = is_alike  # of the tensors alone; in grad mode they are refused

        def is_alike(*tensors: torch.Tensor) -> bool:
            return not torch.is_grad_enabled() and asked(*tensors)

    family = (q.shape, k.shape, softmax_scale, tuple(window), softcap)
    _PLANS[family] = ((is_alike, plan), *_PLANS.get(family, ())[: MOST_ALIKE - 1])


def _equal(known: float | None, given) -> bool:
    """Whether ``given`` is the same number, and of the same type: True and 1.0 are equal, but not both are scales."""
    return type(given) is float and known == given


def _may_be_known_by(softmax_scale, softcap) -> bool:
    """Whether plans may be looked up by these, which finds equal ones of any type (``_equal``)."""
    return type(softcap) is float and (softmax_scale is None or type(softmax_scale) is float)


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """What a call needs whose keys several blocks share (split_calls.py), once it has been checked."""

    recording: "Recording"

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wants_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of tensors like those it was made for; lse also for who does not want it, as splits are combined
        by theirs."""
        return self.recording.run(q, k, v)


@dataclass(frozen=True, eq=False)
class KeptPlan:
    """What a call of some shapes and strides on a CUDA device needs once those have been checked.

    device      its number
    out, lse    (shape, stride, dtype)
    no_lse      (0, 0, 0) float32, without memory: what the kernel takes where no logsumexp is wanted
    rest        arguments of ``function`` after q, k, v, out and lse
    """

    function: Callable
    device: int
    out: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    lse: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    no_lse: torch.Tensor
    rest: tuple

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wants_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of tensors like those it was made for, at multiples of 16 bytes; lse None if not wanted."""
        if self.device != current_cuda_device():
            with torch.cuda.device(self.device):
                return self.run(q, k, v, wants_lse)
        empty = EMPTY_STRIDED["cuda"]
        out = empty(*self.out)
        if not wants_lse:
            self.function(q, k, v, out, self.no_lse, *self.rest)
            return out, None
        lse = empty(*self.lse)
        self.function(q, k, v, out, lse, *self.rest)
        return out, lse


# A view of a freed storage starts at its offset, as if the storage were at 0; none is as large as this.
FAR = 2**40
# Plans by shapes and options, which are quick to look up; then by all else that counts: strides, dtypes, devices and
# modes, of which a program has few. A few MB; a program with more than that checks some of them again.
MOST_ALIKE = 32
_PLANS: Kept[tuple, "tuple[tuple[Callable[..., bool], KeptPlan | SplitPlan], ...]"] = Kept(4096)
# Plans used of late, with what they are known by: softmax_scale, window, softcap and likeness. To try two of them takes
# less time than to look up one; two, as many models have two kinds of attention in turn.
MOST_RECENT = 2
_recent: tuple[tuple, ...] = ()


def metadata_of(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """(shape, stride, dtype): what an empty tensor like x is made from."""
    return tuple(x.shape), x.stride(), x.dtype


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[Problem, Options, tuple[torch.Tensor, ...]]:
    """(Problem, Options, (q, k, v)): ``attend``'s arguments checked, q, k, v with rows that start at 16 bytes."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, takes a torch.Tensor")
        if tensor.is_nested:
            raise TypeError(f"{name}: got a nested tensor, takes one with strides (sequences: flash_attn_varlen_func)")
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    left, right = window_of(window)
    softcap = softcap_of(softcap)
    if mask is not None:
        check_mask_kind(mask, q, varlen)
    features = Features(
        left=left is not None,
        right=right is not None,
        varlen=varlen,
        softcap=softcap > 0.0,
        alibi=alibi_slopes is not None,
        sink=sink is not None,
        mask=None if mask is None else MASK_DTYPES[mask.dtype],
    )
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, q) if varlen else 0
    problem = Problem.of(q, k, v, features, sequences)
    options = Options(
        scale_of(softmax_scale, problem.head_dim),
        # A window that reaches past every row stays one; what is beyond the rows must not overflow a sum.
        (
            left if left is None else min(left, problem.query_len + problem.key_len),
            right if right is None else max(min(right, problem.query_len), -MAX_EXTENT),
        ),
        softcap,
        None if alibi_slopes is None else slopes_of(alibi_slopes, problem, q),
        None if sink is None else sink_of(sink, problem, q),
        None if mask is None else mask_of(mask, problem),
        None if cu_seqlens_q is None else dense_vector(cu_seqlens_q),
        None if cu_seqlens_k is None else dense_vector(cu_seqlens_k),
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.device.type in ("cuda", "cpu") and not has_memory(x):
            raise ValueError(f"{name}: got a {type(x).__name__} without memory of its own, takes one that has some")
    return problem, options, (aligned(q), aligned(k), aligned(v))


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor, Call]:
    """(out, lse, call): ``attend``'s arguments checked, its results allocated, nothing computed.

    Launching ``call`` writes out and lse with the forward kernel; there must be a key and an element of out.
    """
    return allocated(*check(q, k, v, **options))


def allocated(
    problem: Problem, options: Options, inputs: tuple[torch.Tensor, ...], wants_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor, Call]:
    """(out, lse, call) of a checked call, as ``prepare`` gives them; where the logsumexp is not wanted, lse has no rows
    and no memory."""
    q = inputs[0]
    out = torch.empty((*q.shape[:-1], problem.value_dim), dtype=q.dtype, device=q.device)
    shape = _lse_shape(problem)
    lse = torch.empty(shape if wants_lse else (0,) * len(shape), dtype=torch.float32, device=q.device)
    tensors = (*inputs, out, lse)
    if problem.features.varlen:
        tensors = tuple(x.unsqueeze(0) for x in tensors)
    return out, lse, Call(problem, tensors, options)


def _lse_shape(problem: Problem) -> tuple[int, ...]:
    rows = (problem.heads, problem.query_len)
    return rows if problem.features.varlen else (problem.batch, *rows)


def launch(kernel: jit.Kernel, call: Call):
    """Run ``call`` on the device its tensors are on: torch's current stream there, or the emulator."""
    device = call.tensors[0].device
    for part in call.parts():
        if device.type == "cuda":
            with on_device(device):
                kernel.function(*part.values())
        else:
            from . import emulation

            run = outside_dynamo(emulation.announce_and_run)
            run(kernel, part.grid(kernel.spec), part.values(), key_tiles(part.problem, kernel.spec))


def key_tiles(problem: Problem, spec: ForwardSpec) -> int:
    """About how many steps a block makes."""
    tiles = -(-problem.key_len // spec.tile_n)
    if problem.features.varlen:
        tiles = -(-tiles // max(problem.batch, 1))
    if spec.causal and problem.query_len > spec.tile_m:
        tiles = (tiles + 1) // 2
    return tiles


def on_device(device: torch.device):
    """Where launches go, for a with statement."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():  # to enter a device costs microseconds
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def outside_dynamo(function):
    """``function``, which torch.compile must not trace: it would unroll the emulator. Loads no compiler to say so."""
    dynamo = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


def architecture_of(device: torch.device) -> Architecture:
    """What runs tensors on ``device``: the GPU's own, or sm_120 (in the emulator) for CPU tensors."""
    if device.type == "cuda":
        return arch.by_capability(*torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        return arch.TARGET
    raise ValueError(f"q: got device {device}, takes a CUDA or a CPU tensor")


def dense_vector(x: torch.Tensor) -> torch.Tensor:
    """``x`` (n,) with a stride of 1, which torch does not insist on where n is 1, but a compiled launcher does."""
    return x.contiguous().as_strided(x.shape, (1,))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or its contiguous copy where a row does not start at a multiple of 16 bytes.

    The stride of an extent of 1 is never multiplied by anything but 0, so it is replaced rather than copied for.
    """
    x = x.resolve_neg()
    if x.data_ptr() % VECTOR_BYTES == 0 and _rows_aligned(x):
        return x
    strides = [0 if extent == 1 else stride for extent, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    if x.data_ptr() % VECTOR_BYTES == 0 and _strides_aligned((*strides, 1)):
        return x.as_strided(x.shape, (*strides, 1))
    return x.clone(memory_format=torch.contiguous_format)


def _rows_aligned(x: torch.Tensor) -> bool:
    """Whether the rows of ``x`` (..., length, heads, head_dim) start at multiples of 16 bytes if the first does."""
    return _strides_aligned(x.stride())


def _strides_aligned(strides: tuple[int, ...]) -> bool:
    """Whether steps of ``strides`` (..., length, heads, 1) are multiples of 16 bytes, and rows not too far apart."""
    return not any(stride % VECTOR_ELEMENTS for stride in strides[:-1]) and strides[-3] <= MAX_ROW_STRIDE
