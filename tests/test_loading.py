"""Launchers: linked once, loaded without the compiler; and loaded all the same where there was no linker."""

import os
import shutil
import subprocess
import sys

import pytest

from fa2_cute import arch, compiling, jit, loading, tiling

SPECS = [tiling.choose("bfloat16", head_dim, head_dim, tiling.FULL, arch.TARGET) for head_dim in (64, 128)]

needs_linker = pytest.mark.skipif(not any(map(shutil.which, loading.LINKERS)), reason="needs a linker")


def run(program: str, **environment) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    assert done.stderr == ""
    return done.stdout


@needs_linker
def test_a_new_process_loads_a_kernel_without_the_compiler():
    kernel = jit.compiled(SPECS[0], arch.TARGET)
    assert loading.is_linked(kernel.code.launcher)
    program = (
        "import sys\n"
        "from fa2_cute import arch, jit, tiling\n"
        "spec = tiling.choose('bfloat16', 64, 64, tiling.FULL, arch.TARGET)\n"
        "function = jit.compiled(spec, arch.TARGET).function\n"
        "print('cutlass' in sys.modules)\n"
        "import cutlass\n"
        "print(type(function).__module__)\n"
    )
    assert run(program).split() == ["False", "tvm_ffi.core"]


@needs_linker
def test_each_launcher_is_its_own():
    """All define the same names; loaded one after the other, each still takes rows of its own width."""
    functions = [jit.compiled(spec, arch.TARGET).function for spec in SPECS]
    for function, spec in zip(functions, SPECS, strict=True):
        with pytest.raises(TypeError, match=rf"mQ: Tensor\(\[n0, n1, n2, {spec.head_dim}\], bfloat16\)"):
            function()


@pytest.mark.parametrize("cause", ["none", "fails"])
def test_without_a_linker_the_object_file_is_kept_and_said(monkeypatch, tmp_path, caplog, cause):
    failing = tmp_path / "ld"
    failing.write_text("#!/bin/sh\necho cannot link >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(failing) if cause == "fails" else None)
    assert loading.link(b"object") == b"object"
    assert ("no linker" if cause == "none" else "cannot link") in caplog.text
    assert "take longer to load" in caplog.text


def test_an_object_file_is_loaded_by_the_compiler(monkeypatch, caplog):
    monkeypatch.setattr(loading, "LINKERS", ())
    code = compiling.compile_code(SPECS[0], arch.TARGET)
    assert not loading.is_linked(code.launcher)
    with pytest.raises(TypeError, match="mQ: Tensor"):
        loading.load(code.launcher, compiling.ENTRY_POINT)()


@needs_linker
@pytest.mark.parametrize("reason", ["several", "none", "chosen"])
def test_where_the_runtime_library_is_not_the_only_one_the_compiler_chooses(monkeypatch, reason):
    """It knows which of several goes with the driver."""
    loading._runtime.cache_clear()
    if reason == "chosen":
        monkeypatch.setenv("CUTE_DSL_LIBS", str(loading._runtimes()[0]))
    else:
        monkeypatch.setattr(loading, "_runtimes", lambda: loading_paths * 2 if reason == "several" else [])
        loading_paths = [None]
    assert loading._runtime() is None
    launcher = jit.compiled(SPECS[0], arch.TARGET).code.launcher
    with pytest.raises(TypeError, match="mQ: Tensor"):
        loading.load(launcher, compiling.ENTRY_POINT)()
    loading._runtime.cache_clear()


@needs_linker
def test_a_folder_that_libraries_are_not_loaded_from_is_named(monkeypatch, tmp_path):
    """What tvm_ffi raised on a folder mounted noexec; any other failure stays what it is."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    launcher = jit.compiled(SPECS[0], arch.TARGET).code.launcher
    monkeypatch.setattr(loading.tempfile, "tempdir", str(tmp_path))

    def refused(path):
        assert path.read_bytes() == launcher
        raise RuntimeError(f"Failed to load dynamic shared library {path} {path}: {reason} from shared object")

    monkeypatch.setattr(tvm_ffi, "load_module", refused)
    monkeypatch.setattr(loading, "_runtime", lambda: True)
    reason = "failed to map segment"
    with pytest.raises(OSError, match=f"^TMPDIR: got {tmp_path}, takes a folder .* noexec"):
        loading.load(launcher, compiling.ENTRY_POINT)
    reason = "undefined symbol"
    with pytest.raises(RuntimeError, match="undefined symbol"):
        loading.load(launcher, compiling.ENTRY_POINT)
    assert list(tmp_path.iterdir()) == []


def test_importing_it_takes_no_compiler():
    assert run("import sys, fa2_cute.jit; print([x for x in ('cutlass', 'tvm_ffi') if x in sys.modules])") == "[]\n"
