"""What this machine is and how the kernels run on it: ``python -m flashlib``."""

import importlib.metadata
import importlib.util
import platform

from flashlib import __version__


def report():
    """Three lines of text: versions, GPU, and how kernels run, or what is missing."""
    gpu = "none"
    try:
        import torch
    except ImportError as error:
        mode = f"none: {error}; they need PyTorch: python -m pip install torch"
    else:
        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(0)
            memory = f"{device.total_memory / 2**30:.0f} GiB"
            gpu = f"{device.name}, sm_{device.major}{device.minor}, {memory}"
        mode = mode_of_kernels()
    versions = ", ".join(map(version, ("torch", "triton", "numpy")))
    python = f"Python {platform.python_version()}"
    return f"flashlib {__version__}, {python}, {versions}\nGPU: {gpu}\nkernels: {mode}"


def mode_of_kernels():
    """How the kernels run, or why they cannot."""
    try:
        from flashlib import kernels
    except ImportError as error:
        return f"none: {error}"
    if kernels.INTERPRETED:
        return "interpreted: correct but slow, keep tensors small"
    return "compiled"


def version(name):
    """The package and its version, or that it is not installed."""
    if importlib.util.find_spec(name) is None:
        return f"no {name}"
    (distribution, *_) = importlib.metadata.packages_distributions()[name]
    return f"{name} {importlib.metadata.version(distribution)}"


if __name__ == "__main__":
    print(report())
