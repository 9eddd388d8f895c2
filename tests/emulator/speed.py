"""Prints how fast the emulator runs the package's attention kernel on this machine, one thread.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python tests/emulator/speed.py
"""

from __future__ import annotations

import time

import torch

from fa2_cute import arch, emulation, jit, tiling
from fa2_cute.emulator import load
from fa2_cute.emulator.codegen import translate
from fa2_cute.problem import Problem

SHAPES = [
    (1, 8, 256, True),
    (2, 3, 320, False),
    (2, 8, 512, True),
    (1, 8, 2048, True),
]  # batch, heads, length, causal


def attention(batch: int, heads: int, length: int, causal: bool) -> None:
    """One line: MMAs a second of the first and of a later launch, and without checks."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, 128, dtype=torch.bfloat16) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(batch, heads, length)
    problem = Problem.of(q, k, v, causal=causal)
    kernel = jit.compiled(tiling.choose(problem, arch.TARGET), arch.TARGET)
    launches = [
        emulation.run(kernel, problem, (q, k, v, out, lse), 128**-0.5 * 1.4427, checks=checks)
        for checks in (True, True, True, False)
    ]
    first, _, later, unchecked = (s.mma / s.seconds / 1000 for s in launches)
    print(
        f"| {batch} x {heads} x {length}, {'causal' if causal else 'full'} | {launches[0].mma:,} "
        f"| {launches[2].seconds:.2f} s | {first:.0f}k | {later:.0f}k | {unchecked:.0f}k |"
    )


def translation(ptx: str) -> None:
    """Time to parse and translate a PTX text."""
    start = time.perf_counter()
    translate(load(ptx).kernel())
    print(
        f"\n{ptx.count(chr(10)):,} lines of PTX parsed and translated in {time.perf_counter() - start:.2f} s"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| batch x heads x length | MMAs | time | MMA/s, first | MMA/s | MMA/s, no checks |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        attention(*shape)
    some = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
    spec = tiling.choose(Problem.of(some, some, some, causal=True), arch.TARGET)
    translation(jit.compiled(spec, arch.TARGET).ptx)
