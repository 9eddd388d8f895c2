"""The command line: what it prints, how it ends, and that its errors are one line."""

import io
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from fa2_cute import arch, cli, demo, reference
from fa2_cute.resources import Usage

CPU = torch.device("cpu")
SMALL = demo.Workload(batch=2, heads=4, kv_heads=2, head_dim=64, prompt=9, steps=2)


def fa2_cute(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "fa2_cute", *arguments], capture_output=True, text=True)


def test_info_names_versions_devices_and_tiles():
    result = fa2_cute("info")
    assert result.returncode == 0
    assert result.stderr == ""
    for text in ("fa2_cute", torch.__version__, "nvidia-cutlass-dsl", "emulator", "sm_120", "bfloat16"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "command"),
        (("nonsense",), "nonsense"),
        (("demo", "--no-such-option"), "--no-such-option"),
        (("demo", "--device", "tpu"), "takes cpu, cuda or cuda:N"),
        (("demo", "--device", "meta"), "takes cpu, cuda or cuda:N"),
        (("demo", "--device", "cuda:99"), "CUDA devices"),
        (("demo", "--seed", "x"), "--seed"),
        (("compile", "--into", ""), "'--into': got '', takes a path"),
        (("layouts", "--into", ""), "'--into': got '', takes a path"),
        (("explore", "--report", ""), "'--report': got '', takes a path"),
        (("bench", "plot", "file", "--out", ""), "'--out': got '', takes a path"),
        (("fuzz", "--folder", ""), "'--folder': got '', takes a path"),
    ],
)
def test_errors_are_one_line_on_stderr(arguments, text, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    assert caught.value.code not in (0, None)
    assert captured.out == ""
    assert captured.err.startswith("fa2-cute: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("explore", "--seqlen", "0"), "--seqlen: got 0, takes 1 or more"),
        (("explore", "--key-len", "0"), "--key-len: got 0, takes 1 or more"),
        (("explore", "--batch", "0"), "--batch: got 0, takes 1 or more"),
        (("explore", "--kv-heads", "5"), "--kv-heads: got 5, takes a divisor of 32 heads"),
        (("explore", "--dtype", "int8"), "--dtype: got 'int8', takes 'bfloat16' or 'float16'"),
        (
            ("explore", "--report", "/dev/null/x.html"),
            "--report: got /dev/null, takes a folder that can be written to",
        ),
        (
            ("explore", "--results", "/dev/null/x.json"),
            "--results: got /dev/null, takes a folder that can be written to",
        ),
        (("layouts", "--head-dim", "12"), "--head-dim: got 12, takes multiples of 8"),
        (("layouts", "--arch", "sm_42"), "--arch: got 'sm_42', takes one of"),
        (("layouts", "--tile", "64x32x8x2"), "--tile: tile_m: got 64, takes a multiple of 16 rows"),
        (("layouts", "--tile", "64x32x4x1"), "--tile: stages: got 1, takes 2 or more"),
        (("compile", "--head-dim", "64x12"), "--head-dim: value_dim: got 12, takes multiples of 8"),
        (("trace", "1x8x4x12"), "SHAPE: got head_dim 12, takes multiples of 8"),
        (("trace", "1x8x4x64", "--kv-heads", "3"), "--kv-heads: got 3, takes a divisor of SHAPE's 4 heads"),
        (("bench", "--heads", "0"), "--heads: got 0, takes 1 or more"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_errors_name_arguments_as_they_are_typed(arguments, text, capsys, tmp_path, monkeypatch):
    """Where a check that knows no command line calls them otherwise."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"fa2-cute: {text}")
    assert said.count("\n") == 1


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
from fa2_cute import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as ended:
    sys.exit(ended.code)
"""


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("demo --device tpu", "--device: got 'tpu', takes"),
        ("fuzz --device tpu", "--device: got 'tpu', takes"),
        ("fuzz --minutes 0", "--minutes: got 0, takes"),
        ("compile --jobs 0", "--jobs: got 0, takes"),
        ("explore --seqlen 0", "--seqlen: got 0, takes"),
        ("explore --vary x=1", "--vary: got 'x=1', takes"),
        ("explore --jobs 0", "--jobs: got 0, takes"),
        ("explore --arch sm_42", "--arch: got 'sm_42', takes"),
        ("layouts --arch sm_120a --head-dim 12", "--head-dim: got 12, takes"),
        ("layouts --tile 64", "--tile: got '64', takes"),
        ("bench nonsense", "bench: got 'nonsense', takes"),
        ("bench --shape 3", "--shape: got '3', takes"),
        ("bench --cell 3", "--cell: got '3', takes"),
        ("bench --tile 3", "--tile: got '3', takes"),
        ("bench --heads 0", "--heads: got 0, takes"),
        ("bench --page 48", "--page: got 48, takes"),
        ("bench --rounds 0", "--rounds: got 0, takes"),
    ],
)
def test_wrong_options_are_refused_before_torch_is_loaded(command, text):
    """Which takes seconds."""
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *command.split()], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith(f"fa2-cute: {text}")


