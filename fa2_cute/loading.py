"""A compiled kernel's launcher: linked once, on the host that compiles; loaded by every process that calls it.

What the compiler exports is an object file, and only the compiler itself can load that: half a second of imports for a
new process. As a shared library it needs tvm_ffi and the compiler's runtime library, some 20 ms.
"""

import ctypes
import functools
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

LINKERS = ("ld", "ld.lld", "mold")  # the first on PATH links
RUNTIME = "libcute_dsl_runtime.so"
_SHARED = 3  # ET_DYN: the type of a shared library in its ELF header, at byte 16
_NOT_MAPPED = "failed to map segment"  # what glibc says of a library in a folder that nothing may be run from
_LOG = logging.getLogger("fa2_cute")


def link(object_code: bytes) -> bytes:
    """``object_code`` as a shared library, or as it is where this host has no linker or the linker fails (a warning).

    Both are launchers for ``load``.
    """
    linker = next(filter(None, map(shutil.which, LINKERS)), None)
    if linker is None:
        _LOG.warning("fa2_cute: no linker (%s): new processes take longer to load kernels", ", ".join(LINKERS))
        return object_code
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as folder:
        source, library = Path(folder) / "launcher.o", Path(folder) / "launcher.so"
        source.write_bytes(object_code)
        # -Bsymbolic: every launcher defines the same names, and calls its own.
        done = subprocess.run(
            [linker, "-shared", "-Bsymbolic", "-o", library, source], capture_output=True, text=True, check=False
        )
        if done.returncode:
            _LOG.warning("fa2_cute: new processes take longer to load kernels, as %s: %s", linker, done.stderr.strip())
            return object_code
        return library.read_bytes()


def is_linked(launcher: bytes) -> bool:
    """Whether ``launcher`` is a shared library, not an object file."""
    return launcher[16:17] == bytes([_SHARED])


def load(launcher: bytes, entry_point: str) -> Callable:
    """The function called ``entry_point`` of ``launcher``, as it is of tvm_ffi. Needs no GPU, and stays loaded.

    Raises OSError where libraries may not be loaded from the folder for temporary files.
    """
    linked = is_linked(launcher)
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as folder:
        path = Path(folder) / ("launcher.so" if linked else "launcher.o")
        path.write_bytes(launcher)
        try:
            return _module(path, linked)[entry_point]
        except RuntimeError as error:
            if _NOT_MAPPED not in str(error):
                raise
            raise OSError(
                f"TMPDIR: got {tempfile.gettempdir()}, takes a folder that libraries may be loaded from (this one is "
                f"mounted noexec, it seems): {error}"
            ) from error


def _module(path: Path, linked: bool):
    if linked and _runtime() is not None:
        import tvm_ffi

        return tvm_ffi.load_module(path)
    from cutlass.runtime import load_module

    return load_module(str(path), enable_tvm_ffi=True)


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The compiler's runtime library, loaded for the launchers to find; None where the compiler has to choose it."""
    found = _runtimes()
    # Of libraries for several versions of CUDA the compiler takes the one that the driver has.
    if "CUTE_DSL_LIBS" in os.environ or len(found) != 1:
        return None
    return ctypes.CDLL(str(found[0]), ctypes.RTLD_GLOBAL)


def _runtimes() -> list[Path]:
    """Where the compiler's package has its runtime library."""
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = map(Path, () if package is None else package.submodule_search_locations or ())
    return [path for root in roots for pattern in ("lib", "cu*/lib") for path in root.glob(f"{pattern}/{RUNTIME}")]
