"""First calls in a new process, timed: ``python -m fa2_cute.bench.first_call '{"library": "fa2_cute", ...}'``.

Prints one line of JSON: milliseconds of importing the library after torch, and of the first call of each problem until
it returns, one problem after the other: the first of them also bears what a process loads once.
"""

import json
import sys
import time

PROBLEMS = {  # (batch, query_len, key_len, heads, kv_heads, head_dim, causal)
    "head_dim 128, causal": (1, 256, 256, 4, 4, 128, True),
    "head_dim 128, full": (1, 256, 256, 4, 4, 128, False),
    "head_dim 64, causal": (1, 256, 256, 4, 4, 64, True),
    "one query on 4096 keys": (1, 1, 4096, 8, 2, 128, False),
}
IMPORT = "import"


def main(asked: dict) -> dict[str, float]:
    """asked: library ("fa2_cute" or "FA4"), problems (of ``PROBLEMS``), device."""
    import torch

    inputs = {problem: _tensors(problem, asked["device"]) for problem in asked["problems"]}
    cuda = torch.device(asked["device"]).type == "cuda"
    finish = torch.cuda.synchronize if cuda else lambda: None
    finish()
    times = {}
    start = time.perf_counter()
    if asked["library"] == "fa2_cute":
        from fa2_cute import flash_attn_func
    else:
        from flash_attn.cute.interface import flash_attn_func
    times[IMPORT] = time.perf_counter() - start
    with torch.inference_mode():
        for problem, tensors in inputs.items():
            start = time.perf_counter()
            flash_attn_func(*tensors, causal=PROBLEMS[problem][-1])
            times[problem] = time.perf_counter() - start
            finish()
    return {name: seconds * 1e3 for name, seconds in times.items()}


def _tensors(problem: str, device: str) -> list:
    import torch

    batch, query_len, key_len, heads, kv_heads, head_dim, _ = PROBLEMS[problem]
    shapes = [(batch, query_len, heads, head_dim), *[(batch, key_len, kv_heads, head_dim)] * 2]
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
