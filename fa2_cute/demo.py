"""The main job, measured: grouped-query prefill, then single-query steps on a growing cache, against float64.

Everything goes through ``flash_attn_func``, as in a model: one cache of keys and values that is longer than
what it holds, and views of it, cut to the current length, as arguments.
"""

import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import arch, forward, jit, reference, resources
from .arch import Architecture
from .attention import flash_attn_func
from .emulation import EmulationNotice
from .reference import Error

FP32_ROUNDING = 2.0**-23  # bounds one fp32 operation, truncating ones included
LEAST_RESIDENT_WARPS = 8  # two for each of the four sub-partitions of an SM
GPU_REPEATS = 10


@dataclass(frozen=True)
class Workload:
    """What a model asks for: a prompt of ``prompt`` tokens, then ``steps`` tokens one by one, in bfloat16."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    prompt: int
    steps: int


EMULATED = Workload(batch=1, heads=8, kv_heads=2, head_dim=128, prompt=256, steps=4)
ON_GPU = Workload(batch=2, heads=32, kv_heads=8, head_dim=128, prompt=4096, steps=4)


@dataclass(frozen=True)
class Call:
    """One causal call. q (batch, query_len, heads, head_dim); k, v (batch, key_len, kv_heads, head_dim)."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Measured:
    """One call judged. Errors are absolute, against float64; ``limit`` is the largest that passes."""

    name: str
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    ours: Error
    torchs: Error
    limit: Error
    lse_error: float
    lse_limit: float
    seconds: float

    def faults(self) -> list[str]:
        """What is off, a line each."""
        judged = [
            ("max error", self.ours.max, self.limit.max),
            ("RMS error", self.ours.rms, self.limit.rms),
            ("logsumexp error", self.lse_error, self.lse_limit),
        ]
        return [f"{self.name}: {what} {got:.3g} exceeds {limit:.3g}" for what, got, limit in judged if not got <= limit]


@dataclass(frozen=True)
class Compiled:
    """A kernel and what it takes of a multiprocessor."""

    kernel: jit.Kernel
    used: resources.Usage
    seconds: float

    @property
    def name(self) -> str:
        spec = self.kernel.spec
        return f"{spec.dtype} {spec.head_dim} {'causal' if spec.causal else 'full'}"

    def faults(self) -> list[str]:
        """What is off, a line each; sm_120 and sm_121 are held to the project's aims."""
        architecture, used = self.kernel.arch, self.used
        faults = []
        if used.shared_bytes > architecture.shared_block_bytes:
            faults.append(f"{used.shared_bytes} bytes of shared memory exceed {architecture.shared_block_bytes}")
        if architecture.capability[0] == 12:
            if used.stack_bytes or used.local_bytes:
                faults.append(f"{used.stack_bytes} bytes of stack and {used.local_bytes} of local memory; 0 are wanted")
            if used.warps_per_sm < LEAST_RESIDENT_WARPS:
                faults.append(f"{used.warps_per_sm} resident warps; at least {LEAST_RESIDENT_WARPS} are wanted")
        return [f"{architecture.name} {self.name}: {fault}" for fault in faults]


def calls(workload: Workload, device: torch.device, seed: int) -> Iterator[Call]:
    """The calls in order; each extends the cache that the next one sees."""
    generator = torch.Generator().manual_seed(seed)
    capacity = workload.prompt + workload.steps

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    def tokens(length: int, heads: int) -> torch.Tensor:
        return normal(workload.batch, length, heads, workload.head_dim)

    k_cache, v_cache = (
        torch.zeros(
            workload.batch,
            capacity,
            workload.kv_heads,
            workload.head_dim,
            dtype=torch.bfloat16,
            device=device,
        )
        for _ in range(2)
    )
    filled = 0
    for name, length in [
        ("prefill", workload.prompt),
        *((f"step {i + 1}", 1) for i in range(workload.steps)),
    ]:
        k_cache[:, filled : filled + length] = tokens(length, workload.kv_heads)
        v_cache[:, filled : filled + length] = tokens(length, workload.kv_heads)
        filled += length
        yield Call(name, tokens(length, workload.heads), k_cache[:, :filled], v_cache[:, :filled])


