"""Prints how fast the emulator runs the package's attention kernel on this machine, one thread.

OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python tests/emulator/speed.py
"""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from launches import recorded

from fa2_cute import flash_attn_func
from fa2_cute.emulator import load
from fa2_cute.emulator.codegen import translate

SHAPES = [(1, 8, 256, True), (2, 3, 320, False), (2, 8, 512, True), (1, 8, 2048, True)]  # batch, heads, length, causal


def attention(batch: int, heads: int, length: int, causal: bool):
    """One line: MMAs a second of the first and of a later launch, and without checks. Returns the kernel."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, 128, dtype=torch.bfloat16) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch, recorded(patch) as launches:
        flash_attn_func(q, k, v, causal=causal)
    (launch,) = launches
    fresh = load(launch.kernel.ptx).kernel()
    translate(fresh)
    first, _, later, unchecked = (launch.again(fresh, checks=checks) for checks in (True, True, True, False))
    rates = " | ".join(f"{s.mma / s.seconds / 1000:.0f}k" for s in (first, later, unchecked))
    name = f"{batch} x {heads} x {length}, {'causal' if causal else 'full'}"
    print(f"| {name} | {later.mma:,} | {later.seconds:.2f} s | {rates} |")
    return launch.kernel


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the notice that calls are emulated
    print("| batch x heads x length | MMAs | time | MMA/s, first | MMA/s | MMA/s, no checks |")
    print("|---|---|---|---|---|---|")
    kernels = [attention(*shape) for shape in SHAPES]
    text = kernels[-1].ptx
    start = time.perf_counter()
    translate(load(text).kernel())
    seconds = time.perf_counter() - start
    print(f"\n{text.count(chr(10)):,} lines of PTX parsed and translated in {seconds:.2f} s")
