"""How fast each architecture does what: the one table that the model computes with. A new architecture is one entry.

Origins, by the letter beside each figure:
  D  design record of this project: measured on the named device, or the vendor's figure (docs/explore.md, "Rates")
  G  CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions" (results a clock and SM)
  J  Jarmusch et al. 2025, "Dissecting the NVIDIA Blackwell Architecture with Microbenchmarks" (RTX 5080, H100)
  M  measured on the H200 by small kernels of one kind of instruction each (docs/explore.md, "Rates")
  W  vendor's architecture white paper
  ~  by analogy with the architecture beside it; not measured
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..arch import BY_NAME, Architecture


@dataclass(frozen=True)
class Rates:
    """One device. Cycles are SM clocks; "a sub-partition" is one of the SM's four.

    device              whose figures these are
    sms, clock_ghz      multiprocessors; SM clock under this load
    steal_cycles        by which an instruction of another pipe delays the tensor pipe (operands share register ports)
    mma_cycles          a sub-partition's tensor pipe for one m16n8k16 of 16-bit inputs and float32 accumulation
    fma_cycles          FFMA, FADD, FMUL of a warp
    fma2_cycles         packed two-float FFMA2 and the like
    imad_cycles         IMAD of a warp
    alu_cycles          integer, logic, compare, conversion of a warp
    mufu_cycles         ex2 of a warp
    uniform_cycles      instructions of the uniform datapath
    shared_latency      cycles from the issue of an LDS or LDSM to its result, without queueing
    mufu_latency        the same for MUFU
    copy_latency        the same for a cp.async that hits the L2, until it counts as landed
    device_latency      the same where it comes from device memory
    barrier_cycles, barrier_warp_cycles   from the arrival of the last warp at a BAR.SYNC to the next issue: the first,
                        and the second for each warp of the block
    l2_bytes            bytes a clock that one SM takes from the L2
    l2_total_bytes      bytes a clock that all SMs together take from the L2
    device_gbytes       device memory, GB/s, as reads reach it
    l1_kib              L1 and shared memory of an SM together
    launch_us           time from the start of an empty kernel to its end
    block_cycles        from a block's launch to its first instruction, and from its last to its successor's launch
    """

    device: str
    sms: int
    clock_ghz: float
    mma_cycles: float
    steal_cycles: float
    fma_cycles: float
    fma2_cycles: float
    imad_cycles: float
    alu_cycles: float
    mufu_cycles: float
    uniform_cycles: float
    shared_latency: float
    mufu_latency: float
    copy_latency: float
    device_latency: float
    barrier_cycles: float
    barrier_warp_cycles: float
    l2_bytes: float
    l2_total_bytes: float
    device_gbytes: float
    launch_us: float = 2.0  # an empty kernel between two events, back to back: 2 us on every recent card
    block_cycles: float = 1400.0  # one number for all; fits 320 launches on the H200 best
    l1_kib: int = 256  # shared memory and L1 of an SM together
    shared_bytes: int = 128  # 32 banks of 4 bytes, all architectures (CUDA C++ Programming Guide, "Shared Memory")


_SM_90 = Rates(
    device="H200",
    sms=132,  # D
    clock_ghz=1.95,  # M: 1.90 to 1.98 under these loads; boost is 1.98
    mma_cycles=6.04,  # M
    steal_cycles=1.6,  # M: at least 0.94 (6.98 cycles for an mma and an FFMA); 1.6 fits 320 launches best
    fma_cycles=1.0,  # G: 128; M: 1.04
    fma2_cycles=2.0,  # no such instruction
    imad_cycles=2.6,  # M
    alu_cycles=2.0,  # G: 64; M: 2.1 for FMNMX
    mufu_cycles=8.0,  # G: 16; M: 8.0
    uniform_cycles=2.0,  # ~ one warp instruction in two cycles (Turing: Jia et al. 2019)
    shared_latency=30.0,  # M: 34.1 for an ldmatrix of 4 passes and an address that depends on it
    mufu_latency=17.0,  # M
    copy_latency=290.0,  # M: 300 from issue to the end of its wait
    device_latency=660.0,  # J: about 660
    barrier_cycles=12.0,  # M: 20, 28, 44 cycles for 4, 8, 16 warps
    barrier_warp_cycles=2.0,  # M
    l2_bytes=64.0,  # W: the L1's fill port
    l2_total_bytes=3200.0,  # M: 6.2 TB/s, the most that any of 320 measured launches drew
    device_gbytes=4266.0,  # D: measured
)

_SM_120 = replace(
    _SM_90,
    device="RTX 5090",
    sms=170,  # D
    clock_ghz=2.41,  # D
    steal_cycles=0.0,  # ~ an mma takes 32 cycles for the same operands: the ports idle
    mma_cycles=32.0,  # D: 209.5 TFLOP/s = 512 FLOP a clock and SM
    imad_cycles=2.0,  # G: 64
    alu_cycles=1.0,  # W: integer units doubled to 128
    shared_latency=30.0,  # J
    copy_latency=360.0,  # J: an L2 hit, about 360
    device_latency=877.0,  # J: about 880
    l2_total_bytes=170 * 32.0,  # ~
    device_gbytes=1792.0,  # D
    l1_kib=128,  # W
)

RATES: dict[str, Rates] = {
    "sm_90": _SM_90,
    "sm_120": _SM_120,
    # GB10: the same SM; 48 of them, LPDDR5X (W)
    "sm_121": replace(_SM_120, device="GB10 (DGX Spark)", sms=48, clock_ghz=2.4, device_gbytes=273.0),
    # A100: m16n8k16 in 8 cycles (W: 312 TFLOP/s), 64 FP32 lanes an SM
    "sm_80": replace(
        _SM_90, device="A100", sms=108, clock_ghz=1.41, mma_cycles=8.0, fma_cycles=2.0, device_gbytes=1555.0,
        device_latency=470.0, l2_total_bytes=5120.0, l1_kib=192,
    ),
    # GeForce tensor pipes halve float32 accumulation: 512 FLOP a clock and SM (W)
    "sm_86": replace(
        _SM_120, device="RTX 3090", sms=82, clock_ghz=1.70, alu_cycles=2.0, device_gbytes=936.0,
        device_latency=470.0, copy_latency=240.0,
    ),
    "sm_89": replace(
        _SM_120, device="RTX 4090", sms=128, clock_ghz=2.52, alu_cycles=2.0, device_gbytes=1008.0,
        device_latency=560.0, copy_latency=290.0,
    ),
    # ~ B200's mma.sync path as sm_90's
    "sm_100": replace(_SM_90, device="B200", sms=148, clock_ghz=1.85, device_gbytes=8000.0),
}  # fmt: skip


def of(arch: Architecture) -> Rates:
    """The rates of ``arch``; ValueError names the architectures that have some."""
    try:
        return RATES[arch.name]
    except KeyError:
        raise ValueError(f"arch: got {arch.name}, takes one with rates: {', '.join(RATES)}") from None


def missing() -> list[str]:
    """Architectures that the kernels know and the model does not."""
    return [name for name in BY_NAME if name not in RATES]
