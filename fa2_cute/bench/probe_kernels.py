"""Device code of ``probes``."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warp

from .probes import M_TILES, N_TILES, UNROLL, VECTORS, MmaRateSpec, ReadRateSpec


class MmaRate:
    """The kernel for a specification; compiled by ``cute.compile(MmaRate(spec), ...)``."""

    def __init__(self, spec: MmaRateSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,  # (rows, 16) bfloat16
        mB: cute.Tensor,  # (columns, 16) bfloat16
        mC: cute.Tensor,  # (warps of the grid, rows, columns) float32, written
        rounds: Int32,
        stream,
    ):
        self.kernel(mA, mB, mC, rounds).launch(
            grid=[mC.shape[0] // self.spec.warps, 1, 1], block=[self.spec.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, rounds: Int32):
        tidx = cute.arch.thread_idx()[0]
        index = cute.arch.block_idx()[0] * self.spec.warps + tidx // 32
        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)),
            (1, 1, 1),
            permutation_mnk=(16 * M_TILES, 8 * N_TILES, 16),
        )
        thread = mma.get_slice(tidx % 32)
        tCgA, tCgB = thread.partition_A(mA), thread.partition_B(mB)
        tCgC = thread.partition_C(mC[index, None, None])
        tCrA, tCrB = thread.make_fragment_A(tCgA), thread.make_fragment_B(tCgB)
        acc = thread.make_fragment_C(tCgC)
        cute.autovec_copy(tCgA, tCrA)
        cute.autovec_copy(tCgB, tCrB)
        acc.fill(0.0)
        for _ in cutlass.range(rounds, unroll=1):
            for _ in cutlass.range_constexpr(UNROLL):
                cute.gemm(mma, acc, tCrA, tCrB, acc)
        cute.autovec_copy(acc, tCgC)


class ReadRate:
    """The kernel for a specification; compiled by ``cute.compile(ReadRate(spec), ...)``."""

    def __init__(self, spec: ReadRateSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # (n,) int32
        mSums: cute.Tensor,  # (threads of the grid,) int32, written
        stream,
    ):
        self.kernel(mX, mSums).launch(
            grid=[mSums.shape[0] // self.spec.threads, 1, 1], block=[self.spec.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mSums: cute.Tensor):
        index = cute.arch.block_idx()[0] * self.spec.threads + cute.arch.thread_idx()[0]
        threads = mSums.shape[0]
        gX = cute.zipped_divide(mX, (4,))  # (4, vectors)
        loaded = cute.make_rmem_tensor((4, VECTORS), Int32)
        total = Int32(0)
        for first in cutlass.range(index, gX.shape[1][0], threads * VECTORS, unroll=1):
            for i in cutlass.range_constexpr(VECTORS):
                cute.autovec_copy(gX[None, first + i * threads], loaded[None, i])
            for i in cutlass.range_constexpr(4 * VECTORS):
                total += loaded[i]
        mSums[index] = total
