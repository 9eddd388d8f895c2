"""One attention call as plain data: what strategies draw, failures print and tensors are built from."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from ..decode_spec import FEW_SPLITS
from .layouts import lay_out, moved
from .masks import mask_of
from .per_head import sinks, slopes
from .values import numbers

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def keeps_calls(device: str | torch.device) -> bool:
    """Whether a call there that is like an earlier one may be launched by what was kept of that, without its checks.

    (Over caches the emulator keeps calls too; to make each of them twice would cost it half of its cases.)
    """
    return torch.device(device).type == "cuda"


def given_fields(x: Any) -> str:
    """Python that makes the dataclass ``x`` again; fields at their defaults are left out."""
    given = [
        f"{field.name}={getattr(x, field.name)!r}"
        for field in dataclasses.fields(x)
        if getattr(x, field.name) != field.default
    ]
    return f"{type(x).__name__}({', '.join(given)})"


@dataclass(frozen=True)
class Case:
    """A call of ``attend``: shapes, options, how the memory is laid out, what the numbers are.

    dtype ... head_dim   as there; value_dim: None is head_dim
    causal, window       (left, right); causal stands for a right side of 0
    softmax_scale, softcap
    alibi, sink          names in ``per_head.SLOPES`` and ``per_head.SINKS``, or None
    mask                 a name in ``masks.MASKS`` or None; its dtype ("bool", "same" as q, "float32") and its layout, a
                         name in ``masks.MASK_LAYOUTS``
    packed               (query_len, key_len) of each packed sequence; batch, query_len and key_len then mean nothing
    unused               rows before the first and after the last packed sequence, of q and then of k and v, all NaN;
                         if negative, the sequences reach beyond the tensors by as much and are cut
    splits               by the forward kernel in as many splits of the keys (``split_calls.attend``); 0: as is fastest
    layouts              those of q, k and v, names in ``layouts.LAYOUTS``
    values               a name in ``values.VALUES``; ``seed`` decides the random numbers
    """

    dtype: str = "bfloat16"
    batch: int = 1
    query_len: int = 1
    key_len: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None
    sink: str | None = None
    mask: str | None = None
    mask_dtype: str = "bool"
    mask_layout: str = "full"
    packed: tuple[tuple[int, int], ...] | None = None
    unused: tuple[int, int, int, int] = (0, 0, 0, 0)
    splits: int = 0
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    values: str = "normal"
    seed: int = 0

    def __repr__(self) -> str:
        return given_fields(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def scale(self) -> float:
        """The softmax scale, the default one filled in."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def value_width(self) -> int:
        """value_dim, the default one filled in."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The window with ``causal`` in it."""
        return (self.window[0], 0 if self.causal else self.window[1])

    @property
    def sequence_count(self) -> int:
        return self.batch if self.packed is None else len(self.packed)

    @property
    def query_rows(self) -> tuple[int, int]:
        """(batch, query_len) of q's memory; packed sequences are one batch of all rows."""
        return self._rows(0, self.query_len)

    @property
    def key_rows(self) -> tuple[int, int]:
        """The same of k and v."""
        return self._rows(1, self.key_len)

    def _rows(self, side: int, length: int) -> tuple[int, int]:
        if self.packed is None:
            return self.batch, length
        before, after = self.unused[2 * side : 2 * side + 2]
        return 1, max(before + sum(lengths[side] for lengths in self.packed) + after, 0)

    def cumulative(self, side: int) -> torch.Tensor:
        """cu_seqlens of q (side 0) or of k and v (1): (sequences + 1,) int32."""
        lengths = [self.unused[2 * side], *(pair[side] for pair in self.packed)]
        return torch.tensor(lengths, dtype=torch.int64).cumsum(0).to(torch.int32)

    @property
    def options(self) -> dict:
        """The keyword arguments of the call, with tensors on the CPU."""
        return self.options_on("cpu")

    def options_on(self, device: str | torch.device) -> dict:
        """The keyword arguments of the call; those that are off are left out."""
        given = {"softmax_scale": self.softmax_scale, "window": self.sides}
        if self.softcap:
            given["softcap"] = self.softcap
        if self.alibi is not None:
            given["alibi_slopes"] = moved(slopes(self), device)
        if self.sink is not None:
            given["sink"] = moved(sinks(self), device)
        if self.mask is not None:
            given["mask"] = moved(mask_of(self), device)
        if self.packed is not None:
            given["cu_seqlens_q"], given["cu_seqlens_k"] = (self.cumulative(side).to(device) for side in (0, 1))
        return given

    def tensors(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v on ``device``. Memory between and around views holds NaN, so that stray reads show."""
        drawn = numbers(self)
        made = (
            lay_out(x.to(self.torch_dtype).to(device), layout) for x, layout in zip(drawn, self.layouts, strict=True)
        )
        return tuple(x if self.packed is None else x[0] for x in made)

    def as_call(self, device: str = "cpu") -> str:
        """A Python program that makes the call and raises WrongResult where its result is wrong."""
        imported, repeated = "", ""
        module, given = ("split_calls", f"splits={self.splits}, **options") if self.splits else ("forward", "**options")
        if keeps_calls(device):
            imported = "from fa2_cute.fuzz.judging import require_same\n"
            repeated = f"require_same(attend(q, k, v, {given}), (out, lse))\n"
        return (
            f"from fa2_cute.{module} import attend\n"
            f"from fa2_cute.fuzz import Case, judge\n{imported}"
            "\n"
            f"case = {self!r}\n"
            f"q, k, v = case.tensors({device!r})\n"
            f"options = case.options_on({device!r})\n"
            f"out, lse = attend(q, k, v, {given})\n"
            f"judge(q, k, v, out, lse, **options)\n{repeated}"
        )

    def classes(self) -> dict[str, str]:
        """What kind of call this is, by aspect: what a campaign counts."""
        ratio = self.heads // self.kv_heads
        return {
            "call": "attend",
            "dtype": self.dtype,
            "head_dim": _width_class(self.head_dim),
            "value_dim": "equal" if self.value_width == self.head_dim else "different",
            "window": _window_class(self),
            "softcap": _softcap_class(self.softcap),
            "alibi": str(self.alibi),
            "sink": str(self.sink),
            "mask": str(self.mask),
            "mask dtype": "none" if self.mask is None else self.mask_dtype,
            "mask layout": "none" if self.mask is None else self.mask_layout,
            "sequences": _sequences_class(self),
            "forward splits": _splits_class(self),
            "heads": "MHA" if ratio == 1 else "MQA" if self.kv_heads == 1 else f"GQA {ratio}:1",
            "query_len": _length_class(self.query_rows[1]),
            "key_len": _length_class(self.key_rows[1]),
            "scale": _scale_class(self.softmax_scale),
            "values": self.values,
            "layout of q": self.layouts[0],
            "layout of k": self.layouts[1],
            "layout of v": self.layouts[2],
        }


def _width_class(width: int) -> str:
    """Relative to rows of 128 bytes in shared memory."""
    return str(width) if width % 64 == 0 else f"below {-(-width // 64) * 64}"


def _window_class(case: Case) -> str:
    left, right = case.sides
    if right is None:
        return "full" if left is None else "left"
    what = "causal" if right == 0 else "right"
    if left is not None:
        return f"left and {what}"
    if what == "right" or case.packed is not None:
        return what
    offset = case.key_len - case.query_len
    return f"causal, offset {'0' if offset == 0 else '> 0' if offset > 0 else '< 0'}"


def _softcap_class(softcap: float) -> str:
    return "none" if not softcap else "tiny" if softcap < 1e-2 else "huge" if softcap > 1e3 else "ordinary"


def _sequences_class(case: Case) -> str:
    if case.packed is None:
        return "one" if case.batch == 1 else "a batch"
    if any(rows < 0 for rows in case.unused):
        return "packed, cut"
    if any(rows > 0 for rows in case.unused):
        return "packed, rows unused"
    return "packed, more than rows" if len(case.packed) > case.query_rows[1] else "packed"


def _splits_class(case: Case) -> str:
    """Relative to what one kernel combines, and to keys: a tile has at least 16."""
    if not case.splits:
        return "as is fastest"
    few = "few" if case.splits <= FEW_SPLITS else "many"
    return few if case.splits * 16 <= case.key_len else f"{few}, some empty"


def _length_class(length: int) -> str:
    """Relative to multiples of 64, which every tile side is."""
    if length <= 1:
        return str(length)
    if length > 1000:
        return "long"
    return {0: "full tiles", 1: "a tile + 1", 63: "a tile - 1"}.get(length % 64, "other")


def _scale_class(scale: float | None) -> str:
    if scale is None:
        return "default"
    if scale == 0:
        return "zero"
    size = abs(scale)
    what = "tiny" if size < 2.0**-126 else "huge" if size > 1e6 else "ordinary"
    return f"{what}, negative" if math.copysign(1, scale) < 0 else what
