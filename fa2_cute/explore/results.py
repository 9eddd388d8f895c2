"""Results of a search in one JSON file, written after every point: a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from ..arch import Architecture
from .records import Record
from .space import Point, Workload

FORMAT = 1


class Results:
    """Records by (point, what they depend on).

    A record is found again only while the kernel's code and the explorer's method are what they were.
    """

    def __init__(self, path: Path, workload: Workload, arch: Architecture):
        """Opens ``path`` or begins it. ValueError where it holds results of another problem, or is no results file."""
        self.path, self.workload, self.arch = path, workload, arch
        self.records: dict[str, tuple[str, Record]] = {}
        if path.exists():
            self._read()

    def _read(self):
        try:
            data = json.loads(self.path.read_text())
            if data["format"] != FORMAT:
                raise KeyError("format")
            workload, arch = Workload(**data["workload"]), data["arch"]
            records = {name: (x["state"], Record.from_dict(x["record"])) for name, x in data["points"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.path}: is no file of results; give another one, or remove it") from None
        if (workload, arch) != (self.workload, self.arch.name):
            raise ValueError(
                f"{self.path}: holds results of {workload.title} on {arch}; give another file, or remove it"
            )
        self.records = records

    def get(self, point: Point, state: str) -> Record | None:
        """The record of ``point`` if it was made in ``state``."""
        found = self.records.get(point.name)
        return found[1] if found and found[0] == state else None

    def put(self, record: Record, state: str):
        """Keep ``record`` and write the file; a reader sees the old or the new one."""
        self.records[record.point.name] = (state, record)
        data = {
            "format": FORMAT,
            "arch": self.arch.name,
            "workload": asdict(self.workload),
            "points": {name: {"state": s, "record": r.as_dict()} for name, (s, r) in self.records.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text(json.dumps(data, indent=1))
        os.replace(scratch, self.path)
