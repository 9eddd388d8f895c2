"""Control flow of a kernel: basic blocks, liveness, and which 64-bit registers hold two packed 32-bit values."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import ParseError, UninitialisedRegister, UnknownInstruction
from .ops.registry import lookup
from .ptx import Address, Instruction, Kernel, Not, Pair, Reg, Symbol, Vec


@dataclass
class Block:
    """A basic block. ``end`` is fall, bra, cond, exit, brx or barrier; ``targets`` are block numbers.

    A ``cond`` block goes to targets[0] where its predicate (``guard``, flipped by ``negated``) holds, else to
    targets[1]. Blocks are numbered in program order, so a lower number is a lower program counter.
    """

    number: int
    body: list[Instruction] = field(default_factory=list)
    end: str = "fall"
    targets: list[int] = field(default_factory=list)
    guard: Reg | None = None
    negated: bool = False
    terminator: Instruction | None = None
    live_in: set[int] = field(default_factory=set)
    live_out: set[int] = field(default_factory=set)


def registers_of(operand) -> list[Reg]:
    """Every register an operand mentions."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Vec):
        return [r for item in operand.items if item is not None for r in registers_of(item)]
    if isinstance(operand, Address):
        return [operand.base] if isinstance(operand.base, Reg) else []
    if isinstance(operand, Not):
        return [operand.operand]
    if isinstance(operand, Pair):
        return [r for item in (operand.first, operand.second) if item is not None for r in registers_of(item)]
    return []


def defs_and_uses(ins: Instruction) -> tuple[list[Reg], list[Reg]]:
    """Registers written and registers read; the old value of a guarded destination counts as read."""
    count = lookup(ins).destinations
    defs = [r for o in ins.operands[:count] for r in registers_of(o)]
    uses = [r for o in ins.operands[count:] for r in registers_of(o)]
    return defs, uses


def check_known(kernel: Kernel) -> None:
    """UnknownInstruction for the first opcode that has no implementation."""
    for ins in kernel.body:
        if lookup(ins) is None:
            raise UnknownInstruction(
                f"PTX line {ins.line}: opcode {ins.op!r} is not implemented: {ins.text}",
                line=ins.line, text=ins.text, source=ins.source,
            )  # fmt: skip


def build(kernel: Kernel) -> list[Block]:
    """Cuts the body into blocks. A guarded instruction that cannot be masked becomes a branch around it."""
    body = kernel.body
    leaders = {0, *kernel.labels.values()}
    blocks: list[Block] = []
    starts: dict[int, int] = {}
    links: list[tuple[Block, list[int]]] = []

    def open_block(position: int | None) -> Block:
        block = Block(len(blocks))
        blocks.append(block)
        if position is not None and position not in starts:
            starts[position] = block.number
        return block

    def target(ins: Instruction, symbol) -> int:
        if not isinstance(symbol, Symbol) or symbol.name not in kernel.labels:
            raise ParseError(f"PTX line {ins.line}: no such label: {ins.text}", line=ins.line, text=ins.text)
        return kernel.labels[symbol.name]

    current: Block | None = None
    for i, ins in enumerate(body):
        op = lookup(ins)
        if current is not None and i in leaders:
            links.append((current, [i]))
            current = None
        if current is None:
            current = open_block(i)
        ends = op.ends
        if ins.guard is not None and not op.maskable and ends != "bra":
            current.end, current.guard, current.negated = "cond", ins.guard, not ins.negated
            links.append((current, [i + 1, -1]))
            current = open_block(None)
            plain = Instruction(ins.line, ins.op, ins.mods, ins.operands, None, False, ins.text, ins.source)
            current.body.append(plain)
            current.terminator = plain
        else:
            current.body.append(ins)
            current.terminator = ins
        if ends is None:
            if current.body[-1] is not ins:
                links.append((current, [i + 1]))
                current = None
            continue
        if ends == "bra":
            where = target(ins, ins.operands[-1])
            if ins.guard is None:
                current.end = "bra"
                links.append((current, [where]))
            else:
                current.end, current.guard, current.negated = "cond", ins.guard, ins.negated
                links.append((current, [where, i + 1]))
        elif ends == "brx":
            table = kernel.branch_tables.get(getattr(ins.operands[-1], "name", None))
            if table is None:
                raise ParseError(f"PTX line {ins.line}: no branch table: {ins.text}", line=ins.line, text=ins.text)
            current.end = "brx"
            links.append((current, [target(ins, Symbol(name)) for name in table]))
        else:
            current.end = ends
            links.append((current, [i + 1] if ends == "barrier" else []))
        current = None
    if current is not None:
        links.append((current, [len(body)]))
    final = open_block(len(body))
    final.end = "exit"
    for block, positions in links:
        block.targets = [block.number + 1 if p == -1 else starts[p] for p in positions]
    return blocks


