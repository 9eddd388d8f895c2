"""Shared memory of the resident blocks and the happens-before state that finds hazards in it.

Time is a vector clock per warp: ``seen[b, w, v]`` is the last clock of warp v whose accesses warp w is
ordered after; a warp's own entry is its current clock, advanced when it arrives at a barrier. Every 16-byte
row has the *code* (clock * 32 + warp) of its last writer. A row written by narrower stores is marked NARROW
and then each granule (the narrowest access of the kernel) has its own code. Readers are kept as the last
clock of each warp, for 16-byte reads by row and for narrower ones by granule. An access is legal if
everything it conflicts with is at or below the clocks that its warp has seen: which warp the emulator
happened to run first does not enter.

``full[b]`` is the clock that all warps of a block got at their last common barrier: everything below it is
ordered before everything now running, which makes the usual check one comparison.
"""

from __future__ import annotations

import numpy as np

from .errors import (
    MisalignedAccess,
    OutOfBoundsShared,
    PendingCopyRead,
    UninitialisedSharedRead,
    UnsynchronisedRead,
    WriteAfterRead,
    WriteAfterWrite,
)
from .kinds import UNITS, join_units, split_units

SHARED_BASE = 1024  # sm_90 and later keep the first KiB of the window for the system
UNINITIALISED = np.uint32(0xFFFFFFFF)
NARROW = np.uint32(0xFFFFFFFE)
PENDING = np.uint32(0xF8000000)


