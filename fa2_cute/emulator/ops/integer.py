"""Integer, bit and predicate instructions, moves, selects and comparisons."""

from __future__ import annotations

from ..kinds import KINDS
from ..ptx import Address, Imm, Pair, Reg, Special, Symbol, Vec
from .floating import float_arith
from .registry import instruction

INTEGER = {"u16", "s16", "u32", "s32", "u64", "s64"}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
COMPARISONS = {
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "lo",
    "ls",
    "hi",
    "hs",
    "equ",
    "neu",
    "ltu",
    "leu",
    "gtu",
    "geu",
    "num",
    "nan",
}


def int_kind(g, ins) -> str:
    """The integer kind of an instruction's type modifier."""
    kind = KINDS.get(ins.mods[-1]) if ins.mods else None
    if kind not in INTEGER:
        raise g.unknown(f"type .{ins.mods[-1] if ins.mods else '?'} of {ins.op}")
    return kind


@instruction("mov")
def mov(g, ins):
    if len(ins.mods) != 1:
        raise g.unknown("this form of mov")
    dst, src = ins.operands
    kind = KINDS[ins.mods[0]]
    if isinstance(dst, Vec):
        return unpack(g, dst, src, kind)
    if isinstance(src, Vec):
        return pack(g, dst, src, kind)
    if len(g.slots(dst)) == 1:
        g.check_width(g.slots(dst)[0], kind)
    if g.copy(dst, src):
        return None
    if isinstance(src, Special):
        return g.define(dst, kind, g.use(src, kind))
    if isinstance(src, Imm) and kind == "f64" and src.bits == 32:
        raise g.unknown("0f immediate of a 64-bit mov")
    if isinstance(src, (Symbol, Address)):
        return g.define(dst, kind, g.use(src, kind))
    if dst.width == 8 and isinstance(src, Reg):
        low, high = g.use_pair(src)
        return g.define_pair(dst, "u32", g.use(low, "u32"), g.use(high, "u32"))
    return g.define(dst, kind, g.use(src, kind))


def pack(g, dst, src, kind):
    """mov.b64 d, {lo, hi} and its 32- and 128-bit relatives."""
    items = src.items
    if kind == "u64" and len(items) == 2:
        if len(g.slots(dst)) == 2 and g.ins.guard is None:
            pieces = []
            for item in items:  # read both before either half of the destination changes
                if isinstance(item, Imm):
                    pieces.append({"const": item})
                else:
                    pieces.append(dict(g.views(g.slots(item)[0])))
            for slot, views in zip(g.slots(dst), pieces, strict=True):
                for value in views.values():
                    if isinstance(value, str):
                        g.references[value] = g.references.get(value, 0) + 1
                g.release(slot)
                g.env[slot] = views
            return
        low, high = (g.array(item, "u32") for item in items)
        return g.define_pair(dst, "u32", low, high)
    if kind == "u64" and len(items) == 4:
        a, b, c, d = (g.array(item, "u16") for item in items)
        return g.define(dst, "u64", f"pack64(pack32({a}, {b}), pack32({c}, {d}))")
    if kind == "u32" and len(items) == 2:
        low, high = (g.array(item, "u16") for item in items)
        return g.define(dst, "u32", f"pack32({low}, {high})")
    raise g.unknown("this form of vector mov")


def unpack(g, dst, src, kind):
    """mov.b64 {lo, hi}, s and its relatives; `_` drops an element."""
    items = dst.items
    if kind == "u64" and len(items) == 2:
        halves = g.use_pair(src)
        if g.ins.guard is None:
            views = [{"const": h} if isinstance(h, Imm) else dict(g.views(h.slot)) for h in halves]
            for item, view in zip(items, views, strict=True):
                if item is None:
                    continue
                for value in view.values():
                    if isinstance(value, str):
                        g.references[value] = g.references.get(value, 0) + 1
                slot = g.slots(item)[0]
                g.release(slot)
                g.env[slot] = view
            return
        for item, half in zip(items, halves, strict=True):
            g.define(item, "u32", g.use(half, "u32"))
        return
    if kind in ("u32", "u64"):
        count = len(items)
        if count != {"u32": 2, "u64": 4}[kind]:
            raise g.unknown("this form of vector mov")
        parts = g.temp(f"{g.array(src, kind)}.view(U16).reshape(-1, {count})")
        for i, item in enumerate(items):
            if item is not None:
                g.define(item, "u16", f"ascontiguous({parts}[:, {i}])")
        return
    raise g.unknown("this form of vector mov")


