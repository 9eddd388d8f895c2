"""The two matrix products of attention on mma.sync, operands from shared memory by ldmatrix."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from . import layouts

MMA_SHAPE = (16, 8, 16)  # PTX ISA: mma.sync.m16n8k16, f16 and bf16


@dataclass(frozen=True)
class Products:
    """One thread's operands of S = Q K^T and O = P V.

    thr_mma             its part of the MMA
    tSsQ, tSsK, tOsV    what its ldmatrix reads of the shared tiles; the last mode of tSsK and tOsV is the ring slot
    tSrQ, tSrK, tOrV    MMA operand registers
    steps_QK            steps of 16 elements along the head dimension: zeros beyond are not multiplied
    holds_Q             tSrQ holds all of Q (``load_queries``), else each product reads its fragments again
    """

    tiled_mma: cute.TiledMma
    thr_mma: cute.ThrMma
    copy_Q: cute.TiledCopy
    copy_K: cute.TiledCopy
    copy_V: cute.TiledCopy
    tSsQ: cute.Tensor
    tSsK: cute.Tensor
    tOsV: cute.Tensor
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    steps_QK: int
    holds_Q: bool


def make_tiled_mma(dtype: type[cutlass.Numeric], warps: int) -> cute.TiledMma:
    """Warps stacked along the query rows: a row's scores stay within one warp."""
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, Float32, MMA_SHAPE), (warps, 1, 1), permutation_mnk=(16 * warps, 16, 16)
    )


def partition(
    tiled_mma: cute.TiledMma,
    tidx: Int32,
    sQ: cute.Tensor,
    sK: cute.Tensor,
    sVt: cute.Tensor,
    head_dim: int,
    holds_Q: bool,
) -> Products:
    """sQ (tile_m, head_width), sK (tile_n, head_width, stages), sVt (value_width, tile_n, stages)."""
    thr_mma = tiled_mma.get_slice(tidx)
    atom, atom_transposed = (
        layouts.ldmatrix_atom(sQ.element_type),
        layouts.ldmatrix_atom(sQ.element_type, transpose=True),
    )
    copy_Q = cute.make_tiled_copy_A(atom, tiled_mma)
    copy_K = cute.make_tiled_copy_B(atom, tiled_mma)
    copy_V = cute.make_tiled_copy_B(atom_transposed, tiled_mma)
    return Products(
        tiled_mma,
        thr_mma,
        copy_Q,
        copy_K,
        copy_V,
        tSsQ=copy_Q.get_slice(tidx).partition_S(sQ),
        tSsK=copy_K.get_slice(tidx).partition_S(sK),
        tOsV=copy_V.get_slice(tidx).partition_S(sVt),
        tSrQ=thr_mma.make_fragment_A(thr_mma.partition_A(sQ)),
        tSrK=thr_mma.make_fragment_B(thr_mma.partition_B(sK[None, None, 0])),
        tOrV=thr_mma.make_fragment_B(thr_mma.partition_B(sVt[None, None, 0])),
        steps_QK=(head_dim + MMA_SHAPE[2] - 1) // MMA_SHAPE[2],
        holds_Q=holds_Q,
    )


@cute.jit
def load_queries(p: Products):
    """Q from shared memory into tSrQ, where ``multiply_QK`` expects it if ``holds_Q``."""
    tSrQ_copy = p.copy_Q.retile(p.tSrQ)
    for k in cutlass.range_constexpr(p.steps_QK):
        cute.copy(p.copy_Q, p.tSsQ[None, None, k], tSrQ_copy[None, None, k])


@cute.jit
def multiply_QK(p: Products, slot: Int32, acc_S: cute.Tensor):
    """acc_S = Q K^T with the K tile in ``slot``."""
    tSrQ_copy, tSrK_copy = p.copy_Q.retile(p.tSrQ), p.copy_K.retile(p.tSrK)
    acc_S.fill(0.0)
    for k in cutlass.range_constexpr(p.steps_QK):
        if cutlass.const_expr(not p.holds_Q):
            cute.copy(p.copy_Q, p.tSsQ[None, None, k], tSrQ_copy[None, None, k])
        cute.copy(p.copy_K, p.tSsK[None, None, k, slot], tSrK_copy[None, None, k])
        cute.gemm(p.tiled_mma, acc_S, p.tSrQ[None, None, k], p.tSrK[None, None, k], acc_S)


@cute.jit
def multiply_PV(p: Products, slot: Int32, rP: cute.Tensor, acc_O: cute.Tensor):
    """acc_O += P V with the V tile in ``slot``; P in registers, in accumulator order."""
    tOrP = as_operand_A(rP)
    tOrV_copy = p.copy_V.retile(p.tOrV)
    for k in cutlass.range_constexpr(cute.size(p.tOrV.shape[2])):
        cute.copy(p.copy_V, p.tOsV[None, None, k, slot], tOrV_copy[None, None, k])
        cute.gemm(p.tiled_mma, acc_O, tOrP[None, None, k], p.tOrV[None, None, k], acc_O)


def as_operand_A(rP: cute.Tensor) -> cute.Tensor:
    """View an m16n8 accumulator ((2, 2), MMA_M, MMA_N) as the m16k16 A operand ((2, 2, 2), MMA_M, MMA_N / 2).

    Two accumulators side by side hold exactly the registers of one A operand (PTX ISA, m16n8k16 fragments).
    """
    divided = cute.logical_divide(rP.layout, (None, None, 2))
    shape, stride = divided.shape, divided.stride
    return cute.make_tensor(
        rP.iterator,
        cute.make_layout(
            ((*shape[0], shape[2][0]), shape[1], shape[2][1]),
            stride=((*stride[0], stride[2][0]), stride[1], stride[2][1]),
        ),
    )


def accumulator_rows(acc: cute.Tensor) -> cute.Tensor:
    """View an accumulator ((2, 2), MMA_M, MMA_N) of m16n8 tiles as (rows, cols) of one thread.

    PTX ISA, m16n8k16 accumulators: c0, c1 are two columns of row lane // 4, c2, c3 of row lane // 4 + 8.
    """
    shape, stride = acc.layout.shape, acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((shape[0][1], shape[1]), (shape[0][0], shape[2])),
            stride=((stride[0][1], stride[1]), (stride[0][0], stride[2])),
        ),
    )
