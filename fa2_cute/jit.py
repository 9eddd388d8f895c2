"""From a specification to code: compile once per (specification, architecture), keep in memory and on disk, launch."""

import functools
import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

from . import compiling, loading, store
from .arch import Architecture
from .parameters import Parameter

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
        return loading.load(self.code.launcher, compiling.ENTRY_POINT)


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
    return compiling.compile_code(spec, arch)
