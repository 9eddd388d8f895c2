"""Runs a compiled kernel on CPU tensors: the bridge from a call to the PTX emulator."""

import contextlib
import functools
import math
import warnings

import numpy as np
import rich.console
import rich.progress
import torch

from . import emulator
from .jit import Kernel
from .problem import Problem
from .spec import ForwardSpec

# Of one core of a 2020s server, measured: the blocks that run side by side cost this much, and this much a key tile.
SECONDS_A_WAVE, SECONDS_A_TILE = 0.03, 0.015
QUIET_SECONDS = 10

DYNAMIC_4D = {"extents": (0, 1, 2), "strides": (0, 1, 2)}  # head_dim and its stride of 1 are compiled in
DYNAMIC_LSE = {"extents": (0, 1, 2), "strides": (0, 1)}


class EmulationNotice(UserWarning):
    """A call on CPU tensors runs in the emulator: exact, and far slower than any GPU."""


@functools.cache
def announce():
    """Say once in a process that calls are emulated."""
    warnings.warn(
        "fa2_cute: CPU tensors run the sm_120a kernel in the emulator, exactly but slowly",
        EmulationNotice,
        stacklevel=5,
    )


def run(
    kernel: Kernel,
    problem: Problem,
    tensors: tuple[torch.Tensor, ...],
    scale_log2: float,
    *,
    counters: bool = False,
    numerics: str = "ieee",
) -> emulator.Stats:
    """Launch ``kernel`` on (q, k, v, out, lse) in the emulator; out and lse are written.

    ``counters``: also count bank conflicts, sectors and bytes. ``numerics``: "ieee", or "sm_90" for the bits of that
    hardware's tensor cores and special functions, at about a quarter of the speed (docs/emulator.md, "Numbers").

    A launch that will take longer than QUIET_SECONDS says so on stderr first and shows its progress; Ctrl-C stops it.
    """
    q, k, v, out, lse = tensors
    args = [
        emulator.Tensor(q, name="q", **DYNAMIC_4D),
        emulator.Tensor(k, name="k", **DYNAMIC_4D),
        emulator.Tensor(v, name="v", **DYNAMIC_4D),
        emulator.Tensor(out, name="out", writable=True, **DYNAMIC_4D),
        emulator.Tensor(lse, name="lse", writable=True, **DYNAMIC_LSE),
        np.float32(scale_log2),
        np.int32(problem.heads // problem.kv_heads),
    ]
    spec = kernel.spec
    with _progress(spec, problem) as progress:
        return emulator.launch(
            _module(kernel.ptx).kernel(),
            grid=spec.grid(*out.shape[:1], problem.heads, problem.query_len),
            block=(spec.threads, 1, 1),
            args=args,
            shared_bytes=spec.shared_bytes,
            arch=kernel.arch.target,
            counters=counters,
            numerics=numerics,
            progress=progress,
        )


def announce_and_run(kernel: Kernel, problem: Problem, tensors: tuple[torch.Tensor, ...], scale_log2: float):
    """``run`` for somebody who has called the library on CPU tensors, and learns once what that means."""
    announce()
    run(kernel, problem, tensors, scale_log2)


def estimated_seconds(spec: ForwardSpec, problem: Problem) -> float:
    """About how long one core emulates ``problem``: blocks run side by side, their key tiles one after the other."""
    blocks = math.prod(spec.grid(problem.batch, problem.heads, problem.query_len))
    waves = -(-blocks * spec.threads // emulator.RESIDENT_THREADS)
    tiles = -(-problem.key_len // spec.tile_n)
    if problem.causal and problem.query_len > spec.tile_m:
        tiles = (tiles + 1) // 2
    return waves * (SECONDS_A_WAVE + SECONDS_A_TILE * tiles)


@contextlib.contextmanager
def _progress(spec: ForwardSpec, problem: Problem):
    """A callback (done, total) for ``emulator.launch`` that draws a bar, or None for short launches."""
    seconds = estimated_seconds(spec, problem)
    if seconds < QUIET_SECONDS:
        yield None
        return
    console = rich.console.Console(stderr=True)
    console.print(f"fa2_cute: emulating this call takes about {seconds:.0f} s on this CPU; Ctrl-C stops it")
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("emulating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@functools.cache
def _module(ptx: str) -> emulator.Module:
    """The parsed PTX, once per text."""
    return emulator.load(ptx)
