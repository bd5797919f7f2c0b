"""How each step runs: Triton kernels, one module per step, on a CUDA GPU or through
Triton's interpreter.

Triton decides while it is imported whether kernels are compiled or interpreted, from
the environment variable ``TRITON_INTERPRET``. This package chooses the interpreter
where there is no CUDA device; it honors an explicit value of the variable.

Raises ImportError where Triton is missing (macOS, Windows), or was imported earlier
with the other choice, and where the interpreter has no NumPy.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    import triton
    import triton.language as tl
except ImportError as error:
    if error.name == "numpy":
        raise ImportError(
            "flashlib's kernels run on a CPU through Triton's interpreter, which needs "
            "NumPy: python -m pip install numpy"
        ) from error
    raise ImportError(
        "flashlib's kernels need Triton, which runs on Linux; without it "
        "flashlib.reference, flashlib.notebook and the simulators still work"
    ) from error

INTERPRETED = bool(triton.knobs.runtime.interpret)

# Triton decorated its own helpers when it was imported: their type shows its choice.
if INTERPRETED is isinstance(tl.sum, triton.JITFunction):
    raise ImportError(
        "Triton was imported before flashlib.kernels "
        f"{'without' if INTERPRETED else 'with'} its interpreter and cannot change; "
        "restart Python and import flashlib.kernels first, or set TRITON_INTERPRET"
    )


def padded(d):
    """The power of two, at least 16, to which a side of length d of a tile is
    padded.
    """
    return max(16, triton.next_power_of_2(d))
