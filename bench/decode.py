"""Times decoding over a KV cache beside torch's attention on a CUDA device, in one run.

    python bench/decode.py                                            # one query, 32 query heads on 8 KV heads, 128
    python bench/decode.py --cell 16x8192 --heads 64 --kv-heads 8 --head-dim 64
    python bench/decode.py --cell 1x8192 --splits 8 --splits 16       # numbers of splits beside the chosen one

A figure is the median of replays of a CUDA graph that calls once for each of several sets of inputs, together larger
than the L2: launches and the combination of splits included, the host's time not. A result is checked against torch's
before it is timed.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2_cute.decode import prepare
from fa2_cute.quantize import quantize_kv

L2_BYTES = 128 * 2**20  # more than any L2 of today's devices
MOST_SETS = 64
DEFAULT_CELLS = tuple(f"{batch}x{length}" for batch in (1, 4, 16, 64) for length in (1024, 8192, 32768))

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """batch sequences of length keys, one query each."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def cache_bytes(self) -> int:
        """K and V in 16 bits."""
        return 4 * self.batch * self.length * self.kv_heads * self.head_dim

    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Sets of (q, k_cache, v_cache), enough to pass the L2 between two uses of one."""

        def normal(length: int, heads: int) -> torch.Tensor:
            shape = (self.batch, length, heads, self.head_dim)
            return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()

        sets = min(MOST_SETS, -(-2 * L2_BYTES // self.cache_bytes))
        return [
            (normal(1, self.heads), normal(self.length, self.kv_heads), normal(self.length, self.kv_heads))
            for _ in range(sets)
        ]


def ours(q, k_cache, v_cache, **options) -> Call:
    """A call of fa2_cute over all of a cache."""
    lengths = torch.full((q.shape[0],), k_cache.shape[1], dtype=torch.int32, device="cuda")
    plan = prepare(q, k_cache, v_cache, **options)
    return lambda: plan.run(q, lengths)[0]


def paged(q, k_cache, v_cache, page_size: int) -> Call:
    """The same over pages in random order."""
    batch, length = k_cache.shape[:2]
    pools = (x.view(-1, page_size, *x.shape[2:]) for x in (k_cache, v_cache))
    table = torch.randperm(batch * length // page_size, device="cuda").to(torch.int32).view(batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    plan = prepare(q, *pools, block_table=table)
    return lambda: plan.run(q, lengths)[0]


def fp8(q, k_cache, v_cache) -> Call:
    """The same over the cache in FP8, a scale for each 128 keys."""
    (k, k_descale), (v, v_descale) = quantize_kv(k_cache), quantize_kv(v_cache)
    return ours(q, k, v, k_descale=k_descale, v_descale=v_descale)


def torch_attention(q, k_cache, v_cache, backend: SDPBackend) -> Call:
    """torch's attention with one of its backends."""

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k_cache, v_cache)), enable_gqa=True)
        return out.transpose(1, 2)

    return call


def microseconds(calls: list[Call], rounds: int) -> float:
    """Median time of one of ``calls``, captured together and replayed."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000.0 / len(calls))
    return statistics.median(times[2:])  # the first ones warm up


def measure(
    name: str, make: Callable[..., Call], sets: list, expected: torch.Tensor, slack: float, rounds: int
) -> float | None:
    """Microseconds of a contestant, or None if it does not take such a call; ValueError where its result is wrong."""
    calls = [make(*inputs) for inputs in sets]
    try:
        out = calls[0]().float()
    except RuntimeError:  # what torch raises where a backend has no kernel
        return None
    error = (out - expected).abs().max() / expected.abs().max()
    if not error <= slack:
        raise ValueError(f"{name}: differs from torch by {error:.3f} of the largest output, takes at most {slack}")
    return microseconds(calls, rounds)


CELLS = typer.Option(DEFAULT_CELLS, "--cell", help="batch x keys, repeatable")
SPLITS = typer.Option((), "--splits", help="also time this number of splits, repeatable")
PAGES = typer.Option((64, 16, 1), "--page", help="page sizes to time, repeatable")


def main(
    cell: list[str] = CELLS,
    splits: list[int] = SPLITS,
    page: list[int] = PAGES,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    rounds: int = typer.Option(11, help="replays of each"),
):
    """Microseconds of fa2_cute (bfloat16, by pages, FP8) and of torch's attention; GB/s of K and V."""
    if not torch.cuda.is_available():
        raise SystemExit("bench: needs a CUDA device")
    contestants = {
        "fa2_cute": (ours, 0.02),
        **{f"{n} splits": (lambda *x, n=n: ours(*x, num_splits=n), 0.02) for n in splits},
        **{f"page {n}": (lambda *x, n=n: paged(*x, n), 0.02) for n in page},
        "fp8": (fp8, 0.3),
        "torch flash": (lambda *x: torch_attention(*x, SDPBackend.FLASH_ATTENTION), 0.02),
        "torch cuDNN": (lambda *x: torch_attention(*x, SDPBackend.CUDNN_ATTENTION), 0.02),
    }
    title = f"{torch.cuda.get_device_name()}, {heads}/{kv_heads} heads of {head_dim}, bfloat16, one query, microseconds"
    table = Table("batch x keys", "splits", "GB/s", *contestants, title=title)
    with torch.inference_mode():
        for text in cell:
            batch, length = map(int, text.split("x"))
            shape = Shape(batch, length, heads, kv_heads, head_dim)
            sets = shape.inputs()
            # Eight sequences at a time: torch's plain attention has intermediate results.
            expected = torch.cat(
                [
                    torch_attention(*(x[i : i + 8] for x in sets[0]), SDPBackend.MATH)().float()
                    for i in range(0, batch, 8)
                ]
            )
            times = {
                name: measure(name, make, sets, expected, slack, rounds) for name, (make, slack) in contestants.items()
            }
            chosen = prepare(*sets[0]).choice.splits
            rate = shape.cache_bytes / times["fa2_cute"] / 1000.0
            cells = ("-" if time is None else f"{time:.1f}" for time in times.values())
            table.add_row(text, f"{chosen}", f"{rate:.0f}", *cells)
            del sets, expected
            torch.cuda.empty_cache()
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
