"""Small kernels of tests, which write down what device code computes, as specifications."""

import functools
import importlib
from dataclasses import dataclass

from fa2_cute import arch, compiling, jit
from fa2_cute.parameters import ScalarParameter, TensorParameter


@dataclass(frozen=True)
class Probe:
    """A kernel whose blocks are one warp.

    module, name    where its launch code is, a class, which is loaded to be compiled
    fixed           the class's arguments
    columns         of what it writes, found (rows, columns), int32
    scalars         its other arguments, int32
    """

    module: str
    name: str
    fixed: tuple
    columns: int
    scalars: tuple[str, ...]
    threads: int = 32
    shared_bytes: int = 0

    @property
    def title(self) -> str:
        return f"{self.name}{self.fixed}"

    def parameters(self):
        found = TensorParameter("found", "int32", (None, self.columns), (self.columns, 1), written=True)
        return found, *(ScalarParameter(name, "int32") for name in self.scalars)

    def build(self):
        return getattr(importlib.import_module(self.module), self.name)(*self.fixed)


@functools.cache
def compiled(probe: Probe) -> jit.Kernel:
    """For the emulator."""
    return jit.Kernel(probe, arch.TARGET, compiling.compile_code(probe, arch.TARGET))
