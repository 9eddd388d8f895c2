"""Runs one call of ``attend`` and judges it: shapes, dtypes, every element, inputs untouched."""

import contextlib
import functools
import math
import warnings
from dataclasses import dataclass, replace

import torch

from .. import reference, split_calls
from .._torch_internals import EMPTY_STRIDED
from ..emulation import EmulationNotice
from ..forward import attend
from .bounds import bounds, mean_error_bound, varlen_bounds
from .cases import Case, keeps_calls

# Outputs of single weights times 64 above it are normal numbers of float16, and so are their probabilities.
SHOWN = 2.0**-6


class WrongResult(Exception):
    """A call whose result is not what it must be; the message says which element, how wrong, and the case."""


def check(case: Case, device: str | torch.device = "cpu"):
    """Run ``case`` on ``device`` and compare it with float64; where calls are kept, run it again: the same bits.

    Raises WrongResult, or whatever the call raises (an EmulatorError of a hazard, for one).
    """
    tensors, options = case.tensors(device), case.options_on(device)
    out, lse = call(*tensors, splits=case.splits, **options)
    again = call(*tensors, splits=case.splits, **options) if keeps_calls(device) else None
    untouched, untouched_options = case.tensors(device), case.options_on(device)
    for name, before, after in (
        *zip("qkv", untouched, tensors, strict=True),
        *((name, untouched_options[name], given) for name, given in options.items() if torch.is_tensor(given)),
    ):
        same = (before == after) | (before.isnan() & after.isnan())
        _require(bool(same.all()), f"{name} was written to by {case}")
    Expectation.of_case(case, *untouched, **untouched_options).judge(out, lse, repr(case))
    if again is not None:
        require_same(again, (out, lse), repr(case))


def check_tensors(q, k, v, *, what: str = "the call", splits: int = 0, **options):
    """Call ``attend`` on poisoned memory and ``judge`` what it returns; options as in ``call``."""
    judge(q, k, v, *call(q, k, v, splits=splits, **options), **options, what=what)


def run(case: Case, device: str | torch.device = "cpu") -> tuple[torch.Tensor, ...]:
    """The call of ``case``, not judged: (q, k, v, out, lse)."""
    q, k, v = case.tensors(device)
    return q, k, v, *call(q, k, v, splits=case.splits, **case.options_on(device))


