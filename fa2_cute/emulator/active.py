"""The set of threads that execute a block together, and the warp-wide instructions on it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .clocks import LANE_SHIFT, WHOLE
from .errors import PartialWarp

FULL_MASK = 0xFFFFFFFF


class Active:
    """Threads running one block: all resident ones (``idx`` None) or those listed in ``idx``, in thread order."""

    def __init__(self, machine, idx):
        self.machine, self.idx = machine, idx
        self.n = machine.threads if idx is None else len(idx)
        self.version = -1
        self._whole = machine.all_whole if idx is None else None

    def pick(self, table):
        """The rows of a per-thread table that belong to this set."""
        return table if self.idx is None else table[self.idx]

    @cached_property
    def threads(self):
        return self.pick(self.machine.thread_numbers)

    @cached_property
    def cta(self):
        return self.pick(self.machine.cta_of)

    @cached_property
    def warp(self):
        return self.pick(self.machine.warp_of)

    @cached_property
    def lane(self):
        return self.pick(self.machine.lane_of)

    @cached_property
    def global_warp(self):
        return self.pick(self.machine.global_warp_of)

    @cached_property
    def shared_row(self):
        return self.pick(self.machine.shared_row_of)

    @cached_property
    def global_thread(self):
        return self.pick(self.machine.global_thread_of)

    # ---- clocks: recomputed after the shared memory's clocks moved -----------------------------------------
    def _sync(self):
        clocks = self.machine.shared.clocks
        if self.version != clocks.version:
            self.version = clocks.version
            self._code = clocks.code[self.global_warp] | self.lane_bits
            self._limit = clocks.limit[self.cta]

    @cached_property
    def lane_bits(self):
        """The lane as an access code has it."""
        return self.lane.astype(np.uint32) << LANE_SHIFT

    @property
    def code(self):
        """The access code of each thread; see clocks.py."""
        self._sync()
        return self._code

    @property
    def whole_code(self):
        """The access code of what each thread does for every lane of its warp."""
        return self.code | WHOLE

    @property
    def limit(self):
        """Codes below this are of accesses that come before everything now running in the block."""
        self._sync()
        return self._limit

    @property
    def since(self):
        """Own-warp codes below this are of accesses that come before all that any lane does now."""
        return self.machine.shared.clocks.since[self.global_warp]

    # ---- values --------------------------------------------------------------------------------------------
    def full(self, value):
        """One copy of a scalar for each thread."""
        return np.full(self.n, value)

    def special(self, name: str):
        """A special register as an unsigned array."""
        return self.machine.special(self, name)

    def param(self, name: str, offset: int, width: int):
        """An element of the parameter block, for every thread."""
        return self.machine.param(name, offset, width, self.n)

    def offset_address(self, address, offset):
        """Address plus a constant, modulo 2**64."""
        if address.dtype != np.uint64:
            address = address.astype(np.uint64)
        return address + np.uint64(offset & (1 << 64) - 1) if offset else address

    def sub(self, positions) -> Active:
        """The sub-set at these positions."""
        return Active(self.machine, self.threads[positions])

    def masked_load(self, function, site, address, mask):
        """Runs a load for the lanes of ``mask``; the others get zeros, which the guarded define then drops."""
        some = np.flatnonzero(mask)
        dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[site.width]
        out = [np.zeros(self.n, dtype) for _ in range(site.count)]
        if some.size:
            for o, v in zip(out, function(self.sub(some), site, address[some], None), strict=True):
                o[some] = v
        return out

    def masked_store(self, function, site, address, values, mask):
        """Runs a store for the lanes of ``mask``."""
        some = np.flatnonzero(mask)
        if some.size:
            function(self.sub(some), site, address[some], [v[some] for v in values], None)

    def thread_in_block(self, i: int) -> int:
        """Linear thread number within its block of position i."""
        return int(self.threads[i]) % self.machine.padded

    # ---- warps ---------------------------------------------------------------------------------------------
    @property
    def is_whole(self) -> bool:
        """Whether the set consists of whole warps."""
        if self._whole is None:
            idx = self.idx
            self._whole = len(idx) % 32 == 0 and bool(((idx[::32] % 32 == 0) & (idx[31::32] - idx[::32] == 31)).all())
        return self._whole

    @property
    def warps(self) -> int:
        """How many warps take part."""
        return self.n // 32 if self.is_whole else len(np.unique(self.global_warp))

    def whole(self, site) -> int:
        """The number of warps; PartialWarp unless every one is whole."""
        if self.is_whole:
            return self.n // 32
        counts = np.bincount(self.global_warp)
        warp = int(np.flatnonzero((counts > 0) & (counts < 32))[0])
        i = int(np.flatnonzero(self.global_warp == warp)[0])
        present = sorted(int(x) for x in self.lane[self.global_warp == warp])
        self.machine.fail(
            PartialWarp, site, self, i,
            f"needs all 32 lanes of the warp, but only lanes {present} reached it",
            "a .aligned instruction must be executed by the whole warp: move it out of the divergent branch",
        )  # fmt: skip
        return 0

    def dense(self, values, fill=0):
        """(row of each thread, warps x 32 array) of a per-thread array, lanes not in the set holding ``fill``."""
        warps, row = np.unique(self.global_warp, return_inverse=True)
        out = np.full((len(warps), 32), fill, values.dtype)
        out[row, self.lane] = values
        return row, out

    def check_members(self, site, members) -> None:
        """Every lane named by a member mask must be here or have exited; every executing lane must be named."""
        if self.is_whole and np.ndim(members) == 0 and int(members) == FULL_MASK:
            return
        members = np.broadcast_to(np.asarray(members, np.uint32), (self.n,))
        own = (members >> self.lane.astype(np.uint32)) & np.uint32(1)
        if not own.all():
            i = int(np.flatnonzero(own == 0)[0])
            self.machine.fail(
                PartialWarp, site, self, i,
                f"lane {int(self.lane[i])} executes it, but the member mask 0x{int(members[i]):08x} "
                f"does not name it",
                "build the member mask from the lanes that take this branch",
            )  # fmt: skip
        row, active = self.dense(np.ones(self.n, bool), False)
        bits = (active * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(axis=1).astype(np.uint32)[row]
        missing = members & ~bits & ~self.exited_lanes()
        if missing.any():
            i = int(np.flatnonzero(missing)[0])
            lanes = [b for b in range(32) if int(missing[i]) >> b & 1]
            self.machine.fail(
                PartialWarp, site, self, i,
                f"the member mask 0x{int(members[i]):08x} names lanes {lanes}, which did not reach this "
                f"instruction",
                "the lanes named must execute the same instruction together",
            )  # fmt: skip

    def exited_lanes(self):
        """The lanes of each thread's warp that have exited, as bits."""
        gone = self.machine.exited.reshape(-1, 32)[self.global_warp]
        return np.packbits(gone, axis=1, bitorder="little").view(np.uint32).reshape(-1)

    def synchronise(self, site, members, mask) -> None:
        """bar.warp.sync by the lanes of ``mask``."""
        if mask is not None:
            some = np.flatnonzero(mask)
            if some.size:
                self.sub(some).synchronise(site, members if np.ndim(members) == 0 else members[some], None)
            return
        self.check_members(site, members)
        if self.machine.shared.checks:
            self.machine.shared.clocks.synchronise_lanes(self, members)

    def shuffle(self, site, mode, value, lane_operand, clamp, members):
        """shfl.sync: (values, predicates)."""
        self.check_members(site, members)
        lane = self.lane.astype(np.int64)
        b = np.asarray(lane_operand).astype(np.int64) & 31
        c = np.asarray(clamp).astype(np.int64)
        segment, bound = (c >> 8) & 31, c & 31
        low = lane & segment
        high = low | (bound & ~segment)
        if mode == "up":
            source = lane - b
            valid = source >= high
        elif mode == "down":
            source = lane + b
            valid = source <= high
        elif mode == "bfly":
            source = lane ^ b
            valid = source <= high
        else:
            source = low | (b & ~segment)
            valid = source <= high
        source = np.where(valid, source, lane)
        if self.is_whole:
            warps = self.n // 32
            return value.reshape(warps, 32)[np.arange(warps)[:, None], source.reshape(warps, 32)].reshape(-1), valid
        row, table = self.dense(value)
        _, there = self.dense(np.ones(self.n, bool), False)
        absent = ~there[row, source]
        if absent.any():
            i = int(np.flatnonzero(absent)[0])
            self.machine.fail(
                PartialWarp, site, self, i,
                f"lane {int(lane[i])} reads lane {int(source[i])}, which does not take part",
                "shuffle only among lanes that execute the instruction",
            )  # fmt: skip
        return table[row, source], valid

    def _members_of(self, members):
        """Per-thread member bits of its own warp as a (threads, 32) bool array."""
        members = np.broadcast_to(np.asarray(members, np.uint32), (self.n,))
        return ((members[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)).astype(bool)

    def vote(self, site, mode, value, members):
        """vote.sync: bool array, or uint32 for ballot."""
        self.check_members(site, members)
        if self.is_whole and np.ndim(members) == 0 and int(members) == FULL_MASK:
            table = value.reshape(-1, 32)
            if mode == "ballot":
                bits = np.packbits(table, axis=1, bitorder="little").view(np.uint32).reshape(-1)
                return np.repeat(bits, 32)
            result = {"all": table.all(axis=1), "any": table.any(axis=1)}.get(mode)
            if result is None:
                result = table.all(axis=1) | ~table.any(axis=1)
            return np.repeat(result, 32)
        row, table = self.dense(value, False)
        _, there = self.dense(np.ones(self.n, bool), False)
        named = self._members_of(members) & there[row]
        table = table[row]
        if mode == "ballot":
            return np.packbits(table & named, axis=1, bitorder="little").view(np.uint32).reshape(-1)
        every, some = (table | ~named).all(axis=1), (table & named).any(axis=1)
        return {"all": every, "any": some, "uni": every | ~some}[mode]

    def active_mask(self):
        """activemask: the lanes of each warp that execute this."""
        row, there = self.dense(np.ones(self.n, bool), False)
        return np.packbits(there, axis=1, bitorder="little").view(np.uint32).reshape(-1)[row]

    def match(self, site, mode, value, members):
        """match.sync: (mask, predicate)."""
        self.check_members(site, members)
        row, table = self.dense(value)
        _, there = self.dense(np.ones(self.n, bool), False)
        same = (table[row] == value[:, None]) & there[row] & self._members_of(members)
        bits = np.packbits(same, axis=1, bitorder="little").view(np.uint32).reshape(-1)
        if mode == "any":
            return bits, np.ones(self.n, bool)
        named = (
            np.packbits(there[row] & self._members_of(members), axis=1, bitorder="little").view(np.uint32).reshape(-1)
        )
        every = bits == named
        return np.where(every, named, np.uint32(0)), every

    def reduce(self, site, op, value, members):
        """redux.sync over the named lanes."""
        self.check_members(site, members)
        row, table = self.dense(value)
        _, there = self.dense(np.ones(self.n, bool), False)
        named = self._members_of(members) & there[row]
        table = table[row]
        function, start = {
            "add": (np.add, 0),
            "min": (np.minimum, None),
            "max": (np.maximum, None),
            "and": (np.bitwise_and, ~np.zeros(1, value.dtype)[0] if value.dtype.kind != "f" else 0),
            "or": (np.bitwise_or, 0),
            "xor": (np.bitwise_xor, 0),
        }[op]
        if start is None:
            start = value[:, None]
        return function.reduce(np.where(named, table, start).astype(value.dtype), axis=1, dtype=value.dtype)

    def elect(self, site, members):
        """elect.sync: (leader lane, whether this lane leads); the leader is the lowest named lane."""
        self.check_members(site, members)
        leader = np.argmax(self._members_of(members), axis=1)
        return leader.astype(np.uint32), leader == self.lane

    def transpose(self, site, value):
        """movmatrix .trans on an 8 x 8 matrix of 16-bit elements."""
        warps = self.whole(site)
        halves = value.view(np.uint16).reshape(warps, 8, 8)
        return np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32).reshape(-1)

    def mma(self, site, form, a, b, pairs, c):
        """A run of mma.sync; see fragments.multiply and tensor_core.multiply."""
        warps = self.whole(site)
        self.machine.mma_count += warps * site.count
        return self.machine.numerics.multiply(form, a, b, pairs, c, warps)
