"""Compiled code on disk: found again, not trusted when damaged or stale, compiled once by those who start together."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_cute import arch, jit, store, tiling
from fa2_cute.spec import CAUSAL, FULL

SPEC = tiling.shipped(arch.TARGET)[0]
CODE = store.Code(ptx="// text", cubin=b"\x7fELF cubin", launcher=bytes(range(256)))


@pytest.fixture
def folder(tmp_path):
    return store.Store(tmp_path / "cache")


@given(st.text(st.characters(codec="utf-8")), st.binary(), st.binary())
def test_what_was_saved_is_loaded(tmp_path_factory, ptx, cubin, launcher):
    where = store.Store(tmp_path_factory.mktemp("cache"))
    code = store.Code(ptx, cubin, launcher)
    where.save("entry", code)
    assert where.load("entry") == code


def test_an_unknown_entry_is_none(folder):
    assert folder.load("entry") is None


@pytest.mark.parametrize("file", ["kernel.ptx", "kernel.cubin", "launcher.elf"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_file_is_not_trusted(folder, file, damage):
    folder.save("entry", CODE)
    path = folder.folder / "entry" / file
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    assert folder.load("entry") is None
    folder.save("entry", CODE)
    assert folder.load("entry") == CODE


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"kernel.ptx": "0"}', "3", json.dumps({"../entry": "x"})])
def test_a_damaged_manifest_is_not_trusted(folder, manifest):
    folder.save("entry", CODE)
    (folder.folder / "entry" / store.MANIFEST).write_text(manifest)
    assert folder.load("entry") is None


OTHER = {
    "dtype": "float16", "head_dim": 192, "value_dim": 32, "features": FULL if SPEC.features != FULL else CAUSAL,
    "tile_m": 256, "tile_n": 128, "warps": 8, "stages": 3, "query_held": "none", "swizzle": False,
    "split": True,
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SPEC)])
def test_every_field_of_a_specification_names_another_entry(field):
    """A new field without an entry in OTHER fails here: it must be part of what tells code apart."""
    base = dataclasses.replace(SPEC, reference="trailing")
    other = {**OTHER, "reference": "first"}[field]
    names = [jit.entry_name(spec, arch.TARGET) for spec in (base, dataclasses.replace(base, **{field: other}))]
    assert names[0] != names[1]


def test_every_architecture_names_another_entry():
    assert len({jit.entry_name(SPEC, architecture) for architecture in arch.BY_NAME.values()}) == len(arch.BY_NAME)


@pytest.mark.parametrize("changed", ["version", "source", "processor"])
def test_other_surroundings_name_another_entry(monkeypatch, changed):
    before = jit.entry_name(SPEC, arch.TARGET)
    if changed == "version":
        monkeypatch.setattr(store.metadata, "version", lambda name: "0")
    elif changed == "source":
        read = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "softmax.py"))
    else:
        monkeypatch.setattr(store, "_processor", lambda: "another")
    store._surroundings.cache_clear()
    after = jit.entry_name(SPEC, arch.TARGET)
    store._surroundings.cache_clear()
    assert before != after


def test_a_folder_that_takes_nothing_is_a_warning(monkeypatch, tmp_path, caplog):
    """A file where the folder should be: like a full disk or a home that is read only."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(jit, "_compile", lambda spec, architecture: CODE)
    assert jit.obtain(SPEC, arch.TARGET, store.Store(blocked)) == CODE
    assert str(blocked) in caplog.text


def test_an_entry_can_be_read_by_others(folder):
    """As far as the umask lets them: a folder may be made to be shipped."""
    folder.save("entry", CODE)
    reference = folder.folder / "made-by-mkdir"
    reference.mkdir()
    assert (folder.folder / "entry").stat().st_mode == reference.stat().st_mode


def test_it_is_compiled_once_and_then_found(folder, monkeypatch):
    calls = []

    def compile_(spec, architecture):
        calls.append(spec)
        return CODE

    monkeypatch.setattr(jit, "_compile", compile_)
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: jit.obtain(SPEC, arch.TARGET, folder), range(8)))
    assert codes == [CODE] * 8
    assert len(calls) == 1


