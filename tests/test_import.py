"""Importing the package: quick, silent, and without a GPU, a driver or the compiler."""

import subprocess
import sys

import pytest


def python(script: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "always", "-c", script], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("statement", ["import fa2_cute", "from fa2_cute import flash_attn_func"])
def test_takes_at_most_a_second_beyond_torch(statement):
    """The best of three, as other processes may run beside it."""
    script = f"import torch, time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    assert min(float(python(script).stdout) for _ in range(3)) < 1.0


def test_prints_nothing_beyond_what_torch_prints():
    alone = python("import torch")
    with_package = python("import torch, fa2_cute; fa2_cute.flash_attn_func; import fa2_cute.reference, fa2_cute.cli")
    assert with_package.stdout == alone.stdout
    assert with_package.stderr == alone.stderr


def test_loads_neither_the_compiler_nor_the_emulator():
    script = (
        "import sys; from fa2_cute import flash_attn_func; "
        "print([name for name in ('cutlass', 'tvm_ffi', 'fa2_cute.emulator') if name in sys.modules])"
    )
    assert python(script).stdout.strip() == "[]"


def test_names_what_it_offers():
    import fa2_cute

    assert callable(fa2_cute.flash_attn_func)
    assert set(fa2_cute.__all__) <= set(dir(fa2_cute))
    with pytest.raises(AttributeError, match=r"fa2_cute.*no_such_thing"):
        fa2_cute.no_such_thing  # noqa: B018
