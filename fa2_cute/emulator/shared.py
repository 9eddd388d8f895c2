"""Shared memory of the resident blocks and the state that finds hazards in it.

Every 16-byte row has the code (clock, lane and warp, see clocks.py) of its last writer. A row written by narrower
stores is marked NARROW and then each granule (the narrowest access of the kernel) has its own code. Readers are kept
by warp, for 16-byte reads by row and for narrower ones by granule. An access is legal if everything it conflicts with
comes before it on the clocks: which warp or lane the emulator happened to run first does not enter.

Everything below the clock that all warps of a block got at their last common barrier comes before all that now runs,
which makes the usual check one comparison.

ldmatrix counts as a read of every row by every lane, stmatrix as a write of every row by every lane: each lane names
the address of one row but moves words of several.
"""

from __future__ import annotations

import numpy as np

from .clocks import CLOCK_SHIFT, FIRST_RESERVED, LANE_SHIFT, PLACE_BITS, WHOLE, Accesses, Clocks
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
PENDING = np.uint32(FIRST_RESERVED)  # and above: lane and warp of a copy in flight


class SharedMemory:
    """Data, access and hazard checks for ``blocks`` resident blocks of ``size`` bytes and ``warps`` warps each."""

    def __init__(self, machine, blocks: int, size: int, warps: int, features: set[str], checks: bool):
        self.machine, self.blocks, self.size, self.warps = machine, blocks, size, warps
        self.checks = checks and size > 0
        self.stride = -(-size // 16) * 16
        self.data = np.full(blocks * self.stride, 0xFF, np.uint8)  # NaN in every float format
        self.views = {w: self.data.view(d) for w, d in UNITS.items() if w <= 16}
        masks = self.checks and "lane masks" in features
        self.clocks = Clocks(blocks, warps, masks)
        if not self.checks:
            return
        total = blocks * self.stride // 16
        self.granule = narrowest(features)
        self.per_row = 16 // self.granule
        self.writer = np.full(total, UNINITIALISED, np.uint32)
        self.readers = Accesses(total, warps, masks)
        self.scratch = np.zeros(total * self.per_row, np.int64)
        self.fine_writer = np.full(total * self.per_row, UNINITIALISED, np.uint32) if self.per_row > 1 else None
        narrow_reads = any(f.startswith("read") and f != "read16" for f in features)
        self.fine_readers = Accesses(total * self.per_row, warps, masks) if narrow_reads else None
        self.atomics = Accesses(total * self.per_row, warps, masks) if "shared atomic" in features else None
        self.groups = np.zeros(machine.threads, np.int64)
        self.copies: list[list[np.ndarray]] = []

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
            self.check_read(t, site, pos, total)
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
            self.check_write(t, site, pos, total, values)
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
            self.check_read(some, site, pos, 16, whole=True)
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
            self.check_write(some, site, pos, 16, list(rows.T), whole=True)
        if self.machine.counters is not None:
            self.machine.counters.matrix_access(site, t, pos)
        self.views[16][pos >> 4] = rows.view(np.complex128).reshape(-1)

    # ---- hazard checks -------------------------------------------------------------------------------------
    # ``whole``: each position is accessed for every lane of the thread's warp (ldmatrix, stmatrix).
    def check_read(self, t, site, pos, width, whole=False):
        """Read-after-write, pending copies and uninitialised bytes; then records the reader."""
        rows = pos >> 4
        bad = self.writer.take(rows) >= t.limit
        if bad.any():
            self.examine(t, site, pos, width, np.flatnonzero(bad), True, whole)
        if width == 16:
            self.readers.record(t, rows, whole)
        else:
            first = pos // self.granule
            for k in range(width // self.granule):
                self.fine_readers.record(t, first + k, whole)
        if self.atomics is not None:
            self.check_granules(t, site, self.atomics, pos, width, UnsynchronisedRead, "an atomic", whole)

    def examine(self, t, site, pos, width, some, reading, whole):
        """The exact check of the accesses ``some`` against the last writers: by row, or by granule where
        rows are NARROW."""
        code = self.writer[pos[some] >> 4]
        narrow = code == NARROW
        wide = ~narrow
        if wide.any():
            self.judge(t, site, pos, width, some[wide], code[wide], reading, whole)
        if narrow.any():
            fine = some[narrow]
            for k in range(max(width // self.granule, 1)):
                code = self.fine_writer[pos[fine] // self.granule + k]
                self.judge(t, site, pos + k * self.granule, min(width, self.granule), fine, code, reading, whole)

    def judge(self, t, site, pos, width, some, code, reading, whole):
        """Raises for the first of the accesses ``some`` that its last writer (``code``) is not ordered before."""
        me = t.warp[some]
        fresh = code == UNINITIALISED
        pending = (code >= PENDING) & ~fresh
        plain = ~fresh & ~pending
        writer = (code & np.uint32(31)).astype(np.intp)
        writer[~plain] = 0
        own = plain & (writer == me)
        wrong = (plain & ~own & (self.clocks.seen[t.cta[some], me, writer] < (code >> CLOCK_SHIFT))) | pending
        if own.any():
            wrong[own] = ~self.clocks.lanes_ordered(t, some[own], whole, code[own])
        if reading:
            wrong |= fresh
        if not wrong.any():
            return
        j = int(np.flatnonzero(wrong)[0])
        i = int(some[j])
        span = self.span(t, i, pos, width)
        verb = ("reads" if reading else "writes") + (" for all lanes of its warp" if whole else "")
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
                f"{culprit(code[j])}",
                "the issuing thread must commit and wait_group, then a barrier must follow for other threads",
            )  # fmt: skip
        what, advice = blame(code[j], t.code[i])
        self.machine.fail(
            UnsynchronisedRead if reading else WriteAfterWrite, site, t, i,
            f"{verb} {span}, written by {what}",
            advice,
        )  # fmt: skip

    def span(self, t, i, pos, width) -> str:
        """Words for the bytes that thread i of the set accesses."""
        offset = int(pos[i] - t.shared_row[i])
        return f"shared bytes {offset}..{offset + width - 1}"

    def check_granules(self, t, site, accesses, pos, width, error, what, whole):
        """Every access recorded by granule must come before this one."""
        for k in range(max(width // self.granule, 1)):
            at = pos + k * self.granule
            self.check_units(t, site, accesses, at // self.granule, at, min(width, self.granule), error, what, whole)

    def check_units(self, t, site, accesses, units, pos, width, error, what, whole):
        """Every access recorded for these units must come before this one."""
        codes = accesses.codes.take(units, axis=0)
        late = codes >= t.limit[:, None]
        if not late.any():
            return
        some = np.flatnonzero(late.any(axis=1))
        codes, me, order = codes[some], t.warp[some], np.arange(some.size)
        wrong = (codes >> CLOCK_SHIFT) > self.clocks.seen[t.cta[some], me]
        by_lane = None if accesses.clocks is None else lambda left: accesses.by_lane(units[some[left]], me[left])
        wrong[order, me] = ~self.clocks.lanes_ordered(t, some, whole, codes[order, me], by_lane)
        if wrong.any():
            j = int(np.flatnonzero(wrong.any(axis=1))[0])
            i = int(some[j])
            # A warp's column says whose code it is, except for 0, which is never wrong.
            before, advice = blame(codes[j][int(np.flatnonzero(wrong[j])[0])], t.code[i])
            self.machine.fail(
                error, site, t, i,
                f"touches {self.span(t, i, pos, width)} after {what} by {before}",
                advice,
            )  # fmt: skip

    def check_earlier_reads(self, t, site, pos, width, whole=False):
        """Write-after-read."""
        self.check_units(t, site, self.readers, pos >> 4, pos, width, WriteAfterRead, "a read", whole)
        if self.fine_readers is not None:
            self.check_granules(t, site, self.fine_readers, pos, width, WriteAfterRead, "a read", whole)

    def check_write(self, t, site, pos, width, values=None, whole=False, code=None):
        """Write-after-write and write-after-read, then records the writer (as ``code``, if given)."""
        rows = pos >> 4
        bad = self.writer.take(rows) >= t.limit
        if bad.any():
            self.examine(t, site, pos, width, np.flatnonzero(bad), False, whole)
        self.check_earlier_reads(t, site, pos, width, whole)
        if self.atomics is not None:
            self.check_granules(t, site, self.atomics, pos, width, WriteAfterWrite, "an atomic", whole)
        if code is None:
            code = t.whole_code if whole else t.code
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
        self.check_write(t, site, pos, width, code=PENDING | (t.code & PLACE_BITS))
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
        code = self.clocks.code[owner // 32] | ((owner % 32).astype(np.uint32) << LANE_SHIFT)
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
            self.examine(t, site, pos, width, np.flatnonzero(bad), True, False)
        self.check_earlier_reads(t, site, pos, width)
        first = pos // self.granule
        for k in range(max(width // self.granule, 1)):
            self.atomics.record(t, first + k, False)


def narrowest(features: set[str]) -> int:
    """Bytes of the narrowest access to shared memory of a kernel with these features, at most 16."""
    return min([16, *(int(f[6:]) for f in features if f.startswith("shared") and f[6:].isdigit())])


def shadow_bytes(size: int, warps: int, features: set[str]) -> int:
    """About how much memory the hazard state of a block with ``size`` bytes of shared memory takes."""
    rows, granules = size // 16 + 1, size // narrowest(features) + 1
    codes = (rows + granules) * (4 + 4 * warps) + granules * (8 + 4 * warps)
    return codes + ((rows + 2 * granules) * 128 * warps if "lane masks" in features else 0)


def culprit(code) -> str:
    """Words for who made an access."""
    warp, lane = int(code & np.uint32(31)), int((code & PLACE_BITS) >> LANE_SHIFT)
    return f"warp {warp}" + (f", lane {lane}" if lane < 32 else "")


def blame(code, mine) -> tuple[str, str]:
    """(who made an earlier access and what is missing, what to do about it), for the thread whose code is ``mine``."""
    if (code ^ mine) & np.uint32(31):
        warp = f"warp {int(code & np.uint32(31))}"
        return f"{warp} with no barrier between", f"put a barrier between {warp}'s access and this one"
    who = "several lanes" if code & WHOLE else f"lane {int((code & PLACE_BITS) >> LANE_SHIFT)}"
    return (
        f"{who} of the same warp with no bar.warp.sync between",
        "put a bar.warp.sync that names both lanes (or a barrier) between that access and this one",
    )
