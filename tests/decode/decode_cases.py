"""Calls of ``decode`` as plain data, the tensors that they stand for, and their judge."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from fa2_cute.cache_spec import BLOCK_TOKENS
from fa2_cute.decode import decode
from fa2_cute.decode_spec import WARP_M
from fa2_cute.fuzz.bounds import bounds, narrow_bound
from fa2_cute.fuzz.cache_cases import DTYPES, GARBAGE, KINDS
from fa2_cute.reference import attention
from fa2_cute.reference_cache import Cache


@dataclass(frozen=True)
class Setting:
    """What kernels are specialised on; each costs two compilations, so tests share a few.

    ``wide``: more than 16 packed rows, which another specification takes. Scales: kinds of ``Descale``.
    """

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    head_dim: int = 128
    value_dim: int = 128
    paged: bool = False
    indexed: bool = False
    leftpad: bool = False
    window: bool = False
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    k_scale: str = "unit"
    v_scale: str = "unit"
    wide: bool = False


# Every option, and every pair of options that meets in a line of the kernels.
PLAIN = Setting()
SETTINGS = (
    PLAIN,
    Setting("float16", "float16", 72, 40, paged=True, window=True, softcap=3.0, sink=True),
    Setting("bfloat16", "bfloat16", 64, 64, indexed=True, leftpad=True, alibi=True, window=True, wide=True),
    Setting("bfloat16", "float8_e4m3fn", paged=True, k_scale="block", v_scale="block", leftpad=True),
    Setting(
        "float16", "float8_e4m3fn", 64, 96, indexed=True, window=True, alibi=True, softcap=5.0, k_scale="block",
        v_scale="sequence", wide=True,
    ),
    Setting("bfloat16", "float8_e5m2", 80, 48, window=True, k_scale="sequence", v_scale="block", sink=True),
    Setting("float16", "float16", 256, 256, paged=True),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call. ``seqlens`` gives the batch; ``length`` is that of a row or page; ``width`` the pages a sequence."""

    setting: Setting
    seqlens: tuple[int, ...]
    query_len: int = 1
    kv_heads: int = 1
    group: int = 4
    length: int = 64
    width: int = 1
    left: int | None = None
    right: int | None = None
    splits: int = 0
    missing: bool = False  # some entries of the table, or rows, do not exist
    kind: str = "normal"
    softmax_scale: float | None = None
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.seqlens)

    @property
    def capacity(self) -> int:
        return self.length * (self.width if self.setting.paged else 1)

    @property
    def options(self) -> dict:
        """Of ``reference.attention`` and ``decode`` alike, but for tensors."""
        return {
            "softmax_scale": self.softmax_scale,
            "window": (self.left, self.right),
            "softcap": self.setting.softcap,
        }


@dataclass
class Tensors:
    """What a case stands for; ``cache`` is full of NaN but for the keys that are there."""

    q: torch.Tensor
    cache: Cache
    seqlens: torch.Tensor
    leftpad: torch.Tensor | None
    slopes: torch.Tensor | None
    sink: torch.Tensor | None


