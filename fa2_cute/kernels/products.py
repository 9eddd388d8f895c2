"""The two matrix products of attention on mma.sync, operands from shared memory by ldmatrix."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from . import fragments, layouts

MMA_SHAPE = (16, 8, 16)  # PTX ISA: mma.sync.m16n8k16, f16 and bf16
# Products.together where Q's fragments are read again in each step: of 20 moves of registers in a loop of 645
# instructions 12 remain (head_dim 128), which is 1% of the time. Where Q is held nothing is gained.
READ_TOGETHER = 32


@dataclass(frozen=True)
class Products:
    """One thread's operands of S = Q K^T and O = P V.

    thr_mma             its part of the MMA
    sQ, sK, sVt         what its ldmatrix reads of the shared tiles
    tSrQ, tSrK, tOrV    MMA operand registers
    steps_QK            steps of 16 elements along the head dimension: zeros beyond are not multiplied
    held_QK             of the first so many of them tSrQ holds Q's fragments (``load_queries``), of the others each
                        product reads them again
    together            number of keys whose MMAs are issued for all of a warp's rows before those of the next keys:
                        the order of the MMAs is the source's
    """

    tiled_mma: cute.TiledMma
    thr_mma: cute.ThrMma
    copy_Q: cute.TiledCopy
    copy_K: cute.TiledCopy
    copy_V: cute.TiledCopy
    sQ: fragments.LaneRows
    sK: fragments.LaneRows
    sVt: fragments.LaneRows
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    steps_QK: int
    held_QK: int
    together: int


def make_tiled_mma(dtype: type[cutlass.Numeric], warps: int, blocks_m: int = 1) -> cute.TiledMma:
    """Warps stacked along the query rows, ``blocks_m`` blocks of 16 rows each (the kernels for KV caches have one): a
    row's scores stay within one warp, and a warp's rows follow one another."""
    rows = MMA_SHAPE[0]
    order = cute.make_layout((rows, warps, blocks_m), stride=(1, rows * blocks_m, rows))
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, Float32, MMA_SHAPE), (warps, 1, 1), permutation_mnk=(order, 16, 16)
    )


def partition(
    tiled_mma: cute.TiledMma,
    tidx: Int32,
    sQ: cute.Tensor,
    sK: cute.Tensor,
    sVt: cute.Tensor,
    head_dim: int,
    held_columns: int,
) -> Products:
    """sQ (tile_m, head_width), sK (tile_n, head_width, stages), sVt (value_width, tile_n, stages).

    head_dim: the columns of Q and K beyond are zero. held_columns: the first columns of Q, whose fragments are to be
    read once.
    """
    thr_mma = tiled_mma.get_slice(tidx)
    atom, atom_transposed = (
        layouts.ldmatrix_atom(sQ.element_type),
        layouts.ldmatrix_atom(sQ.element_type, transpose=True),
    )
    copy_Q = cute.make_tiled_copy_A(atom, tiled_mma)
    copy_K = cute.make_tiled_copy_B(atom, tiled_mma)
    copy_V = cute.make_tiled_copy_B(atom_transposed, tiled_mma)
    tile_m, head_width = cute.size(sQ.shape[0]), cute.size(sQ.shape[1])
    tile_n, value_width = cute.size(sK.shape[0]), cute.size(sVt.shape[0])
    steps_QK = (head_dim + MMA_SHAPE[2] - 1) // MMA_SHAPE[2]
    held_QK = min(held_columns // MMA_SHAPE[2], steps_QK)
    return Products(
        tiled_mma,
        thr_mma,
        copy_Q,
        copy_K,
        copy_V,
        sQ=fragments.lane_rows(copy_Q.get_slice(tidx).partition_S(sQ), tile_m, head_width),
        sK=fragments.lane_rows(copy_K.get_slice(tidx).partition_S(sK), tile_n, head_width),
        sVt=fragments.lane_rows(copy_V.get_slice(tidx).partition_S(sVt), tile_n, value_width),
        tSrQ=thr_mma.make_fragment_A(thr_mma.partition_A(sQ)),
        tSrK=thr_mma.make_fragment_B(thr_mma.partition_B(sK[None, None, 0])),
        tOrV=thr_mma.make_fragment_B(thr_mma.partition_B(sVt[None, None, 0])),
        steps_QK=steps_QK,
        held_QK=held_QK,
        together=tile_n if held_QK == steps_QK else READ_TOGETHER,
    )


@cute.jit
def load_queries(p: Products):
    """What is held of Q from shared memory into tSrQ, where ``multiply_QK`` expects it."""
    for k in cutlass.range_constexpr(p.held_QK):
        _load_Q(p, k)


@cute.jit
def multiply_QK(
    p: Products, slot: Int32, acc_S: cute.Tensor, keys: cutlass.Constexpr, first_key: Int32 | cutlass.Constexpr = 0
):
    """acc_S = Q K^T for the keys [begin, end) = ``keys`` from ``first_key`` on, all multiples of 16, of the K tile in
    ``slot``."""
    acc_S.fill(0.0)
    base = p.sK.in_slot(slot, first_key)
    begin, end = keys
    groups = [(first, min(first + p.together, end)) for first in range(begin, end, p.together)]
    accs = [of_keys(acc_S, 2, (first - begin, last - begin)) for first, last in groups]
    operands = [of_keys(p.tSrK, 1, group) for group in groups]
    for k in cutlass.range_constexpr(p.steps_QK):
        if cutlass.const_expr(k >= p.held_QK):
            _load_Q(p, k)
        _load_K(p, base, keys, k)
        for acc, tSrK in zip(accs, operands, strict=True):
            cute.gemm(p.tiled_mma, acc, p.tSrQ[None, None, k], tSrK[None, None, k], acc)


@cute.jit
def multiply_PV(
    p: Products,
    slot: Int32,
    rP: cute.Tensor,
    acc_O: cute.Tensor,
    keys: cutlass.Constexpr,
    first_key: Int32 | cutlass.Constexpr = 0,
):
    """acc_O += P V for the keys [begin, end) = ``keys`` from ``first_key`` on of the V tile in ``slot``.

    rP: P of these keys, in registers, in accumulator order.
    """
    tOrP = as_operand_A(rP)
    base = p.sVt.in_slot(slot, first_key)
    begin, end = (key // MMA_SHAPE[2] for key in keys)
    for k in cutlass.range_constexpr(begin, end):
        _load_V(p, base, k)
        cute.gemm(p.tiled_mma, acc_O, tOrP[None, None, k - begin], p.tOrV[None, None, k], acc_O)


# One ldmatrix.x4 fills 16 rows and 16 columns of an operand: a block of Q, or two of K or V that retile puts together.


def _load_Q(p: Products, k: int):
    for m in range(cute.size(p.tSrQ.shape[1])):
        # The registers of an A operand are in ldmatrix's order (PTX ISA, mma.m16n8k16 and ldmatrix).
        registers = cute.make_tensor(p.tSrQ[None, m, k].iterator, p.sQ.layout)
        cute.copy_atom_call(p.copy_Q, p.sQ.at(p.sQ.base, m * 16, k * 16), registers)


def _load_K(p: Products, base: Int32, keys: tuple[int, int], k: int):
    tSrK = p.copy_K.retile(p.tSrK)
    for key in range(*keys, 16):
        cute.copy_atom_call(p.copy_K, p.sK.at(base, key, k * 16), tSrK[None, key // 16, k])


def _load_V(p: Products, base: Int32, k: int):
    tOrV = p.copy_V.retile(p.tOrV)
    for n in range(cute.size(tOrV.shape[1])):
        cute.copy_atom_call(p.copy_V, p.sVt.at(base, k * 16, n * 16), tOrV[None, n, k])


def of_keys(x: cute.Tensor, mode: int, keys: tuple[int, int]) -> cute.Tensor:
    """The part of the keys [begin, end) = ``keys`` in a register tensor whose flat mode ``mode`` counts blocks of 8."""
    begin, end = (key // MMA_SHAPE[1] for key in keys)
    shape, stride = list(x.layout.shape), list(x.layout.stride)
    start = x.iterator + begin * stride[mode]
    shape[mode] = end - begin
    return cute.make_tensor(start, cute.make_layout(tuple(shape), stride=tuple(stride)))


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
