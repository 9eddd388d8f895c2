"""What the append kernel is specialised on, as plain data: its compile key."""

from dataclasses import dataclass
from typing import Any

from .cache_spec import DTYPES, FP8_DTYPES, SCALE_KINDS, pair, scales
from .parameters import Parameter, ScalarParameter, TensorParameter, rows, vector

VECTOR = 8  # elements a thread works on: 16 bytes of a 16-bit type
THREADS = 128  # any multiple of 32 does: a thread's work is independent of its neighbours'
ROTARY_MULTIPLE = 2 * VECTOR  # both halves of a rotation are whole vectors


@dataclass(frozen=True)
class AppendSpec:
    """All that the append kernel is specialised on: what is not here is a run-time argument.

    dtype           "float16" or "bfloat16": of the new keys, values and queries
    cache_dtype     dtype, or "float8_e4m3fn" or "float8_e5m2"
    head_dim        elements of a key row; value_dim: of a value row; multiples of 8
    paged           the cache is pages found through a block table; else rows of one sequence each
    indexed         (not paged) the row is found through cache_batch_idx
    rotary_dim      leading elements of queries and keys that are rotated, a multiple of 16; 0 for none
    interleaved     rotate elements (2 i, 2 i + 1) together; else (i, i + rotary_dim / 2)
    rotary_dtype    of the cosines and sines: dtype or "float32"
    k_descale, v_descale    kinds of ``descale.Descale``
    overlap         the launch may overlap the end of the kernel before, and the next one's launch this kernel (CUDA C++
                    Programming Guide, "Programmatic Dependent Launch"; sm_90 and later)
    """

    dtype: str
    cache_dtype: str
    head_dim: int
    value_dim: int
    paged: bool = False
    indexed: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    rotary_dtype: str = "float32"
    k_descale: str = "unit"
    v_descale: str = "unit"
    overlap: bool = False

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}, takes {' or '.join(map(repr, DTYPES))}")
        if self.cache_dtype not in (self.dtype, *FP8_DTYPES):
            raise ValueError(f"cache_dtype: got {self.cache_dtype!r}, takes {self.dtype!r} or a float8 type")
        for name in ("head_dim", "value_dim"):
            if getattr(self, name) < 1 or getattr(self, name) % VECTOR:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes a positive multiple of {VECTOR}")
            if getattr(self, name) > THREADS * VECTOR:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes at most {THREADS * VECTOR}")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % ROTARY_MULTIPLE:
            raise ValueError(
                f"rotary_dim: got {self.rotary_dim}, takes a multiple of {ROTARY_MULTIPLE} up to {self.head_dim}"
            )
        if self.rotary_dtype not in (self.dtype, "float32"):
            raise ValueError(f"rotary_dtype: got {self.rotary_dtype!r}, takes {self.dtype!r} or 'float32'")
        if self.paged and self.indexed:
            raise ValueError("indexed: got True with paged, takes one of the two")
        for name in ("k_descale", "v_descale"):
            if getattr(self, name) not in SCALE_KINDS:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes one of {', '.join(SCALE_KINDS)}")
            if getattr(self, name) != "unit" and self.cache_dtype == self.dtype:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, takes 'unit' with a cache of 16 bits")

    @property
    def title(self) -> str:
        """One line for a person, different for each of one architecture."""
        where = "pages" if self.paged else "an indexed cache" if self.indexed else "a cache"
        fp8 = self.cache_dtype in FP8_DTYPES
        factors = f", scales {pair(self.k_descale, self.v_descale)}" if fp8 else ""
        rotary = f", rotary {self.rotary_dim} by {self.rotary_dtype}" if self.rotary_dim else ""
        interleaved = " interleaved" if rotary and self.interleaved else ""
        width = f"head_dim {pair(self.head_dim, self.value_dim)}"
        return f"append, {self.dtype}, {width}, to {where} of {self.cache_dtype}{factors}{rotary}{interleaved}"

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared_bytes(self) -> int:
        return 0

    def blocks(self, rows, dim):
        """Thread blocks for ``rows`` rows of ``dim`` elements. Takes Python and DSL integers alike."""
        rows_a_block = THREADS // (dim // VECTOR)
        return (rows + rows_a_block - 1) // rows_a_block

    def grid(self, batch, query_rows, new_rows):
        """Thread blocks of a launch (x, y, z): of each sequence those for keys, values, queries (if rotated).

        query_rows: query_len * heads; new_rows: new_len * kv_heads. Takes Python and DSL integers alike.
        """
        blocks = self.blocks(new_rows, self.head_dim) + self.blocks(new_rows, self.value_dim)
        if self.rotary_dim:
            blocks = blocks + self.blocks(query_rows, self.head_dim)
        return (batch * blocks, 1, 1)

    def parameters(self) -> tuple[Parameter | None, ...]:
        """The kernel's arguments in order; what this specification does not need is None."""
        rotary = self.rotary_dim > 0
        divisor = 4 if self.rotary_dtype == "float32" else 8  # elements in 16 bytes
        angles = [
            TensorParameter(name, self.rotary_dtype, (None, self.rotary_dim // 2), (None, 1), divisor=divisor)
            for name in ("rotary_cos", "rotary_sin")
        ]
        return (
            rows("q", self.dtype, self.head_dim) if rotary else None,
            rows("k", self.dtype, self.head_dim),
            rows("v", self.dtype, self.value_dim),
            rows("k_cache", self.cache_dtype, self.head_dim, written=True),
            rows("v_cache", self.cache_dtype, self.value_dim, written=True),
            rows("rotated_q", self.dtype, self.head_dim, written=True) if rotary else None,
            TensorParameter("lengths", "int32", (None,), (1,), written=True),
            vector("cache_seqlens", "int32"),
            vector("cache_batch_idx", "int32") if self.indexed else None,
            TensorParameter("block_table", "int32", (None, None), (None, 1)) if self.paged else None,
            *(angles if rotary else (None, None)),
            scales("k_descale", self.k_descale),
            scales("v_descale", self.v_descale),
            ScalarParameter("capacity", "int32"),
            ScalarParameter("query_step", "int32"),
        )

    def build(self) -> Any:
        """The kernel's launch code, for ``cute.compile``. Loads the compiler."""
        from .kernels.append import Append

        return Append(self)
