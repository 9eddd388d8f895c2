"""SASS of a compiled kernel, read by nvdisasm: instructions with their scheduling fields, loops, counts by pipe.

Since Volta an instruction is 128 bits, of which the compiler's scheduling decisions are bits 105 to 121 (Jia et al.
2018, "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", section 2.1; unchanged up to sm_121: what is
read here agrees with the dependencies in the code): cycles until the warp may issue its next instruction, the
scoreboard that is set until the result is there, the one that is set until the operands are read, and those waited for.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..resources import ToolMissing

TENSOR, FMA, ALU, MUFU, SHARED, UNIFORM, CONTROL = "tensor", "fma", "alu", "mufu", "shared", "uniform", "control"
#: In the order in which tables show them. "shared" is the load-store unit: shared memory, global memory, shuffles.
PIPES = (TENSOR, FMA, ALU, MUFU, SHARED, UNIFORM, CONTROL)

# What executes an opcode (its name up to the first dot): NVIDIA Nsight Compute documentation, "Pipelines", and CUDA
# Binary Utilities, "Instruction Set Reference".
_PIPE_OF = {
    TENSOR: "HMMA IMMA QMMA OMMA BMMA DMMA",
    FMA: "FFMA FADD FMUL FFMA2 FADD2 FMUL2 FFMA32I FADD32I FMUL32I IMAD HFMA2 HADD2 HMUL2 FSWZADD",
    ALU: "IADD3 IADD IADD32I LOP3 LOP SHF SHL SHR LEA SEL FSEL ISETP FSETP FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 PRMT MOV "
    "MOV32I F2FP PLOP3 IABS VOTE LOP32I BMSK SGXT P2R R2P ISCADD VIADD VIADDMNMX FCHK CS2R HMNMX2 HSET2 HSETP2 I2FP "
    "F2IP",
    MUFU: "MUFU F2I I2F F2F FRND POPC FLO BREV I2I",
    SHARED: "LDSM LDS STS STSM LDG STG LDL STL LD ST LDGSTS SHFL LDGDEPBAR ATOM ATOMS ATOMG RED MEMBAR CCTL LDC MATCH "
    "ARRIVES MOVM",
    CONTROL: "BRA BRX JMP CALL RET EXIT BAR DEPBAR WARPSYNC NOP BSSY BSYNC BREAK YIELD S2R S2UR B2R ERRBAR BMOV "
    "NANOSLEEP KILL ACQBULK PREEXIT",
}
_PIPES_BY_OPCODE = {opcode: pipe for pipe, names in _PIPE_OF.items() for opcode in names.split()}

_CODE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/"
)
_HIGH = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"^(\.L_[A-Za-z0-9_]+):")
_SOURCE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_TARGET = re.compile(r"`\((\.L_[A-Za-z0-9_]+)\)")


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction.

    stall           cycles from its issue to the earliest issue of the warp's next one
    write_barrier   scoreboard (0 to 5) that its result sets and clears, or None
    read_barrier    scoreboard that is held until its operands are read, or None
    waits           scoreboards that must be clear before it issues
    source          (file name, line) of the kernel's Python code, or None
    """

    address: int
    opcode: str
    predicate: str
    operands: str
    stall: int
    write_barrier: int | None
    read_barrier: int | None
    waits: tuple[int, ...]
    source: tuple[str, int] | None = None
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def pipe(self) -> str:
        """The pipe that executes it; names starting with U go to the uniform datapath, unknown ones count as ALU."""
        known = _PIPES_BY_OPCODE.get(self.name)
        return known or (UNIFORM if self.name[0] == "U" or self.name.startswith("R2UR") else ALU)


@dataclass(frozen=True)
class Loop:
    """The instructions of one iteration, in the order in which a warp issues them."""

    body: tuple[Instruction, ...]

    @property
    def mmas(self) -> int:
        return sum(x.pipe == TENSOR for x in self.body)

    def mix(self) -> dict[str, int]:
        """Instructions by pipe, of one warp and iteration."""
        counted = Counter(x.pipe for x in self.body)
        return {pipe: counted[pipe] for pipe in PIPES}

    def opcodes(self) -> Counter:
        """Instructions by opcode without modifiers."""
        return Counter(x.name for x in self.body)


