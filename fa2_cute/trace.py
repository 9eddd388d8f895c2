"""What a call's kernels do, counted in the emulator: instructions, MMAs, shared-memory wavefronts, sectors, bytes."""

import linecache
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from . import arch, emulation, forward, jit, split_calls
from .decode_checks import EMULATED_SMS
from .decode_spec import CombineSpec
from .emulator import Stats
from .launch import Launch
from .problem import DTYPES, MAX_EXTENT, Problem
from .spec import CAUSAL, FULL

MMA_MULTIPLY_ADDS = 16 * 8 * 16  # PTX ISA: mma.sync.m16n8k16
SECTOR_BYTES = 32  # what an L2 cache line is made of (CUDA C++ Best Practices Guide, "Coalesced Access")
SOURCE_WIDTH = len("products.py:123")
SOURCE_TEXT_WIDTH = 76  # beside it, in a terminal of 100 columns
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True, eq=False)
class Trace:
    """Counts of one launch: of which call, of which kernel on what, what it did."""

    problem: Problem
    launch: Launch
    stats: Stats


@dataclass(frozen=True)
class Access:
    """All executions of one opcode that come from one source line; ``where`` is "file:line" or "".

    wavefronts  passes over shared memory; ``conflicts`` of them are due to bank conflicts
    sectors     32-byte pieces of global memory that warps touched; ``bytes`` is what they asked for
    """

    opcode: str
    where: str
    executions: int
    wavefronts: int
    conflicts: int
    sectors: int
    bytes: int


def problem_of(
    shape: str,
    *,
    key_len: int | None = None,
    kv_heads: int | None = None,
    causal: bool = False,
    dtype: str = "bfloat16",
) -> Problem:
    """The problem of a shape ``BATCHxQUERY_LENxHEADSxHEAD_DIM``; keys and KV heads are as many if not given.

    Raises ValueError for a shape that is none, naming the command's arguments, or (naming q) that no kernel takes.
    """
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise ValueError(f"SHAPE: got {shape!r}, takes BATCHxQUERY_LENxHEADSxHEAD_DIM such as 1x256x8x128")
    types = {name: kind for kind, name in DTYPES.items()}
    if dtype not in types:
        raise ValueError(f"--dtype: got {dtype!r}, takes {' or '.join(types)}")
    batch, query_len, heads, head_dim = map(int, match.groups())
    key_len = query_len if key_len is None else key_len
    kv_heads = heads if kv_heads is None else kv_heads
    for name, got, extents in (
        ("SHAPE", shape, (batch, query_len, heads, head_dim)),
        ("--key-len", key_len, (key_len,)),
        ("--kv-heads", kv_heads, (kv_heads,)),
    ):
        if not all(1 <= extent <= MAX_EXTENT for extent in extents):
            raise ValueError(f"{name}: got {got}, takes numbers from 1 to {MAX_EXTENT}")
    if heads % kv_heads:
        raise ValueError(f"--kv-heads: got {kv_heads}, takes a divisor of SHAPE's {heads} heads")
    q = torch.empty((batch, query_len, heads, head_dim), dtype=types[dtype], device="meta")
    k = torch.empty((batch, key_len, kv_heads, head_dim), dtype=types[dtype], device="meta")
    return Problem.of(q, k, k, CAUSAL if causal else FULL)


def trace(problem: Problem, seed: int = 0) -> list[Trace]:
    """Run ``problem``, a full or causal one, on normal random numbers in the emulator, with all counters on.

    The kernels are those that a call on CPU tensors takes: what one on a GPU of sm_120 with ``EMULATED_SMS`` SMs does,
    but that the forward kernel is not split there (split_calls.py).
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = next(kind for kind, name in DTYPES.items() if name == problem.dtype)
    query_shape = (problem.batch, problem.query_len, problem.heads, problem.head_dim)
    key_shape = (problem.batch, problem.key_len, problem.kv_heads, problem.head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in (query_shape, key_shape, key_shape))
    return [_counted(problem, launch) for launch in launches(problem, q, k, v)]


def launches(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Launch]:
    """What ``forward.attend`` launches on CPU tensors of ``problem``, in order."""
    problem, options, inputs = forward.check(q, k, v, window=(None, 0 if problem.features.right else None))
    split = split_calls.plan(problem, options, inputs) if problem.key_len >= forward.SPLIT_KEYS else None
    if split is not None:
        return list(split.launches)
    _, _, call = forward.allocated(problem, options, inputs)
    spec = call.spec(arch.TARGET)
    return [
        Launch(spec, part.grid(spec), forward.key_tiles(part.problem, spec), part.values()) for part in call.parts()
    ]


def _counted(problem: Problem, launch: Launch) -> Trace:
    kernel = jit.compiled(launch.spec, arch.TARGET)
    return Trace(problem, launch, emulation.run(kernel, launch.grid, launch.values, tiles=launch.steps, counters=True))


def accesses(stats: Stats) -> list[Access]:
    """The memory instructions by opcode and source line, those with most wavefronts and sectors first."""
    groups = defaultdict(list)
    for line in stats.counters.lines.values():
        opcode = line.text.split("@")[-1].split()[1 if line.text.startswith("@") else 0]
        where = f"{Path(line.source[0]).name}:{line.source[1]}" if line.source else ""
        groups[opcode, where].append(line)
    found = [
        Access(
            opcode,
            where,
            *(
                sum(getattr(x, name) for x in lines)
                for name in ("executions", "wavefronts", "conflicts", "sectors", "bytes")
            ),
        )
        for (opcode, where), lines in groups.items()
    ]
    return sorted(found, key=lambda access: (-access.wavefronts, -access.sectors, access.opcode, access.where))


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of one head that are not masked."""
    if not problem.features.right:
        return problem.query_len * problem.key_len
    offset = problem.key_len - problem.query_len
    return sum(min(max(row + offset + 1, 0), problem.key_len) for row in range(problem.query_len))


