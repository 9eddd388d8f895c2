"""Single faults in how a kernel is launched: wrong strides, lengths, head ratios, scales, grids, kernels.

A mutant changes what ``emulation.run`` hands to ``emulator.launch`` or replaces one function of the package while the
call runs; no file is edited.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np

from .. import emulator, forward, tiling

QKVO = ("q", "k", "v", "out")
LSE = 4  # the argument after those four; then the scale and the query heads a KV head
SCALE, GROUP = 5, 6


@dataclass(frozen=True)
class CallMutant:
    """``install()`` is a context manager in which every emulated call has the fault."""

    kind: str
    change: str
    install: Callable = dataclasses.field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.change}"


def mutants() -> list[CallMutant]:
    """Every fault that is listed here, in a fixed order."""
    return [*_tensors(), *_scalars(), *_grids(), *_functions()]


def by_name(kind: str, change: str) -> CallMutant:
    """The mutant of that kind and change; they are found again so in other processes."""
    return next(mutant for mutant in mutants() if (mutant.kind, mutant.change) == (kind, change))


@dataclass
class _Misdescribed(emulator.Tensor):
    """A tensor whose parameter struct says something else than the memory it has: (pointer, shape, byte strides)."""

    described: Callable = None

    def pack(self) -> bytes:
        truth = self.pointer, self.shape, self.byte_strides
        self.pointer, self.shape, self.byte_strides = self.described(*truth)
        try:
            return super().pack()
        finally:
            self.pointer, self.shape, self.byte_strides = truth


def _launch_with(change: Callable[[dict], None]):
    """A patch of ``emulator.launch`` that applies ``change`` to its keyword arguments."""
    launch = emulator.launch

    def changed(kernel, **options):
        options["args"] = list(options["args"])
        change(options)
        return launch(kernel, **options)

    return lambda: mock.patch.object(emulator, "launch", changed)


def _describe(index: int, described: Callable):
    def change(options):
        t = options["args"][index]
        options["args"][index] = _Misdescribed(t.array, t.name, t.extents, t.strides, t.writable, described=described)

    return _launch_with(change)


def _tensors():
    names = {0: "batch", 1: "length", 2: "heads"}
    lse_names = {0: "batch", 1: "heads", 2: "length"}
    for index, name in enumerate((*QKVO, "lse")):
        labels = names if index != LSE else lse_names
        pairs = ((0, 1), (0, 2), (1, 2)) if index != LSE else ((0, 1),)
        for i, j in pairs:
            yield CallMutant(
                "strides", f"{labels[i]} and {labels[j]} of {name} swapped",
                _describe(index, lambda p, shape, strides, i=i, j=j: (p, shape, _swapped(strides, i, j))),
            )  # fmt: skip
        for dimension, label in labels.items():
            for step in (1, -1):
                yield CallMutant(
                    "extent", f"{label} of {name} {step:+d}",
                    _describe(index, lambda p, shape, strides, d=dimension, s=step: (p, _plus(shape, d, s), strides)),
                )  # fmt: skip
        yield CallMutant("pointer", f"{name} 16 bytes late", _describe(index, lambda p, *rest: (p + 16, *rest)))
    for i, j in ((0, 1), (1, 2)):
        yield CallMutant("pointer", f"{QKVO[i]} for {QKVO[j]}", _launch_with(lambda o, i=i, j=j: _exchange(o, i, j)))


def _swapped(values, i: int, j: int):
    values = list(values)
    values[i], values[j] = values[j], values[i]
    return tuple(values)


def _plus(values, i: int, step: int):
    return tuple(value + step * (index == i) for index, value in enumerate(values))


def _exchange(options, i: int, j: int):
    args = options["args"]
    args[i], args[j] = args[j], args[i]


def _scalars():
    def scale(change):
        return _launch_with(lambda o: o["args"].__setitem__(SCALE, np.float32(change(float(o["args"][SCALE])))))

    def group(change):
        return _launch_with(lambda o: o["args"].__setitem__(GROUP, np.int32(change(o))))

    yield CallMutant("scale", "1% larger", scale(lambda c: 1.01 * c))
    yield CallMutant("scale", "0.1% smaller", scale(lambda c: 0.999 * c))
    yield CallMutant("scale", "negated", scale(lambda c: -c))
    yield CallMutant("scale", "absolute value", scale(abs))
    yield CallMutant("scale", "natural instead of base 2", scale(lambda c: c / forward.LOG2_E))
    yield CallMutant("scale", "zero", scale(lambda c: 0.0))
    yield CallMutant("GQA", "ratio + 1", group(lambda o: o["args"][GROUP] + 1))
    yield CallMutant("GQA", "ratio - 1", group(lambda o: max(o["args"][GROUP] - 1, 1)))
    yield CallMutant("GQA", "ratio of 1", group(lambda o: 1))
    yield CallMutant("GQA", "KV heads for the ratio", group(lambda o: o["args"][1].shape[2]))
    yield CallMutant("GQA", "query heads for the ratio", group(lambda o: o["args"][0].shape[2]))
    yield CallMutant(
        "shared memory", "16 bytes less", _launch_with(lambda o: o.update(shared_bytes=o["shared_bytes"] - 16))
    )


def _grids():
    def grid(change):
        return _launch_with(lambda o: o.update(grid=tuple(change(list(o["grid"])))))

    def shortened(dimension):
        def change(sides):
            sides[dimension] = max(sides[dimension] - 1, 1)
            return sides

        return change

    for dimension, name in enumerate("xyz"):
        yield CallMutant("grid", f"one less in {name}", grid(shortened(dimension)))
        yield CallMutant("grid", f"one more in {name}", grid(lambda sides, d=dimension: list(_plus(sides, d, 1))))
    yield CallMutant("grid", "x and y swapped", grid(lambda sides: [sides[1], sides[0], sides[2]]))
    yield CallMutant("grid", "y and z swapped", grid(lambda sides: [sides[0], sides[2], sides[1]]))


def _functions():
    """Faults in the functions of ``forward`` and ``tiling`` themselves."""

    def choosing(field):
        choose = tiling.choose

        def other(*key, few_blocks=False):
            with mock.patch.object(tiling, "choose", choose):  # which lists the others
                return _respecified(choose(*key, few_blocks=few_blocks), field, key[-1])

        return lambda: mock.patch.object(tiling, "choose", other)

    def scaling(function):
        return lambda: mock.patch.object(forward, "scale_of", function)

    yield CallMutant("kernel", "the other mask", choosing("causal"))
    yield CallMutant("kernel", "the other dtype", choosing("dtype"))
    yield CallMutant("kernel", "the other head_dim", choosing("head_dim"))
    yield CallMutant("default scale", "1 / head_dim", scaling(lambda s, d: 1 / d if s is None else s))
    yield CallMutant("default scale", "always", scaling(lambda s, d: d**-0.5))
    yield CallMutant("default scale", "of a scale of 0", scaling(lambda s, d: s or d**-0.5))
    yield CallMutant(
        "copies", "unaligned inputs as they are", lambda: mock.patch.object(forward, "aligned", lambda x: x)
    )
    yield CallMutant("copies", "alignment of the start not looked at", _aligned_by_strides_only)


def _respecified(spec, field: str, architecture):
    """The shipped specification that differs from ``spec`` in ``field`` and in what follows from it."""
    kept = {"dtype", "head_dim", "causal"} - {field}
    return next(
        other
        for other in tiling.shipped(architecture)
        if getattr(other, field) != getattr(spec, field)
        and all(getattr(other, name) == getattr(spec, name) for name in kept)
    )


@contextlib.contextmanager
def _aligned_by_strides_only():
    aligned = forward.aligned

    def start_forgotten(x):
        return x if all(stride % forward.VECTOR_ELEMENTS == 0 for stride in x.stride()[:3]) else aligned(x)

    with mock.patch.object(forward, "aligned", start_forgotten):
        yield
