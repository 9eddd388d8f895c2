"""How many blocks share a sequence's keys, and which kernels a dense call is better split with, if at all.

Blocks of up to 16 rows are the memory's work: splits fill the SMs (``choose_splits``). Blocks of more rows are the
tensor cores' work. For those a model counts time, and the same model tells what is fastest for a call of
``flash_attn_func`` (``divide``). The forward kernel gives each tile of queries of a head to one block, which walks over
all keys; few tiles on many keys (a chunk of a prompt, a short question about a long document) leave SMs idle, or with
one block where they hold two. Then several of its blocks may share a tile's keys, at the price of a combination; or the
kernels for KV caches do, with the heads of a KV head packed into tiles of 64 rows, at the same price and with less
speed a block, but with fewer rows that are not there (docs/decode.md).

Time is counted in row-keys: scores that one SM computes, with what belongs to them, when it is full of blocks of the
forward kernel. On an H200 that is 6.8 a nanosecond at head_dim 128.
"""

import functools
from dataclasses import dataclass, replace

from . import decode_spec, tiling
from .arch import Architecture
from .decode_spec import FEW_SPLITS, LINE_BYTES, MAX_SPLITS, CombineSpec, DecodeSpec
from .problem import Problem
from .spec import ForwardSpec

CACHE, FORWARD = "cache", "forward"

# Steps (a tile of each of a block's rings) that a split has at least: with one block an SM at a time, with two, and
# with two where every SM has one anyway and rows are narrow; and from how many on the second one gains nothing.
FEWEST_STEPS, FEWEST_STEPS_OF_TWO, FEWEST_STEPS_OF_TWO_NARROW, MANY_STEPS = 2, 4, 16, 256
BLOCK_STEPS = 2  # what a block's start and end are worth, about
NEARLY_BEST = 1.05  # fewer splits leave less to combine

# Measured on an H200 at head_dim 128, 54 calls of docs/decode.md's kind: with these numbers the model picks the faster
# kernel and its number of splits, or what takes at most 2% longer.
SPLIT_SPEED = 0.67  # the tile of 64 rows beside the forward kernel's: 305 to 335 TFLOP/s and 460
# Of its speed, what an SM reaches with one block where it holds two: the forward kernel (1 x 512 on 8192 and on 32768,
# 128 tiles: 168 and 667 us on an H200), and the kernels for KV caches. Those reach 0.85 if every SM has one; but
# launches of about as many blocks as SMs leave some SMs with two and others with none.
LONE_SPEED, SPLIT_LONE_SPEED = 0.93, 0.65
# What a part costs a row, written and read in float32, half a nanosecond of the device, in which 132 SMs compute 450
# row-keys; and the launch of the combination, 1.2 us.
PART_KEYS, COMBINING_KEYS = 450, 8_000
FEWEST_KEYS = 256  # of a split: below, its start and its end are most of it
# What the start and the end of a block of the forward kernel take, as keys of its tile: 8,400 cycles, in which its main
# loop passes 3 tiles of 48 (docs/performance.md, "Where a block's time goes").
BLOCK_KEYS = 144
WORTH_IT = 0.9  # of the forward kernel's time: the model is no better than that
REGISTERS = 256  # a thread, about: what both kernels take


