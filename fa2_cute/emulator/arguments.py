"""Launch arguments: the parameter block, grid and block extents, and the shared-memory limit of an architecture."""

from __future__ import annotations

import numpy as np

from .errors import ArgumentError
from .ptx import Kernel
from .tensors import Tensor

# Shared memory a block may use, KiB: CUDA C++ programming guide, technical specifications per compute capability.
SHARED_LIMITS = {
    "80": 163, "86": 99, "87": 163, "89": 99, "90": 227, "100": 227, "101": 227, "103": 227, "110": 227, "120": 99,
    "121": 99,
}  # fmt: skip


def shared_limit(arch: str) -> int:
    """Bytes of shared memory a block may have on an architecture such as ``sm_120a``."""
    digits = "".join(ch for ch in arch.removeprefix("sm_") if ch.isdigit())
    if not arch.startswith("sm_") or digits not in SHARED_LIMITS:
        known = ", ".join(f"sm_{k}" for k in SHARED_LIMITS)
        raise ArgumentError(f"unknown architecture {arch!r}; known: {known}, with or without the a or f suffix")
    return SHARED_LIMITS[digits] * 1024


def pack_arguments(kernel: Kernel, args) -> tuple[bytes, list[Tensor]]:
    """The parameter block and the tensors of a launch; ArgumentError if one does not fit its parameter."""
    if len(args) != len(kernel.params):
        raise ArgumentError(f"kernel takes {len(kernel.params)} arguments, got {len(args)}")
    block, tensors = bytearray(kernel.param_bytes), []
    for i, (param, arg) in enumerate(zip(kernel.params, args, strict=True)):
        if isinstance(arg, Tensor):
            raw, what = (
                arg.pack(),
                f"Tensor {arg.name!r} with extents {arg.extents} and strides {arg.strides}",
            )
            tensors.append(arg)
        elif isinstance(arg, (np.generic, np.ndarray)) and getattr(arg, "ndim", 0) == 0:
            raw, what = arg.tobytes(), f"{arg.dtype} scalar"
        elif isinstance(arg, (bytes, bytearray)):
            raw, what = bytes(arg), "bytes"
        else:
            raise ArgumentError(
                f"argument {i}: pass a numpy scalar, a Tensor or bytes, not {type(arg).__name__} "
                f"(a Python number has no size: say np.float32(x) or np.int32(x))"
            )
        if len(raw) != param.size:
            raise ArgumentError(f"argument {i}: {what} is {len(raw)} bytes, the kernel's parameter is {param.size}")
        block[param.offset : param.offset + param.size] = raw
    return bytes(block), tensors


def dimensions(value, what: str) -> tuple[int, int, int]:
    """A grid or block as three positive ints."""
    dims = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(dims) <= 3 or any(int(d) != d or d < 1 for d in dims):
        raise ArgumentError(f"{what} must be one to three positive integers, got {value!r}")
    return tuple(int(d) for d in dims) + (1,) * (3 - len(dims))
