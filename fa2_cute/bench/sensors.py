"""The device's clock and power while something runs, as the driver's tool samples them."""

from __future__ import annotations

import subprocess
import threading
import time

QUERIES = ("clocks.sm", "power.draw")  # MHz, W
NAMES = ("least SM MHz", "most W")
INTERVAL_MS = 50


class Sensors:
    """Samples from entering to leaving. Without the driver's tool it has none, and says nothing.

    gpu: what that tool calls the device, see ``machine.driver_id``.
    """

    def __init__(self, gpu: str):
        self.command = [
            "nvidia-smi",
            f"--query-gpu={','.join(QUERIES)}",
            "--format=csv,noheader,nounits",
            f"--id={gpu}",
            f"--loop-ms={INTERVAL_MS}",
        ]
        self.samples: list[tuple[float, tuple[float, ...]]] = []
        self.process: subprocess.Popen | None = None
        self.reader: threading.Thread | None = None

    def __enter__(self) -> Sensors:
        try:
            self.process = subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
            )
        except OSError:
            return self
        self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self.reader.start()
        return self

    def __exit__(self, *_):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.reader.join()

    def _read(self, process: subprocess.Popen):
        for line in process.stdout:
            sample = parse(line)
            if sample is not None:
                self.samples.append((time.monotonic(), sample))

    def since(self, start: float) -> dict[str, float]:
        """The lowest clock and the highest power sampled after ``start`` (``time.monotonic()``); empty without samples.

        Most samples fall into the rests between bursts, so a median would tell of those.
        """
        here = [sample for at, sample in self.samples if at >= start]
        return dict(zip(NAMES, (min(x[0] for x in here), max(x[1] for x in here)), strict=True)) if here else {}


def parse(line: str) -> tuple[float, ...] | None:
    """ "1980, 612.3" as numbers; None for anything else."""
    try:
        values = tuple(float(text) for text in line.split(","))
    except ValueError:
        return None
    return values if len(values) == len(QUERIES) else None