def choose_splits(spec: DecodeSpec, arch: Architecture, sms: int, blocks: int, capacity: int) -> int:
    """How many splits of each sequence use a GPU of ``sms`` SMs best, from what the host knows.

    Arguments:
        blocks: those of a launch with one split. capacity: the most keys that a sequence can have.

    One block keeps an SM's share of the memory busy; two start and end in each other's shade, which pays where splits
    are short, and with rows of up to 128 bytes, which take more steps. Microseconds on an H200, one block an SM and
    two: 1 x 8192 keys 13.6 and 13.4, 4 x 8192 40.9 and 38.5, 8 x 8192 83.8 and 68.2, 16 x 8192 127.0 and 130.7;
    head_dim 64, 16 x 8192 76.5 and 69.4; FP8, 16 x 8192 80.1 and 70.0, 16 x 32768 252 and 256.
    """
    if spec.warps_m > 1:
        return min_time(spec, arch, sms, blocks, Keys(capacity, capacity))[1]
    steps = -(-capacity // (spec.warps_n * spec.tile_n))
    one = _fewest_steps(sms, blocks, steps, FEWEST_STEPS)
    waits_for_scales = "block" in (spec.k_scale, spec.v_scale)  # beside which two blocks hide more than one
    many = steps > one * MANY_STEPS and not waits_for_scales
    if many or (blocks * 2 > sms and spec.key_bytes > LINE_BYTES):
        return one
    fewest = FEWEST_STEPS_OF_TWO if blocks * 2 <= sms else FEWEST_STEPS_OF_TWO_NARROW
    two = _fewest_steps(sms * min(2, _block_of(spec, arch).held), blocks, steps, fewest)
    return two if blocks * two > sms else one


def _fewest_steps(slots: int, blocks: int, steps: int, fewest: int) -> int:
    """The smallest number of splits, each of ``fewest`` steps or more, whose time is within 5% of the best.

    Time is the steps that a slot for blocks makes one after the other, with what a block's start and end are worth.
    """
    most = max(1, min(MAX_SPLITS, steps // fewest))
    cost = {n: -(-blocks * n // slots) * (-(-steps // n) + BLOCK_STEPS) for n in range(1, most + 1)}
    best = min(cost.values())
    return min(n for n, steps_in_turn in cost.items() if steps_in_turn <= NEARLY_BEST * best)


def split_spec(spec: ForwardSpec) -> ForwardSpec:
    """What computes the parts of calls that ``spec`` computes whole; the combination adds the sink."""
    return replace(spec, split=True, features=replace(spec.features, sink=False))


def combining(spec: ForwardSpec, splits: int, overlap: bool) -> CombineSpec:
    """What combines the parts of calls that ``spec`` computes whole; overlap: as in ``CombineSpec``."""
    few = splits <= FEW_SPLITS
    return CombineSpec(spec.dtype, spec.value_dim, sink=spec.features.sink, overlap=overlap, few=few, logits=True)


@dataclass(frozen=True)
class Keys:
    """How many keys a query sees: about the mean, and the most that one of them sees."""

    mean: int
    most: int


@dataclass(frozen=True)
class Division:
    """Which kernels compute a call, FORWARD or CACHE, and how many blocks share a tile's keys."""

    kernels: str
    splits: int


@functools.lru_cache(maxsize=1024)
def divide(
    problem: Problem, keys: "Keys", arch: Architecture, sms: int, splitting: tuple[str, ...] = (FORWARD, CACHE)
) -> Division:
    """What is fastest for ``problem``. splitting: the kernels that may split its keys; without any it is the forward
    kernel, unsplit."""
    forward = tiling.choose_for(problem, arch, sms)
    tiles = problem.batch * problem.heads * -(-problem.query_len // forward.tile_m)
    rows = problem.query_len * (problem.heads // problem.kv_heads)
    found = []
    if FORWARD in splitting:
        found.append((*min_time(forward, arch, sms, tiles, keys), FORWARD))
    if CACHE in splitting:
        cache = decode_spec.choose(problem.dtype, problem.dtype, problem.head_dim, problem.value_dim, rows)
        blocks = problem.batch * problem.kv_heads * cache.tiles_m(rows)
        found.append((*min_time(cache, arch, sms, blocks, keys), CACHE))
    whole = time(forward, arch, sms, tiles, keys, 1)
    best, splits, kernels = min(found, default=(whole, 1, FORWARD))
    return Division(kernels, splits) if best < WORTH_IT * whole else Division(FORWARD, 1)


@functools.lru_cache(maxsize=1024)
def min_time(
    spec: ForwardSpec | DecodeSpec, arch: Architecture, sms: int, blocks: int, keys: Keys
) -> tuple[float, int]:
    """(time, splits) of the fastest number of splits; ``blocks``: those of a launch with one split."""
    block = _block_of(spec, arch)
    waves = 4  # more gain nothing
    most = max(1, min(MAX_SPLITS, keys.mean // FEWEST_KEYS, waves * sms * block.held // blocks))
    return min((_time(block, sms, blocks, keys, splits), splits) for splits in range(1, most + 1))


def time(spec: ForwardSpec | DecodeSpec, arch: Architecture, sms: int, blocks: int, keys: Keys, splits: int) -> float:
    """What ``splits`` splits of the keys take, in row-keys; ``blocks``: those of a launch with one split."""
    return _time(_block_of(spec, arch), sms, blocks, keys, splits)


@dataclass(frozen=True)
class _Block:
    """What the model knows of a kernel's blocks: rows, how many an SM holds, their speed beside the forward kernel's,
    what of it an SM reaches with one, and what a start and an end are worth in keys."""

    rows: int
    held: int
    speed: float
    lone: float
    start: int


@functools.lru_cache(maxsize=64)
def _block_of(spec: ForwardSpec | DecodeSpec, arch: Architecture) -> _Block:
    by_shared = arch.blocks_held(spec.shared_bytes)
    held = max(1, min(by_shared, arch.registers // (REGISTERS * spec.threads), arch.threads // spec.threads))
    if isinstance(spec, ForwardSpec):
        return _Block(spec.tile_m, held, 1.0, LONE_SPEED, BLOCK_KEYS)
    return _Block(spec.tile_m, held, SPLIT_SPEED, SPLIT_LONE_SPEED, 0)  # start and end are in its speed


def _time(block: _Block, sms: int, blocks: int, keys: Keys, splits: int) -> float:
    attending = (block.rows / block.speed) * max(
        _blocks_in_turn(blocks * splits, sms, block) * (keys.mean / splits + block.start),
        _blocks_in_turn(1, sms, block) * (keys.most / splits + block.start),  # the longest block alone
    )
    if splits == 1:
        return attending
    return attending + blocks * block.rows * splits * PART_KEYS / sms + COMBINING_KEYS


def _blocks_in_turn(blocks: int, sms: int, block: _Block) -> float:
    """How many blocks' work the busiest SM does, in units of a block at the SM's full speed."""
    full, rest = divmod(-(-blocks // sms), block.held)
    if rest == 0:
        return full * block.held
    speed = block.lone + (1.0 - block.lone) * (rest - 1) / (block.held - 1)
    return full * block.held + rest / speed
