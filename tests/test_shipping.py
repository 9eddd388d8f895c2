"""Kernels made ahead: what ``fa2-cute compile`` makes from its options, and that a process needs no more than that."""

import os
import subprocess
import sys
import tempfile

import pytest
import torch

from fa2_cute import (
    arch,
    cli,
    flash_attn_func,
    flash_attn_with_kvcache,
    jit,
    shipping,
    split_calls,
    store,
    tiling,
)
from fa2_cute.cache_spec import FP8_DTYPES
from fa2_cute.shipping import Wanted, features_of, widths_of
from fa2_cute.spec import CAUSAL, FULL, Features

PROGRAM = """
import sys
for compiler in ("cutlass", "nvidia_cutlass_dsl"):
    sys.modules[compiler] = None  # an import of it fails
import warnings
warnings.simplefilter("ignore")
import torch
from fa2_cute import flash_attn_func, reference
q, k, v = (torch.randn(1, length, heads, 24).bfloat16() for length, heads in ((9, 4), (50, 2), (50, 2)))
out = flash_attn_func(q, k, v, causal=True)
print(reference.error(out, reference.attention(q, k, v, causal=True)[0]).max < 0.01)
"""


def run(folder) -> subprocess.CompletedProcess:
    environment = {**os.environ, "FA2_CUTE_CACHE": str(folder)}
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)