def make(case: Case, device: str = "cpu") -> Tensors:
    """The tensors of ``case``, the same for the same case."""
    setting, generator = case.setting, torch.Generator().manual_seed(case.seed)
    batch, kv_heads, heads = case.batch, case.kv_heads, case.kv_heads * case.group
    rows = batch * case.width + 2 if setting.paged else batch + 2
    order = torch.randperm(rows, generator=generator).to(torch.int32)
    table = order[: batch * case.width].view(batch, case.width).clone() if setting.paged else None
    index = order[:batch].clone() if setting.indexed else None
    if table is not None:
        for b, seqlen in enumerate(case.seqlens):  # past a sequence's pages there may be anything
            for page in range(-(-min(max(seqlen, 0), case.capacity) // case.length), case.width):
                table[b, page] = GARBAGE[(b + page) % len(GARBAGE)]
    holes = table.view(-1) if table is not None else index
    if case.missing and holes is not None:
        holes[::3] = torch.tensor(GARBAGE)[torch.arange(len(holes[::3])) % len(GARBAGE)].to(torch.int32)
    caches = [
        torch.full((rows, case.length, kv_heads, dim), torch.nan).to(DTYPES[setting.cache_dtype])
        for dim in (setting.head_dim, setting.value_dim)
    ]
    scales = [_scale(kind, case, rows, generator) for kind in (setting.k_scale, setting.v_scale)]
    cache = Cache(*caches, table, index, *scales)
    for b, seqlen in enumerate(case.seqlens):
        for position in range(min(seqlen, case.capacity)):
            slot = cache.slot(b, position)
            if slot is not None:
                growth = {"normal": 1.0, "peaked": 8.0, "growing": 0.1 + 12.0 * position / case.capacity}[case.kind]
                for x, factor in zip(caches, (growth, 1.0), strict=True):
                    x[slot] = (torch.randn(kv_heads, x.shape[3], generator=generator) * factor).to(x.dtype)

    def on(x):
        return None if x is None else x.to(device)

    return Tensors(
        q=on(
            torch.randn(batch, case.query_len, heads, setting.head_dim, generator=generator).to(DTYPES[setting.dtype])
        ),
        cache=Cache(*(on(x) for x in (*caches, table, index, *scales))),
        seqlens=on(torch.tensor(case.seqlens, dtype=torch.int32)),
        leftpad=on(torch.randint(-2, case.capacity + 2, (batch,), generator=generator, dtype=torch.int32))
        if setting.leftpad
        else None,
        slopes=on(torch.rand((batch, heads), generator=generator)) if setting.alibi else None,
        sink=on(torch.randn(heads, generator=generator)) if setting.sink else None,
    )


def _scale(kind: str, case: Case, rows: int, generator: torch.Generator) -> torch.Tensor | None:
    """Scales from 2^-6 to 2^6."""
    blocks = 1 if case.setting.paged else -(-case.length // BLOCK_TOKENS)
    shape = {"sequence": (case.batch, case.kv_heads), "block": (rows, blocks, case.kv_heads)}.get(kind)
    return None if shape is None else torch.exp2(torch.rand(shape, generator=generator) * 12 - 6)


def run(case: Case, t: Tensors, **packing) -> tuple[torch.Tensor, torch.Tensor]:
    """The call, with other queries if ``packing`` (of q, cu_seqlens_q, max_seqlen_q) is given."""
    return decode(
        packing.pop("q", t.q),
        t.cache.k,
        t.cache.v,
        cache_seqlens=t.seqlens,
        alibi_slopes=t.slopes,
        sink=t.sink,
        block_table=t.cache.block_table,
        cache_batch_idx=t.cache.cache_batch_idx,
        cache_leftpad=t.leftpad,
        k_descale=t.cache.k_descale,
        v_descale=t.cache.v_descale,
        num_splits=case.splits,
        **packing,
        **case.options,
    )


def judge(case: Case, t: Tensors, out: torch.Tensor, lse: torch.Tensor):
    """Every element of every sequence against float64, within the bounds of its type's arithmetic."""
    for b in range(case.batch):
        judge_sequence(case, t, b, t.q[b : b + 1], out[b : b + 1], lse[b : b + 1])


def judge_sequence(case: Case, t: Tensors, b: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor):
    """The same of one sequence's queries: q, out (1, query_len, heads, ...), lse (1, heads, query_len)."""
    end = min(max(case.seqlens[b], 0), case.capacity)
    keys, values, exist = t.cache.gather(b, range(end))
    # What does not exist is masked, not left out: positions count it.
    if t.leftpad is not None:
        exist = exist & (torch.arange(end, device=exist.device) >= t.leftpad[b])
    keys[~exist], values[~exist] = 0.0, 0.0
    given = (q, keys[None], values[None])
    options = dict(case.options, sink=t.sink, mask=exist[None, None, None])
    options["alibi_slopes"] = None if t.slopes is None else t.slopes[b : b + 1]
    expected, expected_lse = attention(*given, **options)
    out_bound, lse_bound = bounds(*given, **options)
    if t.cache.k.element_size() == 1:
        slots = [t.cache.slot(b, j) or (0, 0) for j in range(end)]
        scales = [t.cache.factor(t.cache.v_descale, b, slot) for slot in slots]
        if scales:
            out_bound = out_bound + narrow_bound(*given, torch.stack(scales), **options)
    for name, got, right, bound in (("out", out, expected, out_bound), ("lse", lse, expected_lse, lse_bound)):
        if got.numel() == 0:
            continue
        error = torch.where(got.double() == right, 0.0, (got.double() - right).abs()).nan_to_num(nan=torch.inf)
        worst = (error - bound).argmax()
        assert (error <= bound).all(), (
            f"{case}: {name} of sequence {b}, element {worst.item()}: got {got.flatten()[worst].item()}, "
            f"expected {right.flatten()[worst].item()} within {bound.flatten()[worst].item():.3g}"
        )


@st.composite
def cases(draw, settings=SETTINGS, max_length: int = 200):
    """Calls of every setting: lengths from none to all of the cache and past its end, pages of any size, any split."""
    setting = draw(st.sampled_from(settings))
    length = draw(st.sampled_from([1, 3, 8, 16, 31, 64] if setting.paged else [1, 40, 129, max_length]))
    width = draw(st.integers(1, max(1, min(40, max_length // length)))) if setting.paged else 1
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    most = WARP_M // group
    if setting.wide:
        query_len = draw(st.integers(most + 1, most + 12))
    else:
        query_len = draw(st.integers(min(2, most) if setting.window else 1, most))
    side = st.none() | st.integers(0, 80)
    windowed = setting.window or query_len == 1
    left, right = (draw(side), draw(side.map(lambda x: x if x is None else x - 20))) if windowed else (None, None)
    if setting.window and left is None and right is None:
        right = 0
    return Case(
        setting,
        tuple(draw(st.lists(st.integers(-1, length * width + 2), min_size=1, max_size=3))),
        query_len,
        draw(st.integers(1, 2)),
        group,
        length,
        width,
        left,
        right,
        draw(st.sampled_from([0, 1, 2, 3, 7, 40])),
        draw(st.booleans()),
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from([None, None, -0.3, 0.0, 1.0])),
        draw(st.integers(0, 99)),
    )
