"""Predicted time of one tile on one problem, and what bounds it: no fit, only rates, the kernel's code and arithmetic.

1. A step of the loop over keys: simulate.py runs the SASS of the unmasked and of the masked loop with 1 .. R blocks on
   an SM, R what registers, threads and shared memory allow.
2. A block: launch, first loads, its masked and unmasked steps, the epilogue.
3. The launch: blocks go in the grid's order to the SM that is free first; an SM with fewer blocks runs each of them
   faster.
4. Not below the time that the L2 and device memory need for the bytes that must move.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..spec import FEWER_REFERENCED, REFERENCED_KEYS, group_log2, sequences_log2
from . import simulate
from .rates import Rates
from .sass import ALU, FMA, MUFU, SHARED, TENSOR, UNIFORM
from .space import KIB, Point, Workload

ELEMENT_BYTES = 2
#: Predictions this close are a tie: over 320 launches measured on an H200 their ratio to the measured times varies by
#: 4.6% (one standard deviation; docs/explore.md).
TIE = 0.04
#: A pipe this busy binds; below that it is the latency that too few warps leave open.
BINDING = 0.85
PIPE_NAMES = {
    TENSOR: "tensor pipe", FMA: "FMA pipe", ALU: "ALU", MUFU: "MUFU", SHARED: "shared memory",
    UNIFORM: "uniform datapath",
    "issue": "issue slots", "l2": "L2 bandwidth", "device": "device memory",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One step of the loop over keys, at each number of resident blocks (index 0: one block).

    cycles      until every resident block has done one step
    busy        share of the time by pipe; waits: share of a warp's time by what it waits for
    """

    cycles: tuple[float, ...]
    busy: tuple[dict[str, float], ...]
    waits: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class CompiledFacts:
    """What the model needs to know of a compiled kernel.

    blocks_per_sm       resident blocks
    step, masked_step   of the loop without and with a mask
    outside_cycles      of a block's code before and after its loops
    mmas                of one warp and step
    first_reference     the softmax reference is taken in a masked step (kernels/softmax.py)
    """

    blocks_per_sm: int
    step: Step
    masked_step: Step
    outside_cycles: float
    mmas: int
    first_reference: bool


@dataclass(frozen=True)
class Prediction:
    """What the model says of a point.

    milliseconds, cycles    of the launch; cycles are SM clocks
    tflops                  of the operations that the mask leaves
    of_bound                share of what the tensor pipes could do in that time
    binds                   the pipe or memory that is busiest, or "latency"
    why                     one sentence for a person
    busy                    share of the time by pipe, in the loop at full residency
    waits                   share of a warp's time by what it waits for, there
    parts                   shares of ``cycles``: "mma", "stalls" (of the loop beyond its MMAs), "masked" (work that the
                            mask throws away, and slower masked steps), "ends" (prologue, epilogue), "tail" (SMs without
                            blocks), "memory" (waiting for it beyond all that)
    """

    milliseconds: float
    cycles: float
    tflops: float
    of_bound: float
    binds: str
    why: str
    busy: dict[str, float]
    waits: dict[str, float]
    parts: dict[str, float] = field(default_factory=dict)


def preferred(candidates: Iterable[tuple[Point, float, bool]]) -> Point:
    """Of (point, predicted time, spills) the one to take.

    Among those that tie with the fastest: one without spills, then with the most query rows, which reads K and V least
    often, then the fastest.
    """
    candidates = list(candidates)
    fastest = min(time for _, time, _ in candidates)
    tied = [c for c in candidates if c[1] <= fastest * (1 + TIE)]
    return min(tied, key=lambda c: (c[2], -c[0].tile_m, c[1]))[0]


def step_of(
    loop,
    rates: Rates,
    *,
    warps: int,
    blocks: int,
    shared_bytes: int,
    stack_bytes: int,
    shared_factor: float = 1.0,
    copy_factor: float = 1.0,
) -> Step:
    """Simulate ``loop`` with 1 to ``blocks`` resident blocks.

    Spilled registers, ``stack_bytes`` a thread, lie in what the blocks' shared memory leaves of the L1.
    """
    l1_bytes = rates.l1_kib * KIB - blocks * (shared_bytes + KIB)
    options = {
        "shared_factor": shared_factor,
        "copy_factor": copy_factor,
        "local_in_l1": stack_bytes * 32 * warps * blocks <= l1_bytes,
    }
    outcomes = [simulate.run(loop, rates, warps=warps, blocks=n, **options) for n in range(1, blocks + 1)]
    return Step(tuple(o.cycles for o in outcomes), tuple(o.busy for o in outcomes), tuple(o.waits for o in outcomes))


