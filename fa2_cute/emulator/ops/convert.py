"""cvt in all its forms: integers, floats, narrow floats and packed pairs; cvta and friends."""

from __future__ import annotations

from ..kinds import BASE_KIND, KINDS
from ..ptx import Imm
from .registry import instruction

INTEGERS = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}
FP8 = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


@instruction("cvt")
def cvt(g, ins):
    to, source = ins.mods[-2:]
    flags = ins.mods[:-2]
    mode = next((m for m in flags if m in ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")), None)
    extra = set(flags) - {mode, "ftz", "sat", "relu", "satfinite"}
    if extra:
        raise g.unknown(f"modifier .{sorted(extra)[0]} of cvt")
    if to.endswith("x2") or source.endswith("x2"):
        return packed(g, ins, to, source, mode, flags)
    if to in INTEGERS and source in INTEGERS:
        return int_to_int(g, ins, to, source, "sat" in flags)
    if to in INTEGERS:
        return float_to_int(g, ins, to, source, mode, "ftz" in flags)
    if source in INTEGERS:
        return int_to_float(g, ins, to, source, mode)
    return float_to_float(g, ins, to, source, mode, flags)


def read_int(g, operand, kind: str) -> str:
    """A register's low bits as an integer kind that may be narrower than the register."""
    if isinstance(operand, Imm):
        return g.array(operand, kind)
    width = max(operand.width, 2)
    have = BASE_KIND[width]
    bits = int(kind[1:])
    value = g.use(operand, have)
    if bits < 8 * width:
        value = g.temp(f"{value}.astype(U{bits})")
        return g.temp(f"{value}.view(S{bits})") if kind[0] == "s" else value
    return g.use(operand, kind) if kind in KINDS.values() else value


def write_int(g, operand, kind: str, value: str) -> None:
    """Stores an integer of ``kind`` into a register that may be wider: sign- or zero-extended."""
    width = max(operand.width, 2)
    if int(kind[1:]) < 8 * width:
        kind = ("s" if kind[0] == "s" else "u") + str(8 * width)
        value = f"({value}).astype({kind.upper()})"
    g.define(operand, kind, value)


def int_to_int(g, ins, to, source, sat):
    dst, a = ins.operands
    value = read_int(g, a, source)
    if sat:
        return write_int(g, dst, to, f"clamp_int({value}, {to.upper()})")
    if int(to[1:]) > int(source[1:]):
        wide = source[0] + to[1:]
        return write_int(g, dst, to, f"{value}.astype({wide.upper()}).view({to.upper()})")
    return write_int(g, dst, to, f"{value}.astype({to.upper()})")


def read_float(g, operand, kind: str) -> str:
    """A float source as float32 or float64."""
    if kind in ("f16", "bf16"):
        return g.temp(f"half_values({g.array(operand, 'u16')}, {kind!r})")
    if kind not in ("f32", "f64"):
        raise g.unknown(f"type .{kind} of cvt")
    return g.array(operand, kind)


def float_to_int(g, ins, to, source, mode, ftz):
    dst, a = ins.operands
    if mode is None:
        raise g.unknown("a float to integer cvt without rounding")
    value = read_float(g, a, source)
    if ftz and source == "f32":
        value = g.temp(f"flush({value})")
    write_int(g, dst, to, f"float_to_int({value}, {to.upper()}, {mode!r})")


def int_to_float(g, ins, to, source, mode):
    dst, a = ins.operands
    value = read_int(g, a, source)
    if to == "f64":
        if mode not in (None, "rn"):
            raise g.unknown(f"rounding .{mode} to f64")
        return g.define(dst, "f64", f"{value}.astype(F64)")
    if to == "f32":
        return g.define(dst, "f32", f"int_to_f32({value}, {mode!r})")
    if mode not in (None, "rn"):
        raise g.unknown(f"rounding .{mode} from an integer to {to}")
    if to == "f16":
        return g.define(dst, "u16", f"{value}.astype(F64).astype(F16).view(U16)")
    if to == "bf16" and int(source[1:]) <= 16:
        return g.define(dst, "u16", f"f32_to_bf16({value}.astype(F32))")
    raise g.unknown(f"cvt from .{source} to .{to}")


def options(mode, flags) -> str:
    """Keyword arguments of the narrowing helpers."""
    return f"{mode or 'rn'!r}, {'relu' in flags}, {'satfinite' in flags}"


def float_to_float(g, ins, to, source, mode, flags):
    dst, a = ins.operands
    value = read_float(g, a, source)
    if "ftz" in flags and source == "f32":
        value = g.temp(f"flush({value})")
    if to == source and mode in ("rni", "rzi", "rmi", "rpi"):
        function = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}[mode]
        value = f"{function}({value})"
        mode = None
    if to == "f64":
        out = f"canon64({value}.astype(F64))"
    elif to == "f32":
        out = f"canon({value})" if source != "f64" else f"round32({value}, {mode!r})"
    elif to == "f16":
        out = f"f32_to_f16({value}, {options(mode, flags)})"
    elif to == "bf16" and source != "f64":
        out = f"f32_to_bf16({value}, {options(mode, flags)})"
    else:
        raise g.unknown(f"cvt from .{source} to .{to}")
    if "sat" in flags:
        if to not in ("f32", "f64"):
            raise g.unknown(f".sat of cvt to .{to}")
        out = f"saturate({out})"
    if "ftz" in flags and to == "f32":
        out = f"flush({out})"
    g.define(dst, "u16" if to in ("f16", "bf16") else KINDS[to], out)


def packed(g, ins, to, source, mode, flags):
    """Conversions that make or take two values at once."""
    dst, *rest = ins.operands
    if to in ("bf16x2", "f16x2") and source == "f32":
        high, low = (g.array(o, "f32") for o in rest)
        if "ftz" in flags:
            raise g.unknown("modifier .ftz of this cvt")
        return g.define(dst, "u32", f"pack_{to}({high}, {low}, {options(mode, flags)})")
    if to in FP8:
        relu = "relu" in flags
        if "satfinite" not in flags:
            raise g.unknown("an fp8 cvt without .satfinite")
        if source == "f32":
            high, low = (g.array(o, "f32") for o in rest)
        elif source in ("f16x2", "bf16x2"):
            pair = g.temp(f"halves({g.array(rest[0], 'u32')})")
            low, high = (g.temp(f"half_values({pair}[{i}], {source[:-2]!r})") for i in (0, 1))
        else:
            raise g.unknown(f"cvt from .{source} to .{to}")
        fmt = FP8[to]
        low, high = (g.temp(f"f32_to_fp8({v}, {fmt!r}, {relu})") for v in (low, high))
        return g.define(dst, "u16", f"{low} | ({high} << U16(8))")
    if source in FP8 and to in ("f16x2", "bf16x2"):
        value = g.array(rest[0], "u16")
        low = g.temp(f"fp8_to_f32({value} & U16(255), {FP8[source]!r})")
        high = g.temp(f"fp8_to_f32({value} >> U16(8), {FP8[source]!r})")
        return g.define(dst, "u32", f"pack_{to}({high}, {low}, 'rn', {'relu' in flags})")
    raise g.unknown(f"cvt from .{source} to .{to}")


@instruction("cvta")
def cvta(g, ins):
    """cvta{.to}.space: shared and local addresses live in windows of the generic space, global ones are themselves."""
    dst, a = ins.operands
    to, space = (
        "to" in ins.mods,
        next((m for m in ins.mods if m.startswith(("global", "shared", "local", "const", "param"))), ""),
    )
    kind = "u64" if dst.width == 8 else "u32"
    if space.startswith(("shared", "local")):
        sign = "-" if to else "+"
        if dst.width != 8:
            raise g.unknown("cvta with 32-bit addresses")
        return g.define(dst, "u64", f"{g.use(a, 'u64')} {sign} U64(m.spaces.window({space[:5]!r}))")
    if g.copy(dst, a):
        return None
    return g.define(dst, kind, g.use(a, kind))


@instruction("isspacep")
def isspacep(g, ins):
    space = ins.mods[0].split("__")[0]
    if space not in ("shared", "local", "global"):
        raise g.unknown(f"space .{space} of isspacep")
    g.define(ins.operands[0], "pred", f"m.spaces.in_space({g.use(ins.operands[1], 'u64')}, {space!r})")
