"""PTX text to plain data: Module, Kernel, Instruction and their operands. Nothing here knows what an opcode does."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import ParseError

TYPE_BYTES = {
    "pred": 1,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}


class Reg:
    """A virtual register: its name, its width in bytes (0 for a predicate) and its number in the kernel."""

    __slots__ = ("id", "name", "width")

    def __init__(self, name: str, width: int, number: int):
        self.name, self.width, self.id = name, width, number

    def __repr__(self):
        return self.name


@dataclass(frozen=True)
class Imm:
    """An immediate. ``value`` is an int, or a float for decimal floats; ``bits`` is 32 or 64 for 0f/0d literals."""

    value: int | float
    bits: int = 0


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A label, a variable or a parameter used by name."""

    name: str


@dataclass(frozen=True)
class Not:
    """A negated predicate operand ``!p``."""

    operand: Reg


@dataclass(frozen=True)
class Vec:
    """A brace-enclosed list of operands; ``None`` stands for the sink ``_``."""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """Two destinations written ``d|p``."""

    first: object
    second: object


@dataclass(frozen=True)
class Address:
    """``[base+offset]`` with a register, symbol or constant base."""

    base: object
    offset: int


class Instruction:
    """One PTX instruction: opcode, modifiers, operands, guard predicate and where it came from."""

    __slots__ = ("guard", "index", "line", "mods", "negated", "op", "operands", "source", "text")

    def __init__(self, line, op, mods, operands, guard, negated, text, source):
        self.line, self.op, self.mods, self.operands = line, op, mods, operands
        self.guard, self.negated, self.text, self.source = guard, negated, text, source
        self.index = -1

    def __repr__(self):
        return f"line {self.line}: {self.text}"


@dataclass
class Variable:
    """A module- or function-scope variable. ``size`` None: extern, sized at launch."""

    name: str
    space: str
    size: int | None
    align: int


@dataclass
class Param:
    """A kernel parameter: name, size and alignment in bytes, offset in the parameter block, PTX type."""

    name: str
    size: int
    align: int
    offset: int
    type: str


@dataclass
class Kernel:
    """One .entry: parameters, variables visible to it, and the body as instructions and label positions."""

    name: str
    params: list[Param]
    variables: dict[str, Variable]
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_tables: dict[str, list[str]] = field(default_factory=dict)
    registers: list[Reg] = field(default_factory=list)
    reqntid: tuple[int, ...] | None = None
    maxntid: tuple[int, ...] | None = None
    line: int = 0
    ptx: str = field(default="", repr=False)  # the text of the whole module
    translations: dict = field(default_factory=dict, repr=False)  # by name of the numerics

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    """A parsed PTX file."""

    version: str
    target: str
    kernels: dict[str, Kernel]

    def kernel(self) -> Kernel:
        """The only entry of the module; ParseError when there is not exactly one."""
        if len(self.kernels) != 1:
            names = ", ".join(self.kernels) or "none"
            raise ParseError(f"module.kernel() needs exactly one .entry, this module has {len(self.kernels)}: {names}")
        return next(iter(self.kernels.values()))


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)\s*")
_LINE_DIRECTIVE = re.compile(r"\.(loc|file)\b")
_SPLIT = re.compile(r"\{[^}]*\}|\([^)]*\)|\[[^\]]*\]|[^,\s][^,]*")
_INT = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?$")
_GUARD = re.compile(r"@(!?)\s*([\w$%]+)\s+")
_OPCODE = re.compile(r"([a-zA-Z_][\w.:]*)\s*(.*)", re.S)
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|nclusterid|clusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(?:laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi"
    r"|lanemask_(?:eq|le|lt|ge|gt)|dynamic_smem_size|total_smem_size|cluster_ctarank|cluster_nctarank"
    r"|is_explicit_cluster|pm\d|envreg\d+|aggr_smem_size)$"
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.v\d\s+)?\.(\w+)\s+([\w$%]+)\s*((?:\[\d*\])*)"
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s*[\w.\s]*?\s+)?([\w$%]+)\s*(?:\[(\d+)\])?$")


def parse_int(text: str) -> int:
    """A PTX integer literal, octal included."""
    t = text.rstrip("U")
    sign = -1 if t.startswith("-") else 1
    t = t.lstrip("+-")
    if len(t) > 1 and t[0] == "0" and t[1] in "01234567":
        return sign * int(t, 8)
    return sign * int(t, 0)


