"""A peer that no package has: FlashAttention-2 among the examples of NVIDIA/cutlass, written in the CuTe DSL.

``FA2_CUTE_BENCH_CUTLASS`` names a clone of that repository, or the file alone.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

VARIABLE = "FA2_CUTE_BENCH_CUTLASS"
IN_A_CLONE = Path("examples/python/CuTeDSL/cute/ampere/kernel/attention/flash_attention_v2.py")
# Its best tile at head_dim 128 of eight tried on an H200; beyond 128 none is known that does not spill.
TILE_M, TILE_N, THREADS = 128, 64, 128
MOST_HEAD_DIM = 128


def where() -> Path | None:
    """The example's file; None if nobody has named one. ValueError where what was named is none."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser()
    path = path / IN_A_CLONE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{VARIABLE}: got {named!r}, takes a clone of NVIDIA/cutlass or its flash_attention_v2.py")
    return path


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fa2_cute_bench_cutlass_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled(path: Path, head_dim: int, causal: bool, dtype: str, target: str | None = None) -> Callable:
    """``function(q, k, v, out, scale)`` on torch tensors; target: an architecture, by default the device's."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    element = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]
    lengths = {"q": cute.sym_int(), "k": cute.sym_int()}
    batch, heads = cute.sym_int(), cute.sym_int()

    def tensor(length):
        shape = (batch, lengths[length], heads, head_dim)
        return make_fake_compact_tensor(element, shape, stride_order=(3, 2, 1, 0), assumed_align=16)

    kernel = _module(path).FlashAttentionForwardAmpere(head_dim, TILE_M, TILE_N, THREADS, causal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cute.compile(
            kernel,
            tensor("q"),
            tensor("k"),
            tensor("k"),
            tensor("q"),
            cutlass.Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi" + (f" --gpu-arch {target}" if target else ""),
        )


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """The example on (batch, length, heads, head_dim), ready to be called; as many KV heads as heads."""
    head_dim = q.shape[3]
    function = compiled(where(), head_dim, causal, str(q.dtype).removeprefix("torch."))

    def run() -> torch.Tensor:
        out = torch.empty_like(q)
        function(q, k, v, out, head_dim**-0.5)
        return out

    return run