def call(
    q, k, v, *, causal: bool = False, window=(None, None), splits: int = 0, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend`` on poisoned memory and without the notice of emulation: (out, lse). causal: a right side of 0.

    splits: of ``split_calls.attend``, or 0.
    """
    options["window"] = (window[0], 0 if causal else window[1])
    with warnings.catch_warnings(), poisoned_allocations():
        warnings.simplefilter("ignore", EmulationNotice)
        if splits:
            return split_calls.attend(q, k, v, splits=splits, **options)
        return attend(q, k, v, **options)


@contextlib.contextmanager
def poisoned_allocations():
    """``torch.empty`` gives NaN: an element that nobody writes cannot pass for a right one left by the call before.

    So does what kept calls allocate with, ``EMPTY_STRIDED``: in itself it does not look at torch's settings.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)  # what fill_uninitialized_memory depends on
    torch.utils.deterministic.fill_uninitialized_memory = True
    direct = dict(EMPTY_STRIDED)
    EMPTY_STRIDED.update({kind: functools.partial(_empty_strided, kind) for kind in direct})
    try:
        yield
    finally:
        EMPTY_STRIDED.update(direct)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _empty_strided(kind: str, shape: tuple, stride: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=kind)


def judge(q, k, v, out: torch.Tensor, lse: torch.Tensor, *, what: str = "the call", **options):
    """Raise WrongResult unless ``out`` and ``lse`` are attention of q, k, v within the bounds of ``bounds``.

    Shapes as ``attend`` takes and returns them; options are its own, and ``causal`` for a right side of 0.
    """
    Expectation.of(q, k, v, **options).judge(out, lse, what)


@dataclass(frozen=True)
class Expectation:
    """What a call must return, to be computed once where it is judged many times.

    out (batch, query_len, heads, value_dim) and lse (batch, heads, query_len), of packed sequences (total_q, heads,
    value_dim) and (heads, total_q), float64, and how far off each element may be; ``like`` is a tensor of the dtype and
    on the device that the output must have, keys the number of keys.
    ``unbiased`` asks that relative errors cancel, as they do where each element is one weight of a row of its own.
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_bound: torch.Tensor
    lse_bound: torch.Tensor
    like: torch.Tensor
    keys: int
    unbiased: bool = False

    @classmethod
    def of(cls, q, k, v, **options) -> "Expectation":
        packed = "cu_seqlens_q" in options
        exact, bound = (reference.varlen_attention, varlen_bounds) if packed else (reference.attention, bounds)
        return cls(*exact(q, k, v, **options), *bound(q, k, v, **options), like=q, keys=k.shape[-3])

    @classmethod
    def of_case(cls, case: Case, q, k, v, **options) -> "Expectation":
        """The same for the tensors of ``case``, which are judged for bias if they are made for it.

        options: those of ``case``, if they are at hand.
        """
        plain = case.values == "single_weights" and 0.0625 <= abs(case.scale) <= 1.0
        plain = plain and not case.softcap and case.alibi is case.mask is case.packed is None
        distinct = not any(layout.startswith("broadcast") for layout in case.layouts)
        return replace(cls.of(q, k, v, **(options or case.options_on(q.device))), unbiased=plain and distinct)

    def judge(self, out: torch.Tensor, lse: torch.Tensor, what: str = "the call"):
        """Raise WrongResult unless shapes, dtypes, layout, device and every element are right."""
        shape, rows = tuple(self.out.shape), tuple(self.lse.shape)
        _require(out.shape == shape, f"out of {what}: got shape {tuple(out.shape)}, expected {shape}")
        _require(out.dtype == self.like.dtype, f"out of {what}: got dtype {out.dtype}, expected {self.like.dtype}")
        _require(out.device == self.like.device, f"out of {what}: got device {out.device}, expected {self.like.device}")
        _require(out.is_contiguous(), f"out of {what}: got strides {out.stride()}, expected contiguous ones")
        _require(lse.shape == rows, f"lse of {what}: got shape {tuple(lse.shape)}, expected {rows}")
        _require(lse.dtype == torch.float32, f"lse of {what}: got dtype {lse.dtype}, expected torch.float32")
        require_within(out, self.out, self.out_bound, f"out of {what}")
        require_within(lse, self.lse, self.lse_bound, f"lse of {what}")
        if self.unbiased:
            self._require_unbiased(out, what)

    def _require_unbiased(self, out: torch.Tensor, what: str):
        """Over batch and rows, for each column of each head, and for both rows that a lane of an accumulator holds."""
        for half in (0, 1):
            rows = torch.arange(out.shape[1], device=out.device) // 8 % 2 == half
            expected, got = self.out[:, rows], out[:, rows].double()
            shown = expected > SHOWN
            count = shown.sum(dim=(0, 1)).clamp(min=1)
            errors = torch.where(shown, got / torch.where(shown, expected, 1.0) - 1.0, 0.0)
            mean = errors.sum(dim=(0, 1)) / count
            excess = mean.abs() - mean_error_bound(out.dtype, self.keys, count)
            if (excess > 0).any():
                head, column = divmod(int(excess.argmax()), out.shape[3])
                raise WrongResult(
                    f"out of {what}: relative errors in column {column} of head {head} are {mean[head, column]:.3g} on "
                    f"average over {int(count[head, column])} rows: something rounds one way"
                )


def require_within(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str):
    """Element by element: NaN where NaN is expected, the same infinity, else within ``bound``; or WrongResult.

    A finite expectation beyond the range of the result's type asks for the infinity that it rounds to.
    """
    rounded = expected.to(got.dtype)
    got64 = got.double()
    judged = rounded.isfinite()
    same = torch.where(expected.isnan(), got64.isnan(), got64 == rounded.double())
    excess = torch.where(judged, (got64 - expected).abs() - bound, 0.0)
    wrong = torch.where(judged, ~(excess <= 0), ~same)
    if wrong.any():
        ranking = torch.where(wrong, excess.nan_to_num(nan=math.inf), -1.0)
        index = torch.unravel_index(ranking.argmax(), got.shape)
        where = tuple(int(i) for i in index)
        raise WrongResult(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements wrong; worst at {where}: "
            f"got {got64[where]:.9g}, expected {expected[where]:.9g} within {bound[where]:.3g}"
        )


def require_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], what: str = "the call"):
    """Raise WrongResult unless (out, lse) of the same call, made again, have the same bits; one NaN is like another."""
    for name, x, y in zip(("out", "lse"), got, expected, strict=True):
        seen, wanted = ((z.dtype, z.device, tuple(z.shape), z.stride()) for z in (x, y))
        _require(seen == wanted, f"{name} of {what}, made again: got {seen}, the first time {wanted}")
        bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
        differ = (x.view(bits) != y.view(bits)) & ~(x.isnan() & y.isnan())
        if differ.any():
            where = tuple(int(i) for i in torch.nonzero(differ)[0])
            raise WrongResult(
                f"{name} of {what}, made again: {int(differ.sum())} of {differ.numel()} elements differ; the first "
                f"at {where}: got {x[where]:.9g}, the first time {y[where]:.9g}"
            )


def _require(condition: bool, message: str):
    if not condition:
        raise WrongResult(message)
