"""Translates basic blocks to Python source working on numpy arrays, one element a thread.

Registers are bit patterns in unsigned arrays;
the builder keeps, within a block, the views of a value that were
already made (``f32`` of a ``b32`` ...), so a view is made at most once. Arrays are never written in place,
which is
why a ``mov`` costs nothing: two registers then share one array.
"""

from __future__ import annotations

import numpy as np

from . import integers, models, narrow, numerics
from .errors import UnknownInstruction
from .flow import Block, build, check_initialised, check_known, defs_and_uses, liveness, packed_registers
from .kinds import BASE_KIND, DTYPE_NAMES, DTYPES
from .ops import registry
from .ptx import Address, Imm, Instruction, Kernel, Not, Reg, Special, Symbol


class Site:
    """What the run-time helpers must know about one instruction: where it is, and numbers fixed at translation."""

    def __init__(self, ins: Instruction, **static):
        self.line, self.text, self.source, self.op = ins.line, ins.text, ins.source, ins.op
        self.hint = 0
        self.__dict__.update(static)


class Slot:
    """A 32-bit half of a packed 64-bit register, usable wherever an operand is."""

    __slots__ = ("kind", "slot")

    def __init__(self, slot: int, kind: str = "u32"):
        self.slot, self.kind = slot, kind


