"""Attention as an operator of torch: what torch.compile, torch.export and other tracers see.

``attend`` is the one door from the public functions to the kernels (but that ``flash_attn_func`` does its first step
itself, and goes on with ``attend_anew``). A plain eager call goes through it straight to ``forward.py``; where torch
traces, compiles, fakes or transforms, the call becomes the operator ``torch.ops.fa2_cute.attend``, whose schema and
fake implementation are here. A saved graph that holds the operator needs ``import fa2_cute.ops`` before it is loaded.
"""

import torch

from . import forward
from ._torch_internals import any_autocast_is_on, below_autograd, is_watched, likeness_is_all, not_compiled
from .checks import refuse_gradients, sequences_of

_NAMES = ("q", "k", "v", "alibi_slopes", "learnable_sink", "attn_mask")  # what a gradient could flow into
_NO_GRADIENT = "there is no backward pass yet"

_REFUSALS = (TypeError, ValueError, NotImplementedError)  # what a check raises: these types, no subclass of them

_library = torch.library.Library("fa2_cute", "DEF")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, *, float? softmax_scale=None, SymInt? window_left=None, "
    "SymInt? window_right=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sink=None, Tensor? mask=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? block_table=None, SymInt? max_seqlen_q=None) "
    "-> (Tensor, Tensor)",
    # A last stride other than 1 is refused: a compiler must not choose such a layout for an input.
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)


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
    block_table: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    wants_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``forward.attend`` for callers inside and outside of torch's tracers: same arguments, results and errors.

    With ``block_table`` (batch, pages a sequence) int32, k and v are pages (pages, page_size, kv_heads, head_dim) as
    ``decode.decode`` takes them, and ``max_seqlen_q`` is its hint.

    Under ``torch.autocast``, floating q, k and v are cast to its dtype first (float64 is left, as torch leaves it).

    Raises NotImplementedError, besides what ``forward.attend`` raises, where a gradient would be lost: an input that
    requires grad while grad mode is on, or one with a forward-mode tangent.
    """
    fast = alibi_slopes is sink is mask is cu_seqlens_q is cu_seqlens_k is block_table is None
    if fast and likeness_is_all():
        results = forward.attend_again(q, k, v, softmax_scale, window, softcap, wants_lse)
        if results is not None:
            return results
    return attend_anew(
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
        block_table=block_table,
        max_seqlen_q=max_seqlen_q,
        wants_lse=wants_lse,
    )


def attend_anew(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: tuple[int | None, int | None] = (None, None),
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    wants_lse: bool = True,
    **options,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``attend`` for a caller whom ``forward.attend_again`` had nothing to give, where it can be asked: where
    ``likeness_is_all`` and there are no further tensors."""
    if _autocast_is_on(q):
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
        if isinstance(mask, torch.Tensor) and mask.dtype in (torch.float16, torch.bfloat16):
            mask = mask.to(q.dtype)
    inputs = (q, k, v, alibi_slopes, sink, mask)
    refuse_gradients(zip(_NAMES, inputs, strict=True), _NO_GRADIENT)
    options |= {"alibi_slopes": alibi_slopes, "sink": sink, "mask": mask}
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        options |= {"block_table": block_table, "max_seqlen_q": max_seqlen_q}
    if is_eager(q, k, v):
        asked = likeness_is_all()  # not so under autocast, for one: then a call may be known by what q, k, v are now
        return (_launch if asked else _launch_again)(q, k, v, window=window, wants_lse=wants_lse, **options)
    # What the operator's schema promises is there, also where nobody wants it.
    return torch.ops.fa2_cute.attend.default(q, k, v, window_left=window[0], window_right=window[1], **options)