def key_tiles(point: Point, workload: Workload, m_tile: int, first_reference: bool) -> tuple[int, int]:
    """(unmasked, masked) key tiles of a query tile, as kernels/schedule.py has them.

    With ``first_reference`` the tiles from which rows take their softmax references count as masked, whether the mask
    cuts them or not. That a warp skips tiles of which its rows see nothing is not in the model.
    """
    first = m_tile * point.tile_m
    last = min(first + point.tile_m, workload.query_len) - 1
    all_see = any_see = workload.key_len
    if workload.causal:
        offset = workload.key_len - workload.query_len
        all_see = min(max(first + offset + 1, 0), workload.key_len)
        any_see = min(max(last + offset + 1, 0), workload.key_len)
    end = math.ceil(any_see / point.tile_n)
    if first_reference:
        wanted = 1 if workload.causal else max(REFERENCED_KEYS - end * point.tile_n // FEWER_REFERENCED, 1)
        all_see = max(all_see - wanted, 0)
    unmasked = min(all_see // point.tile_n, end)
    if first_reference and point.query_held == "all":  # ForwardSpec.begins_with_two_tiles
        unmasked = min(unmasked, max(end - 2, 0))
    return unmasked, end - unmasked


def launch_order(tile_m: int, workload: Workload) -> Iterator[tuple[int, int, int]]:
    """(sequence, head, query tile) of each block, in the order in which a launch starts them; idle ones are left out.

    That of ``ForwardSpec.grid`` and kernels/schedule.py: x first, the last query tiles before the others, those of some
    heads and some sequences side by side; then in y the next heads, in z the next sequences.
    """
    tiles = math.ceil(workload.query_len / tile_m)
    heads_together = 1 << group_log2(workload.heads)
    sequences_together = 1 << sequences_log2(workload.batch, tiles)
    for first_sequence in range(0, workload.batch, sequences_together):
        sequences = range(first_sequence, min(first_sequence + sequences_together, workload.batch))
        for first_head in range(0, workload.heads, heads_together):
            heads = range(first_head, min(first_head + heads_together, workload.heads))
            for m_tile in reversed(range(tiles)):
                yield from ((sequence, head, m_tile) for sequence in sequences for head in heads)


def predict(point: Point, workload: Workload, rates: Rates, facts: CompiledFacts) -> Prediction:
    """Time and bound of ``workload`` with the tile ``point`` on the device of ``rates``."""
    m_tiles = math.ceil(workload.query_len / point.tile_m)
    device_bytes_a_cycle = rates.device_gbytes / rates.clock_ghz / rates.sms  # an SM's share
    first_load = (
        rates.device_latency
        + point.tile_m * workload.head_dim * ELEMENT_BYTES / device_bytes_a_cycle
        + _tile_bytes(point, workload) / rates.l2_bytes
    )
    ends = rates.block_cycles + facts.outside_cycles + first_load
    steps_of = [key_tiles(point, workload, m_tile, facts.first_reference) for m_tile in range(m_tiles)]
    work = [steps_of[m_tile] for _, _, m_tile in launch_order(point.tile_m, workload)]  # (unmasked, masked) by block
    cycles, tail = _makespan(work, ends, facts, rates.sms)
    clock = rates.clock_ghz * 1e9
    l2_cycles = l2_bytes(point, workload) / rates.l2_total_bytes
    device_cycles = device_bytes(workload) / (rates.device_gbytes * 1e9) * clock
    total = max(cycles, l2_cycles, device_cycles)
    seconds = total / clock + rates.launch_us * 1e-6

    resident = min(facts.blocks_per_sm, max(1, math.ceil(len(work) / rates.sms)))
    busy, waits = facts.step.busy[resident - 1], facts.step.waits[resident - 1]
    needed = workload.operations / 4096 * rates.mma_cycles / (4 * rates.sms)
    steps = sum(a + b for a, b in work)
    mma_cycles = steps * facts.mmas * point.warps * rates.mma_cycles / (4 * rates.sms)
    plain = sum(a + b for a, b in work) * facts.step.cycles[resident - 1] / resident / rates.sms
    masked = sum(b for _, b in work) * (facts.masked_step.cycles[resident - 1] - facts.step.cycles[resident - 1])
    masked = masked / resident / rates.sms + mma_cycles - needed
    parts = {
        "mma": needed,
        "masked": masked,
        "stalls": plain - mma_cycles,
        "ends": len(work) * ends / resident / rates.sms,
        "tail": tail,
        "memory": max(total - cycles, 0.0),
    }
    rest = sum(parts.values())
    parts = {name: max(value, 0.0) / rest for name, value in parts.items()}
    binds, why = _binding(busy, waits, cycles, l2_cycles, device_cycles, resident * point.warps / 4)
    return Prediction(
        seconds * 1e3,
        total,
        workload.operations / seconds / 1e12,
        needed / clock / seconds,
        binds,
        why,
        busy,
        waits,
        parts,
    )


def _binding(busy, waits, cycles, l2_cycles, device_cycles, warps) -> tuple[str, str]:
    if max(l2_cycles, device_cycles) > cycles:
        name = "l2" if l2_cycles >= device_cycles else "device"
        return name, f"{PIPE_NAMES[name]}: moving the bytes takes longer than the SMs do"
    pipe = max(busy, key=busy.get)
    if busy[pipe] >= BINDING:
        return pipe, f"{PIPE_NAMES[pipe]} is busy {busy[pipe]:.0%} of the loop"
    cause = max(waits, key=waits.get)
    text = {
        "dependency": "results of the instructions before",
        "scoreboard shared": "ldmatrix",
        "scoreboard mufu": "exponentials",
        "copies": "K and V to arrive",
        "barrier": "the other warps at the barrier",
        "issue": "an issue slot",
    }.get(cause, f"the {PIPE_NAMES.get(cause, cause)}")
    return "latency", (
        f"{warps:g} warps a sub-partition wait mostly for {text} ({waits[cause]:.0%} of their time); "
        f"the busiest is the {PIPE_NAMES[pipe]} at {busy[pipe]:.0%}"
    )


def _makespan(work: list[tuple[int, int]], ends: float, facts: CompiledFacts, sms: int) -> tuple[float, float]:
    """(cycles until the last block ends, the part of them in which the average SM has no block).

    Blocks start in order wherever there is room. A block's work is counted in cycles of an SM that it shares with R - 1
    others; where fewer share, it runs faster by what step.cycles says.
    """
    most = facts.blocks_per_sm
    # Cycles that one block needs for its work while n are resident: (unmasked step, masked step, ends).
    speed = [(facts.step.cycles[n - 1], facts.masked_step.cycles[n - 1]) for n in range(1, most + 1)]
    kinds = Counter(work)
    cost = {kind: [kind[0] * a + kind[1] * b + ends for a, b in speed] for kind in kinds}
    queue = iter(work)
    resident: list[list] = [[] for _ in range(sms)]  # [kind, share done] of each block
    clock, finished = [0.0] * sms, [0.0] * sms
    heap: list[tuple[float, int]] = []  # when the next block of an SM ends

    def refill(free: list[int]):
        """Give blocks to the SMs of ``free``, one each in turn, while they have room and there are any."""
        free = sorted(free, key=lambda sm: len(resident[sm]))
        while free:
            for sm in tuple(free):
                block = next(queue, None) if len(resident[sm]) < most else None
                if block is None:
                    free.remove(sm)
                else:
                    resident[sm].append([block, 0.0])

    def schedule(sm: int):
        n = len(resident[sm])
        if n:
            heapq.heappush(heap, (clock[sm] + min((1 - done) * cost[kind][n - 1] for kind, done in resident[sm]), sm))
        else:
            finished[sm] = clock[sm]

    refill(list(range(sms)))
    for sm in range(sms):
        schedule(sm)
    while heap:
        now = heap[0][0]
        ended = []
        while heap and heap[0][0] <= now * (1 + 1e-12):  # all that end together: the next blocks spread over them
            _, sm = heapq.heappop(heap)
            n = len(resident[sm])
            for block in resident[sm]:
                block[1] += (now - clock[sm]) / cost[block[0]][n - 1]
            clock[sm] = now
            resident[sm] = [block for block in resident[sm] if block[1] < 1 - 1e-9]
            ended.append(sm)
        refill(ended)
        for sm in ended:
            schedule(sm)
    end = max(finished)
    return end, end - sum(finished) / sms


def _tile_bytes(point: Point, workload: Workload) -> int:
    """Bytes of K and V of one step."""
    return 2 * point.tile_n * workload.head_dim * ELEMENT_BYTES


def l2_bytes(point: Point, workload: Workload) -> int:
    """What all blocks read of K and V, and Q once and O once."""
    tiles = range(math.ceil(workload.query_len / point.tile_m))
    steps = workload.batch * workload.heads * sum(sum(key_tiles(point, workload, m, False)) for m in tiles)
    return steps * _tile_bytes(point, workload) + 2 * _query_bytes(workload)


def _query_bytes(workload: Workload) -> int:
    return workload.batch * workload.heads * workload.query_len * workload.head_dim * ELEMENT_BYTES


def device_bytes(workload: Workload) -> int:
    """Q, K, V once and O once: heads that run together share K and V in the L2 (kernels/schedule.py)."""
    keys = workload.batch * workload.kv_heads * workload.key_len * workload.head_dim * ELEMENT_BYTES
    return 2 * _query_bytes(workload) + 2 * keys
