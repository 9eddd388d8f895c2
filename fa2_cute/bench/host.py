"""The section ``host``: what a call costs the calling thread, on tensors so small that the device is never behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attention import flash_attn_func
from ..kvcache import flash_attn_with_kvcache
from . import checking, problems
from .peers import FA4, FLASH, OURS, fa4_plain, reason
from .results import Cell, Figure, Section
from .roofline import Wrong
from .session import Session, require_device
from .timing import Call, host_microseconds

DEFAULT = "torch SDPA"  # whichever backend torch chooses
LENGTH, HEADS, DIM = 128, 8, 128
CALLS, REPEATS, QUICK_REPEATS = 200, 30, 10
WITHOUT, WITH = "inference_mode", "autograd on"
Contestants = dict[str, tuple[Callable, Call]]  # what surrounds the timing, and the call


def run(session: Session) -> Section:
    """The section."""
    finish = torch.cuda.synchronize if session.device.type == "cuda" else lambda: None
    repeats = QUICK_REPEATS if session.quick else REPEATS
    calls = CALLS if session.device.type == "cuda" else 1  # the emulator takes a second for each
    cells = []
    for mode, context in ((WITHOUT, torch.inference_mode), (WITH, contextlib.nullcontext)):
        for name, (expected, contestants) in _problems(session).items():
            session.say(f"host {name}, {mode}")
            figures: dict[str, Figure] = {}
            missing: dict[str, str] = {}
            for one, (around, call) in contestants.items():
                try:
                    with context(), around():
                        fault = checking.fault(call(), expected)
                        if fault is None:
                            figures[one] = host_microseconds(call, calls, repeats, finish)
                except Exception as error:  # somebody else's limit, of whatever kind
                    require_device(session, one, error)
                    if one == OURS:
                        raise
                    fault = reason(error)
                if fault is not None and one == OURS:
                    raise Wrong(f"host {name}: {fault}")
                if fault is not None:
                    missing[one] = fault
            cells.append(Cell(name, mode, 0.0, figures, missing))
    return Section(
        name="host",
        title=f"Host time of a call on 1 x {LENGTH} x {HEADS} x {DIM}",
        unit="us",
        work_unit="",
        contestants=(OURS, DEFAULT, FLASH, FA4),
        peers=tuple(name for name in (DEFAULT, FLASH, FA4) if any(name in cell.figures for cell in cells)),
        cells=tuple(cells),
    )


def _problems(session: Session) -> dict[str, tuple[checking.Expected, Contestants]]:
    """What is called, by whom, and what it must return."""
    device = session.device
    plain = contextlib.nullcontext
    q, k, v = problems.normal(device, torch.bfloat16, *[(1, LENGTH, HEADS, DIM)] * 3)

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    whole: Contestants = {OURS: (plain, lambda: flash_attn_func(q, k, v)), DEFAULT: (plain, sdpa)}
    if session.takes_part(FLASH):
        whole[FLASH] = (lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), sdpa)
    if session.takes_part(FA4):
        whole[FA4] = (plain, fa4_plain(q, k, v, False))

    # A cache of its own: the last token is appended again by each call.
    cache = [x.clone() for x in (k, v)]
    query, new_k, new_v = problems.normal(device, torch.bfloat16, *[(1, 1, HEADS, DIM)] * 3)
    lengths = torch.full((1,), LENGTH - 1, dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "causal": True}
    attended = checking.expect(query, k[:, :-1], v[:, :-1], causal=False)
    extended = [torch.cat((x[:, :-1], new), dim=1) for x, new in ((k, new_k), (v, new_v))]
    return {
        "flash_attn_func": (checking.expect(q, k, v, causal=False), whole),
        "flash_attn_with_kvcache": (
            attended,
            {OURS: (plain, lambda: flash_attn_with_kvcache(query, *cache, **options))},
        ),
        "flash_attn_with_kvcache, append": (
            checking.expect(query, *extended, causal=False),
            {OURS: (plain, lambda: flash_attn_with_kvcache(query, *cache, new_k, new_v, **options))},
        ),
    }
