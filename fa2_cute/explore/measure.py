"""GPU times of many kernels on one problem, fair to each: checked first, interleaved, medians, drift watched."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from .. import reference
from .space import Workload

L2_BYTES = 128 * 2**20  # more than any L2 of today's devices (RTX 5090: 96 MiB, H200: 50 MiB)
WARM_UP_ROUNDS = 2
CHECK_LENGTH = 640  # queries and keys of the problem that is checked against float64: several tiles and a rest
CHECK_HEADS = 4
TARGET_MS = 1.0  # between two events: their resolution is half a microsecond, and a launch hides behind the last
MOST_CALLS = 16


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch: median and quartiles over the rounds.

    drift   median of the second half of the rounds over that of the first: 1.0 on a device whose clock holds still
    """

    median: float
    low: float
    high: float
    rounds: int
    drift: float

    def as_dict(self) -> dict:
        return asdict(self)


def wrong_result(call: Callable, workload: Workload, seed: int = 0) -> str | None:
    """Why ``call(q, k, v, out, lse)`` is wrong on a small problem of the same kind, or None if it is right.

    Right: an error against float64 of at most twice torch's own in the same dtype, and a logsumexp within 1e-3.
    """
    query_len, key_len = min(workload.query_len, CHECK_LENGTH + 9), min(workload.key_len, CHECK_LENGTH)
    heads = min(workload.heads, CHECK_HEADS)
    ratio = workload.heads // workload.kv_heads
    kv_heads = max(heads // ratio, 1)
    small = Workload(workload.head_dim, query_len, key_len, workload.causal, 1, heads, kv_heads, workload.dtype)
    q, k, v = inputs(small, torch.Generator("cuda").manual_seed(seed))
    out, lse = outputs(small)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    call(q, k, v, out, lse)
    expected, expected_lse = reference.attention(q, k, v, causal=workload.causal)
    error = reference.error(out, expected)
    allowed = reference.torch_error(q, k, v, expected, causal=workload.causal)
    if not error.rms <= 2 * allowed.rms:
        return f"RMS error {error.rms:.3g}, torch's is {allowed.rms:.3g}"
    seen = expected_lse > -float("inf")
    off = (lse.double() - expected_lse)[seen].abs().max().item()
    if not off <= 1e-3 or not bool((lse[~seen] == -float("inf")).all()):
        return f"logsumexp off by {off:.3g}"
    return None


def inputs(workload: Workload, generator: torch.Generator | None = None) -> tuple[torch.Tensor, ...]:
    """Normal random q, k, v on the current CUDA device."""
    dtype = getattr(torch, workload.dtype)
    lengths_heads = (
        (workload.query_len, workload.heads),
        (workload.key_len, workload.kv_heads),
        (workload.key_len, workload.kv_heads),
    )
    return tuple(
        torch.randn(workload.batch, n, h, workload.head_dim, device="cuda", dtype=dtype, generator=generator)
        for n, h in lengths_heads
    )


def outputs(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised out and logsumexp."""
    dtype = getattr(torch, workload.dtype)
    return (
        torch.empty(workload.batch, workload.query_len, workload.heads, workload.head_dim, device="cuda", dtype=dtype),
        torch.empty(workload.batch, workload.heads, workload.query_len, device="cuda"),
    )


def timings(calls: Mapping[str, Callable], workload: Workload, rounds: int = 10) -> dict[str, Timing]:
    """Time every ``call(q, k, v, out, lse)``; all of one round before any of the next, in a turning order.

    Inputs are rotated through more memory than the L2 holds, so that no call finds the last one's.
    """
    sets = [inputs(workload)]
    while sum(x.nbytes for x in itertools.chain(*sets)) < 2 * L2_BYTES:
        sets.append(inputs(workload))
    turn = itertools.cycle(sets)
    out, lse = outputs(workload)
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    repeats = dict.fromkeys(names, 1)
    for round_ in range(-WARM_UP_ROUNDS, rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats[name]):
                calls[name](*next(turn), out, lse)
            end.record()
            end.synchronize()
            each = start.elapsed_time(end) / repeats[name]
            if round_ >= 0:
                times[name].append(each)
            else:
                repeats[name] = max(1, min(MOST_CALLS, round(TARGET_MS / max(each, 1e-3))))
    return {name: _timing(values) for name, values in times.items()}


def _timing(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    half = max(len(values) // 2, 1)
    drift = statistics.median(values[-half:]) / statistics.median(values[:half])
    return Timing(median, low, high, len(values), drift)
