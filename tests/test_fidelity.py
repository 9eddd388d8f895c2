"""The emulator against a GPU: whole calls bit for bit, and which instructions of the sm_120 kernels sm_90 lacks."""

from pathlib import Path

import pytest
import torch

from fa2_cute import arch, emulation, forward, jit, tiling
from fa2_cute.emulator import load

# Instructions that sm_120a kernels may have and sm_90 does not (PTX ISA, "Target ISA Notes" of each), and the test that
# checks the emulator's against an independent computation.
ONLY_SM_120 = {"mul.f32x2": "test_floating.py::test_packed_f32x2"}
INTEGER = ("pred", "b32", "b64", "s32", "s64", "u32", "u64")  # differ because tiles do; sm_90 has them all

CALLS = [  # batch, query length, key length, heads, KV heads, head_dim, causal, dtype
    (1, 256, 256, 8, 2, 128, True, torch.bfloat16),
    (1, 200, 333, 4, 1, 64, False, torch.bfloat16),
    (1, 256, 256, 4, 4, 128, True, torch.float16),
    (2, 130, 257, 4, 2, 64, True, torch.float16),
]
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of the last place, at magnitude 1


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["ieee", "sm_90"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_gpu_and_the_emulator_agree(call, numerics, capsys):
    """The same code on both: outputs equal but for a few, which are one unit off at the row's largest magnitude."""
    batch, query_len, key_len, heads, kv_heads, head_dim, causal, dtype = call
    capability = torch.cuda.get_device_capability()
    architecture = arch.by_capability(*capability)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, query_len, heads, head_dim, generator=generator).to(dtype)
    k, v = (torch.randn(batch, key_len, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
    options = {"window": (None, 0 if causal else None)}
    out, lse, call = forward.prepare(q, k, v, **options)
    spec = call.spec(architecture)
    kernel = jit.compiled(spec, architecture)
    emulation.run(kernel, call.grid(spec), call.values(), numerics=numerics)
    gpu_out, gpu_lse = (x.cpu() for x in forward.attend(q.cuda(), k.cuda(), v.cuda(), **options))

    equal = (out.view(torch.int16) == gpu_out.view(torch.int16)).float().mean().item()
    equal_lse = (lse == gpu_lse).float().mean().item()
    largest = gpu_out.float().abs().amax(-1, keepdim=True)
    unit = torch.exp2(torch.floor(torch.log2(largest))) * UNIT[dtype]
    worst = ((out.float() - gpu_out.float()).abs() / unit).max().item()
    with capsys.disabled():
        print(f"\n{architecture.name} {numerics} {call}:")
        print(f"  {equal:.4%} of outputs equal, the rest within {worst:.2f} units")
        print(f"  {equal_lse:.2%} of logsumexp equal, the rest within {(lse - gpu_lse).abs().max().item():.1e}")
    assert worst <= 1
    if numerics == "sm_90" and capability == (9, 0):
        assert equal >= 0.999
        assert equal_lse >= 0.99
    else:
        assert equal >= 0.99


def opcodes(name: str) -> set[str]:
    """Instructions, with their modifiers, of two of an architecture's kernels that have little in common."""
    architecture = arch.by_name(name)
    found = set()
    for spec in tiling.shipped(architecture):
        if (spec.dtype, spec.head_dim, spec.causal) in (("bfloat16", 128, True), ("float16", 64, False)):
            kernel = load(jit.compiled(spec, architecture).ptx).kernel()
            found |= {".".join((ins.op, *ins.mods)) for ins in kernel.body}
    return found


def test_what_sm_90_cannot_run_is_checked_on_its_own():
    """Running the kernels on sm_90 covers the instructions that both have; each other one has a test of its own."""
    extra = {op for op in opcodes("sm_120") - opcodes("sm_90") if op.rsplit(".", 1)[-1] not in INTEGER}
    assert extra <= set(ONLY_SM_120)
    for op, test in ONLY_SM_120.items():
        file, name = test.split("::")
        source = (Path(__file__).parent / "emulator" / file).read_text()
        body = source.split(f"def {name}(", 1)[1].split("\ndef ", 1)[0]
        assert f"{op} " in body