def tables(trace: Trace) -> Group:
    """Everything as tables for the terminal."""
    stats = trace.stats
    return Group(_summary(trace), _instructions(stats), _memory(stats), _source_lines(stats), _traffic(trace))


def _table(title: str, *headings: str, words: int = 1) -> Table:
    """An empty table; the first ``words`` columns are words, the others numbers."""
    table = Table(title=title)
    for index, heading in enumerate(headings):
        justify = "left" if index < words else "right"
        table.add_column(heading, justify=justify, min_width=SOURCE_WIDTH if heading == "source" else None)
    return table


def _summary(trace: Trace) -> Table:
    problem, spec, stats = trace.problem, trace.launch.spec, trace.stats
    table = _table("Work", "what", "count")
    if not isinstance(spec, CombineSpec):
        warps = spec.threads // 32
        table.add_row("tile (queries x keys), warps, stages", f"{spec.tile_m} x {spec.tile_n}, {warps}, {spec.stages}")
    table.add_row("thread blocks", f"{stats.ctas:,}")
    table.add_row("instructions of a warp", f"{stats.instructions:,}")
    if stats.mma:
        needed = 2 * problem.batch * problem.heads * problem.head_dim * visible_pairs(problem)
        done = stats.mma * MMA_MULTIPLY_ADDS
        table.add_row("mma.sync m16n8k16", f"{stats.mma:,}")
        table.add_row("multiply-adds in them", f"{done:,}")
        table.add_row("multiply-adds that the shape needs", f"{needed:,} ({needed / done:.1%})")
        table.add_row("instructions an mma.sync", f"{stats.instructions / stats.mma:.2f}")
    return table


def _instructions(stats: Stats) -> Table:
    table = _table("Instructions by opcode, a warp each", "opcode", "count", "share")
    for opcode, count in stats.opcodes.most_common():
        table.add_row(opcode, f"{count:,}", f"{count / stats.instructions:.2%}")
    return table


def _memory(stats: Stats) -> Table:
    table = _table(
        "Memory instructions by source line",
        *("opcode", "source", "runs", "wavefronts", "conflicts", "sectors", "bytes"), words=2,
    )  # fmt: skip
    for access in accesses(stats):
        shared = bool(access.wavefronts)
        numbers = (access.wavefronts, access.conflicts) if shared else ("", "")
        sectors = access.sectors or ""
        cells = (access.executions, *numbers, sectors, access.bytes)
        shown = (f"{cell:,}" if cell != "" else "" for cell in cells)
        table.add_row(_short(access.opcode), access.where, *shown)
    return table


def _short(opcode: str) -> str:
    """An opcode without the modifiers that all of its kind have."""
    head = opcode.partition(".")[0]
    common = {"ldmatrix": ("sync", "aligned", "m8n8", "shared", "b16"), "cp": ("shared", "global")}.get(head, ())
    return ".".join(part for part in opcode.split(".") if part not in common)


def _source_lines(stats: Stats) -> Table:
    """The text of the lines that ``_memory`` names."""
    places = {line.source for line in stats.counters.lines.values() if line.source}
    table = _table("Source lines", "source", "text", words=2)
    for path, number in sorted(places):
        text = linecache.getline(path, number).strip()
        table.add_row(f"{Path(path).name}:{number}", escape(text[:SOURCE_TEXT_WIDTH]))
    return table


def _traffic(trace: Trace) -> Table:
    """Bytes asked of global memory; caches are not modelled."""
    launch, counters = trace.launch, trace.stats.counters
    table = _table("Global memory by tensor", "tensor", "bytes of it", "read", "written", "times")
    for parameter, value in zip(launch.spec.parameters(), launch.values, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        whole, read, written = value.nbytes, counters.read[parameter.name], counters.written[parameter.name]
        if read or written:  # others stand where a kernel of other calls has one
            table.add_row(parameter.name, f"{whole:,}", f"{read:,}", f"{written:,}", f"{(read + written) / whole:.2f}")
    sectors = sum(line.sectors for line in counters.lines.values())
    asked = sum(counters.read.values()) + sum(counters.written.values())
    table.add_section()
    table.add_row("sectors", "", "", f"{sectors:,}", f"{sectors * SECTOR_BYTES / asked:.2f}" if asked else "")
    return table


def show(problem: Problem, seed: int, console: Console):
    """Trace ``problem`` and print it."""
    traces = trace(problem, seed)
    console.print(
        f"Kernels of this call on CPU tensors, as on {EMULATED_SMS} SMs of {arch.TARGET.name}: {len(traces)}",
        highlight=False,
    )
    for number, one in enumerate(traces, 1):
        console.print(f"\n{number}. {one.launch.spec.title}", highlight=False)
        console.print(tables(one))
