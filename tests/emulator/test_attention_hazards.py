"""The package's attention kernel under the sanitizer: clean as shipped, and every deleted synchronisation is found."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from fa2_cute import arch, emulation, jit, tiling
from fa2_cute.emulator import errors
from fa2_cute.problem import Problem

SCHEDULES = ["lowest", "reversed", 7]
HAZARDS = (errors.SharedRace, errors.PendingCopyRead, errors.UninitialisedSharedRead)


@pytest.fixture(scope="module")
def call():
    """(compiled kernel, function that runs a kernel like it): three query tiles, a scale that takes every branch."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 320, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    problem = Problem.of(q, k, v, causal=True)
    # "trailing": the variant without a second pass that only extreme inputs reach
    spec = dataclasses.replace(tiling.choose(problem, arch.TARGET), reference="trailing")
    kernel = jit.compiled(spec, arch.TARGET)
    kept = []  # the bridge keys parsed modules by the identity of the kernel, which must therefore outlive the test

    def run(variant, schedule):
        kept.append(variant)
        out, lse = torch.empty_like(q), torch.empty(1, 1, 320)
        emulation.run(variant, problem, (q, k, v, out, lse), -0.18, schedule=schedule)
        return out, lse

    return kernel, run


def test_clean_and_independent_of_the_schedule(call):
    kernel, run = call
    out, lse = run(kernel, "lowest")
    for schedule in SCHEDULES[1:]:
        other_out, other_lse = run(kernel, schedule)
        torch.testing.assert_close(
            other_out, out, rtol=2.0**-8, atol=1e-6
        )  # one bfloat16 step: BLAS sums otherwise
        torch.testing.assert_close(other_lse, lse, rtol=1e-5, atol=1e-5)


def test_every_deleted_synchronisation_is_found(call):
    kernel, run = call
    lines = kernel.ptx.split("\n")
    pattern = r"\t(bar\.sync|barrier\.\S*sync|cp\.async\.wait_group|cp\.async\.commit_group)"
    places = [i for i, line in enumerate(lines) if re.match(pattern, line)]
    assert len(places) >= 6
    missed = []
    for place in places:
        broken = "\n".join("" if i == place else line for i, line in enumerate(lines))
        for schedule in SCHEDULES:
            try:
                run(dataclasses.replace(kernel, ptx=broken), schedule)
                missed.append((place + 1, lines[place].strip(), schedule))
            except HAZARDS as error:
                assert error.line > 0 and error.source is not None  # noqa: PT017 - which of three is not the point
    assert not missed
