"""Launches as plain data; and sequences of them that are recorded, to be launched again on other tensors unchecked.

Checking a call over a cache and choosing its kernels takes Python longer than a GPU takes for a short one. What a check
says depends on shapes, strides, dtypes and options alone, and a decode loop repeats those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from . import jit
from ._torch_internals import EMPTY_STRIDED, current_cuda_device
from .arch import Architecture
from .cache_spec import VECTOR_BYTES
from .forward import metadata_of, on_device, outside_dynamo


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel's. ``values`` are those of ``spec.parameters()``; grid and the most steps of a block are what the
    emulator is told."""

    spec: jit.Specification
    grid: tuple[int, int, int]
    steps: int
    values: tuple[torch.Tensor | float | int | None, ...]

    @property
    def device(self) -> torch.device:
        return next(value.device for value in self.values if isinstance(value, torch.Tensor))

    def function(self, architecture: Architecture) -> Callable:
        """What launches on ``values``, or others like them, on the current device and stream."""
        kernel = jit.compiled(self.spec, architecture)
        if self.device.type == "cuda":
            return kernel.function
        from . import emulation

        grid, steps = self.grid, self.steps
        return lambda *values: outside_dynamo(emulation.announce_and_run)(kernel, grid, values, steps)

    def run(self, architecture: Architecture):
        with on_device(self.device):
            self.function(architecture)(*self.values)


@dataclass(frozen=True, eq=False)
class Step:
    """A launch: ``function(*values(pool))``, where ``values`` picks from a recording's pool."""

    function: Callable
    values: Callable[[list], tuple]


@dataclass(frozen=True, eq=False)
class Recording:
    """The launches of a call for tensors like those of the call that was recorded. Holds no tensor.

    The pool that launches pick their values from is the inputs, then what the call allocates, then the constants.

    fresh       shapes, strides and dtypes of what a call allocates
    results     which of them the call returns
    constants   values that are no tensors
    """

    device: torch.device
    steps: tuple[Step, ...]
    fresh: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    results: tuple[int, ...]
    constants: tuple[float | int | None, ...]

    def run(self, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Launch on ``inputs``, in the order of those that were recorded."""
        kind = self.device.type
        if kind == "cuda" and self.device.index != current_cuda_device():
            with torch.cuda.device(self.device):
                return self.run(*inputs)
        empty = EMPTY_STRIDED[kind]
        fresh = [empty(*like) for like in self.fresh]
        pool = [*inputs, *fresh, *self.constants]
        for step in self.steps:
            step.function(*step.values(pool))
        return tuple([fresh[number] for number in self.results])


def record(
    launches: Sequence[Launch],
    inputs: Sequence[torch.Tensor | None],
    results: Sequence[torch.Tensor],
    architecture: Architecture,
) -> Recording | None:
    """A recording of ``launches``, or None where they work on something that is neither an input nor made for the call.

    What a kernel writes to and is no input is made for the call. Any other tensor must be one of the inputs as it is:
    where it was copied or converted, or two inputs are one tensor, a later call could not be told what to do.
    """
    fresh: list[torch.Tensor] = []
    chosen = []  # of each launch, what its values are: ("tensor", number among inputs and fresh) or ("constant", value)
    for launch in launches:
        places = []
        for parameter, value in zip(launch.spec.parameters(), launch.values, strict=True):
            if not isinstance(value, torch.Tensor):
                places.append(("constant", value))
                continue
            matches = [i for i, x in enumerate([*inputs, *fresh]) if x is not None and _stands_for(value, x)]
            if not matches and parameter.written:
                matches = [len(inputs) + len(fresh)]
                fresh.append(value)
            if len(matches) != 1:
                return None
            places.append(("tensor", matches[0]))
        chosen.append(places)
    shown = [[i for i, x in enumerate(fresh) if _stands_for(result, x)] for result in results]
    if any(len(found) != 1 for found in shown):
        return None
    constants, steps, first = [], [], len(inputs) + len(fresh)
    for launch, places in zip(launches, chosen, strict=True):
        numbers = []
        for kind, what in places:
            numbers.append(what if kind == "tensor" else first + len(constants))
            if kind == "constant":
                constants.append(what)
        steps.append(Step(launch.function(architecture), itemgetter(*numbers)))
    made = tuple(map(metadata_of, fresh))
    return Recording(launches[0].device, tuple(steps), made, tuple(found[0] for found in shown), tuple(constants))


def _stands_for(value: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether x can be passed for ``value``: the same memory, seen the same way but for strides that do not count."""
    if value.data_ptr() != x.data_ptr() or value.dtype != x.dtype or value.shape != x.shape:
        return False
    *outer, last = zip(x.shape, value.stride(), x.stride(), strict=True)
    idle = all(
        ours == theirs or (extent == 1 and theirs * x.element_size() % VECTOR_BYTES == 0)
        for extent, ours, theirs in outer
    )
    return idle and last[1] == last[2]