def liveness(blocks: list[Block]) -> None:
    """Fills live_in and live_out (register numbers) by the usual backward iteration."""
    gens, kills = [], []
    for block in blocks:
        gen: set[int] = set()
        kill: set[int] = set()
        for ins in block.body:
            defs, uses = defs_and_uses(ins)
            gen.update(r.id for r in uses if r.id not in kill)
            if ins.guard is not None:
                if ins.guard.id not in kill:
                    gen.add(ins.guard.id)
                gen.update(r.id for r in defs if r.id not in kill)
            else:
                kill.update(r.id for r in defs)
        if block.guard is not None and block.guard.id not in kill:
            gen.add(block.guard.id)
        gens.append(gen)
        kills.append(kill)
        block.live_in, block.live_out = set(gen), set()
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out: set[int] = set()
            for t in block.targets:
                out |= blocks[t].live_in
            if out != block.live_out:
                block.live_out = out
                live = gens[block.number] | (out - kills[block.number])
                if live != block.live_in:
                    block.live_in = live
                    changed = True


def check_initialised(kernel: Kernel, blocks: list[Block]) -> None:
    """UninitialisedRegister for a read that no definition reaches on any path from the entry."""
    defined: list[set[int] | None] = [None] * len(blocks)
    defined[0] = set()
    work = [0]
    while work:
        n = work.pop()
        out = set(defined[n])
        for ins in blocks[n].body:
            out.update(r.id for r in defs_and_uses(ins)[0])
        for t in blocks[n].targets:
            if defined[t] is None:
                defined[t] = set(out)
                work.append(t)
            elif not out <= defined[t]:
                defined[t] |= out
                work.append(t)
    for block in blocks:
        have = defined[block.number]
        if have is None:
            continue
        have = set(have)
        for ins in block.body:
            defs, uses = defs_and_uses(ins)
            if ins.guard is not None:
                uses = [*uses, ins.guard]
            for r in uses:
                if r.id not in have:
                    raise UninitialisedRegister(
                        f"PTX line {ins.line}: {r.name} is read but nothing before it writes it: {ins.text}",
                        line=ins.line, text=ins.text, source=ins.source,
                    )  # fmt: skip
            have.update(r.id for r in defs)


def packed_registers(kernel: Kernel) -> set[int]:
    """64-bit registers kept as two 32-bit halves: those that f32x2 arithmetic or a 2 x 32-bit pack writes."""
    packed: set[int] = set()
    copies: list[tuple[int, list[int]]] = []
    for ins in kernel.body:
        if not ins.operands or not isinstance(ins.operands[0], Reg) or ins.operands[0].width != 8:
            continue
        dst = ins.operands[0].id
        if "f32x2" in ins.mods:
            packed.add(dst)
        elif ins.op == "mov" and isinstance(ins.operands[1], Vec):
            widths = {o.width for o in ins.operands[1].items if isinstance(o, Reg)}
            if len(ins.operands[1].items) == 2 and widths <= {4}:
                packed.add(dst)
        elif ins.op in ("mov", "selp"):
            copies.append((dst, [o.id for o in ins.operands[1:3] if isinstance(o, Reg) and o.width == 8]))
    changed = True
    while changed:
        changed = False
        for dst, sources in copies:
            if dst not in packed and any(s in packed for s in sources):
                packed.add(dst)
                changed = True
    return packed
