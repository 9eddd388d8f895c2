"""Warp-wide instructions: shuffles, votes, matches, reductions, elections and matrix moves."""

from __future__ import annotations

from ..kinds import KINDS
from ..ptx import Pair
from .registry import instruction


@instruction("shfl", maskable=False)
def shfl(g, ins):
    g.only("sync", "up", "down", "bfly", "idx", "b32")
    if "sync" not in ins.mods:
        raise g.unknown("shfl without .sync")
    dst, a, b, c, members = ins.operands
    mode = next(m for m in ins.mods if m in ("up", "down", "bfly", "idx"))
    value, lane, clamp, mask = g.array(a, "u32"), g.use(b, "u32"), g.use(c, "u32"), g.use(members, "u32")
    pair = g.temp(f"t.shuffle({g.site()}, {mode!r}, {value}, {lane}, {clamp}, {mask})")
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, None)
    g.define(first, "u32", f"{pair}[0]")
    if second is not None:
        g.define(second, "pred", f"{pair}[1]")


@instruction("vote", maskable=False)
def vote(g, ins):
    g.only("sync", "all", "any", "uni", "ballot", "pred", "b32")
    dst, p, members = ins.operands
    mode = next(m for m in ins.mods if m in ("all", "any", "uni", "ballot"))
    kind = "u32" if mode == "ballot" else "pred"
    g.define(dst, kind, f"t.vote({g.site()}, {mode!r}, {g.array(p, 'pred')}, {g.use(members, 'u32')})")


@instruction("activemask", maskable=False)
def activemask(g, ins):
    g.saw_array = True
    g.define(ins.operands[0], "u32", "t.active_mask()")


@instruction("match", maskable=False)
def match(g, ins):
    g.only("any", "all", "sync", "b32", "b64")
    dst, a, members = ins.operands
    mode = "any" if "any" in ins.mods else "all"
    value = g.array(a, KINDS[ins.mods[-1]])
    pair = g.temp(f"t.match({g.site()}, {mode!r}, {value}, {g.use(members, 'u32')})")
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, None)
    g.define(first, "u32", f"{pair}[0]")
    if second is not None:
        g.define(second, "pred", f"{pair}[1]")


@instruction("redux", maskable=False)
def redux(g, ins):
    g.only("sync", "add", "min", "max", "and", "or", "xor", "u32", "s32", "b32", "f32", "abs", "NaN")
    if "abs" in ins.mods or "NaN" in ins.mods:
        raise g.unknown("this redux modifier")
    dst, a, members = ins.operands
    op = next(m for m in ins.mods if m in ("add", "min", "max", "and", "or", "xor"))
    kind = KINDS[ins.mods[-1]]
    value = g.array(a, kind)
    g.define(dst, kind, f"t.reduce({g.site()}, {op!r}, {value}, {g.use(members, 'u32')})")


@instruction("elect", maskable=False)
def elect(g, ins):
    g.only("sync")
    dst, members = ins.operands
    pair = g.temp(f"t.elect({g.site()}, {g.use(members, 'u32')})")
    g.saw_array = True
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, None)
    if first is not None:
        g.define(first, "u32", f"{pair}[0]")
    if second is not None:
        g.define(second, "pred", f"{pair}[1]")


@instruction("movmatrix", maskable=False)
def movmatrix(g, ins):
    g.only("sync", "aligned", "m8n8", "trans", "b16")
    dst, a = ins.operands
    g.define(dst, "u32", f"t.transpose({g.site()}, {g.array(a, 'u32')})")
