"""One attention call as plain data, checked."""

from dataclasses import dataclass

import torch

from .spec import MAX_GRID_YZ

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
HEAD_DIMS = (64, 128)
MAX_HEADS = 8 * MAX_GRID_YZ  # eight heads a block row, see ForwardSpec.grid
MAX_EXTENT = 2**30 - 1  # extents travel as 32-bit integers, and sums of two must fit them (strides have 64 bits)


@dataclass(frozen=True)
class Problem:
    """Shapes and options of one call; the tensors themselves travel beside it.

    q (batch, query_len, heads, head_dim), k and v (batch, key_len, kv_heads, head_dim).
    """

    dtype: str
    batch: int
    query_len: int
    key_len: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> "Problem":
        """Check q, k, v against each other and against what the kernels take.

        Raises TypeError (not a tensor, wrong dtype) or ValueError (shape, layout, device), naming the argument, what
        came and what is taken.
        """
        named = {"q": q, "k": k, "v": v}
        for name, tensor in named.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: got {type(tensor).__name__}, takes a torch.Tensor")
            if tensor.dtype not in DTYPES:
                raise TypeError(f"{name}: got dtype {tensor.dtype}, takes torch.float16 or torch.bfloat16")
            if tensor.dtype != q.dtype:
                raise TypeError(f"{name}: got dtype {tensor.dtype}, takes q's dtype {q.dtype}")
            if tensor.dim() != 4:
                raise ValueError(
                    f"{name}: got {tensor.dim()} dimensions {tuple(tensor.shape)}, "
                    "takes 4: (batch, length, heads, head_dim)"
                )
            if tensor.layout != torch.strided:
                raise ValueError(f"{name}: got layout {tensor.layout}, takes a strided tensor")
            if tensor.device != q.device:
                raise ValueError(f"{name}: got device {tensor.device}, takes q's device {q.device}")
            if tensor.stride(3) != 1 and tensor.numel() > 0:
                raise ValueError(
                    f"{name}: got strides {tensor.stride()}, takes a last stride of 1 (call .contiguous() first)"
                )
            if max(tensor.shape) > MAX_EXTENT:
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, takes extents below 2^30")
        batch, query_len, heads, head_dim = q.shape
        _, key_len, kv_heads, _ = k.shape
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"q: got head_dim {head_dim}, takes {' or '.join(map(str, HEAD_DIMS))}")
        if k.shape != (batch, key_len, kv_heads, head_dim):
            raise ValueError(
                f"k: got shape {tuple(k.shape)}, takes (batch={batch}, key length, KV heads, head_dim={head_dim}), "
                "batch and head_dim being q's"
            )
        if v.shape != k.shape:
            raise ValueError(f"v: got shape {tuple(v.shape)}, takes k's shape {tuple(k.shape)}")
        if heads > MAX_HEADS:
            raise ValueError(f"q: got {heads} heads, takes at most {MAX_HEADS}")
        if heads and (kv_heads == 0 or heads % kv_heads):
            raise ValueError(f"k: got {kv_heads} KV heads, takes a divisor of q's {heads} heads")
        return cls(DTYPES[q.dtype], batch, query_len, key_len, heads, kv_heads, head_dim, bool(causal))
