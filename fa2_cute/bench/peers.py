"""Everybody who computes attention: who is installed, how they are called, and which instructions they use.

Each contestant makes a call ready on tensors (batch, length, heads, head_dim) and returns a function without arguments
that makes it and returns (batch, query_len, heads, head_dim). What a contestant needs otherwise (heads first, a mask)
is prepared before, outside the timing. One who does not take a call raises; the reason is reported in its cell.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace

import platformdirs
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import arch, attention, forward, jit, tiling
from ..arch import Architecture
from ..explore import tuning
from ..explore.space import Point
from . import cutlass_example
from .machine import package_version
from .results import PeerStatus

OURS = "fa2_cute"
SM_120_TILE = "fa2_cute, sm_120's tile"
FA4, FA4_SM_120 = "FA4", "FA4 sm_120"
FLASH, CUDNN, EFFICIENT = "torch flash", "torch cuDNN", "torch efficient"
CUTLASS, TRITON, NAIVE = "CUTLASS example", "fastflash (Triton)", "torch naive"

Call = Callable[[], torch.Tensor]
Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Call]


class Refused(Exception):
    """A contestant does not take such a call; the text says why."""


@dataclass(frozen=True)
class Contestant:
    """One who takes part in the prefill section.

    mma_sync        uses the same matrix instructions as we do on such a device: held against us
    rounded_scores  scores are rounded to 16 bits, which its check must know
    """

    name: str
    make: Make
    mma_sync: Callable[[Architecture], bool] = lambda architecture: True
    rounded_scores: bool = False


def _only_has_mma_sync(architecture: Architecture) -> bool:
    """Whether even a library that would use more has nothing but ``mma.sync`` there (no wgmma, no tcgen05)."""
    return architecture.capability[0] not in (9, 10, 11)


# ------------------------------------------------------------------------------------------------------------- ours


def _ours(q, k, v, causal: bool) -> Call:
    return lambda: attention.flash_attn_func(q, k, v, causal=causal)


def with_spec_of(choose: Callable) -> Make:
    """Our forward kernel with the specification ``choose(prepared call, architecture)`` instead of the table's."""

    def make(q, k, v, causal: bool) -> Call:
        architecture = forward.architecture_of(q.device)
        window = (None, 0 if causal else None)
        spec = choose(forward.prepare(q, k, v, window=window)[2], architecture)
        kernel = jit.compiled(spec, architecture)

        def call() -> torch.Tensor:
            out, _, prepared = forward.prepare(q, k, v, window=window)
            forward.launch(kernel, prepared)
            return out

        return call

    return make


def _sm_120_spec(prepared: forward.Call, architecture: Architecture):
    of = prepared.problem
    if architecture.name == arch.TARGET.name:
        raise Refused("this device runs it anyway")
    return tiling.choose_for(of, arch.TARGET, forward.multiprocessors(prepared.tensors[0].device))


def tile_contestant(tile: Point) -> Contestant:
    """Our kernel with a tile that its table would not choose."""

    def choose(prepared: forward.Call, architecture: Architecture):
        return replace(prepared.spec(architecture), **tuning.tile_of(tile))

    return Contestant(tile.name, with_spec_of(choose))


# ------------------------------------------------------------------------------------------------------------ torch


def sdpa(backend: SDPBackend) -> Make:
    """``scaled_dot_product_attention`` with one of its backends.

    Its is_causal aligns to the top left; where lengths differ a bottom-right bias is given in its place.
    """

    def make(q, k, v, causal: bool) -> Call:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        options: dict = {"enable_gqa": q.shape[2] != k.shape[2]}
        if causal and q.shape[1] == k.shape[1]:
            options["is_causal"] = True
        elif causal and q.shape[1] > 1:
            if backend == SDPBackend.CUDNN_ATTENTION:
                raise Refused("no bottom-right causal mask without a tensor")
            from torch.nn.attention.bias import causal_lower_right  # loads torch.compile: a second

            options["attn_mask"] = causal_lower_right(q.shape[1], k.shape[1])

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

        return call

    return make


