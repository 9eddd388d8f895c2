"""The machine: resident blocks, the scheduler, barriers, and what the generated code calls."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from . import models
from .active import Active
from .arguments import dimensions, pack_arguments, shared_limit
from .barriers import Barriers
from .codegen import translate
from .counters import Counters
from .errors import ArgumentError, EmulatorError, SharedLimit, Trap
from .ptx import Kernel
from .shared import SHARED_BASE, SharedMemory, shadow_bytes
from .spaces import Spaces
from .tensors import GlobalMemory

RESIDENT_BYTES = 3 << 29  # registers, shared memory and shadows of the blocks run together
RESIDENT_THREADS = 4096  # beyond this the working set leaves the cache and nothing is gained (measured)
FAIRNESS = 1000  # dispatches with other blocks waiting before the highest one gets a turn (spin loops)


@dataclass
class Stats:
    """What a launch did. ``opcodes`` counts warp-level instructions; ``counters`` is filled on request."""

    opcodes: Counter = field(default_factory=Counter)
    mma: int = 0
    seconds: float = 0.0
    ctas: int = 0
    counters: Counters | None = None

    @property
    def instructions(self) -> int:
        """Warp-level instructions executed."""
        return sum(self.opcodes.values())


class Machine:
    """Runs a kernel's blocks, a resident set at a time. One object per launch."""

    def __init__(self, kernel, grid, block, params, tensors, shared_bytes, arch, checks, counters, schedule, numerics):
        self.kernel, self.grid, self.block = kernel, grid, block
        self.numerics = numerics
        self.translation = translate(kernel, numerics)
        self.params, self.checks, self.schedule = params, checks, schedule
        self.counters = Counters() if counters else None
        self.lanes = block[0] * block[1] * block[2]
        self.padded = -(-self.lanes // 32) * 32
        self.warps_per_block = self.padded // 32
        self._lay_out_variables(shared_bytes, arch)
        features = self.translation.features
        widths = [int(f[6:]) for f in features if f.startswith("global") and f[6:].isdigit()]
        self.global_memory = GlobalMemory(self, tensors, checks, min([16, *widths]))
        self.spaces = Spaces(self)
        self.request = None
        self.mma_count = 0
        self.visits = np.zeros(len(self.translation.blocks), np.int64)
        self.random = random.Random(schedule) if isinstance(schedule, int) else None
        self.param_cache: dict[tuple, np.ndarray] = {}

    def _lay_out_variables(self, shared_bytes, arch):
        """Addresses of shared variables and the size of local memory; SharedLimit if the block asks for too much."""
        limit = shared_limit(arch)
        self.symbols: dict[str, int] = {}
        offset, local, dynamic = 0, 0, []
        for v in self.kernel.variables.values():
            if v.space == "shared":
                if v.size is None:
                    dynamic.append(v)
                    continue
                offset = -(-offset // v.align) * v.align
                self.symbols[v.name] = SHARED_BASE + offset
                offset += v.size
            elif v.space == "local":
                local = -(-local // v.align) * v.align
                self.symbols[v.name] = local
                local += v.size
        align = max([v.align for v in dynamic], default=1)
        static = offset
        if dynamic:
            offset = -(-offset // align) * align
            for v in dynamic:
                self.symbols[v.name] = SHARED_BASE + offset
        self.dynamic_bytes = shared_bytes
        self.shared_size, self.local_size = offset + shared_bytes, local
        if self.shared_size > limit:
            raise SharedLimit(
                f"{self.shared_size} bytes of shared memory a block ({static} static, {shared_bytes} "
                f"dynamic) exceed "
                f"the {limit} bytes of {arch}; use fewer stages or smaller tiles"
            )
        for p in self.kernel.params:
            self.symbols[p.name] = p.offset

    # ---- resident set --------------------------------------------------------------------------------------
    def resident_blocks(self) -> int:
        """How many blocks to run together: bounded by memory and by what the cache rewards."""
        registers = sum({"pred": 1, "u16": 2, "u32": 4}.get(k, 8) for k in self.translation.slot_kinds)
        live = max((len(b.live_in) for b in self.translation.blocks), default=0)
        features = self.translation.features
        shadow = shadow_bytes(self.shared_size, self.warps_per_block, features) if self.checks else 0
        each = self.padded * (min(registers, 8 * live + 4096) + self.local_size + 64) + self.shared_size + shadow
        return max(1, min(int(RESIDENT_BYTES // max(each, 1)), RESIDENT_THREADS // self.padded))

    def load_blocks(self, first: int, count: int):
        """Makes blocks first .. first + count - 1 (linear) resident."""
        self.first, self.count = first, count
        self.threads = count * self.padded
        self.thread_numbers = np.arange(self.threads)
        self.cta_of = self.thread_numbers // self.padded
        self.warp_of = self.thread_numbers % self.padded // 32
        self.lane_of = self.thread_numbers % 32
        self.global_warp_of = self.thread_numbers // 32
        self.global_thread_of = (self.thread_numbers + first * self.padded + 1).astype(np.uint32)
        inside = self.thread_numbers % self.padded
        self.exited = inside >= self.lanes
        self.all_whole = not self.exited.any()
        bx, by, _ = self.block
        gx, gy, _ = self.grid
        linear = first + self.cta_of
        self.specials = {
            "%tid.x": inside % bx, "%tid.y": inside // bx % by, "%tid.z": inside // (bx * by),
            "%ctaid.x": linear % gx, "%ctaid.y": linear // gx % gy, "%ctaid.z": linear // (gx * gy),
            "%laneid": self.lane_of, "%warpid": self.warp_of,
        }  # fmt: skip
        self.specials = {k: v.astype(np.uint32) for k, v in self.specials.items()}
        self.shared = SharedMemory(
            self, count, self.shared_size, self.warps_per_block, self.translation.features, self.checks
        )
        self.shared_row_of = self.cta_of * self.shared.stride
        self.local = np.zeros((self.threads, self.local_size), np.uint8) if self.local_size else None
        self.registers = [None] * len(self.translation.slot_kinds)
        zeros = {
            k: np.zeros(self.threads, d)
            for k, d in {"pred": np.bool_, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64}.items()
        }
        for i, kind in enumerate(self.translation.slot_kinds):
            self.registers[i] = zeros[kind]
        self.owned: set[int] = set()
        self.everyone = Active(self, None)
        self.work: dict[int, list] = {0: [None if self.all_whole else np.flatnonzero(~self.exited)]}
        self.barriers = Barriers(self)
        self.param_cache = {}
        self.done = 0

    def scatter(self, slot: int, idx, values) -> None:
        """Stores a register for part of the threads; the stored array becomes the file's own."""
        if slot not in self.owned:
            self.registers[slot] = self.registers[slot].copy()
            self.owned.add(slot)
        self.registers[slot][idx] = values

    # ---- scheduler -----------------------------------------------------------------------------------------
    def run(self) -> None:
        """Runs the resident blocks to completion."""
        blocks, function = self.translation.blocks, self.translation.function
        turns = 0
        while True:
            if not self.work:
                if self.barriers.open:
                    self.barriers.report_deadlock()
                return
            number = min(self.work)
            if self.schedule != "lowest":
                number, idx = self.choose()
            else:
                turns = turns + 1 if len(self.work) > 1 else 0
                if turns == FAIRNESS:
                    number, turns = max(self.work), 0
                idx = self.merge(self.work.pop(number))
            t = self.everyone if idx is None else Active(self, idx)
            block = blocks[number]
            result = function(number)(self, t, self.registers, idx)
            self.visits[number] += t.warps
            self.leave(block, t, idx, result)

    def merge(self, parts):
        """One sorted index array (None for everybody) of the groups waiting at a block."""
        if len(parts) == 1:
            return parts[0]
        idx = np.sort(np.concatenate(parts))
        return None if len(idx) == self.threads else idx

    def choose(self):
        """Test schedules: one warp at a time, the last one first, or at random; its lowest block runs."""
        lowest: dict[int, tuple[int, np.ndarray]] = {}
        for number in sorted(self.work):
            idx = self.merge(self.work[number])
            idx = self.thread_numbers if idx is None else idx
            for warp in np.unique(idx // 32):
                if int(warp) not in lowest:
                    lowest[int(warp)] = (number, idx[idx // 32 == warp])
        warps = sorted(lowest)
        warp = self.random.choice(warps) if self.random is not None else warps[-1]
        number, mine = lowest[warp]
        idx = self.merge(self.work.pop(number))
        idx = self.thread_numbers if idx is None else idx
        rest = idx[idx // 32 != warp]
        if rest.size:
            self.work[number] = [rest]
        return number, mine

    def push(self, number: int, idx) -> None:
        """Adds threads to those waiting to run a block."""
        self.work.setdefault(number, []).append(idx)

    def leave(self, block, t, idx, result) -> None:
        """Sends threads on from the end of a block."""
        end = block.end
        if end in ("fall", "bra"):
            self.push(block.targets[0], idx)
        elif end == "cond":
            if result.all():
                self.push(block.targets[0], idx)
            elif not result.any():
                self.push(block.targets[1], idx)
            else:
                threads = t.threads
                self.push(block.targets[0], threads[result])
                self.push(block.targets[1], threads[~result])
        elif end == "exit":
            self.exited[t.threads] = True
        elif end == "barrier":
            request, self.request = self.request, None
            self.barriers.meet(block, t, idx, *request)
        else:
            choice, self.request = self.request, None
            threads = t.threads
            for value in np.unique(choice):
                if value >= len(block.targets):
                    i = int(np.flatnonzero(choice == value)[0])
                    self.fail(EmulatorError, block.terminator, t, i, f"branch index {value} is past the table", "")
                self.push(block.targets[value], threads[choice == value])

    # ---- services for generated code -----------------------------------------------------------------------
    def symbol(self, name: str) -> int:
        return self.symbols[name]

    def param(self, name: str, offset: int, width: int, n: int):
        """A parameter element as an array of n equal values."""
        key = (name, offset, width)
        got = self.param_cache.get(key)
        if got is None:
            at = self.symbols[name] + offset
            raw = self.params[at : at + width]
            dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[width]
            got = self.param_cache[key] = np.full(self.threads, np.frombuffer(raw, dtype)[0])
        return got[:n]

    def special(self, t, name: str):
        """A special register for the threads of t."""
        table = self.specials.get(name)
        if table is not None:
            return t.pick(table)
        axis = "xyz".find(name[-1])
        lane = t.lane.astype(np.uint64)
        one = np.uint64(1)
        fixed = {
            "%ntid.": self.block,
            "%nctaid.": self.grid,
            "%nclusterid.": self.grid,
            "%cluster_nctaid.": (1, 1, 1),
            "%cluster_ctaid.": (0, 0, 0),
        }.get(name[:-1])
        if fixed is not None:
            return np.full(t.n, fixed[axis], np.uint32)
        if name.startswith("%clusterid."):
            return t.pick(self.specials["%ctaid." + name[-1]])
        if name.startswith("%lanemask_"):
            value = {
                "eq": one << lane, "lt": (one << lane) - one, "le": (one << lane + one) - one,
                "gt": ~((one << lane + one) - one), "ge": ~((one << lane) - one),
            }[name[-2:]]  # fmt: skip
            return (value & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        if name.startswith(("%clock", "%globaltimer")):
            now = time.monotonic_ns()
            return np.full(t.n, now >> 32 if name.endswith("_hi") else now & (1 << 63) - 1, np.uint64)
        value = {
            "%nwarpid": self.warps_per_block,
            "%smid": 0,
            "%nsmid": 1,
            "%gridid": 0,
            "%cluster_ctarank": 0,
            "%dynamic_smem_size": self.dynamic_bytes,
            "%total_smem_size": self.shared_size,
            "%cluster_nctarank": 1,
            "%is_explicit_cluster": 0,
            "%aggr_smem_size": self.shared_size,
        }.get(name, 0)
        return np.full(t.n, value, np.uint32)

    # ---- errors --------------------------------------------------------------------------------------------
    def block_index(self, cta: int) -> tuple[int, int, int]:
        """(x, y, z) of a resident block."""
        linear = self.first + cta
        gx, gy, _ = self.grid
        return linear % gx, linear // gx % gy, linear // (gx * gy)

    def thread_name(self, number: int) -> str:
        """Words for a thread given its number in the whole launch."""
        cta, inside = divmod(number, self.padded)
        gx, gy, _ = self.grid
        return f"thread {inside} of block ({cta % gx}, {cta // gx % gy}, {cta // (gx * gy)})"

    def trap(self, t, site) -> None:
        self.fail(Trap, site, t, 0, "the kernel trapped", "the kernel itself refused to go on")

    def fail(self, error, site, t, i: int, what: str, advice: str):
        """Raises ``error`` about position i of the active set."""
        cta = self.block_index(int(t.cta[i]))
        thread = t.thread_in_block(i)
        source = f" (kernel source {site.source[0]}:{site.source[1]})" if site.source else ""
        message = (
            f"{error.__name__} at PTX line {site.line}{source}: {site.text}\n"
            f"  block {cta}, warp {thread // 32}, lane {thread % 32} (thread {thread}) {what}"
        )
        if advice:
            message += f"\n  {advice}"
        raise error(message, line=site.line, text=site.text, source=site.source, cta=cta)


def launch(
    kernel: Kernel, grid, block, args, shared_bytes: int = 0, arch: str = "sm_120a", checks: bool = True,
    counters: bool = False, progress=None, schedule="lowest", numerics: str = "ieee",
) -> Stats:  # fmt: skip
    """Runs a kernel on the host.

    ``grid`` and ``block``: up to three extents. ``args``: in parameter order, numpy scalars, Tensor or bytes.
    ``shared_bytes``: dynamic shared memory of a block. ``arch``: decides the shared-memory limit.
    ``checks``: hazard
    checks (bounds and alignment are always checked). ``counters``: count bank conflicts and sectors.
    ``progress(done, total)`` is called as blocks complete. ``schedule``: "lowest" (lowest program counter
    first, all
    warps together), "reversed" (one warp at a time, the last first) or an int (one warp at a time, drawn
    with that
    seed);
    results of a race-free kernel do not depend on it. ``numerics``: "ieee", where mma.sync sums in float32 and the
    .approx functions are rounded once, or "sm_90", where both have the bits of that hardware (about a quarter of
    the speed). Raises ArgumentError for what does not fit, and the
    hazard classes of ``errors`` for what the kernel does.
    """
    grid, block = dimensions(grid, "grid"), dimensions(block, "block")
    if schedule not in ("lowest", "reversed") and not isinstance(schedule, int):
        raise ArgumentError(f"schedule must be 'lowest', 'reversed' or an int seed, got {schedule!r}")
    threads = block[0] * block[1] * block[2]
    if threads > 1024:
        raise ArgumentError(f"a block has at most 1024 threads, got {threads}")
    if kernel.reqntid is not None and kernel.reqntid != block:
        raise ArgumentError(f"the kernel requires blocks of {kernel.reqntid} threads (.reqntid), got {block}")
    if kernel.maxntid is not None and threads > kernel.maxntid[0] * kernel.maxntid[1] * kernel.maxntid[2]:
        raise ArgumentError(f"the kernel allows blocks of {kernel.maxntid} threads (.maxntid), got {block}")
    if shared_bytes < 0:
        raise ArgumentError(f"shared_bytes must not be negative, got {shared_bytes}")
    model = models.by_name(numerics)
    params, tensors = pack_arguments(kernel, args)
    started = time.perf_counter()
    with np.errstate(all="ignore"):
        machine = Machine(kernel, grid, block, params, tensors, shared_bytes, arch, checks, counters, schedule, model)
        total = grid[0] * grid[1] * grid[2]
        step = machine.resident_blocks()
        for first in itertools.count(0, step):
            if first >= total:
                break
            machine.load_blocks(first, min(step, total - first))
            machine.run()
            if progress is not None:
                progress(min(first + step, total), total)
    stats = Stats(mma=machine.mma_count, seconds=time.perf_counter() - started, ctas=total, counters=machine.counters)
    for number, visits in enumerate(machine.visits):
        if visits:
            for ins in machine.translation.blocks[number].body:
                stats.opcodes[".".join((ins.op, *ins.mods)).replace("__", "::")] += int(visits)
    return stats