def architecture_of(device: torch.device) -> Architecture:
    """What ``device`` runs: its own architecture, or the one that is emulated on a CPU."""
    return arch.by_capability(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else arch.TARGET


def compile_for(workload: Workload, device: torch.device) -> list[Compiled]:
    """The kernels that the workload needs: for the device's architecture, and for sm_120."""
    architectures = [architecture_of(device)]
    if arch.TARGET not in architectures:
        architectures.append(arch.TARGET)
    compiled = []
    for architecture in architectures:
        for call in calls(workload, torch.device("meta"), seed=0):
            spec = forward.prepare(call.q, call.k, call.v, window=(None, 0))[-1].spec(architecture)
            if (spec, architecture) not in {(c.kernel.spec, c.kernel.arch) for c in compiled}:
                start = time.perf_counter()
                kernel = jit.compiled(spec, architecture)
                compiled.append(Compiled(kernel, resources.usage(kernel), time.perf_counter() - start))
    return compiled


def measure(call: Call) -> Measured:
    """Run ``call`` and judge it: error at most twice torch's own, plus what fp32 sums may err."""
    q, k, v = call.q, call.k, call.v
    out, lse, seconds = _timed(call)
    expected, expected_lse = reference.attention(q, k, v, causal=True)
    torchs = reference.torch_error(q, k, v, expected, causal=True)
    key_len, head_dim = k.shape[1], k.shape[3]
    floor = key_len * FP32_ROUNDING * v.abs().max().item()
    # head_dim products a logit, key_len terms a sum; two fp32 numbers of its size make the logsumexp.
    largest_logit = head_dim**-0.5 * (q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()).item()
    lse_limit = FP32_ROUNDING * (head_dim * largest_logit + key_len + 4 * expected_lse.abs().max().item() + 4)
    return Measured(
        call.name,
        tuple(q.shape),
        tuple(k.shape),
        reference.error(out, expected),
        torchs,
        Error(2 * torchs.max + floor, 2 * torchs.rms + floor),
        reference.error(lse, expected_lse).max,
        lse_limit,
        seconds,
    )


def _timed(call: Call) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(out, lse, seconds): the wall clock of one call in the emulator, the median of some on a GPU."""

    def attend():
        return flash_attn_func(call.q, call.k, call.v, causal=True, return_softmax_lse=True)

    if call.q.device.type == "cpu":
        start = time.perf_counter()
        out, lse = attend()
        return out, lse, time.perf_counter() - start
    out, lse = attend()
    times = []
    for _ in range(GPU_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        attend()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return out, lse, statistics.median(times)


def run(device: torch.device, console: Console, *, workload: Workload | None = None, seed: int = 0) -> list[str]:
    """Run the demo, print its tables on ``console``, and return what is off, a line each."""
    if workload is None:
        workload = ON_GPU if device.type == "cuda" else EMULATED
    architecture = architecture_of(device)
    console.print(f"Running {_where(device, architecture)}.")
    measured = []
    with (
        Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        ) as progress,
        warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore", EmulationNotice)  # said above
        task = progress.add_task("compiling", total=2 + workload.steps)
        compiled = compile_for(workload, device)
        progress.advance(task)
        for call in calls(workload, device, seed):
            progress.update(task, description=call.name)
            measured.append(measure(call))
            progress.advance(task)
    seconds = sum(c.seconds for c in compiled)
    console.print(f"Kernels compiled, or loaded from the cache: {len(compiled)}, in {_duration(seconds)}.\n")
    console.print(
        f"Causal bfloat16 attention, batch {workload.batch}, {workload.heads} query heads on {workload.kv_heads} "
        f"KV heads, head_dim {workload.head_dim}.\nErrors are against float64; at most twice torch's own pass."
    )
    console.print(_table_of_calls(measured, emulated=device.type == "cpu"))
    console.print("Registers a thread, spilled bytes a thread, shared memory a block, resident warps a multiprocessor.")
    console.print(_table_of_kernels(compiled))
    return [fault for judged in (*measured, *compiled) for fault in judged.faults()]


def _where(device: torch.device, architecture: Architecture) -> str:
    if device.type == "cpu":
        return f"the {architecture.target} code in the emulator (no GPU is used)"
    return f"on {torch.cuda.get_device_name(device)} ({architecture.name})"


def _table_of_calls(measured: list[Measured], *, emulated: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("call", no_wrap=True)
    for heading in ("q x k", "max", "torch's", "RMS", "torch's", "emulated" if emulated else "time", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in measured:
        table.add_row(
            row.name,
            f"{row.query_shape[1]} x {row.key_shape[1]}",
            *(f"{value:.1e}" for value in (row.ours.max, row.torchs.max, row.ours.rms, row.torchs.rms)),
            _duration(row.seconds),
            _verdict(row.faults()),
        )
    return table


def _table_of_kernels(compiled: list[Compiled]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("on", "kernel"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tile", "registers", "spills", "shared", "warps/SM", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in compiled:
        used = row.used
        table.add_row(
            row.kernel.arch.name,
            row.name,
            f"{row.kernel.spec.tile_m}x{row.kernel.spec.tile_n}",
            str(used.registers),
            f"{used.stack_bytes + used.local_bytes} B",
            f"{used.shared_bytes / 1024:g} KiB",
            str(used.warps_per_sm),
            _verdict(row.faults()),
        )
    return table


def _verdict(faults: list[str]) -> str:
    return "[red]off[/]" if faults else "[green]ok[/]"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
