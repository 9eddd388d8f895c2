"""One call over a KV cache as plain data, and the tensors that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from ..cache_spec import BLOCK_TOKENS
from ..reference_cache import Cache
from .cases import given_fields

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
# Not a page or row of any case's cache, in both directions; the number of rows itself is another, see ``make``.
GARBAGE = (-1, -7, 10_000, 2**31 - 1, -(2**31))
# What keys are multiplied by: plain; rows of nearly one key; scores that grow towards the end, so that references move.
KINDS = ("normal", "peaked", "growing")


@dataclass(frozen=True)
class Setting:
    """What the kernels of a call are specialised on, but for the options of its attention.

    Fields as of ``append_spec.AppendSpec``; k_descale, v_descale: "unit", or what a factor is for: "tensor", "head",
    "sequence" (and head), "block".
    """

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    head_dim: int = 64
    value_dim: int = 64
    paged: bool = False
    indexed: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    rotary_dtype: str = "float32"
    k_descale: str = "unit"
    v_descale: str = "unit"

    def __repr__(self) -> str:
        return given_fields(self)


@dataclass(frozen=True)
class Options:
    """What the attention is asked for, as ``flash_attn_with_kvcache`` has it; the flags are compiled in."""

    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    leftpad: bool = False
    num_splits: int = 0

    def __repr__(self) -> str:
        return given_fields(self)

    @property
    def ordered(self) -> bool:
        """Whether queries have positions of their own."""
        return self.causal or self.left >= 0 or self.right >= 0

    @property
    def window(self) -> tuple[int | None, int | None]:
        """As the judge has it."""
        right = 0 if self.causal else self.right
        return (None if self.left < 0 else self.left, None if right < 0 else right)


@dataclass(frozen=True)
class CacheCase:
    """A call of ``flash_attn_with_kvcache``.

    seqlens         tokens of each sequence before the call; they give the batch, and may be out of range
    new_len         tokens that are appended; None: k and v are not given, and nothing is rotated
    length          slots of a row or of a page; width: pages of a sequence
    missing         some entries of the table, or rows, do not exist
    kind            of KINDS; ``seed`` decides the random numbers
    """

    setting: Setting
    seqlens: tuple[int, ...]
    new_len: int | None = 1
    query_len: int = 1
    kv_heads: int = 1
    group: int = 2
    length: int = 8
    width: int = 2
    options: Options = Options()
    softmax_scale: float | None = None
    missing: bool = False
    kind: str = "normal"
    seed: int = 0

    def __repr__(self) -> str:
        return given_fields(self)

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def capacity(self) -> int:
        return self.length * (self.width if self.setting.paged else 1)

    def as_call(self, device: str = "cpu") -> str:
        """A Python program that makes the call and raises WrongResult where its result is wrong."""
        return (
            "from fa2_cute.fuzz import CacheCase, check_cache\n"
            "from fa2_cute.fuzz.cache_cases import Options, Setting\n"
            "\n"
            f"case = {self!r}\n"
            f"check_cache(case, {device!r})\n"
        )

    def classes(self) -> dict[str, str]:
        """What kind of call this is, by aspect: what a campaign counts."""
        setting, options = self.setting, self.options
        paged = "pages of 1" if self.length == 1 else "pages"
        rotation = "interleaved" if setting.interleaved else "halves"
        flags = ", ".join(x for x in ("softcap", "alibi", "sink", "leftpad") if getattr(options, x))
        return {
            "call": "flash_attn_with_kvcache",
            "cache": setting.cache_dtype,
            "slots": paged if setting.paged else "rows, indexed" if setting.indexed else "rows",
            "missing": "pages or rows" if self.missing and (setting.paged or setting.indexed) else "none",
            "appended": "nothing" if not self.new_len else "one token" if self.new_len == 1 else "several",
            "rotation": "none" if not setting.rotary_dim else f"{rotation}, {setting.rotary_dtype}",
            "descale": f"{setting.k_descale}, {setting.v_descale}",
            "cache width": f"{setting.head_dim}" if setting.head_dim == setting.value_dim else "different",
            "cache window": "ordered" if options.ordered else "full",
            "cache options": flags or "none",
            "splits": {0: "chosen", 1: "1"}.get(options.num_splits, "several"),
            "packed rows": "to 16" if self.query_len * self.group <= 16 else "more",
            "sequences of length 0": "yes" if min(self.seqlens) <= 0 else "no",
            "keys": self.kind,
        }


@dataclass
class Tensors:
    """What a case stands for; ``cache`` is full of NaN but for the tokens that are there. ``before``: a copy of it.

    k, v: None where nothing is appended; leftpad, slopes, sink: None where there is none.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache: Cache
    seqlens: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    leftpad: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    before: Cache | None = None

    def __post_init__(self):
        if self.before is None:
            self.before = replace(self.cache, k=self.cache.k.clone(), v=self.cache.v.clone())

    def to(self, device: str | torch.device) -> Tensors:
        """The same on a device; for the judge, who looks at tokens one by one, on the CPU."""

        def moved(x):
            if isinstance(x, Cache):
                return Cache(*(moved(getattr(x, part.name)) for part in fields(x)))
            return x if x is None else x.to(device)

        return Tensors(*(moved(getattr(self, part.name)) for part in fields(self)))


