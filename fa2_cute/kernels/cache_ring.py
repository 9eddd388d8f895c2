"""Tiles of a KV cache, in rows or pages, through a ring in shared memory that one group of warps fills and reads."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..cache_spec import BLOCK_TOKENS
from ..decode_spec import LARGEST_SCALE, DecodeSpec
from . import pages
from .decode_work import Keys, Rows

SMALLEST_NORMAL = 2.0**-126
FIRST_NAMED_BARRIER = 1  # 0 is the block's
# A factor is loaded with its tile, but into a register that moves on with the next one, so it has the time of one tile
# to arrive. From a busy memory that takes longer (H200: 1.2 us; one block an SM read 2.9 TB/s of FP8 where it reads 4.2
# without factors), from the L2 it does not: so many keys ahead factors are sent for.
SCALES_AHEAD = 512


@dataclass(frozen=True)
class Ring:
    """One thread's part in streaming a group's tiles of K and V.

    slot            (1,) of the current tile
    exists          (stages - 1,) a bit for each key of the current tile and of those in flight
    k_scale, v_scale    (stages - 1,) of this lane's key in these tiles; None if they do not change from key to key
    page            (2,) page and row of this lane's key in the tile to be copied next: looked up one tile ahead
    walk            where the lane's key of the tile after it is in the table; None if not paged
    """

    K: pages.Source
    V: pages.Source
    slot: cute.Tensor
    exists: cute.Tensor
    k_scale: cute.Tensor | None
    v_scale: cute.Tensor | None
    page: cute.Tensor
    walk: pages.Walk | None


class CacheRing:
    """How the kernel of one specification streams K and V."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        rows, threads = spec.tile_n, spec.group_threads
        self.copy_K = pages.RowCopy(spec.head_dim * spec.cache_bytes, spec.key_bytes, rows, threads)
        self.copy_V = pages.RowCopy(spec.value_dim * spec.cache_bytes, spec.value_bytes, rows, threads)

    def make(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        rows: Rows,
        keys: Keys,
        thread: Int32,
        group: Int32,
        first_tile: Int32,
        ring_K: Int32,
        ring_V: Int32,
    ) -> Ring:
        """The ring of ``group``, whose ``thread`` this is, and whose first tile; ring_K, ring_V: shared addresses of
        the first group's."""
        spec = self.spec
        ring_K = ring_K + group * (spec.stages * self.copy_K.tile_bytes)
        ring_V = ring_V + group * (spec.stages * self.copy_V.tile_bytes)
        places = spec.stages - 1
        walk = None
        if spec.paged:
            key = first_tile * spec.tile_n + cute.arch.lane_idx()
            walk = pages.start_walk(keys.table, key, spec.warps_n * spec.tile_n)
        return Ring(
            pages.make_source(self.copy_K, thread, mK, keys.row, rows.kv_head, ring_K),
            pages.make_source(self.copy_V, thread, mV, keys.row, rows.kv_head, ring_V),
            slot=cute.make_rmem_tensor(1, Int32),
            exists=cute.make_rmem_tensor(places, Int32),
            k_scale=cute.make_rmem_tensor(places, Float32) if spec.k_scale == "block" else None,
            v_scale=cute.make_rmem_tensor(places, Float32) if spec.v_scale == "block" else None,
            page=cute.make_rmem_tensor(2, Int32),
            walk=walk,
        )

    @cute.jit
    def group_barrier(self, group: Int32):
        """Shared memory written by lanes of a group before is visible to all of it after."""
        spec = cutlass.const_expr(self.spec)
        if cutlass.const_expr(spec.group_threads == 32):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=group + FIRST_NAMED_BARRIER, number_of_threads=spec.group_threads)

    @cute.jit
    def look_up(self, ring: Ring, keys: Keys, tile: Int32):
        """Page and row of this lane's key of ``tile``, the next one of the walk; page -1 where there is no such key or
        page."""
        lane = cute.arch.lane_idx()
        key = tile * self.spec.tile_n + lane
        wanted = (lane < self.spec.tile_n) & (key >= keys.first) & (key < keys.end)
        ring.page[0], ring.page[1] = pages.look_up(keys.table, ring.walk, wanted)
        pages.move(keys.table, ring.walk)

    @cute.jit
    def shift(self, ring: Ring):
        """The tile in flight that came first becomes the current one."""
        for i in cutlass.range_constexpr(self.spec.stages - 2):
            ring.exists[i] = ring.exists[i + 1]
            if cutlass.const_expr(ring.k_scale is not None):
                ring.k_scale[i] = ring.k_scale[i + 1]
            if cutlass.const_expr(ring.v_scale is not None):
                ring.v_scale[i] = ring.v_scale[i + 1]

    @cute.jit
    def load(
        self,
        ring: Ring,
        keys: Keys,
        rows: Rows,
        mKScale: cute.Tensor | None,
        mVScale: cute.Tensor | None,
        tile: Int32,
        end: Int32,
        slot: Int32,
        place: cutlass.Constexpr,
    ):
        """``tile`` into ``slot`` if it is below ``end``, as one group in either case; ``place``: among those in flight.

        K and V may be copied by different numbers of lanes a row.
        """
        spec = cutlass.const_expr(self.spec)
        ring.exists[place] = Int32(0)
        if tile < end:
            lane = cute.arch.lane_idx()
            key = tile * spec.tile_n + lane
            page, row = Int32(0), key
            exists = (lane < spec.tile_n) & (key >= keys.first) & (key < keys.end)
            if cutlass.const_expr(spec.paged):
                page, row = ring.page[0], ring.page[1]
                exists = page >= 0
            bits = cute.arch.vote_ballot_sync(exists)
            ring.exists[place] = bits
            page = page if exists else Int32(0)
            row = row if exists else Int32(0)
            rows_K = self.rows_of(self.copy_K, bits, tile, page, row)
            rows_V = rows_K
            if cutlass.const_expr(self.copy_V.step != self.copy_K.step):
                rows_V = self.rows_of(self.copy_V, bits, tile, page, row)
            for i in cutlass.range_constexpr(self.copy_K.passes):
                pages.copy_row(self.copy_K, ring.K, i, slot, *rows_K[i])
            for i in cutlass.range_constexpr(self.copy_V.passes):
                pages.copy_row(self.copy_V, ring.V, i, slot, *rows_V[i])
            if cutlass.const_expr(not spec.paged):
                self.prefetch_scales(mKScale, mVScale, rows, keys, tile * spec.tile_n + SCALES_AHEAD)
            if cutlass.const_expr(spec.k_scale == "block"):
                ring.k_scale[place] = self.load_scale(mKScale, rows, keys, exists, page, tile * spec.tile_n)
            if cutlass.const_expr(spec.v_scale == "block"):
                scale = self.load_scale(mVScale, rows, keys, exists, page, tile * spec.tile_n)
                scale = cute.arch.fmax(scale, Float32(SMALLEST_NORMAL))
                ring.v_scale[place] = cute.arch.fmin(scale, Float32(LARGEST_SCALE))
            if cutlass.const_expr(spec.paged):
                self.look_up(ring, keys, tile + spec.warps_n)
        cute.arch.cp_async_commit_group()

    def rows_of(
        self, copy: pages.RowCopy, bits: Int32, tile: Int32, page: Int32, row: Int32
    ) -> list[tuple[Int32, Int32, Boolean]]:
        """(page, row, whether it exists) of each row of a tile that this thread copies.

        ``page`` and ``row`` are of this lane's key, and lanes copy other lanes' keys.
        """
        tidx, _, _ = cute.arch.thread_idx()
        own = tidx % copy.threads // copy.lanes
        rows = []
        for i in range(copy.passes):
            key = own + i * copy.step
            exists = ((bits >> key) & 1) != 0
            if self.spec.paged:
                rows.append((cute.arch.shuffle_sync(page, key), cute.arch.shuffle_sync(row, key), exists))
            else:
                rows.append((Int32(0), cutlass.select_(exists, tile * self.spec.tile_n + key, Int32(0)), exists))
        return rows

    @cute.jit
    def prefetch_scales(
        self, mKScale: cute.Tensor | None, mVScale: cute.Tensor | None, rows: Rows, keys: Keys, key: Int32
    ):
        """Into the L2: those of the block of ``key``, if there is one."""
        for kind, mScale in ((self.spec.k_scale, mKScale), (self.spec.v_scale, mVScale)):
            if cutlass.const_expr(kind == "block"):
                block = cutlass.min(key // BLOCK_TOKENS, mScale.shape[1] - 1)
                mBlocks = mScale[keys.row, None, rows.kv_head]
                address = mBlocks.iterator.toint() + Int64(block) * mBlocks.stride[0] * 4
                cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])

    @cute.jit
    def load_scale(
        self, mScale: cute.Tensor, rows: Rows, keys: Keys, exists: Boolean, page: Int32, first_key: Int32
    ) -> Float32:
        """Of this lane's key if paged, and 1 if it does not exist; else of all keys of the tile."""
        if cutlass.const_expr(self.spec.paged):
            return cutlass.select_(exists, mScale[page, 0, rows.kv_head], Float32(1.0))
        return mScale[keys.row, first_key // BLOCK_TOKENS, rows.kv_head]


def of_key(spec: DecodeSpec, scale: Float32, key: Int32) -> Float32:
    """The scale of the tile's key ``key``, from what ``CacheRing.load_scale`` gave each lane."""
    return cute.arch.shuffle_sync(scale, key) if spec.paged else scale
