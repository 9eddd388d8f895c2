"""A user's tuning file: tiles that were found best on a device, for classes of problems. Nothing is read unless
``FA2_CUTE_TUNING`` names a file, and nothing is written unless somebody asks for it.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..spec import QUERY_HELD

if TYPE_CHECKING:
    from .space import Point

VARIABLE = "FA2_CUTE_TUNING"
FORMAT = 2
TILE_FIELDS = ("tile_m", "tile_n", "warps", "stages", "query_held", "swizzle")


@dataclass(frozen=True)
class ProblemClass:
    """Problems that share a tile: lengths, batch and head counts do not enter it, as in tiling.py."""

    dtype: str
    head_dim: int
    value_dim: int
    causal: bool

    @property
    def key(self) -> str:
        """ "bfloat16 128 128 causal"."""
        return f"{self.dtype} {self.head_dim} {self.value_dim} {'causal' if self.causal else 'full'}"


def tuned(problem: ProblemClass, device: str) -> dict[str, int | str] | None:
    """Fields of ``ForwardSpec`` to set for ``problem`` on ``device`` (as torch names it), or None.

    None at once where ``FA2_CUTE_TUNING`` is not set. The file is read once for each of its versions. ValueError where
    it is set and holds no tuning.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None  # a name to write to
    return _read(path, status.st_mtime_ns, status.st_size).get(device, {}).get(problem.key)


def destination() -> Path:
    """The file that ``FA2_CUTE_TUNING`` names; ValueError where it is not set."""
    if not os.environ.get(VARIABLE):
        raise ValueError(f"--apply: needs a file to write to; set {VARIABLE} to its name, and keep it set for calls")
    return Path(os.environ[VARIABLE])


def tile_of(point: Point) -> dict[str, int | str]:
    """What of ``point`` is written: all that the kernel's specification has."""
    from . import binding

    return {name: getattr(point, name) for name in TILE_FIELDS if name in binding.SPEC_FIELDS}


def apply(tile: dict[str, int | str], problem: ProblemClass, device: str, note: str, path: Path | None = None) -> Path:
    """Write that ``problem`` on ``device`` takes ``tile`` to ``path``, by default the file of ``FA2_CUTE_TUNING``.

    Other entries of the file stay. ``note`` says where the tile comes from. ValueError where no file is named.
    """
    path = path or destination()
    devices, notes = {}, {}
    if path.exists():
        data = _load(path)
        devices, notes = data["devices"], data["notes"]
    devices.setdefault(device, {})[problem.key] = tile
    notes[f"{device}: {problem.key}"] = note
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps({"format": FORMAT, "devices": devices, "notes": notes}, indent=1) + "\n")
    os.replace(scratch, path)
    return path


def _is_a_value(name: str, x) -> bool:
    return x in QUERY_HELD if name == "query_held" else isinstance(x, int)


@functools.lru_cache(maxsize=4)
def _read(path: str, changed: int, size: int) -> dict:
    return _load(Path(path))["devices"]


def _load(path: Path) -> dict:
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise KeyError("format")
        for classes in data["devices"].values():
            for tile in classes.values():
                if not set(tile) <= set(TILE_FIELDS) or not all(_is_a_value(name, x) for name, x in tile.items()):
                    raise TypeError
        data["notes"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{VARIABLE}: {path} holds no tuning; remove it, or name another file") from None
    return data
