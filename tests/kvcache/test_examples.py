"""The examples: every token that was served is attention of its request, and FP8 costs what e4m3 can be blamed for."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from fa2_cute import reference
from fa2_cute.fuzz.bounds import bounds
from fa2_cute.fuzz.cache_judging import COMBINING
from fa2_cute.fuzz.judging import require_within
from fa2_cute.reference_cache import rotated
from fa2_cute.serving import PagedKVCache

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("pages", "page_size", "seed"), [(14, 4, 0), (40, 1, 1), (8, 7, 2)])
def test_every_served_token_is_attention_of_its_request(pages, page_size, seed):
    example = load("continuous_batching")
    layer = example.Layer()
    cache = PagedKVCache(pages, page_size, layer.kv_heads, layer.head_dim, dtype=layer.dtype)
    cache.k.fill_(torch.nan)  # nobody's slots must not matter
    cache.v.fill_(torch.nan)
    requests = example.random_requests(5, seed)
    server = example.Server(layer, cache, list(requests))
    server.run()
    assert cache.free_pages == pages
    assert server.most_pages > pages // 2
    for request in requests:
        length = layer.system_prompt + request.prompt + request.answer
        q, k, v = layer.tokens(request.number, 0, length)
        turn = (layer.cos, layer.sin, torch.arange(length))
        q, k = (rotated(x[0], *turn, interleaved=False)[None].to(layer.dtype) for x in (q, k))
        expected, _ = reference.attention(q, k, v, causal=True)
        out_bound, _ = bounds(q, k, v, causal=True)
        out_bound = out_bound + COMBINING * v.abs().max().item()
        for position in range(length):
            owner = -1 if position < layer.system_prompt else request.number
            got = server.outputs[owner, position]
            what = f"position {position} of request {request.number}"
            require_within(got, expected[0, position], out_bound[0, position], what)


def test_a_small_cache_preempts_and_a_smaller_one_says_so():
    example = load("continuous_batching")
    layer = example.Layer()

    def serve(pages):
        cache = PagedKVCache(pages, 4, layer.kv_heads, layer.head_dim, dtype=layer.dtype)
        server = example.Server(layer, cache, example.random_requests(6, 0))
        server.run()
        return server

    assert serve(14).preempted > 0
    with pytest.raises(ValueError, match="does not fit"):
        serve(4)


def test_fp8_costs_a_few_percent_and_the_prompt_nothing():
    example = load("fp8_cache")
    shape = example.Shape(prompt=130, answer=2)
    for outliers in (False, True):
        q, k, v = example.numbers(shape, outliers, "cpu")
        expected, _ = reference.attention(q, k, v, causal=True)
        out = example.generate(shape, q, k, v)
        # A rounding to e4m3 is uniform within 2^-4 of a number at most: an RMS of 3.6%, of values and of keys.
        assert example.relative(out[:, : shape.prompt], expected[:, : shape.prompt]) < 0.005
        assert 0.005 < example.relative(out[:, shape.prompt :], expected[:, shape.prompt :]) < 0.08
        assert 0.005 < example.relative(example.with_blocks(shape, q, k, v), expected[:, -1:]) < 0.08


@pytest.mark.parametrize(
    ("name", "arguments", "pattern"),
    [
        ("continuous_batching", ["--requests", "2"], r"2 requests, \d+ tokens in \d+ steps on (cpu|cuda)"),
        ("fp8_cache", ["--prompt", "20", "--answer", "1"], r"outliers +prefill 0\.\d+%, decode \d\.\d+%"),
    ],
)
def test_runs_as_a_command(name, arguments, pattern, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    load(name).main()
    output = capsys.readouterr().out
    assert re.search(pattern, output), output


def test_the_code_in_the_documentation_runs():
    text = (EXAMPLES.parent / "docs" / "serving.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 3
    for program in programs:
        exec(compile(program, "docs/serving.md", "exec"), {})
