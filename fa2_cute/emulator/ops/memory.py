"""Loads, stores, asynchronous copies, matrix loads and stores, and atomics."""

from __future__ import annotations

from ..kinds import KINDS
from ..ptx import TYPE_BYTES, Address, Imm, Reg, Symbol, Vec
from .convert import read_int, write_int
from .registry import instruction

SPACES = {"global", "shared", "local", "param", "const"}
LOAD_HINTS = {
    "weak",
    "relaxed",
    "acquire",
    "release",
    "volatile",
    "mmio",
    "cta",
    "gpu",
    "sys",
    "cluster",
    "nc",
    "ca",
    "cg",
    "cs",
    "cv",
    "lu",
    "wb",
    "wt",
    "L1__evict_normal",
    "L1__evict_unchanged",
    "L1__evict_first",
    "L1__evict_last",
    "L1__no_allocate",
    "L2__64B",
    "L2__128B",
    "L2__256B",
    "L2__cache_hint",
    "L2__evict_last",
    "L2__evict_first",
    "L2__evict_normal",
    "level__eviction_priority",
    "unified",
}


def split(g, ins, extra=()):
    """(space or 'generic', vector length, PTX type) of a load or store."""
    space, vector = "generic", 1
    for m in ins.mods[:-1]:
        base = m.split("__")[0]
        if base in SPACES:
            space = base
        elif m in ("v2", "v4", "v8"):
            vector = int(m[1:])
        elif m not in LOAD_HINTS and m not in extra:
            raise g.unknown(f"modifier .{m} of {ins.op}")
    kind = ins.mods[-1]
    if kind not in KINDS or kind == "pred":
        raise g.unknown(f"type .{kind} of {ins.op}")
    return space, vector, kind


def address(g, operand, space):
    """(array name or None, constant offset or symbol expression) of an address operand."""
    if not isinstance(operand, Address):
        operand = Address(operand, 0)
    if isinstance(operand.base, Reg):
        kind = "u64" if operand.base.width == 8 else "u32"
        return g.array(operand.base, kind), operand.offset
    if isinstance(operand.base, Symbol):
        if not g.translation.has_symbol(operand.base.name):
            raise g.unknown(f"symbol {operand.base.name}")
        return g.temp(f"t.full(U64(m.symbol({operand.base.name!r})))"), operand.offset
    if isinstance(operand.base, Imm):
        return g.temp(f"t.full(U64({operand.base.value & (1 << 64) - 1}))"), operand.offset
    raise g.unknown("this address")


@instruction("ld")
def ld(g, ins):
    space, vector, kind = split(g, ins)
    dst, source = ins.operands[:2]
    items = dst.items if isinstance(dst, Vec) else (dst,)
    if len(items) != vector:
        raise g.unknown("this vector size")
    width = TYPE_BYTES[kind]
    g.saw_array = True
    if space == "param" and isinstance(source, Address) and isinstance(source.base, Symbol):
        for i, item in enumerate(items):
            if item is not None:
                value = g.temp(f"t.param({source.base.name!r}, {source.offset + i * width}, {width})")
                deliver(g, item, kind, value)
        return
    base, offset = address(g, source, space)
    call = {
        "global": "m.global_memory.load",
        "shared": "m.shared.load",
        "local": "m.spaces.local_load",
        "param": "m.spaces.param_load",
        "const": "m.global_memory.load",
        "generic": "m.spaces.generic_load",
    }[space]
    if space in ("shared", "generic"):
        g.translation.features.update((f"shared{width * vector}", f"read{width * vector}"))
    site = g.site(offset=offset, width=width, count=vector)
    values = g.temp(f"{call}(t, {site}, {base}, {g.mask()})")
    for i, item in enumerate(items):
        if item is not None:
            deliver(g, item, kind, f"{values}[{i}]")


def deliver(g, item, kind, value):
    """A loaded array of unsigned integers into a register at least as wide."""
    if TYPE_BYTES[kind] == item.width:
        return g.define(item, KINDS[kind] if kind[0] in "bu" and kind[1].isdigit() else unsigned(kind), value)
    signed = kind[0] == "s"
    width = 8 * TYPE_BYTES[kind]
    name = f"{'s' if signed else 'u'}{width}"
    return write_int(g, item, name, f"{value}.view(S{width})" if signed else value)


def unsigned(kind):
    """Unsigned kind of the same width."""
    return f"u{8 * TYPE_BYTES[kind]}"


@instruction("st", destinations=0)
def st(g, ins):
    space, vector, kind = split(g, ins)
    where, source = ins.operands[:2]
    items = source.items if isinstance(source, Vec) else (source,)
    if len(items) != vector:
        raise g.unknown("this vector size")
    width = TYPE_BYTES[kind]
    base, offset = address(g, where, space)
    values = []
    for item in items:
        if isinstance(item, Reg) and width < max(item.width, 2):
            values.append(read_int(g, item, f"u{8 * width}"))
        else:
            values.append(g.array(item, f"u{8 * width}"))
    call = {"global": "m.global_memory.store", "shared": "m.shared.store", "local": "m.spaces.local_store",
            "generic": "m.spaces.generic_store"}.get(space)  # fmt: skip
    if call is None:
        raise g.unknown(f"space .{space} of st")
    if space in ("shared", "generic"):
        g.translation.features.add(f"shared{width * vector}")
    if space in ("global", "generic"):
        g.translation.features.add(f"global{width * vector}")
    g.emit(f"{call}(t, {g.site(offset=offset, width=width, count=vector)}, {base}, [{', '.join(values)}], {g.mask()})")


