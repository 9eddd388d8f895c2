"""Append and attention over a cache, in one call or each alone: launched, and as operators for torch's tracers.

``append_and_attend`` and ``append`` are the two doors from the public functions to the kernels. A plain eager call goes
straight there; where torch traces, compiles or fakes, it becomes ``torch.ops.fa2_cute.with_kvcache`` or
``append_kvcache``, which say that they change the caches, or ``attend_kvcache``, which changes nothing, if there are no
new tokens.
"""

import torch

from . import ops
from ._torch_internals import below_autograd, is_unwatched
from .append import prepare_append
from .cache_call import CacheCall
from .cache_checks import bytes_of
from .cache_spec import VECTOR_BYTES
from .checks import causal_window_of, has_memory, refuse_gradients
from .decode import prepare
from .forward import architecture_of, dense_vector
from .kept import Kept
from .launch import Recording, record

_NEW = (
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=True, Tensor? cache_seqlens=None, "
    "SymInt? cache_seqlen=None, Tensor? cache_batch_idx=None, Tensor? block_table=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None"
)
_OPTIONS = (
    f"{_NEW}, Tensor? cache_leftpad=None, float? softmax_scale=None, bool causal=False, SymInt? window_left=None, "
    "SymInt? window_right=None, float softcap=0.0, Tensor? alibi_slopes=None, SymInt num_splits=0, "
    "Tensor? learnable_sink=None"
)
# The kernels take only some layouts, and a cache as it lies in memory: a compiler must not choose others.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("fa2_cute", "FRAGMENT")
_library.define(
    f"with_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, *, {_OPTIONS}) "
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    f"attend_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, *, {_OPTIONS}) -> (Tensor, Tensor)", tags=_TAGS
)
_library.define(
    f"append_kvcache(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, *, {_NEW}) -> ()", tags=_TAGS
)

NO_GRADIENT = "there is no backward pass through a cache"


def append_and_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    cache_seqlens: int | torch.Tensor | None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache``, whose arguments these are; inside and outside of torch's tracers."""
    if ops._autocast_is_on(q):
        q, k, v = ops._autocast(q), ops._autocast(k), ops._autocast(v)
    given = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v))
    refuse_gradients((*given, *options.items()), NO_GRADIENT)
    if ops.is_eager(q, k_cache, v_cache):
        window = {"causal": causal, "window_size": window_size}
        return _launch(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, **window, **options)
    left, right = causal_window_of(causal, window_size)
    options |= _lengths(cache_seqlens) | {"causal": causal, "window_left": left, "window_right": right}
    if k is None and v is None:
        return torch.ops.fa2_cute.attend_kvcache.default(q, k_cache, v_cache, **options)
    return torch.ops.fa2_cute.with_kvcache.default(q, k_cache, v_cache, k, v, **options)


def attend_again(
    rows: tuple, others: tuple, factors: tuple, window_size, options: tuple
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(out, lse) of ``flash_attn_with_kvcache``, if a call like this one has been recorded; else None.

    rows, others, factors and options as ``_launch`` has them.
    """
    if not is_unwatched():
        return None
    if torch.is_grad_enabled():
        for x in (*rows, *others, *factors):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return None
    recording = _RECORDINGS.get(_key(rows, (*others, *factors), window_size, options))
    return None if recording is None else recording.run(*_inputs(rows, others, factors))


def append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: int | torch.Tensor,
    **options,
):
    """``append_to_kvcache``, whose arguments these are; inside and outside of torch's tracers."""
    if ops._autocast_is_on(k):
        k, v = ops._autocast(k), ops._autocast(v)
    given = (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v))
    refuse_gradients((*given, *options.items()), NO_GRADIENT)
    if ops.is_eager(k, k_cache, v_cache):
        _launch_append(k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, **options)
    else:
        options |= _lengths(cache_seqlens)
        torch.ops.fa2_cute.append_kvcache.default(k_cache, v_cache, k, v, **options)