def test_a_process_that_cannot_compile_works_from_a_shipped_folder(tmp_path, capsys):
    options = ["--head-dim", "24", "--dtype", "bfloat16", "--dtype", "float16", "--features", "causal", "--jobs", "2"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", "--into", str(tmp_path / "shipped"), *options])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    kernels = Wanted(widths=((24, 24),), features=(CAUSAL,)).specifications(arch.TARGET)
    assert len(kernels) == 2
    assert all(spec.title in printed for spec in kernels)
    assert "2 kernels in" in printed
    result = run(tmp_path / "shipped")
    assert (result.stdout, result.stderr) == ("True\n", "")
    nothing = run(tmp_path / "empty")  # such a process needs the folder
    assert nothing.returncode != 0
    assert "cutlass" in nothing.stderr


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.filterwarnings("ignore::fa2_cute.emulation.EmulationNotice")
def test_calls_over_caches_ask_for_no_other_kernels(monkeypatch, cache_dtype):
    """Dense with few and more queries on many keys; pages, appended to and attended to in one part and in two."""
    asked = set()
    compiled = jit.compiled

    def noted(spec, architecture):
        asked.add(spec)
        return compiled(spec, architecture)

    monkeypatch.setattr(jit, "compiled", noted)

    def normal(*shape):
        return torch.randn(shape).bfloat16()

    fp8 = cache_dtype != "bfloat16"
    q, k = normal(1, 40, 4, 64), normal(1, 1100, 2, 64)
    if not fp8:
        for query in (q[:, :1], q[:, :20]):
            flash_attn_func(query, k, k + 0, causal=True)
        for splits in (2, 9):  # as calls on a GPU may be
            split_calls.attend(q, k, k + 0, window=(None, 0), splits=splits)
    where = {"block_table": torch.tensor([[2, 0, 1]], dtype=torch.int32), "causal": True}
    lengths, new = torch.tensor([5], dtype=torch.int32), normal(1, 20, 2, 64)
    angles = {"rotary_cos": normal(48, 32), "rotary_sin": normal(48, 32)}
    of_head = {f"{x}_descale": torch.ones(1, 2) for x in "kv"} if fp8 else {}
    of_page = {f"{x}_descale": torch.ones(4, 1, 2) for x in "kv"} if fp8 else {}
    for query_len, options in ((1, of_head), (2, {**angles, **of_page}), (20, {"num_splits": 2})):
        pages = [torch.zeros(4, 16, 2, 64).to(getattr(torch, cache_dtype)) for _ in range(2)]
        rows = (q[:, :query_len], *pages, new[:, :query_len], new[:, :query_len] + 0)
        flash_attn_with_kvcache(*rows, cache_seqlens=lengths, **where, **options)
    assert len(asked) >= 6
    cache_dtypes = (cache_dtype,) if fp8 else ()
    made = Wanted(("bfloat16",), ((64, 64),), (CAUSAL,), kvcache=True, cache_dtypes=cache_dtypes)
    assert asked <= set(made.specifications(arch.TARGET))


def test_by_default_it_makes_the_shipped_kernels(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(jit, "obtain", lambda *of_kernel: asked.append(of_kernel))
    monkeypatch.setattr(store.Store, "load", lambda self, name: "there")
    for options, names in (([], ["sm_120"]), (["--arch", "sm_90a", "--arch", "120"], ["sm_90", "sm_120"])):
        asked.clear()
        with pytest.raises(SystemExit):
            cli.main(["compile", "--jobs", "1", "--into", str(tmp_path), *options])
        wanted = [(spec, arch.BY_NAME[name]) for name in names for spec in tiling.shipped(arch.BY_NAME[name])]
        assert [(spec, architecture) for spec, architecture, _ in asked] == wanted
        assert all(where.folder == tmp_path for *_, where in asked)
        assert f"{len(wanted)} kernels" in capsys.readouterr().out


def test_what_fails_in_a_process_fails():
    """A kernel that does not fit: the compiler's complaint comes through."""
    spec = tiling.choose("bfloat16", 64, 64, FULL, arch.TARGET)
    wanted = [(spec, arch.TARGET), ("no specification", arch.TARGET)]
    with pytest.raises(AttributeError, match="'str' object"):
        list(shipping.compile_all(wanted, store.default(), jobs=2))


@pytest.fixture
def nothing_compiles(monkeypatch):
    def obtain(*of_kernel):
        pytest.fail("a kernel was asked for")

    monkeypatch.setattr(jit, "obtain", obtain)


def ends_in_one_line(capsys, *arguments: str) -> str:
    """What ``fa2-cute compile`` says on stderr as it fails."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", *arguments])
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert printed.out.strip() == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("given", ["--into", "FA2_CUTE_CACHE"])
@pytest.mark.parametrize("below", ["", "shipped"])
@pytest.mark.usefixtures("nothing_compiles")
def test_a_folder_that_takes_nothing_is_an_error_before_anything_is_compiled(
    monkeypatch, capsys, tmp_path, given, below
):
    """A file where the folder, or one above it, should be."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / below
    monkeypatch.setenv("FA2_CUTE_CACHE", str(folder))
    said = ends_in_one_line(capsys, *(["--into", str(folder)] if given == "--into" else []))
    assert said.startswith(f"fa2-cute: {given}: got {folder}, takes a folder that can be written to: ")
    assert ("Not a directory" if below else "File exists") in said


@pytest.mark.usefixtures("nothing_compiles")
def test_a_folder_that_may_not_be_written_to_is_an_error_too(monkeypatch, capsys, tmp_path):
    """Its entries are folders, and this user may make none there (who runs the tests may be root, who may)."""

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    said = ends_in_one_line(capsys, "--into", str(tmp_path))
    assert f"--into: got {tmp_path}, takes a folder that can be written to: Permission denied" in said


@pytest.mark.usefixtures("nothing_compiles")
def test_wrong_options_make_no_folder(capsys, tmp_path):
    ends_in_one_line(capsys, "--head-dim", "100", "--into", str(tmp_path / "shipped"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_has_everything_need_not_be_written_to(monkeypatch, tmp_path):
    monkeypatch.setattr(store.Store, "load", lambda self, name: "there")
    (tmp_path / "file").write_text("")
    kernels = [(spec, arch.TARGET) for spec in tiling.shipped(arch.TARGET)]
    shipping.check_folder("--into", store.Store(tmp_path / "file"), kernels)
    missing = jit.entry_name(*kernels[-1])
    monkeypatch.setattr(store.Store, "load", lambda self, name: None if name == missing else "there")
    with pytest.raises(OSError, match=r"^--into: got .*/file, takes"):
        shipping.check_folder("--into", store.Store(tmp_path / "file"), kernels)


@pytest.mark.usefixtures("nothing_compiles")
def test_the_check_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "a" / "b"
    shipping.check_folder("--into", store.Store(folder), [(tiling.shipped(arch.TARGET)[0], arch.TARGET)])
    assert list(folder.iterdir()) == []


def test_a_kernel_that_is_not_kept_is_an_error(monkeypatch, capsys, tmp_path):
    """A disk that is full: calls go on with a warning, but here nothing else is wanted."""
    monkeypatch.setattr(jit, "obtain", lambda *of_kernel: None)
    said = ends_in_one_line(capsys, "--jobs", "1", "--into", str(tmp_path))
    assert f"compiled kernels cannot be kept in {tmp_path}: --into" in said


def _die():
    os._exit(1)


def test_a_process_that_dies_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shipping, "_quieten", _die)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", "--jobs", "2", "--into", str(tmp_path)])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "--jobs: got 2, takes fewer" in error
    assert error.count("\n") == 1


def test_it_takes_the_cores_of_its_process_not_of_the_host(monkeypatch):
    for have, taken in ((1, 1), (2, 2), (192, shipping.MOST_JOBS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, have=have: set(range(have)))
        assert shipping.cores() == taken


@pytest.mark.parametrize(
    ("words", "features"),
    [
        ("full", FULL),
        ("causal", CAUSAL),
        ("window", Features(left=True, right=True)),
        ("causal+softcap+alibi", Features(right=True, softcap=True, alibi=True)),
        ("left+varlen+sink", Features(left=True, varlen=True, sink=True)),
        ("mask=bool", Features(mask="bool")),
        ("full+softcap", Features(softcap=True)),
        ("window+causal+left", Features(left=True, right=True)),
    ],
)
def test_features_in_words(words, features):
    assert features_of(words) == features


def test_widths_in_words():
    assert (widths_of("96"), widths_of("192x128")) == ((96, 96), (192, 128))
    for text in ("64x", "x64", "128x64x", "wide", ""):
        with pytest.raises(ValueError, match="--head-dim: got"):
            widths_of(text)


def test_each_kernel_is_listed_once_and_as_the_architecture_takes_it():
    wanted = Wanted(features=(FULL, CAUSAL, features_of("varlen")), kvcache=True, cache_dtypes=("float8_e4m3fn",))
    for name in ("sm_89", "sm_90", "sm_120"):
        kernels = wanted.specifications(arch.BY_NAME[name])
        assert len(set(kernels)) == len(kernels)
        of_caches = [spec for spec in kernels if hasattr(spec, "overlap")]
        assert {spec.overlap for spec in of_caches} == {name != "sm_89"}


@pytest.mark.parametrize("name", ["sm_89", "sm_90", "sm_120"])
def test_titles_tell_kernels_apart(name):
    """All that the options of the command can ask of an architecture."""
    words = ["full", "causal", "window", "left", "varlen", "softcap", "alibi", "sink", "mask=bool", "mask=float32"]
    wanted = Wanted(
        widths=((64, 64), (192, 128)),
        features=tuple(map(features_of, [*words, "causal+softcap+alibi+sink"])),
        kvcache=True,
        cache_dtypes=FP8_DTYPES,
    )
    kernels = wanted.specifications(arch.BY_NAME[name])
    assert len({spec.title for spec in kernels}) == len(kernels) > 1000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--features", "sparse"], "--features: got 'sparse', takes words joined by +, of full, causal"),
        (["--features", "mask=bool+varlen"], "--features: got 'mask=bool+varlen': mask: takes calls of one length"),
        (["--features", "full+causal"], "--features: got 'full+causal', takes full or causal, not both"),
        (["--features", "sink+window+full"], "--features: got 'sink+window+full', takes window or full, not both"),
        (["--features", "mask=bool+mask=float16"], "takes mask=bool or mask=float16, not both"),
        (["--head-dim", "wide"], "--head-dim: got 'wide', takes a number"),
        (["--head-dim", "100"], "fa2-cute: --head-dim: got 100, takes multiples of 8"),
        (["--head-dim", "64x100"], "fa2-cute: --head-dim: value_dim: got 100, takes multiples of 8"),
        (["--head-dim", "300"], "fa2-cute: --head-dim: got 300, takes multiples of 8 from 8 to 256"),
        (["--head-dim", "64x300"], "fa2-cute: --head-dim: value_dim: got 300, takes multiples of 8 from 8 to 256"),
        (["--dtype", "float32"], "fa2-cute: --dtype: got 'float32', takes 'float16' or 'bfloat16'"),
        (["--kvcache", "--cache-dtype", "int8"], "fa2-cute: --cache-dtype: got 'int8'"),
        (["--kvcache", "--cache-dtype", "float8_e5m2", "--arch", "sm_80"], "--cache-dtype: got float8_e5m2"),
        (["--cache-dtype", "float8_e5m2"], "--cache-dtype: got float8_e5m2 without --kvcache"),
        (["--arch", "sm_70"], "fa2-cute: --arch: got 'sm_70'"),
        (["--jobs", "0"], "--jobs: got 0, takes 1 or more"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_wrong_options_are_one_line(monkeypatch, capsys, tmp_path, options, text):
    monkeypatch.setattr(jit, "obtain", None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", "--into", str(tmp_path), *options])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_with_the_cache_off_it_wants_a_folder(monkeypatch, capsys):
    monkeypatch.setenv("FA2_CUTE_CACHE", "off")
    with pytest.raises(SystemExit):
        cli.main(["compile"])
    assert "give --into a folder" in capsys.readouterr().err
