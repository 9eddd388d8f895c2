"""What a kernel is specialised on, as plain data: the compile key, and nothing but the compile key."""

from dataclasses import dataclass, fields
from typing import Any

from .parameters import Parameter, ScalarParameter, TensorParameter, partial_parameters, rows, vector

MAX_GRID_YZ = 65_535  # blocks in y and in z (CUDA C++ Programming Guide, "Technical Specifications")
MAX_HEAD_DIM = 256  # wider rows of O do not fit a thread's registers
DTYPES = ("bfloat16", "float16")
MASK_DTYPES = ("bool", "bfloat16", "float16", "float32")
QUERY_HELD = ("none", "half", "all")

# Elements of a row in shared memory, and the last of them the limit: multiples of 32 that the copies' lanes divide.
_SHARED_WIDTHS = (32, 64, 96, 128, 192, 256)
# A scale of zero becomes the smallest subnormal number: with it every finite score vanishes beside 1 (2^128 of them are
# 2^-21), while -inf stays -inf, where -inf times 0 would be NaN. Nothing that c meets flushes subnormals.
SMALLEST_SCALE = 2.0**-149
# A row's largest probability has no rounding error if it is the one that the others are relative to. In a row of 512
# normal logits that is 6% of the RMS error, in one of 1024 5% (measured: 1.083 and 1.054 with references of 32 and 64
# of 512 keys, 1.052 with 16 of 1024). References of 140 keys, less 1 for every 13 of the row, leave less than 5%.
REFERENCED_KEYS, FEWER_REFERENCED = 140, 13
VECTOR_ELEMENTS = 8  # 16 bytes of a 16-bit type: what one cp.async moves
SWIZZLED_COLUMNS = 64  # of the atom of wide rows (kernels/layouts.py): tiles lie in blocks of so many columns


@dataclass(frozen=True)
class Features:
    """Options of a call that change the code; what they are set to are run-time arguments.

    left, right   the window is bounded on that side; causal is a bound on the right
    varlen        sequences packed along the rows, told apart by cumulative lengths
    softcap       softcap * tanh(logit / softcap)
    alibi         a slope a head times the distance is subtracted
    sink          one more logit a head, without a value
    mask          "bool", or the dtype of what is added to the logits, or None
    """

    left: bool = False
    right: bool = False
    varlen: bool = False
    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    mask: str | None = None

    def __post_init__(self):
        if self.mask not in (None, *MASK_DTYPES):
            raise ValueError(f"mask: got {self.mask!r}, takes one of {', '.join(MASK_DTYPES)} or None")
        if self.mask and self.varlen:
            raise ValueError("mask: takes calls of one length a batch, not packed sequences")

    @property
    def changes_scores(self) -> bool:
        """Whether a logit is more than a scaled product."""
        return self.softcap or self.alibi or self.mask is not None

    @property
    def title(self) -> str:
        """A few words: "causal", "left, right, softcap", "full"."""
        names = [field.name for field in fields(self) if getattr(self, field.name)]
        if self.right and not self.left:
            names[names.index("right")] = "causal"
        if self.mask:
            names[names.index("mask")] = f"{self.mask} mask"
        return ", ".join(names) if self.right or self.left else ", ".join(["full", *names])


FULL, CAUSAL = Features(), Features(right=True)


