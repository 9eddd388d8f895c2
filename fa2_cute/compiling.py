"""From a specification to code, with the CuTe DSL; needs no GPU."""

import contextlib
import gc
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import arch as architectures
from .arch import Architecture
from .loading import link
from .parameters import Parameter, ScalarParameter
from .store import Code

ENTRY_POINT = "fa2_cute_launch"  # the launcher's name


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's garbage collector, which is as it was afterwards.

    Importing the compiler and tracing a kernel make many objects that stay, and hardly any garbage: with torch loaded,
    collections take 0.14 of the 0.45 s of the import, and a full one among the trace 0.3 s. (Threads that compile at
    the same time leave the collector as the first of them found it.)
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def compile_code(spec: Any, arch: Architecture, *, source_lines: bool = False) -> Code:
    """The code for ``spec`` (a ``jit.Specification``) on ``arch``; takes some seconds. ``source_lines``: with the
    kernel's lines in it, for who shows where instructions come from."""
    import cutlass.cute as cute
    from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
    from cutlass.cute.runtime import make_fake_stream

    arguments = [parameter and _stand_in(parameter) for parameter in spec.parameters()]
    # The emulator names a kernel's source lines, so the code that it runs has them. They change no instruction and take
    # a third of the time, so other code has them only if asked for, or with the compiler's own CUTE_DSL_LINEINFO=1.
    lines = "--generate-line-info " if source_lines or arch == architectures.TARGET else ""
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as folder, warnings.catch_warnings():
        # Loops of 64 and more register operations are unrolled on purpose.
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        function = cute.compile(
            spec.build(),
            *arguments,
            make_fake_stream(use_tvm_ffi_env_stream=True),
            # Only what is exported is used. On a host with such a GPU the compiler would also make a function to call
            # at once: the launcher's machine code once more, 0.2 s.
            no_jit_engine=True,
            options=f"--enable-tvm-ffi --gpu-arch {arch.target} {lines}--keep-ptx --keep-cubin --dump-dir {folder}",
        )
        path = Path(folder) / "launcher.o"
        function.export_to_c(str(path), ENTRY_POINT)
        return Code(function.artifacts.PTX, function.artifacts.CUBIN, link(path.read_bytes()))


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
