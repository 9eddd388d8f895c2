"""One call over a KV cache as plain data, checked."""

from dataclasses import dataclass

import torch

from .append_spec import ROTARY_MULTIPLE, VECTOR
from .descale import Descale, normalise
from .problem import DTYPES, MAX_EXTENT
from .spec import MAX_HEAD_DIM

VECTOR_BYTES = 16  # what the kernels load at a time
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, eq=False)
class CacheCall:
    """Shapes and options of one call of ``flash_attn_with_kvcache``; the tensors travel beside it.

    capacity        slots of a sequence: cache_len, or page_size times the pages of a block table's row
    window          (left, right), None where unbounded
    ordered         the queries have positions of their own: the call is causal or windowed
    k_descale, v_descale    what an FP8 cache is multiplied by
    """

    batch: int
    query_len: int
    new_len: int
    capacity: int
    window: tuple[int | None, int | None]
    k_descale: Descale
    v_descale: Descale

    @property
    def ordered(self) -> bool:
        return self.window != (None, None)

    @classmethod
    def of(
        cls,
        q,
        k_cache,
        v_cache,
        k,
        v,
        *,
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        causal,
        window_size,
        k_descale,
        v_descale,
    ) -> "CacheCall":
        """Check the arguments of ``flash_attn_with_kvcache`` that its kernels for the cache look at.

        Raises TypeError (type or dtype) or ValueError (shape, layout, device, number), naming the argument, what came
        and what is taken.
        """
        _check_rows("q", q, "(batch, query_len, heads, head_dim)")
        if q.dtype not in DTYPES:
            raise TypeError(f"q: got dtype {q.dtype}, takes torch.float16 or torch.bfloat16")
        batch, query_len = q.shape[:2]
        paged = block_table is not None
        _check_cache(q, k_cache, v_cache, paged)
        rows, length = k_cache.shape[:2]
        capacity = length
        if paged:
            _check_indices("block_table", block_table, q, (batch, None))
            if length == 0:
                raise ValueError("k_cache: got pages of 0 tokens, takes pages of 1 or more")
            if cache_batch_idx is not None:
                raise ValueError("cache_batch_idx: got one with block_table, takes one of the two")
            capacity = length * block_table.shape[1]
            if capacity > MAX_EXTENT:
                raise ValueError(f"block_table: got {capacity} slots a sequence, takes at most {MAX_EXTENT}")
        elif cache_batch_idx is not None:
            _check_indices("cache_batch_idx", cache_batch_idx, q, (batch,))
        elif batch > rows:
            raise ValueError(f"k_cache: got {rows} rows, takes one for each of q's {batch} sequences")
        if cache_leftpad is not None:
            _check_indices("cache_leftpad", cache_leftpad, q, (batch,))

        if k is None and v is not None:
            raise ValueError("v: got one without k, takes both or neither")
        new_len = 0
        if k is not None:
            if v is None:
                raise ValueError("v: got None with k, takes both or neither")
            for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
                _check_rows(name, x, "(batch, new_len, kv_heads, dim)")
                if x.dtype != q.dtype:
                    raise TypeError(f"{name}: got dtype {x.dtype}, takes q's dtype {q.dtype}")
                if x.device != q.device:
                    raise ValueError(f"{name}: got device {x.device}, takes q's device {q.device}")
                shape = (batch, k.shape[1], *cache.shape[2:])
                if x.shape != shape:
                    raise ValueError(
                        f"{name}: got shape {tuple(x.shape)}, takes {shape}: q's batch, the same new_len for both, and "
                        f"the heads and width of {name}_cache"
                    )
            new_len = k.shape[1]

        window = window_of(causal, window_size)
        _check_seqlens(cache_seqlens, q, capacity, new_len, k is not None)
        if rotary_interleaved not in (True, False):
            raise TypeError(f"rotary_interleaved: got {rotary_interleaved!r}, takes True or False")
        if rotary_cos is not None or rotary_sin is not None:
            if k is None:
                raise ValueError("rotary_cos: got one without k, takes it with new keys, which it rotates too")
            _check_rotary(rotary_cos, rotary_sin, q, capacity)
            if isinstance(cache_seqlens, int):
                last = cache_seqlens + (query_len if window != (None, None) else min(query_len, 1))
                if last > rotary_cos.shape[0]:
                    raise ValueError(
                        f"rotary_cos: got {rotary_cos.shape[0]} positions, takes the {last} that the queries reach"
                    )
        return cls(
            batch,
            query_len,
            new_len,
            capacity,
            window,
            normalise("k_descale", k_descale, k_cache, batch=batch, paged=paged),
            normalise("v_descale", v_descale, v_cache, batch=batch, paged=paged),
        )


