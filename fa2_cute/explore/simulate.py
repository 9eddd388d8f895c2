"""One multiprocessor running a kernel's main loop, cycle by cycle, from its SASS: how warps share the pipes.

What is modelled: four sub-partitions that issue at most one instruction a cycle each, in order within a warp; the stall
counts and scoreboards that the compiler put into the code (sass.py); a tensor, FMA, ALU, MUFU and uniform pipe for each
sub-partition and one shared-memory pipe for the SM, which take an instruction every so many cycles (rates.py); cp.async
groups that land after a latency and at a bandwidth; block-wide barriers. What is not: register bank conflicts,
instruction cache misses, clocks that fall with power.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from .rates import Rates
from .sass import ALU, CONTROL, FMA, MUFU, SHARED, TENSOR, UNIFORM, Loop

SUB_PARTITIONS = 4
# A warp's instructions to the load-store unit and MUFU go through a queue; it holds about this many cycles of work
# before the issue stalls (Nsight Compute, "MIO throttle"; depth not documented).
QUEUE_CYCLES = 32.0

_ORDINARY, _LOAD, _COPY, _COMMIT, _WAIT, _BARRIER, _SPECIAL, _OTHER_LATENCY, _LOCAL = range(9)
# Cycles until the scoreboard of what is neither shared memory nor MUFU clears: S2R, R2UR, LDC and the like.
STEALS = (FMA, ALU, MUFU, SHARED)
WARM_UP = 2  # iterations before anything is counted
OTHER_LATENCY = 22.0


@dataclass(frozen=True)
class Event:
    """One instruction issued: for the picture of the pipeline over time."""

    cycle: float
    warp: int
    block: int
    pipe: str
    busy: float
    source: tuple[str, int] | None


@dataclass
class Outcome:
    """What a steady stretch of the loop costs.

    cycles          SM clocks an iteration: in that time every resident block advances by one
    busy            share of the time that each pipe is busy; "issue" is the share of issue slots used
    waits           of a warp's time, the share that it waits for: a pipe by name, "issue", "scoreboard shared",
                    "scoreboard mufu", "copies", "barrier", "dependency" (the compiler's fixed stalls)
    events          what was issued in the last iteration of the stretch, if asked for
    """

    cycles: float
    busy: dict[str, float]
    waits: dict[str, float]
    events: list[Event] = field(default_factory=list)


def run(
    loop: Loop,
    rates: Rates,
    *,
    warps: int,
    blocks: int,
    iterations: int = 6,
    shared_factor: float = 1.0,
    copy_factor: float = 1.0,
    device_share: float = 0.0,
    local_in_l1: bool = True,
    keep_events: bool = False,
) -> Outcome:
    """Run ``loop`` on one SM with ``blocks`` resident blocks of ``warps`` warps.

    iterations      how many each warp does; the first two warm up and are not counted
    shared_factor   wavefronts of an ldmatrix over those without bank conflicts; copy_factor the same of a cp.async
    device_share    share of the copies that come from device memory instead of the L2
    local_in_l1     whether spilled registers fit the L1; else they come from the L2
    """
    return _Machine(loop, rates, warps, blocks, shared_factor, copy_factor, device_share, local_in_l1).run(
        iterations, keep_events
    )


class _Machine:
    def __init__(self, loop, rates, warps, blocks, shared_factor, copy_factor, device_share, local_in_l1):
        self.local_latency = rates.shared_latency if local_in_l1 else rates.copy_latency
        self.rates, self.warps, self.blocks = rates, warps, blocks
        self.copy_latency = rates.copy_latency * (1 - device_share) + rates.device_latency * device_share
        self.code = [self._decode(x, shared_factor, copy_factor) for x in loop.body]
        self.loop = loop

    def _decode(self, x, shared_factor, copy_factor):
        """(kind, pipe, cycles of it, stall, waits, write barrier, read barrier, groups left open or bytes a lane)."""
        rates, kind, busy, left = self.rates, _ORDINARY, 1.0, 0
        pipe = x.pipe
        if x.predicate == "@!PT" or x.predicate == "@!UPT":  # never executed: padding
            pipe = CONTROL
        elif pipe == TENSOR:
            busy = rates.mma_cycles * _mma_work(x.opcode)
        elif pipe == FMA:
            packed = x.name.endswith("2") and x.name[0] == "F"
            busy = rates.fma2_cycles if packed else rates.imad_cycles if x.name == "IMAD" else rates.fma_cycles
        elif pipe == ALU:
            busy = rates.alu_cycles
        elif pipe == UNIFORM:
            busy = rates.uniform_cycles
        elif pipe == MUFU:
            kind, busy = _SPECIAL, rates.mufu_cycles
        elif x.name == "LDGSTS":
            left = _access_bytes(x.opcode)
            kind, busy = _COPY, left * 32 / rates.shared_bytes * copy_factor
        elif x.name == "LDGDEPBAR":
            kind, busy = _COMMIT, 0.0
        elif x.name in ("LDSM", "LDS", "STS", "STSM"):
            kind, busy = _LOAD, _shared_wavefronts(x.opcode) * shared_factor
        elif x.name in ("LDL", "STL"):
            kind, busy = _LOCAL, max(_access_bytes(x.opcode) * 32 / rates.shared_bytes, 1.0)
        elif pipe == SHARED:
            kind, busy = _OTHER_LATENCY, 1.0
        elif x.name == "DEPBAR":
            kind, left = _WAIT, int(x.operands.rsplit(",", 1)[-1].strip().split()[0], 0)
        elif x.name == "BAR":
            kind = _BARRIER
        elif x.write_barrier is not None:
            kind = _OTHER_LATENCY
        return (kind, pipe, busy, max(x.stall, 1), x.waits, x.write_barrier, x.read_barrier, left)

    def run(self, iterations, keep_events):
        rates, code, length = self.rates, self.code, len(self.code)
        count = self.warps * self.blocks
        port = [0.0] * SUB_PARTITIONS
        pipes = {p: [0.0] * SUB_PARTITIONS for p in (TENSOR, FMA, ALU, MUFU, UNIFORM)}
        shared_free, fill_free = 0.0, 0.0
        at = [0] * count  # index into the code
        turn = [0] * count  # iterations done
        boards = [[0.0] * 6 for _ in range(count)]
        board_of = [[""] * 6 for _ in range(count)]  # what each scoreboard waits for
        landing = [0.0] * count  # when all copies so far have landed
        groups: list[list[float]] = [[] for _ in range(count)]
        arrived: list[list[int]] = [[] for _ in range(self.blocks)]
        ready = [0.0] * count  # earliest issue by the stall count alone
        # Blocks start apart, as they do on a device where they replace one another at any time.
        rough = sum(x[3] for x in code)
        issued = [0.0] * count  # when last; of two that could issue, the one that has waited longer does
        heap = []
        for w in range(count):
            block = w // self.warps
            ready[w] = block * rough / self.blocks + (w % self.warps) // SUB_PARTITIONS * 3.0
            heap.append((ready[w], issued[w], w))
        heapq.heapify(heap)
        busy, waits, slots = Counter(), Counter(), 0
        started, measuring, slowest = 0.0, False, 0
        progress = [0] * count  # instructions issued in the measured stretch
        events = []
        while heap:
            key, _, w = heapq.heappop(heap)
            kind, pipe, cycles, stall, needed, write, read, left = code[at[w]]
            sub = w % SUB_PARTITIONS
            block = w // self.warps
            time, why = ready[w], "dependency"
            for b in needed:
                if boards[w][b] > time:
                    time, why = boards[w][b], board_of[w][b]
            if kind == _WAIT:
                open_groups = groups[w]
                if len(open_groups) > left:
                    landed = open_groups[len(open_groups) - left - 1]
                    if landed > time:
                        time, why = landed, "copies"
            if kind == _ORDINARY and pipe in pipes and pipes[pipe][sub] > time:
                time, why = pipes[pipe][sub], pipe
            elif kind == _SPECIAL and pipes[MUFU][sub] - QUEUE_CYCLES > time:
                time, why = pipes[MUFU][sub] - QUEUE_CYCLES, MUFU
            elif kind in (_LOAD, _COPY, _LOCAL) and shared_free - QUEUE_CYCLES > time:
                time, why = shared_free - QUEUE_CYCLES, SHARED
            if port[sub] > time:
                time, why = port[sub], "issue"
            if time > key:
                heapq.heappush(heap, (time, issued[w], w))
                continue
            # Issue.
            port[sub] = time + 1.0
            issued[w] = time
            if measuring:
                slots += 1
                progress[w] += 1
                if time > ready[w]:
                    waits[why] += time - ready[w]
                busy[pipe] += cycles if pipe != CONTROL else 0.0
                if keep_events:
                    events.append(Event(time, w % self.warps, block, pipe, cycles, self.loop.body[at[w]].source))
            if pipe in STEALS:
                pipes[TENSOR][sub] = max(pipes[TENSOR][sub], time) + rates.steal_cycles
            finish = time + stall
            result = 0.0
            if kind == _ORDINARY:
                if pipe in pipes:
                    pipes[pipe][sub] = time + cycles
            elif kind == _LOAD:
                start = max(time, shared_free)
                shared_free = start + cycles
                result, cause = shared_free + rates.shared_latency, "scoreboard shared"
            elif kind == _COPY:
                start = max(time, shared_free)
                shared_free = start + cycles
                fill_free = max(fill_free, start) + 32 * left / rates.l2_bytes
                landing[w] = max(landing[w], fill_free + self.copy_latency)
                result, cause = start + OTHER_LATENCY, "scoreboard shared"
            elif kind == _LOCAL:
                shared_free = max(time, shared_free) + cycles
                result, cause = shared_free + self.local_latency, "scoreboard local"
            elif kind == _COMMIT:
                groups[w].append(landing[w])
                result, cause = time, "copies"
            elif kind == _SPECIAL:
                start = max(time, pipes[MUFU][sub])
                pipes[MUFU][sub] = start + cycles
                result, cause = start + rates.mufu_latency, "scoreboard mufu"
            elif kind == _OTHER_LATENCY:
                result, cause = time + OTHER_LATENCY, "scoreboard shared"
            if write is not None and result > boards[w][write]:
                boards[w][write], board_of[w][write] = result, cause
            if read is not None:
                taken = (result - rates.shared_latency if kind == _LOAD else result) if result else time + 4
                if taken > boards[w][read]:
                    boards[w][read], board_of[w][read] = taken, cause if result else "dependency"
            if measuring and stall > 1:
                waits["dependency"] += stall - 1
            at[w] += 1
            if at[w] == length:
                at[w] = 0
                turn[w] += 1
                slowest = min(turn)
                if slowest == WARM_UP and not measuring:
                    started, measuring = time, True
                elif slowest == iterations:
                    break
            ready[w] = finish
            if kind == _BARRIER:
                arrived[block].append(w)
                if len(arrived[block]) < self.warps:
                    continue
                release = time + rates.barrier_cycles + rates.barrier_warp_cycles * self.warps
                for other in arrived[block]:
                    if measuring:
                        waits["barrier"] += max(release - ready[other], 0.0)
                    ready[other] = max(ready[other], release)
                    heapq.heappush(heap, (ready[other], issued[other], other))
                arrived[block] = []
                continue
            heapq.heappush(heap, (finish, time, w))
        total = time - started
        cycles = total * length * count / sum(progress)
        shares = {
            p: busy[p] / (total * (1 if p == SHARED else SUB_PARTITIONS))
            for p in (TENSOR, FMA, ALU, MUFU, UNIFORM, SHARED)
        }
        shares["issue"] = slots / (total * SUB_PARTITIONS)
        warp_time = total * count
        return Outcome(cycles, shares, {why: t / warp_time for why, t in waits.items()}, events)


def _mma_work(opcode: str) -> float:
    """The opcode's multiply-adds over those of an m16n8k16."""
    return {"16816": 1.0, "1688": 0.5, "16832": 1.0}.get(opcode.split(".")[1] if "." in opcode else "", 1.0)


def _shared_wavefronts(opcode: str) -> float:
    """Passes over 32 banks that a warp's access needs without conflicts."""
    if opcode.startswith(("LDSM", "STSM")):
        return float(opcode.rsplit(".", 1)[-1]) if opcode[-1].isdigit() else 1.0
    return max(_access_bytes(opcode) * 32 / 128, 1.0)


def _access_bytes(opcode: str) -> int:
    """Bytes a lane moves."""
    for size in ("128", "64"):
        if f".{size}" in opcode:
            return int(size) // 8
    return 4