def _lengths(cache_seqlens: int | torch.Tensor | None) -> dict:
    """As the operators take them: a tensor and a number are two arguments there."""
    return {"cache_seqlens" if isinstance(cache_seqlens, torch.Tensor) else "cache_seqlen": cache_seqlens}


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch as the last call like this one did, or check everything, launch and remember it."""
    rows = (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin)
    others = (cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    factors = (alibi_slopes, learnable_sink, k_descale, v_descale)
    options = (rotary_interleaved, softmax_scale, causal, softcap, num_splits)
    key = _key(rows, (*others, *factors), window_size, options)
    recording = None if key is None else _RECORDINGS.get(key)
    if recording is not None:
        return recording.run(*_inputs(rows, others, factors))
    call = CacheCall.of(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        causal=causal,
        window_size=window_size,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    plan = prepare(
        q,
        k_cache,
        v_cache,
        softmax_scale=softmax_scale,
        window=call.window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=learnable_sink,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
    )
    lengths, launches = _on_device(call, cache_seqlens, q), []
    if k is not None:
        appending = prepare_append(
            k,
            v,
            k_cache,
            v_cache,
            lengths,
            capacity=call.capacity,
            q=q,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            ordered=call.ordered,
            cache_batch_idx=cache_batch_idx,
            block_table=block_table,
            k_descale=call.k_descale,
            v_descale=call.v_descale,
        )
        lengths = appending.lengths
        q = q if appending.rotated is None else appending.rotated
        launches += [] if appending.launch is None else [appending.launch]
    architecture = architecture_of(q.device)
    if plan.spec is None:  # no query, or no slot
        for launch in launches:
            launch.run(architecture)
        return plan.run(q, lengths)
    out = torch.empty((*q.shape[:3], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    launches += plan.launches(q, dense_vector(lengths), out, lse)
    for launch in launches:
        launch.run(architecture)
    if key is not None and (k is None or appending.launch is not None):
        _keep(key, record(launches, _inputs(rows, others, factors), (out, lse), architecture))
    return out, lse


def _launch_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
):
    """``_launch`` without queries."""
    tensors = (k, v, k_cache, v_cache, rotary_cos, rotary_sin)
    others = (cache_seqlens, cache_batch_idx, block_table, k_descale, v_descale)
    key = _key(tensors, others, (), (rotary_interleaved,))
    recording = None if key is None else _RECORDINGS.get(key)
    if recording is not None:
        recording.run(*_append_inputs(tensors, others))
        return
    rotary = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
    where = {"cache_batch_idx": cache_batch_idx, "block_table": block_table}
    factors = {"k_descale": k_descale, "v_descale": v_descale}
    call = CacheCall.appending(k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, **rotary, **where, **factors)
    lengths = _on_device(call, cache_seqlens, k)
    factors = {"k_descale": call.k_descale, "v_descale": call.v_descale}
    appending = prepare_append(k, v, k_cache, v_cache, lengths, capacity=call.capacity, **rotary, **where, **factors)
    if appending.launch is None:
        return
    architecture = architecture_of(k.device)
    appending.launch.run(architecture)
    if key is not None:
        _keep(key, record([appending.launch], _append_inputs(tensors, others), (), architecture))


def _on_device(call: CacheCall, cache_seqlens: int | torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """(batch,) lengths, on x's device."""
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    tokens = call.capacity if cache_seqlens is None else cache_seqlens
    return torch.full((call.batch,), tokens, dtype=torch.int32, device=x.device)


def _keep(key: tuple, recording: Recording | None):
    if recording is not None:
        _RECORDINGS[key] = recording


PLAIN = {bool, int, float, type(None)}  # of options that a recording is kept for
TENSORS = {torch.Tensor, torch.nn.Parameter}  # likewise
# Some MB; a program with more kinds of calls than that checks some of them again.
_RECORDINGS: Kept[tuple, Recording] = Kept(4096)


def _key(rows: tuple, others: tuple, window, options: tuple) -> tuple | None:
    """All that the checks of a call look at, or None for a call that is checked each time.

    rows: tensors whose start matters, or None. A number in the place of a tensor, a tensor of another class, a negated
    view, rows whose storage has been freed, and options of unusual types are for the checks to say something about.
    (Whether a tensor requires grad has been looked at before.)
    """
    if type(rows[0]) not in TENSORS or not isinstance(others[0], torch.Tensor):
        return None
    parts, start = [], 0
    for x in (*rows, *others):
        if x is None:
            parts.append(None)
        elif type(x) not in TENSORS or x.layout is not torch.strided or x.is_neg():
            return None
        else:
            parts.append((x.device, x.dtype, x.shape, x.stride()))
    for x in rows:
        if x is not None:
            if not has_memory(x):
                return None
            start |= x.data_ptr()
    if start % VECTOR_BYTES or type(window) is not tuple:
        return None
    kinds = tuple(map(type, (*window, *options)))  # True is not 1 here, though they are equal
    if not PLAIN.issuperset(kinds):
        return None
    return (*parts, window, options, kinds)


