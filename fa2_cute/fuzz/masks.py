"""Masks of a call: what they hide or add, and how they lie in memory."""

import math

import torch

from .seeds import generator_of

TILE = 64  # keys, and a divisor of query rows, that a shipped kernel takes at a time (tiling.py)
MASK_DTYPES = ("bool", "same", "float32")


def mask_of(case) -> torch.Tensor:
    """The mask of ``case``, broadcastable to (batch, heads, query_len, key_len), in the dtype and layout it names."""
    for name, given, known in (
        ("mask", case.mask, MASKS),
        ("mask_dtype", case.mask_dtype, MASK_DTYPES),
        ("mask_layout", case.mask_layout, MASK_LAYOUTS),
    ):
        if given not in known:
            raise ValueError(f"{name}: got {given!r}, takes one of {', '.join(known)}")
    batch, heads, query_len, key_len = shape = (case.batch, case.heads, case.query_len, case.key_len)
    shape = _BROADCAST.get(case.mask_layout, lambda *extents: extents)(*shape)
    generator = generator_of(case, "mask")
    dtype = {"bool": torch.bool, "same": case.torch_dtype, "float32": torch.float32}[case.mask_dtype]
    if case.mask in _HIDING:
        seen = _HIDING[case.mask](case, shape, generator)
        mask = seen if dtype == torch.bool else torch.where(seen, 0.0, -math.inf).to(dtype)
    elif dtype == torch.bool:
        raise ValueError(f"mask: got {case.mask!r} of dtype bool, takes one of {', '.join(_HIDING)}")
    else:
        mask = _ADDING[case.mask](case, shape, generator, dtype).to(dtype)
    return _laid_out(mask, case.mask_layout, (batch, heads, query_len, key_len))


# ---- which keys are hidden: bool, True takes part --------------------------------------------------------------------


def _all_visible(case, shape, generator):
    return torch.ones(shape, dtype=torch.bool)


def _nothing_visible(case, shape, generator):
    return torch.zeros(shape, dtype=torch.bool)


def _some(case, shape, generator):
    """Seven in ten, anywhere."""
    return torch.rand(shape, generator=generator) < 0.7


def _few(case, shape, generator):
    """One in fifty: rows see little, and many of them nothing at all."""
    return torch.rand(shape, generator=generator) < 0.02


def _padding(case, shape, generator):
    """Keys up to a length, its own for each row of the mask; every other one is padded on the left."""
    lengths = torch.randint(0, max(shape[3], 1) + 1, (*shape[:3], 1), generator=generator)
    keys = torch.arange(shape[3])
    left = (torch.arange(shape[0]) % 2 == 1)[:, None, None, None]
    return torch.where(left, keys >= shape[3] - lengths, keys < lengths)


