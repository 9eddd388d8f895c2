"""What a kernel is specialised on, as plain data: the compile key, and nothing but the compile key."""

from dataclasses import dataclass

MAX_GRID_YZ = 65_535  # blocks in y and in z (CUDA C++ Programming Guide, "Technical Specifications")
SWIZZLE_ROW_ELEMENTS = 64  # 128 bytes of a 16-bit type: one pass over all 32 banks of shared memory


@dataclass(frozen=True)
class ForwardSpec:
    """All that the forward kernel is specialised on: what is not here is a run-time argument.

    dtype       "float16" or "bfloat16"
    head_dim    elements of a query, key and value row
    causal      mask keys beyond ``row + key_len - query_len``
    tile_m      query rows a block
    tile_n      keys a step
    warps       warps a block; each owns tile_m / warps rows
    stages      tiles in the K ring and in the V ring, at least 2
    reference   what the softmax subtracts: "trailing" follows the row maximum in every tile; "first" (bfloat16 only: it
                needs an exponent range as wide as float32's) keeps that of the first tiles and checks at the end
    """

    dtype: str
    head_dim: int
    causal: bool
    tile_m: int
    tile_n: int
    warps: int
    stages: int
    reference: str = "trailing"

    def __post_init__(self):
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}, takes 'float16' or 'bfloat16'")
        for name in ("head_dim", "tile_m", "tile_n", "warps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, takes a positive number")
        if self.head_dim % SWIZZLE_ROW_ELEMENTS:
            raise ValueError(f"head_dim: got {self.head_dim}, takes a multiple of {SWIZZLE_ROW_ELEMENTS}")
        if self.tile_m % (16 * self.warps):
            raise ValueError(f"tile_m: got {self.tile_m}, takes a multiple of 16 rows for each of {self.warps} warps")
        rows_a_pass = self.threads // 8
        if self.tile_n % 16 or self.tile_n % rows_a_pass:
            raise ValueError(
                f"tile_n: got {self.tile_n}, takes a multiple of 16 and of the {rows_a_pass} rows that "
                f"{self.threads} threads copy at a time"
            )
        if self.reference not in ("trailing", "first"):
            raise ValueError(f"reference: got {self.reference!r}, takes 'trailing' or 'first'")
        if self.reference == "first" and self.dtype != "bfloat16":
            raise ValueError(f"reference: got 'first' with dtype {self.dtype!r}, takes it with 'bfloat16' only")
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}, takes 2 or more")

    @property
    def title(self) -> str:
        """One line for a person: "bfloat16, head_dim 128, causal, tile 128x64 on 8 warps"."""
        mask = "causal" if self.causal else "full"
        return f"{self.dtype}, head_dim {self.head_dim}, {mask}, tile {self.tile_m}x{self.tile_n} on {self.warps} warps"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: Q, then the K ring, then the V ring."""
        return 2 * self.head_dim * (self.tile_m + 2 * self.stages * self.tile_n)

    def grid(self, batch, heads, query_len):
        """Thread blocks of a launch (x, y, z), in the order of kernels/schedule.py; some of the last group may be idle.

        Takes Python integers (emulator) and DSL integers (launch code) alike.
        """
        group = 1 << group_log2(heads)
        tiles = (query_len + self.tile_m - 1) // self.tile_m
        return (tiles * group, (heads + group - 1) // group, batch)


def group_log2(heads):
    """log2 of the heads whose blocks run side by side: a power of two, so that no block divides, and at most eight.

    Eight heads of 8192 keys of head_dim 128 are 32 MiB of K and V, which an L2 of 48 MiB or more holds. Takes Python
    integers and DSL integers alike.
    """
    return 1 * (heads >= 8) + 1 * (heads >= 4) + 1 * (heads >= 2)
