"""What every call over a KV cache is checked for, whether it appends or attends: its tensors, by their metadata alone.

Errors call the queries q or, where there are none, the new keys k: ``name`` is which, and x the tensor.
"""

import torch

from .cache_spec import VECTOR_BYTES
from .checks import has_memory
from .problem import DTYPES, MAX_EXTENT
from .spec import MAX_HEAD_DIM

FP8_DTYPES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
MAX_CHUNKS = 2**32 - 1  # kernels count the 16-byte units from row to row and from page to page in 32 bits


def check_rows(name: str, x, shape: str):
    """A strided tensor of four dimensions with contiguous rows, which are in memory."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor")
    if x.dim() != 4:
        raise ValueError(f"{name}: got {x.dim()} dimensions {tuple(x.shape)}, takes 4 dimensions: {shape}")
    if x.layout != torch.strided:
        raise ValueError(f"{name}: got layout {x.layout}, takes a strided tensor")
    if x.stride(3) != 1:
        raise ValueError(f"{name}: got strides {x.stride()}, takes a last stride of 1 (call .contiguous() first)")
    if max(x.shape) > MAX_EXTENT:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes extents below 2^30")
    if not has_memory(x):
        raise ValueError(
            f"{name}: got a {type(x).__name__} without memory of its own (device {x.device}), takes one that has some"
        )


def check_input(name: str, x, shape: str):
    """Queries, or new keys: rows of 16-bit numbers."""
    check_rows(name, x, shape)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, takes torch.float16 or torch.bfloat16")


def check_caches(name: str, x: torch.Tensor, k_cache, v_cache, paged: bool):
    """The caches against x, each other and what the kernels take: they are read where they lie, never copied."""
    caches = (("k_cache", k_cache), ("v_cache", v_cache))
    for cache_name, cache in caches:
        check_rows(cache_name, cache, f"({'pages, page_size' if paged else 'batch_cache, cache_len'}, kv_heads, dim)")
        if cache.dtype != x.dtype and cache.dtype not in FP8_DTYPES:
            raise TypeError(
                f"{cache_name}: got dtype {cache.dtype}, takes {name}'s dtype {x.dtype}, torch.float8_e4m3fn or "
                "torch.float8_e5m2"
            )
        if cache.dtype != k_cache.dtype:
            raise TypeError(f"{cache_name}: got dtype {cache.dtype}, takes k_cache's dtype {k_cache.dtype}")
        if cache.device != x.device:
            raise ValueError(f"{cache_name}: got device {cache.device}, takes {name}'s device {x.device}")
        if cache.is_neg():
            raise ValueError(f"{cache_name}: got a negated view, takes a cache as it lies in memory")
    multiple = VECTOR_BYTES // k_cache.element_size()
    for rows_name, dim in ((name, x.shape[3]), ("v_cache", v_cache.shape[3])):
        if dim % multiple or not 0 < dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{rows_name}: got rows of {dim}, takes multiples of {multiple} up to {MAX_HEAD_DIM} with a cache of "
                f"{k_cache.dtype}"
            )
    if k_cache.shape[3] != x.shape[3]:
        raise ValueError(f"k_cache: got rows of {k_cache.shape[3]}, takes {name}'s head_dim {x.shape[3]}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache: got shape {tuple(v_cache.shape)}, takes k_cache's {tuple(k_cache.shape)} but for the last extent"
        )
    for cache_name, cache in caches:
        start, strides = cache.data_ptr(), rows_of(cache).stride()[:3]
        if start % VECTOR_BYTES or any(stride * cache.element_size() % VECTOR_BYTES for stride in strides):
            raise ValueError(
                f"{cache_name}: got strides {cache.stride()} and a start at {start % VECTOR_BYTES} bytes, takes rows "
                f"that start at multiples of {VECTOR_BYTES} bytes (a cache is never copied)"
            )
        if too_far_apart(cache):
            raise ValueError(f"{cache_name}: got strides {cache.stride()}, takes rows and pages less than 64 GiB apart")


def check_heads(q: torch.Tensor, k_cache: torch.Tensor):
    """The query heads that share a KV head are as many for each."""
    heads, kv_heads = q.shape[2], k_cache.shape[2]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"k_cache: got {kv_heads} KV heads, takes a divisor of q's {heads} heads")


def check_places(
    name: str, x: torch.Tensor, batch: int, query_len: int, k_cache, block_table, cache_batch_idx, cache_leftpad
) -> int:
    """What says where tokens are; returns the slots of a sequence."""
    rows, length = k_cache.shape[:2]
    capacity = length
    if block_table is not None:
        check_int32("block_table", block_table, name, x, (batch, "pages a sequence"))
        if length == 0:
            raise ValueError("k_cache: got pages of 0 tokens, takes pages of 1 or more")
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got one with block_table, takes one of the two")
        capacity = length * block_table.shape[1]
    elif cache_batch_idx is not None:
        check_int32("cache_batch_idx", cache_batch_idx, name, x, (batch,))
    elif batch > rows:
        raise ValueError(
            f"k_cache: got {rows} rows, takes one for each of {name}'s {batch} sequences (or cache_batch_idx)"
        )
    if cache_leftpad is not None:
        check_int32("cache_leftpad", cache_leftpad, name, x, (batch,))
    if capacity + query_len > MAX_EXTENT:
        of = "k_cache" if block_table is None else "block_table"
        raise ValueError(f"{of}: got {capacity} slots a sequence, takes fewer than 2^30 with the query length")
    return capacity


def check_int32(name: str, numbers, of: str, x: torch.Tensor, shape: tuple[int | str, ...]):
    """int32 numbers beside x (called ``of``) of a shape; a string names an extent that may be any."""
    if not isinstance(numbers, torch.Tensor):
        raise TypeError(f"{name}: got {type(numbers).__name__}, takes a torch.Tensor")
    if numbers.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {numbers.dtype}, takes torch.int32")
    if numbers.device != x.device:
        raise ValueError(f"{name}: got device {numbers.device}, takes {of}'s device {x.device}")
    if numbers.is_neg():
        raise ValueError(f"{name}: got a negated view, takes numbers as they lie in memory (call .resolve_neg() first)")
    have = numbers.shape
    if len(have) != len(shape) or any(want != n for want, n in zip(shape, have, strict=True) if isinstance(want, int)):
        wanted = ", ".join(f"batch={want}" if isinstance(want, int) else want for want in shape)
        raise ValueError(f"{name}: got shape {tuple(have)}, takes ({wanted}{',' if len(shape) == 1 else ''})")


def too_far_apart(cache: torch.Tensor) -> bool:
    """Whether the kernels cannot count from one row or page of a cache to the next."""
    return max(rows_of(cache).stride()[:2]) * cache.element_size() // VECTOR_BYTES > MAX_CHUNKS


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the kernels take it: strides that are never multiplied by anything but 0 are 0."""
    if min(cache.shape[:3]) > 1:
        return cache
    strides = [0 if extent <= 1 else stride for extent, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True)]
    return cache.as_strided(cache.shape, (*strides, 1))


def bytes_of(cache: torch.Tensor) -> torch.Tensor:
    """A float8 cache as the bytes that the attention kernel reads; any other as it is."""
    return cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache
