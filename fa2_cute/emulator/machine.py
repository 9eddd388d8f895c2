"""The machine: resident blocks, the scheduler, barriers, and what the generated code calls."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .active import Active
from .codegen import translate
from .counters import Counters
from .errors import (
    ArgumentError,
    BarrierMismatch,
    EmulatorError,
    MisalignedAccess,
    OutOfBoundsGlobal,
    OutOfBoundsLocal,
    PartialWarp,
    SharedLimit,
    Trap,
)
from .kinds import UNITS
from .ptx import Kernel
from .shared import SHARED_BASE, SharedMemory
from .tensors import GlobalMemory, Tensor

# Shared memory a block may use, bytes: CUDA C++ programming guide, "Technical specifications per compute
# capability".
SHARED_LIMITS = {
    "80": 163,
    "86": 99,
    "87": 163,
    "89": 99,
    "90": 227,
    "100": 227,
    "101": 227,
    "103": 227,
    "110": 227,
    "120": 99,
    "121": 99,
}
WINDOWS = {
    "share": 1 << 60,
    "local": 1 << 61,
}  # generic addresses of the shared and local windows; host ones are below
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


@dataclass
class Barrier:
    """One barrier of one block that has not completed."""

    expected: int
    arrived: int = 0
    brought: object = None
    waiting: list = field(default_factory=list)
    arrivers: set = field(default_factory=set)
    site: object = None
    synced: set = field(default_factory=set)


def shared_limit(arch: str) -> int:
    """Bytes of shared memory a block may have on an architecture such as ``sm_120a``."""
    digits = "".join(ch for ch in arch.removeprefix("sm_") if ch.isdigit())
    if not arch.startswith("sm_") or digits not in SHARED_LIMITS:
        known = ", ".join(f"sm_{k}" for k in SHARED_LIMITS)
        raise ArgumentError(
            f"unknown architecture {arch!r}; known: {known}, with or without the a or f suffix"
        )
    return SHARED_LIMITS[digits] * 1024


def pack_arguments(kernel: Kernel, args) -> tuple[bytes, list[Tensor]]:
    """The parameter block and the tensors of a launch; ArgumentError if one does not fit its parameter."""
    if len(args) != len(kernel.params):
        raise ArgumentError(f"kernel takes {len(kernel.params)} arguments, got {len(args)}")
    block, tensors = bytearray(kernel.param_bytes), []
    for i, (param, arg) in enumerate(zip(kernel.params, args, strict=True)):
        if isinstance(arg, Tensor):
            raw, what = (
                arg.pack(),
                f"Tensor {arg.name!r} with extents {arg.extents} and strides {arg.strides}",
            )
            tensors.append(arg)
        elif isinstance(arg, (np.generic, np.ndarray)) and getattr(arg, "ndim", 0) == 0:
            raw, what = arg.tobytes(), f"{arg.dtype} scalar"
        elif isinstance(arg, (bytes, bytearray)):
            raw, what = bytes(arg), "bytes"
        else:
            raise ArgumentError(
                f"argument {i}: pass a numpy scalar, a Tensor or bytes, not {type(arg).__name__} "
                f"(a Python number has no size: say np.float32(x) or np.int32(x))"
            )
        if len(raw) != param.size:
            raise ArgumentError(
                f"argument {i}: {what} is {len(raw)} bytes, the kernel's parameter is {param.size}"
            )
        block[param.offset : param.offset + param.size] = raw
    return bytes(block), tensors


class Machine:
    """Runs a kernel's blocks, a resident set at a time. One object per launch."""

    def __init__(self, kernel, grid, block, params, tensors, shared_bytes, arch, checks, counters, schedule):
        self.kernel, self.grid, self.block = kernel, grid, block
        self.translation = translate(kernel)
        self.params, self.checks, self.schedule = params, checks, schedule
        self.counters = Counters() if counters else None
        self.lanes = block[0] * block[1] * block[2]
        self.padded = -(-self.lanes // 32) * 32
        self.warps_per_block = self.padded // 32
        self._lay_out_variables(shared_bytes, arch)
        features = self.translation.features
        widths = [int(f[6:]) for f in features if f.startswith("global") and f[6:].isdigit()]
        self.global_memory = GlobalMemory(self, tensors, checks, min([16, *widths]))
        self.request = None
        self.mma_count = 0
        self.visits = np.zeros(len(self.translation.blocks), np.int64)
        self.random = random.Random(schedule) if isinstance(schedule, int) else None
        self.param_cache: dict[tuple, np.ndarray] = {}

    def _lay_out_variables(self, shared_bytes, arch):
        """Addresses of shared variables and the size of local memory; SharedLimit if the block asks for too
        much."""
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
        rows = self.shared_size / 16
        shadow = rows * (4 + 4 * self.warps_per_block) * (5 if self.checks else 0)
        each = (
            self.padded * (min(registers, 8 * live + 4096) + self.local_size + 64) + self.shared_size + shadow
        )
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
        self.barriers: dict[tuple[int, int], Barrier] = {}
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
                if self.barriers:
                    self.report_deadlock()
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
            self.barrier(block, t, idx, *request)
        else:
            choice, self.request = self.request, None
            threads = t.threads
            for value in np.unique(choice):
                if value >= len(block.targets):
                    i = int(np.flatnonzero(choice == value)[0])
                    self.fail(
                        EmulatorError, block.terminator, t, i, f"branch index {value} is past the table", ""
                    )
                self.push(block.targets[value], threads[choice == value])

    # ---- barriers ------------------------------------------------------------------------------------------
    def barrier(self, block, t, idx, site, number, count, value) -> None:
        """bar.sync, bar.arrive and bar.red: completes at once where all warps of a block are here."""
        if site.aligned:
            self.check_aligned(site, t)
        resume = block.targets[0]
        simple = isinstance(number, int) and isinstance(count, (int, type(None))) and site.action == "sync"
        if simple and not 0 <= number < 16:
            self.fail(
                BarrierMismatch,
                site,
                t,
                0,
                f"barrier {number} does not exist; there are 16",
                "use ids 0 to 15",
            )
        if simple and t.is_whole and count in (None, self.padded) and not self.barriers:
            if idx is None:
                self.shared.synchronise_all(slice(None))
                return self.push(resume, None)
            per_block = np.bincount(t.cta, minlength=self.count)
            here = per_block == self.padded
            if here.any():
                self.shared.synchronise_all(np.flatnonzero(here))
                ready = here[t.cta]
                if ready.all():
                    return self.push(resume, idx)
                self.push(resume, idx[ready])
                t = Active(self, idx[~ready])
        self.arrive_slowly(t, site, number, count, value, resume)
        return None

    def check_aligned(self, site, t) -> None:
        """.aligned barriers must be met by whole warps (exited lanes aside)."""
        if t.is_whole:
            return
        counts = np.bincount(t.global_warp, minlength=len(self.exited) // 32)
        present = 32 - self.exited.reshape(-1, 32).sum(axis=1)
        partial = (counts > 0) & (counts < present)
        if partial.any():
            warp = int(np.flatnonzero(partial)[0])
            i = int(np.flatnonzero(t.global_warp == warp)[0])
            self.fail(
                PartialWarp, site, t, i,
                f"only {int(counts[warp])} of the warp's {int(present[warp])} live lanes reached this "
                f"barrier",
                "bar is .aligned: the whole warp must reach it; use barrier.sync in divergent code",
            )  # fmt: skip

    def arrive_slowly(self, t, site, number, count, value, resume) -> None:
        """Barrier arrival block by block: any ids, counts and mixtures of sync and arrive."""
        numbers = np.broadcast_to(np.asarray(number, np.int64), (self.threads if t.idx is None else t.n,))
        counts = np.broadcast_to(np.asarray(self.padded if count is None else count, np.int64), numbers.shape)
        keys = t.cta * 16 + np.clip(numbers, 0, 15)
        if ((numbers < 0) | (numbers > 15)).any():
            i = int(np.flatnonzero((numbers < 0) | (numbers > 15))[0])
            self.fail(
                BarrierMismatch, site, t, i, f"barrier {int(numbers[i])} does not exist", "use ids 0 to 15"
            )
        for key in np.unique(keys):
            mine = np.flatnonzero(keys == key)
            cta, bar = int(key) // 16, int(key) % 16
            i = int(mine[0])
            expected = int(counts[i])
            if (counts[mine] != expected).any():
                self.fail(
                    BarrierMismatch,
                    site,
                    t,
                    i,
                    f"threads give barrier {bar} different counts",
                    "agree on one",
                )
            if expected % 32 or not 0 < expected <= self.padded:
                self.fail(
                    BarrierMismatch, site, t, i,
                    f"barrier {bar} counts {expected} threads; it must be a multiple of 32 up to "
                    f"{self.padded}",
                    "count whole warps",
                )  # fmt: skip
            state = self.barriers.get((cta, bar))
            if state is None:
                state = self.barriers[cta, bar] = Barrier(expected, site=site)
            if state.expected != expected:
                self.fail(
                    BarrierMismatch, site, t, i,
                    f"barrier {bar} is waiting for {state.expected} threads (PTX line {state.site.line}), "
                    f"but this arrival counts {expected}",
                    "give every participant the same count",
                )  # fmt: skip
            warps = np.unique(t.warp[mine])
            brought = self.shared.depart(cta, warps)
            state.brought = brought if state.brought is None else np.maximum(state.brought, brought)
            state.arrived += 32 * len(warps) if site.aligned else len(mine)
            threads = t.threads[mine]
            if site.action == "arrive":
                self.push(resume, threads)
            else:
                state.waiting.append((threads, resume, site, None if value is None else value[mine]))
                state.synced.update(int(w) for w in warps)
            if state.arrived > state.expected:
                self.fail(
                    BarrierMismatch, site, t, i,
                    f"{state.arrived} threads arrived at barrier {bar}, which counts {state.expected}",
                    "count every participant once",
                )  # fmt: skip
            if state.arrived == state.expected:
                self.release(cta, bar, state)
        self.shared.refresh()

    def release(self, cta, bar, state) -> None:
        """Completes a barrier: the waiters have seen what every participant brought."""
        del self.barriers[cta, bar]
        if len(state.synced) == self.warps_per_block:
            self.shared.synchronise_all(np.array([cta]))
        else:
            self.shared.join(cta, np.array(sorted(state.synced), np.intp), state.brought)
        reduced = [v for *_, v in state.waiting if v is not None]
        for threads, resume, site, _ in state.waiting:
            if site.action == "red":
                every = np.concatenate(reduced)
                result = {"popc": every.sum(), "and": every.all(), "or": every.any()}[site.reduce]
                self.scatter(site.destination, threads, result)
            self.push(resume, threads)

    def report_deadlock(self) -> None:
        """Nothing can run and a barrier waits: says which, and where everybody else is."""
        (cta, bar), state = min(self.barriers.items())
        threads, _, site, _ = (
            state.waiting[0] if state.waiting else (np.array([cta * self.padded]), 0, state.site, None)
        )
        waiting = sorted(state.synced)
        base = cta * self.padded
        gone = [
            w for w in range(self.warps_per_block) if self.exited[base + 32 * w : base + 32 * w + 32].all()
        ]
        elsewhere = {b: sorted(s.synced) for (c, b), s in self.barriers.items() if c == cta and b != bar}
        notes = f"; warps {gone} have exited" if gone else ""
        for b, warps in sorted(elsewhere.items()):
            notes += f"; warps {warps} wait at barrier {b} (PTX line {self.barriers[cta, b].site.line})"
        self.fail(
            BarrierMismatch, site, Active(self, np.sort(threads)), 0,
            f"deadlock: barrier {bar} has {state.arrived} of {state.expected} threads (warps {waiting} "
            f"wait){notes}",
            "every participant must reach the barrier, with the same id and count",
        )  # fmt: skip

    # ---- services for generated code -----------------------------------------------------------------------
    def symbol(self, name: str) -> int:
        return self.symbols[name]

    def window(self, space: str) -> int:
        return WINDOWS[space]

    def in_space(self, address, space: str):
        """isspacep."""
        if space == "global":
            return address < np.uint64(WINDOWS["share"])
        return (address >> np.uint64(60)) == np.uint64(WINDOWS[space[:5]] >> 60)

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

    def copy_async(self, t, site, dst, src, source_size, mask) -> None:
        """cp.async: the bytes move now (a legal time), the hazard state says they land at the wait."""
        if mask is not None:
            some = np.flatnonzero(mask)
            if some.size == t.n:
                mask = None
            elif some.size:
                size = None if source_size is None else source_size[some]
                self.copy_async(t.sub(some), site, dst[some], src[some], size, None)
                return
            else:
                return
        width = site.width
        pos = self.shared.locate(t, site, dst, width)
        if source_size is None:
            data = self.global_memory.read(t, site, t.offset_address(src, site.source_offset), width)
        else:
            data = self._sized_source(t, site, src, source_size, width)
        if self.counters is not None:
            self.counters.shared_access(site, t, pos, width)
        if self.shared.checks:
            self.shared.issue_copy(t, site, pos, width)
        self.shared.views[width][pos >> (width.bit_length() - 1)] = data

    def _sized_source(self, t, site, src, source_size, width):
        """The source of copies with a size operand: bytes past it are zero and are not read."""
        if (source_size > width).any():
            i = int(np.flatnonzero(source_size > width)[0])
            what = f"gives a source size of {int(source_size[i])} bytes to a copy of {width}"
            self.fail(ArgumentError, site, t, i, what, "keep the source size within the copy size")
        data = np.zeros((t.n, width), np.uint8)
        for size in np.unique(source_size):
            if size:
                where = np.flatnonzero(source_size == size)
                data[where, :size] = self._partial_source(t.sub(where), site, src[where], int(size), width)
        return data.view(UNITS[width]).reshape(-1)

    def _partial_source(self, t, site, src, size, width):
        """(threads, size) bytes of copies that read only their first ``size`` bytes."""
        address = t.offset_address(src, site.source_offset)
        if size == width:
            return self.global_memory.read(t, site, address, width).view(np.uint8).reshape(-1, width)
        if (address & np.uint64(width - 1)).any():
            i = int(np.flatnonzero(address & np.uint64(width - 1))[0])
            what = f"copies from an address that is not a multiple of {width} bytes"
            self.fail(MisalignedAccess, site, t, i, what, "align the source to the copy size")
        columns = [self.global_memory.read(t, site, address + np.uint64(k), 1) for k in range(size)]
        return np.stack(columns, 1)

    # ---- local, param and generic accesses -----------------------------------------------------------------
    def local_position(self, t, site, address):
        """Row-relative byte position in local memory."""
        total = site.width * site.count
        pos = address.astype(np.int64) + site.offset
        bad = (pos < 0) | (pos > self.local_size - total) | (pos & (total - 1) != 0)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            self.fail(
                OutOfBoundsLocal, site, t, i,
                f"local bytes {int(pos[i])}..{int(pos[i]) + total - 1} of {self.local_size}, or "
                f"misaligned", "",
            )  # fmt: skip
        return pos

    def local_load(self, t, site, address, mask):
        """ld.local."""
        if mask is not None:
            return t.masked_load(self.local_load, site, address, mask)
        pos = self.local_position(t, site, address)
        out = []
        for k in range(site.count):
            columns = pos[:, None] + k * site.width + np.arange(site.width)
            raw = np.ascontiguousarray(self.local[t.threads[:, None], columns])
            out.append(raw.view(f"u{site.width}").reshape(-1))
        return out

    def local_store(self, t, site, address, values, mask):
        """st.local."""
        if mask is not None:
            return t.masked_store(self.local_store, site, address, values, mask)
        pos = self.local_position(t, site, address)
        for k, v in enumerate(values):
            columns = pos[:, None] + k * site.width + np.arange(site.width)
            self.local[t.threads[:, None], columns] = v.view(np.uint8).reshape(-1, site.width)
        return None

    def param_load(self, t, site, address, mask):
        """ld.param with a computed address."""
        if mask is not None:
            return t.masked_load(self.param_load, site, address, mask)
        total = site.width * site.count
        pos = address.astype(np.int64) + site.offset
        bad = (pos < 0) | (pos > len(self.params) - total)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            self.fail(
                OutOfBoundsLocal, site, t, i, f"parameter bytes {int(pos[i])}.. of {len(self.params)}", ""
            )
        raw = np.frombuffer(self.params, np.uint8)[pos[:, None] + np.arange(total)]
        columns = np.ascontiguousarray(raw).view(f"u{site.width}")
        return list(np.ascontiguousarray(columns.T))

    def _by_space(self, t, site, address):
        """Yields (space, positions) of generic addresses."""
        whole = t.offset_address(address, site.offset)
        space = (whole >> np.uint64(60)).astype(np.int64)
        for value in np.unique(space):
            yield (
                {0: "global", 1: "shared", 2: "local"}.get(int(value), "global"),
                np.flatnonzero(space == value),
            )

    def generic_load(self, t, site, address, mask):
        """ld without a space: global, shared or local by address."""
        if mask is not None:
            return t.masked_load(self.generic_load, site, address, mask)
        dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[site.width]
        out = [np.zeros(t.n, dtype) for _ in range(site.count)]
        for space, where in self._by_space(t, site, address):
            function, base = self._generic(space, True)
            values = function(t.sub(where), site, address[where] - np.uint64(base), None)
            for o, v in zip(out, values, strict=True):
                o[where] = v
        return out

    def generic_store(self, t, site, address, values, mask):
        """st without a space."""
        if mask is not None:
            return t.masked_store(self.generic_store, site, address, values, mask)
        for space, where in self._by_space(t, site, address):
            function, base = self._generic(space, False)
            function(t.sub(where), site, address[where] - np.uint64(base), [v[where] for v in values], None)
        return None

    def _generic(self, space, load):
        """The access function of a space and the base of its window."""
        if space == "global":
            return (self.global_memory.load if load else self.global_memory.store), 0
        if space == "shared":
            return (self.shared.load if load else self.shared.store), WINDOWS["share"]
        return (self.local_load if load else self.local_store), WINDOWS["local"]

    # ---- atomics -------------------------------------------------------------------------------------------
    def atomic(self, t, site, address, values, mask):
        """atom/red: the old values; lanes that share an address act in thread order."""
        if mask is not None:
            out = np.zeros(t.n, f"u{site.width}")
            some = np.flatnonzero(mask)
            if some.size:
                out[some] = self.atomic(t.sub(some), site, address[some], [v[some] for v in values], None)
            return out
        space = site.space
        if space == "generic":
            out = np.zeros(t.n, f"u{site.width}")
            for which, where in self._by_space(t, site, address):
                _, base = self._generic(which, True)
                part = [v[where] for v in values]
                out[where] = self._atomic_in(
                    which, t.sub(where), site, address[where] - np.uint64(base), part
                )
            return out
        return self._atomic_in(space, t, site, address, values)

    def _atomic_in(self, space, t, site, address, values):
        if space == "shared":
            pos = self.shared.locate(t, site, address, site.width)
            if self.shared.checks:
                self.shared.check_atomic(t, site, pos, site.width)
            return atomic_apply(self.shared.views[site.width], pos // site.width, site, values)
        if space != "global":
            self.fail(EmulatorError, site, t, 0, "an atomic on local memory", "")
        address = t.offset_address(address, site.offset)
        out = np.zeros(t.n, f"u{site.width}")
        for region, where in self.global_memory.find(t, site, address, site.width, True):
            some = slice(None) if where is None else where
            index = (address[some] - region.start_base).view(np.int64) // site.width
            out[some] = atomic_apply(region.units(site.width), index, site, [v[some] for v in values])
        return out

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


def atomic_apply(memory, index, site, values):
    """Applies one atomic a lane to ``memory[index]`` in lane order; returns the old values."""
    old = np.zeros(len(index), memory.dtype)
    left = np.arange(len(index))
    while left.size:
        _, first = np.unique(index[left], return_index=True)
        now = left[np.sort(first)]
        old[now] = memory[index[now]]
        memory[index[now]] = atomic_result(site.op_name, site.kind, old[now], [v[now] for v in values])
        left = np.setdiff1d(left, now, assume_unique=True)
    return old


def atomic_result(op, kind, old, values):
    """New memory contents (unsigned) of an atomic operation."""
    from .numerics import canon, canon64, half2, half_arith

    v = values[0]
    if op == "exch":
        return v
    if op == "cas":
        return np.where(old == v, values[1], old)
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, v)
    if op == "inc":
        return np.where(old >= v, old.dtype.type(0), old + old.dtype.type(1))
    if op == "dec":
        return np.where((old == 0) | (old > v), v, old - old.dtype.type(1))
    if kind in ("f16x2", "bf16x2"):
        return half2(op, kind[:-2], old, v)
    if kind in ("f16", "bf16"):
        return half_arith(op, kind, old, v)
    typed = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "s64": np.int64}.get(kind, old.dtype)
    a, b = old.view(typed), v.view(typed)
    if op == "add":
        r = a + b
        r = canon(r) if kind == "f32" else canon64(r) if kind == "f64" else r
    else:
        r = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    return r.view(old.dtype)


def dimensions(value, what: str) -> tuple[int, int, int]:
    """A grid or block as three positive ints."""
    dims = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(dims) <= 3 or any(int(d) != d or d < 1 for d in dims):
        raise ArgumentError(f"{what} must be one to three positive integers, got {value!r}")
    return tuple(int(d) for d in dims) + (1,) * (3 - len(dims))


def launch(
    kernel: Kernel, grid, block, args, shared_bytes: int = 0, arch: str = "sm_120a", checks: bool = True,
    counters: bool = False, progress=None, schedule="lowest",
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
    results of a race-free kernel do not depend on it. Raises ArgumentError for what does not fit, and the
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
    params, tensors = pack_arguments(kernel, args)
    started = time.perf_counter()
    with np.errstate(all="ignore"):
        machine = Machine(
            kernel, grid, block, params, tensors, shared_bytes, arch, checks, counters, schedule
        )
        total = grid[0] * grid[1] * grid[2]
        step = machine.resident_blocks()
        for first in itertools.count(0, step):
            if first >= total:
                break
            machine.load_blocks(first, min(step, total - first))
            machine.run()
            if progress is not None:
                progress(min(first + step, total), total)
    stats = Stats(
        mma=machine.mma_count, seconds=time.perf_counter() - started, ctas=total, counters=machine.counters
    )
    for number, visits in enumerate(machine.visits):
        if visits:
            for ins in machine.translation.blocks[number].body:
                stats.opcodes[".".join((ins.op, *ins.mods)).replace("__", "::")] += int(visits)
    return stats


__all__ = ["Machine", "OutOfBoundsGlobal", "Stats", "launch"]
