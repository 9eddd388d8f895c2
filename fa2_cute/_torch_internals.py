"""Functions of torch that are not public, each with what it is for: the one place to look at when torch changes.

There is no public way to ask these questions, or it costs several times what the call that asks may cost.
"""

import torch
from torch.autograd import forward_ad


def is_watched() -> bool:
    """Whether a dispatch mode (fake tensors, proxies), a transform (vmap, grad) or torch.jit sees each call."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


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