class BlockBuilder:
    """Emits the Python function of one block. Handlers use: use, array, use_pair, define, define_pair, temp, site."""

    def __init__(self, translation: Translation, block: Block):
        self.translation, self.block = translation, block
        self.lines: list[str] = []
        self.env: dict[int, dict[str, object]] = {}
        self.loaded: list[tuple[int, str]] = []
        self.references: dict[str, int] = {}
        self.temps: list[str] = []
        self.counter = 0
        self.ins: Instruction | None = None
        self.saw_array = False
        self.next_temporary_slot = -1
        self.rest: list[Instruction] = []
        self.consumed = 0

    # ---- values --------------------------------------------------------------------------------------------
    def emit(self, line: str) -> None:
        self.lines.append(line)

    def name(self, prefix: str = "v") -> str:
        self.counter += 1
        return f"{prefix}{self.counter}"

    def constant(self, kind: str, imm: Imm) -> str:
        return self.translation.constant(kind, imm)

    def bind(self, slot: int, kind: str, value: object) -> None:
        """Makes a slot stand for a variable name (or an Imm)."""
        self.release(slot)
        self.env[slot] = {kind: value}
        if isinstance(value, str):
            self.references[value] = self.references.get(value, 0) + 1

    def release(self, slot: int) -> None:
        for value in self.env.pop(slot, {}).values():
            if isinstance(value, str):
                self.references[value] -= 1
                if not self.references[value]:
                    del self.references[value]
                    self.temps.append(value)

    def slot_kind(self, slot: int) -> str:
        return self.translation.slot_kinds[slot] if slot >= 0 else "u32"

    def views(self, slot: int) -> dict[str, object]:
        """The known representations of a slot, loading it from the register file if it is not here yet."""
        got = self.env.get(slot)
        if got is None:
            variable = self.name("r")
            self.loaded.append((slot, variable))
            self.bind(slot, self.slot_kind(slot), variable)
            got = self.env[slot]
        return got

    def slots(self, reg: Reg) -> tuple[int, ...]:
        return self.translation.slots[reg.id]

    def use(self, operand, kind: str) -> str:
        """Python expression (a name) of an operand as ``kind``; immediates become numpy scalars."""
        if isinstance(operand, Imm):
            return self.constant(kind, operand)
        if isinstance(operand, Reg):
            slots = self.slots(operand)
            if len(slots) == 2:
                low, high = (self.array(Slot(s), "u32") for s in slots)
                packed = self.temp(f"pack64({low}, {high})")
                return packed if kind == "u64" else self.temp(f"{packed}.view({DTYPE_NAMES[kind]})")
            return self._slot_value(slots[0], kind)
        if isinstance(operand, Slot):
            return self._slot_value(operand.slot, kind)
        if isinstance(operand, Not):
            return self.temp(f"~{self.use(operand.operand, 'pred')}")
        if isinstance(operand, Special):
            self.saw_array = True
            return self.temp(f"t.special({operand.name!r}).astype({DTYPE_NAMES[kind]})")
        if isinstance(operand, (Symbol, Address)):
            symbol = operand if isinstance(operand, Symbol) else operand.base
            extra = 0 if isinstance(operand, Symbol) else operand.offset
            if self.translation.has_symbol(symbol.name):
                self.saw_array = True
                address = f"m.symbol({symbol.name!r}) + {extra}"
                return self.temp(f"t.full(np.{DTYPES[kind].__name__}({address}))")
        raise self.unknown(f"operand {operand!r}")

    def _slot_value(self, slot: int, kind: str) -> str:
        views = self.views(slot)
        if "const" in views:
            self.check_width(slot, kind)
            return self.constant(kind, views["const"])
        self.saw_array = True
        if kind in views:
            return views[kind]
        source = next(iter(views.values()))
        self.check_width(slot, kind)
        variable = self.name()
        self.emit(f"{variable} = {source}.view({DTYPE_NAMES[kind]})")
        views[kind] = variable
        self.references[variable] = 1
        return variable

    def check_width(self, slot: int, kind: str) -> None:
        """UnknownInstruction if a register is not as wide as the type under which it is used."""
        have = self.slot_kind(slot)
        if np.dtype(DTYPES[have]).itemsize != np.dtype(DTYPES[kind]).itemsize or (have == "pred") != (kind == "pred"):
            raise self.unknown(f"a {have} register used as {kind}")

    def array(self, operand, kind: str) -> str:
        """Like use, but always an array with one element a thread."""
        value = self.use(operand, kind)
        return self.temp(f"t.full({value})") if value.startswith("k_") else value

    def use_pair(self, operand) -> tuple[object, object]:
        """A 64-bit operand as two 32-bit operands (low, high) for further ``use``."""
        if isinstance(operand, Imm):
            value = operand.value & 0xFFFFFFFFFFFFFFFF
            return Imm(value & 0xFFFFFFFF, 32), Imm(value >> 32, 32)
        slots = self.slots(operand)
        if len(slots) == 2:
            return Slot(slots[0]), Slot(slots[1])
        views = self.views(slots[0])
        if "const" in views:
            return self.use_pair(views["const"])
        both = self.temp(f"{self.use(operand, 'u64')}.view(U32).reshape(-1, 2)")
        halves = []
        for column in (0, 1):
            self.next_temporary_slot -= 1
            variable = self.name()
            self.emit(f"{variable} = ascontiguous({both}[:, {column}])")
            self.bind(self.next_temporary_slot, "u32", variable)
            halves.append(Slot(self.next_temporary_slot))
        return halves[0], halves[1]

    def temp(self, expression: str) -> str:
        """Binds an expression to a name that lives until the end of the instruction."""
        variable = self.name("t")
        self.emit(f"{variable} = {expression}")
        self.temps.append(variable)
        return variable

    def mask(self) -> str:
        """Name of the guard as a bool array, or 'None'."""
        if self.ins.guard is None:
            return "None"
        value = self.array(self.ins.guard, "pred")
        return self.temp(f"~{value}") if self.ins.negated else value

    # ---- results -------------------------------------------------------------------------------------------
    def define(self, operand, kind: str, expression: str) -> None:
        """The instruction's result: ``expression`` is an array (or scalar) of ``kind``, merged under the guard."""
        if operand is None:
            self.temp(expression)
            return
        if isinstance(operand, Reg) and len(self.slots(operand)) == 2:
            value = self.temp(expression)
            if not self.saw_array:
                value = self.temp(f"t.full({value})")
            whole = value if kind == "u64" else self.temp(f"{value}.view(U64)")
            both = self.temp(f"{whole}.view(U32).reshape(-1, 2)")
            for column, slot in enumerate(self.slots(operand)):
                self._define_slot(slot, "u32", f"ascontiguous({both}[:, {column}])")
            return
        slot = operand.slot if isinstance(operand, Slot) else self.slots(operand)[0]
        if not self.saw_array:
            expression = f"t.full({expression})"
        self._define_slot(slot, kind, expression)

    def _define_slot(self, slot: int, kind: str, expression: str) -> None:
        self.check_width(slot, kind)
        variable = self.name()
        mask = self.mask()
        if mask != "None":
            old = self._slot_value(slot, kind)
            self.emit(f"{variable} = where({mask}, {expression}, {old})")
        else:
            self.emit(f"{variable} = {expression}")
        self.bind(slot, kind, variable)

    def define_pair(self, operand, kind: str, low: str, high: str) -> None:
        """A 64-bit result given as its two 32-bit halves of ``kind``."""
        slots = self.slots(operand)
        if len(slots) == 2:
            variables = [self.temp(low), self.temp(high)]
            for slot, value in zip(slots, variables, strict=True):
                self._define_slot(slot, kind, value if self.saw_array else f"t.full({value})")
            return
        low, high = self.temp(low), self.temp(high)
        self.define(operand, "u64", f"pack64({low}.view(U32), {high}.view(U32))")

    def copy(self, destination, source) -> bool:
        """Aliases a register to a source operand at no cost where that is possible."""
        if self.ins.guard is not None or not isinstance(destination, Reg):
            return False
        into = self.slots(destination)
        if isinstance(source, Imm):
            if len(into) == 2:
                for slot, half in zip(into, self.use_pair(source), strict=True):
                    self.bind(slot, "const", half)
            else:
                self.bind(into[0], "const", source)
            return True
        if not isinstance(source, (Reg, Slot)):
            return False
        origin = self.slots(source) if isinstance(source, Reg) else (source.slot,)
        if len(origin) != len(into):
            return False
        for a, b in zip(into, origin, strict=True):
            if self.slot_kind(a) != self.slot_kind(b):
                return False
        for a, b in zip(into, origin, strict=True):
            self.alias(a, b)
        return True

    def alias(self, slot: int, origin: int) -> None:
        views = dict(self.views(origin))
        if slot == origin:
            return
        self.release(slot)
        self.env[slot] = views
        for value in views.values():
            if isinstance(value, str):
                self.references[value] = self.references.get(value, 0) + 1

    # ---- instruction services ------------------------------------------------------------------------------
    def site(self, **static) -> str:
        return self.translation.site(self.ins, static)

    def namespace(self, key: str, value: object) -> str:
        """Makes an object known to the generated code under ``key``."""
        self.translation.namespace[key] = value
        return key

    def unknown(self, what: str) -> UnknownInstruction:
        i = self.ins
        return UnknownInstruction(
            f"PTX line {i.line}: {what} is not implemented: {i.text}",
            line=i.line,
            text=i.text,
            source=i.source,
        )

    def only(self, *allowed: str) -> None:
        """UnknownInstruction if the instruction carries a modifier that the handler does not know."""
        for m in self.ins.mods:
            if m not in allowed:
                raise self.unknown(f"modifier .{m} of {self.ins.op}")

    # ---- the whole block -----------------------------------------------------------------------------------
    def finish_instruction(self, live: set[int]) -> None:
        """Drops values that nothing reads any more, so that their memory is reused while it is in cache."""
        for slot in [s for s in self.env if s not in live]:
            self.release(slot)
        dead = [name for name in self.temps if name not in self.references]
        if dead:
            self.emit(f"del {', '.join(dict.fromkeys(dead))}")
        self.temps = []

    def build(self) -> str:
        block, slots = self.block, self.translation.slots
        live = {s for r in block.live_out for s in slots[r]}
        if block.guard is not None:
            live.update(slots[block.guard.id])
        after: list[set[int]] = []
        touched: list[set[int]] = []
        for ins in reversed(block.body):
            after.append(live)
            defs, uses = defs_and_uses(ins)
            gone = {s for r in defs for s in slots[r.id]}
            needed = {s for r in uses for s in slots[r.id]}
            if ins.guard is not None:
                needed.update(slots[ins.guard.id])
                needed |= gone
            else:
                live = live - gone
            live = live | needed
            touched.append(gone)
        after.reverse()
        defined: set[int] = set()
        for gone in touched:
            defined |= gone
        index = 0
        while index < len(block.body):
            ins = block.body[index]
            self.ins, self.saw_array = ins, False
            self.rest, self.consumed = block.body[index + 1 :] if registry.lookup(ins).ends is None else [], 0
            try:
                registry.lookup(ins).handler(self, ins)
            except (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
                raise self.unknown("this form of the instruction") from error
            index += 1 + self.consumed
            self.finish_instruction(after[index - 1])
        result = "None"
        if block.end == "cond":
            value = self.array(block.guard, "pred") if block.guard is not None else None
            result = f"~{value}" if block.negated else value
        return self._assemble(defined, result)

    def _assemble(self, defined: set[int], result: str) -> str:
        out = [f"def block{self.block.number}(m, t, R, idx):"]
        body = []
        live_out = {s for r in self.block.live_out for s in self.translation.slots[r]}
        stores = []
        for slot in sorted(defined & live_out):
            stores.append((slot, self._slot_value_or_full(slot)))
        if self.loaded:
            body.append(" if idx is None:")
            body.append("  " + "; ".join(f"{v} = R[{s}]" for s, v in self.loaded))
            body.append(" else:")
            body.append("  " + "; ".join(f"{v} = R[{s}][idx]" for s, v in self.loaded))
        body.extend(" " + line for line in self.lines)
        if stores:
            body.append(" if idx is None:")
            body.append("  " + "; ".join(f"R[{s}] = {v}" for s, v in stores) + "; m.owned.clear()")
            body.append(" else:")
            body.append("  " + "; ".join(f"m.scatter({s}, idx, {v})" for s, v in stores))
        body.append(f" return {self.translation.result.get(self.block.number, result)}")
        return "\n".join(out + body) + "\n"

    def _slot_value_or_full(self, slot: int) -> str:
        kind = self.slot_kind(slot)
        value = self._slot_value(slot, kind)
        return f"t.full({value})" if value.startswith("k_") else value


class Translation:
    """A kernel translated: blocks, their Python functions (compiled on first use) and the slot of each register."""

    def __init__(self, kernel: Kernel, numerics_model: models.Numerics):
        self.kernel, self.numerics = kernel, numerics_model
        check_known(kernel)
        self.blocks = build(kernel)
        liveness(self.blocks)
        check_initialised(kernel, self.blocks)
        packed = packed_registers(kernel)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.slot_kinds: list[str] = []
        for reg in kernel.registers:
            if reg.id in packed:
                self.slots[reg.id] = (len(self.slot_kinds), len(self.slot_kinds) + 1)
                self.slot_kinds += ["u32", "u32"]
            else:
                self.slots[reg.id] = (len(self.slot_kinds),)
                self.slot_kinds.append(BASE_KIND[reg.width])
        self.namespace: dict[str, object] = {
            "np": np,
            "where": np.where,
            "ascontiguous": np.ascontiguousarray,
        }
        self.namespace.update({name: DTYPES[kind] for kind, name in DTYPE_NAMES.items()})
        for module in (numerics, narrow, integers):
            self.namespace.update({n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")})
        self.namespace.update({f"approx_{op}": f for op, f in (numerics_model.functions or {}).items()})
        self.sites: list[Site] = []
        self.result: dict[int, str] = {}
        self.features: set[str] = set()
        self.sources = [BlockBuilder(self, block).build() for block in self.blocks]
        self.functions: list[object] = [None] * len(self.blocks)

    def has_symbol(self, name: str) -> bool:
        return name in self.kernel.variables or any(p.name == name for p in self.kernel.params)

    def constant(self, kind: str, imm: Imm) -> str:
        value, dtype = imm.value, DTYPES[kind]
        if kind == "pred":
            name, scalar = f"k_pred_{int(bool(value))}", np.bool_(bool(value))
        elif imm.bits == 64 and kind in ("f32", "f16"):
            number = np.array([value & (1 << 64) - 1], np.uint64).view(np.float64)[0]
            scalar = dtype(number)
            name = f"k_{kind}_d{value:x}"
        else:
            width = np.dtype(dtype).itemsize
            if imm.bits == 64 and width == 4:
                number = np.array([value & (1 << 64) - 1], np.uint64).view(np.float64).astype(np.float32)
                value = int(number.view(np.uint32)[0])
            bits = int(value) & ((1 << 8 * width) - 1)
            scalar = np.frombuffer(bits.to_bytes(width, "little"), dtype)[0]
            name = f"k_{kind}_{bits:x}"
        self.namespace[name] = scalar
        return name

    def site(self, ins: Instruction, static: dict) -> str:
        site = Site(ins, **static)
        name = f"site{len(self.sites)}"
        self.sites.append(site)
        self.namespace[name] = site
        return name

    def function(self, number: int):
        """The compiled function of a block."""
        fn = self.functions[number]
        if fn is None:
            code = compile(self.sources[number], f"<{self.kernel.name[:40]} block {number}>", "exec")
            exec(code, self.namespace)
            fn = self.functions[number] = self.namespace[f"block{number}"]
        return fn


def translate(kernel: Kernel, numerics_model: models.Numerics = models.IEEE) -> Translation:
    """Translates a kernel once for each numerics; later calls return the same object."""
    name = numerics_model.name
    if name not in kernel.translations:
        kernel.translations[name] = Translation(kernel, numerics_model)
    return kernel.translations[name]
