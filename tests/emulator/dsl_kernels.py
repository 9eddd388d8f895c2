"""Two small CuTe DSL kernels, compiled to PTX: a vector addition and a 16-bit GEMM fed by cp.async and ldmatrix."""

from __future__ import annotations

import functools
import tempfile

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

TILE = 64  # rows of A, columns of B and depth of one step of the GEMM
THREADS = 128


@cute.kernel
def add_kernel(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):  # (n,) float32 each
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < mC.shape[0]:
        mC[i] = mA[i] + mB[i]


@cute.jit
def add(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
    grid = (mC.shape[0] + THREADS - 1) // THREADS
    add_kernel(mA, mB, mC).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream)


class Gemm:
    """C (m, n) float32 = A (m, k) B (n, k)^T for whole tiles, two stages; ``swizzled`` chooses the shared layout."""

    def __init__(self, dtype, swizzled: bool):
        self.dtype, self.swizzled = dtype, swizzled
        self.shared_bytes = 2 * 2 * TILE * TILE * 2

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
        self.kernel(mA, mB, mC).launch(
            grid=[mC.shape[0] // TILE, mC.shape[1] // TILE, 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
        )

    def layout(self):
        rows = cute.make_layout((8, TILE), stride=(TILE, 1))
        atom = cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, rows)
        if not self.swizzled:
            atom = cute.make_composed_layout(cute.make_swizzle(0, 3, 3), 0, rows)
        return cute.tile_to_shape(atom, (TILE, TILE, 2), (0, 1, 2))

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
        tidx = cute.arch.thread_idx()[0]
        m_block, n_block, _ = cute.arch.block_idx()
        base = cute.arch.get_dyn_smem(self.dtype, alignment=128)
        layout = self.layout()
        sA = cute.make_tensor(cute.recast_ptr(base, dtype=self.dtype), layout)
        sB = cute.make_tensor(cute.recast_ptr(base + 2 * TILE * TILE, dtype=self.dtype), layout)
        gA = cute.local_tile(mA, (TILE, TILE), (m_block, None))  # (TILE, TILE, steps)
        gB = cute.local_tile(mB, (TILE, TILE), (n_block, None))
        gC = cute.local_tile(mC, (TILE, TILE), (m_block, n_block))

        copy_atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=128
        )
        threads = cute.make_ordered_layout((THREADS // 8, 8), order=(1, 0))
        copy = cute.make_tiled_copy_tv(copy_atom, threads, cute.make_layout((1, 8)))
        thread_copy = copy.get_slice(tidx)
        tAgA, tAsA = thread_copy.partition_S(gA), thread_copy.partition_D(sA)
        tBgB, tBsB = thread_copy.partition_S(gB), thread_copy.partition_D(sB)

        mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(self.dtype, cutlass.Float32, (16, 8, 16)),
            (2, 2, 1),
            permutation_mnk=(32, 32, 16),
        )
        thread_mma = mma.get_slice(tidx)
        matrix = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        copy_A, copy_B = cute.make_tiled_copy_A(matrix, mma), cute.make_tiled_copy_B(matrix, mma)
        tCsA = copy_A.get_slice(tidx).partition_S(sA)
        tCsB = copy_B.get_slice(tidx).partition_S(sB)
        tCrA = thread_mma.make_fragment_A(thread_mma.partition_A(sA[None, None, 0]))
        tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB[None, None, 0]))
        tCgC = thread_mma.partition_C(gC)
        acc = thread_mma.make_fragment_C(tCgC)
        acc.fill(0.0)

        steps = gA.shape[2]
        cute.copy(copy, tAgA[None, None, None, 0], tAsA[None, None, None, 0])
        cute.copy(copy, tBgB[None, None, None, 0], tBsB[None, None, None, 0])
        cute.arch.cp_async_commit_group()
        for step in cutlass.range(steps, unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()  # step's tile has landed; everybody has left the other stage
            if step + 1 < steps:
                cute.copy(copy, tAgA[None, None, None, step + 1], tAsA[None, None, None, (step + 1) % 2])
                cute.copy(copy, tBgB[None, None, None, step + 1], tBsB[None, None, None, (step + 1) % 2])
            cute.arch.cp_async_commit_group()
            for k in cutlass.range_constexpr(TILE // 16):
                cute.copy(copy_A, tCsA[None, None, k, step % 2], copy_A.retile(tCrA)[None, None, k])
                cute.copy(copy_B, tCsB[None, None, k, step % 2], copy_B.retile(tCrB)[None, None, k])
                cute.gemm(mma, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32)
        cute.copy(store, acc, tCgC)


def compile_ptx(function, *args) -> str:
    """PTX for sm_120a, with line information."""
    with tempfile.TemporaryDirectory(prefix="fa2_cute-") as dump:
        options = f"--enable-tvm-ffi --gpu-arch sm_120a --generate-line-info --keep-ptx --dump-dir {dump}"
        compiled = cute.compile(function, *args, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
    return compiled.artifacts.PTX


@functools.cache
def add_ptx() -> str:
    """The vector addition on float32 (n,) tensors."""
    vectors = [make_fake_tensor(cutlass.Float32, (cute.sym_int32(),), (1,), assumed_align=4) for _ in range(3)]
    return compile_ptx(add, *vectors)


@functools.cache
def gemm_ptx(kind: str, swizzled: bool = True) -> str:
    """The GEMM on ``kind`` (bfloat16 or float16) inputs."""
    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[kind]

    def matrix(element, divisibility):
        shape = (cute.sym_int32(divisibility=TILE), cute.sym_int32(divisibility=TILE))
        return make_fake_tensor(element, shape, (cute.sym_int64(divisibility=divisibility), 1), assumed_align=16)

    return compile_ptx(Gemm(dtype, swizzled), matrix(dtype, 8), matrix(dtype, 8), matrix(cutlass.Float32, 1))
