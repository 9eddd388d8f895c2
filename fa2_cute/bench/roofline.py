"""What the device gives at most, measured: the rates of ``mma.sync``, of reading and of copying memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import forward, jit
from ..emulation import run as emulate
from .probes import UNROLL, MmaRateSpec, ReadRateSpec
from .timing import Timer, measure

MMA_US = 2000.0  # of one launch: long beside its start and end
FIRST_ROUNDS, GAUGE_ROUNDS = 1000, 8
MOST_BYTES = 2**32  # read and copied: many times any L2


class Wrong(Exception):
    """A result that was to be timed is not what it must be."""


@dataclass(frozen=True, eq=False)
class Roof:
    """A load that does nothing but ``work`` (FLOP or bytes), as fast as the device can."""

    launch: Callable[[], object]
    work: float

    def rate(self, timer: Timer) -> float:
        """Work a second, timed as contestants are."""
        figure = measure({"roof": timer.capture([self.launch])}, timer, GAUGE_ROUNDS)["roof"]
        return self.work / (figure.median * 1e-6)


@functools.cache
def _kernel(spec, architecture) -> jit.Kernel:
    return jit.Kernel(spec, architecture, jit.obtain(spec, architecture, None))


def launcher(spec, device: torch.device, blocks: int) -> Callable:
    """``call(*values)`` that launches the probe of ``spec``: on a GPU, or in the emulator."""
    kernel = _kernel(spec, forward.architecture_of(device))
    if device.type == "cuda":
        return kernel.function
    return lambda *values: emulate(kernel, (blocks, 1, 1), values)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def fitting(device: torch.device, size: int) -> int:
    """``size``, or an eighth of a GPU's memory if that is less."""
    return min(size, torch.cuda.get_device_properties(device).total_memory // 8) if device.type == "cuda" else size


class MmaProbe:
    """``mma.sync`` m16n8k16 in bfloat16 with float32 accumulation, operands in registers, all warps busy."""

    def __init__(self, device: torch.device):
        self.spec = MmaRateSpec()
        self.blocks = _multiprocessors(device)
        self.launch = launcher(self.spec, device, self.blocks)
        # Whole numbers of seven bits: all of a bfloat16's, which draws the power that real operands do, and yet sums of
        # few rounds are exact.
        self.a, self.b = (
            torch.randint(-127, 128, (n, 16), device=device).to(torch.bfloat16)
            for n in (self.spec.rows, self.spec.columns)
        )
        shape = (self.blocks * self.spec.warps, self.spec.rows, self.spec.columns)
        self.c = torch.empty(shape, device=device)
        self.check(3)

    def check(self, rounds: int):
        """Raises Wrong unless a launch gives what it must, exactly while 16 127^2 UNROLL rounds is below 2^24: 8."""
        self.launch(self.a, self.b, self.c, rounds)
        expected = rounds * UNROLL * (self.a.double() @ self.b.double().T)
        if not bool((self.c.double() == expected).all()):
            raise Wrong("roofline: the mma.sync probe computed something else than its product")

    def roof(self, timer: Timer) -> Roof:
        """FLOP, in a launch of about ``MMA_US``."""
        rounds = FIRST_ROUNDS
        replay = timer.capture([lambda: self.launch(self.a, self.b, self.c, rounds)])
        microseconds = measure({"roof": replay}, timer, 1)["roof"].median
        rounds = max(1, round(FIRST_ROUNDS * MMA_US / microseconds))
        operations = self.spec.operations(self.blocks, rounds)
        return Roof(lambda: self.launch(self.a, self.b, self.c, rounds), float(operations))


class ReadProbe:
    """All multiprocessors read device memory."""

    BLOCKS_PER_SM = 4  # 1024 threads of at most 64 registers are resident at once, with 128 KiB of loads under way

    def __init__(self, device: torch.device, size: int = MOST_BYTES):
        self.spec = ReadRateSpec()
        self.blocks = self.BLOCKS_PER_SM * _multiprocessors(device)
        self.launch = launcher(self.spec, device, self.blocks)
        step = self.spec.step(self.blocks)
        elements = max(1, fitting(device, size) // 4 // step) * step
        self.x = torch.randint(0, 2, (elements,), device=device, dtype=torch.int32)
        self.sums = torch.empty(self.spec.threads * self.blocks, device=device, dtype=torch.int32)
        self.launch(self.x, self.sums)
        if int(self.sums.sum()) != int(self.x.sum()):
            raise Wrong("roofline: the reading probe added up something else than its numbers")

    def roof(self, timer: Timer) -> Roof:
        """Bytes read."""
        return Roof(lambda: self.launch(self.x, self.sums), float(self.x.nbytes))


class CopyProbe:
    """torch's copy."""

    def __init__(self, device: torch.device, size: int = MOST_BYTES // 2):
        self.x = torch.randint(0, 2, (fitting(device, size) // 4,), device=device, dtype=torch.int32)
        self.y = torch.empty_like(self.x)
        self.y.copy_(self.x)
        if not torch.equal(self.x, self.y):
            raise Wrong("roofline: the copy is not a copy")

    def roof(self, timer: Timer) -> Roof:
        """Bytes read and bytes written, together."""
        return Roof(lambda: self.y.copy_(self.x), 2.0 * self.x.nbytes)