@instruction("cp.async.ca", "cp.async.cg", destinations=0)
def cp_async(g, ins):
    g.only(
        "async",
        "ca",
        "cg",
        "shared",
        "shared__cta",
        "global",
        "L2__64B",
        "L2__128B",
        "L2__256B",
        "L2__cache_hint",
    )
    where, source, size, *rest = ins.operands
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise g.unknown("this copy size")
    if "cg" in ins.mods and size.value != 16:
        raise g.unknown("a .cg copy of other than 16 bytes")
    if "L2__cache_hint" in ins.mods:
        rest = rest[:-1]
    dst, dst_offset = address(g, where, "shared")
    src, src_offset = address(g, source, "global")
    source_size = "None"
    if rest:
        if isinstance(rest[0], Reg) and rest[0].width == 0:
            source_size = g.temp(f"where({g.array(rest[0], 'pred')}, U32(0), U32({size.value}))")  # ignore-src
        elif not (isinstance(rest[0], Imm) and rest[0].value == size.value):
            source_size = g.array(rest[0], "u32")
    g.translation.features.update((f"shared{size.value}", "cp.async"))
    site = g.site(offset=dst_offset, source_offset=src_offset, width=size.value)
    g.emit(f"m.spaces.copy_async(t, {site}, {dst}, {src}, {source_size}, {g.mask()})")


@instruction("cp.async.commit_group", destinations=0, maskable=False)
def commit_group(g, ins):
    g.emit("m.shared.commit(t)")


@instruction("cp.async.wait_group", destinations=0, maskable=False)
def wait_group(g, ins):
    g.emit(f"m.shared.wait(t, {ins.operands[0].value})")


@instruction("cp.async.wait_all", destinations=0, maskable=False)
def wait_all(g, ins):
    g.emit("m.shared.wait(t, None)")


@instruction("ldmatrix", maskable=False)
def ldmatrix(g, ins):
    g.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared__cta", "b16")
    dst, source = ins.operands
    items = dst.items if isinstance(dst, Vec) else (dst,)
    base, offset = address(g, source, "shared")
    g.translation.features.add("shared16")
    g.saw_array = True
    site = g.site(offset=offset, width=16, count=len(items), trans="trans" in ins.mods)
    values = g.temp(f"m.shared.load_matrix(t, {site}, {base})")
    for i, item in enumerate(items):
        g.define(item, "u32", f"{values}[{i}]")


@instruction("stmatrix", destinations=0, maskable=False)
def stmatrix(g, ins):
    g.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared__cta", "b16")
    where, source = ins.operands
    items = source.items if isinstance(source, Vec) else (source,)
    base, offset = address(g, where, "shared")
    g.translation.features.add("shared16")
    values = ", ".join(g.array(i, "u32") for i in items)
    site = g.site(offset=offset, width=16, count=len(items), trans="trans" in ins.mods)
    g.emit(f"m.shared.store_matrix(t, {site}, {base}, [{values}])")


ATOMICS = {"add", "min", "max", "exch", "cas", "inc", "dec", "and", "or", "xor"}
ATOMIC_TYPES = {
    "b32",
    "u32",
    "s32",
    "u64",
    "s64",
    "b64",
    "f32",
    "f64",
    "f16",
    "bf16",
    "f16x2",
    "bf16x2",
    "b16",
}


@instruction("atom")
def atom(g, ins):
    atomic(g, ins, ins.operands[0], ins.operands[1:])


@instruction("red", destinations=0)
def red(g, ins):
    atomic(g, ins, None, ins.operands)


def atomic(g, ins, dst, operands):
    """atom and red: one element a lane, applied in lane order."""
    kind = ins.mods[-1]
    op = next((m for m in ins.mods if m in ATOMICS), None)
    space = next((m.split("__")[0] for m in ins.mods if m.split("__")[0] in ("global", "shared")), "generic")
    known = LOAD_HINTS | ATOMICS | ATOMIC_TYPES | {"global", "shared", "shared__cta", "acq_rel", "noftz"}
    g.only(*known)
    if op is None or kind not in ATOMIC_TYPES:
        raise g.unknown("this atomic")
    width = TYPE_BYTES[kind]
    base, offset = address(g, operands[0], space)
    values = [g.array(o, f"u{8 * width}") for o in operands[1 : 3 if op == "cas" else 2]]
    g.translation.features.add("atomic")
    if space in ("shared", "generic"):
        g.translation.features.update((f"shared{width}", "shared atomic"))
    site = g.site(offset=offset, width=width, count=1, op_name=op, kind=kind, space=space)
    g.saw_array = True
    old = g.temp(f"m.spaces.atomic(t, {site}, {base}, [{', '.join(values)}], {g.mask()})")
    if dst is not None:
        g.define(dst, f"u{8 * width}", old)
