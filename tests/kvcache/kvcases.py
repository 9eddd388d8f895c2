"""Calls over a cache as plain data: what is drawn, and the tensors that it stands for."""

from dataclasses import dataclass, fields, replace

import torch
from hypothesis import strategies as st

from fa2_cute.cache_spec import BLOCK_TOKENS
from fa2_cute.reference_cache import Cache

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
# Not a page or row of any test's cache, in both directions; the number of rows itself is another, see ``make``.
GARBAGE = (-1, -7, 10_000, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Setting:
    """What kernels are specialised on; each costs a compilation, so tests share a few."""

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


# Every option, and every pair of options that meets in a line of the kernel.
SETTINGS = (
    Setting(),
    Setting("float16", "float16", 40, 72, indexed=True, rotary_dim=32, interleaved=True, rotary_dtype="float16"),
    Setting("bfloat16", "bfloat16", 128, 64, paged=True, rotary_dim=64, rotary_dtype="bfloat16"),
    Setting(
        "float16", "float8_e4m3fn", paged=True, rotary_dim=64, interleaved=True, k_descale="block", v_descale="head"
    ),
    Setting("bfloat16", "float8_e4m3fn", indexed=True, rotary_dim=16, k_descale="block", v_descale="block"),
    Setting("bfloat16", "float8_e5m2", 64, 128, paged=True, v_descale="sequence", k_descale="tensor"),
)


@dataclass(frozen=True)
class Case:
    """One call. ``seqlens`` gives the batch; ``length`` is that of a row or page; ``width`` the pages a sequence."""

    setting: Setting
    seqlens: tuple[int, ...]
    new_len: int = 1
    query_len: int = 1
    kv_heads: int = 1
    group: int = 2
    length: int = 8
    width: int = 2
    ordered: bool = True
    missing: bool = False  # some entries of the table, or rows, do not exist
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def capacity(self) -> int:
        return self.length * (self.width if self.setting.paged else 1)


@dataclass
class Tensors:
    """What a case stands for; ``cache`` is full of NaN but for the tokens that are there. ``before``: a copy of it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: Cache
    seqlens: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    before: Cache | None = None

    def __post_init__(self):
        if self.before is None:
            self.before = replace(self.cache, k=self.cache.k.clone(), v=self.cache.v.clone())

    def to(self, device: str) -> "Tensors":
        """The same on a device; for the judge, who looks at tokens one by one, on the CPU."""

        def moved(x):
            if isinstance(x, Cache):
                return Cache(*(moved(getattr(x, part.name)) for part in fields(x)))
            return x if x is None else x.to(device)

        return Tensors(*(moved(getattr(self, part.name)) for part in fields(self)))


def make(case: Case, device: str = "cpu") -> Tensors:
    """The tensors of ``case``, the same for the same case."""
    setting, generator = case.setting, torch.Generator().manual_seed(case.seed)
    dtype, cache_dtype = DTYPES[setting.dtype], DTYPES[setting.cache_dtype]

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    batch, kv_heads = case.batch, case.kv_heads
    rows = batch * case.width + 2 if setting.paged else batch + 2
    order = torch.randperm(rows, generator=generator).to(torch.int32)
    table = order[: batch * case.width].view(batch, case.width).clone() if setting.paged else None
    index = order[:batch].clone() if setting.indexed else None
    if table is not None:
        for b, seqlen in enumerate(case.seqlens):  # past a sequence's pages there may be anything
            pages = -(-min(max(seqlen, 0) + case.new_len, case.capacity) // case.length)
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
                for x in caches:
                    x[slot] = normal(kv_heads, x.shape[3], dtype=torch.float32).to(cache_dtype)
    cos = sin = None
    if setting.rotary_dim:
        angles = torch.rand(case.capacity + case.query_len, setting.rotary_dim // 2, generator=generator) * 6.3
        cos, sin = angles.cos().to(DTYPES[setting.rotary_dtype]), angles.sin().to(DTYPES[setting.rotary_dtype])
    return Tensors(
        q=normal(batch, case.query_len, kv_heads * case.group, setting.head_dim),
        k=normal(batch, case.new_len, kv_heads, setting.head_dim),
        v=normal(batch, case.new_len, kv_heads, setting.value_dim),
        cache=cache,
        seqlens=torch.tensor(case.seqlens, dtype=torch.int32),
        cos=cos,
        sin=sin,
    ).to(device)


def _descale(kind: str, case: Case, rows: int, generator: torch.Generator) -> torch.Tensor | None:
    blocks = 1 if case.setting.paged else -(-case.length // BLOCK_TOKENS)
    shapes = {
        "tensor": (),
        "head": (case.kv_heads,),
        "sequence": (case.batch, case.kv_heads),
        "block": (rows, blocks, case.kv_heads),
    }
    if kind == "unit":
        return None
    return torch.rand(shapes[kind], generator=generator) + 0.0625


@st.composite
def cases(draw, settings=SETTINGS, max_new_len: int = 9):
    """Calls of every setting: lengths from none to all of the cache and past its end, rows and pages of any size."""
    setting = draw(st.sampled_from(settings))
    length = draw(st.sampled_from([1, 2, 3, 8, 16, 31] if setting.paged else [1, 7, 64, 130]))
    width = draw(st.integers(1, 4)) if setting.paged else 1
    capacity = length * width
    return Case(
        setting,
        tuple(draw(st.lists(st.integers(-1, capacity + 2), min_size=1, max_size=4))),
        new_len=draw(st.integers(0, max_new_len)),
        query_len=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        length=length,
        width=width,
        ordered=draw(st.booleans()),
        missing=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
