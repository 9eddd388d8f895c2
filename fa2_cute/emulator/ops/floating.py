"""Floating-point arithmetic: f32, f64, packed f32x2, f16 and bf16 scalars and pairs, and the approximate functions."""

from __future__ import annotations

from ..ptx import Imm
from .registry import instruction

ROUNDING = {"rn", "rz", "rm", "rp"}
FLOAT_TYPES = {"f32", "f64", "f32x2", "f16", "f16x2", "bf16", "bf16x2"}
MIXED = ("f16", "bf16")
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def float_arith(g, ins) -> bool:
    """Handles an arithmetic opcode shared with integers if its type is a float type; False if it is not."""
    kind = ins.mods[-1]
    if kind not in FLOAT_TYPES:
        return False
    if kind in MIXED and "f32" in ins.mods:
        mixed(g, ins, kind)
    elif kind in ("f16", "bf16", "f16x2", "bf16x2"):
        half(g, ins, kind)
    elif kind == "f32x2":
        g.only("rn", "rz", "rm", "rp", "ftz", "f32x2")
        dst, *sources = ins.operands
        pairs = [g.use_pair(s) for s in sources]
        values = []
        for side in (0, 1):
            values.append(g.temp(arith32(g, ins.op, [g.use(p[side], "f32") for p in pairs], ins.mods)))
        g.define_pair(dst, "f32", *values)
    elif kind == "f32":
        g.only("rn", "rz", "rm", "rp", "ftz", "sat", "f32", "NaN", "xorsign", "abs", "full", "approx")
        if "xorsign" in ins.mods:
            raise g.unknown("modifier .xorsign")
        dst, *sources = ins.operands
        g.define(dst, "f32", arith32(g, ins.op, [g.use(s, "f32") for s in sources], ins.mods))
    else:
        g.only("rn", "f64")
        dst, *sources = ins.operands
        x = [g.use(s, "f64") for s in sources]
        if ins.op in BINARY:
            value = f"canon64({x[0]} {BINARY[ins.op]} {x[1]})"
        elif ins.op in ("fma", "mad"):
            value = f"fma64({', '.join(x)})"
        elif ins.op in ("min", "max"):
            value = f"f{ins.op}32({x[0]}, {x[1]})"
        else:
            value = f"np.abs({x[0]})" if ins.op == "abs" else f"-{x[0]}"
        g.define(dst, "f64", value)
    return True


def arith32(g, op, x, mods) -> str:
    """float32 expression of one arithmetic operation with its rounding, .ftz and .sat."""
    ftz = "ftz" in mods
    if ftz:
        x = [g.temp(f"flush({v})") for v in x]
    mode = next((m for m in mods if m in ROUNDING), "rn")
    if op in ("fma", "mad"):
        value = f"fma32({', '.join(x)})" if mode == "rn" else f"fma32_mode({', '.join(x)}, {mode!r})"
    elif op in ("min", "max"):
        name = f"f{op}32_nan" if "NaN" in mods else f"f{op}32"
        value = f"{name}({x[0]}, {x[1]})"
        for third in x[2:]:
            value = f"{name}({value}, {third})"
    elif op == "abs":
        value = f"canon(np.abs({x[0]}))"
    elif op == "neg":
        value = f"canon(np.negative({x[0]}))"
    elif op == "div" or mode == "rn":
        if op == "div" and mode != "rn":
            raise g.unknown(f"rounding .{mode} of div")
        if "approx" in mods or "full" in mods:
            approximation(g, op)
        value = f"canon({x[0]} {BINARY[op]} {x[1]})"
    elif op == "mul":
        value = f"mul32_mode({x[0]}, {x[1]}, {mode!r})"
    else:
        second = f"np.negative({x[1]})" if op == "sub" else x[1]
        value = f"add32_mode({x[0]}, {second}, {mode!r})"
    if "sat" in mods:
        value = f"saturate({value})"
    return f"flush({value})" if ftz else value


def half(g, ins, kind):
    """f16/bf16 arithmetic. .ftz is not accepted: sm_80 kernels keep half subnormals."""
    g.only("rn", "sat", "relu", "NaN", "approx", kind)
    dst, *sources = ins.operands
    name = "fma" if ins.op == "mad" else ins.op
    flags = f"relu={'relu' in ins.mods}, sat={'sat' in ins.mods}, nan={'NaN' in ins.mods}"
    if kind.endswith("x2"):
        x = [g.array(s, "u32") for s in sources]
        g.define(dst, "u32", f"half2({name!r}, {kind[:-2]!r}, {', '.join(x)}, {flags})")
    else:
        x = [g.array(s, "u16") for s in sources]
        g.define(dst, "u16", f"half_arith({name!r}, {kind!r}, {', '.join(x)}, {flags})")


