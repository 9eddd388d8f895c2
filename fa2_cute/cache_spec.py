"""What the specifications of the kernels over KV caches have in common: element types, scales, limits; no torch."""

from .parameters import TensorParameter

DTYPES = ("bfloat16", "float16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
VECTOR_BYTES = 16  # rows of a cache start at multiples of it: one cp.async, one row of an ldmatrix matrix
MAX_INT32 = 2**31 - 1  # blocks of a grid along x (CUDA C++ Programming Guide), and what the kernels count rows in
FIRST_OVERLAP = (9, 0)  # compute capability: PTX ISA, griddepcontrol

SCALE_KINDS = {"unit": 0, "sequence": 2, "block": 3}  # of descale.Descale, and the dimensions of their factors
BLOCK_TOKENS = 128  # tokens that share a factor in a contiguous cache; a page does in a paged one


def pair(of_keys: int | str, of_values: int | str) -> str:
    """Both in a title: "128", or "192/128" where they differ."""
    return f"{of_keys}" if of_keys == of_values else f"{of_keys}/{of_values}"


def scales(name: str, kind: str) -> TensorParameter | None:
    """Factors (batch, kv_heads), or (rows of the cache, blocks, kv_heads), or none."""
    dimensions = SCALE_KINDS[kind]
    return TensorParameter(name, "float32", (None,) * dimensions, (None,) * dimensions) if dimensions else None