@dataclass(frozen=True)
class ForwardSpec:
    """All that the forward kernel is specialised on: what is not here is a run-time argument.

    dtype       "float16" or "bfloat16"
    head_dim    elements of a query or key row, a multiple of 8 up to 256
    value_dim   elements of a value or output row, likewise
    features    options that change the code
    tile_m      query rows a block
    tile_n      keys a step
    warps       warps a block; each owns tile_m / warps rows
    stages      tiles in the K ring and in the V ring, at least 2
    reference   what the softmax subtracts: "trailing" follows the row maximum in every tile; "first" (bfloat16 only: it
                needs an exponent range as wide as float32's) keeps that of the first tiles and checks at the end
    query_held  how much of Q stays in registers: of "all" of it, the first "half" of its columns or "none" are the
                fragments read from shared memory once, of the others once a step. Half of it makes room: in shared
                memory the V ring takes its place
    swizzle     shared memory without bank conflicts; False is there to show what that is worth
    split       several blocks share a tile's keys and leave parts, which a kernel of decode_spec.CombineSpec combines
    """

    dtype: str
    head_dim: int
    value_dim: int
    features: Features
    tile_m: int
    tile_n: int
    warps: int
    stages: int
    reference: str = "trailing"
    query_held: str = "none"
    swizzle: bool = True
    split: bool = False

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, takes 'float16' or 'bfloat16'")
        for name in ("head_dim", "value_dim"):
            width = getattr(self, name)
            if width % VECTOR_ELEMENTS or not 0 < width <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: got {width}, takes multiples of 8 from 8 to {MAX_HEAD_DIM}")
        for name in ("tile_m", "tile_n", "warps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes a positive number")
        if self.tile_m % (16 * self.warps):
            raise ValueError(f"tile_m: got {self.tile_m}, takes a multiple of 16 rows for each of {self.warps} warps")
        if self.tile_n % 16 or not self._width(MAX_HEAD_DIM):
            rows_a_pass = self.threads // self.copy_lanes(MAX_HEAD_DIM)
            raise ValueError(
                f"tile_n: got {self.tile_n}, takes a multiple of 16 and of the {rows_a_pass} rows that "
                f"{self.threads} threads copy at a time"
            )
        for width in (self.head_width, self.value_width):
            rows_a_pass = self.threads // self.copy_lanes(width)
            if rows_a_pass % 8 and 8 % rows_a_pass:
                raise ValueError(
                    f"warps: got {self.warps}, takes as many as copy whole blocks of 8 rows at a time (these: "
                    f"{rows_a_pass} rows of {width} elements)"
                )
        if self.reference not in ("trailing", "first"):
            raise ValueError(f"reference: got {self.reference!r}, takes 'trailing' or 'first'")
        if self.reference == "first" and self.dtype != "bfloat16":
            raise ValueError(f"reference: got 'first' with dtype {self.dtype!r}, takes it with 'bfloat16' only")
        if self.reference == "first" and self.features.mask:
            raise ValueError(
                "reference: got 'first' with a mask, takes 'trailing': a row's first tile may be all masked"
            )
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}, takes 2 or more")
        if self.query_held not in QUERY_HELD:
            raise ValueError(f"query_held: got {self.query_held!r}, takes one of {', '.join(QUERY_HELD)}")
        if self.query_makes_room:
            if self.head_width % (2 * SWIZZLED_COLUMNS):
                raise ValueError(
                    f"query_held: got 'half' with rows of {self.head_width} elements in shared memory, takes it with "
                    f"multiples of {2 * SWIZZLED_COLUMNS}"
                )
            if self.tile_m * self.held_columns > self.stages * self.tile_n * self.value_width:
                raise ValueError(
                    f"query_held: got 'half' of {self.tile_m} rows, takes it where V's ring holds as much: here "
                    f"{self.stages} tiles of {self.tile_n} rows of {self.value_width} elements"
                )
        if self.split and (self.features.varlen or self.features.sink):
            raise ValueError("split: got True with varlen or a sink, takes neither: a sink is added by the combination")

    @property
    def title(self) -> str:
        """One line for a person: "bfloat16, head_dim 128, causal, tile 128x64 on 8 warps"."""
        width = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        tile = f"tile {self.tile_m}x{self.tile_n} on {self.warps} warps"
        return f"{self.dtype}, head_dim {width}, {self.features.title}, {tile}{', split' if self.split else ''}"

    @property
    def causal(self) -> bool:
        """Whether the window is bounded on the right alone."""
        return self.features.right and not self.features.left

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows_a_warp(self) -> int:
        """Query rows of one warp, a multiple of 16."""
        return self.tile_m // self.warps

    @property
    def held_columns(self) -> int:
        """Columns of Q in shared memory, the first ones, whose fragments stay in registers."""
        return {"none": 0, "half": self.head_width // 2, "all": self.head_width}[self.query_held]

    @property
    def query_makes_room(self) -> bool:
        """Whether the columns of Q that are held lie in the V ring's place until they are."""
        return self.query_held == "half"

    @property
    def begins_with_two_tiles(self) -> bool:
        """Whether a row's first reference comes from two key tiles at once, whose scores take O's registers.

        Without gain where Q is read again for each of them (docs/performance.md), and at the cost of spills where half
        of it is held; a bound on the left may leave a row nothing in either.
        """
        return self.reference == "first" and self.query_held == "all" and not self.features.left

    @property
    def head_width(self) -> int:
        """Elements of a Q or K row in shared memory; what is beyond head_dim is zero."""
        return self._width(self.head_dim)

    @property
    def value_width(self) -> int:
        """Elements of a V or O row in shared memory."""
        return self._width(self.value_dim)

    def _width(self, dim: int) -> int:
        """The narrowest row that holds ``dim`` elements and lets the block copy whole tiles of keys; 0: none does."""
        for width in _SHARED_WIDTHS:
            if width >= dim and self.tile_n % (self.threads // self.copy_lanes(width)) == 0:
                return width
        return 0

    def copy_lanes(self, width: int) -> int:
        """Threads side by side that copy a row of ``width`` elements of shared memory, 16 bytes each.

        Eight, for whole lines of 128 bytes, or four where eight do not divide a row; more where the block would else
        cover more rows at a time than a tile of keys has.
        """
        lanes = 8 if width % 64 == 0 else 4
        while self.threads // lanes > self.tile_n and width % (2 * lanes * VECTOR_ELEMENTS) == 0:
            lanes *= 2
        return lanes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: Q (and later O), less what V's ring takes of it, the K ring, the V ring."""
        widths = (self.head_width, self.value_width)
        own = max(widths) - (self.held_columns if self.query_makes_room else 0)
        return 2 * (self.tile_m * own + self.stages * self.tile_n * sum(widths))

    def grid(self, batch, heads, query_len, splits=1):
        """Thread blocks of a launch (x, y, z), in the order of kernels/schedule.py; some may be idle.

        Takes Python integers (emulator) and DSL integers (launch code) alike. With ``varlen``, ``batch`` counts the
        sequences and ``query_len`` all rows. splits: blocks that share a tile's keys, where ``split``.
        """
        group = 1 << group_log2(heads)
        groups = (heads + group - 1) // group
        if self.features.varlen:
            return (packed_tiles(batch, query_len, self.tile_m) * group, groups, 1)
        tiles = (query_len + self.tile_m - 1) // self.tile_m
        sequences = 1 << sequences_log2(batch, tiles)
        blocks = tiles * splits if self.split else tiles
        return (blocks * group * sequences, groups, (batch + sequences - 1) // sequences)

    def parameters(self) -> tuple[Parameter | None, ...]:
        """The kernel's arguments in order; what the features do not need is None."""
        on = self.features
        results = (
            rows("out", self.dtype, self.value_dim, written=True),
            TensorParameter("lse", "float32", (None,) * 3, (None, None, 1), written=True),
        )
        if self.split:
            results = partial_parameters(self.value_dim, written=True)
        return (
            rows("q", self.dtype, self.head_dim),
            rows("k", self.dtype, self.head_dim),
            rows("v", self.dtype, self.value_dim),
            *results,
            ScalarParameter("scale_log2", "float32"),
            ScalarParameter("heads_per_kv_head", "int32"),
            ScalarParameter("window_left", "int32") if on.left else None,
            ScalarParameter("window_right", "int32") if on.right else None,
            ScalarParameter("softcap", "float32") if on.softcap else None,
            ScalarParameter("scale_over_softcap", "float32") if on.softcap else None,
            TensorParameter("alibi_slopes", "float32", (None,) * 2, (None,) * 2) if on.alibi else None,
            vector("learnable_sink", "float32") if on.sink else None,
            TensorParameter("attn_mask", _STORED.get(on.mask, on.mask), (None,) * 4, (None,) * 4) if on.mask else None,
            vector("cu_seqlens_q", "int32") if on.varlen else None,
            vector("cu_seqlens_k", "int32") if on.varlen else None,
        )

    def build(self) -> Any:
        """The kernel's launch code, for ``cute.compile``. Loads the compiler."""
        from .kernels.forward import Forward

        return Forward(self)


_STORED = {"bool": "uint8"}


def packed_tiles(sequences, rows, tile_m):
    """Query tiles that are enough for ``rows`` rows of ``sequences`` sequences, and for the rows before and after them.

    Sequence i of those n + 2 starts at row s; its tiles begin at s // tile_m + i (kernels/schedule.py).
    """
    return rows // tile_m + sequences + 2


def group_log2(heads):
    """log2 of the heads whose blocks run side by side: a power of two, so that no block divides, and at most eight.

    Eight heads of 8192 keys of head_dim 128 are 32 MiB of K and V, which an L2 of 48 MiB or more holds. Takes Python
    integers and DSL integers alike.
    """
    return 1 * (heads >= 8) + 1 * (heads >= 4) + 1 * (heads >= 2)


def sequences_log2(batch, tiles):
    """log2 of the sequences, of ``tiles`` query tiles a head, whose blocks run side by side.

    Under a causal mask a head's tiles differ, and the longest come first; of few tiles a head, those of some sequences
    come together, or the last blocks to start would be as long as any. Eight heads then have about as many blocks as
    132 SMs hold. Takes Python integers and DSL integers alike.
    """
    return sum(1 * (batch >= 1 << n) * (tiles <= 32 >> n) for n in (1, 2, 3, 4))
