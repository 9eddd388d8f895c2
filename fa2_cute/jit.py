"""From a specification to code: compile once per (specification, architecture), keep, launch."""

import tempfile
import threading
from dataclasses import dataclass, field
from typing import Any

from .arch import Architecture
from .spec import ForwardSpec

_COMPILED: dict[tuple[ForwardSpec, Architecture], "Kernel"] = {}
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """Compiled code. ``function(q, k, v, out, lse, scale_log2)`` launches it on torch's current CUDA stream."""

    spec: ForwardSpec
    arch: Architecture
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    function: Any = field(repr=False)


def compiled(spec: ForwardSpec, arch: Architecture) -> Kernel:
    """The kernel for ``spec`` on ``arch``: from memory, or compiled now (some seconds)."""
    key = (spec, arch)
    kernel = _COMPILED.get(key)
    if kernel is None:
        with _LOCK:
            kernel = _COMPILED.get(key)
            if kernel is None:
                kernel = _COMPILED[key] = _compile(spec, arch)
    return kernel


def compilations() -> int:
    """How many specifications this process has compiled."""
    return len(_COMPILED)


def _compile(spec: ForwardSpec, arch: Architecture) -> Kernel:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from .kernels.forward import Forward

    dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[spec.dtype]

    def rows() -> Any:
        """(batch, length, heads, head_dim): rows of head_dim elements, every row start a multiple of 16 bytes."""
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return make_fake_tensor(
            dtype, (*(cute.sym_int32() for _ in range(3)), spec.head_dim), strides, assumed_align=16
        )

    lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = make_fake_tensor(cutlass.Float32, tuple(cute.sym_int32() for _ in range(3)), lse_strides, assumed_align=4)
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as dump:
        function = cute.compile(
            Forward(spec),
            *(rows() for _ in range(4)),
            lse,
            cutlass.Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {arch.target} --generate-line-info --keep-ptx --keep-cubin --dump-dir {dump}",
        )
    return Kernel(spec, arch, function.artifacts.PTX, function.artifacts.CUBIN, function)
