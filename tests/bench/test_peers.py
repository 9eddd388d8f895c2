"""Who takes part, why somebody does not, and FA4's choice of kernels."""

import os
import sys
import types

import pytest
import torch

from fa2_cute import arch
from fa2_cute.bench import cutlass_example, peers, problems
from fa2_cute.bench.peers import FA4, FA4_SM_120, FLASH, PREFILL, TRITON


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(peers, "package_version", lambda name: None)
    found = {peer.name: peer for peer in peers.statuses()}
    assert found[FLASH].missing == ""
    assert found[FLASH].version == f"torch {torch.__version__}"
    for name, package in ((FA4, "flash-attn-4"), (FA4_SM_120, "flash-attn-4"), (TRITON, "fastflash-attention")):
        assert found[name].missing == f"not installed (pip install {package})"


def test_a_peer_that_cannot_be_imported_says_why(monkeypatch):
    def fails(name):
        raise OSError("libsomething.so: cannot open")

    monkeypatch.setattr(peers, "package_version", lambda name: "1.2")
    monkeypatch.setattr(peers.importlib, "import_module", fails)
    assert peers.status(TRITON).missing == "cannot be imported: OSError: libsomething.so: cannot open"


def test_peers_by_name():
    assert [peer.name for peer in peers.statuses((FLASH,))] == [FLASH]
    with pytest.raises(ValueError, match="--peer: got 'nobody', takes one of 'torch flash'"):
        peers.statuses(("nobody",))


SMS = "FLASH_ATTENTION_NUM_SMS"


@pytest.fixture
def fake_fa4(monkeypatch):
    """A module in FA4's place that keeps the architecture it has read, as FA4 does."""
    module = types.ModuleType("flash_attn.cute.interface")
    seen = []

    def device_arch():
        if not seen:
            seen.append(os.environ.get("FLASH_ATTENTION_ARCH", "native"))
        return seen[0]

    device_arch.cache_clear = seen.clear
    module._get_device_arch = device_arch
    module.flash_attn_func = lambda q, k, v, causal: (f"{device_arch()}, {os.environ.get(SMS)}, {causal}", None)
    monkeypatch.setattr(peers, "_multiprocessors", lambda: 132)
    monkeypatch.delenv(SMS, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    monkeypatch.delenv("FLASH_ATTENTION_ARCH", raising=False)
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "x")  # so that what is set meanwhile is undone
    return module


def test_fa4_picks_other_kernels_only_within(fake_fa4):
    native, ours = (peers.fa4(name)(None, None, None, True) for name in (None, "sm_120"))
    assert [native(), ours(), native(), ours()] == ["native, None, True", "sm_120, 132, True"] * 2
    assert fake_fa4._get_device_arch() == "native"
    assert "FLASH_ATTENTION_ARCH" not in os.environ
    assert SMS not in os.environ


def test_fa4_gets_a_persons_own_choice_back(fake_fa4, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_ARCH", "sm_80")
    with peers.fa4_kernels_of("sm_120"):
        assert fake_fa4._get_device_arch() == "sm_120"
    assert fake_fa4._get_device_arch() == "sm_80"
    fake_fa4.flash_attn_func = None
    with pytest.raises(TypeError):
        peers.fa4("sm_120")(None, None, None, False)()
    assert fake_fa4._get_device_arch() == "sm_80"


def test_fa4_keeps_its_kernels_where_only_this_user_writes(fake_fa4, monkeypatch, tmp_path):
    variable = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    peers._fa4()
    assert os.environ[variable] == "x"  # somebody's own choice
    monkeypatch.delenv(variable)
    monkeypatch.setattr(peers.platformdirs, "user_cache_path", lambda name: tmp_path / name)
    peers._fa4()
    assert os.environ[variable] == str(tmp_path / "fa2_cute" / "bench-fa4")


def test_whose_instructions_are_ours():
    same = {name: {one.name for one in PREFILL if one.mma_sync(arch.by_name(name))} for name in ("sm_90", "sm_120")}
    assert same["sm_90"].isdisjoint({FA4, peers.CUDNN, TRITON, peers.NAIVE})
    assert {FLASH, FA4_SM_120, peers.EFFICIENT} <= same["sm_90"] < same["sm_120"]
    assert {FA4, peers.CUDNN, TRITON} <= same["sm_120"]


def test_every_peer_is_listed_once():
    names = [one.name for one in PREFILL]
    assert len(set(names)) == len(names)
    assert set(peers.PACKAGES) <= set(names)


def test_cudnn_refuses_what_it_would_align_otherwise():
    q, k, v = problems.normal(torch.device("cpu"), torch.bfloat16, (1, 4, 2, 64), (1, 8, 2, 64), (1, 8, 2, 64))
    with pytest.raises(peers.Refused):
        peers.sdpa(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)(q, k, v, True)


def test_reasons_are_one_short_line():
    assert peers.reason(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert peers.reason(AssertionError()) == "AssertionError: AssertionError"
    assert len(peers.reason(RuntimeError("x" * 1000))) == 160


def test_the_cutlass_example_is_where_somebody_says(monkeypatch, tmp_path):
    monkeypatch.delenv(cutlass_example.VARIABLE, raising=False)
    assert peers.status(peers.CUTLASS).missing.startswith("not given (FA2_CUTE_BENCH_CUTLASS")
    file = tmp_path / "clone" / cutlass_example.IN_A_CLONE
    monkeypatch.setenv(cutlass_example.VARIABLE, str(file))
    with pytest.raises(ValueError, match=r"FA2_CUTE_BENCH_CUTLASS: got .*, takes a clone"):
        peers.statuses()
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert cutlass_example.where() == file
    assert peers.status(peers.CUTLASS).missing == ""
    monkeypatch.setenv(cutlass_example.VARIABLE, str(tmp_path / "clone"))
    assert cutlass_example.where() == file


@pytest.mark.parametrize(
    ("kv_heads", "key_len", "head_dim", "causal", "text"),
    [(1, 8, 64, False, "grouped"), (2, 9, 64, True, "bottom-right"), (2, 8, 192, False, "head_dim above 128")],
)
def test_the_cutlass_example_refuses_what_it_would_get_wrong(kv_heads, key_len, head_dim, causal, text):
    [one] = [one for one in PREFILL if one.name == peers.CUTLASS]
    shapes = [(1, 8, 2, head_dim), *[(1, key_len, kv_heads, head_dim)] * 2]
    with pytest.raises(peers.Refused, match=text):
        one.make(*problems.normal(torch.device("cpu"), torch.bfloat16, *shapes), causal)
