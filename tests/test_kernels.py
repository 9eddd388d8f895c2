"""Every kernel that sm_120 can be given: compiles, spills nothing, fits, keeps enough warps resident."""

import pytest

from fa2_cute import arch, jit, resources, splitting, tiling
from fa2_cute.explore import sass
from fa2_cute.spec import CAUSAL, FULL, Features

SM_120 = arch.by_name("sm_120")
SHIPPED = tiling.shipped(SM_120)
# One of each width, and every option at the widest rows that 32 keys a step allow and that a thread can hold.
EVERYTHING = Features(left=True, right=True, varlen=True, softcap=True, alibi=True, sink=True)
OTHERS = [
    tiling.choose("bfloat16", 96, 96, FULL, SM_120),
    tiling.choose("bfloat16", 64, 64, EVERYTHING, SM_120),
    tiling.choose("float16", 64, 64, Features(mask="float32", softcap=True, alibi=True), SM_120),
    tiling.choose("bfloat16", 192, 128, EVERYTHING, SM_120),
    tiling.choose("bfloat16", 192, 192, FULL, SM_120),
    tiling.choose("bfloat16", 256, 256, FULL, SM_120),
    tiling.choose("float16", 256, 256, CAUSAL, SM_120),
    tiling.choose("bfloat16", 256, 256, Features(left=True), SM_120),
    tiling.choose("bfloat16", 128, 128, EVERYTHING, SM_120),
    tiling.choose("float16", 128, 128, Features(mask="float32"), SM_120),
    tiling.choose("float16", 256, 256, EVERYTHING, SM_120),
    *(
        tiling.choose("bfloat16", head_dim, head_dim, features, SM_120)
        for head_dim in (64, 96, 128)
        for features in (Features(left=True), Features(left=True, right=True))
    ),
]
# Two on each of the four sub-partitions: the softmax of one runs under the other's tensor-core work.
LEAST_RESIDENT_WARPS = 8


def name(spec) -> str:
    return spec.title.replace(", ", "-").replace(" ", "_")


@pytest.mark.parametrize("spec", SHIPPED + OTHERS, ids=name)
def test_resources_on_sm_120(spec):
    kernel = jit.compiled(spec, SM_120)
    used = resources.usage(kernel)
    assert used.stack_bytes == 0
    assert used.local_bytes == 0
    assert used.registers <= 255
    assert used.shared_bytes <= 99 * 1024
    assert used.warps_per_sm >= LEAST_RESIDENT_WARPS


# As calls in splits choose them.
IN_SPLITS = [
    splitting.split_spec(tiling.choose(dtype, head_dim, head_dim, features, SM_120, few_blocks=True))
    for dtype in ("float16", "bfloat16")
    for head_dim in (64, 128, 256)
    for features in (FULL, CAUSAL)
]


@pytest.mark.parametrize("spec", IN_SPLITS, ids=name)
def test_splits_spill_nothing_in_the_loops_of_the_first_pass(spec):
    """In bfloat16 the last loop is the second pass; before the loops a few registers may be, once a block."""
    kernel = jit.compiled(spec, SM_120)
    loops = [loop.opcodes() for loop in sass.disassemble(kernel.cubin).loops()]
    first_pass = loops[:-1] if spec.reference == "first" else loops
    assert len(first_pass) >= 2
    assert not any(loop["LDL"] + loop["STL"] for loop in first_pass)
    assert resources.usage(kernel).warps_per_sm >= LEAST_RESIDENT_WARPS


@pytest.mark.parametrize("spec", SHIPPED, ids=name)
def test_code_is_for_sm_120a_and_uses_what_it_should(spec):
    ptx = jit.compiled(spec, SM_120).ptx
    element = {"float16": "f16", "bfloat16": "bf16"}[spec.dtype]
    assert ".target sm_120a" in ptx
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32" in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert ".local" not in ptx


def test_every_dtype_head_dim_and_mask_is_shipped():
    assert len(set(SHIPPED)) == len(SHIPPED)
    found = {(spec.dtype, spec.head_dim, spec.causal) for spec in SHIPPED}
    assert found == {(t, d, c) for t in ("float16", "bfloat16") for d in (64, 128) for c in (False, True)}


@pytest.mark.parametrize("name", sorted(arch.BY_NAME))
def test_what_is_shipped_fits(name):
    architecture = arch.by_name(name)
    assert all(spec.shared_bytes <= architecture.shared_block_bytes for spec in tiling.shipped(architecture))


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "sm_121"])
def test_the_same_source_compiles_for_other_architectures(name):
    architecture = arch.by_name(name)
    spec = next(s for s in tiling.shipped(architecture) if s.head_dim == 128 and s.causal)
    kernel = jit.compiled(spec, architecture)
    assert f".target {architecture.target}" in kernel.ptx
    assert resources.usage(kernel).blocks_per_sm >= 1


def test_compiled_kernels_are_kept():
    assert jit.compiled(SHIPPED[0], SM_120) is jit.compiled(SHIPPED[0], SM_120)


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [
        (128, 128, 0, 4),  # 65,536 registers / (128 * 128)
        (255, 256, 0, 1),
        (32, 512, 0, 3),  # 1,536 threads
        (64, 128, 49 * 1024, 2),  # 100 KiB / (49 + 1) KiB
        (64, 128, 50 * 1024, 1),
        (64, 128, 100 * 1024, 0),  # more than one block may have
    ],
)
def test_resident_blocks(registers, threads, shared_bytes, blocks):
    assert resources.resident_blocks(SM_120, registers, threads, shared_bytes) == blocks
