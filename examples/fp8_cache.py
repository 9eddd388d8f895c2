"""Mixed precision: prefill in 16 bits, decode from an FP8 cache.

    python examples/fp8_cache.py              # in the emulator, or on the GPU if there is one

The prompt attends to its own 16-bit keys and values, so nothing is lost while the answer's first token is found, and
the prompt costs what it costs without a cache. What is kept is e4m3: half the memory, and half of what each decoded
token reads. One factor a KV head comes from the prompt's largest magnitude with some headroom, since later tokens must
fit, too; what does not saturates. Alternatively ``quantize_kv`` gives one factor for each block of 128 tokens of a
finished prompt, which outliers in one place then do not spoil for the others.

It prints what FP8 costs in accuracy (RMS of the error over RMS of the output, float64 attention of the unquantised
numbers being exact), on normal numbers and on keys and values with a few channels that are 20 times as large.
"""

import argparse
from dataclasses import dataclass

import torch

from fa2_cute import append_to_kvcache, flash_attn_func, flash_attn_with_kvcache, quantize_kv, reference

FP8 = torch.float8_e4m3fn
HEADROOM = 2.0  # times the prompt's largest magnitude; costs one of the 15 binary orders of magnitude that e4m3 has
OUTLIER, EVERY = 20.0, 16  # in one channel of so many


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    prompt: int = 150
    answer: int = 4


def factor(x: torch.Tensor) -> torch.Tensor:
    """(kv_heads,) float32 for a prompt's keys or values (batch, length, kv_heads, dim)."""
    return HEADROOM * x.abs().amax(dim=(0, 1, 3)).float() / torch.finfo(FP8).max


def numbers(shape: Shape, outliers: bool, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of prompt and answer, (1, prompt + answer, heads or kv_heads, head_dim) bfloat16."""
    generator = torch.Generator().manual_seed(0)
    length = shape.prompt + shape.answer
    rows = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn((1, length, n, shape.head_dim), generator=generator) for n in rows)
    if outliers:
        k[..., ::EVERY] *= OUTLIER
        v[..., ::EVERY] *= OUTLIER
        q = q / OUTLIER**0.5  # so that the softmax still has more than one key to choose from
    return tuple(x.bfloat16().to(device) for x in (q, k, v))


def generate(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Outputs for prompt and answer, (1, prompt + answer, heads, head_dim): the policy."""
    prompt = slice(0, shape.prompt)
    out = [flash_attn_func(q[:, prompt], k[:, prompt], v[:, prompt], causal=True)]

    cache_shape = (1, shape.prompt + shape.answer, shape.kv_heads, shape.head_dim)
    k_cache, v_cache = (torch.empty(cache_shape, dtype=FP8, device=q.device) for _ in range(2))
    descales = {"k_descale": factor(k[:, prompt]), "v_descale": factor(v[:, prompt])}
    append_to_kvcache(k_cache, v_cache, k[:, prompt], v[:, prompt], 0, **descales)
    seqlens = torch.full((1,), shape.prompt, dtype=torch.int32, device=q.device)
    for i in range(shape.prompt, shape.prompt + shape.answer):
        q_i, k_i, v_i = (x[:, i : i + 1] for x in (q, k, v))
        out.append(
            flash_attn_with_kvcache(q_i, k_cache, v_cache, k_i, v_i, cache_seqlens=seqlens, causal=True, **descales)
        )
        seqlens += 1
    return torch.cat(out, dim=1)


def with_blocks(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last query over everything, quantised with a factor for each block of 128 tokens: (1, 1, heads, head_dim)."""
    (k_cache, k_descale), (v_cache, v_descale) = quantize_kv(k), quantize_kv(v)
    return flash_attn_with_kvcache(q[:, -1:], k_cache, v_cache, k_descale=k_descale, v_descale=v_descale)


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the error over RMS of what is expected."""
    return reference.error(out, expected).rms / expected.square().mean().sqrt().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=Shape.prompt)
    parser.add_argument("--answer", type=int, default=Shape.answer)
    arguments = parser.parse_args()
    shape = Shape(prompt=arguments.prompt, answer=arguments.answer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"RMS error relative to the output: {shape.prompt} tokens in bfloat16, then {shape.answer} from e4m3")
    for name, outliers in (("normal", False), ("outliers", True)):
        q, k, v = numbers(shape, outliers, device)
        expected, _ = reference.attention(q, k, v, causal=True)
        out = generate(shape, q, k, v)
        prompt, answer = (slice(0, shape.prompt), slice(shape.prompt, None))
        print(
            f"{name:9} prefill {relative(out[:, prompt], expected[:, prompt]):.2%}, "
            f"decode {relative(out[:, answer], expected[:, answer]):.2%}, "
            f"decode with factors of 128 tokens {relative(with_blocks(shape, q, k, v), expected[:, -1:]):.2%}"
        )


if __name__ == "__main__":
    main()
