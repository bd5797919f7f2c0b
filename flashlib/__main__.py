"""What this machine is and how the kernels run on it: ``python -m flashlib``."""

import platform

import torch

from flashlib import __version__


def report():
    """Three lines of text: versions, GPU, and whether kernels are compiled, interpreted or absent."""
    try:
        from flashlib import kernels
    except ImportError as error:
        name, mode = "no triton", f"none: {error}"
    else:
        name = f"triton {kernels.triton.__version__}"
        mode = "interpreted: right but slow, keep tensors small" if kernels.INTERPRETED else "compiled"
    gpu = "none"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        gpu = f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"
    python = f"Python {platform.python_version()}"
    return f"flashlib {__version__}, {python}, torch {torch.__version__}, {name}\nGPU: {gpu}\nkernels: {mode}"


if __name__ == "__main__":
    print(report())
