"""The layouts of the shipped kernel, evaluated: its own code builds them, the DSL's layout algebra computes them.

Everything here comes out of kernels/layouts.py and kernels/products.py while a function that calls them is traced, as
the kernel is when it is compiled. Nothing is drawn from memory of what they should be. (Of ldmatrix the kernel takes a
lane's first address from CuTe's partition, which is evaluated here for all of them, and gets the others as
kernels/fragments.py has it; tests hold the two against each other.)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..spec import ForwardSpec
from . import banks

ELEMENT_BYTES = 2
VECTOR = 16 // ELEMENT_BYTES  # elements of one lane's 16 bytes
LANES = 32


@dataclass(frozen=True)
class Operand:
    """Which thread of the first warp holds which element of an MMA operand tile.

    shape       (rows, cols) of what the warp holds; ``axes`` says what they count
    owner       by element (row, col): (thread, which of its values)
    """

    name: str
    axes: tuple[str, str]
    shape: tuple[int, int]
    owner: dict[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class SharedTile:
    """Where a tile lies in shared memory.

    chunks[row][i] is where the 16 bytes from column 8 i on start, in elements from the tile's start.
    """

    name: str
    rows: int
    cols: int
    chunks: tuple[tuple[int, ...], ...]

    def at(self, row: int, col: int) -> int:
        """The offset of an element that starts 16 bytes."""
        return self.chunks[row][col // VECTOR]


@dataclass(frozen=True)
class Access:
    """One instruction of one warp: 32 lanes, 16 bytes each.

    name        "ldmatrix Q"
    opcode      "ldmatrix" or "cp.async"
    tile        name of the SharedTile
    warp        which warp of the block
    lanes       by lane: (row, col) of the tile where its 16 bytes start
    addresses   by lane: byte address from the tile's start
    """

    name: str
    opcode: str
    tile: str
    warp: int
    lanes: tuple[tuple[int, int], ...]
    addresses: tuple[int, ...]

    @property
    def phases(self) -> list[banks.Phase]:
        return banks.phases(self.addresses, 16)

    @property
    def wavefronts(self) -> int:
        return sum(phase.wavefronts for phase in self.phases)

    @property
    def conflicts(self) -> int:
        return sum(phase.conflicts for phase in self.phases)


@dataclass(frozen=True)
class KernelLayouts:
    """All layouts of one specification.

    accesses    every ldmatrix and cp.async that the block's warps issue for one tile each of Q, K and V
    """

    spec: ForwardSpec
    operands: tuple[Operand, ...]
    tiles: dict[str, SharedTile]
    accesses: tuple[Access, ...]

    def of(self, name: str) -> tuple[Access, ...]:
        """The accesses called ``name``."""
        return tuple(access for access in self.accesses if access.name == name)

    def wavefronts(self, opcode: str, steps: int) -> tuple[int, int]:
        """(wavefronts, wavefronts without conflicts) of all ``opcode`` in a block of ``steps`` key tiles.

        ldmatrix reads Q again in every step, but for the columns that stay in registers; cp.async writes it once. (With
        half of Q a pass that follows the maximum reads the others once for 16 keys.)
        """
        total = ideal = 0
        for access in self.accesses:
            if access.opcode != opcode:
                continue
            held = min(col for _, col in access.lanes) < self.spec.held_columns
            times = 1 if access.tile == "Q" and (held or opcode == "cp.async") else steps
            total += times * access.wavefronts
            ideal += times * len(access.phases)
        return total, ideal


@functools.lru_cache(maxsize=8)
def extract(spec: ForwardSpec) -> KernelLayouts:
    """Trace the functions that lay out ``spec``'s kernel and evaluate what they make; about a second, without a GPU."""
    import cutlass
    import cutlass.cute as cute

    from ..kernels import layouts, products

    found: dict[str, object] = {}
    dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[spec.dtype]

    def collect():
        """Plain Python: what the trace calls here has static layouts, which evaluate to integers."""

        def tile(rows: int, cols: int, stages: int | None = None):
            return layouts.smem_layout(rows, cols, stages, swizzle=spec.swizzle), rows, cols

        shared = {
            "Q": tile(spec.tile_m, spec.head_width),
            "K": tile(spec.tile_n, spec.head_width, spec.stages),
            "V": tile(spec.tile_n, spec.value_width, spec.stages),
        }
        tiles = {
            name: SharedTile(name, rows, cols, _chunks(layout, rows, cols, staged=name != "Q"))
            for name, (layout, rows, cols) in shared.items()
        }
        tiled_mma = products.make_tiled_mma(dtype, spec.warps, spec.rows_a_warp // 16)
        plain, transposing = layouts.ldmatrix_atom(dtype), layouts.ldmatrix_atom(dtype, transpose=True)
        transposed = layouts.transposed(shared["V"][0], spec.tile_n, spec.value_width, spec.stages)
        accesses = [
            *_matrix_loads(cute, "Q", cute.make_tiled_copy_A(plain, tiled_mma), tiles["Q"], spec.warps, None),
            *_matrix_loads(cute, "K", cute.make_tiled_copy_B(plain, tiled_mma), tiles["K"], spec.warps, None),
            *_matrix_loads(
                cute, "V", cute.make_tiled_copy_B(transposing, tiled_mma), tiles["V"], spec.warps, transposed
            ),
        ]
        for name, tile in tiles.items():
            copy = layouts.async_row_copy(dtype, spec.threads, spec.copy_lanes(tile.cols))
            accesses += _copies(cute, name, copy.tiled, tile, spec.threads)
        found.update(operands=_operands(cute, tiled_mma), tiles=tiles, accesses=tuple(accesses))

    @cute.jit
    def trace():
        collect()

    cute.compile(trace, options="--gpu-arch sm_120a")
    return KernelLayouts(spec, **found)


def _chunks(layout, rows: int, cols: int, *, staged: bool) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(int(layout((r, c, 0) if staged else (r, c))) for c in range(0, cols, VECTOR)) for r in range(rows)
    )


