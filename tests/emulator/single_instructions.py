"""Kernels of one mma.sync a warp, and operands for them that reach the rule's edges."""

from __future__ import annotations

import numpy as np

# type: (bits, exponent bits, fraction bits)
LAYOUT = {"bf16": (16, 8, 7), "f16": (16, 5, 10), "e4m3": (8, 4, 3), "e5m2": (8, 5, 2), "f32": (32, 8, 23)}
# registers of A, B, C of the shapes with float32 C
REGISTERS = {"m16n8k8": (2, 1, 4), "m16n8k16": (4, 2, 4), "m16n8k32": (4, 2, 4)}


def mma_code(form: str, counts) -> str:
    """PTX: every warp, one a block, loads its A, B and C from %rd0 .. %rd2 and stores D to %rd3.

    ``form`` is SHAPE.A.B.D; ``counts`` are the registers of A, B, C and D. In memory, a warp's operand is (32 lanes,
    registers) words.
    """
    shape, a_kind, b_kind, d_kind = form.split(".")
    code = "mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 5; mov.u32 %r2, %tid.x; add.u32 %r1, %r1, %r2;\n"
    names = []
    for i, count in enumerate(counts):
        registers = [f"%r{10 * (i + 1) + j}" for j in range(count)]
        names.append("{" + ", ".join(registers) + "}")
        code += f"mad.wide.u32 %rd{10 + i}, %r1, {4 * count}, %rd{i};\n"
        if i < 3:
            code += "".join(f"ld.global.b32 {r}, [%rd{10 + i}+{4 * j}];\n" for j, r in enumerate(registers))
    a, b, c, d = names
    code += f"mma.sync.aligned.{shape}.row.col.{d_kind}.{a_kind}.{b_kind}.{d_kind} {d}, {a}, {b}, {c};\n"
    return code + "".join(f"st.global.b32 [%rd13+{4 * j}], %r{40 + j};\n" for j in range(counts[3]))


def finite_operands(form: str, rng, warps: int, spread: int) -> tuple[np.ndarray, ...]:
    """(A, B, C) of finite numbers, a tenth zeros, (warps, 32, registers) uint32.

    In a warp, the exponents of A lie within ``spread`` of one that is drawn from all, the least and the greatest with a
    chance of a fifth each; so do those of B; C is within 25 binary places of the products.
    """
    shape, a_kind, b_kind, _ = form.split(".")
    centers, operands = [], []
    for kind, count in ((a_kind, REGISTERS[shape][0]), (b_kind, REGISTERS[shape][1])):
        _, exponent_bits, _ = LAYOUT[kind]
        top = (1 << exponent_bits) - 2  # the field above is not finite, or not wholly
        edge = rng.choice([0, top], (warps, 1, 1))
        center = np.where(rng.random((warps, 1, 1)) < 0.4, edge, rng.integers(0, top + 1, (warps, 1, 1)))
        operands.append(_floats(kind, center, spread, top, (warps, 32, count), rng))
        centers.append(center - (top // 2))
    near = sum(centers) + 127
    offset = rng.integers(-25, 10, (warps, 1, 1))
    return *operands, _floats("f32", near + offset, max(spread, 2), 254, (warps, 32, REGISTERS[shape][2]), rng)


def _floats(kind: str, center, spread: int, top: int, shape, rng) -> np.ndarray:
    """Words of bit patterns of a type, with exponent fields around ``center``, at most ``top``."""
    bits, _, fraction_bits = LAYOUT[kind]
    shape = (*shape[:2], shape[2] * 32 // bits)
    field = np.clip(center + rng.integers(-spread, spread + 1, shape), 0, top)
    value = rng.integers(0, 2, shape) << bits - 1 | field << fraction_bits | rng.integers(0, 1 << fraction_bits, shape)
    value = np.where(rng.random(shape) < 0.1, 0, value)
    return np.ascontiguousarray(value.astype(f"u{bits // 8}")).view(np.uint32)
