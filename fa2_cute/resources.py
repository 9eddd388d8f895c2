"""What a compiled kernel takes of a multiprocessor, read from its binary by cuobjdump."""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .arch import Architecture
from .jit import Kernel

REGISTER_UNIT = 256  # registers are given to a warp in units of 256 (CUDA occupancy calculator, all of sm_80 .. sm_121)


class ToolMissing(RuntimeError):
    """A program or package that is not installed, and how to install it."""


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel on its architecture.

    registers       32-bit registers a thread
    stack_bytes     stack frame a thread; spilled registers live there
    local_bytes     static local memory a thread
    shared_bytes    dynamic shared memory a block
    blocks_per_sm   blocks that fit a multiprocessor together
    warps_per_sm    warps that fit a multiprocessor together
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    warps_per_sm: int


def usage(kernel: Kernel) -> Usage:
    """Resources of ``kernel``; ToolMissing without cuobjdump, RuntimeError where it does not
    understand the binary."""
    report = _res_usage(kernel.cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage: no resource line in its report:\n{report}")
    registers, stack, local = map(int, found.groups())
    blocks = resident_blocks(kernel.arch, registers, kernel.spec.threads, kernel.spec.shared_bytes)
    return Usage(registers, stack, local, kernel.spec.shared_bytes, blocks, blocks * kernel.spec.threads // 32)


def resident_blocks(arch: Architecture, registers: int, threads: int, shared_bytes: int) -> int:
    """Blocks of ``threads`` threads that fit one multiprocessor of ``arch`` together.

    By registers, threads and shared memory. The hardware's own limit (16 blocks or more everywhere) cannot bind for
    blocks of 128 threads or more.
    """
    warps = threads // 32
    warp_registers = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    if shared_bytes > arch.shared_block_bytes:
        return 0
    return min(
        arch.threads // threads,
        arch.registers // (warp_registers * warps),
        arch.blocks_held(shared_bytes),
    )


def _res_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([_cuobjdump(), "-res-usage", file.name], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"cuobjdump -res-usage failed: {result.stderr.strip()}")
    return result.stdout + result.stderr


def _cuobjdump() -> str:
    """The one of the package nvidia-cuda-cuobjdump, else the CUDA toolkit's on the PATH."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump"))
    found = str(packaged[-1]) if packaged else shutil.which("cuobjdump")
    if found is None:
        raise ToolMissing("cuobjdump: not found; install the package nvidia-cuda-cuobjdump or the CUDA toolkit")
    return found