def _starts(cute, copy, shape: tuple[int, int], threads: int, side: str) -> list[list[tuple[int, int]]]:
    """By instruction and thread: the coordinate in a tile of ``shape`` where the thread's 16 bytes start.

    A thread's part of a coordinate tensor is where it starts plus the same steps for all threads.
    """
    identity = cute.make_identity_tensor(shape)
    parts = [getattr(copy.get_slice(thread), f"partition_{side}")(identity) for thread in range(threads)]
    first = [_pair(part[(0, 0), 0, 0]) for part in parts]
    _, down, along = parts[0].shape
    found = []
    for k in range(cute.size(along)):
        for m in range(cute.size(down)):
            at = _pair(parts[0][(0, 0), m, k])
            step = at[0] - first[0][0], at[1] - first[0][1]
            found.append([(r + step[0], c + step[1]) for r, c in first])
    return found


def _pair(coordinate) -> tuple[int, int]:
    row, col = coordinate
    return int(row), int(col)


def _matrix_loads(cute, name: str, copy, tile: SharedTile, warps: int, transposed) -> list[Access]:
    """Every ldmatrix.x4 of every warp over one tile.

    ``transposed``: the layout of (cols, rows, stages) to read through, or None.
    """
    shape = (tile.rows, tile.cols) if transposed is None else (tile.cols, tile.rows)
    where = functools.cache(lambda start: int(transposed((*start, 0))))  # warps read the same of K and V
    accesses = []
    for starts in _starts(cute, copy, shape, LANES * warps, "S"):
        if transposed is None:
            offsets = [tile.at(r, c) for r, c in starts]
        else:
            offsets = [where(start) for start in starts]
            starts = [(r, c) for c, r in starts]
        accesses += _by_warp(f"ldmatrix {name}", "ldmatrix", tile, starts, offsets)
    return accesses


def _copies(cute, name: str, copy, tile: SharedTile, threads: int) -> list[Access]:
    """Every cp.async of every warp that fills one tile."""
    accesses = []
    for starts in _starts(cute, copy, (tile.rows, tile.cols), threads, "D"):
        accesses += _by_warp(f"cp.async {name}", "cp.async", tile, starts, [tile.at(r, c) for r, c in starts])
    return accesses


def _by_warp(name, opcode, tile, starts, offsets) -> list[Access]:
    addresses = [ELEMENT_BYTES * x for x in offsets]
    return [
        Access(
            name,
            opcode,
            tile.name,
            first // LANES,
            tuple(starts[first : first + LANES]),
            tuple(addresses[first : first + LANES]),
        )
        for first in range(0, len(starts), LANES)
    ]


def _operands(cute, tiled_mma) -> tuple[Operand, ...]:
    """Thread-value layouts of one MMA tile, as the tiled MMA has them, for the first warp."""
    rows, cols, depth = (int(cute.size(tiled_mma.get_tile_size(mode))) for mode in range(3))
    queries, keys, elements = "query row", "key", "head element"
    return (
        _operand("A: Q", (queries, elements), tiled_mma.tv_layout_A_tiled, (rows, depth), cute),
        _operand("B: K", (keys, elements), tiled_mma.tv_layout_B_tiled, (cols, depth), cute),
        _operand("B: V", (elements, keys), tiled_mma.tv_layout_B_tiled, (cols, depth), cute),
        _operand("C: S and O", (queries, f"{keys} or {elements}"), tiled_mma.tv_layout_C_tiled, (rows, cols), cute),
    )


def _operand(name: str, axes: tuple[str, str], layout, shape: tuple[int, int], cute) -> Operand:
    owner = {}
    for value in range(cute.size(layout.shape[1])):
        for thread in range(LANES):
            index = int(layout((thread, value)))  # column-major in the tile
            owner.setdefault((index % shape[0], index // shape[0]), (thread, value))
    rows = 1 + max(r for r, _ in owner)
    cols = 1 + max(c for _, c in owner)
    return Operand(name, axes, (rows, cols), owner)
