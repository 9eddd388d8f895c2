"""Runs one call over a KV cache and judges it: what the append wrote, and nothing beside it; then the attention."""

import warnings
from dataclasses import replace

import torch

from .. import reference, reference_cache
from ..append import append
from ..descale import normalise
from ..emulation import EmulationNotice
from ..kvcache import flash_attn_with_kvcache
from .bounds import FP32, bounds, narrow_bound
from .cache_cases import CacheCase, Tensors, make
from .cases import keeps_calls
from .judging import WrongResult, poisoned_allocations, require_same, require_within

FLOAT32_ROUNDING = 2.0**-24
# Weights and sums of splits are combined once more: two exponentials, a product, a sum and a quotient in float32.
COMBINING = 16 * FP32


def check_cache(case: CacheCase, device: str | torch.device = "cpu"):
    """Run ``case`` on ``device`` and compare it with float64; on CUDA, run it again: the same bits.

    The append is judged on a copy of the cache, slot by slot; the call must write the same bits, and attend to them.
    Raises WrongResult, or whatever the call raises (an EmulatorError of a hazard, for one).
    """
    twin, t = make(case, device), make(case, device)
    with warnings.catch_warnings(), poisoned_allocations():
        warnings.simplefilter("ignore", EmulationNotice)
        lengths, q = t.seqlens.cpu(), t.q.cpu()
        if case.new_len is not None:
            lengths, rotated = run_append(case, twin)
            judge_append(case, twin, lengths, rotated)
            lengths, q = lengths.cpu(), q if rotated is None else rotated.cpu()
        out, lse = call(case, t)
        again = call(case, t) if keeps_calls(device) else None  # what it appends goes where it is already
    for name in ("k", "v"):
        same = torch.equal(*(getattr(x.cache, name).view(torch.uint8) for x in (t, twin)))
        _require(same, f"{name}_cache of {case}: not what an append alone writes")
    shape = (*t.q.shape[:3], case.setting.value_dim)
    _require(out.shape == shape, f"out of {case}: got shape {tuple(out.shape)}, expected {shape}")
    _require(out.dtype == t.q.dtype, f"out of {case}: got dtype {out.dtype}, expected {t.q.dtype}")
    _require(lse.dtype == torch.float32, f"lse of {case}: got dtype {lse.dtype}, expected torch.float32")
    judge_attention(case, replace(t.to("cpu"), q=q), lengths, out.cpu(), lse.cpu())
    if again is not None:
        require_same(again, (out, lse), repr(case))