# A process that says when it compiles, and takes its time about it.
SLOW = """
import sys, time
from pathlib import Path
from fa2_cute import arch, jit, store, tiling

def compile_(spec, architecture):
    print("compiling", flush=True)
    time.sleep(float(sys.argv[2]))
    return store.Code("// text", b"cubin", b"launcher")

jit._compile = compile_
code = jit.obtain(tiling.shipped(arch.TARGET)[0], arch.TARGET, store.Store(Path(sys.argv[1])))
print("got", code.ptx, flush=True)
"""


def slow(folder, seconds) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SLOW, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_compile_it_once(tmp_path):
    outputs = [process.communicate(timeout=60)[0] for process in [slow(tmp_path, 1.0) for _ in range(3)]]
    assert "".join(outputs).count("compiling") == 1
    assert all("got // text" in output for output in outputs)


def test_a_process_that_is_killed_while_it_compiles_keeps_nobody(tmp_path):
    killed = slow(tmp_path, 600)
    assert killed.stdout.readline() == "compiling\n"
    killed.kill()
    killed.wait(timeout=60)
    assert slow(tmp_path, 0).communicate(timeout=60)[0] == "compiling\ngot // text\n"


def test_a_save_that_fails_leaves_nothing(folder, monkeypatch):
    """As on a full disk; and what was there before stays."""
    write = Path.write_bytes

    def full(path, content):
        if path.name == store.LAUNCHER:
            raise OSError("no space left")
        write(path, content)

    folder.save("entry", CODE)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        folder.save("entry", dataclasses.replace(CODE, ptx="// other"))
    assert folder.load("entry") == CODE
    assert [path.name for path in folder.folder.iterdir()] == ["entry"]


def test_a_damaged_entry_is_compiled_again(folder, monkeypatch):
    name = jit.entry_name(SPEC, arch.TARGET)
    folder.save(name, CODE)
    (folder.folder / name / store.CUBIN).write_bytes(b"damage")
    made = dataclasses.replace(CODE, ptx="// made again")
    monkeypatch.setattr(jit, "_compile", lambda spec, architecture: made)
    assert jit.obtain(SPEC, arch.TARGET, folder) == made
    assert folder.load(name) == made


def test_a_new_process_compiles_nothing(tmp_path):
    """The second process finds what the first has compiled, says nothing and does not even load the compiler."""
    program = (
        "import sys\n"
        "from fa2_cute import arch, jit, tiling\n"
        "kernel = jit.compiled(tiling.shipped(arch.TARGET)[0], arch.TARGET)\n"
        "print('cutlass' in sys.modules, len(kernel.ptx))\n"
    )
    environment = {**os.environ, "FA2_CUTE_CACHE": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
        for _ in range(2)
    )
    assert first.stdout.split()[0] == "True"
    assert first.stderr.count("\n") == 1
    assert "compiling" in first.stderr
    assert second.stdout.split() == ["False", first.stdout.split()[1]]
    assert second.stderr == ""


def test_the_cache_can_be_turned_off_and_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("FA2_CUTE_CACHE", "off")
    assert store.default() is None
    monkeypatch.setenv("FA2_CUTE_CACHE", str(tmp_path))
    assert store.default().folder == tmp_path


def test_the_launcher_loads_from_the_object_code():
    """Loading needs no GPU; calling it does."""
    assert callable(jit.compiled(SPEC, arch.TARGET).function)


def test_device_code_imports_nothing_that_its_name_does_not_depend_on():
    known = {path.stem for path in store.described_by()}
    assert {"spec", "decode_spec", "append_spec", "compiling", "loading", "parameters"} <= known
    for path in store.described_by():
        if path.parent.name == "kernels" or path.stem.endswith("spec"):
            imported = re.findall(r"^\s*from \.{1,2}(\w+) import", path.read_text(), re.MULTILINE)
            assert set(imported) <= known, path