def mixed(g, ins, kind):
    """add, sub, fma in float32 whose first operand, or factors, are 16-bit: widened, which is exact, then as in f32
    (PTX ISA 8.6, mixed precision floating-point instructions; sm_100 and later)."""
    if ins.op not in ("add", "sub", "fma"):
        raise g.unknown(f"type .f32.{kind} of {ins.op}")
    g.only("rn", "rz", "rm", "rp", "sat", "f32", kind)
    dst, *narrow, last = ins.operands
    wide = [g.temp(f"half_values({g.array(x, 'u16')}, {kind!r})") for x in narrow]
    g.define(dst, "f32", arith32(g, ins.op, [*wide, g.use(last, "f32")], ins.mods))


@instruction("fma")
def fma(g, ins):
    if not float_arith(g, ins):
        raise g.unknown(f"type .{ins.mods[-1]} of fma")


def approximation(g, rounded: str) -> str:
    """Template of an .approx instruction: ``rounded``, or the function that the launch's numerics have for it."""
    numerics = g.translation.numerics
    if numerics.functions is None:
        return rounded
    if g.ins.op not in numerics.functions or g.ins.mods[-1] != "f32":
        raise g.unknown(f"{g.ins.op} with numerics {numerics.name!r}")
    return f"approx_{g.ins.op}({{}})"


def unary32(g, ins, function: str, *, wide: str | None = None, rounded: str | None = None):
    """approx/rn f32 functions of one argument, f64 with ``wide``."""
    kind = ins.mods[-1]
    dst, a = ins.operands
    if kind == "f64" and wide:
        if "approx" in ins.mods:
            approximation(g, wide)
        return g.define(dst, "f64", f"canon64({wide.format(g.use(a, 'f64'))})")
    if kind != "f32":
        raise g.unknown(f"type .{kind} of {ins.op}")
    g.only("approx", "rn", "ftz", "f32")
    x = g.use(a, "f32") if not isinstance(a, Imm) else g.array(a, "f32")
    if "ftz" in ins.mods:
        x = g.temp(f"flush({x})")
    if "approx" in ins.mods:
        function = approximation(g, function)
    value = function.format(x)
    return g.define(dst, "f32", f"flush({value})" if "ftz" in ins.mods else value)


@instruction("ex2")
def ex2(g, ins):
    if ins.mods[-1] in ("f16", "bf16", "f16x2", "bf16x2"):
        g.only("approx", "ftz", ins.mods[-1])
        return half_function(g, ins, "ex2")
    return unary32(g, ins, "ex2({})")


@instruction("tanh")
def tanh(g, ins):
    if ins.mods[-1] in ("f16", "bf16", "f16x2", "bf16x2"):
        g.only("approx", ins.mods[-1])
        return half_function(g, ins, "tanh")
    return unary32(g, ins, "tanh32({})")


def half_function(g, ins, name):
    """ex2 and tanh on f16/bf16."""
    approximation(g, name)
    kind = ins.mods[-1]
    dst, a = ins.operands
    if kind.endswith("x2"):
        return g.define(dst, "u32", f"half2({name!r}, {kind[:-2]!r}, {g.array(a, 'u32')})")
    return g.define(dst, "u16", f"half_arith({name!r}, {kind!r}, {g.array(a, 'u16')})")


@instruction("lg2")
def lg2(g, ins):
    unary32(g, ins, "lg2({})")


@instruction("sin")
def sin(g, ins):
    unary32(g, ins, "sin32({})")


@instruction("cos")
def cos(g, ins):
    unary32(g, ins, "cos32({})")


@instruction("rcp")
def rcp(g, ins):
    unary32(g, ins, "canon(F32(1) / {})", wide="1.0 / {}")


@instruction("sqrt")
def sqrt(g, ins):
    unary32(g, ins, "canon(np.sqrt({}))", wide="np.sqrt({})")


@instruction("rsqrt")
def rsqrt(g, ins):
    unary32(g, ins, "rsqrt32({})", wide="1.0 / np.sqrt({})")


@instruction("copysign")
def copysign(g, ins):
    g.only("f32", "f64")
    unsigned, top = ("u32", 1 << 31) if ins.mods[-1] == "f32" else ("u64", 1 << 63)
    dst, a, b = ins.operands  # the sign of a, the magnitude of b
    name = unsigned.upper()
    sign, magnitude = g.use(a, unsigned), g.use(b, unsigned)
    g.define(dst, unsigned, f"({sign} & {name}({top})) | ({magnitude} & {name}({top - 1}))")


@instruction("testp")
def testp(g, ins):
    kind = ins.mods[-1]
    if kind not in ("f32", "f64"):
        raise g.unknown(f"type .{kind} of testp")
    x = g.use(ins.operands[1], kind)
    tiny = "F32(2.0**-126)" if kind == "f32" else "F64(2.0**-1022)"
    tests = {
        "finite": f"np.isfinite({x})",
        "infinite": f"np.isinf({x})",
        "number": f"~np.isnan({x})",
        "notanumber": f"np.isnan({x})",
        "normal": f"np.isfinite({x}) & (np.abs({x}) >= {tiny})",
        "subnormal": f"({x} != 0) & (np.abs({x}) < {tiny})",
    }
    if ins.mods[0] not in tests:
        raise g.unknown(f"test .{ins.mods[0]}")
    g.define(ins.operands[0], "pred", tests[ins.mods[0]])
