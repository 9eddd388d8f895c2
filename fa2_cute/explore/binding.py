"""The only place where the explorer touches the kernel: specifications, compilation, launches, the emulator."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .. import arch as architectures
from .. import jit, store, tiling
from ..arch import Architecture
from ..spec import MAX_HEAD_DIM, VECTOR_ELEMENTS, ForwardSpec
from . import rates
from .space import PARAMETERS, Point, Workload

LOG2_E = math.log2(math.e)
SPEC_FIELDS = {f.name for f in dataclasses.fields(ForwardSpec)}


def shipped(workload: Workload, arch: Architecture) -> ForwardSpec:
    """What a call of this kind runs today. ValueError where the kernel does not take the head_dim."""
    if workload.head_dim % VECTOR_ELEMENTS or workload.head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: got {workload.head_dim}, takes multiples of 8 from 8 to {MAX_HEAD_DIM}")
    return tiling.choose_for(workload, arch, rates.of(arch).sms)


def shipped_point(workload: Workload, arch: Architecture) -> Point:
    """The tile of ``shipped``."""
    return _point_of(shipped(workload, arch))


def shipped_points(workload: Workload, arch: Architecture) -> list[Point]:
    """The tiles that calls of this kind run today, of many blocks and of few; ValueError as ``shipped``."""
    of = shipped(workload, arch)
    return [_point_of(spec) for spec in tiling.every(of.dtype, of.head_dim, of.value_dim, of.features, arch)]


def _point_of(spec: ForwardSpec) -> Point:
    return Point(**{name: getattr(spec, name) for name in PARAMETERS if name in SPEC_FIELDS})


def spec_of(point: Point, workload: Workload, arch: Architecture) -> ForwardSpec:
    """The specification that computes ``workload`` with the tile ``point``; ValueError says why there is none."""
    chosen = {}
    for name, parameter in PARAMETERS.items():
        value = getattr(point, name)
        if name in SPEC_FIELDS:
            chosen[name] = value
        elif value != parameter.default:
            raise ValueError(f"{name}: got {value}, the kernel has {parameter.default} only")
    return dataclasses.replace(shipped(workload, arch), **chosen)


def compiled(point: Point, workload: Workload, arch: Architecture) -> jit.Kernel:
    """The kernel, from the disk cache or compiled now; not kept in memory: a search makes many."""
    spec = spec_of(point, workload, arch)
    return jit.Kernel(spec, arch, jit.obtain(spec, arch, store.default()))


def compiled_with_lines(point: Point, workload: Workload, arch: Architecture) -> jit.Kernel:
    """The same instructions, with the kernel's source lines beside them."""
    if arch == architectures.TARGET:  # always has them
        return compiled(point, workload, arch)
    from ..compiling import compile_code

    spec = spec_of(point, workload, arch)
    return jit.Kernel(spec, arch, compile_code(spec, arch, source_lines=True))


def values(workload: Workload, q, k, v, out, lse) -> tuple:
    """The kernel's arguments, one for each of ``spec.parameters()``."""
    scalars = {
        "scale_log2": workload.head_dim**-0.5 * LOG2_E,
        "heads_per_kv_head": workload.heads // workload.kv_heads,
        "window_right": 0,
    }
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    spec = ForwardSpec(workload.dtype, workload.head_dim, workload.head_dim, workload.features, 64, 64, 4, 2)
    return tuple(None if p is None else {**tensors, **scalars}[p.name] for p in spec.parameters())


def launcher(kernel: jit.Kernel, workload: Workload) -> Callable:
    """``call(q, k, v, out, lse)`` that launches ``kernel`` on the current CUDA stream."""
    function = kernel.function

    def call(q, k, v, out, lse):
        function(*values(workload, q, k, v, out, lse))

    return call


@dataclass(frozen=True)
class Counts:
    """What the emulator counts on a small problem of one head.

    matrix_wavefronts, matrix_ideal     passes over shared memory of all ldmatrix, and those without conflicts
    copy_wavefronts, copy_ideal         the same of all cp.async
    conflicts                           bank conflicts of all instructions: wavefronts beyond the ideal
    bytes_read, bytes_written           of global memory
    """

    matrix_wavefronts: int
    matrix_ideal: int
    copy_wavefronts: int
    copy_ideal: int
    conflicts: int
    bytes_read: int
    bytes_written: int

    @property
    def matrix_factor(self) -> float:
        """Wavefronts of an ldmatrix over those without conflicts."""
        return self.matrix_wavefronts / self.matrix_ideal if self.matrix_ideal else 1.0

    @property
    def copy_factor(self) -> float:
        """The same of a cp.async."""
        return self.copy_wavefronts / self.copy_ideal if self.copy_ideal else 1.0


def counted(kernel: jit.Kernel, workload: Workload, steps: int = 3) -> Counts:
    """Counts of one block that takes ``steps`` steps, in the emulator."""
    import torch

    from .. import emulation

    spec = kernel.spec
    query_len, key_len = spec.tile_m, steps * spec.tile_n
    if workload.causal:
        key_len = max(key_len, query_len)
    small = dataclasses.replace(workload, query_len=query_len, key_len=key_len, batch=1, heads=1, kv_heads=1)
    dtype = getattr(torch, workload.dtype)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, n, 1, workload.head_dim), generator=generator).to(dtype) for n in (query_len, key_len, key_len)
    )
    lse = torch.empty((1, 1, query_len))
    stats = emulation.run(
        kernel, spec.grid(1, 1, query_len), values(small, q, k, v, torch.empty_like(q), lse), counters=True
    )
    wavefronts, ideal = Counter(), Counter()
    for line in stats.counters.lines.values():
        kind = "ldmatrix" if "ldmatrix" in line.text else "cp.async" if "cp.async" in line.text else "other"
        wavefronts[kind] += line.wavefronts
        ideal[kind] += line.ideal
    return Counts(
        wavefronts["ldmatrix"],
        ideal["ldmatrix"],
        wavefronts["cp.async"],
        ideal["cp.async"],
        stats.counters.bank_conflicts,
        sum(stats.counters.read.values()),
        sum(stats.counters.written.values()),
    )
