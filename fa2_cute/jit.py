"""From a specification to code: compile once per (specification, architecture), keep in memory and on disk, launch."""

import functools
import logging
import tempfile
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from . import store
from .arch import Architecture
from .parameters import Parameter, ScalarParameter

ENTRY_POINT = "fa2_cute_launch"  # the launcher's name in the object file

# A person should never wait in silence; the level is one that Python shows where nobody has configured logging.
_LOG = logging.getLogger("fa2_cute")
_KERNELS: dict[tuple["Specification", Architecture], "Kernel"] = {}
_LOCK = threading.Lock()


class Specification(Protocol):
    """What a kernel is specialised on: frozen and hashable, and its ``str`` tells it from every other."""

    @property
    def title(self) -> str:
        """One line for a person."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    def parameters(self) -> tuple[Parameter | None, ...]:
        """The arguments of the kernel and of its launcher, in order; None for one that this specification has not."""

    def build(self) -> Any:
        """The launch code (a ``cute.jit`` callable of those arguments and a stream); loads the compiler."""


@dataclass(frozen=True)
class Kernel:
    """Compiled code and what it was compiled from."""

    spec: Specification
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
        """``function(*arguments)``, those of ``spec.parameters()``, launches on torch's current CUDA stream."""
        from cutlass.runtime import load_module

        with tempfile.TemporaryDirectory(prefix="fa2_cute-") as folder:
            path = Path(folder) / "kernel.o"
            path.write_bytes(self.code.object_code)
            return load_module(str(path), enable_tvm_ffi=True)[ENTRY_POINT]


def compiled(spec: Specification, arch: Architecture) -> Kernel:
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


def obtain(spec: Specification, arch: Architecture, where: store.Store | None) -> store.Code:
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


def entry_name(spec: Specification, arch: Architecture) -> str:
    """What the code for ``spec`` on ``arch`` is called in a store: every field of both is part of it."""
    return store.entry_name(f"{spec} {arch}")


def _compile(spec: Specification, arch: Architecture) -> store.Code:
    _LOG.warning("fa2_cute: compiling %s for %s, some seconds", spec.title, arch.target)
    import cutlass.cute as cute
    from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
    from cutlass.cute.runtime import make_fake_stream

    arguments = [parameter and _stand_in(parameter) for parameter in spec.parameters()]
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as folder, warnings.catch_warnings():
        # Loops of 64 and more register operations are unrolled on purpose.
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        function = cute.compile(
            spec.build(),
            *arguments,
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {arch.target} --generate-line-info --keep-ptx --keep-cubin "
            f"--dump-dir {folder}",
        )
        path = Path(folder) / "kernel.o"
        function.export_to_c(str(path), ENTRY_POINT)
        return store.Code(function.artifacts.PTX, function.artifacts.CUBIN, path.read_bytes())


def _stand_in(parameter: Parameter) -> Any:
    """What the compiler takes in the place of an argument that is not there yet."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    dtype = _dtype(parameter.dtype)
    if isinstance(parameter, ScalarParameter):
        return dtype(1)
    extents = tuple(cute.sym_int32() if extent is None else extent for extent in parameter.shape)
    strides = tuple(
        cute.sym_int64(divisibility=parameter.divisor) if stride is None else stride for stride in parameter.stride
    )
    return make_fake_tensor(dtype, extents, strides, assumed_align=parameter.divisor * dtype.width // 8)


def _dtype(name: str) -> Any:
    """The compiler's type of that name."""
    import cutlass

    return {
        "float16": cutlass.Float16,
        "bfloat16": cutlass.BFloat16,
        "float32": cutlass.Float32,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
        "uint8": cutlass.Uint8,
        "float8_e4m3fn": cutlass.Float8E4M3FN,
        "float8_e5m2": cutlass.Float8E5M2,
    }[name]
