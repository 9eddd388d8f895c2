"""One attention call as plain data: what strategies draw, failures print and tensors are built from."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from .layouts import lay_out
from .values import numbers

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A call: shapes as in ``flash_attn_func``, options, how the memory is laid out, what the numbers are.

    ``layouts`` are those of q, k and v (names in ``layouts.LAYOUTS``), ``values`` is a name in ``values.VALUES``;
    ``seed`` decides the random numbers.
    """

    dtype: str = "bfloat16"
    batch: int = 1
    query_len: int = 1
    key_len: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    causal: bool = False
    softmax_scale: float | None = None
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    values: str = "normal"
    seed: int = 0

    def __repr__(self) -> str:
        """Python that makes the case again; fields at their defaults are left out."""
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join(given)})"

    @property
    def scale(self) -> float:
        """The softmax scale, the default one filled in."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def options(self) -> dict:
        """The keyword arguments of the call."""
        return {"softmax_scale": self.softmax_scale, "causal": self.causal}

    def tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v on ``device``. Memory between and around views holds NaN, so that stray reads show."""
        drawn = numbers(self)
        dtype = DTYPES[self.dtype]
        return tuple(lay_out(x.to(dtype).to(device), layout) for x, layout in zip(drawn, self.layouts, strict=True))

    def as_call(self, device: str = "cpu") -> str:
        """A Python program that makes the call and raises WrongResult where its result is wrong."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return (
            "from fa2_cute import flash_attn_func\n"
            "from fa2_cute.fuzz import Case, judge\n"
            "\n"
            f"q, k, v = {self!r}.tensors({device!r})\n"
            f"out, lse = flash_attn_func(q, k, v, {options}, return_softmax_lse=True)\n"
            f"judge(q, k, v, out, lse, {options})\n"
        )

    def classes(self) -> dict[str, str]:
        """What kind of call this is, by aspect: what a campaign counts."""
        offset = self.key_len - self.query_len
        ratio = self.heads // self.kv_heads
        return {
            "dtype": self.dtype,
            "head_dim": str(self.head_dim),
            "mask": "full" if not self.causal else f"causal, offset {_sign(offset)}",
            "batch": "1" if self.batch == 1 else "more",
            "heads": "MHA" if ratio == 1 else "MQA" if self.kv_heads == 1 else f"GQA {ratio}:1",
            "query_len": _length_class(self.query_len),
            "key_len": _length_class(self.key_len),
            "scale": _scale_class(self.softmax_scale),
            "values": self.values,
            "layout of q": self.layouts[0],
            "layout of k": self.layouts[1],
            "layout of v": self.layouts[2],
        }


def _sign(offset: int) -> str:
    return "0" if offset == 0 else "> 0" if offset > 0 else "< 0"


def _length_class(length: int) -> str:
    """Relative to multiples of 64, which every tile side is."""
    if length <= 1:
        return str(length)
    return {0: "full tiles", 1: "a tile + 1", 63: "a tile - 1"}.get(length % 64, "other")


def _scale_class(scale: float | None) -> str:
    if scale is None:
        return "default"
    if scale == 0:
        return "zero"
    size = abs(scale)
    what = "tiny" if size < 2.0**-126 else "huge" if size > 1e6 else "ordinary"
    return f"{what}, negative" if math.copysign(1, scale) < 0 else what
