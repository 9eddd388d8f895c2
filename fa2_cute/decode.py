"""Attention over a KV cache on torch tensors: checks a call, picks kernels and the number of splits, launches them."""

import math
from dataclasses import dataclass

import torch

from . import checks, descale, forward
from .cache_checks import bytes_of, check_int32, rows_of
from .decode_checks import Choice, Heads, decide, metadata
from .decode_spec import DecodeSpec
from .kept import Kept
from .launch import Launch
from .spec import SMALLEST_SCALE

# To check a call and choose for it costs the host several times its launch, and a model makes few different ones.
_CHOICES: Kept[tuple, Choice] = Kept(1024)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of exact attention over a KV cache, the keys split over the GPU (Flash-Decoding, Dao et al. 2023).

    Arguments:
        q: (batch, query_len, heads, head_dim), float16 or bfloat16, any query_len. Made for few: 16 rows (query_len x
            heads / kv_heads) cost as much as one, and every 64 read the keys again.
        k_cache: (batch_cache, cache_len, kv_heads, head_dim), or with ``block_table`` (pages, page_size, kv_heads,
            head_dim) with pages of any size; v_cache: (..., value_dim). q's dtype, float8_e4m3fn or float8_e5m2; rows
            start at multiples of 16 bytes. head_dim and value_dim: multiples of 8 up to 256, of 16 for float8.
        cache_seqlens: (batch,) int32: keys of each sequence. Never read by the host; clamped to the slots there are.
            None: as many as slots.
        softmax_scale, window, softcap, alibi_slopes, sink: as in ``forward.attend``: query i is at slot
            ``i + cache_seqlens[b] - query_len``.
        block_table: (batch, pages a sequence) int32: slot s is row ``s % page_size`` of page
            ``block_table[b, s // page_size]``. Slots in pages outside [0, pages) do not exist; entries past a
            sequence's last page are not read.
        cache_batch_idx: (batch,) int32, without a block table: row of the cache; a row that does not exist has no keys.
        cache_leftpad: (batch,) int32: slots before it do not exist.
        k_descale, v_descale: (float8) what stored numbers are multiplied by, see ``descale.normalise``: positive, from
            2^-126 to 2^90 where they differ from block to block.
        num_splits: blocks that share a sequence's keys, up to 256; 0 chooses by the number of SMs, heads and sequences
            and the cache's capacity. With the same number a sequence gives the same bits whatever else is in the batch.
        cu_seqlens_q: (batch + 1,) int32: queries of different lengths, packed: q is (rows, heads, head_dim), and
            sequence b has the rows [cu[b], cu[b + 1]), clamped to those there are. On a GPU what they hold is not
            checked (that would wait for it); on the CPU it may not decrease.
        max_seqlen_q: (with cu_seqlens_q) about how many queries a sequence has at most, by which a kernel is chosen;
            whatever it says the result is right.
    Returns:
        out (batch, query_len, heads, value_dim) in q's dtype, lse (batch, heads, query_len) float32: natural logarithm,
        sink included; with cu_seqlens_q (rows, heads, value_dim) and (heads, rows). A row that sees no key, or belongs
        to no sequence, gives 0 and -inf (or the sink).
    Raises TypeError (type or dtype), ValueError (shape, stride, device, number), before anything is launched. Gradients
    are not looked at: results are without, whatever the inputs.
    """
    plan = prepare(
        q,
        k_cache,
        v_cache,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        every_slot=cache_seqlens is None,
    )
    return plan.run(q, cache_seqlens)


@dataclass(frozen=True, eq=False)
class Plan:
    """A checked call, without its queries' numbers and its lengths: ``run`` launches it, as often as wanted."""

    choice: Choice
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    block_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sink: torch.Tensor | None

    @property
    def spec(self) -> DecodeSpec | None:
        return self.choice.spec

    def run(self, q: torch.Tensor, cache_seqlens: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) for queries of the shape and dtype that were planned for; see ``decode``."""
        made_for = self.choice
        if q.shape != made_for.q_shape or q.dtype != made_for.q_dtype or q.device != self.k_cache.device:
            raise ValueError(
                f"q: got {tuple(q.shape)} of {q.dtype} on {q.device}, takes what was prepared for: "
                f"{tuple(made_for.q_shape)} of {made_for.q_dtype} on {self.k_cache.device}"
            )
        if made_for.every_slot != (cache_seqlens is None):
            wanted = "None, as prepared for" if made_for.every_slot else "a torch.Tensor"
            raise TypeError(f"cache_seqlens: got {type(cache_seqlens).__name__}, takes {wanted}")
        if cache_seqlens is not None:
            check_int32("cache_seqlens", cache_seqlens, "q", q, (made_for.batch,))
            cache_seqlens = forward.dense_vector(cache_seqlens)
        packed = self.cu_seqlens_q is not None
        if packed:
            q = q.unsqueeze(0)
        out, lse = self.allocated(q)
        if self.spec is None:
            out.zero_()
            lse.fill_(-math.inf)
            if self.sink is not None:
                lse.copy_(self.sink[None, :, None].expand_as(lse))
        else:
            for launch in self.launches(q, cache_seqlens, out, lse):
                launch.run(made_for.arch)
        return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)

    def allocated(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) for q with a batch, not yet written."""
        batch, query_len, heads, _ = q.shape
        out = torch.empty((batch, query_len, heads, self.v_cache.shape[-1]), dtype=q.dtype, device=q.device)
        return out, torch.empty((batch, heads, query_len), dtype=torch.float32, device=q.device)

    def launches(
        self, q: torch.Tensor, cache_seqlens: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
    ) -> list[Launch]:
        """What ``run`` launches, in order, on tensors with a batch: it writes out and lse. Allocates the workspace."""
        choice = self.choice
        spec, splits, scale = choice.spec, choice.splits, choice.softmax_scale
        split = splits > 1
        batch, query_len, heads, value_dim = out.shape
        parts = (splits, batch * query_len * heads) if split else (1, 1)
        partial_out = torch.empty((*parts, value_dim), dtype=torch.float32, device=q.device)
        partial_state = torch.empty((*parts, 2), dtype=torch.float32, device=q.device)
        decoding = Launch(
            spec,
            spec.grid(choice.batch, query_len, heads, self.k_cache.shape[2], splits),
            -(-choice.capacity // (spec.tile_n * spec.warps_n * splits)),
            (
                forward.aligned(q),
                self.k_cache,
                self.v_cache,
                out,
                lse,
                partial_out,
                partial_state,
                cache_seqlens,
                self.cu_seqlens_q,
                self.block_table,
                self.cache_batch_idx,
                self.cache_leftpad,
                self.k_scale,
                self.v_scale,
                self.alibi_slopes,
                self.sink,
                scale if spec.logits else scale * checks.LOG2_E,
                choice.softcap if spec.softcap else None,
                choice.left,
                choice.right,
                splits,
            ),
        )
        if not split:
            return [decoding]
        combine = spec.combining(splits)
        scale = 1.0 if spec.logits else max(abs(scale), SMALLEST_SCALE)
        values = (partial_out, partial_state, out, lse, self.sink, scale * checks.LOG2_E)
        return [decoding, Launch(combine, combine.grid(batch * query_len * heads), 0, values)]


def prepare(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    every_slot: bool = False,
) -> Plan:
    """Check the arguments of ``decode`` and choose its kernels; launches nothing, writes no tensor, and reads none but
    cu_seqlens_q on the CPU.

    every_slot: the plan is for lengths of None.
    """
    tensors = (q, k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad)
    factors = (k_descale, v_descale, alibi_slopes, sink)
    options = (softmax_scale, window, softcap, num_splits, max_seqlen_q, every_slot)
    key = metadata((*tensors, cu_seqlens_q, *factors), options)
    choice = None if key is None else _CHOICES.get(key)
    if choice is None:
        choice = decide(*tensors, cu_seqlens_q, *factors, *options)
        if key is not None:
            _CHOICES[key] = choice
    if cu_seqlens_q is not None and cu_seqlens_q.device.type == "cpu":  # its numbers are no part of the key
        checks.refuse_decreasing("cu_seqlens_q", cu_seqlens_q)
    heads = Heads(choice.batch, q.shape[-2])
    scales = [
        None
        if given is None
        else descale.normalise(name, given, cache, batch=heads.batch, paged=block_table is not None)
        for name, given, cache in (("k_descale", k_descale, k_cache), ("v_descale", v_descale, v_cache))
    ]
    return Plan(
        choice,
        rows_of(bytes_of(k_cache)),
        rows_of(bytes_of(v_cache)),
        None if cu_seqlens_q is None else forward.dense_vector(cu_seqlens_q),
        block_table,
        None if cache_batch_idx is None else forward.dense_vector(cache_batch_idx),
        None if cache_leftpad is None else forward.dense_vector(cache_leftpad),
        *(None if scale is None else scale.factors for scale in scales),
        None if alibi_slopes is None else checks.slopes_of(alibi_slopes, heads, q),
        None if sink is None else checks.sink_of(sink, heads, q),
    )
