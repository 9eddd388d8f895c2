"""Accesses that are not plainly global or shared: cp.async, local, parameter and generic addresses, and atomics."""

from __future__ import annotations

import numpy as np

from .atomics import atomic_apply
from .errors import ArgumentError, EmulatorError, MisalignedAccess, OutOfBoundsLocal
from .kinds import UNITS

# Where the shared and local windows lie in the generic address space; host addresses are below.
WINDOWS = {"share": 1 << 60, "local": 1 << 61}


class Spaces:
    """The address spaces of a machine, as the generated code calls them."""

    def __init__(self, machine):
        self.machine = machine

    def window(self, space: str) -> int:
        return WINDOWS[space]

    def in_space(self, address, space: str):
        """isspacep."""
        if space == "global":
            return address < np.uint64(WINDOWS["share"])
        return (address >> np.uint64(60)) == np.uint64(WINDOWS[space[:5]] >> 60)

    def copy_async(self, t, site, dst, src, source_size, mask) -> None:
        """cp.async: the bytes move now (a legal time), the hazard state says they land at the wait."""
        if mask is not None:
            some = np.flatnonzero(mask)
            if some.size == t.n:
                mask = None
            elif some.size:
                size = None if source_size is None else source_size[some]
                self.copy_async(t.sub(some), site, dst[some], src[some], size, None)
                return
            else:
                return
        width = site.width
        pos = self.machine.shared.locate(t, site, dst, width)
        if source_size is None:
            data = self.machine.global_memory.read(t, site, t.offset_address(src, site.source_offset), width)
        else:
            data = self._sized_source(t, site, src, source_size, width)
        if self.machine.counters is not None:
            self.machine.counters.shared_access(site, t, pos, width)
        if self.machine.shared.checks:
            self.machine.shared.issue_copy(t, site, pos, width)
        self.machine.shared.views[width][pos >> (width.bit_length() - 1)] = data

    def _sized_source(self, t, site, src, source_size, width):
        """The source of copies with a size operand: bytes past it are zero and are not read."""
        if (source_size > width).any():
            i = int(np.flatnonzero(source_size > width)[0])
            what = f"gives a source size of {int(source_size[i])} bytes to a copy of {width}"
            self.machine.fail(ArgumentError, site, t, i, what, "keep the source size within the copy size")
        data = np.zeros((t.n, width), np.uint8)
        for size in np.unique(source_size):
            if size:
                where = np.flatnonzero(source_size == size)
                data[where, :size] = self._partial_source(t.sub(where), site, src[where], int(size), width)
        return data.view(UNITS[width]).reshape(-1)

    def _partial_source(self, t, site, src, size, width):
        """(threads, size) bytes of copies that read only their first ``size`` bytes."""
        address = t.offset_address(src, site.source_offset)
        if size == width:
            return self.machine.global_memory.read(t, site, address, width).view(np.uint8).reshape(-1, width)
        if (address & np.uint64(width - 1)).any():
            i = int(np.flatnonzero(address & np.uint64(width - 1))[0])
            what = f"copies from an address that is not a multiple of {width} bytes"
            self.machine.fail(MisalignedAccess, site, t, i, what, "align the source to the copy size")
        columns = [self.machine.global_memory.read(t, site, address + np.uint64(k), 1) for k in range(size)]
        return np.stack(columns, 1)

    # ---- local, param and generic accesses -----------------------------------------------------------------
    def local_position(self, t, site, address):
        """Row-relative byte position in local memory."""
        total = site.width * site.count
        pos = address.astype(np.int64) + site.offset
        bad = (pos < 0) | (pos > self.machine.local_size - total) | (pos & (total - 1) != 0)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            self.machine.fail(
                OutOfBoundsLocal, site, t, i,
                f"local bytes {int(pos[i])}..{int(pos[i]) + total - 1} of {self.machine.local_size}, or "
                f"misaligned", "",
            )  # fmt: skip
        return pos

    def local_load(self, t, site, address, mask):
        """ld.local."""
        if mask is not None:
            return t.masked_load(self.local_load, site, address, mask)
        pos = self.local_position(t, site, address)
        out = []
        for k in range(site.count):
            columns = pos[:, None] + k * site.width + np.arange(site.width)
            raw = np.ascontiguousarray(self.machine.local[t.threads[:, None], columns])
            out.append(raw.view(f"u{site.width}").reshape(-1))
        return out

    def local_store(self, t, site, address, values, mask):
        """st.local."""
        if mask is not None:
            return t.masked_store(self.local_store, site, address, values, mask)
        pos = self.local_position(t, site, address)
        for k, v in enumerate(values):
            columns = pos[:, None] + k * site.width + np.arange(site.width)
            self.machine.local[t.threads[:, None], columns] = v.view(np.uint8).reshape(-1, site.width)
        return None

    def param_load(self, t, site, address, mask):
        """ld.param with a computed address."""
        if mask is not None:
            return t.masked_load(self.param_load, site, address, mask)
        total = site.width * site.count
        pos = address.astype(np.int64) + site.offset
        bad = (pos < 0) | (pos > len(self.machine.params) - total)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            self.machine.fail(
                OutOfBoundsLocal, site, t, i, f"parameter bytes {int(pos[i])}.. of {len(self.machine.params)}", ""
            )
        raw = np.frombuffer(self.machine.params, np.uint8)[pos[:, None] + np.arange(total)]
        columns = np.ascontiguousarray(raw).view(f"u{site.width}")
        return list(np.ascontiguousarray(columns.T))

    def _by_space(self, t, site, address):
        """Yields (space, positions) of generic addresses."""
        whole = t.offset_address(address, site.offset)
        space = (whole >> np.uint64(60)).astype(np.int64)
        for value in np.unique(space):
            yield (
                {0: "global", 1: "shared", 2: "local"}.get(int(value), "global"),
                np.flatnonzero(space == value),
            )

    def generic_load(self, t, site, address, mask):
        """ld without a space: global, shared or local by address."""
        if mask is not None:
            return t.masked_load(self.generic_load, site, address, mask)
        dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[site.width]
        out = [np.zeros(t.n, dtype) for _ in range(site.count)]
        for space, where in self._by_space(t, site, address):
            function, base = self._generic(space, True)
            values = function(t.sub(where), site, address[where] - np.uint64(base), None)
            for o, v in zip(out, values, strict=True):
                o[where] = v
        return out

    def generic_store(self, t, site, address, values, mask):
        """st without a space."""
        if mask is not None:
            return t.masked_store(self.generic_store, site, address, values, mask)
        for space, where in self._by_space(t, site, address):
            function, base = self._generic(space, False)
            function(t.sub(where), site, address[where] - np.uint64(base), [v[where] for v in values], None)
        return None

    def _generic(self, space, load):
        """The access function of a space and the base of its window."""
        if space == "global":
            return (self.machine.global_memory.load if load else self.machine.global_memory.store), 0
        if space == "shared":
            return (self.machine.shared.load if load else self.machine.shared.store), WINDOWS["share"]
        return (self.local_load if load else self.local_store), WINDOWS["local"]

    # ---- atomics -------------------------------------------------------------------------------------------
    def atomic(self, t, site, address, values, mask):
        """atom/red: the old values; lanes that share an address act in thread order."""
        if mask is not None:
            out = np.zeros(t.n, f"u{site.width}")
            some = np.flatnonzero(mask)
            if some.size:
                out[some] = self.atomic(t.sub(some), site, address[some], [v[some] for v in values], None)
            return out
        space = site.space
        if space == "generic":
            out = np.zeros(t.n, f"u{site.width}")
            for which, where in self._by_space(t, site, address):
                _, base = self._generic(which, True)
                part = [v[where] for v in values]
                out[where] = self._atomic_in(which, t.sub(where), site, address[where] - np.uint64(base), part)
            return out
        return self._atomic_in(space, t, site, address, values)

    def _atomic_in(self, space, t, site, address, values):
        if space == "shared":
            pos = self.machine.shared.locate(t, site, address, site.width)
            if self.machine.shared.checks:
                self.machine.shared.check_atomic(t, site, pos, site.width)
            return atomic_apply(self.machine.shared.views[site.width], pos // site.width, site, values)
        if space != "global":
            self.machine.fail(EmulatorError, site, t, 0, "an atomic on local memory", "")
        address = t.offset_address(address, site.offset)
        out = np.zeros(t.n, f"u{site.width}")
        for region, where in self.machine.global_memory.find(t, site, address, site.width, True):
            some = slice(None) if where is None else where
            index = (address[some] - region.start_base).view(np.int64) // site.width
            out[some] = atomic_apply(region.units(site.width), index, site, [v[some] for v in values])
        return out
