"""Times of the append kernel and of whole calls over a KV cache on this GPU.

    python bench/kvcache.py

Device times are medians over replays of a CUDA graph of ten calls on the same tensors, which the L2 keeps where they
fit; host times are those of calls that are not waited for.
"""

import itertools
import statistics
import time

import torch

from fa2_cute.append import append
from fa2_cute.descale import UNIT, Descale
from fa2_cute.kvcache import flash_attn_with_kvcache

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
CALLS, REPLAYS = 10, 30
# (batch, new tokens, paged, FP8, rotary)
APPENDS = (
    (1, 1, False, False, False),
    (1, 1, False, False, True),
    (16, 1, True, False, True),
    (64, 1, True, False, True),
    (64, 1, True, True, True),
    (1, 8192, False, False, False),
    (1, 8192, True, False, True),
    (1, 8192, True, True, True),
)
# (batch, tokens, paged, FP8)
DECODES = (
    (1, 1024, False, False),
    (1, 8192, False, False),
    (1, 8192, True, False),
    (16, 8192, True, False),
    (16, 8192, True, True),
)


def device_us(call) -> float:
    """Microseconds of device time."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def host_us(call, calls: int = 300) -> float:
    """Microseconds of the calling thread."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def normal(*shape, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def cache(batch: int, length: int, paged: bool, fp8: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Caches for keys and values, and a block table whose pages are in no order."""
    rows = (batch * length // PAGE, PAGE) if paged else (batch, length)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    table = torch.randperm(rows[0], device="cuda").to(torch.int32).view(batch, -1) if paged else None
    return [normal(*rows, KV_HEADS, DIM, dtype=dtype) for _ in range(2)], table


def time_append(batch: int, new: int, paged: bool, fp8: bool, rotary: bool):
    length = max(2 * new, 1024)
    caches, table = cache(batch, length, paged, fp8)
    k, v = (normal(batch, new, KV_HEADS, DIM) for _ in range(2))
    q = normal(batch, new, HEADS, DIM)
    angles = torch.rand(length, DIM // 2, device="cuda")
    turn = {"q": q, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    seqlens = torch.full((batch,), 500, dtype=torch.int32, device="cuda")
    factors = Descale("sequence", torch.ones(batch, KV_HEADS, device="cuda")) if fp8 else UNIT
    where = {"capacity": length, "block_table": table, "k_descale": factors, "v_descale": factors}

    def call():
        append(k, v, *caches, seqlens, **where, **(turn if rotary else {}))

    us = device_us(call)
    moved = k.nbytes + v.nbytes + 2 * k.numel() * caches[0].element_size() + (2 * q.nbytes if rotary else 0)
    kind = " ".join(("pages" if paged else "rows ", "fp8 " if fp8 else "bf16", "rotary" if rotary else "      "))
    print(f"  {batch:3} x {new:5} {kind}: {us:7.1f} us, {moved / us / 1e3:5.0f} GB/s; host {host_us(call):6.1f} us")


def time_decode(batch: int, length: int, paged: bool, fp8: bool):
    caches, table = cache(batch, length, paged, fp8)
    q, k, v = (normal(batch, 1, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    angles = torch.rand(length, DIM // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    seqlens = torch.full((batch,), length - 2, dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": seqlens, "block_table": table, "causal": True}

    def attend():
        flash_attn_with_kvcache(q, *caches, **options)

    def whole():
        flash_attn_with_kvcache(q, *caches, k, v, cos, sin, **options)

    times = [time(call) for call, time in itertools.product((attend, whole), (device_us, host_us))]
    kind = f"{'pages' if paged else 'rows '} {'fp8 ' if fp8 else 'bf16'}"
    print(
        f"  {batch:3} x {length} {kind}: attention {times[0]:7.1f} us (host {times[1]:6.1f}), "
        f"with append and rotation {times[2]:7.1f} us (host {times[3]:6.1f})"
    )


def main():
    heads = f"{HEADS}/{KV_HEADS} heads of {DIM}, bfloat16, pages of {PAGE}"
    print(f"append, {heads}: sequences x new tokens")
    for case in APPENDS:
        time_append(*case)
    print(f"flash_attn_with_kvcache, one query a sequence, {heads}: sequences x tokens")
    for case in DECODES:
        time_decode(*case)


if __name__ == "__main__":
    main()