class _Body:
    """Parses the statements of one kernel body; holds the scopes, since inline assembly opens nested ones."""

    def __init__(self, kernel: Kernel, files: dict[int, str], variables: dict[str, Variable]):
        self.kernel, self.files = kernel, files
        self.variables = variables
        self.scopes: list[dict[str, Reg]] = [{}]
        self.scope_ids = [0]
        self.scope_count = 0
        self.prefixes: list[list[tuple[str, int, int]]] = [[]]
        self.cache: dict[str, object] = {}
        self.source = None

    def fail(self, line: int, text: str, why: str):
        raise ParseError(f"PTX line {line}: {why}: {text!r}", line=line, text=text)

    def push(self):
        self.scope_count += 1
        self.scopes.append({})
        self.prefixes.append([])
        self.scope_ids.append(self.scope_count)
        self.cache = {}

    def pop(self):
        self.scopes.pop()
        self.prefixes.pop()
        self.scope_ids.pop()
        self.cache = {}

    def new_register(self, name: str, width: int) -> Reg:
        scope = self.scope_ids[-1]
        reg = Reg(name if not scope else f"{name}@{scope}", width, len(self.kernel.registers))
        self.kernel.registers.append(reg)
        self.scopes[-1][name] = reg
        return reg

    def declare(self, line: int, text: str):
        m = re.match(r"\.reg\s+(?:\.align\s+\d+\s+)?(?:\.v\d\s+)?\.(\w+)\s+(.*)$", text, re.S)
        if not m or m.group(1) not in TYPE_BYTES:
            self.fail(line, text, "cannot parse register declaration")
        width = 0 if m.group(1) == "pred" else TYPE_BYTES[m.group(1)]
        for name in m.group(2).split(","):
            name = name.strip()
            ranged = re.match(r"([\w$%]+)<(\d+)>$", name)
            if ranged:
                self.prefixes[-1].append((ranged.group(1), int(ranged.group(2)), width))
            else:
                self.new_register(name, width)

    def register(self, name: str) -> Reg | None:
        for depth in range(len(self.scopes) - 1, -1, -1):
            reg = self.scopes[depth].get(name)
            if reg is not None:
                return reg
            m = re.match(r"(.*?)(\d+)$", name)
            if m:
                for prefix, count, width in self.prefixes[depth]:
                    if m.group(1) == prefix and int(m.group(2)) < count:
                        reg = Reg(name, width, len(self.kernel.registers))
                        self.kernel.registers.append(reg)
                        self.scopes[depth][name] = reg
                        return reg
        return None

    def operand(self, text: str, line: int):
        got = self.cache.get(text)
        if got is None:
            got = self.cache[text] = self._operand(text, line)
        return got

    def _operand(self, text: str, line: int):
        c = text[0]
        if c in "{(":
            inner = [t.strip() for t in text[1:-1].split(",")]
            return Vec(tuple(None if t == "_" else self.operand(t, line) for t in inner))
        if c == "[":
            m = re.match(r"\[\s*([-\w$%.]+)\s*(?:\+\s*(-?\w+)\s*|(-\s*\d+)\s*)?\]$", text)
            if not m:
                self.fail(line, text, "cannot parse address")
            offset = m.group(2) or (m.group(3) or "0").replace(" ", "")
            return Address(self.operand(m.group(1), line), parse_int(offset))
        if "|" in text:
            first, second = (t.strip() for t in text.split("|"))
            return Pair(*(None if t == "_" else self.operand(t, line) for t in (first, second)))
        if c == "!":
            return Not(self.operand(text[1:].strip(), line))
        reg = self.register(text)
        if reg is not None:
            return reg
        if c == "%":
            if _SPECIAL.match(text):
                return Special(text)
            self.fail(line, text, "undeclared register")
        if text[:2] in ("0f", "0F") and len(text) == 10:
            return Imm(int(text[2:], 16), 32)
        if text[:2] in ("0d", "0D") and len(text) == 18:
            return Imm(int(text[2:], 16), 64)
        if _INT.match(text):
            return Imm(parse_int(text))
        if _FLOAT.match(text):
            return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
        if text == "WARP_SZ":
            return Imm(32)
        m = re.match(r"([\w$]+)\s*\+\s*(\d+)$", text)
        if m:
            return Address(Symbol(m.group(1)), int(m.group(2)))
        m = re.match(r"([\w$]+)\[(\d+)\]$", text)
        if m:
            return Address(Symbol(m.group(1)), int(m.group(2)))
        if re.match(r"[\w$]+$", text):
            return Symbol(text)
        self.fail(line, text, "cannot parse operand")

    def label_name(self, name: str) -> str:
        scope = self.scope_ids[-1]
        return name if not scope or name.startswith("$") else f"{name}@{scope}"

    def statement(self, text: str, line: int):
        """One statement without its semicolon."""
        if text[0] == ".":
            word = re.match(r"\.\w+", text).group(0)
            if word == ".reg":
                return self.declare(line, text)
            if word in (".shared", ".local", ".const", ".global"):
                var = parse_variable(text, line)
                self.kernel.variables[var.name] = var
                return None
            if word == ".pragma":
                return None
            self.fail(line, text, "unsupported directive in a kernel body")
        guard, negated, rest = None, False, text
        if text[0] == "@":
            m = _GUARD.match(text)
            if not m:
                self.fail(line, text, "cannot parse guard predicate")
            guard, negated = self.register(m.group(2)), m.group(1) == "!"
            if guard is None or guard.width != 0:
                self.fail(line, text, f"guard {m.group(2)} is not a predicate register")
            rest = text[m.end() :]
        m = _OPCODE.match(rest)
        if not m:
            self.fail(line, text, "cannot parse instruction")
        op, *mods = m.group(1).replace("::", "__").split(".")
        tail = m.group(2)
        parts = _SPLIT.findall(tail) if any(c in tail for c in "{[(") else (tail.split(",") if tail else [])
        operands = [self.operand(p.strip(), line) for p in parts]
        scope = self.scope_ids[-1]
        if scope and op in ("bra", "brx"):
            operands = [
                Symbol(self.label_name(o.name)) if isinstance(o, Symbol) and not o.name.startswith("$") else o
                for o in operands
            ]
        ins = Instruction(line, op, tuple(mods), operands, guard, negated, text, self.source)
        self.kernel.body.append(ins)
        return None


