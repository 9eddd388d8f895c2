"""A call over a KV cache: checked by its metadata, and what is chosen for it."""

import functools
from dataclasses import dataclass

import torch

from . import checks, decode_spec, descale, forward, splitting
from .arch import Architecture
from .cache_checks import (
    FP8_DTYPES,
    check_caches,
    check_heads,
    check_input,
    check_int32,
    check_places,
    too_far_apart,
)
from .cache_spec import FIRST_OVERLAP, MAX_INT32, VECTOR_BYTES
from .decode_spec import DecodeSpec
from .problem import DTYPES, MAX_EXTENT
from .spec import MAX_GRID_YZ, packed_tiles

EMULATED_SMS = 170  # of an RTX 5090: the kernels for KV caches split CPU tensors as there
FIRST_FP8 = (8, 9)  # compute capability: PTX ISA, cvt of e4m3x2


@dataclass(frozen=True)
class Choice:
    """What is decided about a call from its shapes, strides, dtypes, device and options alone.

    spec: None where there is nothing to launch: no query or no slot. left, right: the window, in numbers that do not
    bound anything where it does not.
    """

    arch: Architecture
    spec: DecodeSpec | None
    splits: int
    q_shape: tuple[int, ...]
    q_dtype: torch.dtype
    batch: int
    capacity: int
    every_slot: bool
    softmax_scale: float
    softcap: float
    left: int
    right: int


def metadata(tensors: tuple, options: tuple) -> tuple | None:
    """All that ``decide`` looks at, or None where an argument is of a kind that is to be looked at each time."""
    described = []
    for x in tensors:
        if x is None:
            described.append(None)
        elif type(x) is torch.Tensor and x.layout is torch.strided:
            start = x.data_ptr()
            place = (start % VECTOR_BYTES, start == 0, x.is_neg())
            described.append((x.shape, x.stride(), x.dtype, x.device, place))
        else:
            return None
    # Types too: 1 and True are equal, and only one of them is a number of splits, or a side of a window.
    kinds = (tuple(map(type, x)) if isinstance(x, tuple) else type(x) for x in options)
    key = (*described, options, *kinds)
    try:
        hash(key)
    except TypeError:  # a window as a list, for instance
        return None
    return key


def decide(
    q,
    k_cache,
    v_cache,
    block_table,
    cache_batch_idx,
    cache_leftpad,
    cu_seqlens_q,
    k_descale,
    v_descale,
    alibi_slopes,
    sink,
    softmax_scale,
    window,
    softcap,
    num_splits,
    max_seqlen_q,
    every_slot,
) -> Choice:
    """Check everything, by its metadata alone, and choose."""
    q_shape, varlen = getattr(q, "shape", None), cu_seqlens_q is not None
    if varlen and isinstance(q, torch.Tensor):
        if q.dim() != 3:
            raise ValueError(f"q: got shape {tuple(q.shape)}, takes (rows, heads, head_dim) with cu_seqlens_q")
        q = q.unsqueeze(0)
    check_input("q", q, "(batch, query_len, heads, head_dim)")
    paged = block_table is not None
    check_caches("q", q, k_cache, v_cache, paged)
    check_heads(q, k_cache)
    batch, query_len, heads, head_dim = q.shape
    longest = query_len
    if varlen:
        check_int32("cu_seqlens_q", cu_seqlens_q, "q", q, ("batch + 1",))
        batch = cu_seqlens_q.shape[0] - 1
        if batch < 0:
            raise ValueError("cu_seqlens_q: got shape (0,), takes (batch + 1,)")
        longest = _check_longest(max_seqlen_q, query_len)
    rows, _, kv_heads, _ = k_cache.shape
    capacity = check_places("q", q, batch, query_len, k_cache, block_table, cache_batch_idx, cache_leftpad)
    left, right = checks.window_of(window)
    softcap = checks.softcap_of(softcap)
    scale = checks.scale_of(softmax_scale, head_dim)
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits: got {num_splits!r}, takes an integer")
    if not 0 <= num_splits <= decode_spec.MAX_SPLITS:
        raise ValueError(f"num_splits: got {num_splits}, takes 0 (chosen) to {decode_spec.MAX_SPLITS}")
    k_scale = descale.normalise("k_descale", k_descale, k_cache, batch=batch, paged=paged)
    v_scale = descale.normalise("v_descale", v_descale, v_cache, batch=batch, paged=paged)
    architecture = forward.architecture_of(q.device)
    capability = architecture.capability
    if k_cache.dtype in FP8_DTYPES and capability < FIRST_FP8:
        raise ValueError(
            f"k_cache: got dtype {k_cache.dtype}, takes q's dtype on {architecture.name}: it has no float8"
        )
    if alibi_slopes is not None:
        checks.slopes_of(alibi_slopes, Heads(batch, heads), q)
    if sink is not None:
        checks.sink_of(sink, Heads(batch, heads), q)
    spec, splits = None, 1
    if batch * query_len * heads and capacity * rows:
        group = heads // kv_heads
        spec = decode_spec.choose(
            DTYPES[q.dtype],
            FP8_DTYPES.get(k_cache.dtype) or DTYPES[k_cache.dtype],
            head_dim,
            v_cache.shape[3],
            longest * group,
            paged=paged,
            indexed=cache_batch_idx is not None,
            leftpad=cache_leftpad is not None,
            every_slot=every_slot,
            varlen=varlen,
            row_mask=(varlen or query_len > 1) and (left is not None or right is not None),
            softcap=softcap > 0.0,
            alibi=alibi_slopes is not None,
            sink=sink is not None,
            k_scale=k_scale.kind,
            v_scale=v_scale.kind,
            overlap=capability >= FIRST_OVERLAP,
        )
        _check_grid(spec, q, batch, kv_heads)
        blocks = batch * kv_heads * spec.tiles_m(longest * group)
        splits = num_splits or splitting.choose_splits(spec, architecture, sms(q.device), blocks, capacity)
        # A split's part of the output is addressed in 32 bits.
        if splits > 1 and q.shape[0] * query_len * heads * v_cache.shape[3] > MAX_INT32:
            if num_splits:
                raise ValueError(
                    f"num_splits: got {num_splits}, takes 0 or 1 for an output of 2^31 elements or more "
                    f"({q.shape[0]} x {query_len} x {heads} x {v_cache.shape[3]})"
                )
            splits = 1
    return Choice(
        architecture,
        spec,
        splits,
        q_shape,
        q.dtype,
        batch,
        capacity,
        every_slot,
        scale,
        softcap,
        # What reaches past every slot does not bound anything; sums with it must stay within 31 bits.
        capacity if left is None else min(left, capacity),
        capacity + query_len if right is None else max(min(right, capacity + query_len), -MAX_EXTENT),
    )


