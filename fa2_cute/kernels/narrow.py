"""FP8 operands of 16-bit MMAs: pairs of bytes, as ldmatrix brings them, become pairs of float16, exactly.

ldmatrix moves 16-bit units, two FP8 numbers each. Where a pair is two neighbours along the contraction (K), a register
holds four of them, and which of the MMA's contraction indices they are does not matter as long as Q agrees: so each
register of bytes becomes the two registers of one B operand. Where a pair is two neighbours along the output (V,
transposed), its register holds two keys of two columns; a byte permutation brings the keys of each column together, and
the two columns go to two accumulators.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

_CVT = {"float8_e4m3fn": "cvt.rn.f16x2.e4m3x2", "float8_e5m2": "cvt.rn.f16x2.e5m2x2"}  # PTX ISA, cvt; sm_89 and later

# A row of bfloat16 Q beside FP8 keys is scaled by a power of two to the top of float16's range, 2^14 up to 2^15: what
# then is rounded away is below 2^-40 of the row's largest element.
Q_EXPONENT = 14
_BIAS = 127
LARGEST_BFLOAT16 = 3.3895313892515355e38


def widen(pairs: Int32, fp8: str) -> tuple[Int32, Int32]:
    """Four FP8 numbers as two pairs of float16: bytes 0 and 1, bytes 2 and 3."""
    cvt = _CVT[fp8]
    return cute.arch.inline_ptx(
        f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, {{$r0}}; {cvt} {{$w0}}, low; {cvt} {{$w1}}, high; }}",
        write_only_types=[Int32, Int32],
        read_only_args=[pairs],
    )


def pair_keys(columns: Int32) -> Int32:
    """Bytes (key 0 column 0, key 0 column 1, key 1 column 0, key 1 column 1) with the keys of a column side by side."""
    return cute.arch.inline_ptx("prmt.b32 {$w0}, {$r0}, 0, 0x3120;", write_only_types=[Int32], read_only_args=[columns])


@cute.jit
def row_scale(largest: Float32) -> tuple[Float32, Float32]:
    """(2^n, 2^-n) that brings a row whose ``largest`` magnitude this is to the top of float16's range.

    Infinities count as the largest bfloat16: finite elements beside one stay finite.
    """
    largest = cute.arch.fmin(largest, Float32(LARGEST_BFLOAT16))
    exponent = cutlass.max(bits_of(largest) >> 23, Int32(Q_EXPONENT + 1))  # biased; smaller ones would leave no 2^-n
    scale = float_of((2 * _BIAS + Q_EXPONENT - exponent) << 23)
    inverse = float_of((exponent - Q_EXPONENT) << 23)
    return scale, inverse


def bits_of(x: Float32) -> Int32:
    """The bits of a float32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def float_of(bits: Int32) -> Float32:
    """The float32 of these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def halves(pair: Int32) -> tuple[Float32, Float32]:
    """Two bfloat16 of a register as float32: the low one, the high one."""
    return float_of(pair << 16), float_of(pair & Int32(-0x10000))


def pack_float16(low: Float32, high: Float32) -> Int32:
    """Two float32 rounded to float16, in one register."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[high, low]
    )
