"""The package's attention kernel under the sanitizer: clean as shipped, every deleted synchronisation found."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from launches import recorded

from fa2_cute import flash_attn_func
from fa2_cute.emulator import errors, load

SCHEDULES = ["lowest", "reversed", 7]
HAZARDS = (errors.SharedRace, errors.PendingCopyRead, errors.UninitialisedSharedRead)


@pytest.fixture(scope="module")
def calls():
    """(recorded launch, out, lse) of two calls whose inputs reach every branch of the kernel.

    float16, because its kernel has no second pass for extreme inputs; a negative scale, which has a branch of its own,
    and a positive one, without which that branch's wait would hide the next; three query tiles, the last partial.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 320, 1, 64, dtype=torch.float16) for _ in range(3))
    made = []
    for scale in (-0.125, 0.125):
        with pytest.MonkeyPatch.context() as patch, recorded(patch) as launches, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notice that calls are emulated
            out, lse = flash_attn_func(q, k, v, causal=True, softmax_scale=scale, return_softmax_lse=True)
        (launch,) = launches
        made.append((launch, out, lse))
    return made


@pytest.mark.parametrize("which", [0, 1], ids=["negative scale", "positive scale"])
def test_clean_and_independent_of_the_schedule(calls, which):
    launch, out, lse = calls[which]
    first_out, first_lse = out.clone(), lse.clone()
    for schedule in SCHEDULES:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        launch.again(schedule=schedule)
        # the matrix products of another batch of warps may sum in another order: one float16 step
        torch.testing.assert_close(out, first_out, rtol=2.0**-10, atol=2.0**-20)
        torch.testing.assert_close(lse, first_lse, rtol=1e-6, atol=1e-6)


def synchronisations_of_lanes(kernel):
    """Indices of the lines with a bar.warp.sync that orders memory: those of copies.py.

    Others only keep the compiler from making a branch a select, and order nothing.
    """
    return [
        i.line - 1
        for i in kernel.body
        if (i.op, i.mods[:2]) == ("bar", ("warp", "sync")) and i.source[0].endswith("copies.py")
    ]


def test_every_deleted_synchronisation_is_found(calls):
    """By one of the calls, in every schedule."""
    kernel = calls[0][0].kernel
    lines = kernel.ptx.split("\n")
    pattern = r"\t(bar\.sync|barrier\.\S*sync|cp\.async\.wait_group|cp\.async\.commit_group)"
    places = [i for i, line in enumerate(lines) if re.match(pattern, line)]
    assert len(places) >= 6
    places += (between_lanes := synchronisations_of_lanes(load(kernel.ptx).kernel()))
    assert len(between_lanes) == 1
    missed = []
    for place in places:
        broken = load("\n".join("" if i == place else line for i, line in enumerate(lines))).kernel()
        for schedule in SCHEDULES:
            found = next(filter(None, (hazard(launch, broken, schedule) for launch, _, _ in calls)), None)
            if found is None:
                missed.append((place + 1, lines[place].strip(), schedule))
            elif found.line is None or found.source is None:
                missed.append((place + 1, "no line", schedule))
    assert not missed


def hazard(launch, kernel, schedule) -> Exception | None:
    """What the sanitizer finds when ``launch`` is made again with ``kernel``."""
    try:
        launch.again(kernel, schedule=schedule)
    except HAZARDS as error:
        return error
    return None