@instruction("add", "sub")
def add_sub(g, ins):
    if float_arith(g, ins):
        return
    g.only("u16", "s16", "u32", "s32", "u64", "s64", "sat")
    kind = int_kind(g, ins)
    dst, a, b = ins.operands
    sign = "+" if ins.op == "add" else "-"
    if "sat" in ins.mods:
        if kind != "s32":
            raise g.unknown(".sat of this type")
        wide = g.temp(f"{g.array(a, 's32')}.astype(S64) {sign} {g.use(b, 's32')}")
        return g.define(dst, "s32", f"clamp_int({wide}, S32)")
    unsigned = kind.replace("s", "u")
    g.define(dst, unsigned, f"{g.use(a, unsigned)} {sign} {g.use(b, unsigned)}")


def product(g, a, b, kind, form):
    """Expression and kind of a lo, hi or wide integer product."""
    unsigned = kind.replace("s", "u")
    if form == "lo":
        return f"{g.use(a, unsigned)} * {g.use(b, unsigned)}", unsigned
    if kind in WIDER:
        wide = WIDER[kind]
        value = f"np.multiply({g.use(a, kind)}, {g.use(b, kind)}, dtype={wide.upper()})"
        if form == "wide":
            return value, wide
        bits = {"u16": 16, "s16": 16, "u32": 32, "s32": 32}[kind]
        return f"({value} >> {bits}).astype({kind.upper()})", kind
    name = "mulhi64" if kind == "u64" else "mulhi64s"
    return f"{name}({g.array(a, kind)}, {g.array(b, kind)})", kind


@instruction("mul")
def mul(g, ins):
    if float_arith(g, ins):
        return
    g.only("lo", "hi", "wide", "u16", "s16", "u32", "s32", "u64", "s64")
    dst, a, b = ins.operands
    expression, kind = product(g, a, b, int_kind(g, ins), ins.mods[0])
    g.define(dst, kind, expression)


@instruction("mad")
def mad(g, ins):
    if float_arith(g, ins):
        return
    g.only("lo", "hi", "wide", "u16", "s16", "u32", "s32", "u64", "s64")
    dst, a, b, c = ins.operands
    expression, kind = product(g, a, b, int_kind(g, ins), ins.mods[0])
    g.define(dst, kind, f"{expression} + {g.use(c, kind)}")


@instruction("mul24", "mad24")
def mul24(g, ins):
    g.only("lo", "u32", "s32")
    dst, a, b, *c = ins.operands
    kind = int_kind(g, ins)
    cut = [f"(({g.use(x, kind)} << 8) >> 8)" for x in (a, b)]
    tail = f" + {g.use(c[0], kind)}" if c else ""
    g.define(dst, kind, f"{cut[0]} * {cut[1]}{tail}")


@instruction("dp4a")
def dp4a(g, ins):
    g.only("u32")  # any other modifier raises UnknownInstruction
    dst, a, b, c = ins.operands
    x, y = (g.temp(f"{g.array(o, 'u32')}.view(U8).reshape(-1, 4).astype(U32)") for o in (a, b))
    g.define(dst, "u32", f"({x} * {y}).sum(axis=1, dtype=U32) + {g.array(c, 'u32')}")


@instruction("sad")
def sad(g, ins):
    g.only("u16", "s16", "u32", "s32", "u64", "s64")
    kind = int_kind(g, ins)
    dst, a, b, c = ins.operands
    x, y = g.use(a, kind), g.use(b, kind)
    g.define(dst, kind, f"{g.use(c, kind)} + where({x} < {y}, {y} - {x}, {x} - {y})")


@instruction("div", "rem")
def div_rem(g, ins):
    if float_arith(g, ins):
        return
    g.only("u16", "s16", "u32", "s32", "u64", "s64")
    kind = int_kind(g, ins)
    dst, a, b = ins.operands
    name = "divide" if ins.op == "div" else "remainder"
    g.define(dst, kind, f"{name}({g.use(a, kind)}, {g.use(b, kind)})")


@instruction("min", "max")
def min_max(g, ins):
    if float_arith(g, ins):
        return
    g.only("u16", "s16", "u32", "s32", "u64", "s64", "relu")
    kind = int_kind(g, ins)
    dst, a, b = ins.operands
    value = f"np.{ins.op}imum({g.use(a, kind)}, {g.use(b, kind)})"
    if "relu" in ins.mods:
        value = f"np.maximum({value}, {kind.upper()}(0))"
    g.define(dst, kind, value)