def make(case: CacheCase, device: str | torch.device = "cpu") -> Tensors:
    """The tensors of ``case``, the same for the same case."""
    setting, generator = case.setting, torch.Generator().manual_seed(case.seed)
    dtype, cache_dtype = DTYPES[setting.dtype], DTYPES[setting.cache_dtype]

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    batch, kv_heads, new_len = case.batch, case.kv_heads, case.new_len or 0
    rows = batch * case.width + 2 if setting.paged else batch + 2
    order = torch.randperm(rows, generator=generator).to(torch.int32)
    table = order[: batch * case.width].view(batch, case.width).clone() if setting.paged else None
    index = order[:batch].clone() if setting.indexed else None
    if table is not None:
        for b, seqlen in enumerate(case.seqlens):  # past a sequence's pages there may be anything
            pages = -(-min(max(seqlen, 0) + new_len, case.capacity) // case.length)
            for page in range(pages, case.width):
                table[b, page] = GARBAGE[(b + page) % len(GARBAGE)]
    if case.missing:
        holes = table.view(-1) if table is not None else index
        if holes is not None:
            wrong = torch.tensor((rows, *GARBAGE))
            holes[::3] = wrong[torch.arange(len(holes[::3])) % len(wrong)].to(torch.int32)
    caches = [
        torch.full((rows, case.length, kv_heads, dim), torch.nan).to(cache_dtype)
        for dim in (setting.head_dim, setting.value_dim)
    ]
    descales = [_descale(kind, case, rows, generator) for kind in (setting.k_descale, setting.v_descale)]
    cache = Cache(*caches, table, index, *descales)
    for b, seqlen in enumerate(case.seqlens):
        for position in range(min(seqlen, case.capacity)):
            slot = cache.slot(b, position)
            if slot is not None:
                growth = {"normal": 1.0, "peaked": 8.0, "growing": 0.1 + 12.0 * position / case.capacity}[case.kind]
                for x, factor in zip(caches, (growth, 1.0), strict=True):
                    x[slot] = (normal(kv_heads, x.shape[3], dtype=torch.float32) * factor).to(cache_dtype)
    cos = sin = None
    if setting.rotary_dim and case.new_len is not None:
        angles = torch.rand(case.capacity + case.query_len, setting.rotary_dim // 2, generator=generator) * 6.3
        cos, sin = angles.cos().to(DTYPES[setting.rotary_dtype]), angles.sin().to(DTYPES[setting.rotary_dtype])
    heads, appends, on = kv_heads * case.group, case.new_len is not None, case.options
    return Tensors(
        q=normal(batch, case.query_len, heads, setting.head_dim),
        k=normal(batch, new_len, kv_heads, setting.head_dim) if appends else None,
        v=normal(batch, new_len, kv_heads, setting.value_dim) if appends else None,
        cache=cache,
        seqlens=torch.tensor(case.seqlens, dtype=torch.int32),
        cos=cos,
        sin=sin,
        leftpad=torch.randint(-1, case.capacity + 2, (batch,), generator=generator).to(torch.int32)
        if on.leftpad
        else None,
        slopes=torch.rand(heads, generator=generator) if on.alibi else None,
        sink=torch.randn(heads, generator=generator) if on.sink else None,
    ).to(device)


def _descale(kind: str, case: CacheCase, rows: int, generator: torch.Generator) -> torch.Tensor | None:
    """Factors from 2^-4 to about 1."""
    blocks = 1 if case.setting.paged else -(-case.length // BLOCK_TOKENS)
    shapes = {
        "tensor": (),
        "head": (case.kv_heads,),
        "sequence": (case.batch, case.kv_heads),
        "block": (rows, blocks, case.kv_heads),
    }
    if kind == "unit":
        return None
    return torch.rand(shapes[kind], generator=generator) + 2.0**-4
