"""How PTX types map to numpy: a *kind* names the dtype under which the generated code looks at a register."""

from __future__ import annotations

import numpy as np

DTYPES = {
    "u8": np.uint8, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "pred": np.bool_, "s8": np.int8,
}  # fmt: skip
KINDS = {
    "b8": "u8", "u8": "u8", "s8": "s8", "b16": "u16", "u16": "u16", "s16": "s16", "f16": "f16", "bf16": "u16",
    "b32": "u32", "u32": "u32", "s32": "s32", "f32": "f32", "f16x2": "u32", "bf16x2": "u32", "b64": "u64",
    "u64": "u64", "s64": "s64", "f64": "f64", "f32x2": "u64", "pred": "pred",
}  # fmt: skip
BASE_KIND = {0: "pred", 1: "u16", 2: "u16", 4: "u32", 8: "u64"}
DTYPE_NAMES = {kind: kind.upper() for kind in DTYPES}

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# One element per access: numpy moves whole elements several times faster than rows of small ones.
# complex128 is only a 16-byte container here; its bits pass through unchanged.
UNITS = {**UNSIGNED, 16: np.complex128, 32: np.dtype("V32")}


def split_units(units: np.ndarray, width: int, count: int) -> list[np.ndarray]:
    """Access-sized units as ``count`` unsigned arrays of ``width``-byte elements."""
    if count == 1:
        return [units]
    return list(np.ascontiguousarray(units.view(UNSIGNED[width]).reshape(-1, count).T))


def join_units(values: list[np.ndarray]) -> np.ndarray:
    """The inverse of split_units."""
    if len(values) == 1:
        return values[0]
    rows = np.stack(values, 1)
    return rows.view(UNITS[rows.shape[1] * rows.itemsize]).reshape(-1)
