"""Launch arguments and global memory: tensors at their own host addresses, with exact access checks."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

from .errors import ArgumentError, GlobalRace, MisalignedAccess, OutOfBoundsGlobal, ReadOnlyWrite
from .kinds import UNITS, join_units, split_units

_ALIGN = 32  # the widest access (ld.global.v4.b64)


@dataclass
class Tensor:
    """A tensor argument.

    ``array``: a numpy array or a CPU torch tensor, any strides. ``extents`` and ``strides`` name the
    dimensions whose
    extent (i32) and stride in elements (i64) the kernel takes dynamically, in the order of the parameter
    struct
    {pointer, extents, strides}. With both empty the parameter is the bare pointer. ``writable``: whether the
    kernel
    may write it.
    """

    array: object
    name: str = "tensor"
    extents: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    writable: bool = False
    pointer: int = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    byte_strides: tuple[int, ...] = field(init=False)
    itemsize: int = field(init=False)

    def __post_init__(self):
        a = self.array
        if isinstance(a, np.ndarray):
            self.pointer = a.__array_interface__["data"][0]
            self.shape, self.byte_strides, self.itemsize = a.shape, a.strides, a.itemsize
            if self.writable and not a.flags.writeable:
                raise ArgumentError(f"tensor {self.name!r}: writable=True, but the numpy array is read-only")
        elif hasattr(a, "data_ptr") and hasattr(a, "element_size"):
            if getattr(a, "device", None) is not None and a.device.type != "cpu":
                raise ArgumentError(f"tensor {self.name!r} is on {a.device}; the emulator works on CPU tensors")
            self.pointer, self.itemsize = a.data_ptr(), a.element_size()
            self.shape = tuple(a.shape)
            self.byte_strides = tuple(s * self.itemsize for s in a.stride())
        else:
            raise ArgumentError(f"tensor {self.name!r}: need a numpy array or a torch tensor, got {type(a).__name__}")
        for what, dims in (("extents", self.extents), ("strides", self.strides)):
            for d in dims:
                if not 0 <= d < len(self.shape):
                    raise ArgumentError(
                        f"tensor {self.name!r}: {what} names dimension {d} of a {len(self.shape)}-d tensor"
                    )

    def pack(self) -> bytes:
        """The parameter struct: pointer, dynamic extents as i32, dynamic strides (elements) as i64, aligned."""
        out = bytearray(int(self.pointer).to_bytes(8, "little"))
        for d in self.extents:
            if self.shape[d] >= 2**31:
                raise ArgumentError(f"tensor {self.name!r}: extent {self.shape[d]} of dimension {d} exceeds 31 bits")
            out += int(self.shape[d]).to_bytes(4, "little", signed=True)
        if self.strides:
            out += bytes(-len(out) % 8)
        for d in self.strides:
            if self.byte_strides[d] % self.itemsize:
                raise ArgumentError(f"tensor {self.name!r}: stride of dimension {d} is not a whole number of elements")
            out += (self.byte_strides[d] // self.itemsize).to_bytes(8, "little", signed=True)
        out += bytes(-len(out) % (8 if self.extents or self.strides else 1))
        return bytes(out)


class Region:
    """The bytes of one tensor: span, gaps, typed views of its memory, and who wrote what."""

    def __init__(self, tensor: Tensor, number: int):
        self.tensor, self.number, self.name, self.writable = tensor, number, tensor.name, tensor.writable
        dims = [(abs(s), n) for s, n in zip(tensor.byte_strides, tensor.shape, strict=True) if n > 1 and s != 0]
        self.empty = any(n == 0 for n in tensor.shape)
        low = sum(s * (n - 1) for s, n in zip(tensor.byte_strides, tensor.shape, strict=True) if s < 0)
        self.low = tensor.pointer + (0 if self.empty else low)
        self.run = tensor.itemsize
        outer: list[tuple[int, int]] = []
        for stride, n in sorted(dims):
            if stride == self.run and not outer:
                self.run *= n
            elif outer and stride == outer[-1][0] * outer[-1][1]:
                outer[-1] = (outer[-1][0], outer[-1][1] * n)
            else:
                outer.append((stride, n))
        self.outer = outer[::-1]
        self.span = 0 if self.empty else self.run + sum(s * (n - 1) for s, n in outer)
        self.bitmap = None
        reach = self.run
        for (
            stride,
            n,
        ) in outer:  # innermost first: elements nest unless an inner extent reaches past the next stride
            if stride < reach:
                self.bitmap = self._bitmap(dims)
                break
            reach = stride * (n - 1) + reach
        self.base = self.low & ~(_ALIGN - 1)
        self.bytes = (self.low + self.span + _ALIGN - 1 & ~(_ALIGN - 1)) - self.base
        self.views: dict[int, np.ndarray] = {}
        self.writers = None
        self.start_base, self.start_low = np.uint64(self.base), np.uint64(self.low)

    def _bitmap(self, dims):
        """Which bytes hold elements, for views whose dimensions interleave."""
        span = self.span
        if span > 1 << 28:
            raise ArgumentError(f"tensor {self.name!r}: overlapping strides over more than 256 MiB are not supported")
        bitmap = np.zeros(span, bool)
        offsets = np.zeros(1, np.int64)
        for stride, n in dims:
            offsets = (offsets[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
        for byte in range(self.tensor.itemsize):
            bitmap[offsets + byte] = True
        return bitmap

    def units(self, size: int) -> np.ndarray:
        """The memory from ``base`` as one element per access of ``size`` bytes."""
        got = self.views.get(size)
        if got is None:
            raw = np.frombuffer((ctypes.c_uint8 * self.bytes).from_address(self.base), np.uint8)
            got = self.views[size] = raw.view(UNITS[size])
        return got

    def holds(self, address: np.ndarray, width: int) -> np.ndarray:
        """Bool array: the whole access lies on elements of the view."""
        if self.span < width:
            return np.zeros(address.shape, bool)
        inside = (address - self.start_low) <= np.uint64(self.span - width)
        if (self.outer or self.bitmap is not None) and inside.any():
            rest = np.where(inside, address - self.start_low, np.uint64(0)).view(np.int64)
            if self.bitmap is not None:
                ok = np.ones(address.shape, bool)
                for byte in range(width):
                    ok &= self.bitmap[rest + byte]
                return inside & ok
            for stride, n in self.outer:
                rest = rest - np.minimum(rest // stride, n - 1) * stride
            inside &= rest + width <= self.run
        return inside

    def index_of(self, address: int) -> tuple[int, ...] | None:
        """The element index that holds a byte address, or None."""
        t = self.tensor
        order = sorted(range(len(t.shape)), key=lambda d: -abs(t.byte_strides[d]))
        rest, index = address - self.low, [0] * len(t.shape)
        for d in order:
            s, n = t.byte_strides[d], t.shape[d]
            if s == 0 or n == 1:
                continue
            i = min(rest // abs(s), n - 1)
            rest -= i * abs(s)
            index[d] = int(i if s > 0 else n - 1 - i)
        return tuple(index) if 0 <= rest < t.itemsize else None


class GlobalMemory:
    """Loads and stores on the launch's tensors."""

    def __init__(self, machine, tensors: list[Tensor], checks: bool, granule: int):
        self.machine, self.checks, self.granule = machine, checks, granule
        self.regions = [r for r in (Region(t, i) for i, t in enumerate(tensors)) if not r.empty]

    def find(self, t, site, address, width, write):
        """Splits an access by region: list of (region, positions or None for all). Raises if a lane hits none."""
        if (address & np.uint64(width - 1)).any():
            i = int(np.flatnonzero(address & np.uint64(width - 1))[0])
            self.machine.fail(
                MisalignedAccess, site, t, i,
                f"global address {self.describe(int(address[i]))} is not a multiple of the access "
                f"width, {width} bytes",
                "check the tensor's alignment and strides against the vector width",
            )  # fmt: skip
        regions = self.regions
        if site.hint < len(regions):
            first = regions[site.hint]
            if (first.writable or not write) and first.holds(address, width).all():
                return [(first, None)]
        found = np.full(address.shape, -1, np.int64)
        for order in (True, False) if write else (None,):
            for k, region in enumerate(regions):
                if order is None or region.writable == order:
                    found[(found < 0) & region.holds(address, width)] = k
        if (found < 0).any():
            self.out_of_bounds(t, site, address, width, int(np.flatnonzero(found < 0)[0]), write)
        if write:
            for k in np.unique(found):
                if not regions[k].writable:
                    i = int(np.flatnonzero(found == k)[0])
                    self.machine.fail(
                        ReadOnlyWrite, site, t, i,
                        f"writes {width} bytes to {self.describe(int(address[i]))}, passed with "
                        f"writable=False",
                        "pass Tensor(..., writable=True) if the kernel is meant to write it",
                    )  # fmt: skip
        kinds = np.unique(found)
        site.hint = int(kinds[0])
        if len(kinds) == 1:
            return [(regions[kinds[0]], None)]
        return [(regions[k], np.flatnonzero(found == k)) for k in kinds]

    def describe(self, address: int) -> str:
        """Where an address lies relative to the nearest tensor."""
        best = None
        for r in self.regions:
            away = max(r.low - address, address - (r.low + r.span - 1), 0)
            if best is None or away < best[0]:
                best = (away, r)
        if best is None:
            return f"0x{address:x} (the launch has no tensors)"
        away, r = best
        text = f"tensor {r.name!r} byte offset {address - r.tensor.pointer}"
        index = r.index_of(address) if away == 0 else None
        if index is not None:
            text += f" (element {list(index)})"
        return text

    def out_of_bounds(self, t, site, address, width, i, write):
        """Raises OutOfBoundsGlobal for position i."""
        a = int(address[i])
        nearest = min(self.regions, key=lambda r: max(r.low - a, a + width - (r.low + r.span), 0), default=None)
        if nearest is None:
            where = "outside every tensor"
        elif a < nearest.low:
            where = f"{nearest.low - a} bytes before its first element"
        elif a + width > nearest.low + nearest.span:
            where = f"{a + width - nearest.low - nearest.span} bytes past its last element"
        else:
            where = "in a gap between the elements of the strided view"
        shape = f", shape {list(nearest.tensor.shape)}" if nearest else ""
        self.machine.fail(
            OutOfBoundsGlobal, site, t, i,
            f"{'writes' if write else 'reads'} {width} bytes at {self.describe(a)}{shape}: {where}",
            "guard the access with the tensor's extents, or pass the right extents and strides",
        )  # fmt: skip

    def load(self, t, site, address, mask):
        """ld.global: list of ``count`` unsigned arrays."""
        if mask is not None:
            return t.masked_load(self.load, site, address, mask)
        units = self.read(t, site, t.offset_address(address, site.offset), site.width * site.count)
        return split_units(units, site.width, site.count)

    def read(self, t, site, address, size):
        """Checked gather of one ``size``-byte unit a thread at exact addresses (uint64)."""
        parts = self.find(t, site, address, size, False)
        shift = np.uint64(size.bit_length() - 1)
        if self.machine.counters is not None:
            self.machine.counters.global_access(site, t, address, size, parts, False)
        region, where = parts[0]
        if where is None:
            return region.units(size).take(((address - region.start_base) >> shift).view(np.int64))
        data = np.empty(t.n, UNITS[size])
        for region, where in parts:
            index = ((address[where] - region.start_base) >> shift).view(np.int64)
            data[where] = region.units(size).take(index)
        return data

    def store(self, t, site, address, values, mask):
        """st.global with the write-write race check."""
        if mask is not None:
            return t.masked_store(self.store, site, address, values, mask)
        address = t.offset_address(address, site.offset)
        size = site.width * site.count
        parts = self.find(t, site, address, size, True)
        shift = np.uint64(size.bit_length() - 1)
        if self.machine.counters is not None:
            self.machine.counters.global_access(site, t, address, size, parts, True)
        data = join_units(values)
        for region, where in parts:
            some = address if where is None else address[where]
            if self.checks:
                self.claim(t, site, region, some, where, size)
            index = ((some - region.start_base) >> shift).view(np.int64)
            region.units(size)[index] = data if where is None else data[where]
        return None

    def claim(self, t, site, region, address, where, width):
        """Records the writing thread of every granule; GlobalRace if another thread wrote it before."""
        if region.writers is None:
            region.writers = np.zeros(region.bytes // self.granule, np.uint32)
        me = t.global_thread if where is None else t.global_thread[where]
        first = (address - region.start_base).view(np.int64) // self.granule
        for k in range(max(width // self.granule, 1)):
            index = first + k
            old = region.writers[index]
            clash = (old != 0) & (old != me)
            region.writers[index] = me
            now = region.writers[index]
            clash |= now != me
            if clash.any():
                j = int(np.flatnonzero(clash)[0])
                other = int(old[j]) if old[j] and old[j] != me[j] else int(now[j])
                i = j if where is None else int(where[j])
                a = int(address[j]) + k * self.granule
                self.machine.fail(
                    GlobalRace, site, t, i,
                    f"writes {self.describe(a)}, which {self.machine.thread_name(other - 1)} also "
                    f"writes in this launch",
                    "give each thread its own output bytes, or use atom/red",
                )  # fmt: skip
