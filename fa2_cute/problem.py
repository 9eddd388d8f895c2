"""One attention call as plain data, checked."""

from dataclasses import dataclass

import torch

from .spec import MAX_GRID_YZ, MAX_HEAD_DIM, VECTOR_ELEMENTS, Features

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
MAX_HEADS = 8 * MAX_GRID_YZ  # eight heads a block row, see ForwardSpec.grid
MAX_EXTENT = 2**30 - 1  # extents travel as 32-bit integers, and sums of two must fit them (strides have 64 bits)


@dataclass(frozen=True)
class Problem:
    """Shapes of one call, and which options it uses; the tensors themselves travel beside it.

    q (batch, query_len, heads, head_dim), k (batch, key_len, kv_heads, head_dim), v (batch, key_len, kv_heads,
    value_dim). With ``features.varlen`` batch counts sequences, and query_len and key_len all rows.
    """

    dtype: str
    batch: int
    query_len: int
    key_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    features: Features

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: Features, sequences: int = 0) -> "Problem":
        """Check q, k, v against each other and against what the kernels take.

        They have four dimensions each, or three (rows, heads, head_dim) where ``features.varlen``, with ``sequences``.

        Raises TypeError (not a tensor, wrong dtype) or ValueError (shape, layout, device), naming the argument, what
        came and what is taken.
        """
        kinds = ("total length", "heads", "head_dim") if features.varlen else ("batch", "length", "heads", "head_dim")
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: got {type(tensor).__name__}, takes a torch.Tensor")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"{name}: got dtype {tensor.dtype}, takes torch.float16 or torch.bfloat16")
            if tensor.dtype != q.dtype:
                raise TypeError(f"{name}: got dtype {tensor.dtype}, takes q's dtype {q.dtype}")
            if tensor.dim() != len(kinds):
                raise ValueError(
                    f"{name}: got {tensor.dim()} dimensions {tuple(tensor.shape)}, takes {len(kinds)}: "
                    f"({', '.join(kinds)})"
                )
            if tensor.layout != torch.strided:
                raise ValueError(f"{name}: got layout {tensor.layout}, takes a strided tensor")
            if tensor.device != q.device:
                raise ValueError(f"{name}: got device {tensor.device}, takes q's device {q.device}")
            if tensor.stride(-1) != 1 and tensor.numel() > 0:
                raise ValueError(
                    f"{name}: got strides {tensor.stride()}, takes a last stride of 1 (call .contiguous() first)"
                )
            if max(tensor.shape) > MAX_EXTENT:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, takes extents below 2^30")
        *_, query_len, heads, head_dim = q.shape
        *_, key_len, kv_heads, _ = k.shape
        value_dim = v.shape[-1]
        batch = sequences if features.varlen else q.shape[0]
        for name, width in (("q", head_dim), ("v", value_dim)):
            if width % VECTOR_ELEMENTS or not 0 < width <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: got head_dim {width}, takes multiples of 8 from 8 to {MAX_HEAD_DIM}")
        if k.shape[-1] != head_dim or k.shape[:-3] != q.shape[:-3]:
            same = "head_dim" if features.varlen else "batch and head_dim"
            taken = {"batch": f"batch={batch}", "head_dim": f"head_dim={head_dim}", "heads": "KV heads"}
            shape = ", ".join(taken.get(kind, kind) for kind in kinds)
            raise ValueError(f"k: got shape {tuple(k.shape)}, takes ({shape}), {same} being q's")
        if v.shape[:-1] != k.shape[:-1]:
            raise ValueError(f"v: got shape {tuple(v.shape)}, takes k's shape {tuple(k.shape)} but for the last extent")
        if heads > MAX_HEADS:
            raise ValueError(f"q: got {heads} heads, takes at most {MAX_HEADS}")
        if heads and (kv_heads == 0 or heads % kv_heads):
            raise ValueError(f"k: got {kv_heads} KV heads, takes a divisor of q's {heads} heads")
        if features.varlen and query_len + sequences > MAX_EXTENT:
            raise ValueError(f"q: got {query_len} rows of {sequences} sequences, takes less than 2^30 together")
        return cls(DTYPES[q.dtype], batch, query_len, key_len, heads, kv_heads, head_dim, value_dim, features)
