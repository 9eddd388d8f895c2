"""A PTX emulator and sanitizer in numpy.

    module = load(ptx)                     # parse; errors name the line
    kernel = module.kernel()               # or module.kernels["name"]
    stats = launch(kernel, grid=(4,), block=(128,), args=[Tensor(x, "x", (0,), ()), np.float32(1)],
    shared_bytes=0)

``Tensor(array, name, extents, strides, writable)`` is a tensor argument: a numpy array or CPU torch tensor and the
dimensions whose extent (i32) and stride (i64, elements) the kernel takes dynamically. Scalars are numpy scalars.
``launch`` returns ``Stats``; with ``counters=True`` also bank conflicts and sectors by PTX line.

Runs kernels for sm_80 to sm_121 (mma.sync, ldmatrix, cp.async) on the CPU, on the tensors' own memory, and
raises a
named EmulatorError for every hazard: see ``fa2_cute.emulator.errors`` and docs/emulator.md.
"""

from . import errors
from .counters import Counters
from .errors import EmulatorError
from .machine import RESIDENT_THREADS, Stats, launch
from .ptx import Kernel, Module
from .ptx import parse as load
from .tensors import Tensor

__all__ = [
    "RESIDENT_THREADS",
    "Counters",
    "EmulatorError",
    "Kernel",
    "Module",
    "Stats",
    "Tensor",
    "errors",
    "launch",
    "load",
]
