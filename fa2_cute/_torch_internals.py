"""Functions of torch that are not public, each with what it is for: the one place to look at when torch changes.

There is no public way to ask these questions, or it costs several times what the call that asks may cost.
"""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad


def is_watched() -> bool:
    """Whether a dispatch mode (fake tensors, proxies), a transform (vmap, grad) or torch.jit sees each call."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def is_unwatched() -> bool:
    """Whether torch has no part in this call beside its tensors: none of the above, no autocast, no forward AD.

    Every call waits for this, so it asks in the quickest way. torch.compile traces no further than the first question.
    """
    return likeness_is_all() and _transform() is None and _jit_tracing() is None


def likeness_is_all() -> bool:
    """Whether ``likeness`` of this call's tensors says all that ``is_unwatched`` asks."""
    # Modes are not all in the keys (fake tensors), nor is autocast's dtype.
    return not (_compiling() or _dispatch_modes() or _autocast() or forward_ad._current_level >= 0)


_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_jit_tracing, _autocast = torch._C._get_tracing_state, torch._C._is_any_autocast_enabled


def likeness(*tensors: torch.Tensor) -> Callable[..., bool]:
    """``alike(*others)``: whether others are to torch what ``tensors``, strided ones, are now.

    That is their types, dtypes, devices, shapes, strides, ``requires_grad`` and dispatch keys (among those: lazily
    negated, conjugated, an inference tensor), together with what the thread adds to the keys: inference mode, whether
    there is autocast, transforms, torch.jit. Not where they start, and not grad mode.

    One question in C++ for a third of what it takes to ask each tensor for its attributes: the guard that torch.compile
    puts before a graph. A nested tensor among others of the right type would end the process.
    """
    if len(set(map(id, tensors))) == len(tensors):
        return _guard(*tensors)
    guards = [_guard(x) for x in tensors]  # one guard takes no tensor twice, neither now nor later
    return lambda *others: all(guard(x) for guard, x in zip(guards, others, strict=True))


def _guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    # None: no extent and no stride may change.
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def any_autocast_is_on() -> bool:
    """Whether autocast is on for any kind of device; ``torch.is_autocast_enabled`` asks for one, and takes longer."""
    return torch._C._is_any_autocast_enabled()


def in_forward_ad() -> bool:
    """Whether tensors may have tangents: inside ``torch.autograd.forward_ad.dual_level`` or ``torch.func.jvp``."""
    return forward_ad._current_level >= 0


def below_autograd():
    """A context in which an operator's call goes to the kernel below "Autograd", as its implementation there needs."""
    return torch._C._AutoDispatchBelowAutograd()


# ``function``, which torch.compile must not trace. torch.compiler.disable does the same, but imports the compiler at
# once, which takes a second.
not_compiled = torch._disable_dynamo

# ``(shape, stride, dtype)``: what torch.empty_strided gives on this kind of device (CUDA: the current one), without the
# dispatcher, which takes twice as long again. Inductor's graphs allocate with these.
EMPTY_STRIDED = {"cpu": torch._C._dynamo.guards._empty_strided_cpu, "cuda": torch._C._dynamo.guards._empty_strided_cuda}

# Index of the current CUDA device, for callers who have seen a CUDA tensor; ``torch.cuda.current_device`` sees to it
# first that CUDA is initialised. A build of torch without CUDA has only that.
current_cuda_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