def call(case: CacheCase, t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The function on the tensors of ``case``, all options by name: (out, lse)."""
    return flash_attn_with_kvcache(t.q, t.cache.k, t.cache.v, **arguments(case, t), return_softmax_lse=True)


def arguments(case: CacheCase, t: Tensors) -> dict:
    """Of ``flash_attn_with_kvcache`` but for q and the caches."""
    options = case.options
    return {
        "k": t.k,
        "v": t.v,
        "rotary_cos": t.cos,
        "rotary_sin": t.sin,
        "rotary_interleaved": case.setting.interleaved,
        "cache_seqlens": t.seqlens,
        "cache_batch_idx": t.cache.cache_batch_idx,
        "cache_leftpad": t.leftpad,
        "block_table": t.cache.block_table,
        "softmax_scale": case.softmax_scale,
        "causal": options.causal,
        "window_size": (options.left, options.right),
        "softcap": options.softcap,
        "alibi_slopes": t.slopes,
        "num_splits": options.num_splits,
        "k_descale": t.cache.k_descale,
        "v_descale": t.cache.v_descale,
        "learnable_sink": t.sink,
    }


def run_append(case: CacheCase, t: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The append kernel alone on the tensors of ``case``: (lengths, rotated q or None)."""
    options = {"batch": case.batch, "paged": case.setting.paged}
    return append(
        t.k,
        t.v,
        t.cache.k,
        t.cache.v,
        t.seqlens,
        capacity=case.capacity,
        q=t.q,
        rotary_cos=t.cos,
        rotary_sin=t.sin,
        rotary_interleaved=case.setting.interleaved,
        ordered=case.options.ordered,
        cache_batch_idx=t.cache.cache_batch_idx,
        block_table=t.cache.block_table,
        k_descale=normalise("k_descale", t.cache.k_descale, t.cache.k, **options),
        v_descale=normalise("v_descale", t.cache.v_descale, t.cache.v, **options),
    )


def judge_append(case: CacheCase, t: Tensors, lengths: torch.Tensor, rotated: torch.Tensor | None):
    """Raise WrongResult unless the append wrote the new tokens, nothing else, and rotated the queries; ``t``: after."""
    setting, t = case.setting, t.to("cpu")
    rotary = {"rotary_cos": t.cos, "rotary_sin": t.sin, "rotary_interleaved": setting.interleaved}
    keys, values, written = reference_cache.appended(t.cache, t.k, t.v, t.seqlens, **rotary)
    expected_lengths = reference_cache.lengths_after(t.cache, t.seqlens, case.new_len)
    _require(torch.equal(lengths.cpu(), expected_lengths), f"lengths of {case}: got {lengths.tolist()}")
    for name, expected in (("k", keys), ("v", values)):
        got, before, new = (getattr(x, name) for x in (t.cache, t.before, t))
        descale = getattr(t.cache, f"{name}_descale")
        kept = torch.equal(got[~written].view(torch.uint8), before[~written].view(torch.uint8))
        _require(kept, f"{name}_cache of {case}: written to where no token goes")
        if not written.any():
            continue
        most = torch.finfo(got.dtype).max
        smallest = 1.0 if descale is None else descale.min().item()
        magnitude = 2 * new.abs().max().double() / smallest  # |x cos| + |y sin|
        wanted = expected[written].clamp(-most, most)
        error = (got[written].double() - wanted).abs()
        _require(bool((error <= allowed(wanted, got.dtype, magnitude)).all()), f"{name}_cache of {case}: wrong numbers")
    _require((rotated is None) == (t.cos is None), f"rotated queries of {case}: got {rotated}")
    if rotated is not None:
        start = t.seqlens.clamp(0, case.capacity)
        exact = reference_cache.rotated_queries(t.q, start, **rotary, ordered=case.options.ordered)
        error = (rotated.cpu().double() - exact).abs()
        within = error <= allowed(exact, t.q.dtype, 2 * t.q.abs().max().double())
        _require(bool(within.all()), f"rotated queries of {case}: wrong numbers")


def allowed(expected: torch.Tensor, dtype: torch.dtype, magnitude: torch.Tensor) -> torch.Tensor:
    """How far a stored number may be from the float64 one, both before FP8 saturates.

    Half a step of its type, which is eps / 2 of a normal number and of the smallest normal one below that; and the
    float32 arithmetic before it: two products, a sum and a quotient of numbers up to ``magnitude``.
    """
    kind = torch.finfo(dtype)
    half_step = (expected.abs() + kind.smallest_normal) * (kind.eps / 2)
    return half_step * (1 + 8 * FLOAT32_ROUNDING) + 4 * FLOAT32_ROUNDING * magnitude


def judge_attention(case: CacheCase, t: Tensors, lengths: torch.Tensor, out: torch.Tensor, lse: torch.Tensor):
    """Raise WrongResult unless out and lse are the attention of ``t.q`` over the first ``lengths`` tokens of the cache.

    ``t``: after the call, its q as rotated; everything on the CPU.
    """
    options = case.options
    chosen = {
        "softmax_scale": case.softmax_scale,
        "window": options.window,
        "softcap": options.softcap,
        "alibi_slopes": t.slopes,
        "sink": t.sink,
    }
    for b in range(case.batch):
        end = min(max(int(lengths[b]), 0), case.capacity)
        begin = 0 if t.leftpad is None else min(max(int(t.leftpad[b]), 0), end)
        k, v, exist = t.cache.gather(b, range(begin, end))
        one = (t.q[b : b + 1], k[None], v[None])
        given = {**chosen, "mask": None if bool(exist.all()) else exist[None, None, None, :]}
        expected, expected_lse = reference.attention(*one, **given)
        out_bound, lse_bound = bounds(*one, **given)
        if len(v):
            out_bound = out_bound + COMBINING * v.abs().amax()
        if t.cache.k.element_size() == 1 and len(v):
            slots = [t.cache.slot(b, j) or (0, 0) for j in range(begin, end)]
            scales = torch.stack([t.cache.factor(t.cache.v_descale, b, slot) for slot in slots])
            out_bound = out_bound + narrow_bound(*one, scales, **given)
        require_within(out[b : b + 1], expected, out_bound, f"out of sequence {b} of {case}")
        require_within(lse[b : b + 1], expected_lse, lse_bound + COMBINING, f"lse of sequence {b} of {case}")


def _require(condition: bool, message: str):
    if not condition:
        raise WrongResult(message)
