"""Branches, exits, barriers, fences and instructions that have no effect here."""

from __future__ import annotations

from ..ptx import Imm
from .registry import instruction


@instruction("bra", destinations=0, ends="bra")
def bra(g, ins):
    """The guard and the targets are handled by the block that the branch ends."""


@instruction("brx", destinations=0, maskable=False, ends="brx")
def brx(g, ins):
    g.emit(f"m.request = {g.array(ins.operands[0], 'u32')}.astype(np.intp)")


@instruction("ret", "exit", destinations=0, maskable=False, ends="exit")
def leave(g, ins):
    """Handled by the scheduler."""


@instruction("trap", destinations=0, maskable=False, ends="exit")
def trap(g, ins):
    g.emit(f"m.trap(t, {g.site()})")


def barrier_number(g, operand):
    """A barrier id or thread count: a Python int if constant, else the array's name."""
    return str(operand.value) if isinstance(operand, Imm) else g.array(operand, "u32")


def barrier(g, ins, action: str, operands, value="None", destination="None", reduce="None"):
    """Leaves a request that the scheduler carries out at the end of the block."""
    g.translation.features.add("barrier")
    number = barrier_number(g, operands[0])
    count = barrier_number(g, operands[1]) if len(operands) > 1 else "None"
    aligned = ins.op == "bar" or "aligned" in ins.mods
    site = g.site(aligned=aligned, action=action, reduce=reduce, destination=destination)
    g.emit(f"m.request = ({site}, {number}, {count}, {value})")


@instruction(
    "bar.sync",
    "bar.cta.sync",
    "barrier.sync",
    "barrier.cta.sync",
    destinations=0,
    maskable=False,
    ends="barrier",
)
def bar_sync(g, ins):
    g.only("sync", "cta", "aligned")
    barrier(g, ins, "sync", ins.operands)


@instruction(
    "bar.arrive",
    "bar.cta.arrive",
    "barrier.arrive",
    "barrier.cta.arrive",
    destinations=0,
    maskable=False,
    ends="barrier",
)
def bar_arrive(g, ins):
    g.only("arrive", "cta", "aligned")
    barrier(g, ins, "arrive", ins.operands)


@instruction("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red", maskable=False, ends="barrier")
def bar_red(g, ins):
    g.only("red", "cta", "aligned", "popc", "and", "or", "u32", "pred")
    reduce = next(m for m in ins.mods if m in ("popc", "and", "or"))
    dst, *rest = ins.operands
    value = g.array(rest[-1], "pred")
    barrier(g, ins, "red", rest[:-1], value, g.slots(dst)[0], reduce)
    kind = "u32" if reduce == "popc" else "pred"
    g.define(dst, kind, f"np.zeros(t.n, {kind.upper()})")  # replaced when the barrier completes


@instruction("bar.warp", destinations=0)
def bar_warp(g, ins):
    members = ins.operands[0]
    if not (isinstance(members, Imm) and members.value & 0xFFFFFFFF == 0xFFFFFFFF):
        g.translation.features.add("lane masks")
    g.emit(f"t.synchronise({g.site()}, {g.use(members, 'u32')}, {g.mask()})")


@instruction(
    "membar",
    "fence",
    "nanosleep",
    "griddepcontrol",
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    "pmevent",
    "setmaxnreg",
    destinations=0,
)
def no_effect(g, ins):
    """Ordering between blocks, timing and cache hints are not modelled; barriers order shared memory here."""


@instruction("createpolicy")
def createpolicy(g, ins):
    g.define(ins.operands[0], "u64", "t.full(U64(0))")
