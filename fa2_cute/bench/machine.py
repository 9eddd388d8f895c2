"""The machine and the software that figures are from."""

from __future__ import annotations

import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__

PACKAGES = (
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "torch-c-dlpack-ext",
    "triton",
    "flash-attn-4",
    "quack-kernels",
    "fastflash-attention",
)
QUERIES = {"driver": "driver_version", "power_limit": "power.limit", "sm_clock_max": "clocks.max.sm"}


def describe(device: torch.device) -> dict[str, str | int | float]:
    """Device, driver, processor and versions, for a report; what cannot be found out is "unknown"."""
    found: dict[str, str | int | float] = {
        "python": platform.python_version(),
        "processor": _processor(),
        "fa2_cute": __version__,
        "torch": torch.__version__,
        **{name: package_version(name) or "not installed" for name in PACKAGES},
    }
    if device.type != "cuda":
        return {"device": device.type, **found}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(l2_bytes(device) / 2**20, 1),
        **_nvidia_smi(driver_id(device)),
        "cuda": torch.version.cuda or "unknown",
        "cudnn": torch.backends.cudnn.version() or 0,
        **found,
    }


def l2_bytes(device: torch.device) -> int:
    """The device's L2; none on a CPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def driver_id(device: torch.device) -> str:
    """What the driver's tool calls a CUDA device; it does not know which ones this process sees as which."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def now() -> str:
    """The date and time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def file_name(report_date: str, device: str) -> str:
    """ "2026-11-30-nvidia-h200.json"."""
    return f"{report_date[:10]}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _nvidia_smi(gpu: str) -> dict[str, str]:
    """What only the driver's tool tells."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader", f"--id={gpu}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        values = [value.strip() for value in text.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        values = []
    if len(values) != len(QUERIES):
        values = ["unknown"] * len(QUERIES)
    return dict(zip(QUERIES, values, strict=True))
