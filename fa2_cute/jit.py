"""From a specification to code: compile once per (specification, architecture), keep in memory and on disk, launch."""

import functools
import logging
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import store
from .arch import Architecture
from .spec import ForwardSpec

ENTRY_POINT = "fa2_cute_forward"  # the launcher's name in the object file

# A person should never wait in silence; the level is one that Python shows where nobody has configured logging.
_LOG = logging.getLogger("fa2_cute")
_KERNELS: dict[tuple[ForwardSpec, Architecture], "Kernel"] = {}
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """Compiled code and what it was compiled from."""

    spec: ForwardSpec
    arch: Architecture
    code: store.Code = field(repr=False)

    @property
    def ptx(self) -> str:
        return self.code.ptx

    @property
    def cubin(self) -> bytes:
        return self.code.cubin

    @functools.cached_property
    def function(self) -> Any:
        """``function(q, k, v, out, lse, scale_log2)`` launches on torch's current CUDA stream."""
        from cutlass.runtime import load_module

        with tempfile.TemporaryDirectory(prefix="fa2_cute-") as folder:
            path = Path(folder) / "kernel.o"
            path.write_bytes(self.code.object_code)
            return load_module(str(path), enable_tvm_ffi=True)[ENTRY_POINT]


def compiled(spec: ForwardSpec, arch: Architecture) -> Kernel:
    """The kernel for ``spec`` on ``arch``: from memory, from disk, or compiled now (some seconds)."""
    key = (spec, arch)
    kernel = _KERNELS.get(key)
    if kernel is None:
        with _LOCK:
            kernel = _KERNELS.get(key)
            if kernel is None:
                kernel = _KERNELS[key] = Kernel(spec, arch, obtain(spec, arch, store.default()))
    return kernel


def kernels() -> int:
    """How many kernels this process has, compiled or loaded."""
    return len(_KERNELS)


def obtain(spec: ForwardSpec, arch: Architecture, where: store.Store | None) -> store.Code:
    """The code for ``spec`` on ``arch`` from ``where``; compiled and put there if it is not there in good order.

    A folder that cannot be written to is worth a warning, not an error: the kernel is compiled for this process.
    """
    if where is None:
        return _compile(spec, arch)
    name = entry_name(spec, arch)
    code = where.load(name)
    if code is not None:
        return code
    try:
        with where.lock(name):
            code = where.load(name)  # another process may have been faster
            if code is None:
                code = _compile(spec, arch)
                where.save(name, code)
    except OSError as error:
        _LOG.warning("fa2_cute: compiled kernels cannot be kept in %s: %s", where.folder, error)
    return code if code is not None else _compile(spec, arch)


def entry_name(spec: ForwardSpec, arch: Architecture) -> str:
    """What the code for ``spec`` on ``arch`` is called in a store: every field of both is part of it."""
    return store.entry_name(f"{spec} {arch}")


def _compile(spec: ForwardSpec, arch: Architecture) -> store.Code:
    _LOG.warning("fa2_cute: compiling %s for %s, some seconds", spec.title, arch.target)
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from .kernels.forward import Forward

    forward = Forward(spec)

    def rows() -> Any:
        """(batch, length, heads, head_dim): rows of head_dim elements that start at multiples of 16 bytes."""
        extents = (*(cute.sym_int32() for _ in range(3)), spec.head_dim)
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        return make_fake_tensor(forward.dtype, extents, strides, assumed_align=16)

    lse_strides = (cute.sym_int64(), cute.sym_int64(), 1)
    lse = make_fake_tensor(cutlass.Float32, tuple(cute.sym_int32() for _ in range(3)), lse_strides, assumed_align=4)
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as folder:
        function = cute.compile(
            forward,
            *(rows() for _ in range(4)),
            lse,
            cutlass.Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {arch.target} --generate-line-info --keep-ptx --keep-cubin "
            f"--dump-dir {folder}",
        )
        path = Path(folder) / "kernel.o"
        function.export_to_c(str(path), ENTRY_POINT)
        return store.Code(function.artifacts.PTX, function.artifacts.CUBIN, path.read_bytes())
