"""What a kernel is called with, as plain data: one description for the compiler, the launcher and the emulator.

A specification lists its parameters in the order of the kernel's arguments; an argument that a specification does not
have is None there, in the compiler's view and in the call, so that one kernel signature serves all.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorParameter:
    """A tensor argument.

    name            what errors call it
    dtype           "float16", "bfloat16", "float32", "int32", "uint8", ...
    shape, stride   one entry a dimension, in elements; None is known at run time only
    divisor         run-time strides and the start are multiples of this many elements
    written         the kernel writes to it
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    divisor: int = 1
    written: bool = False

    @property
    def run_time_extents(self) -> tuple[int, ...]:
        """Dimensions whose extent is part of the kernel's argument."""
        return tuple(i for i, extent in enumerate(self.shape) if extent is None)

    @property
    def run_time_strides(self) -> tuple[int, ...]:
        """Dimensions whose stride is part of the kernel's argument."""
        return tuple(i for i, stride in enumerate(self.stride) if stride is None)


@dataclass(frozen=True)
class ScalarParameter:
    """A number; dtype "float32" or "int32"."""

    name: str
    dtype: str


Parameter = TensorParameter | ScalarParameter


def rows(name: str, dtype: str, width: int, *, written: bool = False) -> TensorParameter:
    """(batch, length, heads, width) of 16-bit elements: rows of ``width`` that start at multiples of 16 bytes."""
    return TensorParameter(name, dtype, (None, None, None, width), (None, None, None, 1), divisor=8, written=written)


def vector(name: str, dtype: str) -> TensorParameter:
    """(n,), contiguous."""
    return TensorParameter(name, dtype, (None,), (1,))


def partial_parameters(value_dim: int, *, written: bool) -> tuple[Parameter, ...]:
    """What splits leave for the kernel that combines them, float32: kernels/partial.py says what it is.

    partial_out (splits, rows, value_dim) and partial_state (splits, rows, 2), rows being batch x query_len x heads.
    """
    strides = (None, value_dim, 1)
    return (
        TensorParameter("partial_out", "float32", (None, None, value_dim), strides, divisor=4, written=written),
        TensorParameter("partial_state", "float32", (None, None, 2), (None, 2, 1), divisor=2, written=written),
    )
