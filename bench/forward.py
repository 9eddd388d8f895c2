"""Times the forward pass beside torch's attention on a CUDA device, in one run.

    python bench/forward.py                                  # the default shapes
    python bench/forward.py --shape 2x8192x16x128 --kv-heads 4 --tile 128x64x8x2q

Inputs are fresh random numbers, rotated so that one call does not find the last one's in the L2; calls of all
contestants alternate; each figure is a median with the spread of the middle half. A result is checked against torch's
before it is timed.
"""

import itertools
import statistics
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2_cute import arch, flash_attn_func, forward, jit

L2_BYTES = 128 * 2**20  # more than any L2 of today's devices
CALLS = 4  # between two events, so that the host's part of a launch hides behind the device's
DEFAULT_SHAPES = ("32x512x16x128", "16x1024x16x128", "8x2048x16x128", "2x8192x16x128", "8x2048x32x64", "2x8192x32x64")


@dataclass(frozen=True)
class Shape:
    """batch x length x heads x head_dim, query and key lengths equal."""

    batch: int
    length: int
    heads: int
    head_dim: int
    kv_heads: int

    def operations(self, causal: bool) -> int:
        """Floating-point operations of both products; half of them under a causal mask."""
        return 4 * self.batch * self.heads * self.length**2 * self.head_dim // (2 if causal else 1)

    def inputs(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
        """Sets of (q, k, v), enough to pass the L2 between two uses of one."""
        sets = []
        while not sets or sum(x.nbytes for x in itertools.chain(*sets)) < 2 * L2_BYTES:
            heads = (self.heads, self.kv_heads, self.kv_heads)
            sets.append(
                tuple(torch.randn(self.batch, self.length, h, self.head_dim, device="cuda", dtype=dtype) for h in heads)
            )
        return sets


def torch_attention(q, k, v, causal: bool):
    """torch's flash backend, FlashAttention-2 itself; (batch, length, heads, head_dim) in and out."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
        )
    return out.transpose(1, 2)


def with_tile(tile: tuple[int, ...]):
    """Our kernel with a tile (tile_m, tile_n, warps, stages, query_in_registers) that the table would not choose."""
    architecture = arch.by_capability(*torch.cuda.get_device_capability())

    def call(q, k, v, causal: bool):
        out, _, prepared = forward.prepare(q, k, v, window=(None, 0 if causal else None))
        keys = ("tile_m", "tile_n", "warps", "stages", "query_in_registers")
        spec = replace(prepared.spec(architecture), **dict(zip(keys, tile, strict=True)))
        forward.launch(jit.compiled(spec, architecture), prepared)
        return out

    return call


def check(contestants, inputs, causal: bool):
    """Each contestant within rounding of the first, on the first set of inputs."""
    expected = None
    for name, call in contestants.items():
        out = call(*inputs[0], causal).float()
        expected = out if expected is None else expected
        error = (out - expected).abs().max().item()
        unit = torch.finfo(inputs[0][0].dtype).eps * expected.abs().max().item()
        if not error <= 4 * unit:
            raise SystemExit(f"{name}: differs from {next(iter(contestants))} by {error}, refusing to time it")


def measure(contestants, inputs, causal: bool, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contestant's calls, interleaved."""
    times = {name: [] for name in contestants}
    turn = itertools.cycle(inputs)
    for round_ in range(rounds + 3):
        for name, call in contestants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                call(*next(turn), causal)
            end.record()
            end.synchronize()
            if round_ >= 3:  # the first ones warm up
                times[name].append(start.elapsed_time(end) / CALLS)
    return times


SHAPES = typer.Option(DEFAULT_SHAPES, "--shape", help="batch x length x heads x head_dim, repeatable")
TILES = typer.Option(
    (), "--tile", help="also time tile_m x tile_n x warps x stages, a q at its end for Q in registers; repeatable"
)


def main(
    shape: list[str] = SHAPES,
    tile: list[str] = TILES,
    kv_heads: int = typer.Option(0, help="KV heads, by default as many as query heads"),
    dtype: str = typer.Option("bfloat16", help="bfloat16 or float16"),
    rounds: int = typer.Option(20, help="timings of each"),
):
    """TFLOP/s of fa2_cute and of torch's flash attention, and their ratio."""
    if not torch.cuda.is_available():
        raise SystemExit("bench: needs a CUDA device")
    torch_dtype = getattr(torch, dtype)
    contestants = {
        "torch flash": torch_attention,
        "fa2_cute": lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal),
    }
    for text in tile:
        sides = tuple(map(int, text.removesuffix("q").split("x")))
        contestants[text] = with_tile((*sides, text.endswith("q")))
    table = Table("shape", "mask", *contestants, "ratio", title=f"{torch.cuda.get_device_name()}, {dtype}, TFLOP/s")
    with torch.inference_mode():
        for text in shape:
            batch, length, heads, head_dim = map(int, text.split("x"))
            of = Shape(batch, length, heads, head_dim, kv_heads or heads)
            inputs = of.inputs(torch_dtype)
            for causal in (False, True):
                check(contestants, inputs, causal)
                cells, medians = [], []
                for times in measure(contestants, inputs, causal, rounds).values():
                    low, median, high = statistics.quantiles(times, n=4)
                    rate = of.operations(causal) / 1e9
                    medians.append(median)
                    cells.append(f"{rate / median:.0f} ({rate / high:.0f} to {rate / low:.0f})")
                table.add_row(text, "causal" if causal else "full", *cells, f"{medians[0] / medians[1]:.2f}")
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
