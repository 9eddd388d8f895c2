"""Functions of torch that are not public, each with what it is for: the one place to look at when torch changes.

There is no public way to ask these questions, or it costs several times what the call that asks may cost.
"""

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
    return not (
        torch.compiler.is_dynamo_compiling()
        or _dispatch_modes()
        or _transform() is not None
        or _jit_tracing() is not None
        or _autocast()
        or forward_ad._current_level >= 0
    )


_dispatch_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_jit_tracing, _autocast = torch._C._get_tracing_state, torch._C._is_any_autocast_enabled


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
