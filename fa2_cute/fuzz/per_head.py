"""ALiBi slopes and sinks: kinds of numbers that each query head has one of."""

import torch

from .seeds import generator_of

# Slope times distance, below 2^10 in every case, stays below float32's largest number in base 2 as well:
# 2^127 / (log2(e) 2^10).
STEEPEST = 2.0**115


def slopes(case) -> torch.Tensor:
    """The slopes of ``case``, float32: (heads,) or (sequences, heads)."""
    if case.alibi not in _SLOPES:
        raise ValueError(f"alibi: got {case.alibi!r}, takes one of {', '.join(SLOPES)}")
    return _SLOPES[case.alibi](case, generator_of(case, "slopes"))


def sinks(case) -> torch.Tensor:
    """The sinks of ``case``, (heads,), float32 or in the dtype of q."""
    if case.sink not in _SINKS:
        raise ValueError(f"sink: got {case.sink!r}, takes one of {', '.join(SINKS)}")
    return _SINKS[case.sink](case, generator_of(case, "sinks"))


def _ladder(case, generator):
    """2^(-8 (h + 1) / heads), as ALiBi's authors have them."""
    return 2.0 ** (-8.0 * (torch.arange(case.heads) + 1) / case.heads)


def _of_each_sequence(case, generator):
    """(sequences, heads): one of another head or sequence would show."""
    return 0.5 * torch.rand((case.sequence_count, case.heads), generator=generator)


def _of_both_signs(case, generator):
    """Far keys gain with a negative slope; a zero among them."""
    drawn = torch.randn(case.heads, generator=generator)
    drawn[case.seed % case.heads] = 0.0
    return drawn


def _steep(case, generator):
    """Every step of distance is 2^115 in weight: a row is its nearest key alone or, in every other head, its last."""
    return 80.0 * _alternating(case)


def _enormous(case, generator):
    """Products with the distance just inside float32; both signs."""
    return STEEPEST * _alternating(case)


def _alternating(case):
    return torch.where((torch.arange(case.heads) + case.seed) % 2 == 0, 1.0, -1.0)


def _tiny(case, generator):
    """Denormal in float32: they change nothing, and must not become NaN."""
    return torch.full((case.heads,), 1e-40)


def _nan_slopes(case, generator):
    """In one head, whose rows it makes NaN; the others are as they are."""
    drawn = 0.25 * torch.rand(case.heads, generator=generator)
    drawn[case.seed % case.heads] = torch.nan
    return drawn


def _strided_slopes(case, generator):
    """Between NaN, and the same for all sequences by a stride of 0."""
    whole = torch.full((1, 2 * case.heads + 1), torch.nan)
    view = whole[:, 1::2]
    view.copy_(0.25 * torch.rand(view.shape, generator=generator))
    return view.expand(case.sequence_count, case.heads)


def _normal(case, generator):
    return torch.randn(case.heads, generator=generator)


def _large(case, generator):
    """Nothing is left for the keys."""
    return torch.full((case.heads,), 1e4)


def _small(case, generator):
    """Nothing is left for the sink, but where a row sees no key."""
    return torch.full((case.heads,), -1e4)


def _absent(case, generator):
    return torch.full((case.heads,), -torch.inf)


def _mixed(case, generator):
    """A head's neighbours have the opposite."""
    kinds = torch.tensor([0.0, -torch.inf, 1e4, -1e4, 20.0, -20.0, 90.0])
    return kinds[(torch.arange(case.heads) + case.seed) % len(kinds)]


def _nan_sinks(case, generator):
    """In one head, whose rows it makes NaN; the others are as they are."""
    drawn = torch.randn(case.heads, generator=generator)
    drawn[case.seed % case.heads] = torch.nan
    return drawn


def _sixteen_bits(case, generator):
    return (4.0 * torch.randn(case.heads, generator=generator)).to(case.torch_dtype)


def _strided_sinks(case, generator):
    """Between NaN."""
    whole = torch.full((2 * case.heads + 1,), torch.nan)
    whole[1::2] = torch.randn(case.heads, generator=generator)
    return whole[1::2]


_SLOPES = {
    "ladder": _ladder,
    "of_each_sequence": _of_each_sequence,
    "of_both_signs": _of_both_signs,
    "steep": _steep,
    "enormous": _enormous,
    "tiny": _tiny,
    "nan": _nan_slopes,
    "strided": _strided_slopes,
}
_SINKS = {
    "normal": _normal,
    "large": _large,
    "small": _small,
    "absent": _absent,
    "mixed": _mixed,
    "nan": _nan_sinks,
    "sixteen_bits": _sixteen_bits,
    "strided": _strided_sinks,
}
SLOPES, SINKS = tuple(_SLOPES), tuple(_SINKS)
