"""Which mutants a run tries: all faults of the call, and PTX mutants drawn evenly over their kinds."""

import random
from collections import defaultdict
from dataclasses import dataclass

from .. import jit
from ..spec import ForwardSpec
from . import call_mutants, ptx_mutants
from .ptx_mutants import PtxMutant


@dataclass(frozen=True)
class Task:
    """One mutant of the kernel of ``spec``: of its PTX, or else of its call, by name."""

    spec: ForwardSpec
    kind: str
    change: str
    ptx: PtxMutant | None = None

    @property
    def opcode(self) -> str:
        return self.ptx.opcode if self.ptx else ""

    @property
    def source(self) -> str:
        """The text of the Python line that the mutated instruction comes from."""
        return self.ptx.source[2] if self.ptx else ""

    def __str__(self) -> str:
        kernel = f"{self.spec.dtype}, head_dim {self.spec.head_dim}, {'causal' if self.spec.causal else 'full'}"
        return f"{self.kind}, {self.change} ({kernel})" + (f"\n    {self.ptx}" if self.ptx else "")


def draw(kernels: list[jit.Kernel], count: int, seed: int) -> list[Task]:
    """``count`` tasks: every call mutant once, the rest PTX mutants, as evenly over kinds as there are enough of each.

    A kernel is drawn for each call mutant; of a PTX kind every mutant of every kernel is as likely.
    """
    generator = random.Random(seed)
    specs = [kernel.spec for kernel in kernels]
    tasks = [Task(generator.choice(specs), m.kind, m.change) for m in call_mutants.mutants()]
    pools: dict[str, list[Task]] = defaultdict(list)
    for kernel in kernels:
        for m in ptx_mutants.mutants(kernel.ptx):
            pools[m.kind].append(Task(kernel.spec, m.kind, m.change, m))
    for pool in pools.values():
        generator.shuffle(pool)
    while len(tasks) < count and any(pools.values()):
        for pool in pools.values():
            if pool and len(tasks) < count:
                tasks.append(pool.pop())
    return tasks[:count]
