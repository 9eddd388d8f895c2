"""The arithmetic of atom and red."""

from __future__ import annotations

import numpy as np

from .narrow import half2, half_arith
from .numerics import canon, canon64


def atomic_apply(memory, index, site, values):
    """Applies one atomic a lane to ``memory[index]`` in lane order; returns the old values."""
    old = np.zeros(len(index), memory.dtype)
    left = np.arange(len(index))
    while left.size:
        _, first = np.unique(index[left], return_index=True)
        now = left[np.sort(first)]
        old[now] = memory[index[now]]
        memory[index[now]] = atomic_result(site.op_name, site.kind, old[now], [v[now] for v in values])
        left = np.setdiff1d(left, now, assume_unique=True)
    return old


def atomic_result(op, kind, old, values):
    """New memory contents (unsigned) of an atomic operation."""
    v = values[0]
    if op == "exch":
        return v
    if op == "cas":
        return np.where(old == v, values[1], old)
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, v)
    if op == "inc":
        return np.where(old >= v, old.dtype.type(0), old + old.dtype.type(1))
    if op == "dec":
        return np.where((old == 0) | (old > v), v, old - old.dtype.type(1))
    if kind in ("f16x2", "bf16x2"):
        return half2(op, kind[:-2], old, v)
    if kind in ("f16", "bf16"):
        return half_arith(op, kind, old, v)
    typed = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "s64": np.int64}.get(kind, old.dtype)
    a, b = old.view(typed), v.view(typed)
    if op == "add":
        r = a + b
        r = canon(r) if kind == "f32" else canon64(r) if kind == "f64" else r
    else:
        r = np.minimum(a, b) if op == "min" else np.maximum(a, b)
    return r.view(old.dtype)
