"""One call over a KV cache as plain data, checked: an append, attention, or one after the other."""

from dataclasses import dataclass

import torch

from .append_spec import ROTARY_MULTIPLE
from .cache_checks import check_caches, check_heads, check_input, check_int32, check_places
from .checks import causal_window_of
from .descale import Descale, normalise


@dataclass(frozen=True, eq=False)
class CacheCall:
    """Shapes and options of one call of ``flash_attn_with_kvcache`` or ``append_to_kvcache``; tensors travel beside it.

    capacity        slots of a sequence: cache_len, or page_size times the pages of a block table's row
    window          (left, right), None where unbounded
    k_descale, v_descale    what an FP8 cache is multiplied by
    """

    batch: int
    capacity: int
    window: tuple[int | None, int | None]
    k_descale: Descale
    v_descale: Descale

    @property
    def ordered(self) -> bool:
        """Whether the queries have positions of their own: the call is causal or windowed."""
        return self.window != (None, None)

    @classmethod
    def of(cls, q, k_cache, v_cache, k, v, *, causal, window_size, cache_leftpad, **options) -> "CacheCall":
        """Check the arguments of ``flash_attn_with_kvcache`` but those that the attention alone looks at.

        Raises TypeError (type or dtype) or ValueError (shape, layout, device, number), naming the argument, what came
        and what is taken.
        """
        check_input("q", q, "(batch, query_len, heads, head_dim)")
        if k is None and v is not None:
            raise ValueError("v: got one without k, takes both or neither")
        window = causal_window_of(causal, window_size)
        return cls._of("q", q, k_cache, v_cache, k, v, window=window, cache_leftpad=cache_leftpad, **options)

    @classmethod
    def appending(cls, k_cache, v_cache, k, v, **options) -> "CacheCall":
        """Check the arguments of ``append_to_kvcache``; raises as ``of``."""
        check_input("k", k, "(batch, new_len, kv_heads, head_dim)")
        return cls._of("k", k, k_cache, v_cache, k, v, window=(None, None), cache_leftpad=None, **options)

    @classmethod
    def _of(
        cls,
        name,
        x,
        k_cache,
        v_cache,
        k,
        v,
        *,
        window,
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        k_descale,
        v_descale,
    ) -> "CacheCall":
        """x are the queries (name "q"), or the new keys ("k") of a call without queries."""
        batch, paged = x.shape[0], block_table is not None
        query_len = x.shape[1] if name == "q" else 0
        check_caches(name, x, k_cache, v_cache, paged)
        if name == "q":
            check_heads(x, k_cache)
        capacity = check_places(name, x, batch, query_len, k_cache, block_table, cache_batch_idx, cache_leftpad)
        if k is not None:
            _check_new(name, x, k_cache, v_cache, k, v)
        new_len = 0 if k is None else k.shape[1]
        _check_seqlens(name, x, cache_seqlens, capacity, new_len, k is not None)
        if rotary_interleaved not in (True, False):
            raise TypeError(f"rotary_interleaved: got {rotary_interleaved!r}, takes True or False")
        if rotary_cos is not None or rotary_sin is not None:
            if k is None:
                raise ValueError("rotary_cos: got one without k, takes it with new keys, which it rotates too")
            _check_rotary(name, x, rotary_cos, rotary_sin, capacity)
            if isinstance(cache_seqlens, int):
                last = cache_seqlens + (query_len if window != (None, None) else min(query_len, 1))
                if last > rotary_cos.shape[0]:
                    raise ValueError(
                        f"rotary_cos: got {rotary_cos.shape[0]} positions, takes the {last} that the queries reach"
                    )
        return cls(
            batch,
            capacity,
            window,
            normalise("k_descale", k_descale, k_cache, batch=batch, paged=paged),
            normalise("v_descale", v_descale, v_cache, batch=batch, paged=paged),
        )


def _check_new(name: str, x: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k, v):
    """New keys and values, which become rows of the caches."""
    if v is None:
        raise ValueError("v: got None with k, takes both or neither")
    for new_name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_input(new_name, new, "(batch, new_len, kv_heads, dim)")
        if new.dtype != x.dtype:
            raise TypeError(f"{new_name}: got dtype {new.dtype}, takes {name}'s dtype {x.dtype}")
        if new.device != x.device:
            raise ValueError(f"{new_name}: got device {new.device}, takes {name}'s device {x.device}")
        shape = (x.shape[0], k.shape[1], *cache.shape[2:])
        if new.shape != shape:
            raise ValueError(
                f"{new_name}: got shape {tuple(new.shape)}, takes {shape}: {name}'s batch, the same new_len for both, "
                f"and the heads and width of {new_name}_cache"
            )


def _check_seqlens(name: str, x: torch.Tensor, cache_seqlens, capacity: int, new_len: int, appends: bool):
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
        check_int32("cache_seqlens", cache_seqlens, name, x, (x.shape[0],))
    if new_len > capacity:
        raise ValueError(f"k: got {new_len} new tokens, takes at most the {capacity} slots of a sequence")


def _check_rotary(of: str, like: torch.Tensor, rotary_cos, rotary_sin, capacity: int):
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, takes a torch.Tensor (both or neither)")
        if x.dtype not in (like.dtype, torch.float32):
            raise TypeError(f"{name}: got dtype {x.dtype}, takes {of}'s dtype {like.dtype} or torch.float32")
        if x.dtype != rotary_cos.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, takes rotary_cos's dtype {rotary_cos.dtype}")
        if x.device != like.device:
            raise ValueError(f"{name}: got device {x.device}, takes {of}'s device {like.device}")
        if x.dim() != 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes (positions, rotary_dim / 2)")
        rotary_dim = 2 * x.shape[1]
        if rotary_dim == 0 or rotary_dim % ROTARY_MULTIPLE or rotary_dim > like.shape[3]:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, a rotary_dim of {rotary_dim}, takes multiples of "
                f"{ROTARY_MULTIPLE} up to head_dim {like.shape[3]}"
            )
        if x.shape != rotary_cos.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, takes rotary_cos's shape {tuple(rotary_cos.shape)}")
        if x.shape[0] < capacity:
            raise ValueError(
                f"{name}: got {x.shape[0]} positions, takes one for each of {capacity} slots of a sequence"
            )