def _naive(q, k, v, causal: bool) -> Call:
    """Two products and a softmax, intermediate results in q's dtype."""
    batch, query_len, heads, head_dim = q.shape
    kv_heads, key_len = k.shape[2], k.shape[1]
    needed = 3 * q.element_size() * batch * heads * query_len * key_len
    if q.is_cuda and needed > torch.cuda.mem_get_info(q.device)[0] // 2:
        raise Refused(f"{needed / 2**30:.0f} GiB of scores do not fit")
    queries = q.transpose(1, 2).unflatten(1, (kv_heads, heads // kv_heads))
    keys, values = (x.transpose(1, 2)[:, :, None] for x in (k, v))
    visible = torch.ones(query_len, key_len, dtype=torch.bool, device=q.device).tril(key_len - query_len)

    def call() -> torch.Tensor:
        scores = queries @ keys.mT * head_dim**-0.5
        if causal:
            scores.masked_fill_(~visible, -torch.inf)
        return (torch.softmax(scores, dim=-1) @ values).flatten(1, 2).transpose(1, 2)

    return call


# ------------------------------------------------------------------------------------------------ FA4 and fastflash


@contextlib.contextmanager
def fa4_kernels_of(architecture: str | None):
    """Within: FA4 picks its kernels for ``architecture`` ("sm_120"), whatever the device is; None: the device's.

    It reads the environment, FLASH_ATTENTION_ARCH (and keeps what it has read) and FLASH_ATTENTION_NUM_SMS (where the
    device is no such architecture).
    """
    interface = _fa4()
    names = ("FLASH_ATTENTION_ARCH", "FLASH_ATTENTION_NUM_SMS")
    before = {name: os.environ.pop(name, None) for name in names}
    try:
        if architecture is not None:
            os.environ.update(zip(names, (architecture, str(_multiprocessors())), strict=True))
        interface._get_device_arch.cache_clear()
        yield interface
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        interface._get_device_arch.cache_clear()


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def _fa4():
    """FA4's module; its compiled kernels are kept on disk, so that a process does not compile what another one has.

    In this user's own folder: what lies there is loaded and run.
    """
    folder = platformdirs.user_cache_path("fa2_cute") / "bench-fa4"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    return importlib.import_module("flash_attn.cute.interface")


def fa4(architecture: str | None) -> Make:
    """FlashAttention-4's ``flash_attn_func``."""

    def make(q, k, v, causal: bool) -> Call:
        def call() -> torch.Tensor:
            with fa4_kernels_of(architecture) as interface:
                return interface.flash_attn_func(q, k, v, causal=causal)[0]

        return call

    return make


def fa4_plain(q, k, v, causal: bool) -> Call:
    """The same as a person calls it, for its host's time: the device's own kernels, nothing set around the call."""
    function = _fa4().flash_attn_func
    return lambda: function(q, k, v, causal=causal)[0]


def _fa4_sm_120(q, k, v, causal: bool) -> Call:
    if forward.architecture_of(q.device).name in ("sm_120", "sm_121"):
        raise Refused("this device runs it anyway")
    return fa4("sm_120")(q, k, v, causal)


def _fastflash(q, k, v, causal: bool) -> Call:
    """It takes (batch, heads, length, head_dim), contiguous, and as many KV heads as heads."""
    function = importlib.import_module("fastflash_attention").fast_attention
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    return lambda: function(*heads_first, is_causal=causal).transpose(1, 2)


def _cutlass(q, k, v, causal: bool) -> Call:
    """The example has no grouped queries, and aligns its causal mask to the top left."""
    if q.shape[2] != k.shape[2]:
        raise Refused("no grouped queries")
    if causal and q.shape[1] != k.shape[1]:
        raise Refused("no bottom-right causal mask")
    if q.shape[3] > cutlass_example.MOST_HEAD_DIM:
        raise Refused(f"no tile for head_dim above {cutlass_example.MOST_HEAD_DIM}")
    return cutlass_example.call(q, k, v, causal)


# --------------------------------------------------------------------------------------------------------- the list

PREFILL = (
    Contestant(OURS, _ours),
    Contestant(SM_120_TILE, with_spec_of(_sm_120_spec)),
    Contestant(FLASH, sdpa(SDPBackend.FLASH_ATTENTION)),
    Contestant(FA4_SM_120, _fa4_sm_120),
    Contestant(CUTLASS, _cutlass),
    Contestant(EFFICIENT, sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    Contestant(CUDNN, sdpa(SDPBackend.CUDNN_ATTENTION), _only_has_mma_sync),
    Contestant(FA4, fa4(None), _only_has_mma_sync),
    Contestant(TRITON, _fastflash, _only_has_mma_sync),
    Contestant(NAIVE, _naive, lambda architecture: False, rounded_scores=True),
)

# name: (distribution, module to import); None: part of torch.
PACKAGES = {
    FLASH: None,
    EFFICIENT: None,
    CUDNN: None,
    NAIVE: None,
    FA4: ("flash-attn-4", "flash_attn.cute.interface"),
    FA4_SM_120: ("flash-attn-4", "flash_attn.cute.interface"),
    TRITON: ("fastflash-attention", "fastflash_attention"),
    CUTLASS: ("nvidia-cutlass-dsl", "cutlass"),
}


def status(name: str) -> PeerStatus:
    """The version of a peer, or why it does not take part: not installed, or it cannot be imported."""
    where = PACKAGES[name]
    if where is None:
        return PeerStatus(name, f"torch {torch.__version__}")
    package, module = where
    if name == CUTLASS and cutlass_example.where() is None:
        return PeerStatus(name, "", f"not given ({cutlass_example.VARIABLE} names a clone of NVIDIA/cutlass)")
    found = package_version(package)
    if found is None:
        return PeerStatus(name, "", f"not installed (pip install {package})")
    try:
        if module.startswith("flash_attn."):
            _fa4()
        importlib.import_module(module)
    except Exception as error:  # another project's import may fail in any way; that it did is the finding
        return PeerStatus(name, found, f"cannot be imported: {reason(error)}")
    return PeerStatus(name, found)


def statuses(only: tuple[str, ...] = ()) -> tuple[PeerStatus, ...]:
    """All peers', or of those named; ValueError for a name that is none's."""
    for name in only:
        if name not in PACKAGES:
            raise ValueError(f"--peer: got {name!r}, takes one of {', '.join(map(repr, PACKAGES))}")
    return tuple(status(name) for name in PACKAGES if not only or name in only)


def reason(error: BaseException) -> str:
    """One short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, Refused) else f"{type(error).__name__}: {text}"[:160]


def last_line(error: subprocess.SubprocessError) -> str:
    """Why another process failed, as far as it said."""
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return lines[-1][:160] if lines else type(error).__name__
