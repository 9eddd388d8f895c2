"""Tensor-core arithmetic on register fragments (PTX ISA, "Warp-level matrix instructions").

In a fragment, lane 4g + i of the register that covers an 8-row block holds row g: of A and B the elements
i*e .. i*e+e-1
that fit one register (e = 2 or 4), of C and D columns 2i and 2i + 1. So a register of a whole warp, looked
at as
elements, is already an 8 x (4e) matrix, B's being transposed.
"""

from __future__ import annotations

import numpy as np

from .narrow import FP8_VALUES, f32_to_f16
from .numerics import canon


def accumulate(c: np.ndarray, products: np.ndarray) -> np.ndarray:
    """The accumulation rule: float32 sum of the exact products of one mma, added to c with one more rounding.

    The hardware aligns, cuts and adds by a rule of its own, so last bits differ: see ``tensor_core``.
    """
    return np.add(products, c, out=products)


def widen(register: np.ndarray, kind: str, warps: int) -> np.ndarray:
    """One A or B register of all warps as float32 of shape (warps, 8, elements of a row)."""
    if kind == "bf16":
        bits = register.view(np.uint16).astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32).reshape(warps, 8, 8)
    if kind == "f16":
        return register.view(np.float16).astype(np.float32).reshape(warps, 8, 8)
    return FP8_VALUES[kind][register.view(np.uint8)].reshape(warps, 8, 16)


def stack(fragments, kind: str, warps: int, row_blocks: int) -> np.ndarray:
    """Fragments side by side: (warps, fragments * row_blocks * 8, k). Registers run over row blocks, then over k."""
    count = len(fragments[0])
    depth = count // row_blocks
    row = 8 if kind in ("f16", "bf16") else 16
    if kind == "bf16":
        out = np.empty((warps, len(fragments), row_blocks, 8, depth, row), np.uint32)
        for f, fragment in enumerate(fragments):
            for r, register in enumerate(fragment):
                out[:, f, r % row_blocks, :, r // row_blocks] = register.view(np.uint16).reshape(warps, 8, 8)
        out <<= np.uint32(16)
        out = out.view(np.float32)
    else:
        out = np.empty((warps, len(fragments), row_blocks, 8, depth, row), np.float32)
        for f, fragment in enumerate(fragments):
            for r, register in enumerate(fragment):
                out[:, f, r % row_blocks, :, r // row_blocks] = widen(register, kind, warps)
    return out.reshape(warps, len(fragments) * row_blocks * 8, depth * row)


def multiply(form, a_fragments, b_fragments, pairs, c, warps: int) -> list[np.ndarray]:
    """D = A B + C for every (A, B) of ``pairs``; ``c`` and the result list the registers of each pair in turn."""
    a_kind, b_kind, d_kind = form
    na, nb = len(a_fragments), len(b_fragments)
    a = stack(a_fragments, a_kind, warps, 2)
    b = stack(b_fragments, b_kind, warps, 1)
    if len(pairs) == na * nb:
        product = np.matmul(a, b.transpose(0, 2, 1))  # (warps, na * 16, nb * 8)
        tiles = product.reshape(warps, na, 2, 8, nb, 4, 2).transpose(1, 4, 2, 6, 0, 3, 5)
        if pairs == tuple((i, j) for i in range(na) for j in range(nb)):
            tiles = np.ascontiguousarray(tiles).reshape(len(pairs), 4, warps * 32)
        else:
            tiles = tiles[[i for i, _ in pairs], [j for _, j in pairs]].reshape(len(pairs), 4, warps * 32)
    else:
        k = a.shape[2]
        left = a.reshape(warps, na, 16, k)[:, [i for i, _ in pairs]]
        right = b.reshape(warps, nb, 8, k)[:, [j for _, j in pairs]]
        product = np.matmul(left, right.transpose(0, 1, 3, 2))  # (warps, pairs, 16, 8)
        tiles = product.reshape(warps, len(pairs), 2, 8, 4, 2).transpose(1, 2, 5, 0, 3, 4)
        tiles = np.ascontiguousarray(tiles).reshape(len(pairs), 4, warps * 32)
    tiles = tiles.reshape(len(pairs) * 4, warps * 32)
    if d_kind == "f32":
        return list(canon(accumulate(np.stack(c), tiles)))
    packed = np.stack(c).view(np.float16).reshape(len(pairs), 2, warps * 32, 2).astype(np.float32)
    flat = packed.transpose(0, 1, 3, 2).reshape(len(pairs) * 4, warps * 32)
    halves = f32_to_f16(accumulate(flat, tiles)).reshape(len(pairs), 2, 2, warps * 32)
    return list(np.ascontiguousarray(halves.transpose(0, 1, 3, 2)).view(np.uint32).reshape(len(pairs) * 2, warps * 32))
