"""How each step runs: Triton kernels, one module a step, on a CUDA GPU or through Triton's
interpreter.

Triton decides while it is being imported whether kernels are compiled or interpreted, from the
environment variable ``TRITON_INTERPRET``. This package chooses the interpreter where there is no
CUDA device; an explicit value of the variable is honoured.

Raises ImportError where Triton is missing (macOS, Windows), or was loaded before with the other
choice.
"""

import os
from contextlib import nullcontext

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "flashlib's kernels need Triton, which runs on Linux; without it flashlib.reference, "
        "flashlib.notebook and the simulators still work"
    ) from error

INTERPRETED = bool(triton.knobs.runtime.interpret)

# Triton's own helpers were decorated when it was imported: their type tells which choice it made then.
if INTERPRETED is isinstance(tl.sum, triton.JITFunction):
    raise ImportError(
        f"Triton was imported before flashlib.kernels {'without' if INTERPRETED else 'with'} its interpreter "
        "and cannot change; restart Python and import flashlib.kernels first, or set TRITON_INTERPRET"
    )


def runnable(name, x):
    """Raise ValueError where tensor x cannot reach a kernel: compiled kernels read CUDA memory only."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"{name}: expected a CUDA tensor, got one on the cpu, where kernels run only through Triton's "
            "interpreter (set TRITON_INTERPRET=1 before Python starts)"
        )


def on_device(x):
    """A context in which Triton launches on the device of x, whichever device is current."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def padded(d):
    """The power of two, at least 16, that a side of length d of a tile is padded to."""
    return max(16, triton.next_power_of_2(d))


def computed_dtype(dtype):
    """The dtype in which a kernel computes on tensors of the given dtype: the same, except bfloat16
    under the interpreter.

    The interpreter multiplies the bit patterns of bfloat16, so there it becomes float32 and the
    launcher rounds the result.
    """
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


def widened(*tensors):
    """The tensors in their computed dtype; no copy where that is their own."""
    return tuple(x.to(computed_dtype(x.dtype)) for x in tensors)
