"""What each GPU architecture can hold, and what the compiler calls it."""

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """Limits of one compute capability (CUDA C++ Programming Guide, table "Technical Specifications").

    name                    "sm_120"
    target                  what the compiler is asked for, "sm_120a"
    shared_block_bytes      most shared memory of one thread block (opt-in dynamic)
    shared_sm_bytes         shared memory of one multiprocessor
    shared_reserved_bytes   taken from shared_sm_bytes by the system for each resident block
    registers               32-bit registers of one multiprocessor
    threads                 most resident threads of one multiprocessor
    """

    name: str
    target: str
    shared_block_bytes: int
    shared_sm_bytes: int
    threads: int
    shared_reserved_bytes: int = 1 * KIB
    registers: int = 65_536

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor), as ``torch.cuda.get_device_capability`` gives it."""
        digits = self.name.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    def blocks_held(self, shared_bytes: int) -> int:
        """How many blocks of ``shared_bytes`` each the shared memory of a multiprocessor holds."""
        return self.shared_sm_bytes // (shared_bytes + self.shared_reserved_bytes)


_KNOWN = (
    Architecture("sm_80", "sm_80", 163 * KIB, 164 * KIB, 2048),
    Architecture("sm_86", "sm_86", 99 * KIB, 100 * KIB, 1536),
    Architecture("sm_89", "sm_89", 99 * KIB, 100 * KIB, 1536),
    Architecture("sm_90", "sm_90a", 227 * KIB, 228 * KIB, 2048),
    Architecture("sm_100", "sm_100a", 227 * KIB, 228 * KIB, 2048),
    Architecture("sm_120", "sm_120a", 99 * KIB, 100 * KIB, 1536),
    Architecture("sm_121", "sm_121a", 99 * KIB, 100 * KIB, 1536),
)
BY_NAME = {architecture.name: architecture for architecture in _KNOWN}
_BY_CAPABILITY = {architecture.capability: architecture for architecture in _KNOWN}

#: What runs in the emulator where there is no GPU.
TARGET = BY_NAME["sm_120"]


def by_name(name: str) -> Architecture:
    """``"sm_120"``, ``"sm_120a"`` or ``"120"``; ValueError names the known ones."""
    key = "sm_" + str(name).lower().removeprefix("sm_").rstrip("af")
    if key not in BY_NAME:
        raise ValueError(f"arch: got {name!r}, takes one of {', '.join(BY_NAME)}")
    return BY_NAME[key]


def by_capability(major: int, minor: int) -> Architecture:
    """The architecture of a CUDA device; ValueError where the kernels cannot run."""
    try:
        return _BY_CAPABILITY[major, minor]
    except KeyError:
        reason = " (cp.async and bf16 mma.sync need sm_80 or newer)" if major < 8 else ""
        raise ValueError(
            f"device: got compute capability {major}.{minor} (sm_{major}{minor}), takes {', '.join(BY_NAME)}{reason}"
        ) from None