def _inputs(rows: tuple, others: tuple, factors: tuple) -> list[torch.Tensor | None]:
    """What launches are recorded for: the tensors of a call as the kernels take them, where that takes no copy."""
    q, k_cache, v_cache, *_ = rows
    slopes, sink, *descales = factors
    if slopes is not None and slopes.dim() != 2:
        slopes = slopes.expand(q.shape[0], q.shape[2])
    narrow = (None, None)
    if k_cache.element_size() == 1:
        descales = [x if x is None or x.dim() >= 2 else x.expand(q.shape[0], k_cache.shape[2]) for x in descales]
        narrow = bytes_of(k_cache), bytes_of(v_cache)  # an append writes FP8 numbers, the attention reads bytes
    return [_plain(x) for x in (*rows, *others, slopes, sink, *descales, *narrow)]


def _append_inputs(tensors: tuple, others: tuple) -> tuple[torch.Tensor | None, ...]:
    """The same for an append alone; the queries of one that rotates are none of k's rows."""
    k, kv_heads, rotates = tensors[0], tensors[2].shape[2], tensors[4] is not None
    *where, k_descale, v_descale = others
    descales = [x if x is None or x.dim() >= 2 else x.expand(k.shape[0], kv_heads) for x in (k_descale, v_descale)]
    return tuple(map(_plain, (*tensors, *where, *descales, k[:, :0] if rotates else None)))


def _plain(x: torch.Tensor | None) -> torch.Tensor | None:
    """x for a launcher that is told nothing of parameters and gradients."""
    return x if x is None or (type(x) is torch.Tensor and not x.requires_grad) else x.detach()


def _with_kvcache(q, k_cache, v_cache, k, v, *, cache_seqlens=None, cache_seqlen=None, **options):
    """Either operator on CUDA and CPU tensors; opaque to a tracer, so the emulator is never traced."""
    window = (options.pop("window_left", None), options.pop("window_right", None))
    lengths = cache_seqlen if cache_seqlens is None else cache_seqlens
    return _launch(q, k_cache, v_cache, k, v, cache_seqlens=lengths, window_size=window, **options)


def _attend_kvcache(q, k_cache, v_cache, **options):
    return _with_kvcache(q, k_cache, v_cache, None, None, **options)


def _append_kvcache(k_cache, v_cache, k, v, *, cache_seqlens=None, cache_seqlen=None, **options):
    lengths = cache_seqlen if cache_seqlens is None else cache_seqlens
    _launch_append(k_cache, v_cache, k, v, cache_seqlens=lengths, **options)


def _fake(q, k_cache, v_cache, *new, **options):
    """Shapes, dtypes and devices of the results; wrong inputs are refused when the operator runs."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dim() != 4:
            raise ValueError(f"{name}: got {x.dim()} dimensions {tuple(x.shape)}, takes 4")
    batch, query_len, heads, _ = q.shape
    out = q.new_empty((batch, query_len, heads, v_cache.shape[3]))
    return out, q.new_empty((batch, heads, query_len), dtype=torch.float32)


def _fake_append(k_cache, v_cache, k, v, **options):
    """It returns nothing; wrong inputs are refused when the operator runs."""


def _refusing_gradients(operator, names: tuple[str, ...]):
    """``operator``, whose positional arguments have these names, below autograd: nothing is lost there."""

    def call(*arguments, **options):
        refuse_gradients((*zip(names, arguments, strict=False), *options.items()), NO_GRADIENT)
        with below_autograd():
            return operator(*arguments, **options)

    return call


for _name, _function, _shapes, _positional in (
    ("with_kvcache", _with_kvcache, _fake, ("q", "k_cache", "v_cache", "k", "v")),
    ("attend_kvcache", _attend_kvcache, _fake, ("q", "k_cache", "v_cache")),
    ("append_kvcache", _append_kvcache, _fake_append, ("k_cache", "v_cache", "k", "v")),
):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")
    _operator = getattr(torch.ops.fa2_cute, _name).default
    _library.impl(_name, _refusing_gradients(_operator, _positional), "Autograd")
    torch.library.register_fake(f"fa2_cute::{_name}", _shapes, lib=_library)
