"""Continuous batching over a paged KV cache: requests come and go, one attention layer serves them all.

    python examples/continuous_batching.py             # in the emulator, or on the GPU if there is one

Requests share a system prompt, whose pages they fork. Each step prefills what was admitted, then gives every running
request one more token in a single batch. Where pages run out, the youngest request gives its own back and starts again
later. In the place of a model stand random numbers that depend on the request and the position alone, so that at the
end every token's attention can be compared with the reference, whatever happened on the way.
"""

import argparse
from dataclasses import dataclass, field

import torch

from fa2_cute import reference
from fa2_cute.reference_cache import rotated
from fa2_cute.serving import OutOfPages, PagedKVCache


@dataclass
class Request:
    """``prompt`` tokens after the system prompt, then ``answer`` more, one a step; it arrives at step ``arrival``."""

    number: int
    arrival: int
    prompt: int
    answer: int


@dataclass
class Layer:
    """One attention layer: its shape, and the queries, keys and values that a model would compute."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    system_prompt: int = 6
    positions: int = 256
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"

    def __post_init__(self):
        frequencies = 10_000.0 ** -(torch.arange(self.head_dim // 2) / (self.head_dim // 2))
        angles = torch.arange(self.positions)[:, None] * frequencies
        self.cos, self.sin = angles.cos().to(self.device), angles.sin().to(self.device)

    def tokens(self, number: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of positions [start, end) of a request, (1, end - start, heads or kv_heads, head_dim)."""
        rows = []
        for position in range(start, end):
            seed = position if position < self.system_prompt else 1000 * (number + 1) + position
            shape = (1, 1, self.heads + 2 * self.kv_heads, self.head_dim)
            rows.append(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        packed = torch.cat(rows, dim=1).to(self.dtype).to(self.device)
        return packed.split([self.heads, self.kv_heads, self.kv_heads], dim=2)

    def exact(self, number: int, length: int) -> torch.Tensor:
        """Causal attention of all tokens of a request in float64, (1, length, heads, head_dim), without any cache."""
        q, k, v = self.tokens(number, 0, length)
        turn = (self.cos, self.sin, torch.arange(length, device=self.device))
        q, k = (rotated(x[0], *turn, interleaved=False)[None].to(self.dtype) for x in (q, k))
        return reference.attention(q, k, v, causal=True)[0]


@dataclass
class Server:
    """The scheduler: who waits, who runs, and what came out for each token of each request."""

    layer: Layer
    cache: PagedKVCache
    waiting: list[Request]
    chunk: int = 8  # prompt tokens a prefill call
    step: int = 0
    preempted: int = 0
    most_pages: int = 0
    running: dict[int, Request] = field(default_factory=dict)  # by sequence, the oldest first
    outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by (request, position)
    system: int | None = None

    def run(self):
        """Serve until nobody waits or runs."""
        self.system = self.cache.allocate()
        self._feed(self.system, -1, self.layer.system_prompt)
        while self.waiting or self.running:
            self._admit()
            self._decode()
            self.step += 1
        self.cache.free(self.system)

    def _admit(self):
        """Prefill those who have arrived, as long as pages last."""
        while self.waiting and self.waiting[0].arrival <= self.step:
            request = self.waiting[0]
            sequence = self.cache.fork(self.system)
            try:
                self.cache.reserve([sequence], request.prompt)
            except OutOfPages as error:
                self.cache.free(sequence)
                if not self.running:
                    raise ValueError(f"request {request.number}: its prompt does not fit: {error}") from None
                return
            self.waiting.pop(0)
            self._feed(sequence, request.number, self.layer.system_prompt + request.prompt)
            self.running[sequence] = request

    def _feed(self, sequence: int, number: int, end: int):
        """Append and attend to a prompt in chunks."""
        while (start := self.cache.length(sequence)) < end:
            stop = min(start + self.chunk, end)
            self._attend([sequence], [number], start, stop)

    def _decode(self):
        """One token more for every running request; the finished leave."""
        while self.cache.pages_needed(list(self.running), 1) > self.cache.free_pages:
            if len(self.running) == 1:
                raise ValueError("the last running request does not fit: the cache is too small for it")
            youngest = next(reversed(self.running))
            self.cache.free(youngest)
            self.waiting.insert(0, self.running.pop(youngest))
            self.preempted += 1
        if not self.running:
            return
        sequences = list(self.running)
        self._attend(sequences, [self.running[s].number for s in sequences])
        for sequence in sequences:
            request = self.running[sequence]
            if self.cache.length(sequence) == self.layer.system_prompt + request.prompt + request.answer:
                self.cache.free(sequence)
                del self.running[sequence]

    def _attend(self, sequences: list[int], numbers: list[int], start: int | None = None, stop: int | None = None):
        """Positions [start, stop) of one sequence, or the next position of each of several."""
        spans = [(start, stop)] if start is not None else [(n, n + 1) for n in map(self.cache.length, sequences)]
        tokens = [self.layer.tokens(number, *span) for number, span in zip(numbers, spans, strict=True)]
        q, k, v = (torch.cat(parts) for parts in zip(*tokens, strict=True))
        rotary = {"rotary_cos": self.layer.cos, "rotary_sin": self.layer.sin, "rotary_interleaved": False}
        out = self.cache.attend(sequences, q, k, v, causal=True, **rotary)
        for row, number, span in zip(out, numbers, spans, strict=True):
            for i, position in enumerate(range(*span)):
                self.outputs[number, position] = row[i]
        self.most_pages = max(self.most_pages, self.cache.pages - self.cache.free_pages)


def random_requests(count: int, seed: int) -> list[Request]:
    """``count`` requests in order of arrival."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(low, high, (count,), generator=generator).tolist() for low, high in ((0, 3), (1, 14), (1, 9))]
    arrivals = torch.tensor(draw[0]).cumsum(0).tolist()
    return [Request(i, *numbers) for i, numbers in enumerate(zip(arrivals, *draw[1:], strict=True))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--pages", type=int, default=14)
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = Layer(device=device)
    shape = (arguments.pages, arguments.page_size, layer.kv_heads, layer.head_dim)
    cache = PagedKVCache(*shape, dtype=layer.dtype, device=device)
    requests = random_requests(arguments.requests, arguments.seed)
    server = Server(layer, cache, list(requests))
    server.run()
    print(f"{len(requests)} requests, {len(server.outputs)} tokens in {server.step} steps on {device}")
    print(f"most pages in use: {server.most_pages} of {cache.pages}; preempted: {server.preempted} times")
    for request in requests:
        length = layer.system_prompt + request.prompt + request.answer
        expected = layer.exact(request.number, length)[0, layer.system_prompt :]
        got = torch.stack([server.outputs[request.number, p] for p in range(layer.system_prompt, length)])
        error = reference.error(got, expected)
        print(f"request {request.number}: {len(got):3} tokens, largest error {error.max:.2e}, RMS {error.rms:.2e}")


if __name__ == "__main__":
    main()
