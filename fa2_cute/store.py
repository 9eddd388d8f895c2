"""Compiled code on disk, so that a new process does not compile what an earlier one has.

An entry is a folder named after a hash of everything that the code depends on: the kernels' sources, the compiler's
versions, the host, the specification and the architecture. Its manifest holds the hashes of its files; what does not
match is thrown away and made again, never used.
"""

import functools
import hashlib
import json
import os
import platform
import shutil
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import filelock
import platformdirs

# What a compiler chooses instructions by, as /proc/cpuinfo spells it on x86-64 and on Arm. Other flags come and go with
# kernels and microcode.
INSTRUCTION_SETS = ("sse", "ssse", "avx", "fma", "bmi", "abm", "popcnt", "movbe", "f16c", "adx", "asimd", "sve")
COMPILER_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
MANIFEST, PTX, CUBIN, LAUNCHER = "manifest.json", "kernel.ptx", "kernel.cubin", "launcher.elf"


@dataclass(frozen=True)
class Code:
    """What one compilation yields.

    ptx             the device code as text, which the emulator runs
    cubin           the device code as the GPU's binary
    launcher        a shared library, or an object file, with host code and the cubin: what a process calls (loading.py)
    """

    ptx: str
    cubin: bytes
    launcher: bytes

    def files(self) -> dict[str, bytes]:
        """The files of an entry."""
        return {PTX: self.ptx.encode(), CUBIN: self.cubin, LAUNCHER: self.launcher}

    def manifest(self) -> dict[str, str]:
        """The hash of each file."""
        return {file: hashlib.sha256(content).hexdigest() for file, content in self.files().items()}


class Store:
    """A folder of compiled kernels, safe to share between processes."""

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, name: str) -> Code | None:
        """The entry called ``name``, or None if there is none or it is damaged."""
        entry = self.folder / name
        try:
            manifest = json.loads((entry / MANIFEST).read_text())
            code = Code(
                (entry / PTX).read_bytes().decode(), (entry / CUBIN).read_bytes(), (entry / LAUNCHER).read_bytes()
            )
        except (OSError, ValueError, RecursionError):  # the last: JSON nested too deeply
            return None
        return code if code.manifest() == manifest else None

    def save(self, name: str, code: Code):
        """Write an entry; readers see all of it or none. Replaces a damaged one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self.folder / f"new-{uuid.uuid4().hex}"
        scratch.mkdir()  # with the user's umask: a folder may be made to be shipped
        try:
            for file, content in code.files().items():
                (scratch / file).write_bytes(content)
            (scratch / MANIFEST).write_text(json.dumps(code.manifest()))
            shutil.rmtree(self.folder / name, ignore_errors=True)
            os.replace(scratch, self.folder / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def lock(self, name: str) -> filelock.BaseFileLock:
        """Held while an entry is compiled, so that processes that start together compile it once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(self.folder / f"{name}.lock")


def default() -> Store | None:
    """The store of this user: ``FA2_CUTE_CACHE`` names its folder, or turns it off with ``off``."""
    chosen = os.environ.get("FA2_CUTE_CACHE", "")
    if chosen.lower() == "off":
        return None
    return Store(Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("fa2_cute"))


def entry_name(description: str) -> str:
    """The name of the entry for code that ``description`` (specification and architecture) tells apart."""
    return hashlib.sha256(f"{description}\n{_surroundings()}".encode()).hexdigest()[:32]


@functools.cache
def _surroundings() -> str:
    """Everything but the specification that compiled code depends on."""
    sources = described_by()
    parts = [f"{source.name} {hashlib.sha256(source.read_bytes()).hexdigest()}" for source in sources]
    parts += [f"{name} {metadata.version(name)}" for name in COMPILER_PACKAGES]
    return "\n".join([*parts, platform.system(), platform.machine(), _processor()])


def _processor() -> str:
    """The instruction sets of this host: the launchers are compiled for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return " ".join(sorted(flag for flag in flags if flag.startswith(INSTRUCTION_SETS))) or platform.processor()


def described_by() -> list[Path]:
    """The package's files that shape compiled code: device code, specifications, what both take from elsewhere, and how
    a launcher is compiled and linked."""
    package = Path(__file__).parent
    others = [package / name for name in ("arch.py", "compiling.py", "descale.py", "loading.py", "parameters.py")]
    return sorted([*(package / "kernels").glob("*.py"), *package.glob("*spec.py"), *others])
