"""What the decode kernels are specialised on: plain data, no torch."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from .arch import KIB
from .cache_spec import DTYPES, FP8_DTYPES, SCALE_KINDS, VECTOR_BYTES, pair, scales
from .parameters import Parameter, ScalarParameter, TensorParameter, partial_parameters, vector
from .spec import MAX_HEAD_DIM, packed_tiles

MAX_SPLITS = 256  # the combining block keeps a weight for each
WARP_M = 16  # rows of one mma.sync: what a warp computes
WARP_COLUMNS = 128  # most columns of the output a warp: 64 accumulator registers beside up to 64 of Q
LINE_BYTES = 128  # all banks of shared memory
COMBINE_THREADS = 128
FEW_SPLITS = 8  # up to so many are combined by kernels/combine_few.py: a thread loads all that it adds up at once
EPILOGUE_PAD = 8  # floats between rows of O in shared memory, so that the rows of a quad meet different banks

# A ring for each group of warps: with three stages two tiles are in flight while one is used.
MIN_STAGES, MAX_STAGES = 3, 6
# Bytes of K and V that are worth a step's fixed cost. Smaller tiles in more stages beat larger ones in fewer (H200,
# FP8, head_dim 128, 64 x 8192: 16 keys in 6 stages 261 us, 32 in 3 stages 296 us).
STEP_BYTES = 4 * KIB
# What a block takes on every architecture: the most that sm_120 gives. One such block keeps 64 KiB in flight, more than
# an SM of an H200 needs (4.4 TB/s over 132 SMs times 1.2 us are 40).
SHARED_BUDGET = 99 * KIB
# Tiles of 64 rows are the tensor cores' work, which one warp a sub-partition leaves idle during its softmax: two blocks
# must fit an SM of sm_120, 100 KiB of which each takes 1 for the system.
SHARED_OF_TWO = 49 * KIB

# Probabilities in float16 are 2^7 of themselves: they may grow to 2^8 (softmax.RESCALE_SLACK), and 2^15 is still far
# from 65504, while small ones keep seven bits more before they become subnormal (2^-14).
P_EXPONENT = 7
# A sum of probabilities over the scales of V, see kernels/decode.py: times 2^-36 it stays finite for scales from 2^-126
# (the smallest normal number) to 2^90.
SCALED_SUM_EXPONENT = -36
LARGEST_SCALE = 2.0**90


def _rows(name: str, dtype: str, width: int, element_bytes: int) -> TensorParameter:
    """(batch or pages, length, heads, width): rows that start at multiples of 16 bytes."""
    divisor = VECTOR_BYTES // element_bytes
    return TensorParameter(name, dtype, (None, None, None, width), (None, None, None, 1), divisor=divisor)


def out_parameter(dtype: str, value_dim: int) -> TensorParameter:
    """(batch, query_len, heads, value_dim), contiguous."""
    return TensorParameter("out", dtype, (None, None, None, value_dim), (None, None, None, 1), divisor=8, written=True)


LSE = TensorParameter("lse", "float32", (None,) * 3, (None, None, 1), written=True)  # (batch, heads, query_len)


@dataclass(frozen=True)
class DecodeSpec:
    """All that the decode kernel is specialised on: what is not here is a run-time argument.

    dtype           "float16" or "bfloat16": of queries and output
    cache_dtype     dtype, or "float8_e4m3fn" or "float8_e5m2"
    head_dim        elements of a query or key row: a multiple of 8, of 16 for an FP8 cache; value_dim: of a value
    warps_m         warps along the packed rows (query x head of one KV head), 16 each
    warps_v         warps along the columns of V and the output; all of them compute all scores
    warps_n         groups of warps_m x warps_v warps; each has a ring of tiles of its own and every ``warps_n``-th tile
    tile_n          keys of a tile: 16 or 32, one bit of a word each
    stages          tiles of a ring, at least 3
    paged           rows of the cache are found through a page table
    indexed         (not paged) through cache_batch_idx
    leftpad         sequences begin at cache_leftpad
    every_slot      the length of each sequence is the number of slots, and no lengths are read
    varlen          queries packed along the rows, told apart by cumulative lengths
    row_mask        rows see different keys: more than one query, and a bound on the left or the right
    softcap, alibi, sink    as in the forward kernel
    k_scale, v_scale        "unit", "sequence" or "block": what an FP8 cache is multiplied by
    overlap         the kernel that combines may be launched before this one's end (sm_90 and later)
    """

    dtype: str
    cache_dtype: str
    head_dim: int
    value_dim: int
    warps_m: int
    warps_v: int
    warps_n: int
    tile_n: int
    stages: int
    paged: bool = False
    indexed: bool = False
    leftpad: bool = False
    every_slot: bool = False
    varlen: bool = False
    row_mask: bool = False
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    k_scale: str = "unit"
    v_scale: str = "unit"
    overlap: bool = False

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, takes {' or '.join(map(repr, DTYPES))}")
        if self.cache_dtype not in (self.dtype, *FP8_DTYPES):
            raise ValueError(f"cache_dtype: got {self.cache_dtype!r}, takes {self.dtype!r} or a float8 type")
        multiple = VECTOR_BYTES // self.cache_bytes
        for name in ("head_dim", "value_dim"):
            if getattr(self, name) % multiple or not 0 < getattr(self, name) <= MAX_HEAD_DIM:
                raise ValueError(
                    f"{name}: got {getattr(self, name)}, takes multiples of {multiple} from {multiple} to "
                    f"{MAX_HEAD_DIM} for a cache of {self.cache_dtype}"
                )
        for name in ("warps_m", "warps_v", "warps_n"):
            if getattr(self, name) not in (1, 2, 4, 8):
                raise ValueError(f"{name}: got {getattr(self, name)}, takes 1, 2, 4 or 8")
        if self.tile_n not in (16, 32):
            raise ValueError(f"tile_n: got {self.tile_n}, takes 16 or 32")
        if self.stages < MIN_STAGES:
            raise ValueError(f"stages: got {self.stages}, takes {MIN_STAGES} or more")
        for name in ("k_scale", "v_scale"):
            if getattr(self, name) not in SCALE_KINDS:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes one of {', '.join(SCALE_KINDS)}")
            if getattr(self, name) != "unit" and not self.fp8:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes 'unit' with a cache of 16-bit numbers")
        if self.paged and self.indexed:
            raise ValueError("indexed: got True with paged, takes one of the two")

    @property
    def title(self) -> str:
        """One line for a person: "decode, bfloat16, head_dim 128, paged, row mask, 16 rows on 4 warps".

        Tells the kernels of one architecture apart (``overlap`` goes with it)."""
        words = ["decode", self.dtype, f"head_dim {pair(self.head_dim, self.value_dim)}"]
        if self.fp8:
            words.append(f"{self.cache_dtype} cache, scales {pair(self.k_scale, self.v_scale)}")
        chosen = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is True and f.name != "overlap"]
        words += [name.replace("_", " ") for name in chosen]
        return ", ".join([*words, f"{self.tile_m} rows on {self.threads // 32} warps"])

    @property
    def fp8(self) -> bool:
        return self.cache_dtype in FP8_DTYPES

    @property
    def cache_bytes(self) -> int:
        """Bytes of one element of the cache."""
        return 1 if self.fp8 else 2

    @property
    def logits(self) -> bool:
        """Whether the softmax sees logits; else raw scores, which it scales itself."""
        return self.fp8 or self.softcap or self.alibi

    @property
    def sum_exponent(self) -> int:
        """A row's sum is 2^-sum_exponent times the sum of its probabilities."""
        p_exponent = P_EXPONENT if self.mma_dtype == "float16" else 0
        return -p_exponent - self.output_exponent

    @property
    def output_exponent(self) -> int:
        """A row's output is 2^output_exponent times the quotient of its accumulator and its sum."""
        return SCALED_SUM_EXPONENT if self.v_scale == "block" else 0

    @property
    def mma_dtype(self) -> str:
        """What the MMAs multiply: every FP8 number is a float16."""
        return "float16" if self.fp8 else self.dtype

    @property
    def tile_m(self) -> int:
        """Packed rows of a block."""
        return WARP_M * self.warps_m

    @property
    def group_threads(self) -> int:
        """Threads that share a ring."""
        return 32 * self.warps_m * self.warps_v

    @property
    def threads(self) -> int:
        return self.group_threads * self.warps_n

    def width(self, dim: int, warps: int = 1) -> int:
        """Bytes of a row of ``dim`` elements in shared memory: whole steps of one ldmatrix.x4, 32 bytes.

        Where warps share the columns each has whole lines of 128 bytes, in which the swizzle works (kernels/pages.py).
        """
        step = 32 if warps == 1 else LINE_BYTES * warps
        return -(-dim * self.cache_bytes // step) * step

    @property
    def key_bytes(self) -> int:
        return self.width(self.head_dim)

    @property
    def value_bytes(self) -> int:
        return self.width(self.value_dim, self.warps_v)

    @property
    def value_width(self) -> int:
        """Elements of a padded value row, and columns of the accumulator."""
        return self.value_bytes // self.cache_bytes

    @property
    def stage_bytes(self) -> int:
        """K and V of one tile."""
        return self.tile_n * (self.key_bytes + self.value_bytes)

    @property
    def ring_bytes(self) -> int:
        """The rings of K, then those of V."""
        return self.warps_n * self.stages * self.stage_bytes

    @property
    def value_rings(self) -> int:
        """Where in shared memory the rings of V begin, behind those of K."""
        return self.warps_n * self.stages * self.tile_n * self.key_bytes

    @property
    def output_pitch(self) -> int:
        """Floats from row to row of O in shared memory."""
        return self.value_width + EPILOGUE_PAD

    @property
    def epilogue_bytes(self) -> int:
        """O of every warp in float32, then the reference and the sum of its rows."""
        return self.warps_n * self.tile_m * (self.output_pitch + 2) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the rings, and in their place at the end the parts to merge."""
        return max(self.ring_bytes, self.epilogue_bytes)

    def combining(self, splits: int) -> "CombineSpec":
        """What combines as many splits of this kernel."""
        exponents = (self.sum_exponent, self.output_exponent)
        return CombineSpec(self.dtype, self.value_dim, *exponents, self.sink, self.overlap, splits <= FEW_SPLITS)

    def tiles_m(self, rows):
        """Blocks for ``rows`` packed rows. Takes Python and DSL integers alike."""
        return (rows + self.tile_m - 1) // self.tile_m

    def grid(self, batch, query_len, heads, kv_heads, splits):
        """Thread blocks of a launch (x, y, z): KV heads of each sequence, row tiles, splits.

        KV heads come first: their rows of a key lie side by side in memory, and blocks that start together read them
        together. With ``varlen`` x has the row tiles of all sequences, some of them idle, and ``query_len`` counts all
        queries. Takes Python integers (emulator) and DSL integers (launch code) alike.
        """
        rows = query_len * (heads // kv_heads)
        if self.varlen:
            return (packed_tiles(batch, rows, self.tile_m) * kv_heads, 1, splits)
        return (batch * kv_heads, self.tiles_m(rows), splits)

    def parameters(self) -> tuple[Parameter | None, ...]:
        """The kernel's arguments in order; what this specification does not need is None."""
        cache = "uint8" if self.fp8 else self.dtype
        return (
            _rows("q", self.dtype, self.head_dim, 2),
            _rows("k_cache", cache, self.head_dim, self.cache_bytes),
            _rows("v_cache", cache, self.value_dim, self.cache_bytes),
            out_parameter(self.dtype, self.value_dim),
            LSE,
            *partial_parameters(self.value_dim, written=True),
            None if self.every_slot else vector("cache_seqlens", "int32"),
            vector("cu_seqlens_q", "int32") if self.varlen else None,
            TensorParameter("block_table", "int32", (None, None), (None, None)) if self.paged else None,
            vector("cache_batch_idx", "int32") if self.indexed else None,
            vector("cache_leftpad", "int32") if self.leftpad else None,
            scales("k_descale", self.k_scale),
            scales("v_descale", self.v_scale),
            TensorParameter("alibi_slopes", "float32", (None, None), (None, None)) if self.alibi else None,
            vector("learnable_sink", "float32") if self.sink else None,
            ScalarParameter("scale", "float32"),
            ScalarParameter("softcap", "float32") if self.softcap else None,
            ScalarParameter("window_left", "int32"),
            ScalarParameter("window_right", "int32"),
            ScalarParameter("splits", "int32"),
        )

    def build(self) -> Any:
        """The kernel's launch code, for ``cute.compile``. Loads the compiler."""
        from .kernels.decode import Decode

        return Decode(self)


@dataclass(frozen=True)
class CombineSpec:
    """All that the kernel which combines splits is specialised on.

    dtype           of the output
    value_dim       elements of an output row
    sum_exponent, output_exponent    of ``DecodeSpec``
    sink            a row has one more logit
    overlap         of ``DecodeSpec``
    few             for up to FEW_SPLITS splits
    logits          the parts' references are logits in natural units, without exponents (the forward kernel's): the
                    lowest finite float may be one, and in base 2 would become -inf
    """

    dtype: str
    value_dim: int
    sum_exponent: int = 0
    output_exponent: int = 0
    sink: bool = False
    overlap: bool = False
    few: bool = False
    logits: bool = False

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, takes {' or '.join(map(repr, DTYPES))}")
        if self.value_dim % 8 or not 0 < self.value_dim <= MAX_HEAD_DIM:
            raise ValueError(f"value_dim: got {self.value_dim}, takes multiples of 8 from 8 to {MAX_HEAD_DIM}")
        if self.logits and (self.sum_exponent or self.output_exponent):
            raise ValueError("logits: got True with exponents, takes one of the two")

    @property
    def title(self) -> str:
        """One line for a person, different for each of one architecture."""
        sink = ", sink" if self.sink else ""
        scaled = self.sum_exponent or self.output_exponent
        exponents = f", exponents {pair(self.sum_exponent, self.output_exponent)}" if scaled else ""
        few = "few " if self.few else ""
        logits = ", logits" if self.logits else ""
        return f"combining {few}splits, {self.dtype}, value_dim {self.value_dim}{sink}{exponents}{logits}"

    @property
    def threads(self) -> int:
        return COMBINE_THREADS

    @property
    def lanes(self) -> int:
        """Threads that share a row of one split, four floats each: a power of two."""
        return 1 << (self.value_dim // 4 - 1).bit_length()

    @property
    def groups(self) -> int:
        """Splits of a row that are read side by side, or rows if the splits are few."""
        return self.threads // self.lanes

    @property
    def shared_bytes(self) -> int:
        """The splits' weights, the row's reference and sum, each group's part of the row; nothing for few splits."""
        return 0 if self.few else 4 * (MAX_SPLITS + self.groups * self.lanes * 4)

    def grid(self, rows):
        """Thread blocks of a launch (x, y, z). Takes Python and DSL integers alike."""
        return ((rows + self.groups - 1) // self.groups if self.few else rows, 1, 1)

    def parameters(self) -> tuple[Parameter | None, ...]:
        """The kernel's arguments in order; what this specification does not need is None."""
        return (
            *partial_parameters(self.value_dim, written=False),
            out_parameter(self.dtype, self.value_dim),
            LSE,
            vector("learnable_sink", "float32") if self.sink else None,
            ScalarParameter("scale_log2", "float32"),
        )

    def build(self) -> Any:
        """The kernel's launch code, for ``cute.compile``. Loads the compiler."""
        if self.few:
            from .kernels.combine_few import CombineFew

            return CombineFew(self)
        from .kernels.combine import Combine

        return Combine(self)


def choose(dtype: str, cache_dtype: str, head_dim: int, value_dim: int, rows: int, **options: bool | str) -> DecodeSpec:
    """The specification for ``rows`` packed rows (query_len x query heads of a KV head).

    Up to 16 rows fill one MMA, and four warps share the keys, each with its own tiles: the work is memory's. More rows
    are four warps' own, 16 each, over the same keys, in blocks of 64, two of which fit an SM where they can. Wide
    values are two warps' work, or their accumulators would not fit the registers. Tiles are as long as the stages that
    must be in flight leave them; where not even 16 keys fit, fewer warps share the keys.
    """
    warps_m, warps_n = (1, 4) if rows <= WARP_M else (4, 1)
    warps_v = 1 if value_dim <= WARP_COLUMNS else 2
    if warps_v * warps_n > 4:
        warps_n //= warps_v
    while True:
        for tile_n in (32, 16):
            tiles = (warps_m, warps_v, warps_n, tile_n, MIN_STAGES)
            spec = DecodeSpec(dtype, cache_dtype, head_dim, value_dim, *tiles, **options)
            longer_than_worth = tile_n > 16 and warps_m == 1 and spec.stage_bytes >= 2 * STEP_BYTES
            if spec.shared_bytes <= SHARED_BUDGET and not longer_than_worth:
                budget = SHARED_OF_TWO if warps_m > 1 and spec.shared_bytes <= SHARED_OF_TWO else SHARED_BUDGET
                stages = min(MAX_STAGES, budget // (spec.warps_n * spec.stage_bytes))
                return dataclasses.replace(spec, stages=stages)
        warps_n //= 2