def attend_named(names: dict[str, str], q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``attend`` for a caller whose arguments have other names: ``names`` maps q, k, ... to them, for the errors.

    Only errors of this package's checks are changed, which begin with an argument's name and what came or is taken;
    the new one has the old one as its cause.
    """
    try:
        return attend(q, k, v, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        message = str(error)
        for name, of_caller in names.items():
            if type(error) in _REFUSALS and message.startswith((f"{name}: got ", f"{name}: takes ")):
                raise type(error)(of_caller + message[len(name) :]) from error
        raise


def _launch_again(
    q, k, v, *, window, softmax_scale=None, softcap=0.0, wants_lse=True, **others
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``_launch``, unchecked where a call like this one has been checked before."""
    results = None
    if all(x is None for x in others.values()):
        results = forward.attend_again(q, k, v, softmax_scale, window, softcap, wants_lse)
    if results is None:
        options = {"window": window, "softmax_scale": softmax_scale, "softcap": softcap, **others}
        results = _launch(q, k, v, wants_lse=wants_lse, **options)
    return results


def _launch(
    q, k, v, *, wants_lse, block_table=None, max_seqlen_q=None, **options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernels of prompts; or those of caches, where keys and values are in pages."""
    if block_table is None:
        return forward.attend(q, k, v, wants_lse=wants_lse, **options)
    return _attend_pages(q, k, v, block_table=block_table, max_seqlen_q=max_seqlen_q, **options)


def _attend_pages(q, k, v, *, cu_seqlens_q, cu_seqlens_k, mask=None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    from .decode import decode

    if isinstance(q, torch.Tensor):
        sequences_of(cu_seqlens_q, cu_seqlens_k, q)
    if mask is not None:
        raise ValueError("attn_mask: got a tensor, takes None with a block_table")
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return decode(q, k, v, cache_seqlens=lengths, cu_seqlens_q=cu_seqlens_q, **options)


# Python behind a compiled graph is not to be compiled in turn: the emulator would be unrolled.
@not_compiled
def _run(q, k, v, *, window_left=None, window_right=None, **options):
    """The operator on CUDA and CPU tensors."""
    return _launch_again(q, k, v, window=(window_left, window_right), **options)


def _fake(q, k, v, *, cu_seqlens_q=None, block_table=None, **options):
    """Shapes, dtypes and devices of the results; wrong inputs are refused when the operator runs."""
    of_q = 4 if cu_seqlens_q is None else 3
    of_keys = of_q if block_table is None else 4
    for name, x, rank in (("q", q, of_q), ("k", k, of_keys), ("v", v, of_keys)):
        if x.dim() != rank:
            raise ValueError(f"{name}: got {x.dim()} dimensions {tuple(x.shape)}, takes {rank}")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    *batch, rows, heads = q.shape[:-1]
    return out, q.new_empty((*batch, heads, rows), dtype=torch.float32)


@not_compiled
def _autograd(q, k, v, **options):
    """Refuses what ``attend`` refuses, also for a caller of the operator itself, and goes on below autograd."""
    inputs = (q, k, v, options.get("alibi_slopes"), options.get("sink"), options.get("mask"))
    refuse_gradients(zip(_NAMES, inputs, strict=True), _NO_GRADIENT)
    with below_autograd():
        return torch.ops.fa2_cute.attend.default(q, k, v, **options)


_library.impl("attend", _run, "CPU")
_library.impl("attend", _run, "CUDA")
_library.impl("attend", _autograd, "Autograd")
torch.library.register_fake("fa2_cute::attend", _fake, lib=_library)


def is_eager(q, k, v) -> bool:
    """Whether nothing watches this call: no tracer, no mode, no transform, no tensor subclass."""
    return not (torch.compiler.is_compiling() or is_watched() or _subclass(q) or _subclass(k) or _subclass(v))


def _subclass(x) -> bool:
    return type(x) is not torch.Tensor and isinstance(x, torch.Tensor)


def _autocast_is_on(x) -> bool:
    if not any_autocast_is_on():  # the usual, and sooner known
        return False
    kind = x.device.type if isinstance(x, torch.Tensor) else None
    return kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)


def _autocast(x):
    """``x`` in autocast's dtype, where autocast would cast it for torch's own attention."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