@dataclass(frozen=True)
class Program:
    """All instructions of a kernel, and its loops with matrix products."""

    code: tuple[Instruction, ...]

    def loops(self, rare: bool = False) -> list[Loop]:
        """Innermost loops that hold matrix products, in the order of their addresses.

        ``rare``: with the parts that most iterations skip.
        """
        return [loop for first, last in self._innermost() if (loop := Loop(self._path(first, last, rare))).mmas]

    def _path(self, first: int, last: int, rare: bool) -> tuple[Instruction, ...]:
        """One iteration from ``first`` to the branch back at ``last``.

        A conditional branch forward skips what runs rarely if that is a part without products, copies or barriers:
        taking or raising the softmax reference. So does one that is not taken if it leads to code outside of the loop
        that comes back into it. One that leaves the loop for good is not taken.
        """
        index = self._index
        body, at, end = [], first, last
        while at <= end:
            x = self.code[at]
            body.append(x)
            goal = index.get(x.target) if x.target is not None else None
            if x.name == "BRA" and goal is not None and at != last:
                always = not x.predicate and "UP" not in x.operands.split("`")[0]
                if first <= at < goal <= last:
                    skipped = self.code[at + 1 : goal]
                    common = any(s.name in _NEVER_RARE or s.pipe == TENSOR for s in skipped)
                    if always or not (common or rare):
                        at = goal
                        continue
                elif always and first < goal <= last:  # the way back from outside
                    at, end = goal, last
                    continue
                elif rare and first <= at <= last and (back := self._side_block(goal, first, last)) is not None:
                    at, end = goal, back
                    continue
            at += 1
        return tuple(body)

    def _side_block(self, goal: int, first: int, last: int) -> int | None:
        """Where the code from ``goal`` on branches back into the loop, if it does and holds no products of its own."""
        if first <= goal <= last:
            return None
        for at in range(goal, len(self.code)):
            x = self.code[at]
            if x.pipe == TENSOR or x.name == "EXIT":
                return None
            if x.name == "BRA" and not x.predicate and x.target is not None:
                return at if first < self._index.get(x.target, -1) <= last else None
        return None

    @functools.cached_property
    def _index(self) -> dict[int, int]:
        return {x.address: i for i, x in enumerate(self.code)}

    def outside_stalls(self) -> int:
        """Cycles by the scheduling fields of what a block runs once: the code up to its first EXIT, without loops."""
        last = next((i for i, x in enumerate(self.code) if x.name == "EXIT" and not x.predicate), len(self.code) - 1)
        inside = set()
        for first, end in self._innermost():
            inside.update(range(first, end + 1))
        return sum(x.stall for i, x in enumerate(self.code[: last + 1]) if i not in inside)

    def _innermost(self) -> list[tuple[int, int]]:
        """(first, last) indices of the loops that hold no other, in order."""
        index = self._index
        spans = {
            (index[x.target], i)
            for i, x in enumerate(self.code)
            if x.target is not None and x.name == "BRA" and x.target in index and index[x.target] < i
        }
        return sorted(s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans))


_NEVER_RARE = frozenset(["LDGSTS", "LDSM", "BAR", "LDGDEPBAR", "DEPBAR"])


def disassemble(cubin: bytes) -> Program:
    """The kernel in ``cubin``; ToolMissing without nvdisasm, RuntimeError where it does not understand the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([nvdisasm(), "-c", "-hex", "-g", file.name], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"nvdisasm -c failed: {result.stderr.strip()}")
    return parse(result.stdout)


def parse(listing: str) -> Program:
    """A listing by ``nvdisasm -c -hex -g``; RuntimeError where no instruction is found."""
    raw, labels, source, pending = [], {}, None, []
    lines = listing.splitlines()
    for number, line in enumerate(lines):
        if match := _LABEL.match(line):
            pending.append(match[1])
        elif match := _SOURCE.match(line):
            source = (Path(match[1]).name, int(match[2]))
        elif (match := _CODE.match(line)) and number + 1 < len(lines) and (high := _HIGH.match(lines[number + 1])):
            address = int(match[1], 16)
            labels.update(dict.fromkeys(pending, address))
            pending = []
            raw.append((address, match[2] or "", match[3], match[4], int(high[1], 16), source))
    if not raw:
        raise RuntimeError("nvdisasm: no instruction in its listing")
    return Program(tuple(_instruction(labels, *x) for x in raw))


def _instruction(labels, address, predicate, opcode, operands, high, source) -> Instruction:
    control = high >> 41  # bits 105 and up of the instruction
    write, read = control >> 5 & 7, control >> 8 & 7
    goal = _TARGET.search(operands)
    return Instruction(
        address=address,
        opcode=opcode,
        predicate=predicate,
        operands=operands,
        stall=control & 15,
        write_barrier=None if write == 7 else write,
        read_barrier=None if read == 7 else read,
        waits=tuple(b for b in range(6) if control >> 11 + b & 1),
        source=source,
        target=labels.get(goal[1]) if goal else None,
    )


@functools.cache
def nvdisasm() -> str:
    """The one of the package nvidia-cuda-nvdisasm, else the CUDA toolkit's on the PATH."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    found = str(packaged[-1]) if packaged else shutil.which("nvdisasm")
    if found is None:
        raise ToolMissing(
            "nvdisasm: not found; the extra 'explore' brings it (pip install -e '.[explore]'), as the CUDA toolkit does"
        )
    return found
