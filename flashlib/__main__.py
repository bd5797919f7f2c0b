"""What this machine is and how the kernels run on it: ``python -m flashlib``."""

import platform

import torch

from flashlib import __version__


def report():
    """Three lines of text: versions, GPU, and how the kernels run."""
    try:
        from flashlib import kernels
    except ImportError as error:
        triton, mode = "no triton", f"none: {error}"
    else:
        triton, mode = f"triton {kernels.triton.__version__}", "compiled"
        if kernels.INTERPRETED:
            mode = "interpreted: correct but slow, keep tensors small"
    gpu = "none"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        gpu = f"{device.name}, sm_{device.major}{device.minor}, {memory}"
    python = f"Python {platform.python_version()}"
    versions = f"flashlib {__version__}, {python}, torch {torch.__version__}, {triton}"
    return f"{versions}\nGPU: {gpu}\nkernels: {mode}"


if __name__ == "__main__":
    print(report())