@dataclass(frozen=True)
class Heads:
    """What the forward pass' checks look at of a call."""

    batch: int
    heads: int


@functools.cache
def sms(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return forward.multiprocessors(device) or EMULATED_SMS


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``decode`` takes q, k, v (batch, length, heads, dim) that the forward pass takes, every slot being a key.

    For a caller whose own checks have passed, and who has another kernel. Rows start at multiples of 16 bytes.
    """
    batch, query_len, heads, _ = q.shape
    _, key_len, kv_heads, _ = k.shape
    return (
        all(x.stride(3) == 1 and not x.is_neg() for x in (q, k, v))
        and not too_far_apart(k)
        and not too_far_apart(v)
        and key_len + query_len <= MAX_EXTENT
        and batch * kv_heads <= MAX_INT32
        and query_len * (heads // max(kv_heads, 1)) <= MAX_GRID_YZ * decode_spec.WARP_M
    )


def _check_grid(spec: DecodeSpec, q: torch.Tensor, batch: int, kv_heads: int):
    """That the kernel can count q's rows (query x head of a KV head) and its blocks, in 32 bits."""
    _, query_len, heads, _ = q.shape
    rows = query_len * (heads // kv_heads)
    x, y, _ = spec.grid(batch, query_len, heads, kv_heads, 1)
    if x > MAX_INT32:
        raise ValueError(f"q: got {batch} sequences, takes fewer with {kv_heads} KV heads: {x} thread blocks")
    if y > MAX_GRID_YZ:
        raise ValueError(f"q: got {query_len} queries of {heads} heads, takes fewer: {y} tiles of rows")
    # Each packed sequence may begin a tile of its own, and so do the rows before and after them.
    if spec.varlen and (packed_tiles(batch, rows, spec.tile_m) + 1) * spec.tile_m > MAX_INT32:
        raise ValueError(
            f"q: got {query_len} rows of {heads} heads in {batch} sequences, takes fewer: {rows} rows of a KV head"
        )


def _check_longest(max_seqlen_q: int | None, total: int) -> int:
    """About how many queries a sequence has at most."""
    if max_seqlen_q is None:
        return total
    if isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, int):
        raise TypeError(f"max_seqlen_q: got {max_seqlen_q!r}, takes an integer or None")
    return min(max(max_seqlen_q, 1), total)
