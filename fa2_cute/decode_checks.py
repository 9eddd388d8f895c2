"""A call over a KV cache: checked by its metadata, and what is chosen for it."""

import functools
from dataclasses import dataclass

import torch

from . import checks, decode_spec, descale, forward
from .arch import Architecture
from .decode_spec import DecodeSpec
from .problem import DTYPES, MAX_EXTENT
from .spec import MAX_GRID_YZ

FP8_DTYPES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
MAX_CHUNKS = 2**32 - 1  # the kernel counts the 16-byte units from row to row and from page to page in 32 bits
EMULATED_SMS = 170  # of an RTX 5090: CPU tensors are split as there
FIRST_FP8, FIRST_OVERLAP = (8, 9), (9, 0)  # compute capabilities: PTX ISA, cvt of e4m3x2; griddepcontrol


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
            described.append((x.shape, x.stride(), x.dtype, x.device, start % decode_spec.VECTOR_BYTES, start == 0))
        else:
            return None
    # Types too: 1 and True are equal, and only one of them is a number of splits.
    key = (*described, options, *map(type, options))
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
    _check_tensors(q, k_cache, v_cache)
    batch, query_len, heads, head_dim = q.shape
    longest = query_len
    if varlen:
        batch = _check_packing(cu_seqlens_q, q.device)
        longest = _check_longest(max_seqlen_q, query_len)
    rows, length, kv_heads, _ = k_cache.shape
    paged = block_table is not None
    _check_indices(batch, block_table, cache_batch_idx, cache_leftpad, q)
    if not paged and cache_batch_idx is None and rows < batch:
        raise ValueError(f"k_cache: got {rows} rows, takes one for each of q's {batch} sequences (or cache_batch_idx)")
    capacity = length * block_table.shape[1] if paged else length
    if capacity + query_len > MAX_EXTENT:
        raise ValueError(f"k_cache: got {capacity} slots a sequence, takes fewer than 2^30 with the query length")
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
        tiles = spec.tiles_m(longest * group)
        if tiles > MAX_GRID_YZ and not varlen:
            raise ValueError(f"q: got {query_len} queries of {heads} heads, takes fewer: {tiles} tiles of rows")
        blocks = batch * kv_heads * tiles
        splits = num_splits or decode_spec.choose_splits(spec, architecture, _sms(q.device), blocks, capacity)
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
def _sms(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return EMULATED_SMS


def _check_tensors(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor):
    """q and the caches, against each other and against what the kernels take."""
    caches = (("k_cache", k_cache), ("v_cache", v_cache))
    for name, x in (("q", q), *caches):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: got dtype {q.dtype}, takes torch.float16 or torch.bfloat16")
    for name, cache in caches:
        if cache.dtype != q.dtype and cache.dtype not in FP8_DTYPES:
            raise TypeError(
                f"{name}: got dtype {cache.dtype}, takes q's {q.dtype}, torch.float8_e4m3fn or torch.float8_e5m2"
            )
        if cache.dtype != k_cache.dtype:
            raise TypeError(f"{name}: got dtype {cache.dtype}, takes k_cache's {k_cache.dtype}")
        if cache.device != q.device:
            raise ValueError(f"{name}: got device {cache.device}, takes q's device {q.device}")
    for name, x in (("q", q), *caches):
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes 4 dimensions: (rows, length, heads, head_dim)")
        if x.layout != torch.strided:
            raise ValueError(f"{name}: got layout {x.layout}, takes a strided tensor")
        if x.numel() and x.stride(3) != 1:
            raise ValueError(f"{name}: got strides {x.stride()}, takes a last stride of 1")
        if max(x.shape) > MAX_EXTENT:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes extents below 2^30")
        if x.numel() and not x.data_ptr():
            raise ValueError(f"{name}: got a {type(x).__name__} without memory of its own, takes one that has some")
    heads, head_dim = q.shape[2:]
    rows, length, kv_heads, _ = k_cache.shape
    multiple = decode_spec.VECTOR_BYTES // k_cache.element_size()
    for name, dim in (("q", head_dim), ("v_cache", v_cache.shape[3])):
        if dim % multiple or not 0 < dim <= decode_spec.MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: got rows of {dim}, takes multiples of {multiple} up to {decode_spec.MAX_HEAD_DIM} "
                f"with a cache of {k_cache.dtype}"
            )
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache: got shape {tuple(k_cache.shape)}, takes q's head_dim {head_dim} at the end")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: got shape {tuple(v_cache.shape)}, takes k_cache's {(rows, length, kv_heads)} and value_dim"
        )
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"k_cache: got {kv_heads} KV heads, takes a divisor of q's {heads} heads")
    for name, cache in caches:
        _check_rows(name, cache)


def _check_rows(name: str, cache: torch.Tensor):
    """A cache is never copied: its rows must lie as the kernel reads them."""
    view = rows_of(cache)
    size = cache.element_size()
    strides = [stride * size for stride in view.stride()[:3]]
    if any(x % decode_spec.VECTOR_BYTES for x in (cache.data_ptr(), *strides)):
        raise ValueError(
            f"{name}: got strides {cache.stride()} and a start at {cache.data_ptr() % decode_spec.VECTOR_BYTES} bytes, "
            f"takes rows that start at multiples of {decode_spec.VECTOR_BYTES} bytes"
        )
    if max(strides[:2], default=0) // decode_spec.VECTOR_BYTES > MAX_CHUNKS:
        raise ValueError(f"{name}: got strides {cache.stride()}, takes rows and pages less than 64 GiB apart")


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """The cache as the kernel takes it: bytes if float8; the stride of an extent of 1 is of no use to anybody."""
    cache = cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache
    if min(cache.shape[:3]) > 1:
        return cache
    strides = [0 if extent <= 1 else stride for extent, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True)]
    return cache.as_strided(cache.shape, (*strides, 1))


def _check_indices(
    batch: int,
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    q: torch.Tensor,
):
    if block_table is not None:
        _check_int32("block_table", block_table, q.device)
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise ValueError(
                f"block_table: got shape {tuple(block_table.shape)}, takes (batch={batch}, pages a sequence)"
            )
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got one with a block_table, takes one of the two")
    for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if x is not None:
            check_vector(name, x, batch, q.device)


def _check_packing(cu_seqlens_q: torch.Tensor, device: torch.device) -> int:
    """How many sequences there are."""
    _check_int32("cu_seqlens_q", cu_seqlens_q, device)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: got shape {tuple(cu_seqlens_q.shape)}, takes (batch + 1,)")
    return cu_seqlens_q.shape[0] - 1


def _check_longest(max_seqlen_q: int | None, total: int) -> int:
    """About how many queries a sequence has at most."""
    if max_seqlen_q is None:
        return total
    if isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, int):
        raise TypeError(f"max_seqlen_q: got {max_seqlen_q!r}, takes an integer or None")
    return min(max(max_seqlen_q, 1), total)


def check_vector(name: str, x: torch.Tensor, batch: int, device: torch.device):
    _check_int32(name, x, device)
    if x.shape != (batch,):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes (batch={batch},)")


def _check_int32(name: str, x: torch.Tensor, device: torch.device):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor")
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {x.dtype}, takes torch.int32")
    if x.device != device:
        raise ValueError(f"{name}: got device {x.device}, takes q's device {device}")
