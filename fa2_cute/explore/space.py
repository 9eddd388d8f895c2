"""The search space as plain data: what can be varied, for which problem, and why a point cannot be had."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..spec import CAUSAL, FULL, QUERY_HELD, Features

KIB = 1024


def _parameter(default, values: tuple, says: str, mark: str | dict[str, str] = ""):
    return field(default=default, metadata={"values": values, "says": says, "mark": mark})


@dataclass(frozen=True, order=True)
class Point:
    """One choice of every parameter that may be varied.

    A new parameter is one line here: its default, the values that a search tries, what it is, and what marks another
    value in a point's name (words have a mark each). Its name is the field of ``ForwardSpec`` that it sets; while the
    kernel has no such field only the default can be had.
    """

    tile_m: int = _parameter(128, (64, 128), "query rows a block")
    tile_n: int = _parameter(64, (32, 48, 64, 96, 128), "keys a step")
    warps: int = _parameter(4, (4, 8), "warps a block")
    stages: int = _parameter(2, (2, 3), "tiles in the K ring and in the V ring")
    query_held: str = _parameter(
        "none", QUERY_HELD, "how much of Q stays in registers; the rest is read each step", {"half": "h", "all": "q"}
    )
    swizzle: bool = _parameter(
        True, (True,), "permute 16-byte chunks of shared memory so that banks do not collide", "plain"
    )
    warps_n: int = _parameter(1, (1,), "warps side by side along the keys; the others stack along the query rows", "n")

    @property
    def name(self) -> str:
        """ "128x64x8x2-q": tile_m, tile_n, warps, stages, and a mark for what differs from its default beyond them."""
        marks = [
            _mark(f.metadata["mark"], getattr(self, f.name)) for f in _FIELDS[4:] if getattr(self, f.name) != f.default
        ]
        return "-".join([f"{self.tile_m}x{self.tile_n}x{self.warps}x{self.stages}", *marks])

    @property
    def threads(self) -> int:
        return 32 * self.warps


def _mark(mark: str | dict[str, str], value) -> str:
    if isinstance(value, str):
        return mark[value]
    return mark if isinstance(value, bool) else f"{mark}{value}"


_FIELDS = dataclasses.fields(Point)
PARAMETERS: dict[str, dataclasses.Field] = {f.name: f for f in _FIELDS}


@dataclass(frozen=True)
class Workload:
    """The problem that tiles are compared on.

    q (batch, query_len, heads, head_dim), k and v (batch, key_len, kv_heads, head_dim).
    """

    head_dim: int
    query_len: int
    key_len: int
    causal: bool = False
    batch: int = 1
    heads: int = 32
    kv_heads: int = 32
    dtype: str = "bfloat16"

    def __post_init__(self):
        for name in ("head_dim", "query_len", "key_len", "batch", "heads", "kv_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: got {value!r}, takes an integer")
            if value < 1:
                raise ValueError(f"{name}: got {value}, takes 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, takes a divisor of {self.heads} heads")
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype: got {self.dtype!r}, takes 'bfloat16' or 'float16'")

    @property
    def title(self) -> str:
        """One line: "head_dim 128, 4096 x 4096, causal, batch 1, 32 heads on 8, bfloat16"."""
        mask = "causal" if self.causal else "full"
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} heads on {self.kv_heads}"
        return (
            f"head_dim {self.head_dim}, {self.query_len} x {self.key_len}, {mask}, batch {self.batch}, {heads}, "
            f"{self.dtype}"
        )

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def features(self) -> Features:
        return CAUSAL if self.causal else FULL

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the mask leaves."""
        if not self.causal:
            return self.query_len * self.key_len
        first = self.key_len - self.query_len + 1  # keys that row 0 sees, if positive
        rows = min(self.query_len, self.key_len)  # rows that see any key: the last ones
        last = self.key_len
        return (max(first, 1) + last) * rows // 2

    @property
    def operations(self) -> int:
        """Floating-point operations of both products over the pairs that the mask leaves."""
        return 4 * self.batch * self.heads * self.head_dim * self.visible_pairs


def points(vary: Mapping[str, Iterable] | None = None) -> list[Point]:
    """Every combination of the values of ``PARAMETERS``, those named in ``vary`` replaced.

    Raises ValueError for a parameter that is none.
    """
    vary = dict(vary or {})
    for name in vary:
        if name not in PARAMETERS:
            raise ValueError(f"vary: got {name!r}, takes one of {', '.join(PARAMETERS)}")
    values = [tuple(vary.get(name, f.metadata["values"])) for name, f in PARAMETERS.items()]
    return [Point(*choice) for choice in itertools.product(*values)]


def parse_vary(texts: Iterable[str]) -> dict[str, tuple]:
    """``["tile_m=64,128", "swizzle=no,yes"]`` as ``points`` takes it; ValueError names what is possible."""
    found = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in PARAMETERS or not equals:
            raise ValueError(f"--vary: got {text!r}, takes NAME=VALUE,VALUE with NAME one of {', '.join(PARAMETERS)}")
        found[name] = tuple(_value(PARAMETERS[name], item.strip()) for item in listed.split(","))
    return found


_WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def _value(parameter: dataclasses.Field, text: str):
    name, kind = parameter.name, type(parameter.default)
    if kind is str:
        if text not in parameter.metadata["values"]:
            raise ValueError(f"--vary: {name}: got {text!r}, takes {', '.join(parameter.metadata['values'])}")
        return text
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(f"--vary: {name}: got {text!r}, takes yes or no")
        return _WORDS[text.lower()]
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"--vary: {name}: got {text!r}, takes whole numbers") from None
    if value < 1:
        raise ValueError(f"--vary: {name}: got {value}, takes 1 or more")
    return value


@dataclass(frozen=True)
class Refusal:
    """A point that cannot be had, and why, for a person to read."""

    point: Point
    reason: str
