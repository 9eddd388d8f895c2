"""Runs a compiled kernel on CPU tensors: the bridge from a call to the PTX emulator."""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Sequence

import numpy as np
import rich.console
import rich.progress
import torch

from . import emulator
from .jit import Kernel, Specification
from .parameters import Parameter, ScalarParameter

# Measured on one core of a 2020s server (AMD EPYC, AVX-512) with little else to do; calls of 0.3 to 13 s took 0.55 to
# 1.4 of what this makes of them (tests/test_emulation.py has them), and a busy machine takes half as long again. The
# blocks that run side by side cost so much, and so much for each step of theirs; those without steps, that much in all.
SECONDS_A_WAVE, SECONDS_A_TILE, SECONDS_WITHOUT_TILES = 0.05, 0.018, 0.008
COUNTING = 7  # times as long with counters: 6.7 to 7.8 at head_dim 128, less at 64
QUIET_SECONDS = 10


class EmulationNotice(UserWarning):
    """A call on CPU tensors runs in the emulator: exact, and far slower than any GPU."""


@functools.cache
def announce():
    """Say once in a process that calls are emulated, as a warning of the line outside the package that called."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(
        "fa2_cute: CPU tensors run the sm_120a kernel in the emulator, exactly but slowly",
        EmulationNotice,
        stacklevel=level,
    )


def run(
    kernel: Kernel,
    grid: tuple[int, int, int],
    values: Sequence[torch.Tensor | float | int | None],
    *,
    tiles: int = 0,
    counters: bool = False,
    numerics: str = "ieee",
) -> emulator.Stats:
    """Launch ``kernel`` on ``values``, one for each of ``kernel.spec.parameters()``, in the emulator.

    ``tiles``: steps of a block's main loop, by which the time is estimated. ``counters``: also count bank conflicts,
    sectors and bytes. ``numerics``: "ieee", or "sm_90" for the bits of that hardware's tensor cores and special
    functions, at about a quarter of the speed (docs/emulator.md, "Numbers").

    A launch that will take longer than QUIET_SECONDS says so on stderr first and shows its progress; Ctrl-C stops it.
    """
    spec = kernel.spec
    seconds = estimated_seconds(math.prod(grid) * spec.threads, tiles) * (COUNTING if counters else 1)
    with _progress(seconds) as progress:
        return emulator.launch(
            _module(kernel.ptx).kernel(),
            grid=grid,
            block=(spec.threads, 1, 1),
            args=arguments(spec, values),
            shared_bytes=spec.shared_bytes,
            arch=kernel.arch.target,
            counters=counters,
            numerics=numerics,
            progress=progress,
        )


def announce_and_run(
    kernel: Kernel,
    grid: tuple[int, int, int],
    values: Sequence[torch.Tensor | float | int | None],
    tiles: int,
):
    """``run`` for somebody who has called the library on CPU tensors, and learns once what that means."""
    announce()
    run(kernel, grid, values, tiles=tiles)


def arguments(spec: Specification, values: Sequence[torch.Tensor | float | int | None]) -> list:
    """``values`` as the emulator takes them: the kernel's parameter structs hold what is known at run time only."""
    return [
        _argument(parameter, value)
        for parameter, value in zip(spec.parameters(), values, strict=True)
        if parameter is not None
    ]


def _argument(parameter: Parameter, value: torch.Tensor | float | int):
    if isinstance(parameter, ScalarParameter):
        return {"float32": np.float32, "int32": np.int32}[parameter.dtype](value)
    return emulator.Tensor(
        value,
        name=parameter.name,
        extents=parameter.run_time_extents,
        strides=parameter.run_time_strides,
        writable=parameter.written,
    )


def estimated_seconds(threads: int, tiles: int) -> float:
    """About how long one core emulates ``threads`` threads: blocks run side by side, a block's tiles one by one."""
    waves = -(-threads // emulator.RESIDENT_THREADS)
    return waves * (SECONDS_A_WAVE + SECONDS_A_TILE * tiles if tiles else SECONDS_WITHOUT_TILES)


@contextlib.contextmanager
def _progress(seconds: float):
    """A callback (done, total) for ``emulator.launch`` that draws a bar, or None for short launches."""
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
