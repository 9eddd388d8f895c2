"""How many blocks share a sequence's keys, and which dense calls are better split at all.

Blocks of up to 16 rows are the memory's work: splits fill the SMs (``choose_splits``). Blocks of 64 rows are the tensor
cores' work. For those a model counts time, and the same model tells which calls of ``flash_attn_func`` the kernels for
KV caches compute faster than the forward kernel does. That gives each tile of queries of a head to one block, which
walks over all keys; few tiles on many keys (a chunk of a prompt, a short question about a long document) leave most SMs
idle. The kernels for KV caches split the keys, with the heads of a KV head packed into tiles of 64 rows, at less speed
a block and at the price of a combination (docs/decode.md).

Time is counted in row-keys: scores that one SM computes, with what belongs to them, when it is full of blocks of the
forward kernel. On an H200 that is 6.8 a nanosecond at head_dim 128.
"""

import functools

from . import decode_spec, tiling
from .arch import Architecture
from .decode_spec import LINE_BYTES, MAX_SPLITS, DecodeSpec
from .problem import Problem
from .spec import ForwardSpec

# Steps (a tile of each of a block's rings) that a split has at least: with one block an SM at a time, with two, and
# with two where every SM has one anyway and rows are narrow; and from how many on the second one gains nothing.
FEWEST_STEPS, FEWEST_STEPS_OF_TWO, FEWEST_STEPS_OF_TWO_NARROW, MANY_STEPS = 2, 4, 16, 256
BLOCK_STEPS = 2  # what a block's start and end are worth, about
NEARLY_BEST = 1.05  # fewer splits leave less to combine

# Measured on an H200 at head_dim 128, 54 calls of docs/decode.md's kind: with these numbers the model picks the faster
# kernel and its number of splits, or what takes at most 2% longer.
SPLIT_SPEED = 0.67  # the tile of 64 rows beside the forward kernel's: 305 to 335 TFLOP/s and 460
# Of its speed, what an SM reaches with one block where it holds two: the forward kernel 0.77, the split kernel 0.85 if
# every SM has one; but launches of about as many blocks as SMs leave some SMs with two and others with none.
LONE_SPEED = 0.65
# What a part costs a row, written and read in float32, half a nanosecond of the device, in which 132 SMs compute 450
# row-keys; and the launch of the combination, 1.2 us.
PART_KEYS, COMBINING_KEYS = 450, 8_000
FEWEST_KEYS = 256  # of a split: below, its start and its end are most of it
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
        return min_time(spec, arch, sms, blocks, capacity)[1]
    steps = -(-capacity // (spec.warps_n * spec.tile_n))
    one = _fewest_steps(sms, blocks, steps, FEWEST_STEPS)
    waits_for_scales = "block" in (spec.k_scale, spec.v_scale)  # beside which two blocks hide more than one
    many = steps > one * MANY_STEPS and not waits_for_scales
    if many or (blocks * 2 > sms and spec.key_bytes > LINE_BYTES):
        return one
    fewest = FEWEST_STEPS_OF_TWO if blocks * 2 <= sms else FEWEST_STEPS_OF_TWO_NARROW
    two = _fewest_steps(sms * min(2, _held(spec, arch)), blocks, steps, fewest)
    return two if blocks * two > sms else one


def _fewest_steps(slots: int, blocks: int, steps: int, fewest: int) -> int:
    """The smallest number of splits, each of ``fewest`` steps or more, whose time is within 5% of the best.

    Time is the steps that a slot for blocks makes one after the other, with what a block's start and end are worth.
    """
    most = max(1, min(MAX_SPLITS, steps // fewest))
    cost = {n: -(-blocks * n // slots) * (-(-steps // n) + BLOCK_STEPS) for n in range(1, most + 1)}
    best = min(cost.values())
    return min(n for n, steps_in_turn in cost.items() if steps_in_turn <= NEARLY_BEST * best)


@functools.lru_cache(maxsize=1024)
def splits_pay(problem: Problem, keys: int, arch: Architecture, sms: int) -> bool:
    """Whether ``problem``, each of whose queries sees about ``keys`` keys, is faster on the kernels for KV caches."""
    forward = tiling.choose(problem.dtype, problem.head_dim, problem.value_dim, problem.features, arch)
    tiles = problem.batch * problem.heads * -(-problem.query_len // forward.tile_m)
    whole = _blocks_in_turn(tiles, sms, _held(forward, arch)) * forward.tile_m * keys
    rows = problem.query_len * (problem.heads // problem.kv_heads)
    split = decode_spec.choose(problem.dtype, problem.dtype, problem.head_dim, problem.value_dim, rows)
    blocks = problem.batch * problem.kv_heads * split.tiles_m(rows)
    return min_time(split, arch, sms, blocks, keys)[0] < WORTH_IT * whole


@functools.lru_cache(maxsize=1024)
def min_time(spec: DecodeSpec, arch: Architecture, sms: int, blocks: int, keys: int) -> tuple[float, int]:
    """(time, splits) of the fastest number of splits; ``blocks``: those of a launch with one split."""
    held = _held(spec, arch)

    def time(splits: int) -> float:
        attending = _blocks_in_turn(blocks * splits, sms, held) * spec.tile_m * (keys / splits) / SPLIT_SPEED
        if splits == 1:
            return attending
        return attending + blocks * spec.tile_m * splits * PART_KEYS / sms + COMBINING_KEYS

    waves = 4  # more gain nothing
    most = max(1, min(MAX_SPLITS, keys // FEWEST_KEYS, waves * sms * held // blocks))
    return min((time(splits), splits) for splits in range(1, most + 1))


def _held(spec: ForwardSpec | DecodeSpec, arch: Architecture) -> int:
    """Blocks that an SM holds at a time."""
    by_shared = arch.shared_sm_bytes // (spec.shared_bytes + arch.shared_reserved_bytes)
    return max(1, min(by_shared, arch.registers // (REGISTERS * spec.threads), arch.threads // spec.threads))


def _blocks_in_turn(blocks: int, sms: int, held: int) -> float:
    """How many blocks' work the busiest SM does, in units of a block at the SM's full speed."""
    full, rest = divmod(-(-blocks // sms), held)
    if rest == 0:
        return full * held
    speed = LONE_SPEED + (1.0 - LONE_SPEED) * (rest - 1) / (held - 1)
    return full * held + rest / speed
