"""Records what the package passes to the emulator, so that tests can launch it again with other code or options."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from fa2_cute import emulator


@dataclass
class Launch:
    """One launch: the kernel, launch's keyword arguments, and the statistics it returned."""

    kernel: object
    options: dict
    stats: object = None

    def again(self, kernel=None, **changes):
        """Launches it once more on the same tensors."""
        return emulator.launch(kernel or self.kernel, **{**self.options, **changes})


@contextlib.contextmanager
def recorded(monkeypatch, **changes):
    """Yields the list of launches made inside; ``changes`` are added to their options."""
    launch, seen = emulator.launch, []

    def recording(kernel, **options):
        record = Launch(kernel, {**options, **changes})
        seen.append(record)
        record.stats = launch(kernel, **record.options)
        return record.stats

    with monkeypatch.context() as patch:
        patch.setattr(emulator, "launch", recording)
        yield seen