@instruction("abs", "neg")
def abs_neg(g, ins):
    if float_arith(g, ins):
        return
    g.only("s16", "s32", "s64")
    kind = int_kind(g, ins)
    dst, a = ins.operands
    g.define(dst, kind, f"{'np.abs' if ins.op == 'abs' else 'np.negative'}({g.use(a, kind)})")


@instruction("and", "or", "xor")
def bitwise(g, ins):
    g.only("b16", "b32", "b64", "pred")
    kind = KINDS[ins.mods[0]]
    dst, a, b = ins.operands
    sign = {"and": "&", "or": "|", "xor": "^"}[ins.op]
    g.define(dst, kind, f"{g.use(a, kind)} {sign} {g.use(b, kind)}")


@instruction("not")
def bit_not(g, ins):
    g.only("b16", "b32", "b64", "pred")
    kind = KINDS[ins.mods[0]]
    g.define(ins.operands[0], kind, f"~{g.use(ins.operands[1], kind)}")


@instruction("cnot")
def cnot(g, ins):
    g.only("b16", "b32", "b64")
    kind = KINDS[ins.mods[0]]
    g.define(ins.operands[0], kind, f"({g.use(ins.operands[1], kind)} == 0).astype({kind.upper()})")


@instruction("shl", "shr")
def shift(g, ins):
    g.only("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    kind = KINDS[ins.mods[0]]
    dst, a, b = ins.operands
    if ins.op == "shl":
        kind = kind.replace("s", "u")
    width = int(kind[1:])
    if isinstance(b, Imm):  # amounts past the width clamp (PTX ISA shl, shr)
        amount = g.constant(kind, Imm(min(b.value & 0xFFFFFFFF, width)))
    else:
        amount = f"np.minimum({g.use(b, 'u32')}, U32({width})).astype({kind.upper()})"
    g.define(dst, kind, f"{g.use(a, kind)} {'<<' if ins.op == 'shl' else '>>'} {amount}")


@instruction("shf")
def shf(g, ins):
    g.only("l", "r", "wrap", "clamp", "b32")
    dst, a, b, c = ins.operands
    low, high, n = (g.array(x, "u32") for x in (a, b, c))
    g.define(dst, "u32", f"funnel({low}, {high}, {n}, {'l' in ins.mods}, {'wrap' in ins.mods})")


@instruction("lop3")
def lop3(g, ins):
    g.only("b32")
    dst, a, b, c, table = ins.operands
    if not isinstance(table, Imm):
        raise g.unknown("a lop3 table that is not constant")
    x, y, z = (g.use(o, "u32") for o in (a, b, c))
    g.define(dst, "u32", f"lop3({x}, {y}, {z}, {table.value & 255})")


@instruction("prmt")
def prmt(g, ins):
    g.only("b32", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    dst, a, b, c = ins.operands
    x, y, z = (g.array(o, "u32") for o in (a, b, c))
    mode = repr(ins.mods[1]) if len(ins.mods) > 1 else "None"
    g.define(dst, "u32", f"prmt({x}, {y}, {z}, {mode})")


@instruction("bfe")
def bfe(g, ins):
    g.only("u32", "s32", "u64", "s64")
    kind = int_kind(g, ins)
    dst, a, b, c = ins.operands
    start, length = g.use(b, "u32"), g.use(c, "u32")
    g.define(dst, kind, f"bfe({g.array(a, kind)}, {start}, {length}, {kind[0] == 's'})")


@instruction("bfi")
def bfi(g, ins):
    g.only("b32", "b64")
    kind = KINDS[ins.mods[0]]
    dst, a, b, c, d = ins.operands
    x, y = g.array(a, kind), g.array(b, kind)
    g.define(dst, kind, f"bfi({x}, {y}, {g.use(c, 'u32')}, {g.use(d, 'u32')})")


@instruction("popc", "clz")
def count_bits(g, ins):
    g.only("b32", "b64")
    name = {"popc": "popcount", "clz": "clz"}[ins.op]
    g.define(ins.operands[0], "u32", f"{name}({g.array(ins.operands[1], KINDS[ins.mods[0]])})")


@instruction("bfind")
def bfind(g, ins):
    g.only("u32", "s32", "u64", "s64", "shiftamt")
    value = g.array(ins.operands[1], int_kind(g, ins))
    g.define(ins.operands[0], "u32", f"bfind({value}, {'shiftamt' in ins.mods})")


@instruction("brev")
def brev(g, ins):
    g.only("b32", "b64")
    kind = KINDS[ins.mods[0]]
    g.define(ins.operands[0], kind, f"bit_reverse({g.array(ins.operands[1], kind)})")


@instruction("selp")
def selp(g, ins):
    g.only("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "pred")
    dst, a, b, p = ins.operands
    test = g.use(p, "pred")
    if dst.width == 8 and len(g.slots(dst)) == 2:
        (al, ah), (bl, bh) = g.use_pair(a), g.use_pair(b)
        low = f"where({test}, {g.use(al, 'u32')}, {g.use(bl, 'u32')})"
        high = f"where({test}, {g.use(ah, 'u32')}, {g.use(bh, 'u32')})"
        return g.define_pair(dst, "u32", low, high)
    kind = KINDS[ins.mods[0]]
    return g.define(dst, kind, f"where({test}, {g.use(a, kind)}, {g.use(b, kind)})")


@instruction("slct")
def slct(g, ins):
    dst, a, b, c = ins.operands
    kind, by = KINDS[ins.mods[-2]], KINDS[ins.mods[-1]]
    g.define(dst, kind, f"where({g.array(c, by)} >= 0, {g.use(a, kind)}, {g.use(b, kind)})")


def comparison(g, ins):
    """The bool expression of a setp/set instruction: compare, then combine with the optional third operand."""
    mods = [m for m in ins.mods if m != "ftz"]
    kind = KINDS[mods[-1]]
    op = mods[0]
    if op not in COMPARISONS:
        raise g.unknown(f"comparison .{op}")
    a, b = ins.operands[1:3]
    if mods[-1] in ("bf16", "f16"):
        x, y = (g.temp(f"half_values({g.array(o, 'u16')}, {mods[-1]!r})") for o in (a, b))
    elif op in ("lo", "ls", "hi", "hs"):
        kind = kind.replace("s", "u")
        x, y = g.use(a, kind), g.use(b, kind)
    else:
        x, y = g.use(a, kind), g.use(b, kind)
    if "ftz" in ins.mods and kind == "f32":
        x, y = g.temp(f"flush({x})"), g.temp(f"flush({y})")
    sign = {
        "eq": "==",
        "lt": "<",
        "le": "<=",
        "gt": ">",
        "ge": ">=",
        "lo": "<",
        "ls": "<=",
        "hi": ">",
        "hs": ">=",
    }
    if op in sign:
        return g.temp(f"{x} {sign[op]} {y}")
    return g.temp(f"compare({op!r}, {x}, {y})")


@instruction("setp", maskable=False)
def setp(g, ins):
    if ins.mods[-1] in ("f16x2", "bf16x2"):
        return setp_packed(g, ins)
    combine = next((m for m in ins.mods[1:] if m in ("and", "or", "xor")), None)
    g.only(*COMPARISONS, "and", "or", "xor", "ftz", *KINDS)
    mods = tuple(m for m in ins.mods if m != combine)
    shadow = type("Mods", (), {"mods": mods, "operands": ins.operands})()
    value = comparison(g, shadow)
    dst = ins.operands[0]
    inverse = f"~{value}"
    if combine:
        sign = {"and": "&", "or": "|", "xor": "^"}[combine]
        third = g.use(ins.operands[3], "pred")
        inverse = f"({inverse}) {sign} {third}"
        value = f"{value} {sign} {third}"
    if isinstance(dst, Pair):
        inverse, value = g.temp(inverse), g.temp(value)
        g.define(dst.first, "pred", value)
        return g.define(dst.second, "pred", inverse)
    return g.define(dst, "pred", value)


def setp_packed(g, ins):
    """setp on f16x2/bf16x2: p from the low halves, q from the high ones."""
    op, fmt = ins.mods[0], ins.mods[-1][:-2]
    if len(ins.mods) > 2 or not isinstance(ins.operands[0], Pair):
        raise g.unknown("this form of packed setp")
    dst, a, b = ins.operands
    x, y = g.temp(f"halves({g.array(a, 'u32')})"), g.temp(f"halves({g.array(b, 'u32')})")
    for i, target in enumerate((dst.first, dst.second)):
        g.define(target, "pred", f"compare({op!r}, half_values({x}[{i}], {fmt!r}), half_values({y}[{i}], {fmt!r}))")


@instruction("set", maskable=False)
def set_value(g, ins):
    g.only(*COMPARISONS, "ftz", *KINDS)
    out = ins.mods[-2]
    shadow = type("Mods", (), {"mods": tuple(m for m in ins.mods if m != out), "operands": ins.operands})()
    value = comparison(g, shadow)
    if out == "f32":
        return g.define(ins.operands[0], "f32", f"where({value}, F32(1), F32(0))")
    return g.define(ins.operands[0], KINDS[out], f"where({value}, ~{KINDS[out].upper()}(0), {KINDS[out].upper()}(0))")
