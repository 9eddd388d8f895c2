"""Compiling leaves the process as it was, and makes nothing that is thrown away."""

import gc
import os
import subprocess
import sys

import pytest

from fa2_cute import arch, compiling


class Unbuildable:
    """A specification whose kernel cannot be built; it notes whether Python collects garbage meanwhile."""

    collecting = None

    def parameters(self):
        return ()

    def build(self):
        self.collecting = gc.isenabled()
        raise ArithmeticError("no kernel")


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_paused_and_then_as_it_was(collecting):
    spec = Unbuildable()
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(ArithmeticError):
            compiling.compile_code(spec, arch.TARGET)
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()
    assert spec.collecting is False


PROGRAM = """
import os
import cutlass.cute as cute
from cutlass._mlir import execution_engine
from fa2_cute import arch, compiling
from fa2_cute.append_spec import AppendSpec

class Engine:
    def __init__(self, *arguments, **options):
        os.write(1, b"an engine\\n")  # the compiler keeps what is printed meanwhile
        os._exit(0)

execution_engine.ExecutionEngine = Engine
spec = AppendSpec("bfloat16", "bfloat16", 64, 64)
print(len(compiling.compile_code(spec, arch.TARGET).cubin) > 0, flush=True)
compile_ = cute.compile
cute.compile = lambda *arguments, no_jit_engine, **options: compile_(*arguments, **options)
compiling.compile_code(spec, arch.TARGET)
"""


def test_no_function_is_made_beside_the_one_that_is_exported():
    """On a host whose GPU could run the kernel; and there the compiler would make one if it were let."""
    environment = {**os.environ, "CUTE_DSL_ARCH": arch.TARGET.target}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "True\nan engine\n"