def _check_rows(name: str, x, shape: str):
    """A strided tensor of four dimensions with rows that are contiguous."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor")
    if x.dim() != 4:
        raise ValueError(f"{name}: got {x.dim()} dimensions {tuple(x.shape)}, takes 4: {shape}")
    if x.layout != torch.strided:
        raise ValueError(f"{name}: got layout {x.layout}, takes a strided tensor")
    if x.stride(3) != 1:
        raise ValueError(f"{name}: got strides {x.stride()}, takes a last stride of 1 (call .contiguous() first)")
    if max(x.shape) > MAX_EXTENT:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes extents below 2^30")
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: got a tensor that requires grad, takes one that does not (or a call under torch.no_grad()): "
            "there is no backward pass through a cache"
        )
    if x.numel() and not x.data_ptr():
        raise ValueError(f"{name}: got a {type(x).__name__} without memory of its own, takes one that has some")


def _check_cache(q: torch.Tensor, k_cache, v_cache, paged: bool):
    shape = "(pages, page_size, kv_heads, dim)" if paged else "(batch_cache, cache_len, kv_heads, dim)"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_rows(name, x, shape)
        if x.dtype not in (q.dtype, *FP8_DTYPES):
            raise TypeError(
                f"{name}: got dtype {x.dtype}, takes q's dtype {q.dtype} or {FP8_DTYPES[0]} or {FP8_DTYPES[1]}"
            )
        if x.dtype != k_cache.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, takes k_cache's dtype {k_cache.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, takes q's device {q.device}")
        start, strides = vector_strides(x)
        if any(n * x.element_size() % VECTOR_BYTES for n in strides) or start % VECTOR_BYTES:
            raise ValueError(
                f"{name}: got strides {x.stride()} from an address {start % VECTOR_BYTES} mod {VECTOR_BYTES}, takes "
                f"rows that start at multiples of {VECTOR_BYTES} bytes (a cache is never copied)"
            )
        if x.is_neg():
            raise ValueError(f"{name}: got a negated view, takes a cache as it lies in memory")
        if x.shape[3] % VECTOR or not 0 < x.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: got rows of {x.shape[3]}, takes multiples of {VECTOR} up to {MAX_HEAD_DIM}")
    if k_cache.shape[3] != q.shape[3]:
        raise ValueError(f"k_cache: got rows of {k_cache.shape[3]}, takes q's head_dim {q.shape[3]}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: got shape {tuple(v_cache.shape)}, takes k_cache's {tuple(k_cache.shape)} but for the last extent"
        )
    heads, kv_heads = q.shape[2], k_cache.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"k_cache: got {kv_heads} KV heads, takes a divisor of q's {heads} heads")


def vector_strides(x: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Where x (rows, length, heads, dim) starts, and its first three strides; 0 for those that are never multiplied."""
    strides = (0 if extent <= 1 else stride for extent, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
    return (x.data_ptr() if x.numel() else 0), tuple(strides)


def _check_indices(name: str, x, q: torch.Tensor, shape: tuple[int | None, ...]):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor")
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {x.dtype}, takes torch.int32")
    if x.device != q.device:
        raise ValueError(f"{name}: got device {x.device}, takes q's device {q.device}")
    if x.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, x.shape, strict=True)):
        wanted = ", ".join("pages a sequence" if want is None else f"batch={want}" for want in shape)
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes ({wanted}{',' if len(shape) == 1 else ''})")


def _check_seqlens(cache_seqlens, q: torch.Tensor, capacity: int, new_len: int, appends: bool):
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens: got None with k, takes the lengths that k is appended at")
    elif isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens <= capacity - new_len:
            new = f" that leave room for {new_len} new ones" if new_len else ""
            raise ValueError(
                f"cache_seqlens: got {cache_seqlens}, takes 0 to {capacity - new_len} of {capacity} slots{new}"
            )
    elif not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(
            f"cache_seqlens: got {type(cache_seqlens).__name__}, takes an int32 torch.Tensor, an int or None"
        )
    else:
        _check_indices("cache_seqlens", cache_seqlens, q, (q.shape[0],))
    if new_len > capacity:
        raise ValueError(f"k: got {new_len} new tokens, takes at most the {capacity} slots of a sequence")


def _check_rotary(rotary_cos, rotary_sin, q: torch.Tensor, capacity: int):
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor (both or neither)")
        if x.dtype not in (q.dtype, torch.float32):
            raise TypeError(f"{name}: got dtype {x.dtype}, takes q's dtype {q.dtype} or torch.float32")
        if x.dtype != rotary_cos.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, takes rotary_cos's dtype {rotary_cos.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, takes q's device {q.device}")
        if x.dim() != 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes (positions, rotary_dim / 2)")
        rotary_dim = 2 * x.shape[1]
        if rotary_dim == 0 or rotary_dim % ROTARY_MULTIPLE or rotary_dim > q.shape[3]:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, a rotary_dim of {rotary_dim}, takes multiples of "
                f"{ROTARY_MULTIPLE} up to head_dim {q.shape[3]}"
            )
        if x.shape != rotary_cos.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes rotary_cos's shape {tuple(rotary_cos.shape)}")
        if x.shape[0] < capacity:
            raise ValueError(
                f"{name}: got {x.shape[0]} positions, takes one for each of {capacity} slots of a sequence"
            )


def window_of(causal, window_size) -> tuple[int | None, int | None]:
    """flash-attn's ``causal`` and ``window_size`` as (left, right), None where unbounded."""
    if causal not in (True, False):
        raise TypeError(f"causal: got {causal!r}, takes True or False")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: got {window_size!r}, takes a pair (left, right)")
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window_size: got {window_size!r}, takes integers, -1 for unbounded")
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return left, 0 if causal else right
