"""Single instructions on a GPU of compute capability 9.0 and in the emulator with its numerics: the same bits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_support import kernel_text, run
from single_instructions import REGISTERS, finite_operands, mma_code

from fa2_cute.emulator.models import SM_90

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="numerics 'sm_90' are those of compute capability 9.0",
    ),
]
FORMS = sorted(".".join(form) for form in SM_90.mma)
FUNCTIONS = [f"{name}.approx{ftz}.f32" for name in SM_90.functions for ftz in ("", ".ftz")]
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f32": torch.float32,
}
MANY = settings(max_examples=20, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def on_gpu(body: str, arrays: list[np.ndarray], grid: int, block: int) -> None:
    """``ptx_support.run`` by the CUDA driver: ``body`` on copies of ``arrays`` on the device, which are copied back."""
    text = kernel_text(body, len(arrays)).replace(".target sm_120a", ".target sm_90")
    tensors = [torch.from_numpy(a.view(np.int32)).cuda() for a in arrays]  # also makes torch's context current
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        status = getattr(driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned CUDA error {status}")

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text.encode()))
    call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"k"))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    parameters = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, parameters, None)
    torch.cuda.synchronize()
    call("cuModuleUnload", module)
    for array, tensor in zip(arrays, tensors, strict=True):
        array.view(np.int32)[...] = tensor.cpu().numpy()


def same_mma(form, a, b, c):
    counts = [*REGISTERS[form.split(".")[0]], c.shape[2]]
    code = mma_code(form, counts)
    theirs, ours = np.zeros_like(c), np.zeros_like(c)
    on_gpu(code, [a, b, c, theirs], len(a), 32)
    run(code, [a, b, c, ours], grid=len(a), numerics="sm_90")
    underflow = theirs == ours ^ np.uint32(1 << 31)  # the sign of a sum that is cut to zero is not part of the model
    assert ((theirs == ours) | (underflow & (theirs << np.uint32(1) == 0))).all()


@pytest.mark.parametrize("form", FORMS)
@MANY
@given(SEEDS)
def test_mma_of_normal_numbers(form, seed):
    """Whose exponents are far from both ends: operands and sums around 1."""
    shape, *types, _ = form.split(".")
    generator = torch.Generator().manual_seed(seed)
    words = []
    for kind, count in zip((*types, "f32"), REGISTERS[shape], strict=True):
        dtype = DTYPES[kind]
        numbers = torch.randn(64, 32, count * 4 // dtype.itemsize, generator=generator).to(dtype)
        words.append(numbers.view(torch.int32).numpy().view(np.uint32))
    same_mma(form, *words)


NOT_YET = pytest.mark.xfail(reason="differs on an H200 for some operands at the ends of bf16's exponents", strict=False)
MODELLED = [pytest.param(form, marks=NOT_YET) if ".bf16." in form else form for form in FORMS]


@pytest.mark.parametrize("form", MODELLED)
@MANY
@given(SEEDS, st.sampled_from([0, 2, 6]))
def test_mma_of_finite_numbers(form, seed, spread):
    same_mma(form, *finite_operands(form, np.random.default_rng(seed), 64, spread))


@pytest.mark.parametrize("form", MODELLED)
@MANY
@given(SEEDS)
def test_mma_of_finite_numbers_far_apart(form, seed):
    same_mma(form, *finite_operands(form, np.random.default_rng(seed), 64, 30))


@pytest.mark.parametrize("form", FORMS)
@MANY
@given(SEEDS)
def test_mma_of_any_bits(form, seed):
    """Infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    counts = REGISTERS[form.split(".")[0]]
    same_mma(form, *(rng.integers(0, 2**32, (64, 32, n), dtype=np.uint64).astype(np.uint32) for n in counts))


@pytest.mark.parametrize("instruction", FUNCTIONS)
@MANY
@given(SEEDS)
def test_functions_of_any_bits(instruction, seed):
    x = np.random.default_rng(seed).integers(0, 2**32, 1 << 14, dtype=np.uint64).astype(np.uint32)
    theirs, ours = np.zeros_like(x), np.zeros_like(x)
    code = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r1, %r1, 128, %r2;\n"
    code += "mad.wide.u32 %rd10, %r1, 4, %rd0; mad.wide.u32 %rd11, %r1, 4, %rd1; ld.global.b32 %r3, [%rd10];\n"
    code += f"{instruction} %r4, %r3; st.global.b32 [%rd11], %r4;\n"
    on_gpu(code, [x, theirs], len(x) // 128, 128)
    run(code, [x, ours], block=128, grid=len(x) // 128, numerics="sm_90")
    assert (theirs == ours).all()
