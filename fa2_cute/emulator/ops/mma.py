"""mma.sync on 16-bit and 8-bit floats. A run of mma instructions becomes one call when their operands allow it."""

from __future__ import annotations

from ..ptx import Vec
from .registry import instruction, lookup

# shape -> (registers of A, registers of B, bytes of an element); PTX ISA, "Matrix multiply-accumulate"
SHAPES = {("m16n8k16", 2): (4, 2), ("m16n8k8", 2): (2, 1), ("m16n8k32", 1): (4, 2), ("m16n8k16", 1): (2, 1)}
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1}


def mma_form(g, ins):
    """(type of A, type of B, type of C and D); UnknownInstruction if there is no such mma or the numerics lack it."""
    g.only(
        "sync",
        "aligned",
        "row",
        "col",
        "kind__f8f6f4",
        "m16n8k8",
        "m16n8k16",
        "m16n8k32",
        "f32",
        *ELEMENT_BYTES,
    )
    shape = next((m for m in ins.mods if m.startswith("m16n8")), None)
    if len(ins.mods) < 5 or shape is None:
        raise g.unknown("this mma")
    d, a, b, c = ins.mods[-4:]
    if a not in ELEMENT_BYTES or b not in ELEMENT_BYTES or d != c or d not in ("f32", "f16"):
        raise g.unknown(f"mma type .{d}.{a}.{b}.{c}")
    size = ELEMENT_BYTES[a]
    if ELEMENT_BYTES[b] != size or (size == 2 and a != b) or (a == "bf16" and d != "f32"):
        raise g.unknown(f"mma type .{d}.{a}.{b}.{c}")
    registers = SHAPES.get((shape, size))
    if registers is None:
        raise g.unknown(f"mma shape .{shape} of .{a}")
    counts = [len(o.items) if isinstance(o, Vec) else 1 for o in ins.operands]
    wide = 4 if d == "f32" else 2
    if counts != [wide, *registers, wide]:
        raise g.unknown(f"mma operand sizes {counts}")
    numerics = g.translation.numerics
    if numerics.mma is not None and (shape, a, b, d) not in numerics.mma:
        raise g.unknown(f"this mma with numerics {numerics.name!r}")
    return a, b, d


def ids(operand):
    """Register numbers of a fragment."""
    return tuple(r.id if hasattr(r, "id") else ("imm", r) for r in operand.items)


@instruction("mma", maskable=False)
def mma(g, ins):
    form = mma_form(g, ins)
    group = [ins]
    written = set(ids(ins.operands[0]))
    for nxt in g.rest:  # only neighbours that neither read nor overwrite what the run writes
        if nxt.op != "mma" or nxt.mods != ins.mods or nxt.guard is not None or lookup(nxt) is not lookup(ins):
            break
        reads = {r for o in nxt.operands[1:] for r in ids(o)}
        writes = set(ids(nxt.operands[0]))
        if reads & written or writes & written:
            break
        written |= writes
        group.append(nxt)
    # a later member must not overwrite a fragment that an earlier member of the run still has to read:
    # inputs are
    # gathered before any output is bound, so that holds by construction
    g.consumed = len(group) - 1
    a_ids, b_ids, a_frag, b_frag, pairs = {}, {}, [], [], []
    for m in group:
        _, a, b, _ = m.operands
        for operand, known, fragments in ((a, a_ids, a_frag), (b, b_ids, b_frag)):
            if ids(operand) not in known:
                known[ids(operand)] = len(fragments)
                fragments.append(f"({', '.join(g.array(r, 'u32') for r in operand.items)},)")
        pairs.append((a_ids[ids(a)], b_ids[ids(b)]))
    kind = "f32" if form[2] == "f32" else "u32"
    c_names = [g.array(r, kind) for m in group for r in m.operands[3].items]
    key = g.namespace(f"pairs{len(g.translation.sites)}", tuple(pairs))
    site = g.site(count=len(group))
    result = g.temp(
        f"t.mma({site}, {form!r}, [{', '.join(a_frag)}], [{', '.join(b_frag)}], {key}, [{', '.join(c_names)}])"
    )
    g.saw_array = True
    position = 0
    for m in group:
        for r in m.operands[0].items:
            g.define(r, kind, f"{result}[{position}]")
            position += 1