class SharedMemory:
    """Data, access and hazard checks for ``blocks`` resident blocks of ``size`` bytes and ``warps`` warps each."""

    def __init__(self, machine, blocks: int, size: int, warps: int, features: set[str], checks: bool):
        self.machine, self.blocks, self.size, self.warps = machine, blocks, size, warps
        self.checks = checks and size > 0
        self.stride = -(-size // 16) * 16
        self.data = np.full(blocks * self.stride, 0xFF, np.uint8)  # NaN in every float format
        self.views = {w: self.data.view(d) for w, d in UNITS.items() if w <= 16}
        self.version = 0
        self.seen = np.zeros((blocks, warps, warps), np.uint32)
        diagonal = np.arange(warps)
        self.seen[:, diagonal, diagonal] = 1
        self.full = np.ones(blocks, np.uint32)
        self.refresh()
        if not self.checks:
            return
        total = blocks * self.stride // 16
        widths = [int(f[6:]) for f in features if f.startswith("shared") and f[6:].isdigit()]
        narrow = [w for w in widths if w < 16]
        self.granule = min(narrow) if narrow else 16
        self.per_row = 16 // self.granule
        self.writer = np.full(total, UNINITIALISED, np.uint32)
        self.readers = np.zeros((total, warps), np.uint32)
        self.scratch = np.zeros(total * self.per_row, np.int64)
        self.fine_writer = np.full(total * self.per_row, UNINITIALISED, np.uint32) if narrow else None
        narrow_reads = any(f.startswith("read") and f != "read16" for f in features)
        self.fine_readers = np.zeros((total * self.per_row, warps), np.uint32) if narrow_reads else None
        self.atomics = np.zeros((total * self.per_row, warps), np.uint32) if "shared atomic" in features else None
        self.groups = np.zeros(machine.threads, np.int64)
        self.copies: list[list[np.ndarray]] = []

    # ---- clocks --------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Recomputes what accesses look up, after the clocks moved."""
        self.version += 1
        own = np.arange(self.warps)
        self.clock = np.ascontiguousarray(self.seen[:, own, own]).reshape(-1)
        self.code = (self.clock << np.uint32(5)) | np.tile(own.astype(np.uint32), self.blocks)
        self.limit = self.full << np.uint32(5)

    def synchronise_all(self, blocks) -> None:
        """A barrier that every warp of these blocks (index array or slice) passed."""
        now = self.seen[blocks].max(axis=(1, 2)) + np.uint32(1)
        self.seen[blocks] = (now - np.uint32(1))[:, None, None]
        own = np.arange(self.warps)
        part = self.seen[blocks]
        part[:, own, own] = now[:, None]
        self.seen[blocks] = part
        self.full[blocks] = now
        self.refresh()

    def depart(self, block: int, warps: np.ndarray) -> np.ndarray:
        """Warps arrive at a barrier: returns what they bring to it and advances their clocks (refresh after)."""
        brought = self.seen[block, warps].max(axis=0)
        self.seen[block, warps, warps] += np.uint32(1)
        return brought

    def join(self, block: int, warps: np.ndarray, brought: np.ndarray) -> None:
        """Warps leave a barrier having seen everything brought to it (refresh after)."""
        self.seen[block, warps] = np.maximum(self.seen[block, warps], brought)

    # ---- addresses -----------------------------------------------------------------------------------------
    def locate(self, t, site, address, width):
        """Byte positions in ``data``; raises on misalignment and on anything outside the allocation."""
        relative = address.astype(np.int64) + (site.offset - SHARED_BASE)
        if width > 1 and (relative & (width - 1)).any():
            i = int(np.flatnonzero(relative & (width - 1))[0])
            self.machine.fail(
                MisalignedAccess, site, t, i,
                f"shared byte {int(relative[i])} is not a multiple of the access width, {width} bytes",
                "align the layout, or use a narrower access",
            )  # fmt: skip
        if (relative.view(np.uint64) > np.uint64(max(self.size - width, 0))).any() or self.size < width:
            outside = (relative < 0) | (relative > self.size - width)
            i = int(np.flatnonzero(outside)[0])
            self.machine.fail(
                OutOfBoundsShared, site, t, i,
                f"shared bytes {int(relative[i])}..{int(relative[i]) + width - 1} are outside the "
                f"block's {self.size} bytes",
                "ask for more dynamic shared memory (shared_bytes) or fix the address",
            )  # fmt: skip
        return relative + t.shared_row

    def gather(self, pos, width, count):
        """``count`` unsigned arrays read at byte positions."""
        total = width * count
        return split_units(self.views[total].take(pos >> (total.bit_length() - 1)), width, count)

    def load(self, t, site, address, mask):
        """ld.shared."""
        if mask is not None:
            return t.masked_load(self.load, site, address, mask)
        total = site.width * site.count
        pos = self.locate(t, site, address, total)
        if self.checks:
            self.check_read(t, site, pos, total, t.warp, t.limit, t.clock)
        if self.machine.counters is not None:
            self.machine.counters.shared_access(site, t, pos, total)
        return self.gather(pos, site.width, site.count)

    def store(self, t, site, address, values, mask):
        """st.shared."""
        if mask is not None:
            return t.masked_store(self.store, site, address, values, mask)
        total = site.width * site.count
        pos = self.locate(t, site, address, total)
        if self.checks:
            self.check_write(t, site, pos, total, t.code, values)
        if self.machine.counters is not None:
            self.machine.counters.shared_access(site, t, pos, total)
        self.views[total][pos >> (total.bit_length() - 1)] = join_units(values)
        return None

    # ---- ldmatrix, stmatrix --------------------------------------------------------------------------------
    def matrix_rows(self, t, site, address):
        """Row numbers of an ldmatrix/stmatrix as (matrices, warps, 8), and the sub-set that supplied addresses."""
        warps = t.whole(site)
        lanes = 8 * site.count
        if lanes < 32:
            some = t.sub(np.flatnonzero(t.lane < lanes))
            pos = self.locate(some, site, address.reshape(warps, 32)[:, :lanes].reshape(-1), 16)
        else:
            some = t
            pos = self.locate(t, site, address, 16)
        return pos, some, warps

    def load_matrix(self, t, site, address):
        """ldmatrix: lane l supplies the address of row l % 8 of matrix l // 8; lane 4g + i receives words of row g."""
        pos, some, warps = self.matrix_rows(t, site, address)
        if self.checks:
            self.check_read(some, site, pos, 16, some.warp, some.limit, some.clock)
        if self.machine.counters is not None:
            self.machine.counters.matrix_access(site, t, pos)
        order = np.ascontiguousarray((pos >> 4).reshape(warps, site.count, 8).transpose(1, 0, 2))
        words = self.views[16].take(order).view(np.uint32)  # (matrix, warp, row x word)
        if site.trans:
            halves = words.view(np.uint16).reshape(site.count, warps, 8, 8)
            words = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        return list(words.reshape(site.count, warps * 32))

    def store_matrix(self, t, site, address, values):
        """stmatrix: the inverse of load_matrix."""
        pos, some, warps = self.matrix_rows(t, site, address)
        words = np.stack(values).reshape(site.count, warps, 8, 4)
        if site.trans:
            halves = words.view(np.uint16).reshape(site.count, warps, 8, 8)
            words = np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32)
        rows = np.ascontiguousarray(words.transpose(1, 0, 2, 3)).reshape(-1, 4)
        if self.checks:
            self.check_write(some, site, pos, 16, some.code, list(rows.T))
        if self.machine.counters is not None:
            self.machine.counters.matrix_access(site, t, pos)
        self.views[16][pos >> 4] = rows.view(np.complex128).reshape(-1)

    # ---- hazard checks -------------------------------------------------------------------------------------
    def check_read(self, t, site, pos, width, warp, limit, clock):
        """Read-after-write, pending copies and uninitialised bytes; then records the reader."""
        rows = pos >> 4
        bad = self.writer.take(rows) >= limit
        if bad.any():
            self.examine(t, site, pos, width, np.flatnonzero(bad), True)
        if width == 16:
            self.readers.reshape(-1)[rows * self.warps + warp] = clock
        else:
            first = pos // self.granule
            for k in range(width // self.granule):
                self.fine_readers.reshape(-1)[(first + k) * self.warps + warp] = clock
        if self.atomics is not None:
            self.check_clocks(t, site, self.atomics, pos, width, UnsynchronisedRead, "an atomic by")

    def examine(self, t, site, pos, width, some, reading):
        """The exact check of the accesses ``some`` against the last writers: by row, or by granule where
        rows are NARROW."""
        code = self.writer[pos[some] >> 4]
        narrow = code == NARROW
        wide = ~narrow
        if wide.any():
            self.judge(t, site, pos, width, some[wide], code[wide], reading)
        if narrow.any():
            fine = some[narrow]
            for k in range(max(width // self.granule, 1)):
                code = self.fine_writer[pos[fine] // self.granule + k]
                self.judge(t, site, pos + k * self.granule, min(width, self.granule), fine, code, reading)

    def judge(self, t, site, pos, width, some, code, reading):
        """Raises for the first of the accesses ``some`` that its last writer (``code``) is not ordered before."""
        block, me = t.cta[some], t.warp[some]
        fresh = code == UNINITIALISED
        pending = (code >= PENDING) & ~fresh
        plain = ~fresh & ~pending
        writer = (code & np.uint32(31)).astype(np.intp)
        writer[~plain] = 0
        ordered = (self.seen[block, me, writer] >= (code >> np.uint32(5))) | (writer == me)
        wrong = (plain & ~ordered) | pending
        if reading:
            wrong |= fresh
        if not wrong.any():
            return
        j = int(np.flatnonzero(wrong)[0])
        i = int(some[j])
        offset = int(pos[i] - t.shared_row[i])
        span = f"shared bytes {offset}..{offset + width - 1}"
        other = int(code[j] & np.uint32(31))
        if fresh[j]:
            self.machine.fail(
                UninitialisedSharedRead, site, t, i,
                f"reads {span}, which nothing in this block has written",
                "write them first, zero-fill the tail of the tile, or guard the read",
            )  # fmt: skip
        if pending[j]:
            self.machine.fail(
                PendingCopyRead if reading else WriteAfterWrite, site, t, i,
                f"{'reads' if reading else 'overwrites'} {span}, still being filled by a cp.async of "
                f"warp {other}",
                "the issuing thread must commit and wait_group, then a barrier must follow for other warps",
            )  # fmt: skip
        self.machine.fail(
            UnsynchronisedRead if reading else WriteAfterWrite, site, t, i,
            f"{'reads' if reading else 'writes'} {span}, written by warp {other} with no barrier between",
            f"put a barrier between warp {other}'s write and this instruction",
        )  # fmt: skip

    def check_clocks(self, t, site, table, pos, width, error, what):
        """Every access recorded in ``table`` (granule x warp clocks) must be one that the warp has seen."""
        for k in range(max(width // self.granule, 1)):
            clocks = table.take(pos // self.granule + k, axis=0)
            if (clocks >= t.full_clock[:, None]).any():
                self.check_exact(t, site, clocks, pos + k * self.granule, min(width, self.granule), error, what)

    def check_exact(self, t, site, clocks, pos, width, error, what):
        """Raises if a recorded clock is above what the accessing warp has seen."""
        wrong = clocks > self.seen[t.cta, t.warp]
        wrong[np.arange(t.n), t.warp] = False
        if wrong.any():
            i = int(np.flatnonzero(wrong.any(axis=1))[0])
            other = int(np.flatnonzero(wrong[i])[0])
            offset = int(pos[i] - t.shared_row[i])
            self.machine.fail(
                error, site, t, i,
                f"touches shared bytes {offset}..{offset + width - 1} after {what} warp {other}, with "
                f"no barrier between",
                f"put a barrier between warp {other}'s access and this one",
            )  # fmt: skip

    def check_write(self, t, site, pos, width, code, values=None):
        """Write-after-write and write-after-read, then records the writer as ``code``."""
        rows = pos >> 4
        bad = self.writer.take(rows) >= t.limit
        if bad.any():
            self.examine(t, site, pos, width, np.flatnonzero(bad), False)
        clocks = self.readers.take(rows, axis=0)
        if (clocks >= t.full_clock[:, None]).any():
            self.check_exact(t, site, clocks, pos, width, WriteAfterRead, "a read by")
        if self.fine_readers is not None:
            self.check_clocks(t, site, self.fine_readers, pos, width, WriteAfterRead, "a read by")
        if self.atomics is not None:
            self.check_clocks(t, site, self.atomics, pos, width, WriteAfterWrite, "an atomic by")
        order = np.arange(t.n)
        if width == 16:
            self.scratch[rows] = order
            self.check_duplicates(t, site, pos, width, self.scratch[rows], order, values)
            self.writer[rows] = code
            return
        first = pos // self.granule
        self.make_narrow(rows)
        for k in range(width // self.granule):
            self.scratch[first + k] = order
            self.check_duplicates(t, site, pos, width, self.scratch[first + k], order, values)
            self.fine_writer[first + k] = code

    def make_narrow(self, rows):
        """Gives every granule of these rows the row's code, before some of them get their own."""
        wide = np.unique(rows[self.writer[rows] != NARROW])
        if wide.size:
            fine = wide[:, None] * self.per_row + np.arange(self.per_row)
            self.fine_writer[fine] = self.writer[wide][:, None]
            self.writer[wide] = NARROW

    def check_duplicates(self, t, site, pos, width, winner, order, values):
        """Two lanes writing the same bytes in one instruction: a race unless they are of one warp and agree."""
        lost = winner != order
        if not lost.any():
            return
        i = np.flatnonzero(lost)
        other = winner[i]
        bad = t.warp[i] != t.warp[other]
        if values is None:
            bad[:] = True
        else:
            for v in values:
                bad |= v[i] != v[other]
            bad |= pos[i] != pos[other]
        if bad.any():
            j = int(np.flatnonzero(bad)[0])
            a, b = int(i[j]), int(other[j])
            offset = int(pos[a] - t.shared_row[a])
            self.machine.fail(
                WriteAfterWrite, site, t, a,
                f"writes shared bytes {offset}..{offset + width - 1} together with thread "
                f"{t.thread_in_block(b)} of the "
                f"same instruction",
                "give each lane its own bytes",
            )  # fmt: skip

    # ---- cp.async ------------------------------------------------------------------------------------------
    def issue_copy(self, t, site, pos, width):
        """Marks the destination as being filled; the copy may land at any time until the issuing thread waits."""
        self.check_write(t, site, pos, width, PENDING | t.warp.astype(np.uint32))
        if width == 16:
            self.copies.append([t.threads, pos >> 4, self.groups[t.threads], np.zeros(t.n, bool)])
        else:
            for k in range(width // self.granule):
                where = pos // self.granule + k
                self.copies.append([t.threads, where, self.groups[t.threads], np.ones(t.n, bool)])

    def commit(self, t) -> None:
        """cp.async.commit_group."""
        if self.checks:
            self.groups[t.threads] += 1

    def wait(self, t, left) -> None:
        """cp.async.wait_group N (None: wait_all): copies of all but the last N groups of these threads have landed."""
        if not self.checks:
            return
        threads = t.threads
        if left is None:
            self.groups[threads] += 1
            left = 0
        if not self.copies:
            return
        last = np.full(self.machine.threads, -1, np.int64)
        last[threads] = self.groups[threads] - left
        if len(self.copies) > 1:
            self.copies = [[np.concatenate(column) for column in zip(*self.copies, strict=True)]]
        owner, where, group, fine = self.copies[0]
        landed = group < last[owner]
        if not landed.any():
            return
        code = self.code[owner // 32]
        wide = landed & ~fine
        self.writer[where[wide]] = code[wide]
        if fine.any():
            thin = landed & fine
            self.fine_writer[where[thin]] = code[thin]
        keep = ~landed
        self.copies = [[column[keep] for column in self.copies[0]]] if keep.any() else []

    # ---- atomics -------------------------------------------------------------------------------------------
    def check_atomic(self, t, site, pos, width) -> None:
        """Atomics may meet atomics; against plain accesses they are writes."""
        bad = self.writer[pos >> 4] >= t.limit
        if bad.any():
            self.examine(t, site, pos, width, np.flatnonzero(bad), True)
        clocks = self.readers.take(pos >> 4, axis=0)
        if (clocks >= t.full_clock[:, None]).any():
            self.check_exact(t, site, clocks, pos, width, WriteAfterRead, "a read by")
        if self.fine_readers is not None:
            self.check_clocks(t, site, self.fine_readers, pos, width, WriteAfterRead, "a read by")
        first = pos // self.granule
        for k in range(max(width // self.granule, 1)):
            self.atomics[first + k, t.warp] = t.clock
