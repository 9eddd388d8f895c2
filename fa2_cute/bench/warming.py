"""Compiles what a run will call in several processes first: compilers are slow, and a GPU waits for one at a time.

Each process makes one call of each kind that it is given, which leaves the kernel in its library's cache on disk (ours,
FA4's, Triton's). What fails here fails again, and is reported, where it is timed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from ..explore.space import Workload
from . import decode, problems
from .kvcache import APPEND, ATTEND, WHOLE, Append, Attend, calls_of, inputs_of
from .peers import FA4, FA4_SM_120, OURS, PACKAGES, PREFILL, SM_120_TILE, TRITON
from .problems import Decode
from .session import Session
from .timing import Call

# The others come compiled, or keep nothing on disk.
COMPILED = (OURS, SM_120_TILE, FA4, FA4_SM_120, TRITON)
MOST_CACHE = 2**29  # bytes: what sixteen processes can hold at once, copies of it included


@dataclass(frozen=True)
class Job:
    """One call of ``contestant``. pages: the page sizes among whose contestants a decode job's is."""

    contestant: str
    problem: Workload | Decode | Append | Attend
    pages: tuple[int, ...] = ()


def prefill_jobs(cells: Sequence[Workload], contestants: Sequence[str]) -> list[Job]:
    """The calls to make: of each kind, as far as a kernel depends on it, the one of fewest operations."""
    chosen: dict[tuple, Job] = {}
    for of in sorted(cells, key=lambda of: of.operations):
        kind = (of.head_dim, of.causal, of.heads // of.kv_heads, of.query_len == of.key_len, of.dtype)
        for name in contestants:
            if name in COMPILED:
                chosen.setdefault((name, *kind), Job(name, of))
    return list(chosen.values())


def decode_jobs(cells: Sequence[Decode], contestants: Sequence[str], pages: Sequence[int]) -> list[Job]:
    """The same for decode: of the cells that are small enough the smallest, the middle one and the largest."""
    small = sorted((of for of in cells if of.cache_bytes <= MOST_CACHE), key=lambda of: of.cache_bytes)
    some = dict.fromkeys(small[i] for i in (0, len(small) // 2, -1)) if small else ()
    return [
        Job(name, of, tuple(pages)) for of in some for name in contestants if name in COMPILED or name not in PACKAGES
    ]


def kvcache_jobs(cells: Sequence[Append | Attend]) -> list[Job]:
    """The same for caches: every problem, with and without append."""
    return [Job(name, of) for of in cells for name in ((APPEND,) if isinstance(of, Append) else (ATTEND, WHOLE))]


def warm(session: Session, todo: Sequence[Job], processes: int):
    """Make the calls of ``todo`` in ``processes`` processes."""
    if processes < 2 or not todo:
        return
    session.say(f"compiling for {len(todo)} kinds of calls in {processes} processes")
    done = 0
    try:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_quiet) as pool:
            for future in as_completed([pool.submit(_once, str(session.device), job) for job in todo]):
                future.result()
                done += 1
    except BrokenProcessPool as error:
        session.say(f"compiling ahead broke off after {done} kinds ({error}); the rest is compiled as it comes")


def _quiet():
    """Workers speak to nobody: compilers warn, and each would announce its kernels."""
    logging.disable(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


@torch.inference_mode()
def _once(device: str, job: Job):
    where = torch.device(device)
    try:
        _call(where, job)()
        if where.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:  # seen again, and told, by the section that times it
        logging.getLogger(__name__).debug("%s", job, exc_info=True)


def _call(device: torch.device, job: Job) -> Call:
    if isinstance(job.problem, Decode):
        makers = {**decode.ours((), job.pages, fp8_too=True), **decode.PEERS}
        return makers[job.contestant](*problems.decode_inputs(job.problem, device))
    if isinstance(job.problem, Append | Attend):
        return calls_of(job.problem, inputs_of(job.problem, device))[job.contestant]
    make = next(one.make for one in PREFILL if one.name == job.contestant)
    return make(*problems.prefill_inputs(job.problem, device), job.problem.causal)