def _blind_rows(case, shape, generator):
    """Every other octet of rows sees nothing; the others see all but a few."""
    seen = torch.rand(shape, generator=generator) < 0.9
    octets = (torch.arange(shape[2]) // 8 + case.seed) % 2 == 0
    return seen & octets[:, None]


def _whole_tiles(case, shape, generator):
    """Tiles of keys are wholly hidden from tiles of rows: a kernel meets nothing at first, in between or in the end."""
    rows, keys = (-(-extent // TILE) for extent in shape[2:])
    seen = torch.rand((*shape[:2], rows, keys), generator=generator) < 0.5
    seen = seen.repeat_interleave(TILE, dim=2).repeat_interleave(TILE, dim=3)
    return seen[:, :, : shape[2], : shape[3]]


def _one_key(case, shape, generator):
    """Each row sees one key, a different one from row to row."""
    rows, keys = torch.arange(shape[2])[:, None], torch.arange(shape[3])[None, :]
    return ((rows * 7 + case.seed) % max(shape[3], 1) == keys).expand(shape).clone()


# ---- what is added: float --------------------------------------------------------------------------------------------


def _bias(case, shape, generator, dtype):
    return torch.randn(shape, generator=generator)


def _bias_and_hidden(case, shape, generator, dtype):
    hidden = torch.rand(shape, generator=generator) < 0.3
    return torch.randn(shape, generator=generator).masked_fill(hidden, -math.inf)


def _large_bias(case, shape, generator, dtype):
    """Far beyond what a softmax can be relative to by chance, both ways."""
    return 1000.0 * torch.randn(shape, generator=generator)


def _jumps(case, shape, generator, dtype):
    """Rows jump late, by steps around the thresholds of a softmax that trails its maximum."""
    steps = torch.tensor([7.9, 8.1, 16.0, 40.0, 100.0, 124.0, 127.0, 150.0, 1000.0]) * math.log(2)
    rows = steps[torch.randint(len(steps), (*shape[:3], 1), generator=generator)]
    first = case.seed % max(shape[3], 1)
    keys = torch.arange(shape[3])
    return torch.where((keys >= first) & (keys < first + 8), rows, torch.zeros(()))


def _lowest(case, shape, generator, dtype):
    """The lowest number of the dtype stands for -inf, as many models have it; some rows have nothing else."""
    lowest = torch.finfo(dtype).min
    hidden = torch.rand(shape, generator=generator) < 0.3
    rows = torch.rand((*shape[:3], 1), generator=generator) < 0.2
    return torch.where(hidden | rows, lowest, 0.0)


def _not_finite(case, shape, generator, dtype):
    """NaN or an infinity in a few rows, which it makes NaN."""
    rows = torch.rand((*shape[:3], 1), generator=generator) < 0.2
    keys = torch.arange(shape[3]) == case.seed % max(shape[3], 1)
    what = math.nan if case.seed // 2 % 2 else math.inf
    return torch.randn(shape, generator=generator).masked_fill(rows & keys, what)


_HIDING = {
    "all_visible": _all_visible,
    "nothing_visible": _nothing_visible,
    "some": _some,
    "few": _few,
    "padding": _padding,
    "blind_rows": _blind_rows,
    "whole_tiles": _whole_tiles,
    "one_key": _one_key,
}
_ADDING = {
    "bias": _bias,
    "bias_and_hidden": _bias_and_hidden,
    "large_bias": _large_bias,
    "jumps": _jumps,
    "lowest": _lowest,
    "not_finite": _not_finite,
}
HIDING_MASKS, MASKS = tuple(_HIDING), (*_HIDING, *_ADDING)

# ---- how it lies in memory -------------------------------------------------------------------------------------------

# The extents of a mask that is made; other layouts have all four.
_BROADCAST = {
    "of_batch": lambda batch, heads, rows, keys: (batch, 1, rows, keys),
    "of_heads": lambda batch, heads, rows, keys: (1, heads, rows, keys),
    "of_keys": lambda batch, heads, rows, keys: (batch, 1, 1, keys),
    "of_rows": lambda batch, heads, rows, keys: (batch, heads, rows, 1),
    "expanded": lambda batch, heads, rows, keys: (batch, 1, 1, keys),
    "matrix": lambda batch, heads, rows, keys: (1, 1, rows, keys),
    "vector": lambda batch, heads, rows, keys: (1, 1, 1, keys),
    "one": lambda batch, heads, rows, keys: (1, 1, 1, 1),
}
MASK_LAYOUTS = ("full", *_BROADCAST, "transposed", "sliced", "every_other", "rows_first")


def _laid_out(mask: torch.Tensor, layout: str, shape: tuple[int, ...]) -> torch.Tensor:
    """``mask`` as it travels; what lies between is NaN, or True for a mask of bool."""
    if layout == "expanded":  # strides of 0 where others broadcast
        return mask.expand(shape)
    if layout == "matrix":
        return mask[0, 0]
    if layout == "vector":
        return mask[0, 0, 0]
    if layout == "one":
        return mask.reshape(())
    if layout == "transposed":  # rows side by side
        return mask.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "rows_first":
        return mask.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if layout == "sliced":  # an odd stride, and a start that is no multiple of anything
        return _inside((*shape[:3], shape[3] + 3), mask, lambda whole: whole[..., 1 : 1 + shape[3]])
    if layout == "every_other":
        return _inside((*shape[:3], 2 * shape[3]), mask, lambda whole: whole[..., ::2])
    return mask


def _inside(shape, mask, view_of) -> torch.Tensor:
    whole = torch.full(shape, True if mask.dtype == torch.bool else math.nan, dtype=mask.dtype)
    view = view_of(whole)
    view.copy_(mask)
    return view