@pytest.mark.parametrize("error", [ValueError("seed"), ValueError("seeds: got 3"), OSError("seed: got 3")])
def test_other_errors_stay_as_they_are(monkeypatch, capsys, error):
    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(demo, "run", fails)
    with pytest.raises(SystemExit):
        cli.main(["demo", "--device", "cpu"])
    assert capsys.readouterr().err == f"fa2-cute: {error}\n"


def test_interruption_is_one_line_too(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--device", "cpu"])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "fa2-cute: interrupted\n"


def test_demo_runs_prefill_and_steps():
    console = Console(width=80, file=io.StringIO())
    assert demo.run(CPU, console, workload=SMALL) == []
    text = console.file.getvalue()
    assert "sm_120a code in the emulator" in text
    assert "batch 2, 4 query heads on 2 KV heads, head_dim 64" in " ".join(text.split())
    assert "…" not in text  # nothing is cut off in a narrow terminal
    for row in (r"prefill +9 x 9", r"step 1 +1 x 10", r"step 2 +1 x 11"):
        assert re.search(row + r"( +\d\.\de[+-]\d\d){4} +[\d.]+ m?s +ok", text), row
    assert re.search(r"sm_120 +bfloat16 64 causal +\d+x\d+ +\d+ +0 B +\d+ KiB +\d+ +ok", text)


def test_demo_sees_the_cache_grow():
    lengths = [(call.q.shape[1], call.k.shape[1], call.v.shape[1]) for call in demo.calls(SMALL, CPU, seed=0)]
    assert lengths == [(9, 9, 9), (1, 10, 10), (1, 11, 11)]
    first, second, _ = demo.calls(SMALL, CPU, seed=0)
    assert torch.equal(first.k, second.k[:, :9])  # one cache: a step sees what the prefill saw
    assert first.k.data_ptr() == second.k.data_ptr()
    assert first.k.stride(0) == 11 * 2 * 64


@pytest.mark.parametrize("fault", ["error", "nan", "lse"])
def test_demo_notices_a_wrong_kernel(monkeypatch, fault):
    right = demo.flash_attn_func

    def wrong(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        if fault == "error":
            out[0, 0, 0, 0] += 0.25
        elif fault == "nan":
            out[0, 0, 0, 0] = math.nan
        else:
            lse[0, 0, 0] += 1e-3
        return out, lse

    monkeypatch.setattr(demo, "flash_attn_func", wrong)
    faults = demo.run(CPU, Console(quiet=True), workload=replace(SMALL, steps=0))
    assert faults
    assert all(text.startswith("prefill: ") for text in faults)
    assert any(("logsumexp" in text) == (fault == "lse") for text in faults)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stack_bytes": 8}, "8 bytes of stack"),
        ({"local_bytes": 16}, "16 of local"),
        ({"warps_per_sm": 4}, "4 resident warps"),
        ({"shared_bytes": 100 * 1024}, "shared memory"),
    ],
)
def test_demo_notices_a_kernel_that_spills_or_does_not_fit(change, text):
    [compiled] = demo.compile_for(SMALL, CPU)
    assert compiled.kernel.arch == arch.TARGET
    assert compiled.faults() == []
    spoilt = replace(compiled, used=replace(compiled.used, **change))
    assert isinstance(spoilt.used, Usage)
    assert any(text in fault for fault in spoilt.faults())


def test_demo_ends_non_zero_when_anything_is_off(monkeypatch, capsys):
    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: ["step 1: max error 2 exceeds 1"])
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--device", "cpu"])
    assert caught.value.code == 1
    assert "step 1: max error 2 exceeds 1" in capsys.readouterr().out


def test_demo_measures_against_the_reference(monkeypatch):
    """A reference that is off by one constant is noticed: the comparison is not with the kernel itself."""
    right = reference.attention

    def shifted(*args, **kwargs):
        out, lse = right(*args, **kwargs)
        return out, lse + 1.0

    monkeypatch.setattr(reference, "attention", shifted)
    assert demo.run(CPU, Console(quiet=True), workload=replace(SMALL, steps=0))
