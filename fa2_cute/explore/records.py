"""Everything about one point that needs no GPU: compile, resources, SASS, emulator counts, prediction."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import jit, resources
from ..arch import Architecture
from . import binding, model, rates, sass
from .space import Point, Workload


@dataclass(frozen=True)
class Record:
    """What is known of a point; a refused one has a ``refusal`` and nothing else.

    mix         SASS instructions of a warp and step by pipe; opcodes: the same by name
    counts      of the emulator (binding.Counts)
    prediction  model.Prediction
    measured    measure.Timing, where a GPU has timed it
    """

    point: Point
    refusal: str | None = None
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    blocks_per_sm: int = 0
    warps_per_sm: int = 0
    mix: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, int] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    prediction: model.Prediction | None = None
    measured: dict[str, float] | None = None

    def as_dict(self) -> dict:
        """JSON's types only."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> Record:
        data = dict(data)
        data["point"] = Point(**data["point"])
        if data["prediction"] is not None:
            data["prediction"] = model.Prediction(**data["prediction"])
        return cls(**data)


def evaluate(point: Point, workload: Workload, arch: Architecture, *, emulate: bool = True) -> Record:
    """Compile ``point`` and say all about it. Some seconds; less where the kernel is in the disk cache."""
    spec = binding.spec_of(point, workload, arch)
    kernel = binding.compiled(point, workload, arch)
    used = resources.usage(kernel)
    if used.blocks_per_sm == 0:
        needed = used.registers * spec.threads
        return Record(
            point, f"{spec.threads} threads of {used.registers} registers need {needed:,}, an SM has {arch.registers:,}"
        )
    counts = binding.counted(kernel, workload) if emulate else None
    step, _ = loops(kernel)
    return Record(
        point,
        registers=used.registers,
        stack_bytes=used.stack_bytes,
        shared_bytes=used.shared_bytes,
        blocks_per_sm=used.blocks_per_sm,
        warps_per_sm=used.warps_per_sm,
        mix=step.mix(),
        opcodes=dict(step.opcodes().most_common()),
        counts=asdict(counts) if counts else {},
        prediction=model.predict(point, workload, rates.of(arch), facts(kernel, used, counts, rates.of(arch))),
    )


@functools.lru_cache(maxsize=8)
def _program(cubin: bytes) -> sass.Program:
    return sass.disassemble(cubin)


def loops(kernel: jit.Kernel) -> tuple[sass.Loop, sass.Loop]:
    """The unmasked and the masked loop over key tiles; RuntimeError where the code has no such loop.

    Both hold all products of one step. The unmasked one is the shorter. In the masked one rows take their softmax
    reference, which the others do rarely.
    """
    wanted = mmas_a_step(kernel.spec)
    common, all_parts = (_program(kernel.cubin).loops(rare) for rare in (False, True))
    full = [pair for pair in zip(common, all_parts, strict=True) if pair[0].mmas == wanted]
    if not full:
        raise RuntimeError(
            f"{kernel.spec.title}: no loop with {wanted} matrix products in its SASS, but {[x.mmas for x in common]}"
        )
    unmasked = min(full, key=lambda pair: len(pair[0].body))
    masked = max(full, key=lambda pair: len(pair[0].body))
    return unmasked[0], masked[1]


def mmas_a_step(spec) -> int:
    """m16n8k16 products of one warp and step: S = Q K^T and O += P V."""
    rows = spec.rows_a_warp // 16
    return rows * (spec.tile_n // 8 * ((spec.head_dim + 15) // 16) + spec.value_width // 8 * (spec.tile_n // 16))


def facts(
    kernel: jit.Kernel, used: resources.Usage, counts: binding.Counts | None, device: rates.Rates
) -> model.CompiledFacts:
    """What the model needs of a compiled kernel; loops are simulated here."""
    step, masked = loops(kernel)
    factors = {
        "shared_factor": counts.matrix_factor if counts else 1.0,
        "copy_factor": counts.copy_factor if counts else 1.0,
    }
    shape = {
        "warps": kernel.spec.warps,
        "blocks": used.blocks_per_sm,
        "shared_bytes": used.shared_bytes,
        "stack_bytes": used.stack_bytes,
        **factors,
    }
    return model.CompiledFacts(
        used.blocks_per_sm,
        model.step_of(step, device, **shape),
        model.step_of(masked, device, **shape),
        _program(kernel.cubin).outside_stalls(),
        step.mmas,
        kernel.spec.reference == "first",
    )


@functools.cache
def method() -> str:
    """A hash of everything of the explorer that a record depends on beside the kernel's code."""
    here = Path(__file__).parent
    names = ("binding.py", "records.py", "model.py", "rates.py", "sass.py", "simulate.py", "space.py")
    return hashlib.sha256(b"".join((here / name).read_bytes() for name in names)).hexdigest()[:16]