def parse_variable(text: str, line: int) -> Variable:
    """A ``.shared``/``.global``/``.const``/``.local`` declaration without initialiser."""
    m = _VARIABLE.match(text)
    if not m or m.group(3) not in TYPE_BYTES:
        raise ParseError(f"PTX line {line}: cannot parse variable: {text!r}", line=line, text=text)
    space, align, kind, name, dims = m.groups()
    unit = TYPE_BYTES[kind]
    size: int | None = unit
    for d in re.findall(r"\[(\d*)\]", dims):
        size = None if d == "" or size is None else size * int(d)
    if "=" in text:
        raise ParseError(f"PTX line {line}: initialised variables are not supported: {text!r}", line=line, text=text)
    return Variable(name, space, size, int(align) if align else unit)


def _params(text: str, line: int) -> list[Param]:
    params, offset = [], 0
    for piece in filter(None, (p.strip() for p in text.split(","))):
        m = _PARAM.match(" ".join(piece.split()))
        if not m or m.group(2) not in TYPE_BYTES:
            raise ParseError(f"PTX line {line}: cannot parse kernel parameter: {piece!r}", line=line, text=piece)
        unit = TYPE_BYTES[m.group(2)]
        align = int(m.group(1)) if m.group(1) else unit
        size = unit * int(m.group(4)) if m.group(4) else unit
        offset = -(-offset // align) * align
        params.append(Param(m.group(3), size, align, offset, m.group(2)))
        offset += size
    return params


def parse(text: str) -> Module:
    """Parses a PTX module. ParseError names the line number and the text that was not understood."""
    source = text
    text = _COMMENT.sub(lambda m: "\n" * m.group(0).count("\n"), text)
    lines = text.split("\n")
    files: dict[int, str] = {}
    version = target = ""
    variables: dict[str, Variable] = {}
    kernels: dict[str, Kernel] = {}
    for line in lines:
        if ".file" in line:
            m = re.match(r'\s*\.file\s+(\d+)\s+"([^"]*)"', line)
            if m:
                files[int(m.group(1))] = m.group(2)
    i, count = 0, len(lines)
    while i < count:
        line = lines[i].strip()
        number = i + 1
        i += 1
        if not line or line.startswith((".file", ".address_size", ".alias", ".pragma")):
            continue
        if line.startswith(".version"):
            version = line.split()[1]
        elif line.startswith(".target"):
            target = line.split(None, 1)[1].split(",")[0].strip()
        elif line.startswith(".section"):
            depth = line.count("{") - line.count("}")
            while depth > 0 or "{" not in line:
                if i >= count:
                    raise ParseError(f"PTX line {number}: unterminated .section", line=number, text=line)
                line = lines[i]
                depth += line.count("{") - line.count("}")
                i += 1
                if depth <= 0:
                    break
        elif re.match(r"(\.(visible|weak|extern)\s+)*\.entry\b", line):
            i = _entry(lines, i - 1, variables, kernels, files)
        elif re.match(r"(\.(visible|weak|extern|common)\s+)*\.(shared|global|const)\b", line):
            while ";" not in line:
                line += " " + lines[i].strip()
                i += 1
            var = parse_variable(line.rstrip("; "), number)
            variables[var.name] = var
        else:
            raise ParseError(f"PTX line {number}: not understood at module scope: {line!r}", line=number, text=line)
    for kernel in kernels.values():
        kernel.ptx = source
    return Module(version, target, kernels)


def _entry(lines, start, variables, kernels, files) -> int:
    """Parses one .entry that begins on line index ``start``; returns the index after its closing brace."""
    header, i = "", start
    while "{" not in lines[i]:
        header += lines[i] + "\n"
        i += 1
        if i >= len(lines):
            raise ParseError(f"PTX line {start + 1}: .entry without a body", line=start + 1, text=lines[start])
    before, after = lines[i].split("{", 1)
    header += before
    m = re.search(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?(.*)$", header, re.S)
    if not m:
        raise ParseError(f"PTX line {start + 1}: cannot parse .entry", line=start + 1, text=lines[start])
    kernel = Kernel(m.group(1), _params(m.group(2) or "", start + 1), dict(variables), line=start + 1)
    for word in ("reqntid", "maxntid"):
        d = re.search(rf"\.{word}\s+([\d,\s]+)", m.group(3))
        if d:
            dims = [int(x) for x in d.group(1).split(",") if x.strip()]
            setattr(kernel, word, tuple(dims + [1] * (3 - len(dims))))
    body = _Body(kernel, files, variables)
    depth, buffer, first = 1, "", 0
    rest, number = after, i + 1
    while True:
        rest = rest.strip()
        while rest:
            if not buffer:
                if rest[0] == "{":
                    depth += 1
                    body.push()
                    rest = rest[1:].lstrip()
                    continue
                if rest[0] == "}":
                    depth -= 1
                    if depth == 0:
                        kernels[kernel.name] = kernel
                        return i + 1
                    body.pop()
                    rest = rest[1:].lstrip()
                    continue
                if rest[0] == ";":
                    rest = rest[1:].lstrip()
                    continue
                if _LINE_DIRECTIVE.match(rest):
                    loc = re.match(r"\.loc\s+(\d+)\s+(\d+)", rest)
                    if loc:
                        body.source = (files.get(int(loc.group(1)), "?"), int(loc.group(2)))
                    rest = ""
                    continue
                label = _LABEL.match(rest)
                if label:
                    name = body.label_name(label.group(1))
                    rest = rest[label.end() :]
                    if rest.startswith(".branchtargets"):
                        targets = rest.split(";")[0].split(None, 1)[1]
                        kernel.branch_tables[name] = [t.strip() for t in targets.split(",")]
                        rest = rest.split(";", 1)[1].lstrip()
                    else:
                        kernel.labels[name] = len(kernel.body)
                    continue
                first = number
            end = rest.find(";")
            if end < 0:
                buffer += (" " if buffer else "") + rest
                rest = ""
            else:
                statement = f"{buffer} {rest[:end].strip()}".strip()
                buffer, rest = "", rest[end + 1 :].lstrip()
                body.statement(statement, first)
        i += 1
        if i >= len(lines):
            raise ParseError(f"PTX line {start + 1}: kernel {kernel.name} is not closed", line=start + 1, text="")
        rest, number = lines[i], i + 1
